"""Seeds of per-sample transforms: keyed by (seed, epoch, row) alone, for every generator there is, and the user's own state left alone."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmcompile.runtime import hooks
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.seeding import SampleIndex, mt19937_words, stream_key
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (24, 3, 5, 4), dtype=np.uint8)


def three(image: torch.Tensor) -> torch.Tensor:
    """A draw of each global generator, normals too: those cache a second number."""
    return torch.tensor(
        [torch.rand(()).item(), float(np.random.rand()), random.random(), np.random.randn(), random.gauss(0, 1), torch.randn(()).item()]
    )


def named(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, generator=generator)


def some(image: torch.Tensor) -> torch.Tensor:
    """Draws for bright images only."""
    return torch.rand(()) if image.float().mean() > 128 else torch.zeros(())


def global_state() -> list[Any]:
    name, words, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), name, np.asarray(words).tolist(), rest, random.getstate()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, IMAGES, np.arange(24) % 3, shards=(10, 14))
    return tmp_path


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Half-used global generators, put back after the test."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    np.random.randn()
    random.gauss(0, 1)
    torch.randn(3)
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def images(loader: Any) -> torch.Tensor:
    return torch.cat([batch[0] for batch in loader])


@pytest.mark.parametrize("hook", [three, named])
def test_a_sample_depends_on_seed_epoch_and_row_alone(root: Path, hook: Any) -> None:
    ds = MMapShardDataset(root, transform=hook)
    keys = [SampleIndex(row, 7, 3) for row in range(24)]
    before = global_state()
    alone = torch.stack([ds[key][0] for key in keys])
    assert global_state() == before
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = global_state()
    assert torch.equal(ds[keys][0], alone)
    assert torch.equal(torch.stack([x for x, _ in ds.__getitems__(keys[::-1])]), alone.flip(0))
    for workers in (0, 1, 2):
        loader = DataLoader(ds, batch_sampler=[keys[:5], keys[5:6], keys[6:]], num_workers=workers)
        assert torch.equal(images(loader), alone)
    assert global_state()[1:] == before[1:]  # torch's own: the loader drew a base seed
    assert len({tuple(x.tolist()) for x in alone}) == 24
    for other in ([SampleIndex(row, 8, 3) for row in range(24)], [SampleIndex(row, 7, 4) for row in range(24)]):
        assert not (ds[other][0] == alone).any()
    mixed = [keys[0], SampleIndex(1, 8, 9), SampleIndex(2, 7, 3)]
    assert torch.equal(ds[mixed][0], torch.stack([ds[key][0] for key in mixed]))


def test_a_batch_of_the_loader_is_keyed_like_its_samples(root: Path) -> None:
    ds = MMapShardDataset(root, transform=three)
    rows = np.array([4, 0, 23])
    parts = [torch.from_numpy(IMAGES[rows]), torch.from_numpy(rows % 3)]
    before = global_state()
    made = ds._samples(ds._where(rows), 5, 2, parts)
    assert global_state() == before
    for row, (image, label) in zip(rows.tolist(), made, strict=True):
        assert torch.equal(image, ds[SampleIndex(row, 5, 2)][0])
        assert type(label) is int
        assert label == row % 3


def test_plain_indices_use_the_epoch_of_the_dataset(root: Path) -> None:
    ds = MMapShardDataset(root, transform=named)
    assert ds.epoch == 0
    seen = []
    for epoch in range(3):
        ds.set_epoch(epoch)
        assert ds.epoch == epoch
        assert torch.equal(ds[5][0], ds[SampleIndex(5, 0, epoch)][0])
        assert torch.equal(ds[[5]][0][0], ds[5][0])
        assert torch.equal(ds[[SampleIndex(5, 0, 1), 5]][0], torch.stack([ds[SampleIndex(5, 0, 1)][0], ds[5][0]]))
        seen.append(tuple(ds[5][0].tolist()))
        assert torch.equal(images(DataLoader(ds, batch_size=7)), images(DataLoader(ds, batch_size=24, num_workers=1)))
    assert len(set(seen)) == 3
    for wrong in ("1", -1, True, 1 << 64):
        with pytest.raises(ValueError, match="epoch must be"):
            ds.set_epoch(wrong)  # type: ignore[arg-type]


def test_the_state_of_the_user_comes_back_when_a_hook_raises(root: Path) -> None:
    def fails(image: torch.Tensor) -> None:
        three(image)
        raise RuntimeError("mine")

    ds = MMapShardDataset(root, transform=fails)
    before = global_state()
    for read in (
        lambda: ds[0],
        lambda: ds[[0, 1]],
        lambda: ds.__getitems__([0, 1]),
        lambda: ds._samples(np.array([0]), 0, 0, ds._gather(np.array([0]))),
    ):
        with pytest.raises(RuntimeError, match="mine"):
            read()
        assert global_state() == before


def test_the_generators_of_one_sample_share_no_numbers(root: Path) -> None:
    def all_of_them(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        mine, ours = torch.rand(50, generator=generator, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
        return torch.cat([mine, ours, torch.from_numpy(np.random.rand(50)), torch.tensor([random.random() for _ in range(50)], dtype=torch.float64)])

    ds = MMapShardDataset(root, transform=all_of_them, fields=("image",))
    ds.set_epoch(0)
    assert len(set(torch.cat([ds[i] for i in range(24)]).tolist())) == 24 * 200


def test_transform_and_target_transform_go_on_with_one_stream(root: Path) -> None:
    ds = MMapShardDataset(root, transform=three, target_transform=lambda label: random.random())
    ds.set_epoch(0)
    random.seed(stream_key(0, 0, 4))
    random.random(), random.gauss(0, 1)
    assert ds[4][1] == random.random()


def test_the_key_is_of_the_row_in_the_folder(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, np.arange(24) % 3, splits={"train": 20, "val": 4})
    val = MMapShardDataset(tmp_path, "val", transform=lambda image, generator: generator.initial_seed())
    assert val[SampleIndex(1, 7, 3)][0] == stream_key(7, 3, 21)
    assert val.subset([3, 1])[SampleIndex(1, 7, 3)][0] == stream_key(7, 3, 21)
    key = stream_key(7, 3, 21)
    ours, numpys, pythons = torch.Generator(), np.random.RandomState([key & 0xFFFFFFFF, key >> 32, 1]), random.Random(key)
    hooks._set(ours, 0, mt19937_words(key ^ hooks._GLOBAL))
    drawn = MMapShardDataset(tmp_path, "val", transform=three)[SampleIndex(1, 7, 3)][0]
    wanted = [torch.rand((), generator=ours).item(), numpys.rand(), pythons.random(), numpys.randn(), pythons.gauss(0, 1)]
    assert drawn[:5].tolist() == torch.tensor(wanted).tolist()


def test_a_generator_takes_all_64_bits_of_a_key() -> None:
    states = set()
    for key in (1, 1 << 32 | 1, 1 << 63 | 1, stream_key(0, 0, 0)):
        generator = hooks._generator(key)
        assert generator.initial_seed() == key
        words = generator.get_state().numpy()[hooks._WORDS].view(np.uint64)
        assert np.array_equal(words, mt19937_words(key))
        numpys = np.random.RandomState()
        numpys.set_state(("MT19937", mt19937_words(key), 624))
        drawn = torch.randint(0, 1 << 32, (700,), generator=generator, dtype=torch.int64)
        twice = numpys.randint(0, 1 << 32, 1400, dtype=np.uint32)  # torch takes two for a range this large, and keeps the second
        assert np.array_equal(drawn.numpy(), twice[1::2].astype(np.int64))
        states.add(tuple(drawn.tolist()))
    assert len(states) == 4


def test_another_layout_of_torchs_state_falls_back_to_its_own_seeding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_WORDS", slice(32, 32 + 624 * 8))
    hooks._template.cache_clear()
    try:
        assert hooks._template() is None
        assert torch.equal(named(torch.empty(0), hooks._generator(9)), torch.rand(4, generator=torch.Generator().manual_seed(9)))
        ds = MMapShardDataset(root, transform=three)
        keys = [SampleIndex(row, 7, 3) for row in range(24)]
        assert torch.equal(torch.stack([ds[key][0] for key in keys]), ds[keys][0])
    finally:
        hooks._template.cache_clear()


# -- the trap: every epoch alike


@pytest.mark.parametrize("hook", [three, named, some])
def test_random_hooks_without_an_epoch_warn_once(root: Path, hook: Any) -> None:
    ds = MMapShardDataset(root, transform=hook)
    with pytest.warns(UserWarning, match=r"every epoch would see the same.*sampler=ShardSampler.*ShardLoader.*set_epoch") as caught:
        images(DataLoader(ds, batch_size=5))
    assert len(caught) == 1
    images(DataLoader(ds, batch_size=5))


def test_nothing_is_warned_of_where_an_epoch_is_known_or_nothing_is_drawn(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = [SampleIndex(row, 7, 3) for row in range(24)]
        images(DataLoader(MMapShardDataset(root, transform=three), batch_sampler=[keys[:20], keys[20:]]))
        known = MMapShardDataset(root, transform=three)
        known.set_epoch(0)
        images(DataLoader(known, batch_size=5))
        images(DataLoader(MMapShardDataset(root, transform=lambda image: image.float()), batch_size=5))
        assert not MMapShardDataset(root, transform=three)._hooks.run([1], [[torch.zeros(1), 0]], 0, 1)[1]


def test_only_the_first_samples_are_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(hooks._Globals, "drawn", lambda self: looks.append(1))
    ds = MMapShardDataset(root, transform=lambda image: image)
    for _ in range(3):
        images(DataLoader(ds, batch_size=5))
    assert len(looks) == 16


def test_of_several_workers_one_warns(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hooks.warnings, "warn", lambda message, *_, **__: os.write(2, message.encode()))  # type: ignore[attr-defined]
    images(DataLoader(MMapShardDataset(root, transform=three), batch_size=3, num_workers=2, multiprocessing_context="fork"))
    assert capfd.readouterr().err.count("every epoch would see the same") == 1


# -- arguments


@pytest.mark.parametrize("name", ["transform", "target_transform", "transforms"])
def test_what_cannot_be_called_is_refused_by_name(root: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a function or another callable, not an object of type int$"):
        MMapShardDataset(root, **{name: 3})


# -- torchvision


def test_random_transforms_of_torchvision_give_the_same_sample_anywhere(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    large = np.random.default_rng(1).integers(0, 256, (20, 3, 16, 16), dtype=np.uint8)
    make_dataset(tmp_path, large, np.arange(20), shards=(20,))
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(12), v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RandomErasing()])
    ds = MMapShardDataset(tmp_path, transform=pipeline)
    keys = [SampleIndex(row, 1, 2) for row in range(20)]
    before = global_state()
    alone = torch.stack([ds[key][0] for key in keys])
    assert torch.equal(ds[keys][0], alone)
    assert global_state() == before
    for workers in (0, 1, 2):
        assert torch.equal(images(DataLoader(ds, batch_sampler=[keys[:7], keys[7:]], num_workers=workers)), alone)
    assert not torch.equal(alone, ds[[SampleIndex(row, 1, 3) for row in range(20)]][0])
    assert global_state()[1:] == before[1:]
    joint = MMapShardDataset(tmp_path, transforms=pipeline)
    image, label = joint[SampleIndex(4, 1, 2)]
    assert image.shape == (3, 12, 12)
    assert label == 4
