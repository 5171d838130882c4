"""Hides how two runs on one OUT are kept apart: `flock` on OUT/.build/lock, which the kernel drops when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path
from types import TracebackType

from mmcompile.errors import BuildError
from mmcompile.format.canonical import not_a_file

__all__ = ["Lock"]


class Lock:
    """`flock` on OUT/.build/lock: one build, prune or repair at a time, or (with `shared`) any number of parts.

    The kernel drops it when its holder dies, so the lock of a dead process is never in the way.  The file tells who holds it, if one does alone.  Not
    inherited by workers (close-on-exec).  Raises BuildError, naming the holder, when another process has it.
    """

    def __init__(self, path: str | Path, *, required: bool = True, shared: bool = False) -> None:
        self.path = Path(path)
        self.required, self.shared = required, shared
        self._fd = -1

    def __enter__(self) -> Lock:
        if self.path.parent.is_symlink():
            raise BuildError(
                f"{self.path.parent}: a link, expected a folder of this dataset; remove the link, as what lies behind it may be another's"
            )
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._name_holder(fd)
                os.close(fd)
                raise BuildError(f"{self._what()} is at work here ({holder}); wait for it or stop it", holder=holder) from None
            except OSError as error:
                os.close(fd)
                if self.required:
                    raise BuildError(
                        f"{self.path}: this file system has no file locks ({error.strerror}); if no other run is at work, add --no-lock"
                    ) from error
                return self
            self._fd = fd
            if self.still_held():
                break
            os.close(fd)  # another run removed the folder between our open and our lock: take the new file
        if self.shared:
            return self
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time())}).encode(), 0)
        except BaseException:  # a full disk: this process may live on, and must not hold what it does not use
            self.__exit__(None, None, None)
            raise
        return self

    def _what(self) -> str:
        """OUT and who else may be at work, for an error: the lock of a part lies one folder further down."""
        if self.path.parent.name == ".build":
            return f"{self.path.parent.parent}: another run"
        return f"{self.path.parent.parent.parent}: another run of part {self.path.stem}"

    def _name_holder(self, fd: int) -> str:
        """Who has the lock that was refused: parts, which share it, have their names in locks of their own."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return "parts of a build"
        return _holder(fd)

    def _open(self) -> int:
        fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            if stat.S_ISREG(mode := os.fstat(fd).st_mode):
                return fd
            os.close(fd)
            reason = not_a_file(mode)
        except OSError as error:
            reason = "a link: move it away" if error.errno == errno.ELOOP else f"{error.strerror}"
        raise BuildError(f"{self.path}: cannot be used as the lock of this folder ({reason})", path=str(self.path))

    def still_held(self) -> bool:
        """Is the path still the file that was locked?  Not so after someone deleted .build/."""
        if self._fd < 0:
            return True
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return stat.S_ISREG(there.st_mode) and (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(fd: int) -> str:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["started"]))
        return f"process {int(found['pid'])} on {str(found['host'])[:100]}, since {started}"
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError, RecursionError):  # whatever someone wrote there
        return "its holder has not written its name yet"
