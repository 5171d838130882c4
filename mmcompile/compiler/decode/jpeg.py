"""Hides what is special about JPEG files: that they can be decoded smaller than they are, and by libjpeg-turbo itself where that is installed.

The extra `jpeg` decides the time alone: it is used for plain files where it gives Pillow's pixels, as a test at first use in a process shows, and
whatever it finds odd about a file (a warning is enough) is left to Pillow, whose answer counts.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["LEAST_RATIO", "SUGGESTED_SCALING", "fraction_left", "initialise", "reduce", "scale_for", "turbo_pixels"]

#: What a build that would gain much is told to ask for: the resampler still sees twice the pixels that it makes.
SUGGESTED_SCALING = 2.0
#: With fewer pixels for each that is kept, that gives nothing: 1/2 of both sides, twice in each.
LEAST_RATIO = 16
_SCALES = (8, 4, 2)
#: Nanoseconds that decoding takes for each byte, and decoding and resizing for each pixel at 1/1 to 1/8: measured on 12 megapixels; only their
#: ratios matter here.
_BYTE_NS, _PIXEL_NS = 14.0, {1: 2.8, 2: 1.1, 4: 0.35, 8: 0.2}
#: Sampling factors (of the first component; the others have 1 x 1) that the test at first use covers.
_SAMPLINGS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))
#: Wide and high enough for several blocks in each direction at every sampling, with a rest.
_TEST_SIZES = ((64, 64), (61, 43))

_Bytes = npt.NDArray[np.uint8]


def initialise() -> None:
    """Find out now whether libjpeg-turbo can be used."""
    _turbo()


def scale_for(size: tuple[int, int], target: tuple[int, int], scaling: float) -> int:
    """8, 4, 2 or 1: the largest s with which a picture of `size` decoded at 1/s has `scaling` times the sides of `target`."""
    return next((s for s in _SCALES if all(have >= s * scaling * want for have, want in zip(size, target, strict=True))), 1)


def fraction_left(nbytes: int, pixels: int, scale: int) -> float:
    """About what part of its time a JPEG of so many bytes and pixels takes when it is decoded at 1/scale."""
    rest = _BYTE_NS * nbytes / pixels
    return (rest + _PIXEL_NS[scale]) / (rest + _PIXEL_NS[1])


def reduce(image: Image.Image, scale: int) -> None:
    """Let an opened JPEG be loaded at 1/scale, each side rounded up."""
    image.draft(None, (image.width // scale, image.height // scale))


def turbo_pixels(data: bytes, image: Image.Image, colour: bool) -> _Bytes | None:
    """Pixels (H, W, 3 or 1) of an opened JPEG as large as `image` is, RGB if `colour`; None where Pillow has to answer."""
    turbo = _turbo()
    if turbo is None or not _is_plain(image, colour):
        return None
    return _decoded(turbo, data, image, colour)


def _decoded(turbo: Any, data: bytes, image: Image.Image, colour: bool) -> _Bytes | None:
    width, height = image.size
    try:
        made: _Bytes = turbo.decode_jpeg(data, "RGB" if colour else "GRAY", min_height=height, min_width=width)
    except ValueError:  # all that libjpeg-turbo warns of; Pillow decides what becomes of such files
        return None
    return made if made.shape == (height, width, 3 if colour else 1) else None


def _is_plain(image: Image.Image, colour: bool) -> bool:
    layers = getattr(image, "layer", None)
    if image.format != "JPEG" or getattr(image, "bits", 0) != 8 or not layers or image.info.get("adobe_transform", 1) != 1:
        return False
    first, *others = [(entry[1], entry[2]) for entry in layers]
    if image.mode == "L":
        return not others
    return colour and image.mode == "RGB" and len(others) == 2 and first in _SAMPLINGS and set(others) == {(1, 1)}


@functools.cache
def _turbo() -> Any:
    """The binding of libjpeg-turbo, if it is installed and decodes as Pillow does; else None."""
    try:
        module = importlib.import_module("simplejpeg")
    except ImportError:
        return None
    return module if all(_agrees(module, data) for data in _test_files()) else None


def _agrees(turbo: Any, data: bytes) -> bool:
    for scale in (1, *_SCALES):
        image = Image.open(io.BytesIO(data))
        if scale > 1:
            reduce(image, scale)
        made = _decoded(turbo, data, image, True)
        if made is None or not np.array_equal(made, np.asarray(image.convert("RGB"))):
            return False
    return True


def _test_files() -> list[bytes]:
    """Small JPEGs of every sampling and kind that is taken."""
    files = []
    for width, height in _TEST_SIZES:
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(noise)
        for mode, subsampling, progressive in (("RGB", 0, False), ("RGB", 1, False), ("RGB", 2, False), ("RGB", 2, True), ("L", 0, False)):
            out = io.BytesIO()
            picture.convert(mode).save(out, "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
            files.append(out.getvalue())
    square = files[: len(files) // len(_TEST_SIZES)]
    # Pillow writes neither 1 x 2 nor 4 x 1: as many blocks in another order, so the headers of 2 x 1 and 2 x 2 can say so.
    files += [_resampled(square[1], 0x12), _resampled(square[2], 0x41)]
    return files


def _resampled(data: bytes, sampling: int) -> bytes:
    """A baseline JPEG with the sampling factors of its first component replaced."""
    at = data.index(b"\xff\xc0") + 11
    return data[:at] + bytes([sampling]) + data[at + 1 :]
