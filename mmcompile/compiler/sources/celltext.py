"""Hides what the text of a cell says: no value, whole numbers, numbers, yes and no, times; in lists of images and in tables of numbers alike.

Pure.  Numbers are the nearest float64, times are ISO 8601; nothing is guessed from a locale: a comma in a number is none of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.format.fields import UNITS

__all__ = [
    "GAPS",
    "KINDS",
    "Times",
    "as_times",
    "as_values",
    "beyond",
    "how_written",
    "is_kind",
    "is_number",
    "kinds_of",
    "mostly_values",
    "told_beyond",
]

Array = npt.NDArray[np.generic]

#: What stands for no value among numbers, yes and no, and times; in a column of texts these are texts, and only an empty cell is none.
GAPS = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "-nan", "NAN", "NULL", "null", "None", "none", "<NA>", "#N/A", "NaT", "."})
_GAP = "|".join(re.escape(word) for word in sorted(GAPS, reverse=True))
_OFFSET = r"(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)"
_FORMS = {
    "int": r"[ \t]*[+-]?[0-9]{1,30}[ \t]*",
    "float": r"[ \t]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[ \t]*|[+-]?(?i:inf(?:inity)?|nan)",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "time": rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[ T][0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:[.,][0-9]{{1,9}})?)?{_OFFSET}?)?",
}
#: The kinds of values that a column may hold.
KINDS = frozenset(_FORMS)
_ONE = {kind: re.compile(rf"(?:{form})\Z") for kind, form in _FORMS.items()}
#: All cells of a block, each ended by a NUL, which no cell holds.
_ALL = {kind: re.compile(rf"(?:(?>{form}|{_GAP})\0)*+\Z") for kind, form in _FORMS.items()}
#: What every number beyond 1.8e308 has: an exponent of three digits, or 200 digits and one of two.
_HUGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9.]{200}")
_ENDS_IN_OFFSET = re.compile(rf"(?<=[0-9]){_OFFSET}\Z")
_ENDS = re.compile(r"(?:[.,]([0-9]+))?(Z|[+-][0-9:]+)?\Z")
_PLACES = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_NUMBERS = ("int", "float", "time")
#: Numbers and dates as people of many countries write them: no two of these agree, so none is guessed.
_NUMBER = re.compile(r"\s*[-+(]?[$€£]?\s?[0-9]+(?:[., '][0-9]{3})*(?:[.,][0-9]+)?\s?[%$€£)]?\s*\Z")
_DATE = re.compile(r"[0-9]{1,4}([./-])[0-9]{1,2}\1[0-9]{1,4}\b|[0-9]{1,2} [A-Z][a-z]{2,8} [0-9]{4}\b|[A-Z][a-z]{2,8} [0-9]{1,2}, [0-9]{4}\b")


def is_kind(cell: str, kind: str) -> bool:
    """Is this a value of that kind?  One of GAPS is none."""
    return _ONE[kind].match(cell) is not None and cell not in GAPS


def is_number(cell: str) -> bool:
    """Is this a number, or a time: nothing that a column is called?"""
    return any(is_kind(cell, kind) for kind in _NUMBERS)


def how_written(cell: str) -> str:
    """What to say of a number or a time that is written in some other way; "" of what is none."""
    return "numbers are written as 1234.5" if _NUMBER.match(cell) else "times are written as 2023-01-31 09:30:00" if _DATE.match(cell) else ""


def mostly_values(cells: Sequence[str]) -> bool:
    """Are at least half of these cells numbers, times, or yes and no, in whatever way they are written?"""
    return 2 * sum(any(is_kind(cell, kind) for kind in KINDS) or bool(how_written(cell)) for cell in cells) >= len(cells)


def kinds_of(cells: Sequence[str], kinds: Iterable[str] = KINDS) -> set[str]:
    """Of these kinds those that all cells, without NUL, are of; GAPS are of any."""
    joined = "\0".join(cells) + "\0"
    return {kind for kind in kinds if _ALL[kind].match(joined)}


_ZEROS = str.maketrans("123456789", "000000000")


def _shapes(cells: Sequence[str]) -> set[str]:
    """The different cells, with 0 for each digit."""
    return set("\0".join(cells).translate(_ZEROS).split("\0"))


class Times:
    """What the times of a column are, as they come: `unit`, the coarsest that holds all of them, and whether they are `aware`, of UTC."""

    def __init__(self) -> None:
        self._unit, self._aware = 0, set[bool]()
        self._first: bool | None = None

    def extend(self, cells: Sequence[str]) -> None:
        """More cells, all of them times."""
        if self._first is None and cells:
            self._first = _is_aware(cells[0])
        for cell in _shapes(cells):
            if len(cell) == 10:
                self._aware.add(False)
                continue
            fraction, offset = _ENDS.search(cell[16:]).groups()  # type: ignore[union-attr]
            self._aware.add(bool(offset))
            self._unit = max(self._unit, 1 + -(-len(fraction or "") // 3))

    def unlike(self, cell: str) -> bool:
        """Does a time say how far from UTC it is, unlike the first, or the other way round?"""
        return _is_aware(cell) is not self._first

    @property
    def unit(self) -> str:
        return UNITS[self._unit]

    @property
    def aware(self) -> bool:
        return True in self._aware

    @property
    def fault(self) -> str:
        """Why they cannot be held together, or ""."""
        return "some times say how far from UTC they are (Z, +02:00), others do not" if len(self._aware) > 1 else ""


def _is_aware(cell: str) -> bool:
    return len(cell) > 10 and bool(_ENDS.search(cell[16:]).groups()[1])  # type: ignore[union-attr]


def as_values(cells: Sequence[str], dtype: str) -> Array:
    """Cells as numbers of a dtype (N,); a gap is NaN.  Raises ValueError, OverflowError for a cell that is no such number."""
    if dtype == "bool":
        return np.array([_yes(cell) for cell in cells], np.bool_)
    if dtype.startswith("float"):
        try:
            found = np.array(list(map(float, cells)))
        except ValueError:
            found = np.array([_float(cell) for cell in cells])
        if np.isinf(found).any() and (huge := beyond(cells)) is not None:
            raise ValueError(told_beyond(cells[huge]))
        return found.astype(dtype, copy=False)
    try:
        return np.array(list(map(int, cells)), dtype)
    except ValueError:  # yes and no, beside columns of whole numbers
        return np.array([int(_yes(cell)) if _ONE["bool"].match(cell) else int(cell) for cell in cells], dtype)


def beyond(cells: Sequence[str]) -> int | None:
    """The first number that no float64 holds, which would be infinite as one; None where there is none."""
    if not _HUGE.search("\0".join(cells)):
        return None
    return next((i for i, cell in enumerate(cells) if _HUGE.search(cell) and is_kind(cell, "float") and math.isinf(float(cell))), None)


def told_beyond(cell: str) -> str:
    """What to say of it."""
    return f"{cell!r:.60} is more than a float64 holds: mend it, or write inf"


def _yes(cell: str) -> bool:
    if not _ONE["bool"].match(cell):
        raise ValueError(cell)
    return cell[0] in "tT"


def _float(cell: str) -> float:
    if cell in GAPS:
        return float("nan")
    return float(_yes(cell)) if _ONE["bool"].match(cell) else float(cell)


def as_times(cells: Sequence[str], unit: str) -> npt.NDArray[np.int64]:
    """ISO times as units since 1970 (N,), of UTC where they say how far from it they are.  Raises ValueError for what is no time, or beyond int64."""
    offsets: npt.NDArray[np.int64] | None = None
    if any(len(shape) > 16 and _ENDS_IN_OFFSET.search(shape, 16) for shape in _shapes(cells)):
        found = [(_ENDS_IN_OFFSET.search(cell, 16) if len(cell) > 16 else None) for cell in cells]
        offsets = np.array([0 if m is None else _seconds(m[0]) for m in found], np.int64)
        cells = [cell if m is None else cell[: m.start()] for cell, m in zip(cells, found, strict=True)]
    seconds = np.array([cell[:19] for cell in cells], "datetime64[s]").astype(np.int64)
    if offsets is not None:
        seconds -= offsets
    if unit == "D":
        return np.asarray(seconds // 86_400)
    places = _PLACES[unit]
    scale = 10**places
    if len(seconds) and max(abs(int(seconds.min())), abs(int(seconds.max()))) >= 2**63 // scale - 1:
        raise ValueError(f"a time is beyond what int64 holds in {unit}")
    out = seconds * scale
    if places:
        out += np.array([int(cell[20:].ljust(places, "0")) if len(cell) > 20 else 0 for cell in cells], np.int64)
    return np.asarray(out)


def _seconds(offset: str) -> int:
    if offset == "Z":
        return 0
    digits = offset[1:].replace(":", "").ljust(4, "0")
    return (1 if offset[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
