"""Hides what a build of rows has to do: its shards, and which of them stand already, whoever made them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.plan import row_cuts, rows_per_shard
from mmcompile.compiler.preprocess import PIXEL_REVISION
from mmcompile.compiler.rowstore import StoredField
from mmcompile.compiler.rowtask import RowSeal, read_row_seal
from mmcompile.compiler.seals import UNREADABLE, read_sealed
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.errors import FormatError
from mmcompile.format.canonical import canonical
from mmcompile.format.catalog import digest_file, list_folder
from mmcompile.format.index import Field, Index, load_index
from mmcompile.format.npy import file_bytes, file_name, hash_bytes, open_array
from mmcompile.format.samples import block_rows

__all__ = ["Held", "RowTask", "files_of", "row_tasks"]


@dataclass(frozen=True)
class RowTask:
    """The rows [start, stop), which become one shard; with `known` its id changes whenever what they are read from does."""

    number: int
    start: int
    stop: int
    id: str
    known: bool


def row_tasks(scan: RowScan, fields: Sequence[StoredField], settings: dict[str, Any]) -> Iterator[RowTask]:
    """The shards of all rows, in order, each within one split."""
    row_bytes = sum(f.stored.row_bytes for f in fields)
    rows = rows_per_shard(row_bytes, settings["shard_bytes"])
    made = [[f.source.to_json(), f.stored.to_json(), f.stored.dtype] for f in fields]
    base = hash_bytes(canonical({"made": made, "settings": {**settings, "shard_bytes": 0}, "revision": PIXEL_REVISION}))
    (stops, stamps), number = scan.lots, 0
    for split in scan.ranges:
        cuts = row_cuts(split.start, split.stop, stops, rows)
        for start, stop in itertools.pairwise(cuts):
            first, last = (int(np.searchsorted(stops, row, side="right")) for row in (start, stop - 1))
            parts = []
            for group in range(first, last + 1):
                begin = int(stops[group - 1]) if group else 0
                parts.append([stamps[group], max(start, begin) - begin, min(stop, int(stops[group])) - begin])
            known = all(stamp for stamp, *_ in parts)
            where = parts if known else [[str(start), 0, stop - start]]
            yield RowTask(number, start, stop, hash_bytes(canonical([base, known, where])), known)
            number += 1


def files_of(fields: tuple[Field, ...], rows: int) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """(kind, dtype, shape) of each file of a shard of so many rows."""
    blocks = -(-rows // block_rows(fields))
    return [("hashes", np.dtype("<u8"), (blocks,)), *((f.name, f.stored, (rows, *f.shape)) for f in fields)]


class Held:
    """What OUT holds: the dataset that is published, what it was made of (`mark`), and the `seals` of an unfinished build by task."""

    def __init__(self, out: Path, fields: tuple[Field, ...], *, stubs: bool = False) -> None:
        """`fields` are those that are to be stored; with `stubs` files of shards lie on a store, which vouches for those that have their size here.

        Raises FormatError for a dataset that is damaged.
        """
        build = out / ".build"
        self._shards, self._fields, self._stubs = out / "shards", fields, stubs
        self.index: Index | None = None
        self.generation = ""
        if (out / "index.json").exists():
            self.index, self.generation = load_index(out, alone=True)
        self._published, self.mark = _remembered(build / "rows")
        names = [e.name for e in list_folder(build / "seals") if e.name.endswith(".json")]
        self.seals = {seal.task: seal for name in names if (seal := read_row_seal(build / "seals" / name)) is not None}

    @property
    def settings(self) -> dict[str, Any] | None:
        """Those of the dataset that is published."""
        return None if self.index is None else {**self.index.settings, "versions": self.index.versions}

    def whole(self, tasks: Sequence[RowTask]) -> dict[int, RowSeal]:
        """The shards that stand already, by task number."""
        out = {}
        for task in tasks:
            published, sealed = self._published.get(task.id), self.seals.get(task.id)
            if not task.known:
                continue
            if published is not None and self._is_whole(published, task):
                out[task.number] = published
            elif sealed is not None and self._is_whole(sealed, task) and self._is_sound(sealed):
                out[task.number] = sealed
        return out

    def _is_whole(self, seal: RowSeal, task: RowTask) -> bool:
        """Are the files of a finished shard there, with the header that they must have?"""
        if seal.rows != task.stop - task.start or set(seal.files) != {"hashes", *(f.name for f in self._fields)}:
            return False
        try:
            for kind, dtype, shape in files_of(self._fields, seal.rows):
                path = self._shards / file_name(kind, seal.files[kind])
                if self._stubs:
                    if path.stat().st_size != file_bytes(dtype, shape):
                        return False
                    continue
                fd, _ = open_array(path, dtype, shape)
                os.close(fd)
        except (FormatError, FileNotFoundError):
            return False
        return True

    def _is_sound(self, seal: RowSeal) -> bool:
        """Each file of an unpublished shard is held against its hash before it is published for the first time."""
        if self._stubs:
            return True
        try:
            return all(digest_file(self._shards / file_name(kind, digest)) == digest for kind, digest in seal.files.items())
        except (FormatError, FileNotFoundError):
            return False


def _remembered(path: Path) -> tuple[dict[str, RowSeal], Any]:
    """(the finished shards of the last generation that was published from here, by task; what it was made of), as far as it can be read."""
    try:
        document = read_sealed(path)
        return {seal.task: seal for seal in map(RowSeal.from_json, document["seals"])}, document["mark"]
    except (OSError, *UNREADABLE):
        return {}, None
