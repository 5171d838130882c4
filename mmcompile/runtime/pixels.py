"""Hides how pictures and masks are read: whole, their centre, or cut and scaled as an augmentation says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.index import Field, Index
from mmcompile.format.reader import Reader
from mmcompile.runtime.column import Column
from mmcompile.runtime.numbers import scratch

if TYPE_CHECKING:
    from mmcompile.runtime.cut import Cut

__all__ = ["ImageColumn", "MaskColumn", "PixelColumn", "centre", "field_setting"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_FIRST = np.zeros(1, np.int64)


class PixelColumn(Column):
    """Pixels: `shape` is that of a sample after the centre crop.  Raises ValueError for a crop that cannot be made."""

    #: The last axes of a sample, along which it is cropped.
    axes = 2
    #: The class id beyond what is cut, of class ids; None for colours.
    ids: int | None = None

    def __init__(self, reader: Reader, field: Field, dtype: torch.dtype | str | None, crop: int | tuple[int, ...] | None) -> None:
        super().__init__(reader, field, dtype)
        if crop is not None:
            cuts = centre(crop, self.spatial, field.name)
            lead = tuple(slice(0, n) for n in self.shape[: -self.axes])
            if cuts != tuple(slice(0, n) for n in self.spatial):
                self._region = (*cuts, *lead) if self._hwc else (*lead, *cuts)
            self.shape = (*self.shape[: -self.axes], *(cut.stop - cut.start for cut in cuts))

    @property
    def spatial(self) -> tuple[int, ...]:
        return self.shape[-self.axes :]

    def cut(self, raw: Tensor, cut: Cut) -> Tensor:
        """The cuts of stored values (N, …, H, W), on the device where they are."""
        from mmcompile.runtime.cut import apply  # reading alone does not load it

        return apply(raw, cut) if self.ids is None else apply(raw[:, None], cut, self.ids)[:, 0]

    def _gather(self, rows: Rows, cut: Any, out: Array) -> None:
        if cut is None:
            super()._gather(rows, cut, out)
            return
        from mmcompile.runtime.cut import cut_rows  # reading alone does not load it

        found = self._reader.flat(self.field, rows)
        if found is not None:  # a crop is a view of the map, copied once
            images, at = found
            cut_rows(self._planes(images[(slice(None), *self._region)]), at, cut, self._planes(out), self.stored, self._hwc, self.ids)
            return
        *lead, height, width = self.shape
        whole = (height, width, *lead) if self._hwc else (*lead, height, width)
        image = scratch("whole", math.prod(whole) * self._kind.itemsize).view(self._kind).reshape(1, *whole)
        for i in range(len(rows)):
            self._reader.gather(self.field, rows[i : i + 1], out=image, region=self._region)
            cut_rows(self._planes(image), _FIRST, cut[i : i + 1], self._planes(out[i : i + 1]), self.stored, self._hwc, self.ids)

    def _planes(self, rows: Array) -> Array:
        """Rows as images are: a mask has one channel."""
        return rows if self.ids is None else rows[:, None]


class ImageColumn(PixelColumn):
    """An image, read as (C, H, W) samples and (N, C, H, W) batches."""

    def __init__(self, reader: Reader, field: Field, dtype: torch.dtype | str | None, crop: int | tuple[int, ...] | None) -> None:
        super().__init__(reader, field, dtype, crop)
        preprocess = reader.index.settings.get("preprocess")
        baked = isinstance(preprocess, dict) and preprocess.get("normalize") is not None
        self.normalized = field.normalize is not None if not self._numbers.given else self.stored.is_floating_point and baked


class MaskColumn(PixelColumn):
    """Class ids, read as (H, W) samples and (N, H, W) batches of the dtype on disk."""

    def __init__(self, reader: Reader, field: Field, crop: int | tuple[int, ...] | None) -> None:
        super().__init__(reader, field, None, crop)
        fill = field_setting(reader.index, field.name, "fill")
        self.ids = fill if isinstance(fill, int) else 0


def centre(crop: Any, shape: tuple[int, ...], name: str) -> tuple[slice, ...]:
    """The part of each axis that a centre crop keeps, its offset rounded as torchvision's (half to even)."""
    axes = "(height, width)" if len(shape) == 2 else "(depth, height, width)"
    size = tuple(crop) if isinstance(crop, tuple | list) else (crop,) * len(shape)
    if len(size) != len(shape) or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in size):
        raise ValueError(f"crop must be a positive int or {axes}, not {crop!r}, for field {name!r}")
    if any(part > n for part, n in zip(size, shape, strict=True)):
        wanted, there = (" x ".join(map(str, numbers)) for numbers in (size, shape))
        said = f"crop {wanted} {axes.replace(', ', ' x ')} is larger than field {name!r}, stored as {there}"
        raise ValueError(f"{said}; ask for less, or build with a larger crop")
    starts = [round((n - part) / 2) for n, part in zip(shape, map(int, size), strict=True)]
    return tuple(slice(start, start + int(part)) for start, part in zip(starts, size, strict=True))


def field_setting(index: Index, field: str, name: str) -> Any:
    """What the settings of a build say of one field; None where they say nothing."""
    found: Any = index.settings
    for key in ("preprocess", "fields", field, name):
        found = found.get(key) if isinstance(found, dict) else None
    return found
