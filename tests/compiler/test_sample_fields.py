"""Samples in Python with masks, boxes, lists and texts: what they are stored as, that they move with their picture, and what is an error."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from mmcompile import MMapShardDataset
from mmcompile.compiler import driver, rowbuild
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowrun import Here
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "processes" not in request.node.name:
        monkeypatch.setattr(rowbuild, "start_readers", lambda source, scratch, workers: (Here(), source, ""))


def built(data: Any, out: Path, preprocess: Preprocess | None = None, **more: Any) -> tuple[Any, dict[str, Any]]:
    report = driver.build(data, out, preprocess=preprocess or Preprocess(crop=12), **more)
    assert verify(out).ok
    reader = Reader(out)
    return report, {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


def fields(out: Path) -> dict[str, Any]:
    return {f.name: f for f in Reader(out).index.fields}


def drawn(i: int) -> tuple[Any, Any, tuple[int, int, int, int]]:
    """(picture (16, 24, 3), ids, box): a rectangle of one colour, of id 255."""
    box = (7 + i % 4, 3 + i % 3, 13 + i % 4, 9 + i % 5)
    image, ids = np.zeros((16, 24, 3), np.uint8), np.full((16, 24), 7, np.uint8)
    image[box[1] : box[3], box[0] : box[2]] = 200
    ids[box[1] : box[3], box[0] : box[2]] = 255
    return image, ids, box


class Drawn(list[Any]):
    """Samples of the drawings, each as `make(image, ids, box, i)` has it."""

    def __init__(self, make: Any, count: int = 5) -> None:
        super().__init__(make(Image.fromarray(drawn(i)[0]), *drawn(i)[1:], i) for i in range(count))


def palette(ids: Any) -> Image.Image:
    made = Image.fromarray(ids, "P") if ids.dtype != np.uint8 else Image.fromarray(ids).convert("L")
    made = Image.frombytes("P", made.size, made.tobytes())
    made.putpalette(bytes(range(256)) * 3)
    return made


@pytest.mark.parametrize(
    "ids_as",
    [
        palette,
        Image.fromarray,
        lambda ids: Image.fromarray(ids.astype(np.int32)),
    ],
)
def test_a_mask_beside_a_picture_keeps_its_ids(tmp_path: Path, ids_as: Any) -> None:
    report, rows = built(Drawn(lambda image, ids, box, i: (image, ids_as(ids))), tmp_path / "out")
    assert report.fields == ("image", "mask")
    for i in range(5):
        assert np.array_equal(rows["mask"][i], drawn(i)[1][2:14, 6:18])


@pytest.mark.parametrize("as_", [np.asarray, torch.from_numpy, lambda ids: torch.from_numpy(ids)[None].long()])
def test_masks_may_be_arrays(tmp_path: Path, as_: Any) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "seg": as_(ids)})
    _, rows = built(data, tmp_path / "out", Preprocess(pad=48, fields={"seg": {"fill": 9}}))
    assert (rows["seg"][:, 0] == 9).all()
    assert np.array_equal(rows["seg"][0, 8:40:2, ::2], drawn(0)[1])


@pytest.mark.parametrize("resize", [None, (32, 48), (8, 12)])
def test_boxes_masks_and_keypoints_follow_the_picture(tmp_path: Path, resize: Any) -> None:
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        points = torch.tensor([[[box[0], box[1], 2.0], [box[2], box[3], 1.0], [0, 0, 0]]])
        away = torch.tensor([[0.0, 0.0, 2.0, 2.0]])  # outside of the crop
        return image, {
            "boxes": torch.cat([away[: i % 2], torch.tensor([box], dtype=torch.float32)]),
            "labels": torch.tensor([5, 3][1 - i % 2 :]),
            "keypoints": torch.cat([torch.zeros(i % 2, 3, 3), points]),
            "masks": torch.from_numpy(np.stack([np.zeros_like(ids), ids == 255][1 - i % 2 :])),
            "image_id": i,
        }

    geometry: dict[str, Any] = {"crop": 12} if resize is None else {"resize": resize}
    _, rows = built(Drawn(sample), tmp_path / "out", Preprocess(filter="nearest", **geometry))
    found = fields(tmp_path / "out")
    assert {name: f.count for name, f in found.items() if f.count} == dict.fromkeys(("boxes", "labels", "keypoints", "masks"), "boxes_count")
    assert found["boxes"].shape == (2, 4)
    for i in range(5):
        there = rows["image"][i, 0] == 200
        kept = int(rows["boxes_count"][i])
        assert kept == (1 if resize is None else 1 + i % 2)
        x0, y0, x1, y1 = rows["boxes"][i, kept - 1]
        ys, xs = np.nonzero(there)
        assert np.abs(np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) - (x0, y0, x1, y1)).max() <= (0 if resize is None else 1)
        assert rows["labels"][i].tolist()[:kept] == [5, 3][2 - kept :]
        assert np.array_equal(rows["masks"][i] == kept, there)
        assert set(np.unique(rows["masks"][i]).tolist()) == {0, kept}
        if resize is not None:
            assert np.array_equal(rows["keypoints"][i, kept - 1, 0], [x0, y0, 2])
        assert rows["keypoints"][i, kept - 1, 2].tolist() == [0, 0, 0]
        assert rows["image_id"][i] == i


@pytest.mark.parametrize("first", [0, 1])
def test_a_stack_has_a_mask_for_each_box(tmp_path: Path, first: int) -> None:
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        return {"image": image, "boxes": np.array([box, box], np.float32), "masks": np.stack([ids == 255] * (3 if i == first else 2))}

    with pytest.raises(SourceError, match=f"^row {first}: masks: 3 masks, and 2 boxes: give each its own$"):
        built(Drawn(sample), tmp_path / "out")


def test_the_fill_of_a_stack_stays_and_the_numbers_are_those_of_boxes_that_are_left(tmp_path: Path) -> None:
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        boxes, stack = [(0, 0, 2, 2), box, box], np.stack([np.zeros_like(ids), ids == 255, np.zeros_like(ids)])
        return {"image": image, "boxes": np.array(boxes, np.float32), "masks": stack}

    asked = Preprocess(crop=(20, 12), fields={"masks": {"fill": 255}, "boxes": {"max": 2, "overflow": "drop"}})
    _, rows = built(Drawn(sample), tmp_path / "out", asked)
    assert rows["boxes_count"].tolist() == [1] * 5
    assert (rows["masks"][:, :2] == 255).all()
    assert np.array_equal(rows["masks"][:, 2:18] == 1, rows["image"][:, 0, 2:18] == 200)


def test_boxes_follow_a_picture_that_lies_on_its_side(tmp_path: Path) -> None:
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        tags, out = Image.Exif(), io.BytesIO()
        tags[0x0112] = i + 1
        image.save(out, "PNG", exif=tags)
        return {"image": Image.open(io.BytesIO(out.getvalue())), "mask": ids, "boxes": np.array([box], np.float32)}

    _, rows = built(Drawn(sample, 8), tmp_path / "out", Preprocess(crop=12))
    for i in range(8):
        there = rows["image"][i, 0] == 200
        ys, xs = np.nonzero(there)
        assert rows["boxes"][i, 0].tolist() == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert np.array_equal(rows["mask"][i] == 255, there)


def annotations(box: Any, count: int) -> list[dict[str, Any]]:
    x0, y0, x1, y1 = box
    one = {"bbox": [x0, y0, x1 - x0, y1 - y0], "category_id": 4, "iscrowd": 0, "area": 1.5, "segmentation": [[1, 2, 3, 4, 5, 6]], "id": 7}
    return [one] * count


def test_objects_as_coco_lists_them(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: (image, annotations(box, i % 3)))
    report, rows = built(data, tmp_path / "out", Preprocess(crop=(16, 24)))
    assert any("segmentation: outlines" in line for line in report.warnings)
    assert rows["boxes_count"].tolist() == [0, 1, 2, 0, 1]
    assert rows["boxes"][1].tolist() == [[*map(float, drawn(1)[2])], [0] * 4]
    assert rows["labels"].tolist() == [[-1, -1], [4, -1], [4, 4], [-1, -1], [4, -1]]
    assert rows["area"].dtype == np.float64


def test_lists_beside_each_other_have_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    def data(name: str) -> Any:
        return Drawn(lambda image, ids, box, i: {"image": image, name: np.array([box] * i).reshape(-1, 4), "labels": np.ones(i, int)})

    with pytest.raises(OptionError, match="bbox: how are boxes written"):
        built(data("bbox"), tmp_path / "out")
    with pytest.raises(SourceError, match=r"row 3: boxes: 3 rows, and 2 are kept: give fields=\{'boxes': \{'max': 3\}\}"):
        built(data("boxes"), tmp_path / "out", Preprocess(crop=12, fields={"boxes": {"max": 2}}))
    report, rows = built(data("boxes"), tmp_path / "out", Preprocess(crop=12, fields={"boxes": {"max": 2, "overflow": "drop"}}))
    assert report.counts["rows of boxes beyond its max cut"] == 3
    assert rows["boxes_count"].tolist() == [0, 1, 2, 2, 2]
    assert rows["labels"].tolist() == [[-1, -1], [1, -1], [1, 1], [1, 1], [1, 1]]
    _, rows = built(data("bbox"), tmp_path / "all", Preprocess(crop=12, fields={"bbox": {"format": "xyxy"}}))
    assert rows["bbox"].shape == (5, 4, 4)


def test_a_dataset_of_hugging_face_with_objects_and_masks(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["cat", "dog"]
    objects = datasets.Sequence({"bbox": datasets.Sequence(datasets.Value("float32"), length=4), "category": datasets.ClassLabel(names=names)})
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image(), "objects": objects, "tags": datasets.Value("string")})
    rows = [
        {"image": Image.fromarray(image), "mask": Image.fromarray(ids), "objects": {"bbox": [[*box[:2], 6, 6]] * i, "category": [1] * i}, "tags": "é"}
        for i, (image, ids, box) in enumerate(map(drawn, range(3)))
    ]
    data = datasets.Dataset.from_list(rows, features=features)
    _, found = built(data, tmp_path / "out", Preprocess(crop=(16, 24), fields={"tags": {"kind": "text"}}))
    assert fields(tmp_path / "out")["labels"].categories.listed == tuple(names)
    assert (found["boxes_count"].tolist(), found["labels"].tolist()) == ([0, 1, 2], [[-1, -1], [1, -1], [1, 1]])
    assert found["boxes"][1, 0].tolist() == [8, 4, 14, 10]
    assert np.array_equal(found["mask"], [drawn(i)[1] for i in range(3)])


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def test_lists_of_an_iterable_need_a_size(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "boxes": np.array([box] * (i + 1))})
    with pytest.raises(OptionError, match=r"boxes: lists and texts of an iterable, .* fields=\{'boxes': \{'max': N\}\}"):
        built(Stream(data), tmp_path / "out")
    asked = Preprocess(crop=12, fields={"boxes": {"max": 4, "overflow": "drop"}})
    report, rows = built(Stream(data), tmp_path / "out", asked)
    assert report.counts["rows of boxes beyond its max cut"] == 1
    assert rows["boxes_count"].tolist() == [1, 2, 3, 4, 4]
    again, mapped = built(data, tmp_path / "mapped", asked)
    assert all(np.array_equal(rows[name], mapped[name]) for name in rows)
    assert again.counts == report.counts


def test_texts_tokens_and_classes_of_which_several_hold(tmp_path: Path) -> None:
    data = [
        {"x": np.float32(i), "caption": "é" * i, "tokens": list(range(i)), "tags": [0, i], "more": torch.tensor([1, 0, i % 2])} for i in range(1, 5)
    ]
    asked = {"caption": {"kind": "text"}, "tokens": {"max": 3, "overflow": "drop", "dtype": "int32"}}
    _, rows = built(data, tmp_path / "out", Preprocess(fields={**asked, "tags": {"kind": "multilabel"}, "more": {"kind": "multilabel"}}))
    assert [bytes(row).rstrip(b"\0").decode() for row in rows["caption"]] == ["é" * i for i in range(1, 5)]
    assert (rows["tokens"].dtype, rows["tokens"].tolist()) == (np.int32, [[0, 0, 0], [0, 1, 0], [0, 1, 2], [0, 1, 2]])
    assert rows["tokens_count"].tolist() == [1, 2, 3, 3]
    assert rows["tags"].tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    assert rows["more"].tolist() == [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]]


def test_pictures_have_settings_of_their_own(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: {"left": image, "right": image})
    asked = Preprocess(crop=12, normalize="imagenet", fields={"right": {"mode": "gray", "dtype": "float32", "resize": (4, 6)}})
    _, rows = built(data, tmp_path / "out", asked)
    found = fields(tmp_path / "out")
    assert (found["left"].dtype, found["left"].shape, found["left"].normalize is None) == ("uint8", (3, 12, 12), False)
    assert (found["right"].dtype, found["right"].shape, found["right"].normalize) == ("float32", (1, 4, 6), None)
    assert 0 < rows["right"].max() <= 1


def sample_of(**more: Any) -> Any:
    """Samples of which row 3 has other parts."""
    return Drawn(
        lambda image, ids, box, i: {"image": image, "mask": ids, "boxes": np.array([box]), "labels": np.array([1])} | (more if i == 3 else {})
    )


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (sample_of(mask=np.zeros((15, 24), int)), {}, "row 3: mask: a mask of 24x15 .* for a picture of 24x16"),
        (sample_of(mask=np.full((16, 24), 300)), {}, "row 3: mask: a pixel of the mask is 300, and dtype=uint8"),
        (sample_of(mask=np.full((16, 24), 0.5)), {}, r"row 3: mask: 0.5 in a mask of float64: .* fields=\{'mask': \{'kind': 'value'\}\}"),
        (sample_of(mask=Image.fromarray(np.arange(16 * 24 * 3).astype(np.uint8).reshape(16, 24, 3))), {}, "row 3: mask: a mask of mode RGB: colours"),
        (sample_of(boxes=np.zeros((1, 5))), {}, r"row 3: boxes: expected rows of \(4,\), found \(1, 5\)"),
        (sample_of(boxes=np.array([[12, 12, 4, 6]])), {}, r"row 3: boxes: \[12.0, 12.0, 4.0, 6.0\]: its second corner before its first"),
        (sample_of(boxes=np.array([[12, 12, 4, -1]])), {"format": "cxcywh"}, r"row 3: boxes: .*: a negative size \(format=cxcywh\)"),
        (sample_of(boxes=np.array([[0, 0, 1, np.nan]])), {}, "row 3: boxes: .*a number that is none, or beyond float32"),
        (sample_of(boxes=[[False, False, True, True]]), {}, "row 3: boxes: expected coordinates, found true and false"),
        (sample_of(boxes=np.ones((1, 4), bool)), {}, "row 3: boxes: expected coordinates, found true and false"),
        (sample_of(boxes=np.zeros((1, 4), "M8[s]")), {}, "row 3: boxes: expected coordinates, found times"),
        (sample_of(boxes=None, labels=None), {}, "row 3: boxes: NoneType; expected"),
        (sample_of(boxes=3.0, labels=None), {}, "row 3: boxes: 3.0; expected a list"),
        (sample_of(image=Image.fromarray(np.full((16, 24), 0.5, "f4"))), {}, "row 3: image: float pixels do not fit in uint8"),
        (sample_of(labels=np.array([1, 2])), {"max": 2}, "row 3: labels: 2 beside 1 boxes"),
        (sample_of(labels=np.array([1.5])), {}, "row 3: labels: 1.5, which int64 cannot hold"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_row(tmp_path: Path, data: Any, options: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        built(data, tmp_path / "out", Preprocess(crop=12, fields={"boxes": options} if options else {}))


@pytest.mark.parametrize(
    ("data", "asked", "message"),
    [
        ([{"x": 1}], {"y": {"kind": "text"}}, r"fields: y: samples have no such part \(they have x\)"),
        ([{"x": 1}], {"x": {"kind": "boxes"}}, "x: boxes without a picture"),
        ([{"x": 1}], {"x": {"kind": "mask"}}, "x: a mask without a picture"),
        (
            sample_of(boxes=[[0, 0, 1, 1]], labels=[1, 2])[3:],
            {},
            r"row 0: labels: 2 beside 1 boxes; .* fields=\{'labels': \{'kind': 'multilabel'\}\}",
        ),
        (sample_of(label=np.zeros((16, 24), int))[3:], {}, r"row 0: label: 16 x 24 as its picture image, .*fields=\{'label': \{'kind': 'mask'\}\}"),
        (sample_of(depth=np.zeros((16, 24), "f4"))[3:], {}, "row 0: depth: 16 x 24 as its picture image"),
        (sample_of(image=np.zeros((16, 24, 3), "f4"))[3:], {"image": {"kind": "image"}}, r"row 0: image: ndarray; .* Image.fromarray\(array\)"),
        (sample_of(image=np.zeros((16, 24, 2), "u1"))[3:], {"image": {"kind": "image"}}, "row 0: image: ndarray; .* uint8 with 1, 3 or 4 channels"),
        ([{"x": 1, "t": "é"}], {}, r"row 0: t: text; .*: keep it by fields=\{'t': \{'kind': 'text'\}\}"),
        (sample_of(x=[[1, 2], [3]])[3:], {}, "row 0: x: list that is no array of numbers"),
        ([{"t": []}, {"t": [1, 2]}], {}, r"row 0: t: an empty list, .* fields=\{'t': \{'max': N\}\}"),
        ([{"x": np.array([300])}], {"x": {"dtype": "uint8"}}, "row 0: x: 300, which uint8 cannot hold"),
        ([{"x": 1}], {"x": {"kind": "text"}}, "row 0: x: expected text, found int"),
        ([{"x": [1, 5]}], {"x": {"kind": "text"}}, "row 0: x: expected text, found list"),
        ([{"x": np.array([0, 2])}], {"x": {"kind": "multilabel"}}, "row 0: x: expected 2 times 0 or 1"),
        ([{"t": "abc"}, {"t": "abcd"}], {"t": {"kind": "text", "shape": (3,)}}, "row 1: t: 'abcd' has 4 bytes, and shape=3"),
        ([{"t": "abc"}, {"t": "ab\0"}], {"t": {"kind": "text"}}, r"row 1: t: 'ab\\x00' holds a NUL"),
        ([{"image": sample_of()[0]["image"], "Image": 3}], {}, "row 0: Image and image: both are the field image; rename one"),
        (sample_of(image=Image.fromarray(np.full((16, 24), 0.5, "f4")))[3:], {}, "row 0: image: float pixels do not fit in uint8"),
        (sample_of(keypoints=[[float("nan"), 1]])[3:], {}, "row 0: keypoints: a coordinate that is no number, or beyond float32"),
        (sample_of(keypoints=np.full((2, 3), 1e39))[3:], {}, "row 0: keypoints: a coordinate that is no number, or beyond float32"),
        (sample_of(keypoints=[[True, False]])[3:], {}, "row 0: keypoints: expected coordinates, found true and false"),
        ([{"t": "abc"}, {"t": "abcd"}], {"t": {"kind": "text", "shape": 3}}, "row 1: t: 'abcd' has 4 bytes, and shape=3"),
        ([{"t": [1, 2]}, {"t": [1, 2, 3]}], {}, r"row 1: t: .* say how many rows are kept: fields=\{'t': \{'max': N\}\}"),
        ([{"img": np.zeros((3, 4, 5), np.uint8)}, {"img": np.zeros((3, 4, 6), np.uint8)}], {}, r"row 1: img: .*\(3, 4, 6\); .* as Pillow images"),
    ],
)
def test_what_cannot_be_a_field_is_said(tmp_path: Path, data: Any, asked: Any, message: str) -> None:
    with pytest.raises((SourceError, OptionError), match=message):
        built(data, tmp_path / "out", Preprocess(crop=12 if "image" in data[0] else None, fields=asked))


@pytest.mark.parametrize("dtype", ["bool", "float32", "float64"])
def test_masks_of_floats_are_ids(tmp_path: Path, dtype: str) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "mask": (ids == 255).astype(dtype)})
    _, rows = built(data, tmp_path / "out")
    assert fields(tmp_path / "out")["mask"].meaning == "mask"
    assert np.array_equal(rows["mask"], [(drawn(i)[1] == 255)[2:14, 6:18] for i in range(5)])


def test_what_is_as_large_as_its_picture_is_what_was_said(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "label": ids, "depth": ids.astype("f4")})
    _, rows = built(data, tmp_path / "out", Preprocess(crop=12, fields={"label": {"kind": "mask"}, "depth": {"kind": "value"}}))
    assert np.array_equal(rows["label"][1], drawn(1)[1][2:14, 6:18])
    assert np.array_equal(rows["depth"][1], drawn(1)[1])
    _, rows = built(data, tmp_path / "whole", Preprocess(crop=(16, 24)))
    assert np.array_equal(rows["label"], rows["depth"])


def test_lists_of_another_length_beside_boxes_may_be_of_the_whole_sample(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "boxes": [box], "labels": [0, 2]})
    _, rows = built(data, tmp_path / "out", Preprocess(crop=12, fields={"labels": {"kind": "multilabel"}}))
    assert rows["labels"].tolist() == [[1, 0, 1]] * 5


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_rows_that_are_not_filled_are_of_no_class(tmp_path: Path, dtype: str) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "boxes": [box] * i, "labels": np.zeros(i, dtype), "area": np.ones(i, dtype)})
    _, rows = built(data, tmp_path / "out")
    assert rows["labels"].tolist() == [[0] * i + [-1] * (4 - i) for i in range(5)]
    assert rows["area"].tolist() == [[1] * i + [0] * (4 - i) for i in range(5)]
    found = fields(tmp_path / "out")
    assert (found["labels"].dtype, found["labels"].empty, found["area"].empty) == ("int64", -1, 0)


def test_what_a_crop_takes_away_when_read_is_of_no_class(tmp_path: Path) -> None:
    data = Drawn(lambda image, ids, box, i: {"image": image, "boxes": [(6, 2, 8, 4), box], "labels": [0, 1], "area": [5, 6]})
    built(data, tmp_path / "out")
    cut = MMapShardDataset(tmp_path / "out", crop=2, output="dict")[4]
    assert (cut["boxes_count"], cut["labels"].tolist(), cut["area"].tolist()) == (1, [1, -1], [6, 0])


@pytest.mark.parametrize("workers", [1, 2], ids=["one", "two_processes"])
@pytest.mark.parametrize("order", ["source", "shuffled"])
def test_boxes_that_are_gone_are_told(tmp_path: Path, workers: int, order: str) -> None:
    # Each of 5 samples has a box outside of its picture, and the last three one of no area.
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        n = 2 + (i > 1)
        return {"image": image, "boxes": [box, (30, 30, 40, 40), (7, 7, 7, 9)][:n], "labels": [1, 2, 3][:n]}

    data = Drawn(sample)
    told = {"boxes of which nothing is left (of no area, outside of the picture, cut away), not stored": 8}
    asked: dict[str, Any] = {"preprocess": Preprocess(crop=(16, 24)), "workers": workers, "options": BuildOptions(order=order)}
    report, rows = built(data, tmp_path / "out", **asked)
    assert rows["boxes_count"].tolist() == [1] * 5
    assert rows["labels"].tolist() == [[1, -1, -1]] * 5
    assert report.counts == told
    again, _ = built(data, tmp_path / "out", **asked)
    assert again.counts == told
    if order == "source":
        many = Preprocess(crop=(16, 24), fields={"boxes": {"max": 3}})
        assert built(Stream(data), tmp_path / "stream", many)[0].counts == told


def test_arrays_are_no_pictures_and_what_is_asked_of_them_says_so(tmp_path: Path) -> None:
    data = [{"image": np.zeros((16, 24, 3), np.uint8), "boxes": [[0, 0, 1, 1]]}]
    with pytest.raises(OptionError, match=r"--crop: for pictures, .*Image.fromarray\(array\), or a tv_tensors.Image"):
        built(data, tmp_path / "out")


@pytest.mark.parametrize("as_", [np.asarray, lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1)])
@pytest.mark.parametrize("way", [list, iter])
def test_arrays_are_pictures_where_somebody_says_so(tmp_path: Path, as_: Any, way: Any) -> None:
    samples = list(sample_of()[:3])
    asked = Preprocess(resize=20, crop=12, fields={"boxes": {"max": 2}})
    built(way(samples), tmp_path / "pillow", asked)
    said = Preprocess(resize=20, crop=12, fields={"image": {"kind": "image"}, "boxes": {"max": 2}})
    built(way([sample | {"image": as_(sample["image"])} for sample in samples]), tmp_path / "arrays", said)
    assert dataset(tmp_path / "arrays") == dataset(tmp_path / "pillow")


def test_arrays_of_one_channel_and_of_a_tuple_are_pictures_too(tmp_path: Path) -> None:
    grey = [np.random.default_rng(i).integers(0, 256, (9, 7), dtype=np.uint8) for i in range(3)]
    _, rows = built(
        [(array[:, :, None] if i else array, 5) for i, array in enumerate(grey)], tmp_path / "out", Preprocess(fields={"x": {"kind": "image"}})
    )
    assert np.array_equal(rows["x"], np.stack([np.stack([array] * 3) for array in grey]))


def test_views_are_of_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--views: drawn from the key of a file"):
        built(sample_of(), tmp_path / "out", Preprocess(crop=12, views=2))


def test_bytes_are_the_same_from_one_process_and_from_two_processes(tmp_path: Path) -> None:
    data = sample_of()
    built(data, tmp_path / "one", workers=1)
    built(data, tmp_path / "two", workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")


@pytest.mark.parametrize("splits", [{"train": sample_of()[:2], "val": []}, {"train": [], "val": sample_of()[:2]}])
def test_a_split_without_samples_is_empty(tmp_path: Path, splits: Any) -> None:
    built(splits, tmp_path / "out")
    found = {split.name: split.stop - split.start for split in Reader(tmp_path / "out").index.splits}
    assert found == {name: len(samples) for name, samples in splits.items()}


def test_an_error_of_the_first_sample_of_an_iterable_has_its_row(tmp_path: Path) -> None:
    wide = [{"image": Image.fromarray(np.full((16, 24), 0.5, "f4"))}]
    with pytest.raises(SourceError, match=r"^row 0: image: float pixels do not fit"):
        built(iter(wide), tmp_path / "out")


@pytest.mark.parametrize("empty", [[], iter(()), {"train": [], "val": []}])
def test_a_dataset_without_samples_is_said_whatever_was_asked_of_pictures(tmp_path: Path, empty: Any) -> None:
    with pytest.raises(SourceError, match=r"^the dataset: there are no rows$"):
        built(empty, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_statistics_of_a_picture_that_counts_by_itself_are_of_its_counts(tmp_path: Path, dtype: str) -> None:
    depths = np.random.default_rng(0).integers(0, 50_000, (4, 6, 8)).astype(np.uint16)
    data = [{"image": Image.new("RGB", (8, 6), (99, 0, 0)), "depth": Image.fromarray(deep)} for deep in depths]
    own = {"kind": "image", "mode": "gray", "dtype": dtype, "scale": "none"}
    built(data, tmp_path / "out", Preprocess(keep_size=(6, 8), fields={"depth": own}))
    found = Reader(tmp_path / "out").index.statistics["all"]
    assert np.allclose(found["depth"]["mean"], depths.mean())
    assert np.allclose(found["depth"]["std"], depths.std())
    assert np.allclose(found["image"]["mean"], [99 / 255, 0, 0])
