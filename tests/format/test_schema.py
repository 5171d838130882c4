"""The schema, the prose and the code say the same: what is written validates, and what the schema refuses the reader refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import FormatError
from mmcompile.format import index as index_module
from mmcompile.format.canonical import canonical
from mmcompile.format.fields import RESERVED
from mmcompile.format.index import DTYPES, Field, Index, Names, Split
from mmcompile.format.samples import KEY_LIMIT
from tests.format.builders import GOLDEN, REPOSITORY, pixels
from tests.format.test_hostile import FAULTS, NASTY, spots
from tests.support import make_dataset

SCHEMA: dict[str, Any] = json.loads((REPOSITORY / "schemas" / "index.schema.json").read_bytes())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PROSE = (REPOSITORY / "schemas" / "FORMAT.md").read_text()
#: An index of a table: values with all that is known of them, without keys, in groups.
TABLE = Index(
    fields=(
        Field("bars", "float32", (2,), "value", normalize=((0.0, 1.0), (1.0, 2.0)), columns=Names(("open", "close"))),
        Field("ts", "int64", (), "value", unit="ns"),
        Field("symbol", "int32", (), "value", categories=Names(file="1" * 32)),
    ),
    splits=(Split("train", 0, 7), Split("val", 7, 9)),
    samples=9,
    shards=2,
    table="0" * 32,
    keyed=False,
    groups=2,
    groups_file="2" * 32,
)
#: Of objects: a mask of their numbers.
OBJECTS = replace(
    TABLE,
    fields=(
        Field("masks", "int32", (5, 6), "mask", count="boxes_count"),
        Field("boxes", "float32", (3, 4), "boxes", count="boxes_count"),
        Field("boxes_count", "int64", (), "value"),
    ),
)
VIEWS = replace(OBJECTS, fields=tuple(replace(f, shape=(2, *f.shape), views=2) for f in OBJECTS.fields))
INDEXES = [json.loads(p.read_bytes()) for p in sorted(GOLDEN.glob("*/generations/*.json"))]
INDEXES += [json.loads(index.to_bytes()) for index in (TABLE, OBJECTS, VIEWS)]


def accepted(value: Any) -> bool:
    try:
        Index.from_bytes(canonical(value), Path("index.json"))
    except FormatError:
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("value", INDEXES)
def test_the_golden_indexes_are_valid(value: dict[str, Any]) -> None:
    VALIDATOR.validate(value)
    assert accepted(value)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_what_the_code_writes_is_valid(tmp_path: Path, dtype: str, layout: str) -> None:
    images = (pixels(3) % 2).astype(DTYPES[dtype])
    normalize = ((0.5,) * 3, (0.25,) * 3)
    make_dataset(tmp_path, images, [0, 1, 1], dtype=dtype, layout=layout, normalize=normalize, splits={"train": 2, "val": 1})
    VALIDATOR.validate(json.loads((tmp_path / "index.json").read_bytes()))


@given(st.data())
def test_what_the_schema_refuses_the_reader_refuses(data: st.DataObject) -> None:
    value = json.loads(canonical(data.draw(st.sampled_from(INDEXES))))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(spots(value)[1:]))
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        how = data.draw(st.sampled_from(["set", "set", "delete", "add"]))
        if isinstance(inside, dict) and how == "delete":
            del inside[path[-1]]
        elif isinstance(inside, dict) and how == "add":
            inside["more"] = data.draw(NASTY)
        else:
            inside[path[-1]] = data.draw(NASTY)
        if len(spots(value)) < 2:
            break
    if not VALIDATOR.is_valid(value):
        assert not accepted(value)


#: What words say and a schema cannot: relations between values, and what lies in other files.
ONLY_WORDS = {
    "as many views as nothing",
    "a count that is a class",
    "a count that is not there",
    "fields of one name",
    "a product that overflows",
    "a shape of floats",
    "a mean for two channels",
    "rows of more than 2^62 bytes",
    "no shards",
    "more shards than samples",
    "a split that overlaps",
    "a split that runs backwards",
    "splits that end early",
    "splits of one name",
    "class names twice in two forms",
    "a class file that is not there",
    "statistics of no split",
    "statistics of no image",
    "settings nested deeply",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_refuses_what_a_schema_can(pristine: Path, fault: str) -> None:
    value = json.loads((pristine / "index.json").read_bytes())
    changed = FAULTS[fault][0](value)
    assert VALIDATOR.is_valid(value if changed is None else changed) == (fault in ONLY_WORDS)


def names_in(schema: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(schema, dict):
        found |= set(schema.get("properties", {}))
        for item in schema.values():
            found |= names_in(item)
    elif isinstance(schema, list):
        for item in schema:
            found |= names_in(item)
    return found


def test_every_key_of_the_schema_stands_in_the_prose() -> None:
    missing = [name for name in sorted(names_in(SCHEMA)) if f"`{name}`" not in PROSE]
    assert missing == []


def test_schema_prose_and_code_have_one_list_of_dtypes_and_reserved_words() -> None:
    field = SCHEMA["$defs"]["field"]["properties"]
    assert field["dtype"]["enum"] == sorted(DTYPES)
    assert set(field["name"]["not"]["anyOf"][0]["enum"]) == RESERVED
    for word in [*DTYPES, *RESERVED]:
        assert f"`{word}`" in PROSE, word


def test_the_limits_of_the_prose_are_those_of_the_code() -> None:
    for limit in (index_module.INDEX_LIMIT, index_module.BLOB_LIMIT, index_module.LIST_LIMIT, index_module.CHANNEL_LIMIT, KEY_LIMIT):
        assert f"{limit:,}" in PROSE, limit


def dump(data: bytes) -> dict[int, str]:
    """offset -> the line of a hexdump."""
    out = {}
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        words = " ".join(piece[i : i + 2].hex() for i in range(0, len(piece), 2))
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
        out[at] = f"{at:08x}: {words:<39}  {shown}".rstrip()
    return out


def test_the_hexdumps_of_the_prose_are_of_the_golden_files() -> None:
    blocks = re.findall(r"`tests/golden/v1/(\S+)`:\n\n```\n(.*?)```", PROSE, re.DOTALL)
    assert len(blocks) >= 2
    for name, text in blocks:
        lines = dump((GOLDEN / name).read_bytes())
        shown = [line for line in text.splitlines() if line != "*"]
        assert len(shown) >= 4
        for line in shown:
            assert lines[int(line[:8], 16)] == line.rstrip(), name


def test_the_row_table_of_the_prose_is_that_of_the_golden_dataset() -> None:
    from mmcompile.format.reader import Reader

    reader = Reader(GOLDEN / "labelled")
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \| `(\w{8})…` \| (\d+) \|$", PROSE, re.MULTILINE)
    expected = []
    for row in range(5):
        shard, local = reader.locate(row)
        digest = reader.path("image", shard).name.split("-")[1]
        expected.append((str(row), str(shard), str(local), digest[:8], str(4096 + 60 * local)))
    assert rows == expected


def test_the_record_tables_of_the_prose_are_those_of_the_golden_files() -> None:
    from mmcompile.format.reader import Reader

    reader = Reader(GOLDEN / "labelled")
    for dtype in (reader.table.dtype, reader.samples(0).dtype):
        for name in dtype.names or ():
            kind, offset = (dtype.fields or {})[name][:2]
            base, shape = kind.subdtype or (kind, ())
            text = f"`{base.str}`".replace("|", r"\|") + (f" \u00d7 {shape[0]}" if shape else "")
            assert re.search(rf"^\| {offset} \| `{name}` \| {re.escape(text)} \|", PROSE, re.MULTILINE), name
