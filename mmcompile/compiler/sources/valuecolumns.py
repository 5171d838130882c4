"""Hides how the columns of a list that hold more than a number each become fields: which reader each has, and which lists go together.

Lists of classes and of numbers go with the boxes where they are as long in every row: they share their count, and a box that is dropped takes its
own with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.cells import Column
from mmcompile.compiler.sources.columns import as_label
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.kinds import Read, read_boxes, read_classes, read_keypoints, read_many, read_text, read_values
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.numbers import Misfit, parsed
from mmcompile.compiler.sources.parquet import ArrowColumns
from mmcompile.compiler.sources.ragged import Ragged, laid_out
from mmcompile.compiler.sources.roles import Role
from mmcompile.compiler.spatial import Form
from mmcompile.errors import OptionError
from mmcompile.format.fields import Field, Names

__all__ = ["Several", "read_columns"]

Array = npt.NDArray[Any]

_Known = Mapping[str, tuple[str, ...]]
#: What is taken of objects, by their own names: the boxes, their classes, and numbers.
_BOXES = ("bbox", "boxes", "box", "bboxes")
_CLASSES = ("category", "categories", "label", "labels", "category_id", "class", "classes")
_NUMBERS = {"area": "area", "areas": "area", "iscrowd": "iscrowd", "is_crowd": "iscrowd", "crowd": "iscrowd"}


class _Columns(Protocol):
    """Columns of rows that end at the last of `stops`; what they hold is asked for as of TextColumns."""

    @property
    def stops(self) -> Sequence[int]: ...
    def cells(self, name: str) -> Iterable[Any]: ...
    def paths(self, name: str) -> Keys: ...
    def column(self, name: str, where: Callable[[int], str], *, names: bool = False) -> Column | str: ...


@dataclass
class Several:
    """Fields with their values (M, …) of the rows that were asked for, how boxes and keypoints are written, and faults by row of the list."""

    fields: list[tuple[Field, Array]] = field(default_factory=list)
    forms: list[tuple[str, Form]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def read_columns(columns: _Columns, roles: Sequence[Role], rows: npt.NDArray[np.int64], known: _Known, where: Callable[[int], str]) -> Several:
    """What these columns become, for the rows (M,), ascending.  `known`: what the numbers of a column stand for.

    Raises OptionError where a column cannot be of the kind that was asked for, SourceError for a list that is longer than was said.
    """
    out, reads = Several(), list[Read]()
    for role in roles:
        reads += _read(columns, role, known, where, out.counts)
    for read in reads:
        for row, why in read.faults.items():
            out.faults.setdefault(row, why)
        out.forms += read.forms
    _hold_together([read for read in reads if read.lists is not None], out.faults)
    wanted = np.zeros(columns.stops[-1], bool)
    wanted[rows] = True
    lists = [read.lists.without(list(out.faults)).at(wanted) for read in reads if read.lists is not None]
    for read in reads:
        out.fields += [(spec, values[rows]) for spec, values in read.fields]
    for group in _groups(lists):
        out.fields += laid_out(group, lambda at: where(int(rows[at])), out.counts)
        if len(group) > 1:
            named = ", ".join(show(each.spec.name) for each in group[1:])
            out.counts[f"rows of {show(group[0].spec.name)}, which {named} go with"] = int(group[0].lengths.sum())
    out.faults = {row: why for row, why in out.faults.items() if wanted[row]}
    return out


def _hold_together(reads: Sequence[Read], faults: dict[int, str]) -> None:
    """A row with other numbers of boxes and of their classes is a fault."""
    lists = [read.lists for read in reads if read.lists is not None]
    boxes = next((each for each in lists if each.spec.meaning == "boxes"), None)
    for each in lists if boxes is not None else ():
        if boxes is None or each.spec.meaning == "boxes" or each.spec.categories is None:
            continue
        for row in np.flatnonzero(each.lengths != boxes.lengths).tolist():
            if int(row) not in faults:
                faults[int(row)] = f"{each.spec.name}: {int(each.lengths[row])} beside {int(boxes.lengths[row])} {boxes.spec.name}"


def _groups(lists: Sequence[Ragged]) -> list[list[Ragged]]:
    """Lists that go together: with the first boxes all that are as long in every row, but for numbers that were given a `max` of their own."""
    boxes = next((each for each in lists if each.spec.meaning == "boxes"), None)
    if boxes is None:
        return [[each] for each in lists]
    most = boxes.options.max
    beside = [
        each
        for each in lists
        if each.spec.meaning != "boxes"
        and np.array_equal(each.lengths, boxes.lengths)
        and (each.spec.categories is not None or most is None or each.options.max in (None, most))
    ]
    taken = [id(each) for each in (boxes, *beside)]
    return [[boxes, *beside], *([each] for each in lists if id(each) not in taken)]


def _read(columns: _Columns, role: Role, known: _Known, where: Callable[[int], str], counts: dict[str, int]) -> list[Read]:
    name, options, names = role.field, role.options, known.get(f"{role.column}[]")
    if role.kind == "objects":
        return _objects(columns.cells(role.column), columns, role, known, counts)
    if role.kind == "text":
        return [read_text(name, columns.paths(role.column), options)]
    if role.kind == "class" and not role.lists:
        return [_one_class(columns, role, known.get(role.column), where)]
    cells = columns.cells(role.column)
    if role.kind == "class":
        return [read_classes(name, cells, options, names)]
    if role.kind == "boxes":
        made = read_boxes(name, cells, options)
        counts[f"boxes by column {show(role.column)}, format {made.forms[0][1].format}"] = _total(made)
        return [made]
    if role.kind == "keypoints":
        return [read_keypoints(name, cells, options)]
    if role.kind == "multilabel":
        return [read_many(name, cells, options, names)]
    return [read_values(name, cells, options, columns.dtype(role.column) if isinstance(columns, ArrowColumns) else None)]


def _first(cells: Iterable[Any]) -> list[Any]:
    """The first cell that has a value."""
    for cell in cells:
        try:
            value = parsed(cell)
        except Misfit:
            continue
        if value is not None:
            return [value]
    return []


def _one_class(columns: _Columns, role: Role, known: Sequence[str] | None, where: Callable[[int], str]) -> Read:
    """A column with a class in each row, as the label is read."""
    column = columns.column(role.column, where, names=True)
    made = None if isinstance(column, str) else as_label(column, known)
    if made is None:
        why = column if isinstance(column, str) else "numbers that stand for no class, or times"
        raise OptionError(f"--field {role.field}:kind=class: column {show(role.column)} holds {why}", options=["field"])
    return Read([(Field(role.field, "int64", (), "value", categories=Names(made[1])), made[0])])


def _objects(cells: Iterable[Any], columns: _Columns, role: Role, known: _Known, counts: dict[str, int]) -> list[Read]:
    """Boxes, classes and numbers of a column of objects, as Hugging Face has them; boxes there are COCO's x, y, width, height."""

    def again() -> Iterable[Any]:
        return columns.cells(role.column) if isinstance(columns, ArrowColumns) else cells

    first = _first(again())
    members = list(first[0][0] if isinstance(first[0], list) else first[0]) if first else []
    box = next((name for name in _BOXES if name in members), None)
    if box is None:
        return []
    boxes = read_boxes("boxes", _member(again(), box), role.options, "xywh")
    out = [boxes]
    if category := next((name for name in _CLASSES if name in members), None):
        out.append(read_classes("labels", _member(again(), category), FieldOptions(), known.get(f"{role.column}[].{category}")))
    for name, called in _NUMBERS.items():
        if name in members and called not in [read.lists.spec.name for read in out if read.lists is not None]:
            out.append(read_values(called, _member(again(), name), FieldOptions()))
    counts[f"boxes by column {show(role.column)}, format {boxes.forms[0][1].format}"] = _total(boxes)
    return out


def _total(read: Read) -> int:
    return 0 if read.lists is None else int(read.lists.lengths.sum())


def _member(cells: Iterable[Any], name: str) -> Iterator[Any]:
    """One list of objects, of each cell."""
    for cell in cells:
        try:
            value = parsed(cell)
        except Misfit:
            yield cell
            continue
        if isinstance(value, list):
            yield [each.get(name) if isinstance(each, dict) else each for each in value]
        else:
            yield value.get(name) if isinstance(value, dict) else value
