"""Which reader a picture goes through: Pillow, whose answer counts wherever its modes hold what the file does, or one that takes values as stored.

What Pillow reads into bytes stays as it makes it where bytes are asked for; only a dtype that holds more, or a window (`range`), gets more.
"""

from __future__ import annotations

import warnings

import numpy as np
from PIL import Image

from mmcompile.compiler.decode import convert, npy, opening, png, stored, tiff
from mmcompile.compiler.decode.stored import Stored
from mmcompile.compiler.modes import CHANNELS
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["mode_recorded", "opened"]

#: Modes of Pillow's that hold 8 bits a channel.
_BYTES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "La", "CMYK", "YCbCr", "LAB")
#: Photometric interpretations that are greys (0, 1) and RGB.
_PLAIN = (0, 1, 2)


def opened(data: bytes, name: str, options: Preprocess, log: list[warnings.WarningMessage]) -> Image.Image | Stored:
    """A picture of which the header is read; `log` is that of `opening.pillow`.  Raises DecodeError."""
    if data.startswith(npy.SIGNATURE):
        return _checked(npy.stored(data, options), options)
    try:
        image = opening.open_image(data, name, options)
    except DecodeError as error:
        if options.compat is not None or not tiff.is_tiff(data) or error.details["code"] != "not-an-image":
            raise
        return _checked(_tiff_or(error, data, options), options)
    if options.compat is not None:
        return image
    if image.format == "TIFF" and options.mode == "keep":
        _, channels, photometric = tiff.declared(image)
        # Pillow drops the channels behind a colour that are no transparency.
        if photometric in _PLAIN and channels > CHANNELS[convert.mode_to_keep(image, options)]:
            return _checked(_tiff(data, options), options)
    if not _takes_more(options):
        return image
    if png.is_deep(data, image):
        return png.stored(data, image, options, log)
    if image.format == "TIFF" and (found := _tiff_beyond(data, image, options)) is not None:
        return found
    return image


def mode_recorded(data: bytes, image: Image.Image) -> str:
    """The mode that is recorded of an opened image that Pillow reads: its own, or that of its 16 bits where Pillow drops the lower ones."""
    if png.is_deep(data, image):
        channels = {"LA": 2, "RGB": 3, "RGBA": 4}[image.mode]
        return stored.mode_name(np.dtype(np.uint16), channels)
    if image.format == "TIFF" and image.mode in _BYTES and image.mode != "P":
        bits, channels, _ = tiff.declared(image)
        if bits == 16:
            return stored.mode_name(np.dtype(np.uint16), channels)
    return image.mode


def _takes_more(options: Preprocess) -> bool:
    """Are the lower bits of a file looked at?"""
    return options.depth16 != "clip" and (options.dtype != "uint8" or options.range is not None)


def _checked(found: Stored, options: Preprocess) -> Stored:
    opening.check_size((found.width, found.height), options, "open")
    return found


def _tiff(data: bytes, options: Preprocess) -> Stored:
    with opening.stage("open", "TIFF header"):
        return tiff.stored(data, options)


def _tiff_or(error: DecodeError, data: bytes, options: Preprocess) -> Stored:
    """As `_tiff`; for a damaged file Pillow's answer, which is `error`, counts."""
    try:
        return _tiff(data, options)
    except DecodeError as own:
        if own.details["code"] in ("truncated", "corrupt", "not-an-image"):
            raise error from own
        raise


def _tiff_beyond(data: bytes, image: Image.Image, options: Preprocess) -> Stored | None:
    """An opened TIFF that holds more than Pillow's mode for it, where it can be read; else None."""
    if image.mode not in (*_BYTES, "I", "F"):
        return None
    try:
        found = _tiff(data, options)
    except DecodeError:  # a kind that Pillow alone reads
        return None
    wide = image.mode in _BYTES and found.dtype.itemsize > 1
    beyond = (image.mode == "I" and found.dtype.kind == "u") or (image.mode == "F" and found.dtype.itemsize == 8 and options.dtype == "float64")
    return found if wide or beyond else None
