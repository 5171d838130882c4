"""Trains with Lightning's Trainer on one or several processes, and goes on where a checkpoint was written, in the middle of an epoch too.

    train_lightning.py DATASET [--devices 2] [--loader shard|stock|stateful] [--checkpoints DIR [--save-every 100]] [--steps N]

Trainer needs no option: a ShardLoader is left as it is, a ShardSampler is known to divide among ranks, and the state of a ShardLoader, or of
torchdata's StatefulDataLoader, is part of Lightning's checkpoint.  (A stock DataLoader has no state: from its checkpoints an epoch is begun anew.)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from mmcompile import MMapShardDataset, ShardLoader, ShardSampler


class Classifier(LightningModule):
    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, classes))

    def training_step(self, batch: list[torch.Tensor], step: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def loader_of(kind: str, dataset: MMapShardDataset, batch_size: int) -> Any:
    if kind == "shard":
        return ShardLoader(dataset, batch_size, shuffle=True)
    sampler = ShardSampler(dataset, batch_size, shuffle=True)
    if kind == "stock":
        return DataLoader(dataset, batch_size, sampler=sampler)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size, sampler=sampler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--loader", choices=("shard", "stock", "stateful"), default="shard")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--checkpoints", type=Path, help="go on from last.ckpt in this folder, if it is there")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--steps", type=int, default=-1, help="end after so many, as if interrupted")
    options = parser.parse_args()

    dataset = MMapShardDataset(options.dataset, dtype=torch.float32)
    loader = loader_of(options.loader, dataset, options.batch_size)
    callbacks = []
    if options.checkpoints:
        callbacks = [ModelCheckpoint(options.checkpoints, "last", every_n_train_steps=options.save_every, enable_version_counter=False)]
    trainer = Trainer(
        **{"accelerator": "cpu", "strategy": "ddp" if options.devices > 1 else "auto", "devices": options.devices},
        **{"max_epochs": options.epochs, "max_steps": options.steps, "callbacks": callbacks, "enable_checkpointing": bool(callbacks)},
        **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    last = options.checkpoints and options.checkpoints / "last.ckpt"
    trainer.fit(Classifier(torch.Size(dataset.shape).numel(), len(dataset.classes)), loader, ckpt_path=last if last and last.exists() else None)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, {len(loader)} an epoch, with {trainer.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
