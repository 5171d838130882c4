"""Hides why `--normalize auto` has no statistics of a field of numbers: which of them is none, where it lies, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.rowstore import StoredField, wide
from mmcompile.compiler.rowtask import RowSeal
from mmcompile.compiler.sources.rows import RowSource, place_of
from mmcompile.compiler.sources.shuffled import row_number
from mmcompile.compiler.sources.splits import train_of
from mmcompile.errors import BuildError
from mmcompile.format.fields import Split
from mmcompile.format.npy import file_name, open_array, read_into
from mmcompile.format.samples import combine_statistics

__all__ = ["refuse_undefined"]

#: Bytes looked at, at a time.
_CHUNK = 8 << 20


def refuse_undefined(
    out: Path,
    source: RowSource,
    fields: Sequence[StoredField],
    splits: Sequence[Split],
    seals: Sequence[RowSeal],
    brought: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> None:
    """Raises BuildError for a field that is to be normalised by its own statistics, where these do not serve; `seals` are all shards in order.

    Only a shard that holds a number which is none is looked at, piece by piece; `brought` has its file at hand where that lies at a URL.
    """
    for spec in fields:
        if not spec.auto or spec.source.meaning == "image":
            continue
        split, name = train_of(splits), spec.stored.name
        starts = np.cumsum([0, *(seal.rows for seal in seals)]).tolist()
        within = [(seal, start) for seal, start in zip(seals, starts, strict=False) if split.start <= start < split.stop]
        found = combine_statistics([seal.sums[name] for seal, _ in within], False)
        where = f"{out}: --normalize auto: "
        others = "" if spec.source.columns is None else "leave that column out with --columns, "
        if found is not None and (low := np.asarray(found["std"])).min() <= 0:
            at = int(low.argmin())
            raise BuildError(
                f"{where}{spec.named((at,))} is the same in all rows{'' if len(splits) < 2 else f' of {split.name}'}, so there is nothing to divide "
                f"by: {others}{'or ' if others else ''}give --mean and --std",
                field=name,
            )
        if found is None:
            for seal, start in within:
                remedy = f"fill it in, leave such rows out, {others}or give --mean and --std"
                if all(total is not None for entry in seal.sums[name] for total in entry["sum"]):
                    continue
                path = out / "shards" / file_name(name, seal.files[name])
                with nullcontext() if brought is None else brought(path):
                    _refuse_in(path, spec, seal, start, source, where, remedy)
            raise BuildError(f"{where}the squares of {name} add up to more than a float holds: scale it down, or give --mean and --std", field=name)


def _refuse_in(path: Path, spec: StoredField, seal: RowSeal, start: int, source: RowSource, where: str, remedy: str) -> None:
    """Raises BuildError for the first number of a shard's file that is none; `start` is its first row."""
    stored, name = spec.stored, spec.stored.name
    fd, offset = open_array(path, stored.stored, (seal.rows, *stored.shape))
    try:
        step = max(1, _CHUNK // stored.row_bytes)
        for first in range(0, seal.rows, step):
            values: npt.NDArray[np.generic] = np.empty((min(step, seal.rows - first), *stored.shape), stored.stored)
            read_into(fd, values, offset + first * stored.row_bytes, path)
            numbers = wide(values, stored.dtype)
            bad = np.argwhere(~np.isfinite(numbers))
            if len(bad):
                at = tuple(bad[0].tolist())
                row = row_number(source, start + first, at[0])
                raise BuildError(
                    f"{where}{place_of(source, row)}: {spec.named(at[1:])} is {numbers[at]}, and a mean needs numbers: {remedy}", row=row, field=name
                )
    finally:
        os.close(fd)
