"""Hides how the images that a list names are found: the folders that it names are listed, each once, and held against it.

Nothing that the list names lies outside its folder, and each image is named once; all that is wrong is found before anything is decoded.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from bisect import insort
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.compiler.sources.walk import list_folders, stat_columns
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_text
from mmcompile.text import counted

__all__ = ["Faults", "find_files", "folder_of", "found_in", "image_folder", "path_below", "refuse_twice", "relative_keys"]

#: Faults that an error names; all are counted.
_NAMED = 5
#: Folders in which images may lie that are looked into, and what Linux takes for a path at most.
_FOLDERS, _LONGEST = 64, 4096
#: What a path holds that is not written the one way in which a key is.
_UNUSUAL = re.compile(rb"(?:^|/)\.{0,2}(?:/|$)|\0")


class Faults:
    """What is wrong with rows of a list: counted, and the first rows of them named, in one error."""

    def __init__(self, where: Callable[[int], str], what: str, one: str = "rows") -> None:
        self._where, self._what, self._one = where, what, one
        #: The rows (M,) that places in what is looked at now are; None: they are the rows.
        self.rows: npt.NDArray[np.int64] | None = None
        #: Columns beside the main one that the places behind those are of: as many places each as there are rows.
        self.columns: Sequence[str] = ()
        #: What helps against some of them.
        self.hint = ""
        self._first: list[tuple[int, str]] = []
        self._count = 0

    def where(self, at: int) -> str:
        """The row at a place, as a person finds it."""
        if self.rows is None:
            return self._where(at)
        column, at = divmod(at, max(1, len(self.rows)))
        return self._where(int(self.rows[at])) + (f", column {show(self.columns[column - 1])}" if column else "")

    def add(self, at: int, why: str) -> None:
        self._count += 1
        row = at if self.rows is None else int(self.rows[at % max(1, len(self.rows))])
        if len(self._first) < _NAMED or row < self._first[-1][0]:
            insort(self._first, (row, f"{self.where(at)}: {why}"))
            del self._first[_NAMED:]

    def raise_any(self) -> None:
        """Raises SourceError where there is a fault."""
        if self._count:
            more = f"; and {self._count - _NAMED:,} more" if self._count > _NAMED else ""
            count = f"{counted(self._count, self._one)} of {self._what} cannot be built: "
            raise SourceError(count + "; ".join(line for _, line in self._first) + more + self.hint, count=self._count)


def image_folder(images: str) -> FolderSource:
    """The folder that `--images` says.  Raises OptionError where it is none."""
    if not os.path.isdir(images):
        raise OptionError(f"--images {show(images)}: no such folder", options=["images"])
    return FolderSource(images)


def found_in(paths: Sequence[str], folder: str) -> int:
    """How many of these are paths of files, relative to a folder."""
    return sum(len(path) < _LONGEST and "\0" not in path and os.path.isfile(os.path.join(folder, path)) for path in paths)


def folder_of(paths: Sequence[str], folder: str) -> tuple[str, int]:
    """(the folder directly in this one in which most of these paths are files: its name, or ""; how many are)."""
    below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))[:_FOLDERS]
    hits, name = max(((found_in(paths, os.path.join(folder, name)), name) for name in reversed(below)), key=lambda found: found[0], default=(0, ""))
    return (name, hits) if hits else ("", 0)


def relative_keys(paths: Keys, folder: bytes, faults: Faults, prefix: Callable[[int], bytes], first: int = 0) -> Keys:
    """The keys that paths name: plain paths below `prefix(row)`, which is below `folder`.  A path that leaves it is a fault, and an empty key.

    Rows count from `first`.
    """
    return Keys.of(_plain(paths, folder, faults, prefix, first))


def _plain(paths: Keys, folder: bytes, faults: Faults, prefix: Callable[[int], bytes], first: int) -> Iterator[bytes]:
    for row, path in enumerate(paths, first):
        key, why = path_below(path, folder, prefix(row))
        if why:
            faults.add(row, why)
        yield key


def path_below(path: bytes, folder: bytes, base: bytes) -> tuple[bytes, str]:
    """(the key below `folder` of what a path names below `base` in it; b"" and why there is none)."""
    if not path or _UNUSUAL.search(path):
        why = ""
        plain = posixpath.normpath(path)
        if plain.startswith(b"/"):
            inside = os.path.join(folder, base).rstrip(b"/") + b"/"
            plain = plain[len(inside) :] if plain.startswith(inside) else b".."
        if not path:
            why = "no path"
        elif b"\0" in path:
            why = "a path with a NUL"
        elif plain == b".." or plain.startswith(b"../"):
            why = f"{_shown(path)} leaves the folder {show(as_text(os.path.join(folder, base)))}"
        elif plain == b"." or path.endswith(b"/"):
            why = f"{_shown(path)} is a folder"
        if why:
            return b"", why
        path = plain
    return base + b"/" + path if base else path, ""


def refuse_twice(keys: Keys, faults: Faults) -> str:
    """Each key that stands twice is a fault.  Returns a warning where keys differ in case only, or ""."""
    where, hashes = faults.where, keys.hashes()
    order = np.argsort(hashes, kind="stable")
    for a, b in _pairs(hashes, order):
        if keys[a] == keys[b] != b"":
            faults.add(b, f"{_shown(keys[b])} stands in {where(a)} already")
    small = Keys.of(as_text(key).casefold().encode("utf-8", "surrogateescape") for key in keys).hashes()
    order = np.argsort(small, kind="stable")
    alike = [(a, b) for a, b in _pairs(small, order) if keys[a] != keys[b]]
    if not alike:
        return ""
    a, b = alike[0]
    return f"names that differ from another in case only: {len(alike):,}, as {_shown(keys[a])} ({where(a)}) and {_shown(keys[b])} ({where(b)})"


def _pairs(hashes: npt.NDArray[np.uint64], order: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Neighbours in `order` (N,) of the same hash, by the later of the two."""
    at = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    return sorted(zip(order[at].tolist(), order[at + 1].tolist(), strict=True), key=lambda pair: pair[1])


def find_files(folder: str, keys: Keys, faults: Faults, progress: Callable[[int], None] | None = None) -> tuple[npt.NDArray[np.void], int]:
    """(STAT_DTYPE (N,) of the files with these keys below `folder`; how many images beside them no key names).

    A file that is not there, or is no file, is a fault.  Raises SourceError where a folder cannot be listed.
    """
    root = os.fsencode(folder)
    folders = {posixpath.dirname(key) for key in keys if key}
    there = [name for name in sorted(folders) if os.path.isdir(os.path.join(root, name))]
    found = list(list_folders(folder, there, Choice((), (), False, None), progress))
    names = Keys.join([part.keys for part in found])
    stats = np.concatenate([np.empty(0, STAT_DTYPE), *(part.stat for part in found)])
    hashes = names.hashes()
    order = np.argsort(hashes)
    at = np.searchsorted(hashes, keys.hashes(), sorter=order)
    place = order[np.minimum(at, len(order) - 1)] if len(order) else np.empty(0, np.int64)
    stat = np.full(len(keys), -1, np.int64).repeat(4).view(STAT_DTYPE)
    known = np.zeros(len(keys), bool)
    if len(place):
        known = np.fromiter(itertools.starmap(bytes.__eq__, zip(keys, names.take(place), strict=True)), bool, len(keys))
        known &= stats["size"][place] >= 0
        stat[known] = stats[place[known]]
    for row in np.flatnonzero(~known).tolist():
        if key := keys[row]:
            try:
                facts = os.stat(os.path.join(root, key))
            except OSError as error:
                hint = "; write / for \\ in paths" if b"\\" in key else ""
                faults.hint = f" (looked for below {show(folder)}; --images names another folder)"
                faults.add(row, f"{_shown(key)}: {'no such file' if isinstance(error, FileNotFoundError) else error.strerror}{hint}")
                continue
            if not os.path.isfile(os.path.join(root, key)):
                faults.add(row, f"{_shown(key)} is no file")
            stat[row] = stat_columns(facts)
    return stat, len(names) - len(np.unique(place[known])) if len(place) else len(names)


def _shown(path: bytes) -> str:
    return show(as_text(path))[:200]
