"""Trains one of timm's networks with timm's own training transforms, RandAugment and random erasing included.

    train_timm.py DATASET [--model resnet10t] [--size 64] [--epochs 1] [--batch-size 32] [--workers 2]

timm's transforms start from PIL images, so ToPILImage stands before them; nothing is decoded.  They draw by (seed, epoch, row), whoever draws.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.data import create_transform
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, ToPILImage

from mmcompile import MMapShardDataset, ShardSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    timms = create_transform(options.size, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25)
    dataset = MMapShardDataset(options.dataset, transform=Compose([ToPILImage(), timms]))
    sampler = ShardSampler(dataset, options.batch_size, shuffle=True)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, num_workers=options.workers)
    model = timm.create_model(options.model, num_classes=len(dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    checksum = 0.0
    for epoch in range(options.epochs):
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
