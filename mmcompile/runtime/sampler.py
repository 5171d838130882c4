"""Hides how far an epoch has got, and which part of it is this rank's: one course of epochs for ShardSampler and ShardLoader.

The epoch advances by itself, every rank has as many steps, and a state of four values goes on anywhere, also with other ranks, workers or another
batch size: a position counts samples of the epoch's order over all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler, Subset

from mmcompile.errors import GenerationError
from mmcompile.runtime.order import Order, Steps, balanced, cumulative
from mmcompile.runtime.ranks import MOST, ranks, ranks_of_indices
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.selection import whole

if TYPE_CHECKING:
    from mmcompile.runtime.upcoming import Upcoming

__all__ = ["Course", "Pass", "ShardSampler", "ranks"]

#: Indices whose rows are computed in one go: enough that numpy's calls cost less than making the indices, and 64 KiB at most.
_CHUNK = 4096
#: Seeds and epochs are 64-bit words of a random stream's key; a larger one would be the same as a smaller one.
_WORD = 1 << 64
_UNEVEN = ("wrap", "drop", "mask")
_STATE = ("generation", "seed", "epoch", "position")
#: Beside them where the dataset is a part of a folder: which.
_PART = "part"
#: And where nodes have shards of their own: how many nodes.
_NODES = "node_groups"


@dataclass(frozen=True, eq=False)
class Pass:
    """One iteration over (the rest of) an epoch, for one rank: fixed when it began."""

    seed: int
    epoch: int
    order: Order
    steps: Steps
    upcoming: Upcoming | None = None

    def samples(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """This rank's samples of `count` steps from `first` on, all as large as that one, computed in one go: int64 (count, b).

        And, of an epoch that draws with replacement, the numbers of their draws, from 1: int64 (count, b).
        """
        apart = np.arange(count, dtype=np.int64) * (self.steps.world_size * self.steps.batch_size)
        positions = self.steps.positions(first)[0] + apart[:, None]
        samples = self.order.rows(positions.reshape(-1)).reshape(positions.shape)
        return samples, positions + 1 if self.order.replaces else None

    def together(self) -> Iterator[tuple[int, int]]:
        """(first, count) of steps whose samples are worth computing in one go; the last step, which may not be whole, alone.

        As they are reached, the shards that they and those after them need are asked for.
        """
        last, most, known = len(self.steps) - 1, max(1, _CHUNK // self.steps.batch_size), 0
        for first in (*range(0, last, most), *([last] if last >= 0 else [])):
            count = min(most, last - first) or 1
            apart = self.steps.world_size * self.steps.batch_size
            begin, end = (min(self.steps.start + step * apart, self.order.n) for step in (first, first + count))
            if self.upcoming is not None and end > known and begin < end:
                samples, known = self.order.upcoming(begin, end - 1)
                if len(samples):
                    self.upcoming.want(samples)
            yield first, count


class Course:
    """The course of the epochs over a dataset: which comes next, how it is ordered and divided among ranks, and what of it was received.

    The dataset is anything with a length.  `shuffle="block"` asks it for `blocks()`, `weights="balanced"` for `targets`; its `generation`, if it has
    one, is kept in the state.  One whose shards have to be brought here has something to say of them, `upcoming()`; `shuffle=True` is "block" then.
    Positions count the samples of one node, if each has shards of its own.  See ShardSampler for the arguments.  `batch_size` can be read.  One
    thread at a time.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        drop_last: bool = False,
        uneven: str | None = None,
        weights: Any = None,
        block_shards: int = 16,
        rank: int | None = None,
        world_size: int | None = None,
        node_groups: int = 1,
    ) -> None:
        if shuffle not in (False, True, "block"):
            raise ValueError(f"shuffle must be False, True or 'block', not {shuffle!r}")
        find = getattr(dataset, "upcoming", None)
        self._upcoming: Upcoming | None = None if find is None else find()
        if shuffle is True and weights is None and self._upcoming is not None:
            shuffle = "block"
        if uneven is not None and uneven not in _UNEVEN:
            raise ValueError(f"uneven must be one of {_UNEVEN}, not {uneven!r}")
        if uneven == "mask" and drop_last:
            raise ValueError("uneven='mask' hands out every sample exactly once, drop_last=True leaves some out: give one or the other")
        if weights is not None and shuffle == "block":
            raise ValueError("weights draw samples from all shards, shuffle='block' keeps to a few of them at a time: give one or the other")
        if rank is not None or world_size is not None:
            ranks(rank, world_size)
        _warn_of_subset(dataset)
        self._n = len(dataset)
        self.batch_size = whole("batch_size", batch_size, 1, MOST)
        self._block_shards = whole("block_shards", block_shards, 1)
        self._shuffle: bool | Literal["block"] = "block" if shuffle == "block" else bool(shuffle)
        self._drop_last, self._uneven = bool(drop_last), uneven
        self._nodes = whole(_NODES, node_groups, 1, MOST)
        if self._nodes > 1 and weights is not None:
            raise ValueError("weights draw samples from all shards, node_groups= gives each node its own: give one or the other")
        if 0 < self._n < self._nodes:
            raise ValueError(f"the dataset has {self._n:,} samples, not one for each of node_groups={self._nodes}")
        rounded_down = uneven == "drop" or drop_last
        #: The positions of each node.
        self._each = self._n // self._nodes if rounded_down else -(-self._n // self._nodes)
        self._blocks = _blocks(dataset) if shuffle == "block" or (shuffle and self._nodes > 1) else None
        if self._upcoming is not None and self._blocks is not None:
            self._upcoming.check(self._blocks, self._block_shards)
        elif self._upcoming is not None and not shuffle and weights is None:
            with suppress(ValueError):  # a subset in an order of its own
                self._blocks = _blocks(dataset)
        self._weights = None if weights is None else cumulative(_weights(weights, dataset))
        self._rank, self._world_size = rank, world_size
        self._generation: str | None = getattr(dataset, "generation", None)
        self._part: str | None = getattr(dataset, "part", None)
        self._seed = whole("seed", seed, 0, _WORD)
        self._epoch, self._position, self._used = 0, 0, False
        self._latest: Pass | None = None

    def is_of(self, dataset: Any) -> bool:
        """Was this made over these samples?"""
        found = len(dataset), getattr(dataset, "generation", None), getattr(dataset, "part", None)
        return found == (self._n, self._generation, self._part)

    def begin(self) -> Pass:
        """Begin an iteration: the rest of an epoch that was loaded, else the next epoch (one of which nothing was received is begun again).

        Asks for ranks now.  Raises ValueError where several ranks read in sequence and nothing says what is done about an uneven end.
        """
        epoch, node, steps = self._ahead()
        settings: dict[str, Any] = {"shuffle": self._shuffle, "blocks": self._blocks, "block_shards": self._block_shards, "weights": self._weights}
        order = Order(self._n, seed=self._seed, epoch=epoch, share=(node, self._nodes), **settings)
        self._latest = Pass(self._seed, epoch, order, steps, self._upcoming)
        self._epoch, self._position, self._used = epoch, steps.start, False
        return self._latest

    def received(self, run: Pass, position: int) -> None:
        """The consumer has what lies before `position` (`steps.after(step)`), or with `steps.start` a part of the first step.

        Says nothing once another iteration has begun, or an epoch or a state was set.
        """
        if run is self._latest:
            self._position, self._used = position, True

    def steps(self) -> Steps:
        """The steps of a whole epoch, whatever of it was received; `len()` of it is their number."""
        return replace(self._ahead()[2], start=0)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning unless a state in the middle of it was loaded."""
        epoch = whole("epoch", epoch, 0, _WORD)
        if epoch == self._epoch and not self._used:
            return
        self._epoch, self._position, self._used, self._latest = epoch, 0, False, None

    def state_dict(self, received: int | None = None) -> dict[str, Any]:
        """{"generation", "seed", "epoch", "position"}: where the latest iteration stands; the same on all ranks after the same step.

        And "part" of a part of a dataset, "node_groups" where there are several.

        received: batches that the user has of this iteration, where that is not what `received()` was told.
        At the end of an epoch it is the start of the next.
        """
        position = self._position
        if received is not None:
            run = self._latest
            count = whole("received", received, 0, 1 + (0 if run is None else len(run.steps)))
            if run is not None:
                position = run.steps.after(count - 1) if count else run.steps.start
        epoch = self._epoch
        if position >= self._each > 0:
            epoch, position = epoch + 1, 0
        state = {"generation": self._generation, "seed": self._seed, "epoch": epoch, "position": position * self._nodes}
        if self._nodes > 1:
            state[_NODES] = self._nodes
        return state if self._part is None else {**state, _PART: self._part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the state was taken, with its seed.  Nothing changes where it is refused.

        Raises ValueError for what is no such state, GenerationError (one too) for a state of another generation.
        """
        if not isinstance(state, Mapping) or set(state) - {_PART, _NODES} != set(_STATE):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"a state has the keys {list(_STATE)}, this one: {found}; give what state_dict() returned")
        generation = state["generation"]
        if generation is not None and not isinstance(generation, str):
            raise ValueError(f"the generation in a state is text or None, not {generation!r}")
        seed, epoch = (whole(f"the {name} in a state", state[name], 0, _WORD) for name in ("seed", "epoch"))
        position = whole("the position in a state", state["position"], 0)
        if generation != self._generation:
            remedy = "" if generation is None else f"open that one (MMapShardDataset(root, generation={generation!r})), or "
            message = f"the state was taken over generation {generation}, this dataset is of generation {self._generation}"
            raise GenerationError(f"{message}: {remedy}start anew without this state", expected=generation, found=self._generation)
        if state.get(_PART) != self._part:
            raise ValueError(
                f"the state was taken over another part of this dataset ({state.get(_PART) or 'all of it'}, this is {self._part or 'all of it'}): "
                "open the same split, or take the same subset, that it was taken over"
            )
        if position > self._n:
            raise ValueError(f"the state stands at position {position:,}, but the dataset has {self._n:,} samples: it was taken over another dataset")
        nodes = whole(f"{_NODES} in a state", state.get(_NODES, 1), 1, MOST)
        if position and nodes != self._nodes:
            raise ValueError(
                f"the state was taken in the middle of an epoch with {_NODES}={nodes}, here it is {self._nodes}, which divides the epoch otherwise: "
                f"go on with {_NODES}={nodes}, or from the end of an epoch"
            )
        if position % nodes:
            raise ValueError(f"the state stands at position {position:,}, which {_NODES}={nodes} does not divide: it is damaged")
        self._seed, self._epoch, self._position, self._used, self._latest = seed, epoch, position // nodes, False, None

    def _ahead(self) -> tuple[int, int, Steps]:
        """The epoch that the next iteration would be, this rank's node, and its steps."""
        rank, size = ranks(self._rank, self._world_size)
        if size % self._nodes:
            raise ValueError(f"{_NODES}={self._nodes} does not divide the {size} ranks: each node has as many")
        uneven = self._uneven
        if uneven is None:
            if size > 1 and not self._drop_last and not self._shuffle and self._weights is None:
                raise ValueError(
                    f"{size} ranks read in sequence, and at the end of an epoch they may not have as many samples each; say what is done about it: "
                    "uneven='mask' (evaluation: every sample exactly once, and a last element `valid` in each batch), "
                    "'wrap' (some samples come twice) or 'drop' (some are left out)"
                )
            uneven = "wrap"
        done = self._used or self._position >= self._each > 0
        epoch, start = (self._epoch + 1, 0) if done else (self._epoch, self._position)
        node, within = divmod(rank, size // self._nodes)
        own = (node + 1) * self._n // self._nodes - node * self._n // self._nodes
        settings: dict[str, Any] = {"rank": within, "world_size": size // self._nodes, "uneven": uneven, "drop_last": self._drop_last}
        settings["own"] = min(own, self._each) if self._n else None
        steps = Steps(self._each, self.batch_size, start=start, **settings)
        if start and not len(steps):  # loaded under another batch size: what is left would all be dropped
            epoch, steps = epoch + 1, Steps(self._each, self.batch_size, **settings)
        return epoch, node, steps


class ShardSampler(DistributedSampler[SampleIndex]):
    """Indices for a stock DataLoader, in the order and with the seeds of ShardLoader, divided among ranks, that can stop and go on anywhere.

        DataLoader(ds, batch_size=256, sampler=ShardSampler(ds, batch_size=256, shuffle=True))

    Step s takes the next world_size * batch_size samples of the epoch's order, rank r the r-th slice of them; all ranks have as many steps and as
    many samples in each.  Each iteration is the next epoch, and its indices carry seed and epoch, so that workers need not be told.
    A DistributedSampler by type: the indices of others are divided among the ranks once more, as by Lightning.

    batch_size: the DataLoader's; batches are those of ShardLoader then, and `state_dict(received=)` counts them.  None: sample by sample.
    shuffle: True for an order from (seed, epoch) alone; "block" for one that keeps to `block_shards` shards at a time.
    drop_last: leave out the last step where it is not whole; the place to say so, as the DataLoader's own is not known here.
    uneven: what is done where the ranks don't share evenly in the last step.  "wrap", the default of random orders, adds samples of the epoch's
        beginning; "drop" leaves out; "mask" adds, and the indices say which samples count.
    weights: a weight for each sample, (n,), or "balanced" for equally many of each of the dataset's `targets`: n samples are drawn with replacement.
    rank, world_size: by default those of `torch.distributed`, torchrun or Slurm when iteration begins; see `ranks`.
    node_groups: so many nodes, each of world_size / node_groups ranks in a row, and each with shards of its own in an epoch, other ones in the next.
        Nodes have as many samples; where one's share ends within a shard, two read that one.  A state in mid-epoch goes on with as many nodes only.

    Over a dataset with a cache `shuffle=True` means "block", and the shards of what comes next are brought while a window is read.

    Raises ValueError for arguments that don't fit.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        drop_last: bool = False,
        uneven: str | None = None,
        weights: Any = None,
        block_shards: int = 16,
        rank: int | None = None,
        world_size: int | None = None,
        node_groups: int = 1,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"ShardSampler needs a dataset, anything with a length, not {dataset!r}")
        settings: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "uneven": uneven, "weights": weights}
        settings |= {"block_shards": block_shards, "rank": rank, "world_size": world_size, "node_groups": node_groups}
        self._course = Course(dataset, 1 if batch_size is None else batch_size, **settings)
        self._counts = batch_size is not None

    def __iter__(self) -> Iterator[SampleIndex]:
        """Begins with the first index that is asked for, not before."""
        ranks_of_indices(self._course._rank, self._course._world_size)
        run = self._course.begin()
        at = run.steps.start
        for rows, flags, draws, after in _batches(run):
            batch = [SampleIndex(row, run.seed, run.epoch, flag, draw) for row, flag, draw in zip(rows, flags, draws, strict=False)]
            self._course.received(run, at)
            yield from batch[:-1]
            self._course.received(run, after)  # whoever has the last index has the batch
            yield from batch[-1:]
            at = after

    def __len__(self) -> int:
        """Indices of a whole epoch for this rank.  After `load_state_dict` in mid-epoch the next iteration gives those that are left of it."""
        ranks_of_indices(self._course._rank, self._course._world_size)
        steps = self._course.steps()
        last = len(steps) - 1
        return 0 if last < 0 else last * steps.batch_size + len(steps.positions(last)[0])

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning unless a state in the middle of it was loaded."""
        self._course.set_epoch(epoch)

    def state_dict(self, received: int | None = None) -> dict[str, Any]:
        """{"generation", "seed", "epoch", "position"}: where the latest iteration stands; the same on all ranks, under 200 bytes.

        received: the batches that came out of the DataLoader in this iteration.  Without it all whole batches that were handed out count, which is
        more: a DataLoader with workers fetches ahead.  (torchdata's StatefulDataLoader asks at the right time by itself.)
        """
        if received is not None and not self._counts:
            raise ValueError("received= counts batches: give ShardSampler the batch_size of the DataLoader")
        return self._course.state_dict(received)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the state was taken: exactly with what was not yet received, up to what "wrap" or "drop" does.

        Raises ValueError for what is no such state, GenerationError (one too) for a state of another generation.
        """
        self._course.load_state_dict(state)


def _batches(run: Pass) -> Iterator[tuple[list[int], Iterable[bool | None], Iterable[int], int]]:
    """The samples of each step, whether they count and the numbers of their draws (as many or more), and the position after it.

    The rows of many small steps are computed in one go.
    """
    steps, last, full = run.steps, len(run.steps) - 1, repeat(True if run.steps.uneven == "mask" else None)
    apart = steps.world_size * steps.batch_size
    for first, count in run.together():
        samples, draws = run.samples(first, count)
        for step, batch in enumerate(samples.tolist(), first):
            valid = steps.positions(last)[1] if step == last else None
            after = steps.after(last) if step == last else steps.start + (step + 1) * apart
            yield batch, full if valid is None else valid.tolist(), repeat(0) if draws is None else draws[step - first].tolist(), after


def _blocks(dataset: Sized) -> npt.NDArray[np.int64]:
    blocks = getattr(dataset, "blocks", None)
    if blocks is None:
        raise ValueError(f"shuffle='block' needs a dataset that knows its shards, such as MMapShardDataset, not {type(dataset).__name__}")
    return np.asarray(blocks(), np.int64)


def _weights(weights: Any, dataset: Sized) -> npt.NDArray[np.float64]:
    """Weights as float64 (n,)."""
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"weights must be a number for each sample, or 'balanced', not {weights!r}")
        targets = getattr(dataset, "targets", None)
        if targets is None:
            raise ValueError(f"weights='balanced' needs a dataset with `targets`, a class for each sample; {type(dataset).__name__} has none")
        out = balanced(targets)
    else:
        try:
            out = np.asarray(weights.detach().double().cpu() if isinstance(weights, torch.Tensor) else weights, np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"weights must be a number for each sample, or 'balanced', not {type(weights).__name__}; a sampler is given as sampler="
            ) from None
    if out.shape != (len(dataset),):
        raise ValueError(f"weights must be a number for each of the {len(dataset):,} samples, not of shape {out.shape}")
    return out


def _warn_of_subset(dataset: Any) -> None:
    """Warn of a Subset of torch over a dataset of ours: it makes plain numbers of our indices."""
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    if inner is not dataset and hasattr(inner, "generation"):
        message = "seed and epoch don't travel through torch.utils.data.Subset or random_split, so transforms would draw the same in every epoch"
        warnings.warn(f"{message}; use ds.subset(rows) or ds.random_split(lengths)", UserWarning, stacklevel=4)
