"""Hides the state of a repair: what is bad, what is sound, and the one way in which a file takes its place: by the hash of its bytes."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.marks import Fingerprints, marks_of_index
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.output import free_bytes
from mmcompile.compiler.plan import ShardTask, key_hashes, make_tasks, rows_per_shard, shuffled
from mmcompile.compiler.repair.aside import Made, Recipe, Workshop, recipe_of
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import Scan
from mmcompile.errors import BuildError, FormatError, SourceError
from mmcompile.format.canonical import as_bytes, as_text, canonical, name_to_json, read_limited
from mmcompile.format.catalog import Generation, digest_of, kept_files, load_table
from mmcompile.format.commit import install, write_atomic
from mmcompile.format.findings import VerifyReport
from mmcompile.format.index import INDEX_LIMIT, Index, load_classes
from mmcompile.format.keyhash import KEY_DIGITS
from mmcompile.format.npy import ALIGN, file_name, hash_bytes, hash_file, read_array
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import keys_of, pair_hash, sample_dtype

__all__ = ["Damaged", "Missing", "Place", "RecipeError", "tell_unsettled", "told"]

#: A bad file of shards/, and the newest shard that names it.
Place = tuple[str, Generation, int]

#: Sources that an entry of the report lists, and that its text names.
_LISTED, _NAMED = 1000, 3


@dataclass(frozen=True)
class Missing:
    """What is needed to make one file again.

    `path` is relative to the root; `reason` is one line for a person, without path and versions.  `sources` are (key, hash) of the first 1,000
    sources that are missing or have changed, with None for what is not known; `versions` are (library, wanted, found) of what differs from the
    build and may be the cause.
    """

    path: str
    reason: str
    sources: tuple[tuple[str | None, str | None], ...] = ()
    versions: tuple[tuple[str, str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        sources = [{"key": None if key is None else name_to_json(key), "hash": digest} for key, digest in self.sources]
        versions = [{"name": name, "wanted": wanted, "found": found} for name, wanted, found in self.versions]
        return {"path": name_to_json(self.path), "reason": self.reason, "sources": sources, "versions": versions}


class RecipeError(Exception):
    """Why RAW cannot be asked, in words for `Missing.reason`."""


class Damaged:
    """A dataset under repair.

    `bad` are the names of bad files in shards/; `indexes` are the generations whose index can be read, the current one first, then the newest;
    `generations` those whose table is sound too.
    """

    def __init__(self, root: Path, raw: Path, workshop: Workshop, scratch: Path, report: VerifyReport, tell: Callable[[Progress], None]) -> None:
        self.root, self.raw, self.workshop, self.scratch, self.report, self.tell = root, raw, workshop, scratch, report, tell
        self.shards = root / "shards"
        self.bad = {p.path.removeprefix("shards/") for p in report.problems if p.path.startswith("shards/")}
        self.missing: dict[str, Missing] = {}
        self.repaired: list[str] = []
        self.decoded = 0
        self.indexes: dict[str, Index] = {}
        self.generations: list[Generation] = []
        self._recipes: dict[int, Recipe] = {}
        self._plans: dict[bytes, tuple[Scan, list[ShardTask]]] = {}
        self._load()

    def _load(self) -> None:
        kept, _ = kept_files(self.root)
        current = self.report.generation or ""
        paths = {name: self.root / "generations" / f"{name}.json" for name in sorted(kept, key=lambda n: (n != current, -kept[n], n))}
        for name, path in {current: self.root / "index.json", **paths}.items() if current else paths.items():
            for place in dict.fromkeys((path, paths.get(name, path))):
                try:
                    data = read_limited(place, INDEX_LIMIT)
                    if hash_bytes(data) == name:
                        self.indexes[name] = Index.from_bytes(data, place)
                        break
                except (FormatError, OSError):
                    continue
        for name, index in self.indexes.items():
            try:
                self.generations.append(load_table(self.root, index, name))
            except (FormatError, MemoryError):
                continue

    # ------------------------------------------------------------------ the outcome

    def give_up(
        self,
        path: str,
        reason: str,
        sources: Sequence[tuple[bytes | None, str | None]] = (),
        versions: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        """Say what is missing for a file (relative to the root); what was said of it first stands."""
        if path in self.missing:
            return
        listed = [(None if key is None else as_text(key), digest) for key, digest in sources]
        if listed:
            named = ", ".join(_source_text(*source) for source in listed[:_NAMED]) + (", …" if len(listed) > _NAMED else "")
            reason = f"{reason}: {named}"
        self.missing[path] = Missing(path, reason, tuple(listed[:_LISTED]), versions)

    def put_file(self, name: str, made: Path) -> bool:
        """Give a finished file its place in shards/ if it hashes to its name; else change nothing."""
        fd = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        try:
            right = hash_file(fd) == digest_of(name)
        finally:
            os.close(fd)
        if right:
            try:
                self.shards.mkdir(exist_ok=True)
                install(made, self.shards / name)
            except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
                self.give_up(f"shards/{name}", f"something is in its place ({error.strerror}): move it away")
                return False
            self.done(f"shards/{name}")
        return right

    def put_bytes(self, name: str, data: bytes) -> bool:
        """As `put_file`, of a file's bytes."""
        if hash_bytes(data) != digest_of(name):
            return False
        made = self.scratch / name
        write_atomic(made, data, durable=False)
        return self.put_file(name, made)

    def done(self, path: str) -> None:
        """A file (relative to the root) is in place."""
        self.bad.discard(path.removeprefix("shards/"))
        self.missing.pop(path, None)
        self.repaired.append(path)
        self.tell(Progress("repair", message=f"repaired {path}"))

    def need_room(self, count: int) -> None:
        """Raise BuildError where fewer than `count` bytes are free."""
        free = free_bytes(self.root)
        if free is not None and count > free:
            raise BuildError(f"{self.root}: {count:,} bytes are needed for the repair, {free:,} are free: free some space", needed=count, free=free)

    # ------------------------------------------------------------------ how it was made

    def recipe(self, index: Index) -> Recipe:
        """How a generation was made.  Raises RecipeError."""
        if id(index) not in self._recipes:
            try:
                self._recipes[id(index)] = recipe_of(index, self.raw, self._classes(index))
            except BuildError as error:
                raise RecipeError(str(error)) from None
        return self._recipes[id(index)]

    def _classes(self, index: Index) -> tuple[str, ...] | None:
        try:
            return load_classes(self.root, index)
        except FormatError:
            return None

    def plan(self, recipe: Recipe) -> tuple[Scan, list[ShardTask]]:
        """The items of RAW today and the shards that they would make.  Raises RecipeError."""
        key = canonical([recipe.source.identity(), recipe.seed, recipe.shard_bytes, recipe.index.row_bytes])
        if key not in self._plans:
            try:
                self.tell(Progress("scan"))
                scan = recipe.source.scan(lambda n: self.tell(Progress("scan", n)))
                if recipe.seed is not None:
                    scan = shuffled(scan, recipe.seed)
            except SourceError as error:
                raise RecipeError(str(error)) from None
            rows = rows_per_shard(recipe.index.row_bytes, recipe.shard_bytes)
            self._plans[key] = scan, make_tasks(scan, key_hashes(scan.keys), rows, ("", ""))
        return self._plans[key]

    def rejected(self, index: Index) -> set[bytes] | None:
        """The names of the sources that a generation rejected; None where its rejects file is bad.  Raises RecipeError."""
        try:
            return set(self.names(index, [as_bytes(reject.key) for reject in load_rejects(self.root, index)]))
        except FormatError:
            return None

    def names(self, index: Index, keys: list[bytes]) -> list[bytes]:
        """The names of the sources with these keys of a generation, as RAW has them; a key of which it has none stays.  Raises RecipeError."""
        if index.key_hash is None or not keys:
            return keys
        recipe = told(self.recipe(index))
        known = {recipe.trace.key(name): name for name in self.plan(recipe)[0].keys.bare}
        return [known.get(key, key) for key in keys]

    def old_shards(self, recipe: Recipe) -> list[OldShard]:
        """Shards whose rows are those that the recipe makes, if their hashes are right: of generations with the same settings and versions."""
        out: list[OldShard] = []
        for generation in self.generations:
            marks = marks_of_index(generation.index)
            if marks.store == recipe.marks.store and generation.index.fields[:1] and _alike(generation.index, recipe.index):
                out += self._old_of(generation, recipe.marks.usable(marks.formats), marks)
        return list({tuple(sorted(shard.files.items())): shard for shard in reversed(out)}.values())  # generations share most of them

    def make(self, recipe: Recipe, old: list[OldShard], works: list[ShardWork], on_made: Callable[[ShardWork, Seal, Path], None]) -> Made:
        """`Workshop.make`, with progress."""
        total = sum(len(work.keys) for work in works)
        made = self.workshop.make(recipe, old, works, on_made, lambda done: self.tell(Progress("repair", done, total)))
        self.decoded += made.decoded
        return made

    def _old_of(self, generation: Generation, formats: frozenset[str], marks: Fingerprints) -> list[OldShard]:
        names = [name for name in generation.table.dtype.names or () if name != "rows"]
        out = []
        for record in generation.table if formats and marks.store else ():
            files = {name: pair_hash(record[name]) for name in names}
            if file_name("samples", files["samples"]) not in self.bad:
                out.append(OldShard(str(self.shards), generation.index.fields, files, int(record["rows"]), formats, sha256=generation.index.sha256))
        return out

    # ------------------------------------------------------------------ what a shard holds

    def file(self, generation: Generation, kind: str, shard: int) -> str:
        """The name of a file of a shard."""
        return file_name(kind, pair_hash(generation.table[kind][shard]))

    def samples(self, generation: Generation, shard: int) -> Any:
        """The provenance of a shard, or None where it is bad."""
        return None if self.file(generation, "samples", shard) in self.bad else self._records(generation, shard)

    def guess(self, generation: Generation, shard: int) -> Any:
        """What a bad samples file says, most of which may still be right; None where it has not even its length."""
        try:
            return self._records(generation, shard)
        except (FormatError, FileNotFoundError):
            return None

    def _records(self, generation: Generation, shard: int) -> Any:
        path = self.shards / self.file(generation, "samples", shard)
        return read_array(path, sample_dtype(generation.index.fields, generation.index.sha256), (int(generation.table["rows"][shard]),))

    def blob(self, generation: Generation, shard: int) -> bytes:
        """The bytes of a sound file of keys."""
        path = self.shards / self.file(generation, "keys", shard)
        return read_array(path, np.dtype("u1"), (os.path.getsize(path) - ALIGN,)).tobytes()

    def keys(self, generation: Generation, shard: int) -> list[bytes]:
        """The names of the sources of a shard's rows.  Where their lengths are lost, RAW tells them, or the bad file: a guess then.

        Raises RecipeError.
        """
        name = self.file(generation, "keys", shard)
        if name in self.bad:
            raise RecipeError(f"shards/{name} is lost, which tells its keys")
        blob = self.blob(generation, shard)
        samples = self.samples(generation, shard)
        if samples is not None:
            return self.names(generation.index, keys_of(samples, blob))
        if generation.index.key_hash is not None:
            return self.names(generation.index, [blob[at : at + KEY_DIGITS] for at in range(0, len(blob), KEY_DIGITS)])
        scan, _ = self.plan(self.recipe(generation.index))
        rows = int(generation.table["rows"][shard])
        found, cut = _cut(blob, scan.keys)
        if cut == len(blob) and len(found) == rows:
            return found
        samples = self.guess(generation, shard)
        found = _cut_roughly(blob, set(scan.keys), [] if samples is None else samples["key_stop"].tolist())
        if len(found) == rows:
            return found
        raise RecipeError(f"its keys cannot be told apart: RAW has no source whose key is what stands in shards/{name}, {as_text(blob[cut:][:80])!r}")


def told(recipe: Recipe) -> Recipe:
    """The same recipe.  Raises RecipeError where it does not tell how names become keys."""
    if not recipe.trace.told:
        raise RecipeError("keys are hashed with a secret, which is not here: the same `mmcompile build` into a new folder makes the same files")
    return recipe


def _alike(one: Index, other: Index) -> bool:
    return [(f.name, f.dtype, f.shape, f.layout) for f in one.fields] == [(f.name, f.dtype, f.shape, f.layout) for f in other.fields]


def _cut(blob: bytes, keys: Sequence[bytes]) -> tuple[list[bytes], int]:
    """A blob of keys cut where the keys of RAW, in their order, say; and how far that went."""
    out, at = [], 0
    for key in keys:
        if at < len(blob) and blob.startswith(key, at):
            out.append(key)
            at += len(key)
    return out, at


def _cut_roughly(blob: bytes, known: set[bytes], stops: list[int]) -> list[bytes]:
    """A blob of keys cut at stops that may be wrong, with a set of keys that may be too small; nothing where neither goes on."""
    lengths = sorted({len(key) for key in known})
    likely = sorted({stop for stop in stops if 0 < stop <= len(blob)})
    out: list[bytes] = []
    at = 0
    while at < len(blob):
        following = bisect.bisect_right(likely, at)
        end = likely[following] if following < len(likely) else None
        if end is None or blob[at:end] not in known:
            end = next((at + n for n in lengths if blob[at : at + n] in known), end)
        if end is None:
            return []
        out.append(blob[at:end])
        at = end
    return out


def _source_text(key: str | None, digest: str | None) -> str:
    if key is None:
        return f"a source with hash {digest}"
    return repr(key) if digest is None else f"{key!r} (hash {digest})"


def tell_unsettled(d: Damaged, name: str, work: ShardWork, recipe: Recipe, made: Made, digests: list[str] | None = None) -> None:
    """Give a file up whose items could not all be made."""
    ended = {
        **{i: made.failures[key] for i, key in enumerate(work.keys) if key in made.failures},
        **{i: line["message"] for i, line in work.rejects.items()},
    }
    if name not in d.bad or not ended:
        return
    first = min(ended)
    sources: list[tuple[bytes | None, str | None]] = []
    for i in sorted(ended):
        sources.append((work.keys[i].rpartition(b"\0")[2] or None, None if digests is None else digests[i]))
    d.give_up(f"shards/{name}", f"{len(ended):,} sources cannot be decoded ({ended[first]})", sources, recipe.versions())
