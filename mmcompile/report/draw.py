"""Hides how masks, boxes and keypoints are drawn over a picture, and which colour a class id has.

Pure: RGB pixels in, new RGB pixels out.  A colour depends on the id alone, so that it is the same in every picture and in the legend.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LEFT_OUT", "boxes", "colour", "enlarged", "keypoints", "mask"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]

#: Ids for pixels that count for nothing, beside the fill of a mask: drawn as stripes.
LEFT_OUT = 255
#: How much of a mask's colour lies over the picture, and of its border.
_OVER, _BORDER = 0.45, 0.9
#: Each hue lies a golden ratio of the circle behind the one before: neighbours differ, and none comes twice.
_GOLDEN = 0.61803398875
#: (saturation, value) by turns: hues that come close again, 5, 8 or 13 numbers later, differ in these.
_SHADES = ((0.85, 0.95), (0.6, 1.0), (0.9, 0.7), (0.45, 0.85))
#: Width of the stripes of what counts for nothing, in pixels.
_STRIPE = 3


def colour(number: int) -> Colour:
    """The colour (R, G, B) of a class id, strong enough to be seen on a photograph."""
    r, g, b = colorsys.hsv_to_rgb((0.58 + number * _GOLDEN) % 1.0, *_SHADES[number % len(_SHADES)])
    return round(r * 255), round(g * 255), round(b * 255)


def enlarged(picture: Pixels, factor: int) -> Pixels:
    """Each pixel as a square of `factor` pixels, so that lines are thin beside what they surround."""
    return picture.repeat(factor, 0).repeat(factor, 1) if factor > 1 else picture


def mask(picture: Pixels, ids: Array, left_out: Sequence[int]) -> Pixels:
    """`picture` (H, W, 3) under the class ids (H, W) of its pixels: 0 is not tinted, those of `left_out` are striped, all others have their colour
    and a border.  Time grows with the pixels, however many ids there are."""
    out = picture.astype(np.float32)
    edge = np.zeros(ids.shape, bool)
    edge[:-1] |= ids[:-1] != ids[1:]
    edge[:, :-1] |= ids[:, :-1] != ids[:, 1:]
    y, x = np.ogrid[: ids.shape[0], : ids.shape[1]]
    numbers, place = np.unique(ids, return_inverse=True)
    listed, place = numbers.tolist(), place.reshape(ids.shape)
    gone = np.array([number in left_out for number in listed])[place]
    out[gone] *= 0.5
    striped = gone & ((y + x) // _STRIPE % 2 == 0)
    out[striped] = 0.5 * out[striped] + 110
    tinted = (ids != 0) & ~gone
    share = np.where(edge[tinted], _BORDER, _OVER)[:, None]
    out[tinted] = out[tinted] * (1 - share) + np.array([colour(number) for number in listed])[place[tinted]] * share
    return np.rint(out).astype(np.uint8)


def boxes(picture: Pixels, corners: Array, colours: Sequence[Colour], factor: int = 1) -> Pixels:
    """`picture` with the outlines of boxes (K, 4), x0, y0, x1, y1 in pixels of the picture before it was enlarged by `factor`.

    An outline covers the outermost pixels inside a box, with a dark line around; what lies beyond the picture is not drawn.
    """
    out = picture.copy()
    height, width = out.shape[:2]
    thick = max(1, round(max(height, width) / 150))
    for box, of_box in zip(np.asarray(corners, np.float64).tolist(), colours, strict=True):
        if not all(np.isfinite(box)):
            continue
        left, top = (int(np.clip(np.floor(v * factor + 0.5), 0, n)) for v, n in zip(box[:2], (width, height), strict=True))
        right, bottom = (int(np.clip(np.floor(v * factor + 0.5), 0, n)) for v, n in zip(box[2:], (width, height), strict=True))
        right, bottom = max(right, left + 1), max(bottom, top + 1)
        for grown, tint in ((1, (20, 20, 20)), (0, of_box)):
            y0, y1, x0, x1 = max(0, top - grown), bottom + grown, max(0, left - grown), right + grown
            wide = thick + grown
            out[y0 : y0 + wide, x0:x1] = tint
            out[max(y0, y1 - wide) : y1, x0:x1] = tint
            out[y0:y1, x0 : x0 + wide] = tint
            out[y0:y1, max(x0, x1 - wide) : x1] = tint
            if grown:
                inside = (slice(top + thick, max(top + thick, bottom - thick)), slice(left + thick, max(left + thick, right - thick)))
                out[inside] = picture[inside]
    return out


def keypoints(picture: Pixels, points: Array, factor: int = 1) -> Pixels:
    """`picture` with a dot at each point (P, 3) that is to be seen (its third number is above 0); its colour says which of the P it is."""
    out = picture.copy()
    height, width = out.shape[:2]
    radius = max(1.5, max(height, width) / 90)
    y, x = np.ogrid[:height, :width]
    for number, (across, down, seen) in enumerate(np.asarray(points, np.float64).reshape(-1, 3).tolist()):
        if not seen > 0 or not np.isfinite(across + down):
            continue
        far = (x + 0.5 - across * factor) ** 2 + (y + 0.5 - down * factor) ** 2
        out[far <= (radius + 1) ** 2] = (20, 20, 20)
        out[far <= radius**2] = colour(number + 1)
    return out
