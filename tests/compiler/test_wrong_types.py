"""What is of another type than a call takes, or no number, time or label: one line that says so, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcompile
from mmcompile import BuildOptions, MMCompileError, build
from mmcompile.errors import BuildError, OptionError, SourceError
from mmcompile.format.reader import Reader

ARRAY = np.arange(12, dtype="f4").reshape(6, 2)


class Dataset:
    """Six samples."""

    mmcompile_version: Any = "1"

    def __init__(self, labels: tuple[int, ...] = (0, 1, 2, 0, 1, -1)) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": ARRAY[row], "label": self.labels[row]}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("order", value, "source, shuffled or shuffled:SEED") for value in (3, None, b"source")),
        *(("shard_bytes", value, "a whole number of bytes") for value in ("1M", 1000.5, True, None)),
        *(("decode_timeout_s", value, "a number of seconds") for value in ("60", None, True)),
        *(("address", value, "a text") for value in (3, b"a:1")),
        *(("workers", value, "a number, at least 1") for value in (True, 1.5, "2", 0)),
        ("part", 3, "a text as in '3/16'"),
        *((name, value, "True or False") for name in ("plan_only", "lock", "checksum", "redecode") for value in ("yes", 1, None)),
    ],
)
def test_an_option_of_another_type_is_named_with_its_value(name: str, value: Any, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        BuildOptions(**{name: value})
    assert str(caught.value).removeprefix("--") == f"{name} must be {expected}, found {value!r}"


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    options: Any = {"workers": np.int64(1), "shard_bytes": np.int32(8), "decode_timeout_s": np.float32(60)}
    assert build(ARRAY, tmp_path / "out", options=BuildOptions(**options)).shards > 1
    assert type(BuildOptions(**options).shard_bytes) is int


@pytest.mark.parametrize("out", [None, 3, b"out", [], "", "\0", "a\0b", "\ud800"])
def test_what_is_no_path_is_no_out(out: Any) -> None:
    with pytest.raises(OptionError, match=r"out must be a path as str or Path|no path: "):
        build(ARRAY, out)


def test_what_is_no_path_is_neither_raw_nor_a_dataset(tmp_path: Path) -> None:
    for use in (lambda: build("a\0b", tmp_path / "out"), lambda: mmcompile.MMapShardDataset("a\0b"), lambda: mmcompile.verify("\ud800")):
        with pytest.raises(OptionError, match="no path: no name on a disk holds a NUL, or half a surrogate pair"):
            use()


@pytest.mark.parametrize("version", [3, "", b"1"])
def test_a_version_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Any) -> None:
    monkeypatch.setattr(Dataset, "mmcompile_version", version)
    with pytest.raises(OptionError, match="mmcompile_version of a dataset must be a text that changes when the dataset does, not "):
        build(Dataset(), tmp_path / "out")


def test_a_version_may_be_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "mmcompile_version", "\ud800")
    assert build(Dataset(), tmp_path / "out").decoded == 6
    assert build(Dataset(), tmp_path / "out").decoded == 0


def test_a_part_is_looked_at_before_what_the_dataset_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "mmcompile_version", None)
    for dry_run in (False, True):
        with pytest.raises(OptionError, match="part must be I/N with"):
            build(Dataset(), tmp_path / "out", options=BuildOptions(part="0/0"), dry_run=dry_run)


def test_a_class_is_a_number_from_0_on_or_none(tmp_path: Path) -> None:
    build(Dataset(), tmp_path / "out")
    reader = Reader(tmp_path / "out")
    assert reader.gather("label", np.arange(6)).tolist() == [0, 1, 2, 0, 1, -1]
    wrong = Dataset((-1, 3, -5, 0, 1, 2))
    for source in (wrong, iter([wrong[row] for row in range(6)])):
        with pytest.raises(SourceError, match=r"row 2: label is -5: expected the number of a class from 0 on, or -1 for none"):
            build(source, tmp_path / "other")


def test_a_row_of_too_many_axes_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a row of x has 17 axes, at most 16 are held: reshape it"):
        build(np.ones((3, *[1] * 17)), tmp_path / "out")


def table(folder: Path, cells: list[str], end: str = "\n") -> Path:
    path = folder / "t.csv"
    path.write_bytes("".join(f"{line}{end}" for line in ["c,v", *(f"{cell},{i}" for i, cell in enumerate(cells))]).encode())
    return path


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([*(f"{i}.5" for i in range(9000)), "1e999"], "row 9,001, column c: '1e999' is more than a float64 holds"),
        (["-1e400", "1.5"], "row 1, column c: '-1e400' is more than a float64 holds"),
        (["9" * 310 + ".0", "1.5"], "is more than a float64 holds"),
        (["2016-12-31T23:59:59", "2016-12-31T23:59:60"], "row 2, column c: '2016-12-31T23:59:60': Seconds out of range"),
        (["2016-12-01T24:00:00"], "row 1, column c: '2016-12-01T24:00:00': Hours out of range"),
        (["2000-01-01T00:00:00.123456789", "9000-01-01T00:00:00"], "row 2, column c: '9000-01-01T00:00:00': a time is beyond what int64 holds in ns"),
        (["2016-12-31T00:00:00", "", "2016-12-31T00:00:00Z"], "column c: some times say how far .* the first unlike those before in row 3:"),
        (["a", "z" * 1_200_000], "row 2 of .*t.csv: column c holds a text of 1,200,000 characters \\('zzz"),
    ],
)
def test_what_a_table_cannot_hold_is_named_by_row_and_column(tmp_path: Path, cells: list[str], said: str) -> None:
    with pytest.raises(MMCompileError, match=said):
        build(table(tmp_path, cells), tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_infinity_that_is_written_so_is_a_number(tmp_path: Path) -> None:
    cells = [f"{i}.5" for i in range(9000)] + ["inf", "-Infinity", "1e308", "1.5"]
    build(table(tmp_path, cells), tmp_path / "out")
    reader = Reader(tmp_path / "out")
    assert reader.gather("x", np.arange(8999, 9004))[:, 0].tolist() == [8999.5, np.inf, -np.inf, 1e308, 1.5]


def test_lines_that_end_in_a_carriage_return_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"its lines end in a carriage return alone: save it with line ends of \\n or \\r\\n"):
        build(table(tmp_path, ["1", "2"], end="\r"), tmp_path / "out")
