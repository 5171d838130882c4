"""Hides how millions of keys are held: their bytes in one array, and where each ends; there is no object for a key until it is asked for."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Keys", "Placed", "place_of"]

#: Keys that are bytes objects at one time while all are walked.
_CHUNK = 1 << 14


class Placed(bytes):
    """A key that knows where its item lies: in a source whose items are no files, three numbers that mean what that source says; and, of an item of
    several files, `beside`, the keys of the others.

    Equal to the key without them; it pickles with them, so that a worker need not look for the item.
    """

    place: tuple[int, int, int] | None = None
    beside: tuple[bytes, ...] = ()

    @classmethod
    def at(cls, key: bytes, place: tuple[int, int, int] | None, beside: tuple[bytes, ...] = ()) -> Placed:
        made = cls(key)
        made.place, made.beside = place, beside
        return made


def place_of(key: bytes) -> tuple[int, int, int]:
    """Where the item of a key of `Keys` with places lies.  Raises LookupError for a bare key."""
    place = key.place if isinstance(key, Placed) else None
    if place is None:
        raise LookupError(f"{key[:80]!r}: where it lies is not known")
    return place


class Keys(Sequence[bytes]):
    """A sequence of byte strings over `blob`, uint8 (B,), and `stops`, int64 (N,): key i is blob[stops[i - 1] : stops[i]], key 0 begins at `start`.

    Equal to any sequence of the same byte strings.  `keys[a:b]` is a view; the pickle of a view holds no more than the view.  With `places`, int64
    (N, 3), or `beside`, as many Keys of N as an item has further files, each key is a Placed; lists that are made of keys lose them.
    """

    __slots__ = ("_blob", "_start", "_stops", "beside", "places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        blob: npt.NDArray[np.uint8],
        stops: npt.NDArray[np.int64],
        start: int = 0,
        places: npt.NDArray[np.int64] | None = None,
        beside: tuple[Keys, ...] = (),
    ) -> None:
        self._blob, self._stops, self._start, self.places, self.beside = blob, stops, start, places, beside

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
        blob = np.concatenate([np.empty(0, np.uint8), *(part.blob for part in parts)])
        places = [part.places for part in parts if part.places is not None]
        if places and len(places) < len(parts):
            raise ValueError("keys with places and keys without")
        beside = tuple(cls.join(same) for same in zip(*(part.beside for part in parts), strict=True))
        return cls(blob, np.concatenate([np.empty(0, np.int64), *stops]), places=np.concatenate(places) if places else None, beside=beside)

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
        return Keys(blob, stops, 0, None if self.places is None else self.places[rows], tuple(keys.take(rows) for keys in self.beside))

    def with_beside(self, beside: Sequence[Keys]) -> Keys:
        """The same keys, of items with these further files."""
        return Keys(self._blob, self._stops, self._start, self.places, tuple(beside))

    @property
    def blob(self) -> npt.NDArray[np.uint8]:
        """The bytes of these keys alone: uint8 (B,), a view."""
        return self._blob[self._start : self._end(len(self))]

    @property
    def bare(self) -> Keys:
        """The same keys as bytes alone."""
        return self if self.places is None and not self.beside else Keys(self._blob, self._stops, self._start)

    @property
    def stops(self) -> npt.NDArray[np.int64]:
        """Where in `blob` each key ends: int64 (N,)."""
        return self._stops - self._start if self._start else self._stops

    def hashes(self, seed: int = 0) -> npt.NDArray[np.uint64]:
        """xxh3-64 of each key: uint64 (N,)."""
        return np.fromiter(map(functools.partial(xxhash.xxh3_64_intdigest, seed=seed), self.bare), np.uint64, len(self))

    def __len__(self) -> int:
        return len(self._stops)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    def __getitem__(self, at: int | slice) -> bytes | Keys:
        if not isinstance(at, slice):
            at = range(len(self))[at]
            key = self._blob[self._end(at) : self._stops[at]].tobytes()
            if self.places is None and not self.beside:
                return key
            place = None if self.places is None else _place(self.places[at].tolist())
            return Placed.at(key, place, tuple(keys[at] for keys in self.beside))
        first, stop, step = at.indices(len(self))
        if step != 1:
            return self.take(np.arange(first, stop, step))
        stop = max(first, stop)
        places = None if self.places is None else self.places[first:stop]
        return Keys(self._blob, self._stops[first:stop], self._end(first), places, tuple(keys[first:stop] for keys in self.beside))

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self), _CHUNK):
            part = self[at : at + _CHUNK]
            data = part.blob.tobytes()
            keys = (data[a:b] for a, b in itertools.pairwise([0, *part.stops.tolist()]))
            if part.places is None and not part.beside:
                yield from keys
                continue
            places = itertools.repeat(None, len(part)) if part.places is None else map(_place, part.places.tolist())
            beside = zip(*part.beside, strict=True) if part.beside else itertools.repeat((), len(part))
            yield from map(Placed.at, keys, places, beside)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Keys):
            return np.array_equal(self.stops, other.stops) and np.array_equal(self.blob, other.blob)
        if isinstance(other, Sequence) and not isinstance(other, bytes | str):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return Keys, (self.blob.copy(), self.stops.copy(), 0, None if self.places is None else self.places.copy(), self.beside)

    def __repr__(self) -> str:
        return f"Keys({[*self[:3]]!r:.200}{', …' if len(self) > 3 else ''}, {len(self):,} in all)"

    def _end(self, count: int) -> int:
        """Where in the whole blob the first `count` keys end."""
        return int(self._stops[count - 1]) if count else self._start


def _place(numbers: list[int]) -> tuple[int, int, int]:
    return numbers[0], numbers[1], numbers[2]
