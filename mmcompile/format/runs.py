"""Hides which bytes of a row a part of it lies in: few runs of bytes, over gaps that cost less to read than to skip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Runs", "Slices", "runs_of"]

#: One slice of step 1 for each axis of a row as it lies on disk; none at all for the whole row.
Slices = tuple[slice, ...]

#: Bytes between two runs that are read rather than skipped: a page, which is brought from the disk whole.
_GAP = 4096


@dataclass(frozen=True, eq=False)
class Runs:
    """Where in a row its part lies: at each of `offsets` (int64) a run of `nbytes` bytes.

    A run holds the part's last axes, an array of `shape` and `strides` (in bytes); there is one for each place along the axes before, in C order.
    """

    offsets: npt.NDArray[np.int64]
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def runs_of(shape: tuple[int, ...], itemsize: int, region: Slices) -> Runs:
    """The runs of a part of a row of this shape."""
    strides = _strides(shape, itemsize)
    if not region:
        return Runs(np.zeros(1, np.int64), itemsize * math.prod(shape), shape, strides)
    begin, sizes = 0, []
    for cut, n, stride in zip(region, shape, strides, strict=True):
        start, stop, _ = cut.indices(n)
        begin += start * stride
        sizes.append(max(0, stop - start))
    if 0 in sizes:
        return Runs(np.empty(0, np.int64), 0, tuple(sizes), strides)
    first, nbytes = len(sizes), itemsize
    while first and (sizes[first - 1] == 1 or strides[first - 1] - nbytes <= _GAP):
        first -= 1
        nbytes += (sizes[first] - 1) * strides[first]
    offsets = np.full(1, begin, np.int64)
    for size, stride in zip(sizes[:first], strides[:first], strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return Runs(offsets, nbytes, tuple(sizes[first:]), strides[first:])


@lru_cache(64)
def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
