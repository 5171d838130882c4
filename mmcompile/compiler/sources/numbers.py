"""Hides how the values of cells are taken for numbers of a dtype, or for names: what does not fit is a fault that says so, and never another value.

Values come as JSON has them, or as the text of a cell.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.cast import bfloat16
from mmcompile.compiler.sources.cells import Column
from mmcompile.compiler.sources.celltext import GAPS
from mmcompile.compiler.sources.columns import as_label
from mmcompile.format.fields import DTYPES

__all__ = ["Misfit", "NamesOf", "Numbers", "flat", "is_plain", "parsed", "shown"]

#: Whole numbers up to here are floats without a loss.
_EXACT = 2**53
_BETWEEN = re.compile(r"[\s,;|]+")


class Misfit(Exception):
    """A value that does not fit: its text says which, and why."""


def shown(value: Any) -> str:
    """A value as a message has it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text[:60] + "…" * (len(text) > 60)) if isinstance(value, str) else text[:60] + "…" * (len(text) > 60)


def parsed(cell: Any) -> Any:
    """The value of a cell: what JSON it is, or numbers with something between them; else the text.  None for no value.  Raises Misfit."""
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            raise Misfit(f"{cell[:40]!r} is no UTF-8") from None
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    if text in GAPS:
        return None
    if text[0] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Misfit(f"{shown(text)} is no list that JSON knows") from None
    parts = [part for part in _BETWEEN.split(text) if part]
    try:
        numbers = [_number(part) for part in parts]
    except Misfit:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def flat(value: Any) -> list[Any]:
    """The members of a list of lists, as deep as it is; of what is no list that alone."""
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for member in value for inner in (flat(member) if isinstance(member, list | tuple) else (member,))]


def is_plain(text: str) -> bool:
    """Could this be a number as files write it: of ASCII, and without the `_` between digits that Python takes?"""
    return text.isascii() and "_" not in text


def _number(value: Any) -> float | int:
    """A number, NaN for no value.  Raises Misfit."""
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool):
        return int(value)
    if value is None or (isinstance(value, str) and value.strip() in GAPS):
        return math.nan
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("true", "false"):
            return int(text.lower() == "true")
        if not is_plain(text):
            raise Misfit(f"{shown(value)} is no number")
        try:
            return int(text)
        except ValueError:
            try:
                number = float(text)
            except ValueError:
                raise Misfit(f"{shown(value)} is no number") from None
            if math.isinf(number) and "n" not in text.lower():
                raise Misfit(f"{text:.40} is beyond float64") from None
            return number
    elif isinstance(value, Decimal):
        return float(value) if value.is_nan() else int(value) if value == value.to_integral_value() else float(value)
    raise Misfit(f"{shown(value)} is no number")


class Numbers:
    """Numbers of a dtype, as they come; None: of int64 where all are whole and there, else of float64."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype
        self._whole = True
        kind = DTYPES[dtype].kind if dtype not in (None, "bfloat16") else "f"
        self._ints = kind in "iub"
        code = "d" if not self._ints else "Q" if dtype == "uint64" else "q"
        self._values: array[Any] = array(code)
        if self._ints and dtype != "bool":
            limits = np.iinfo(DTYPES[str(dtype)])
            self._low, self._high = int(limits.min), int(limits.max)
        elif self._ints:
            self._low, self._high = 0, 1
        else:
            self._largest = float(np.finfo(DTYPES[dtype]).max) if dtype in ("float16", "float32") else 3.3895e38 if dtype == "bfloat16" else math.inf

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, values: Iterable[Any]) -> None:
        """More of them, all or none.  Raises Misfit."""
        made = [self._fit(value) for value in values]
        self._values.extend(made)

    def gap(self, count: int) -> None:
        """Room for values that are none: their item is a reject."""
        self._values.extend([0] * count)

    def _fit(self, value: Any) -> float | int:
        number = _number(value)
        if not self._ints:
            if isinstance(number, int) and self.dtype is None and abs(number) > _EXACT:
                raise Misfit(f"{shown(number)} loses digits among float64: give dtype=int64")
            try:
                out = float(number)
            except OverflowError:
                raise Misfit(f"{shown(number)} is beyond float64") from None
            if math.isfinite(out) and abs(out) > self._largest:
                raise Misfit(f"{shown(number)}, and dtype={self.dtype} ends at {self._largest:g}")
            self._whole = self._whole and isinstance(number, int)
            return out
        if isinstance(number, float):
            if not number.is_integer():
                raise Misfit(f"{'no value' if math.isnan(number) else number}, and dtype={self.dtype} holds whole numbers")
            number = int(number)
        if not self._low <= number <= self._high:
            raise Misfit(f"{shown(number)}, and dtype={self.dtype} holds {self._low} to {self._high}")
        return number

    def made(self) -> tuple[str, npt.NDArray[Any]]:
        """(dtype of the field, the values (M,) as they are stored)."""
        values = np.frombuffer(self._values, self._values.typecode) if len(self._values) else np.empty(0, self._values.typecode)
        if self.dtype is None:
            return ("int64", values.astype(np.int64)) if self._whole and len(values) else ("float64", values)
        if self.dtype == "bfloat16":
            return self.dtype, bfloat16(values.astype(np.float32))
        return self.dtype, values.astype(DTYPES[self.dtype])


class NamesOf:
    """Names, or numbers of names, as they come; `known`: what numbers stand for, where the source says it."""

    def __init__(self, known: Sequence[str] | None = None) -> None:
        self._known = None if known is None else tuple(known)
        self._seen: dict[str, int] = {}
        self._numbers = array("q")
        self._named: bool | None = None

    def extend(self, values: Sequence[Any]) -> None:
        """More of them, all or none.  Raises Misfit."""
        out = []
        for value in values:
            if self._named is None:
                self._named = isinstance(value, str)
            if isinstance(value, str) != self._named:
                raise Misfit(f"{shown(value)} among {'names' if self._named else 'numbers'} of classes")
        for value in values:
            if isinstance(value, str):
                out.append(self._seen.setdefault(value, len(self._seen)))
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if type(value) is not int or not 0 <= value < (len(self._known) if self._known else 1 << 31):
                raise Misfit(f"{shown(value)} is no number of a class" + (f": there are {len(self._known)}" if self._known else ""))
            out.append(value)
        self._numbers.extend(out)

    def made(self) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        """(numbers of names (M,), the names): in their order as text, or as the source numbers them."""
        numbers = np.frombuffer(self._numbers, np.int64) if len(self._numbers) else np.empty(0, np.int64)
        if self._named:
            names = tuple(sorted(self._seen))
            place = np.empty(len(names), np.int64)
            place[[self._seen[name] for name in names]] = np.arange(len(names))
            if self._known and set(names) <= set(self._known):
                at = np.array([self._known.index(name) for name in names], np.int64)
                return at[place[numbers]], self._known
            return place[numbers], names
        if self._known is not None:
            return numbers, self._known
        made = as_label(Column("", numbers, np.zeros(len(numbers), bool)))
        return (numbers, ()) if made is None else made[:2]
