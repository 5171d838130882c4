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
from torch.utils.data import BatchSampler

from mmcompile.runtime.batches import Job
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.sampler import Course, Pass
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.selection import integers

__all__ = ["Given", "ordered"]

Rows = npt.NDArray[np.int64]

#: Rows whose order is computed at a time: the calls of numpy then cost little for each row, and the numbers stay in the cache.
_ORDERED = 4096
#: Positions of an epoch whose length is a sampler's to say: more than any has.
_ENDLESS = 1 << 62


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


def ordered(run: Pass) -> Iterator[Job]:
    """The batches of one rank in an epoch, their order computed by whichever thread first needs it."""
    steps, count = run.steps, len(run.steps)
    together = max(1, _ORDERED // steps.batch_size)
    for first in range(0, count, together):
        chunk = _Chunk(run, first, min(first + together, count))
        for step in range(first, min(first + together, count)):
            yield Job(functools.partial(chunk.samples, step - first), chunk.valid(step - first), run.seed, run.epoch, steps.after(step))


class Given:
    """A sampler of the user's, or a batch sampler, and the course of its epochs: a position counts the samples, or batches, that it gave."""

    def __init__(self, dataset: MMapShardDataset, sampler: Any, batch_size: int | None, drop_last: bool, seed: int) -> None:
        """`batch_size` None: a batch sampler."""
        self._n, self._sampler, self._batch_size, self._drop_last = len(dataset), sampler, batch_size, drop_last
        self.course = Course(_Unknown(dataset.generation), seed=seed, rank=0, world_size=1)

    def __len__(self) -> int:
        """Batches that are left of the epoch that runs, else of the next.  Raises what `len` of the sampler raises."""
        left = max(0, len(self._sampler) - self.course.steps().start)
        if self._batch_size is None:
            return left
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)

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
        keys = next(batches, None)
        if keys is None and seen:
            self.course.received(run, run.steps.n)  # what is left makes no batch
        error = None
        while keys is not None:
            following = None
            try:
                following = next(batches, None)
            except Exception as raised:  # its turn comes after the batch that was given before
                error = raised
            seen += 1 if whole else len(keys)
            samples = integers(keys, self._n)
            seed, epoch, valid = _said(keys, run)
            after = run.steps.n if following is None and error is None else seen
            yield Job(functools.partial(_same, samples), valid, seed, epoch, after)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # or the traceback holds what holds the traceback
            keys = following

    def _batches(self, start: int) -> Iterator[Any]:
        """What the sampler gives from position `start` on.  Raises ValueError where it gives less."""
        found = iter(self._sampler)
        skipped = sum(1 for _ in islice(found, start))
        if skipped < start:
            raise ValueError(f"the state stands at position {start:,}, and the sampler ends after {skipped:,}: it was taken over another one")
        return found if self._batch_size is None else iter(BatchSampler(found, self._batch_size, self._drop_last))


def _said(keys: Any, run: Pass) -> tuple[int, int, npt.NDArray[np.bool_] | None]:
    """The seed and epoch that the indices of a batch carry, else the iteration's, and which of them count."""
    said = {(key.seed, key.epoch, key.valid is None) if isinstance(key, SampleIndex) else None for key in keys}
    if len(said) > 1:
        raise ValueError(f"the sampler gave one batch samples of several seeds or epochs: {sorted(map(str, said))}; end batches where an epoch ends")
    one = said.pop() if said else None
    if one is None:
        return run.seed, run.epoch, None
    return one[0], one[1], None if one[2] else np.array([key.valid for key in keys], np.bool_)


def _same(samples: Rows) -> Rows:
    return samples


class _Unknown:
    """What a course of epochs needs to know of a sampler of the user's: the generation that a state is of, and more samples than it can have."""

    def __init__(self, generation: str) -> None:
        self.generation = generation

    def __len__(self) -> int:
        return _ENDLESS
