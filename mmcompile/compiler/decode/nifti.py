"""NIfTI files: hides how nibabel's knowledge of their headers is used; the values are viewed here, in bounded memory.

Volumes come as (D, H, W): the z, y and x of the array (x, y, z) that the file holds.  Where its orientation is known and applied, x, y and z are
first made to run to the right, to the front and to the top (RAS, the closest such order of axes: nothing is resampled).
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.decode import opening
from mmcompile.compiler.decode.scaling import scaled, scaled_dtype
from mmcompile.compiler.decode.stack import Stack, check_frames
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["is_nifti", "stack"]

#: Sizes of the two headers, which are their first four bytes, and where each says what it is.
_SIZES, _MAGIC_AT = {348: 1, 540: 2}, {1: 344, 2: 4}
#: A single file has its values behind the header and four bytes, and what else may lie between them is never so long.
_LEAST_OFFSET, _MOST_OFFSET = {1: 352, 2: 544}, 1 << 26
_GZIP = b"\x1f\x8b"


def is_nifti(data: bytes) -> bool:
    try:
        return _version(_first(data, 540)) is not None
    except DecodeError:
        return False


def _first(data: bytes, count: int) -> bytes:
    """The first bytes, unpacked where they are packed.  Raises DecodeError."""
    if not data.startswith(_GZIP):
        return data[:count]
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(count)
    except (EOFError, OSError, zlib.error) as error:
        code = "truncated" if isinstance(error, EOFError) else "corrupt"
        raise DecodeError("the compressed data of the NIfTI file cannot be unpacked", stage="load", code=code, error=type(error).__name__) from error


def _version(head: bytes) -> tuple[int, bytes] | None:
    """(1 or 2, its magic word) of a header."""
    version = next((_SIZES[n] for order in ("little", "big") if (n := int.from_bytes(head[:4], order)) in _SIZES), None)
    if version is None:
        return None
    magic = head[_MAGIC_AT[version] :][:3]
    return (version, magic) if magic in (b"n+1", b"n+2", b"ni1", b"ni2") else None


def stack(data: bytes, options: Preprocess) -> Stack:
    """The volume (or, with a fourth or fifth axis, the channels of one) that a file holds.  Raises DecodeError."""
    nibabel = opening.extra("nibabel", "medical", "NIfTI")
    head = _first(data, 540)
    found = _version(head)
    assert found is not None
    version, magic = found
    if magic.startswith(b"ni"):
        raise DecodeError("a NIfTI header whose values lie in a second file: save both as one .nii", stage="open", code="unsupported")
    with opening.stage("open", "NIfTI header"):
        kind = nibabel.Nifti1Header if version == 1 else nibabel.Nifti2Header
        header = kind.from_fileobj(io.BytesIO(head), check=False)
        shape = tuple(int(n) for n in header.get_data_shape())
        dtype, offset = np.dtype(header.get_data_dtype()), max(int(header.get_data_offset()), _LEAST_OFFSET[version])
        slope, intercept = (default if n is None else float(n) for n, default in zip(header.get_slope_inter(), (1.0, 0.0), strict=True))
        known = int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0
        moves = _moves(header.get_best_affine()) if known and options.orientation == "apply" else None
    return _stack(data, (shape, dtype, offset), (slope, intercept), moves, options)


def _moves(affine: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """(3, 2): for each axis of the array, the one that it becomes, and 1 or -1 where it is turned round; None where the axes span no space."""
    orientations = importlib.import_module("nibabel.orientations")
    if not np.isfinite(affine).all():
        return None
    moves: npt.NDArray[Any] = orientations.io_orientation(affine)
    return moves if np.isfinite(moves).all() else None


def _stack(
    data: bytes, stored: tuple[tuple[int, ...], np.dtype[Any], int], scale: tuple[float, float], moves: npt.NDArray[Any] | None, options: Preprocess
) -> Stack:
    shape, dtype, offset = stored
    colours = len(dtype.names) if dtype.names else 0
    number = dtype[0] if colours else dtype
    if number.kind not in "iuf" or number.itemsize > 8 or (colours and any(dtype[k] != number for k in range(colours))):
        raise DecodeError(f"a NIfTI file of {dtype}, expected whole numbers or floats of 8 to 64 bits", stage="open", code="unsupported")
    if not shape or any(n < 1 for n in shape):
        raise DecodeError(f"a NIfTI file of shape {shape} has no voxels", stage="open", code="not-an-image")
    if offset > _MOST_OFFSET:
        raise DecodeError(f"a NIfTI file with {offset} bytes between header and values", stage="open", code="corrupt")
    spatial, rest = (*shape[:3], 1, 1)[:3], math.prod(shape[3:])
    channels = max(rest, 1) * max(colours, 1)
    turned = spatial if moves is None else tuple(spatial[int(np.flatnonzero(moves[:, 0] == k)[0])] for k in range(3))
    width, height, depth = turned
    check_frames((depth, height, width), channels, number.itemsize, options)
    count = math.prod(shape)
    there = _first(data, offset + count * dtype.itemsize)
    if len(there) < offset + count * dtype.itemsize:
        raise DecodeError(f"the file ends before the volume {'x'.join(map(str, shape))} does", stage="load", code="truncated")
    flat = np.frombuffer(there, number, count * max(colours, 1), offset)
    # Fortran's order, the colours of a voxel together.
    whole = flat.reshape(max(rest, 1), *spatial[::-1], max(colours, 1)).transpose(3, 2, 1, 0, 4)
    if moves is not None:
        for axis in range(3):
            whole = np.flip(whole, axis) if moves[axis, 1] < 0 else whole
        whole = whole.transpose(*(int(np.flatnonzero(moves[:, 0] == k)[0]) for k in range(3)), 3, 4)
    volume = whole.transpose(2, 1, 0, 3, 4).reshape(depth, height, width, channels)
    several = channels > 1
    return Stack(
        format="NIFTI",
        shape=(depth, height, width),
        channels=channels if several else 0,
        dtype=scaled_dtype(number, *scale),
        planes=lambda start, stop: scaled(volume[start:stop] if several else volume[start:stop, :, :, 0], *scale),
    )
