"""Hides what a build has to do: its shards, which of them stand already, and what is known of each source without reading it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.engines import result_within
from mmcompile.compiler.geometry import looked_at, refuse_other
from mmcompile.compiler.marks import Fingerprints, marks_of, versions_of
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.output import describe_changes, singles_stand
from mmcompile.compiler.plan import ShardTask, faults_within, fingerprint, key_hashes, make_tasks, rows_per_shard
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.previous import Previous, Whole
from mmcompile.compiler.reuse import OldShard, RowList, list_rows, write_table
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import LABEL, Scan, Source
from mmcompile.compiler.sources.cells import long_name, long_text
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.splits import train_of
from mmcompile.compiler.spatial import Mover
from mmcompile.compiler.statcache import StatCache, old_enough
from mmcompile.compiler.task import Job, hash_items, remembered_as
from mmcompile.compiler.trace import PLAIN, Trace
from mmcompile.compiler.versions import versions_changed
from mmcompile.errors import EngineError, FormatError, OptionError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.catalog import list_folder
from mmcompile.format.fields import pixel_fields
from mmcompile.format.index import INDEX_LIMIT, LIST_LIMIT, Field, Names, Split, load_classes, read_generation
from mmcompile.format.leakage import Repeats, find_repeats
from mmcompile.format.npy import hash_bytes
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import hash_pair, pair_hash

__all__ = ["Listed", "Planned", "Prediction", "Wanted", "with_lists"]

#: Items hashed by one call of a worker, and calls on their way at a time.
_HASH_CHUNK, _HASH_AHEAD = 128, 256
#: A disk slower than this is taken for one that hangs.
_HASH_BYTES_PER_S = 1e6


class Listed:
    """A scan of RAW, when it was made (`at_ns`), the hash of each key, and the content hashes (N, 2) that are `known` (N,), at first from `cache`."""

    def __init__(self, scan: Scan, at_ns: int, cache: StatCache | None = None, *, checksum: bool = False) -> None:
        self.scan, self.at_ns, self.cache = scan, at_ns, cache
        self.keys = Keys.of(scan.keys)
        self.hashes64 = key_hashes(self.keys)
        n = len(self.keys)
        self.hashes, self.known = np.zeros((n, 2), np.uint64), np.zeros(n, bool)
        if scan.lent is not None:
            self.cache, self.hashes, self.known = None, scan.lent.hashes.copy(), np.ones(n, bool)
        elif cache is not None and not checksum:
            self.hashes, self.known = cache.known(self.hashes64, scan.stat)
        self._chosen: tuple[Preprocess, Preprocess, str] | None = None

    def choose(self, asked: Preprocess, look: Callable[[], tuple[Preprocess, str]]) -> tuple[Preprocess, str]:
        """(settings, why) that `look` chooses; without looking where an earlier build chose for the same settings, versions, and files to look at."""
        chosen = self.chosen(asked) or look()
        self._chosen = (asked, *chosen)
        return chosen

    def chosen(self, asked: Preprocess) -> tuple[Preprocess, str] | None:
        """What an earlier build chose; None where it has to be looked for."""
        found = None if self.cache is None else self.cache.choice
        if found is None or found["mark"] != self._choice_mark(asked):
            return None
        return Preprocess.from_settings(found["settings"]), found["why"]

    def save(self) -> None:
        """Remember what is known for the next build; a cache only, so a failure is none."""
        if self.cache is None:
            return
        choice = None
        if self._chosen is not None and (mark := self._choice_mark(self._chosen[0])) is not None:
            choice = {"mark": mark, "settings": self._chosen[1].settings(), "why": self._chosen[2]}
        with contextlib.suppress(OSError):
            self.cache.save(self.hashes64, self.scan.stat, self.hashes, self.known, self.at_ns, choice)

    def _choice_mark(self, asked: Preprocess) -> str | None:
        """All that a choice depends on; None where the content of a file that is looked at is not known."""
        picked = looked_at(self.hashes64)
        if not self.known[picked].all():
            return None
        looked = hash_bytes(self.hashes64[picked].tobytes() + self.hashes[picked].tobytes())
        return fingerprint({**asked.settings(), "looked": looked}, versions_of(asked), PIXEL_REVISION)


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
    #: Lists of names that are too long for an index, by their hash.
    lists: dict[str, bytes] = field(default_factory=dict)
    #: Of our own pixels: today's, or of the datasets that rows are copied from.
    revision: int = PIXEL_REVISION
    mover: Mover | None = None
    trace: Trace = PLAIN

    @classmethod
    def of(cls, asked: Preprocess, chosen: Preprocess, why: str, source: Source, scan: Scan, options: BuildOptions) -> Wanted:
        """Raises OptionError where the settings are too long for an index, or no split has the statistics that are asked for."""
        preprocess = chosen.resolved()
        (main, _), *others = scan.parts
        pixels = (preprocess.field(main), *(preprocess.of(name).field(name) for name, _ in others))
        lists: dict[str, bytes] = {}
        mover = Mover(preprocess, scan.fields, scan.forms) if scan.forms else None
        fields = (*pixels, *(with_lists(spec, lists) for spec in (scan.fields if mover is None else mover.stored)))
        lists_of = ((LABEL.name, scan.classes), *((f.name, names.listed) for f in fields for names in (f.columns, f.categories) if names is not None))
        for called, listed in lists_of:
            if text := long_name(listed or ()):
                raise OptionError(long_text(f"field {called}", text))
        counted = Counter(f.name for f in fields)
        if twice := [name for name, count in counted.items() if count > 1]:
            raise OptionError(f"two fields are called {', '.join(twice)}: name one otherwise, or leave it out", options=["columns"])
        versions, revision = (versions_of(preprocess), PIXEL_REVISION) if scan.lent is None else (scan.lent.versions, scan.lent.revision)
        settings = {"preprocess": preprocess.settings(), "source": source.identity(), "shard_bytes": options.shard_bytes}
        trace = Trace.of(options, scan.lent)
        settings |= trace.settings
        if options.seed is not None:
            settings["order"] = f"shuffled:{options.seed}"
        if (length := len(canonical(settings))) > INDEX_LIMIT // 2:
            raise OptionError(
                f"the settings are {length:,} bytes, at most {INDEX_LIMIT // 2:,} fit: give patterns to --include and --exclude, not single files"
            )
        made = cls(asked, preprocess, why, fields, versions, marks_of(preprocess, versions, revision), settings, lists, revision, mover, trace)
        if made.auto:
            train_of(scan.ranges)
        return made

    def job(self, job: Job) -> Job:
        """The job as this dataset wants it done."""
        return replace(job, preprocess=self.preprocess, fields=self.fields, mover=self.mover, trace=self.trace)

    @property
    def task_marks(self) -> tuple[str, str]:
        """What tells the shards of this dataset from those made otherwise: the fingerprint of pixels, and that of how they are stored and told of."""
        return self.marks.pixel, self.marks.store + self.trace.mark

    @property
    def compared(self) -> dict[str, Any]:
        """What is held against an earlier build."""
        return {**self.settings, "versions": self.versions}

    @property
    def row_bytes(self) -> int:
        return sum(f.row_bytes for f in self.fields)

    @property
    def auto(self) -> tuple[str, ...]:
        """The fields whose normalisation is that of their own statistics, which follow from the rows."""
        own = self._own()
        return tuple(f.name for f in self.fields if f.name in own and own[f.name].normalize == "auto")

    @property
    def counts(self) -> frozenset[str]:
        """The fields whose pixels count as they are, not from 0 to 1."""
        return frozenset(name for name, preprocess in self._own().items() if preprocess.scale == "none")

    def _own(self) -> dict[str, Preprocess]:
        """The settings of each pixel field."""
        return {pixel_fields(self.fields)[0].name: self.preprocess, **{name: self.preprocess.of(name) for name in self.preprocess.parts}}


@dataclass(frozen=True)
class Prediction:
    """What a build would do with the items of shards that are not there yet, if each image that has to be decoded can be.

    `copies` (N,): those with a row that would be copied; `rejects`: the lines of those that are known to be bad, by item; all others are `decoded`.
    """

    decoded: int
    copies: npt.NDArray[np.bool_]
    rejects: dict[int, dict[str, Any]]

    @property
    def copied(self) -> int:
        return int(self.copies.sum())


class Planned:
    """The shards of a build.

    `tasks` in order; `whole` by task number: those that stand already; `previous`: what OUT held; `changed`: settings that differ from it, a line
    each; `hashes` (N, 2) and `known` (N,): content hashes of sources as far as they are known.
    """

    def __init__(self, out: Path, job: Job, wanted: Wanted, listed: Listed, options: BuildOptions, executor: Executor) -> None:
        self._out, self._job, self._wanted, self._listed, self._options, self._executor = out, job, wanted, listed, options, executor
        scan = listed.scan
        rows = rows_per_shard(wanted.row_bytes, options.shard_bytes)
        self.tasks: list[ShardTask] = make_tasks(scan, listed.hashes64, rows, wanted.task_marks)
        self._seen = _state(out)
        faults = {listed.keys[i]: said for i, said in scan.faults.items()}
        self.previous = Previous(
            out, wanted.fields, wanted.preprocess, wanted.versions, wanted.marks, wanted.mover, faults, stubs=job.store is not None
        )
        self.previous.trace, self.previous.names = wanted.trace, listed.keys
        self.previous.load()
        for folder, generation in scan.lent.datasets if scan.lent is not None else ():
            self.previous.borrow(Path(folder), generation)
        self.changed = tuple(describe_changes(self.previous.settings, wanted.compared))
        if self.previous.index is not None and wanted.why:
            refuse_other(out, (self.previous.settings or {}).get("preprocess"), wanted.asked, wanted.preprocess, wanted.why)
        self.hashes, self.known = listed.hashes, listed.known
        self.whole: dict[int, Whole] = {}
        self._rows: RowList | None = None

    @property
    def todo(self) -> list[ShardTask]:
        """The shards that have to be made."""
        return [t for t in self.tasks if t.number not in self.whole]

    @property
    def kept(self) -> int:
        """Rows of shards that stand already."""
        return sum(w.rows for w in self.whole.values())

    @property
    def holds(self) -> bool:
        """Is OUT still what was planned for?"""
        return self._seen == _state(self._out)

    @property
    def unchanged(self) -> bool:
        """Would publishing make the current generation again, byte for byte, and is nothing left over of another run?"""
        before, wanted, scan = self.previous.index, self._wanted, self._listed.scan
        if before is None or self.todo or self.previous.seals or before.pixel_revision != wanted.revision or not singles_stand(self._out, before):
            return False
        fields = tuple(replace(f, normalize=None) if f.name in wanted.auto else f for f in before.fields)
        if fields != wanted.fields or canonical(self.previous.settings) != canonical(wanted.compared):
            return False
        parts = [self.whole[task.number] for task in self.tasks]
        if [part.files for part in parts if part.rows] != self.previous.shards:
            return False
        try:
            read_generation(self._out, str(self.previous.generation))
            lines = [line.to_json() for line in load_rejects(self._out, before)]
            if self.stored_splits([part.rows for part in parts]) != before.splits:
                return False
            return lines == [part.rejects[i] for part in parts for i in sorted(part.rejects)] and load_classes(self._out, before) == scan.classes
        except (FormatError, FileNotFoundError):
            return False

    def stored_splits(self, rows: Sequence[int]) -> tuple[Split, ...]:
        """The splits as ranges of stored rows, from how many `rows` are stored of each task."""
        out: list[Split] = []
        stops = np.cumsum([0, *rows])
        ends = np.array([task.stop for task in self.tasks])
        at = 0
        for split in self._listed.scan.ranges:
            stop = int(stops[np.searchsorted(ends, split.stop, side="right")])
            out.append(Split(split.name, at, stop))
            at = stop
        return tuple(out)

    def find_whole(self, progress: Callable[[Progress], None], *, read: bool = True) -> None:
        """See which shards stand already.

        With `read` it reads the sources whose stat does not tell that they are unchanged, where that may save a shard; else those count as changed.
        """
        scan = self._listed.scan
        waiting: list[ShardTask] = []
        for task in self.todo:
            part = slice(task.start, task.stop)
            for whole in self._candidates(task):
                if whole.stat is not None and not self._options.checksum:
                    same = (whole.stat == scan.stat[part]) & (scan.stat["size"][part] >= 0) & ~self.known[part]
                    self.hashes[part][same] = whole.hashes[same]
                    self.known[part] |= same
                if self._settle(task, whole):
                    break
                if not self.known[part].all():
                    waiting.append(task)
                    break
        if read and waiting:
            self._hash_unknown(np.concatenate([task.start + np.flatnonzero(~self.known[task.start : task.stop]) for task in waiting]), progress)
            for task in waiting:
                any(self._settle(task, whole) for whole in self._candidates(task))

    def check_versions(self, progress: Callable[[Progress], None]) -> None:
        """Raises BuildError where images would be decoded again only because a version changed, which `redecode` allows."""
        stale = self.previous.stale
        if self._options.redecode or not stale or not self.todo:
            return
        shards = [s.shard for s in stale]
        self._read_like(shards, progress)
        rows, again = list_rows(shards), self._todo() & self.known & ~self.copies
        found = rows.find(self.hashes[again])
        place = rows.place[found[found >= 0]]
        if len(place):
            raise versions_changed(self._out, self._wanted.preprocess, self._wanted.versions, stale, place)

    def predict(self, progress: Callable[[Progress], None]) -> Prediction:
        """What a build would do.  Reads the sources that may be known by their content: those as long as one that is."""
        old = self.previous.old
        self._read_like(old, progress, {line["size"] for line in self.previous.remembered.values()})
        copies, todo = self.copies, self._todo()
        rejects = self._remembered(todo & self.known & ~copies)
        return Prediction(int(todo.sum()) - int(copies.sum()) - len(rejects), copies, rejects)

    @property
    def copies(self) -> npt.NDArray[np.bool_]:
        """Which items (N,) are known to have a row that may be copied."""
        out = np.zeros(len(self.known), bool)
        at = np.flatnonzero(self.known & self._todo())
        if len(at):
            out[at] = self._row_list().find(self.hashes[at]) >= 0
        return out

    def write_table(self, scratch: Path) -> Path | None:
        """The rows that may be copied, for workers; None when there are none."""
        return write_table(self.previous.old, scratch, self._row_list()) if self.todo else None

    def works(self) -> Iterator[ShardWork]:
        """The shards that have to be made, each with what is known of its items."""
        scan, wanted, copies = self._listed.scan, self._wanted, self.copies
        made = {"preprocess": wanted.preprocess.settings(), "versions": wanted.versions, "revision": wanted.revision, **wanted.trace.settings}
        none = scan.values[:0], scan.stat[:0], np.empty((0, 2), np.uint64)
        pixel, store = wanted.task_marks
        empty = Seal("", pixel, store, made, wanted.fields, *none, {}, {})
        for task in self.todo:
            part = slice(task.start, task.stop)
            stat = scan.stat[part].copy()
            stat[~old_enough(stat, self._listed.at_ns)] = (-1, -1, -1, -1)
            seal = replace(empty, task=task.id, stat=stat)
            hashes, known = self.hashes[part].copy(), self.known[part].copy()
            faults = faults_within(scan.faults, task.start, task.stop)
            yield ShardWork(
                task, self._listed.keys[part], scan.values[part], scan.stat[part], hashes, known, seal, copies=copies[part], faults=faults
            )

    def learn(self, work: ShardWork) -> None:
        """Take over what became known while a shard was made."""
        part = slice(work.task.start, work.task.stop)
        self.hashes[part], self.known[part] = work.hashes, work.known

    def repeats(self, rejected: Sequence[int]) -> Repeats:
        """Which of the items that are stored have the same source."""
        scan, hashes = self._listed.scan, np.where(self.known[:, None], self.hashes, np.uint64(0))
        hashes[np.array(rejected, np.int64)] = 0
        return find_repeats(hashes, scan.ranges, scan.labels, self._listed.keys.__getitem__)

    # ------------------------------------------------------------------ small things

    def _candidates(self, task: ShardTask) -> Iterator[Whole]:
        part = slice(task.start, task.stop)
        return self.previous.candidates(task, self._listed.keys[part], self._listed.hashes64[part], self._listed.scan.values[part])

    def _settle(self, task: ShardTask, whole: Whole) -> bool:
        part = slice(task.start, task.stop)
        if not self.known[part].all() or not np.array_equal(self.hashes[part], whole.hashes):
            return False
        self.whole[task.number] = replace(whole, hashes=whole.hashes[:0].copy(), stat=None)
        return True

    def _todo(self) -> npt.NDArray[np.bool_]:
        """Which items (N,) are of shards that have to be made."""
        out = np.zeros(len(self.known), bool)
        for task in self.todo:
            out[task.start : task.stop] = True
        return out

    def _row_list(self) -> RowList:
        """The rows that may be copied to unfinished shards: of known sources, or of the size of one that is not known."""
        if self._rows is None:
            todo, sizes = self._todo(), self._listed.scan.stat["size"]
            known, unread = np.unique(self.hashes[todo & self.known][:, 0]), np.unique(sizes[todo & ~self.known])

            def wanted(samples: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
                return np.isin(samples["source_hash"][:, 0], known) | np.isin(samples["source_size"].astype(np.int64), unread)

            stated = not len(unread) or int(unread[0]) >= 0
            self._rows = list_rows(self.previous.old, wanted if stated else None)
        return self._rows

    def _remembered(self, asked: npt.NDArray[np.bool_]) -> dict[int, dict[str, Any]]:
        """The lines of those items, of the ones `asked` (N,) about, that are known to be rejects and need not be decoded again."""
        out, lines = dict[int, dict[str, Any]](), self.previous.remembered
        if lines:
            pairs = np.array([hash_pair(name[:32]) for name in lines], np.uint64)
            for i in np.flatnonzero(asked & np.isin(self.hashes[:, 0], pairs[:, 0])).tolist():
                key = self._listed.keys[i]
                if (line := lines.get(remembered_as(pair_hash(self.hashes[i]), key))) is not None:
                    out[i] = {**line, "key": name_to_json(self._wanted.trace.key(key))}
        return out

    def _read_like(self, shards: list[OldShard], progress: Callable[[Progress], None], sizes: set[int | None] | None = None) -> None:
        """Read the items of unfinished shards that may be the source of a row of these: those of the same size (or of one of `sizes`)."""
        unknown = np.flatnonzero(self._todo() & ~self.known)
        if not len(unknown):
            return
        found = [np.array([s for s in sizes or () if s is not None], np.int64)]
        for shard in shards:
            with contextlib.suppress(FormatError, FileNotFoundError):
                found.append(np.unique(shard.samples()["source_size"]).astype(np.int64))
        like = np.isin(self._listed.scan.stat["size"][unknown], np.unique(np.concatenate(found)))
        self._hash_unknown(unknown[like], progress)

    def _hash_unknown(self, items: npt.NDArray[np.int64], progress: Callable[[Progress], None]) -> None:
        """Read these files, and know their hashes from then on."""
        scan = self._listed.scan
        starts = iter(range(0, len(items), _HASH_CHUNK))
        waiting: deque[tuple[npt.NDArray[np.int64], Future[Any]]] = deque()
        for done in itertools.count():
            for at in itertools.islice(starts, _HASH_AHEAD - len(waiting)):
                chunk = items[at : at + _HASH_CHUNK]
                waiting.append((chunk, self._executor.submit(hash_items, self._job, list(self._listed.keys.take(chunk)))))
            if not waiting:
                break
            chunk, future = waiting.popleft()
            limit_s = self._options.decode_timeout_s + len(chunk) + int(scan.stat["size"][chunk].clip(0).sum()) / _HASH_BYTES_PER_S
            try:
                found = result_within(self._executor, future, limit_s)
            except EngineError:  # not known, then: the build itself finds out which file it was
                continue
            same = np.array([self._unchanged(i) for i in chunk.tolist()])
            read = found.any(axis=1) & same
            self.hashes[chunk[read]], self.known[chunk[read]] = found[read], True
            progress(Progress("check", min(len(items), (done + 1) * _HASH_CHUNK), len(items)))

    def _unchanged(self, item: int) -> bool:
        """Is the file still the one that was scanned, so that what was read now may be remembered under that stat?"""
        scan = self._listed.scan
        try:
            return self._job.source.stat(self._listed.keys[item]) == tuple(scan.stat[item].tolist())
        except OSError:
            return False


def with_lists(spec: Field, lists: dict[str, bytes]) -> Field:
    """A field as the index has it: long lists of names become hashes, and their bytes are added to `lists`."""

    def short(names: Names | None) -> Names | None:
        if names is None or len(names.listed) <= LIST_LIMIT:
            return names
        data = canonical([name_to_json(name) for name in names.listed])
        lists[hash_bytes(data)] = data
        return Names(file=hash_bytes(data))

    return replace(spec, columns=short(spec.columns), categories=short(spec.categories))


def _state(out: Path) -> tuple[Any, ...]:
    """What changes with every publishing, sealing and pruning of OUT."""
    folders = [out / "generations", out / ".build" / "seals"]
    try:
        found = os.stat(out / "index.json")
        index = (found.st_ino, found.st_mtime_ns, found.st_size)
    except OSError:
        index = (0, 0, 0)
    return (index, *([(e.name, e.stat(follow_symlinks=False).st_mtime_ns) for e in list_folder(folder)] for folder in folders))
