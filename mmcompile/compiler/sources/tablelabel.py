"""Hides which column of a table is the label, and how what stands in it becomes class numbers.

A column that is called like one is taken where its values are like classes; one that is asked for, wherever they can be.  Either way it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.columns import LABEL_NAMES, named_alike
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.tablefields import MOST_TEXTS, ColumnKind, Reading, reading_of
from mmcompile.errors import OptionError

__all__ = ["Label", "as_classes", "find_label", "take_label"]


@dataclass(frozen=True)
class Label:
    """How the label is read, the names of its classes, and how they came about in words."""

    reading: Reading
    classes: tuple[str, ...]
    said: str


def find_label(kinds: Mapping[str, ColumnKind], taken: Iterable[str], others: int = 0) -> str | None:
    """The column, of those that are `taken`, that is called like a label and holds texts, whole numbers or yes and no.

    Beside it there is another one, or fields of several columns, of which there are `others`.
    """
    names = [name for name in taken if kinds[name].dtype]
    name = named_alike(names, LABEL_NAMES)
    if name is None or len(names) + others < 2:
        return None
    kind = kinds[name]
    return name if kind.is_text or (kind.is_number and not kind.dtype.startswith("float")) else None


def take_label(
    column: str,
    kind: ColumnKind,
    texts: Callable[[], tuple[str, ...]],
    values: Callable[[Reading], Iterable[npt.NDArray[np.generic]]],
    *,
    asked: bool,
) -> Label | str:
    """The label that a column is, or, where it was not `asked` for, why it is none; `texts` and `values` look at its cells.

    Texts are numbered in their order as text.  Whole numbers from 0 to 65535 stay as they are; others are numbered in their order.  Not asked for,
    they have to begin at 0 or 1, and at least half of them to occur.  Raises OptionError.
    """
    if kind.is_text:
        found = texts()
        return Label(Reading(column, "int32", categories=found), found, "texts in their order")
    if not kind.is_number:
        raise OptionError(f"--label-column {show(column)} holds {kind}: expected texts, whole numbers, or true and false", options=["label-column"])
    reading = reading_of(column, kind)
    if kind.dtype == "bool":
        return Label(reading, ("false", "true"), "false and true")
    known: npt.NDArray[np.generic] = np.zeros(0, reading.dtype)
    for part in values(reading):
        held = part[~np.isnan(part)] if part.dtype.kind == "f" else part
        known = np.union1d(known, held)
        if len(known) > MOST_TEXTS or (held.dtype.kind == "f" and not (np.mod(held, 1) == 0).all()):
            break
    low, high = (int(known[0]), int(known[-1])) if len(known) and np.isfinite(known).all() else (0, 0)
    if len(known) > MOST_TEXTS or high > np.iinfo(np.int64).max or (known.dtype.kind == "f" and not (np.mod(known, 1) == 0).all()):
        if asked:
            raise OptionError(f"--label-column {show(column)}: expected at most {MOST_TEXTS:,} different whole numbers", options=["label-column"])
        return "its numbers are not like those of classes"
    if not asked and not (low in (0, 1) and high < MOST_TEXTS and 2 * len(known) >= high + 1 - low):
        return "its numbers are not like those of classes"
    if 0 <= low <= high < MOST_TEXTS:
        return Label(reading, tuple(map(str, range(high + 1))), "numbers as they stand")
    numbers = tuple(int(value) for value in known)
    return Label(Reading(column, reading.dtype, numbers=numbers), tuple(map(str, numbers)), "new numbers in their order")


def as_classes(values: npt.NDArray[np.generic], reading: Reading) -> npt.NDArray[np.int64]:
    """What stands in the column of the label as class numbers (N,); a gap is -1."""
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    whole = np.where(missing, 0, values).astype(np.int64)
    if reading.numbers is not None:
        whole = np.searchsorted(np.array(reading.numbers, np.int64), whole).astype(np.int64)
    return np.where(missing, np.int64(-1), whole)
