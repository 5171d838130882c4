"""Hides how a random resized crop is drawn: boxes as pure functions of keys, the same when a dataset is built and when it is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.streams import Words, draw_bits

__all__ = ["draw_boxes", "draw_integers", "draw_uniform"]

Rows = npt.NDArray[np.int64]

#: RandomResizedCrop draws so often for a box that fits before it takes the centre, as torchvision's.
_TRIES = 10


def draw_uniform(keys: Words, stream: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits: float64 (N, count)."""
    return (draw_bits(keys, stream, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_integers(uniform: npt.NDArray[np.float64], n: Any) -> Rows:
    """Integers in [0, n) from numbers in [0, 1)."""
    out: Rows = np.minimum((uniform * n).astype(np.int64), np.asarray(n, np.int64) - 1)
    return out


def draw_boxes(
    keys: Words, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], streams: tuple[int, int, int]
) -> tuple[Rows, Rows, Rows, Rows]:
    """(top, left, height, width) (N,) of RandomResizedCrop's boxes in a picture of this size, by the streams of areas, ratios and places.

    Of ten areas (shares of the picture in `scale`) and ratios (width / height in `ratio`) the first that fits; else the largest central box whose
    ratio is allowed.
    """
    (low, high), (areas, ratios, places) = scale, streams
    area = height * width * (low + (high - low) * draw_uniform(keys, areas, _TRIES))
    least, most = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(least + (most - least) * draw_uniform(keys, ratios, _TRIES))
    with np.errstate(over="ignore"):
        across, down = (np.rint(np.minimum(np.sqrt(v), 2.0**52)).astype(np.int64) for v in (area * aspect, area / aspect))
    fits = (across > 0) & (across <= width) & (down > 0) & (down <= height)
    some, first = fits.any(1), fits.argmax(1)[:, None]
    whole = width / height
    w, h = width, height
    if whole < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif whole > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    across = np.where(some, np.take_along_axis(across, first, 1)[:, 0], w)
    down = np.where(some, np.take_along_axis(down, first, 1)[:, 0], h)
    at = draw_uniform(keys, places, 2)
    top = np.where(some, draw_integers(at[:, 0], height - down + 1), (height - down) // 2)
    left = np.where(some, draw_integers(at[:, 1], width - across + 1), (width - across) // 2)
    return top, left, down, across
