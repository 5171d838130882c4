"""How well the orders of an epoch mix rows that are sorted by class, how many shards they touch, and what they cost.

usage: python scripts/measure_order.py [--out OUT [--split SPLIT] | --rows N --classes C --shard-rows R] [--windows 1 4 16 64 256] [--batch 256]

Without OUT it takes N rows in C classes of equal size, sorted by class, in shards of R rows; no dataset is needed, as an order is made of numbers
alone.  With OUT it takes the rows, shards and labels of a compiled dataset.

A line for each order: none, `shuffle="block"` with windows of so many shards, `shuffle=True`, and numpy's random permutation as the measure of what
good mixing is.  The columns:
  travel     |position - row| / n, mean and median; of a random permutation 1/3 and 0.293
  classes    how many different classes a batch holds, mean; `even` is what is expected of random batches
  entropy    of the classes in a batch in bits, mean
  shards     how many different shards a batch, and a stretch of 100 batches, touch, mean
  ns a row   time for the order itself, whole epoch, asked for a batch or for 4,096 positions at a time, with what is made anew for each window;
             the least of three epochs

What it does not show: reading (scripts/bench_read.py does), what mixing does to training, and orders of several ranks at once: all ranks together
take one batch after the other from the same order, so a step of W ranks is mixed as a batch W times as large.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np

from mmcompile.runtime.order import Order

STRETCH = 100
BLOCK = 4096


def even_classes(labels: np.ndarray, batch: int) -> float:
    """The expected number of different classes in `batch` rows drawn without replacement."""
    n = len(labels)

    def ways(rows: int) -> float:  # the logarithm of how many batches can be made of so many rows
        return math.lgamma(rows + 1) - math.lgamma(rows - batch + 1)

    counts = np.unique(labels, return_counts=True)[1].tolist()
    return sum(1.0 if n - count < batch else 1 - math.exp(ways(n - count) - ways(n)) for count in counts)


def mixing(labels: np.ndarray, batches: np.ndarray) -> tuple[float, float]:
    """The mean number of classes in a batch and the mean entropy of a batch's classes in bits; batches are rows (batches, batch)."""
    kinds, bits = [], []
    for rows in batches:
        counts = np.unique(labels[rows], return_counts=True)[1]
        share = counts / counts.sum()
        kinds.append(len(counts))
        bits.append(-(share * np.log2(share)).sum())
    return float(np.mean(kinds)), float(np.mean(bits))


def touched(blocks: np.ndarray, rows: np.ndarray, length: int) -> float:
    """The mean number of different shards in stretches of `length` positions."""
    shards = np.sort((np.searchsorted(blocks, rows, side="right") - 1)[: len(rows) // length * length].reshape(-1, length), axis=1)
    return float((1 + (np.diff(shards, axis=1) != 0).sum(1)).mean())


def cost(order: Order, block: int) -> float:
    """Nanoseconds a row over an epoch: the least of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for at in range(0, len(order), block):
            order.rows(np.arange(at, min(at + block, len(order))))
        times.append(time.perf_counter() - start)
    return min(times) / len(order) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--split")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--shard-rows", type=int, default=1000)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out is None:
        n = args.rows
        labels = np.arange(n) * args.classes // max(1, n)
        blocks = np.append(np.arange(0, n, args.shard_rows), n)
    else:
        from mmcompile import MMapShardDataset  # torch is needed for a real dataset alone

        ds = MMapShardDataset(args.out, split=args.split)
        if ds.targets is None:
            parser.error(f"{args.out}: has no labels to mix")
        n, labels, blocks = len(ds), ds.targets, ds.blocks()
    stretch = STRETCH * args.batch
    if n < stretch:
        parser.error(f"needs at least {STRETCH} batches of {args.batch} rows, found {n} rows: lower --batch")

    orders: dict[str, Order | None] = {"shuffle=False": Order(n)}
    for size in args.windows:
        orders[f'shuffle="block", {size}'] = Order(n, seed=args.seed, shuffle="block", blocks=blocks, block_shards=size)
    orders |= {"shuffle=True": Order(n, seed=args.seed, shuffle=True), "numpy's permutation": None}

    print(f"{n:,} rows in {len(np.unique(labels)):,} classes and {len(blocks) - 1:,} shards, batches of {args.batch}")
    print(f"random batches hold {even_classes(labels, args.batch):.1f} classes (even)\n")
    print(f"{'':<22}{'travel':>14}{'classes':>9}{'of even':>9}{'entropy':>9}{'shards':>8}{f'in {STRETCH}':>9}{'ns a row':>10}{f'by {BLOCK:,}':>10}")
    at = np.arange(n)
    for name, order in orders.items():
        rows = np.random.default_rng(args.seed).permutation(n) if order is None else order.rows(at)
        far = np.abs(rows - at) / n
        kinds, bits = mixing(labels, rows[: n // args.batch * args.batch].reshape(-1, args.batch))
        shards, many = touched(blocks, rows, args.batch), touched(blocks, rows, stretch)
        times = f"{'-':>10}{'-':>10}" if order is None else f"{cost(order, args.batch):>10.0f}{cost(order, BLOCK):>10.0f}"
        line = f"{name:<22}{far.mean():>7.3f}{np.median(far):>7.3f}{kinds:>9.1f}{kinds / even_classes(labels, args.batch):>9.2f}{bits:>9.2f}"
        print(f"{line}{shards:>8.1f}{many:>9.1f}{times}")


if __name__ == "__main__":
    main()
