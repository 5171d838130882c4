"""Python datasets as sources: what a sample may be, what is an error and where, and that pictures are those of a folder."""

from __future__ import annotations

import errno
import io
import os
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import mmcompile
from mmcompile.cli import program
from mmcompile.compiler import decode
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import dataset as dataset_module
from mmcompile.compiler.sources.dataset import DatasetSource, wrap
from mmcompile.errors import BuildError, OptionError, SourceError
from mmcompile.format.reader import Reader
from tests.compiler.builds import dataset, picture, write

Pair = namedtuple("Pair", ["a", "b"])


class Pictures(Dataset[Any]):
    """Pictures with labels, as torchvision has them; `strange` says what another row holds, or raises."""

    classes = ("cat", "dog")

    def __init__(self, n: int = 9, strange: dict[int, Any] | None = None, length: int | None = None) -> None:
        self.n, self.strange, self.length = n, strange or {}, length

    def __len__(self) -> int:
        return self.n if self.length is None else self.length

    def __getitem__(self, i: int) -> Any:
        if i >= self.n:
            raise IndexError(i)
        found = self.strange.get(i)
        if isinstance(found, BaseException):
            raise found
        return found or (Image.open(io.BytesIO(picture(i, ("PNG", "JPEG")[i % 2], (12, 10)))), i % 2)


class Stream(IterableDataset[Any]):
    """Dicts of arrays, one after the other."""

    def __init__(self, n: int, fault: BaseException | None = None) -> None:
        self.n, self.fault = n, fault

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            yield {"x": np.full(3, i, "f4"), "label": i % 4}
        if self.fault is not None:
            raise self.fault


def rows(source: Any, asked: Any = None) -> tuple[Any, dict[str, Any]]:
    made, _ = wrap(source, asked)
    scan = made.scan()
    return scan, made.read(0, scan.rows)


def fields(scan: Any) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [(f.name, f.dtype, f.shape, f.meaning) for f in scan.fields]


def test_pictures_are_those_of_the_same_files_in_a_folder(tmp_path: Path) -> None:
    preprocess = Preprocess(resize=9, crop=8)
    write(tmp_path / "raw", {f"{i}.{('png', 'jpg')[i % 2]}": picture(i, ("PNG", "JPEG")[i % 2], (12, 10)) for i in range(9)})
    mmcompile.build(tmp_path / "raw", tmp_path / "files", preprocess=preprocess, workers=1)
    report = mmcompile.build(Pictures(), tmp_path / "out", preprocess=preprocess, workers=2)
    assert (report.workers, report.fields, report.classes) == (2, ("image", "label"), ("cat", "dog"))
    ours, theirs = Reader(tmp_path / "out"), Reader(tmp_path / "files")
    assert np.array_equal(ours.gather("image", np.arange(9)), theirs.gather("image", np.arange(9)))
    assert ours.index.statistics["all"]["image"] == theirs.index.statistics["all"]["image"]
    assert ours.gather("label", np.arange(9)).tolist() == [i % 2 for i in range(9)]


def test_floats_of_pictures_are_those_of_a_folder(tmp_path: Path) -> None:
    preprocess = Preprocess(crop=8, dtype="float32", normalize="imagenet", layout="hwc")
    write(tmp_path / "raw", {f"{i}.png": picture(2 * i, "PNG", (12, 10)) for i in range(3)})
    mmcompile.build(tmp_path / "raw", tmp_path / "files", preprocess=preprocess, workers=1)
    mmcompile.build(Subset(Pictures(), [0, 2, 4]), tmp_path / "out", preprocess=preprocess, workers=1)
    ours, theirs = Reader(tmp_path / "out"), Reader(tmp_path / "files")
    assert np.array_equal(ours.gather("image", np.arange(3)), theirs.gather("image", np.arange(3)))
    assert ours.index.fields[0] == theirs.index.fields[0]


def test_the_bytes_are_the_same_from_one_process_and_from_two(tmp_path: Path) -> None:
    options = BuildOptions(shard_bytes=2 * 3 * 120)
    mmcompile.build(Pictures(), tmp_path / "two", workers=2, options=options)
    unpicklable = Pictures()
    unpicklable.strange = {99: lambda: None}
    report = mmcompile.build(unpicklable, tmp_path / "one", workers=2, options=options)
    assert report.workers == 1
    assert any("cannot be sent to worker processes" in line for line in report.warnings)
    assert dataset(tmp_path / "two") == dataset(tmp_path / "one")


class Boxed:
    """Named values that are no dict."""

    def keys(self) -> list[str]:
        return ["a"]

    def __getitem__(self, name: str) -> int:
        return 1


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [
        ((np.zeros(3), 1), [("x", "float64", (3,), "value"), ("y", "int64", (), "class")]),
        ({"Mask": torch.zeros(2, 2, dtype=torch.bool), "id": 7}, [("mask", "bool", (2, 2), "value"), ("id", "int64", (), "value")]),
        (torch.zeros(2, dtype=torch.bfloat16), [("x", "bfloat16", (2,), "value")]),
        ([1.5, 2.5], [("x", "float64", (2,), "value")]),
        (Pair(1.5, True), [("a", "float64", (), "value"), ("b", "bool", (), "value")]),
        ((1, 2, 3.0), [("x0", "int64", (), "value"), ("x1", "int64", (), "value"), ("x2", "float64", (), "value")]),
        (np.datetime64("2020-01-01T00:00:01", "s"), [("x", "int64", (), "value")]),
        ({"image": np.zeros((6, 5, 3), "u1"), "label": np.uint8(1)}, [("image", "uint8", (6, 5, 3), "image"), ("label", "int64", (), "class")]),
        ({"label": 1, "img": Image.new("L", (5, 4))}, [("img", "uint8", (3, 4, 5), "image"), ("label", "int64", (), "class")]),
    ],
)
def test_what_a_sample_may_be(sample: Any, wanted: Any) -> None:
    source = DatasetSource({"": [sample] * 3}, Preprocess())
    scan = source.scan()
    assert fields(scan) == wanted
    found = source.read(0, 3)
    assert {name: array.shape for name, array in found.items()} == {name: (3, *shape) for name, _, shape, _ in wanted}


def test_values_are_what_the_samples_hold() -> None:
    _, found = rows([(torch.arange(3, dtype=torch.float16) + i, i) for i in range(5)])
    assert np.array_equal(found["x"], np.arange(3, dtype="f2") + np.arange(5, dtype="f2")[:, None])
    assert found["y"].tolist() == [0, 1, 2, 3, 4]
    _, found = rows([torch.tensor([1.5, -2.0], dtype=torch.bfloat16)])
    assert found["x"].tolist() == [[0x3FC0, 0xC000]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Pictures(strange={3: IndexError("no such file")}), "row 3: the dataset raised IndexError: no such file"),
        (Pictures(strange={8: KeyError("k")}), "row 8: the dataset raised KeyError: 'k'"),
        (Pictures(strange={2: StopIteration()}), "row 2: the dataset raised StopIteration"),
        (Pictures(strange={0: RuntimeError("two\nlines")}), "row 0: the dataset raised RuntimeError: two"),
        (Pictures(length=11), "row 9: the dataset raised IndexError: 9"),
        (Pictures(strange={5: (np.zeros(3), 1)}), "row 5: image: expected a picture of Pillow's, as in the first sample, found ndarray"),
        (Pictures(strange={5: (Image.new("RGB", (9, 9)), 1)}), "row 5: image: 9x9 (width x height)"),
        (Pictures(strange={5: {"image": 1}}), "row 5: has image; expected image, label"),
        ([np.zeros(3), np.zeros(4)], "row 1: x: expected float64 (3,), found float64 (4,)"),
        ([1, 2.5], "row 1: x: expected int64 (), found float64 ()"),
        ([np.zeros(2), None], "row 1: x: NoneType; expected pictures"),
        (["a cat"], "row 0: x: text; expected pictures, arrays, tensors or numbers"),
        ([{"x": [[1, 2], [3]]}], "row 0: x: list that is no array of numbers ("),
        ([{"x": 1, "X": 2}], "row 0: X and x: both are the field x"),
        ([{}], "row 0: a sample holds nothing"),
        ([torch.eye(2).to_sparse()], "row 0: x: Tensor that is no array of numbers"),
        ([np.ma.masked_equal([1, 2], 2)], "row 0: x: MaskedArray that is no array of numbers (masked values: fill them)"),
        ([{"x": {"y": {"z": 1}}}], "row 0: y: dict; expected pictures"),
        ([np.array([object()])], "row 0: x: ndarray of Python objects; expected pictures"),
        ([Boxed()], "row 0: x: Boxed; expected pictures, arrays, tensors, numbers, or a dict of them: give dict(…) of it"),
        (Pictures(length=-1), "Pictures: its length cannot be told"),
    ],
)
def test_a_strange_sample_is_an_error_with_its_row(data: Any, message: str) -> None:
    preprocess = Preprocess(keep_size=(10, 12)) if "width" in message else None
    with pytest.raises(SourceError) as caught:
        rows(data, preprocess)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value.__cause__, SourceError)  # or a traceback says the same twice


def test_an_error_in_a_sample_ends_a_build_and_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="row 7: the dataset raised IndexError"):
        mmcompile.build(Pictures(strange={7: IndexError("inside")}), tmp_path / "out", workers=2)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_tensor_dataset_is_read_in_slices() -> None:
    data = TensorDataset(torch.rand(50, 3), torch.arange(50) % 5)
    scan, found = rows(data)
    assert fields(scan) == [("x", "float32", (3,), "value"), ("y", "int64", (), "class")]
    assert scan.classes == ("0", "1", "2", "3", "4")
    assert np.array_equal(found["x"], data.tensors[0].numpy())


def test_arrays_by_name_and_lists_are_columns_and_have_to_be_of_one_length() -> None:
    scan, found = rows({"a": np.arange(6).reshape(3, 2), "b": [1.0, 2.0, 3.0]})
    assert fields(scan) == [("a", "int64", (2,), "value"), ("b", "float64", (), "value")]
    assert found["b"].tolist() == [1, 2, 3]
    with pytest.raises(SourceError, match="arrays of different lengths: a 3, b 2"):
        rows({"a": np.arange(3), "b": np.arange(2)})


def test_an_iterable_is_read_once_and_what_it_raises_has_its_row(tmp_path: Path) -> None:
    report = mmcompile.build(Stream(1000), tmp_path / "out", workers=2)
    assert (report.samples, report.workers) == (1000, 2)
    assert np.array_equal(Reader(tmp_path / "out").gather("x", np.arange(1000)), np.repeat(np.arange(1000, dtype="f4"), 3).reshape(-1, 3))
    with pytest.raises(SourceError, match="row 5: the dataset raised IndexError: late"):
        rows(Stream(5, IndexError("late")))
    with pytest.raises(SourceError, match="row 1: x: expected int64"):
        rows(x for x in (1, 2.5))


@pytest.mark.parametrize("names", [("train", "../x"), ("train", ""), ("train", "all"), ("a\nb",)])
def test_splits_that_cannot_be_called_so_are_refused(names: tuple[Any, ...]) -> None:
    with pytest.raises(OptionError, match="the splits of a dict of datasets: ") as caught:
        wrap({name: TensorRows(3) for name in names}, Preprocess())
    assert str(caught.value).isprintable()
    with pytest.raises(SourceError, match="1 and '1' are one as text"):
        wrap({1: TensorRows(3), "1": TensorRows(3)}, Preprocess())


def test_datasets_by_name_are_splits() -> None:
    scan, found = rows({"train": TensorRows(3), "test": TensorRows(1)})
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 3), ("test", 3, 4)]
    assert found["x"].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["tensors", "dicts", "hdf5"])
def test_arrays_by_split_are_what_they_are_alone(tmp_path: Path, kind: str) -> None:
    parts = {"train": (torch.rand(30, 3), torch.arange(30) % 5), "test": (torch.rand(7, 3), torch.arange(7) % 7)}
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        data = h5py.File(tmp_path / "a.h5", "w")
        for split, (x, y) in parts.items():
            data[f"{split}/x"], data[f"{split}/y"] = x.numpy(), y.numpy()
    else:
        data = {split: TensorDataset(x, y) if kind == "tensors" else {"x": x, "y": y.numpy()} for split, (x, y) in parts.items()}
    source = wrap(data, None)[0]
    scan = source.scan()
    assert source.by_index == (kind != "hdf5")
    order = ["test", "train"] if kind == "hdf5" else ["train", "test"]
    assert [(s.name, s.stop - s.start) for s in scan.splits] == [(name, len(parts[name][0])) for name in order]
    assert (fields(scan), scan.classes) == ([("x", "float32", (3,), "value"), ("y", "int64", (), "class")], tuple("0123456"))
    whole = {name: torch.cat([parts[split][i] for split in order]).numpy() for i, name in enumerate(("x", "y"))}
    mixed = np.random.default_rng(1).permutation(37)
    parts_of = [(source.read(a, b), slice(a, b)) for a, b in ((0, 37), (4, 33), (8, 9), (31, 37))]
    for found, wanted in [*parts_of, *([(source.take(mixed), mixed)] if source.by_index else [])]:
        assert all(np.array_equal(found[name], whole[name][wanted]) for name in whole)


def test_arrays_by_split_have_to_be_alike() -> None:
    with pytest.raises(SourceError, match=r"x float64 \(\) in split a and x float32 \(2,\) in split b: expected the same in all splits"):
        wrap({"a": {"x": np.zeros(3)}, "b": {"x": np.zeros((3, 2), "f4")}}, None)
    with pytest.raises(SourceError, match="split b: arrays of different lengths: x 3, y 2"):
        wrap({"a": {"x": np.zeros(3), "y": np.zeros(3)}, "b": {"x": np.zeros(3), "y": np.zeros(2)}}, None)
    with pytest.raises(OptionError, match="the splits of a dict of arrays: a split is called all"):
        wrap({"a": {"x": np.zeros(3)}, "all": {"x": np.zeros(3)}}, None)
    with pytest.raises(SourceError, match="y of split b: row 1 is -1, expected class numbers"):
        wrap({"a": {"x": np.zeros(2), "y": np.zeros(2, int)}, "b": {"x": np.zeros(2), "y": np.array([0, -1])}}, None)[0].scan()


class TensorRows:
    """Whole numbers as a dataset."""

    mmcompile_version = "1"
    keys = ()  # an attribute of that name makes it no dict

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i)


def test_a_dataset_that_knows_its_version_is_not_read_again(tmp_path: Path) -> None:
    mmcompile.build(TensorRows(5), tmp_path / "out", workers=1)
    assert mmcompile.build(TensorRows(5), tmp_path / "out", workers=1).kept == 5
    assert mmcompile.build(TensorRows(6), tmp_path / "out", workers=1).decoded == 6


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "NoneType: expected a path"), (5, "int: expected"), (object(), "object: expected"), ({"a": 1}, "dict: a in it is int, no array")],
)
def test_what_is_no_dataset_is_refused(data: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        wrap(data, None)


def test_no_samples_are_an_error(tmp_path: Path) -> None:
    for data in ([], np.zeros((0, 3)), iter(())):
        with pytest.raises(SourceError, match="there are no rows"):
            mmcompile.build(data, tmp_path / "out")


def test_options_for_pictures_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--resize, --crop: for pictures"):
        mmcompile.build(TensorRows(3), tmp_path / "out", preprocess=Preprocess(resize=8, crop=8))


def test_without_a_size_it_is_that_of_the_pictures_or_256() -> None:
    made, _ = wrap(Pictures(), None)
    assert made.scan().fields[0].shape == (3, 10, 12)
    made, _ = wrap(Pictures(strange={5: (Image.new("RGB", (9, 9)), 1)}), None)
    assert made.scan().fields[0].shape == (3, 256, 256)
    assert "2 sizes from 9x9 to 10x12" in made.scan().warnings[0]


def test_a_picture_that_was_opened_gives_the_pixels_of_its_file(tmp_path: Path) -> None:
    preprocess = Preprocess(resize=7, crop=6)
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGB", "L", "P", "RGBA", "LA", "1", "CMYK"):
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (11, 13, 3), dtype=np.uint8)).convert(mode)
        data = io.BytesIO()
        image.save(data, "TIFF" if mode == "CMYK" else "PNG", **({} if mode == "CMYK" else {"exif": exif}))
        pixels, depth = decode.picture(Image.open(io.BytesIO(data.getvalue())), preprocess)
        wanted = decode.decode(data.getvalue(), "a.tif" if mode == "CMYK" else "a.png", preprocess)
        assert np.array_equal(pixels, wanted.pixels), mode
        assert depth == wanted.depth


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_calls_exit_is_an_error_with_its_row(tmp_path: Path, workers: int) -> None:
    with pytest.raises(SourceError, match="row 4: the dataset raised SystemExit: 3"):
        mmcompile.build(Pictures(strange={4: SystemExit(3)}), tmp_path / "out", workers=workers)
    with pytest.raises(SourceError, match="row 5: the dataset raised SystemExit"):
        mmcompile.build(Stream(5, SystemExit()), tmp_path / "out", workers=workers)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_length_that_no_disk_can_hold_is_refused_before_shards_are_planned(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"bytes are needed for 4,611,686,018,427,387,904 rows, its disk has "):
        mmcompile.build(Pictures(length=1 << 62), tmp_path / "out", preprocess=Preprocess(resize=9, crop=8), workers=1)
    with pytest.raises(SourceError, match=r"9,223,372,036,854,775,808 rows, as the lengths of the datasets say"):
        mmcompile.build({"train": Pictures(length=1 << 62), "val": Pictures(length=1 << 62)}, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_arrays_that_have_no_slices_are_refused_in_one_line(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        closed = file.create_dataset("x", data=np.zeros((3, 2)))
    for data in (torch.eye(3).to_sparse(), {"x": torch.eye(3).to_sparse()}, closed):
        with pytest.raises(OptionError, match=r"cannot be read in slices .*expected dense arrays or tensors, of files that are open"):
            mmcompile.build(data, tmp_path / "out")


def test_no_room_for_the_samples_of_an_iterable_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, view: Any, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dataset_module, "write_all", full)
    with pytest.raises(BuildError, match=r"\(TMPDIR\), where the samples of an iterable are written first: No space left on device"):
        mmcompile.build(Stream(5), tmp_path / "out")


def test_a_config_of_a_dataset_that_was_made_in_python_is_refused_in_one_line(tmp_path: Path) -> None:
    mmcompile.build({"x": np.zeros((3, 2))}, tmp_path / "out", workers=1)
    done = CliRunner().invoke(program, ["info", str(tmp_path / "out"), "--config"])
    assert done.exit_code == 2
    assert f"error: {tmp_path / 'out'}: was made by mmcompile.build of a dataset in Python" in done.output
    assert "Traceback" not in done.output


def test_a_time_that_is_missing_in_an_array_or_a_sample_is_named_with_its_row(tmp_path: Path) -> None:
    times = np.arange(6).astype("M8[s]")
    times[4] = "NaT"
    for data in (times, [{"when": when} for when in times]):
        with pytest.raises(SourceError, match=r"row 4: .*a time that is missing \(NaT\)"):
            mmcompile.build(data, tmp_path / "out", workers=1)


def test_names_of_classes_come_from_behind_subsets_and_joined_datasets(tmp_path: Path) -> None:
    def known(dataset: Any) -> Any:
        return wrap(dataset, None)[0].scan().classes

    assert known(Subset(Subset(Pictures(), [1, 2, 3]), [0])) == ("cat", "dog")
    assert known(ConcatDataset([Pictures(), Subset(Pictures(), [1])])) == ("cat", "dog")
    other = Pictures()
    other.classes = ("dog", "cat")
    assert known(ConcatDataset([Pictures(), other])) is None
    assert known([(Image.new("L", (5, 4)), 1)] * 3) is None


@pytest.mark.parametrize("kind", ["map", "iterable", "columns"])
def test_a_number_that_no_class_has_is_an_error_with_its_row(tmp_path: Path, kind: str) -> None:
    strange = {i: (Image.new("RGB", (10, 12)), label) for i, label in ((3, -1), (5, 2))}
    data: Any = Pictures(strange=strange)
    if kind == "iterable":
        data = Iterated([data[i] for i in range(9)])
    if kind == "columns":
        data = TensorDataset(torch.zeros(9, 3), torch.tensor([0, 1, 0, -1, 0, 2, 0, 1, 0]))
        data.classes = ["cat", "dog"]
    with pytest.raises(
        SourceError, match=r"^row 5: (label|y) is 2, and the dataset names 2 classes \(cat is 0\): expected a number below that, or -1"
    ):
        mmcompile.build(data, tmp_path / "out", preprocess=Preprocess(crop=8) if kind != "columns" else None, workers=1)


class Iterated:
    """An iterable that knows its classes."""

    classes = ("cat", "dog")

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{0: 1.0, "0": 2.0}] * 3, "the names 0 and '0' are one as text, '0': rename one"),
        ({0: np.zeros(3), "0": np.zeros(3)}, "the names 0 and '0' are one"),
        ({1: [(1.0, 2)], "1": [(1.0, 2)]}, "the names 1 and '1' are one"),
        ([{"a": 1.0}, {"a": 1.0}, {"a": 1.0, "b": 1, 2: 1}], "row 2: has a, b, 2; expected a"),
        ([{"a": 1.0}, {1: 1.0, "1": 2.0}], "row 1: the names 1 and '1' are one"),
    ],
)
def test_names_that_are_one_as_text_are_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        mmcompile.build(data, tmp_path / "out", workers=1)


def test_lists_of_samples_in_a_dict_are_splits() -> None:
    scan, found = rows({"train": [(np.zeros(2), 1.5)] * 2, "test": [(np.ones(2), 2.5)]})
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 2), ("test", 2, 3)]
    assert found["y"].tolist() == [1.5, 1.5, 2.5]
    assert rows({"a": [1, 2], "b": [3.0, 4.0]})[1]["b"].tolist() == [3.0, 4.0]


class Featured(list[Any]):
    """A list that names its columns as Hugging Face's datasets do."""

    features = MappingProxyType({"n": SimpleNamespace(dtype="int32"), "f": SimpleNamespace(dtype="float32")})


def test_numbers_that_are_not_as_the_features_say_are_an_error() -> None:
    _, found = rows(Featured([{"n": 1, "f": 0.1}, {"n": 2, "f": 0.2}]))
    assert (found["n"].dtype, found["f"].dtype, found["f"].tolist()) == (np.dtype("i4"), np.dtype("f4"), [np.float32(0.1), np.float32(0.2)])
    assert fields(wrap(Subset(Featured([{"n": 1, "f": 0.1}]), [0]), None)[0].scan())[0][:2] == ("n", "int32")
    for value in (0.5, 1 << 40):
        with pytest.raises(SourceError, match=r"row 1: n: .* is no int32, as which the dataset's features name it"):
            rows(Featured([{"n": 1, "f": 0.1}, {"n": value, "f": 0.2}]))


class Raising(Pictures):
    """A dataset of which a property raises."""

    @property
    def dataset(self) -> Any:
        raise RuntimeError("not open")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"My Images!": np.zeros(3), "my_images_": np.zeros(3)}, "My Images! and my_images_: both are the field my_images_; rename one"),
        (torch.zeros(3, dtype=torch.complex64), "x: Tensor of complex numbers; expected"),
        ([2**70], "row 0: x: a whole number beyond 64 bits; expected"),
        (np.array([[1], [1, 2]], object), "x: ndarray of Python objects; expected"),
        ({"x": np.zeros(3), "g": {"z": np.zeros(3)}}, r"dict: g in it is dict, no array: give a dict of those that are to be fields"),
        (DataLoader(TensorDataset(torch.zeros(4, 2)), 2), "DataLoader: gives batches, which would be samples: give its dataset"),
    ],
)
def test_what_is_wrong_with_names_and_numbers_is_said(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises((SourceError, OptionError), match=message):
        mmcompile.build(data, tmp_path / "out", workers=1)


def test_a_property_that_raises_is_none() -> None:
    assert wrap(Raising(), None)[0].scan().classes == ("cat", "dog")


def test_a_loader_without_batches_is_an_iterable_of_samples(tmp_path: Path) -> None:
    assert mmcompile.build(DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=None), tmp_path / "out", workers=1).samples == 4
