from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.compiler.plan import cuts, fingerprint, key_hashes, make_tasks, rows_per_shard, task_id
from mmcompile.compiler.sources import STAT_DTYPE, Scan, labelled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.format.index import Split


def scan_of(names: Sequence[bytes], labels: Any = None) -> Scan:
    return Scan(Keys.of(names), *labelled(labels, len(names)), np.zeros(len(names), STAT_DTYPE))


HASHES = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 12), max_size=120).map(lambda v: np.array(v, np.uint64))


def oracle(hashes: list[int], rows: int) -> list[int]:
    """Walk the keys one by one, as the rule is written."""
    out, length = [0], 0
    for i, value in enumerate(hashes):
        if (length >= max(1, rows // 2) and value % rows == 0) or length == 2 * rows:
            out.append(i)
            length = 0
        length += 1
    return [*out, len(hashes)]


@given(HASHES, st.integers(1, 20))
def test_cuts_equal_a_walk_over_the_keys(hashes: np.ndarray, rows: int) -> None:
    assert cuts(hashes, rows) == oracle(hashes.tolist(), rows)


@given(HASHES, st.integers(1, 20))
def test_no_shard_is_longer_than_2r_and_only_the_last_is_shorter_than_half_r(hashes: np.ndarray, rows: int) -> None:
    lengths = [b - a for a, b in itertools.pairwise(cuts(hashes, rows))]
    assert all(length <= 2 * rows for length in lengths)
    assert all(length >= max(1, rows // 2) for length in lengths[:-1])
    assert sum(lengths) == len(hashes)


@settings(max_examples=50)
@given(st.integers(0, 999), st.integers(0, 2**32))
def test_one_inserted_key_rewrites_few_of_many_shards(at: int, seed: int) -> None:
    names = [b"%d/%d" % (seed, i) for i in range(1000)]
    more = [*names[:at], b"%d/new" % seed, *names[at:]]
    before, after = ({tuple(n[a:b]) for a, b in itertools.pairwise(cuts(key_hashes(n), 10))} for n in (names, more))
    # a shard is 5 to 20 keys here; a cut at the next marked key after the half brings both walks together again
    assert len(after - before) <= 12
    assert len(after) >= 50


def test_cuts_look_at_nothing_but_the_keys_and_r() -> None:
    names = [b"k%d" % i for i in range(200)]
    one = make_tasks(scan_of(names, np.arange(200) % 7), key_hashes(names), 8, ("p", "s"))
    two = make_tasks(scan_of(names), key_hashes(names), 8, ("q", "t"))
    assert [(t.start, t.stop) for t in one] == [(t.start, t.stop) for t in two]
    assert {t.id for t in one}.isdisjoint({t.id for t in two})


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 9))
def test_each_split_is_cut_as_if_it_stood_alone(lengths: list[int], rows: int) -> None:
    names = [b"k%d" % i for i in range(sum(lengths))]
    stops = list(itertools.accumulate(lengths))
    splits = tuple(Split(str(i), stop - n, stop) for i, (n, stop) in enumerate(zip(lengths, stops, strict=True)))
    tasks = make_tasks(replace(scan_of(names), splits=splits), key_hashes(names), rows, ("p", "s"))
    assert [t.number for t in tasks] == list(range(len(tasks)))
    alone = []
    for split in splits:
        part = names[split.start : split.stop]
        alone += [(split.start + t.start, split.start + t.stop, t.id) for t in make_tasks(scan_of(part), key_hashes(part), rows, ("p", "s"))]
    assert [(t.start, t.stop, t.id) for t in tasks] == alone


def test_a_task_id_tells_keys_their_order_values_and_both_fingerprints_apart() -> None:
    labels, none = labelled(np.array([1, 2]), 2)[1], labelled(None, 2)[1]
    base = task_id([b"a", b"b"], labels, "p", "s")
    others = [
        task_id([b"b", b"a"], labels, "p", "s"),
        task_id([b"ab", b""], labels, "p", "s"),
        task_id([b"a", b"b", b""], np.repeat(labels, [1, 1]), "p", "s"),
        task_id([b"a", b"b"], labels[::-1], "p", "s"),
        task_id([b"a", b"b"], labels.astype([("other", "<i8")]), "p", "s"),
        task_id([b"a", b"b"], none, "p", "s"),
        task_id([b"a", b"b"], labels, "q", "s"),
        task_id([b"a", b"b"], labels, "p", "t"),
    ]
    assert len({base, *others}) == 9


def test_no_items_make_no_tasks_and_one_item_one() -> None:
    assert make_tasks(scan_of([]), key_hashes([]), 4, ("p", "s")) == []
    (only,) = make_tasks(scan_of([b"k"]), key_hashes([b"k"]), 4, ("p", "s"))
    assert (only.start, only.stop, len(only)) == (0, 1, 1)


@pytest.mark.parametrize(("row", "limit", "rows"), [(1, 10, 10), (3, 10, 3), (11, 10, 1), (0, 10, 10), (150_528, 1 << 28, 1783)])
def test_rows_per_shard_fill_a_shard_and_are_at_least_one(row: int, limit: int, rows: int) -> None:
    assert rows_per_shard(row, limit) == rows


def test_a_fingerprint_depends_on_values_not_on_the_order_of_names() -> None:
    assert fingerprint({"a": 1, "b": [2]}, {"x": "1"}, 1) == fingerprint({"b": [2], "a": 1}, {"x": "1"}, 1)
    assert len({fingerprint({"a": 1}, {}, 1), fingerprint({"a": 2}, {}, 1), fingerprint({"a": 1}, {"x": "1"}, 1), fingerprint({"a": 1}, {}, 2)}) == 4
