"""Hides which columns of a table become fields, and of what kind: the label, the split, and values of their own dtype.

Pure: columns and wishes in, fields out.  The rules are the README's, and every choice that is made here is told.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import LABEL
from mmcompile.compiler.sources.cells import Column
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.splits import rank
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.index import Field, Names, Split

__all__ = [
    "IMAGE_NAMES",
    "LABEL_NAMES",
    "NO_LABEL",
    "SPLIT_NAMES",
    "as_fields",
    "as_label",
    "as_numbered",
    "as_splits",
    "as_value",
    "field_names",
    "find_column",
    "named_alike",
]

#: What columns are called, the likeliest first; case and what is no letter or digit do not count.
IMAGE_NAMES = ("filename", "filepath", "path", "image", "imagepath", "imagefile", "imagename", "img", "imgpath", "file", "filenames")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "classid", "labelid", "categoryid", "classname", "labelname", "classlabel")
SPLIT_NAMES = ("split",)

#: For --label-column: no column is the label.
NO_LABEL = "none"

#: Names that a field of a dataset cannot have, or that another field has.
_TAKEN = frozenset({"table", "samples", "keys", "hashes", "rejects", "classes", "rows", "image"})
#: Whole numbers up to here are floats without a loss.
_EXACT = 2**53
#: Whole numbers below this are class numbers as they stand, however few of them occur; others where at least half of them do.
_FEW = 1 << 16


def named_alike(names: Iterable[str], words: Sequence[str]) -> str | None:
    """The column with the first of these names, however it is written."""
    plain = {re.sub(r"[\W_]+", "", name.lower()): name for name in reversed(list(names))}
    return next((plain[word] for word in words if word in plain), None)


def find_column(name: str, names: Sequence[str], option: str, where: str) -> str:
    """The column that an option names.  Raises OptionError with the nearest one where there is none."""
    if name in names:
        return name
    alike = [other for other in names if other.strip().lower() == name.strip().lower()] or difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {show(alike[0])}?" if alike else ""
    shown = ", ".join(map(show, names[:20])) + (", …" if len(names) > 20 else "")
    raise OptionError(f"--{option} {show(name)}: {where} has no such column{hint} (it has {shown})", options=[option])


def field_names(columns: Iterable[str], label: str | None) -> dict[str, str]:
    """The names of the fields that columns become: lower case, `_` for what is no letter or digit, `column_` before what is no name then, or taken.

    Raises OptionError where two become one.
    """
    out: dict[str, str] = {}
    taken = {} if label is None else {LABEL.name: label}
    for column in columns:
        name = re.sub(r"[^a-z0-9]+", "_", column.strip().lower()).strip("_")
        if not re.match("[a-z]", name) or name in _TAKEN or (name in taken and taken[name] == label):
            name = f"column_{name}".rstrip("_")
        name = name[:64]
        if name in taken:
            raise OptionError(
                f"columns {show(taken[name])} and {show(column)} would both be the field {name}: rename one, or choose with --columns",
                options=["columns"],
            )
        taken[name], out[column] = column, name
    return out


def as_label(column: Column, names: Sequence[str] | None = None) -> tuple[npt.NDArray[np.int64], tuple[str, ...], str] | None:
    """(class numbers (N,), -1 where there is no label; class names; how they came about); None for numbers that are no classes.

    Texts are numbered in their order as text, as folders are.  Whole numbers from 0 on stay what they are; others (below -1, or far apart) are
    numbered in their order.  `names`: what the source says that its numbers stand for.
    """
    values, present = column.values, ~column.missing
    if column.unit is not None or (values.dtype.kind == "u" and values.max(initial=0) > np.iinfo(np.int64).max):
        return None
    if column.names is not None:
        return values.astype(np.int64), column.names, "classes in their order as text"
    if values.dtype.kind == "b":
        return np.where(present, values.astype(np.int64), -1), ("false", "true"), "classes false and true"
    if values.dtype.kind == "f":
        if not present.any() or not (np.mod(values[present], 1) == 0).all() or np.abs(values[present]).max() > _EXACT:
            return None
        values = np.where(present, values, 0)  # a tool that keeps whole numbers with gaps as floats wrote them
    numbers = np.where(present, values.astype(np.int64), -1)
    known = np.unique(numbers[numbers != -1])
    if names is not None:
        return (numbers, tuple(names), "classes by the source's names") if not len(known) or 0 <= known[0] <= known[-1] < len(names) else None
    if not len(known) or (known[0] >= 0 and known[-1] < max(_FEW, 2 * len(known))):
        count = int(known[-1]) + 1 if len(known) else 0
        return numbers, tuple(map(str, range(count))), "class numbers as they stand"
    return np.where(numbers == -1, -1, np.searchsorted(known, numbers)), tuple(map(str, known.tolist())), "new numbers in their order"


def as_numbered(labels: npt.NDArray[np.int64], classes: Sequence[str], fixed: Sequence[str], where: Callable[[int], str]) -> npt.NDArray[np.int64]:
    """Class numbers (N,) of `classes` as those of the same names in a map that is `fixed`.  Raises SourceError: a class is not in it."""
    number = {name: i for i, name in enumerate(fixed)}
    place = np.array([*(number.get(name, -1) for name in classes), -1], np.int64)
    out = place[labels]
    if len(lost := np.flatnonzero((out < 0) & (labels >= 0))):
        row = int(lost[0])
        raise SourceError(f"{where(row)}: class {show(classes[labels[row]])} is not in the class map that is given (--classes-from)", row=row)
    return out


def as_fields(
    columns: Iterable[tuple[str, str, Column | str]], where: Callable[[int], str], what: str, asked_of: str | None
) -> tuple[list[Field], list[npt.NDArray[np.generic]], list[str]]:
    """(fields, their values (N,) each, warnings) of columns: name, what its field is called, and the column or why it cannot be held.

    One that cannot be a field is left out with a warning, which calls it `what`; where they were asked for (of a list, say) it is an OptionError.
    """
    fields: list[Field] = []
    arrays: list[npt.NDArray[np.generic]] = []
    warnings: list[str] = []
    for name, called, column in columns:
        made = column if isinstance(column, str) else as_value(column, called, where)
        if isinstance(made, str):
            if asked_of is not None:
                raise OptionError(f"--columns {show(name)}: {asked_of}: {made}", options=["columns"])
            warnings.append(f"{what} {show(name)} is left out: {made}")
            continue
        fields.append(made[0])
        arrays.append(made[1])
        if made[2]:
            warnings.append(made[2])
    return fields, arrays, warnings


def as_value(column: Column, field: str, where: Callable[[int], str]) -> tuple[Field, npt.NDArray[np.generic], str] | str:
    """(field, its values (N,), a line for the summary or ""), or why the column cannot be a field.

    Whole numbers with gaps become float64 with NaN, yes and no with gaps categories; a time with a gap is refused.
    """
    values, missing = column.values, column.missing
    gaps = int(missing.sum())
    first = where(int(missing.argmax())) if gaps else ""
    note = f"{gaps:,} missing in column {show(column.name)} (first: {first})" if gaps else ""
    if column.names is not None:
        return Field(field, "int64", (), "value", categories=Names(column.names)), values, f"{note}: -1" if gaps else ""
    if column.unit is not None:
        return f"a time is missing ({first})" if gaps else (Field(field, "int64", (), "value", unit=column.unit), values, "")
    if values.dtype.kind == "b":
        if not gaps:
            return Field(field, "bool", (), "value"), values, ""
        numbers = np.where(missing, -1, values.astype(np.int64))
        return Field(field, "int64", (), "value", categories=Names(("false", "true"))), numbers, f"{note}: -1"
    if values.dtype.kind in "iu" and gaps:
        if max(abs(int(values.min())), abs(int(values.max()))) > _EXACT:
            return f"a whole number is missing ({first}), and others would lose digits as float64"
        return (
            Field(field, "float64", (), "value"),
            np.where(missing, np.nan, values.astype(np.float64)),
            f"{note}: stored as float64, NaN",
        )
    return Field(field, values.dtype.name, (), "value"), values, f"{note}: NaN" if gaps else ""


def as_splits(names: Sequence[str], numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[Split, ...]]:
    """(rows in the order of their splits, and else as they came (N,); the splits that have any), from the number of each row's split (N,)."""
    order = sorted(range(len(names)), key=lambda i: rank(names[i]))
    place = np.empty(len(names), np.int64)
    place[order] = np.arange(len(names))
    ranks = place[numbers]
    stops = np.cumsum(np.bincount(ranks, minlength=len(names))).tolist()
    splits = [Split(names[i], start, stop) for i, start, stop in zip(order, [0, *stops], stops, strict=False)]
    return np.argsort(ranks, kind="stable"), tuple(split for split in splits if split.stop > split.start)
