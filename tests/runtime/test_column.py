"""Columns: rows into memory that the caller lends, as values that the settings decide, by the calling thread alone."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.format.reader import Reader
from mmcompile.runtime.buffers import Pool
from mmcompile.runtime.column import ClassColumn
from mmcompile.runtime.pixels import ImageColumn
from tests.support import in_threads, make_dataset

FLOATS = {torch.float16: np.float16, torch.bfloat16: None, torch.float32: np.float32, torch.float64: np.float64}


def column(root: Path, dtype: Any = None, crop: Any = None, engine: str = "mmap") -> ImageColumn:
    reader = Reader(root, engine=engine)
    return ImageColumn(reader, reader.index.fields[0], dtype, crop)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same bits."""
    return got.dtype == expected.dtype and got.shape == expected.shape and (_bytes(got) == _bytes(expected))


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""


def formula(stored: np.ndarray, scale: float, normalize: Any, dtype: torch.dtype) -> torch.Tensor:
    work = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        out = stored.astype(work) / work(scale)
        if normalize is not None:
            mean, std = (np.array(v, work)[:, None, None] for v in normalize)
            out = (out - mean) / std
    return torch.from_numpy(out).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    stored=st.sampled_from(["uint8", "int16", "uint16", "int64", "float16", "float32", "float64"]),
    layout=st.sampled_from(["chw", "hwc"]),
    engine=st.sampled_from(["mmap", "pread"]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    normalized=st.booleans(),
    crop=st.booleans(),
    small=st.sampled_from([{}, {"_BLOCK": 32, "_SERIAL": 16, "_SHORT": 8, "_TINY": 4, "_CACHED": 100}, {"_BLOCK": 7, "_SERIAL": 3, "_SHORT": 99}]),
)
def test_batches_are_the_formula_in_float32_whatever_is_stored(
    tmp_path_factory: pytest.TempPathFactory, stored: str, layout: str, engine: str, shape: Any, normalized: bool, crop: bool, small: dict[str, int]
) -> None:
    root = tmp_path_factory.mktemp("ds")
    rng = np.random.default_rng(0)
    kind = np.dtype(stored)
    images = rng.standard_normal((5, *shape)).astype(kind) if kind.kind == "f" else rng.integers(0, 101, (5, *shape)).astype(kind)
    channels = shape[0]
    normalize = (tuple(0.4 + 0.1 * c for c in range(channels)), tuple(0.21 + 0.03 * c for c in range(channels))) if normalized else None
    scale = 1.0 if kind.kind == "f" else 101.0
    make_dataset(root, images, layout=layout, normalize=normalize, scale=scale, shards=(2, 3))
    rows = np.array([4, 0, 1, 1, 3, 2], np.int64)
    cropped = images
    half = (shape[1] + 1) // 2, (shape[2] + 1) // 2
    if crop:
        top, left = round((shape[1] - half[0]) / 2), round((shape[2] - half[1]) / 2)
        cropped = images[:, :, top : top + half[0], left : left + half[1]]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(f"mmcompile.runtime.{'column' if name == '_CACHED' else 'numbers'}.{name}", value)
        for dtype in FLOATS:
            given_as_stored = str(dtype) == f"torch.{stored}" and not normalized
            expected = torch.from_numpy(cropped[rows]) if given_as_stored else formula(cropped[rows], scale, normalize, dtype)
            ours = column(root, dtype, half if crop else None, engine)
            got = ours.batch(rows)
            assert same(got, expected)
            assert got.is_contiguous(memory_format=torch.channels_last if layout == "hwc" else torch.contiguous_format)
            raw = ours.batch(rows, raw=True)
            assert same(raw, torch.from_numpy(cropped[rows]))
            assert same(ours.numbers(raw), expected)
            shard, local = ours._reader.locate(4)
            assert same(ours.sample(4, shard, local), expected[0])
            assert same(ours.own(4), expected[0])


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("side", [40, 96, 151])
def test_rows_of_every_size_are_the_formula(tmp_path: Path, side: int, layout: str) -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 3, side, side + 1), dtype=np.uint8)
    normalize = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    make_dataset(tmp_path, images, layout=layout, normalize=normalize)
    for dtype in FLOATS:
        assert same(column(tmp_path, dtype).batch(np.array([2, 0, 1])), formula(images[[2, 0, 1]], 255.0, normalize, dtype))


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_batches_lie_in_memory_that_was_lent(tmp_path: Path, layout: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 5, 7), dtype=np.uint8)
    make_dataset(tmp_path, images, layout=layout, normalize=((0.5,) * 3, (0.25,) * 3))
    pool = Pool(4)
    rows = np.array([5, 2, 2, 0], np.int64)
    asked: list[int] = []

    def memory(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return pool.lend(nbytes)

    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2), (torch.uint8, 1)):
        ours = column(tmp_path, dtype)
        out = ours.empty(4, memory)
        assert asked[-1] == 4 * 105 * width
        assert out.shape == (4, 3, 5, 7)
        assert out.is_contiguous(memory_format=torch.channels_last if layout == "hwc" else torch.contiguous_format)
        assert ours.batch(rows, out) is out
        assert same(out, ours.batch(rows))
        assert ours.empty(4, memory, size=(2, 3), raw=True).shape == (4, 3, 2, 3)
        assert asked[-1] == 4 * 3 * 2 * 3
        assert ours.batch(rows[:0], ours.empty(0, memory)).shape == (0, 3, 5, 7)
        assert ours.batch(rows[:0]).shape == (0, 3, 5, 7)


def test_stored_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    values = torch.randn(4, 3, 5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layout in ("chw", "hwc"):
        root = tmp_path / layout
        make_dataset(root, values.view(torch.uint16).numpy(), dtype="bfloat16", layout=layout, normalize=((0.5,) * 3, (0.3,) * 3))
        rows = np.array([3, 1])
        for dtype in FLOATS:
            expected = formula(values[[3, 1]].float().numpy(), 1.0, ((0.5,) * 3, (0.3,) * 3), dtype)
            ours = column(root, dtype)
            assert same(ours.batch(rows), expected)
            assert same(ours.numbers(ours.batch(rows, raw=True)), expected)
            assert same(ours.batch(rows, raw=True), values[[3, 1]])


def test_values_beyond_a_dtype_are_infinite_without_a_word(tmp_path: Path) -> None:
    values = np.array([1e300, -1e300, 1e30, np.inf, np.nan, 70000.0]).reshape(1, 1, 2, 3)
    make_dataset(tmp_path, values)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ours = column(tmp_path, dtype)
        expected = torch.from_numpy(values).to(torch.float32).to(dtype)
        assert torch.equal(ours.batch(np.array([0])).nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))
        assert torch.equal(ours.numbers(torch.from_numpy(values)).nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))


def test_classes_fill_what_is_lent(tmp_path: Path) -> None:
    make_dataset(tmp_path, labels=[3, 1, 4, 1, 5], shards=(2, 3))
    reader = Reader(tmp_path)
    labels = ClassColumn(reader, reader.index.fields[0])
    out = labels.empty(3, Pool(1).lend, raw=True)
    assert labels.batch(np.array([4, 0, 2]), out) is out
    assert out.tolist() == [5, 3, 4]
    assert labels.batch(np.array([1, 3])).tolist() == [1, 1]
    assert labels.numbers(out) is out


def test_seconds_are_added_up(tmp_path: Path) -> None:
    make_dataset(tmp_path, np.zeros((4, 3, 60, 60), np.uint8), [0, 1, 2, 3])
    times = types.SimpleNamespace(gathered_s=1.0, converted_s=2.0)
    rows = np.arange(4)
    column(tmp_path).batch(rows, times=times)
    assert times.gathered_s > 1.0
    assert times.converted_s == 2.0
    before = times.gathered_s
    column(tmp_path, torch.float32).batch(rows, times=times)
    assert times.gathered_s > before
    assert times.converted_s > 2.0
    before = times.gathered_s
    reader = Reader(tmp_path)
    ClassColumn(reader, reader.index.fields[1]).batch(rows, times=times)
    assert times.gathered_s > before


def test_memory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "chw", np.zeros((4, 3, 6, 5), np.uint8))
    make_dataset(tmp_path / "hwc", np.zeros((4, 3, 6, 5), np.uint8), layout="hwc")
    rows = np.arange(2)
    ours, other = column(tmp_path / "chw", torch.float32), column(tmp_path / "hwc", torch.float32)
    for out in (ours.empty(3), ours.empty(2, raw=True), ours.empty(2, size=(5, 6)), other.empty(2), torch.empty(2), ours.empty(2).to("meta")):
        with pytest.raises(ValueError, match=r"out is .* fills \(2, 3, 6, 5\) of torch.float32, contiguous, .* make it with empty\(\)"):
            ours.batch(rows, out)
    with pytest.raises(ValueError, match="channels_last"):
        other.batch(rows, ours.empty(2))


def test_threads_fill_batches_of_one_column_at_once(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 3, 31, 33), dtype=np.uint8)
    make_dataset(tmp_path, images, normalize=((0.5,) * 3, (0.25,) * 3), shards=(10,) * 6 + (4,))
    ours = column(tmp_path, torch.bfloat16)
    expected = formula(images, 255.0, ((0.5,) * 3, (0.25,) * 3), torch.bfloat16)
    wrong: list[int] = []

    def fill(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            rows = rng.integers(0, 64, 16)
            if not same(ours.batch(rows), expected[torch.from_numpy(rows)]):
                wrong.append(seed)

    in_threads(fill)
    assert not wrong


def test_no_thread_but_the_caller_computes(tmp_path: Path) -> None:
    make_dataset(tmp_path, np.zeros((4, 3, 200, 220), np.uint8), normalize=((0.5,) * 3, (0.25,) * 3))
    code = """
import os, sys
import numpy as np, torch
from mmcompile.format.reader import Reader
from mmcompile.runtime.augment import Augment
from mmcompile.runtime.pixels import ImageColumn
torch.set_num_threads(4)
reader = Reader(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8):
    column = ImageColumn(reader, reader.index.fields[0], dtype, None)
    column.batch(np.arange(4))
    for augment in (Augment(crop=190, hflip=0.5), Augment(resized_crop=190, hflip=0.5)):
        column.batch(np.arange(4), cut=augment.draw(0, 0, np.arange(4), 200, 220))
assert len(os.listdir("/proc/self/task")) == before
torch.ones(1 << 20).add_(1)  # what it would look like
assert len(os.listdir("/proc/self/task")) > before
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_dtype_may_be_given_by_its_name(tmp_path: Path) -> None:
    make_dataset(tmp_path, np.zeros((1, 3, 4, 4), np.uint8))
    for name in ("uint8", "float16", "bfloat16", "float32", "float64"):
        assert column(tmp_path, name).dtype == getattr(torch, name)
    for wrong in ("float8", "torch.float32", "int32", torch.int32):
        with pytest.raises(ValueError, match=r"is stored as uint8 and can be given as one of .*torch.uint8.*torch.bfloat16"):
            column(tmp_path, wrong)
    for wrong in (np.float32, 32, float):
        with pytest.raises(TypeError, match=r"dtype must be a torch.dtype such as torch.float32, or its name, not"):
            column(tmp_path, wrong)
