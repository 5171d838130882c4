"""Hides the threads that work ahead of a loop: jobs in, results out in the same order, at most so many of them unfinished or unclaimed.

Threads hold no reference to the `Ahead` that its user holds, so that dropping it (break, an exception, del) is what ends them.  A result that is an
exception is raised, as it is, where its turn comes.  Nothing is left behind: threads have ended when `close` returns, unless one hangs in the kernel.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Ahead", "Stage"]

#: Jobs known, and looked at, beyond those that may be made: a disk that was told of one batch only stands idle until it is told of the next, and a
#: thread that is done has the next job at hand.
_KNOWN = 2
#: Jobs looked at before the first is made, then one before each: all at once would let the first batch wait until the disk has read the last.
_FIRST_LOOK = 2
Job = TypeVar("Job")
Result = TypeVar("Result")

#: Seconds that `close` waits for a thread.  A job takes milliseconds; one that hangs in a read of a dead server must not hang the loop that was left.
_PATIENCE_S = 5.0


class Stage:
    """What a thread is doing, for the message of a wait that took too long."""

    text = ""


class Ahead(Generic[Job, Result]):
    """Runs `make(job, stage)` for each job in `threads` threads, `ahead` jobs ahead of the one claimed; with 0 threads at the moment of `take`.

    `jobs` is advanced by the thread that calls `take`.  `look` (optional) is called by a thread, before a job, with the next that it was not called
    with, up to two beyond those that may be made: a chance to have the disk read what will be wanted.
    """

    def __init__(
        self,
        make: Callable[[Job, Stage], Result],
        jobs: Iterator[Job],
        *,
        threads: int,
        ahead: int,
        look: Callable[[Sequence[Job]], None] | None = None,
    ) -> None:
        self._make, self._jobs = make, jobs
        self._pid = os.getpid()
        self._asked = self._claimed = 0
        self._ended = False
        self._shared = shared = _Shared(make, look)
        self._ahead = max(1, ahead) if threads else 0
        self._known = _KNOWN if threads else 0
        shared.limit = self._ahead
        # Runs at the exit of the interpreter too: a thread inside numpy or torch while their libraries are torn down can crash the process.
        self._finalizer = weakref.finalize(self, _dropped, shared, self._pid)
        if threads:
            try:
                for i in range(threads):
                    thread = threading.Thread(target=_work, args=(shared,), name=f"mmcompile-{i}", daemon=True)
                    thread.start()
                    shared.threads.append(thread)
                self._fill()
            except BaseException as error:
                self.close()
                if isinstance(error, RuntimeError) and len(shared.threads) < threads:  # a process may start only so many
                    raise RuntimeError(f"{len(shared.threads)} of {threads} threads could be started ({error}); ask for fewer workers") from None
                raise

    def take(self, timeout_s: float = 0.0) -> Result:
        """The next result.  Raises StopIteration after the last, what the job raised, or TimeoutError after `timeout_s` seconds (0: never)."""
        if os.getpid() != self._pid:
            raise RuntimeError("this iteration was begun in another process, whose threads were not forked with it; begin a new one here")
        if not self._shared.threads:
            found = _attempt(self._make, self._next_job(), Stage())
        elif self._claimed == self._asked:
            self.close()
            raise StopIteration
        else:
            self._fill()  # while the threads are busy, not when one of them has just come back to Python and wants it
            found = self._wait(timeout_s)
        if isinstance(found, _Failure):
            self.close()
            try:
                raise found.error
            finally:
                del found  # or the traceback holds what holds the traceback
        result: Result = found
        return result

    def close(self) -> None:
        """End the threads and drop what they made."""
        self._ended = True
        self._finalizer.detach()
        _stop(self._shared, self._pid)

    def _next_job(self) -> Job:
        if self._ended:
            raise StopIteration
        try:
            return next(self._jobs)
        except BaseException:
            self._ended = True
            raise

    def _fill(self) -> None:
        while self._asked - self._claimed < self._ahead + self._known and not self._ended:
            try:
                job = self._next_job()
            except StopIteration:
                break
            except Exception as error:
                self._shared.put(self._asked, _Failure(_without_us(error)))  # its turn comes after what was asked for before
            else:
                self._shared.ask(self._asked, job)
            self._asked += 1

    def _wait(self, timeout_s: float) -> Any:
        shared, number = self._shared, self._claimed
        limit = time.monotonic() + timeout_s if timeout_s > 0 else None
        with shared.changed:
            while number not in shared.done:
                if shared.stopped:
                    raise RuntimeError("this iteration was closed")
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"no batch within {timeout_s:g} s; {shared.waiting_for(number)}")
                shared.changed.wait(left)
            self._claimed += 1
            shared.limit = self._claimed + self._ahead
            shared.changed.notify_all()
            return shared.done.pop(number)


def _without_us(error: Exception) -> Exception:
    """An error whose traceback begins outside this module: our own frames would have the threads hold the front, which then never goes."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        if isinstance(error, StopIteration):  # would end the loop as if the data had ended
            self.error = RuntimeError("a batch raised StopIteration")
            self.error.__cause__ = error


def _attempt(make: Callable[[Any, Stage], Any], job: Any, stage: Stage) -> Any:
    try:
        return make(job, stage)
    except BaseException as error:
        return _Failure(error)


class _Shared:
    """What the threads and the front both hold."""

    def __init__(self, make: Callable[[Any, Stage], Any], look: Callable[[Sequence[Any]], None] | None) -> None:
        self.make, self.look = make, look
        # Reentrant, as the collector may run `_stop` in a thread that is inside.
        self.changed = threading.Condition(threading.RLock())
        self.todo: deque[tuple[int, Any]] = deque()
        self.unseen: list[Any] = []
        self.done: dict[int, Any] = {}
        self.doing: dict[int, Stage] = {}
        self.threads: list[threading.Thread] = []
        self.stopped = False
        self.limit = 0  # jobs of this number and above wait

    def may_make(self) -> bool:
        return bool(self.todo) and self.todo[0][0] < self.limit

    def ask(self, number: int, job: Any) -> None:
        with self.changed:
            self.todo.append((number, job))
            if self.look is not None:
                self.unseen.append(job)
            self.changed.notify_all()

    def put(self, number: int, result: Any) -> None:
        with self.changed:
            self.doing.pop(number, None)
            if not self.stopped:
                self.done[number] = result
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.todo.clear()
            self.unseen.clear()
            self.done.clear()
            self.changed.notify_all()

    def waiting_for(self, number: int) -> str:
        stage = self.doing.get(number)
        if stage is None:
            busy = "; ".join(f"{s.text or 'making'} batch {k}" for k, s in self.doing.items())
            return f"batch {number} of this iteration waits for a thread" + (f", which is {busy}" if busy else "")
        return f"a thread is {stage.text or 'making'} batch {number} of this iteration"


def _work(shared: _Shared) -> None:
    stage = Stage()
    while True:
        with shared.changed:
            while not shared.may_make() and not shared.stopped:
                shared.changed.wait()
            if shared.stopped:
                return
            number, job = shared.todo.popleft()
            shared.doing[number] = stage
            count = _FIRST_LOOK if number == 0 else 1
            unseen, shared.unseen = shared.unseen[:count], shared.unseen[count:]
        stage.text = ""
        if shared.look is not None and unseen:
            with contextlib.suppress(Exception):  # what is wrong with a job shows when its turn comes
                shared.look(unseen)
        result = _attempt(shared.make, job, stage)
        del job, unseen
        with shared.changed:
            shared.put(number, result)
            del result  # while nobody can have it yet: its memory is the consumer's alone, who may drop it at once


def _dropped(shared: _Shared, pid: int) -> None:
    """`_stop` as a finaliser, where Python would print a KeyboardInterrupt and go on."""
    try:
        _stop(shared, pid)
    except KeyboardInterrupt:
        shared.stop()
        # Once more, when this thread lets go of the interpreter: the finaliser is over by then.
        _thread.start_new_thread(signal.pthread_kill, (threading.get_ident(), signal.SIGINT))


def _stop(shared: _Shared, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has neither the threads nor, perhaps, a free lock
        return
    shared.stop()
    if threading.current_thread() in shared.threads:
        return
    limit = time.monotonic() + _PATIENCE_S
    for thread in shared.threads:
        thread.join(max(0.0, limit - time.monotonic()))
