"""Masks, boxes, keypoints, their labels and text: drawn, read, cropped and augmented, and found again in the pixels."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from mmcompile import Augment, CorruptShardError, MMapShardDataset, Preprocess, ShardLoader, ShardSampler
from mmcompile.compiler.spatial import Form, Mover
from mmcompile.format.fields import Field, row_dtype
from mmcompile.runtime.augment import Cut
from mmcompile.runtime.spatial import _move_boxes, _move_points, _places
from tests.compiler.builds import inline, run
from tests.compiler.test_many_fields import make as make_pairs
from tests.runtime.test_device import resident
from tests.support import draw_scenes, make_dataset, make_scenes

Array = npt.NDArray[Any]
N, H, W, K = 40, 48, 64, 6
NAMES = ("image", "mask", "boxes", "labels", "keypoints", "boxes_count", "caption")
SCENES = draw_scenes(N, H, W, K)
#: What boxes, labels and keypoints are.
LISTED = ("boxes", "value", "keypoints")
AUGMENTS = {
    "crop": Augment(crop=30, hflip=0.5),
    "padded": Augment(crop=(40, 72), padding=9, hflip=0.5),
    "flip": Augment(hflip=0.5),
    "resized": Augment(resized_crop=(40, 36), scale=(0.1, 0.9), hflip=0.5),
    "enlarged": Augment(resized_crop=96, scale=(0.3, 1.0), hflip=0.5),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_scenes(tmp_path, SCENES, shards=(15, 5, 20))
    return tmp_path


def rows_of(batches: Iterable[Any]) -> dict[str, Any]:
    """All batches as one, by field."""
    parts = [list(batch.values()) if isinstance(batch, dict) else list(batch) for batch in batches]
    joined = [list(itertools.chain(*values)) if isinstance(values[0], list | tuple) else torch.cat(values) for values in zip(*parts, strict=True)]
    return dict(zip(NAMES, joined, strict=True))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all((torch.equal(v, b[k]) and v.dtype == b[k].dtype) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


def check_found(sample: dict[str, Array], slack: float) -> int:
    """Are the boxes and keypoints of a sample where its objects are drawn?  Returns how many there are."""
    image, mask = sample["image"], sample["mask"]
    n = int(sample["boxes_count"])
    labels = sample["labels"][:n].tolist()
    height, width = mask.shape
    assert len(set(labels)) == n
    assert set(np.unique(mask)) - {0} <= set(labels)
    if not slack:
        assert np.array_equal(image, np.broadcast_to(10 * mask, image.shape))
        assert set(np.unique(mask)) - {0} == set(labels)
    for name in ("boxes", "labels", "keypoints"):
        assert (sample[name][n:] == (-1 if name == "labels" else 0)).all(), name
    for label, box, points in zip(labels, sample["boxes"][:n].tolist(), sample["keypoints"][:n].tolist(), strict=True):
        assert 0 <= box[0] < box[2] <= width
        assert 0 <= box[1] < box[3] <= height
        y, x = np.nonzero(mask == label)
        if len(y):
            drawn = [x.min(), y.min(), x.max() + 1, y.max() + 1]
            assert np.abs(np.array(drawn) - box).max() <= slack, (label, drawn, box)
        else:
            assert min(box[2] - box[0], box[3] - box[1]) <= slack
        for px, py, seen in points:
            assert bool(seen) == (0 <= px < width and 0 <= py < height)
            if seen and not slack:
                assert mask[int(py), int(px)] == label
            elif seen:
                assert box[0] - slack <= px <= box[2] + slack
                assert box[1] - slack <= py <= box[3] + slack
    return n


def test_every_way_of_reading_gives_what_was_stored(root: Path) -> None:
    for engine in ("mmap", "pread"):
        ds = MMapShardDataset(root, engine=engine)
        assert [f.meaning for f in ds.fields.values()] == ["image", "mask", "boxes", "value", "keypoints", "value", "text"]
        texts = [bytes(line).rstrip(b"\0").decode() for line in SCENES["caption"]]
        for i in (0, 14, 15, 39, -1):
            for name, value in zip(NAMES, ds[i], strict=True):
                if name == "caption":
                    assert value == texts[i]
                else:
                    assert np.array_equal(value.numpy(), SCENES[name][i])
                    assert value.numpy().dtype == SCENES[name].dtype
        order = [39, 0, 20, 3]
        wanted = {name: torch.from_numpy(SCENES[name][order]) for name in NAMES[:-1]} | {"caption": [texts[i] for i in order]}
        assert same(dict(zip(NAMES, ds[order], strict=True)), wanted)
        assert same(dict(zip(NAMES, DataLoader(ds, 4, sampler=order).__iter__().__next__(), strict=True)), wanted)
        assert same(rows_of([default_collate([ds[i] for i in order])]), wanted)
        assert same(rows_of(ShardLoader(ds, 7)), rows_of([ds[:]]))
        as_dict = MMapShardDataset(root, engine=engine, output="dict", fields=("caption", "mask", "labels"))
        assert list(as_dict[3]) == ["caption", "mask", "labels"]
        assert as_dict[3]["caption"] == texts[3]
        assert as_dict[[3, 4]]["caption"] == texts[3:5]


def test_text_alone_is_a_string_and_a_list_of_them(root: Path) -> None:
    ds = MMapShardDataset(root, fields=("caption",), copy=True)
    texts = ds[:]
    assert texts == [ds[i] for i in range(N)]
    assert texts[0].endswith(" Körper")
    assert [text for batch in DataLoader(ds, 7) for text in batch] == texts
    assert [text for batch in DataLoader(ds, 7, num_workers=1) for text in batch] == texts
    assert [text for batch in ShardLoader(ds, 7) for text in batch] == texts
    assert ds[[]] == []
    asked = MMapShardDataset(root, fields=("caption",), transforms=lambda text: torch.tensor(len(text)))
    assert asked[:].tolist() == list(map(len, texts))


def test_text_that_is_none_names_the_field(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"caption": np.full((2, 3), 0xFF, np.uint8)}, facts={"caption": {"meaning": "text"}}, keyed=False)
    for read in (lambda ds: ds[0], lambda ds: ds[:], lambda ds: list(ShardLoader(ds, 2))):
        with pytest.raises(CorruptShardError, match="field 'caption' holds bytes that are no UTF-8; run `mmcompile verify "):
            read(MMapShardDataset(tmp_path))


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_a_centre_crop_moves_all_that_belongs_to_the_picture(tmp_path: Path, layout: str) -> None:
    make_scenes(tmp_path, SCENES, layout=layout)
    for engine, crop in (("mmap", (31, 40)), ("pread", 24), ("mmap", (H, W))):
        ds = MMapShardDataset(tmp_path, crop=crop, engine=engine)
        found = rows_of([ds[:]])
        counts = [check_found({name: found[name][i].numpy() for name in NAMES[:-1]}, 0) for i in range(N)]
        assert (sum(counts) < SCENES["boxes_count"].sum()) == (crop != (H, W))
        assert same(rows_of(default_collate([ds[i]]) for i in range(N)), found)
        assert same(rows_of(DataLoader(ds, 7)), found)
        assert same(rows_of(ShardLoader(ds, 7, num_workers=2)), found)
        assert tuple(found["mask"].shape[1:]) == ((crop, crop) if isinstance(crop, int) else crop)
    assert same({name: torch.from_numpy(SCENES[name]) for name in NAMES[:-1]}, rows_of([MMapShardDataset(tmp_path)[:]]))  # nothing was written to


def test_a_crop_gives_the_lists_as_a_dumb_loop_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    boxes = rng.uniform(0, 60, (N, K, 4)).astype(np.float32)
    boxes[:, :, 2:] = np.minimum(boxes[:, :, :2] + rng.uniform(0, 20, (N, K, 2)), [W, H])
    count = rng.integers(0, K + 1, N)
    names, areas = rng.integers(0, 3, (N, K)).astype(np.int16), rng.uniform(1, 2, (N, K)).astype(np.float32)
    points = np.concatenate([rng.uniform(0, H, (N, K, 2)), rng.integers(0, 3, (N, K, 1))], 2).astype(np.float32)
    points[points[..., 2] == 0] = 0
    for i in range(N):
        boxes[i, count[i] :], names[i, count[i] :], areas[i, count[i] :], points[i, count[i] :] = 0, -1, 0, 0
    values = {"boxes": boxes, "n": count, "names": names, "areas": areas, "points": points, "whole": boxes[:, 0].copy()[:, None]}
    facts: dict[str, dict[str, Any]] = {
        "boxes": {"meaning": "boxes", "count": "n"},
        "names": {"count": "n", "categories": ("a", "b", "c")},
        "areas": {"count": "n", "normalize": ((0.5,) * K, (2.0,) * K)},
        "points": {"meaning": "keypoints", "count": "n"},
        "whole": {"meaning": "boxes"},
    }
    settings = {"preprocess": {"fields": {"boxes": {"min_visibility": 0.4}}}}
    make_dataset(tmp_path, SCENES["image"], values=values, facts=facts, settings=settings)
    _, *got = MMapShardDataset(tmp_path, crop=(30, 30))[:]
    top, left = 9, 17
    for i in range(N):
        kept = []
        for k in range(count[i]):
            x0, y0, x1, y1 = boxes[i, k] - np.float32([left, top, left, top])
            inside = np.clip([x0, y0, x1, y1], 0, 30)
            if (inside[2] - inside[0]) * (inside[3] - inside[1]) > max(0, 0.4 * (x1 - x0) * (y1 - y0)):
                kept.append((inside, names[i, k], areas[i, k], points[i, k]))
        assert int(got[1][i]) == len(kept)
        for k in range(K):
            box, name, area, (x, y, seen) = kept[k] if k < len(kept) else (np.zeros(4), -1, 0, np.zeros(3))
            if seen:
                x, y = x - left, y - top
            assert np.allclose(got[0][i, k], box, atol=1e-5)
            assert got[2][i, k] == name
            assert got[3][i, k] == torch.tensor((np.float32(area) - np.float32(0.5)) / np.float32(2))
            assert np.allclose(got[4][i, k], [x, y, seen if 0 <= x < 30 and 0 <= y < 30 else 0], atol=1e-5)
        whole = np.clip(boxes[i, 0] - [left, top, left, top], 0, 30)
        assert np.allclose(got[5][i, 0], whole, atol=1e-5)


@pytest.mark.parametrize("name", AUGMENTS)
def test_augmented_objects_are_found_in_the_pixels(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    augment, slack = AUGMENTS[name], 1.001 if name in ("resized", "enlarged") else 0.0
    if name == "enlarged":
        slack = 3.5  # one pixel of the picture
    ds = MMapShardDataset(root)
    options: dict[str, Any] = {"batch_size": 7, "augment": augment, "seed": 3, "shuffle": True}
    loader = ShardLoader(ds, **options)
    for epoch in range(3):
        found = rows_of(loader)
        counts = [check_found({name: found[name][i].numpy() for name in NAMES[:-1]}, slack) for i in range(N)]
        assert sum(counts) == SCENES["boxes_count"].sum() if name == "flip" else sum(counts) > 0
        others = {
            "threads": ShardLoader(ds, num_workers=3, **options),
            "pread": ShardLoader(MMapShardDataset(root, engine="pread"), **options),
            "device": ShardLoader(ds, device="cpu", **options),
            "resident": ShardLoader(resident(ds, None, monkeypatch), **options),
            "partly": ShardLoader(resident(ds, 20 * ds._columns[0].row_bytes * 2, monkeypatch), **options),
        }
        for where, other in others.items():
            other.set_epoch(epoch)
            there = rows_of(other)
            scaled = where in ("resident", "partly") and slack
            assert same({k: v for k, v in found.items() if k != "image" or not scaled}, there), where
            assert (found["image"].int() - there["image"].int()).abs().max() <= bool(scaled), where


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_a_mask_of_objects_has_the_numbers_of_the_boxes_that_are_left(tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.where(np.arange(K) < SCENES["boxes_count"][:, None], SCENES["labels"], -5)
    of = (SCENES["mask"][..., None] == labels[:, None, None]) * np.arange(1, K + 1)
    objects = of.sum(-1).astype(dtype)
    assert np.array_equal(objects > 0, SCENES["mask"] > 0)
    objects[:, 0, 0] = 200  # no number of a box
    make_scenes(tmp_path, {**SCENES, "objects": objects}, {"objects": {"meaning": "mask", "count": "boxes_count"}}, shards=(15, 25))
    fields = ("mask", "objects", "boxes", "labels", "boxes_count", "image")
    cropped = MMapShardDataset(tmp_path, fields=fields, crop=26, output="dict")
    check_objects(cropped[list(range(N))], 0)
    whole = MMapShardDataset(tmp_path, fields=fields, output="dict")
    for name, augment in AUGMENTS.items():
        monkeypatch.setattr("mmcompile.runtime.spatial._SERIAL", 1 << 15 if name == "flip" else 100)
        for ds in (whole, cropped) if name == "resized" else (whole,):
            made = [list(ShardLoader(ds, batch_size=N, augment=augment, device=device)) for device in (None, "cpu")]
            check_objects(made[0][0], 200 * (name == "flip"))
            assert all(torch.equal(value, made[1][0][field]) for field, value in made[0][0].items())
    alone = MMapShardDataset(tmp_path, fields=("image", "objects"), crop=26)
    assert torch.equal(alone[0][1], torch.from_numpy(objects[0, 11:37, 19:45].astype(dtype)))
    assert MMapShardDataset(tmp_path, fields=fields, transforms=lambda *values: values)[0][1].shape == (H, W)


def check_objects(made: dict[str, torch.Tensor], strange: int) -> None:
    """Is each pixel the number of the box whose label the pixel of the other mask is, and 0 where that box is gone?"""
    gone = 0
    for mask, objects, labels, n in zip(made["mask"].long(), made["objects"].to(torch.int64), made["labels"], made["boxes_count"], strict=True):
        objects = torch.where(objects == 200, 0, objects)
        assert int(objects.max()) <= n
        assert torch.equal(torch.cat([torch.zeros(1, dtype=torch.int64), labels])[objects], torch.where(torch.isin(mask, labels[:n]), mask, 0))
        gone += int(n) < K
    assert gone
    assert not strange or bool((made["objects"].to(torch.int64) == strange).any())


def test_the_cut_of_a_single_image_is_that_of_the_image_with_all_that_belongs_to_it(root: Path) -> None:
    for augment in AUGMENTS.values():
        options: dict[str, Any] = {"batch_size": 9, "augment": augment, "seed": 5}
        alone = torch.cat(list(ShardLoader(MMapShardDataset(root, fields=("image",)), **options)))
        assert torch.equal(alone, rows_of(ShardLoader(MMapShardDataset(root), **options))["image"])


def test_a_second_image_and_a_mask_of_any_dtype_get_the_cut_of_the_first(tmp_path: Path) -> None:
    scenes = draw_scenes(8)
    for dtype in ("uint8", "uint16", "int64"):
        values = {"mask": scenes["mask"].astype(dtype), "right": scenes["image"].transpose(0, 2, 3, 1) + 1}
        facts = {"mask": {"meaning": "mask"}, "right": {"meaning": "image", "layout": "hwc", "scale": 255.0}}
        make_dataset(tmp_path / dtype, scenes["image"], values=values, facts=facts)
        for augment in AUGMENTS.values():
            for image, mask, right in ShardLoader(MMapShardDataset(tmp_path / dtype), 8, augment=augment):
                assert mask.dtype == getattr(torch, dtype)
                assert set(mask.flatten().tolist()) <= set(range(K + 1))
                inside = right != 0
                assert torch.equal((right.int() - 1)[inside], image.int()[inside])
                assert not image[~inside].any()
                if augment.resized_crop is None:
                    assert torch.equal(mask.int()[:, None].expand(image.shape) * 10, image.int())


def test_class_ids_beyond_the_picture_are_what_the_mask_was_built_to_have_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = {"image": SCENES["image"] + 1, "mask": SCENES["mask"].astype(np.uint16)}
    make_scenes(tmp_path, scenes, settings={"preprocess": {"fields": {"mask": {"kind": "mask", "fill": 65535}}}})
    ds = MMapShardDataset(tmp_path)
    for augment in (Augment(crop=(60, 70), padding=8, hflip=0.5), Augment(crop=(9, 9), padding=6)):
        for there in (ds, resident(ds, None, monkeypatch)):
            for image, mask in ShardLoader(there, 8, augment=augment):
                assert torch.equal(mask.int() == 65535, image[:, 0] == 0)
                assert (mask.int() == 65535).any()


def test_what_cannot_follow_is_refused_in_one_line(tmp_path: Path) -> None:
    small = SCENES["mask"][:, ::2, ::2].copy()
    make_dataset(tmp_path / "small", SCENES["image"], values={"mask": small}, facts={"mask": {"meaning": "mask"}})
    ds = MMapShardDataset(tmp_path / "small")
    assert ds[0][1].shape == (24, 32)
    said = "field 'mask' is 24 x 32 \\(height x width\\) where .*'image'.* 48 x 64; build them with one geometry, or leave one out with fields="
    with pytest.raises(ValueError, match=f"augment moves all pictures of a sample together, and {said}"):
        ShardLoader(ds, augment=Augment(hflip=0.5))
    with pytest.raises(ValueError, match=f"crop moves all that belongs to a picture together, and {said}"):
        MMapShardDataset(tmp_path / "small", crop=20)
    ShardLoader(MMapShardDataset(tmp_path / "small", fields=("image",), crop=20), augment=Augment(hflip=0.5))
    make_scenes(tmp_path / "scenes", SCENES)
    for fields in (("image", "labels"), ("image", "boxes_count"), ("mask", "keypoints")):
        whole = MMapShardDataset(tmp_path / "scenes", fields=fields)
        assert len(whole[0]) == 2
        said = f"field '{fields[1]}' has a number for each box of 'boxes', some of which go: add 'boxes' to fields=, or leave it out"
        with pytest.raises(ValueError, match=f"augment moves all that belongs to a picture together, and {said}"):
            ShardLoader(whole, augment=Augment(hflip=0.5))
        with pytest.raises(ValueError, match=f"crop moves all that belongs to a picture together, and {said}"):
            MMapShardDataset(tmp_path / "scenes", fields=fields, crop=20)
        MMapShardDataset(tmp_path / "scenes", fields=fields, crop=(H, W))
    with pytest.raises(ValueError, match="augment needs an image, the fields are \\['boxes'\\]"):
        ShardLoader(MMapShardDataset(tmp_path / "scenes", fields=("boxes",)), augment=Augment(hflip=0.5))
    with pytest.raises(ValueError, match="windows are of pictures and values, not of boxes \\(boxes\\): leave them out with fields="):
        MMapShardDataset(tmp_path / "scenes", fields=("image", "boxes")).windows(2)
    with pytest.raises(ValueError, match=r"windows are of pictures and values, not of mask \(mask\)"):
        MMapShardDataset(tmp_path / "scenes", fields=("image",)).windows(2, horizon=0, target="mask")
    windows = MMapShardDataset(tmp_path / "scenes", fields=("image", "labels", "caption")).windows(2, horizon=1, target="caption")
    assert windows[0][3] == MMapShardDataset(tmp_path / "scenes", fields=("caption",))[2]
    assert windows[[0, 1]][3] == MMapShardDataset(tmp_path / "scenes", fields=("caption",))[2:4]
    odd = {**SCENES, "labels": SCENES["labels"][:, :3].copy()}
    make_scenes(tmp_path / "odd", odd)
    with pytest.raises(ValueError, match="field 'labels' has 3 rows, 'boxes' of the same count 6"):
        MMapShardDataset(tmp_path / "odd", crop=20)
    make_dataset(tmp_path / "bare", values={"boxes": SCENES["boxes"]}, facts={"boxes": {"meaning": "boxes"}}, keyed=False)
    with pytest.raises(ValueError, match="crop needs an image"):
        MMapShardDataset(tmp_path / "bare", crop=20)


def test_boxes_keep_their_precision_whatever_dtype_the_pixels_are_read_in(root: Path) -> None:
    ds = MMapShardDataset(root, dtype="bfloat16")
    assert [v.dtype for v in ds[3][:5]] == [torch.bfloat16, torch.uint8, torch.float32, torch.int64, torch.float32]
    with pytest.raises(ValueError, match="dtype bfloat16 is for images"):
        MMapShardDataset(root, dtype="bfloat16", fields=("boxes", "mask"))


def test_parts_pickles_and_samplers_see_the_same(root: Path) -> None:
    ds = MMapShardDataset(root, crop=32, output="dict")
    whole = ds[:]
    part = ds.subset([30, 2, 2, 17])
    assert same(part[:], {k: [v[i] for i in (30, 2, 2, 17)] if isinstance(v, list) else v[[30, 2, 2, 17]] for k, v in whole.items()})
    first, second = ds.random_split([0.5, 0.5], seed=1)
    assert len(first) + len(second) == N
    assert int(first[:]["boxes_count"].sum() + second[:]["boxes_count"].sum()) == int(whole["boxes_count"].sum())
    assert len(pickle.dumps(ds)) < 1000
    for other in (pickle.loads(pickle.dumps(ds)), copy.deepcopy(ds)):
        assert same(other[:], whole)
        assert same(other[[]], {k: v[:0] for k, v in whole.items()})
    loader = DataLoader(ds, sampler=ShardSampler(ds, batch_size=7, shuffle=False), batch_size=7)
    assert same(rows_of(loader), whole)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_send_what_the_dataset_gives(root: Path, context: str) -> None:
    ds = MMapShardDataset(root, crop=(31, 40))
    loader = DataLoader(ds, 11, num_workers=2, multiprocessing_context=context)
    assert same(rows_of(loader), rows_of([ds[:]]))


def test_a_device_of_which_text_alone_is_in_use_has_nothing_to_hold(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="text stays in the memory of the CPU, and no other field is in use: \\['caption'\\]"):
        resident(MMapShardDataset(root, fields=("caption",)), None, monkeypatch)
    ds = MMapShardDataset(root, crop=32)
    there = resident(ds, None, monkeypatch)
    assert same(rows_of([there[:]]), rows_of([ds[:]]))
    assert there[3][-1] == ds[3][-1]
    assert all(torch.equal(a, b) for a, b in zip(there[3][:-1], ds[3][:-1], strict=True))


def test_lists_of_many_rows_are_moved_some_samples_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_scenes(tmp_path, SCENES)
    ds = MMapShardDataset(tmp_path, crop=32)
    whole = rows_of([ds[:]])
    monkeypatch.setattr("mmcompile.runtime.spatial._SERIAL", 100)
    assert same(rows_of([ds[:]]), whole)


def test_a_point_moves_with_its_pixel_and_a_box_with_its_edges() -> None:
    cut = Cut(np.array([10]), np.array([20]), np.array([8]), np.array([4]), np.array([True]), (16, 16))
    where = torch.from_numpy(_places(cut))
    boxes = torch.tensor([[[20.0, 10, 24, 18], [21, 11, 30, 12], [0, 0, 20, 40], [0, 0, 0, 0]]])
    assert _move_boxes(boxes, where, 0).tolist() == [[True, True, False, False]]
    assert boxes[0, :2].tolist() == [[0, 0, 16, 16], [0, 2, 12, 4]]
    points = torch.tensor([[[20.0, 10, 2], [23, 17, 1], [24, 17, 2], [0, 0, 0], [19, 3, 0]]])
    _move_points(points, where)
    assert points[0].tolist() == [[16, 0, 2], [4, 14, 1], [0, 14, 0], [0, 0, 0], [20, -14, 0]]


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("resize", [None, (96, 128), (30, 37)])
def test_a_centre_crop_is_what_a_build_with_that_crop_stores(tmp_path: Path, resize: tuple[int, int] | None, share: float) -> None:
    lists = ("boxes", "labels", "keypoints")
    fields = tuple(Field(n, SCENES[n].dtype.name, SCENES[n].shape[1:], m, count="boxes_count") for n, m in zip(lists, LISTED, strict=True))
    fields = (*fields, Field("boxes_count", "int64", (), "value"))
    scan = np.zeros(N, row_dtype(fields))
    for name in (*lists, "boxes_count"):
        scan[name] = SCENES[name]
    sources = np.zeros(N, [("width", "<u4"), ("height", "<u4"), ("orientation", "u1")])
    sources["width"], sources["height"], sources["orientation"] = W, H, np.arange(N) % 4 + 1

    def built(**geometry: Any) -> Any:
        forms = (("boxes", Form(min_visibility=share)), ("keypoints", Form()))
        return Mover(Preprocess(resize=resize, **geometry), fields, forms).moved(scan, sources, [b""] * len(scan))

    size = resize or (H, W)
    crop = (size[0] * 2 // 3, size[1] // 2)
    whole, wanted = built(**({} if resize else {"crop": size})), built(crop=crop)
    settings = {"preprocess": {"fields": {"boxes": {"min_visibility": share}}}}
    scenes = {"image": np.zeros((N, 1, *size), np.uint8), **{f.name: whole[f.name].copy() for f in fields}}
    make_scenes(tmp_path, scenes, settings=settings)
    ds = MMapShardDataset(tmp_path, crop=crop, output="dict")
    found = ds[:]
    assert 0 < int(found["boxes_count"].sum()) < int(SCENES["boxes_count"].sum())
    for f in fields:
        assert np.allclose(found[f.name], wanted[f.name], rtol=0, atol=1e-4 if resize else 0), f.name


def test_reading_with_a_crop_is_reading_what_was_built_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    source = make_pairs(tmp_path / "raw", 20, lambda i: i % 4 + 1)
    run(source, tmp_path / "whole", Preprocess(crop=(16, 24)))
    run(source, tmp_path / "cut", Preprocess(crop=6))
    whole, cut = MMapShardDataset(tmp_path / "whole", crop=6), MMapShardDataset(tmp_path / "cut")
    assert list(whole.fields) == ["image", "mask", "boxes", "labels", "boxes_count"]
    assert 0 < int(cut[:][4].sum()) < 20
    for augment in (None, Augment(crop=8, padding=2, hflip=0.5), Augment(resized_crop=(9, 20))):
        for here, there in zip(ShardLoader(whole, 4, augment=augment), ShardLoader(cut, 4, augment=augment), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
