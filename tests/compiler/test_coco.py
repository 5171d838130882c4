"""COCO's annotations: which classes each image shows, and what is wrong with a file."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.compiler.sources import Scan, jsonparts
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.coco import CocoSource
from mmcompile.compiler.sources.jsonparts import list_members
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import Names
from mmcompile.format.reader import Reader
from tests.compiler.builds import inline, picture, run, write

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "ant"}]


def document(n: int = 5, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = [{"id": 100 - i, "file_name": f"{i}.png", "width": 10, "height": 12} for i in range(n)]
    annotations = [
        {
            "id": i,
            "image_id": 100 - int(rng.integers(0, n - 1)),
            "category_id": CATEGORIES[int(rng.integers(0, 2))]["id"],
            "bbox": [0, 0, 5, 5],
            "area": 25,
            "iscrowd": 0,
            "segmentation": [[0, 0, 5, 0, 5, 5]],
        }
        for i in range(3 * n)
    ]
    return {"info": {"year": 2017}, "licenses": [{"id": 1}], "images": images, "annotations": annotations, "categories": CATEGORIES}


def save(root: Path, made: Any, name: str = "annotations/instances_val.json", images: str = "val") -> Path:
    write(root, {f"{images}/{i}.png": picture(i) for i in range(5)})
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    return path


def scan(raw: Path, **options: Any) -> Scan:
    found = open_source([str(raw)], SourceOptions(**options))
    assert isinstance(found, CocoSource)
    return found.scan()


def test_classes_of_each_image_are_those_that_pycocotools_finds(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    path = save(tmp_path, document())
    with contextlib.redirect_stdout(io.StringIO()):
        oracle = coco.COCO(str(path))
    found = scan(path)
    labels, objects = found.fields
    assert (labels.name, labels.dtype, labels.shape) == ("labels", "uint8", (3,))
    assert labels.columns is not None
    assert labels.columns.listed == ("cat", "dog", "ant")
    assert objects.name == "objects"
    for i, row in enumerate(found.values):
        anns = oracle.loadAnns(oracle.getAnnIds(imgIds=[100 - i]))
        assert row["labels"].tolist() == [int(number in {ann["category_id"] for ann in anns}) for number in (3, 7, 90)]
        assert row["objects"] == len(anns)
    assert found.counts == {"images of instances_val.json": 5, "annotations, without boxes and masks": 15, "images without an annotation": 1}


def test_it_builds_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    path = save(tmp_path / "raw", document())
    assert run(open_source([str(path)], SourceOptions()), tmp_path / "out").decoded == 5
    reader, expected = Reader(tmp_path / "out"), scan(path).values
    for name in ("labels", "objects"):
        np.testing.assert_array_equal(reader.gather(name, np.arange(5)), expected[name])
    assert reader.index.fields[1].columns == Names(("cat", "dog", "ant"))
    changed = document(seed=1)
    path.write_text(json.dumps(changed))
    report = run(open_source([str(path)], SourceOptions()), tmp_path / "out")
    assert (report.decoded, report.copied + report.kept) == (0, 5)
    np.testing.assert_array_equal(Reader(tmp_path / "out").gather("labels", np.arange(5)), scan(path).values["labels"])


@pytest.mark.parametrize(
    ("name", "images"), [("annotations/a.json", "val"), ("a.json", "."), ("a.json", "images"), ("train/_annotations.coco.json", "train")]
)
def test_images_are_found_where_people_keep_them(tmp_path: Path, name: str, images: str) -> None:
    path = save(tmp_path, document(), name, images)
    assert list(scan(path).keys) == [f"{i}.png".encode() for i in range(5)]
    assert list(scan(path, images=str(tmp_path / images), exclude=("0.*",)).keys) == [f"{i}.png".encode() for i in range(1, 5)]


def test_captions_have_no_classes(tmp_path: Path) -> None:
    made = document()
    made["annotations"] = [{"image_id": 100, "id": 1, "caption": "a dog"}]
    del made["categories"]
    found = scan(save(tmp_path, made))
    assert [f.name for f in found.fields] == ["objects"]
    assert found.values["objects"].tolist() == [1, 0, 0, 0, 0]


def changed(**more: Any) -> dict[str, Any]:
    return {**document(), **more}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (changed(images=[]), "no images in it"),
        (changed(images=[*document()["images"], {"id": 1}]), "images[5] has no file_name that is a text"),
        (changed(images=[*document()["images"], {"id": 1, "file_name": "\ud83d.png"}]), "images[5] has a file_name with half a surrogate pair"),
        (changed(images=[*document()["images"], {"id": "1", "file_name": "a"}]), "images[5] has no id that is a whole number"),
        (changed(images=[*document()["images"], {"id": 2**70, "file_name": "a"}]), "images[5] has no id that is a whole number"),
        (changed(images=[*document()["images"], {"id": 100, "file_name": "a.png"}]), "images[5]: a.png: no such file"),
        (changed(images=[*document()["images"], {"id": 1, "file_name": "0.png"}]), "images[5]: 0.png stands in images[0] already"),
        (changed(images=[*document()["images"], {"id": 1, "file_name": "../0.png"}]), "images[5]: ../0.png leaves the folder"),
        (changed(images=[*document()["images"][:4], {"id": 100, "file_name": "4.png"}]), "images[0] and images[4] have the same id 100"),
        (changed(annotations=[{"image_id": 5, "category_id": 3}]), "1 annotation of no image in it, the first annotations[0] of image 5"),
        (changed(annotations=[{"image_id": 100, "category_id": 4}]), "1 annotation of no category in it, the first annotations[0] of category 4"),
        (changed(annotations=[{"category_id": 4}]), "annotations[0] has no image_id"),
        (changed(annotations=[17]), "annotations[0] has no image_id"),
        (changed(annotations={"a": 1}), "expected a list of annotations"),
        (changed(categories=[{"id": 3, "name": "a"}, {"id": 3, "name": "b"}]), "categories[1] has the id 3, as one before it has"),
        (changed(categories=[*CATEGORIES, {"id": 4, "name": "cat"}]), "categories 3 and 4 are both called cat"),
        (json.dumps(document())[:-50], "it is no file of COCO annotations"),
        ('{"images": [{]', "expected a value that is whole at about character 12"),
        ('{"images": [' + "[" * 100_000, "it is no file of COCO annotations"),
        ('{"images" 1}', "expected a colon"),
        ('{1: "images"}', "expected a name"),
        ('{"annotations": [], ', "expected more of it: it ends"),
        ("{}  ", "no images in it"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(tmp_path: Path, made: Any, named: str) -> None:
    with pytest.raises(SourceError) as caught:
        CocoSource(str(save(tmp_path, made))).scan()
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_other_json_and_other_options_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, document())
    with pytest.raises(OptionError, match=r"--label-column does not go with this RAW, which is read as coco"):
        open_source([str(path)], SourceOptions(label_column="x"))
    with pytest.raises(OptionError, match="expected one file of annotations, not 2"):
        open_source([str(path), str(path)], SourceOptions())
    path.write_text("[1]")
    with pytest.raises(SourceError, match="is no folder, list, table"):
        open_source([str(path)], SourceOptions())


def test_a_file_without_annotations_is_said(tmp_path: Path) -> None:
    made = document()
    assert not scan(save(tmp_path, made)).warnings
    del made["annotations"]
    found = scan(save(tmp_path, made))
    assert not found.values["labels"].any()
    assert found.warnings == ("instances_val.json has no annotations, which say what images show: no image is of any class",)


@pytest.mark.parametrize("behind", ["x", "{}", "]", "\n{}"])
@pytest.mark.parametrize("made", [document(), {}])
def test_text_behind_the_object_is_refused(tmp_path: Path, made: dict[str, Any], behind: str) -> None:
    path = save(tmp_path, json.dumps(made) + behind)
    with pytest.raises(SourceError, match="expected nothing behind the object"):
        scan(path, source="coco")
    if made:
        assert len(scan(save(tmp_path, json.dumps(made) + " \n\t")).keys) == 5


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "é"]), JSON), st.integers(1, 7), st.sampled_from([None, 1]))
def test_members_are_those_that_json_loads(made: dict[str, Any], chunk: int, indent: int | None) -> None:
    before = jsonparts._CHUNK
    jsonparts._CHUNK = chunk
    try:
        wanted = {name for name, value in made.items() if isinstance(value, list)} - {"b"}
        data = json.dumps(made, indent=indent, ensure_ascii=bool(chunk % 2)).encode("utf-8", "surrogatepass" if chunk % 2 else "strict")
        found = list(list_members(io.BytesIO(data), wanted))
    finally:
        jsonparts._CHUNK = before
    assert found == [(name, i, member) for name, value in made.items() if name in wanted for i, member in enumerate(value)]
