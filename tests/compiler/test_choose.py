"""Which source reads a RAW, and which options it takes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mmcompile.compiler.sources import choose
from mmcompile.compiler.sources.choose import KINDS, Kind, SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import OptionError, SourceError
from tests.compiler.builds import picture, write


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
    with pytest.raises(OptionError, match=re.escape(", ".join(kind.name for kind in KINDS)) + ", not 'nope'"):
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


def test_a_folder_of_images_is_one_whatever_it_is_called_or_holds_beside(tmp_path: Path) -> None:
    write(tmp_path, {"photos.zarr/cat/1.png": picture(1), "photos.zarr/state.json": b"{}", "photos.zarr/notes.mds": b"1"})
    assert len(open_source([str(tmp_path / "photos.zarr")], SourceOptions()).scan().keys) == 1
