"""Hides what the cells of a column are as a field of a kind: boxes, keypoints, lists, vectors, classes of which several hold, texts.

Pure: values of cells in, arrays out.  A value that does not fit is a fault of its row, which says the field, the value, and what was expected; the
row is as good as empty then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.cast import bfloat16
from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.boxes import box_faults
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.numbers import Misfit, NamesOf, Numbers, flat, parsed, shown
from mmcompile.compiler.sources.ragged import Ragged, padded
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError
from mmcompile.format.fields import Field, Names

__all__ = ["Read", "read_boxes", "read_classes", "read_keypoints", "read_many", "read_text", "read_values"]

Array = npt.NDArray[Any]
#: The largest number of float32, as which places are stored.
_LARGEST = float(np.finfo(np.float32).max)
#: Texts of names in a cell, by what stands between them.
_MARKS = ("|", ";", ",")


@dataclass
class Read:
    """What a column became: a field with its values (N, …), or `lists`, with how boxes and keypoints are written; `faults` by row."""

    fields: list[tuple[Field, Array]] = field(default_factory=list)
    lists: Ragged | None = None
    forms: list[tuple[str, Form]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)


class _Rows:
    """The cells of a column one by one, each parsed; what does not fit is noted and leaves no trace."""

    def __init__(self, name: str, faults: dict[int, str]) -> None:
        self._name, self._faults = name, faults

    def each(self, cells: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for row, cell in enumerate(cells):
            try:
                yield row, parsed(cell)
            except Misfit as why:
                self.fault(row, why)
                yield row, None

    def fault(self, row: int, why: Misfit | str) -> None:
        self._faults.setdefault(row, f"{self._name}: {why}")


def read_boxes(name: str, cells: Iterable[Any], options: FieldOptions, format: str = "xyxy") -> Read:
    """Boxes: of each row a list of lists of 4 numbers, or 4 numbers alone."""
    out = Read(forms=[(name, Form(options.format or format, bool(options.relative), options.min_visibility or 0.0))])
    rows, lengths, numbers = _Rows(name, out.faults), [], Numbers("float64")
    for row, value in rows.each(cells):
        boxes = _members(value, 4)
        try:
            for box in boxes:
                if not isinstance(box, list | tuple) or len(box) != 4:
                    raise Misfit(f"{shown(box)} is no box: a list of 4 numbers")
            flat = list(itertools.chain.from_iterable(boxes))
            if not {bool, str}.isdisjoint(map(type, flat)):
                raise Misfit(f"{shown(next(n for n in flat if type(n) in (bool, str)))} in a box: a list of 4 numbers")
            numbers.extend(flat)
            lengths.append(len(boxes))
        except Misfit as why:
            rows.fault(row, why)
            lengths.append(0)
    made = Ragged(Field(name, "float32", (4,), "boxes"), numbers.made()[1].reshape(-1, 4), np.array(lengths, np.int64), options)
    out.lists = _sound_boxes(made, out, rows)
    return out


def _sound_boxes(made: Ragged, out: Read, rows: _Rows) -> Ragged:
    """The same as float32, without the rows of which a box is none."""
    of = np.repeat(np.arange(len(made.lengths)), made.lengths)
    for at, why in box_faults(made.values, out.forms[0][1].format).items():
        rows.fault(int(of[at]), why)
    with np.errstate(over="ignore"):
        stored = made.values.astype(np.float32)
    return Ragged(made.spec, stored, made.lengths, made.options).without(list(out.faults))


def _members(value: Any, width: int) -> Sequence[Any]:
    """The lists of a cell; one of `width` numbers alone is a list of that one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (value,)
    return (value,) if len(value) == width and not any(isinstance(v, list | tuple) for v in value) else value


def read_keypoints(name: str, cells: Iterable[Any], options: FieldOptions) -> Read:
    """Keypoints: of each row a list of points [x, y, visible] or [x, y], or a list of such lists; points may stand end to end, as in COCO."""
    out = Read(forms=[(name, Form(relative=bool(options.relative)))])
    rows, lengths, numbers = _Rows(name, out.faults), [], Numbers("float64")
    points = None if options.shape is None else options.shape[0]
    several: bool | None = None
    for row, value in rows.each(cells):
        try:
            sets, many = _point_sets(value, points)
            if sets and several not in (None, many):
                raise Misfit(f"{shown(value)}: {'a list of points among lists of such lists' if several else 'a list of such lists among lists'}")
            for each in sets:
                if len(each) != (points or len(sets[0])):
                    raise Misfit(f"{shown(value)}: {len(each)} points, expected {points or len(sets[0])}")
            numbers.extend(itertools.chain.from_iterable(_point(point) for each in sets for point in each))
            lengths.append(len(sets))
            if sets:
                several, points = many, len(sets[0])
        except Misfit as why:
            rows.fault(row, why)
            lengths.append(0)
    points = points or 1
    spec = Field(name, "float32", (points, 3), "keypoints")
    made = Ragged(spec, numbers.made()[1].astype(np.float32).reshape(-1, points, 3), np.array(lengths, np.int64), options)
    if several:
        out.lists = made
    else:
        out.fields.append((spec, padded(made.values, made.lengths, 1)[:, 0]))
    return out


def _point_sets(value: Any, points: int | None) -> tuple[list[list[Any]], bool]:
    """(lists of points, are they several) of a cell."""
    if value is None:
        return [], False
    if not isinstance(value, list | tuple):
        raise Misfit(f"{shown(value)} is no list of points")
    if not value:
        return [], False
    if not isinstance(value[0], list | tuple):
        return [_end_to_end(value, points)], False
    inner = value[0][0] if value[0] else None
    if isinstance(inner, list | tuple):
        return [list(each) for each in value], True
    if len(value[0]) in (2, 3):
        return [list(value)], False
    return [_end_to_end(each, points) for each in value], True


def _end_to_end(value: Any, points: int | None) -> list[Any]:
    """Points of which the numbers stand one behind the other."""
    width = 2 if points is not None and len(value) == 2 * points else 3
    if len(value) % width:
        raise Misfit(f"{shown(value)}: {len(value)} numbers, expected x, y, visible of each point")
    return [value[at : at + width] for at in range(0, len(value), width)]


def _point(point: Any) -> tuple[Any, Any, Any]:
    if not isinstance(point, list | tuple) or len(point) not in (2, 3):
        raise Misfit(f"{shown(point)} is no point: x, y and 0, 1 or 2")
    x, y, seen = (*point, 2) if len(point) == 2 else point
    if seen not in (0, 1, 2):
        raise Misfit(f"{shown(point)}: a point is 0 (not labelled), 1 (hidden) or 2 (to be seen)")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= _LARGEST for v in (x, y)):
        raise Misfit(f"{shown(point)}: a number that is none")
    return (x, y, seen) if seen else (0, 0, 0)


def read_values(name: str, cells: Iterable[Any], options: FieldOptions, dtype: str | None = None) -> Read:
    """Numbers: one for each row, or as many as `shape` says, or lists that differ in length; such lists may also be of names."""
    out = Read()
    rows = _Rows(name, out.faults)
    values, first = rows.each(cells), None
    before = []
    for row, value in values:  # what the first value is decides what a gap is
        before.append((row, value))
        if value is not None:
            first = value
            break
    every = itertools.chain(before, values)
    if options.shape is not None:
        out.fields.append(_vectors(name, every, rows, options.shape, Numbers(options.dtype or dtype)))
    elif not isinstance(first, list | tuple):
        out.fields.append(_vectors(name, every, rows, (), Numbers(options.dtype or dtype)))
    else:
        texts = options.dtype is None and any(isinstance(part, str) for part in flat(first))
        out.lists = _lists(name, every, rows, options, NamesOf() if texts else Numbers(options.dtype or dtype))
    return out


def _vectors(name: str, values: Iterable[tuple[int, Any]], rows: _Rows, shape: tuple[int, ...], numbers: Numbers) -> tuple[Field, Array]:
    count, said = math.prod(shape), "x".join(map(str, shape))
    for row, value in values:
        try:
            parts = [None] * count if value is None else flat(value)
            if len(parts) != count:
                raise Misfit(f"{shown(value)}: {len(parts)} numbers, and shape={said}" if shape else f"{shown(value)}: a list among single values")
            numbers.extend(parts)
        except Misfit as why:
            rows.fault(row, why)
            numbers.gap(count)
    dtype, made = numbers.made()
    return Field(name, dtype, shape, "value"), made.reshape(-1, *shape)


def _lists(name: str, values: Iterable[tuple[int, Any]], rows: _Rows, options: FieldOptions, held: Numbers | NamesOf) -> Ragged:
    lengths = []
    for row, value in values:
        parts = [] if value is None else flat(value)
        try:
            held.extend(parts)
        except Misfit as why:
            rows.fault(row, why)
            parts = []
        lengths.append(len(parts))
    counts = np.array(lengths, np.int64)
    if isinstance(held, Numbers):
        dtype, numbers = held.made()
        return Ragged(Field(name, dtype, (), "value"), numbers, counts, options)
    ids, names = held.made()
    return Ragged(Field(name, "int64", (), "value", categories=Names(names) if names else None), ids, counts, options)


def read_classes(name: str, cells: Iterable[Any], options: FieldOptions, known: Sequence[str] | None = None) -> Read:
    """Lists of names or numbers of classes."""
    out = Read()
    rows = _Rows(name, out.faults)
    out.lists = _lists(name, rows.each(cells), rows, options, NamesOf(known))
    return out


def read_many(name: str, cells: Iterable[Any], options: FieldOptions, known: Sequence[str] | None = None) -> Read:
    """Classes of which several hold: of each row a list of names or numbers, or a text of names with | ; , or a space between them."""
    made = read_classes(name, _split(cells), options, known)
    lists = made.lists
    if lists is None or lists.spec.categories is None:
        raise OptionError(f"--field {name}: no class in it", options=["field"])
    names, dtype = lists.spec.categories, options.dtype or "uint8"
    spec = Field(name, dtype, (len(names.listed),), "value", columns=names)
    values = np.zeros((len(lists.lengths), len(names.listed)), spec.stored)
    one = bfloat16(np.ones(1, np.float32))[0] if dtype == "bfloat16" else 1
    values[np.repeat(np.arange(len(lists.lengths)), lists.lengths), lists.values] = one
    return Read([(spec, values)], faults=made.faults)


def _split(cells: Iterable[Any]) -> Iterator[Any]:
    """The cells, those of text as lists; the first mark that any of them has stands between names in all of them."""
    held = [cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell for cell in cells]
    texts = [cell for cell in held if isinstance(cell, str) and cell.lstrip()[:1] != "["]
    mark = next((mark for mark in _MARKS if any(mark in text for text in texts)), None)
    numbers = all(part.strip().isdecimal() for text in texts for part in text.split(mark) if part.strip())
    for cell in held:
        if not isinstance(cell, str) or cell.lstrip()[:1] == "[":
            yield cell
            continue
        parts = [part.strip() for part in cell.split(mark) if part.strip()]
        yield list(map(int, parts)) if numbers else parts


def read_text(name: str, cells: Keys, options: FieldOptions) -> Read:
    """Texts as UTF-8, each whole: `shape` says how many bytes there are, else the longest."""
    out = Read()
    if options.shape is not None and len(options.shape) != 1:
        raise OptionError(f"--field {name}: shape of a text is its bytes, a number", options=["field"])
    most = None if options.shape is None else options.shape[0]
    for row, cell in enumerate(cells):
        try:
            text = cell.decode()
        except UnicodeDecodeError:
            out.faults[row] = f"{name}: {cell[:40]!r} is no UTF-8"
            continue
        if b"\0" in cell:
            out.faults[row] = f"{name}: {shown(text)} holds a NUL"
        elif most is not None and len(cell) > most:
            out.faults[row] = f"{name}: {shown(text)} is of {len(cell)} bytes, and shape={most}"
    lengths = np.diff(cells.stops, prepend=0)
    sound = lengths.copy()
    sound[list(out.faults)] = 0
    width = most or max(int(sound.max(initial=1)), 1)
    out.fields.append((Field(name, "uint8", (width,), "text"), padded(cells.blob, lengths, width)))
    return out
