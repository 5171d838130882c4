"""Tables of numbers: what columns become, groups, order, splits, and that every value comes out as it stands in the file."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmcompile import MMapShardDataset
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources import tablefast
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.table import TableSource, TableWishes
from mmcompile.errors import BuildError, OptionError, SourceError
from mmcompile.format.describe import describe
from mmcompile.format.index import load_index
from mmcompile.format.sampletable import samples_table
from tests.compiler.builds import dataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def read_all(source: RowSource) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of a source, in odd ranges, as a worker reads them."""
    scan = source.scan()
    bounds = [*range(0, scan.rows, 7), scan.rows]
    found = [source.read(a, b) for a, b in itertools.pairwise(bounds)]
    return {f.name: np.concatenate([part[f.name] for part in found]) for f in scan.fields}


def table(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def source(path: str | Path, **wishes: Any) -> TableSource:
    return TableSource([str(path)], TableWishes(**wishes))


def parquet(path: Path, columns: dict[str, Any], rows: int = 1 << 20) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return str(path)


# ---------------------------------------------------------------- the real layout


def bars() -> Path:
    root = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if not root:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    return Path(root) / "bars"


@pytest.mark.parametrize("name", ["GOOG.csv", "GOOG.parquet", "by-symbol"])
def test_real_bars_come_out_as_they_were_given(tmp_path: Path, name: str) -> None:
    folder = bars()
    expected = json.loads((folder / "expected.json").read_text())["GOOG"]
    report = build(source(folder / name), tmp_path / "out", workers=1)
    assert report.samples == expected["rows"]
    ds = MMapShardDataset(tmp_path / "out")
    index, _ = load_index(tmp_path / "out")
    x, time = index.fields
    assert [c.lower() for c in (x.columns.listed if x.columns else ())] == [c.lower() for c in expected["columns"][1:]]
    assert x.dtype == "float64"
    assert time.dtype == "int64"
    assert time.unit == ("D" if name == "GOOG.csv" else "ms")
    for row, words in ((0, expected["first"]), (-1, expected["last"])):
        values, when = ds[len(ds) + row if row < 0 else row]
        assert [float(v) for v in values] == [float(word) for word in words[1:]]
        assert np.datetime64(int(when), time.unit) == np.datetime64(words[0])
    want = np.load(folder / "GOOG-float64.npy")
    assert np.array_equal(np.stack([ds[i][0].numpy() for i in range(len(ds))]), want)


def test_real_bars_as_float32_count_the_digits_that_are_lost(tmp_path: Path) -> None:
    report = build(source(bars() / "GOOG.csv"), tmp_path / "out", preprocess=RowPreprocess(dtype="float32"), workers=1)
    assert any("lost" in words for words in report.counts)


# ---------------------------------------------------------------- columns


def test_numbers_of_one_kind_are_one_array_with_the_names_of_columns(tmp_path: Path) -> None:
    found = source(table(tmp_path / "a.csv", "ts,open,volume\n2020-01-01 00:00,1.5,3\n2020-01-01 00:01,2,9007199254740992\n"))
    scan = found.scan()
    x, ts = scan.fields
    assert (x.name, x.dtype, x.shape, x.columns.listed if x.columns else ()) == ("x", "float64", (2,), ("open", "volume"))
    assert (ts.name, ts.dtype, ts.unit) == ("ts", "int64", "s")
    values = found.read(0, 2)
    assert values["x"].tolist() == [[1.5, 3.0], [2.0, 9007199254740992.0]]
    assert values["ts"].tolist() == [1577836800, 1577836860]


def test_whole_numbers_that_a_float_would_blur_make_each_column_a_field(tmp_path: Path) -> None:
    found = source(table(tmp_path / "a.csv", "open,id\n1.5,9007199254740993\n2,1\n"))
    scan = found.scan()
    assert [(f.name, f.dtype, f.shape) for f in scan.fields] == [("open", "float64", ()), ("id", "int64", ())]
    assert any("without a loss (id beside float64)" in line for line in scan.warnings)
    assert found.read(0, 1)["id"].tolist() == [9007199254740993]


def test_columns_choose_and_join(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "a,b,c,name\n1,2.5,3,x\n4,5,6,y\n")
    found = source(path, columns=("name", "y=c+a", "b"))
    fields = found.scan().fields
    assert [(f.name, f.dtype, f.shape) for f in fields] == [("name", "int32", ()), ("y", "int64", (2,)), ("b", "float64", ())]
    assert {k: v.tolist() for k, v in found.read(0, 2).items()} == {"name": [0, 1], "y": [[3, 1], [6, 4]], "b": [2.5, 5.0]}


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (("d",), "no such column"),
        (("a", "y=a+b"), "stands in it twice"),
        (("y=a+name",), "column name holds texts"),
        (("a", "A"), "no such column|twice"),
    ],
)
def test_columns_that_cannot_be_are_refused(tmp_path: Path, columns: tuple[str, ...], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        source(table(tmp_path / "a.csv", "a,b,c,name\n1,2.5,3,x\n4,5,6,y\n"), columns=columns).scan()


# ---------------------------------------------------------------- groups, order, splits

LONG = "symbol,ts,close\nB,2020-01-01,1\nA,2020-01-01,2\nB,2020-01-02,3\nA,2020-01-02,4\nA,2020-01-03,5\nB,2020-01-03,6\n"


def test_a_folder_of_tables_is_a_group_a_file(tmp_path: Path) -> None:
    table(tmp_path / "b.csv", "v\n1\n2\n")
    table(tmp_path / "a.csv", "v\n3\n")
    table(tmp_path / "_notes.csv", "x\n")
    table(tmp_path / "README.md", "x\n")
    found = source(tmp_path)
    scan = found.scan()
    assert (scan.groups, scan.stops.tolist()) == (("a", "b"), [1, 3])
    assert scan.counts == {"left out (.md)": 1}
    assert read_all(found)["x"].tolist() == [[3], [1], [2]]


def test_hive_folders_are_groups(tmp_path: Path) -> None:
    for symbol, part, values in (("X", 0, [1, 2]), ("X", 1, [3]), ("A%20B", 0, [4])):
        parquet(tmp_path / f"symbol={symbol}" / f"part-{part}.parquet", {"v": values})
    found = source(tmp_path)
    scan = found.scan()
    assert (scan.groups, scan.stops.tolist()) == (("A B", "X"), [1, 4])
    assert read_all(found)["x"].tolist() == [[4], [1], [2], [3]]
    assert source(tmp_path, group_by="symbol").scan().groups == ("A B", "X")


def test_one_table_of_several_series_is_refused_with_what_to_say(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"row 2 of .*ts stands still.*--group-by symbol --order-by ts"):
        source(table(tmp_path / "a.csv", LONG)).scan()
    assert source(tmp_path / "a.csv", order_by="none").scan().rows == 6


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_groups_by_a_column_in_the_order_of_another(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{form}"
    if form == "csv":
        table(path, LONG)
    else:
        parquet(
            path,
            {
                "symbol": ["B", "A", "B", "A", "A", "B"],
                "ts": pa.array(np.array(["2020-01-01", "2020-01-01", "2020-01-02", "2020-01-02", "2020-01-03", "2020-01-03"], "datetime64[D]")),
                "close": [1, 2, 3, 4, 5, 6],
            },
            rows=2,
        )
    found = source(path, group_by="symbol", order_by="ts")
    scan = found.scan()
    assert (scan.groups, scan.stops.tolist()) == (("A", "B"), [3, 6])
    assert [f.name for f in scan.fields] == ["x", "ts"]
    assert read_all(found)["x"].ravel().tolist() == [2, 4, 5, 1, 3, 6]


def test_many_short_runs_are_sorted_aside_and_read_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 3000
    columns = {"g": rng.integers(0, 5, n), "ts": rng.permutation(n), "v": rng.random(n)}
    path = parquet(tmp_path / "a.parquet", columns, rows=700)
    found = source(path, group_by="g", order_by="ts", columns=("v", "ts", "g"))
    values = read_all(found)
    order = np.lexsort((columns["ts"], columns["g"]))
    for name, array in columns.items():
        assert np.array_equal(values[name], array[order])


def test_splits_by_time_hold_groups_in_order(tmp_path: Path) -> None:
    table(tmp_path / "A.csv", "ts,v\n2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n")
    table(tmp_path / "B.csv", "ts,v\n2020-01-02,4\n2020-01-03,5\n2020-01-04,6\n")
    found = source(tmp_path, split_by="ts=2020-01-02,2020-01-03")
    scan = found.scan()
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 1), ("val", 1, 3), ("test", 3, 6)]
    assert (scan.groups, scan.stops.tolist()) == (("A", "B") * 3, [1, 1, 2, 3, 4, 6])
    assert read_all(found)["x"].ravel().tolist() == [1, 2, 4, 3, 5, 6]


def test_more_cuts_number_the_splits_and_none_may_be_empty(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "t,v\n1,1\n2,2\n3,3\n4,4\n")
    scan = source(path, split_by="t=2,3,4").scan()
    assert [s.name for s in scan.splits] == ["part0", "part1", "part2", "part3"]
    assert [f.name for f in scan.fields] == ["v", "t"] or [f.name for f in scan.fields] == ["x", "t"]
    with pytest.raises(OptionError, match="no row is in split train"):
        source(path, split_by="t=1").scan()
    with pytest.raises(OptionError, match="cuts that rise"):
        source(path, split_by="t=3,2").scan()


@pytest.mark.parametrize(
    ("split_by", "match"),
    [
        ("ts", "must be COLUMN=CUT"),
        ("when=2020-01-02", "no such column"),
        ("ts=soon", "no time like those"),
        ("ts=2020-01-02T00:00:00.5", "no time like those"),
        ("v=x", "no number"),
    ],
)
def test_wrong_cuts_are_refused(tmp_path: Path, split_by: str, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        source(table(tmp_path / "a.csv", "ts,v\n2020-01-01,1\n2020-01-02,2\n"), split_by=split_by).scan()


def test_rows_that_are_out_of_order_are_sorted_where_that_is_asked_for(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "ts,v\n2020-01-02,1\n2020-01-01,2\n2020-01-02,3\n")
    with pytest.raises(SourceError, match=r"row 2 of .*goes back.*--order-by ts alone to sort them"):
        source(path).scan()
    found = source(path, order_by="ts")
    assert any("rows were sorted by ts: row 2 of" in line for line in found.scan().warnings)
    assert read_all(found)["x"].ravel().tolist() == [2, 1, 3]


def test_auto_normalisation_is_that_of_train_for_each_column(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", "ts,a,b\n2020-01-01,1.0,10\n2020-01-02,3.0,30\n2020-01-03,1000,7\n")
    build(source(tmp_path / "a.csv", split_by="ts=2020-01-03"), tmp_path / "out", preprocess=RowPreprocess(normalize="auto"), workers=1)
    index, _ = load_index(tmp_path / "out")
    assert index.fields[0].normalize == ((2.0, 20.0), (1.0, 10.0))


def test_what_cannot_be_normalised_or_held_is_named_by_file_row_and_column(tmp_path: Path) -> None:
    folder = tmp_path / "bars"
    folder.mkdir()
    table(folder / "A.csv", "ts,a,b\n2020-01-01,1.0,10\n2020-01-02,3.0,30\n2020-01-03,1000,7\n")
    table(folder / "B.csv", "ts,a,b\n2020-01-01,1.0,10\n2020-01-02,3.0,\n2020-01-03,300,\n")
    auto = RowPreprocess(normalize="auto")
    with pytest.raises(
        BuildError, match=r"auto: row 2 of \S*B\.csv: x\[b\] is nan, .*fill it in, leave such rows out, leave that column out with --columns"
    ):
        build(source(folder, split_by="ts=2020-01-03"), tmp_path / "out", preprocess=auto, workers=1)
    assert (
        build(source(folder, split_by="ts=2020-01-02"), tmp_path / "early", preprocess=RowPreprocess(), workers=1).counts[
            "values not a number (x[b])"
        ]
        == 2
    )
    with pytest.raises(SourceError, match=r"^row 3 of \S*A\.csv: a: 1000\.0 cannot be held by int8"):
        build(source(folder, columns=("a",)), tmp_path / "small", preprocess=RowPreprocess(dtype="int8"), workers=1)
    by_b = source(table(tmp_path / "c.csv", "b,a\n5,700\n1,1\n3,2\n"), order_by="b", columns=("a",))
    with pytest.raises(SourceError, match=r"^row 1 of \S*c\.csv: a: 700 cannot be held by int8"):
        build(by_b, tmp_path / "sorted", preprocess=RowPreprocess(dtype="int8"), workers=1)


def test_no_shard_holds_rows_of_two_splits(tmp_path: Path) -> None:
    table(tmp_path / "raw" / "A.csv", "ts,v\n2020-01-01,1\n2020-01-02,2\n")
    table(tmp_path / "raw" / "B.csv", "ts,v\n2020-01-01,3\n2020-01-02,4\n")
    report = build(source(tmp_path / "raw", split_by="ts=2020-01-02"), tmp_path / "out", workers=1)
    assert report.shards >= 2
    train, test = (MMapShardDataset(tmp_path / "out", split) for split in ("train", "test"))
    assert [float(x) for x, _ in (train[i] for i in range(len(train)))] == [1, 3]
    assert [float(x) for x, _ in (test[i] for i in range(len(test)))] == [2, 4]


# ---------------------------------------------------------------- dialects


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2.5\n3,4\n",
        "\ufeffa,b\r\n1,2.5\r\n3,4\r\n",
        "a;b\n1;2.5\n3;4\n",
        "a\tb\n1\t2.5\n3\t4\n",
        "a|b\n1|2.5\n3|4",
        '"a","b"\n"1","2.5"\n"3","4"\n',
        "a, b\n1, 2.5\n3, 4\n",
        "a,b,\n1,2.5,\n3,4,\n",
        "# made by hand\n# twice\na,b\n1,2.5\n3,4\n",
        "\na,b\n\n1,2.5\n\n3,4\n\n",
        "a,b\n+1,25e-1\n 3 ,4.\n",
    ],
)
def test_dialects_say_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    found = source(path)
    scan = found.scan()
    columns = scan.fields[0].columns
    assert columns is not None
    assert columns.listed == ("a", "b")
    assert read_all(found)["x"].tolist() == [[1, 2.5], [3, 4]]


def test_a_table_without_names_has_numbers_for_names(tmp_path: Path) -> None:
    found = source(table(tmp_path / "a.csv", "1,1\n2,3\n"))
    columns = found.scan().fields[0].columns
    assert columns is not None
    assert columns.listed == ("1", "2")
    assert read_all(found)["x"].tolist() == [[1, 1], [2, 3]]


def test_a_column_that_numbers_the_rows_is_left_out_with_a_word(tmp_path: Path) -> None:
    found = source(table(tmp_path / "a.csv", ",a\n0,5\n1,6\n"))
    assert any("numbers the rows: left out" in line for line in found.scan().warnings)
    assert read_all(found)["x"].tolist() == [[5], [6]]


def test_quoted_newlines_do_not_move_rows(tmp_path: Path) -> None:
    text = "v,note\n" + "".join(f'{i},"line\none, {i % 3}"\n' for i in range(10_000))
    found = source(table(tmp_path / "a.csv", text))
    found.scan()
    values = found.read(9_000, 9_010)
    assert values["x"].ravel().tolist() == list(range(9_000, 9_010))
    assert values["note"].tolist() == [i % 3 for i in range(9_000, 9_010)]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "it is empty"),
        ("a,b\n1,2\n3\n", "row 2 has 1 cell, expected 2"),
        ("a,b\n1,2\n3,4,5\n", "row 2 has 3 cells, expected 2"),
        ("a,b\n1,2\n3,x\n5,6\n", "row 2, column b: 'x' is no value like others"),
        ('a,b\n1,2\n3,"4,5"\n', "row 2, column b: '4,5' is no value.*numbers are written as 1234.5"),
        ("a;b\n1,5;2\n1,6;3\n1,7;3\n", "row 1, column a: '1,5' is no value.*numbers are written as 1234.5"),
        ("t,b\n31.01.2020,2\n01.02.2020,3\n", "row 1, column t: '31.01.2020' is no value.*times are written as 2023-01-31"),
        ("a,b\n5%,2\n6%,3\n", "row 1, column a: '5%' is no value"),
        ("a,a\n1,2\n", "both called a"),
        ('a,b\n1,"2\n3,4\n', "quote that is never closed"),
        ("a,b\n1,2\0\n", "NUL"),
        ("a,b\n99999999999999999999999,2\n", "64 bits do not hold"),
        ("a,b\n9223372036854775807,2\n,3\n", "1 whole numbers are missing .the first in row 2"),
        ("ts,b\n2020-01-01,2\n,3\n", "1 times are missing .the first in row 2"),
        ("ts,b\n2020-01-01T00:00Z,2\n2020-01-01T00:01,3\n", "some times say how far from UTC"),
        ("ts,b\n2020-02-30,2\n2020-03-01,3\n", "column ts"),
        ("ts,b\n1500-01-01 00:00:00.123456789,2\n1500-01-01 00:00:00.123456789,3\n", "beyond what int64 holds in ns"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(SourceError, match=match):
        read_all(source(path))


def test_header_alone_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there are no rows|no column of numbers"):
        build(source(table(tmp_path / "a.csv", "a,b\n")), tmp_path / "out", workers=1)


def test_utf_16_and_packed_tables_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    with pytest.raises(SourceError, match="iconv"):
        source(tmp_path / "a.csv").scan()
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(SourceError, match="unpack it first"):
        source(tmp_path / "a.csv.gz").scan()


def test_gaps_and_words_for_them(tmp_path: Path) -> None:
    found = source(table(tmp_path / "a.csv", "f,i,s\n1.5,1,x\nNA,,\n-inf,3,y\nnan,4,x\n"))
    scan = found.scan()
    values = read_all(found)
    assert np.array_equal(values["x"], [[1.5, 1], [np.nan, np.nan], [-np.inf, 3], [np.nan, 4]], equal_nan=True)
    assert values["s"].tolist() == [0, -1, 1, 0]
    assert scan.counts == {"missing (s)": 1}
    assert any("column i: 1 missing: stored as float64, NaN" in line for line in scan.warnings)


@pytest.mark.parametrize(
    ("cells", "unit", "values"),
    [
        (["2020-01-01", "1969-12-31"], "D", [18262, -1]),
        (["2020-01-01 00:00", "2020-01-01T00:00:01"], "s", [1577836800, 1577836801]),
        (["2020-01-01 00:00:00.5", "2020-01-01"], "ms", [1577836800500, 1577836800000]),
        (["2020-01-01T02:00:00+02:00", "2020-01-01T00:00:00Z"], "s", [1577836800, 1577836800]),
        (["2020-01-01T00:00:00.123456789Z", "2019-12-31T19:30-0430"], "ns", [1577836800123456789, 1577836800000000000]),
        (["1969-12-31 23:59:59.250000", "1970-01-01"], "us", [-750000, 0]),
    ],
)
def test_times_are_numbers_with_their_unit(tmp_path: Path, cells: list[str], unit: str, values: list[int]) -> None:
    found = source(table(tmp_path / "a.csv", "t\n" + "\n".join(cells) + "\n"), order_by="none")
    spec = found.scan().fields[0]
    assert (spec.name, spec.dtype, spec.unit) == ("t", "int64", unit)
    assert found.read(0, 2)["t"].tolist() == values


# ---------------------------------------------------------------- Parquet


def test_parquet_types_come_out_as_they_are(tmp_path: Path) -> None:
    columns = {
        "i8": pa.array([1, -2], "int8"),
        "u64": pa.array([2**64 - 1, 0], "uint64"),
        "f16": pa.array(np.array([1.5, 2], np.float16)),
        "b": pa.array([True, False]),
        "d": pa.array([1, 2], pa.date32()),
        "d64": pa.array([86_400_000, 0], pa.date64()),
        "tz": pa.array([1, 2], pa.timestamp("us", "Europe/Berlin")),
        "tod": pa.array([1, 2], pa.time32("ms")),
        "s": pa.array(["y", None]).dictionary_encode(),
    }
    found = source(parquet(tmp_path / "a.parquet", columns), columns=tuple(columns))
    fields = {f.name: (f.dtype, f.unit) for f in found.scan().fields}
    assert fields == {
        "i8": ("int8", None),
        "u64": ("uint64", None),
        "f16": ("float16", None),
        "b": ("bool", None),
        "d": ("int64", "D"),
        "d64": ("int64", "D"),
        "tz": ("int64", "us"),
        "tod": ("int64", "ms"),
        "s": ("int32", None),
    }
    values = found.read(0, 2)
    assert values["u64"].tolist() == [2**64 - 1, 0]
    assert values["d64"].tolist() == [1, 0]
    assert values["s"].tolist() == [0, -1]
    assert values["b"].tolist() == [True, False]


def test_gaps_of_parquet_files(tmp_path: Path) -> None:
    found = source(parquet(tmp_path / "a.parquet", {"i": pa.array([1, None], "int32"), "b": [True, None], "f": [None, 2.5], "none": pa.nulls(2)}))
    scan = found.scan()
    assert np.array_equal(read_all(found)["x"], [[1, 1, np.nan], [np.nan, np.nan, 2.5]], equal_nan=True)
    assert any("no value is in it: none" in line for line in scan.warnings)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array([[1], [2]]), "column c holds list<"),
        (pa.array([b"1", b"2"]), "column c holds binary"),
        (pa.array([1, None], pa.timestamp("s")), "1 times are missing .the first in row 2"),
        (pa.array([2**60, None]), "float64 loses digits"),
    ],
)
def test_parquet_columns_that_are_no_numbers_are_refused(tmp_path: Path, column: Any, match: str) -> None:
    path = parquet(tmp_path / "a.parquet", {"c": column, "v": [1, 2]})
    with pytest.raises(SourceError, match=match):
        source(path, order_by="none").scan()
    assert source(path, columns=("v",)).scan().rows == 2


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = Path(parquet(tmp_path / "a.parquet", {"v": np.random.default_rng(0).random(50_000)}))
    data = bytearray(path.read_bytes())
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="it is damaged, or no Parquet file"):
        source(tmp_path / "cut.parquet").scan()
    data[4:2000] = bytes(1996)
    (tmp_path / "bad.parquet").write_bytes(data)
    with pytest.raises(SourceError, match="row group 0 cannot be read: it is damaged"):
        read_all(source(tmp_path / "bad.parquet"))


def test_tables_of_two_forms_are_both_named(tmp_path: Path) -> None:
    text, packed = table(tmp_path / "a.csv", "a,b\n1,2\n"), parquet(tmp_path / "b.parquet", {"a": [1], "b": [2]})
    with pytest.raises(SourceError, match=rf"^{text} is text and {packed} a Parquet file: give tables of one form, or build them apart and merge$"):
        source(tmp_path).scan()


def test_a_page_that_is_not_what_its_checksum_says_is_damage(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.arange(1000, dtype=np.float64)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"v": numbers}), path, write_page_checksum=True, use_dictionary=False, compression="none")
    assert read_all(source(path))["x"][:, 0].tolist() == numbers.tolist()
    data = bytearray(path.read_bytes())
    at = data.index(numbers[500:501].tobytes())
    data[at] ^= 1  # a number as good as any other
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet: row group 0 cannot be read: it is damaged"):
        read_all(source(path))


def test_row_groups_too_large_to_keep_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmcompile.compiler.sources import tablearrow

    monkeypatch.setattr(tablearrow, "_KEPT_BYTES", 100)
    monkeypatch.setattr(tablearrow, "_ROWS", 16)
    path = parquet(tmp_path / "a.parquet", {"a": np.arange(1000), "b": np.arange(1000) / 2}, rows=300)
    found = source(path)
    assert np.array_equal(read_all(found)["x"], np.stack([np.arange(1000), np.arange(1000) / 2], axis=1))
    assert found.read(650, 660)["x"][:, 0].tolist() == list(range(650, 660))
    assert found.read(10, 20)["x"][:, 0].tolist() == list(range(10, 20))


def test_tables_that_do_not_go_together_are_named_both(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", "a,b\n1,2\n")
    table(tmp_path / "b.csv", "a,c\n1,2\n")
    with pytest.raises(SourceError, match=r"column b is in .*a\.csv, not in .*b\.csv"):
        source(tmp_path).scan()
    table(tmp_path / "b.csv", "a,b\nx,2\n")
    with pytest.raises(SourceError, match=r"column a: int64 in .*a\.csv, texts in .*b\.csv"):
        source(tmp_path).scan()


def test_a_table_that_changes_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "a,b\n1,2\n")
    found = source(path)
    found.scan()
    table(tmp_path / "a.csv", "a,b\n1,2\n3,4\n")
    with pytest.raises(SourceError, match="changed while it was read"):
        found.read(0, 1)


def test_too_many_texts_are_no_categories(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="more than 65,536 different texts"):
        source(parquet(tmp_path / "a.parquet", {"id": [f"k{i}" for i in range(70_000)], "v": np.arange(70_000)})).scan()


# ---------------------------------------------------------------- whole builds

NUMBERS = st.one_of(
    st.floats(allow_nan=False), st.integers(-(2**53), 2**53), st.decimals(-1000, 1000, places=5, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.one_of(st.just(""), NUMBERS), st.sampled_from(["a", "b,c", 'd"e', "f\ng", ""])), min_size=1, max_size=40))
def test_what_a_csv_file_says_is_what_is_read(rows: list[tuple[Any, Any, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["u", "v", "s"])
        writer.writerows(rows)
        file.flush()
        found = source(Path(folder) / "a.csv", columns=("u", "v", "s") if any(v != "" for _, v, _ in rows) and any(s for *_, s in rows) else ("u",))
        values = read_all(found)
    assert [float(u) for u in values["u"]] == [float(str(u)) for u, *_ in rows]
    if "v" in values:
        assert np.array_equal(values["v"].astype(float), [float(str(v)) if v != "" else np.nan for _, v, _ in rows], equal_nan=True)
        names = sorted({s for *_, s in rows if s})
        assert values["s"].tolist() == [names.index(s) if s else -1 for *_, s in rows]


def test_bytes_do_not_depend_on_workers_or_on_what_was_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 20_000
    columns = {"g": rng.integers(0, 50, n), "ts": rng.permutation(n), "v": rng.random(n)}
    path = parquet(tmp_path / "a.parquet", columns, rows=3000)
    options = BuildOptions(shard_bytes=1 << 16)
    wishes = {"group_by": "g", "order_by": "ts", "split_by": "ts=15000"}
    for workers in (1, 2):
        build(source(path, **wishes), tmp_path / f"out{workers}", workers=workers, options=options)
    assert dataset(tmp_path / "out1") == dataset(tmp_path / "out2")
    train = MMapShardDataset(tmp_path / "out1", "train")
    assert max(int(train[i][1]) for i in range(len(train))) == 14_999


def test_a_second_build_reads_only_the_tables_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 0)
    for name in ("A", "B"):
        table(tmp_path / "raw" / f"{name}.csv", "v\n" + "\n".join(map(str, range(100))) + "\n")
    options = BuildOptions(shard_bytes=1024)
    build(source(tmp_path / "raw"), tmp_path / "out", workers=1, options=options)
    assert build(source(tmp_path / "raw"), tmp_path / "out", workers=1, options=options).decoded == 0
    table(tmp_path / "raw" / "B.csv", "v\n" + "\n".join(map(str, range(100, 200))) + "\n")
    report = build(source(tmp_path / "raw"), tmp_path / "out", workers=1, options=options)
    assert (report.decoded, report.kept) == (100, 100)


# ---------------------------------------------------------------- fast and slow

CELLS = st.one_of(
    NUMBERS.map(str),
    st.sampled_from(["", "nan", "NAN", "-inf", "INF", "NA", "+5", " 7 ", "0x10", "1e400", "007", "1_0", "x", "-0", "9223372036854775808", "true"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CELLS, st.integers(-5, 5).map(str)), min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"]))
@example(rows=[("", "0"), ("1_0", "0"), ("0.0", "0")], end="\n")
def test_lines_parsed_at_once_say_what_cells_say(rows: list[tuple[str, str]], end: str) -> None:
    def result(rows_at_once: int, fast: bool) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mmcompile.compiler.sources.tabletext._ROWS", rows_at_once)
            if not fast:
                patch.setattr("mmcompile.compiler.sources.tablefast._arrow", lambda: None)
            found = source(path)
            try:
                scan = found.scan()
                return [(f.name, f.dtype, f.shape) for f in scan.fields], {k: v.tobytes() for k, v in read_all(found).items()}, scan.warnings
            except SourceError as error:
                return re.sub(r"rows [0-9,]+ to [0-9,]+", "rows", str(error))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_bytes(("a,b" + end + "".join(f"{a},{b}{end}" for a, b in rows)).encode())
        assert result(1, fast=True) == result(1, fast=False)


def test_long_files_are_read_from_any_row_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.sources.tabletext._PLAIN_BYTES", 1 << 10)
    monkeypatch.setattr("mmcompile.compiler.sources.tabletext._ROWS", 64)
    n = 3000
    lines = [f"{i},{i / 7!r},{'' if i % 11 else chr(34)}s{i % 3}{'' if i % 11 else chr(34)},2020-01-01 00:00:{i % 60:02}" for i in range(n)]
    found = source(table(tmp_path / "a.csv", "i,f,s,t\n" + "\n".join(lines)), columns=("i", "f", "s", "t"), order_by="none")
    assert found.scan().rows == n
    for start in (0, 1, 63, 64, 65, 1499, 2990):
        values = found.read(start, min(n, start + 100))
        rows = range(start, min(n, start + 100))
        assert values["i"].tolist() == list(rows)
        assert values["f"].tolist() == [i / 7 for i in rows]
        assert values["s"].tolist() == [i % 3 for i in rows]
        assert values["t"].tolist() == [1577836800 + i % 60 for i in rows]


def test_one_file_is_open_at_a_time(tmp_path: Path) -> None:
    for i in range(40):
        parquet(tmp_path / f"{i:02}.parquet", {"ts": [1, 2], "v": [i, i]})
    before = len(os.listdir("/proc/self/fd"))
    found = source(tmp_path)
    found.scan()
    assert found.read(0, 80)["x"][:, 1].tolist() == [i for i in range(40) for _ in range(2)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_values_that_are_no_numbers_cannot_order_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"t": [1.0, float("nan")], "v": [1, 2]})
    with pytest.raises(SourceError, match=r"column t: no number .NaN. in row 2 of"):
        source(path, order_by="t").scan()
    with pytest.raises(OptionError, match="column s holds texts: expected times or numbers"):
        source(table(tmp_path / "b.csv", "s,v\na,1\nb,2\n"), order_by="s").scan()


def test_many_columns_have_their_names_in_a_file(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(300)]
    build(source(table(tmp_path / "a.csv", ",".join(names) + "\n" + ",".join(map(str, range(300))) + "\n")), tmp_path / "out", workers=1)
    index, _ = load_index(tmp_path / "out")
    assert index.fields[0].columns is not None
    assert index.fields[0].columns.file
    assert MMapShardDataset(tmp_path / "out")[0].tolist() == list(range(300))


def test_texts_that_are_no_utf_8_and_folders_in_themselves(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_bytes(b"s,v\n\xe9,1\na,2\n")
    found = source(tmp_path / "raw")
    assert found.scan().fields[1].categories is not None
    assert read_all(found)["s"].tolist() == [1, 0]
    build(found, tmp_path / "out", workers=1)
    (tmp_path / "raw" / "sub").symlink_to(tmp_path / "raw")
    with pytest.raises(SourceError, match="a folder that contains itself"):
        source(tmp_path / "raw").scan()


def test_rows_in_text_are_read_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("mmcompile.compiler.sources.tablefast._arrow", tablefast._arrow.__wrapped__)
    assert read_all(source(table(tmp_path / "a.csv", "v\n1\n2\n")))["x"].tolist() == [[1], [2]]
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(OptionError, match=r"pip install 'mmcompile\[parquet\]'"):
        source(tmp_path / "a.parquet").scan()


def test_reading_a_table_does_not_import_pandas(tmp_path: Path) -> None:
    paths = [parquet(tmp_path / "a.parquet", {"v": [1, None], "b": [True, None], "s": ["a", "b"]}), table(tmp_path / "b.csv", "v,s\n1,a\n,b\n")]
    program = (
        "import sys\nfrom mmcompile.compiler.sources.table import TableSource\n"
        "for path in sys.argv[1:]:\n    source = TableSource([path])\n    source.read(0, source.scan().rows)\nassert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, *paths], check=True)


# ---------------------------------------------------------------- splits as folders, and what is no file


def test_a_folder_of_tables_that_leads_back_into_itself_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "t" / "a.csv", "v\n1\n2\n")
    (tmp_path / "t" / "x").symlink_to(".")
    with pytest.raises(SourceError, match="x: a folder that contains itself"):
        source(tmp_path / "t").scan()
    (tmp_path / "t" / "x").unlink()
    (tmp_path / "t" / "x").symlink_to("..")
    with pytest.raises(SourceError, match="a folder that contains itself"):
        source(tmp_path / "t").scan()


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str, inside: bool) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match=f"{name}: no regular file: expected a table"):
        source(tmp_path if inside else tmp_path / name).scan()


@pytest.mark.parametrize("layout", ["{}/A.csv", "split={}/A.csv", "{}.csv", "{}/symbol=A/a.csv"])
def test_folders_and_tables_called_as_splits_are_splits(tmp_path: Path, layout: str) -> None:
    for i, name in enumerate(("test", "train", "val")):
        table(tmp_path / layout.format(name), f"v\n{i}\n{i + 10}\n")
    found = source(tmp_path)
    scan = found.scan()
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 2), ("val", 2, 4), ("test", 4, 6)]
    assert scan.groups == (("train", "val", "test") if layout == "{}.csv" else ("A",) * 3)
    assert read_all(found)["x"].ravel().tolist() == [1, 11, 2, 12, 0, 10]


def test_several_raw_that_are_called_as_splits_are_splits(tmp_path: Path) -> None:
    raw = [table(tmp_path / "test" / "A.csv", "v\n1\n"), table(tmp_path / "train" / "A.csv", "v\n2\n")]
    scan = TableSource([os.path.dirname(path) for path in raw]).scan()
    assert [s.name for s in scan.splits] == ["train", "test"]
    assert scan.groups == ("A", "A")


def test_splits_keep_groups_of_a_column_apart(tmp_path: Path) -> None:
    table(tmp_path / "train" / "a.csv", "g,v\nB,1\nA,2\nB,3\n")
    table(tmp_path / "test" / "b.csv", "g,v\nC,4\nA,5\n")
    found = source(tmp_path, group_by="g")
    scan = found.scan()
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 3), ("test", 3, 5)]
    assert (scan.groups, scan.stops.tolist()) == (("A", "B", "C") * 2, [1, 3, 3, 4, 4, 5])
    assert read_all(found)["x"].ravel().tolist() == [2, 1, 3, 5, 4]
    report = build(source(tmp_path, group_by="g"), tmp_path.parent / f"{tmp_path.name}-out", workers=1)
    assert report.shards == 2


def test_splits_that_cannot_be_told_are_refused(tmp_path: Path) -> None:
    table(tmp_path / "train" / "a.csv", "t,v\n1,1\n2,1\n")
    table(tmp_path / "test" / "a.csv", "t,v\n")
    with pytest.raises(SourceError, match="no row is in split test"):
        source(tmp_path).scan()
    assert [s.name for s in source(tmp_path / "train", split_by="t=2").scan().splits] == ["train", "test"]
    with pytest.raises(OptionError, match=r"holds splits already .train, test."):
        source(tmp_path, split_by="t=2").scan()
    table(tmp_path / "more.csv", "t,v\n1,1\n")
    with pytest.raises(SourceError, match=r"more.csv: lies in none of the splits beside it .train, test."):
        source(tmp_path).scan()


# ---------------------------------------------------------------- cells that are like others


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_yes_and_no_beside_whole_numbers_are_1_and_0(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{form}"
    if form == "csv":
        table(path, "a,b\n1,true\n2,False\n")
    else:
        parquet(path, {"a": [1, 2], "b": [True, False]})
    values = read_all(source(path))["x"]
    assert (values.dtype, values.tolist()) == (np.dtype("int64"), [[1, 1], [2, 0]])


@pytest.mark.parametrize("cut", ["2500-01-01", "2020-02-30"])
def test_a_cut_that_is_no_time_of_the_column_is_one_line(tmp_path: Path, cut: str) -> None:
    path = table(tmp_path / "a.csv", "ts,v\n2020-01-01 00:00:00.123456789,1\n2020-01-02,2\n")
    with pytest.raises(OptionError, match=f"--split-by: '{cut}': "):
        source(path, split_by=f"ts={cut}").scan()


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("cells", "numbers", "classes"),
    [
        (["b", "a", "", "b"], [1, 0, -1, 1], ("a", "b")),
        (["0", "2", "1", "2"], [0, 2, 1, 2], ("0", "1", "2")),
        (["1", "NA", "1", "0"], [1, -1, 1, 0], ("0", "1")),
        (["true", "false", "", "true"], [1, 0, -1, 1], ("false", "true")),
    ],
)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_called_like_a_label_is_the_label(tmp_path: Path, form: str, cells: list[str], numbers: list[int], classes: tuple[str, ...]) -> None:
    path = table(tmp_path / "a.csv", "v,Class\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)))
    if form == "parquet":
        from pyarrow import csv as arrow_csv

        read = arrow_csv.read_csv(path, convert_options=arrow_csv.ConvertOptions(strings_can_be_null=True))
        path = parquet(tmp_path / "a.parquet", {name: read.column(name) for name in read.column_names})
    found = source(path)
    scan = found.scan()
    assert [(f.name, f.meaning) for f in scan.fields] == [("x", "value"), ("label", "class")]
    assert scan.classes == classes
    assert [n for words, n in scan.counts.items() if words.startswith("classes in column Class (")] == [len(classes)]
    assert scan.counts.get("without a label (-1)", 0) == numbers.count(-1)
    values = read_all(found)
    assert (values["label"].tolist(), values["x"].ravel().tolist()) == (numbers, [0, 1, 2, 3])
    build(source(path), tmp_path / "out", workers=1)
    ds = MMapShardDataset(tmp_path / "out")
    assert (tuple(ds.classes), list(ds.targets)) == (classes, numbers)


@pytest.mark.parametrize("cells", [["0.5", "1", "2"], ["-1", "0", "1"], ["25", "346", "100"], ["100000", "0", "7"]])
def test_numbers_that_are_not_like_classes_stay_values(tmp_path: Path, cells: list[str]) -> None:
    path = table(tmp_path / "a.csv", "v,target\n" + "".join(f"1,{cell}\n" for cell in cells))
    found = source(path)
    scan = found.scan()
    assert ([f.name for f in scan.fields], scan.classes) == (["x"], None)
    assert read_all(found)["x"][:, 1].tolist() == list(map(float, cells))


def test_the_label_is_what_is_asked_for(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "v,side,label,w\n1,-1,0,0.5\n2,1,1,1.5\n3,-1,2,2\n")
    found = source(path, label="side")
    scan = found.scan()
    assert ([f.name for f in scan.fields], scan.classes) == (["x", "label"], ("-1", "1"))
    assert read_all(found)["label"].tolist() == [0, 1, 0]
    assert [f.name for f in source(path, label="none").scan().fields] == ["x"]
    assert [f.name for f in source(path, columns=("v", "label")).scan().fields] == ["v", "label"]
    assert source(path, columns=("v",), label="label").scan().classes == ("0", "1", "2")
    for columns in (("vw=v+w", "label"), ("v", " label"), ("side=side+v", "w", "label")):  # beside fields of several columns as beside others
        found = source(path, columns=columns)
        assert (found.scan().classes, found.scan().fields[-1].name) == (("0", "1", "2"), "label")
        assert read_all(found)["label"].tolist() == [0, 1, 2]
    assert [f.meaning for f in source(path, columns=("all=v+label", "w")).scan().fields] == ["value", "value"]  # which is a number among others
    assert [f.name for f in source(path, columns=("v", "w")).scan().fields] == ["v", "w"]
    with pytest.raises(OptionError, match="--label-column w: expected at most 65,536 different whole numbers"):
        source(path, label="w").scan()
    with pytest.raises(OptionError, match=r"--label-column sied: .* did you mean side"):
        source(path, label="sied").scan()


def test_a_class_that_comes_later_renumbers_rows_that_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 0)
    table(tmp_path / "raw" / "A.csv", "v,label\n1,b\n")
    first = source(tmp_path / "raw").scan().stamps[0]
    assert first
    build(source(tmp_path / "raw"), tmp_path / "out", preprocess=RowPreprocess(), workers=1)
    table(tmp_path / "raw" / "B.csv", "v,label\n2,a\n")
    assert source(tmp_path / "raw").scan().stamps[0] != first
    build(source(tmp_path / "raw"), tmp_path / "out", workers=1)
    assert list(MMapShardDataset(tmp_path / "out").targets) == [1, 0]


# ---------------------------------------------------------------- what is doubtful is named


@pytest.mark.parametrize("text", ["a b\n1 2\n3 4\n", "1 2\n3 4\n", "a:b\n1:2\n3:4\n", "name price\nx 1.5\ny 2\n"])
def test_columns_that_are_not_told_apart_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceError, match=r"one column of text with numbers in it.*expected commas, semicolons, tabs or bars"):
        source(table(tmp_path / "a.csv", text)).scan()


def test_one_column_of_texts_is_categories(tmp_path: Path) -> None:
    assert read_all(source(table(tmp_path / "a.csv", "kind\nred brick\ns1\n")))["kind"].tolist() == [0, 1]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_missing_time_is_named_with_its_table(tmp_path: Path, form: str) -> None:
    for name, second in (("A", "2020-01-02"), ("B", None)):
        path = tmp_path / f"{name}.{form}"
        if form == "csv":
            table(path, f"ts,v\n2020-01-01,1\n{second or ''},2\n")
        else:
            parquet(path, {"ts": pa.array(np.array(["2020-01-01", second or "NaT"], "datetime64[s]")), "v": [1, 2]})
    with pytest.raises(SourceError, match=rf"column ts: 1 times are missing .the first in row 2 of .*B\.{form}"):
        source(tmp_path).scan()
    with pytest.raises(SourceError, match=rf"column ts: 1 values are missing .the first in row 2 of .*B\.{form}"):
        source(tmp_path, order_by="ts", columns=("v",)).scan()


@pytest.mark.parametrize(
    ("text", "wishes", "count", "first"),
    [
        ("s,t,v\nA,1,1\nA,1,2\nA,2,3\nB,2,4\nB,2,5\n", {"group_by": "s"}, 2, 2),
        ("s,t,v\nA,1,1\nB,1,2\nA,2,3\nB,2,4\nA,2,5\n", {"group_by": "s"}, 1, 5),
        ("t,v\n1,1\n2,2\n1,3\n", {}, 1, 3),
        ("t,v\n1,1\n2,2\n2,3\n2,4\n", {}, 2, 3),
    ],
)
def test_rows_that_stand_twice_are_counted(tmp_path: Path, text: str, wishes: dict[str, str], count: int, first: int) -> None:
    scan = source(table(tmp_path / "a.csv", text), order_by="t", **wishes).scan()
    assert any(re.search(rf"t stands still in {count} rows: .*the first: row {first} of", line) for line in scan.warnings), scan.warnings
    assert not any("stands still" in line for line in source(table(tmp_path / "b.csv", "t,v\n2,1\n1,2\n"), order_by="t").scan().warnings)


def test_rows_that_stand_twice_are_counted_where_they_are_sorted_aside(tmp_path: Path) -> None:
    n = 3000
    times = np.random.default_rng(0).permutation(n)
    times[[5, 10]] = times[7]
    path = parquet(tmp_path / "a.parquet", {"t": times, "v": np.arange(n)})
    assert any("t stands still in 2 rows: " in line and "the first: row 8 of" in line for line in source(path, order_by="t").scan().warnings)


def test_the_columns_that_the_readme_takes_of_bars_become_these_fields(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8").partition("### Tables")[2].partition("\n### ")[0]
    table(tmp_path / "bars" / "A.csv", "ts,open,high,low,close,volume\n2022-06-01,1,3,0,2,10\n2022-06-02,2,4,1,3,20\n")
    columns = re.search(r"`--columns (\S+=\S+)`", readme)
    assert columns is not None
    assert [f.name for f in source(tmp_path / "bars", columns=tuple(columns[1].split(","))).scan().fields] == ["volume", "ts", "ohlc"]


# ---------------------------------------------------------------- where rows come from


@pytest.mark.parametrize("order", ["source", "shuffled:4"])
def test_each_row_tells_the_row_of_its_file_whatever_cuts_it(tmp_path: Path, order: str) -> None:
    for name, first in (("AAPL", 0), ("GOOG", 100)):
        table(tmp_path / "cut" / f"{name}.csv", "t,v\n" + "".join(f"{i},{first + i}\n" for i in range(9)))
        for split, more in (("train", 1000), ("val", 2000)):
            table(tmp_path / "files" / split / f"{name}.csv", "v,w\n" + "".join(f"{first + more + i},0\n" for i in range(5)))
    options = BuildOptions(order=order)
    build(source(tmp_path / "cut", split_by="t=3,7"), tmp_path / "out", options=options, workers=1)
    for split in ("train", "val", "test"):
        found = MMapShardDataset(tmp_path / "out", split)
        at = list(found.fields).index("x")
        rows = [(int(found[i][at][0]), found.source(i)) for i in range(len(found))]
        assert all(told == f"{'AAPL' if value < 100 else 'GOOG'}[{value % 100}]" for value, told in rows)
    build(source(tmp_path / "files"), tmp_path / "apart", options=options, workers=1)
    for split in ("train", "val"):
        found = MMapShardDataset(tmp_path / "apart", split)
        values = [int(found[i][0]) for i in range(len(found))]
        expected = [f"{split}/{'AAPL' if value % 1000 < 100 else 'GOOG'}[{value % 100}]" for value in values]
        assert [found.source(i) for i in range(len(found))] == expected
        assert [line["key"] for line in samples_table(tmp_path / "apart") if line["split"] == split] == expected


def test_rows_that_leak_are_named_with_their_splits(tmp_path: Path) -> None:
    table(tmp_path / "A.csv", "t,v,w\n1,5,6\n2,7,8\n3,5,6\n")
    build(source(tmp_path / "A.csv", columns=("v=v+w",), split_by="t=3"), tmp_path / "out", workers=1)
    repeats = describe(tmp_path / "out")["repeats"]
    assert [example["keys"] for example in repeats["examples"]] == [["train[0]", "test[2]"]]
    table(tmp_path / "two" / "A.csv", "t,v,w\n1,5,6\n2,7,8\n3,5,6\n")
    table(tmp_path / "two" / "B.csv", "t,v,w\n1,1,6\n2,1,8\n3,1,7\n")
    build(source(tmp_path / "two", columns=("v=v+w",), split_by="t=3"), tmp_path / "both", workers=1)
    assert [example["keys"] for example in describe(tmp_path / "both")["repeats"]["examples"]] == [["train/A[0]", "test/A[2]"]]


def test_a_column_of_texts_that_may_be_classes_says_how_it_becomes_the_label(tmp_path: Path) -> None:
    said = "column species is a category, not the label (--label-column species makes classes of it)"
    path = table(tmp_path / "a.csv", "v,species\n1,cat\n2,dog\n3,cat\n4,cat\n")
    assert source(path).scan().warnings == (said,)
    assert source(path, label="species").scan().warnings == source(path, label="none").scan().warnings == ()
    for text in ("v,species,s\n1,cat,a\n2,cat,a\n", "v,species\n1,cat\n2,dog\n3,ant\n", "t,species\n2020-01-01,cat\n2020-01-02,cat\n"):
        assert source(table(tmp_path / "b.csv", text)).scan().warnings == ()


def test_a_column_that_is_not_asked_for_may_hold_anything(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "a,b\n1,2\n3,x\n5,6\n")
    with pytest.raises(SourceError, match=r"row 2, column b: 'x' is no value like others in it: mend it, or leave it out with --columns$"):
        source(path).scan()
    scan = source(path, columns=("a",)).scan()
    assert (scan.rows, [spec.name for spec in scan.fields]) == (3, ["a"])
    wishes: tuple[dict[str, Any], ...] = (
        {"columns": ("b",)},
        {"columns": ("p=a+b",)},
        {"columns": ("a",), "order_by": "b"},
        {"columns": ("a",), "label": "b"},
    )
    for asked in wishes:
        with pytest.raises(SourceError, match="row 2, column b"):
            source(path, **asked).scan()
