from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.format.npy import ALIGN, hash_bytes
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import pair_hash
from mmcompile.format.verify import verify
from tests.format.builders import GOLDEN, golden_script, tree

OLDER, CURRENT = "ee57ce7c471164a7441aed97b46d4552", "275836e6e9b8a79c1c3e52812ddffbff"
#: Written out by hand from the rule in make_golden.py: pixel number p of the dataset is p * 7 % 251.
IMAGES = np.array([p * 7 % 251 for p in range(300)], np.uint8).reshape(5, 3, 4, 5)


def test_the_script_still_writes_the_same_bytes(tmp_path: Path) -> None:
    golden_script().main(tmp_path)
    assert tree(tmp_path) == tree(GOLDEN)


@pytest.mark.parametrize("name", ["labelled", "bfloat16"])
def test_it_verifies(name: str) -> None:
    report = verify(GOLDEN / name)
    assert report.ok
    assert (report.extra, report.misnamed) == ((), ())


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_every_value_of_the_labelled_dataset(engine: str) -> None:
    reader = Reader(GOLDEN / "labelled", engine=engine)
    assert reader.generation == CURRENT
    assert len(reader) == 5
    assert (reader.column("image") == IMAGES).all()
    assert reader.column("label").tolist() == [0, 0, 1, 1, 1]
    assert reader.classes == ("cat", "d\udcf6g")
    image, label = reader.index.fields
    assert (image.dtype, image.shape, image.layout, image.scale) == ("uint8", (3, 4, 5), "chw", 255.0)
    assert image.normalize == ((0.5, 0.25, 0.125), (0.5, 0.5, 2.0))
    assert (label.dtype, label.shape, label.meaning, label.layout, label.normalize) == ("int64", (), "class", None, None)
    assert [(s.name, s.start, s.stop) for s in reader.index.splits] == [("train", 0, 3), ("val", 3, 5)]
    assert reader.index.settings == {"golden": 1}
    assert reader.index.versions == {"numpy": "2"}
    assert reader.starts.tolist() == [0, 3, 5]
    assert reader.keys(0) + reader.keys(1) == [b"cat/a.png", b"cat/b.jpg", b"d\xf6g/1.png", b"d\xf6g/2.png", b"d\xf6g/\xff.png"]


def test_every_value_of_its_provenance() -> None:
    reader = Reader(GOLDEN / "labelled")
    for shard, start in ((0, 0), (1, 3)):
        for i, record in enumerate(reader.samples(shard)):
            row = start + i
            assert (record["width"], record["height"], record["orientation"], record["depth"]) == (50 + row, 40, 1, 8)
            assert (record["mode"], record["format"], record["flags"]) == (b"RGB", b"PNG", 1 << i)
            assert (record["source_size"], pair_hash(record["source_hash"])) == (8, hash_bytes(b"source %d" % row))
            assert record["sum"].tolist() == [int(c.sum(dtype=np.int64)) for c in IMAGES[row]]
            assert record["sum_squares"].tolist() == [int((c.astype(int) ** 2).sum()) for c in IMAGES[row]]
    assert [f"{h:016x}" for h in reader.samples(0)["row_hash"].tolist()] == ["4d8b7aba493ee022", "251faff2421b545d", "cf35d0d74572407c"]


def test_its_statistics_are_those_of_the_pixels() -> None:
    index = Reader(GOLDEN / "labelled").index
    for split in index.splits:
        values = IMAGES[split.start : split.stop] / 255
        entry = index.statistics[split.name]["image"]
        assert entry["pixels"] == values[:, 0].size
        assert entry["mean"] == pytest.approx(values.mean((0, 2, 3)).tolist(), rel=1e-12)
        assert entry["std"] == pytest.approx(values.std((0, 2, 3)).tolist(), rel=1e-12)


def test_its_rejects() -> None:
    rejects = load_rejects(GOLDEN / "labelled", Reader(GOLDEN / "labelled").index)
    assert [(r.key, r.size, r.stage, r.code, r.error) for r in rejects] == [
        ("cat/broken.png", 12, "decode", "truncated", "OSError"),
        ("d\udcf6g/big.png", 7, "geometry", "too-large", None),
    ]
    assert rejects[0].source_hash == hash_bytes(b"broken image")


def test_its_older_generation() -> None:
    reader = Reader(GOLDEN / "labelled", generation=OLDER)
    assert (reader.column("image") == IMAGES[:3]).all()
    assert [(s.name, s.start, s.stop) for s in reader.index.splits] == [("all", 0, 3)]
    assert reader.index.rejects_file is None


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_every_value_of_the_bfloat16_dataset(engine: str) -> None:
    reader = Reader(GOLDEN / "bfloat16", engine=engine)
    (field,) = reader.index.fields
    assert (field.dtype, field.shape, field.layout, field.sample_shape, reader.classes) == ("bfloat16", (4, 5, 2), "hwc", (2, 4, 5), None)
    stored = reader.column("image")
    assert stored.dtype == np.uint16
    values = (stored.astype(np.uint32) << 16).view(np.float32)
    assert (values == np.array([(v - 60) / 4 for v in range(120)], np.float32).reshape(3, 4, 5, 2)).all()
    assert reader.keys(0) == [b"1.png", b"sub/2.png", b"sub/3.png"]
    entry = reader.index.statistics["all"]["image"]
    assert entry["mean"] == values.astype(float).mean((0, 1, 2)).tolist()
    assert entry["std"] == pytest.approx(values.astype(float).std((0, 1, 2)).tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["labelled", "bfloat16"])
def test_numpy_and_json_alone_read_it(name: str) -> None:
    root = GOLDEN / name
    index: dict[str, Any] = json.loads((root / "index.json").read_bytes())
    table = np.load(root / "shards" / f"table-{index['table']}.npy", mmap_mode="r")
    assert table["rows"].sum() == index["samples"]
    for kind in table.dtype.names[1:]:
        for record in table:
            path = root / "shards" / f"{kind}-{record[kind][0]:016x}{record[kind][1]:016x}.npy"
            array = np.load(path, mmap_mode="r")
            assert array.offset % ALIGN == 0
            assert kind == "keys" or len(array) == record["rows"]
    images = np.concatenate([np.load(root / "shards" / f"image-{a:016x}{b:016x}.npy") for a, b in table["image"].tolist()])
    assert (images == Reader(root).column("image")).all()
