"""Hides how a value typed on a command line, or written in a --config file, becomes a Python value; every fault names what was expected.

A config file goes through the same forms as the command line: each value is turned into the text that one would have typed.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcompile.errors import OptionError

if TYPE_CHECKING:
    from mmcompile.compiler.preprocess import Preprocess
    from mmcompile.compiler.rowstore import RowPreprocess

__all__ = [
    "BYTES",
    "COLUMNS",
    "COUNT",
    "CUBE",
    "KEPT",
    "NUMBERS",
    "PLACE",
    "RANGE",
    "RATIO",
    "REJECTS",
    "SECONDS",
    "SIDES",
    "SIZE",
    "STEP",
    "TRIPLE",
    "VIEWS",
    "Form",
    "as_typed",
    "nearest",
    "preprocess_of",
    "read_config",
    "row_preprocess",
    "whole",
]

#: A config file is read whole; one that is longer is no config file.
_CONFIG_LIMIT = 1 << 20


@dataclass(frozen=True)
class Form:
    """A value with a form of its own.  `parse` raises ValueError.

    A config file may hold it as one of `types`, or where there is a `joint` as a list of the numbers that it stands between.
    """

    name: str
    expected: str
    parse: Callable[[str], Any]
    joint: str = ""
    types: tuple[type, ...] = (str, int)


def whole(text: str) -> int:
    """A whole number in digits.  Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _size(text: str) -> int | tuple[int, int]:
    return _pair(text) if "x" in text.lower() else _positive(text)


def _sides(text: str) -> int | tuple[int, ...]:
    sides = tuple(map(_positive, text.lower().split("x")))
    if len(sides) > 3:
        raise ValueError(text)
    return sides if len(sides) > 1 else sides[0]


def _kept(text: str) -> tuple[int, ...]:
    return _triple(text) if text.lower().count("x") == 2 else _pair(text)


def _cube(text: str) -> int | tuple[int, int, int]:
    return _triple(text) if "x" in text.lower() else _positive(text)


def _pair(text: str) -> tuple[int, int]:
    height, width = text.lower().split("x")
    return _positive(height), _positive(width)


def _triple(text: str) -> tuple[int, int, int]:
    height, width, channels = text.lower().split("x")
    return _positive(height), _positive(width), _positive(channels)


def _ratio(text: str) -> float:
    if not _finite(text) >= 1:
        raise ValueError(text)
    return float(text)


def _range(text: str) -> tuple[float, float]:
    low, high = text.split(":")
    return _finite(low), _finite(high)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(0*[1-9][0-9]{0,17})(?:([KMGT])(?:iB)?)?", text, re.IGNORECASE)
    if not found:
        raise ValueError(text)
    return int(found[1]) << (10 * " KMGT".index((found[2] or " ").upper()))


def _seconds(text: str) -> float:
    if not _finite(text) > 0:
        raise ValueError(text)
    return float(text)


def _step(text: str) -> float:
    if not text.endswith("s"):  # 40 would be taken for either
        raise ValueError(text)
    number, unit = (text[:-2], 1000) if text.endswith("ms") else (text[:-1], 1)
    return _seconds(number) / unit


def _rejects(text: str) -> int | str:
    return text if re.fullmatch(r"(100|[0-9]{1,2}(\.[0-9]{1,9})?)%", text) else whole(text)


def _columns(text: str) -> tuple[str, ...]:
    try:
        names = [name.strip() for name in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise ValueError(text) from error
    return tuple(name for name in names if name)


def _views(text: str) -> Any:
    from mmcompile.compiler.views import parse_views

    return parse_views(text)


def _place(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


COUNT = Form("N", "a whole number above 0", _positive, types=(int,))
RATIO = Form("RATIO", "a number of at least 1", _ratio, types=(int, float))
SIZE = Form("N|HxW", "a whole number above 0, or height x width as in 240x320", _size, "x")
SIDES = Form("N|HxW|DxHxW", "a whole number above 0, height x width as in 240x320, or depth x height x width", _sides, "x")
CUBE = Form("N|DxHxW", "a whole number above 0, or depth x height x width as in 64x128x128", _cube, "x")
KEPT = Form("HxW|DxHxW", "height x width as in 240x320, or depth x height x width", _kept, "x", (str,))
TRIPLE = Form("HxWxC", "height x width x channels as in 224x224x1", _triple, "x", (str,))
NUMBERS = Form(
    "A,B,...", "numbers with commas between them, one for each channel", lambda text: tuple(_finite(part) for part in text.split(",")), ","
)
RANGE = Form("LO:HI", "two numbers as LO:HI", _range, ":", (str,))
BYTES = Form("BYTES", "a whole number above 0, or one with K, M, G or T behind it (powers of 1024)", _bytes)
SECONDS = Form("SECONDS", "a number of seconds above 0", _seconds, types=(int, float))
STEP = Form("TIME", "a time with its unit, as in 40ms or 0.5s", _step, types=(str,))
REJECTS = Form("N|P%", "a whole number, or a share of the images from 0% to 100%", _rejects)
COLUMNS = Form("A,B,...", "names with commas between them, in double quotes where they hold one; a comma alone for none", _columns, types=(str,))
VIEWS = Form("K[:KEY=VALUE,...]", "how many, as in 8, or 8:scale=0.25:1,hflip=0.5", _views)
#: An empty path means the current folder to most calls: here it is what an unset shell variable leaves.
PLACE = Form("PATH", "a path that is not empty", _place, types=(str,))


def read_config(path: str, known: set[str]) -> dict[str, Any]:
    """The object in a --config file.  Raises OptionError: no such object, or keys that are not known, all of them named."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a key stands in it twice")
        return found

    try:
        with Path(path).open("rb") as file:
            data = file.read(_CONFIG_LIMIT + 1)
    except OSError as error:
        raise OptionError(f"--config {path}: cannot be read ({error.strerror})", options=["config"]) from None
    try:
        if len(data) > _CONFIG_LIMIT:
            raise ValueError(f"it is longer than {_CONFIG_LIMIT:,} bytes")
        document = tomllib.loads(data.decode()) if path.endswith(".toml") else json.loads(data, object_pairs_hook=pairs)
        if not isinstance(document, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        toml, other = "TOML as in resize = 256", 'JSON as in {"resize": 256, "crop": 224}'
        remedy = f"expected {toml}" if path.endswith(".toml") else f"expected {other}, or {toml} in a file called .toml"
        raise OptionError(f"--config {path}: {error}; {remedy}", options=["config"]) from None
    if strange := sorted(set(document) - known):
        words = "unknown key " if len(strange) == 1 else "unknown keys "
        raise OptionError(f"--config {path}: {words}{nearest(strange, known)}", options=strange)
    return document


def nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """Unknown names in a line, each with the known one that it probably was meant to be; where one is like none, all that are known."""
    shown, like_none = [], False
    for name in names:
        close = difflib.get_close_matches(name.replace("_", "-"), sorted(known), 1)
        like_none |= not close
        shown.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return ", ".join(shown) + (f"; known are {', '.join(sorted(known))}" if like_none else "")


def as_typed(value: Any, types: tuple[type, ...], *, joint: str = "", many: bool = False) -> Any:
    """A config value as it would have been typed, or None where its type is wrong.

    `types` are those that JSON may hold here: bool alone for a flag (returned as it is), else some of str, int and float (returned as text).  With
    `joint` a list of numbers is fine too, with `many` a list of texts, which is returned as a list.
    """
    if types == (bool,):
        return value if isinstance(value, bool) else None
    if many:
        items = [value] if isinstance(value, str) else value
        return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else None
    parts = [int(value) if isinstance(value, float) and value.is_integer() else value]
    if joint and isinstance(value, list):
        parts, types = value, (int, float)
    if not parts or not all(isinstance(part, types) and not isinstance(part, bool) for part in parts):
        return None
    return joint.join(str(int(part)) if isinstance(part, float) and part.is_integer() else str(part) for part in parts)


def preprocess_of(given: dict[str, Any], source: object = None) -> Preprocess:
    """The options that were given, as a Preprocess; it checks itself.  What was not given a `source` of datasets says."""
    from mmcompile.compiler.preprocess import Preprocess

    normalize = _normalize(given)
    named = {name: value for name, value in given.items() if value is not None}
    made = Preprocess(normalize=normalize, **named)
    settle = getattr(source, "settle", None)
    return made if settle is None else settle(made, [*named, *["normalize"] * (normalize is not None)])


def row_preprocess(given: dict[str, Any]) -> RowPreprocess:
    """The options that were given, as they are for rows of arrays; OptionError for those that only pictures have."""
    from mmcompile.compiler.preprocess import Preprocess
    from mmcompile.compiler.rowstore import RowPreprocess

    normalize, dtype = _normalize(given), given.pop("dtype")
    made = RowPreprocess.of(Preprocess(**{name: value for name, value in given.items() if value is not None}))
    return replace(made, normalize=normalize, dtype=dtype)


def _normalize(given: dict[str, Any]) -> Any:
    """What --normalize, --mean and --std say together; they are taken out of what was given."""
    from mmcompile.compiler.preprocess import Normalize

    mean, std = given.pop("mean"), given.pop("std")
    if (mean is None) != (std is None):
        raise OptionError("--mean and --std go together: give both, or neither", options=["mean", "std"])
    if mean is not None and given["normalize"] is not None:
        raise OptionError("--normalize and --mean clash: leave one of them out", options=["normalize", "mean", "std"])
    normalize = given.pop("normalize")
    return normalize if mean is None else Normalize(mean, std)
