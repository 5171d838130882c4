"""Hides how an unchanged file is recognised without reading it: key -> (size, mtime, ctime, inode) -> hash of the content, for one RAW.

A cache only: a damaged or foreign one is ignored, and a file that was young when it was scanned is read again, since its time could not yet tell a
second change from the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.format.canonical import canonical
from mmcompile.format.commit import write_atomic

__all__ = ["StatCache", "old_enough"]

#: A file that changed within this time before the scan may change again within one tick of its clock.
_YOUNG_NS = 2_000_000_000

#: Clocks of local disks tell more than microseconds; where a time does not, its file system may make up inodes, too, and give them to others later.
_COARSE_NS = 1_000

_ENTRY = np.dtype([("key", "<u8"), *((name, "<i8") for name in STAT_DTYPE.names or ()), ("hash", "<u8", (2,))])


def old_enough(stat: npt.NDArray[Any], scanned_ns: int) -> npt.NDArray[np.bool_]:
    """Which files (N,) had been left alone long enough at `scanned_ns` that their stat tells them from any later version."""
    old = np.maximum(stat["mtime_ns"], stat["ctime_ns"]) <= scanned_ns - _YOUNG_NS
    return np.asarray(old & (stat["size"] >= 0))


class StatCache:
    """Entries sorted by key hash, in numpy: 56 bytes a file.

    `choice` is what a build chose after looking at some of these files, as JSON values, or None: it is no older than the entries.
    """

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._head = canonical({"location": location, "version": 2})
        self._saved = b""
        self.choice: dict[str, Any] | None = None
        self._entries = self._load()

    def _load(self) -> npt.NDArray[np.void]:
        try:
            data = self._path.read_bytes()
        except OSError:
            return np.empty(0, _ENTRY)
        if not data.startswith(self._head) or xxhash.xxh3_64_digest(memoryview(data)[:-8]) != data[-8:]:
            return np.empty(0, _ENTRY)
        start = data.index(b"\n", len(self._head)) + 1
        self._saved, self.choice = data, json.loads(data[len(self._head) : start])
        return np.frombuffer(data, _ENTRY, (len(data) - 8 - start) // _ENTRY.itemsize, start)

    def known(self, keys: npt.NDArray[np.uint64], stat: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """(hashes (N, 2), which of them are known) for the key hashes and stats of a scan.

        A file under another name than before is known by its inode, where its times are fine enough to tell files apart.
        """
        out, known = np.zeros((len(keys), 2), np.uint64), np.zeros(len(keys), bool)
        if not len(self._entries) or not len(keys):
            return out, known
        column = np.ascontiguousarray(self._entries["key"])
        self._match(column, keys, stat, np.arange(len(keys)), out, known)
        moved = np.flatnonzero(~known & (stat["size"] >= 0) & (stat["ctime_ns"] % _COARSE_NS != 0))
        if len(moved):
            order = np.argsort(self._entries["inode"], kind="stable")
            self._match(self._entries["inode"][order], stat["inode"][moved], stat, moved, out, known, order)
        return out, known

    def _match(
        self,
        column: npt.NDArray[Any],
        wanted: npt.NDArray[Any],
        stat: npt.NDArray[Any],
        items: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint64],
        known: npt.NDArray[np.bool_],
        order: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Fill in the items whose entry, found by a sorted column, has their stat."""
        at = np.minimum(np.searchsorted(column, wanted), len(column) - 1)
        same = column[at] == wanted
        items, at = items[same], at[same] if order is None else order[at[same]]
        found = self._entries[at]
        equal = np.ones(len(items), bool)
        for name in STAT_DTYPE.names or ():
            equal &= found[name] == stat[name][items]
        out[items[equal]], known[items[equal]] = found["hash"][equal], True

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
        take = known & old_enough(stat, scanned_ns)
        entries = np.zeros(int(take.sum()), _ENTRY)
        entries["key"] = keys[take]
        for name in STAT_DTYPE.names or ():
            entries[name] = stat[name][take]
        entries["hash"] = hashes[take]
        data = self._head + canonical(choice) + entries[np.argsort(entries["key"], kind="stable")].tobytes()
        data += xxhash.xxh3_64_digest(data)
        if data != self._saved:
            write_atomic(self._path, data, durable=False)
            self._saved = data
