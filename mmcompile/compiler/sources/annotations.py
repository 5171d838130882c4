"""Hides how a file of COCO's annotations is held, as columns, and what becomes of them: boxes with their classes, keypoints, masks.

Categories are numbered in the order of their ids.  Annotations of an image stand as they do in the file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.jsonparts import is_unicode
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.numbers import Misfit, shown
from mmcompile.compiler.sources.outlines import CROWD, check_outline, mask_key, may_be_drawn
from mmcompile.compiler.sources.ragged import Ragged, laid_out, padded
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import Field, Names
from mmcompile.text import counted
from mmcompile.text import number as points

__all__ = ["LISTS", "Annotations", "asked"]

Array = npt.NDArray[Any]
#: The lists of a file that are read.
LISTS = ("images", "annotations", "categories")
#: An annotation without a category: a caption.
_NONE = -(2**63)
_SIZE = "orig_size"
_TAKEN = ("image", "boxes", "labels", "area", "iscrowd", "keypoints", "boxes_count", _SIZE)


@dataclass(frozen=True)
class Wishes:
    """What was asked for: of boxes and keypoints, and the names of a mask and of a field with a 1 for each class, None where there is to be none."""

    boxes: FieldOptions = field(default_factory=FieldOptions)
    keypoints: FieldOptions = field(default_factory=FieldOptions)
    mask: str | None = None
    classes: str | None = None
    classes_dtype: str = "uint8"


def asked(fields: Mapping[str, FieldOptions]) -> Wishes:
    """What `--field` asks of annotations.  Raises OptionError for what they do not have."""
    named: dict[str, str | None] = {"mask": None, "multilabel": None}
    for name, options in fields.items():
        kind = options.kind or ("mask" if name == "mask" else None)
        if kind in named and name not in _TAKEN:
            if named[kind] is not None:
                raise OptionError(f"--field {name}: {named[kind]} is of kind {kind} already", options=["field"])
            named[kind] = name
        elif name in ("boxes", "keypoints"):
            if kind not in (None, name):
                raise OptionError(f"--field {name}: annotations have {name}, which are of no other kind", options=["field"])
            if options.format not in (None, "xywh") or options.relative:
                raise OptionError(f"--field {name}: boxes of COCO are xywh, in pixels: leave format and relative out", options=["field"])
        elif name != "image":
            raise OptionError(
                f"--field {name}: of annotations there are boxes and keypoints, a mask (--field {name}:kind=mask), and a 1 for each class that an "
                f"image shows (--field {name}:kind=multilabel)",
                options=["field"],
            )
    classes = named["multilabel"]
    dtype = fields[classes].dtype if classes is not None else None
    return Wishes(fields.get("boxes", FieldOptions()), fields.get("keypoints", FieldOptions()), named["mask"], classes, dtype or "uint8")


@dataclass
class Read:
    """The fields of the images that were asked for, with their values (M, …), how boxes are written, and faults by place."""

    fields: list[tuple[Field, Array]] = field(default_factory=list)
    forms: tuple[tuple[str, Form], ...] = ()
    faults: dict[int, str] = field(default_factory=dict)


class Annotations:
    """What a file of annotations says: `ids` (N,) of its images, `files`, the paths of these, and what each annotation is and has.

    With `outlines` the segmentations are held, too.
    """

    def __init__(self, path: str, members: Iterator[tuple[str, int, Any]], *, outlines: bool) -> None:
        """Raises SourceError."""
        self._path, self._outlines = path, outlines
        self._categories: dict[int, str] = {}
        self._points: dict[int, tuple[str, ...]] = {}
        ids, sizes, files, lengths = array("q"), array("q"), bytearray(), array("q")
        self._image, self._kind, self._crowd = array("q"), array("q"), bytearray()
        self._boxes, self._area = array("d"), array("d")
        self._keypoints, self._point_counts = array("d"), array("q")
        self._shapes, self._shape_lengths = bytearray(), array("q")
        #: What is wrong with annotations, by their number.
        self._wrong: dict[int, str] = {}
        for name, number, member in members:
            what = f"{name}[{number}]"
            if name == "images":
                file = _take(path, what, member, "file_name", str).encode("utf-8", "surrogateescape")
                ids.append(_take(path, what, member, "id", int))
                files += file
                lengths.append(len(file))
                sizes.extend(_side(member.get(side)) for side in ("height", "width"))
            elif name == "annotations":
                self._image.append(_take(path, what, member, "image_id", int))
                self._kind.append(_take(path, what, member, "category_id", int) if "category_id" in member else _NONE)
                self._annotation(number, member)
            else:
                kind = _take(path, what, member, "id", int)
                if kind in self._categories:
                    raise SourceError(f"{show(path)}: {what} has the id {kind}, as one before it has", path=path)
                self._categories[kind] = _take(path, what, member, "name", str)
                if isinstance(points := member.get("keypoints"), list) and points:
                    self._points[kind] = tuple(map(str, points))
        self.ids = _numbers(ids)
        self._sizes = _numbers(sizes).reshape(-1, 2)
        self.files = Keys(np.frombuffer(files, np.uint8), np.cumsum(_numbers(lengths)))
        if not len(self.ids):
            raise SourceError(f"{show(path)}: no images in it: expected a list of images, annotations and categories", path=path)

    @property
    def annotations(self) -> int:
        return len(self._image)

    def _annotation(self, number: int, member: dict[str, Any]) -> None:
        box = member.get("bbox")
        if box is None:
            self._boxes.extend([np.nan] * 4)
        elif not isinstance(box, list) or len(box) != 4 or not all(type(v) in (int, float) and abs(v) < 3e38 for v in box) or min(box[2:]) < 0:
            self._wrong[number] = f"boxes: annotations[{number}]: {shown(box)} is no box: x, y, width, height"
            self._boxes.extend([np.nan] * 4)
        else:
            self._boxes.extend(box)
        area, crowd = member.get("area"), member.get("iscrowd")
        if area is not None and not (type(area) in (int, float) and abs(area) < 3e38):
            self._wrong.setdefault(number, f"area: annotations[{number}]: {shown(area)} is no number")
            area = None
        if crowd not in (None, 0, 1):
            self._wrong.setdefault(number, f"iscrowd: annotations[{number}]: {shown(crowd)}: expected 0 or 1")
        self._area.append(np.nan if area is None else area)
        self._crowd.append(crowd in (1,))
        points: Any = member.get("keypoints") or ()
        sound = isinstance(points, list | tuple) and len(points) % 3 == 0 and all(type(v) in (int, float) and abs(v) < 3e38 for v in points)
        if not sound or not all(v in (0, 1, 2) for v in points[2::3]):
            self._wrong.setdefault(number, f"keypoints: annotations[{number}]: {shown(points)}: expected x, y and 0, 1 or 2 of each point")
            points = ()
        self._keypoints.extend(points)
        self._point_counts.append(len(points) // 3)
        if self._outlines:
            shape = json.dumps(member.get("segmentation"), separators=(",", ":")).encode()
            self._shapes += shape
            self._shape_lengths.append(len(shape))

    def _settle(self) -> None:
        """Which image and category each annotation has.  Raises SourceError: ids that stand twice, or that are not there."""
        order = np.argsort(self.ids, kind="stable")
        ids = self.ids[order]
        if len(again := np.flatnonzero(ids[1:] == ids[:-1])):
            a, b = (int(order[again[0] + i]) for i in range(2))
            raise SourceError(f"{show(self._path)}: images[{a}] and images[{b}] have the same id {self.ids[a]}", path=self._path)
        self._of = order[self._places(ids, _numbers(self._image), "image")]
        numbers = np.array(sorted(self._categories), np.int64)
        self._names = tuple(self._categories[number] for number in numbers.tolist())
        if len(set(self._names)) < len(self._names):
            twice = next(name for name in self._names if self._names.count(name) > 1)
            both = [str(number) for number in numbers.tolist() if self._categories[number] == twice]
            raise SourceError(f"{show(self._path)}: categories {' and '.join(both[:2])} are both called {show(twice)}", path=self._path)
        kinds = _numbers(self._kind)
        has = kinds != _NONE
        self._labels = np.full(len(kinds), -1, np.int64)
        self._labels[has] = self._places(numbers, kinds[has], "category", np.flatnonzero(has))
        #: Annotations image by image.
        self._order = np.argsort(self._of, kind="stable")
        self._count_points([len(self._points.get(number, ())) for number in numbers.tolist()])

    def _count_points(self, named: list[int]) -> None:
        """Keypoints of which some are missing are wrong: `named` are those that each category names; one without has as many as most of its own."""
        counts = _numbers(self._point_counts)
        wanted = np.array([*named, 0], np.int64)
        most = np.zeros_like(wanted)
        np.maximum.at(most, self._labels, counts)
        wanted = np.where(wanted > 0, wanted, most)[self._labels]
        for number in np.flatnonzero((counts > 0) & (counts != wanted)).tolist():
            kind = self._names[self._labels[number]] if self._labels[number] >= 0 else "no category"
            self._wrong.setdefault(
                number, f"keypoints: annotations[{number}]: {points(int(counts[number]), 'point')}, where {show(kind)} has {wanted[number]}"
            )

    def _places(
        self, known: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], what: str, numbers: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Where in `known` (sorted) each of these is; `numbers` are those of the annotations (None: from 0 on)."""
        at = np.searchsorted(known, wanted)
        wrong = np.flatnonzero(known[np.minimum(at, len(known) - 1)] != wanted) if len(known) else np.arange(len(wanted))
        if len(wrong):
            first = int(wrong[0])
            number = first if numbers is None else int(numbers[first])
            raise SourceError(
                f"{show(self._path)}: {counted(len(wrong), 'annotations')} of no {what} in it, the first annotations[{number}] of {what} "
                f"{wanted[first]}",
                path=self._path,
            )
        return at

    def read(self, wishes: Wishes, kept: npt.NDArray[np.bool_], counts: dict[str, int]) -> Read:
        """The fields of the images that are `kept` (N,); facts go to `counts`.  To be asked for first.  Raises SourceError, OptionError."""
        self._settle()
        out, place = Read(), np.cumsum(kept) - 1
        for number, why in self._wrong.items():
            if kept[image := int(self._of[number])]:
                out.faults.setdefault(int(place[image]), why)
        boxes = np.frombuffer(self._boxes, np.float64).reshape(-1, 4)[self._order] if len(self._boxes) else np.empty((0, 4))
        boxed = ~np.isnan(boxes).any(1)
        if missing := int((~boxed).sum()) - sum(why.startswith("boxes") for why in self._wrong.values()):
            counts["annotations without a box, left out"] = missing
        if self._names or boxed.any():
            self._objects(out, wishes, boxes[boxed], self._order[boxed], kept, counts)
        if wishes.classes is not None:
            self._shows(out, wishes.classes, wishes.classes_dtype, kept)
        alone = int((np.bincount(self._of, minlength=len(self.ids))[kept] == 0).sum())
        if alone:
            counts["images without an annotation"] = alone
        return out

    def _objects(
        self, out: Read, wishes: Wishes, boxes: Array, order: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_], counts: dict[str, int]
    ) -> None:
        """Boxes (B, 4) and what goes with them; `order` (B,) are their annotations, image by image."""
        lengths = np.bincount(self._of[order], minlength=len(self.ids))
        lists = [Ragged(Field("boxes", "float32", (4,), "boxes"), boxes.astype(np.float32), lengths, wishes.boxes)]
        if self._names:
            lists.append(Ragged(Field("labels", "int64", (), "value", categories=Names(self._names)), self._labels[order], lengths))
        areas = np.frombuffer(self._area, np.float64)[order]
        if not np.isnan(areas).all():
            lists.append(Ragged(Field("area", "float32", (), "value"), np.nan_to_num(areas).astype(np.float32), lengths))
        lists.append(Ragged(Field("iscrowd", "uint8", (), "value"), np.frombuffer(self._crowd, np.uint8)[order], lengths))
        size = Form("xywh", min_visibility=wishes.boxes.min_visibility or 0.0, size=_SIZE)
        out.forms = (("boxes", size),)
        if len(self._keypoints):
            lists.append(self._keypoint_lists(order, lengths, wishes.keypoints))
            out.forms = (*out.forms, ("keypoints", Form(size=_SIZE)))
        faulty = np.flatnonzero(kept)[list(out.faults)].tolist() if out.faults else []
        rows = np.flatnonzero(kept)
        out.fields += laid_out([each.without(faulty).at(kept) for each in lists], lambda at: f"images[{int(rows[at])}]", counts)
        out.fields.append((Field(_SIZE, "int64", (2,), "value", columns=Names(("height", "width"))), self._sizes[kept]))

    def _keypoint_lists(self, order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], options: FieldOptions) -> Ragged:
        counts = _numbers(self._point_counts)
        most, names = int(counts.max()), set(self._points.values())
        columns = next(iter(names)) if len(names) == 1 else ()
        points = padded(np.frombuffer(self._keypoints, np.float64).astype(np.float32).reshape(-1, 3), counts, most)
        spec = Field("keypoints", "float32", (most, 3), "keypoints", columns=Names(columns) if len(columns) == most else None)
        return Ragged(spec, points[order], lengths, options)

    def _shows(self, out: Read, name: str, dtype: str, kept: npt.NDArray[np.bool_]) -> None:
        """A 1 for each class that an image shows, crowds too."""
        if not self._names:
            raise OptionError(f"--field {name}: {show(self._path)} has no categories", options=["field"])
        spec = Field(name, dtype, (len(self._names),), "value", columns=Names(self._names))
        values = np.zeros((len(self.ids), len(self._names)), spec.stored)
        has = self._labels >= 0
        values[self._of[has], self._labels[has]] = 1
        out.fields.append((spec, values[kept]))

    def masks(self, name: bytes, rows: npt.NDArray[np.int64], faults: dict[int, str]) -> Keys:
        """The keys (M,) of the masks of these images; what is no outline is added to `faults`, by place.  Raises SourceError."""
        most = len(self._names)
        if most >= CROWD and any(self._crowd):
            raise SourceError(f"{show(self._path)}: {most} categories and crowds, which are {CROWD} in a mask: at most {CROWD - 1} can be told apart")
        ends = np.cumsum(_numbers(self._shape_lengths))
        stops = np.searchsorted(self._of[self._order], rows, side="right").tolist()
        starts = np.searchsorted(self._of[self._order], rows, side="left").tolist()

        def each() -> Iterator[bytes]:
            for at, (row, start, stop) in enumerate(zip(rows.tolist(), starts, stops, strict=True)):
                height, width = self._sizes[row].tolist()
                if not width * height:
                    faults.setdefault(at, f"mask: images[{row}] says no width and height, which its outlines belong to")
                elif not may_be_drawn(width, height):
                    faults.setdefault(at, f"mask: images[{row}] says {width}x{height} (width x height), more than any picture that is taken")
                    height = width = 0
                outlines = []
                for number in self._order[start:stop].tolist():
                    shape = json.loads(self._shapes[int(ends[number]) - self._shape_lengths[number] : int(ends[number])])
                    if shape is not None and self._labels[number] >= 0:
                        outlines.append((int(self._labels[number]), bool(self._crowd[number]), shape))
                        self._check(at, number, shape, (width, height), faults)
                yield mask_key(name + b"#%d" % self.ids[row], width, height, most, [] if at in faults else outlines)

        return Keys.of(each())

    def _check(self, at: int, number: int, shape: Any, size: tuple[int, int], faults: dict[int, str]) -> None:
        try:
            check_outline(shape, *size)
        except Misfit as why:
            faults.setdefault(at, f"mask: annotations[{number}]: {why}")


def _numbers(held: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(held, np.int64) if len(held) else np.empty(0, np.int64)


def _side(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 31 else 0


def _take(path: str, what: str, member: Any, name: str, kind: type) -> Any:
    value = member.get(name) if isinstance(member, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and not -(2**63) < value < 2**63):
        expected = "a text" if kind is str else "a whole number"
        raise SourceError(f"{show(path)}: {what} has no {name} that is {expected}", path=path)
    if isinstance(value, str) and not is_unicode(value):
        raise SourceError(f"{show(path)}: {what} has a {name} with half a surrogate pair", path=path)
    return value
