"""Stops in the middle of an epoch and goes on, with torchdata's StatefulDataLoader: what comes is what would have come.

    resume_stateful.py DATASET [--batch-size 16] [--workers 2] [--steps 3]

ShardSampler has the state that StatefulDataLoader asks for, so that going on skips nothing by reading it.  The exit status is 1 if a batch differs.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mmcompile import MMapShardDataset, ShardSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    dataset = MMapShardDataset(options.dataset)

    def made() -> StatefulDataLoader:
        sampler = ShardSampler(dataset, options.batch_size, shuffle=True, seed=5)
        return StatefulDataLoader(dataset, options.batch_size, sampler=sampler, num_workers=options.workers)

    whole = [labels for _, labels in made()]
    stopped = made()
    for _ in itertools.islice(stopped, options.steps):
        state = stopped.state_dict()
    goes_on = made()
    goes_on.load_state_dict(state)
    rest = [labels for _, labels in goes_on]
    if len(rest) != len(whole) - options.steps or not all(map(torch.equal, rest, whole[options.steps :])):
        raise SystemExit("resume_stateful.py: other batches than without a stop")
    print(f"stopped after {options.steps} of {len(whole)} batches; the {len(rest)} that were left came, with {options.workers} workers")


if __name__ == "__main__":
    main()
