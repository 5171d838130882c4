"""Hides how a line, a JSON document and progress reach a terminal, or whatever stands in its place, and how it ends a command.

The only home of tqdm and print.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from mmcompile import summary, text
from mmcompile.compiler.outcome import Progress

__all__ = ["Show", "Terminable", "fill_standard_streams", "say", "say_bytes", "say_json"]

#: Plain progress lines where standard error is no terminal: the first after this many seconds, then one every so many.
_FIRST_LINE_S, _LINES_S = 3.0, 10.0
#: Stages whose progress counts bytes, or rows; all others count images.
_IN_BYTES, _IN_ROWS = frozenset({"verify"}), frozenset({"rows", "order"})


def say(lines: Iterable[str] | str, *, err: bool = False) -> None:
    """Write lines.  A reader that left (`| head`) is no error: the rest is dropped and the exit code stays what it was."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # closed by the caller, as in `>&-`
        return
    try:
        for line in [lines] if isinstance(lines, str) else lines:
            print(line, file=stream)
        stream.flush()
    except BrokenPipeError:
        _discard(stream)


def say_bytes(content: bytes) -> None:
    """Write these bytes to standard output, as they are; a reader that left is no error, as with `say`."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Send what is still buffered, and all that follows, to nowhere, so that closing it at exit cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say_json(document: dict[str, Any]) -> None:
    say(json.dumps(text.json_ready(document), indent=2, allow_nan=False))


class Show:
    """Shows progress: a bar on a terminal, else a plain line now and then.  `clock` is in seconds."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._bar: Any = None
        self._stage = ""
        self._first = (0, clock())
        self._due = clock() + _FIRST_LINE_S
        self._terminal = stream is not None and stream.isatty()

    def __call__(self, progress: Progress) -> None:
        if self._stream is None:
            return
        if progress.message:
            if self._bar is not None:
                self._bar.clear()
            say(text.escape(progress.message), err=True)
        now = self._clock()
        if progress.stage != self._stage:
            self.close()
            self._stage, self._first = progress.stage, (progress.done, now)
        if self._terminal:
            self._draw(progress)
        elif now >= self._due:
            self._due = now + _LINES_S
            done, since = self._first
            rate = (progress.done - done) / (now - since) if now > since else None
            units: dict[str, Any] = {"count": text.size, "unit": ""} if progress.stage in _IN_BYTES else {"unit": _unit(progress.stage)}
            say(text.escape(summary.progress_line(progress, rate, **units)), err=True)

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            import threading

            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

            tqdm.set_lock(threading.RLock())  # its own is shared between processes, and a semaphore would outlive a kill
            tqdm.monitor_interval = 0  # no thread of its own beside a build that starts processes
            units: dict[str, Any] = (
                {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if progress.stage in _IN_BYTES else {"unit": _unit(progress.stage)}
            )
            label, total = text.escape(progress.stage), progress.total or None
            self._bar = tqdm(desc=label, total=total, initial=progress.done, file=self._stream, leave=False, **_width(self._stream), **units)
        if progress.total:
            self._bar.total = progress.total
        if progress.rejects:
            self._bar.set_postfix_str(f"{progress.rejects:,} rejects", refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        """Take the bar away, so that what is printed next stands alone."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _unit(stage: str) -> str:
    return " rows" if stage in _IN_ROWS else " images"


def _width(stream: Any) -> dict[str, Any]:
    """How large tqdm may draw: as the terminal is at each moment, but 80 x 24 on one that says 0 x 0, where it would draw nothing."""
    try:
        wide = os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        wide = False
    return {"dynamic_ncols": True} if wide else {"ncols": 80, "nrows": 24}


def fill_standard_streams() -> None:
    """Put /dev/null where the caller closed a standard stream (`>&-`), so that no pipe of ours takes its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


class Terminable:
    """While this lasts, SIGTERM is what Ctrl-C is, once: what was begun is put away, and no process is left.  `came`: has there been one?"""

    def __init__(self) -> None:
        self.came = False
        # What the caller ignores stays ignored; only the main thread may change it.
        self._ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def __enter__(self) -> Terminable:
        if self._ours:
            signal.signal(signal.SIGTERM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _raise(self, *_: object) -> None:
        if not self.came:  # some send it to a process and to its group: the second one must not end what the first one began
            self.came = True
            raise KeyboardInterrupt
