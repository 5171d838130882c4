"""Volumes: read as tensors, their centres and random patches cut, of which alone the bytes are read, the same on every path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mmcompile import Augment, Cache, MMapShardDataset, ShardLoader
from mmcompile.format.npy import libc, map_file
from mmcompile.runtime.patch import Patch, apply, mirrored
from tests.runtime.test_device import resident, same
from tests.support import make_dataset

N = 11
SHAPE = (9, 12, 10)
SCANS = np.random.default_rng(0).integers(-1000, 3000, (N, *SHAPE), dtype=np.int16)
LABELS = np.random.default_rng(1).integers(0, 7, (N, *SHAPE), dtype=np.uint8)
NUMBER = np.arange(N)
FACTS: dict[str, dict[str, Any]] = {"scan": {"meaning": "volume"}, "organs": {"meaning": "volume"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, shards=(4, 4, 3), values={"scan": SCANS, "organs": LABELS, "number": NUMBER}, facts=FACTS)
    return tmp_path


def expected(volume: Any, patch: Patch, i: int) -> Any:
    """Voxel by voxel what a patch is."""
    axes = len(patch.size)
    around = [(3, 3)] * axes  # as far as padding goes here
    framed = np.pad(volume, [(0, 0)] * (volume.ndim - axes) + around)
    box = framed[(..., *(slice(3 + s, 3 + s + n) for s, n in zip(patch.start[i].tolist(), patch.size, strict=True)))]
    return np.flip(box, [axis - axes for axis in range(axes) if patch.flip[i, axis]])


def check(batch: Any, augment: Augment, epoch: int, seed: int) -> list[int]:
    """A scan and its labels are the same patch of the row that `number` tells; returns the rows."""
    scan, organs, number = batch
    rows = np.asarray(number)
    patch = augment.patch(seed, epoch, rows, *SHAPE)
    for i, row in enumerate(rows.tolist()):
        assert np.array_equal(scan[i], expected(SCANS[row], patch, i))
        assert np.array_equal(organs[i], expected(LABELS[row], patch, i))
    return [int(row) for row in rows]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_samples_and_batches_are_what_lies_on_disk(root: Path, engine: str) -> None:
    ds = MMapShardDataset(root, engine=engine)
    assert (ds.shape, ds.dtype) == (SHAPE, torch.int16)
    assert np.array_equal(ds[5][0], SCANS[5])
    assert np.array_equal(ds[5][1], LABELS[5])
    assert np.array_equal(ds[2:9][0], SCANS[2:9])
    assert np.array_equal(next(iter(DataLoader(ds, 5)))[1], LABELS[:5])
    assert np.array_equal(pickle.loads(pickle.dumps(ds))[[9, 1]][0], SCANS[[9, 1]])
    assert np.array_equal(MMapShardDataset(root, transform=lambda x: x + 1, engine=engine)[3][0], SCANS[3] + 1)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_the_centre_is_cut(root: Path, engine: str) -> None:
    for crop, cuts in (((4, 6, 10), (slice(2, 6), slice(3, 9), slice(0, 10))), (9, (slice(0, 9), slice(2, 11), slice(0, 9)))):
        ds = MMapShardDataset(root, crop=crop, engine=engine)
        assert np.array_equal(ds[4][0], SCANS[4][cuts])
        assert np.array_equal(ds[4][1], LABELS[4][cuts])
        assert np.array_equal(ds[:][0], SCANS[(slice(None), *cuts)])
    assert np.array_equal(MMapShardDataset(root, crop=SHAPE, engine=engine)[:][0], SCANS)
    for wrong in (0, (4, 4), (4, 4, 4, 4), 2.5):
        with pytest.raises(ValueError, match=r"crop must be a positive int or \(depth, height, width\), not"):
            MMapShardDataset(root, crop=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crop 4 x 13 x 4 \(depth x height x width\) is larger than field 'scan', stored as 9 x 12 x 10"):
        MMapShardDataset(root, crop=(4, 13, 4))


@pytest.mark.parametrize("channels", [(), (3,), (1,)])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "uint16"])
def test_numbers_are_those_of_numpy(tmp_path: Path, channels: tuple[int, ...], dtype: str) -> None:
    stored = (np.random.default_rng(0).random((4, *channels, 5, 31, 60)) * 200).astype(dtype)
    means, stds = (0.4, 0.5, 0.6)[: channels[0] if channels else 1], (0.2, 0.3, 0.25)[: channels[0] if channels else 1]
    scale = {"uint8": 255.0, "uint16": 65535.0}.get(dtype, 1.0)
    facts = {"scan": {"meaning": "volume", "scale": scale, "normalize": (means, stds)}}
    make_dataset(tmp_path, shards=(3, 1), values={"scan": stored}, facts=facts)
    mean, std = (
        np.array(v, np.float32).reshape(-1, 1, 1, 1)[:, 0] if not channels else np.array(v, np.float32).reshape(-1, 1, 1, 1) for v in (means, stds)
    )
    numbers = (stored.astype(np.float32) / np.float32(scale) - mean) / std
    ds = MMapShardDataset(tmp_path)
    assert ds.dtype == torch.float32
    assert np.array_equal(ds[:], numbers)
    assert np.array_equal(ds[2], numbers[2])
    assert torch.equal(ds._columns[0].numbers(ds._columns[0].batch(NUMBER[:4], raw=True)), ds[:])
    half = MMapShardDataset(tmp_path, dtype="float16", crop=(3, 4, 5))
    assert torch.equal(half[:], ds[:][..., 1:4, 14:18, 28:33].half())
    augment = Augment(crop=(3, 20, 40), padding=2, flip=(0.5, 0.5, 0.5))
    patches = next(iter(ShardLoader(ds, 4, augment=augment)))
    patch = augment.patch(0, 0, NUMBER[:4], 5, 31, 60)
    for i in range(4):
        cut = expected(stored[i], patch, i)
        assert np.array_equal(patches[i], (cut.astype(np.float32) / np.float32(scale) - mean) / std)


def test_a_float_dtype_is_that_of_the_main_volume_and_ids_stay(root: Path) -> None:
    scan, organs, number = MMapShardDataset(root, dtype="float32")[3]
    assert np.array_equal(scan, SCANS[3].astype(np.float32))
    assert (scan.dtype, organs.dtype, number.dtype) == (torch.float32, torch.uint8, torch.int64)
    with pytest.raises(ValueError, match="field 'scan' is stored as int16"):
        MMapShardDataset(root, dtype=torch.int32)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    lead=st.lists(st.integers(1, 3), max_size=1),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_a_patch_of_any_number_of_axes_is_what_indexing_gives(shape: list[int], lead: list[int], data: Any, seed: int) -> None:
    padding = data.draw(st.integers(0, 3))
    size = [data.draw(st.integers(1, n + 2 * padding)) for n in shape]
    axes = len(shape)
    volumes = np.random.default_rng(seed).integers(1, 99, (3, *lead, *shape), np.uint8)
    chance = np.random.default_rng(seed)
    start = np.stack([chance.integers(-padding, n + padding - part + 1, 3) for n, part in zip(shape, size, strict=True)], 1)
    patch = Patch(start, chance.random((3, axes)) < 0.5, tuple(size))
    there = torch.full((3, *lead, *size), 255, dtype=torch.uint8)
    apply(torch.from_numpy(volumes), np.array([2, 0, 1]), patch, there, np.array([0, 1, 2]), torch.tensor(0, dtype=torch.uint8))
    for i, row in enumerate((2, 0, 1)):
        out = np.zeros((*lead, *size), np.uint8)
        whole = (slice(None),) * len(lead)
        part, place, flip = next(patch[i : i + 1].boxes(tuple(shape), (0,) * axes))
        canvas = mirrored(out, flip)
        canvas[(...,) if place is None else (..., *place)] = volumes[row][(*whole, *part)]
        assert np.array_equal(out, expected(volumes[row], patch, i))
        assert np.array_equal(there[i], out)
    assert np.array_equal(patch[1:].start, start[1:])


def test_patches_are_uniform_independent_of_the_batch_and_flipped_as_often_as_asked() -> None:
    rows = np.arange(20_000)
    augment = Augment(crop=(4, 5, 10), padding=1, flip=(0.2, 0.0, 0.7))
    patch = augment.patch(3, 1, rows, *SHAPE)
    for axis, (n, part) in enumerate(zip(SHAPE, (4, 5, 10), strict=True)):
        found = np.bincount(patch.start[:, axis] + 1)
        assert len(found) == n + 2 - part + 1
        assert abs(found / len(rows) * len(found) - 1).max() < 0.15
        assert abs(patch.flip[:, axis].mean() - (0.2, 0.0, 0.7)[axis]) < 0.02
    some = augment.patch(3, 1, rows[[77, 3]], *SHAPE)
    assert np.array_equal(some.start, patch.start[[77, 3]])
    assert np.array_equal(some.flip, patch.flip[[77, 3]])
    assert (augment.patch(3, 2, rows, *SHAPE).start != patch.start).any(1).mean() > 0.9
    images = Augment(crop=8, hflip=0.5).draw(3, 1, rows, 12, 12)  # the last axis is mirrored where an image is
    volumes = Augment(crop=8, hflip=0.5).patch(3, 1, rows, 12, 12, 12)
    assert np.array_equal(volumes.flip[:, 2], images.flip)
    assert not volumes.flip[:, :2].any()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "augment", [Augment(crop=(4, 8, 7), hflip=0.5), Augment(crop=8, padding=2, flip=(0.5, 0.5, 0.5)), Augment(flip=(1.0, 0.0, 0.5))]
)
def test_a_volume_and_its_labels_get_the_same_patch(root: Path, engine: str, workers: int, augment: Augment) -> None:
    loader = ShardLoader(MMapShardDataset(root, engine=engine), 3, shuffle=True, seed=2, num_workers=workers, augment=augment)
    for epoch in range(2):
        assert sorted(row for batch in loader for row in check(batch, augment, epoch, 2)) == list(range(N))


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_patches_come_through_a_cache_and_without_one_map_of_all(
    root: Path, tmp_path_factory: pytest.TempPathFactory, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    augment = Augment(crop=8, padding=2, flip=(0.5, 0.5, 0.5))
    monkeypatch.setattr("mmcompile.format.region._SHARDS", 0)
    for cache in (None, Cache(str(tmp_path_factory.mktemp("cache")), max_bytes=1 << 20)):
        loader = ShardLoader(MMapShardDataset(root, cache=cache, engine=engine), 3, shuffle=True, seed=2, augment=augment)
        assert sorted(row for batch in loader for row in check(batch, augment, 0, 2)) == list(range(N))


def test_patches_lie_within_the_centre_where_that_is_cut_first(root: Path) -> None:
    augment = Augment(crop=(3, 4, 5), padding=1, hflip=0.5)
    for engine in ("mmap", "pread"):
        scan, organs, _ = next(iter(ShardLoader(MMapShardDataset(root, crop=(5, 6, 8), engine=engine), N, augment=augment)))
        patch = augment.patch(0, 0, NUMBER, 5, 6, 8)
        for i in range(N):
            assert np.array_equal(scan[i], expected(SCANS[i, 2:7, 3:9, 1:9], patch, i))
            assert np.array_equal(organs[i], expected(LABELS[i, 2:7, 3:9, 1:9], patch, i))


def test_a_resumed_loop_and_more_ranks_cut_the_same(root: Path) -> None:
    ds, augment = MMapShardDataset(root), Augment(crop=(4, 8, 7), hflip=0.5)
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "augment": augment}
    loader = ShardLoader(ds, 4, **options)
    running = iter(loader)
    first = [next(running)]
    again = ShardLoader(ds, 3, **options)
    again.load_state_dict(loader.state_dict())
    assert sorted(row for batch in [*first, *again] for row in check(batch, augment, 0, 1)) == list(range(N))
    for rank in range(2):
        for batch in ShardLoader(ds, 2, **options, rank=rank, world_size=2, uneven="drop"):
            check(batch, augment, 0, 1)


@pytest.mark.parametrize("held", [None, 4, 8, 0])
def test_resident_volumes_are_cut_where_they_are(root: Path, held: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    there = resident(ds, None if held is None else held * (1080 * 3 + 8), monkeypatch)
    augment = Augment(crop=(4, 8, 14), padding=2, flip=(0.5, 0.5, 0.5))
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "augment": augment}
    for _ in range(2):
        assert same(list(map(list, ShardLoader(there, **options))), list(map(list, ShardLoader(ds, **options))))
    assert np.array_equal(there[[10, 0, 5]][0], SCANS[[10, 0, 5]])


def test_variants_of_volumes_are_cut_too(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 200, (N, 3, *SHAPE), dtype=np.uint8)
    make_dataset(tmp_path, shards=(6, 5), values={"scan": stored}, facts={"scan": {"meaning": "volume", "views": 3}})
    augment = Augment(crop=(4, 8, 7), hflip=0.5)
    for engine in ("mmap", "pread"):
        ds = MMapShardDataset(tmp_path, engine=engine)
        assert ds._views is not None
        shown = ds._views.shown(4, 0, NUMBER)
        patch = augment.patch(4, 0, NUMBER, *SHAPE)
        found = next(iter(ShardLoader(ds, N, seed=4, augment=augment)))
        for i in range(N):
            assert np.array_equal(found[i], expected(stored[i, shown[i]], patch, i))


def test_of_a_patch_alone_the_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmcompile.format import npy

    stored = np.random.default_rng(0).integers(0, 200, (4, 2, 30, 90, 80), dtype=np.uint8)  # lines of 80 bytes, planes of 7,200
    make_dataset(tmp_path, shards=(4,), values={"scan": stored}, facts={"scan": {"meaning": "volume", "views": 2}})
    sizes: list[int] = []
    plain = npy.read_into

    def counting(fd: int, out: Any, offset: int, path: Path) -> None:
        sizes.append(out.nbytes)
        plain(fd, out, offset, path)

    monkeypatch.setattr("mmcompile.format.reader.read_into", counting)
    ds = MMapShardDataset(tmp_path, engine="pread")
    list(ShardLoader(ds, 2, augment=Augment(crop=(10, 20, 40))))
    assert sum(sizes) == 4 * 10 * (19 * 80 + 40)  # whole lines between the first voxel of a plane and its last
    sizes.clear()
    assert ds[1].shape == (30, 90, 80)
    assert sum(sizes) == 30 * 90 * 80


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("workers", [0, 1])
def test_of_cold_volumes_only_the_pages_of_patches_are_read(tmp_path: Path, engine: str, workers: int) -> None:
    stored = np.random.default_rng(0).integers(0, 200, (6, 32, 256, 256), dtype=np.uint8)  # planes of 16 pages, 16 lines each
    make_dataset(tmp_path, shards=(6,), values={"scan": stored}, facts={"scan": {"meaning": "volume"}})
    path = next((tmp_path / "shards").glob("scan-*"))
    with open(path, "rb+") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path).any():
        pytest.skip("this file system keeps its files in memory")
    augment = Augment(crop=(4, 48, 64))
    loader = ShardLoader(MMapShardDataset(tmp_path, engine=engine), 2, num_workers=workers, augment=augment)
    for epoch in range(2):
        for k, batch in enumerate(loader):
            rows = np.arange(2 * k, 2 * k + 2)
            patch = augment.patch(0, epoch, rows, 32, 256, 256)
            assert all(np.array_equal(batch[i], expected(stored[row], patch, i)) for i, row in enumerate(rows))
    wanted = np.zeros(len(resident_pages(path)), np.bool_)
    for epoch in range(2):
        for row, (plane, line, _) in enumerate(augment.patch(0, epoch, np.arange(6), 32, 256, 256).start.tolist()):
            for z in range(plane, plane + 4):
                first = 1 + 512 * row + 16 * z  # behind the header's page
                wanted[first + line // 16 : first + (line + 47) // 16 + 1] = True
    found = resident_pages(path)
    assert found[wanted].all()
    found[:64] = False  # with the header the kernel reads what lies behind it
    assert not found[~wanted].any()
    assert wanted.mean() < 0.1


def resident_pages(path: Path) -> Any:
    """Which pages of a file lie in memory."""
    with open(path, "rb") as file:
        whole = map_file(file.fileno(), path.stat().st_size, writable=False)
    pages = np.zeros(-(-len(whole) // 4096), np.uint8)
    assert libc().mincore(whole.ctypes.data, len(whole), pages.ctypes.data) == 0
    return (pages & 1).astype(np.bool_)


def test_what_cannot_be_done_is_refused(root: Path, tmp_path: Path) -> None:
    ds = MMapShardDataset(root)
    for augment, said in (
        (Augment(resized_crop=8), r"resized_crop is for images, and volumes are not resampled: use crop=, an int or a number for each axis"),
        (Augment(crop=(4, 4)), r"crop \(4, 4\) is not for volumes: give an int, or 3 numbers \(depth x height x width\)"),
        (
            Augment(crop=(4, 4, 14)),
            r"crop 4 x 4 x 14 \(depth x height x width\) is larger than the volumes, 9 x 12 x 10; ask for less, add padding, or",
        ),
        (Augment(flip=(0.5, 0.5)), r"flip \(0.5, 0.5\) is not for volumes \(depth x height x width\): it takes 3 probabilities"),
    ):
        with pytest.raises(ValueError, match=said):
            ShardLoader(ds, augment=augment)
    with pytest.raises(ValueError, match="exclude each other"):
        Augment(hflip=0.5, flip=(0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"flip must be probabilities in \[0, 1\], one for each axis, not \(0.5, 2\)"):
        Augment(flip=(0.5, 2))
    with pytest.raises(TypeError, match=r"flip must be probabilities, one for each axis, not 0\.5"):
        Augment(flip=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crop \(2, 2, 2\) is not for images: give an int, or 2 numbers"):
        Augment(crop=(2, 2, 2)).size(8, 8)
    with pytest.raises(ValueError, match=r"flip \(0.5, 0.5\) is not for images .*: use hflip"):
        Augment(flip=(0.5, 0.5)).size(8, 8)
    other = tmp_path / "other"
    values = {"scan": SCANS, "small": SCANS[:, :5], "points": np.zeros((N, 2, 3), np.float32)}
    facts = {"scan": {"meaning": "volume"}, "small": {"meaning": "volume"}, "points": {"meaning": "keypoints"}}
    make_dataset(other, shards=(N,), values=values, facts=facts)
    with pytest.raises(ValueError, match=r"augment cannot move \['points'\] with a volume; leave them out with fields="):
        ShardLoader(MMapShardDataset(other), augment=Augment(hflip=0.5))
    with pytest.raises(ValueError, match="crop moves all that belongs to a picture together, and boxes and keypoints count pixels of an image"):
        MMapShardDataset(other, crop=4)
    with pytest.raises(ValueError, match=r"shapes differ: scan \(9, 12, 10\), small \(5, 12, 10\); choose with fields="):
        ShardLoader(MMapShardDataset(other, fields=("scan", "small")), augment=Augment(crop=4))
    for batch in ShardLoader(MMapShardDataset(other, fields=("scan", "small")), 4, augment=Augment(hflip=1.0)):
        assert np.array_equal(batch[0][:, :5], batch[1])
