"""Hides how two runs on one store are kept apart: an object that its holder renews, and that others watch before they take it.

No clock is compared with another: whoever finds a lock watches it on its own clock.  One that changes has a living holder; one that stays the same
for longer than its holder would ever let it is left over from a run that died, and is taken.

A store cannot make a write depend on a lock, so a holder looks at it once more right before it writes the index.  A run that is halted between that
look and the write, for longer than DEAD_S, may still write after another one: what it publishes is whole, but takes the place of what the other did.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mmcompile.errors import BuildError, RemoteError
from mmcompile.format.store import Store

__all__ = ["StoreLock"]

#: Seconds between two renewals, and after how many without one a lock is left over: two renewals may fail.
RENEW_S, DEAD_S = 20.0, 60.0
#: Seconds between two looks at another's lock, and between taking it and believing that nobody else has.
LOOK_S = 2.0


class StoreLock:
    """The lock of a dataset on a store.  Raises BuildError, naming the holder, when another run is at work.

    `say` gets a line before there is a wait: for whom, and for how long at most.
    """

    def __init__(self, store: Store, say: Callable[[str], None], *, required: bool = True, name: str = ".build/lock") -> None:
        self._store, self._say, self._required, self._name = store, say, required, name
        self._token = secrets.token_hex(16)
        self._beats = 0
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mmcompile-lock", daemon=True)

    def __enter__(self) -> StoreLock:
        if self._required:
            while not self._store.create(self._name, self._content()):
                if self._take_over():
                    break
            self._thread.start()
        return self

    def still_held(self) -> bool:
        """Is the lock on the store still ours?"""
        return not self._required or (not self._lost and _token(self._read()) == self._token)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._required:
            return
        self._stop.set()
        self._thread.join()
        if not isinstance(error, RemoteError):  # a store that cannot be reached will not be now; the lock ends by itself
            with contextlib.suppress(RemoteError):
                if self.still_held():
                    self._store.delete([self._name])

    def _take_over(self) -> bool:
        """Wait for another's lock to go, or to show that its holder is gone; False where it is to be tried again."""
        seen = self._read()
        if seen is None:
            return False
        holder = _holder(seen)
        self._say(f"{self._store.url}: locked by {holder}; waiting up to {DEAD_S:.0f} s to see whether it is still at work")
        since = time.monotonic()
        while time.monotonic() - since <= DEAD_S:
            time.sleep(LOOK_S)
            now = self._read()
            if now is None:
                return False
            if now != seen:
                raise BuildError(f"{self._store.url}: another run is at work here ({_holder(now)}); wait for it or stop it", holder=_holder(now))
        self._store.write(self._name, self._content())
        time.sleep(LOOK_S)  # two that waited alike write one after the other: the last one has it
        return _token(self._read()) == self._token

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                if _token(self._read()) != self._token:
                    self._lost = True
                    return
                self._beats += 1
                self._store.write(self._name, self._content())
            except RemoteError:  # the next time, or never: the holder asks before it publishes
                continue

    def _content(self) -> bytes:
        about = {"token": self._token, "beat": self._beats, "host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps(about).encode()

    def _read(self) -> bytes | None:
        try:
            return self._store.read(self._name)
        except FileNotFoundError:
            return None


def _parsed(data: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _token(data: bytes | None) -> object:
    return _parsed(data).get("token")


def _holder(data: bytes) -> str:
    found = _parsed(data)
    return f"process {str(found.get('pid'))[:20]} on {str(found.get('host'))[:100]}" if found else "a run that left no name"
