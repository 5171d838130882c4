"""Hides that rows are wanted in another order than the source has them: each split mixed in itself, as a seed decides, in memory that does not grow.

A source that gives rows by index is asked for them so.  Of any other all rows are written down once, in files beside the unfinished shards, and
picked from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import roots_of
from mmcompile.compiler.sources.rows import RowScan, RowSource, place_of
from mmcompile.compiler.sources.tablespool import Spool
from mmcompile.format.permutation import SHUFFLED, source_rows

__all__ = ["ShuffledRows", "row_number"]

Array = npt.NDArray[Any]

#: Bytes of rows that are written down at a time.
_BATCH_BYTES = 8 << 20


class ShuffledRows:
    """The rows of `source`, those of each split in a random order."""

    def __init__(self, source: RowSource, seed: int) -> None:
        self._source: RowSource | None = source
        self._order = f"{SHUFFLED}{seed}"
        self._scan: RowScan | None = None
        self._spool: Spool | None = None
        self.roots, self.root = roots_of(source), source.root
        #: Does the source make each row for itself?
        self.item_by_item = bool(getattr(source, "item_by_item", False))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._spool is None else {**self.__dict__, "_source": None, "roots": ()}

    def identity(self) -> dict[str, object]:
        """That of the source: the order is a setting of the build."""
        assert self._source is not None
        return self._source.identity()

    @property
    def versions(self) -> dict[str, str]:
        """Those of the source, unless its rows are written down."""
        return getattr(self._source, "versions", {})

    @property
    def here_only(self) -> str:
        """That of the source, unless its rows are written down."""
        return getattr(self._source, "here_only", "") if self._by_index else ""

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """List the rows."""
        assert self._source is not None
        self._scan = replace(self._source.scan(progress), order=self._order)
        return self._scan

    @property
    def aside_bytes(self) -> int:
        """Bytes of files that `prepare` writes."""
        if self._by_index:
            return 0
        return self._scanned.rows * sum(f.row_bytes for f in self._scanned.fields)

    def prepare(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Write rows down in `folder` where they cannot be had by index; `progress` gets how many are written.  Before the first `read`."""
        if not self._by_index:
            self._spool = Spool(self._scanned.fields, self._scanned.rows, self._batches(progress), str(folder))

    def _batches(self, progress: Callable[[int], None]) -> Iterator[dict[str, Array]]:
        scan, source = self._scanned, self._source
        assert source is not None
        size = max(1, _BATCH_BYTES // sum(f.row_bytes for f in scan.fields))
        for start in range(0, scan.rows, size):
            yield source.read(start, min(start + size, scan.rows))
            progress(min(start + size, scan.rows))

    def numbers(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Which rows of the source the rows [start, stop) are: int64 (stop - start,)."""
        return source_rows(self._order, self._scanned.ranges, np.arange(start, stop))

    def where(self, row: int) -> str:
        """A row of the source as a person finds it."""
        return f"row {row:,}" if self._source is None else place_of(self._source, row)

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop) of each field by name."""
        rows = self.numbers(start, stop)
        if self._spool is not None:
            return self._spool.take(rows)
        found: dict[str, Array] = cast(Any, self._source).take(rows)
        return found

    def lost(self) -> dict[str, int]:
        """What the rows that were read since it was last asked have lost, by words."""
        lost: dict[str, int] = getattr(self._source, "lost", dict)()
        return lost

    @property
    def _by_index(self) -> bool:
        return bool(getattr(self._source, "by_index", False))

    @property
    def _scanned(self) -> RowScan:
        assert self._scan is not None
        return self._scan


def row_number(source: RowSource, start: int, i: int) -> int:
    """Which row, as its user counts them, the row start + i of a source is."""
    return int(source.numbers(start + i, start + i + 1)[0]) if isinstance(source, ShuffledRows) else start + i
