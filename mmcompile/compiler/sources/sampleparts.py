"""Hides how a part of a sample in Python becomes the fields of a row: a picture, a mask, a list that differs in length, a text, numbers.

Each part knows its fields before the first row is stored, or says what it has to measure for that.  A value that does not fit is a SourceError, which
the caller gives its row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.arrays import as_stored
from mmcompile.compiler.sources.boxes import box_faults
from mmcompile.compiler.sources.samplevalues import as_array, coordinates, is_picture, numbers
from mmcompile.compiler.spatial import Form
from mmcompile.compiler.transform import transformed
from mmcompile.errors import DecodeError, SourceError
from mmcompile.format.fields import DTYPES, Field

__all__ = [
    "Facts",
    "ListPart",
    "MaskPart",
    "MultilabelPart",
    "NumberPart",
    "Part",
    "PicturePart",
    "PointsPart",
    "TextPart",
    "pixels",
    "with_visibility",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """Of the main picture of a sample: (width, height) as stored, and its orientation."""

    size: tuple[int, int]
    orientation: int = 1


@dataclass(frozen=True)
class Part:
    """A part of each sample: as it is called there, and the field that it becomes."""

    name: str
    field: Field

    #: Must something be measured over all samples, before the shape of the field is known?
    unsized = False

    def measure(self, value: Any) -> int:
        """How large a field must be for this value."""
        return 0

    def sized(self, size: int) -> Part:
        """The same for fields so large."""
        return self

    def make(self, value: Any, facts: Facts) -> Array:
        """The value of the field.  Raises SourceError."""
        raise NotImplementedError


@dataclass(frozen=True)
class NumberPart(Part):
    """Numbers of one dtype and shape; Python's are taken as `given`, and `cast` makes all of another dtype, which must hold them."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    given: str | None = None
    cast: bool = False

    def make(self, value: Any, facts: Facts) -> Array:
        array = numbers(value, self.name, self.given)
        if array.shape != self.shape or (array.dtype != self.dtype and not self.cast):
            more = ""
            if self.field.meaning == "image":
                more = "; arrays are stored as they are: give pictures that differ in size as Pillow images, with --resize and --crop"
            elif array.shape[1:] == self.shape[1:] and array.ndim > 0 and array.dtype == self.dtype:
                more = f"; of lists that differ in length say how many rows are kept: fields={{{self.name!r}: {{'max': N}}}}"
            raise SourceError(f"{self.name}: expected {self.dtype} {self.shape}, found {array.dtype} {array.shape}{more}")
        if self.cast:
            return exact(array, self.field, self.name).reshape(self.field.shape)
        return as_stored(array[None], self.field).reshape(self.field.shape)


@dataclass(frozen=True)
class PicturePart(Part):
    """A picture of Pillow's, made as `options` say: `dtype` and `shape` (H, W, C)."""

    options: Preprocess
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def make(self, value: Any, facts: Facts) -> Array:
        if not is_picture(value):
            raise SourceError(f"{self.name}: expected a picture of Pillow's, as in the first sample, found {type(value).__name__}")
        made = pixels(value, self.options, self.name)
        if made.shape != self.shape or made.dtype != self.dtype:
            raise SourceError(f"{self.name}: expected {self.dtype} {self.shape} (H, W, C), found {made.dtype} {made.shape}")
        return made.transpose(2, 0, 1) if self.field.layout == "chw" else made


@dataclass(frozen=True)
class MaskPart(Part):
    """Class ids (H, W), as a picture or an array; of a stack (K, H, W), a mask for each instance, the number of the instance from 1 on.

    Where two instances overlap the later one shows.  The field's count is that of the boxes that have these instances.
    """

    options: Preprocess
    stack: bool = False

    def instances(self, value: Any) -> int | None:
        """How many there are in a stack; None for what is none."""
        shape = () if is_picture(value) else as_array(value, self.name).shape
        return shape[0] if self.stack and len(shape) == 3 else None

    def make(self, value: Any, facts: Facts) -> Array:
        try:
            return self._ids(value, facts)
        except DecodeError as error:
            raise SourceError(f"{self.name}: {error}") from error

    def _ids(self, value: Any, facts: Facts) -> Array:
        if is_picture(value):
            return decode.picture_mask(value, self.options, facts.size, facts.orientation)
        ids = as_array(value, self.name)
        if ids.dtype.kind == "b":
            ids = ids.astype(np.uint8)
        if ids.dtype.kind == "f":
            ids = _whole(ids, self.name)
        if ids.dtype.kind not in "iu":
            raise SourceError(f"{self.name}: a mask of {ids.dtype}: ids of classes are whole numbers")
        if self.stack and ids.ndim == 3:
            stack, ids = ids, np.zeros(ids.shape[1:], np.int64)
            for number, one in enumerate(stack, 1):
                ids[one != 0] = number
            ids = ids if len(stack) else np.zeros(facts.size[::-1], np.int64)
        elif ids.ndim == 3 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 2:
            raise SourceError(f"{self.name}: a mask of shape {ids.shape}; expected (H, W)")
        return decode.settled(ids, self.options, facts.size, facts.orientation)


def _whole(ids: Array, name: str) -> Array:
    """The ids of a mask of floats.  Raises SourceError for one that is none."""
    wrong = ids[~(np.isfinite(ids) & (ids == np.floor(ids)) & (np.abs(ids) < 2**53))]
    if wrong.size:
        raise SourceError(
            f"{name}: {wrong.flat[0]} in a mask of {ids.dtype}: ids of classes are whole numbers; fields={{{name!r}: {{'kind': 'value'}}}} stores it "
            "as it is, not moved with its picture"
        )
    return ids.astype(np.int64)


@dataclass(frozen=True)
class ListPart(Part):
    """Rows (n, …) that differ in number from sample to sample, of which `field` keeps so many; `form` of boxes and keypoints."""

    options: FieldOptions
    form: Form | None = None
    known: bool = False

    @property
    def unsized(self) -> bool:  # type: ignore[override]
        return not self.known

    def rows(self, value: Any, facts: Facts) -> Array:
        """All rows of a value, of the dtype of the field.  Raises SourceError."""
        inner = self.field.shape[1:]
        array = as_array(value, self.name) if self.form is None else coordinates(value, self.name)
        if not array.size:
            return np.zeros((0, *inner), self.field.stored)
        if self.field.meaning == "keypoints":
            array = with_visibility(array, self.name, array.ndim == 2 and len(inner) == 2)
        if self.form is not None:
            canvas = getattr(value, "canvas_size", None)
            if canvas is not None and tuple(canvas) != facts.size[::-1]:
                raise SourceError(f"{self.name}: of a canvas of {tuple(canvas)}, and the picture is {facts.size[::-1]} (height, width)")
        if array.ndim == 0 or array.shape[1:] != inner:
            raise SourceError(f"{self.name}: expected rows of {inner}, found {array.shape}")
        if self.form is not None and self.field.meaning == "boxes" and (wrong := box_faults(array, self.form.format)):
            hint = f": of boxes written in another way say it: fields={{{self.field.name!r}: {{'format': 'xywh'}}}}, or cxcywh"
            why = next(iter(wrong.values()))
            raise SourceError(f"{self.name}: {why}{hint if why.endswith('(format=xyxy)') else ''}")
        return array.astype(np.float32) if self.form is not None else exact(array, self.field, self.name)

    def measure(self, value: Any) -> int:
        array = as_array(value, self.name)
        if not array.ndim:
            raise SourceError(f"{self.name}: {value!r:.60}; expected a list")
        return len(array)

    def sized(self, size: int) -> ListPart:
        return replace(self, field=replace(self.field, shape=(max(size, 1), *self.field.shape[1:])), known=True)

    def make(self, value: Any, facts: Facts) -> Array:
        rows = self.rows(value, facts)
        most = self.field.shape[0]
        if len(rows) > most and self.options.overflow != "drop":
            raise SourceError(
                f"{self.name}: {len(rows):,} rows, and {most:,} are kept: give fields={{{self.name!r}: {{'max': {len(rows)}}}}}, or overflow='drop'"
            )
        if self.field.categories is not None and len(rows) and not -1 <= int(rows.min()) <= int(rows.max()) < len(self.field.categories.listed):
            raise SourceError(f"{self.name}: {rows.tolist()!r:.60}, and there are names of {len(self.field.categories.listed)} classes")
        out = np.full(self.field.shape, self.field.empty, self.field.stored)
        out[: len(rows)] = rows[:most]
        return out


@dataclass(frozen=True)
class PointsPart(Part):
    """Keypoints of the whole sample, of one shape; `form` says how they are written."""

    form: Form

    def make(self, value: Any, facts: Facts) -> Array:
        array = with_visibility(coordinates(value, self.name), self.name, False)
        if array.shape != self.field.shape:
            raise SourceError(f"{self.name}: expected keypoints {self.field.shape}, found {array.shape}")
        return array.astype(np.float32)


@dataclass(frozen=True)
class TextPart(Part):
    """Text as UTF-8 bytes, with 0 behind it."""

    known: bool = False

    @property
    def unsized(self) -> bool:  # type: ignore[override]
        return not self.known

    def measure(self, value: Any) -> int:
        return len(self._bytes(value))

    def sized(self, size: int) -> TextPart:
        return replace(self, field=replace(self.field, shape=(max(size, 1),)), known=True)

    def make(self, value: Any, facts: Facts) -> Array:
        data = self._bytes(value)
        if len(data) > self.field.shape[0]:
            raise SourceError(f"{self.name}: {value!r:.60} has {len(data)} bytes, and shape={self.field.shape[0]} are kept")
        out = np.zeros(self.field.shape, np.uint8)
        out[: len(data)] = np.frombuffer(data, np.uint8)
        return out

    def _bytes(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise SourceError(f"{self.name}: expected text, found {type(value).__name__}")
        if "\0" in value:  # which is what stands behind a text
            raise SourceError(f"{self.name}: {value!r:.60} holds a NUL")
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{self.name}: {value!r:.60} is no text that UTF-8 can write") from None


@dataclass(frozen=True)
class MultilabelPart(Part):
    """A 0 or 1 for each class: of a vector of them as it is, of a list of class numbers a 1 for each of these."""

    known: bool = False

    @property
    def unsized(self) -> bool:  # type: ignore[override]
        return not self.known

    def measure(self, value: Any) -> int:
        array = as_array(value, self.name)
        return len(array) if _is_vector(value) else int(array.max()) + 1 if array.size else 0

    def sized(self, size: int) -> MultilabelPart:
        return replace(self, field=replace(self.field, shape=(max(size, 1),)), known=True)

    def make(self, value: Any, facts: Facts) -> Array:
        array, classes = as_array(value, self.name), self.field.shape[0]
        if _is_vector(value):
            if array.shape != (classes,) or not np.isin(array, (0, 1)).all():
                raise SourceError(f"{self.name}: expected {classes} times 0 or 1, found {array.tolist()!r:.60}")
            return array.astype(self.field.stored)
        out = np.zeros(classes, self.field.stored)
        if array.size:
            if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= classes:
                raise SourceError(f"{self.name}: expected numbers of classes below {classes}, found {array.tolist()!r:.60}")
            out[array] = 1
        return out


def _is_vector(value: Any) -> bool:
    return not isinstance(value, list | tuple) or (len(value) > 0 and all(isinstance(v, bool) for v in value))


def pixels(image: Any, options: Preprocess, name: str) -> Array:
    """The pixels (H, W, C) of a picture, as options say.  Raises SourceError."""
    try:
        made, depth = decode.picture(image, options)
        return transformed(made, depth, options)[0] if options.transform is not None else made
    except DecodeError as error:
        raise SourceError(f"{name}: {error}") from error


def with_visibility(array: Array, name: str, flat: bool) -> Array:
    """Keypoints (…, 3) of (…, 2), all of which are to be seen, or of (…, 3); `flat`: of (n, 3 P), as COCO writes them.  Raises SourceError."""
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise SourceError(f"{name}: a coordinate that is no number, or beyond float32")
    if flat and array.shape[-1] % 3 == 0:
        return array.reshape(len(array), -1, 3)
    if array.shape[-1] == 2:
        return np.concatenate([array, np.full((*array.shape[:-1], 1), 2, array.dtype)], -1)
    if array.shape[-1] != 3:
        raise SourceError(f"{name}: keypoints of shape {array.shape}; expected x, y and visibility last")
    return array


def exact(array: Array, spec: Field, name: str) -> Array:
    """An array in the dtype of a field, if that holds its values: of a float as near as it comes.  Raises SourceError."""
    if spec.dtype == "bfloat16" or array.dtype == spec.stored:
        return array.astype(DTYPES[spec.dtype], copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        made = array.astype(spec.stored)
        bad = (np.isinf(made) & np.isfinite(array)) if made.dtype.kind == "f" else (made != array)
    if np.any(bad):
        raise SourceError(f"{name}: {array[bad].flat[0] if array.ndim else array}, which {spec.dtype} cannot hold")
    return made
