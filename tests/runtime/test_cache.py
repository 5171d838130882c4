"""Datasets that lie far away, read through a cache: from a real S3 server on loopback, and from a folder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mmcompile.runtime.cache import Cache
from mmcompile.runtime.dataset import MMapShardDataset
from tests.s3 import Bucket, Proxy
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 3, 40, 40), dtype=np.uint8)
LABELS = np.arange(60) % 4
SHARDS = (10,) * 6
#: The size of a shard's image file.
SHARD = 4096 + 10 * 4800


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "out", IMAGES, LABELS, shards=SHARDS, splits={"train": 40, "val": 20})
    return tmp_path / "out"


@pytest.fixture
def url(local: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> str:
    where = s3_bucket.fill(tree(local), "out")
    s3_proxy.forget()
    return where


def copies(folder: Path, part: str = "image") -> list[Path]:
    return sorted(path for path in (folder / "mmcompile-cache" / "shards").iterdir() if path.name.startswith(part))


def test_it_is_the_dataset_that_it_is_in_its_folder(local: Path, url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    here = MMapShardDataset(local, "all")
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    assert (ds.root, ds.generation, ds.classes, ds.stats) == (url, here.generation, here.classes, here.stats)
    assert not copies(tmp_path / "cache")  # nothing is brought before it is wanted
    assert (ds[7][0].numpy() == IMAGES[7]).all()
    assert s3_proxy.count("GET", "image-") == 1
    assert s3_proxy.count("GET", "label-") == 1
    images, labels = ds[::-1]
    assert (images.numpy() == IMAGES[::-1]).all()
    assert labels.tolist() == LABELS[::-1].tolist()
    assert ds.targets is not None
    assert ds.targets.tolist() == LABELS.tolist()
    assert [ds.source(i) for i in (0, 59)] == [here.source(i) for i in (0, 59)]
    assert ds.find(here.source(33)) == 33
    gets = s3_proxy.count("GET", "out/shards")
    assert gets == len(set(os.listdir(local / "shards")))
    again = pickle.loads(pickle.dumps(ds))
    other = MMapShardDataset(url, "val", cache=Cache(tmp_path / "cache"))
    assert (again[59][0].numpy() == other[19][0].numpy()).all()
    assert s3_proxy.count("GET", "out/shards") == gets
