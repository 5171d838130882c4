"""Hides dask and ray: how to reach each, to have a call done, and to see what became of it.  The only home of both.

All this runs in a process of its own (see broker), one client in each.  Calls and replies are bytes (`run_pickled`), so an exception of a client is
its cluster's own.  Neither engine tries a call again by itself after it ended with an exception.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import secrets
import socket
import time
import warnings
from typing import Any, Protocol

from mmcompile.compiler.engines import run_pickled
from mmcompile.errors import EngineError

__all__ = ["exchange", "open_client"]

#: Seconds between two counts of a cluster's workers.
_COUNT_S = 1.0
#: Seconds that a reply may take from the worker that has it.
_REPLY_S = 60.0

#: What became of a call: its number, whether its reply came, and the reply, or in words why not.
Ended = tuple[int, bool, bytes]


class _Client(Protocol):
    def submit(self, number: int, call: bytes) -> None: ...

    def drop(self, number: int) -> None: ...

    def ended(self, wait_s: float) -> list[Ended]: ...

    def workers(self) -> int: ...


_client: _Client | None = None
_workers = 0
_counted = 0.0


def open_client(engine: str, address: str | None, answer_s: float) -> int:
    """Connect this process to a cluster; how many calls it runs at once.  Raises EngineError where it does not answer within `answer_s` seconds."""
    global _client
    _client = _Dask(address, answer_s) if engine == "dask" else _Ray(address, answer_s)
    return _count()


def exchange(new: list[tuple[int, bytes]], dropped: list[int], wait_s: float) -> tuple[list[Ended], int]:
    """Hand over new calls, forget others; what has ended (waits `wait_s` seconds at most), and how many calls the cluster runs at once."""
    assert _client is not None
    for number in dropped:
        _client.drop(number)
    for number, call in new:
        _client.submit(number, call)
    return _client.ended(wait_s), _count()


def _count() -> int:
    global _workers, _counted
    assert _client is not None
    now = time.monotonic()
    if now - _counted >= _COUNT_S:
        _workers, _counted = _client.workers(), now
    return _workers


def _load(engine: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise EngineError(
            f"--engine {engine} needs a package that is not installed ({error}): pip install 'mmcompile[{engine}]'", extra=engine
        ) from None


def _said(error: BaseException) -> bytes:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()[:300]}".encode() if lines else type(error).__name__.encode()


def _knock(address: str, answer_s: float) -> None:
    """Raises OSError, at once where that can be known, if nobody listens at HOST:PORT; what has another form is left to the client."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), answer_s).close()


class _Dask:
    """A client of dask's scheduler.  Its futures say what became of them on threads of its own."""

    def __init__(self, address: str | None, answer_s: float) -> None:
        distributed = _load("dask", "distributed")
        if not address:
            raise EngineError("--engine dask needs the address of a scheduler: --address tcp://HOST:8786, as `dask scheduler` prints it")
        self._address = address
        try:
            scheme, _, place = address.rpartition("://")
            _knock(place if scheme in ("", "tcp", "tls") else "", answer_s)
            self._client = distributed.Client(address, timeout=answer_s, set_as_default=False, name="mmcompile")
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(
                f"no dask scheduler answers at {address} ({_said(error).decode()}): start one with `dask scheduler`, and give the address it prints",
                address=address,
            ) from error
        self._prefix = f"mmcompile-{secrets.token_hex(8)}"
        self._futures: dict[int, Any] = {}
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def submit(self, number: int, call: bytes) -> None:
        self._check()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a large shard has many keys: that is no mistake
            future = self._client.submit(run_pickled, call, key=f"{self._prefix}-{number}", pure=False, retries=0)
        self._futures[number] = future
        future.add_done_callback(lambda done: self._ended.put(self._outcome(number, done)))

    def _outcome(self, number: int, future: Any) -> Ended:
        try:
            return number, True, future.result(timeout=_REPLY_S)
        except BaseException as error:  # asyncio's CancelledError is no Exception
            return number, False, _said(error)

    def drop(self, number: int) -> None:
        if (future := self._futures.pop(number, None)) is not None:
            future.cancel()

    def ended(self, wait_s: float) -> list[Ended]:
        self._check()
        out: list[Ended] = []
        with contextlib.suppress(queue.Empty):
            out.append(self._ended.get(timeout=wait_s))
            while True:
                out.append(self._ended.get_nowait())
        for number, _, _ in out:
            self._futures.pop(number, None)
        return out

    def workers(self) -> int:
        try:
            return sum(self._client.nthreads().values())
        except (OSError, RuntimeError):  # between two schedulers, or the end of one
            self._check()
            return 0

    def _check(self) -> None:
        if self._client.status in ("closing", "closed"):
            raise EngineError(f"the dask scheduler at {self._address} does not answer any longer", address=self._address)


class _Ray:
    """A driver of a ray cluster.  Ray ends this process when it loses the cluster's head."""

    def __init__(self, address: str | None, answer_s: float) -> None:
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(math.ceil(answer_s)))
        self._ray = ray = _load("ray", "ray")
        try:
            _knock(address or "", answer_s)  # ray itself would look for long, and end this process
            ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            where = f"at {address}" if address else "on this machine"
            raise EngineError(
                f"no ray cluster answers {where} ({_said(error).decode()}); start one with `ray start --head`, and give HOST:PORT as it prints it; "
                "if it is there, it may want a token: RAY_AUTH_MODE=token here too (or RAY_AUTH_MODE=disabled wherever ray starts)",
                address=address,
            ) from error
        self._run = ray.remote(num_cpus=1, max_retries=0)(run_pickled)
        self._refs: dict[Any, int] = {}

    def submit(self, number: int, call: bytes) -> None:
        self._refs[self._run.remote(call)] = number

    def drop(self, number: int) -> None:
        for ref in [r for r, n in self._refs.items() if n == number]:
            del self._refs[ref]
            self._ray.cancel(ref)

    def ended(self, wait_s: float) -> list[Ended]:
        if not self._refs:
            time.sleep(wait_s)
            return []
        ready, _ = self._ray.wait(list(self._refs), num_returns=1, timeout=wait_s)
        out: list[Ended] = []
        for ref in ready:
            try:
                out.append((self._refs[ref], True, self._ray.get(ref)))
            except Exception as error:
                out.append((self._refs[ref], False, _said(error)))
            del self._refs[ref]
        return out

    def workers(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))
