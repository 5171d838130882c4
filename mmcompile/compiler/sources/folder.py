"""A folder of images as a source: which files are items, in which order they stand, and what class they have.

Class folders are numbered and listed exactly as torchvision's ImageFolder does it; a folder whose sub-folders hold no image is a flat
folder without labels.  Listing is one `scandir` pass with one `stat` for each item; paths are handled as bytes, so that neither the
locale nor a name that is no UTF-8 changes anything.  What is no item is counted by reason, never dropped without a word.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat as stat_bits
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.formats import EXTENSIONS, sniff
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.names import Patterns, show
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text, name_to_json

__all__ = ["FolderSource"]

#: Folders of these names that hold class folders are the splits of one dataset, not classes.
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})

#: A larger file is refused before memory is taken for it: 178,956,970 pixels (the pixel limit) of 4 x 16 bit are 1.4 GB uncompressed.
_MAX_SOURCE_BYTES = 2**31

#: O_NONBLOCK: opening a FIFO that took a file's place returns at once; it has no effect on regular files.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_HEAD_BYTES = 32
_PROGRESS_EVERY = 8192
_MAX_EXTENSION_REASONS = 20
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
        direct = walk.list_folder("", b"", _ancestors(self.root, top))
        classes = sorted(direct.folders, key=lambda sub: sub.text)
        listed = [sorted(walk.list_tree(sub), key=lambda folder: folder.text) for sub in classes]
        filled = [any(folder.items for folder in folders) for folders in listed]
        if any(filled):
            with_images = [(sub.text, folders) for sub, folders, has in zip(classes, listed, filled, strict=True) if has]
            self._refuse_splits(with_images)
            walk.left_out["directly in RAW beside class folders"] += len(direct.items)
            names = tuple(sub.text for sub in classes)
            groups = [(number, folder) for number, folders in enumerate(listed) for folder in folders]
            warnings = _class_warnings(names, filled) + _layout_warnings(with_images)
            if direct.items:
                warnings.append(
                    f"{len(direct.items):,} images lie directly in RAW, beside class folders, and are left out: move them into a class folder"
                )
            return _as_scan(walk, groups, names, warnings)
        if direct.items:
            return _as_scan(walk, [(-1, direct)], None, [])
        raise SourceError(f"no images in {show(self.root)}: {_describe(walk)}", path=self.root, left_out=_reasons(walk.left_out))

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: it cannot be opened, is no regular file, is over 2 GiB, or changed meanwhile."""
        path = self._path(key)
        fd = os.open(path, _OPEN_FLAGS)
        try:
            before = os.fstat(fd)
            if not stat_bits.S_ISREG(before.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            if before.st_size > _MAX_SOURCE_BYTES:
                raise OSError(errno.EFBIG, f"{before.st_size} bytes, more than the {_MAX_SOURCE_BYTES} that are read", path)
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

    def _refuse_splits(self, filled: list[tuple[str, list[_Folder]]]) -> None:
        """Raise SourceError if top folders are splits: named so, one of them with class folders, and beside them no other or one more of them."""
        splits = [(name, folders) for name, folders in filled if name.lower() in _SPLIT_NAMES]
        if not splits or (len(splits) < 2 and len(splits) < len(filled)) or not any(_inner(name, folders) for name, folders in splits):
            return
        names = [name for name, _ in splits]
        first = "train" if "train" in names else names[0]
        raise SourceError(
            f"{show(self.root)} holds splits ({', '.join(names)}), each with class folders: build one of them, "
            f"mmcompile build {show(os.path.join(self.root, first))} OUT",
            path=self.root,
            splits=names,
        )


#: (name as text, name, (size, mtime_ns, ctime_ns, inode), device): a plain tuple, as there may be millions.
_Item = tuple[str, bytes, tuple[int, int, int, int], int]


class _Sub(NamedTuple):
    """A folder still to be listed; `text` and `key` are its path relative to RAW, `chain` the (device, inode) of all that it lies in."""

    text: str
    key: bytes
    chain: tuple[tuple[int, int], ...]


@dataclass
class _Folder:
    """What lies directly in one folder."""

    text: str
    key: bytes
    items: list[_Item] = field(default_factory=list)
    folders: list[_Sub] = field(default_factory=list)


class _Walk:
    """One pass over RAW: which entries count, and the sums of what was met."""

    def __init__(self, source: FolderSource, progress: Callable[[int], None] | None) -> None:
        self.source = source
        self.root = os.fsencode(source.root)
        self.progress = progress
        self.include = Patterns(source.include)
        self.exclude = Patterns(source.exclude)
        self.chosen = bool(self.include or self.exclude)
        self.left_out: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.found = 0
        self._known: dict[bytes, str] = {}  # suffix as it stands in a name -> "" for an image, else the reason to leave it out
        self._extensions = EXTENSIONS if source.extensions is None else source.extensions
        self._sniffs = source.extensions is None

    def list_tree(self, top: _Sub) -> list[_Folder]:
        """`top` and every folder below it, in no particular order."""
        todo, done = [top], []
        while todo:
            folder = self.list_folder(*todo.pop())
            todo += sorted(folder.folders, reverse=True)  # in order, so that the first fault is the same one on every file system
            done.append(folder)
        return done

    def list_folder(self, text: str, key: bytes, chain: tuple[tuple[int, int], ...]) -> _Folder:
        """One folder; its items are sorted by name as text.  Raises SourceError where it cannot be listed."""
        folder = _Folder(text, key)
        self.counts["folders"] += 1
        path = os.path.join(self.root, key) if key else self.root
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    self._enter(folder, entry, chain)
        except SourceError:
            raise
        except OSError as error:
            where = show(os.fsdecode(path))
            remedy = "make it readable, or leave it out with --exclude " + show(text) if text else "make it readable"
            raise SourceError(f"cannot list folder {where}: {error.strerror}; {remedy}", path=os.fsdecode(path)) from error
        folder.items.sort()  # names are unique, so nothing beyond them is compared
        if self.progress is not None:
            self.progress(self.found)
        return folder

    def _enter(self, folder: _Folder, entry: os.DirEntry[bytes], chain: tuple[tuple[int, int], ...]) -> None:
        raw_name = entry.name
        if not self.source.hidden and (raw_name[0] == 46 or raw_name == b"__MACOSX"):
            self.left_out["hidden"] += 1
            return
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link that leads round in circles, or where it may not be followed
            is_folder = False
        if is_folder:
            self._enter_folder(folder, entry, chain)
            return
        dot = raw_name.rfind(b".")
        suffix = raw_name[dot:] if dot >= 0 else b""
        reason = self._known.get(suffix)
        if reason is None:
            reason = self._known[suffix] = self._judge_suffix(suffix)
        if reason and not (reason == "no extension" and self._sniffs):
            self.left_out[reason] += 1
            return
        name = as_text(raw_name)
        if self.chosen:
            key_text = f"{folder.text}/{name}" if folder.text else name
            if self.exclude.match(key_text):
                self.left_out["excluded"] += 1
                return
            if self.include and not self.include.match(key_text):
                self.left_out["not included"] += 1
                return
        self._enter_file(folder, entry, name, has_extension=not reason)

    def _enter_folder(self, folder: _Folder, entry: os.DirEntry[bytes], chain: tuple[tuple[int, int], ...]) -> None:
        name = as_text(entry.name)
        text = f"{folder.text}/{name}" if folder.text else name
        if self.exclude and self.exclude.match(text):
            self.left_out["excluded folder"] += 1
            return
        found = entry.stat()
        here = (found.st_dev, found.st_ino)
        if here in chain:
            raise SourceError(
                f"folder {show(os.fsdecode(entry.path))} contains itself: it leads back to a folder that it lies in; "
                f"remove the link, or leave it out with --exclude {show(text)}",
                path=os.fsdecode(entry.path),
            )
        if entry.is_symlink():
            self.counts["links to folders"] += 1
        key = folder.key + b"/" + entry.name if folder.key else entry.name
        folder.folders.append(_Sub(text, key, (*chain, here)))

    def _enter_file(self, folder: _Folder, entry: os.DirEntry[bytes], name: str, *, has_extension: bool) -> None:
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
        folder.items.append((name, entry.name, columns, device))
        self.found += 1
        if self.progress is not None and self.found % _PROGRESS_EVERY == 0:
            self.progress(self.found)

    def _judge_suffix(self, suffix: bytes) -> str:
        text = as_text(suffix).lower()
        if len(text) <= 1:
            return "no extension"
        return "" if text in self._extensions else f"extension {show(text)}"

    def _is_image(self, path: bytes) -> bool:
        """Whether a file without an extension begins as a known format does; it is counted if not."""
        try:
            fd = os.open(path, _OPEN_FLAGS)
            try:
                head = os.read(fd, _HEAD_BYTES) if stat_bits.S_ISREG(os.fstat(fd).st_mode) else b""
            finally:
                os.close(fd)
        except OSError:
            self.left_out["unreadable, no extension"] += 1
            return False
        if sniff(head) is None:
            self.left_out["no extension, no image"] += 1
            return False
        return True


def _as_scan(walk: _Walk, groups: list[tuple[int, _Folder]], classes: tuple[str, ...] | None, warnings: list[str]) -> Scan:
    keys = [folder.key + b"/" + item[1] if folder.key else item[1] for _, folder in groups for item in folder.items]
    stat = np.array([item[2] for _, folder in groups for item in folder.items], dtype=STAT_DTYPE)
    devices = np.array([item[3] for _, folder in groups for item in folder.items], dtype=np.int64)
    labels = None
    if classes is not None:
        numbers = np.array([number for number, _ in groups], dtype=np.int64)
        labels = np.repeat(numbers, [len(folder.items) for _, folder in groups])
    again = _reached_again(devices, stat["inode"])
    if again:
        walk.counts["files reached again"] = again
    for option, patterns in (("--include", walk.include), ("--exclude", walk.exclude)):
        warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
    return Scan(keys, labels, stat, classes, _reasons(walk.left_out), tuple(warnings), dict(sorted(walk.counts.items())))


def _reached_again(devices: npt.NDArray[np.int64], inodes: npt.NDArray[np.int64]) -> int:
    """How many items are a file that another item is already (through links to it or to a folder above it, or as hard links)."""
    order = np.lexsort((inodes, devices))
    devices, inodes = devices[order], inodes[order]
    same = (devices[1:] == devices[:-1]) & (inodes[1:] == inodes[:-1]) & (devices[1:] != -1)
    return int(np.count_nonzero(same))


def _class_warnings(names: tuple[str, ...], filled: list[bool]) -> list[str]:
    warnings = []
    empty = [name for name, has in zip(names, filled, strict=True) if not has]
    if empty:
        shown = ", ".join(show(name) for name in empty[:5]) + (", …" if len(empty) > 5 else "")
        warnings.append(f"{len(empty)} of {len(names)} class folders hold no image (they keep their numbers): {shown}")
    if all(name.isascii() and name.isdigit() for name in names) and sorted(names, key=int) != list(names):
        pair = next((a, b) for a, b in itertools.pairwise(names) if int(a) > int(b))
        warnings.append(f"class folders are numbers and are sorted as text, as torchvision does: {pair[0]} stands before {pair[1]}")
    return warnings


def _inner(name: str, folders: list[_Folder]) -> set[str]:
    """The folders directly in a top folder that hold images, at any depth."""
    return {folder.text.removeprefix(name + "/").split("/")[0] for folder in folders if folder.items and folder.text != name}


def _layout_warnings(filled: list[tuple[str, list[_Folder]]]) -> list[str]:
    """Layouts that torchvision takes for classes, and a person perhaps not."""
    named = [name for name, _ in filled if name.lower() in _SPLIT_NAMES]
    if len(named) >= 2 or any(_inner(name, folders) for name, folders in filled if name in named):
        return [f"folders named like splits count as classes here: {', '.join(map(show, named))}; if they are splits, build one of them"]
    if len(filled) == 1 and len(inner := _inner(*filled[0])) >= 2:
        only = show(filled[0][0])
        return [f"there is one class, {only}, with {len(inner):,} folders in it; if those are the classes, build the folder {only}"]
    return []


def _reasons(left_out: Counter[str]) -> dict[str, int]:
    """The counts by reason, with at most 20 extensions by name: a million of `scan.000001` must not make a million reasons."""
    extensions = sorted((reason for reason in left_out if reason.startswith("extension ")), key=lambda reason: (-left_out[reason], reason))
    shown = Counter({reason: count for reason, count in left_out.items() if count})
    for reason in extensions[_MAX_EXTENSION_REASONS:]:
        shown["other extensions"] += shown.pop(reason)
    return dict(sorted(shown.items()))


def _describe(walk: _Walk) -> str:
    left_out = _reasons(walk.left_out)
    if not left_out:
        return "the folder is empty" if walk.counts["folders"] == 1 else f"{walk.counts['folders'] - 1} folders in it, and no file"
    largest = sorted(left_out, key=lambda reason: (-left_out[reason], reason))
    text = ", ".join(f"{left_out[reason]:,} {reason}" for reason in largest[:5])
    return f"left out were {text}" + (", …" if len(largest) > 5 else "")


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
