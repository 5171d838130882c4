"""Hides which columns of a table become which fields: numbers side by side in one array, times and texts each in a field of its own.

Pure: what columns hold goes in, fields and how to read them come out.  Every choice is told, and nothing is left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmcompile.compiler.sources.columns import field_names, find_column
from mmcompile.compiler.sources.names import show
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import DTYPES, UNITS, Field, Names

__all__ = ["ARRAY", "EXACT", "MOST_TEXTS", "ColumnKind", "Layout", "Reading", "lay_out", "merged", "reading_of"]

#: The field that holds numbers of several columns side by side.
ARRAY = "x"
#: Whole numbers up to here are float64 without a loss.
EXACT = 2**53
#: A column of more different texts holds names or notes, not categories.
MOST_TEXTS = 65_536


@dataclass(frozen=True)
class ColumnKind:
    """What a column holds: numbers of `dtype`, times in a `unit` (`aware`: of UTC), or texts; "" is a column without a value.

    `missing` of its cells are none, the first in row `gap` of the table `path` ("": not known).  `low` and `high` are the least and greatest of whole
    numbers of 64 bits.
    """

    dtype: str
    unit: str | None = None
    aware: bool = False
    missing: int = 0
    gap: int = -1
    low: int = 0
    high: int = 0
    path: str = ""

    @property
    def first_gap(self) -> str:
        """Where the first cell without a value is, in words."""
        place = f"row {self.gap + 1:,}" if self.gap >= 0 else ""
        words = " of ".join(filter(None, (place, show(self.path) if self.path else "")))
        return f" (the first in {words})" if words else ""

    @property
    def is_text(self) -> bool:
        return self.dtype == "text"

    @property
    def is_number(self) -> bool:
        return self.unit is None and self.dtype in DTYPES

    def __str__(self) -> str:
        if self.unit is not None:
            return f"times in {self.unit}{' of UTC' if self.aware else ''}"
        return {"text": "texts", "": "no value"}.get(self.dtype, self.dtype)

    @property
    def is_known(self) -> bool:
        """Can a field be made of it?"""
        return self.dtype in ("text", "") or self.dtype in DTYPES


@dataclass(frozen=True)
class Reading:
    """How a column is read: as numbers of `dtype` (a gap is NaN), as int64 in a `unit` since 1970, or as numbers of `categories` (a gap is -1).

    `numbers`: those of which a label's class numbers are the places.
    """

    column: str
    dtype: str
    unit: str | None = None
    categories: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """The fields of a table, and the columns that each is made of."""

    fields: tuple[Field, ...]
    columns: tuple[tuple[Reading, ...], ...]
    said: tuple[str, ...] = ()


def merged(column: str, kinds: Sequence[tuple[str, ColumnKind]]) -> ColumnKind:
    """What one column of several tables (each with its path) holds.  Raises SourceError where it is of one kind here and of another there."""
    found: tuple[str, ColumnKind] | None = None
    missing = sum(kind.missing for _, kind in kinds)
    gap, where = next(((kind.gap, path) for path, kind in kinds if kind.missing), (-1, ""))
    for path, kind in kinds:
        if not kind.dtype:
            continue
        if found is None:
            found = path, kind
            continue
        was = found[1]
        if was.dtype == kind.dtype and not kind.is_known:
            continue
        alike = (
            (was.unit is None) == (kind.unit is None) and was.is_text == kind.is_text and was.aware == kind.aware and kind.is_known and was.is_known
        )
        if not alike:
            raise SourceError(
                f"column {show(column)}: {was} in {show(found[0])}, {kind} in {show(path)}: expected the same in all tables", path=path, column=column
            )
        if kind.unit is not None:
            assert was.unit is not None
            both = replace(was, unit=max(was.unit, kind.unit, key=UNITS.index))
        elif kind.is_text:
            both = was
        else:
            dtype = np.result_type(was.dtype, kind.dtype).name
            both = replace(was, dtype=dtype, low=min(was.low, kind.low), high=max(was.high, kind.high))
            _refuse_inexact(column, both, was.dtype, kind.dtype)
        found = found[0], both
    return replace(found[1] if found is not None else ColumnKind(""), missing=missing, gap=gap, path=where)


def _is_exact(kind: ColumnKind, dtype: str) -> bool:
    """Does a dtype hold all numbers of a column?"""
    if dtype == kind.dtype or (np.can_cast(kind.dtype, dtype, "safe") and not _is_long(kind.dtype)):
        return True
    return dtype == "float64" and _is_long(kind.dtype) and -EXACT <= kind.low <= kind.high <= EXACT


def _is_long(dtype: str) -> bool:
    return dtype in ("int64", "uint64")


def _refuse_inexact(column: str, kind: ColumnKind, *dtypes: str) -> None:
    if kind.dtype == "float64" and any(map(_is_long, dtypes)) and not -EXACT <= kind.low <= kind.high <= EXACT:
        raise SourceError(
            f"column {show(column)}: {' and '.join(dtypes)} in different tables, and float64 would lose digits of whole numbers up to "
            f"{max(kind.high, -kind.low):,}: save it in one dtype",
            column=column,
        )


def reading_of(column: str, kind: ColumnKind, texts: tuple[str, ...] | None = None) -> Reading:
    """How a column is read by itself.  Raises SourceError for a gap that its dtype has no value for."""
    where = kind.first_gap
    if not kind.is_known:
        raise SourceError(
            f"column {show(column)} holds {kind}: expected numbers, times or texts: leave it out with --columns, or save it as one of these",
            column=column,
        )
    if kind.is_text:
        return Reading(column, "int32", categories=texts)
    if kind.unit is not None:
        if kind.missing:
            raise SourceError(
                f"column {show(column)}: {kind.missing:,} times are missing{where}, and no number stands for that: leave these rows out, or the "
                "column with --columns",
                column=column,
            )
        return Reading(column, "int64", kind.unit)
    if kind.missing and not kind.dtype.startswith("float"):
        made = np.result_type(kind.dtype, "float16").name
        if not _is_exact(kind, made):
            raise SourceError(
                f"column {show(column)}: {kind.missing:,} whole numbers are missing{where}, others are beyond 2^53, where float64 loses digits: fill "
                "the gaps, or leave the column out with --columns",
                column=column,
            )
        return Reading(column, made)
    return Reading(column, kind.dtype)


def lay_out(
    kinds: Mapping[str, ColumnKind],
    wanted: Sequence[str] | None,
    alone: Iterable[str],
    without: Iterable[str],
    where: str,
    called: Mapping[str, str],
    label: str | None = None,
) -> Layout:
    """The fields of a table with these columns, of which `wanted` (see `--columns`) says what is taken; categories are still to be found.

    None: all numbers become one array, if one dtype holds them without a loss, and times and texts fields of their own, as those of `alone` do;
    `without` are left out.  `called`: what columns without a name are called; `label`: the
    column that is the label, which is no field of these.  Raises OptionError, SourceError.
    """
    said: list[str] = []
    if wanted is not None:
        return _chosen(kinds, wanted, where, called, label)
    left_out = set(without)
    taken = {name: kind for name, kind in kinds.items() if name not in left_out}
    if empty := [name for name, kind in taken.items() if not kind.dtype]:
        said.append(f"left out, as no value is in it: {_listed(empty)}")
    readings = {name: reading_of(name, kind) for name, kind in taken.items() if kind.dtype}
    numbers = [name for name, kind in taken.items() if kind.is_number and name not in set(alone)]
    said += [
        f"column {show(n)}: {taken[n].missing:,} missing: stored as {readings[n].dtype}, NaN" for n in numbers if _widened(taken[n], readings[n])
    ]
    groups: list[tuple[str, list[str]]] = []
    if numbers:
        dtype = np.result_type(*(readings[name].dtype for name in numbers)).name
        stray = [name for name in numbers if not _is_exact(replace(taken[name], dtype=readings[name].dtype), dtype)]
        if not stray:
            readings |= {name: replace(readings[name], dtype=dtype) for name in numbers}
            groups.append(("", numbers))
        else:
            said.append(f"no one dtype holds all numbers without a loss ({_listed(stray)} beside {dtype}): each column is a field of its own")
            groups += [(name, [name]) for name in numbers]
    groups += [(name, [name]) for name in readings if name not in numbers]
    if not groups:
        raise SourceError(f"{where}: no column of numbers, times or texts")
    return _made(groups, readings, said, called, label)


def _chosen(kinds: Mapping[str, ColumnKind], wanted: Sequence[str], where: str, called: Mapping[str, str], label: str | None) -> Layout:
    unnamed = {name: column for column, name in called.items()}
    groups: list[tuple[str, list[str]]] = []
    readings: dict[str, Reading] = {}
    for entry in wanted:
        name, equals, parts = entry.partition("=")
        columns = [entry] if entry in kinds or not equals else parts.split("+")
        columns = [unnamed.get(column.strip()) or find_column(column.strip(), list(kinds), "columns", where) for column in columns]
        for column in columns:
            if not kinds[column].dtype:
                raise SourceError(f"column {show(column)}: there is no value in it", column=column)
            readings[column] = reading_of(column, kinds[column])
        if columns != [entry] and len(columns) == len(parts.split("+")) and equals:
            dtype = np.result_type(*(readings[column].dtype for column in columns)).name
            for column in columns:
                if not kinds[column].is_number or not _is_exact(replace(kinds[column], dtype=readings[column].dtype), dtype):
                    raise OptionError(
                        f"--columns {entry}: column {show(column)} holds {kinds[column]}, which {dtype} does not hold without a loss: give it a "
                        "field of its own",
                        options=["columns"],
                    )
                readings[column] = replace(readings[column], dtype=dtype)
            groups.append((f"={name.strip()}", columns))
        else:
            groups.append((columns[0], columns))
    used = [column for _, columns in groups for column in columns]
    if twice := next((column for column in used if used.count(column) > 1), None):
        raise OptionError(f"--columns: {show(twice)} stands in it twice", options=["columns"])
    if not groups:
        raise OptionError("--columns: no column is left", options=["columns"])
    return _made(groups, readings, [], called, label)


def _widened(kind: ColumnKind, reading: Reading) -> bool:
    return bool(kind.missing) and kind.dtype != reading.dtype


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(show, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _made(
    groups: Sequence[tuple[str, list[str]]], readings: Mapping[str, Reading], said: Sequence[str], called: Mapping[str, str], label: str | None
) -> Layout:
    """Fields of groups of columns: ("", columns) is ARRAY, ("=name", columns) one of that name, (column, [column]) a column's own."""
    shown = [ARRAY if not name else name.removeprefix("=") if name.startswith("=") else called.get(name, name) for name, _ in groups]
    names = field_names(shown, label)
    fields, columns = [], []
    for (name, parts), word in zip(groups, shown, strict=True):
        first = readings[parts[0]]
        spec = Field(names[word], first.dtype, (), "value", unit=first.unit)
        fields.append(spec if name and not name.startswith("=") else replace(spec, shape=(len(parts),), columns=Names(tuple(parts))))
        columns.append(tuple(readings[part] for part in parts))
    return Layout(tuple(fields), tuple(columns), tuple(said))
