"""Order: a bijection that looks random.  Steps: every position once, on ranks in step.

The statistics run on fixed seeds, so they are not a matter of luck; `test_the_statistics_notice_...` shows that each of them can fail.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmcompile.format import permutation
from mmcompile.runtime import order as module
from mmcompile.runtime.order import Order, balanced, cumulative

Array = np.ndarray[Any, Any]
TABLE = 65_536
#: How many standard deviations a statistic may lie off.
FAR = 4.5


def whole(n: int, **options: Any) -> Array:
    return Order(n, **options).rows(np.arange(n))


def is_bijection(rows: Array, n: int) -> bool:
    return rows.dtype == np.int64 and np.array_equal(np.bincount(rows, minlength=n), np.ones(n))


@pytest.fixture
def feistel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small permutations are made as large ones are."""
    monkeypatch.setattr(permutation, "_TABLE_ROWS", -1)


# What comes back


def test_without_shuffle_sample_i_stands_at_position_i() -> None:
    assert Order(10).rows(np.array([3, 0, 9, 3])).tolist() == [3, 0, 9, 3]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200_000), st.integers(), st.integers())
@example(TABLE - 1, 0, 0)
@example(TABLE, 0, 0)
@example(TABLE + 1, 0, 0)
@example(1 << 17, 0, 0)
@example((1 << 17) + 1, 0, 0)
def test_a_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert is_bijection(whole(n, seed=seed, epoch=epoch, shuffle=True), n)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("feistel")
def test_the_network_is_a_bijection_of_any_size(seed: int) -> None:
    for n in [*range(140), 255, 256, 257, 1000]:
        assert is_bijection(whole(n, seed=seed, shuffle=True), n), n


@st.composite
def blocked(draw: st.DrawFn) -> tuple[Array, int]:
    sizes = draw(st.lists(st.integers(0, 30), max_size=20))
    return np.cumsum([0, *sizes]), draw(st.integers(1, 25))


@settings(max_examples=100, deadline=None)
@given(blocked(), st.integers(), st.integers())
def test_a_block_shuffle_is_a_bijection_with_at_most_so_many_shards_open(shape: tuple[Array, int], seed: int, epoch: int) -> None:
    blocks, size = shape
    n = int(blocks[-1])
    rows = whole(n, seed=seed, epoch=epoch, shuffle="block", blocks=blocks, block_shards=size)
    assert is_bijection(rows, n)
    shard = np.searchsorted(blocks, rows, side="right") - 1
    opened = {int(s): at for at, s in reversed(list(enumerate(shard)))}
    closed = {int(s): at for at, s in enumerate(shard)}
    for at in range(n):
        assert sum(opened[s] <= at <= closed[s] for s in opened) <= size


def test_a_window_of_all_shards_mixes_all_rows_and_one_of_one_shard_keeps_shards_apart() -> None:
    blocks = np.arange(0, 10_001, 100)
    far = {size: np.abs(whole(10_000, shuffle="block", blocks=blocks, block_shards=size) - np.arange(10_000)).mean() for size in (1, 100)}
    assert abs(far[100] / 10_000 - 1 / 3) < 0.01
    shards = whole(10_000, shuffle="block", blocks=blocks, block_shards=1).reshape(100, 100) // 100
    assert (shards == shards[:, :1]).all()
    assert shards[:, 0].tolist() != sorted(shards[:, 0].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": "block", "blocks": np.arange(0, 30_001, 1000), "block_shards": 3},
        {"weights": np.arange(1.0, 30_001.0)},
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_a_position_does_not_depend_on_what_else_is_asked(options: dict[str, Any], large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(permutation, "_TABLE_ROWS", -1)
    n = 30_000
    every = whole(n, seed=5, epoch=2, **options)
    order = Order(n, seed=5, epoch=2, **options)
    rng = np.random.default_rng(0)
    for positions in (rng.permutation(n)[:300], rng.integers(0, n, 40_000), np.arange(2900, 3100), np.array([n - 1]), np.array([0])):
        assert np.array_equal(order.rows(positions), every[positions])
        assert np.array_equal(pickle.loads(pickle.dumps(order)).rows(positions.tolist()), every[positions])


@pytest.mark.parametrize("n", [10**9, 1 << 40, (1 << 62) + 1, (1 << 63) - 1])
def test_large_permutations_take_no_memory_and_repeat_nothing(n: int) -> None:
    order = Order(n, seed=1, shuffle=True)
    positions = np.unique(np.random.default_rng(0).integers(0, n, 50_000))
    rows = order.rows(positions)
    assert len(np.unique(rows)) == len(positions)
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(pickle.dumps(order)) < 2000
    assert abs(against((rows / n * 100).astype(np.int64), np.arange(100))) < FAR


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_positions_may_be_of_any_integer_type(shuffle: bool, dtype: Any) -> None:
    order = Order(200, shuffle=shuffle)
    assert np.array_equal(order.rows(np.arange(200).astype(dtype)), whole(200, shuffle=shuffle))
    assert order.rows(np.arange(200).astype(dtype)).dtype == np.int64


def test_what_comes_back_is_an_array_of_its_own() -> None:
    for options in ({}, {"shuffle": True}):
        order, positions = Order(10, **options), np.arange(10)
        order.rows(positions)[:] = -1
        assert positions.tolist() == list(range(10))
        assert is_bijection(order.rows(positions), 10)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "block", "blocks": np.array([0])}])
def test_no_samples(options: dict[str, Any]) -> None:
    order = Order(0, **options)
    assert len(order) == 0
    assert order.rows([]).shape == order.rows(np.zeros(0, np.int64)).shape == (0,)
    with pytest.raises(IndexError, match=r"position 0 is outside \[0, 0\)"):
        order.rows([0])


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "block", "blocks": np.array([0, 0, 1, 1])}, {"weights": np.ones(1)}])
def test_one_sample(options: dict[str, Any]) -> None:
    assert Order(1, **options).rows([0]).tolist() == [0]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "block", "blocks": np.array([0, 10])}, {"weights": np.arange(1.0, 11.0)}])
@pytest.mark.parametrize("bad", [-1, 10, 1 << 40, np.uint64((1 << 64) - 1)])
def test_a_position_outside_is_an_index_error_that_names_it(options: dict[str, Any], bad: int) -> None:
    with pytest.raises(IndexError, match=rf"position {bad} is outside \[0, 10\)"):
        Order(10, **options).rows(np.array([0, bad, 1]) if bad < 1 << 63 else np.array([bad]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "blocks"}, "shuffle must be True, False or 'block', not 'blocks'"),
        ({"shuffle": None}, "shuffle must be True, False or 'block', not None"),
        ({"seed": 0.5}, "seed must be an integer, found 0.5"),
        ({"epoch": None}, "epoch must be an integer, found None"),
        ({"shuffle": "block"}, "needs blocks"),
        ({"shuffle": "block", "blocks": np.array([0, 5])}, "blocks must rise from 0 to the number of samples, 10, found 0 to 5"),
        ({"shuffle": "block", "blocks": np.array([1, 10])}, "found 1 to 10"),
        ({"shuffle": "block", "blocks": np.array([0, 7, 5, 10])}, "smallest step -2"),
        ({"shuffle": "block", "blocks": np.array([])}, "blocks must be integers"),
        ({"shuffle": "block", "blocks": np.array([[0, 10]])}, "blocks must be integers"),
        ({"shuffle": "block", "blocks": np.array([0.0, 10.0])}, "blocks must be integers"),
        ({"shuffle": "block", "blocks": np.array([0, 10]), "block_shards": 0}, r"block_shards must be in \[1, 2\^63\), found 0"),
        ({"shuffle": "block", "blocks": np.array([0, 10]), "weights": np.ones(10)}, "use shuffle=True with weights"),
        ({"weights": np.ones(9)}, r"cumulative\(weights\) returns, float64 \(10,\).* found float64 \(9,\)"),
        ({"weights": np.ones(10, np.float32)}, "found float32"),
        ({"weights": np.zeros(10)}, "the last above 0"),
        ({"weights": [1.0] * 10 + [math.inf]}, "the last above 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order(10, **options)


@pytest.mark.parametrize("n", [-1, 1 << 63, 2.0, "3"])
def test_n_must_be_a_number_of_samples(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be"):
        Order(n)


def test_positions_must_be_a_row_of_integers() -> None:
    for bad in ([0.0], [[0]], 0, [True]):
        with pytest.raises(TypeError, match="positions must be integers"):
            Order(10).rows(bad)


GOLDEN: list[tuple[int, dict[str, Any], list[int], list[int]]] = [
    (10, {"shuffle": True}, list(range(10)), [3, 7, 2, 9, 6, 8, 1, 4, 5, 0]),
    (10, {"shuffle": True, "seed": -1, "epoch": 3}, list(range(10)), [5, 2, 3, 6, 9, 4, 0, 1, 7, 8]),
    (1000, {"shuffle": True, "seed": 12345678901234567890123, "epoch": -7}, [0, 1, 2, 500, 999], [806, 546, 687, 511, 77]),
    (65_536, {"shuffle": True, "seed": 1}, [0, 1, 2, 65_535], [51214, 51949, 44747, 27367]),
    (65_537, {"shuffle": True, "seed": 1}, [0, 1, 2, 65_536], [63981, 51993, 50954, 7837]),
    (1_281_167, {"shuffle": True, "epoch": 89}, [0, 1, 2, 1_281_166], [914877, 247433, 266355, 582856]),
    (10**9, {"shuffle": True, "seed": 1 << 63, "epoch": 1}, [0, 1, 2, 999_999_999], [77623007, 10945123, 559319404, 693048625]),
    ((1 << 63) - 1, {"shuffle": True}, [0, 1, (1 << 63) - 2], [2213878905100256715, 2646285207704233214, 4420646476067192357]),
    (
        12,
        {"shuffle": "block", "blocks": np.array([0, 3, 3, 7, 9, 12]), "block_shards": 2, "seed": 4},
        list(range(12)),
        [0, 4, 1, 2, 3, 5, 6, 11, 8, 7, 10, 9],
    ),
    (300_000, {"shuffle": "block", "blocks": np.arange(0, 300_001, 10_000), "epoch": 2}, [0, 1, 160_000, 299_999], [285848, 165966, 196732, 105761]),
    (5, {"weights": np.array([0.0, 1.0, 1.5, 1.5, 4.0])}, list(range(5)), [1, 4, 4, 2, 4]),
    (5, {"weights": np.array([0.0, 1.0, 1.5, 1.5, 4.0]), "seed": 9, "epoch": -4, "shuffle": True}, list(range(5)), [4, 4, 1, 1, 2]),
]


@pytest.mark.parametrize(("n", "options", "positions", "rows"), GOLDEN)
def test_an_order_never_changes(n: int, options: dict[str, Any], positions: list[int], rows: list[int]) -> None:
    assert Order(n, **options).rows(positions).tolist() == rows


# Seeds and epochs


def test_seed_and_epoch_are_any_integers_of_which_64_bits_count() -> None:
    base = whole(50, seed=3, epoch=-2, shuffle=True)
    assert np.array_equal(base, whole(50, seed=3 - (1 << 64), epoch=-2 + (1 << 70), shuffle=True))
    assert np.array_equal(base, whole(50, seed=np.int64(3), epoch=np.int32(-2), shuffle=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [50, TABLE + 1])
def test_no_two_seeds_and_epochs_share_an_order(n: int) -> None:
    parts = range(-4, 5)
    head = np.arange(50)
    orders = {Order(n, seed=s, epoch=e, shuffle=True).rows(head).tobytes() for s in parts for e in parts}
    assert len(orders) == 81


def test_epochs_and_seeds_change_the_shards_of_a_window_and_the_rows_within() -> None:
    blocks = np.arange(0, 2001, 100)
    first, *others = [whole(2000, seed=s, epoch=e, shuffle="block", blocks=blocks, block_shards=2) for s, e in ((0, 0), (0, 1), (1, 0))]
    for rows in others:
        assert (rows[::200] // 100).tolist() != (first[::200] // 100).tolist()
        assert (rows == first).sum() < 20


def test_windows_and_shards_are_shuffled_by_keys_of_their_own() -> None:
    blocks = np.arange(0, 2501, 50)
    rows = whole(2500, shuffle="block", blocks=blocks, block_shards=1).reshape(50, 50)
    inside = {tuple(row) for row in (rows % 50).tolist()}
    assert len(inside) == 50
    assert tuple((rows[:, 0] // 50).tolist()) not in inside
    assert tuple(whole(50, shuffle=True).tolist()) not in inside


# Weights


def test_rows_are_drawn_in_proportion_to_their_weights_and_never_at_weight_zero() -> None:
    weights = np.array([0, 1, 0, 0, 3, 2, 0, 4, 0], np.float64)
    drawn = Order(9, seed=2, weights=cumulative(weights)).rows(np.arange(9))
    assert weights[drawn].min() > 0
    counts = sum(np.bincount(whole(9, seed=s, weights=cumulative(weights)), minlength=9) for s in range(3000))
    assert (counts[weights == 0] == 0).all()
    expected = 27_000 * weights[weights > 0] / 10
    assert ((counts[weights > 0] - expected) ** 2 / expected).sum() < 3 + FAR * math.sqrt(6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1.0, 1e-300, 5e-324, 1e-17, 1 / 3, 1e17, 1e300]), min_size=1, max_size=50), st.integers())
@example([5e-324, 0.0], 0)
@example([0.0, 5e-324, 5e-324, 0.0], 1)
def test_no_weight_however_small_lets_a_row_of_weight_zero_through(weights: list[float], seed: int) -> None:
    if not any(weights):
        weights = [*weights, 1.0]
    drawn = whole(len(weights), seed=seed, weights=cumulative(weights))
    assert all(weights[i] > 0 for i in drawn.tolist())


def test_the_largest_draw_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "stream_keys", lambda seed, epoch, rows: np.full(len(rows), (1 << 64) - 1, np.uint64))
    for weights in ([1.0, 0.0], [0.0, 5e-324, 0.0], [0.1] * 10 + [0.0], [3.0, 1 + 2.0**-52, 0.0]):
        last = max(i for i, w in enumerate(weights) if w)
        assert whole(len(weights), weights=cumulative(weights)).tolist() == [last] * len(weights)


def test_weighted_draws_are_independent_of_neighbours_epochs_and_seeds() -> None:
    n = 50_000
    sums = cumulative(np.ones(n))
    draws = [whole(n, seed=s, epoch=e, weights=sums) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert abs(against(draws[0] // 500, np.arange(100))) < FAR
    assert abs(len(np.unique(draws[0])) / n - (1 - math.exp(-1))) < 0.01
    for a, b in ((draws[0][1:], draws[0][:-1]), (draws[0], draws[1]), (draws[0], draws[2])):
        assert correlation(a, b) < FAR


def test_balanced_weights_give_each_class_that_occurs_the_same_share() -> None:
    labels = np.array([7] * 900 + [2] * 90 + [-1] * 10)
    weights = balanced(labels)
    assert weights.dtype == np.float64
    assert [round(weights[labels == c].sum(), 12) for c in (7, 2, -1)] == [1, 1, 1]
    drawn = np.concatenate([labels[whole(1000, epoch=e, weights=cumulative(weights))] for e in range(30)])
    counts = np.array([(drawn == c).sum() for c in (7, 2, -1)])
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 2 + FAR * 2
    assert balanced([]).shape == (0,)


def test_labels_must_be_a_row() -> None:
    with pytest.raises(ValueError, match=r"labels must have shape \(n,\).*found \(2, 1\)"):
        balanced([[1], [2]])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -0.5, -1.0], r"not negative, found -0.5 at row 1 \(2 such in all\)"),
        ([1.0, math.nan], "found nan at row 1"),
        ([math.inf, 1.0], "found inf at row 0"),
        ([0.0, 0.0], "a finite sum above 0, found 0.0 over 2 samples"),
        ([], "a finite sum above 0, found 0.0 over 0 samples"),
        ([1e308, 1e308], "a finite sum above 0, found inf"),
        ([[1.0], [2.0]], r"weights must be numbers \(n,\).*shape \(2, 1\)"),
        (["a"], "weights must be numbers"),
        ([1j], "weights must be numbers"),
    ],
)
def test_weights_that_make_no_sense_are_named(weights: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cumulative(weights)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float32])
def test_weights_may_be_of_any_real_type(dtype: Any) -> None:
    given = np.array([1, 0, 1], dtype)
    assert cumulative(given).tolist() == [1.0, 1.0, 2.0]
    assert cumulative(given).dtype == np.float64


# Statistics: each returns how many standard deviations it lies off that of a random permutation


def correlation(a: Array, b: Array) -> float:
    return float(abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)))


def against(values: Array, likely: Array) -> float:
    """Chi-square of values against the frequencies of `likely`."""
    expected = np.bincount(likely) * (len(values) / len(likely))
    counts = np.bincount(values, minlength=len(expected))
    freedom = len(expected) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def table(a: Array, b: Array, bins: int) -> float:
    """Whether two numbers in [0, bins) are independent: chi-square of their joint counts."""
    counts = np.bincount(a * bins + b, minlength=bins * bins).reshape(bins, bins)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    freedom = (bins - 1) ** 2
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def poisson(counts: Array) -> float:
    """Counts against Poisson(1): the worse of their mean and their variance."""
    mean, spread = (counts.mean() - 1) * math.sqrt(len(counts)), (((counts - 1.0) ** 2).mean() - 1) * math.sqrt(len(counts) / 3)
    return float(max(abs(mean), abs(spread)))


def permutations(n: int, count: int) -> Array:
    """int64 (count, n): over seeds and epochs."""
    return np.stack([whole(n, seed=i % 40, epoch=i // 40, shuffle=True) for i in range(count)])


def fixed_points(p: Array) -> float:
    return poisson((p == np.arange(p.shape[1])).sum(1))


def neighbours(p: Array) -> float:
    return max(poisson((np.diff(p, axis=1) == step).sum(1)) for step in (1, -1))


def places(p: Array) -> float:
    """Does any position prefer some rows, by their high digits and by their low ones?"""
    n = p.shape[1]
    bins = min(n, 50)
    position, row = np.broadcast_to(np.arange(n), p.shape).ravel(), p.ravel()
    return max(abs(table(position * bins // n, row * bins // n, bins)), abs(table(position % bins, row % bins, bins)))


def steps_apart(p: Array, lags: tuple[int, ...]) -> float:
    """Are rows a given number of positions apart related: linearly, by the high digits of their distance, by its low ones?"""
    n = p.shape[1]
    distances = np.arange(1, n)  # all that there are: each equally likely
    worst = 0.0
    for lag in lags:
        a, b = p[:, :-lag].ravel(), p[:, lag:].ravel()
        apart = (b - a) % n
        linear = (np.corrcoef(a, b)[0, 1] + 1 / (n - 1)) * math.sqrt(len(a))
        worst = max(worst, abs(linear), *(abs(against(digit(apart), digit(distances))) for digit in (lambda d: d * 64 // n, lambda d: d % 64)))
    return worst


SIZES = (128, 200, 257, 1000)
STATISTICS: dict[str, Callable[[Array], float]] = {
    "fixed points": fixed_points,
    "neighbours": neighbours,
    "places": places,
    "steps apart": lambda p: steps_apart(p, (1, 2, 8, 16, 32)),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("large", [False, True])
def test_permutations_look_random(n: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(permutation, "_TABLE_ROWS", -1)
    p = permutations(n, 1000)
    assert {name: z for name, measure in STATISTICS.items() if (z := measure(p)) >= FAR} == {}


@pytest.mark.parametrize(("rounds", "name"), [*((2, name) for name in STATISTICS), (4, "fixed points"), (4, "neighbours"), (4, "steps apart")])
@pytest.mark.usefixtures("feistel")
def test_the_statistics_notice_too_few_rounds(rounds: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    assert max(STATISTICS[name](permutations(n, 1000)) for n in SIZES) > FAR


@pytest.mark.parametrize("name", STATISTICS)
def test_the_statistics_notice_an_order_that_is_only_turned(name: str) -> None:
    turned = (np.arange(200) + np.random.default_rng(0).integers(0, 200, (1000, 1))) % 200
    assert STATISTICS[name](turned) > FAR


@pytest.mark.parametrize("n", [TABLE, TABLE + 1, 100_003, 1_000_000])
def test_large_permutations_look_random(n: int) -> None:
    p = permutations(n, 4 if n > 200_000 else 20)
    low = 1 << max(1, (n - 1).bit_length() // 2)
    assert places(p) < FAR
    assert steps_apart(p, (1, 2, 64, 256, low - 1, low, low + 1, 2 * low)) < FAR
    assert fixed_points(p) < FAR
    assert neighbours(p) < FAR


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_small_orders_take_all_permutations_equally_often(n: int) -> None:
    every = math.factorial(n)
    trials = 5 * max(every, 200)
    counts = Counter(p.tobytes() for p in permutations(n, trials))
    chi = sum(c * c for c in counts.values()) * every / trials - trials
    assert abs(chi - (every - 1)) / math.sqrt(2 * (every - 1)) < FAR
    assert len(counts) <= every


@pytest.mark.parametrize("n", [1000, TABLE + 1, 100_003])
@pytest.mark.parametrize("which", ["seed", "epoch", "seed against epoch"])
def test_successive_seeds_and_epochs_are_not_related(n: int, which: str) -> None:
    same, apart = [], []
    for i in range(20):
        first = {"seed": i, "epoch": 5}
        second = {"seed": {"seed": i + 1, "epoch": 5}, "epoch": {"seed": i, "epoch": 6}, "seed against epoch": {"seed": i - 1, "epoch": 6}}[which]
        a, b = whole(n, **first, shuffle=True), whole(n, **second, shuffle=True)
        assert correlation(a, b) < FAR
        same.append((a == b).sum())
        apart.append((b - a) % n)
    assert poisson(np.array(same)) < FAR
    assert abs(against(np.concatenate(apart) * 100 // n, np.arange(n) * 100 // n)) < FAR
