"""Hides how randomness is keyed: a stream is a pure function of (seed, epoch, row), never of a worker, a rank, a batch or a global generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.streams import GOLDEN, MASK, Words, draw_bits, finish_all, mix_all, stream_key, stream_keys

__all__ = ["SampleIndex", "draw_bits", "drawn_rows", "mt19937_words", "stream_key", "stream_keys"]


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


def drawn_rows(rows: npt.NDArray[np.int64], draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What stands for rows in a key where samples are drawn with replacement: it tells the draws (from 1; 0 for none) of one row apart."""
    mixed = np.where(draws == 0, np.uint64(0), mix_all(draws.astype(np.uint64)))
    return (np.asarray(rows, np.int64).view(np.uint64) ^ mixed).view(np.int64)


def mt19937_words(keys: int | Words) -> npt.NDArray[np.uint32]:
    """A whole state of the Mersenne Twister from all 64 bits of a key: uint32 (624,), or (N, 624) for an array of keys.

    torch's generator takes 32 bits of a seed only, so among 10^6 rows some hundred would share their numbers.
    """
    first = np.asarray(keys & MASK if isinstance(keys, int) else keys, np.uint64)
    steps = first[..., None] + np.arange(1, 625, dtype=np.uint64) * np.uint64(GOLDEN)
    words = (finish_all(steps) >> np.uint64(32)).astype(np.uint32)
    words[..., 0] |= np.uint32(1 << 31)  # the state must not be all zero in the bits that count
    return words
