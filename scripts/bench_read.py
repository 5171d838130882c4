"""How fast a compiled dataset is read, against the plain Pillow + numpy + DataLoader way, in one run.

usage: python scripts/bench_read.py [--raw RAW --out OUT] [--samples 1000] [--batch 256] [--rounds 7] [--workers 0]

Without RAW and OUT it makes JPEGs in a temporary folder and compiles them (resize 256, crop 224).  With them, RAW is a folder of class folders and
OUT was built from it with these options.

Method: all rows run in each round, one after another, in random order of samples, the same for all rows of a round; the table shows medians over
the rounds and the median of the ratios within a round.  Everything is warm: all pages were read before the first round.  Each row copies every byte
that it claims to have read, except the one that says so; the plain row reads a quarter of the samples, the others all.

What it does not show: cold disks, several processes reading at once, augmentation, moving to a device, other image sizes.  "ds[i] and a copy of its
bytes" copies into one small buffer that stays in the cache, so it can pass the memcpy of whole batches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from mmcompile import MMapShardDataset, Preprocess, build

SIZE, CROP = 256, 224


class PlainFolder(Dataset):
    """What people write before they compile: open, convert, resize, crop, to a uint8 tensor, for each sample in each epoch."""

    def __init__(self, raw: Path) -> None:
        classes = sorted(p for p in raw.iterdir() if p.is_dir())
        self.items = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[i]
        with Image.open(path) as file:
            image = file.convert("RGB")
        width, height = image.size
        short = min(width, height)
        image = image.resize((SIZE * width // short, SIZE * height // short), Image.Resampling.BILINEAR)
        left, top = round((image.width - CROP) / 2), round((image.height - CROP) / 2)
        pixels = np.array(image.crop((left, top, left + CROP, top + CROP)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label


class PlainMemmap(Dataset):
    """One array of all pixels, mapped, read sample by sample with a copy each: the usual first step away from image files."""

    def __init__(self, path: Path, labels: np.ndarray) -> None:
        self.rows, self.labels = np.load(path, mmap_mode="r"), labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.array(self.rows[i])), int(self.labels[i])


def make_raw(raw: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(samples):
        folder = raw / f"class{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i:06d}.jpg", quality=90)


def drain(loader: DataLoader, limit: int) -> int:
    seen = 0
    for images, _ in loader:
        seen += len(images)
        if seen >= limit:
            break
    return seen


def rows_of(ds: MMapShardDataset, plain: PlainFolder, memmap: PlainMemmap, batch: int, workers: int) -> dict[str, Callable[[list[int]], int]]:
    """Name -> what reads samples in the order given and returns how many it read."""
    whole = np.array(memmap.rows)
    recycled = np.empty((batch, *whole.shape[1:]), whole.dtype)
    source, one = whole[:batch].copy(), np.empty(whole.shape[1:], whole.dtype)

    def stock(dataset: Dataset, share: int) -> Callable[[list[int]], int]:
        return lambda order: drain(DataLoader(dataset, batch_size=batch, sampler=order[: len(order) // share], num_workers=workers), len(order))

    def batches(read: Callable[[list[int]], object]) -> Callable[[list[int]], int]:
        def run(order: list[int]) -> int:
            full = len(order) // batch * batch
            for at in range(0, full, batch):
                read(order[at : at + batch])
            return full

        return run

    def views(order: list[int]) -> int:
        for i in order:
            ds[i]
        return len(order)

    def copies(order: list[int]) -> int:
        for i in order:
            np.copyto(one, ds[i][0].numpy())
        return len(order)

    return {
        "plain: DataLoader over image files": stock(plain, 4),
        "DataLoader over np.load(mmap_mode='r')[i]": stock(memmap, 1),
        "DataLoader over MMapShardDataset": stock(ds, 1),
        "ds[list]": batches(lambda keys: ds[keys]),
        "np.take, fresh": batches(lambda keys: np.take(whole, keys, axis=0)),
        "np.take, recycled": batches(lambda keys: np.take(whole, keys, axis=0, out=recycled, mode="clip")),
        "memcpy, recycled": batches(lambda keys: np.copyto(recycled, source)),
        "ds[i] and a copy of its bytes": copies,
        "ds[i] alone (a view, no byte is read)": views,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        raw, out = args.raw or Path(scratch) / "raw", args.out or Path(scratch) / "out"
        if args.raw is None:
            make_raw(raw, args.samples)
        if args.out is None:
            build(raw, out, preprocess=Preprocess(resize=SIZE, crop=CROP))
        ds = MMapShardDataset(out, dtype=torch.uint8)
        if ds.shape != (3, CROP, CROP) or len(ds) < args.batch:
            parser.error(f"{out}: needs at least {args.batch} samples of (3, {CROP}, {CROP}), found {len(ds)} of {ds.shape}")
        np.save(Path(scratch) / "all.npy", ds[:][0].contiguous().numpy())
        rows = rows_of(ds, PlainFolder(raw), PlainMemmap(Path(scratch) / "all.npy", ds.targets), args.batch, args.workers)
        rates: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(args.rounds + 1):  # the first round warms caches and is not counted
            order = np.random.default_rng(turn).permutation(len(ds)).tolist()
            for name, run in rows.items():
                start = time.perf_counter()
                count = run(order)
                if turn:
                    rates[name].append(count / (time.perf_counter() - start))
    print(f"{len(ds):,} images of 3 x {CROP} x {CROP} uint8, batch {args.batch}, {args.workers} workers, {torch.get_num_threads()} torch threads,")
    print(f"warm, random order, medians of {args.rounds} interleaved rounds\n")
    base = next(iter(rates))
    print(f"{'':<44}{'images/s':>12}{'GB/s':>8}{'times plain':>13}{'of memcpy':>11}")
    for name, values in rates.items():
        speed = statistics.median(values)
        plain = statistics.median(a / b for a, b in zip(values, rates[base], strict=True))
        copy = statistics.median(a / b for a, b in zip(values, rates["memcpy, recycled"], strict=True))
        read = "alone" not in name
        moved = f"{speed * 3 * CROP * CROP / 1e9:>8.2f}" if read else f"{'-':>8}"
        print(f"{name:<44}{speed:>12,.0f}{moved}{plain:>12,.1f}x{f'{copy:.2f}' if read else '-':>11}")
    print(f"\nds[i] alone: {1e6 / statistics.median(rates['ds[i] alone (a view, no byte is read)']):.1f} us a sample")


if __name__ == "__main__":
    main()
