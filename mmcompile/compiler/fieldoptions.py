"""Which settings a single field of a sample may have of its own, checked; a `Preprocess` holds them by name.

Pure: words and values in, a frozen record out.  What is not given is as the sample's own settings have it, or as the source finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mmcompile.errors import OptionError, did_you_mean
from mmcompile.format.fields import DTYPES

__all__ = [
    "KINDS",
    "OF_MASKS",
    "FieldOptions",
    "check_fill",
    "field_text",
    "fields_of",
    "for_field",
    "parse_field",
    "parse_fields",
    "refuse_strange",
]

#: What a field may be; "multilabel" is a value with a 0 or 1 for each class.
KINDS = ("image", "mask", "volume", "boxes", "keypoints", "class", "value", "multilabel", "text")
#: Settings of pixels that a field may have of its own, as `Preprocess` calls them.
PIXEL_OPTIONS = ("resize", "crop", "pad", "mode", "dtype", "layout", "normalize", "scale", "resampler", "filter", "alpha", "depth16", "range", "icc")
#: What each kind takes beside `kind`.
_TAKES: dict[str, frozenset[str]] = {
    "image": frozenset({*PIXEL_OPTIONS, "missing"}),
    "volume": frozenset({"crop", "pad", "dtype", "normalize", "scale", "range", "fill", "missing"}),
    "mask": frozenset({"dtype", "fill", "orientation", "missing"}),
    "boxes": frozenset({"max", "overflow", "format", "relative", "min_visibility", "missing"}),
    "keypoints": frozenset({"max", "overflow", "relative", "shape"}),
    "class": frozenset(),
    "value": frozenset({"dtype", "shape", "max", "overflow"}),
    "multilabel": frozenset({"dtype"}),
    "text": frozenset({"shape"}),
}
#: What a mask has whatever its picture has: class ids, the nearest of them.
OF_MASKS: dict[str, Any] = {
    "kind": "mask",
    "mode": "keep",
    "dtype": "uint8",
    "layout": "chw",
    "normalize": None,
    "scale": "none",
    "compat": None,
    "resampler": None,
    "filter": "nearest",
    "alpha": None,
    "depth16": None,
    "range": None,
    "icc": "ignore",
    "jpeg_scaling": None,
    "kept_mode": None,
}
#: What a message of pixels tells to give, that a field may have for itself.
_REMEDY = re.compile(rf"--(dtype (?:{'|'.join(DTYPES)})|mode (?:gray|rgb|keep)|depth16 (?:scale|clip)|range LO:HI)\b")
_FORMATS = ("xyxy", "xywh", "cxcywh")
_OVERFLOWS = _MISSING = ("refuse", "drop")
_ORIENTATIONS = ("image", "own")


@dataclass(frozen=True, kw_only=True)
class FieldOptions:
    """Settings of one field; None is not given.

    `kind`: "image", "mask", "volume", "boxes", "keypoints", "class", "value", "multilabel" or "text"; by default what the source takes it for.
    An image or a volume takes the options of `Preprocess` that say how pixels are stored, and geometry of its own in place of the sample's; a mask
    takes `dtype` (uint8 by default) and `fill`, the class id beyond the picture (0), or what lies around a volume, and `orientation`: "image" to turn
    one without EXIF of its own as its picture is turned, where it has the size of that as stored (so by default), "own" to leave it.
    A value takes `dtype` and `shape`; text `shape`, its bytes: (64,), or 64.
    Of lists that differ in length from sample to sample `max` rows are kept (by default as many as the longest has), and one that is longer is an
    error, or with `overflow="drop"` cut and counted.  Boxes come as `format` "xyxy", "xywh" or "cxcywh", in pixels of the file or `relative` to its
    size; one of which less than the part `min_visibility` of its area is left by a crop is dropped (by default only where nothing is left).
    Of folders side by side `missing` says what becomes of a sample without a file of this field: "refuse" for an error (so by default; of boxes as
    text it is by default a sample without boxes), "drop" to leave it out.
    Raises OptionError.
    """

    kind: str | None = None
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, ...] | None = None
    pad: int | tuple[int, ...] | None = None
    mode: str | None = None
    dtype: str | None = None
    layout: str | None = None
    normalize: Any = None
    scale: str | None = None
    resampler: str | None = None
    filter: str | None = None
    alpha: str | None = None
    depth16: str | None = None
    range: tuple[float, float] | None = None
    icc: str | None = None
    fill: int | None = None
    orientation: str | None = None
    shape: tuple[int, ...] | None = None
    max: int | None = None
    overflow: str | None = None
    format: str | None = None
    relative: bool | None = None
    min_visibility: float | None = None
    missing: str | None = None

    def __post_init__(self) -> None:
        words = {"kind": KINDS, "overflow": _OVERFLOWS, "missing": _MISSING, "format": _FORMATS, "orientation": _ORIENTATIONS, "dtype": tuple(DTYPES)}
        for name, allowed in words.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise OptionError(f"{name} must be one of {', '.join(allowed)}, found {value!r}", options=[name])
        if self.max is not None and (isinstance(self.max, bool) or not isinstance(self.max, int) or self.max < 1):
            raise OptionError(f"max must be a whole number of at least 1, found {self.max!r}", options=["max"])
        if self.fill is not None and (isinstance(self.fill, bool) or not isinstance(self.fill, int)):
            raise OptionError(f"fill must be a whole number, found {self.fill!r}", options=["fill"])
        shape: Any = self.shape
        shape = (shape,) if type(shape) is int else shape  # one axis
        if shape is not None and not (isinstance(shape, tuple) and shape and all(type(n) is int and n >= 1 for n in shape)):
            raise OptionError(f"shape must be whole numbers of at least 1, found {shape!r}", options=["shape"])
        object.__setattr__(self, "shape", shape)
        share = self.min_visibility
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1):
            raise OptionError(f"min_visibility must be a number from 0 to 1, found {share!r}", options=["min_visibility"])
        if self.relative is not None and not isinstance(self.relative, bool):
            raise OptionError(f"relative must be true or false, found {self.relative!r}", options=["relative"])
        if self.kind is not None:
            self.check(self.kind)

    def given(self) -> dict[str, Any]:
        """What is given, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def check(self, kind: str) -> None:
        """Raises OptionError where something is given that a field of this kind does not take."""
        if kind == "mask":
            if (self.dtype is not None and DTYPES[self.dtype].kind not in "iu") or self.dtype == "bfloat16":
                raise OptionError(
                    f"dtype of a mask must be uint8, uint16, int16 or int32, as ids are whole numbers, found {self.dtype}", options=["dtype"]
                )
            if (self.fill or 0) < 0:
                raise OptionError(f"fill of a mask must be at least 0, found {self.fill}", options=["fill"])
            check_fill(self.fill or 0, self.dtype or "uint8")
        if strange := [name for name in self.given() if name != "kind" and name not in _TAKES[kind]]:
            takes = ", ".join(sorted(_TAKES[kind])) or "nothing"
            raise OptionError(f"{', '.join(strange)}: a field of kind {kind} takes {takes}", options=strange)


def check_fill(fill: int, dtype: str) -> None:
    """Raises OptionError for what a dtype of whole numbers does not hold."""
    kind = DTYPES[dtype]
    if dtype != "bfloat16" and kind.kind in "iu" and not np.iinfo(kind).min <= fill <= np.iinfo(kind).max:
        raise OptionError(
            f"fill {fill} is no value of {dtype}, which holds {np.iinfo(kind).min} to {np.iinfo(kind).max}: give another one, or a wider dtype",
            options=["fill", "dtype"],
        )


def fields_of(value: object) -> tuple[tuple[str, FieldOptions], ...]:
    """Settings by the name of their field, sorted, of a mapping (or of what this returns).  Raises OptionError naming the field."""
    pairs = value.items() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else None
    if pairs is None:
        raise OptionError(f"fields must be settings by the name of a field, found {value!r:.80}", options=["fields"])
    out: dict[str, FieldOptions] = {}
    for name, options in pairs:
        if not isinstance(options, FieldOptions | Mapping):
            raise OptionError(f"fields: {name}: expected settings, as in {{'kind': 'mask'}}, found {options!r:.80}", options=["fields"])
        out[str(name)] = options if isinstance(options, FieldOptions) else _made(str(name), dict(options))
    return tuple(sorted(out.items()))


def _made(name: str, given: dict[str, Any]) -> FieldOptions:
    known = {f.name for f in fields(FieldOptions)}
    if strange := sorted(set(given) - known):
        meant = did_you_mean(strange[0], known)
        raise OptionError(f"field {name}: unknown {', '.join(strange)}{meant} (known are {', '.join(sorted(known))})", options=strange)
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    try:
        return FieldOptions(**values)
    except OptionError as error:
        raise OptionError(f"field {name}: {error}", options=error.details.get("options", [])) from None


def refuse_strange(asked: Iterable[str], known: Iterable[str]) -> None:
    """Raises OptionError where settings are `asked` of a field that is not `known`: nothing that is said is left undone without a word."""
    names = list(dict.fromkeys(known))
    if strange := sorted(set(asked) - set(names)):
        meant = did_you_mean(strange[0], names)
        raise OptionError(f"--field {strange[0]}: samples have no such field{meant} (they have {', '.join(names)})", options=["field"])


def parse_field(text: str) -> tuple[str, dict[str, Any]]:
    """(name, settings) of NAME:KEY=VALUE[,KEY=VALUE…] as typed; sizes are N, HxW or DxHxW, a range is LO:HI.  Raises OptionError."""
    name, colon, rest = text.partition(":")
    if not (name and colon and rest):
        raise OptionError(f"--field {text}: expected NAME:KEY=VALUE, as in --field mask:kind=mask", options=["field"])
    out: dict[str, Any] = {}
    for part in rest.split(","):
        key, sign, word = (p.strip() for p in part.partition("="))
        if not (key and sign and word):
            raise OptionError(f"--field {text}: expected KEY=VALUE, found {part!r}", options=["field"])
        if key in out:
            raise OptionError(f"--field {text}: {key} twice", options=["field"])
        out[key] = _value(text, key, word)
    return name, out


def parse_fields(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of all fields that were typed; those of one field add up.  Raises OptionError for a setting that is given twice."""
    out: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, given = parse_field(text)
        known = out.setdefault(name, {})
        if twice := sorted(known.keys() & given.keys()):
            raise OptionError(f"--field {text}: {twice[0]} of {name} twice", options=["field"])
        known |= given
    return out


def for_field(name: str, message: str) -> str:
    """What a message says of a field beside the first: the options that it names, as those of this field alone."""
    return _REMEDY.sub(lambda found: f"--field {name}:{found[1].replace(' ', '=')}", message)


def field_text(name: str, given: Mapping[str, Any]) -> str:
    """Settings of a field, as JSON has them, in the form in which one types them."""

    def word(key: str, value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return (":" if key == "range" else "x").join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return f"{name}:" + ",".join(f"{key}={word(key, value)}" for key, value in given.items())


def _value(text: str, key: str, word: str) -> Any:
    try:
        if key in ("resize", "crop", "pad", "shape"):
            sides = tuple(int(n) for n in word.split("x"))
            return sides[0] if len(sides) == 1 and key != "shape" else sides
        if key in ("max", "fill"):
            return int(word)
        if key == "min_visibility":
            return float(word)
        if key == "range":
            low, _, high = word.partition(":")
            return float(low), float(high)
    except ValueError:
        raise OptionError(
            f"--field {text}: {key} must be {'two numbers LO:HI' if key == 'range' else 'numbers'}, found {word!r}", options=["field"]
        ) from None
    return {"true": True, "false": False}.get(word.lower(), word) if key == "relative" else word
