"""Hides how columns of numbers, times and texts lie in a Parquet file: which row group a row is in, and what Arrow calls their types.

The schema says what a column holds; only what it does not say (gaps, the range of long whole numbers, texts) is looked for, column by column.
Memory is bounded: what is decoded at one time is a row group of moderate size, or a part of a larger one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.parquet import opened
from mmcompile.compiler.sources.tablefast import as_numpy, first_gap
from mmcompile.compiler.sources.tablefields import ColumnKind, Reading
from mmcompile.errors import SourceError

__all__ = ["ArrowPart"]

#: Rows that are decoded at one time where a row group is larger than what is kept.
_ROWS = 1 << 16
#: A row group of no more bytes stays decoded, as the next range is likely to lie in it.
_KEPT_BYTES = 128 << 20

Array = npt.NDArray[Any]

_NUMBERS = {
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"halffloat": "float16", "float": "float32", "double": "float64", "bool": "bool"},
}
#: What a day is in each unit.
_PER_DAY = {"D": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


@dataclass
class _Stream:
    """A row group in the course of being read: `values` are of the rows from `row` on, `arrays` gives those that follow."""

    group: int
    readings: tuple[Reading, ...]
    arrays: Iterator[list[Array]]
    row: int = 0
    values: list[Array] = field(default_factory=list)


class ArrowPart:
    """The table in one Parquet file."""

    def __init__(self, path: str) -> None:
        """Raises SourceError: it cannot be read, or is no Parquet file; OptionError: pyarrow is not installed."""
        self.path = path
        self._file: Any = None
        self._kept: tuple[int, tuple[Reading, ...], list[Array]] | None = None
        self._at: _Stream | None = None
        file = self._opened()
        schema, meta = file.schema_arrow, file.metadata
        self.names = tuple(schema.names)
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise self._wrong(f"two columns are called {show(twice)}: give them different names", column=twice)
        self.rows = int(meta.num_rows)
        self._stops = np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)]).tolist()
        self._types = {name: schema.field(name).type for name in self.names}
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_kept": None, "_at": None}

    def close(self) -> None:
        """Let go of the file, and of what is decoded of it; the next call opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = self._kept = self._at = None

    def _wrong(self, what: str, **details: Any) -> SourceError:
        return SourceError(f"{show(self.path)}: {what}", path=self.path, **details)

    def _opened(self) -> Any:
        if self._file is None:
            self._file = opened(self.path)
        return self._file

    # ------------------------------------------------------------------ scanning

    def scan(self, progress: Callable[[int], None], wanted: frozenset[str] | None = None) -> dict[str, ColumnKind]:
        """What each column holds.  Raises SourceError for columns that no field is made of."""
        kinds = {name: self._kind(name) for name in self.names}
        progress(self.rows)
        return kinds

    def _kind(self, name: str) -> ColumnKind:
        kind = self._types[name]
        word = str(getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind)
        if word == "null":
            return ColumnKind("", missing=self.rows)
        unit, aware = None, False
        if word in _NUMBERS:
            dtype = _NUMBERS[word]
        elif "string" in word and "<" not in word:
            dtype = "text"
        elif word.startswith(("timestamp", "date", "time32", "time64")):
            dtype, unit = "int64", "D" if word.startswith("date") else str(kind.unit)
            aware = word.startswith("timestamp") and kind.tz is not None
        else:
            return ColumnKind(word)
        if dtype.startswith("float"):
            return ColumnKind(dtype)
        missing, low, high, known = self._statistics(name)
        long = dtype in ("int64", "uint64") and unit is None
        gap = -1
        if missing is None or (missing and dtype != "text") or (long and not known):
            missing, gap, low, high = self._look(name, bounds=long)
        if missing == self.rows:
            return ColumnKind("", missing=missing)
        return ColumnKind(dtype, unit, aware, missing, gap, low if long else 0, high if long else 0)

    def _statistics(self, name: str) -> tuple[int | None, int, int, bool]:
        """(gaps, None where the file does not say; least, greatest, are these known) of a column."""
        meta, missing, low, high, known = self._opened().metadata, 0, 0, 0, True
        at = next((i for i in range(meta.num_columns) if meta.schema.column(i).path == name), None)
        if at is None:
            return None, 0, 0, False
        for group in range(meta.num_row_groups):
            held = meta.row_group(group).column(at).statistics
            if held is None or not held.has_null_count:
                return None, 0, 0, False
            missing += held.null_count
            if held.has_min_max and isinstance(held.min, int):
                low, high = min(low, held.min), max(high, held.max)
            else:
                known &= held.null_count == meta.row_group(group).num_rows
        return missing, low, high, known

    def _look(self, name: str, *, bounds: bool) -> tuple[int, int, int, int]:
        """(gaps, the row of the first, least, greatest) by what is there."""
        import pyarrow.compute as pc

        missing, gap, low, high, row = 0, -1, 0, 0, 0
        for batch in self._batches([name], None):
            column = batch.column(0)
            if column.null_count:
                if gap < 0:
                    gap = row + first_gap(column)
                missing += column.null_count
            if bounds and column.null_count < len(column):
                found = pc.min_max(column).as_py()
                low, high = min(low, found["min"]), max(high, found["max"])
            row += len(column)
        return missing, gap, low, high

    def texts(self, name: str, most: int) -> set[str] | None:
        """The different texts of a column but for the empty one; None where they are more than `most`."""
        import pyarrow.compute as pc

        found: set[str] = set()
        for batch in self._batches([name], None):
            column = batch.column(0)
            if str(column.type).startswith("dictionary"):
                column = column.dictionary.take(pc.drop_null(column.indices.unique()))
            found.update(text for text in column.unique().to_pylist() if text)
            if len(found) > most:
                return None
        return found

    # ------------------------------------------------------------------ reading

    def stream(self, readings: Sequence[Reading]) -> Iterator[list[Array]]:
        """All rows, some thousand at a time."""
        for batch in self._batches([r.column for r in readings], None):
            yield self._arrays(batch, readings)

    def read(self, readings: Sequence[Reading], start: int, stop: int) -> list[Array]:
        """The rows [start, stop) of these columns, (stop - start,) each."""
        found = []
        while start < stop:
            group = bisect_right(self._stops, start)
            first = self._stops[group - 1] if group else 0
            last = min(stop, self._stops[group])
            found.append(self._in_group(group, tuple(readings), start - first, last - first))
            start = last
        return found[0] if len(found) == 1 else [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _in_group(self, group: int, readings: tuple[Reading, ...], start: int, stop: int) -> list[Array]:
        rows = self._stops[group] - (self._stops[group - 1] if group else 0)
        if rows * sum(np.dtype(r.dtype).itemsize for r in readings) <= _KEPT_BYTES:
            if self._kept is None or self._kept[:2] != (group, readings):
                self._kept = None
                parts = [self._arrays(batch, readings) for batch in self._batches([r.column for r in readings], group, rows)]
                self._kept = group, readings, [np.concatenate(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True)]
            return [column[start:stop] for column in self._kept[2]]
        if self._at is None or self._at.group != group or self._at.row > start or self._at.readings != readings:
            batches = self._batches([r.column for r in readings], group)
            self._at = _Stream(group, readings, (self._arrays(batch, readings) for batch in batches))
        found = []
        while (at := self._at).row < stop:
            if not at.values:
                at.values = next(at.arrays)
            n = len(at.values[0])
            first, last = max(start - at.row, 0), min(stop - at.row, n)
            if first < last:
                found.append([column[first:last] for column in at.values])
            at.values = [column[last:] for column in at.values] if last < n else []
            at.row += last
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _batches(self, columns: Sequence[str], group: int | None, rows: int = _ROWS) -> Iterator[Any]:
        """Record batches of these columns, in this order, of one row group or of all."""
        file = self._opened()
        groups = range(file.metadata.num_row_groups) if group is None else [group]
        try:
            for number in groups:
                for batch in file.iter_batches(rows, row_groups=[number], columns=list(dict.fromkeys(columns)), use_threads=False):
                    yield batch.select(list(columns))
        except (ValueError, NotImplementedError) as error:  # what Arrow raises for damaged pages
            raise self._wrong(f"row group {number} cannot be read: it is damaged") from error
        except OSError as error:
            if isinstance(error, SourceError) or error.errno:
                raise
            raise self._wrong(f"row group {number} cannot be read: it is damaged") from error

    def _arrays(self, batch: Any, readings: Sequence[Reading]) -> list[Array]:
        return [self._array(batch.column(i), reading) for i, reading in enumerate(readings)]

    def _array(self, column: Any, reading: Reading) -> Array:
        if reading.categories is not None:
            return _codes(column, reading.categories)
        if reading.unit is not None:
            return self._times(column, reading)
        return as_numpy(column).astype(reading.dtype, copy=False)

    def _times(self, column: Any, reading: Reading) -> Array:
        was, word = "D", str(column.type)
        if word == "date64[ms]":
            column = column.cast("int64")
            values = as_numpy(column) // _PER_DAY["ms"]
        else:
            values = as_numpy(column.cast("int32" if word.startswith(("date32", "time32")) else "int64")).astype(np.int64)
            was = "D" if word.startswith("date") else str(column.type.unit)
        assert reading.unit is not None
        times = _PER_DAY[reading.unit] // _PER_DAY[was]
        if times > 1 and len(values) and max(abs(int(values.min())), abs(int(values.max()))) > (2**63 - 1) // times:
            raise self._wrong(f"column {show(reading.column)}: a time is beyond what int64 holds in {reading.unit}", column=reading.column)
        return np.asarray(values * np.int64(times)) if times > 1 else values


def _codes(column: Any, categories: tuple[str, ...]) -> Array:
    """Texts as their places in the categories; a gap is -1."""
    if not str(column.type).startswith("dictionary"):
        column = column.dictionary_encode()
    at = {text: i for i, text in enumerate(categories)}
    place: Array = np.array([*(at.get(text, -1) for text in column.dictionary.to_pylist()), -1], np.int32)
    return np.asarray(place[as_numpy(column.indices.cast("int64"), len(place) - 1)])
