"""Datasets of torchvision, and samples of its tv_tensors, as a source: masks, boxes and keypoints are taken for what their classes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmcompile.compiler import rowbuild
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowrun import Here
from mmcompile.errors import SourceError
from tests.compiler.test_sample_fields import Drawn, built, drawn, fields, palette

torchvision = pytest.importorskip("torchvision")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")
#: torchvision opens masks, and leaves the file of one that nobody looks at to the collector.
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning", "ignore:.*:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowbuild, "start_readers", lambda source, scratch, workers: (Here(), source, ""))


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def test_segmentation_of_voc(tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit/VOC2012"
    for i in range(4):
        save(root / f"JPEGImages/{i}.jpg", Image.fromarray(drawn(i)[0]))
        save(root / f"SegmentationClass/{i}.png", palette(drawn(i)[1]))
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    (root / "ImageSets/Segmentation/train.txt").write_text("0\n1\n2\n3\n")
    data = torchvision.datasets.VOCSegmentation(str(tmp_path), image_set="train")
    report, rows = built(data, tmp_path / "out")
    assert report.fields == ("image", "mask")
    assert np.array_equal(rows["mask"], [drawn(i)[1][2:14, 6:18] for i in range(4)])
    wrapped = torchvision.datasets.wrap_dataset_for_transforms_v2(data)
    assert built(wrapped, tmp_path / "wrapped")[1]["mask"].tolist() == rows["mask"].tolist()


def test_pets_with_their_breed_and_outline(tmp_path: Path) -> None:
    root = tmp_path / "oxford-iiit-pet"
    lines = []
    for i in range(4):
        save(root / f"images/Abyssinian_{i}.jpg", Image.fromarray(drawn(i)[0]))
        save(root / f"annotations/trimaps/Abyssinian_{i}.png", Image.fromarray(drawn(i)[1]))
        lines.append(f"Abyssinian_{i} 1 1 1")
    (root / "annotations/trainval.txt").write_text("\n".join(lines))
    data = torchvision.datasets.OxfordIIITPet(str(tmp_path), target_types=["category", "segmentation"])
    _, rows = built(data, tmp_path / "out")
    assert {name: f.meaning for name, f in fields(tmp_path / "out").items()} == {"image": "image", "mask": "mask", "label": "class"}
    assert np.array_equal(rows["mask"], [drawn(i)[1][2:14, 6:18] for i in range(4)])


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_detection_with_tv_tensors(tmp_path: Path, form: str, as_tensor: bool) -> None:
    def sample(image: Any, ids: Any, box: Any, i: int) -> Any:
        corners = tv_tensors.BoundingBoxes(torch.tensor([box] * (i % 3)).reshape(-1, 4).float(), format="XYXY", canvas_size=(16, 24))
        return tv_tensors.Image(np.asarray(image).transpose(2, 0, 1).copy()) if as_tensor else image, {
            "boxes": torchvision.transforms.v2.functional.convert_bounding_box_format(corners, new_format=form),
            "labels": torch.full((i % 3,), 4),
            "masks": tv_tensors.Mask(torch.from_numpy(np.stack([ids == 255] * (i % 3))) if i % 3 else torch.zeros(0, 16, 24, dtype=torch.uint8)),
            "image_id": i,
        }

    _, rows = built(Drawn(sample), tmp_path / "out", Preprocess(crop=12, fields={"masks": {"kind": "mask"}}))
    assert rows["boxes_count"].tolist() == [0, 1, 2, 0, 1]
    for i in range(5):
        there = rows["image"][i, 0] == 200
        ys, xs = np.nonzero(there)
        for k in range(i % 3):
            assert np.allclose(rows["boxes"][i, k], [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        assert np.array_equal(rows["masks"][i], there * (i % 3))


def test_boxes_of_another_canvas_are_an_error(tmp_path: Path) -> None:
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(24, 16))
    with pytest.raises(SourceError, match=r"row 0: boxes: of a canvas of \(24, 16\), and the picture is \(16, 24\)"):
        built(Drawn(lambda image, ids, box, i: (image, {"boxes": boxes})), tmp_path / "out")


def test_boxes_that_are_turned_are_refused(tmp_path: Path) -> None:
    boxes = tv_tensors.BoundingBoxes([[1.0, 2, 3, 4, 5]], format="XYWHR", canvas_size=(16, 24))
    with pytest.raises(SourceError, match="row 0: boxes: boxes of format xywhr; expected XYXY, XYWH or CXCYWH"):
        built(Drawn(lambda image, ids, box, i: (image, {"boxes": boxes})), tmp_path / "out")
