"""PNG of 16 bits a channel: hides how both bytes of a colour are had from Pillow, whose modes of colours hold the upper ones alone.

The same data are decoded twice, once as they are and once as if the lower byte came first; interlacing, filters, checks and limits are Pillow's.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcompile.compiler.decode import opening
from mmcompile.compiler.decode.stored import Stored, check_bytes
from mmcompile.compiler.preprocess import Preprocess

__all__ = ["is_deep", "stored"]

_Pixels = npt.NDArray[Any]

_DEPTH_AT, _GREY_ALPHA, _RGB, _RGBA = 24, 4, 2, 6
#: (Pillow's mode, how it is to read the data) for each colour type: of the upper bytes, and of the lower ones; of grey and transparency all at once.
_READ_AS = {
    _RGB: (("RGB", "RGB;16B"), ("RGB", "RGB;16L")),
    _RGBA: (("RGBA", "RGBA;16B"), ("RGBA", "RGBA;16L")),
    _GREY_ALPHA: (("RGBA", "RGBA"),),
}


def is_deep(data: bytes, image: Image.Image) -> bool:
    """Does an opened image come from a PNG of 16 bits and several channels?"""
    return image.format == "PNG" and data[_DEPTH_AT : _DEPTH_AT + 1] == b"\x10" and data[_DEPTH_AT + 1] in _READ_AS


def stored(data: bytes, image: Image.Image, options: Preprocess, log: list[warnings.WarningMessage]) -> Stored:
    """An opened PNG for which `is_deep` as it holds its values; `log` is that of `opening.pillow`.  Raises DecodeError."""
    kind = data[_DEPTH_AT + 1]
    clear = image.info.get("transparency")
    channels = {_GREY_ALPHA: 2, _RGB: 3, _RGBA: 4}[kind]
    of_colour = clear if kind == _RGB and isinstance(clear, tuple) and len(clear) == 3 else None
    check_bytes(image.width * image.height * (channels + (of_colour is not None)), 2, options)
    orientation, broken = 1, False
    if any(word in data for word in opening.PNG_ORIENTATION):
        with opening.stage("load", "PNG data"):
            image.load()
        orientation, broken = opening.orientation(image, log)
    codes = {"broken-exif"} if broken else set()
    if image.info.get("icc_profile"):
        codes.add("icc-ignored")
    if opening.has_more_frames(image):
        codes.add("more-frames")

    def load() -> _Pixels:
        with opening.stage("load", "PNG data"):
            made = _values(data, kind)
        if of_colour is None:
            return made
        alpha = np.where((made == np.array(of_colour, np.uint16)).all(axis=2, keepdims=True), 0, 65535).astype(np.uint16)
        return np.concatenate([made, alpha], axis=2)

    return Stored(
        format="PNG",
        width=image.width,
        height=image.height,
        channels=channels + (of_colour is not None),
        dtype=np.dtype(np.uint16),
        colours=1 if kind == _GREY_ALPHA else 3,
        alpha=kind != _RGB or of_colour is not None,
        load=load,
        orientation=orientation,
        codes=frozenset(codes),
    )


def _values(data: bytes, kind: int) -> npt.NDArray[np.uint16]:
    """(H, W, C)."""
    bytes_of = [_read_as(data, *how) for how in _READ_AS[kind]]
    if kind == _GREY_ALPHA:
        return bytes_of[0].view(">u2").astype(np.uint16)
    upper, lower = bytes_of
    return upper.astype(np.uint16) << np.uint16(8) | lower.astype(np.uint16)


def _read_as(data: bytes, mode: str, how: str) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        opened: Any = image
        (tile,) = opened.tile
        opened._mode, opened.tile = mode, [(*tile[:3], how)]
        return np.array(image)
