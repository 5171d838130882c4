"""What every reader of volumes gives: the shape from headers, and the planes of it that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.decode import opening
from mmcompile.compiler.decode.stored import check_bytes
from mmcompile.compiler.modes import MAX_CHANNELS
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["Stack", "check_frames"]


@dataclass(frozen=True)
class Stack:
    """A volume of which headers are read: `shape` (D, H, W), `channels` (0: no such axis), and what is in it.

    `planes(start, stop)` gives (stop - start, H, W), or (stop - start, H, W, C), of `dtype` in any byte order, or raises DecodeError.
    """

    format: str
    shape: tuple[int, int, int]
    channels: int
    dtype: np.dtype[Any]
    planes: Callable[[int, int], npt.NDArray[Any]]
    codes: frozenset[str] = frozenset()


def check_frames(shape: tuple[int, int, int], channels: int, itemsize: int, options: Preprocess) -> None:
    """Raise DecodeError for a volume (D, H, W) beyond the limits of a picture in one of its planes, or of a file in all of them."""
    depth, height, width = shape
    opening.check_size((width, height), options, "open")
    check_bytes(depth * height * width * max(channels, 1), itemsize, options)
    if channels > MAX_CHANNELS:
        raise DecodeError(f"{channels} channels, and a sample has at most {MAX_CHANNELS}", stage="open", code="mode")
