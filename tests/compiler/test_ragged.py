"""Lists of different lengths as arrays: what a loop over them would make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources import ragged
from mmcompile.compiler.sources.ragged import Ragged, laid_out, padded
from mmcompile.errors import SourceError
from mmcompile.format.fields import Field, Names

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12)


def made(lists: list[list[int]], name: str = "x", **options: Any) -> Ragged:
    values = np.array([v for each in lists for v in each], np.int64)
    return Ragged(Field(name, "int64", (), "value"), values, np.array([len(each) for each in lists], np.int64), FieldOptions(**options))


@given(LISTS, st.integers(1, 7), st.integers(1, 5))
def test_padded_lists_are_the_lists(lists: list[list[int]], most: int, chunk: int) -> None:
    held = made(lists)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_CHUNK", chunk)
        found = padded(held.values, held.lengths, most, -1)
    assert found.tolist() == [(each + [-1] * most)[:most] for each in lists]


@given(LISTS, st.data())
def test_some_items_and_lists_that_are_emptied(lists: list[list[int]], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    bad = [i for i in range(len(lists)) if data.draw(st.booleans())]
    found = made(lists).without(bad).at(np.array(kept, bool))
    wanted = [[] if i in bad else each for i, each in enumerate(lists) if kept[i]]
    assert found.lengths.tolist() == [len(each) for each in wanted]
    assert found.values.tolist() == [v for each in wanted for v in each]


def test_lists_of_one_group_share_their_count_and_are_cut_together() -> None:
    counts: dict[str, int] = {}
    names = Ragged(Field("name", "int64", (), "value", categories=Names(("a", "b"))), np.array([1, 0, 1]), np.array([3, 0]))
    fields = laid_out([made([[1, 2, 3], []], max=2, overflow="drop"), names], str, counts)
    assert [(spec.name, spec.shape, spec.count, values.tolist()) for spec, values in fields] == [
        ("x", (2,), "x_count", [[1, 2], [0, 0]]),
        ("name", (2,), "x_count", [[1, 0], [-1, -1]]),
        ("x_count", (), None, [2, 0]),
    ]
    assert counts == {"rows of x behind the first 2 of a list, dropped": 1}
    with pytest.raises(SourceError, match="row 1: x: a list of 3, and max=2"):
        laid_out([made([[], [1, 2, 3]], max=2)], lambda row: f"row {row}", {})
