"""Trains a small network from a compiled dataset with ShardLoader, and says where the time went.

    train.py DATASET [--epochs 5] [--batch-size 64] [--want 0.9] [--loader shard|stock] [--checkpoint FILE [--resume]]

A tenth of the samples of each class is held out; the exit status is 1 if the share of it that comes out right is under --want.  With --checkpoint the
state is saved after each epoch and every --save-every steps; --resume goes on from there, in the middle of an epoch too.  --loader stock reads the
same with torch's DataLoader, without augmentation, to compare the time spent waiting.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mmcompile import Augment, MMapShardDataset, ShardLoader


def network(channels: int, classes: int) -> nn.Module:
    """Three convolutions and a mean over what is left, for images of any size."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, classes)),
    )


def as_float(images: torch.Tensor) -> torch.Tensor:
    """Bytes become [0, 1]; a dataset that was built with --normalize gives floats already."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def train_epoch(
    model: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer, after_step: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Train on what is left of an epoch; returns the seconds spent waiting for data and computing."""
    model.train()
    waiting = computing = 0.0
    mark = time.perf_counter()
    for images, labels in loader:
        ready = time.perf_counter()
        waiting += ready - mark
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(as_float(images)), labels).backward()
        optimizer.step()
        after_step()
        mark = time.perf_counter()
        computing += mark - ready
    return waiting + time.perf_counter() - mark, computing


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any]) -> float:
    model.eval()
    right = total = 0
    for images, labels in loader:
        right += int((model(as_float(images)).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at once: whoever stops us, one of the two is whole."""
    part = path.with_name(f"{path.name}.part")
    torch.save(state, part)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--want", type=float, default=0.9, help="accuracy on the held-out samples that counts as success")
    parser.add_argument("--loader", choices=("shard", "stock"), default="shard")
    parser.add_argument("--workers", type=int, default=1, help="threads of ShardLoader, processes of DataLoader")
    parser.add_argument("--pad", type=int, default=2, help="images are shifted by up to so many pixels (0: not at all)")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint if it is there")
    options = parser.parse_args()
    if options.loader == "stock" and options.checkpoint:
        parser.error("--checkpoint needs --loader shard: a DataLoader cannot say where it stands")
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint")

    torch.manual_seed(0)
    saved: dict[str, Any] = torch.load(options.checkpoint) if options.resume and options.checkpoint.exists() else {}
    # a dataset that was rebuilt meanwhile: the samples of the checkpoint are those of its generation
    dataset = MMapShardDataset(options.dataset, generation=saved["loader"]["generation"] if saved else None)
    train, held_out = dataset.random_split([0.9, 0.1], stratify=True)
    loader: Any
    if options.loader == "shard":
        augment = Augment(crop=dataset.shape[1:], padding=options.pad) if options.pad else None
        loader = ShardLoader(train, options.batch_size, shuffle=True, num_workers=options.workers, augment=augment)
        held_out_loader: Any = ShardLoader(held_out, 256)
    else:
        loader = DataLoader(train, options.batch_size, shuffle=True, num_workers=options.workers)
        held_out_loader = DataLoader(held_out, 256)
    model = network(dataset.shape[0], len(dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.epochs * len(loader))
    if saved:
        for part, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule"), (loader, "loader")):
            part.load_state_dict(saved[name])

    def after_step() -> None:
        schedule.step()
        if options.checkpoint and schedule.last_epoch % options.save_every == 0:
            checkpoint()

    def checkpoint() -> None:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        save(options.checkpoint, {name: part.state_dict() for name, part in parts.items()})

    first = saved["loader"]["epoch"] if saved else 0
    if saved:
        print(f"going on in epoch {first + 1} at sample {saved['loader']['position']:,} of {len(train):,}", flush=True)
    for epoch in range(first, options.epochs):
        waiting, computing = train_epoch(model, loader, optimizer, after_step)
        if options.checkpoint:
            checkpoint()
        slow = f", slow: {loader.timings()['slow']}" if options.loader == "shard" else ""
        result = f"epoch {epoch + 1}: {accuracy(model, held_out_loader):.1%} of {len(held_out):,} held-out samples right"
        print(f"{result}; {waiting:.3f} s waiting for data, {computing:.2f} s computing{slow}", flush=True)
    score = accuracy(model, held_out_loader)
    if score < options.want:
        raise SystemExit(f"train.py: {score:.1%} is under the {options.want:.0%} that was wanted")


if __name__ == "__main__":
    main()
