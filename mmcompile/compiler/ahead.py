"""Hides how the next files are asked for while one is decoded: by a few threads, once reading is seen to be slow.

On a warm local disk nothing is read ahead, as handing a file from one thread to another would cost more than it saves.  What is held is bounded in
files and bytes.  A file that does not come is waited for when its turn has come, never before, so a watcher sees which one it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from mmcompile.compiler.sources import Source

__all__ = ["ReadAhead"]

#: A read that takes longer than this is a slow one: an ordinary photo is decoded in 2 to 3 ms.
_SLOW_S = 0.001
#: So many slow reads in a row are no accident of the scheduler.
_SLOW_READS = 2
#: Bytes that may be read and not yet asked for; a larger file is read ahead only when nothing else is held.
_HELD_BYTES = 64 << 20
#: Files that may be held for each that is read at once.
_HELD_EACH = 2


class ReadAhead:
    """Reads items of a source: `keys`, of `sizes` bytes (below 0: not known), in their order, though not all have to be asked for."""

    def __init__(self, source: Source, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        self._source, self._keys, self._sizes = source, keys, sizes
        self._todo = deque(range(len(keys)))
        self._found: dict[int, bytes | Exception] = {}
        self._held: dict[int, int] = {}
        self._changed = threading.Condition()
        self._slow = 0
        self._threads = self._stopped = False

    def read(self, at: int) -> bytes:
        """What the source reads for item `at`; each item at most once, in rising order.  Raises what the source raised."""
        if not self._threads:
            return self._read_now(at)
        with self._changed:
            self._forget_before(at)
            if self._todo and self._todo[0] == at:  # no thread has come to it
                self._todo.popleft()
            else:
                self._changed.wait_for(lambda: at in self._found or at not in self._held)
                found = self._found.pop(at, None)
                self._held.pop(at, None)
                self._changed.notify_all()
                if isinstance(found, bytes):
                    return found
                if isinstance(found, Exception):
                    raise found
        return self._source.read(self._keys[at])

    def close(self) -> None:
        """Begin no other read; one that a thread is in ends by itself, or with the process."""
        with self._changed:
            self._stopped = True
            self._found.clear()
            self._changed.notify_all()

    def _read_now(self, at: int) -> bytes:
        began = time.perf_counter()
        try:
            return self._source.read(self._keys[at])
        finally:
            self._slow = self._slow + 1 if time.perf_counter() - began > _SLOW_S else 0
            if self._slow >= _SLOW_READS:
                self._forget_before(at + 1)
                self._start()

    def _start(self) -> None:
        self._threads = True
        for _ in range(min(self._source.parallel, len(self._todo))):
            threading.Thread(target=self._work, name="mmcompile-read", daemon=True).start()

    def _forget_before(self, at: int) -> None:
        """Items that were passed over are not asked for any more."""
        while self._todo and self._todo[0] < at:
            self._todo.popleft()
        for passed in [i for i in self._held if i < at]:
            self._found.pop(passed, None)
            del self._held[passed]

    def _fits(self) -> bool:
        """May the next item be read?"""
        if not self._todo:
            return False
        bytes_then = sum(self._held.values()) + max(self._sizes[self._todo[0]], 0)
        return not self._held or (len(self._held) < (1 + _HELD_EACH) * self._source.parallel and bytes_then <= _HELD_BYTES)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or not self._todo or self._fits())
                if self._stopped or not self._todo:
                    return
                at = self._todo.popleft()
                self._held[at] = max(self._sizes[at], 0)
            found: bytes | Exception | None
            try:
                found = self._source.read(self._keys[at])
            except MemoryError:  # perhaps only because others are held: read again when its turn has come
                found = None
            except Exception as error:
                found = error
            with self._changed:
                if found is None:
                    self._held.pop(at, None)
                elif at in self._held and not self._stopped:
                    self._found[at] = found
                self._changed.notify_all()
