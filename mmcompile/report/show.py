"""Hides how the numbers of a sample become a picture for eyes: normalisation undone, floats, 16 bit and signed numbers put between black and white.

Pure: arrays in, RGB pixels out, and a sentence about what was done to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.index import Field, Index

__all__ = ["Look", "as_floats", "look_of", "normalized_by", "pictures", "reduced", "shrunk"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]

#: Values that are meant to lie in [0, 1] and are written so, give or take what normalising and undoing it costs in bfloat16.
_UNIT = (-0.02, 1.02)
#: Pictures of which nothing that is looked at reaches this part of white, as levels from 0 to 16 or 12 bits of 16, would be black as they are.
_DARK_PART = 0.25
#: Of other values so many percent at each end may be cut off: single bright pixels would leave all else black.
_PERCENT = 0.2
#: Values of a sample that are looked at for that.
_LOOKED_AT = 1 << 16
#: Sides of the squares behind what is transparent, in pixels, and their two levels.
_SQUARE, _LIGHT, _DARK = 8, 236, 205


@dataclass(frozen=True)
class Look:
    """How values become levels: `mean` and `std` are undone (where there are some), then `low` is black and `high` white.  `said` tells a person."""

    low: float
    high: float
    said: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def as_floats(values: Array, field: Field) -> Array:
    """Stored values as numbers: bfloat16, which lies on disk as its bits, as float32; all others as they are."""
    if field.dtype != "bfloat16" or values.dtype.kind == "f":
        return values
    return np.asarray((values.astype("<u4") << 16).view("<f4"))


def normalized_by(index: Index, field: Field) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """(means, stds) that were baked into the stored values of a field; None where none were.  Settings may be a stranger's."""
    if field.stored.kind != "f" and field.dtype != "bfloat16":
        return None
    settings: Any = index.settings.get("preprocess")
    fields = settings.get("fields") if isinstance(settings, dict) else None
    own = fields.get(field.name) if isinstance(fields, dict) else None
    first = next((f.name for f in index.fields if f.meaning == "image"), None)
    for place in (own, settings if field.name == first or field.meaning == "volume" else None):
        said = place.get("normalize") if isinstance(place, dict) else None
        if isinstance(said, dict):
            mean, std = (_numbers(said.get(key), field.channels) for key in ("mean", "std"))
            if mean and std:
                return mean, std
    return None


def _numbers(value: Any, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) not in (1, count) or not all(isinstance(n, int | float) and abs(n) < 1e300 for n in value):
        return ()
    return tuple(float(n) for n in value) * (count if len(value) == 1 else 1)


def look_of(field: Field, baked: tuple[tuple[float, ...], tuple[float, ...]] | None, some: Sequence[Array], exact: bool = False) -> Look:
    """How a picture or volume is shown, by the values of `some` of its samples, each (C, …) or (D, H, W).

    exact: what has a black and a white of its own (uint8, and floats from 0 to 1) keeps them, however dark it is.
    """
    undone = "normalisation undone; " if baked is not None else "normalised when read, shown as stored; " if field.normalize is not None else ""
    both: dict[str, Any] = {} if baked is None else {"mean": baked[0], "std": baked[1]}
    if field.dtype == "uint8":
        white = max((int(one.max(initial=0)) for one in some), default=0)
        if 0 < white < _DARK_PART * 255 and not exact:
            return Look(0.0, float(white), f"{undone}uint8 stretched: 0 is black, {white} is white", **both)
        return Look(0.0, 255.0, f"{undone}uint8 from 0 (black) to 255 (white)", **both)
    if field.dtype == "bool":
        return Look(0.0, 1.0, "false is black, true is white", **both)
    shaped = [one[None] if field.meaning == "volume" and one.ndim == 3 else one for one in some]
    found = [_undone(as_floats(_thinned(one), field), both.get("mean"), both.get("std")).reshape(-1) for one in shaped]
    values = np.concatenate(found) if found else np.zeros(1)
    values = values[np.isfinite(values)]
    low, high = (float(v) for v in np.percentile(values, (0, 100))) if len(values) else (0.0, 1.0)
    if field.dtype in ("float16", "bfloat16", "float32", "float64") and _UNIT[0] <= low and high <= _UNIT[1]:
        if low >= 0 and 0 < high < _DARK_PART and not exact:
            return Look(0.0, high, f"{undone}{field.dtype} stretched: 0 is black, {high:.4g} is white", **both)
        return Look(0.0, 1.0, f"{undone}{field.dtype} from 0 (black) to 1 (white)", **both)
    if len(values):
        low, high = (float(v) for v in np.percentile(values, (_PERCENT, 100 - _PERCENT)))
    if not high > low:
        half = max(0.5, float(np.spacing(abs(low))))  # beyond 2**53 a half is nothing
        low, high = low - half, low + half
    return Look(low, high, f"{undone}{field.dtype} stretched: {low:.4g} is black, {high:.4g} is white", **both)


def _thinned(values: Array) -> Array:
    """Every k-th line along the last axes, so that about _LOOKED_AT values are left; odd steps, so that no column is left out for ever."""
    step = max(1, round((values.size / _LOOKED_AT) ** 0.5))
    return values[..., :: step | 1, :: step | 1]


def _undone(values: Array, mean: Sequence[float] | None, std: Sequence[float] | None) -> Array:
    """Values (C, …) as float64 without their normalisation."""
    out = values.astype(np.float64)
    if mean is not None and std is not None:
        shape = (-1,) + (1,) * (values.ndim - 1)
        with np.errstate(all="ignore"):  # infinities of a stranger
            out = out * np.reshape(std[: len(values)], shape) + np.reshape(mean[: len(values)], shape)
    return out


def pictures(values: Array, field: Field, look: Look) -> list[tuple[str, Pixels]]:
    """(what it shows, RGB pixels (H, W, 3)) of a sample: of an image one, of a volume the middle planes along its three axes.

    `values` is (C, H, W), (D, H, W) or (C, D, H, W) as stored.  One channel is grey, two are red and green, four are RGBA over squares where `values`
    are of 8 bits, of more the first three are shown.
    """
    if field.meaning == "image":
        return [("", _drawn(values, field, look))]
    volume = values if values.ndim == 4 else values[None]
    middle = [n // 2 for n in volume.shape[1:]]
    planes = (volume[:, middle[0]], volume[:, :, middle[1]], volume[:, :, :, middle[2]])
    return [(f"{axis} {at}", _drawn(plane, field, look)) for axis, at, plane in zip("zyx", middle, planes, strict=True)]


def _drawn(values: Array, field: Field, look: Look) -> Pixels:
    """The colours of a picture (C, H, W)."""
    some = values if len(values) <= 4 else values[:3]
    numbers = _undone(as_floats(some, field), look.mean, look.std)
    with np.errstate(all="ignore"):
        levels = np.nan_to_num((numbers - look.low) * (255 / (look.high - look.low)), nan=0.0, posinf=255, neginf=0)
    pixels = np.rint(levels.clip(0, 255)).astype(np.uint8)
    return _colours(pixels, transparent=field.meaning == "image" and field.dtype == "uint8")


def _colours(pixels: Pixels, transparent: bool = False) -> Pixels:
    """(C, H, W) -> (H, W, 3)."""
    channels, height, width = pixels.shape
    if channels == 1:
        return np.repeat(pixels[0][:, :, None], 3, 2)
    if channels == 2:
        pixels = np.concatenate([pixels, np.zeros((1, height, width), np.uint8)])
    if channels == 4 and transparent:
        y, x = np.ogrid[:height, :width]
        behind = np.where((y // _SQUARE + x // _SQUARE) % 2, _DARK, _LIGHT)
        share = pixels[3] / 255.0
        pixels = np.rint(pixels[:3] * share + behind * (1 - share)).astype(np.uint8)
    return np.ascontiguousarray(pixels[:3].transpose(1, 2, 0))


def reduced(field: Field) -> str:
    """What of a sample's channels is not to be seen; nothing where all are."""
    channels = field.channels
    said = {2: "two channels are red and green", 4: "" if field.dtype == "uint8" else "the first three of 4 channels are shown"}
    return said.get(channels, "" if channels <= 3 else f"the first three of {channels:,} channels are shown")


def shrunk(pixels: Pixels, most: int) -> Pixels:
    """A picture (H, W, C) whose longer side is at most `most`: means of boxes of a whole number of pixels, what is left over at the end too."""
    step = -(-max(pixels.shape[:2]) // most)
    if step <= 1:
        return pixels
    down, across = (np.arange(0, n, step) for n in pixels.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(pixels.astype(np.uint32), down, 0), across, 1)
    counts = np.diff(down, append=pixels.shape[0])[:, None] * np.diff(across, append=pixels.shape[1])[None, :]
    return np.asarray((sums + counts[:, :, None] // 2) // counts[:, :, None], np.uint8)
