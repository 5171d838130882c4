"""Parts of a dataset: the same samples under other numbers, and no pixel copied."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, random_split

from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.seeding import SampleIndex
from mmcompile.runtime.selection import divide
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 3, 5, 4), dtype=np.uint8)
LABELS = np.arange(40) % 4
CHOSEN = [30, 2, 2, 39, 0, 17]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, IMAGES, LABELS, shards=(9, 9, 12, 10), splits={"train": 30, "val": 10})
    return tmp_path


@pytest.fixture
def ds(root: Path) -> MMapShardDataset:
    return MMapShardDataset(root, "all")


def holds(part: MMapShardDataset, rows: Any) -> bool:
    """Are these rows of all the samples, however they are asked for?"""
    rows = np.array(rows, np.int64)
    batches = [part[:], part[list(range(len(rows)))], next(iter(DataLoader(part, batch_size=99)))] if len(rows) else [part[:]]
    return (
        len(part) == len(rows)
        and all((images.numpy() == IMAGES[rows]).all() and labels.tolist() == LABELS[rows].tolist() for images, labels in batches)
        and [(x.tolist(), y) for x, y in part] == [(IMAGES[row].tolist(), LABELS[row]) for row in rows]
        and part.targets is not None
        and part.targets.tolist() == LABELS[rows].tolist()
    )


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.uint8), lambda x: [SampleIndex(i, 1, 2) for i in x]])
def test_a_subset_is_these_samples_in_this_order(ds: MMapShardDataset, make: Any) -> None:
    part = ds.subset(make(CHOSEN))
    assert holds(part, CHOSEN)
    assert holds(ds.subset(range(3, 20, 5)), range(3, 20, 5))
    assert holds(ds.subset([-1, -40]), [39, 0])
    assert holds(ds.subset([]), [])
    assert holds(part.subset([3, 0, 0, -1]), [39, 30, 30, 17])
    assert (part[1:4][0].numpy() == IMAGES[CHOSEN[1:4]]).all()
    assert (part[-1][0].numpy() == IMAGES[17]).all()
    assert part[0][0].data_ptr() == ds[30][0].data_ptr()
    assert holds(ds, range(40))


def test_a_subset_of_a_split_counts_from_its_beginning(root: Path) -> None:
    val = MMapShardDataset(root, "val")
    part = val.subset([9, 0, 4])
    assert holds(part, [39, 30, 34])
    assert part.stats == val.stats
    assert part.stats != MMapShardDataset(root, "train").stats
    assert part._where(np.array([2, 0])).tolist() == [34, 39]
    assert val._where(np.array([2, 0])).tolist() == [32, 30]
    with pytest.raises(KeyError):
        part.find(val.source(1))


def test_what_is_known_of_a_subset(ds: MMapShardDataset) -> None:
    part = ds.subset(CHOSEN)
    assert [part.source(i) for i in range(6)] == [ds.source(i) for i in CHOSEN]
    assert [part.find(ds.source(i)) for i in CHOSEN] == [0, 1, 1, 3, 4, 5]
    for missing in (ds.source(1), ds.source(38), "nothing"):
        with pytest.raises(KeyError):
            part.find(missing)
    with pytest.raises(KeyError):
        ds.subset([]).find(ds.source(1))
    assert part.classes == ds.classes
    assert part.generation == ds.generation
    assert part.shape == ds.shape
    assert part.stats == ds.stats
    assert "a subset): 6 samples of image" in repr(part)
    assert type(part) is type(ds)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_subset_travels_to_workers(ds: MMapShardDataset, context: str) -> None:
    part = ds.subset(CHOSEN)
    assert len(pickle.dumps(ds)) < 1024
    assert len(pickle.dumps(part)) < 1024 + 8 * len(CHOSEN)
    assert holds(pickle.loads(pickle.dumps(part)), CHOSEN)
    images = torch.cat([x for x, _ in DataLoader(part, batch_size=4, num_workers=2, multiprocessing_context=context)])
    assert (images.numpy() == IMAGES[CHOSEN]).all()


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        ([0, 40], IndexError),
        ([-41], IndexError),
        ([True], TypeError),
        (np.ones(40, bool), TypeError),
        ([0.5], TypeError),
        (iter([1]), TypeError),
        ({1}, TypeError),
        (3, TypeError),
    ],
)
def test_numbers_that_make_no_sense_are_refused(ds: MMapShardDataset, samples: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"out of range: the dataset has 40|turn a mask into numbers|asked for by (an integer|a list)"):
        ds.subset(samples)


def draw(image: torch.Tensor) -> torch.Tensor:
    return torch.rand(3)


def test_a_subset_keeps_the_randomness_of_its_samples(root: Path) -> None:
    ds = MMapShardDataset(root, "all", transform=draw)
    ds.set_epoch(4)
    part = ds.subset(CHOSEN)
    assert part.epoch == 4
    assert torch.equal(part[:][0], ds[CHOSEN][0])
    part.set_epoch(5)
    assert ds.epoch == 5  # they share one
    ds.set_epoch(6)
    assert part.epoch == 6
    ds.set_epoch(5)
    assert torch.equal(part[0][0], ds[SampleIndex(30, 0, 5)][0])


def test_blocks_are_the_first_samples_of_shards(root: Path, ds: MMapShardDataset, tmp_path: Path) -> None:
    assert ds.blocks().tolist() == [0, 9, 18, 30, 40]
    assert ds.blocks().dtype == np.int64
    assert MMapShardDataset(root, "train").blocks().tolist() == [0, 9, 18, 30]
    assert MMapShardDataset(root, "val").blocks().tolist() == [0, 10]
    assert ds.subset([1, 1, 8, 9, 35]).blocks().tolist() == [0, 3, 4, 5]
    assert ds.subset(range(40)).blocks().tolist() == [0, 9, 18, 30, 40]
    assert MMapShardDataset(root, "val").subset([3]).blocks().tolist() == [0, 1]
    assert ds.subset([]).blocks().tolist() == [0]
    with pytest.raises(ValueError, match=r"block order needs ascending rows.*sort the numbers"):
        ds.subset([2, 1]).blocks()
    make_dataset(tmp_path / "none", IMAGES[:0], [])
    assert MMapShardDataset(tmp_path / "none").blocks().tolist() == [0]


def test_all_joins_splits_even_where_one_of_them_is_named_so(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, LABELS, splits={"all": 10, "rest": 30})
    assert len(MMapShardDataset(tmp_path, "all")) == 40
    assert len(MMapShardDataset(tmp_path, "rest")) == 30
    make_dataset(tmp_path / "one", IMAGES, LABELS, splits={"train": 40})
    assert len(MMapShardDataset(tmp_path / "one", "all")) == len(MMapShardDataset(tmp_path / "one")) == 40


# -- random splits


def rows_of(part: MMapShardDataset) -> list[int]:
    return part._where(np.arange(len(part))).tolist()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 300), st.integers(0, 5))
def test_parts_are_disjoint_ascending_and_together_everything(data: st.DataObject, n: int, seed: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    counts = np.diff([0, *cuts, n]).tolist()
    fractions = [0.5, 0.25, 0.25]
    labels = np.random.default_rng(seed).integers(0, data.draw(st.integers(1, 60)), n)
    rows = np.arange(n) + 7
    for lengths in (counts, fractions):
        for by in (None, labels):
            parts = divide(rows, lengths, seed, by)
            assert len(parts) == len(lengths)
            assert sorted(np.concatenate(parts).tolist()) == list(range(n))
            assert all((np.diff(part) > 0).all() for part in parts)
            if lengths is counts:
                assert [len(part) for part in parts] == counts
            elif by is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch finds empty parts remarkable
                    torchs = random_split(range(n), fractions, torch.Generator().manual_seed(0))
                assert [len(part) for part in parts] == [len(part) for part in torchs]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 9))
def test_every_class_is_split_by_the_fractions(sizes: list[int], weights: list[int], seed: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    n = len(labels)
    fractions = [w / sum(weights) for w in weights]
    parts = divide(np.arange(n), fractions, seed, labels)
    for part, fraction in zip(parts, fractions, strict=True):
        got = np.bincount(labels[part], minlength=len(sizes))
        assert (np.abs(got - np.array(sizes) * fraction) < 1 + 1e-6).all()
        assert abs(len(part) - n * fraction) < len(fractions)


def test_one_class_is_split_by_largest_remainder() -> None:
    assert [len(p) for p in divide(np.arange(10), [0.5, 0.25, 0.25], 0, np.zeros(10, int))] == [5, 3, 2]
    assert [len(p) for p in divide(np.arange(100), [0.29, 0.71], 0, np.zeros(100, int))] == [29, 71]


def test_small_classes_do_not_all_go_to_the_first_part() -> None:
    labels = np.repeat(np.arange(100), 3)
    train, val = divide(np.arange(300), [0.9, 0.1], 0, labels)
    assert (len(train), len(val)) == (270, 30)
    assert np.bincount(labels[val], minlength=100).max() == 1
    train, val = divide(np.arange(100), [0.9, 0.1], 0, np.arange(100))
    assert (len(train), len(val)) == (90, 10)


def test_a_split_depends_on_the_seed_and_the_rows_alone(root: Path, ds: MMapShardDataset) -> None:
    first, second = ds.random_split([0.75, 0.25], seed=3)
    assert (len(first), len(second)) == (30, 10)
    assert rows_of(second) == rows_of(ds.random_split([30, 10], seed=3)[1])
    assert rows_of(second) == [0, 4, 5, 11, 13, 14, 19, 24, 31, 33]  # for good: a validation set must not change
    assert rows_of(second) != rows_of(ds.random_split([0.75, 0.25], seed=4)[1])
    before = torch.get_rng_state()
    assert rows_of(ds.random_split([0.75, 0.25], seed=3)[0]) == rows_of(first)
    assert torch.equal(torch.get_rng_state(), before)
    val = MMapShardDataset(root, "val")
    assert all(30 <= row < 40 for part in val.random_split([0.5, 0.5]) for row in rows_of(part))
    again = first.random_split([0.5, 0.5])
    assert sorted(rows_of(again[0]) + rows_of(again[1])) == rows_of(first)
    assert holds(first, rows_of(first))


def test_stratified(ds: MMapShardDataset, tmp_path: Path) -> None:
    for lengths in ([0.5, 0.3, 0.2], [20, 12, 8]):
        parts = ds.random_split(lengths, stratify=True)
        assert [np.bincount(part.targets).tolist() for part in parts] == [[5] * 4, [3] * 4, [2] * 4]
    make_dataset(tmp_path / "flat", IMAGES)
    with pytest.raises(ValueError, match="stratify=True needs labels"):
        MMapShardDataset(tmp_path / "flat").random_split([0.5, 0.5], stratify=True)


@pytest.mark.parametrize("lengths", [[], [0.5, 0.4], [1.5, -0.5], [20, 10], [50, -10], ["a"], [True, 39], [math.nan, 1.0], [1]])
def test_lengths_that_do_not_fit_are_refused(ds: MMapShardDataset, lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"lengths must|fractions must"):
        ds.random_split(lengths)
