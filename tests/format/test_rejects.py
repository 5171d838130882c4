from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.index import load_index
from mmcompile.format.npy import save_blob
from mmcompile.format.rejects import Reject, load_rejects, read_rejects
from tests.format.builders import republish

PATH = Path("rejects.jsonl")
HERE = Reject("a/\udcff.png", 5, "0" * 32, "decode", "truncated", "OSError", "ends early\nhere")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
rejects = st.builds(
    Reject,
    key=st.binary(max_size=20).map(os.fsdecode),
    size=st.none() | st.integers(0, 1 << 50),
    source_hash=st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
    stage=text,
    code=text,
    error=st.none() | text,
    message=text,
)


@given(st.lists(rejects, max_size=5))
def test_lines_give_the_rejects_back(items: list[Reject]) -> None:
    data = b"".join(r.to_line() for r in items)
    assert data.count(b"\n") == len(items)
    assert read_rejects(data, PATH) == tuple(items)


def test_a_message_may_hold_a_long_path() -> None:
    long = dataclasses.replace(HERE, message="x" * 5000)
    assert read_rejects(long.to_line(), PATH) == (long,)


@pytest.mark.parametrize(
    "data",
    [
        HERE.to_line()[:-1],
        b"\n",
        b"[]\n",
        b"{}\n",
        HERE.to_line().replace(b'"size":5', b'"size":-1'),
        HERE.to_line().replace(b'"size":5', b'"size":5,"size":5'),
        HERE.to_line().replace(b'"size":5', b'"more":1,"size":5'),
        HERE.to_line().replace(b'"size":5', b'"size":NaN'),
        HERE.to_line().replace(b"0" * 32, b"0" * 31),
        HERE.to_line().replace(b"%FF", b"%ff"),
        HERE.to_line().replace(b"decode", b"\xff"),
        HERE.to_line().replace(b'"decode"', b"null"),
    ],
)
def test_any_other_line_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"rejects\.jsonl"):
        read_rejects(data, PATH)


def test_count_and_content_are_checked(root: Path) -> None:
    digest = save_blob(root / "shards", "rejects", [HERE.to_line()], root / "shards", ".jsonl")
    republish(root, rejects=1, rejects_file=digest)
    assert load_rejects(root, load_index(root)[0]) == (HERE,)
    republish(root, rejects=2, rejects_file=digest)
    with pytest.raises(CorruptShardError, match="1 lines, the index says 2"):
        load_rejects(root, load_index(root)[0])
    path = root / "shards" / f"rejects-{digest}.jsonl"
    path.write_bytes(HERE.to_line() * 2)
    with pytest.raises(CorruptShardError, match="does not match its name"):
        load_rejects(root, load_index(root)[0])
    path.unlink()
    with pytest.raises(CorruptShardError, match="missing"):
        load_rejects(root, load_index(root)[0])
