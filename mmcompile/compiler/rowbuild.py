"""Hides the order of a build of rows without keys: scan, cut, take what stands, read and write the rest, publish.

The promises are those of `driver`: bytes that depend on source and settings alone, nothing published is damaged, what was sealed before a stop is
found again.  What tells an unchanged source are the stamps of its groups; a shard whose bytes are as before is not touched, whoever made it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmcompile.compiler.broker import BrokerExecutor, connect
from mmcompile.compiler.cluster import Cluster
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
from mmcompile.compiler.parts import plan_exists, refuse_other, remove_plan
from mmcompile.compiler.plan import lone_rows
from mmcompile.compiler.planning import with_lists
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.previous import replaced
from mmcompile.compiler.rowcall import RowWork, build_rows, row_versions
from mmcompile.compiler.rowgaps import refuse_undefined
from mmcompile.compiler.rowplan import Held, RowTask, files_of, row_tasks
from mmcompile.compiler.rowrun import Here, RowRunner, start_readers, unread, write_source
from mmcompile.compiler.rowstore import RowPreprocess, StoredField, stored_fields
from mmcompile.compiler.rowtask import RowJob, RowSeal, blocks_of
from mmcompile.compiler.run import Counts
from mmcompile.compiler.seals import write_sealed
from mmcompile.compiler.sources import roots_of
from mmcompile.compiler.sources.compiledrows import CompiledRows
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.shuffled import ShuffledRows
from mmcompile.compiler.sources.splits import check_splits
from mmcompile.compiler.staging import Staging
from mmcompile.errors import FormatError, OptionError, RemoteError, SourceError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.catalog import load_table
from mmcompile.format.commit import write_atomic
from mmcompile.format.cpus import usable_cpus
from mmcompile.format.fields import MOST_AXES
from mmcompile.format.index import Index, load_index, read_generation
from mmcompile.format.lock import Lock
from mmcompile.format.npy import file_bytes, hash_bytes
from mmcompile.format.rowrepeats import QUICK_BYTES, repeated_rows
from mmcompile.format.storelock import StoreLock

__all__ = ["RowBuild"]

#: Rows of so many bytes stay here while they are sent to a URL, so that those that hold the same are found: no more than one shard has.
_WHOLE_BYTES = 256 << 20
#: A text of more characters than this is no name.
_LONG = 1 << 16


class RowBuild:
    """One call of `build` on a source of rows, step by step."""

    def __init__(
        self,
        source: RowSource,
        preprocess: Preprocess | RowPreprocess | None,
        options: BuildOptions,
        out: Path,
        progress: Callable[[Progress], None],
        staging: Staging | None = None,
    ) -> None:
        if staging is not None and options.engine != "local":
            raise OptionError(
                f"{staging.store.url}: machines share rows of arrays and tables through a folder: leave --engine out, or build into a folder and "
                "copy that",
                options=["engine"],
            )
        self.staging = staging
        self.given, self.options, self.progress = source, options, progress
        self.source = source if options.seed is None else ShuffledRows(source, options.seed)
        self.out, self.asked = Path(os.path.abspath(out)), RowPreprocess.of(preprocess)
        self.began = time.monotonic()
        self.report = BuildReport(out=str(out), samples=0, rejects=0, shards=0, bytes=0, seconds=0.0)
        self.workers = options.workers or usable_cpus()
        self.warnings: list[str] = []
        self.engine: Executor | None = None

    # ------------------------------------------------------------------ the two ways through

    def build(self) -> BuildReport:
        """Build and publish."""
        self._check_output()
        self.engine = connect(self.options.engine, self.options.address)
        try:
            return self._build()
        finally:
            if isinstance(self.engine, BrokerExecutor):
                self.engine.kill()

    def _build(self) -> BuildReport:
        if self.staging is None:
            self._plan()
            refuse_other(self.out, self.settings)
            if self._stands():
                return self._standing()
            (self.out / ".build").mkdir(parents=True, exist_ok=True)
        with self._lock() as lock:
            if self.staging is None:
                self._look()
            else:
                self.staging.pull()
                self._plan()
            if self._stands():  # another run has made it meanwhile, or it lies at a URL
                return self._standing()
            scratch = open_output(self.out)
            try:
                with unless_removed(self.out, lock.still_held):
                    self._run(scratch)
                    return self._publish(lock, scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
                if self.staging is not None and not isinstance(sys.exception(), RemoteError) and lock.still_held():
                    self.staging.keep()

    def dry(self) -> BuildReport:
        """Say what would be built; write nothing."""
        self._check_output()
        if self.staging is not None:
            self.staging.pull()
        self._plan()
        return self._foreseen()

    def _foreseen(self) -> BuildReport:
        """The report of a dry run of the shards that are planned."""
        self._tell_changes()
        rows = sum(task.stop - task.start for task in self.tasks)
        write = sum(self._task_bytes(t) for t in self.todo)
        there = {name for seal in self.whole.values() for name in seal.names()}
        return replace(
            self._described(),
            samples=rows,
            splits=sizes_of(self.scan.ranges),
            shards=len(self.tasks),
            bytes=write + sum(os.path.getsize(self.out / "shards" / name) for name in there),
            decoded=self._rows_to_read(),
            kept=rows - self._rows_to_read(),
            dry_run=True,
            free_bytes=self._free_bytes(),
            write_bytes=write,
            seconds=time.monotonic() - self.began,
        )

    # ------------------------------------------------------------------ steps

    def _check_output(self) -> None:
        if self.staging is not None:
            self.staging.look()
        check_output(self.out, [root for root in roots_of(self.source) if root], None if self.staging is None else self.staging.store.url)

    def _lock(self) -> Lock | StoreLock:
        required = self.options.lock
        return Lock(self.out / ".build" / "lock", required=required) if self.staging is None else self.staging.lock(required)

    def _plan(self) -> None:
        """List the rows, cut shards, and see which of them stand."""
        self.progress(Progress("scan"))
        scan = self.scan = self.source.scan(lambda n: self.progress(Progress("scan", n)))
        check_splits(scan.splits, self.source.root)
        if not scan.rows:
            raise SourceError(f"{self.source.root or 'the dataset'}: there are no rows", path=self.source.root)
        stored = isinstance(self.given, CompiledRows) and self.given.settle_rows(self.asked)
        self.fields = tuple(StoredField(spec, spec) for spec in scan.fields) if stored else stored_fields(scan.fields, self.asked)
        self.lists: dict[str, bytes] = {}
        self.indexed = tuple(with_lists(f.stored, self.lists) for f in self.fields)
        self.settings = {"preprocess": self.asked.settings(), "source": self.source.identity(), "shard_bytes": self.options.shard_bytes}
        if self.options.seed is not None:
            self.settings["order"] = scan.order
        need = scan.rows * sum(f.stored.row_bytes for f in self.fields)  # a length is whatever a stranger's file or class says
        check_room(self.out, need, f"{scan.rows:,} rows", None if self.staging is not None else disk_bytes(self.out), whole=True)
        self.tasks = list(row_tasks(scan, self.fields, self.settings))
        self._check_index()
        self._look()

    def _look(self) -> None:
        """See what stands."""
        self.held = Held(self.out, tuple(f.stored for f in self.fields), stubs=self.staging is not None)
        self.changed = tuple(describe_changes(self.held.settings, self._compared))
        self.whole = {} if self.options.checksum else self.held.whole(self.tasks)

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
        held = self.held
        if self.todo or held.seals or held.index is None or plan_exists(self.out) or held.mark != [held.generation, self._mark()]:
            return False
        try:
            read_generation(self.out, held.generation)
        except (FormatError, FileNotFoundError):
            return False
        return singles_stand(self.out, held.index)

    def _run(self, scratch: Path) -> None:
        todo = self.todo
        self._tell_changes()
        need = sum(self._task_bytes(t) for t in todo)
        if need and isinstance(self.source, ShuffledRows):
            need += self.source.aside_bytes
        check_room(self.out, need, f"{self._rows_to_read():,} rows", self._free_bytes())
        write_atomic(self.out / ".build" / "settings.json", canonical(self._compared))
        if self.staging is not None:
            self.staging.keep()
        self.made: dict[int, RowSeal] = {}
        if not todo:
            return
        if isinstance(self.source, ShuffledRows):
            self.source.prepare(scratch, lambda n: self.progress(Progress("order", n, self.scan.rows)))
        job = RowJob(self.source, self.fields, scratch, self.out / "shards", self.out / ".build" / "seals", blocks_of(self.source))
        job = replace(
            job, timeout_s=self.options.decode_timeout_s, store=None if self.staging is None else self.staging.store, whole=need <= _WHOLE_BYTES
        )
        if self.engine is None:
            self._run_here(job)
        else:
            self._run_there(job, self.engine)

    def _run_here(self, job: RowJob) -> None:
        executor, given, why = start_readers(self.source, job.scratch, self.workers)
        if isinstance(executor, Here):
            self.workers = 1
        if why:
            self.warnings.append(f"the dataset cannot be sent to worker processes ({why}); one process read it")
        total = self._rows_to_read()
        try:
            on_progress = lambda n: self.progress(Progress("rows", n, total))  # noqa: E731
            runner = RowRunner(executor, replace(job, source=given), self.workers, job.timeout_s, on_progress)
            for task, seal in runner.run([(t, RowWork(t, job.row_bytes).seal) for t in self.todo]):
                self.made[task.number] = seal
        finally:
            executor.kill()

    def _run_there(self, job: RowJob, engine: Executor) -> None:
        why = getattr(self.source, "here_only", "")
        given = None
        if not why:
            given, why, _ = write_source(self.source, job.scratch)
        if given is None:
            raise OptionError(f"--engine: the rows cannot be read by other machines ({why}): leave --engine out", options=["engine"])
        job, total = replace(job, source=given, versions=row_versions(self.source)), self._rows_to_read()

        def on_sealed(work: RowWork, seal: RowSeal) -> None:
            self.made[work.number] = seal

        def on_progress(counts: Counts, message: str = "") -> None:
            self.progress(Progress("rows", counts.done, total, message=message))

        cluster = Cluster(engine, build_rows, job, on_sealed, on_progress, self.options.workers)
        self.workers = cluster.workers
        cluster.run([RowWork(task, job.row_bytes) for task in self.todo])
        if cluster.failures:
            raise unread([line for _, line in cluster.failures])

    def _tell_changes(self) -> None:
        if self.changed:
            self.progress(Progress("plan", message=told_changes(self.out, self.changed)))

    def _task_bytes(self, task: RowTask) -> int:
        return sum(file_bytes(dtype, shape) for _, dtype, shape in files_of(tuple(f.stored for f in self.fields), task.stop - task.start))

    def _rows_to_read(self) -> int:
        return sum(t.stop - t.start for t in self.todo)

    def _free_bytes(self) -> int | None:
        return free_bytes(self.out) if self.staging is None else None

    def _publish(self, lock: Lock | StoreLock, scratch: Path) -> BuildReport:
        self.progress(Progress("publish"))
        if self.staging is not None:
            self.staging.refresh()
        seals = [self.whole.get(t.number) or self.made[t.number] for t in self.tasks]
        brought = None if self.staging is None else self.staging.brought
        refuse_undefined(self.out, self.source, self.fields, self.scan.ranges, seals, brought)
        refuse_removed(self.out, lock.still_held)
        done = publish_shards(self.out, scratch, self._contents([_part(seal) for seal in seals]))
        gone = clean_up(self.out, self.held.seals.values(), self.made.values())
        remove_plan(self.out)
        if self.staging is not None:
            self.staging.publish(lock.still_held, gone)
        with contextlib.suppress(OSError):  # a cache: without it all rows are read again
            document = {"mark": [done.generation, self._mark()], "seals": [seal.to_json() for seal in seals]}
            write_sealed(self.out / ".build" / "rows", document)
        return self._finished(done, seals, None)

    def _contents(self, parts: list[Part]) -> Contents:
        scan, auto = self.scan, tuple(f.stored.name for f in self.fields if f.auto)
        return Contents(
            parts,
            [],
            self.indexed,
            scan.ranges,
            self.lists,
            scan.classes,
            self.settings,
            {},
            self._counts(),
            auto,
            False,
            self._groups(),
            order=scan.order,
        )

    def _counts(self) -> frozenset[str]:
        """The pictures whose pixels count as they are, not from 0 to 1: of bytes the field says it."""
        pictures, own = [f for f in self.indexed if f.meaning == "image"], dict(self.asked.fields)
        return frozenset(
            f.name for f in pictures if (f.scale == 1 if f.dtype in ("uint8", "uint16") else own.get(f.name, self.asked).scale == "none")
        )

    def _check_index(self) -> None:
        """Would an index say this?  Raises OptionError before a row is read."""
        where = self.source.root or "the dataset"
        if deep := next((f for f in self.indexed if len(f.shape) > MOST_AXES), None):
            raise OptionError(f"{where}: a row of {deep.name} has {len(deep.shape)} axes, at most {MOST_AXES} are held: reshape it")
        contents, none = self._contents([]), "0" * 32
        statistics: dict[str, dict[str, Any]] = {name: {} for name in ("all", *(s.name for s in contents.splits))}
        index = draft_index(contents, self.scan.rows, len(self.tasks), statistics, dict.fromkeys(lists_of(contents), none))
        try:
            Index.from_bytes(index.to_bytes(), self.out / "index.json")
        except FormatError as error:
            texts = [(f.name, text) for f in self.indexed for names in (f.columns, f.categories) if names is not None for text in names.listed]
            name, longest = max(texts, key=lambda found: len(found[1]), default=("", ""))
            if len(longest) > _LONG:
                raise OptionError(
                    f"{where}: {name} holds a text of {len(longest):,} characters ({longest[:40]!r}…), and the names of a dataset have to fit its "
                    "index: shorten it, or leave that column out with --columns"
                ) from error
            raise OptionError(f"{error}: the source says what no dataset can hold") from error

    def _groups(self) -> tuple[tuple[str, int], ...]:
        """Names and ends of the groups that have rows."""
        stops = self.scan.stops.tolist()
        return tuple((name, stop) for name, start, stop in zip(self.scan.groups, [0, *stops[:-1]], stops, strict=True) if stop > start)

    def _standing(self) -> BuildReport:
        """The report of a build that found its dataset published already."""
        assert self.held.index is not None
        seals = [self.whole[t.number] for t in self.tasks]
        return self._finished(
            describe_published(self.out, self.held.index, self.held.generation, [_part(seal) for seal in seals]), seals, QUICK_BYTES
        )

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
        lone = lone_rows(sum(f.stored.row_bytes for f in self.fields), self.options.shard_bytes, self.scan.rows)
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
            warnings=(*self.scan.warnings, *lone, *self._replaced(), *self.warnings),
            changed=self.changed,
        )

    def _replaced(self) -> Iterator[str]:
        held = self.held
        if held.index is not None:
            labelled = any(f.meaning == "class" for f in self.indexed)
            yield from replaced(held.index, held.generation, self.scan.rows, labelled=labelled, keyed=False)


def _part(seal: RowSeal) -> Part:
    return Part(seal.files, seal.rows, seal.sums, {})
