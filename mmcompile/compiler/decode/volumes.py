"""Volumes: this module decides which bytes are one, and how its planes are cropped and padded.  Nothing of it is resampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import depth as depths
from mmcompile.compiler.decode import dicom, nifti, npy, opening, tiff
from mmcompile.compiler.decode.stack import Stack, check_frames
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["LOGGERS", "VolumeGeometry", "opened", "sample"]

#: What the libraries that read volumes write to.
LOGGERS = ("pydicom", "nibabel.global")

_Pixels = npt.NDArray[Any]
_Size = tuple[int, int, int]


@dataclass(frozen=True)
class VolumeGeometry:
    """Where a volume lands in a sample, each size (D, H, W).

    `crop`: the centre of that size, with `fill` around a volume that is smaller.  `pad`: that size, with `fill` around it; a larger volume is a
    reject.  `keep`: a volume of another size is a reject.  `channels`: so many are expected, 0: no such axis; None: any.
    """

    crop: _Size | None = None
    pad: _Size | None = None
    keep: _Size | None = None
    channels: int | None = None
    fill: float = 0


def opened(parts: Sequence[bytes], options: Preprocess) -> Stack:
    """The volume that one file is, or (DICOM) several.  Raises DecodeError."""
    if not parts or not all(parts):
        raise DecodeError("the file is empty", stage="open", code="not-an-image")
    first = parts[0]
    if dicom.is_dicom(first):
        return dicom.stack(parts, options)
    if len(parts) > 1:
        raise DecodeError(f"{len(parts)} files, the first of which is no DICOM: only such series are one volume", stage="open", code="not-an-image")
    if first.startswith(npy.SIGNATURE):
        return _npy(first, options)
    if tiff.is_tiff(first):
        return _tiff(first, options)
    if nifti.is_nifti(first):
        return nifti.stack(first, options)
    raise DecodeError("no volume of a format that is read: .npy, TIFF, NIfTI or DICOM", stage="open", code="not-an-image")


def _npy(data: bytes, options: Preprocess) -> Stack:
    array = npy.read(data)
    if array.ndim == 2:
        array = array[None]
    several = array.ndim == 4
    if several and npy.channels_first(array.shape, options):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (3, 4):
        raise DecodeError(f"a .npy array of shape {array.shape}, expected two to four axes", stage="open", code="unsupported")
    depth, height, width = array.shape[:3]
    channels = array.shape[3] if several else 0
    check_frames((depth, height, width), channels, array.itemsize, options)
    numbers = array.view(np.uint8) if array.dtype.kind == "b" else array
    return Stack("NPY", (depth, height, width), channels, numbers.dtype.newbyteorder("="), lambda start, stop: numbers[start:stop])


def _tiff(data: bytes, options: Preprocess) -> Stack:
    with opening.stage("open", "TIFF header"):
        pages: list[tiff.Page] = []
        for page in tiff.pages(data):
            of_first = pages[0] if pages else page
            if (page.width, page.height, page.channels, page.dtype) != (of_first.width, of_first.height, of_first.channels, of_first.dtype):
                raise DecodeError(
                    f"page {len(pages) + 1} is {_said(page)}, the first {_said(of_first)}: the pages of a volume are alike", stage="open", code="size"
                )
            pages.append(page)
        if not pages:
            raise DecodeError("a TIFF without a page", stage="open", code="not-an-image")
    first = pages[0]
    shape, channels = (len(pages), first.height, first.width), first.channels if first.channels > 1 else 0
    check_frames(shape, channels, first.dtype.itemsize, options)

    def planes(start: int, stop: int) -> _Pixels:
        with opening.stage("load", "TIFF data", accepts=False):
            made = np.stack([tiff.pixels(data, page) for page in pages[start:stop]])
        return made if channels else made[:, :, :, 0]

    return Stack("TIFF", shape, channels, first.dtype.newbyteorder("="), planes)


def _said(page: tiff.Page) -> str:
    return f"{page.width}x{page.height} of {page.channels} {page.dtype.name}"


def sample(stack: Stack, geometry: VolumeGeometry, options: Preprocess) -> tuple[_Pixels, int]:
    """(pixels (D, H, W) or (C, D, H, W), depth) of the sample; only the planes that it shows are decoded.  Raises DecodeError."""
    out = _size_of(stack, geometry)
    cuts = [_cut(n, m) for n, m in zip(stack.shape, out, strict=True)]
    (first, last), *plane = [(start, stop) for start, stop, _ in cuts]
    shown = stack.planes(first, last)[:, slice(*plane[0]), slice(*plane[1])]
    pixels, depth = depths.from_any(shown, options)
    if pixels.shape[:3] != out:
        made = np.full((*out, *pixels.shape[3:]), _filled(geometry.fill, pixels.dtype), pixels.dtype)
        made[tuple(slice(at, at + n) for (_, _, at), n in zip(cuts, pixels.shape[:3], strict=True))] = pixels
        pixels = made
    return (np.moveaxis(pixels, -1, 0) if stack.channels else pixels), depth


def _size_of(stack: Stack, geometry: VolumeGeometry) -> _Size:
    found = "x".join(map(str, stack.shape))
    if geometry.channels is not None and stack.channels != geometry.channels:
        raise DecodeError(
            f"{stack.channels} channels, and the other volumes have {geometry.channels} (0: no axis of channels): all must have the same",
            stage="geometry",
            code="mode",
        )
    if geometry.keep is not None and stack.shape != geometry.keep:
        kept = "x".join(map(str, geometry.keep))
        raise DecodeError(
            f"{found} (depth x height x width) among volumes of {kept}, whose size is kept: give --crop or --pad", stage="geometry", code="size"
        )
    if geometry.pad is not None and any(n > m for n, m in zip(stack.shape, geometry.pad, strict=True)):
        wanted = "x".join(map(str, geometry.pad))
        raise DecodeError(f"{found} (depth x height x width) is more than --pad {wanted}: --crop cuts it", stage="geometry", code="size")
    return geometry.crop or geometry.pad or geometry.keep or stack.shape


def _cut(size: int, out: int) -> tuple[int, int, int]:
    """(first, last, where it lies in the sample) along an axis; rounded as those of pictures are."""
    start = round((size - out) / 2.0) if size >= out else 0
    return start, min(start + out, size), (out - size) // 2 if size < out else 0


def _filled(fill: float, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return fill
    limits = np.iinfo(dtype)
    if fill != int(fill) or not limits.min <= fill <= limits.max:
        raise DecodeError(f"fill {fill:g} is no value of {dtype.name} pixels", stage="geometry", code="value-range")
    return int(fill)
