"""A folder of images as a source: how a tree on a disk is listed, and how its files are read.

Listing is one `scandir` pass with one `stat` for each item; paths are handled as bytes, so that neither the locale nor a name that is no UTF-8
changes anything.  What is no item is counted by reason, never dropped without a word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_bits
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice, show
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text, name_to_json

__all__ = ["HEAD_BYTES", "MAX_SOURCE_BYTES", "FolderSource"]

#: A larger file is refused before memory is taken for it: 178,956,970 pixels (the pixel limit) of 4 x 16 bit are 1.4 GB uncompressed.
MAX_SOURCE_BYTES = 2**31

#: O_NONBLOCK: opening a FIFO that took a file's place returns at once; it has no effect on regular files.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

#: What decides about a file without an extension.
HEAD_BYTES = 32
_NO_STAT = (-1, -1, -1, -1)


@dataclass(frozen=True)
class FolderSource:
    """The images in the folder `root`, which is made absolute.

    `include` and `exclude` are fnmatch globs on the whole key (`*` matches `/` too), or exact keys.  With `include` only what matches
    counts; what matches `exclude` is taken out, and a folder that matches it is not entered (so it is no class either).  `hidden` takes
    names that begin with a dot, and `__MACOSX`.  `extensions` (lower case, with the dot) replaces the list of known formats; files
    without an extension are then left out, else their first 32 bytes decide.
    """

    root: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    #: One more read on its way than is being decoded hides a disk; more only move its head.
    parallel: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", os.path.abspath(os.fsdecode(self.root)))
        object.__setattr__(self, "include", tuple(self.include))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.extensions is not None:
            object.__setattr__(self, "extensions", frozenset(self.extensions))

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {
            "kind": "folder",
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
            "hidden": self.hidden,
            "extensions": None if self.extensions is None else sorted(self.extensions),
        }

    def location(self) -> str:
        """Device and inode of the folder.  Raises SourceError where it is missing or no folder."""
        found = self._stat_root()
        return f"{found.st_dev}:{found.st_ino}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in ImageFolder's order; `progress` gets the number of images found so far.

        A file that cannot be looked at (a dangling link) is an item if it has the extension of an image; its `stat` is -1.  Raises
        SourceError: the folder is missing, a folder in it cannot be listed or contains itself, there is no image, or RAW holds splits.
        """
        top = self._stat_root()
        walk = _Walk(self, progress)
        return arrange(self.root, iter(walk.list_tree(_Sub(b"", _ancestors(self.root, top)))), walk.choice)

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: it cannot be opened, is no regular file, is over 2 GiB, or changed meanwhile."""
        path = self._path(key)
        fd = os.open(path, _OPEN_FLAGS)
        try:
            before = os.fstat(fd)
            if not stat_bits.S_ISREG(before.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            if before.st_size > MAX_SOURCE_BYTES:
                raise OSError(errno.EFBIG, f"{before.st_size} bytes, more than the {MAX_SOURCE_BYTES} that are read", path)
            data = os.read(fd, before.st_size)
            while len(data) < before.st_size and (more := os.read(fd, before.st_size - len(data))):
                data += more  # one read returns at most 2,147,479,552 bytes, and network file systems may return less
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if len(data) != before.st_size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError(errno.EAGAIN, "changed while read", path)
        return data

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of one item now, following links.  Raises OSError."""
        return _columns(os.stat(self._path(key)))

    def _path(self, key: bytes) -> bytes:
        return os.path.join(os.fsencode(self.root), key)

    def _stat_root(self) -> os.stat_result:
        try:
            found = os.stat(self.root)
        except OSError as error:
            raise SourceError(f"cannot read RAW {show(self.root)}: {error.strerror}", path=self.root) from error
        if not stat_bits.S_ISDIR(found.st_mode):
            raise SourceError(f"RAW {show(self.root)} is no folder: expected a folder of images, or of class folders", path=self.root)
        return found


class _Sub(NamedTuple):
    """A folder still to be listed; `key` is its path relative to RAW, `chain` the (device, inode) of all that it lies in."""

    key: bytes
    chain: tuple[tuple[int, int], ...]


class _Walk:
    """One pass over RAW."""

    def __init__(self, source: FolderSource, progress: Callable[[int], None] | None) -> None:
        self.root = os.fsencode(source.root)
        self.progress = progress
        self.choice = Choice(source.include, source.exclude, source.hidden, source.extensions)
        self.found = 0

    def list_tree(self, top: _Sub) -> list[Folder]:
        """`top` and every folder below it, in no particular order."""
        todo, done = [top], []
        while todo:
            listing = _Listing(self.root, self.choice, todo.pop())
            folder = listing.list()
            todo += sorted(listing.folders, reverse=True)  # in order, so that the first fault is the same one on every file system
            done.append(folder)
            self.found += len(folder.keys)
            if self.progress is not None:
                self.progress(self.found)
        return done


class _Listing:
    """What lies directly in one folder, while it is being found out."""

    def __init__(self, root: bytes, choice: Choice, sub: _Sub) -> None:
        self.choice, self.key, self.text, self.chain = choice, sub.key, as_text(sub.key), sub.chain
        self.path = os.path.join(root, sub.key) if sub.key else root
        self.folders: list[_Sub] = []
        self.names: list[bytes] = []
        self.columns = array("q")
        self.left_out: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def list(self) -> Folder:
        """Raises SourceError where the folder cannot be listed."""
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    self._enter(entry)
        except SourceError:
            raise
        except OSError as error:
            where = show(os.fsdecode(self.path))
            remedy = "make it readable, or leave it out with --exclude " + show(self.text) if self.text else "make it readable"
            raise SourceError(f"cannot list folder {where}: {error.strerror}; {remedy}", path=os.fsdecode(self.path)) from error
        columns = np.frombuffer(self.columns, np.int64).reshape(-1, 5)
        stat = np.ascontiguousarray(columns[:, :4]).view(STAT_DTYPE)[:, 0]
        folder = Folder.of(self.key, self.names, stat, columns[:, 4])
        folder.left_out, folder.counts = self.left_out, self.counts
        return folder

    def _enter(self, entry: os.DirEntry[bytes]) -> None:
        if self.choice.is_hidden(entry.name):
            self.left_out["hidden"] += 1
            return
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link that leads round in circles, or where it may not be followed
            is_folder = False
        if is_folder:
            self._enter_folder(entry)
            return
        reason = self.choice.why_not(entry.name, self.text)
        if reason and not (reason == NO_EXTENSION and self.choice.sniffs):
            self.left_out[reason] += 1
            return
        self._enter_file(entry, has_extension=not reason)

    def _enter_folder(self, entry: os.DirEntry[bytes]) -> None:
        key = self.key + b"/" + entry.name if self.key else entry.name
        if self.choice.excludes_folder(key):
            self.left_out["excluded folder"] += 1
            return
        found = entry.stat()
        here = (found.st_dev, found.st_ino)
        if here in self.chain:
            raise SourceError(
                f"folder {show(os.fsdecode(entry.path))} contains itself: it leads back to a folder that it lies in; "
                f"remove the link, or leave it out with --exclude {show(as_text(key))}",
                path=os.fsdecode(entry.path),
            )
        if entry.is_symlink():
            self.counts["links to folders"] += 1
        self.folders.append(_Sub(key, (*self.chain, here)))

    def _enter_file(self, entry: os.DirEntry[bytes], *, has_extension: bool) -> None:
        try:
            found = entry.stat()
        except OSError:
            if not has_extension:  # nothing says that it is an image
                self.left_out["dangling link" if entry.is_symlink() else "unreadable, no extension"] += 1
                return
            columns, device = _NO_STAT, -1
        else:
            if not stat_bits.S_ISREG(found.st_mode):
                self.left_out["not a regular file"] += 1
                return
            if not has_extension and not self._is_image(entry.path):
                return
            columns, device = _columns(found), found.st_dev
        if entry.is_symlink():
            self.counts["links to files"] += 1
        self.names.append(entry.name)
        self.columns.extend((*columns, device))

    def _is_image(self, path: bytes) -> bool:
        """Whether a file without an extension begins as a known format does; it is counted if not."""
        try:
            fd = os.open(path, _OPEN_FLAGS)
            try:
                head = os.read(fd, HEAD_BYTES) if stat_bits.S_ISREG(os.fstat(fd).st_mode) else b""
            finally:
                os.close(fd)
        except OSError:
            self.left_out["unreadable, no extension"] += 1
            return False
        if sniff(head) is None:
            self.left_out["no extension, no image"] += 1
            return False
        return True


def _ancestors(root: str, found: os.stat_result) -> tuple[tuple[int, int], ...]:
    """(device, inode) of RAW and of every folder above it: a link to one of these would list RAW within RAW."""
    chain = [(found.st_dev, found.st_ino)]
    path = os.path.realpath(root)
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        with contextlib.suppress(OSError):  # a folder above that may not be looked at; a loop is then found one round later
            above = os.stat(path)
            chain.append((above.st_dev, above.st_ino))
    return tuple(chain)


def _columns(found: os.stat_result) -> tuple[int, int, int, int]:
    inode = found.st_ino if found.st_ino < 2**63 else found.st_ino - 2**64  # some file systems use all 64 bits
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode
