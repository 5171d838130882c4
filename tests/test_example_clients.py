"""The scripts that show a dataset in other libraries' hands, each where its library is installed: order, ranks and going on are as without it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmcompile.runtime.ranks import ranks_of_indices
from tests.support import make_dataset
from tests.test_examples import ENVIRONMENT, ROOT, run

EXAMPLES = ROOT / "scripts" / "examples"
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

#: Steps of two epochs, with a batch of 40 in all; the last step is as large as the others.
N, STEPS = 200, 10


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 12 x 12 whose brightness is their class, of two."""
    out = tmp_path_factory.mktemp("clients") / "out"
    labels = np.arange(N) % 2
    noise = np.random.default_rng(0).integers(0, 100, (N, 1, 12, 12))
    make_dataset(out, (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels, shards=(90, 110))
    return out


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coloured") / "out"
    make_dataset(out, np.random.default_rng(0).integers(0, 256, (64, 3, 40, 40), dtype=np.uint8), np.arange(64) % 2, shards=(30, 34))
    return out


def needs(*packages: str) -> None:
    """Skip where one of them is missing; they are imported by the scripts alone, whose warnings are their own."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Are two networks the same, but for the order in which sums were made?"""
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_mixed_precision(dataset: Path) -> None:
    said = run(EXAMPLES / "train_amp.py", dataset, "--device", "cpu")
    assert "uint8 on disk, torch.bfloat16 on cpu; weights stay torch.float32" in said
    losses = [float(loss) for loss in re.findall(r"mean loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses[2] < losses[0] / 2


def test_two_processes_of_ddp_train_what_one_does(dataset: Path, tmp_path: Path) -> None:
    weights = []
    for processes, size in ((1, 20), (2, 10)):
        state = tmp_path / f"{processes}.pt"
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", EXAMPLES / "distributed.py")
        assert f"{processes} processes" in run(*launch, dataset, "--epochs", 2, "--batch-size", size, "--checkpoint", state)
        saved = torch.load(state)
        assert (saved["loader"]["epoch"], saved["loader"]["position"]) == (2, 0)
        weights.append(saved["model"])
    assert close(*weights)


def lightnings(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Steps and weights of a checkpoint."""
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    return saved["global_step"], saved["state_dict"]


def test_lightning_neither_divides_twice_nor_loses_its_place(dataset: Path, tmp_path: Path) -> None:
    needs("lightning", "torchdata")

    def train(folder: str, loader: str, devices: int, *more: Any) -> tuple[int, dict[str, torch.Tensor]]:
        words = ("--loader", loader, "--devices", devices, "--batch-size", 40 // devices, "--checkpoints", tmp_path / folder, "--save-every", 1)
        said = run(EXAMPLES / "train_lightning.py", dataset, *words, *more)
        assert f"steps, {STEPS // 2} an epoch, with {devices} processes" in said
        return lightnings(tmp_path / folder)

    steps, alone = train("alone", "shard", 1)
    assert steps == STEPS
    steps, two = train("two", "stock", 2)
    assert steps == STEPS
    assert close(alone, two)
    for loader, devices, whole in (("shard", 2, two), ("stateful", 1, alone)):
        assert train(loader, loader, devices, "--steps", 3)[0] == 3
        steps, resumed = train(loader, loader, devices)
        assert steps == STEPS
        assert same(resumed, whole)


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


#: Two processes of Accelerate's read an epoch of a prepared DataLoader; argv: dataset, output, what is said to the sampler.
PREPARED = """
import json, sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from mmcompile import MMapShardDataset, ShardLoader, ShardSampler

out, folder, said = sys.argv[1:]
accelerator = Accelerator(cpu=True)
dataset = MMapShardDataset(out, fields=["label"], target_transform=lambda label: label)
plain = ShardLoader(MMapShardDataset(out), 20, shuffle=True, seed=3)
assert accelerator.prepare(plain) is plain
loader = accelerator.prepare(DataLoader(dataset, 20, sampler=ShardSampler(dataset, 20, shuffle=True, seed=3, **json.loads(said))))
try:
    seen = [[labels.tolist() for labels in loader] for _ in range(2)]
    assert seen == [[labels.tolist() for _, labels in plain] for _ in range(2)]
except RuntimeError as error:
    seen = str(error)
with open(f"{folder}/{accelerator.process_index}.json", "w") as file:
    json.dump([len(loader) if seen and not isinstance(seen, str) else None, seen], file)
accelerator.end_training()
"""


def test_a_prepared_sampler_divides_nothing_twice_and_who_divides_is_asked(dataset: Path, tmp_path: Path) -> None:
    needs("accelerate")
    (tmp_path / "prepared.py").write_text(PREPARED)
    for said in ({"rank": 0, "world_size": 1}, {}):
        run(*TWO, tmp_path / "prepared.py", dataset, tmp_path, json.dumps(said))
        for rank in range(2):
            length, seen = json.loads((tmp_path / f"{rank}.json").read_text())
            if said:
                assert length == len(seen[0]) == 5
            else:
                assert "rank=0, world_size=1 where the DataLoader is prepared" in seen


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

    script, size = EXAMPLES / "train_transformers.py", ("--batch-size", 40)
    whole = run(script, dataset, tmp_path / "whole", *size)
    assert "'epoch': 0, 'position': 0}, 5 steps an epoch" in whole
    assert "10 steps, 2.0 epochs, 1 processes" in whole
    run(script, dataset, tmp_path / "parts", *size, "--steps", 3)
    said = run(script, dataset, tmp_path / "parts", *size, "--resume", tmp_path / "parts" / "checkpoint-3")
    assert "'epoch': 0, 'position': 120}" in said
    assert "10 steps, 2.0 epochs" in said
    assert same(*(load_file(tmp_path / name / "checkpoint-10" / "model.safetensors") for name in ("whole", "parts")))


def test_torchvisions_transforms_draw_the_same_in_any_process(coloured: Path) -> None:
    needs("torchvision")
    said = run(EXAMPLES / "augment_torchvision.py", coloured, "--crop", 24, "--batch-size", 16)
    assert "torch.float32 (64, 3, 24, 24): two epochs are the same without workers, with 2 workers and with ShardLoader" in said
    assert "differ from each other: True" in said


def test_timms_transforms_draw_the_same_in_any_process(coloured: Path) -> None:
    needs("timm")
    said = [run(EXAMPLES / "train_timm.py", coloured, "--size", 32, "--workers", workers) for workers in (0, 2)]
    assert "2 batches of torch.float32 (3, 32, 32)" in said[0]
    assert said[0] == said[1]


def test_the_imagenet_example_evaluates_the_same_bytes(tmp_path: Path) -> None:
    needs("torchvision")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 5)):
        for i in range(count):
            folder = tmp_path / "raw" / split / ("cat", "dog")[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            size = tuple(rng.integers(200, 500, 2))  # odd and even, larger and smaller than what is asked for
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    settings = ("--compat", "torchvision", "--resize", 256, "--crop", 256, "--normalize", "imagenet", "--workers", 1)
    run("-m", "mmcompile", "build", tmp_path / "raw", tmp_path / "out", *settings)
    words = (EXAMPLES / "train_imagenet.py", tmp_path / "raw", "--arch", "mobilenet_v3_small", "--batch-size", 3)
    said = [run(*words, *more).splitlines()[-1] for more in ((), ("--compiled", tmp_path / "out"))]
    assert said[0].startswith("evaluated 5 images of torch.float32 (3, 224, 224) in 2 classes, checksum ")
    assert said[0] == said[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on(dataset: Path, workers: int) -> None:
    needs("torchdata")
    said = run(EXAMPLES / "resume_stateful.py", dataset, "--workers", workers)
    assert f"stopped after 3 of 13 batches; the 10 that were left came, with {workers} workers" in said


def test_the_profiler_shows_what_the_loaders_threads_do(dataset: Path, tmp_path: Path) -> None:
    said = run(EXAMPLES / "profile_training.py", dataset, "--trace", tmp_path / "trace.json")
    assert {line.partition(" ")[0] for line in said.splitlines()} == {f"mmcompile.{name}:" for name in ("wait", "gather", "batch_transform")}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {name: {e["tid"] for e in events if e.get("name") == f"mmcompile.{name}"} for name in ("wait", "gather")}
    assert threads["wait"]
    assert threads["gather"]
    assert not threads["wait"] & threads["gather"]


#: Runs a script as where neither this package nor torch is installed.
BLOCKED = "import runpy, sys\nfor name in ('torch', 'mmcompile', 'PIL'):\n    sys.modules[name] = None\nsys.argv = sys.argv[1:]\n"


def test_numpy_reads_without_torch(dataset: Path) -> None:
    code = f"{BLOCKED}runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-I", "-c", code, str(ROOT / "scripts" / "read_with_numpy.py"), str(dataset), "5"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=True, timeout=300)
    image, label = done.stdout.splitlines()
    assert image.startswith("image uint8 (5, 1, 12, 12) crc32 ")
    assert label == "label int64 (5,) [0, 1, 0, 1, 0]"
