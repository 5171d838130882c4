"""Hides how fast a disk is that holds a dataset: rows of the dataset's own files are dropped from the page cache, and read again.

Nothing is written, and nothing but clean pages of these files, at most `COLD_BYTES` of them, leaves memory: what posix_fadvise lets any reader do.
Pages that a process has mapped stay, and so do all of a file system that lives in memory; then nothing is measured, and that is said.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.tuneparts import fields_of, width_of

__all__ = ["COLD_BYTES", "Disk", "cold_disk"]

Rows = npt.NDArray[np.int64]

#: Bytes dropped from the page cache at most; of the rows that are read again half in sequence, half at random, which leaves room for whole folios.
COLD_BYTES, _ROWS_BYTES = 256 << 20, 192 << 20
#: Places of the dataset from which the random ones are.
_PLACES = 8
#: A row of each so many bytes is looked at for whether it left the page cache, and what share of them must have.
_LOOK_BYTES, _GONE = 4 << 20, 0.9
#: What the kernel drops is whole folios: of 4 KiB to 2 MiB, and aligned to their size.
_FOLIO = 2 << 20


@dataclass(frozen=True)
class Disk:
    """What a cold disk gives, in bytes a second in sequence and at random, and there in samples.  None, and why, in `note`."""

    sequence_bytes_per_s: float | None = None
    random_bytes_per_s: float | None = None
    random_samples_per_s: float | None = None
    note: str = ""


def cold_disk(dataset: MMapShardDataset, for_s: float, batch_size: int) -> Disk:
    """What the disk of a dataset gives, within about `for_s`.  `dataset` is a copy that has mapped none of its files yet."""
    if dataset._resident is not None:
        return Disk(note="not measured: the dataset is on the device")
    if dataset.upcoming() is not None:
        return Disk(note="not measured: the dataset comes through a cache")
    if not hasattr(os, "posix_fadvise"):
        return Disk(note="not measured: this system cannot be told to drop what it read")
    # all rows from the first that is needed to the last: a subset's are scattered, and the disk is the same
    needed, width = dataset._needed(), width_of(dataset)
    first = needed.row(0)
    n = needed.row(-1) + 1 - first - dataset._reach
    count = min(n // 2, _ROWS_BYTES // 2 * (dataset._reach + 1) // width)
    if count < _PLACES:
        return Disk(note="not measured: so few samples say nothing of a disk")
    # the first of them in sequence, and others from places all over the rest at random
    sequence = range(first, first + count)
    places = [first + count + k * (n - count) // _PLACES for k in range(_PLACES)]
    some = np.concatenate([np.arange(place, place + count // _PLACES) for place in places])
    nbytes = _drop(dataset, np.arange(sequence.start, sequence.stop)) + _drop(dataset, some)
    if not _are_gone(dataset, some):
        return Disk(note="not measured: the file system keeps the files in memory, or a process has them mapped")
    done = [0]
    end = time.monotonic() + for_s / 2
    clock = time.perf_counter()
    dataset._reader.warm(fields_of(dataset), sequence, lambda: time.monotonic() > end, done.append)
    in_sequence = sum(done) / (time.perf_counter() - clock)
    at_random = _rate(dataset, some, min(batch_size, max(1, len(some) // 8)), for_s / 2)
    return Disk(in_sequence, at_random * width, at_random * _variants(dataset), f"cold: {nbytes:,} bytes were dropped from the page cache")


def _variants(dataset: MMapShardDataset) -> int:
    """How many variants a row has, of which reading takes one."""
    return max(column.views or 1 for column in dataset._columns)


def _rate(dataset: MMapShardDataset, rows: Rows, batch_size: int, for_s: float) -> float:
    """Rows a second, or windows that begin with them, in a random order and each once, where the disk is told of a batch ahead, as a loader does."""
    reader, fields = dataset._reader, fields_of(dataset)
    order = np.random.default_rng(0).permutation(rows)
    reach = np.arange(dataset._reach + 1)
    begun, done = time.perf_counter(), 0
    batches = [(order[at : at + batch_size, None] + reach).reshape(-1) for at in range(0, len(order), batch_size)]
    largest = max(fields, key=reader.row_bytes)
    for k, batch in enumerate(batches):
        for coming in batches[k + 1 if k else 0 : k + 2]:
            if reader.cold(largest, coming, 3):
                for field in fields:
                    reader.advise(field, coming)
        for field in fields:
            reader.gather(field, batch)
        done += len(batch)
        if time.perf_counter() - begun > for_s:
            break
    return done / len(reach) / (time.perf_counter() - begun)


def _are_gone(dataset: MMapShardDataset, rows: Rows) -> bool:
    """Have these rows left the page cache?  One in so many is looked at, where it begins in the middle of what was dropped."""
    reader = dataset._reader
    field = max(fields_of(dataset), key=reader.row_bytes)
    step = max(1, _LOOK_BYTES // reader.row_bytes(field))
    looked = rows[step // 2 :: step]
    looked = looked if len(looked) else rows[len(rows) // 2 :][:1]
    gone = [reader.cold(field, looked[k : k + 1]) for k in range(len(looked))]
    return sum(gone) >= _GONE * len(gone)


def _drop(dataset: MMapShardDataset, rows: Rows) -> int:
    """Ask the kernel to let go of the pages that hold these rows, or windows that begin with them; their bytes."""
    reader, total, rows = dataset._reader, 0, np.unique(rows)
    shards = np.unique(reader.shards_of(rows))
    bounds = np.searchsorted(rows, np.append(reader.starts[shards], reader.starts[shards[-1] + 1])).tolist()
    for field in fields_of(dataset):
        width = reader.row_bytes(field)
        for shard, first_row, end_row in zip(shards.tolist(), bounds, bounds[1:], strict=False):
            start, stop = int(reader.starts[shard]), int(reader.starts[shard + 1])
            reader.ready(field, start)  # raises what there is to be said of a file that is not as it should be
            fd = os.open(reader.path(field, shard), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                head = size - (stop - start) * width  # the rows are what a file ends with
                for begin, end in _runs(rows[first_row:end_row] - start, dataset._reach + 1, width):
                    first, last = (head + begin) // _FOLIO * _FOLIO, min(size, -(-(head + end) // _FOLIO) * _FOLIO)
                    os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
                    total += last - first
            finally:
                os.close(fd)
    return total


def _runs(rows: Rows, reach: int, width: int) -> list[tuple[int, int]]:
    """The bytes [begin, end) of `reach` rows from each of these rising ones on, as ranges that are at least a folio apart."""
    cuts = np.flatnonzero(np.diff(rows) > reach + _FOLIO // width) + 1
    begins, ends = rows[np.append(0, cuts)], rows[np.append(cuts - 1, len(rows) - 1)] + reach
    return [(begin * width, end * width) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
