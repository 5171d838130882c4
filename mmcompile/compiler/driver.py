"""Hides the order of a build: scan, choose, plan, take what is there, run the rest, publish.

Until `publish` replaces index.json the published dataset is untouched; whatever was sealed before a stop is found again by the next run.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mmcompile.compiler import decode, geometry
from mmcompile.compiler.engines import LocalExecutor, make_executor, result_within
from mmcompile.compiler.formats import TORCHVISION_EXTENSIONS
from mmcompile.compiler.marks import marks_of, marks_of_index, versions_of
from mmcompile.compiler.options import BuildOptions, allowed_rejects, typed
from mmcompile.compiler.outcome import BuildReport, Progress
from mmcompile.compiler.output import (
    Contents,
    Part,
    check_output,
    clean_up,
    describe_changes,
    free_bytes,
    make_scratch,
    publish_shards,
    remove_temporaries,
)
from mmcompile.compiler.plan import ShardTask, key_hashes, make_tasks, rows_per_shard
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.previous import Previous, Whole
from mmcompile.compiler.reuse import write_table
from mmcompile.compiler.run import Counts, Runner, ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import Scan, Source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.statcache import StatCache, old_enough
from mmcompile.compiler.task import Job, hash_items, measure
from mmcompile.errors import BuildError, DecodeError, EngineError, MMCompileError, OptionError, SourceError
from mmcompile.format.canonical import as_text, canonical, name_from_json
from mmcompile.format.commit import sync_folder, write_atomic
from mmcompile.format.index import INDEX_LIMIT, Field
from mmcompile.format.lock import Lock

__all__ = ["BuildOptions", "BuildReport", "build", "marks_of_index", "versions_of"]

#: Seconds between two saves of the stat cache while shards are sealed (a save writes all of it; seals hold the same facts).
_SAVE_S = 30.0
#: Items hashed by one call of a worker.
_HASH_CHUNK = 128
#: A disk slower than this is taken for one that hangs.
_HASH_BYTES_PER_S = 1e6
#: Most keys and reject lines that an error carries.
_SHOWN = 1000
#: Bytes of a list of keys that can still be excluded one by one: they become settings, and the index has to hold those.
_MOST_EXCLUDED = INDEX_LIMIT // 4


def build(
    source: str | Path | Source,
    out: str | Path,
    *,
    preprocess: Preprocess | None = None,
    workers: int | None = None,
    options: BuildOptions | None = None,
    max_rejects: int | str = 0,
    progress: Callable[[Progress], None] | None = None,
    dry_run: bool = False,
) -> BuildReport:
    """Compile `source` (a folder of images, or a Source) into the dataset `out`, and publish it.

    The bytes of the dataset depend on the sources, `preprocess` and `shard_bytes` alone.  `workers`: processes, None: as many as this one may
    use.  `max_rejects`: how many bad images may be left out, a number or "2%" of the items.  Safe to kill at any moment: the same call
    goes on where it stopped.

    Raises OptionError before anything is written; DecodeError when more images were rejected than allowed, SourceError when files could not
    be read or settled (both with everything else sealed, nothing published); OutputExistsError; EngineError; BuildError when another run is
    at work, or the disk is full.
    """
    preprocess = preprocess or Preprocess()
    options = options or BuildOptions()
    if workers is not None:
        options = replace(options, workers=workers)
    run = _Build(_as_source(source, preprocess), Path(out), preprocess, options, max_rejects, progress or (lambda _: None))
    try:
        return run.dry() if dry_run else run.build()
    except MMCompileError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "no space left on the device; what is finished is kept: free some space and run the same command again"
        else:
            where = "" if error.filename is None or str(error.filename) == str(run.out) else f"{error.filename}: "
            what = f"{where}{error.strerror or error}; whatever was finished is kept, and the same command goes on when this is mended"
        raise BuildError(f"{out}: {what}", errno=error.errno) from error


def _as_source(source: str | Path | Source, preprocess: Preprocess) -> Source:
    """A folder is listed as its preset says: as torchvision lists it, or with all formats and without hidden names."""
    if not isinstance(source, str | Path):
        return source
    exact = preprocess.compat == "torchvision"
    return FolderSource(os.fspath(source), hidden=exact, extensions=TORCHVISION_EXTENSIONS if exact else None)


class _Build:
    """One call of `build`, step by step."""

    def __init__(
        self, source: Source, out: Path, preprocess: Preprocess, options: BuildOptions, max_rejects: int | str, progress: Callable[[Progress], None]
    ) -> None:
        self.source, self.options, self.max_rejects, self.progress = source, options, max_rejects, progress
        self.out = Path(os.path.abspath(out))
        self.asked = preprocess
        self.began = time.monotonic()
        self.report = BuildReport(out=str(out), samples=0, rejects=0, shards=0, bytes=0, seconds=0.0)
        allowed_rejects(max_rejects, 0)
        preprocess.resolved()
        self.executor = make_executor(options.engine, options.workers)
        self.workers = self.executor.workers if isinstance(self.executor, LocalExecutor) else options.workers or 1

    # ------------------------------------------------------------------ the two ways through

    def build(self) -> BuildReport:
        """Build and publish."""
        try:
            check_output(self.out, self.source.root)
            self._scan()
            (self.out / ".build").mkdir(parents=True, exist_ok=True)
            with Lock(self.out / ".build" / "lock", required=self.options.lock) as lock:
                scratch = self._make_scratch()
                try:
                    self._choose(scratch)
                    self._plan()
                    self._run(scratch)
                    return self._publish(lock, scratch)
                except OSError as error:
                    if isinstance(error, MMCompileError) or lock.still_held():
                        raise
                    self._raise_removed(error)
                finally:
                    self._stop()
                    self._save_stats()
                    shutil.rmtree(scratch, ignore_errors=True)
        finally:
            self._stop()

    def dry(self) -> BuildReport:
        """Say what would be built; write nothing."""
        try:
            check_output(self.out, self.source.root)
            self._scan()
            self._choose(Path(os.devnull))
            self._plan()
            todo = [t for t in self.tasks if t.number not in self.whole]
            kept = sum(w.rows for w in self.whole.values())
            n = sum(len(t) for t in todo)
            row_bytes = sum(f.row_bytes for f in self.fields)
            return replace(
                self._described(),
                samples=len(self.scan.keys) - sum(len(w.rejects) for w in self.whole.values()),
                shards=len(self.tasks),
                bytes=len(self.scan.keys) * row_bytes,
                kept=kept,
                dry_run=True,
                free_bytes=free_bytes(self.out),
                estimate_s=self._estimate(todo, n),
                seconds=time.monotonic() - self.began,
            )
        finally:
            self._stop()

    # ------------------------------------------------------------------ steps

    def _scan(self) -> None:
        self.progress(Progress("scan"))
        self.scanned_ns = time.time_ns()
        self.scan: Scan = self.source.scan(lambda n: self.progress(Progress("scan", n)))
        if not self.scan.keys:
            raise SourceError(f"{self.source.root}: there are no images", path=self.source.root)
        self.hashes64 = key_hashes(self.scan.keys)
        self.allowed = allowed_rejects(self.max_rejects, len(self.scan.keys))

    def _make_scratch(self) -> Path:
        seals = self.out / ".build" / "seals"
        if seals.is_symlink():
            raise BuildError(f"{seals}: a link; remove it")
        scratch = make_scratch(self.out)
        remove_temporaries(self.out)
        (self.out / "shards").mkdir(exist_ok=True)
        for path in (self.out, self.out.parent):  # the files in it are made durable one by one, so the folders must be, too
            with contextlib.suppress(OSError):
                sync_folder(path)
        return scratch

    def _choose(self, scratch: Path) -> None:
        asked = self.asked.resolved()
        self.job = Job(self.source, asked, (), scratch, self.out / "shards", timeout_s=self.options.decode_timeout_s)
        why = ""
        if asked.needs_size() or (asked.mode == "keep" and asked.kept_mode is None):
            self.progress(Progress("choose", message="looking at image sizes"))
            asked, why = geometry.choose(self.job, self.executor, self.scan.keys, self.hashes64)
        self.preprocess, self.why = asked.resolved(), why
        normalize = self.preprocess.read_normalize()
        image = Field(
            "image",
            self.preprocess.dtype,
            self.preprocess.row_shape(),
            "image",
            self.preprocess.layout,
            self.preprocess.read_scale(),
            None if normalize is None else (normalize.mean, normalize.std),
        )
        self.fields = (image,) if self.scan.labels is None else (image, Field("label", "int64", (), "class"))
        self.versions = versions_of(self.preprocess)
        self.marks = marks_of(self.preprocess, self.versions, PIXEL_REVISION)
        self.settings = {"preprocess": self.preprocess.settings(), "source": self.source.identity(), "shard_bytes": self.options.shard_bytes}
        self.compared = {**self.settings, "versions": self.versions}
        if (length := len(canonical(self.settings))) > INDEX_LIMIT // 2:
            raise OptionError(
                f"the settings are {length:,} bytes, at most {INDEX_LIMIT // 2:,} fit: give patterns to --include and --exclude, not single files"
            )

    def _plan(self) -> None:
        """Cut shards, and see which of them are there already."""
        keys, labels, stat = self.scan.keys, self.scan.labels, self.scan.stat
        self.rows = rows_per_shard(sum(f.row_bytes for f in self.fields), self.options.shard_bytes)
        self.tasks = make_tasks(keys, labels, self.hashes64, self.rows, (self.marks.pixel, self.marks.store))
        self.previous = Previous(self.out, self.fields, self.marks, marks_of_index)
        self.previous.load()
        self.changed = tuple(describe_changes(self.previous.settings, self.compared))
        self._same_choice()
        for line in self.changed:
            self.progress(Progress("plan", message=f"differs from what is in {self.out}: {line}"))
        self.cache = StatCache(self.out / ".build" / "stat-cache", self.source.location())
        self.source_hashes, self.known = self.cache.known(self.hashes64, stat)
        candidates: list[tuple[ShardTask, Whole]] = []
        for task in self.tasks:
            part = slice(task.start, task.stop)
            whole = self.previous.whole(task, keys[part], None if labels is None else labels[part])
            if whole is not None:
                if whole.stat is not None:
                    same = (whole.stat == stat[part]) & (stat["size"][part] >= 0) & ~self.known[part]
                    self.source_hashes[part][same] = whole.hashes[same]
                    self.known[part] |= same
                candidates.append((task, whole))
        self._hash_unknown([i for task, _ in candidates for i in range(task.start, task.stop) if not self.known[i]])
        self.whole: dict[int, Whole] = {}
        for task, whole in candidates:
            part = slice(task.start, task.stop)
            if self.known[part].all() and np.array_equal(self.source_hashes[part], whole.hashes):
                self.whole[task.number] = whole

    def _same_choice(self) -> None:
        """A rebuild that nobody told a size must not silently choose another one."""
        before = (self.previous.settings or {}).get("preprocess")
        if not self.why or not before or self.previous.index is None:
            return
        try:
            old = Preprocess.from_settings(before)
        except (OptionError, KeyError, TypeError, ValueError):
            return
        mine = self.preprocess
        if old.mode == mine.mode == "keep" and self.asked.kept_mode is None and old.kept_mode != mine.kept_mode:
            raise OptionError(
                f"{self.out}: published with pictures of mode {old.kept_mode}; for the images that are there now the choice would be "
                f"{mine.kept_mode} ({self.why}). Take the strays out, or build into a new folder",
                before=old.kept_mode,
                now=mine.kept_mode,
            )
        if self.asked.needs_size() and (old.resize, old.crop, old.pad, old.keep_size) != (mine.resize, mine.crop, mine.pad, mine.keep_size):
            raise OptionError(
                f"{self.out}: published with {typed(old)}; for the images that are there now the choice would be {typed(mine)} ({self.why}). "
                f"Say which: add {typed(old)} to go on as before, or {typed(mine)} to change",
                before=typed(old),
                now=typed(mine),
            )

    def _hash_unknown(self, items: list[int]) -> None:
        """Read the files whose stat does not tell that they are unchanged, where that may save a whole shard."""
        chunks = [items[i : i + _HASH_CHUNK] for i in range(0, len(items), _HASH_CHUNK)]
        futures = [self.executor.submit(hash_items, self.job, [self.scan.keys[i] for i in chunk]) for chunk in chunks]
        for done, (chunk, future) in enumerate(zip(chunks, futures, strict=True)):
            limit_s = self.options.decode_timeout_s + len(chunk) + int(self.scan.stat["size"][chunk].clip(0).sum()) / _HASH_BYTES_PER_S
            try:
                found = result_within(self.executor, future, limit_s)
            except EngineError:  # not known, then: the build itself finds out which file it was
                continue
            same = np.array([self._unchanged(i) for i in chunk])
            read = found.any(axis=1) & same
            at = np.array(chunk)[read]
            self.source_hashes[at], self.known[at] = found[read], True
            self.progress(Progress("check", min(len(items), (done + 1) * _HASH_CHUNK), len(items)))

    def _unchanged(self, item: int) -> bool:
        """Is the file still the one that was scanned, so that what was read now may be remembered under that stat?"""
        try:
            return self.source.stat(self.scan.keys[item]) == tuple(self.scan.stat[item].tolist())
        except OSError:
            return False

    def _run(self, scratch: Path) -> None:
        todo = [t for t in self.tasks if t.number not in self.whole]
        total = sum(len(t) for t in todo)
        self._check_disk(total)
        write_atomic(self.out / ".build" / "settings.json", canonical(self.compared))
        table = write_table(self.previous.old, scratch) if todo else None
        self.job = replace(self.job, preprocess=self.preprocess, fields=self.fields, reuse=table)
        if self.previous.remembered and todo:
            self.job = replace(self.job, remembered=scratch / "remembered.json")
            write_atomic(scratch / "remembered.json", canonical(self.previous.remembered), durable=False)
        self.sealed: dict[int, Seal] = {}
        self._saved = time.monotonic()

        def on_sealed(work: ShardWork, seal: Seal) -> None:
            part = slice(work.task.start, work.task.stop)
            self.source_hashes[part], self.known[part] = work.hashes, work.known
            self.sealed[work.task.number] = seal
            if time.monotonic() - self._saved > _SAVE_S:
                self._save_stats()

        def on_progress(counts: Counts) -> None:
            self.progress(Progress("build", counts.done, total, counts.rejects))

        self.runner = Runner(self.executor, self.job, on_sealed, on_progress, self.workers)
        self.runner.run(self._works(todo))

    def _works(self, todo: list[ShardTask]) -> Iterator[ShardWork]:
        stat = self.scan.stat.copy()
        stat[~old_enough(stat, self.scanned_ns)] = (-1, -1, -1, -1)
        empty = Seal("", self.marks.pixel, self.marks.store, self.marks.formats, None, stat[:0], np.empty((0, 2), np.uint64), {}, {})
        for task in todo:
            part = slice(task.start, task.stop)
            labels = None if self.scan.labels is None else self.scan.labels[part]
            seal = replace(empty, task=task.id, stat=stat[part].copy())
            yield ShardWork(task, self.scan.keys[part], labels, self.scan.stat[part], self.source_hashes[part].copy(), self.known[part].copy(), seal)

    def _check_disk(self, items: int) -> None:
        need = items * (sum(f.row_bytes for f in self.fields) + 256)
        free = free_bytes(self.out)
        if free is not None and need > free:
            raise BuildError(
                f"{self.out}: {need:,} bytes are needed for {items:,} samples, {free:,} are free; nothing was decoded: free some space, "
                "or choose a smaller size or --dtype uint8",
                needed=need,
                free=free,
            )

    def _raise_removed(self, error: OSError | None = None) -> NoReturn:
        raise BuildError(f"{self.out}: .build was removed while the build ran; nothing is published: run the same command again") from error

    def _raise_failures(self, rejects: int, listed: Path) -> NoReturn:
        failures = sorted(self.runner.failures)
        keys = [as_text(key) for key, _ in failures]
        listing, exclude = self.out / ".build" / "exclude.json", json.dumps({"exclude": [glob.escape(key) for key in keys]}).encode()
        if written := len(exclude) < _MOST_EXCLUDED:
            write_atomic(listing, exclude)
        first = "; ".join(f"{as_text(key)!r}: {reason}" for key, reason in failures[:3])
        raise SourceError(
            f"{len(failures):,} file{'s' if len(failures) > 1 else ''} could not be read or settled ({first}{', …' if len(failures) > 3 else ''}); "
            "all else is finished and kept, nothing is published: mend them, or leave them out"
            + (f"; {rejects:,} bad images stand in {listed}" if rejects else ""),
            keys=keys[:_SHOWN],
            exclude_file=str(listing) if written else None,
            max_rejects=rejects if rejects > self.allowed else None,
            rejects=rejects,
            report=str(listed),
            reasons=[reason for _, reason in failures[:_SHOWN]],
            count=len(failures),
        )

    def _publish(self, lock: Lock, scratch: Path) -> BuildReport:
        self.progress(Progress("publish"))
        rejects: list[dict[str, Any]] = []
        parts = []
        for task in self.tasks:
            whole, seal = self.whole.get(task.number), self.sealed.get(task.number)
            if whole is not None:
                lines = whole.rejects
                parts.append(Part(whole.files, whole.rows, whole.sums() if whole.rows else [], whole.flags))
            elif seal is not None:
                lines = seal.rejects
                parts.append(Part(seal.files, seal.rows, seal.sums or [], seal.flags or {}))
            else:
                lines = {}  # a shard all of whose items failed
            rejects += [lines[i] for i in sorted(lines)]
        if not lock.still_held():
            self._raise_removed()
        listed = self.out / ".build" / "rejects.jsonl"
        write_atomic(listed, b"".join(canonical(line) for line in rejects))
        if self.runner.failures:
            self._raise_failures(len(rejects), listed)
        stored = len(self.scan.keys) - len(rejects)
        if not stored:
            message, _ = Counter(line["message"] for line in rejects).most_common(1)[0]
            raise DecodeError(
                f"{self.out}: all {len(rejects):,} images were rejected ({message}), so there is nothing to publish; see {listed}",
                rejects=len(rejects),
                report=str(listed),
            )
        if len(rejects) > self.allowed:
            self._raise_rejects(rejects, listed)
        contents = Contents(parts, rejects, self.fields, self.scan.classes, self.preprocess, self.settings, self.versions)
        if not lock.still_held():
            self._raise_removed()
        done = publish_shards(self.out, scratch, contents)
        clean_up(self.out, self.previous.seals, self.sealed)
        listed.unlink(missing_ok=True)  # the generation has them now
        counts = self.runner.counts
        kept = sum(w.rows for w in self.whole.values())
        return replace(
            self._described(),
            samples=stored,
            rejects=len(rejects),
            shards=done.shards,
            bytes=done.bytes,
            generation=done.generation,
            decoded=counts.decoded,
            copied=counts.copied,
            kept=kept,
            counts={**self.scan.counts, **done.flags},
            reject_reasons=dict(Counter(line["code"] for line in rejects)),
            rejects_file=done.rejects_file,
            seconds=time.monotonic() - self.began,
        )

    def _raise_rejects(self, rejects: list[dict[str, Any]], listed: Path) -> NoReturn:
        reasons = Counter(line["code"] for line in rejects)
        raise DecodeError(
            f"{len(rejects):,} of {len(self.scan.keys):,} images were rejected ({', '.join(f'{n:,} {code}' for code, n in reasons.most_common())}), "
            f"{self.allowed:,} allowed; all others are finished and kept, nothing is published: see {listed}",
            rejects=len(rejects),
            allowed=self.allowed,
            report=str(listed),
            examples=[(name_from_json(line["key"]), line["message"]) for line in rejects[:10]],
        )

    # ------------------------------------------------------------------ small things

    def _described(self) -> BuildReport:
        warnings = [*self.scan.warnings, *self.preprocess.notes(), *self._replaced()]
        if (warning := decode.pillow_warning()) is not None:
            warnings.append(warning)
        return replace(
            self.report,
            classes=self.scan.classes,
            shape=self.preprocess.sample_shape(),
            dtype=self.preprocess.dtype,
            geometry=self.why or typed(self.preprocess),
            workers=self.workers,
            left_out=self.scan.left_out,
            counts=self.scan.counts,
            warnings=tuple(warnings),
            changed=self.changed,
        )

    def _replaced(self) -> Iterator[str]:
        """A line where most of what OUT held, or its labels, is not in RAW: perhaps another OUT was meant."""
        before = self.previous.index
        if before is None:
            return
        labelled, now = any(f.meaning == "class" for f in before.fields), self.scan.labels is not None
        if len(self.scan.keys) * 2 < before.samples or labelled != now:
            kind, old = {True: "with labels", False: "without labels"}, self.previous.generation
            yield (
                f"this replaces {before.samples:,} samples {kind[labelled]} by {len(self.scan.keys):,} {kind[now]}; until `mmcompile prune` "
                f"the old ones are read with MMapShardDataset(out, generation='{old}')"
            )

    def _estimate(self, todo: list[ShardTask], n: int) -> float | None:
        if not n:
            return 0.0
        items = [i for t in todo for i in (t.start, (t.start + t.stop) // 2, t.stop - 1)]
        step = max(1, len(items) // 24)
        keys = [self.scan.keys[i] for i in [items[0], *items[::step]]]
        try:
            future = self.executor.submit(measure, replace(self.job, preprocess=self.preprocess), keys, 2.0)
            done, seconds = result_within(self.executor, future, self.options.decode_timeout_s)
        except EngineError:
            return None
        return seconds / done * n / self.workers if done else None

    def _save_stats(self) -> None:
        if hasattr(self, "cache"):
            self._saved = time.monotonic()
            with contextlib.suppress(OSError):
                self.cache.save(self.hashes64, self.scan.stat, self.source_hashes, self.known, self.scanned_ns)

    def _stop(self) -> None:
        if isinstance(self.executor, LocalExecutor):
            self.executor.kill()
        else:
            self.executor.shutdown(cancel_futures=True)
