"""More than 8 bits: this module decides what becomes of 16-bit, 32-bit and float images, and nothing is squeezed into a byte unasked.

Scaling is right for photographs, clipping for labels and microscopy; only the person who has the files knows which, so the default for
bytes is a reject that names the option.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["becomes_bytes", "from_16", "from_32", "resized_back"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def becomes_bytes(preprocess: Preprocess, *, bits: int) -> bool:
    """True where an image of 16 or 32 bits (32: integers and floats) is converted to 8 bit, False where it is kept or rejected."""
    if preprocess.depth16 == "clip":
        return True
    return (bits == 16 and preprocess.depth16 == "scale") or _ranged(preprocess)


def _ranged(preprocess: Preprocess) -> bool:
    return preprocess.range is not None and preprocess.depth16 in ("reject", "scale")


def from_16(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) of unsigned 16-bit values (H, W), for resolved options: uint8 and 8, or uint16 and 16.

    Raises DecodeError (code `depth-16`) where no option says what to do.
    """
    if preprocess.depth16 == "clip":
        return np.minimum(values, 255).astype(np.uint8), 8
    if preprocess.depth16 == "scale":
        # To nearest: 257 = 65535 / 255.
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8), 8
    if preprocess.range is not None:
        return _to_range(values, preprocess.range), 8
    if preprocess.depth16 == "reject":
        raise DecodeError(
            "16-bit grey does not fit in uint8: --depth16 scale (photographs) or clip (labels, microscopy), or --dtype uint16",
            stage="convert",
            code="depth-16",
        )
    return values.astype(np.uint16), 16


def from_32(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) of 32-bit integer or float values (H, W), for resolved options: uint8 and 8, or int32 or float32 as they are and 0.

    Raises DecodeError: code `depth-32` where no option says what to do, `not-finite` for NaN and infinities.
    """
    is_float = values.dtype.kind == "f"
    if is_float and not np.isfinite(values).all():
        raise DecodeError("a pixel is NaN or infinite", stage="convert", code="not-finite")
    if preprocess.range is not None and preprocess.depth16 in ("reject", "scale"):
        return _to_range(values, preprocess.range), 8
    if preprocess.depth16 == "clip":
        # Truncated, as Pillow does.
        return np.clip(values, 0, 255).astype(np.uint8), 8
    holds_floats = preprocess.dtype in _FLOATS
    if preprocess.dtype == "uint8" or (is_float and not holds_floats):
        what = "float" if is_float else "32-bit integer"
        remedy = "--dtype float32" if is_float else "--dtype int32 or float32"
        raise DecodeError(
            f"{what} pixels do not fit in {preprocess.dtype}: {remedy} keeps them"
            + (", --range LO:HI maps them to 8 bit" if preprocess.dtype == "uint8" else ""),
            stage="convert",
            code="depth-32",
        )
    return values.astype(np.float32 if is_float else np.int32), 0


def _to_range(values: npt.NDArray[Any], low_high: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """LO becomes 0, HI becomes 255, linear between and clipped outside; half to even."""
    low, high = low_high
    return np.rint(np.clip((values.astype(np.float64) - low) / (high - low), 0.0, 1.0) * 255.0).astype(np.uint8)


def resized_back(resized: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values that were resized as float32, as the dtype they had: whole numbers are rounded half to even and clipped to what it holds."""
    if resized.dtype == dtype:
        return resized
    limits = np.iinfo(dtype)
    return np.clip(np.rint(resized.astype(np.float64)), limits.min, limits.max).astype(dtype)
