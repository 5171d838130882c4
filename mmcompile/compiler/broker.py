"""Hides how calls reach a dask or ray cluster: its client runs in a process of ours, which may end with the cluster while the build does not.

(A client of ray ends its own process when it loses the cluster's head.)  That process is a worker of a `LocalExecutor`; one thread hands it new
calls and takes back what has ended.  To the build all this is an Executor: a call that the cluster lost raises EngineError, `submit` raises
BrokenExecutor once the cluster itself is gone.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from mmcompile.compiler import clients
from mmcompile.compiler.engines import LocalExecutor, result_within
from mmcompile.errors import EngineError

__all__ = ["BrokerExecutor", "connect"]

#: Seconds in which a cluster must answer: when it is first spoken to, and when it was lost and may come back.
_ANSWER_S = 15.0
#: ... after which its client, which should have said so itself, is taken for one that hangs.
_HANG_S = 60.0
#: Seconds for which the client waits for calls to end before it looks for new ones.
_WAIT_S = 0.05
#: What a client's last words begin with, and how much of them is repeated.
_STAMP = re.compile(r"\[[^]]*\] [\w.]+:\d+: ")
_SAID = 200


def connect(engine: str | Executor, address: str | None) -> Executor | None:
    """The executor of an engine, None for "local".  Raises EngineError where its package is not installed, or the cluster does not answer.

    `details["begun"]` is False then: nothing was finished that the same command could go on from.
    """
    if isinstance(engine, Executor):
        return engine
    try:
        return None if engine == "local" else BrokerExecutor(engine, address)
    except EngineError as error:
        raise EngineError(str(error), **error.details, begun=False) from error


class BrokerExecutor(Executor):
    """Calls on a cluster of dask or ray.  `workers`: how many it runs at once, as of now."""

    def __init__(self, engine: str, address: str | None) -> None:
        self.workers = 0
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._new: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._gone = ""
        self._stopped = False
        self._lock = threading.Lock()
        self._process = LocalExecutor(1)
        try:
            self.workers = self._ask(clients.open_client, engine, address, _ANSWER_S)
        except EngineError as error:
            self._process.kill()
            if "exitcode" not in error.details:
                raise
            raise EngineError(f"no {engine} cluster answers at {address} ({error})", address=address) from error
        except BaseException:
            self._process.kill()
            raise
        self._thread = threading.Thread(target=self._talk, name=f"mmcompile-{engine}", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn(*args, **kwargs)` on a worker; all of it must pickle.  Raises BrokenExecutor when the cluster is gone."""
        call = pickle.dumps((fn, args, kwargs), pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                raise BrokenExecutor(self._gone)
            if self._stopped:
                raise RuntimeError("submit after shutdown")
            number = next(self._numbers)
            self._futures[number] = future
        self._new.put((number, call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the calls finish that are out (or cancel them) and leave the cluster."""
        with self._lock:
            self._stopped = True
            out = list(self._futures.values())
        if cancel_futures:
            for future in out:
                future.cancel()
        if wait:
            self._thread.join()

    def kill(self) -> None:
        """Leave the cluster now; what is out fails."""
        self.shutdown(wait=False, cancel_futures=True)
        self._process.kill()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        try:
            return result_within(self._process, self._process.submit(fn, *args), _ANSWER_S + _HANG_S)
        except EngineError as error:
            if "exitcode" not in error.details:
                raise
            said = _STAMP.sub("", str(error.details.get("said", "")))[:_SAID]
            raise EngineError("its client ended" + (f": {said}" if said else ""), exitcode=error.details["exitcode"]) from error

    def _talk(self) -> None:
        try:
            while self._futures or not self._stopped:
                new, dropped = self._changes()
                ended, self.workers = self._ask(clients.exchange, new, dropped, _WAIT_S)
                for number, ok, data in ended:
                    self._end(number, ok, data)
            gone = ""
        except Exception as error:  # whatever it is, nobody must wait for these calls any longer
            gone = str(error) or type(error).__name__
        finally:
            self._process.kill()
        with self._lock:
            self._gone = gone
            left, self._futures = self._futures, {}
        for future in left.values():
            if not future.cancelled():
                future.set_exception(BrokenExecutor(gone))

    def _changes(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """New calls, and those that nobody waits for any longer."""
        new = []
        while not self._new.empty():
            new.append(self._new.get())
        with self._lock:
            dropped = [number for number, future in self._futures.items() if future.cancelled()]
            for number in dropped:
                self._futures.pop(number).set_running_or_notify_cancel()
        return [(number, call) for number, call in new if number not in dropped], dropped

    def _end(self, number: int, ok: bool, data: bytes) -> None:
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if not ok:
            future.set_exception(EngineError(data.decode()))
            return
        try:
            returned, value = pickle.loads(data)
        except Exception as error:
            returned, value = False, error
        if returned:
            future.set_result(value)
        else:
            future.set_exception(value)
