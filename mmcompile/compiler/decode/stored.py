"""Pictures whose values are taken as their file holds them: this module decides what becomes of their channels.

Nothing here knows a file format.  A picture of bytes that Pillow reads never comes here; what comes has more bits, signs, fractions, or channels than
Pillow's modes have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import depth as depths
from mmcompile.compiler.modes import MAX_CHANNELS, named
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["Stored", "check_bytes", "convert", "mode_name", "mode_to_keep", "turned"]

_Pixels = npt.NDArray[Any]

#: All values of a file may take this many bytes for each pixel that one picture may have: 2.9 GB with the default of --max-pixels.
_BYTES_A_PIXEL = 16
#: Pillow's weights of red, green and blue in grey, of 65536.
_LUMA = (19595, 38470, 7471)
_GROUNDS = {"white": "#ffffff", "black": "#000000"}


@dataclass(frozen=True)
class Stored:
    """What a header says of a picture, and how its values are had.

    `colours`: how many of the first channels are grey (1) or red, green and blue (3); 0 where the file does not say, or says something else.
    `alpha`: the channel behind them is transparency.  `turns`: it is turned by its `orientation` (1 to 8) whatever was asked for.
    `load()` gives (H, W, C) of `dtype`, in any byte order, or raises DecodeError.
    """

    format: str
    width: int
    height: int
    channels: int
    dtype: np.dtype[Any]
    colours: int
    alpha: bool
    load: Callable[[], _Pixels]
    orientation: int = 1
    turns: bool = False
    codes: frozenset[str] = frozenset()

    def size(self, apply: bool) -> tuple[int, int]:
        """(width, height) after orientation, where that is applied."""
        return (self.height, self.width) if self.orientation >= 5 and (apply or self.turns) else (self.width, self.height)


def check_bytes(values: int, itemsize: int, options: Preprocess) -> None:
    """Raise DecodeError (code `pixel-limit`) for more than one file may hold."""
    limit = options.max_pixels * _BYTES_A_PIXEL
    if values * itemsize > limit:
        raise DecodeError(
            f"{values * itemsize:,} bytes of pixels, more than the {limit:,} that --max-pixels {options.max_pixels} allows",
            stage="open",
            code="pixel-limit",
        )


def mode_name(dtype: np.dtype[Any], channels: int) -> str:
    """What a record calls pixels of this dtype: Pillow's modes where it has one, else one like Fx5."""
    kind = "L" if dtype == np.uint8 or dtype.kind == "b" else "I;16" if dtype == np.uint16 else "F" if dtype.kind == "f" else "I"
    return named(kind, channels)


def mode_to_keep(stored: Stored, options: Preprocess) -> str:
    """The mode that stands for a picture's own under `mode="keep"`."""
    return named(depths.kind_of(stored.dtype, options), stored.channels, alpha=stored.alpha)


def turned(pixels: _Pixels, orientation: int) -> _Pixels:
    """Pixels (H, W, ...) as a person sees them, for an EXIF orientation of 1 to 8."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels


def convert(pixels: _Pixels, stored: Stored, options: Preprocess) -> tuple[_Pixels, int]:
    """(pixels (H, W, C), depth) in the wanted mode, before geometry: C is `options.channels`, or 1 that all of them equal.

    Under `mode="keep"` every channel is kept, transparency included.  Raises DecodeError where the channels are not those of the mode, or as
    `depth.from_any` does.
    """
    if options.mode != "keep":
        pixels = _in_mode(pixels, stored, options)
    elif stored.channels > MAX_CHANNELS:
        raise DecodeError(f"{stored.channels} channels, and a sample has at most {MAX_CHANNELS}", stage="convert", code="mode")
    return depths.from_any(pixels, options)


def _in_mode(pixels: _Pixels, stored: Stored, options: Preprocess) -> _Pixels:
    if stored.colours not in (1, 3):
        raise DecodeError(
            f"{stored.channels} channels that are no colours, and --mode {options.mode} needs grey or RGB: --mode keep keeps them",
            stage="convert",
            code="mode",
        )
    colours = pixels[:, :, : stored.colours]
    alpha = pixels[:, :, stored.colours, None] if stored.alpha else None
    is_float = colours.dtype.kind == "f"
    full = 1 if is_float else int(np.iinfo(colours.dtype).max)
    if options.mode == "rgba":
        clear = np.full_like(colours[:, :, :1], full) if alpha is None else alpha
        return np.concatenate([np.broadcast_to(colours, (*colours.shape[:2], 3)), clear], axis=2)
    over = alpha is not None and options.alpha != "drop"
    if not over and (options.mode == "rgb" or stored.colours == 1):
        return colours
    # Products of 32 bits by 32 do not fit in 64 with a sign.
    wide = colours.astype(np.int64 if not is_float and colours.dtype.itemsize <= 2 else np.float64)
    if over:
        wide = _over_ground(wide, cast(_Pixels, alpha).astype(wide.dtype), full, options.alpha or "white")
    if options.mode == "gray" and wide.shape[2] == 3:
        wide = _grey(wide)
    return (wide if is_float or wide.dtype == np.int64 else np.rint(wide)).astype(colours.dtype)


def _over_ground(colours: _Pixels, alpha: _Pixels, full: int, ground: str) -> _Pixels:
    code = _GROUNDS.get(ground, ground)
    under = np.array([int(code[at : at + 2], 16) for at in (1, 3, 5)])
    if colours.shape[2] == 1 and len(set(under.tolist())) == 1:
        under = under[:1]
    if colours.dtype.kind == "f":
        below: _Pixels = (colours * alpha + under / 255.0 * full * (full - alpha)) / full
        return below
    # To nearest.
    below = (colours * alpha + under * full // 255 * (full - alpha) + full // 2) // full
    return below


def _grey(colours: _Pixels) -> _Pixels:
    if colours.dtype.kind == "f":
        made: _Pixels = colours @ (np.array(_LUMA) / 65536.0)
    else:
        made = (colours @ np.array(_LUMA) + 32768) >> 16
    return made[:, :, None]
