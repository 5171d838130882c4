"""A folder of equal `.npy` files as a source: each file is one sample, in the order of their names; class folders give labels.

Names and stats are held in columns, and a file is opened when its row is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import LABEL
from mmcompile.compiler.sources.arrays import Meanings, as_field, as_stored, as_words
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.lies import Lies, lies_in_npy, stat_of
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.rows import RowScan, settled
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["NpyFolder", "holds_arrays"]

#: Files found between two words of progress.
_STEP = 10_000


def holds_arrays(folder: str) -> bool:
    """Does this folder hold .npy files, or a folder that does?  Looks at no more than the first file of each."""
    return any(_names(folder, first=True)) or any(any(_names(os.path.join(folder, name), first=True)) for name in _folders(folder))


def _names(folder: str, first: bool = False) -> list[str]:
    """The .npy files of a folder, sorted as text; with `first` one of them is enough."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".npy") and not entry.name.startswith(".") and not entry.is_dir():
                found.append(entry.name)
                if first:
                    break
    return sorted(found)


def _folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _form(lies: Lies) -> str:
    return f"{lies.dtype} {lies.shape} in {'Fortran' if lies.fortran else 'C'} order"


class NpyFolder:
    """The .npy files in `root`, or in its class folders; all of one dtype and shape."""

    item_by_item = by_index = True

    def __init__(self, root: str, meanings: Meanings | None = None) -> None:
        self._root, self._meanings = os.path.abspath(root), dict(meanings or {})
        self._keys: Keys | None = None
        self._labels: npt.NDArray[np.int64] | None = None
        self._first: Lies | None = None
        self._size = 0

    @property
    def root(self) -> str:
        return self._root

    def identity(self) -> dict[str, object]:
        """The settings that decide which rows there are and what they hold."""
        return {"kind": "npy-folder", "as": as_words(self._meanings)}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """List the files and look at each one's size; the first says what all hold.  Raises SourceError."""
        progress = progress or (lambda _: None)
        try:
            classes, found = self._list()
        except OSError as error:
            raise SourceError(f"cannot read RAW {show(str(error.filename or self._root))}: {error.strerror}", path=self._root) from error
        stamp, young, counts = xxhash.xxh3_128(repr(classes).encode("utf-8", "surrogateescape")), False, []  # an empty class moves numbers

        def walk() -> Iterator[bytes]:
            nonlocal young
            n = 0
            for folder, names in found:
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

        self._size, first = 0, os.fsencode(os.path.join(*next(((f, names[0]) for f, names in found if names), ("", ""))))
        self._keys = keys = Keys.of(walk())
        if not len(keys):
            raise SourceError(f"{show(self._root)}: no .npy file, and no class folder that holds one", path=self._root)
        self._first = lies_in_npy(os.path.join(self._root, os.fsdecode(keys[0])), sample=True)
        self._labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts) if classes is not None else None
        field = as_field("x", self._first.dtype, self._first.shape, self._first.named, self._meanings, alone=True)
        fields = (field,) if classes is None else (field, LABEL)
        stops = np.array([len(keys)], np.int64)
        return RowScan(len(keys), fields, ("",), stops, ("" if young else stamp.hexdigest(),), classes=classes)

    def where(self, row: int) -> str:
        """A row as a person finds it: a file."""
        if self._keys is None:
            self.scan()
        assert self._keys is not None
        return show(os.path.join(self._root, os.fsdecode(self._keys[row])))

    def _list(self) -> tuple[tuple[str, ...] | None, list[tuple[str, list[str]]]]:
        """(classes, None where there are none; the files of each folder)."""
        names = _names(self._root)
        folders = [(name, _names(os.path.join(self._root, name))) for name in _folders(self._root)]
        holding = [name for name, files in folders if files]
        if names and holding:
            raise SourceError(
                f"{show(self._root)}: holds .npy files and folders of them ({show(holding[0])}): expected samples, or class folders", path=self._root
            )
        return (None, [("", names)]) if names else (tuple(name for name, _ in folders), folders)

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
