"""Hides how a patch is cut from an array of any number of axes and mirrored: which part of the array goes where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Patch", "apply"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Patch:
    """What is cut from each of N arrays along their last A axes: [start, start + size), then mirrored along the axes where `flip`.

    `start` is int64 (N, A), `flip` bool (N, A).  What of it lies beyond the array is 0.  `patch[part]` is that of some of the arrays.
    """

    start: Rows
    flip: npt.NDArray[np.bool_]
    size: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, part: slice | npt.NDArray[np.bool_]) -> Patch:
        return Patch(self.start[part], self.flip[part], self.size)

    def source(self, i: int, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> tuple[slice, ...]:
        """The part of array i that there is of its patch, a slice for each of the A axes; of the array's `region`, where that alone counts."""
        cuts = []
        for axis, (start, size, n) in enumerate(zip(self.start[i].tolist(), self.size, shape, strict=True)):
            first = region[axis].start if region else 0
            low = min(max(start, 0), n)
            cuts.append(slice(first + low, first + max(low, min(start + size, n))))
        return tuple(cuts)

    def target(self, i: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where in what is made of array i that part goes, mirrored as it is."""
        cuts = []
        for start, size, n, flip in zip(self.start[i].tolist(), self.size, shape, self.flip[i].tolist(), strict=True):
            low = min(max(-start, 0), size)
            high = max(low, min(n - start, size))
            if flip and low < high:
                cuts.append(slice(size - 1 - low, size - 1 - high if high < size else None, -1))
            else:
                cuts.append(slice(low, high))
        return tuple(cuts)

    def leaves(self, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Does the patch of each array of this shape lie partly beyond it?  bool (N,)."""
        beyond = (self.start < 0) | (self.start + self.size > np.array(shape))
        return np.asarray(beyond.any(1), np.bool_)


def apply(store: Tensor, at: Rows, patch: Patch, out: Tensor, which: Rows) -> None:
    """The patches of store[at], arrays with whatever axes before, into `out` (N, …, *size), on one device; of those that are `which`."""
    axes = len(patch.size)
    lead = (slice(None),) * (store.ndim - 1 - axes)
    shape = tuple(store.shape[-axes:])
    leaves = patch.leaves(shape).tolist()
    for i, row in zip(which.tolist(), at[which].tolist(), strict=True):
        if leaves[i]:
            out[i].zero_()
        into, target = out[i], patch.target(i, shape)
        box = store[row][(*lead, *patch.source(i, shape))]
        mirrored = [axis - axes for axis, cut in enumerate(target) if cut.step is not None]
        forward = tuple(
            slice(cut.stop + 1 if cut.stop is not None else 0, cut.start + 1) if cut.step is not None else cut for cut in target
        )  # torch has no steps below 0
        into[(*lead, *forward)] = box.flip(mirrored) if mirrored else box
