"""Trains a small ResNet with Hugging Face's Trainer, and goes on where a checkpoint was written, in the middle of an epoch too.

    train_transformers.py DATASET OUTPUT [--loader shard|own] [--epochs 2] [--batch-size 16] [--save-every 3] [--steps N] [--resume CHECKPOINT]

`get_train_dataloader` hands out a ShardLoader whose batches have the names that the model asks for; a callback puts where it stands into each
checkpoint.  --loader own leaves all that to Trainer, which shuffles and divides by itself: the dataset alone gives its fields these names.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback, TrainingArguments

from mmcompile import MMapShardDataset, ShardLoader


def named(image: Any, label: Any) -> dict[str, Any]:
    return {"pixel_values": image, "labels": label}


class ShardTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        device = self.args.device
        words = {"shuffle": True, "seed": self.args.seed, "device": device, "batch_transform": lambda batch, rng: named(*batch)}
        return ShardLoader(self.train_dataset, self.args.train_batch_size, **words)


class KeepsPlace(TrainerCallback):
    """Saves where the loader stands beside each checkpoint, and loads it from one."""

    def __init__(self, resume: Path | None) -> None:
        self.resume = resume

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: ShardLoader, **_: Any) -> None:
        if self.resume:
            train_dataloader.load_state_dict(torch.load(self.resume / "loader.pt"))
        print(f"begins with {train_dataloader.state_dict()}, {len(train_dataloader)} steps an epoch", flush=True)

    def on_save(self, args: Any, state: Any, control: Any, train_dataloader: ShardLoader, **_: Any) -> None:
        torch.save(train_dataloader.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loader.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("output")
    parser.add_argument("--loader", choices=("shard", "own"), default="shard")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=3, help="steps")
    parser.add_argument("--steps", type=int, default=-1, help="end after so many, as if interrupted")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()

    own = options.loader == "own"
    dataset = MMapShardDataset(options.dataset, dtype=torch.float32, transforms=named if own else None)
    torch.manual_seed(0)
    small = {"embedding_size": 8, "hidden_sizes": [16], "depths": [1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_channels=dataset.shape[0], num_labels=len(dataset.classes), **small))
    arguments = TrainingArguments(
        **{"output_dir": options.output, "num_train_epochs": options.epochs, "per_device_train_batch_size": options.batch_size},
        **{"max_steps": options.steps, "save_steps": options.save_every, "save_strategy": "steps", "learning_rate": 1e-2},
        **{"report_to": "none", "disable_tqdm": True, "lr_scheduler_type": "constant"},
        ignore_data_skip=not own,  # the loader itself goes on where it stood
        use_cpu=not torch.cuda.is_available(),  # without saying so, processes on CPUs would not know each other
    )
    if own:
        trainer = Trainer(model, arguments, train_dataset=dataset)
    else:
        trainer = ShardTrainer(model, arguments, train_dataset=dataset, callbacks=[KeepsPlace(options.resume)])
    done = trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    print(f"{done.global_step} steps, {trainer.state.epoch} epochs, {trainer.accelerator.num_processes} processes", flush=True)


if __name__ == "__main__":
    main()
