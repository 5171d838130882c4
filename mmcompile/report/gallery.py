"""Hides what is drawn of a sample: its pictures with what belongs to them over them, and its other values as words, lines and strips.

A field is shown the same way in every sample: how is decided once, from some of the rows that are shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.fields import CLASS_LISTS
from mmcompile.format.index import Field
from mmcompile.report import draw
from mmcompile.report.opened import Opened, Sample
from mmcompile.report.show import Look, as_floats, look_of, normalized_by, pictures, reduced

__all__ = ["Gallery", "Legend", "Panel"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]

#: Pictures that something is drawn over are enlarged until their longer side has so many pixels, so that lines are thin.
_SIDE = 224
#: Values that are looked at to decide how a field is shown.
_LOOKED_AT_BYTES = 64 << 20


@dataclass(frozen=True)
class Panel:
    """A picture (H, W, 3) and what it shows: the name of its field, and which plane or variant of it."""

    name: str
    pixels: Pixels


@dataclass
class Legend:
    """What colours mean, collected while samples are drawn: (kind, id) -> (colour, or None for stripes; name)."""

    entries: dict[tuple[str, int], tuple[tuple[int, int, int] | None, str]] = field(default_factory=dict)


class Gallery:
    """Draws samples of a dataset; `some` of them decide how each field is shown, dark pictures as they are where it has to be `exact`."""

    def __init__(self, data: Opened, some: Iterable[Sample], exact: bool = False) -> None:
        self.data, self.legend = data, Legend()
        self._fields = {f.name: data.whole(f) for f in data.fields}
        self._seen = [f for f in self._fields.values() if f.meaning in ("image", "volume")]
        values: dict[str, list[Array]] = {f.name: [] for f in self._seen}
        left = _LOOKED_AT_BYTES
        for sample in some:
            for f in self._seen:
                values[f.name] += [variant[f.name] for variant in sample.variants]
                left -= f.row_bytes * len(sample.variants)
            if left <= 0:
                break
        self.looks: dict[str, Look] = {f.name: look_of(f, normalized_by(data.index, f), values[f.name], exact) for f in self._seen}

    def notes(self) -> list[str]:
        """How pictures are shown, a line for each field."""
        lines = []
        for f in self._seen:
            more = reduced(f)
            lines.append(f"{f.name}: {self.looks[f.name].said}{f'; {more}' if more else ''}")
        return lines

    def panels(self, values: dict[str, Array]) -> list[Panel]:
        """The pictures of one variant of a sample, side by side: each image, or three planes of a volume, then what is drawn over the first."""
        found: list[Panel] = []
        for f in self._seen:
            for what, pixels in pictures(values[f.name], f, self.looks[f.name]):
                found.append(Panel(f"{f.name} {what}".strip(), pixels))
        base = found[0] if self._seen and self._seen[0].meaning == "image" else None
        for f in self._fields.values():
            if f.meaning == "mask":
                size = values[f.name].shape
                under = base.pixels if base is not None and base.pixels.shape[:2] == size else np.full((*size, 3), 128, np.uint8)
                found.append(Panel(f.name, self._masked(under, f, values)))
        if base is not None and (over := self._over(base.pixels, values)) is not None:
            found[0] = Panel(base.name, over)
        return found

    def _masked(self, picture: Pixels, f: Field, values: dict[str, Array]) -> Pixels:
        ids = values[f.name]
        left_out = self._left_out(f)
        names = f.categories.listed if f.categories is not None else ()
        for number in np.unique(ids).tolist():
            name = names[number] if 0 <= number < len(names) else f"object {number}" if f.count and number else ""
            if number in left_out:
                self.legend.entries[f.name, number] = None, name or "left out"
            elif not f.count:
                self.legend.entries[f.name, number] = ((0, 0, 0) if not number else draw.colour(number)), name or ("not tinted" if not number else "")
        return draw.mask(picture, ids, left_out)

    def _left_out(self, f: Field) -> tuple[int, ...]:
        """The ids of pixels that count for nothing: the fill of a mask where it is not 0, and 255 where that names no class."""
        settings: Any = self.data.index.settings
        for key in ("preprocess", "fields", f.name, "fill"):
            settings = settings.get(key) if isinstance(settings, dict) else None
        names = len(f.categories.listed) if f.categories is not None else 0
        fills = [settings] if isinstance(settings, int) and settings else []
        return tuple(fills + [draw.LEFT_OUT] * (names <= draw.LEFT_OUT and draw.LEFT_OUT not in fills and not f.count))

    def _over(self, picture: Pixels, values: dict[str, Array]) -> Pixels | None:
        """`picture`, enlarged where it is small, with boxes and keypoints over it; None where there are none."""
        lists = [f for f in self._fields.values() if f.meaning in ("boxes", "keypoints")]
        if not lists:
            return None
        factor = max(1, _SIDE // max(picture.shape[:2]))
        out = draw.enlarged(picture, factor)
        for f in lists:
            rows = values[f.name][: self.filled(f, values)]
            if f.meaning == "boxes":
                out = draw.boxes(out, rows, [draw.colour(n) for n in self.numbers(f, values)], factor)
            else:
                for points in rows:
                    out = draw.keypoints(out, points, factor)
                for number, name in enumerate(f.columns.listed if f.columns is not None else ()):
                    self.legend.entries[f.name, number + 1] = draw.colour(number + 1), name
        return out

    def filled(self, f: Field, values: dict[str, Array]) -> int:
        """How many rows of a list are filled."""
        length = len(values[f.name]) if values[f.name].ndim else 0
        return length if f.count is None else min(max(int(values[f.count]), 0), length)

    def numbers(self, f: Field, values: dict[str, Array]) -> list[int]:
        """What the boxes of a sample are coloured by: their classes where these are known, else 1."""
        own = next((o for o in self._fields.values() if f.count and o.count == f.count and o.name in CLASS_LISTS and len(o.sample_shape) == 1), None)
        count = self.filled(f, values)
        if own is None:
            return [1] * count
        names = own.categories.listed if own.categories is not None else self.data.classes
        found: list[int] = values[own.name][:count].tolist()
        for number in found:
            name = names[number] if 0 <= number < len(names) else ""
            self.legend.entries[own.name, number] = draw.colour(number), name
        return found

    def others(self, values: dict[str, Array]) -> list[tuple[Field, Array]]:
        """(field, values as numbers) of what is no picture and no label, lists cut to what is filled of them."""
        found = []
        for f in self._fields.values():
            if f.meaning in ("value", "text"):
                rows = values[f.name][: self.filled(f, values)] if f.count else values[f.name]
                found.append((f, as_floats(np.asarray(rows), f)))
        return found
