"""Measures a build against the plain way: Pillow + numpy in a DataLoader's worker processes, its samples written to a memory-mapped .npy file.

    bench_build.py RAW [--rounds 7] [--workers 2] [--resize 256] [--crop 224]

Both decode every image of RAW to (3, crop, crop) uint8 and end with all rows on disk, synced.  Rounds are interleaved in one run, each from nothing;
medians and ratios are printed.  Warm: RAW is read once before.  What it does not show: a cold disk, images that differ much from those of RAW.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import mmcompile
from mmcompile import BuildOptions


class Plain(Dataset):
    """What people write by hand: torchvision's Resize and CenterCrop on PIL images, in Pillow and numpy."""

    def __init__(self, paths: list[Path], resize: int, crop: int) -> None:
        self.paths, self.resize, self.crop = paths, resize, crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> np.ndarray:
        with Image.open(self.paths[i]) as file:
            image = file.convert("RGB")
        width, height = image.size
        short = min(width, height)
        width, height = int(self.resize * width / short), int(self.resize * height / short)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
        image = image.crop((left, top, left + self.crop, top + self.crop))
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def plain(paths: list[Path], out: Path, options: argparse.Namespace, workers: int) -> None:
    rows = np.lib.format.open_memmap(out / "rows.npy", "w+", np.uint8, (len(paths), 3, options.crop, options.crop))
    loader = DataLoader(Plain(paths, options.resize, options.crop), batch_size=64, num_workers=workers, collate_fn=np.stack)
    at = 0
    for batch in loader:
        rows[at : at + len(batch)] = batch
        at += len(batch)
    rows.flush()
    with open(out / "rows.npy", "rb") as file:
        os.fsync(file.fileno())


def ours(raw: Path, out: Path, options: argparse.Namespace, workers: int, resampler: str) -> None:
    preprocess = mmcompile.Preprocess(resize=options.resize, crop=options.crop, resampler=resampler)
    report = mmcompile.build(raw, out / "out", preprocess=preprocess, options=BuildOptions(workers=workers), max_rejects="100%")
    assert report.decoded + report.rejects == options.images, "every image is decoded in every round"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = sorted(p for p in options.raw.rglob("*") if p.is_file())
    options.images = len(paths)
    total = sum(len(path.read_bytes()) for path in paths)

    ways: dict[str, Callable[[Path], None]] = {}
    for workers in dict.fromkeys((options.workers, 1)):
        words = f"{workers} worker" + ("s" if workers > 1 else "")
        ways[f"plain Pillow + DataLoader, {words}"] = lambda out, n=workers: plain(paths, out, options, n)
        ways[f"mmcompile build, torch resampler, {words}"] = lambda out, n=workers: ours(options.raw, out, options, n, "torch")
        ways[f"mmcompile build, Pillow resampler, {words}"] = lambda out, n=workers: ours(options.raw, out, options, n, "pillow")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            folder = Path(tempfile.mkdtemp(prefix="bench-"))
            try:
                began = time.perf_counter()
                way(folder)
                seconds[name].append(time.perf_counter() - began)
            finally:
                shutil.rmtree(folder)

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = {name.rsplit(", ", 1)[1]: value for name, value in medians.items() if name.startswith("plain")}
    rows = [(name, len(paths) / value, base[name.rsplit(", ", 1)[1]] / value) for name, value in medians.items()]
    if options.json:
        print(json.dumps({"images": len(paths), "bytes": total, "rounds": options.rounds, "seconds": seconds}))
        return
    print(
        f"{len(paths):,} images, {total / len(paths) / 1024:.0f} KiB each, {os.cpu_count()} cores, torch {torch.__version__}, {options.rounds} rounds"
    )
    print(f"{'':52}{'images/s':>9}  against plain with as many workers")
    for name, rate, ratio in rows:
        print(f"{name:52}{rate:9,.0f}  {ratio:5.2f}")


if __name__ == "__main__":
    main()
