import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch

from mmcompile.compiler.cast import channel_sums, store
from mmcompile.compiler.preprocess import IMAGENET, Normalize, Preprocess
from mmcompile.errors import DecodeError

EVERY_BYTE = np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3, axis=2)
EVERY_SHORT = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1)


def to_tensor(pixels, mean, std):
    """ToTensor and Normalize, in torchvision's operations."""
    full = 255 if pixels.dtype == np.uint8 else 65535
    tensor = torch.from_numpy(pixels.astype(np.int32)).permute(2, 0, 1).to(torch.float32).div(full)
    return tensor.sub(torch.tensor(mean)[:, None, None]).div(torch.tensor(std)[:, None, None])


@pytest.mark.parametrize(("pixels", "depth", "normalize"), [(EVERY_BYTE, 8, IMAGENET), (EVERY_SHORT, 16, Normalize((0.4,), (0.3,)))])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats_are_one_rounding_of_what_torch_computes(pixels, depth, normalize, dtype):
    mode = "rgb" if pixels.shape[2] == 3 else "gray"
    row = store(pixels, Preprocess(crop=pixels.shape[:2], mode=mode, dtype=dtype, normalize=normalize), depth)
    wanted = to_tensor(pixels, normalize.mean, normalize.std).to(getattr(torch, dtype))
    found = torch.from_numpy(row.copy())
    assert torch.equal(found.view(torch.bfloat16) if dtype == "bfloat16" else found, wanted)


def test_float64_is_computed_in_float64():
    row = store(EVERY_BYTE, Preprocess(crop=16, dtype="float64", normalize=IMAGENET), 8)
    assert np.array_equal(row[1], (np.arange(256).reshape(16, 16) / 255 - 0.456) / 0.224)


def test_what_is_stored_in_16_bit_reads_as_the_same_float():
    wide = store(EVERY_BYTE, Preprocess(crop=16, dtype="uint16"), 8)
    direct = store(EVERY_BYTE, Preprocess(crop=16, dtype="float32"), 8)
    assert np.array_equal(wide.astype(np.float32) / np.float32(65535), direct)


def test_scale_none_keeps_counts():
    for dtype in ("uint8", "uint16", "int16", "int32", "float32"):
        row = store(EVERY_BYTE, Preprocess(crop=16, dtype=dtype, scale="none"), 8)
        assert np.array_equal(row[0], EVERY_BYTE[:, :, 0])


def test_signed_and_float_sources_are_kept_as_they_are():
    signed = np.array([[[-5], [70_000]]], np.int32)
    assert store(signed, Preprocess(crop=(1, 2), mode="gray", dtype="int32"), 0).ravel().tolist() == [-5, 70_000]
    assert store(signed, Preprocess(crop=(1, 2), mode="gray", dtype="float32"), 0).ravel().tolist() == [-5.0, 70_000.0]


@pytest.mark.parametrize(
    ("value", "source", "dtype"),
    [
        (40_000, np.uint16, "int16"),
        (-1, np.int32, "uint16"),
        (70_000, np.int32, "uint16"),
        (70_000, np.int32, "float16"),
        (0.5, np.float32, "int32"),
    ],
)
def test_a_value_that_does_not_fit_is_a_reject_of_the_cast(value, source, dtype):
    with pytest.raises(DecodeError) as caught:
        store(np.full((1, 1, 1), value, source), Preprocess(crop=1, mode="gray", dtype=dtype), 0)
    assert caught.value.details["stage"] == "cast"
    assert dtype in str(caught.value)


def test_layouts_hold_the_same_numbers_and_are_contiguous():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
    chw = store(pixels, Preprocess(crop=(5, 7)), 8)
    hwc = store(pixels, Preprocess(crop=(5, 7), layout="hwc"), 8)
    assert np.array_equal(chw, hwc.transpose(2, 0, 1))
    assert chw.flags.c_contiguous
    assert hwc.flags.c_contiguous
    baked = Preprocess(crop=(5, 7), layout="hwc", dtype="float32", normalize="imagenet")
    assert np.array_equal(store(pixels, baked, 8).transpose(2, 0, 1), to_tensor(pixels, IMAGENET.mean, IMAGENET.std).numpy())


@hypothesis.given(hnp.arrays(hypothesis.strategies.sampled_from([np.uint8, np.uint16]), hnp.array_shapes(min_dims=3, max_dims=3, max_side=40)))
def test_sums_are_exact(pixels):
    sums, squares = channel_sums(pixels)
    planes = [[int(v) for v in plane.ravel()] for plane in pixels.transpose(2, 0, 1)]
    assert sums.dtype == squares.dtype == np.uint64
    assert sums.tolist() == [sum(p) for p in planes]
    assert squares.tolist() == [sum(v * v for v in p) for p in planes]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_sums_stay_exact_at_full_scale(dtype):
    full = int(np.iinfo(dtype).max)
    sums, squares = channel_sums(np.full((1100, 1000, 1), full, dtype))
    assert sums.tolist() == [full * 1_100_000]
    assert squares.tolist() == [full * full * 1_100_000]


def test_sums_of_signed_and_float_pixels_are_float64():
    sums, squares = channel_sums(np.array([[[-2.5], [1.0]]], np.float32))
    assert (sums.tolist(), squares.tolist()) == ([-1.5], [7.25])
    assert sums.dtype == np.float64
    assert channel_sums(np.array([[[-2]]], np.int32))[0].tolist() == [-2.0]
