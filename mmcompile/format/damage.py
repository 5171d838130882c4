"""Hides how damage is traced: from a bad file to the rows whose hash no longer fits, and from rows to the sources they came from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError
from mmcompile.format.catalog import Generation, open_regular
from mmcompile.format.npy import file_name, header, open_array, read_into
from mmcompile.format.samples import check_stops, pair_hash, row_hashes, sample_dtype

__all__ = ["damaged_rows", "key_stops", "records", "sources_of"]

Array = npt.NDArray[Any]

#: Bytes held at a time.
_CHUNK = 8 << 20


def records(root: Path, generation: Generation, shard: int) -> Iterator[tuple[int, Array]]:
    """(first row, provenance) of a shard piece by piece, rows counted from the shard's start.  Memory stays flat.  Raises FormatError."""
    dtype, rows = sample_dtype(generation.index.fields), int(generation.table["rows"][shard])
    path = _path(root, generation, "samples", shard)
    try:
        fd, offset = open_array(path, dtype, (rows,))
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {root} --repair RAW`", path=str(path)) from None
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
    fields = generation.index.fields
    files: list[int] = []
    try:
        for field in fields:
            path = _path(root, generation, field.name, shard)
            try:
                files.append(open_regular(path))
            except FileNotFoundError:
                raise CorruptShardError(f"{path}: missing", path=str(path)) from None
        step = max(1, _CHUNK // generation.index.row_bytes)
        bad: list[npt.NDArray[np.int64]] = []
        rows = int(generation.table["rows"][shard])
        for first, piece in records(root, generation, shard):
            for start in range(0, len(piece), step):
                part = piece[start : start + step]
                there = np.ones(len(part), bool)
                arrays = []
                for field, fd in zip(fields, files, strict=True):
                    data, got = _read_rows(fd, len(header(field.stored, (rows, *field.shape))), field.row_bytes, first + start, len(part))
                    there[got // field.row_bytes :] = False
                    arrays.append(data)
                wrong = ~there | (row_hashes(arrays) != part["row_hash"])
                bad.append(np.flatnonzero(wrong) + (first + start))
        return np.concatenate(bad) if bad else np.empty(0, np.int64)
    except OSError as error:
        raise CorruptShardError(f"{root}: shard {shard} cannot be read ({error.strerror})", path=str(root)) from error
    finally:
        for fd in files:
            os.close(fd)


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
