"""Trains with automatic mixed precision: bytes on disk and on their way, bfloat16 where the network is.

    train_amp.py DATASET [--device cuda] [--epochs 3] [--batch-size 64]

`dtype=` of the dataset says which numbers training gets, `device=` of the loader where bytes become numbers.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from mmcompile import MMapShardDataset, ShardLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(options.device)
    dataset = MMapShardDataset(options.dataset, dtype=torch.bfloat16)
    loader = ShardLoader(dataset, options.batch_size, shuffle=True, device=device)
    model = nn.Sequential(
        *(nn.Conv2d(dataset.shape[0], 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(256, len(dataset.classes))),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # bfloat16 has the range of float32: nothing to scale
            optimizer.step()
            total += loss.detach() / len(loader)
        print(f"epoch {epoch + 1}: mean loss {total:.3f}", flush=True)
    timings = loader.timings()
    print(f"{dataset.fields['image'].dtype} on disk, {images.dtype} on {images.device.type}; weights stay {model[0].weight.dtype}")
    print(f"{timings['bytes']:,} bytes of the dataset in the last epoch, slow: {timings['slow']}")


if __name__ == "__main__":
    main()
