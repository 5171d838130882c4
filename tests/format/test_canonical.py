from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import FormatError
from mmcompile.format.canonical import Check, canonical, name_from_json, name_to_json, parse, read_limited

PATH = Path("some.json")
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_parse_is_the_inverse_of_canonical(value: Any) -> None:
    data = canonical(value)
    assert parse(data, PATH) == value
    assert canonical(parse(data, PATH)) == data


def test_canonical_bytes_are_fixed() -> None:
    assert canonical({"b": [1, 2.5, None, True], "a": "ü\n"}) == '{"a":"ü\\n","b":[1,2.5,null,true]}\n'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical(value)


@given(st.binary(max_size=20))
def test_names_are_any_bytes(raw: bytes) -> None:
    name = os.fsdecode(raw)
    form = name_to_json(name)
    assert name_to_json(raw) == form
    assert name_from_json(json.loads(json.dumps(form))) == name
    try:
        assert form == raw.decode()
    except UnicodeDecodeError:
        assert set(form) == {"bytes"}


@pytest.mark.parametrize(
    "value",
    [None, 1, [], {}, "\ud800", {"bytes": 1}, {"bytes": "a"}, {"bytes": "%ff"}, {"bytes": "%F"}, {"bytes": "\xff"}, {"bytes": "%FF", "x": 1}],
)
def test_a_name_has_one_form(value: Any) -> None:
    with pytest.raises(ValueError, match=r"not a name|surrogates"):
        name_from_json(value)
    with pytest.raises(FormatError, match=r"some\.json: here must be a name"):
        Check(PATH).name(value, "here")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"1 2", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'"\xed\xa0\x80"', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a":1,"b":2,"a":1}', "duplicated key 'a'"),
        (b'[{"x":{"a":1,"a":2}}]', "duplicated key 'a'"),
        (b"NaN", "NaN is not allowed"),
        (b"[Infinity]", "Infinity is not allowed"),
        (b"-Infinity", "-Infinity is not allowed"),
        (b"1e999", "out of range"),
        (b"[-1e999]", "out of range"),
        (b"1" * 5000, "not valid JSON"),
        (b"1" * 400, "out of range"),
        (b'"\\ud800"', "surrogates"),
        (b'{"\\udfff":1}', "surrogates"),
        (b"[" * 40 + b"]" * 40, "nested"),
        (b"[" * 900 + b"]" * 900, "nested"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
    ],
)
def test_what_is_not_sound_names_the_file_and_the_fault(data: bytes, fault: str) -> None:
    with pytest.raises(FormatError, match=fault) as caught:
        parse(data, PATH)
    assert str(caught.value).startswith("some.json: ")
    assert "\n" not in str(caught.value)


def test_many_duplicated_keys_take_no_quadratic_time() -> None:
    keys = [f'"{i}":0' for i in range(100_000)]
    with pytest.raises(FormatError, match="duplicated key '99999'"):
        parse(("{" + ",".join([*keys, keys[-1]]) + "}").encode(), PATH)


@given(st.binary(max_size=60) | st.text('{}[]":,0123456789.eE+-\\untrfalse ', max_size=60).map(str.encode))
def test_parse_raises_nothing_else(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        canonical(parse(data, PATH))


def test_a_limit_holds_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(FormatError, match="5 bytes, the limit is 4"):
        read_limited(path, 4)
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError, match="the limit is 1,000"):
        read_limited(path, 1000)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    for name, fault in (
        ("folder", "folder: expected a file, found a folder: move it away$"),
        ("fifo", "found a pipe, socket or device: move it away$"),
        ("link", "a link"),
        ("loop", "a link"),
    ):
        with pytest.raises(FormatError, match=fault):
            read_limited(tmp_path / name, 100)
    with pytest.raises(FormatError, match=r"/dev/zero: expected a file, found a pipe, socket or device: move it away$"):
        read_limited(Path("/dev/zero"), 100)
    with pytest.raises(FormatError, match="cannot be opened"):
        read_limited(tmp_path / ("x" * 300), 100)
    for missing in (tmp_path / "absent", tmp_path / "file" / "below"):
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            read_limited(missing, 100)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "folder").mkdir()
    for _ in range(5):
        with pytest.raises(FormatError):
            read_limited(tmp_path / "folder", 100)
    assert len(os.listdir("/proc/self/fd")) == before
