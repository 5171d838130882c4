"""Hides which samples are meant: what counts as the number of one, and how a dataset is divided at random.

Whoever divides the same samples with the same seed gets the same parts, on every machine and with every version of torch and numpy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from mmcompile.runtime.seeding import SampleIndex, drawn_rows, stream_key, stream_keys

__all__ = ["Selection", "by_chance", "divide", "integer", "integers", "said_valid", "stream_keys_of", "whole"]

Numbers = npt.NDArray[np.int64]
_Found = TypeVar("_Found", bound=npt.NDArray[Any])

_MASK = "samples are asked for by number; turn a mask into numbers with torch.nonzero or numpy.flatnonzero"
#: Takes the place of an epoch, so that how a dataset is divided and how its samples are augmented have nothing in common.
_DIVIDE = 0x73706C6974
#: Bytes between two rows that are read rather than skipped: a disk that seeks reads so much meanwhile.
_GAP = 1 << 20
#: Shares closer to a whole number than this are whole: 100 * 0.29 is one in floating point.
_WHOLE = 1e-9


class Selection:
    """The rows that are the samples of a dataset: those from `first` on, or `chosen` ones in any order."""

    def __init__(self, first: int, n: int, chosen: Numbers | None = None) -> None:
        self._first, self._chosen = first, chosen
        self._n = n if chosen is None else len(chosen)
        self._order: Numbers | None = None

    def __len__(self) -> int:
        return self._n

    def row(self, sample: int) -> int:
        """The row of a sample, counted from the end where negative.  Raises IndexError."""
        at = sample + self._n if sample < 0 else sample
        if not 0 <= at < self._n:
            raise IndexError(f"sample {int(sample)} is out of range: the dataset has {self._n:,}")
        return at + self._first if self._chosen is None else int(self._chosen[at])

    def rows(self, samples: Numbers) -> Numbers:
        """The rows of samples in [0, n): int64 (k,)."""
        return samples + self._first if self._chosen is None else self._chosen[samples]

    def places(self, rows: Numbers) -> Numbers:
        """Where these rows are among rising ones: the sample, -1 where it is none: int64 (k,)."""
        if self._chosen is None:
            return np.where((rows >= self._first) & (rows < self._first + self._n), rows - self._first, -1)
        at = np.searchsorted(self._chosen, rows).clip(0, max(0, self._n - 1))
        return np.where(self._chosen[at] == rows, at, -1) if self._n else np.full(len(rows), -1, np.int64)

    def find(self, row: int) -> int:
        """The first sample that is this row, -1 where there is none."""
        if self._chosen is None:
            return row - self._first if 0 <= row - self._first < self._n else -1
        if self._order is None:
            self._order = np.argsort(self._chosen, kind="stable")
        place = int(np.searchsorted(self._chosen, row, sorter=self._order))
        at = int(self._order[place]) if place < self._n else -1
        return at if at >= 0 and self._chosen[at] == row else -1

    def blocks(self, starts: Numbers) -> Numbers:
        """The first sample of each shard, then n, from the shards' first rows; only shards that have samples.  ValueError unless rows ascend."""
        if self._chosen is None:
            cuts = np.clip(starts - self._first, 0, self._n)
        elif (np.diff(self._chosen) < 0).any():
            raise ValueError("block order needs ascending rows, and those of this subset are not: sort the numbers given to subset(), or shuffle all")
        else:
            cuts = np.searchsorted(self._chosen, starts)
        return np.unique(np.concatenate([[0], cuts, [self._n]])).astype(np.int64)

    def part(self, total: int) -> str | None:
        """Which part of `total` rows these are, a hash of 16 hex digits; None for all of them in order."""
        if self._chosen is None:
            return None if (self._first, self._n) == (0, total) else f"{stream_key(self._first, self._n, total):016x}"
        if self._n == total and np.array_equal(self._chosen, np.arange(total)):
            return None
        mixed = stream_keys(0, self._n, self._chosen) ^ stream_keys(1, 0, np.arange(self._n, dtype=np.int64))
        return f"{stream_key(int(np.bitwise_xor.reduce(mixed * (mixed | np.uint64(1)))), self._n, total):016x}"

    def ascending(self) -> Selection:
        """The same rows in rising order, each once."""
        return self if self._chosen is None else Selection(0, 0, np.unique(self._chosen))

    def ranges(self, count: int, row_bytes: int) -> list[range]:
        """The first `count` of rising rows as ranges of step 1, over gaps that cost less to read than to skip."""
        gap = _GAP // row_bytes
        if self._chosen is None or not count:
            return [range(self._first, self._first + count)] if count else []
        rows = self._chosen[:count]
        cuts = np.flatnonzero(np.diff(rows) > gap + 1) + 1
        firsts, lasts = rows[np.append(0, cuts)], rows[np.append(cuts, len(rows)) - 1]
        return [range(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def integer(key: Any) -> int:
    """A number as an int: Python's and numpy's integers, 0-d integer arrays and tensors.  Raises TypeError for anything else, booleans too."""
    dtype = getattr(key, "dtype", None)
    if isinstance(key, bool) or dtype in (torch.bool, np.bool_):
        raise TypeError("samples are asked for by number, not by a boolean")
    try:
        return operator.index(key)
    except TypeError:
        raise TypeError(f"samples are asked for by an integer, a slice, or a list, array or tensor of integers, not {type(key).__name__}") from None


def integers(keys: Any, n: int) -> Numbers:
    """The numbers of a one-dimensional list, range, array or tensor, each in [0, n) once negative ones are counted from the end: int64 (k,).

    May be the array itself that was given, or share its memory.

    Raises TypeError for masks and what is no integer, IndexError beyond the end.
    """
    if isinstance(keys, torch.Tensor):
        keys = keys.detach().cpu().numpy()
    if not isinstance(keys, np.ndarray):
        if not isinstance(keys, Sequence):
            raise TypeError(f"samples are asked for by a list, range, array or tensor of integers, not {type(keys).__name__}")
        kinds = set(map(type, keys))
        if bool in kinds:
            raise TypeError(_MASK)
        try:
            keys = np.fromiter(keys if all(issubclass(kind, int) for kind in kinds) else map(integer, keys), np.int64, len(keys))
        except OverflowError:
            raise IndexError(f"a sample in the list is out of range: the dataset has {n:,}") from None
    if keys.dtype == np.bool_:
        raise TypeError(_MASK)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise TypeError(f"a batch takes one axis of integers, not {keys.dtype} of shape {keys.shape}")
    low, high = (int(keys.min()), int(keys.max())) if len(keys) else (0, -1)
    if high >= n or low < -n:
        bad = keys[(keys >= n) | (keys < -n)][0]
        raise IndexError(f"sample {bad} is out of range: the dataset has {n:,}")
    out = keys.astype(np.int64, copy=low < 0)
    if low < 0:
        out[out < 0] += n
    return cast("Numbers", out)


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high); ValueError for anything else, booleans too."""
    try:
        number = -1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = -1
    if number < low or (high is not None and number >= high):
        bound = f"of at least {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name} must be an integer {bound}, not {value!r}")
    return number


def said_valid(keys: Any) -> list[bool] | None:
    """What the indices say of whether a metric may count their samples; None where they say nothing."""
    said = [key.valid for key in keys if type(key) is SampleIndex] if isinstance(keys, list | tuple) else []
    known = [valid for valid in said if valid is not None]
    if known and len(known) < len(keys):
        raise ValueError(f"{len(known)} of the {len(keys)} indices of a batch say whether the sample is valid: all must, or none")
    return known or None


def stream_keys_of(keys: Any, rows: Numbers, epoch: int) -> tuple[list[int], bool]:
    """The random stream of each row, as `by_chance`."""
    found, told = by_chance(keys, rows, epoch, stream_keys)
    return found.tolist(), told


def by_chance(keys: Any, rows: Numbers, epoch: int, of: Callable[[int, int, Numbers], _Found]) -> tuple[_Found, bool]:
    """`of(seed, epoch, rows)` of each row, for the seed and epoch that its index carries, else seed 0 and this epoch; and whether all carried theirs.

    What `of` is given tells the draws of a row apart, where the indices say that it was drawn with replacement.
    """
    said = [(key.seed, key.epoch) if type(key) is SampleIndex else None for key in keys] if isinstance(keys, list | tuple) else []
    if any(type(key) is SampleIndex and key.draw for key in keys) if said else False:
        rows = drawn_rows(rows, np.array([key.draw if type(key) is SampleIndex else 0 for key in keys], np.int64))
    pairs = list(dict.fromkeys(said)) or [None]
    found = of(*(pairs[0] or (0, epoch)), rows)
    for pair in pairs[1:]:
        its = np.array([one == pair for one in said])
        found[its] = of(*(pair or (0, epoch)), rows[its])
    return found, None not in said and bool(said)


def divide(rows: Numbers, lengths: Sequence[float], seed: int, labels: Numbers | None = None) -> list[Numbers]:
    """Which samples go into each part: their numbers in [0, n), ascending; together all of them, each once.

    `lengths` are numbers of samples that sum up to n, or fractions that sum up to 1: then each part gets the whole number below its share, and what
    is left goes round the parts from the first (torch's rule).  With `labels` every class is divided for itself: each part gets its share of a class
    rounded up or down, up where most is missing, counting what earlier classes left it short of.  A sample's place is a hash of (seed, row).
    """
    n = len(rows)
    counts, shares = _counts(lengths, n)
    keys = stream_keys(seed, _DIVIDE, rows)
    if labels is None:
        order = np.argsort(keys, kind="stable")
        return [np.sort(part) for part in np.split(order, np.cumsum(counts)[:-1])]
    order = np.lexsort((keys, labels))
    sizes = np.unique(labels, return_counts=True)[1]
    table = _stratify(sizes, shares, counts if _are_counts(lengths) else None)
    part = np.empty(n, np.int64)
    part[order] = np.repeat(np.tile(np.arange(len(counts)), len(sizes)), table.reshape(-1))
    return [np.flatnonzero(part == i).astype(np.int64) for i in range(len(counts))]


def _are_counts(lengths: Sequence[float]) -> bool:
    return all(isinstance(x, int | np.integer) for x in lengths)


def _counts(lengths: Sequence[float], n: int) -> tuple[Numbers, npt.NDArray[np.float64]]:
    """The number of samples of each part, and each part's share of the whole."""
    given = list(lengths)
    if not given or not all(isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool) and x >= 0 for x in given):
        raise ValueError(f"lengths must be numbers of samples or fractions, none below 0, not {lengths!r}")
    total = sum(given)
    if not _are_counts(given):
        if not math.isclose(total, 1):
            raise ValueError(f"fractions must sum up to 1, these sum up to {total}: {given}")
        counts = np.array([math.floor(n * x) for x in given], np.int64)
        left = n - int(counts.sum())
        for i in range(left):
            counts[i % len(given)] += 1
        return counts, np.array(given, np.float64)
    if total != n:
        raise ValueError(f"lengths must sum up to the number of samples, {n:,}, or be fractions; these sum up to {total:,}: {given}")
    return np.array(given, np.int64), np.array(given, np.float64) / max(1, n)


def _stratify(sizes: Numbers, shares: npt.NDArray[np.float64], counts: Numbers | None) -> Numbers:
    """How many samples of each class go to each part, (classes, parts); with `counts` the sums of the parts are these."""
    exact = sizes[:, None] * shares
    table = np.floor(exact + _WHOLE).astype(np.int64)
    short = np.zeros(len(shares))
    for wanted, row, size in zip(exact, table, sizes.tolist(), strict=True):
        rest = wanted - row
        first = np.argsort(np.where(rest > _WHOLE, -(rest + short), np.inf), kind="stable")
        row[first[: size - int(row.sum())]] += 1
        short += wanted - row
    while counts is not None and not np.array_equal(table.sum(0), counts):
        over, under = np.argmax(table.sum(0) - counts), np.argmin(table.sum(0) - counts)
        gain = (table - exact)[:, over] - (table - exact)[:, under]
        best = np.argmax(np.where(table[:, over] > 0, gain, -np.inf))
        table[best, over] -= 1
        table[best, under] += 1
    return table
