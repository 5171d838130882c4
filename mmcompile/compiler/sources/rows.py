"""Sources whose samples are rows of arrays, tables and Python datasets: no file of its own for a sample, so no key; rows are read as ranges.

A row source lists what there is once (RowScan), and a worker reads ranges of it.  Like any source it must pickle, holds no open file, and never
writes to what it reads.  What it reads is in the dtypes that its fields say; storing in another, and counting what that loses, is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from mmcompile.format.index import Field, Split

__all__ = ["RowScan", "RowSource", "is_row_source"]


@dataclass(frozen=True)
class RowScan:
    """The ordered rows of a source.

    `fields` say what a row holds, in the dtypes of the source (lists of names in them may be of any length); `classes` are the names of the numbers
    in a field that means a class.  `groups` are names and `stops`, int64 (G,), where the rows of each end: rows of one file, or of one symbol;
    shards end where a group ends as far as their size allows, windows never cross it, and no group crosses a split.  `splits` cover all rows in
    order; where there is none, all of them are one that is called "all".  `stamps`, one for each group, change when what its rows are read from
    changes ("": not known, so its rows are read again each time).  `warnings` are lines that a person should read; `counts` are facts for the
    summary, such as values that are missing.
    """

    rows: int
    fields: tuple[Field, ...]
    groups: tuple[str, ...]
    stops: npt.NDArray[np.int64]
    stamps: tuple[str, ...]
    splits: tuple[Split, ...] = ()
    classes: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[Split, ...]:
        """The splits, or the one that all rows are."""
        return self.splits or (Split("all", 0, self.rows),)


class RowSource(Protocol):
    """An ordered collection of rows that a build reads from."""

    @property
    def root(self) -> str:
        """The folder or file that OUT must not lie in, as an absolute path; "" where the rows lie in no folder."""

    def identity(self) -> dict[str, object]:
        """The settings of this source that decide which rows there are and what they hold (canonical JSON values; no path of this machine)."""

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """List the rows; `progress` gets the number found so far.  Raises SourceError, naming file, what was expected and what was found."""

    def read(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """The rows [start, stop) of each field by name, (stop - start, *shape) in the field's dtype (bfloat16 as uint16), C-contiguous or not.

        The caller asks for some MiB at a time, in rising order within one worker.  Raises OSError where it cannot be read now, SourceError, naming
        file and row, where what lies there is not what was listed.
        """


def is_row_source(source: object) -> TypeGuard[RowSource]:
    """Is this a source of rows, not one whose samples are files?"""
    return hasattr(source, "scan") and hasattr(source, "identity") and not hasattr(source, "stat")
