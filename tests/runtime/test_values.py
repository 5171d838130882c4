"""Fields that are values, the rows of arrays and tables: any dtype and shape, with and without keys, against numpy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mmcompile import Augment, MMapShardDataset, ShardLoader
from mmcompile.format.index import DTYPES
from mmcompile.runtime.device import Resident
from mmcompile.runtime.selection import Selection
from tests.support import make_dataset

N = 23
SHARDS = (9, 1, 13)


def noise(dtype: str, shape: tuple[int, ...], n: int = N, seed: int = 0) -> Any:
    """Random values as they are stored: every bit pattern of integers, ordinary floats (bfloat16 as its bits)."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, (n, *shape)).astype(bool)
    if dtype == "bfloat16":
        return (rng.normal(size=(n, *shape)).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype.startswith("float"):
        return rng.normal(3, 10, (n, *shape)).astype(dtype)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(n * int(np.prod(shape, dtype=int)) * size), dtype).reshape(n, *shape)


def expected(array: Any, dtype: str) -> torch.Tensor:
    out = torch.from_numpy(np.array(array))
    return out.view(torch.bfloat16) if dtype == "bfloat16" else out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_values_come_as_they_are_stored_in_every_way_of_asking(tmp_path: Path, dtype: str, shape: tuple[int, ...], engine: str) -> None:
    array = noise(dtype, shape)
    make_dataset(tmp_path, values={"x": array}, facts={"x": {"dtype": dtype}}, shards=SHARDS, keyed=False)
    ds, rows = MMapShardDataset(tmp_path, engine=engine), expected(array, dtype)
    assert (ds.shape, ds.dtype, len(ds)) == (shape, rows.dtype, N)
    order = [22, 0, 9, 9, 10, 8]
    assert all(same(ds[i], rows[i]) for i in range(N))
    assert same(ds[order], rows[order])
    assert same(ds[5:20:3], rows[5:20:3])
    assert same(torch.cat(list(DataLoader(ds, 4))), rows)
    assert same(torch.cat(list(ShardLoader(ds, 4))), rows)
    assert all(a.dtype == rows.dtype and same(a, b) for a, b in zip(ds, rows, strict=True))
    assert same(pickle.loads(pickle.dumps(ds))[3], rows[3])


def test_a_worker_process_sends_batches_of_the_dtype_on_disk(tmp_path: Path) -> None:
    values = {"a": noise("uint16", ()), "b": noise("float32", (8,)), "c": noise("bool", (2,))}
    make_dataset(tmp_path, None, np.arange(N) % 3, values=values, shards=SHARDS, keyed=False)
    label, a, b, c = (torch.cat(parts) for parts in zip(*DataLoader(MMapShardDataset(tmp_path), 5, num_workers=2), strict=True))
    assert label.tolist() == [i % 3 for i in range(N)]
    assert same(a, expected(values["a"], "uint16"))
    assert same(b, expected(values["b"], "float32"))
    assert same(c, expected(values["c"], "bool"))


def test_samples_view_the_map_and_batches_do_not(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": noise("float32", (4,)), "y": noise("float64", ())}, shards=SHARDS, keyed=False)
    ds = MMapShardDataset(tmp_path)
    before = ds[3:4][0].clone()
    assert type(ds[3]) is tuple
    assert ds[3][1].shape == ()
    ds[3][0].zero_()
    assert ds[3][0].eq(0).all()
    assert ds[3:4][0].equal(before)
    own = MMapShardDataset(tmp_path, copy=True)
    own[3][0].zero_()
    assert own[3][0].equal(before[0])
    assert ds[3][0].data_ptr() == ds[3][0].data_ptr()


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([name for name in DTYPES if name != "bool"]),
    columns=st.sampled_from([0, 1, 3, 8, 4096]),
    asked=st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    n=st.integers(1, 40),
)
def test_normalised_values_are_those_of_the_formula(tmp_path_factory: pytest.TempPathFactory, dtype: str, columns: int, asked: Any, n: int) -> None:
    root = tmp_path_factory.mktemp("values")
    shape = (columns,) if columns else ()
    array, rng = noise(dtype, shape, n), np.random.default_rng(1)
    mean, std = rng.normal(size=columns or 1), rng.uniform(0.5, 2, columns or 1)
    facts = {"x": {"dtype": dtype, "normalize": (tuple(mean.tolist()), tuple(std.tolist())), "scale": 3.0}}
    make_dataset(root, values={"x": array}, facts=facts, keyed=False)
    ds = MMapShardDataset(root, dtype=asked)
    stored = expected(array, dtype)
    wanted = asked or (stored.dtype if stored.dtype.is_floating_point else torch.float32)
    work = np.float64 if wanted == torch.float64 else np.float32
    plain = stored.float().numpy() if dtype == "bfloat16" else array
    shaped = (mean.astype(work), std.astype(work)) if columns else (work(mean[0]), work(std[0]))
    with np.errstate(all="ignore"):
        rows = torch.from_numpy(np.asarray((plain.astype(work) / work(3) - shaped[0]) / shaped[1])).to(wanted)
    assert same(ds[:], rows)
    assert all(same(ds[i], rows[i]) for i in range(n))
    assert same(ds._columns[0].numbers(ds._columns[0].batch(np.arange(n), raw=True)), rows)
    assert same(torch.cat(list(ShardLoader(ds, 7))), rows)


def test_a_batch_of_many_rows_is_normalised_column_by_column(tmp_path: Path) -> None:
    array = noise("float32", (8,), 70_001)
    mean, std = tuple(range(8)), tuple(range(1, 9))
    make_dataset(tmp_path, values={"x": array}, facts={"x": {"normalize": (mean, std)}}, shards=(40_000, 30_001), keyed=False)
    rows = (array - np.array(mean, np.float32)) / np.array(std, np.float32)
    assert same(MMapShardDataset(tmp_path)[:], torch.from_numpy(rows))


def test_dtype_is_for_floats_and_leaves_counts_times_and_categories(tmp_path: Path) -> None:
    values = {"t": noise("int64", ()), "x": noise("float64", (2,)), "n": noise("int16", (2,)), "z": noise("int32", (2,))}
    facts = {"t": {"unit": "ns"}, "z": {"normalize": ((0.0, 0.0), (1.0, 2.0))}}
    make_dataset(tmp_path, values=values, facts=facts, keyed=False)
    assert [v.dtype for v in MMapShardDataset(tmp_path)[:]] == [torch.int64, torch.float64, torch.int16, torch.float32]
    assert [v.dtype for v in MMapShardDataset(tmp_path, dtype="bfloat16")[0]] == [torch.int64, torch.bfloat16, torch.int16, torch.bfloat16]
    assert [v.dtype for v in MMapShardDataset(tmp_path, dtype=torch.int32)[0]] == [torch.int64, torch.float64, torch.int16, torch.int32]
    with pytest.raises(ValueError, match=r"dtype torch.float32 is for images, and for values that are floats or normalised; the fields are t int64"):
        MMapShardDataset(tmp_path, fields=["t", "n"], dtype=torch.float32)
    with pytest.raises(ValueError, match="dtype flaot32: field 't'"):
        MMapShardDataset(tmp_path, dtype="flaot32")
    with pytest.raises(TypeError, match="must be a torch"):
        MMapShardDataset(tmp_path, dtype=np.float32)  # type: ignore[arg-type]


def test_what_needs_an_image_says_so(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": noise("float32", (3, 4, 5))}, keyed=False)
    for arguments in ({"crop": 2}, {"transform": abs}):
        with pytest.raises(ValueError, match="needs an image, the fields are \\['x'\\]"):
            MMapShardDataset(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a label"):
        MMapShardDataset(tmp_path, target_transform=abs)
    with pytest.raises(ValueError, match="augment needs an image"):
        ShardLoader(MMapShardDataset(tmp_path), augment=Augment(hflip=0.5))
    with pytest.raises(ValueError, match="stratify=True needs labels"):
        MMapShardDataset(tmp_path).random_split([0.5, 0.5], stratify=True)


def test_transforms_get_values_of_their_own(tmp_path: Path) -> None:
    array = noise("int32", (2,))
    make_dataset(tmp_path, None, np.arange(N) % 2, values={"x": array, "y": noise("float32", ())}, keyed=False)
    ds = MMapShardDataset(tmp_path, transforms=lambda label, x, y: (x.add_(label), y.dtype == torch.float32 and y.ndim == 0))
    wanted = array + (np.arange(N) % 2)[:, None].astype(np.int32)
    for batch, flags in (ds[:], *DataLoader(ds, N), *ShardLoader(ds, N)):
        assert same(batch, torch.from_numpy(wanted))
        assert all(flags)
    assert MMapShardDataset(tmp_path, fields=["x"])[0].equal(expected(array[0], "int32"))


def test_parts_of_a_table(tmp_path: Path) -> None:
    array = noise("float32", (2,))
    make_dataset(tmp_path, values={"x": array}, shards=SHARDS, splits={"train": 10, "val": 13}, keyed=False)
    with pytest.raises(ValueError, match=r"has the splits train, val: choose one by split= \(--split\), or 'all' for all"):
        MMapShardDataset(tmp_path)
    train, val, both = (MMapShardDataset(tmp_path, split) for split in ("train", "val", "all"))
    rows = torch.from_numpy(array)
    assert same(train[:], rows[:10])
    assert same(val[:], rows[10:])
    assert same(both[:], rows)
    parts = both.random_split([0.5, 0.5], seed=3)
    assert sorted(torch.cat([part[:] for part in parts])[:, 0].tolist()) == sorted(array[:, 0].tolist())
    assert same(val.subset([3, 1])[:], rows[[13, 11]])
    assert val.blocks().tolist() == [0, 13]


def test_resident_rows_are_those_of_the_files(tmp_path: Path) -> None:
    values = {"x": noise("float64", (3,)), "y": noise("uint16", ()), "z": noise("uint64", (2,))}
    make_dataset(tmp_path, None, np.arange(N) % 5, values=values, shards=SHARDS, keyed=False)
    ds = MMapShardDataset(tmp_path)
    for held in (N, 9):
        there = copy.copy(ds)
        store = {column.field: column.batch(np.arange(held), raw=True) for column in ds._columns}
        there._resident = Resident(torch.device("cpu"), store, Selection(0, N), held)
        order = [3, 22, 8, 9, 0]
        assert all(same(a, b) for a, b in zip(there[order], ds[order], strict=True))
        assert there[4][0] == 4
        assert same(there[12][1], ds[12][1])
        batches = zip(ShardLoader(there, 7, shuffle=True, seed=1), ShardLoader(ds, 7, shuffle=True, seed=1), strict=True)
        assert all(same(a, b) for pair in batches for a, b in zip(*pair, strict=True))
    assert ds.to_device("cpu")[5][0] == 0


def test_fields_say_what_columns_categories_and_units_are(tmp_path: Path) -> None:
    many = tuple(f"c{i}" for i in range(300))
    values = {"x": noise("float32", (300,)), "s": np.zeros(N, np.int32), "t": noise("int64", ()), "y": noise("float32", (2,))}
    facts = {"x": {"columns": many}, "s": {"categories": tuple(f"s{i}" for i in range(1000))}, "t": {"unit": "ms"}, "y": {"columns": ("a", "b")}}
    make_dataset(tmp_path, values=values, facts=facts, keyed=False)
    ds = MMapShardDataset(tmp_path, fields=["y", "x", "s", "t"])
    assert list(ds.fields) == ["y", "x", "s", "t"]
    assert ds.fields["x"].columns is not None
    assert ds.fields["x"].columns.listed == many
    assert ds.fields["y"].columns is not None
    assert ds.fields["y"].columns.listed == ("a", "b")
    assert ds.fields["s"].categories is not None
    assert len(ds.fields["s"].categories.listed) == 1000
    assert (ds.fields["t"].unit, ds.fields["t"].columns) == ("ms", None)
    assert (ds.classes, ds.class_to_idx, ds.targets, ds.stats) == (None, None, None, None)


def test_rows_without_keys_tell_their_group_and_their_number_in_it(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": noise("float32", ())}, shards=SHARDS, keyed=False, groups=[("AAPL", 9), ("MSFT", 10), ("AAPL", N)])
    ds = MMapShardDataset(tmp_path)
    assert [ds.source(i) for i in (0, 8, 9, 10, -1)] == ["AAPL[0]", "AAPL[8]", "MSFT[0]", "AAPL[9]", "AAPL[21]"]
    with pytest.raises(ValueError, match=r"its rows have no keys to be found by .*; source\(\) tells where a row comes from"):
        ds.find("AAPL[0]")
    with pytest.raises(IndexError):
        ds.source(N)
    make_dataset(tmp_path / "plain", values={"x": noise("float32", ())}, keyed=False)
    assert MMapShardDataset(tmp_path / "plain").source(7) == "[7]"


def test_numpy_alone_reads_the_same_values(tmp_path: Path) -> None:
    values = {"x": noise("float64", (3,)), "n": noise("uint16", (2,)), "b": noise("bfloat16", ())}
    both = ((1.0, 2.0, 3.0), (0.5, 0.25, 3.0))
    facts: dict[str, Any] = {"x": {"normalize": both}, "n": {"normalize": ((7.0, 9.0), (3.0, 5.0))}, "b": {"dtype": "bfloat16"}}
    make_dataset(tmp_path, values=values, facts=facts, shards=SHARDS, keyed=False, groups=[("a", N)])
    script = Path(__file__).parents[2] / "scripts" / "read_with_numpy.py"
    out = subprocess.run([sys.executable, "-I", str(script), str(tmp_path), "12"], check=True, capture_output=True, text=True).stdout
    x, n, b = MMapShardDataset(tmp_path)[:12]
    wanted = [("x float64 (12, 3)", x), ("n float32 (12, 2)", n), ("b float32 (12,)", b.float())]
    assert out.splitlines() == [f"{said} crc32 {zlib.crc32(batch.numpy().tobytes()):08x}" for said, batch in wanted]
