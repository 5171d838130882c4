"""Promise 2 for rows: a build that is killed at any moment goes on from its sealed shards, and ends with the bytes of one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.format.reader import Reader
from tests.compiler.builds import dataset

ROOT = Path(__file__).resolve().parents[2]
KILLS = 4
#: A file that was just written is trusted, so that seals count.
BUILD = """
import sys
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.sources import rows
rows._SETTLED_NS = 0
print("begin", flush=True)
print(build(sys.argv[1], sys.argv[2], workers=2, options=BuildOptions(shard_bytes=1 << 17)).kept, flush=True)
"""


def start(raw: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILD, str(raw), str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_build_that_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200_000, 4)).astype("f4")
    np.save(tmp_path / "x.npy", x)
    began = time.monotonic()
    build(tmp_path / "x.npy", tmp_path / "clean", workers=2, options=BuildOptions(shard_bytes=1 << 17))
    took = time.monotonic() - began
    chance = random.Random(5)
    for _ in range(KILLS):
        process = start(tmp_path / "x.npy", tmp_path / "out")
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(chance.uniform(0.1, 0.9) * took)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    sealed = len(list((tmp_path / "out" / ".build" / "seals").glob("*.json")))
    published = (tmp_path / "out" / "index.json").exists()
    assert sealed or published
    process = start(tmp_path / "x.npy", tmp_path / "out")
    said = process.communicate()[0].split()
    assert int(said[1]) >= min(sealed * (1 << 12), 1)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
    reader = Reader(tmp_path / "out")
    assert np.array_equal(reader.gather("x", np.arange(len(x))), x)
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())
