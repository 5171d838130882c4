"""PNG files by hand are what Pillow reads."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from mmcompile.report import png


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 3), (9, 1, 4), (33, 20), (16, 16, 1), (40, 30, 3), (13, 5, 4)])
@pytest.mark.parametrize("kind", ["noise", "ramp", "flat"])
def test_pillow_reads_the_same_pixels(shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(len(shape))
    made = {
        "noise": rng.integers(0, 256, shape, dtype=np.uint8),
        "ramp": (np.arange(np.prod(shape)) * 3 % 256).astype(np.uint8).reshape(shape),
        "flat": np.full(shape, 200, np.uint8),
    }[kind]
    data = png.encode(made)
    with Image.open(io.BytesIO(data)) as image:
        image.verify()
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.text) == ("PNG", {"Software": "mmcompile report"})  # type: ignore[attr-defined]
        assert np.array_equal(np.asarray(image), made[..., 0] if shape[2:] == (1,) else made)
    assert png.SOFTWARE in data[:128]


def test_a_photo_is_smaller_than_its_pixels_and_than_without_filters() -> None:
    y, x = np.mgrid[:64, :64]
    smooth = np.stack([y * 2 + x, y + x * 2, 255 - y - x], 2).astype(np.uint8)
    assert len(png.encode(smooth)) < smooth.nbytes / 8


def test_a_uri_is_the_file_in_base64() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    head, _, data = png.as_uri(pixels).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == png.encode(pixels)
