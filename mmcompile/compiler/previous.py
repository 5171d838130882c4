"""Hides what is already there: shards of earlier generations and of an unfinished build that can be taken whole, row by row, or not at all.

What is held in memory grows with shards and rejects, not with images: provenance is read shard by shard when it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.marks import Fingerprints, made_as, marks_of_made, of_kinds, stored_as
from mmcompile.compiler.plan import ShardTask, key_hashes
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.seals import Seal, read_seal, read_seals
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.spatial import Mover
from mmcompile.compiler.task import remembered_as
from mmcompile.compiler.trace import PLAIN, Trace
from mmcompile.errors import FormatError
from mmcompile.format.canonical import as_bytes, canonical, name_from_json
from mmcompile.format.catalog import digest_file, kept_files, load_table
from mmcompile.format.fields import Field, pixel_fields, value_fields
from mmcompile.format.index import Index, load_index, read_generation
from mmcompile.format.npy import file_bytes, file_name, header, open_array
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import flag_counts, hash_pair, pair_hash, sums_of

__all__ = ["Previous", "Stale", "Whole", "array_hash", "joined", "replaced"]


@dataclass(frozen=True)
class Whole:
    """A finished shard that may stand for a task if its items still have these hashes (N, 2).  `sums` reads its provenance again."""

    hashes: npt.NDArray[np.uint64]
    stat: npt.NDArray[Any] | None
    files: dict[str, str]
    rows: int
    rejects: dict[int, dict[str, Any]]
    flags: dict[str, int]
    sums: Callable[[], dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class Stale:
    """A shard whose rows (of the kinds it names) would be right under the versions that they were made with, and what those were."""

    shard: OldShard
    versions: dict[str, str]
    revision: int


@dataclass
class _Generation:
    """The shards of a generation that may be taken whole, by the hash of their keys, and its rejects that still are some, by key."""

    shards: dict[str, list[OldShard]]
    rejects: dict[bytes, dict[str, Any]]
    rejected: npt.NDArray[np.uint64]


@dataclass
class Previous:
    """What OUT holds before this run.

    `old` are the shards whose rows may be copied one by one, `stale` those whose rows only other library versions make, `remembered` the rejects
    that need not be decoded again (see `remembered_as`); `settings` those of the current generation (or of the unfinished build) and its library
    versions, None where there is neither; `shards` the files of the current generation, in order.
    """

    root: Path
    fields: tuple[Field, ...]
    preprocess: Preprocess
    versions: dict[str, str]
    marks: Fingerprints
    mover: Mover | None = None
    #: What is wrong with the values of items of this scan, by key: of these alone are earlier rejects for that reason believed.
    faults: dict[bytes, str] = field(default_factory=dict)
    seals: dict[str, Seal] = field(default_factory=dict)
    old: list[OldShard] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)
    remembered: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    index: Index | None = None
    generation: str | None = None
    trace: Trace = PLAIN
    #: The names of the sources of this scan, that keys are made of.
    names: Keys = field(default_factory=lambda: Keys.of(()))
    #: Image shards lie on a store: here stand stubs of their size, which the store vouches for.
    stubs: bool = False
    shards: list[dict[str, str]] = field(default_factory=list)
    _sound: dict[str, bool] = field(default_factory=dict)
    _generations: list[_Generation] = field(default_factory=list)
    _added: set[Any] = field(default_factory=set)
    _judged: dict[bytes, tuple[Fingerprints, Preprocess | None, frozenset[str], frozenset[str]]] = field(default_factory=dict)

    def load(self) -> None:
        """Look at the generations that are kept and at the seals.  Raises FormatError when the current generation cannot be read."""
        kept = kept_files(self.root)[0]
        if (self.root / "index.json").exists():
            self.index, current = load_index(self.root, alone=True)
            self.generation = current
            self.settings = {**self.index.settings, "versions": self.index.versions}
            self._add_generation(self.index)
            kept.pop(current, None)
        for name in sorted(kept):
            try:
                self._add_generation(read_generation(self.root, name))
            except (FormatError, FileNotFoundError):
                continue
        if self.index is None:
            try:
                found = json.loads((self.root / ".build" / "settings.json").read_bytes())
            except (OSError, ValueError):
                found = None
            self.settings = found if isinstance(found, dict) else None
        for seal in read_seals(self.root / ".build" / "seals"):
            self.seals[seal.task] = seal.outline()
            marks, *_ = self._judge(seal.made)
            if self._same_keys(seal.made):
                lines = {as_bytes(name_from_json(line["key"])): line for line in seal.rejects.values() if self.marks.rejects(marks, line)}
                self._remember(self._by_name(lines))
            if seal.rows:
                self._add_shard(seal.made, seal.fields, seal.files, seal.rows)

    def borrow(self, root: Path, generation: str) -> None:
        """Let rows of another dataset be copied, too.  Raises FormatError when that generation cannot be read."""
        index, _ = load_index(root, generation)
        for files, rows in _shards_of(root, index):
            self._add_shard(made_as(index), index.fields, files, rows, root)

    def _judge(self, made: dict[str, Any]) -> tuple[Fingerprints, Preprocess | None, frozenset[str], frozenset[str]]:
        """(fingerprints, settings, kinds of rows that are right today, kinds that would be under their own versions) of what was made so."""
        name = canonical(made)
        if name not in self._judged:
            marks, preprocess = marks_of_made(made)
            ours = marks_of_made(made, today=self.versions)[0]
            can = preprocess is not None and stored_as(preprocess, self.preprocess) is not None
            usable = self.marks.usable(marks.formats) if can else frozenset()
            stale = self.marks.usable(ours.formats) - usable if can else frozenset()
            self._judged[name] = marks, preprocess, usable, stale
        return self._judged[name]

    def _remember(self, lines: dict[bytes, dict[str, Any]]) -> None:
        for key, line in lines.items():
            self.remembered.setdefault(remembered_as(line["source_hash"], key), line)

    def _add_shard(
        self, made: dict[str, Any], fields: tuple[Field, ...], files: dict[str, str], rows: int, root: Path | None = None
    ) -> OldShard | None:
        """A shard that was made so, with these fields; None where none of its rows is right.  `root`: of another dataset.

        Generations share most of their shards: each is listed once.
        """
        _, preprocess, usable, stale = self._judge(made)
        if preprocess is None or not usable | stale:
            return None
        how = stored_as(preprocess, self.preprocess)
        mine, its = ([(f.name, f.meaning) for f in pixel_fields(some)] for some in (self.fields, fields))
        if mine != its or [f.name for f in fields[: len(its)]] != [name for name, _ in its]:  # pixels come first, in the order of their files
            return None
        folder = str((root or self.root) / "shards")
        shard = OldShard(folder, fields, files, rows, usable, None if how == "same" else preprocess, root is not None, bool(made.get("sha256")))
        mark = (folder, tuple(sorted(files.items())), usable, stale)
        if mark not in self._added:
            self._added.add(mark)
            if usable:
                self.old.append(shard)
            if stale:
                self.stale.append(Stale(replace(shard, formats=stale, made=None), dict(made["versions"]), int(made["revision"])))
        return shard if usable and how == "same" and shard.sha256 == self.trace.sha256 else None

    def _add_generation(self, index: Index) -> None:
        made = made_as(index)
        marks = self._judge(made)[0]
        lines = {}
        with contextlib.suppress(FormatError):  # without the list its images are decoded again
            if self._same_keys(made):
                lines = self._by_name({as_bytes(line.key): line.to_json() for line in load_rejects(self.root, index)})
        right = {key: line for key, line in lines.items() if self.marks.rejects(marks, line) or self._at_fault(key, line)}
        self._remember({key: line for key, line in right.items() if line["stage"] != "value"})
        shards: dict[str, list[OldShard]] = {}
        before, now = ([(f.name, f.dtype, f.shape) for f in value_fields(some)] for some in (index.fields, self.fields))
        if index.keyed and pixel_fields(index.fields):
            for files, rows in _shards_of(self.root, index):
                if index is self.index:
                    self.shards.append(files)
                shard = self._add_shard(made, index.fields, files, rows)
                if shard is not None and before == now:
                    shards.setdefault(files["keys"], []).append(shard)
        self._generations.append(_Generation(shards, right, np.sort(key_hashes(list(right)))))

    def _same_keys(self, made: dict[str, Any]) -> bool:
        """Are keys made of names there as they are here?"""
        return made.get("keys") == self.trace.keys

    def _by_name(self, lines: dict[bytes, dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
        """Lines by the name of their source, from lines by key; without those whose names are not known any more."""
        if not self.trace.hashing or not lines:
            return lines
        return {name: lines[key] for name in self.names.bare if (key := self.trace.key(name)) in lines}

    def _at_fault(self, key: bytes, line: dict[str, Any]) -> bool:
        """Is this a reject for a value that this scan finds wrong, too?"""
        return bool(line["stage"] == "value" and self.faults.get(key) == line["message"])

    @property
    def damaged(self) -> int:
        """Sealed shards that were looked at, and are no longer what their seals say."""
        return sum(not sound for sound in self._sound.values())

    def warnings(self, samples: int, labelled: bool) -> Iterator[str]:
        """A line about damage that was found, and one where most of what OUT held, or its labels, is not in RAW: perhaps another OUT was meant.

        `samples`, `labelled`: how many RAW has, and whether they have labels.
        """
        if self.index is not None and self.generation is not None:
            yield from replaced(self.index, self.generation, samples, labelled=labelled, keyed=True)
        if damaged := self.damaged:
            yield f"{damaged:,} sealed shard{'s' if damaged > 1 else ''} of an unfinished build had been damaged, and had to be made again"

    # ------------------------------------------------------------------ whole shards

    def candidates(self, task: ShardTask, keys: Keys, hashes: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> Iterator[Whole]:
        """The finished shards with this task's keys and values under today's settings, and all their files; `hashes` (N,) are those of the keys."""
        seal = read_seal(self.root / ".build" / "seals", task.id) if task.id in self.seals else None
        if seal is not None and len(seal.hashes) == len(keys):
            if seal.task not in self._sound:
                self._sound[seal.task] = self._sealed(seal)
            if self._sound[seal.task]:
                sums = seal.sums or {}
                yield Whole(seal.hashes, seal.stat, seal.files, seal.rows, seal.rejects, seal.flags or {}, lambda: sums)
        for generation in self._generations:
            rejects = {int(i): line for i in np.flatnonzero(_in(hashes, generation.rejected)) if (line := generation.rejects.get(keys[int(i)]))}
            stored = np.ones(len(keys), bool)
            stored[list(rejects)] = False
            if self.faults and any(keys[i] in self.faults for i in np.flatnonzero(stored).tolist()):
                continue
            if not stored.any():
                yield Whole(_with_rejects(None, stored, rejects), None, {}, 0, rejects, {}, dict)
                continue
            blob, stops = joined(keys, stored, self.trace)
            for shard in generation.shards.get(array_hash(blob), ()):
                whole = self._kept(shard, stops, stored, rejects, values, keys)
                if whole is not None:
                    yield whole

    def _kept(
        self,
        shard: OldShard,
        stops: npt.NDArray[np.int64],
        stored: npt.NDArray[np.bool_],
        rejects: dict[int, dict[str, Any]],
        values: npt.NDArray[np.void],
        keys: Keys,
    ) -> Whole | None:
        """A published shard, if its provenance and values are sound and say the same, and its other files are there."""
        folder = self.root / "shards"
        try:
            samples = shard.samples()
            if not np.array_equal(samples["key_stop"], stops) or not of_kinds(samples, shard.formats).all():
                return None
            if self.mover is not None and self.mover.misfits(values[stored], samples):
                return None
            wanted = (
                values[stored]
                if self.mover is None
                else self.mover.moved(values[stored], samples, [keys[i] for i in np.flatnonzero(stored).tolist()])
            )
            for spec in value_fields(self.fields):
                if shard.read(spec.name, spec.stored, (shard.rows, *spec.shape)).tobytes() != wanted[spec.name].tobytes():
                    return None
            if digest_file(shard.path("keys")) != shard.files["keys"]:
                return None
            self._look_at_images(shard.files, shard.rows, folder)
        except (FormatError, FileNotFoundError):
            return None
        return Whole(
            _with_rejects(samples, stored, rejects),
            None,
            shard.files,
            shard.rows,
            rejects,
            flag_counts(samples["flags"]),
            lambda: sums_of(shard.samples(), self.fields),
        )

    def _look_at_images(self, files: dict[str, str], rows: int, folder: Path) -> None:
        """Kind, size and header of the files of pixels; their bytes are what `verify` is there for.  Raises FormatError or FileNotFoundError."""
        for spec in pixel_fields(self.fields):
            path, shape = folder / file_name(spec.name, files[spec.name]), (rows, *spec.shape)
            if self.stubs:
                if path.stat().st_size != file_bytes(spec.stored, shape):
                    raise FormatError(f"{path}: another size than the {file_bytes(spec.stored, shape):,} bytes expected", path=str(path))
                continue
            fd, _ = open_array(path, spec.stored, shape)
            os.close(fd)

    def _sealed(self, seal: Seal) -> bool:
        """Are the files of a sealed shard whole?  Each is held against its hash before it is published for the first time."""
        folder = self.root / "shards"
        try:
            if seal.rows:
                self._look_at_images(seal.files, seal.rows, folder)
            afar = {f.name for f in pixel_fields(self.fields)} if self.stubs else set()
            here = {name: digest for name, digest in seal.files.items() if name not in afar}
            return all(digest_file(folder / file_name(name, digest)) == digest for name, digest in here.items())
        except (FormatError, FileNotFoundError, KeyError):
            return False


def replaced(before: Index, generation: str, samples: int, *, labelled: bool, keyed: bool) -> Iterator[str]:
    """A line where a dataset is replaced by so many samples that are of another kind, or far fewer, or have no labels where it has some, or some."""
    had = any(f.meaning == "class" for f in before.fields)
    if samples * 2 < before.samples or labelled != had or keyed != before.keyed:
        kind = {True: "with labels", False: "without labels"}
        called = {True: " images", False: " rows of arrays or tables"}
        was, becomes = (called[before.keyed], called[keyed]) if keyed != before.keyed else (" samples", "")
        yield (
            f"this replaces {before.samples:,}{was} {kind[had]} by {samples:,}{becomes} {kind[labelled]}; until `mmcompile prune` the old ones are "
            f"read with MMapShardDataset(out, generation='{generation}')"
        )


def _shards_of(root: Path, index: Index) -> Iterator[tuple[dict[str, str], int]]:
    """(files by kind, rows) of each shard of a generation.  Raises FormatError."""
    table = load_table(root, index, "").table
    names = [n for n in table.dtype.names or () if n != "rows"]
    for rows, digests in zip(table["rows"].tolist(), zip(*(table[n].tolist() for n in names), strict=True), strict=True):
        yield {name: pair_hash(pair) for name, pair in zip(names, digests, strict=True)}, rows


def _in(hashes: npt.NDArray[np.uint64], ordered: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of `hashes` (N,) are in a sorted array."""
    if not len(ordered):
        return np.zeros(len(hashes), bool)
    found: npt.NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)] == hashes
    return found


def joined(names: Keys, stored: npt.NDArray[np.bool_], trace: Trace) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(the bytes of the keys of these sources, where each ends), as a shard's keys file and its provenance have them."""
    picked = trace.keys_of(names if stored.all() else Keys.of(names[i] for i in np.flatnonzero(stored).tolist()))
    return picked.blob, picked.stops


def array_hash(array: npt.NDArray[Any]) -> str:
    """What the file of an array is called."""
    state = xxhash.xxh3_128(header(array.dtype, array.shape))
    state.update(np.ascontiguousarray(array).view(np.uint8))  # type: ignore[arg-type]
    return state.hexdigest()


def _with_rejects(samples: npt.NDArray[Any] | None, stored: npt.NDArray[np.bool_], rejects: dict[int, dict[str, Any]]) -> npt.NDArray[np.uint64]:
    """The source hashes (N, 2) of all items of a shard."""
    out = np.zeros((len(stored), 2), np.uint64)
    if samples is not None:
        out[stored] = samples["source_hash"]
    for i, line in rejects.items():
        out[i] = hash_pair(line["source_hash"])
    return out
