from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from mmcompile.compiler.decode import decode, jpeg
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.run import Counts
from mmcompile.errors import DecodeError, OptionError
from mmcompile.format.reader import Reader
from tests.compiler.builds import dataset, inline, run, write

RNG = np.random.default_rng(0)
SQUARE = Preprocess(resize=8, crop=8)


def smooth(width: int, height: int) -> Image.Image:
    """A picture with edges and gradients, which noise has not."""
    small = Image.fromarray(RNG.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Decode as if the extra were not installed."""

    def by_pillow(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jpeg, "_turbo", lambda: None)
            return outcome(*args)

    return by_pillow


def outcome(data: bytes, options: Preprocess) -> Any:
    try:
        found = decode(data, "x.jpg", options)
    except DecodeError as error:
        return str(error), error.details
    return found.pixels.tobytes(), found.pixels.shape, found.width, found.height, found.mode, found.format, found.orientation, found.warnings


# ---------------------------------------------------------------- libjpeg-turbo itself

KINDS = st.fixed_dictionaries(
    {
        "quality": st.integers(1, 100),
        "subsampling": st.sampled_from([0, 1, 2]),
        "progressive": st.booleans(),
        "restart_marker_blocks": st.integers(0, 4),
        "optimize": st.booleans(),
    }
)
SIDES = st.integers(1, 90)


@hypothesis.settings(deadline=None, max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(SIDES, SIDES, KINDS, st.sampled_from(["RGB", "L", "CMYK"]), st.sampled_from(["rgb", "gray"]), st.sampled_from([None, 1, 2.5]))
def test_the_extra_changes_no_pixel(
    without: Any, width: int, height: int, kind: dict[str, Any], mode: str, wanted: str, scaling: float | None
) -> None:
    data = saved(smooth(width, height).convert(mode), **kind)
    for options in (SQUARE, Preprocess(crop=5), Preprocess(resize=(5, 70), filter="bicubic"), Preprocess(resize=8, crop=8, icc="srgb")):
        options = Preprocess(**{**options.__dict__, "mode": wanted, "jpeg_scaling": scaling})
        assert outcome(data, options) == without(data, options)


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("drop"), st.floats(0, 1), st.binary(min_size=1, max_size=30)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.sampled_from([b"\xff\xd9", b"\xff\xd8", b"\xff\xd0", b"\xff\xc0", b"\xff\xda", b"\xff\xff"])),
)


def damaged(data: bytes, damage: tuple[str, float, bytes]) -> bytes:
    how, where, what = damage
    at = int(where * len(data))
    if how == "cut":
        return data[:at]
    if how == "insert":
        return data[:at] + what + data[at:]
    return data[:at] + (what if how == "put" else b"") + data[at + len(what) :]


@hypothesis.settings(deadline=None, max_examples=400, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.integers(1, 60), st.integers(1, 60), KINDS, st.booleans(), st.lists(DAMAGE, min_size=1, max_size=3), st.booleans())
def test_a_damaged_file_ends_as_with_pillow(
    without: Any, width: int, height: int, kind: dict[str, Any], grey: bool, damages: list[tuple[str, float, bytes]], accept: bool
) -> None:
    data = saved(smooth(width, height).convert("L" if grey else "RGB"), **kind)
    for damage in damages:
        data = damaged(data, damage)
    options = Preprocess(resize=8, crop=8, truncated="accept" if accept else "reject", max_pixels=1 << 22)
    assert outcome(data, options) == without(data, options)


@pytest.mark.parametrize("sampling", [0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x24, 0x42, 0x44, 0x31, 0x13])
def test_odd_samplings_end_as_with_pillow(without: Any, sampling: int) -> None:
    for subsampling in (0, 1, 2):
        data = jpeg._resampled(saved(smooth(64, 64), subsampling=subsampling), sampling)
        for options in (SQUARE, Preprocess(resize=8, crop=8, jpeg_scaling=2)):
            assert outcome(data, options) == without(data, options)


def test_all_that_is_plain_is_taken_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = jpeg._decoded
    assert jpeg._turbo() is simplejpeg
    monkeypatch.setattr(jpeg, "_decoded", lambda turbo, data, *rest: taken.append(data) or real(turbo, data, *rest))
    picture = smooth(40, 30)
    plain = saved(picture)
    for data in (plain, saved(picture, progressive=True), saved(picture.convert("L")), saved(picture, exif=exif(1))):
        decode(data, "x.jpg", SQUARE)
        assert taken.pop() is data
    decode(saved(picture, icc_profile=b"no profile"), "x.jpg", SQUARE)
    assert taken.pop()
    for data, options in (
        (plain, Preprocess(resize=8, crop=8, mode="gray")),
        (plain, Preprocess(resize=8, crop=8, resampler="pillow")),
        (plain, Preprocess(resize=8, crop=8, compat="torchvision")),
        (saved(picture, icc_profile=b"no profile"), Preprocess(resize=8, crop=8, icc="srgb")),
        (saved(picture, exif=exif(6)), SQUARE),
        (saved(picture.convert("CMYK")), SQUARE),
        (saved(picture, keep_rgb=True), SQUARE),
        (jpeg._resampled(saved(smooth(64, 64), subsampling=2), 0x14), SQUARE),
    ):
        decode(data, "x.jpg", options)
        assert not taken


class Lying:
    """A binding whose pixels are not Pillow's for some files."""

    def __init__(self, wrong: int) -> None:
        self.wrong, self.calls = wrong, 0

    def decode_jpeg(self, *args: Any, **kwargs: Any) -> Any:
        made = simplejpeg.decode_jpeg(*args, **kwargs)
        self.calls += 1
        if self.calls == self.wrong:
            made[-1, -1, -1] ^= 1
        return made


@pytest.mark.parametrize("wrong", [1, 2, 7, 20, 48])
def test_a_binding_with_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", Lying(wrong))
    jpeg._turbo.cache_clear()
    try:
        assert jpeg._turbo() is None
    finally:
        jpeg._turbo.cache_clear()


def test_without_the_extra_pillow_decodes(monkeypatch: pytest.MonkeyPatch, without: Any) -> None:
    data = saved(smooth(40, 30))
    wanted = outcome(data, SQUARE)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg._turbo.cache_clear()
    try:
        assert jpeg._turbo() is None
        assert outcome(data, SQUARE) == wanted
    finally:
        jpeg._turbo.cache_clear()


# ---------------------------------------------------------------- jpeg_scaling


@hypothesis.given(st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES), st.sampled_from([1, 1.5, 2, 4]))
def test_the_scale_is_the_largest_that_leaves_enough(size: tuple[int, int], target: tuple[int, int], scaling: float) -> None:
    def enough(scale: int) -> bool:
        return all(have / scale >= scaling * want for have, want in zip(size, target, strict=True))

    found = jpeg.scale_for(size, target, scaling)
    assert found == 1 or enough(found)
    assert not any(enough(scale) for scale in (2, 4, 8) if scale > found)


@pytest.mark.parametrize(("scaling", "scale"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (100, 1)])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resampler", ["torch", "pillow"])
def test_a_large_jpeg_is_decoded_smaller_and_keeps_its_own_size_in_the_records(scaling: float, scale: int, orientation: int, resampler: str) -> None:
    data = saved(smooth(203, 165), exif=exif(orientation))
    options = Preprocess(resize=20, crop=16, jpeg_scaling=scaling, resampler=resampler)
    found = decode(data, "x.jpg", options)
    assert (found.width, found.height, found.orientation) == (203, 165, orientation)
    image = Image.open(io.BytesIO(data))
    if scale > 1:
        image.draft(None, (203 // scale, 165 // scale))
    assert image.size == (-(-203 // scale), -(-165 // scale))
    small = np.asarray(ImageOps.exif_transpose(image))
    # Its size is that of the whole picture, resized: 20 x 24, which rounding the small one would not always give.
    side = (20, int(20 * 203 / 165)) if orientation < 5 else (int(20 * 203 / 165), 20)
    by = decode(png(small), "x.png", Preprocess(resize=side, resampler=resampler)).pixels
    top, left = round((side[0] - 16) / 2), round((side[1] - 16) / 2)
    assert np.array_equal(found.pixels, by[top : top + 16, left : left + 16])


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_other_formats_and_other_geometries_are_decoded_whole() -> None:
    picture = smooth(200, 160)
    for data in (png(np.asarray(picture)), saved(picture)):
        for geometry in ({"crop": 16}, {"keep_size": (160, 200)}):
            assert outcome(data, Preprocess(**geometry, jpeg_scaling=1)) == outcome(data, Preprocess(**geometry))
    data = png(np.asarray(picture))
    assert outcome(data, Preprocess(resize=20, crop=16, jpeg_scaling=1)) == outcome(data, Preprocess(resize=20, crop=16))


def test_a_file_with_more_pictures_behind_the_first_is_decoded_smaller_too() -> None:
    out = io.BytesIO()
    smooth(200, 160).save(out, "MPO", save_all=True, append_images=[smooth(100, 80)])
    options = Preprocess(resize=20, crop=16, jpeg_scaling=1)
    found = decode(out.getvalue(), "x.jpg", options)
    assert (found.format, found.width, found.height, found.warnings) == ("MPO", 200, 160, ("more-frames",))
    assert not np.array_equal(found.pixels, decode(out.getvalue(), "x.jpg", Preprocess(resize=20, crop=16)).pixels)


def test_pixels_of_a_scaled_picture_are_near_those_of_the_whole() -> None:
    data = saved(smooth(800, 640), quality=95)
    whole = decode(data, "x.jpg", Preprocess(resize=40, crop=32)).pixels.astype(int)
    scaled = decode(data, "x.jpg", Preprocess(resize=40, crop=32, jpeg_scaling=2)).pixels.astype(int)
    assert 0 < np.abs(whole - scaled).max() <= 16


def test_what_scaling_would_save_is_known_where_it_is_off() -> None:
    data = saved(smooth(800, 640))
    assert decode(data, "x.jpg", Preprocess(resize=40, crop=32)).saving > 0.3
    for other, options in (
        (data, Preprocess(resize=40, crop=32, jpeg_scaling=8)),
        (data, Preprocess(resize=40, crop=32, compat="torchvision")),
        (data, Preprocess(crop=32)),
        (data, Preprocess(resize=400, crop=32)),
        (saved(smooth(800, 640), progressive=True), Preprocess(resize=40, crop=32)),
        (png(np.zeros((640, 800, 3), np.uint8)), Preprocess(resize=40, crop=32)),
    ):
        assert decode(other, "x.jpg", options).saving == 0.0


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_the_part_that_is_left_falls_with_the_scale_and_rises_with_the_bytes(scale: int) -> None:
    parts = [jpeg.fraction_left(nbytes, 12_000_000, scale) for nbytes in (100_000, 1_000_000, 10_000_000)]
    assert 0 < parts[0] < parts[1] < parts[2] < 1
    assert parts[0] < jpeg.fraction_left(100_000, 12_000_000, scale // 2)


def test_settings_without_scaling_are_those_of_before() -> None:
    plain, scaled = Preprocess(resize=256, crop=224), Preprocess(resize=256, crop=224, jpeg_scaling=2)
    assert "jpeg_scaling" not in {**plain.settings(), **plain.pixel_settings()}
    assert scaled.settings()["jpeg_scaling"] == scaled.pixel_settings()["jpeg_scaling"] == 2.0
    assert Preprocess.from_settings(plain.settings()).jpeg_scaling is None
    assert Preprocess.from_settings(scaled.settings()) == scaled.resolved()
    assert scaled.pixel_settings() == Preprocess(resize=256, crop=224, jpeg_scaling=2.0).pixel_settings()


@pytest.mark.parametrize("value", [0, 0.99, -2, float("nan"), float("inf"), "2", True])
def test_scaling_is_a_number_of_at_least_1(value: Any) -> None:
    with pytest.raises(OptionError, match="--jpeg-scaling must be a number of at least 1"):
        Preprocess(jpeg_scaling=value)


def test_torchvision_knows_no_scaling() -> None:
    with pytest.raises(OptionError, match="--compat and --jpeg-scaling clash"):
        Preprocess(compat="torchvision", jpeg_scaling=2)


# ---------------------------------------------------------------- builds


def test_the_dataset_does_not_depend_on_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw = write(tmp_path / "raw", {f"a/{i}.jpg": saved(smooth(60 + i, 50), progressive=i % 2 == 1) for i in range(6)})
    run(raw, tmp_path / "with", SQUARE)
    monkeypatch.setattr(jpeg, "_turbo", lambda: None)
    run(raw, tmp_path / "without", SQUARE)
    assert dataset(tmp_path / "with") == dataset(tmp_path / "without")


def test_a_build_that_scaling_would_have_made_twice_as_fast_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw = write(tmp_path / "raw", {f"a/{i}.jpg": saved(smooth(120, 100).resize((1200, 1000))) for i in range(2)})
    (line,) = (w for w in run(raw, tmp_path / "whole", SQUARE).warnings if "jpeg-scaling" in w)
    assert "--jpeg-scaling 2 would decode them at 1/2, 1/4 or 1/8" in line
    scaled = run(raw, tmp_path / "scaled", Preprocess(resize=8, crop=8, jpeg_scaling=2))
    assert not [w for w in scaled.warnings if "jpeg-scaling" in w]
    assert Reader(tmp_path / "scaled").index.settings["preprocess"]["jpeg_scaling"] == 2.0
    small = write(tmp_path / "small", {"a/0.jpg": saved(smooth(40, 30))})
    assert not [w for w in run(small, tmp_path / "out", SQUARE).warnings if "jpeg-scaling" in w]


@pytest.mark.parametrize(("decode_s", "saving_s", "said"), [(9.0, 4.4, False), (9.0, 6.0, True), (0.0, 0.0, False)])
def test_the_line_comes_with_more_than_half_of_the_time(decode_s: float, saving_s: float, said: bool) -> None:
    lines = Counts(decode_s=decode_s, saving_s=saving_s).notes()
    assert bool(lines) == said
    assert not said or "about 3.0 times as fast" in lines[0]
