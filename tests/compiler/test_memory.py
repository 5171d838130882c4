from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.decode import convert, memory, opening
from mmcompile.compiler.preprocess import Preprocess


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (500, 375), (2100, 2100)])
def test_padded_pixels_are_those_of_the_image(size: tuple[int, int]) -> None:
    image = picture(*size)
    found = memory.padded(image)
    assert found.shape == (size[1], size[0], 4)
    assert np.array_equal(found[:, :, :3], np.asarray(image))


def test_what_pillow_lends_stays_when_the_image_is_gone_and_cannot_be_written() -> None:
    image = picture(300, 200)
    wanted = np.asarray(image).copy()
    found = memory.padded(image)[5:]
    del image
    gc.collect()
    others = [picture(300, 200) for _ in range(5)]
    assert np.array_equal(found[:, :, :3], wanted[5:])
    assert not found.flags.writeable
    assert others


@pytest.mark.skipif(not hasattr(Image.Image, "__arrow_c_array__"), reason="this Pillow lends no memory")
def test_memory_is_lent_and_not_copied_where_it_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    large = picture(2100, 2100)  # 17 MiB: more than a block of Pillow
    wanted = np.asarray(large)
    copies: list[Any] = []
    real = Image.Image.tobytes
    monkeypatch.setattr(Image.Image, "tobytes", lambda self, *args: copies.append(self) or real(self, *args))
    memory.padded(picture(500, 375))
    assert not copies
    memory.padded(large)
    assert copies.pop() is large
    with opening.pillow(Preprocess(crop=8).resolved()):
        assert np.array_equal(memory.padded(large.copy())[:, :, :3], wanted)
    assert not copies


def test_an_alignment_of_rows_means_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory._core.get_alignment()
    image = picture(33, 20)
    memory._core.set_alignment(64)
    try:
        aligned = image.copy()
        assert np.array_equal(memory.padded(aligned)[:, :, :3], np.asarray(image))
    finally:
        memory._core.set_alignment(before)


def test_the_size_of_blocks_is_that_of_before_when_decoding_is_done() -> None:
    before = memory._core.get_block_size()
    with opening.pillow(Preprocess(crop=8).resolved()):
        assert memory._core.get_block_size() > before
    assert memory._core.get_block_size() == before


def test_a_large_picture_that_needs_no_conversion_is_converted_in_no_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_STRIP_PIXELS", 100)
    monkeypatch.setattr(convert, "_strips", None)
    image = picture(60, 50)
    made = convert.to_array(image, Preprocess(crop=8).resolved(), set(), padded=True)
    assert np.array_equal(made[:, :, :3], np.asarray(image))
