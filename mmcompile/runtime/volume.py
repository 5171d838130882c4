"""Hides how a volume is read: whole, its centre, or of each one a patch, of which alone the bytes are read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.fields import PIXELS, SPATIAL
from mmcompile.format.reader import Reader
from mmcompile.format.runs import Slices
from mmcompile.runtime.column import Column
from mmcompile.runtime.numbers import as_array
from mmcompile.runtime.patch import Patch, mirrored
from mmcompile.runtime.pixels import ImageColumn

if TYPE_CHECKING:
    from mmcompile.runtime.augment import Augment

__all__ = ["VolumeColumn", "check_together"]

Rows = npt.NDArray[np.int64]

#: Full scale of an 8- and a 16-bit source, and what takes the first to the second.
_FULL, _8_TO_16 = {8: 255, 16: 65535}, 257


class VolumeColumn(ImageColumn):
    """A volume, read as (D, H, W) or (C, D, H, W) samples and batches of them; what is cut from it is a Patch."""

    axes = 3

    @functools.cached_property
    def around(self) -> Tensor:
        """What lies beyond a volume, as it is stored: what the build puts around one.  (), or one value for each channel, (C, 1, 1, 1)."""
        return _around(self._reader, self.field, self.stored)

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
        around = as_array(self.around)
        canvas: Any
        for row, into, (part, place, flip) in zip(at.tolist(), out, self._boxes(cut), strict=True):
            canvas = mirrored(into, flip)
            if place is not None:
                into[...] = around
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


def _around(reader: Reader, name: str, stored: torch.dtype) -> Tensor:
    """The `fill` of a volume, scaled and normalised as a build does that with its values."""
    settings = reader.index.settings.get("preprocess")
    made: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
    if name != next((f.name for f in reader.index.fields if f.meaning in PIXELS), None):  # one beside the first has settings of its own
        own = made.get("fields")
        own = own.get(name) if isinstance(own, dict) else None
        made = {"scale": made.get("scale"), **(own if isinstance(own, dict) else {})}
    fill, normalize = made.get("fill", 0), made.get("normalize")
    value = torch.tensor(fill if isinstance(fill, int) else 0, dtype=torch.float64 if stored == torch.float64 else torch.float32, device="cpu")
    if not stored.is_floating_point:
        widened = fill and stored == torch.uint16 and made.get("scale") == "unit" and _depth(reader, made) == 8
        return torch.tensor((fill * _8_TO_16 if widened else fill) if isinstance(fill, int) else 0, dtype=stored, device="cpu")
    if fill and made.get("scale") == "unit" and (depth := _depth(reader, made)):
        value = value / _FULL[depth]
    if isinstance(normalize, dict):
        mean, std = (torch.tensor(normalize[key], dtype=value.dtype, device="cpu") for key in ("mean", "std"))
        value = (value - mean) / std
        value = value[0] if len(value) == 1 else value[:, None, None, None]
    return value.to(stored)


def _depth(reader: Reader, made: Mapping[str, Any]) -> int:
    """8 or 16 for volumes of so many bits, unsigned, as the first one is; 0 for signed values and floats, which are stored as they are."""
    mode = bytes(reader.samples(0)["mode"][0]) if reader.index.keyed and len(reader) else b"F"
    if mode[:1] == b"F" or (mode[:1] == b"I" and mode[:4] != b"I;16") or (mode[:1] == b"I" and made.get("range") is not None):
        return 8 if made.get("depth16") == "clip" else 0
    return 16 if mode[:4] == b"I;16" and made.get("depth16") == "keep" else 8


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
