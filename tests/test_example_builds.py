"""The recipes that build from what other libraries wrote, each where its library is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.format.reader import Reader
from tests.compiler.builds import picture, write
from tests.test_examples import ROOT, run

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


def test_mds(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"x": "ndarray:float32:3", "label": "int"}) as writer:
        for i in range(5):
            writer.write({"x": np.full(3, i, "f4"), "label": i})
    assert "5 samples of x, label" in run(EXAMPLES / "build_from_mds.py", tmp_path / "mds", tmp_path / "out")
    assert gathered(tmp_path / "out", "x")[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_ffcv(tmp_path: Path) -> None:
    writer = pytest.importorskip("ffcv.writer")
    fields = pytest.importorskip("ffcv.fields")
    images = [(np.full((16, 16, 3), i, np.uint8), i) for i in range(5)]
    made = writer.DatasetWriter(str(tmp_path / "a.beton"), {"image": fields.RGBImageField(), "label": fields.IntField()}, num_workers=1)
    made.from_indexed_dataset(images)
    assert "5 samples of image, label" in run(EXAMPLES / "build_from_ffcv.py", tmp_path / "a.beton", tmp_path / "out", "--size", 16)
    assert gathered(tmp_path / "out", "label").tolist() == [0, 1, 2, 3, 4]
