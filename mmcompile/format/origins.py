"""Hides how it is told where rows come from and what things are called: keys, groups, and the lists of names that do not fit into an index.

Read when asked for.  Thread-safe.  Raises GenerationError, CorruptShardError or FormatError for what lies on disk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError
from mmcompile.format.canonical import as_text
from mmcompile.format.files import Files
from mmcompile.format.index import Field, Index, Names, load_classes, load_groups, load_names
from mmcompile.format.keyhash import sought_key
from mmcompile.format.npy import file_name, read_into
from mmcompile.format.opened import Opened
from mmcompile.format.permutation import source_rows
from mmcompile.format.samples import KEY_LIMIT, check_stops, key_hash, keys_of, sample_dtype

__all__ = ["Groups", "Origins"]

Array = npt.NDArray[Any]


class Origins:
    """What a generation says of its rows beside their values."""

    def __init__(self, files: Files, opened: Opened, index: Index, starts: npt.NDArray[np.int64]) -> None:
        self._files, self._opened, self._index, self._starts = files, opened, index, starts
        self._classes: tuple[str, ...] | None = None
        self._groups: tuple[tuple[str, ...], npt.NDArray[np.int64]] | None = None
        self._called: Groups | None = None
        self._hashes: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names, or None for a dataset without labels."""
        if self._classes is None:
            digest = self._index.classes_file
            self._classes = self._index.classes
            if digest is not None:
                name = file_name("classes", digest, ".json")
                self._classes = self._opened.use(name, None, lambda path: load_classes(path.parent.parent, self._index))
        return self._classes

    @property
    def groups(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """(names, the first row of each group and the number of samples: int64 (G + 1,)); one without a name where the index has none."""
        if self._groups is None:
            digest = self._index.groups_file
            if digest is None:
                self._groups = load_groups(Path(), self._index)
            else:
                name = file_name("groups", digest, ".json")
                self._groups = self._opened.use(name, None, lambda path: load_groups(path.parent.parent, self._index))
        return self._groups

    @property
    def series(self) -> npt.NDArray[np.int64]:
        """The first row of each group and the number of samples, int64 (G + 1,): rows in a row.  ValueError where they stand in a random order."""
        if self._index.order:
            raise ValueError(
                f"{self._files.root}: its rows stand in a random order ({self._index.order}), so neighbours make no window: build it without --order "
                "shuffled, and let the loader shuffle its windows"
            )
        return self.groups[1]

    def field(self, name: str) -> Field:
        """What the index says of a field, its lists of names whole, wherever they lie."""
        spec = next(f for f in self._index.fields if f.name == name)
        whole: dict[str, Any] = {}
        for kind, names in (("columns", spec.columns), ("categories", spec.categories)):
            if names is not None and names.file is not None:
                expected = spec.shape[0] if kind == "columns" else None
                file = file_name("classes", names.file, ".json")
                whole[kind] = Names(self._opened.use(file, None, partial(_names, names, expected)))
        return replace(spec, **whole)

    def samples(self, shard: int) -> Array:
        """The provenance of a shard's rows: a structured array, see `samples.sample_dtype`."""
        return self._opened.read(
            self._opened.name("samples", shard), sample_dtype(self._index.fields, self._index.sha256), (int(self._opened.table["rows"][shard]),)
        )

    def keys(self, shard: int) -> list[bytes]:
        """The source keys of a shard's rows, as raw bytes."""
        path, records = self._opened.path("keys", shard), self.samples(shard)
        stops = records["key_stop"]
        check_stops(stops, np.uint64(0), self._opened.path("samples", shard))
        blob = self._opened.read(path.name, np.dtype("u1"), (int(stops[-1]) if len(stops) else 0,))
        return keys_of(records, blob.tobytes())

    def key(self, row: int) -> bytes:
        """The source key of one row, without reading those of its shard."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        local = row - int(self._starts[shard])
        rows = int(self._opened.table["rows"][shard])
        path, dtype = self._opened.path("samples", shard), sample_dtype(self._index.fields, self._index.sha256)
        file, stops = self._opened.open_name(path.name, dtype, (rows,)), []
        for at in (local - 1, local, rows - 1):
            record = np.zeros(1, dtype)
            if at >= 0:
                read_into(file.fd, record, file.offset + at * dtype.itemsize, path)
            stops.append(int(record["key_stop"][0]))
        start, stop, total = stops
        if not start <= stop <= min(start + KEY_LIMIT, total):
            raise CorruptShardError(
                f"{path}: damaged, as the ends of its keys do not rise by 0 to {KEY_LIMIT:,} bytes; `mmcompile verify` says how to mend it",
                path=str(path),
            )
        path = self._opened.path("keys", shard)
        file = self._opened.open_name(path.name, np.dtype("u1"), (total,))
        out = np.empty(stop - start, np.uint8)
        read_into(file.fd, out, file.offset + start, path)
        return out.tobytes()

    def source(self, row: int) -> str:
        """Where a row comes from, as text: its key, or where rows have none its group, and its number in it (in the order of RAW): see Groups."""
        if self._index.keyed:
            return as_text(self.key(row))
        if self._called is None:
            self._called = Groups(self._index, *self.groups)
        return self._called.told(np.array([row]))[0]

    def find(self, key: bytes, secret: bytes | None = None) -> int:
        """The row of a source key, or where keys are hashed, of the name of a source.

        The first call reads all keys once; 16 bytes a row stay in memory.

        Raises KeyError, and ValueError for a dataset whose rows have no keys, or whose keys are made with another `secret`.
        """
        if not self._index.keyed:
            raise ValueError(
                f"{self._files.root}: its rows have no keys to be found by (they are of arrays or tables); source() tells where a row comes from"
            )
        if self._index.key_hash is None and secret is not None:
            raise ValueError(f"{self._files.root}: its keys are the names of sources: leave secret= out")
        row = self._find(key)
        if row is None and self._index.key_hash is not None:
            try:
                row = self._find(sought_key(key, secret, self._index.key_hash, self._index.settings.get("keys")))
            except ValueError as error:
                raise ValueError(f"{self._files.root}: {error}") from None
        if row is None:
            raise KeyError(f"{self._files.root}: no sample has the source {as_text(key)!r}; source(0) shows how they are called")
        return row

    def _find(self, key: bytes) -> int | None:
        if self._hashes is None:
            self._files.ahead([(self._opened.name(name, k), None) for k in range(len(self._opened.table)) for name in ("samples", "keys")])
            parts = [np.array([key_hash(k) for k in self.keys(shard)], np.uint64) for shard in range(len(self._opened.table))]
            hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order], order
        hashes, order = self._hashes
        wanted = np.uint64(key_hash(key))
        for row in order[np.searchsorted(hashes, wanted) : np.searchsorted(hashes, wanted, side="right")].tolist():
            if self.key(row) == key:  # two keys may share a hash
                return int(row)
        return None


class Groups:
    """How rows without keys are called by groups of these names, which start there (G + 1,): NAME[NUMBER], each row in one way only.

    Where splits cut groups, as `--split-by` does, NUMBER counts on from one split to the next; of any other name that stands in several splits
    SPLIT/NAME[NUMBER] is told, SPLIT[NUMBER] of an empty one.
    """

    def __init__(self, index: Index, names: tuple[str, ...], starts: npt.NDArray[np.int64]) -> None:
        self._index, self._starts = index, starts
        source = index.settings.get("source")
        cut = isinstance(source, dict) and source.get("split_by") is not None
        splits = np.searchsorted(np.array([split.stop for split in index.splits]), starts[:-1], side="right").tolist()
        within: dict[str, set[int]] = {}
        for name, split in zip(names, splits, strict=True):
            within.setdefault(name, set()).add(split)
        seen: dict[str, int] = {}
        self._names: list[str] = []
        self._firsts: list[int] = []
        for name, split, rows in zip(names, splits, np.diff(starts).tolist(), strict=True):
            told = name
            if not cut and len(within[name]) > 1:
                told = "/".join(filter(None, (index.splits[split].name, name)))
            self._names.append(told)
            self._firsts.append(seen.get(told, 0))
            seen[told] = self._firsts[-1] + rows

    def told(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """What these rows (M,) are called."""
        places = source_rows(self._index.order, self._index.splits, rows)
        found = np.searchsorted(self._starts, places, side="right") - 1
        numbers = (places - self._starts[found]).tolist()
        return [f"{self._names[group]}[{self._firsts[group] + number}]" for group, number in zip(found.tolist(), numbers, strict=True)]


def _names(names: Names, expected: int | None, path: Path) -> tuple[str, ...]:
    return load_names(path.parent.parent, names, expected)
