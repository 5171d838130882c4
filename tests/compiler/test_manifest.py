"""Lists of images: every dialect, what columns become, and what is wrong with rows."""

from __future__ import annotations

import io
import json
import os
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import mmcompile
from mmcompile.cli import program
from mmcompile.compiler.options import as_config
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import Scan, delimited
from mmcompile.compiler.sources import cells as cells_module
from mmcompile.compiler.sources import keys as keys_module
from mmcompile.compiler.sources import packed as packed_module
from mmcompile.compiler.sources import parquet as parquet_module
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.manifest import ManifestSource, Wishes
from mmcompile.errors import DecodeError, OptionError, OutputExistsError, SourceError
from mmcompile.format.fields import Names, Split
from mmcompile.format.reader import Reader
from tests.compiler.builds import SMALL, age, dataset, expected, images, inline, keys, picture, run, write


def layouts() -> Path:
    found = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if found is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    return Path(found)


def make(root: Path, text: str | bytes, name: str = "list.csv", images: int = 4) -> Path:
    """A list beside images 0.png, 1.png, …"""
    write(root, {f"{i}.png": picture(i) for i in range(images)})
    path = root / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def scan(raw: Path, **options: Any) -> Scan:
    found = open_source([str(raw)], SourceOptions(**options))
    assert isinstance(found, ManifestSource)
    return found.scan()


def values(found: Scan, name: str) -> list[Any]:
    return found.values[name].tolist()


# ---------------------------------------------------------------- real lists


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels-semicolon.csv", "labels-bom-crlf.csv", "labels-no-header.csv"])
def test_every_dialect_of_a_real_list_is_the_same_list(name: str) -> None:
    root = layouts() / "flat-csv"
    noted = json.loads((root / "expected.json").read_bytes())
    found, plain = scan(root / name), scan(root / "labels.csv")
    assert len(found.keys) == noted["samples"]
    assert found.labels is not None
    assert dict(zip(map(str, range(10)), np.bincount(found.labels).tolist(), strict=True)) == noted["labels"]
    assert found.keys == plain.keys
    assert found.classes == plain.classes == tuple("0123456789")
    np.testing.assert_array_equal(found.values, plain.values)
    np.testing.assert_array_equal(found.stat, plain.stat)


def test_a_real_list_builds_and_reads(tmp_path: Path) -> None:
    root = layouts() / "flat-csv"
    source = open_source([str(root / "labels.csv")], SourceOptions(columns=("name",)))
    mmcompile.build(source, tmp_path / "out", preprocess=mmcompile.Preprocess(mode="gray"), workers=1)
    ds = mmcompile.MMapShardDataset(tmp_path / "out")
    names = dict(enumerate(Reader(tmp_path / "out").index.fields[2].categories.listed))  # type: ignore[union-attr]
    image, label, name = ds[0]
    assert (tuple(image.shape), int(label), names[int(name)]) == ((1, 28, 28), 9, "Ankle boot")
    assert len(ds) == 200


def test_every_bad_row_of_a_real_list_is_counted_and_named() -> None:
    root = layouts() / "flat-csv"
    noted = json.loads((root / "expected.json").read_bytes())["bad"]
    with pytest.raises(SourceError) as caught:
        scan(root / "labels-bad.csv")
    for name in ("missing", "leaves_root", "twice", "with_folder"):
        assert noted[name] in str(caught.value), name
    assert caught.value.details["count"] == 4


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_metadata_beside_images_works_as_it_is(form: str, tmp_path: Path) -> None:
    root = layouts() / "hf-metadata" / form
    noted = json.loads((layouts() / "hf-metadata" / "expected.json").read_bytes())
    split = {"csv": "test", "jsonl": "train"}[form]
    found = scan(root)
    assert found.splits == (Split(split, 0, noted[f"{form}_{split}"]),)
    assert all(key.startswith(f"{split}/".encode()) for key in found.keys)
    assert found.classes == ("0", "1", "2")
    if form == "jsonl":
        assert [f.name for f in found.fields] == ["label", "score", "boxes", "labels", "boxes_count"]
        assert any("objects" in line for line in found.counts)
        assert np.isnan(found.values["score"]).sum() == 1


# ---------------------------------------------------------------- dialects

PLAIN = "file_name,label\n0.png,b\n1.png,a\n2.png,b\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", "|"),
        PLAIN.replace(",", ", "),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.rstrip("\n"),
        PLAIN.replace("\n", "\n\n"),
        "\ufeff" + PLAIN,
        PLAIN.encode("utf-16"),
        PLAIN.split("\n", 1)[1],
        '"file_name","label"\n"0.png","b"\n"1.png","a"\n"2.png","b"\n',
        PLAIN.replace("0.png", "./0.png").replace("1.png", "x/../1.png"),
    ],
    ids=["comma", "semicolon", "tab", "bar", "spaces", "crlf", "no newline", "empty lines", "bom", "utf-16", "no header", "quotes", "dots"],
)
def test_dialects(tmp_path: Path, text: str | bytes) -> None:
    found = scan(make(tmp_path, text))
    assert (list(found.keys), values(found, "label"), found.classes) == ([b"0.png", b"1.png", b"2.png"], [1, 0, 1], ("a", "b"))
    assert found.left_out == {"in no row": 1}


def test_quotes_hold_separators_and_newlines(tmp_path: Path) -> None:
    write(tmp_path, {"a, b.png": picture(9)})
    found = scan(make(tmp_path, 'path,label\n"a, b.png","two\nlines"\n0.png,"say ""x"""\n'))
    assert (list(found.keys), found.classes) == ([b"a, b.png", b"0.png"], ('say "x"', "two\nlines"))


def test_one_column_and_one_row(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path\n0.png\n"))
    assert found.counts == {"rows of list.csv, images by column path": 1}
    assert (list(found.keys), found.fields, found.classes) == ([b"0.png"], (), None)


def test_names_that_are_no_utf8_name_files(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes(picture(1))
    found = scan(make(tmp_path, b"path,label\ncaf\xe9.png,1\n0.png,0\n"))
    assert list(found.keys) == [b"caf\xe9.png", b"0.png"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("path,label\n", "no row in it"),
        ("path,label\n0.png,a\n1.png\n", "row 2 has 1 cell, expected 2"),
        ("path,label\n0.png,a\n1.png,a,b\n", "row 2 has 3 cells, expected 2"),
        ("path,label\n0.png,a\n1.png,\0\n", "line 3 holds a NUL"),
        ('path,label\n0.png,"a\n1.png,a\n', "a quote that is never closed"),
        ("path,label,label\n0.png,1,2\n", "columns 2 and 3 are both called label"),
        ("path,label\n0.png,a\n1.png,a\n0.png,b\n", "row 3: 0.png stands in row 1 already"),
        ("path,label\n0.png,a\n./0.png,b\n", "row 2: 0.png stands in row 1 already"),
        ("path,label\n0.png,a\n9.png,a\n", "row 2: 9.png: no such file"),
        ("path,label\n0.png,a\n../x.png,a\n", "row 2: ../x.png leaves the folder"),
        ("path,label\n0.png,a\na/../../x.png,a\n", "leaves the folder"),
        ("path,label\n0.png,a\n/etc/passwd,a\n", "row 2: /etc/passwd leaves the folder"),
        ("path,label\n0.png,a\n,a\n", "row 2: no path"),
        ("path,label\n0.png,a\n.,a\n", "row 2: . is a folder"),
        ("path,label\n0.png,a\nx\\1.png,a\n", "write / for \\"),
        ("path,split\n0.png,train\n1.png,\n", "row 2 is of no split"),
        (b"path,label\n0.png,a\n1.png,caf\xe9\n", "row 2: column label holds the byte 0xe9"),
        ("a,b\n1,2\n", "none of its columns (a, b) names images"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_row(tmp_path: Path, text: str | bytes, named: str) -> None:
    with pytest.raises((SourceError, OptionError)) as caught:
        ManifestSource(str(make(tmp_path, text))).scan()
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_in_place_of_a_file_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "d.png").mkdir()
    with pytest.raises(SourceError, match=r"row 2: d.png is no file"):
        scan(make(tmp_path, "path\n0.png\nd.png\n"))


def test_faults_beyond_the_first_are_counted(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^20 rows .*row 6: gone5.png: no such file; and 15 more \(looked for below"):
        scan(make(tmp_path, "path\n0.png\n" + "".join(f"gone{i + 1}.png\n" for i in range(20))))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"file_name": "0.png"}\n[1]\n', "line 2 is no JSON object"),
        ('{"file_name": "0.png"}\n{"file_name"\n', "line 2 is no JSON object"),
        ('{"file_name": "0.png"}\n{"label": 1}\n', "row 2: no path"),
        ('{"file_name": "0.png", "x": "\\u0000"}\n', "column x holds a NUL"),
        ('{"file_name": ["0.png"]}\n', "holds no paths"),
        ('{"file_name": "0.png", "label": "\\ud83d"}\n', "column label holds half a surrogate pair"),
        ("[" * 100_000, "line 1 is no JSON object"),
        ('{"file_name": "0.png", "x": ' + "9" * 5000 + "}\n", "line 1 is no JSON object"),
    ],
)
def test_wrong_json_is_one_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises((SourceError, OptionError)) as caught:
        ManifestSource(str(make(tmp_path, text, "list.jsonl"))).scan()
    assert named in str(caught.value)


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("called", ["label", "note"])
def test_a_text_that_no_index_holds_is_named_by_row_before_anything_is_decoded(tmp_path: Path, form: str, called: str) -> None:
    rows = [{"path": f"{i}.png", called: "z" * 1_200_000 if i == 2 else "cat"} for i in range(4)]
    raw = make(tmp_path / "raw", f"path,{called}\n" + "".join(f"{row['path']},{row[called]}\n" for row in rows), f"list.{form}")
    if form == "jsonl":
        raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), raw)
    with pytest.raises(SourceError, match=rf"(row 3.*|list.parquet#2): column {called} holds a text of 1,200,000 characters \('zzz"):
        scan(raw, columns=(called,))


def column(tmp_path: Path, texts: list[str], **options: Any) -> tuple[Any, Scan]:
    """What becomes of a column `x` of four cells: its Field (None where there is none), and the scan."""
    found = scan(make(tmp_path, "path,x\n" + "".join(f"{i}.png,{cell}\n" for i, cell in enumerate(texts))), **options)
    return next((f for f in found.fields if f.name == "x"), None), found


@pytest.mark.parametrize(
    ("cells", "dtype", "expected"),
    [
        (["1", "-2", "3", "9223372036854775807"], "int64", [1, -2, 3, 2**63 - 1]),
        (["1", "2.5", "-1e3", ".5"], "float64", [1, 2.5, -1000, 0.5]),
        (["1", "2.5", "", "4"], "float64", [1, 2.5, None, 4]),
        (["1", "NA", "3", "4"], "float64", [1, None, 3, 4]),
        (["inf", "1", "-inf", "0"], "float64", [float("inf"), 1, float("-inf"), 0]),
        (["true", "False", "TRUE", "false"], "bool", [True, False, True, False]),
        (["18446744073709551615", "0", "1", "2"], "uint64", [2**64 - 1, 0, 1, 2]),
        (["1", "none", ".", "-nan"], "float64", [1, None, None, None]),
        (["NAN", "\t2.5", "+NaN", "INF"], "float64", [None, 2.5, None, float("inf")]),
    ],
)
def test_columns_keep_their_numbers(tmp_path: Path, cells: list[str], dtype: str, expected: list[Any]) -> None:
    field, found = column(tmp_path, cells)
    assert (field.dtype, field.meaning) == (dtype, "value")
    assert [None if value != value else value for value in values(found, "x")] == expected


@pytest.mark.parametrize(
    ("cells", "unit", "expected"),
    [
        (["1970-01-02", "1969-12-31", "2000-01-01", "1970-01-01"], "D", [1, -1, 10957, 0]),
        (["1970-01-01 00:00:10", "1970-01-01T00:01:00", "1970-01-01 00:00", "1970-01-02"], "s", [10, 60, 0, 86400]),
        (["1970-01-01T00:00:10Z", "1970-01-01T02:00:00+02:00", "1970-01-01 00:00-0130", "1970-01-02T00:00+00"], "s", [10, 0, 5400, 86400]),
        (['"1970-01-01T02:00:00,5+02:00"'] * 4, "ms", [500] * 4),
        (["1970-01-01 00:00:00.5"] * 4, "ms", [500] * 4),
        (["1970-01-01 00:00:00.0005"] * 4, "us", [500] * 4),
        (["1970-01-01 00:00:00.000000001"] * 4, "ns", [1] * 4),
    ],
)
def test_times_are_counted_in_the_unit_that_holds_them(tmp_path: Path, cells: list[str], unit: str, expected: list[int]) -> None:
    field, found = column(tmp_path, cells)
    assert (field.dtype, field.unit, values(found, "x")) == ("int64", unit, expected)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (["9223372036854775807", "", "1", "2"], "would lose digits"),
        (["99999999999999999999", "1", "1", "2"], "over 64 bits"),
        (["9223372036854775808", "-1", "1", "2"], "over 64 bits"),
        (["2020-01-01", "", "2020-01-01", "2020-01-01"], "a time is missing (row 2)"),
        (["2020-02-31", "2020-01-01", "2020-01-01", "2020-01-01"], "no calendar has: 2020-02-31 (row 1)"),
        (["2020-01-01T00:00Z", "2020-01-01 00:00", "2020-01-01", "2020-01-01"], "some times say how far from UTC they are"),
        (["2000-01-01", "1600-01-01 00:00:00.000000001", "2500-01-01", ""], "beyond what 64 bits hold in ns: 1600-01-01 00:00:00.000000001 (row 2)"),
        (["1", "2.5", "1e999", "inf"], "beyond float64: 1e999 (row 3)"),
        (["inf", "2.5", "1", "-" + "9" * 401], "(row 4)"),
        (["", "", "", ""], "no value in it"),
    ],
)
def test_a_column_that_cannot_be_held_is_left_out_and_an_error_where_it_was_asked_for(tmp_path: Path, cells: list[str], why: str) -> None:
    field, found = column(tmp_path, cells)
    assert field is None
    assert any(why in line for line in found.warnings)
    with pytest.raises(OptionError) as caught:
        column(tmp_path, cells, columns=("x",))
    assert why in str(caught.value)


@pytest.mark.parametrize("cells", [["1", "x12", "3", "4"], ["x12", "", "3", "4.5"], ["2020-01-01", "2020-01-02", "2020-01-02", "x12"]])
def test_a_cell_that_makes_a_column_text_is_named(tmp_path: Path, cells: list[str]) -> None:
    row = cells.index("x12") + 1
    _, found = column(tmp_path, cells)
    (line,) = found.warnings
    assert line == f"column x is left out: row {row}: 'x12' is no value like others in it: mend it"
    with pytest.raises(OptionError, match=rf"--columns x: .*list\.csv: row {row}: 'x12' is no value like others in it: mend it"):
        column(tmp_path, cells, columns=("x",))
    _, found = column(tmp_path, ["a", "b", "c", "4"])
    assert not found.warnings
    records = [{"path": f"{i}.png", "x": cell if cell == "x12" else i + 0.5} for i, cell in enumerate(cells)]
    listed = make(tmp_path, "\n".join(map(json.dumps, records)), "list.jsonl")
    (line,) = scan(listed).warnings
    assert f"row {row}: 'x12'" in line
    with pytest.raises(OptionError, match=rf"list\.jsonl: row {row}: 'x12' is no value like others in it"):
        scan(listed, columns=("x",))


def test_texts_that_a_list_says_are_texts_are_categories_whatever_they_look_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS", 2)
    cells: list[Any] = ["1", "2", "4a", "3"]
    found = scan(make(tmp_path, "\n".join(json.dumps({"path": f"{i}.png", "x": cell}) for i, cell in enumerate(cells)), "list.jsonl"), columns=("x",))
    assert (found.fields[0].categories, values(found, "x")) == (Names(("1", "2", "3", "4a")), [0, 1, 3, 2])
    cells[:2] = [1, 2]
    with pytest.raises(OptionError, match="row 3: '4a' is no value like others"):
        scan(make(tmp_path, "\n".join(json.dumps({"path": f"{i}.png", "x": cell}) for i, cell in enumerate(cells)), "list.jsonl"), columns=("x",))


def test_a_label_that_is_no_number_as_others_are_is_said(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,label\n0.png,2\n1.png,10\n2.png,x\n"))
    assert (found.classes, values(found, "label")) == (("10", "2", "x"), [1, 0, 2])
    assert found.warnings == (
        "column label: row 3: 'x' is no value like others in it, so that all of them are names of classes, in their order as text",
    )


def test_a_number_of_json_that_is_beyond_float64_leaves_its_column_out(tmp_path: Path) -> None:
    found = scan(make(tmp_path, '{"path": "0.png", "x": 0.5}\n{"path": "1.png", "x": 1e400}\n', "list.jsonl"))
    assert not found.fields
    assert any("beyond float64: 1E+400 (row 2)" in line for line in found.warnings)


def test_text_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    cells = ["b", "", "a", "b"]
    field, found = column(tmp_path, cells)
    assert field is None
    assert found.counts["columns of text left out (x); --columns takes such as categories, --field NAME:kind=text as they are"] == 1
    field, found = column(tmp_path, cells, columns=("x",))
    assert (field.categories.listed, values(found, "x")) == (("a", "b"), [1, -1, 0, 1])
    assert any("1 missing in column x (first: row 2): -1" in line for line in found.warnings)


def test_words_for_nothing_are_texts_among_texts(tmp_path: Path) -> None:
    field, found = column(tmp_path, ["NA", "EU", "None", "EU"], columns=("x",))
    assert (field.categories.listed, values(found, "x")) == (("EU", "NA", "None"), [1, 0, 2, 0])


def test_json_tells_text_from_numbers(tmp_path: Path) -> None:
    lines = [{"path": f"{i}.png", "label": str(i % 2), "n": i, "f": i / 2, "t": i > 1, "o": {"a": 1}, "l": [1]} for i in range(3)]
    lines.append({"path": "3.png", "label": "1", "late": 5})
    found = scan(make(tmp_path, "\n".join(map(json.dumps, lines)), "list.jsonl"))
    assert found.classes == ("0", "1")
    assert {f.name: f.dtype for f in found.fields} == {"label": "int64", "n": "float64", "f": "float64", "t": "int64", "late": "float64"}
    assert values(found, "n")[:3] == [0, 1, 2]
    assert any("columns of several parts left out (l, o)" in line for line in found.counts)


@pytest.mark.parametrize(
    ("cells", "labels", "classes"),
    [
        ("dog,cat,dog,ant", [2, 1, 2, 0], ("ant", "cat", "dog")),
        ("10,9,x,9", [0, 1, 2, 1], ("10", "9", "x")),
        ("0,2,1,2", [0, 2, 1, 2], ("0", "1", "2")),
        ("1,3,3,1", [1, 3, 3, 1], ("0", "1", "2", "3")),
        ("0,-1,1,", [0, -1, 1, -1], ("0", "1")),
        ("0.0,1.0,,1.0", [0, 1, -1, 1], ("0", "1")),
        ("5000,70,5000,-3", [2, 1, 2, 0], ("-3", "70", "5000")),
        ("true,false,false,true", [1, 0, 0, 1], ("false", "true")),
        ("a,,b,a", [0, -1, 1, 0], ("a", "b")),
    ],
)
def test_labels(tmp_path: Path, cells: str, labels: list[int], classes: tuple[str, ...]) -> None:
    found = scan(make(tmp_path, "path,label\n" + "".join(f"{i}.png,{cell}\n" for i, cell in enumerate(cells.split(",")))))
    assert (values(found, "label"), found.classes) == (labels, classes)
    assert any("without a label" in line for line in found.warnings) == (-1 in labels)


def test_class_numbers_of_few_rows_stay_what_they_are(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,label\n0.png,3\n1.png,999\n"))
    assert values(found, "label") == [3, 999]
    assert found.classes == tuple(map(str, range(1000)))
    found = scan(make(tmp_path, "path,label\n0.png,70000\n1.png,123456789\n"))
    assert (values(found, "label"), found.classes) == ([0, 1], ("70000", "123456789"))
    assert any("new numbers in their order" in line for line in found.counts)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "PAR1", "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for raw in (path, tmp_path):
        with pytest.raises(OptionError, match=r"pip install 'mmcompile\[parquet\]'"):
            scan(raw)


def test_classes_that_differ_in_case_or_spaces_are_said(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,label\n0.png,cat\n1.png,Cat \n2.png,dog\n"))
    assert found.classes == ("Cat ", "cat", "dog")
    assert "classes 'Cat ' and 'cat' differ in case or spaces only" in found.warnings


def test_out_may_lie_beside_a_list_but_not_in_a_folder_that_is_looked_into(tmp_path: Path) -> None:
    path = make(tmp_path, "path,label\n0.png,a\n", "metadata.csv")
    assert run(open_source([str(path)], SourceOptions()), tmp_path / "out").samples == 1
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(open_source([str(tmp_path)], SourceOptions()), tmp_path / "other")


def test_a_long_list_is_held_in_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS", 256)
    monkeypatch.setattr(cells_module, "_CHUNK", 256)
    monkeypatch.setattr(keys_module, "_CHUNK", 256)
    rows = 8_000
    text = "".join(f"{i:08d}.png,class {i % 97},{i},{i / 7},some words of row {i}\n" for i in range(rows))
    path = make(tmp_path, "path,label,n,x,text\n" + text, images=1)
    tracemalloc.start()
    with pytest.raises(SourceError, match=f"^{rows:,} rows"):
        scan(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / rows < 700  # bytes; one short str alone takes 60, and a row has five


def test_a_label_that_is_no_class_is_said_and_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    path = make(tmp_path, "path,label\n0.png,0.5\n1.png,1.25\n")
    found = scan(path)
    assert found.classes is None
    assert any("column label is no label" in line for line in found.warnings)
    with pytest.raises(OptionError, match=r"--label-column label: it holds numbers that stand for no class"):
        scan(path, label_column="label")


def test_a_label_that_nobody_wants_is_a_value(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,label\n0.png,2\n1.png,1\n"), label_column="none")
    assert (found.classes, [(f.name, f.meaning) for f in found.fields]) == (None, [("label", "value")])


def test_where_missing_images_were_looked_for_is_said_and_a_folder_that_is_none_is_the_options(tmp_path: Path) -> None:
    write(tmp_path / "pictures", {"0.png": picture(0)})
    coco = {"images": [{"id": i, "file_name": f"{i}.png"} for i in range(2)], "annotations": [], "categories": []}
    write(tmp_path / "lists", {"list.csv": b"path\n0.png\n1.png\n", "coco.json": json.dumps(coco).encode()})
    for name in ("list.csv", "coco.json"):
        raw = str(tmp_path / "lists" / name)
        there = "lists" if name == "list.csv" else "pictures"  # where COCO keeps them, beside its folder of lists
        with pytest.raises(SourceError, match=rf"1\.png: no such file \(looked for below {tmp_path / there}; --images names another folder\)$"):
            open_source([raw], SourceOptions()).scan()
        with pytest.raises(SourceError, match=rf"1\.png: no such file \(looked for below {tmp_path / 'pictures'}; --images"):
            open_source([raw], SourceOptions(images=str(tmp_path / "pictures"))).scan()
        with pytest.raises(OptionError, match=rf"^--images {tmp_path / 'picture'}: no such folder$"):
            open_source([raw], SourceOptions(images=str(tmp_path / "picture")))


def test_columns_are_found_by_name_and_by_content(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "id,Class,Image Path\n7,a,0.png\n8,b,1.png\n"))
    assert (list(found.keys), values(found, "label"), values(found, "id")) == ([b"0.png", b"1.png"], [0, 1], [7, 8])
    found = scan(make(tmp_path, "id,what,where\n7,a,0.png\n8,b,1.png\n"), label_column="what")
    assert (list(found.keys), found.classes) == ([b"0.png", b"1.png"], ("a", "b"))
    found = scan(make(tmp_path, "image,label,other\n0.png,5,1.png\n"), image_column="other", columns=())
    assert (list(found.keys), [f.name for f in found.fields]) == ([b"1.png"], ["label"])


def test_images_may_lie_in_a_folder_beside_or_in_one_that_is_named(tmp_path: Path) -> None:
    write(tmp_path, {f"images/{i}.png": picture(i) for i in range(3)} | {"other/x.png": picture(5)})
    path = tmp_path / "list.csv"
    path.write_text("path\n0.png\n1.png\n")
    assert list(scan(path).keys) == [b"images/0.png", b"images/1.png"]
    assert list(scan(path, images=str(tmp_path / "images")).keys) == [b"0.png", b"1.png"]
    path.write_text(f"path\n{tmp_path}/images/2.png\n")
    assert list(scan(path).keys) == [b"images/2.png"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"columns": ("agee",)}, "--columns agee: .* has no such column; did you mean age?"),
        ({"label_column": "Lbel"}, "--label-column Lbel: .* did you mean label?"),
        ({"image_column": "IMG"}, "--image-column IMG: .* has no such column"),
        ({"columns": ("Age!", "age")}, "columns Age! and age would both be the field age"),
        ({"hidden": True}, "--hidden does not go with this RAW, which is read as manifest"),
    ],
)
def test_wrong_wishes_are_named(tmp_path: Path, options: Mapping[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        scan(make(tmp_path, "path,label,age,Age!\n0.png,1,2,3\n"), **options)


def test_a_column_called_label_that_is_not_the_label_is_kept(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,label,name\n0.png,7,b\n1.png,8,a\n"), label_column="name")
    assert (found.classes, values(found, "label"), values(found, "column_label")) == (("a", "b"), [1, 0], [7, 8])


def test_names_of_fields_are_cleaned(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,Größe (cm),2nd,classes,Image\n0.png,1,2,3,4\n"), image_column="path")
    assert [f.name for f in found.fields] == ["gr_e_cm", "column_2nd", "column_classes", "column_image"]


def test_a_column_of_splits_orders_rows(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,split,n\n0.png,test,0\n1.png,zoo,1\n2.png,train,2\n3.png,test,3\n"))
    assert found.splits == (Split("train", 0, 1), Split("test", 1, 3), Split("zoo", 3, 4))
    assert values(found, "n") == [2, 0, 3, 1]
    assert list(found.keys) == [b"2.png", b"0.png", b"3.png", b"1.png"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("train", "../x"), "row 2, column split: '../x' is no name of a split: expected a printable word, without /"),
        (("train", '"a\nb"'), r"row 2, column split: 'a\nb' is no name of a split"),
        (("train", "all"), 'column split: a split is called all, and reading split="all" joins all splits: give it another name'),
        (("train", "."), "row 2, column split: '.' is no name"),
        ([f"s{i}" for i in range(257)], "column split: 257 splits, at most 256 are possible"),
    ],
)
def test_splits_that_cannot_be_called_so_are_refused(tmp_path: Path, names: Sequence[str], why: str) -> None:
    raw = make(tmp_path, "path,split\n" + "".join(f"{i}.png,{name}\n" for i, name in enumerate(names)), images=len(names))
    with pytest.raises(SourceError) as caught:
        scan(raw)
    assert why in str(caught.value)
    assert str(caught.value).isprintable()


def test_lists_that_are_splits_are_called_so_that_they_can_be(tmp_path: Path) -> None:
    lists = [str(make(tmp_path, f"path\n{i}.png\n", name)) for i, name in enumerate(("all.csv", "new.csv"))]
    with pytest.raises(SourceError, match=r"a split is called all, .*; --split NAME=LIST gives a list another"):
        open_source(lists, SourceOptions()).scan()
    assert open_source(lists, SourceOptions(split=(f"old={lists[0]}",))).scan().splits == (Split("new", 0, 1), Split("old", 1, 2))  # type: ignore[union-attr]
    for name in ("../x", "a\nb", " "):
        with pytest.raises(OptionError, match="is no name of a split") as caught:
            open_source(lists, SourceOptions(split=(f"{name}={lists[0]}",)))
        assert str(caught.value).isprintable()


def test_blanks_around_splits_do_not_count_and_case_is_said(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,split\n0.png,train\n1.png,train \n2.png, train\n3.png,test\n"))
    assert (found.splits, found.warnings) == ((Split("train", 0, 3), Split("test", 3, 4)), ())
    found = scan(make(tmp_path, "path,split\n0.png,Train\n1.png,train \n2.png,train\n3.png,test\n"))
    assert len(found.splits) == 3
    assert found.warnings == ("splits Train and train differ in case only, and are two",)
    with pytest.raises(SourceError, match=r"row 2 is of no split"):
        scan(make(tmp_path, "path,split\n0.png,train\n1.png,  \n"))


def test_exclude_takes_rows_out_before_their_files_are_looked_for(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "path,n\n0.png,0\ngone.png,1\n2.png,2\n"), exclude=("gone.png",))
    assert (values(found, "n"), found.left_out) == ([0, 2], {"excluded": 1, "in no row": 2})
    assert list(scan(tmp_path / "list.csv", include=("[02].png",)).keys) == [b"0.png", b"2.png"]


def test_names_that_differ_in_case_only_are_said(tmp_path: Path) -> None:
    write(tmp_path, {"A.png": picture(7), "a.png": picture(8)})
    (line,) = scan(make(tmp_path, "path\n0.png\nA.png\na.png\n")).warnings
    assert line == "names that differ from another in case only: 1, as A.png (row 2) and a.png (row 3)"


def test_two_lists_in_one_folder_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "path\n0.png\n", "metadata.csv")
    make(tmp_path, '{"path": "0.png"}', "metadata.jsonl")
    with pytest.raises(SourceError, match=r"holds metadata.csv and metadata.jsonl: give one"):
        scan(tmp_path)


def test_lists_of_splits_share_columns_and_classes(tmp_path: Path) -> None:
    make(tmp_path / "train", "file_name,label,n\n0.png,b,1\n1.png,c,2\n", "metadata.csv")
    make(tmp_path / "test", "file_name,label\n0.png,a\n1.png,\n", "metadata.csv")
    found = scan(tmp_path)
    assert found.splits == (Split("train", 0, 2), Split("test", 2, 4))
    assert (values(found, "label"), found.classes) == ([1, 2, 0, -1], ("a", "b", "c"))
    assert list(found.keys) == [b"train/0.png", b"train/1.png", b"test/0.png", b"test/1.png"]
    assert any("test/metadata.csv row 2" in line for line in found.warnings)


def test_several_lists_are_splits(tmp_path: Path) -> None:
    train, val = make(tmp_path, "path,label\n0.png,b\n1.png,c\n", "val_list.csv"), make(tmp_path, "path,label\n2.png,a\n", "train.csv")
    other = make(tmp_path / "sub", "path,label\n0.png,c\n", "extra.csv")
    raw = [str(train), str(val), str(other)]
    found = open_source(raw, SourceOptions())
    assert isinstance(found, ManifestSource)
    made = found.scan()
    assert made.splits == (Split("train", 0, 1), Split("val", 1, 3), Split("extra", 3, 4))
    assert list(made.keys) == [b"2.png", b"0.png", b"1.png", b"sub/0.png"]
    assert (values(made, "label"), made.classes) == ([0, 1, 2, 2], ("a", "b", "c"))
    named = open_source(raw, SourceOptions(split=(f"test={other}", f"train={train}")))
    assert isinstance(named, ManifestSource)
    assert named.scan().splits == (Split("train", 0, 3), Split("test", 3, 4))
    assert named.identity()["splits"] == [["test", "sub/extra.csv"], ["train", "val_list.csv"]]
    for options, why in (
        ({"split": ("x=nowhere.csv",)}, r"--split …=nowhere.csv: expected one of the lists"),
        ({"split": ("x",)}, r"--split x: expected NAME=LIST"),
    ):
        with pytest.raises(OptionError, match=why):
            open_source(raw, SourceOptions(**options))
    config = as_config({"source": named.identity(), "preprocess": SMALL.settings(), "shard_bytes": 1 << 28}, "out")
    assert config["split"] == ["test=sub/extra.csv", "train=val_list.csv"]
    again = open_source(raw, SourceOptions(split=tuple(config["split"])))
    assert again.identity() == named.identity()
    val.write_text("path,label\n0.png,a\n")
    with pytest.raises(SourceError, match=r"train.csv row 1: 0.png stands in val_list.csv row 1 already"):
        found.scan()


def test_a_class_map_may_be_fixed(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("cat\nant\ndog\n")
    path = make(tmp_path, "path,label\n0.png,dog\n1.png,\n2.png,cat\n")
    found = scan(path, classes_from=str(names))
    assert (values(found, "label"), found.classes) == ([2, -1, 0], ("cat", "ant", "dog"))
    path.write_text("path,label\n0.png,0\n1.png,2\n")
    found = scan(path, classes_from=str(names))
    assert (values(found, "label"), found.classes) == ([0, 2], ("cat", "ant", "dog"))
    path.write_text("path,label\n0.png,dog\n1.png,yak\n")
    with pytest.raises(SourceError, match=r"row 2: class yak is not in the class map"):
        scan(path, classes_from=str(names))
    path.write_text("path,label\n0.png,0\n1.png,3\n")
    with pytest.raises(OptionError, match=r"numbers that stand for no class"):
        scan(path, classes_from=str(names), label_column="label")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"name,size\nx,1\n", "none of its columns \\(name, size\\) names images: .*--image-column"),
        (b"file_name,label\n", "no row in it"),
        (b"", "it is empty"),
        (None, "no regular file"),
    ],
)
@pytest.mark.parametrize("below", ["", "train"])
def test_metadata_of_images_that_is_not_understood_is_an_error(tmp_path: Path, text: bytes | None, why: str, below: str) -> None:
    write(tmp_path, {"train/a/0.png": picture(0), "train/b/0.png": picture(1)})
    path = tmp_path / below / "metadata.csv"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_bytes(text)
    with pytest.raises((SourceError, OptionError), match=why):
        scan(tmp_path)
    assert not isinstance(open_source([str(tmp_path)], SourceOptions(source="folder")), ManifestSource)


@pytest.mark.parametrize("folder", ["data/train", "Data", "a/b/test"])
def test_metadata_further_down_in_a_folder_that_is_built_without_it_is_said(tmp_path: Path, folder: str) -> None:
    write(tmp_path, {f"{folder}/{i}.png": picture(i) for i in range(3)})
    assert not scanned(tmp_path).warnings
    (tmp_path / folder / "metadata.csv").write_text("file_name,label\n" + "".join(f"{i}.png,{i}\n" for i in range(3)))
    inner = {"data/train": "data", "Data": "Data", "a/b/test": "a/b"}[folder]
    said = f"{folder}/metadata.csv tells of the images beside it, and is not used: to use it, mmcompile build {tmp_path / inner} OUT"
    assert scanned(tmp_path).warnings == (said,)
    assert scan(tmp_path / inner).classes == ("0", "1", "2")


def scanned(raw: Path) -> Scan:
    found = open_source([str(raw)], SourceOptions())
    assert isinstance(found, FolderSource)
    return found.scan()


@pytest.mark.parametrize("name", ["labels.csv", "train.tsv", "x.jsonl"])
@pytest.mark.parametrize("folder", ["images", "."])
def test_a_list_of_images_in_a_folder_that_is_built_without_it_is_said(tmp_path: Path, name: str, folder: str) -> None:
    write(tmp_path, {f"{folder}/{i}.png": picture(i) for i in range(8)})
    os.mkfifo(tmp_path / "pipe.csv")
    write(tmp_path, {"empty.csv": b"", "numbers.csv": b"a,b\n1,2\n", "gone.csv": b"a,b\ngone.png,2\n"})
    found = open_source([str(tmp_path)], SourceOptions())
    assert isinstance(found, FolderSource)
    assert not found.scan().warnings
    path = tmp_path / name
    path.write_text({"labels.csv": "what,label\n1.png,a\n", "train.tsv": "1.png\ta\n", "x.jsonl": '{"f": "1.png"}\n'}[name])
    made = found.scan()
    assert made.warnings == (f"{name} names these images, and is not used: to use it, mmcompile build {path} OUT",)
    assert len(made.keys) == 8
    assert len(scan(path).keys) == 1


@pytest.mark.parametrize("file", ["anno.json", "annotations/instances.json", "train/_annotations.coco.json"])
def test_annotations_in_a_folder_of_images_that_is_built_without_them_are_said(tmp_path: Path, file: str) -> None:
    write(tmp_path, {f"train/{i}.png": picture(i) for i in range(3)})
    write(tmp_path, {"about.json": b'{"a": 1}', file: b'{"images": [], "annotations": [], "categories": []}'})
    os.mkfifo(tmp_path / "pipe.json")
    warnings = open_source([str(tmp_path)], SourceOptions()).scan().warnings
    said = f"{file} says what is on images, and is not used: to use it, mmcompile build {tmp_path / file} OUT"
    assert [line for line in warnings if ".json" in line] == [said]


def test_columns_that_are_left_out_are_said_with_what_takes_them(tmp_path: Path) -> None:
    write(tmp_path, {f"{i}.png": picture(i) for i in range(4)})
    write(tmp_path, {"list.csv": b"front,back,note\n0.png,1.png,red\n2.png,3.png,blue\n"})
    found = scan(tmp_path / "list.csv").counts
    assert found["columns of paths of images left out (back); --field NAME:kind=image (or mask) takes such"] == 1
    assert found["columns of text left out (note); --columns takes such as categories, --field NAME:kind=text as they are"] == 1


@pytest.mark.parametrize("cell", ["03392", "6/03392", "7"])
@pytest.mark.parametrize("name", ["path", "image", "file_name", "Filename"])
def test_a_column_called_as_images_are_that_names_none_is_an_error_of_the_list(tmp_path: Path, name: str, cell: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"{name},n\n{cell},1\n{cell}1,2\n")
    for raw in (path, tmp_path):
        with pytest.raises(SourceError, match=f"column {name}: expected paths of images, found '{cell}'.*--source table"):
            scan(raw)
        assert not isinstance(open_source([str(raw)], SourceOptions(source="table")), ManifestSource)
    with pytest.raises(SourceError, match=r"^2 rows .*row 1: .*no such file"):
        scan(path, image_column=name)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match=r"holds list.csv and other.csv: give one"):
        scan(tmp_path)


def test_a_folder_with_only_a_list_of_images_elsewhere_is_an_error_of_the_list(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("n,where\n1,elsewhere/0.png\n2,elsewhere/1.png\n")
    for raw in (path, tmp_path):
        with pytest.raises(SourceError, match=r"^2 rows .*row 1: elsewhere/0.png: no such file"):
            scan(raw)


def test_a_column_of_images_that_is_asked_for_makes_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("a,b\n1,2\n")
    for options in ({}, {"label_column": "b"}):
        assert not isinstance(open_source([str(path)], SourceOptions(**options)), ManifestSource)
        for raw in (path, tmp_path):
            with pytest.raises(SourceError, match="row 1: 1: no such file"):
                scan(raw, image_column="a", **options)


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
@pytest.mark.parametrize("source", [None, "manifest", "coco"])
def test_a_pipe_in_place_of_a_list_is_refused_at_once(tmp_path: Path, name: str, source: str | None) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises((SourceError, OptionError), match="no regular file"):
        scan(path, source=source)


def test_a_list_at_a_url_is_refused_in_one_line() -> None:
    with pytest.raises(OptionError, match=r"^s3://bucket/labels.csv: a list of images is read from a disk"):
        open_source(["s3://bucket/labels.csv"], SourceOptions())


def test_a_table_of_numbers_is_no_list_of_images(tmp_path: Path) -> None:
    for text in ("a,b\n1,2\n", "size,age\n1,2\n"):
        path = make(tmp_path, text)
        assert not isinstance(open_source([str(path)], SourceOptions()), ManifestSource)


# ---------------------------------------------------------------- Parquet


def parquet(path: Path, table: dict[str, Any], features: dict[str, Any] | None = None, **options: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(table)
    if features is not None:
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(made, path, **options)
    return path


def test_real_parquet_files_hold_what_their_note_says(tmp_path: Path) -> None:
    root = layouts() / "hf-parquet"
    noted = json.loads((root / "expected.json").read_bytes())
    found = scan(root)
    assert found.labels is not None
    assert found.classes is not None
    assert found.classes[9] == "Ankle boot"
    assert (len(found.keys), found.splits) == (noted["rows"], (Split("train", 0, noted["rows"]),))
    assert {str(k): int((found.labels == k).sum()) for k in range(-1, 10)} == noted["labels"]
    assert sum(b"#" in key for key in found.keys) == noted["no_path"] + noted["null_images"]
    source = open_source([str(root)], SourceOptions())
    with pytest.raises(DecodeError, match="1 of 105 images was rejected"):
        run(source, tmp_path / "out", Preprocess(mode="gray", crop=28), rows=90)
    report = run(source, tmp_path / "out", Preprocess(mode="gray", crop=28), rows=90, max_rejects=1)
    assert (report.samples, report.rejects) == (104, 1)
    ds = mmcompile.MMapShardDataset(tmp_path / "out", split="all")
    assert (ds.targets >= -1).all()
    import pyarrow.parquet as pq

    rows = [row for i in range(2) for row in pq.read_table(root / "data" / f"train-0000{i}-of-00002.parquet").to_pylist()]
    rows = [row for row in rows if row["image"] is not None and row["image"]["bytes"] is not None]
    for i, row in enumerate(rows):
        assert int(ds[i][1]) == (-1 if row["label"] is None else row["label"])
        pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert pixels.shape != (28, 28) or np.array_equal(ds[i][0].numpy()[0], pixels)


def packed(root: Path, n: int = 23, **options: Any) -> Path:
    images = [{"bytes": picture(i), "path": f"{i}.png"} for i in range(n)]
    return parquet(root / "data" / "train.parquet", {"image": images, "label": [i % 3 for i in range(n)]}, row_group_size=7, **options)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_path_in_place_of_bytes_is_that_of_a_file(tmp_path: Path, absolute: bool) -> None:
    write(tmp_path / "raw" / "data", {"x.png": picture(0), "sub/y.png": picture(2)})
    path = str(tmp_path / "raw" / "data" / "x.png") if absolute else "x.png"
    rows = [{"bytes": picture(1), "path": "a.png"}, {"bytes": None, "path": path}, {"bytes": None, "path": "./sub/y.png"}]
    parquet(tmp_path / "raw" / "data" / "t.parquet", {"image": rows, "label": [1, 0, 1]}, row_group_size=2)
    source = open_source([str(tmp_path / "raw")], SourceOptions())
    found = source.scan()
    assert isinstance(found, Scan)
    assert (list(found.keys), found.warnings) == ([b"a.png", b"data/x.png", b"data/sub/y.png"], ())
    run(source, tmp_path / "out", workers=2)
    write(tmp_path / "plain", {"0.png": picture(1), "1.png": picture(0), "2.png": picture(2)})
    assert np.array_equal(images(tmp_path / "out"), expected(tmp_path / "plain", SMALL))
    assert keys(tmp_path / "out") == list(found.keys)
    age(tmp_path / "raw")
    write(tmp_path / "raw" / "data", {"x.png": picture(3)})
    assert run(source, tmp_path / "out").decoded == 1


def test_a_path_in_place_of_bytes_that_is_of_no_file_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"out.png": picture(0)})
    gone: list[Any] = [{"bytes": None, "path": path} for path in ("gone.png", "../out.png", str(tmp_path / "out.png"), None)]
    path = parquet(tmp_path / "raw" / "t.parquet", {"image": [{"bytes": picture(1), "path": "a.png"}, *gone]})
    (line,) = scan(path).warnings
    assert line == "rows that hold no image, and are rejects: 4 (t.parquet#1 has a path, gone.png, which is no file beside t.parquet)"
    with pytest.raises(DecodeError) as caught:
        run(str(path), tmp_path / "out")
    reason = "no bytes: the file is empty, or its row in a list holds no image and no path of a file below that folder"
    assert ["gone.png", reason] in [list(e) for e in caught.value.details["examples"]]
    (line,) = scan(parquet(tmp_path / "u.parquet", {"image": [{"bytes": picture(1), "path": "a.png"}, gone[3]]})).warnings
    assert line == "rows that hold no image, and are rejects: 1"


@pytest.mark.parametrize("workers", [1, 2])
def test_images_in_parquet_files_equal_the_same_files(tmp_path: Path, workers: int) -> None:
    packed(tmp_path / "raw")
    write(tmp_path / "plain", {f"{i}.png": picture(i) for i in range(23)})
    run(open_source([str(tmp_path / "raw")], SourceOptions()), tmp_path / "out", workers=workers)
    names = [key.decode() for key in keys(tmp_path / "out")]
    assert names == [f"{i}.png" for i in range(23)]
    made = expected(tmp_path / "plain", SMALL, [name.encode() for name in names])
    assert np.array_equal(images(tmp_path / "out"), made)


def test_a_changed_label_in_a_parquet_file_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    packed(tmp_path / "raw")
    source = open_source([str(tmp_path / "raw")], SourceOptions())
    assert run(source, tmp_path / "out").decoded == 23
    assert run(source, tmp_path / "out").kept == 23
    table = {"image": [{"bytes": picture(i), "path": f"{i}.png"} for i in range(23)], "label": [1] * 23}
    parquet(tmp_path / "raw" / "data" / "train.parquet", table)
    report = run(open_source([str(tmp_path / "raw")], SourceOptions()), tmp_path / "out")
    assert (report.decoded, report.copied) == (0, 23)
    run(open_source([str(tmp_path / "raw")], SourceOptions()), tmp_path / "fresh")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "fresh")


def test_parts_read_images_in_parquet_files(tmp_path: Path) -> None:
    packed(tmp_path / "raw")
    run(open_source([str(tmp_path / "raw")], SourceOptions()), tmp_path / "whole")
    for step in ({"plan_only": True}, {"part": "1/2"}, {"part": "2/2"}, {}):
        run(open_source([str(tmp_path / "raw")], SourceOptions()), tmp_path / "out", options=step)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "whole")


def test_a_parquet_file_that_was_replaced_is_never_read_from(tmp_path: Path) -> None:
    packed(tmp_path / "raw")
    source = open_source([str(tmp_path / "raw")], SourceOptions())
    assert isinstance(source, ManifestSource)
    found = source.scan()
    assert source.read(found.keys[20]) == picture(20)
    assert source.read(found.keys[3]) == picture(3)
    assert source.stat(found.keys[3]) == tuple(found.stat[3].tolist())
    packed(tmp_path / "raw", 24)
    for act in (source.read, source.stat):
        with pytest.raises(OSError, match=r"changed while read|not the one that was listed"):
            act(found.keys[3])


def test_rows_are_read_in_any_order_and_two_that_are_near_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path / "raw")
    monkeypatch.setattr(parquet_module, "_BATCH_ROWS", 2)
    source = ManifestSource(str(tmp_path / "raw"))
    items = source.scan().keys
    asked = packed_module._images
    begun: list[int] = []

    def images(table: Any, file: Any, group: int) -> Any:
        begun.append(group)
        return asked(table, file, group)

    monkeypatch.setattr(packed_module, "_images", images)
    for i in (1, 0, 2, 1, 4, 3, 6, 5, 7, 9, 8, 13, 12, 14):
        assert source.read(items[i]) == picture(i)
    assert begun == [0, 1, 2]
    for i in np.random.default_rng(0).permutation(23).tolist():
        assert source.read(items[i]) == picture(i)


def test_files_that_hugging_face_datasets_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "fine": datasets.ClassLabel(names=["x", "y", "z"]),
            "flag": datasets.Value("bool"),
            "text": datasets.Value("string"),
        }
    )
    pictures = [Image.open(io.BytesIO(picture(i))) for i in range(5)]
    made = datasets.Dataset.from_dict(
        {"image": pictures, "fine": [0, 1, 2, 1, -1], "flag": [True, False] * 2 + [True], "text": list("abcde")}, features=features
    )
    made.to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    found = scan(tmp_path)
    assert found.classes == ("x", "y", "z")
    assert values(found, "label") == [0, 1, 2, 1, -1]
    assert values(found, "flag") == [True, False, True, False, True]
    source = ManifestSource(str(tmp_path))
    for key, image in zip(source.scan().keys, pictures, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(source.read(key)))), np.asarray(image))


def test_images_elsewhere_and_in_the_list_clash(tmp_path: Path) -> None:
    packed(tmp_path / "raw")
    with pytest.raises(OptionError, match="--images: the images lie in column image"):
        scan(tmp_path / "raw", images=str(tmp_path))


def test_keys_of_images_without_a_path_of_their_own_say_file_and_row(tmp_path: Path) -> None:
    data = [{"bytes": picture(i), "path": path} for i, path in enumerate(["a", None, "b", "a", ""])]
    parquet(tmp_path / "x.parquet", {"img": data})
    assert list(scan(tmp_path / "x.parquet").keys) == [b"x.parquet#0", b"x.parquet#1", b"b", b"x.parquet#3", b"x.parquet#4"]


def test_plain_bytes_and_dtypes_in_parquet_files(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = {
        "picture": [picture(i) for i in range(3)],
        "note": ["x", "y", None],
        "small": pa.array([1, 2, 3], pa.int8()),
        "half": pa.array([1.5, None, 2], pa.float32()),
        "gap": pa.array([1, None, 2], pa.int32()),
        "big": pa.array([2**64 - 1, 0, 1], pa.uint64()),
        "ok": [True, False, True],
        "at": pa.array([0, 1, 2], pa.timestamp("us", "UTC")),
        "day": pa.array([0, 1, 2], pa.date32()),
        "l": [[1], [2], [3]],
        "dec": pa.array([1, 2, 3], pa.decimal128(5, 2)),
        "nothing": pa.nulls(3),
        "cat": pa.array(["b", "a", "b"]).dictionary_encode(),
        "kind": pa.array([1, 0, -1]),
    }
    features = {"kind": {"_type": "ClassLabel", "names": ["no", "yes"]}}
    path = parquet(tmp_path / "x.parquet", table, features)
    found = scan(path, columns=("small", "half", "gap", "big", "ok", "at", "day", "cat"))
    assert found.classes == ("no", "yes")
    assert values(found, "label") == [1, 0, -1]
    assert {f.name: (f.dtype, f.unit) for f in found.fields[1:]} == {
        "small": ("int8", None),
        "half": ("float32", None),
        "gap": ("float64", None),
        "big": ("uint64", None),
        "ok": ("bool", None),
        "at": ("int64", "us"),
        "day": ("int64", "D"),
        "cat": ("int64", None),
    }
    assert values(found, "big") == [2**64 - 1, 0, 1]
    assert values(found, "cat") == [1, 0, 1]
    assert np.isnan(found.values["gap"]).tolist() == [False, True, False]
    found = scan(path)
    assert [f.name for f in found.fields] == ["label", "small", "half", "gap", "big", "ok", "at", "day"]
    assert any("column dec is left out: decimals" in line for line in found.warnings)
    for name, why in (("dec", "decimals"), ("nothing", "no value"), ("l", "several parts")):
        with pytest.raises(OptionError, match=why):
            scan(path, columns=(name,))


def test_paths_in_a_parquet_file_are_those_of_a_csv_file(tmp_path: Path) -> None:
    made = parquet(tmp_path / "list.parquet", {"file_name": [f"{i}.png" for i in range(4)], "label": ["b", "a", None, "b"]})
    plain = scan(make(tmp_path, "file_name,label\n0.png,b\n1.png,a\n2.png,\n3.png,b\n"))
    found = scan(made)
    assert found.keys == plain.keys
    assert found.classes == plain.classes == ("a", "b")
    np.testing.assert_array_equal(found.values, plain.values)
    np.testing.assert_array_equal(found.stat, plain.stat)
    parquet(made, {"file_name": ["0.png", "gone.png"]})
    with pytest.raises(SourceError, match=r"list.parquet#1: gone.png: no such file"):
        scan(made)


def test_wrong_parquet_files_are_named(tmp_path: Path) -> None:
    path = packed(tmp_path)
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-10], b"x" * 100, whole[:4] + b"\xff" * 60 + whole[64:]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=r"train.parquet"):
            ManifestSource(str(path)).scan()
    path.write_bytes(whole)
    parquet(path.with_name("test.parquet"), {"label": [1]})
    with pytest.raises(SourceError, match=r"column image holds images in some files"):
        ManifestSource(str(tmp_path)).scan()
    parquet(path.with_name("test.parquet"), {"image": [{"bytes": b"", "path": ""}], "label": ["x"]})
    with pytest.raises(OptionError, match="other kinds of values in other files"):
        ManifestSource(str(tmp_path), Wishes(label="label")).scan()
    os.rename(path.with_name("test.parquet"), path.with_name("more.parquet"))
    with pytest.raises(SourceError, match=r"more.parquet is of no split, others are"):
        ManifestSource(str(tmp_path))


def test_a_page_of_images_that_is_not_what_its_checksum_says_is_damage(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, pictures = tmp_path / "a.parquet", [picture(i) for i in range(3)]
    pq.write_table(pa.table({"image": pictures, "label": [0, 1, 2]}), path, write_page_checksum=True, use_dictionary=False, compression="none")
    source = ManifestSource(str(path))
    listed = list(source.scan().keys)
    assert [source.read(key) for key in listed] == pictures
    data, stamp = bytearray(path.read_bytes()), path.stat()
    data[data.index(pictures[1]) + len(pictures[1]) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    packed_module._opened.clear()
    with pytest.raises(OSError, match="cannot be read"):
        source.read(listed[1])
    with pytest.raises(SourceError, match=r"a\.parquet: cannot be read: it is damaged"):
        ManifestSource(str(path)).scan()


def test_lists_of_two_forms_are_both_named_and_one_that_is_not_used_is_said(tmp_path: Path) -> None:
    text = make(tmp_path, "path,label\n0.png,1\n", "a.csv")
    packed = parquet(tmp_path / "b.parquet", {"path": ["0.png", "1.png"]})
    with pytest.raises(SourceError, match=rf"^{text} is text and {packed} a Parquet file: give lists of one form, or build them apart and merge$"):
        open_source([str(text), str(packed)], SourceOptions())
    found = scan(tmp_path)
    assert (list(found.keys), found.warnings) == ([b"0.png", b"1.png"], (f"{text} is not used beside the other lists",))


def test_parquet_files_name_their_splits(tmp_path: Path) -> None:
    for name in ("test-00000-of-00001", "train-00001-of-00002", "train-00000-of-00002", "validation-00000-of-00001-0a1b"):
        parquet(tmp_path / "data" / f"{name}.parquet", {"image": [{"bytes": picture(1), "path": name}]})
    found = scan(tmp_path)
    assert found.splits == (Split("train", 0, 2), Split("validation", 2, 3), Split("test", 3, 4))
    assert list(found.keys)[:2] == [b"train-00000-of-00002", b"train-00001-of-00002"]


# ---------------------------------------------------------------- building


def test_the_command_line_builds_a_list_and_says_what_it_found(tmp_path: Path) -> None:
    path = make(tmp_path / "raw", "path;label;age;sex;what\n0.png;b;1;m;x\n1.png;a;2;f;y\n")
    words = ["--crop", "8", "--workers", "1", "--label-column", "label", "--columns", "age,sex"]
    result = CliRunner().invoke(program, ["build", str(path), str(tmp_path / "out"), *words])
    assert result.exit_code == 0, result.output
    assert "rows of list.csv (semicolon), images by column path" in result.stdout
    again = CliRunner().invoke(program, ["info", str(tmp_path / "out"), "--config"])
    config = tmp_path / "config.json"
    config.write_text(again.stdout)
    assert json.loads(again.stdout)["columns"] == "age,sex"
    result = CliRunner().invoke(program, ["build", str(path), str(tmp_path / "again"), "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert dataset(tmp_path / "out") == dataset(tmp_path / "again")
    assert [f.name for f in Reader(tmp_path / "again").index.fields] == ["image", "label", "age", "sex"]
    for words, named in ((["--columns", "agee"], "did you mean age?"), (["--hidden"], "--hidden does not go with")):
        result = CliRunner().invoke(program, ["build", str(path), str(tmp_path / "no"), *words])
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert named in result.stderr


def test_a_path_is_all_that_python_needs(tmp_path: Path) -> None:
    path = make(tmp_path / "raw", "path,label\n0.png,b\n1.png,a\n")
    assert mmcompile.build(str(path), tmp_path / "out", preprocess=SMALL, workers=1).samples == 2


def test_a_changed_label_or_name_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make(tmp_path / "raw", "path,label,n\n" + "".join(f"{i}.png,{i % 2},{i}\n" for i in range(9)), images=9), tmp_path / "out"
    age(tmp_path / "raw")
    assert run(open_source([str(raw)], SourceOptions()), out).decoded == 9
    raw.write_text("path,label,n\n" + "".join(f"{i}.png,1,{i + 1}\n" for i in range(8)) + "new name.png,0,5\n")
    os.rename(tmp_path / "raw" / "8.png", tmp_path / "raw" / "new name.png")
    report = run(open_source([str(raw)], SourceOptions()), out)
    assert (report.decoded, report.copied) == (0, 9)
    run(open_source([str(raw)], SourceOptions()), tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")
    assert keys(out)[-1] == b"new name.png"
    assert Reader(out).gather("n", np.arange(9)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 5]
    before = dataset(out)
    report = run(open_source([str(raw)], SourceOptions()), out)
    assert (report.decoded, report.copied, report.kept) == (0, 0, 9)
    assert dataset(out) == before


# ---------------------------------------------------------------- values that are written in another way, and times


@pytest.mark.parametrize(
    ("cells", "first", "hint"),
    [
        (["0,2698", "1,5", "nan", "2,25"], "row 1: '0,2698'", "numbers are written as 1234.5"),
        (["5", "1,5", "7,5", "8,5"], "row 2: '1,5'", "numbers are written as 1234.5"),
        (["31.01.2020", "01.02.2020", "", "03.02.2020"], "row 1: '31.01.2020'", "times are written as 2023-01-31 09:30:00"),
    ],
)
def test_values_that_are_written_in_another_way_are_no_categories(tmp_path: Path, cells: list[str], first: str, hint: str) -> None:
    path = make(tmp_path, "path;x;y\n" + "".join(f"{i}.png;{cell};{i}\n" for i, cell in enumerate(cells)))
    with pytest.raises(OptionError, match=f"--columns x: .*list.csv: {first} is no value like others in it: {hint}: mend it, or give a list that"):
        scan(path, columns=("x",))
    found = scan(path)
    assert [f.name for f in found.fields] == ["y"]
    assert f"column x is left out: {first} is no value like others in it: {hint}: mend it" in found.warnings


def test_words_with_numbers_in_them_stay_categories(tmp_path: Path) -> None:
    path = make(tmp_path, "path;x\n0.png;a,5\n1.png;b\n2.png;1,5\n3.png;c\n")
    assert values(scan(path, columns=("x",)), "x") == [1, 2, 0, 3]


def records(tmp_path: Path, cells: Sequence[Any]) -> Path:
    return make(tmp_path, "".join(json.dumps({"path": f"{i}.png", "x": cell}) + "\n" for i, cell in enumerate(cells)), "list.jsonl")


@pytest.mark.parametrize("rows", [1, 1 << 14])
def test_times_in_json_lines_are_times(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_ROWS", rows)
    found = scan(records(tmp_path, ["2024-01-01", "2024-01-02 00:00:01", "1970-01-01", "2024-01-01T12:00:00"]))
    assert [(f.name, f.unit) for f in found.fields] == [("x", "s")]
    assert values(found, "x") == [1704067200, 1704153601, 0, 1704110400]
    listed = make(tmp_path, "path,x\n0.png,2024-01-01\n1.png,2024-01-02 00:00:01\n2.png,1970-01-01\n3.png,2024-01-01T12:00:00\n")
    assert values(scan(listed), "x") == values(found, "x")
    with pytest.raises(OptionError, match="a time is missing"):
        scan(records(tmp_path, ["2024-01-01", None, "1970-01-01", "2024-01-01"]), columns=("x",))
    mixed = scan(records(tmp_path, ["2024-01-01", "soon", "2024-01-01", "2024-01-03"]), columns=("x",))  # texts, as the list says
    assert (values(mixed, "x"), mixed.fields[0].categories) == ([0, 2, 0, 1], Names(("2024-01-01", "2024-01-03", "soon")))
    assert values(scan(records(tmp_path, ["NA", "none", "NA", "nan"]), columns=("x",)), "x") == [0, 2, 0, 1]
    assert values(scan(records(tmp_path, ["1,5", "2,5", "1,5", "3,5"]), columns=("x",)), "x") == [0, 1, 0, 2]


def test_the_first_rows_that_are_wrong_are_named_in_their_order_whatever_is_wrong_with_them(tmp_path: Path) -> None:
    path = make(tmp_path, 'path\n0.png\ngone.png\n0.png\n../out.png\n""\n1.png\nlost.png\n../more.png\n')
    with pytest.raises(SourceError) as caught:
        scan(path)
    lines = str(caught.value).partition(" cannot be built: ")[2].split("; ")
    assert [line.partition(":")[0] for line in lines[:5]] == ["row 2", "row 3", "row 4", "row 5", "row 7"]
    assert lines[5].startswith("and 1 more")
