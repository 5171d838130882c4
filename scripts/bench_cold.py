"""How fast random batches come from a disk: ways to read a file that is not in memory against ShardLoader, in one run.

usage: python scripts/bench_cold.py [--dir DIR] [--rows 8192] [--read 6144] [--batch 256] [--rounds 5]

Makes a dataset of so many rows of 150 KB (random bytes, 1.2 GB) in a temporary folder in DIR, which says what disk is measured.  Before every run all
its files leave the page cache, after a sync, by posix_fadvise(DONTNEED), and mincore is asked whether they did: where they stay, nothing is measured.
A run reads --read random rows in batches and copies all their bytes; speeds are medians of the rounds, ratios medians of the ratios within a round.

What it does not show: a disk without a cache of its own (a virtual machine's host may hold what was evicted here), network file systems, other
processes that want the disk, and what small rows cost.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench_common import Table, evicted, interleaved, machine, noise, ratio, save_dataset

from mmcompile import MMapShardDataset, ShardLoader
from mmcompile.format.npy import ALIGN, libc

SHAPE = (3, 224, 224)
ROW = 3 * 224 * 224


class Files:
    """The shards of the dataset: evicted before each run, and opened or mapped anew in it."""

    def __init__(self, root: Path, shard: int) -> None:
        self.root, self.shard = root, shard
        self.paths = sorted((root / "shards").glob("image-*"))  # in any order: rows are drawn at random

    def evict(self) -> None:
        if (why := evicted((self.root / "shards").iterdir())) is not None:
            raise SystemExit(f"bench_cold.py: {why}")

    def maps(self, advice: int = mmap.MADV_NORMAL) -> list[np.ndarray]:
        out = []
        for path in self.paths:
            with open(path, "rb") as file:
                held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            held.madvise(advice)
            out.append(np.frombuffer(held, np.uint8, offset=ALIGN).reshape(-1, ROW))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--read", type=int, default=6144)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    shard = 1024
    if args.rows % shard or args.read % args.batch or not 0 < args.read <= args.rows:
        parser.error(f"--rows must be a multiple of {shard}, --read one of --batch and at most --rows")
    print(machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        root = Path(folder) / "set"
        nbytes = save_dataset(root, (noise(shard, SHAPE, k) for k in range(args.rows // shard)))
        files = Files(root, shard)
        measure(files, args, nbytes)


def measure(files: Files, args: argparse.Namespace, nbytes: int) -> None:
    rng = np.random.default_rng(0)
    out = np.empty((args.batch, ROW), np.uint8)
    pool = ThreadPoolExecutor(2)

    def batches() -> list[np.ndarray]:
        return list(rng.permutation(args.rows)[: args.read].reshape(-1, args.batch))

    def copied(maps: list[np.ndarray], rows: np.ndarray, into: np.ndarray) -> None:
        for i, row in enumerate(rows.tolist()):
            into[i] = maps[row // files.shard][row % files.shard]

    def mapped(advice: int = mmap.MADV_NORMAL) -> int:
        maps = files.maps(advice)
        for rows in batches():
            copied(maps, rows, out)
        return args.read

    def needed() -> int:
        maps = files.maps()

        def advise(rows: np.ndarray) -> None:
            for row in rows.tolist():
                address = maps[row // files.shard][row % files.shard].ctypes.data
                begin = address & -mmap.PAGESIZE
                libc().madvise(begin, address + ROW - begin, mmap.MADV_WILLNEED)

        wanted = batches()
        advise(wanted[0])
        for rows, following in zip(wanted, [*wanted[1:], None], strict=True):
            if following is not None:
                advise(following)
            copied(maps, rows, out)
        return args.read

    def read(threads: int) -> int:
        fds = [os.open(path, os.O_RDONLY) for path in files.paths]

        def part(k: int, rows: list[int]) -> None:
            for i in range(k, len(rows), threads):
                os.preadv(fds[rows[i] // files.shard], [out[i]], ALIGN + rows[i] % files.shard * ROW)

        for rows in batches():
            list(pool.map(part, range(threads), [rows.tolist()] * threads))
        for fd in fds:
            os.close(fd)
        return args.read

    def loaded(threads: int, engine: str, shuffle: bool | str = True) -> int:
        # an epoch of just these rows: what is read ahead beyond the last batch would not be counted
        dataset = MMapShardDataset(files.root, engine=engine).subset(np.sort(rng.permutation(args.rows)[: args.read]))
        return sum(len(batch) for batch in ShardLoader(dataset, args.batch, shuffle=shuffle, num_workers=threads))

    runs: dict[str, Callable[[], int]] = {
        "map alone": mapped,
        "MADV_RANDOM alone": lambda: mapped(mmap.MADV_RANDOM),
        "preadv, 1 thread": lambda: read(1),
        "preadv, 2 threads": lambda: read(2),
        "WILLNEED a batch ahead, map": needed,
        "ShardLoader, 1 thread": lambda: loaded(1, "mmap"),
        "ShardLoader, 2 threads": lambda: loaded(2, "mmap"),
        "ShardLoader, 2 threads, engine='pread'": lambda: loaded(2, "pread"),
        "ShardLoader, 2 threads, shuffle='block'": lambda: loaded(2, "mmap", "block"),
    }
    rates = interleaved(runs, args.rounds, before=files.evict)
    table = Table()
    table.title(
        f"cold: {args.rows:,} rows of 150 KB ({nbytes / 1e9:.1f} GB), random batches of {args.batch}, {args.read:,} rows a run, {args.rounds} rounds"
    )
    for name, values in rates.items():
        table.speed(name, statistics.median(values), "rows/s", ROW)
    plain = [name for name in runs if not name.startswith("ShardLoader")]
    best = max(plain, key=lambda name: statistics.median(rates[name]))
    for threads, s in ((1, ""), (2, "s")):
        name = f"ShardLoader, {threads} thread{s}"
        table.line(f"{name} / the best of these: {best}", ratio(rates, name, best), least=0.9)
    table.close()


if __name__ == "__main__":
    main()
