"""Hides how it is found, block by block, which kind of value all cells of a column are, and in which dtype they fit.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.compiler.sources.celltext import GAPS, KINDS, Times, as_times, is_kind, kinds_of
from mmcompile.compiler.sources.tablefields import ColumnKind
from mmcompile.errors import OptionError
from mmcompile.format.fields import UNITS

__all__ = ["CellKinds", "cut_of"]

#: Least and greatest of whole numbers.
_INT64, _UINT64 = (-(2**63), 2**63 - 1), 2**64 - 1


class CellKinds:
    """What the cells of one column are, as they come."""

    def __init__(self) -> None:
        self.kinds = set(KINDS)
        self._rows = self._missing = self._empty = 0
        self.gap = -1
        self._low, self._high = 0, 0
        self._times = Times()
        self._unlike = -1

    @property
    def seen(self) -> bool:
        """Was there any value yet?"""
        return self._missing < self._rows

    def extend(self, cells: Sequence[str]) -> int | None:
        """More cells, without NUL.  The first that is none of what all cells before are, where there is one: from then on the column holds texts."""
        start, self._rows = self._rows, self._rows + len(cells)
        fits = kinds_of(cells, self.kinds)
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
            self._times.extend(values)
            if self._times.fault and self._unlike < 0:
                self._unlike = start + next(i for i, cell in enumerate(cells) if cell not in GAPS and self._times.unlike(cell))
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
            left = {kind for kind in left if is_kind(cell, kind)}
            if not left:
                return i
        return 0

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
        if self._times.fault:
            return f"{self._times.fault}, the first unlike those before in row {self._unlike + 1:,}"
        return ColumnKind("int64", self._times.unit, self._times.aware, missing=missing, gap=gap)


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
