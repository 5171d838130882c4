"""Hides how pixels become a PNG file: written by hand, so that a report needs no library of pictures.

Lossless.  The same pixels give the same bytes wherever zlib is the same.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SOFTWARE", "as_uri", "encode"]

Pixels = npt.NDArray[np.uint8]

#: What a file of ours says of who wrote it, in a chunk that comes before the pixels.
SOFTWARE = b"Software\0mmcompile report"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Colour types of PNG by channels: grey, RGB, RGBA.
_COLOURS = {1: 0, 3: 2, 4: 6}


def encode(pixels: Pixels) -> bytes:
    """A PNG file of pixels (H, W) or (H, W, C) uint8, C of 1, 3 or 4."""
    image = np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])
    height, width, channels = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    lines = _filtered(image.reshape(height, width * channels), channels)
    return _SIGNATURE + b"".join(
        _chunk(kind, data) for kind, data in ((b"IHDR", head), (b"tEXt", SOFTWARE), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    )


def as_uri(pixels: Pixels) -> str:
    """The same as a data: URI, for a page that is one file."""
    return "data:image/png;base64," + base64.b64encode(encode(pixels)).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _filtered(lines: npt.NDArray[Any], step: int) -> Pixels:
    """Each line (H, bytes) behind the number of its filter: the one whose bytes, as signed ones, have the least sum."""
    now = lines.astype(np.int16)
    left, up, corner = np.zeros_like(now), np.zeros_like(now), np.zeros_like(now)
    left[:, step:], up[1:], corner[1:, step:] = now[:, :-step], now[:-1], now[:-1, :-step]
    toward = left + up - corner
    far = [np.abs(toward - near) for near in (left, up, corner)]
    paeth = np.where((far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], up, corner))
    tried = np.stack([(now - guess).astype(np.uint8) for guess in (np.zeros_like(now), left, up, (left + up) >> 1, paeth)])
    best = np.abs(tried.view(np.int8).astype(np.int16)).sum(2, dtype=np.int64).argmin(0)
    out = np.empty((len(lines), lines.shape[1] + 1), np.uint8)
    out[:, 0] = best
    out[:, 1:] = tried[best, np.arange(len(lines))]
    return out
