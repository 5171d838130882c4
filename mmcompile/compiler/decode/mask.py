"""A file to the class ids of its picture's pixels: this module decides how ids are read, and that no id appears which was not there before.

Ids are palette indices or whole numbers, never colours.  A mask is turned as its picture is, resized to the nearest id, cropped and padded with it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcompile.compiler.decode import opening, stored
from mmcompile.compiler.decode.roads import opened
from mmcompile.compiler.decode.stored import Stored
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.resample import Fit, fit
from mmcompile.compiler.views import Shown
from mmcompile.errors import DecodeError

__all__ = ["is_lossy", "mask", "nearest", "picture_mask", "settled", "turns_unseen"]

Ids = npt.NDArray[Any]
#: Floats up to here are exact, and no class id is larger.
_LARGEST = 2**53
#: The largest grey of 2 and 4 bits, by the start of Pillow's raw mode.
_GREYS = {"L;2": 3, "L;4": 15}
#: Pillow's decoders of PGM, whose last argument is the largest grey.
_PGM = ("ppm", "ppm_plain")


def mask(data: bytes, name: str, options: Preprocess, size: tuple[int, int], orientation: int, shown: tuple[Shown, ...] | None = None) -> Ids:
    """The ids (H, W) of a sample, with `shown` (K, H, W), of the dtype that `options` (of kind "mask", resolved) say, C-contiguous.

    `size` (width, height) and `orientation` are those of the picture as stored.  A mask of that size is turned as the picture is, unless it says of
    itself how it stands; one that is as large as the turned picture stands right already.  Raises DecodeError, stage `geometry` for any other size.
    """
    with opening.pillow(options, truncated=options.truncated == "accept") as log:
        image = opened(data, name, options, log)
        if isinstance(image, Stored):
            return _of_stored(image, options, size, orientation, shown)
        white = _white(image)
        with opening.stage("load", f"{image.format} data"):
            own = opening.tiff_orientation(image) if image.format == "TIFF" else 1
            image.load()
        if own == 1 and image.format != "TIFF":
            own, _ = opening.orientation(image, log)
        with opening.stage("convert", f"{image.format} pixels"):
            ids = _ids(image, white)
            if own in opening.TRANSPOSE and image.format != "TIFF" and options.orientation != "ignore":
                ids = _turned(ids, own)
    return settled(ids, options, size, orientation, stands=own != 1, shown=shown)


def picture_mask(image: Image.Image, options: Preprocess, size: tuple[int, int], orientation: int) -> Ids:
    """As `mask`, of a picture that somebody has opened, or loaded: of greys of few bits the file is looked at again, where it is at hand."""
    with opening.pillow(options) as log:
        white = _white(image) if getattr(image, "tile", None) else _white_of_file(image)
        with opening.stage("load", "mask"):
            image.load()
        own, _ = opening.orientation(image, log) if image.format != "TIFF" else (1, False)
        with opening.stage("convert", "mask"):
            ids = _ids(image, white)
            if own in opening.TRANSPOSE and options.orientation != "ignore":
                ids = _turned(ids, own)
    return settled(ids, options, size, orientation, stands=own != 1)


def turns_unseen(options: Preprocess, size: tuple[int, int], orientation: int) -> bool:
    """Is a mask turned by this orientation of a picture of `size` (width, height) as stored, though it has one size before and after?"""
    return options.orientation == "apply" and orientation != 1 and (orientation < 5 or size[0] == size[1])


def _of_stored(image: Stored, options: Preprocess, size: tuple[int, int], orientation: int, shown: tuple[Shown, ...] | None) -> Ids:
    """As `mask`, of a file whose values are taken as stored: an array, or a TIFF beyond Pillow's modes."""
    if image.channels != 1:
        raise DecodeError(
            f"a mask of {image.channels} channels: colours are no class ids; save it as one channel of ids", stage="convert", code="mask-colours"
        )
    ids = _whole(image.load()[:, :, 0])
    own = image.orientation if image.turns else 1
    return settled(stored.turned(ids, own), options, size, orientation, stands=own != 1, shown=shown)


def settled(
    ids: Ids, options: Preprocess, size: tuple[int, int], orientation: int, *, stands: bool = False, shown: tuple[Shown, ...] | None = None
) -> Ids:
    """Ids (H, W) of a picture as those of its sample; `stands`: they are turned already; `shown`: what of it views show."""
    orientation = orientation if options.orientation != "ignore" else 1
    standing = size[::-1] if orientation >= 5 else size
    found = ids.shape[::-1]
    if found == size and not (stands or options.orientation == "own") and orientation in opening.TRANSPOSE:
        ids = _turned(ids, orientation)
    elif found != standing:
        words = [f"{w}x{h}" for w, h in (found, size, standing)]
        stands_as = f", which stands as {words[2]}" if standing != size else ""
        raise DecodeError(
            f"a mask of {words[0]} (width x height) for a picture of {words[1]}{stands_as}: they must be of one size",
            stage="geometry",
            code="mask-size",
        )
    if options.keep_size is not None and ids.shape != options.keep_size:
        kept = f"{options.keep_size[1]}x{options.keep_size[0]}"
        raise DecodeError(
            f"{ids.shape[1]}x{ids.shape[0]} (width x height) among sources of {kept}, whose size is kept: give --resize and --crop",
            stage="geometry",
            code="size",
        )
    if shown is not None:
        return _stored(np.stack([_view(ids, part, options.output_hw()) for part in shown]), options)
    return _stored(_placed(ids, fit(ids.shape[0], ids.shape[1], options), options.fill), options)


def _view(ids: Ids, shown: Shown, size: tuple[int, int]) -> Ids:
    down, across = shown.top + nearest(shown.height, size[0]), shown.left + nearest(shown.width, size[1])
    part = ids[down[:, None], across[None]]
    return part[:, ::-1] if shown.flip else part


def nearest(size: int, made: int) -> npt.NDArray[np.int64]:
    """Which of `size` pixels along an axis each of `made` takes: Pillow's choice, whose steps add up in float64."""
    step = size / made
    at: npt.NDArray[np.int64] = np.cumsum(np.concatenate([[step * 0.5], np.full(made - 1, step)])).astype(np.int64)
    return np.minimum(at, size - 1)


def _placed(ids: Ids, fitted: Fit, fill: int) -> Ids:
    top, left, bottom, right = fitted.window()
    down, across = (nearest(n, made) for n, made in zip(ids.shape, fitted.size, strict=True))
    part = ids[down[top:bottom, None], across[None, left:right]]
    if part.shape == fitted.out:
        return part
    out = np.full(fitted.out, fill, np.result_type(part.dtype, np.min_scalar_type(fill)))
    row, column = max(-fitted.top, 0), max(-fitted.left, 0)
    out[row : row + part.shape[0], column : column + part.shape[1]] = part
    return out


def _stored(ids: Ids, options: Preprocess) -> Ids:
    target = options.stored_dtype()
    limits = np.iinfo(target)
    low, high = int(ids.min()), int(ids.max())
    if low < limits.min or high > limits.max:
        found = low if low < limits.min else high
        raise DecodeError(
            f"a pixel of the mask is {found}, and dtype={options.dtype} holds {limits.min} to {limits.max}: give the mask a wider dtype",
            stage="cast",
            code="value-range",
        )
    return np.ascontiguousarray(ids, target)


def is_lossy(data: bytes) -> bool:
    """Are these the bytes of a file that does not keep the ids that it was made of: JPEG, or lossy WebP?"""
    return data.startswith(b"\xff\xd8\xff") or (data.startswith(b"RIFF") and data[8:16] == b"WEBPVP8 ")


def _white(image: Image.Image) -> int | None:
    """The largest value that pixels may have in the file of an image that is not loaded, where loading makes another one of it: 255, or 65535 of
    mode I.  None where values stay as they are."""
    tiles: Any = getattr(image, "tile", None) or [("", None, None, None)]
    codec, args = tiles[0][0], tiles[0][3]
    if codec in _PGM:
        return int(args[-1])
    return _GREYS.get(str(args[0] if isinstance(args, tuple) and args else args)[:3])


def _white_of_file(image: Image.Image) -> int | None:
    """As `_white`, of an image that is loaded."""
    if image.mode not in ("L", "I", "RGB"):
        return None
    for name in ("_fp", "filename"):
        with contextlib.suppress(OSError, ValueError, SyntaxError, AttributeError), Image.open(getattr(image, name)) as again:
            return _white(again) if (again.format, again.mode, again.size) == (image.format, image.mode, image.size) else None
    return None


def _ids(image: Image.Image, white: int | None) -> Ids:
    """Whole numbers (H, W) of an image as they stand in its file: its palette indices, or its values, of which loading brought `white` to the top."""
    ids = _loaded(image)
    if white is None:
        return ids
    top = 65535 if image.mode == "I" else 255
    return (ids.astype(np.int64) * white + top // 2) // top


def _loaded(image: Image.Image) -> Ids:
    if image.mode in ("P", "L", "1"):
        return np.asarray(image if image.mode != "1" else image.convert("L").point(lambda v: v and 1))
    if image.mode == "PA":
        return np.asarray(image)[:, :, 0]
    if image.mode == "I" or image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.int64)
    if image.mode == "F":
        return _whole(np.asarray(image))
    bands = np.asarray(image) if image.mode in ("RGB", "RGBA", "LA") else None
    if bands is not None:
        colours = bands[:, :, : 3 if image.mode != "LA" else 1]
        if (colours == colours[:, :, :1]).all() and (image.mode == "RGB" or (bands[:, :, -1] == 255).all()):
            return colours[:, :, 0]
    raise DecodeError(
        f"a mask of mode {image.mode}: colours are no class ids; save it with a palette, or as one channel of ids",
        stage="convert",
        code="mask-colours",
    )


def _whole(values: Ids) -> Ids:
    if values.dtype.kind != "f":
        return values
    if not np.isfinite(values).all() or (values != np.rint(values)).any() or np.abs(values).max() > _LARGEST:
        raise DecodeError("a mask of floats that are no whole numbers: ids of classes are whole", stage="convert", code="mask-colours")
    return values.astype(np.int64)


def _turned(ids: Ids, orientation: int) -> Ids:
    """As Pillow's transpose for this orientation."""
    if orientation >= 5:
        ids = ids.T
    # Of what is exchanged already: which side is counted from the other end?
    if orientation in (2, 3, 6, 7):
        ids = ids[:, ::-1]
    if orientation in (3, 4, 7, 8):
        ids = ids[::-1]
    return ids
