"""Hides what is already there: shards of earlier generations and of an unfinished build that can be taken whole, row by row, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.plan import ShardTask
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.seals import Seal, read_seals
from mmcompile.compiler.task import remembered_as
from mmcompile.errors import FormatError
from mmcompile.format.canonical import as_bytes, name_from_json
from mmcompile.format.catalog import digest_file, load_table
from mmcompile.format.index import Field, Index, load_index
from mmcompile.format.npy import file_bytes, file_name, open_array
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import flag_counts, hash_pair, pair_hash, shard_sums

__all__ = ["Fingerprints", "Previous", "Whole"]


@dataclass(frozen=True)
class Fingerprints:
    """Of today's settings: `pixel` over all formats, `store`, and the pixel fingerprint of each source format."""

    pixel: str
    store: str
    formats: dict[str, str]

    def usable(self, other: dict[str, str]) -> frozenset[str]:
        """The formats whose rows, made under `other`, are still right."""
        return frozenset(f for f, mark in self.formats.items() if other.get(f) == mark)


@dataclass(frozen=True)
class Whole:
    """A finished shard that may stand for a task if its items still have these hashes (N, 2)."""

    hashes: npt.NDArray[np.uint64]
    stat: npt.NDArray[Any] | None
    files: dict[str, str]
    rows: int
    rejects: dict[int, dict[str, Any]]
    flags: dict[str, int]
    sums: Callable[[], list[dict[str, Any]]]


@dataclass
class _Published:
    shard: OldShard
    samples: npt.NDArray[Any]
    keys: list[bytes]
    rejects: dict[bytes, dict[str, Any]]


@dataclass
class Previous:
    """What OUT holds before this run.

    `old` are the shards whose rows may be copied one by one, `remembered` the rejects that need not be decoded again (see `remembered_as`);
    `settings` those of the current generation (or of the unfinished build) and its library versions, None where there is neither.
    """

    root: Path
    fields: tuple[Field, ...]
    marks: Fingerprints
    mark_index: Callable[[Index], Fingerprints]
    seals: dict[str, Seal] = field(default_factory=dict)
    old: list[OldShard] = field(default_factory=list)
    remembered: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    index: Index | None = None
    generation: str | None = None
    #: Image shards lie on a store: here stand stubs of their size, which the store vouches for.
    stubs: bool = False
    _published: dict[bytes, _Published] = field(default_factory=dict)
    _rejected: set[bytes] = field(default_factory=set)
    _added: set[Any] = field(default_factory=set)

    def load(self) -> None:
        """Look at the generations that are kept and at the seals.  Raises FormatError when the current generation cannot be read."""
        folder = str(self.root / "shards")
        if (self.root / "index.json").exists():
            self.index, current = load_index(self.root)
            self.generation = current
            self.settings = {**self.index.settings, "versions": self.index.versions}
            names = [p.stem for p in sorted((self.root / "generations").glob("*.json"))] if (self.root / "generations").is_dir() else []
            for name in [current, *(n for n in names if n != current)]:
                try:
                    self._add_generation(load_index(self.root, name)[0], folder)
                except (FormatError, FileNotFoundError):
                    continue
        else:
            try:
                found = json.loads((self.root / ".build" / "settings.json").read_bytes())
            except (OSError, ValueError):
                found = None
            self.settings = found if isinstance(found, dict) else None
        self.seals = read_seals(self.root / ".build" / "seals")
        for seal in self.seals.values():
            if seal.pixel == self.marks.pixel:
                self._remember(seal.rejects.values(), seal.store)
            formats = self.marks.usable(seal.formats)
            if formats and seal.store == self.marks.store and seal.rows:
                fields = (self.fields[0], Field("label", "int64", (), "class")) if seal.labels is not None else self.fields[:1]
                self._add_shard(OldShard(folder, fields, seal.files, seal.rows, formats))

    def _remember(self, lines: Iterable[dict[str, Any]], store: str) -> None:
        for line in lines:
            # What the dtype cannot hold is a matter of the store settings; all else of the pixel settings.
            if line["source_hash"] and (line["stage"] != "cast" or store == self.marks.store):
                key = as_bytes(name_from_json(line["key"]))
                self.remembered.setdefault(remembered_as(line["source_hash"], key), line)

    def _add_shard(self, shard: OldShard) -> bool:
        """Generations share most of their shards: each is looked at once."""
        mark = (tuple(sorted(shard.files.items())), shard.formats)
        if mark in self._added:
            return False
        self._added.add(mark)
        self.old.append(shard)
        return True

    def _add_generation(self, index: Index, folder: str) -> None:
        marks = self.mark_index(index)
        rejects = self._rejects(index)
        if marks.pixel == self.marks.pixel:
            self._remember(rejects.values(), marks.store)
        self._rejected.update(rejects)
        image, formats = index.fields[0], self.marks.usable(marks.formats)
        mine = self.fields[0]
        if (image.name, image.dtype, image.shape, image.layout) != (mine.name, mine.dtype, mine.shape, mine.layout) or not formats:
            return
        if marks.store != self.marks.store:
            return
        table = load_table(self.root, index, "").table
        names = [n for n in table.dtype.names or () if n != "rows"]
        for record in table:
            shard = OldShard(folder, index.fields, {n: pair_hash(record[n]) for n in names}, int(record["rows"]), formats)
            if not self._add_shard(shard):
                continue
            try:
                samples = shard.samples()
                keys = shard.keys(samples)
            except (FormatError, FileNotFoundError):
                continue
            if marks.pixel == self.marks.pixel and tuple(f.name for f in index.fields) == tuple(f.name for f in self.fields):
                self._published.setdefault(keys[0], _Published(shard, samples, keys, rejects))

    def _rejects(self, index: Index) -> dict[bytes, dict[str, Any]]:
        return {as_bytes(line.key): line.to_json() for line in load_rejects(self.root, index)}

    def whole(self, task: ShardTask, keys: Sequence[bytes], labels: npt.NDArray[np.int64] | None) -> Whole | None:
        """The finished shard with this task's keys and labels under today's settings, if there is one with all its files."""
        seal = self.seals.get(task.id)
        if seal is not None and len(seal.hashes) == len(keys) and self._files_stand(seal.files, seal.rows, seal=True):
            sums = seal.sums or []
            return Whole(seal.hashes, seal.stat, seal.files, seal.rows, seal.rejects, seal.flags or {}, lambda: sums)
        for key in keys:
            found = self._published.get(key)
            if found is not None:
                return self._kept(found, keys, labels)
            if key not in self._rejected:
                return None
        return None

    def _kept(self, found: _Published, keys: Sequence[bytes], labels: npt.NDArray[np.int64] | None) -> Whole | None:
        hashes = np.zeros((len(keys), 2), np.uint64)
        stored = np.zeros(len(keys), bool)
        rejects: dict[int, dict[str, Any]] = {}
        row = 0
        for i, key in enumerate(keys):
            if row < len(found.keys) and found.keys[row] == key:
                hashes[i], stored[i] = found.samples["source_hash"][row], True
                row += 1
            elif key in found.rejects and found.rejects[key]["source_hash"]:
                rejects[i] = found.rejects[key]
                hashes[i] = hash_pair(found.rejects[key]["source_hash"])
            else:
                return None
        shard = found.shard
        if row != len(found.keys) or not self._files_stand(shard.files, shard.rows):
            return None
        try:
            if labels is not None and not np.array_equal(shard.read("label", np.dtype("<i8"), (shard.rows,)), labels[stored]):
                return None
        except FormatError:
            return None
        image = self.fields[0]
        pixels = int(np.prod(image.sample_shape[1:]))
        samples = found.samples
        return Whole(hashes, None, shard.files, shard.rows, rejects, flag_counts(samples["flags"]), lambda: shard_sums(samples, pixels))

    def _files_stand(self, files: dict[str, str], rows: int, *, seal: bool = False) -> bool:
        """Are the files of a finished shard whole?  Those of a seal are held against their hashes before their first publishing; the images of a
        published shard are only looked at, which `verify` is there for.
        """
        if not rows:
            return True
        images = [self.fields[0].name] if self.stubs else []
        for spec in self.fields:
            try:
                if spec.name in images:
                    if os.stat(self.root / "shards" / file_name(spec.name, files[spec.name])).st_size != file_bytes(spec.stored, (rows, *spec.shape)):
                        return False
                    continue
                fd, _ = open_array(self.root / "shards" / file_name(spec.name, files[spec.name]), spec.stored, (rows, *spec.shape))
                os.close(fd)
            except (FormatError, FileNotFoundError, KeyError):
                return False
        try:
            return all(
                digest_file(self.root / "shards" / file_name(n, digest)) == digest
                for n, digest in files.items()
                if n not in images and (seal or n != self.fields[0].name)
            )
        except (FormatError, FileNotFoundError):
            return False
