"""`transforms=` of masks, boxes, keypoints and lists: torchvision's types where it is there, else tensors, and lists cut to their count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmcompile import Augment, MMapShardDataset, ShardLoader, ShardSampler
from mmcompile.runtime import joint
from tests.runtime.test_device import resident
from tests.support import draw_scenes, make_dataset, make_scenes

N, H, W, K = 24, 48, 64, 6
SCENES = draw_scenes(N, H, W, K)
NAMES = ("image", "mask", "boxes", "labels", "keypoints", "boxes_count", "caption")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_scenes(tmp_path, SCENES, shards=(15, 9))
    return tmp_path


def together(samples: Any) -> Any:
    """The collate function of torchvision's detection references."""
    return tuple(zip(*samples, strict=True))


def as_they_are(*values: Any) -> tuple[Any, ...]:
    return values


def check_boxes(image: torch.Tensor, mask: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> None:
    """The pixels of each object lie in its box, and are all that it holds of it."""
    assert set(mask.unique().tolist()) - {0} == set(labels.tolist())
    assert torch.equal(image, (10 * mask).expand(image.shape))
    for label, box in zip(labels.tolist(), boxes.tolist(), strict=True):
        y, x = torch.nonzero(mask == label, as_tuple=True)
        assert [x.min(), y.min(), x.max() + 1, y.max() + 1] == box


def test_without_torchvision_all_are_tensors_and_lists_as_long_as_they_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_types", lambda: None)
    ds = MMapShardDataset(root, transforms=as_they_are)
    for i in (0, 3, N - 1):
        image, mask, boxes, labels, keypoints, count, caption = ds[i]
        n = int(SCENES["boxes_count"][i])
        assert int(count) == n
        assert [type(v) for v in (image, mask, boxes, labels, keypoints)] == [torch.Tensor] * 5
        assert np.array_equal(boxes, SCENES["boxes"][i, :n])
        assert np.array_equal(labels, SCENES["labels"][i, :n])
        assert np.array_equal(keypoints, SCENES["keypoints"][i, :n])
        assert caption == f"{n} Körper"
    images, _, boxes, *_ = next(iter(DataLoader(ds, 4, collate_fn=together)))
    assert len(images) == 4
    assert [len(b) for b in boxes] == SCENES["boxes_count"][:4].tolist()


def test_lists_are_cut_by_their_boxes_where_the_count_is_not_in_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_types", lambda: None)
    for fields in (("image", "boxes", "labels"), ("labels", "boxes"), ("boxes_count", "labels"), ("keypoints", "boxes_count")):
        ds = MMapShardDataset(root, fields=fields, transforms=as_they_are)
        for i in range(N):
            lists = [v for name, v in zip(fields, ds[i], strict=True) if name in ("boxes", "labels", "keypoints")]
            assert {len(v) for v in lists} == {SCENES["boxes_count"][i]}
    whole = MMapShardDataset(root, fields=("image", "labels"), transforms=as_they_are)
    assert {len(labels) for _, labels in whole} == {K}  # nothing in use says how many there are


def test_a_hostile_count_is_no_other_than_what_there_is(tmp_path: Path) -> None:
    counts = np.array([-3, 2**40, 2])
    make_dataset(tmp_path, values={"x": np.ones((3, 4), np.int64), "n": counts}, facts={"x": {"count": "n"}}, keyed=False)
    assert [len(x) for x, _ in MMapShardDataset(tmp_path, transforms=as_they_are)] == [0, 4, 2]


def test_other_datasets_and_other_hooks_import_no_torchvision(root: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "plain", SCENES["image"], np.zeros(N))
    code = f"""
import sys
from mmcompile import MMapShardDataset
ds = MMapShardDataset({str(tmp_path / "plain")!r}, transforms=lambda *values: values)
assert type(ds[0][0]).__name__ == "Tensor"
MMapShardDataset({str(root)!r}, transform=lambda image: image)[0]
MMapShardDataset({str(root)!r}, fields=("image", "caption"), transforms=lambda *values: values)[0]
assert not any(name.partition(".")[0] == "torchvision" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_batch_of_lists_that_differ_says_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_types", lambda: None)
    ds = MMapShardDataset(root, fields=("image", "boxes"), transforms=as_they_are)
    for read in (lambda: list(ShardLoader(ds, 8)), lambda: ds[:8]):
        with pytest.raises(
            ValueError, match=r"a transform gave samples that cannot be stacked .*; pad them, or use DataLoader\(dataset, collate_fn="
        ):
            read()


def test_hooks_after_an_augmentation_get_what_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_types", lambda: None)
    seen = []

    def look(image: torch.Tensor, mask: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        check_boxes(image, mask, boxes, labels)
        seen.append(len(boxes))
        return image

    ds = MMapShardDataset(root, fields=NAMES[:4], transforms=look)
    for there in (ds, resident(ds, None, monkeypatch)):
        for batch in ShardLoader(there, 5, augment=Augment(crop=30, hflip=0.5), num_workers=2):
            assert batch.shape[1:] == (3, 30, 30)
    assert seen[:N] == seen[N:]
    assert 0 < sum(seen[:N]) < SCENES["boxes_count"].sum()


class TestTorchvision:
    """What torchvision's own joint transforms make of a sample."""

    @pytest.fixture(autouse=True)
    def _torchvision(self) -> None:
        self.v2 = pytest.importorskip("torchvision.transforms.v2")
        self.types = pytest.importorskip("torchvision.tv_tensors")

    def test_each_field_comes_as_its_type(self, root: Path) -> None:
        for crop, size in ((None, (H, W)), ((31, 40), (31, 40))):
            ds = MMapShardDataset(root, transforms=as_they_are, crop=crop)
            plain = MMapShardDataset(root, crop=crop)
            for i in (0, 7, N - 1):
                image, mask, boxes, labels, (points, seen), count, caption = ds[i]
                n = int(count)
                assert type(image) is self.types.Image
                assert type(mask) is self.types.Mask
                assert type(boxes) is self.types.BoundingBoxes
                assert boxes.format == self.types.BoundingBoxFormat.XYXY
                assert boxes.canvas_size == size
                assert type(points) is self.types.KeyPoints
                assert points.canvas_size == size
                assert type(labels) is type(seen) is torch.Tensor
                raw = plain[i]
                assert caption == raw[6]
                for got, wanted in ((image, raw[0]), (mask, raw[1]), (boxes, raw[2][:n]), (labels, raw[3][:n])):
                    assert torch.equal(got.as_subclass(torch.Tensor), wanted)
                assert torch.equal(torch.cat([points.as_subclass(torch.Tensor), seen[..., None]], -1), raw[4][:n])

    def test_images_of_other_datasets_stay_tensors(self, tmp_path: Path) -> None:
        make_dataset(tmp_path, SCENES["image"], np.zeros(N))
        assert type(MMapShardDataset(tmp_path, transforms=as_they_are)[0][0]) is torch.Tensor

    def test_a_joint_transform_moves_all_of_a_sample(self, root: Path) -> None:
        flips = self.v2.Compose(
            [self.v2.RandomHorizontalFlip(0.5), self.v2.RandomCrop(40), self.v2.SanitizeBoundingBoxes(labels_getter=lambda s: s[3])]
        )
        ds = MMapShardDataset(root, fields=NAMES[:4], transforms=flips)
        ds.set_epoch(0)
        samples = [ds[i] for i in range(N)]
        for image, mask, boxes, labels in samples:
            assert image.shape == (3, 40, 40)
            check_boxes(image, mask, boxes, labels)
        assert len({len(labels) for *_, labels in samples}) > 1
        loader = DataLoader(ds, 5, collate_fn=together)
        for k, batch in enumerate(loader):
            for j, sample in enumerate(zip(*batch, strict=True)):
                assert all(torch.equal(a, b) and type(a) is type(b) for a, b in zip(sample, samples[5 * k + j], strict=True))

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_worker_processes_send_the_types(self, root: Path, context: str) -> None:
        ds = MMapShardDataset(root, transforms=as_they_are)
        here = [ds[i] for i in range(N)]
        sampler = ShardSampler(ds, shuffle=False)
        loader = DataLoader(ds, 7, sampler=sampler, num_workers=2, collate_fn=together, multiprocessing_context=context)
        there = [sample for batch in loader for sample in zip(*batch, strict=True)]
        assert len(there) == N
        for a, b in zip(here, there, strict=True):
            assert [type(v) for v in a] == [type(v) for v in b]
            assert all(torch.equal(x, y) for x, y in zip(a[:4], b[:4], strict=True))
            assert b[2].canvas_size == (H, W)

    def test_a_transform_of_fixed_shapes_is_stacked(self, root: Path) -> None:
        ds = MMapShardDataset(root, fields=("image", "mask"), transforms=self.v2.RandomResizedCrop(32))
        images, masks = next(iter(ShardLoader(ds, 8)))
        assert (images.shape, masks.shape) == ((8, 3, 32, 32), (8, 32, 32))
        assert type(images) is type(masks) is torch.Tensor
        assert set(masks.unique().tolist()) <= set(range(K + 1))

    def test_the_canvas_is_that_of_what_an_augmentation_cut(self, root: Path) -> None:
        ds = MMapShardDataset(root, fields=NAMES[:4], transforms=lambda *values: (values[2].canvas_size, len(values[2]), len(values[3])))
        for sizes, boxes, labels in ShardLoader(ds, N, augment=Augment(resized_crop=(20, 30))):
            assert [set(side.tolist()) for side in sizes] == [{20}, {30}]
            assert torch.equal(boxes, labels)

    def test_boxes_without_pixels_have_the_canvas_of_the_picture(self, root: Path) -> None:
        ds = MMapShardDataset(root, fields=("boxes", "labels"), transforms=as_they_are)
        assert ds[3][0].canvas_size == (H, W)

    def test_our_cut_is_torchvisions_of_the_same_place(self, root: Path) -> None:
        ds = MMapShardDataset(root, fields=("image", "mask", "boxes", "keypoints"), transforms=as_they_are)
        for augment in (Augment(crop=30, hflip=0.5), Augment(resized_crop=(40, 36), hflip=0.5)):
            cut = augment.draw(0, 0, np.arange(N), H, W)
            moved = next(iter(ShardLoader(MMapShardDataset(root), N, augment=augment)))
            for i in range(N):
                image, mask, boxes, (points, seen) = ds[i]
                where = int(cut.top[i]), int(cut.left[i]), int(cut.height[i]), int(cut.width[i])
                theirs = [self.v2.functional.resized_crop(v, *where, size=list(cut.size)) for v in (image, mask, boxes, points)]
                if cut.flip[i]:
                    theirs[:3] = [self.v2.functional.horizontal_flip(v) for v in theirs[:3]]
                others, masks, boxes, points = (v.as_subclass(torch.Tensor) for v in theirs)
                if cut.flip[i]:  # theirs counts points from the middles of pixels
                    points[..., 0] = cut.size[1] - points[..., 0]
                kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
                n = int(moved[5][i])
                assert int(kept.sum()) == n
                torch.testing.assert_close(moved[2][i, :n], boxes[kept])
                assert torch.equal(moved[0][i], others)
                torch.testing.assert_close(moved[4][i, :n, :, :2], points[kept])
                assert (moved[4][i, :n, :, 2] <= seen[kept]).all()
                assert int((moved[1][i] != masks).sum()) <= 0.1 * masks.numel()  # theirs takes the corner of a pixel, ours its middle
