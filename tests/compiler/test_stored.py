"""Pictures whose values are taken as stored: .npy, PNG of 16 bits a colour, TIFF beyond Pillow's modes."""

import contextlib
import io
import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.cast import store
from mmcompile.compiler.decode import decode, mask, probe, stored
from mmcompile.compiler.marks import marks_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError, OptionError
from tests.compiler.builds import dataset, images, inline, run, write
from tests.compiler.deep_png import chunk, deep_png

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (30, 40, 4), np.uint16)
AS_IS = {"crop": (30, 40)}


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tiff(array, **options):
    tifffile = pytest.importorskip("tifffile")
    out = io.BytesIO()
    tifffile.imwrite(out, array, **options)
    return out.getvalue()


def made(data, name="x.npy", **options):
    return decode(data, name, Preprocess(**{**AS_IS, **options}))


def rejected(data, name="x.npy", **options):
    with pytest.raises(DecodeError) as caught:
        made(data, name, **options)
    assert set(caught.value.details) >= {"stage", "code"}
    return caught.value


def by_channel(values, size, filter=Image.Resampling.BILINEAR):
    """(H, W, C) float32, each channel resized to (height, width) as Pillow's mode F."""
    return np.stack([np.asarray(Image.fromarray(v.astype(np.float32)).resize(size[::-1], filter)) for v in values.transpose(2, 0, 1)], axis=2)


# ---------------------------------------------------------------- .npy


@pytest.mark.parametrize(
    ("source", "dtype", "depth"),
    [
        ("uint8", "uint8", 8),
        ("bool", "uint8", 8),
        ("uint16", "uint16", 16),
        ("int8", "int16", 0),
        ("int16", "int16", 0),
        (">i2", "int16", 0),
        (">u2", "uint16", 16),
        ("int32", "int32", 0),
        ("uint32", "int32", 0),
        ("int64", "int32", 0),
        ("float16", "float32", 0),
        ("float32", "float32", 0),
        (">f8", "float64", 0),
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_arrays_keep_their_values_in_a_dtype_that_holds_them(source, dtype, depth, channels):
    low = 0 if np.dtype(source).kind in "ub" else -100
    values = RNG.integers(low, 100, (30, 40, channels)).astype(source)
    first = values.transpose(2, 0, 1) if channels == 5 else values
    kept = {("uint8", 1): "L", ("uint8", 3): "RGB"}.get((dtype, channels))
    kind = {"uint8": "L", "uint16": "I;16"}.get(dtype, "F" if dtype.startswith("float") else "I")
    kept = kept or (kind if channels == 1 else f"{kind}x{channels}")
    data = npy(first)
    options = {"mode": "keep", "dtype": dtype, "axes": "chw" if channels == 5 else None}
    assert probe(data, "x.npy", Preprocess(crop=1, **options)) == (40, 30, kept)
    found = made(data, kept_mode=kept, **options)
    assert (found.format, found.depth, found.warnings) == ("NPY", depth, ())
    assert found.pixels.dtype == dtype
    assert np.array_equal(found.pixels, values.astype(dtype))
    row = store(found.pixels, Preprocess(**AS_IS, kept_mode=kept, scale="none", **options), found.depth)
    assert np.array_equal(row, values.astype(dtype).transpose(2, 0, 1))


def test_the_axes_of_an_array_are_told_by_its_shape_or_by_the_option():
    grey = RNG.integers(0, 255, (30, 40), np.uint8)
    assert np.array_equal(made(npy(grey), mode="gray").pixels[:, :, 0], grey)
    colours = RNG.integers(0, 255, (30, 40, 3), np.uint8)
    for stored_as in (colours, np.asfortranarray(colours), colours.transpose(2, 0, 1)):
        assert np.array_equal(made(npy(stored_as)).pixels, colours)
    many = RNG.integers(0, 255, (30, 40, 12), np.uint8)
    keep = {"mode": "keep", "kept_mode": "Lx12"}
    error = rejected(npy(many), **keep)
    assert error.details["code"] == "axes"
    assert "--axes" in str(error)
    assert np.array_equal(made(npy(many), axes="hwc", **keep).pixels, many)
    assert np.array_equal(made(npy(many.transpose(2, 0, 1)), axes="chw", **keep).pixels, many)
    with pytest.raises(OptionError):
        Preprocess(axes="whc")


def test_the_axes_option_stands_in_the_settings_only_where_it_is_used():
    assert "axes" not in Preprocess(crop=1).settings()
    assert Preprocess(crop=1, axes="hwc").pixel_settings()["axes"] == "hwc"
    assert Preprocess.from_settings(Preprocess(crop=1, axes="hwc").settings()).axes == "hwc"


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.array(["text"]), "unsupported"),
        (np.array([{}], object), "unsupported"),
        (np.zeros((3, 4), complex), "unsupported"),
        (np.zeros((3, 4), "M8[s]"), "unsupported"),
        (np.zeros((3, 4), [("a", "u1")]), "unsupported"),
        (np.zeros(7), "unsupported"),
        (np.zeros((2, 3, 4, 5)), "unsupported"),
        (np.zeros((0, 4)), "not-an-image"),
    ],
)
def test_arrays_that_are_no_pictures_are_rejects(array, code):
    assert rejected(npy(array)).details["code"] == code


def test_a_header_that_promises_more_than_is_there_takes_no_memory():
    data = npy(np.zeros((30, 40, 3), np.uint8))
    assert rejected(data[:-1]).details["code"] == "truncated"
    huge = data.replace(b"(30, 40, 3)", b"(9999999,)*9")
    assert rejected(huge).details["stage"] == "open"
    for shape in (b"(30, 4000000000, 3)", b"(3000000000, 4000000000, 3)"):
        assert rejected(
            b"\x93NUMPY\1\0" + struct.pack("<H", 118) + b"{'descr': '|u1', 'fortran_order': False, 'shape': %s}".ljust(144) % shape
        ).details
    assert rejected(b"\x93NUMPY\1\0").details["code"] == "corrupt"
    assert rejected(npy(np.zeros((1, 5, 6))).replace(b"(1, 5, 6), }   ", b"(True, 5, 6), }")).details["code"] == "corrupt"
    assert rejected(b"\x93NUMPY\x09\0" + data[8:]).details["code"] == "corrupt"


def test_the_limits_hold_for_arrays():
    assert rejected(npy(np.zeros((30, 40))), max_pixels=1199).details["code"] == "pixel-limit"
    deep = npy(np.zeros((30, 40, 40)))
    keep = {"mode": "keep", "kept_mode": "Fx40", "axes": "hwc", "dtype": "float32"}
    assert rejected(deep, max_pixels=1200, **keep).details["code"] == "pixel-limit"
    assert made(deep, max_pixels=24_000, **keep).pixels.shape == (30, 40, 40)


def test_values_that_a_dtype_does_not_hold_are_rejects_that_name_value_and_option():
    big = npy(np.array([[2**31]], np.uint32))
    for dtype in ("int32", "uint16"):
        error = rejected(big, crop=1, mode="gray", dtype=dtype)
        assert (error.details["stage"], error.details["code"]) == ("cast", "value-range")
        assert str(2**31) in str(error)
        assert dtype in str(error)
    found = made(big, crop=1, mode="gray", dtype="float64")
    assert found.pixels.tolist() == [[[2.0**31]]]
    assert "2^53" in str(rejected(npy(np.array([[2**60]])), crop=1, mode="gray", dtype="float64"))
    assert "float64" in str(rejected(npy(np.array([[1e300]])), crop=1, mode="gray", dtype="float32"))
    assert rejected(npy(np.array([[0.5]])), crop=1, mode="gray", dtype="int32").details["code"] == "depth-32"
    assert "int16" in str(rejected(npy(np.array([[-1]], np.int16)), crop=1, mode="gray"))
    assert rejected(npy(np.array([[np.nan]])), crop=1, mode="gray", dtype="float32").details["code"] == "not-finite"


def test_strays_under_keep_are_rejects_that_name_both():
    error = rejected(npy(np.zeros((30, 40, 2), np.float32)), mode="keep", kept_mode="Fx5", dtype="float32")
    assert error.details["code"] == "mode"
    assert "Fx2" in str(error)
    assert "Fx5" in str(error)


def test_channels_that_are_no_colours_need_keep():
    for mode in ("rgb", "gray", "rgba"):
        error = rejected(npy(np.zeros((30, 40, 2), np.uint8)), mode=mode)
        assert error.details["code"] == "mode"
        assert "--mode keep" in str(error)


@pytest.mark.parametrize("bad", ["Fx0", "Fx1000", "Qx5", "RGBx3", "x5", "Fx05"])
def test_a_kept_mode_has_a_form(bad):
    with pytest.raises(OptionError, match="kept-mode"):
        Preprocess(mode="keep", kept_mode=bad)


def test_a_kept_mode_says_how_many_channels_a_sample_has():
    assert Preprocess(crop=(3, 4), mode="keep", kept_mode="I;16x12", dtype="uint16").sample_shape() == (12, 3, 4)


# ---------------------------------------------------------------- windows and sizes


def test_a_range_is_a_window_to_bytes_or_to_0_to_1():
    values = np.array([[[-2000.0, -100, 300, 700, 5000]]])
    for source in (values, values.astype(np.int16), values.astype(np.float32)):
        keep = {"crop": 1, "mode": "keep", "axes": "hwc", "range": (-100, 700)}
        assert made(npy(source), kept_mode="Lx5", **keep).pixels.tolist() == [[[0, 0, 128, 255, 255]]]
        floats = made(npy(source), kept_mode="Fx5", dtype="float32", **keep)
        assert (floats.pixels.tolist(), floats.depth) == ([[[0.0, 0.0, 0.5, 1.0, 1.0]]], 0)
    assert made(npy(np.array([[0, 500, 1000]], np.uint16)), crop=(1, 3), mode="gray", range=(0, 1000)).pixels.ravel().tolist() == [0, 128, 255]
    with pytest.raises(OptionError, match="range"):
        Preprocess(crop=1, range=(0, 1), dtype="int16")


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_channels_are_resized_one_by_one_in_float(dtype):
    values = (DEEP >> 1).astype(dtype)
    data = npy(np.concatenate([values, values[:, :, :3]], axis=2))
    keep = {"mode": "keep", "axes": "hwc", "dtype": dtype, "kept_mode": {"uint16": "I;16x7", "int16": "Ix7", "float32": "Fx7"}[dtype]}
    found = made(data, resize=(7, 9), crop=(7, 9), **keep).pixels
    wanted = by_channel(np.concatenate([values, values[:, :, :3]], axis=2), (7, 9))
    assert np.array_equal(found, wanted if dtype == "float32" else np.rint(wanted))


@pytest.mark.parametrize("resampler", ["torch", "pillow"])
def test_many_channels_of_bytes_are_resized_as_greys_are(resampler):
    values = RNG.integers(0, 256, (30, 40, 5), np.uint8)
    found = made(npy(values), resize=8, crop=8, axes="hwc", mode="keep", kept_mode="Lx5", resampler=resampler).pixels
    for c in range(5):
        grey = made(npy(values[:, :, c]), resize=8, crop=8, mode="gray", resampler=resampler).pixels[:, :, 0]
        assert np.array_equal(found[:, :, c], grey)


def test_an_array_of_three_channels_of_bytes_is_the_picture_that_its_png_is():
    values = RNG.integers(0, 256, (30, 40, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    for options in ({}, {"mode": "gray"}, {"mode": "rgba"}, {"resize": 8, "crop": 8}, {"resize": 8, "crop": 8, "compat": "torchvision"}):
        assert np.array_equal(made(npy(values), **options).pixels, made(out.getvalue(), "x.png", **options).pixels)


# ---------------------------------------------------------------- PNG


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (30, 40), (9, 17), (64, 3)])
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_png_of_16_bits_a_channel_is_kept_whole(channels, size, interlaced):
    values = RNG.integers(0, 65536, (*size, channels), np.uint16)
    data = deep_png(values, interlaced=interlaced)
    options = {"crop": size, "mode": "keep", "dtype": "uint16", "kept_mode": f"I;16x{channels}"}
    found = made(data, "x.png", **options)
    assert np.array_equal(found.pixels, values)
    assert (found.depth, found.format, found.mode) == (16, "PNG", f"I;16x{channels}")
    assert probe(data, "x.png", Preprocess(**options))[2] == f"I;16x{channels}"


def test_png_of_16_bits_a_channel_stays_pillows_where_bytes_are_asked_for():
    data = deep_png(DEEP[:, :, :3])
    for options in ({}, {"compat": "torchvision"}, {"depth16": "scale"}, {"depth16": "clip"}):
        found = made(data, "x.png", **options)
        assert np.array_equal(found.pixels, np.asarray(Image.open(io.BytesIO(data))))
        assert found.mode == "I;16x3"  # a rebuild that wants 16 bits must not take these rows


def test_a_window_looks_at_all_16_bits_of_a_colour():
    values = np.array([[[0, 500, 1000]]], np.uint16)
    assert made(deep_png(values), "x.png", crop=1, range=(0, 1000)).pixels.tolist() == [[[0, 128, 255]]]


def test_transparency_of_16_bits_is_composited_dropped_or_kept():
    values = np.array([[[10_000, 20_000, 30_000, 65535], [10_000, 20_000, 30_000, 0], [0, 0, 0, 32768]]], np.uint16)
    deep = {"crop": (1, 3), "dtype": "uint16"}
    data = deep_png(values)
    half = (0 * 32768 + 65535 * 32767 + 32767) // 65535
    assert made(data, "x.png", **deep).pixels.tolist() == [[[10_000, 20_000, 30_000], [65535] * 3, [half] * 3]]
    assert made(data, "x.png", alpha="#010203", **deep).pixels[0, 1].tolist() == [257, 2 * 257, 3 * 257]
    assert np.array_equal(made(data, "x.png", alpha="drop", **deep).pixels, values[:, :, :3])
    assert np.array_equal(made(data, "x.png", mode="rgba", **deep).pixels, values)
    grey = np.array([[[500, 65535], [500, 0]]], np.uint16)
    assert made(deep_png(grey), "x.png", crop=(1, 2), dtype="uint16", mode="gray").pixels.ravel().tolist() == [500, 65535]
    assert made(deep_png(grey), "x.png", crop=(1, 2), dtype="uint16").pixels.tolist() == [[[500] * 3, [65535] * 3]]
    one = deep_png(values[:, :, :3], extra=chunk(b"tRNS", struct.pack(">3H", 0, 0, 0)))
    assert made(one, "x.png", **deep).pixels.tolist() == [[[10_000, 20_000, 30_000]] * 2 + [[65535] * 3]]


def test_deep_transparency_is_resized_premultiplied():
    values = np.zeros((30, 40, 4), np.uint16)
    values[:, :20] = (60_000, 30_000, 10_000, 65535)  # beside it hidden black
    found = made(deep_png(values), "x.png", resize=(7, 9), crop=(7, 9), mode="rgba", dtype="uint16").pixels
    shown = found[:, :, 3] > 1000
    assert np.abs(found[shown][:, :3].astype(int) - (60_000, 30_000, 10_000)).max() <= 40
    assert 0 < shown.sum() < shown.size


def test_deep_grey_is_pillows_sum_of_colours():
    found = made(deep_png(DEEP[:, :, :3]), "x.png", mode="gray", dtype="uint16").pixels[:, :, 0]
    wanted = (DEEP[:, :, :3].astype(np.int64) @ np.array([19595, 38470, 7471]) + 32768) >> 16
    assert np.array_equal(found, wanted)


def test_deep_png_is_turned_by_its_exif():
    exif = Image.Exif()
    exif[0x0112] = 6
    values = DEEP[:, :, :3]
    data = deep_png(values, extra=chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")))
    turned = made(data, "x.png", crop=(40, 30), dtype="uint16")
    assert turned.orientation == 6
    assert np.array_equal(turned.pixels, np.rot90(values, -1))
    assert np.array_equal(made(data, "x.png", dtype="uint16", orientation="ignore").pixels, values)
    assert probe(data, "x.png", Preprocess(dtype="uint16"))[:2] == (30, 40)


def test_damaged_deep_png_is_a_reject():
    data = deep_png(DEEP[:, :, :3])
    assert rejected(data[: len(data) // 2], "x.png", dtype="uint16").details["stage"] == "load"
    assert made(data[: len(data) // 2], "x.png", dtype="uint16", truncated="accept").warnings == ("truncated-accepted",)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_is_pillows(orientation):
    values = RNG.integers(0, 256, (3, 5), np.uint8)
    image = Image.fromarray(values)
    image.getexif()[0x0112] = orientation
    from PIL import ImageOps

    assert np.array_equal(stored.turned(values, orientation), np.asarray(ImageOps.exif_transpose(image)))


# ---------------------------------------------------------------- TIFF


@pytest.mark.parametrize(
    ("values", "options", "kept", "dtype"),
    [
        (DEEP[:, :, :3], {"photometric": "rgb"}, "I;16x3", "uint16"),
        (np.concatenate([DEEP, DEEP], axis=2)[:, :, :5], {"photometric": "minisblack", "planarconfig": "contig"}, "I;16x5", "uint16"),
        ((DEEP.astype(int) - 40_000).astype(np.int32), {"photometric": "minisblack", "planarconfig": "contig"}, "Ix4", "int32"),
        (DEEP.astype(np.float32), {"photometric": "minisblack", "planarconfig": "contig"}, "Fx4", "float32"),
        (DEEP[:, :, 0].astype(np.float64) / 7, {}, "F", "float64"),
        (DEEP[:, :, 0].astype(np.uint32) << 14, {}, "I", "int32"),
        ((DEEP >> 8).astype(np.uint8), {"photometric": "rgb", "extrasamples": ["unspecified"]}, "Lx4", "uint8"),
        ((DEEP[:, :, :2] >> 8).astype(np.uint8), {"photometric": "minisblack", "planarconfig": "contig"}, "Lx2", "uint8"),
    ],
)
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_tiff_keeps_its_values(values, options, kept, dtype, byteorder):
    data = tiff(values.astype(values.dtype.newbyteorder(byteorder)), byteorder=byteorder, **options)
    given = {"mode": "keep", "dtype": dtype, "kept_mode": kept}
    found = made(data, "x.tif", **given)
    assert np.array_equal(found.pixels, values if values.ndim == 3 else values[:, :, None])
    assert found.pixels.dtype == dtype
    assert (found.format, found.warnings) == ("TIFF", ())
    assert probe(data, "x.tif", Preprocess(**AS_IS, **given))[2] == kept


def test_nothing_is_logged_about_a_tiff_that_pillow_does_not_read(caplog):
    data = tiff(np.zeros((30, 40, 5), np.uint8), photometric="minisblack", planarconfig="contig")
    made(data, "x.tif", mode="keep", kept_mode="Lx5")
    assert caplog.records == []


def test_tiff_of_deep_colours_stays_pillows_where_bytes_are_asked_for():
    data = tiff(DEEP[:, :, :3], photometric="rgb")
    found = made(data, "x.tif")
    assert np.array_equal(found.pixels, np.asarray(Image.open(io.BytesIO(data))))
    assert found.mode == "I;16x3"


def test_large_unsigned_values_of_a_tiff_do_not_wrap():
    data = tiff(np.full((30, 40), 3_000_000_000, np.uint32))
    assert made(data, "x.tif", mode="gray", dtype="float64").pixels.max() == 3e9
    assert "3000000000" in str(rejected(data, "x.tif", mode="gray", dtype="int32"))


def test_deep_tiff_is_turned_and_its_transparency_composited():
    data = tiff(DEEP, photometric="rgb", extrasamples=["unassalpha"], extratags=[(274, 3, 1, 6, True)])
    found = made(data, "x.tif", crop=(40, 30), mode="rgba", dtype="uint16")
    assert np.array_equal(found.pixels, np.rot90(DEEP, -1))
    assert found.orientation == 6
    clear = DEEP.astype(np.int64)
    wanted = (clear[:, :, :3] * clear[:, :, 3:] + 65535 * (65535 - clear[:, :, 3:]) + 32767) // 65535
    assert np.array_equal(made(data, "x.tif", crop=(40, 30), dtype="uint16").pixels, np.rot90(wanted, -1))


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int64", ">u2", "float32"])
def test_a_mask_may_be_an_array_and_is_turned_as_its_picture_is(dtype):
    ids = RNG.integers(0, 2 if dtype == "bool" else 200, (30, 40)).astype(dtype)
    options = Preprocess(crop=(40, 30), kind="mask").resolved()
    assert np.array_equal(mask(npy(ids), "x.npy", options, (40, 30), 6), np.rot90(ids, -1).astype(np.uint8))
    with pytest.raises(DecodeError, match="mask"):
        mask(npy(np.stack([ids] * 3)), "x.npy", options, (40, 30), 6)


def test_a_mask_of_an_array_holds_whole_numbers_that_fit():
    options = Preprocess(crop=(1, 2), kind="mask").resolved()
    for values in ([[0.5, 1]], [[np.nan, 1]], [[1e30, 1]], [[-1, 0]], [[256, 0]]):
        with pytest.raises(DecodeError) as caught:
            mask(npy(np.array(values)), "x.npy", options, (2, 1), 1)
        assert caught.value.details["code"] in ("mask-colours", "value-range")


# ---------------------------------------------------------------- builds


def test_a_rebuild_for_16_bits_takes_no_rows_of_8(tmp_path, monkeypatch):
    inline(monkeypatch)
    raw = write(tmp_path / "raw", {f"a/{k}.png": deep_png(RNG.integers(0, 65536, (8, 8, 3), np.uint16)) for k in range(3)})
    for deep in (Preprocess(crop=8, dtype="uint16"), Preprocess(crop=8, range=(0, 9000)), Preprocess(crop=8, dtype="float32")):
        out, new = tmp_path / f"out-{deep.dtype}", tmp_path / f"new-{deep.dtype}"
        run(raw, out, Preprocess(crop=8))
        run(raw, out, deep)
        run(raw, new, deep)
        assert dataset(out) == dataset(new)


def test_a_build_keeps_the_channels_of_its_sources(tmp_path, monkeypatch):
    inline(monkeypatch)
    raw = write(tmp_path / "raw", {f"a/{k}.png": deep_png(RNG.integers(0, 65536, (8, 8, 3), np.uint16)) for k in range(3)})
    write(raw, {"a/stray.png": deep_png(RNG.integers(0, 65536, (8, 8, 4), np.uint16))})
    run(raw, tmp_path / "out", Preprocess(crop=8, dtype="uint16", mode="keep"), max_rejects=1)
    whole = Preprocess(crop=8, dtype="uint16", mode="keep", kept_mode="I;16x3")
    wanted = [decode((raw / f"a/{k}.png").read_bytes(), "x.png", whole).pixels.transpose(2, 0, 1) for k in range(3)]
    assert np.array_equal(images(tmp_path / "out"), wanted)


def test_a_reject_for_a_missing_extra_is_not_remembered():
    marks = marks_of(Preprocess(crop=8), {}, 1)
    line = {"source_hash": "0" * 32, "stage": "open", "code": "needs-extra"}
    assert not marks.rejects(marks, line)
    assert marks.rejects(marks, {**line, "code": "not-an-image"})


# ---------------------------------------------------------------- damage

SEEDS = [npy(DEEP), npy(DEEP[:, :, 0].astype(np.float64)), deep_png(DEEP), deep_png(DEEP[:, :, :2], interlaced=True)]


@hypothesis.given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), st.integers(0, 12_000))
@hypothesis.settings(deadline=None, max_examples=200)
def test_damaged_files_give_pixels_or_a_decode_error(seed, changes, length):
    data = bytearray(seed[:length] if length > 6000 else seed)
    for at, value in changes:
        data[at % len(data)] = value
    options = Preprocess(resize=8, crop=8, max_pixels=100_000, dtype="float32", mode="keep", kept_mode="I;16x4")
    with contextlib.suppress(DecodeError):
        assert decode(bytes(data), "x.npy", options).pixels.shape[:2] == (8, 8)
