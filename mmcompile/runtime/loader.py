"""Hides how a loop over batches never waits: threads gather ahead, in the order of the epoch, into memory that was used before."""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import BatchSampler, Subset, default_collate

from mmcompile.runtime.ahead import Ahead
from mmcompile.runtime.augment import Augment, RowRandom
from mmcompile.runtime.batches import Job, Made, Maker, Times
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import Mover
from mmcompile.runtime.sampler import Course, Pass, ShardSampler
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.selection import integers

__all__ = ["ShardLoader"]

Rows = npt.NDArray[np.int64]

#: Rows whose order is computed at a time: the calls of numpy then cost little for each row, and the numbers stay in the cache.
_ORDERED = 4096
#: Share of an iteration's time below which waiting for data is not worth a word.
_WAITING = 0.05
#: DataLoader's keywords that have no meaning here -> what to do in their place.
_FOREIGN = {
    "collate_fn": "batches are gathered, not collated; change them with batch_transform=, or use DataLoader(dataset, collate_fn=...)",
    "worker_init_fn": "workers are threads and draw no random numbers; seed= decides about all of them",
    "multiprocessing_context": "workers are threads; for worker processes use DataLoader(dataset, sampler=ShardSampler(...))",
    "generator": "seed= (an int) decides about order and augmentation",
    "pin_memory_device": "pass device=",
    "in_order": "batches always come in order",
}


class ShardLoader:
    """Batches of a dataset, gathered ahead by threads: `DataLoader(` becomes `ShardLoader(`.

    `for images, labels in loader` gives lists as DataLoader does (dicts with output="dict"): (N, C, H, W) and (N,).  A batch is yours, and all that
    views it, until you drop it; its memory is used again then.  At most `prefetch_factor * num_workers` batches are held beside the one handed out
    and those that you keep.

    batch_size, shuffle, sampler, batch_sampler, drop_last, timeout, pin_memory, prefetch_factor: as DataLoader's.  shuffle="block" touches at most
        `block_shards` shards at a time, for storage that is slower than memory.
    num_workers: threads (0: the calling thread gathers).  persistent_workers: accepted; threads start in microseconds and memory is kept anyway.
    seed: decides with the epoch about order and all random draws; the same on every rank.
    device: where batches are to be; their numbers are computed there.
    weights: one for each sample, or "balanced" (every class equally often): as many draws as there are samples, with replacement.
    augment: an Augment: random crops and flips inside the gather.  batch_transform: called as `batch_transform(batch, rng)`, on the device; `rng`
        (a RowRandom) draws (N, …) numbers keyed by row.
    uneven: when the ranks cannot share the last step evenly: "wrap", "drop", or "mask", which adds a last element `valid`, bool (N,).
    rank, world_size: those of torch.distributed, or of torchrun's or Slurm's environment, when iteration begins, unless given.

    Per-sample transforms of the dataset run in the thread that iterates.  The epoch advances by itself; an iteration that handed out a batch, however
    it ended, has used its epoch up.  Raises what a damaged shard, a transform or a sampler raises, as it is, and TimeoutError.
    """

    def __init__(
        self,
        dataset: MMapShardDataset,
        batch_size: int = 1,
        shuffle: bool | str | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 1,
        *,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        persistent_workers: bool = False,
        seed: int = 0,
        device: str | torch.device | None = None,
        weights: Any = None,
        augment: Augment | None = None,
        batch_transform: Callable[[Any, RowRandom], Any] | None = None,
        uneven: str | None = None,
        block_shards: int = 16,
        rank: int | None = None,
        world_size: int | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _FOREIGN:
                raise TypeError(f"ShardLoader has no argument {name!r}")
            if value is not None:
                raise TypeError(f"ShardLoader takes no {name}: {_FOREIGN[name]}")
        self.dataset = dataset = _ours(dataset)
        self.batch_size = _count("batch_size", batch_size, 1)
        self.num_workers = _count("num_workers", num_workers, 0)
        self.prefetch_factor = _count("prefetch_factor", 2 if prefetch_factor is None else prefetch_factor, 1)
        if not timeout >= 0:
            raise ValueError(f"timeout is in seconds, at least 0 (for ever), not {timeout!r}")
        self.timeout = float(timeout)
        self.persistent_workers = persistent_workers
        self.drop_last = bool(drop_last)
        self.device = None if device is None else torch.device(device)
        self.pin_memory = bool(pin_memory)
        if self.pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory=True without CUDA: batches come in ordinary memory", stacklevel=2)
        if augment is not None and not isinstance(augment, Augment):
            raise TypeError(f"augment must be an Augment, not {augment!r}; a function of whole batches is batch_transform=")
        if batch_transform is not None and not callable(batch_transform):
            raise TypeError(f"batch_transform must be a function of (batch, rng), not {batch_transform!r}")
        self.batch_transform = batch_transform
        self.sampler, self.batch_sampler = sampler, batch_sampler
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler is mutually exclusive with batch_size, shuffle, sampler and drop_last")
        if (sampler is not None or batch_sampler is not None) and (shuffle or weights is not None or uneven is not None):
            raise ValueError("a sampler decides about the order alone: shuffle, weights and uneven are for iterating without one")
        settings: dict[str, Any] = {"shuffle": shuffle or False, "drop_last": self.drop_last, "uneven": uneven, "weights": weights}
        settings |= {"block_shards": block_shards, "rank": rank, "world_size": world_size}
        self._given = sampler if sampler is not None else batch_sampler
        if isinstance(sampler, ShardSampler):
            self._given, self._course = None, sampler._course
            if len(dataset) and self._course.steps().batch_size != self.batch_size:
                raise ValueError(
                    f"batch_size is {self.batch_size} here and {self._course.steps().batch_size} of the ShardSampler; give both the same"
                )
        elif self._given is not None:
            self._course = Course(_Length(self._given, dataset.generation), 1, seed=seed, rank=0, world_size=1)
        else:
            self._course = Course(dataset, self.batch_size, seed=seed, **settings)
        self._maker = Maker(dataset, augment, self.device, self.prefetch_factor * max(1, self.num_workers), self.pin_memory)
        self._clock = _Clock()

    def __len__(self) -> int:
        """Batches that a loop yields: the whole epoch's, or after `load_state_dict` in mid-epoch, until that epoch is over, those that are left."""
        if self._given is None:
            return len(self._course.steps())
        n = len(self._given)
        if self.batch_sampler is not None:
            return n
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return _Iteration(self)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._course.set_epoch(epoch)
        for given in (self._given, getattr(self._given, "sampler", None)):
            tell = getattr(given, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, by what it has received: {"generation", "seed", "epoch", "position"}, the same on all ranks."""
        return self._course.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, with any number of ranks and workers and any batch size.  Raises GenerationError for another generation, ValueError."""
        self._course.load_state_dict(state)

    def timings(self) -> dict[str, Any]:
        """What the latest iteration took, in seconds where the name says so, and what was slow.

        elapsed_s of the loop, and of it waited_s for data; gathered_s and converted_s of all threads together; moved_s on the device; batches,
        bytes; slow: "disk", "gather", "convert", "transfer", or "consumer" where the loop hardly waited.
        """
        return self._clock.report(self._maker.mover)


class _Clock:
    """Adds up what an iteration took."""

    def __init__(self) -> None:
        self.begun = self.last = time.perf_counter()
        self.waited_s = self.disk_s = self._moved_before = 0.0
        self.batches = 0
        self.sum = Times()

    def start(self, mover: Mover | None) -> None:
        self.begun = time.perf_counter()
        self._moved_before = 0.0 if mover is None else mover.moved_s()

    def add(self, waited_s: float, times: Times) -> None:
        self.waited_s += waited_s
        self.batches += 1
        self.sum.gathered_s += times.gathered_s
        self.sum.converted_s += times.converted_s
        self.sum.bytes += times.bytes
        self.disk_s += times.gathered_s if times.cold else 0.0
        self.last = time.perf_counter()

    def report(self, mover: Mover | None) -> dict[str, Any]:
        elapsed = self.last - self.begun
        moved = 0.0 if mover is None else mover.moved_s() - self._moved_before
        costs = {"disk": self.disk_s, "gather": self.sum.gathered_s - self.disk_s, "convert": self.sum.converted_s, "transfer": moved}
        slow = "consumer" if self.waited_s <= _WAITING * elapsed else max(costs, key=lambda name: costs[name])
        return {
            "elapsed_s": elapsed,
            "waited_s": self.waited_s,
            "gathered_s": self.sum.gathered_s,
            "converted_s": self.sum.converted_s,
            "moved_s": moved,
            "batches": self.batches,
            "bytes": self.sum.bytes,
            "slow": slow,
        }


class _Chunk:
    """The samples of several steps of an epoch, computed when first asked for."""

    def __init__(self, run: Pass, first: int, stop: int) -> None:
        self._order = run.order
        self._parts = [run.steps.positions(step) for step in range(first, stop)]
        self._ends = np.cumsum([len(positions) for positions, _ in self._parts])
        self._samples: Rows | None = None

    def samples(self, k: int) -> Rows:
        if self._samples is None:  # two threads at once compute the same
            self._samples = self._order.rows(np.concatenate([positions for positions, _ in self._parts]))
        return self._samples[self._ends[k] - len(self._parts[k][0]) : self._ends[k]]

    def valid(self, k: int) -> npt.NDArray[np.bool_] | None:
        return self._parts[k][1]


class _Iteration:
    """One loop over the batches of an epoch.  Dropping it ends its threads."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader, self._maker, self._course = loader, loader._maker, loader._course
        self._clock = _Clock()
        self._run: Pass | None = None
        self._ahead: Ahead[Job, Made] | None = None

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._ahead is None or self._run is None:
            self._run, self._ahead = self._begin()
        begun = time.perf_counter()
        with record_function("mmcompile.wait"):
            made = self._ahead.take(self._loader.timeout)
        self._clock.add(time.perf_counter() - begun, made.times)
        batch = self._finished(made)
        self._course.received(self._run, made.job.after)
        return batch

    def close(self) -> None:
        """End the threads now."""
        if self._ahead is not None:
            self._ahead.close()

    def _begin(self) -> tuple[Pass, Ahead[Job, Made]]:
        """With the first batch that is asked for: of two iterations at once the later one has the next epoch, and one never used costs nothing."""
        loader = self._loader
        run = self._course.begin()
        loader._clock = self._clock
        self._clock.start(self._maker.mover)
        ahead: Ahead[Job, Made] = Ahead(
            self._maker.make,
            _jobs(run) if loader._given is None else _given_jobs(loader, run),
            threads=loader.num_workers,
            ahead=loader.prefetch_factor * max(1, loader.num_workers),
            look=self._maker.look,
        )
        return run, ahead

    def _finished(self, made: Made) -> Any:
        maker, job, dataset = self._maker, made.job, self._maker.dataset
        parts = made.sent.parts if maker.mover is None else maker.mover.receive(made.sent)
        if dataset._hooked:
            with record_function("mmcompile.transform"):
                batch = default_collate(dataset._samples(made.rows, job.seed, job.epoch, parts))
        else:
            packed = dataset._packed(parts)
            batch = list(packed) if isinstance(packed, tuple) else packed
        if job.valid is not None:
            batch = _with_valid(batch, torch.from_numpy(job.valid))
        if maker.device is not None:
            batch = _to(batch, maker.device)
        if self._loader.batch_transform is not None:
            with record_function("mmcompile.batch_transform"):
                rng = RowRandom(job.seed, job.epoch, made.rows, maker.device or torch.device("cpu"))
                batch = self._loader.batch_transform(batch, rng)
        return batch


def _jobs(run: Pass) -> Iterator[Job]:
    """The batches of one rank in an epoch, their order computed by whichever thread first needs it."""
    steps, count = run.steps, len(run.steps)
    together = max(1, _ORDERED // steps.batch_size)
    for first in range(0, count, together):
        chunk = _Chunk(run, first, min(first + together, count))
        for step in range(first, min(first + together, count)):
            yield Job(functools.partial(chunk.samples, step - first), chunk.valid(step - first), run.seed, run.epoch, steps.after(step))


def _given_jobs(loader: ShardLoader, run: Pass) -> Iterator[Job]:
    """The batches that a sampler of the user's asks for; what was received before a resume is asked for again and skipped."""
    whole = loader.batch_sampler is not None
    batches = iter(loader.batch_sampler if whole else BatchSampler(loader.sampler, loader.batch_size, loader.drop_last))
    seen, keys = 0, next(batches, None)
    while keys is not None:
        following = next(batches, None)
        seen += 1 if whole else len(keys)
        if seen > run.steps.start:
            samples = integers(keys, len(loader.dataset))
            first = keys[0] if len(keys) and isinstance(keys[0], SampleIndex) else SampleIndex(0, run.seed, run.epoch)
            valid = None if first.valid is None else np.array([key.valid for key in keys], np.bool_)
            after = seen if following is not None else run.steps.n
            yield Job(functools.partial(_same, samples), valid, first.seed, first.epoch, after)
        keys = following


def _same(samples: Rows) -> Rows:
    return samples


class _Length:
    """What a course of epochs needs to know of a sampler of the user's: its length, and the generation that a state is of."""

    def __init__(self, sampler: Any, generation: str) -> None:
        self.generation = generation
        self._n = len(sampler) if hasattr(sampler, "__len__") else 1 << 62

    def __len__(self) -> int:
        return self._n


def _ours(dataset: Any) -> MMapShardDataset:
    """The dataset itself; of a torch Subset of one, the same samples as a subset that keeps epoch and seed."""
    if isinstance(dataset, Subset):
        return _ours(dataset.dataset).subset(dataset.indices)
    if not isinstance(dataset, MMapShardDataset):
        raise TypeError(
            f"ShardLoader reads a MMapShardDataset (or a Subset of one), not {type(dataset).__name__}; torch's DataLoader reads any other"
        )
    return dataset


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return number


def _with_valid(batch: Any, valid: Tensor) -> Any:
    if isinstance(batch, dict):
        return {**batch, "valid": valid}
    return [*batch, valid] if isinstance(batch, list) else [batch, valid]


def _to(batch: Any, device: torch.device) -> Any:
    """A batch on a device; what is there already is not copied."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    return [_to(value, device) for value in batch] if isinstance(batch, list | tuple) else batch
