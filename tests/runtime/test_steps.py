"""Steps against the plainest oracle: a list of positions, cut up."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmcompile.runtime.order import Steps

UNEVEN = ("wrap", "drop", "mask")


def oracle(n: int, batch: int, world: int, uneven: str, drop_last: bool, start: int) -> list[list[list[tuple[int, bool]]]]:
    """[step][rank] -> (position, counts)."""
    rest = [(p, True) for p in range(start, n)]
    steps = []
    while rest:
        part, rest = rest[: world * batch], rest[world * batch :]
        if len(part) < world * batch:
            if drop_last:
                break
            if uneven == "drop":
                while len(part) % world:
                    part.pop()
            extra = 0
            while len(part) % world:
                part.append((extra % n, False))
                extra += 1
            if not part:
                break
        size = len(part) // world
        steps.append([part[r * size : (r + 1) * size] for r in range(world)])
    return steps


@st.composite
def epochs(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 60))
    return {
        "n": n,
        "batch_size": draw(st.integers(1, 12)),
        "world_size": draw(st.integers(1, 9)),
        "uneven": draw(st.sampled_from(UNEVEN)),
        "drop_last": draw(st.booleans()),
        "start": draw(st.integers(0, n)),
    }


def ranks(epoch: dict[str, Any]) -> list[Steps]:
    return [Steps(rank=r, **epoch) for r in range(epoch["world_size"])]


def taken(steps: list[Steps], step: int) -> list[int]:
    return np.concatenate([s.positions(step)[0] for s in steps]).tolist()


@settings(max_examples=300, deadline=None)
@given(epochs())
@example({"n": 3, "batch_size": 4, "world_size": 8, "uneven": "mask", "drop_last": False, "start": 0})
@example({"n": 1, "batch_size": 2, "world_size": 9, "uneven": "wrap", "drop_last": False, "start": 0})
@example({"n": 0, "batch_size": 2, "world_size": 2, "uneven": "wrap", "drop_last": False, "start": 0})
def test_every_rank_takes_what_the_oracle_cuts_for_it(epoch: dict[str, Any]) -> None:
    expected = oracle(epoch["n"], epoch["batch_size"], epoch["world_size"], epoch["uneven"], epoch["drop_last"], epoch["start"])
    for rank, steps in enumerate(ranks(epoch)):
        assert len(steps) == len(expected)
        for step, parts in enumerate(expected):
            positions, valid = steps.positions(step)
            assert positions.dtype == np.int64
            assert positions.tolist() == [p for p, _ in parts[rank]]
            if epoch["uneven"] == "mask":
                assert valid is not None
                assert valid.dtype == np.bool_
                assert valid.tolist() == [v for _, v in parts[rank]]
            else:
                assert valid is None


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_the_ranks_keep_step_and_a_step_is_a_range(epoch: dict[str, Any]) -> None:
    every = ranks(epoch)
    n, together = epoch["n"], epoch["batch_size"] * epoch["world_size"]
    for step in range(len(every[0])):
        assert len({len(s.positions(step)[0]) for s in every}) == 1
        assert len(every[0].positions(step)[0]) > 0
        first = epoch["start"] + step * together
        found = taken(every, step)
        assert found == [p % n for p in range(first, first + len(found))]
        assert len(found) <= together
    assert len({s.after(len(s) - 1) for s in every if len(s)}) <= 1


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_under_a_mask_every_position_counts_exactly_once_and_under_wrap_fewer_than_a_world_come_twice(epoch: dict[str, Any]) -> None:
    epoch |= {"drop_last": False, "uneven": "mask"}
    counted = []
    for steps in ranks(epoch):
        for step in range(len(steps)):
            positions, valid = steps.positions(step)
            counted += positions[valid].tolist()
    assert sorted(counted) == list(range(epoch["start"], epoch["n"]))
    every = ranks(epoch | {"uneven": "wrap"})
    wrapped = [p for step in range(len(every[0])) for p in taken(every, step)]
    assert set(wrapped) >= set(range(epoch["start"], epoch["n"]))
    assert len(wrapped) - (epoch["n"] - epoch["start"]) < epoch["world_size"]


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_one_rank_alone_neither_adds_nor_drops(epoch: dict[str, Any]) -> None:
    epoch |= {"drop_last": False, "world_size": 1}
    (steps,) = ranks(epoch)
    assert [p for step in range(len(steps)) for p in taken([steps], step)] == list(range(epoch["start"], epoch["n"]))


@settings(max_examples=300, deadline=None)
@given(epochs(), st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 5)), max_size=4))
def test_an_epoch_goes_on_with_any_number_of_ranks_and_batch_size(epoch: dict[str, Any], stops: list[tuple[int, int, int]]) -> None:
    epoch |= {"drop_last": False, "start": 0}
    seen: list[int] = []
    position = 0
    for batch, world, count in [*stops, (epoch["batch_size"], epoch["world_size"], 1000)]:
        every = ranks(epoch | {"batch_size": batch, "world_size": world, "start": position})
        for step in range(min(count, len(every[0]))):
            assert position < epoch["n"]
            found = taken(every, step)
            seen += found[: epoch["n"] - position]  # without those added from the front at the end
            position = every[0].after(step)
    if epoch["uneven"] == "drop":
        assert seen == list(range(len(seen)))
        assert len(seen) > epoch["n"] - max([epoch["world_size"], *(world for _, world, _ in stops)])
    else:
        assert seen == list(range(epoch["n"]))


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_after_is_where_the_next_step_begins_and_n_after_the_last(epoch: dict[str, Any]) -> None:
    steps = ranks(epoch)[0]
    for step in range(len(steps)):
        if step + 1 < len(steps):
            assert steps.after(step) == steps.positions(step + 1)[0][0]
            rest = dataclasses.replace(steps, start=steps.after(step))
            assert len(rest) == len(steps) - step - 1
        else:
            assert steps.after(step) == epoch["n"]
    done = dataclasses.replace(steps, start=epoch["n"])
    assert len(done) == 0


def test_large_epochs_are_arithmetic() -> None:
    steps = Steps((1 << 62) + 5, 256, rank=3, world_size=1000, uneven="mask")
    assert len(steps) == math.ceil(((1 << 62) + 5) / 256_000)
    positions, valid = steps.positions(len(steps) - 1)
    assert valid is not None
    assert positions.max() < (1 << 62) + 5
    assert steps.positions(10**12)[0].tolist() == list(range(256_000 * 10**12 + 768, 256_000 * 10**12 + 1024))


def test_steps_never_change() -> None:
    def all_of(**options: Any) -> list[list[list[int]]]:
        return [[s.positions(i)[0].tolist() for s in ranks(options)] for i in range(len(ranks(options)[0]))]

    base = {"n": 11, "batch_size": 2, "world_size": 3, "drop_last": False, "start": 0}
    assert all_of(**base, uneven="wrap") == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 0]]]
    assert all_of(**base, uneven="drop") == [[[0, 1], [2, 3], [4, 5]], [[6], [7], [8]]]
    last = [s.positions(1)[1] for s in ranks({**base, "uneven": "mask"})]
    assert [v.tolist() for v in last if v is not None] == [[True, True], [True, True], [True, False]]


@pytest.mark.parametrize("step", [-1, 3, 1 << 70])
def test_a_step_outside_is_an_index_error(step: int) -> None:
    steps = Steps(11, 4)
    for ask in (steps.positions, steps.after):
        with pytest.raises(IndexError, match=rf"step {step} is outside \[0, 3\)"):
            ask(step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, r"n must be in \[0, 2\^63\), found -1"),
        ({"batch_size": 0}, r"batch_size must be in \[1, 2\^63\), found 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer, found 2.5"),
        ({"world_size": 0}, r"world_size must be in \[1"),
        ({"rank": -1}, r"rank must be in \[0"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size, which is 2, found 2"),
        ({"start": -1}, r"start must be in \[0"),
        ({"start": 12}, "start must be at most n, which is 11, found 12"),
        ({"uneven": "pad"}, "uneven must be 'wrap', 'drop' or 'mask', not 'pad'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Steps(**{"n": 11, "batch_size": 2, **options})


def test_steps_are_a_frozen_value_of_plain_integers() -> None:
    steps = Steps(np.int32(11), np.int64(2), rank=np.uint8(1), world_size=2)  # type: ignore[arg-type]
    assert steps == Steps(11, 2, 1, 2)
    assert hash(steps) == hash(Steps(11, 2, 1, 2))
    assert pickle.loads(pickle.dumps(steps)) == steps
    assert type(steps.after(0)) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        steps.start = 3  # type: ignore[misc]
