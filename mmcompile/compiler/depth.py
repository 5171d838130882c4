"""More than 8 bits: this module decides what becomes of 16-bit, 32-bit and float values, and nothing is squeezed into a byte unasked.

Scaling is right for photographs, clipping for labels and microscopy; only the person who has the files knows which, so the default for
bytes is a reject that names the option.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["becomes_bytes", "from_16", "from_32", "from_any", "kind_of", "resized_back"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: The largest whole number up to which float64 holds all of them.
_EXACT = 1 << 53


def becomes_bytes(preprocess: Preprocess, *, bits: int) -> bool:
    """True where an image of 16 or 32 bits (32: integers and floats) is converted to 8 bit, False where it is kept or rejected."""
    if preprocess.depth16 == "clip":
        return True
    return (bits == 16 and preprocess.depth16 == "scale") or (preprocess.range is not None and preprocess.dtype == "uint8")


def kind_of(dtype: np.dtype[Any], preprocess: Preprocess) -> str:
    """L, I;16, I or F: the mode of one channel of what `from_any` makes of values of this dtype, where it does not reject them."""
    if dtype == np.uint8 or dtype.kind == "b":
        return "L"
    bits = 16 if dtype == np.uint16 else 32
    if becomes_bytes(preprocess, bits=bits):
        return "L"
    return "F" if dtype.kind == "f" or preprocess.range is not None else "I;16" if bits == 16 else "I"


def from_any(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) of values of any shape, number type and byte order, for resolved options.

    `depth` is 8 for uint8, 16 for uint16, and 0 for int16, int32, float32 and float64 as they are.  Bytes stay bytes, whatever the options say of
    more than 8 bits.  Raises DecodeError as `from_16` and `from_32` do.
    """
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    if values.dtype.kind == "b" or values.dtype == np.uint8:
        return values.astype(np.uint8, copy=False), 8
    if values.dtype == np.uint16:
        return from_16(values, preprocess)
    return from_32(values, preprocess)


def from_16(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) of unsigned 16-bit values, for resolved options: uint8 and 8, uint16 and 16, or float32 of a range and 0.

    Raises DecodeError (code `depth-16`) where no option says what to do.
    """
    if preprocess.depth16 == "clip":
        return np.minimum(values, 255).astype(np.uint8), 8
    if preprocess.depth16 == "scale":
        # To nearest: 257 = 65535 / 255.
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8), 8
    if preprocess.range is not None:
        return _to_range(values, preprocess)
    if preprocess.depth16 == "reject":
        raise DecodeError(
            "16-bit pixels do not fit in uint8: --depth16 scale (photographs) or clip (labels, microscopy), --range LO:HI, or --dtype uint16"
            if preprocess.dtype == "uint8"
            else f"16-bit pixels, which --depth16 reject refuses: leave it out, and {preprocess.dtype} takes them",
            stage="convert",
            code="depth-16",
        )
    return values.astype(np.uint16), 16


def from_32(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) of signed, 32-bit or 64-bit integers or floats, for resolved options: uint8 and 8, or as they are and 0.

    Floats stay float64 for such a dtype alone; int8 becomes int16, and what int32 does not hold float64, where the dtype is a float.
    Raises DecodeError: code `depth-32` where no option says what to do, `not-finite` for NaN and infinities, `value-range` for what nothing holds.
    """
    is_float = values.dtype.kind == "f"
    if is_float and not np.isfinite(values).all():
        raise DecodeError("a pixel is NaN or infinite: write a number in its place", stage="convert", code="not-finite")
    if preprocess.range is not None and preprocess.depth16 != "clip":
        return _to_range(values, preprocess)
    if preprocess.depth16 == "clip":
        # Truncated, as Pillow does.
        return np.clip(values, 0, 255).astype(np.uint8), 8
    holds_floats = preprocess.dtype in _FLOATS
    if preprocess.dtype == "uint8" or (is_float and not holds_floats):
        what = "float" if is_float else f"{8 * values.dtype.itemsize}-bit {'signed' if values.dtype.itemsize < 4 else 'integer'}"
        holds = "int16" if values.dtype.itemsize < 4 or (values.size and values.min() >= -(2**15) and values.max() < 2**15) else "int32"
        remedy = "--dtype float32" if is_float else f"--dtype {holds} or float32"
        raise DecodeError(
            f"{what} pixels do not fit in {preprocess.dtype}: {remedy} keeps them"
            + (", --range LO:HI maps them to 8 bit" if preprocess.dtype == "uint8" else ""),
            stage="convert",
            code="depth-32",
        )
    return (_floats(values, preprocess) if is_float else _integers(values, preprocess)), 0


def _floats(values: npt.NDArray[Any], preprocess: Preprocess) -> npt.NDArray[Any]:
    if values.dtype.itemsize <= 4 or preprocess.dtype == "float64":
        return values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)
    limit = np.finfo(np.float32).max
    if values.size and (largest := float(np.abs(values).max())) > limit:
        raise DecodeError(f"a pixel is {largest:g}, and --dtype {preprocess.dtype} ends below: --dtype float64", stage="cast", code="value-range")
    return values.astype(np.float32)


def _integers(values: npt.NDArray[Any], preprocess: Preprocess) -> npt.NDArray[Any]:
    if values.dtype.itemsize < 4:
        return values.astype(np.int16)
    limits = np.iinfo(np.int32)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if limits.min <= low and high <= limits.max:
        return values.astype(np.int32)
    found = low if low < limits.min else high
    if preprocess.dtype in _FLOATS and low >= -_EXACT and high <= _EXACT:
        return values.astype(np.float64)
    end = "float64 holds whole numbers up to 2^53 alone" if preprocess.dtype in _FLOATS else f"--dtype {preprocess.dtype} ends below: --dtype float64"
    raise DecodeError(f"a pixel is {found}, and {end}", stage="cast", code="value-range")


def _to_range(values: npt.NDArray[Any], preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """LO becomes 0, HI becomes 255 (half to even) in bytes and 1 in floats, linear between and clipped outside."""
    assert preprocess.range is not None
    low, high = preprocess.range
    share = np.clip((values.astype(np.float64) - low) / (high - low), 0.0, 1.0)
    return (np.rint(share * 255.0).astype(np.uint8), 8) if preprocess.dtype == "uint8" else (share.astype(np.float32), 0)


def resized_back(resized: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values that were resized as float32, as the dtype they had: whole numbers are rounded half to even and clipped to what it holds."""
    if resized.dtype == dtype:
        return resized
    if dtype.kind == "f":
        return resized.astype(dtype)
    limits = np.iinfo(dtype)
    return np.clip(np.rint(resized.astype(np.float64)), limits.min, limits.max).astype(dtype)
