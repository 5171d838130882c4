"""Hides where the answers to questions about a dataset lie: classes, sources, fields and statistics, of the rows that it has.

Nothing is read before it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from mmcompile.format.canonical import as_bytes, as_text
from mmcompile.format.index import Field
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pooled_statistics
from mmcompile.runtime.column import Column
from mmcompile.runtime.selection import Selection, integer

if TYPE_CHECKING:
    from mmcompile.runtime.windows import Windows

__all__ = ["Facts"]

Rows = npt.NDArray[np.int64]


class Facts(Dataset[Any]):
    """What a dataset tells of itself; the class that reads sets what it is told by."""

    _reader: Reader
    _rows: Selection
    _columns: list[Column]
    _windows: Windows | None
    _chosen: Rows | None
    _range: tuple[int, int]
    _split: str | None
    _image: int | None
    _targets: Rows | None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def root(self) -> Path | str:
        return self._reader.root

    @property
    def generation(self) -> str:
        """The generation that is open: 32 hex digits, the hash of its index."""
        return self._reader.generation

    @property
    def part(self) -> str | None:
        """Which part of the folder's rows these are, for a state to be told apart from one of another part; None for all of them in order."""
        part = self._rows.part(len(self._reader))
        return part if self._windows is None else self._windows.part(part, len(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an image before any transform: (C, H, W); of the first field where no image is read."""
        return self._columns[self._image or 0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an image before any transform; of the first field where no image is read."""
        return self._columns[self._image or 0].dtype

    @property
    def classes(self) -> list[str] | None:
        """The class names, a label's name at its number; None for a dataset without labels."""
        names = self._reader.classes
        return None if names is None else list(names)

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """Class name -> label; None for a dataset without labels."""
        names = self._reader.classes
        return None if names is None else {name: i for i, name in enumerate(names)}

    @property
    def targets(self) -> Rows | None:
        """The labels of all samples, int64 (N,), read-only, read in one go and kept; None without labels.  Of windows those that are a target."""
        if self._targets is None:
            name = next((f.name for f in self._reader.index.fields if f.meaning == "class"), None)
            offset = 0 if self._windows is None or name is None else self._windows.offset(self._columns, name)
            if name is None or offset is None:
                return None
            column = self._reader.column(name)
            if self._windows is None and self._chosen is None:
                targets = column[slice(*self._range)].copy()
            else:
                targets = column[self._rows.rows(np.arange(len(self), dtype=np.int64)) + offset]
            targets.flags.writeable = False
            self._targets = targets
        return self._targets.view()

    @property
    def fields(self) -> dict[str, Field]:
        """What is known of the fields in use, by name, in order: dtype and shape on disk, meaning, and of values `columns` and `categories`
        (`.listed` has the names), and `unit`, where they have them."""
        return {column.field: self._reader.origins.field(column.field) for column in self._columns}

    @property
    def stats(self) -> dict[str, tuple[float, ...]] | None:
        """{"mean": …, "std": …} of the split's pixels, a number for each channel, before normalisation (8 bit: of x / 255); None without any.

        Without an image: those of the first value in use, a number for each of its columns.
        """
        index = self._reader.index
        names = [f.name for f in index.fields if f.meaning == "image"] or [f.name for f in self.fields.values() if f.channels]
        return pooled_statistics(index, names[0], *self._range) if names else None

    def source(self, i: int) -> str:
        """The key of a sample: its source's path in RAW, as text by `os.fsdecode`; where keys are hashed, the hash of that.

        Of rows of arrays and tables, which have none: NAME[NUMBER], the group and the row's number in it.
        """
        return self._reader.origins.source(self._rows.row(integer(i)))

    def find(self, key: str | bytes, *, secret: bytes | None = None) -> int:
        """The number of the (first) sample made from this source.  The first call reads all keys; 16 bytes a row stay in memory.

        Where keys are hashed it takes a key or the path, hashed here; with `secret`, what the file of `--keys hash:FILE` holds.

        Raises KeyError; ValueError where rows have no keys, as those of arrays and tables, and without the right secret.
        """
        if not isinstance(key, str | bytes):
            raise TypeError(f"a source is asked for by its key, a str or bytes as source() gives it, not {type(key).__name__}")
        at = self._rows.find(self._reader.find(as_bytes(key), secret))
        if at < 0:
            raise KeyError(f"{self.root}: the sample of the source {as_text(key)!r} is in another split or subset")
        return at

    def __repr__(self) -> str:
        fields = ", ".join(f"{c.name} {str(c.dtype).removeprefix('torch.')} {c.shape}" for c in self._columns)
        names = self._reader.classes
        classes = "" if names is None else f", {len(names):,} classes"
        split = ("" if self._split is None else f", split={self._split!r}") + ("" if self._chosen is None else ", a subset")
        return f"{type(self).__name__}({str(self.root)!r}{split}): {len(self._rows):,} samples of {fields}{classes}; generation {self.generation}"
