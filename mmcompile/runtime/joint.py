"""Hides what `transforms` gets of a sample with masks, boxes or keypoints: torchvision's types, where it is there, and lists as long as they are.

torchvision is imported with the first sample that needs it, and not at all for other datasets.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmcompile.format.index import Field

__all__ = ["Joint"]


class Joint:
    """Makes the values of a sample, of `fields` in order, what a transform of all of them together expects.  False where that is what they are.

    Of all fields with a count only the rows that are filled: their number is the count's where that is in use, else where the last box ends that is
    not 0.  With torchvision images, masks and boxes are its Image, Mask and BoundingBoxes (XYXY), on a canvas of the size of the picture, and
    keypoints a pair: KeyPoints (…, 2) and whether they are visible (…,); without, or with one that is too old to know a type, tensors.
    `size` is (height, width) of the main picture, for samples without pixels.
    """

    def __init__(self, fields: Sequence[Field], size: tuple[int, int] | None) -> None:
        self._size = size
        meanings = [f.meaning for f in fields]
        at = {f.name: i for i, f in enumerate(fields)}
        self._picture = next((i for i, meaning in enumerate(meanings) if meaning in ("image", "mask")), None)
        self._wraps = any(meaning in ("mask", "boxes", "keypoints") for meaning in meanings)
        self._meanings = meanings
        #: (the count's place, or that of boxes of this count; the places of what has it)
        self._counted: list[tuple[int, list[int]]] = []
        lists = [f for f in fields if f.meaning != "mask"]
        for name in dict.fromkeys(f.count for f in lists if f.count is not None):
            said = at.get(name, next((at[f.name] for f in lists if f.count == name and f.meaning == "boxes"), None))
            if said is not None:
                self._counted.append((said, [at[f.name] for f in lists if f.count == name]))

    def __bool__(self) -> bool:
        return self._wraps or bool(self._counted)

    def __call__(self, values: list[Any]) -> list[Any]:
        for said, places in self._counted:
            n = _filled(values[said])
            for i in places:
                values[i] = values[i][:n]
        types = _types() if self._wraps else None
        if types is None:
            return values
        canvas = self._size if self._picture is None else tuple(values[self._picture].shape[-2:])
        return [_wrapped(types, meaning, value, canvas) for meaning, value in zip(self._meanings, values, strict=True)]


def _filled(said: Tensor) -> int:
    """How many rows of a list are filled, by its count or by its boxes (K, 4)."""
    if not said.ndim:
        return max(0, int(said))
    some = torch.nonzero(said.any(-1))
    return int(some[-1]) + 1 if len(some) else 0


@functools.cache
def _types() -> Any:
    """torchvision.tv_tensors; None where it is missing, or does not fit this torch."""
    try:
        return importlib.import_module("torchvision.tv_tensors")
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None


def _wrapped(types: Any, meaning: str, value: Any, canvas: tuple[int, ...] | None) -> Any:
    """A value as torchvision's type of its meaning, which shares its memory."""
    if meaning == "image":
        return types.Image(value)
    if meaning == "mask":
        return types.Mask(value)
    if meaning == "boxes" and canvas is not None:
        return types.BoundingBoxes(value, format="XYXY", canvas_size=canvas)
    if meaning == "keypoints" and canvas is not None and hasattr(types, "KeyPoints"):
        return types.KeyPoints(value[..., :2], canvas_size=canvas), value[..., 2]
    return value
