"""Files of strangers: whatever lies in the folder, what comes out is the data or a FormatError that names the file and the fault.

Every hash is right in these datasets, so that nothing is caught merely because a file was changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError, NotADatasetError, VersionError
from mmcompile.format.canonical import canonical
from mmcompile.format.index import Index, load_index
from mmcompile.format.npy import ALIGN, file_name, hash_bytes, header
from mmcompile.format.prune import prune
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.format.builders import REPOSITORY, change_index, copy, file_of, put_array, put_file, put_index, put_table, read_everything

Change = Callable[[dict[str, Any]], Any]


def attack(root: Path) -> list[FormatError]:
    """Use everything that reads a dataset; returns the FormatErrors.  Any other exception goes through."""
    uses: list[Callable[[], object]] = [
        lambda: read_everything(root, "mmap"),
        lambda: read_everything(root, "pread"),
        lambda: prune(root, delete=False),
        lambda: json.dumps(verify(root, workers=2).to_json()),
    ]
    errors = [error for use in uses if (error := caught(use)) is not None]
    assert all("\n" not in str(e) and str(root) in str(e) for e in errors), errors
    return errors


def caught(use: Callable[[], object]) -> FormatError | None:
    try:
        use()
    except FormatError as error:
        return error
    return None


def set_field(i: int, **values: Any) -> Change:
    return lambda v: v["fields"][i].update(values)


def set_top(**values: Any) -> Change:
    return lambda v: v.update(values)


def claim_rows(value: dict[str, Any], rows: int, **values: Any) -> None:
    value.update(samples=rows, splits=[{"name": "all", "start": 0, "stop": rows}], statistics={}, **values)


FAULTS: dict[str, tuple[Change, str]] = {
    "not an object": (lambda v: [v], "the document must be an object"),
    "another format": (set_top(format="zarr"), "format must be 'mmcompile'"),
    "a boolean version": (set_top(version=True), "version must be an integer"),
    "version 0": (set_top(version=0), "version must be an integer"),
    "an unknown key": (set_top(more=1), r"unknown \['more'\]"),
    "a missing key": (lambda v: {k: v[k] for k in v if k != "samples"}, r"missing \['samples'\]"),
    "no fields": (set_top(fields=[]), "fields must be a list of 1"),
    "300 fields": (lambda v: v.update(fields=[{**v["fields"][0], "name": f"f{i}"} for i in range(300)]), "fields must be a list"),
    "fields of one name": (lambda v: v.update(fields=[v["fields"][0]] * 2), "names that differ"),
    "an absolute field name": (set_field(0, name="/etc/passwd"), r"fields\[0\]\.name"),
    "a field name that climbs": (set_field(0, name="../x"), r"fields\[0\]\.name"),
    "a field name with a newline": (set_field(0, name="image\n"), r"fields\[0\]\.name"),
    "a reserved field name": (set_field(0, name="rows"), r"fields\[0\]\.name"),
    "a field name that is no text": (set_field(0, name=["x"]), r"fields\[0\]\.name"),
    "an object dtype": (set_field(0, dtype="object"), r"fields\[0\]\.dtype"),
    "an object dtype by its code": (set_field(0, dtype="|O"), r"fields\[0\]\.dtype"),
    "a big-endian dtype": (set_field(0, dtype=">i4"), r"fields\[0\]\.dtype"),
    "a dtype that is no text": (set_field(0, dtype=["u1"]), r"fields\[0\]\.dtype"),
    "a negative shape": (set_field(0, shape=[3, -4, 5]), r"fields\[0\]\.shape"),
    "a shape of zero": (set_field(0, shape=[3, 0, 5]), r"fields\[0\]\.shape"),
    "a shape of floats": (set_field(0, shape=[3.0, 4, 5]), r"fields\[0\]\.shape"),
    "a huge shape": (set_field(0, shape=[3, 1 << 62, 5]), r"fields\[0\]\.shape"),
    "a shape of 4000 digits": (set_field(0, shape=[3, 10**299, 5]), r"fields\[0\]\.shape"),
    "a product that overflows": (set_field(0, shape=[3, 1 << 32, 1 << 32]), r"fewer than 2\^46"),
    "too many axes": (set_field(0, shape=[1] * 17), r"fields\[0\]\.shape"),
    "an image of two axes": (set_field(0, shape=[4, 5]), "of 3 axes"),
    "an image of a million channels": (set_field(0, shape=[1 << 20, 4, 5]), "channels"),
    "Fortran layout": (set_field(0, layout="fortran"), "layout"),
    "a meaning unheard of": (set_field(0, meaning="sound"), "meaning"),
    "a class with a shape": (set_field(1, shape=[2]), "of 0 axes, int64, for meaning class"),
    "a mask of floats": (set_field(0, meaning="mask", layout=None, dtype="float32", shape=[4, 5]), "for meaning mask"),
    "a mask with a layout": (set_field(0, meaning="mask", dtype="uint8", shape=[4, 5]), "layout"),
    "boxes of five numbers": (set_field(0, meaning="boxes", layout=None, dtype="float32", shape=[4, 5], normalize=None), "4 numbers"),
    "keypoints of four numbers": (set_field(0, meaning="keypoints", layout=None, dtype="float32", shape=[2, 4], normalize=None), "3 numbers"),
    "text of two axes": (set_field(0, meaning="text", layout=None, dtype="uint8", shape=[2, 4]), "for meaning text"),
    "a volume of two axes": (set_field(0, meaning="volume", layout=None, shape=[2, 4]), "for meaning volume"),
    "an image of one view": (set_field(0, views=1, shape=[1, 3, 4, 5]), "views"),
    "as many views as nothing": (set_field(0, views=4, shape=[3, 3, 4, 5]), "views"),
    "views of an image without its axis": (set_field(0, views=3, shape=[3, 4, 5]), "for meaning image"),
    "views of a class": (set_field(1, views=2, shape=[2]), "views"),
    "a count of an image": (set_field(0, count="label"), "count"),
    "a count that is a class": (set_field(0, meaning="value", layout=None, normalize=None, count="label"), "the count of"),
    "a count that is not there": (set_field(0, meaning="value", layout=None, normalize=None, count="n"), "the count of"),
    "a scale of zero": (set_field(0, scale=0), "scale"),
    "a negative scale": (set_field(0, scale=-1.5), "scale"),
    "a scale of text": (set_field(0, scale="1"), "scale"),
    "a std of zero": (set_field(0, normalize={"mean": [0, 0, 0], "std": [1, 0, 1]}), "std above 0"),
    "a mean for two channels": (set_field(0, normalize={"mean": [0, 0], "std": [1, 1]}), "normalize"),
    "a mean for labels": (set_field(1, normalize={"mean": [], "std": []}), "of an image"),
    "negative samples": (set_top(samples=-1), "samples"),
    "samples of 2^60": (set_top(samples=1 << 60), "samples"),
    "rows of more than 2^62 bytes": (lambda v: claim_rows(v, 1 << 52, fields=[v["fields"][0] | {"shape": [3, 1024, 1024]}]), r"2\^62"),
    "no shards": (set_top(shards=0), "shards"),
    "more shards than samples": (set_top(shards=13), "shards"),
    "a table that climbs": (set_top(table="../../../../../../etc/passwd"), "table"),
    "a table in capitals": (set_top(table="A" * 32), "table"),
    "a table with a newline": (set_top(table="0" * 32 + "\n"), "table"),
    "a table of NUL": (set_top(table="\0" * 32), "table"),
    "a split that overlaps": (set_top(splits=[{"name": "a", "start": 0, "stop": 8}, {"name": "b", "start": 7, "stop": 12}]), "begins at 8"),
    "a split that runs backwards": (set_top(splits=[{"name": "a", "start": 0, "stop": 12}, {"name": "b", "start": 12, "stop": 3}]), "begins at 12"),
    "splits that end early": (set_top(splits=[{"name": "a", "start": 0, "stop": 11}]), "end at 12"),
    "splits of one name": (set_top(splits=[{"name": "a", "start": 0, "stop": 8}, {"name": "a", "start": 8, "stop": 12}]), "new name"),
    "no splits": (set_top(splits=[]), "splits"),
    "class names twice": (set_top(classes=["a", "b", "a"]), "classes"),
    "class names twice in two forms": (set_top(classes=["a", {"bytes": "a"}]), "classes"),
    "a class that is a number": (set_top(classes=[1]), "classes"),
    "300 classes": (set_top(classes=[str(i) for i in range(300)]), "classes"),
    "a class file that climbs": (set_top(classes={"file": "../x"}), r"classes\.file"),
    "a class file that is not there": (set_top(classes={"file": "0" * 32}), "missing"),
    "a rejects file that climbs": (set_top(rejects={"count": 1, "file": "../x"}), r"rejects\.file"),
    "rejects without a file": (set_top(rejects={"count": 1, "file": None}), "rejects"),
    "a rejects file without rejects": (set_top(rejects={"count": 0, "file": "0" * 32}), "rejects"),
    "a negative count of rejects": (set_top(rejects={"count": -1, "file": "0" * 32}), r"rejects\.count"),
    "settings that are a list": (set_top(settings=[]), "settings"),
    "a version that is a number": (set_top(versions={"numpy": 2}), r"versions\.numpy"),
    "a pixel revision of 0": (set_top(pixel_revision=0), "pixel_revision"),
    "statistics of no split": (set_top(statistics={"x": {}}), "statistics"),
    "statistics of no image": (set_top(statistics={"all": {"label": None}}), "statistics"),
    "statistics of text": (set_top(statistics={"all": {"image": {"pixels": 1, "mean": ["a"] * 3, "std": [1] * 3, "sums": []}}}), "mean"),
    "settings nested deeply": (lambda v: v.update(settings={"a": json.loads("[" * 100 + "]" * 100)}), "nested"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_an_index_is_named(root: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    change_index(root, change)
    errors = attack(root)
    assert errors
    with pytest.raises(FormatError, match=said):
        read_everything(root)
    assert not verify(root).ok


RAW = {
    "empty": b"",
    "NUL bytes": bytes(100),
    "not UTF-8": b'{"\xff":1}',
    "a UTF-16 document": '{"format":"mmcompile"}'.encode("utf-16"),
    "an open list a megabyte deep": b"[" * (1 << 20),
    "an object a megabyte deep": b'{"a":' * 200_000,
    "NaN": b'{"format":NaN}',
    "Infinity": b'{"format":-Infinity}',
    "1e999": b'{"format":1e999}',
    "5000 digits": b'{"format":' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"format":"\\ud800"}',
    "a duplicated key": b'{"format":"mmcompile","format":"mmcompile"}',
    "two documents": b"{}{}",
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_document_are_refused(root: Path, name: str) -> None:
    put_index(root, RAW[name])
    errors = attack(root)
    assert len(errors) >= 3
    assert all("index.json" in str(e) for e in errors)
    assert not verify(root).ok


def test_a_newer_version_says_what_to_do(root: Path) -> None:
    change_index(root, lambda v: {"format": "mmcompile", "version": 7, "whatever": []})
    assert {type(e) for e in attack(root)} == {VersionError}


SPOTS = ["index.json", "generation", "table", "image", "samples", "keys"]


@pytest.mark.parametrize("spot", SPOTS)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "link out", "dangling", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(root: Path, tmp_path: Path, spot: str, kind: str) -> None:
    path = {"index.json": root / "index.json", "generation": root / "generations" / f"{load_index(root)[1]}.json"}.get(spot) or file_of(root, spot)
    content = path.read_bytes()
    path.unlink()
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("may not make devices")
    else:
        path.symlink_to({"link": path.name + ".other", "link out": outside, "dangling": tmp_path / "absent"}[kind])
        if kind == "link":
            path.with_name(path.name + ".other").write_bytes(content)
    report = verify(root)
    assert not report.ok
    assert any(p.kind in ("unreadable", "missing") for p in report.problems)
    if spot != "generation" or kind == "dangling":
        with pytest.raises(FormatError):
            read_everything(root)


@pytest.mark.parametrize("folder", ["shards", "generations"])
def test_folders_that_are_links_or_files_are_refused(root: Path, tmp_path: Path, folder: str) -> None:
    shutil.move(root / folder, tmp_path / "outside")
    (root / folder).symlink_to(tmp_path / "outside")
    assert len(attack(root)) >= 3
    assert not verify(root).ok
    (root / folder).unlink()
    (root / folder).write_bytes(b"")
    attack(root)
    if folder == "shards":
        with pytest.raises(CorruptShardError):
            Reader(root)
        assert not verify(root).ok


@pytest.mark.parametrize(
    "rows",
    [
        [0, 9, 3],
        [12, 0, 0],
        [5, 4, 2],
        [5, 4, 4],
        [2**64 - 1, 4, 9],
        [2**63, 2**63, 12],
        [2**64 - 5, 8, 9],
    ],
)
def test_rows_of_a_table_that_do_not_add_up_are_refused(root: Path, rows: list[int]) -> None:
    table = np.load(file_of(root, "table"))
    table["rows"] = np.array(rows, np.uint64)
    put_table(root, table)
    errors = attack(root)
    assert len(errors) == 3
    assert all("table-" in str(e) for e in errors)
    assert [p.what for p in verify(root).problems] == ["table"]


def test_a_sum_that_wraps_around_is_no_sum(tmp_path: Path) -> None:
    root = tmp_path / "out"
    (root / "shards").mkdir(parents=True)
    (root / "generations").mkdir()
    n = 1 << 53
    value = {
        "format": "mmcompile",
        "version": 1,
        "fields": [{"name": "x", "dtype": "uint8", "shape": [1, 1, 1], "meaning": "image", "layout": "chw", "scale": 1, "normalize": None}],
        "splits": [{"name": "all", "start": 0, "stop": n}],
        "samples": n,
        "shards": 2049,
        "table": "0" * 32,
        "classes": None,
        "settings": {},
        "versions": {},
        "pixel_revision": 1,
        "statistics": {},
        "rejects": {"count": 0, "file": None},
    }
    index = Index.from_bytes(canonical(value), root)
    table = np.zeros(2049, index.table_dtype())
    table["rows"] = n
    assert int(table["rows"].sum()) == n
    put_index(root, canonical(value))
    put_table(root, table)
    with pytest.raises(CorruptShardError, match="18,455,751,272,964,292,608, the index says"):
        Reader(root)


@pytest.mark.parametrize(
    "shape_of",
    [
        lambda a: header(np.dtype(">i8"), (5,)) + a.tobytes(),
        lambda a: header(a.dtype, (5, 1)) + a.tobytes(),
        lambda a: header(a.dtype, (1 << 60,)) + a.tobytes(),
        lambda a: header(a.dtype, (5,)).replace(b"False", b"True ") + a.tobytes(),
        lambda a: header(a.dtype, (5,)).replace(b"'<i8'", b"'|O8'") + a.tobytes(),
        lambda a: header(a.dtype, (5,)).replace(b"(5,)", b"(-5)") + a.tobytes(),
        lambda a: header(a.dtype, (5,))[: ALIGN // 2],
        lambda a: header(a.dtype, (5,)) + a.tobytes() + b"x",
        lambda a: header(a.dtype, (5,)) + a.tobytes()[:-1],
        lambda a: b"",
    ],
)
def test_no_header_of_a_stranger_is_believed(root: Path, shape_of: Callable[[Any], bytes]) -> None:
    path = put_file(root, "label", 0, shape_of(np.arange(5, dtype="<i8")))
    errors = attack(root)
    assert len(errors) == 2
    assert all(isinstance(e, CorruptShardError) and path.name in str(e) for e in errors)
    (problem,) = verify(root).problems
    assert (problem.what, problem.shard) == ("label", 0)
    assert problem.kind in ("unreadable", "short", "long")


@pytest.mark.parametrize("stops", [[9, 3, 40, 60, 90], [0] * 5, [2**64 - 1] * 5, [2**63, 2**63 + 1, 2**63 + 2, 2**63 + 3, 2**64 - 1], [1 << 40] * 5])
def test_key_offsets_of_a_stranger_are_checked(root: Path, stops: list[int]) -> None:
    samples = np.load(file_of(root, "samples", 0))
    samples["key_stop"] = np.array(stops, np.uint64)
    put_array(root, "samples", 0, samples)
    assert len(attack(root)) == 2
    assert not verify(root).ok


def test_a_hash_of_a_table_is_only_ever_hex_digits(root: Path) -> None:
    table = np.load(file_of(root, "table"))
    table["image"][0] = np.frombuffer(b"../../../../etc/", "<u8")
    put_table(root, table)
    errors = attack(root)
    assert all("shards/image-" in str(e) and "etc" not in str(e) for e in errors)


def test_one_file_in_two_roles_is_a_problem(root: Path) -> None:
    table = np.load(file_of(root, "table"))
    table["image"][1] = table["image"][0]
    put_table(root, table)
    assert len(attack(root)) == 2
    assert not verify(root).ok


# --- limits: nothing is allocated because a file claims it ---

LIMITED = """
import resource, sys, os, re
from tests.format.builders import read_everything
from mmcompile.errors import FormatError
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (160 << 20),) * 2)
for engine in ("mmap", "pread"):
    try:
        read_everything(__import__("pathlib").Path(sys.argv[1]), engine)
        print("read")
    except FormatError as error:
        print(type(error).__name__, error)
"""


def read_limited_memory(root: Path) -> str:
    """What reading everything gives in a process that may take 160 MiB more."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LIMITED, root], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sparse(path: Path, head: bytes, size: int) -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def test_a_sound_dataset_can_be_read_within_the_limit(root: Path) -> None:
    assert read_limited_memory(root).split() == ["read", "read"]


def test_a_gigabyte_of_json_is_refused_unread(root: Path) -> None:
    sparse(root / "index.json", b"{", 1 << 30)
    found = read_limited_memory(root)
    assert found.count("1,073,741,824 bytes, the limit is 1,048,576") == 2


def test_class_names_and_rejects_of_a_gigabyte_are_refused_unread(root: Path) -> None:
    sparse(root / "shards" / file_name("classes", "0" * 32, ".json"), b"[", 1 << 30)
    change_index(root, set_top(classes={"file": "0" * 32}))
    assert read_limited_memory(root).count("the limit is 268,435,456") == 2
    sparse(root / "shards" / file_name("rejects", "0" * 32, ".jsonl"), b"", 1 << 30)
    change_index(root, set_top(classes=None, rejects={"count": 1, "file": "0" * 32}))
    assert read_limited_memory(root).count("the limit is 268,435,456") == 2


def test_rows_and_shards_that_are_only_claimed_are_refused(root: Path) -> None:
    change_index(root, lambda v: claim_rows(v, 1 << 40, shards=1 << 39))
    assert read_limited_memory(root).count("CorruptShardError") == 2


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_row_that_is_only_claimed_is_refused(root: Path, engine: str) -> None:
    change_index(root, set_field(0, shape=[3, 1 << 40, 4]))
    assert read_limited_memory(root).count("CorruptShardError") == 2
    path = file_of(root, "image")
    for use in (
        lambda r: r.column("image"),
        lambda r: r.row("image", 0),
        lambda r: r.view("image", 0),
        lambda r: r.gather("image", np.arange(3)),
    ):
        with pytest.raises(CorruptShardError, match=path.name):
            use(Reader(root, engine=engine))


def test_rows_that_later_shards_only_claim_are_refused(root: Path) -> None:
    table = np.load(file_of(root, "table"))
    table["rows"][2] = 1 << 48
    put_table(root, table)
    rows = (1 << 48) + 9
    change_index(root, lambda v: claim_rows(v, rows))
    for field in ("image", "label"):
        with pytest.raises(CorruptShardError, match=file_of(root, field, 2).name):
            Reader(root).column(field)


@pytest.mark.parametrize("kind", ["table", "samples", "keys", "image"])
def test_files_that_are_nothing_but_a_hole_are_refused_or_mapped(root: Path, kind: str) -> None:
    rows = 1 << 30
    index, _ = load_index(root)
    table = np.load(file_of(root, "table"))
    if kind == "table":
        dtype = index.table_dtype()
        sparse(root / "shards" / file_name("table", "0" * 32), header(dtype, (rows,)), ALIGN + rows * dtype.itemsize)
        change_index(root, lambda v: claim_rows(v, rows, shards=rows, table="0" * 32))
        assert read_limited_memory(root).count("a hole at byte 4,096") == 2
        return
    if kind == "keys":
        samples = np.load(file_of(root, "samples", 0))
        samples["key_stop"] = np.full(5, rows)
        put_array(root, "samples", 0, samples)
        table = np.load(file_of(root, "table"))
        sparse(root / "shards" / file_name("keys", "0" * 32), header(np.dtype("u1"), (rows,)), ALIGN + rows)
        table["keys"][0] = 0
        put_table(root, table)
        assert read_limited_memory(root).count("do not rise by 0 to 65,536 bytes") == 2
        return
    table = table[:1].copy()
    table["rows"] = rows
    dtypes = {f.name: (f.stored, f.shape) for f in index.fields} | {
        "samples": (np.load(file_of(root, "samples")).dtype, ()),
        "keys": (np.dtype("u1"), ()),
    }
    for name, (dtype, shape) in dtypes.items():
        table[name] = 0
        size = ALIGN + (0 if name == "keys" else rows * dtype.itemsize * int(np.prod(shape)))
        sparse(root / "shards" / file_name(name, "0" * 32), header(dtype, (0 if name == "keys" else rows, *shape)), size)
    change_index(root, lambda v: claim_rows(v, rows))
    value = json.loads((root / "index.json").read_bytes()) | {"shards": 1}
    digest = hash_bytes(header(table.dtype, (1,)) + table.tobytes())
    (root / "shards" / file_name("table", digest)).write_bytes(header(table.dtype, (1,)) + table.tobytes())
    put_index(root, canonical(value | {"table": digest}))
    reader = Reader(root, engine="mmap")
    assert reader.row("image", rows - 1).sum() == 0
    assert reader.gather("image", np.array([0, rows - 1])).sum() == 0
    code = (
        LIMITED.split("for engine")[0]
        + "from mmcompile.format.reader import Reader\n"
        + "for engine in ('mmap', 'pread'):\n    reader = Reader(sys.argv[1], engine=engine)\n    try: reader.samples(0)\n"
        + "    except FormatError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout.count("do not fit into memory") == 2, done.stderr


# --- properties: a valid dataset, changed at random ---

NASTY = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        2,
        11,
        13,
        255,
        256,
        1 << 31,
        1 << 53,
        (1 << 53) + 1,
        1 << 63,
        10**200,
        0.5,
        1e300,
        "",
        "a",
        "../x",
        "\0",
        "0" * 32,
        [],
        {},
        [[]],
    ]
).map(deepcopy)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        out += spots(item, (*path, key))
    return out


def survives(pristine: Path, change: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = copy(pristine, Path(folder) / "out")
        change(root)
        attack(root)


@settings(max_examples=40)
@given(st.data())
def test_any_value_of_an_index_may_be_anything(pristine: Path, data: st.DataObject) -> None:
    value = json.loads((pristine / "index.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(spots(value)[1:]))
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        if data.draw(st.booleans()) and isinstance(inside, dict):
            del inside[path[-1]]
        else:
            inside[path[-1]] = data.draw(NASTY)
        if len(spots(value)) < 2:
            break
    survives(pristine, lambda root: put_index(root, canonical(value)))


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    out = bytearray(data)
    for at, byte in edits:
        out[at % len(out)] = byte
    return bytes(out)


EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255) | st.sampled_from(b'{}[]":,0129-.e\\')), min_size=1, max_size=4)


@settings(max_examples=40)
@given(EDITS)
@example([(0, ord("["))])
def test_any_bytes_of_an_index_may_be_any(pristine: Path, edits: list[tuple[int, int]]) -> None:
    survives(pristine, lambda root: put_index(root, edited((root / "index.json").read_bytes(), edits)))


@settings(max_examples=40)
@given(EDITS, st.integers(0, 400))
def test_any_bytes_of_a_table_may_be_any(pristine: Path, edits: list[tuple[int, int]], cut: int) -> None:
    def change(root: Path) -> None:
        path = file_of(root, "table")
        data = path.read_bytes()
        data = data[:ALIGN] + edited(data[ALIGN:], edits)
        data = data[:-cut] if cut > 390 else data
        digest = hash_bytes(data)
        (root / "shards" / file_name("table", digest)).write_bytes(data)
        change_index(root, set_top(table=digest))

    survives(pristine, change)


@settings(max_examples=40)
@given(EDITS, st.sampled_from(["samples", "keys", "label", "image"]), st.integers(0, 2), st.booleans())
def test_any_bytes_of_a_shard_may_be_any(pristine: Path, edits: list[tuple[int, int]], kind: str, shard: int, head: bool) -> None:
    def change(root: Path) -> None:
        data = file_of(root, kind, shard).read_bytes()
        put_file(root, kind, shard, edited(data[:ALIGN], edits) + data[ALIGN:] if head else data[:ALIGN] + edited(data[ALIGN:], edits))

    survives(pristine, change)


@settings(max_examples=40)
@given(st.data())
def test_any_file_may_be_changed_cut_or_gone_behind_its_name(pristine: Path, data: st.DataObject) -> None:
    def change(root: Path) -> None:
        files = sorted(p for p in root.rglob("*") if p.is_file())
        for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
            how = data.draw(st.sampled_from(["edit", "cut", "gone", "other"]))
            content = path.read_bytes()
            if how == "gone":
                path.unlink()
            elif how == "cut":
                path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
            elif how == "other":
                path.write_bytes(data.draw(st.sampled_from(files)).read_bytes() if all(f.exists() for f in files) else b"")
            else:
                path.write_bytes(edited(content, data.draw(EDITS)))
        now = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        before = {str(p.relative_to(pristine)): p.read_bytes() for p in pristine.rglob("*") if p.is_file()}
        try:
            assert verify(root).ok == (now == before)
        except NotADatasetError:
            assert "index.json" not in now

    survives(pristine, change)
