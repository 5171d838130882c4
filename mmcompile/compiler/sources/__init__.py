"""Where samples come from: one Protocol, one small module for each kind of source.

A source lists its items once, in the order in which rows will stand, and reads the bytes of one item when a worker asks for it.  It must
pickle (workers get a copy), hold no open file, and never write to what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.spatial import Form
from mmcompile.format.index import Field, Split, row_dtype

__all__ = ["LABEL", "STAT_DTYPE", "Lent", "Scan", "Source", "labelled", "roots_of"]

#: What tells an unchanged file from a changed one; all -1 where the file could not be looked at.
STAT_DTYPE = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("inode", "<i8")])
#: The number of a sample's class, where a source has classes.
LABEL = Field("label", "int64", (), "class")


@dataclass(frozen=True)
class Lent:
    """That all items of a scan stand in datasets already: their rows are copied, never decoded.

    `hashes` (N, 2): of the content of each item's source.  `datasets`: (folder, generation) of each.  `versions`, `revision`: of the libraries that
    made the rows, and of our own pixels then: those of the new dataset, whatever is installed today.  `sha256`: all rows have that of their source.
    `keys`: what the settings of the dataset say of how its keys were hashed; None where they are names, or of several datasets.
    `nameless`: some keys are hashes, which have no extension.
    """

    hashes: npt.NDArray[np.uint64]
    datasets: tuple[tuple[str, str], ...]
    versions: dict[str, str]
    revision: int
    sha256: bool = False
    keys: str | None = None
    nameless: bool = False


@dataclass(frozen=True)
class Scan:
    """The ordered items of a source, as columns.

    `keys` are relative paths as raw bytes with `/`, all different; `values` (N,) are what a sample holds beside its image, records of `fields` (see
    `row_dtype`; lists of names in these may be of any length); `stat` is STAT_DTYPE (N,).  `classes` are the names of the numbers in LABEL.
    `left_out` counts what is no item, by reason; `warnings` are lines that a person should read; `counts` are facts for the summary.  `splits` cover
    all items in order; where there is none, all of them are one that is called "all".  `lent` where items are rows of datasets.

    `parts` are the pixel fields that an item is decoded to, (name, kind) each, as many as it has files (see `Keys.beside`); the kinds are those of
    FieldOptions.  `forms` say of boxes and keypoints in `values` how they are written there.  `faults` are items with a value that does not fit, and
    what is wrong with it (value and field): each is a reject.
    """

    keys: Keys
    fields: tuple[Field, ...]
    values: npt.NDArray[np.void]
    stat: npt.NDArray[np.void]
    classes: tuple[str, ...] | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()
    lent: Lent | None = None
    parts: tuple[tuple[str, str], ...] = (("image", "image"),)
    forms: tuple[tuple[str, Form], ...] = ()
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """The class numbers, int64 (N,); None for a source without classes."""
        return self.values[LABEL.name] if LABEL in self.fields else None

    @property
    def beside(self) -> tuple[str, ...] | None:
        """The names of what a sample holds beside its pixels; None of rows of datasets, whose settings speak of fields that may be left out, too."""
        return None if self.lent is not None else tuple(dict.fromkeys([*(spec.name for spec in self.fields), *(name for name, _ in self.forms)]))

    @property
    def ranges(self) -> tuple[Split, ...]:
        """The splits, or the one that all items are."""
        return self.splits or (Split("all", 0, len(self.keys)),)


def labelled(labels: npt.NDArray[np.int64] | None, n: int) -> tuple[tuple[Field, ...], npt.NDArray[np.void]]:
    """(fields, values) of N items with these class numbers (N,), or with nothing beside their images."""
    fields = () if labels is None else (LABEL,)
    values: npt.NDArray[np.void] = np.zeros(n, row_dtype(fields))
    if labels is not None:
        values[LABEL.name] = labels
    return fields, values


class Source(Protocol):
    """An ordered collection of samples that a build reads from."""

    @property
    def root(self) -> str:
        """The folder that OUT must not lie in, as an absolute path; a source of several has them as `roots`."""

    def identity(self) -> dict[str, object]:
        """The settings of this source that decide which samples there are (canonical JSON values; no path of this machine)."""

    @property
    def parallel(self) -> int:
        """How many reads at a time pay, in one process."""

    def location(self) -> str:
        """Tells one RAW from another on this machine (device and inode of its folder): the stat cache belongs to one location."""

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items.  Raises SourceError when there is nothing to build, or the source cannot be listed."""

    def read(self, key: bytes) -> bytes:
        """The bytes of one item, in one read; several threads may read at once.  Raises OSError when it cannot be read."""

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of one item now, following links.  Raises OSError."""


def roots_of(source: Any) -> tuple[str, ...]:
    """All that OUT must not lie in."""
    return getattr(source, "roots", (source.root,))
