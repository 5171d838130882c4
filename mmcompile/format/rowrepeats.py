"""Hides how rows without keys that hold the same are found: by their stored bytes, all fields but the label, in memory that has a limit.

Rows are read twice at most: once for a hash of 64 bits of each, of a long row's middle alone; and where two of these are the same, once more for one
of 128 bits of all that such rows hold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.errors import CorruptShardError
from mmcompile.format.catalog import Generation
from mmcompile.format.fields import Field, Split
from mmcompile.format.leakage import MOST_GROUPS, Repeats, find_repeats
from mmcompile.format.npy import file_name, open_array, read_into
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pair_hash

__all__ = ["QUICK_BYTES", "repeated_rows"]

#: What is looked at in a moment.
QUICK_BYTES = 1 << 30
#: A row of one number says nothing when another is the same.
_LEAST_BYTES = 9
#: The middle of a row of a field is looked at first: one page of a file, or two.
_PART = 4096
#: Bytes held at a time.
_CHUNK = 8 << 20
#: Rows whose hashes are in memory at a time (of more, those of one part of all hashes after another): 256 MiB, and ten times that where all of them
#: repeat.  Of more rows than the last, that would take hours.
_HASHES, _MOST_ROWS = 1 << 25, 1 << 28
#: Rows of which all is hashed at a time.
_STATES = 1 << 12
#: Words of 8 bytes up to which numpy, which takes a word of all rows at a time, is faster than a call for each row.
_WORDS = 16
#: An odd number without a pattern: the golden ratio's digits.
_ODD = np.uint64(0x9E3779B97F4A7C15)

Array = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]


def repeated_rows(root: Path, generation: Generation, most_bytes: int | None = None) -> Repeats | None:
    """Rows that hold the same in all fields but the label, by their stored bytes.

    None where that is not looked for: rows of up to 8 bytes repeat by chance, for more than 2^28 rows it would take hours; and where more than
    `most_bytes` would have to be read.  Raises FormatError.
    """
    index = generation.index
    fields = [f for f in index.fields if f.meaning != "class"]
    looked = index.samples * sum(min(f.row_bytes, _PART) for f in fields)
    if sum(f.row_bytes for f in fields) < _LEAST_BYTES or index.samples > _MOST_ROWS or (most_bytes is not None and looked > most_bytes):
        return None
    rows = _Rows(root, generation, fields)
    parts = max(1, -(-index.samples // _HASHES))
    return _merged([found for part in range(parts) if (found := _repeats(rows, part, parts)) is not None])


def _repeats(rows: _Rows, part: int, parts: int) -> Repeats | None:
    """Repeats among the rows of one of so many parts of all hashes; None where there are none."""

    bits, wanted = np.uint64(parts), np.uint64(part)
    found = np.concatenate([hashes if parts == 1 else hashes[hashes % bits == wanted] for _, _, hashes in rows.looked_at()])
    found.sort()
    twice = np.unique(found[1:][found[1:] == found[:-1]])
    del found
    if not len(twice):
        return None
    places, pairs, labels = [], [], []
    for shard, first, hashes in rows.looked_at():
        at = np.searchsorted(twice, hashes)
        again = np.flatnonzero(twice[np.minimum(at, len(twice) - 1)] == hashes)
        if len(again):
            places.append(int(rows.starts[shard]) + first + again)
            pairs.append(rows.hashed(shard, first + again))
            labels.append(rows.labels(shard, first + again))
    which = np.concatenate(places)
    index, label = rows.generation.index, None if labels[0] is None else np.concatenate([label for label in labels if label is not None])
    edges = [(s.name, *np.searchsorted(which, [s.start, s.stop]).tolist()) for s in index.splits]
    reader = Reader(rows.root, generation=rows.generation.name)

    def called(at: int) -> bytes:
        """As `source` says it, with the split."""
        row = int(which[at])
        told = reader.origins.source(row)
        split = next(s.name for s in index.splits if row < s.stop)
        known = len(index.splits) < 2 or told.startswith((f"{split}/", f"{split}["))
        return os.fsencode(told if known else f"{split}/{told}" if not told.startswith("[") else split + told)

    try:
        return find_repeats(np.concatenate(pairs), [Split(*edge) for edge in edges], label, called)
    finally:
        reader.close()


def _merged(parts: list[Repeats]) -> Repeats:
    leaked: Counter[str] = Counter()
    for found in parts:
        leaked.update(found.leaked)
    examples = sorted((e for found in parts for e in found.examples), key=lambda e: (not e.leaked, not e.contradictory))
    total, contradictory = sum(found.duplicates for found in parts), sum(found.contradictory for found in parts)
    return Repeats(total, dict(leaked), contradictory, tuple(examples[:MOST_GROUPS]))


class _Rows:
    """The rows of a generation, to be read in the order in which they lie."""

    def __init__(self, root: Path, generation: Generation, fields: list[Field]) -> None:
        self.root, self.generation, self._fields = root, generation, fields
        self._label = next((f for f in generation.index.fields if f.meaning == "class"), None)
        self.starts = generation.starts

    def looked_at(self) -> Iterator[tuple[int, int, Hashes]]:
        """(shard, row of it, hashes of rows from there on), of the middles of long rows."""
        step = max(1, _CHUNK // sum(min(f.row_bytes, _PART) for f in self._fields))
        for shard in range(self.generation.index.shards):
            n = int(self.generation.table[shard]["rows"])
            for first in range(0, n, step):
                count = min(step, n - first)
                hashes: Hashes = np.zeros(count, np.uint64)
                for spec in self._fields:
                    _mix(hashes, self._part(spec, shard, first, count))
                yield shard, first, hashes

    def _part(self, spec: Field, shard: int, first: int, count: int) -> Array:
        """The bytes of rows, uint8 (N, bytes): the middle of long ones."""
        size = spec.row_bytes
        with _File(self.root, self.generation, spec, shard) as file:
            if size <= _PART:
                return file.read(first, count)
            out = np.empty((count, _PART), np.uint8)
            for i in range(count):
                file.into(out[i], (first + i) * size + (size - _PART) // 2)
            return out

    def hashed(self, shard: int, rows: npt.NDArray[np.int64]) -> Hashes:
        """The hashes (N, 2) of all that these rows of a shard, which rise, hold."""
        out: Hashes = np.empty((len(rows), 2), np.uint64)
        for begin in range(0, len(rows), _STATES):
            some = rows[begin : begin + _STATES].tolist()
            states = [xxhash.xxh3_128() for _ in some]
            for spec in self._fields:
                with _File(self.root, self.generation, spec, shard) as file:
                    span = some[-1] + 1 - some[0]
                    whole = file.read(some[0], span) if span * spec.row_bytes <= _CHUNK else None
                    for state, row in zip(states, some, strict=True):
                        data: Any = file.read(row, 1)[0] if whole is None else whole[row - some[0]]
                        state.update(data)
            out[begin : begin + len(some)] = [divmod(state.intdigest(), 1 << 64) for state in states]
        return out

    def labels(self, shard: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The labels (N,) of these rows of a shard, which rise."""
        if self._label is None:
            return None
        with _File(self.root, self.generation, self._label, shard) as file:
            first = int(rows[0])
            found: npt.NDArray[np.int64] = file.read(first, int(rows[-1]) + 1 - first).view("<i8")[rows - first, 0]
            return found


class _File:
    """The rows of a field in a shard."""

    def __init__(self, root: Path, generation: Generation, spec: Field, shard: int) -> None:
        self._path = root / "shards" / file_name(spec.name, pair_hash(generation.table[spec.name][shard]))
        self._size = spec.row_bytes
        shape = (int(generation.table["rows"][shard]), *spec.shape)
        try:
            self._fd, self._offset = open_array(self._path, spec.stored, shape)
        except FileNotFoundError:
            raise CorruptShardError(f"{self._path}: missing; run `mmcompile verify`, which says how to mend it", path=str(self._path)) from None

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def read(self, first: int, count: int) -> Array:
        """The bytes of rows, uint8 (N, bytes)."""
        out = np.empty((count, self._size), np.uint8)
        self.into(out, first * self._size)
        return out

    def into(self, out: Array, at: int) -> None:
        read_into(self._fd, out, self._offset + at, self._path)


def _mix(hashes: Hashes, data: Array) -> None:
    """Add the bytes of rows (N, bytes) to their hashes (N,)."""
    n, size = data.shape
    words = -(-size // 8)
    if words > _WORDS:
        view: Any = memoryview(data.reshape(-1))  # type: ignore[arg-type]
        digest = xxhash.xxh3_64_intdigest
        columns: Any = np.fromiter((digest(view[i : i + size]) for i in range(0, n * size, size)), np.uint64, n)[:, None]
    elif size % 8:
        padded = np.zeros((n, words * 8), np.uint8)
        padded[:, :size] = data
        columns = padded.view(np.uint64)
    else:
        columns = data.view(np.uint64)
    for word in columns.T:
        np.bitwise_xor(hashes, word, out=hashes)
        np.multiply(hashes, _ODD, out=hashes)
        np.bitwise_xor(hashes, hashes >> np.uint64(29), out=hashes)
        np.multiply(hashes, _ODD, out=hashes)
        np.bitwise_xor(hashes, hashes >> np.uint64(32), out=hashes)
