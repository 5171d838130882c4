"""Hides how shards get done by workers on other machines, over any `concurrent.futures.Executor`: which calls are out, and which were lost.

A call builds and seals one shard, and what it finds wrong comes back as its result.  So an exception of a future is the engine's own: the worker
died, its machine went away.  Such a call is made again, elsewhere, and so is one that gave the result of another; one that takes too long gets a
second one beside it, and the first to end counts.
An engine that takes no more calls ends the run; all that was sealed is found by the next one, whatever its engine.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mmcompile.compiler.away import share, unshare
from mmcompile.compiler.engines import run_pickled
from mmcompile.compiler.run import Counts
from mmcompile.compiler.shardcall import shard_folder
from mmcompile.errors import EngineError, RemoteError
from mmcompile.format.cpus import usable_cpus

__all__ = ["Cluster", "Done", "Job", "Work"]

#: Calls for one shard that may be lost.  An engine has often tried again by itself before it says so.
_TRIES = 4
#: Seconds between two looks at calls that take long, and at the number of workers.
_LOOK_S = 0.5
#: What a call may take before a second one is made beside it: seconds to begin, for each item, and bytes of sources a second.  A worker ends items
#: that hang by itself, so this is for one that is gone without a word.  A further one is made after four times as long.
_BEGIN_S, _ITEM_S, _BYTES_PER_S, _GROWTH = 300.0, 0.5, 1e6, 4
#: When nothing else is left to do, what takes so many times as long as the slowest call so far, and at least so many seconds, is done twice.
_SLOW, _SLOW_S = 3.0, 30.0
#: Seconds without any worker after which that is said, and after which waiting ends.
_TELL_S = 5.0
_NO_WORKERS_S = 600.0


class Job(Protocol):
    """What all calls of a run share."""

    @property
    def source(self) -> Any: ...

    @property
    def scratch(self) -> Path: ...

    @property
    def store(self) -> Any: ...

    @property
    def timeout_s(self) -> float: ...


class Work(Protocol):
    """A shard that has to be made: of so many `items`, whose sources have `size` bytes; `first` is what it begins with, for people."""

    @property
    def number(self) -> int: ...

    @property
    def items(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def first(self) -> str: ...


@runtime_checkable
class Done(Protocol):
    """What came of a shard: its seal (None where none of it could be made), counts, and what could not be settled: (key, reason)."""

    counts: Counts
    failures: list[tuple[bytes, str]]

    @property
    def seal(self) -> Any: ...

    def is_of(self, work: Any) -> bool:
        """Is this what came of that shard, and not of another one?"""

    def tell(self, work: Any) -> None:
        """Note what is known of the shard's sources now."""


@dataclass
class _Shard:
    """A shard and the calls that are out for it, each with the time when it was made."""

    work: Work
    calls: dict[Future[bytes], float] = field(default_factory=dict)
    lost: int = 0
    said: str = ""
    look: bool = True

    def limit_s(self, timeout_s: float) -> float:
        """Seconds after the newest call at which a further one is made."""
        first = _BEGIN_S + 2 * timeout_s + _ITEM_S * self.work.items + self.work.size / _BYTES_PER_S
        return first * float(_GROWTH ** (len(self.calls) - 1))


class Cluster:
    """Runs shards on an engine, with the surface of a `Runner`: `on_sealed(work, seal)` is called in the caller's thread as each becomes durable,
    `on_progress(counts)` now and then, with a message behind it where there is something to say.  `build(job, work, look)` is what a call does; with
    `look` it may raise an EngineError whose `details["unreached"]` are keys of files that cannot be seen from there.

    There are as many calls out as the engine has workers at the moment (`executor.workers` where it says so), and at most `workers`.
    """

    def __init__(
        self,
        executor: Executor,
        build: Callable[[Any, Any, bool], Done],
        job: Job,
        on_sealed: Callable[[Any, Any], None],
        on_progress: Callable[..., None],
        workers: int | None = None,
    ) -> None:
        self._executor, self._build, self._job, self._most = executor, build, job, workers
        self._on_sealed, self._on_progress = on_sealed, on_progress
        self._calls: dict[Future[bytes], _Shard] = {}
        self._again: list[_Shard] = []
        self._given_up: list[_Shard] = []
        self._slowest_s = 0.0
        self._came, self._all_lost = False, 0
        self._had_workers, self._told = time.monotonic(), False
        self.counts = Counts()
        self.failures: list[tuple[bytes, str]] = []

    def run(self, works: Iterable[Work]) -> None:
        """Settle and seal all shards.  Items that could be neither stored nor rejected are in `failures`: (key, reason).

        Raises EngineError where the engine or one of its machines cannot go on; what is sealed stays so.
        """
        feed, store = iter(works), self._job.store
        try:
            if store is not None:
                share(self._job)  # type: ignore[arg-type]
            while self._fill(feed):
                self._turn()
        finally:
            for future in self._calls:
                future.cancel()
            if store is not None:
                with contextlib.suppress(RemoteError):  # the next run does it
                    unshare(store)
        if self._given_up:
            raise self._lost_error(self._given_up)

    @property
    def workers(self) -> int:
        """Shards that are built at once."""
        return max(1, _slots(self._executor, self._most))

    # ------------------------------------------------------------------ calls

    def _fill(self, feed: Iterator[Work]) -> bool:
        """Keep every worker busy; False when nothing is out and nothing is left."""
        room = self._room()
        while room > 0:
            shard = next((_Shard(work) for work in feed), None) or (self._again.pop(0) if self._again else None)
            if shard is None:
                self._help_slow()
                break
            self._call(shard)
            room -= 1
        return bool(self._calls)

    def _room(self) -> int:
        """Shards that may be begun now.  One with two calls counts once: the worker of the first is as good as gone."""
        slots = _slots(self._executor, self._most)
        now = time.monotonic()
        if slots:
            self._had_workers, self._told = now, False
        elif not self._told and now - self._had_workers > _TELL_S:
            self._told = True
            self._on_progress(self.counts, f"the engine has no workers; waiting for some, at most {_NO_WORKERS_S:.0f} s")
        elif now - self._had_workers > _NO_WORKERS_S:
            raise EngineError(f"the engine has had no worker for {_NO_WORKERS_S:.0f} s; start some, then run the same command again")
        return max(slots, 1) - len({id(shard) for shard in self._calls.values()})

    def _call(self, shard: _Shard) -> None:
        shard_folder(self._job, shard.work.number).mkdir(exist_ok=True)
        data = pickle.dumps((self._build, (self._job, shard.work, shard.look), {}), pickle.HIGHEST_PROTOCOL)
        try:
            future = self._executor.submit(run_pickled, data)
        except Exception as error:  # BrokenExecutor; RuntimeError after a shutdown; whatever somebody else's engine has
            raise EngineError(
                f"the engine is gone ({_said(error)}); the same command goes on when it is back, also with another engine", said=_said(error)
            ) from error
        if future in self._calls:
            raise EngineError(f"the engine ({type(self._executor).__name__}) gave one Future for two calls; each submit must return a new one")
        self._calls[future] = shard
        shard.calls[future] = time.monotonic()

    def _turn(self) -> None:
        done, _ = wait(self._calls, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        done |= {future for future in self._calls if future.cancelled()}  # not done for wait() until the engine has taken note
        for future in done:
            shard = self._calls.pop(future, None)
            if shard is None:  # another call for it was faster
                continue
            began = shard.calls.pop(future)
            try:
                ok, value = pickle.loads(future.result())
            except Exception as error:
                self._lost(shard, _said(error))
                continue
            if ok and not (isinstance(value, Done) and value.is_of(shard.work)):
                self._lost(shard, "it gave the result of another call")
                continue
            self._came = True
            if ok:
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
                self._settle(shard, value)
            else:
                self._refused(shard, value)
        self._look()
        self._on_progress(self.counts)

    def _settle(self, shard: _Shard, found: Done) -> None:
        work = shard.work
        shutil.rmtree(shard_folder(self._job, work.number), ignore_errors=True)  # ends other calls for it, and clears what lost ones left
        self._forget(shard)
        found.tell(work)
        self.failures += found.failures
        self.counts = self.counts.plus(found.counts)
        if found.seal is not None:
            self._on_sealed(work, found.seal)

    def _forget(self, shard: _Shard) -> None:
        """Wait no longer for calls."""
        for future in shard.calls:
            future.cancel()
            self._calls.pop(future, None)
        shard.calls.clear()

    def _refused(self, shard: _Shard, error: Exception) -> None:
        """A worker says what is wrong.  Files that cannot be seen here either are no fault of that machine: then as in a local build."""
        unreached = error.details.get("unreached") if isinstance(error, EngineError) else None
        if not unreached or any(self._reached(key) for key in unreached):
            raise error
        shard.look = False
        self._again.append(shard)

    def _reached(self, key: bytes) -> bool:
        try:
            self._job.source.stat(key)
        except OSError:
            return False
        return True

    # ------------------------------------------------------------------ lost and slow calls

    def _lost(self, shard: _Shard, said: str) -> None:
        shard.lost, shard.said, self._all_lost = shard.lost + 1, said, self._all_lost + 1
        if not self._came and self._all_lost >= _TRIES * self.workers:
            raise EngineError(f"the engine lost all of its first {self._all_lost} calls ({said}): see what its workers say", said=said)
        if shard.calls:
            return
        if shard.lost < _TRIES:
            self._again.append(shard)  # after the others
        else:
            self._given_up.append(shard)

    def _lost_error(self, shards: list[_Shard]) -> EngineError:
        first, more = shards[0], f" and {len(shards) - 1:,} more" if len(shards) > 1 else ""
        key = first.work.first
        return EngineError(
            f"the engine lost the shard that begins with {key!r}{more} {_TRIES} times ({first.said}); all that is finished is kept: see what its "
            "workers say, then run the same command again, or without an engine",
            key=key,
            said=first.said,
        )

    def _look(self) -> None:
        """Make a further call beside those that take too long."""
        now = time.monotonic()
        for shard in {id(s): s for s in self._calls.values()}.values():
            if now - max(shard.calls.values()) <= shard.limit_s(self._job.timeout_s):
                continue
            if len(shard.calls) + shard.lost < _TRIES:
                self._call(shard)
                continue
            self._forget(shard)
            shard.lost = _TRIES - 1
            self._lost(shard, "no word from its workers")

    def _help_slow(self) -> None:
        """Workers without work do again what takes long elsewhere."""
        room = max(0, self.workers - len(self._calls))
        now, limit_s = time.monotonic(), max(_SLOW_S, _SLOW * self._slowest_s)
        slow = [s for s in self._calls.values() if len(s.calls) == 1 and not s.lost and now - max(s.calls.values()) > limit_s]
        for shard in sorted(slow, key=lambda s: max(s.calls.values()))[:room]:
            self._call(shard)


def _slots(executor: Executor, most: int | None) -> int:
    """Calls that an executor runs at once: as it says itself, else as the caller says, else one for each processor here."""
    for name in ("workers", "_max_workers", "num_workers"):  # ours; those of the standard library; mpi4py
        found = getattr(executor, name, None)
        if isinstance(found, int):
            return found if most is None else min(found, most)
    return usable_cpus() if most is None else most


def _said(error: BaseException) -> str:
    """An exception of somebody else's in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__
