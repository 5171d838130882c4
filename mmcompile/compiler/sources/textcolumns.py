"""Hides how several tables of text become one: a column that one of them lacks has no values there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mmcompile.compiler.sources.cells import Cells, Column, typed
from mmcompile.compiler.sources.delimited import TextTable
from mmcompile.compiler.sources.keys import Keys

__all__ = ["TextColumns"]


class TextColumns:
    """The columns of tables, one below the other; `stops`: how many rows there are at the end of each table.

    `texts` are columns that may be text, `lists` those of them that may be lists; with `numbers` all others count that are none.  Raises as
    TextTable does.
    """

    def __init__(self, tables: Sequence[TextTable], texts: set[str], *, numbers: bool, lists: Collection[str] = ()) -> None:
        self._cells: dict[str, Cells] = {}
        #: Columns whose cells are no single values.
        self.nested: set[str] = set()
        self.stops: list[int] = []
        rows = 0
        for table in tables:
            for block in table.blocks(lists):
                self.nested |= block.nested
                for name, column in block.columns.items():
                    if name in texts or numbers:
                        if name not in self._cells:
                            self._cells[name] = Cells(name, keeps_text=name in texts)
                        cells = self._cells[name]
                        _fill(cells, rows)
                        cells.extend(column, quoted=name in block.quoted, mixed=name in block.mixed)
                rows += block.rows
            self.stops.append(rows)
        for cells in self._cells.values():
            _fill(cells, rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that may be fields: not nested, and no text but of `texts`."""
        return tuple(name for name, cells in self._cells.items() if name not in self.nested and (cells.keeps_text or not cells.is_text))

    @property
    def texts(self) -> tuple[str, ...]:
        """Those that are text, and were not asked for."""
        return tuple(name for name, cells in self._cells.items() if name not in self.nested and cells.is_text and not cells.keeps_text)

    def stray(self, name: str) -> tuple[int, str] | None:
        """Of a column that is text for a few cells only: the row of the first of these, and that cell; to be asked for before the column."""
        return self._cells[name].stray

    def paths(self, name: str) -> Keys:
        """The cells of a column as bytes; to be asked for once."""
        return self._cells.pop(name).keys()

    def cells(self, name: str) -> Keys:
        """As `paths`: a list is the text of it."""
        return self.paths(name)

    def column(self, name: str, where: Callable[[int], str], *, names: bool = False, text: bool = False) -> Column | str:
        """A column, or why it cannot be held; to be asked for once.

        `names`: it may be one of names, some of which look like numbers; with `text` it is one of text, whatever it looks like.
        """
        cells = self._cells.pop(name)
        if text:
            cells.kinds.clear()
        return typed(cells, where, names=names or text)


def _fill(cells: Cells, rows: int) -> None:
    """Rows up to here had no such column."""
    while (lacking := rows - len(cells)) > 0:
        cells.extend([""] * min(lacking, 1 << 16))
