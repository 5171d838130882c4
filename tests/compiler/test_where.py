"""Conditions on rows: what they mean, and how wrong ones are refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.compiler.sources.where import Column, Flags, Where
from mmcompile.errors import OptionError


def _texts(*values: str) -> Callable[[], Column]:
    return lambda: np.array(values, object)


COLUMNS: dict[str, Callable[[], Column]] = {
    "class": _texts("cat", "dog", "ö"),
    "key": _texts("train/a.png", "val/b.png", "train/[c].png"),
    "width": lambda: np.array([100, 300, 256]),
    "height": lambda: np.array([100, 200, 4_000_000_000]),
    "age": lambda: np.array([0.5, np.nan, 3.0]),
    "sick": lambda: np.array([True, False, True]),
    "flags": lambda: Flags(np.array([1, 8, 9], np.uint32)),
}
ROWS = {
    "class == 'cat'": [0],
    'class != "cat"': [1, 2],
    "class == 'cat' and width >= 256": [],
    "class == 'cat' or width >= 256": [0, 1, 2],
    "key like 'train/*'": [0, 2],
    "not key like 'train/*'": [1],
    "key like '*/[[]c].png'": [2],
    "class in ('cat', 'ö')": [0, 2],
    "class not in ['cat']": [1, 2],
    "width in (100, 300)": [0, 1],
    "width in ()": [],
    "100 < width <= 300": [1, 2],
    "height * height > 9000000000000000000": [2],
    "width / height > 1.2": [1],
    "-width < -200": [1, 2],
    "age < 1": [0],
    "age != age": [1],
    "sick": [0, 2],
    "'wrong-extension' in flags": [1, 2],
    "'wrong-extension' not in flags": [0],
    "(class == 'cat'\n or class == 'dog')": [0, 1],
    "class == 'like' or class == 'class'": [],
    "1 == 1": [0, 1, 2],
    "class == '\\\\d'": [],
}


@pytest.mark.parametrize("text", ROWS)
def test_a_condition_takes_the_rows_that_meet_it(text: str) -> None:
    found = Where(text).rows(COLUMNS, 3)
    assert found.dtype == bool
    assert np.flatnonzero(found).tolist() == ROWS[text]


WRONG = {
    "": (1, "not understood"),
    "width": (1, "this is a number, not a condition"),
    "clas == 'cat'": (1, "there is no 'clas' here (did you mean class?); known are age, class, flags, height, key, sick, width"),
    "'é' == class and widht > 3": (18, "there is no 'widht'"),
    "width == 'a'": (1, "a number cannot be compared with a text: put texts in quotes"),
    "flags == 3": (1, "write 'truncated-accepted' in flags"),
    "'x' in flags": (1, "one of these words is expected: 'broken-exif'"),
    "width in (1, 'a')": (14, "a number is expected in this list"),
    "width in height": (10, "a list is expected behind `in`"),
    "class like width": (12, "a pattern in quotes is expected"),
    "width like '*'": (1, "a text is expected, this is a number"),
    "class and sick": (1, "a truth is expected, this is a text"),
    "class + 'a' == 'b'": (1, "a number is expected, this is a text"),
    "width = 3": (1, "Maybe you meant '==' instead of '='"),
    "width <": (7, "no condition"),
    "width ** 2 > 3": (1, "not understood"),
    "__import__('os').system('true')": (1, "not understood"),
    "key.upper() == 'A'": (1, "not understood"),
    "[w for w in width]": (1, "not understood"),
    "width is 3": (10, "`is` is not understood"),
    "lambda: 1": (1, "not understood"),
    "f'{width}' == key": (1, "not understood"),
    "b'a' == key": (1, "not understood"),
    "width > 99999999999999999999999": (9, "a number below 2^63"),
    "(" * 10_000: (200, "no condition"),
    "width / 0 > 1": (9, "a division by 0: multiply the other side instead"),
    "width % (1 - 1) == 0": (10, "a division by 0"),
    "width // 0.0 == 0": (10, "a division by 0"),
    "width == 1 # nothing": (1, "no condition"),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30] or "empty")
@pytest.mark.parametrize("rows", [0, 3])
def test_what_is_no_condition_is_refused_with_its_place_however_many_rows_there_are(text: str, rows: int) -> None:
    columns = COLUMNS if rows else {name: _none(make) for name, make in COLUMNS.items()}
    with pytest.raises(OptionError) as e:
        Where(text).rows(columns, rows)
    at, why = WRONG[text]
    assert why in str(e.value)
    assert e.value.details["options"] == ["where"]
    assert "\n" not in str(e.value)
    if why != "no condition":
        assert f"at character {at}:" in str(e.value)


def _none(make: Callable[[], Column]) -> Callable[[], Column]:
    found = make()
    return lambda: Flags(found.bits[:0]) if isinstance(found, Flags) else found[:0]


def test_a_column_with_zeros_divides_nothing() -> None:
    with pytest.raises(OptionError, match=r"at character 5: a division by 0, of 2 rows"):
        Where("1 / a > 0.5").rows({"a": lambda: np.array([0, 1, 0])}, 3)
    assert Where("a / 1 > 0.5").rows({"a": lambda: np.array([0, 1, 0])}, 3).tolist() == [False, True, False]


def test_a_condition_that_is_too_long_is_refused_with_the_option_for_that() -> None:
    with pytest.raises(OptionError, match=re.escape("--rows FILE")):
        Where("width == 1 or " * 10_000 + "width == 2")


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_an_option_error(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert Where(text).rows(COLUMNS, 3).shape == (3,)


@given(st.lists(st.integers(-5, 5), max_size=20), st.integers(-5, 5), st.integers(-5, 5))
def test_conditions_agree_with_python_row_by_row(values: list[int], low: int, high: int) -> None:
    text = f"{low} <= a < {high} or a * a == {abs(high)} and not a in ({low}, {high})"
    found = Where(text).rows({"a": lambda: np.array(values, np.int64)}, len(values))
    assert found.tolist() == [low <= a < high or (a * a == abs(high) and a not in (low, high)) for a in values]
