"""Hides nothing: what an index says of its arrays, as values.  `mmcompile.format.index` checks them, and is where others take them from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmcompile.format.canonical import name_to_json

__all__ = [
    "CHANNEL_LIMIT",
    "CLASS_LISTS",
    "DTYPES",
    "INDEX_LIMIT",
    "LIST_LIMIT",
    "MEANINGS",
    "MOST_AXES",
    "PIXELS",
    "RESERVED",
    "SPATIAL",
    "UNITS",
    "Field",
    "Names",
    "Split",
    "field_name",
    "pixel_fields",
    "row_dtype",
    "value_fields",
]

#: A list longer than this lies in a file of its own.
LIST_LIMIT = 256
#: index.json and generation files are at most this long, on write and on read.
INDEX_LIMIT = 1 << 20

#: dtype in the index -> dtype in the file.  bfloat16 has no numpy type: its bits lie there as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64")},
    **{name: np.dtype(name) for name in ("bool", "int8", "uint8")},
    "bfloat16": np.dtype("<u2"),
}
#: More than any camera has; keeps the record of a sample (two sums a channel) small.
CHANNEL_LIMIT = 4096
#: Axes of a row.
MOST_AXES = 16
#: What the numbers of a field are.
MEANINGS = ("image", "class", "value", "mask", "boxes", "keypoints", "text", "volume")
#: Made of a file's pixels; and all that moves when the image is cropped or turned.
PIXELS = frozenset({"image", "mask", "volume"})
SPATIAL = PIXELS | {"boxes", "keypoints"}
#: Signed integers of a `count` that are called so are numbers of classes, with names (categories) or without.
CLASS_LISTS = frozenset({"label", "labels", "class_labels", "category", "categories", "category_id", "category_ids"})
#: What no field may be called, as files of shards are.
RESERVED = frozenset({"table", "samples", "keys", "hashes", "rejects", "classes", "rows"})
#: Units of times, as numpy's datetime64 has them; they count from 1970-01-01T00:00 UTC, or from midnight where the source has only a time of day.
UNITS = ("D", "s", "ms", "us", "ns")


@dataclass(frozen=True)
class Names:
    """A list of names: `listed`, or where it is longer than LIST_LIMIT in the `file` of shards/ with this hash."""

    listed: tuple[str, ...] = ()
    file: str | None = None

    def to_json(self) -> Any:
        return [name_to_json(name) for name in self.listed] if self.file is None else {"file": self.file}


@dataclass(frozen=True)
class Field:
    """A named array over all samples.

    `shape` is one row as it lies on disk: (C, H, W) with layout "chw", (H, W, C) with "hwc", () for a number.  `scale` is what a
    stored value is divided by to become a float; `normalize` is (means, stds) that a reader then still has to apply, or None.
    `meaning`: "image"; "class", the number of the sample's class; "value", numbers that mean nothing to us; "mask" (H, W), a class id for each pixel
    of the image; "boxes" (K, 4), x0, y0, x1, y1 in pixels of the stored image, from its upper left corner; "keypoints" (K, 3) or (K, P, 3), x and y
    likewise and 0 where a point is not to be seen; "text" (L,), UTF-8 bytes with 0 behind them; "volume" (D, H, W) or (C, D, H, W).  Of a value,
    `columns` names the numbers along its only axis (of keypoints: the P points), `categories` what the numbers from 0 on stand for (-1: missing; of a
    mask: its ids), and `unit` (one of UNITS) says that they are times.  `count` is the field that says how many of the K rows are filled; the others
    are `empty`; of a mask it says that ids from 1 on are the numbers, from 1, of the rows of that count.  With `views` the first axis of `shape` are
    so many variants of the sample, of which a reader hands out one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    meaning: str
    layout: str | None = None
    scale: float = 1.0
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    columns: Names | None = None
    categories: Names | None = None
    unit: str | None = None
    count: str | None = None
    views: int | None = None

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy dtype of the file."""
        return DTYPES[self.dtype]

    @property
    def empty(self) -> int:
        """What stands in rows that are not filled, where there is a `count`: -1 of numbers of classes, which 0 would be one of."""
        numbered = self.meaning == "value" and self.stored.kind == "i" and self.name in CLASS_LISTS
        return -1 if self.categories is not None or (self.count is not None and numbered) else 0

    @property
    def row_bytes(self) -> int:
        return self.stored.itemsize * math.prod(self.shape)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample: (C, H, W) for an image, whatever its layout on disk; of one variant where there are `views`."""
        shape = self.shape if self.views is None else self.shape[1:]
        return (shape[2], *shape[:2]) if self.layout == "hwc" else shape

    @property
    def channels(self) -> int:
        """How many means and standard deviations it has: one for each channel of an image or volume, or number of a value of at most one axis."""
        shape = self.sample_shape
        if self.meaning == "value":
            return math.prod(shape) if len(shape) <= 1 and math.prod(shape) <= CHANNEL_LIMIT else 0
        if self.meaning == "volume":
            return shape[0] if len(shape) == 4 else 1
        return shape[0] if self.meaning == "image" else 0

    def to_json(self) -> dict[str, Any]:
        names = {"columns": self.columns, "categories": self.categories}
        others = {"unit": self.unit, "count": self.count, "views": self.views}
        return {
            **{name: value.to_json() for name, value in names.items() if value is not None},
            **{name: value for name, value in others.items() if value is not None},
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "meaning": self.meaning,
            "layout": self.layout,
            "scale": self.scale,
            "normalize": None if self.normalize is None else {"mean": list(self.normalize[0]), "std": list(self.normalize[1])},
        }


@dataclass(frozen=True)
class Split:
    """A named range of rows, half-open."""

    name: str
    start: int
    stop: int


def row_dtype(fields: tuple[Field, ...]) -> np.dtype[Any]:
    """A record of these fields as they are stored, packed in their order: the bytes of a row that its hash is made of."""
    return np.dtype([(f.name, f.stored, f.shape) for f in fields])


def pixel_fields(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Those that are made of the pixels of files, in their order."""
    return tuple(f for f in fields if f.meaning in PIXELS)


def value_fields(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """All others."""
    return tuple(f for f in fields if f.meaning not in PIXELS)


def field_name(text: str) -> str:
    """The name of a field that is called `text` elsewhere: in lower case, with _ for what a name may not have."""
    name = re.sub(r"[^a-z0-9_]", "_", text.lower())[:64]
    if not name or not name[0].isalpha():
        name = f"x{name}"[:64]
    return f"{name}_" if name in RESERVED else name
