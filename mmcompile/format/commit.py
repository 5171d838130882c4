"""Hides how a file becomes durable: temporary name, fsync, rename, fsync of the folder.  The only home of os.replace and fsync.

After `write_atomic` or `install` returns, the file is there with all its bytes whatever happens to the power; before, the old one is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

__all__ = ["install", "sync_folder", "write_atomic"]


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable (a rename is not, until its folder is synced)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def install(temporary: str | Path, final: str | Path) -> None:
    """Sync a finished file and give it its final name, in place of whatever had that name (open maps of the old file stay valid)."""
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    _replace(temporary, final)
    sync_folder(Path(final).parent)


def _replace(temporary: str | Path, final: str | Path) -> None:
    """An error names the file that was to be, not the temporary one."""
    try:
        os.replace(temporary, final)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(final)) from error


def write_atomic(path: str | Path, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True) -> None:
    """Write a whole file under its final name, all or nothing: from bytes, or from parts one after the other.

    With `durable=False` a power cut may leave the old file or an empty one: for caches only.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)
