"""Bytes to an open image: this module decides which readers exist, under which limits, and what a failure is called.

Whatever Pillow raises (its many types included) ends as a DecodeError with a message of our own; only MemoryError passes through, which
says something about the machine.  Warnings are recorded and change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import PIL
from PIL import Image, ImageFile, features

from mmcompile.compiler.decode import memory
from mmcompile.compiler.formats import may_be_tga, sniff
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

#: The modules that read the listed formats.
_READERS = ("Avif", "Bmp", "Gif", "Ico", "Jpeg", "Jpeg2K", "Mpo", "Png", "Ppm", "Psd", "Tga", "Tiff", "WebP")
#: Tried in this order.  MPO is found by the JPEG reader; TGA has no signature and is tried last, for its own names only.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000", "ICO", "PSD")
#: Every format name that a decoded picture may have.
FORMATS = (*_FORMATS, "MPO", "TGA", "NPY", "NIFTI", "DICOM")
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
#: Packages that formats depend on which extras bring; with libheif beside them they are all that is listed where they are installed.
_HEIF = "pillow_heif"
_PACKAGES = {
    "HEIF": (_HEIF,),
    "NIFTI": ("nibabel",),
    "DICOM": ("pydicom", "pylibjpeg", "pylibjpeg-libjpeg", "pylibjpeg-openjpeg", "python-gdcm", "pyjpegls"),
}
#: Formats of volumes, whose packages no picture depends on.
_OF_VOLUMES = ("NIFTI", "DICOM")
#: The first Pillow whose decoders have the holes mended that the corpus knows of.
_SAFE_PILLOW = 13
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112
TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Without one of these in a PNG there is no orientation, and no reason to decode it all to look behind the pixels.
PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

#: Says of every TIFF with many channels that Pillow cannot read it.
_TIFF_LOGGER = "PIL.TiffImagePlugin"

_lock = threading.RLock()


@functools.cache
def initialise() -> None:
    """Load every reader once; none of them starts threads of its own.  Opening a file calls it too."""
    for reader in _READERS:
        # An older Pillow has no AVIF; such files are then rejected as unreadable.
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"PIL.{reader}ImagePlugin")
            if reader == "Avif":
                module.DEFAULT_MAX_THREADS = 1  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):  # such files are then rejects that name the extra
        # Never the small preview in place of the picture.
        importlib.import_module(_HEIF).register_heif_opener(decode_threads=1, thumbnails=False)


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """What these loggers say of a file is no business of the program's; its reject says it."""
    before = [(logger, logger.disabled) for logger in map(logging.getLogger, loggers)]
    try:
        for logger, _ in before:
            logger.disabled = True
        yield
    finally:
        for logger, was in before:
            logger.disabled = was


@contextlib.contextmanager
def pillow(options: Preprocess, *, truncated: bool = False) -> Iterator[list[warnings.WarningMessage]]:
    """Pillow under our limits, one caller at a time; warnings are recorded and change nothing; `truncated` fills up what is missing."""
    with _lock, quiet(_TIFF_LOGGER), warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        initialise()
        before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
        block_bytes = memory.one_block()
        # Pillow raises above twice this number.
        Image.MAX_IMAGE_PIXELS = (options.max_pixels + 1) // 2
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated
        try:
            yield log
        finally:
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before
            memory.set_block(block_bytes)


@contextlib.contextmanager
def stage(stage: str, what: str, *, accepts: bool = True) -> Iterator[None]:
    """What is raised inside as a DecodeError in our words; `accepts`: what is left of damaged data can be had."""
    try:
        yield
    except (MemoryError, DecodeError):
        raise
    except Exception as error:
        code, message = _explain(error, what)
        if stage == "load" and accepts:
            message += " (--truncated accept keeps what can be had)"
        raise DecodeError(message, stage=stage, code=code, error=type(error).__name__) from error


def _explain(error: Exception, what: str) -> tuple[str, str]:
    if isinstance(error, Image.DecompressionBombError):
        return "pixel-limit", "more pixels than --max-pixels allows"
    if isinstance(error, NotImplementedError):
        return "unsupported", f"a kind of {what} that Pillow does not read"
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return "truncated", f"the file ends before the {what} does"
    return "corrupt", f"the {what} cannot be decoded"


_NOTHING = "no bytes: the file is empty, or its row in a list holds no image and no path of a file below that folder"


def open_image(data: bytes, name: str, options: Preprocess) -> Image.Image:
    formats = [f for f in (*_FORMATS, *(["TGA"] if may_be_tga(name) else [])) if f in Image.OPEN]
    promised = sniff(data[:32])
    if promised == "HEIF" and "HEIF" not in Image.OPEN:
        extra(_HEIF, "heif", "HEIF")
    with stage("open", f"{promised or 'image'} header"):
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except PIL.UnidentifiedImageError as error:
            what = (
                f"a damaged {promised} header, or a kind of {promised} that Pillow does not read" if promised else "no image of a format that is read"
            )
            raise DecodeError(_NOTHING if not data else what, stage="open", code="not-an-image", error=type(error).__name__) from error
        check_size(image.size, options, "open")
        return image


def extra(module: str, name: str, format: str) -> Any:
    """A package that an extra of ours brings.  Raises DecodeError (code `needs-extra`) where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DecodeError(
            f"a {format} file needs pip install 'mmcompile[{name}]'", stage="open", code="needs-extra", error=type(error).__name__
        ) from error


def check_size(size: tuple[int, int], options: Preprocess, stage: str) -> None:
    """Raise DecodeError for a picture of (width, height) beyond the limits."""
    width, height = size
    if width < 1 or height < 1:
        raise DecodeError(f"a picture of {width}x{height} has no pixels", stage=stage, code="not-an-image")
    if width * height > options.max_pixels:
        raise DecodeError(
            f"{width}x{height} is {width * height} pixels, more than --max-pixels {options.max_pixels}", stage=stage, code="pixel-limit"
        )
    if options.max_aspect is not None and max(width, height) > options.max_aspect * min(width, height):
        raise DecodeError(
            f"{width}x{height}: the long side is more than --max-aspect {options.max_aspect:g} times the short one", stage=stage, code="aspect-limit"
        )


def tiff_orientation(image: Image.Image) -> int:
    """The orientation (1 to 8) of an opened TIFF that is not loaded yet: loading turns it, whatever was asked for."""
    return next((k for k in TRANSPOSE if _tag(image, _ORIENTATION) == k), 1)


def size_turned(image: Image.Image, apply: bool, log: list[warnings.WarningMessage]) -> tuple[int, int]:
    """(width, height) that an opened image will have once it is loaded, and turned where that is asked for; `log` is that of `pillow`."""
    width, height = image.size
    if image.format == "TIFF":
        # Newer versions of Pillow have swapped the sides already.
        swaps = tiff_orientation(image) >= 5 and image.size == (_tag(image, _WIDTH), _tag(image, _HEIGHT))
    else:
        swaps = apply and orientation(image, log)[0] >= 5
    return (height, width) if swaps else (width, height)


def _tag(image: Image.Image, number: int) -> object:
    try:
        return image.tag_v2.get(number)  # type: ignore[attr-defined]
    except MemoryError:
        raise
    except Exception:
        return None


def orientation(image: Image.Image, log: list[warnings.WarningMessage]) -> tuple[int, bool]:
    """(1 to 8, whether EXIF is broken): what exif_transpose of Pillow would go by, XMP included; broken EXIF is no orientation.

    `log` is that of `pillow`; what is warned of here is taken out of it again.
    """
    before = len(log)
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:
        return 1, True
    else:
        return next((k for k in TRANSPOSE if found == k), 1), len(log) > before
    finally:
        del log[before:]


def has_more_frames(image: Image.Image) -> bool:
    """A damaged frame behind the first is no business of ours."""
    try:
        return bool(getattr(image, "is_animated", False))
    except MemoryError:
        raise
    except Exception:
        return False


def versions(format: str | None = None, *, icc: bool = False, volumes: bool = False) -> dict[str, str]:
    """The versions that the pixels of a format depend on (None: all formats of pictures, and with `volumes` those of volumes).

    `icc` adds the library that converts profiles.  What an extra brings stands there where it is installed.
    """
    formats = [format] if format is not None else [f for f in FORMATS if volumes or f not in _OF_VOLUMES]
    wanted = {name for f in formats for name in _LIBRARIES.get(f, ())}
    found = {"pillow": PIL.__version__}
    for name in sorted(wanted | ({"littlecms2"} if icc else set())):
        found[name] = _version(name)
    found |= {name: version for f in formats for name in _PACKAGES.get(f, ()) if (version := _installed(name))}
    return {**found, "libheif": str(importlib.import_module(_HEIF).libheif_version())} if _HEIF in found else found


@functools.cache
def _installed(name: str) -> str:
    """Empty for a package that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _version(name: str) -> str:
    with warnings.catch_warnings():
        # A feature that this Pillow does not know is none that its pixels depend on.
        warnings.simplefilter("ignore")
        return features.version(name) or "none"


def pillow_warning() -> str | None:
    """One line for a person where the installed Pillow has decoder holes that a later one mends."""
    if int(PIL.__version__.split(".")[0]) >= _SAFE_PILLOW:
        return None
    return (
        f"Pillow {PIL.__version__} has known decoder holes that {_SAFE_PILLOW} mends: "
        f"pip install 'pillow>={_SAFE_PILLOW}' before building from files of others"
    )
