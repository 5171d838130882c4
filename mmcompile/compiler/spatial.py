"""Hides how what belongs to a picture follows it: boxes and keypoints go where orientation, resize, crop and padding bring their pixels.

Pure numpy over whole records.  Coordinates count pixels of the file from its upper left corner, so that a pixel covers [x, x + 1); a row is moved by
the size and orientation of its source alone, which its provenance holds, so that rows are moved again without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.resample import Fit, fit
from mmcompile.compiler.views import Shown
from mmcompile.format.fields import Field, row_dtype

__all__ = ["Form", "Mover", "turned"]

Array = npt.NDArray[Any]

#: What each orientation of EXIF does to a point of the file: are x and y exchanged; is the new x, the new y, counted from the other side?
_TURNS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True)
class Form:
    """How a source writes the boxes or keypoints of a field: `format` of boxes, in pixels or `relative` to the size of the picture.

    `min_visibility`: boxes of which a smaller part of the area is left are dropped; 0: those of which nothing is left.  `size`: the field that says
    which (height, width) of the picture they belong to, 0 where it does not say: as stored, or as turned by its orientation.
    """

    format: str = "xyxy"
    relative: bool = False
    min_visibility: float = 0.0
    size: str = ""


@dataclass(frozen=True)
class _Place:
    """Where the turned picture lies in a sample: its pixels by `scale` (x, y), then moved by -`start`, shown within [`first`, `last`), mirrored."""

    scale: Array
    start: Array
    first: Array
    last: Array
    out: tuple[int, int]
    flip: bool = False

    @classmethod
    def of_fit(cls, fitted: Fit, height: int, width: int) -> _Place:
        start, out = np.array([fitted.left, fitted.top], np.float64), np.array(fitted.out[::-1], np.float64)
        scale = np.array([fitted.size[1] / width, fitted.size[0] / height])
        # A picture smaller than the sample has nothing of a box beyond itself.
        first, last = np.maximum(-start, 0), np.minimum(out, np.array(fitted.size[::-1]) - start)
        return cls(scale, start, first, last, fitted.out)

    @classmethod
    def of_view(cls, shown: Shown, out: tuple[int, int]) -> _Place:
        scale = np.array([out[1] / shown.width, out[0] / shown.height])
        return cls(scale, np.array([shown.left, shown.top]) * scale, np.zeros(2), np.array(out[::-1], np.float64), out, shown.flip)

    def points(self, at: Array) -> Array:
        """Points (…, 2) of the turned picture in the sample."""
        made = at * self.scale - self.start
        if self.flip:
            made[..., 0] = self.out[1] - made[..., 0]
        return made


@dataclass(frozen=True)
class Mover:
    """Moves the records of a scan (see `Scan.values`) to where `preprocess` brings their pictures; `forms` by the name of boxes and keypoints."""

    preprocess: Preprocess
    fields: tuple[Field, ...]
    forms: tuple[tuple[str, Form], ...]

    @property
    def stored(self) -> tuple[Field, ...]:
        """The fields as they are stored: with views those that move have one for each."""
        views = self.preprocess.drawn
        if views is None:
            return self.fields
        moving = self._moving
        return tuple(replace(f, shape=(views.count, *f.shape), views=views.count) if f.name in moving else f for f in self.fields)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the records that `moved` makes."""
        return row_dtype(self.stored)

    @property
    def _moving(self) -> frozenset[str]:
        known = {f.name: f for f in self.fields}
        counts = {known[name].count for name, _ in self.forms} - {None}
        return frozenset({name for name, _ in self.forms} | {f.name for f in self.fields if f.count in counts or f.name in counts})

    def moved(self, values: npt.NDArray[np.void], sources: npt.NDArray[Any], keys: Sequence[bytes]) -> npt.NDArray[np.void]:
        """The records (N,) of samples, from those of the scan (N,); `sources` (N,) have `width`, `height` and `orientation` of each picture."""
        if self.preprocess.views is not None:
            return self._viewed(values, sources, keys)
        out = values.copy()
        facts = zip(*(sources[name].tolist() for name in ("width", "height", "orientation")), strict=True)
        for row, (width, height, turn) in zip(out, facts, strict=True):
            h, w = (width, height) if self._applied(turn) >= 5 else (height, width)
            self._move(row, (width, height), turn, _Place.of_fit(fit(h, w, self.preprocess), h, w))
        return out

    def misfits(self, values: npt.NDArray[np.void], sources: npt.NDArray[Any]) -> dict[int, str]:
        """What is wrong, by place, with records (N,) that belong to pictures of another size than those of `sources` (N,) have."""
        out: dict[int, str] = {}
        actual = np.stack([sources["height"], sources["width"]], 1).astype(np.int64)
        across = (sources["orientation"] >= 5)[:, None]
        for name in sorted({form.size for _, form in self.forms} - {""}):
            said = values[name].astype(np.int64)
            known = (said > 0).all(1)
            right = (said == actual).all(1) | (across & (said == actual[:, ::-1])).all(1)
            for at in np.flatnonzero(known & ~right).tolist():
                (h, w), (height, width) = said[at].tolist(), actual[at].tolist()
                out[at] = f"{name}: {w}x{h} (width x height) for a picture of {width}x{height}: what belongs to it is in pixels of another one"
        return out

    def _applied(self, turn: int) -> int:
        """What is done of the orientation that a file has."""
        return turn if self.preprocess.orientation == "apply" else 1

    def _viewed(self, values: npt.NDArray[np.void], sources: npt.NDArray[Any], keys: Sequence[bytes]) -> npt.NDArray[np.void]:
        views, moving = self.preprocess.drawn, self._moving
        assert views is not None
        out: npt.NDArray[np.void] = np.zeros(len(values), self.dtype)
        facts = zip(*(sources[name].tolist() for name in ("width", "height", "orientation")), strict=True)
        for i, (key, (width, height, turn)) in enumerate(zip(keys, facts, strict=True)):
            h, w = (width, height) if self._applied(turn) >= 5 else (height, width)
            for k, shown in enumerate(views.shown(key, h, w)):
                one = values[i : i + 1].copy()
                self._move(one[0], (width, height), turn, _Place.of_view(shown, self.preprocess.output_hw()))
                for f in self.fields:
                    if f.name in moving:
                        out[i][f.name][k] = one[0][f.name]
                    else:
                        out[f.name][i] = values[f.name][i]
        return out

    def _move(self, row: Any, stored: tuple[int, int], turn: int, place: _Place) -> None:
        known = {f.name: f for f in self.fields}
        kept: dict[str, Array] = {}  # which rows stay, by their count
        for name, form in self.forms:
            spec = known[name]
            n = len(row[name]) if spec.count is None else int(row[spec.count])
            size, orientation = stored, self._applied(turn)
            if form.size and turn >= 5 and stored[0] != stored[1] and row[form.size].tolist() == list(stored):  # of the picture as it is turned
                size, orientation = stored[::-1], 1 if orientation == turn else {6: 8, 8: 6}.get(turn, turn)
            if spec.meaning == "boxes":
                boxes, stay = _boxes(row[name][:n], form, size, orientation, place)
                row[name][:n] = boxes
                if spec.count is not None:
                    kept[spec.count] = kept.get(spec.count, np.ones(n, bool)) & stay
            else:
                row[name][:n] = _points(row[name][:n], form, size, orientation, place)
        for count, stay in kept.items():
            if not stay.all():
                _drop(row, [f for f in self.fields if f.count == count], stay)
                row[count] = int(stay.sum())


def turned(points: Array, width: int, height: int, orientation: int) -> Array:
    """Points (…, 2) of a picture of this size as stored, after its orientation was applied."""
    swap, right, below = _TURNS[orientation]
    x, y = (points[..., 1], points[..., 0]) if swap else (points[..., 0], points[..., 1])
    w, h = (height, width) if swap else (width, height)
    return np.stack([w - x if right else x, h - y if below else y], -1)


def _placed(points: Array, form: Form, size: tuple[int, int], orientation: int, place: _Place) -> Array:
    """Points (…, 2), float64, in pixels of the sample."""
    width, height = size
    at = points * np.array([width, height], np.float64) if form.relative else points
    return place.points(turned(at, width, height, orientation))


def _boxes(boxes: Array, form: Form, size: tuple[int, int], orientation: int, place: _Place) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(boxes x0, y0, x1, y1 (n, 4) in the sample, clipped to it; which of them are to be seen (n,))."""
    given = boxes.astype(np.float64)
    if form.format == "cxcywh":
        given[:, :2] -= given[:, 2:] / 2
    if form.format != "xyxy":
        given[:, 2:] += given[:, :2]
    corners = _placed(given.reshape(-1, 2, 2), form, size, orientation, place)
    low, high = corners.min(1), corners.max(1)
    inside_low, inside_high = (np.clip(ends, place.first, place.last) for ends in (low, high))
    area, left = np.prod(high - low, axis=1), np.prod(inside_high - inside_low, axis=1)
    seen = (left > 0) & (left >= form.min_visibility * area)
    return np.concatenate([inside_low, inside_high], 1), seen


def _points(points: Array, form: Form, size: tuple[int, int], orientation: int, place: _Place) -> Array:
    """Keypoints (…, 3) in the sample; one that lies outside, or was not labelled, is not to be seen, and a point not labelled stays 0."""
    given = points.astype(np.float64)
    labelled = given[..., 2] > 0
    at = _placed(given[..., :2], form, size, orientation, place)
    inside = (at >= 0).all(-1) & (at[..., 0] < place.out[1]) & (at[..., 1] < place.out[0])
    out = np.zeros_like(given)
    out[..., :2] = np.where(labelled[..., None], at, 0)
    out[..., 2] = np.where(labelled & inside, given[..., 2], 0)
    return out


def _drop(row: Any, fields: Sequence[Field], stay: npt.NDArray[np.bool_]) -> None:
    """Take rows out of lists of one count: those behind move up, and what is left over is as empty rows are."""
    n = int(stay.sum())
    for spec in fields:
        row[spec.name][:n] = row[spec.name][: len(stay)][stay]
        row[spec.name][n : len(stay)] = spec.empty
