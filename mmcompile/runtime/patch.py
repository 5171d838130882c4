"""Hides how a patch is cut from an array of any number of axes and mirrored: which part of the array goes where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mmcompile.format.runs import Slices

__all__ = ["Patch", "apply", "mirrored"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_ALL, _BACK = slice(None), slice(None, None, -1)


@dataclass(frozen=True, eq=False)
class Patch:
    """What is cut from each of N arrays along their last A axes: [start, start + size), then mirrored along the axes where `flip`.

    `start` is int64 (N, A), `flip` bool (N, A).  `patch[part]` is that of some of the arrays.
    """

    start: Rows
    flip: npt.NDArray[np.bool_]
    size: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, part: slice | npt.NDArray[np.bool_] | Rows) -> Patch:
        return Patch(self.start[part], self.flip[part], self.size)

    def boxes(self, shape: tuple[int, ...], begins: tuple[int, ...]) -> Iterator[tuple[Slices, Slices | None, list[bool]]]:
        """For each array, whose A axes are those of `shape`: the part of it that there is, its place in the patch (not mirrored yet), and `flip`.

        A part's axes begin at `begins`.  Its place is None where the part is all of the patch.
        """
        beyond: list[bool] = np.any((self.start < 0) | (self.start + self.size > np.array(shape)), 1).tolist()
        for start, flip, leaves in zip(self.start.tolist(), self.flip.tolist(), beyond, strict=True):
            if not leaves:
                yield tuple([slice(b + s, b + s + n) for b, s, n in zip(begins, start, self.size, strict=True)]), None, flip
                continue
            part, place = [], []
            for b, s, size, n in zip(begins, start, self.size, shape, strict=True):
                low = min(max(s, 0), n)
                high = max(low, min(s + size, n))
                part.append(slice(b + low, b + high))
                place.append(slice(low - s, high - s))
            yield tuple(part), tuple(place), flip


def mirrored(out: Array, flip: list[bool]) -> Array:
    """A view of an array whose last axes run backwards where `flip`."""
    return out[(..., *[_BACK if turned else _ALL for turned in flip])] if any(flip) else out


def apply(store: Tensor, at: Rows, patch: Patch, out: Tensor, which: Rows, around: Tensor) -> None:
    """The patches of store[at], arrays with whatever axes before, into `out` (N, …, *size), on one device; of those that are `which`.

    `around` is what lies beyond the arrays: one value, or of as many axes as they have.
    """
    axes = len(patch.size)
    lead = (_ALL,) * (store.ndim - 1 - axes)
    boxes = patch[which].boxes(tuple(store.shape[-axes:]), (0,) * axes)
    for i, row, (part, place, flip) in zip(which.tolist(), at[which].tolist(), boxes, strict=True):
        box, into = store[row][(*lead, *part)], out[i]
        if place is not None:
            into.copy_(around)
            turned = [slice(n - cut.stop, n - cut.start) if back else cut for cut, n, back in zip(place, patch.size, flip, strict=True)]
            into = into[(*lead, *turned)]
        into.copy_(box.flip([k - axes for k in range(axes) if flip[k]]) if any(flip) else box)
