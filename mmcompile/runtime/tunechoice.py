"""Hides how measured figures become a choice: which setting, why, what is in the way, and what to change.  Pure functions over numbers.

A candidate is compared with another round by round, as the rounds of all are interleaved: what a busy machine did to a round it did to both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "Choice", "Facts", "Limit", "Parts"]
__all__ += ["advice_of", "bottleneck_of", "but_waited", "choose", "growing", "limits_of", "worth_a_round"]

#: Candidates this near to the best are as good as it: of these the smallest is taken.  As the noise says, from 2 % to 4 %, so that with what the
#: noise hides the choice stays within 5 %.
_NEAR, _FAR = 0.02, 0.04
#: More workers must add so much to the throughput for more to be tried.
_GROWTH = 1.05
#: With a known step time a loader must be so much faster than training, as no machine is always as fast as it was just now.
_MARGIN = 1.25
#: Without workers batches are made between steps.  Nobody notices one that takes such a share of a step, or where none is known so many seconds.
_INLINE, _INLINE_S = 0.02, 0.002
#: Candidates below this share of the best after one round, two, … are not looked at again: the more rounds, the less is noise.
_STAYS = (0.3, 0.4, 0.5, 0.8, 0.85, 0.9)
#: Of those that keep up with training so many of the smallest are measured again.
_SMALLEST = 2
#: Where no part is used more than this, none of them is in the way.
_BUSY = 0.5


@dataclass(frozen=True)
class Candidate:
    """A loader with its settings, and what it did: samples a second in each round (none where it failed), and memory that it took at most.

    The first figure of `rates` is of a first look, in which each had its turn; those of round k stand at the same place for all.
    """

    loader: str
    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool = False
    rates: tuple[float, ...] = ()
    peak_bytes: int | None = None
    failed: str | None = None

    @property
    def samples_per_s(self) -> float | None:
        """The median over the rounds; None where there are none."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def ahead(self) -> int:
        """Batches that are held beside the one handed out."""
        return self.num_workers * (self.prefetch_factor or 0)

    @property
    def name(self) -> str:
        workers = "processes" if self.loader == "DataLoader" else "threads"
        one = {"processes": "process", "threads": "thread"}[workers]
        return f"{self.loader} with {self.num_workers or 'no'} {'workers' if not self.num_workers else one if self.num_workers == 1 else workers}"


@dataclass(frozen=True)
class Parts:
    """Seconds that one thread spends on a sample, by what it does; `loop_s` is what is left: Python, once a batch."""

    gather_s: float = 0.0
    convert_s: float = 0.0
    transform_s: float = 0.0
    transfer_s: float = 0.0
    loop_s: float = 0.0


@dataclass(frozen=True)
class Limit:
    """What one part alone would allow with the chosen workers, in samples a second, and the share of that which the choice reaches."""

    part: str
    samples_per_s: float
    used: float


@dataclass(frozen=True)
class Choice:
    """The setting chosen, the fastest of all, and the paired ratio of the first to the second.

    keeps_up: does training never wait?  None where no step time was given.
    """

    candidate: Candidate
    best: Candidate
    share: float
    keeps_up: bool | None
    reason: str


@dataclass(frozen=True)
class Facts:
    """What advice depends on: how the dataset is stored and read.

    row_bytes are those read of a sample, crop_share how much of an image's bytes crop= keeps (1: all); fits: would all of it fit on the device?
    cuda: is it to CUDA, and cuda_there: could it be?  were_bytes: are the stored floats made of 8-bit pictures?  one_batch: is that all of an epoch?
    torch_threads: those that one operation of torch uses in this process.
    """

    row_bytes: int
    cpus: int
    cuda: bool = False
    cuda_there: bool = False
    were_bytes: bool = False
    one_batch: bool = False
    hooked: bool = False
    cold: bool = False
    fits: bool = False
    crop_share: float = 1.0
    sequence_gain: float | None = None
    torch_threads: int = 1


def _effort(candidate: Candidate) -> tuple[float, bool, int, bool]:
    """What a setting asks of a machine, to sort by.  No workers is no help: batches are then made while nothing else goes on."""
    return (candidate.num_workers or 1.5, candidate.loader == "DataLoader", candidate.prefetch_factor or 0, candidate.pin_memory)


def _pairs(one: Candidate, other: Candidate) -> list[float]:
    return [a / b for a, b in zip(one.rates, other.rates, strict=False)]


def against(one: Candidate, other: Candidate) -> float:
    """The median of the ratios within the rounds that both took part in."""
    return statistics.median(_pairs(one, other))


def _allowed(one: Candidate, other: Candidate) -> float:
    """How far below the best counts as the same: the noise of the median of the pairs, within bounds."""
    pairs = sorted(_pairs(one, other))
    if len(pairs) < 4:
        return _NEAR
    spread = (pairs[-1 - len(pairs) // 4] - pairs[len(pairs) // 4]) / 2
    noise: float = spread / len(pairs) ** 0.5
    return min(_FAR, max(_NEAR, noise))


def growing(rates: Sequence[float]) -> bool:
    """Is it worth trying more workers, after these rates with ever more of them?  Two steps that add nothing end it."""
    if len(rates) < 3:
        return True
    return max(rates[-2:]) > _GROWTH * max(rates[:-2])


def worth_a_round(candidates: Sequence[Candidate], needed_per_s: float | None = None) -> list[int]:
    """The places of those that may still turn out to be the best, or the smallest that gives what training needs."""
    done = [k for k, c in enumerate(candidates) if c.rates and c.failed is None]
    if not done:
        return []
    most = max(len(candidates[k].rates) for k in done)
    running = [k for k in done if len(candidates[k].rates) == most]
    best = max(running, key=lambda k: statistics.median(candidates[k].rates))
    least = _STAYS[min(most, len(_STAYS)) - 1]
    enough = [k for k in running if needed_per_s is not None and _keeps_up(candidates[k], needed_per_s)]
    smallest = sorted(enough, key=lambda k: _effort(candidates[k]))[:_SMALLEST]
    return [k for k in running if k in smallest or against(candidates[k], candidates[best]) >= least]


def choose(candidates: Sequence[Candidate], batch_size: int, needed_per_s: float | None = None, refused: Sequence[Candidate] = ()) -> Choice:
    """The smallest setting that is as good as the best, or where training needs only so many samples a second, the smallest that gives them.

    refused: settings that turned out not to keep up, whatever their figures.  Raises ValueError where nothing was measured.
    """
    done = sorted((c for c in candidates if c.rates and c.failed is None), key=_effort)
    if not done:
        raise ValueError("no candidate was measured")
    fastest = max(done, key=lambda c: (len(c.rates) > 1, c.samples_per_s or 0.0))
    if needed_per_s is not None:
        for candidate in done:
            if candidate not in refused and _keeps_up(candidate, needed_per_s):
                rate = candidate.samples_per_s or 0.0
                reason = f"the smallest setting that keeps up: {rate:,.0f} samples/s where training takes {needed_per_s:,.0f}"
                return Choice(candidate, fastest, against(candidate, fastest), True, reason)
    # without workers a batch is made while training stands still: that counts unless it takes next to nothing
    apart = [c for c in done if c.num_workers or batch_size / (c.samples_per_s or 1.0) <= _INLINE_S]
    if needed_per_s is not None or not apart:
        apart = [c for c in done if c.num_workers] or done
    best = max(apart, key=lambda c: (len(c.rates) > 1, c.samples_per_s or 0.0))
    chosen = next(c for c in apart if c is best or against(c, best) >= 1 - _allowed(c, best))
    share = against(chosen, best)
    fastest_of = "the fastest with workers" if best.num_workers and not fastest.num_workers else "the fastest"
    if chosen is best:
        most = max((c.num_workers for c in done if c.loader == best.loader), default=0)
        reason = fastest_of + (f", and {most} workers add nothing" if most > max(1, best.num_workers) else "")
    else:
        reason = f"the smallest setting within {max(0.01, 1 - share):.0%} of {fastest_of} ({best.name}{_ahead(best)})"
    if not chosen.num_workers and not any(c.num_workers for c in done):
        reason += "; none with workers was measured"
    elif not chosen.num_workers:
        reason += "; a batch takes next to nothing, and handing it over from a worker more"
    elif not fastest.num_workers:
        reason += f"; without workers, which gave {fastest.samples_per_s:,.0f} samples/s, training would stand still for each batch"
    return Choice(chosen, fastest, against(chosen, fastest), None if needed_per_s is None else False, reason)


def but_waited(candidate: Candidate, needed_per_s: float) -> str:
    """The reason for a choice that keeps up by its figures, and beside training's steps was waited for, as were all others."""
    rate = candidate.samples_per_s or 0.0
    return (
        f"it gives {rate:,.0f} samples/s alone, where training takes {needed_per_s:,.0f}; beside steps, of all such settings it was waited for least"
    )


def _ahead(candidate: Candidate) -> str:
    return f", prefetch_factor={candidate.prefetch_factor}" if candidate.prefetch_factor not in (None, 2) else ""


def _keeps_up(candidate: Candidate, needed_per_s: float) -> bool:
    rate = candidate.samples_per_s or 0.0
    return rate * _INLINE >= needed_per_s if not candidate.num_workers else rate >= _MARGIN * needed_per_s


def _memory(memcpy: dict[int, float], threads: int) -> float:
    """Bytes a second that so many threads copy: as measured with the next number of threads at or below."""
    return memcpy[max(k for k in memcpy if k <= max(1, threads))]


def limits_of(choice: Candidate, parts: Parts, memcpy: dict[int, float], facts: Facts, disk_per_s: float | None = None) -> tuple[Limit, ...]:
    """What each part alone would allow with the workers of the choice, the one nearest its limit first.

    memcpy: threads -> bytes a second.  disk_per_s: rows that a cold disk gives, counted only where the dataset does not stay in memory.
    """
    threads = max(1, min(choice.num_workers, facts.cpus))
    scale = _memory(memcpy, threads) / memcpy[1]
    in_loop = choice.loader == "ShardLoader" or not choice.num_workers
    allowed = {
        "memory": _memory(memcpy, threads) / max(1, facts.row_bytes),
        "gather": scale / parts.gather_s if parts.gather_s else None,
        "convert": threads / parts.convert_s if parts.convert_s else None,
        "transform": (1 if in_loop else threads) / parts.transform_s if parts.transform_s else None,
        "transfer": 1 / parts.transfer_s if parts.transfer_s else None,
        "loop": 1 / parts.loop_s if parts.loop_s else None,
        "disk": disk_per_s if facts.cold else None,
    }
    rate = choice.samples_per_s or 0.0
    found = [Limit(name, limit, rate / limit) for name, limit in allowed.items() if limit]
    return tuple(sorted(found, key=lambda limit: -limit.used))


def bottleneck_of(choice: Candidate, limits: Sequence[Limit], keeps_up: bool | None) -> str:
    """What is in the way: "consumer" where training is, a part, or "processes": what it costs to bring batches from one process to another."""
    if keeps_up:
        return "consumer"
    nearest = next((limit for limit in limits if limit.part != "memory"), None)  # gathering is what uses memory
    if choice.loader == "DataLoader" and choice.num_workers and (nearest is None or nearest.used < _BUSY):
        return "processes"
    return "loop" if nearest is None else nearest.part


def advice_of(bottleneck: str, choice: Candidate, facts: Facts, limits: Sequence[Limit] = ()) -> tuple[str, ...]:
    """What would make it faster, the most likely first; `limits` are those of the choice."""
    if bottleneck == "consumer":
        return ()
    smaller = []
    if facts.were_bytes and (facts.cuda or bottleneck == "disk"):  # in memory, without a device that computes, floats are the faster ones
        smaller.append("store uint8: `--dtype uint8 --normalize ...` gives training the same floats from a quarter of the bytes")
    if facts.crop_share < 0.9:
        smaller.append(f"crop when building, not when reading: {facts.crop_share:.0%} of each stored image is used (--crop)")
    resident = ["keep the dataset on the device: ds.to_device(...) holds all of it"] if facts.fits and facts.cuda and not facts.hooked else []
    if bottleneck == "disk":
        order = []
        if facts.sequence_gain is not None and facts.sequence_gain >= 2:
            gain = f"this disk is {facts.sequence_gain:.1f} times as fast in sequence"
            order = [f"{gain}: shuffle='block', or build with `--order shuffled` and read in sequence"]
        more = "a faster disk, or as much memory as the dataset takes"
        return (*smaller, *order, *resident, more)
    if bottleneck == "transform":
        out = []
        if facts.hooked:
            out.append("crops and flips: ShardLoader(augment=Augment(...)) cuts whole batches in the gather; the rest of them: batch_transform=")
            out.append("what is the same in every epoch belongs into the build (`--transform`, `--views K` for random crops)")
            if choice.loader == "DataLoader" and choice.num_workers >= facts.cpus:
                out.append(f"more CPUs: all {facts.cpus} transform")
            if facts.torch_threads > 1:  # also where the choice is worker processes, which have one each: others may then be better
                out.append(
                    "steps of torch on one sample may be slowed by its own threads: torch.set_num_threads(1) first in the script, and tune again"
                )
        else:
            out.append("batch_transform runs in the loop's own thread: give it a device, or larger steps of torch in place of many small ones")
        return tuple(out)
    if bottleneck == "convert":
        there = (
            [] if facts.cuda or not facts.cuda_there else ["let the device compute the numbers: ShardLoader(device='cuda') sends the stored bytes"]
        )
        stored = "store what training takes: a float --dtype needs no conversion, but more disk and memory (bfloat16 half of float32's)"
        return (*there, stored, *resident)
    if bottleneck == "transfer":
        return (*smaller, *resident) or ("larger batches",)
    if bottleneck == "processes":
        if facts.hooked:
            return ("what ShardLoader can do in its gather (augment=, batch_transform=) needs no worker processes",)
        return ("ShardLoader's threads hand batches over without a copy",)
    if bottleneck == "loop":
        larger = () if facts.one_batch else ("larger batches: what is left is Python, once a batch",)
        return (*larger, *resident) or ("nothing to change: a batch is all that there is",)
    if limits and limits[0].used < _BUSY:
        return (*smaller, *resident, "no part is near its limit: the rest is handing batches over, for which larger ones help, or other work here")
    return (*smaller, *resident) or ("nothing to change: it is near what this machine's memory gives",)
