"""Hides how an epoch is ordered and shared out: which sample stands at a position, and which positions a rank takes in a step.

Both are pure functions of integers, the same on every machine, Python and numpy: nothing here uses numpy's random streams, and every sort is
of numbers that differ.  A position can be looked up without the ones before it, so an epoch goes on anywhere at no cost, also with another
number of ranks or another batch size.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmcompile.format.permutation import Permutation
from mmcompile.runtime.seeding import stream_key, stream_keys

__all__ = ["Order", "Steps", "balanced", "cumulative"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Positions computed at a time, so that the arrays between the steps stay in the cache.
_CHUNK = 1 << 14
#: Orders of the shards that are tried for one in which nodes share little; up to so many shards, as with more of them it matters less.
_TRIED, _FEW = 128, 1 << 12
#: Keeps the keys of an order apart from those of rows, which are drawn from the same seed and epoch.
_ORDER = 0x6F72646572
_WHOLE, _SHARDS, _WINDOW, _DRAWS, _NODE = range(5)


class Order:
    """The samples of one epoch by position.  Not changed by what is asked of it; picklable; may be used from several threads.

    `shuffle=False`: sample i stands at position i.

    `shuffle=True`: a permutation of all samples, from (seed, epoch) alone: any integers, of which the low 64 bits count.

    `shuffle="block"`: the shards are shuffled and taken `block_shards` at a time; the rows of such a window are shuffled among themselves.  So
    at most `block_shards` shards are touched at a time, or twice as many in a batch that runs from one window into the next.  `blocks` is
    int64 (shards + 1,): the first sample of each shard, then n; memory is O(shards).

    `weights`: n draws with replacement, each in proportion to the weights whose sums `cumulative` made: float64 (n,).  It stands for a shuffle,
    so `shuffle` may be either bool.  A row of weight 0 never comes.  The array is kept, not copied.

    `share=(k, nodes)`: only the samples of node k, whose number is `n` then: of the shards in the epoch's order (as they are, without a shuffle) the
    k-th of `nodes` parts, which differ by one sample at most, so that two nodes share only the shard in which one part ends and the next begins.  All
    nodes together have each sample once.  `shuffle=True` shuffles the whole share.  Needs blocks for either shuffle.

    Else memory is O(1), at most 256 KiB.  ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool | Literal["block"] = False,
        blocks: Ints | None = None,
        block_shards: int = 16,
        weights: Floats | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        total = _integer("n", n, 0)
        nodes = _integer("share", share[1], 1)
        node = _integer("share", share[0], 0)
        if node >= nodes:
            raise ValueError(f"share must be (node, nodes) with node below nodes, found {share}")
        if nodes > 1 and weights is not None:
            raise ValueError("weights draw from all samples, so they cannot be kept within a node's share of the shards: use one or the other")
        self._first = node * total // nodes
        self.n = (node + 1) * total // nodes - self._first
        self._blocks = None
        if shuffle not in (False, True, "block"):
            raise ValueError(f"shuffle must be True, False or 'block', not {shuffle!r}")
        if weights is not None and shuffle == "block":
            raise ValueError("weights draw from all samples, so they cannot be kept within a few shards: use shuffle=True with weights")
        key = stream_key(_integer("seed", seed), _integer("epoch", epoch), _ORDER)
        self._source: Permutation | _Windows | _Draws | None = None
        self._ahead = _integer("block_shards", block_shards, 1)
        if weights is not None:
            self._source = _Draws(self.n, weights, stream_key(key, _DRAWS, 0))
        elif shuffle == "block" or (shuffle and nodes > 1):
            if blocks is None:
                raise ValueError("shuffle='block' needs blocks: the first sample of each shard, then the number of samples")
            size = self._ahead if shuffle == "block" else max(1, len(blocks))
            self._source = _Windows(_starts(total, blocks), size, key, (node, nodes))
        elif shuffle:
            self._source = Permutation(self.n, stream_key(key, _WHOLE, 0))
        elif blocks is not None:
            self._blocks = _starts(total, blocks)

    def __len__(self) -> int:
        return self.n

    @property
    def replaces(self) -> bool:
        """Are samples drawn with replacement, so that one may come more than once?"""
        return isinstance(self._source, _Draws)

    def rows(self, positions: npt.ArrayLike) -> Ints:
        """The samples at these positions: int64 (k,) -> int64 (k,), in [0, n).  IndexError for a position outside [0, n)."""
        at = np.asarray(positions)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise TypeError(f"positions must be integers (k,), found {at.dtype} of shape {at.shape}")
        out = np.empty(len(at), np.int64)
        if not len(at):
            return out
        if at.min() < 0 or at.max() >= self.n:
            bad = at[(at < 0) | (at >= self.n)][0]
            raise IndexError(f"position {bad} is outside [0, {self.n})")
        at = at.astype(np.int64, copy=False)
        if self._source is None:
            np.add(at, self._first, out=out)
            return out
        for start in range(0, len(at), _CHUNK):
            out[start : start + _CHUNK] = self._source.rows(at[start : start + _CHUNK])
        return out

    def upcoming(self, first: int, last: int) -> tuple[Ints, int]:
        """A sample of each shard that positions from `first` to `last`, and those soon after, touch, in the order of use: int64 (k,).

        And the position from which on it pays to ask again.  Soon are the next window, or without a shuffle the next `block_shards` shards; nothing
        is told where an order keeps to no shards, or was not given any.
        """
        if isinstance(self._source, _Windows):
            return self._source.upcoming(first, last)
        if self._blocks is None:
            return np.empty(0, np.int64), self.n
        begin, end = np.searchsorted(self._blocks, [first + self._first, last + self._first], side="right") - 1
        beyond = int(np.searchsorted(self._blocks, self._first + self.n, side="left"))
        found = self._blocks[begin : min(end + 1 + self._ahead, beyond)]
        return np.maximum(found, self._first), min(self.n, int(self._blocks[end + 1]) - self._first)


@dataclass(frozen=True)
class Steps:
    """The positions that each rank takes in each step of an epoch of n positions, from position `start` on.

    Step s takes positions [start + s*W*B, start + (s+1)*W*B) for W = `world_size` and B = `batch_size`; rank r has the r-th B of them.  In each
    step all ranks have the same number of positions, and all ranks have the same number of steps.

    A last step with m < W*B positions is dropped by `drop_last`.  Else each rank has ceil(m / W) of them, and those that are missing are taken
    from the front of the epoch once more (`uneven="wrap"`), the same but marked as not valid (`"mask"`); or each rank has floor(m / W) and the
    rest is dropped (`"drop"`).  One rank alone neither adds nor drops.

    `own`: these ranks lack the last of the n positions (own = n - 1), which others have in their place; it counts as missing.

    An epoch that was stopped after step s goes on with `start=after(s)`, with any `world_size` and `batch_size`.  ValueError for arguments
    that do not fit.
    """

    n: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    uneven: Literal["wrap", "drop", "mask"] = "wrap"
    drop_last: bool = False
    start: int = 0
    own: int | None = None

    def __post_init__(self) -> None:
        lowest = {"n": 0, "batch_size": 1, "rank": 0, "world_size": 1, "start": 0}
        for field in fields(self):
            if field.name in lowest:
                object.__setattr__(self, field.name, _integer(field.name, getattr(self, field.name), lowest[field.name]))
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size, which is {self.world_size}, found {self.rank}")
        if self.own is not None and not max(1, self.n - 1) <= self.own <= self.n:
            raise ValueError(f"own must be n or one less, and at least 1, found {self.own} of {self.n}")
        if self.start > self.n:
            raise ValueError(f"start must be at most n, which is {self.n}, found {self.start}")
        if self.uneven not in ("wrap", "drop", "mask"):
            raise ValueError(f"uneven must be 'wrap', 'drop' or 'mask', not {self.uneven!r}")

    def __len__(self) -> int:
        full, left = divmod(self.n - self.start, self._together)
        return full + (self._share(left) > 0)

    def positions(self, step: int) -> tuple[Ints, npt.NDArray[np.bool_] | None]:
        """This rank's positions in [0, n) in a step, int64 (b,), and which of them count, bool (b,): None unless `uneven="mask"`.

        IndexError for a step outside [0, len).
        """
        first = self._first(step)
        size = self._share(self.n - first)
        at = first + self.rank * size + np.arange(size, dtype=np.int64)
        own = self.n if self.own is None else self.own
        valid = at < own if self.uneven == "mask" else None
        return at % own, valid

    def after(self, step: int) -> int:
        """Where the epoch goes on after this step: n after the last one, also when positions were dropped.

        IndexError for a step outside [0, len).
        """
        first = self._first(step)
        return self.n if step == len(self) - 1 else first + self._together

    @property
    def _together(self) -> int:
        return self.world_size * self.batch_size

    def _first(self, step: int) -> int:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside [0, {len(self)})")
        return self.start + operator.index(step) * self._together

    def _share(self, left: int) -> int:
        """How many positions each rank takes when `left` are left."""
        if left >= self._together:
            return self.batch_size
        if self.drop_last:
            return 0
        return left // self.world_size if self.uneven == "drop" else -(-left // self.world_size)


def cumulative(weights: npt.ArrayLike) -> Floats:
    """The sums that `Order(weights=)` draws by: float64 (n,), of weights (n,) that are finite and >= 0 with a sum > 0, else ValueError.

    A weight below 2^-53 of the sum before it is lost to rounding, and its row never drawn.
    """
    given = np.asarray(weights)
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        raise ValueError(f"weights must be numbers (n,), one for each sample, found {given.dtype} of shape {given.shape}")
    values = given.astype(np.float64)
    wrong = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if len(wrong):
        raise ValueError(f"weights must be finite and not negative, found {values[wrong[0]]} at row {wrong[0]} ({len(wrong)} such in all)")
    with np.errstate(over="ignore"):
        sums = np.cumsum(values)
    if not len(sums) or not 0 < sums[-1] < np.inf:
        raise ValueError(f"weights must have a finite sum above 0, found {sums[-1] if len(sums) else 0.0} over {len(sums)} samples")
    return sums


def balanced(labels: npt.ArrayLike) -> Floats:
    """Weights under which every class that occurs in `labels` (n,) is drawn equally often: float64 (n,), 1 / (samples of the class)."""
    given = np.asarray(labels)
    if given.ndim != 1:
        raise ValueError(f"labels must have shape (n,), one for each sample, found {given.shape}")
    _, which, counts = np.unique(given, return_inverse=True, return_counts=True)
    weights: Floats = (1.0 / counts)[which]
    return weights


def _starts(n: int, blocks: Ints) -> Ints:
    """The first sample of each shard, then n.  Raises ValueError for what is not that."""
    starts = np.asarray(blocks)
    if starts.ndim != 1 or not len(starts) or starts.dtype.kind not in "iu":
        raise ValueError(f"blocks must be integers (shards + 1,), found {starts.dtype} of shape {starts.shape}")
    starts = starts.astype(np.int64)
    least = np.diff(starts).min(initial=0)
    if starts[0] != 0 or starts[-1] != n or least < 0:
        raise ValueError(f"blocks must rise from 0 to the number of samples, {n}, found {starts[0]} to {starts[-1]}, smallest step {least}")
    return starts


def _touched(sizes: Ints, nodes: int) -> int:
    """The most samples that the shards of one of so many equal parts of a row of shards have."""
    ends = np.cumsum(sizes)
    cuts = np.arange(nodes + 1) * int(ends[-1]) // nodes
    first = np.searchsorted(ends, cuts[:-1], side="right")
    last = np.searchsorted(ends, cuts[1:], side="left")
    return int((ends[last] - ends[first] + sizes[first]).max())


class _Windows:
    """The shards of a share in random order, in windows of which each is shuffled by itself."""

    def __init__(self, starts: Ints, size: int, key: int, share: tuple[int, int]) -> None:
        node, nodes = share
        sizes, n = np.diff(starts), int(starts[-1])
        shards = np.arange(len(sizes), dtype=np.int64)
        tries = _TRIED if nodes > 1 and n and len(shards) <= _FEW else 1
        orders = [Permutation(len(sizes), stream_key(key, _SHARDS, turn)).rows(shards) for turn in range(tries)]
        order = min(orders, key=lambda order: _touched(sizes[order], nodes)) if tries > 1 else orders[0]
        firsts, sizes = starts[order], sizes[order]
        if nodes > 1:
            key = stream_key(key, _NODE, node)
            ends = np.cumsum(sizes)
            low, high = np.maximum(ends - sizes, node * n // nodes), np.minimum(ends, (node + 1) * n // nodes)
            mine = high > low
            firsts, sizes, n = (firsts + low - (ends - sizes))[mine], (high - low)[mine], int((high - low)[mine].sum())
        self._key, self._size = key, size
        # Of the shards in their new order: the position at which each begins (then n), and what takes a position there to a sample.
        self._places = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._moved = firsts - self._places[:-1]
        self._windows = np.append(self._places[:-1:size], n)
        self._kept: dict[int, Permutation] = {}

    def upcoming(self, first: int, last: int) -> tuple[Ints, int]:
        begin, end = np.searchsorted(self._windows, [first, last], side="right") - 1
        shards = slice(int(begin) * self._size, int(end + 2) * self._size)
        return self._places[:-1][shards] + self._moved[shards], int(self._windows[end + 1])

    def rows(self, at: Ints) -> Ints:
        first, last = np.searchsorted(self._windows, [at.min(), at.max()], side="right") - 1
        if first == last:
            return self._rows_within(int(first), at)
        window = np.searchsorted(self._windows, at, side="right") - 1
        out = np.empty_like(at)
        for w in np.unique(window):
            here = np.flatnonzero(window == w)
            out[here] = self._rows_within(int(w), at[here])
        return out

    def _rows_within(self, w: int, at: Ints) -> Ints:
        start = self._windows[w]
        shards = slice(w * self._size, (w + 1) * self._size)
        place = self._window(w).rows(at - start) + start
        shard = np.searchsorted(self._places[shards], place, side="right") - 1
        rows: Ints = place + self._moved[shards][shard]
        return rows

    def _window(self, w: int) -> Permutation:
        """The permutation of a window.  The last two are kept, as a batch seldom lies in more; replaced as a whole, so that threads may share it."""
        kept = self._kept
        if w not in kept:
            n = int(self._windows[w + 1] - self._windows[w])
            last = dict(list(kept.items())[-1:])
            kept = self._kept = {**last, w: Permutation(n, stream_key(self._key, _WINDOW, w))}
        return kept[w]


class _Draws:
    """Draws with replacement."""

    def __init__(self, n: int, sums: Floats, key: int) -> None:
        self._sums, self._key = np.asarray(sums), key
        if self._sums.shape != (n,) or self._sums.dtype != np.float64 or n == 0 or not 0 < self._sums[-1] < np.inf:
            found = f"{self._sums.dtype} {self._sums.shape}"
            raise ValueError(f"weights must be the sums that cumulative(weights) returns, float64 ({n},) with the last above 0, found {found}")
        self._last = int(np.searchsorted(self._sums, self._sums[-1], side="left"))

    def rows(self, at: Ints) -> Ints:
        uniform = (stream_keys(self._key, 0, at) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        # The first sum above: a row of weight 0 has the sum of the row before it.  Rounding of tiny sums may reach the last sum itself.
        found = np.searchsorted(self._sums, uniform * self._sums[-1], side="right")
        rows: Ints = np.minimum(found, self._last).astype(np.int64, copy=False)
        return rows


def _integer(name: str, value: Any, lowest: int | None = None) -> int:
    """A Python int; with `lowest`, one in [lowest, 2^63)."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, found {value!r}") from None
    if lowest is not None and not lowest <= number < 1 << 63:
        raise ValueError(f"{name} must be in [{lowest}, 2^63), found {number}")
    return number
