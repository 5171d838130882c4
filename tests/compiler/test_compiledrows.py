"""Datasets without keys as sources: merged, cut and cast anew, selected; groups stay, and damage is never copied on."""

from __future__ import annotations

import functools
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import rowbuild
from mmcompile.compiler.driver import BuildReport, build
from mmcompile.compiler.options import BuildOptions, as_config
from mmcompile.compiler.preprocess import Normalize
from mmcompile.compiler.rowrun import Here
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.compiledrows import CompiledRows
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.errors import FormatError, OptionError, SourceError
from mmcompile.format.index import Field, Names, Split, load_groups
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import make_raw, run

WIDTH = 64


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowbuild, "start_readers", lambda source, scratch, workers: (Here(), source, ""))


class Table:
    """Rows of two groups in each of two splits, with a category and a time."""

    root = ""

    def __init__(self, seed: int, n: int = 40, names: tuple[str, ...] = ("x", "y"), columns: int = WIDTH) -> None:
        rng = np.random.default_rng(seed)
        self.n, self.names, self.columns = n, names, columns
        self.seed = seed
        self.data = {
            "bars": rng.normal(size=(n, columns)).astype("f4"),
            "venue": rng.integers(-1, len(names), n).astype("i2"),
            "ts": rng.integers(0, 9, n),
        }

    def identity(self) -> dict[str, object]:
        return {"kind": "table", "seed": self.seed}

    def scan(self, progress: Any = None) -> RowScan:
        n = self.n
        fields = (
            Field("bars", "float32", (self.columns,), "value", columns=Names(tuple(f"c{i}" for i in range(self.columns)))),
            Field("venue", "int16", (), "value", categories=Names(self.names)),
            Field("ts", "int64", (), "value", unit="s"),
        )
        stops = np.array([n // 4, n // 2, n - 7, n])
        splits = (Split("train", 0, n // 2), Split("test", n // 2, n))
        return RowScan(n, fields, ("AAPL", "MSFT", "AAPL", "MSFT"), stops, ("", "", "", ""), splits)

    def read(self, start: int, stop: int) -> dict[str, Any]:
        return {name: column[start:stop] for name, column in self.data.items()}


def options(rows: int = 10) -> BuildOptions:
    return BuildOptions(workers=1, shard_bytes=rows * (4 * WIDTH + 10))


def source(*raw: Path, **given: Any) -> Any:
    return open_source([str(place) for place in raw], SourceOptions(**given))


def merge(out: Path, *raw: Path, rows: int = 10, preprocess: RowPreprocess | None = None, **given: Any) -> BuildReport:
    return build(source(*raw, **given), out, options=options(rows), preprocess=preprocess)


def column(out: Path, name: str) -> Any:
    reader = Reader(out)
    return reader.gather(name, np.arange(len(reader)))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    outs = tmp_path / "out_a", tmp_path / "out_b"
    for seed, (out, names) in enumerate(zip(outs, (("x", "y"), ("w", "y", "z")), strict=True)):
        build(Table(seed, names=names), out, options=options())
    return outs


def test_rows_stand_split_by_split_and_groups_stay(tmp_path: Path, two: tuple[Path, Path]) -> None:
    report = merge(tmp_path / "merged", *two)
    a, b = Table(0).data, Table(1, names=("w", "y", "z")).data
    reader = Reader(tmp_path / "merged")
    assert report.samples == 80
    assert [(s.name, s.start, s.stop) for s in reader.index.splits] == [("train", 0, 40), ("test", 40, 80)]
    wanted = np.concatenate([a["bars"][:20], b["bars"][:20], a["bars"][20:], b["bars"][20:]])
    assert np.array_equal(column(tmp_path / "merged", "bars"), wanted)
    names, starts = load_groups(tmp_path / "merged", reader.index)
    assert names == ("AAPL", "MSFT") * 4
    assert starts.tolist() == [0, 10, 20, 30, 40, 53, 60, 73, 80]
    venue = next(f for f in reader.index.fields if f.name == "venue")
    assert venue.categories == Names(("w", "x", "y", "z"))
    named = ["", "w", "x", "y", "z"]
    old = [["", "x", "y"][i + 1] for i in a["venue"]], [["", "w", "y", "z"][i + 1] for i in b["venue"]]
    assert [named[i + 1] for i in column(tmp_path / "merged", "venue")] == old[0][:20] + old[1][:20] + old[0][20:] + old[1][20:]
    assert verify(tmp_path / "merged").ok


def test_one_dataset_cut_as_it_was_is_the_same_files(tmp_path: Path, two: tuple[Path, Path]) -> None:
    merge(tmp_path / "same", two[0])
    assert sorted(p.name for p in (tmp_path / "same" / "shards").iterdir()) == sorted(p.name for p in (two[0] / "shards").iterdir())
    merge(tmp_path / "wide", two[0], rows=40)
    assert len(Reader(tmp_path / "wide").table) < len(Reader(two[0]).table)
    assert np.array_equal(column(tmp_path / "wide", "bars"), column(two[0], "bars"))


def test_rows_are_selected_by_split_group_number_and_fields_of_one_number(tmp_path: Path, two: tuple[Path, Path]) -> None:
    merge(tmp_path / "some", *two, where="group == 'AAPL' and split == 'test' and ts in (1, 2, 3) or venue == 'y' and dataset == 1 and row >= 60")
    a, b = Table(0).data, Table(1, names=("w", "y", "z")).data
    keep_a = [i for i in range(40) if 20 <= i < 33 and a["ts"][i] in (1, 2, 3)]
    keep_b = [i for i in range(40) if (20 <= i < 33 and b["ts"][i] in (1, 2, 3)) or (b["venue"][i] == 1 and i + 40 >= 60)]
    assert np.array_equal(column(tmp_path / "some", "bars"), np.concatenate([a["bars"][keep_a], b["bars"][keep_b]]))
    (tmp_path / "rows").write_text("79\n0\n41\n")
    report = build(source(*two, rows=str(tmp_path / "rows")), tmp_path / "picked", options=options())
    assert report.counts == {"not selected": 77}
    assert np.array_equal(column(tmp_path / "picked", "bars"), np.stack([a["bars"][0], b["bars"][1], b["bars"][39]]))
    with pytest.raises(OptionError, match="there is no 'key' here; known are dataset, group, row, split, ts, venue"):
        merge(tmp_path / "none", *two, where="key == 'a'")
    with pytest.raises(OptionError, match="have no keys; use --where or --rows"):
        source(*two, include=("a*",))
    with pytest.raises(SourceError, match="none of the 80 rows is taken"):
        merge(tmp_path / "none", *two, where="ts > 100")
    assert not (tmp_path / "none").exists()


def test_sparse_rows_of_many_blocks_are_those_that_were_picked(tmp_path: Path) -> None:
    table = Table(3, 3000, columns=2000)
    build(table, tmp_path / "out", options=BuildOptions(workers=1, shard_bytes=9 << 20))
    picked = np.array([0, 1, 130, 131, 1300, 2999])
    np.save(tmp_path / "rows.npy", picked)
    build(source(tmp_path / "out", rows=str(tmp_path / "rows.npy")), tmp_path / "some", options=options())
    assert np.array_equal(column(tmp_path / "some", "bars"), table.data["bars"][picked])


def test_damage_stops_the_build_and_is_named(tmp_path: Path, two: tuple[Path, Path]) -> None:
    path = Reader(two[1]).path("bars", 1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    start = int(Reader(two[1]).starts[1])
    with pytest.raises(SourceError, match=rf"rows {start} to \d+ of {two[1]} hold damage: run `mmcompile verify {two[1]}`"):
        merge(tmp_path / "merged", *two)
    assert not (tmp_path / "merged" / "index.json").exists()
    path.unlink()
    with pytest.raises(SourceError, match=rf"{path.name}: missing; if it was pruned"):
        merge(tmp_path / "merged", *two)
    data[-5] ^= 4
    path.write_bytes(data)
    merge(tmp_path / "merged", *two)
    venue = Reader(two[0]).path("venue", 0)
    venue.write_bytes(venue.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(FormatError, match=venue.name):
        merge(tmp_path / "some", *two, where="venue == 'y'")


def test_nothing_is_written_where_nothing_changed(tmp_path: Path, two: tuple[Path, Path]) -> None:
    merge(tmp_path / "merged", *two)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").rglob("*")}
    report = merge(tmp_path / "merged", *two)
    assert (report.kept, report.decoded) == (80, 0)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").rglob("*")} == before
    report = merge(tmp_path / "merged", *two, where="row < 40")
    assert (report.kept, report.samples) == (0, 40)
    merge(tmp_path / "fresh", *two, where="row < 40")
    assert (tmp_path / "merged" / "index.json").read_bytes() == (tmp_path / "fresh" / "index.json").read_bytes()


def test_a_merge_keeps_how_rows_are_read_and_stores_anew_only_what_is_as_its_source_had_it(tmp_path: Path) -> None:
    normalize = Normalize((0.5,) * WIDTH, (2.0,) * WIDTH)
    build(Table(0), tmp_path / "plain", options=options())
    build(Table(0), tmp_path / "baked", options=options(), preprocess=RowPreprocess(dtype="float32", normalize=normalize))
    merge(tmp_path / "same", tmp_path / "baked")
    assert np.array_equal(column(tmp_path / "same", "bars"), column(tmp_path / "baked", "bars"))
    assert Reader(tmp_path / "same").index.fields == Reader(tmp_path / "baked").index.fields
    merge(tmp_path / "half", tmp_path / "plain", preprocess=RowPreprocess(dtype="float16"))
    assert np.array_equal(column(tmp_path / "half", "bars"), Table(0).data["bars"].astype("f2"))
    with pytest.raises(OptionError, match=rf"{tmp_path / 'baked'}: its rows were made with .*--normalize"):
        merge(tmp_path / "twice", tmp_path / "baked", preprocess=RowPreprocess(dtype="float16"))


def test_normalisation_that_is_applied_when_rows_are_read_is_inherited(tmp_path: Path) -> None:
    build(Table(0), tmp_path / "auto", options=options(), preprocess=RowPreprocess(normalize="auto"))
    merge(tmp_path / "same", tmp_path / "auto", where="split == 'train'")
    field = Reader(tmp_path / "same").index.fields[0]
    assert field.normalize is not None
    assert field == Reader(tmp_path / "auto").index.fields[0]


def test_datasets_that_do_not_go_together_are_refused(tmp_path: Path, two: tuple[Path, Path]) -> None:
    run(make_raw(tmp_path / "raw"), tmp_path / "images")
    with pytest.raises(OptionError, match=rf"{tmp_path / 'images'} holds images, each with a key, and {two[0]} rows without keys"):
        source(two[0], tmp_path / "images")
    build(Table(0, columns=3), tmp_path / "other", options=options())
    with pytest.raises(OptionError, match=rf"{two[0]} and {tmp_path / 'other'} differ in .*: columns of bars is .*--columns venue,ts"):
        source(two[0], tmp_path / "other")


def test_the_fields_to_keep_are_chosen_and_stand_in_that_order(tmp_path: Path, two: tuple[Path, Path]) -> None:
    build(Table(0, columns=3), tmp_path / "other", options=options())
    merge(tmp_path / "some", two[0], tmp_path / "other", columns=("ts", "venue"))
    assert [f.name for f in Reader(tmp_path / "some").index.fields] == ["ts", "venue"]
    one, other = Table(0).data["ts"].tolist(), Table(0, columns=3).data["ts"].tolist()
    assert column(tmp_path / "some", "ts").tolist() == [*one[:20], *other[:20], *one[20:], *other[20:]]
    assert as_config(Reader(tmp_path / "some").index.settings, "")["columns"] == "ts,venue"
    merge(tmp_path / "picked", two[0], columns=("ts",), where="venue == 'y'")
    assert column(tmp_path / "picked", "ts").tolist() == Table(0).data["ts"][Table(0).data["venue"] == 1].tolist()
    with pytest.raises(OptionError, match=r"--columns bar: .*out_a has no such column; did you mean bars\? \(it has bars, venue, ts\)"):
        source(two[0], columns=("bar",))
    with pytest.raises(OptionError, match="--columns: no field is left"):
        source(two[0], columns=())
    with pytest.raises(OptionError, match="--columns: ts stands in it twice"):
        source(two[0], columns=("ts", "venue", "ts"))


def test_class_numbers_get_the_names_of_a_map_that_is_given_or_are_refused(tmp_path: Path) -> None:
    rows = [{"x": float(i), "label": label} for i, label in enumerate([0, 2, 1, -1])]
    build(rows, tmp_path / "bare", options=options())
    assert Reader(tmp_path / "bare").index.classes is None
    (tmp_path / "named").write_text("c\nb\na\n")
    merge(tmp_path / "named_out", tmp_path / "bare", classes_from=str(tmp_path / "named"))
    reader = Reader(tmp_path / "named_out")
    assert (reader.index.classes, column(tmp_path / "named_out", "label").tolist()) == (("c", "b", "a"), [0, 2, 1, -1])
    with pytest.raises(OptionError, match=r"one has names of classes, and the other numbers alone; name these with --classes-from"):
        source(tmp_path / "bare", tmp_path / "named_out")
    (tmp_path / "order").write_text("a\nb\nc\n")
    merge(tmp_path / "both", tmp_path / "bare", tmp_path / "named_out", classes_from=str(tmp_path / "order"))
    assert column(tmp_path / "both", "label").tolist() == [0, 2, 1, -1, 2, 0, 1, -1]
    (tmp_path / "short").write_text("a\nb\n")
    with pytest.raises(OptionError, match=r"bare has the class number 2, which none of the 2 names has"):
        merge(tmp_path / "none", tmp_path / "bare", classes_from=str(tmp_path / "short"))
    with pytest.raises(OptionError, match=r"named_out has rows of class c, which is not in it: add it there, or leave them out with --where"):
        merge(tmp_path / "none", tmp_path / "named_out", classes_from=str(tmp_path / "short"))


@pytest.mark.parametrize("kind", ["groups", "classes", "table", "hashes", "venue"])
def test_a_file_that_was_deleted_is_made_again_by_the_same_build(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    table = Table(0, names=tuple(f"v{i}" for i in range(300)))
    table.scan = functools.partial(stamped, table.scan)  # type: ignore[method-assign]
    build(table, out, options=options())
    before = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    next(path for path in (out / "shards").iterdir() if path.name.startswith(f"{kind}-")).unlink()
    assert not verify(out).ok
    build(table, out, options=options())
    assert verify(out).ok
    assert {path.name: path.read_bytes() for path in (out / "shards").iterdir()} == before


def stamped(scan: Any, progress: Any = None) -> RowScan:
    found: RowScan = scan(progress)
    return replace(found, stamps=("a", "b", "c", "d"))


def test_the_source_pickles_and_reads_on(two: tuple[Path, Path]) -> None:
    made = source(*two, where="row % 2 == 0")
    assert isinstance(made, CompiledRows)
    scan = made.scan()
    again = pickle.loads(pickle.dumps(made))
    wanted, found = made.read(3, scan.rows - 2), again.read(3, scan.rows - 2)
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_worker_processes_make_the_same_bytes(tmp_path: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    merge(tmp_path / "here", *two, where="row % 3 > 0")
    monkeypatch.undo()
    build(source(*two, where="row % 3 > 0"), tmp_path / "apart", options=BuildOptions(workers=2, shard_bytes=options().shard_bytes))
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / name / "shards").iterdir()} for name in ("here", "apart"))
    assert one == other
    assert (tmp_path / "here" / "index.json").read_bytes() == (tmp_path / "apart" / "index.json").read_bytes()


def test_the_settings_name_generations_and_no_path(tmp_path: Path, two: tuple[Path, Path]) -> None:
    merge(tmp_path / "merged", *two)
    data = (tmp_path / "merged" / "index.json").read_bytes()
    assert json.loads(data)["settings"]["source"] == {"kind": "dataset", "generations": [Reader(out).generation for out in two]}
    assert str(tmp_path).encode() not in data
