"""Hides which of a sample's variants is handed out: a function of (seed, epoch, row), by which any K epochs in a row show all K variants of each.

Where a sample's turn begins is a hash of (seed, row), and each epoch goes on by one.  All fields of a sample show the same variant.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmcompile.runtime.column import Column
from mmcompile.runtime.seeding import stream_keys
from mmcompile.runtime.selection import by_chance, whole

__all__ = ["Views", "warn_of_one_variant"]

Rows = npt.NDArray[np.int64]

#: Takes the place of an epoch, so that which variant is shown and how it is augmented have nothing in common.
_TURNS = 0x7669657773


@dataclass(frozen=True)
class Views:
    """The variants of a dataset: `count` of each sample, of which `fixed` is always shown where that is not None."""

    count: int
    fixed: int | None

    @classmethod
    def of_columns(cls, columns: Sequence[Column], fixed: Any, where: str) -> Views | None:
        """None where no column has variants.  Raises ValueError for a `fixed` one that there is not."""
        count = next((column.views for column in columns if column.views is not None), None)
        if count is None:
            if fixed is not None:
                raise ValueError(f"{where}: view={fixed!r}, and the fields {[column.name for column in columns]} have no variants; leave it out")
            return None
        return cls(count, None if fixed is None else whole("view", fixed, 0, count))

    def shown(self, seed: int, epoch: int, rows: Rows) -> Rows:
        """The variant of each row in an epoch: int64 (N,), in [0, count).

        `rows` are what stands for them where samples are drawn with replacement.
        """
        if self.fixed is not None:
            return np.full(len(rows), self.fixed, np.int64)
        begins = (stream_keys(seed, _TURNS, rows) % np.uint64(self.count)).astype(np.int64)
        return (begins + epoch % self.count) % self.count

    def asked(self, keys: Any, rows: Rows, epoch: int) -> tuple[Rows, bool]:
        """As `shown`, for the seed and epoch that each index carries, else seed 0 and this epoch; and whether nothing was left to the latter."""
        found, told = by_chance(keys, rows, epoch, self.shown)
        return found, told or self.fixed is not None

    def sample(self, columns: Sequence[Column], place: tuple[int, int, int], variant: int, own: bool) -> list[Any]:
        """The values of one sample, (row, shard, row in it), in memory of their own where `own`."""
        row, shard, local = place
        values = []
        for column in columns:
            at, near = (row, local) if column.views is None else (row * self.count + variant, local * self.count + variant)
            values.append(column.own(at) if own else column.sample(at, shard, near))
        return values


def warn_of_one_variant() -> None:
    """Tell whoever iterates, in one of all processes, that each epoch would show the same."""
    info = torch.utils.data.get_worker_info()
    if info is None or info.id == 0:
        warnings.warn(
            "samples have several variants, and nothing says which epoch it is: every epoch would show the same ones; use "
            "DataLoader(ds, sampler=ShardSampler(ds, ...)) or ShardLoader, call ds.set_epoch(epoch) before each epoch (which reaches no worker that "
            "is running already, as with persistent_workers=True), or say which one: MMapShardDataset(..., view=0)",
            UserWarning,
            stacklevel=4,
        )
