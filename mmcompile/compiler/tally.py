"""Hides how a build tells what geometry did: boxes of which nothing is left in their picture, and pictures that are smaller than the crop.

Both are told from the dataset as it was published, so that rows which were copied count as those do which were decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import Scan
from mmcompile.errors import MMCompileError
from mmcompile.format.fields import Field
from mmcompile.format.reader import Reader

__all__ = ["gone", "told_of"]

#: EXIF orientations that exchange width and height begin with this one.
_TURNED = 5


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


def smaller_of(out: Path, generation: str | None, preprocess: Preprocess) -> dict[str, int]:
    """The line of a summary for pictures of the dataset `out` that have black around them, as they are smaller than `--crop`; none where none is.

    Only a crop without a size before it can be larger than a picture.  None of volumes, and of a dataset of which the shards are elsewhere.
    """
    found, crop = preprocess.resolved(), preprocess.crop
    if crop is None or found.resize is not None or found.views is not None or len(found.sample_shape()) != 3 or generation is None:
        return {}
    height, width = (crop, crop) if isinstance(crop, int) else crop[-2:]
    smaller = 0
    try:
        reader = Reader(out, generation=generation)
        for shard in range(len(reader.table)):
            samples = reader.samples(shard)
            turned = (samples["orientation"] >= _TURNED) & (found.orientation == "apply")
            high, wide = (np.where(turned, samples[one], samples[other]) for one, other in (("width", "height"), ("height", "width")))
            smaller += int(((high < height) | (wide < width)).sum())
    except (MMCompileError, OSError):
        return {}
    return {f"images smaller than --crop {width if width == height else f'{height}x{width}'}, with black around them": smaller} if smaller else {}


def told_of(out: Path, generation: str | None, preprocess: Preprocess, scan: Scan, rejects: Iterable[int] | Mapping[int, object]) -> dict[str, int]:
    """All these lines of the dataset `out`, made of `scan` without `rejects`."""
    return {**gone_of(out, generation, scan.fields, scan.values, rejects), **smaller_of(out, generation, preprocess)}
