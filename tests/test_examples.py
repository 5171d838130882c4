"""The scripts that show how to train, run on a small dataset; what they print is what they saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import make_dataset

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 images of 12 x 12 whose brightness is their class, of two."""
    out = tmp_path_factory.mktemp("examples") / "out"
    labels = np.arange(200) % 2
    noise = np.random.default_rng(0).integers(0, 100, (200, 1, 12, 12))
    make_dataset(out, (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels, shards=(90, 110))
    return out


def run(*words: object) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = ROOT / "scripts" / "examples" / "train.py"


def test_train_learns_with_torchs_loader(dataset: Path) -> None:
    said = run(TRAIN, dataset, "--epochs", 6, "--batch-size", 20, "--loader", "stock", "--want", 0.9)
    assert said.count("waiting") >= 6


def test_train_learns_and_training_that_was_stopped_goes_on(dataset: Path, tmp_path: Path) -> None:
    words = (TRAIN, dataset, "--batch-size", 20, "--save-every", 2, "--checkpoint", tmp_path / "state.pt", "--resume", "--epochs", 6)
    first, second = run(*words, "--loader", "shard", "--want", 0.9), run(*words, "--want", 0)
    assert first.count("waiting") >= 6
    assert "epoch 6" in first
    assert "epoch 1:" not in second


def test_replay_shows_what_the_loader_gave(dataset: Path) -> None:
    said = run(ROOT / "scripts" / "examples" / "replay.py", dataset, "--row", 77, "--epoch", 3, "--crop", 8, "--flip", 0.5)
    assert "77" in said


def drawn(root: Path, n: int) -> None:
    """Images of 32 x 32 with one bright rectangle, tall or wide, in images/; its mask in masks/ and its box as text in labels/."""
    rng = np.random.default_rng(0)
    for i in range(n):
        image, ids = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8), np.zeros((32, 32), np.uint8)
        height, width = ((16, 6), (6, 16))[i % 2]
        top, left = int(rng.integers(0, 33 - height)), int(rng.integers(0, 33 - width))
        image[top : top + height, left : left + width] += 150
        ids[top : top + height, left : left + width] = 1
        ids[0] = 255
        for name, array in (("images", image), ("masks", ids)):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(root / name / f"{i:03}.png")
        (root / "labels").mkdir(exist_ok=True)
        box = [(left + width / 2) / 32, (top + height / 2) / 32, width / 32, height / 32]
        (root / "labels" / f"{i:03}.txt").write_text(" ".join(map(str, [i % 2, *box])) + "\n")


def test_segmentation_and_detection_learn_from_folders_side_by_side(tmp_path: Path) -> None:
    drawn(tmp_path / "raw", 200)
    run("-m", "mmcompile", "build", tmp_path / "raw", tmp_path / "out", "--workers", 1)
    said = run(TRAIN.with_name("train_segmentation.py"), tmp_path / "out", "--epochs", 3, "--want", 0.97)
    assert said.count("of the pixels of 20 held-out images") == 3
    said = run(TRAIN.with_name("train_detection.py"), tmp_path / "out", "--epochs", 10, "--want", 0.5)
    assert said.count("of the objects of 20 held-out images") == 10


#: Runs a script and says which threads of a process group are alive behind it: one that is when the interpreter ends may abort the process.
THREADS_LEFT = """
import runpy, sys
from pathlib import Path

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
sys.stdout.flush()
sys.stdout.write(f"left behind: {[name for name in names if 'gloo' in name]}\\n")  # in one piece, beside the other process
sys.stdout.flush()
"""


def test_two_processes_train_stop_and_go_on(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(THREADS_LEFT)
    script = ROOT / "scripts" / "examples" / "distributed.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "watched.py", script)
    words = (*launch, dataset, "--epochs", 1, "--batch-size", 10, "--checkpoint", tmp_path / "state.pt")
    assert run(*words, "--stop-after", 3).count("left behind: []") == 2
    assert (tmp_path / "state.pt").exists()
    said = run(*words)
    assert "going on in epoch 1 at sample 60 of 180 with 2 processes" in said
    assert said.count("left behind: []") == 2
