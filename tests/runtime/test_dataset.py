"""MMapShardDataset against the plainest oracle: arrays in memory, concatenated."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError, GenerationError, NotADatasetError
from mmcompile.format.reader import Reader
from mmcompile.runtime.dataset import MMapShardDataset
from tests.support import make_dataset

ENGINES = ("mmap", "pread")
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bfloat16")


def pixels(n: int, shape: tuple[int, int, int] = (3, 6, 5), seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def same(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> bool:
    """Same shape, same bits."""
    got = tensor.contiguous()
    if got.dtype == torch.bfloat16:
        got = got.view(torch.uint16)
    return got.numpy().dtype == array.dtype and got.shape == array.shape and got.numpy().tobytes() == np.ascontiguousarray(array).tobytes()


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    shards = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    shape = tuple(draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))))
    dtype = draw(st.sampled_from(DTYPES))
    raw = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, (sum(shards), *shape))
    return {
        "images": raw.astype("u2" if dtype == "bfloat16" else dtype),
        "dtype": dtype,
        "shards": shards,
        "layout": draw(st.sampled_from(["chw", "hwc"])),
        "labels": draw(st.sampled_from([None, np.arange(sum(shards)) % 3])),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stored(), st.sampled_from(ENGINES), st.data())
def test_samples_and_batches_equal_indexing_the_concatenation(case: dict[str, Any], engine: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder), **case)
        ds = MMapShardDataset(folder, engine=engine)
        images, labels = case["images"], case["labels"]
        n = len(images)
        assert len(ds) == n
        for i, sample in enumerate(ds):
            assert same(sample if labels is None else sample[0], images[i])
            assert labels is None or (type(sample[1]) is int and sample[1] == labels[i])
        keys = data.draw(st.lists(st.integers(-n, n - 1), max_size=12) if n else st.just([]))
        cut = data.draw(st.slices(n))
        for key, rows in ((keys, keys), (np.array(keys, np.int32), keys), (torch.tensor(keys, dtype=torch.int64), keys), (cut, np.arange(n)[cut])):
            batch = ds[key]
            assert same(batch if labels is None else batch[0], images[np.array(rows, np.int64)])
            assert labels is None or same(batch[1], labels[np.array(rows, np.int64)])
        fetched = ds.__getitems__(keys)
        assert len(fetched) == len(keys)
        for sample, key in zip(fetched, keys, strict=True):
            assert same(sample if labels is None else sample[0], images[key])
            assert labels is None or (type(sample[1]) is int and sample[1] == labels[key])
        assert [ds.find(ds.source(i)) for i in range(n)] == list(range(n))
        again = pickle.loads(pickle.dumps(ds))
        assert repr(again) == repr(ds)
        assert all(same(a if labels is None else a[0], images[i]) for i, a in enumerate(again))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["chw", "hwc"]), st.sampled_from(ENGINES))
@example(5, 4, 2, 3, "chw", "mmap")
@example(9, 7, 4, 2, "hwc", "pread")
def test_crop_is_the_centre_with_offsets_rounded_half_to_even(height: int, width: int, h: int, w: int, layout: str, engine: str) -> None:
    images = pixels(3, (2, height, width))
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder), images, layout=layout, shards=(2, 1))
        if h > height or w > width:
            with pytest.raises(ValueError, match="larger than field 'image'"):
                MMapShardDataset(folder, crop=(h, w), engine=engine)
            return
        ds = MMapShardDataset(folder, crop=(h, w), engine=engine)
        top, left = int(round((height - h) / 2.0)), int(round((width - w) / 2.0))  # noqa: RUF046 - the formula as torchvision writes it
        expected = images[:, :, top : top + h, left : left + w]
        assert ds.shape == (2, h, w)
        assert all(same(ds[i], expected[i]) for i in range(3))
        assert same(ds[[2, 0, 0]], expected[[2, 0, 0]])
        assert same(MMapShardDataset(folder, crop=(h, w), engine=engine, copy=True)[1], expected[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "out", pixels(7), [0, 1, 2, 0, 1, 2, 0], shards=(3, 3, 1), classes=("ant", "bee", "cat"))
    return tmp_path / "out"


def test_integers_of_every_kind_ask_for_a_sample(root: Path) -> None:
    ds = MMapShardDataset(root)
    for key in (5, -2, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor(-2, dtype=torch.int32)):
        image, label = ds[key]
        assert same(image, pixels(7)[5])
        assert label == 2


@pytest.mark.parametrize("key", [7, -8, 1 << 70, [0, 7], [-8], np.array([9]), np.array([(1 << 64) - 1], np.uint64), [1 << 70], torch.tensor([7])])
def test_beyond_the_end_is_an_index_error(root: Path, key: Any) -> None:
    with pytest.raises(IndexError, match="the dataset has 7"):
        MMapShardDataset(root)[key]


@pytest.mark.parametrize(
    "key",
    [
        *(True, np.bool_(True), torch.tensor(True), [True, False], np.ones(7, bool), torch.ones(7, dtype=torch.bool)),
        *(1.0, [1.5], np.ones(3), torch.tensor(1.0), (1, 2), "1", None, np.zeros((2, 2), int), [[1]], ...),
    ],
)
def test_masks_floats_and_other_keys_are_type_errors(root: Path, key: Any) -> None:
    with pytest.raises(TypeError):
        MMapShardDataset(root)[key]


def test_iteration_ends_and_an_index_error_in_a_transform_surfaces(root: Path) -> None:
    assert len(list(MMapShardDataset(root))) == 7

    def bad(image: torch.Tensor) -> torch.Tensor:
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        list(MMapShardDataset(root, transform=bad))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [0, 1])
def test_zero_and_one_sample(tmp_path: Path, n: int, engine: str) -> None:
    make_dataset(tmp_path, pixels(n), [0] * n, classes=("only",))
    ds = MMapShardDataset(tmp_path, engine=engine)
    assert len(ds) == len(list(ds)) == n
    images, labels = ds[:]
    assert images.shape == (n, 3, 6, 5)
    assert labels.shape == (n,)
    assert ds[[]][0].shape == (0, 3, 6, 5)
    assert ds.targets is not None
    assert ds.targets.shape == (n,)
    assert (ds.stats is None) == (n == 0)
    with pytest.raises(IndexError):
        ds[n]
    with pytest.raises(KeyError):
        ds.find("nothing")
    with pytest.raises(TypeError, match=r"^a source is asked for by its key, a str or bytes as source\(\) gives it, not int$"):
        ds.find(3)  # type: ignore[arg-type]


def test_samples_come_as_tuple_alone_or_dict(root: Path, tmp_path: Path) -> None:
    image, label = MMapShardDataset(root)[4]
    assert same(image, pixels(7)[4])
    assert label == 1
    sample = MMapShardDataset(root, output="dict")[4]
    assert list(sample) == ["image", "label"]
    assert sample["label"] == 1
    batch = MMapShardDataset(root, output="dict")[1:3]
    assert batch["image"].shape == (2, 3, 6, 5)
    assert batch["label"].tolist() == [1, 2]
    label, image = MMapShardDataset(root, fields=("label", "image"))[4]
    assert same(image, pixels(7)[4])
    assert label == 1
    make_dataset(tmp_path / "flat", pixels(2))
    flat = MMapShardDataset(tmp_path / "flat")
    assert same(flat[1], pixels(2)[1])
    assert flat.classes is flat.class_to_idx is flat.targets is None
    assert MMapShardDataset(tmp_path / "flat", output="dict")[0].keys() == {"image"}


def test_a_field_that_is_not_asked_for_is_not_read(root: Path) -> None:
    for path in (root / "shards").glob("image-*"):
        path.unlink()
    ds = MMapShardDataset(root, fields=("label",))
    assert ds[4] == 1
    assert ds[[4, 2]].tolist() == [1, 2]
    assert ds.shape == ()
    assert ds.dtype == torch.int64
    with pytest.raises(CorruptShardError, match=r"image-.*missing"):
        MMapShardDataset(root)[0]


def test_what_is_in_there(root: Path) -> None:
    ds = MMapShardDataset(root)
    assert ds.classes == ["ant", "bee", "cat"]
    assert ds.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    assert isinstance(ds.targets, np.ndarray)
    assert ds.targets.dtype == np.int64
    assert ds.targets.tolist() == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="read-only"):
        ds.targets[0] = 5
    with pytest.raises(ValueError, match="WRITEABLE"):
        ds.targets.flags.writeable = True
    assert ds.shape == (3, 6, 5)
    assert ds.dtype == torch.uint8
    unit = pixels(7) / 255
    assert ds.stats is not None
    np.testing.assert_allclose(ds.stats["mean"], unit.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(ds.stats["std"], unit.std((0, 2, 3)), rtol=1e-9)
    assert ds.source(4) == ds.source(-3) == "bee/000004.png"
    assert ds.find("bee/000004.png") == ds.find(b"bee/000004.png") == 4
    with pytest.raises(KeyError):
        ds.find("bee/4.png")
    assert ds.root == root
    assert ds.generation in repr(ds)
    assert "7 samples of image uint8 (3, 6, 5), label int64 (), 3 classes" in repr(ds)


def test_keys_that_are_not_utf8_and_keys_that_share_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"a/\xff.png", "a/ü.png".encode(), b"a/1.png"]
    make_dataset(tmp_path, pixels(3), keys=keys, shards=(2, 1))
    monkeypatch.setattr("mmcompile.format.origins.key_hash", lambda key: 42)
    ds = MMapShardDataset(tmp_path)
    assert ds.source(0) == "a/\udcff.png"
    assert [ds.find(ds.source(i)) for i in range(3)] == [ds.find(k) for k in keys] == [0, 1, 2]
    with pytest.raises(KeyError):
        ds.find("a/2.png")


def test_splits_are_asked_for_and_joined(tmp_path: Path) -> None:
    labels = [0, 0, 1, 1, 0, 1]
    make_dataset(tmp_path, pixels(6), labels, shards=(2, 2, 2), splits={"train": 4, "val": 2})
    with pytest.raises(ValueError, match=r"has the splits train, val: .*'all'"):
        MMapShardDataset(tmp_path)
    with pytest.raises(ValueError, match=r"no split 'test'.*\['train', 'val'\]"):
        MMapShardDataset(tmp_path, "test")
    make_dataset(tmp_path / "one", pixels(6), labels, splits={"train": 6})
    with pytest.raises(ValueError, match=r"no split 'test'; it has \['train'\]$"):
        MMapShardDataset(tmp_path / "one", "test")
    make_dataset(tmp_path / "none", pixels(6), labels)
    with pytest.raises(ValueError, match=r"no split 'train'; it has no splits: leave split out$"):
        MMapShardDataset(tmp_path / "none", "train")
    val = MMapShardDataset(tmp_path, "val")
    assert len(val) == 2
    assert same(val[-1][0], pixels(6)[5])
    assert same(val[[1, 0, -2]][0], pixels(6)[[5, 4, 4]])
    assert val.targets is not None
    assert val.targets.tolist() == [0, 1]
    assert val.source(0) == "class 0/000004.png"
    assert val.find("class 0/000004.png") == 0
    with pytest.raises(KeyError):
        val.find("class 0/000000.png")
    assert len(pickle.loads(pickle.dumps(val))) == 2
    whole = MMapShardDataset(tmp_path, split="all")
    assert len(whole) == 6
    assert same(whole[:][0], pixels(6))
    for ds, part in ((val, pixels(6)[4:]), (whole, pixels(6))):
        assert ds.stats is not None
        np.testing.assert_allclose(ds.stats["mean"], (part / 255).mean((0, 2, 3)), rtol=1e-9)
        np.testing.assert_allclose(ds.stats["std"], (part / 255).std((0, 2, 3)), rtol=1e-9)


def test_arguments_that_make_no_sense_are_refused(root: Path) -> None:
    for wrong in (
        {"fields": ()},
        {"fields": ("label", "label")},
        {"fields": ("mask",)},
        {"output": "list"},
        {"engine": "fast"},
        {"crop": 0},
        {"crop": (1, 2, 3)},
        {"crop": True},
        {"crop": 7},
        {"dtype": torch.int32},
        {"dtype": torch.complex64},
        {"transform": len, "transforms": len},
        {"transform": len, "fields": ("label",)},
        {"target_transform": len, "fields": ("image",)},
    ):
        with pytest.raises(ValueError, match=r"."):
            MMapShardDataset(root, **wrong)
    for wrong in ({"fields": "label"}, {"dtype": 32}, {"dtype": np.float32}):
        with pytest.raises(TypeError):
            MMapShardDataset(root, **wrong)


# -- promise 9: writing is safe


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_in_place_operations_change_neither_the_file_nor_a_later_batch(tmp_path: Path, layout: str, engine: str) -> None:
    images = pixels(5)
    make_dataset(tmp_path, images, [0, 1, 0, 1, 0], layout=layout, shards=(2, 3))
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*.npy"))}
    ds = MMapShardDataset(tmp_path, engine=engine)
    for i in range(5):
        ds[i][0].zero_()
    assert same(ds[:][0], images)
    ds[[0, 1]][0].fill_(9)
    assert same(ds[[0, 1]][0], images[:2])
    for image, _ in ds.__getitems__([0, 3]):
        image.add_(1)
    assert same(torch.stack([s[0] for s in ds.__getitems__([0, 3])]), images[[0, 3]])
    batches = [b for b, _ in torch.utils.data.DataLoader(ds, batch_size=2)]
    assert same(torch.cat(batches), images)
    seen = MMapShardDataset(tmp_path, engine=engine, transform=lambda x: x.mul_(2))
    assert same(seen[4][0], images[4] * 2)
    assert same(seen[4][0], images[4] * 2)
    alone = MMapShardDataset(tmp_path, engine=engine, copy=True)
    alone[1][0].zero_()
    assert same(alone[1][0], images[1])
    doubled = MMapShardDataset(tmp_path, engine=engine, target_transform=lambda y: y + 10)
    doubled[0][0].zero_()
    assert same(doubled[[0]][0], images[:1])
    assert same(doubled.__getitems__([0])[0][0], images[0])
    assert doubled[[0]][1].tolist() == [10]
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*.npy"))} == before


def test_a_sample_is_a_view_that_outlives_the_dataset(root: Path) -> None:
    ds = MMapShardDataset(root)
    image = ds[0][0]
    assert image.data_ptr() == ds[0][0].data_ptr()
    assert image.untyped_storage().nbytes() == 3 * 3 * 6 * 5  # the whole shard: nothing was copied
    array = ds[1][0].numpy()
    del ds
    assert same(image, pixels(7)[0])
    assert (array == pixels(7)[1]).all()


def test_rows_stored_hwc_arrive_channels_last_without_a_copy(tmp_path: Path) -> None:
    make_dataset(tmp_path, pixels(4), layout="hwc")
    ds = MMapShardDataset(tmp_path)
    assert ds.shape == (3, 6, 5)
    assert ds[0].stride() == (1, 15, 3)
    assert ds[[0, 2]].is_contiguous(memory_format=torch.channels_last)
    assert MMapShardDataset(tmp_path, dtype=torch.float32)[:].is_contiguous(memory_format=torch.channels_last)


# -- promises 12 to 14


def test_a_mistyped_folder_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError, match="outt: no such folder"):
        MMapShardDataset(tmp_path / "outt")
    assert list(tmp_path.iterdir()) == []
    make_dataset(tmp_path / "out", pixels(2))
    (tmp_path / "outer").mkdir()
    with pytest.raises(NotADatasetError) as caught:
        MMapShardDataset(tmp_path / "outt")
    lost, meant = tmp_path / "outt", tmp_path / "out"
    assert str(caught.value) == f"{lost}: no such folder; did you mean {meant}, or build one with `mmcompile build RAW {lost}`"
    with pytest.raises(FileNotFoundError, match=r"no index\.json"):
        MMapShardDataset(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_file_is_an_error_that_names_it(root: Path, engine: str) -> None:
    reader = Reader(root)
    short = reader.path("image", 1)
    os.truncate(short, short.stat().st_size - 1)
    ds = MMapShardDataset(root, engine=engine)
    assert same(ds[0][0], pixels(7)[0])
    for read in (lambda: ds[3], lambda: ds[[0, 3]], lambda: list(ds.__getitems__([3]))):
        with pytest.raises(CorruptShardError, match=short.name):
            read()


def test_a_swapped_key_table_is_an_error(root: Path) -> None:
    reader = Reader(root)
    path = reader.path("samples", 0)
    data = bytearray(path.read_bytes())
    data[4096:4104] = (1 << 50).to_bytes(8, "little")  # the first row's key_stop
    path.write_bytes(data)
    ds = MMapShardDataset(root)
    for read in (lambda: ds.source(0), lambda: ds.source(1), lambda: ds.find("x")):
        with pytest.raises(FormatError, match="samples-"):
            read()


def test_statistics_of_a_stranger_are_a_format_error(tmp_path: Path) -> None:
    make_dataset(tmp_path, pixels(2))
    index = Reader(tmp_path).index
    wrongs: list[dict[str, Any]] = [{"all": 3}, {"all": {"image": 3}}, {"all": {"image": {"pixels": 1, "mean": "x", "std": []}}}]
    for wrong in wrongs:
        shutil.rmtree(tmp_path / "generations")
        (tmp_path / "index.json").write_bytes(dataclasses.replace(index, statistics=wrong).to_bytes())
        with pytest.raises(FormatError, match="statistics"):
            MMapShardDataset(tmp_path)
        (tmp_path / "generations").mkdir()


def test_a_rebuild_does_not_disturb_an_open_dataset_or_its_pickle(root: Path) -> None:
    ds = MMapShardDataset(root)
    ds[0]
    pickled = pickle.dumps(ds)
    assert len(pickled) < 1024
    new = make_dataset(root, pixels(7, seed=5), [0] * 7, shards=(7,), classes=("ant",))
    assert same(ds[:][0], pixels(7))
    again = pickle.loads(pickled)
    assert again.generation == ds.generation != new
    assert same(again[:][0], pixels(7))
    assert same(MMapShardDataset(root, generation=ds.generation)[6][0], pixels(7)[6])
    assert same(MMapShardDataset(root)[6][0], pixels(7, seed=5)[6])
    (root / "generations" / f"{ds.generation}.json").unlink()
    with pytest.raises(GenerationError, match="open the dataset anew"):
        pickle.loads(pickled)
    with pytest.raises(GenerationError):
        MMapShardDataset(root, generation="nonsense")
    for old in (root / "shards").iterdir():
        if "image" in old.name and old != Reader(root).path("image", 0):
            old.unlink()
    assert same(ds[0][0], pixels(7)[0])  # open already
    fresh = MMapShardDataset.__new__(MMapShardDataset)
    fresh.__dict__.update(ds.__dict__)
    fresh._reader.close()
    fresh._open()
    with pytest.raises(GenerationError, match="open the dataset anew"):
        fresh[4]


def test_reading_opens_nothing_for_writing_and_leaves_no_file(root: Path) -> None:
    """What a read-only mount would refuse, watched for in a fresh interpreter (root may write anywhere, so modes prove nothing)."""
    before = sorted(root.rglob("*"))
    code = f"""
import os, sys
from mmcompile.runtime.dataset import MMapShardDataset
sys.dont_write_bytecode = True
bad = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        bad.append(args)
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.utime", "shutil.rmtree", "socket.bind"):
        bad.append((event, args))
sys.addaudithook(hook)
for engine in ("mmap", "pread"):
    ds = MMapShardDataset({str(root)!r}, engine=engine)
    list(ds); ds[:]; ds.__getitems__([1, 2]); ds.targets; ds.stats; ds.classes; ds.find(ds.source(1)); repr(ds)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sorted(root.rglob("*")) == before


def test_classes_that_are_not_those_asked_for_are_an_error(tmp_path: Path) -> None:
    images, labels = np.zeros((3, 3, 2, 2), np.uint8), np.array([0, 1, 1])
    for name, classes in {"train": ("a", "b", "c"), "val": ("a", "c")}.items():
        make_dataset(tmp_path / name, images, labels, classes=classes)
    make_dataset(tmp_path / "flat", images)
    train, val = MMapShardDataset(tmp_path / "train"), tmp_path / "val"
    assert train.classes is not None
    assert MMapShardDataset(train.root, classes=train.classes).classes == train.classes
    assert MMapShardDataset(train.root, classes=("a", "b", "c"), fields=["image"]).classes == train.classes
    with pytest.raises(ValueError, match=r"val.*: class 1 is 'c', expected 'b' \(2 classes, expected 3\); build both with the class map of one"):
        MMapShardDataset(val, classes=train.classes)
    with pytest.raises(ValueError, match="class 2 is 'c', expected none"):
        MMapShardDataset(train.root, classes=["a", "b"])
    with pytest.raises(ValueError, match="class 2 is none, expected 'z'"):
        MMapShardDataset(val, classes=["a", "c", "z"])
    for wrong in ("abc", [1, 2]):
        with pytest.raises(TypeError, match="classes is a sequence of names"):
            MMapShardDataset(val, classes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no classes, 1 were asked for"):
        MMapShardDataset(tmp_path / "flat", classes=["a"])
    assert pickle.loads(pickle.dumps(MMapShardDataset(val, classes=["a", "c"]))).classes == ["a", "c"]
