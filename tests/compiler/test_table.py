"""Tables of numbers: what columns become, groups, order, splits, and that every value comes out as it stands in the file."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile import MMapShardDataset
from mmcompile.compiler.driver import build
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.table import TableSource, TableWishes
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.index import load_index

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
