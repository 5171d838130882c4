"""Hugging Face's Accelerate and Trainer over a dataset, where they are installed: order, ranks and going on are as without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mmcompile.runtime.ranks import ranks_of_indices
from tests.example_runs import EXAMPLES, brightness, close, needs, run_all, same
from tests.test_examples import run

TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return brightness(tmp_path_factory.mktemp("clients") / "out")


def test_accelerate_neither_divides_twice_nor_loses_its_place(dataset: Path, tmp_path: Path) -> None:
    needs("accelerate", "safetensors")
    from safetensors.torch import load_file

    script = EXAMPLES / "train_accelerate.py"
    said = run(script, dataset, "--batch-size", 40, "--state", tmp_path / "alone")
    assert said.endswith("epoch 2 is over after 10 steps with 1 processes\n")
    words = (*TWO, script, dataset, "--batch-size", 20, "--state", tmp_path / "two")
    assert "begins in epoch 1 at sample 0, 5 steps an epoch" in run(*words, "--stop-after", 7)
    said = run(*words)
    assert "begins in epoch 2 at sample 80, 5 steps an epoch" in said
    assert "epoch 2 is over after 3 steps with 2 processes" in said
    assert close(load_file(tmp_path / "alone" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors"))


#: Two processes of Accelerate's read an epoch of a prepared DataLoader; argv: dataset, output, what is said to each sampler.
PREPARED = """
import json, sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from mmcompile import MMapShardDataset, ShardLoader, ShardSampler

out, folder, *said = sys.argv[1:]
accelerator = Accelerator(cpu=True)
dataset = MMapShardDataset(out, fields=["label"], target_transform=lambda label: label)
plain = ShardLoader(MMapShardDataset(out), 20, shuffle=True, seed=3)
assert accelerator.prepare(plain) is plain
found = []
for words in said:
    loader = accelerator.prepare(DataLoader(dataset, 20, sampler=ShardSampler(dataset, 20, shuffle=True, seed=3, **json.loads(words))))
    try:
        seen = [[labels.tolist() for labels in loader] for _ in range(2)]
        assert seen == [[labels.tolist() for _, labels in plain] for _ in range(2)]
        found.append([len(loader), seen])
    except RuntimeError as error:
        found.append([None, str(error)])
with open(f"{folder}/{accelerator.process_index}.json", "w") as file:
    json.dump(found, file)
accelerator.end_training()
"""


def test_a_prepared_sampler_divides_nothing_twice_and_who_divides_is_asked(dataset: Path, tmp_path: Path) -> None:
    needs("accelerate")
    (tmp_path / "prepared.py").write_text(PREPARED)
    run(*TWO, tmp_path / "prepared.py", dataset, tmp_path, json.dumps({"rank": 0, "world_size": 1}), "{}")
    for rank in range(2):
        (length, seen), (_, error) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert length == len(seen[0]) == 5
        assert "rank=0, world_size=1 where the DataLoader is prepared" in error


def test_one_process_of_accelerates_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        @staticmethod
        def is_initialized() -> bool:
            return True

    monkeypatch.setitem(sys.modules, "accelerate.state", State)
    assert ranks_of_indices() == (0, 1)
    assert ranks_of_indices(1, 2) == (1, 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="use ShardLoader"):
        ranks_of_indices()


def test_trainer_of_transformers(dataset: Path, tmp_path: Path) -> None:
    needs("transformers", "accelerate", "safetensors")
    from safetensors.torch import load_file

    runs = []
    for loader in ("shard", "own"):
        whole, parts = ((dataset, tmp_path / loader / name, "--batch-size", 40, "--loader", loader) for name in ("whole", "parts"))
        runs += [whole, (*parts, "--steps", 3), (*parts, "--resume", tmp_path / loader / "parts" / "checkpoint-3")]
    said = run_all(tmp_path, EXAMPLES / "train_transformers.py", runs)
    assert said.count("10 steps, 2.0 epochs, 1 processes") == 4
    assert said.count("'epoch': 0, 'position': 0}, 5 steps an epoch") == 2
    assert said.count("'epoch': 0, 'position': 120}") == 1
    for loader in ("shard", "own"):
        assert same(*(load_file(tmp_path / loader / name / "checkpoint-10" / "model.safetensors") for name in ("whole", "parts")))
