"""Hides how a loader with some settings is made, run for a moment and ended: nothing of it is left, whatever happened.

A trial begins where a loader has its batches ahead, so that what is counted is what it makes and not what it had made.  Loaders in the process of
the caller raise what a dataset or a transform raises; what goes wrong in worker processes is said of the candidate alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from mmcompile.runtime.augment import Augment
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import device_of, free_bytes, settle
from mmcompile.runtime.loader import ShardLoader
from mmcompile.runtime.sampler import ShardSampler
from mmcompile.runtime.tunechoice import Candidate

__all__ = ["FRESH", "Trials", "Wish", "end_workers", "make_loader", "private_bytes"]

#: Batches after which a rate says something, however short the time.
_BATCHES = 3
#: Batches beyond those ahead until a loader writes only to memory that it used before.
FRESH = 3
#: A loader may have as much of the free memory: the rest is training's, and the page cache's.
_MEMORY = 0.5
#: And as much of what /dev/shm has left, through which batches of worker processes come; what is beyond it is a SIGBUS.
_SHARED = 0.8
#: Seconds that a thread which feeds a worker process has to end: it has nothing left to do.
_END_S = 1.0
#: What a ShardSampler is told in place of the DataLoader.
_OF_ORDER = ("shuffle", "seed", "uneven", "weights", "rank", "world_size", "node_groups", "block_shards", "drop_last")


@dataclass(frozen=True)
class Wish:
    """What is wanted of a loader, whatever its settings."""

    batch_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    augment: Augment | None = None
    batch_transform: Callable[..., Any] | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def make_loader(dataset: MMapShardDataset, wish: Wish, candidate: Candidate, more: dict[str, Any]) -> Any:
    """The loader of these settings, shuffled; `more` are further arguments of it, which win."""
    workers: dict[str, Any] = {"num_workers": candidate.num_workers}
    if candidate.prefetch_factor is not None:
        workers["prefetch_factor"] = candidate.prefetch_factor
    if candidate.loader == "ShardLoader":
        device = None if wish.device.type == "cpu" else wish.device
        given = {"shuffle": True, "device": device, "augment": wish.augment, "batch_transform": wish.batch_transform}
        return ShardLoader(dataset, **{"batch_size": wish.batch_size, **given, **workers, **more})
    more = {"shuffle": True, **more}
    batch_size = more.pop("batch_size", wish.batch_size)
    order = {name: more.pop(name) for name in _OF_ORDER if name in more}
    if candidate.num_workers:
        workers["persistent_workers"] = True
    if candidate.pin_memory:
        workers["pin_memory"] = True
    return DataLoader(dataset, **{"batch_size": batch_size, "sampler": ShardSampler(dataset, batch_size, **order), **workers, **more})


class _Late(Exception):
    """A candidate's time is over."""


class Trials:
    """Runs candidates over one dataset, for at most so long each."""

    def __init__(self, dataset: MMapShardDataset, wish: Wish, batch_bytes: int) -> None:
        self.dataset, self.wish, self.batch_bytes = dataset, wish, batch_bytes

    def run(self, candidate: Candidate, slice_s: float, limit_s: float) -> Candidate:
        """The candidate with one more rate, measured for about `slice_s`; with what failed where it gave no batch within `limit_s`."""
        if (refusal := self._too_large(candidate)) is not None:
            return replace(candidate, failed=refusal)
        before = private_bytes()
        try:
            with _quiet():
                rate, after = self._rate(candidate, slice_s, time.monotonic() + limit_s)
        except _Late:
            return replace(candidate, failed=f"gave no batch of {self.wish.batch_size:,} within {limit_s:.0f} s")
        except Exception as error:
            if _timed_out(error):
                return replace(candidate, failed=f"gave no batch of {self.wish.batch_size:,} within {limit_s:.0f} s")
            if candidate.loader == "ShardLoader" or not candidate.num_workers:
                raise
            return replace(candidate, failed=f"{type(error).__name__}: {_last_line(error)}")
        peak = candidate.peak_bytes
        if before is not None and after is not None:
            shared = (candidate.ahead + 1) * self.batch_bytes if candidate.loader == "DataLoader" and candidate.num_workers else 0
            peak = max(peak or 0, after - before + shared)
        return replace(candidate, rates=(*candidate.rates, rate), peak_bytes=peak)

    def waiting(self, candidate: Candidate, step_s: float, for_s: float) -> float:
        """The share of a loop's time that goes into waiting for batches, where each step takes `step_s` in which the CPU has nothing to do."""
        try:
            return self._waiting(candidate, step_s, for_s)
        except Exception as error:
            if not _timed_out(error):
                raise
            return 1.0

    def _waiting(self, candidate: Candidate, step_s: float, for_s: float) -> float:
        waited = total = 0.0
        with _quiet(), closing(self._batches(candidate, max(10.0, 10 * step_s))) as batches:
            for _ in range(candidate.ahead + FRESH):
                next(batches)
            end = time.perf_counter() + for_s
            while total == 0.0 or time.perf_counter() < end:
                begun = time.perf_counter()
                time.sleep(step_s)
                asked = time.perf_counter()
                next(batches)
                settle(self.wish.device)
                waited += time.perf_counter() - asked
                total += time.perf_counter() - begun
        return waited / total

    def _rate(self, candidate: Candidate, slice_s: float, until: float) -> tuple[float, int | None]:
        with closing(self._batches(candidate, max(1.0, until - time.monotonic()))) as batches:
            for _ in range(candidate.ahead + FRESH):
                next(batches)
                if time.monotonic() > until:
                    raise _Late
            settle(self.wish.device)
            samples = count = 0
            begun = time.perf_counter()
            while count < _BATCHES or time.perf_counter() - begun < slice_s:
                samples += next(batches)
                count += 1
                if time.monotonic() > until:
                    break
            settle(self.wish.device)
            rate = samples / (time.perf_counter() - begun)
            return rate, private_bytes()

    def _batches(self, candidate: Candidate, timeout_s: float) -> Generator[int, None, None]:
        """The samples of batch after batch, epoch after epoch; each batch lives until the next one is there, as in a loop."""
        n, size = len(self.dataset), self.wish.batch_size
        more: dict[str, Any] = {"timeout": timeout_s} if candidate.num_workers else {}
        if candidate.loader == "DataLoader":
            more["generator"] = torch.Generator()  # it would draw seeds of its workers from the one that training's weights come from
        loader = make_loader(self.dataset, self.wish, candidate, {"rank": 0, "world_size": 1, **more})
        there = candidate.loader == "DataLoader" and self.wish.cuda
        try:
            while True:
                for k, batch in enumerate(loader):
                    held = _moved(batch, self.wish.device) if there else batch  # noqa: F841
                    yield min(size, n - k * size)
        finally:
            end_workers(loader)

    def _too_large(self, candidate: Candidate) -> str | None:
        """Why this candidate's batches have no room; None where they have."""
        need = (candidate.ahead + 1) * self.batch_bytes
        free = free_bytes(device_of("cpu"))
        if candidate.ahead and need > _MEMORY * free:
            return f"not tried: {candidate.ahead + 1} batches take {need:,} bytes, of memory {free:,} are free"
        if candidate.loader == "DataLoader" and candidate.num_workers:
            with suppress(OSError):
                found = os.statvfs("/dev/shm")
                room = found.f_bavail * found.f_frsize
                if need > _SHARED * room:
                    return f"not tried: {candidate.ahead + 1} batches take {need:,} bytes, /dev/shm has {room:,} left (in Docker: --shm-size)"
        return None


def private_bytes() -> int | None:
    """Bytes of memory that this process and its children have to themselves, without files and shared memory; None where the kernel does not say."""
    total, found = 0, False
    for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss_Anon:"):
                    total, found = total + (int(line.split()[1]) << 10), True
    return total if found else None


def end_workers(loader: Any) -> None:
    """End the worker processes of a DataLoader, and the threads that feed them; nothing for any other loader."""
    iterator: Any = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        for queue in iterator._index_queues:  # torch tells their threads to end, and does not wait
            if (thread := getattr(queue, "_thread", None)) is not None:
                thread.join(_END_S)


def _timed_out(error: Exception) -> bool:
    """Is this what a loader says whose batch did not come in time?"""
    return str(error).startswith(("no batch within", "DataLoader timed out"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of more workers than CPUs, or of a fork beside torch's threads: what is tried here is our choice, not the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    return [_moved(value, device) for value in batch] if isinstance(batch, list | tuple) else batch


def _last_line(error: Exception) -> str:
    """What an error says in the end: one of a worker process brings its traceback along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
