"""Trains a small network to find objects, from a dataset with images, boxes and their classes.

    mmcompile build RAW DATASET --resize 256x256      (RAW holds images/, and labels/ with YOLO's text files)
    train_detection.py DATASET [--epochs 10] [--batch-size 16] [--want 0.5]

A batch holds lists of one length, filled up, and how many of each count; `targets_of` makes of them what torchvision's detectors take.  A tenth of
the samples is held out; the exit status is 1 if the share of its objects that are found (right class, boxes overlapping by half) is under --want.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from mmcompile import Augment, MMapShardDataset, ShardLoader

#: Pixels of a cell of the grid in which the network looks for middles of objects.
CELL = 8


def network(channels: int, classes: int) -> nn.Module:
    """For each cell a score for each class, and how far from its middle the sides of an object lie, in cells: (N, classes + 4, H / 8, W / 8)."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        nn.Conv2d(64, classes + 4, 1),
    )


def as_float(images: torch.Tensor) -> torch.Tensor:
    """Bytes become [0, 1]; a dataset that was built with --normalize gives floats already."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def targets_of(batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """{"boxes" (n, 4), "labels" (n,)} of each image: what is filled up is left away."""
    counts = batch["boxes_count"].tolist()
    return [{"boxes": batch["boxes"][i, :n], "labels": batch["labels"][i, :n]} for i, n in enumerate(counts)]


def cells_of(boxes: torch.Tensor, grid: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, column) of the cells in which the middles of boxes lie."""
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2 / CELL
    return middles[:, 1].long().clamp(0, grid[0] - 1), middles[:, 0].long().clamp(0, grid[1] - 1)


def loss_of(found: torch.Tensor, targets: list[dict[str, torch.Tensor]], classes: int) -> torch.Tensor:
    """That of the scores of all cells, and of the sides in those that hold the middle of an object."""
    wanted = torch.zeros_like(found[:, :classes])
    sides = found.new_zeros(())
    for i, target in enumerate(targets):
        rows, columns = cells_of(target["boxes"], found.shape[2:])
        wanted[i, target["labels"], rows, columns] = 1
        middles = torch.stack([columns, rows], 1) + 0.5
        true = torch.cat([middles - target["boxes"][:, :2] / CELL, target["boxes"][:, 2:] / CELL - middles], 1)
        sides = sides + nn.functional.smooth_l1_loss(found[i, classes:, rows, columns].T, true, reduction="sum")
    objects = max(sum(len(target["labels"]) for target in targets), 1)
    scores = nn.functional.binary_cross_entropy_with_logits(found[:, :classes], wanted, reduction="sum")
    return (scores + sides) / objects


@torch.no_grad()
def share_found(model: nn.Module, loader: ShardLoader, classes: int) -> float:
    """The share of the objects whose cell has their class first, with a box that overlaps theirs by half."""
    model.eval()
    right = total = 0
    for batch in loader:
        found = model(as_float(batch["image"]))
        for at, target in zip(found, targets_of(batch), strict=True):
            boxes = target["boxes"]
            rows, columns = cells_of(boxes, at.shape[1:])
            middles = (torch.stack([columns, rows], 1) + 0.5) * CELL
            sides = at[classes:, rows, columns].T * CELL
            made = torch.cat([middles - sides[:, :2], middles + sides[:, 2:]], 1)
            common = (torch.minimum(made[:, 2:], boxes[:, 2:]) - torch.maximum(made[:, :2], boxes[:, :2])).clamp(min=0).prod(1)
            areas = [(b[:, 2:] - b[:, :2]).clamp(min=0).prod(1) for b in (made, boxes)]
            overlap = common / (areas[0] + areas[1] - common)
            right += int(((at[:classes, rows, columns].argmax(0) == target["labels"]) & (overlap >= 0.5)).sum())
            total += len(boxes)
    return right / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--want", type=float, default=0.5, help="share of the held-out objects that counts as success")
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = MMapShardDataset(options.dataset, fields=["image", "boxes", "labels", "boxes_count"], output="dict")
    train, held_out = dataset.random_split([0.9, 0.1])
    classes = 1 + max(int(batch["labels"].max()) for batch in ShardLoader(dataset, 64))
    loader = ShardLoader(train, options.batch_size, shuffle=True, augment=Augment(hflip=0.5))
    held_out_loader = ShardLoader(held_out, options.batch_size)
    model = network(dataset.shape[0], classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(as_float(batch["image"])), targets_of(batch), classes).backward()
            optimizer.step()
        print(
            f"epoch {epoch + 1}: {share_found(model, held_out_loader, classes):.1%} of the objects of {len(held_out):,} held-out images", flush=True
        )
    score = share_found(model, held_out_loader, classes)
    if score < options.want:
        raise SystemExit(f"train_detection.py: {score:.1%} is under the {options.want:.0%} that was wanted")


if __name__ == "__main__":
    main()
