"""Samples made from the same bytes, against a dumb oracle."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.format.describe import describe
from mmcompile.format.fields import Split
from mmcompile.format.leakage import Repeat, Repeats, find_repeats
from tests.compiler.builds import inline, picture, run, write


def oracle(hashes: list[tuple[int, int]], splits: list[Split], labels: list[int] | None) -> tuple[int, dict[str, int], int, list[tuple[int, ...]]]:
    """(duplicates, leaked, contradictory, the rows of each repeated source, sorted)."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, pair in enumerate(hashes):
        if pair != (0, 0):
            groups[pair].append(row)
    repeated = [rows for rows in groups.values() if len(rows) > 1]
    where = {row: number for number, split in enumerate(splits) for row in range(split.start, split.stop)}
    leaked: dict[str, int] = defaultdict(int)
    contradictory = 0
    for rows in repeated:
        for row in rows:
            leaked[splits[where[row]].name] += where[row] > min(where[other] for other in rows)
        if labels is not None and len({labels[row] for row in rows} - {-1}) > 1:
            contradictory += len(rows)
    return sum(len(rows) - 1 for rows in repeated), {name: n for name, n in leaked.items() if n}, contradictory, sorted(map(tuple, repeated))


PAIRS = st.tuples(st.integers(0, 2), st.integers(0, 2).map(lambda n: n * (2**63 - 1) + n // 2))


@settings(max_examples=300, deadline=None)
@given(pairs=st.lists(PAIRS, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=3), labelled=st.booleans(), data=st.data())
def test_repeats_are_those_of_the_oracle(pairs: list[tuple[int, int]], cuts: list[int], labelled: bool, data: st.DataObject) -> None:
    n = len(pairs)
    stops = [*sorted(min(cut, n) for cut in cuts), n]
    splits = [Split(f"s{i}", start, stop) for i, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))]
    labels = data.draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n)) if labelled else None
    hashes = np.array(pairs, np.uint64).reshape(-1, 2)
    found = find_repeats(hashes, splits, None if labels is None else np.array(labels, np.int64), lambda row: b"%d" % row)
    duplicates, leaked, contradictory, groups = oracle(pairs, splits, labels)
    assert (found.duplicates, found.leaked, found.contradictory) == (duplicates, leaked, contradictory)
    assert sorted(tuple(map(int, example.keys)) for example in found.examples) == [rows[:10] for rows in groups]
    assert {example.samples for example in found.examples} == {len(rows) for rows in groups}
    worst = [(not example.leaked, not example.contradictory) for example in found.examples]
    assert worst == sorted(worst)


def test_a_hundred_sources_and_ten_samples_of_each_are_named() -> None:
    hashes = np.zeros((3000, 2), np.uint64)
    hashes[:, 1] = np.arange(3000) % 150 + 1
    asked: list[int] = []

    def key_of(row: int) -> bytes:
        asked.append(row)
        return b"\xff"

    found = find_repeats(hashes, [Split("train", 0, 2990), Split("val", 2990, 3000)], None, key_of)
    assert found.duplicates == 2850
    assert found.leaked == {"val": 10}
    assert [example.leaked for example in found.examples] == [True] * 10 + [False] * 90
    assert found.examples[0] == Repeat(("\udcff",) * 10, 20, True, False)
    assert len(asked) == 1000
    assert found.to_json()["examples"][0]["keys"][0] == {"bytes": "%FF"}


@pytest.mark.parametrize("n", [0, 1, 5])
def test_samples_that_differ_have_nothing_in_common(n: int) -> None:
    hashes = np.stack([np.full(n, 7, np.uint64), np.arange(n, dtype=np.uint64)], axis=1)
    assert find_repeats(hashes, [Split("all", 0, n)], np.zeros(n, np.int64), lambda row: pytest.fail("named")) == Repeats(0, {}, 0, ())


def test_a_build_and_info_tell_the_same_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    broken = b"\x89PNG\r\n\x1a\n"
    same = {"train/a/1.png": 1, "train/a/2.png": 2, "train/a/copy.png": 1, "train/b/3.png": 3, "val/b/1.png": 1, "val/b/4.png": 4, "test/3.png": 3}
    raw = write(tmp_path / "raw", {name: picture(seed) for name, seed in same.items()} | {"train/b/x.png": broken, "val/b/x.png": broken})
    wanted = {
        "duplicates": 3,
        "leaked": {"val": 1, "test": 1},
        "contradictory": 3,
        "examples": [
            {"keys": ["train/a/1.png", "train/a/copy.png", "val/b/1.png"], "samples": 3, "leaked": True, "contradictory": True},
            {"keys": ["train/b/3.png", "test/3.png"], "samples": 2, "leaked": True, "contradictory": False},
        ],
    }
    for _ in range(2):  # a build, and one that finds all done
        report = run(raw, tmp_path / "out", max_rejects=2)
        assert report.repeats is not None
        assert report.repeats.to_json() == wanted
        assert describe(tmp_path / "out")["repeats"] == wanted
    assert report.kept == 7
    assert run(raw, tmp_path / "out", max_rejects=2, dry_run=True).repeats is None
