"""Tables of numbers as a source: CSV and Parquet files whose rows are samples, in groups that no window crosses.

Rows keep the order that they have in their file, and files are groups, unless told otherwise; where time goes back in what should be one series, that
is refused, with what to say.  Nothing is dropped, filled or narrowed without a word.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.contents import PARQUETS
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.compiler.sources.tablearrow import ArrowPart
from mmcompile.compiler.sources.tablefiles import by_key, list_tables
from mmcompile.compiler.sources.tablelabel import as_classes
from mmcompile.compiler.sources.tableorder import in_parts
from mmcompile.compiler.sources.tablescan import TablePart, TableScan, TableWishes
from mmcompile.compiler.sources.tablespool import Spool
from mmcompile.compiler.sources.tabletext import TextPart
from mmcompile.errors import SourceError
from mmcompile.format.canonical import name_to_json

__all__ = ["TableSource", "TableWishes"]

Array = npt.NDArray[Any]


class TableSource:
    """The tables of `raw`: files, or folders of them."""

    def __init__(self, raw: Sequence[str], wishes: TableWishes | None = None) -> None:
        self._raw, self._wishes = tuple(os.path.abspath(place) for place in raw), wishes or TableWishes()
        self._parts: list[TablePart] = []
        self._stats: list[tuple[int, int, int, int]] = []
        self._scan: TableScan | None = None
        self._spool: Spool | None = None
        self._open = 0

    @property
    def root(self) -> str:
        """The file, or the folder that all tables lie in."""
        return self._raw[0] if len(self._raw) == 1 else os.path.commonpath(self._raw)

    def identity(self) -> dict[str, object]:
        """The settings that decide which rows there are and what they hold."""
        wishes = self._wishes
        told = {"group_by": wishes.group_by, "order_by": wishes.order_by, "split_by": wishes.split_by, "label_column": wishes.label}
        columns = {} if wishes.columns is None else {"columns": name_to_json(_typed(wishes.columns))}
        return {"kind": "table", **columns, **{name: name_to_json(value) for name, value in told.items() if value is not None}}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """Look at all tables once.  Raises SourceError, naming file and row; OptionError for columns that are not there."""
        files, left_out = list_tables(self._raw)
        if self._wishes.group_by is not None:
            files = by_key(files, self._wishes.group_by)
        self._stats = [_stat(file.path) for file in files]
        self._parts = [ArrowPart(f.path) if f.path.lower().endswith(PARQUETS) else TextPart(f.path) for f in files]
        self._spool, self._open = None, 0
        self._scan = TableScan(files, self._parts, self._wishes, show(self.root))
        found = self._scan.run(self._stats, progress or (lambda _: None))
        found.counts.update({f"left out ({extension})": n for extension, n in sorted(left_out.items())})
        return found

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop) of each field by name.  Raises SourceError where a file changed since it was listed."""
        scan = self._scanned()
        if scan.order is not None or self._spool is not None:
            return _joined([self._sorted().read(a, b) for a, b in scan.ranges.within(start, stop)])
        found = []
        for a, b in scan.ranges.within(start, stop):
            for part, first, last in in_parts(scan.starts, a, b):
                self._refuse_changed(part)
                if self._open != part:  # one file is open, and decoded, at a time
                    self._parts[self._open].close()
                    self._open = part
                found.append(self._fields(self._parts[part].read(self._readings, first, last)))
        return _joined(found)

    @property
    def by_index(self) -> bool:
        """Are rows sorted into files aside?"""
        return self._scanned().order is not None or self._spool is not None

    @property
    def here_only(self) -> str:
        """Why no other machine can read the rows."""
        return "its rows are sorted into files of this machine first" if self.by_index else ""

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, Array]:
        """These rows (M,) of each field by name."""
        return self._sorted().take(self._scanned().ranges.places(rows))

    def where(self, row: int) -> str:
        """A row as a person finds it; of rows that were sorted aside, which of them it is."""
        scan = self._scanned()
        if scan.order is not None:
            return scan.where(int(scan.order[row]))
        if self._spool is not None:
            return f"row {row + 1:,} of {show(self.root)} in their order"
        return scan.where(next(scan.ranges.within(row, row + 1))[0])

    def __getstate__(self) -> dict[str, Any]:
        scan = self._scanned()
        if scan.order is not None:
            self._sorted()
        return dict(self.__dict__)

    # ------------------------------------------------------------------ inside

    def _scanned(self) -> TableScan:
        if self._scan is None:
            self.scan()
        assert self._scan is not None
        return self._scan

    @property
    def _readings(self) -> list[Any]:
        return [reading for readings in self._scanned().layout.columns for reading in readings]

    def _fields(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Columns, in the order of all fields, as the fields that they are."""
        out, at = {}, 0
        layout = self._scanned().layout
        for spec, readings in zip(layout.fields, layout.columns, strict=True):
            if spec.shape:
                values = np.empty((len(arrays[at]), *spec.shape), spec.stored)
                for i in range(len(readings)):
                    values[:, i] = arrays[at + i]
                out[spec.name] = values
            elif spec.meaning == "class":
                out[spec.name] = as_classes(arrays[at], readings[0])
            else:
                out[spec.name] = arrays[at].astype(spec.stored, copy=False)
            at += len(readings)
        return out

    def _sorted(self) -> Spool:
        """The rows in their order, in files aside; made when they are first wanted."""
        scan = self._scanned()
        if self._spool is None:
            assert scan.order is not None
            self._spool = Spool(scan.layout.fields, scan.order, self._batches())
            scan.order = None
        return self._spool

    def _batches(self) -> Iterator[dict[str, Array]]:
        for i, part in enumerate(self._parts):
            self._refuse_changed(i)
            for arrays in part.stream(self._readings):
                yield self._fields(arrays)
            part.close()

    def _refuse_changed(self, part: int) -> None:
        path = self._parts[part].path
        if _stat(path) != self._stats[part]:
            raise SourceError(f"{show(path)}: changed while it was read: run the same command again", path=path)


def _joined(found: list[dict[str, Array]]) -> dict[str, Array]:
    return found[0] if len(found) == 1 else {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _typed(columns: Sequence[str]) -> str:
    """Names of columns as one would type them."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(columns)
    return text.getvalue()
