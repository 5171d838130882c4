"""Trains a small network to say for each pixel which class it is of, from a dataset with images and masks.

    mmcompile build RAW DATASET --resize 256 --crop 256      (RAW holds images/ and masks/, paired by name)
    train_segmentation.py DATASET [--mask mask] [--epochs 5] [--batch-size 8] [--want 0.8]

Crops and flips are drawn anew each epoch, the same for an image and its mask; pixels of class 255 count for nothing.  A tenth of the samples is held
out; the exit status is 1 if the share of its pixels that come out right is under --want.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from mmcompile import Augment, MMapShardDataset, ShardLoader

#: The class of pixels that nobody labelled, as in Pascal VOC.
IGNORED = 255


def network(channels: int, classes: int) -> nn.Module:
    """Down to a quarter and back: scores (N, classes, H, W) for images (N, C, H, W) of any size."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(32, classes, 3, padding=1)),
    )


def as_float(images: torch.Tensor) -> torch.Tensor:
    """Bytes become [0, 1]; a dataset that was built with --normalize gives floats already."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def scores_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Scores of each pixel; sizes that no 4 divides are cut to what there is of them."""
    return model(as_float(images))[:, :, : images.shape[2], : images.shape[3]]


@torch.no_grad()
def accuracy(model: nn.Module, loader: ShardLoader, mask: str) -> float:
    """The share of the labelled pixels that come out right."""
    model.eval()
    right = total = 0
    for batch in loader:
        labelled = batch[mask] != IGNORED
        right += int((scores_of(model, batch["image"]).argmax(1) == batch[mask])[labelled].sum())
        total += int(labelled.sum())
    return right / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--mask", default="mask", help="the field of the masks")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--want", type=float, default=0.8, help="share of the held-out pixels that counts as success")
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = MMapShardDataset(options.dataset, fields=["image", options.mask], output="dict")
    train, held_out = dataset.random_split([0.9, 0.1])
    ids = {int(value) for batch in ShardLoader(dataset, 64) for value in batch[options.mask].unique()} - {IGNORED}
    height, width = dataset.shape[1:]
    augment = Augment(crop=(height, width), padding=2, hflip=0.5)
    loader = ShardLoader(train, options.batch_size, shuffle=True, augment=augment)
    held_out_loader = ShardLoader(held_out, options.batch_size)
    model = network(dataset.shape[0], max(ids) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            scores = scores_of(model, batch["image"])
            nn.functional.cross_entropy(scores, batch[options.mask].long(), ignore_index=IGNORED).backward()
            optimizer.step()
        print(
            f"epoch {epoch + 1}: {accuracy(model, held_out_loader, options.mask):.1%} of the pixels of {len(held_out):,} held-out images", flush=True
        )
    score = accuracy(model, held_out_loader, options.mask)
    if score < options.want:
        raise SystemExit(f"train_segmentation.py: {score:.1%} is under the {options.want:.0%} that was wanted")


if __name__ == "__main__":
    main()
