"""Datasets that hold several variants of each sample: (seed, epoch, row) picks one, everywhere the same, and of it alone the bytes are read."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmcompile import Augment, Cache, MMapShardDataset, ShardLoader, ShardSampler
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.views import Views
from tests.runtime.test_device import resident, same
from tests.support import make_dataset

N, K = 23, 4
IMAGES = np.random.default_rng(0).integers(0, 256, (N, K, 3, 6, 5), dtype=np.uint8)
MASKS = np.random.default_rng(1).integers(0, 9, (N, K, 6, 5), dtype=np.uint8)
COUNTS = np.random.default_rng(3).integers(0, 3, (N, K))
BOXES = np.sort(np.random.default_rng(2).random((N, K, 2, 2, 2), dtype=np.float32), 3).reshape(N, K, 2, 4) * 5
BOXES *= (np.arange(2) < COUNTS[..., None])[..., None]  # rows that are not filled are 0
FACTS: dict[str, dict[str, Any]] = {
    "image": {"meaning": "image", "layout": "chw", "scale": 255.0, "views": K},
    "marks": {"meaning": "mask", "views": K},
    "boxes": {"meaning": "boxes", "views": K, "count": "boxes_count"},
    "boxes_count": {"meaning": "value", "views": K},
}
LABELS = np.arange(N)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    values = {"image": IMAGES, "marks": MASKS, "boxes": BOXES, "boxes_count": COUNTS}
    make_dataset(tmp_path, None, LABELS, shards=(9, 9, 5), values=values, facts=FACTS)
    return tmp_path


def shown(epoch: int, rows: Any = LABELS, seed: int = 0) -> Any:
    return Views(K, None).shown(seed, epoch, np.asarray(rows))


def check(batch: Any, epoch: int, seed: int = 0) -> list[int]:
    """All fields of a batch are those of the variant of their row, which its label tells; returns the labels."""
    label, image, marks, boxes, counts = batch
    rows = np.asarray(label)
    picked = rows, shown(epoch, rows, seed)
    for found, all_of in ((image, IMAGES), (marks, MASKS), (boxes, BOXES), (counts, COUNTS)):
        assert np.array_equal(found, all_of[picked])
    return [int(row) for row in rows]


def test_any_k_epochs_show_all_variants_and_rows_begin_anywhere() -> None:
    rows = np.arange(10_000)
    for first in (0, 3, 10**12):
        epochs = np.stack([shown(epoch, rows) for epoch in range(first, first + K)])
        assert (np.sort(epochs, 0) == np.arange(K)[:, None]).all()
    assert abs(np.bincount(shown(0, rows)) - len(rows) / K).max() < 200
    assert (shown(0, rows) != shown(0, rows, seed=1)).mean() > 0.7
    assert (shown(5, rows[7:9]) == shown(5, rows)[7:9]).all()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("epoch", [0, 5])
def test_samples_slices_lists_and_subsets_show_the_same(root: Path, engine: str, epoch: int) -> None:
    ds = MMapShardDataset(root, engine=engine)
    ds.set_epoch(epoch)
    assert ds.fields["image"].shape == (K, 3, 6, 5)
    assert ds.shape == (3, 6, 5)
    for copy in (False, True):
        for one in MMapShardDataset(root, engine=engine, copy=copy), pickle.loads(pickle.dumps(ds)):
            one.set_epoch(epoch)
            for i in (0, 8, 9, 22, -1):
                label, *rest = one[i]
                check([[label], *(value[None] for value in rest)], epoch)
    assert check(ds[3:17], epoch) == list(range(3, 17))
    assert check(ds[[22, 0, 22]], epoch) == [22, 0, 22]
    assert check(ds.subset([20, 3])[:], epoch) == [20, 3]
    assert ds.subset([20, 3])[1][1].equal(ds[3][1])
    key = SampleIndex(4, 7, 2)
    check([[ds[key][0]], *(value[None] for value in ds[key][1:])], 2, 7)
    mixed = ds[[SampleIndex(4, 7, 2), SampleIndex(5, 7, 3), SampleIndex(6, 7, 2), 8]]
    assert torch.equal(mixed[1][0], torch.from_numpy(IMAGES[4, shown(2, [4], 7)[0]]))
    assert torch.equal(mixed[1][1], torch.from_numpy(IMAGES[5, shown(3, [5], 7)[0]]))
    assert torch.equal(mixed[1][2], torch.from_numpy(IMAGES[6, shown(2, [6], 7)[0]]))
    assert torch.equal(mixed[1][3], ds[8][1])


def test_a_sample_is_a_view_of_its_variant_and_a_write_stays_there(root: Path) -> None:
    ds = MMapShardDataset(root)
    ds[3][1].zero_()
    assert not ds[3][1].any()
    assert torch.equal(ds[[3]][1][0], torch.from_numpy(IMAGES[3, shown(0, [3])[0]]))
    ds.set_epoch(1)
    check([[3], *(value[None] for value in ds[3][1:])], 1)


def test_one_variant_can_be_asked_for(root: Path) -> None:
    ds = MMapShardDataset(root, view=2)
    for epoch in range(3):
        ds.set_epoch(epoch)
        assert np.array_equal(ds[:][1], IMAGES[:, 2])
        assert np.array_equal(ds[5][1], IMAGES[5, 2])
    assert np.array_equal(next(iter(DataLoader(MMapShardDataset(root, view=3), 5)))[1], IMAGES[:5, 3])  # without a word about epochs
    with pytest.raises(ValueError, match=r"view must be an integer in \[0, 4\), not 4"):
        MMapShardDataset(root, view=4)
    with pytest.raises(ValueError, match=r"view=0, and the fields \['label'\] have no variants"):
        MMapShardDataset(root, fields=("label",), view=0)
    said = r"windows are of rows in a row that are one each, not of .*boxes_count \(4 variants\): leave them out with fields="
    with pytest.raises(ValueError, match=said):
        MMapShardDataset(root).windows(2)
    with pytest.raises(ValueError, match=said):
        MMapShardDataset(root, fields=("label",)).windows(2, horizon=1, target="boxes_count")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_shows_what_its_seed_and_epoch_pick(root: Path, workers: int) -> None:
    loader = ShardLoader(MMapShardDataset(root), 5, shuffle=True, num_workers=workers, seed=3)
    seen = []
    for epoch in range(K):
        labels: list[int] = []
        for batch in loader:
            labels += check(batch, epoch, 3)
            seen += [image.numpy().tobytes() for image in batch[1]]
        assert sorted(labels) == list(range(N))
    assert set(seen) == {IMAGES[i, k].tobytes() for i in range(N) for k in range(K)}


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_stock_loader_with_a_sampler_shows_the_same(root: Path, context: str | None) -> None:
    ds = MMapShardDataset(root)
    sampler = ShardSampler(ds, 5, shuffle=True, seed=3)
    loader = DataLoader(ds, 5, sampler=sampler, num_workers=2 if context else 0, multiprocessing_context=context)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sorted(row for batch in loader for row in check(batch, epoch, 3)) == list(range(N))


def test_a_stock_loader_that_nobody_told_the_epoch_is_warned(root: Path) -> None:
    ds = MMapShardDataset(root)
    with pytest.warns(UserWarning, match="samples have several variants, and nothing says which epoch it is"):
        list(DataLoader(ds, 30))
    ds.set_epoch(1)
    for batch in DataLoader(ds, 30, num_workers=1, multiprocessing_context="fork"):
        check(batch, 1)


def test_a_resumed_loop_and_more_ranks_show_the_same(root: Path) -> None:
    ds = MMapShardDataset(root)
    loader = ShardLoader(ds, 4, shuffle=True, seed=1)
    list(loader)
    running = iter(loader)
    first = [next(running), next(running)]
    state = loader.state_dict()
    again = ShardLoader(ds, 3, shuffle=True, seed=1)
    again.load_state_dict(state)
    rows = [row for batch in [*first, *again] for row in check(batch, 1, 1)]
    assert sorted(rows) == list(range(N))
    ranks = [ShardLoader(ds, 2, shuffle=True, seed=1, rank=rank, world_size=2, uneven="drop") for rank in range(2)]
    for epoch in range(2):
        for batches in map(list, ranks):
            for batch in batches:
                check(batch, epoch, 1)


def test_draws_of_one_row_with_replacement_differ(root: Path) -> None:
    loader = ShardLoader(MMapShardDataset(root, fields=("label", "image")), 23, weights=[1.0] + [0.0] * 22, seed=5)
    images = {image.numpy().tobytes() for _, batch in loader for image in batch}
    assert images == {IMAGES[0, k].tobytes() for k in range(K)}


def test_hooks_and_augmentation_go_on_top(root: Path) -> None:
    def plus(*values: Any) -> Any:
        return tuple(value + 1 for value in values)

    ds = MMapShardDataset(root, transforms=plus, fields=("label", "image", "marks"))
    label, image, marks = next(iter(ShardLoader(ds, N, num_workers=0)))
    rows = label.numpy() - 1
    assert np.array_equal(image, IMAGES[rows, shown(0, rows)] + 1)
    assert np.array_equal(marks, MASKS[rows, shown(0, rows)] + 1)
    augment = Augment(crop=4, padding=1, hflip=0.5)
    for engine in ("mmap", "pread"):
        moved = next(iter(ShardLoader(MMapShardDataset(root, engine=engine), N, augment=augment)))
        fixed = [next(iter(ShardLoader(MMapShardDataset(root, view=k), N, augment=augment))) for k in range(K)]
        for i, k in enumerate(shown(0).tolist()):
            for values, its in zip(moved, fixed[k], strict=True):
                assert torch.equal(values[i], its[i])


def test_numbers_are_computed_and_centres_cut_of_the_variant(root: Path, tmp_path: Path) -> None:
    ds = MMapShardDataset(root, fields=("image",), dtype=torch.float32, crop=3)
    expected = torch.from_numpy(IMAGES[LABELS, shown(0)])[:, :, 2:5, 1:4].float() / 255
    assert torch.equal(ds[:], expected)
    assert torch.equal(ds[7], expected[7])
    hwc = tmp_path / "hwc"
    facts = {"image": {**FACTS["image"], "layout": "hwc"}}
    make_dataset(hwc, None, LABELS, shards=(20, 3), values={"image": np.ascontiguousarray(IMAGES.transpose(0, 1, 3, 4, 2))}, facts=facts)
    for engine in ("mmap", "pread"):
        other = MMapShardDataset(hwc, fields=("image",), dtype=torch.float32, crop=3, engine=engine)
        assert torch.equal(other[:], expected)
        assert torch.equal(other[7], expected[7])


@pytest.mark.parametrize("shards", [None, 9, 18])
def test_resident_variants_are_those_of_the_files(root: Path, shards: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    ds.set_epoch(2)
    row = 8 + K * (90 + 30 + 32 + 8)
    there = resident(ds, None if shards is None else row * shards, monkeypatch)
    assert there._resident is not None
    assert len(there._resident) == (shards or N)
    assert check(there[[22, 3, 9]], 2) == [22, 3, 9]
    assert torch.equal(there[12][1], ds[12][1])
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3}
    for _ in range(2):
        assert same(list(map(list, ShardLoader(there, **options))), list(map(list, ShardLoader(ds, **options))))
    assert check(ds.to_device("cpu")[2:5], 2) == [2, 3, 4]


def test_more_shards_than_can_be_mapped_together_read_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.format.region._SHARDS", 0)
    for copy in (False, True):
        ds = MMapShardDataset(root, copy=copy)
        assert check(ds[:], 0) == list(range(N))
        check([[9], *(value[None] for value in ds[9][1:])], 0)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_variants_come_through_a_cache(root: Path, tmp_path_factory: pytest.TempPathFactory, engine: str) -> None:
    cache = Cache(str(tmp_path_factory.mktemp("cache")), max_bytes=1 << 20)
    ds = MMapShardDataset(root, cache=cache, engine=engine)
    assert check(ds[:], 0) == list(range(N))
    check([[9], *(value[None] for value in ds[9][1:])], 0)
    assert sorted(row for batch in ShardLoader(ds, 5, shuffle=True, seed=3) for row in check(batch, 0, 3)) == list(range(N))
