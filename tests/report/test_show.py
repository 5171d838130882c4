"""Numbers of samples as pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmcompile.format.index import Field, Index, Split
from mmcompile.report.show import as_floats, look_of, normalized_by, pictures, reduced, shrunk

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (3, 9, 11), dtype=np.uint8)


def image(dtype: str, channels: int = 3, **more: Any) -> Field:
    return Field("image", dtype, (channels, 9, 11), "image", "chw", **more)


def index(field: Field, settings: dict[str, Any]) -> Index:
    return Index((field,), (Split("all", 0, 1),), 1, 1, "0" * 32, settings=settings)


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 as the bits of the nearest bfloat16."""
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")


def only(values: np.ndarray, field: Field, settings: dict[str, Any] | None = None) -> tuple[np.ndarray, str]:
    look = look_of(field, normalized_by(index(field, settings or {}), field), [values])
    ((_, pixels),) = pictures(values, field, look)
    return pixels, look.said


def test_bytes_are_shown_as_they_are() -> None:
    pixels, _ = only(PHOTO, image("uint8", scale=255.0))
    assert np.array_equal(pixels, PHOTO.transpose(1, 2, 0))


@pytest.mark.parametrize(("dtype", "most"), [("uint8", 16), ("float32", 0.0625)])
def test_dark_pictures_are_stretched_and_it_is_said(dtype: str, most: float) -> None:
    levels = RNG.integers(0, 17, (3, 9, 11))
    levels[0, 0] = 16
    pixels, said = only((levels * (most / 16)).astype(dtype), image(dtype))
    assert np.array_equal(pixels, np.rint(levels * (255 / 16)).astype(np.uint8).transpose(1, 2, 0))
    assert f"{dtype} stretched: 0 is black, {most:g} is white" in said


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_baked_normalisation_is_undone_within_one_level(dtype: str) -> None:
    values = (PHOTO / 255.0 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    stored = rounded(values) if dtype == "bfloat16" else values.astype(dtype)
    pixels, said = only(stored, image(dtype), {"preprocess": {"normalize": {"mean": list(MEAN), "std": list(STD)}}})
    assert np.abs(pixels.astype(int) - PHOTO.transpose(1, 2, 0)).max() <= 1
    assert said.startswith("normalisation undone")


def test_a_setting_of_the_field_alone_counts_too() -> None:
    field = image("float32")
    own = {"preprocess": {"normalize": None, "fields": {"image": {"normalize": {"mean": [0.5], "std": [0.25]}}}}}
    assert normalized_by(index(field, own), field) == ((0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    "settings", [{}, {"preprocess": 3}, {"preprocess": {"normalize": "imagenet"}}, {"preprocess": {"normalize": {"mean": [1, 2]}}}]
)
def test_settings_of_a_stranger_are_no_normalisation(settings: dict[str, Any]) -> None:
    field = image("float32")
    assert normalized_by(index(field, settings), field) is None
    assert normalized_by(index(image("uint8"), {"preprocess": {"normalize": {"mean": [1] * 3, "std": [1] * 3}}}), image("uint8")) is None


def test_sixteen_bit_and_signed_numbers_are_stretched_and_it_is_said() -> None:
    values = np.linspace(-1000, 3000, 99).astype(np.int16).reshape(1, 9, 11)
    pixels, said = only(values, image("int16", 1))
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert np.all(np.diff(pixels[:, :, 0].reshape(-1).astype(int)) >= 0)
    assert "int16 stretched" in said
    dark = PHOTO[:1].astype(np.uint16) + 300
    pixels, _ = only(dark, image("uint16", 1, scale=65535.0))
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_one_value_nan_and_infinity_are_no_fault() -> None:
    flat, _ = only(np.full((1, 9, 11), 7, np.int32), image("int32", 1))
    assert len(np.unique(flat)) == 1
    strange = np.zeros((1, 9, 11), np.float32)
    strange[0, 0, :3] = np.nan, np.inf, -np.inf
    pixels, _ = only(strange, image("float32", 1))
    assert pixels[0, :3, 0].tolist() == [0, 255, 0]
    only(np.full((1, 9, 11), np.nan, np.float32), image("float32", 1))


def test_channels_become_colours() -> None:
    for channels in (1, 2, 3, 4, 7):
        field = image("uint8", channels)
        values = RNG.integers(0, 256, (channels, 9, 11), dtype=np.uint8)
        pixels, _ = only(values, field)
        assert pixels.shape == (9, 11, 3)
        if channels == 1:
            assert np.array_equal(pixels[:, :, 2], values[0])
        if channels == 2:
            assert np.array_equal(pixels[:, :, :2], values.transpose(1, 2, 0))
            assert not pixels[:, :, 2].any()
        if channels == 7:
            assert np.array_equal(pixels, values[:3].transpose(1, 2, 0))
        assert bool(reduced(field)) == (channels in (2, 7))
    solid = np.concatenate([PHOTO, np.full((1, 9, 11), 255, np.uint8)])
    assert np.array_equal(only(solid, image("uint8", 4))[0], PHOTO.transpose(1, 2, 0))


def test_a_volume_is_its_three_middle_planes() -> None:
    values = RNG.integers(0, 256, (4, 6, 8), dtype=np.uint8)
    field = Field("scan", "uint8", (4, 6, 8), "volume")
    planes = pictures(values, field, look_of(field, None, [values]))
    assert [name for name, _ in planes] == ["z 2", "y 3", "x 4"]
    for (_, pixels), wanted in zip(planes, (values[2], values[:, 3], values[:, :, 4]), strict=True):
        assert np.array_equal(pixels[:, :, 0], wanted)


def test_bfloat16_bits_are_their_floats() -> None:
    field = image("bfloat16")
    values = np.array([0.0, 1.0, -2.5, 0.15625])
    assert as_floats(rounded(values), field).tolist() == values.tolist()


def test_shrunk_takes_means_and_leaves_small_pictures_alone() -> None:
    picture = RNG.integers(0, 256, (7, 5, 3), dtype=np.uint8)
    assert shrunk(picture, 7) is picture
    small = shrunk(picture, 4)
    assert small.shape == (4, 3, 3)
    assert np.abs(small[0, 0] - picture[:2, :2].reshape(4, 3).mean(0)).max() <= 0.5
    assert np.array_equal(small[3, 2], picture[6, 4])


@pytest.mark.parametrize("shape", [(4, 6, 8), (3, 4, 6, 8), (7, 4, 6, 8)])
def test_a_normalised_volume_is_undone_channel_by_channel(shape: tuple[int, ...]) -> None:
    channels = shape[0] if len(shape) == 4 else 1
    mean, std = [0.1 * c for c in range(channels)], [0.2 + 0.1 * c for c in range(channels)]
    wanted = RNG.uniform(0, 1, shape).reshape(channels, 4, 6, 8)
    stored = ((wanted - np.reshape(mean, (-1, 1, 1, 1))) / np.reshape(std, (-1, 1, 1, 1))).astype(np.float32).reshape(shape)
    field = Field("scan", "float32", shape, "volume")
    baked = normalized_by(index(field, {"preprocess": {"normalize": {"mean": mean, "std": std}}}), field)
    planes = pictures(stored, field, look_of(field, baked, [stored]))
    expected = np.rint(wanted[: 3 if channels > 1 else 1, 2].transpose(1, 2, 0) * 255)
    assert np.abs(planes[0][1] - expected).max() <= 1


@pytest.mark.parametrize(("dtype", "value"), [("int64", 1 << 60), ("float32", 3.4e38), ("float64", 1.7e308), ("float64", -1.7e308)])
def test_a_constant_of_any_size_is_shown(dtype: str, value: float) -> None:
    values = np.full((3, 9, 11), value, dtype)
    pixels, said = only(values, image(dtype))
    assert len(np.unique(pixels)) == 1
    assert "stretched" in said
