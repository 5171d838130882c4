"""Bytes to pixels: this package is the only home of Pillow, and decides what a person sees when opening a file.

`decode` gives the pixels after orientation, transparency, depth, mode and geometry, or raises DecodeError with a message, the stage and
a code. Formats are opened from a fixed list, so that the outcome depends on the bytes and the extension alone.  One decode at a time in
a process (Pillow's limits are global): a lock sees to it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from mmcompile.compiler import depth as depths
from mmcompile.compiler import resample
from mmcompile.compiler.decode import convert, opening
from mmcompile.compiler.decode.opening import FORMATS, initialise, pillow_warning, versions
from mmcompile.compiler.formats import EXTENSIONS, TORCHVISION_EXTENSIONS, belongs, sniff
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["EXTENSIONS", "FORMATS", "TORCHVISION_EXTENSIONS", "Decoded", "decode", "initialise", "pillow_warning", "probe", "sniff", "versions"]

_Pixels = npt.NDArray[Any]

#: Since 13 the resize takes rows first where the height shrinks much more than the width.
_ROWS_FIRST = int(PIL.__version__.split(".")[0]) >= 13
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}


@dataclass(frozen=True)
class Decoded:
    """Pixels (H, W, C) after geometry and before the cast, and what is known of their source.

    `pixels` is uint8 (`depth` 8), uint16 (16), or int32 or float32 as they are (0).  `width`, `height`, `mode` (Pillow's) and
    `orientation` (1 to 8) are the source's as stored.  `warnings` are codes: broken-exif, icc-ignored, more-frames, wrong-extension,
    truncated-accepted, pillow-warning.
    """

    pixels: _Pixels
    depth: int
    width: int
    height: int
    format: str
    mode: str
    orientation: int
    warnings: tuple[str, ...]


def decode(data: bytes, name: str, preprocess: Preprocess, on_open: Callable[[int, int], None] | None = None) -> Decoded:
    """The pixels of one file as `preprocess` wants them; `name` is looked at for its extension only.

    `on_open(width, height)` is called when the size is known and decoding begins.

    Raises DecodeError with `stage` (open, load, convert, geometry), `code`, and `error`, the class that Pillow raised.  MemoryError passes.
    OptionError where the options leave the size of a sample open.
    """
    options = _resolved(preprocess)
    options.sample_shape()
    try:
        with opening.pillow(options) as log:
            return _decode(data, name, options, log, on_open)
    except DecodeError as error:
        if options.truncated != "accept" or error.details["stage"] != "load":
            raise
    with opening.pillow(options, truncated=True) as log:
        made = _decode(data, name, options, log, on_open)
    return replace(made, warnings=(*made.warnings, "truncated-accepted"))


def probe(data: bytes, name: str, preprocess: Preprocess) -> tuple[int, int, str]:
    """(width, height, mode) from the header: the size after orientation where that is applied, the mode that `mode="keep"` would keep.

    Raises DecodeError for what is no image of the list, or beyond the limits.
    """
    options = _resolved(preprocess)
    with opening.pillow(options):
        image = opening.open_image(data, name, options)
        may_turn = image.format != "PNG" or any(word in data for word in opening.PNG_ORIENTATION)
        width, height = opening.size_turned(image, options.orientation == "apply" and may_turn)
        return width, height, convert.mode_to_keep(image, options)


@functools.lru_cache(maxsize=16)
def _resolved(preprocess: Preprocess) -> Preprocess:
    return preprocess.resolved()


def _decode(data: bytes, name: str, options: Preprocess, log: list[warnings.WarningMessage], on_open: Callable[[int, int], None] | None) -> Decoded:
    image = opening.open_image(data, name, options)
    format, mode, (width, height) = image.format or "", image.mode, image.size
    if on_open is not None:
        on_open(width, height)
    turned = opening.tiff_orientation(image) if format == "TIFF" else 1
    with opening.stage("load", f"{format} data"):
        image.load()
    opening.check_size(image, options, "load")
    codes = set()
    orientation, broken = opening.orientation(image)
    if broken:
        codes.add("broken-exif")
    with opening.stage("convert", f"{format} pixels"):
        if options.orientation == "apply" and orientation in opening.TRANSPOSE:
            _check_frames(image, options, codes)
            image = image.transpose(opening.TRANSPOSE[orientation])
        convert.check_kept(image, options)
        if options.icc == "ignore" and image.info.get("icc_profile"):
            codes.add("icc-ignored")
        wide = convert.wide(image, options)
        if format == "TIFF" and turned in opening.TRANSPOSE:
            # Pillow has turned it already, whatever was asked for.
            orientation = turned
            width, height = image.size if turned < 5 else image.size[::-1]
    with opening.stage("geometry", "resized picture"):
        if wide is not None:
            depth = wide[1]
            made = _fit_values(wide[0], options)
        else:
            depth = 8
            made = _fit_bytes(image, options, codes)
    if image.format is not None:
        # Last, and on the image as opened: some readers step to the second frame to find out, and drop the pixels of the first.
        _check_frames(image, options, codes)
    if any(issubclass(w.category, UserWarning) for w in log):
        codes.add("pillow-warning")
    if not belongs(name, format):
        codes.add("wrong-extension")
    return Decoded(made, depth, width, height, format, mode, orientation, tuple(sorted(codes)))


def _check_frames(image: Image.Image, options: Preprocess, codes: set[str]) -> None:
    if opening.has_more_frames(image):
        if options.frames == "error":
            raise DecodeError("more than one frame, and --frames error", stage="convert", code="frames")
        codes.add("more-frames")


def _fit_bytes(image: Image.Image, options: Preprocess, codes: set[str]) -> _Pixels:
    """Pixels (H, W, C) uint8 of the sample."""

    def by_pillow(size: tuple[int, int], window: resample.Window) -> _Pixels:
        picture = convert.to_image(image, options, codes)
        if size != (picture.height, picture.width):
            picture = picture.resize((size[1], size[0]), _FILTERS[options.filter])
        top, left, bottom, right = window
        return convert.to_array(picture.crop((left, top, right, bottom)), None, codes)

    def array(padded: bool) -> _Pixels:
        return convert.to_array(image, options, codes, padded=padded)

    maker = resample.Maker(array, by_pillow, _ROWS_FIRST)
    return resample.sample(image.height, image.width, options, maker)


def _fit_values(values: _Pixels, options: Preprocess) -> _Pixels:
    """Pixels (H, W, C) of one channel of values (H, W): resized as Pillow's mode F, unless they fit as they are."""
    if values.dtype == np.uint8:
        return _fit_bytes(Image.fromarray(values), options, set())

    def by_pillow(size: tuple[int, int], window: resample.Window) -> _Pixels:
        top, left, bottom, right = window
        if size == values.shape:
            return values[top:bottom, left:right, None]
        resized = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), _FILTERS[options.filter])
        return np.asarray(resized.crop((left, top, right, bottom)))[:, :, None]

    maker = resample.Maker(lambda padded: values.astype(np.float32)[:, :, None], by_pillow, _ROWS_FIRST)
    made = depths.resized_back(resample.sample(values.shape[0], values.shape[1], replace(options, resampler="pillow"), maker), values.dtype)
    return np.repeat(made, options.channels, axis=2) if options.channels > 1 else made
