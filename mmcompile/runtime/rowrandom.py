"""Hides how a whole batch draws random numbers on its device, when each row's are to depend on that row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.runtime.seeding import draw_bits, stream_keys

__all__ = ["RowRandom"]

#: The streams of a row that belong to the calls, far from those that cuts are drawn from.
_CALLS = 1 << 31
#: Words computed at a time: 128 KiB stay in a core's cache and are below what torch starts its threads for; a device is filled, in 128 MiB.
_WORDS, _DEVICE_WORDS = 1 << 14, 1 << 24
#: Constants of splitmix64, as the signed numbers that torch has.
_GOLDEN, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class RowRandom:
    """Random numbers for a batch of N rows: each call gives (N, *size) on the batch's device, as torch's functions of the same names give (*size).

    What a row gets is a pure function of (seed, epoch, row), the number of the call, its size and the place in it: never of the other rows.  `rand`
    and `randint` give the same bits on every device, `randn` the same up to the rounding of its logarithm and cosine.  Not for several threads.
    """

    def __init__(self, seed: int, epoch: int, rows: npt.NDArray[np.int64], device: torch.device | str = "cpu") -> None:
        self._keys = stream_keys(seed, epoch, rows)
        self._device = torch.device(device)
        self._calls = 0

    def __len__(self) -> int:
        return len(self._keys)

    def rand(self, *size: int) -> Tensor:
        """Uniform in [0, 1), multiples of 2^-24: float32 (N, *size)."""
        out = self._empty(size, torch.float32)
        for first, second, words in self._words(out):
            first.copy_((words >> 40).bitwise_and_(0xFFFFFF)).mul_(2.0**-24)
            second.copy_((words >> 8).bitwise_and_(0xFFFFFF)[:, : second.shape[1]]).mul_(2.0**-24)
        return out.view(len(self), *size)

    def randn(self, *size: int) -> Tensor:
        """Normal, of mean 0 and variance 1 (Box and Muller 1958; within 5.8): float32 (N, *size)."""
        out = self._empty(size, torch.float32)
        for first, second, words in self._words(out):
            radius = (words >> 40).bitwise_and_(0xFFFFFF).add_(1).to(torch.float32).mul_(2.0**-24).log_().mul_(-2).sqrt_()
            angle = (words >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2 * math.pi * 2.0**-24)
            torch.mul(radius, angle.cos(), out=first)
            second.copy_(radius.mul_(angle.sin_())[:, : second.shape[1]])
        return out.view(len(self), *size)

    def randint(self, low: int, high: int, size: tuple[int, ...] = ()) -> Tensor:
        """Integers in [low, high), at most 2^31 of them: int64 (N, *size)."""
        span = high - low
        if not 0 < span <= 1 << 31:
            raise ValueError(f"randint draws from [low, high), 1 to 2^31 numbers, not from [{low}, {high})")
        out = self._empty(size, torch.int64)
        for first, second, words in self._words(out):
            first.copy_((words >> 32).bitwise_and_(0xFFFFFFFF)).mul_(span).bitwise_right_shift_(32).add_(low)
            second.copy_(words.bitwise_and_(0xFFFFFFFF)[:, : second.shape[1]]).mul_(span).bitwise_right_shift_(32).add_(low)
        return out.view(len(self), *size)

    def _empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if any(n < 0 for n in size):
            raise ValueError(f"size must be numbers in [0, inf), not {size}")
        return torch.empty((len(self), math.prod(size)), dtype=dtype, device=self._device)

    def _words(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Random words, int64 (rows, places), and the parts of `out` that their upper and their lower halves go to.

        The lower halves lie behind all the upper ones, so that both are written in order; their last may lack.
        """
        keys = torch.from_numpy(draw_bits(self._keys, _CALLS + self._calls, 1).view(np.int64)).to(self._device)
        self._calls += 1
        half = -(-out.shape[1] // 2)
        places = _mix(torch.arange(half, device=self._device)[None])
        step = _WORDS if self._device.type == "cpu" else _DEVICE_WORDS
        for row in range(0, len(out), max(1, step // max(1, half))):
            rows = slice(row, row + max(1, step // max(1, half)))
            for at in range(0, half, step):
                end = min(half, at + step)
                yield out[rows, at:end], out[rows, half + at : half + end], _mix(keys[rows] ^ places[:, at:end])


def _mix(words: Tensor) -> Tensor:
    """splitmix64's step, in place.  Products wrap; >> keeps the sign, so its upper bits are masked away."""
    words.add_(_GOLDEN)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))
