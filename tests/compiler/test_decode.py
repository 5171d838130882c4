import contextlib
import io
import pickle
import struct
import subprocess
import sys
import warnings
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL
import pytest
from PIL import Image, ImageFile

from mmcompile.compiler import decode as home
from mmcompile.compiler.decode import convert, decode, opening, pillow_warning, probe, versions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError, OptionError

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(RNG.integers(0, 256, (30, 40, 3), np.uint8))
CLEAR = Image.fromarray(RNG.integers(0, 256, (30, 40, 4), np.uint8))
AS_IS = Preprocess(crop=(30, 40))


def saved(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


PNG = saved(PHOTO, "PNG")


def exif(orientation):
    data = Image.Exif()
    data[0x0112] = orientation
    return data


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rejected(data, name="x.png", options=AS_IS):
    with pytest.raises(DecodeError) as caught:
        decode(data, name, options)
    assert set(caught.value.details) >= {"stage", "code"}
    return caught.value


# ---------------------------------------------------------------- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_in_every_format_that_has_it(format, orientation):
    data = saved(PHOTO, format, exif=exif(orientation))
    plain = np.asarray(Image.open(io.BytesIO(saved(PHOTO, format))))
    turned = plain.transpose(1, 0, 2) if orientation >= 5 else plain
    wanted = {2: np.s_[:, ::-1], 3: np.s_[::-1, ::-1], 4: np.s_[::-1], 6: np.s_[:, ::-1], 7: np.s_[::-1, ::-1], 8: np.s_[::-1]}.get(
        orientation, np.s_[:]
    )
    found = decode(data, f"x.{format.lower()}", Preprocess(crop=turned.shape[:2]))
    assert np.array_equal(found.pixels, turned[wanted])
    assert (found.orientation, found.width, found.height) == (orientation, 40, 30)
    assert probe(data, "x", AS_IS)[:2] == (turned.shape[1], turned.shape[0])


@pytest.mark.parametrize("options", [Preprocess(crop=(30, 40), orientation="ignore"), Preprocess(crop=(30, 40), compat="torchvision")])
def test_orientation_can_be_ignored(options):
    data = saved(PHOTO, "PNG", exif=exif(6))
    assert np.array_equal(decode(data, "x.png", options).pixels, np.asarray(PHOTO))
    assert probe(data, "x.png", options)[:2] == (40, 30)


def test_orientation_behind_the_pixels_of_a_png_counts():
    at = PNG.index(b"IEND") - 4
    data = PNG[:at] + png_chunk(b"eXIf", exif(6).tobytes()[6:]) + PNG[at:]
    found = decode(data, "x.png", Preprocess(crop=(40, 30)))
    assert np.array_equal(found.pixels, np.asarray(PHOTO.transpose(Image.Transpose.ROTATE_270)))
    assert probe(data, "x.png", AS_IS)[:2] == (30, 40)


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="this Pillow reads no XMP from WebP")
def test_orientation_in_xmp_counts():
    packet = b'<x:xmpmeta><rdf:Description tiff:Orientation="3"/></x:xmpmeta>'
    data = saved(PHOTO, "WEBP", lossless=True, xmp=packet)
    assert np.array_equal(decode(data, "x.webp", AS_IS).pixels, np.asarray(PHOTO.transpose(Image.Transpose.ROTATE_180)))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_are_none(orientation):
    found = decode(saved(PHOTO, "PNG", exif=exif(orientation)), "x.png", AS_IS)
    assert (found.orientation, found.warnings) == (1, ())
    assert np.array_equal(found.pixels, np.asarray(PHOTO))


@pytest.mark.parametrize("broken", [b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage", b"MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03"])
def test_broken_exif_keeps_the_pixels_and_is_counted(broken):
    found = decode(saved(PHOTO, "WEBP", lossless=True, exif=broken), "x.webp", AS_IS)
    assert np.array_equal(found.pixels, np.asarray(PHOTO))
    assert "broken-exif" in found.warnings
    assert found.orientation == 1


# ---------------------------------------------------------------- transparency, modes


@pytest.mark.parametrize(("alpha", "colour"), [("white", (255, 255, 255)), ("black", (0, 0, 0)), ("#102030", (16, 32, 48)), (None, (255, 255, 255))])
def test_transparency_lies_over_a_colour(alpha, colour):
    every = np.zeros((256, 256, 4), np.uint8)
    every[..., 3], every[..., 0] = np.mgrid[0:256, 0:256]
    every[..., 1] = 255 - every[..., 0]
    image = Image.fromarray(every)
    wanted = Image.alpha_composite(Image.new("RGBA", (256, 256), (*colour, 255)), image).convert("RGB")
    assert np.array_equal(decode(saved(image, "PNG"), "x.png", Preprocess(crop=256, alpha=alpha)).pixels, np.asarray(wanted))


def test_transparency_can_be_dropped():
    for options in (Preprocess(crop=(30, 40), alpha="drop"), Preprocess(crop=(30, 40), compat="torchvision")):
        assert np.array_equal(decode(saved(CLEAR, "PNG"), "x.png", options).pixels, np.asarray(CLEAR)[:, :, :3])


def test_transparency_is_composited_before_the_resize():
    wanted = Image.alpha_composite(Image.new("RGBA", CLEAR.size, "white"), CLEAR).convert("RGB").resize((20, 15), Image.Resampling.BILINEAR)
    found = decode(saved(CLEAR, "PNG"), "x.png", Preprocess(resize=(15, 20), resampler="pillow"))
    assert np.array_equal(found.pixels, np.asarray(wanted))


def test_a_transparent_palette_entry_is_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1])
    data = saved(image, "PNG", transparency=1)
    assert decode(data, "x.png", Preprocess(crop=(1, 2))).pixels.tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert decode(data, "x.png", Preprocess(crop=(1, 2), alpha="drop")).pixels.tolist() == [[[255, 0, 0], [0, 255, 0]]]
    assert decode(data, "x.png", Preprocess(crop=(1, 2), mode="rgba")).pixels.tolist() == [[[255, 0, 0, 255], [0, 255, 0, 0]]]


@pytest.mark.parametrize("filter", ["bilinear", "nearest"])
def test_kept_transparency_is_resized_premultiplied(filter):
    found = decode(saved(CLEAR, "PNG"), "x.png", Preprocess(resize=(15, 20), mode="rgba", filter=filter))
    assert np.array_equal(found.pixels, np.asarray(CLEAR.resize((20, 15), getattr(Image.Resampling, filter.upper()))))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb_grey_and_rgba(mode):
    image = PHOTO.convert(mode)
    format, ext = ("JPEG", "jpg") if mode in ("CMYK", "YCbCr") else ("PNG", "png")
    data = saved(image, format)
    opened = Image.open(io.BytesIO(data))
    rgb = opened.convert("RGB")
    assert np.array_equal(decode(data, f"x.{ext}", AS_IS).pixels, np.asarray(rgb))
    assert np.array_equal(decode(data, f"x.{ext}", Preprocess(crop=(30, 40), mode="gray")).pixels[:, :, 0], np.asarray(rgb.convert("L")))
    assert np.array_equal(decode(data, f"x.{ext}", Preprocess(crop=(30, 40), mode="rgba")).pixels, np.asarray(rgb.convert("RGBA")))


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("1", "L"), ("L", "L"), ("LA", "LA"), ("P", "RGB"), ("RGB", "RGB"), ("RGBA", "RGBA"), ("I;16", "I;16"), ("CMYK", "RGB")],
)
def test_keep_takes_one_mode_and_rejects_strays(mode, kept):
    image = Image.fromarray(np.full((30, 40), 9, np.uint16)) if mode == "I;16" else PHOTO.convert(mode)
    data = saved(image, "TIFF")
    options = Preprocess(crop=(30, 40), mode="keep", dtype="uint16")
    assert probe(data, "x.tif", options)[2] == kept
    found = decode(data, "x.tif", Preprocess(crop=(30, 40), mode="keep", dtype="uint16", kept_mode=kept))
    assert found.pixels.shape[2] == {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 1}[kept]
    stray = rejected(data, "x.tif", Preprocess(crop=(30, 40), mode="keep", dtype="uint16", kept_mode="L" if kept != "L" else "RGB"))
    assert stray.details["code"] == "mode"
    assert kept in str(stray)


def test_profiles_are_ignored_and_counted_or_converted():
    from PIL import ImageCms

    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = saved(PHOTO, "PNG", icc_profile=lab)
    assert decode(data, "x.png", AS_IS).warnings == ("icc-ignored",)
    made = decode(data, "x.png", Preprocess(crop=(30, 40), icc="srgb"))
    assert made.warnings == ()
    assert np.abs(made.pixels.astype(int) - np.asarray(PHOTO)).max() <= 1
    broken = decode(saved(PHOTO, "PNG", icc_profile=b"no profile"), "x.png", Preprocess(crop=(30, 40), icc="srgb"))
    assert broken.warnings == ("icc-ignored",)
    assert np.array_equal(broken.pixels, np.asarray(PHOTO))
    kept = decode(saved(CLEAR, "PNG", icc_profile=lab), "x.png", Preprocess(crop=(30, 40), icc="srgb", mode="rgba"))
    assert np.array_equal(kept.pixels[:, :, 3], np.asarray(CLEAR)[:, :, 3])


# ---------------------------------------------------------------- depth


def test_16_bit_grey_is_kept_resized_in_float_and_rounded():
    values = RNG.integers(0, 65536, (30, 40), np.uint16)
    data = saved(Image.fromarray(values), "PNG")
    found = decode(data, "x.png", Preprocess(crop=(30, 40), mode="gray", dtype="uint16"))
    assert found.depth == 16
    assert np.array_equal(found.pixels[:, :, 0], values)
    small = decode(data, "x.png", Preprocess(resize=(7, 9), dtype="uint16", filter="bicubic"))
    wanted = np.asarray(Image.fromarray(values.astype(np.float32)).resize((9, 7), Image.Resampling.BICUBIC))
    assert np.array_equal(small.pixels, np.repeat(np.clip(np.rint(wanted), 0, 65535)[:, :, None], 3, axis=2))
    assert rejected(data).details["code"] == "depth-16"


def test_float_and_integer_images_are_kept_as_they_are():
    floats = RNG.normal(0, 5, (30, 40)).astype(np.float32)
    data = saved(Image.fromarray(floats), "TIFF")
    found = decode(data, "x.tif", Preprocess(crop=(30, 40), mode="gray", dtype="float32"))
    assert (found.depth, found.pixels[:, :, 0].tolist()) == (0, floats.tolist())
    assert rejected(data, "x.tif").details["code"] == "depth-32"
    integers = RNG.integers(-(2**31), 2**31, (30, 40)).astype(np.int32)
    found = decode(saved(Image.fromarray(integers), "TIFF"), "x.tif", Preprocess(crop=(30, 40), mode="gray", dtype="int32"))
    assert (found.depth, found.pixels[:, :, 0].tolist()) == (0, integers.tolist())


def test_16_bit_pgm_counts_as_16_bit():
    data = b"P5 2 1 65535\n" + struct.pack(">2H", 257, 65535)
    assert decode(data, "x.pgm", Preprocess(crop=(1, 2), mode="gray", depth16="scale")).pixels.ravel().tolist() == [1, 255]
    kept = decode(data, "x.pgm", Preprocess(crop=(1, 2), mode="gray", dtype="uint16"))
    assert (kept.pixels.ravel().tolist(), kept.depth) == ([257, 65535], 16)


def test_deep_grey_becomes_bytes_on_the_road_of_bytes():
    values = np.repeat(np.arange(0, 65536, 2048, dtype=np.uint16)[:, None], 40, axis=1)
    found = decode(saved(Image.fromarray(values), "PNG"), "x.png", Preprocess(resize=16, crop=12, depth16="scale"))
    assert found.pixels.shape == (12, 12, 3)
    assert found.depth == 8


# ---------------------------------------------------------------- which files


def test_content_decides_and_a_wrong_extension_is_counted():
    assert decode(PNG, "x.jpg", AS_IS).warnings == ("wrong-extension",)
    assert decode(PNG, "x.TGA", AS_IS).warnings == ("wrong-extension",)
    assert decode(PNG, "no-extension", AS_IS).warnings == ()


def test_tga_needs_its_name():
    data = saved(PHOTO, "TGA")
    assert np.array_equal(decode(data, "x.tga", AS_IS).pixels, np.asarray(PHOTO))
    assert rejected(data, "x.ico").details["code"] == "not-an-image"


OPENED_BEFORE = """
import sys
from mmcompile.compiler.decode import decode
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError
for path in sys.argv[1:]:
    try:
        found = decode(open(path, "rb").read(), path, Preprocess(crop=4))
        print(path, found.format, found.mode, found.pixels.sum())
    except DecodeError as error:
        print(path, error.details["code"])
"""


def test_the_outcome_does_not_depend_on_what_was_opened_before(tmp_path):
    names = {
        "a.tga": saved(PHOTO, "TGA"),
        "b.ico": saved(PHOTO.resize((16, 16)), "ICO"),
        "c.ico": saved(PHOTO, "TGA"),
        "d.bmp": saved(PHOTO, "BMP"),
    }
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in names]
    answers = []
    for order in (paths, paths[::-1], paths[2:] + paths[:2]):
        run = subprocess.run([sys.executable, "-c", OPENED_BEFORE, *order], capture_output=True, text=True, check=True)
        answers.append(sorted(run.stdout.splitlines()))
    assert answers[0] == answers[1] == answers[2]
    assert [line.split()[1] for line in answers[0]] == ["TGA", "ICO", "not-an-image", "BMP"]


def test_formats_outside_the_list_are_no_images():
    for format in ("SGI", "PCX", "EPS"):
        assert rejected(saved(PHOTO, format), "x.png").details["code"] == "not-an-image"


# ---------------------------------------------------------------- rejects and limits


def test_truncated_files_are_rejected_or_accepted_and_marked():
    data = saved(PHOTO.resize((200, 200)), "JPEG")
    cut = data[: len(data) // 2]
    error = rejected(cut, "x.jpg")
    assert (error.details["stage"], error.details["code"], error.details["error"]) == ("load", "truncated", "OSError")
    found = decode(cut, "x.jpg", Preprocess(crop=200, truncated="accept"))
    assert "truncated-accepted" in found.warnings
    assert np.array_equal(found.pixels[:64], decode(data, "x.jpg", Preprocess(crop=200)).pixels[:64])
    assert "truncated-accepted" not in decode(data, "x.jpg", Preprocess(crop=200, truncated="accept")).warnings
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"no image", PNG[:20], b"\xff\xd8\xff\xe0" + b"\0" * 50])
def test_what_is_no_image_is_a_reject_of_the_opening(data):
    assert rejected(data).details["stage"] == "open"


def test_the_pixel_limit_is_exact():
    for limit in (1199, 1200, 1201):
        options = Preprocess(crop=(30, 40), max_pixels=limit)
        if limit < 1200:
            error = rejected(PNG, options=options)
            assert error.details["code"] == "pixel-limit"
            assert "max-pixels" in str(error)
        else:
            assert decode(PNG, "x.png", options).width == 40


def test_the_pixel_limit_holds_before_anything_is_decoded():
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    assert rejected(bomb).details["code"] == "pixel-limit"
    with pytest.raises(DecodeError):
        probe(bomb, "x.png", AS_IS)


def test_the_aspect_limit_is_named():
    error = rejected(saved(Image.new("RGB", (100, 4)), "PNG"), options=Preprocess(crop=1, max_aspect=24.9))
    assert error.details["code"] == "aspect-limit"
    assert "24.9" in str(error)
    assert decode(saved(Image.new("RGB", (100, 4)), "PNG"), "x.png", Preprocess(crop=1, max_aspect=25)).height == 4


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_more_frames_are_counted_or_an_error(format):
    frames = [PHOTO.quantize(), PHOTO.transpose(Image.Transpose.ROTATE_180).quantize()]
    data = saved(frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {}))
    found = decode(data, "x", AS_IS)
    assert found.warnings == ("more-frames",)
    assert np.array_equal(found.pixels, np.asarray(frames[0].convert("RGB")))
    assert rejected(data, "x", Preprocess(crop=(30, 40), frames="error")).details["code"] == "frames"


def test_a_stray_size_is_a_reject():
    assert decode(PNG, "x.png", Preprocess().with_size(30, 40)).pixels.shape == (30, 40, 3)
    assert rejected(PNG, options=Preprocess().with_size(40, 30)).details["code"] == "size"


@pytest.mark.parametrize(
    "raised", [RuntimeError, ValueError, SyntaxError, NotImplementedError, RecursionError, AssertionError, EOFError, ZeroDivisionError]
)
@pytest.mark.parametrize("where", ["open", "load"])
def test_whatever_pillow_raises_is_a_decode_error_in_our_words(raised, where, monkeypatch):
    def fail(*_, **__):
        raise raised("secret words of 0x7f and /a/path")

    if where == "open":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    error = rejected(PNG, "private.png")
    assert (error.details["stage"], error.details["error"]) == (where, raised.__name__)
    assert "secret" not in str(error)
    assert "private" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.details) == (str(error), error.details)


def test_options_without_a_size_are_no_fault_of_the_file():
    for options in (Preprocess(), Preprocess(crop=3, mode="keep")):
        with pytest.raises(OptionError):
            decode(PNG, "x.png", options)
        assert probe(PNG, "x.png", options) == (40, 30, "RGB")


@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt])
def test_what_says_nothing_about_the_file_passes_through(raised, monkeypatch):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(raised):
        decode(PNG, "x.png", AS_IS)
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


def test_warnings_change_no_outcome_and_leak_nowhere(monkeypatch):
    load = ImageFile.ImageFile.load

    def warn(self):
        warnings.warn("careful", UserWarning, stacklevel=1)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(PNG, "x.png", Preprocess(crop=(30, 40), orientation="ignore"))
    assert "pillow-warning" in found.warnings
    assert np.array_equal(found.pixels, np.asarray(PHOTO))


SEEDS = [
    PNG,
    saved(PHOTO, "JPEG", exif=exif(6)),
    saved(PHOTO, "WEBP", lossless=True),
    saved(PHOTO.quantize(), "GIF"),
    saved(PHOTO, "BMP"),
    saved(PHOTO, "TIFF", compression="tiff_lzw"),
    saved(PHOTO, "PPM"),
    saved(PHOTO, "JPEG2000"),
    saved(PHOTO, "TGA"),
    saved(PHOTO.resize((16, 16)), "ICO"),
]


@hypothesis.given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=8), st.integers(0, 6000))
@hypothesis.settings(deadline=None, max_examples=300)
def test_damaged_files_give_pixels_or_a_decode_error(seed, changes, length):
    data = bytearray(seed[:length] if length > 3000 else seed)
    for at, value in changes:
        data[at % len(data)] = value
    options = Preprocess(resize=8, crop=8, max_pixels=100_000, depth16="clip", resampler="pillow")
    with contextlib.suppress(DecodeError):
        assert decode(bytes(data), "x.tga", options).pixels.shape == (8, 8, 3)


# ---------------------------------------------------------------- large pictures, versions


@pytest.mark.parametrize(
    "options",
    [AS_IS, Preprocess(resize=9, crop=9), Preprocess(resize=9, crop=9, resampler="pillow"), Preprocess(resize=9, crop=9, mode="rgba")],
)
@pytest.mark.parametrize("image", [PHOTO, CLEAR, PHOTO.quantize(), PHOTO.convert("L")])
def test_strips_give_the_same_pixels(options, image, monkeypatch):
    data = saved(image, "PNG")
    ordinary = decode(data, "x.png", options).pixels
    monkeypatch.setattr(convert, "_STRIP_PIXELS", 100)
    assert np.array_equal(decode(data, "x.png", options).pixels, ordinary)


@pytest.mark.parametrize("resampler", ["torch", "pillow"])
@pytest.mark.parametrize("size", [(5000, 1), (1, 5000)])
def test_extreme_shapes_are_decoded(resampler, size):
    line = Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), np.uint8))
    for mode in ("rgb", "gray"):
        found = decode(saved(line, "PNG"), "x.png", Preprocess(resize=256, crop=224, resampler=resampler, mode=mode))
        assert found.pixels.shape == (224, 224, 3 if mode == "rgb" else 1)


def test_versions_name_what_pixels_depend_on():
    assert versions("PNG") == {"pillow": PIL.__version__}
    assert set(versions("PNG", icc=True)) == {"pillow", "littlecms2"}
    assert "libjpeg_turbo" in versions("JPEG")
    assert {"pillow", "libjpeg_turbo", "libtiff", "webp", "avif", "jpg_2000"} <= set(versions())


def test_an_old_pillow_is_named(monkeypatch):
    monkeypatch.setattr(PIL, "__version__", "12.3.0")
    assert "12.3.0" in pillow_warning()
    monkeypatch.setattr(PIL, "__version__", "13.1.0")
    assert pillow_warning() is None


def test_every_listed_format_has_its_reader():
    home.initialise()
    assert set(opening._FORMATS) | {"TGA"} <= set(Image.OPEN) | ({"AVIF"} if PIL.__version__ < "11.3" else set()) | {"HEIF"}
