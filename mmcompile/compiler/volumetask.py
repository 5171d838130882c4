"""Hides how a volume goes through what is made for pictures: decoded from one file or all of a series, summed and stored as a tall picture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.preprocess import Preprocess, channel_sums, store
from mmcompile.compiler.sources.parts import files_of
from mmcompile.compiler.views import Shown
from mmcompile.format.canonical import as_text

__all__ = ["decoded", "store_volume", "sums_of_volume"]

Array = npt.NDArray[Any]


def decoded(
    data: bytes,
    key: bytes,
    preprocess: Preprocess,
    on_open: Callable[[int, int], None] | None = None,
    shown: tuple[Shown, ...] | None = None,
) -> decode.Decoded:
    """What a picture (of which views show what is `shown`) or a volume holds, as `preprocess` wants it.  Raises DecodeError and MemoryError."""
    if preprocess.kind != "volume":
        return decode.decode(data, as_text(key), preprocess, on_open=on_open, shown=shown)
    size = preprocess.volume_size()
    given = {"crop": preprocess.crop, "pad": preprocess.pad, "keep": preprocess.keep_size}
    geometry = decode.VolumeGeometry(
        **{name: size for name, value in given.items() if value is not None}, channels=preprocess.kept_channels, fill=preprocess.fill
    )
    return decode.volume(files_of(data, key), as_text(key), _read_as(preprocess), geometry, on_open=on_open)


@functools.lru_cache(maxsize=16)
def _read_as(preprocess: Preprocess) -> Preprocess:
    """Values that are kept as whole numbers are read as whatever they are: which of them fit is seen when they are stored."""
    squeezed = preprocess.range is not None or preprocess.depth16 in ("clip", "scale")
    if squeezed or preprocess.scale != "none" or preprocess.stored_dtype().kind not in "iu" or preprocess.dtype == "bfloat16":
        return preprocess
    return replace(preprocess, dtype="float64", depth16="keep", normalize=None)


def store_volume(pixels: Array, preprocess: Preprocess, depth: int, out: Array) -> None:
    """As `store`, of a volume (D, H, W) or (C, D, H, W); floats that are whole numbers are taken as such where the dtype wants these.

    Raises DecodeError for a value that the dtype cannot hold.
    """
    tall = _tall(pixels)
    if pixels.dtype.kind == "f" and out.dtype.kind in "iu" and preprocess.dtype != "bfloat16" and (tall == np.rint(tall)).all():
        tall = tall.astype(np.int64)
    store(tall, preprocess, depth, out.reshape(tall.shape[2], *tall.shape[:2]))


def sums_of_volume(pixels: Array) -> tuple[Array, Array]:
    """As `channel_sums`."""
    return channel_sums(_tall(pixels))


def _tall(pixels: Array) -> Array:
    """The planes of a volume under each other: (D * H, W, C)."""
    whole = pixels if pixels.ndim == 4 else pixels[None]
    return np.moveaxis(whole, 0, -1).reshape(-1, whole.shape[3], whole.shape[0])
