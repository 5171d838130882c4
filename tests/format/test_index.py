from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError, GenerationError, NotADatasetError
from mmcompile.format import index as index_module
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.index import DTYPES, UNITS, Field, Index, Names, Split, load_classes, load_index, publish
from mmcompile.format.npy import hash_bytes, save_blob
from mmcompile.format.verify import verify
from tests.format.builders import republish, small

PATH = Path("index.json")
names = st.text("abc_1", min_size=1, max_size=5).map(lambda t: "f" + t)
finite = st.floats(-1e6, 1e6)
positive = st.floats(1e-6, 1e6)


@st.composite
def images(draw: st.DrawFn) -> Field:
    layout = draw(st.sampled_from(["chw", "hwc"]))
    channels, height, width = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    normalize = draw(st.none() | st.tuples(*(st.lists(of, min_size=channels, max_size=channels).map(tuple) for of in (finite, positive))))
    return Field(draw(names), draw(st.sampled_from(sorted(DTYPES))), shape, "image", layout, draw(positive), normalize)


@st.composite
def values(draw: st.DrawFn) -> Field:
    dtype, shape = draw(st.sampled_from(sorted(DTYPES))), tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    more: dict[str, Any] = {}
    n = int(np.prod(shape, dtype=int))
    several = st.lists(st.binary(max_size=3).map(os.fsdecode), unique=True, min_size=n, max_size=n).map(lambda found: Names(tuple(found)))
    files = st.text("0123456789abcdef", min_size=32, max_size=32).map(lambda digest: Names(file=digest))
    if len(shape) == 1:
        more["columns"] = draw(st.none() | several | files)
    if dtype.startswith(("int", "uint")):
        more["categories"] = draw(st.none() | several | files)
        more["unit"] = draw(st.none() | st.sampled_from(UNITS))
    if len(shape) <= 1:
        more["normalize"] = draw(st.none() | st.tuples(*(st.lists(of, min_size=n, max_size=n).map(tuple) for of in (finite, positive))))
    return Field(draw(names), dtype, shape, "value", **more)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    fields = draw(
        st.lists(images() | values() | names.map(lambda n: Field(n, "int64", (), "class")), min_size=1, max_size=4, unique_by=lambda f: f.name)
    )
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    ends = np.cumsum([0, *sizes]).tolist()
    samples = ends[-1]
    digest = st.text("0123456789abcdef", min_size=32, max_size=32)
    rejects = draw(st.integers(0, 3))
    keyed = draw(st.booleans())
    return Index(
        fields=tuple(fields),
        splits=tuple(Split(f"s{i}", a, b) for i, (a, b) in enumerate(itertools.pairwise(ends))),
        samples=samples,
        shards=draw(st.integers(1, samples)) if samples else 0,
        table=draw(digest),
        classes=draw(st.none() | st.lists(st.binary(max_size=5).map(os.fsdecode), unique=True, max_size=4).map(tuple)),
        settings=draw(st.dictionaries(names, st.integers() | st.none() | finite, max_size=3)),
        versions=draw(st.dictionaries(names, names, max_size=2)),
        pixel_revision=draw(st.integers(1, 9)),
        rejects=rejects,
        rejects_file=draw(digest) if rejects else None,
        keyed=keyed,
        order="" if keyed else draw(st.sampled_from(["", "mixed", "shuffled:0", "shuffled:123456789012345678"])),
        **draw(st.just({}) | st.builds(dict, groups=st.integers(1, max(1, samples)), groups_file=digest)),
    )


@given(indexes())
def test_an_index_comes_back_and_equal_ones_have_equal_bytes(index: Index) -> None:
    data = index.to_bytes()
    again = Index.from_bytes(data, PATH)
    assert again == index
    assert again.to_bytes() == data
    assert data.endswith(b"}\n")


def test_sizes_and_shapes_of_a_field() -> None:
    hwc = Field("image", "bfloat16", (4, 5, 3), "image", "hwc")
    assert (hwc.stored, hwc.row_bytes, hwc.sample_shape, hwc.channels) == (np.dtype("<u2"), 120, (3, 4, 5), 3)
    label = Field("label", "int64", (), "class")
    assert (label.stored, label.row_bytes, label.sample_shape, label.channels) == (np.dtype("<i8"), 8, (), 0)
    index = Index((hwc, label), (Split("all", 0, 0),), 0, 0, "0" * 32)
    assert index.row_bytes == 128
    assert index.table_dtype().names == ("rows", "image", "label", "samples", "keys")


def test_stored_dtypes_are_little_endian() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.str[0] in "<|", name
        assert name == "bfloat16" or dtype == np.dtype(name)


def classes_in_a_file(root: Path, classes: list[str]) -> Path:
    data = canonical([name_to_json(c) for c in classes])
    digest = save_blob(root / "shards", "classes", [data], root / "shards", ".json")
    republish(root, classes=None, classes_file=digest)
    return root / "shards" / f"classes-{digest}.json"


def test_many_class_names_lie_in_a_file_of_their_own(root: Path) -> None:
    names = [f"class {i}" for i in range(999)] + ["\udcff"]
    path = classes_in_a_file(root, names)
    index, _ = load_index(root)
    assert index.classes is None
    assert load_classes(root, index) == tuple(names)
    assert verify(root).ok
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptShardError, match="does not match its name"):
        load_classes(root, index)
    path.unlink()
    with pytest.raises(CorruptShardError, match="missing"):
        load_classes(root, index)


@pytest.mark.parametrize("data", [b"{}", b'["a","a"]', b"[1]", b"[", b'["a",{"bytes":"a"}]'])
def test_a_class_file_of_a_stranger_is_checked(root: Path, data: bytes) -> None:
    digest = save_blob(root / "shards", "classes", [data], root / "shards", ".json")
    republish(root, classes=None, classes_file=digest)
    with pytest.raises(FormatError, match=f"classes-{digest}"):
        load_classes(root, load_index(root)[0])
    assert [p.what for p in verify(root).problems] == ["classes"]


def test_an_index_that_was_changed_after_it_was_published_is_refused(root: Path) -> None:
    data = (root / "index.json").read_bytes()
    (root / "index.json").write_bytes(data.replace(b'"pixel_revision":1', b'"pixel_revision":2'))
    with pytest.raises(FormatError, match="changed after it was published"):
        load_index(root)
    (root / "index.json").write_bytes(data)
    generation = hash_bytes(data)
    shutil.rmtree(root / "generations")
    assert load_index(root)[1] == generation


def test_a_generation_is_the_one_asked_for_or_an_error(root: Path) -> None:
    index, first = load_index(root)
    second = small(root, seed=1)
    assert load_index(root) != (index, first)
    assert load_index(root, first) == (index, first)
    path = root / "generations" / f"{first}.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(FormatError, match="does not match its name"):
        load_index(root, first)
    path.unlink()
    with pytest.raises(GenerationError, match=f"gone.*{second}"):
        load_index(root, first)


def test_publishing_the_same_again_is_the_same_generation(root: Path) -> None:
    index, name = load_index(root)
    before = sorted(p.name for p in root.rglob("*"))
    assert publish(root, index) == name
    assert sorted(p.name for p in root.rglob("*")) == before


def test_an_index_just_within_the_limit_is_written_and_read(root: Path) -> None:
    index, _ = load_index(root)
    room = index_module.INDEX_LIMIT - len(dataclasses.replace(index, settings={"x": ""}).to_bytes())
    republish(root, settings={"x": "y" * room})
    assert (root / "index.json").stat().st_size == index_module.INDEX_LIMIT
    load_index(root)
    with pytest.raises(FormatError, match="the limit is"):
        republish(root, settings={"x": "y" * (room + 1)})


def test_a_folder_without_an_index_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError) as caught:
        load_index(tmp_path)
    assert isinstance(caught.value, FileNotFoundError)
