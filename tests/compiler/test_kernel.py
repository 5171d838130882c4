import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from mmcompile.compiler import kernel
from mmcompile.compiler.kernel import Box, Rules, window
from mmcompile.errors import DecodeError

ROWS_FIRST = int(PIL.__version__.split(".")[0]) >= 13
FILTERS = {f: getattr(Image.Resampling, f.upper()) for f in ("bilinear", "bicubic", "lanczos", "box", "nearest")}
#: (height, width) in and out: growing, shrinking, both, one pixel thick, tall enough for rows first, unchanged sides.
SHAPES = [
    ((37, 53), (256, 367)),
    ((300, 200), (41, 29)),
    ((90, 20), (30, 64)),
    ((1, 50), (7, 350)),
    ((50, 1), (350, 7)),
    ((700, 90), (60, 80)),
    ((900, 3), (20, 40)),
    ((64, 64), (64, 31)),
    ((64, 64), (31, 64)),
    ((1, 1), (9, 5)),
    ((5, 1000), (5, 3)),
]


def noise(height, width, channels, seed=0):
    rng = np.random.default_rng(seed)
    # Extremes and their neighbours, where rounding and clipping show.
    return rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (height, width, channels))


def whole(height, width):
    return Box(height, width, 0, 0, height, width)


def by_pillow(pixels, size, name):
    squeezed = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    made = np.asarray(Image.fromarray(squeezed).resize((size[1], size[0]), FILTERS[name]))
    return made.reshape(*size, pixels.shape[2])


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_the_kernel_has_pillows_bytes(name, channels, before, after):
    pixels = noise(*before, channels)
    assert np.array_equal(window(pixels, whole(*after), Rules("pillow", name, ROWS_FIRST)), by_pillow(pixels, after, name))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_the_kernel_has_pillows_floats(name, before, after):
    pixels = np.random.default_rng(1).normal(0, 1000, (*before, 1)).astype(np.float32)
    assert np.array_equal(window(pixels, whole(*after), Rules("pillow", name, ROWS_FIRST)), by_pillow(pixels, after, name))


def by_torch(pixels, size, name):
    batch = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    return torch.nn.functional.interpolate(batch, size=list(size), mode=name, antialias=True)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_the_kernel_has_torchs_bytes(name, channels, before, after):
    pixels = noise(*before, channels)
    assert np.array_equal(window(pixels, whole(*after), Rules("torch", name)), by_torch(pixels, after, name))


sides = st.integers(1, 90)


@hypothesis.given(st.tuples(sides, sides), st.tuples(sides, sides), st.sampled_from(["bilinear", "bicubic"]), st.integers(0, 2**32))
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_small_size_has_the_bytes_of_both_libraries(before, after, name, seed):
    pixels = noise(*before, 3, seed)
    assert np.array_equal(window(pixels, whole(*after), Rules("torch", name)), by_torch(pixels, after, name))
    assert np.array_equal(window(pixels, whole(*after), Rules("pillow", name, ROWS_FIRST)), by_pillow(pixels, after, name))


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_a_window_is_the_crop_of_the_whole(data):
    before, after = data.draw(st.tuples(sides, sides)), data.draw(st.tuples(sides, sides))
    rules = data.draw(st.sampled_from([Rules("torch", "bicubic"), *(Rules("pillow", f, r) for f in FILTERS for r in (False, True))]))
    top, left = data.draw(st.integers(0, after[0] - 1)), data.draw(st.integers(0, after[1] - 1))
    bottom, right = data.draw(st.integers(top + 1, after[0])), data.draw(st.integers(left + 1, after[1]))
    pixels = noise(*before, 3)
    part = window(pixels, Box(*after, top, left, bottom, right), rules)
    assert np.array_equal(part, window(pixels, whole(*after), rules)[top:bottom, left:right])


@pytest.mark.parametrize("rules", [Rules("torch", "bilinear"), Rules("pillow", "bilinear", True), Rules("pillow", "nearest")])
def test_a_window_of_a_giant_is_found_without_making_it(rules):
    line = np.repeat(np.arange(200_000, dtype=np.uint32)[None, :, None] // 1000, 3, axis=2).astype(np.uint8)
    middle = 25_600_000
    part = window(line, Box(256, 51_200_000, 16, middle - 112, 240, middle + 112), rules)
    assert part.shape == (224, 224, 3)
    # 256 times as wide: the middle of the picture, where the value changes from 99 to 100.
    assert {99, 100} == set(np.unique(part).tolist())


def test_more_work_than_the_limit_is_a_reject(monkeypatch):
    monkeypatch.setattr(kernel, "_MAX_PRODUCTS", 1000)
    with pytest.raises(DecodeError) as caught:
        window(noise(100, 100, 3), whole(50, 50), Rules("torch", "bilinear"))
    assert caught.value.details["code"] == "aspect-limit"


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_the_largest_weight_of_a_growing_axis_is_at_its_ends(name):
    for size_in in (1, 2, 3, 5, 17, 100):
        for size_out in (size_in + 1, size_in * 2, size_in * 7 + 3, size_in * 300):
            every = kernel._taps(size_in, size_out, 0, size_out, name).weights.max()
            ends = max(kernel._taps(size_in, size_out, a, b, name).weights.max() for a, b in kernel._weighty(size_in, size_out))
            assert ends == every
