"""Hides how the items of a shard are shared out: large files first and alone, then pieces that grow smaller towards the end.

So workers have few calls to make, files to read ahead, and end at about the same time.  Pure; what a row holds never depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["cut_pieces"]

#: Bytes of sources in a piece: 2 MiB are some 60 ms of decoding, 16 MiB half a second.
_LEAST_BYTES, _MOST_BYTES = 2 << 20, 16 << 20
#: ... and at most so many items, of which tiny files have many.
_MOST_ITEMS = 256
#: A file of this size keeps a worker busy for a quarter of a second or more: last of all, it would do so while the others have nothing left.
_LARGE_BYTES = 8 << 20
#: Pieces for each worker into which what is left is cut at each moment.
_SHARES = 4


def cut_pieces(sizes: npt.NDArray[np.int64], workers: int) -> Iterator[list[int]]:
    """The items [0, N) of a shard in pieces, each item once; `sizes` (N,) are bytes to be decoded, below 0 where not known."""
    sizes = np.maximum(sizes, 0)
    large = np.flatnonzero(sizes >= _LARGE_BYTES)
    for item in large[np.argsort(-sizes[large], kind="stable")].tolist():
        yield [item]
    rest = np.flatnonzero(sizes < _LARGE_BYTES)
    left = int(sizes[rest].sum())
    part: list[int] = []
    held = 0
    for item, size in zip(rest.tolist(), sizes[rest].tolist(), strict=True):
        part.append(item)
        held += size
        if held >= min(_MOST_BYTES, max(_LEAST_BYTES, left // (_SHARES * workers))) or len(part) >= _MOST_ITEMS:
            yield part
            left -= held
            part, held = [], 0
    if part:
        yield part
