"""Datasets of strangers through MMapShardDataset: whatever the bytes say, a FormatError or rows of the right form, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.index import Split, publish
from mmcompile.format.npy import save_array
from mmcompile.format.reader import Reader
from mmcompile.runtime.dataset import MMapShardDataset
from tests.support import make_dataset

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    1 << 40,
    1 << 53,
    1 << 62,
    1 << 70,
    1.5,
    1e308,
    "",
    "image",
    "label",
    "../../etc/passwd",
    "/dev/zero",
]
HOSTILE += [
    "0" * 32,
    "f" * 32,
    "object",
    "uint8",
    "float64",
    "bool",
    "bfloat16",
    "hwc",
    "chw",
    [],
    {},
    [1, 1, 1],
    [1 << 40] * 3,
    [-1, 3, 3],
    [0.0] * 3,
    [[]],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    make_dataset(root, pixels, [0, 1, 0, 1, 1], shards=(3, 2), normalize=((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)), splits={"train": 3, "val": 2})
    shutil.rmtree(root / "generations")
    return root


def use(root: Path, engine: str) -> None:
    """Everything that a program may do with a dataset."""
    ds = MMapShardDataset(root, "all", engine=engine)
    assert ds.dtype is not None
    n = min(len(ds), 8)
    samples = [ds[i] for i in range(n)]
    assert len(samples) == n
    ds[-n:] if n else ds[[]]
    ds.__getitems__(list(range(n)))
    _ = (ds.targets, ds.stats, ds.classes, ds.class_to_idx, repr(ds))
    for i in range(n):
        ds.source(i)
    if len(ds) < 100:
        with pytest.raises(KeyError):
            ds.find("no such key")


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_nothing_is_allocated_for_rows_that_are_only_claimed(tmp_path: Path, engine: str) -> None:
    make_dataset(tmp_path, np.zeros((2, 3, 4, 4), np.uint8), [0, 1])
    index, shards = Reader(tmp_path).index, tmp_path / "shards"
    table = Reader(tmp_path).table.copy()
    table["rows"] = 1 << 50
    table_hash = save_array(shards, "table", table, shards)
    publish(tmp_path, dataclasses.replace(index, samples=1 << 50, splits=(Split("all", 0, 1 << 50),), table=table_hash))
    for kw in ({}, {"dtype": torch.float32}, {"crop": 2}):
        ds = MMapShardDataset(tmp_path, engine=engine, **kw)
        assert len(ds) == 1 << 50
        for read in (lambda: ds[0], lambda: ds[[5]], lambda: ds[:], lambda: ds.targets, lambda: ds.source(7), lambda: ds.find("x")):  # noqa: B023
            with pytest.raises(CorruptShardError, match=str(shards)):
                read()


def fault(root: Path, engine: str) -> str:
    """What the FormatError says; the folder where there was none."""
    try:
        use(root, engine)
    except FormatError as error:
        return str(error)
    return str(root)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["mmap", "pread"]))
def test_an_index_of_a_stranger_is_a_format_error_or_reads(good: Path, data: st.DataObject, engine: str) -> None:
    document = json.loads((good / "index.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        document = copy.deepcopy(document)
        path = data.draw(st.sampled_from([p for p in places(document) if p]))
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = data.draw(st.sampled_from(HOSTILE))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(good / "shards", root / "shards")
        (root / "index.json").write_text(json.dumps(document))
        assert str(root) in fault(root, engine)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["mmap", "pread"]))
def test_a_file_with_changed_bytes_is_a_format_error_or_reads(good: Path, data: st.DataObject, engine: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(good, root, dirs_exist_ok=True)
        path = data.draw(st.sampled_from(sorted((root / "shards").iterdir())))
        content = bytearray(path.read_bytes())
        head = st.integers(0, 130)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(head | st.integers(4096, len(content) - 1)) if len(content) > 4096 else data.draw(head)
            content[at] = data.draw(st.integers(0, 255))
        end = data.draw(st.sampled_from([len(content), len(content), len(content) - 1, 4096, 0]))
        path.write_bytes(content[:end])
        assert str(root) in fault(root, engine)
