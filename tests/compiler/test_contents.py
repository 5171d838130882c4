"""What a folder of several kinds of files is taken for, and that nothing in it is left out without a word."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.errors import OptionError, SourceError


def fill(folder: Path, **files: int) -> Path:
    """So many images, tables and arrays in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files.get("jpg", 0)):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / f"{i}.jpg")
    for i in range(files.get("csv", 0)):
        (folder / f"t{i}.csv").write_text(f"a,b\n{i},2.5\n")
    for i in range(files.get("tar", 0)):
        with tarfile.open(folder / f"{i}.tar", "w") as archive:
            Image.new("RGB", (4, 4)).save(folder.parent / "a.png")
            archive.add(folder.parent / "a.png", f"{i}/a.png")
    for i in range(files.get("npy", 0)):
        np.save(folder / f"{i}.npy", np.arange(2.0) + i)
    return folder


def opened(folder: Path, **options: Any) -> Any:
    return open_source([str(folder)], SourceOptions(**options))


@pytest.mark.parametrize(
    ("files", "kind", "left_out"),
    [
        ({"jpg": 2, "npy": 1}, "folder", {"extension .npy": 1}),
        ({"jpg": 4, "csv": 2, "npy": 2}, "folder", {"extension .csv": 2, "extension .npy": 2}),
        ({"csv": 2, "npy": 1, "jpg": 1}, "table", {"left out (.jpg)": 1, "left out (.npy)": 1}),
        ({"npy": 4, "csv": 2, "jpg": 1}, "npy-folder", {"left out (.csv)": 2, "left out (.jpg)": 1}),
        ({"tar": 2, "csv": 1, "npy": 1}, "tar", {"beside archives": 2}),
    ],
)
def test_a_folder_is_what_most_of_it_is_by_far_and_the_rest_is_counted(
    tmp_path: Path, files: dict[str, int], kind: str, left_out: dict[str, int]
) -> None:
    found = opened(fill(tmp_path / "raw", **files))
    assert found.identity()["kind"] == kind
    scan = found.scan()
    assert (scan.left_out if kind in ("folder", "tar") else scan.counts) == left_out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"jpg": 1, "npy": 1}, r"raw: holds 1 image and 1 array \(\.npy\): say which of them are meant with --source folder or --source npy-folder"),
        ({"tar": 1, "npy": 1}, r"holds 1 array \(\.npy\) and 1 archive \(\.tar\): .* --source npy-folder or --source tar"),
        ({"tar": 4, "jpg": 1}, r"holds 4 archives \(\.tar\) and 1 image: .* --source tar or --source folder"),
        ({"npy": 3, "jpg": 2}, r"holds 3 arrays \(\.npy\) and 2 images: .* --source npy-folder or --source folder"),
        (
            {"csv": 3, "npy": 1, "jpg": 2},
            r"holds 3 tables, 2 images and 1 array \(\.npy\): .* --source table or --source folder or --source npy-folder",
        ),
    ],
)
def test_a_folder_that_is_mostly_nothing_is_refused_until_it_is_said_what_is_meant(tmp_path: Path, files: dict[str, int], message: str) -> None:
    raw = fill(tmp_path / "raw", **files)
    with pytest.raises(SourceError, match=message):
        opened(raw)
    for kind, suffix in (("folder", "jpg"), ("npy-folder", "npy"), ("table", "csv"), ("tar", "tar")):
        if suffix in files:
            scan = opened(raw, source=kind).scan()
            assert (len(scan.keys) if kind in ("folder", "tar") else scan.rows) == files[suffix]


def test_what_lies_beside_the_files_of_mnist_is_counted(tmp_path: Path) -> None:
    for name, data in (
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\0\0\0\2\0\0\0\1\0\0\0\1" + b"ab"),
        ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\2\0\1"),
    ):
        (tmp_path / name).write_bytes(data)
    for name in ("notes.txt", "README"):
        (tmp_path / name).write_text("hello")
    found = opened(tmp_path)
    assert found.identity()["kind"] == "idx"
    scan = found.scan()
    assert (scan.rows, scan.counts) == (2, {"left out (.txt)": 1, "left out (no extension)": 1})
    with pytest.raises(SourceError, match="no file in it is called as those of MNIST are"):
        opened(fill(tmp_path / "none", npy=1), source="idx")


def labelled(found: Any) -> tuple[list[tuple[str, int, int]], list[float], list[int] | None]:
    """(splits, first numbers, labels) of a folder of arrays."""
    scan = found.scan()
    rows = found.read(0, scan.rows)
    return [(s.name, s.start, s.stop) for s in scan.splits], rows["x"][:, 0].tolist(), rows["label"].tolist() if "label" in rows else None


def test_arrays_in_folders_called_like_splits_are_splits(tmp_path: Path) -> None:
    for split, count in (("val", 1), ("train", 3)):
        fill(tmp_path / "flat" / split, npy=count)
    assert labelled(opened(tmp_path / "flat")) == ([("train", 0, 3), ("val", 3, 4)], [0, 1, 2, 0], None)
    for folder, count in (("test/dog", 1), ("train/cat", 2), ("train/dog", 1), ("train/dog/deeper", 1)):
        fill(tmp_path / "classes" / folder, npy=count)
    (tmp_path / "classes" / "test" / "ant").mkdir()
    found = opened(tmp_path / "classes")
    assert labelled(found) == ([("train", 0, 3), ("test", 3, 4)], [0, 1, 0, 0], [1, 1, 2, 2])
    scan = found.scan()
    assert (scan.classes, scan.counts) == (("ant", "cat", "dog"), {"left out (.npy)": 1})
    fill(tmp_path / "classes" / "val", npy=1)
    assert labelled(found) == ([("train", 0, 3), ("val", 3, 4), ("test", 4, 5)], [0, 1, 0, 0, 0], [1, 1, 2, -1, 2])
    assert found.scan().warnings == (f"in no class folder, and so of label -1: 1 array of {tmp_path / 'classes' / 'val'}",)


def test_split_says_which_folders_of_arrays_are_splits_and_all_that_they_are_classes(tmp_path: Path) -> None:
    for folder, count in (("train", 2), ("val", 1)):
        fill(tmp_path / folder, npy=count)
    assert labelled(opened(tmp_path, split=("all=.",))) == ([], [0, 1, 0], [0, 0, 1])
    assert labelled(opened(tmp_path, split=("a=val", "b=train"))) == ([("a", 0, 1), ("b", 1, 3)], [0, 0, 1], None)
    same = opened(tmp_path).identity(), opened(tmp_path, split=("a=val",)).identity()
    assert same[0] != same[1]
    with pytest.raises(SourceError, match="nothing: no such folder, which --split names"):
        opened(tmp_path, split=("a=nothing",)).scan()
    for i in range(2):
        (tmp_path / "train" / f"{i}.npy").unlink()
    fill(tmp_path / "train" / "deep", npy=1)
    fill(tmp_path / "other", npy=1)
    with pytest.raises(SourceError, match=r"holds splits \(train, val\) beside other folders with arrays \(other\): say which are splits"):
        opened(tmp_path).scan()
    with pytest.raises(OptionError, match="--split does not go with"):
        open_source([str(tmp_path / "val" / "0.npy")], SourceOptions(split=("a=b",)))
