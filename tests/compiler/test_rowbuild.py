"""Builds of rows without keys: the same bytes whoever makes them, nothing read twice, nothing lost without a word."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.compiler import planning
from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.output import describe_changes, told_changes
from mmcompile.compiler.plan import row_cuts
from mmcompile.compiler.preprocess import Normalize, Preprocess
from mmcompile.compiler.rowstore import RowPreprocess, stored_fields
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.errors import BuildError, FormatError, OptionError, OutputExistsError, SourceError
from mmcompile.format.index import Field, Names, Split, load_groups
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pair_hash
from mmcompile.format.verify import verify
from tests.compiler import builds
from tests.compiler.builds import dataset

ROW_BYTES = 3 * 8 + 8
FIELDS = (Field("x", "float64", (3,), "value", columns=Names(("a", "b", "c"))), Field("n", "int64", (), "value"))


@dataclass
class Rows:
    """A source of rows that lie in memory; `reads` is a folder in which each read leaves a file, `killer` a call before a read."""

    arrays: dict[str, npt.NDArray[Any]]
    fields: tuple[Field, ...] = FIELDS
    groups: tuple[tuple[str, int], ...] = ()
    stamps: tuple[str, ...] = ("1",)
    splits: tuple[Split, ...] = ()
    reads: str | None = None
    root: str = ""
    fails: dict[int, Exception] = field(default_factory=dict)
    die_at: int = -1

    def identity(self) -> dict[str, object]:
        return {"kind": "test"}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        n = len(next(iter(self.arrays.values())))
        groups = self.groups or (("", n),)
        stops = np.array([stop for _, stop in groups], np.int64)
        return RowScan(n, self.fields, tuple(name for name, _ in groups), stops, self.stamps, self.splits)

    def read(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        if self.reads is not None:
            Path(self.reads, f"{start}-{stop}-{os.urandom(4).hex()}").touch()
        if start <= self.die_at < stop:
            os._exit(3)
        for row, error in self.fails.items():
            if start <= row < stop:
                raise error
        return {name: array[start:stop] for name, array in self.arrays.items()}


def rows(n: int = 100, seed: int = 0, **more: Any) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows({"x": rng.normal(size=(n, 3)), "n": rng.integers(-1000, 1000, n)}, **more)


def run(source: Any, out: Path, *, workers: int = 1, per_shard: int = 20, preprocess: Any = None, **more: Any) -> BuildReport:
    options = BuildOptions(workers=workers, shard_bytes=per_shard * ROW_BYTES)
    return build(source, out, preprocess=preprocess, options=options, **more)


def stored(out: Path, name: str) -> npt.NDArray[Any]:
    reader = Reader(out)
    return reader.gather(name, np.arange(len(reader)))


def files(out: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(out)): (p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(out.rglob("*")) if p.is_file()}


def test_every_value_is_there_and_each_block_has_its_hash(tmp_path: Path) -> None:
    source = rows(100_000)
    report = run(source, tmp_path / "out", per_shard=70_000, workers=2)
    assert report.samples == report.decoded == 100_000
    assert np.array_equal(stored(tmp_path / "out", "x"), source.arrays["x"])
    assert np.array_equal(stored(tmp_path / "out", "n"), source.arrays["n"])
    reader, block = Reader(tmp_path / "out"), (1 << 20) // ROW_BYTES
    assert not reader.index.keyed
    for shard in range(len(reader.table)):
        x, n = (np.load(reader.path(name, shard)) for name in ("x", "n"))
        hashes = np.load(tmp_path / "out" / "shards" / f"hashes-{pair_hash(reader.table['hashes'][shard])}.npy")
        made = [xxhash.xxh3_64(x[i : i + block].tobytes() + n[i : i + block].tobytes()).intdigest() for i in range(0, len(x), block)]
        assert hashes.tolist() == made


def test_the_bytes_are_the_same_from_any_number_of_workers(tmp_path: Path) -> None:
    source = rows(300_000, splits=(Split("train", 0, 200_000), Split("val", 200_000, 300_000)))
    run(source, tmp_path / "one", per_shard=90_000)
    run(source, tmp_path / "two", per_shard=90_000, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")


@given(st.data())
def test_shards_have_half_to_twice_their_size_and_end_at_ends_of_groups(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    target = data.draw(st.integers(1, 30))
    ends = np.cumsum(sizes).astype(np.int64)
    cuts = row_cuts(0, int(ends[-1]), ends, target)
    assert (cuts[0], cuts[-1]) == (0, int(ends[-1]))
    for start, stop in itertools.pairwise(cuts):
        near = [e for e in ends.tolist() if max(1, target // 2) <= e - start <= 2 * target]
        assert stop == (near[0] if near else min(start + target, int(ends[-1])))
        assert 1 <= stop - start <= 2 * target


def test_groups_stand_in_the_index_and_splits_are_never_in_one_shard(tmp_path: Path) -> None:
    source = rows(100, groups=(("a", 30), ("empty", 30), ("b", 70), ("a", 100)), stamps=("1", "2", "3", "4"))
    source = replace(source, splits=(Split("train", 0, 70), Split("test", 70, 100)))
    run(source, tmp_path / "out", per_shard=25)
    index = Reader(tmp_path / "out").index
    names, ends = load_groups(tmp_path / "out", index)
    assert (names, ends.tolist()) == (("a", "b", "a"), [0, 30, 70, 100])
    assert np.cumsum(Reader(tmp_path / "out").table["rows"]).tolist() == [30, 70, 100]
    assert [(s.name, s.start, s.stop) for s in index.splits] == [("train", 0, 70), ("test", 70, 100)]


def test_an_unchanged_source_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "reads").mkdir()
    source = rows(reads=str(tmp_path / "reads"))
    first = run(source, tmp_path / "out")
    before, read = files(tmp_path / "out"), len(os.listdir(tmp_path / "reads"))
    again = run(source, tmp_path / "out")
    assert (again.generation, again.kept, again.decoded) == (first.generation, 100, 0)
    assert files(tmp_path / "out") == before
    assert len(os.listdir(tmp_path / "reads")) == read


def test_a_source_without_stamps_is_read_again_but_only_what_differs_is_written(tmp_path: Path) -> None:
    source = rows(stamps=("",))
    run(source, tmp_path / "out")
    before = files(tmp_path / "out")
    source.arrays["x"][55] = 7
    report = run(source, tmp_path / "out")
    assert report.decoded == 100
    after = files(tmp_path / "out")
    for name in before:
        if name.startswith("shards/"):
            assert after[name] == before[name], name
    new = [name for name in after if name not in before and name.startswith("shards/")]
    assert sorted(name.split("-")[0] for name in new) == ["shards/hashes", "shards/table", "shards/x"]
    run(source, tmp_path / "clean")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_only_shards_of_a_changed_group_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "reads").mkdir()
    source = rows(groups=(("a", 30), ("b", 60), ("c", 100)), stamps=("1", "2", "3"), reads=str(tmp_path / "reads"))
    run(source, tmp_path / "out", per_shard=30)
    for path in (tmp_path / "reads").iterdir():
        path.unlink()
    source.arrays["x"][40] = 7
    report = run(replace(source, stamps=("1", "9", "3")), tmp_path / "out", per_shard=30)
    assert report.decoded == 30
    assert [name.rpartition("-")[0] for name in os.listdir(tmp_path / "reads")] == ["30-60"]
    run(replace(source, stamps=("1", "9", "3")), tmp_path / "clean", per_shard=30)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_a_build_that_failed_goes_on_from_its_sealed_shards(tmp_path: Path) -> None:
    (tmp_path / "reads").mkdir()
    source = rows(reads=str(tmp_path / "reads"), fails={70: SourceError("row 70: no number")})
    with pytest.raises(SourceError, match="row 70"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()
    sealed = len(list((tmp_path / "out" / ".build" / "seals").glob("*.json")))
    assert sealed >= 2
    for path in (tmp_path / "reads").iterdir():
        path.unlink()
    report = run(replace(source, fails={}), tmp_path / "out")
    assert report.kept == 20 * sealed
    assert len(os.listdir(tmp_path / "reads")) == len(Reader(tmp_path / "out").table) - sealed
    run(rows(), tmp_path / "clean")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_a_damaged_sealed_shard_is_made_again(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        run(rows(fails={90: SourceError("no")}), tmp_path / "out")
    victim = next((tmp_path / "out" / "shards").glob("x-*.npy"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    run(rows(), tmp_path / "out")
    run(rows(), tmp_path / "clean")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_a_worker_that_dies_on_a_piece_is_named_and_all_else_is_sealed(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="rows 40 to 60 cannot be read: a worker ended with exit code 3"):
        run(rows(die_at=45), tmp_path / "out", workers=2)
    report = run(rows(), tmp_path / "out")
    assert report.decoded == 20


def test_what_cannot_be_read_now_is_tried_again_and_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"rows 0 to 20 cannot be read: Input/output error"):
        run(rows(fails={3: OSError(5, "Input/output error")}), tmp_path / "out", workers=2)


def test_a_source_that_cannot_be_pickled_is_read_here_and_that_is_said(tmp_path: Path) -> None:
    source = rows()
    source.helper = lambda: None  # type: ignore[attr-defined]
    report = run(source, tmp_path / "out", workers=2)
    assert report.workers == 1
    assert "one process read it" in report.warnings[0]
    run(rows(), tmp_path / "clean", workers=2)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_rows_of_another_shape_than_declared_are_refused(tmp_path: Path) -> None:
    source = rows()
    source.arrays["x"] = source.arrays["x"][:, :2]
    with pytest.raises(SourceError, match=r"x: expected float64 \(20, 3\), the source gave float64 \(20, 2\)"):
        run(source, tmp_path / "out")


def test_no_rows_are_an_error_and_one_is_enough(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no rows"):
        run(rows(0), tmp_path / "out")
    assert run(rows(1), tmp_path / "out").samples == 1


def test_options_of_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--resize, --crop"):
        run(rows(), tmp_path / "out", preprocess=Preprocess(resize=8, crop=8))


def test_out_inside_the_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(rows(root=str(tmp_path)), tmp_path / "out")


def test_a_dry_run_writes_nothing_and_says_what_would_be_read(tmp_path: Path) -> None:
    report = run(rows(), tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    made = run(rows(), tmp_path / "out")
    assert (report.decoded, report.samples, report.shards) == (100, 100, made.shards)
    assert run(rows(), tmp_path / "out", dry_run=True).decoded == 0


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.rowbuild.free_bytes", lambda out: 1000)
    with pytest.raises(BuildError, match="are free"):
        run(rows(), tmp_path / "out")
    assert not list((tmp_path / "out" / "shards").iterdir())


def test_what_replaces_a_dataset_of_another_kind_says_so_and_names_what_both_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds.inline(monkeypatch)
    builds.run(builds.make_raw(tmp_path / "raw", 2), tmp_path / "out")
    told: list[str] = []
    report = run(rows(), tmp_path / "out", progress=lambda progress: told.append(progress.message))
    assert any(line.startswith("this replaces 4 images with labels by 100 rows of arrays or tables without labels") for line in report.warnings)
    (line,) = filter(None, told)
    assert line.startswith(f"differs from what is in {tmp_path / 'out'}: ")
    assert "source.kind: folder -> " in line
    assert ": None ->" not in line.replace("dtype: ", "")
    assert report.changed
    back = builds.run(tmp_path / "raw", tmp_path / "out")
    assert any(line.startswith("this replaces 100 rows of arrays or tables without labels by 4 images with labels") for line in back.warnings)
    assert (back.decoded, back.kept) == (0, 4)


def test_a_line_of_changes_names_some_and_how_many_more_there_are() -> None:
    before, now = {"source": {"kind": "x"}, **{f"n{i}": 0 for i in range(8)}}, {"source": {"kind": "x"}, **{f"n{i}": 1 for i in range(8)}}
    line = told_changes(Path("out"), list(describe_changes(before, now)))
    assert line == "differs from what is in out: n0: 0 -> 1; n1: 0 -> 1; n2: 0 -> 1; n3: 0 -> 1; n4: 0 -> 1; n5: 0 -> 1 and 2 more"
    assert list(describe_changes({"source": {"kind": "x", "a": 1}, "b": 2}, {"source": {"kind": "x"}})) == ["b: 2 -> None", "source.a: 1 -> None"]
    assert list(describe_changes({"source": {"kind": "x", "a": 1}, "b": 2}, {"source": {"kind": "y"}})) == ["source.kind: x -> y"]


# ---------------------------------------------------------------- casts


def one(dtype: str, values: Any, **more: Any) -> Rows:
    array = np.asarray(values)
    return Rows({"x": array}, (Field("x", dtype, array.shape[1:], "value", **more),))


def test_lost_digits_overflow_and_missing_values_are_counted_by_column(tmp_path: Path) -> None:
    values = np.array([[0.1, 1.0], [np.nan, 1e300], [2.0, np.inf]])
    report = run(one("float64", values, columns=Names(("a", "b"))), tmp_path / "out", preprocess=RowPreprocess(dtype="float32"))
    assert report.counts == {"values not a number (x[a])": 1, "values infinite as float32 (x[b])": 1, "values lost digits as float32 (x[a])": 1}
    with np.errstate(over="ignore"):
        assert np.array_equal(stored(tmp_path / "out", "x"), values.astype("f4"), equal_nan=True)
    assert run(one("float64", values), tmp_path / "kept").dtype == "float64"


@pytest.mark.parametrize(("dtype", "value"), [("int16", 40000.0), ("int64", 2.0**63), ("uint8", -1.0), ("int32", np.nan), ("bool", 2.0)])
def test_what_an_integer_dtype_cannot_hold_is_an_error_with_row_and_value(tmp_path: Path, dtype: str, value: float) -> None:
    values = np.zeros((50, 2))
    values[33, 1] = value
    with pytest.raises(SourceError, match=rf"row 33: x\[1\]: {re.escape(str(value))} cannot be held by {dtype}"):
        run(one("float64", values), tmp_path / "out", preprocess=RowPreprocess(dtype=dtype), per_shard=10)


def test_whole_numbers_are_cast_exactly_or_refused(tmp_path: Path) -> None:
    values = np.array([[2**53 + 1], [-5]])
    report = run(one("int64", values), tmp_path / "a", preprocess=RowPreprocess(dtype="float64"))
    assert report.counts == {"values lost digits as float64 (x)": 1}
    with pytest.raises(SourceError, match=r"row 1: x\[0\]: -5 cannot be held by uint64"):
        run(one("int64", values), tmp_path / "b", preprocess=RowPreprocess(dtype="uint64"))
    assert run(one("int64", values[:1] - 2**53), tmp_path / "c", preprocess=RowPreprocess(dtype="int8")).counts == {}


def test_times_categories_and_classes_keep_their_dtype(tmp_path: Path) -> None:
    n = np.arange(4)
    fields = (
        Field("t", "int64", (), "value", unit="ns"),
        Field("c", "int64", (), "value", categories=Names(("a", "b", "c", "d"))),
        Field("x", "int64", (), "value"),
    )
    run(Rows({"t": n, "c": n, "x": n}, fields), tmp_path / "out", preprocess=RowPreprocess(dtype="float32"))
    assert [f.dtype for f in Reader(tmp_path / "out").index.fields] == ["int64", "int64", "float32"]


def test_statistics_are_exact_by_column_and_split_and_auto_takes_those_of_train(tmp_path: Path) -> None:
    source = replace(rows(200), splits=(Split("train", 0, 150), Split("test", 150, 200)))
    run(source, tmp_path / "out", preprocess=RowPreprocess(normalize="auto"), per_shard=30)
    index, x = Reader(tmp_path / "out").index, source.arrays["x"]
    found = index.statistics["train"]["x"]
    assert np.allclose(found["mean"], x[:150].mean(0), rtol=1e-13)
    assert np.allclose(found["std"], x[:150].std(0), rtol=1e-12)
    assert index.fields[0].normalize == (tuple(found["mean"]), tuple(found["std"]))
    n = source.arrays["n"][150:]
    assert index.statistics["test"]["n"]["sums"][0]["sum_squares"] == [int((n * n).sum())]


def test_a_column_that_does_not_vary_or_has_missing_values_cannot_be_normalised(tmp_path: Path) -> None:
    source = rows()
    source.arrays["x"][:, 1] = 3.0
    with pytest.raises(
        BuildError, match=r"auto: x\[b\] is the same in all rows, .*by: leave that column out with --columns, or give --mean and --std"
    ):
        run(source, tmp_path / "out", preprocess=RowPreprocess(normalize="auto"))
    source = rows(splits=(Split("train", 0, 70), Split("test", 70, 100)))
    source.arrays["x"][80, 0] = np.nan  # of no matter to train
    assert run(source, tmp_path / "fine", preprocess=RowPreprocess(normalize="auto")).samples == 100
    source.arrays["x"][[65, 47], [0, 2]] = np.inf, np.nan
    with pytest.raises(
        BuildError, match=r"auto: row 47: x\[c\] is nan, and a mean needs numbers: fill it in, leave such rows out, leave that column"
    ):
        run(source, tmp_path / "out", preprocess=RowPreprocess(normalize="auto"))
    with pytest.raises(BuildError, match=r"the squares of x add up to more than a float holds"):
        run(one("float64", np.array([[1e200], [1.0]])), tmp_path / "huge", preprocess=RowPreprocess(normalize="auto"))


def test_numbers_too_large_for_statistics_are_stored_without_them(tmp_path: Path) -> None:
    run(one("float64", np.array([[1e150, 1.0], [2e145, 2.0], [1e308, 3.0]])), tmp_path / "out")
    assert Reader(tmp_path / "out").index.statistics == {}
    run(one("float64", np.array([1e100, 2e100])), tmp_path / "fine")
    assert Reader(tmp_path / "fine").index.statistics["all"]["x"]["mean"] == [pytest.approx(1.5e100)]


def test_given_means_are_baked_into_floats_and_left_to_readers_of_integers(tmp_path: Path) -> None:
    normalize = Normalize((1.0, 2.0), (2.0, 4.0))
    values = np.array([[3, 10], [5, 6]])
    run(one("int64", values), tmp_path / "ints", preprocess=RowPreprocess(normalize=normalize))
    assert Reader(tmp_path / "ints").index.fields[0].normalize == ((1.0, 2.0), (2.0, 4.0))
    run(one("float32", values.astype("f4")), tmp_path / "floats", preprocess=RowPreprocess(normalize=normalize))
    assert np.array_equal(stored(tmp_path / "floats", "x"), np.array([[1, 2], [2, 1]], "f4"))
    with pytest.raises(OptionError, match="mean and std have 2 values, field x has 3"):
        run(rows(), tmp_path / "no", preprocess=RowPreprocess(normalize=normalize))


def test_pictures_are_cast_as_those_of_files_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 6), dtype=np.uint8)
    source = Rows({"image": pixels}, (Field("image", "uint8", (3, 4, 6), "image", "chw"),))
    run(source, tmp_path / "out", preprocess=Preprocess(dtype="float32", normalize="imagenet"))
    mean, std = (np.array(v, "f4").reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.array_equal(stored(tmp_path / "out", "image"), (pixels.astype("f4") / np.float32(255) - mean) / std)
    run(source, tmp_path / "bytes", preprocess=Preprocess(normalize="imagenet"))
    field = Reader(tmp_path / "bytes").index.fields[0]
    assert (field.dtype, field.scale) == ("uint8", 255.0)
    assert field.normalize is not None
    statistics = Reader(tmp_path / "out").index.statistics["all"]["image"]
    assert statistics == Reader(tmp_path / "bytes").index.statistics["all"]["image"]
    assert np.allclose(statistics["mean"], (pixels / 255).mean((0, 2, 3)))


def test_what_an_index_cannot_say_is_told_before_a_row_is_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"fields\[0\]\.name must be lower-case letters"):
        run(Rows({"Bad Name": np.zeros(3)}, (Field("Bad Name", "float64", (), "value"),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checksum_reads_what_its_stamp_says_is_unchanged(tmp_path: Path) -> None:
    first = run(rows(), tmp_path / "out")
    options = BuildOptions(workers=1, shard_bytes=20 * ROW_BYTES, checksum=True)
    again = build(rows(), tmp_path / "out", options=options)
    assert (again.decoded, again.generation) == (100, first.generation)


def test_a_source_that_holds_its_data_is_not_copied_to_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.rowrun._PICKLE_BYTES", 1000)
    monkeypatch.setattr("mmcompile.compiler.rowrun._ITEMS_BYTES", 1 << 20)
    assert (run(rows(), tmp_path / "ranges", workers=2).workers, run(rows(), tmp_path / "again", workers=2).warnings) == (1, ())
    source = rows()
    source.item_by_item = True  # type: ignore[attr-defined]
    assert run(source, tmp_path / "items", workers=2).workers == 2
    monkeypatch.setattr("mmcompile.compiler.rowrun._ITEMS_BYTES", 1000)
    assert "more than 0 MiB of data" in run(source, tmp_path / "large", workers=2).warnings[0]


def test_a_file_that_may_not_grow_so_large_is_one_that_cannot_be_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((200_000, 8)))
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2); from mmcompile.cli import program; program()"
    done = subprocess.run([sys.executable, "-c", code, "build", "a.npy", "out"], cwd=tmp_path, env=_with_package(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "out: File too large; whatever was finished is kept" in done.stderr
    assert "cannot be read" not in done.stderr


def _with_package() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.parametrize("kind", ["generations", "table", "groups", "classes"])
@pytest.mark.parametrize("how", ["gone", "empty", "short", "other"])
def test_the_same_build_mends_what_a_generation_has_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str) -> None:
    monkeypatch.setattr(planning, "LIST_LIMIT", 2)
    out, source = tmp_path / "out", rows(groups=(("a", 30), ("b", 100)), stamps=("1", "2"))
    run(source, out)
    before = dataset(out)
    victim = next(path for path in out.rglob("*.*") if path.name.startswith(f"{kind}-") or path.parent.name == kind)
    good = victim.read_bytes()
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"empty": b"", "short": good[:-5], "other": good[:-5] + b"?????"}[how])
    assert not verify(out).ok
    assert run(source, out).decoded == 0
    assert dataset(out) == before
    assert verify(out).ok


def test_an_index_that_somebody_changed_is_no_generation_that_lost_its_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(rows(), out)
    index = Reader(out).index
    (out / "index.json").write_bytes(replace(index, settings={**index.settings, "shard_bytes": 1}).to_bytes())
    with pytest.raises(FormatError, match=r"changed after it was published .*put it back with `cp "):
        run(rows(), out)


@pytest.mark.parametrize(
    ("spec", "asked", "match"),
    [
        (
            ("float32", (3, 8, 8), "value", None),
            {},
            r"rows that have at most one axis, and there are none of these \(x float32 \(3 x 8 x 8\)\): if x holds pic",
        ),
        (
            ("float32", (3, 8, 8), "image", "chw"),
            {},
            r"auto: x holds pictures that are stored as float32, .*give --mean and --std .*of a build without\)\n",
        ),
        (("uint8", (3, 8, 8), "image", "chw"), {"dtype": "float16"}, r"stored as float16, .*, or leave --dtype out, and they are stored as uint8\n"),
    ],
)
def test_what_auto_cannot_normalise_is_said_with_what_can_be_done(spec: Any, asked: dict[str, str], match: str) -> None:
    picture = Field("x", *spec)
    with pytest.raises(OptionError, match=match):
        stored_fields((picture,), RowPreprocess(normalize="auto", **asked))
