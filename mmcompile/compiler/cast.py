"""From pixels to a stored row: this module decides the arithmetic of scaling, normalising and rounding, and nothing else does.

Float values are `x / max of the source's depth` in float32 and `(value - mean) / std` in float32, which is what torchvision's ToTensor
and Normalize compute, bit for bit.  Narrower floats are one rounding (to nearest, ties to even) of that float32; float64 is computed in
float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import DecodeError

if TYPE_CHECKING:
    from mmcompile.compiler.preprocess import Preprocess

__all__ = ["PIXEL_REVISION", "bfloat16", "channel_sums", "store"]

#: Raised whenever this package computes other pixels from the same bytes, settings and libraries.
PIXEL_REVISION = 1
#: Full scale of an 8- and a 16-bit source.
_FULL = {8: 255, 16: 65535}
#: 257 = 65535 / 255 takes 8 bits to 16 exactly.
_8_TO_16 = 257
#: 2^20 squares of 16 bits stay below 2^52: sums in float64 are exact.
_CHUNK = 1 << 20
#: 256 squares of 8 bits stay below 2^24: their sums in float32 are exact, at half the cost.
_BLOCK = 256
_ONES = np.ones(_BLOCK, np.float32)
#: Bytes of a channel that are summed at once: 256 KiB as float32, so that three of them stay in a core's second-level cache.
_NARROW_CHUNK = 1 << 16


def store(pixels: npt.NDArray[Any], preprocess: Preprocess, depth: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """The row of `preprocess.row_shape()` and `stored_dtype()` for pixels (H, W, C), C-contiguous; written to `out` where that is given.

    `depth` is 8 or 16 for unsigned sources of that depth, 0 for signed and float values, which are kept as they are.
    Raises DecodeError (stage `cast`) for a value that the dtype cannot hold.
    """
    row = pixels if preprocess.layout == "hwc" else pixels.transpose(2, 0, 1)
    floats = preprocess.dtype in ("float16", "bfloat16", "float32", "float64")
    made = _to_float(row, preprocess, depth) if floats else _to_integer(row, preprocess, depth)
    if out is None:
        return np.ascontiguousarray(made)
    out[...] = made
    return out


def _to_integer(row: npt.NDArray[Any], preprocess: Preprocess, depth: int) -> npt.NDArray[Any]:
    target = preprocess.stored_dtype()
    if row.dtype.kind == "f":
        raise DecodeError(
            f"float pixels, and --dtype {preprocess.dtype} holds whole numbers: --dtype float32 keeps them, --range LO:HI maps them",
            stage="cast",
            code="depth-32",
        )
    if target == row.dtype:
        return row
    if preprocess.dtype == "uint16" and depth == 8 and preprocess.scale == "unit":
        widened: npt.NDArray[Any] = row.astype(target) * target.type(_8_TO_16)
        return widened
    limits = np.iinfo(target)
    low, high = int(row.min(initial=0)), int(row.max(initial=0))
    if low < limits.min or high > limits.max:
        found = low if low < limits.min else high
        raise DecodeError(
            f"a pixel is {found}, and --dtype {preprocess.dtype} holds {limits.min} to {limits.max}: give a wider --dtype, or --range LO:HI",
            stage="cast",
            code="value-range",
        )
    return row.astype(target)


def _to_float(row: npt.NDArray[Any], preprocess: Preprocess, depth: int) -> npt.NDArray[Any]:
    wide = np.dtype("float64" if preprocess.dtype == "float64" else "float32").type
    value = row.astype(wide)
    if preprocess.scale == "unit" and depth in _FULL:
        value /= wide(_FULL[depth])
    if (normalize := preprocess.baked_normalize()) is not None:
        shape = (-1, 1, 1) if preprocess.layout == "chw" else (-1,)
        value -= np.asarray(normalize.mean, wide).reshape(shape)
        value /= np.asarray(normalize.std, wide).reshape(shape)
    if preprocess.dtype == "bfloat16":
        return bfloat16(value)
    if preprocess.dtype == "float16":
        # 65520 is the first float32 that rounds to infinity.
        if value.size and float(np.abs(value).max()) >= 65520.0:
            raise DecodeError(
                "a value is beyond 65504, the largest that --dtype float16 holds: give --dtype float32 or bfloat16", stage="cast", code="value-range"
            )
        return value.astype(preprocess.stored_dtype())
    return value


def bfloat16(value: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    bits = value.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def channel_sums(pixels: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(sums, sums of squares), each (C,), of pixels (H, W, C); fastest where each channel lies in one piece.

    Exact uint64 for unsigned pixels; float64 for signed and float ones.
    """
    channels = pixels.shape[2]
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1)).reshape(channels, -1)
    if pixels.dtype == np.uint8:
        return _sums_of_bytes(planes)
    kind = np.uint64 if pixels.dtype.kind == "u" else np.float64
    sums, squares = np.zeros(channels, kind), np.zeros(channels, kind)
    for start in range(0, planes.shape[1], _CHUNK):
        part: npt.NDArray[Any] = planes[:, None, start : start + _CHUNK].astype(np.float64)
        sums += np.einsum("cbn->cb", part).sum(axis=1, dtype=np.float64).astype(kind)
        squares += np.einsum("cbn,cbn->cb", part, part).sum(axis=1, dtype=np.float64).astype(kind)
    return sums, squares


def _sums_of_bytes(planes: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """(sums, sums of squares) of each row of (C, N): in blocks, as whole numbers that float32 holds, so that the order of adding changes nothing."""
    channels, n = planes.shape
    sums, squares = np.zeros(channels, np.uint64), np.zeros(channels, np.uint64)
    for start in range(0, n, _NARROW_CHUNK):
        part = planes[:, start : start + _NARROW_CHUNK]
        if part.shape[1] % _BLOCK:
            part = np.pad(part, ((0, 0), (0, -part.shape[1] % _BLOCK)))
        blocks = part.reshape(-1, _BLOCK).astype(np.float32)
        sums += (blocks @ _ONES).reshape(channels, -1).sum(axis=1, dtype=np.float64).astype(np.uint64)
        squares += np.matmul(blocks[:, None, :], blocks[:, :, None]).reshape(channels, -1).sum(axis=1, dtype=np.float64).astype(np.uint64)
    return sums, squares
