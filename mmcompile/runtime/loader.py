"""Hides how a loop over batches never waits: threads gather ahead, in the order of the epoch, into memory that was used before."""

from __future__ import annotations

import difflib
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from mmcompile.runtime.ahead import Ahead
from mmcompile.runtime.arguments import takes
from mmcompile.runtime.augment import Augment, RowRandom
from mmcompile.runtime.batches import Job, Made, Maker, Times, labelled
from mmcompile.runtime.buffers import can_pin
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import Mover, device_of
from mmcompile.runtime.hooks import keyed_globals, stacked, with_valid
from mmcompile.runtime.jobs import Given, ordered
from mmcompile.runtime.sampler import Course, Pass, ShardSampler
from mmcompile.runtime.seeding import stream_key
from mmcompile.runtime.selection import whole

__all__ = ["ShardLoader"]

#: Share of an iteration's time below which waiting for data is not worth a word.
_WAITING = 0.05
#: DataLoader's keywords that have no meaning here -> the value that asks for nothing, and what to do in place of another.
_FOREIGN: dict[str, tuple[Any, str]] = {
    "collate_fn": (None, "batches are gathered, not collated; change them with batch_transform=, or use DataLoader(dataset, collate_fn=...)"),
    "worker_init_fn": (None, "workers are threads and draw no random numbers; seed= decides about all of them"),
    "multiprocessing_context": (None, "workers are threads; for worker processes use DataLoader(dataset, sampler=ShardSampler(...))"),
    "generator": (None, "seed= (an int) decides about order and augmentation"),
    "pin_memory_device": ("", "pass device="),
    "in_order": (True, "batches always come in order"),
}


class ShardLoader:
    """Batches of a dataset, gathered ahead by threads: `DataLoader(` becomes `ShardLoader(`.

    `for images, labels in loader` gives lists as DataLoader does (dicts with output="dict"): (N, C, H, W) and (N,).  A batch is yours, and all that
    views it, until you drop it; its memory is used again then.  At most `prefetch_factor * num_workers` batches are held beside the one handed out
    and those that you keep.

    batch_size, shuffle, sampler, batch_sampler, drop_last, timeout, pin_memory, prefetch_factor: as DataLoader's.  shuffle="block" touches at most
        `block_shards` shards at a time, for storage that is slower than memory; over a dataset with a cache True means "block".
        After `load_state_dict` a sampler other than ShardSampler is asked anew and what it gave before is skipped: it must give the same once more.
    num_workers: threads (0: the calling thread gathers).  persistent_workers: accepted; threads start in microseconds and memory is kept anyway.
    seed: decides with the epoch about order and all random draws; the same on every rank.
    device: where batches are to be; their numbers are computed there.
    weights: one for each sample, or "balanced" (every class equally often): as many draws as there are samples, with replacement.
    augment: an Augment: random crops and flips inside the gather, of all that belongs to a picture together; ValueError here where a field in use
        cannot follow.  batch_transform: called as `batch_transform(batch, rng)`, on the device; `rng`
        (a RowRandom) draws (N, …) numbers keyed by row.
    uneven: when the ranks cannot share the last step evenly: "wrap", "drop", or "mask", which adds a last element `valid`, bool (N,).
    rank, world_size: those of torch.distributed, or of torchrun's or Slurm's environment, when iteration begins, unless given.
    node_groups: as ShardSampler's: each of so many nodes reads shards of its own in an epoch.

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
        node_groups: int = 1,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _FOREIGN:
                raise TypeError(f"ShardLoader has no argument {name!r}{_meant(name)}")
            nothing, remedy = _FOREIGN[name]
            if value is not None and value != nothing:
                raise TypeError(f"ShardLoader takes no {name}: {remedy}")
        self.dataset = dataset = _ours(dataset)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.num_workers = whole("num_workers", num_workers, 0)
        self.prefetch_factor = whole("prefetch_factor", 2 if prefetch_factor is None else prefetch_factor, 1)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout is in seconds, from 0 (for ever) to {threading.TIMEOUT_MAX:.0f}, not {timeout!r}")
        self.timeout = float(timeout)
        self.persistent_workers = persistent_workers
        self.drop_last = bool(drop_last)
        self.device = None if device is None else device_of(device)
        self.pin_memory = bool(pin_memory)
        if self.pin_memory and not can_pin():
            warnings.warn("pin_memory=True without CUDA: batches come in ordinary memory", stacklevel=2)
        if augment is not None and not isinstance(augment, Augment):
            raise TypeError(f"augment must be an Augment, not {augment!r}; a function of whole batches is batch_transform=")
        if batch_transform is not None and not takes(batch_transform, 2):
            raise TypeError(f"batch_transform must be a function of (batch, rng), not {batch_transform!r}")
        self.batch_transform = batch_transform
        self.sampler, self.batch_sampler = sampler, batch_sampler
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler is mutually exclusive with batch_size, shuffle, sampler and drop_last: leave these out")
        settings: dict[str, Any] = {"uneven": uneven, "weights": weights, "rank": rank, "world_size": world_size}
        given = sampler if sampler is not None else batch_sampler
        if given is not None and (shuffle or node_groups != 1 or any(value is not None for value in settings.values())):
            raise ValueError(
                f"a sampler decides the order by itself: leave shuffle, {', '.join(settings)} and node_groups out, or leave the sampler out"
            )
        self._given: Given | None = None
        if isinstance(sampler, ShardSampler):
            self._course = _course_of(sampler, dataset, self.batch_size, self.drop_last, seed)
        elif given is not None:
            self._given = Given(dataset, given, None if sampler is None else self.batch_size, self.drop_last, seed)
            self._course = self._given.course
        else:
            settings |= {"shuffle": shuffle or False, "drop_last": self.drop_last, "block_shards": block_shards, "node_groups": node_groups}
            self._course = Course(dataset, self.batch_size, seed=seed, **settings)
        self._shuffle = shuffle or (weights is not None)
        self._maker = Maker(dataset, augment, self.device, self.prefetch_factor * max(1, self.num_workers), self.pin_memory)
        self._clock = _Clock()

    def __len__(self) -> int:
        """Batches of a whole epoch.  After `load_state_dict` in mid-epoch the next loop yields those that are left of it."""
        return len(self._course.steps() if self._given is None else self._given)

    def __iter__(self) -> Iterator[Any]:
        return _Iteration(self)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._course.set_epoch(epoch)
        if self._given is not None:
            self._given.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, by what it has received: {"generation", "seed", "epoch", "position"}, the same on all ranks."""
        return self._course.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, with any number of ranks and workers and any batch size.  Raises GenerationError for another generation, ValueError.

        A sampler of your own must give the same order once more: telling it the epoch is yours.
        """
        self._course.load_state_dict(state)

    def __repr__(self) -> str:
        order = "a sampler" if self._given is not None or self.sampler is not None else f"shuffle={self._shuffle!r}"
        where = "" if self.device is None else f", device={str(self.device)!r}"
        return f"{type(self).__name__}(batch_size={self.batch_size}, {order}, num_workers={self.num_workers}{where}) over {self.dataset!r}"

    def timings(self) -> dict[str, Any]:
        """What the latest iteration took, in seconds where the name says so, and what was slow.

        elapsed_s of the loop, and of it waited_s for batches, of which transformed_s went into transforms (the dataset's per sample, and
        batch_transform, which run in the loop's own thread); gathered_s and converted_s of all threads together; moved_s on the device; batches,
        bytes; slow: "disk", "gather", "convert", "transfer", "transform", or "consumer" where the loop hardly waited.
        """
        return self._clock.report(self._maker.mover)


class _Clock:
    """Adds up what an iteration took."""

    def __init__(self) -> None:
        self.begun = self.last = time.perf_counter()
        self.waited_s = self.transformed_s = self.disk_s = self._moved_before = 0.0
        self.batches = 0
        self.sum = Times()

    def start(self, mover: Mover | None) -> None:
        self.begun = self.last = time.perf_counter()
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
        slow = "transform" if self.transformed_s > self.waited_s / 2 else max(costs, key=lambda name: costs[name])
        if self.waited_s <= _WAITING * elapsed:
            slow = "consumer"
        return {
            "elapsed_s": elapsed,
            "waited_s": self.waited_s,
            "transformed_s": self.transformed_s,
            "gathered_s": self.sum.gathered_s,
            "converted_s": self.sum.converted_s,
            "moved_s": moved,
            "batches": self.batches,
            "bytes": self.sum.bytes,
            "slow": slow,
        }


class _Iteration:
    """One loop over the batches of an epoch.  Dropping it ends its threads."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader, self._maker, self._course = loader, loader._maker, loader._course
        self._clock = _Clock()
        self._run: Pass | None = None
        self._ahead: Ahead[Job, Made] | None = None
        self._turn = threading.Lock()

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("two threads ask one iteration for batches at once; give each thread an iteration of its own, or take turns")
        try:
            return self._next()
        finally:
            self._turn.release()

    def _next(self) -> Any:
        if self._ahead is None or self._run is None:
            self._run, self._ahead = self._begin()
        begun = time.perf_counter()
        try:
            with labelled("wait"):
                made = self._ahead.take(self._loader.timeout)
        except TimeoutError:
            raise  # the wait can go on
        except BaseException:
            self.close()  # whoever keeps the error keeps this, and would keep the threads
            raise
        try:
            batch = self._finished(made)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):  # would end the loop as if the data had ended
                raise RuntimeError("batch_transform raised StopIteration") from error
            raise
        self._clock.add(time.perf_counter() - begun, made.times)
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
            ordered(run) if loader._given is None else loader._given.jobs(run),
            threads=loader.num_workers,
            ahead=loader.prefetch_factor * max(1, loader.num_workers),
            look=self._maker.look,
        )
        return run, ahead

    def _finished(self, made: Made) -> Any:
        maker, job, dataset = self._maker, made.job, self._maker.dataset
        parts = made.sent.parts if maker.mover is None else maker.mover.receive(made.sent)
        begun = time.perf_counter()
        if dataset._hooked:
            with labelled("transform"):
                samples = dataset._samples(made.keyed, job.seed, job.epoch, parts)
                batch = stacked(samples if job.valid is None else list(map(with_valid, samples, job.valid.tolist())), maker.stacking)
        else:
            packed = dataset._packed(parts if job.valid is None else [*parts, torch.from_numpy(job.valid)])
            batch = list(packed) if isinstance(packed, tuple) else packed
        if maker.device is not None:
            batch = _to(batch, maker.device)
        if self._loader.batch_transform is not None:
            rng = RowRandom(job.seed, job.epoch, made.keyed, maker.device or torch.device("cpu"))
            with labelled("batch_transform"), keyed_globals(stream_key(job.seed, job.epoch, ~int(made.keyed[0]) if len(made.keyed) else 0)):
                batch = self._loader.batch_transform(batch, rng)
            if batch is None:
                raise TypeError("batch_transform returned None; it must return the batch")
        if dataset._hooked or self._loader.batch_transform is not None:
            self._clock.transformed_s += time.perf_counter() - begun
        return batch


def _course_of(sampler: ShardSampler, dataset: MMapShardDataset, batch_size: int, drop_last: bool, seed: int) -> Course:
    """The course of a ShardSampler, which decides about all that both could say.  Raises ValueError where they say different things."""
    course = sampler._course
    if not course.is_of(dataset):
        raise ValueError(
            "the ShardSampler was made over another dataset (or another split or subset) than the ShardLoader; give both the same "
            "(ds.subset(rows) in place of a torch Subset)"
        )
    pairs = {
        "batch_size": (batch_size, course.batch_size),
        "drop_last": (drop_last, drop_last and course._drop_last),
        "seed": (seed, seed and course._seed),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            raise ValueError(f"{name} is {here} here and {there} of the ShardSampler, which decides; give it to the sampler (batch_size to both)")
    return course


def _meant(name: str) -> str:
    """What somebody may have meant by an argument that there is not."""
    if name in inspect.signature(MMapShardDataset).parameters:
        return f"; {name}= is an argument of MMapShardDataset"
    if name == "num_replicas":
        return "; the number of ranks is world_size="
    close = difflib.get_close_matches(name, inspect.signature(ShardLoader).parameters, 1)
    return f"; did you mean {close[0]}=?" if close else ""


def _ours(dataset: Any) -> MMapShardDataset:
    """The dataset itself; of a torch Subset of one, the same samples as a subset that keeps epoch and seed."""
    if isinstance(dataset, Subset):
        return _ours(dataset.dataset).subset(dataset.indices)
    if not isinstance(dataset, MMapShardDataset):
        raise TypeError(
            f"ShardLoader reads a MMapShardDataset (or a Subset of one), not {type(dataset).__name__}; torch's DataLoader reads any other"
        )
    return dataset


def _to(batch: Any, device: torch.device) -> Any:
    """A batch on a device; what is there already is not copied."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(value, device) for value in batch))
    return [_to(value, device) for value in batch] if isinstance(batch, list | tuple) else batch
