"""Hides how the outlines of objects, as COCO writes them, become the pixels of a mask: polygons and run lengths, filled as pycocotools fills them.

A mask is made where it is read: what it is made of stands behind its name (and a NUL) in its key.  It comes as a PGM file: 0 where nothing is, else
1 more than the number of the category, of what stands last in the file; a crowd is 255, and only where nothing else is.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources.numbers import Misfit, shown

__all__ = ["CROWD", "check_outline", "is_drawn", "mask_bytes", "mask_key", "mask_stat", "may_be_drawn", "outline"]

Array = npt.NDArray[Any]
#: What a crowd is in a mask.
CROWD = 255
#: pycocotools walks along edges in fifths of a pixel.
_FINE = 5
#: More pixels than any picture that is taken has.
_MOST = 1 << 28
#: Points of edges that are held at one time: outlines that lead far away from their picture take time, not memory.
_CHUNK = 1 << 20


def is_drawn(key: bytes) -> bool:
    """Is this the key of a mask that is made, of no file?"""
    return b"\0" in key


def mask_key(name: bytes, width: int, height: int, most: int, outlines: Sequence[tuple[int, bool, Any]]) -> bytes:
    """The key of a mask of these outlines, (category, is it a crowd, segmentation) each, in order; ids go up to `most`."""
    told = [width, height, most, [[kind, int(crowd), shape] for kind, crowd, shape in outlines]]
    return name + b"\0" + zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 1)


def _told(key: bytes) -> tuple[int, int, int, list[Any]]:
    width, height, most, outlines = json.loads(zlib.decompress(key.partition(b"\0")[2]))
    return width, height, most, outlines


def _head(width: int, height: int, most: int) -> bytes:
    return b"P5 %d %d %d\n" % (width, height, 255 if most <= 255 else 65535)


def mask_stat(key: bytes) -> tuple[int, int, int, int]:
    """(size, 0, 0, a number made of what it is made of) of such a mask."""
    width, height, most, _ = _told(key)
    return len(_head(width, height, most)) + width * height * (1 if most <= 255 else 2), 0, 0, xxhash.xxh3_64_intdigest(key) >> 1


def mask_bytes(key: bytes) -> bytes:
    """The file that such a mask would be."""
    width, height, most, outlines = _told(key)
    ids: Array = np.zeros(width * height, np.uint8 if most <= 255 else np.dtype(">u2"))
    for crowds in (True, False):
        for kind, crowd, shape in outlines:
            for start, inside in _spans(shape, width, height) if bool(crowd) == crowds else ():
                ids[start : start + len(inside)][inside] = CROWD if crowd else kind + 1
    return _head(width, height, most) + ids.reshape(width, height).T.tobytes()


def outline(shape: Any, width: int, height: int) -> npt.NDArray[np.bool_]:
    """The pixels (H, W) of a segmentation: polygons, or run lengths.  Raises Misfit for what is neither, or of another size."""
    out = np.zeros(width * height, bool)
    for start, inside in _spans(shape, width, height):
        out[start : start + len(inside)] |= inside
    return out.reshape(width, height).T


def may_be_drawn(width: int, height: int) -> bool:
    """Is this a size of pictures whose outlines are drawn?"""
    return 0 < width * height <= _MOST


def check_outline(shape: Any, width: int, height: int) -> None:
    """Raises Misfit where `outline` would."""
    if not may_be_drawn(width, height):
        raise Misfit(f"a picture of {width}x{height} (width x height)")
    if isinstance(shape, dict):
        _runs(shape, width, height)
    else:
        _polygons(shape)


def _spans(shape: Any, width: int, height: int) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Stretches of pixels, column by column: where each begins, and which of it are inside (M,).  Raises Misfit."""
    check_outline(shape, width, height)
    if isinstance(shape, dict):
        runs = _runs(shape, width, height)
        yield 0, np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return
    for polygon in _polygons(shape):
        edges = _edges(polygon, width, height)
        if len(edges):
            yield int(edges[0]), np.repeat(np.arange(len(edges) - 1) % 2 == 0, np.diff(edges))


def _polygons(shape: Any) -> list[Array]:
    if not isinstance(shape, list) or not shape:
        raise Misfit(f"{shown(shape)} is no list of polygons, and no run lengths")
    out = []
    for each in shape:
        sound = isinstance(each, list) and len(each) >= 4 and all(type(v) in (int, float) and math.isfinite(v) and abs(v) < 1e6 for v in each)
        if not sound or len(each) % 2:
            raise Misfit(f"{shown(each)} is no polygon: x and y of each point")
        out.append(np.array(each, np.float64).reshape(-1, 2))
    return out


def _runs(shape: dict[str, Any], width: int, height: int) -> npt.NDArray[np.int64]:
    """Lengths of runs down the columns, outside first, that add up to all pixels.  Raises Misfit."""
    counts, size = shape.get("counts"), shape.get("size")
    if size != [height, width]:
        raise Misfit(f"run lengths of size {shown(size)} for a picture of {[height, width]} (height, width)")
    if isinstance(counts, str):
        counts = _uncompressed(counts)
    if not isinstance(counts, list) or not all(type(n) is int and 0 <= n <= _MOST for n in counts) or sum(counts) != width * height:
        raise Misfit(f"{shown(counts)}: expected run lengths that add up to {width * height}")
    return np.array(counts, np.int64)


def _uncompressed(text: str) -> list[int]:
    """Run lengths that are written 5 bits a character from "0" on, lowest first, each from the third on less that two before it."""
    out: list[int] = []
    number = shift = 0
    for char in text.encode("ascii", "replace"):
        bits = char - 48
        if not 0 <= bits < 64 or shift > 60:
            raise Misfit(f"{shown(text)}: no compressed run lengths")
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        out.append(number + out[-2] if len(out) > 2 else number)
        number = shift = 0
    if shift:
        raise Misfit(f"{shown(text)}: compressed run lengths that end early")
    return out


def _edges(polygon: Array, width: int, height: int) -> npt.NDArray[np.int64]:
    """Where, column by column, the inside of a polygon (P, 2) begins and ends, by turns: ascending (E,), E even."""
    at = np.trunc(_FINE * polygon + 0.5).astype(np.int64)
    edges = np.sort(np.concatenate([_crossings(*points, width, height) for points in _along(at, np.roll(at, -1, axis=0))]))
    return np.append(edges, width * height) if len(edges) % 2 else edges


def _crossings(columns: Array, rows: Array, width: int, height: int) -> npt.NDArray[np.int64]:
    """The places in the picture at which a walk over these points (M,), (M,) begins or ends an inside: where it goes from one fine column to the
    next, within the middle of a pixel's five."""
    steps = np.flatnonzero(columns[1:] != columns[:-1]) + 1
    column = np.where(columns[steps] < columns[steps - 1], columns[steps], columns[steps] - 1)
    x = (column + 0.5) / _FINE - 0.5
    y = np.ceil(np.clip((np.minimum(rows[steps], rows[steps - 1]) + 0.5) / _FINE - 0.5, 0, height))
    kept = (np.floor(x) == x) & (x >= 0) & (x <= width - 1)
    places: npt.NDArray[np.int64] = x[kept].astype(np.int64) * height + y[kept].astype(np.int64)
    return places


def _along(starts: Array, ends: Array) -> Iterator[tuple[Array, Array]]:
    """The points (M,), (M,) on all edges (P, 2) -> (P, 2), in order, each end included, piece by piece; each begins with the last one before."""
    across, down = np.abs(ends - starts).T
    steep = across < down
    length = np.maximum(across, down)
    back = np.where(steep, starts[:, 1] > ends[:, 1], starts[:, 0] > ends[:, 0])
    first, last = np.where(back[:, None], ends, starts), np.where(back[:, None], starts, ends)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = np.where(steep, (last - first)[:, 0] / down, (last - first)[:, 1] / across)
    slope = np.where(length == 0, 0.0, slope)
    stops = np.cumsum(length + 1)
    for begin in range(0, int(stops[-1]), _CHUNK):
        place = np.arange(max(begin - 1, 0), min(begin + _CHUNK, int(stops[-1])))
        of = np.searchsorted(stops, place, side="right")
        step = place - (stops[of] - length[of] - 1)
        step = np.where(back[of], length[of] - step, step)
        major = np.where(steep, first[:, 1], first[:, 0])[of] + step
        minor = np.trunc(np.where(steep, first[:, 0], first[:, 1])[of] + slope[of] * step + 0.5).astype(np.int64)
        yield np.where(steep[of], minor, major), np.where(steep[of], major, minor)
