from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mmcompile.compiler import pieces
from mmcompile.compiler.pieces import cut_pieces

MIB = 1 << 20
SIZES = st.lists(st.one_of(st.integers(-1, 4096), st.integers(0, 40 * MIB)), max_size=600)


@hypothesis.given(SIZES, st.integers(1, 9))
def test_every_item_is_in_one_piece_and_no_piece_is_empty(sizes: list[int], workers: int) -> None:
    found = list(cut_pieces(np.array(sizes, np.int64), workers))
    assert sorted(i for part in found for i in part) == list(range(len(sizes)))
    assert all(part for part in found)


@hypothesis.given(SIZES, st.integers(1, 9))
def test_pieces_are_bounded_in_items_and_bytes(sizes: list[int], workers: int) -> None:
    for part in cut_pieces(np.array(sizes, np.int64), workers):
        assert len(part) <= pieces._MOST_ITEMS
        assert len(part) == 1 or sum(max(sizes[i], 0) for i in part) < pieces._MOST_BYTES + pieces._LARGE_BYTES


def test_large_files_come_first_the_largest_before_all_and_the_rest_in_order() -> None:
    sizes = np.array([5, 9 * MIB, 5, 30 * MIB, 5, 9 * MIB], np.int64)
    assert list(cut_pieces(sizes, 2)) == [[3], [1], [5], [0, 2, 4]]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_pieces_grow_smaller_so_that_workers_end_together(workers: int) -> None:
    sizes = np.full(2000, 100_000, np.int64)
    loads = [len(part) * 100_000 for part in cut_pieces(sizes, workers)]
    assert loads[-2] < loads[0]
    assert sum(loads[-workers:]) <= 2.2 * MIB * workers
    ends = [0] * workers  # each piece goes to the worker that is free first
    for load in loads:
        ends[ends.index(min(ends))] += load
    assert max(ends) - min(ends) <= 2.2 * MIB


def test_tiny_files_come_many_at_a_time() -> None:
    assert [len(part) for part in cut_pieces(np.full(700, 300, np.int64), 2)] == [256, 256, 188]
