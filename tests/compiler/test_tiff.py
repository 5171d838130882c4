"""TIFF pages of every number type, compression and arrangement, against tifffile; damaged ones."""

import contextlib
import io
import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.decode import opening, tiff
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

tifffile = pytest.importorskip("tifffile")

RNG = np.random.default_rng(0)
OPTIONS = Preprocess(crop=1, max_pixels=1_000_000).resolved()


def written(array, **options):
    out = io.BytesIO()
    tifffile.imwrite(out, array, **options)
    return out.getvalue()


def by_pillow(array, **options):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "TIFF", **options)
    return out.getvalue()


def read(data):
    with opening.pillow(OPTIONS):
        return tiff.stored(data, OPTIONS).load()


def rejected(data):
    with pytest.raises(DecodeError) as caught:
        read(data)
    assert set(caught.value.details) >= {"stage", "code"}
    return caught.value


TYPES = ["u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "f8"]


@pytest.mark.parametrize("byteorder", "<>")
@pytest.mark.parametrize("tile", [None, (16, 32)])
@pytest.mark.parametrize(("compression", "predictor"), [(None, False), ("zlib", False), ("zlib", True)])
@pytest.mark.parametrize("channels", [1, 5])
def test_every_type_and_arrangement_is_what_was_written(channels, compression, predictor, tile, byteorder):
    if predictor:
        pytest.importorskip("imagecodecs")
    for dtype in TYPES:
        values = RNG.integers(-100, 100, (37, 45, channels)).astype(dtype)
        for planar in ("contig", "separate") if channels > 1 else (None,):
            array = values[:, :, 0] if channels == 1 else values.transpose(2, 0, 1) if planar == "separate" else values
            options = {"compression": compression, "predictor": predictor, "tile": tile, "rowsperstrip": None if tile else 7}
            data = written(
                np.ascontiguousarray(array).astype(np.dtype(dtype).newbyteorder(byteorder)),
                byteorder=byteorder,
                photometric="minisblack",
                planarconfig=planar,
                **options,
            )
            assert np.array_equal(read(data), values), (dtype, planar)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "tiff_lzma", "zstd"])
def test_what_libtiff_unpacks_is_read(compression):
    values = RNG.integers(0, 60, (37, 45, 3), np.uint8)
    assert np.array_equal(read(by_pillow(values, compression=compression)), values)
    deep = RNG.integers(0, 65536, (37, 45), np.uint16)
    assert np.array_equal(read(by_pillow(deep, compression=compression))[:, :, 0], deep)


def test_jpeg_data_are_pillows_pixels():
    values = RNG.integers(0, 60, (64, 48, 3), np.uint8)
    for array in (values, values[:, :, 0]):
        data = by_pillow(array, compression="jpeg")
        wanted = np.asarray(Image.open(io.BytesIO(data)))
        assert np.array_equal(read(data), wanted.reshape(64, 48, -1))


def test_differences_are_added_up():
    """Horizontal ones of whole numbers, and of floats whose bytes lie apart: written here, as few writers make them."""
    values = np.array([[3, 10, 300, 2, 65535]], np.uint16)
    stored = np.diff(values, prepend=0, axis=1).astype(np.uint16)
    data = with_tag(written(stored, compression="zlib"), 317, 2)
    assert np.array_equal(read(data)[:, :, 0], values)
    floats = np.array([[1.5, -2.25, 3e10, 0.0]], np.float32)
    apart = floats.astype(">f4").view(np.uint8).reshape(4, 4).T.reshape(1, -1)
    stored = np.diff(apart, prepend=0, axis=1).astype(np.uint8).view("<f4")
    data = with_tag(written(stored, compression="zlib"), 317, 3)
    assert np.array_equal(read(data)[:, :, 0], floats)
    assert rejected(with_tag(data, 317, 9)).details["code"] == "unsupported"


def with_tag(data, tag, value):
    """A little-endian TIFF with one more entry of one number: its directory is written anew at the end."""
    at = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, at)[0]
    entries = [data[at + 2 + 12 * k : at + 14 + 12 * k] for k in range(count)]
    entries = [e for e in entries if struct.unpack_from("<H", e)[0] != tag] + [struct.pack("<HHII", tag, 3, 1, value)]
    entries.sort(key=lambda e: struct.unpack_from("<H", e)[0])
    data += b"\0" * (len(data) % 2)
    return data[:4] + struct.pack("<I", len(data)) + data[8:] + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)


def test_big_tiff_is_read():
    values = RNG.integers(0, 65536, (9, 7), np.uint16)
    assert np.array_equal(read(written(values, bigtiff=True))[:, :, 0], values)


def test_reduced_versions_are_no_pages():
    out = io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        writer.write(np.zeros((4, 5), np.uint8), subfiletype=1)
        writer.write(np.ones((8, 10), np.uint8))
        writer.write(np.ones((8, 10), np.uint8))
    assert [(p.width, p.height) for p in tiff.pages(out.getvalue())] == [(10, 8), (10, 8)]


GREY = RNG.integers(0, 65536, (20, 30), np.uint16)
PLAIN, PACKED = written(GREY), written(GREY, compression="zlib")


@pytest.mark.parametrize(
    ("tag", "value", "code"),
    [
        (256, 0, "not-an-image"),
        (258, 12, "unsupported"),
        (339, 6, "unsupported"),
        (259, 34712, "corrupt"),
        (278, 0, "corrupt"),
        (278, 3, "corrupt"),
        (257, 60_000, "corrupt"),
        (277, 0, "not-an-image"),
    ],
)
def test_damaged_structure_is_a_reject(tag, value, code):
    assert rejected(with_tag(PLAIN, tag, value)).details["code"] == code


def test_data_that_end_early_are_a_reject():
    assert rejected(PLAIN[:-10]).details["code"] == "truncated"
    assert rejected(PACKED[:-10]).details["stage"] == "load"


def test_limits_hold_before_memory():
    bomb = with_tag(with_tag(with_tag(PACKED, 256, 60_000), 257, 60_000), 278, 60_000)
    assert rejected(bomb).details["code"] == "pixel-limit"


def test_tiles_promise_no_more_memory_than_the_file_holds():
    tiled = written(GREY, tile=(16, 16))
    assert rejected(with_tag(tiled, 322, 4096)).details["stage"] in ("open", "load")
    many = with_tag(with_tag(with_tag(written(GREY[:1, :1], tile=(16, 16)), 277, 60_000), 322, 4096), 323, 4096)
    assert rejected(many).details["code"] == "corrupt"
    wide = with_tag(with_tag(written(np.zeros((1, 60_000), np.uint8), tile=(16, 16)), 323, 4096), 322, 16)
    assert rejected(wide).details["code"] == "truncated"


def test_a_circle_of_pages_ends():
    data = bytearray(PLAIN)
    at = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, at)[0]
    struct.pack_into("<I", data, at + 2 + 12 * count, at)
    with pytest.raises(DecodeError, match="its list of pages comes back to one that was before"):
        list(tiff.pages(bytes(data)))


@hypothesis.given(st.sampled_from([PLAIN, PACKED]), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=8), st.integers(0, 3000))
@hypothesis.settings(deadline=None, max_examples=200)
def test_damaged_files_give_values_or_a_decode_error(seed, changes, length):
    data = bytearray(seed[:length] if length > 1500 else seed)
    for at, value in changes:
        data[at % len(data)] = value
    if tiff.is_tiff(bytes(data)):
        with contextlib.suppress(DecodeError), opening.pillow(OPTIONS):
            assert tiff.stored(bytes(data), OPTIONS).load().ndim == 3
