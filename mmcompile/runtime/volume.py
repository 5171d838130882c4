"""Hides how a volume is read: whole, its centre, or of each one a patch, of which alone the bytes are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.fields import SPATIAL
from mmcompile.format.runs import Slices
from mmcompile.runtime.column import Column
from mmcompile.runtime.patch import Patch, mirrored
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
        some = slice(0, None, max(1, -(-len(rows) // sample)))
        return any(
            self._reader.cold(self.field, row[None], region=part) for row, (part, _, _) in zip(rows[some], self._boxes(cut[some]), strict=True)
        )

    def advise(self, rows: Rows, cut: Any) -> None:
        if cut is None:
            super().advise(rows, cut)
            return
        for row, (part, _, _) in zip(rows, self._boxes(cut), strict=True):
            self._reader.advise(self.field, row[None], part)

    def _gather(self, rows: Rows, cut: Any, out: npt.NDArray[Any]) -> None:
        if cut is None:
            super()._gather(rows, cut, out)
            return
        if self._mapped and self.cold(rows, cut, 1):  # or the kernel would read whatever lies around each page
            self.advise(rows, cut)
        found = self._reader.flat(self.field, rows)
        at = rows if found is None else found[1]
        canvas: Any
        for row, into, (part, place, flip) in zip(at.tolist(), out, self._boxes(cut), strict=True):
            canvas = mirrored(into, flip)
            if place is not None:
                into[...] = 0
                canvas = canvas[(..., *place)]
            if found is None:
                self._reader.part(self.field, row, part, canvas)
            else:
                canvas[...] = found[0][(row, *part)]

    def _boxes(self, cut: Patch) -> Iterator[tuple[Slices, Slices | None, list[bool]]]:
        """As `Patch.boxes`, of rows as they lie on disk."""
        lead = tuple(slice(0, n) for n in self.shape[: -self.axes])
        begins = tuple(cut.start for cut in self._region[-self.axes :]) or (0,) * self.axes
        for part, place, flip in cut.boxes(self.spatial, begins):
            yield (*lead, *part), place, flip


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
