"""Hides which files a part of an epoch needs, and asks for them before they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mmcompile.runtime.dataset import MMapShardDataset
    from mmcompile.runtime.selection import Selection

__all__ = ["Upcoming"]

Samples = npt.NDArray[np.int64]


class Upcoming:
    """The shards of a dataset whose files have to be brought here first."""

    def __init__(self, dataset: MMapShardDataset) -> None:
        self._reader, self._rows = dataset._reader, dataset._rows
        self._root = dataset.root
        self._fields = list({column.field: None for column in dataset._columns})
        self._reach = dataset._reach

    def want(self, samples: Samples) -> None:
        """The shards of these samples will be read, in this order."""
        first: list[int] = self._shards(self._rows, samples)
        rows = self._rows.rows(samples) + self._reach
        both = first if not self._reach else np.stack([first, self._reader.shards_of(rows)], 1).reshape(-1).tolist()
        self._reader.coming(self._fields, list(dict.fromkeys(both)))

    def bring(self, rows: Selection) -> int:
        """The shards of rising rows will be read, as many as there is room for: the number of rows in them."""
        starts = rows.blocks(self._reader.starts)
        shards = self._shards(rows, starts[:-1])
        count = self._reader.fitting([self._reader.shard_bytes(self._fields, shard) for shard in shards])
        self._reader.coming(self._fields, shards[:count])
        return int(starts[count])

    def check(self, blocks: Samples, count: int) -> None:
        """Raises ValueError where the cache has no room for `count` of the shards at once: each batch would bring them anew."""
        most = self._reader.most_bytes
        if most is None or len(blocks) < 2:
            return
        sizes = np.sort([self._reader.shard_bytes(self._fields, shard) for shard in self._shards(self._rows, blocks[:-1])])[::-1]
        sums = np.cumsum(sizes)
        need = int(sums[min(count, len(sums)) - 1])
        if need > most:
            fit = int(np.searchsorted(sums, most, side="right"))
            raise ValueError(
                f"{self._root}: the order reads {min(count, len(sums)):,} shards at a time, up to {need:,} bytes, and the cache may hold {most:,}: "
                f"give Cache max_bytes={2 * need} (twice as much, so that the next ones can come), or block_shards={max(1, fit // 2)}"
            )

    def _shards(self, rows: Selection, samples: Samples) -> list[int]:
        shards: list[int] = self._reader.shards_of(rows.rows(samples)).tolist()
        return shards
