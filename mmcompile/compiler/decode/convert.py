"""An open image to the wanted mode: this module decides what becomes of profiles, transparency, palettes and deep greys.

All of it is local to a pixel, so large pictures are converted strip by strip and no second whole copy lies in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from mmcompile.compiler import depth as depths
from mmcompile.compiler.decode import memory
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

_Pixels = npt.NDArray[Any]

#: Pictures with more pixels are converted in strips of this many, so that no second whole copy lies in memory.
_STRIP_PIXELS = 1 << 22


def is_16(image: Image.Image) -> bool:
    # Pillow reads PGM of more than 8 bits as I, scaled to 16.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def mode_to_keep(image: Image.Image, options: Preprocess) -> str:
    """The mode that stands for an image's own under `mode="keep"`: palettes are their colours, CMYK and the like are RGB."""
    if is_16(image):
        return depths.kind_of(np.dtype(np.uint16), options)
    if image.mode in ("I", "F"):
        return depths.kind_of(np.dtype(np.int32 if image.mode == "I" else np.float32), options)
    grey = image.mode in ("1", "L", "LA", "La")
    return ("L" if grey else "RGB") + ("A" if _has_alpha(image) else "")


def check_kept(image: Image.Image, options: Preprocess) -> None:
    if options.mode == "keep":
        check_own(mode_to_keep(image, options), options)


def check_own(own: str, options: Preprocess) -> None:
    """Raise DecodeError for a picture whose own mode is not the one that is kept."""
    if options.mode == "keep" and options.kept_mode is not None and own != options.kept_mode:
        raise DecodeError(
            f"mode {own} among sources of mode {options.kept_mode}, and --mode keep needs one: --mode rgb converts all",
            stage="convert",
            code="mode",
        )


def wide(image: Image.Image, options: Preprocess) -> tuple[_Pixels, int] | None:
    """(pixels (H, W), depth) of an image of more than 8 bits a channel; None for all others."""
    if not is_16(image) and image.mode not in ("I", "F"):
        return None
    values = np.asarray(image)
    made = depths.from_16(values, options) if is_16(image) else depths.from_32(values, options)
    if made[1] != 8 and options.mode == "rgba":
        raise DecodeError(
            "grey of more than 8 bits, to which --mode rgba adds no transparency: give --mode gray",
            stage="convert",
            code="mode",
        )
    return made


def wanted_mode(options: Preprocess) -> str:
    return {"rgb": "RGB", "gray": "L", "rgba": "RGBA"}.get(options.mode) or options.kept_mode or "RGB"


def _converted(image: Image.Image, options: Preprocess, codes: set[str]) -> Image.Image:
    """The image, or a strip of it, in the wanted mode, with profile and transparency done."""
    wanted = wanted_mode(options)
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
    """Every mode takes the road over RGB, the one conversion that all of them have; greys come out of it as they went in."""
    if image.mode not in ("1", "L", "RGB"):
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


def _is_wanted(image: Image.Image, options: Preprocess) -> bool:
    """True where nothing is left to convert."""
    return image.mode == wanted_mode(options) and not _has_alpha(image) and options.icc == "ignore"


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """(first row, strip) from top to bottom; one strip for ordinary pictures."""
    width, height = image.size
    step = max(1, _STRIP_PIXELS // width)
    if step >= height:
        yield 0, image
        return
    for top in range(0, height, step):
        yield top, image.crop((0, top, width, min(top + step, height)))


def to_array(image: Image.Image, options: Preprocess | None, codes: set[str], *, padded: bool = False) -> _Pixels:
    """Pixels (H, W, C) uint8, converted strip by strip (`options` None: as they are); `padded` allows a byte without meaning after RGB."""
    out: _Pixels | None = None
    if padded and image.mode == "RGB" and options and _is_wanted(image, options):
        return memory.padded(image)
    for top, strip in _strips(image):
        made = _converted(strip, options, codes) if options else strip
        if padded and made.mode == "RGB" and strip is image:
            return memory.padded(made)
        part = np.asarray(made)
        part = part if part.ndim == 3 else part[:, :, None]
        if part.shape[0] == image.height:
            return part
        if out is None:
            out = np.empty((image.height, *part.shape[1:]), part.dtype)
        out[top : top + part.shape[0]] = part
    assert out is not None
    return out


def to_image(image: Image.Image, options: Preprocess, codes: set[str]) -> Image.Image:
    """The whole image in the wanted mode, converted strip by strip."""
    out: Image.Image | None = None
    if _is_wanted(image, options):
        return image
    for top, strip in _strips(image):
        part = _converted(strip, options, codes)
        if part.height == image.height:
            return part
        out = out or Image.new(part.mode, image.size)
        out.paste(part, (0, top))
    assert out is not None
    return out
