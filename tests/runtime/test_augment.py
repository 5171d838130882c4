"""Random crops and flips: drawn for each row alone, distributed as torchvision's, and the same on every path and memory layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.format.reader import Reader
from mmcompile.runtime.augment import Augment, Cut, apply
from mmcompile.runtime.cut import cut_rows
from mmcompile.runtime.numbers import as_array
from mmcompile.runtime.pixels import ImageColumn
from tests.support import make_dataset

DTYPES = (torch.uint8, torch.int8, torch.bool, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANY = np.arange(20_000, dtype=np.int64)


def images(n: int, channels: int, height: int, width: int, dtype: torch.dtype, hwc: bool) -> torch.Tensor:
    """Random stored images (N, C, H, W), channels_last for hwc."""
    noise = torch.from_numpy(np.random.default_rng(3).integers(0, 120, (n, channels, height, width)))
    out = (noise > 60 if dtype == torch.bool else noise).to(dtype)
    return out.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if hwc else out


def on_disk(values: torch.Tensor, hwc: bool) -> Any:
    return as_array(values.permute(0, 2, 3, 1) if hwc else values)


def on_cpu(values: torch.Tensor, cut: Cut, hwc: bool) -> torch.Tensor:
    n, channels = values.shape[:2]
    made = torch.empty((n, channels, *cut.size), dtype=values.dtype)
    made = made.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if hwc else made
    cut_rows(on_disk(values, hwc), np.arange(n), cut, on_disk(made, hwc), values.dtype, hwc)
    return made


def oracle(values: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Pixel by pixel what a cut without scaling is."""
    n, channels, height, width = values.shape
    out = torch.zeros((n, channels, *cut.size), dtype=values.dtype)
    for i in range(n):
        for y in range(cut.size[0]):
            for x in range(cut.size[1]):
                down, across = int(cut.top[i]) + y, int(cut.left[i]) + (cut.size[1] - 1 - x if cut.flip[i] else x)
                if 0 <= down < height and 0 <= across < width:
                    out[i, :, y, x] = values[i, :, down, across]
    return out


def boxes(*box: tuple[int, int, int, int, bool], size: tuple[int, int]) -> Cut:
    top, left, height, width = (np.array(v, np.int64) for v in list(zip(*box, strict=True))[:4])
    return Cut(top, left, height, width, np.array([b[4] for b in box]), size)


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    hwc=st.booleans(),
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    crop=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=st.integers(0, 3),
    seed=st.integers(0, 3),
    together=st.booleans(),
)
def test_crops_and_flips_equal_indexing_pixel_by_pixel(
    dtype: torch.dtype, hwc: bool, channels: int, size: tuple[int, int], crop: tuple[int, int], padding: int, seed: int, together: bool
) -> None:
    crop = min(crop[0], size[0] + 2 * padding), min(crop[1], size[1] + 2 * padding)
    values = images(4, channels, *size, dtype, hwc)
    cut = Augment(crop=crop, padding=padding, hflip=0.5).draw(seed, 0, np.arange(4), *size)
    expected = oracle(values, cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmcompile.runtime.cut._SMALL", 1 << 14 if together else 0)
        patch.setattr("mmcompile.runtime.cut._PIECE", 700)
        assert torch.equal(on_cpu(values, cut, hwc), expected)
    got = apply(values, cut)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("hwc", [False, True], ids=["chw", "hwc"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_large_crops_are_flipped_whole(dtype: torch.dtype, hwc: bool) -> None:
    values = images(2, 3, 70, 81, dtype, hwc)
    cut = boxes((3, 5, 61, 67, True), (9, 14, 61, 67, False), size=(61, 67))
    expected = oracle(values, cut)
    assert torch.equal(on_cpu(values, cut, hwc), expected)
    assert torch.equal(apply(values, cut), expected)


@pytest.mark.parametrize("hwc", [False, True], ids=["chw", "hwc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_cut_is_a_resize_of_its_box(dtype: torch.dtype, hwc: bool) -> None:
    values = images(3, 3, 40, 37, dtype, hwc)
    cut = boxes((2, 3, 30, 21, False), (5, 0, 9, 37, True), (0, 4, 16, 12, True), size=(16, 12))
    got = on_cpu(values, cut, hwc)
    assert torch.equal(got[2:], oracle(values[2:], cut[2:]))  # as large as asked for: not scaled
    for i, (top, left, height, width, flip) in enumerate([(2, 3, 30, 21, False), (5, 0, 9, 37, True)]):
        box = values[i : i + 1, :, top : top + height, left : left + width].double()
        exact = torch.nn.functional.interpolate(box, (16, 12), mode="bilinear", antialias=True)[0]
        exact = exact.flip(2) if flip else exact
        if dtype.is_floating_point:
            torch.testing.assert_close(got[i], exact.to(dtype))
        elif dtype == torch.uint8:
            assert (got[i] - exact).abs().max() <= 1
        else:
            assert (got[i].double() - exact).abs().max() <= 0.5 + 1e-4
    here = apply(values, cut)
    assert here.dtype == dtype
    assert here.is_contiguous(memory_format=torch.channels_last if hwc else torch.contiguous_format)
    if dtype.is_floating_point:
        torch.testing.assert_close(here, got)
    else:
        assert (here.double() - got.double()).abs().max() <= 1


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_a_column_cuts_rows_of_all_shards_and_then_computes(tmp_path: Path, layout: str, engine: str) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (7, 3, 20, 18), dtype=np.uint8)
    make_dataset(tmp_path, stored, layout=layout, normalize=((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), shards=(2, 4, 1))
    reader = Reader(tmp_path, engine=engine)
    rows = np.array([6, 0, 3, 3, 1, 5], np.int64)
    for crop, augment in (
        (None, Augment(crop=11, padding=2, hflip=0.5)),
        ((16, 15), Augment(crop=(9, 10), hflip=0.5)),
        ((16, 15), Augment(hflip=0.5)),
        (17, Augment(resized_crop=(8, 9), hflip=0.5)),
    ):
        column = ImageColumn(reader, reader.index.fields[0], None, crop)
        cut = augment.draw(1, 2, rows, *column.shape[1:])
        plain = column.batch(rows, raw=True)
        cropped = torch.from_numpy(stored[rows])
        if crop is not None:
            height, width = column.shape[1:]
            top, left = round((20 - height) / 2), round((18 - width) / 2)
            cropped = cropped[:, :, top : top + height, left : left + width]
        assert torch.equal(plain, cropped)
        raw = column.batch(rows, cut=cut, raw=True)
        assert torch.equal(raw, on_cpu(plain, cut, layout == "hwc"))
        assert raw.is_contiguous(memory_format=torch.contiguous_format if layout == "chw" else torch.channels_last)
        out = column.empty(len(rows), size=cut.size)
        assert column.batch(rows, out, cut=cut) is out
        assert torch.equal(out, column.numbers(raw))


def test_what_is_drawn_depends_on_seed_epoch_and_row_alone() -> None:
    rows = np.array([5, 0, 10**9, 7], np.int64)
    for augment in (Augment(crop=20, padding=3, hflip=0.5), Augment(resized_crop=20, hflip=0.5)):
        whole = augment.draw(3, 1, rows, 32, 30)
        assert len(whole) == 4
        for i, row in enumerate(rows):
            alone = augment.draw(3, 1, np.array([row]), 32, 30)
            for name in ("top", "left", "height", "width", "flip"):
                assert getattr(alone, name)[0] == getattr(whole, name)[i] == getattr(whole[i : i + 1], name)[0]
        for other in (augment.draw(4, 1, MANY, 32, 30), augment.draw(3, 2, MANY, 32, 30)):
            assert (other.left != augment.draw(3, 1, MANY, 32, 30).left).mean() > 0.5
    flips = [Augment(crop=20, hflip=0.5), Augment(hflip=0.5), Augment(resized_crop=9, hflip=0.5)]
    drawn = [a.draw(0, 0, MANY, 32, 30).flip for a in flips]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] == drawn[2]).all()


def test_offsets_are_uniform_to_both_ends_and_flips_as_often_as_asked() -> None:
    cut = Augment(crop=(27, 30), padding=2, hflip=0.3).draw(0, 0, MANY, 32, 30)
    for offsets, low, count in ((cut.top, -2, 10), (cut.left, -2, 5)):
        found = np.bincount(offsets - low, minlength=count)
        assert len(found) == count
        chi = ((found - len(MANY) / count) ** 2 / (len(MANY) / count)).sum()
        assert chi < count - 1 + 5 * math.sqrt(2 * (count - 1))
    assert abs(np.corrcoef(cut.top, cut.left)[0, 1]) < 0.03
    assert abs(cut.flip.mean() - 0.3) < 0.02
    assert not Augment(hflip=0.0).draw(0, 0, MANY, 4, 4).flip.any()
    assert Augment(hflip=1.0).draw(0, 0, MANY, 4, 4).flip.all()


def test_random_boxes_lie_within_the_image_and_take_what_was_asked_of_it() -> None:
    cut = Augment(resized_crop=10, scale=(0.2, 0.5), ratio=(0.5, 2.0)).draw(0, 0, MANY, 200, 200)
    assert min(cut.top.min(), cut.left.min()) == 0
    assert max((cut.top + cut.height).max(), (cut.left + cut.width).max()) == 200
    area, ratio = cut.height * cut.width / 200**2, cut.width / cut.height
    assert 0.19 < area.min() < 0.21
    assert 0.49 < area.max() < 0.51
    assert abs(area.mean() - 0.35) < 0.005
    assert ratio.min() > 0.49
    assert ratio.max() < 2.05
    assert abs(np.log(ratio).mean()) < 0.01
    narrow = Augment(resized_crop=10, scale=(1.0, 1.0), ratio=(3.0, 4.0)).draw(0, 0, MANY[:5], 50, 60)  # never fits: the central box of ratio 3
    assert (narrow.height == 20).all()
    assert (narrow.width == 60).all()
    assert (narrow.top == 15).all()
    wide = Augment(resized_crop=10, scale=(1.0, 1.0), ratio=(0.2, 0.25)).draw(0, 0, MANY[:5], 50, 60)
    assert (wide.width == 12).all()
    assert (wide.left == 24).all()


def test_equals_torchvision_in_distribution_and_in_pixels() -> None:
    pytest.importorskip("torchvision")
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2 import functional

    torch.manual_seed(0)
    probe = torch.zeros(1, 60, 90)
    theirs = np.array([RandomResizedCrop.get_params(probe, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(5000)])
    cut = Augment(resized_crop=24).draw(0, 0, MANY, 60, 90)
    for k, ours in enumerate((cut.top, cut.left, cut.height, cut.width)):
        for level in np.percentile(theirs[:, k], [5, 25, 50, 75, 95]):
            assert abs((theirs[:, k] <= level).mean() - (ours <= level).mean()) < 0.035
    for hwc in (False, True):
        values = images(40, 3, 60, 90, torch.uint8, hwc)
        part = cut[:40]
        got = on_cpu(values, part, hwc)
        for i in range(40):
            box = int(part.top[i]), int(part.left[i]), int(part.height[i]), int(part.width[i])
            assert torch.equal(got[i], functional.resized_crop(values[i], *box, size=[24, 24], antialias=True))
        assert (apply(values, part).int() - got.int()).abs().max() <= 1


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong, said in (
        ({"crop": 0}, r"crop must be in \[1, inf\), not 0"),
        ({"resized_crop": (4, -1)}, r"resized_crop must be in \[2, inf\), not \(4, -1\)"),
        ({"crop": 4, "resized_crop": 4}, "exclude each other"),
        ({"crop": 4, "padding": -1}, r"padding must be in \[0, inf\), not -1"),
        ({"padding": 4}, "crop is None; add crop="),
        ({"hflip": 1.5}, r"hflip must be a probability in \[0, 1\], not 1.5"),
        ({"hflip": math.nan}, "hflip"),
        ({"scale": (0.5, 0.2)}, r"scale must be \(low, high\) with low <= high, both in \(0, 1\], not \(0.5, 0.2\)"),
        ({"scale": (0.5, 1.2)}, "scale"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"ratio": (0.0, 1.0)}, r"ratio must be .* both in \(0, inf\)"),
        ({"ratio": (1.0, math.inf)}, "ratio"),
    ):
        with pytest.raises(ValueError, match=said):
            Augment(**wrong)
    for field, value in (("crop", 4.0), ("crop", True), ("crop", ("1", 2)), ("padding", 0.5), ("hflip", "0.5"), ("hflip", True), ("scale", 0.5)):
        with pytest.raises(TypeError, match=field):
            Augment(**{field: value})
    with pytest.raises(ValueError, match=r"crop 33 x 20 .* larger than the images, 32 x 32; ask for less, add padding"):
        Augment(crop=(33, 20)).size(32, 32)
    assert Augment(crop=[33, 20], padding=1).size(32, 32) == (33, 20)
    assert Augment(resized_crop=64).size(32, 32) == (64, 64)
    assert Augment(hflip=0.5).size(31, 32) == (31, 32)
    assert len(Augment(crop=3).draw(0, 0, np.empty(0, np.int64), 8, 8)) == 0
