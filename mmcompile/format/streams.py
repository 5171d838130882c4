"""Hides how 64 random bits follow from integers: the same on every machine, Python and numpy, as no generator of a library's is used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "MASK", "Words", "draw_bits", "finish_all", "mix_all", "stream_key", "stream_keys"]

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
#: Constants of splitmix64 (Steele, Lea, Flood 2014).
GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_key(seed: int, epoch: int, row: int) -> int:
    """A 64-bit key for the random stream of one row in one epoch, in [0, 2^64).

    Each part goes through a full mix, so (seed, row + 1) and (seed + 1, row) share nothing, which `seed + row` as a key would.  For one seed and
    epoch no two rows have the same key.
    """
    return _mix(_base(seed, epoch) ^ (row & MASK))


def stream_keys(seed: int, epoch: int, rows: npt.NDArray[np.int64]) -> Words:
    """`stream_key` of each row: uint64 (N,)."""
    return mix_all(np.asarray(rows, np.int64).view(np.uint64) ^ np.uint64(_base(seed, epoch)))


def draw_bits(keys: Words, stream: int, count: int) -> Words:
    """64 random bits at each of `count` places of a stream of each key: uint64 (N, count).  Streams of other numbers share nothing."""
    places = mix_all(np.arange(count, dtype=np.uint64) + np.uint64((stream << 32) & MASK))
    return mix_all(mix_all(keys[:, None] ^ places[None, :]))


def _base(seed: int, epoch: int) -> int:
    return _mix(_mix(seed & MASK) ^ (epoch & MASK))


def _mix(value: int) -> int:
    """The step of splitmix64: a bijection of 64 bits in which each input bit flips half of the output bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)


def mix_all(values: Words) -> Words:
    """The same of each value: uint64 (...)."""
    return finish_all(values + np.uint64(GOLDEN))


def finish_all(values: Words) -> Words:
    """The last part of that step: uint64 (...)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
