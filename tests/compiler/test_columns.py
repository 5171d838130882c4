"""Columns of a list as fields of every kind: further pixels, boxes, lists, texts; and what does not fit."""

from __future__ import annotations

import csv
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
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import Names
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
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


def test_other_paths_of_the_same_images_are_no_further_ones(tmp_path: Path) -> None:
    path = save(tmp_path / "raw", "file_name,image_path,note,0\nimages/0.png,images/0.png,images/1.png,1\n")
    found = scan(path)
    assert found.parts == (("image", "image"),)
    assert any("columns of paths of images left out (image_path, note)" in line for line in found.counts)


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


# ---------------------------------------------------------------- boxes, lists, texts


def listed(root: Path, rows: list[dict[str, Any]], form: str = "jsonl") -> Path:
    """A list with a row for each image of `save`, with these values beside it, as JSON lines, CSV or Parquet."""
    rows = [{"file_name": f"images/{i}.png", **row} for i, row in enumerate(rows)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "jsonl":
        return save(root, "\n".join(map(json.dumps, rows)).replace(f'"{BEYOND}"', "1E+999"), "list.jsonl", len(rows))
    if form == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        save(root, "x\n1\n", "unused.txt", len(rows))
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), root / "list.parquet")
        return root / "list.parquet"
    text = io.StringIO()
    writer = csv.writer(text)
    cells = [["" if (v := row.get(name)) is None else v if isinstance(v, str | int | float) else json.dumps(v) for name in names] for row in rows]
    writer.writerows([names, *cells])
    return save(root, text.getvalue().replace(BEYOND, "1E+999"), "list.csv", len(rows))


BOXES: list[dict[str, Any]] = [
    {"boxes": [[8, 4, 12, 8], [10, 3, 17, 13]], "labels": ["b", "a"], "score": [0.5, 0.25]},
    {"boxes": [], "labels": [], "score": []},
    {"boxes": [[0, 0, 3, 3]], "labels": ["c"], "score": [1.0]},
]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_boxes_and_what_goes_with_them_are_read_from_every_form_of_list(tmp_path: Path, form: str) -> None:
    path = listed(tmp_path / "raw", BOXES, form)
    found = scan(path, {"score": {"kind": "value", "dtype": "float32"}})
    assert [(f.name, f.dtype, f.shape, f.count) for f in found.fields] == [
        ("boxes", "float32", (2, 4), "boxes_count"),
        ("score", "float32", (2,), "boxes_count"),
        ("labels", "int64", (2,), "boxes_count"),
        ("boxes_count", "int64", (), None),
    ]
    assert found.forms == (("boxes", Form()),)
    assert found.counts["boxes by column boxes, format xyxy"] == 3
    made = built(path, tmp_path / "out", {"score": {"kind": "value", "dtype": "float32"}})
    # The crop of 12 begins at (6, 2); of the third nothing is left.
    assert made["boxes"].tolist() == [[[2, 2, 6, 6], [4, 1, 11, 11]], [[0] * 4] * 2, [[0] * 4] * 2]
    assert made["labels"].tolist() == [[1, 0], [-1, -1], [-1, -1]]
    assert made["score"].tolist() == [[0.5, 0.25], [0, 0], [0, 0]]
    assert made["boxes_count"].tolist() == [2, 0, 0]
    assert verify(tmp_path / "out").ok


def test_objects_as_hugging_face_has_them_are_boxes_of_coco(tmp_path: Path) -> None:
    objects = {"id": [1, 2], "bbox": [[8.0, 4.0, 4.0, 4.0], [10.0, 3.0, 7.0, 10.0]], "category": [1, 0], "area": [16, 70]}
    rows: list[dict[str, Any]] = [{"objects": objects}, {"objects": {name: [] for name in objects}}]
    for form in ("jsonl", "parquet"):
        root = tmp_path / form
        path = listed(root, rows, form)
        found = scan(path)
        assert [f.name for f in found.fields] == ["boxes", "labels", "area", "boxes_count"]
        assert found.forms == (("boxes", Form("xywh")),)
        made = built(path, tmp_path / f"{form}.out")
        assert made["boxes"][0].tolist() == [[2, 2, 6, 6], [4, 1, 11, 11]]
        assert made["labels"].tolist() == [[1, 0], [-1, -1]]
        assert made["area"].tolist() == [[16, 70], [0, 0]]
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    note = {"info": {"features": {"objects": {"bbox": {"_type": "Sequence"}, "category": [{"_type": "ClassLabel", "names": ["cat", "dog"]}]}}}}
    table = pq.read_table(path).replace_schema_metadata({"huggingface": json.dumps(note)})
    pq.write_table(table, path)
    labels = next(f for f in scan(path).fields if f.name == "labels")
    assert labels.categories == Names(("cat", "dog"))
    again = [[{"bbox": box, "category": label} for box, label in zip(objects["bbox"], objects["category"], strict=True)], []]
    pq.write_table(pa.table({"file_name": ["images/0.png", "images/1.png"], "objects": again}), path)
    np.testing.assert_array_equal(scan(path).values["boxes"], found.values["boxes"])


def test_boxes_of_any_form_and_what_is_hardly_seen(tmp_path: Path) -> None:
    objects = {"bbox": [[0.5, 0.5, 0.5, 0.5], [0.24, 0.5, 0.1, 0.1]], "category": ["a", "b"]}
    path = listed(tmp_path / "raw", [{"objects": objects}, {"objects": objects}])
    said = {"boxes": {"format": "cxcywh", "relative": True, "min_visibility": 0.5, "max": 2}}
    assert scan(path, said).forms == (("boxes", Form("cxcywh", relative=True, min_visibility=0.5)),)
    made = built(path, tmp_path / "out", said)
    # Of 24x16 pixels the first is [6, 4, 18, 12]; the crop begins at (6, 2), and cuts more than half of the second.
    assert made["boxes"].tolist() == [[[0, 2, 12, 10], [0, 0, 0, 0]]] * 2
    assert made["labels"].tolist() == [[0, -1]] * 2
    with pytest.raises(SourceError, match="row 1: boxes: a list of 2, and max=1"):
        scan(path, {"objects": {"kind": "boxes", "max": 1}})


def test_masks_in_a_list_of_images_that_lie_elsewhere(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    save(tmp_path / "raw", "x\n")
    (tmp_path / "lists").mkdir()
    columns = {"path": [f"images/{i}.png" for i in range(3)], "mask": pa.array([ids(i) for i in range(2)] + [None], pa.binary())}
    pq.write_table(pa.table(columns), tmp_path / "lists/list.parquet")
    found = opened(tmp_path / "lists/list.parquet", images=str(tmp_path / "raw"))
    report = run(found, tmp_path / "out", Preprocess(**CROP), max_rejects=1)
    assert (report.decoded, report.rejects) == (2, 1)
    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert line.message.startswith("mask (../lists/list.parquet#2): no bytes")
    assert Reader(tmp_path / "out").gather("mask", np.arange(2))[:, 0, 0].tolist() == [0, 1]


#: Written as a number that no float is.
BEYOND = "beyond"
MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a number too large": ({"x": 300}, {"dtype": "uint8"}, "x: 300, and dtype=uint8 holds 0 to 255"),
    "a text": ({"x": "abc"}, {"dtype": "uint8"}, "x: 'abc' is no number"),
    "a float among whole numbers": ({"x": 1.5}, {"dtype": "int16"}, "x: 1.5, and dtype=int16 holds whole numbers"),
    "no value among whole numbers": ({"x": None}, {"dtype": "int16"}, "x: no value, and dtype=int16 holds whole numbers"),
    "beyond a float": ({"x": 1e6}, {"dtype": "float16"}, "x: 1000000.0, and dtype=float16 ends at 65504"),
    "beyond every float": ({"x": BEYOND}, {"dtype": "float64"}, "x: 1E+999 is beyond float64"),
    "a vector of another length": ({"x": [1, 2, 3]}, {"shape": (2,)}, "x: [1, 2, 3]: 3 numbers, and shape=2"),
    "a whole number of many digits": ({"x": 10**400}, {"dtype": "uint8"}, f"x: 1{'0' * 59}…, and dtype=uint8 holds 0 to 255"),
    "a box of many digits": ({"x": [[0, 0, 10**400, 5]]}, {"kind": "boxes"}, f"x: 1{'0' * 59}… is beyond float64"),
    "a box of texts": ({"x": [["1", "2", "3", "4"]]}, {"kind": "boxes"}, "x: '1' in a box: a list of 4 numbers"),
    "a box of truths": ({"x": [[True, False, True, True]]}, {"kind": "boxes"}, "x: true in a box: a list of 4 numbers"),
    "a box of three numbers": ({"x": [[1, 2, 3]]}, {"kind": "boxes"}, "x: [1, 2, 3] is no box"),
    "a box that ends before it begins": ({"x": [[5, 1, 3, 4]]}, {"kind": "boxes"}, "x: [5.0, 1.0, 3.0, 4.0]: its second corner before its first"),
    "a negative size": ({"x": [[5, 1, -3, 4]]}, {"kind": "boxes", "format": "xywh"}, "x: [5.0, 1.0, -3.0, 4.0]: a negative size (format=xywh)"),
    "a box that is not finite": ({"x": [[5, 1, float("inf"), 4]]}, {"kind": "boxes"}, "x: [5.0, 1.0, Infinity, 4.0]: a number that is none"),
    "a box of no numbers": ({"x": [[1, 2, 3, 4], []]}, {"kind": "boxes"}, "x: [] is no box: a list of 4 numbers"),
    "boxes of which one is none": ({"x": [[1, 2, 3, 4], 0]}, {"kind": "boxes"}, "x: 0 is no box: a list of 4 numbers"),
    "a number that Python alone writes so": ({"x": "1_0"}, {"dtype": "int32"}, "x: '1_0' is no number"),
    "digits of another script": ({"x": "\u0661"}, {"dtype": "int32"}, "x: '\u0661' is no number"),
    "a point of truths": ({"x": [[True, 2, 2]]}, {"kind": "keypoints"}, "x: [true, 2, 2]: a number that is none"),
    "a point beyond float32": ({"x": [[1e39, 2, 2]]}, {"kind": "keypoints"}, "x: [1e+39, 2, 2]: a number that is none"),
    "no list": ({"x": "[1, 2"}, {"kind": "boxes"}, "x: '[1, 2' is no list that JSON knows"),
    "a point of no kind": ({"x": [[1, 2, 3]]}, {"kind": "keypoints"}, "x: [1, 2, 3]: a point is 0 (not labelled), 1 (hidden) or 2 (to be seen)"),
    "a long text": ({"x": "größer"}, {"kind": "text", "shape": (7,)}, "x: 'größer' is of 8 bytes, and shape=7"),
    "a class of another kind": ({"x": ["a", 3]}, {"kind": "multilabel"}, "x: 3 among names of classes"),
}
GOOD = {"boxes": [[1, 2, 3, 4]], "keypoints": [[1, 2, 2]], "text": "good", "multilabel": ["a", "b"]}


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize("case", MISFITS)
def test_a_value_that_does_not_fit_is_a_reject_that_names_value_and_field(tmp_path: Path, case: str, form: str) -> None:
    bad, said, why = MISFITS[case]
    good: Any = GOOD.get(said.get("kind", ""), [1, 2] if "shape" in said else 1)
    path = listed(tmp_path / "raw", [{"x": good}, {"x": good}, bad], form)
    found = scan(path, {"x": said})
    assert list(found.faults) == [2]
    assert found.faults[2].startswith(why)
    built(path, tmp_path / "out", {"x": said}, max_rejects=1)
    index = Reader(tmp_path / "out").index
    (line,) = load_rejects(tmp_path / "out", index)
    assert (line.key, line.stage) == ("images/2.png", "value")
    assert line.message.startswith(why)


def test_a_list_of_no_points_is_a_reject_among_several(tmp_path: Path) -> None:
    path = listed(tmp_path / "raw", [{"x": [[[1, 2, 2]], []]}, {"x": [[[3, 4, 2]], [[5, 6, 1]]]}, {"x": []}], "jsonl")
    found = scan(path, {"x": {"kind": "keypoints"}})
    assert found.faults == {0: "x: [[[1, 2, 2]], []]: 0 points, expected 1"}
    assert found.values["x"].tolist() == [[[[0, 0, 0]]] * 2, [[[3, 4, 2]], [[5, 6, 1]]], [[[0, 0, 0]]] * 2]


def test_other_kinds_of_columns(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "tags": "cat|big dog",
            "ids": [5, 6, 7],
            "caption": "größer",
            "vector": [1, 2.5],
            "points": [[7, 3, 2], [1, 1, 0]],
            "kind": "x",
            "more": [1],
        },
        {"tags": "cat", "ids": [1, 2, 3], "caption": "", "vector": [3, 4], "points": None, "kind": "y", "more": []},
        {"tags": "", "ids": [1, 2, 3], "caption": "b", "vector": [0, 0], "points": [[8, 4, 1], [9, 5, 2]], "kind": "x", "more": [1, 2, 3]},
    ]
    said: dict[str, Any] = {
        "tags": {"kind": "multilabel"},
        "ids": {"dtype": "int32", "shape": (3,)},
        "caption": {"kind": "text", "shape": (10,)},
        "vector": {"kind": "value", "shape": (2,), "dtype": "float16"},
        "points": {"kind": "keypoints"},
        "kind": {"kind": "class"},
        "more": {"kind": "value", "max": 2, "overflow": "drop"},
    }
    outs = []
    for form in ("jsonl", "csv", "parquet"):
        path = listed(tmp_path / form, rows, form)
        found = scan(path, said)
        specs = {f.name: f for f in found.fields}
        assert specs["tags"].columns == Names(("big dog", "cat"))
        assert found.values["tags"].tolist() == [[1, 1], [0, 1], [0, 0]]
        assert (specs["ids"].dtype, specs["ids"].shape) == ("int32", (3,))
        assert [bytes(v).rstrip(b"\0").decode() for v in found.values["caption"]] == ["größer", "", "b"]
        assert (specs["caption"].meaning, specs["caption"].shape) == ("text", (10,))
        assert found.values["vector"].dtype == np.float16
        assert (specs["points"].meaning, specs["points"].shape) == ("keypoints", (2, 3))
        assert found.values["points"].tolist() == [[[7, 3, 2], [0, 0, 0]], [[0] * 3] * 2, [[8, 4, 1], [9, 5, 2]]]
        assert specs["kind"].categories == Names(("x", "y"))
        assert found.values["more"].tolist() == [[1, 0], [0, 0], [1, 2]]
        assert found.values["more_count"].tolist() == [1, 0, 2]
        assert found.counts["rows of more behind the first 2 of a list, dropped"] == 1
        built(path, tmp_path / f"{form}.out", said)
        outs.append(dataset(tmp_path / f"{form}.out"))
    assert outs[0] == outs[1] == outs[2]
    with pytest.raises(SourceError, match="row 3: more: a list of 3, and max=2"):
        scan(tmp_path / "csv/list.csv", {**said, "more": {"kind": "value", "max": 2}})
    assert scan(tmp_path / "csv/list.csv", {**said, "more": {"kind": "value", "max": 2}}, exclude=("images/2.png",)).values["more"].shape == (2, 2)


def test_numbers_of_classes_that_lie_far_apart_are_numbered_in_their_order(tmp_path: Path) -> None:
    path = listed(tmp_path / "raw", [{"boxes": [[1, 2, 3, 4]] * 2, "labels": [2_000_000_000, 7]}, {"boxes": [], "labels": []}])
    found = scan(path)
    assert found.values["labels"].tolist() == [[1, 0], [-1, -1]]
    assert next(f for f in found.fields if f.name == "labels").categories == Names(("7", "2000000000"))


def test_lists_of_which_nothing_is_said_stay_out_and_boxes_and_classes_have_to_match(tmp_path: Path) -> None:
    path = listed(tmp_path / "raw", [{"other": [1, 2], "labels": ["a"]}, {"other": [], "labels": []}])
    found = scan(path)
    assert found.fields == ()
    assert any("columns of several parts left out (labels, other)" in line for line in found.counts)
    path = listed(tmp_path / "two", [{"boxes": [[1, 2, 3, 4]], "labels": ["a", "b"]}, {"boxes": [], "labels": []}])
    assert scan(path).faults == {0: "labels: 2 beside 1 boxes"}


def test_numbers_beside_boxes_that_have_a_limit_of_their_own_have_a_count_of_their_own(tmp_path: Path) -> None:
    rows = [{"boxes": [[1, 2, 3, 4]] * n, "labels": ["a"] * n, "score": [0.5] * n, "tokens": list(range(n))} for n in (1, 3)]
    path = listed(tmp_path / "raw", rows)
    boxes = {"kind": "boxes", "max": 2, "overflow": "drop"}
    found = scan(path, {"boxes": boxes, "score": {"kind": "value"}, "tokens": {"kind": "value", "max": 4}})
    counted = {f.name: (f.shape[0], f.count) for f in found.fields if f.count is not None}
    assert counted == dict.fromkeys(("boxes", "labels", "score"), (2, "boxes_count")) | {"tokens": (4, "tokens_count")}
    assert found.values["tokens"].tolist() == [[0, 0, 0, 0], [0, 1, 2, 0]]
    assert (found.values["tokens_count"].tolist(), found.values["boxes_count"].tolist()) == ([1, 3], [1, 2])
