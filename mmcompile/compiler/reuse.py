"""Hides how a row is found again: source hash -> (shard, row) over earlier generations and sealed shards, as one sorted table that workers map.

A row counts only if the settings and library versions that its values depend on are today's, which is decided here once for each shard and source
format; and it is handed out only after its stored hash has been checked, so damage is never copied on.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.errors import FormatError
from mmcompile.format.commit import write_atomic
from mmcompile.format.index import Field
from mmcompile.format.npy import ALIGN, map_file, open_array, read_hashed, read_into, save_array
from mmcompile.format.samples import hash_pair, keys_of, sample_dtype

__all__ = ["OldShard", "RowTable", "write_table"]

_ROW = np.dtype([("hash", "<u8", (2,)), ("shard", "<i4"), ("row", "<i4")])


@dataclass(frozen=True)
class OldShard:
    """A shard whose rows may be copied: its files by field name (and "samples", "keys"), the formats of sources whose rows are still right."""

    folder: str
    fields: tuple[Field, ...]
    files: dict[str, str]
    rows: int
    formats: frozenset[str]

    def path(self, name: str) -> Path:
        return Path(self.folder) / f"{name}-{self.files[name]}.npy"

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A whole small file, its hash checked, as what it says would be copied on.  Raises FormatError or FileNotFoundError."""
        return read_hashed(self.path(name), dtype, shape, self.files[name])

    def samples(self) -> npt.NDArray[Any]:
        """The provenance records.  Raises FormatError or FileNotFoundError."""
        return self.read("samples", sample_dtype(self.fields), (self.rows,))

    def keys(self, samples: npt.NDArray[Any]) -> list[bytes]:
        """The keys of all rows."""
        stop = int(samples["key_stop"][-1]) if len(samples) else 0
        return keys_of(samples, self.read("keys", np.dtype("u1"), (stop,)).tobytes())


def write_table(shards: list[OldShard], scratch: Path) -> Path | None:
    """Write the table of all rows that may be copied, sorted by hash, and beside it the list of its shards; None when there are none.

    Shards that cannot be read are passed over.
    """
    parts = []
    for number, shard in enumerate(shards):
        try:
            samples = shard.samples()
        except (FormatError, FileNotFoundError):
            continue
        usable = np.isin(samples["format"], np.array(sorted(f.encode() for f in shard.formats), "S8"))
        part = np.empty(int(usable.sum()), _ROW)
        part["hash"], part["shard"], part["row"] = samples["source_hash"][usable], number, np.flatnonzero(usable)
        parts.append(part)
    table = np.concatenate(parts) if parts else np.empty(0, _ROW)
    if not len(table):
        return None
    order = np.lexsort((table["hash"][:, 1], table["hash"][:, 0]))
    path = scratch / f"rows-{save_array(scratch, 'rows', table[order], scratch)}.npy"
    write_atomic(path.with_suffix(".shards"), pickle.dumps(shards), durable=False)
    return path


class RowTable:
    """Finds rows by the hash of their source, and hands them out checked; made of what `write_table` wrote.  Belongs to one process."""

    def __init__(self, path: Path, bring: Callable[[Path], Path] | None = None) -> None:
        """`bring`: where the image shards are, when they are not in their folder."""
        self._bring = bring or (lambda path: path)
        self.shards: list[OldShard] = pickle.loads(path.with_suffix(".shards").read_bytes())
        size = os.path.getsize(path) - ALIGN
        fd, offset = open_array(path, _ROW, (size // _ROW.itemsize,))
        self._table = map_file(fd, offset + size, writable=False)[offset:].view(_ROW)
        os.close(fd)
        self._high = np.ascontiguousarray(self._table["hash"][:, 0])
        self._samples: dict[int, npt.NDArray[Any]] = {}

    def take(self, digest: str, field: Field, out: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Copy the row of a source into `out` (1, *shape); returns its record, or None when there is no such row or all of them are damaged."""
        high, low = hash_pair(digest)
        start, stop = (int(np.searchsorted(self._high, np.uint64(high), side=side)) for side in ("left", "right"))
        for entry in self._table[start:stop]:
            if int(entry["hash"][1]) != low:
                continue
            try:
                record = self._read(int(entry["shard"]), int(entry["row"]), field, out)
            except (FormatError, FileNotFoundError):
                continue
            if record is not None:
                return record
        return None

    def _read(self, number: int, row: int, field: Field, out: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        shard = self.shards[number]
        if number not in self._samples:
            if len(self._samples) > 8:
                self._samples.clear()
            self._samples[number] = shard.samples()
        record = self._samples[number][row]
        state = xxhash.xxh3_64()
        for spec in shard.fields:
            path = shard.path(spec.name)
            if spec.name == field.name:
                path = self._bring(path)
            fd, offset = open_array(path, spec.stored, (shard.rows, *spec.shape))
            try:
                target = out if spec.name == field.name else np.empty((1, *spec.shape), spec.stored)
                read_into(fd, target, offset + row * spec.row_bytes, path)
            finally:
                os.close(fd)
            state.update(cast(Any, target.reshape(-1).view(np.uint8)))
        return record if state.intdigest() == int(record["row_hash"]) else None
