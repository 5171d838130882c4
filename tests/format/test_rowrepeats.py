"""Rows without keys that hold the same, against a dumb oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcompile
from mmcompile.format import rowrepeats
from mmcompile.format.catalog import load_table
from mmcompile.format.describe import describe
from mmcompile.format.fields import Split
from mmcompile.format.index import load_index
from mmcompile.format.leakage import Repeats
from mmcompile.format.rowrepeats import repeated_rows
from tests.format.test_leakage import oracle
from tests.support import make_dataset


def found_in(root: Path, most_bytes: int | None = None) -> Repeats | None:
    return repeated_rows(root, load_table(root, *load_index(root)), most_bytes)


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.integers(0, 5), min_size=8, max_size=24),
    width=st.sampled_from([9, 16, 130, 5000]),
    parts=st.sampled_from([1, 3]),
    labelled=st.booleans(),
    data=st.data(),
)
def test_repeats_are_those_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, picks: list[int], width: int, parts: int, labelled: bool, data: st.DataObject
) -> None:
    n, root = len(picks), tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 256, (6, width), dtype=np.uint8)
    kinds[1] = kinds[0]
    kinds[1, -1] ^= 1  # which differs in the last byte, beyond the middle of a long row
    kinds[2] = kinds[0]
    others = np.array([0, 0, 0, 0, 1, 1], np.int16)
    same = [0 if pick in (0, 2) else pick for pick in picks]
    labels = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n)), np.int64) if labelled else None
    values: dict[str, Any] = {"x": kinds[picks], "n": others[picks]}
    make_dataset(root, None, labels, values=values, keyed=False, shards=(3, 1, n - 4), splits={"train": n - 3, "test": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowrepeats, "_HASHES", -(-n // parts))
        patch.setattr(rowrepeats, "_CHUNK", 40)
        patch.setattr(rowrepeats, "_STATES", 2)
        found = found_in(root)
    splits = [Split("train", 0, n - 3), Split("test", n - 3, n)]
    duplicates, leaked, contradictory, groups = oracle([(1, pick) for pick in same], splits, None if labels is None else labels.tolist())
    assert found is not None
    assert (found.duplicates, found.leaked, found.contradictory) == (duplicates, leaked, contradictory)
    named = [tuple(f"{'train' if row < n - 3 else 'test'}[{row}]" for row in rows[:10]) for rows in groups]
    assert sorted(e.keys for e in found.examples) == sorted(named)


def test_a_build_and_info_tell_of_them(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 4))
    x[40], x[41], x[3] = x[2], x[2], x[9]
    y = np.arange(50)
    np.savez(tmp_path / "a.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    report = mmcompile.build(tmp_path / "a.npz", tmp_path / "out", workers=1)
    assert report.repeats is not None
    assert (report.repeats.duplicates, report.repeats.leaked, report.repeats.contradictory) == (3, {"test": 2}, 5)
    assert report.repeats.examples[0].keys == ("train[2]", "test[0]", "test[1]")
    assert describe(tmp_path / "out")["repeats"] == report.repeats.to_json()
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3,4\n1,2\n", "ascii")
    told = mmcompile.build(tmp_path / "b.csv", tmp_path / "table", workers=1).repeats
    assert told is not None
    assert [e.keys for e in told.examples] == [("[0]", "[2]")]
    again = mmcompile.build({"train": [(v, 1.5) for v in x[:3]], "val": [(v, 1.5) for v in x[2:4]]}, tmp_path / "python", workers=1)
    assert again.repeats is not None
    assert again.repeats.leaked == {"val": 1}


def test_what_is_not_looked_for(tmp_path: Path) -> None:
    make_dataset(tmp_path / "tokens", values={"x": np.zeros(100, np.int64)}, keyed=False)
    assert found_in(tmp_path / "tokens") is None
    make_dataset(tmp_path / "rows", values={"x": np.zeros((100, 2000))}, keyed=False)
    assert found_in(tmp_path / "rows", 100 * 4096 - 1) is None
    found = found_in(tmp_path / "rows", 100 * 4096)
    assert found is not None
    assert (found.duplicates, found.examples[0].samples, len(found.examples[0].keys)) == (99, 100, 10)
