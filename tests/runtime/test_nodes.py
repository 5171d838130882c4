"""`node_groups`: each node has shards of its own in an epoch; as properties of the order, and of the steps of all ranks together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.runtime.order import Order, Steps
from mmcompile.runtime.sampler import Course, ShardSampler

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=16)
UNEVEN = st.sampled_from(["wrap", "drop", "mask"])


class Shards:
    """A dataset that knows its shards."""

    generation = "0" * 32

    def __init__(self, sizes: Any) -> None:
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def blocks(self) -> Any:
        return self.starts


def epoch_of(dataset: Shards, nodes: int, world_size: int, batch_size: int, state: Any = None, **settings: Any) -> list[list[Any]]:
    """The indices of each rank in an epoch, or in the rest of the one that `state` was taken in."""
    ranks = []
    for rank in range(world_size):
        sampler = ShardSampler(dataset, batch_size, rank=rank, world_size=world_size, node_groups=nodes, **settings)
        if state is not None:
            sampler.load_state_dict(state)
        ranks.append(list(sampler))
    return ranks


@given(sizes=SIZES, nodes=st.integers(1, 5), seed=st.integers(0, 9), shuffle=st.sampled_from([False, True, "block"]), block_shards=st.integers(1, 4))
def test_the_shares_of_an_order_are_equal_and_together_all_samples(sizes: list[int], nodes: int, seed: int, shuffle: Any, block_shards: int) -> None:
    starts = Shards(sizes).starts
    orders = [
        Order(int(starts[-1]), seed=seed, shuffle=shuffle, blocks=starts, block_shards=block_shards, share=(node, nodes)) for node in range(nodes)
    ]
    shares = [order.rows(np.arange(len(order))) for order in orders]
    assert sorted(np.concatenate(shares).tolist()) == list(range(int(starts[-1])))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    shards = [set((np.searchsorted(starts, rows, side="right") - 1).tolist()) for rows in shares]
    assert sum(map(len, shards)) <= len(sizes) + nodes - 1  # two share a shard only where one's part ends in it
    if shuffle is True and nodes == 1:
        return  # that order keeps to no shards
    for order, rows in zip(orders, shares, strict=True):  # whatever comes was told of, and nothing else
        at = 0
        told: list[int] = []
        while at < len(rows):
            samples, after = order.upcoming(at, at)
            assert at < after <= len(rows)
            now = set((np.searchsorted(starts, rows[at:after], side="right") - 1).tolist())
            assert now <= set((np.searchsorted(starts, samples, side="right") - 1).tolist())
            told += samples.tolist()
            at = after
        assert set((np.searchsorted(starts, told, side="right") - 1).tolist()) == set((np.searchsorted(starts, rows, side="right") - 1).tolist())


@settings(deadline=None, max_examples=100)
@given(
    sizes=SIZES,
    nodes=st.integers(1, 4),
    each=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    uneven=UNEVEN,
    drop_last=st.booleans(),
    shuffle=st.sampled_from([False, True, "block"]),
)
def test_each_sample_comes_once_over_all_ranks_up_to_the_end(
    sizes: list[int], nodes: int, each: int, batch_size: int, uneven: str, drop_last: bool, shuffle: Any
) -> None:
    dataset = Shards(sizes)
    n, world_size = len(dataset), nodes * each
    if n < nodes or (uneven == "mask" and drop_last):
        return
    ranks = epoch_of(dataset, nodes, world_size, batch_size, shuffle=shuffle, uneven=uneven, drop_last=drop_last)
    assert len({len(rank) for rank in ranks}) == 1
    counts = Counter(int(index) for rank in ranks for index in rank)
    valid = Counter(int(index) for rank in ranks for index in rank if index.valid is not False)
    missing = n - len(counts)
    twice = sum(counts.values()) - len(counts)
    if drop_last:
        assert twice == 0
        assert missing < world_size * batch_size + nodes
    elif uneven == "drop":
        assert twice == 0
        assert missing < nodes * each + nodes
    else:
        assert missing == 0
        assert twice < nodes * each + nodes
        if uneven == "mask":
            assert valid == Counter(range(n))


@settings(deadline=None, max_examples=100)
@given(sizes=SIZES, nodes=st.integers(1, 4), data=st.data(), uneven=UNEVEN, shuffle=st.sampled_from([True, "block"]))
def test_an_epoch_goes_on_with_other_ranks_and_batches_on_as_many_nodes(sizes: list[int], nodes: int, data: Any, uneven: str, shuffle: Any) -> None:
    dataset = Shards(sizes)
    if len(dataset) < nodes:
        return
    each, batch_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    other, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    settings: dict[str, Any] = {"shuffle": shuffle, "uneven": uneven, "seed": 3}
    whole = epoch_of(dataset, nodes, nodes, 1, **settings | {"uneven": "wrap"})
    steps = len(ShardSampler(dataset, batch_size, rank=0, world_size=nodes * each, node_groups=nodes, **settings)) // batch_size
    if not steps:
        return
    stop = data.draw(st.integers(0, steps))
    states, before = [], []
    for rank in range(nodes * each):
        sampler = ShardSampler(dataset, batch_size, rank=rank, world_size=nodes * each, node_groups=nodes, **settings)
        indices = iter(sampler)
        before += [int(index) for _, index in zip(range(stop * batch_size), indices, strict=False)]
        states.append(sampler.state_dict(received=stop) if stop else sampler.state_dict())
    assert all(state == states[0] for state in states)
    if states[0]["epoch"]:
        return
    assert states[0]["position"] == len(before)
    after = epoch_of(dataset, nodes, nodes * other, size, states[0], **settings)
    if any(index.epoch for rank in after for index in rank):  # all that was left would be dropped
        return
    seen = Counter(before) + Counter(int(index) for rank in after for index in rank)
    if uneven != "drop":
        assert set(seen) == set(range(len(dataset)))
        assert sum(seen.values()) < len(dataset) + nodes * other + nodes
    else:
        assert max(seen.values(), default=1) == 1
        assert len(seen) > len(dataset) - nodes * other - nodes
    for node, rows in enumerate(whole):  # each node goes on in its own share
        mine = {int(index) for rank in after[node * other : (node + 1) * other] for index in rank}
        assert mine <= set(map(int, rows))


def test_a_share_is_another_one_in_the_next_epoch() -> None:
    dataset = Shards([10] * 20)
    sampler = ShardSampler(dataset, 10, shuffle="block", rank=0, world_size=2, node_groups=2)
    first, second = ({int(index) // 10 for index in sampler} for _ in range(2))
    assert len(first) == len(second) == 10
    assert first != second


def test_a_state_of_other_nodes_is_refused_in_mid_epoch_only() -> None:
    dataset = Shards([10] * 8)
    course = Course(dataset, 4, shuffle="block", rank=0, world_size=4, node_groups=4)
    run = course.begin()
    course.received(run, run.steps.after(0))
    state = course.state_dict()
    assert state == {"generation": dataset.generation, "seed": 0, "epoch": 0, "position": 16, "node_groups": 4}
    for nodes in (1, 2):
        with pytest.raises(ValueError, match=rf"node_groups=4, here it is {nodes}.*go on with node_groups=4"):
            Course(dataset, 4, shuffle="block", node_groups=nodes).load_state_dict(state)
    with pytest.raises(ValueError, match="17, which node_groups=4 does not divide"):
        Course(dataset, 4, shuffle="block", node_groups=4).load_state_dict({**state, "position": 17})
    course.received(run, run.steps.n)
    end = course.state_dict()
    assert (end["epoch"], end["position"]) == (1, 0)
    other = Course(dataset, 4, shuffle="block", node_groups=2)
    other.load_state_dict(end)
    assert other.state_dict() == {**end, "node_groups": 2}


def test_what_does_not_fit_is_refused() -> None:
    dataset = Shards([3, 3])
    with pytest.raises(ValueError, match="node_groups=2 does not divide the 3 ranks"):
        list(ShardSampler(dataset, 1, shuffle="block", rank=0, world_size=3, node_groups=2))
    with pytest.raises(ValueError, match="6 samples, not one for each of node_groups=7"):
        ShardSampler(dataset, 1, shuffle="block", node_groups=7)
    with pytest.raises(ValueError, match=r"weights .* node_groups"):
        ShardSampler(dataset, 1, weights=[1.0] * 6, node_groups=2)
    with pytest.raises(ValueError, match="node_groups must be an integer"):
        ShardSampler(dataset, 1, node_groups=0)
    with pytest.raises(ValueError, match="needs a dataset that knows its shards"):
        ShardSampler(range(6), 1, shuffle=True, node_groups=2)
    with pytest.raises(ValueError, match="own must be"):
        Steps(5, 1, own=3)
    with pytest.raises(ValueError, match="share"):
        Order(6, share=(2, 2))


def test_one_node_is_what_there_was_without_nodes() -> None:
    starts = Shards([5, 9, 2, 7]).starts
    plain = Order(23, seed=5, epoch=2, shuffle="block", blocks=starts, block_shards=2)
    alone = Order(23, seed=5, epoch=2, shuffle="block", blocks=starts, block_shards=2, share=(0, 1))
    assert (plain.rows(np.arange(23)) == alone.rows(np.arange(23))).all()


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_nodes_share_few_shards(nodes: int) -> None:
    sizes = np.random.default_rng(nodes).integers(500, 2000, 60)
    starts = Shards(sizes).starts
    for epoch in range(10):
        for node in range(nodes):
            order = Order(int(starts[-1]), epoch=epoch, shuffle="block", blocks=starts, share=(node, nodes))
            mine = np.unique(np.searchsorted(starts, order.rows(np.arange(len(order))), side="right") - 1)
            assert sizes[mine].sum() <= 1.1 / nodes * sizes.sum()
