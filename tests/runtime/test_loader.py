from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, WeightedRandomSampler, default_collate

from mmcompile import Augment, MMapShardDataset, ShardLoader, ShardSampler
from mmcompile.runtime.augment import apply
from mmcompile.runtime.rowrandom import RowRandom
from tests.support import make_dataset

N = 23
MEAN_STD = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets of 23 images of 3 x 6 x 5 and labels, in shards of 10, 7 and 6."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (N, 3, 6, 5), np.uint8), rng.integers(0, 4, N)
    floats = ((images / 255 - 0.5) / 0.2).astype(np.float32)
    base = tmp_path_factory.mktemp("loader")
    kinds: dict[str, Any] = {
        "plain": {"splits": {"train": 10, "val": 13}},
        "hwc": {"layout": "hwc"},
        "normal": {"normalize": MEAN_STD},
        "normal-hwc": {"normalize": MEAN_STD, "layout": "hwc"},
        "float": {},
    }
    for name, settings in kinds.items():
        make_dataset(base / name, floats if name == "float" else images, labels, shards=(10, 7, 6), classes=("a", "b", "c", "d"), **settings)
    make_dataset(base / "none", images[:0], labels[:0], classes=("a", "b", "c", "d"))
    make_dataset(base / "one", images[:1], labels[:1], classes=("a", "b", "c", "d"))
    make_dataset(base / "bare", images, shards=(10, 7, 6))
    return {path.name: path for path in base.iterdir()}


def same(found: Any, wanted: Any) -> None:
    """The same types, dtypes and values, all the way down."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


class Plain(torch.utils.data.Dataset[Any]):
    """The dataset without its short cuts: one sample at a time."""

    def __init__(self, dataset: MMapShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        return self.dataset[key]


def stock(dataset: MMapShardDataset, **settings: Any) -> list[Any]:
    return list(DataLoader(Plain(dataset), **settings))


CASES = [
    ("plain", {"split": "all"}),
    ("plain", {"split": "val", "copy": True}),
    ("plain", {"split": "all", "fields": ("label",)}),
    ("plain", {"split": "all", "fields": ("image",)}),
    ("plain", {"split": "all", "fields": ("label", "image"), "output": "dict"}),
    ("plain", {"split": "all", "fields": ("image",), "output": "dict"}),
    ("plain", {"split": "all", "engine": "pread", "crop": (4, 3)}),
    ("plain", {"split": "all", "dtype": torch.float16}),
    ("hwc", {"crop": 4}),
    ("hwc", {"dtype": torch.float32, "output": "dict"}),
    ("hwc", {"dtype": torch.bfloat16, "engine": "pread"}),
    ("normal", {}),
    ("normal", {"dtype": torch.uint8}),
    ("normal-hwc", {"dtype": torch.bfloat16, "crop": (3, 5)}),
    ("normal-hwc", {"engine": "pread"}),
    ("float", {"crop": 2, "dtype": torch.float16}),
    ("none", {}),
    ("none", {"output": "dict", "dtype": torch.float32}),
    ("one", {"dtype": torch.float32}),
    ("bare", {}),
]


@pytest.mark.parametrize(("root", "settings"), CASES)
def test_batches_are_those_of_the_stock_loader_over_samples(roots: dict[str, Path], root: str, settings: dict[str, Any]) -> None:
    ds = MMapShardDataset(roots[root], **settings)
    for size, drop, workers in itertools.product((1, 5, 100), (False, True), (0, 1, 3)):
        loader = ShardLoader(ds, size, num_workers=workers, drop_last=drop, prefetch_factor=1 + size % 3)
        wanted = stock(ds, batch_size=size, drop_last=drop)
        assert len(loader) == len(wanted)
        found = list(loader)
        same(found, wanted)
        for one, other in zip(found, wanted, strict=True):
            for a, b in zip(tensors(one), tensors(other), strict=True):
                assert (a.shape, a.is_contiguous(memory_format=torch.channels_last)) == (b.shape, a.ndim == 4 and "hwc" in root and a.shape[1] > 1)


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


@pytest.mark.parametrize("shuffle", [True, "block"])
@pytest.mark.parametrize("part", ["all", "subset", "Subset", "split"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_batches_are_those_of_the_sampler(roots: dict[str, Path], shuffle: Any, part: str, workers: int) -> None:
    whole = MMapShardDataset(roots["hwc"], dtype=torch.float32)
    rows = [21, 3, 3, 9, 14, 0] if shuffle is True else [0, 3, 3, 9, 14, 21]
    ds: Any = {
        "all": whole,
        "subset": whole.subset(rows),
        "Subset": Subset(Subset(whole, range(N)), rows),
        "split": whole.random_split([0.5, 0.5])[1],
    }[part]
    ours = whole.subset(rows) if part == "Subset" else ds
    for size, drop in itertools.product((1, 4, 50), (False, True)):
        settings = {"shuffle": shuffle, "seed": 7, "drop_last": drop, "block_shards": 2}
        loader = ShardLoader(ds, size, num_workers=workers, **settings)
        sampler = ShardSampler(ours, size, **settings)
        for _ in range(3):
            same(list(loader), stock(ours, batch_size=size, drop_last=drop, sampler=sampler))
            assert len(loader) == (len(ours) // size if drop else -(-len(ours) // size))


def test_positional_arguments_are_those_of_the_stock_loader(roots: dict[str, Path]) -> None:
    ds = MMapShardDataset(roots["one"])
    loader = ShardLoader(ds, 4, False, None, None, 2, collate_fn=None, generator=None, pin_memory_device="", in_order=True, persistent_workers=True)
    assert (loader.batch_size, loader.num_workers, loader.dataset) == (4, 2, ds)
    same(list(loader), stock(ds, batch_size=4))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"collate_fn": list}, TypeError, "batch_transform"),
        ({"worker_init_fn": print}, TypeError, "seed="),
        ({"multiprocessing_context": "fork"}, TypeError, "ShardSampler"),
        ({"generator": torch.Generator()}, TypeError, "seed="),
        ({"pin_memory_device": "cuda"}, TypeError, "device="),
        ({"in_order": False}, TypeError, "in order"),
        ({"bach_size": 3}, TypeError, "no argument 'bach_size'"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": None}, ValueError, "batch_size must be an integer"),
        ({"batch_size": True}, ValueError, "batch_size"),
        ({"num_workers": -1}, ValueError, "num_workers must be an integer of at least 0"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"shuffle": "blocks"}, ValueError, "shuffle must be"),
        ({"uneven": "pad"}, ValueError, "uneven must be"),
        ({"rank": 1}, ValueError, "together"),
        ({"seed": -1}, ValueError, "seed"),
        ({"augment": torch.nn.Identity()}, TypeError, "batch_transform="),
        ({"batch_transform": 3}, TypeError, "batch_transform"),
        ({"batch_transform": lambda batch: batch}, TypeError, r"function of \(batch, rng\)"),
        ({"weights": [1.0]}, ValueError, "for each of the 23 samples"),
        ({"sampler": [1], "shuffle": True}, ValueError, "a sampler decides"),
        ({"sampler": [1], "weights": "balanced"}, ValueError, "a sampler decides"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, ValueError, "a sampler decides"),
        ({"batch_sampler": [[1]], "uneven": "mask"}, ValueError, "a sampler decides"),
        ({"batch_sampler": [[1]], "batch_size": 2}, ValueError, "mutually exclusive"),
        ({"batch_sampler": [[1]], "sampler": [1]}, ValueError, "mutually exclusive"),
        ({"batch_sampler": [[1]], "shuffle": True}, ValueError, "mutually exclusive"),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError, "mutually exclusive"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(roots: dict[str, Path], settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardLoader(MMapShardDataset(roots["normal"]), **settings)


def test_other_datasets_and_what_a_sampler_contradicts_are_refused(roots: dict[str, Path]) -> None:
    ds = MMapShardDataset(roots["normal"])
    with pytest.raises(TypeError, match="torch's DataLoader reads any other"):
        ShardLoader(Plain(ds))  # type: ignore[arg-type]
    for settings, name in (
        ({"batch_size": 3}, "batch_size"),
        ({"batch_size": 4, "drop_last": True}, "drop_last"),
        ({"batch_size": 4, "seed": 2}, "seed"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is .* of the ShardSampler"):
            ShardLoader(ds, sampler=ShardSampler(ds, 4, seed=1), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="augment needs an image"):
        ShardLoader(MMapShardDataset(roots["normal"], fields=("label",)), augment=Augment(hflip=0.5))
    with pytest.raises(ValueError, match="larger than the images"):
        ShardLoader(ds, augment=Augment(crop=7))


class NoLength:
    """A sampler that does not say how much it gives."""

    def __iter__(self) -> Iterator[int]:
        return iter([4, 2, 2, -1, 0])


@pytest.mark.parametrize("workers", [0, 2])
def test_any_sampler_of_torch_decides(roots: dict[str, Path], workers: int) -> None:
    ds = MMapShardDataset(roots["normal"])

    def samplers() -> list[Any]:
        chance = torch.Generator().manual_seed(3)
        share = torch.utils.data.DistributedSampler(ds, num_replicas=2, rank=1, seed=5)
        share.set_epoch(4)
        weighted = WeightedRandomSampler([1.0] * 3 + [0.0] * 20, 17, generator=chance)
        return [[5, 1, 1], torch.arange(9), np.array([3, -1]), RandomSampler(ds, generator=chance), weighted, share, NoLength(), []]

    for drop, (ours, theirs) in itertools.product((False, True), zip(samplers(), samplers(), strict=True)):
        loader = ShardLoader(ds, 4, sampler=ours, num_workers=workers, drop_last=drop)
        wanted = stock(ds, batch_size=4, sampler=theirs, drop_last=drop)
        if isinstance(ours, NoLength):
            with pytest.raises(TypeError, match="len"):
                len(loader)
        else:
            assert len(loader) == len(wanted)
        same(list(loader), wanted)
    batches: list[Any] = [[[3], [1, 2], [3, 3, -2]], list(torch.arange(10).split(3)), BatchSampler(range(9, 0, -1), 2, True)]
    for given in batches:
        loader = ShardLoader(ds, batch_sampler=given, num_workers=workers)
        assert len(loader) == len(given)
        same(list(loader), [default_collate([ds[int(i)] for i in keys]) for keys in given])


@pytest.mark.parametrize("how", ["sampler", "batch_sampler"])
def test_a_shard_sampler_keeps_its_epochs_and_seeds(roots: dict[str, Path], how: str) -> None:
    ds = MMapShardDataset(roots["normal"], transform=lambda image, generator: torch.rand(3, generator=generator))
    ours, theirs = (ShardSampler(ds, 4, shuffle=True, seed=9, uneven="mask", rank=1, world_size=2) for _ in range(2))
    loader = ShardLoader(ds, 4, sampler=ours) if how == "sampler" else ShardLoader(ds, batch_sampler=BatchSampler(ours, 4, False))
    for _ in range(3):
        same(list(loader), stock(ds, batch_size=4, sampler=theirs))


def test_a_batch_of_several_epochs_is_refused(roots: dict[str, Path]) -> None:
    ds = MMapShardDataset(roots["normal"])
    both = list(itertools.chain(ShardSampler(ds), ShardSampler(ds, seed=1)))
    with pytest.raises(
        ValueError, match=r"several seeds or epochs \(seed 0 epoch 0, seed 1 epoch 0\), expected those of one: give it one epoch at a time"
    ):
        list(ShardLoader(ds, 10, sampler=both))
    assert len(list(ShardLoader(ds, N, sampler=both))) == 2


AUGMENTS = [Augment(crop=3, padding=2, hflip=0.5), Augment(crop=(6, 4)), Augment(hflip=0.5), Augment(resized_crop=(4, 3))]


def order(ds: MMapShardDataset, epoch: int, **settings: Any) -> list[int]:
    sampler = ShardSampler(ds, shuffle=True, seed=5, **settings)
    sampler.set_epoch(epoch)
    return list(map(int, sampler))


@pytest.mark.parametrize("root", ["normal", "hwc"])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_augmentation_is_keyed_by_row_and_equals_the_drawn_cut(roots: dict[str, Path], root: str, augment: Augment) -> None:
    ds, raw = MMapShardDataset(roots[root]), MMapShardDataset(roots[root], dtype=torch.uint8)
    column, rows = ds._columns[0], np.arange(N)
    cuts = [augment.draw(5, epoch, rows, 6, 5) for epoch in range(2)]
    epochs = [column.batch(rows, cut=cut) for cut in cuts]
    if augment.resized_crop is None:  # a scaled box may be rounded otherwise on a device
        same([column.numbers(apply(raw[:][0], cut)) for cut in cuts], epochs)
    assert not torch.equal(*epochs)
    for size, workers, world in ((1, 0, 1), (7, 3, 1), (4, 1, 2), (50, 2, 3)):
        for rank in range(world):
            ranks = {"rank": rank, "world_size": world}
            loader = ShardLoader(ds, size, True, num_workers=workers, seed=5, augment=augment, **ranks)  # type: ignore[arg-type]
            for epoch in range(2):
                assert torch.equal(torch.cat([images for images, _ in loader]), epochs[epoch][order(ds, epoch, batch_size=size, **ranks)])


def test_a_batch_transform_draws_by_row(roots: dict[str, Path]) -> None:
    ds = MMapShardDataset(roots["plain"], "val")

    def noise(batch: Any, rng: RowRandom) -> Any:
        images, labels = batch
        return images + rng.rand(*images.shape[1:]), labels, rng.randint(0, 1 << 30)

    drawn: list[dict[int, int]] = []
    for size, workers in ((1, 0), (4, 2), (13, 1)):
        loader = ShardLoader(ds, size, shuffle=True, num_workers=workers, seed=5, batch_transform=noise)
        for epoch in range(2):
            images, labels, numbers = (torch.cat(parts) for parts in zip(*loader, strict=True))
            samples = order(ds, epoch)
            rng = RowRandom(5, epoch, np.array(samples) + 10)
            same([images, labels, numbers], list(noise(ds[samples], rng)))
            drawn.append(dict(zip(samples, numbers.tolist(), strict=True)))
    assert drawn[0] == drawn[2] == drawn[4]
    assert drawn[1] == drawn[3] == drawn[5]
    assert not set(drawn[0].values()) & set(drawn[1].values())


@pytest.mark.parametrize("make", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy])
def test_a_copy_of_a_loader_does_what_it_would_do(roots: dict[str, Path], make: Any) -> None:
    loader = ShardLoader(MMapShardDataset(roots["normal"]), 4, shuffle=True, augment=AUGMENTS[0], seed=3, num_workers=2)
    running = iter(loader)
    next(running)
    loader.dataset[0]  # opens the shard
    other = make(loader)
    assert other.state_dict() == loader.state_dict()
    same([list(other), list(other)], [list(loader), list(loader)])
    assert len(pickle.dumps(loader)) < 4000


def test_timings_say_what_was_slow(roots: dict[str, Path]) -> None:
    loader = ShardLoader(MMapShardDataset(roots["plain"], "all", dtype=torch.float32), 4, num_workers=1)
    assert loader.timings()["batches"] == 0
    for images, _ in loader:
        torch.nn.functional.conv2d(images, torch.ones(8, 3, 3, 3))
        threading.Event().wait(0.2)  # far longer than threads take to start, on a busy machine too
    found = loader.timings()
    assert found["slow"] == "consumer"
    assert found["bytes"] == N * (3 * 6 * 5 * 4 + 8)
    assert found["batches"] == 6
    assert 0 < found["waited_s"] < found["elapsed_s"]
    assert 0 < found["converted_s"] < found["elapsed_s"]
    assert found["moved_s"] == 0
    loader = ShardLoader(MMapShardDataset(roots["plain"], "all", dtype=torch.float32), N, num_workers=0)
    list(loader)
    found = loader.timings()
    assert found["slow"] in ("convert", "gather", "disk")
    assert found["gathered_s"] + found["converted_s"] <= found["waited_s"] <= found["elapsed_s"]
    empty = ShardLoader(MMapShardDataset(roots["plain"], "all").subset([]), 4)
    list(empty)
    assert empty.timings()["elapsed_s"] >= 0


def test_ranges_are_labelled_for_the_profiler(roots: dict[str, Path]) -> None:
    ds = MMapShardDataset(roots["plain"], "all", transform=torch.Tensor.float)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(ShardLoader(ds, 20, num_workers=0, batch_transform=lambda batch, rng: batch))
        list(ShardLoader(ds, 20, num_workers=2))
    counts = _ranges(profile)
    assert counts["mmcompile.transform"] == 4
    assert counts["mmcompile.batch_transform"] == 2
    assert counts["mmcompile.gather"] >= 2
    assert counts["mmcompile.wait"] == 6


def test_ranges_of_the_loaders_threads_are_seen_by_a_profiler_of_all_threads(roots: dict[str, Path]) -> None:
    try:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch profiles the threads that it was started in alone")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everywhere) as profile:
        batches = len(list(ShardLoader(MMapShardDataset(roots["plain"], "all"), 20, num_workers=2)))
    assert _ranges(profile) == {"mmcompile.gather": batches, "mmcompile.wait": batches + 1}


def _ranges(profile: Any) -> dict[str, int]:
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("mmcompile.")}
