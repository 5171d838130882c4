"""Rows without keys in a random order: exactly the one that FORMAT.md says, whatever they are read from, and where each came from is told."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import mmcompile
from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.lies import Lies, lies_in_npy
from mmcompile.errors import BuildError, SourceError
from mmcompile.format.index import Split
from mmcompile.format.reader import Reader
from mmcompile.format.sampletable import samples_table
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset
from tests.compiler.test_rowbuild import files, rows, stored

SEED = 7
ORDER = f"shuffled:{SEED}"
_64 = (1 << 64) - 1


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64
    return value ^ (value >> 31)


def permuted(seed: int, n: int) -> list[int]:
    """The row of the source at each row of a split of n rows: as section 8 of FORMAT.md says it, in Python's integers."""
    key = mix(mix(mix(seed)) ^ 0x726F7773)
    if n <= 1 << 16:
        base = mix(mix(key))
        return [value & 0xFFFF for value in sorted((mix(base ^ row) & ~0xFFFF & _64) | row for row in range(n))]
    keys = [mix(mix(key ^ mix(turn))) for turn in range(8)]
    bits = (n - 1).bit_length() // 2
    count = -(-n >> bits)

    def step(value: int) -> int:
        low, high = value & ((1 << bits) - 1), value >> bits
        for turn, k in enumerate(keys):
            hashed = (((low if turn % 2 else high) + k) * 0xBF58476D1CE4E5B9) & _64
            hashed = ((hashed ^ (hashed >> 32)) * 0x94D049BB133111EB) & _64
            if turn % 2 == 0:
                low ^= hashed >> (64 - bits)
            else:
                high = (high + ((hashed >> 32) * count >> 32)) % count
        return high << bits | low

    out = []
    for row in range(n):
        value = step(row)
        while value >= n:
            value = step(value)
        out.append(value)
    return out


def order_of(splits: tuple[Split, ...]) -> list[int]:
    return [split.start + row for split in splits for row in permuted(SEED, split.stop - split.start)]


def shuffled(source: Any, out: Path, *, workers: int = 1, shard_bytes: int = 1 << 13, **more: Any) -> BuildReport:
    return build(source, out, options=BuildOptions(workers=workers, shard_bytes=shard_bytes, order=ORDER), **more)


@pytest.mark.parametrize("n", [1, 2, 1000, 1 << 16, 70_001])
def test_rows_stand_in_the_order_that_the_format_says(tmp_path: Path, n: int) -> None:
    x = np.arange(n, dtype=np.int32)
    np.save(tmp_path / "x.npy", x)
    shuffled(tmp_path / "x.npy", tmp_path / "out", shard_bytes=1 << 17)
    order = permuted(SEED, n)
    assert sorted(order) == list(range(n))
    assert stored(tmp_path / "out", "x").tolist() == order
    found = mmcompile.MMapShardDataset(tmp_path / "out")
    assert [found.source(i) for i in range(0, n, 997)] == [f"[{order[i]}]" for i in range(0, n, 997)]
    assert Reader(tmp_path / "out").index.settings["order"] == ORDER


# ---------------------------------------------------------------- every kind of source


class Items:
    """Items that know their number."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[npt.NDArray[Any], int]:
        return np.full(3, self.start + i, np.float32), (self.start + i) % 5


def _npy(root: Path) -> Any:
    np.save(root / "x.npy", numbers(300))
    return root / "x.npy"


def numbers(n: int, seed: int = 0) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).normal(size=(n, 5)).astype("f4")


def _npy_large(root: Path) -> Any:
    np.save(root / "x.npy", np.arange(60 * 5000, dtype=np.float32).reshape(60, 5000))
    return root / "x.npy"


def _npz_large(root: Path) -> Any:
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 80, 80), np.uint8)
    np.savez(root / "x.npz", x_train=x[:40], y_train=np.arange(40) % 3, x_test=x[40:], y_test=np.arange(20) % 3)
    return root / "x.npz"


def _records(root: Path) -> Any:
    made = np.zeros(60, [("v", ">f4", (5000,)), ("n", ">i2")])
    made["v"], made["n"] = np.arange(60 * 5000).reshape(60, 5000), np.arange(60)
    np.save(root / "x.npy", made)
    return root / "x.npy"


def _fortran(root: Path) -> Any:
    np.save(root / "x.npy", np.asfortranarray(numbers(300)))
    return root / "x.npy"


def _npz(root: Path) -> Any:
    np.savez(root / "x.npz", x_train=numbers(200), y_train=np.arange(200) % 3, x_test=numbers(100, 1), y_test=np.arange(100) % 3)
    return root / "x.npz"


def _npz_packed(root: Path) -> Any:
    np.savez_compressed(root / "x.npz", x_train=numbers(200), y_train=np.arange(200) % 3, x_test=numbers(100, 1), y_test=np.arange(100) % 3)
    return root / "x.npz"


def _idx(root: Path) -> Any:
    images, labels = np.random.default_rng(0).integers(0, 256, (90, 4, 4), np.uint8), (np.arange(90) % 10).astype(np.uint8)
    for split in ("train", "t10k"):
        for what, array in (("images", images), ("labels", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (root / f"{split}-{what}-idx{array.ndim}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return root


def _folder(root: Path) -> Any:
    for i, row in enumerate(numbers(120)):
        (root / f"c{i % 3}").mkdir(exist_ok=True)
        np.save(root / f"c{i % 3}" / f"{i:03}.npy", row)
    return root


def _raw(root: Path) -> Any:
    (root / "x.bin").write_bytes(numbers(300).tobytes())
    return open_source([str(root / "x.bin")], SourceOptions(source="raw", shape="5", array_dtype="float32"))


def _csv(root: Path) -> Any:
    text = [f"{a},{b}" for a, b in zip(range(300), numbers(300)[:, 0].tolist(), strict=True)]
    (root / "t.csv").write_text("\n".join(["a,b", *text]))
    return root / "t.csv"


def _csv_groups(root: Path) -> Any:
    for name, n in (("GOOG", 130), ("AAPL", 70)):
        (root / f"{name}.csv").write_text("\n".join(["a,b", *(f"{i},{i / 7}" for i in range(n))]))
    return root


def _csv_sorted(root: Path) -> Any:
    rng = np.random.default_rng(0)
    lines = [f"{s},{t},{t / 3}" for t, s in zip(rng.permutation(200).tolist(), rng.choice(["a", "b"], 200).tolist(), strict=True)]
    (root / "t.csv").write_text("\n".join(["symbol,ts,v", *lines]))
    return open_source([str(root / "t.csv")], SourceOptions(group_by="symbol", order_by="ts", split_by="ts=120"))


def _parquet(root: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": np.arange(300), "b": numbers(300)[:, 0]}), root / "t.parquet", row_group_size=100)
    return root / "t.parquet"


def _memmap(root: Path) -> Any:
    np.save(root / "x.npy", numbers(300))
    return np.load(root / "x.npy", mmap_mode="r")


def _compiled(root: Path) -> Any:
    _csv_groups(root)
    build(root, root.parent / "plain-compiled")
    return root.parent / "plain-compiled"


class Sliced:
    """An array that gives slices alone, as one of HDF5 does without much ado."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def __getitem__(self, which: Any) -> npt.NDArray[Any]:
        assert isinstance(which, slice)
        return self.array[which]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "npy": _npy,
    "npy-large": _npy_large,
    "npz-large": _npz_large,
    "records-large": _records,
    "fortran": _fortran,
    "npz": _npz,
    "npz-packed": _npz_packed,
    "idx": _idx,
    "npy-folder": _folder,
    "raw": _raw,
    "csv": _csv,
    "csv-groups": _csv_groups,
    "csv-sorted": _csv_sorted,
    "parquet": _parquet,
    "memmap": _memmap,
    "compiled": _compiled,
    "columns": lambda root: {"x": numbers(300), "label": np.arange(300) % 4},
    "tensors": lambda root: TensorDataset(torch.from_numpy(numbers(300)), torch.arange(300) % 4),
    "sliced": lambda root: {"x": Sliced(numbers(300))},
    "items": lambda root: Items(120),
    "splits": lambda root: {"train": Items(80), "test": Items(40, 80)},
    "iterable": lambda root: (Items(120)[i] for i in range(120)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_of_every_source_are_mixed_split_by_split_and_tell_where_they_come_from(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw").mkdir()
    plain_source = SOURCES[kind](tmp_path / "raw")
    with monkeypatch.context() as patch:  # without processes, which take their time
        patch.setattr("mmcompile.compiler.rowbuild.start_readers", _here)
        report = build(plain_source, tmp_path / "plain", workers=1)
    source = SOURCES[kind](tmp_path / "raw") if kind == "iterable" else plain_source
    made = shuffled(source, tmp_path / "out", shard_bytes=1 << 10)
    assert made.shards > 1
    assert (made.samples, made.splits) == (report.samples, report.splits)
    plain, mixed = mmcompile.MMapShardDataset(tmp_path / "plain", split="all"), mmcompile.MMapShardDataset(tmp_path / "out", split="all")
    index = Reader(tmp_path / "plain").index
    order = order_of(index.splits)
    assert order != list(range(len(order)))
    for spec in index.fields:
        assert np.array_equal(stored(tmp_path / "out", spec.name), stored(tmp_path / "plain", spec.name)[order])
    assert [mixed.source(i) for i in range(len(mixed))] == [plain.source(i) for i in order]
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())
    assert verify(tmp_path / "out").ok


def test_the_bytes_are_the_same_from_any_number_of_workers_and_after_a_stop(tmp_path: Path) -> None:
    source = rows(3000, splits=(Split("train", 0, 2000), Split("val", 2000, 3000)))
    shuffled(source, tmp_path / "one", shard_bytes=1 << 14)
    shuffled(source, tmp_path / "two", shard_bytes=1 << 14, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")
    np.save(tmp_path / "x.npy", numbers(3000))
    shuffled(tmp_path / "x.npy", tmp_path / "a")
    shuffled(tmp_path / "x.npy", tmp_path / "b", workers=2)
    assert dataset(tmp_path / "a") == dataset(tmp_path / "b")


def test_a_build_that_failed_goes_on_from_its_sealed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 0)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(200, 2048)))
    real, calls = Lies.take, []

    def take(self: Lies, wanted: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        calls.append(len(wanted))
        if len(calls) == 5:
            raise SourceError("no")
        return real(self, wanted)

    monkeypatch.setattr("mmcompile.compiler.rowbuild.start_readers", _here)
    monkeypatch.setattr(Lies, "take", take)
    with pytest.raises(SourceError, match="no"):
        shuffled(tmp_path / "x.npy", tmp_path / "out", shard_bytes=1 << 18)
    report = shuffled(tmp_path / "x.npy", tmp_path / "out", shard_bytes=1 << 18)
    assert report.kept == sum(calls[:4])
    shuffled(tmp_path / "x.npy", tmp_path / "clean", shard_bytes=1 << 18)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
    before, calls[:] = files(tmp_path / "out"), []
    assert shuffled(tmp_path / "x.npy", tmp_path / "out", shard_bytes=1 << 18).decoded == 0
    assert (files(tmp_path / "out"), calls) == (before, [])


def _here(source: Any, scratch: Path, workers: int) -> Any:
    from mmcompile.compiler.rowrun import Here

    return Here(), source, ""


def test_a_changed_split_is_read_again_and_the_other_is_left(tmp_path: Path) -> None:
    splits = (Split("train", 0, 70), Split("test", 70, 100))
    source = rows(100, groups=(("a", 30), ("b", 70), ("a", 100)), stamps=("1", "2", "3"), splits=splits)
    shuffled(source, tmp_path / "out")
    source.arrays["x"][80] = 5
    report = shuffled(replace(source, stamps=("1", "2", "4")), tmp_path / "out")
    assert (report.decoded, report.kept) == (30, 70)
    shuffled(source, tmp_path / "clean")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_another_order_is_another_dataset_and_the_change_is_told(tmp_path: Path) -> None:
    shuffled(rows(100), tmp_path / "out")
    plain = build(rows(100), tmp_path / "out", options=BuildOptions(shard_bytes=1 << 13))
    assert plain.changed == ("order: shuffled:7 -> None",)
    assert np.array_equal(stored(tmp_path / "out", "n"), rows(100).arrays["n"])


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_name_the_row_of_the_source(tmp_path: Path, workers: int) -> None:
    x = np.zeros((500, 2))
    x[123, 1] = 300.0
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(SourceError, match=r"row 123.*x\[1\]: 300.0 cannot be held by uint8"):
        shuffled(tmp_path / "x.npy", tmp_path / "out", preprocess=RowPreprocess(dtype="uint8"), workers=workers)
    times = np.arange(100).astype("M8[s]")
    times[71] = "NaT"
    with pytest.raises(SourceError, match=r"row 71: a time that is missing"):
        shuffled({"t": times}, tmp_path / "t", workers=workers)


def test_a_full_disk_is_told_before_rows_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(rows(1000), tmp_path / "plain")
    need = 1000 * 32
    monkeypatch.setattr("mmcompile.compiler.rowbuild.free_bytes", lambda out: need + need // 2)
    build(tmp_path / "plain", tmp_path / "copy")
    with pytest.raises(BuildError, match="are free"):
        shuffled(tmp_path / "plain", tmp_path / "out")


@given(st.data())
def test_rows_of_a_file_are_taken_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    n, width = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([1, 700, 5000]))
    path = tmp_path_factory.mktemp("take") / "x.npy"
    x = np.arange(n * width, dtype=np.float32).reshape(n, width)
    np.save(path, x)
    wanted = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=60)))
    assert np.array_equal(lies_in_npy(str(path)).take(wanted), x[wanted])


# ---------------------------------------------------------------- what reads it


def test_a_shuffled_dataset_has_no_windows_but_knows_its_groups(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    shuffled(_csv_groups(tmp_path / "raw"), tmp_path / "out")
    found = mmcompile.MMapShardDataset(tmp_path / "out")
    with pytest.raises(ValueError, match="random order"):
        found.windows(4)
    assert {found.source(i).partition("[")[0] for i in range(len(found))} == {"AAPL", "GOOG"}
    assert [line["key"] for line in samples_table(tmp_path / "out")] == [found.source(i) for i in range(len(found))]
    taken = open_source([str(tmp_path / "out")], SourceOptions(where="group == 'AAPL'"))
    build(taken, tmp_path / "apple")
    apple = mmcompile.MMapShardDataset(tmp_path / "apple")
    values = [found[i] for i in range(len(found)) if found.source(i).startswith("AAPL")]
    assert [[float(v) for v in apple[i]] for i in range(len(apple))] == [[float(v) for v in value] for value in values]
    assert (len(apple), Reader(tmp_path / "apple").index.order) == (70, "mixed")
    with pytest.raises(ValueError, match="random order"):
        apple.windows(4)


def test_damage_in_a_shuffled_dataset_is_told_by_rows_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    shuffled(_csv_groups(tmp_path / "raw"), tmp_path / "out", shard_bytes=1 << 20)
    victim = next((tmp_path / "out" / "shards").glob("x-*.npy"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    found = mmcompile.MMapShardDataset(tmp_path / "out")
    [problem] = verify(tmp_path / "out").problems
    assert f"({found.source(0)} to {found.source(len(found) - 1)})" in problem.message
