"""Trains a small network from a compiled dataset with a stock DataLoader, and says where the time went.

    train.py DATASET [--epochs 5] [--batch-size 64] [--want 0.9]

A tenth of the samples is held out; the exit status is 1 if the share of it that comes out right is under --want.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split

from mmcompile import MMapShardDataset


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


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    for images, labels in loader:
        right += int((model(as_float(images)).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--want", type=float, default=0.9, help="accuracy on the held-out samples that counts as success")
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = MMapShardDataset(options.dataset)
    train, held_out = random_split(dataset, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out, batch_size=256)
    model = network(dataset[0][0].shape[0], len(dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=options.epochs * len(loader))

    for epoch in range(options.epochs):
        model.train()
        waiting = computing = 0.0
        mark = time.perf_counter()
        for images, labels in loader:
            ready = time.perf_counter()
            waiting += ready - mark
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(as_float(images)), labels).backward()
            optimizer.step()
            schedule.step()
            mark = time.perf_counter()
            computing += mark - ready
        score = accuracy(model, held_out_loader)
        result = f"epoch {epoch + 1}: {score:.1%} of {len(held_out):,} held-out samples right"
        print(f"{result}; {waiting:.2f} s waiting for data, {computing:.2f} s computing", flush=True)
    if score < options.want:
        raise SystemExit(f"train.py: {score:.1%} is under the {options.want:.0%} that was wanted")


if __name__ == "__main__":
    main()
