"""A folder of images as a source: which files are items, and how they are read.

Paths are handled as bytes, so that neither the locale nor a name that is no UTF-8 changes anything.  What is no item is counted by reason, never
dropped without a word.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.names import Choice, show, unreadable
from mmcompile.compiler.sources.splits import Layout
from mmcompile.compiler.sources.walk import OPEN_FLAGS, list_tree, stat_columns
from mmcompile.errors import SourceError
from mmcompile.format.canonical import name_to_json

__all__ = ["MAX_SOURCE_BYTES", "FolderSource", "beside"]

#: A larger file is refused before memory is taken for it: 178,956,970 pixels (the pixel limit) of 4 x 16 bit are 1.4 GB uncompressed.
MAX_SOURCE_BYTES = 2**31
#: What may lie beside each image under its name, and what reads it.
_BESIDE = {
    ".txt": "captions: a list (a CSV with file_name and caption, and --field caption:kind=text), or RAW as a tar (with --field txt:kind=text); "
    "boxes as YOLO has them: a folder labels/ beside images/",
    ".json": "RAW as a tar, or a list of the images with its values in columns, takes them",
    ".cls": "RAW as a tar takes them as labels",
    ".xml": "a list of the images with its values in columns, or a COCO file, takes them",
}
#: Images beside which that is looked for.
_LOOKED_AT = 20


@dataclass(frozen=True)
class FolderSource:
    """The images in the folder `root`, which is made absolute.

    `include` and `exclude` are fnmatch globs on the whole key (`*` matches `/` too), or exact keys.  With `include` only what matches
    counts; what matches `exclude` is taken out, and a folder that matches it is not entered (so it is no class either).  `hidden` takes
    names that begin with a dot, and `__MACOSX`.  `extensions` (lower case, with the dot) replaces the list of known formats; files
    without an extension are then left out, else their first 32 bytes decide.  `layout` says what are splits and classes where that is not to
    follow from the folders.
    """

    root: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    layout: Layout = field(default_factory=Layout)
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
            **self.layout.identity(),
        }

    def location(self) -> str:
        """Device and inode of the folder.  Raises SourceError where it is missing or no folder."""
        found = self._stat_root()
        return f"{found.st_dev}:{found.st_ino}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in ImageFolder's order; `progress` gets the number of images found so far.

        A file that cannot be looked at (a dangling link) is an item if it has the extension of an image; its `stat` is -1.  Raises
        SourceError: the folder is missing, a folder in it cannot be listed or contains itself, there is no image, or it cannot be told which
        folders are splits or classes.
        """
        from mmcompile.compiler.sources.manifest import unused_lists  # which is a FolderSource in part

        choice = Choice(self.include, self.exclude, self.hidden, self.extensions)
        found = arrange({"": self.root}, self.tree(choice, progress), choice, self.layout)
        return replace(found, warnings=(*found.warnings, *unused_lists(self.root, found.left_out), *beside(found, self.is_there)))

    def tree(self, choice: Choice, progress: Callable[[int], None] | None = None, prefix: bytes = b"") -> Iterator[Folder]:
        """Every folder of the tree with its items, in no particular order; all keys begin with `prefix`, a name.  Raises SourceError."""
        self._stat_root()
        return list_tree(self.root, choice, progress, prefix)

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: it cannot be opened, is no regular file, is over 2 GiB, or changed meanwhile."""
        path = self._path(key)
        fd = os.open(path, OPEN_FLAGS)
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
        return stat_columns(os.stat(self._path(key)))

    def is_there(self, key: bytes) -> bool:
        """Is there a file of this key, an item or not?"""
        return os.path.isfile(self._path(key))

    def _path(self, key: bytes) -> bytes:
        return os.path.join(os.fsencode(self.root), key)

    def _stat_root(self) -> os.stat_result:
        try:
            found = os.stat(self.root)
        except OSError as error:
            raise unreadable(self.root, error) from error
        if not stat_bits.S_ISDIR(found.st_mode):
            raise SourceError(f"RAW {show(self.root)} is no folder: expected a folder of images, or of class folders", path=self.root)
        return found


def beside(found: Scan, is_there: Callable[[bytes], bool]) -> Iterator[str]:
    """Warnings of files that tell of single images, and lie beside them under their names: nothing of a folder reads them."""
    for suffix, taken in _BESIDE.items():
        if not found.left_out.keys() & {f"extension {suffix}", "other extensions"}:
            continue
        for number in range(0, len(found.keys), -(-len(found.keys) // _LOOKED_AT)):
            key = os.path.splitext(found.keys[number])[0] + suffix.encode()
            if is_there(key):
                yield f"{show(os.fsdecode(key))} and others beside the image of the same name are left out; {taken}"
                break
