"""Trains as the published ImageNet examples do, from class folders with torchvision, or with --compiled from what mmcompile made of them.

    mmcompile build RAW OUT --compat torchvision --resize 256 --crop 256 --normalize imagenet
    train_imagenet.py RAW [--compiled OUT] [--arch resnet18] [--epochs 1] [--batch-size 64] [--workers 2]

What changes is one line for evaluation, whose batches are the same to the bit, and another for training, where random crops and flips stood: they
are cut out of the 256 x 256 pixels that are stored.  Each run says how long it waited for data, and a checksum of all that it evaluated.
"""

from __future__ import annotations

import argparse
import time
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

from mmcompile import Augment, MMapShardDataset, ShardLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--compiled")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    if args.compiled:
        train = MMapShardDataset(args.compiled, "train")
        train_loader = ShardLoader(train, args.batch_size, shuffle=True, num_workers=args.workers, augment=Augment(resized_crop=224, hflip=0.5))
        val = MMapShardDataset(args.compiled, "val", crop=224)
    else:
        random = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        train = datasets.ImageFolder(args.raw / "train", transforms.Compose([*random, transforms.ToTensor(), normalize]))
        train_loader = DataLoader(train, args.batch_size, shuffle=True, num_workers=args.workers)
        static = [transforms.Resize(256), transforms.CenterCrop(224)]
        val = datasets.ImageFolder(args.raw / "val", transforms.Compose([*static, transforms.ToTensor(), normalize]))
    val_loader = DataLoader(val, args.batch_size, num_workers=args.workers)

    torch.manual_seed(0)
    model = models.get_model(args.arch, num_classes=len(train.classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        waiting, mark = 0.0, time.perf_counter()
        for images, labels in train_loader:
            waiting += time.perf_counter() - mark
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            mark = time.perf_counter()
        model.eval()
        right = checksum = 0
        with torch.no_grad():
            for images, labels in val_loader:
                right += int((model(images).argmax(1) == labels).sum())
                checksum = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(images.numpy().tobytes(), checksum))
        print(f"epoch {epoch + 1}: {waiting:.2f} s waiting for data, {right} of {len(val)} right", flush=True)
    print(f"evaluated {len(val)} images of {images.dtype} {tuple(images.shape[1:])} in {len(val.classes)} classes, checksum {checksum:08x}")


if __name__ == "__main__":
    main()
