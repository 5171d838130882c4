"""Sizes: this module decides where a picture lands in a sample, and is the only home of torch in a build.

`fit` is torchvision's rounding for resize, crop and padding.  `resize` is the antialiased uint8 kernel of torch on channels-last memory:
equal bit for bit to torchvision v2's Resize(antialias=True) on a uint8 tensor, on every x86 instruction set.  `sample` puts them together,
and never makes a resized picture that is far larger than what the sample shows of it: `kernel` computes the same bytes of that part alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import kernel
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["GIANT_PIXELS", "Fit", "Maker", "Window", "fit", "initialise", "is_giant", "place", "resize", "sample", "versions"]

#: A resized picture larger than this (48 MiB of RGB), and much larger than what is kept of it, is never made whole.
GIANT_PIXELS = 1 << 24
#: How many times more than the sample shows.
_GIANT_RATIO = 4


_Pixels = npt.NDArray[Any]
#: (top, left, bottom, right), half-open.
Window = tuple[int, int, int, int]


@dataclass(frozen=True)
class Fit:
    """Where a picture lands: resized to `size`, and shown by the sample `out` from (`top`, `left`) on; negative offsets are padding."""

    size: tuple[int, int]
    top: int
    left: int
    out: tuple[int, int]

    def window(self) -> Window:
        """The part of the resized picture that the sample shows."""
        (rows, columns), (height, width) = self.size, self.out
        return max(self.top, 0), max(self.left, 0), min(self.top + height, rows), min(self.left + width, columns)


def fit(height: int, width: int, preprocess: Preprocess) -> Fit:
    """Where a picture of this size (after orientation) lands in a sample."""
    out = preprocess.output_hw()
    size = (height, width)
    if preprocess.pad is not None:
        side, long = out[0], max(height, width)
        size = (max(1, side * height // long), max(1, side * width // long))
    elif isinstance(preprocess.resize, tuple):
        size = preprocess.resize
    elif preprocess.resize is not None:
        size = _short_side(height, width, preprocess.resize)
    return Fit(size, _offset(size[0], out[0]), _offset(size[1], out[1]), out)


def _short_side(height: int, width: int, short: int) -> tuple[int, int]:
    # torchvision's expression: a float division, truncated.
    if width <= height:
        return int(short * height / width), short
    return short, int(short * width / height)


def _offset(size: int, out: int) -> int:
    """torchvision's CenterCrop: half to even where the picture is larger, the smaller half of the padding in front where it is not."""
    return round((size - out) / 2.0) if size >= out else -((out - size) // 2)


def is_giant(height: int, width: int, fitted: Fit) -> bool:
    """True where resizing the whole picture would make far more pixels than the sample shows, in the end or between the two passes."""
    rows, columns = fitted.size
    between = columns * height if columns > width else 0
    largest = max(rows * columns, between)
    return largest > GIANT_PIXELS and largest > _GIANT_RATIO * fitted.out[0] * fitted.out[1]


@dataclass(frozen=True)
class Maker:
    """A decoded picture that is converted only as far as a sample needs: all of it as an array, or a window of it after Pillow's resize.

    `array(padded)` gives (H, W, C) uint8 or float32, where padded allows one more channel, without meaning; `by_pillow(size, window)`
    the window of the picture resized to (height, width), the same dtype or any if nothing is resized.  `rows_first`: this Pillow takes
    rows first for tall pictures.
    """

    array: Callable[[bool], _Pixels]
    by_pillow: Callable[[tuple[int, int], Window], _Pixels]
    rows_first: bool


def sample(height: int, width: int, options: Preprocess, maker: Maker) -> _Pixels:
    """The pixels (H, W, C) of a sample, for resolved options and a picture of this size.

    Raises DecodeError: code `size` for a stray among sources whose size is kept, `aspect-limit` for a picture too extreme to compute.
    """
    if options.keep_size is not None and (height, width) != options.keep_size:
        kept = f"{options.keep_size[1]}x{options.keep_size[0]}"
        raise DecodeError(
            f"{width}x{height} (width x height) among sources of {kept}, whose size is kept: give --resize and --crop",
            stage="geometry",
            code="size",
        )
    fitted = fit(height, width, options)
    window = fitted.window()
    top, left, bottom, right = window
    by_torch = options.resampler == "torch"
    if fitted.size == (height, width):
        part = maker.by_pillow(fitted.size, window)
    elif is_giant(height, width, fitted):
        rules = kernel.Rules("torch", options.filter) if by_torch else kernel.Rules("pillow", options.filter, maker.rows_first)
        part = kernel.window(maker.array(False), kernel.Box(*fitted.size, *window), rules)
    elif by_torch:
        part = resize(maker.array(True), fitted.size, options.filter, (bottom, right))[top:, left:, : options.channels]
    else:
        part = maker.by_pillow(fitted.size, window)
    return place(part, fitted)


def place(part: npt.NDArray[Any], fitted: Fit) -> npt.NDArray[Any]:
    """The sample (H, W, C) with `part`, the window of the fit, in its place and 0 around it; `part` itself where it fills the sample."""
    if part.shape[:2] == fitted.out:
        return part
    sample = np.zeros((*fitted.out, part.shape[2]), part.dtype)
    top, left = max(-fitted.top, 0), max(-fitted.left, 0)
    sample[top : top + part.shape[0], left : left + part.shape[1]] = part
    return sample


@functools.cache
def _torch() -> Any:
    import torch

    with warnings.catch_warnings():
        # torch says once per process that an array is read-only; nothing here writes to one, so let it say so now.
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", np.uint8))
    return torch


def initialise() -> None:
    """For a worker process: load torch now, with one thread, so that workers do not share cores."""
    _torch().set_num_threads(1)


def resize(pixels: npt.NDArray[np.uint8], size: tuple[int, int], filter: str, shown: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Pixels (H, W, C) uint8 resized to (height, width) by torch's antialiased `bilinear` or `bicubic`; a view of fresh memory.

    Of the result only the first `shown` rows and columns, which cost less than all of them.
    """
    torch = _torch()
    (height, width, channels), (rows, columns) = pixels.shape, shown or size
    down, across = kernel.trim(height, size[0], rows, filter), kernel.trim(width, size[1], columns, filter)
    # Whole columns, as torch would copy a part of them first; unless it took the axis for one that stays as it is.
    part = pixels[: down[0] if down else height, : across[0] if across and width == columns else width]
    made = np.empty((rows if down else size[0], columns if across else size[1], channels), np.uint8)
    batch, out = (torch.from_numpy(array.transpose(2, 0, 1)[None]) for array in (part, made))
    # Without an `out` that has its pixels together torch takes them apart, one byte at a time.
    _kernels(filter)(batch, made.shape[:2], False, down[1] if down else None, across[1] if across else None, out=out)
    return made[:rows, :columns]


@functools.cache
def _kernels(filter: str) -> Any:
    """What torch.nn.functional.interpolate calls; it alone takes sizes and scales both, which trimming needs."""
    aten = _torch().ops.aten
    return {"bilinear": aten._upsample_bilinear2d_aa, "bicubic": aten._upsample_bicubic2d_aa}[filter].out


def versions() -> dict[str, str]:
    """The versions that the torch resampler's bytes depend on, without what was built into them (`2.13.0+cpu` is `2.13.0`)."""
    return {"torch": _torch_version()}


@functools.cache
def _torch_version() -> str:
    from importlib.metadata import version  # not torch itself, which takes seconds to load

    return version("torch").split("+")[0]
