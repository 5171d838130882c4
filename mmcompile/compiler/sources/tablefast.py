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

__all__ = ["as_numpy", "first_gap", "parse_lines"]


#: Numbers that Arrow calls otherwise than numpy.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def as_numpy(column: Any) -> npt.NDArray[Any]:
    """The numbers of an Arrow array (N,), a view where it has no gap; gaps are NaN, those of whole numbers make float64.

    Arrow's own `to_numpy` imports pandas where that is installed, which takes longer than reading many a table.
    """
    word = str(column.type)
    if word == "halffloat" and column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if column.null_count:
        column = (column if word in ("float", "double") else column.cast("float64")).fill_null(float("nan"))
    kind = _DTYPES.get(str(column.type), str(column.type))
    if kind == "bool":
        column = column.cast("uint8")
    dtype = np.dtype(kind)
    return np.frombuffer(column.buffers()[1] or b"", dtype, len(column), column.offset * dtype.itemsize)


def first_gap(column: Any) -> int:
    """The first row of an Arrow array that has no value; -1 where all have one."""
    import pyarrow.compute as pc

    return int(pc.index(column.is_null(), True).as_py()) if column.null_count else -1


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
