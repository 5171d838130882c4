"""Hides how a worker says what it has in hand: a small file that outlives the process, so that whoever watches knows which item killed it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import struct
from pathlib import Path

from mmcompile.format.npy import give_back_memory

__all__ = ["HAND", "TURNS", "Hand", "OwnFault", "hand_path", "read_hand"]

#: What a worker has in hand: position in the piece, seconds that it may take, process id.
HAND = struct.Struct("<qdq")

#: The lock that large pictures take turns by, beside what their workers have in hand.
TURNS = "large"
#: Pictures of more pixels than this (48 megapixels) are decoded one at a time: two honest ones of 169 megapixels take 0.7 GB each, and more while
#: they are converted.
_LARGE_PIXELS = 48_000_000


def hand_path(scratch: Path, serial: int) -> Path:
    """Where the worker of a piece records what it has in hand."""
    return scratch / f"hand-{serial}"


def read_hand(path: Path) -> tuple[int, float, int] | None:
    """(position in the piece, seconds allowed, process id) or None before the worker has begun."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return HAND.unpack(data) if len(data) == HAND.size else None


class OwnFault(Exception):
    """Its cause, an OSError, is about our own files."""


class Hand:
    """Says which item is in hand and how long it may take, in a file that outlives the process; lets large pictures take turns."""

    def __init__(self, path: Path, base_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._base, self._at = base_s, 0
        self._turn_path, self._turn = path.with_name(TURNS), -1

    def take(self, at: int) -> None:
        """Begin an item."""
        self._end_turn()
        self._at = at
        self._write(self._base)

    def opened(self, width: int, height: int) -> None:
        """The size is known: a second more for each megapixel; a large picture waits until no other worker holds one.

        Called from within a decode, so what goes wrong here is told apart from what is wrong with the picture.
        """
        try:
            self._opened(width, height)
        except OSError as error:
            raise OwnFault from error

    def _opened(self, width: int, height: int) -> None:
        if width * height > _LARGE_PIXELS and self._turn < 0:
            self._write(math.inf)
            self._turn = os.open(self._turn_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks: no turns
                fcntl.flock(self._turn, fcntl.LOCK_EX)
        self._write(self._base + width * height / 1e6)

    def close(self) -> None:
        self._end_turn()
        os.close(self._fd)

    def _write(self, limit_s: float) -> None:
        os.pwrite(self._fd, HAND.pack(self._at, limit_s, os.getpid()), 0)

    def _end_turn(self) -> None:
        if self._turn >= 0:
            give_back_memory()  # before another worker takes as much
            os.close(self._turn)
            self._turn = -1
