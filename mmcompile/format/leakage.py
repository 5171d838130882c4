"""Hides how samples that were made from the same bytes are found: exact duplicates, samples that stand in two splits, and under two labels.

Pure but for the key of each sample that is named: hashes of sources in, counts and a few examples out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.fields import Split

__all__ = ["MOST_GROUPS", "Repeat", "Repeats", "find_repeats"]

#: Sources that are named where there are more, and the samples of each: what a person can look through.
MOST_GROUPS, _MOST_KEYS = 100, 10


@dataclass(frozen=True)
class Repeat:
    """One source that several samples were made from: the first `keys`, in order, and how many `samples`.

    `leaked`: they are not all in one split.  `contradictory`: they have not all one label.
    """

    keys: tuple[str, ...]
    samples: int
    leaked: bool
    contradictory: bool


@dataclass(frozen=True)
class Repeats:
    """What samples have in common with others, byte for byte.

    `duplicates`: samples whose source stands already for an earlier one.  `leaked`: split -> its samples whose source stands in a split before it,
    too.  `contradictory`: samples whose source stands under another label, too (no label is none).  `examples`: leaks first, then contradictions.
    """

    duplicates: int
    leaked: dict[str, int]
    contradictory: int
    examples: tuple[Repeat, ...]

    def to_json(self) -> dict[str, Any]:
        examples = [
            {"keys": [name_to_json(key) for key in e.keys], "samples": e.samples, "leaked": e.leaked, "contradictory": e.contradictory}
            for e in self.examples
        ]
        return {"duplicates": self.duplicates, "leaked": self.leaked, "contradictory": self.contradictory, "examples": examples}


def find_repeats(
    hashes: npt.NDArray[np.uint64],
    splits: Sequence[Split],
    labels: npt.NDArray[np.int64] | None,
    key_of: Callable[[int], bytes],
) -> Repeats:
    """Repeats among samples whose sources have these 128-bit hashes (N, 2); 0 is that of a source that is not known, and of no other.

    `splits` cover all N in order; `labels` (N,).  `key_of(row)` is called for what is named alone.  Takes about 32 bytes a sample, and more only
    for those that repeat.
    """
    order = np.argsort(hashes[:, 0])
    high = hashes[order, 0]
    again = high[1:] == high[:-1]
    rows = order[np.append(again, False) | np.insert(again, 0, False)] if len(order) else order
    del order, high, again
    rows = rows[hashes[rows].any(axis=1)]
    rows = rows[np.lexsort((rows, hashes[rows, 1], hashes[rows, 0]))]
    sizes = _runs(hashes[rows])
    keep = np.repeat(sizes > 1, sizes)  # half of a hash may be equal
    rows, sizes = rows[keep], sizes[sizes > 1]
    if not len(rows):
        return Repeats(0, {}, 0, ())
    starts = np.cumsum(sizes) - sizes
    split = np.searchsorted(np.array([s.stop for s in splits]), rows, side="right")
    first = np.minimum.reduceat(split, starts)
    late = split[split > np.repeat(first, sizes)]
    leaked = np.maximum.reduceat(split, starts) > first
    contradictory = np.zeros(len(starts), bool)
    if labels is not None:
        mine = labels[rows]
        most, none = np.maximum.reduceat(mine, starts), np.iinfo(np.int64).max
        contradictory = (most >= 0) & (np.minimum.reduceat(np.where(mine < 0, none, mine), starts) < most)
    shown = np.lexsort((rows[starts], ~contradictory, ~leaked))[:MOST_GROUPS].tolist()
    examples = []
    for group in shown:
        named = rows[starts[group] : starts[group] + min(int(sizes[group]), _MOST_KEYS)].tolist()
        keys = tuple(as_text(key_of(row)) for row in named)
        examples.append(Repeat(keys, int(sizes[group]), bool(leaked[group]), bool(contradictory[group])))
    counts = np.bincount(late, minlength=len(splits)).tolist()
    return Repeats(
        int(sizes.sum() - len(sizes)),
        {s.name: n for s, n in zip(splits, counts, strict=True) if n},
        int(sizes[contradictory].sum()),
        tuple(examples),
    )


def _runs(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The length of each run of equal hashes (N, 2)."""
    if not len(hashes):
        return np.empty(0, np.int64)
    return np.diff(np.flatnonzero(np.append(True, (hashes[1:] != hashes[:-1]).any(axis=1))), append=len(hashes))
