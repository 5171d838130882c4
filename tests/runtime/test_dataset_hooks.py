"""Transforms: what they get, which of them get a generator, and which cannot apply."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmcompile.format.streams import _mix, stream_key
from mmcompile.runtime import hooks
from mmcompile.runtime.buffers import Pool
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.loader import ShardLoader
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 3, 5, 4), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, IMAGES, [0, 1, 2, 0, 1, 2], shards=(4, 2))
    return tmp_path


def noise(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(2, generator=generator)


class Module(torch.nn.Module):
    def forward(self, image: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(2, generator=generator)


class Callable:
    def __call__(self, image: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        assert generator is not None
        return torch.rand(2, generator=generator)


def test_transform_gets_the_image_and_target_transform_the_label(root: Path) -> None:
    ds = MMapShardDataset(root, transform=lambda x: x.float().mean(), target_transform=lambda y: f"class {y}")
    image, label = ds[4]
    assert image == torch.from_numpy(IMAGES[4]).float().mean()
    assert label == "class 1"
    images, labels = ds[[4, 5]]
    assert images.shape == (2,)
    assert labels == ("class 1", "class 2") or labels == ["class 1", "class 2"]
    with pytest.raises(ValueError, match="no samples are asked for"):
        ds[[]]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_a_transform_gets_a_tensor_of_its_own(tmp_path: Path, layout: str, engine: str) -> None:
    make_dataset(tmp_path, IMAGES, layout=layout)
    got = []
    ds = MMapShardDataset(tmp_path, engine=engine, crop=(3, 4), transform=lambda x: got.append(x) or x)
    for _ in range(2):
        ds[1].zero_()
    first, second = got
    assert first.shape == (3, 3, 4)
    assert first.data_ptr() != second.data_ptr()
    assert first.untyped_storage().nbytes() == 3 * 3 * 4
    assert (ds[1].numpy() == IMAGES[1, :, 1:4]).all()


def test_joint_transforms_get_all_fields(root: Path) -> None:
    def joint(image: torch.Tensor, label: int) -> tuple[torch.Tensor, int]:
        return image.flip(-1), label + 10

    image, label = MMapShardDataset(root, transforms=joint)[3]
    assert (image.numpy() == IMAGES[3, :, :, ::-1]).all()
    assert label == 10
    sample = MMapShardDataset(root, transforms=joint, output="dict")[3]
    assert sample.keys() == {"image", "label"}
    assert sample["label"] == 10
    images, labels = MMapShardDataset(root, transforms=joint)[:2]
    assert (images.numpy() == IMAGES[:2, :, :, ::-1]).all()
    assert labels.tolist() == [10, 11]


@pytest.mark.parametrize("hook", [noise, Module(), Callable(), functools.partial(noise)], ids=["function", "module", "object", "partial"])
def test_a_parameter_named_generator_gets_one_that_depends_on_the_row_alone(root: Path, hook: Any) -> None:
    ds = MMapShardDataset(root, transform=hook, fields=("image",))
    ds.set_epoch(0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [ds[i] for i in range(6)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(ds[i], first[i]) for i in (5, 3, 0))
    assert all(torch.equal(a, b) for a, b in zip(ds.__getitems__([2, 1]), [first[2], first[1]], strict=True))
    assert len({tuple(x.tolist()) for x in first}) == 6


def test_no_other_parameter_gets_a_generator(root: Path) -> None:
    def takes_anything(image: torch.Tensor, **others: Any) -> int:
        return len(others)

    mine = torch.Generator().manual_seed(0)
    assert MMapShardDataset(root, transform=takes_anything)[0][0] == 0
    bound = MMapShardDataset(root, transform=functools.partial(lambda x, generator: generator, generator=mine))
    assert bound[0][0] is mine
    assert MMapShardDataset(root, transform=type)[0][0] is torch.Tensor


def test_stream_keys_differ_by_each_part_and_never_change() -> None:
    keys = {stream_key(s, e, r) for s in range(8) for e in range(8) for r in range(64)}
    assert len(keys) == 8 * 8 * 64
    assert all(0 <= k < 1 << 64 for k in keys)
    assert _mix(0) == 0xE220A8397B1DCDAF  # splitmix64's published first output for seed 0
    assert stream_key(0, 0, 0) == _mix(_mix(_mix(0)))
    assert stream_key(1, 2, 3) == 0xD0734750FDE362B3
    bits = np.array([[(stream_key(1, 2, r) >> b) & 1 for b in range(64)] for r in range(2000)])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 5 standard deviations


def test_to_tensor_is_refused_with_the_remedy(root: Path) -> None:
    pytest.importorskip("torchvision")
    from torchvision import transforms
    from torchvision.transforms import v2

    for bad in (
        transforms.ToTensor(),
        transforms.PILToTensor(),
        transforms.Compose([transforms.CenterCrop(2), transforms.ToTensor()]),
        v2.Compose([v2.CenterCrop(2), v2.Compose([transforms.PILToTensor()])]),
        transforms.RandomApply([transforms.ToTensor()]),
        torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(v2.RandomApply([v2.CenterCrop(1), transforms.ToTensor()]))),
    ):
        for name in ("transform", "transforms"):
            with pytest.raises(
                TypeError, match=r"samples are tensors already; leave it out and open with dtype=torch\.float32, .*, or use v2\.ToDtype\("
            ):
                MMapShardDataset(root, **{name: bad})
    good = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3)])
    for name in ("transform", "transforms"):
        ds = MMapShardDataset(root, **{name: good})
        ds.set_epoch(0)
        image, label = ds[5]
        assert image.dtype == torch.float32
        assert label == 2


def test_to_tensor_is_found_by_name_where_torchvision_is_missing(root: Path) -> None:
    imposter = type("ToTensor", (), {"__module__": "torchvision.transforms.transforms", "__call__": lambda self, x: x})
    with pytest.raises(TypeError, match="ToTensor does not apply"):
        MMapShardDataset(root, transform=imposter())
    mine = type("ToTensor", (), {"__module__": "my.transforms", "__call__": lambda self, x: x})
    assert MMapShardDataset(root, transform=mine())[0][1] == 0


def test_normalizing_twice_is_warned_of(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images = np.zeros((2, 3, 4, 4), np.uint8)
    both = ((0.5,) * 3, (0.5,) * 3)
    make_dataset(tmp_path / "deferred", images, normalize=both)
    make_dataset(tmp_path / "baked", images.astype(np.float32), settings={"preprocess": {"normalize": {"mean": [0.5], "std": [0.5]}}})
    make_dataset(tmp_path / "plain", images)
    again = v2.Compose([v2.RandomHorizontalFlip(), v2.Normalize([0.5], [0.5])])
    for name in ("deferred", "baked"):
        with pytest.warns(UserWarning, match="normalises them once more"):
            MMapShardDataset(tmp_path / name, transform=again)
    MMapShardDataset(tmp_path / "deferred", transform=again, dtype=torch.uint8)
    MMapShardDataset(tmp_path / "plain", transform=again, dtype=torch.float32)
    for settings in ({"preprocess": []}, {"preprocess": {"normalize": None}}):
        make_dataset(tmp_path / "odd", images.astype(np.float32), settings=settings)
        MMapShardDataset(tmp_path / "odd", transform=again)


def test_to_tensor_after_something_that_makes_a_picture_of_the_sample(root: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    ds = MMapShardDataset(root, transform=transforms.Compose([transforms.ToPILImage(), transforms.ToTensor()]))
    assert torch.equal(ds[0][0], MMapShardDataset(root, dtype=torch.float32)[0][0])


def test_a_stop_iteration_in_a_transform_does_not_end_a_stock_loader_in_silence(root: Path) -> None:
    def stops(image: torch.Tensor) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="a transform raised StopIteration"):
        list(torch.utils.data.DataLoader(MMapShardDataset(root, transform=stops), 4))


KINDS = {
    "floats": lambda x: x.float() / 255,
    "not contiguous": lambda x: x.permute(1, 2, 0),
    "a number": lambda x: float(x.sum()),
    "an array": lambda x: x.numpy() + 1,
    "names": lambda x: {"x": x, "of": {"max": x.max(), "text": "t"}},
    "a pair": lambda x: (x, x.double()),
    "empty": lambda x: x[:0],
    "of two dtypes": lambda x: x.float() if x.sum() % 2 else x.double(),
    "with a history": lambda x: torch.ones(3, requires_grad=True) * x.sum(),
}


def told(value: Any) -> Any:
    """A batch as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.tolist(), value.shape
    if isinstance(value, dict):
        return {name: told(part) for name, part in value.items()}
    return type(value), [told(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", KINDS)
def test_what_a_transform_made_is_stacked_as_torch_does(root: Path, name: str) -> None:
    ds = MMapShardDataset(root, transform=KINDS[name])
    expected = torch.utils.data.default_collate([ds[i] for i in range(6)])
    assert told(list(ds[:])) == told(list(next(iter(ShardLoader(ds, 6))))) == told(list(expected))


def test_batches_of_transformed_samples_lie_in_memory_that_was_used_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[int] = []
    lend = Pool.lend

    def watched(pool: Pool, nbytes: int) -> torch.Tensor:
        found = lend(pool, nbytes)
        lent.append(found.data_ptr())
        return found

    monkeypatch.setattr(Pool, "lend", watched)
    ds = MMapShardDataset(root, transform=lambda x: x.float())
    loader = ShardLoader(ds, 2)
    places = {batch[0].data_ptr() for _ in range(9) for batch in loader}
    assert places <= set(lent)
    assert len(places) <= 4
    kept = [batch[0] for _ in range(3) for batch in loader]
    assert len({batch.data_ptr() for batch in kept}) == 9  # what is held is nobody else's
    assert torch.equal(torch.cat(kept[-3:]), torch.from_numpy(IMAGES).float())
    places = {ds[[1, 2]][0].data_ptr() for _ in range(9)}
    assert places <= set(lent)
    assert len(places) <= 4


def part(home: str, name: str) -> Any:
    """A transform that is called as one of theirs and keeps what it gets."""
    return type(name, (), {"__module__": home, "__call__": lambda self, x: x, "__reduce__": lambda self: (part, (home, name))})()


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        return functools.reduce(lambda x, f: f(x), self.transforms, x)


TIMMS = "timm.data.transforms"


def test_timms_transforms_get_pictures_unless_one_is_made_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_pil", lambda image: ("picture", image))
    crop, erase = part(TIMMS, "RandomResizedCropAndInterpolation"), part("timm.data.random_erasing", "RandomErasing")
    flip, tensor = part("torchvision.transforms.transforms", "RandomHorizontalFlip"), part("torchvision.transforms.transforms", "ToTensor")
    either, alone = part(TIMMS, "MaybeToTensor"), part("timm.data.auto_augment", "RandAugment")
    for transform in (Compose(crop, flip, either, erase), Compose(flip, part(TIMMS, "ToNumpy")), Compose(flip, alone, tensor), alone, either):
        for ds in (MMapShardDataset(root, transform=transform), pickle.loads(pickle.dumps(MMapShardDataset(root, transform=transform)))):
            picture, image = ds[4][0]
            assert picture == "picture"
            assert torch.equal(image, torch.from_numpy(IMAGES[4]))
    for transform in (crop, erase, Compose(flip, erase), Compose(part("torchvision.transforms.transforms", "ToPILImage"), alone)):
        assert isinstance(MMapShardDataset(root, transform=transform)[4][0], torch.Tensor)
    assert MMapShardDataset(root, transform=either, dtype=torch.float32)[4][0].dtype == torch.float32
    for needs in (alone, part(TIMMS, "ToNumpy")):
        with pytest.raises(
            ValueError, match=r"timm's transforms start from 8-bit pictures, samples are float32 \(3, 5, 4\); open with dtype=torch.uint8"
        ):
            MMapShardDataset(root, transform=needs, dtype=torch.float32)


def test_hooks_can_be_set_later(root: Path) -> None:
    ds, other = MMapShardDataset(root, dtype=torch.float32), MMapShardDataset(root)
    half, whole = ds.subset([0, 1, 2]), ds.subset([0, 1, 2])
    whole.transform = torch.sum
    whole.target_transform = str
    assert whole.transform is torch.sum
    assert whole[1][1] == "1"
    assert [image.item() for image in DataLoader(whole, 2).dataset.__getitems__([1])[0][:1]] == [ds[1][0].sum().item()]
    assert pickle.loads(pickle.dumps(whole))[2][1] == "2"
    with pytest.raises(ValueError, match="takes the place of transform"):
        whole.transforms = lambda *values: values
    assert whole[1][1] == "1"
    for changed in (ds, half):  # neither what it was made of nor another part
        assert changed.transform is None
        assert changed[1][0].shape == (3, 5, 4)
    whole.transform = whole.target_transform = None
    assert torch.equal(whole[1][0], ds[1][0])
    loader = ShardLoader(whole, 3)  # a loop takes up in its next epoch what was set
    assert next(iter(loader))[0].shape == (3, 3, 5, 4)
    whole.transform = torch.sum
    assert torch.equal(next(iter(loader))[0], ds[:3][0].sum((1, 2, 3)))
    other.transforms = lambda image, label: {"x": image + 0, "y": label}
    assert next(iter(DataLoader(other, 3)))["y"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="transform needs an image"):
        MMapShardDataset(root, fields=["label"]).transform = torch.sum


def test_a_transform_that_is_set_later_is_watched_as_one_given_at_once(tmp_path: Path, root: Path) -> None:
    ds = MMapShardDataset(root)
    ds.transform = lambda image: torch.rand(2)
    with pytest.warns(UserWarning, match="every epoch would see the same augmentations"):
        ds[0]
    make_dataset(tmp_path / "normalized", IMAGES, normalize=((0.5,) * 3, (0.5,) * 3))
    with pytest.warns(UserWarning, match="normalises them once more") as seen:
        MMapShardDataset(tmp_path / "normalized").transform = part("torchvision.transforms.transforms", "Normalize")
    assert seen[0].filename == __file__
