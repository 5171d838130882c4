"""Hides how a stored row becomes a value of a sample: zero-copy view or copy, crop, (C, H, W) whatever the layout.

What the values are is `numbers`'s matter.  Batches are gathered and converted piece by piece, so that what was gathered is still in the cache when it
is converted, by the calling thread alone: several threads can fill batches of one column at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.errors import CorruptShardError
from mmcompile.format.fields import PIXELS
from mmcompile.format.index import Field
from mmcompile.format.opened import keep
from mmcompile.format.reader import Reader
from mmcompile.runtime.numbers import FLOATS, Numbers, as_array, scratch

if TYPE_CHECKING:
    from mmcompile.runtime.cut import Cut
    from mmcompile.runtime.patch import Patch

__all__ = ["ClassColumn", "Column", "TextColumn", "check_classes"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Memory = Callable[[int], Tensor]

#: Shards whose tensor is kept at hand; they keep the Reader's maps, of which a process may have 65,530.
_HELD = 8192
#: Stored bytes gathered before they are converted: a quarter of a core's second-level cache (2 MiB on machines of today).
_CACHED = 1 << 19
#: Rows from here on are computed from their map without being gathered first: what a call of numpy's costs is lost in them.
_LARGE = 1 << 16


class Column:
    """A field, read as samples and batches (N, *shape) of one dtype.

    `dtype`: the dtype on disk (the raw values), a float dtype (the numbers), either as torch's or by its name, or None: the numbers where the dataset
    was built to be normalised when read, else what lies on disk.  A float dtype says nothing of integers that are not normalised: counts, times and
    categories stay what they are, and the ids in a volume beside the main image or volume; `takes` is False then.  Raises TypeError or ValueError for
    a dtype that cannot be given.  `stored` is the dtype on disk.
    """

    #: Is it text?  Strings are made of it when it is handed out, and no device needs its bytes.
    text = False

    def __init__(self, reader: Reader, field: Field, dtype: torch.dtype | str | None) -> None:
        self._reader = reader
        #: The field that is read, and what its value is called in a sample.
        self.field = self.name = field.name
        self.meaning = field.meaning
        #: Variants of each row, each of which is a row of `reader`; None where there is but the one.
        self.views = field.views
        if field.views is not None:
            field = replace(field, shape=field.shape[1:], views=None)
        self._hwc, self._kind = field.layout == "hwc", field.stored
        main = next((f.name for f in reader.index.fields if f.meaning in PIXELS), None)
        numbers = field.meaning == "image" or (field.meaning == "volume" and field.name == main)
        wanted, stored = _dtype(dtype, field, numbers), getattr(torch, field.dtype)
        is_float = stored.is_floating_point or field.scale != 1 or field.normalize is not None
        self.takes = numbers or wanted == stored or (wanted in FLOATS and is_float)
        self._numbers = Numbers(field, wanted if self.takes else None)
        self.stored, self.dtype = self._numbers.stored, self._numbers.dtype
        #: Are the numbers of an image or volume normalised, here or when the dataset was built?
        self.normalized = False
        self._region: tuple[slice, ...] = ()
        self.shape = field.sample_shape
        self._held: dict[int, Tensor] = reader.views()
        self._mapped = reader.engine == "mmap"

    @property
    def spatial(self) -> tuple[int, ...]:
        """The last axes of a sample, along which it is cropped; none of what is no image or volume."""
        return ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored sample."""
        return math.prod(self.shape) * self.stored.itemsize

    def sample(self, row: int, shard: int, local: int) -> Any:
        """The value of a row: raw values from a map are a view of the copy-on-write map, all else is a fresh tensor."""
        if not self._mapped:
            return self.own(row)
        if not self._numbers.given:
            stored = self._stored(shard, local)
            if self._region:
                lead: tuple[Any, ...] = (...,)
                stored = np.ascontiguousarray(stored[lead + self._region])
            out = self.empty(1)
            self._fill(stored, self._rows(out))
            return out[0]
        rows = self._held.get(shard)
        if rows is None:
            rows = self._hold(shard)
        return rows[local]

    def own(self, row: int) -> Any:
        """The value of a row as the file holds it, in memory of its own."""
        return self.batch(np.array([row], np.int64))[0]

    def samples(self, batch: Tensor) -> Sequence[Any]:
        """The values of the samples of a batch (N, *shape): views of it."""
        return batch.unbind(0)

    def empty(self, n: int, memory: Memory | None = None, *, size: tuple[int, ...] | None = None, raw: bool = False) -> Tensor:
        """A batch to be filled: (n, *shape), of an image channels_last where rows lie so on disk; of undefined content.

        `memory` lends its bytes, uint8 (nbytes,); by default they are numpy's, which asks the kernel for huge pages: fresh pages of 4 KiB cost more
        than computing what fills them.  `size` (h, w) where a cut gives another than the image's, `raw` for stored values.
        """
        shape = self.shape if size is None else (*self.shape[: -len(size)], *size)
        dtype = self.stored if raw else self.dtype
        nbytes = n * math.prod(shape) * dtype.itemsize
        lent = _fresh(nbytes) if memory is None else memory(nbytes)
        if self._hwc:
            return lent.view(dtype).view(n, *shape[:-3], *shape[-2:], shape[-3]).movedim(-1, -3)
        return lent.view(dtype).view(n, *shape)

    def batch(self, rows: Rows, out: Tensor | None = None, *, cut: Cut | Patch | None = None, raw: bool = False, times: Any = None) -> Tensor:
        """The values of rows as the files hold them, into `out` (made by `empty`; fresh memory when None), which is returned: (N, *shape).

        `cut` augments images, `raw` gives stored values instead of numbers.  Seconds spent are added to `times.gathered_s` and `times.converted_s`.
        """
        raw = raw or self._numbers.given
        size = None if cut is None else cut.size
        if out is None:
            if len(rows):  # before memory is asked for
                self._reader.ready(self.field, int(rows[0]))
            out = self.empty(len(rows), size=size, raw=raw)
        target = self._memory(out, len(rows), size, raw)
        began = time.perf_counter()
        if raw:
            self._gather(rows, cut, target)
            if times is not None:
                times.gathered_s += time.perf_counter() - began
            return out
        alone = cut is None and not self._region and self.base is self and target[:1].size * self._kind.itemsize >= _LARGE
        found = self._reader.flat(self.field, rows) if alone else None
        if found is not None:  # large rows are computed straight from their map, page faults and all
            self._numbers.fill_rows(*found, target)
            if times is not None:
                times.converted_s += time.perf_counter() - began
            return out
        for piece, part in self._pieces(rows, cut, target.shape[1:]):
            gathered = time.perf_counter()
            self._fill(part, target[piece])
            converted = time.perf_counter()
            if times is not None:
                times.gathered_s += gathered - began
                times.converted_s += converted - gathered
            began = converted
        return out

    def ready(self, row: int) -> None:
        """As Reader.ready, of a row of the dataset."""
        self._reader.ready(self.field, row * (self.views or 1))

    def places(self, rows: Rows, shown: Rows | None) -> Rows:
        """What this column is asked for, for rows of the dataset: where they have variants, the `shown` one of each."""
        return rows if self.views is None or shown is None else rows * self.views + shown

    @property
    def base(self) -> Column:
        """The column of single rows that this one is made of."""
        return self

    def needed(self, rows: Rows) -> Rows:
        """The rows of `base` that a batch of these is made of."""
        return rows

    def shaped(self, needed: Tensor) -> Tensor:
        """A batch, of its needed rows."""
        return needed

    def numbers(self, raw: Tensor) -> Tensor:
        """The settings' values of stored ones (N, *shape), on the device where they are: the same bits on each."""
        return self._numbers.of(raw)

    def _stored(self, shard: int, local: int) -> Array:
        """A batch of one sample as it lies on disk: a view of the copy-on-write map."""
        return self._reader.view(self.field, shard)[local : local + 1]

    def _fill(self, raw: Array, out: Array) -> None:
        """The numbers of a batch, both as rows lie on disk."""
        self._numbers.fill(raw, out)

    def _pieces(self, rows: Rows, cut: Cut | Patch | None, shape: tuple[int, ...]) -> Iterator[tuple[slice, Array]]:
        """Stored rows of this shape, as many at a time as stay in the cache: which they are, and memory that the next piece may overwrite."""
        row_bytes = math.prod(shape) * self._kind.itemsize
        step = max(1, _CACHED // max(1, row_bytes))
        for at in range(0, len(rows), step):
            piece = slice(at, min(at + step, len(rows)))
            part = scratch("rows", (piece.stop - at) * row_bytes).view(self._kind).reshape(-1, *shape)
            self._gather(rows[piece], None if cut is None else cut[piece], part)
            yield piece, part

    def cold(self, rows: Rows, cut: Any, sample: int) -> bool:
        """Would reading what is cut from these rows wait for a disk?  Looks at `sample` of them."""
        return self._reader.cold(self.field, rows, sample, self._region)

    def advise(self, rows: Rows, cut: Any) -> None:
        """Tell the kernel that what is cut from these rows will be read soon."""
        self._reader.advise(self.field, self.needed(rows), self._region)

    def _gather(self, rows: Rows, cut: Any, out: Array) -> None:
        """Stored rows as they lie on disk into `out`, cut where they are pixels."""
        self._reader.gather(self.field, rows, out=out, region=self._region)

    def _memory(self, out: Tensor, n: int, size: tuple[int, ...] | None, raw: bool) -> Array:
        """`out` as an array of rows as they lie on disk.  Raises ValueError where it is not what `empty` makes."""
        wanted = (n, *(self.shape if size is None else (*self.shape[: -len(size)], *size)))
        dtype = self.stored if raw else self.dtype
        fits = out.shape == wanted and out.dtype == dtype and out.device.type == "cpu"
        if not fits or not (out.movedim(-3, -1) if self._hwc else out).is_contiguous():
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype}, strides {out.stride()}, on {out.device}; field {self.name!r} fills {wanted} of {dtype}, "
                f"{'channels_last' if self._hwc else 'contiguous'}, in memory of the CPU: make it with empty()"
            )
        return self._rows(out)

    def _rows(self, values: Tensor) -> Array:
        """The memory of a batch as rows as they lie on disk."""
        return as_array(values.movedim(-3, -1) if self._hwc else values)

    def _hold(self, shard: int) -> Tensor:
        with torch.inference_mode(False):  # it is kept, and may be trained on later
            rows = torch.from_numpy(self._reader.view(self.field, shard))
            if self.stored == torch.bfloat16:
                rows = rows.view(torch.bfloat16)
            if self._region:
                rows = rows[(slice(None), *self._region)]
            if self._hwc:
                rows = rows.permute(0, 3, 1, 2)
        return keep(self._held, shard, rows, min(_HELD, self._reader.most_shards))


class ClassColumn(Column):
    """The number of a class, read as Python ints and int64 batches (N,)."""

    def __init__(self, reader: Reader, field: Field) -> None:
        super().__init__(reader, field, None)
        self._labels: dict[int, npt.NDArray[Any]] = reader.views()

    def sample(self, row: int, shard: int, local: int) -> int:
        if not self._mapped:
            return self.own(row)
        labels = self._labels.get(shard)
        if labels is None:
            labels = keep(self._labels, shard, self._reader.view(self.name, shard), min(_HELD, self._reader.most_shards))
        return int(labels.item(local))

    def own(self, row: int) -> int:
        return int(super().own(row))

    def samples(self, batch: Tensor) -> list[int]:
        labels: list[int] = batch.tolist()
        return labels


class TextColumn(Column):
    """Text, read as Python's strings; its batches are the bytes (N, L), of which `texts` makes strings."""

    text = True

    def sample(self, row: int, shard: int, local: int) -> str:
        return self.samples(super().sample(row, shard, local)[None])[0] if self._mapped else self.own(row)

    def own(self, row: int) -> str:
        return self.samples(super().own(row)[None])[0]

    def samples(self, batch: Tensor) -> list[str]:
        # numpy's bytes end where nothing but 0 follows
        lines: list[bytes] = as_array(batch.contiguous()).view(f"S{self.shape[0]}").reshape(-1).tolist()
        try:
            return [line.decode() for line in lines]
        except UnicodeDecodeError:
            raise CorruptShardError(
                f"{self._reader.root}: field {self.name!r} holds bytes that are no UTF-8; run `mmcompile verify {self._reader.root}`"
            ) from None


def _fresh(nbytes: int) -> Tensor:
    return torch.from_numpy(np.empty(nbytes + 1, np.uint8)[:nbytes])  # an empty array has strides that torch cannot view


def _dtype(dtype: Any, field: Field, numbers: bool) -> torch.dtype | None:
    """What was asked for, as a dtype of torch's; of what is always given as `numbers`, one that it can be given as."""
    if dtype is not None and not isinstance(dtype, str | torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, or its name, not {dtype!r}")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    stored = getattr(torch, field.dtype)
    choices = (stored, *(d for d in FLOATS if d != stored))
    known = found in choices if numbers else isinstance(found, torch.dtype)
    if dtype is not None and not known:
        raise ValueError(f"dtype {dtype}: field {field.name!r} is stored as {field.dtype} and can be given as one of {list(map(str, choices))}")
    return found


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
