"""Which source reads a RAW, and which options it takes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile import MMapShardDataset, Preprocess, Raw
from mmcompile.compiler.driver import build
from mmcompile.compiler.rowrun import Here
from mmcompile.compiler.sources import choose
from mmcompile.compiler.sources.choose import KINDS, Kind, SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import OptionError, SourceError
from tests.compiler.builds import dataset, inline, make_raw, picture, run, write


def test_each_kind_takes_options_that_there_are() -> None:
    names = {f.name for f in dataclasses.fields(SourceOptions)} - {"source"}
    assert all(kind.takes <= names for kind in KINDS)
    assert set.union(*(set(kind.takes) for kind in KINDS)) == names, "an option that no kind takes"
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_an_option_counts_as_given_when_it_is_not_as_it_is_without_a_word() -> None:
    assert SourceOptions().given() == ()
    assert SourceOptions(source="folder", include=(), hidden=False).given() == ()
    assert SourceOptions(include=("*.png",), hidden=True, compat="torchvision").given() == ("include", "hidden", "compat")


def test_options_that_a_kind_does_not_take_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Kind("bare", lambda raw: raw[0] == "bare", lambda raw, options: pytest.fail("made"), frozenset())
    monkeypatch.setattr(choose, "KINDS", (bare, *KINDS))
    with pytest.raises(
        OptionError, match=r"--include does not go with this RAW, which is read as bare: leave it out, or give another --source \("
    ) as e:
        open_source(["bare"], SourceOptions(include=("*",)))
    assert e.value.details["options"] == ["include"]
    with pytest.raises(OptionError, match=r"--exclude, --hidden do not go with --source bare: leave them out, or ") as e:
        open_source(["raw"], SourceOptions(source="bare", hidden=True, exclude=("x",)))
    assert e.value.details["options"] == ["exclude", "hidden"]
    assert "\n" not in str(e.value)
    monkeypatch.setattr(choose, "KINDS", (bare,))
    with pytest.raises(OptionError, match=r"--compat does not go with --source bare: leave it out(\n|$)"):
        open_source(["raw"], SourceOptions(source="bare", compat="torchvision"))


def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match=re.escape(", ".join(kind.name for kind in KINDS)) + ", found 'nope'"):
        open_source(["raw"], SourceOptions(source="nope"))


def test_a_folder_is_listed_as_torchvision_lists_it_where_that_is_asked_for(tmp_path: Path) -> None:
    found = open_source([str(tmp_path)], SourceOptions(compat="torchvision"))
    assert isinstance(found, FolderSource)
    assert found.hidden
    assert found.extensions is not None
    assert ".webp" in found.extensions
    plain = open_source([str(tmp_path)], SourceOptions())
    assert isinstance(plain, FolderSource)
    assert not plain.hidden
    assert plain.extensions is None


@pytest.mark.parametrize(
    ("files", "given", "said"),
    [
        ({"f.h5": b"\x89HDF\r\n\x1a\n..."}, "f.h5", "is an HDF5 file: .*mmcompile.build.dataset, out.*build_from_hdf5.py"),
        ({"data.bin": b"\x89HDF\r\n\x1a\n..."}, "data.bin", "is an HDF5 file"),
        ({"a/.zarray": b"{}", "a/0.0": b"1"}, "a", "is a Zarr array: .*build_from_zarr.py"),
        ({"a/data.mdb": b"1", "a/lock.mdb": b"1"}, "a", "is an LMDB: .*build_from_lmdb.py"),
        ({"a.beton": b"1"}, "a.beton", "is a file of FFCV: .*build_from_ffcv.py"),
        ({"a/index.json": b'{"shards": []}', "a/shard.00000.mds": b"1"}, "a", "is a folder of MDS: .*build_from_mds.py"),
        ({"a/state.json": b"{}", "a/data-00000-of-00001.arrow": b"1"}, "a", "saved by Hugging Face's datasets: .*build_from_huggingface.py"),
        ({"a.pt": b"1"}, "a.pt", "is no folder, list, table, array or archive; in Python mmcompile.build"),
    ],
)
def test_what_is_read_in_python_only_says_so(tmp_path: Path, files: dict[str, bytes], given: str, said: str) -> None:
    write(tmp_path, files)
    with pytest.raises(SourceError, match=said) as caught:
        open_source([str(tmp_path / given)], SourceOptions())
    recipe = re.search(r"scripts/examples/\S+\.py", str(caught.value))
    assert recipe is None or (Path(__file__).parents[2] / recipe[0]).exists()


def test_several_raw_of_different_kinds_are_refused_as_what_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2)))
    write(tmp_path, {"raw/cat/1.png": picture(1), "a.pt": b"1"})
    for names, message in (
        (("x.npy", "x.npz"), "x.npy is read as npy, and .*x.npz as npz: several RAW have to be of one kind"),
        (("raw", "x.npy"), "raw is read as folder, and .*x.npy as npy"),
        (("x.npy", "a.pt"), "a.pt is no folder, list, table, array or archive"),
    ):
        with pytest.raises(SourceError, match=message):
            open_source([str(tmp_path / name) for name in names], SourceOptions())


def test_a_folder_of_images_is_one_whatever_it_is_called_or_holds_beside(tmp_path: Path) -> None:
    write(tmp_path, {"photos.zarr/cat/1.png": picture(1), "photos.zarr/state.json": b"{}", "photos.zarr/notes.mds": b"1"})
    assert len(open_source([str(tmp_path / "photos.zarr")], SourceOptions()).scan().keys) == 1


def test_options_of_raw_are_given_in_python_as_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, other = make_raw(tmp_path / "raw", 3), make_raw(tmp_path / "other", 2, seed=50)
    report = run(Raw([raw, str(other)], split=[f"train={raw}", f"val={other}"], exclude="*.jpg"), tmp_path / "out")
    assert report.splits == {"train": 4, "val": 2}
    splits = (f"train={raw}", f"val={other}")
    run(open_source([str(raw), str(other)], SourceOptions(split=splits, exclude=("*.jpg",))), tmp_path / "same")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "same")
    run(Raw(tmp_path / "out", where="split == 'val'", classes_from=tmp_path / "out"), tmp_path / "some")
    assert len(MMapShardDataset(tmp_path / "some")) == 2
    run(Raw(tmp_path / "out", rows=np.array([5, 0])), tmp_path / "picked")
    (tmp_path / "rows").write_text("0\n5\n")
    run(Raw(tmp_path / "out", rows=tmp_path / "rows"), tmp_path / "listed")
    assert dataset(tmp_path / "picked") == dataset(tmp_path / "listed")
    for given, wanted in (("a, b", ("a", "b")), ('"a,b",c', ("a,b", "c")), (",", ()), (["a,b"], ("a,b",)), ("x=a+b,label", ("x=a+b", "label"))):
        assert Raw("raw", columns=given).columns == wanted
    assert Raw("raw", shape=(28, 3)).shape == Raw("raw", shape="28x3").shape == "28x3"
    assert Raw("t.csv", split_by=["ts=2023-01-01", "2024-01-01"]).split_by == Raw("t.csv", split_by="ts=2023-01-01,2024-01-01").split_by


def test_what_compat_takes_of_raw_is_that_of_the_preprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw = make_raw(tmp_path / "raw", 1)
    (raw / "cat" / ".0.png").write_bytes((raw / "cat" / "0.png").read_bytes())
    assert run(Raw(raw, exclude="dog/*"), tmp_path / "out", Preprocess(crop=8, compat="torchvision")).samples == 2
    with pytest.raises(OptionError, match="Raw: compat 'torchvision' is that of the Preprocess: give it there"):
        build(Raw(raw, compat="torchvision"), tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": 3}, "where must be a text, found 3"),
        ({"hidden": "yes"}, "hidden must be True or False, found 'yes'"),
        ({"split": {"train": "a"}}, "split must be a list of texts"),
        ({"columns": [1]}, r"columns must be a list of texts, found \[1\]"),
        ({"rows": b"ab"}, "rows must be a file, or numbers of rows, found b'ab'"),
        ({"rows": ""}, "rows must be a file, or numbers of rows, found ''"),
        ({"classes_from": ""}, "classes_from must be a path, found ''"),
        ({"rows": [0.5]}, r"rows must be a file, or numbers of rows, found \[0.5\]"),
        ({"split_by": [3]}, r"split_by must be a text, found \[3\]"),
        ({"as_": 1}, "as_ must be a list of texts, found 1"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Raw("raw", **options)


def test_none_is_an_option_that_was_not_given() -> None:
    assert SourceOptions(**{f.name: None for f in dataclasses.fields(SourceOptions)}) == SourceOptions()  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [[], "", [3], {"x": "y"}])
def test_raw_is_paths(tmp_path: Path, places: Any) -> None:
    with pytest.raises(OptionError, match="Raw: expected a path or URL, or a list of some, not "):
        build(Raw(places), tmp_path / "out")


def test_rows_given_as_numbers_are_held_against_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    run(make_raw(tmp_path / "raw", 2), tmp_path / "out")
    for rows, message in (([4], "entry 1: there is no row 4; expected 0 to 3"), ([1, -1], "entry 2: there is no row -1"), ([1, 1], "are both row 1")):
        with pytest.raises(OptionError, match=f"--rows: .*{message}"):
            build(Raw(tmp_path / "out", rows=rows), tmp_path / "none")
    with pytest.raises(OptionError, match="--rows: expected numbers of rows, found 1,000,000"):
        build(Raw(tmp_path / "out", rows=[10**30]), tmp_path / "none")


def test_a_path_as_bytes_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"expected a path as str or Path, not bytes \(b'raw'\)"):
        build(b"raw", tmp_path / "out")


def test_a_dataset_that_says_shape_and_dtype_of_its_samples_is_read_item_by_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    run(make_raw(tmp_path / "raw", 2), tmp_path / "out")
    monkeypatch.setattr("mmcompile.compiler.rowbuild.start_readers", lambda source, scratch, workers: (Here(), source, ""))
    opened = MMapShardDataset(tmp_path / "out", transform=lambda image: image.flip(-1))
    build(opened, tmp_path / "flipped")
    flipped = MMapShardDataset(tmp_path / "flipped")
    assert [int(flipped[i][1]) for i in range(4)] == [0, 0, 1, 1]
    assert all(torch.equal(flipped[i][0], opened[i][0]) for i in range(4))
