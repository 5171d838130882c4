"""Hides what the text of a cell says: whole numbers, numbers, yes and no, times; and which of these all cells of a column are.

Pure.  Numbers are the nearest float64, times are ISO 8601; nothing is guessed from a locale: a comma in a number is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.tablefields import ColumnKind
from mmcompile.errors import OptionError
from mmcompile.format.fields import UNITS

__all__ = ["GAPS", "CellKinds", "as_times", "as_values", "cut_of", "is_number"]

Array = npt.NDArray[np.generic]

#: What stands for no value in columns that hold no texts.
GAPS = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "-nan", "NAN", "NULL", "null", "None", "none", "<NA>", "#N/A", "NaT", "."})
_GAP = "|".join(re.escape(word) for word in sorted(GAPS, reverse=True))
_OFFSET = r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)"
_FORMS = {
    "int": r"[ \t]*[+-]?[0-9]{1,30}[ \t]*",
    "float": r"[ \t]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[ \t]*|[+-]?(?i:inf(?:inity)?|nan)",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "time": rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[ T][0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:[.,][0-9]{{1,9}})?)?{_OFFSET}?)?",
}
_ONE = {kind: re.compile(rf"(?:{form})\Z") for kind, form in _FORMS.items()}
#: All cells of a block, each ended by a NUL, which no cell holds.
_ALL = {kind: re.compile(rf"(?:(?>{form}|{_GAP})\0)*+\Z") for kind, form in _FORMS.items()}
_ENDS_IN_OFFSET = re.compile(rf"(?<=[0-9]){_OFFSET}\Z")
_ENDS = re.compile(r"(?:[.,]([0-9]+))?(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?\Z")
_PLACES = {0: "s", 3: "ms", 6: "us", 9: "ns"}
#: Least and greatest of whole numbers.
_INT64, _UINT64 = (-(2**63), 2**63 - 1), 2**64 - 1


def is_number(cell: str) -> bool:
    """Is this a number, or a time: nothing that a column is called?"""
    return any(form.match(cell) for form in _ONE.values())


class CellKinds:
    """What the cells of one column are, as they come."""

    def __init__(self) -> None:
        self.kinds = set(_FORMS)
        self._rows = self._missing = self._empty = 0
        self.gap = -1
        self._low, self._high = 0, 0
        self._unit, self._aware = 0, set[bool]()

    @property
    def seen(self) -> bool:
        """Was there any value yet?"""
        return self._missing < self._rows

    def extend(self, cells: Sequence[str]) -> int | None:
        """More cells, without NUL.  The first that is none of what all cells before are, where there is one: from then on the column holds texts."""
        start, self._rows = self._rows, self._rows + len(cells)
        joined = "\0".join(cells) + "\0"
        fits = {kind for kind in self.kinds if _ALL[kind].match(joined)}
        if self.kinds and not fits:
            stray = self._stray(cells)
            self.kinds = set()
            self._count_gaps(cells, start)
            return stray
        self.kinds = fits
        values = [cell for cell in cells if cell not in GAPS] if self._count_gaps(cells, start) else cells
        if "int" in fits and values:
            whole = list(map(int, values))
            self._low, self._high = min(self._low, *whole, 0), max(self._high, *whole, 0)
        if fits == {"time"}:
            self._look_at_times(values)
        return None

    @property
    def number(self) -> str | None:
        """The dtype that its cells are numbers of so far, None where they are none, or that is not known yet."""
        if not self.seen or self.kinds not in ({"int", "float"}, {"float"}):
            return None
        return "int64" if "int" in self.kinds else "float64"

    def add_numbers(self, rows: int, missing: int, gap: int, low: int, high: int) -> None:
        """More cells, known to be numbers of that dtype: how many, how many gaps and which is the first of these, the least and greatest number."""
        if missing and self.gap < 0:
            self.gap = self._rows + gap
        self._rows += rows
        self._missing += missing
        self._low, self._high = min(self._low, low), max(self._high, high)

    def _count_gaps(self, cells: Sequence[str], start: int) -> int:
        count = sum(map(GAPS.__contains__, cells))
        if count and self.gap < 0:
            self.gap = start + next(i for i, cell in enumerate(cells) if cell in GAPS)
        self._missing += count
        self._empty += cells.count("") if count else 0
        return count

    def _stray(self, cells: Sequence[str]) -> int:
        left = set(self.kinds)
        for i, cell in enumerate(cells):
            if cell in GAPS:
                continue
            left = {kind for kind in left if _ONE[kind].match(cell)}
            if not left:
                return i
        return 0

    def _look_at_times(self, values: Sequence[str]) -> None:
        for cell in _shapes(values):
            if len(cell) == 10:
                self._aware.add(False)
                continue
            fraction, offset = _ENDS.search(cell[16:]).groups()  # type: ignore[union-attr]
            self._aware.add(bool(offset))
            self._unit = max(self._unit, 1 + -(-len(fraction or "") // 3))

    def kind(self) -> ColumnKind | str:
        """What the column holds, or why it cannot be held."""
        missing, gap = self._missing, self.gap
        if not self.kinds:
            return ColumnKind("text", missing=self._empty)
        if not self.seen:
            return ColumnKind("", missing=missing, gap=gap)
        if "int" in self.kinds:
            if not _INT64[0] <= self._low <= self._high <= _UINT64 or (self._low < 0 and self._high > _INT64[1]):
                return f"whole numbers up to {max(self._high, -self._low)}, which 64 bits do not hold"
            return ColumnKind("int64" if self._high <= _INT64[1] else "uint64", missing=missing, gap=gap, low=self._low, high=self._high)
        if "float" in self.kinds:
            return ColumnKind("float64", missing=missing, gap=gap)
        if "bool" in self.kinds:
            return ColumnKind("bool", missing=missing, gap=gap)
        if len(self._aware) > 1:
            return "some times say how far from UTC they are (Z, +02:00), others do not"
        return ColumnKind("int64", UNITS[self._unit], self._aware == {True}, missing=missing, gap=gap)


_ZEROS = str.maketrans("123456789", "000000000")


def _shapes(cells: Sequence[str]) -> set[str]:
    """The different cells, with 0 for each digit."""
    return set("\0".join(cells).translate(_ZEROS).split("\0"))


def as_values(cells: Sequence[str], dtype: str) -> Array:
    """Cells as numbers of a dtype (N,); a gap is NaN.  Raises ValueError, OverflowError for a cell that is no such number."""
    if dtype == "bool":
        return np.array([_yes(cell) for cell in cells], np.bool_)
    if dtype.startswith("float"):
        try:
            return np.array(list(map(float, cells))).astype(dtype, copy=False)
        except ValueError:
            return np.array([_float(cell) for cell in cells]).astype(dtype, copy=False)
    try:
        return np.array(list(map(int, cells)), dtype)
    except ValueError:  # yes and no, beside columns of whole numbers
        return np.array([int(_yes(cell)) if _ONE["bool"].match(cell) else int(cell) for cell in cells], dtype)


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
    places = {name: n for n, name in _PLACES.items()}[unit]
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


def _one_time(text: str) -> tuple[str, str, bool] | None:
    """(the text, its unit, does it say how far from UTC it is) of a time, None for what is none."""
    kinds = CellKinds()
    kinds.extend([text])
    kind = kinds.kind()
    if isinstance(kind, str) or kind.unit is None:
        return None
    return text, kind.unit, kind.aware


def cut_of(text: str, kind: ColumnKind) -> int | float:
    """A text as a value like those of a column.  Raises OptionError where it is none."""
    if kind.unit is not None:
        time = _one_time(text)
        if time is None or UNITS.index(time[1]) > UNITS.index(max(kind.unit, "s", key=UNITS.index)) or (time[2] and not kind.aware):
            raise OptionError(f"--split-by: {text!r} is no time like those of the column ({kind})", options=["split-by"])
        try:
            return int(as_times([text], kind.unit)[0])
        except (ValueError, OverflowError) as error:
            raise OptionError(f"--split-by: {text!r}: {str(error)[:100]}", options=["split-by"]) from None
    try:
        return float(text) if kind.dtype.startswith("float") else int(text)
    except ValueError:
        raise OptionError(f"--split-by: {text!r} is no number, and the column holds {kind}", options=["split-by"]) from None
