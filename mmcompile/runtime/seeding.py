"""Hides how randomness is keyed: a stream is a pure function of (seed, epoch, row), never of a worker, a rank or a global generator."""

from __future__ import annotations

__all__ = ["stream_key"]

_MASK = (1 << 64) - 1


def stream_key(seed: int, epoch: int, row: int) -> int:
    """A 64-bit seed for the random stream of one row in one epoch, in [0, 2^64).

    Each part goes through a full mix, so (seed, row + 1) and (seed + 1, row) share nothing, which `seed + row` as a key would.
    """
    key = 0
    for part in (seed, epoch, row):
        key = _mix(key ^ (part & _MASK))
    return key


def _mix(value: int) -> int:
    """The step of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which each input bit flips half of the output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
