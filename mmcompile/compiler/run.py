"""Hides how shards get done by workers that may crash, hang or be killed: pieces in flight, culprits named, suspects run again alone.

A worker records the item that it has in hand.  When it dies, or one item takes longer than it may, the rest of its piece goes on at once without the
suspect; when all else is settled, suspects run one at a time with nothing beside them.  Crashing twice (SIGSEGV, SIGABRT, SIGBUS, SIGFPE) is the
file's fault: a reject.  Memory, SIGKILL and time depend on the machine: such a file is reported, never rejected.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.decode import SUGGESTED_SCALING
from mmcompile.compiler.engines import LocalExecutor, how_ended
from mmcompile.compiler.hand import hand_path, read_hand
from mmcompile.compiler.pieces import cut_pieces
from mmcompile.compiler.plan import ShardTask, task_id
from mmcompile.compiler.sealing import Rows, seal_shard
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.task import COPIED, FAILED, REJECTED, STORED, Job, Piece, PieceResult, reject_line, run_piece
from mmcompile.errors import EngineError
from mmcompile.format.canonical import as_text
from mmcompile.format.npy import hash_bytes
from mmcompile.format.samples import hash_pair, sample_dtype

__all__ = ["CRASHES", "Counts", "Runner", "ShardWork"]

#: Seconds between two looks at what workers have in hand.
_LOOK_S = 0.5
#: Signals that say a decoder ran into its own bug.
CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE})
#: Workers that die before they take an item in hand, or a seal that fails, so often in a row are no accident.
_LOST_IN_A_ROW = 8
#: Workers that end by themselves so often before anything was decoded say that all of them will.
_EXITS = 16
#: Seconds in which a worker must have started and taken an item in hand, beside what one item may take.
_START_S = 60.0
#: A disk slower than this, while a shard is sealed, is taken for one that hangs.
_SEAL_BYTES_PER_S = 1e6
#: ... and a store that takes so many times as long: each of its requests may be made again for half a minute.
_STORE_TIMES = 10


@dataclass
class Counts:
    """How items ended so far; `told`: what a step of the user's own first raised."""

    decoded: int = 0
    copied: int = 0
    rejects: int = 0
    failures: int = 0
    told: str = ""
    decode_s: float = 0.0
    saving_s: float = 0.0

    @property
    def done(self) -> int:
        return self.decoded + self.copied + self.rejects + self.failures

    def notes(self) -> tuple[str, ...]:
        """A line where decoding large JPEGs smaller would have made this build more than twice as fast."""
        rest_s = self.decode_s - self.saving_s
        if self.saving_s <= rest_s:
            return ()
        return (
            f"most of the time went into JPEGs far larger than what is kept of them: --jpeg-scaling {SUGGESTED_SCALING:g} would decode them at "
            f"1/2, 1/4 or 1/8 and be about {self.decode_s / rest_s:.1f} times as fast, at the price of pixels that differ by a few levels",
        )

    def plus(self, more: Counts) -> Counts:
        """Both together."""
        both = Counts(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(Counts)))
        return replace(both, told=self.told or more.told)


@dataclass
class ShardWork:
    """A shard that has to be made: its items, and what is known of each so far; `copies` (N,) are those that will not be read.

    `values` (N,) are those of the scan, `moved` what is stored of them; `faults` are items with a wrong value, by position.
    """

    task: ShardTask
    keys: Sequence[bytes]
    values: npt.NDArray[np.void]
    stat: npt.NDArray[Any]
    hashes: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]
    seal: Seal
    outcome: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    records: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    rejects: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: int = 0
    suspects: int = 0
    cut: bool = False
    copies: npt.NDArray[np.bool_] | None = None
    moved: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, []))
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.task.number

    @property
    def items(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        """Bytes of the sources."""
        return int(self.stat["size"].clip(0).sum())

    @property
    def first(self) -> str:
        """What it begins with, for people."""
        return as_text(self.keys[0])


@dataclass
class _Suspect:
    work: ShardWork
    position: int
    crashes: int = 0
    others: int = 0
    reason: str = ""


@dataclass
class _Watch:
    """What is known of a piece in flight."""

    work: ShardWork
    piece: Piece
    suspect: _Suspect | None = None
    hand: tuple[int, float, int] | None = None
    since: float = 0.0
    timed_out: bool = False


class Runner:
    """Runs shards on an executor; `on_sealed(work, seal)` is called in the caller's thread as each becomes durable."""

    def __init__(
        self,
        executor: Executor,
        job: Job,
        on_sealed: Callable[[ShardWork, Seal], None],
        on_progress: Callable[[Counts], None],
        workers: int,
    ) -> None:
        self._executor, self._job = executor, job
        self._on_sealed, self._on_progress = on_sealed, on_progress
        self._workers, self._ahead = workers, 2 * workers + 1
        self._serial = 0
        self._lost = self._exits = 0
        self._begun: dict[Future[Any], float] = {}
        self._looked = 0.0
        self._watched: dict[Future[Any], _Watch] = {}
        self._sealing: dict[Future[Any], tuple[ShardWork, int]] = {}
        self._suspects: list[_Suspect] = []
        self._seals = job.shards.parent / ".build" / "seals"
        self.counts = Counts()
        self.failures: list[tuple[bytes, str]] = []

    def run(self, works: Iterable[ShardWork]) -> None:
        """Settle and seal all shards.  Items that could be neither stored nor rejected are in `failures`: (key, reason)."""
        feed = self._pieces(works)
        exhausted = False
        while True:
            while not exhausted and len(self._watched) < self._ahead:
                step = next(feed, None)
                if step is None:
                    exhausted = True
                else:
                    self._submit(*step)
            if not self._watched and not self._sealing:
                break
            self._turn()
        for suspect in self._suspects:
            self._alone(suspect)
        while self._sealing:
            self._turn()

    def _pieces(self, works: Iterable[ShardWork]) -> Iterator[tuple[ShardWork, list[int]]]:
        for work in works:
            n = len(work.keys)
            work.outcome, work.records = np.zeros(n, np.uint8), np.zeros(n, sample_dtype(self._job.fields, self._job.trace.sha256))
            work.moved = work.values if self._job.mover is None else np.zeros(n, self._job.mover.dtype)
            sizes = work.stat["size"] if work.copies is None else np.where(work.copies, 0, work.stat["size"])
            for part in cut_pieces(sizes, self._workers):
                yield work, part
            work.cut = True
            self._finish(work)

    def _submit(self, work: ShardWork, positions: list[int], suspect: _Suspect | None = None) -> None:
        self._serial += 1
        piece = Piece(
            work.task.id,
            self._serial,
            tuple(positions),
            tuple(work.keys[i] for i in positions),
            work.values[positions],
            work.hashes[positions],
            work.known[positions],
            tuple(work.stat[i].item() for i in positions),
            {at: work.faults[i] for at, i in enumerate(positions) if i in work.faults} if work.faults else {},
        )
        future = self._executor.submit(run_piece, self._job, piece)
        work.waiting += 1
        self._watched[future] = _Watch(work, piece, suspect)

    def _turn(self) -> None:
        done, _ = wait([*self._watched, *self._sealing], timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            if future in self._sealing:
                self._sealed(future)
            else:
                self._settled(future)
        self._look()
        self._on_progress(self.counts)

    def _settled(self, future: Future[Any]) -> None:
        watch = self._watched.pop(future)
        self._begun.pop(future, None)
        work = watch.work
        work.waiting -= 1
        try:
            result: PieceResult = future.result()
        except EngineError as error:
            if "exitcode" not in error.details:
                raise
            self._died(watch, int(error.details["exitcode"]), str(error.details.get("said", "")))
        else:
            self._lost = 0
            self._merge(watch, result)
        self._finish(work)

    def _merge(self, watch: _Watch, result: PieceResult) -> None:
        work, positions = watch.work, np.array(watch.piece.positions)
        work.outcome[positions] = result.outcome
        work.records[positions] = result.records
        if result.moved is not None:
            work.moved[positions] = result.moved
        work.hashes[positions[result.hashed]] = result.hashes[result.hashed]
        work.known[positions[result.hashed & ~result.changed]] = True
        work.seal.stat[positions[result.changed]] = (-1, -1, -1, -1)
        for i, line in result.rejects.items():
            work.rejects[int(positions[i])] = line
        self.counts.decoded += int((result.outcome == STORED).sum())
        self.counts.told = self.counts.told or result.told
        self.counts.decode_s += result.decode_s
        self.counts.saving_s += result.saving_s
        self.counts.copied += int((result.outcome == COPIED).sum())
        self.counts.rejects += int((result.outcome == REJECTED).sum())
        for i, reason in result.failures.items():
            position = int(positions[i])
            if watch.suspect is None:
                self._suspect(_Suspect(work, position, others=1, reason=reason))
            else:
                watch.suspect.others, watch.suspect.reason = watch.suspect.others + 1, reason

    def _suspect(self, suspect: _Suspect) -> None:
        suspect.work.suspects += 1
        self._suspects.append(suspect)

    def _died(self, watch: _Watch, code: int, said: str) -> None:
        """A worker is gone: take the item that it had in hand out of the piece, and let the rest go on."""
        path = hand_path(self._job.scratch, watch.piece.serial)
        hand = read_hand(path)
        path.unlink(missing_ok=True)
        reason = "took longer than it may" if watch.timed_out else f"its worker {how_ended(code)}" + (f": {said}" if said else "")
        self._exits += code > 0
        if self._exits >= _EXITS and not self.counts.done:
            raise EngineError(f"workers end on every image ({reason}); nothing was decoded: mend the installation, and run the same command again")
        if hand is None:
            self._lost += 1
            if self._lost >= _LOST_IN_A_ROW:
                raise EngineError(f"workers end before they begin ({reason}); check the installation with `python -c 'import mmcompile, torch, PIL'`")
            self._submit(watch.work, list(watch.piece.positions), watch.suspect)
            return
        position = watch.piece.positions[hand[0]]
        suspect = watch.suspect
        if suspect is None:
            suspect = _Suspect(watch.work, position)
            self._suspect(suspect)
            rest = [p for p in watch.piece.positions if p != position]
            if rest:
                self._submit(watch.work, rest)
        if code in CRASHES and not watch.timed_out:
            suspect.crashes += 1
        else:
            suspect.others += 1
        suspect.reason = reason

    def _alone(self, suspect: _Suspect) -> None:
        """Run one item with nothing beside it until it is settled: at most twice more."""
        work, at = suspect.work, suspect.position
        while self._sealing:
            self._turn()
        while work.outcome[at] in (0, FAILED) and suspect.crashes < 2 and suspect.others < 2:
            self._submit(work, [at], suspect)
            while self._watched:
                self._turn()
        work.suspects -= 1
        if work.outcome[at] in (0, FAILED):
            if suspect.crashes >= 2:
                self._reject_crash(work, at)
            else:
                self._give_up(work, at, suspect.reason)
        self._finish(work)

    def _give_up(self, work: ShardWork, at: int, reason: str) -> None:
        work.outcome[at] = FAILED
        self.failures.append((work.keys[at], reason))
        self.counts.failures += 1

    def _reject_crash(self, work: ShardWork, at: int) -> None:
        key = work.keys[at]
        try:
            data = self._job.source.read(key)
        except OSError as error:
            self._give_up(work, at, error.strerror or "cannot be read")
            return
        digest = hash_bytes(data)
        message = "the decoder crashed on this file, twice; decode it elsewhere and save it anew, or leave it out"
        work.rejects[at] = reject_line(self._job.trace.key(key), len(data), digest, message, {"stage": "load", "code": "decoder-crash"})
        work.outcome[at] = REJECTED
        work.hashes[at], work.known[at] = hash_pair(digest), True
        self.counts.rejects += 1

    def _finish(self, work: ShardWork, tries: int = 1) -> None:
        """Seal a shard when all its items are settled; one with failures as the shard that it is without them."""
        if work.waiting or work.suspects or not work.cut:
            return
        keep = np.flatnonzero(work.outcome != FAILED)
        if not len(keep):
            return
        place = {int(p): i for i, p in enumerate(keep)}
        seal = replace(
            work.seal,
            stat=work.seal.stat[keep],
            hashes=work.hashes[keep],
            values=work.values[keep],
            rejects={place[p]: line for p, line in sorted(work.rejects.items())},
        )
        if len(keep) < len(work.keys):
            faults = {place[at]: said for at, said in work.faults.items() if at in place}
            seal = replace(seal, task=task_id([work.keys[i] for i in keep.tolist()], seal.values, seal.pixel, seal.store, faults))
        positions = np.flatnonzero((work.outcome == STORED) | (work.outcome == COPIED))
        rows = Rows(
            work.task.id,
            positions,
            work.records[positions],
            [work.keys[i] for i in positions.tolist()],
            work.moved[positions],
        )
        self._sealing[self._executor.submit(seal_shard, self._job, seal, rows, self._seals)] = (work, tries)

    def _sealed(self, future: Future[Any]) -> None:
        work, tries = self._sealing.pop(future)
        self._begun.pop(future, None)
        try:
            seal: Seal = future.result()
        except EngineError as error:
            if "exitcode" not in error.details or tries >= _LOST_IN_A_ROW:
                raise
            self._finish(work, tries + 1)
            return
        work.records = work.records[:0]
        self._on_sealed(work, seal)

    def _look(self) -> None:
        """Kill a worker whose item takes longer than it may."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for future, (work, _) in self._sealing.items():
            limit_s = _START_S + len(work.keys) * self._job.row_bytes / _SEAL_BYTES_PER_S
            limit_s *= _STORE_TIMES if self._job.store is not None else 1
            if future.running() and now - self._begun.setdefault(future, now) > limit_s:
                self._kill(future)
        for future, watch in self._watched.items():
            hand = read_hand(hand_path(self._job.scratch, watch.piece.serial))
            if hand != watch.hand:
                watch.hand, watch.since = hand, now
            elif hand is None:
                if future.running() and now - self._begun.setdefault(future, now) > _START_S + self._job.timeout_s:
                    self._kill(future)
            elif now - watch.since > hand[1] and not watch.timed_out:
                watch.timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hand[2], signal.SIGKILL)

    def _kill(self, future: Future[Any]) -> None:
        """End a worker that neither begins nor ends; the call is made again."""
        if isinstance(self._executor, LocalExecutor):
            self._executor.kill_call(future)
