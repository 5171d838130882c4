"""Hides how a machine and a dataset are measured together in a short time, so that the settings of a loader can be chosen by figures.

The dataset given stays as it is, its epoch too, and so do torch's random numbers; nothing is written; all loaders, threads and worker
processes have ended when it returns or raises.
Per-sample transforms and batch_transform are called, as training calls them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from mmcompile.format.cpus import usable_cpus
from mmcompile.runtime.augment import Augment
from mmcompile.runtime.buffers import can_pin
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import device_of, free_bytes
from mmcompile.runtime.loader import ShardLoader
from mmcompile.runtime.pixels import PixelColumn
from mmcompile.runtime.tunechoice import (
    Candidate,
    Choice,
    Facts,
    Limit,
    Parts,
    advice_of,
    bottleneck_of,
    but_waited,
    choose,
    growing,
    limits_of,
    worth_a_round,
)
from mmcompile.runtime.tunedisk import Disk, cold_disk
from mmcompile.runtime.tuneparts import Sample, copy_of, ladder, measured_parts, memcpy, one_by_one, sample_of, stored_bytes, transfer
from mmcompile.runtime.tunetext import code, told
from mmcompile.runtime.tunetrial import Trials, Wish, make_loader

__all__ = ["Tuning", "tune"]

#: A dataset that takes more of the available memory than this is read from the disk in every epoch.
_STAYS = 0.8
#: Share of a device's free memory that a dataset may take for it to be worth saying that it fits.
_DEVICE = 0.6
#: Seconds that a batch may take in one thread for candidates to be measured with it; larger ones are measured with smaller batches.
_BATCH_S = 0.15
#: Seconds of a trial at most, and shares of the whole time: of one trial, of what a candidate may take with its start, of the disk, of reading the
#: sample, of memory and of the parts, and of seeing the choice beside steps.
_SLICE_S = 0.5
_SLICE, _TRIAL, _DISK, _READ, _MEMORY, _PARTS, _STEPS = 1 / 80, 0.25, 0.12, 0.15, 0.03, 0.03, 0.08
#: Share of the time that must be left for processes to be started: ending those that are still on their way takes a while too.
_START = 0.15
#: Seconds that the first candidate, which is the simplest, may take whatever the time: without any figures there is no choice.
_FIRST_S = 20.0
#: Rounds after which more would say little.
_ROUNDS = 15
#: Share of the time that a loop may wait beside steps, for a choice to keep up.
_WAITING = 0.05
#: Steps that must fit into the time for that.
_SEEN = 4


@dataclass(frozen=True)
class Tuning:
    """What was measured, and what follows.  `print(tuning)` tells it; `tuning.loader()` is the chosen loader.

    batch_bytes: of a batch as it is handed out.  measured_batch: samples of the batches that candidates were measured with.
    memcpy: threads -> bytes a second.  disk: cold, or why not.  parts: seconds of one thread for a sample.  transfer_bytes_per_s: to a CUDA device.
    candidates: in the order in which they were tried; choice is one of them.
    limits: what each part alone allows with the choice's workers, the one nearest its limit first.  bottleneck: what is in the way.
    keeps_up: with a step time, does training never wait?  waited: the share of the time that the choice was waited for beside such steps.
    lines: Python that makes the loader.
    """

    root: str
    samples: int
    batch_size: int
    measured_batch: int
    batch_bytes: int
    device: str
    cpus: int
    load: float
    seconds: float
    step_time_s: float | None
    measured_over: str
    memcpy: dict[int, float]
    disk: Disk
    transfer_bytes_per_s: float | None
    parts: Parts
    candidates: tuple[Candidate, ...]
    choice: Candidate
    reason: str
    keeps_up: bool | None
    waited: float | None
    bottleneck: str
    limits: tuple[Limit, ...]
    advice: tuple[str, ...]
    lines: tuple[str, ...]
    _dataset: MMapShardDataset = field(repr=False, compare=False)
    _wish: Wish = field(repr=False, compare=False)

    def loader(self, **more: Any) -> Any:
        """The chosen loader over the dataset that was tuned, shuffled: a ShardLoader, or torch's DataLoader with a ShardSampler.

        `more` are further arguments of it, as seed= or drop_last=, and win over what was chosen.
        """
        return make_loader(self._dataset, self._wish, self.choice, more)

    def to_json(self) -> dict[str, Any]:
        """The same as values for JSON, as `mmcompile tune --json` prints them."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("_")}
        known |= {name: asdict(known[name]) for name in ("disk", "parts")}
        known["memcpy"] = [{"threads": threads, "bytes_per_s": rate} for threads, rate in self.memcpy.items()]
        known["limits"] = [asdict(limit) for limit in self.limits]
        known["candidates"] = [_candidate_json(candidate) for candidate in self.candidates]
        known["choice"] = _candidate_json(self.choice)
        return {"command": "tune", **known, "advice": list(self.advice), "lines": list(self.lines)}

    def __str__(self) -> str:
        return "\n".join(told(self))


def tune(
    dataset: MMapShardDataset,
    *,
    batch_size: int = 256,
    step_time_s: float | None = None,
    device: str | torch.device | None = None,
    seconds: float = 40.0,
    augment: Augment | None = None,
    batch_transform: Callable[..., Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """Measure this machine with this dataset, and choose a loader and its settings: the smallest that is as good as the best.

    dataset: as training will use it, with its split, crop=, dtype= and transforms; a subset, windows or a torch Subset too.
    step_time_s: what training takes for a batch.  The choice is then the smallest setting that keeps up with it, and was seen to.
    device: where batches are to be; by default CUDA where there is one, else the CPU.
    seconds: about how long it may take, at least 1; candidates are measured in turns, and one that takes too long is reported as such.
    augment, batch_transform: of ShardLoader; a DataLoader has neither and is not tried then.
    progress: called with a line for each stage.

    Files are only read.  At most 256 MiB of clean pages of the dataset's own files are dropped from the page cache, and read again, to see what the
    disk gives.  With a cache, shards that are not here are brought, as reading them does, as far as time allows.
    Raises what ShardLoader raises for its arguments, ValueError for a dataset without samples, and what reading it or a transform raises.
    """
    given = ShardLoader(dataset, batch_size, augment=augment, batch_transform=batch_transform, device=device, rank=0, world_size=1)
    place = given.device if given.device is not None else device_of("cuda" if can_pin() else "cpu")
    if place.type == "meta":
        raise ValueError("device meta holds no data, so there is nothing to measure; give the device that training uses")
    if step_time_s is not None and not _is_number(step_time_s, 0.0):
        raise ValueError(f"step_time_s is in seconds, above 0, not {step_time_s!r}")
    if not _is_number(seconds, 0.99):
        raise ValueError(f"seconds must be at least 1, not {seconds!r}")
    if not len(given.dataset):
        raise ValueError(f"{given.dataset.root}: has no samples, so there is nothing to measure")
    step_time_s = None if step_time_s is None else float(step_time_s)
    wish = Wish(given.batch_size, place, augment, batch_transform)
    return _Run(given.dataset, wish, step_time_s, float(seconds), progress or (lambda line: None)).result()


class _Run:
    """One tuning, on its way."""

    def __init__(self, dataset: MMapShardDataset, wish: Wish, step_s: float | None, seconds: float, say: Callable[[str], None]) -> None:
        self.given, self.wish, self.step_s, self.seconds, self.say = dataset, wish, step_s, seconds, say
        self.begun = time.monotonic()
        self.load = os.getloadavg()[0]
        self.cpus = usable_cpus()
        self.filled = min(wish.batch_size, len(dataset))  # samples that a batch can have
        self.slice_s = min(_SLICE_S, _SLICE * seconds)
        self.candidates: list[Candidate] = []

    def left(self) -> float:
        return self.begun + self.seconds - time.monotonic()

    def result(self) -> Tuning:
        self.say("measuring memory and disk")
        copied = memcpy(_MEMORY * self.seconds)
        disk = cold_disk(copy_of(self.given), _DISK * self.seconds, self.wish.batch_size)
        sent = transfer(self.wish.device, _MEMORY * self.seconds)
        self.say("reading a sample of the dataset")
        sample, cold = self._sample()
        each_s = one_by_one(sample.dataset, self.wish, min(0.25, self.slice_s))
        size = min(self.wish.batch_size, max(1, int(_BATCH_S / each_s)))
        wish = replace(self.wish, batch_size=size)
        parts, batch_bytes = measured_parts(sample.dataset, wish, _PARTS * self.seconds)
        whole_bytes = batch_bytes * self.wish.batch_size // min(size, len(sample.dataset))
        trials = Trials(sample.dataset, wish, whole_bytes)
        self._climb(trials)
        needed = None if self.step_s is None else self.filled / self.step_s
        self._rounds(trials, needed)
        choice, waited = self._chosen(trials, needed)
        facts = _facts(self.given, self.wish, self.cpus, cold, disk)
        limits = limits_of(choice.candidate, parts, copied, facts, disk.random_samples_per_s)
        bottleneck = bottleneck_of(choice.candidate, limits, choice.keeps_up)
        return Tuning(
            root=str(self.given.root),
            samples=len(self.given),
            batch_size=self.wish.batch_size,
            measured_batch=size,
            batch_bytes=whole_bytes,
            device=str(self.wish.device),
            cpus=self.cpus,
            load=self.load,
            seconds=time.monotonic() - self.begun,
            step_time_s=self.step_s,
            measured_over=sample.note,
            memcpy=copied,
            disk=disk,
            transfer_bytes_per_s=sent,
            parts=parts,
            candidates=tuple(self.candidates),
            choice=choice.candidate,
            reason=choice.reason,
            keeps_up=choice.keeps_up,
            waited=waited,
            bottleneck=bottleneck,
            limits=limits,
            advice=advice_of(bottleneck, choice.candidate, facts, limits),
            lines=code(self.given, self.wish, choice.candidate),
            _dataset=self.given,
            _wish=self.wish,
        )

    def _sample(self) -> tuple[Sample, bool]:
        """What to measure over, and whether an epoch reads the disk: of a dataset that stays in memory some of it that is there."""
        dataset = copy_of(self.given)
        if dataset._resident is not None:
            return Sample(dataset, "all samples, on the device"), False
        stored, free = stored_bytes(dataset), free_bytes(torch.device("cpu"))
        if dataset.upcoming() is None and stored > _STAYS * free:
            return Sample(dataset, f"all samples as the disk gives them: {stored:,} bytes do not stay in the {free:,} of memory"), True
        return sample_of(dataset, min(len(dataset), 2 * self.wish.batch_size), free // 4, _READ * self.seconds), False

    def _climb(self, trials: Trials) -> None:
        """Try each kind of loader with ever more workers, until that adds nothing, and the best of each with more batches ahead."""
        kinds = ["ShardLoader"]
        if self.wish.augment is None and self.wish.batch_transform is None and self.given._resident is None:
            kinds.insert(0 if self.given._hooked else 1, "DataLoader")  # a transform that leaves no time for both wants processes
        for kind in kinds:
            pinned = kind == "DataLoader" and self.wish.cuda
            found: list[Candidate] = []
            for workers in (0, *ladder(self.cpus)):
                if (found and found[-1].failed) or not growing([c.samples_per_s or 0.0 for c in found]):
                    break  # what failed would fail with more workers too
                found.append(self._try(trials, Candidate(kind, workers, 2 if workers else None, pinned)))
            with_workers = [c for c in found if c.rates and c.num_workers]
            fastest = max((c.samples_per_s or 0.0 for c in self.candidates), default=0.0)
            if with_workers:
                best = max(with_workers, key=lambda c: c.samples_per_s or 0.0)
                plain = replace(best, rates=(), peak_bytes=None)
                if (best.samples_per_s or 0.0) > fastest / 2:
                    self._try(trials, replace(plain, prefetch_factor=4))
                    if pinned:
                        self._try(trials, replace(plain, pin_memory=False))

    def _try(self, trials: Trials, candidate: Candidate) -> Candidate:
        self.say(f"trying {candidate.name}" + (f", prefetch_factor={candidate.prefetch_factor}" if candidate.prefetch_factor else ""))
        left = self.left()
        if self.candidates and left <= (_START * self.seconds if candidate.loader == "DataLoader" and candidate.num_workers else 0.0):
            found = replace(candidate, failed="not tried: the time was over")
        else:
            limit_s = max(0.5, min(left, _TRIAL * self.seconds)) if self.candidates else _FIRST_S
            found = trials.run(candidate, self.slice_s, limit_s)
            if found.failed is not None and self.candidates and self.left() <= 0:
                found = replace(found, failed="not finished: the time was over")
        self.candidates.append(found)
        return found

    def _rounds(self, trials: Trials, needed: float | None) -> None:
        """Measure those that may be the best in turns, in another order each time, while there is time."""
        chance = random.Random(0)
        reserve = 0.0 if needed is None else _STEPS * self.seconds
        for turn in range(1, _ROUNDS):
            places = worth_a_round(self.candidates, needed)
            if len(places) < 2:
                break
            self.say(f"round {turn}: {len(places)} candidates")
            chance.shuffle(places)
            for place in places:
                if self.left() < reserve + self.slice_s:
                    return
                self.candidates[place] = trials.run(self.candidates[place], self.slice_s, max(0.5, self.left() - reserve))

    def _chosen(self, trials: Trials, needed: float | None) -> tuple[Choice, float | None]:
        """The choice; with a step time one that was seen to keep up, if there is one, and the share of the time that it was waited for."""
        refused: dict[Candidate, tuple[float, Choice]] = {}
        while True:
            try:
                choice = choose(self.candidates, self.filled, needed, list(refused))
            except ValueError:
                said = "; ".join(f"{c.name}: {c.failed}" for c in self.candidates)
                raise TimeoutError(f"{self.given.root}: no loader gave a batch in {self.seconds:.0f} s ({said}); give it more seconds") from None
            if needed is not None and not choice.keeps_up and refused:
                waited, choice = min(refused.values(), key=lambda found: found[0])
                return replace(choice, keeps_up=False, reason=but_waited(choice.candidate, needed)), waited
            if not choice.keeps_up or self.step_s is None:
                return choice, None
            step, for_s = self.step_s * min(trials.wish.batch_size, self.filled) / self.filled, _STEPS / 2 * self.seconds
            if step > for_s / _SEEN:  # the figures must do
                return choice, None
            self.say(f"seeing whether {choice.candidate.name} keeps up")
            waited = trials.waiting(choice.candidate, step, for_s)
            if waited <= _WAITING:
                return choice, waited
            refused[choice.candidate] = waited, choice


def _facts(dataset: MMapShardDataset, wish: Wish, cpus: int, cold: bool, disk: Disk) -> Facts:
    """What advice depends on."""
    columns = dataset._columns
    pictures = [column.base for column in columns if isinstance(column.base, PixelColumn)]
    stored = sum(dataset._reader.row_bytes(column.field) // (column.views or 1) for column in pictures)
    gain = None
    if disk.sequence_bytes_per_s is not None and disk.random_bytes_per_s:
        gain = disk.sequence_bytes_per_s / disk.random_bytes_per_s
    return Facts(
        row_bytes=sum(column.row_bytes for column in columns),
        cpus=cpus,
        cuda=wish.cuda,
        cuda_there=can_pin(),
        were_bytes=any(column.stored.is_floating_point and _were_bytes(dataset, column.field) for column in pictures),
        one_batch=wish.batch_size >= len(dataset),
        hooked=dataset._hooked,
        cold=cold,
        fits=wish.cuda and stored_bytes(dataset) <= _DEVICE * free_bytes(wish.device),
        crop_share=sum(column.row_bytes for column in pictures) / stored if stored else 1.0,
        sequence_gain=gain,
        torch_threads=torch.get_num_threads(),
    )


def _were_bytes(dataset: MMapShardDataset, name: str) -> bool:
    """Do all statistics of a field say that its sources had 8 bits a channel?"""
    found = [fields[name] for fields in dataset._reader.index.statistics.values() if fields.get(name) is not None]
    return bool(found) and all({part.get("depth") for part in entry.get("sums", ())} == {8} for entry in found)


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {**asdict(candidate), "rates": list(candidate.rates), "samples_per_s": candidate.samples_per_s}


def _is_number(value: Any, above: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and above < float(value) < 1e9
