"""`.npy` files of others: this module decides which are read, and which of their axes are channels.

Nothing in them is executed, and nothing is made of a header's word: the bytes that it promises must be there, and they are viewed, not copied.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.decode.stored import Stored, check_bytes
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["SIGNATURE", "channels_first", "read", "stored"]

SIGNATURE = b"\x93NUMPY"
#: Channels where one end of a shape has no more than this many and the other has.
_FEW = 4


def read(data: bytes) -> npt.NDArray[Any]:
    """The array that the bytes hold, a read-only view of them.  Raises DecodeError for what is no array of numbers, or not all there."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = reader(file)
    except MemoryError:
        raise
    except Exception as error:  # what numpy raises here is ValueError, KeyError, SyntaxError, TokenError, ...
        raise DecodeError("a damaged header of a .npy array", stage="open", code="corrupt", error=type(error).__name__) from error
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DecodeError(f"a .npy array of {_words(dtype)}, expected whole numbers or floats of 8 to 64 bits", stage="open", code="unsupported")
    if bool in map(type, shape):  # which numpy's reader takes for numbers
        raise DecodeError("a damaged header of a .npy array", stage="open", code="corrupt")
    if any(n < 1 for n in shape):
        raise DecodeError(f"a .npy array of shape {shape} has no pixels", stage="open", code="not-an-image")
    count, start = math.prod(shape), file.tell()
    if len(data) - start < count * dtype.itemsize:
        promised = count * dtype.itemsize
        raise DecodeError(f"the array ends after {len(data) - start} of the {promised} bytes promised", stage="load", code="truncated")
    flat = np.frombuffer(data, dtype, count, start)
    return flat.reshape(shape[::-1]).transpose() if fortran else flat.reshape(shape)


def stored(data: bytes, options: Preprocess) -> Stored:
    """An array (H, W), (H, W, C) or (C, H, W) as a picture; one channel is grey and three are RGB.  Raises DecodeError."""
    array = read(data)
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim != 3:
        raise DecodeError(f"a .npy array of shape {array.shape}, expected two axes, or three with channels", stage="open", code="unsupported")
    elif channels_first(array.shape, options):
        array = array.transpose(1, 2, 0)
    height, width, channels = array.shape
    check_bytes(array.size, array.itemsize, options)
    numbers = array.view(np.uint8) if array.dtype.kind == "b" else array
    colours = channels if channels in (1, 3) else 0
    return Stored("NPY", width, height, channels, numbers.dtype.newbyteorder("="), colours, False, lambda: numbers)


def _words(dtype: np.dtype[Any]) -> str:
    return {"O": "Python objects", "U": "text", "S": "text", "V": "records", "c": "complex numbers", "M": "times", "m": "times"}.get(
        dtype.kind, f"{8 * dtype.itemsize}-bit numbers"
    )


def channels_first(shape: tuple[int, ...], options: Preprocess) -> bool:
    """Are the channels the first axis of this shape, or the last?  `axes` says it; else at most 4 in the last, or else in the first, are channels.

    Raises DecodeError where neither says it.
    """
    if options.axes is not None:
        return options.axes == "chw"
    if shape[-1] <= _FEW:
        return False
    if shape[0] <= _FEW:
        return True
    raise DecodeError(
        f"a .npy array of shape {shape}, which does not say where its channels are: --axes chw (first) or hwc (last); of a volume --field "
        "NAME:kind=volume",
        stage="open",
        code="axes",
    )
