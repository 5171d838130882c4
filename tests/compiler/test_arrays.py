"""Arrays in files: what they become, and what is said of those that are wrong."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import mmcompile
from mmcompile.cli import program
from mmcompile.compiler.sources.arrays import array_source, recognised
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.compiler.sources.selected import Selection
from mmcompile.errors import BuildError, OptionError, SourceError
from mmcompile.format.reader import Reader
from tests.compiler.builds import dataset

LAYOUTS = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
X = np.arange(120, dtype="f4").reshape(30, 4)


def read(form: str, *raw: Path, **more: Any) -> tuple[RowScan, dict[str, npt.NDArray[Any]]]:
    """What a source holds, read in three pieces."""
    source = array_source(form, [str(p) for p in raw], **more)
    scan = source.scan()
    cuts = [0, scan.rows // 3, scan.rows // 2, scan.rows]
    parts = [source.read(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    found = {f.name: np.concatenate([part[f.name] for part in parts]) for f in scan.fields}
    for f in scan.fields:
        assert (found[f.name].dtype, found[f.name].shape) == (f.stored, (scan.rows, *f.shape))
    return scan, found


def described(scan: RowScan) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [(f.name, f.dtype, f.shape, f.meaning) for f in scan.fields]


@pytest.mark.parametrize(
    "array",
    [
        X,
        X.astype(">f8"),
        np.asfortranarray(X),
        np.asfortranarray(np.arange(60).reshape(5, 3, 4)),
        X[:, 0] > 7,
        X.astype("f2")[:, None, :, None],
        np.arange(7, dtype="u8"),
    ],
    ids=["plain", "big-endian", "fortran", "fortran-3", "bool", "float16", "numbers"],
)
def test_a_npy_file_is_one_field(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    np.save(tmp_path / "a.npy", array)
    scan, found = read("npy", tmp_path / "a.npy")
    assert [f.name for f in scan.fields] == ["x"]
    assert np.array_equal(found["x"], array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_npz_file_has_a_field_for_each_array(tmp_path: Path, save: Any) -> None:
    arrays = {"X": X, "y": np.arange(30) % 3, "when": np.arange(30).astype("M8[s]")}
    save(tmp_path / "a.npz", **arrays)
    scan, found = read("npz", tmp_path / "a.npz")
    assert described(scan) == [("x", "float32", (4,), "value"), ("y", "int64", (), "class"), ("when", "int64", (), "value")]
    assert scan.fields[2].unit == "s"
    assert scan.classes == ("0", "1", "2")
    assert np.array_equal(found["x"], X)
    assert np.array_equal(found["when"], np.arange(30))


@pytest.mark.parametrize("names", ["{0}_{1}", "{1}_{0}"])
def test_arrays_named_by_split_are_splits(tmp_path: Path, names: str) -> None:
    made = {names.format(field, split): np.full((n, 2), n) for split, n in (("test", 3), ("train", 7)) for field in ("a", "b")}
    np.savez(tmp_path / "a.npz", **made)
    scan, found = read("npz", tmp_path / "a.npz")
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 7), ("test", 7, 10)]
    assert found["b"][:, 0].tolist() == [7] * 7 + [3] * 3


def test_a_record_array_has_a_field_for_each_part(tmp_path: Path) -> None:
    records = np.zeros(6, [("price", "f8"), ("size", "<i4", (2,))])
    records["price"], records["size"] = np.arange(6), np.arange(12).reshape(6, 2)
    np.save(tmp_path / "r.npy", records)
    scan, found = read("npy", tmp_path / "r.npy")
    assert described(scan) == [("price", "float64", (), "value"), ("size", "int32", (2,), "value")]
    assert np.array_equal(found["size"], records["size"])


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("x", (5, 8, 6), ((1, 8, 6), "image", "chw")),
        ("images", (5, 8, 6, 3), ((8, 6, 3), "image", "hwc")),
        ("image", (5, 3, 8, 6), ((3, 8, 6), "image", "chw")),
        ("x", (5, 3, 8, 3), ((3, 8, 3), "value", None)),
        ("other", (5, 8, 6), ((8, 6), "value", None)),
        ("x", (5, 8), ((8,), "value", None)),
    ],
)
def test_name_and_shape_say_what_a_picture_is(tmp_path: Path, name: str, shape: tuple[int, ...], wanted: Any) -> None:
    np.savez(tmp_path / "a.npz", **{name: np.zeros(shape, "u1"), "id": np.arange(5)})
    field = read("npz", tmp_path / "a.npz")[0].fields[0]
    assert (field.shape, field.meaning, field.layout) == wanted
    told = read("npz", tmp_path / "a.npz", meanings=[f"{name}=value"])[0].fields[0]
    assert (told.shape, told.meaning) == (shape[1:], "value")


def test_a_file_without_a_header_is_what_is_said(tmp_path: Path) -> None:
    X.astype(">i2").tofile(tmp_path / "a.bin")
    for shape in ("4", "30,4"):
        assert np.array_equal(read("raw", tmp_path / "a.bin", shape=shape, dtype=">i2")[1]["x"], X)
    for shape, message in (("7", "expected a multiple of 14 bytes"), ("31,4", "expected 31 rows of 8 bytes")):
        with pytest.raises(SourceError, match=message):
            read("raw", tmp_path / "a.bin", shape=shape, dtype=">i2")
    for shape, dtype in ((None, "u1"), ("4", None), ("0", "u1"), ("4x", "u1"), ("4", "object"), ("4", "U3")):
        with pytest.raises(OptionError, match=r"--shape|--array-dtype"):
            read("raw", tmp_path / "a.bin", shape=shape, dtype=dtype)


def test_a_folder_of_npy_files_is_a_sample_each(tmp_path: Path) -> None:
    for i in (2, 0, 1):
        np.save(tmp_path / f"{i}.npy", X[i])
    np.save(tmp_path / ".hidden.npy", X)
    scan, found = read("npy-folder", tmp_path)
    assert described(scan) == [("x", "float32", (4,), "value")]
    assert np.array_equal(found["x"], X[:3])
    np.save(tmp_path / "3.npy", X[0].astype("i4"))
    with pytest.raises(SourceError, match=r"row 3 .*3\.npy.*int32 \(4,\).*expected float32 \(4,\)"):
        read("npy-folder", tmp_path)
    np.save(tmp_path / "3.npy", X[0, :3])
    with pytest.raises(SourceError, match=r"3\.npy: 140 bytes, 0\.npy has 144: expected arrays of one dtype and shape"):
        read("npy-folder", tmp_path)


def test_a_folder_without_arrays_and_several_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no \.npy file, and no class folder that holds one"):
        read("npy-folder", tmp_path)
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", X)
    with pytest.raises(OptionError, match="--source npy is one file or folder, 2 were given"):
        open_source([str(tmp_path / "a.npy"), str(tmp_path / "b.npy")], SourceOptions())


def test_class_folders_of_npy_files_give_labels(tmp_path: Path) -> None:
    for i, name in enumerate(("dog/b", "cat/z", "cat/a", "empty/")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if not name.endswith("/"):
            np.save(tmp_path / f"{name}.npy", X[i])
    (tmp_path / "empty").mkdir()
    scan, found = read("npy-folder", tmp_path)
    assert scan.classes == ("cat", "dog", "empty")
    assert found["label"].tolist() == [0, 0, 1]
    assert np.array_equal(found["x"], X[[2, 1, 0]])


def idx(path: Path, array: npt.NDArray[Any], pack: bool = False) -> None:
    data = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if pack else data)


@pytest.mark.parametrize("pack", [False, True])
def test_idx_files_are_paired_and_split_by_their_names(tmp_path: Path, pack: bool) -> None:
    pixels, labels = np.random.default_rng(0).integers(0, 255, (9, 4, 5)).astype("u1"), np.arange(9, dtype="u1") % 4
    suffix = ".gz" if pack else ""
    for split, part in (("t10k", slice(6, 9)), ("train", slice(0, 6))):
        idx(tmp_path / f"{split}-images-idx3-ubyte{suffix}", pixels[part], pack)
        idx(tmp_path / f"{split}-labels-idx1-ubyte{suffix}", labels[part], pack)
    assert recognised([str(tmp_path)]) == "idx"
    scan, found = read("idx", tmp_path)
    assert described(scan) == [("image", "uint8", (1, 4, 5), "image"), ("label", "int64", (), "class")]
    assert [(s.name, s.stop) for s in scan.splits] == [("train", 6), ("test", 9)]
    assert scan.classes == ("0", "1", "2", "3")
    assert np.array_equal(found["image"][:, 0], pixels)
    assert np.array_equal(found["label"], labels)


@pytest.mark.skipif(LAYOUTS is None, reason="MMCOMPILE_CORPUS_LAYOUTS is not set")
def test_the_real_idx_files_and_arrays_are_what_is_expected_of_them(tmp_path: Path) -> None:
    folder = Path(str(LAYOUTS)) / "idx"
    expected = json.loads((folder / "expected.json").read_bytes())
    source = open_source([str(folder)], SourceOptions())
    scan = source.scan()
    assert isinstance(scan, RowScan)
    assert scan.rows == expected["idx"]
    scan, found = read("npz", folder / "digits.npz")
    assert [s.stop - s.start for s in scan.splits] == expected["digits"]
    with np.load(folder / "digits.npz") as arrays:
        assert np.array_equal(found["x"][:, 0], np.concatenate([arrays["x_train"], arrays["x_test"]]))


# ---------------------------------------------------------------- wrong input


def broken(tmp_path: Path, name: str) -> Path:
    """A file that is wrong in one way."""
    path = tmp_path / ("a.npz" if "npz" in name or "lengths" in name else "a.npy")
    data: bytes | None = None
    np.save(tmp_path / "good.npy", X)
    good = (tmp_path / "good.npy").read_bytes()
    if name == "cut":
        data = good[:-1]
    elif name == "empty":
        data = b""
    elif name == "text":
        data = b"a,b\n1,2\n"
    elif name == "header":
        data = good.replace(b"'descr'", b"'dtype'")
    elif name == "object":
        np.save(path, np.array([1, "a"], object), allow_pickle=True)
    elif name == "text-dtype":
        np.save(path, np.array(["a", "b"]))
    elif name == "complex":
        np.save(path, np.zeros(3, complex))
    elif name == "scalar":
        np.save(path, np.float64(3))
    elif name == "hours":
        np.save(path, np.zeros(3, "M8[h]"))
    elif name == "fortran":
        np.save(path, np.asfortranarray(np.zeros((5, 5000))))
    elif name == "negative":
        data = good.replace(b"(30, 4), ", b"(-3, 4), ")
    elif name == "lengths":
        np.savez(path, a=X, b=X[:7])
    elif name == "npz-names":
        np.savez(path, a=X, A=X)
    elif name == "npz-cut":
        np.savez(path, a=X)
        data = path.read_bytes()[:-30]
    elif name == "npz-member":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif name == "npz-short":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", good[:-9])
    elif name == "long":
        data = good + b"\0" * 16
    elif name == "npz-long":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", good + b"\0" * 16)
    elif name == "npz-crc":
        np.savez(path, b=X[:1], a=np.arange(120_000).reshape(30, -1))
        data = path.read_bytes()
        at = data.index(np.arange(100_000, 100_004).tobytes())
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    if data is not None:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "607 bytes, a float32 array of (30, 4) takes 608: it is cut off"),
        ("empty", "no .npy file"),
        ("text", "no .npy file"),
        ("header", "no .npy file"),
        ("object", "a pickle and is never loaded"),
        ("text-dtype", "strings have no number"),
        ("complex", "dtype complex128"),
        ("scalar", "a single number"),
        ("hours", "times in datetime64[h]"),
        ("fortran", "numpy.ascontiguousarray"),
        ("negative", "a shape of (-3, 4)"),
        ("lengths", "30 rows of a, and 7 of b"),
        ("npz-names", "both are the field a; rename one"),
        ("npz-cut", "no .npz file"),
        ("npz-member", "a .npz holds arrays (.npy) alone"),
        ("npz-short", "it is cut off"),
        ("long", "624 bytes, a float32 array of (30, 4) takes 608: it holds more than the 30 rows that it says"),
        ("npz-long", "(a.npy): 624 bytes, a float32 array of (30, 4) takes 608: it holds more than the 30 rows"),
        ("npz-crc", "(a.npy): damaged (it cannot be unpacked: Bad CRC-32 for file 'a.npy')"),
    ],
)
def test_a_wrong_file_is_named_before_a_row_is_read(tmp_path: Path, name: str, message: str) -> None:
    path = broken(tmp_path, name)
    with pytest.raises(SourceError) as caught:
        array_source(path.suffix[1:], [str(path)]).scan()
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compressed_file_that_ends_early_or_late_is_an_error_when_that_is_seen(tmp_path: Path) -> None:
    for rows, message in ((4, "ends before its 4 rows do"), (2, "holds more than the 2 rows that it says")):
        data = struct.pack(">BBBBII", 0, 0, 8, 2, rows, 5) + bytes(15)
        (tmp_path / "a-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
        with pytest.raises(SourceError, match=message):
            read("idx", tmp_path / "a-images-idx3-ubyte.gz")
    packed = bytearray(gzip.compress(struct.pack(">BBBBII", 0, 0, 8, 2, 9999, 5) + np.random.default_rng(0).bytes(5 * 9999)))
    packed[20_000:20_010] = bytes(10)
    (tmp_path / "a-images-idx3-ubyte.gz").write_bytes(packed)
    with pytest.raises(SourceError, match="damaged"):
        read("idx", tmp_path / "a-images-idx3-ubyte.gz")


def test_a_file_that_is_called_idx_and_is_none_is_shown_as_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "a-images-idx3-ubyte"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(SourceError) as caught:
        read("idx", path)
    said = "no IDX file, or a damaged one: it begins with 89 50 4e 47, expected 00 00, a type (08 to 0e), 1 to 8 axes, and 4 bytes for each of them"
    assert str(caught.value) == f"{path}: {said}"


def test_a_plain_idx_file_that_is_longer_than_its_header_says_is_refused(tmp_path: Path) -> None:
    idx(tmp_path / "a-images-idx3-ubyte", np.zeros((3, 4, 5), "u1"))
    with (tmp_path / "a-images-idx3-ubyte").open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError, match="holds more than the 3 rows that it says"):
        read("idx", tmp_path / "a-images-idx3-ubyte")


def test_compressed_files_that_cannot_hold_what_they_say_are_refused_before_a_row_is_read(tmp_path: Path) -> None:
    huge = (1 << 32) - 1
    (tmp_path / "a-images-idx3-ubyte.gz").write_bytes(gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, huge, 1, 1) + bytes(100)))
    with pytest.raises(SourceError, match=r"bytes cannot hold the 4,294,967,311 that a uint8 array"):
        array_source("idx", [str(tmp_path / "a-images-idx3-ubyte.gz")]).scan()


@pytest.mark.parametrize("form", ["npy", "npz", "npy-folder"])
def test_a_time_that_is_missing_is_named_with_its_row(tmp_path: Path, form: str) -> None:
    times = np.arange(6).astype("M8[s]")
    times[4] = "NaT"
    if form == "npy":
        np.save(tmp_path / "a.npy", times)
    elif form == "npz":
        np.savez(tmp_path / "a.npz", when=times)
    else:
        for i, when in enumerate(times):
            np.save(tmp_path / f"{i}.npy", np.array([when]))
    with pytest.raises(SourceError, match=r"row 4: a time that is missing \(NaT\)"):
        read(form, tmp_path if form == "npy-folder" else tmp_path / f"a.{form}")


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    for form, more in (("raw", {"shape": "4", "dtype": "u1"}), ("npy", {}), ("npz", {}), ("idx", {})):
        with pytest.raises(SourceError, match=r"a\.npy: no regular file"):
            read(form, tmp_path / "a.npy", **more)
    with pytest.raises(SourceError, match="no regular file"):
        read("npy-folder", tmp_path)
    for name in ("a.npy", "rows.txt"):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(tmp_path / name)
        with pytest.raises(OptionError, match="no regular file"):
            Selection(3, str(tmp_path / name), None)


def test_arrays_are_read_from_a_file_url(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    url = f"file://{tmp_path / 'a.npy'}"
    assert recognised([url]) == "npy"
    assert array_source("npy", [url]).scan().rows == 30


def test_a_zip_bomb_takes_no_more_memory_than_is_asked_for(tmp_path: Path) -> None:
    huge = 1 << 40
    header = np.lib.format.magic(1, 0)
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({huge}, 8), }}".encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header + struct.pack("<H", 118) + text + bytes(1000))
    with pytest.raises(SourceError, match="it is cut off"):
        array_source("npz", [str(tmp_path / "a.npz")]).scan()


def test_a_file_that_changes_after_it_was_listed_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    source = array_source("npy", [str(tmp_path / "a.npy")])
    source.scan()
    np.save(tmp_path / "a.npy", X[:20])
    with pytest.raises(SourceError, match="changed after it was listed"):
        source.read(0, 20)


def test_numbers_that_are_no_classes_are_named_with_their_remedy(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.where(np.arange(30) == 4, -7, 1))
    with pytest.raises(SourceError, match=r"row 4 is -7, expected class numbers .*--as y=value"):
        read("npz", tmp_path / "a.npz")
    assert read("npz", tmp_path / "a.npz", meanings=["y=value"])[0].fields[1].meaning == "value"


@pytest.mark.parametrize(
    ("told", "message"), [("x=picture", "NAME=image"), ("z=value", "no such field"), ("x=class", "no class numbers"), ("y=image", "no pictures")]
)
def test_what_an_array_cannot_be_is_refused(tmp_path: Path, told: str, message: str) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.arange(30))
    with pytest.raises(OptionError, match=message):
        read("npz", tmp_path / "a.npz", meanings=[told])


def test_the_command_builds_what_it_recognises_and_refuses_options_of_others(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.arange(30) % 2)
    done = CliRunner().invoke(program, ["build", str(tmp_path / "a.npz"), str(tmp_path / "out"), "--dtype", "float16", "--normalize", "auto"])
    assert done.exit_code == 0, done.output
    assert "x, y = ds[0]" in done.output
    reader = Reader(tmp_path / "out")
    assert np.array_equal(reader.gather("x", np.arange(30)), X.astype("f2"))
    assert reader.index.fields[0].normalize is not None
    done = CliRunner().invoke(program, ["build", str(tmp_path / "a.npz"), str(tmp_path / "two"), "--shape", "4"])
    assert done.exit_code == 2
    assert "--shape does not go with this RAW, which is read as npz" in done.output
    done = CliRunner().invoke(program, ["info", str(tmp_path / "out"), "--config"])
    assert json.loads(done.output) == {"dtype": "float16", "normalize": "auto", "source": "npz"}


def test_a_number_that_cannot_be_held_is_named_by_its_file(tmp_path: Path) -> None:
    values = np.zeros((9, 2))
    values[5, 1] = 300
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(SourceError, match=r"^row 5 of \S*/a\.npy: x\[1\]: 300\.0 cannot be held by uint8; choose another"):
        mmcompile.build(tmp_path / "a.npy", tmp_path / "out", preprocess=mmcompile.RowPreprocess(dtype="uint8"), workers=1)
    infinite = values.copy()
    infinite[1, 0] = np.inf
    np.savez(tmp_path / "b.npz", x_test=values[:3], x_train=infinite)
    with pytest.raises(BuildError, match=r"auto: row 1 of \S*/b\.npz \(x_train\.npy\): x\[0\] is inf"):
        mmcompile.build(tmp_path / "b.npz", tmp_path / "out", preprocess=mmcompile.RowPreprocess(normalize="auto"), workers=1)
    (tmp_path / "f").mkdir()
    for i in range(9):
        np.save(tmp_path / "f" / f"{i}.npy", values[i])
    with pytest.raises(SourceError, match=r"^\S*/f/5\.npy: x\[1\]: 300\.0 cannot be held by uint8"):
        mmcompile.build(tmp_path / "f", tmp_path / "out", preprocess=mmcompile.RowPreprocess(dtype="uint8"), workers=1)


def test_an_empty_class_folder_that_comes_or_goes_moves_the_numbers_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 0)
    for name, n in (("cat", 3), ("dog", 2)):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for i in range(n):
            np.save(tmp_path / "raw" / name / f"{i}.npy", np.full(3, i, "f4"))
    out = tmp_path / "out"
    for change in (lambda: None, (tmp_path / "raw" / "ant").mkdir, (tmp_path / "raw" / "ant").rmdir):
        change()
        mmcompile.build(tmp_path / "raw", out, workers=1)
        mmcompile.build(tmp_path / "raw", tmp_path / "fresh", workers=1)
        assert dataset(out) == dataset(tmp_path / "fresh")
        first = 1 if (tmp_path / "raw" / "ant").exists() else 0
        assert Reader(out).gather("label", np.arange(5)).tolist() == [first] * 3 + [first + 1] * 2
        shutil.rmtree(tmp_path / "fresh")


def test_what_two_arrays_of_one_name_or_order_differ_in_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3, [("B", "i4"), ("b", "i4")]))
    with pytest.raises(SourceError, match=r"a\.npy, b and \S*a\.npy, B: both are the field b; rename one"):
        array_source("npy", [str(tmp_path / "a.npy")]).scan()
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f" / "0.npy", np.zeros((4, 3)))
    np.save(tmp_path / "f" / "1.npy", np.zeros((4, 3), order="F"))
    source = array_source("npy-folder", [str(tmp_path / "f")])
    with pytest.raises(
        SourceError, match=r"1\.npy\): float64 \(4, 3\) in Fortran order, .*; expected float64 \(4, 3\) in C order, .*as the first file"
    ):
        source.read(0, source.scan().rows)


def test_values_that_may_be_pictures_say_how_they_become_some(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pics=np.zeros((2, 9, 8, 3), "u1"), maps=np.zeros((2, 9, 8), "u1"), codes=np.zeros((2, 9, 8, 5), "u1"))
    scan, _ = read("npz", tmp_path / "a.npz")
    assert scan.warnings == ("pics: uint8 (9 x 8 x 3) is stored as values; if it holds pictures, --as pics=image says so",)
    for meaning in ("image", "value"):
        assert array_source("npz", [str(tmp_path / "a.npz")], [f"pics={meaning}"]).scan().warnings == ()
