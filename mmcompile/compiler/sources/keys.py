"""Hides how millions of keys are held: their bytes in one array, and where each ends; there is no object for a key until it is asked for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Keys"]

#: Keys that are bytes objects at one time while all are walked.
_CHUNK = 1 << 14


class Keys(Sequence[bytes]):
    """A sequence of byte strings over `blob`, uint8 (B,), and `stops`, int64 (N,): key i is blob[stops[i - 1] : stops[i]], key 0 begins at `start`.

    Equal to any sequence of the same byte strings.  `keys[a:b]` is a view; the pickle of a view holds no more than the view.
    """

    __slots__ = ("_blob", "_start", "_stops")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, blob: npt.NDArray[np.uint8], stops: npt.NDArray[np.int64], start: int = 0) -> None:
        self._blob, self._stops, self._start = blob, stops, start

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> Keys:
        """The same keys in this form; what has it already is returned as it is."""
        if isinstance(keys, Keys):
            return keys
        blob, lengths, left = bytearray(), array("q"), iter(keys)
        while part := list(itertools.islice(left, _CHUNK)):
            blob += b"".join(part)
            lengths.extend(map(len, part))
        return cls(np.frombuffer(blob, np.uint8), np.cumsum(np.frombuffer(lengths, np.int64)))

    @classmethod
    def join(cls, parts: Sequence[Keys]) -> Keys:
        """All keys of all parts."""
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([0, *(len(part.blob) for part in parts)])
        stops = [part.stops + end for part, end in zip(parts, ends.tolist(), strict=False)]
        return cls(np.concatenate([np.empty(0, np.uint8), *(part.blob for part in parts)]), np.concatenate([np.empty(0, np.int64), *stops]))

    def take(self, rows: npt.NDArray[np.int64]) -> Keys:
        """The keys at `rows` (M,), in that order."""
        starts = np.concatenate([[0], self.stops[:-1]])[rows] if len(self) else np.empty(0, np.int64)
        lengths = self.stops[rows] - starts
        stops = np.cumsum(lengths)
        blob, source = np.empty(int(stops[-1]) if len(stops) else 0, np.uint8), self.blob
        for at in range(0, len(rows), _CHUNK):
            part = slice(at, at + _CHUNK)
            first = int(stops[at] - lengths[at])
            shift = np.repeat(starts[part] - (stops[part] - lengths[part]), lengths[part])
            blob[first : first + len(shift)] = source[np.arange(first, first + len(shift)) + shift]
        return Keys(blob, stops)

    @property
    def blob(self) -> npt.NDArray[np.uint8]:
        """The bytes of these keys alone: uint8 (B,), a view."""
        return self._blob[self._start : self._end(len(self))]

    @property
    def stops(self) -> npt.NDArray[np.int64]:
        """Where in `blob` each key ends: int64 (N,)."""
        return self._stops - self._start if self._start else self._stops

    def hashes(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of each key: uint64 (N,)."""
        return np.fromiter(map(xxhash.xxh3_64_intdigest, self), np.uint64, len(self))

    def __len__(self) -> int:
        return len(self._stops)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    def __getitem__(self, at: int | slice) -> bytes | Keys:
        if not isinstance(at, slice):
            at = range(len(self))[at]
            return self._blob[self._end(at) : self._stops[at]].tobytes()
        first, stop, step = at.indices(len(self))
        if step != 1:
            return Keys.of(self[i] for i in range(first, stop, step))
        return Keys(self._blob, self._stops[first : max(first, stop)], self._end(first))

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self), _CHUNK):
            part = self[at : at + _CHUNK]
            data = part.blob.tobytes()
            yield from (data[a:b] for a, b in itertools.pairwise([0, *part.stops.tolist()]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Keys):
            return np.array_equal(self.stops, other.stops) and np.array_equal(self.blob, other.blob)
        if isinstance(other, Sequence) and not isinstance(other, bytes | str):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return Keys, (self.blob.copy(), self.stops.copy())

    def __repr__(self) -> str:
        return f"Keys({[*self[:3]]!r:.200}{', …' if len(self) > 3 else ''}, {len(self):,} in all)"

    def _end(self, count: int) -> int:
        """Where in the whole blob the first `count` keys end."""
        return int(self._stops[count - 1]) if count else self._start
