"""Hides where in memory the mapped rows of a field lie: all shards in one array, so that a batch from any of them is one call of numpy.

Shard k's row 0 is row `first[k]` of the array; between the shards are gaps, as a map begins at a page.  A row may be touched once its shard is
placed, never before.  No lock (which a fork could leave locked): placing a shard twice is harmless.
"""

from __future__ import annotations

import math
import mmap
import resource
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.npy import ALIGN, HUGE, Space, libc

__all__ = ["Region", "is_resident", "page_runs", "will_need"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: Shards in regions, in this process: each takes two of the 65,530 maps of a process (its rows, the gap behind them), and others want some too.
_SHARDS = 12_000
#: Addresses of one region, and of all in this process: a process has 2^47.
_BYTES, _ALL_BYTES = 1 << 45, 1 << 46
#: Buckets of rows, as a power of 2, that tell the shards of most rows without a search: 128 KiB, so they stay in a core's second-level cache.
_BUCKET_BITS = 14
#: Token of each living region -> (shards, bytes).  Not a count: adding to one is not atomic.
_living: dict[object, tuple[int, int]] = {}


class Region:
    """The rows of one field of all shards: `flat`, (rows and gaps, *shape), read-only.

    `starts`: the first row of each shard, then the number of rows, int64 (shards + 1,).
    """

    def __init__(self, starts: Rows, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Raises OSError where no room for it is granted."""
        self._row_bytes = dtype.itemsize * math.prod(shape)
        shards = len(starts) - 1
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # reserved addresses count there as if they were used
        most = _BYTES if limit == resource.RLIM_INFINITY else min(_BYTES, limit // 4)
        taken = sum(n for _, n in list(_living.values()))
        for page in (HUGE, ALIGN):  # huge pages where the gaps between the shards then leave room for others
            unit = page // math.gcd(page, self._row_bytes)  # a multiple of so many rows begins a page
            room = (int(starts[-1]) + (shards - 1) * unit) * self._row_bytes
            if room <= (most if page == ALIGN else min(most // 2, _BYTES // 4, _ALL_BYTES // 4 - taken)):
                break
        if sys.platform != "linux" or ALIGN % mmap.PAGESIZE or shards > _SHARDS or room > most:
            raise OSError(f"no region of {shards:,} shards and {room:,} bytes")
        rows = np.diff(starts)
        self.first = np.zeros(shards, np.int64)
        np.cumsum(-(-rows[:-1] // unit) * unit, out=self.first[1:])
        count = int(self.first[-1] + rows[-1])
        length = -(-count * self._row_bytes // ALIGN) * ALIGN
        token = object()
        _living[token] = shards, length
        living = list(_living.values())
        try:
            if sum(n for n, _ in living) > _SHARDS or sum(n for _, n in living) > _ALL_BYTES:
                raise OSError(f"no region of {shards:,} shards and {length:,} bytes beside the others of this process")
            self._space = Space(length, lambda: _living.pop(token, None))
        except BaseException:
            _living.pop(token, None)
            raise
        self.flat: Array = self._space.array[: count * self._row_bytes].view(dtype).reshape((count, *shape))
        self._starts, self._rows, self._shift = starts, rows, self.first - starts[:-1]
        self._placed = np.zeros(shards, np.bool_)
        self._failed = False
        self._bits = max(0, (int(starts[-1]) - 1).bit_length() - _BUCKET_BITS)
        self._buckets: Rows | None = None

    def find(self, rows: Rows) -> tuple[Rows, Iterable[int]]:
        """Where in `flat` rows of the dataset (in [0, n)) lie, and the shards to place before: each once, in the order of first use."""
        if self._buckets is not None:
            if len(self._shift) == 1:
                return rows, ()
            found = np.take(self._buckets, rows >> self._bits, mode="clip")
            found += rows
            unsure = np.flatnonzero(found < 0)
            if len(unsure):
                found[unsure] = rows[unsure] + self._shift[self._shards_of(rows[unsure])]
            return found, ()
        shards = self._shards_of(rows)
        return rows + self._shift[shards], dict.fromkeys(shards[~self._placed[shards]].tolist())

    def _shards_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _make_buckets(self) -> Rows:
        """For each 2^bits rows what to add to a row's number, as a search for each row would cost more than to copy a small one.

        Far below 0 where they lie in several shards.
        """
        n = int(self._starts[-1])
        begin = np.arange(0, n, 1 << self._bits)
        first, last = self._shards_of(begin), self._shards_of(np.minimum(begin + (1 << self._bits), n) - 1)
        return np.where(first == last, self._shift[first], np.int64(-1 << 62))

    def place(self, shard: int, fd: int, offset: int) -> bool:
        """Map the rows of a shard from an open, checked file in which they begin at `offset`.  False where no map is left, and ever after."""
        if self._failed:
            return False
        try:
            self._space.place(int(self.first[shard]) * self._row_bytes, fd, offset, int(self._rows[shard]) * self._row_bytes)
        except OSError:
            self._failed = True
            return False
        self._placed[shard] = True
        if self._buckets is None and self._placed.all():
            self._buckets = self._make_buckets()
        return True


def page_runs(starts: Rows, nbytes: int) -> list[tuple[int, int]]:
    """The pages that hold `nbytes` bytes from each of these positions, as few half-open ranges in rising order."""
    if not len(starts):
        return []
    starts = np.sort(starts)
    begin, end = starts & -mmap.PAGESIZE, (starts + (nbytes + mmap.PAGESIZE - 1)) & -mmap.PAGESIZE
    apart = begin[1:] > end[:-1]
    return list(zip(begin[np.append(True, apart)].tolist(), end[np.append(apart, True)].tolist(), strict=True))


def will_need(addresses: Rows, nbytes: int) -> None:
    """Tell the kernel that `nbytes` bytes of a map will be read soon from each of these addresses: it begins to read, and nobody waits."""
    for begin, end in page_runs(addresses, nbytes):
        libc().madvise(begin, end - begin, mmap.MADV_WILLNEED)


def is_resident(address: int, nbytes: int) -> bool:
    """Do all pages of these mapped bytes lie in memory?

    Since Linux 5.2 the answer is also yes for a file that this user neither owns nor may write; and where the kernel does not say.
    """
    begin = address & -mmap.PAGESIZE
    length = address + nbytes - begin
    pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
    return libc().mincore(begin, length, pages.ctypes.data) != 0 or bool((pages & 1).all())


def lock(address: int, nbytes: int) -> bool:
    """Keep mapped bytes in memory until they are unmapped; False where this user may not lock so many."""
    return int(libc().mlock(address, nbytes)) == 0
