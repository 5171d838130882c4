from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mmcompile.errors import CorruptShardError
from mmcompile.runtime.dataset import MMapShardDataset
from tests.support import make_dataset

N, ROW = 60, 3 * 32 * 32 + 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (N, 3, 32, 32), dtype=np.uint8)
    make_dataset(tmp_path, images, np.arange(N) % 4, shards=(10, 20, 30))
    return tmp_path


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_all_is_read_and_said(root: Path, engine: str) -> None:
    ds = MMapShardDataset(root, engine=engine)
    said: list[tuple[int, int]] = []
    warming = ds.warm(lambda done, total: said.append((done, total)))
    assert warming.wait(60)
    assert warming.done_bytes == warming.total_bytes == N * ROW
    assert said[-1] == (N * ROW, N * ROW)
    assert [done for done, _ in said] == sorted({done for done, _ in said})


def test_evicted_pages_are_back(root: Path) -> None:
    for path in (root / "shards").iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    rows = np.arange(N)
    if not MMapShardDataset(root)._reader.cold("image", rows, sample=N):
        pytest.skip("this file system keeps what it was told to drop")
    ds = MMapShardDataset(root)
    assert ds.warm().wait(60)
    assert not ds._reader.cold("image", rows, sample=N)


def test_a_field_that_is_not_read_and_rows_that_are_not_in_it_stay_out(root: Path) -> None:
    assert MMapShardDataset(root, fields=("label",)).warm().total_bytes == N * 8
    part = MMapShardDataset(root).subset([50, 3, 3])
    warming = part.warm()
    assert warming.wait(60)
    assert 2 * ROW <= warming.total_bytes == warming.done_bytes <= N * ROW
    nothing = MMapShardDataset(root).subset([]).warm()
    assert nothing.wait(60)
    assert nothing.total_bytes == 0


def test_it_can_be_stopped_and_dropped(root: Path) -> None:
    ds = MMapShardDataset(root)
    at, go = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        at.set()
        assert go.wait(30)

    warming = ds.warm(progress)
    assert at.wait(30)
    assert not warming.wait(0)
    go.set()
    warming.stop()
    assert warming.wait(0)
    for _ in range(20):
        ds.warm()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "mmcompile-warm":
            thread.join(30)
            assert not thread.is_alive()


def test_what_reading_or_the_callback_raises_comes_out_of_wait(root: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        MMapShardDataset(root).warm(progress).wait(60)
    ds = MMapShardDataset(root)
    path = ds._reader.path("image", 1)
    os.truncate(path, 5000)
    with pytest.raises(CorruptShardError, match=path.name):
        ds.warm().wait(60)
