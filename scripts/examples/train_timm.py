"""Trains one of timm's networks with timm's own training transforms, RandAugment and random erasing included.

    train_timm.py DATASET [--model resnet10t] [--size 64] [--epochs 1] [--batch-size 32] [--workers 2] [--loader stock|timm]

timm's transforms get the PIL images that they start from; nothing is decoded.  They draw by (seed, epoch, row), whoever draws.  --loader timm lets
timm's create_loader make the transforms and the DataLoader: its indices know no epoch, so the dataset is told, and workers begin anew with each.
"""

from __future__ import annotations

import argparse
from typing import Any

import timm
import torch
from timm.data import create_loader, create_transform
from torch import nn
from torch.utils.data import DataLoader

from mmcompile import MMapShardDataset, ShardSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loader", choices=("stock", "timm"), default="stock")
    options = parser.parse_args()

    torch.manual_seed(0)
    chance: dict[str, Any] = {"is_training": True, "auto_augment": "rand-m9-mstd0.5", "re_prob": 0.25}
    dataset = MMapShardDataset(options.dataset)
    loader: Any
    if options.loader == "timm":
        words = {"num_workers": options.workers, "persistent_workers": False, "device": torch.device("cpu")}
        loader = create_loader(dataset, options.size, options.batch_size, **chance, **words)
    else:
        dataset.transform = create_transform(options.size, **chance)
        sampler = ShardSampler(dataset, options.batch_size, shuffle=True)
        loader = DataLoader(dataset, options.batch_size, sampler=sampler, num_workers=options.workers)
    model = timm.create_model(options.model, num_classes=len(dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    checksum = 0.0
    for epoch in range(options.epochs):
        if options.loader == "timm":
            dataset.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            checksum += float(images.double().sum())
        print(
            f"epoch {epoch + 1}: {len(loader)} batches of {images.dtype} {tuple(images.shape[1:])}, loss {loss:.3f}, checksum {checksum:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
