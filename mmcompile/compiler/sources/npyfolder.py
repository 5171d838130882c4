"""A folder of equal `.npy` files as a source: each file is one sample, in the order of their names; class folders give labels, and folders that are
called like splits are splits, with class folders in them or flat.

Names and stats are held in columns, and a file is opened when its row is read.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import LABEL
from mmcompile.compiler.sources.arrays import Meanings, as_field, as_stored, as_words
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.lies import Lies, lies_in_npy, stat_of
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.rows import RowScan, settled
from mmcompile.compiler.sources.splits import Base, Layout, find_bases, rank
from mmcompile.compiler.sources.tablefiles import extension_of, holds_itself
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.fields import Split
from mmcompile.text import counted

__all__ = ["NpyFolder"]

#: Files found between two words of progress.
_STEP = 10_000


def _listed(root: str, left_out: Counter[str]) -> dict[str, list[str]]:
    """Each folder below `root`, relative to it ("" for itself), and its .npy files, sorted as text; `left_out` counts others by extension.

    Raises SourceError: a folder cannot be read, or contains itself.
    """

    def fail(error: OSError) -> None:
        raise unreadable(str(error.filename or root), error) from error

    found: dict[str, list[str]] = {}
    for here, below, names in os.walk(root, followlinks=True, onerror=fail):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if holds_itself(here, root):
            raise SourceError(f"{show(here)}: a folder that contains itself", path=here)
        names = [name for name in names if not name.startswith(".")]
        found[os.path.relpath(here, root) if here != root else ""] = sorted(name for name in names if name.endswith(".npy"))
        left_out.update(extension_of(name) for name in names if not name.endswith(".npy"))
    return found


def _form(lies: Lies) -> str:
    return f"{lies.dtype} {lies.shape} in {'Fortran' if lies.fortran else 'C'} order"


class NpyFolder:
    """The .npy files in `root`, or in its class folders; all of one dtype and shape.  `splits`: (name, folder below it) of each that was given."""

    item_by_item = by_index = True

    def __init__(self, root: str, meanings: Meanings | None = None, splits: tuple[tuple[str, str], ...] = ()) -> None:
        self._root, self._meanings = os.path.abspath(root), dict(meanings or {})
        self._layout = Layout(splits)
        self._keys: Keys | None = None
        self._labels: npt.NDArray[np.int64] | None = None
        self._first: Lies | None = None
        self._size = 0

    @property
    def root(self) -> str:
        return self._root

    def identity(self) -> dict[str, object]:
        """The settings that decide which rows there are and what they hold."""
        return {"kind": "npy-folder", "as": as_words(self._meanings), **self._layout.identity()}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """List the files and look at each one's size; the first says what all hold.  Raises SourceError."""
        progress = progress or (lambda _: None)
        left_out: Counter[str] = Counter()
        tree = _listed(self._root, left_out)
        bases = self._bases(tree)
        found = [(base, folder) for base in bases for folder in self._folders(tree, base)]
        taken = {folder for _, folder in found}
        left_out[".npy"] += sum(len(names) for folder, names in tree.items() if folder not in taken)
        classes = tuple(sorted({os.path.relpath(folder, base.folder or ".") for base, folder in found if folder != base.folder})) or None
        stamp, young, counts = xxhash.xxh3_128(repr(classes).encode("utf-8", "surrogateescape")), False, []  # an empty class moves numbers

        def walk() -> Iterator[bytes]:
            nonlocal young
            n = 0
            for _, folder in found:
                names = tree[folder]
                counts.append(len(names))
                for name in names:
                    key = os.path.join(folder, name)
                    try:
                        stat = stat_of(os.stat(os.path.join(self._root, key)))
                    except OSError as error:
                        raise SourceError(f"{show(os.path.join(self._root, key))}: cannot be read ({error.strerror})", path=key) from error
                    stamp.update(f"{key!r} {stat}\n".encode("utf-8", "surrogateescape"))
                    young |= not settled(stat)
                    self._size = self._size or stat[0]
                    if stat[0] != self._size:
                        raise SourceError(
                            f"{show(key)}: {stat[0]:,} bytes, {show(as_text(first))} has {self._size:,}: expected arrays of one dtype and shape",
                            path=os.path.join(self._root, key),
                        )
                    n += 1
                    if n % _STEP == 0:
                        progress(n)
                    yield os.fsencode(key)

        self._size, first = 0, os.fsencode(os.path.join(*next(((folder, tree[folder][0]) for _, folder in found if tree[folder]), ("", ""))))
        self._keys = keys = Keys.of(walk())
        if not len(keys):
            raise SourceError(f"{show(self._root)}: no .npy file, and no class folder that holds one", path=self._root)
        self._first = lies_in_npy(os.path.join(self._root, os.fsdecode(keys[0])), sample=True)
        warnings = []
        if classes is not None:
            number = {name: i for i, name in enumerate(classes)}
            numbers = [number.get(os.path.relpath(folder, base.folder or "."), -1) for base, folder in found]
            self._labels = np.repeat(np.array(numbers, np.int64), counts)
            warnings = [
                f"in no class folder, and so of label -1: {counted(len(tree[folder]), 'arrays')} of {show(os.path.join(self._root, folder))}"
                for base, folder in found
                if folder == base.folder
            ]
        else:
            self._labels = None
        field = as_field("x", self._first.dtype, self._first.shape, self._first.named, self._meanings, alone=True)
        fields = (field,) if classes is None else (field, LABEL)
        sizes = Counter[str]()
        for (base, _), n in zip(found, counts, strict=True):
            sizes[base.split] += n
        if empty := next((name for name, n in sizes.items() if not n), None):
            raise SourceError(f"{show(self._root)}: no .npy file is in split {show(empty)}", path=self._root)
        stops = np.cumsum(list(sizes.values())).astype(np.int64)
        edges = itertools.pairwise([0, *stops.tolist()])
        splits = tuple(Split(name, start, stop) for name, (start, stop) in zip(sizes, edges, strict=True)) if set(sizes) != {"all"} else ()
        stamps = ("" if young else stamp.hexdigest(),) * len(sizes)
        told = {f"left out ({extension})": n for extension, n in sorted(left_out.items()) if n}
        return RowScan(len(keys), fields, ("",) * len(sizes), stops, stamps, splits, classes, tuple(warnings), told)

    def where(self, row: int) -> str:
        """A row as a person finds it: a file."""
        if self._keys is None:
            self.scan()
        assert self._keys is not None
        return show(os.path.join(self._root, os.fsdecode(self._keys[row])))

    def _bases(self, tree: Mapping[str, list[str]]) -> list[Base]:
        """The folders that are the splits, in order; the root where there are none.  Raises SourceError."""
        if lost := next((folder for _, folder in self._layout.splits if folder not in tree), None):
            raise SourceError(f"{show(os.path.join(self._root, lost))}: no such folder, which --split names", path=self._root)
        tops: dict[str, bool] = {}
        for folder, names in tree.items():
            top, _, inside = folder.partition("/")
            if top and names and inside.count("/") == 0:
                tops[top] = tops.get(top, False) or bool(inside)
        found = find_bases({"": self._root}, {"": {} if tree[""] else tops}, self._layout, what="arrays")
        return sorted(found, key=lambda base: rank(base.split))  # folders of one split stand together, as they stand in the tree

    def _folders(self, tree: Mapping[str, list[str]], base: Base) -> list[str]:
        """The folder that a split is, or its class folders.  Raises SourceError where it is both."""
        below = [folder for folder in tree if folder and os.path.dirname(folder) == base.folder]
        holding = next((folder for folder in below if tree[folder]), None)
        if tree[base.folder] and holding is not None:
            raise SourceError(
                f"{show(os.path.join(self._root, base.folder))}: holds .npy files and folders of them ({show(os.path.basename(holding))}): expected "
                "samples, or class folders",
                path=self._root,
            )
        return [base.folder] if tree[base.folder] or holding is None else below

    def read(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """The rows [start, stop).  Raises OSError, or SourceError for a file that holds another array than the first."""
        return self.take(np.arange(start, stop))

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """These rows (M,), as `read`."""
        if self._keys is None or self._first is None:
            self.scan()
        assert self._keys is not None
        assert self._first is not None
        first = self._first
        field = as_field("x", first.dtype, first.shape, first.named, self._meanings, alone=True)
        out = np.empty((len(rows), *field.shape), field.stored)
        head, body = b"", b""
        for i, row in enumerate(rows.tolist()):
            path = os.path.join(self._root, os.fsdecode(self._keys[row]))
            with open(path, "rb") as file:
                data = file.read(self._size + 1)
            body = data[first.offset :]
            if data[: first.offset] != head or len(data) != self._size:
                lies = lies_in_npy(path, sample=True)
                if (lies.dtype, lies.shape, lies.fortran, len(data)) != (first.dtype, first.shape, first.fortran, self._size):
                    raise SourceError(
                        f"row {row:,} ({show(path)}): {_form(lies)}, {len(data):,} bytes; expected {_form(first)}, {self._size:,} bytes, "
                        "as the first file",
                        path=path,
                        row=row,
                    )
                head, body = data[: lies.offset], data[lies.offset :]
            values = np.frombuffer(body, first.dtype, count=int(np.prod(first.shape, dtype=np.int64)))
            values = values.reshape(first.shape[::-1]).T if first.fortran else values.reshape(first.shape)
            out[i] = as_stored(values[None], field, show(path), [row])[0]
        found = {"x": out}
        if self._labels is not None:
            found[LABEL.name] = self._labels[rows]
        return found
