import io

import pytest
from PIL import Image

from mmcompile.compiler.formats import ARRAY_EXTENSIONS, EXTENSIONS, TORCHVISION_EXTENSIONS, VOLUME_EXTENSIONS, belongs, extension, may_be_tga, sniff


def saved(format, **options):
    out = io.BytesIO()
    Image.new("RGB", (20, 20), (9, 99, 199)).save(out, format, **options)
    return out.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO"])
def test_32_bytes_tell_a_listed_format(format):
    Image.init()
    if format not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {format}")
    assert sniff(saved(format)[:32]) == format


@pytest.mark.parametrize(
    ("head", "format"),
    [
        (b"8BPS\0\1", "PSD"),
        (b"\xff\x4f\xff\x51\0\x2f", "JPEG2000"),
        (b"MM\0*\0\0\0\x08", "TIFF"),
        (b"II+\0\x08\0\0\0", "TIFF"),
        (b"P6\n20 20\n255\n", "PPM"),
        (b"Pf\n20 20\n-1\n", "PPM"),
        (b"\0\0\0 ftypmif1\0\0\0\0mif1avif", "AVIF"),
        (b"\0\0\0 ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0 ftypmif1\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0 ftypmif1\0\0\0\0mif1miaf", None),
        (b"\0\0\0 ftypmp42\0\0\0\0mp42isom", None),
        (b"%!PS-Adobe-3.0 EPSF-3.0", None),
        (b"Perhaps a text", None),
        (b"BMxxxxxxxxxxxxxxxxxxxxxxx", None),
        (b"RIFF\0\0\0\0WAVEfmt ", None),
        (b"P6", None),
        (b"", None),
    ],
)
def test_signatures_are_not_mistaken(head, format):
    assert sniff(head) == format


def test_names_promise_a_format():
    assert belongs("a/b.JPG", "JPEG")
    assert belongs("b.mpo", "MPO")
    assert belongs("b.jpg", "MPO")
    assert belongs("no extension", "PNG")
    assert belongs("b.unknown", "PNG")
    assert not belongs("b.jpg", "PNG")
    assert may_be_tga("X.VST")
    assert not may_be_tga("x.ico")
    assert extension("a.b/c.D.TiFF") == ".tiff"
    assert extension("a/b.NII.gz") == ".nii.gz"
    assert extension("a/b.tar.gz") == ".gz"
    assert belongs("b.nii.gz", "NIFTI")
    assert not belongs("b.nii.gz", "NPY")
    assert belongs("b.tiff", "TIFF")


def test_the_lists_hold_lower_case_extensions():
    assert TORCHVISION_EXTENSIONS < EXTENSIONS
    assert all(e == e.lower() and e.startswith(".") for e in EXTENSIONS | VOLUME_EXTENSIONS | ARRAY_EXTENSIONS)
    assert ".heic" in EXTENSIONS
    assert not {".eps", ".svg", ".npy", ".dds"} & EXTENSIONS
