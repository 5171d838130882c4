"""HEIF through its extra: pixels, orientation, and what happens where the plug-in is missing."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.decode import decode, versions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

pillow_heif = pytest.importorskip("pillow_heif")

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(np.kron(RNG.integers(0, 256, (8, 12, 3), np.uint8), np.ones((8, 8, 1), np.uint8)))


def heif(image, **options):
    out = io.BytesIO()
    pillow_heif.from_pillow(image).save(out, **{"quality": -1, "chroma": 444, **options})
    return out.getvalue()


def test_a_photo_is_its_pixels():
    data = heif(PHOTO)
    found = decode(data, "x.HEIC", Preprocess(crop=(64, 96)))
    assert (found.format, found.mode, found.width, found.height, found.warnings) == ("HEIF", "RGB", 96, 64, ())
    assert np.abs(found.pixels.astype(int) - np.asarray(PHOTO)).max() <= 2
    assert decode(data, "x.jpg", Preprocess(crop=8)).warnings == ("wrong-extension",)
    assert decode(data, "no-extension", Preprocess(resize=8, crop=8)).pixels.shape == (8, 8, 3)


def test_the_orientation_is_applied_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = PHOTO.copy()
    data = heif(turned, exif=exif.tobytes())
    found = decode(data, "x.heic", Preprocess(crop=(96, 64)))
    assert np.abs(found.pixels.astype(int) - np.rot90(np.asarray(PHOTO), -1)).max() <= 2


def test_damage_and_limits_are_rejects():
    data = heif(PHOTO)
    for bad in (data[: len(data) // 2], data[:100], data[:40] + bytes(len(data) - 40)):
        with pytest.raises(DecodeError) as caught:
            decode(bad, "x.heic", Preprocess(crop=8))
        assert caught.value.details["code"] != "needs-extra"
    with pytest.raises(DecodeError) as caught:
        decode(data, "x.heic", Preprocess(crop=8, max_pixels=64 * 96 - 1))
    assert caught.value.details["code"] == "pixel-limit"


def test_its_version_is_one_that_its_pixels_depend_on():
    assert versions("HEIF")["pillow_heif"] == pillow_heif.__version__
    assert "libheif" in versions()
    assert set(versions("PNG")) == {"pillow"}


WITHOUT = """
import sys
sys.modules["pillow_heif"] = None
from mmcompile.compiler.decode import decode, versions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError
try:
    decode(sys.stdin.buffer.read(), "x.heic", Preprocess(crop=8))
except DecodeError as error:
    print(error.details["code"], error)
"""


def test_a_missing_plugin_is_named():
    run = subprocess.run([sys.executable, "-c", WITHOUT], input=heif(PHOTO), capture_output=True, check=True)
    assert run.stdout.decode() == "needs-extra a HEIF file needs pip install 'mmcompile[heif]'\n"


STARTED = """
import os
from mmcompile.compiler import decode
decode.initialise()
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_loading_the_plugin_starts_no_thread():
    run = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, check=True, env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
    assert run.stdout.strip() == b"1"
