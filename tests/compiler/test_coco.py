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
from PIL import Image

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import Scan, jsonparts
from mmcompile.compiler.sources.choose import Raw, SourceOptions, open_source
from mmcompile.compiler.sources.coco import CocoSource
from mmcompile.compiler.sources.jsonparts import list_members
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import Names
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.verify import verify
from tests.compiler.builds import age, dataset, inline, picture, run, write

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


def oracle(path: Path) -> Any:
    coco = pytest.importorskip("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        return coco.COCO(str(path))


def test_objects_of_each_image_are_those_that_pycocotools_finds(tmp_path: Path) -> None:
    path = save(tmp_path, document())
    known = oracle(path)
    found = scan(path, fields={"shows": {"kind": "multilabel"}})
    most = max(len(known.getAnnIds(imgIds=[100 - i])) for i in range(5))
    assert [(f.name, f.shape, f.count) for f in found.fields] == [
        ("boxes", (most, 4), "boxes_count"),
        ("labels", (most,), "boxes_count"),
        ("area", (most,), "boxes_count"),
        ("iscrowd", (most,), "boxes_count"),
        ("boxes_count", (), None),
        ("orig_size", (2,), None),
        ("shows", (3,), None),
    ]
    specs = {f.name: f for f in found.fields}
    assert specs["labels"].categories == specs["shows"].columns == Names(("cat", "dog", "ant"))
    assert found.forms == (("boxes", Form("xywh", size="orig_size")),)
    for i, row in enumerate(found.values):
        anns = known.loadAnns(known.getAnnIds(imgIds=[100 - i]))
        n = row["boxes_count"]
        assert n == len(anns)
        assert row["boxes"][:n].tolist() == [ann["bbox"] for ann in anns]
        assert row["labels"].tolist() == [[3, 7, 90].index(ann["category_id"]) for ann in anns] + [-1] * (most - n)
        assert row["area"][:n].tolist() == [25.0] * n
        assert row["shows"].tolist() == [int(number in {ann["category_id"] for ann in anns}) for number in (3, 7, 90)]
        assert row["orig_size"].tolist() == [12, 10]
    assert found.counts == {"images of instances_val.json": 5, "annotations": 15, "images without an annotation": 1}


def test_it_builds_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    path = save(tmp_path / "raw", document())
    assert run(open_source([str(path)], SourceOptions()), tmp_path / "out").decoded == 5
    reader, expected = Reader(tmp_path / "out"), scan(path).values
    for name in ("labels", "boxes_count"):
        np.testing.assert_array_equal(reader.gather(name, np.arange(5)), expected[name])
    assert {f.name: f for f in reader.index.fields}["labels"].categories == Names(("cat", "dog", "ant"))
    changed = document(seed=1)
    path.write_text(json.dumps(changed))
    report = run(open_source([str(path)], SourceOptions()), tmp_path / "out")
    assert (report.decoded, report.copied + report.kept) == (0, 5)
    np.testing.assert_array_equal(Reader(tmp_path / "out").gather("labels", np.arange(5)), scan(path).values["labels"])


def test_boxes_of_nothing_are_told_by_each_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    made = document()
    listed, where = len(made["annotations"]), [100, 100, 99]
    bad = sum(one["image_id"] == 99 for one in made["annotations"])
    for image, box in zip(where, ([50, 50, 5, 5], [2, 2, 0, 4], [-9, 0, 5, 5]), strict=True):
        made["annotations"].append({**made["annotations"][0], "id": listed + len(where), "image_id": image, "bbox": box})
    path = save(tmp_path / "raw", made)
    (path.parents[1] / "val/1.png").write_bytes(b"no picture")  # image 99: its boxes are not those of a sample
    told = {"boxes of which nothing is left (of no area, outside of the picture, cut away), not stored": 2}
    for i in range(3):
        report = run(open_source([str(path)], SourceOptions()), tmp_path / "out", rows=1 + i // 2, max_rejects=1)
        assert told.items() <= report.counts.items()
    assert Reader(tmp_path / "out").gather("boxes_count", np.arange(4)).sum() == listed - bad


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
    assert found.fields == ()
    assert found.counts["annotations without a box, left out"] == 1


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
    with pytest.raises(SourceError, match="is no folder, list, table, array or archive"):
        open_source([str(path)], SourceOptions())
    for fields, why in (
        ({"boxes": {"kind": "boxes", "format": "xyxy"}}, "boxes of COCO are xywh"),
        ({"score": {"kind": "value"}}, "of annotations there are boxes and keypoints"),
        ({"a": {"kind": "mask"}, "b": {"kind": "mask"}}, "a is of kind mask already"),
    ):
        path.write_text(json.dumps(document()))
        with pytest.raises(OptionError, match=why):
            scan(path, fields=fields)


SIZE = (30, 20)


def drawn(root: Path, exif: int = 1, said: tuple[int, int] = SIZE) -> Path:
    """Annotations of pictures of 30x20 (width x height) as stored, with this orientation, each with a rectangle of one colour that they outline.

    `said`: the width and height of the file of annotations, in whose frame its outlines are.
    """
    rng, made = np.random.default_rng(exif), document(0)
    made["categories"] = [{**each, "keypoints": ["first", "last"]} for each in CATEGORIES]
    shown = SIZE[::-1] if exif >= 5 and said != SIZE else SIZE
    for i in range(3):
        width, height = shown
        x0, y0 = int(rng.integers(2, width // 2)), int(rng.integers(2, height // 2))
        x1, y1 = x0 + int(rng.integers(3, width // 2)), y0 + int(rng.integers(3, height // 2))
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[y0:y1, x0:x1] = 200
        image = Image.fromarray(pixels)
        if shown != SIZE:  # as it has to be stored to be shown like that
            image = image.transpose({5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}[exif])
        tags, out = Image.Exif(), io.BytesIO()
        tags[0x0112] = exif
        image.save(out, "PNG", exif=tags)
        write(root, {f"{i}.png": out.getvalue()})
        made["images"].append({"id": i, "file_name": f"{i}.png", "width": said[0], "height": said[1]})
        if i < 2:
            box, outline = [x0, y0, x1 - x0, y1 - y0], [[x0, y0, x1, y0, x1, y1, x0, y1]]
            points = [x0 + 0.5, y0 + 0.5, 2, x1 - 0.5, y1 - 0.5, 1]
            shape = {"id": i, "image_id": i, "category_id": 7, "bbox": box, "segmentation": outline, "keypoints": points, "area": 9, "iscrowd": 0}
            made["annotations"].append(shape)
    (root / "a.json").write_text(json.dumps(made))
    return root / "a.json"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("exif", [1, 5, 6, 8])
def test_boxes_masks_and_keypoints_are_where_the_picture_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exif: int, turned: bool) -> None:
    inline(monkeypatch)
    path = drawn(tmp_path / "raw", exif, SIZE[::-1] if turned and exif >= 5 else SIZE)
    for orientation in ("apply", "ignore"):
        out, sound = tmp_path / orientation, path.read_text()
        masked = {} if turned and orientation == "ignore" else {"mask": {"kind": "mask"}}  # such a mask is turned for good
        asked = Preprocess(crop=24, filter="nearest", orientation=orientation, fields=masked)
        source = open_source([str(path)], SourceOptions(fields=asked.fields))
        run(source, out, asked)
        rows = {f.name: Reader(out).gather(f.name, np.arange(3)) for f in Reader(out).index.fields}
        assert rows["boxes_count"].tolist() == [1, 1, 0]
        assert rows["labels"].tolist() == [[1], [1], [-1]]
        for image, boxes, points in zip(*(rows[name][:2] for name in ("image", "boxes", "keypoints")), strict=True):
            ys, xs = np.nonzero(image[0])
            assert boxes[0].tolist() == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
            seen = points[0][points[0, :, 2] > 0]
            assert all(image[0, int(y), int(x)] == 200 for x, y, _ in seen)
        if masked:
            np.testing.assert_array_equal(rows["mask"][:2], np.where(rows["image"][:2, 0] == 200, 2, 0))
            assert not rows["mask"][2].any()
        assert {f.name: f for f in Reader(out).index.fields}["keypoints"].columns == Names(("first", "last"))
        # Rows are copied, and what belongs to them is moved as before.
        made = json.loads(path.read_text())
        made["annotations"][0]["bbox"][2] += 1
        path.write_text(json.dumps(made))
        source = open_source([str(path)], SourceOptions(fields=asked.fields))
        assert run(source, out, asked).decoded == 0
        run(source, tmp_path / f"{orientation}2", asked)
        assert dataset(out) == dataset(tmp_path / f"{orientation}2")
        path.write_text(sound)


def test_another_size_than_the_file_says_is_a_reject_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    path = drawn(tmp_path / "raw")
    sound = path.read_text()
    asked = Preprocess(crop=12)
    run(open_source([str(path)], SourceOptions()), tmp_path / "out", asked)
    made = json.loads(sound)
    made["images"][1]["width"] = 31
    path.write_text(json.dumps(made))
    run(open_source([str(path)], SourceOptions()), tmp_path / "out", asked, max_rejects=1)
    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert line.message.startswith("orig_size: 31x20 (width x height) for a picture of 30x20")
    path.write_text(sound)
    report = run(open_source([str(path)], SourceOptions()), tmp_path / "out", asked)
    assert (report.samples, report.rejects) == (3, 0)
    masked = Preprocess(crop=12, fields={"mask": {"kind": "mask"}})
    path.write_text(json.dumps(made))
    run(open_source([str(path)], SourceOptions(fields=masked.fields)), tmp_path / "masks", masked, max_rejects=1)
    (line,) = load_rejects(tmp_path / "masks", Reader(tmp_path / "masks").index)
    assert line.message.startswith("mask (a.json#1): a mask of 31x20 (width x height) for a picture of 30x20")


def test_lists_that_are_chosen_of_a_dataset_keep_their_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    asked = Preprocess(crop=12, fields={"mask": {"kind": "mask"}, "shows": {"kind": "multilabel"}})
    run(open_source([str(drawn(tmp_path))], SourceOptions(fields=asked.fields)), tmp_path / "out", asked)
    run(Raw(tmp_path / "out", columns=("labels", "boxes")), tmp_path / "some", None)
    reader, whole = Reader(tmp_path / "some"), Reader(tmp_path / "out")
    assert [f.name for f in reader.index.fields] == ["image", "mask", "labels", "boxes", "boxes_count"]
    for name in ("mask", "labels", "boxes", "boxes_count"):
        assert np.array_equal(reader.gather(name, np.arange(3)), whole.gather(name, np.arange(3)))
    assert verify(tmp_path / "some").ok


def test_what_is_wrong_with_one_annotation_is_a_reject_of_its_image(tmp_path: Path) -> None:
    path = drawn(tmp_path)
    for name, value, why in (
        ("bbox", [1, 2, -3, 4], "boxes: annotations[1]: [1, 2, -3, 4] is no box: x, y, width, height"),
        ("keypoints", [1, 2, 3, 1, 2, 0], "keypoints: annotations[1]: [1, 2, 3, 1, 2, 0]: expected x, y and 0, 1 or 2 of each point"),
        ("keypoints", [1, 2, 2], "keypoints: annotations[1]: 1 point, where dog has 2"),
        ("keypoints", [1, 2, 2] * 3, "keypoints: annotations[1]: 3 points, where dog has 2"),
        ("segmentation", {"size": [20, 30], "counts": [7]}, "mask: annotations[1]: [7]: expected run lengths that add up to 600"),
        ("iscrowd", "0", "iscrowd: annotations[1]: '0': expected 0 or 1"),
        ("iscrowd", [0], "iscrowd: annotations[1]: [0]: expected 0 or 1"),
        ("area", "12", "area: annotations[1]: '12' is no number"),
        ("area", True, "area: annotations[1]: true is no number"),
        ("area", float("nan"), "area: annotations[1]: NaN is no number"),
        ("area", 10**400, f"area: annotations[1]: {'1' + '0' * 59}… is no number"),
    ):
        made = json.loads(path.read_text())
        made["annotations"][1][name] = value
        (tmp_path / "b.json").write_text(json.dumps(made))
        assert scan(tmp_path / "b.json", fields={"mask": {"kind": "mask"}}).faults == {1: why}


def test_a_reject_of_an_annotation_that_changed_is_that_of_a_fresh_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    made = document()
    path = save(tmp_path, made)
    age(tmp_path)
    run(CocoSource(str(path)), tmp_path / "out")
    made["annotations"][0]["bbox"] = "none"
    path.write_text(json.dumps(made))
    for out in ("out", "fresh"):
        run(CocoSource(str(path)), tmp_path / out, max_rejects=1)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "fresh")


def test_a_size_that_no_picture_has_is_a_reject_and_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    made = document()
    made["images"][2] |= {"width": 1 << 30, "height": 1 << 30}
    options = SourceOptions(fields=Preprocess(fields={"mask": {"kind": "mask"}}).fields)
    report = run(open_source([str(save(tmp_path, made))], options), tmp_path / "out", Preprocess(crop=8, fields=dict(options.fields)), max_rejects=1)
    assert (report.samples, report.rejects) == (4, 1)
    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert line.message == "mask: images[2] says 1073741824x1073741824 (width x height), more than any picture that is taken"


def test_a_file_without_annotations_is_said(tmp_path: Path) -> None:
    made = document()
    assert not scan(save(tmp_path, made)).warnings
    del made["annotations"]
    found = scan(save(tmp_path, made))
    assert (found.values["labels"] == -1).all()
    assert not found.values["boxes_count"].any()
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
