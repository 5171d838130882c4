"""Hides over which samples of a dataset a machine is measured, and what memory and one thread of a loader give.  The dataset given stays as it is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmcompile.format.cpus import usable_cpus
from mmcompile.runtime.buffers import pinned
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import settle
from mmcompile.runtime.tunechoice import Candidate, Parts
from mmcompile.runtime.tunetrial import FRESH, Wish, make_loader

__all__ = ["Sample", "copy_of", "fields_of", "ladder", "measured_parts", "memcpy", "one_by_one", "sample_of", "stored_bytes", "transfer", "width_of"]

Rows = npt.NDArray[np.int64]

#: Bytes of a dataset that candidates are measured over: more than any cache of a CPU holds, and soon read.
_SAMPLE_BYTES = 1 << 30
#: Rows of them at most: their numbers are kept, 8 bytes each.
_SAMPLE_ROWS = 1 << 21
#: Pieces that they come in, spread evenly over the dataset.
_PIECES = 32
#: Bytes that a thread copies, from and to; all threads together at most `_COPIES`.
_COPY, _COPIES = 64 << 20, 1 << 30


@dataclass(frozen=True)
class Sample:
    """The samples that candidates are measured over, and what was said of them."""

    dataset: MMapShardDataset
    note: str


def ladder(most: int) -> list[int]:
    """1, 2, 4, … up to `most`, which is one of them."""
    return sorted({*(1 << k for k in range(most.bit_length()) if 1 << k <= most), most})


def memcpy(for_s: float) -> dict[int, float]:
    """Threads -> bytes a second that they copy in memory, from 1 to the CPUs that this process may use."""
    found: dict[int, float] = {}
    steps = ladder(usable_cpus())
    nbytes = min(_COPY, _COPIES // steps[-1])
    pairs = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(steps[-1])]
    for threads in steps:
        done = [0] * threads
        end = time.perf_counter() + for_s / len(steps)

        def copy(k: int, end: float = end, done: list[int] = done) -> None:
            source, target = pairs[k]
            while not done[k] or time.perf_counter() < end:
                np.copyto(target, source)
                done[k] += nbytes

        begun = time.perf_counter()
        running = [threading.Thread(target=copy, args=(k,)) for k in range(1, threads)]
        for thread in running:
            thread.start()
        copy(0)
        for thread in running:
            thread.join()
        found[threads] = sum(done) / (time.perf_counter() - begun)
    return found


def transfer(device: torch.device, for_s: float) -> float | None:
    """Bytes a second from pinned memory to a CUDA device; None for another."""
    if device.type != "cuda":
        return None
    source = pinned(_COPY)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device)
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < for_s:
        target.copy_(source, non_blocking=True)
        settle(device)
        done += _COPY
    return done / (time.perf_counter() - begun)


def copy_of(dataset: MMapShardDataset) -> MMapShardDataset:
    """The same dataset with an epoch, maps and memory of its own, so that the one given stays as it is; a resident one itself."""
    if dataset._resident is not None:
        return dataset
    out = type(dataset).__new__(type(dataset))
    state = {**dataset.__getstate__(), "_reader": dataset._reader.reopened()}
    out.__setstate__({**state, "_epoch": type(state["_epoch"])()})
    return out


def width_of(dataset: MMapShardDataset) -> int:
    """Bytes that the files have for a sample, over the fields in use: all variants of its row, all rows of a window."""
    return sum(dataset._reader.row_bytes(name) for name in fields_of(dataset)) * (dataset._reach + 1)


def fields_of(dataset: MMapShardDataset) -> list[str]:
    """The fields in use, each once."""
    return list(dict.fromkeys(column.field for column in dataset._columns))


def stored_bytes(dataset: MMapShardDataset) -> int:
    """Bytes of the files that all samples are read from."""
    return width_of(dataset) // (dataset._reach + 1) * len(dataset._needed())


def sample_of(dataset: MMapShardDataset, least: int, most_bytes: int, for_s: float) -> Sample:
    """Some `least` samples or more, in pieces from all over the dataset, that are in memory afterwards, as far as they could be read in `for_s`.

    With a cache whole shards, from the first on, as they come: at least one.
    """
    n, width = len(dataset), width_of(dataset)
    far = dataset.upcoming() is not None
    count = min(n, max(least, min(_SAMPLE_ROWS, min(_SAMPLE_BYTES, most_bytes) // max(1, width))))
    begun, whole = time.monotonic(), False
    done: list[Rows] = []
    for first, stop in _shards(dataset, count) if far else _spread(n, count):
        rows = np.arange(first, stop, dtype=np.int64)
        warming = dataset.subset(rows).warm()
        whole = warming.wait(max(0.1, begun + for_s - time.monotonic()))
        if not whole:
            warming.stop()
        if whole or not done:
            done.append(rows)
        if not whole:
            break
    rows, took = np.concatenate(done), time.monotonic() - begun
    note = f"{len(rows):,} of {n:,} samples, " if len(rows) < n else "all samples, "
    note += "in memory" if whole or len(done) > 1 else "as far as they could be read in time"
    if far:
        note += f", which came through the cache at {len(rows) * width / took / 1e6:,.0f} MB/s at most"
    return Sample(dataset if len(rows) == n else dataset.subset(rows), note)


def _spread(n: int, count: int) -> list[tuple[int, int]]:
    """`count` of n samples as ranges [first, stop) that are spread evenly."""
    pieces = min(_PIECES, count)
    cuts = [k * count // pieces for k in range(pieces + 1)]
    gaps = [k * (n - count) // pieces for k in range(pieces)]
    return [(gap + first, gap + stop) for gap, (first, stop) in zip(gaps, pairwise(cuts), strict=True)]


def _shards(dataset: MMapShardDataset, count: int) -> list[tuple[int, int]]:
    """The first shards with together `count` samples or more; all samples where they do not rise by shards."""
    try:
        bounds = dataset.blocks().tolist()
    except ValueError:
        return [(0, len(dataset))]
    found = [(first, stop) for first, stop in pairwise(bounds) if first < count]
    return found or [(0, len(dataset))]


def one_by_one(dataset: MMapShardDataset, wish: Wish, for_s: float) -> float:
    """Seconds that one thread takes for a sample, from batches that grow until one takes `for_s`.  Raises what the dataset or a hook raises."""
    size = 1
    while True:
        loader = make_loader(dataset, replace(wish, batch_size=size), Candidate("ShardLoader", 0), {"rank": 0, "world_size": 1})
        for _ in range(2):  # the second finds code that is loaded, and memory that was used
            begun = time.perf_counter()
            next(iter(loader))
            settle(wish.device)
            took = time.perf_counter() - begun
            if took >= 2 * for_s:
                break
        if took >= for_s or size >= min(wish.batch_size, len(dataset)):
            return took / size
        size = min(2 * size, wish.batch_size, len(dataset))


def _warm(loader: Any, wish: Wish, until: float) -> None:
    """Make a few batches, as far as there is time: those in memory that nobody used before say nothing of the ones to come."""
    for _batch in islice(chain.from_iterable(iter(loader) for _ in range(FRESH)), FRESH):
        settle(wish.device)
        if time.monotonic() >= until:
            break


def measured_parts(dataset: MMapShardDataset, wish: Wish, for_s: float) -> tuple[Parts, int]:
    """What one thread does for a sample, and bytes of a batch as it is handed out.

    Where numbers are computed they are so from the rows where these lie: what that takes, and what little is gathered beside it, is all convert_s.
    """
    loader = make_loader(dataset, wish, Candidate("ShardLoader", 0), {"rank": 0, "world_size": 1})
    _warm(loader, wish, time.monotonic() + for_s)
    end = time.monotonic() + for_s
    samples = batches = most = 0
    sums = dict.fromkeys(("gathered_s", "converted_s", "transformed_s", "moved_s", "elapsed_s"), 0.0)
    while not batches or time.monotonic() < end:
        iterator = iter(loader)
        for batch in iterator:
            settle(wish.device)
            batches += 1
            most = most if batches > 1 else _nbytes(batch)
            if time.monotonic() >= end:
                break
        times = loader.timings()
        samples += min(len(dataset), times["batches"] * wish.batch_size)
        for name in sums:
            sums[name] += times[name]
        iterator.close()
    each = {name: value / samples for name, value in sums.items()}
    whole = each.pop("elapsed_s")  # every batch was waited for, also on its way to the device: what no part says is the loop's own
    left = max(0.0, whole - sum(each.values()))
    copied, computed = each["gathered_s"], each["converted_s"]
    if computed:
        copied, computed = 0.0, copied + computed
    return Parts(copied, computed, each["transformed_s"], each["moved_s"], left), most


def _nbytes(batch: Any) -> int:
    """Bytes of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(_nbytes, values))
