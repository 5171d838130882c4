"""Datasets whose rows are values and have no keys: what is written, read, described, verified, pruned and mirrored of them."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile import summary
from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.canonical import canonical
from mmcompile.format.describe import SAMPLE_COLUMNS, describe, samples_table
from mmcompile.format.index import Names, load_groups, load_index
from mmcompile.format.npy import save_blob
from mmcompile.format.prune import prune
from mmcompile.format.reader import Reader
from mmcompile.format.samples import BLOCK_BYTES, block_hashes, block_rows
from mmcompile.format.verify import verify
from tests.format.builders import REPOSITORY, change_index, file_of, put_array, put_index, read_everything, tree
from tests.format.test_hostile import NASTY, attack, spots
from tests.support import make_dataset

#: Rows of 1,000 bytes: 1,048 of them are a block.
WIDE = {"x": (249,), "n": (2,)}
BLOCK = 1048
MANY = tuple(f"column {i}" for i in range(249 + 8))


def table(root: Path, rows: int = 5000, shards: tuple[int, ...] = (2500, 1000, 1500), **others: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = {"x": rng.normal(size=(rows, 249)).astype(np.float32), "n": rng.integers(0, 9, (rows, 2)).astype(np.int16)}
    arguments: dict[str, Any] = {"groups": [("AAPL", 2500), ("MSFT", rows)], "splits": {"train": 2500, "val": rows - 2500}}
    make_dataset(root, values=values, shards=shards, keyed=False, **arguments | others)
    return values


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keyless") / "out"
    table(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "out"))


def test_a_block_is_hashed_over_its_bytes_of_one_field_after_the_other(root: Path) -> None:
    index, _ = load_index(root)
    assert (index.row_bytes, block_rows(index.fields), BLOCK * 1000 <= BLOCK_BYTES < (BLOCK + 1) * 1000) == (1000, BLOCK, True)
    x, n = (np.load(file_of(root, kind)) for kind in ("x", "n"))
    hashes = np.load(file_of(root, "hashes"))
    assert (hashes.dtype.str, hashes.shape) == ("<u8", (3,))
    for i, start in enumerate(range(0, 2500, BLOCK)):
        part = slice(start, start + BLOCK)
        assert hashes[i] == xxhash.xxh3_64_intdigest(x[part].tobytes() + n[part].tobytes())
    assert block_hashes([x[:1], n[:1]], BLOCK).tolist() == [xxhash.xxh3_64_intdigest(x[:1].tobytes() + n[:1].tobytes())]


def test_a_row_larger_than_a_block_is_a_block(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": np.ones((3, BLOCK_BYTES // 8 + 1))}, keyed=False)
    assert len(np.load(file_of(tmp_path, "hashes"))) == 3
    assert verify(tmp_path).ok


def test_a_sound_dataset_is_ok(root: Path) -> None:
    report = verify(root)
    assert report.ok
    assert report.files == 2 + 1 + 1 + 9  # indexes, table, groups, shards
    assert tree(root) == tree(root)


@pytest.mark.parametrize(("row", "first", "last"), [(0, 0, 1047), (1047, 0, 1047), (1048, 1048, 2095), (2499, 2096, 2499)])
@pytest.mark.parametrize("field", ["x", "n"])
def test_a_flipped_byte_is_traced_to_its_block(root: Path, field: str, row: int, first: int, last: int) -> None:
    path = file_of(root, field)
    data = bytearray(path.read_bytes())
    width = {"x": 996, "n": 4}[field]
    data[4096 + row * width] ^= 1
    path.write_bytes(data)
    (problem,) = verify(root).problems
    assert (problem.what, problem.kind, problem.shard, problem.start, problem.stop) == (field, "changed", 0, first, last + 1)
    assert (problem.bad_rows, problem.rows, problem.sources) == (last + 1 - first, (), ())
    assert problem.message.endswith(f"shard 0, among rows {first} to {last} (AAPL[{first}] to AAPL[{last}])")


def test_blocks_that_follow_one_another_are_one_problem_and_others_are_their_own(tmp_path: Path) -> None:
    table(tmp_path, shards=(5000,))
    path = file_of(tmp_path, "x")
    data = bytearray(path.read_bytes())
    for row in (0, 1048, 4999):
        data[4096 + row * 996] ^= 1
    path.write_bytes(data)
    problems = verify(tmp_path).problems
    assert [(p.start, p.stop, p.bad_rows) for p in problems] == [(0, 2096, 2096), (4192, 5000, 808)]
    assert "(AAPL[0] to AAPL[2095])" in problems[0].message
    assert "(MSFT[1692] to MSFT[2499])" in problems[1].message


def test_a_short_file_names_the_blocks_that_are_gone(root: Path) -> None:
    path = file_of(root, "x", 2)
    path.write_bytes(path.read_bytes()[: 4096 + 1100 * 996])
    (problem,) = verify(root).problems
    assert (problem.kind, problem.shard, problem.start, problem.stop) == ("short", 2, 3500 + BLOCK, 5000)


def test_damage_beside_the_rows_is_said(root: Path) -> None:
    path = file_of(root, "hashes", 1)
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    (problem,) = verify(root).problems
    assert (problem.what, problem.shard, problem.bad_rows) == ("hashes", 1, 0)
    assert problem.message.endswith("shard 1, rows 2500 to 3499: whether its rows are whole is told by their file alone")
    other = file_of(root, "x", 1)
    other.write_bytes(other.read_bytes()[:-1] + b"\1")
    problem = next(p for p in verify(root).problems if p.what == "x")
    assert (problem.start, problem.stop, problem.bad_rows) == (2500, 3500, 1000)
    assert f"which cannot be told without shards/{path.name}" in problem.message
    path.unlink()
    assert {p.kind for p in verify(root).problems} == {"missing", "changed"}


def test_a_header_alone_may_be_damaged(root: Path) -> None:
    path = file_of(root, "n", 1)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    (problem,) = verify(root).problems
    assert (problem.bad_rows, problem.message.endswith("no row of it: the damage lies before or behind the rows")) == (0, True)


def test_info_shows_fields_columns_categories_units_splits_and_groups(tmp_path: Path) -> None:
    values = {"x": np.ones((9, 257), np.float32), "y": np.ones((9, 2)), "s": np.zeros(9, np.int32), "t": np.arange(9)}
    facts: dict[str, Any] = {"x": {"columns": MANY[:257]}, "y": {"columns": ("open", "close"), "normalize": ((1.0, 2.0), (3.0, 4.0))}}
    facts |= {"s": {"categories": ("a", "b")}, "t": {"unit": "ns"}}
    groups = [("A", 5), ("B", 6), ("A", 9)]
    make_dataset(tmp_path, None, np.arange(9) % 2, values=values, facts=facts, keyed=False, groups=groups, splits={"train": 5, "val": 4})
    info = describe(tmp_path)
    json.dumps(info)
    assert (info["keys"], info["groups"]) == (False, {"count": 3, "shortest": 1, "longest": 5})
    assert info["fields"][1]["columns"] == list(MANY[:257])
    lines = "\n".join(summary.info_lines(info))
    assert "x: float32 (257), 257 columns: column 0 column 1" in lines
    assert "y: float64 (2), 2 columns: open close, normalised when read, mean 1 2, std 3 4" in lines
    assert "s: int32, 2 categories: a b\n" in lines
    assert "t: int64, times in ns\n" in lines
    assert "splits     train 5, val 4" in lines
    assert "groups     3, of 1 to 5 rows" in lines
    make_dataset(tmp_path / "keyed", values={"x": np.ones(3)})
    assert [describe(tmp_path / "keyed")[key] for key in ("keys", "groups")] == [True, None]


def test_the_table_tells_group_and_number_of_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [("A", 5), ("B", 6), ("A", 9)]
    values = {"x": np.ones(9)}
    make_dataset(tmp_path, None, [0, 1, 7] * 3, values=values, keyed=False, groups=groups, classes=("u", "v"), shards=(6, 3), splits={"a": 5, "b": 4})
    rows = list(samples_table(tmp_path))
    monkeypatch.setattr("mmcompile.format.describe._LABELS", 2)
    assert list(samples_table(tmp_path)) == rows
    assert tuple(rows[0]) == SAMPLE_COLUMNS
    assert [r["key"] for r in rows] == ["a/A[0]", "a/A[1]", "a/A[2]", "a/A[3]", "a/A[4]", "B[0]", "b/A[0]", "b/A[1]", "b/A[2]"]
    assert [(r["row"], r["split"], r["label"], r["class"], r["row_hash"]) for r in rows[4:6]] == [(4, "a", 1, "v", None), (5, "b", 7, None, None)]


def test_prune_keeps_what_a_generation_without_keys_names(root: Path) -> None:
    before = {name for name in tree(root) if name.startswith("shards/")}
    (root / "shards" / ("hashes-" + "0" * 32 + ".npy")).write_bytes(b"not ours")
    table(root, groups=[("all of it", 5000)])
    report = prune(root, delete=True)
    gone = [name for name, _ in report.files]
    assert len(gone) == 1
    assert gone[0].startswith("groups-")
    assert len(report.others) == 1
    assert verify(root).ok
    assert before - {f"shards/{gone[0]}"} <= set(tree(root))


def test_names_and_groups_of_a_stranger_are_checked(tmp_path: Path) -> None:
    values = {"x": np.ones((4, 257), np.float32), "s": np.zeros(4, np.int32)}
    facts: dict[str, Any] = {"x": {"columns": MANY[:257]}, "s": {"categories": MANY[:300]}}
    make_dataset(tmp_path, values=values, facts=facts, keyed=False, groups=[("A", 1), ("B", 4)])
    shards = tmp_path / "shards"
    index, _ = load_index(tmp_path)

    def put(names: Any, suffix: str = "classes") -> str:
        return save_blob(shards, suffix, [canonical(names)], shards, ".json")

    def named(field: int, **changes: Any) -> None:
        def change(value: dict[str, Any]) -> None:
            value["fields"][field] |= changes

        change_index(tmp_path, change)

    good = json.loads((tmp_path / "index.json").read_bytes())["fields"]
    named(0, columns={"file": put(list(MANY[:256]))})
    with pytest.raises(CorruptShardError, match="256 names, the index says 257"):
        describe(tmp_path)
    with pytest.raises(CorruptShardError, match="256 names, the index says 257"):
        Reader(tmp_path).origins.field("x")
    assert [(p.what, p.kind) for p in verify(tmp_path).problems] == [("classes", "unreadable")]
    named(0, columns={"file": put([*MANY[:256], MANY[0]])})
    with pytest.raises(FormatError, match="names that differ"):
        Reader(tmp_path).origins.field("x")
    named(0, **good[0])
    named(1, categories={"file": "0" * 32})
    with pytest.raises(CorruptShardError, match="missing; run `mmcompile verify"):
        Reader(tmp_path).origins.field("s")
    assert [(p.what, p.kind) for p in verify(tmp_path).problems] == [("classes", "missing")]
    named(1, **good[1])
    for groups in (
        [["A", 3], ["B", 2], ["C", 4]],
        [["A", 1], ["B", 3]],
        [["A", 1], ["B", 5]],
        [["A", 0], ["B", 4]],
        [["A", 4]],
        [["A", 1, 4]],
        {"A": 4},
    ):
        said = {"count": 2 if groups == [["A", 4]] else len(groups), "file": put(groups, "groups")}
        change_index(tmp_path, lambda value, said=said: value.update(groups=said))  # type: ignore[misc]
        for use in (lambda: load_groups(tmp_path, load_index(tmp_path)[0]), lambda: describe(tmp_path), lambda: list(samples_table(tmp_path))):
            with pytest.raises(FormatError, match="groups"):
                use()
        assert [p.what for p in verify(tmp_path).problems] == ["groups"]
    assert index.fields[0].columns == Names(file=good[0]["columns"]["file"])


@pytest.mark.parametrize(
    "order", ["", "shuffled", "shuffled:", "shuffled:-1", "shuffled:01", "shuffled:1\n", "shuffled:1234567890123456789", 7, None]
)
def test_an_order_of_a_stranger_is_checked(root: Path, order: Any) -> None:
    change_index(root, lambda value: value.update(order=order))
    with pytest.raises(FormatError, match="order"):
        load_index(root)


def test_rows_with_keys_have_no_order(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": np.zeros((4, 2), np.float32)})
    change_index(tmp_path, lambda value: value.update(order="mixed"))
    with pytest.raises(FormatError, match="only of rows without keys"):
        load_index(tmp_path)


def test_a_hashes_file_of_another_length_is_refused(root: Path) -> None:
    put_array(root, "hashes", 0, np.zeros(4, "<u8"))
    (problem,) = [p for p in verify(root).problems if p.what == "hashes"]
    assert problem.kind == "long"


def test_reports_of_datasets_without_keys_are_valid(root: Path) -> None:
    schema = jsonschema.Draft202012Validator(json.loads((REPOSITORY / "schemas" / "report.schema.json").read_bytes()))
    schema.validate(describe(root))
    path = file_of(root, "x")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    schema.validate(verify(root).to_json())
    lines = "\n".join(summary.verify_lines(verify(root).to_json()))
    assert "among rows 2096 to 2499 (AAPL[2096] to AAPL[2499])" in lines
    assert "to mend it: delete these files" in lines
    assert "--repair" not in lines


def _field(i: int, **changes: Any) -> Any:
    return lambda value: value["fields"][i].update(changes)


FAULTS: dict[str, tuple[Any, str]] = {
    "columns that are too few": (_field(0, columns=["a"]), r"fields\[0\]\.columns must be a name for each number"),
    "columns of one name": (_field(0, columns=["a", "a"]), r"fields\[0\]\.columns must be names that differ"),
    "columns of a single number": (_field(1, columns=["a"]), r"fields\[1\]\.columns must be a name for each number"),
    "columns that are numbers": (_field(0, columns=[1, 2]), r"fields\[0\]\.columns\[0\]"),
    "columns in a file that climbs": (_field(0, columns={"file": "../x"}), r"fields\[0\]\.columns\.file"),
    "300 columns in the index": (_field(0, shape=[300], columns=[str(i) for i in range(300)]), r"fields\[0\]\.columns"),
    "columns in a file that is missing": (_field(0, columns={"file": "0" * 32}), "missing; run"),
    "categories of a float": (_field(0, categories=["a"]), "an integer one for categories"),
    "categories in a file that is missing": (_field(1, categories={"file": "0" * 32}), "missing; run"),
    "a unit unheard of": (_field(1, unit="h"), r"fields\[1\]\.unit"),
    "a unit of a float": (_field(0, unit="s"), "an integer one for categories and unit"),
    "columns of a class": (_field(2, columns=["a"]), r"fields\[2\]"),
    "a layout of a value": (_field(0, layout="chw"), "null for a value"),
    "a mean for three columns": (_field(0, normalize={"mean": [0, 0, 0], "std": [1, 1, 1]}), "normalize"),
    "keys that are true": (lambda value: value.update(keys=True), "keys must be false"),
    "no groups": (lambda value: value.update(groups={"count": 0, "file": "0" * 32}), r"groups\.count"),
    "more groups than rows": (lambda value: value.update(groups={"count": 13, "file": "0" * 32}), r"groups\.count"),
    "groups in a file that climbs": (lambda value: value.update(groups={"count": 1, "file": "../x"}), r"groups\.file"),
    "groups in a file that is missing": (lambda value: value.update(groups={"count": 1, "file": "0" * 32}), "missing; run"),
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("few") / "out"
    values = {"x": np.ones((12, 2), np.float32), "t": np.arange(12)}
    make_dataset(root, None, None, values=values, keyed=False, groups=[("A", 5), ("B", 12)], shards=(5, 7), facts={"t": {"unit": "s"}})
    return root


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_an_index_of_values_is_named(few: Path, tmp_path: Path, fault: str) -> None:
    root = Path(shutil.copytree(few, tmp_path / "out"))
    change, said = FAULTS[fault]
    change_index(root, lambda value: value["fields"].append(_label()) if fault == "columns of a class" else None)
    change_index(root, change)
    assert attack(root)
    with pytest.raises(FormatError, match=said):
        read_everything(root)
    assert not verify(root).ok


def _label() -> dict[str, Any]:
    return {"name": "label", "dtype": "int64", "shape": [], "meaning": "class", "layout": None, "scale": 1.0, "normalize": None}


@given(st.data())
def test_any_value_of_an_index_of_a_table_may_be_anything(few: Path, data: st.DataObject) -> None:
    value = json.loads((few / "index.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(spots(value)[1:]))
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = data.draw(NASTY)
        if len(spots(value)) < 2:
            break
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(few, Path(folder) / "out"))
        put_index(root, canonical(value))
        attack(root)


@settings(max_examples=50)
@given(
    st.sampled_from(["x", "t", "hashes", "groups"]), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3), st.integers(0, 99)
)
def test_any_bytes_of_a_file_of_a_table_may_be_any(few: Path, kind: str, edits: list[tuple[int, int]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(few, Path(folder) / "out"))
        path = next((root / "shards").glob("groups-*")) if kind == "groups" else file_of(root, kind, 1)
        data = bytearray(path.read_bytes())
        for at, byte in edits:
            data[at % len(data)] = byte
        path.write_bytes(data[: len(data) - cut % len(data)])
        changed = path.read_bytes() != (few / "shards" / path.name).read_bytes()
        attack(root)
        assert verify(root).ok != changed


#: What words say and a schema cannot.
ONLY_WORDS = {
    "columns that are too few",
    "columns in a file that is missing",
    "categories in a file that is missing",
    "a mean for three columns",
    "more groups than rows",
    "groups in a file that is missing",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_refuses_what_a_schema_can_of_values(few: Path, fault: str) -> None:
    value = json.loads((few / "index.json").read_bytes())
    if fault == "columns of a class":
        value["fields"].append(_label())
    FAULTS[fault][0](value)
    schema = json.loads((REPOSITORY / "schemas" / "index.schema.json").read_bytes())
    assert jsonschema.Draft202012Validator(schema).is_valid(value) == (fault in ONLY_WORDS)
