"""Hides that images lie in archives: which archives a RAW is, and how a member is read where it lies.  Nothing is ever unpacked to a disk."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.keys import place_of
from mmcompile.compiler.sources.members import TOO_LARGE, ArchiveFile, Descriptors, Place, member_stats
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.compiler.sources.pairing import Pairing
from mmcompile.compiler.sources.splits import Layout
from mmcompile.compiler.sources.tar import BLOCK
from mmcompile.compiler.sources.webdataset import TarMembers, list_tar
from mmcompile.errors import SourceError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.npy import hash_bytes

__all__ = ["ArchiveSource", "archives_in", "is_archive"]

#: Archives that are listed at a time: a disk or a network serves several requests as fast as one.
_THREADS = 8
#: Endings of names: of a tar archive, and of one that was compressed.
_TAR_LIKE = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst", ".tar.lz4")


def is_archive(path: str) -> bool:
    """Does this look like a tar archive, compressed or not, or a folder of them: one that holds neither folders nor images beside them?"""
    if not os.path.isdir(path):
        return path.lower().endswith(_TAR_LIKE)
    found = False
    choice = Choice((), (), False, None)
    with os.scandir(path) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if choice.is_hidden(name):
                continue
            if entry.is_dir() or not choice.why_not(name, ""):
                return False
            found |= entry.name.lower().endswith(_TAR_LIKE)
    return found


def archives_in(raw: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(the folder that all archives lie in, their paths below it in order as text) of archives, or of a folder of them.  Raises SourceError."""
    if len(raw) == 1 and os.path.isdir(raw[0]):
        try:
            names = sorted(name for name in os.listdir(raw[0]) if name.lower().endswith(_TAR_LIKE) and not name.startswith("."))
        except OSError as error:
            raise SourceError(f"cannot list folder {show(raw[0])}: {error.strerror}", path=raw[0]) from error
        if not names:
            raise SourceError(f"no archives in {show(raw[0])}: expected files called .tar", path=raw[0])
        return raw[0], tuple(names)
    for path in raw:
        if os.path.isdir(path):
            raise SourceError(f"{show(path)} is a folder: give archives, or one folder of archives", path=path)
    folder = os.path.commonpath([os.path.dirname(path) for path in raw])
    names = sorted(os.path.relpath(path, folder) for path in raw)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{show(os.path.join(folder, twice))} was given twice", path=os.path.join(folder, twice))
    return folder, tuple(names)


@dataclass(frozen=True)
class ArchiveSource:
    """The images in archives: `raw` are their absolute paths, or that of one folder of them.

    A key is the member's name, behind the archive's path below the folder that all lie in and "/" where there may be several.  `include`,
    `exclude`, `hidden`, `extensions` and `layout` mean what they mean for folders.
    """

    raw: tuple[str, ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    layout: Layout = field(default_factory=Layout)
    #: The folder of the archives, and their names in it: as they were when this was made, so that numbers in places mean the same everywhere.
    folder: str = field(init=False)
    names: tuple[str, ...] = field(init=False)
    _descriptors: Descriptors = field(default_factory=Descriptors, init=False, compare=False, repr=False)
    #: One more read on its way than is being decoded hides a disk; more only move its head.
    parallel: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", tuple(os.path.abspath(path) for path in self.raw))
        folder, names = archives_in(self.raw)
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "names", names)

    @property
    def roots(self) -> tuple[str, ...]:
        """All that OUT must not lie in: the folder of archives that was given, or each archive."""
        return self.raw

    @property
    def root(self) -> str:
        """What a message calls them."""
        return ", ".join(self.raw[:3]) + (", …" if len(self.raw) > 3 else "")

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {
            "kind": "tar",
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
            "hidden": self.hidden,
            "extensions": None if self.extensions is None else sorted(self.extensions),
            **self.layout.identity(),
        }

    def location(self) -> str:
        """Tells where the archives lie, by their folder and names.  Raises SourceError."""
        try:
            found = os.stat(self.folder)
        except OSError as error:
            raise SourceError(f"cannot read RAW {show(self.folder)}: {error.strerror}", path=self.folder) from error
        names = "" if self.raw == (self.folder,) else hash_bytes("/".join(self.names).encode("utf-8", "surrogateescape"))
        return f"archives {found.st_dev}:{found.st_ino} {names}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the samples, archive by archive; `progress` gets the number of images found so far.  Raises SourceError, naming archive and byte."""
        choice = Choice(self.include, self.exclude, self.hidden, self.extensions)
        pairing = Pairing(self.layout.classes)
        found = 0
        for members in self._listed(choice):
            pairing.add(members)
            found += len(members.keys)
            if progress is not None:
                progress(found)
        scan = pairing.scan()
        return scan

    def _listed(self, choice: Choice) -> Iterator[TarMembers]:
        """What is in each archive, in order; a few are listed ahead."""
        waiting: list[Future[TarMembers]] = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="list") as pool:
            try:
                for number in range(len(self.names)):
                    waiting.append(pool.submit(self._list, number, choice))
                    if len(waiting) > 2 * _THREADS:
                        yield waiting.pop(0).result()
                while waiting:
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()

    def _list(self, number: int, choice: Choice) -> TarMembers:
        file = ArchiveFile(self._path(number))
        try:
            return list_tar(file, number, self._prefix(number), choice)
        finally:
            file.close()

    def read(self, key: bytes) -> bytes:
        """The bytes of one member.  Raises OSError: the archive cannot be opened or was changed, or the member has 2 GiB or more."""
        place = Place.of(place_of(key))
        path = self._path(place.archive)
        if place.size >= TOO_LARGE:
            raise OSError(errno.EFBIG, f"{place.size} bytes or more, which are not read", path)
        with self._descriptors.reading(path) as fd:
            header = os.pread(fd, BLOCK, place.at - BLOCK)
            data = os.pread(fd, place.size, place.at)
            while len(data) < place.size and (more := os.pread(fd, place.size - len(data), place.at + len(data))):
                data += more  # network file systems may return less
        if zlib.crc32(header) != place.check or len(data) != place.size:
            raise OSError(errno.EAGAIN, "its archive changed since it was listed", path)
        return data

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(bytes, the archive's mtime_ns and ctime_ns, its inode mixed with the place) of one member now.  Raises OSError."""
        place = place_of(key)
        found = member_stats(np.array([place]), os.stat(self._path(Place.of(place).archive)))
        size, mtime, ctime, inode = found[0].tolist()
        return size, mtime, ctime, inode

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, self.names[number])

    def _prefix(self, number: int) -> bytes:
        """What keys of an archive begin with."""
        alone = len(self.raw) == 1 and self.raw[0] != self.folder
        return b"" if alone else os.fsencode(self.names[number]) + b"/"
