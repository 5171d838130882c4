"""Hides what a value in Python is as numbers: pictures, arrays, tensors, lists and numbers, whichever library they are of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import SourceError

__all__ = ["ARRAYS", "PICTURES", "as_array", "coordinates", "is_array", "is_bfloat16", "is_picture", "numbers", "texts_of", "tv_kind"]

Array = npt.NDArray[Any]

#: What a picture in a sample is, as an error says it.
PICTURES = "a picture of Pillow's, as Image.fromarray(array), or a tv_tensors.Image of uint8"
#: ... and what may be one, where somebody says that it is.
ARRAYS = "an array of uint8 with 1, 3 or 4 channels, (H, W), (H, W, C) or (C, H, W), and fields={'image': {'kind': 'image'}} of that name"


def is_picture(value: Any) -> bool:
    """Is this a picture of Pillow's?"""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def is_array(value: Any) -> bool:
    """Is this something whose slices are arrays: numpy's, a tensor, an array of HDF5 or Zarr?"""
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or not shape:
        return False
    return all(hasattr(value, name) for name in ("dtype", "ndim", "__getitem__"))  # a dataset may say shape and dtype of its samples


def tv_kind(value: Any) -> str | None:
    """The name of a class of torchvision.tv_tensors: "Image", "Mask", "BoundingBoxes", "KeyPoints", "Video"; None for any other value."""
    return next((kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torchvision.tv_tensors")), None)


def is_bfloat16(value: Any) -> bool:
    """Is this a tensor of bfloat16?"""
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


def texts_of(named: Mapping[Any, Any]) -> dict[str, Any]:
    """The values of a dict by their names as text.  Raises SourceError for two names, such as 1 and "1", that are the same then."""
    out: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for name, value in named.items():
        text = str(name)
        if text in out:
            raise SourceError(f"the names {names[text]!r} and {name!r} are one as text, {text!r}: rename one")
        out[text], names[text] = value, name
    return out


def as_array(value: Any, name: str) -> Array:
    """The numbers of a part of a sample, as numpy has them; a tensor of bfloat16 as uint16.  Raises SourceError for what are none."""
    try:
        made = _converted(value, name)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor that is sparse, lists of different lengths
        raise SourceError(f"{name}: {type(value).__name__} that is no array of numbers ({_line(error)})") from error
    if made.dtype.kind not in "biufM":
        what = "text" if isinstance(value, str | bytes) or made.dtype.kind in "US" else type(value).__name__
        if made.dtype.kind == "c":
            what = f"{what} of complex numbers"
        elif isinstance(value, np.ndarray) and made.dtype.kind == "O":
            what = f"{what} of Python objects"
        elif isinstance(value, int):
            what = "a whole number beyond 64 bits"
        if callable(getattr(value, "keys", None)) and not isinstance(value, dict):
            raise SourceError(f"{name}: {what}; expected pictures, arrays, tensors, numbers, or a dict of them: give dict(…) of it")
        raise SourceError(f"{name}: {what}; expected pictures, arrays, tensors or numbers: map it to numbers, or leave that field out")
    return made


def coordinates(value: Any, name: str) -> Array:
    """As `as_array`, of what counts pixels: true and false do not."""
    array = as_array(value, name)
    if array.dtype.kind not in "iuf" or (isinstance(value, list | tuple) and _has_bool(value)):
        raise SourceError(f"{name}: expected coordinates, found {'times' if array.dtype.kind == 'M' else 'true and false'}")
    return array


def _has_bool(value: list[Any] | tuple[Any, ...]) -> bool:
    return any(_has_bool(v) if isinstance(v, list | tuple) else isinstance(v, bool | np.bool_) for v in value)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def _converted(value: Any, name: str) -> Array:
    kind = type(value).__module__.partition(".")[0]
    if kind == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        torch = sys.modules["torch"]
        return np.asarray(value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy())
    if np.ma.isMaskedArray(value) and np.ma.is_masked(value):
        raise ValueError("masked values: fill them")
    if isinstance(value, bool | int | float | np.generic | np.ndarray) or hasattr(value, "__array__"):
        return np.asarray(value)
    if isinstance(value, list | tuple):
        return np.asarray([as_array(v, name) for v in value] if any(hasattr(v, "detach") for v in value) else value)
    return np.empty(0, object)


def numbers(value: Any, name: str, given: str | None) -> Array:
    """As `as_array`; Python numbers are of the dtype that is `given`, where one is."""
    array = as_array(value, name)
    if given is None or not isinstance(value, int | float | list | tuple):
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        made = array.astype(given)
        if made.dtype.kind != "f" and not np.array_equal(made, array):  # floats are as exact as the dataset says
            raise SourceError(f"{name}: {value!r:.60} is no {given}, as which the dataset's features name it: cast that column, or give arrays")
    return made
