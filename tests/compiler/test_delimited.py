"""Tables in text files: cells come back as they were written, in whatever dialect, and anything else is one line."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmcompile.compiler.sources import delimited
from mmcompile.compiler.sources.cells import Cells, Column, typed
from mmcompile.compiler.sources.celltext import as_times, as_values
from mmcompile.compiler.sources.delimited import TextTable
from mmcompile.compiler.sources.manifest import ManifestSource
from mmcompile.compiler.sources.tablecells import CellKinds
from mmcompile.errors import OptionError, SourceError
from tests.compiler.builds import write

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def table(data: bytes, name: str = "t.csv") -> TextTable:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(data)
        made = TextTable(f"{folder}/{name}")
        made.rows = columns(made)  # type: ignore[attr-defined]
    return made


def columns(made: TextTable) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for block in made.blocks():
        for name, cells in block.columns.items():
            out.setdefault(name, []).extend(cells)
    return out


@MANY
@given(
    st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=6),
    st.sampled_from(",;\t|"),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
)
def test_quoted_cells_come_back_as_they_were_written(rows: list[tuple[str, str, str]], between: str, end: str, encoding: str, quoting: Any) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=between, lineterminator=end, quoting=quoting)
    writer.writerow(["path", "a", "b"])
    writer.writerows([(f"{i}.x", *row[1:]) for i, row in enumerate(rows)])
    made = table(text.getvalue().encode(encoding))
    assert made.names == ("path", "a", "b")
    assert made.rows == {  # type: ignore[attr-defined]
        "path": [f"{i}.x" for i in range(len(rows))],
        "a": [row[1] for row in rows],
        "b": [row[2] for row in rows],
    }


@MANY
@given(st.lists(st.dictionaries(CELL, CELL | st.integers(-9, 9) | st.none() | st.booleans()), min_size=1, max_size=6))
def test_json_lines_come_back_as_text(rows: list[dict[str, Any]]) -> None:
    made = table("\n".join(map(json.dumps, rows)).encode(), "t.jsonl")
    names = {name for row in rows for name in row}
    expected = {name: ["" if row.get(name) is None else str(row[name]) for row in rows] for name in names}
    assert made.rows == expected  # type: ignore[attr-defined]


def test_blocks_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS", 3)
    for rows in (1, 2, 3, 4, 9, 10):
        made = table(b"a,b\n" + b"".join(b"%d,x\n" % i for i in range(rows)))
        assert made.rows["a"] == [str(i) for i in range(rows)]  # type: ignore[attr-defined]


def test_a_first_line_longer_than_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_HEAD_BYTES", 64)
    long = json.dumps({"path": "0.png", "text": "x" * 500})
    assert table(f"{long}\n{long}\n".encode(), "t.jsonl").rows["path"] == ["0.png"] * 2  # type: ignore[attr-defined]
    made = table(b"path," + b"x" * 100 + b"\n0.png,1\n1.png,2\n")
    assert made.rows["path"] == ["0.png", "1.png"]  # type: ignore[attr-defined]


PIECES = st.sampled_from(
    [b"path", b"label", b"0.png", b",", b";", b"\t", b'"', b"\n", b"\r", b"\0", b"\xff", b"{", b"}", b":", b"1", b" ", b"[", b"\\u"]
)


@MANY
@given(st.lists(PIECES, max_size=30), st.sampled_from(["t.csv", "t.tsv", "t.jsonl"]))
def test_any_bytes_are_a_list_or_an_error_of_one_line(pieces: list[bytes], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"0.png": b"x", name: b"".join(pieces)})
        said, keys = "", [b"0.png"]
        try:
            keys = list(ManifestSource(f"{folder}/{name}").scan().keys)
        except (SourceError, OptionError) as error:
            said = str(error)
    assert len(said.splitlines()) <= 1
    assert keys == [b"0.png"]


def column(cells: list[str], *, parts: int = 1, names: bool = False) -> Column:
    made = Cells("x", keeps_text=True)
    for part in np.array_split(np.array(cells, object), parts):
        made.extend(part.tolist())
    found = typed(made, str, names=names)
    assert isinstance(found, Column)
    return found


@MANY
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 3))
def test_whole_numbers_are_kept_exactly(numbers: list[int], parts: int) -> None:
    found = column([str(number) for number in numbers], parts=parts)
    assert (found.values.dtype, found.values.tolist()) == (np.int64, numbers)


@MANY
@given(st.lists(st.floats(allow_nan=False) | st.none(), min_size=1).filter(lambda cells: any(cell is not None for cell in cells)), st.integers(1, 3))
def test_floats_are_kept_exactly(numbers: list[float | None], parts: int) -> None:
    found = column(["" if number is None else repr(number) for number in numbers], parts=parts)
    assert found.missing.tolist() == [number is None for number in numbers]
    assert [None if value != value else float(value) for value in found.values.tolist()] == numbers  # type: ignore[arg-type]


@MANY
@given(st.lists(CELL, min_size=1))
def test_texts_are_numbered_in_their_order(cells: list[str]) -> None:
    cells = [f"t{cell}" if cell else "" for cell in cells] + ["text"]
    found = column(cells)
    assert found.names == tuple(sorted({cell for cell in cells if cell}))
    assert [found.names[number] if number >= 0 else "" for number in found.values.tolist()] == cells


@pytest.mark.parametrize("cell", ["1_000", "1e", "0x1", "\uff11", "--1", "1,5", "nan1", "1 2", "tru", "2020-1-1", "2020-01-01T"])
def test_what_only_looks_like_a_number_is_text(cell: str) -> None:
    assert column(["1", cell], names=True).names == tuple(sorted(["1", cell]))


TIMES = ("2020-01-01", "2020-01-01 00:00Z", "2020-01-01T00:00:00,25+01:00", "2020-01-01T00:00:00.123456-0130", "2020-02-31", "0600-01-01T00:00:00.1")
NUMBERS = ("1", " 2\t", "-3", "18446744073709551615", "1.5", "1e400", "INF", "+nan", "1_0", "true", "FALSE", "x", " ")
WORDS = st.sampled_from(["", "NA", "none", ".", "-nan", "NaN", *NUMBERS, *TIMES])


@MANY
@given(st.lists(WORDS, min_size=1, max_size=4))
def test_lists_and_tables_read_cells_alike(cells: list[str]) -> None:
    listed, kinds = Cells("x", keeps_text=True), CellKinds()
    listed.extend(cells)
    kinds.extend(cells)
    kind, found = kinds.kind(), typed(listed, str, names=True)
    if isinstance(kind, str) or isinstance(found, str):
        said = "" if isinstance(found, Column) else found
        why = ("over 64 bits", "how far from UTC", "no calendar", "beyond what 64 bits hold", "beyond float64", "no value in it")
        assert any(word in said for word in why)
        if isinstance(kind, str):  # a table reads values later, and says then what no calendar or dtype has
            assert "64 bits" in said or kind.startswith(said)  # it also says in which row
        return
    assert found.unit == kind.unit
    assert (found.names is not None) == kind.is_text
    if not kind.is_text:
        assert found.values.dtype.name == kind.dtype
        plain = [cell for cell, gap in zip(cells, found.missing.tolist(), strict=True) if not gap]
        same = found.values[~found.missing]
        assert same.tolist() == (as_values(plain, kind.dtype) if kind.unit is None else as_times(plain, kind.unit)).tolist()


@pytest.mark.parametrize("cell", ["2020-01-01T00:00+24:00", "2020-01-01T00:00+02:60", "2020-01-01T00:00-0260"])
def test_an_offset_that_is_none_makes_no_time(cell: str) -> None:
    assert column([cell], names=True).names == (cell,)


def test_a_name_that_stands_twice_in_a_line_of_json_is_refused() -> None:
    with pytest.raises(SourceError, match="line 2: 'path' stands in it twice: give it one value"):
        table(b'{"path": "0.png"}\n{"path": "0.png", "path": "1.png"}\n', "t.jsonl")


def test_a_first_row_with_a_gap_is_no_header() -> None:
    made = table(b"1,NA,3\n4,5,6\n")
    assert (made.names, made.header) == (("1", "2", "3"), False)
