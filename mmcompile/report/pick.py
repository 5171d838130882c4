"""Hides which rows a report shows: a few of each class, by a seed, without holding anything for each sample.

Which rows these are depends on (seed, row) and the labels alone, whatever the shards are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmcompile.format.streams import stream_keys

__all__ = ["Picker", "spread"]

Rows = npt.NDArray[np.int64]

#: Takes the place of an epoch, so that what is shown has nothing in common with any epoch's order.
_SHOWN = 0x73686F77


class Picker:
    """Of rows that are told piece by piece, up to `each` of every label: those whose hash is least."""

    def __init__(self, seed: int, each: int) -> None:
        self._seed, self._each = seed, each
        self._rows = np.empty(0, np.int64)
        self._labels = np.empty(0, np.int64)
        self._keys = np.empty(0, np.uint64)

    def add(self, rows: Rows, labels: Rows) -> None:
        """More rows (N,) and their labels (N,)."""
        rows, labels = np.append(self._rows, rows), np.append(self._labels, labels)
        keys = np.append(self._keys, stream_keys(self._seed, _SHOWN, rows[len(self._rows) :]))
        order = np.lexsort((keys, labels))
        kept = order[_places(labels[order])[1] < self._each]
        self._rows, self._labels, self._keys = rows[kept], labels[kept], keys[kept]

    def found(self, most: int) -> tuple[Rows, int]:
        """(rows, label by label and rising; how many of each label at most): as many of each as `most` rows in all allow, at least one.

        Where there are more labels than `most`, those are left out whose first row has the greatest hash.
        """
        first, place = _places(self._labels)
        if not len(first):
            return self._rows, self._each
        each = int(np.clip(most // len(first), 1, self._each))
        kept = first[np.sort(np.argsort(self._keys[first], kind="stable")[:most])]
        chosen = np.flatnonzero((place < each) & np.isin(self._labels, self._labels[kept]))
        return self._rows[chosen[np.lexsort((self._rows[chosen], self._labels[chosen]))]], each


def _places(labels: Rows) -> tuple[Rows, Rows]:
    """Of labels (N,) of which equal ones stand together: where each begins, and how many of its own stand before each of them (N,)."""
    first = np.flatnonzero(np.diff(labels, prepend=labels[:1] - 1))
    return first, np.arange(len(labels)) - np.repeat(first, np.diff(first, append=len(labels)))


def spread(start: int, stop: int, count: int, seed: int) -> Rows:
    """`count` of the rows [start, stop), all where they are not more: one out of each of so many equal parts, rising."""
    n = stop - start
    if n <= count:
        return np.arange(start, stop)
    edges = start + np.arange(count + 1) * n // count
    draws = stream_keys(seed, _SHOWN, edges[:-1]) % np.diff(edges).astype(np.uint64)
    return np.asarray(edges[:-1] + draws.astype(np.int64), np.int64)
