"""Hides how a compiled folder looks to training code: a map-style torch Dataset whose samples are views and whose batches are one gather.

It writes nothing and holds nothing per sample.  It pickles as path, generation and arguments, so workers that start later, or on another machine,
open the generation that this one had open, or fail saying so.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from mmcompile.format.canonical import as_bytes, as_text
from mmcompile.format.reader import Reader
from mmcompile.runtime.column import ClassColumn, ImageColumn
from mmcompile.runtime.seeding import stream_key

__all__ = ["MMapShardDataset"]

#: What is opened again after unpickling instead of travelling.
_OPENED = ("_columns", "_image", "_label", "_first", "_length", "_targets", "_seeded")
_MASK = "samples are asked for by number; turn a mask into numbers with torch.nonzero or numpy.flatnonzero"


class MMapShardDataset(Dataset[Any]):
    """The samples of a folder that `mmcompile build` made.

    `ds[i]` is `(image, label)`, or the image alone where there are no labels: image (C, H, W), label a Python int.  `ds[2:5]`, `ds[[7, 1, 7]]`, or an
    array or tensor of ints is a batch: (N, C, H, W) and int64 (N,), one copy into memory of its own.

    A sample of stored values is a view of a copy-on-write map: writing to it never changes the file, but is seen by later `ds[i]` of the same row
    in this process; `.clone()` it, or pass `copy=True`.  Batches, samples that are computed, and what a transform gets are always copies of what the
    file holds.

    split: the name of a split, or "all"; needed where there are several.
    fields: names of the fields to read, in the order wanted (others are never touched); a single one comes bare, not in a tuple.
    transform: called with the image (a tensor of its own).  target_transform: called with the label.  transforms: called with all fields, in place
        of the two.  One with a parameter named `generator` gets a torch.Generator there, seeded from the row alone (so the same in every epoch).
    dtype: the dtype on disk for raw values, or a float dtype for the numbers: x / 255 (16 bit: x / 65535), normalised if built so.  By default the
        numbers in float32 where the dataset was built with normalisation, else what lies on disk.
    crop: an int or (height, width): the centre of each image, equal to torchvision's CenterCrop.
    copy: every sample in memory of its own.
    output: "tuple" or "dict" (field name -> value).
    engine: "mmap", "pread" (bad media and files cut by others are exceptions, not signals), or "auto": mmap on local file systems.
    generation: open this one, not the current one.

    Raises NotADatasetError, GenerationError, VersionError or another FormatError for what lies on disk, TypeError or ValueError for arguments.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str | None = None,
        *,
        fields: Sequence[str] | None = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        transforms: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        crop: int | tuple[int, int] | None = None,
        copy: bool = False,
        output: str = "tuple",
        engine: str = "auto",
        generation: str | None = None,
    ) -> None:
        if output not in ("tuple", "dict"):
            raise ValueError(f"output must be 'tuple' or 'dict', not {output!r}")
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError("transforms (of all fields together) takes the place of transform and target_transform: give one or the other")
        for function in (transform, transforms):
            _refuse_to_tensor(function)
        self._reader = Reader(os.fspath(root), generation=generation, engine=engine)
        self._split = split
        self._fields = fields if fields is None else _names(fields)
        self._transform, self._target_transform, self._transforms = transform, target_transform, transforms
        self._dtype, self._crop = dtype, crop
        self._copy = bool(copy)
        self._output = output
        self._open()

    def _open(self) -> None:
        """Set what follows from the reader and the arguments."""
        index = self._reader.index
        ranges = {s.name: (s.start, s.stop) for s in index.splits}
        if self._split is None and len(ranges) > 1:
            raise ValueError(f"{self.root}: has the splits {list(ranges)}; pass split= one of them, or 'all' for all")
        wanted = next(iter(ranges)) if self._split is None else self._split
        if wanted not in ranges and wanted != "all":
            raise ValueError(f"{self.root}: no split {wanted!r}; it has {list(ranges)}, and 'all' joins them")
        start, stop = ranges.get(wanted, (0, index.samples))
        self._first, self._length = start, stop - start
        known = {f.name: f for f in index.fields}
        names = tuple(known) if self._fields is None else self._fields
        for name in names:
            if name not in known:
                raise ValueError(f"{self.root}: no field {name!r}; it has {list(known)}")
        self._columns: list[ImageColumn | ClassColumn] = [
            ImageColumn(self._reader, known[name], self._dtype, self._crop)
            if known[name].meaning == "image"
            else ClassColumn(self._reader, known[name])
            for name in names
        ]
        self._image = next((i for i, c in enumerate(self._columns) if isinstance(c, ImageColumn)), None)
        self._label = next((i for i, c in enumerate(self._columns) if isinstance(c, ClassColumn)), None)
        if self._transform is not None and self._image is None:
            raise ValueError(f"{self.root}: transform needs an image, the fields are {list(names)}")
        if self._target_transform is not None and self._label is None:
            raise ValueError(f"{self.root}: target_transform needs a label, the fields are {list(names)}")
        self._targets: npt.NDArray[np.int64] | None = None
        hooks = (self._transform, self._target_transform, self._transforms)
        self._seeded = frozenset(id(hook) for hook in hooks if hook is not None and _wants_generator(hook))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    # -- samples and batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for i in range(self._length):  # not the sequence protocol, which would take an IndexError in a transform for the end
            yield self[i]

    def __getitem__(self, key: Any) -> Any:
        """A sample for an integer, a batch for a slice or a list, array or tensor of integers.  Raises IndexError beyond the end, TypeError."""
        if type(key) is int:
            return self._sample(self._row(key))
        if isinstance(key, slice):
            wanted = range(*key.indices(self._length))
            for end in {*wanted[:1], *wanted[-1:]}:  # before numbers are made for as many rows as the index claims
                self._reader.ready(self._columns[0].name, end + self._first)
            return self._batch(np.arange(wanted.start, wanted.stop, wanted.step, dtype=np.int64) + self._first)
        if isinstance(key, list | range) or (isinstance(key, np.ndarray | torch.Tensor) and key.ndim):
            return self._batch(self._rows(key))
        return self._sample(self._row(_integer(key)))

    def __getitems__(self, keys: list[int]) -> list[Any]:
        """The samples of a batch, as DataLoader asks for them: gathered in one go, so that they are what the file holds."""
        rows = self._rows(keys)
        if self._transform is not None or self._target_transform is not None or self._transforms is not None:
            return [self._sample(row, own=True) for row in rows.tolist()]
        parts = [c.batch(rows) for c in self._columns]
        values = [part.unbind(0) if part.ndim > 1 else part.tolist() for part in parts]
        return [self._packed(list(sample)) for sample in zip(*values, strict=True)]

    def _row(self, key: int) -> int:
        at = key + self._length if key < 0 else key
        if not 0 <= at < self._length:
            raise IndexError(f"sample {key} is out of range: the dataset has {self._length:,}")
        return at + self._first

    def _rows(self, keys: Any) -> npt.NDArray[np.int64]:
        """Rows of the dataset for a one-dimensional list, range, array or tensor of samples, each checked."""
        if isinstance(keys, torch.Tensor):
            keys = keys.detach().cpu().numpy()
        if not isinstance(keys, np.ndarray):
            kinds = set(map(type, keys))
            if bool in kinds:
                raise TypeError(_MASK)
            try:
                keys = np.array(keys if kinds <= {int} else [_integer(key) for key in keys], np.int64)
            except OverflowError:
                raise IndexError(f"a sample in the list is out of range: the dataset has {self._length:,}") from None
        if keys.dtype == np.bool_:
            raise TypeError(_MASK)
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            raise TypeError(f"a batch takes one axis of integers, not {keys.dtype} of shape {keys.shape}")
        bad = (keys >= self._length) | (keys < -self._length)
        if bad.any():
            raise IndexError(f"sample {keys[bad][0]} is out of range: the dataset has {self._length:,}")
        rows = keys.astype(np.int64)
        rows[rows < 0] += self._length
        return cast("npt.NDArray[np.int64]", rows + self._first)

    def _sample(self, row: int, own: bool = False) -> Any:
        if own or self._copy or self._transform is not None or self._transforms is not None:
            values = [column.own(row) for column in self._columns]
        else:
            shard, local = self._reader.locate(row)
            values = [column.sample(row, shard, local) for column in self._columns]
        if self._transforms is not None:
            out = self._call(self._transforms, values, row)
            if self._output == "tuple" or isinstance(out, dict):
                return out
            values = list(out) if len(self._columns) > 1 else [out]
        if self._transform is not None and self._image is not None:
            values[self._image] = self._call(self._transform, [values[self._image]], row)
        if self._target_transform is not None and self._label is not None:
            values[self._label] = self._call(self._target_transform, [values[self._label]], row)
        return self._packed(values)

    def _call(self, hook: Callable[..., Any], values: list[Any], row: int) -> Any:
        if id(hook) in self._seeded:
            return hook(*values, generator=torch.Generator().manual_seed(stream_key(0, 0, row)))
        return hook(*values)

    def _batch(self, rows: npt.NDArray[np.int64]) -> Any:
        if self._transform is None and self._target_transform is None and self._transforms is None:
            return self._packed([column.batch(rows) for column in self._columns])
        if not len(rows):
            raise ValueError("an empty batch has no shape once there is a transform")
        out = default_collate([self._sample(row, own=True) for row in rows.tolist()])
        return tuple(out) if isinstance(out, list) else out

    def _packed(self, values: list[Any]) -> Any:
        if self._output == "dict":
            return {column.name: value for column, value in zip(self._columns, values, strict=True)}
        return tuple(values) if len(values) > 1 else values[0]

    # -- what is in there

    @property
    def root(self) -> Path:
        return self._reader.root

    @property
    def generation(self) -> str:
        """The generation that is open: 32 hex digits, the hash of its index."""
        return self._reader.generation

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample before any transform: (C, H, W); () where no image is read."""
        return self._columns[self._image or 0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an image before any transform; int64 where no image is read."""
        return self._columns[self._image or 0].dtype

    @property
    def transform(self) -> Callable[..., Any] | None:
        return self._transform

    @property
    def target_transform(self) -> Callable[..., Any] | None:
        return self._target_transform

    @property
    def transforms(self) -> Callable[..., Any] | None:
        return self._transforms

    @property
    def classes(self) -> list[str] | None:
        """The class names, a label's name at its number; None for a dataset without labels."""
        names = self._reader.classes
        return None if names is None else list(names)

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """Class name -> label; None for a dataset without labels."""
        names = self._reader.classes
        return None if names is None else {name: i for i, name in enumerate(names)}

    @property
    def targets(self) -> npt.NDArray[np.int64] | None:
        """The labels of all samples, int64 (N,), read in one go and kept; None for a dataset without labels."""
        if self._targets is None:
            name = next((f.name for f in self._reader.index.fields if f.meaning == "class"), None)
            if name is None:
                return None
            self._targets = self._reader.column(name)[self._first : self._first + self._length].copy()
        return self._targets

    @property
    def stats(self) -> dict[str, tuple[float, ...]] | None:
        """{"mean": …, "std": …} of the split's pixels, a number for each channel, before normalisation (8 bit: of x / 255); None without pixels."""
        index = self._reader.index
        field = next((f for f in index.fields if f.meaning == "image"), None)
        if field is None:
            return None
        parts = []  # the index was checked when it was read
        for split in index.splits:
            if not self._first <= split.start < split.stop <= self._first + self._length:
                continue
            entry = index.statistics.get(split.name, {}).get(field.name)
            if entry is None:
                return None
            parts.append((entry["pixels"], entry["mean"], entry["std"]))
        return _pooled(parts)

    def source(self, i: int) -> str:
        """The key of a sample: its source's path in RAW, as text by `os.fsdecode`."""
        return as_text(self._reader.key(self._row(_integer(i))))

    def find(self, key: str | bytes) -> int:
        """The number of the sample made from this source.  Raises KeyError.  The first call reads all keys; 16 bytes a sample stay in memory."""
        row = self._reader.find(as_bytes(key)) - self._first
        if not 0 <= row < self._length:
            raise KeyError(as_text(key))
        return row

    def __repr__(self) -> str:
        fields = ", ".join(f"{c.name} {str(c.dtype).removeprefix('torch.')} {c.shape}" for c in self._columns)
        names = self._reader.classes
        classes = "" if names is None else f", {len(names):,} classes"
        split = "" if self._split is None else f", split={self._split!r}"
        return f"{type(self).__name__}({str(self.root)!r}{split}): {self._length:,} samples of {fields}{classes}; generation {self.generation}"


def _pooled(parts: list[Any]) -> dict[str, tuple[float, ...]] | None:
    """Mean and standard deviation of all pixels from the (pixels, means, standard deviations) of parts; of a single part exactly its own."""
    if len(parts) <= 1:
        return {"mean": tuple(parts[0][1]), "std": tuple(parts[0][2])} if parts else None
    pixels, means, stds = (np.array(column, np.float64) for column in zip(*parts, strict=True))
    with np.errstate(all="ignore"):  # numbers of a stranger may overflow
        share = (pixels / pixels.sum())[:, None]
        mean = (share * means).sum(0)
        std = np.sqrt((share * (stds**2 + (means - mean) ** 2)).sum(0))
    return {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}


def _integer(key: Any) -> int:
    """An index as an int: Python's and numpy's integers, 0-d integer arrays and tensors.  Raises TypeError for anything else, booleans too."""
    dtype = getattr(key, "dtype", None)
    if isinstance(key, bool) or dtype in (torch.bool, np.bool_):
        raise TypeError("samples are asked for by number, not by a boolean")
    try:
        return operator.index(key)
    except TypeError:
        raise TypeError(f"samples are asked for by an integer, a slice, or a list, array or tensor of integers, not {type(key).__name__}") from None


def _names(fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise TypeError(f"fields is a sequence of names: ({fields!r},), not {fields!r}")
    names = tuple(fields)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"fields must be at least one name, each once, not {names}")
    return names


def _wants_generator(function: Callable[..., Any]) -> bool:
    """Has it a parameter named `generator` that its owner left free?"""
    if isinstance(function, functools.partial) and "generator" in function.keywords:
        return False
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        found = inspect.signature(target).parameters.get("generator")
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _refuse_to_tensor(function: Any) -> None:
    """TypeError for a torchvision transform that makes tensors of PIL images; found by name, so torchvision is not imported."""
    waiting, seen = [function], set()
    while waiting:
        item = waiting.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        kind = type(item)
        home, name = kind.__module__, kind.__name__
        if home.startswith("torchvision.transforms") and (name == "ToTensor" or (name == "PILToTensor" and ".v2" not in home)):
            raise TypeError(f"{home}.{name} does not apply: samples are tensors already; use v2.ToDtype(torch.float32, scale=True) in its place")
        inner = getattr(item, "transforms", None)
        if isinstance(inner, list | tuple | torch.nn.ModuleList):
            waiting.extend(inner)
        if isinstance(item, torch.nn.Module):
            waiting.extend(item.children())
