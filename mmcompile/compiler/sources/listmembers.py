"""Hides how arrays, texts and lists beside the images of an archive become fields: `.npy` and `.txt` members, and lists in `.json` members.

What does not fit is a fault of its row, as in a column of a list.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.cells import Column
from mmcompile.compiler.sources.further import Settled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.numbers import Misfit, parsed
from mmcompile.compiler.sources.roles import Role, Seen, is_called_boxes, roles_of
from mmcompile.compiler.sources.valuecolumns import Several, read_columns
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.fields import Field

__all__ = ["member_fields"]

#: An array of more bytes is no value of a sample unless somebody says so: all of them are held while items are listed.
_MOST_BYTES = 1 << 16
_WHAT_NPY_RAISES = (ValueError, TypeError, SyntaxError, OverflowError, EOFError, OSError, MemoryError)

_Array = npt.NDArray[Any]
_Read = Callable[[bytes], bytes]
_Where = Callable[[int], str]


class _Columns:
    """Cells of N samples by column, as `read_columns` asks for them."""

    def __init__(self, cells: Mapping[str, Any], rows: int) -> None:
        self._cells, self.stops = cells, [rows]

    def cells(self, name: str) -> Iterable[Any]:
        return self._cells[name]  # type: ignore[no-any-return]

    def paths(self, name: str) -> Keys:
        return Keys.of(self._cells[name])

    def column(self, name: str, where: _Where, *, names: bool = False, text: bool = False) -> Column | str:
        return "lists"


def member_fields(
    settled: Settled, lists: Mapping[str, Keys], options: Mapping[str, FieldOptions], wished: Sequence[str], read: _Read, where: _Where
) -> tuple[Several, list[str], list[str]]:
    """(the fields, names in `lists` that are none, warnings): of arrays and texts, which `read` gives, and of `lists`, as JSON, by name.

    A list is a field where its name and its first value say what it is, where it is `wished`, or was asked for in `options`.  Raises SourceError,
    OptionError.
    """
    rows = len(settled.keys)
    cells: dict[str, Any] = dict(lists)
    out, roles, warnings = Several(), list[Role](), list[str]()
    for name, keys in settled.arrays.items():
        made = _arrays(name, keys, options.get(name, FieldOptions()), read, where, out)
        if isinstance(made, str):
            warnings.append(f".npy members {show(name)} are left out: {made}")
        elif made is not None:
            cells[name] = made[1]
            roles.append(made[0])
    for name, keys in settled.texts.items():
        cells[name] = Keys.of(_data(read, key) for key in keys)
        roles.append(Role(name, name, "text", options.get(name, FieldOptions())))
    asked = {name: own for name, own in options.items() if name in lists}
    guessed = [name for name, keys in lists.items() if _plausible(name, keys)]
    columns = {name: _looks(keys) for name, keys in lists.items()}
    found = roles_of(columns, asked, guessed, [], "the .json of these samples")
    known = {role.column for role in found}
    found += [Role(name, name, "value", FieldOptions(), lists=True) for name in wished if name in lists and name not in known]
    roles += [replace(role, lists=True) if role.kind == "class" else role for role in found]
    more = read_columns(_Columns(cells, rows), roles, np.arange(rows), {}, where)
    out.fields += more.fields
    out.forms += more.forms
    out.counts |= more.counts
    for row, why in more.faults.items():
        out.faults.setdefault(row, why)
    return out, sorted(lists.keys() - {role.column for role in roles}), warnings


def _plausible(name: str, keys: Keys) -> bool:
    """Is the first value of a list that is called so what its name says?"""
    if not is_called_boxes(name):
        return True
    first = _first(keys)
    box = first[0] if isinstance(first, list) and isinstance(first[0], list) else first
    return isinstance(box, list) and len(box) == 4 and all(isinstance(v, int | float) for v in box)


def _looks(keys: Keys) -> Callable[[], Seen]:
    first = _first(keys)
    objects = isinstance(first, dict) or (isinstance(first, list) and isinstance(first[0], dict))
    return lambda: Seen(lists=not objects, objects=objects)


def _first(keys: Keys) -> Any:
    """The first value that holds something; None for none."""
    for key in keys:
        try:
            if key and (value := parsed(key)):
                return value
        except Misfit:
            pass
    return None


def _arrays(name: str, keys: Keys, own: FieldOptions, read: _Read, where: _Where, out: Several) -> tuple[Role, list[Any]] | str | None:
    """The column that arrays are, or why they are none; those of one shape, of which nothing was said, go to `out` themselves."""
    first = next((found for key in keys if not isinstance(found := _array(_data(read, key)), str)), None)
    if first is None:
        return "none of them is an array"
    kind = own.kind or "value"
    if first.nbytes > _MOST_BYTES and own == FieldOptions():
        return f"{first.nbytes:,} bytes each: --field {name}:kind=image (or mask, volume) takes them as pixels, kind=value as values all the same"
    arrays: list[_Array | None] = []
    for row, key in enumerate(keys):
        found = _array(_data(read, key))
        if isinstance(found, str):
            out.faults.setdefault(row, f"{name}: {found}")
        arrays.append(None if isinstance(found, str) else found)
    there = [(row, array) for row, array in enumerate(arrays) if array is not None]
    other = next(((row, array) for row, array in there if (array.shape, array.dtype) != (first.shape, first.dtype)), None)
    if kind == "value" and own in (FieldOptions(), FieldOptions(kind="value")):
        if other is None:
            values = np.zeros((len(arrays), *first.shape), first.dtype.newbyteorder("<"))
            for row, array in there:
                values[row] = array
            out.fields.append((Field(name, first.dtype.name, first.shape, "value"), values))
            return None
        if other[1].ndim != 1 or first.ndim != 1:
            row, array = other
            return (
                f"they differ: {first.dtype} {first.shape}, and {array.dtype} {array.shape} in {where(row)}; --field {name}:shape=… takes one shape"
            )
    if kind == "value" and own.max is None and own.shape is None and other is None:
        own = replace(own, shape=first.shape or (1,))
    cells = [None if array is None else array.tolist() for array in arrays]
    if own.shape is not None and kind == "value":
        for row, array in there:
            if array.shape != own.shape and not (array.shape == () and math.prod(own.shape) == 1):
                out.faults.setdefault(row, f"{name}: an array of shape {array.shape}, expected {own.shape}")
    return Role(name, name, kind, own, lists=True), cells


def _array(data: bytes) -> _Array | str:
    """The numbers in a `.npy` file, or what is wrong with it."""
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except _WHAT_NPY_RAISES:
        return "no .npy file of numbers, or not all of it"
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or found.dtype.itemsize > 8 or not found.size:
        return "no .npy file of numbers" if not isinstance(found, np.ndarray) else f"an array of {found.dtype} {found.shape}; expected numbers"
    return found


def _data(read: _Read, key: bytes) -> bytes:
    try:
        return read(key)
    except OSError as error:
        raise SourceError(f"cannot read {show(as_text(key))}: {error.strerror or error}", path=as_text(key)) from error
