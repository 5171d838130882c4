"""Hides which bytes of a row a part of it lies in: few runs of bytes, over gaps that cost less to read than to skip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Runs", "Slices", "runs_of"]

#: One slice of step 1 for each axis of a row as it lies on disk; none at all for the whole row.
Slices = tuple[slice, ...]

#: Bytes between two runs that are read rather than skipped: a page, which is brought from the disk whole.
_GAP = 4096


@dataclass(frozen=True)
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
    cuts = [range(n)[cut] for n, cut in zip(shape, region, strict=True)] if region else [range(n) for n in shape]
    sizes = tuple(map(len, cuts))
    strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if 0 in sizes:
        return Runs(np.empty(0, np.int64), 0, sizes, strides)
    first, nbytes = len(sizes), itemsize
    while first and (sizes[first - 1] == 1 or strides[first - 1] - nbytes <= _GAP):
        first -= 1
        nbytes += (sizes[first] - 1) * strides[first]
    offsets = np.array([sum(cut.start * stride for cut, stride in zip(cuts, strides, strict=True))], np.int64)
    for size, stride in zip(sizes[:first], strides[:first], strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return Runs(offsets, nbytes, sizes[first:], strides[first:])
