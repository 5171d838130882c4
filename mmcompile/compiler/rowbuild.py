"""Hides the order of a build of rows without keys: scan, cut, take what stands, read and write the rest, publish.

The promises are those of `driver`: bytes that depend on source and settings alone, nothing published is damaged, what was sealed before a stop is
found again.  What tells an unchanged source are the stamps of its groups; a shard whose bytes are as before is not touched, whoever made it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.engines import usable_cpus
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.outcome import BuildReport, Progress, sizes_of
from mmcompile.compiler.output import (
    Contents,
    Part,
    Published,
    check_output,
    check_room,
    clean_up,
    describe_changes,
    describe_published,
    disk_bytes,
    draft_index,
    free_bytes,
    lists_of,
    open_output,
    publish_shards,
    refuse_removed,
    singles_stand,
    told_changes,
    unless_removed,
)
from mmcompile.compiler.parts import remove_plan
from mmcompile.compiler.plan import row_cuts, rows_per_shard
from mmcompile.compiler.planning import with_lists
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.previous import replaced
from mmcompile.compiler.rowgaps import refuse_undefined
from mmcompile.compiler.rowrun import Here, RowRunner, start_readers
from mmcompile.compiler.rowstore import RowPreprocess, StoredField, stored_fields
from mmcompile.compiler.rowtask import RowJob, RowSeal, blocks_of, read_row_seal
from mmcompile.compiler.seals import UNREADABLE, read_sealed, write_sealed
from mmcompile.compiler.sources import roots_of
from mmcompile.compiler.sources.compiledrows import CompiledRows
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.splits import check_splits
from mmcompile.errors import FormatError, OptionError, SourceError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.catalog import digest_file, list_folder, load_table
from mmcompile.format.commit import write_atomic
from mmcompile.format.index import Index, load_index
from mmcompile.format.lock import Lock
from mmcompile.format.npy import file_bytes, file_name, hash_bytes, open_array
from mmcompile.format.rowrepeats import QUICK_BYTES, repeated_rows
from mmcompile.format.samples import block_rows
from mmcompile.format.store import is_url

__all__ = ["RowBuild", "RowTask"]


@dataclass(frozen=True)
class RowTask:
    """The rows [start, stop), which become one shard; with `known` its id changes whenever what they are read from does."""

    number: int
    start: int
    stop: int
    id: str
    known: bool


class RowBuild:
    """One call of `build` on a source of rows, step by step."""

    staging = None

    def __init__(
        self,
        source: RowSource,
        out: str | Path,
        preprocess: Preprocess | RowPreprocess | None,
        options: BuildOptions,
        progress: Callable[[Progress], None],
    ) -> None:
        if options.engine != "local" or options.part is not None or options.plan_only:
            raise OptionError("rows of arrays and tables are built by processes of this machine: leave --engine, --plan-only and --part out")
        if options.seed is not None:
            raise OptionError("--order shuffled: rows of arrays and tables stand as their source has them: leave it out", options=["order"])
        if is_url(out):
            raise OptionError(f"{out}: rows of arrays and tables are built into a folder: build there, then copy that folder to {out}")
        self.source, self.options, self.progress = source, options, progress
        self.out, self.asked = Path(os.path.abspath(out)), RowPreprocess.of(preprocess)
        self.began = time.monotonic()
        self.report = BuildReport(out=str(out), samples=0, rejects=0, shards=0, bytes=0, seconds=0.0)
        self.workers = options.workers or usable_cpus()
        self.warnings: list[str] = []

    # ------------------------------------------------------------------ the two ways through

    def build(self) -> BuildReport:
        """Build and publish."""
        check_output(self.out, [root for root in roots_of(self.source) if root])
        self._plan()
        if self._stands():
            return self._standing()
        (self.out / ".build").mkdir(parents=True, exist_ok=True)
        with Lock(self.out / ".build" / "lock", required=self.options.lock) as lock:
            self._look()
            if self._stands():  # another run has made it meanwhile
                return self._standing()
            scratch = open_output(self.out)
            try:
                with unless_removed(self.out, lock.still_held):
                    self._run(scratch)
                    return self._publish(lock, scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def dry(self) -> BuildReport:
        """Say what would be built; write nothing."""
        check_output(self.out, [root for root in roots_of(self.source) if root])
        self._plan()
        self._tell_changes()
        write = sum(self._task_bytes(t) for t in self.todo)
        there = {name for seal in self.whole.values() for name in seal.names()}
        return replace(
            self._described(),
            samples=self.scan.rows,
            splits=sizes_of(self.scan.ranges),
            shards=len(self.tasks),
            bytes=write + sum(os.path.getsize(self.out / "shards" / name) for name in there),
            decoded=self._rows_to_read(),
            kept=self.scan.rows - self._rows_to_read(),
            dry_run=True,
            free_bytes=free_bytes(self.out),
            write_bytes=write,
            seconds=time.monotonic() - self.began,
        )

    # ------------------------------------------------------------------ steps

    def _plan(self) -> None:
        """List the rows, cut shards, and see which of them stand."""
        self.progress(Progress("scan"))
        scan = self.scan = self.source.scan(lambda n: self.progress(Progress("scan", n)))
        check_splits(scan.splits, self.source.root)
        if not scan.rows:
            raise SourceError(f"{self.source.root or 'the dataset'}: there are no rows", path=self.source.root)
        stored = isinstance(self.source, CompiledRows) and self.source.settle_rows(self.asked)
        self.fields = tuple(StoredField(spec, spec) for spec in scan.fields) if stored else stored_fields(scan.fields, self.asked)
        counts = any(f.meaning == "image" and f.dtype in ("uint8", "uint16") and f.scale == 1 for f in scan.fields)
        self.unit = not counts if stored else self.asked.scale == "unit"
        self.lists: dict[str, bytes] = {}
        self.indexed = tuple(with_lists(f.stored, self.lists) for f in self.fields)
        self.settings = {"preprocess": self.asked.settings(), "source": self.source.identity(), "shard_bytes": self.options.shard_bytes}
        need = scan.rows * sum(f.stored.row_bytes for f in self.fields)  # a length is whatever a stranger's file or class says
        check_room(self.out, need, f"{scan.rows:,} rows", disk_bytes(self.out), whole=True)
        self.tasks = list(self._tasks())
        self._check_index()
        self._look()

    def _tasks(self) -> Iterator[RowTask]:
        row_bytes = sum(f.stored.row_bytes for f in self.fields)
        rows = rows_per_shard(row_bytes, self.options.shard_bytes)
        made = [[f.source.to_json(), f.stored.to_json(), f.stored.dtype] for f in self.fields]
        base = hash_bytes(canonical({"made": made, "settings": {**self.settings, "shard_bytes": 0}, "revision": PIXEL_REVISION}))
        stops, number = self.scan.stops, 0
        for split in self.scan.ranges:
            cuts = row_cuts(split.start, split.stop, stops, rows)
            for start, stop in itertools.pairwise(cuts):
                first, last = (int(np.searchsorted(stops, row, side="right")) for row in (start, stop - 1))
                parts = []
                for group in range(first, last + 1):
                    begin = int(stops[group - 1]) if group else 0
                    parts.append([self.scan.stamps[group], max(start, begin) - begin, min(stop, int(stops[group])) - begin])
                known = all(stamp for stamp, *_ in parts)
                where = parts if known else [[str(start), 0, stop - start]]
                yield RowTask(number, start, stop, hash_bytes(canonical([base, known, where])), known)
                number += 1

    def _look(self) -> None:
        """What OUT holds: shards that stand already, by task number, and the seals of an unfinished build."""
        build = self.out / ".build"
        self.index: Index | None = None
        self.generation = ""
        if (self.out / "index.json").exists():
            self.index, self.generation = load_index(self.out)
        before = None if self.index is None else {**self.index.settings, "versions": self.index.versions}
        self.changed = tuple(describe_changes(before, self._compared))
        self.found, self.mark = _remembered(build / "rows")
        names = [e.name for e in list_folder(build / "seals") if e.name.endswith(".json")]
        self.seals = {seal.task: seal for name in names if (seal := read_row_seal(build / "seals" / name)) is not None}
        self.whole: dict[int, RowSeal] = {}
        for task in self.tasks:
            if not task.known or self.options.checksum:
                continue
            published, sealed = self.found.get(task.id), self.seals.get(task.id)
            if published is not None and self._is_whole(published, task):
                self.whole[task.number] = published
            elif sealed is not None and self._is_whole(sealed, task) and self._is_sound(sealed):
                self.whole[task.number] = sealed

    def _is_whole(self, seal: RowSeal, task: RowTask) -> bool:
        """Are the files of a finished shard there, with the header that they must have?"""
        if seal.rows != task.stop - task.start or set(seal.files) != {"hashes", *(f.stored.name for f in self.fields)}:
            return False
        try:
            for kind, dtype, shape in self._files_of(seal.rows):
                fd, _ = open_array(self.out / "shards" / file_name(kind, seal.files[kind]), dtype, shape)
                os.close(fd)
        except (FormatError, FileNotFoundError):
            return False
        return True

    def _is_sound(self, seal: RowSeal) -> bool:
        """Each file of an unpublished shard is held against its hash before it is published for the first time."""
        try:
            return all(digest_file(self.out / "shards" / file_name(kind, digest)) == digest for kind, digest in seal.files.items())
        except (FormatError, FileNotFoundError):
            return False

    @property
    def todo(self) -> list[RowTask]:
        """The shards that have to be made."""
        return [t for t in self.tasks if t.number not in self.whole]

    @property
    def _compared(self) -> dict[str, Any]:
        """What is held against an earlier build."""
        return {**self.settings, "versions": {}}

    def _mark(self) -> str:
        """All that the index is made of, beside the bytes of the shards."""
        scan = self.scan
        groups = [[name_to_json(name), stop] for name, stop in self._groups()]
        classes = None if scan.classes is None else [name_to_json(c) for c in scan.classes]
        fields = [f.to_json() for f in self.indexed]
        splits = [[s.name, s.start, s.stop] for s in scan.ranges]
        return hash_bytes(canonical([self.settings, fields, splits, groups, classes, [t.id for t in self.tasks], PIXEL_REVISION]))

    def _stands(self) -> bool:
        """Is there nothing to do?  Decided without a byte written."""
        if self.todo or self.seals or self.index is None or self.mark != [self.generation, self._mark()]:
            return False
        return singles_stand(self.out, self.index)

    def _run(self, scratch: Path) -> None:
        todo = self.todo
        self._tell_changes()
        need = sum(self._task_bytes(t) for t in todo)
        check_room(self.out, need, f"{self._rows_to_read():,} rows", free_bytes(self.out))
        write_atomic(self.out / ".build" / "settings.json", canonical(self._compared))
        self.made: dict[int, RowSeal] = {}
        if not todo:
            return
        job = RowJob(self.source, self.fields, scratch, self.out / "shards", self.out / ".build" / "seals", blocks_of(self.source))
        executor, given, why = start_readers(self.source, scratch, self.workers)
        if isinstance(executor, Here):
            self.workers = 1
        if why:
            self.warnings.append(f"the dataset cannot be sent to worker processes ({why}); one process read it")
        job, total = replace(job, source=given), self._rows_to_read()
        try:
            runner = RowRunner(executor, job, self.workers, self.options.decode_timeout_s, lambda n: self.progress(Progress("rows", n, total)))
            for task, seal in runner.run([(t, RowSeal(t.id, t.known, t.stop - t.start, {}, {}, {})) for t in todo]):
                self.made[task.number] = seal
        finally:
            executor.kill()

    def _tell_changes(self) -> None:
        if self.changed:
            self.progress(Progress("plan", message=told_changes(self.out, self.changed)))

    def _task_bytes(self, task: RowTask) -> int:
        return sum(file_bytes(dtype, shape) for _, dtype, shape in self._files_of(task.stop - task.start))

    def _files_of(self, rows: int) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """(kind, dtype, shape) of each file of a shard of so many rows."""
        blocks = -(-rows // block_rows(tuple(f.stored for f in self.fields)))
        return [("hashes", np.dtype("<u8"), (blocks,)), *((f.stored.name, f.stored.stored, (rows, *f.stored.shape)) for f in self.fields)]

    def _rows_to_read(self) -> int:
        return sum(t.stop - t.start for t in self.todo)

    def _publish(self, lock: Lock, scratch: Path) -> BuildReport:
        self.progress(Progress("publish"))
        seals = [self.whole.get(t.number) or self.made[t.number] for t in self.tasks]
        refuse_undefined(self.out, self.source, self.fields, self.scan.ranges, seals)
        refuse_removed(self.out, lock.still_held)
        done = publish_shards(self.out, scratch, self._contents([_part(seal) for seal in seals]))
        clean_up(self.out, self.seals.values(), self.made.values())
        remove_plan(self.out)
        with contextlib.suppress(OSError):  # a cache: without it all rows are read again
            document = {"mark": [done.generation, self._mark()], "seals": [seal.to_json() for seal in seals]}
            write_sealed(self.out / ".build" / "rows", document)
        return self._finished(done, seals, None)

    def _contents(self, parts: list[Part]) -> Contents:
        scan, auto = self.scan, tuple(f.stored.name for f in self.fields if f.auto)
        return Contents(parts, [], self.indexed, scan.ranges, self.lists, scan.classes, self.settings, {}, self.unit, auto, False, self._groups())

    def _check_index(self) -> None:
        """Would an index say this?  Raises OptionError before a row is read."""
        contents, none = self._contents([]), "0" * 32
        statistics: dict[str, dict[str, Any]] = {name: {} for name in ("all", *(s.name for s in contents.splits))}
        index = draft_index(contents, self.scan.rows, len(self.tasks), statistics, dict.fromkeys(lists_of(contents), none))
        try:
            Index.from_bytes(index.to_bytes(), self.out / "index.json")
        except FormatError as error:
            raise OptionError(f"{error}: the source says what no dataset can hold") from error

    def _groups(self) -> tuple[tuple[str, int], ...]:
        """Names and ends of the groups that have rows."""
        stops = self.scan.stops.tolist()
        return tuple((name, stop) for name, start, stop in zip(self.scan.groups, [0, *stops[:-1]], stops, strict=True) if stop > start)

    def _standing(self) -> BuildReport:
        """The report of a build that found its dataset published already."""
        assert self.index is not None
        seals = [self.whole[t.number] for t in self.tasks]
        return self._finished(describe_published(self.out, self.index, self.generation, [_part(seal) for seal in seals]), seals, QUICK_BYTES)

    def _finished(self, done: Published, seals: list[RowSeal], most_bytes: int | None) -> BuildReport:
        """The report; of more than `most_bytes` of rows those that hold the same are not looked for."""
        repeats = None
        with contextlib.suppress(FormatError):  # what is published is not less so where it cannot be read just now
            index, name = load_index(self.out, done.generation)
            repeats = repeated_rows(self.out, load_table(self.out, index, name), most_bytes)
        lost: Counter[str] = Counter()
        for seal in seals:
            lost.update(seal.counts)
        return replace(
            self._described(),
            samples=self.scan.rows,
            splits=sizes_of(self.scan.ranges),
            shards=done.shards,
            bytes=done.bytes,
            generation=done.generation,
            decoded=self._rows_to_read(),
            kept=self.scan.rows - self._rows_to_read(),
            counts={**self.scan.counts, **lost},
            repeats=repeats,
            seconds=time.monotonic() - self.began,
        )

    def _described(self) -> BuildReport:
        only = self.indexed[0] if len(self.indexed) == 1 else None
        return replace(
            self.report,
            classes=self.scan.classes,
            shape=() if only is None else only.sample_shape,
            dtype="" if only is None else only.dtype,
            fields=tuple(f.name for f in self.indexed),
            columns={f.stored.name: f.stored.columns.listed for f in self.fields if f.stored.columns is not None},
            unit="row",
            workers=self.workers,
            counts=self.scan.counts,
            warnings=(*self.scan.warnings, *self._replaced(), *self.warnings),
            changed=self.changed,
        )

    def _replaced(self) -> Iterator[str]:
        if self.index is not None:
            labelled = any(f.meaning == "class" for f in self.indexed)
            yield from replaced(self.index, self.generation, self.scan.rows, labelled=labelled, keyed=False)


def _part(seal: RowSeal) -> Part:
    return Part(seal.files, seal.rows, seal.sums, {})


def _remembered(path: Path) -> tuple[dict[str, RowSeal], Any]:
    """(the finished shards of the last generation that was published from here, by task; what it was made of), as far as it can be read."""
    try:
        document = read_sealed(path)
        return {seal.task: seal for seal in map(RowSeal.from_json, document["seals"])}, document["mark"]
    except (OSError, *UNREADABLE):
        return {}, None
