"""Bytes to pixels: this module is the only home of Pillow, and decides what a person sees when opening a file.

`decode` gives the pixels after orientation, transparency, depth, mode and geometry, or raises DecodeError with a message of our own, the stage
and a code; whatever Pillow raises (its many types included) ends as that.  Only MemoryError passes through, which says something about the
machine.  Formats are opened from a fixed list, so that the outcome depends on the bytes and the extension alone.  One decode at a time in a
process (Pillow's limits are global): a lock sees to it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import (  # noqa: F401  # noqa: F401
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    PsdImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from mmcompile.compiler import depth as depths
from mmcompile.compiler import kernel, resample
from mmcompile.compiler.formats import EXTENSIONS, TORCHVISION_EXTENSIONS, belongs, may_be_tga, sniff
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["EXTENSIONS", "TORCHVISION_EXTENSIONS", "Decoded", "decode", "initialise", "pillow_warning", "probe", "sniff", "versions"]

_Pixels = npt.NDArray[Any]

#: Tried in this order.  MPO is found by the JPEG reader; TGA has no signature and is tried last, for its own names only.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "PSD")
#: What the pixels of a format depend on besides Pillow itself (names of PIL.features).
_LIBRARIES = {
    "JPEG": ("libjpeg_turbo", "jpg"),
    "MPO": ("libjpeg_turbo", "jpg"),
    # TIFF may hold JPEG data, and LAB, which only LCMS turns into RGB.
    "TIFF": ("libtiff", "libjpeg_turbo", "jpg", "littlecms2"),
    "WEBP": ("webp",),
    "AVIF": ("avif",),
    "JPEG2000": ("jpg_2000",),
}
#: The first Pillow whose decoders have the holes mended that the corpus knows of.
_SAFE_PILLOW = 13
#: Pictures with more pixels are converted in strips of this many, so that no second whole copy lies in memory.
_STRIP_PIXELS = 1 << 22
_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}
#: Without one of these in a PNG there is no orientation, and no reason to decode it all to look behind the pixels.
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

_lock = threading.RLock()


@dataclass(frozen=True)
class Decoded:
    """Pixels (H, W, C) after geometry and before the cast, and what is known of their source.

    `pixels` is uint8 (`depth` 8), uint16 (16), or int32 or float32 as they are (0).  `width`, `height`, `mode` (Pillow's) and `orientation` (1 to 8)
    are the source's as stored.  `warnings` are codes: broken-exif, icc-ignored, more-frames, wrong-extension, truncated-accepted, pillow-warning.
    """

    pixels: _Pixels
    depth: int
    width: int
    height: int
    format: str
    mode: str
    orientation: int
    warnings: tuple[str, ...]


def initialise() -> None:
    """For a worker process: every reader is loaded (importing this module did), and none starts threads of its own."""
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def decode(data: bytes, name: str, preprocess: Preprocess) -> Decoded:
    """The pixels of one file as `preprocess` wants them; `name` is looked at for its extension only.

    Raises DecodeError with `stage` (open, load, convert, geometry), `code`, and `error`, the class that Pillow raised.  MemoryError passes.
    """
    options = _resolved(preprocess)
    with _pillow(options) as log:
        try:
            return _decode(data, name, options, log)
        except DecodeError as error:
            if options.truncated != "accept" or error.details["stage"] != "load":
                raise
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            made = _decode(data, name, options, log)
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        return replace(made, warnings=(*made.warnings, "truncated-accepted"))


def probe(data: bytes, name: str, preprocess: Preprocess) -> tuple[int, int, str]:
    """(width, height, mode) from the header: the size after orientation where that is applied, the mode that `mode="keep"` would keep.

    Raises DecodeError for what is no image of the list, or beyond the limits.
    """
    options = _resolved(preprocess)
    with _pillow(options):
        image = _open(data, name, options)
        width, height = image.size
        may_turn = image.format != "PNG" or any(word in data for word in _PNG_ORIENTATION)
        if options.orientation == "apply" and image.format != "TIFF" and may_turn and _orientation(image)[0] >= 5:
            width, height = height, width
        return width, height, _mode_to_keep(image, options)


def versions(format: str | None = None, *, icc: bool = False) -> dict[str, str]:
    """The versions that the pixels of a format depend on (None: all formats); `icc` adds the library that converts profiles."""
    wanted = list(_LIBRARIES.get(format, ())) if format is not None else [name for names in _LIBRARIES.values() for name in names]
    found = {"pillow": PIL.__version__}
    for name in sorted({*wanted, *(["littlecms2"] if icc else [])}):
        found[name] = _version(name)
    return found


@functools.cache
def _version(name: str) -> str:
    return features.version(name) or "none"


def pillow_warning() -> str | None:
    """One line for a person where the installed Pillow has decoder holes that a later one mends."""
    if int(PIL.__version__.split(".")[0]) >= _SAFE_PILLOW:
        return None
    return f"Pillow {PIL.__version__} has known decoder holes that {_SAFE_PILLOW} mends: pip install 'pillow>={_SAFE_PILLOW}' before building from files of others"


# ---------------------------------------------------------------- opening


@functools.lru_cache(maxsize=16)
def _resolved(preprocess: Preprocess) -> Preprocess:
    return preprocess.resolved()


@contextlib.contextmanager
def _pillow(options: Preprocess) -> Iterator[list[warnings.WarningMessage]]:
    """Pillow under our limits: warnings are recorded and change nothing."""
    with _lock, warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        before = Image.MAX_IMAGE_PIXELS
        # Pillow raises above twice this number.
        Image.MAX_IMAGE_PIXELS = (options.max_pixels + 1) // 2
        try:
            yield log
        finally:
            Image.MAX_IMAGE_PIXELS = before


@contextlib.contextmanager
def _stage(stage: str, what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, DecodeError):
        raise
    except Exception as error:
        code, message = _explain(error, what)
        raise DecodeError(message, stage=stage, code=code, error=type(error).__name__) from error


def _explain(error: Exception, what: str) -> tuple[str, str]:
    if isinstance(error, Image.DecompressionBombError):
        return "pixel-limit", "more pixels than --max-pixels allows"
    if isinstance(error, NotImplementedError):
        return "unsupported", f"a kind of {what} that Pillow does not read"
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return "truncated", f"the file ends before the {what} does (--truncated accept keeps what is there)"
    return "corrupt", f"the {what} cannot be decoded"


def _open(data: bytes, name: str, options: Preprocess) -> Image.Image:
    formats = (*_FORMATS, "TGA") if may_be_tga(name) else _FORMATS
    promised = sniff(data[:32])
    with _stage("open", f"{promised or 'image'} header"):
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except PIL.UnidentifiedImageError as error:
            what = (
                f"a damaged {promised} header, or a kind of {promised} that Pillow does not read"
                if promised
                else "no image of a listed format"
            )
            raise DecodeError(
                "the file is empty" if not data else what, stage="open", code="not-an-image", error=type(error).__name__
            ) from error
        _check_size(image, options, "open")
        return image


def _check_size(image: Image.Image, options: Preprocess, stage: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise DecodeError(f"a picture of {width}x{height} has no pixels", stage=stage, code="not-an-image")
    if width * height > options.max_pixels:
        raise DecodeError(
            f"{width}x{height} is {width * height} pixels, more than --max-pixels {options.max_pixels}", stage=stage, code="pixel-limit"
        )
    if options.max_aspect is not None and max(width, height) > options.max_aspect * min(width, height):
        raise DecodeError(f"{width}x{height} is longer than --max-aspect {options.max_aspect:g}", stage=stage, code="aspect-limit")


def _decode(data: bytes, name: str, options: Preprocess, log: list[warnings.WarningMessage]) -> Decoded:
    image = _open(data, name, options)
    format, mode, (width, height) = image.format or "", image.mode, image.size
    turned = _tag(image) if format == "TIFF" else 1
    with _stage("load", f"{format} data"):
        image.load()
    _check_size(image, options, "load")
    codes = set()
    orientation, broken = _orientation(image)
    if broken:
        codes.add("broken-exif")
    with _stage("convert", f"{format} pixels"):
        original = image
        if options.orientation == "apply" and orientation in _TRANSPOSE:
            image = image.transpose(_TRANSPOSE[orientation])
        _check_kept(image, options)
        if options.icc == "ignore" and image.info.get("icc_profile"):
            codes.add("icc-ignored")
        wide = _wide(image, options)
        if format == "TIFF" and turned in _TRANSPOSE:
            # Pillow has turned it already, whatever was asked for.
            orientation = turned
            width, height = (height, width) if turned >= 5 else (width, height)
        more = _has_more_frames(original)
    if more:
        if options.frames == "error":
            raise DecodeError("more than one frame, and --frames error", stage="convert", code="frames")
        codes.add("more-frames")
    with _stage("geometry", "resized picture"):
        if wide is not None:
            depth = wide[1]
            made = _fit_values(wide[0], options)
        else:
            depth = 8
            made = _fit_bytes(image, options, codes)
    if any(issubclass(w.category, UserWarning) for w in log):
        codes.add("pillow-warning")
    if not belongs(name, format):
        codes.add("wrong-extension")
    return Decoded(made, depth, width, height, format, mode, orientation, tuple(sorted(codes)))


def _tag(image: Image.Image) -> int:
    try:
        return int(image.tag_v2.get(_ORIENTATION, 1))  # type: ignore[attr-defined]
    except MemoryError:
        raise
    except Exception:
        return 1


def _orientation(image: Image.Image) -> tuple[int, bool]:
    """(1 to 8, whether EXIF is broken): what exif_transpose of Pillow would go by, XMP included; broken EXIF is no orientation."""
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        try:
            found = image.getexif().get(_ORIENTATION, 1)
        except MemoryError:
            raise
        except Exception:
            return 1, True
    return next((k for k in _TRANSPOSE if found == k), 1), bool(log)


def _has_more_frames(image: Image.Image) -> bool:
    """Looked at last, because some readers step to the second frame to find out; a damaged one behind the first is no business of ours."""
    try:
        return bool(getattr(image, "is_animated", False))
    except MemoryError:
        raise
    except Exception:
        return False


# ---------------------------------------------------------------- converting


def _is_16(image: Image.Image) -> bool:
    # Pillow reads PGM of more than 8 bits as I, scaled to 16.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _mode_to_keep(image: Image.Image, options: Preprocess) -> str:
    """The mode that stands for an image's own under `mode="keep"`: palettes are their colours, CMYK and the like are RGB."""
    if _is_16(image):
        return "L" if depths.becomes_bytes(options, bits=16) else "I;16"
    if image.mode in ("I", "F"):
        return "L" if depths.becomes_bytes(options, bits=32) else image.mode
    grey = image.mode in ("1", "L", "LA", "La")
    return ("L" if grey else "RGB") + ("A" if _has_alpha(image) else "")


def _check_kept(image: Image.Image, options: Preprocess) -> None:
    if options.mode == "keep":
        own = _mode_to_keep(image, options)
        if options.kept_mode is not None and own != options.kept_mode:
            raise DecodeError(
                f"mode {own} among sources of mode {options.kept_mode}, and --mode keep needs one: --mode rgb converts all",
                stage="convert",
                code="mode",
            )


def _wide(image: Image.Image, options: Preprocess) -> tuple[_Pixels, int] | None:
    """(pixels (H, W), depth) of an image of more than 8 bits a channel; None for all others."""
    if not _is_16(image) and image.mode not in ("I", "F"):
        return None
    values = np.asarray(image)
    made = depths.from_16(values, options) if _is_16(image) else depths.from_32(values, options)
    if made[1] != 8 and options.mode == "rgba":
        raise DecodeError("grey of more than 8 bits has no transparency to keep: --mode gray", stage="convert", code="mode")
    return made


def _wanted_mode(options: Preprocess) -> str:
    return {"rgb": "RGB", "gray": "L", "rgba": "RGBA"}.get(options.mode) or options.kept_mode or "RGB"


def _converted(image: Image.Image, options: Preprocess, codes: set[str]) -> Image.Image:
    """The image, or a strip of it, in the wanted mode, with profile and transparency done."""
    wanted = _wanted_mode(options)
    keeps_alpha = wanted in ("RGBA", "LA")
    has_alpha = _has_alpha(image)
    colours = _to_srgb(image, codes) if options.icc == "srgb" else None
    if not has_alpha or options.alpha == "drop":
        made = colours or image
        return made if made.mode == wanted else _convert(made, wanted)
    if keeps_alpha and colours is None:
        return image if image.mode == wanted else image.convert(wanted)
    clear = image if image.mode == "RGBA" else image.convert("RGBA")
    alpha = clear.getchannel("A")
    if keeps_alpha:
        assert colours is not None
        colours.putalpha(alpha)
        return colours if wanted == "RGBA" else colours.convert("LA")
    ground = Image.new("RGB", image.size, {"white": "#ffffff", "black": "#000000"}.get(options.alpha or "", options.alpha))
    ground.paste(colours or clear, mask=alpha)
    return ground if wanted == "RGB" else ground.convert(wanted)


def _convert(image: Image.Image, wanted: str) -> Image.Image:
    """Grey is computed from RGB, so that every mode takes one road; for greys that road gives the same bytes."""
    if wanted == "L" and image.mode not in ("1", "RGB"):
        image = image.convert("RGB")
    return image.convert(wanted)


def _to_srgb(image: Image.Image, codes: set[str]) -> Image.Image | None:
    profile = image.info.get("icc_profile")
    if not profile:
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        picture = image.convert("RGB") if image.mode in ("P", "PA", "LA", "1") else image
        return ImageCms.profileToProfile(picture, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except MemoryError:
        raise
    except Exception:
        codes.add("icc-ignored")
        return None


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """(first row, strip) from top to bottom; one strip for ordinary pictures."""
    width, height = image.size
    step = max(1, _STRIP_PIXELS // width)
    if step >= height:
        yield 0, image
        return
    for top in range(0, height, step):
        yield top, image.crop((0, top, width, min(top + step, height)))


def _to_array(image: Image.Image, options: Preprocess | None, codes: set[str]) -> _Pixels:
    """Pixels (H, W, C) uint8, converted strip by strip (`options` None: as they are)."""
    out: _Pixels | None = None
    for top, strip in _strips(image):
        part = np.asarray(_converted(strip, options, codes) if options else strip)
        part = part if part.ndim == 3 else part[:, :, None]
        if part.shape[0] == image.height:
            return part
        if out is None:
            out = np.empty((image.height, *part.shape[1:]), part.dtype)
        out[top : top + part.shape[0]] = part
    assert out is not None
    return out


def _to_image(image: Image.Image, options: Preprocess, codes: set[str]) -> Image.Image:
    """The whole image in the wanted mode, converted strip by strip."""
    out: Image.Image | None = None
    if image.mode == _wanted_mode(options) and not _has_alpha(image) and options.icc == "ignore":
        return image
    for top, strip in _strips(image):
        part = _converted(strip, options, codes)
        if part.height == image.height:
            return part
        out = out or Image.new(part.mode, image.size)
        out.paste(part, (0, top))
    assert out is not None
    return out


# ---------------------------------------------------------------- geometry


def _check_size_kept(height: int, width: int, options: Preprocess) -> None:
    if options.keep_size is not None and (height, width) != options.keep_size:
        kept = f"{options.keep_size[1]}x{options.keep_size[0]}"
        raise DecodeError(
            f"{width}x{height} (width x height) among sources of {kept}, whose size is kept: give --resize and --crop",
            stage="geometry",
            code="size",
        )


def _rules(options: Preprocess, resampler: str) -> kernel.Rules:
    rows_first = int(PIL.__version__.split(".")[0]) >= 13
    return kernel.Rules("torch" if resampler == "torch" else "pillow", options.filter, rows_first)


def _box(fitted: resample.Fit) -> kernel.Box:
    return kernel.Box(*fitted.size, *fitted.window())


def _fit_bytes(image: Image.Image, options: Preprocess, codes: set[str]) -> _Pixels:
    width, height = image.size
    _check_size_kept(height, width, options)
    fitted = resample.fit(height, width, options)
    top, left, bottom, right = fitted.window()
    stays = fitted.size == (height, width)
    if not stays and resample.is_giant(height, width, fitted):
        return resample.place(_giant(image, options, fitted, codes), fitted)
    if options.resampler == "torch" and not stays:
        whole = resample.resize(_to_array(image, options, codes), fitted.size, options.filter)
        return resample.place(whole[top:bottom, left:right], fitted)
    picture = _to_image(image, options, codes)
    if not stays:
        picture = picture.resize((fitted.size[1], fitted.size[0]), _FILTERS[options.filter])
    if (top, left, bottom, right) != (0, 0, *fitted.size):
        picture = picture.crop((left, top, right, bottom))
    return resample.place(_to_array(picture, None, codes), fitted)


def _giant(image: Image.Image, options: Preprocess, fitted: resample.Fit, codes: set[str]) -> _Pixels:
    """The window alone, by the exact kernel; transparency that is kept is premultiplied as Image.resize does."""
    rules = _rules(options, options.resampler or "pillow")
    mode = _wanted_mode(options)
    if mode not in ("RGBA", "LA") or options.filter == "nearest":
        return kernel.window(_to_array(image, options, codes), _box(fitted), rules)
    clear = _to_image(image, options, codes).convert("RGBa" if mode == "RGBA" else "La")
    part = kernel.window(_to_array(clear, None, codes), _box(fitted), rules)
    again = Image.frombytes(clear.mode, (part.shape[1], part.shape[0]), part.tobytes()).convert(mode)
    return _to_array(again, None, codes)


def _fit_values(values: _Pixels, options: Preprocess) -> _Pixels:
    """Pixels (H, W, C) of one channel of values: bytes take the road of bytes, others are resized as Pillow's mode F."""
    if values.dtype == np.uint8:
        return _fit_bytes(Image.fromarray(values), options, set())
    height, width = values.shape
    _check_size_kept(height, width, options)
    fitted = resample.fit(height, width, options)
    top, left, bottom, right = fitted.window()
    if fitted.size == (height, width):
        part = values[top:bottom, left:right]
    elif resample.is_giant(height, width, fitted):
        part = depths.resized_back(
            kernel.window(values.astype(np.float32)[:, :, None], _box(fitted), _rules(options, "pillow"))[:, :, 0], values.dtype
        )
    else:
        resized = Image.fromarray(values.astype(np.float32)).resize((fitted.size[1], fitted.size[0]), _FILTERS[options.filter])
        part = depths.resized_back(np.asarray(resized.crop((left, top, right, bottom))), values.dtype)
    sample = resample.place(part[:, :, None], fitted)
    return np.repeat(sample, options.channels, axis=2) if options.channels > 1 else sample
