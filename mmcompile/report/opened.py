"""Hides how a report reads a dataset: by rows of one split, the very rows that training reads.

Reads the rows that are asked for, and of all others nothing but labels.  Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import OptionError
from mmcompile.format.catalog import Generation
from mmcompile.format.index import Field, Split
from mmcompile.format.reader import Reader
from mmcompile.format.sampletable import ROWS_AT_ONCE, read_scalars
from mmcompile.format.store import is_url, on_disk

__all__ = ["Opened", "Sample"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: Variants of a sample that are shown.
_MOST_VARIANTS = 4


@dataclass(frozen=True)
class Sample:
    """One row: its number in the split, where it comes from, its label, and a dict of field -> values for each variant of it that is shown.

    Values lie as a sample does, (C, H, W) of an image, in units of what is stored (bfloat16 as its bits).
    """

    row: int
    source: str
    label: int | None
    variants: tuple[dict[str, Array], ...]


class Opened:
    """A dataset on a disk, or one split of it.  Raises NotADatasetError and other FormatErrors, OptionError for a split that there is not."""

    def __init__(self, root: str | Path, split: str | None = None) -> None:
        found = on_disk(root)
        if is_url(found):
            raise OptionError(f"{root}: a report reads rows from a disk; copy the dataset to one, and report on that", options=["out"])
        self.reader = Reader(found, engine="pread")  # maps would count whole pages around each row, and end in a signal where a file is cut
        self.root, self.index = self.reader.root, self.reader.index
        self.fields = tuple(self.reader.origins.field(f.name) for f in self.index.fields)
        self.classes = self.reader.classes or ()
        self.label = next((f for f in self.fields if f.meaning == "class"), None)
        names = [s.name for s in self.index.splits]
        if split is not None and split != "all" and split not in names:
            has = f"has {', '.join(names)}, or all" if names != ["all"] else "has no splits: leave --split out"
            raise OptionError(f"--split {split}: {root} {has}", options=["split"])
        self.split = next((s for s in self.index.splits if s.name == split), Split("all", 0, self.index.samples))

    def __len__(self) -> int:
        """The samples of the split."""
        return self.split.stop - self.split.start

    def close(self) -> None:
        self.reader.close()

    def whole(self, field: Field) -> Field:
        """A field as one variant of it is."""
        return field if field.views is None else replace(field, shape=field.shape[1:], views=None)

    def labels(self, split: Split | None = None) -> Iterator[tuple[Rows, Rows]]:
        """(rows of the split, or of another one, their labels) piece by piece; label -1 where there are none."""
        start, stop = (self.split.start, self.split.stop) if split is None else (split.start, split.stop)
        generation = Generation(self.reader.generation, self.index, self.reader.table, self.reader.starts)
        for shard in range(*self._shards(start, stop)):
            begin, end = (int(n) for n in self.reader.starts[shard : shard + 2])
            for first in range(max(begin, start), min(end, stop), ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, min(end, stop) - first)
                rows = np.arange(first, first + count)
                found = np.full(count, -1, np.int64)
                if self.label is not None:
                    found = read_scalars(Path(self.root), generation, shard, self.label, first - begin, count).astype(np.int64)
                yield rows - start, found

    def _shards(self, start: int, stop: int) -> tuple[int, int]:
        """The shards that have rows of [start, stop)."""
        if start >= stop:
            return 0, 0
        return self.reader.locate(start)[0], self.reader.locate(stop - 1)[0] + 1

    def column(self, field: Field, rows: Rows) -> Array:
        """Rows of the split of one field, (N, *shape) as they are stored."""
        return self.reader.gather(field.name, rows + self.split.start)

    def samples(self, rows: Rows) -> Iterator[Sample]:
        """These rows of the split, one at a time."""
        for row in rows.tolist():
            stored = {f.name: self.column(f, np.array([row]))[0] for f in self.fields}
            shown = min(_MOST_VARIANTS, max((f.views or 1 for f in self.fields), default=1))
            variants = tuple(
                {f.name: _laid_out(stored[f.name] if f.views is None else stored[f.name][k], f) for f in self.fields} for k in range(shown)
            )
            label = None if self.label is None else int(stored[self.label.name])
            yield Sample(row, self.reader.origins.source(row + self.split.start), label, variants)

    def class_name(self, label: int) -> str:
        """What a label is called."""
        return self.classes[label] if 0 <= label < len(self.classes) else f"label {label}" if label >= 0 else "no label"


def _laid_out(values: Array, field: Field) -> Array:
    return np.moveaxis(values, -1, -3) if field.layout == "hwc" else values
