"""Every example in the help of a command is typed as it stands there, and does what it says without an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mmcompile.cli import program
from tests.compiler.builds import make_raw

ROOT = Path(__file__).resolve().parents[1]
#: What an example needs to be there before it, beside raw/.
BUILT = "mmcompile build raw/ out/ --resize 256 --crop 224"


def examples(command: click.Command) -> list[str]:
    """The lines of a command's help that call it, without the remark behind them."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    return [line.split("   ")[0] for line in lines if line.startswith("mmcompile ")]


ALL = [example for command in (program, *program.commands.values()) for example in examples(command)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A folder with raw/ and out/ without splits, and one with them: what a reader of the help has."""
    made = {False: tmp_path_factory.mktemp("plain"), True: tmp_path_factory.mktemp("splits")}
    for split, place in made.items():
        (place / "bin").mkdir()
        (place / "bin" / "mmcompile").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmcompile "$@"\n')
        (place / "bin" / "mmcompile").chmod(0o755)
        for folder in ("raw/train", "raw/val") if split else ("raw",):
            make_raw(place / folder, per_class=45)
        typed(BUILT, place)
    return made


def typed(line: str, place: Path) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "PATH": f"{place}/bin{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-euc", line], cwd=place, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_has_examples() -> None:
    for command in program.commands.values():
        assert examples(command), command.name


@pytest.mark.parametrize("line", ALL)
def test_an_example_runs(line: str, places: dict[bool, Path]) -> None:
    place = places["--split" in line]
    if line.startswith("mmcompile build"):  # into a folder of its own, as examples differ in their settings
        shutil.rmtree(place / "new", ignore_errors=True)
        line = line.replace("out/", "new/")
    elif line.startswith("mmcompile tune"):
        line += " --seconds 1"
    typed(line, place)
