"""Hides the order of a build: scan, choose, plan, take what is there, run the rest, publish.

Until `publish` replaces index.json the published dataset is untouched; whatever was sealed before a stop is found again by the next run.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mmcompile.compiler import decode, forecast, geometry, transform
from mmcompile.compiler.broker import BrokerExecutor, connect
from mmcompile.compiler.cluster import Cluster
from mmcompile.compiler.engines import LocalExecutor, make_executor
from mmcompile.compiler.options import BuildOptions, allowed_rejects, notes, tells_of_keywords, typed
from mmcompile.compiler.outcome import BuildReport, Progress, sizes_of
from mmcompile.compiler.output import (
    Contents,
    Part,
    Published,
    check_output,
    check_room,
    clean_up,
    describe_published,
    free_bytes,
    noted_bytes,
    open_output,
    publish_shards,
    refuse_removed,
    told_changes,
    unless_removed,
)
from mmcompile.compiler.parts import plan_exists, refuse_other, remove_plan
from mmcompile.compiler.plan import lone_rows, shuffled
from mmcompile.compiler.planning import Listed, Planned, Wanted
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.run import Counts, Runner, ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.shardcall import build_shard, versions_here
from mmcompile.compiler.sources import Scan, Source, roots_of
from mmcompile.compiler.sources.choose import given_source
from mmcompile.compiler.sources.compiled import CompiledSource
from mmcompile.compiler.sources.rows import is_row_source
from mmcompile.compiler.sources.splits import check_splits
from mmcompile.compiler.staging import Staging
from mmcompile.compiler.statcache import StatCache
from mmcompile.compiler.tally import told_of
from mmcompile.compiler.task import Job, warm_up
from mmcompile.compiler.trace import Trace
from mmcompile.compiler.verdict import failed_call, listed_rejects, too_many, unsettled
from mmcompile.errors import EngineError, MMCompileError, OptionError, RemoteError, SourceError
from mmcompile.format.canonical import canonical
from mmcompile.format.commit import write_atomic
from mmcompile.format.lock import Lock
from mmcompile.format.store import is_url, on_disk
from mmcompile.format.storelock import StoreLock

if TYPE_CHECKING:
    from mmcompile.compiler.rowbuild import RowBuild

__all__ = ["BuildOptions", "BuildReport", "build"]

#: Seconds between two saves of the stat cache while shards are sealed, and at least as many times as long as a save took: it writes all of it, some
#: seconds for 10^7 images, and seals hold the same facts.
_SAVE_S, _SAVE_SHARE = 30.0, 100


@tells_of_keywords
def build(
    source: Any,
    out: str | Path,
    *,
    preprocess: Preprocess | RowPreprocess | None = None,
    workers: int | None = None,
    options: BuildOptions | None = None,
    max_rejects: int | str = 0,
    progress: Callable[[Progress], None] | None = None,
    dry_run: bool = False,
) -> BuildReport:
    """Compile `source` into the dataset `out`, and publish it.

    `source` is a path or URL of anything that the command reads, or a list of some, or these with options of the command as `Raw("out1/",
    where="width >= 256")`; a dataset with a length and items, or a dict of such by split;
    arrays (numpy's, tensors, of HDF5 or Zarr) alone or in a dict by name; an iterable of samples, which is read once; or a Source.  A sample is a
    tuple, a dict, or one picture (of Pillow), array, tensor or number; the first one declares names, dtypes and shapes of all.  Pictures are made as
    `preprocess` says, with the pixels that the same file in a folder has; arrays are stored as they are.  A dataset that pickles is read by all
    workers, any other by this process, with a warning.  What an item raises (IndexError, too) is a SourceError with its row.

    The bytes of the dataset depend on the sources, `preprocess` and `shard_bytes` alone.  `workers`: processes, None: as many as this one may
    use.  `max_rejects`: how many bad images may be left out, a number or "2%" of the items.  Safe to kill at any moment: the same call
    goes on where it stopped.

    Raises OptionError before anything is written; DecodeError when more images were rejected than allowed, SourceError when files could not
    be read or settled (both with everything else sealed, nothing published); OutputExistsError; EngineError; BuildError when another run is
    at work, or the disk is full.
    """
    for name, value, kinds in (("preprocess", preprocess, (Preprocess, RowPreprocess)), ("options", options, (BuildOptions,))):
        if value is not None and not isinstance(value, kinds):
            expected = " or ".join(f"a mmcompile.{kind.__name__}" for kind in kinds)
            raise OptionError(f"{name} must be {expected}, found {value!r:.80}", options=[name])
    if not isinstance(out, str | Path):
        raise OptionError(f"out must be a path as str or Path, found {out!r:.80}", options=["out"])
    options = options or BuildOptions()
    if workers is not None:
        options = replace(options, workers=workers)
    progress = progress or (lambda _: None)
    out = on_disk(out)
    source, preprocess = given_source(source, preprocess)
    make: Callable[[Path, Callable[[Progress], None], Staging | None], Build | RowBuild]
    if is_row_source(source):
        from mmcompile.compiler.rowapart import row_build

        make = functools.partial(row_build, source, preprocess, options)
    elif isinstance(preprocess, RowPreprocess):
        raise OptionError(f"{source.root}: a source of images, and a RowPreprocess is for arrays, tables and datasets in Python: give a Preprocess")
    else:
        preprocess = source.settle(preprocess) if isinstance(source, CompiledSource) else preprocess or Preprocess()
        made: type[Build] = Build
        if options.part is not None or options.plan_only:
            from mmcompile.compiler.apart import PartBuild as made  # it is a Build itself
        make = functools.partial(made, cast(Source, source), preprocess, options, max_rejects)
    if not is_url(out):
        return _outcome(make(Path(out), progress, None), dry_run)
    if options.part is not None or options.plan_only:
        raise OptionError(f"{out}: parts are sealed in a folder that all machines share; with a URL for OUT let an engine spread the work")
    with Staging(str(out), progress) as staging:
        try:
            return staging.report(_outcome(make(staging.folder, staging.progress, staging), dry_run))
        except MMCompileError as error:
            raise staging.told(error) from error


def _outcome(run: Build | RowBuild, dry_run: bool) -> BuildReport:
    try:
        return run.dry() if dry_run else run.build()
    except MMCompileError:
        raise
    except OSError as error:
        raise failed_call(run.report.out, error, staged=run.staging is not None) from error


class Build:
    """One call of `build`, step by step."""

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        options: BuildOptions,
        max_rejects: int | str,
        out: Path,
        progress: Callable[[Progress], None],
        staging: Staging | None = None,
    ) -> None:
        self.staging = staging
        self.source, self.options, self.max_rejects, self.progress = source, options, max_rejects, progress
        self.out = Path(os.path.abspath(out))
        self.asked = preprocess
        self.began = time.monotonic()
        self.scan: Scan
        self.early: Planned | None = None
        self.sealed: dict[int, Seal] = {}
        self.report = BuildReport(out=str(out), samples=0, rejects=0, shards=0, bytes=0, seconds=0.0)
        allowed_rejects(max_rejects, 0)
        preprocess.resolved()
        self.copies = isinstance(source, CompiledSource)
        if preprocess.transform is not None and not self.copies:
            transform.find(preprocess.transform)
        self.executor = make_executor(options.workers)
        if not (self.out / "index.json").exists():  # else there may be nothing to do
            self._prepare()
        self.workers = self.executor.workers if isinstance(self.executor, LocalExecutor) else options.workers or 1
        self.engine: Executor | None = None

    # ------------------------------------------------------------------ the two ways through

    def build(self) -> BuildReport:
        """Build and publish."""
        try:
            self._check_output()
            self.engine = connect(self.options.engine, self.options.address)
            if self.staging is None:
                self._scan()
                if self._stands():
                    return self._standing()
                self._prepare()
                (self.out / ".build").mkdir(parents=True, exist_ok=True)
            with self._lock() as lock:
                if self.staging is not None:
                    self.staging.pull()
                    self._scan()
                    if self._stands():
                        return self._standing()
                scratch = open_output(self.out)
                try:
                    with unless_removed(self.out, lock.still_held):
                        self._choose(scratch)
                        self._plan()
                        if self._is_current():
                            remove_plan(self.out)
                            return self._standing()
                        self._run(scratch)
                        return self._publish(lock, scratch)
                finally:
                    self._stop()
                    self._save_stats()
                    shutil.rmtree(scratch, ignore_errors=True)
                    if self.staging is not None and not isinstance(sys.exception(), RemoteError) and lock.still_held():
                        self.staging.keep()
        finally:
            self._stop()

    def dry(self) -> BuildReport:
        """Say what would be built; write nothing."""
        try:
            self._check_output()
            return self._foresee()
        finally:
            self._stop()

    def _foresee(self) -> BuildReport:
        if self.staging is not None:
            self.staging.pull()
        self._scan()
        self._choose(Path(os.devnull))
        self._plan()
        if self._is_current():
            return replace(self._foreseen(whole=True), bytes=self._standing().bytes, write_bytes=0)
        return self._foreseen(whole=True)

    def _foreseen(self, *, whole: bool) -> BuildReport:
        """The report of a dry run of what is planned: of the `whole` dataset, or of shards alone."""
        self.planned.check_versions(self.progress)
        foreseen = self.planned.predict(self.progress)
        found = dict(foreseen.rejects)
        for task in self.planned.tasks:
            if (stands := self.planned.whole.get(task.number)) is not None:
                found |= {task.start + i: line for i, line in stands.rejects.items()}
        rejects = [found[i] for i in sorted(found)]
        stored = np.ones(len(self.scan.keys), bool)
        stored[list(found)] = False
        contents = self._contents([], rejects, [int(stored[t.start : t.stop].sum()) for t in self.planned.tasks]) if whole else None
        total, written = forecast.sizes(self.out, self.planned, foreseen, self.wanted, self.listed, contents)
        job = self.wanted.job(self.job)
        return replace(
            self._described(),
            samples=sum(len(task) for task in self.planned.tasks) - len(rejects),
            rejects=len(rejects),
            reject_reasons=dict(Counter(line["code"] for line in rejects)),
            splits={} if contents is None else sizes_of(contents.splits),
            shards=len(self.planned.tasks),
            bytes=total,
            decoded=foreseen.decoded,
            copied=foreseen.copied,
            kept=self.planned.kept,
            dry_run=True,
            free_bytes=self._free_bytes(),
            write_bytes=written,
            estimate_s=forecast.seconds(self.executor, job, self.planned, foreseen, self.scan.keys, self.workers),
            seconds=time.monotonic() - self.began,
        )

    # ------------------------------------------------------------------ steps

    def _check_output(self) -> None:
        if self.staging is not None:
            self.staging.look()
        check_output(self.out, roots_of(self.source), None if self.staging is None else self.staging.store.url)

    def _lock(self) -> Lock | StoreLock:
        required = self.options.lock
        return Lock(self.out / ".build" / "lock", required=required) if self.staging is None else self.staging.lock(required)

    def _prepare(self) -> None:
        """Let workers load what they need while RAW is listed, or shards are planned."""
        if isinstance(self.executor, LocalExecutor) and self.options.engine == "local" and not self.copies:
            self.executor.prepare(functools.partial(warm_up, self.asked))

    def _scan(self) -> None:
        self.progress(Progress("scan"))
        at_ns = time.time_ns()
        self.scan = self.source.scan(lambda n: self.progress(Progress("scan", n)))
        check_splits(self.scan.splits, self.source.root)
        self.scan = Trace.of(self.options, self.scan.lent).seen(self.scan, self.source.identity())
        if self.options.seed is not None:
            self.scan = shuffled(self.scan, self.options.seed)
        if not self.scan.keys:
            raise SourceError(f"{self.source.root}: there are no images, expected at least one", path=self.source.root)
        cache = StatCache(self.out / ".build" / "stat-cache", self.source.location())
        self.listed = Listed(self.scan, at_ns, cache, checksum=self.options.checksum)
        self.allowed = allowed_rejects(self.max_rejects, len(self.scan.keys))
        self.asked = self.asked.with_parts(self.scan.parts, self.scan.beside)

    def _choose(self, scratch: Path) -> None:
        self.job = self._job(self.asked.resolved(), scratch)
        chosen, why = self.job.preprocess, ""
        if self._has_to_choose():
            self.progress(Progress("choose", message="looking at image sizes"))
            chosen, why = self.listed.choose(chosen, lambda: geometry.choose(self.job, self.executor, self.listed.keys, self.listed.hashes64))
        self._want(chosen, why)

    def _job(self, preprocess: Preprocess, scratch: Path) -> Job:
        store = None if self.staging is None else self.staging.store
        return Job(self.source, preprocess, (), scratch, self.out / "shards", timeout_s=self.options.decode_timeout_s, store=store)

    def _has_to_choose(self) -> bool:
        return self.asked.needs_look()

    def _want(self, chosen: Preprocess, why: str) -> None:
        self.wanted = Wanted.of(self.asked, chosen, why, self.source, self.scan, self.options)

    def _plan(self) -> None:
        """Cut shards, and see which of them are there already."""
        if not self.options.plan_only:
            refuse_other(self.out, self.wanted.settings)
        if self.early is None or not self.early.holds:
            self.planned = Planned(self.out, self.job, self.wanted, self.listed, self.options, self.executor)
        if self.planned.changed:
            self.progress(Progress("plan", message=told_changes(self.out, self.planned.changed)))
        self.planned.find_whole(self.progress)

    def _stands(self) -> bool:
        """Is there nothing to do?  Decided without a lock or a byte written, and without `checksum` by stats alone: False where they do not tell."""
        chosen: tuple[Preprocess, str] | None = (self.asked.resolved(), "")
        if self._has_to_choose():
            chosen = self.listed.chosen(self.asked.resolved())
        checksum = self.options.checksum
        if chosen is None or not (checksum or self.listed.known.all()) or not (self.out / "index.json").exists() or plan_exists(self.out):
            return False
        self.job = self._job(chosen[0], Path(os.devnull))
        self._want(*chosen)
        self.early = self.planned = Planned(self.out, self.job, self.wanted, self.listed, self.options, self.executor)
        self.planned.find_whole(self.progress, read=checksum)
        return self._is_current() and self.planned.holds

    def _is_current(self) -> bool:
        before = self.planned.previous.index
        return self.planned.unchanged and before is not None and before.rejects <= self.allowed

    def _run(self, scratch: Path) -> None:
        todo = self.planned.todo
        total = sum(len(t) for t in todo)
        self.planned.check_versions(self.progress)
        check_room(self.out, noted_bytes(total, self.wanted.row_bytes), f"{total:,} samples", self._free_bytes())
        write_atomic(self.out / ".build" / "settings.json", canonical(self.wanted.compared))
        if self.staging is not None:
            self.staging.keep()
        table = self.planned.write_table(scratch)
        self.job = replace(self.wanted.job(self.job), reuse=table)
        if self.planned.previous.remembered and todo:
            self.job = replace(self.job, remembered=scratch / "remembered.json")
            write_atomic(scratch / "remembered.json", canonical(self.planned.previous.remembered), durable=False)
        self._next_save = time.monotonic() + _SAVE_S

        def on_sealed(work: ShardWork, seal: Seal) -> None:
            self.planned.learn(work)
            self.sealed[work.task.number] = seal.outline()
            if time.monotonic() > self._next_save:
                self._save_stats()

        told = ""

        def on_progress(counts: Counts, message: str = "") -> None:
            nonlocal told
            if counts.told and not told:
                told = message = counts.told
            self.progress(Progress("build", counts.done, total, counts.rejects, message))

        self.runner: Runner | Cluster
        if self.engine is None:
            self.runner = Runner(self.executor, self.job, on_sealed, on_progress, self.workers)
        else:
            self.job = replace(self.job, versions=versions_here(self.wanted.preprocess))
            self.runner = Cluster(self.engine, build_shard, self.job, on_sealed, on_progress, self.options.workers)
            self.workers = self.runner.workers
        self.runner.run(self.planned.works())

    def _free_bytes(self) -> int | None:
        return free_bytes(self.out) if self.staging is None else None

    def _publish(self, lock: Lock | StoreLock, scratch: Path) -> BuildReport:
        self.progress(Progress("publish"))
        if self.staging is not None:
            self.staging.refresh()
        parts = []
        for task in self.planned.tasks:
            whole, seal = self.planned.whole.get(task.number), self.sealed.get(task.number)
            if whole is not None:
                parts.append(Part(whole.files, whole.rows, whole.sums() if whole.rows else {}, whole.flags))
            elif seal is not None:
                parts.append(Part(seal.files, seal.rows, seal.sums or {}, seal.flags or {}))
            elif not self.runner.failures:  # else all items of the shard failed
                raise EngineError(f"{self.out}: shard {task.number} is neither there nor made; nothing is published: run the same command again")
        lines = self._rejects()
        rejects, told = list(lines.values()), [self.wanted.trace.named(line, self.scan.keys[at]) for at, line in lines.items()]
        refuse_removed(self.out, lock.still_held)
        listed = listed_rejects(self.out)
        write_atomic(listed, b"".join(map(canonical, told)))
        if self.runner.failures:
            raise unsettled(self.out, self.runner.failures, len(rejects), self.allowed)
        stored = len(self.scan.keys) - len(rejects)
        if not stored or len(rejects) > self.allowed:
            raise too_many(self.out, told, len(self.scan.keys), self.allowed)
        refuse_removed(self.out, lock.still_held)
        done = publish_shards(self.out, scratch, self._contents(parts, rejects, [part.rows for part in parts]))
        gone = clean_up(self.out, self.planned.previous.seals.values(), self.sealed.values())
        remove_plan(self.out)
        listed.unlink(missing_ok=True)  # the generation has them now
        if self.staging is not None:
            self.staging.publish(lock.still_held, gone)
        counts, made = self.runner.counts, self._finished(done, lines)
        return replace(made, decoded=counts.decoded, copied=counts.copied, warnings=(*made.warnings, *counts.notes()))

    def _contents(self, parts: list[Part], rejects: list[dict[str, Any]], rows: Sequence[int]) -> Contents:
        """`rows`: how many are stored of each task."""
        wanted, splits = self.wanted, self.planned.stored_splits(rows)
        made = wanted.settings, wanted.versions, wanted.counts, wanted.auto, True, ()
        return Contents(parts, rejects, wanted.fields, splits, wanted.lists, self.scan.classes, *made, wanted.revision, wanted.trace)

    def _standing(self) -> BuildReport:
        """The report of a build that found its dataset published already."""
        whole = [self.planned.whole[task.number] for task in self.planned.tasks]
        parts = [Part(w.files, w.rows, {}, w.flags) for w in whole]
        index, generation = self.planned.previous.index, self.planned.previous.generation
        assert index is not None
        assert generation is not None
        return self._finished(describe_published(self.out, index, generation, parts), self._rejects())

    def _rejects(self) -> dict[int, dict[str, Any]]:
        """The line of each rejected item by its number, in order, of all shards that stand or were sealed."""
        out = {}
        for task in self.planned.tasks:
            if (found := self.planned.whole.get(task.number) or self.sealed.get(task.number)) is not None:
                out.update({task.start + i: found.rejects[i] for i in sorted(found.rejects)})
        return out

    def _finished(self, done: Published, rejects: dict[int, dict[str, Any]]) -> BuildReport:
        return replace(
            self._described(),
            splits=sizes_of(done.splits),
            repeats=self.planned.repeats(list(rejects)),
            samples=len(self.scan.keys) - len(rejects),
            rejects=len(rejects),
            shards=done.shards,
            bytes=done.bytes,
            generation=done.generation,
            kept=self.planned.kept,
            counts={**self.scan.counts, **told_of(self.out, done.generation, self.wanted.preprocess, self.scan, rejects), **done.flags},
            reject_reasons=dict(Counter(line["code"] for line in rejects.values())),
            rejects_file=done.rejects_file,
            seconds=time.monotonic() - self.began,
        )

    # ------------------------------------------------------------------ small things

    def _described(self) -> BuildReport:
        lone = lone_rows(self.wanted.row_bytes, self.options.shard_bytes, len(self.scan.keys))
        warnings = [*self.scan.warnings, *notes(self.wanted.preprocess), *lone]
        warnings += self.planned.previous.warnings(len(self.scan.keys), self.scan.labels is not None)
        if not self.copies and (warning := decode.pillow_warning()) is not None:
            warnings.append(warning)
        return replace(
            self.report,
            classes=self.scan.classes,
            splits=sizes_of(self.scan.ranges),
            shape=self.wanted.preprocess.sample_shape(),
            dtype=self.wanted.preprocess.dtype,
            fields=tuple(f.name for f in self.wanted.fields),
            geometry=self.wanted.why or typed(self.wanted.preprocess),
            workers=self.workers,
            left_out=self.scan.left_out,
            counts=self.scan.counts,
            warnings=tuple(warnings),
            changed=self.planned.changed,
        )

    def _save_stats(self) -> None:
        if hasattr(self, "planned"):
            began = time.monotonic()
            self.listed.save()
            took = time.monotonic() - began
            self._next_save = began + took + max(_SAVE_S, _SAVE_SHARE * took)

    def _stop(self) -> None:
        self.executor.kill() if isinstance(self.executor, LocalExecutor) else self.executor.shutdown(cancel_futures=True)
        if isinstance(self.engine, BrokerExecutor):
            self.engine.kill()
