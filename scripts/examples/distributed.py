"""Trains and evaluates with several processes on CPUs: every rank reads its own part of one order, and a metric counts every sample once.

    python -m torch.distributed.run --nproc_per_node=2 distributed.py DATASET [--epochs 3] [--batch-size 64] [--checkpoint FILE] [--stop-after N]

Rank 0 opens the dataset and tells the others which generation that is, so that a rebuild in between changes nothing.  With --checkpoint training goes
on where the file says, also with another number of processes; --stop-after N ends it after N steps, as if it had been interrupted.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: its functions keep the one of the time of their import, with its threads, for ever
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmcompile import MMapShardDataset, ShardLoader


def open_together(root: str) -> MMapShardDataset:
    """The same generation on every rank."""
    dataset = MMapShardDataset(root) if dist.get_rank() == 0 else None
    generation = [None if dataset is None else dataset.generation]
    dist.broadcast_object_list(generation, src=0)
    return dataset if dataset is not None else MMapShardDataset(root, generation=generation[0])


@torch.no_grad()
def accuracy(model: nn.Module, loader: ShardLoader) -> tuple[int, int]:
    """(right, counted) over all ranks.  Ranks have as many steps each; `valid` is False for what was added to make it so."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.int64)
    for images, labels, valid in loader:
        right = model(images.float() / 255).argmax(1) == labels
        totals += torch.stack([(right & valid).sum(), valid.sum()])
    dist.all_reduce(totals)
    return int(totals[0]), int(totals[1])


def train(options: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = open_together(options.dataset)
    training, held_out = dataset.random_split([0.9, 0.1], stratify=True)
    loader = ShardLoader(training, options.batch_size, shuffle=True)
    held_out_loader = ShardLoader(held_out, options.batch_size, uneven="mask")
    size = torch.Size(dataset.shape).numel()
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, len(dataset.classes))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if options.checkpoint and options.checkpoint.exists():
        saved: dict[str, Any] = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first = saved["loader"]["epoch"]
        if rank == 0:
            print(f"going on in epoch {first + 1} at sample {saved['loader']['position']:,} of {len(training):,} with {ranks} processes", flush=True)

    steps = 0
    for epoch in range(first, options.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.float() / 255), labels).backward()
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
        if rank == 0 and options.checkpoint:  # the state is the same on all ranks
            part = options.checkpoint.with_name(f"{options.checkpoint.name}.part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}, part)
            os.replace(part, options.checkpoint)
        if steps == options.stop_after:
            break
        right, counted = accuracy(model, held_out_loader)
        if counted != len(held_out):
            raise SystemExit(f"distributed.py: {counted} samples were counted, the held-out part has {len(held_out)}")
        if rank == 0:
            print(f"epoch {epoch + 1}: {right:,} of {counted:,} held-out samples right, {ranks} processes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stop-after", type=int, help="steps")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    train(options)
    # In order, or a thread of the group meets an interpreter that is being torn down: the model, which refers to itself, lets go of the group, all
    # ranks are there, and with the last reference to the group its threads end.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
