"""Hides how the pixels that Pillow holds are reached without a copy: through the Arrow interface of its images, which lends their memory.

What comes back is read-only and stays valid for as long as anybody has it; the image may be dropped before.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["one_block", "padded", "set_block"]

#: Larger than any picture; Pillow takes multiples of 4096 in an int.
_ANY_BYTES = 0x7FFFF000
#: Pillow's own, with the functions that only its C part has.
_core: Any = vars(Image)["core"]


class _Array(ctypes.Structure):
    """ArrowArray of the Arrow C data interface."""


_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
]

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Lent:
    """Memory of an image; `capsule` gives it back when this is dropped."""

    def __init__(self, address: int, shape: tuple[int, int, int], capsule: object) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, True)}
        self.capsule = capsule


def one_block() -> int:
    """Let every picture that Pillow makes from now on lie in one piece, which it does not above 16 MiB; the size of the pieces until now."""
    before = int(_core.get_block_size())
    _core.set_block_size(_ANY_BYTES)
    return before


def set_block(nbytes: int) -> None:
    """Let pictures lie in pieces of this size, as `one_block` said it was."""
    _core.set_block_size(nbytes)


def padded(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Pixels (H, W, 4) uint8 of an RGB image as they lie in Pillow's memory, the last byte of each without meaning.

    A view, or a copy where this Pillow cannot lend the memory or the image lies in it in several pieces.
    """
    shape = (image.height, image.width, 4)
    lent = _lent(image, shape)
    if lent is None:
        return np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8).reshape(shape)
    return np.asarray(lent)


def _lent(image: Image.Image, shape: tuple[int, int, int]) -> _Lent | None:
    # With another alignment there are gaps between the rows, of which the interface knows nothing.
    if not hasattr(image, "__arrow_c_array__") or _core.get_alignment() != 1:
        return None
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:  # in several pieces
        return None
    whole = _Array.from_address(_pointer(capsule, b"arrow_array"))
    if whole.n_children != 1 or whole.length != shape[0] * shape[1]:
        return None
    bytes_of = whole.children[0].contents
    if bytes_of.length != shape[0] * shape[1] * 4 or bytes_of.offset or whole.offset or bytes_of.n_buffers != 2:
        return None
    address: Any = bytes_of.buffers[1]
    return _Lent(address, shape, capsule) if address else None
