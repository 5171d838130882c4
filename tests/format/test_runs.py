"""Which bytes of a row a part of it lies in, and that no others are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.format import npy
from mmcompile.format.reader import Reader
from mmcompile.format.runs import runs_of
from tests.support import make_dataset


@st.composite
def parts(draw: Any) -> tuple[tuple[int, ...], int, tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    cuts = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, draw(st.sampled_from([1, 2, 8])), tuple(slice(a, b) for a, b in cuts)


@given(part=parts(), gap=st.sampled_from([0, 3, 40, 4096]))
def test_runs_hold_the_part_and_little_else(part: Any, gap: int) -> None:
    shape, itemsize, region = part
    row = np.arange(int(np.prod(shape)), dtype=f"u{itemsize}").reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmcompile.format.runs._GAP", gap)
        runs = runs_of(shape, itemsize, region)
    data, expected = row.tobytes(), row[region]
    found = []
    for offset in runs.offsets.tolist():
        run = data[offset : offset + runs.nbytes]
        assert len(run) == runs.nbytes  # never beyond the row
        found.append(np.ndarray(runs.shape, row.dtype, run, 0, runs.strides).reshape(-1))
    assert np.array_equal(np.concatenate([np.empty(0, row.dtype), *found]), expected.reshape(-1))
    if not gap:
        assert runs.nbytes * len(runs.offsets) == expected.nbytes


def test_the_whole_row_is_one_run() -> None:
    for region in ((), (slice(0, 3), slice(0, 4), slice(0, 5))):
        runs = runs_of((3, 4, 5), 2, region)
        assert (runs.offsets.tolist(), runs.nbytes) == ([0], 120)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a shard's rows."""
    sizes: list[int] = []
    plain = npy.read_into

    def counting(fd: int, out: Any, offset: int, path: Path) -> None:
        sizes.append(out.nbytes)
        plain(fd, out, offset, path)

    monkeypatch.setattr("mmcompile.format.reader.read_into", counting)
    return sizes


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_part_of_a_row_is_what_indexing_gives_and_all_that_is_read(tmp_path: Path, engine: str, read: list[int]) -> None:
    volumes = np.random.default_rng(0).integers(0, 9999, (5, 2, 20, 64, 64), np.int16)  # planes of 8 KiB, lines of 128 bytes
    make_dataset(tmp_path, values={"x": volumes}, shards=(3, 2))
    reader = Reader(tmp_path, engine=engine)
    region = (slice(0, 2), slice(3, 11), slice(10, 20), slice(30, 62))
    out = np.zeros((2, 8, 10, 40), np.int16)
    reader.part("x", 4, region, out[..., 5:37][..., ::-1])
    assert np.array_equal(out[..., 5:37][..., ::-1], volumes[4][region])
    assert not out[..., :5].any()
    assert not out[..., 37:].any()
    assert np.array_equal(reader.gather("x", np.array([4, 0, 3]), region=region), volumes[[4, 0, 3]][(slice(None), *region)])
    assert sum(read) == (0 if engine == "mmap" else 4 * 2 * 8 * (9 * 128 + 64))
    nothing = np.empty((2, 0, 10, 32), np.int16)
    reader.part("x", 4, (slice(0, 2), slice(3, 3), slice(10, 20), slice(30, 62)), nothing)
    reader.advise("x", np.array([0, 4]), region)
    assert not reader.cold("x", np.array([0, 4]), region=region)
