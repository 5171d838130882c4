"""Hides what a sample of a Python dataset may be, and how it becomes arrays: pictures, arrays, tensors and numbers, in tuples, dicts or alone.

The first sample declares what all hold: names, dtypes, shapes.  A later one that differs is an error that names its row, what was expected and what
was found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.arrays import CLASSES, as_field, as_stored
from mmcompile.compiler.transform import transformed
from mmcompile.errors import DecodeError, OptionError, SourceError
from mmcompile.format.fields import Field, field_name

__all__ = ["Declared", "Hints", "as_array", "declare", "is_array", "is_picture", "named_parts", "texts_of"]

Array = npt.NDArray[Any]


def is_picture(value: Any) -> bool:
    """Is this a picture of Pillow's?"""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def is_array(value: Any) -> bool:
    """Is this something whose slices are arrays: numpy's, a tensor, an array of HDF5 or Zarr?"""
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or not shape:
        return False
    return all(hasattr(value, name) for name in ("dtype", "ndim", "__getitem__"))  # a dataset may say shape and dtype of its samples


def named_parts(sample: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The parts of a sample by name: those of a dict; of a tuple `names`, or image and label, x and y, or x0, x1, …; of anything else image or x."""
    if isinstance(sample, Mapping):
        return texts_of(sample)
    if hasattr(sample, "_fields") and hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    parts = list(sample) if isinstance(sample, tuple) or (isinstance(sample, list) and not _is_numbers(sample)) else [sample]
    if names is None:
        first = "image" if parts and is_picture(parts[0]) else "x"
        second = "label" if first == "image" and len(parts) == 2 and _is_whole(parts[1]) else "y"
        names = [first, second][: len(parts)] if len(parts) <= 2 else [f"x{i}" for i in range(len(parts))]
    if len(names) != len(parts):
        raise SourceError(f"{len(parts)} parts, expected {len(names)} ({', '.join(names)})")
    return dict(zip(names, parts, strict=True))


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


def _is_numbers(value: list[Any]) -> bool:
    return all(isinstance(v, int | float | np.generic) for v in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
        raise SourceError(f"{name}: {what}; expected pictures, arrays, tensors or numbers: map it to numbers, or leave that field out")
    return made


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


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


@dataclass(frozen=True)
class Hints:
    """What a dataset knows of its parts by name: the names of classes ("" of any), and dtypes of what comes as Python numbers."""

    classes: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class _Part:
    """A part of each sample: as it is called there, the field that it becomes, the dtype and shape that it has, and for pictures their settings.

    `given`: Python numbers are taken as of this dtype.
    """

    name: str
    field: Field
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    picture: Preprocess | None = None
    given: str | None = None


@dataclass(frozen=True)
class Declared:
    """What all samples hold; `names` are those of the parts of a tuple."""

    parts: tuple[_Part, ...]
    names: tuple[str, ...] | None

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(part.field for part in self.parts)

    @property
    def pictures(self) -> Preprocess | None:
        """The settings of the pictures, where there are some."""
        return next((part.picture for part in self.parts if part.picture is not None), None)

    def store(self, sample: Any, row: int, out: dict[str, Array], at: int) -> None:
        """Put a sample, row `row` of all, at row `at` of an array for each field.  Raises SourceError for one that is not as declared."""
        try:
            values = named_parts(sample, self.names)
            if set(values) != {part.name for part in self.parts}:
                raise SourceError(f"has {', '.join(values) or 'nothing'}; expected {', '.join(part.name for part in self.parts)}")
            for part in self.parts:
                out[part.field.name][at] = _made(values[part.name], part)
        except (SourceError, DecodeError) as error:
            raise SourceError(f"row {row:,}: {error}", row=row) from error


def _made(value: Any, part: _Part) -> Array:
    if part.picture is not None:
        if not is_picture(value):
            raise SourceError(f"{part.name}: expected a picture, found {type(value).__name__}")
        pixels = _pixels(value, part.picture)
        if pixels.shape != part.shape or pixels.dtype != part.dtype:
            raise SourceError(f"{part.name}: expected {part.dtype} {part.shape} (H, W, C), found {pixels.dtype} {pixels.shape}")
        return pixels.transpose(2, 0, 1) if part.field.layout == "chw" else pixels
    array = _numbers(value, part.name, part.given)
    if array.shape != part.shape or array.dtype != part.dtype:
        raise SourceError(f"{part.name}: expected {part.dtype} {part.shape}, found {array.dtype} {array.shape}")
    return as_stored(array[None], part.field).reshape(part.field.shape)


def _numbers(value: Any, name: str, given: str | None) -> Array:
    """As `as_array`; Python numbers are of the dtype that is `given`, where one is."""
    array = as_array(value, name)
    if given is None or not isinstance(value, int | float | list | tuple):
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        made = array.astype(given)
        if made.dtype.kind != "f" and not np.array_equal(made, array):  # floats are as exact as the dataset says
            raise SourceError(f"{name}: {value!r:.60} is no {given}, as which the dataset's features name it: cast that column, or give arrays")
    return made


def _pixels(image: Any, preprocess: Preprocess) -> Array:
    pixels, depth = decode.picture(image, preprocess)
    return transformed(pixels, depth, preprocess)[0] if preprocess.transform is not None else pixels


def declare(sample: Any, names: Sequence[str] | None, preprocess: Preprocess, hints: Hints) -> Declared:
    """What a first sample says of all; `preprocess` knows the size of pictures.  Raises SourceError, OptionError."""
    values = named_parts(sample, names)
    parts: dict[str, _Part] = {}
    for name, value in values.items():
        if is_picture(value):
            part = _declared_picture(name, value, preprocess)
        else:
            given = hints.dtypes.get(name)
            array = _numbers(value, name, given)
            part = _Part(name, field_of(name, array, _is_bfloat16(value), hints.classes), array.dtype, array.shape, None, given)
        if part.field.name in parts:
            raise SourceError(f"{name} and {parts[part.field.name].name}: both are the field {part.field.name}; rename one")
        parts[part.field.name] = part
    if not parts:
        raise SourceError("a sample holds nothing")
    ordered = sorted(parts.values(), key=lambda part: part.field.meaning != "image")
    return Declared(tuple(ordered), tuple(values) if isinstance(sample, tuple | list) and not hasattr(sample, "_fields") else None)


def field_of(name: str, array: Array, bfloat16: bool, classes: Mapping[str, tuple[str, ...]]) -> Field:
    """The field that a part of this dtype and shape becomes."""
    if bfloat16:
        return Field(field_name(name), "bfloat16", array.shape, "value")
    known = name in classes or ("" in classes and field_name(name) in CLASSES)
    return as_field(name, array.dtype, array.shape, name, {field_name(name): "class"} if known and not array.shape else {})


def _declared_picture(name: str, value: Any, preprocess: Preprocess) -> _Part:
    pixels = _pixels(value, preprocess)
    c, h, w = preprocess.sample_shape()
    shape = (c, h, w) if preprocess.layout == "chw" else (h, w, c)
    if pixels.dtype.name not in ("uint8", "uint16", "int32", "float32"):
        raise OptionError(f"{name}: pictures of {pixels.dtype}")
    return _Part(name, Field(field_name(name), pixels.dtype.name, shape, "image", preprocess.layout), pixels.dtype, pixels.shape, preprocess)
