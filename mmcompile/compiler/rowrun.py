"""Hides how shards of rows get done: who reads the source, pieces in flight, workers that die or hang, and what cannot be read.

A source that can be sent to worker processes is read by them, each from a copy of its own; any other by this process alone.  A piece whose worker
died, took too long, or could not read now is tried again; what still fails is named when all else is finished and sealed.
"""

from __future__ import annotations

import errno
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.engines import LocalExecutor, how_ended
from mmcompile.compiler.rowstore import merge_sums
from mmcompile.compiler.rowtask import RowJob, RowPiece, RowResult, RowSeal, load_source, run_rows, seal_rows
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.errors import EngineError, MMCompileError, SourceError

__all__ = ["Here", "RowRunner", "Shard", "can_load", "start_readers", "unread", "write_source"]

#: A pickled source of more bytes than this holds its data: each worker would have a copy.  One that gives ranges of them is read in this process, as
#: that is no more than a copy; one that makes item by item is worth several copies.
_PICKLE_BYTES, _ITEMS_BYTES = 64 << 20, 512 << 20
#: Seconds between two looks at calls that take long.
_LOOK_S = 0.5
#: How often a piece is tried.
_TRIES = 3
#: Seconds that one row may take beyond what a piece may, and a disk slower than this while a shard is sealed is taken for one that hangs.
_ROW_S, _SEAL_BYTES_PER_S = 0.01, 1e6
_START_S = 60.0
#: Failures that an error names.
_NAMED = 5


class Here(Executor):
    """Runs every call at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def kill(self) -> None:
        """Nothing is left behind."""


class _HoldsData(Exception):
    """A pickle is longer than what is sent to workers."""


class _Limited:
    """A file that takes no more than `limit` bytes."""

    def __init__(self, path: Path, limit: int) -> None:
        self._file, self._left = path.open("wb"), limit

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise _HoldsData
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


def write_source(source: RowSource, scratch: Path) -> tuple[Path | None, str, bool]:
    """(the file that a source's pickle lies in, None where none is made; why; would nobody have expected else?)."""
    path, items = scratch / "source.pickle", getattr(source, "item_by_item", False)
    limit = _ITEMS_BYTES if items else _PICKLE_BYTES
    try:
        file = _Limited(path, limit)
        try:
            pickle.dump(source, file, pickle.HIGHEST_PROTOCOL)
        finally:
            file.close()
    except _HoldsData:
        path.unlink()
        return None, f"it holds more than {limit >> 20} MiB of data", not items
    except OSError:
        raise
    except Exception as error:  # whatever a stranger's class raises when it is pickled
        return None, _line(error), False
    return path, "", False


def start_readers(source: RowSource, scratch: Path, workers: int) -> tuple[LocalExecutor | Here, RowSource | Path, str]:
    """(who reads, what they are given, why it is this process alone: "" where it is not, or where nobody would have expected else)."""
    path, why, expected = write_source(source, scratch)
    if path is None:
        return Here(), source, "" if expected else why
    executor = LocalExecutor(workers)
    try:
        executor.submit(can_load, path).result()
    except MMCompileError as error:
        executor.kill()
        return Here(), source, _line(error)
    except BaseException:
        executor.kill()
        raise
    return executor, path, ""


def can_load(path: Path) -> None:
    """Raises EngineError, saying why, where a worker cannot load the source."""
    try:
        load_source(path)
    except Exception as error:
        raise EngineError(_line(error)) from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


@dataclass
class Shard:
    """A shard that has to be made, and what is known of it so far."""

    task: Any
    seal: RowSeal
    results: list[RowResult | None]
    waiting: int = 0
    cut: bool = False
    failed: bool = False


@dataclass
class _Call:
    """A call in flight: a piece of a shard, or its sealing (no piece)."""

    shard: Shard
    at: int
    piece: RowPiece | None
    tries: int
    limit_s: float
    since: float | None = None


def unread(failures: list[str]) -> SourceError:
    """The error where all has been done but these rows."""
    more = f" and {len(failures) - _NAMED:,} more" if len(failures) > _NAMED else ""
    return SourceError(
        f"{'; '.join(failures[:_NAMED])}{more}; all else is finished and kept, nothing is published: run the same command again when that is mended",
        failures=failures,
    )


class RowRunner:
    """Runs shards on an executor; `on_progress` gets the rows that are done."""

    def __init__(self, executor: Executor, job: RowJob, workers: int, timeout_s: float, on_progress: Callable[[int], None]) -> None:
        self._executor, self._job, self._timeout_s, self._on_progress = executor, job, timeout_s, on_progress
        self._ahead = 1 if isinstance(executor, Here) else 2 * workers + 1
        self._calls: dict[Future[Any], _Call] = {}
        self._faults: list[tuple[int, MMCompileError]] = []
        self._failures: list[str] = []
        self._done = 0
        block = job.block
        self._rows, self._blocks = block * job.blocks, block

    def run(self, tasks: Iterable[tuple[Any, RowSeal]]) -> Iterator[tuple[Any, RowSeal]]:
        """Make and seal all shards, each given as soon as it is durable.

        Raises SourceError for what a source cannot give (of several the first), or for what could not be read even when tried again; then all else is
        sealed.  OSError and EngineError as they come.
        """
        feed = self._pieces(tasks)
        while True:
            while not self._faults and len(self._calls) < self._ahead:
                step = next(feed, None)
                if step is None:
                    break
                self._submit(*step)
            if not self._calls:
                break
            finished, _ = wait(self._calls, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in finished:
                sealed = self._settle(future)
                if sealed is not None:
                    yield sealed
            self._look()
            self._on_progress(self._done)
        if self._faults:
            raise min(self._faults, key=lambda fault: fault[0])[1]
        if self._failures:
            raise unread(self._failures)

    def _pieces(self, tasks: Iterable[tuple[Any, RowSeal]]) -> Iterator[tuple[Shard, int, RowPiece]]:
        for task, seal in tasks:
            starts = range(task.start, task.stop, self._rows)
            shard = Shard(task, seal, [None] * len(starts))
            for at, start in enumerate(starts):
                shard.waiting += 1
                shard.cut = at == len(starts) - 1
                yield shard, at, RowPiece(str(task.number), start, min(start + self._rows, task.stop), start - task.start)

    def _submit(self, shard: Shard, at: int, piece: RowPiece | None, tries: int = 1) -> None:
        future: Future[Any]
        if piece is not None:
            rows = piece.stop - piece.start
            limit_s = self._timeout_s * -(-rows // self._blocks) + _ROW_S * rows
            future = self._executor.submit(run_rows, self._job, piece)
        else:
            hashes = np.concatenate([r.hashes for r in shard.results if r is not None])
            limit_s = _START_S + shard.seal.rows * self._job.row_bytes / _SEAL_BYTES_PER_S
            future = self._executor.submit(seal_rows, self._job, str(shard.task.number), shard.seal, hashes)
        self._calls[future] = _Call(shard, at, piece, tries, limit_s)

    def _settle(self, future: Future[Any]) -> tuple[Any, RowSeal] | None:
        call = self._calls.pop(future)
        shard, piece = call.shard, call.piece
        try:
            found = future.result()
        except EngineError as error:
            if "exitcode" not in error.details:
                raise
            code = int(error.details["exitcode"])
            self._again(call, f"a worker {how_ended(code)}")
            return None
        except MMCompileError as error:
            self._faults.append((shard.task.start if piece is None else piece.start, error))
            return None
        except MemoryError:
            self._again(call, "memory ran out")
            return None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or piece is None:
                raise
            self._again(call, error.strerror or str(error))
            return None
        if piece is None:
            return shard.task, found
        shard.results[call.at] = found
        shard.waiting -= 1
        self._done += piece.stop - piece.start
        self._seal(shard)
        return None

    def _again(self, call: _Call, reason: str) -> None:
        shard, piece = call.shard, call.piece
        if call.tries < _TRIES:
            self._submit(shard, call.at, piece, call.tries + 1)
        elif piece is None:
            raise EngineError(f"a shard could not be sealed: {reason}; everything finished is kept: run the same command again")
        else:
            shard.failed = True
            shard.waiting -= 1
            self._failures.append(f"rows {piece.start:,} to {piece.stop:,} cannot be read: {reason}")

    def _seal(self, shard: Shard) -> None:
        """Seal a shard all of whose pieces are written."""
        if shard.waiting or not shard.cut or shard.failed or self._faults:
            return
        results = [r for r in shard.results if r is not None]
        counts: Counter[str] = Counter()
        for result in results:
            counts.update(result.counts)
        sums = {name: merge_sums([r.sums[name] for r in results]) for name in results[0].sums}
        shard.seal = replace(shard.seal, sums=sums, counts=dict(counts))
        self._submit(shard, 0, None)

    def _look(self) -> None:
        """End workers whose call takes longer than it may; it is made again."""
        now = time.monotonic()
        for future, call in self._calls.items():
            if call.since is None and future.running():
                call.since = now
            if call.since is not None and now - call.since > call.limit_s and isinstance(self._executor, LocalExecutor):
                call.since = now
                self._executor.kill_call(future)
