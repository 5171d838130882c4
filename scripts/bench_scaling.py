"""How reading scales: with rows, threads and worker processes, batch sizes, dtypes, and from a disk against from memory.

usage: python scripts/bench_scaling.py [--dir DIR] [--rows 2048] [--rounds 7] [--json FILE] [--quick]

One thing varies at a time; the rest is images of 3 x 224 x 224 uint8, batches of 256, one thread of ShardLoader, random order, warm.  Each sweep has
a reference in the same rounds: numpy.take(out=) of the same rows from an array in memory, with the same batches, in the calling thread.  Each byte of
each batch is summed, and the rows of an epoch of each dataset are held against its source, byte for byte.  Cold: before each run the shards leave the
page cache (posix_fadvise, which needs no root), and mincore is asked whether they did; where they stay, nothing cold is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from bench_common import evicted, interleaved, noise, ratio, save_dataset
from bench_results import Part, run_part, touched
from torch.utils.data import DataLoader

from mmcompile import MMapShardDataset, ShardLoader

SHAPE = (3, 224, 224)
BATCH = 256
#: 64 bytes a row, as the records of bench_articles.py.
RECORD = (16,)
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
BATCHES = (32, 128, 256, 1024)
DTYPES = ("uint8", "float16", "bfloat16", "float32")
#: Rows a run reads at least, in whole epochs: a short one would measure the clock.
_LEAST_ROWS = 200_000
HIDDEN = (
    "a GPU, and copies to one",
    "more cores and more memory than this machine has",
    "network disks and object stores; a disk whose host may hold what was evicted here looks faster than it is",
    "other processes that want the disk or the memory",
)
Run = Callable[[], int]


def epochs(loader: Iterable[torch.Tensor], times: int = 1) -> Run:
    """Whole epochs of a dataset without labels."""
    return lambda: sum(touched(as_bytes(images)) for _ in range(times) for images in loader)


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    """numpy has no bfloat16."""
    return images.view(torch.uint8) if images.dtype == torch.bfloat16 else images


def taken(source: np.ndarray, batch: int, times: int = 1) -> Run:
    """The reference."""
    out, rng = np.empty((batch, *source.shape[1:]), source.dtype), np.random.default_rng(0)

    def run() -> int:
        for _ in range(times):
            order = rng.permutation(len(source))
            for at in range(0, len(order), batch):
                keys = order[at : at + batch]
                touched(np.take(source, keys, axis=0, out=out[: len(keys)], mode="clip"))
        return times * len(source)

    return run


class Scaling:
    def __init__(self, part: Part, folder: Path, rounds: int, rows: int) -> None:
        self.part, self.folder, self.rounds, self.rows = part, folder, rounds, rows
        self.images = noise(rows, SHAPE, 0)

    def dataset(self, name: str, source: np.ndarray, dtype: str | None = None) -> MMapShardDataset:
        """A dataset of some rows in shards of at most 256 MiB, held against them."""
        per_shard = max(1, (1 << 28) // source[0].nbytes)
        save_dataset(self.folder / name, (source[at : at + per_shard] for at in range(0, len(source), per_shard)), dtype=dtype)
        ds = MMapShardDataset(self.folder / name)
        found = b"".join(as_bytes(images).numpy().tobytes() for images in ShardLoader(ds, BATCH))
        self.part.checked(f"scaling, {name}: all rows", len(ds), found == source.tobytes())
        return ds

    def loader(self, ds: MMapShardDataset, batch: int = BATCH, threads: int = 1) -> ShardLoader:
        return ShardLoader(ds, batch, shuffle=True, num_workers=threads)

    def sweep(self, title: str, unit: str, runs: dict[str, Run], pairs: dict[str, str]) -> None:
        rates = interleaved(runs, self.rounds)
        self.part.table(title, unit, rates)
        for name, base in pairs.items():
            self.part.target(f"{name} / {base}", ratio(rates, name, base))

    def counts(self, most: int) -> None:
        runs: dict[str, Run] = {}
        pairs = {}
        for n in [n for n in COUNTS if n <= most]:
            source = np.random.default_rng(n).normal(size=(n, *RECORD)).astype(np.float32)
            ds, times = self.dataset(f"{n} records", source), max(1, min(_LEAST_ROWS, most) // n)
            name, base = f"{n:,} rows", f"{n:,} rows, np.take"
            runs |= {name: epochs(self.loader(ds, 1024), times), base: taken(source, 1024, times)}
            pairs[name] = base
        self.sweep("rows of 64 bytes, batches of 1,024", "rows/s", runs, pairs)

    def threads(self, ds: MMapShardDataset) -> None:
        cores = len(os.sched_getaffinity(0))
        runs = {f"ShardLoader, {k} threads": epochs(self.loader(ds, threads=k)) for k in (0, 1, 2, 4) if k < 4 or k <= cores}
        for k in (0, 1, 2):
            runs[f"DataLoader over the dataset, {k} workers"] = epochs(DataLoader(ds, BATCH, shuffle=True, num_workers=k, persistent_workers=k > 0))
        base = "np.take"
        runs[base] = taken(self.images, BATCH)
        self.sweep("threads and worker processes", "images/s", runs, {name: base for name in runs if name != base})

    def batches(self, ds: MMapShardDataset) -> None:
        runs: dict[str, Run] = {}
        pairs = {}
        for batch in [b for b in BATCHES if b <= len(ds)]:
            name, base = f"batches of {batch:,}", f"batches of {batch:,}, np.take"
            runs |= {name: epochs(self.loader(ds, batch)), base: taken(self.images, batch)}
            pairs[name] = base
        self.sweep("batch sizes", "images/s", runs, pairs)

    def dtypes(self) -> None:
        runs: dict[str, Run] = {}
        pairs = {}
        some = self.images[: max(16, self.rows // 4)]
        for dtype in DTYPES:
            source = some if dtype == "uint8" else (some / np.float32(255)).astype(np.float32 if dtype == "bfloat16" else dtype)
            if dtype == "bfloat16":
                source = torch.from_numpy(source).bfloat16().view(torch.int16).numpy().view(np.uint16)
            ds = self.dataset(dtype, source, dtype if dtype == "bfloat16" else None)
            name, base = dtype, f"{dtype}, np.take"
            runs |= {name: epochs(self.loader(ds, 64)), base: taken(source, 64)}
            pairs[name] = base
        self.sweep("dtypes on disk, given as they are, batches of 64", "images/s", runs, pairs)

    def cold(self, root: Path) -> None:
        """Nothing may have the files mapped any more."""
        files = sorted((root / "shards").iterdir())
        title = f"from the disk, {self.rows:,} random rows of 150 KB"

        def opened(engine: str) -> int:
            return epochs(ShardLoader(MMapShardDataset(root, engine=engine), BATCH, shuffle=True, num_workers=2))()

        runs = {"warm": lambda: opened("mmap")}
        rates = interleaved(runs, self.rounds)
        if (left := evicted(files)) is not None:
            self.part.absent(title, left)
            self.part.table(title, "images/s", rates)
            return
        some = {"cold, engine='mmap'": lambda: opened("mmap"), "cold, engine='pread'": lambda: opened("pread")}
        rates |= interleaved(some, min(3, self.rounds), before=lambda: evicted(files))
        self.part.table(title, "images/s", rates)
        for name in some:
            reached = statistics.median(rates[name]) / statistics.median(rates["warm"])
            self.part.target(f"{name} / warm", reached)


def measure(args: argparse.Namespace, folder: Path) -> Part:
    most = args.rows if args.quick else COUNTS[-1]
    settings = {"rows": args.rows, "records": most, "batch": BATCH, "rounds": args.rounds}
    part = Part("scaling", args.quick, settings, HIDDEN)
    scaling = Scaling(part, folder, args.rounds, args.rows)
    scaling.counts(max(COUNTS[0], most))
    ds = scaling.dataset("images", scaling.images)
    scaling.threads(ds)
    scaling.batches(ds)
    scaling.dtypes()
    root = ds.root
    del ds
    scaling.cold(root)
    return part


if __name__ == "__main__":
    run_part(__doc__ or "", 2048, 64, measure)
