"""Hides how processes of a host hold files: `flock`, by descriptors that a forked child does not keep, and without waiting for ever.

The kernel drops the locks of a dead process.  One that is stopped keeps them: whoever waits sees that nothing is written and is told so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from mmcompile.errors import FormatError

__all__ = ["close", "is_same", "lock", "open_file", "share", "wait_for"]

#: Seconds after which whoever has a lock and writes nothing is taken to be stopped: twice what a store waits between its tries for one piece.  Where
#: that is too short a file is only brought twice.
_STUCK = 60.0
#: Seconds between two looks at a lock: at first, and at most.
_PAUSES = 0.001, 0.1
#: Seconds that removing a file may take: who locks it to do so has it for an instant.
_REMOVING = 1.0

#: Descriptors that hold a lock which a forked child must not inherit: its parent may die and the child live on.
_locked: set[int] = set()


def _forget() -> None:
    for fd in list(_locked):
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_forget)


def open_file(path: Path, flags: int) -> int:
    """A descriptor that closes in a forked child.  Raises FormatError for what is no regular file."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path}: a link, expected a file of the cache; remove the link", path=str(path)) from None
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder, or a pipe or socket
            raise _not_a_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_file(path)
    _locked.add(fd)
    return fd


def _not_a_file(path: Path) -> FormatError:
    return FormatError(f"{path}: expected a file, found a folder or pipe: move it away", path=str(path))


def close(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile may still have it open
    _locked.discard(fd)
    os.close(fd)


def lock(fd: int, path: Path) -> bool:
    """Take the lock, if nobody has it.  The time of the file, if it is still at this path, says since when."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if is_same(fd, path):  # else it may be a copy by now, whose times say whether it was written to
        with contextlib.suppress(OSError):  # another user's
            os.utime(fd)
    return True


def share(fd: int) -> bool:
    """Hold the file as one that is in use; False where somebody is about to remove it."""
    until = time.monotonic() + _REMOVING
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSES[0])
        else:
            return True


def wait_for(fd: int, path: Path) -> bool:
    """Wait until whoever has the lock of a file lets go of it or the file is no longer at this path; False where he writes nothing for too long."""
    pause, seen, until = _PAUSES[0], -1.0, 0.0
    while is_same(fd, path):
        written = os.fstat(fd).st_mtime
        if written != seen:
            seen, until = written, time.monotonic() + _STUCK - min(_STUCK, max(0.0, time.time() - written))
        elif time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        fcntl.flock(fd, fcntl.LOCK_UN)
        return True
    return True


def is_same(fd: int, path: Path) -> bool:
    """Is the path (still) this open file?"""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
