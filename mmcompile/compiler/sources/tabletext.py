"""Hides how columns of numbers, times and texts lie in a text file: one pass finds what they hold, and where rows begin.

Values are read again from there, so a range of rows costs about what itself costs.  Memory is bounded, however long the file is.
"""

from __future__ import annotations

import csv
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.celltext import GAPS, as_times, as_values, beyond, how_written, is_number, mostly_values, told_beyond
from mmcompile.compiler.sources.delimited import TextTable
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.tablecells import CellKinds
from mmcompile.compiler.sources.tablefast import as_numpy, first_gap, has_infinite, parse_lines
from mmcompile.compiler.sources.tablefields import ColumnKind, Reading
from mmcompile.errors import SourceError
from mmcompile.text import counted

__all__ = ["TextPart"]

#: Rows between two places that are remembered; they are parsed at one time.
_ROWS = 1 << 12
#: Bytes of plain lines that are parsed in one call.
_PLAIN_BYTES = 1 << 20
_SORTED_GAPS = sorted(GAPS)
#: A column is of numbers if at least this share of its first cells are: then a cell that is none is a mistake, not a category.
_SHARE = 0.5
#: What some tools write between columns, and this does not take for that.
_PARTS = re.compile(r"[\s:~^/&!]+")

Array = npt.NDArray[Any]


class TextPart:
    """The table in one CSV or TSV file."""

    def __init__(self, path: str) -> None:
        """Raises SourceError: it cannot be read, is empty, or no table."""
        self.path = path
        self._table = TextTable(path)
        if self._table.encoding == "utf-16":
            raise self._table.wrong("UTF-16; expected UTF-8: convert it (iconv -f utf-16 -t utf-8)")
        if self._table.returns:
            raise self._table.wrong("its lines end in a carriage return alone: save it with line ends of \\n or \\r\\n")
        self.names = self._table.names
        self.rows = 0
        self._places: list[tuple[int, int, int]] = []  # (row, byte offset, line)
        self._coded: tuple[Any, dict[str, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_coded": None}

    def close(self) -> None:
        """No file is held open between calls."""

    # ------------------------------------------------------------------ scanning

    def scan(self, progress: Callable[[int], None], wanted: frozenset[str] | None = None) -> dict[str, ColumnKind]:
        """What each column holds.  Raises SourceError, naming row or line, for what is no table or no number among numbers.

        A column that is not `wanted` (None: all are) is not looked at any further where a cell of it is none of what the others are.
        """
        given_up: set[str] = set()
        cells = {name: CellKinds() for name in self.names}
        self._places = []
        for block in self._blocks(None, lambda: {name: found.number or "string" for name, found in cells.items()}):
            self._places.append((block.row, block.offset, block.line))
            for name, column in block.columns.items():
                if name not in given_up:
                    try:
                        self._look(name, cells[name], column, block.row)
                    except SourceError:
                        if wanted is None or name in wanted:
                            raise
                        given_up.add(name)
                        cells[name] = CellKinds()
            self.rows = block.row + block.rows
            progress(self.rows)
        if len(cells) == 1 and not cells[self.names[0]].kinds:
            self._refuse_one_column()
        kinds = {}
        for name, found in cells.items():
            kind = found.kind()
            if isinstance(kind, str) and (wanted is None or name in wanted):
                raise self._table.wrong(f"column {show(name)}: {kind}: expected the like in all rows, or leave it out with --columns", column=name)
            kinds[name] = ColumnKind("") if isinstance(kind, str) else kind
        return kinds

    def _refuse_one_column(self) -> None:
        """Texts with numbers in them, and nothing beside them, are columns that were not told apart."""
        found = [cell for row in self._table.first() for cell in row.values() if cell]
        if found and sum(map(_has_parts, found)) >= _SHARE * len(found):
            raise self._table.wrong(
                f"one column of text with numbers in it, as in {found[0]!r:.60}: expected commas, semicolons, tabs or bars between columns",
                column=self.names[0],
            )

    def _look(self, name: str, cells: CellKinds, column: Any, row: int) -> None:
        """See what more cells of a column are."""
        if isinstance(column, tuple):
            seen = cells.seen
            stray = cells.extend(column)
            if cells.number == "float64" and (huge := beyond(column)) is not None:
                raise self._table.wrong(f"row {row + huge + 1:,}, column {show(name)}: {told_beyond(column[huge])}", row=row + huge, column=name)
            if stray is None:
                return
            # Only of the first block is it looked at what comes behind: how long the others are depends on how they are read.
            if seen or any(cell not in GAPS for cell in column[:stray]) or (not row and mostly_values(column)):
                raise self._no_number(name, row + stray, column[stray])
            return
        import pyarrow.compute as pc

        low = high = 0
        if cells.number == "int64" and column.null_count < len(column):
            found = pc.min_max(column).as_py()
            low, high = found["min"], found["max"]
        cells.add_numbers(len(column), column.null_count, first_gap(column), low, high)

    def _no_number(self, name: str, row: int, cell: str) -> SourceError:
        hint = f"{said}, " if (said := how_written(cell)) else ""
        return self._table.wrong(
            f"row {row + 1:,}, column {show(name)}: {cell!r:.60} is no value like others in it: {hint}mend it, or leave it out with --columns",
            row=row,
            column=name,
        )

    def texts(self, name: str, most: int) -> set[str] | None:
        """The different texts of a column but for the empty one; None where they are more than `most`."""
        found: set[str] = set()
        for block in self._blocks(None, lambda: {name: "string"}):
            found.update(block.columns[name])
            if len(found) > most + 1:
                return None
        found.discard("")
        return found

    # ------------------------------------------------------------------ reading

    def stream(self, readings: Sequence[Reading]) -> Iterator[list[Array]]:
        """All rows, some thousand at a time."""
        for block in self._blocks(None, lambda: _types(readings)):
            yield [self._values(block.columns[r.column], r, block.row) for r in readings]

    def read(self, readings: Sequence[Reading], start: int, stop: int) -> list[Array]:
        """The rows [start, stop) of these columns, (stop - start,) each."""
        found: list[list[Array]] = []
        for block in self._blocks(start, lambda: _types(readings)):
            first, last = max(start - block.row, 0), min(stop - block.row, block.rows)
            found.append([self._values(block.columns[r.column][first:last], r, block.row + first) for r in readings])
            if block.row + last >= stop:
                break
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _values(self, cells: Any, reading: Reading, row: int) -> Array:
        if not isinstance(cells, tuple):
            return as_numpy(cells).astype(reading.dtype, copy=False)
        if reading.categories is not None:
            codes = self._codes(reading)
            return np.array([codes[cell] for cell in cells], np.int32)
        try:
            return as_values(cells, reading.dtype) if reading.unit is None else as_times(cells, reading.unit)
        except (ValueError, OverflowError) as error:
            if len(cells) > 1:
                for i, cell in enumerate(cells):  # which of them is it?
                    self._values((cell,), reading, row + i)
            raise self._table.wrong(
                f"row {row + 1:,}, column {show(reading.column)}: {cells[0]!r:.60}: {str(error)[:100]}", row=row, column=reading.column
            ) from error

    def _codes(self, reading: Reading) -> dict[str, int]:
        """The number of each category; those of one column are kept."""
        if self._coded is None or self._coded[0] is not reading.categories:
            self._coded = reading.categories, {text: i for i, text in enumerate(reading.categories or ())} | {"": -1}
        return self._coded[1]

    def _blocks(self, start: int | None, types: Callable[[], dict[str, str]]) -> Iterator[_Block]:
        """Blocks of rows from the one that holds row `start` on, None: the first; `types` says which columns are wanted of the next, and as what."""
        at = (0, 0, 0) if start is None else self._places[max(0, bisect_right(self._places, (start, 1 << 62, 0)) - 1)]
        try:
            with open(self.path, "rb") as file:
                lines = _Lines(self._table, file, at)
                if not lines.offset:
                    self._skip_names(lines)
                row, slow = at[0], start is None
                while True:
                    block = None if slow else self._plain_block(lines, row, types())
                    block = block or self._any_block(lines, row)
                    if block is None:
                        return
                    slow = not lines.offset
                    yield block
                    row += block.rows
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise unreadable(self.path, error) from error

    def _plain_block(self, lines: _Lines, row: int, types: dict[str, str]) -> _Block | None:
        """The rows of the next lines, parsed in one call; None, and no line is taken, where they are not plain."""
        offset, line = lines.offset, lines.line
        data = lines.take(_PLAIN_BYTES) if self._table.between is not None and offset else b""
        columns = parse_lines(data, self.names, types, self._table.between or ",", _SORTED_GAPS) if data else None
        if columns is None:
            lines.back(offset, line)
            return None
        if any(types[name] == "float64" and has_infinite(column) for name, column in columns.items()):  # is that what stands there?
            lines.back(offset, line)
            return None
        made = {name: tuple(column.to_pylist()) if types[name] == "string" else column for name, column in columns.items()}
        return _Block(row, offset, line, len(next(iter(made.values()))), made)

    def _skip_names(self, lines: _Lines) -> None:
        for _ in range(self._table.remarks):
            next(iter(lines))
        if self._table.header:
            next((cells for cells in self._table.reader(iter(lines)) if cells), None)

    def _any_block(self, lines: _Lines, row: int) -> _Block | None:
        """The next rows, cell by cell; None at the end.  Raises SourceError, naming row or line."""
        offset, line, width = lines.offset, lines.line, len(self.names)
        try:
            while rows := list(itertools.islice(self._table.reader(iter(lines)), _ROWS)):
                if set(map(len, rows)) != {width}:
                    rows = [cells for cells in rows if cells]
                    for i, cells in enumerate(rows):
                        if len(cells) != width:
                            raise self._table.wrong(
                                f"row {row + i + 1:,} has {counted(len(cells), 'cells')}, expected {width} as in the first", row=row + i
                            )
                if rows:
                    return _Block(row, offset, line, len(rows), dict(zip(self.names, zip(*rows, strict=True), strict=True)))
        except csv.Error as error:
            why = "a quote that is never closed" if re.search("limit|unexpected end", str(error)) else str(error)
            if "new-line character" in why:
                why = "a carriage return that ends no line: save it with line ends of \\n or \\r\\n"
            raise self._table.wrong(f"line {lines.line:,}: {why}", line=lines.line) from None
        return None


@dataclass(frozen=True)
class _Block:
    """Rows from row `row` on, whose first line begins at a byte offset: tuples of cells, or Arrow arrays of numbers, by column."""

    row: int
    offset: int
    line: int
    rows: int
    columns: dict[str, Any]


def _types(readings: Sequence[Reading]) -> dict[str, str]:
    """As what Arrow parses columns."""
    plain = ("float64", "int64", "uint64")
    return {r.column: r.dtype if r.dtype in plain and r.unit is None and r.categories is None else "string" for r in readings}


def _has_parts(cell: str) -> bool:
    """Do blanks, colons or the like stand between parts of a cell, one of which is a number?"""
    parts = [part for part in _PARTS.split(cell) if part]
    return len(parts) > 1 and any(is_number(part) for part in parts)


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

    def take(self, size: int) -> bytes:
        """The next whole lines, of about so many bytes; none where a line is longer."""
        data: bytes = self._file.read(size)
        if len(data) == size and not data.endswith(b"\n"):
            data += self._file.readline(size)
            if len(data) == 2 * size:
                return b""
        self.offset += len(data)
        self.line += data.count(b"\n")
        return data

    def back(self, offset: int, line: int) -> None:
        """Go back to a place."""
        self._file.seek(offset)
        self.offset, self.line = offset, line
