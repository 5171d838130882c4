"""Hides how a build tells of boxes that are gone: those of which nothing is left in their picture, by what a source listed and what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmcompile.errors import MMCompileError
from mmcompile.format.fields import Field
from mmcompile.format.reader import Reader

__all__ = ["gone", "gone_of"]


def gone(lost: Mapping[str, int]) -> dict[str, int]:
    """The lines of a summary for so many boxes of each field; none where none is lost."""
    return {f"{name} of which nothing is left (of no area, outside of the picture, cut away), not stored": n for name, n in lost.items() if n}


def gone_of(
    out: Path, generation: str | None, listed: tuple[Field, ...], values: npt.NDArray[np.void], rejects: Iterable[int] | Mapping[int, object]
) -> dict[str, int]:
    """Those lines of the dataset `out`, of which a scan `listed` the fields with `values` (N,), without `rejects`.

    None of views, each of which shows a part, and of a dataset of which the shards are elsewhere.
    """
    lost: dict[str, int] = {}
    counted = [f for f in listed if f.meaning == "boxes" and f.count is not None]
    if not counted or generation is None:
        return {}
    stay = np.ones(len(values), bool)
    stay[list(rejects)] = False
    try:
        reader = Reader(out, generation=generation)
        known = {f.name: f for f in reader.index.fields}
        for spec in counted:
            count = str(spec.count)
            if known[count].views is None:
                stored = int(reader.gather(count, np.arange(int(stay.sum()))).sum())
                lost[spec.name] = int(values[count][stay].sum()) - stored
    except (MMCompileError, OSError):
        return {}
    return gone(lost)
