"""Columns of a list as fields of every kind: further pixels, boxes, lists, texts; and what does not fit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.manifest import ManifestSource
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset, inline, run, write

CROP = {"crop": 12}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def picture(seed: int) -> bytes:
    return encoded(np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8))


def ids(seed: int) -> bytes:
    return encoded(np.full((16, 24), seed, np.uint8))


def encoded(array: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def save(root: Path, text: str, name: str = "list.csv", n: int = 3) -> Path:
    write(root, {f"images/{i}.png": picture(i) for i in range(n)})
    write(root, {f"masks/{i}.png": ids(i) for i in range(n)})
    write(root, {f"right/{i}.png": picture(100 + i) for i in range(n)})
    (root / name).write_text(text)
    return root / name


def opened(raw: Path | str, fields: dict[str, Any] | None = None, **options: Any) -> ManifestSource:
    found = open_source([str(raw)], SourceOptions(fields=tuple((fields or {}).items()), **options))
    assert isinstance(found, ManifestSource)
    return found


def scan(raw: Path | str, fields: dict[str, Any] | None = None, **options: Any) -> Scan:
    return opened(raw, fields, **options).scan()


def built(raw: Path, out: Path, fields: dict[str, Any] | None = None, max_rejects: int = 0, **options: Any) -> dict[str, Any]:
    run(opened(raw, fields, **options), out, Preprocess(**CROP, fields=fields or {}), max_rejects=max_rejects)
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


PATHS = "file_name,mask_file_name,right,label\nimages/0.png,masks/0.png,right/0.png,a\nimages/1.png,masks/1.png,right/1.png,b\n"


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_of_paths_are_further_pixels_by_their_names(tmp_path: Path, form: str) -> None:
    path = save(tmp_path / "raw", PATHS)
    names, *rows = (line.split(",") for line in PATHS.splitlines())
    if form == "tsv":
        path = save(tmp_path / "raw", PATHS.replace(",", "\t"), "list.tsv")
    elif form == "jsonl":
        path = save(tmp_path / "raw", "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows), "list.jsonl")
    elif form == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), tmp_path / "raw/l.parquet"
        )
        path = tmp_path / "raw/l.parquet"
    found = scan(path)
    assert found.parts == (("image", "image"), ("mask", "mask"), ("right", "image"))
    assert [list(keys) for keys in found.keys.beside] == [[b"masks/0.png", b"masks/1.png"], [b"right/0.png", b"right/1.png"]]
    assert found.classes == ("a", "b")
    made = built(path, tmp_path / "out")
    assert list(made) == ["image", "mask", "right", "label"]
    assert made["mask"].reshape(2, -1).tolist() == [[0] * 144, [1] * 144]
    np.testing.assert_array_equal(made["right"][0], np.asarray(Image.open(tmp_path / "raw/right/0.png"))[2:14, 6:18].transpose(2, 0, 1))
    assert verify(tmp_path / "out").ok


def test_what_is_said_of_a_column_makes_it_pixels_and_each_has_its_own_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "raw", "path,label,other,third\n1.png,1.png,1.png,2.png\n0.png,2.png,0.png,0.png\n")
    (tmp_path / "raw/more").mkdir()
    (tmp_path / "raw/right").rename(tmp_path / "raw/more/right")
    path.write_text("path,label,other\nimages/1.png,masks/1.png,more/right/1.png\nimages/0.png,masks/2.png,more/right/0.png\n")
    said = {"other": {"kind": "image", "mode": "gray"}, "label": {"kind": "mask", "dtype": "int16"}}
    made = built(path, tmp_path / "out", said)
    assert list(made) == ["image", "label", "other"]
    assert made["label"].dtype == np.int16
    assert made["label"][:, 0, 0].tolist() == [1, 2]
    assert made["other"].shape == (2, 1, 12, 12)
    assert scan(path, {"label": {"kind": "mask"}}).parts == (("image", "image"), ("label", "mask"))
    assert scan(path).parts == (("image", "image"), ("label", "mask"))
    with pytest.raises(OptionError, match=r"--field nothing: .*list\.csv has no such column"):
        scan(path, {"nothing": {"kind": "mask"}})


def test_files_that_are_not_there_are_named_by_row_and_column_before_anything_is_decoded(tmp_path: Path) -> None:
    path = save(tmp_path / "raw", PATHS + "images/2.png,masks/9.png,,a\nimages/7.png,masks/2.png,../right/0.png,b\n")
    with pytest.raises(SourceError) as caught:
        scan(path)
    for said in (
        "row 3, column mask_file_name: masks/9.png: no such file",
        "row 3, column right: no path",
        "row 4: images/7.png: no such file",
        "row 4, column right: ../right/0.png leaves the folder",
        "4 rows of",
    ):
        assert said in str(caught.value)
    assert scan(path, exclude=("images/2.png", "images/7.png")).keys == [b"images/0.png", b"images/1.png"]


def test_images_of_several_columns_lie_in_parquet_files_as_hugging_face_writes_them(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for part in range(2):
        rows = range(3 * part, 3 * part + 3)
        columns = {
            "annotation": pa.array([{"bytes": ids(i), "path": f"{i}.png"} for i in rows], held),
            "image": pa.array([{"bytes": picture(i), "path": None} for i in rows], held),
            "depth": pa.array([picture(50 + i) for i in rows], pa.binary()),
            "label": pa.array(list(rows), pa.int64()),
        }
        note = {"info": {"features": {"annotation": {"_type": "Image"}, "image": {"_type": "Image"}}}}
        table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(note)})
        (tmp_path / "raw").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"raw/train-0000{part}-of-00002.parquet", row_group_size=2)
    made = built(tmp_path / "raw", tmp_path / "out")
    assert list(made) == ["image", "annotation", "depth", "label"]
    assert made["annotation"][:, 3, 3].tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(made["depth"][4], np.asarray(Image.open(io.BytesIO(picture(54))))[2:14, 6:18].transpose(2, 0, 1))
    report = run(opened(tmp_path / "raw"), tmp_path / "two", Preprocess(**CROP), workers=2)
    assert report.decoded == 6
    assert dataset(tmp_path / "two") == dataset(tmp_path / "out")
