"""Hides in which order the rows of a table stand: groups, the order within each, and splits by time, as ranges of what lies in files.

Pure numpy: numbers of rows in, ranges out.  Rows are numbered over all files, one behind the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Drop", "OrderCheck", "Ranges", "as_ranges", "cut_counts", "first_row", "in_parts", "sorted_rows", "split_names"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: A file is read in ranges as long as there are no more of them than one for so many rows; else its rows are sorted into a file aside.
_ROWS_PER_RANGE = 1 << 12


@dataclass(frozen=True)
class Ranges:
    """Rows in the order in which they are wanted, as ranges [start, stop) of the rows that there are: both int64 (K,)."""

    starts: Rows
    stops: Rows

    @property
    def ends(self) -> Rows:
        """Where each range ends among the wanted rows, (K,)."""
        return np.cumsum(self.stops - self.starts)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The wanted rows [start, stop), as ranges of those that there are."""
        ends = self.ends
        for i in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
            first = int(ends[i]) - int(self.stops[i] - self.starts[i])
            if first >= stop:
                return
            a, b = max(start, first), min(stop, int(ends[i]))
            if a < b:
                yield int(self.starts[i]) + a - first, int(self.starts[i]) + b - first

    def places(self, rows: Rows) -> Rows:
        """Which of the rows that there are the wanted rows (M,) are: int64 (M,)."""
        ends = self.ends
        which = np.searchsorted(ends, rows, side="right")
        found: Rows = self.stops[which] - (ends[which] - rows)
        return found

    def take(self, pieces: Sequence[tuple[int, int]]) -> Ranges:
        """These ranges of the wanted rows, one behind the other."""
        found = list(itertools.chain.from_iterable(self.within(start, stop) for start, stop in pieces))
        made: Rows = np.array(found, np.int64).reshape(-1, 2)
        return Ranges(made[:, 0], made[:, 1])


def as_ranges(rows: Rows) -> Ranges | None:
    """Rows in an order (N,) as ranges; None where there would be too many to read a file so."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(breaks) > 64 + len(rows) // _ROWS_PER_RANGE:
        return None
    starts = rows[np.concatenate([[0], breaks])]
    stops = rows[np.concatenate([breaks - 1, [len(rows) - 1]])] + 1
    return Ranges(starts.astype(np.int64), stops.astype(np.int64))


def first_row(blocks: Iterable[Array], value: int) -> int:
    """The first row with this value, of blocks of values one behind the other; -1: none has it."""
    start = 0
    for block in blocks:
        if (found := block == value).any():
            return start + int(found.argmax())
        start += len(block)
    return -1


def sorted_rows(groups: npt.NDArray[np.integer], order: Array | None) -> Rows:
    """The rows (N,) group by group, and in each in their `order` (N,); what is equal stays as it came."""
    if order is None:
        return np.argsort(groups, kind="stable").astype(np.int64, copy=False)
    if _is_sorted(groups, order):
        return np.arange(len(groups), dtype=np.int64)
    return np.lexsort((order, groups)).astype(np.int64, copy=False)


def _is_sorted(groups: npt.NDArray[np.integer], order: Array) -> bool:
    same = groups[1:] == groups[:-1]
    return bool(np.all(groups[1:] >= groups[:-1]) and np.all(~same | (order[1:] >= order[:-1])))


@dataclass(frozen=True)
class Drop:
    """The first row whose value is less than that of the row before it, in its group."""

    row: int
    value: float
    before: float


class OrderCheck:
    """Are values in rising order within each group?  Given as they come; `starts` (G,), rising, are where groups begin."""

    def __init__(self, starts: Rows) -> None:
        self._starts = starts
        self._row = 0
        self._last: Array | None = None
        self.drop: Drop | None = None
        #: Does a value stand twice in a row, and the first row where it does?
        self.twice = -1
        #: How many rows have the value of the row before them.
        self.alike = 0

    def extend(self, values: Array) -> None:
        joined = values if self._last is None else np.concatenate([self._last, values])
        first = self._row - (len(joined) - len(values))
        if len(joined) > 1 and self.drop is None:
            begins = np.zeros(len(joined), bool)
            low, high = np.searchsorted(self._starts, [first, first + len(joined)])
            begins[self._starts[low:high] - first] = True
            inside = ~begins[1:]
            down = np.flatnonzero(inside & ~(joined[1:] >= joined[:-1]))
            if len(down):
                at = int(down[0]) + 1
                self.drop = Drop(first + at, joined[at].item(), joined[at - 1].item())
            alike = np.flatnonzero(inside & (joined[1:] == joined[:-1]))
            self.alike += len(alike)
            if self.twice < 0 and len(alike):
                self.twice = first + int(alike[0]) + 1
        self._row += len(values)
        self._last = values[-1:] if len(values) else self._last


def cut_counts(batches: Iterable[Array], stops: Rows, cuts: Sequence[int | float]) -> Rows:
    """How many rows of each group are before each cut, int64 (G, C): `batches` are all values, `stops` (G,) where groups end."""
    starts = np.concatenate([[0], stops[:-1]])
    out = np.zeros((len(stops), len(cuts)), np.int64)
    row = 0
    for values in batches:
        group = int(np.searchsorted(stops, row, side="right"))
        while group < len(stops) and starts[group] < row + len(values):
            part = values[max(0, int(starts[group]) - row) : int(stops[group]) - row]
            out[group] += [int(np.count_nonzero(part < cut)) for cut in cuts]
            group += 1
        row += len(values)
    return out


def split_names(cuts: int) -> tuple[str, ...]:
    """What the splits between so many cuts are called."""
    if cuts <= 2:
        return ("train", "test") if cuts == 1 else ("train", "val", "test")
    return tuple(f"part{i}" for i in range(cuts + 1))


def in_parts(starts: Rows, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(file, first row, end) of the rows [start, stop) of all files, of which `starts` says where each begins."""
    while start < stop:
        part = int(np.searchsorted(starts, start, side="right")) - 1
        last = min(stop, int(starts[part + 1]))
        yield part, start - int(starts[part]), last - int(starts[part])
        start = last
