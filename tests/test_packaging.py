"""A wheel holds all that is needed without the checkout, and setup.cfg says the same as the code."""

from __future__ import annotations

import configparser
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "checkout"  # a copy: building leaves files beside the sources
    for folder in ("mmcompile", "schemas"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_schema_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"mmcompile/{path.relative_to(ROOT / 'mmcompile')}": path for path in (ROOT / "mmcompile").rglob("*.py")}
    expected |= {f"mmcompile/schemas/{path.name}": path for path in (ROOT / "schemas").iterdir()}
    expected["mmcompile/py.typed"] = ROOT / "mmcompile/py.typed"
    assert packed == {name: path.read_bytes() for name, path in expected.items()}


def test_schemas_are_found_beside_the_package() -> None:
    folder = importlib.resources.files("mmcompile") / "schemas"
    names = {path.name for path in folder.iterdir()}
    assert {"FORMAT.md", "index.schema.json", "report.schema.json"} <= names


def test_the_test_environment_pins_every_tool_within_the_range_asked_for() -> None:
    packaging_specifiers = pytest.importorskip("packaging.specifiers", reason="pytest needs it, so it is there")
    options = setup_cfg()
    asked = (options["options"]["install_requires"] + options["options.extras_require"]["test"]).split()
    pinned = dict(line.split("==") for line in (ROOT / "scripts/constraints-test.txt").read_text("utf-8").splitlines() if not line.startswith("#"))
    ranges = dict(re.split(r"(?=>)", re.sub(r"\[.*\]", "", text), maxsplit=1) for text in asked)
    assert {"torch", "numpy", "pillow", "pytest"} <= set(pinned) <= set(ranges)
    for name, version in pinned.items():
        assert version in packaging_specifiers.SpecifierSet(ranges[name]), name


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "check.sh"])
def test_scripts_refuse_an_old_python_with_one_line(tmp_path: Path, script: str) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1\n', "utf-8")
    old.chmod(0o755)
    env = {**os.environ, "PYTHON": str(old), "VENV": str(tmp_path / "venv")}
    arguments = [str(tmp_path / "quickstart")] if script == "quickstart.sh" else []
    done = subprocess.run(["bash", str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{script}: PYTHON={old} is no Python >= 3.11 (Python 3.8.1); set PYTHON to one that is\n"
    assert not (tmp_path / "venv").exists()


def test_scripts_are_valid_bash_and_can_be_run() -> None:
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]
    assert len(scripts) >= 5
    for script in scripts:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
        assert os.access(script, os.X_OK) or script.name.startswith("_"), script
