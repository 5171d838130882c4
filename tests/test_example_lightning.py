"""Lightning's Trainer over a dataset, where it is installed: order, ranks and going on are as without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.example_runs import EXAMPLES, STEPS, brightness, close, needs, run_all, same
from tests.test_examples import run

SCRIPT = EXAMPLES / "train_lightning.py"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return brightness(tmp_path_factory.mktemp("clients") / "out")


def trained(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Steps and weights of a checkpoint."""
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    return saved["global_step"], saved["state_dict"]


def test_lightning_neither_divides_twice_nor_loses_its_place(dataset: Path, tmp_path: Path) -> None:
    needs("lightning", "torchdata")

    def words(folder: str, loader: str, devices: int) -> tuple[object, ...]:
        size, checkpoints = ("--batch-size", 40 // devices), ("--checkpoints", tmp_path / folder, "--save-every", 1)
        return (dataset, "--loader", loader, "--devices", devices, *size, *checkpoints)

    alone, stateful = words("alone", "shard", 1), words("stateful", "stateful", 1)
    said = run_all(tmp_path, SCRIPT, [alone, (*stateful, "--steps", 3), stateful])
    assert [line for line in said.splitlines() if " steps, " in line] == [f"{n} steps, 5 an epoch, with 1 processes" for n in (STEPS, 3, STEPS)]
    # Lightning starts the second process by itself
    assert f"{STEPS} steps, 5 an epoch, with 2 processes" in run(SCRIPT, *words("two", "stock", 2))
    shard = words("shard", "shard", 2)
    said = run_all(tmp_path, SCRIPT, [(*shard, "--steps", 3), shard], 2)
    assert [line for line in said.splitlines() if " steps, " in line] == [f"{n} steps, 5 an epoch, with 2 processes" for n in (3, STEPS)]

    steps, weights = zip(*(trained(tmp_path / name) for name in ("alone", "two", "shard", "stateful")), strict=True)
    assert steps == (STEPS,) * 4
    assert close(weights[0], weights[1])
    assert same(weights[1], weights[2])
    assert same(weights[0], weights[3])
