"""Random numbers for whole batches: each row's are its own, and they are as random as they should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmcompile.runtime.rowrandom import RowRandom
from mmcompile.runtime.seeding import draw_bits, stream_keys

ROWS = np.array([4, 0, 10**9, 77, 3], np.int64)
MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    """splitmix64 in Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_the_bits_are_those_of_the_formula() -> None:
    rng = RowRandom(3, 2, ROWS)
    rng.rand()
    got, numbers = rng.rand(5), rng.randint(-3, 1000, (5,))
    for i in range(len(ROWS)):
        for call, values in ((1, got), (2, numbers)):
            key = int(draw_bits(stream_keys(3, 2, ROWS), (1 << 31) + call, 1)[i, 0])
            words = [mixed(key ^ mixed(place)) for place in range(3)]
            if call == 1:
                expected = [w >> 40 for w in words] + [(w >> 8) & 0xFFFFFF for w in words[:2]]
                assert (values[i].double() * 2**24).tolist() == expected
            else:
                halves = [w >> 32 for w in words] + [w & 0xFFFFFFFF for w in words[:2]]
                assert values[i].tolist() == [(h * 1003 >> 32) - 3 for h in halves]


def test_a_row_draws_the_same_in_every_batch_and_size_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(rows: np.ndarray) -> list[torch.Tensor]:
        rng = RowRandom(1, 5, rows)
        return [rng.rand(3, 7), rng.randn(4, 5), rng.randint(0, 10), rng.randn(), rng.rand(1), rng.randint(-5, 5, (2, 2)), rng.rand(0, 3)]

    whole = draws(ROWS)
    assert [tuple(x.shape) for x in whole] == [(5, 3, 7), (5, 4, 5), (5,), (5,), (5, 1), (5, 2, 2), (5, 0, 3)]
    assert [x.dtype for x in whole] == [torch.float32, torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.float32]
    for i in range(5):
        assert all(torch.equal(a[0], b[i]) for a, b in zip(draws(ROWS[i : i + 1]), whole, strict=True))
    monkeypatch.setattr("mmcompile.runtime.rowrandom._WORDS", 4)
    assert all(torch.equal(a, b) for a, b in zip(draws(ROWS), whole, strict=True))
    assert len(draws(ROWS[:0])[0]) == 0


def test_calls_epochs_and_seeds_share_nothing() -> None:
    rng = RowRandom(1, 5, ROWS)
    drawn = [rng.rand(1000), rng.rand(1000), RowRandom(1, 6, ROWS).rand(1000), RowRandom(2, 5, ROWS).rand(1000)]
    flat = torch.cat(drawn)
    assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 0.16
    assert len(torch.unique(flat)) > 0.99 * flat.numel()


def test_numbers_are_as_random_as_they_should_be() -> None:
    rng = RowRandom(0, 0, np.arange(2000))
    for uniform in (rng.rand(100), rng.rand(1).expand(2000, 100)[:, :1]):
        n = uniform.numel()
        assert uniform.min() >= 0
        assert uniform.max() < 1
        found = torch.histc(uniform, 50, 0, 1)
        assert ((found - n / 50) ** 2 / (n / 50)).sum() < 49 + 5 * math.sqrt(2 * 49)
    normal = rng.randn(101).double()
    n = normal.numel()
    assert normal.abs().max() > 4
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)))
        assert abs((normal**power).mean() - moment) < 5 * spread / math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack([normal[:, 0], normal[:, 51]]))[0, 1]) < 0.12  # cosine and sine of one angle
    numbers = rng.randint(-2, 5, (50,))
    found = torch.bincount(numbers.flatten() + 2, minlength=7).double()
    assert len(found) == 7
    assert ((found - numbers.numel() / 7) ** 2 / (numbers.numel() / 7)).sum() < 6 + 5 * math.sqrt(12)
    assert (rng.randint(4, 5, (3,)) == 4).all()
    large = rng.randint(0, 1 << 31, (50,))
    assert large.min() >= 0
    assert 0.999 < large.max() / (1 << 31) < 1


def test_what_cannot_be_drawn_is_refused() -> None:
    rng = RowRandom(0, 0, ROWS)
    for low, high in ((0, 0), (3, 1), (0, (1 << 31) + 1)):
        with pytest.raises(ValueError, match=rf"not from \[{low}, {high}\)"):
            rng.randint(low, high)
    with pytest.raises(ValueError, match=r"size must be numbers in \[0, inf\), not \(3, -1\)"):
        rng.rand(3, -1)
