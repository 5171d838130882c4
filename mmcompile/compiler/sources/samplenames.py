"""Hides how the parts of a sample in Python are called, however they are nested: tuples, dicts, an image with a dict of what it shows.

What is of one object each stands in lists of one length, whether the sample has a list of dicts (as COCO) or a dict of lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmcompile.compiler import decode
from mmcompile.compiler.sources.samplevalues import as_array, is_array, is_picture, texts_of, tv_kind
from mmcompile.errors import SourceError
from mmcompile.format.fields import field_name

__all__ = ["Named", "named_parts", "places", "spread"]

#: Values of an object that are outlines or run lengths, of no shape.
_OUTLINES = frozenset({"segmentation", "segments_info"})
#: What objects call their boxes and classes, as COCO and Hugging Face have them.
_BOXES = ("bbox", "boxes", "box", "bboxes")
_CLASSES = ("category", "categories", "label", "labels", "category_id", "class", "classes")
#: How many channels an array of bytes has that is a picture.
_CHANNELS = (1, 3, 4)
#: Modes of pictures that hold ids, where a picture stands beside them.
_ID_MODES = frozenset({"P", "L", "I", "1", "I;16"})


@dataclass
class Named:
    """The parts of a sample by name; `within`: of nested ones, what they stood in; `rows`: those in which each row is of one object.

    `called`: what a part is called in the sample, where it is another name; boxes and classes of objects are boxes and labels.  `empty`: what stands
    for a list of no objects; `left_out`: names of values that have no shape.  `pictures`: fields whose arrays were said to be pictures.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    within: dict[str, str] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    called: dict[str, str] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    pictures: frozenset[str] = frozenset()

    def add(self, name: str, value: Any, within: str = "") -> None:
        name = name if name not in self.parts or not within else f"{within}_{name}"
        if name in self.parts:
            raise SourceError(f"two parts are called {name}: rename one")
        self.parts[name] = _picture_of(value, name, field_name(name) in self.pictures)
        self.within[name] = within


def places(sample: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """What stands directly in a sample: of a dict by its names; of a tuple by `names`, or image and label or mask, x and y, or x0, x1, …; anything
    else is image or x."""
    if isinstance(sample, Mapping):
        return texts_of(sample)
    if hasattr(sample, "_fields") and hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    parts = list(sample) if isinstance(sample, tuple) or (isinstance(sample, list) and not _is_numbers(sample)) else [sample]
    if names is None:
        first = "image" if parts and (is_picture(parts[0]) or tv_kind(parts[0]) == "Image") else "x"
        second = _second(parts[1]) if first == "image" and len(parts) == 2 else "y"
        names = [first, second][: len(parts)] if len(parts) <= 2 else [f"x{i}" for i in range(len(parts))]
    if len(names) != len(parts):
        raise SourceError(f"{len(parts)} parts, expected {len(names)} ({', '.join(names)})")
    return dict(zip(names, parts, strict=True))


def _second(value: Any) -> str:
    """What stands beside an image is called."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return "label"
    return "mask" if (is_picture(value) and value.mode in _ID_MODES) or tv_kind(value) == "Mask" else "y"


def spread(named: Mapping[str, Any], pictures: frozenset[str] = frozenset()) -> Named:
    """The parts of a sample, with those that stand in a dict, a tuple or a list of dicts each by its own name.

    Arrays that become the fields `pictures` are pictures.
    """
    out = Named(pictures=pictures)
    for name, value in named.items():
        if isinstance(value, Mapping):
            _spread_dict(out, name, value)
        elif isinstance(value, tuple) and any(is_picture(v) or isinstance(v, Mapping) for v in value):
            for at, inner in enumerate(value):
                second = _second(inner)
                out.add(second if second != "y" else f"{name}{at}", inner, name)
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            _spread_list(out, name, value)
        elif isinstance(value, list) and not value:
            out.empty.add(name)
        else:
            out.add(name, value)
    return out


def named_parts(sample: Any, names: Sequence[str] | None, pictures: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The parts of a sample by name, as of `spread`."""
    return spread(places(sample, names), pictures).parts


def _add_objects(out: Named, name: str, lists: Mapping[str, Any]) -> None:
    """Lists of objects: a row of each for an object."""
    boxes = next((key for key in _BOXES if key in lists), None)
    classes = next((key for key in _CLASSES if key in lists), None) if boxes is not None else None
    words = {boxes: "boxes", classes: "labels"}
    for key, value in lists.items():
        if key in _OUTLINES:
            out.left_out.add(key)
            continue
        out.add(words.get(key, key), value, name)
        added = next(reversed(out.parts))
        out.rows.add(added)
        if key in words:
            out.called[added] = key


def _spread_dict(out: Named, name: str, value: Mapping[Any, Any]) -> None:
    inner = texts_of(value)
    lists = [v for v in inner.values() if isinstance(v, list)]
    objects = len(lists) == len(inner) > 0 and len({len(v) for v in lists}) == 1
    if objects:
        _add_objects(out, name, inner)
        return
    for key, part in inner.items():
        if key in _OUTLINES:
            out.left_out.add(key)
        else:
            out.add(key, part, name)


def _spread_list(out: Named, name: str, objects: Sequence[Mapping[Any, Any]]) -> None:
    first = texts_of(objects[0])
    for other in objects:
        if set(map(str, other)) != set(first):
            raise SourceError(f"{name}: objects of different parts: {', '.join(first)}, and {', '.join(map(str, other))}")
    _add_objects(out, name, {key: [texts_of(one)[key] for one in objects] for key in first})


def _picture_of(value: Any, name: str, said: bool) -> Any:
    """A picture of Pillow's of a tv_tensor that is one, or of an array that is `said` to be one; anything else as it is."""
    is_tensor = tv_kind(value) == "Image"
    if not is_tensor and not (said and is_array(value)):
        return value
    array = as_array(value, name)
    if not is_tensor and array.ndim == 2:
        array = array[None]
    elif not is_tensor and array.ndim == 3 and array.shape[2] in _CHANNELS:
        array = array.transpose(2, 0, 1)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[0] not in _CHANNELS or not array.size:
        return value
    return decode.picture_of(array)


def _is_numbers(value: list[Any]) -> bool:
    return all(isinstance(v, int | float | np.generic) for v in value)
