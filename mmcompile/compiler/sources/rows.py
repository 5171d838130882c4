"""Sources whose samples are rows of arrays, tables and Python datasets: no file of its own for a sample, so no key; rows are read as ranges.

A row source lists what there is once (RowScan), and a worker reads ranges of it.  Like any source it must pickle, holds no open file, and never
writes to what it reads.  What it reads is in the dtypes that its fields say; storing in another, and counting what that loses, is not its business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from mmcompile.format.canonical import canonical
from mmcompile.format.index import Field, Split
from mmcompile.format.npy import hash_bytes
from mmcompile.format.permutation import SHUFFLED

__all__ = ["RowScan", "RowSource", "fresh_stamp", "is_row_source", "place_of", "settled"]

#: A file that changed less long ago may change again without a sign: clocks of file systems tick every some ms, on FAT every 2 s.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class RowScan:
    """The ordered rows of a source.

    `fields` say what a row holds, in the dtypes of the source (lists of names in them may be of any length); `classes` are the names of the numbers
    in a field that means a class.  `groups` are names and `stops`, int64 (G,), where the rows of each end: rows of one file, or of one symbol;
    shards end where a group ends as far as their size allows, windows never cross it, and no group crosses a split.  `splits` cover all rows in
    order; where there is none, all of them are one that is called "all".  `stamps`, one for each group, change when what its rows are read from
    changes ("": not known, so its rows are read again each time).  `warnings` are lines that a person should read; `counts` are facts for the
    summary, such as values that are missing.  `order` is what the index says of it (see `permutation`): of SHUFFLED rows the groups are told in the
    order of the source.
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
    order: str = ""

    @property
    def ranges(self) -> tuple[Split, ...]:
        """The splits, or the one that all rows are."""
        return self.splits or (Split("all", 0, self.rows),)

    @property
    def lots(self) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        """(ends, int64 (L,); stamps) of what shards are cut along, and read anew if it changed: groups, or splits where their rows are SHUFFLED."""
        if not self.order.startswith(SHUFFLED):
            return self.stops, self.stamps
        stamps = []
        for split in self.ranges:
            within = slice(*np.searchsorted(self.stops, [split.start, split.stop], side="right").tolist())
            parts = [[stamp, int(stop) - split.start] for stamp, stop in zip(self.stamps[within], self.stops[within], strict=True)]
            stamps.append(hash_bytes(canonical(parts)) if all(stamp for stamp, _ in parts) else "")
        return np.array([split.stop for split in self.ranges], np.int64), tuple(stamps)


def settled(stat: tuple[int, int, int, int]) -> bool:
    """Was a file (size, mtime_ns, ctime_ns, inode) touched so long ago that another change would show?"""
    return time.time_ns() - max(stat[1], stat[2]) >= _SETTLED_NS


def fresh_stamp(files: dict[str, tuple[int, int, int, int]]) -> str:
    """The stamp of rows that are read from these files, by what `stat` said of each: size, mtime_ns, ctime_ns, inode.

    "" where one was touched so short a time ago that another change may leave it as it is.
    """
    if not all(settled(stat) for stat in files.values()):
        return ""
    return hash_bytes(canonical([list(files[path]) for path in sorted(files)]))


class RowSource(Protocol):
    """An ordered collection of rows that a build reads from.

    One that has an attribute `item_by_item` which is true makes each row for itself, and is asked for fewer at a time.  One whose `by_index` is true
    once it was scanned has a method `take(rows)`, which is `read` for the rows (M,) in any order, at a cost that is about that of as many in a row.
    One with an attribute `here_only` that is not empty says in it why no other machine can read its rows, and one with `versions` which
    libraries they depend on.  One with a method `where` says of a row, in words, where a person
    finds it; one with a method `lost` says, by words for the summary, how much the rows that were read since it was last asked have lost.
    """

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


def place_of(source: RowSource, row: int) -> str:
    """Where a person finds a row: in which file, where the source knows it."""
    where: Callable[[int], str] | None = getattr(source, "where", None)
    return f"row {row:,}" if where is None else where(row)
