"""The stock DataLoader over the dataset: the same batches for any number of workers and any way to start them."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from mmcompile.runtime.dataset import MMapShardDataset
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (23, 3, 5, 4), dtype=np.uint8)
LABELS = np.arange(23) % 4


def halve(image: torch.Tensor) -> torch.Tensor:
    return image.div_(2, rounding_mode="floor")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, IMAGES, LABELS, shards=(9, 9, 5))
    return tmp_path


def read(loader: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    batches = list(loader)
    return np.concatenate([x.numpy() for x, _ in batches]), np.concatenate([y.numpy() for _, y in batches])


def test_without_workers(root: Path) -> None:
    ds = MMapShardDataset(root)
    images, labels = read(DataLoader(ds, batch_size=5))
    assert (images == IMAGES).all()
    assert (labels == LABELS).all()
    batch = next(iter(DataLoader(MMapShardDataset(root, output="dict"), batch_size=4)))
    assert (batch["image"].numpy() == IMAGES[:4]).all()
    assert batch["label"].tolist() == LABELS[:4].tolist()
    loader = DataLoader(ds, sampler=[[3, 1], [22]], batch_size=None)
    assert [y.tolist() for _, y in loader] == [[3, 1], [2]]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_give_the_same_batches(root: Path, context: str) -> None:
    ds = MMapShardDataset(root)
    ds[0][0].zero_()  # a write of the parent, which a forked child inherits
    persistent = context != "spawn"
    loader = DataLoader(ds, batch_size=4, num_workers=2, multiprocessing_context=context, persistent_workers=persistent)
    for _ in range(2 if persistent else 1):
        images, labels = read(loader)
        assert (images == IMAGES).all()
        assert (labels == LABELS).all()


def test_transforms_and_pread_in_a_worker_that_is_no_fork_of_this_process(root: Path) -> None:
    ds = MMapShardDataset(root, transform=halve, engine="pread")
    images, labels = read(DataLoader(ds, batch_size=7, num_workers=1, multiprocessing_context="forkserver"))
    assert (images == IMAGES // 2).all()
    assert (labels == LABELS).all()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_more_shards_than_can_be_held_open_read_the_same(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path, IMAGES, LABELS, shards=(1,) * 23)
    monkeypatch.setattr("mmcompile.runtime.column._HELD", 2)
    ds = MMapShardDataset(tmp_path, engine=engine)
    ds._reader._opened.most_maps = ds._reader._opened.most_files = 3
    held = [ds[i] for i in range(23)]
    for _ in range(2):
        assert all((x.numpy() == IMAGES[i]).all() and y == LABELS[i] for i, (x, y) in enumerate(held))
        assert (ds[::-1][0].numpy() == IMAGES[::-1]).all()
        held = [ds[i] for i in range(23)]
    assert len(ds._reader._opened.maps) <= 3
    assert len(ds._reader._opened.files) <= 3


def test_subsets_splits_and_concatenations_of_torch(root: Path) -> None:
    ds = MMapShardDataset(root)
    images, _ = read(DataLoader(Subset(ds, [5, 22, 5]), batch_size=2))
    assert (images == IMAGES[[5, 22, 5]]).all()
    parts = random_split(ds, [0.5, 0.5], torch.Generator().manual_seed(0))
    seen = np.concatenate([read(DataLoader(p, batch_size=3))[0] for p in parts])
    assert sorted(x.tobytes() for x in seen) == sorted(x.tobytes() for x in IMAGES)
    images, _ = read(DataLoader(ConcatDataset([ds, ds]), batch_size=10))
    assert (images == np.concatenate([IMAGES, IMAGES])).all()


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_two_training_processes_at_a_time_share_nothing(root: Path, context: str) -> None:
    ds = MMapShardDataset(root)
    with multiprocessing.get_context(context).Pool(2) as pool:
        assert pool.map(ds.source, range(23)) == [ds.source(i) for i in range(23)]
        assert pool.map(ds.__getitem__, [[0, 1]] * 2)[1][1].tolist() == [0, 1]


def test_the_pickle_is_small_and_keeps_the_arguments(root: Path) -> None:
    ds = MMapShardDataset(root, fields=("label", "image"), dtype=torch.float16, crop=(3, 2), copy=True, output="dict", engine="pread")
    ds[3], ds.targets, ds.find(ds.source(2))
    data = pickle.dumps(ds)
    assert len(data) < 1024
    again = pickle.loads(data)
    assert list(again[3]) == ["label", "image"]
    assert torch.equal(again[3]["image"], ds[3]["image"])
    assert again[3]["image"].dtype == torch.float16
    assert again[3]["image"].shape == (3, 3, 2)


def test_a_thread_pool_reads_the_same(root: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    for engine in ("mmap", "pread"):
        ds = MMapShardDataset(root, engine=engine)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i, ds=ds: ds[i % 23], range(460)))
        assert all((got[i][0].numpy() == IMAGES[i % 23]).all() and got[i][1] == LABELS[i % 23] for i in range(460))


@pytest.mark.parametrize(("layout", "normalize"), [("chw", None), ("hwc", ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))])
def test_numpy_alone_reads_the_same_first_batch(tmp_path: Path, layout: str, normalize: Any) -> None:
    import zlib

    make_dataset(tmp_path, IMAGES, LABELS, shards=(3, 9, 11), layout=layout, normalize=normalize)
    script = Path(__file__).parents[2] / "scripts" / "read_with_numpy.py"
    assert len(script.read_text().splitlines()) < 100
    assert "mmcompile" not in "".join(line for line in script.read_text().splitlines() if "import" in line)
    out = subprocess.run([sys.executable, "-I", str(script), str(tmp_path), "8"], check=True, capture_output=True, text=True).stdout
    images, labels = MMapShardDataset(tmp_path)[:8]
    dtype = "uint8" if normalize is None else "float32"
    checksum = zlib.crc32(images.contiguous().numpy().tobytes())
    assert out.splitlines() == [f"image {dtype} (8, 3, 5, 4) crc32 {checksum:08x}", f"label int64 (8,) {labels.tolist()}"]
