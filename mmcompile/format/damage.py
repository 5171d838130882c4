"""Hides how damage is traced: from a bad file to the rows, or blocks of them, whose hash no longer fits, and from rows to their sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError
from mmcompile.format.catalog import Generation, open_regular
from mmcompile.format.npy import file_name, header, open_array, read_array, read_into
from mmcompile.format.samples import block_hashes, block_rows, check_stops, pair_hash, row_hashes, sample_dtype

__all__ = ["damaged_blocks", "damaged_rows", "key_stops", "records", "sources_of"]

Array = npt.NDArray[Any]

#: Bytes held at a time.
_CHUNK = 8 << 20


def records(root: Path, generation: Generation, shard: int) -> Iterator[tuple[int, Array]]:
    """(first row, provenance) of a shard piece by piece, rows counted from the shard's start.  Memory stays flat.  Raises FormatError."""
    dtype, rows = sample_dtype(generation.index.fields, generation.index.sha256), int(generation.table["rows"][shard])
    path = _path(root, generation, "samples", shard)
    try:
        fd, offset = open_array(path, dtype, (rows,))
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {root}`, which says how to mend it", path=str(path)) from None
    try:
        step = max(1, _CHUNK // dtype.itemsize)
        for start in range(0, rows, step):
            out = np.empty(min(step, rows - start), dtype)
            read_into(fd, out, offset + start * dtype.itemsize, path)
            yield start, out
    finally:
        os.close(fd)


def key_stops(root: Path, generation: Generation, shard: int) -> int:
    """The bytes of a shard's keys, after checking that the ends of keys never decrease.  Raises FormatError."""
    last = np.uint64(0)
    for _, piece in records(root, generation, shard):
        stops = piece["key_stop"]
        check_stops(stops, last, _path(root, generation, "samples", shard))
        last = stops[-1]
    return int(last)


def damaged_rows(root: Path, generation: Generation, shard: int) -> npt.NDArray[np.int64]:
    """The rows of a shard, counted from its start, whose stored bytes do not fit their row hash, or are not there.

    Believes the shard's samples file: check it first.  Headers are not looked at.  Raises FormatError where a file cannot be read at all.
    """
    bad: list[npt.NDArray[np.int64]] = []
    step = max(1, _CHUNK // generation.index.row_bytes)
    with _Stored(root, generation, shard) as stored:
        for first, piece in records(root, generation, shard):
            for start in range(0, len(piece), step):
                part = piece[start : start + step]
                arrays, there = stored.read(first + start, len(part))
                wrong = ~there | (row_hashes(arrays) != part["row_hash"])
                bad.append(np.flatnonzero(wrong) + (first + start))
    return np.concatenate(bad) if bad else np.empty(0, np.int64)


def damaged_blocks(root: Path, generation: Generation, shard: int) -> list[range]:
    """The rows of a shard without keys, counted from its start, of the blocks whose stored bytes do not fit their hash, or are not all there.

    Blocks that follow one another are one range.  Believes the shard's hashes file: check it first.  Raises as `damaged_rows`.
    """
    block, rows = block_rows(generation.index.fields), int(generation.table["rows"][shard])
    path = _path(root, generation, "hashes", shard)
    try:
        hashes = read_array(path, np.dtype("<u8"), (-(-rows // block),))
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing", path=str(path)) from None
    bad: list[range] = []
    with _Stored(root, generation, shard) as stored:
        for start, wanted in zip(range(0, rows, block), hashes.tolist(), strict=True):
            stop = min(start + block, rows)
            arrays, there = stored.read(start, stop - start)
            if there.all() and block_hashes(arrays, block).tolist() == [wanted]:
                continue
            if bad and bad[-1].stop == start:
                start = bad.pop().start
            bad.append(range(start, stop))
    return bad


class _Stored:
    """The rows of a shard as they lie in its files, which may have ended before."""

    def __init__(self, root: Path, generation: Generation, shard: int) -> None:
        self._root, self._shard, self._fields = root, shard, generation.index.fields
        rows = int(generation.table["rows"][shard])
        self._begin = [len(header(field.stored, (rows, *field.shape))) for field in self._fields]
        self._files: list[int] = []
        try:
            for field in self._fields:
                path = _path(root, generation, field.name, shard)
                try:
                    self._files.append(open_regular(path))
                except FileNotFoundError:
                    raise CorruptShardError(f"{path}: missing", path=str(path)) from None
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Stored:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def read(self, start: int, count: int) -> tuple[list[Array], npt.NDArray[np.bool_]]:
        """(the bytes of rows [start, start + count) of each field, (count, row_bytes); is the row there?).  Raises CorruptShardError."""
        there = np.ones(count, bool)
        arrays = []
        try:
            for field, fd, begin in zip(self._fields, self._files, self._begin, strict=True):
                data, got = _read_rows(fd, begin, field.row_bytes, start, count)
                there[got // field.row_bytes :] = False
                arrays.append(data)
        except OSError as error:
            raise CorruptShardError(f"{self._root}: shard {self._shard} cannot be read ({error.strerror})", path=str(self._root)) from error
        return arrays, there


def _read_rows(fd: int, offset: int, row_bytes: int, start: int, count: int) -> tuple[Array, int]:
    """(rows as bytes (count, row_bytes), zeros where the file has ended; bytes that were there)."""
    out = np.zeros((count, row_bytes), np.uint8)
    view, done = memoryview(cast(Any, out.reshape(-1))), 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + start * row_bytes + done)):
        done += got
    return out, done


def sources_of(root: Path, generation: Generation, shard: int, rows: list[int]) -> list[bytes]:
    """The source keys of rows, ascending and counted from the shard's start.  Believes the samples and keys files: check them first."""
    if not rows:
        return []
    wanted = np.asarray(rows, np.int64)
    ends = np.zeros((len(rows), 2), np.uint64)
    last = np.uint64(0)
    for first, piece in records(root, generation, shard):
        stops = np.concatenate([[last], piece["key_stop"]])
        here = (wanted >= first) & (wanted < first + len(piece))
        ends[here, 0], ends[here, 1] = stops[wanted[here] - first], stops[wanted[here] - first + 1]
        last = piece["key_stop"][-1]
    path = _path(root, generation, "keys", shard)
    try:
        fd, offset = open_array(path, np.dtype("u1"), (int(last),))
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing", path=str(path)) from None
    try:
        return [os.pread(fd, b - a, offset + a) for a, b in ends.tolist()]
    finally:
        os.close(fd)


def _path(root: Path, generation: Generation, kind: str, shard: int) -> Path:
    return root / "shards" / file_name(kind, pair_hash(generation.table[kind][shard]))
