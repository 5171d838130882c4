"""Trains with Hugging Face Accelerate, on one or several processes, and goes on where a state was saved, in the middle of an epoch too.

    accelerate launch --num_processes 2 train_accelerate.py DATASET [--epochs 2] [--state DIR] [--stop-after N]

`prepare` leaves a ShardLoader as it is: it knows the ranks itself, and brings batches to `device=`.  With `register_for_checkpointing` where it
stands is part of what `save_state` writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from mmcompile import MMapShardDataset, ShardLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--state", type=Path, help="go on from this folder, if it is there")
    parser.add_argument("--stop-after", type=int, help="steps")
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without saying so, processes on CPUs would not know each other
    dataset = MMapShardDataset(options.dataset, dtype=torch.float32)
    model: nn.Module = nn.Sequential(
        *(nn.Flatten(), nn.Linear(torch.Size(dataset.shape).numel(), 32), nn.ReLU(), nn.Linear(32, len(dataset.classes)))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = ShardLoader(dataset, options.batch_size, shuffle=True, device=accelerator.device)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if options.state and options.state.exists():
        accelerator.load_state(options.state)
    where = loader.state_dict()
    accelerator.print(f"begins in epoch {where['epoch'] + 1} at sample {where['position']}, {len(loader)} steps an epoch", flush=True)

    steps = 0
    for epoch in range(where["epoch"], options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
        if steps == options.stop_after:
            break
        accelerator.print(f"epoch {epoch + 1} is over after {steps} steps with {accelerator.num_processes} processes", flush=True)
    if options.state:
        accelerator.save_state(options.state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
