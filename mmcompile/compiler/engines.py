"""Hides how work reaches other processes: a name -> a `concurrent.futures.Executor`.

The local engine is processes of our own rather than `ProcessPoolExecutor`, which after one crash fails every outstanding future and names no
culprit.  Here the death of a worker fails the one future that it had in hand, with its exit code, and the next piece of work gets a new process.
Workers are started as `python -c`, so the caller's script needs no `__main__` guard; they inherit no lock and end when their parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from mmcompile.errors import EngineError, OptionError

__all__ = ["LocalExecutor", "make_executor", "usable_cpus"]

_PR_SET_PDEATHSIG = 1


def make_executor(engine: str, workers: int | None) -> Executor:
    """The executor of an engine; `workers=None` takes as many as this process may use."""
    if engine != "local":
        raise OptionError(f"engine must be 'local', not {engine!r}")
    return LocalExecutor(usable_cpus() if workers is None else workers)


def usable_cpus() -> int:
    """Processors that this process may use: its affinity, cut by the CPU quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(q) for q in _quotas())]))


def _quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """CPU quotas on the way from this process's control group to the root, in processors (cgroup v2 and v1)."""
    out: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root if not controllers else root / "cpu"
            if controllers and "cpu" not in controllers.split(","):
                continue
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts) + 1):
                folder = base.joinpath(*parts[:depth])
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                    if controllers:
                        quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if quota.strip() != "max" and int(quota) > 0:
                        out.append(int(quota) / int(period))
    return out


class LocalExecutor(Executor):
    """Worker processes on this machine, each fed by a thread of its own.

    A future whose worker died raises EngineError with `details["exitcode"]` (negative: the signal).  `kill` ends all workers at once.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise OptionError(f"workers must be at least 1, not {workers}")
        self.workers = workers
        self._queue: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self._feed, args=(i,), name=f"mmcompile-worker-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

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
        self._stopped = True
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()

    def _feed(self, slot: int) -> None:
        worker: _Worker | None = None
        try:
            while (item := self._queue.get()) is not None:
                future, call = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    if worker is None:
                        worker = _Worker()
                        with self._lock:
                            self._processes[slot] = worker.process
                            if self._stopped:
                                worker.process.kill()
                    ok, value = worker.call(call)
                except EngineError as error:
                    worker = None
                    future.set_exception(error)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(value) if ok else future.set_exception(value)
        finally:
            if worker is not None:
                worker.close()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        code = f"import sys; sys.path[:] = {sys.path!r}; from mmcompile.compiler.engines import _work; _work({theirs.fileno()}, {os.getpid()})"
        env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, pass_fds=[theirs.fileno()], env=env
            )
        except OSError as error:
            raise EngineError(f"cannot start a worker process: {error.strerror}") from error
        finally:
            theirs.close()
        self.pipe: Connection[Any, Any] = ours

    def call(self, data: bytes) -> tuple[bool, Any]:
        try:
            self.pipe.send_bytes(data)
            return pickle.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.pipe.close()
            code = self.process.wait()
            self.log.seek(0, os.SEEK_END)
            self.log.seek(max(0, self.log.tell() - 2000))
            said = self.log.read().decode(errors="replace").strip().splitlines()
            self.log.close()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineError(f"a worker process ended ({how})" + (f": {said[-1]}" if said and code > 0 else ""), exitcode=code) from None

    def close(self) -> None:
        self.pipe.close()
        self.process.wait()
        self.log.close()


def _work(fd: int, parent: int) -> None:
    """The worker's main loop: run calls until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    pipe: Connection[Any, Any] = Connection(fd)
    while True:
        try:
            fn, args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            reply = pickle.dumps((True, fn(*args, **kwargs)), pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            reply = _as_reply(error)
        try:
            pipe.send_bytes(reply)
        except OSError:
            os._exit(0)


def _as_reply(error: BaseException) -> bytes:
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps((False, EngineError(f"{type(error).__name__} in a worker: {error}")))
