"""Hides how work reaches other processes of this machine: a `concurrent.futures.Executor`.

The local engine is processes of our own rather than `ProcessPoolExecutor`, which after one crash fails every outstanding future and names no
culprit.  Here the death of a worker fails the one future that it had in hand, with its exit code, and the next piece of work gets a new process.
How workers are started, and why they inherit nothing and end when their parent does: `template`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mmcompile.compiler.template import Template, WorkerProcess
from mmcompile.errors import EngineError, OptionError
from mmcompile.format.cpus import usable_cpus

__all__ = ["LocalExecutor", "how_ended", "make_executor", "result_within", "run_pickled"]

#: Seconds between two looks at whether a silent worker is still there: its pipe may be held open by a process that it left behind.
_ALIVE_S = 2.0
#: More processes than any machine has cores; each takes a thread here, and memory.
MOST_WORKERS = 4096
#: Seconds between two looks at whether a call has begun.
_BEGUN_S = 0.2


def make_executor(workers: int | None) -> Executor:
    """Worker processes on this machine; `workers=None` takes as many as this process may use."""
    return LocalExecutor(usable_cpus() if workers is None else workers)


def how_ended(code: int) -> str:
    """How a process ended, by its exit code (negative: the signal, which may have no name), as it stands behind "a worker"."""
    if code == -signal.SIGKILL:
        return "was killed (out of memory?)"
    try:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        return f"ended by signal {-code}"


def result_within(executor: Executor, future: Future[Any], limit_s: float) -> Any:
    """The result of a call that may run `limit_s` seconds, counted from its start.

    A call that takes longer is ended with its worker, where the engine can do that; EngineError then, as for any worker that died.
    """
    began: float | None = None
    while not future.done():
        if began is None and future.running():
            began = time.monotonic()
        if began is not None and time.monotonic() - began > limit_s and isinstance(executor, LocalExecutor):
            executor.kill_call(future)
        wait_for([future], timeout=_BEGUN_S)
    return future.result()


class LocalExecutor(Executor):
    """Worker processes on this machine, each fed by a thread of its own.

    A future whose worker died raises EngineError with `details["exitcode"]` (negative: the signal).  `kill` ends all workers at once.
    """

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= MOST_WORKERS:
            raise OptionError(f"--workers must be from 1 to {MOST_WORKERS:,}, found {workers:,}", options=["workers"])
        self.workers = workers
        self._queue: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._processes: dict[int, WorkerProcess] = {}
        self._template = Template()
        self._calls: dict[Future[Any], int] = {}
        self._lock = threading.Lock()
        self._stopped = self._killed = False
        self._feeding = workers
        self._threads = [threading.Thread(target=self._feed, args=(i,), name=f"mmcompile-worker-{i}", daemon=True) for i in range(workers)]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # threads, or memory for their stacks, have run out
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self._feeding = len(self._threads)
            self.kill()
            raise EngineError(f"cannot start {workers:,} workers ({error}): give fewer (--workers)", begun=False) from None

    def prepare(self, fn: Callable[[], Any]) -> None:
        """Begin to load what workers need: `fn`, which must be importable, is called once, and they inherit what it loads.  Does not wait."""
        self._template.prepare(fn)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn(*args, **kwargs)` in a worker; all of it must pickle."""
        if self._stopped:
            raise RuntimeError("submit after shutdown")
        future: Future[Any] = Future()
        self._queue.put((future, pickle.dumps((fn, args, kwargs), pickle.HIGHEST_PROTOCOL)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the workers finish what is queued (or cancel it) and end."""
        self._stopped = True
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._queue.get_nowait()
                    if item is not None:
                        item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def kill(self) -> None:
        """End all workers now; what they had in hand fails, what was queued is cancelled."""
        self._killed = True
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for process in self._processes.values():
                process.kill()
        self._template.kill()
        for thread in self._threads:
            thread.join()

    def kill_call(self, future: Future[Any]) -> None:
        """End the worker that runs this call, if one does, or what keeps one from starting; the call fails as when its worker had died."""
        with self._lock:
            slot = self._calls.get(future)
            worker = None if slot is None else self._processes.get(slot)
            if worker is not None:
                worker.kill()
        if slot is not None and worker is None:
            self._template.interrupt()

    def _feed(self, slot: int) -> None:
        worker: WorkerProcess | None = None
        try:
            while (item := self._queue.get()) is not None:
                future, call = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    with self._lock:
                        self._calls[future] = slot
                    if worker is None:
                        worker = self._template.fork()
                    with self._lock:
                        self._processes[slot] = worker
                        if self._killed:
                            worker.kill()
                    ok, value = _call(worker, call)
                except EngineError as error:
                    worker, ok, value = None, False, error
                    with self._lock:
                        self._processes.pop(slot, None)
                except BaseException as error:
                    ok, value = False, error
                with self._lock:
                    self._calls.pop(future, None)
                future.set_result(value) if ok else future.set_exception(value)
        finally:
            if worker is not None:
                worker.close()
            with self._lock:
                self._feeding -= 1
                last = not self._feeding
            if last:
                self._template.kill()


def _call(worker: WorkerProcess, data: bytes) -> tuple[bool, Any]:
    """Run one call in a worker.  EngineError where that dies; it is closed then."""
    try:
        worker.pipe.send_bytes(data)
        while not worker.pipe.poll(_ALIVE_S):
            if worker.poll() is not None and not worker.pipe.poll(0):
                raise EOFError
        reply = worker.pipe.recv_bytes()
    except (EOFError, OSError):
        code = worker.wait()
        said = worker.said() if code > 0 else ""
        worker.close()
        raise EngineError(f"a worker process {how_ended(code)}" + (f": {said}" if said else ""), exitcode=code, said=said) from None
    return pickle.loads(reply)  # type: ignore[no-any-return]


def _work(fd: int) -> NoReturn:
    """The worker's main loop: run calls until the parent closes the pipe."""
    pipe: Connection[Any, Any] = Connection(fd)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            pipe.send_bytes(run_pickled(data))
        except OSError:
            os._exit(0)


def run_pickled(data: bytes) -> bytes:
    """Run a pickled (function, arguments, keywords); the reply is pickled, too: (True, what it returned) or (False, what it raised)."""
    try:
        fn, args, kwargs = _load(data)
        return pickle.dumps((True, fn(*args, **kwargs)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        return _as_reply(error)


def _load(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise EngineError(f"a worker cannot load what it was given ({error}); define it in an importable module, not in the script") from None


def _as_reply(error: BaseException) -> bytes:
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps((False, EngineError(f"{type(error).__name__} in a worker: {error}")))
