"""Hides how a folder is held against its index: every byte that a kept generation names is hashed once, and what is bad is traced to its rows.

Reads only.  Whatever lies in the folder, the answer is a report: the only errors are that there is no dataset, or one of a newer format.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.errors import FormatError, NotADatasetError, VersionError
from mmcompile.format.canonical import as_text, read_limited
from mmcompile.format.catalog import Generation, digest_of, kept_files, list_folder, load_table, named_files, open_regular, single_files
from mmcompile.format.damage import damaged_blocks, damaged_rows, key_stops, sources_of
from mmcompile.format.findings import ROWS_LISTED, Problem, VerifyReport, from_a_folder
from mmcompile.format.index import BLOB_LIMIT, INDEX_LIMIT, Index, Names, load_classes, load_groups, load_names, mending
from mmcompile.format.mirror import Mirror, mirrored
from mmcompile.format.npy import file_bytes, file_name, hash_bytes, hash_file, header, open_array
from mmcompile.format.origins import Groups
from mmcompile.format.rejects import load_rejects
from mmcompile.format.remains import not_a_dataset, put_back
from mmcompile.format.samples import block_rows, pair_hash, sample_dtype
from mmcompile.format.store import is_url, on_disk

__all__ = ["Problem", "VerifyReport", "verify"]

#: What a bad file beside the rows of a shard means for them.
_LOST = {
    "samples": "where its rows come from, and whether they are whole, cannot be told",
    "keys": "its source keys are lost",
    "hashes": "whether its rows are whole is told by their file alone",
}

AtHand = Callable[[Path], AbstractContextManager[None]]


def verify(root: str | Path, *, workers: int | None = None, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Hold every byte of every kept generation against its hash, each file read once by one of `workers` threads (None: as many as CPUs, 2 to 16).

    Of a URL each file is brought to a temporary place once, of images one for each thread at a time.  `progress(bytes done, bytes in all)` is called
    from this thread, a few times a second.  Raises NotADatasetError, VersionError or RemoteError.
    """
    workers = workers or max(2, min(16, len(os.sched_getaffinity(0))))
    root = on_disk(root)
    if is_url(root):
        url = str(root)
        return replace(mirrored(url, lambda mirror: _told(mirror, _verify(mirror.folder, workers, progress, mirror.brought))), root=url)
    return _verify(Path(os.path.abspath(root)), workers, progress, lambda _: nullcontext())


def _told(mirror: Mirror, report: VerifyReport) -> VerifyReport:
    """A report whose messages name the URL."""
    return replace(report, problems=tuple(replace(problem, message=mirror.text(problem.message)) for problem in report.problems))


def _verify(root: Path, workers: int, progress: Callable[[int, int], None] | None, at_hand: AtHand) -> VerifyReport:
    began = time.monotonic()
    run = _Run(root, at_hand)
    run.read_indexes()
    run.read_tables()
    run.read_files(workers, progress)
    run.check_sound_files()
    run.trace()
    problems = run.problems
    problems.sort(key=lambda p: (p.what not in ("index", "generation"), p.shard is not None, p.shard or 0, p.path))
    return VerifyReport(
        root=str(run.root),
        generation=run.current,
        generations=tuple(run.indexes),
        samples=run.indexes[run.current].samples if run.current in run.indexes else 0,
        repair=all(from_a_folder(index) for index in list(run.indexes.values())[:1]),
        files=run.files,
        bytes=run.bytes,
        seconds=time.monotonic() - began,
        problems=tuple(problems),
        extra=tuple(run.extra),
        misnamed=tuple(run.misnamed),
    )


@dataclass(frozen=True)
class _Job:
    """One file of shards/ to read.  `array` is (dtype, shape) where the index tells them."""

    name: str
    what: str
    array: tuple[np.dtype[Any], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Bad:
    """One bad file, not yet traced to its shards and rows."""

    name: str
    what: str
    kind: str
    message: str


class _Run:
    """The state of one verification.  Files of shards/ are there while `at_hand` lasts."""

    def __init__(self, root: Path, at_hand: AtHand) -> None:
        self._at_hand = at_hand
        self.root, self.shards = root, root / "shards"
        self.problems: list[Problem] = []
        self.bad: dict[str, _Bad] = {}
        #: Every generation whose index can be read, the current one first, then the newest.
        self.indexes: dict[str, Index] = {}
        self.generations: list[Generation] = []
        self.current: str | None = None
        self.files = self.bytes = 0
        self.extra: list[str] = []
        self.misnamed: list[str] = []
        self._jobs: dict[str, _Job] = {}
        self._known: dict[str, str] = {}
        self._sizes: set[int] = set()
        self._stop = threading.Event()
        self._mutex = threading.Lock()

    def read_indexes(self) -> None:
        """index.json and every file in generations/."""
        kept, other = kept_files(self.root)
        self.misnamed += [f"generations/{name}" for name in other]
        data: bytes | None = None
        try:
            data = read_limited(self.root / "index.json", INDEX_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            if not kept:
                raise NotADatasetError(not_a_dataset(self.root), path=str(self.root)) from None
            self._problem("index.json", "missing", f"index.json: missing; {put_back(self.root)}", "index")
        except FormatError as error:
            self._problem("index.json", "unreadable", str(error), "index")
        found = hash_bytes(data) if data is not None else None
        for folder in ("shards", "generations"):
            if os.path.islink(self.root / folder):
                self._problem(folder, "unreadable", f"{folder}: a link; the folders of a dataset lie inside it", "index")
        if data is not None and found is not None:
            self.files, self.bytes = 1, len(data)
            if kept and found not in kept:
                said = f"index.json: its bytes hash to {found}, which is no generation of generations/; {mending(self.root, data)}"
                self._problem("index.json", "changed", said, "index")
                found = None
            elif os.path.isdir(self.root / "generations") and not kept:
                self._problem(f"generations/{found}.json", "missing", f"generations/{found}.json: missing", "generation", (found,))
        if found is not None and data is not None:
            self.current = found
            try:
                self.indexes[found] = Index.from_bytes(data, self.root / "index.json")
            except VersionError:
                raise
            except FormatError as error:
                self._problem("index.json", "unreadable", str(error), "index", (found,))
        for name in sorted(kept, key=lambda n: (n != found, -kept[n], n)):
            self._read_generation(name)

    def _read_generation(self, name: str) -> None:
        path = f"generations/{name}.json"
        try:
            data = read_limited(self.root / path, INDEX_LIMIT)
            self.files, self.bytes = self.files + 1, self.bytes + len(data)
            other = hash_bytes(data)
            if other != name:
                there = os.path.exists(self.root / "generations" / f"{other}.json")
                kind, what = ("swapped", f"the content of {other}.json") if there else ("changed", f"bytes that hash to {other}")
                self._problem(path, kind, f"{path}: holds {what}", "generation", (name,))
            elif name not in self.indexes:
                self.indexes[name] = Index.from_bytes(data, self.root / path)
        except (FormatError, OSError) as error:
            self._problem(path, "unreadable", str(error), "generation", (name,))

    def read_tables(self) -> None:
        """The shard tables; what they name becomes jobs."""
        for name, index in self.indexes.items():
            for what, file in single_files(index):
                self._add(file, what, (index.table_dtype(), (index.shards,)) if what == "table" else None)
            try:
                self.generations.append(load_table(self.root, index, name))
            except (FormatError, MemoryError):
                continue  # read again with the other files, and judged there
        for generation in self.generations:
            shapes = {f.name: (f.stored, f.shape) for f in generation.index.fields}
            shapes["samples"] = (sample_dtype(generation.index.fields), ())
            rows, block = generation.table["rows"].tolist(), block_rows(generation.index.fields)
            for what, shard, file in named_files(generation):
                if what == "keys":
                    self._add(file, what, None)
                elif what == "hashes":
                    self._add(file, what, (np.dtype("<u8"), (-(-rows[shard] // block),)))
                else:
                    dtype, shape = shapes[what]
                    self._add(file, what, (dtype, (rows[shard], *shape)))
        blind = len(self.generations) < len(self.indexes) or any(p.what in ("index", "generation") for p in self.problems)
        for entry in list_folder(self.shards):
            digest = digest_of(entry.name)
            if digest is None:
                self.misnamed.append(f"shards/{entry.name}")
            elif entry.name not in self._jobs:
                self.extra.append(f"shards/{entry.name}")
                if blind:  # perhaps named by what cannot be read: at least hold it against its own name
                    self._add(entry.name, "unknown", None)

    def _add(self, name: str, what: str, array: tuple[np.dtype[Any], tuple[int, ...]] | None) -> None:
        have = self._jobs.get(name)
        if have is None:
            self._jobs[name] = _Job(name, what, array)
            self._known[digest_of(name) or ""] = name
            if array is not None:
                self._sizes.add(file_bytes(*array))
        elif have.array != array:
            self._problem(f"shards/{name}", "unreadable", f"shards/{name}: named for {have.array} and for {array}, it cannot be both", what)

    def read_files(self, workers: int, progress: Callable[[int, int], None] | None) -> None:
        """Every file of the jobs, once."""
        total = sum(_size(self.shards / name) for name in self._jobs) if progress is not None else 0
        before = self.bytes
        jobs = iter(list(self._jobs.values()))
        with ThreadPoolExecutor(workers, "verify") as pool:
            try:
                waiting = {pool.submit(self._work, jobs) for _ in range(workers)}
                while waiting:
                    done, waiting = wait(waiting, 0.2, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if progress is not None:
                        progress(self.bytes - before, total)
            finally:
                self._stop.set()

    def _work(self, jobs: Iterable[_Job]) -> None:
        jobs = iter(jobs)
        while not self._stop.is_set():
            with self._mutex:
                job = next(jobs, None)
            if job is None:
                return
            with self._at_hand(self.shards / job.name):
                bad = self._judge(job)
            with self._mutex:
                self.files += bad is None or bad.kind != "missing"
                if bad is not None:
                    self.bad[job.name] = bad

    def _seen(self, count: int) -> None:
        with self._mutex:
            self.bytes += count
        if self._stop.is_set():
            raise InterruptedError(4, "stopped")

    def _judge(self, job: _Job) -> _Bad | None:
        """What is wrong with a file, or None."""
        path, shown = self.shards / job.name, f"shards/{job.name}"

        def bad(kind: str, message: str) -> _Bad:
            return _Bad(job.name, job.what, kind, f"{shown}: {message}")

        try:
            fd = open_regular(path)
        except FileNotFoundError:
            return bad("missing", "missing")
        except FormatError as error:
            return bad("unreadable", str(error).removeprefix(f"{path}: "))
        try:
            size = os.fstat(fd).st_size
            expected = None if job.array is None else file_bytes(*job.array)
            limit = BLOB_LIMIT if job.what in ("classes", "rejects", "groups") else size
            if size > limit:
                return bad("unreadable", f"{size:,} bytes, the limit is {limit:,}")
            wrong_size = None
            if expected is not None and size != expected:
                wrong_size = bad("short" if size < expected else "long", f"{size:,} bytes, expected {expected:,}")
                if size not in self._sizes:
                    return wrong_size
            found = hash_file(fd, self._seen)
            if found != digest_of(job.name):
                if found in self._known:
                    return bad("swapped", f"holds the content of {self._known[found]}")
                return wrong_size or bad("changed", f"its bytes hash to {found}")
            if wrong_size is not None or (job.array is not None and os.pread(fd, len(header(*job.array)), 0) != header(*job.array)):
                return bad("unreadable", "its bytes fit its name, but are not the array that the index and the table say")
        except OSError as error:
            return bad("unreadable", f"cannot be read ({error.strerror})")
        finally:
            os.close(fd)
        return None

    def check_sound_files(self) -> None:
        """What hashes alone do not tell: that files which fit their names also fit each other."""
        for index in self.indexes.values():
            for (what, file), load in zip(single_files(index)[1:], self._loaders(index), strict=True):
                if file not in self.bad:
                    try:
                        load(self.root, index)
                    except FormatError as error:
                        self.bad[file] = _Bad(file, what, "unreadable", str(error))
            if single_files(index)[0][1] not in self.bad and not any(g.index is index for g in self.generations):
                file = single_files(index)[0][1]
                try:
                    load_table(self.root, index, "")
                except (FormatError, MemoryError) as error:
                    self.bad[file] = _Bad(file, "table", "unreadable", str(error) or "too large for this machine's memory")
        checked: set[tuple[str, str]] = set()
        for generation in [g for g in self.generations if g.index.keyed]:
            names = {(what, shard): file for what, shard, file in named_files(generation) if what in ("samples", "keys")}
            for shard in range(len(generation.table)):
                samples, keys = names["samples", shard], names["keys", shard]
                if (samples, keys) in checked or samples in self.bad:
                    continue
                checked.add((samples, keys))
                self._check_keys(generation, shard, samples, keys)

    @staticmethod
    def _loaders(index: Index) -> list[Callable[[Path, Index], object]]:
        """What reads each file of `single_files` but the table, in its order."""
        both: list[tuple[str | None, Callable[[Path, Index], object]]] = [
            (index.classes_file, load_classes),
            (index.rejects_file, load_rejects),
            (index.groups_file, load_groups),
        ]
        for spec in index.fields:
            columns, categories = spec.columns or Names(), spec.categories or Names()
            both.append((columns.file, partial(_look_at_names, columns, spec.shape[0] if spec.shape else None)))
            both.append((categories.file, partial(_look_at_names, categories, None)))
        return [load for file, load in both if file is not None]

    def _check_keys(self, generation: Generation, shard: int, samples: str, keys: str) -> None:
        array = np.dtype("u1"), (0,)
        try:
            array = array[0], (key_stops(self.root, generation, shard),)
            if keys not in self.bad:
                fd, _ = open_array(self.shards / keys, *array)
                os.close(fd)
        except FileNotFoundError:
            return
        except FormatError as error:
            self.bad[samples] = _Bad(samples, "samples", "unreadable", f"shards/{samples}: {error}")
            return
        bad = self.bad.get(keys)
        if bad is not None and bad.kind == "changed":
            size, expected = _size(self.shards / keys), file_bytes(*array)
            if size != expected:
                kind = "short" if size < expected else "long"
                self.bad[keys] = replace(bad, kind=kind, message=f"shards/{keys}: {size:,} bytes, expected {expected:,}")

    def trace(self) -> None:
        """The problems that bad files make: one for each shard of the newest generation that names the file."""
        named: dict[str, dict[str, Generation | Index]] = {name: {} for name in self.bad}
        shards: dict[str, list[int]] = {}
        for name, index in self.indexes.items():
            for _, file in single_files(index):
                if file in named:
                    named[file][name] = index
        for generation in self.generations:
            for _, shard, file in named_files(generation):
                if file in named:
                    named[file].setdefault(generation.name, generation)
                    if next(iter(named[file].values())) is generation:
                        shards.setdefault(file, []).append(shard)
        for bad in self.bad.values():
            problem = Problem(f"shards/{bad.name}", bad.kind, bad.message, bad.what, tuple(named[bad.name]))
            first = next(iter(named[bad.name].values()), None)
            if isinstance(first, Generation):
                self.problems += [found for shard in shards[bad.name] for found in self._trace_shard(problem, first, shard)]
            elif first is not None and bad.what == "table":
                text = f"{bad.message}; nothing of its generation can be read without it"
                self.problems.append(replace(problem, bad_rows=first.samples, stop=first.samples, message=text))
            else:
                self.problems.append(problem)

    def _trace_shard(self, problem: Problem, generation: Generation, shard: int) -> list[Problem]:
        start, stop = (int(n) for n in generation.starts[shard : shard + 2])
        whole = replace(problem, shard=shard, start=start, stop=stop, bad_rows=stop - start)
        beside = ("samples", "keys") if generation.index.keyed else ("hashes",)
        files = {what: file_name(what, pair_hash(generation.table[what][shard])) for what in beside}
        if problem.what in files:
            return [replace(whole, bad_rows=0, message=f"{problem.message}; shard {shard}, rows {start} to {stop - 1}: {_LOST[problem.what]}")]
        where = f"{problem.message}; shard {shard}"
        if problem.kind in ("missing", "swapped", "unreadable"):
            return [replace(whole, message=f"{where}, all rows from {start} to {stop - 1}")]
        if files[beside[0]] in self.bad:
            return [replace(whole, message=f"{where}, rows from {start} to {stop - 1}; which cannot be told without shards/{files[beside[0]]}")]
        try:
            with ExitStack() as stack:  # a row's hash is over all its fields
                for spec in generation.index.fields:
                    stack.enter_context(self._at_hand(self.shards / file_name(spec.name, pair_hash(generation.table[spec.name][shard]))))
                if generation.index.keyed:
                    return [self._bad_rows(whole, where, generation, shard, files["keys"])]
                return self._bad_blocks(whole, where, generation, shard)
        except (FormatError, MemoryError) as error:
            return [replace(whole, message=f"{where}, rows from {start} to {stop - 1}; which cannot be told ({error})")]

    def _bad_blocks(self, whole: Problem, where: str, generation: Generation, shard: int) -> list[Problem]:
        """A problem for each run of blocks whose hashes do not fit."""
        try:
            groups = Groups(generation.index, *load_groups(self.root, generation.index))
        except FormatError:  # a problem of its own
            groups = Groups(generation.index, ("",), np.array([0, generation.index.samples], np.int64))
        found = []
        for block in damaged_blocks(self.root, generation, shard):
            rows = whole.start + block.start, whole.start + block.stop - 1
            first, last = groups.told(np.array(rows))
            text = f"{where}, among rows {rows[0]} to {rows[1]} ({first} to {last})"
            found.append(replace(whole, start=rows[0], stop=rows[1] + 1, bad_rows=len(block), message=text))
        return found or [replace(whole, bad_rows=0, message=f"{where}, no row of it: the damage lies before or behind the rows")]

    def _bad_rows(self, whole: Problem, where: str, generation: Generation, shard: int, keys_file: str) -> Problem:
        start = whole.start
        local = damaged_rows(self.root, generation, shard)
        listed = local[:ROWS_LISTED].tolist()
        keys = [] if keys_file in self.bad else sources_of(self.root, generation, shard, listed)
        if not len(local):
            return replace(whole, bad_rows=0, message=f"{where}, no row of it: the damage lies before or behind the rows")
        sources = tuple(as_text(key) for key in keys)
        shown = ", ".join(
            f"{start + row}" + (f" ({source})" if source else "") for row, source in zip(listed[:3], [*sources, "", "", ""], strict=False)
        )
        text = f"{where}, {'row' if len(local) == 1 else f'{len(local):,} rows:'} {shown}{', …' if len(local) > 3 else ''}"
        return replace(whole, bad_rows=len(local), rows=tuple(start + row for row in listed), sources=sources, message=text)

    def _problem(self, path: str, kind: str, message: str, what: str, generations: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(path, kind, message, what, generations))


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _look_at_names(names: Names, expected: int | None, root: Path, _: Index) -> None:
    load_names(root, names, expected)
