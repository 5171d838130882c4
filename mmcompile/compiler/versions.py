"""Hides how a person is told that library versions changed: what differs, and what to install to keep the rows that are there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.marks import versions_of
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.errors import BuildError

if TYPE_CHECKING:
    from mmcompile.compiler.previous import Stale

__all__ = ["versions_changed"]

#: What can be installed by its own name; all else comes inside Pillow.
_PACKAGES = frozenset({"nibabel", "pillow", "pillow_heif", "pydicom", "simplejpeg", "torch"})
_REVISION = "pixel revision"
_NONE = "none"


def versions_changed(out: Path, preprocess: Preprocess, now: dict[str, str], stale: list[Stale], place: npt.NDArray[Any]) -> BuildError:
    """The error of a build that would decode again the rows that stand at `place` (M,) in `stale` shards, only because of a version."""
    said: Counter[tuple[tuple[str, str, str], ...]] = Counter()
    for number, count in zip(*np.unique(place["shard"], return_counts=True), strict=True):
        old = stale[int(number)]
        formats = np.unique(old.shard.samples()["format"][place["row"][place["shard"] == number]])
        names = sorted({name for f in formats for name in versions_of(preprocess, f.decode("ascii"))})
        found = [(n, old.versions.get(n, _NONE), now.get(n, _NONE)) for n in names]
        found.append((_REVISION, str(old.revision), str(PIXEL_REVISION)))
        said[tuple(entry for entry in found if entry[1] != entry[2])] += int(count)
    differs = said.most_common(1)[0][0]
    pins = [f"{name}=={before}" for name, before, _ in differs if name in _PACKAGES and before != _NONE]
    if pins:
        remedy = f"`pip install {' '.join(pins)}` keeps their rows"
    elif any(name == _REVISION for name, *_ in differs):
        remedy = "the release of mmcompile that made them keeps their rows"
    else:
        remedy = (
            f"the build of Pillow {now.get('pillow', '')} that has {', '.join(f'{name} {before}' for name, before, _ in differs)} keeps their rows"
        )
    what = ", ".join(f"{name} {before} -> {after}" for name, before, after in differs)
    count = len(place)
    return BuildError(
        f"{out}: {count:,} image{'s' if count > 1 else ''} would be decoded again only because a version changed ({what}); nothing was decoded: "
        f"{remedy}, --redecode goes on",
        count=count,
        versions={name: [before, after] for name, before, after in differs},
        pins=pins,
        redecode=True,
    )
