"""Hides how columns of numbers, times and texts lie in a text file: one pass finds what they hold, and where rows begin.

Values are read again from there, so a range of rows costs about what itself costs.  Memory is bounded, however long the file is.
"""

from __future__ import annotations

import csv
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.delimited import TextTable
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.tablecells import CellKinds, as_times, as_values
from mmcompile.compiler.sources.tablefields import ColumnKind, Reading
from mmcompile.errors import SourceError

__all__ = ["TextPart"]

#: Rows between two places that are remembered; they are parsed at one time.
_ROWS = 1 << 12
#: A column is of numbers if at least this share of its first cells are: then a cell that is none is a mistake, not a category.
_SHARE = 0.5
#: Numbers and dates as people of many countries write them: no two of these agree, so none is guessed.
_NUMBER = re.compile(r"\s*[-+(]?[$€£]?\s?[0-9]+(?:[., '][0-9]{3})*(?:[.,][0-9]+)?\s?[%$€£)]?\s*\Z")
_DATE = re.compile(r"[0-9]{1,4}([./-])[0-9]{1,2}\1[0-9]{1,4}\b|[0-9]{1,2} [A-Z][a-z]{2,8} [0-9]{4}\b|[A-Z][a-z]{2,8} [0-9]{1,2}, [0-9]{4}\b")

Array = npt.NDArray[Any]


class TextPart:
    """The table in one CSV or TSV file."""

    def __init__(self, path: str) -> None:
        """Raises SourceError: it cannot be read, is empty, or no table."""
        self.path = path
        self._table = TextTable(path)
        if self._table.encoding == "utf-16":
            raise self._table.wrong("UTF-16; expected UTF-8: convert it (iconv -f utf-16 -t utf-8)")
        self.names = self._table.names
        self.rows = 0
        self._places: list[tuple[int, int, int]] = []  # (row, byte offset, line)

    # ------------------------------------------------------------------ scanning

    def scan(self, progress: Callable[[int], None]) -> dict[str, ColumnKind]:
        """What each column holds.  Raises SourceError, naming row or line, for what is no table or no number among numbers."""
        cells = {name: CellKinds() for name in self.names}
        self._places = []
        for row, offset, line, columns in self._blocks(None):
            self._places.append((row, offset, line))
            for name, column in zip(self.names, columns, strict=True):
                seen = cells[name].seen
                stray = cells[name].extend(column)
                if stray is not None and (seen or _looks_numeric(column)):
                    raise self._no_number(name, row + stray, column[stray])
            self.rows = row + len(columns[0])
            progress(self.rows)
        kinds = {}
        for name, found in cells.items():
            kind = found.kind()
            if isinstance(kind, str):
                raise self._table.wrong(f"column {show(name)}: {kind}: expected the like in all rows, or leave it out with --columns", column=name)
            kinds[name] = kind
        return kinds

    def _no_number(self, name: str, row: int, cell: str) -> SourceError:
        hint = "numbers are written as 1234.5, " if _NUMBER.match(cell) else "times are written as 2023-01-31 09:30:00, " if _DATE.match(cell) else ""
        return self._table.wrong(
            f"row {row + 1:,}, column {show(name)}: {cell!r:.60} is no value like others in it: {hint}mend it, or leave it out with --columns",
            row=row,
            column=name,
        )

    def texts(self, name: str, most: int) -> set[str] | None:
        """The different texts of a column but for the empty one; None where they are more than `most`."""
        found: set[str] = set()
        at = self.names.index(name)
        for *_, columns in self._blocks(None):
            found.update(columns[at])
            if len(found) > most + 1:
                return None
        found.discard("")
        return found

    # ------------------------------------------------------------------ reading

    def stream(self, readings: Sequence[Reading]) -> Iterator[list[Array]]:
        """All rows, some thousand at a time."""
        for row, _, _, columns in self._blocks(None):
            yield [self._values(columns[self.names.index(r.column)], r, row) for r in readings]

    def read(self, readings: Sequence[Reading], start: int, stop: int) -> list[Array]:
        """The rows [start, stop) of these columns, (stop - start,) each."""
        found: list[list[Array]] = []
        for row, _, _, columns in self._blocks(start):
            if row >= stop:
                break
            first, last = max(start - row, 0), min(stop - row, len(columns[0]))
            found.append([self._values(columns[self.names.index(r.column)][first:last], r, row + first) for r in readings])
            if row + last >= stop:
                break
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _values(self, cells: Sequence[str], reading: Reading, row: int) -> Array:
        if reading.categories is not None:
            codes = {text: i for i, text in enumerate(reading.categories)} | {"": -1}
            return np.array([codes[cell] for cell in cells], np.int32)
        try:
            return as_values(cells, reading.dtype) if reading.unit is None else as_times(cells, reading.unit)
        except (ValueError, OverflowError) as error:
            raise self._table.wrong(f"rows {row + 1:,} to {row + len(cells):,}, column {show(reading.column)}: {str(error)[:100]}") from error

    def _blocks(self, start: int | None) -> Iterator[tuple[int, int, int, list[tuple[str, ...]]]]:
        """(row, byte offset, line, cells by column) of each block, from the one that holds row `start`; None: from the first row on."""
        at = (0, 0, 0) if start is None else self._places[max(0, bisect_right(self._places, (start, 1 << 62, 0)) - 1)]
        try:
            with open(self.path, "rb") as file:
                yield from self._rows(_Lines(self._table, file, at), at[0], header=at[1] == 0)
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"cannot read {show(self.path)}: {error.strerror}", path=self.path) from error

    def _rows(self, lines: _Lines, row: int, *, header: bool) -> Iterator[tuple[int, int, int, list[tuple[str, ...]]]]:
        width = len(self.names)
        reader = self._table.reader(iter(lines))
        try:
            if header:
                for _ in range(self._table.remarks):
                    next(iter(lines))
                if self._table.header:
                    next((cells for cells in reader if cells), None)
            while True:
                offset, line = lines.offset, lines.line
                rows = list(itertools.islice(reader, _ROWS))
                if not rows:
                    return
                if set(map(len, rows)) != {width}:
                    rows = [cells for cells in rows if cells]
                    for i, cells in enumerate(rows):
                        if len(cells) != width:
                            count = f"{len(cells)} cell{'s'[: len(cells) != 1]}"
                            raise self._table.wrong(f"row {row + i + 1:,} has {count}, expected {width} as in the first", row=row + i)
                if rows:
                    yield row, offset, line, list(zip(*rows, strict=True))
                    row += len(rows)
        except csv.Error as error:
            why = "a quote that is never closed" if re.search("limit|unexpected end", str(error)) else str(error)
            if "new-line character" in why:
                why = "a carriage return that ends no line: save it with line ends of \\n or \\r\\n"
            raise self._table.wrong(f"line {lines.line:,}: {why}", line=lines.line) from None


def _looks_numeric(cells: Sequence[str]) -> bool:
    """Are half of these cells numbers or times, however they are written?"""
    count = 0
    for cell in cells:
        kinds = CellKinds()
        kinds.extend([cell])
        count += (bool(kinds.kinds) and kinds.seen) or bool(_NUMBER.match(cell) or _DATE.match(cell))
    return count >= _SHARE * len(cells)


class _Lines:
    """The lines of a file from a place in it on; `offset` and `line`: where the next one begins."""

    def __init__(self, table: TextTable, file: Any, at: tuple[int, int, int]) -> None:
        self._table, self._file = table, file
        _, self.offset, self.line = at
        file.seek(self.offset)

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            if b"\0" in line:
                raise self._table.wrong(f"line {self.line + 1:,} holds a NUL: it is no table of text", line=self.line + 1)
            text = line.decode("utf-8", "surrogateescape")
            if not self.offset:
                text = text.removeprefix("\ufeff")
            self.offset += len(line)
            self.line += 1
            yield text
