"""Shows one sample as training saw it in one epoch: its crop and flip depend on (seed, epoch, row) alone.

    replay.py DATASET --row I [--seed S] [--epoch E] [--crop 224] [--flip 0.5] [--split NAME] [--png FILE]

Reads the sample alone, then the batch of the shuffled epoch in which training got it, and says whether the two are the same, to the bit: the exit
status is 1 if not.  --png writes the image (needs Pillow).
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch

from mmcompile import Augment, MMapShardDataset, ShardLoader, ShardSampler

BATCH = 256


def first_image(loader: ShardLoader, at: int = 0) -> torch.Tensor:
    for batch in loader:
        return (batch[0] if isinstance(batch, list) else batch)[at].clone()
    raise SystemExit("replay.py: no batch came")


def alone(dataset: MMapShardDataset, row: int, epoch: int, settings: dict[str, Any]) -> torch.Tensor:
    """The sample in a loader of its own: whoever else is in the batch does not matter."""
    loader = ShardLoader(dataset.subset([row]), num_workers=0, **settings)
    loader.set_epoch(epoch)
    return first_image(loader)


def in_training(dataset: MMapShardDataset, row: int, epoch: int, settings: dict[str, Any]) -> tuple[int, torch.Tensor]:
    """The sample's position in the epoch, and the sample out of the batch that a shuffled loader gives there."""
    sampler = ShardSampler(dataset, BATCH, shuffle=True, seed=settings["seed"], rank=0, world_size=1)
    sampler.set_epoch(epoch)
    position = next(k for k, sample in enumerate(sampler) if sample == row)
    loader = ShardLoader(dataset, BATCH, shuffle=True, rank=0, world_size=1, **settings)
    begin = position // BATCH * BATCH
    loader.load_state_dict({"generation": dataset.generation, "seed": settings["seed"], "epoch": epoch, "position": begin})
    return position, first_image(loader, position - begin)


def write_png(image: torch.Tensor, path: str) -> None:
    from PIL import Image

    if image.dtype != torch.uint8:
        raise SystemExit(f"replay.py: --png writes uint8 images, this one is {image.dtype}")
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(path, format="PNG")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--row", type=int, required=True, help="the sample's number in the split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--crop", type=int)
    parser.add_argument("--flip", type=float, default=0.0)
    parser.add_argument("--split")
    parser.add_argument("--png")
    options = parser.parse_args()

    dataset = MMapShardDataset(options.dataset, options.split)
    if dataset.dtype.is_floating_point:  # normalised when read, perhaps: a picture wants the bytes on disk, where there are some
        with contextlib.suppress(ValueError):
            dataset = MMapShardDataset(options.dataset, options.split, dtype=torch.uint8)
    if not 0 <= options.row < len(dataset):
        parser.error(f"--row {options.row}: the split has {len(dataset):,} samples")
    settings: dict[str, Any] = {"seed": options.seed, "augment": Augment(crop=options.crop, hflip=options.flip)}
    image = alone(dataset, options.row, options.epoch, settings)
    position, seen = in_training(dataset, options.row, options.epoch, settings)
    print(
        f"sample {options.row} ({dataset.source(options.row)}), seed {options.seed}, epoch {options.epoch}: position {position:,} of {len(dataset):,}"
    )
    print(f"{image.dtype} {tuple(image.shape)}, mean {image.double().mean():.4f}")
    if options.png:
        write_png(image, options.png)
        print(f"written to {options.png}")
    if not torch.equal(image, seen):
        raise SystemExit("replay.py: not what the loader gave")
    print("the same, to the bit, as in the shuffled epoch")


if __name__ == "__main__":
    main()
