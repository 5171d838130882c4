import numpy as np
import pytest

from mmcompile.compiler.depth import becomes_bytes, from_16, from_32, resized_back
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

SHORTS = np.array([[0, 1, 128, 129, 255, 256, 257, 65535]], np.uint16)
INTEGERS = np.array([[-7, 0, 255, 256, 70_000]], np.int32)
FLOATS = np.array([[-1.5, 0.0, 0.999, 254.7, 1e6]], np.float32)


def options(**given):
    return Preprocess(crop=1, mode="gray", **given).resolved()


@pytest.mark.parametrize(("rule", "wanted"), [("scale", [0, 0, 0, 1, 1, 1, 1, 255]), ("clip", [0, 1, 128, 129, 255, 255, 255, 255])])
def test_16_bits_become_8_as_asked(rule, wanted):
    made, depth = from_16(SHORTS, options(depth16=rule))
    assert (made.ravel().tolist(), depth, made.dtype) == (wanted, 8, np.uint8)


def test_scaling_is_to_the_nearest():
    every = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(from_16(every, options(depth16="scale"))[0], np.rint(every / 257))


def test_16_bits_are_rejected_for_bytes_and_the_reject_names_the_option():
    with pytest.raises(DecodeError, match="--depth16 scale") as caught:
        from_16(SHORTS, options())
    assert caught.value.details["code"] == "depth-16"


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32", "bfloat16"])
def test_16_bits_are_kept_where_they_fit(dtype):
    made, depth = from_16(SHORTS, options(dtype=dtype))
    assert depth == 16
    assert made.dtype == np.uint16
    assert np.array_equal(made, SHORTS)


@pytest.mark.parametrize(("values", "dtype"), [(INTEGERS, "uint8"), (FLOATS, "uint8"), (FLOATS, "int32"), (FLOATS, "uint16")])
def test_32_bits_are_rejected_where_they_do_not_fit(values, dtype):
    with pytest.raises(DecodeError, match=dtype) as caught:
        from_32(values, options(dtype=dtype))
    assert caught.value.details["code"] == "depth-32"


@pytest.mark.parametrize(("values", "said"), [([-1024, 3071], "--dtype int16 or float32"), ([-1024, 40000], "--dtype int32 or float32")])
def test_whole_numbers_that_do_not_fit_name_the_narrowest_dtype_that_does(values, said):
    with pytest.raises(DecodeError, match=f"do not fit in uint8: {said} keeps them"):
        from_32(np.array([values], np.int32), Preprocess().resolved())


def test_32_bits_are_kept_where_they_fit():
    assert from_32(INTEGERS, options(dtype="int32"))[0].tolist() == INTEGERS.tolist()
    assert from_32(INTEGERS, options(dtype="float32"))[1] == 0
    assert from_32(FLOATS, options(dtype="float32"))[0].tolist() == FLOATS.tolist()


def test_clipping_truncates():
    assert from_32(INTEGERS, options(depth16="clip"))[0].ravel().tolist() == [0, 0, 255, 255, 255]
    assert from_32(FLOATS, options(depth16="clip"))[0].ravel().tolist() == [0, 0, 0, 254, 255]


def test_a_range_is_mapped_to_bytes():
    made, depth = from_32(np.array([[-3.0, -2.0, 0.0, 2.0, 9.0]], np.float32), options(range=(-2, 2)))
    assert (made.ravel().tolist(), depth) == ([0, 0, 128, 255, 255], 8)
    assert from_16(SHORTS, options(range=(0, 510)))[0].ravel().tolist() == [0, 0, 64, 64, 128, 128, 128, 255]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_rejected(bad):
    with pytest.raises(DecodeError) as caught:
        from_32(np.array([[0.0, bad]], np.float32), options(dtype="float32"))
    assert caught.value.details["code"] == "not-finite"


def test_whole_numbers_come_back_half_to_even_and_clipped():
    resized = np.array([-3.0, 0.5, 1.5, 70_000.0], np.float32)
    assert resized_back(resized, np.dtype(np.uint16)).tolist() == [0, 0, 2, 65535]
    assert resized_back(np.float32([3e9, -3e9]), np.dtype(np.int32)).tolist() == [2**31 - 1, -(2**31)]
    assert resized_back(resized, np.dtype(np.float32)) is resized


@pytest.mark.parametrize(
    ("given", "bits", "wanted"),
    [
        ({}, 16, False),
        ({"depth16": "scale"}, 16, True),
        ({"depth16": "scale"}, 32, False),
        ({"depth16": "clip"}, 32, True),
        ({"range": (0, 1)}, 32, True),
    ],
)
def test_becomes_bytes_says_what_happens(given, bits, wanted):
    made = options(**given)
    assert becomes_bytes(made, bits=bits) is wanted
    convert, values = (from_16, SHORTS) if bits == 16 else (from_32, INTEGERS)
    if wanted:
        assert convert(values, made)[1] == 8
    else:
        with pytest.raises(DecodeError):
            convert(values, made)
