"""Hides how an unchanged file is recognised without reading it: key -> (size, mtime, ctime, inode) -> hash of the content, for one RAW.

A cache only: a damaged or foreign one is ignored, and a file that was young when it was scanned is read again, since its time could not yet tell a
second change from the first.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.format.canonical import canonical
from mmcompile.format.commit import write_atomic
from mmcompile.format.npy import map_file

__all__ = ["StatCache", "old_enough"]

#: A file that changed within this time before the scan may change again within one tick of its clock.
_YOUNG_NS = 2_000_000_000

#: Clocks of local disks tell more than microseconds; where a time does not, its file system may make up inodes, too, and give them to others later.
_COARSE_NS = 1_000

#: The columns of the file, each of all entries, which stand in the order of their key hashes.
_COLUMNS = (np.dtype("<u8"), STAT_DTYPE, np.dtype(("<u8", (2,))))
_ENTRY_BYTES = sum(dtype.itemsize for dtype in _COLUMNS)
#: Bytes of a choice at most: settings, and a sentence.
_CHOICE_LIMIT = 1 << 20
#: Entries that are compared or written at a time.
_PART = 1 << 16


def old_enough(stat: npt.NDArray[Any], scanned_ns: int) -> npt.NDArray[np.bool_]:
    """Which files (N,) had been left alone long enough at `scanned_ns` that their stat tells them from any later version."""
    old = np.maximum(stat["mtime_ns"], stat["ctime_ns"]) <= scanned_ns - _YOUNG_NS
    return np.asarray(old & (stat["size"] >= 0))


class StatCache:
    """56 bytes a file on disk; in memory only while it is asked or saved, and then little of it.

    `choice` is what a build chose after looking at some of these files, as JSON values, or None: it is no older than the entries.
    """

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._head = canonical({"location": location, "version": 3})
        loaded = self._load()
        self.choice: dict[str, Any] | None = None
        self._saved = b""
        if loaded is not None:
            self.choice, _, self._saved = loaded

    def _load(self) -> tuple[dict[str, Any] | None, tuple[npt.NDArray[Any], ...], bytes] | None:
        """(choice, columns, mapped, and the hash of it all); None where there is no whole file of this RAW."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = map_file(fd, os.fstat(fd).st_size, writable=False)
            finally:
                os.close(fd)
        except OSError:
            return None
        end = len(data) - 8
        if data[: len(self._head)].tobytes() != self._head or xxhash.xxh3_64_digest(data[:end].data) != data[end:].tobytes():
            return None
        choice = data[len(self._head) : end][:_CHOICE_LIMIT].tobytes().partition(b"\n")[0]
        at = _padded(len(self._head) + len(choice) + 1)
        count = (end - at) // _ENTRY_BYTES
        columns = []
        for dtype in _COLUMNS:
            stop = at + count * dtype.itemsize
            columns.append(data[at:stop].view(dtype.base).reshape(count, *dtype.shape))
            at = stop
        return json.loads(choice), tuple(columns), data[end:].tobytes()

    def known(self, keys: npt.NDArray[np.uint64], stat: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """(hashes (N, 2), which of them are known) for the key hashes and stats of a scan.

        A file under another name than before is known by its inode, where its times are fine enough to tell files apart.
        """
        out, known = np.zeros((len(keys), 2), np.uint64), np.zeros(len(keys), bool)
        loaded = self._load()
        if loaded is None or not len(loaded[1][0]) or not len(keys):
            return out, known
        _, (saved, saved_stat, saved_hashes), _ = loaded

        def match(column: npt.NDArray[Any], wanted: npt.NDArray[Any], items: npt.NDArray[np.int64], order: npt.NDArray[np.int64] | None) -> None:
            """Fill in the items whose entry, found by a sorted column, has their stat; entries are walked in order, not at random."""
            walk = np.argsort(wanted)
            for part in (walk[at : at + _PART] for at in range(0, len(walk), _PART)):
                at = np.minimum(np.searchsorted(column, wanted[part]), len(column) - 1)
                same = column[at] == wanted[part]
                found, entries = items[part[same]], at[same] if order is None else order[at[same]]
                equal = saved_stat[entries] == stat[found]
                out[found[equal]], known[found[equal]] = saved_hashes[entries[equal]], True

        match(saved, keys, np.arange(len(keys)), None)
        moved = np.flatnonzero(~known & (stat["size"] >= 0) & (stat["ctime_ns"] % _COARSE_NS != 0))
        if len(moved):
            order = np.argsort(saved_stat["inode"], kind="stable")
            match(saved_stat["inode"][order], stat["inode"][moved], moved, order)
        return out, known

    def save(
        self,
        keys: npt.NDArray[np.uint64],
        stat: npt.NDArray[Any],
        hashes: npt.NDArray[np.uint64],
        known: npt.NDArray[np.bool_],
        scanned_ns: int,
        choice: dict[str, Any] | None = None,
    ) -> None:
        """Replace the cache by what is known of this scan now, without files that were young at `scanned_ns`; write nothing if that is no news."""
        rows = np.flatnonzero(known & old_enough(stat, scanned_ns))
        rows = rows[np.argsort(keys[rows], kind="stable")]
        head = self._head + canonical(choice)
        head += b"\0" * (_padded(len(head)) - len(head))

        def parts() -> Iterator[bytes]:
            yield head
            for column, dtype in zip((keys, stat, hashes), _COLUMNS, strict=True):
                for at in range(0, len(rows), _PART):
                    yield column[rows[at : at + _PART]].astype(dtype.base, copy=False).tobytes()

        state = xxhash.xxh3_64()
        for part in parts():
            state.update(part)
        if state.digest() != self._saved:
            write_atomic(self._path, itertools.chain(parts(), [state.digest()]), durable=False)
            self._saved = state.digest()


def _padded(length: int) -> int:
    """Where columns begin behind a head of that length: at a multiple of 8."""
    return length + -length % 8
