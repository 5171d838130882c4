"""What an import pulls in, seen in fresh interpreters: the import rules as they act, beside the linter that reads them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "PIL"}


def pulled_in(code: str) -> set[str]:
    """The modules that `code` added to those of a bare interpreter; what it prints is dropped."""
    script = f"import json, sys\nbefore = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(modules)


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def below(modules: set[str], package: str) -> set[str]:
    return {name for name in modules if name == package or name.startswith(package + ".")}


def test_the_package_alone_needs_neither_torch_nor_pillow_nor_numpy() -> None:
    modules = pulled_in("import mmcompile")
    assert "mmcompile.errors" in modules
    assert not packages(modules) & {*HEAVY, "numpy", "click", "tqdm", "xxhash"}


def test_the_dataset_class_needs_no_pillow_no_compiler_and_no_command_line() -> None:
    modules = pulled_in("from mmcompile import MMapShardDataset")
    assert "torch" in modules
    assert not packages(modules) & {"PIL", "click", "torchvision"}  # tqdm comes with torch
    assert not below(modules, "mmcompile.compiler") | below(modules, "mmcompile.cli")
    for part in ("loader", "batches", "ahead", "augment", "cut", "spatial", "joint", "patch", "device", "order", "sampler", "tune", "cache"):
        assert f"mmcompile.runtime.{part}" not in modules


def test_help_needs_neither_torch_nor_pillow() -> None:
    modules = pulled_in(
        "import mmcompile.cli\ntry:\n    mmcompile.cli.main(['--help'])\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not packages(modules) & HEAVY


@pytest.mark.parametrize("module", ["canonical", "commit", "index", "lock", "npy", "reader", "samples", "verify"])
def test_the_format_needs_numpy_and_xxhash_alone(module: str) -> None:
    modules = pulled_in(f"import mmcompile.format.{module}")
    assert packages(modules) - sys.stdlib_module_names <= {"mmcompile", "numpy", "xxhash"} | numpys_own()
    assert not below(modules, "mmcompile.compiler") | below(modules, "mmcompile.runtime")


def test_build_needs_no_torch_before_it_resizes_and_never_the_runtime() -> None:
    modules = pulled_in("from mmcompile import Preprocess, build")
    assert not packages(modules) & {"torch", "click", "tqdm"}
    assert not below(modules, "mmcompile.runtime")


@functools.cache
def numpys_own() -> set[str]:
    """What numpy itself brings where optional packages are installed beside it."""
    return packages(pulled_in("import numpy, xxhash")) - set(sys.stdlib_module_names)
