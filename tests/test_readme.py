"""What the README says is typed here, word for word, on a small folder of images."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmcompile import MMapShardDataset

ROOT = Path(__file__).resolve().parents[1]
#: The package is found from any folder, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
README = (ROOT / "README.md").read_text("utf-8")
#: Rows of the files that its source of one's own reads.
CIFAR = {"data_batch_1.bin": 5, "data_batch_2.bin": 4, "test_batch.bin": 3}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with raw/ in it: two classes, sizes that differ."""
    place = tmp_path_factory.mktemp("readme")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (place / "raw" / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (260 + 10 * i, 300, 3), np.uint8)
            Image.fromarray(pixels).save(place / "raw" / name / f"{i}.png")
    for name, count in CIFAR.items():
        rng.integers(0, 10, (count, 3073), np.uint8).tofile(place / name)
    (place / "secret.key").write_bytes(b"of a test, and of no one else")
    return place


@pytest.fixture(scope="module")
def commands(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every line of the README's bash blocks that calls mmcompile, run in order."""
    done = {}
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["mmcompile"]:
            done[" ".join(words)] = subprocess.run(
                [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=ENVIRONMENT
            )
    return done


def test_every_command_in_the_readme_runs(commands: dict[str, subprocess.CompletedProcess[str]]) -> None:
    assert len(commands) >= 6
    for line, done in commands.items():
        assert done.returncode == 0, (line, done.stderr)


def test_python_in_the_readme_runs_from_top_to_bottom(folder: Path, commands: dict[str, subprocess.CompletedProcess[str]]) -> None:
    assert (folder / "out" / "index.json").exists(), commands
    program = "\n".join(blocks("python"))
    assert program.count("import") >= 4
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=folder, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "12 0 12 0 0" in done.stdout


def test_the_source_in_the_readme_becomes_the_dataset_of_its_files(folder: Path, commands: dict[str, subprocess.CompletedProcess[str]]) -> None:
    program = next(block for block in blocks("python") if "class Cifar" in block)
    source = f"import mmcompile\nimport numpy as np\n{program}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], cwd=folder, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    for split, names in {"train": list(CIFAR)[:2], "test": list(CIFAR)[2:]}.items():
        rows = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, 3073) for name in names])
        made = MMapShardDataset(folder / "out-cifar", split)
        assert made.classes is not None
        assert made.classes[:2] == ["airplane", "automobile"]
        images, labels = made[:]
        np.testing.assert_array_equal(images.numpy(), rows[:, 1:].reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(labels.numpy(), rows[:, 0])


def test_every_command_and_option_of_build_stands_in_the_readme() -> None:
    import click

    from mmcompile.cli import program

    for name, command in program.commands.items():
        assert f"mmcompile {name}" in README, name
        for parameter in command.params if name == "build" else []:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1] in README, parameter.opts[-1]


def test_every_file_that_the_readme_links_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
