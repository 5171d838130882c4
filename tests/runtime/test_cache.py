"""Datasets that lie far away, read through a cache: from a real S3 server on loopback, and from a folder."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmcompile.errors import CorruptShardError, FormatError, GenerationError, NotADatasetError, RemoteError
from mmcompile.runtime.augment import Augment
from mmcompile.runtime.cache import Cache, Staged, _Folder
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.loader import ShardLoader
from mmcompile.runtime.sampler import ShardSampler
from tests.s3 import Asked, Bucket, Proxy
from tests.support import forked, in_threads, make_dataset

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


def test_every_way_to_read_gives_the_same_as_from_its_folder(local: Path, url: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"split": "all", "crop": 32, "dtype": torch.float32}
    here = MMapShardDataset(local, **settings)
    there = MMapShardDataset(url, cache=Cache(tmp_path / "cache", max_bytes=4 * SHARD), **settings)
    pairs = [(here, there), (here.subset([50, 3, 3, 17]), there.subset([50, 3, 3, 17]))]
    pairs += list(zip(here.random_split([0.5, 0.5], seed=1), there.random_split([0.5, 0.5], seed=1), strict=True))
    for a, b in pairs:
        assert all(torch.equal(x[0], y[0]) and x[1] == y[1] for x, y in zip(a, b, strict=True))
        assert torch.equal(a[:][0], b[:][0])
    cut = Augment(crop=16, hflip=0.5)
    for order in ("block", False):
        loaders = [ShardLoader(ds, 7, shuffle=order, block_shards=2, augment=cut, num_workers=2, seed=3) for ds in (here, there)]
        for _ in range(2):
            for x, y in zip(*loaders, strict=True):
                assert torch.equal(x[0], y[0])
                assert torch.equal(x[1], y[1])
    resident = there.to_device("cpu")
    assert torch.equal(resident[:][0], here[:][0])
    assert there.warm().wait(60)


def test_a_random_order_is_the_block_order(local: Path, url: str, tmp_path: Path) -> None:
    here = MMapShardDataset(local, "all")
    there = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    folder = MMapShardDataset(local, "all", cache=Cache(tmp_path / "cache"))
    states = []
    for ds, shuffle in ((here, "block"), (there, True), (there, "block"), (folder, True)):
        loader = ShardLoader(ds, 8, shuffle=shuffle, block_shards=2, seed=5)
        batches = iter(loader)
        labels = [next(batches)[1].tolist() for _ in range(3)]
        sampler = ShardSampler(ds, 8, shuffle=shuffle, block_shards=2, seed=5)
        states.append((labels, loader.state_dict(), [int(i) for i in sampler]))
    assert states[0] == states[1] == states[2] == states[3]
    other = ShardLoader(there, 8, shuffle="block", block_shards=2)
    other.load_state_dict(states[1][1])
    assert len(list(other)) == -(-60 // 8) - 3


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_every_kind_read_through_the_cache(url: str, tmp_path: Path, s3_proxy: Proxy, context: str) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    _ = ds[0]
    assert len(pickle.dumps(ds)) < 1024
    sampler = ShardSampler(ds, 8, shuffle=True, block_shards=2)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=2, multiprocessing_context=context)
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    assert sorted(labels.tolist()) == sorted(LABELS.tolist())
    assert Counter(map(bytes, images.numpy())) == Counter(map(bytes, IMAGES))
    assert s3_proxy.count("GET", "image-") == len(SHARDS)  # once for all processes


def test_a_pickle_opens_its_generation_without_a_request(local: Path, url: str, tmp_path: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    old = MMapShardDataset(url, "train", cache=Cache(tmp_path / "cache"))
    _ = old[0]
    kept = pickle.dumps(old)
    make_dataset(local, 255 - IMAGES, LABELS, shards=SHARDS, splits={"train": 40, "val": 20})
    s3_bucket.fill(tree(local), "out")
    new = MMapShardDataset(url, "train", cache=Cache(tmp_path / "cache"))
    s3_proxy.forget()
    again = pickle.loads(kept)
    assert not s3_proxy.asked
    assert again.generation == old.generation != new.generation
    assert (again[39][0].numpy() == IMAGES[39]).all()
    assert (new[39][0].numpy() == 255 - IMAGES[39]).all()
    assert MMapShardDataset(url, "val", generation=old.generation, cache=Cache(tmp_path / "other"))[0][1] == LABELS[40]
    s3_bucket.delete(f"out/generations/{old.generation}.json", *(f"out/shards/{p.name}" for p in local.glob("shards/*")))
    with pytest.raises(GenerationError, match=rf"gone, as generation {old.generation} was pruned"):
        _ = again[15]
    with pytest.raises(GenerationError, match="is gone"):
        MMapShardDataset(url, "val", generation=old.generation, cache=Cache(tmp_path / "third"))
    remedy = rf"run `mmcompile verify {url}`, which says how to mend it"
    with pytest.raises(CorruptShardError, match=rf"{url}/shards/image-[0-9a-f]*.npy: missing; {remedy}"):
        _ = new[15]


def test_the_dataset_itself_is_only_read(local: Path, tmp_path: Path) -> None:
    before = tree(local)
    ds = MMapShardDataset(local, "all", cache=Cache(tmp_path / "cache"))
    assert ds.root == local
    assert (ds[:][0].numpy() == IMAGES).all()
    for path in copies(tmp_path / "cache"):
        assert path.read_bytes() == before[f"shards/{path.name}"]
    assert len(copies(tmp_path / "cache")) == len(SHARDS)
    assert tree(local) == before
    for path in (local / "shards").iterdir():
        path.unlink()
    assert (pickle.loads(pickle.dumps(ds))[:][0].numpy() == IMAGES).all()


# -- what is wrong


def test_what_is_no_dataset_is_said_in_a_line(url: str, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cache=mmcompile.Cache\(dir"):
        MMapShardDataset(url)
    with pytest.raises(TypeError, match=r"cache must be a mmcompile.Cache"):
        MMapShardDataset(url, cache="/tmp")  # type: ignore[arg-type]
    with pytest.raises(NotADatasetError, match=rf"{s3_bucket.url}/none: no dataset there"):
        MMapShardDataset(f"{s3_bucket.url}/none", cache=cache)
    with pytest.raises(RemoteError, match="there is no such bucket"):
        MMapShardDataset("s3://no-such-bucket-here/out", cache=cache)
    with pytest.raises(NotADatasetError, match="no such folder"):
        MMapShardDataset(tmp_path / "none", cache=cache)
    with pytest.raises(GenerationError, match="not 32 hex digits"):
        MMapShardDataset(url, generation="../../index", cache=cache)
    with pytest.raises(RemoteError, match="nosuch"):
        MMapShardDataset("nosuch://bucket/out", cache=cache)
    remedy = "run `mmcompile verify [^`]*`, which says how to mend it$"
    for bad, said in (
        (b"{}", "changed after it was published"),
        (b"", "changed after it was published"),
        (b"{" * (1 << 21), "more than 1,048,576 bytes"),
    ):
        s3_bucket.fill({"index.json": bad}, "out")
        with pytest.raises(FormatError, match=rf"^{url}/index.json: {said}.*; {remedy}"):
            MMapShardDataset(url, cache=cache)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(RemoteError, match=r"pip install 'mmcompile\[remote\]'"):
        MMapShardDataset(url, cache=cache)


def test_what_no_cache_is_is_refused(tmp_path: Path) -> None:
    for wrong in (None, "", 7, "s3://bucket/cache"):
        with pytest.raises(TypeError, match="folder on a local disk"):
            Cache(wrong)  # type: ignore[arg-type]
    for most in (0, -1, 1.5, True, "1 GB"):
        with pytest.raises(ValueError, match="max_bytes"):
            Cache(tmp_path, max_bytes=most)  # type: ignore[arg-type]
    assert Cache("x") == Cache(Path("x").absolute())


@pytest.mark.parametrize("fault", ["drop", "truncate", 503])
def test_a_network_that_fails_now_and_then_is_not_seen(url: str, tmp_path: Path, s3_proxy: Proxy, fault: Any) -> None:
    s3_proxy.fault = lambda asked: fault if asked.number % 3 == 1 else None
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    assert (ds[:][0].numpy() == IMAGES).all()


def test_a_network_that_keeps_failing_is_an_error_that_names_the_object(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    s3_proxy.fault = lambda asked: 503 if "image-" in asked.path else None
    with pytest.raises(RemoteError, match=rf"{url}/shards/image-[0-9a-f]*.npy: failed"):
        _ = ds[0]
    assert not copies(tmp_path / "cache")  # nothing half is left
    s3_proxy.fault = lambda asked: None
    assert (ds[0][0].numpy() == IMAGES[0]).all()


def test_a_damaged_object_is_asked_for_twice_and_never_served(local: Path, url: str, tmp_path: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    name = ds._reader.path("image", 1).name
    good = (local / "shards" / name).read_bytes()
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[: len(good) // 2], good[:4096], b"x"):
        s3_bucket.fill({name: bad}, "out/shards")
        s3_proxy.forget()
        with pytest.raises(
            CorruptShardError,
            match=rf"{url}/shards/{name}: damaged, twice: .*{name[6:38]}, found .* of hash [0-9a-f]{{32}}; run `mmcompile verify {url}`$",
        ) as error:
            _ = ds[10]
        assert error.value.details["expected"] == name[6:38]
        assert 2 <= s3_proxy.count("GET", name) <= (2 if len(bad) == len(good) else 10)
        assert not copies(tmp_path / "cache")
    s3_bucket.fill({name: good}, "out/shards")
    assert (ds[10][0].numpy() == IMAGES[10]).all()


def test_a_damaged_copy_is_brought_anew(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    _ = ds[0]
    del ds
    [path] = copies(tmp_path / "cache")
    good = path.read_bytes()
    for bad in (good[:100], b"", good + b"x", bytes(len(good))):
        path.write_bytes(bad)
        assert (MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))[0][0].numpy() == IMAGES[0]).all()
        assert path.read_bytes() == good
    [table] = copies(tmp_path / "cache", "table")
    table.write_bytes(bytes(table.stat().st_size))
    assert len(MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))) == 60


def test_a_copy_that_is_cut_short_while_it_is_read_is_brought_anew(local: Path, tmp_path: Path) -> None:
    ds = MMapShardDataset(local, "all", engine="pread", cache=Cache(tmp_path / "cache"))
    _ = ds[0]
    [path] = copies(tmp_path / "cache")
    for row, size in ((0, 4200), (9, 50_000), (5, 0)):
        os.truncate(path, size)
        assert (ds[row][0].numpy() == IMAGES[row]).all()
    os.truncate(path, 4200)
    assert (ds[::-1][0].numpy() == IMAGES[::-1]).all()
    os.truncate(path, 4200)
    name = path.name
    (local / "shards" / name).unlink()
    with pytest.raises(CorruptShardError, match=rf"{local}/shards/{name}: missing; run `mmcompile verify {local}`, which says how to mend it"):
        _ = ds[0]


def test_what_is_published_and_pruned_while_it_is_opened_is_opened(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation, read, published = MMapShardDataset(local, "all").generation, _Folder.read, []

    def publish(self: _Folder, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = read(self, name, start, stop)
        if name == "index.json" and not published:
            published.append(name)
            make_dataset(local, 255 - IMAGES, LABELS, shards=SHARDS, splits={"train": 40, "val": 20})
            (local / "generations" / f"{generation}.json").unlink()
        return data

    monkeypatch.setattr(_Folder, "read", publish)
    ds = MMapShardDataset(local, "all", cache=Cache(tmp_path / "cache"))
    assert published
    assert ds.generation != generation
    assert (ds[7][0].numpy() == 255 - IMAGES[7]).all()
    (local / "generations" / f"{ds.generation}.json").unlink()
    (local / "generations" / f"{'0' * 32}.json").touch()
    with pytest.raises(FormatError, match=rf"{local}/index.json: changed after .*; run `mmcompile verify {local}`, which says how to mend it$"):
        MMapShardDataset(local, "all", cache=Cache(tmp_path / "other"))

    def refuse(path: Any) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(RemoteError, match=rf"{local}/generations: cannot be read \(Permission denied\)"):
        MMapShardDataset(local, "all", cache=Cache(tmp_path / "other"))


def test_a_copy_of_the_right_size_and_other_content_is_never_served(local: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    ds = MMapShardDataset(local, "all", cache=cache)
    for path in (local / "shards").glob("image-*"):
        data = path.read_bytes()
        (tmp_path / "cache" / "mmcompile-cache" / "shards" / path.name).write_bytes(data[:4096] + bytes(len(data) - 4096))
    assert (ds[0][0].numpy() == IMAGES[0]).all()
    assert torch.equal(ds.to_device("cpu")[10:][0], torch.from_numpy(IMAGES[10:]))
    del ds
    for path in copies(tmp_path / "cache"):
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff" * 100)
    assert (MMapShardDataset(local, "all", cache=cache)[:][0].numpy() == IMAGES).all()


def test_a_cache_too_small_for_a_shard_or_a_window_says_what_it_needs(url: str, tmp_path: Path) -> None:
    for most in (40_000, 50_000, SHARD + 4096 + 79):  # less than the rows, and more than these but less than their files
        with pytest.raises(ValueError, match=rf"has a shard whose files take 56,272 bytes, more than the {most:,} that the cache may hold"):
            MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache", max_bytes=most))
    assert MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache", max_bytes=56_272))[0][1] == 0
    small = MMapShardDataset(url, "all", fields=["image"], cache=Cache(tmp_path / "cache", max_bytes=3 * SHARD))
    for make in (ShardLoader, ShardSampler):
        with pytest.raises(ValueError, match=rf"reads 6 shards at a time, up to {6 * SHARD:,} bytes.*max_bytes={12 * SHARD} .*block_shards=1"):
            make(small, 8, shuffle=True)
    rows = np.random.default_rng(0).permutation(60)
    assert (small[rows].numpy() == IMAGES[rows]).all()  # slow, but what was asked for
    assert sum(path.stat().st_size for path in copies(tmp_path / "cache")) <= 3 * SHARD


def test_on_a_full_disk_what_no_view_uses_is_let_go(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "mmcompile-cache" / "shards"

    def full(fd: int, offset: int, length: int) -> None:
        if sum(path.stat().st_size for path in folder.iterdir()) + length > 4 * SHARD:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for engine in ("mmap", "pread"):
        ds = MMapShardDataset(local, "all", engine=engine, cache=Cache(tmp_path / "cache"))
        first = ds[0][0]
        assert all((ds[i][0].numpy() == IMAGES[i]).all() for i in range(60))
        rows = np.random.default_rng(0).permutation(60)
        assert (ds[rows][0].numpy() == IMAGES[rows]).all()
        assert (first.numpy() == IMAGES[0]).all()
        views = [ds[i][0] for i in (0, 10, 20)]  # more than these do not fit beside the next one
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: full(fd, offset, 2 * length))
        if engine == "mmap":
            with pytest.raises(OSError, match=rf"no room for 52,096 bytes of {local}/shards/image-.*; free some: '{folder.parent}'"):
                _ = ds[30]
        monkeypatch.setattr(os, "posix_fallocate", full)
        del views


def test_readers_that_meet_damaged_copies_at_once_read_right(local: Path, tmp_path: Path) -> None:
    for _ in range(3):
        datasets = [MMapShardDataset(local, "all", cache=Cache(tmp_path / "cache")) for _ in range(6)]
        for path in (local / "shards").glob("image-*"):
            (tmp_path / "cache" / "mmcompile-cache" / "shards" / path.name).write_bytes(bytes(path.stat().st_size))
        right = []

        def read(k: int, datasets: list[MMapShardDataset] = datasets, right: list[bool] = right) -> None:
            right.append(all((datasets[k][i][0].numpy() == IMAGES[i]).all() for i in range(0, 60, 10)))

        in_threads(read, 6)
        assert right == [True] * 6


def test_a_copy_that_others_remove_before_it_is_opened_is_not_called_missing(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, removals = Staged.held, []

    @contextmanager
    def removed(self: Staged, name: str, nbytes: int | None) -> Iterator[Path]:
        with held(self, name, nbytes) as path:
            if "image" in name and len(removals) < most:
                removals.append(name)
                path.unlink()
            yield path

    ds = MMapShardDataset(local, "all", cache=Cache(tmp_path / "cache"))
    monkeypatch.setattr(Staged, "held", removed)
    most = 2
    assert (ds[0][0].numpy() == IMAGES[0]).all()
    assert len(removals) == 2
    most = 9
    with pytest.raises(OSError, match=rf"the copy of {local}/shards/image-.* was removed 3 times .*'{tmp_path}/cache/mmcompile-cache'") as error:
        _ = ds[10]
    assert not isinstance(error.value, FormatError | FileNotFoundError)


def test_a_copy_that_is_cut_before_it_is_opened_is_brought_anew(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, replace, left = Staged.held, Staged.replace, [0]
    cuts: list[str] = []

    @contextmanager
    def cut(self: Staged, name: str, nbytes: int | None) -> Iterator[Path]:
        with held(self, name, nbytes) as path:
            if left[0]:
                left[0] -= 1
                cuts.append(name)
                os.truncate(path, 5000)
            yield path

    def removed(self: Staged, name: str) -> None:
        if len(cuts) == 2:  # another reader saw it too, and was faster
            (self.shards / name).unlink()
        replace(self, name)

    ds = MMapShardDataset(local, "all", fields=["image"], cache=Cache(tmp_path / "cache"))
    monkeypatch.setattr(Staged, "held", cut)
    monkeypatch.setattr(Staged, "replace", removed)
    for row in (0, 10):
        left[0] = 1
        assert (ds[row].numpy() == IMAGES[row]).all()
    left[0] = 2
    with pytest.raises(CorruptShardError, match=rf"^{local}/shards/image-[0-9a-f]*.npy: 5,000 bytes, expected 52,096 ") as error:
        _ = ds[20]
    assert error.value.details["path"] == f"{local}/shards/{cuts[-1]}"
    assert len(cuts) == 4


# -- ahead


def test_the_next_window_is_brought_while_one_is_read(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    cache = Cache(tmp_path / "cache")
    for shuffle in (True, False):
        ds = MMapShardDataset(url, "all", fields=["image"], cache=Cache(tmp_path / f"cache{shuffle}", max_bytes=4 * SHARD + 10_000))
        batches = iter(ShardLoader(ds, 2, shuffle=shuffle, block_shards=2, num_workers=1, prefetch_factor=1))
        next(batches)
        limit = time.monotonic() + 20
        while len([path for path in copies(tmp_path / f"cache{shuffle}") if path.suffix == ".npy"]) < 4 and time.monotonic() < limit:
            time.sleep(0.01)
        assert len([path for path in copies(tmp_path / f"cache{shuffle}") if path.suffix == ".npy"]) == 4
        assert len(list(batches)) == 29
        assert s3_proxy.count("GET", "image-") == len(SHARDS)  # each once in an epoch, in a cache of four
        s3_proxy.forget()
    ds = MMapShardDataset(url, "all", cache=cache)
    assert ds.warm().wait(60)
    s3_proxy.forget()
    assert (ds[:][0].numpy() == IMAGES).all()
    assert not s3_proxy.asked


def test_what_fails_in_the_background_shows_when_it_is_needed(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    last = ds._reader.path("image", 5).name
    s3_proxy.fault = lambda asked: 503 if last in asked.path else None
    batches = iter(ShardLoader(ds, 10, block_shards=6))
    for k in range(5):
        assert (next(batches)[0].numpy() == IMAGES[10 * k : 10 * k + 10]).all()
    with pytest.raises(RemoteError, match=last):
        next(batches)


def test_warming_brings_what_the_cache_holds(url: str, tmp_path: Path) -> None:
    ds = MMapShardDataset(url, "all", fields=["image"], cache=Cache(tmp_path / "cache", max_bytes=4 * SHARD))
    warming = ds.warm()
    assert warming.wait(60)
    assert warming.done_bytes == warming.total_bytes == 4 * 10 * 4800
    assert len(copies(tmp_path / "cache")) == 4


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_a_node_brings_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    brought = [0]

    def counted(self: Any, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = read(self, name, start, stop)
        brought[0] += len(data)
        return data

    read = _Folder.read
    monkeypatch.setattr(_Folder, "read", counted)
    sizes = tuple(random.Random(nodes).choices(range(5, 20), k=48))
    n = sum(sizes)
    images = np.random.default_rng(0).integers(0, 256, (n, 1, 64, 64), dtype=np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.divmod(np.arange(n), 256)
    make_dataset(tmp_path / "out", images, np.arange(n) % 7, shards=sizes)
    size = {path.name: path.stat().st_size for path in (tmp_path / "out" / "shards").iterdir()}
    total = sum(size[name] for name in size if name.startswith(("image", "label")))
    caches = [Cache(tmp_path / f"node{node}", max_bytes=total // 2) for node in range(nodes)]
    datasets = [MMapShardDataset(tmp_path / "out", cache=cache) for cache in caches]
    loaders = [
        ShardLoader(datasets[rank // 2], 8, shuffle=True, block_shards=4, rank=rank, world_size=2 * nodes, node_groups=nodes, uneven="mask")
        for rank in range(2 * nodes)
    ]
    for _ in range(2):
        seen: Counter[int] = Counter()
        for node in range(nodes):
            for path in copies(tmp_path / f"node{node}", ""):
                if not path.name.startswith("table"):
                    path.unlink()
            datasets[node]._reader.close()
            brought[0] = 0
            for batches in zip(*loaders[2 * node : 2 * node + 2], strict=True):
                for batch in batches:
                    numbers = batch[0][batch[2]][:, 0, 0, :2].long()
                    seen.update((numbers[:, 0] * 256 + numbers[:, 1]).tolist())
            assert 0.9 / nodes * total <= brought[0] <= 1.1 / nodes * total
        assert seen == Counter(range(n))


# -- processes


def read(environment: dict[str, str], url: str, cache: Path, most: int | None, turns: int, said: Connection) -> None:
    """Reads all rows so many times through a cache, and says their sum; a warning is an error."""
    os.environ.update(environment)  # a fork server has that of its own start
    warnings.simplefilter("error")
    ds = MMapShardDataset(url, "all", cache=Cache(cache, max_bytes=most))
    for turn in range(turns):
        for i in range(len(ds)):
            ds[(i * 7 + turn) % 60][0].sum().item()
    said.send(int(ds[:][0].long().sum()))


def start(url: str, cache: Path, most: int | None, turns: int) -> tuple[ForkServerProcess, Connection]:
    return forked(read, dict(os.environ), url, cache, most, turns)


def ended(running: tuple[ForkServerProcess, Connection]) -> tuple[int, int | None]:
    """What it said, and its exit code."""
    process, said = running
    found = said.recv()
    process.join(60)
    return found, process.exitcode


def test_processes_that_want_the_same_bring_it_once(local: Path, url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    s3_proxy.fault = lambda asked: 0.2 if "shards/" in asked.path else None
    running = [start(url, tmp_path / "cache", None, 1) for _ in range(4)]
    assert [ended(one) for one in running] == [(IMAGES.sum(dtype=np.int64), 0)] * 4
    asked = Counter(a.path for a in s3_proxy.asked if a.method == "GET" and "shards/" in a.path)
    assert len(asked) == len([path for path in (local / "shards").iterdir() if path.name.startswith(("table", "image", "label"))])
    assert set(asked.values()) == {1}


def test_threads_that_want_the_same_bring_it_once(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    s3_proxy.fault = lambda asked: 0.2 if "shards/" in asked.path else None
    right = []
    in_threads(lambda k: right.append((ds[::-1][0].numpy() == IMAGES[::-1]).all()), 6)
    assert right == [True] * 6
    assert s3_proxy.count("GET", "image-") == len(SHARDS)


def test_two_processes_read_under_a_tight_limit(url: str, tmp_path: Path) -> None:
    most = 3 * SHARD
    running = [start(url, tmp_path / "cache", most, 2) for _ in range(2)]
    assert [ended(one) for one in running] == [(IMAGES.sum(dtype=np.int64), 0)] * 2
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache", max_bytes=most))  # what both had open is let go when room is next made
    for row in range(0, len(ds), 10):
        assert (ds[row][0].numpy() == IMAGES[row]).all()
    assert sum(path.stat().st_size for path in copies(tmp_path / "cache", "")) <= most


def test_what_a_killed_process_left_is_brought_anew_and_nothing_stays(url: str, tmp_path: Path, s3_proxy: Proxy) -> None:
    begun = threading.Event()

    def slow(asked: Asked) -> float | None:
        if "image-" in asked.path and not begun.is_set():
            begun.set()
            return 60.0
        return None

    s3_proxy.fault = slow
    process, _ = start(url, tmp_path / "cache", None, 1)
    assert begun.wait(60)
    process.kill()
    process.join()
    [left] = copies(tmp_path / "cache")
    assert left.suffix == ".part"
    os.utime(left, (0, 0))  # one just made may be about to be locked
    ds = MMapShardDataset(url, "all", cache=Cache(tmp_path / "cache"))
    assert (ds[59][0].numpy() == IMAGES[59]).all()
    assert not left.exists()  # nobody was at it
    assert (ds[0][0].numpy() == IMAGES[0]).all()
    assert len(copies(tmp_path / "cache")) == 2
