"""Hides how what belongs to a picture follows it: boxes and keypoints go where orientation, resize, crop and padding bring their pixels.

Pure numpy over whole records.  Coordinates count pixels of the file from its upper left corner, so that a pixel covers [x, x + 1); a row is moved by
the size and orientation of its source alone, which its provenance holds, so that rows are moved again without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.resample import Fit, fit
from mmcompile.format.fields import Field

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
class Mover:
    """Moves the records of a scan (see `Scan.values`) to where `preprocess` brings their pictures; `forms` by the name of boxes and keypoints."""

    preprocess: Preprocess
    fields: tuple[Field, ...]
    forms: tuple[tuple[str, Form], ...]

    def moved(self, values: npt.NDArray[np.void], sources: npt.NDArray[Any]) -> npt.NDArray[np.void]:
        """The records (N,) of samples, from those of the scan (N,); `sources` (N,) have `width`, `height` and `orientation` of each picture."""
        out = values.copy()
        facts = zip(*(sources[name].tolist() for name in ("width", "height", "orientation")), strict=True)
        for row, (width, height, orientation) in zip(out, facts, strict=True):
            self._move(row, width, height, orientation)
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

    def _move(self, row: Any, width: int, height: int, turn: int) -> None:
        orientation = turn if self.preprocess.orientation == "apply" else 1
        across = orientation >= 5
        fitted = fit(width if across else height, height if across else width, self.preprocess)
        known = {f.name: f for f in self.fields}
        kept: dict[str, Array] = {}  # which rows stay, by their count
        for name, form in self.forms:
            spec = known[name]
            n = len(row[name]) if spec.count is None else int(row[spec.count])
            size = width, height
            if form.size and turn >= 5 and width != height and row[form.size].tolist() == [width, height]:  # of the picture as it is turned
                size, orientation = (height, width), 1 if across else {6: 8, 8: 6}.get(turn, turn)
            if spec.meaning == "boxes":
                boxes, stay = _boxes(row[name][:n], form, size, orientation, fitted)
                row[name][:n] = boxes
                if spec.count is not None:
                    kept[spec.count] = kept.get(spec.count, np.ones(n, bool)) & stay
            else:
                row[name][:n] = _points(row[name][:n], form, size, orientation, fitted)
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


def _placed(points: Array, form: Form, size: tuple[int, int], orientation: int, fitted: Fit) -> Array:
    """Points (…, 2), float64, in pixels of the sample."""
    width, height = size
    at = points * np.array([width, height], np.float64) if form.relative else points
    at = turned(at, width, height, orientation)
    w, h = (height, width) if orientation >= 5 else (width, height)
    return at * [fitted.size[1] / w, fitted.size[0] / h] - [fitted.left, fitted.top]


def _boxes(boxes: Array, form: Form, size: tuple[int, int], orientation: int, fitted: Fit) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(boxes x0, y0, x1, y1 (n, 4) in the sample, clipped to it; which of them are to be seen (n,))."""
    given = boxes.astype(np.float64)
    if form.format == "cxcywh":
        given[:, :2] -= given[:, 2:] / 2
    if form.format != "xyxy":
        given[:, 2:] += given[:, :2]
    corners = _placed(given.reshape(-1, 2, 2), form, size, orientation, fitted)
    low, high = corners.min(1), corners.max(1)
    limits = np.array([fitted.out[1], fitted.out[0]], np.float64)
    # A picture smaller than the sample has nothing of a box beyond itself.
    first = np.maximum([-fitted.left, -fitted.top], 0)
    last = np.minimum(limits, [fitted.size[1] - fitted.left, fitted.size[0] - fitted.top])
    inside_low, inside_high = np.clip(low, first, last), np.clip(high, first, last)
    area, left = np.prod(high - low, axis=1), np.prod(inside_high - inside_low, axis=1)
    seen = (left > 0) & (left >= form.min_visibility * area)
    return np.concatenate([inside_low, inside_high], 1), seen


def _points(points: Array, form: Form, size: tuple[int, int], orientation: int, fitted: Fit) -> Array:
    """Keypoints (…, 3) in the sample; one that lies outside, or was not labelled, is not to be seen, and a point not labelled stays 0."""
    given = points.astype(np.float64)
    labelled = given[..., 2] > 0
    at = _placed(given[..., :2], form, size, orientation, fitted)
    inside = (at >= 0).all(-1) & (at[..., 0] < fitted.out[1]) & (at[..., 1] < fitted.out[0])
    out = np.zeros_like(given)
    out[..., :2] = np.where(labelled[..., None], at, 0)
    out[..., 2] = np.where(labelled & inside, given[..., 2], 0)
    return out


def _drop(row: Any, fields: Sequence[Field], stay: npt.NDArray[np.bool_]) -> None:
    """Take rows out of lists of one count: those behind move up, and what is left over is as empty rows are."""
    n = int(stay.sum())
    for spec in fields:
        row[spec.name][:n] = row[spec.name][: len(stay)][stay]
        row[spec.name][n : len(stay)] = -1 if spec.categories is not None else 0
