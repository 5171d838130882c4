"""Random streams: what is keyed by what, and that no key or draw ever changes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.format.randomcrop import draw_uniform
from mmcompile.runtime.seeding import SampleIndex, draw_bits, mt19937_words, stream_key, stream_keys

ROWS = np.arange(2000, dtype=np.int64)
KEYS = ["0x238275bc38fcbe91", "0xb18a02f46d8d86c3", "0x44e5b98100c67fb0", "0x2f32a78496c67c60", "0x8a5584398b1cf94c"]
BITS = [["0x15c28836ae985784", "0x63b764bdc60b7f32"], ["0x49bcfce0aa46be2b", "0x2666381e4d329d80"]]
UNIFORM = [[0.13015278570792543, 0.32088803956946144], [0.14174688375481304, 0.8741772109582214]]
TWISTER = [3622272274, 3019987087, 922712008, 1750825215]
WORD = st.integers(-(1 << 70), 1 << 70)


def keys(seed: int = 0, epoch: int = 0) -> np.ndarray:
    return stream_keys(seed, epoch, ROWS)


@given(WORD, WORD, st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5))
def test_the_keys_of_an_array_are_those_of_each_row(seed: int, epoch: int, rows: list[int]) -> None:
    assert stream_keys(seed, epoch, np.array(rows, np.int64)).tolist() == [stream_key(seed, epoch, row) for row in rows]


@given(WORD, WORD, WORD)
def test_a_key_depends_on_64_bits_of_each_part(seed: int, epoch: int, row: int) -> None:
    assert stream_key(seed, epoch, row) == stream_key(seed + (1 << 64), epoch - (1 << 64), row + (1 << 65))


def test_neighbouring_seeds_epochs_and_rows_share_no_key() -> None:
    parts = range(-8, 9)
    assert len({stream_key(s, e, r) for s in parts for e in parts for r in parts}) == 17**3


def test_keys_never_change() -> None:
    assert [hex(stream_key(*parts)) for parts in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 3, 10**12))] == KEYS


def test_draws_never_change() -> None:
    key = np.array([stream_key(7, 3, 12), stream_key(7, 3, 13)], np.uint64)
    assert [[hex(v) for v in row] for row in draw_bits(key, 0, 2).tolist()] == BITS
    assert draw_uniform(key, 5, 2).tolist() == UNIFORM


def test_the_twister_state_never_changes() -> None:
    words = mt19937_words(stream_key(7, 3, 12))
    assert words.dtype == np.uint32
    assert words.shape == (624,)
    assert words[[0, 1, 2, 623]].tolist() == TWISTER


def test_the_draws_of_a_key_do_not_depend_on_the_keys_beside_it_or_on_how_many_are_drawn() -> None:
    many = draw_bits(keys(), 3, 8)
    assert np.array_equal(draw_bits(keys()[5:7], 3, 8), many[5:7])
    assert np.array_equal(draw_bits(keys(), 3, 2), many[:, :2])
    assert np.array_equal(draw_uniform(keys(), 3, 8), (many >> np.uint64(11)) / 2.0**53)


def test_no_draw_comes_twice_in_other_rows_places_streams_epochs_or_seeds() -> None:
    drawn = [draw_bits(keys(seed, epoch), stream, 8) for seed in (0, 1) for epoch in (0, 1) for stream in (0, 1, 2)]
    assert len(np.unique(np.stack(drawn))) == 12 * len(ROWS) * 8


def test_uniform_draws_are_flat_and_in_range() -> None:
    drawn = draw_uniform(keys(), 0, 50)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 1000, (0, 1))[0]
    assert abs(((counts - 100.0) ** 2 / 100).sum() - 999) < 5 * np.sqrt(2 * 999)
    assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(12 * drawn.size)


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_draws_of_neighbouring_rows_and_places_are_not_correlated(lag: int) -> None:
    drawn = draw_uniform(keys(), 0, 50)
    for a, b in ((drawn[lag:], drawn[:-lag]), (drawn[:, lag:], drawn[:, :-lag])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size) < 4.5


@pytest.mark.parametrize(("first", "second"), [((0, 0, 0), (0, 0, 1)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (1, 0, 0)), ((3, 4, 0), (4, 3, 0))])
def test_streams_epochs_and_seeds_are_not_correlated(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    a, b = (draw_uniform(keys(seed, epoch), stream, 50).ravel() for seed, epoch, stream in (first, second))
    assert abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(a.size) < 4.5


def test_each_bit_of_the_parts_of_a_key_flips_half_of_the_bits_of_a_draw() -> None:
    def bits(*parts: int) -> int:
        return int(draw_bits(np.array([stream_key(*parts)], np.uint64), 0, 1)[0, 0])

    for part in range(3):
        flipped = [
            (bits(*base) ^ bits(*(v ^ (1 << bit if i == part else 0) for i, v in enumerate(base)))).bit_count()
            for base in ((s, s + 1, s + 2) for s in range(10))
            for bit in range(64)
        ]
        assert abs(np.mean(flipped) - 32) < 5 * 4 / np.sqrt(len(flipped))


def test_twisters_of_keys_that_agree_in_their_low_32_bits_differ() -> None:
    states = [mt19937_words(0x1234_5678 + (high << 32)) for high in range(50)]
    draws = []
    for state in states:
        generator = np.random.MT19937()
        generator.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 624}}
        draws.append(np.random.Generator(generator).random(20))
    assert len(np.unique(np.stack(draws))) == 50 * 20
    assert len(np.unique(np.stack(states)[:, 1:])) > 50 * 623 - 20  # 32-bit words: a few may be equal by chance
    assert abs(np.mean(draws) - 0.5) < 5 / np.sqrt(12 * 1000)


def test_a_twister_state_is_never_zero() -> None:
    assert all(mt19937_words(key)[0] >> np.uint32(31) == 1 for key in (0, 1, (1 << 64) - 1, -0x9E3779B97F4A7C15))


@pytest.mark.parametrize("valid", [None, True, False])
def test_a_sample_index_is_an_integer_that_keeps_its_parts_through_pickles_and_copies(valid: bool | None) -> None:
    index = SampleIndex(5, 1 << 65, -3, valid)
    for got in (index, copy.deepcopy(index), *(pickle.loads(pickle.dumps(index, protocol)) for protocol in range(6))):
        assert type(got) is SampleIndex
        assert (got, got.seed, got.epoch, got.valid) == (5, 1 << 65, -3, valid)
        assert [10, 11, 12, 13, 14, 15][got] == 15
        assert hash(got) == hash(5)
