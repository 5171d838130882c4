"""Hides that a list may be in several files, of text or of Parquet: which columns they have, what the first rows hold, and where a row is found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.compiler.sources.columns import IMAGE_NAMES, named_alike
from mmcompile.compiler.sources.delimited import TextTable
from mmcompile.compiler.sources.listed import folder_of, found_in
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.parquet import ArrowColumns, ParquetTable
from mmcompile.compiler.sources.roles import Seen
from mmcompile.compiler.sources.textcolumns import TextColumns
from mmcompile.errors import OptionError, SourceError

__all__ = ["Lists", "Part", "finds_images", "first_cells", "has_extensions", "names_images"]

#: Rows that are held against the disk to find which column names images.
_LOOKED_AT = 20


@dataclass(frozen=True)
class Part:
    """One list: the file, the folder that its paths are relative to (below the root, or ""), and the split that it is, or ""."""

    file: str
    base: str = ""
    split: str = ""


def names_images(table: TextTable | ParquetTable, folder: str) -> bool:
    """Is there a column that names images, by its own name, by what it names below this folder or by what the names end with?"""
    found = first_cells(table)
    called = any(found[name] for word in IMAGE_NAMES if (name := named_alike(found, (word,))))
    return called or any(found_in(cells, folder) or has_extensions(cells) for cells in found.values())


def finds_images(table: TextTable, folder: str) -> bool:
    """Is there a column whose first cells name files that are there: below this folder, or below one in it?"""
    cells = [found for found in first_cells(table).values() if has_extensions(found)]
    return any(found and (found_in(found, folder) or folder_of(found, folder)[1]) for found in cells)


def first_cells(table: TextTable | ParquetTable) -> dict[str, list[str]]:
    """Cells of the first rows, by column."""
    rows = table.first()[:_LOOKED_AT]
    return {name: [row[name] for row in rows if row.get(name)] for name in table.names}


def has_extensions(cells: list[str]) -> bool:
    """Do most of these end as names of images do?"""
    return 2 * sum(os.path.splitext(cell)[1].lower() in EXTENSIONS for cell in cells) > len(cells)


class Lists:
    """The lists of a source, one below the other.

    `image`: the column with images, where it was said; `fixed`: paths are relative to the root, and to nothing else.
    """

    def __init__(self, raw: str, root: str, parts: Sequence[Part], image: str | None, *, fixed: bool) -> None:
        self._root, self.parts, self._fixed = root, parts, fixed
        folder = raw if os.path.isdir(raw) else os.path.dirname(raw)
        self.shown = [os.path.relpath(part.file, folder) for part in parts]
        self.tables: Sequence[TextTable] | Sequence[ParquetTable]
        #: The column with the bytes of images, where they are in the list.
        self.holds: str | None = None
        if parts[0].file.lower().endswith(".parquet"):
            packed = [ParquetTable(part.file, image) for part in parts]
            self.tables, self.holds = packed, packed[0].holds
            if fixed and self.holds is not None:
                raise OptionError(f"--images: the images lie in column {show(self.holds)} of {show(raw)}", options=["images"])
            if other := next((table for table in packed if table.holds != self.holds), None):
                column = show(self.holds or other.holds or "")
                raise SourceError(f"{show(other.path)}: column {column} holds images in some files, but not in all", path=other.path)
        else:
            self.tables = [TextTable(part.file) for part in parts]
        #: All columns, and what the numbers in some stand for.
        self.names = tuple(dict.fromkeys(name for table in self.tables for name in table.names))
        self.known = {name: names for table in self.tables if isinstance(table, ParquetTable) for name, names in table.classes.items()}
        #: How many rows there are at the end of each, once they were read.
        self.stops: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def at(self, row: int) -> tuple[int, int]:
        """(the list that a row is in, its number there from 0 on)."""
        part = int(np.searchsorted(self.stops, row, side="right"))
        return part, row - (int(self.stops[part - 1]) if part else 0)

    def where(self, row: int) -> str:
        """A row, as a person finds it."""
        part, at = self.at(row)
        if isinstance(self.tables[part], ParquetTable):
            return f"{show(self.shown[part])}#{at}"
        return f"{show(self.shown[part])} row {at + 1}" if len(self.parts) > 1 else f"row {at + 1}"

    def columns(self, texts: set[str], *, numbers: bool, held: Sequence[str] = (), lists: Sequence[str] = ()) -> TextColumns | ArrowColumns:
        """All columns: `texts` may be text, `held` hold images, `lists` may be lists; with `numbers` others count as well."""
        if isinstance(self.tables[0], ParquetTable):
            found: TextColumns | ArrowColumns = ArrowColumns(
                cast(Sequence[ParquetTable], self.tables), texts, numbers=numbers, held=held, lists=lists
            )
        else:
            found = TextColumns(cast(Sequence[TextTable], self.tables), texts, numbers=numbers, lists=lists)
        self.stops = np.array(found.stops)
        return found

    def cells(self, column: str) -> list[list[str]]:
        """The first cells of a column, of each list."""
        return [first_cells(table).get(column, []) for table in self.tables]

    def is_held(self, column: str) -> bool:
        """Do the lists hold the bytes of images in this column?"""
        table = self.tables[0]
        return isinstance(table, ParquetTable) and column in table.names and table.is_held(column)

    def seen(self, column: str) -> Seen:
        """What stands in a column."""
        table = next(table for table in self.tables if column in table.names)
        if isinstance(table, ParquetTable) and table.holds_images(column):
            return Seen(images=True, held=True)
        cells = self.cells(column)
        count = sum(map(len, cells))
        paths = has_extensions([cell for part in cells for cell in part])
        many = table.many(column)
        if many:
            return Seen(lists=many == "list", objects=many == "object")
        return Seen(images=paths and 2 * sum(self.base(part, found)[1] for part, found in zip(self.parts, cells, strict=True)) > count)

    def base(self, part: Part, cells: list[str]) -> tuple[str, int]:
        """(the folder below the root in which most of these paths are found, how many are)."""
        root = self._root
        here = os.path.join(root, part.base)
        hits = found_in(cells, here)
        if hits or self._fixed:
            return part.base, hits
        name, hits = folder_of(cells, here)
        return os.path.join(part.base, name) if hits else part.base, hits
