"""Hides how boxes and keypoints follow what is cut from their picture, and what becomes of the lists that they stand in.

A box is clipped to what is left of the picture; where nothing of it is left (or less than the dataset was built to keep) its row goes out of all
lists of its count, those behind it move up, the count says how many there are, and a mask of that count has their new numbers.  A keypoint outside
is not to be seen.  The same on every device, and for a centre crop what a build with that crop stores, but for the rounding of a resize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.index import Field, Index
from mmcompile.runtime.column import Column
from mmcompile.runtime.cut import Cut
from mmcompile.runtime.numbers import signed
from mmcompile.runtime.pixels import centre, field_setting

__all__ = ["Spatial"]

#: torch computes up to 32,768 numbers in the calling thread.
_SERIAL = 1 << 15


@dataclass
class _List:
    """The parts that have rows of one count: their places, and what an empty row of each holds, (1, K, …); masks of the rows' numbers."""

    count: int | None = None
    masks: list[int] = field(default_factory=list)
    empty: dict[int, Tensor] = field(default_factory=dict)


class Spatial:
    """Moves the values of the fields in use that belong to a picture, its pixels apart, which their columns cut.

    `columns` are those of a sample in order, `crop` is the centre crop that is read.  `size` is (height, width) of the sample's main picture as it is
    read, None where the dataset has none.  Raises ValueError for a crop, and `check` for what is to be augmented, that a field in use cannot follow.
    """

    def __init__(self, columns: Sequence[Column], index: Index, crop: int | tuple[int, ...] | None, where: str) -> None:
        self._where = where
        known = {f.name: f for f in index.fields}
        at = {column.field: i for i, column in enumerate(columns)}
        self._picture = next((f for f in index.fields if f.meaning in ("image", "mask")), None)
        self._boxes = [(at[f.name], _share(index, f.name), f.count) for f in index.fields if f.meaning == "boxes" and f.name in at]
        self._points = [at[f.name] for f in index.fields if f.meaning == "keypoints" and f.name in at]
        self._width = max((math.prod(known[name].sample_shape) for name in at if known[name].meaning in ("boxes", "keypoints")), default=1)
        self._lost = self._left_behind(index.fields, at)
        self._lists: dict[str, _List] = {}
        if self._lost is None:
            for name in {count for _, _, count in self._boxes if count is not None}:
                members = [f for f in index.fields if f.count == name and f.name in at]
                empty = {at[f.name]: _empty(f, columns[at[f.name]]) for f in members if f.meaning != "mask"}
                self._lists[name] = _List(at.get(name), [at[f.name] for f in members if f.meaning == "mask"], empty)
        self._fills: dict[tuple[int, torch.device], Tensor] = {}
        self._crop: tuple[slice, slice] | None = None
        self.size: tuple[int, int] | None = None
        if self._picture is None and crop is not None:
            self.check("crop")
        if self._picture is not None:
            height, width = self.size = self._picture.sample_shape[-2], self._picture.sample_shape[-1]
            if crop is not None:
                down, across = centre(crop, (height, width), self._picture.name)
                self.size = down.stop - down.start, across.stop - across.start
                if self.size != (height, width):
                    self._crop = down, across
                    self.check("crop")
                    for f in (known[name] for name in at if known[name].meaning == "mask"):
                        if f.sample_shape != (height, width):
                            raise ValueError(self._differs("crop", f.name, f.sample_shape, self._picture.name, (height, width)))

    def _left_behind(self, fields: Sequence[Field], at: dict[str, int]) -> str | None:
        """Why the fields in use cannot follow a picture; None where all can."""
        if self._picture is None and (self._boxes or self._points):
            return "boxes and keypoints count pixels of an image, and the dataset has none"
        for box in (f for f in fields if f.meaning == "boxes" and f.count is not None):
            lists = [f for f in fields if f.count == box.count and f.meaning != "mask"]
            if used := [f.name for f in fields if (f in lists or f.name == box.count) and f.name in at]:
                if box.name not in at:
                    return (
                        f"field {used[0]!r} has a number for each box of {box.name!r}, some of which go: add {box.name!r} to fields=, or leave it out"
                    )
                if odd := [f for f in lists if f.sample_shape[0] != box.sample_shape[0]]:
                    return f"field {odd[0].name!r} has {odd[0].sample_shape[0]} rows, {box.name!r} of the same count {box.sample_shape[0]}"
        return None

    @property
    def crops(self) -> bool:
        """Does the centre crop move anything here?"""
        return self._crop is not None and self.moves

    @property
    def moves(self) -> bool:
        """Is there anything to be moved?"""
        return bool(self._boxes or self._points)

    def check(self, what: str) -> None:
        """ValueError where a field in use cannot follow."""
        if self._lost is not None:
            raise ValueError(f"{self._where}: {what} moves all that belongs to a picture together, and {self._lost}")

    def _differs(self, what: str, name: str, shape: tuple[int, ...], other: str, size: tuple[int, int]) -> str:
        return (
            f"{self._where}: {what} moves all that belongs to a picture together, and field {name!r} is {shape[-2]} x {shape[-1]} (height x width) "
            f"where {other!r} is {size[0]} x {size[1]}; build them with one geometry, or leave one out with fields="
        )

    def follow(self, parts: list[Tensor], n: int, cut: Cut | None = None) -> None:
        """Move the values of n samples as they are stored, (n, …) for each column, in place: by the centre crop, then by a cut of what it left."""
        if not self.moves or not n:
            return
        if self._crop is not None:
            (top, tall), (left, wide) = ((part.start, part.stop - part.start) for part in self._crop)
            down, across, height, width = (np.full(n, value, np.int64) for value in (top, left, tall, wide))
            self._moved(parts, Cut(down, across, height, width, np.zeros(n, np.bool_), (tall, wide)))
        if cut is not None:
            self._moved(parts, cut)

    def _moved(self, parts: list[Tensor], cut: Cut) -> None:
        device = parts[(*(i for i, _, _ in self._boxes), *self._points)[0]].device
        where = torch.from_numpy(_places(cut)).to(device)
        step = max(1, _SERIAL // self._width) if device.type == "cpu" else len(cut)
        for i in range(0, len(cut), step):
            self._move([part[i : i + step] for part in parts], where[i : i + step])

    def _move(self, parts: list[Tensor], where: Tensor) -> None:
        stays: dict[str, Tensor] = {}
        for i, share, count in self._boxes:
            stay = _move_boxes(parts[i], where, share)
            if count is not None:
                stays[count] = stays[count] & stay if count in stays else stay
        for i in self._points:
            _move_points(parts[i], where)
        for name, stay in stays.items():
            self._close(parts, self._lists[name], stay)

    def _close(self, parts: list[Tensor], lists: _List, stay: Tensor) -> None:
        """Take rows out of lists: those behind move up, and what is left over is as empty rows are."""
        left = stay.sum(1)
        order = torch.sort((~stay).to(torch.uint8), dim=1, stable=True).indices
        beyond = torch.arange(stay.shape[1], device=stay.device) >= left[:, None]
        n = torch.arange(len(stay), device=stay.device)[:, None]
        for i, empty in lists.empty.items():
            values = signed(parts[i])
            fill = self._fills.get((i, stay.device))
            if fill is None:
                fill = self._fills[i, stay.device] = signed(empty).to(stay.device)
            values.copy_(torch.where(beyond.view(*beyond.shape, *(1,) * (values.ndim - 2)), fill, values[n, order]))
        for i in lists.masks:
            _renumber(parts[i], stay)
        if lists.count is not None:
            parts[lists.count].copy_(left)


def _share(index: Index, name: str) -> float:
    """The part of a box that must be left for it to stay."""
    share = field_setting(index, name, "min_visibility")
    return float(share) if isinstance(share, int | float) else 0.0


def _renumber(masks: Tensor, stay: Tensor) -> None:
    """Give the pixels of masks (N, H, W), in place, the numbers that their rows (N, K) have where those that do not stay are gone, 0 to theirs."""
    numbers = torch.cumsum(stay, 1) * stay
    pixels = signed(masks).view(len(masks), -1)
    for i in range(len(pixels)) if masks.device.type == "cpu" else (slice(None),):
        table = numbers[i].view(-1, stay.shape[1])
        for ids in torch.split(pixels[i].view(len(table), -1), _SERIAL if masks.device.type == "cpu" else pixels.shape[1], 1):
            at = ids.to(torch.int64) - 1
            known = (at >= 0) & (at < stay.shape[1])
            ids.copy_(torch.where(known, table.gather(1, at.clamp(0, stay.shape[1] - 1)), at + 1))


def _empty(spec: Field, column: Column) -> Tensor:
    """A list (1, K, …) of rows that are not filled, as its values are read."""
    raw = torch.zeros((1, *spec.sample_shape), dtype=column.stored, device="cpu")
    if spec.empty:
        signed(raw).fill_(spec.empty)
    return column.numbers(raw)


def _places(cut: Cut) -> npt.NDArray[np.float32]:
    """Of each cut, x before y: where it begins and ends, what its pixels are scaled by, the size of what is made; and is it mirrored?  (N, 9)."""
    h, w = cut.size
    sides: Any = [cut.left, cut.top, cut.left + cut.width, cut.top + cut.height, w / cut.width, h / cut.height]
    sides += [np.full(len(cut), n) for n in (w, h)] + [cut.flip]
    return np.stack(sides, 1).astype(np.float32)


def _place(where: Tensor, axes: int) -> tuple[Tensor, ...]:
    """(begin, end, scale, size), each (N, 1 …, 2), and whether it is mirrored, (N, 1 …), for points of so many axes."""
    shaped = where.view(len(where), *(1,) * (axes - 2), 9)
    return shaped[..., 0:2], shaped[..., 2:4], shaped[..., 4:6], shaped[..., 6:8], shaped[..., 8] > 0


def _move_boxes(boxes: Tensor, where: Tensor, share: float) -> Tensor:
    """Boxes (N, K, 4) to where a cut brings them, clipped, in place; returns which of them are still there: bool (N, K)."""
    begin, end, scale, size, flip = _place(where, 4)
    corners = boxes.view(*boxes.shape[:2], 2, 2)
    inside = torch.maximum(torch.minimum(corners, end), begin)
    left = _area(inside)
    stay = left > 0
    if share:
        stay &= left >= share * _area(corners)
    at = torch.minimum((inside - begin) * scale, size)
    x = at[..., 0]
    at[..., 0] = torch.where(flip, size[..., 0] - x.flip(-1), x)
    boxes.copy_(at.view(boxes.shape))
    return stay


def _area(corners: Tensor) -> Tensor:
    side = corners[:, :, 1] - corners[:, :, 0]
    return side[..., 0] * side[..., 1]


def _move_points(points: Tensor, where: Tensor) -> None:
    """Keypoints (N, …, 3) to where a cut brings them, in place; one outside is not to be seen, and one that is 0 and not to be seen stays 0."""
    flat = points.view(len(points), -1, 3)
    begin, end, scale, size, flip = _place(where, 3)
    xy, seen = flat[..., :2], flat[..., 2]
    known = (seen > 0) | (xy != 0).any(-1)
    inside = ((xy >= begin) & (xy < end)).all(-1)
    at = (xy - begin) * scale
    at[..., 0] = torch.where(flip, size[..., 0] - at[..., 0], at[..., 0])
    flat[..., 2] = torch.where(inside, seen, 0)
    flat[..., :2] = torch.where(known[..., None], at, 0)
