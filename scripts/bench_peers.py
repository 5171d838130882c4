"""How fast other libraries that keep decoded arrays on disk give random batches, against ShardLoader in the same run.

usage: python scripts/bench_peers.py [--dir DIR] [--rows 2048] [--batch 256] [--rounds 7]

Measures what can be imported of mmap_ninja, tensordict and streaming (mosaicml-streaming), in an environment of your making: none is needed by this
package.  All hold the same random bytes, images of 3 x 224 x 224 uint8, as raw arrays without compression.  mmap_ninja and tensordict are asked for
batches by arrays of indices, the fastest they have; streaming is read through a DataLoader with its own shuffle, without workers.  Warm, interleaved,
every byte copied; medians of the rounds, ratios medians of the ratios within a round.

What it does not show: FFCV, which needs the headers of OpenCV and libjpeg-turbo to be built; worker processes; decoding.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_common import Table, interleaved, machine, noise, ratio, save_dataset
from torch.utils.data import DataLoader

from mmcompile import MMapShardDataset, ShardLoader

Run = Callable[[], int]


def ours(folder: Path, images: np.ndarray, batch: int) -> dict[str, Run]:
    save_dataset(folder / "ours", iter(np.split(images, 2)))
    ds = MMapShardDataset(folder / "ours")
    loaders = {f"ShardLoader, {k} thread{'s' * (k > 1)}": ShardLoader(ds, batch, shuffle=True, num_workers=k) for k in (1, 2)}
    return {name: (lambda loader=loader: sum(len(b) for b in loader)) for name, loader in loaders.items()}


def mmap_ninja(folder: Path, images: np.ndarray, batch: int) -> dict[str, Run]:
    ninja = importlib.import_module("mmap_ninja.numpy")
    ninja.from_ndarray(str(folder / "ninja"), images)
    rows = ninja.open_existing(str(folder / "ninja"))

    def run() -> int:
        order = np.random.default_rng().permutation(len(rows))
        return sum(len(torch.from_numpy(np.asarray(rows[order[at : at + batch]]))) for at in range(0, len(order), batch))

    return {"mmap_ninja, rows[list]": run}


def tensordict(folder: Path, images: np.ndarray, batch: int) -> dict[str, Run]:
    kind = importlib.import_module("tensordict").TensorDict
    kind({"image": torch.from_numpy(images)}, [len(images)]).memmap(str(folder / "tensordict"))
    held = kind.load_memmap(str(folder / "tensordict"))

    def run() -> int:
        return sum(len(held[keys]["image"]) for keys in torch.randperm(len(images)).split(batch))

    return {"tensordict, td[indices]": run}


def streaming(folder: Path, images: np.ndarray, batch: int) -> dict[str, Run]:
    library = importlib.import_module("streaming")
    with library.MDSWriter(out=str(folder / "mds"), columns={"image": "ndarray:uint8:3,224,224"}) as out:
        for image in images:
            out.write({"image": image})

    dataset = library.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=batch)
    loader = DataLoader(dataset, batch)
    return {"streaming, DataLoader, 0 workers": lambda: sum(len(b["image"]) for b in loader)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    images = noise(args.rows, (3, 224, 224), 0)
    runs: dict[str, Run] = {}
    print(machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for make in (ours, mmap_ninja, tensordict, streaming):
            try:
                runs |= make(Path(folder), images, args.batch)
            except ImportError as error:
                print(f"{make.__name__}: not measured, {error}")
        rates = interleaved(runs, args.rounds)
    table = Table()
    table.title(f"peers: {args.rows:,} images of 3 x 224 x 224 uint8, random batches of {args.batch}")
    for name, values in rates.items():
        table.speed(name, statistics.median(values), nbytes=150_528)
    for name in list(rates)[2:]:
        table.line(f"ShardLoader, 1 thread / {name}", ratio(rates, "ShardLoader, 1 thread", name))
        table.line(f"ShardLoader, 2 threads / {name}", ratio(rates, "ShardLoader, 2 threads", name))


if __name__ == "__main__":
    main()
