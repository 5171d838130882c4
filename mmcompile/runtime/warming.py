"""Hides the thread that reads a dataset into the page cache while something else goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcompile.runtime.dataset import MMapShardDataset

__all__ = ["Warming"]


class Warming:
    """A dataset on its way into the page cache.  `done_bytes` of `total_bytes` are read; dropping this object ends it, what was read stays.

    `progress(done_bytes, total_bytes)` is called by the thread that reads.
    """

    def __init__(self, dataset: MMapShardDataset, progress: Callable[[int, int], None] | None = None) -> None:
        if progress is not None and not callable(progress):
            raise TypeError(f"progress is a function of (bytes done, bytes in all), not {progress!r}")
        self._state = state = _State(progress)
        rows = dataset._needed()
        fields = list({column.field: None for column in dataset._columns})
        width = sum(dataset._reader.row_bytes(name) for name in fields)
        reader = dataset._reader
        upcoming = dataset.upcoming()
        parts = rows.ranges(len(rows) if upcoming is None else upcoming.bring(rows), width)
        state.total = width * sum(map(len, parts))

        def read() -> None:
            try:
                for part in parts:
                    reader.warm(fields, part, state.stop.is_set, state.seen)
            except BaseException as error:
                state.error = error

        self._thread = threading.Thread(target=read, name="mmcompile-warm", daemon=True)
        weakref.finalize(self, state.stop.set)
        self._thread.start()

    @property
    def done_bytes(self) -> int:
        return self._state.done

    @property
    def total_bytes(self) -> int:
        return self._state.total

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, for at most `timeout` seconds: has it come?  Raises what reading raised."""
        self._thread.join(timeout)
        if self._state.error is not None:
            raise self._state.error
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it before it is done; returns once it has."""
        self._state.stop.set()
        self._thread.join()


class _State:
    """What the thread and the front both hold."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self.stop = threading.Event()
        self.done = self.total = 0
        self.error: BaseException | None = None
        self._progress = progress

    def seen(self, nbytes: int) -> None:
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self.total)
