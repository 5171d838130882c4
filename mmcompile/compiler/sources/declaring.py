"""Hides which part of a first sample is of which kind, as its name, its value and what was asked for say, and what its field is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.arrays import CLASSES, as_field
from mmcompile.compiler.sources.samplenames import Named, places, spread
from mmcompile.compiler.sources.sampleparts import (
    ListPart,
    MaskPart,
    MultilabelPart,
    NumberPart,
    Part,
    PicturePart,
    PointsPart,
    TextPart,
    pixels,
    with_visibility,
)
from mmcompile.compiler.sources.samples import Declared
from mmcompile.compiler.sources.samplevalues import ARRAYS, PICTURES, as_array, coordinates, is_bfloat16, is_picture, numbers, tv_kind
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import CLASS_LISTS, Field, Names, field_name

__all__ = ["Hints", "declare", "field_of", "is_vague", "said_pictures", "with_pictures"]

Array = npt.NDArray[Any]

#: What boxes are called; those of torchvision's word are x0, y0, x1, y1, the others of any form.
_BOXES = frozenset({"box", "boxes", "bbox", "bboxes", "bounding_boxes"})
_CORNERS = frozenset({"box", "boxes"})
#: What is called so beside boxes has a row for each of them.
_OF_OBJECTS = frozenset(
    {
        *("labels", "label", "category", "categories", "category_id", "category_ids", "class_labels", "area", "areas", "iscrowd", "is_crowd"),
        *("difficult", "truncated", "occluded", "scores", "score", "ids", "keypoints", "masks"),
    }
)
#: Words in the names of masks.
_MASKS = frozenset(["mask", "masks", "segmentation", "seg", "annotation", "annotations", "semantic"])
#: Those that floats may be called so and be rows of numbers.
_ROWS = frozenset(["annotation", "annotations"])


@dataclass(frozen=True)
class Hints:
    """What a dataset knows of its parts by name: the names of classes ("" of any), and dtypes of what comes as Python numbers."""

    classes: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str]


def with_pictures(sample: Any, names: Sequence[str] | None, asked: Preprocess) -> tuple[Preprocess, str | None]:
    """(the options with the pixel fields of a sample in them, the name of its main picture or None).  Raises SourceError, OptionError."""
    named = spread(places(sample, names), said_pictures(asked))
    kinds = _kinds(named, dict(asked.options))
    main = _main(named, kinds)
    if main is None:
        return asked, None
    called: dict[str, str] = {}
    for name in named.parts:
        if (first := called.setdefault(field_name(name), name)) != name:
            raise SourceError(f"{name} and {first}: both are the field {field_name(name)}; rename one")
    pixels = {name: kind for name, kind in kinds.items() if kind == "mask" or (kind == "image" and is_picture(named.parts[name]))}
    others = [(field_name(name), kind) for name, kind in pixels.items() if name != main]
    return asked.with_parts(((field_name(main), "image"), *others)), main


def said_pictures(asked: Preprocess) -> frozenset[str]:
    """The fields that were said to be pictures."""
    return frozenset(name for name, options in asked.options if options.kind == "image")


def is_vague(sample: Any, names: Sequence[str] | None) -> bool:
    """Does a sample not tell what another holds, as a list in it is empty?"""
    named = spread(places(sample, names))
    return bool(named.empty) or any(isinstance(value, list) and not value for value in named.parts.values())


def _main(named: Named, kinds: Mapping[str, str]) -> str | None:
    pictures = [name for name, kind in kinds.items() if kind == "image" and is_picture(named.parts[name])]
    return "image" if "image" in pictures else next(iter(pictures), None)


def _kinds(named: Named, options: Mapping[str, FieldOptions]) -> dict[str, str]:
    """What each part is: a kind of FieldOptions; "value" for numbers."""
    pictured = any(is_picture(value) for value in named.parts.values())
    return {name: options.get(field_name(name), FieldOptions()).kind or _kind(name, value, pictured) for name, value in named.parts.items()}


def _kind(name: str, value: Any, pictured: bool) -> str:
    words = set(re.split("[^a-z]+", name.lower()))
    if is_picture(value):
        return "mask" if words & _MASKS else "image"
    kind = {"Mask": "mask", "BoundingBoxes": "boxes", "KeyPoints": "keypoints"}.get(tv_kind(value) or "", "value")
    if kind != "value" or not pictured or isinstance(value, str | bytes):
        return kind
    shape = _shape(value)
    if name.lower() in _BOXES and len(shape) == 2 and shape[1] == 4:
        return "boxes"
    if name.lower() == "keypoints" and len(shape) >= 2:
        return "keypoints"
    number = str(getattr(value, "dtype", "object")).rpartition(".")[2]
    alike = number.startswith(("bool", "int", "uint")) or (number.startswith("float") and not words & _ROWS)
    return "mask" if words & _MASKS and alike and len(shape) in (2, 3) else "value"


def _shape(value: Any) -> tuple[int, ...]:
    """() of what has none, as lists in a list that differ in length."""
    try:
        return np.shape(value) if isinstance(value, list | tuple) else tuple(getattr(value, "shape", ()))
    except ValueError:
        return ()


def declare(sample: Any, names: Sequence[str] | None, preprocess: Preprocess, hints: Hints, pictures: frozenset[str]) -> Declared:
    """What a first sample says of all; `preprocess` is that of `with_pictures`, and knows the size of pictures, `pictures` are `said_pictures`.

    Raises SourceError, OptionError.
    """
    placed = places(sample, names)
    named = spread(placed, pictures)
    if not named.parts:
        raise SourceError("a sample holds nothing" if not named.empty else f"{', '.join(named.empty)}: an empty list in each of the first samples")
    return _Declaring(named, preprocess, hints).declared(
        tuple(placed) if isinstance(sample, tuple | list) and not hasattr(sample, "_fields") else None
    )


class _Declaring:
    """The parts of a first sample, one by one."""

    def __init__(self, named: Named, preprocess: Preprocess, hints: Hints) -> None:
        self._named, self._preprocess, self._hints = named, preprocess, hints
        self._options = dict(preprocess.options)
        self._kinds = _kinds(named, self._options)
        self._main = _main(named, self._kinds)
        self._boxes = next((name for name, kind in self._kinds.items() if kind == "boxes"), None)

    def declared(self, names: tuple[str, ...] | None) -> Declared:
        parts: dict[str, Part] = {}
        for name, value in self._named.parts.items():
            part = self._part(name, value)
            if part.field.name in parts:
                raise SourceError(f"{name} and {parts[part.field.name].name}: both are the field {part.field.name}; rename one")
            parts[part.field.name] = part
        if strange := [name for name in self._options if name not in parts]:
            raise OptionError(f"fields: {strange[0]}: samples have no such part (they have {', '.join(parts)})", options=["fields"])
        main = None if self._main is None else field_name(self._main)
        order = {"image": 1, "mask": 1, "volume": 1}
        ordered = sorted(parts.values(), key=lambda part: 0 if part.field.name == main else order.get(part.field.meaning, 2))
        counts = dict.fromkeys(part.field.count for part in ordered if part.field.count is not None)
        if clash := next((count for count in counts if count in parts), None):
            raise SourceError(f"{clash} is the field of a count: rename the part that is called so")
        return Declared(
            tuple(ordered),
            names,
            self._preprocess if self._main is not None else None,
            self._main,
            tuple(Field(str(count), "int64", (), "value") for count in counts),
            tuple(sorted(self._named.left_out)),
            self._named.pictures,
        )

    def _part(self, name: str, value: Any) -> Part:
        kind, own = self._kinds[name], self._options.get(field_name(name), FieldOptions())
        own.check(kind)
        if kind == "image":
            return self._picture(name, value)
        if kind == "mask":
            return self._mask(name, value)
        if kind in ("boxes", "keypoints"):
            return self._placed(name, value, kind, own)
        if kind == "text":
            spec = Field(field_name(name), "uint8", own.shape or (1,), "text")
            return TextPart(name, spec, known=own.shape is not None)
        if kind == "multilabel":
            classes = self._hints.classes.get(name)
            made = MultilabelPart(name, Field(field_name(name), own.dtype or "uint8", (1,), "value"))
            return made if classes is None else replace(made.sized(len(classes)), field=_named(made.sized(len(classes)).field, classes))
        if kind == "volume":
            raise OptionError(f"fields: {name}: volumes come from files: give arrays as they are, without a kind", options=["kind"])
        return self._numbers(name, value, own, kind)

    def _numbers(self, name: str, value: Any, own: FieldOptions, kind: str) -> Part:
        given = self._hints.dtypes.get(name)
        if isinstance(value, str):
            raise SourceError(
                f"{name}: text; expected pictures, arrays, tensors or numbers: keep it by fields={{{field_name(name)!r}: {{'kind': 'text'}}}}, "
                "map it to numbers, or leave it out"
            )
        if own.kind is None:
            self._look(name, value)
        if own.max is not None or self._count_of(name, value) is not None:
            return self._list(name, value, own, given)
        array = numbers(value, name, given)
        if own.shape is not None and array.shape != own.shape:
            raise SourceError(f"{name}: expected shape {own.shape}, found {array.shape}")
        spec = field_of(name, array, is_bfloat16(value), {**self._hints.classes, **({name: ()} if kind == "class" else {})})
        cast = own.dtype is not None and own.dtype != spec.dtype
        return NumberPart(name, replace(spec, dtype=own.dtype) if own.dtype is not None else spec, array.dtype, array.shape, given, cast)

    def _look(self, name: str, value: Any) -> None:
        """Raises SourceError for numbers that are as good as certainly of a kind that nobody said."""
        shape, field = _shape(value), field_name(name)
        if self._boxes is not None and self._named.within[name] == self._named.within[self._boxes] and field in CLASS_LISTS and len(shape) == 1:
            boxes = len(self._named.parts[self._boxes])
            if shape[0] != boxes:
                raise SourceError(
                    f"{name}: {shape[0]} beside {boxes} {self._boxes}; if they are not theirs, say what they are: "
                    f"fields={{{field!r}: {{'kind': 'multilabel'}}}}, or value"
                )
        if self._main is None or len(shape) not in (2, 3):
            return
        width, height, orientation = decode.picture_facts(self._named.parts[self._main], self._preprocess)
        size = (width, height) if orientation >= 5 else (height, width)
        if shape[-2:] == size and shape[:-2] in ((), (1,)) and self._preprocess.output_hw() != size:
            raise SourceError(
                f"{name}: {size[0]} x {size[1]} as its picture {self._main}, which is made another size: fields={{{field!r}: {{'kind': 'mask'}}}} "
                "moves it with its picture as ids, value stores it as it is, and a picture of Pillow's is resized as pictures are"
            )

    def _count_of(self, name: str, value: Any) -> str | None:
        """The field that says how many rows of a part there are; None for one that has no rows of its own number."""
        boxes = self._boxes
        if boxes is None or name == boxes or self._named.within[name] != self._named.within[boxes]:
            return None if name != boxes else f"{field_name(name)}_count"
        rows = self._named.parts[boxes]
        alike = hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping) and len(value) == len(rows)
        if not alike or not (name in self._named.rows or name.lower() in _OF_OBJECTS):
            return None
        return f"{field_name(boxes)}_count"

    def _list(self, name: str, value: Any, own: FieldOptions, given: str | None) -> ListPart:
        array = numbers(value, name, given)
        if not array.ndim:
            raise SourceError(f"{name}: max is of lists, and this is a number")
        count = self._count_of(name, value) or f"{field_name(name)}_count"
        shared = own if self._boxes is None or own.max is not None else replace(own, max=self._group.max, overflow=self._group.overflow)
        field = field_name(name)
        classes = self._hints.classes.get(self._named.called.get(name, name), self._hints.classes.get("", ()) if field in CLASSES else ())
        numbered = bool(classes) or (field in CLASS_LISTS and array.dtype.kind in "iu" and array.ndim == 1)
        dtype = own.dtype or ("int64" if numbered else array.dtype.newbyteorder("<").name)
        spec = as_field(name, np.dtype(dtype if dtype != "bfloat16" else "uint16"), (1, *array.shape[1:]), name, {field: "value"})
        spec = replace(spec, dtype=dtype, count=count, categories=Names(tuple(classes)) if classes else None)
        return self._sized(ListPart(name, spec, shared), shared)

    @property
    def _group(self) -> FieldOptions:
        """What was said of the boxes, which all lists beside them share."""
        return self._options.get(field_name(self._boxes or ""), FieldOptions())

    def _sized(self, part: ListPart, own: FieldOptions) -> ListPart:
        return part if own.max is None else part.sized(own.max)

    def _placed(self, name: str, value: Any, kind: str, own: FieldOptions) -> Part:
        """Boxes or keypoints."""
        if self._main is None:
            raise SourceError(f"{name}: {kind} without a picture of Pillow's that they lie in: give the picture with them")
        array = coordinates(value, name)
        relative = bool(own.relative)
        field = field_name(name)
        if kind == "boxes":
            form = Form(own.format or self._format(name, value), relative, own.min_visibility or 0.0)
            return self._sized(ListPart(name, Field(field, "float32", (1, 4), "boxes", count=f"{field}_count"), own, form), own)
        count = self._count_of(name, value)
        several = count is not None or own.max is not None
        array = with_visibility(array, name, several and array.ndim == 2)
        form = Form(relative=relative)
        if not several:
            return PointsPart(name, Field(field, "float32", array.shape, "keypoints"), form)
        shared = own if own.max is not None else replace(own, max=self._group.max, overflow=self._group.overflow)
        spec = Field(field, "float32", (1, *array.shape[1:]), "keypoints", count=count or f"{field}_count")
        return self._sized(ListPart(name, spec, shared, form), shared)

    def _format(self, name: str, value: Any) -> str:
        """How boxes are written, as they or what stands beside them says."""
        told = getattr(value, "format", None)
        if tv_kind(value) == "BoundingBoxes":
            word = str(getattr(told, "name", told)).lower()
            if word not in ("xyxy", "xywh", "cxcywh"):
                raise SourceError(f"{name}: boxes of format {word}; expected XYXY, XYWH or CXCYWH")
            return word
        if name in self._named.rows:
            return "xywh"  # objects have them as COCO does
        if name.lower() in _CORNERS:
            return "xyxy"
        raise OptionError(
            f"{name}: how are boxes written? Say it: fields={{{field_name(name)!r}: {{'format': 'xywh'}}}}, or xyxy, or cxcywh", options=["format"]
        )

    def _mask(self, name: str, value: Any) -> Part:
        if self._main is None:
            raise SourceError(f"{name}: a mask without a picture of Pillow's that it belongs to: give the picture with it")
        options = self._preprocess.of(field_name(name))
        stack = (not is_picture(value) and as_array(value, name).ndim == 3 and len(value) != 1) or name.lower() == "masks"
        of_boxes = stack and self._boxes is not None and self._named.within[name] == self._named.within[self._boxes]
        count = f"{field_name(str(self._boxes))}_count" if of_boxes else None
        return MaskPart(name, replace(options.field(field_name(name)), count=count), options, stack)

    def _picture(self, name: str, value: Any) -> Part:
        if not is_picture(value):
            raise SourceError(f"{name}: {type(value).__name__}; expected {PICTURES}; or {ARRAYS}")
        options = self._preprocess if name == self._main else self._preprocess.of(field_name(name))
        made = pixels(value, options, name)
        c, h, w = options.sample_shape()
        shape = (c, h, w) if options.layout == "chw" else (h, w, c)
        if made.dtype.name not in ("uint8", "uint16", "int32", "float32"):
            raise OptionError(f"{name}: pictures of {made.dtype}")
        return PicturePart(name, Field(field_name(name), made.dtype.name, shape, "image", options.layout), options, made.dtype, made.shape)


def _named(spec: Field, names: tuple[str, ...]) -> Field:
    return replace(spec, columns=Names(names))


def field_of(name: str, array: Array, bfloat16: bool, classes: Mapping[str, tuple[str, ...]]) -> Field:
    """The field that a part of this dtype and shape becomes."""
    if bfloat16:
        return Field(field_name(name), "bfloat16", array.shape, "value")
    known = name in classes or ("" in classes and field_name(name) in CLASSES)
    return as_field(name, array.dtype, array.shape, name, {field_name(name): "class"} if known and not array.shape else {})
