"""Hides how images are augmented: where each row's crop lies, how large it is and whether it is mirrored.

What is drawn for a row is a pure function of (seed, epoch, row): whoever else is in the batch, on whatever device it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.randomcrop import draw_boxes, draw_integers, draw_uniform
from mmcompile.runtime.cut import Cut, apply
from mmcompile.runtime.patch import Patch
from mmcompile.runtime.rowrandom import RowRandom
from mmcompile.runtime.seeding import stream_keys

__all__ = ["Augment", "Cut", "RowRandom", "apply"]

Rows = npt.NDArray[np.int64]

#: A stream of random numbers for each decision, so that asking for one more changes no other.
_CROP, _FLIP, _AREA, _RATIO, _PLACE = range(5)


@dataclass(frozen=True, repr=False)
class Augment:
    """Random crops and flips, in torchvision's words: RandomCrop (`crop`, `padding`) or RandomResizedCrop (`resized_crop`, `scale`, `ratio`), then
    RandomHorizontalFlip (`hflip`, its probability).

    `crop` and `resized_crop` are an int or (height, width) and exclude each other; `padding` puts so many zeros around the image before it is
    cropped, and around a volume what its build puts there, its `fill`.  `scale` is the range of the part of the area that is cut, `ratio` that of
    width / height.  Of volumes `crop` is an int or (depth, height, width), the patch of which alone the bytes are read, and the same of all volumes
    of a sample; `flip` are probabilities, one for each of these axes, in place of `hflip`, which is that of the last.

    What belongs to an image moves with it: images of one size and masks get the same cut (class ids are those of the nearest pixels, and beyond the
    image the mask's own fill), boxes and keypoints move as with the `crop` of a dataset.  A flip exchanges no left and right keypoints.

    Raises TypeError or ValueError, naming the field, what it may be and what it is.
    """

    crop: int | tuple[int, ...] | None = None
    padding: int = 0
    resized_crop: int | tuple[int, int] | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.0
    flip: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        """The call that makes it, without what is so anyway."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return f"Augment({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"

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
        if self.flip is not None:
            object.__setattr__(self, "flip", _probabilities("flip", self.flip))
            if self.hflip:
                raise ValueError(f"flip and hflip exclude each other, and both are given: {self.flip} and {self.hflip}")

    def size(self, *shape: int) -> tuple[int, ...]:
        """The shape of what is made of images (height, width), or volumes (depth, height, width), of this shape.

        Raises ValueError where a crop is larger than them, and for what is not for them.
        """
        of_images = len(shape) == 2
        what, axes = ("images", "height x width") if of_images else ("volumes", "depth x height x width")
        if self.resized_crop is not None:
            if of_images and self.flip is None:
                assert isinstance(self.resized_crop, tuple)
                return self.resized_crop
            if not of_images:
                raise ValueError(f"resized_crop is for images, and {what} are not resampled: use crop=, an int or a number for each axis")
        if self.flip is not None and (of_images or len(self.flip) != len(shape)):
            said = "use hflip" if of_images else f"it takes {len(shape)} probabilities"
            raise ValueError(f"flip {self.flip} is not for {what} ({axes}): {said}")
        made = shape if self.crop is None else self.crop if isinstance(self.crop, tuple) else (self.crop,) * len(shape)
        if len(made) != len(shape):
            raise ValueError(f"crop {made} is not for {what}: give an int, or {len(shape)} numbers ({axes})")
        padded = tuple(n + 2 * self.padding for n in shape)
        if any(part > n for part, n in zip(made, padded, strict=True)):
            wanted, there = (" x ".join(map(str, numbers)) for numbers in (made, padded))
            around = f" with padding {self.padding}" if self.padding else ""
            raise ValueError(
                f"crop {wanted} ({axes}) is larger than the {what}, {there}{around}; "
                f"ask for less, add padding, {'use resized_crop, ' if of_images else ''}or build with a larger crop"
            )
        return made

    def draw(self, seed: int, epoch: int, rows: Rows, height: int, width: int) -> Cut:
        """What is cut in that epoch from the images of these rows, all of this size."""
        down, across = size = self.size(height, width)
        keys = stream_keys(seed, epoch, rows)
        flip = draw_uniform(keys, _FLIP, 1)[:, 0] < self.hflip
        if self.resized_crop is not None:
            return Cut(*draw_boxes(keys, height, width, self.scale, self.ratio, (_AREA, _RATIO, _PLACE)), flip, (down, across))
        at = draw_uniform(keys, _CROP, 2)
        top, left = (
            draw_integers(at[:, k], n + 2 * self.padding - part + 1) - self.padding
            for k, (n, part) in enumerate(zip((height, width), size, strict=True))
        )
        return Cut(top, left, np.full(len(keys), down), np.full(len(keys), across), flip, (down, across))

    def patch(self, seed: int, epoch: int, rows: Rows, *shape: int) -> Patch:
        """What is cut in that epoch from the volumes of these rows, all of this shape."""
        size = self.size(*shape)
        keys = stream_keys(seed, epoch, rows)
        often = self.flip or (*(0.0,) * (len(shape) - 1), self.hflip)
        flip = draw_uniform(keys, _FLIP, len(shape))[:, ::-1] < np.array(often)  # the last axis has the number that decides about an image
        at = draw_uniform(keys, _CROP, len(shape))
        starts = [
            draw_integers(at[:, k], n + 2 * self.padding - part + 1) - self.padding for k, (n, part) in enumerate(zip(shape, size, strict=True))
        ]
        return Patch(np.stack(starts, 1), flip, size)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _size(name: str, value: Any) -> int | tuple[int, ...]:
    """A size as a number for each axis; `crop` of one number stays one, as whatever it is for has its axes."""
    size = tuple(value) if isinstance(value, tuple | list) else (value, value)
    resized = name == "resized_crop"
    if not (len(size) == 2 if resized else len(size) > 1) or not all(map(_is_int, size)):
        raise TypeError(f"{name} must be an int or (height, width){'' if resized else ' or (depth, height, width)'}, not {value!r}")
    least = 2 if resized else 1  # torch's antialiased kernels go wrong for images one pixel wide
    if min(size) < least:
        raise ValueError(f"{name} must be in [{least}, inf), not {value!r}")
    return tuple(map(int, size)) if resized or isinstance(value, tuple | list) else int(value)


def _probabilities(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or not all(map(_is_number, value)):
        raise TypeError(f"{name} must be probabilities, one for each axis, not {value!r}")
    if not value or not all(0 <= p <= 1 for p in value):
        raise ValueError(f"{name} must be probabilities in [0, 1], one for each axis, not {value!r}")
    return tuple(map(float, value))


def _interval(name: str, value: Any, allowed: str) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_number, value)):
        raise TypeError(f"{name} must be (low, high), not {value!r}")
    low, high = float(value[0]), float(value[1])
    if not 0 < low <= high < math.inf or (name == "scale" and high > 1):
        raise ValueError(f"{name} must be (low, high) with low <= high, both in {allowed}, not {value!r}")
    return low, high
