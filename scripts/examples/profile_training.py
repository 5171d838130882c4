"""Shows what a loader does beside the training, in torch.profiler: its ranges are named mmcompile.

    profile_training.py DATASET [--batch-size 64] [--trace FILE.json]

The trace opens in Perfetto or chrome://tracing: mmcompile.wait in the loop's thread is time that training spends waiting; mmcompile.gather, in a
thread of the loader, is what it waits for.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mmcompile import MMapShardDataset, ShardLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--trace")
    options = parser.parse_args()

    dataset = MMapShardDataset(options.dataset, dtype=torch.float32)
    model = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(dataset.shape).numel(), len(dataset.classes)))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the loader's too; without it the loop's own are seen alone
    loader = ShardLoader(dataset, options.batch_size, shuffle=True, batch_transform=lambda batch, rng: [batch[0].flip(3), batch[1]])
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
    for event in sorted(profiler.key_averages(), key=lambda event: -event.cpu_time_total):
        if event.key.startswith("mmcompile."):
            print(f"{event.key}: {event.count} times, {event.cpu_time_total / 1e3:.2f} ms")
    if options.trace:
        profiler.export_chrome_trace(options.trace)


if __name__ == "__main__":
    main()
