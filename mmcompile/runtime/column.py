"""Hides how a stored row becomes the value of a sample: zero-copy view or copy, crop, (C, H, W) whatever the layout, cast, normalise.

The numbers are those of ToTensor and Normalize bit for bit: value = (x / scale - mean) / std, each step in float32 (in float64 where float64 is
asked for), then rounded once if the dtype asked for is another.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.index import Field
from mmcompile.format.opened import keep
from mmcompile.format.reader import Reader

__all__ = ["ClassColumn", "ImageColumn"]

Rows = npt.NDArray[np.int64]

#: What `dtype=` may ask for, beside the dtype on disk.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Shards whose tensor is kept at hand; together with the maps of the Reader (30,000) well below the kernel's 65,530 for a process.
_HELD = 8192
#: Bytes of floats computed at a time: four passes over them stay in a core's second-level cache (1-2 MiB on machines of today).
_CACHED = 1 << 20


class ImageColumn:
    """An image field, read as (C, H, W) samples and (N, C, H, W) batches of one shape and dtype.

    `dtype`: the dtype on disk (the raw values), a float dtype (the numbers), or None: the numbers where the dataset was built to be normalised when
    read, else what lies on disk.  Raises TypeError or ValueError for a dtype or a crop that cannot be given.
    """

    def __init__(self, reader: Reader, field: Field, dtype: torch.dtype | None, crop: int | tuple[int, int] | None) -> None:
        self._reader, self.name = reader, field.name
        self._hwc = field.layout == "hwc"
        self._brain = field.dtype == "bfloat16"
        stored: torch.dtype = getattr(torch, field.dtype)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.float32, not {dtype!r}")
        if dtype not in (None, stored, *_FLOATS):
            raise ValueError(
                f"dtype {dtype}: field {field.name!r} is stored as {field.dtype} and can be given as {stored} or as one of {list(map(str, _FLOATS))}"
            )
        pending = field.normalize is not None or (stored.is_floating_point and field.scale != 1)
        if dtype is None:
            dtype = stored if stored.is_floating_point or not pending else torch.float32
        self.dtype: torch.dtype = dtype
        self._raw = dtype == stored and not (pending and stored.is_floating_point)
        self._work = torch.float64 if torch.float64 in (dtype, stored) else torch.float32
        self._scale = field.scale
        self._normalize = None if field.normalize is None else [torch.tensor(v, dtype=self._work).view(-1, 1, 1) for v in field.normalize]
        channels, height, width = field.sample_shape
        self._cut: tuple[slice, ...] = ()
        if crop is not None:
            down, across = _centre(crop, height, width, field.name)
            self._cut = () if (down, across) == (slice(0, height), slice(0, width)) else (slice(0, channels), down, across)
            height, width = down.stop - down.start, across.stop - across.start
        self._region = (*self._cut[1:], *self._cut[:1]) if self._hwc else self._cut
        self.shape = (channels, height, width)
        self._held: dict[int, Tensor] = {}
        self._mapped = reader.engine == "mmap"

    def sample(self, row: int, shard: int, local: int) -> Tensor:
        """The image of a row: raw values from a map are a view of the copy-on-write map, all else is a fresh tensor."""
        if not self._mapped:
            return self.own(row)
        rows = self._held.get(shard)
        if rows is None:
            rows = self._hold(shard)
        return rows[local] if self._raw else self._numbers(rows[local : local + 1])[0]

    def own(self, row: int) -> Tensor:
        """The image of a row as the file holds it, in memory of its own."""
        return self.batch(np.array([row], np.int64))[0]

    def batch(self, rows: Rows) -> Tensor:
        """(N, C, H, W) as the file holds it, in memory of its own; channels_last where rows lie so on disk."""
        if self._raw:
            return self._tensor(self._reader.gather(self.name, rows, region=self._region))
        if len(rows):
            self._reader.ready(self.name, int(rows[0]))
        out = _empty((len(rows), *self.shape), self.dtype, self._hwc)
        step = max(1, _CACHED // (4 * math.prod(self.shape)))
        for at in range(0, len(rows), step):
            part = self._tensor(self._reader.gather(self.name, rows[at : at + step], region=self._region))
            self._numbers(part, out[at : at + step])
        return out

    def _hold(self, shard: int) -> Tensor:
        rows = self._tensor(self._reader.view(self.name, shard))
        if self._cut:
            rows = rows[(slice(None), *self._cut)]
        return keep(self._held, shard, rows, _HELD)

    def _tensor(self, rows: npt.NDArray[Any]) -> Tensor:
        """Stored rows as (N, C, H, W); shares their memory."""
        out = torch.from_numpy(rows)
        if self._brain:
            out = out.view(torch.bfloat16)
        return out.permute(0, 3, 1, 2) if self._hwc else out

    def _numbers(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """The settings' values of stored rows, both (N, C, H, W)."""
        if out is None:
            out = torch.empty_like(raw, dtype=self.dtype)
        if self._normalize is None and self._scale == 1:
            return out.copy_(raw)
        work = out if self.dtype == self._work else torch.empty_like(raw, dtype=self._work)
        work.copy_(raw)
        if self._scale != 1:
            work.div_(self._scale)
        if self._normalize is not None:
            mean, std = self._normalize
            work.sub_(mean).div_(std)
        return out if work is out else out.copy_(work)


class ClassColumn:
    """A field of one integer a row, read as Python ints and int64 batches (N,)."""

    dtype = torch.int64
    shape: tuple[int, ...] = ()

    def __init__(self, reader: Reader, field: Field) -> None:
        self._reader, self.name = reader, field.name
        self._held: dict[int, npt.NDArray[Any]] = {}
        self._mapped = reader.engine == "mmap"

    def sample(self, row: int, shard: int, local: int) -> int:
        if not self._mapped:
            return int(self._reader.row(self.name, row))
        rows = self._held.get(shard)
        if rows is None:
            rows = keep(self._held, shard, self._reader.view(self.name, shard), _HELD)
        return int(rows.item(local))

    def own(self, row: int) -> int:
        return self.sample(row, *self._reader.locate(row))

    def batch(self, rows: Rows) -> Tensor:
        return torch.from_numpy(self._reader.gather(self.name, rows))


def _centre(crop: Any, height: int, width: int, name: str) -> tuple[slice, slice]:
    """The rows and columns of a centre crop, its offset rounded as torchvision's (half to even)."""
    size = tuple(crop) if isinstance(crop, tuple | list) else (crop, crop)
    if len(size) != 2 or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in size):
        raise ValueError(f"crop must be a positive int or (height, width), not {crop!r}")
    if size[0] > height or size[1] > width:
        raise ValueError(
            f"crop {size[0]} x {size[1]} (height x width) is larger than field {name!r}, stored as {height} x {width}; "
            "ask for less, or build with a larger crop"
        )
    top, left = (round((n - part) / 2) for n, part in zip((height, width), map(int, size), strict=True))
    return slice(top, top + int(size[0])), slice(left, left + int(size[1]))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, hwc: bool) -> Tensor:
    """A new batch in memory of numpy's, which asks the kernel for huge pages: fresh pages of 4 KiB cost more than computing what fills them."""
    memory = torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype)
    n, c, h, w = shape
    return memory.view(n, h, w, c).permute(0, 3, 1, 2) if hwc else memory.view(shape)
