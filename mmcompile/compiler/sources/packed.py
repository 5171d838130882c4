"""Hides how images that lie in a column of Parquet files are found and read.

The place of an image says which file, row group and row, and how many bytes.  A file that is not the one that was listed is never read from.  A
worker reads the rows of a row group one batch after the other, so that rows in their order are each read once; a batch is in memory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.listed import path_below
from mmcompile.compiler.sources.parquet import ParquetTable, batches, reading
from mmcompile.compiler.sources.walk import stat_columns
from mmcompile.errors import SourceError

__all__ = ["IN_A_FILE", "Packed", "list_packed"]

#: Files that a process keeps open, the last used: two threads of a worker may be at the end of one and the start of the next.
_OPEN = 2
_ROW_BITS = 32
#: The place of an image that lies in a file of its own.
IN_A_FILE = (-1, -1, -1)


def _mark(name: str, found: os.stat_result, column: str | None = None) -> int:
    """A file as it was listed, and a column in it that is not the main one, in 63 bits."""
    beside = "" if column is None else f"\0{column}"
    return xxhash.xxh3_64_intdigest(f"{found.st_size} {found.st_mtime_ns} {name}{beside}".encode("utf-8", "surrogateescape")) >> 1


def list_packed(
    root: str, tables: Sequence[ParquetTable], progress: Callable[[int], None] | None = None, column: str | None = None
) -> tuple[Keys, npt.NDArray[np.void], int]:
    """(keys with places (N,), STAT_DTYPE (N,), how many rows hold no image) of the images in these tables, in their order.

    A key is the path that stands beside the image, where there is one that no other row has; else FILE#ROW, counted from 0.  Of a row without bytes
    the path may name a file, relative to the folder of the table: then that is its key and its image, and its place IN_A_FILE.  Any other image that
    is not there has no bytes; so has one of no bytes (which is not none), whatever path stands beside it.  Reads every image once, for its length
    alone.  `column`: the one that the tables hold is not the main one.
    """
    keys: list[Keys] = []
    places, stats, empty, n = [], [], 0, 0
    for table in tables:
        name = os.path.relpath(table.path, root)
        with reading(table.path):
            found = os.stat(table.path)
            lengths, rows, paths = _lengths(table)
        place = np.empty((len(lengths), 3), np.int64)
        place[:, 0], place[:, 1], place[:, 2] = _mark(name, found, column), rows, lengths.clip(0)
        stat = np.empty(len(lengths), STAT_DTYPE)
        stat["size"] = lengths.clip(0)
        _, stat["mtime_ns"], stat["ctime_ns"], stat["inode"] = stat_columns(found)
        beside = _beside(root, table.path, lengths, paths, stat)
        place[list(beside)] = IN_A_FILE
        empty += int((lengths < 0).sum()) - len(beside)
        keys.append(Keys.of(beside.get(row, path) for row, path in enumerate(paths)) if beside else paths)
        places.append(place)
        stats.append(stat)
        n += len(lengths)
        if progress is not None:
            progress(n)
    all_paths = Keys.join(keys)
    names = [os.path.relpath(table.path, root).encode("utf-8", "surrogateescape") for table in tables]
    whole = np.concatenate(places)
    named = Keys.of(_named(all_paths, names, np.cumsum([len(part) for part in keys]), (whole == IN_A_FILE).all(axis=1).tolist()))
    return Keys(named.blob, named.stops, places=whole), np.concatenate(stats), empty


def _beside(root: str, table: str, lengths: npt.NDArray[np.int64], paths: Keys, stat: npt.NDArray[np.void]) -> dict[int, bytes]:
    """The rows without bytes whose paths are of files, and the keys of these; their `stat` becomes that of the file."""
    folder, base = os.fsencode(root), os.fsencode(os.path.relpath(os.path.dirname(table), root))
    found = {}
    for row in np.flatnonzero(lengths < 0).tolist():
        key, _ = path_below(paths[row], folder, b"" if base == b"." else base)
        with contextlib.suppress(OSError):
            if key and os.path.isfile(path := os.path.join(folder, key)):
                stat[row] = stat_columns(os.stat(path))
                found[row] = key
    return found


def _named(paths: Keys, files: list[bytes], stops: npt.NDArray[np.int64], beside: Sequence[bool]) -> Iterator[bytes]:
    """The keys of rows with these paths; of those `beside` they are the paths."""
    hashes = paths.hashes()
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    once = (counts[inverse] == 1).tolist()
    file = start = 0
    for row, path in enumerate(paths):
        while row >= stops[file]:
            start, file = int(stops[file]), file + 1
        yield path if beside[row] or (path and once[row] and b"\0" not in path) else b"%s#%d" % (files[file], row - start)


def _lengths(table: ParquetTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Keys]:
    """(bytes of each image, -1 where there is none; row group and row in it; the path beside each) of a table."""
    pc = table.arrow.compute
    lengths, rows, paths = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [Keys.of([])]
    with table.opened() as file:
        for group in range(table.groups):
            at = 0
            for array in _images(table, file, group):
                lengths.append(pc.binary_length(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
                rows.append((group << _ROW_BITS) + at + np.arange(len(array)))
                at += len(array)
    whole = np.concatenate(lengths)
    if not table.in_struct or "path" not in [part.name for part in table.schema.field(table.holds).type]:
        return whole, np.concatenate(rows), Keys.of([b""] * len(whole))
    for batch in table.batches([f"{table.holds}.path"]):
        cells = batch.column(0).field("path").to_pylist()
        paths.append(Keys.of(b"" if cell is None else str(cell).encode("utf-8", "surrogateescape") for cell in cells))
    return whole, np.concatenate(rows), Keys.join(paths)


def _images(table: ParquetTable, file: Any, group: int) -> Iterator[Any]:
    """Arrays of bytes, of one row group."""
    for batch in batches(table.path, file, [f"{table.holds}.bytes" if table.in_struct else str(table.holds)], group):
        yield batch.column(0).field("bytes") if table.in_struct else batch.column(0)


class Packed:
    """Reads images of the Parquet files `files` below `root`; `image` is the main column, where it was asked for.  Thread-safe."""

    def __init__(self, root: str, files: Sequence[str], image: str | None) -> None:
        self._root, self._files, self._image = root, tuple(files), image

    def read(self, place: tuple[int, int, int]) -> bytes:
        """The bytes of an image, none where there is no image.  Raises OSError: the file is gone, damaged, or not the one that was listed."""
        with _lock:
            opened = _opened.pop(place[0], None)
            if opened is None:
                opened = _Opened(*self._find(place[0]), self._image)
            _opened[place[0]] = opened
            columns = len({held.column for held in _opened.values()})
            while len(_opened) > _OPEN * columns:
                del _opened[next(iter(_opened))]
        try:
            data = opened.read(place[1] >> _ROW_BITS, place[1] & ((1 << _ROW_BITS) - 1))
        except (SourceError, LookupError) as error:
            raise OSError(errno.EIO, "a row group that cannot be read", opened.path) from error
        if self._stat(opened.path, opened.column)[0] != place[0]:
            raise OSError(errno.EAGAIN, "changed while read", opened.path)
        return data

    def stat(self, place: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """(bytes of the image, and mtime_ns, ctime_ns, inode of its file).  Raises OSError."""
        with _lock:
            opened = _opened.get(place[0])
        mark, found = self._stat(*(self._find(place[0]) if opened is None else (opened.path, opened.column)))
        if mark != place[0]:
            raise self._gone()
        return place[2], *stat_columns(found)[1:]

    def _find(self, mark: int) -> tuple[str, str | None]:
        """(the file, the column in it where that is not the main one) of a mark."""
        for path in self._files:
            with contextlib.suppress(OSError):
                if self._stat(path, None)[0] == mark:
                    return path, None
        for path in self._files:
            with contextlib.suppress(OSError, SourceError):
                names = ParquetTable(path, self._image).names
                if column := next((name for name in names if self._stat(path, name)[0] == mark), None):
                    return path, column
        raise self._gone()

    def _gone(self) -> OSError:
        return OSError(errno.ENOENT, "its Parquet file is gone, or is not the one that was listed", self._root)

    def _stat(self, path: str, column: str | None) -> tuple[int, os.stat_result]:
        found = os.stat(path)
        return _mark(os.path.relpath(path, self._root), found, column), found


class _Opened:
    """A column of a file that is being read, the main one if None: where in which row group."""

    def __init__(self, path: str, column: str | None, image: str | None) -> None:
        self.path, self.column = path, column
        self._table = ParquetTable(path, image if column is None else column)
        self._file = self._table.opened()
        self._lock = threading.Lock()
        self._group = -1
        self._left: Iterator[Any] = iter(())
        #: The last two batches, each with the number of its first row: of two threads one may be a row ahead, and so a batch.
        self._held: list[tuple[int, Any]] = []

    def read(self, group: int, row: int) -> bytes:
        with self._lock:
            if group != self._group or (self._held and row < self._held[0][0]):
                self._group, self._held, self._left = group, [], _images(self._table, self._file, group)
            while not self._held or row >= self._held[-1][0] + len(self._held[-1][1]):
                batch = next(self._left, None)
                if batch is None:
                    raise IndexError(row)
                start = self._held[-1][0] + len(self._held[-1][1]) if self._held else 0
                self._held = [*self._held[-1:], (start, batch)]
            start, batch = next(held for held in reversed(self._held) if held[0] <= row)
            return batch[row - start].as_py() or b""


#: What this process has open, by the mark of the file; the last used is the last.
_opened: dict[int, _Opened] = {}
_lock = threading.Lock()
