"""Hides how a member of an archive is found again: what its place is, which file descriptor it is read by, and how a change is noticed.

An archive is read with `pread` alone, so threads share a descriptor.  A source holds a few of them open, and none in its pickle.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources.arrange import Folder
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, show, unreadable
from mmcompile.compiler.sources.walk import OPEN_FLAGS, stat_columns
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = [
    "TOO_LARGE",
    "ArchiveFile",
    "Blob",
    "Descriptors",
    "FolderRules",
    "Member",
    "Place",
    "TreeMembers",
    "first_twice",
    "member_stat",
    "member_stats",
    "plain_name",
    "refuse_twice",
]

#: A member of so many bytes is not read (see MAX_SOURCE_BYTES), so that a size takes 31 bits of a place.
TOO_LARGE = 2**31 - 1
#: Stored bytes of a member up to here; more is not read either.
_MOST_STORED = 2**32 - 1
#: Archives at most, so that a number and 32 bits to check by fill 63.
_ARCHIVES = 2**31
#: 2^64 divided by the golden ratio: multiplying by an odd number modulo 2^64 loses nothing, and by this one spreads neighbours.
_ODD, _BITS = 0x9E3779B97F4A7C15, 2**64 - 1
#: Descriptors that are kept open: those of the shards that a few workers' threads read at once.
_OPEN = 16


class Member(NamedTuple):
    """A regular file in an archive: its name with `/`, where it begins, its bytes, and 32 bits that tell it from another (see Place)."""

    name: bytes
    at: int
    size: int
    check: int


class Place(NamedTuple):
    """The numbers of a Placed key: archive + 2^31 * check, offset, stored bytes + 2^32 * bytes.

    `check` is the CRC-32 of a tar member's header, the 512 bytes before its offset, and of a zip member's content.
    """

    archive: int
    check: int
    at: int
    size: int
    stored: int

    @classmethod
    def of(cls, place: tuple[int, int, int]) -> Place:
        first, at, sizes = place
        return cls(first & (_ARCHIVES - 1), first >> 31, at, sizes >> 32, sizes & _MOST_STORED)

    @staticmethod
    def packed(
        archive: int, checks: npt.NDArray[np.int64], at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], stored: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Places (N, 3) of members of one archive."""
        return np.stack([archive | checks << 31, at, np.minimum(sizes, TOO_LARGE) << 32 | np.minimum(stored, _MOST_STORED)], axis=1)


def member_stats(places: npt.NDArray[np.int64], found: os.stat_result) -> npt.NDArray[np.void]:
    """STAT_DTYPE (N,) of members at `places` (N, 3) of an archive, as `member_stat` has them."""
    _, mtime, ctime, inode = stat_columns(found)
    out = np.zeros(len(places), STAT_DTYPE)
    out["size"], out["mtime_ns"], out["ctime_ns"] = places[:, 2] >> 32, mtime, ctime
    numbers = places.astype(np.uint64)  # products of uint64 arrays are modulo 2^64
    mixed = (numbers[:, 0] >> np.uint64(31)) ^ (numbers[:, 1] * np.uint64(_ODD))
    out["inode"] = ((mixed ^ (mixed >> np.uint64(32))) * np.uint64(_ODD) ^ np.uint64(inode & _BITS)).view(np.int64)
    return out


def member_stat(place: tuple[int, int, int], found: os.stat_result) -> tuple[int, int, int, int]:
    """A member's own size, the archive's mtime_ns and ctime_ns, and its inode mixed with the place."""
    _, mtime, ctime, inode = stat_columns(found)
    mixed = (place[0] >> 31) ^ (place[1] * _ODD & _BITS)
    mixed = (mixed ^ (mixed >> 32)) * _ODD & _BITS ^ inode & _BITS
    return place[2] >> 32, mtime, ctime, mixed if mixed < 2**63 else mixed - 2**64


def first_twice(numbers: npt.NDArray[np.uint64]) -> tuple[int, int] | None:
    """The first two places in (N,) that hold the same number; None where all differ."""
    order = np.argsort(numbers, kind="stable")
    same = np.flatnonzero(numbers[order[1:]] == numbers[order[:-1]])
    if not len(same):
        return None
    at = same[np.argmin(order[same + 1])]
    return int(order[at]), int(order[at + 1])


def refuse_twice(file: ArchiveFile, keys: Keys, at: npt.NDArray[np.int64]) -> None:
    """Raises SourceError where two images in an archive, which lie at these bytes (N,), have one name."""
    if pair := first_twice(keys.hashes()):
        a, b = (f"byte {int(at[i]):,}" for i in pair)
        raise SourceError(
            f"{file.shown}: two members are called {show(as_text(keys[pair[0]]))} (at {a} and {b}): pack it anew, each with its own name",
            path=file.path,
        )


@dataclass
class TreeMembers:
    """The N images in an archive, in its order: `keys` with places, STAT_DTYPE (N,); `folders`: keys of those that are in it, with images or without.

    `left_out` counts what is no image.
    """

    keys: Keys
    stat: npt.NDArray[np.void]
    folders: set[bytes]
    left_out: Counter[str]

    def as_folders(self, top: bytes, rules: FolderRules) -> Iterator[Folder]:
        """Every folder with its images, from `top` on, in no particular order."""
        items: dict[bytes, array[int]] = {top: array("q")}
        for folder in self.folders:
            if (not top or folder == top or folder.startswith(top + b"/")) and not rules.of(folder)[1]:
                items[folder] = array("q")
        bases = Blob()
        for i, key in enumerate(self.keys.bare):
            slash = key.rfind(b"/")
            bases.add(key[slash + 1 :])
            folder = key[: max(slash, 0)]
            while folder not in items:
                items[folder] = array("q")
                folder = folder.rpartition(b"/")[0]
            items[key[: max(slash, 0)]].append(i)
        names = bases.keys(self.keys.places)
        for folder, numbers in items.items():
            rows = np.frombuffer(numbers, np.int64)
            made = Folder.of(folder, names.take(rows), self.stat[rows])
            if folder == top:
                made.left_out = self.left_out
            yield made


class Blob:
    """Byte strings, one behind the other."""

    def __init__(self) -> None:
        self._blob, self._lengths = bytearray(), array("q")

    def add(self, text: bytes) -> None:
        self._blob += text
        self._lengths.append(len(text))

    def keys(self, places: npt.NDArray[np.int64] | None = None) -> Keys:
        """All of them; with the places (N, 3) of each."""
        return Keys(np.frombuffer(self._blob, np.uint8), np.cumsum(np.frombuffer(self._lengths, np.int64)), places=places)


def plain_name(name: bytes) -> bytes:
    """A member's name without `./` and doubled `/`; empty for one that leads out of the archive, or names nothing."""
    if b"//" in name or b"./" in name or name[-1:] in (b"/", b".") or name[:1] == b"/" or b"\0" in name:
        parts = name.split(b"/")
        if not parts[0] or b".." in parts or b"\0" in name:
            return b""
        return b"/".join(part for part in parts if part not in (b"", b"."))
    return name


class FolderRules:
    """Which folders of an archive count: as in a tree of files, nothing in a hidden or excluded folder does."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._known: dict[bytes, tuple[str, str]] = {b"": ("", "")}

    def of(self, folder: bytes) -> tuple[str, str]:
        """(its key as text, why nothing in it counts or "")."""
        known = self._known.get(folder)
        if known is None:
            above, _, name = folder.rpartition(b"/")
            why = self.of(above)[1]
            if not why:
                why = "hidden" if self._choice.is_hidden(name) else "excluded folder" if self._choice.excludes_folder(folder) else ""
            known = self._known[folder] = as_text(folder), why
        return known


class ArchiveFile:
    """An archive while it is listed: `size` bytes, `found` its stat.  Raises SourceError where it cannot be read."""

    def __init__(self, path: str) -> None:
        self.path, self.shown = path, show(path)
        with self._told():
            self._fd = os.open(path, OPEN_FLAGS)
            self.found = os.fstat(self._fd)
        self.size = self.found.st_size
        if not stat_bits.S_ISREG(self.found.st_mode):
            self.close()
            raise SourceError(f"{self.shown}: no regular file; expected an archive", path=path)

    def read(self, at: int, size: int) -> bytes:
        """The bytes [at, at + size), as far as there are any."""
        with self._told():
            data = os.pread(self._fd, size, at)
            while len(data) < min(size, self.size - at) and (more := os.pread(self._fd, size - len(data), at + len(data))):
                data += more
        return data

    def check_unchanged(self) -> None:
        """Raises SourceError where the archive was written meanwhile."""
        with self._told():
            now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.found.st_mtime_ns):
            raise SourceError(f"{self.shown}: changed while it was listed; build again when it is finished", path=self.path)

    def close(self) -> None:
        os.close(self._fd)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from error


class Descriptors:
    """Open archives, the least used of which are closed; threads may share it.  It pickles empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Opened] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __del__(self) -> None:
        for opened in self._open.values():
            os.close(opened.fd)

    @contextmanager
    def reading(self, path: str) -> Iterator[int]:
        """A descriptor of the archive that lies at `path` now.  Raises OSError where it cannot be opened, or changed while it was read from."""
        before = os.stat(path)
        opened = self._take(path, before)
        try:
            yield opened.fd
            after = os.fstat(opened.fd)
        finally:
            self._give(opened)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError(errno.EAGAIN, "changed while read", path)

    def _take(self, path: str, found: os.stat_result) -> _Opened:
        with self._lock:
            opened = self._open.pop(path, None)
            if opened is not None and opened.inode != (found.st_dev, found.st_ino):  # another file took its place
                self._let_go(opened)
                opened = None
            if opened is None:
                if not stat_bits.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                fd = os.open(path, OPEN_FLAGS)
                inode = os.fstat(fd)
                opened = _Opened(fd, (inode.st_dev, inode.st_ino))
            self._open[path] = opened  # the last one used stands last
            opened.users += 1
            while len(self._open) > _OPEN:
                self._let_go(self._open.pop(next(iter(self._open))))
            return opened

    def _give(self, opened: _Opened) -> None:
        with self._lock:
            opened.users -= 1
            if opened.dropped and not opened.users:
                os.close(opened.fd)

    @staticmethod
    def _let_go(opened: _Opened) -> None:
        """Close it, now or when its last user is done."""
        opened.dropped = True
        if not opened.users:
            os.close(opened.fd)


class _Opened:
    def __init__(self, fd: int, inode: tuple[int, int]) -> None:
        self.fd, self.inode = fd, inode
        self.users = 0
        self.dropped = False
