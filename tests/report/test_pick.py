"""Which rows a report shows."""

from __future__ import annotations

import numpy as np
import pytest

from mmcompile.report.pick import Picker, spread


def picked(labels: np.ndarray, seed: int = 0, each: int = 3, most: int = 1000, piece: int = 7) -> list[int]:
    picker = Picker(seed, each)
    for start in range(0, len(labels), piece):
        rows = np.arange(start, min(start + piece, len(labels)))
        picker.add(rows, labels[rows])
    return picker.found(most)[0].tolist()


def test_each_label_has_its_rows_whatever_the_pieces() -> None:
    labels = np.random.default_rng(0).integers(-1, 6, 200)
    rows = picked(labels)
    assert [labels[r] for r in rows] == sorted(np.repeat(np.arange(-1, 6), 3).tolist())
    assert rows == sorted(rows, key=lambda r: (labels[r], r))
    assert all(picked(labels, piece=piece) == rows for piece in (1, 50, 200))


def test_the_seed_decides_and_all_rows_have_a_chance() -> None:
    labels = np.zeros(30, np.int64)
    assert picked(labels, 1) == picked(labels, 1)
    assert picked(labels, 1) != picked(labels, 2)
    assert {row for seed in range(60) for row in picked(labels, seed)} == set(range(30))


def test_a_label_with_few_rows_shows_them_all() -> None:
    assert picked(np.array([4, 4, 7, 7, 7, 7]), each=3)[:2] == [0, 1]


def test_many_labels_get_fewer_rows_each_and_then_some_are_left_out() -> None:
    labels = np.repeat(np.arange(10), 5)
    assert np.bincount(labels[picked(labels, most=20)]).tolist() == [2] * 10
    assert np.bincount(labels[picked(labels, most=19)]).tolist() == [1] * 10
    shown = labels[picked(labels, most=4)]
    assert len(shown) == len(set(shown.tolist())) == 4


def test_no_rows_are_no_rows() -> None:
    assert Picker(0, 3).found(10)[0].tolist() == []
    assert spread(5, 5, 10, 0).tolist() == []


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 100, 7), (3, 10, 7), (3, 10, 20), (10, 1_000_003, 256)])
def test_spread_takes_one_row_of_each_part(start: int, stop: int, count: int) -> None:
    rows = spread(start, stop, count, seed=3)
    assert len(rows) == min(count, stop - start)
    edges = start + np.arange(len(rows) + 1) * (stop - start) // len(rows)
    assert np.all((rows >= edges[:-1]) & (rows < edges[1:]))
    assert np.array_equal(rows, spread(start, stop, count, seed=3))
