"""Hides how plain lines of text are parsed in one call: by pyarrow, where it is installed, as far as it says the same as reading them one by one.

What it does not take (quotes, lone carriage returns, a row of another length, a cell that is no such number) is nobody's error here: it is read the
slow way, which says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["parse_lines"]


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
