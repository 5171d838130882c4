"""The command `tune`: text, JSON, and one line for what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmcompile import MMapShardDataset, tune
from mmcompile.options import STEP
from mmcompile.runtime.tunechoice import Limit
from tests.support import make_dataset
from tests.test_cli import checked, run

#: The package is found from any folder, installed or not.
ROOT = Path(__file__).resolve().parents[2]

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 3, 12, 10), dtype=np.uint8)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "out", IMAGES, np.arange(40) % 3, splits={"train": 30, "val": 10}, shards=(30, 10))
    return tmp_path / "out"


def test_text_ends_with_lines_that_run(out: Path, tmp_path: Path) -> None:
    result = run("tune", str(out), "--split", "train", "--batch-size", "8", "--crop", "8", "--dtype", "float32", "--seconds", "1", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "measuring memory and disk" in result.stderr
    assert "30 samples, batches of 8" in result.stdout
    _, _, lines = result.stdout.partition("to paste:\n\n")
    (tmp_path / "pasted.py").write_text(lines + "print(tuple(image.shape), image.dtype, len(label))\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-W", "error", str(tmp_path / "pasted.py")], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "(6, 3, 8, 8) torch.float32 6\n"), done.stderr


def test_json_is_one_document(out: Path) -> None:
    result = run("tune", str(out), "--split", "all", "--step-time", "2000s", "--seconds", "1", "--json", "--batch-size", "1")
    document = checked(result.stdout)
    assert (document["command"], document["samples"], document["step_time_s"]) == ("tune", 40, 2000.0)
    assert (document["keeps_up"], document["waited"], document["bottleneck"]) == (True, None, "consumer")  # too long a step to be waited for
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "has the splits train, val: choose one by split= (--split)"),
        (("--split", "test"), "no split 'test'"),
        (("--split", "train", "--crop", "8x8x8"), "crop"),
        (("--split", "train", "--dtype", "float99"), "float99"),
        (("--split", "train", "--seconds", "0.5"), "seconds must be at least 1"),
        (("--split", "train", "--seconds", "0"), "expected a number of seconds above 0, found '0'"),
        (("--split", "train", "--step-time", "fast"), "expected a time with its unit, as in 40ms or 0.5s, found 'fast'"),
        (("--split", "train", "--batch-size", "0"), "expected a whole number above 0"),
        (("--split", "train", "--device", "nowhere"), "device must be such as 'cpu', 'cuda' or 'cuda:0', not 'nowhere'"),
    ],
)
def test_wrong_usage_is_one_line(out: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run("tune", str(out), *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in result.stderr
    assert checked(run("tune", str(out), *arguments, "--json").stdout)["error"]["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(out: Path) -> None:
    result = run("tune", str(out), "--split", "train", "--device", "cuda")
    assert (result.exit_code, result.stderr) == (2, "error: device cuda: this process sees 0 CUDA devices; pass another, or device='cpu'\n")


def test_what_is_no_dataset_is_one_line(tmp_path: Path) -> None:
    result = run("tune", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    make_dataset(tmp_path / "empty", IMAGES[:0])
    result = run("tune", str(tmp_path / "empty"))
    assert result.exit_code == 2
    assert result.stderr.endswith("has no samples, so there is nothing to measure\n")


@pytest.mark.parametrize(("text", "seconds"), [("40ms", 0.04), ("0.5s", 0.5), ("2s", 2.0), ("1.5ms", 0.0015)])
def test_a_step_time_is_in_seconds_or_milliseconds(text: str, seconds: float) -> None:
    assert STEP.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "-1ms", "0", "0s", "40", "inf", "nan", "nans", "40 m", "40us"])
def test_other_step_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"could not convert|^-?[0-9.a-z ]*$"):
        STEP.parse(text)


def test_what_is_told_holds_for_the_device_and_the_threads_of_the_choice(out: Path) -> None:
    tuning = tune(MMapShardDataset(out, "train"), batch_size=8, seconds=1.0, device="cpu")
    parts = replace(tuning.parts, gather_s=0.001)
    two = replace(tuning.candidates[0], num_workers=2)
    fast = replace(tuning, parts=parts, choice=two, limits=(Limit("gather", 2000.0, 0.71),), step_time_s=1e-9, keeps_up=False)
    assert "gather      1,000 samples/s in one thread; the choice uses 71% of the 2,000 of its workers\n" in str(fast)
    assert "training will wait" in str(fast)
    assert "the GPU will wait" in str(replace(fast, device="cuda"))
    alone = replace(fast, limits=(Limit("gather", 1000.0, 0.71),))
    assert "in one thread; the choice uses 71% of that\n" in str(alone)
    assert "is more than there is" not in str(alone)
    assert "a batch of 500 is more than there is: an epoch is one batch of 7\n" in str(replace(alone, batch_size=500, samples=7))


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is such a device")
def test_a_device_of_another_kind_that_is_not_there_is_one_line(out: Path) -> None:
    result = run("tune", str(out), "--split", "train", "--device", "mps")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: device mps: this process cannot use it (")
