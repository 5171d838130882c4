"""How fast compiled datasets are read, each figure as a ratio to a reference measured in the same run.

usage: python scripts/bench_read.py [--only gather,float,augment,rows,order,open,train] [--rounds 7] [--batch 256] [--dir DIR]

The datasets are random bytes, written to a temporary folder (in DIR): 8,192 images of 224x224x3 uint8 and 2,048 of 256x256x3 in shards of 1,024,
10^6 rows of 20 bytes, a table of as many rows of 8 float32 columns, and a table of 560,000 shards of 1,786 images, 10^9 in all, which are one file.
`train` makes JPEG and PNG files too.

Method: in each round all runs of a section follow one another in random order; a speed is the median of the rounds, a ratio the
median of the ratios within a round.  All is warm: a first round that is not counted has read every page.  Each run copies every byte of every row it
counts, from the page cache into memory that it used before; only ds[i], which is a view, reads none.  memcpy copies contiguous batches of the same
maps to as many destinations as a loader lends.  Loaders run whole epochs, their beginnings and ends included.

What it does not show: cold data (bench_cold.py), several processes, devices, other loads on the memory while training computes (but in `train`).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from bench_common import IMAGENET, Table, interleaved, machine, noise, ratio, save_dataset
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mmcompile import Augment, MMapShardDataset, Preprocess, ShardLoader, build
from mmcompile.runtime.order import Order

Run = Callable[[], int]
SHARD = 1024
#: Runs in a child process: opens a dataset after the imports, says what that took, and what the first batch of an epoch took.
OPEN = """
import json, resource, sys, time
import numpy, torch
from mmcompile import MMapShardDataset, ShardLoader
import mmcompile.runtime.ahead
def rss(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, begun = rss(), time.perf_counter()
ds = MMapShardDataset(sys.argv[1])
opened, grown = time.perf_counter() - begun, rss() - before
begun = time.perf_counter()
loader = iter(ShardLoader(ds, 256, shuffle=True, num_workers=0, seed=1))
next(loader)
first = time.perf_counter() - begun
begun = time.perf_counter()
next(loader)
print(json.dumps({"opened": opened, "grown": grown, "first": first, "second": time.perf_counter() - begun}))
"""


class PerSample(Dataset):
    """One array of all pixels, mapped, read sample by sample with a copy each: the usual first step away from image files."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.array(self.rows[i])), int(self.labels[i])


class ImageFiles(Dataset):
    """What people write before they compile: open and convert, for each sample in each epoch."""

    def __init__(self, raw: Path, mode: str) -> None:
        classes = sorted(p for p in raw.iterdir() if p.is_dir())
        self.items = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
        self.mode = mode

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[i]
        with Image.open(path) as file:
            pixels = np.array(file.convert(self.mode))
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous(), label


class Bench:
    def __init__(self, folder: Path, batch: int, rounds: int, table: Table) -> None:
        self.folder, self.batch, self.rounds, self.table = folder, batch, rounds, table

    @functools.cached_property
    def images(self) -> Path:
        return self._dataset("224", 8192, (3, 224, 224), 10)

    @functools.cached_property
    def larger(self) -> Path:
        return self._dataset("256", 2048, (3, 256, 256), 10)

    @functools.cached_property
    def small(self) -> Path:
        return self._dataset("20", 1_000_000, (1, 4, 5), 0, 250_000)

    @functools.cached_property
    def bars(self) -> Path:
        root, rng = self.folder / "bars", np.random.default_rng(0)
        save_dataset(root, (rng.normal(size=(250_000, 8)).astype(np.float32) for _ in range(4)))
        return root

    def _dataset(self, name: str, rows: int, shape: tuple[int, ...], classes: int, shard: int = SHARD) -> Path:
        root = self.folder / name
        save_dataset(
            root, (noise(min(shard, rows - at), shape, at) for at in range(0, rows, shard)), classes, normalize=len(shape) == 3 and shape[0] == 3
        )
        return root

    def loader(self, ds: MMapShardDataset, workers: int, shuffle: bool = True, batch: int | None = None, **more: object) -> Run:
        made = ShardLoader(ds, batch or self.batch, shuffle=shuffle, num_workers=workers, drop_last=True, **more)
        return lambda: sum(len(b[0] if isinstance(b, list) else b) for b in made)

    def stock(self, ds: Dataset) -> Run:
        made = DataLoader(ds, self.batch, shuffle=True, drop_last=True)
        return lambda: sum(len(b[0]) for b in made)

    # -- sections

    def gather(self) -> None:
        ds, batch, table = MMapShardDataset(self.images, dtype=torch.uint8), self.batch, self.table
        maps = [np.load(path, mmap_mode="r") for path in sorted((self.images / "shards").glob("image-*"))]
        sources = [m[at : at + batch] for m in maps for at in range(0, SHARD, batch)]
        whole = np.concatenate(maps)
        np.save(self.folder / "all.npy", whole)
        mapped = np.load(self.folder / "all.npy", mmap_mode="r")
        rng = np.random.default_rng(0)
        out = [np.empty((batch, *whole.shape[1:]), np.uint8) for _ in range(8)]  # 4 for each thread, as many as a loader lends: batches live a while
        pool = ThreadPoolExecutor(2)

        def copy(threads: int) -> int:
            def work(k: int) -> None:
                for i, source in enumerate(sources[k::threads]):
                    np.copyto(out[4 * k + i % 4], source)

            list(pool.map(work, range(threads)))
            return len(sources) * batch

        def taken() -> int:
            order = rng.permutation(len(mapped))
            for i, at in enumerate(range(0, len(order), batch)):
                np.take(mapped, order[at : at + batch], axis=0, out=out[i % 4], mode="clip")
            return len(order)

        def keyed() -> int:
            order = rng.permutation(len(ds)).tolist()
            for at in range(0, len(order), batch):
                ds[order[at : at + batch]]
            return len(order)

        per_sample = "stock DataLoader, from_numpy(np.array(map[i]))"
        rates = interleaved(
            {
                "memcpy, 1 thread": lambda: copy(1),
                "ShardLoader, 1 thread": self.loader(ds, 1),
                "np.take(out=)": taken,
                "memcpy, 2 threads": lambda: copy(2),
                "ShardLoader, 2 threads": self.loader(ds, 2),
                "ShardLoader in sequence, 1 thread": self.loader(ds, 1, shuffle=False),
                "ShardLoader in sequence, 2 threads": self.loader(ds, 2, shuffle=False),
                "ShardLoader, 0 threads": self.loader(ds, 0),
                "ds[list]": keyed,
                "stock DataLoader over the dataset": self.stock(ds),
                per_sample: self.stock(PerSample(mapped, ds.targets)),
            },
            self.rounds,
        )
        table.title(f"gather: {len(ds):,} images of 3 x 224 x 224 uint8, batch {batch}, random order")
        for name, values in rates.items():
            table.speed(name, statistics.median(values), nbytes=150_528)
        for threads, s in ((1, ""), (2, "s")):
            name = f"ShardLoader, {threads} thread{s}"
            table.line(f"{name} / memcpy, as many", ratio(rates, name, f"memcpy, {threads} thread{s}"), least=0.85)
        table.line("ShardLoader, 1 thread / np.take(out=)", ratio(rates, "ShardLoader, 1 thread", "np.take(out=)"))
        table.line("ds[list] / np.take(out=)", ratio(rates, "ds[list]", "np.take(out=)"))
        for threads, s in ((1, ""), (2, "s")):
            name = f"ShardLoader, {threads} thread{s}"
            table.line(f"{name} / per-sample stock DataLoader", ratio(rates, name, per_sample), least=5)
        table.line("stock DataLoader over the dataset / per sample", ratio(rates, "stock DataLoader over the dataset", per_sample), least=4)
        for threads, s in ((1, ""), (2, "s")):
            name = f"ShardLoader in sequence, {threads} thread{s}"
            table.line(f"shuffled / in sequence, {threads} thread{s}", ratio(rates, f"ShardLoader, {threads} thread{s}", name), least=0.95)

    def float(self) -> None:
        keep = list(range(1024)) * 4  # an epoch of several batches for each thread
        ds = {d: MMapShardDataset(self.images, dtype=d).subset(keep) for d in (torch.float32, torch.float16, torch.bfloat16)}
        source = torch.from_numpy(np.load(sorted((self.images / "shards").glob("image-*"))[0], mmap_mode="c"))
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
        out, batch = torch.empty(self.batch, *source.shape[1:]), self.batch
        rng, pool = np.random.default_rng(0), ThreadPoolExecutor(2)
        before = torch.get_num_threads()
        torch.set_num_threads(1)

        def loop(threads: int) -> int:
            order = rng.permutation(len(source)).tolist()

            def work(k: int, rows: list[int]) -> None:
                for j in range(k, len(rows), threads):
                    out[j].copy_(source[rows[j]]).div_(255).sub_(mean).div_(std)

            for at in range(0, len(order), batch):
                list(pool.map(work, range(threads), [order[at : at + batch]] * threads))
            return len(order)

        runs = {}
        for threads, s in ((1, ""), (2, "s")):
            runs[f"per-sample loop, {threads} thread{s}"] = functools.partial(loop, threads)
            for dtype, made in ds.items():
                runs[f"ShardLoader, {str(dtype)[6:]}, {threads} thread{s}"] = self.loader(made, threads)
        rates = interleaved(runs, self.rounds)
        torch.set_num_threads(before)
        self.table.title(f"float: the same normalised, {len(keep):,} images; loop: copy_().div_(255).sub_(mean).div_(std), one torch thread")
        for name, values in rates.items():
            self.table.speed(name, statistics.median(values))
        for threads, s in ((1, ""), (2, "s")):
            for dtype in ds:
                name = f"ShardLoader, {str(dtype)[6:]}, {threads} thread{s}"
                least = 0.9 if dtype == torch.float32 else None
                self.table.line(f"{name} / the loop, as many", ratio(rates, name, f"per-sample loop, {threads} thread{s}"), least=least)

    def augment(self) -> None:
        plain, larger = MMapShardDataset(self.images, dtype=torch.uint8), MMapShardDataset(self.larger, dtype=torch.uint8)
        some = larger.subset(list(range(512)))
        source = torch.from_numpy(np.load(sorted((self.larger / "shards").glob("image-*"))[0], mmap_mode="c"))
        rng = np.random.default_rng(0)

        def interpolated() -> int:
            torch.set_num_threads(1)
            out = torch.empty(self.batch, 3, 224, 224, dtype=torch.uint8)
            for at in range(0, 512, self.batch):
                cut = Augment(resized_crop=224, hflip=0.5).draw(0, 0, rng.permutation(512)[: self.batch], 256, 256)
                boxes = zip(*(v.tolist() for v in (cut.top, cut.left, cut.height, cut.width, cut.flip)), strict=True)
                for j, (top, left, tall, wide, flip) in enumerate(boxes):
                    box = source[at + j, None, :, top : top + tall, left : left + wide]
                    made = nn.functional.interpolate(box, (224, 224), mode="bilinear", antialias=True)[0]
                    out[j] = made.flip(-1) if flip else made
            return 512

        runs: dict[str, Run] = {}
        for threads, s in ((1, ""), (2, "s")):
            runs[f"plain gather of 224, {threads} thread{s}"] = self.loader(plain, threads)
            runs[f"crop + flip, {threads} thread{s}"] = self.loader(larger, threads, augment=Augment(crop=224, hflip=0.5))
            runs[f"crop, {threads} thread{s}"] = self.loader(larger, threads, augment=Augment(crop=224))
        runs["random resized crop, 1 thread"] = self.loader(some, 1, augment=Augment(resized_crop=224, hflip=0.5))
        runs["per-sample interpolate, 1 thread"] = interpolated
        before = torch.get_num_threads()
        rates = interleaved(runs, self.rounds)
        torch.set_num_threads(before)
        self.table.title(f"augment: from {len(larger):,} images of 3 x 256 x 256 to 224 x 224")
        for name, values in rates.items():
            self.table.speed(name, statistics.median(values))
        for threads, s in ((1, ""), (2, "s")):
            base = f"plain gather of 224, {threads} thread{s}"
            self.table.line(f"crop + flip / plain gather, {threads} thread{s}", ratio(rates, f"crop + flip, {threads} thread{s}", base), least=0.5)
        both = "random resized crop, 1 thread", "per-sample interpolate, 1 thread"
        self.table.line("random resized crop / per-sample interpolate", ratio(rates, *both))

    def rows(self) -> None:
        ds = MMapShardDataset(self.images, dtype=torch.uint8)
        self._rows(MMapShardDataset(self.small), "image", "10^6 of 20 bytes", ds)
        bars = MMapShardDataset(self.bars)
        self._rows(bars, "x", "10^6 of 8 float32 columns", bars)
        self._windows(bars)

    def _rows(self, small: MMapShardDataset, field: str, said: str, ds: MMapShardDataset) -> None:
        table, whole = self.table, small[:].numpy()
        rng = np.random.default_rng(0)

        def views() -> int:
            for i in rng.permutation(len(ds))[:8192].tolist():
                ds[i]
            return min(len(ds), 8192)

        def taken(count: int) -> int:
            out = np.empty((count, *whole.shape[1:]), whole.dtype)
            for keys in rng.integers(0, len(whole), (200, count)):
                np.take(whole, keys, axis=0, out=out, mode="clip")
            return 200 * count

        def gathered(count: int) -> int:
            out = np.empty((count, *whole.shape[1:]), whole.dtype)
            for keys in rng.integers(0, len(whole), (200, count)):
                small._reader.gather(field, keys, out=out)
            return 200 * count

        def keyed(count: int) -> int:
            for keys in rng.integers(0, len(whole), (200, count)):
                small[keys]
            return 200 * count

        def stacked() -> int:
            for keys in rng.integers(0, len(whole), (10, 256)).tolist():
                torch.stack([small[i] for i in keys])
            return 2560

        runs: dict[str, Run] = {"ds[i], zero-copy": views, "torch.stack of ds[i]": stacked}
        for count in (256, 4096, 65536):
            runs[f"np.take(out=) of {count:,}"] = functools.partial(taken, count)
            runs[f"gather(out=) of {count:,}"] = functools.partial(gathered, count)
            runs[f"ds[array] of {count:,}"] = functools.partial(keyed, count)
        runs["ShardLoader, batches of 4,096, 1 thread"] = self.loader(small, 1, batch=4096)
        rates = interleaved(runs, self.rounds)
        table.title(f"rows: {said} by index" + ("" if ds is small else " (ds[i]: of 150 KB, with its label)"))
        for name, values in rates.items():
            if name != "ds[i], zero-copy":
                table.line(name, 1e9 / statistics.median(values), unit="ns a row")
        table.line("ds[i], zero-copy", 1e6 / statistics.median(rates["ds[i], zero-copy"]), most=4, unit="us")
        for count in (256, 4096, 65536):
            base, least = f"np.take(out=) of {count:,}", None if count == 256 else 0.7
            table.line(f"gather(out=) / np.take(out=), {count:,}", ratio(rates, f"gather(out=) of {count:,}", base), least=least)
            table.line(f"ds[array] / np.take(out=), {count:,}", ratio(rates, f"ds[array] of {count:,}", base))

    def _windows(self, bars: MMapShardDataset) -> None:
        whole, windows, rng = bars[:].numpy(), bars.windows(64), np.random.default_rng(0)
        apart = whole[: len(whole) // 64 * 64].reshape(-1, 64, *whole.shape[1:])
        within = np.arange(64)

        def views() -> int:
            for i in rng.integers(0, len(windows), 8192).tolist():
                windows[i]
            return 8192

        def taken(rows: np.ndarray, keys_of: Callable[[np.ndarray], np.ndarray]) -> int:
            out = np.empty((self.batch * 64 * 8 // rows[0].size, *rows.shape[1:]), np.float32)
            for keys in rng.integers(0, len(apart), (200, self.batch)):
                np.take(rows, keys_of(keys), axis=0, out=out, mode="clip")
            return 200 * self.batch

        def asked() -> int:
            for keys in rng.integers(0, len(windows), (200, self.batch)):
                windows[keys]
            return 200 * self.batch

        runs: dict[str, Run] = {
            "windows[i], zero-copy": views,
            "windows[array]": asked,
            "np.take(out=) of their rows": lambda: taken(whole, lambda keys: (keys[:, None] * 64 + within).reshape(-1)),
            "np.take(out=) of windows that lie apart": lambda: taken(apart, lambda keys: keys),
            "ShardLoader over windows, 1 thread": self.loader(windows.subset(range(0, len(windows), 8)), 1),
        }
        rates = interleaved(runs, self.rounds)
        self.table.title(f"windows: 64 rows of 8 float32 columns, {len(windows):,} of them, batches of {self.batch}")
        for name, values in rates.items():
            self.table.line(name, 1e9 / statistics.median(values), unit="ns a window")
        self.table.line("windows[array] / np.take of their rows", ratio(rates, "windows[array]", "np.take(out=) of their rows"))
        both = "windows[array]", "np.take(out=) of windows that lie apart"
        self.table.line("windows[array] / np.take of windows that lie apart", ratio(rates, *both))

    def order(self) -> None:
        positions = np.arange(4096)

        def rows(n: int, count: int) -> int:
            order = Order(n, seed=1, epoch=1, shuffle=True)
            for k in range(50):
                order.rows(positions[:count] + k * 4096)
            return 50 * count

        def first() -> int:
            for epoch in range(50):
                Order(10**9, seed=1, epoch=epoch, shuffle=True).rows(positions[:256])
            return 50

        runs = {
            "blocks of 4,096 of 10^9": lambda: rows(10**9, 4096),
            "batches of 256 of 10^9": lambda: rows(10**9, 256),
            "blocks of 4,096 of 10^6": lambda: rows(10**6, 4096),
            "first": first,
        }
        rates = {name: statistics.median(values) for name, values in interleaved(runs, self.rounds).items()}
        self.table.title("order of an epoch")
        self.table.line("a row, in blocks of 4,096 of 10^9", 1e9 / rates["blocks of 4,096 of 10^9"], most=50, unit="ns")
        self.table.line("a row, in blocks of 4,096 of 10^6", 1e9 / rates["blocks of 4,096 of 10^6"], most=50, unit="ns")
        self.table.line("a batch of 256 of 10^9", 256e3 / rates["batches of 256 of 10^9"], most=2, unit="ms")
        self.table.line("the first batch's rows of an epoch of 10^9", 1e3 / rates["first"], most=5, unit="ms")

    def open(self) -> None:
        million, billion = self.folder / "1e6", self.folder / "1e9"
        save_dataset(million, [noise(1786, (3, 224, 224), 0)], repeat=560)
        save_dataset(billion, [noise(1786, (3, 224, 224), 0)], repeat=560_000)
        found = {}
        for root in (million, billion):
            runs = [self._opened(root) for _ in range(self.rounds + 1)][1:]
            found[root] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        self.table.title("open: a fresh process, after imports; all shards are one file, so the first batch opens and maps up to 256 times")
        self.table.line("open 10^6 rows, 560 shards", 1e3 * found[million]["opened"], most=5, unit="ms")
        self.table.line("open 10^9 rows, 560,000 shards", 1e3 * found[billion]["opened"], most=250, unit="ms")
        self.table.line("growth of the process by it", found[billion]["grown"] / 2**20, most=100, unit="MiB")
        for name, root in (("10^6", million), ("10^9", billion)):
            self.table.line(f"first batch of 256 of {name}: order, open, map, copy", 1e3 * found[root]["first"], unit="ms")
            self.table.line(f"second batch of 256 of {name}", 1e3 * found[root]["second"], unit="ms")

    def _opened(self, root: Path) -> dict[str, float]:
        done = subprocess.run([sys.executable, "-c", OPEN, str(root)], capture_output=True, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    def train(self) -> None:
        sys.path.insert(0, str(Path(__file__).parent / "examples"))
        from train import network, train_epoch

        raw, out = self.folder / "raw", self.folder / "digits"
        rng = np.random.default_rng(0)
        for i in range(1000):
            folder = raw / f"class{i % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            coarse.resize((128, 128), Image.Resampling.BICUBIC).save(folder / f"{i:06d}.jpg", quality=90)
        build(raw, out, preprocess=Preprocess())
        ds = MMapShardDataset(out, dtype=torch.uint8)
        np.save(self.folder / "train.npy", ds[:][0].contiguous().numpy())
        per_sample = PerSample(np.load(self.folder / "train.npy", mmap_mode="r"), ds.targets)
        loaders = {
            "DataLoader over image files": DataLoader(ImageFiles(raw, "RGB"), 64, shuffle=True),
            "DataLoader over image files, 2 workers": DataLoader(ImageFiles(raw, "RGB"), 64, shuffle=True, num_workers=2),
            "DataLoader, from_numpy(np.array(map[i]))": DataLoader(per_sample, 64, shuffle=True),
            "DataLoader over the dataset": DataLoader(ds, 64, shuffle=True),
            "ShardLoader": ShardLoader(ds, 64, shuffle=True),
        }
        model = network(3, 10)
        optimizer = torch.optim.AdamW(model.parameters())
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
        for turn in range(1 + min(self.rounds, 3)):
            for name, loader in loaders.items():
                found = train_epoch(model, loader, optimizer)
                if turn:
                    spent[name].append(found)
        self.table.title(
            "train: an epoch of scripts/examples/train.py's network, 1,000 images of 3 x 128 x 128; seconds waiting, computing, share waited"
        )
        for name, pairs in spent.items():
            waited, computed = (statistics.median(v) for v in zip(*pairs, strict=True))
            self.table.line(name, 100 * waited / (waited + computed), unit="% waiting", note=f"{waited:.3f} s, {computed:.2f} s")


SECTIONS = ("gather", "float", "augment", "rows", "order", "open", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where the datasets are made for the time of the run")
    args = parser.parse_args()
    sections = args.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: the sections are {', '.join(SECTIONS)}")
    if SHARD % args.batch:
        parser.error(f"--batch {args.batch}: must divide {SHARD}")
    table = Table()
    print(f"{machine()}\nwarm, medians of {args.rounds} interleaved rounds")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        bench = Bench(Path(folder), args.batch, args.rounds, table)
        for name in sections:
            getattr(bench, name)()
    table.close()


if __name__ == "__main__":
    main()
