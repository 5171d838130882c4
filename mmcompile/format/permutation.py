"""Hides how rows are put in a random order that nobody has to remember: a bijection, looked up at any place, from a key and their number alone.

The same on every machine, Python and numpy: nothing here uses numpy's random streams, and every sort is of numbers that differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.format.fields import Split
from mmcompile.format.streams import Words, draw_bits, stream_key, stream_keys

__all__ = ["MIXED", "SHUFFLED", "Permutation", "is_order", "source_rows"]

Ints = npt.NDArray[np.int64]

#: Orders of rows without keys: each split in a random order that the seed behind it decides; and one in which neighbours are strangers.
SHUFFLED, MIXED = "shuffled:", "mixed"
_ORDER = re.compile(rf"{MIXED}\Z|{SHUFFLED}(0|[1-9][0-9]{{0,17}})\Z")
#: Up to here a permutation is a table, sorted hashes: the best there is, in 256 KiB.  At most 2^16, as a row is the low 16 bits of what is sorted.
_TABLE_ROWS = 1 << 16
#: 4 show in the statistics (too many neighbours stay neighbours); 8 leave a margin.  Even, as the halves take turns.
_ROUNDS = 8
#: Two odd multipliers of splitmix64, as in `streams`.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
#: Keeps the keys of stored orders apart from those of epochs, which may have the same seed.
_STORED = 0x726F7773
#: Rows looked up at a time, so that the arrays between the steps stay in the cache.
_CHUNK = 1 << 14


def is_order(value: object) -> bool:
    """May an index say this of the order of its rows?"""
    return isinstance(value, str) and _ORDER.match(value) is not None


def source_rows(order: str, splits: Sequence[Split], rows: Ints) -> Ints:
    """Where the rows (M,) of a dataset of this order stand in the order of their source, which has the same splits: int64 (M,).

    That is where they stand in the dataset, too, unless it is SHUFFLED.
    """
    if not order.startswith(SHUFFLED):
        return rows
    out = np.empty(len(rows), np.int64)
    key = stream_key(int(order.removeprefix(SHUFFLED)), 0, _STORED)
    for split in splits:
        at = np.flatnonzero((rows >= split.start) & (rows < split.stop))
        if len(at):
            found = Permutation(split.stop - split.start, key)
            for first in range(0, len(at), _CHUNK):
                part = at[first : first + _CHUNK]
                out[part] = split.start + found.rows(rows[part] - split.start)
    return out


class Permutation:
    """A bijection of [0, n)."""

    def __init__(self, n: int, key: int) -> None:
        self._n, self._table = n, None
        if n <= _TABLE_ROWS:
            self._table = _sorted_hashes(n, key)
            return
        self._keys = [np.uint64(k) for k in draw_bits(np.array([key], np.uint64), 0, _ROUNDS)[0]]
        # Two halves: the low bits, and the rest in [0, high), so that at most one in 2^bits positions lands outside of [0, n).
        self._bits = max(1, (n - 1).bit_length() // 2)
        self._high = -(-n >> self._bits)

    def rows(self, at: Ints) -> Ints:
        if self._table is not None:
            return self._table[at].astype(np.int64)
        out = self._feistel(at.view(np.uint64))
        limit = np.uint64(self._n)
        outside = np.flatnonzero(out >= limit)
        while len(outside):  # walk along the cycle until it is inside again, which is a bijection of [0, n) too
            moved = self._feistel(out[outside])
            out[outside] = moved
            outside = outside[moved >= limit]
        return out.view(np.int64)

    def _feistel(self, values: Words) -> Words:
        """A bijection of [0, high << bits): each half in turn is moved by a hash of the other one."""
        bits, top, count = np.uint64(self._bits), np.uint64(64 - self._bits), np.uint64(self._high)
        low, high = values & np.uint64((1 << self._bits) - 1), values >> bits
        hashed, spare = np.empty_like(low), np.empty_like(low)
        for turn, key in enumerate(self._keys):
            np.add(low if turn % 2 else high, key, out=hashed)
            np.multiply(hashed, _FIRST, out=hashed)
            np.right_shift(hashed, _HALF, out=spare)
            np.bitwise_xor(hashed, spare, out=hashed)
            np.multiply(hashed, _SECOND, out=hashed)
            if turn % 2 == 0:
                np.right_shift(hashed, top, out=hashed)
                np.bitwise_xor(low, hashed, out=low)
                continue
            np.right_shift(hashed, _HALF, out=hashed)  # 32 bits scaled to [0, high), added, and one `high` taken off where it is too much
            np.multiply(hashed, count, out=hashed)
            np.right_shift(hashed, _HALF, out=hashed)
            np.add(high, hashed, out=high)
            np.subtract(high, count, out=spare)  # wraps to a huge number where it must not be taken off
            np.minimum(high, spare, out=high)
        np.left_shift(high, bits, out=high)
        np.bitwise_or(high, low, out=high)
        return high


def _sorted_hashes(n: int, key: int) -> npt.NDArray[np.int32]:
    """The order of hashes of 0 .. n-1, whose 48 high bits are sorted with the row below them: the numbers differ, so any sort gives the same."""
    rows = np.arange(n, dtype=np.int64)
    low = np.uint64(0xFFFF)
    keyed = (stream_keys(key, 0, rows) & ~low) | rows.view(np.uint64)
    keyed.sort()
    return (keyed & low).astype(np.int32)
