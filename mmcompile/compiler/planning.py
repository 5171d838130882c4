"""Hides what a build has to do: its shards, which of them stand already, and what is known of each source without reading it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.engines import result_within
from mmcompile.compiler.marks import marks_of, marks_of_index, versions_of
from mmcompile.compiler.options import BuildOptions, typed
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.output import describe_changes
from mmcompile.compiler.plan import ShardTask, key_hashes, make_tasks, rows_per_shard
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.previous import Fingerprints, Previous, Whole
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import Scan, Source
from mmcompile.compiler.statcache import StatCache, old_enough
from mmcompile.compiler.task import Job, hash_items
from mmcompile.errors import EngineError, OptionError
from mmcompile.format.canonical import canonical
from mmcompile.format.index import INDEX_LIMIT, Field

__all__ = ["Listed", "Planned", "Wanted"]

#: Items hashed by one call of a worker.
_HASH_CHUNK = 128
#: A disk slower than this is taken for one that hangs.
_HASH_BYTES_PER_S = 1e6


class Listed:
    """A scan of RAW, when it was made (`at_ns`), and the hash of each key."""

    def __init__(self, scan: Scan, at_ns: int) -> None:
        self.scan, self.at_ns = scan, at_ns
        self.hashes64 = key_hashes(scan.keys)


@dataclass(frozen=True)
class Wanted:
    """What a build is to make: its options as asked for, with the size chosen (`why` says how), and all that follows from them."""

    asked: Preprocess
    preprocess: Preprocess
    why: str
    fields: tuple[Field, ...]
    versions: dict[str, str]
    marks: Fingerprints
    settings: dict[str, Any]

    @classmethod
    def of(cls, asked: Preprocess, chosen: Preprocess, why: str, source: Source, labelled: bool, options: BuildOptions) -> Wanted:
        """Raises OptionError where the settings are too long for an index."""
        preprocess = chosen.resolved()
        normalize = preprocess.read_normalize()
        image = Field(
            "image",
            preprocess.dtype,
            preprocess.row_shape(),
            "image",
            preprocess.layout,
            preprocess.read_scale(),
            None if normalize is None else (normalize.mean, normalize.std),
        )
        fields = (image, Field("label", "int64", (), "class")) if labelled else (image,)
        versions = versions_of(preprocess)
        settings = {"preprocess": preprocess.settings(), "source": source.identity(), "shard_bytes": options.shard_bytes}
        if (length := len(canonical(settings))) > INDEX_LIMIT // 2:
            raise OptionError(
                f"the settings are {length:,} bytes, at most {INDEX_LIMIT // 2:,} fit: give patterns to --include and --exclude, not single files"
            )
        return cls(asked, preprocess, why, fields, versions, marks_of(preprocess, versions, PIXEL_REVISION), settings)

    @property
    def compared(self) -> dict[str, Any]:
        """What is held against an earlier build."""
        return {**self.settings, "versions": self.versions}

    @property
    def row_bytes(self) -> int:
        return sum(f.row_bytes for f in self.fields)


class Planned:
    """The shards of a build.

    `tasks` in order; `whole` by task number: those that stand already; `previous`: what OUT held; `changed`: settings that differ from it, a line
    each; `hashes` (N, 2) and `known` (N,): content hashes of sources as far as they are known.
    """

    def __init__(self, out: Path, job: Job, wanted: Wanted, listed: Listed, options: BuildOptions, executor: Executor) -> None:
        self._job, self._wanted, self._listed, self._options, self._executor = job, wanted, listed, options, executor
        scan = listed.scan
        rows = rows_per_shard(wanted.row_bytes, options.shard_bytes)
        self.tasks: list[ShardTask] = make_tasks(scan.keys, scan.labels, listed.hashes64, rows, (wanted.marks.pixel, wanted.marks.store))
        self.previous = Previous(out, wanted.fields, wanted.marks, marks_of_index, stubs=job.store is not None)
        self.previous.load()
        self.changed = tuple(describe_changes(self.previous.settings, wanted.compared))
        self._check_choice(out)
        self._cache = StatCache(out / ".build" / "stat-cache", job.source.location())
        self.hashes, self.known = self._cache.known(listed.hashes64, scan.stat)
        self.whole: dict[int, Whole] = {}

    @property
    def todo(self) -> list[ShardTask]:
        """The shards that have to be made."""
        return [t for t in self.tasks if t.number not in self.whole]

    @property
    def kept(self) -> int:
        """Rows of shards that stand already."""
        return sum(w.rows for w in self.whole.values())

    def find_whole(self, progress: Callable[[Progress], None]) -> None:
        """See which shards stand already; reads the sources whose stat does not tell that they are unchanged, where that may save a shard."""
        scan = self._listed.scan
        keys, labels, stat = scan.keys, scan.labels, scan.stat
        candidates: list[tuple[ShardTask, Whole]] = []
        for task in self.tasks:
            part = slice(task.start, task.stop)
            whole = self.previous.whole(task, keys[part], None if labels is None else labels[part])
            if whole is not None:
                if whole.stat is not None:
                    same = (whole.stat == stat[part]) & (stat["size"][part] >= 0) & ~self.known[part]
                    self.hashes[part][same] = whole.hashes[same]
                    self.known[part] |= same
                candidates.append((task, whole))
        self._hash_unknown([i for task, _ in candidates for i in range(task.start, task.stop) if not self.known[i]], progress)
        for task, whole in candidates:
            part = slice(task.start, task.stop)
            if self.known[part].all() and np.array_equal(self.hashes[part], whole.hashes):
                self.whole[task.number] = whole

    def works(self) -> Iterator[ShardWork]:
        """The shards that have to be made, each with what is known of its items."""
        scan, marks = self._listed.scan, self._wanted.marks
        stat = scan.stat.copy()
        stat[~old_enough(stat, self._listed.at_ns)] = (-1, -1, -1, -1)
        empty = Seal("", marks.pixel, marks.store, marks.formats, None, stat[:0], np.empty((0, 2), np.uint64), {}, {})
        for task in self.todo:
            part = slice(task.start, task.stop)
            labels = None if scan.labels is None else scan.labels[part]
            seal = replace(empty, task=task.id, stat=stat[part].copy())
            yield ShardWork(task, scan.keys[part], labels, scan.stat[part], self.hashes[part].copy(), self.known[part].copy(), seal)

    def learn(self, work: ShardWork) -> None:
        """Take over what became known while a shard was made."""
        part = slice(work.task.start, work.task.stop)
        self.hashes[part], self.known[part] = work.hashes, work.known

    def save_stats(self) -> None:
        """Remember what is known of the sources for the next build; a cache only, so a failure is none."""
        with contextlib.suppress(OSError):
            self._cache.save(self._listed.hashes64, self._listed.scan.stat, self.hashes, self.known, self._listed.at_ns)

    def _check_choice(self, out: Path) -> None:
        """A rebuild that nobody told a size must not silently choose another one."""
        wanted = self._wanted
        before = (self.previous.settings or {}).get("preprocess")
        if not wanted.why or not before or self.previous.index is None:
            return
        try:
            old = Preprocess.from_settings(before)
        except (OptionError, KeyError, TypeError, ValueError):
            return
        mine = wanted.preprocess
        if old.mode == mine.mode == "keep" and wanted.asked.kept_mode is None and old.kept_mode != mine.kept_mode:
            raise OptionError(
                f"{out}: published with pictures of mode {old.kept_mode}; for the images that are there now the choice would be "
                f"{mine.kept_mode} ({wanted.why}). Take the strays out, or build into a new folder",
                before=old.kept_mode,
                now=mine.kept_mode,
            )
        if wanted.asked.needs_size() and (old.resize, old.crop, old.pad, old.keep_size) != (mine.resize, mine.crop, mine.pad, mine.keep_size):
            raise OptionError(
                f"{out}: published with {typed(old)}; for the images that are there now the choice would be {typed(mine)} ({wanted.why}). "
                f"Say which: add {typed(old)} to go on as before, or {typed(mine)} to change",
                before=typed(old),
                now=typed(mine),
            )

    def _hash_unknown(self, items: list[int], progress: Callable[[Progress], None]) -> None:
        """Read the files whose stat does not tell that they are unchanged, where that may save a whole shard."""
        scan = self._listed.scan
        chunks = [items[i : i + _HASH_CHUNK] for i in range(0, len(items), _HASH_CHUNK)]
        futures = [self._executor.submit(hash_items, self._job, [scan.keys[i] for i in chunk]) for chunk in chunks]
        for done, (chunk, future) in enumerate(zip(chunks, futures, strict=True)):
            limit_s = self._options.decode_timeout_s + len(chunk) + int(scan.stat["size"][chunk].clip(0).sum()) / _HASH_BYTES_PER_S
            try:
                found = result_within(self._executor, future, limit_s)
            except EngineError:  # not known, then: the build itself finds out which file it was
                continue
            same = np.array([self._unchanged(i) for i in chunk])
            read = found.any(axis=1) & same
            at = np.array(chunk)[read]
            self.hashes[at], self.known[at] = found[read], True
            progress(Progress("check", min(len(items), (done + 1) * _HASH_CHUNK), len(items)))

    def _unchanged(self, item: int) -> bool:
        """Is the file still the one that was scanned, so that what was read now may be remembered under that stat?"""
        scan = self._listed.scan
        try:
            return self._job.source.stat(scan.keys[item]) == tuple(scan.stat[item].tolist())
        except OSError:
            return False
