"""Keys in one array against a list of bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.compiler.sources.keys import Keys, Placed, place_of

LISTS = st.lists(st.binary(max_size=6), max_size=30)


@given(LISTS, st.slices(30))
def test_keys_are_the_list_that_they_were_made_of(names: list[bytes], part: slice) -> None:
    keys = Keys.of(iter(names))
    assert (len(keys), list(keys), bool(keys)) == (len(names), names, bool(names))
    assert keys == names
    assert names == keys
    assert [keys[i] for i in range(-len(names), len(names))] == names + names
    assert isinstance(keys[part], Keys)
    assert list(keys[part]) == names[part]
    assert keys[part] == Keys.of(names[part])


@given(LISTS, st.slices(30), st.slices(30))
def test_a_part_of_a_part_is_what_it_is_of_a_list(names: list[bytes], one: slice, two: slice) -> None:
    part = Keys.of(names)[one][two]
    wanted = names[one][two]
    assert list(part) == wanted
    assert part.blob.tobytes() == b"".join(wanted)
    assert part.stops.tolist() == np.cumsum([len(name) for name in wanted], dtype=int).tolist()
    assert part.hashes().tolist() == [xxhash.xxh3_64_intdigest(name) for name in wanted]
    again = pickle.loads(pickle.dumps(part))
    assert again == part


@given(LISTS, st.lists(st.integers(0, 29), max_size=40), st.slices(30))
def test_keys_are_taken_by_their_numbers(names: list[bytes], rows: list[int], part: slice) -> None:
    rows = [row for row in rows if row < len(names[part])]
    assert list(Keys.of(names)[part].take(np.array(rows, np.int64))) == [names[part][row] for row in rows]


@given(LISTS, st.slices(30), st.lists(st.integers(0, 29), max_size=9))
def test_places_go_with_their_keys(names: list[bytes], part: slice, rows: list[int]) -> None:
    bare = Keys.of(names)
    keys = Keys(bare.blob, bare.stops, places=np.arange(3 * len(names)).reshape(-1, 3))
    wanted = [(name, (3 * i, 3 * i + 1, 3 * i + 2)) for i, name in enumerate(names)]
    assert keys == names

    def seen(found: Iterable[bytes]) -> list[tuple[bytes, tuple[int, int, int]]]:
        return [(key, place_of(key)) for key in found]

    assert seen(keys) == wanted
    assert seen(keys[i] for i in range(len(names))) == wanted
    assert seen(pickle.loads(pickle.dumps(list(keys)))) == wanted
    assert seen(pickle.loads(pickle.dumps(keys[part]))) == wanted[part]
    rows = [row for row in rows if row < len(wanted[part])]
    assert seen(keys[part].take(np.array(rows, np.int64))) == [wanted[part][row] for row in rows]
    assert seen(Keys.join([keys[part], keys])) == wanted[part] + wanted


def test_a_bare_key_has_no_place() -> None:
    with pytest.raises(LookupError, match="where it lies is not known"):
        place_of(b"a")
    assert Placed.at(b"a", (1, 2, 3)) == b"a"


def test_many_keys_are_taken_part_by_part() -> None:
    names = [b"%d" % i for i in range(40_000)]
    assert Keys.of(names).take(np.arange(40_000)[::-1]) == names[::-1]


@given(st.lists(LISTS, max_size=5), st.slices(30))
def test_joined_keys_are_those_of_all_parts(parts: list[list[bytes]], some: slice) -> None:
    assert list(Keys.join([Keys.of(names)[some] for names in parts])) == [name for names in parts for name in names[some]]


def test_keys_with_the_same_bytes_cut_elsewhere_differ() -> None:
    assert Keys.of([b"ab", b"c"]) != Keys.of([b"a", b"bc"])
    assert Keys.of([b"ab", b""]) != [b"ab"]
    assert Keys.of([b"a"]) != [b"b"]
    assert Keys.of([b"97"]) != b"97"
    assert Keys.of([]) != "…"


def test_a_slice_is_a_view_and_its_pickle_holds_no_more() -> None:
    keys = Keys.of(b"%06d" % i for i in range(100_000))
    assert list(keys) == [b"%06d" % i for i in range(100_000)]
    part = keys[50_000:50_010]
    assert np.shares_memory(part.blob, keys.blob)
    assert len(pickle.dumps(part)) < 1000


def test_an_index_beyond_the_end_is_an_error_and_keys_have_no_hash() -> None:
    keys = Keys.of([b"a"])
    for at in (1, -2):
        with pytest.raises(IndexError):
            keys[at]
    with pytest.raises(TypeError):
        hash(keys)
    assert repr(Keys.of([b"a", b"b", b"c", b"d"])) == "Keys([b'a', b'b', b'c'], …, 4 in all)"
