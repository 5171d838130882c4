"""Augments with torchvision's v2 transforms, and shows that chance is that of (seed, epoch, row), whoever draws.

    augment_torchvision.py DATASET [--crop 8] [--batch-size 64] [--workers 2]

Reads two epochs in the loop's own process, in worker processes and by ShardLoader: the exit status is 1 if they are not the same, to the bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from mmcompile import MMapShardDataset, ShardLoader, ShardSampler


def two_epochs(loader: Any) -> list[torch.Tensor]:
    return [torch.cat([images.clone() for images, _ in loader]) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--crop", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(options.crop, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4),
            v2.ToDtype(torch.float32, scale=True),  # in place of ToTensor: samples are tensors already
            v2.Normalize([0.5], [0.25]),
        ]
    )
    dataset = MMapShardDataset(options.dataset, transform=transform)

    def stock(workers: int) -> Any:
        return DataLoader(dataset, options.batch_size, sampler=ShardSampler(dataset, options.batch_size, shuffle=True, seed=7), num_workers=workers)

    here = two_epochs(stock(0))
    others = {f"{options.workers} workers": stock(options.workers), "ShardLoader": ShardLoader(dataset, options.batch_size, shuffle=True, seed=7)}
    for name, loader in others.items():
        if not all(map(torch.equal, here, two_epochs(loader))):
            raise SystemExit(f"augment_torchvision.py: {name}: other samples than without workers")
    print(f"{here[0].dtype} {tuple(here[0].shape)}: two epochs are the same without workers, with {' and with '.join(others)}")
    print(f"and differ from each other: {not torch.equal(*here)}")


if __name__ == "__main__":
    main()
