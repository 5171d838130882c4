"""Hides which batches an epoch is divided into: by our own order, or by whatever sampler the user has.

A batch's rows are computed by whichever thread needs them first; a sampler of the user's is asked by the thread that iterates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler

from mmcompile.runtime.batches import Job
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.sampler import Course, Pass
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.selection import integers

__all__ = ["Given", "ordered"]

Rows = npt.NDArray[np.int64]

#: Positions of an epoch whose length is a sampler's to say: more than any has.
_ENDLESS = 1 << 62


class _Chunk:
    """The samples of several steps of an epoch, computed when first asked for."""

    def __init__(self, run: Pass, first: int, count: int) -> None:
        self._run, self._first, self._count = run, first, count
        self._found: tuple[Rows, Rows | None] | None = None

    def samples(self, step: int) -> tuple[Rows, Rows | None]:
        """The samples of a step and, of an epoch that draws with replacement, the numbers of their draws: int64 (b,)."""
        if self._found is None:  # two threads at once compute the same
            self._found = self._run.samples(self._first, self._count)
        samples, draws = self._found
        at = step - self._first
        return samples[at], None if draws is None else draws[at]


def ordered(run: Pass) -> Iterator[Job]:
    """The batches of one rank in an epoch, their order computed by whichever thread first needs it."""
    steps, last = run.steps, len(run.steps) - 1
    for first, count in run.together():
        chunk = _Chunk(run, first, count)
        for step in range(first, first + count):
            whole = np.ones(steps.batch_size, np.bool_) if steps.uneven == "mask" else None
            valid = steps.positions(last)[1] if step == last else whole
            yield Job(functools.partial(chunk.samples, step), valid, run.seed, run.epoch, steps.after(step))


class Given:
    """A sampler of the user's, or a batch sampler, and the course of its epochs: a position counts the samples, or batches, that it gave."""

    def __init__(self, dataset: MMapShardDataset, sampler: Any, batch_size: int | None, drop_last: bool, seed: int) -> None:
        """`batch_size` None: a batch sampler."""
        self._n, self._sampler, self._batch_size, self._drop_last = len(dataset), sampler, batch_size, drop_last
        self.course = Course(_Unknown(dataset), seed=seed, rank=0, world_size=1)
        self._replaces = batch_size is not None and getattr(sampler, "replacement", False) is True

    def __len__(self) -> int:
        """Batches of a whole epoch.  Raises what `len` of the sampler raises."""
        count = len(self._sampler)
        if self._batch_size is None:
            return count
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tell those that want to know, as DistributedSampler."""
        for one in (self._sampler, getattr(self._sampler, "sampler", None)):
            tell = getattr(one, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def jobs(self, run: Pass) -> Iterator[Job]:
        """The batches of an epoch; what was received before a resume is asked for again and skipped."""
        seen, whole = run.steps.start, self._batch_size is None
        batches = self._batches(seen)
        keys = self._kept(next(batches, None))
        if keys is None and seen:
            self.course.received(run, run.steps.n)  # what is left makes no batch
        error = None
        while keys is not None:
            following = None
            try:
                following = self._kept(next(batches, None))
            except Exception as raised:  # its turn comes after the batch that was given before
                error = raised
            samples = integers(keys, self._n)
            seed, epoch, valid, draws = _said(keys, run)
            if self._replaces and draws is None:
                draws = np.arange(seen + 1, seen + 1 + len(samples))
            seen += 1 if whole else len(keys)
            after = run.steps.n if following is None and error is None else seen
            yield Job(functools.partial(_same, samples, draws), valid, seed, epoch, after)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # or the traceback holds what holds the traceback
            keys = following

    def _kept(self, keys: Any) -> Any:
        """A batch of indices that stays as it is while its sampler goes on: some fill one list or array again and again."""
        if keys is None:
            return None
        return keys.clone() if isinstance(keys, torch.Tensor) else keys.copy() if isinstance(keys, np.ndarray) else list(keys)

    def _batches(self, start: int) -> Iterator[Any]:
        """What the sampler gives from position `start` on.  Raises ValueError where it gives less."""
        found = iter(self._sampler)
        skipped = sum(1 for _ in islice(found, start))
        if skipped < start:
            raise ValueError(f"the state stands at position {start:,}, and the sampler ends after {skipped:,}: it was taken over another one")
        return found if self._batch_size is None else iter(BatchSampler(found, self._batch_size, self._drop_last))


def _said(keys: Any, run: Pass) -> tuple[int, int, npt.NDArray[np.bool_] | None, Rows | None]:
    """The seed and epoch that the indices of a batch carry, else the iteration's; which of them count, and the numbers of their draws."""
    said = {(key.seed, key.epoch, key.valid is None) if isinstance(key, SampleIndex) else None for key in keys}
    if len(said) > 1:
        found = sorted("no epoch" if one is None else f"seed {one[0]} epoch {one[1]}" + ("" if one[2] else " with a mask") for one in said)
        raise ValueError(
            f"a batch of the sampler holds samples of several seeds or epochs ({', '.join(found[:4])}), expected those of one: give it one epoch at "
            "a time, or a batch_sampler whose batches end where an epoch does"
        )
    one = said.pop() if said else None
    if one is None:
        return run.seed, run.epoch, None, None
    valid = None if one[2] else np.array([key.valid for key in keys], np.bool_)
    return one[0], one[1], valid, np.array([key.draw for key in keys], np.int64) if any(key.draw for key in keys) else None


def _same(samples: Rows, draws: Rows | None) -> tuple[Rows, Rows | None]:
    return samples, draws


class _Unknown:
    """What a course of epochs needs to know of a sampler of the user's: what a state is of, and more samples than it can have."""

    def __init__(self, dataset: MMapShardDataset) -> None:
        self.generation, self.part = dataset.generation, dataset.part

    def __len__(self) -> int:
        return _ENDLESS
