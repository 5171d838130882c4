"""The recipes that build from what other libraries wrote, each where its library is installed."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.format.reader import Reader
from tests import beton
from tests.compiler.builds import picture, write
from tests.test_examples import ENVIRONMENT, ROOT, run

EXAMPLES = ROOT / "scripts" / "examples"


def gathered(out: Path, name: str) -> Any:
    reader = Reader(out)
    return reader.gather(name, np.arange(len(reader)))


def pixels(seed: int) -> Any:
    return np.asarray(Image.open(io.BytesIO(picture(seed)))).transpose(2, 0, 1)


def test_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"]), "text": datasets.Value("string")})
    rows = {"image": [{"bytes": picture(i), "path": None} for i in range(6)], "label": [0, 1] * 3, "text": ["?"] * 6}
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=part, test=part.select(range(2))).save_to_disk(str(tmp_path / "hf"))
    said = run(EXAMPLES / "build_from_huggingface.py", tmp_path / "hf", tmp_path / "out", "--keep", "image,label", "--workers", 2)
    assert "8 samples of image, label; classes ('a', 'b')" in said
    assert [(s.name, s.stop) for s in Reader(tmp_path / "out").index.splits] == [("train", 6), ("test", 8)]
    assert np.array_equal(gathered(tmp_path / "out", "image")[5], pixels(5))


def test_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    values = np.random.default_rng(0).normal(size=(100, 3))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/x"], file["data/label"], file["data/other"] = values, np.arange(100) % 5, np.zeros(7)
    said = run(EXAMPLES / "build_from_hdf5.py", tmp_path / "a.h5", tmp_path / "out", "--group", "data", "--keep", "x,label")
    assert "100 samples of x, label" in said
    assert np.array_equal(gathered(tmp_path / "out", "x"), values)


def test_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    values = np.random.default_rng(0).normal(size=(100, 3)).astype("f4")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    for name, array in (("x", values), ("label", np.arange(100) % 5)):
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(30, *array.shape[1:]))[:] = array
    assert "100 samples" in run(EXAMPLES / "build_from_zarr.py", tmp_path / "a.zarr", tmp_path / "out", "--workers", 2)
    assert np.array_equal(gathered(tmp_path / "out", "x"), values)


def test_lmdb(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for i in range(6):
            transaction.put(f"{('dog', 'cat')[i % 2]}/{i}".encode(), picture(i))
    said = run(EXAMPLES / "build_from_lmdb.py", tmp_path / "db", tmp_path / "out", "--workers", 2)
    assert "6 samples in classes ('cat', 'dog'), read by 2 processes" in said
    assert np.array_equal(gathered(tmp_path / "out", "image"), np.stack([pixels(i) for i in (1, 3, 5, 0, 2, 4)]))


def test_yolo(tmp_path: Path) -> None:
    write(tmp_path / "raw", {f"images/{i}.png": picture(i) for i in range(3)} | {"labels/1.txt": b"2 0.5 0.5 0.25 0.125\n0 0.1 0.2 0.3 0.4\n"})
    said = run(EXAMPLES / "build_from_yolo.py", tmp_path / "raw", tmp_path / "out", "--size", 8, "--most", 4, "--workers", 2)
    assert "3 samples of image, boxes, read by 2 processes" in said
    boxes = gathered(tmp_path / "out", "boxes")
    assert boxes.shape == (3, 4, 5)
    assert np.array_equal(boxes[1, :3], np.array([[2, 0.5, 0.5, 0.25, 0.125], [0, 0.1, 0.2, 0.3, 0.4], [-1] * 5], "f4"))


#: What streaming reads it leaves open, and its end is told as a warning.
leaves_files_open = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def of_chw(image: Any) -> Any:
    return np.asarray(image).transpose(2, 0, 1)


MDS_COLUMNS = {"image": "jpeg", "exact": "png", "file": "bytes", "img": "ndarray:uint8:18,24,3", "label": "int", "weight": "float32", "text": "str"}


def write_mds(folder: Path, rows: range, **more: Any) -> None:
    """Samples with every column that becomes a field, and one of text, in several shards."""
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder), columns=MDS_COLUMNS, size_limit=1 << 14, **more) as writer:
        for i in rows:
            image, file = Image.fromarray(beton.photo(i)), io.BytesIO()
            image.save(file, "BMP")
            parts = {
                "image": image,
                "exact": image,
                "file": file.getvalue(),
                "img": beton.photo(i),
                "label": i % 3,
                "weight": np.float32(i / 7),
                "text": "?",
            }
            writer.write(parts)
    assert len(list(folder.glob("shard.*"))) > 1


MDS_KEPT = ("--keep", "image,exact,file,img,label,weight")


def same_as_mds(out: Path, start: int, **where: str) -> None:
    """The rows from `start` on are what the library itself reads from a folder, and what was written into it."""
    streaming = pytest.importorskip("streaming")
    dataset = streaming.StreamingDataset(**where, batch_size=1)
    for i in range(dataset.num_samples):
        read = dataset[i]
        assert np.array_equal(gathered(out, "image")[start + i], of_chw(read["image"]))
        for name in ("exact", "file"):
            assert np.array_equal(gathered(out, name)[start + i], of_chw(beton.photo(start + i)))
        assert np.array_equal(gathered(out, "img")[start + i], read["img"])
        assert gathered(out, "label")[start + i] == read["label"] == (start + i) % 3
        assert gathered(out, "weight")[start + i] == read["weight"]


@leaves_files_open
def test_mds(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", range(40))
    said = run(EXAMPLES / "build_from_mds.py", tmp_path / "mds", tmp_path / "out", *MDS_KEPT, "--workers", 2)
    assert "40 samples of " in said
    assert "read by 2 processes" in said
    assert {f.name: (f.dtype, f.meaning) for f in Reader(tmp_path / "out").index.fields} == {
        **dict.fromkeys(("exact", "file", "image", "img"), ("uint8", "image")),
        **{"label": ("int64", "class"), "weight": ("float32", "value")},
    }
    same_as_mds(tmp_path / "out", 0, local=str(tmp_path / "mds"))


@leaves_files_open
def test_mds_of_splits_that_are_compressed(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds" / "train", range(30), compression="zstd")
    write_mds(tmp_path / "mds" / "val", range(30, 50), compression="zstd")
    before = sorted(tmp_path.glob("mds/*/*"))
    words = (EXAMPLES / "build_from_mds.py", tmp_path / "mds", tmp_path / "out", *MDS_KEPT, "--workers", 2)
    refused = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=300)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("shards that are compressed need --cache DIR")
    assert "50 samples of " in run(*words, "--cache", tmp_path / "cache")
    assert sorted(tmp_path.glob("mds/*/*")) == before
    assert [(s.name, s.start, s.stop) for s in Reader(tmp_path / "out").index.splits] == [("train", 0, 30), ("val", 30, 50)]
    for name, start in (("train", 0), ("val", 30)):
        same_as_mds(tmp_path / "out", start, remote=str(tmp_path / "mds" / name), local=str(tmp_path / "again" / name))


#: Not imported here: see beton.
needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="could not import 'ffcv'")
FFCV_KEPT = ("--keep", ",".join(beton.FIELDS))


def by_ffcv(verb: str, **words: Any) -> None:
    run("-m", "tests.beton", verb, json.dumps(words, default=str))


def same_as_ffcv(out: Path, file: Path, sizes: list[tuple[int, int]], size: int | None = None) -> None:
    """The dataset is what FFCV's own loader reads from the file, and what was written into it."""
    by_ffcv("read", path=file, size=size)
    read, rows = np.load(f"{file}.npz"), beton.rows(sizes)
    assert np.array_equal(gathered(out, "image"), read["image"].transpose(0, 3, 1, 2))
    for name in ("label", "weight"):
        assert gathered(out, name).tolist() == read[name][:, 0].tolist() == [row[name] for row in rows]
    assert np.array_equal(gathered(out, "vector"), read["vector"])
    assert np.array_equal(gathered(out, "vector"), np.stack([row["vector"] for row in rows]))


@needs_ffcv
@pytest.mark.parametrize("how", [{"write_mode": "raw"}, {"write_mode": "jpg", "jpeg_quality": 90}])
def test_ffcv_of_one_size(tmp_path: Path, how: dict[str, Any]) -> None:
    file, out, sizes = tmp_path / "a.beton", tmp_path / "out", [(24, 18)] * 150
    by_ffcv("write", path=file, sizes=sizes, how=how)
    assert "150 samples of image, label, weight, vector" in run(EXAMPLES / "build_from_ffcv.py", file, out, *FFCV_KEPT)
    same_as_ffcv(out, file, sizes)
    exact = np.array_equal(gathered(out, "image"), np.stack([of_chw(row["image"]) for row in beton.rows(sizes)]))
    assert exact == (how["write_mode"] == "raw")


@needs_ffcv
def test_ffcv_of_several_sizes(tmp_path: Path) -> None:
    file, out, sizes = tmp_path / "a.beton", tmp_path / "out", [(24 + i % 5, 18 + i % 3) for i in range(70)]
    by_ffcv("write", path=file, sizes=sizes, how={"write_mode": "smart", "smart_threshold": 1000})
    words = (EXAMPLES / "build_from_ffcv.py", file, out, *FFCV_KEPT)
    refused = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=300)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("images of several sizes need --size")
    assert "70 samples of image, label, weight, vector" in run(*words, "--size", 16)
    same_as_ffcv(out, file, sizes, 16)
