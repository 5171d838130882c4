"""How good the choice of mmcompile.tune is: beside every setting of a full grid, measured after it in the same run.

usage: python scripts/bench_tune.py [--only records,images,floats,normalised,transform,step] [--seconds 40] [--rounds 9] [--batch 256]
       [--dir DIR]

The datasets are random numbers, written to a temporary folder (in DIR): 10^6 records of 20 bytes, 4,096 images of 224x224x3 uint8, the same as
float32 normalised when read, 256 of 3x512x512 float32 (batches of 16), and the images with a transform for each sample in Python (of 64).

Method: tune first, for --seconds.  Then the grid: ShardLoader with 0, 1, 2 and 4 threads and 1, 2, 4 and 8 batches ahead for each, DataLoader with 0,
1, 2 and 4 processes and 2 or 4 ahead.  All is warm.  In each round all settings follow one another in random order; each loader is made anew, its
first batches are dropped until it has its batches ahead and memory that it used before, and then whole batches are counted for half a second.  After
two rounds those below 0.7 of the best are left out.  Which is the best is said by every other round, and the ratio of the choice to it is the
median over the rounds between them: the best of many noisy figures is lucky, and would not be so again.  Settings without workers count as the best
only where tune would choose them, at up to 2 ms a batch: beside training, a batch that is made between two steps is time lost, which a loop that does
nothing else does not show.

`step` asks tune with a step time of four and of a half times what a batch takes, and runs the choice in a loop that sleeps so long in each step, as
if a device computed: what a loader may use of a CPU is then what training leaves.

What it does not show: cold data (tune measures the disk, and says when it is in the way), CUDA, other loads than those of the machine at that time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import IMAGENET, Table, machine, noise, save_dataset
from torch.utils.data import DataLoader

from mmcompile import MMapShardDataset, ShardLoader, ShardSampler, tune

Setting = tuple[str, int, int]
KINDS = ("records", "images", "floats", "normalised", "transform")
#: Samples of a batch at most, where one of 256 would take seconds, or gigabytes with many ahead.
LARGEST = {"floats": 16, "transform": 64}
#: Seconds that batches are counted for, and batches beyond those ahead that are dropped before.
COUNTED_S, FRESH = 0.5, 4
#: Seconds after which a loader that is slow counts from where it is.
WARMING_S = 2.0
#: Rounds after which settings below this share of the best are left out.
SOON, BEHIND = 2, 0.7
#: Seconds of a batch up to which a loader without workers is a choice.
INLINE_S = 0.002


class Slow:
    """What people write: flip, floats, normalise, noise; some hundred microseconds a sample."""

    def __init__(self) -> None:
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image.float().div_(255) - self.mean) / self.std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join((*KINDS, "step")))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dir", type=Path, help="where the datasets are written")
    args = parser.parse_args()
    print(machine())
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    table = Table()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for kind in args.only.split(","):
            root = Path(folder) / kind
            table.title(f"{kind}, {args.seconds:g} s of tune")
            ds = dataset(root, "images" if kind == "step" else kind)
            batch = min(args.batch, LARGEST.get(kind, args.batch))
            if kind == "step":
                beside_steps(ds, args, table)
            else:
                against_grid(ds, batch, args, table)
    table.close()


def dataset(root: Path, kind: str) -> MMapShardDataset:
    if kind == "records":
        save_dataset(root, (np.random.default_rng(k).standard_normal((500_000, 5)).astype(np.float32) for k in range(2)))
    elif kind == "floats":
        save_dataset(root, (np.random.default_rng(k).standard_normal((64, 3, 512, 512)).astype(np.float32) for k in range(4)))
    else:
        save_dataset(root, (noise(1024, (3, 224, 224), k) for k in range(4)), classes=10, normalize=kind == "normalised")
    return MMapShardDataset(root, transform=Slow() if kind == "transform" else None)


def grid() -> list[Setting]:
    threads = [("ShardLoader", workers, ahead) for workers in (1, 2, 4) for ahead in (1, 2, 4, 8)]
    processes = [("DataLoader", workers, ahead) for workers in (1, 2, 4) for ahead in (2, 4)]
    return [("ShardLoader", 0, 0), *threads, ("DataLoader", 0, 0), *processes]


def loader_of(ds: MMapShardDataset, batch: int, setting: Setting) -> Any:
    """Made here and not by tune, so that one may be wrong without the other."""
    name, workers, ahead = setting
    if name == "ShardLoader":
        return ShardLoader(ds, batch, shuffle=True, num_workers=workers, prefetch_factor=ahead or None)
    sampler = ShardSampler(ds, batch, shuffle=True)
    more: dict[str, Any] = {"prefetch_factor": ahead, "persistent_workers": True} if workers else {}
    return DataLoader(ds, batch, sampler=sampler, num_workers=workers, **more)


def batches(loader: Any) -> Iterator[int]:
    """The samples of batch after batch, epoch after epoch."""
    while True:
        for batch in loader:
            yield len(batch if isinstance(batch, torch.Tensor) else batch[0])


def rate(ds: MMapShardDataset, batch: int, setting: Setting) -> float:
    loader = loader_of(ds, batch, setting)
    stream = batches(loader)
    end = time.perf_counter() + WARMING_S
    for _ in range(setting[1] * setting[2] + FRESH):
        next(stream)
        if time.perf_counter() > end:
            break
    samples = count = 0
    begun = time.perf_counter()
    while count < 2 or time.perf_counter() - begun < COUNTED_S:
        samples += next(stream)
        count += 1
    found = samples / (time.perf_counter() - begun)
    stream.close()
    return found


def against_grid(ds: MMapShardDataset, batch: int, args: argparse.Namespace, table: Table) -> None:
    begun = time.perf_counter()
    tuning = tune(ds, batch_size=batch, seconds=args.seconds)
    took = time.perf_counter() - begun
    choice = (tuning.choice.loader, tuning.choice.num_workers, tuning.choice.prefetch_factor or 0)
    rates: dict[Setting, list[float]] = {setting: [] for setting in dict.fromkeys((*grid(), choice))}
    running = list(rates)
    chance = random.Random(0)
    for turn in range(args.rounds):
        chance.shuffle(running)
        for setting in running:
            rates[setting].append(rate(ds, batch, setting))
        if turn + 1 == SOON:
            best = max(statistics.median(rates[setting]) for setting in running)
            running = [s for s in running if s == choice or statistics.median(rates[s]) >= BEHIND * best]
    whole = {s: statistics.median(found[::2]) for s, found in rates.items() if len(found) == args.rounds}
    fair = {s: found for s, found in whole.items() if s[1] or batch / found <= INLINE_S}
    for setting, found in sorted(whole.items(), key=lambda item: -item[1])[:6]:
        table.speed(f"{said(setting)}{'  <- tune' if setting == choice else ''}", found, "samples/s")
    table.line("tune took", took, most=60.0, unit="s")
    for name, among in (("best of the grid", fair), ("best with those without workers", whole)):
        best_of = max(among, key=lambda s: among[s])
        reached = statistics.median(a / b for a, b in zip(rates[choice][1::2], rates[best_of][1::2], strict=True))
        table.line(f"choice / {name}", reached, least=0.95 if among is fair else None, note=said(best_of))


def said(setting: Setting) -> str:
    name, workers, ahead = setting
    return f"{name} {workers}" + (f" x {ahead}" if workers else "")


def beside_steps(ds: MMapShardDataset, args: argparse.Namespace, table: Table) -> None:
    each = statistics.median(rate(ds, args.batch, ("ShardLoader", 1, 2)) for _ in range(5))
    for times in (4.0, 0.5):
        step = times * args.batch / each
        tuning = tune(ds, batch_size=args.batch, step_time_s=step, seconds=args.seconds)
        loader = tuning.loader()
        waited = total = 0.0
        stream = batches(loader)
        next(stream)
        begun = time.perf_counter()
        while time.perf_counter() - begun < 5:
            time.sleep(step)
            asked = time.perf_counter()
            next(stream)
            waited += time.perf_counter() - asked
        total = time.perf_counter() - begun
        stream.close()
        note = said((tuning.choice.loader, tuning.choice.num_workers, tuning.choice.prefetch_factor or 0))
        what = f"share waited, step {step * 1000:.0f} ms, tune: {'will not wait' if tuning.keeps_up else 'will wait'}"
        table.line(what, waited / total, most=0.05 if tuning.keeps_up else None, unit="", note=note)


if __name__ == "__main__":
    main()
