"""Hides how randomness is keyed: a stream is a pure function of (seed, epoch, row), never of a worker, a rank, a batch or a global generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SampleIndex", "draw_bits", "draw_uniform", "drawn_rows", "mt19937_words", "stream_key", "stream_keys"]

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
#: Constants of splitmix64 (Steele, Lea, Flood 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class SampleIndex(int):
    """The number of a sample that also says for which seed and epoch it was drawn, so that a worker process cannot lag behind.

    `valid` is None, or whether a metric may count the sample (see `uneven="mask"` of the sampler).  `draw` is 0, or in an epoch that draws samples
    with replacement which of its draws this is, so that a sample that comes twice is not augmented twice in the same way.
    """

    seed: int
    epoch: int
    valid: bool | None
    draw: int

    def __new__(cls, value: int, seed: int, epoch: int, valid: bool | None = None, draw: int = 0) -> SampleIndex:
        self = int.__new__(cls, value)
        self.seed, self.epoch, self.valid, self.draw = seed, epoch, valid, draw
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndex, (int(self), self.seed, self.epoch, self.valid, self.draw)


def stream_key(seed: int, epoch: int, row: int) -> int:
    """A 64-bit key for the random stream of one row in one epoch, in [0, 2^64).

    Each part goes through a full mix, so (seed, row + 1) and (seed + 1, row) share nothing, which `seed + row` as a key would.  For one seed and
    epoch no two rows have the same key.
    """
    return _mix(_base(seed, epoch) ^ (row & _MASK))


def stream_keys(seed: int, epoch: int, rows: npt.NDArray[np.int64]) -> Words:
    """`stream_key` of each row: uint64 (N,)."""
    return _mix_all(np.asarray(rows, np.int64).view(np.uint64) ^ np.uint64(_base(seed, epoch)))


def drawn_rows(rows: npt.NDArray[np.int64], draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What stands for rows in a key where samples are drawn with replacement: it tells the draws (from 1; 0 for none) of one row apart."""
    mixed = np.where(draws == 0, np.uint64(0), _mix_all(draws.astype(np.uint64)))
    return (np.asarray(rows, np.int64).view(np.uint64) ^ mixed).view(np.int64)


def draw_bits(keys: Words, stream: int, count: int) -> Words:
    """64 random bits at each of `count` places of a stream of each key: uint64 (N, count).  Streams of other numbers share nothing."""
    places = _mix_all(np.arange(count, dtype=np.uint64) + np.uint64((stream << 32) & _MASK))
    return _mix_all(_mix_all(keys[:, None] ^ places[None, :]))


def draw_uniform(keys: Words, stream: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits: float64 (N, count)."""
    return (draw_bits(keys, stream, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mt19937_words(keys: int | Words) -> npt.NDArray[np.uint32]:
    """A whole state of the Mersenne Twister from all 64 bits of a key: uint32 (624,), or (N, 624) for an array of keys.

    torch's generator takes 32 bits of a seed only, so among 10^6 rows some hundred would share their numbers.
    """
    first = np.asarray(keys & _MASK if isinstance(keys, int) else keys, np.uint64)
    steps = first[..., None] + np.arange(1, 625, dtype=np.uint64) * np.uint64(_GOLDEN)
    words = (_finish_all(steps) >> np.uint64(32)).astype(np.uint32)
    words[..., 0] |= np.uint32(1 << 31)  # the state must not be all zero in the bits that count
    return words


def _base(seed: int, epoch: int) -> int:
    return _mix(_mix(seed & _MASK) ^ (epoch & _MASK))


def _mix(value: int) -> int:
    """The step of splitmix64: a bijection of 64 bits in which each input bit flips half of the output bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: Words) -> Words:
    return _finish_all(values + np.uint64(_GOLDEN))


def _finish_all(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
