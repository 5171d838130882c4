"""Hides how rows of old shards become rows of new ones: read in runs, each held against its hash, stored anew where settings ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.marks import stored_as
from mmcompile.compiler.pixelrows import PixelRows
from mmcompile.compiler.preprocess import Preprocess, store
from mmcompile.compiler.reuse import RowTable, Shelf
from mmcompile.compiler.spatial import Mover
from mmcompile.compiler.trace import PLAIN, Trace
from mmcompile.errors import DecodeError, FormatError
from mmcompile.format.fields import Field, pixel_fields
from mmcompile.format.samples import sample_dtype

__all__ = ["Copier"]

#: Bytes of a run: they are read, hashed and written while they are in the cache of a core, and cost two system calls.
_RUN_BYTES = 1 << 20
#: What a source of 8 bits has; only such rows are stored anew from their pixels.
_DEPTH = 8

Array = npt.NDArray[Any]


class Copier:
    """Copies rows found in a table as `preprocess` and `fields` want them; `mover` moves what belongs to a picture.

    `trace`: what records tell of their sources; the SHA-256 of one is filled in where the old row has it.

    Belongs to one process; memory is one run of rows.
    """

    def __init__(self, table: RowTable, preprocess: Preprocess, fields: tuple[Field, ...], mover: Mover | None = None, trace: Trace = PLAIN) -> None:
        self._table, self._preprocess, self._mover = table, preprocess, mover
        self._dtype, pixels = sample_dtype(fields, trace.sha256), pixel_fields(fields)
        self.nameless, self._key = trace.nameless, trace.key
        self._whole = np.array([shard.sha256 or not trace.sha256 for shard in table.shards])
        self.most = max(1, _RUN_BYTES // max(1, sum(f.row_bytes for f in pixels)))
        self._space = PixelRows.empty(pixels, self.most)

    def runs(self, hashes: npt.NDArray[np.uint64], wanted: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], int, int]]:
        """(some of `wanted`, shard, first row): runs of items whose rows follow each other in an old shard, for the source hashes (N, 2) of a piece.

        Items without a row, or with one that does not tell all that is wanted of its source, are in none.
        """
        found = self._table.rows.find(hashes[wanted])
        found[found >= 0] = np.where(self._whole[self._table.rows.place["shard"][found[found >= 0]]], found[found >= 0], -1)
        wanted, place = wanted[found >= 0], self._table.rows.place[found[found >= 0]]
        if not len(wanted):
            return
        follows = (np.diff(place["shard"]) == 0) & (np.diff(place["row"]) == 1) & (np.diff(wanted) == 1)
        for run in np.split(np.arange(len(wanted)), np.flatnonzero(~follows) + 1):
            for at in range(0, len(run), self.most):
                part = run[at : at + self.most]
                yield wanted[part], int(place["shard"][part[0]]), int(place["row"][part[0]])

    def places(self, pair: tuple[int, int]) -> list[tuple[int, int]]:
        """(shard, row) of every row of a source."""
        return self._table.places(pair)

    def copy(
        self, shard: int, row: int, values: npt.NDArray[np.void], keys: Sequence[bytes]
    ) -> tuple[PixelRows, npt.NDArray[np.void], Array, npt.NDArray[np.bool_]]:
        """(n rows, values (n,), records (n,), which of them are right (n,)) of the rows from `row` on; `values` (n,), of the scan, are moved.

        A row is not right where it is damaged, or cannot be stored as it is wanted: with views also where its key is not that of `keys` (n,).  The
        rows are valid until the next call.
        """
        n = len(values)
        out = self._space[:n]
        try:
            return out, *self._copied(self._table.shelf(shard), row, values, keys, out)
        except (FormatError, FileNotFoundError):
            values = values if self._mover is None else np.zeros(n, self._mover.dtype)
            return out, values, np.zeros(n, self._dtype), np.zeros(n, bool)

    def _copied(
        self, shelf: Shelf, row: int, values: npt.NDArray[np.void], keys: Sequence[bytes], out: PixelRows
    ) -> tuple[npt.NDArray[np.void], Array, npt.NDArray[np.bool_]]:
        n = len(out)
        found = shelf.samples[row : row + n]
        given, values = values, values if self._mover is None else self._mover.moved(values, found, keys)
        made = shelf.shard.made
        raw = out if made is None else PixelRows.empty(pixel_fields(shelf.shard.fields), n)
        shelf.read(row, raw.arrays)
        before, after = _records(shelf.values[row : row + n]), _records(values)
        same = made is None and before == after
        right, hashes = np.zeros(n, bool), np.array(found["row_hash"])
        wants = found["row_hash"].tolist()
        for i, state in enumerate(raw.states()):
            fresh = None if same or made is not None else state.copy()
            state.update(before[i])
            right[i] = state.intdigest() == wants[i]
            if right[i] and made is not None:
                right[i] = self._convert(made, raw.arrays[0][i], out.arrays[0][i])
                for its, mine in zip(raw.arrays[1:], out.arrays[1:], strict=True):
                    mine[i] = its[i]
                fresh = next(out[i : i + 1].states())
            if fresh is not None:
                fresh.update(after[i])
                hashes[i] = fresh.intdigest()
        if self._mover is not None:
            right[list(self._mover.misfits(given, found))] = False
        if self._preprocess.views is not None and not shelf.shard.borrowed:  # what they show follows from the key
            right &= [mine in (its, self._key(its)) for mine, its in zip(shelf.keys[row : row + n], keys, strict=True)]
        records = np.zeros(n, self._dtype)
        for name in set(self._dtype.names or ()) & set(found.dtype.names or ()):
            records[name] = found[name]
        records["row_hash"] = hashes
        return values, records, right

    def _convert(self, made: Preprocess, row: Array, out: Array) -> bool:
        pixels = row if made.layout == "hwc" else row.transpose(1, 2, 0)
        if stored_as(made, self._preprocess) == "moved":
            out[...] = pixels if self._preprocess.layout == "hwc" else pixels.transpose(2, 0, 1)
            return True
        try:
            store(pixels, self._preprocess, _DEPTH, out)
        except DecodeError:  # what the dtype cannot hold: decoding says so
            return False
        return True


def _records(values: npt.NDArray[np.void]) -> list[bytes]:
    """The bytes of each record."""
    blob, width = values.tobytes(), values.dtype.itemsize
    return [blob[at * width : (at + 1) * width] for at in range(len(values))]
