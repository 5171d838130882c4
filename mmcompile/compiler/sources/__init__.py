"""Where samples come from: one Protocol, one small module for each kind of source.

A source lists its items once, in the order in which rows will stand, and reads the bytes of one item when a worker asks for it.  It must
pickle (workers get a copy), hold no open file, and never write to what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.keys import Keys

__all__ = ["STAT_DTYPE", "Scan", "Source"]

#: What tells an unchanged file from a changed one; all -1 where the file could not be looked at.
STAT_DTYPE = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("inode", "<i8")])


@dataclass(frozen=True)
class Scan:
    """The ordered items of a source, as columns.

    `keys` are relative paths as raw bytes with `/`; `labels` are int64 (N,) class numbers, or None for a source without labels;
    `stat` is STAT_DTYPE (N,).  `left_out` counts what is no item, by reason; `warnings` are lines that a person should read;
    `counts` are facts for the summary.
    """

    keys: Keys
    labels: npt.NDArray[np.int64] | None
    stat: npt.NDArray[np.void]
    classes: tuple[str, ...] | None
    left_out: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


class Source(Protocol):
    """An ordered collection of samples that a build reads from."""

    @property
    def root(self) -> str:
        """The folder that OUT must not lie in, as an absolute path."""

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
