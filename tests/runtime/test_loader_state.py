"""The course of epochs through ShardLoader: order, ranks, seeds, and going on."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

from mmcompile import Augment, GenerationError, MMapShardDataset, ShardLoader, ShardSampler
from mmcompile.runtime.order import Order, cumulative
from tests.support import make_dataset

N = 47


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """47 images of 1 x 3 x 3 whose label is their number, in shards of 20, 20 and 7."""
    out = tmp_path_factory.mktemp("state")
    make_dataset(out, np.random.default_rng(0).integers(0, 256, (N, 1, 3, 3), np.uint8), np.arange(N), shards=(20, 20, 7))
    return out


@pytest.fixture
def ds(root: Path) -> MMapShardDataset:
    return MMapShardDataset(root)


def labels(batches: Any) -> list[int]:
    return [int(i) for _, part, *_ in batches for i in part]


def order(epoch: int, seed: int = 0, **settings: Any) -> list[int]:
    out: list[int] = Order(N, seed=seed, epoch=epoch, **{"shuffle": True, **settings}).rows(np.arange(N)).tolist()
    return out


# -- epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_each_loop_is_the_next_epoch(ds: MMapShardDataset, workers: int) -> None:
    loader = ShardLoader(ds, 5, shuffle=True, num_workers=workers)
    assert [labels(loader) for _ in range(3)] == [order(0), order(1), order(2)]
    loader.set_epoch(7)
    assert [labels(loader), labels(loader)] == [order(7), order(8)]
    for _, part in loader:
        assert part.tolist() == order(9)[:5]
        break
    assert labels(loader) == order(10)
    assert next(iter(loader))[1].tolist() == order(11)[:5]
    iter(loader)  # nothing was taken from it
    assert labels(loader) == order(12)


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_within_loops_and_side_by_side_have_an_epoch_each(ds: MMapShardDataset, workers: int) -> None:
    loader, other = (ShardLoader(ds, 12, shuffle=True, num_workers=workers) for _ in range(2))
    outer, inner = [], []
    for batch in loader:
        outer.append(batch)
        inner.append(labels(loader))
    assert labels(outer) == order(0)
    assert inner == [order(1), order(2), order(3), order(4)]
    first, second = zip(*zip(loader, loader, strict=True), strict=True)
    assert [labels(first), labels(second)] == [order(5), order(6)]
    assert [labels(part) for part in zip(*zip(loader, other, strict=True), strict=True)] == [order(7), order(0)]


# -- states


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_state_counts_what_was_received_and_is_small(ds: MMapShardDataset, workers: int) -> None:
    loader = ShardLoader(ds, 5, shuffle=True, seed=(1 << 64) - 1, num_workers=workers, prefetch_factor=4, rank=0, world_size=2)
    expected = {"generation": ds.generation, "seed": (1 << 64) - 1, "epoch": 0, "position": 0}
    assert loader.state_dict() == expected
    loop = iter(loader)
    assert loader.state_dict() == expected
    for step in range(1, 5):
        next(loop)
        assert loader.state_dict() == {**expected, "position": 10 * step}
        assert len(pickle.dumps(loader.state_dict())) < 200
        assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    next(loop)
    assert loader.state_dict() == {**expected, "epoch": 1}
    assert next(loop, None) is None
    assert loader.state_dict() == {**expected, "epoch": 1}


ORDERS: dict[str, dict[str, Any]] = {
    "sequence": {"shuffle": False},
    "shuffled": {"shuffle": True},
    "block": {"shuffle": "block", "block_shards": 1},
    "weights": {"weights": [1.0 + i % 3 for i in range(N)]},
}


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("before", [(1, 5, 0), (2, 3, 2), (3, 4, 1)])
@pytest.mark.parametrize("after", [(1, 7, 2), (2, 4, 0), (4, 3, 1)])
def test_a_resumed_epoch_is_what_was_left_of_it(ds: MMapShardDataset, kind: str, before: Any, after: Any) -> None:
    settings: dict[str, Any] = {**ORDERS[kind], "seed": 3, "uneven": "mask", "augment": Augment(crop=2, hflip=0.5)}
    whole = ShardLoader(ds, N, **settings)
    epochs = [next(iter(whole)) for _ in range(3)]
    (world, size, workers), (new_world, new_size, new_workers) = before, after
    for steps in (1, 3):
        states = []
        for rank in range(world):
            loader = ShardLoader(ds, size, num_workers=workers, rank=rank, world_size=world, **settings)
            list(loader)
            states.append([loader.state_dict() for _ in itertools.islice(loader, steps)][-1])
        assert all(state == states[0] for state in states)
        parts: list[list[Any]] = [[], []]
        for rank in range(new_world):
            loader = ShardLoader(ds, new_size, num_workers=new_workers, rank=rank, world_size=new_world, **{**settings, "seed": 99})
            loader.load_state_dict(json.loads(json.dumps(states[0])))
            for part, start in zip(parts, (world * size * steps, 0), strict=True):
                batches = list(loader)
                assert len(batches) == -(-(N - start) // (new_world * new_size))
                assert len(loader) == -(-N // (new_world * new_size))
                part.extend(
                    (int(y), x) for images, ids, *valid in batches for x, y, ok in zip(images, ids, *(valid or [[True] * N]), strict=False) if ok
                )
        for part, (images, ids, *_), start in zip(parts, epochs[1:], (world * size * steps, 0), strict=True):
            wanted = Counter((int(i), image.numpy().tobytes()) for i, image in zip(ids[start:], images[start:], strict=True))
            assert Counter((i, image.numpy().tobytes()) for i, image in part) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_with_a_sampler_of_ones_own(ds: MMapShardDataset, workers: int) -> None:
    given = order(0)[:20]
    for size, steps, new_size in ((5, 2, 5), (5, 2, 4), (3, 6, 20)):
        loader = ShardLoader(ds, size, sampler=given, num_workers=workers)
        for _ in itertools.islice(loader, steps):
            pass
        other = ShardLoader(ds, new_size, sampler=given, num_workers=workers)
        other.load_state_dict(loader.state_dict())
        assert len(other) == -(-20 // new_size)
        assert labels(other) == given[size * steps :]
        assert other.state_dict()["epoch"] == 1
        assert (len(other), labels(other)) == (-(-20 // new_size), given)
    whole = ShardLoader(ds, batch_sampler=BatchSampler(given, 6, False), num_workers=workers)
    assert [whole.state_dict()["position"] for _ in whole] == [1, 2, 3, 0]
    next(iter(whole))
    other = ShardLoader(ds, batch_sampler=BatchSampler(given, 6, False), num_workers=workers)
    other.load_state_dict(whole.state_dict())
    assert (len(other), labels(other)) == (4, given[6:])
    other.load_state_dict({**whole.state_dict(), "position": 9})
    with pytest.raises(ValueError, match="position 9, and the sampler ends after 4"):
        list(other)
    short = ShardLoader(ds, 15, sampler=given, drop_last=True, num_workers=workers)
    short.load_state_dict({**whole.state_dict(), "position": 10})
    assert (len(short), labels(short), labels(short)) == (1, [], given[:15])


def test_going_on_with_a_shard_sampler(ds: MMapShardDataset) -> None:
    def loader() -> ShardLoader:
        return ShardLoader(ds, 4, sampler=ShardSampler(ds, 4, shuffle=True, seed=8))

    one, other = loader(), loader()
    for _ in itertools.islice(one, 3):
        pass
    other.load_state_dict(one.state_dict())
    assert len(other) == len(one) == -(-N // 4)
    assert labels(other) == order(0, 8)[12:]
    assert labels(other) == order(1, 8)


def test_a_state_can_be_loaded_while_a_loop_runs(ds: MMapShardDataset) -> None:
    loader = ShardLoader(ds, 10, shuffle=True, num_workers=2)
    running = iter(loader)
    next(running)
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "position": 40})
    assert labels([next(running)]) == order(0)[10:20]
    assert loader.state_dict()["epoch"] == 5
    assert len(loader) == -(-N // 10)
    assert labels(loader) == order(5)[40:]
    assert labels(loader) == order(6)


def test_a_state_under_a_batch_size_that_leaves_nothing_means_the_next_epoch(ds: MMapShardDataset) -> None:
    loader = ShardLoader(ds, 20, shuffle=True, drop_last=True)
    loader.load_state_dict({**loader.state_dict(), "position": 30})
    assert len(loader) == 2
    assert labels(loader) == order(1)[:40]


def test_a_state_of_other_data_is_refused_with_the_remedy(ds: MMapShardDataset, tmp_path: Path) -> None:
    make_dataset(tmp_path, np.zeros((N, 1, 3, 3), np.uint8), np.arange(N))
    state = ShardLoader(MMapShardDataset(tmp_path)).state_dict()
    for settings in ({}, {"sampler": [1, 2]}, {"sampler": ShardSampler(ds)}):
        loader = ShardLoader(ds, **settings)  # type: ignore[arg-type]
        before = loader.state_dict()
        with pytest.raises(GenerationError, match=r"open that one .*, or start anew"):
            loader.load_state_dict(state)
        with pytest.raises(ValueError, match="a state has the keys"):
            loader.load_state_dict({"epoch": 1})
        assert loader.state_dict() == before


# -- ranks and weights


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 30])
@pytest.mark.parametrize("uneven", ["wrap", "drop", "mask"])
def test_ranks_share_an_epoch(ds: MMapShardDataset, world: int, size: int, uneven: str) -> None:
    loaders = [ShardLoader(ds, size, True, uneven=uneven, rank=rank, world_size=world) for rank in range(world)]
    epochs = [list(loader) for loader in loaders]
    assert {len(loader) for loader in loaders} == {len(epoch) for epoch in epochs}
    steps = list(zip(*epochs, strict=True))
    assert all(len({len(batch[1]) for batch in step}) == 1 for step in steps)
    found = [i for step in steps for i in labels(step)]
    valid = [bool(v) for step in steps for batch in step for v in (batch[2] if uneven == "mask" else batch[1] >= 0)]
    kept = [i for i, ok in zip(found, valid, strict=True) if ok]
    expected = order(0)
    if uneven == "mask":
        assert kept == expected
    elif uneven == "wrap":
        assert kept == [expected[k % N] for k in range(len(kept))]
        assert N <= len(kept) < N + world
    else:
        assert kept == expected[: len(kept)]
        assert N - world < len(kept) <= N


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def test_valid_is_the_last_element_as_the_stock_loader_has_it(root: Path) -> None:
    hooks: list[dict[str, Any]] = [
        {},
        {"output": "dict"},
        {"fields": ("label",)},
        {"fields": ("image",), "transform": torch.Tensor.float},
        {"output": "dict", "transform": torch.Tensor.float},
        {"transforms": Pair},
        {"transforms": lambda image, label: [image, label]},
        {"transforms": lambda image, label: {"x": image}},
    ]
    for settings in hooks:
        ds = MMapShardDataset(root, **settings)
        ranks: dict[str, Any] = {"rank": 1, "world_size": 2, "uneven": "mask"}
        found = list(ShardLoader(ds, 5, **ranks))
        wanted = list(DataLoader(ds, 5, sampler=ShardSampler(ds, 5, **ranks)))
        assert repr(found) == repr(wanted)
        last = found[-1]["valid"] if isinstance(found[-1], dict) else found[-1][-1]
        assert last.tolist() == [True, True, True, False]


def test_a_metric_under_mask_is_that_of_one_process(ds: MMapShardDataset) -> None:
    sums = torch.zeros(2, dtype=torch.float64)
    for rank in range(3):
        for images, ids, valid in ShardLoader(ds, 4, rank=rank, world_size=3, uneven="mask", num_workers=2):
            values = images.double().mean((1, 2, 3)) * ids
            sums += torch.stack([values[valid].sum(), valid.sum()])
    images, ids = ds[:]
    assert sums[1] == N
    assert torch.allclose(sums[0], (images.double().mean((1, 2, 3)) * ids).sum())


def test_several_ranks_in_sequence_must_say_what_is_done_about_the_end(ds: MMapShardDataset) -> None:
    loader = ShardLoader(ds, 4, rank=0, world_size=2)
    with pytest.raises(ValueError, match="uneven='mask'"):
        list(loader)
    assert len(labels(ShardLoader(ds, 4, rank=0, world_size=2, drop_last=True))) == 20


@pytest.mark.parametrize("weights", ["balanced", "given"])
def test_weights_draw_the_same_for_all_ranks(root: Path, tmp_path: Path, weights: str) -> None:
    n, classes = 600, np.repeat([0, 1, 2], [500, 90, 10])
    make_dataset(tmp_path, np.zeros((n, 1, 1, 1), np.uint8), classes)
    ds = MMapShardDataset(tmp_path, fields=("label",))
    given: Any = "balanced" if weights == "balanced" else torch.tensor(1 / np.array([500, 90, 10])[classes])
    one = [torch.cat(list(ShardLoader(ds, 50, weights=given, seed=seed))) for seed in range(10)]
    counts = torch.stack([part.bincount(minlength=3) for part in one]).sum(0)
    assert counts.sum() == 10 * n
    assert (counts - 2000).abs().max() < 200  # 5 standard deviations of a binomial
    assert not torch.equal(one[0], one[1])
    samples = Order(n, seed=0, epoch=0, weights=cumulative(1 / np.array([500, 90, 10])[classes])).rows(np.arange(n))
    assert one[0].tolist() == classes[samples].tolist()
    ranks = [list(ShardLoader(ds, 25, weights=given, rank=rank, world_size=2)) for rank in range(2)]
    assert torch.equal(torch.cat([part for step in zip(*ranks, strict=True) for part in step]), one[0])
    loader = ShardLoader(ds, 50, weights=given)
    whole = [list(loader), list(loader)]
    assert not torch.equal(torch.cat(whole[0]), torch.cat(whole[1]))
    assert len(list(ShardLoader(ds, 50, sampler=WeightedRandomSampler(list(range(n)), 70)))) == 2


# -- transforms of samples


def by_generator(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return image + torch.rand(image.shape, generator=generator)


def by_global(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(1) + np.random.rand() + random.random()


@pytest.mark.parametrize("transform", [by_generator, by_global])
def test_transforms_are_keyed_by_row_and_equal_the_stock_loaders(root: Path, transform: Any) -> None:
    ds = MMapShardDataset(root, transform=transform)
    settings: dict[str, Any] = {"shuffle": True, "seed": 4}
    wanted = []
    for workers in (0, 2):
        stock = DataLoader(ds, 6, sampler=ShardSampler(ds, 6, **settings), num_workers=workers)
        wanted.append([list(stock), list(stock)])
    by_row = [{int(y): x for images, ids in epoch for x, y in zip(images, ids, strict=True)} for epoch in wanted[0]]
    assert not any(torch.equal(by_row[0][i], by_row[1][i]) for i in range(N))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr, index]
    for workers, size, world in ((0, 6, 1), (3, 6, 1), (1, 11, 2)):
        for rank in range(world):
            loader = ShardLoader(ds, size, num_workers=workers, rank=rank, world_size=world, **settings)
            for epoch in range(2):
                batches = list(loader)
                if size == 6:
                    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(batches, wanted[0][epoch], strict=True))
                assert all(torch.equal(x, by_row[epoch][int(y)]) for images, ids in batches for x, y in zip(images, ids, strict=True))
    assert [labels(epoch) for epoch in wanted[0]] == [labels(epoch) for epoch in wanted[1]]
    assert all(torch.equal(a[0], b[0]) for x, y in zip(*wanted, strict=True) for a, b in zip(x, y, strict=True))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr, index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_transforms_go_on_in_mid_epoch_and_run_in_the_thread_that_iterates(root: Path) -> None:
    threads = set()

    def watched(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        threads.add(threading.current_thread())
        return by_generator(image, generator)

    ds = MMapShardDataset(root, transform=watched)
    wanted = torch.cat([images for images, _ in ShardLoader(ds, N, shuffle=True, seed=4)])
    loader = ShardLoader(ds, 5, shuffle=True, seed=4, num_workers=3)
    next(iter(loader))
    other = ShardLoader(ds, 8, shuffle=True, num_workers=1, batch_transform=lambda batch, rng: (threads.add(threading.current_thread()), batch)[1])
    other.load_state_dict(loader.state_dict())
    assert torch.equal(torch.cat([images for images, _ in other]), wanted[5:])
    assert threads == {threading.current_thread()}


def test_a_row_that_is_drawn_again_is_augmented_anew_and_the_same_with_a_sampler(ds: MMapShardDataset) -> None:
    weights = [1.0, 1.0] + [0.0] * (N - 2)
    augment = Augment(crop=1, hflip=0.5)
    images, ids = next(iter(ShardLoader(ds, N, weights=weights, augment=augment)))
    assert set(ids.tolist()) == {0, 1}
    assert all(len({image.numpy().tobytes() for image, i in zip(images, ids, strict=True) if i == k}) > 3 for k in (0, 1))

    def draw(image: torch.Tensor, generator: torch.Generator) -> float:
        return float(torch.rand(1, generator=generator, dtype=torch.float64))

    drawn = MMapShardDataset(ds.root, transform=draw)
    (ours, _), (theirs, _) = (
        next(iter(loader))
        for loader in (ShardLoader(drawn, N, weights=weights), DataLoader(drawn, N, sampler=ShardSampler(drawn, N, weights=weights)))
    )
    assert len(set(ours.tolist())) == N
    assert torch.equal(ours, theirs)


def test_a_state_of_another_part_of_the_dataset_is_refused(ds: MMapShardDataset) -> None:
    one, other = ds.subset(range(20)), ds.subset(range(20, 40))
    loader = ShardLoader(one, 5)
    next(iter(loader))
    state = loader.state_dict()
    assert set(state) == {"generation", "seed", "epoch", "position", "part"}
    assert len(pickle.dumps(state)) < 200
    assert len(json.dumps(state)) < 200
    for wrong in (other, ds, one.subset(list(range(20))[::-1])):
        with pytest.raises(ValueError, match="another part of this dataset"):
            ShardLoader(wrong, 5).load_state_dict(state)
    ShardLoader(ds.subset(np.arange(20)), 5).load_state_dict(state)
    with pytest.raises(ValueError, match="another dataset"):
        ShardLoader(one, 5, sampler=ShardSampler(ds, 5))


def test_what_batch_transform_draws_from_global_generators_is_keyed_too(ds: MMapShardDataset) -> None:
    def mix(batch: Any, rng: Any) -> Any:
        return torch.randperm(7), np.random.rand(), random.random()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again = ([str(batch) for batch in ShardLoader(ds, 5, batch_transform=mix)] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match="batch_transform returned None"):
        next(iter(ShardLoader(ds, 5, batch_transform=lambda batch, rng: None)))


def test_rows_that_a_sampler_draws_with_replacement_are_augmented_anew(ds: MMapShardDataset) -> None:
    def chance(batch: Any, rng: Any) -> Any:
        return rng.rand().tolist()

    drawn = [x for batch in ShardLoader(ds, 50, sampler=WeightedRandomSampler([1.0] * 5, 200), batch_transform=chance) for x in batch]
    assert len(set(drawn)) > 190


def test_a_state_with_a_sampler_says_of_which_part_too(ds: MMapShardDataset) -> None:
    state = ShardLoader(ds.subset(range(20)), 4, sampler=range(20)).state_dict()
    for wrong in (ShardLoader(ds.subset(range(20, 40)), 4, sampler=range(20)), ShardLoader(ds, 4, shuffle=True)):
        with pytest.raises(ValueError, match="another part"):
            wrong.load_state_dict(state)
    assert ds.subset(range(N)).part is None


def test_warm_data_is_looked_at_now_and_then_and_cold_data_always(ds: MMapShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = False
    looked = 0

    def asked(name: str, rows: Any, sample: int, region: Any) -> bool:
        nonlocal looked
        looked += 1
        return cold

    monkeypatch.setattr(ds._reader, "cold", asked)
    loader = ShardLoader(ds, 1, num_workers=1)
    for _ in range(4):
        list(loader)
    assert 10 <= looked < 4 * N // 4
    cold, looked = True, 0
    list(loader)
    list(loader)
    assert looked > N
