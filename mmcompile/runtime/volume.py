"""Hides how a volume is read: whole, its centre, or of each one a patch, of which alone the bytes are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.fields import SPATIAL
from mmcompile.runtime.column import Column
from mmcompile.runtime.patch import Patch
from mmcompile.runtime.pixels import ImageColumn

if TYPE_CHECKING:
    from mmcompile.runtime.augment import Augment

__all__ = ["VolumeColumn", "check_together"]

Rows = npt.NDArray[np.int64]


class VolumeColumn(ImageColumn):
    """A volume, read as (D, H, W) or (C, D, H, W) samples and batches of them; what is cut from it is a Patch."""

    axes = 3

    def cold(self, rows: Rows, cut: Any, sample: int) -> bool:
        if cut is None:
            return super().cold(rows, cut, sample)
        some = np.unique(np.arange(sample) * len(rows) // sample) if len(rows) else rows
        return any(self._reader.cold(self.field, rows[i : i + 1], region=self._source(i, cut)) for i in some.tolist())

    def advise(self, rows: Rows, cut: Any) -> None:
        if cut is None:
            super().advise(rows, cut)
            return
        for i in range(len(rows)):
            self._reader.advise(self.field, rows[i : i + 1], self._source(i, cut))

    def _gather(self, rows: Rows, cut: Any, out: npt.NDArray[Any]) -> None:
        if cut is None:
            super()._gather(rows, cut, out)
            return
        leaves = cut.leaves(self.spatial).tolist()
        found = self._reader.flat(self.field, rows)
        for i, row in enumerate(rows.tolist()):
            if leaves[i]:
                out[i] = 0
            into = out[i][(..., *cut.target(i, self.spatial))]
            if found is None:
                self._reader.part(self.field, row, self._source(i, cut), into)
            else:
                into[...] = found[0][found[1][i]][self._source(i, cut)]

    def _source(self, i: int, cut: Patch) -> tuple[slice, ...]:
        """The part of a stored row that a patch is made of."""
        lead = tuple(slice(0, n) for n in self.shape[: -self.axes])
        return (*lead, *cut.source(i, self.spatial, self._region[-self.axes :]))


def check_together(where: str, augment: Augment, columns: Sequence[Column]) -> None:
    """Can all that moves with a volume move with it?  Raises ValueError."""
    moved = {column.name: column.meaning for column in columns if column.meaning in SPATIAL}
    if "volume" not in moved.values():
        return
    flat = [name for name, meaning in moved.items() if meaning in ("boxes", "keypoints")]
    if flat:
        raise ValueError(f"{where}: augment cannot move {flat} with a volume; leave them out with fields=")
    shapes = {column.name: column.shape if column.meaning == "mask" else column.spatial for column in columns if column.name in moved}
    if len(set(shapes.values())) > 1 and (augment.crop is not None or augment.resized_crop is not None):
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{where}: augment cuts the same patch of all that belongs to a volume, and their shapes differ: {said}; choose with fields="
        )
