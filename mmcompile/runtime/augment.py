"""Hides how images are augmented: where each row's crop lies, how large it is and whether it is mirrored.

What is drawn for a row is a pure function of (seed, epoch, row): whoever else is in the batch, on whatever device it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.runtime.cut import Cut, apply
from mmcompile.runtime.rowrandom import RowRandom
from mmcompile.runtime.seeding import draw_uniform, stream_keys

__all__ = ["Augment", "Cut", "RowRandom", "apply"]

Rows = npt.NDArray[np.int64]

#: A stream of random numbers for each decision, so that asking for one more changes no other.
_CROP, _FLIP, _AREA, _RATIO, _PLACE = range(5)
#: RandomResizedCrop draws so often for a box that fits before it takes the centre, as torchvision's.
_TRIES = 10


@dataclass(frozen=True)
class Augment:
    """Random crops and flips, in torchvision's words: RandomCrop (`crop`, `padding`) or RandomResizedCrop (`resized_crop`, `scale`, `ratio`), then
    RandomHorizontalFlip (`hflip`, its probability).

    `crop` and `resized_crop` are an int or (height, width) and exclude each other; `padding` puts so many zeros around the image before it is
    cropped.  `scale` is the range of the part of the area that is cut, `ratio` that of width / height.  Raises TypeError or ValueError, naming the
    field, what it may be and what it is.
    """

    crop: int | tuple[int, int] | None = None
    padding: int = 0
    resized_crop: int | tuple[int, int] | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crop", "resized_crop"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _size(name, value))
        if self.crop is not None and self.resized_crop is not None:
            raise ValueError(f"crop and resized_crop exclude each other, and both are given: {self.crop} and {self.resized_crop}")
        if not _is_int(self.padding):
            raise TypeError(f"padding must be an int, not {self.padding!r}")
        if self.padding < 0:
            raise ValueError(f"padding must be in [0, inf), not {self.padding}")
        if self.padding and self.crop is None:
            raise ValueError(f"padding = {self.padding} goes before a crop, and crop is None; add crop=, the size of the images")
        for name, low in (("scale", "(0, 1]"), ("ratio", "(0, inf)")):
            object.__setattr__(self, name, _interval(name, getattr(self, name), low))
        if not _is_number(self.hflip):
            raise TypeError(f"hflip must be a probability, not {self.hflip!r}")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip must be a probability in [0, 1], not {self.hflip}")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of what is made of images of this size.  Raises ValueError when a crop is larger than them."""
        made = self.resized_crop or self.crop or (height, width)
        assert isinstance(made, tuple)
        padded = height + 2 * self.padding, width + 2 * self.padding
        if self.resized_crop is None and (made[0] > padded[0] or made[1] > padded[1]):
            around = f" with padding {self.padding}" if self.padding else ""
            raise ValueError(
                f"crop {made[0]} x {made[1]} (height x width) is larger than the images, {padded[0]} x {padded[1]}{around}; "
                "ask for less, add padding, use resized_crop, or build with a larger crop"
            )
        return made

    def draw(self, seed: int, epoch: int, rows: Rows, height: int, width: int) -> Cut:
        """What is cut in that epoch from the images of these rows, all of this size."""
        size = self.size(height, width)
        keys = stream_keys(seed, epoch, rows)
        flip = draw_uniform(keys, _FLIP, 1)[:, 0] < self.hflip
        if self.resized_crop is not None:
            return Cut(*self._boxes(keys, height, width), flip, size)
        at = draw_uniform(keys, _CROP, 2)
        top, left = (
            _integers(at[:, k], n + 2 * self.padding - part + 1) - self.padding for k, (n, part) in enumerate(zip((height, width), size, strict=True))
        )
        return Cut(top, left, np.full(len(keys), size[0]), np.full(len(keys), size[1]), flip, size)

    def _boxes(self, keys: npt.NDArray[np.uint64], height: int, width: int) -> tuple[Rows, Rows, Rows, Rows]:
        """RandomResizedCrop's boxes: of ten areas and ratios the first that fits the image, else the largest central box whose ratio is allowed."""
        low, high = self.scale
        area = height * width * (low + (high - low) * draw_uniform(keys, _AREA, _TRIES))
        least, most = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = np.exp(least + (most - least) * draw_uniform(keys, _RATIO, _TRIES))
        with np.errstate(over="ignore"):
            across, down = (np.rint(np.minimum(np.sqrt(v), 2.0**52)).astype(np.int64) for v in (area * ratio, area / ratio))
        fits = (across > 0) & (across <= width) & (down > 0) & (down <= height)
        some, first = fits.any(1), fits.argmax(1)[:, None]
        whole = width / height
        w, h = width, height
        if whole < self.ratio[0]:
            h = min(height, max(1, round(width / self.ratio[0])))
        elif whole > self.ratio[1]:
            w = min(width, max(1, round(height * self.ratio[1])))
        across = np.where(some, np.take_along_axis(across, first, 1)[:, 0], w)
        down = np.where(some, np.take_along_axis(down, first, 1)[:, 0], h)
        at = draw_uniform(keys, _PLACE, 2)
        top = np.where(some, _integers(at[:, 0], height - down + 1), (height - down) // 2)
        left = np.where(some, _integers(at[:, 1], width - across + 1), (width - across) // 2)
        return top, left, down, across


def _integers(uniform: npt.NDArray[np.float64], n: Any) -> Rows:
    """Integers in [0, n) from numbers in [0, 1)."""
    out: Rows = np.minimum((uniform * n).astype(np.int64), np.asarray(n, np.int64) - 1)
    return out


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _size(name: str, value: Any) -> tuple[int, int]:
    size = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(size) != 2 or not all(map(_is_int, size)):
        raise TypeError(f"{name} must be an int or (height, width), not {value!r}")
    least = 2 if name == "resized_crop" else 1  # torch's antialiased kernels go wrong for images one pixel wide
    if min(size) < least:
        raise ValueError(f"{name} must be in [{least}, inf), not {value!r}")
    return int(size[0]), int(size[1])


def _interval(name: str, value: Any, allowed: str) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_number, value)):
        raise TypeError(f"{name} must be (low, high), not {value!r}")
    low, high = float(value[0]), float(value[1])
    if not 0 < low <= high < math.inf or (name == "scale" and high > 1):
        raise ValueError(f"{name} must be (low, high) with low <= high, both in {allowed}, not {value!r}")
    return low, high
