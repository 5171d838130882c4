"""Hides how an unchanged file is recognised without reading it: key -> (size, mtime, ctime, inode) -> hash of the content, for one RAW.

A cache only: a damaged or foreign one is ignored, and a file that was young when it was scanned is read again, since its time could not yet tell a
second change from the first.
"""

from __future__ import annotations

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

_ENTRY = np.dtype([("key", "<u8"), *((name, "<i8") for name in STAT_DTYPE.names or ()), ("hash", "<u8", (2,))])


def old_enough(stat: npt.NDArray[Any], scanned_ns: int) -> npt.NDArray[np.bool_]:
    """Which files (N,) had been left alone long enough at `scanned_ns` that their stat tells them from any later version."""
    old = np.maximum(stat["mtime_ns"], stat["ctime_ns"]) <= scanned_ns - _YOUNG_NS
    return np.asarray(old & (stat["size"] >= 0))


class StatCache:
    """Entries sorted by key hash, in numpy: 56 bytes a file."""

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._head = canonical({"location": location, "version": 1})
        self._entries = self._load()

    def _load(self) -> npt.NDArray[np.void]:
        try:
            data = self._path.read_bytes()
        except OSError:
            return np.empty(0, _ENTRY)
        body = data[len(self._head) : -8]
        if not data.startswith(self._head) or len(body) % _ENTRY.itemsize or xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            return np.empty(0, _ENTRY)
        return np.frombuffer(body, _ENTRY)

    def known(self, keys: npt.NDArray[np.uint64], stat: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """(hashes (N, 2), which of them are known) for the key hashes and stats of a scan."""
        out = np.zeros((len(keys), 2), np.uint64)
        if not len(self._entries) or not len(keys):
            return out, np.zeros(len(keys), bool)
        at = np.minimum(np.searchsorted(self._entries["key"], keys), len(self._entries) - 1)
        found = self._entries[at]
        same = found["key"] == keys
        for name in STAT_DTYPE.names or ():
            same &= found[name] == stat[name]
        out[same] = found["hash"][same]
        return out, same

    def save(
        self, keys: npt.NDArray[np.uint64], stat: npt.NDArray[Any], hashes: npt.NDArray[np.uint64], known: npt.NDArray[np.bool_], scanned_ns: int
    ) -> None:
        """Replace the cache by what is known of this scan now, leaving out files that were young at `scanned_ns`."""
        take = known & old_enough(stat, scanned_ns)
        entries = np.zeros(int(take.sum()), _ENTRY)
        entries["key"] = keys[take]
        for name in STAT_DTYPE.names or ():
            entries[name] = stat[name][take]
        entries["hash"] = hashes[take]
        data = self._head + np.sort(entries, order="key", kind="stable").tobytes()
        write_atomic(self._path, data + xxhash.xxh3_64_digest(data), durable=False)
