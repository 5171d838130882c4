"""The stock DataLoader over the dataset: one copy a batch, and in every use of torch's what the per-sample path gives."""

from __future__ import annotations

import copy
import functools
import gc
import io
import operator
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, StackDataset, Subset, default_collate, random_split
from torch.utils.data._utils import collate

from mmcompile.errors import CorruptShardError
from mmcompile.runtime import gathered
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.gathered import Gathered
from mmcompile.runtime.seeding import SampleIndex
from tests.support import make_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (23, 3, 5, 4), dtype=np.uint8)
LABELS = np.arange(23) % 4 + 50
ORDER = [22, 0, 7, 7, 3, 15, 1, 2, 9, 11, 4]
#: Everything a sample can be.
KINDS: dict[str, dict[str, Any]] = {
    "tuple": {},
    "dict": {"output": "dict"},
    "image": {"fields": ("image",)},
    "label": {"fields": ("label",)},
    "turned": {"fields": ("label", "image")},
    "one in a dict": {"fields": ("image",), "output": "dict"},
    "numbers": {"dtype": torch.float32, "crop": 3},
}


class PerSample(Dataset[Any]):
    """The same samples without `__getitems__`: what DataLoader makes of them is the oracle."""

    def __init__(self, inner: MMapShardDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> Any:
        return self.inner[i]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path, IMAGES, LABELS, shards=(9, 9, 5))
    return tmp_path


def equal(a: Any, b: Any) -> bool:
    """Same containers, same names, same dtypes, same values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(torch.equal(a, b)) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else bool(a == b)


def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts what torch itself stacks from here on."""
    stacks: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args, **kw: stacks.append(1) or stack(*args, **kw))
    return stacks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_a_batch_equals_the_per_sample_path_and_is_copied_once(tmp_path: Path, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path, IMAGES, LABELS, shards=(9, 9, 5), layout=layout)
    ds = MMapShardDataset(tmp_path, **KINDS[kind])
    expected = list(DataLoader(PerSample(ds), batch_size=4, sampler=ORDER))
    stacks = copied(monkeypatch)
    got = list(DataLoader(ds, batch_size=4, sampler=ORDER))
    assert not stacks
    assert equal(got, expected)
    first = got[0] if isinstance(got[0], torch.Tensor) else next(x for x in (got[0].values() if isinstance(got[0], dict) else got[0]))
    if first.ndim == 4:
        assert first.is_contiguous(memory_format=torch.channels_last if layout == "hwc" else torch.contiguous_format)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_give_the_same_in_shared_memory(root: Path, context: str, workers: int) -> None:
    ds = MMapShardDataset(root)
    loader = DataLoader(ds, batch_size=4, sampler=ORDER, num_workers=workers, multiprocessing_context=context)
    got = list(loader)
    assert equal(got, list(DataLoader(PerSample(ds), batch_size=4, sampler=ORDER)))
    assert all(part.is_shared() for batch in got for part in batch)


def told(batch: Any) -> Any:
    """In the worker: is the batch in shared memory before anybody sends it?  (Sending moves it there with a second copy.)"""
    out = default_collate(batch)
    return [*out, torch.tensor([part.is_shared() for part in out])]


def test_a_worker_gathers_straight_into_shared_memory(root: Path) -> None:
    ds = MMapShardDataset(root)
    assert all(batch[2].all() for batch in DataLoader(ds, batch_size=5, num_workers=1, collate_fn=told))
    assert not any(batch[2].any() for batch in DataLoader(ds, batch_size=5, collate_fn=told))


def test_without_torchs_shared_memory_a_batch_is_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathered.shared_memory(10).is_shared()
    assert gathered.shared_memory(0).shape == (0,)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", None)
    memory = gathered.shared_memory(10)
    assert not memory.is_shared()
    assert memory.shape == (10,)


# -- how torch's own datasets and loaders ask


def test_subset_and_random_split_of_torch_are_on_the_gather_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    parts = [Subset(ds, [5, 22, 5]), Subset(Subset(ds, range(20)), [3, 1]), *random_split(ds, [0.5, 0.5], torch.Generator().manual_seed(0))]
    expected = [
        list(DataLoader(Subset(PerSample(ds), [part.indices[i] for i in range(len(part))]), batch_size=3)) for part in parts if part.dataset is ds
    ]
    stacks = copied(monkeypatch)
    got = [list(DataLoader(part, batch_size=3)) for part in parts]
    assert not stacks
    assert equal([batches for part, batches in zip(parts, got, strict=True) if part.dataset is ds], expected)
    assert equal(got[1][0], [torch.from_numpy(IMAGES[[3, 1]]), torch.from_numpy(LABELS[[3, 1]])])


@pytest.mark.parametrize("kind", KINDS)
def test_stack_dataset_is_on_the_gather_path(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ds, other = MMapShardDataset(root, **KINDS[kind]), MMapShardDataset(root, crop=2)
    numbers = [float(i) for i in range(23)]
    for stacked, plain in (
        (StackDataset(ds, other, numbers), StackDataset(PerSample(ds), PerSample(other), numbers)),
        (StackDataset(a=ds, b=other), StackDataset(a=PerSample(ds), b=PerSample(other))),
    ):
        expected = list(DataLoader(plain, batch_size=5, sampler=ORDER))
        with monkeypatch.context() as patch:
            stacks = copied(patch)
            got = list(DataLoader(stacked, batch_size=5, sampler=ORDER))
            assert not stacks
        assert equal(got, expected)


def test_concatenations_and_mixtures_are_collated_sample_by_sample(root: Path) -> None:
    ds = MMapShardDataset(root)
    assert equal(list(DataLoader(ConcatDataset([ds, ds]), batch_size=10)), list(DataLoader(ConcatDataset([PerSample(ds)] * 2), batch_size=10)))
    mine, others = ds.__getitems__([3, 4, 5]), ds.__getitems__([3, 6])
    for mixed in ([*mine, *others], [mine[0], *others], mine[:2], list(mine)[::-1], [others[1], *mine], [mine[0], mine[2], mine[1]], [mine[0]] * 3):
        assert equal(default_collate(mixed), default_collate([(x.clone(), y) for x, y in mixed]))


def test_batch_samplers_and_samplers_of_lists(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    stacks = copied(monkeypatch)
    groups = [[3, 1], [22], list(range(9))]
    expected = [[torch.from_numpy(IMAGES[g]), torch.from_numpy(LABELS[g])] for g in groups]
    assert equal(list(DataLoader(ds, batch_sampler=groups)), expected)
    assert equal(list(DataLoader(ds, batch_size=None, sampler=groups)), expected)
    assert equal(list(DataLoader(ds, batch_size=None, sampler=groups, num_workers=1)), expected)
    whole = list(DataLoader(ds, batch_size=None, sampler=BatchSampler(SequentialSampler(ds), 23, False)))
    assert equal(whole, [[torch.from_numpy(IMAGES), torch.from_numpy(LABELS)]])
    assert not stacks
    assert type(ds[[1, 2]]) is tuple


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory")
def test_pinned(root: Path) -> None:
    ds = MMapShardDataset(root)
    for workers in (0, 1):
        for batch in DataLoader(ds, batch_size=5, pin_memory=True, num_workers=workers):
            assert all(part.is_pinned() for part in batch)


def test_pin_memory_takes_the_samples_apart_as_it_does_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    for kind in ("tuple", "dict", "label"):
        samples = MMapShardDataset(root, **KINDS[kind]).__getitems__([3, 4])
        assert equal([as_plain(x) for x in pin_memory(samples)], [as_plain(x) for x in samples])


def as_plain(sample: Any) -> Any:
    return tuple(sample) if isinstance(sample, tuple) else dict(sample) if isinstance(sample, dict) else int(sample)


def as_they_come(samples: Any) -> Any:
    return samples


def doubled(samples: Sequence[Any]) -> Any:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images) * 2, torch.tensor(labels)


def kept(samples: Sequence[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def sorted_down(samples: Sequence[Any]) -> Any:
    return default_collate(sorted(samples, key=lambda sample: -sample[1]))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", [doubled, kept, sorted_down, as_they_come])
def test_custom_collate_functions_get_ordinary_samples(root: Path, function: Callable[..., Any], workers: int) -> None:
    ds = MMapShardDataset(root)
    got = list(DataLoader(ds, batch_size=4, sampler=ORDER, collate_fn=function, num_workers=workers))
    expected = list(DataLoader(PerSample(ds), batch_size=4, sampler=ORDER, collate_fn=function))
    if function is as_they_come:
        assert equal([[tuple(sample) for sample in batch] for batch in got], expected)
    else:
        assert equal(got, expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_torch_stack_is_a_collate_function(root: Path, workers: int) -> None:
    ds = MMapShardDataset(root, fields=("image",))
    got = list(DataLoader(ds, batch_size=4, sampler=ORDER, collate_fn=torch.stack, num_workers=workers))
    assert equal(got, [torch.from_numpy(IMAGES[ORDER[i : i + 4]]) for i in range(0, 11, 4)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_samples_comes_out_of_a_worker_as_such(root: Path, kind: str) -> None:
    ds = MMapShardDataset(root, **KINDS[kind])
    got = list(DataLoader(ds, batch_size=4, sampler=ORDER, collate_fn=as_they_come, num_workers=1))
    assert equal([sample for batch in got for sample in batch], [ds[i] for i in ORDER])


def test_the_default_device_of_torch_changes_nothing(root: Path) -> None:
    ds = MMapShardDataset(root)
    keys = [SampleIndex(i, 0, 0, valid=True) for i in (3, 4)]
    with torch.device("meta"):
        batches = [ds[keys], default_collate(ds.__getitems__(keys)), [gathered.shared_memory(4)]]
    assert all(part.device.type == "cpu" for batch in batches for part in batch)


def test_a_changed_dict_is_not_taken_for_what_was_gathered(root: Path) -> None:
    ds = MMapShardDataset(root, output="dict")

    def all_changed(samples: Any) -> Any:
        for sample in samples:
            sample["image"] = sample["image"].float()
        return default_collate(samples)

    def first_changed(samples: Any) -> Any:
        samples[0]["label"] = 5
        return default_collate(samples)

    def renamed(samples: Any) -> Any:
        for sample in samples:
            sample["target"] = sample.pop("label")
        return default_collate(list(samples))

    for function in (all_changed, first_changed, renamed):
        got = list(DataLoader(ds, batch_size=4, collate_fn=function))
        assert equal(got, list(DataLoader(PerSample(ds), batch_size=4, collate_fn=function)))


def test_collating_twice_gives_two_batches(root: Path) -> None:
    looks: list[Callable[[Any], Any]] = [len, lambda samples: samples[0], list]
    for look in looks:
        samples = MMapShardDataset(root).__getitems__([3, 4])
        looked = look(samples)
        first, second = default_collate(samples), default_collate(samples)
        assert first[0].data_ptr() != second[0].data_ptr()
        assert equal(first, second)
        assert looked is not None
    samples = MMapShardDataset(root).__getitems__([3, 4])
    default_collate(samples)[0].zero_()
    assert equal(default_collate(samples)[0], torch.from_numpy(IMAGES[3:5]))


def test_samples_view_the_batch_and_in_place_changes_are_part_of_it(root: Path) -> None:
    samples = MMapShardDataset(root).__getitems__([3, 4])
    for image, _ in samples:
        image.add_(1)
    images, _ = default_collate(samples)
    assert equal(images, torch.from_numpy(IMAGES[3:5] + 1))
    assert samples[1][0].data_ptr() == images[1].data_ptr()


def test_other_functions_registered_with_torch_are_honoured(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "mine")
    assert next(iter(DataLoader(ds, batch_size=3)))[0] == "mine"
    given = collate.collate(
        ds.__getitems__([1, 2]),
        collate_fn_map={torch.Tensor: lambda batch, *, collate_fn_map: len(batch), int: lambda batch, *, collate_fn_map: sum(batch)},
    )
    assert given[1] == LABELS[1:3].sum()
    assert given[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_without_torchs_register_samples_are_a_list(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_REGISTERED", False)
    ds = MMapShardDataset(root, **KINDS[kind])
    samples = ds.__getitems__(ORDER)
    assert type(samples) is list
    assert [type(x) for x in samples] == [type(ds[0])] * len(ORDER)
    assert equal(list(DataLoader(ds, batch_size=4, sampler=ORDER)), list(DataLoader(PerSample(ds), batch_size=4, sampler=ORDER)))


def test_a_torch_without_the_register_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(collate, "default_collate_fn_map")
    assert not gathered._register()
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.data._utils.collate", None)
    monkeypatch.delattr(torch.utils.data._utils, "collate")
    assert not gathered._register()


# -- the sequence itself


def test_the_samples_are_a_sequence(root: Path) -> None:
    samples = MMapShardDataset(root).__getitems__(ORDER)
    assert isinstance(samples, Sequence)
    assert len(samples) == 11
    assert samples[0] is samples[-11] is next(iter(samples))
    assert samples[5] is samples[-6] is list(samples)[5]
    assert samples[2:4] == [samples[2], samples[3]]
    assert [label for _, label in reversed(samples)] == LABELS[ORDER[::-1]].tolist()
    for wrong in (11, -12):
        with pytest.raises(IndexError):
            samples[wrong]
    assert list(MMapShardDataset(root).__getitems__([])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_samples_pickle_and_copy_as_ordinary_ones(root: Path, kind: str) -> None:
    ds = MMapShardDataset(root, **KINDS[kind])
    samples = ds.__getitems__([3, 4])
    expected = [ds[3], ds[4]]
    assert isinstance(samples[0], type(expected[0]))
    sent = io.BytesIO()
    ForkingPickler(sent, pickle.HIGHEST_PROTOCOL).dump(samples)
    for again in (pickle.loads(pickle.dumps(samples)), copy.deepcopy(samples), pickle.loads(sent.getvalue())):
        assert type(again) is list
        assert equal(list(again), expected)


def test_trees_of_torch_look_into_the_first_sample_too(root: Path) -> None:
    def flip(x: Any) -> Any:
        return x.flip(-1) if isinstance(x, torch.Tensor) else x + 1

    for kind in ("tuple", "dict", "image"):
        ds = MMapShardDataset(root, **KINDS[kind])
        assert equal([tree_map(flip, sample) for sample in ds.__getitems__([3, 4])], [tree_map(flip, ds[3]), tree_map(flip, ds[4])])


def test_transforms_of_torchvision_in_a_collate_function(root: Path) -> None:
    pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    flip = v2.RandomHorizontalFlip(1.0)

    def flipped(samples: Any) -> Any:
        return default_collate([flip(sample) for sample in samples])

    for kind in ("tuple", "dict", "image"):
        ds = MMapShardDataset(root, **KINDS[kind])
        assert equal(list(DataLoader(ds, batch_size=4, collate_fn=flipped)), list(DataLoader(PerSample(ds), batch_size=4, collate_fn=flipped)))


def test_nothing_is_gathered_before_it_is_asked_for_and_no_views_are_made_for_a_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root)
    calls = []
    gather = ds._gather
    monkeypatch.setattr(ds, "_gather", lambda *args: calls.append(1) or gather(*args))
    samples = ds.__getitems__([3, 4])
    assert isinstance(samples, Gathered)
    assert len(samples) == 2
    assert not calls
    monkeypatch.setattr(gathered._Made, "unpack", None)
    images, labels = default_collate(samples)
    assert len(calls) == 1
    assert equal(images, torch.from_numpy(IMAGES[3:5]))
    assert labels.tolist() == LABELS[3:5].tolist()


# -- memory


def test_memory_of_batches_is_used_again_and_never_while_something_views_it(root: Path) -> None:
    ds = MMapShardDataset(root)
    loader = DataLoader(ds, batch_size=5, sampler=range(20))
    gc.disable()
    try:
        places = {batch[0].data_ptr() for _ in range(3) for batch in loader}
        assert len(places) <= 3
        assert len({ds[[1, 2]][0].data_ptr() for _ in range(9)}) <= 2
        assert len({ds[3:5][0].data_ptr() for _ in range(9)}) <= 2
    finally:
        gc.enable()
    held = [batch[0][1].numpy() for batch in loader]
    list(loader)
    assert all((row == IMAGES[5 * i + 1]).all() for i, row in enumerate(held))
    stacked = DataLoader(StackDataset(ds, ds), batch_size=5)
    kept_batches = list(stacked)
    list(stacked)
    assert (torch.cat([batch[1][0] for batch in kept_batches]).numpy() == IMAGES).all()


def test_samples_and_batches_make_no_cycles(root: Path) -> None:
    for kind in KINDS:
        ds = MMapShardDataset(root, **KINDS[kind])
        gc.collect()
        gc.disable()
        try:
            samples = ds.__getitems__([3, 4])
            list(samples)
            made = weakref.ref(samples[0].made)
            default_collate(samples)
            del samples
            assert made() is None
        finally:
            gc.enable()


# -- indices that say more


def test_valid_becomes_the_last_element(root: Path) -> None:
    keys = [SampleIndex(i, 0, 0, valid=i != 4) for i in (3, 4, 5)]
    for kind in KINDS:
        ds = MMapShardDataset(root, **KINDS[kind])
        got = next(iter(DataLoader(ds, batch_sampler=[keys])))
        assert equal(got, next(iter(DataLoader(PerSample(ds), batch_sampler=[keys]))))
        valid = got["valid"] if isinstance(got, dict) else got[-1]
        assert valid.dtype == torch.bool
        assert valid.tolist() == [True, False, True]
        batch = ds[keys]
        assert equal(list(batch) if isinstance(batch, tuple) else batch, got)
        sample = ds[keys[1]]
        assert (sample["valid"] if isinstance(sample, dict) else sample[-1]) is False
        assert len(next(iter(DataLoader(ds, batch_sampler=[[SampleIndex(3, 0, 0)]])))) == len(next(iter(DataLoader(ds, batch_sampler=[[3]]))))
    hooked = MMapShardDataset(root, transform=torch.Tensor.float)
    assert hooked[keys[1]][2] is False
    assert hooked[keys][2].tolist() == [True, False, True]
    joint = MMapShardDataset(root, transforms=lambda image, label: {"x": image})
    assert joint[keys[1]].keys() == {"x", "valid"}
    alone = MMapShardDataset(root, transforms=lambda image, label: image)
    assert alone[keys[0]][1] is True
    for ds in (hooked, MMapShardDataset(root)):
        with pytest.raises(ValueError, match="2 of the 3 indices"):
            ds[[*keys[:2], 5]]


# -- errors


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_arrives_in_the_loop_as_what_it_is(root: Path, workers: int) -> None:
    ds = MMapShardDataset(root)
    path = ds._reader.path("image", 1)
    path.write_bytes(path.read_bytes()[:-1])
    for reading in (ds, MMapShardDataset(root, transform=torch.Tensor.float)):
        with pytest.raises(CorruptShardError, match=path.name):
            list(DataLoader(reading, batch_size=4, num_workers=workers))


def test_beyond_the_end_is_an_error_before_anything_is_read(root: Path) -> None:
    with pytest.raises(IndexError, match="the dataset has 23"):
        MMapShardDataset(root).__getitems__([3, 23])


# -- the list that samples of one tensor come as


LISTS: dict[str, Callable[[Any], Any]] = {
    "stack": torch.stack,
    "stack by name": lambda batch: torch.stack(tensors=batch, dim=1),
    "cat": torch.cat,
    "list": list,
    "tuple": tuple,
    "last": lambda batch: batch[-1],
    "some": lambda batch: batch[1:3],
    "first, then others": lambda batch: [batch[0], *batch],
    "behind another": lambda batch: operator.add([1], batch),
    "before another": lambda batch: operator.add(batch, [1]),
    "twice": lambda batch: 2 * batch * 2,
    "reversed": lambda batch: list(reversed(batch)),
    "sorted": lambda batch: sorted(batch, key=lambda image: -int(image.sum())),
    "extends a list": lambda batch: functools.reduce(lambda made, part: made.extend(part) or made, [batch, batch], [0]),
    "replaces a part of a list": lambda batch: operator.setitem(made := [0, 1, 2], slice(1, 2), batch) or made,
    "enumerated": lambda batch: list(enumerate(batch)),
    "arguments": lambda batch: (lambda *images: images)(*batch),
    "numpy": lambda batch: torch.from_numpy(np.array([image.numpy() for image in batch])),
    "copied": lambda batch: [*copy.copy(batch), *copy.deepcopy(batch)],
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch)),
    "as a tree": lambda batch: tree_map(lambda image: image + 1, batch),
    "shown": lambda batch: " ".join(repr(batch).replace("_Tensor", "tensor").split()),
    "appended to": lambda batch: batch.append(torch.zeros(3, 5, 4, dtype=torch.uint8)) or default_collate(batch),
    "changed": lambda batch: operator.setitem(batch, 1, batch[0].clone()) or default_collate(batch),
    "first changed": lambda batch: operator.setitem(batch, 0, batch[1]) or default_collate(batch),
    "shortened": lambda batch: batch.pop() is None or default_collate(batch),
    "half": lambda batch: default_collate(batch[:2]),
    "turned": lambda batch: batch.reverse() or default_collate(batch),
    "added in place": lambda batch: default_collate(operator.iadd(batch, [batch[0]])),
    "deleted from": lambda batch: operator.delitem(batch, 0) or default_collate(batch),
    "twice collated": lambda batch: [default_collate(batch), default_collate(batch)],
    "collated after a look": lambda batch: [batch[2], default_collate(batch)],
    "length": len,
}


def unmarked(value: Any) -> Any:
    """The first sample as a plain tensor, which it says not to be."""
    if isinstance(value, list | tuple):
        return type(value)(map(unmarked, value))
    return value.as_subclass(torch.Tensor) if isinstance(value, gathered._Tensor) else value


@pytest.mark.parametrize("name", LISTS)
def test_samples_that_are_tensors_are_a_list_to_whoever_looks(root: Path, name: str) -> None:
    ds = MMapShardDataset(root, fields=("image",))
    batch = ds.__getitems__(ORDER)
    assert isinstance(batch, list)
    assert equal(unmarked(LISTS[name](batch)), LISTS[name]([ds[i] for i in ORDER]))


def test_every_method_of_a_list_looks(root: Path) -> None:
    ds = MMapShardDataset(root, fields=("image",))
    harmless = {"__class__", "__class_getitem__", "__dir__", "__doc__", "__format__", "__getattribute__", "__getstate__", "__hash__", "__init__"}
    harmless |= {
        "__init_subclass__",
        "__len__",
        "__new__",
        "__reduce_ex__",
        "__setattr__",
        "__delattr__",
        "__sizeof__",
        "__str__",
        "__subclasshook__",
    }
    of_its_own = {name for name in dir(list) if getattr(type(ds.__getitems__([0])), name) is not getattr(list, name)}
    assert set(dir(list)) - of_its_own <= harmless


def test_no_views_are_made_for_a_batch_of_tensors_and_what_stands_for_them_gives_no_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root, fields=("image",))
    batch = ds.__getitems__(ORDER)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(TypeError, match="nobody has looked at"):
        torch.stack(batch)
    with pytest.raises(TypeError, match="nobody has looked at"):
        torch.stack([list.__getitem__(batch, 0)])
    monkeypatch.setattr(gathered._Made, "unpack", None)
    assert equal(default_collate(batch), torch.from_numpy(IMAGES[ORDER]))
    assert equal(list(DataLoader(ds, 6))[1], torch.from_numpy(IMAGES[6:12]))
