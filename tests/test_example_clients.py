"""Scripts that show a dataset in other libraries' hands, each where its library is installed: order, ranks and going on are as without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.example_runs import EXAMPLES, brightness, close, needs, run_all
from tests.support import make_dataset
from tests.test_examples import ENVIRONMENT, ROOT, run


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return brightness(tmp_path_factory.mktemp("clients") / "out")


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coloured") / "out"
    make_dataset(out, np.random.default_rng(0).integers(0, 256, (64, 3, 40, 40), dtype=np.uint8), np.arange(64) % 2, shards=(30, 34))
    return out


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


def test_torchvisions_transforms_draw_the_same_in_any_process(coloured: Path) -> None:
    needs("torchvision")
    said = run(EXAMPLES / "augment_torchvision.py", coloured, "--crop", 24, "--batch-size", 16)
    assert "torch.float32 (64, 3, 24, 24): two epochs are the same without workers, with 2 workers and with ShardLoader" in said
    assert "differ from each other: True" in said


def test_timms_transforms_draw_the_same_in_any_process(coloured: Path, tmp_path: Path) -> None:
    needs("timm")
    words = (coloured, "--size", 32, "--epochs", 2, "--workers")
    said = run_all(tmp_path, EXAMPLES / "train_timm.py", [(*words, 0), (*words, 2), (*words, 0, "--loader", "timm")]).splitlines()
    assert [line.partition(", loss")[0] for line in said] == [f"epoch {epoch}: 2 batches of torch.float32 (3, 32, 32)" for epoch in (1, 2)] * 3
    assert said[:2] == said[2:4]


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
    words = (tmp_path / "raw", "--arch", "mobilenet_v3_small", "--batch-size", 3)
    said = run_all(tmp_path, EXAMPLES / "train_imagenet.py", [words, (*words, "--compiled", tmp_path / "out")])
    one, other = (line for line in said.splitlines() if line.startswith("evaluated "))
    assert one.startswith("evaluated 5 images of torch.float32 (3, 224, 224) in 2 classes, checksum ")
    assert one == other


def test_a_stateful_loader_goes_on(dataset: Path, tmp_path: Path) -> None:
    needs("torchdata")
    said = run_all(tmp_path, EXAMPLES / "resume_stateful.py", [(dataset, "--workers", workers) for workers in (0, 2)])
    for workers in (0, 2):
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
