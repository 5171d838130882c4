"""Hides the many forms of a table in a text file: CSV with its dialects, and one JSON object a line.

What a file says of itself decides: its first rows tell what stands between the cells, and whether they begin with names.  Rows come some thousand at
a time, as columns of text.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.compiler.sources.celltext import GAPS
from mmcompile.compiler.sources.jsonparts import as_cell, form_of, is_unicode, record_of, text_of, whole_of
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.walk import expect_file
from mmcompile.errors import SourceError
from mmcompile.text import counted

__all__ = ["JSON_SUFFIXES", "TEXT_SUFFIXES", "Block", "TextTable"]

TEXT_SUFFIXES = (".csv", ".tsv")
JSON_SUFFIXES = (".jsonl", ".ndjson")

#: What is looked at to tell a dialect.
_HEAD_BYTES, _HEAD_ROWS = 1 << 18, 100
_ROWS = 1 << 14
#: Between cells, by what it is called; where two explain a file as well, the first does.
_BETWEEN = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
#: What no column is called: a number, or a time.
_VALUE = re.compile(
    r"\s*(?:[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T][0-9:.,Z+-]*)?)\s*\Z", re.IGNORECASE
)
#: A cell that is longer comes of a quote that is never closed.
_CELL_LIMIT = 1 << 24


@dataclass(frozen=True)
class Block:
    """Some rows, by column: the cells as text, and of which columns the source says that they are text, or that they are no single value.

    `mixed`: of which only some cells are text.
    """

    rows: int
    columns: Mapping[str, Sequence[str]]
    quoted: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    mixed: frozenset[str] = frozenset()


class TextTable:
    """The table in a text file: `names` of its columns in order (of a file of JSON, as far as its first rows tell), `form` in words."""

    def __init__(self, path: str) -> None:
        """Raises SourceError: it cannot be read, is empty, or no table."""
        self.path, self.names = path, tuple[str, ...]()
        self.header = True
        self._first: list[dict[str, str]] | None = None
        self._json = path.lower().endswith(JSON_SUFFIXES)
        expect_file(path, "a table of text")
        try:
            with open(path, "rb") as file:
                head = file.read(_HEAD_BYTES)
                if b"\n" not in head:
                    head += file.readline(_CELL_LIMIT)
        except OSError as error:
            raise unreadable(path, error) from error
        self.encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
        try:
            text = head.decode(self.encoding, "ignore" if self.encoding == "utf-16" else "surrogateescape")
        except UnicodeError:
            raise self.wrong("it is no text") from None
        if not text.strip():
            raise self.wrong("it is empty: expected rows")
        if "\0" in text:
            raise self.wrong(f"line {text[: text.index(chr(0))].count(chr(10)) + 1} holds a NUL: it is no table of text")
        #: Lines end in a carriage return alone.
        self.returns = "\n" not in text and "\r" in text.strip()
        self._between, self._spaced = ",", False
        lines = list(io.StringIO(text, newline=""))  # as a file that is opened so gives them
        self._lines = lines[:-1] if len(head) >= _HEAD_BYTES and len(lines) > 1 else lines
        #: Lines before the first row that are remarks.
        self.remarks = 0 if self._json else next((i for i, line in enumerate(self._lines) if not line.startswith("#")), 0)
        self._lines = self._lines[self.remarks :]
        if self._json:
            self.form = "JSON lines"
            self.names = tuple(dict.fromkeys(name for _, record in itertools.islice(self._records(iter(self._lines)), _HEAD_ROWS) for name in record))
        else:
            self._detect()

    def wrong(self, what: str, **details: Any) -> SourceError:
        return SourceError(f"{show(self.path)}: {what}", path=self.path, **details)

    @property
    def between(self) -> str | None:
        """What stands between cells, where that alone does."""
        return None if self._spaced else self._between

    def first(self) -> list[dict[str, str]]:
        """Its first rows, at most 100, each as cells by column; a cell that is no text or number is left out."""
        if self._first is None:
            if self._json:
                records = [record for _, record in self._some_records()]
                self._first = [{k: as_cell(v) for k, v in record.items() if not isinstance(v, dict | list)} for record in records]
            else:
                self._first = [dict(zip(self.names, row, strict=False)) for row in self._parse(self._between)[self.header :]]
        return self._first

    def many(self, name: str) -> str:
        """Do the first cells of a column hold a "list", an "object" of lists (or a list of objects), or neither: ""?"""
        if self._json:
            if any(row.get(name) for row in self.first()[:1]):  # a single value
                return ""
            cells = [record.get(name) for _, record in self._some_records()]
        else:
            cells = [whole_of(row[name]) for row in self.first() if row.get(name)]
        return next((form_of(cell) for cell in cells if isinstance(cell, dict | list) and cell), "")

    def blocks(self, lists: Collection[str] = ()) -> Iterator[Block]:
        """All rows; of the columns `lists` cells of JSON come as their text.

        Raises SourceError, naming the line: rows of other lengths, a quote that is never closed, NUL, no JSON object."""
        try:
            with open(self.path, encoding=self.encoding, errors="strict" if self.encoding == "utf-16" else "surrogateescape", newline="") as file:
                yield from self._json_blocks(file, lists) if self._json else self._cell_blocks(file)
        except UnicodeError as error:
            raise self.wrong(f"it ends in the middle of its encoding ({self.encoding})") from error
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise unreadable(self.path, error) from error

    # ------------------------------------------------------------------ cells

    def _detect(self) -> None:
        """What stands between cells: what makes rows of one length, of most cells."""
        order = ["\t", *(b for b in _BETWEEN if b != "\t")] if self.path.lower().endswith(".tsv") else [*_BETWEEN]
        best, between = (0.0, 0), order[0]
        for mark in order:
            widths = Counter(map(len, self._parse(mark)))
            width, count = max(widths.items(), key=lambda found: (found[1], found[0])) if widths else (0, 0)
            score = (round(count / sum(widths.values()), 1), width) if width > 1 else (0.0, 0)
            if score > best:
                best, between = score, mark
        self._between = between
        rows = self._parse(between)
        if not rows:
            raise self.wrong("it holds no row")
        self._spaced = len(rows[0]) > 1 and all(cell.startswith(" ") for row in rows for cell in row[1:])
        if self._spaced:
            rows = self._parse(between)
        named = [cell for cell in rows[0] if cell not in GAPS]
        self.header = not (any(os.path.splitext(c)[1].lower() in EXTENSIONS for c in named) or (named and all(map(_VALUE.match, named))))
        names = [name.strip() for name in rows[0]] if self.header else [str(i + 1) for i in range(len(rows[0]))]
        if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
            places = [str(i + 1) for i, name in enumerate(names) if name == twice[0]]
            raise self.wrong(f"columns {' and '.join(places)} are both called {show(twice[0])}: give them different names", column=twice[0])
        self.names = tuple(name or f"column {i + 1}" for i, name in enumerate(names))
        words = [_BETWEEN[between]] if len(names) > 1 else []
        words += ["no header"] * (not self.header) + [self.encoding] * (self.encoding == "utf-16")
        self.form = ", ".join(words)

    def reader(self, lines: Iterator[str], between: str | None = None) -> Any:
        """Rows of cells of these lines, in the dialect of the file."""
        csv.field_size_limit(_CELL_LIMIT)
        return csv.reader(lines, delimiter=between or self._between, strict=True, skipinitialspace=self._spaced)

    def _parse(self, between: str) -> list[list[str]]:
        """The first rows; a last one that is cut is none."""
        rows = []
        try:
            for row in self.reader(iter(self._lines), between):
                if row:
                    rows.append(row)
                if len(rows) == _HEAD_ROWS:
                    break
        except csv.Error:
            pass
        return rows

    def _cell_blocks(self, file: io.TextIOBase) -> Iterator[Block]:
        for _ in range(self.remarks):
            file.readline()
        reader = self.reader(_without_nul(self, file, self.remarks + 1))
        at, width = 0, len(self.names)
        try:
            if self.header:
                next(row for row in reader if row)
            while rows := list(itertools.islice(reader, _ROWS)):
                if set(map(len, rows)) != {width}:
                    rows = [row for row in rows if row]
                    for i, row in enumerate(rows):
                        if len(row) != width:
                            raise self.wrong(f"row {at + i + 1} has {counted(len(row), 'cells')}, expected {width} as in the first", row=at + i + 1)
                if rows:
                    at += len(rows)
                    yield Block(len(rows), dict(zip(self.names, zip(*rows, strict=True), strict=True)))
        except csv.Error as error:
            why = "a quote that is never closed" if re.search("limit|unexpected end", str(error)) else str(error)
            raise self.wrong(f"line {self.remarks + reader.line_num}: {why}", line=self.remarks + reader.line_num) from None

    # ------------------------------------------------------------------ JSON

    def _some_records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return itertools.islice(self._records(iter(self._lines)), _HEAD_ROWS)

    def _records(self, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = record_of(line)
            except ValueError as error:
                raise self.wrong(f"line {number}: {error}: give it one value", line=number) from None
            if record is None:
                raise self.wrong(f'line {number} is no JSON object: expected one a line, as in {{"file_name": "a.jpg", "label": 0}}', line=number)
            yield number, record

    def _json_blocks(self, file: io.TextIOBase, lists: Collection[str]) -> Iterator[Block]:
        records = self._records(_without_nul(self, file))
        while rows := [record for _, record in itertools.islice(records, _ROWS)]:
            columns, quoted, nested, mixed = {}, set[str](), set[str](), set[str]()
            for name in dict.fromkeys(name for row in rows for name in row):
                cells = [row.get(name) for row in rows]
                if name in lists:
                    cells = [text_of(cell) for cell in cells]
                kinds = set(map(type, cells))
                if kinds & {dict, list}:
                    nested.add(name)
                    continue
                if str in kinds:
                    quoted.add(name)
                    mixed |= {name} if kinds - {str, type(None)} else set()
                    texts = [cell for cell in cells if isinstance(cell, str)]
                    if any("\0" in text for text in texts):
                        raise self.wrong(f"column {show(name)} holds a NUL")
                    if not all(map(is_unicode, texts)):
                        raise self.wrong(f"column {show(name)} holds half a surrogate pair")
                columns[name] = [as_cell(cell) for cell in cells]
            yield Block(len(rows), columns, frozenset(quoted), frozenset(nested), frozenset(mixed))


def _without_nul(table: TextTable, lines: Iterator[str] | io.TextIOBase, first: int = 1) -> Iterator[str]:
    for number, line in enumerate(lines, first):
        if "\0" in line:
            raise table.wrong(f"line {number} holds a NUL: it is no table of text", line=number)
        yield line
