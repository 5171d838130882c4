"""What the tests of scripts that hand a dataset to other libraries share: a dataset, many runs of a script in one process, networks compared.

Importing such a library takes seconds, so a script that is to run several times does so in one process, each time from its first line.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import make_dataset
from tests.test_examples import ROOT, run

EXAMPLES = ROOT / "scripts" / "examples"

#: Steps of two epochs, with a batch of 40 in all; the last step is as large as the others.
N, STEPS = 200, 10

_RUNS = """
import json, runpy, sys

script, *runs = sys.argv[1:]
for words in runs:
    sys.argv = [script, *json.loads(words)]
    runpy.run_path(script, run_name="__main__")
"""


def brightness(folder: Path) -> Path:
    """A dataset of images of 12 x 12 whose brightness is their class, of two."""
    labels = np.arange(N) % 2
    noise = np.random.default_rng(0).integers(0, 100, (N, 1, 12, 12))
    make_dataset(folder, (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels, shards=(90, 110))
    return folder


def run_all(folder: Path, script: Path, runs: Iterable[tuple[object, ...]], processes: int = 1) -> str:
    """Run a script once for each of `runs`, its arguments, one after the other in one process, or in several at once; all that they printed."""
    (folder / "runs.py").write_text(_RUNS)
    launch: tuple[object, ...] = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}") if processes > 1 else ()
    return run(*launch, folder / "runs.py", script, *(json.dumps([str(word) for word in words]) for words in runs))


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
