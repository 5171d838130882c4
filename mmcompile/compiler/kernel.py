"""A slow, exact resize for extreme shapes: this module knows the integer arithmetic of Pillow's and torch's kernels, tap by tap.

Both resize along one axis after the other, with weights of fixed precision and a byte rounded in between.  `window` computes only the
rows and columns that a crop shows, so a picture of 1 x 5000 never becomes one of 256 x 1,280,000, and the bytes are those of resizing
all of it. Works on arrays alone: neither Pillow nor torch is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmcompile.errors import DecodeError

__all__ = ["Box", "Rules", "trim", "window"]

#: Fractional bits of Pillow's 8-bit weights: 32 less 8 for the value and 2 for overshoot.
_PILLOW_BITS = 22
#: torch stores weights as int16 and takes the largest precision that fits, at most this.
_TORCH_MAX_BITS = 22
#: Multiplications that one pass may take: about a minute; beyond it the picture is refused.
_MAX_PRODUCTS = 1 << 33
#: float64 values converted at once (32 MiB).
_BLOCK = 1 << 22
#: Outputs whose weights are computed at once.
_OUTPUTS = 1 << 14

_SUPPORT = {"box": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}


@dataclass(frozen=True)
class Box:
    """A window (half-open rows and columns) into a picture resized to `height` x `width`."""

    height: int
    width: int
    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True)
class Rules:
    """Whose arithmetic: torch's, columns first, or Pillow's, which may take rows first where the height shrinks much more (13 does)."""

    resampler: Literal["torch", "pillow"]
    filter: str
    tall_rows_first: bool = False


@dataclass(frozen=True)
class _Taps:
    """Weights (N, K) float64 of outputs start..start + N: output i sums `count[i]` inputs from `first[i]` on."""

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]


def window(pixels: npt.NDArray[Any], box: Box, rules: Rules) -> npt.NDArray[Any]:
    """The window of the resized picture, (rows, columns, C) in the dtype of `pixels` (H, W, C), which is uint8 or float32.

    Two or four channels are grey or RGB with transparency, premultiplied around the resize as Pillow does.  Raises DecodeError (code
    `aspect-limit`) where even the window alone would take too long.
    """
    if rules.filter == "nearest":
        height, width = pixels.shape[:2]
        rows = _nearest(height, box.height, box.top, box.bottom)
        columns = _nearest(width, box.width, box.left, box.right)
        return np.ascontiguousarray(pixels[rows][:, columns])
    if pixels.dtype == np.uint8 and pixels.shape[2] in (2, 4):
        return _divided(_both_passes(_premultiplied(pixels), box, rules))
    return _both_passes(pixels, box, rules)


@functools.lru_cache(maxsize=4096)
def trim(size_in: int, size_out: int, stop: int, filter: str) -> tuple[int, float] | None:
    """(inputs, scale): what torch has to be given of an axis so that outputs [0, stop) come out as those of the whole axis, bit for bit.

    `scale` is outputs for each input, as torch's kernels take it.  None where that cannot be had: they take the step from output to output as
    1 / scale, which must be the very same float, and the precision of the weights from the largest of those that they compute.
    """
    if not 1 < stop < size_out <= _OUTPUTS or size_in == size_out:  # to one column alone some of torch's kernels write other bytes
        return None
    step, near = size_in / size_out, size_out / size_in
    scale = next((s for s in (near, math.nextafter(near, 0.0), math.nextafter(near, math.inf)) if 1.0 / s == step), None)
    taps = _taps(size_in, size_out, 0, size_out, filter)
    inputs = int(taps.first[stop - 1] + taps.count[stop - 1])
    # With as many outputs as inputs torch would take the axis for one that stays as it is.
    if scale is None or inputs in (stop, size_in) or _bits_of(float(taps.weights.max())) != _bits_of(float(taps.weights[:stop].max())):
        return None
    return inputs, scale


def _premultiplied(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    alpha = pixels[:, :, -1:].astype(np.uint32)
    product = pixels[:, :, :-1] * alpha + 128
    return np.concatenate([(((product >> 8) + product) >> 8).astype(np.uint8), pixels[:, :, -1:]], axis=2)


def _divided(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    alpha = pixels[:, :, -1:].astype(np.uint32)
    colours = pixels[:, :, :-1].astype(np.uint32)
    divided = np.minimum(255 * colours // np.maximum(alpha, 1), 255)
    colours = np.where((alpha == 0) | (alpha == 255), colours, divided)
    return np.concatenate([colours.astype(np.uint8), pixels[:, :, -1:]], axis=2)


def _both_passes(pixels: npt.NDArray[Any], box: Box, rules: Rules) -> npt.NDArray[Any]:
    height, width = pixels.shape[:2]
    rows_first = rules.tall_rows_first and height - box.height > max(0, (width - box.width) * 2)
    vertical = (height, box.height, box.top, box.bottom)
    horizontal = (width, box.width, box.left, box.right)
    if rows_first:
        low, high = _needed(horizontal, rules)
        part = _resize_rows(pixels[:, low:high], vertical, 0, rules)
        return np.ascontiguousarray(_resize_rows(part.swapaxes(0, 1), horizontal, low, rules).swapaxes(0, 1))
    low, high = _needed(vertical, rules)
    part = _resize_rows(pixels[low:high].swapaxes(0, 1), horizontal, 0, rules).swapaxes(0, 1)
    return np.ascontiguousarray(_resize_rows(part, vertical, low, rules))


_Axis = tuple[int, int, int, int]  # size in, size out, first and last + 1 output wanted


def _needed(axis: _Axis, rules: Rules) -> tuple[int, int]:
    """The half-open range of inputs that the wanted outputs of an axis look at."""
    size_in, size_out, start, stop = axis
    if size_in == size_out:
        return start, stop
    ends = [_taps(size_in, size_out, i, i + 1, rules.filter) for i in (start, stop - 1)]
    return int(ends[0].first[0]), int(ends[1].first[0] + ends[1].count[0])


def _resize_rows(source: npt.NDArray[Any], axis: _Axis, offset: int, rules: Rules) -> npt.NDArray[Any]:
    """The wanted rows, from `source` (rows, M, C) whose first row is row `offset` of the picture."""
    size_in, size_out, start, stop = axis
    if size_in == size_out:
        return source[start - offset : stop - offset]
    _, m, c = source.shape
    out = np.empty((stop - start, m, c), source.dtype)
    taps = _taps(size_in, size_out, start, stop, rules.filter)
    if int(taps.count.sum()) * m * c > _MAX_PRODUCTS:
        raise DecodeError(
            f"a side of {size_in} resized to {size_out} across {m} pixels takes more than 2^33 multiplications",
            stage="geometry",
            code="aspect-limit",
        )
    bits = 0
    weights = taps.weights
    if source.dtype == np.uint8:
        bits = _PILLOW_BITS if rules.resampler == "pillow" else _torch_bits(size_in, size_out, rules.filter)
        # Rounded half away from zero, as both do before they truncate.
        weights = np.trunc(np.where(weights < 0, -0.5, 0.5) + weights * float(1 << bits))
    for i in range(stop - start):
        first, count = int(taps.first[i]) - offset, int(taps.count[i])
        step = max(1, _BLOCK // max(1, count * c))
        for at in range(0, m, step):
            block = source[first : first + count, at : at + step]
            out[i, at : at + step] = _sum8(block, weights[i, :count], bits) if bits else _sum_floats(block, weights[i, :count])
    return out


def _sum8(block: npt.NDArray[Any], weights: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.uint8]:
    """A byte for each (M, C).  Products of 8 and 23 bits, a few thousand of them: exact in float64 in any order."""
    total = np.tensordot(weights, block.astype(np.float64), 1)
    return np.clip(np.floor((total + float(1 << (bits - 1))) / float(1 << bits)), 0, 255).astype(np.uint8)


def _sum_floats(block: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Summed in float64 from the first tap to the last: the order is part of the result."""
    total = np.zeros(block.shape[1:], np.float64)
    for row, weight in zip(block, weights, strict=True):
        total += row * weight
    return total


def _taps(size_in: int, size_out: int, start: int, stop: int, filter: str) -> _Taps:
    """The weights of outputs start..stop, in the operations and the order that both libraries use."""
    scale = size_in / size_out
    filter_scale = max(scale, 1.0)
    support = _SUPPORT[filter] * filter_scale
    center = (np.arange(start, stop, dtype=np.float64) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), size_in)
    count = last - first
    taps = np.arange(int(count.max()))
    x = ((taps[None, :] + first[:, None]) - center[:, None] + 0.5) * (1.0 / filter_scale)
    weights = np.where(taps[None, :] < count[:, None], _filter(filter, x), 0.0)
    total = np.zeros(len(weights))
    for j in range(len(taps)):
        total += weights[:, j]
    weights /= np.where(total != 0.0, total, 1.0)[:, None]
    return _Taps(first, count, weights)


def _filter(name: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if name == "box":
        return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)
    if name == "lanczos":
        # The C library's sine, not numpy's, which may differ in the last bit.
        return np.array([_lanczos(v) for v in x.ravel().tolist()]).reshape(x.shape)
    x = np.abs(x)
    if name == "bilinear":
        return np.where(x < 1.0, 1.0 - x, 0.0)
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x != 0.0 else 1.0


def _torch_bits(size_in: int, size_out: int, filter: str) -> int:
    """The precision of torch's int16 weights: the largest weight of the axis, doubled as often as it stays under 2^15."""
    return _bits_of(max(float(_taps(size_in, size_out, a, b, filter).weights.max()) for a, b in _weighty(size_in, size_out)))


def _bits_of(largest: float) -> int:
    bits = 0
    while bits < _TORCH_MAX_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


def _weighty(size_in: int, size_out: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs among which the largest weight of an axis is found.

    Where a picture grows it is at an end, where taps outside are missing (a weight inside is at most 1, the first one at least that).
    """
    if size_out > size_in:
        yield 0, min(8, size_out)
        yield max(0, size_out - 8), size_out
        return
    for at in range(0, size_out, _OUTPUTS):
        yield at, min(at + _OUTPUTS, size_out)


def _nearest(size_in: int, size_out: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """The input of each wanted output: Pillow adds the step to a running float64, so the rounding of every step before counts."""
    step = size_in / size_out
    position = step * 0.5
    found = np.empty(0)
    for at in range(0, stop, _BLOCK):
        steps = np.full(min(_BLOCK, stop - at), step)
        steps[0] = position
        run = np.add.accumulate(steps)
        found = np.concatenate([found, run[max(0, start - at) :]])
        position = float(run[-1]) + step
    return np.minimum(found.astype(np.int64), size_in - 1)
