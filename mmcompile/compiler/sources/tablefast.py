"""Hides how plain lines of text are parsed in one call: by pyarrow, where it is installed, as far as it says the same as reading them one by one.

What it does not take (quotes, lone carriage returns, a row of another length, a cell that is no such number) is nobody's error here: it is read the
slow way, which says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["as_numpy", "first_gap", "has_infinite", "parse_lines"]


#: Numbers that Arrow calls otherwise than numpy.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def as_numpy(column: Any, gap: float | None = None) -> npt.NDArray[Any]:
    """The numbers of an Arrow array (N,), a view where it has no gap; gaps are `gap`, None: NaN, and those of whole numbers then make float64.

    Arrow's own `to_numpy`, and its scalars, import pandas where that is installed, which takes longer than reading many a table.
    """
    kind = _DTYPES.get(str(column.type), str(column.type))
    data = column.buffers()[1] or b""
    if kind == "bool":
        values: npt.NDArray[Any] = _bits(data, column) != 0
    else:
        dtype = np.dtype(kind)
        values = np.frombuffer(data, dtype, len(column), column.offset * dtype.itemsize)
    if not column.null_count:
        return values
    if gap is None and values.dtype.kind != "f":
        values = values.astype(np.float64)
    return np.asarray(np.where(_bits(column.buffers()[0], column) != 0, values, values.dtype.type(np.nan if gap is None else gap)))


def _bits(data: Any, column: Any) -> npt.NDArray[np.uint8]:
    """The bits (N,) that such a buffer of an Arrow array has for its cells."""
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[column.offset : column.offset + len(column)]


def first_gap(column: Any) -> int:
    """The first row of an Arrow array that has no value; -1 where all have one."""
    return int(np.argmin(_bits(column.buffers()[0], column))) if column.null_count else -1


def has_infinite(column: Any) -> bool:
    """Is a number of an Arrow array of floats infinite?"""
    return bool(np.isinf(as_numpy(column)).any())


@functools.cache
def _arrow() -> Any:
    """pyarrow, or None where it is not installed."""
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError:
        return None
    return pyarrow


def parse_lines(data: bytes, names: Sequence[str], types: Mapping[str, str], between: str, gaps: Sequence[str]) -> dict[str, Any] | None:
    """Columns of whole lines as Arrow arrays of these types, in which `gaps` are null among numbers; None: they have to be read the slow way."""
    pa = _arrow()
    if pa is None or b'"' in data or b"\0" in data or b"0x" in data or b"0X" in data or data.count(b"\r") != data.count(b"\r\n"):
        return None
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(names)),
            pa.csv.ParseOptions(delimiter=between, quote_char=False),
            pa.csv.ConvertOptions(check_utf8=True, column_types=dict(types), null_values=list(gaps), include_columns=list(types)),
        )
    except pa.ArrowInvalid:
        return None
    if not table.num_rows:
        return None
    return {name: table.column(name).combine_chunks() for name in types}
