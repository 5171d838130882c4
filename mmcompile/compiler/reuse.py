"""Hides how a row is found again: source hash -> (shard, row) over earlier generations and sealed shards, as sorted columns that workers map.

A row counts only if the settings and library versions that its values depend on are today's, which is decided here once for each shard and kind of
row; and it is handed out only after its stored hash has been checked, so damage is never copied on.  Rows are read, never mapped: a file that others
cut is an error of one read, not a signal.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.marks import of_kinds
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import FormatError
from mmcompile.format.commit import write_atomic
from mmcompile.format.fields import Field, pixel_fields, row_dtype, value_fields
from mmcompile.format.npy import map_file, open_array, read_array, read_hashed, read_into, save_array
from mmcompile.format.opened import keep
from mmcompile.format.samples import keys_of, sample_dtype

__all__ = ["OldShard", "RowList", "RowTable", "Shelf", "list_rows", "write_table"]

#: Where a row stands.
_PLACE = np.dtype([("shard", "<i4"), ("row", "<i4")])
_COLUMNS = {"high": np.dtype("<u8"), "low": np.dtype("<u8"), "place": _PLACE}
#: Old shards that a worker holds open at once, ...
_OPEN = 16
#: ... fewer where they have so many rows that their provenance, some 110 bytes a row, would fill its memory.
_HELD_ROWS = 1 << 20


@dataclass(frozen=True)
class OldShard:
    """A shard whose rows may be copied: its files by field name (and "samples", "keys"), the kinds of rows that are still right.

    `made`: the settings under which rows were stored that have to be stored anew from their pixels; None where they are as they are wanted.
    `borrowed`: it is of another dataset, on a disk.  `sha256`: its provenance holds that of each source.
    """

    folder: str
    fields: tuple[Field, ...]
    files: dict[str, str]
    rows: int
    formats: frozenset[str]
    made: Preprocess | None = None
    borrowed: bool = False
    sha256: bool = False

    def path(self, name: str) -> Path:
        return Path(self.folder) / f"{name}-{self.files[name]}.npy"

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A whole small file, its hash checked, as what it says would be copied on.  Raises FormatError or FileNotFoundError."""
        return read_hashed(self.path(name), dtype, shape, self.files[name])

    def samples(self) -> npt.NDArray[Any]:
        """The provenance records.  Raises FormatError or FileNotFoundError."""
        return self.read("samples", sample_dtype(self.fields, self.sha256), (self.rows,))

    def keys(self, samples: npt.NDArray[Any]) -> list[bytes]:
        """The keys of all rows."""
        stop = int(samples["key_stop"][-1]) if len(samples) else 0
        return keys_of(samples, self.read("keys", np.dtype("u1"), (stop,)).tobytes())


@dataclass(frozen=True)
class RowList:
    """Rows sorted by the hash of their source, whose halves are `high` and `low` (N,), and where they stand: `place` (N,)."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    place: npt.NDArray[Any]

    def find(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The first row of each source hash (M, 2), by its number in this list: (M,), -1 where there is none."""
        out = np.full(len(hashes), -1, np.int64)
        if not len(self.high):
            return out
        high, low = hashes[:, 0], hashes[:, 1]
        at = np.searchsorted(self.high, high)
        open_: npt.NDArray[np.int64] = np.arange(len(hashes))
        while len(open_):
            here = at[open_]
            inside = here < len(self.high)
            open_, here = open_[inside], here[inside]
            same = self.high[here] == high[open_]
            open_, here = open_[same], here[same]
            hit = self.low[here] == low[open_]
            out[open_[hit]] = here[hit]
            open_ = open_[~hit]
            at[open_] += 1
        return out


def list_rows(shards: list[OldShard], wanted: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]] | None = None) -> RowList:
    """The rows of these shards that may be copied; of rows of one source the one of the first shard stands first.

    `wanted`, which rows (N,) of a shard may be asked for, from its provenance, keeps the list short; None: all.

    Shards that cannot be read are passed over.
    """
    hashes, places = [np.empty((0, 2), np.uint64)], [np.empty(0, _PLACE)]
    for number, shard in enumerate(shards):
        try:
            samples = shard.samples()
        except (FormatError, FileNotFoundError):
            continue
        usable = of_kinds(samples, shard.formats)
        rows = np.flatnonzero(usable if wanted is None else usable & wanted(samples))
        place = np.empty(len(rows), _PLACE)
        place["shard"], place["row"] = number, rows
        hashes.append(samples["source_hash"][rows])
        places.append(place)
    pairs = np.concatenate(hashes)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    return RowList(pairs[order, 0], pairs[order, 1], np.concatenate(places)[order])


def write_table(shards: list[OldShard], scratch: Path, rows: RowList | None = None) -> Path | None:
    """Write the list of all rows that may be copied (`rows`, where it is known already), and of their shards; None when there are none."""
    rows = list_rows(shards) if rows is None else rows
    if not len(rows.high):
        return None
    names = {name: save_array(scratch, f"rows-{name}", getattr(rows, name).astype(dtype, copy=False), scratch) for name, dtype in _COLUMNS.items()}
    path = scratch / f"rows-{names['high']}.shards"
    write_atomic(path, pickle.dumps((names, len(rows.high), shards)), durable=False)
    return path


class RowTable:
    """Finds rows by the hash of their source; made of what `write_table` wrote, whose columns all workers share.  Belongs to one process."""

    def __init__(self, path: Path, bring: Callable[[Path], Path] | None = None) -> None:
        """`bring`: where the image shards are, when they are not in their folder."""
        self._bring = bring or _as_it_is
        names, count, shards = pickle.loads(path.read_bytes())
        columns = {name: _mapped(path.parent / f"rows-{name}-{digest}.npy", _COLUMNS[name], count) for name, digest in names.items()}
        self.rows = RowList(**columns)
        self.shards: list[OldShard] = shards
        self._shelves: dict[int, Shelf] = {}

    def shelf(self, number: int) -> Shelf:
        """A shard, open; the last few stay so."""
        found = self._shelves.get(number)
        if found is not None:
            return found
        shard = self.shards[number]
        return keep(self._shelves, number, Shelf(shard, self._bring), max(2, min(_OPEN, _HELD_ROWS // shard.rows)))

    def places(self, pair: tuple[int, int]) -> list[tuple[int, int]]:
        """(shard, row) of all rows of a source."""
        start, stop = (int(np.searchsorted(self.rows.high, np.uint64(pair[0]), side=side)) for side in ("left", "right"))
        return [(int(p["shard"]), int(p["row"])) for p in self.rows.place[start:stop][self.rows.low[start:stop] == np.uint64(pair[1])]]


class Shelf:
    """An old shard held open: its provenance in memory, its rows read a range at a time.  Raises FormatError or FileNotFoundError."""

    def __init__(self, shard: OldShard, bring: Callable[[Path], Path]) -> None:
        self.shard, self._bring = shard, _as_it_is if shard.borrowed else bring
        self._files: dict[str, tuple[int, int]] = {}

    @cached_property
    def samples(self) -> npt.NDArray[Any]:
        return self.shard.samples()

    @cached_property
    def keys(self) -> list[bytes]:
        return self.shard.keys(self.samples)

    @cached_property
    def values(self) -> npt.NDArray[np.void]:
        """What stands beside the pixels, unchecked: each record is part of its row's hash."""
        others = value_fields(self.shard.fields)
        out: npt.NDArray[np.void] = np.zeros(self.shard.rows, row_dtype(others))
        for spec in others:
            out[spec.name] = read_array(self.shard.path(spec.name), spec.stored, (self.shard.rows, *spec.shape))
        return out

    def read(self, row: int, out: Sequence[npt.NDArray[Any]]) -> None:
        """Fill `out`, an array (n, *shape) for each pixel field, with the rows from `row` on, unchecked."""
        for spec, array in zip(pixel_fields(self.shard.fields), out, strict=True):
            if spec.name not in self._files:
                self._files[spec.name] = open_array(self._bring(self.shard.path(spec.name)), spec.stored, (self.shard.rows, *spec.shape))
            fd, offset = self._files[spec.name]
            read_into(fd, array, offset + row * spec.row_bytes, self.shard.path(spec.name))

    def __del__(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)


def _as_it_is(path: Path) -> Path:
    return path


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    size = count * dtype.itemsize
    fd, offset = open_array(path, dtype, (count,))
    try:
        return map_file(fd, offset + size, writable=False)[offset:].view(dtype)
    finally:
        os.close(fd)
