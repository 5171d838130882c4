"""Hides which parts of a picture its stored variants show: drawn by (seed, key, k), so that a build anywhere draws the same.

A variant is torchvision's RandomResizedCrop of the whole picture to the size of a sample, then perhaps mirrored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from mmcompile.compiler.sizes import clash, flag
from mmcompile.errors import OptionError
from mmcompile.format.randomcrop import draw_boxes, draw_uniform
from mmcompile.format.samples import key_hash
from mmcompile.format.streams import stream_keys

__all__ = ["Shown", "Views", "parse_views", "views_of"]

#: More are hardly meant: each costs what a dataset without views does.
_MOST = 1024
_FLIP, _AREA, _RATIO, _PLACE = range(4)


class Shown(NamedTuple):
    """What a variant shows of its picture as it stands: a box in pixels, and whether that is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


@dataclass(frozen=True, kw_only=True)
class Views:
    """`count` variants of each sample: random parts of it, of a share `scale` of its area and of a width / height in `ratio`, resized to the size of
    a sample, mirrored with probability `hflip`.  Raises OptionError.
    """

    count: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 2 <= self.count <= _MOST:
            raise OptionError(f"--views must be a whole number from 2 to {_MOST:,}, found {self.count!r}", options=["views"])
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            value = getattr(self, name)
            pair = tuple(value) if isinstance(value, tuple | list) else ()
            if len(pair) != 2 or not all(_is_number(v) for v in pair) or not 0 < pair[0] <= pair[1] <= most:
                limit = "1" if most == 1 else "any number"
                raise OptionError(f"--views: {name} must be LOW:HIGH with 0 < LOW <= HIGH, up to {limit}, found {value!r}", options=["views"])
            object.__setattr__(self, name, tuple(map(float, pair)))
        if not _is_number(self.hflip) or not 0 <= self.hflip <= 1:
            raise OptionError(f"--views: hflip must be a probability from 0 to 1, found {self.hflip!r}", options=["views"])
        object.__setattr__(self, "hflip", float(self.hflip))
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise OptionError(f"--views: seed must be a whole number from 0 to 2^63 - 1, found {self.seed!r}", options=["views"])

    def check(self, preprocess: Any) -> None:
        """Raises OptionError where the geometry of a Preprocess does not say the size of a variant, and that alone."""
        for name in ("pad", "keep_size", "jpeg_scaling"):
            if getattr(preprocess, name) is not None:
                clash("views", name, f"variants are cut from whole pictures: give their size with --crop, and leave {flag(name)} out")
        if preprocess.resize is not None and preprocess.crop is not None:
            clash("views", "resize", "variants are cut from whole pictures: give their size with --crop, and leave --resize out")
        if preprocess.crop is None and preprocess.resize is None:
            raise OptionError("--views needs the size of a variant: add --crop 224", options=["views", "crop"])
        if preprocess.kind == "volume":
            clash("views", "field", "variants are of pictures, not of volumes")

    def shown(self, key: bytes, height: int, width: int) -> tuple[Shown, ...]:
        """What each variant of the item with this key shows, of a picture of this size after orientation."""
        row = np.array([key_hash(key)], np.uint64).view(np.int64)
        keys = np.concatenate([stream_keys(self.seed, k, row) for k in range(self.count)])
        boxes = draw_boxes(keys, height, width, self.scale, self.ratio, (_AREA, _RATIO, _PLACE))
        flips = draw_uniform(keys, _FLIP, 1)[:, 0] < self.hflip
        columns = (*(box.tolist() for box in boxes), flips.tolist())
        return tuple(Shown(*numbers) for numbers in zip(*columns, strict=True))

    @property
    def typed(self) -> str:
        """As one types it."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "count" and getattr(self, f.name) != f.default}
        words = [f"{name}={':'.join(map(repr, v)) if isinstance(v, tuple) else repr(v)}" for name, v in own.items()]
        return f"{self.count}:{','.join(words)}" if words else str(self.count)

    def to_json(self) -> dict[str, Any]:
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}


def views_of(value: object) -> Views | None:
    """The Views that a number, or settings by name, mean; None for None.  Raises OptionError."""
    if value is None or isinstance(value, Views):
        return value
    if isinstance(value, Mapping):
        known = {f.name for f in fields(Views)}
        if strange := sorted(map(str, set(value) - known)):
            raise OptionError(f"--views: unknown {', '.join(strange)}; expected some of {', '.join(sorted(known))}", options=["views"])
        if "count" not in value:
            raise OptionError("--views: how many is missing", options=["views"])
        return Views(**value)
    return Views(count=value)  # type: ignore[arg-type]


def parse_views(text: str) -> Views:
    """The Views of K or K:KEY=VALUE,… as typed, as in 8:scale=0.25:1,hflip=0.5.  Raises ValueError for another form, OptionError for bad values."""
    count, _, rest = text.partition(":")
    given: dict[str, Any] = {"count": int(count)}
    for part in rest.split(",") if rest else ():
        key, sign, word = (p.strip() for p in part.partition("="))
        if not sign or key in given:
            raise ValueError(part)
        low, colon, high = word.partition(":")
        given[key] = (float(low), float(high)) if colon else int(word) if key == "seed" else float(word)
    made = views_of(given)
    assert made is not None
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
