"""Bytes to pixels: this package is the only home of Pillow, and decides what a person sees when opening a file.

`decode` gives the pixels after orientation, transparency, depth, mode and geometry, or raises DecodeError with a message, the stage and
a code. Formats are opened from a fixed list, so that the outcome depends on the bytes and the extension alone.  One decode at a time in
a process (Pillow's limits are global): a lock sees to it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from mmcompile.compiler import depth as depths
from mmcompile.compiler import resample
from mmcompile.compiler.decode import convert, jpeg, opening, stored, volumes
from mmcompile.compiler.decode.jpeg import SUGGESTED_SCALING
from mmcompile.compiler.decode.mask import is_lossy, mask, picture_mask, settled, turns_unseen
from mmcompile.compiler.decode.opening import FORMATS, pillow_warning, versions
from mmcompile.compiler.decode.roads import mode_recorded, opened
from mmcompile.compiler.decode.stack import Stack
from mmcompile.compiler.decode.stored import Stored
from mmcompile.compiler.decode.volumes import VolumeGeometry
from mmcompile.compiler.formats import EXTENSIONS, TORCHVISION_EXTENSIONS, belongs, sniff
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.views import Shown
from mmcompile.errors import DecodeError
from mmcompile.format.canonical import as_bytes

__all__ = [
    "EXTENSIONS",
    "FORMATS",
    "SUGGESTED_SCALING",
    "TORCHVISION_EXTENSIONS",
    "Decoded",
    "VolumeGeometry",
    "decode",
    "initialise",
    "is_lossy",
    "mask",
    "picture",
    "picture_facts",
    "picture_mask",
    "picture_of",
    "picture_size",
    "pillow_warning",
    "probe",
    "probe_volume",
    "settled",
    "sniff",
    "turns_unseen",
    "versions",
    "volume",
]

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
    """Pixels (H, W, C) after geometry and before the cast (of a volume: (D, H, W) or (C, D, H, W)), and what is known of their source.

    `pixels` is uint8 (`depth` 8), uint16 (16), or int16, int32, float32 or float64 as they are (0).  `width`, `height`, `mode` (Pillow's, or one like
    Fx5: 5 channels of floats) and `orientation` (1 to 8) are the source's as stored.  `warnings` are codes: broken-exif, icc-ignored, more-frames,
    wrong-extension, truncated-accepted, pillow-warning.  `saving`: about what part of its time this decode would have saved with `jpeg_scaling`,
    0 to 1.  `frames`: planes of the source's volume.
    """

    pixels: _Pixels
    depth: int
    width: int
    height: int
    format: str
    mode: str
    orientation: int
    warnings: tuple[str, ...]
    saving: float = 0.0
    frames: int = 1


def initialise() -> None:
    """Load every reader once, so that no outcome depends on what was opened before.  For workers when they start; starts no thread."""
    opening.initialise()
    jpeg.initialise()


def decode(
    data: bytes, name: str, preprocess: Preprocess, on_open: Callable[[int, int], None] | None = None, shown: tuple[Shown, ...] | None = None
) -> Decoded:
    """The pixels of one file as `preprocess` wants them; of `name` the extension counts, and with views all of it (see `Views.shown`).

    `on_open(width, height)` is called when the size is known and decoding begins.  `shown`: what views show, where that follows another picture.

    Raises DecodeError with `stage` (open, load, convert, geometry), `code`, and `error`, the class that Pillow raised.  MemoryError passes.
    OptionError where the options leave the size of a sample open.
    """
    options = _resolved(preprocess)
    options.sample_shape()
    try:
        with opening.pillow(options) as log:
            return _decode(data, name, options, log, on_open, shown)
    except DecodeError as error:
        if options.truncated != "accept" or error.details["stage"] != "load":
            raise
    with opening.pillow(options, truncated=True) as log:
        made = _decode(data, name, options, log, on_open, shown)
    return replace(made, warnings=(*made.warnings, "truncated-accepted"))


def probe(data: bytes, name: str, preprocess: Preprocess) -> tuple[int, int, str]:
    """(width, height, mode) from the header: the size after orientation where that is applied, the mode that `mode="keep"` would keep.

    Raises DecodeError for what is no image of the list, or beyond the limits.
    """
    options = _resolved(preprocess)
    with opening.pillow(options) as log:
        image = opened(data, name, options, log)
        if isinstance(image, Stored):
            return (*image.size(options.orientation == "apply"), stored.mode_to_keep(image, options))
        may_turn = image.format != "PNG" or any(word in data for word in opening.PNG_ORIENTATION)
        width, height = opening.size_turned(image, options.orientation == "apply" and may_turn, log)
        return width, height, convert.mode_to_keep(image, options)


def volume(
    parts: Sequence[bytes], name: str, preprocess: Preprocess, geometry: VolumeGeometry, on_open: Callable[[int, int], None] | None = None
) -> Decoded:
    """The pixels of a volume: of one file (.npy, multi-page TIFF, NIfTI, DICOM), or of the files of a DICOM series.

    Of `preprocess` count dtype, depth, range, axes, orientation (NIfTI) and the limits; `on_open` gets (width, height) of all planes in a column.
    Raises DecodeError and MemoryError as `decode` does.
    """
    options = _resolved(preprocess)
    with opening.pillow(options), opening.quiet(*volumes.LOGGERS):
        found = volumes.opened(parts, options)
        depth, height, width = found.shape
        if on_open is not None:
            on_open(width, depth * height)
        pixels, bits = volumes.sample(found, geometry, options)
    codes = _codes(found.codes, name, found.format)
    mode = stored.mode_name(found.dtype, max(found.channels, 1))
    return Decoded(pixels, bits, width, height, found.format, mode, 1, codes, frames=depth)


def probe_volume(parts: Sequence[bytes], preprocess: Preprocess) -> tuple[tuple[int, int, int], int]:
    """((D, H, W), channels or 0) of a volume from its headers.  Raises DecodeError."""
    options = _resolved(preprocess)
    with opening.pillow(options), opening.quiet(*volumes.LOGGERS):
        found: Stack = volumes.opened(parts, options)
        return found.shape, found.channels


def picture(image: Image.Image, preprocess: Preprocess) -> tuple[_Pixels, int]:
    """(pixels (H, W, C), depth) of a picture that somebody has opened: those of the file that it came from, up to what Pillow had made of it.

    Raises DecodeError as `decode` does.
    """
    options = _resolved(preprocess)
    options.sample_shape()
    with opening.pillow(options) as log:
        with opening.stage("load", "picture"):
            image.load()
        opening.check_size(image.size, options, "load")
        orientation, _ = opening.orientation(image, log)
        with opening.stage("convert", "picture"):
            if options.orientation == "apply" and orientation in opening.TRANSPOSE and image.format != "TIFF":
                image = image.transpose(opening.TRANSPOSE[orientation])
            convert.check_kept(image, options)
            wide = convert.wide(image, options)
        with opening.stage("geometry", "resized picture"):
            if wide is not None:
                return _fit_values(wide[0], options), wide[1]
            return _fit_bytes(image, image.size, options, set()), 8


def picture_of(array: _Pixels) -> Image.Image:
    """A picture of pixels (C, H, W) uint8 with 1, 3 or 4 channels."""
    return Image.fromarray(np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)))


def picture_facts(image: Image.Image, preprocess: Preprocess) -> tuple[int, int, int]:
    """(width, height, orientation) of a picture as stored, as `Decoded` has them."""
    with opening.pillow(_resolved(preprocess)) as log:
        with opening.stage("load", "picture"):
            image.load()
        orientation = 1 if image.format == "TIFF" else opening.orientation(image, log)[0]
        return image.width, image.height, orientation


def picture_size(image: Image.Image, preprocess: Preprocess) -> tuple[int, int, str]:
    """(width, height, mode) as `probe` says them of a file."""
    options = _resolved(preprocess)
    with opening.pillow(options) as log:
        width, height = opening.size_turned(image, options.orientation == "apply", log)
        return width, height, convert.mode_to_keep(image, options)


@functools.lru_cache(maxsize=16)
def _resolved(preprocess: Preprocess) -> Preprocess:
    return preprocess.resolved()


def _decode(
    data: bytes,
    name: str,
    options: Preprocess,
    log: list[warnings.WarningMessage],
    on_open: Callable[[int, int], None] | None,
    shown: tuple[Shown, ...] | None,
) -> Decoded:
    image = opened(data, name, options, log)
    if isinstance(image, Stored):
        return _decode_stored(image, name, options, log, on_open, shown)
    format, mode, (width, height) = image.format or "", mode_recorded(data, image), image.size
    if on_open is not None:
        on_open(width, height)
    turned = opening.tiff_orientation(image) if format == "TIFF" else 1
    if is_jpeg := format in ("JPEG", "MPO"):
        orientation, broken = opening.orientation(image, log)
    turns = is_jpeg and options.orientation == "apply" and orientation in opening.TRANSPOSE
    scale, saving = _jpeg_scale(image, len(data), turns and orientation >= 5, options) if is_jpeg else (1, 0.0)
    if scale > 1:
        jpeg.reduce(image, scale)
    array = _plain_jpeg(data, image, options) if is_jpeg and not turns else None
    if array is None:
        with opening.stage("load", f"{format} data"):
            image.load()
    if scale == 1:
        opening.check_size(image.size, options, "load")
    codes = set()
    if not is_jpeg:
        orientation, broken = opening.orientation(image, log)
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
        depth = 8 if wide is None else wide[1]
        if wide is not None:
            made = _viewed(wide[0], _fit_values, name, options, shown)
        elif array is not None and options.views is not None:
            made = _viewed(array, lambda part, options: _fit_array(part, part.shape[1::-1], options), name, options, shown)
        elif options.views is not None:
            parts = shown or options.views.shown(as_bytes(name), image.height, image.width)
            inner = options.of_one_view()
            boxes = [(s.left, s.top, s.left + s.width, s.top + s.height) for s in parts]
            fitted = [_fit_bytes(image.crop(box), (s.width, s.height), inner, codes) for box, s in zip(boxes, parts, strict=True)]
            made = _mirrored(fitted, parts)
        else:
            size = image.size if scale == 1 else (height, width) if turns and orientation >= 5 else (width, height)
            made = _fit_bytes(image, size, options, codes) if array is None else _fit_array(array, size, options)
    if image.format is not None:
        # Last, and on the image as opened: some readers step to the second frame to find out, and drop the pixels of the first.
        _check_frames(image, options, codes)
    return Decoded(made, depth, width, height, format, mode, orientation, _codes(codes, name, format, log), saving)


def _codes(codes: Iterable[str], name: str, format: str, log: Sequence[warnings.WarningMessage] = ()) -> tuple[str, ...]:
    """The codes of a source, sorted, with those that its name and the warnings of its decoder add."""
    warned = {"pillow-warning"} if any(issubclass(w.category, UserWarning) for w in log) else set()
    named = set() if belongs(name, format) else {"wrong-extension"}
    return tuple(sorted({*codes, *warned, *named}))


def _decode_stored(
    picture: Stored,
    name: str,
    options: Preprocess,
    log: list[warnings.WarningMessage],
    on_open: Callable[[int, int], None] | None,
    shown: tuple[Shown, ...] | None,
) -> Decoded:
    if on_open is not None:
        on_open(picture.width, picture.height)
    convert.check_own(stored.mode_to_keep(picture, options), options)
    if "more-frames" in picture.codes and options.frames == "error":
        raise DecodeError("more than one frame, which --frames error refuses: --frames first takes the first", stage="convert", code="frames")
    pixels = picture.load()
    if options.orientation == "apply" or picture.turns:
        pixels = stored.turned(pixels, picture.orientation)
    pixels, depth = stored.convert(pixels, picture, options)
    with opening.stage("geometry", "resized picture"):
        alpha = picture.alpha and options.channels == 4
        made = _viewed(pixels, lambda part, options: _fit_stored(part, alpha, options), name, options, shown)
    codes = _codes(picture.codes, name, picture.format, log)
    mode = stored.mode_name(picture.dtype, picture.channels)
    return Decoded(made, depth, picture.width, picture.height, picture.format, mode, picture.orientation, codes)


def _viewed(
    pixels: _Pixels, fitted: Callable[[_Pixels, Preprocess], _Pixels], name: str, options: Preprocess, shown: tuple[Shown, ...] | None
) -> _Pixels:
    """What is `fitted` of pixels (H, W, …): of all of them, or with views (K, H, W, C) of the part that each shows."""
    if options.views is None:
        return fitted(pixels, options)
    parts = shown or options.views.shown(as_bytes(name), *pixels.shape[:2])
    inner = options.of_one_view()
    return _mirrored([fitted(pixels[s.top : s.top + s.height, s.left : s.left + s.width], inner) for s in parts], parts)


def _mirrored(made: Sequence[_Pixels], shown: tuple[Shown, ...]) -> _Pixels:
    return np.stack([part[:, ::-1] if s.flip else part for part, s in zip(made, shown, strict=True)])


def _jpeg_scale(image: Image.Image, nbytes: int, lies: bool, options: Preprocess) -> tuple[int, float]:
    """(1/s at which an opened JPEG is decoded, what part of the time that would save where it is not done); `lies`: its sides will be swapped."""
    width, height = image.size[::-1] if lies else image.size
    scaling = options.jpeg_scaling
    least = math.prod(options.output_hw()) * jpeg.LEAST_RATIO
    if (
        options.views is not None
        or (options.resize is None and options.pad is None)
        or (scaling is None and (options.compat is not None or width * height < least))
    ):
        return 1, 0.0
    rows, columns = resample.fit(height, width, options).size
    scale = jpeg.scale_for((width, height), (columns, rows), scaling or jpeg.SUGGESTED_SCALING)
    if scaling is not None:
        return scale, 0.0
    return 1, 0.0 if scale == 1 or "progressive" in image.info else 1 - jpeg.fraction_left(nbytes, width * height, scale)


def _plain_jpeg(data: bytes, image: Image.Image, options: Preprocess) -> _Pixels | None:
    """Pixels (H, W, C) of an opened JPEG in the wanted mode, where neither Pillow nor a conversion is needed for that; else None."""
    wanted = convert.wanted_mode(options)
    if options.resampler != "torch" or wanted not in ("RGB", "L") or (options.icc == "srgb" and image.info.get("icc_profile")):
        return None
    return jpeg.turbo_pixels(data, image, wanted == "RGB")


def _check_frames(image: Image.Image, options: Preprocess, codes: set[str]) -> None:
    if opening.has_more_frames(image):
        if options.frames == "error":
            raise DecodeError("more than one frame, which --frames error refuses: --frames first takes the first", stage="convert", code="frames")
        codes.add("more-frames")


def _fit_bytes(image: Image.Image, size: tuple[int, int], options: Preprocess, codes: set[str]) -> _Pixels:
    """Pixels (H, W, C) uint8 of the sample; `size` is (width, height) of the picture, of which `image` may be a smaller version."""

    def by_pillow(size: tuple[int, int], window: resample.Window) -> _Pixels:
        picture = convert.to_image(image, options, codes)
        if size != (picture.height, picture.width):
            picture = picture.resize((size[1], size[0]), _FILTERS[options.filter])
        top, left, bottom, right = window
        return convert.to_array(picture.crop((left, top, right, bottom)), None, codes)

    def array(padded: bool) -> _Pixels:
        return convert.to_array(image, options, codes, padded=padded)

    maker = resample.Maker(array, by_pillow, _ROWS_FIRST)
    return resample.sample(size[1], size[0], options, maker)


def _fit_array(pixels: _Pixels, size: tuple[int, int], options: Preprocess) -> _Pixels:
    """As `_fit_bytes`, of pixels (H, W, C) in the wanted mode, for the torch resampler."""

    def cut(size: tuple[int, int], window: resample.Window) -> _Pixels:
        top, left, bottom, right = window
        return pixels[top:bottom, left:right]

    return resample.sample(size[1], size[0], options, resample.Maker(lambda padded: pixels, cut, _ROWS_FIRST))


def _fit_stored(pixels: _Pixels, alpha: bool, options: Preprocess) -> _Pixels:
    """Pixels (H, W, C) of the sample, of pixels (H, W, C) or (H, W, 1) that all channels equal; `alpha`: the fourth is transparency."""
    channels = pixels.shape[2]
    if channels == 1:
        return _fit_values(pixels[:, :, 0], options)
    if pixels.dtype == np.uint8 and (channels == 3 or (alpha and channels == 4)):
        return _fit_bytes(Image.fromarray(np.ascontiguousarray(pixels)), pixels.shape[1::-1], options, set())
    alone = replace(options, mode="gray", kept_mode=None, alpha=None, normalize=None, transform=None, transform_version=None, transform_shape=None)
    if not alpha or (options.resize is None and options.pad is None):
        return np.concatenate([_fit_values(pixels[:, :, c], alone) for c in range(channels)], axis=2)
    # Premultiplied around the resize, as Pillow does with bytes: hidden colours must not show at edges.
    full = 1.0 if pixels.dtype.kind == "f" else float(np.iinfo(pixels.dtype).max)
    clear = pixels[:, :, 3:].astype(np.float32)
    parts = [pixels[:, :, :3] * (clear / full), clear]
    fitted = np.concatenate([_fit_values(part[:, :, c].astype(np.float32), alone) for part in parts for c in range(part.shape[2])], axis=2)
    share = fitted[:, :, 3:] / full
    fitted[:, :, :3] = np.divide(fitted[:, :, :3], share, out=np.zeros_like(fitted[:, :, :3]), where=share > 0)
    return depths.resized_back(fitted, pixels.dtype)


def _fit_values(values: _Pixels, options: Preprocess) -> _Pixels:
    """Pixels (H, W, C) of one channel of values (H, W): resized as Pillow's mode F, unless they fit as they are."""
    if values.dtype == np.uint8:
        return _fit_bytes(Image.fromarray(values), values.shape[::-1], options, set())

    def by_pillow(size: tuple[int, int], window: resample.Window) -> _Pixels:
        top, left, bottom, right = window
        if size == values.shape:
            return values[top:bottom, left:right, None]
        resized = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), _FILTERS[options.filter])
        return np.asarray(resized.crop((left, top, right, bottom)))[:, :, None]

    maker = resample.Maker(lambda padded: values.astype(np.float32)[:, :, None], by_pillow, _ROWS_FIRST)
    made = depths.resized_back(resample.sample(values.shape[0], values.shape[1], replace(options, resampler="pillow"), maker), values.dtype)
    return np.repeat(made, options.channels, axis=2) if options.channels > 1 else made
