"""The course of epochs and the sampler over it, in one process: who gets what, when an epoch is over, and what a state goes on with."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset, random_split

from mmcompile.errors import GenerationError
from mmcompile.runtime.sampler import Course, ShardSampler, ranks
from mmcompile.runtime.seeding import SampleIndex

VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
GENERATION = "0123456789abcdef" * 2


def samples_of(run: Any, step: int) -> Any:
    """The samples of a step, and which of them count."""
    positions, valid = run.steps.positions(step)
    return run.order.rows(positions), valid


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Numbers(Dataset[tuple[int, int, int]]):
    """Samples that say which they are, and of which seed and epoch their index was (-1 for one that says nothing)."""

    def __init__(self, n: int, generation: str = GENERATION, targets: Any = None, blocks: Any = None) -> None:
        self.n, self.generation, self.targets, self._blocks = n, generation, targets, blocks

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return int(index), getattr(index, "seed", -1), getattr(index, "epoch", -1)

    def blocks(self) -> Any:
        return self._blocks


def batches(sampler: ShardSampler, size: int) -> list[list[int]]:
    return [list(map(int, batch)) for batch in BatchSampler(sampler, size, drop_last=False)]


def rows(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


# -- ranks


def test_a_process_without_a_word_is_alone() -> None:
    assert ranks() == (0, 1)


def test_given_ranks_are_taken_whole_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "nonsense")
    assert ranks(2, 3) == (2, 3)
    assert ranks(np.int64(0), 1) == (0, 1)
    for wrong in ((0, None), (None, 2), (2, 2), (-1, 2), (0, 0), (0.5, 2), (True, 2)):
        with pytest.raises(ValueError, match=r"rank|world_size"):
            ranks(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="together"):
        ShardSampler(range(3), rank=1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "0"}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
    ],
)
def test_variables_are_used(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks() == expected


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "4"}, "RANK not set, WORLD_SIZE=4"),
        ({"RANK": "1"}, "RANK=1, WORLD_SIZE not set"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1, WORLD_SIZE=1"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "zero", "WORLD_SIZE": "4"}, "RANK=zero"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, "WORLD_SIZE=four"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID not set, SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID=4"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS of srun is not set .*SLURM_NTASKS=4"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "WORLD_SIZE=1 .*SLURM_STEP_NUM_TASKS=4"),
    ],
)
def test_variables_that_speak_of_others_are_never_ignored(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"{named}.*init_process_group.*rank= and world_size="):
        ranks()
    sampler = ShardSampler(range(8), shuffle=True)  # asked for when iteration begins, not before
    with pytest.raises(RuntimeError, match=named):
        list(sampler)
    assert ranks(0, 1) == (0, 1)


# -- what comes, and when an epoch is over


def test_indices_carry_seed_and_epoch_and_each_iteration_is_the_next_epoch() -> None:
    sampler = ShardSampler(range(10), 3, shuffle=True, seed=7)
    first, second = list(sampler), list(sampler)
    assert {type(i) for i in first} == {SampleIndex}
    assert {(i.seed, i.epoch, i.valid) for i in first} == {(7, 0, None)}
    assert {(i.seed, i.epoch, i.valid) for i in second} == {(7, 1, None)}
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ShardSampler(range(10), 3, shuffle=True, seed=8)) != first
    assert list(ShardSampler(range(5))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 7, 4096, 5000])
def test_the_order_does_not_depend_on_the_batch_size(size: int) -> None:
    expected = list(ShardSampler(range(9001), 64, shuffle=True, seed=1))
    assert list(ShardSampler(range(9001), size, shuffle=True, seed=1)) == expected


@pytest.mark.parametrize(("n", "size"), [(0, 2), (23, 2), (9001, 7), (9001, 5000)])
@pytest.mark.parametrize("uneven", ["wrap", "drop", "mask"])
def test_ranks_are_handed_the_steps_of_the_course(n: int, size: int, uneven: str) -> None:
    settings: dict[str, Any] = {"shuffle": True, "uneven": uneven, "rank": 1, "world_size": 3}
    run = Course(range(n), size, **settings).begin()
    expected = []
    for step in range(len(run.steps)):
        samples, valid = samples_of(run, step)
        expected += list(zip(samples.tolist(), [None] * len(samples) if valid is None else valid.tolist(), strict=True))
    assert [(int(i), i.valid) for i in ShardSampler(range(n), size, **settings)] == expected


def test_an_iteration_that_hands_out_nothing_leaves_its_epoch() -> None:
    sampler = ShardSampler(range(10), 4)
    iter(sampler)
    assert next(iter(sampler)).epoch == 0
    assert next(iter(sampler)).epoch == 1
    assert next(iter(sampler)).epoch == 2


def test_iterations_at_once_are_epochs_of_their_own_and_the_state_is_the_latest_one() -> None:
    sampler = ShardSampler(range(8), 4, shuffle=True)
    pairs = list(zip(sampler, sampler, strict=True))
    assert {(a.epoch, b.epoch) for a, b in pairs} == {(0, 1)}
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(8))
    outer = iter(sampler)
    assert next(outer).epoch == 2
    inner = iter(sampler)
    assert next(inner).epoch == 3
    assert [i.epoch for i in outer] == [2] * 7
    assert sampler.state_dict()["epoch"] == 3
    assert sampler.state_dict()["position"] == 0
    list(itertools.islice(inner, 3))
    assert sampler.state_dict()["position"] == 4


def test_set_epoch_in_an_iteration_is_about_the_next_one() -> None:
    sampler = ShardSampler(range(8), 2)
    running = iter(sampler)
    next(running)
    sampler.set_epoch(5)
    assert {i.epoch for i in running} == {0}
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (5, 0)
    assert {i.epoch for i in sampler} == {5}
    assert {i.epoch for i in sampler} == {6}
    for wrong in (-1, 1 << 64, 0.5, True, "1"):
        with pytest.raises(ValueError, match="epoch must be an integer"):
            sampler.set_epoch(wrong)  # type: ignore[arg-type]


def test_ranks_read_in_sequence_only_once_told_what_an_uneven_end_means() -> None:
    for no in (False, 0):
        sampler = ShardSampler(range(10), 2, shuffle=no, rank=0, world_size=2)
        with pytest.raises(ValueError, match=r"mask.*wrap.*drop"):
            list(sampler)
    with pytest.raises(ValueError, match="mask"):
        len(sampler)
    for uneven in ("mask", "wrap", "drop"):
        assert len(list(ShardSampler(range(10), 2, uneven=uneven, rank=0, world_size=2))) == 5
    assert list(ShardSampler(range(10), 2, drop_last=True, rank=1, world_size=2)) == [2, 3, 6, 7]  # drops by itself
    assert len(list(ShardSampler(range(11), 2, weights=np.ones(11), rank=0, world_size=2))) == 6  # a random order wraps


def test_mask_says_which_samples_count() -> None:
    seen: list[int] = []
    for rank in range(3):
        sampler = ShardSampler(range(7), 2, uneven="mask", rank=rank, world_size=3)
        indices = list(sampler)
        assert len(indices) == len(sampler) == 3
        assert all(i.valid is not None for i in indices)
        seen += [i for i in indices if i.valid]
    assert sorted(seen) == list(range(7))
    assert {i.valid for i in ShardSampler(range(7), 2, uneven="mask")} == {True}


def test_block_asks_the_dataset_for_its_shards() -> None:
    ds = Numbers(12, blocks=[0, 4, 8, 12])
    order = list(ShardSampler(ds, 2, shuffle="block", block_shards=1, seed=3))
    assert sorted(order) == list(range(12))
    assert all(len({i // 4 for i in order[at : at + 4]}) == 1 for at in (0, 4, 8))
    with pytest.raises(ValueError, match=r"needs a dataset that knows its shards.*range"):
        ShardSampler(range(4), shuffle="block")


@pytest.mark.parametrize("make", [np.array, list, torch.tensor])
def test_weights_draw_with_replacement(make: Any) -> None:
    drawn = list(ShardSampler(range(400), 16, weights=make([0.0] * 200 + [1.0] * 100 + [3.0] * 100), seed=2))
    assert len(drawn) == 400
    assert min(drawn) >= 200
    assert 0.65 < sum(i >= 300 for i in drawn) / 400 < 0.85
    assert len(set(drawn)) < 200


def test_balanced_draws_every_class_as_often() -> None:
    targets = np.array([0] * 950 + [5] * 50)
    drawn = list(ShardSampler(Numbers(1000, targets=targets), 16, weights="balanced"))
    assert 0.42 < (targets[drawn] == 5).mean() < 0.58
    with pytest.raises(ValueError, match=r"targets.*range has none"):
        ShardSampler(range(4), weights="balanced")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": "rows"}, "shuffle must be"),
        ({"uneven": "pad"}, "uneven must be"),
        ({"uneven": "mask", "drop_last": True}, "mask"),
        ({"weights": [1, 2]}, "each of the 4 samples"),
        ({"weights": "even"}, "balanced"),
        ({"weights": [0, 0, 0, 0]}, "sum"),
        ({"weights": [1, -1, 1, 1]}, "negative"),
        ({"weights": [1, 1, 1, 1], "shuffle": "block"}, "block"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"block_shards": 0}, "block_shards"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": None}, "seed"),
        ({"rank": 4, "world_size": 4}, "rank"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardSampler(Numbers(4, blocks=[0, 4]), **arguments)


def test_a_subset_of_torch_over_our_dataset_warns_and_another_one_does_not() -> None:
    for subset in (Subset(Numbers(4), [0, 2]), random_split(Numbers(4), [2, 2])[0], Subset(Subset(Numbers(4), [0, 2]), [1])):
        with pytest.warns(UserWarning, match=r"ds\.subset.*ds\.random_split") as caught:
            ShardSampler(subset)
        assert [w.filename for w in caught] == [__file__]
    ShardSampler(Numbers(4))
    ShardSampler(Subset(range(4), [0, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("drop_last", [False, True])
def test_len_is_exact_with_torchs_own_batches(n: int, drop_last: bool) -> None:
    for ours, size, world in itertools.product((False, True), (1, 3, 4), (1, 2, 5)):
        for rank, uneven in itertools.product(range(world), ("wrap", "drop")):
            sampler = ShardSampler(range(n), size, shuffle=True, uneven=uneven, drop_last=ours, rank=rank, world_size=world)
            assert len(sampler) == len(list(sampler))
            batched = BatchSampler(sampler, size, drop_last)
            assert len(batched) == len(list(batched))
            loader = DataLoader(Numbers(n), batch_size=size, sampler=sampler, drop_last=drop_last)
            assert len(loader) == len(list(loader))
            assert sampler.state_dict()["position"] == 0


# -- stop and go on


def test_a_state_is_four_values_under_200_bytes() -> None:
    sampler = ShardSampler(Numbers(10**9), 256, shuffle=True, seed=(1 << 64) - 1)
    sampler.set_epoch(10**9)
    list(itertools.islice(sampler, 512))
    state = sampler.state_dict()
    assert state == {"generation": GENERATION, "seed": (1 << 64) - 1, "epoch": 10**9, "position": 512}
    assert len(pickle.dumps(state)) < 200
    assert len(json.dumps(state)) < 200
    other = ShardSampler(Numbers(10**9), 256, shuffle=True)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == state


def test_a_state_goes_on_and_then_epochs_are_whole_again() -> None:
    sampler = ShardSampler(Numbers(10), 3, shuffle=True, seed=4)
    epochs = [batches(sampler, 3) for _ in range(3)]
    other = ShardSampler(Numbers(10), 3, shuffle=True)
    other.load_state_dict({"generation": GENERATION, "seed": 4, "epoch": 1, "position": 6})
    assert batches(other, 3) == epochs[1][2:]
    assert batches(other, 3) == epochs[2]


def test_who_divides_other_samplers_among_ranks_knows_this_one() -> None:
    assert isinstance(ShardSampler(range(3)), DistributedSampler)


def test_len_is_a_whole_epochs_whatever_was_received_of_it() -> None:
    sampler = ShardSampler(range(10), 3)
    sampler.load_state_dict({"generation": None, "seed": 0, "epoch": 1, "position": 6})
    assert len(sampler) == 10
    running = iter(sampler)
    next(running)
    assert len(sampler) == 10
    assert [int(i) for i in running] == [7, 8, 9]
    assert len(sampler) == 10


def test_set_epoch_keeps_a_loaded_position_in_that_epoch_alone() -> None:
    state = {"generation": None, "seed": 0, "epoch": 3, "position": 4}
    sampler = ShardSampler(range(6), 2)
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    assert list(sampler) == [4, 5]
    for stop in (3, 6):  # used, in part or whole: from its beginning
        sampler.set_epoch(3)
        assert [(int(i), i.epoch) for i in itertools.islice(sampler, stop)] == [(i, 3) for i in range(stop)]
    sampler.load_state_dict(state)
    sampler.set_epoch(4)
    assert [(int(i), i.epoch) for i in sampler] == [(i, 4) for i in range(6)]


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    sampler = ShardSampler(range(6), 4)
    running = iter(sampler)
    list(itertools.islice(running, 6))
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)
    assert list(running) == []
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)
    sampler.load_state_dict({"generation": None, "seed": 0, "epoch": 1, "position": 6})
    assert {i.epoch for i in sampler} == {2}


def test_a_position_after_which_all_would_be_dropped_is_the_end_of_its_epoch() -> None:
    sampler = ShardSampler(range(10), 4, drop_last=True)
    sampler.load_state_dict({"generation": None, "seed": 0, "epoch": 1, "position": 8})
    assert len(sampler) == 8
    assert {i.epoch for i in sampler} == {2}


def test_the_state_counts_what_was_received_not_what_was_fetched_ahead() -> None:
    sampler = ShardSampler(range(20), 4, shuffle=True)
    list(itertools.islice(sampler, 13))
    assert [sampler.state_dict(received=k)["position"] for k in (0, 1, 2, 3)] == [0, 4, 8, 12]
    assert sampler.state_dict()["position"] == 12  # whole batches
    list(sampler)
    assert sampler.state_dict(received=2) == {"generation": None, "seed": 0, "epoch": 1, "position": 8}
    assert sampler.state_dict(received=5) == {"generation": None, "seed": 0, "epoch": 2, "position": 0}
    for wrong in (6, -1, 1.0):
        with pytest.raises(ValueError, match="received"):
            sampler.state_dict(received=wrong)  # type: ignore[arg-type]
    sampler.load_state_dict(sampler.state_dict(received=2))
    assert sampler.state_dict(received=0)["position"] == 8
    with pytest.raises(ValueError, match="received"):
        sampler.state_dict(received=1)
    next(iter(sampler))
    assert sampler.state_dict(received=1)["position"] == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 11}, "position 11.*10 samples"),
        ({"position": -1}, "position in a state"),
        ({"position": 1.0}, "position in a state"),
        ({"position": True}, "position in a state"),
        ({"epoch": -1}, "epoch in a state"),
        ({"epoch": "1"}, "epoch in a state"),
        ({"seed": None}, "seed in a state"),
        ({"seed": 1 << 64}, "seed in a state"),
        ({"generation": 5}, "generation in a state"),
        ({"extra": 1}, "has the keys"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    sampler = ShardSampler(Numbers(10), 2)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({"generation": GENERATION, "seed": 9, "epoch": 9, "position": 4} | change)
    for wrong in ({"seed": 1}, [1, 2], None, {}):
        with pytest.raises(ValueError, match="has the keys"):
            sampler.load_state_dict(wrong)  # type: ignore[arg-type]
    assert sampler.state_dict() == before


def test_a_state_of_another_generation_names_both_and_the_remedy() -> None:
    state = ShardSampler(Numbers(10, "a" * 32), 2).state_dict()
    with pytest.raises(GenerationError, match=f"{'a' * 32}.*{'b' * 32}.*generation='{'a' * 32}'.*start anew") as caught:
        ShardSampler(Numbers(10, "b" * 32), 2).load_state_dict(state)
    assert caught.value.details == {"expected": "a" * 32, "found": "b" * 32}
    with pytest.raises(GenerationError, match="generation None"):
        ShardSampler(range(10), 2).load_state_dict(state)
    with pytest.raises(GenerationError, match=r"generation None, .* generation b+: start anew"):
        ShardSampler(Numbers(10, "b" * 32), 2).load_state_dict(state | {"generation": None})


def world(n: int, size: int, count: int, settings: dict[str, Any], state: dict[str, Any] | None = None) -> list[Course]:
    courses = [Course(range(n), size, rank=rank, world_size=count, **settings) for rank in range(count)]
    for course in courses:
        if state is not None:
            course.load_state_dict(state)
    return courses


def step_of(courses: list[Course], runs: list[Any], step: int) -> list[int]:
    """The samples that all ranks get in a step, as a list; equal numbers, and equal states after it."""
    parts = [samples_of(run, step) for run in runs]
    assert len({len(samples) for samples, _ in parts}) == 1
    for course, run in zip(courses, runs, strict=True):
        course.received(run, run.steps.after(step))
    assert len({json.dumps(course.state_dict()) for course in courses}) == 1
    return [int(i) for samples, valid in parts for i in (samples if valid is None else samples[valid])]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.integers(1, 60), uneven=st.sampled_from(["wrap", "drop", "mask"]), shuffle=st.booleans())
def test_stopped_anywhere_and_gone_on_by_another_world_everything_comes_once(data: st.DataObject, n: int, uneven: str, shuffle: bool) -> None:
    settings = {"uneven": uneven, "shuffle": shuffle, "seed": 5}
    seen: list[int] = []
    state: dict[str, Any] | None = None
    stops = data.draw(st.integers(0, 3))
    for turn in range(stops + 1):
        count, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
        courses = world(n, size, count, settings, state)
        runs = [course.begin() for course in courses]
        steps = len(runs[0].steps)
        assert {len(run.steps) for run in runs} == {steps}
        if runs[0].epoch:  # of what was left, fewer samples than ranks, each would be dropped
            assert turn
            assert uneven == "drop"
            break
        for step in range(steps if turn == stops else data.draw(st.integers(0, max(0, steps - 1)))):
            seen += step_of(courses, runs, step)
        state = courses[0].state_dict()
    counts = Counter(seen)
    if uneven == "mask":
        assert counts == Counter(range(n))
    elif uneven == "wrap":
        assert set(counts) == set(range(n))
        assert len(seen) - n < count
    else:
        assert max(counts.values(), default=1) == 1
        assert n - len(seen) < count


# -- in a DataLoader


def test_persistent_workers_cannot_lag_behind() -> None:
    sampler = ShardSampler(Numbers(11), 4, shuffle=True, seed=3)
    loader = DataLoader(Numbers(11), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in (0, 1, 7):
        if epoch == 7:
            sampler.set_epoch(7)
        found = [torch.stack(batch, 1) for batch in loader]
        assert [len(batch) for batch in found] == [4, 4, 3]
        whole = torch.cat(found)
        assert sorted(whole[:, 0].tolist()) == list(range(11))
        assert set(map(tuple, whole[:, 1:].tolist())) == {(3, epoch)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_stops_by_the_count_of_its_batches(workers: int) -> None:
    ds = Numbers(22)
    expected = batches(ShardSampler(ds, 4, shuffle=True, seed=1), 4)
    sampler = ShardSampler(ds, 4, shuffle=True, seed=1)
    received = []
    for count, batch in enumerate(DataLoader(ds, batch_size=4, sampler=sampler, num_workers=workers), 1):
        received.append(batch[0].tolist())
        if count == 2:
            state = sampler.state_dict(received=count)
            break
    other = ShardSampler(ds, 4, shuffle=True)
    other.load_state_dict(state)
    loader = DataLoader(ds, batch_size=4, sampler=other, num_workers=workers)
    assert len(loader) == len(expected) == 6
    assert received + rows(loader) == expected


#: torchdata 0.11 calls a function that torch 2.13 warns of.
TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@TORCHDATA
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_torchdata_keeps_the_state(stateful: Any, workers: int, every: int, stop: int) -> None:
    ds = Numbers(22)

    def loader() -> Any:
        sampler = ShardSampler(ds, 4, shuffle=True, seed=1)
        return stateful(ds, batch_size=4, sampler=sampler, num_workers=workers, snapshot_every_n_steps=every)

    sampler = ShardSampler(ds, 4, shuffle=True, seed=1)
    first, second, third = (batches(sampler, 4) for _ in range(3))
    stopped = loader()
    assert rows(stopped) == first
    running = iter(stopped)
    assert [next(running)[0].tolist() for _ in range(stop)] == second[:stop]
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    del running, stopped
    other = loader()
    other.load_state_dict(state)
    if stop == len(second):  # the end of an epoch is the start of the next
        assert rows(other) == third
        return
    assert rows(other) == second[stop:]
    assert rows(other) == third


@TORCHDATA
def test_torchdata_stopped_after_an_epoch_begins_the_next(stateful: Any) -> None:
    ds = Numbers(9)
    loader = stateful(ds, batch_size=4, sampler=ShardSampler(ds, 4, shuffle=True))
    list(loader)
    other = stateful(ds, batch_size=4, sampler=ShardSampler(ds, 4, shuffle=True))
    other.load_state_dict(loader.state_dict())
    assert [set(batch[2].tolist()) for batch in other] == [{1}] * 3
