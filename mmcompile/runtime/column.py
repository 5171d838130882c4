"""Hides how a stored row becomes the value of a sample: zero-copy view or copy, crop, (C, H, W) whatever the layout.

What the values are is `numbers`'s matter.  Batches are gathered and converted piece by piece, so that what was gathered is still in the cache when it
is converted, by the calling thread alone: several threads can fill batches of one column at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.index import Field
from mmcompile.format.opened import keep
from mmcompile.format.reader import Reader
from mmcompile.runtime.numbers import FLOATS, Numbers, as_array, scratch

if TYPE_CHECKING:
    from mmcompile.runtime.cut import Cut

__all__ = ["ClassColumn", "ImageColumn", "check_classes"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Memory = Callable[[int], Tensor]

#: Shards whose tensor is kept at hand; they keep the Reader's maps, of which a process may have 65,530.
_HELD = 8192
#: Stored bytes gathered before they are converted: a quarter of a core's second-level cache (2 MiB on machines of today).
_CACHED = 1 << 19
#: Rows from here on are computed from their map without being gathered first: what a call of numpy's costs is lost in them.
_LARGE = 1 << 16
_FIRST = np.zeros(1, np.int64)


class ImageColumn:
    """An image field, read as (C, H, W) samples and (N, C, H, W) batches of one shape and dtype.

    `dtype`: the dtype on disk (the raw values), a float dtype (the numbers), either as torch's or by its name, or None: the numbers where the dataset
    was built to be normalised when read, else what lies on disk.  Raises TypeError or ValueError for a dtype or a crop that cannot be given.
    `shape` is (C, H, W) of a sample after the centre crop, `stored` the dtype on disk.
    """

    def __init__(self, reader: Reader, field: Field, dtype: torch.dtype | str | None, crop: int | tuple[int, int] | None) -> None:
        self._reader, self.name = reader, field.name
        self._hwc, self._kind = field.layout == "hwc", field.stored
        self._numbers = Numbers(field, _dtype(dtype, field))
        self.stored, self.dtype = self._numbers.stored, self._numbers.dtype
        preprocess = reader.index.settings.get("preprocess")
        baked = isinstance(preprocess, dict) and preprocess.get("normalize") is not None
        #: Are its numbers normalised, here or when the dataset was built?
        self.normalized = field.normalize is not None if not self._numbers.given else self.stored.is_floating_point and baked
        channels, height, width = field.sample_shape
        self._centre: tuple[slice, ...] = ()
        if crop is not None:
            down, across = _centre(crop, height, width, field.name)
            self._centre = () if (down, across) == (slice(0, height), slice(0, width)) else (slice(0, channels), down, across)
            height, width = down.stop - down.start, across.stop - across.start
        self._region = (*self._centre[1:], *self._centre[:1]) if self._hwc else self._centre
        self.shape = (channels, height, width)
        #: Bytes of a stored row after the centre crop.
        self.row_bytes = math.prod(self.shape) * self.stored.itemsize
        self._held: dict[int, Tensor] = reader.views()
        self._mapped = reader.engine == "mmap"

    def sample(self, row: int, shard: int, local: int) -> Tensor:
        """The image of a row: raw values from a map are a view of the copy-on-write map, all else is a fresh tensor."""
        if not self._mapped:
            return self.own(row)
        if not self._numbers.given:
            stored = self._reader.view(self.name, shard)[local : local + 1]
            if self._region:
                stored = np.ascontiguousarray(stored[(slice(None), *self._region)])
            out = self.empty(1)
            self._numbers.fill(stored, self._rows(out))
            return out[0]
        rows = self._held.get(shard)
        if rows is None:
            rows = self._hold(shard)
        return rows[local]

    def own(self, row: int) -> Tensor:
        """The image of a row as the file holds it, in memory of its own."""
        return self.batch(np.array([row], np.int64))[0]

    def empty(self, n: int, memory: Memory | None = None, *, size: tuple[int, int] | None = None, raw: bool = False) -> Tensor:
        """A batch to be filled: (n, C, h, w), channels_last where rows lie so on disk, of undefined content.

        `memory` lends its bytes, uint8 (nbytes,); by default they are numpy's, which asks the kernel for huge pages: fresh pages of 4 KiB cost more
        than computing what fills them.  `size` (h, w) where a cut gives another than the sample's, `raw` for stored values.
        """
        channels, height, width = (self.shape[0], *(size or self.shape[1:]))
        dtype = self.stored if raw else self.dtype
        nbytes = n * channels * height * width * dtype.itemsize
        lent = _fresh(nbytes) if memory is None else memory(nbytes)
        if self._hwc:
            return lent.view(dtype).view(n, height, width, channels).permute(0, 3, 1, 2)
        return lent.view(dtype).view(n, channels, height, width)

    def batch(self, rows: Rows, out: Tensor | None = None, *, cut: Cut | None = None, raw: bool = False, times: Any = None) -> Tensor:
        """The images of rows as the files hold them, into `out` (made by `empty`; fresh memory when None), which is returned: (N, C, h, w).

        `cut` augments them, `raw` gives stored values instead of numbers.  Seconds spent are added to `times.gathered_s` and `times.converted_s`.
        """
        raw = raw or self._numbers.given
        size = None if cut is None else cut.size
        if out is None:
            if len(rows):  # before memory is asked for
                self._reader.ready(self.name, int(rows[0]))
            out = self.empty(len(rows), size=size, raw=raw)
        target = self._memory(out, len(rows), size or self.shape[1:], raw)
        began = time.perf_counter()
        if raw:
            self._gather(rows, cut, target)
            if times is not None:
                times.gathered_s += time.perf_counter() - began
            return out
        found = self._reader.flat(self.name, rows) if cut is None and not self._region and target[:1].size * self._kind.itemsize >= _LARGE else None
        if found is not None:  # large rows are computed straight from their map, page faults and all
            self._numbers.fill_rows(*found, target)
            if times is not None:
                times.converted_s += time.perf_counter() - began
            return out
        for piece, part in self._pieces(rows, cut, target.shape[1:]):
            gathered = time.perf_counter()
            self._numbers.fill(part, target[piece])
            converted = time.perf_counter()
            if times is not None:
                times.gathered_s += gathered - began
                times.converted_s += converted - gathered
            began = converted
        return out

    def numbers(self, raw: Tensor) -> Tensor:
        """The settings' values of stored ones (N, C, H, W), on the device where they are: the same bits on each."""
        return self._numbers.of(raw)

    def _pieces(self, rows: Rows, cut: Cut | None, shape: tuple[int, ...]) -> Iterator[tuple[slice, Array]]:
        """Stored rows of this shape, as many at a time as stay in the cache: which they are, and memory that the next piece may overwrite."""
        row_bytes = math.prod(shape) * self._kind.itemsize
        step = max(1, _CACHED // max(1, row_bytes))
        for at in range(0, len(rows), step):
            piece = slice(at, min(at + step, len(rows)))
            part = scratch("rows", (piece.stop - at) * row_bytes).view(self._kind).reshape(-1, *shape)
            self._gather(rows[piece], None if cut is None else cut[piece], part)
            yield piece, part

    def _gather(self, rows: Rows, cut: Cut | None, out: Array) -> None:
        """Stored rows as they lie on disk, cut, into `out`."""
        if cut is None:
            self._reader.gather(self.name, rows, out=out, region=self._region)
            return
        from mmcompile.runtime.cut import cut_rows  # reading alone does not load it

        found = self._reader.flat(self.name, rows)
        if found is not None:  # a crop is a view of the map, copied once
            images, at = found
            cut_rows(images[(slice(None), *self._region)], at, cut, out, self.stored, self._hwc)
            return
        channels, height, width = self.shape
        whole = (height, width, channels) if self._hwc else (channels, height, width)
        image = scratch("whole", math.prod(whole) * self._kind.itemsize).view(self._kind).reshape(1, *whole)
        for i in range(len(rows)):
            self._reader.gather(self.name, rows[i : i + 1], out=image, region=self._region)
            cut_rows(image, _FIRST, cut[i : i + 1], out[i : i + 1], self.stored, self._hwc)

    def _memory(self, out: Tensor, n: int, size: tuple[int, ...], raw: bool) -> Array:
        """`out` as an array of rows as they lie on disk.  Raises ValueError where it is not what `empty` makes."""
        wanted, dtype = (n, self.shape[0], *size), self.stored if raw else self.dtype
        fits = out.shape == wanted and out.dtype == dtype and out.device.type == "cpu"
        if not fits or not (out.permute(0, 2, 3, 1) if self._hwc else out).is_contiguous():
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype}, strides {out.stride()}, on {out.device}; field {self.name!r} fills {wanted} of {dtype}, "
                f"{'channels_last' if self._hwc else 'contiguous'}, in memory of the CPU: make it with empty()"
            )
        return self._rows(out)

    def _rows(self, values: Tensor) -> Array:
        """The memory of (N, C, H, W) as rows as they lie on disk."""
        return as_array(values.permute(0, 2, 3, 1) if self._hwc else values)

    def _hold(self, shard: int) -> Tensor:
        with torch.inference_mode(False):  # it is kept, and may be trained on later
            rows = torch.from_numpy(self._reader.view(self.name, shard))
            if self.stored == torch.bfloat16:
                rows = rows.view(torch.bfloat16)
            if self._hwc:
                rows = rows.permute(0, 3, 1, 2)
            if self._centre:
                rows = rows[(slice(None), *self._centre)]
        return keep(self._held, shard, rows, min(_HELD, self._reader.most_shards))


class ClassColumn:
    """A field of one integer a row, read as Python ints and int64 batches (N,)."""

    dtype = stored = torch.int64
    shape: tuple[int, ...] = ()
    row_bytes = 8
    normalized = False

    def __init__(self, reader: Reader, field: Field) -> None:
        self._reader, self.name = reader, field.name
        self._held: dict[int, npt.NDArray[Any]] = reader.views()
        self._mapped = reader.engine == "mmap"

    def sample(self, row: int, shard: int, local: int) -> int:
        if not self._mapped:
            return int(self._reader.row(self.name, row))
        rows = self._held.get(shard)
        if rows is None:
            rows = keep(self._held, shard, self._reader.view(self.name, shard), min(_HELD, self._reader.most_shards))
        return int(rows.item(local))

    def own(self, row: int) -> int:
        return self.sample(row, *self._reader.locate(row))

    def empty(self, n: int, memory: Memory | None = None, *, size: tuple[int, int] | None = None, raw: bool = False) -> Tensor:
        """A batch to be filled: int64 (n,), in what `memory` lends.  `size` and `raw` say nothing of a class."""
        return torch.empty(n, dtype=torch.int64) if memory is None else memory(8 * n).view(torch.int64)

    def batch(self, rows: Rows, out: Tensor | None = None, *, cut: Cut | None = None, raw: bool = False, times: Any = None) -> Tensor:
        """The classes of rows, into `out` (made by `empty`), which is returned."""
        began = time.perf_counter()
        if out is None:
            if len(rows):
                self._reader.ready(self.name, int(rows[0]))
            out = self.empty(len(rows))
        self._reader.gather(self.name, rows, out=out.numpy())
        if times is not None:
            times.gathered_s += time.perf_counter() - began
        return out

    def numbers(self, raw: Tensor) -> Tensor:
        return raw


def _fresh(nbytes: int) -> Tensor:
    return torch.from_numpy(np.empty(nbytes + 1, np.uint8)[:nbytes])  # an empty array has strides that torch cannot view


def _dtype(dtype: Any, field: Field) -> torch.dtype | None:
    """What was asked for, as a dtype of torch's that the field can be given as."""
    stored = getattr(torch, field.dtype)
    choices = (stored, *(d for d in FLOATS if d != stored))
    if isinstance(dtype, str):
        found = next((d for d in choices if str(d) == f"torch.{dtype}"), None)
    elif dtype is None or isinstance(dtype, torch.dtype):
        found = dtype
    else:
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, or its name, not {dtype!r}")
    if dtype is not None and found not in choices:
        raise ValueError(f"dtype {dtype}: field {field.name!r} is stored as {field.dtype} and can be given as one of {list(map(str, choices))}")
    return found


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


def check_classes(root: object, found: Sequence[str] | None, wanted: Sequence[str]) -> None:
    """Are these the classes that were asked for, each with its number?  Raises TypeError or ValueError, naming the first that differs."""
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise TypeError(f"classes is a sequence of names, as another dataset's .classes, not {wanted!r:.80}")
    if found is None:
        raise ValueError(f"{root}: has no classes, {len(wanted):,} were asked for")
    if list(found) == list(wanted):
        return
    number = next((i for i, (mine, its) in enumerate(zip(found, wanted, strict=False)) if mine != its), min(len(found), len(wanted)))
    mine, its = (repr(names[number]) if number < len(names) else "none" for names in (found, wanted))
    raise ValueError(
        f"{root}: class {number} is {mine}, expected {its} ({len(found):,} classes, expected {len(wanted):,}); "
        "build both with the class map of one of them: `mmcompile build RAW OUT --classes-from THE-OTHER`"
    )
