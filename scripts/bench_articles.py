"""The three tables that articles on slow input pipelines print, on the same kind of work: each as a ratio to the plain way in the same run.

usage: python scripts/bench_articles.py [--dir DIR] [--rows 1000] [--rounds 7] [--json FILE] [--quick]

images   An epoch over 1,000 JPEG files of 500x375: a naive Dataset (open, decode) in a stock DataLoader, against the same images mapped.  Articles
         print 2.3 s and 0.8 s.  And the memory of a process that keeps all of them in a list, against that of one that maps them (500 and 50 MB).
records  10^6 records of 64 bytes, 15 float32 and a label, in random order: a Dataset that seeks, reads, and unpacks each with `struct`, in a stock
         DataLoader, as articles have it, against the same rows mapped (12.3 s and 0.8 s), and gathered ahead (0.3 s).  The plain ways read as
         many rows as take about two seconds, and are told for all.  A bare loop over the file without torch stands beside it.
epoch    Training for an epoch of the photos, with a step that is the same for all: decoding, resizing to 256, cropping 224 and normalising in each
         epoch, against a dataset where that was done once (45 and 7 minutes).

All rounds of a table are interleaved, and each byte of each batch is summed.  Before any is timed, rows are held
against each other by label and hash.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_child import Child, serve
from bench_common import IMAGENET, interleaved, ratio
from bench_results import COUNTED, Batches, Part, Rows, in_memory, make_photos, photo_paths, run_part, touched
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mmcompile
from mmcompile import BuildOptions, MMapShardDataset, Preprocess, ShardLoader

#: Ratios that articles print.
IMAGES, MEMORY, MAPPED, PREFETCHED, EPOCH = 2.3 / 0.8, 500 / 50, 12.3 / 0.8, 12.3 / 0.3, 45 / 7
SIZE = (375, 500)
#: Rows of a batch: of whole photos, of records (half a megabyte, so that handing one from thread to thread costs little beside it), in training.
IMAGE_BATCH, RECORD_BATCH, BATCH = 16, 8192, 32
RECORD = struct.Struct("<15fi")
#: How many records there are, and how many of them a plain way reads in a round.
RECORDS, PLAIN_RECORDS = 1_000_000, 100_000
HIDDEN = (
    "a GPU, and copies to one",
    "data that is not in memory (bench_scaling.py, bench_cold.py)",
    "photos from a camera: these are made up, and cost a decoder about as much",
    "more than one machine",
)


class Photos(Dataset):
    """What people write first: open and decode each file, in each epoch; `prepare` is what is done with a picture."""

    def __init__(self, raw: Path, prepare: Callable[[Image.Image], Tensor]) -> None:
        self.items, self.prepare = photo_paths(raw), prepare

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        path, label = self.items[i]
        with Image.open(path) as file:
            return self.prepare(file.convert("RGB")), label


class Records(Dataset):
    """What people write first: seek to a record, read it, unpack its numbers."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows = path, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if not hasattr(self, "file"):
            self.file = open(self.path, "rb")  # noqa: SIM115 - in each worker its own, for as long as that lives
        self.file.seek(i * RECORD.size)
        *values, label = RECORD.unpack(self.file.read(RECORD.size))
        return torch.tensor(values), label


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def prepared(image: Image.Image) -> Tensor:
    """torchvision's Resize(256), CenterCrop(224), ToTensor and Normalize, on pictures of Pillow."""
    short = min(image.size)
    image = image.resize((int(256 * image.width / short), int(256 * image.height / short)), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    values = pixels(image.crop((left, top, left + 224, top + 224))).float().div_(255)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return values.sub_(mean).div_(std)


def epoch(batches: Batches) -> int:
    return sum(touched(images) for images, _ in batches)


def stock(dataset: Any, batch: int, workers: int = 0) -> DataLoader:
    return DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def ahead(ds: MMapShardDataset) -> ShardLoader:
    """One thread that is one batch ahead: enough, and batches of 9 MB are what memory is spent on."""
    return ShardLoader(ds, IMAGE_BATCH, shuffle=True, prefetch_factor=1)


def agree(part: Part, what: str, plain: Batches, *others: Batches) -> None:
    expected = Rows(plain)
    for other in others:
        found = Rows(other)
        part.checked(what, len(found.found), found.digest(False) == expected.digest(False))


def seconds(part: Part, title: str, rates: dict[str, list[float]], rows: int) -> None:
    part.table(title, "s", {name: [rows / rate for rate in values] for name, values in rates.items()})


# ---------------------------------------------------------------- the tables


def images(part: Part, raw: Path, folder: Path, rounds: int) -> None:
    out = folder / "images"
    mmcompile.build(raw, out, preprocess=Preprocess(), options=BuildOptions(workers=1 if part.quick else part.settings["workers"]))
    ds, plain = MMapShardDataset(out), Photos(raw, pixels)
    loader = ahead(ds)
    agree(part, "images: plain and mapped", DataLoader(plain, IMAGE_BATCH), DataLoader(ds, IMAGE_BATCH), loader)
    workers = part.settings["workers"]
    kept = [stock(plain, IMAGE_BATCH), stock(plain, IMAGE_BATCH, workers), stock(ds, IMAGE_BATCH)]
    names = [
        "plain: JPEG files, DataLoader",
        f"plain, {workers} worker processes",
        "mapped: DataLoader over MMapShardDataset",
        "mapped: ShardLoader, 1 thread",
    ]
    runs = {name: (lambda loader=made: epoch(loader)) for name, made in zip(names, [*kept, loader], strict=True)}
    rates = interleaved(runs, rounds)
    seconds(part, f"images: an epoch over {len(ds):,} images of {SIZE[1]}x{SIZE[0]}", rates, len(ds))
    part.target("images: mapped, DataLoader / plain", ratio(rates, names[2], names[0]), IMAGES, "2.3 s -> 0.8 s")
    part.target("images: mapped, ShardLoader / plain", ratio(rates, names[3], names[0]), IMAGES, "2.3 s -> 0.8 s")
    part.target("images: mapped, ShardLoader / plain with workers", ratio(rates, names[3], names[1]), IMAGES, "2.3 s -> 0.8 s")
    if in_memory(folder):
        part.absent("memory", "the folder is in memory itself (tmpfs), so that mapped files would be counted as memory")
        return
    memory(part, raw, out, min(rounds, 3))


def memory(part: Part, raw: Path, out: Path, rounds: int) -> None:
    held: dict[str, list[float]] = {"all images in a list": [], "mapped: ShardLoader, 1 thread": []}
    for _ in range(rounds):
        for name, way, path in zip(held, ("listed", "mapped"), (raw, out), strict=True):
            with Child([sys.executable, __file__, "--child"]) as child:
                child.ask("ready")
                _, before, most = child.watched(way, path=str(path))
                held[name].append(most - before)
    part.table("memory: what an epoch adds, at most", "MiB", held, dict.fromkeys(held, COUNTED))
    part.target("memory: in a list / mapped", statistics.median(a / b for a, b in zip(*held.values(), strict=True)), MEMORY, "500 MB -> 50 MB")


def listed(path: str) -> int:
    held = list(map(Photos(Path(path), pixels).__getitem__, range(len(photo_paths(Path(path))))))
    return epoch(stock(held, IMAGE_BATCH))


def mapped(path: str) -> int:
    return epoch(ahead(MMapShardDataset(path)))


def records(part: Part, folder: Path, rounds: int, rows: int, plain_rows: int) -> None:
    table = np.zeros(rows, [("x", "<f4", 15), ("label", "<i4")])
    table["x"], table["label"] = np.random.default_rng(0).normal(size=(rows, 15)), np.arange(rows) % 10
    path, out = folder / "records.bin", folder / "records"
    table.tofile(path)
    np.savez(folder / "records.npz", x=table["x"], label=table["label"].astype(np.int64))
    mmcompile.build(folder / "records.npz", out, options=BuildOptions(workers=1))
    ds, some = MMapShardDataset(out), Records(path, plain_rows)
    loader = ShardLoader(ds, RECORD_BATCH, shuffle=True)
    agree(part, "records: plain and mapped", DataLoader(some, RECORD_BATCH), DataLoader(ds.subset(range(plain_rows)), RECORD_BATCH))
    agree(part, "records: mapped, and gathered ahead", DataLoader(ds.subset(range(plain_rows)), 77), _first(loader, ds, plain_rows))
    rng = np.random.default_rng(0)

    def bare() -> int:
        got = np.empty((len(some), 16), np.float32)
        with open(path, "rb") as file:
            for k, i in enumerate(rng.permutation(rows)[: len(some)].tolist()):
                file.seek(i * RECORD.size)
                got[k] = RECORD.unpack(file.read(RECORD.size))
        return touched(got)

    workers = part.settings["workers"]
    kept = [stock(some, RECORD_BATCH), stock(some, RECORD_BATCH, workers)]
    plain, busy, loop = "plain: seek, read, struct.unpack, DataLoader", f"plain, {workers} worker processes", "a bare loop, without torch"
    runs: dict[str, Callable[[], int]] = {plain: lambda: epoch(kept[0]), busy: lambda: epoch(kept[1]), loop: bare}
    mapped, ahead = "mapped: DataLoader over MMapShardDataset", "mapped, gathered ahead: ShardLoader, 1 thread"
    second = stock(ds, RECORD_BATCH)
    runs |= {mapped: lambda: epoch(second), ahead: lambda: epoch(loader)}
    rates = interleaved(runs, rounds)
    seconds(part, f"records: an epoch over {rows:,} of {RECORD.size} bytes, batches of {RECORD_BATCH:,}", rates, rows)
    part.target("records: mapped / plain", ratio(rates, mapped, plain), MAPPED, "12.3 s -> 0.8 s")
    part.target("records: mapped, gathered ahead / plain", ratio(rates, ahead, plain), PREFETCHED, "12.3 s -> 0.3 s")
    part.target("records: mapped, gathered ahead / plain with workers", ratio(rates, ahead, busy))
    part.target("records: mapped, gathered ahead / a bare loop", ratio(rates, ahead, loop))


def _first(loader: ShardLoader, ds: MMapShardDataset, count: int) -> Batches:
    """Of an epoch of a loader those rows that are among the first `count` of the dataset, found by what they hold."""
    wanted = {row.tobytes() for row in ds[:count][0].numpy()}
    for values, labels in loader:
        keep = [k for k, row in enumerate(values.numpy()) if row.tobytes() in wanted]
        yield values[keep], labels[keep]


def trained(part: Part, raw: Path, folder: Path, rounds: int) -> None:
    out, workers = folder / "prepared", part.settings["workers"]
    preprocess = Preprocess(resize=256, crop=224, compat="torchvision", normalize="imagenet")
    mmcompile.build(raw, out, preprocess=preprocess, options=BuildOptions(workers=1 if part.quick else workers))
    ds, plain = MMapShardDataset(out), Photos(raw, prepared)
    agree(part, "epoch: prepared in each epoch and once", DataLoader(plain, BATCH), ShardLoader(ds, BATCH))
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3 * 14 * 14, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(loader: Batches) -> int:
        rows = 0
        for values, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(values), labels).backward()  # the mean over all pixels reads every byte
            optimizer.step()
            rows += len(labels)
        return rows

    loaders: dict[str, Any] = {
        "plain: decode, resize, crop, normalise, DataLoader": stock(plain, BATCH),
        f"plain, {workers} worker processes": stock(plain, BATCH, workers),
        "done once: ShardLoader, 1 thread": ShardLoader(ds, BATCH, shuffle=True),
        f"done once: ShardLoader, {workers} threads": ShardLoader(ds, BATCH, shuffle=True, num_workers=workers),
    }
    rates = interleaved({name: (lambda loader=made: steps(loader)) for name, made in loaders.items()}, rounds)
    seconds(part, f"epoch: training for one on {len(ds):,} images of {SIZE[1]}x{SIZE[0]}, each step the same", rates, len(ds))
    names = list(loaders)
    part.target("epoch: done once, 1 thread / plain", ratio(rates, names[2], names[0]), EPOCH, "45 min -> 7 min")
    part.target(f"epoch: done once, {workers} threads / plain", ratio(rates, names[3], names[0]), EPOCH, "45 min -> 7 min")
    part.target(f"epoch: done once, {workers} threads / plain with workers", ratio(rates, names[3], names[1]), EPOCH, "45 min -> 7 min")


def measure(args: argparse.Namespace, folder: Path) -> Part:
    workers = max(2, min(8, len(os.sched_getaffinity(0))))
    rows = {"images": args.rows, "records": args.rows if args.quick else RECORDS}
    part = Part("articles", args.quick, {**rows, "batches": [IMAGE_BATCH, RECORD_BATCH, BATCH], "rounds": args.rounds, "workers": workers}, HIDDEN)
    torch.set_num_threads(1)  # for all ways: with more, each small operation of the plain ones waits at a barrier for a core that a worker has
    raw = folder / "raw"
    part.settings["jpeg_bytes"] = make_photos(raw, args.rows, SIZE)
    images(part, raw, folder, args.rounds)
    records(part, folder, args.rounds, rows["records"], min(rows["records"], PLAIN_RECORDS))
    trained(part, raw, folder, args.rounds)
    return part


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        serve({"ready": torch.get_num_threads, "listed": listed, "mapped": mapped})
    run_part(__doc__ or "", 1000, 48, measure)
