"""Rows without keys on a store: the objects are those of a build into a folder, and nothing that is there is sent or read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcompile
from mmcompile.compiler import rowbuild
from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.errors import BuildError, OptionError, SourceError
from mmcompile.format.describe import describe
from mmcompile.format.index import Split
from mmcompile.format.verify import verify
from mmcompile.summary import build_lines, info_lines
from tests.compiler.builds import dataset
from tests.compiler.test_rowbuild import rows
from tests.s3 import Bucket

pytestmark = pytest.mark.usefixtures("home")


def run(source: Any, out: Any, *, workers: int = 1, dry_run: bool = False, **more: Any) -> BuildReport:
    return build(source, out, options=BuildOptions(workers=workers, shard_bytes=1 << 13, **more), dry_run=dry_run)


def objects(bucket: Bucket) -> dict[str, bytes]:
    """Those of the dataset; nothing else is there but what stays in .build/."""
    found = bucket.files("out")
    assert {name for name in found if name.startswith(".build")} <= {".build/settings.json", ".build/rows"}
    return {name: data for name, data in found.items() if not name.startswith(".build")}


def source_of(n: int = 1000, **more: Any) -> Any:
    groups, splits = (("a", 300), ("b", 700), ("c", n)), (Split("train", 0, 700), Split("test", 700, n))
    return rows(n, groups=groups, stamps=("1", "2", "3"), splits=splits, **more)


@pytest.mark.parametrize("order", ["source", "shuffled:3"])
def test_rows_on_a_store_are_those_on_a_disk(tmp_path: Path, s3_bucket: Bucket, home: Path, order: str) -> None:
    url = s3_bucket.url + "/out"
    foreseen = run(source_of(), url, dry_run=True, order=order)
    assert not s3_bucket.files("out")
    report = run(source_of(), url, workers=2, order=order)
    local = run(source_of(), tmp_path / "out", order=order)
    assert (report.out, report.samples, report.decoded, report.generation) == (url, 1000, 1000, local.generation)
    assert (foreseen.shards, foreseen.write_bytes, foreseen.free_bytes) == (local.shards, foreseen.bytes, None)
    names = set(dataset(tmp_path / "out")) | {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out" / "shards").iterdir()}
    assert objects(s3_bucket) == {name: (tmp_path / "out" / name).read_bytes() for name in names}
    assert not any(path.is_file() for path in home.rglob("*"))
    assert verify(url).ok
    far = mmcompile.MMapShardDataset(url, split="test", cache=mmcompile.Cache(tmp_path / "cache", max_bytes=1 << 30))
    near = mmcompile.MMapShardDataset(tmp_path / "out", split="test")
    assert [far.source(i) for i in range(5)] == [near.source(i) for i in range(5)]


def test_rows_that_are_there_are_neither_read_nor_sent_again(tmp_path: Path, s3_bucket: Bucket) -> None:
    url, source = s3_bucket.url + "/out", source_of()
    first = run(source, url)
    before = s3_bucket.files("out")
    again = run(source, url)
    assert (again.decoded, again.generation) == (0, first.generation)
    assert s3_bucket.files("out") == before
    assert run(source, url, dry_run=True).decoded == 0
    source.arrays["x"][800] = 5
    report = run(replace(source, stamps=("1", "2", "4")), url)
    assert (report.decoded, report.kept) == (300, 700)
    run(source, tmp_path / "clean")
    clean = dataset(tmp_path / "clean")
    assert {name: data for name, data in objects(s3_bucket).items() if name in clean} == clean


def test_a_build_that_failed_goes_on_from_the_shards_that_it_sent(tmp_path: Path, s3_bucket: Bucket, home: Path) -> None:
    url = s3_bucket.url + "/out"
    with pytest.raises(SourceError, match="row 900: no number"):
        run(source_of(fails={900: SourceError("row 900: no number")}), url)
    found = s3_bucket.files("out")
    sealed = sum(name.startswith(".build/seals/") for name in found)
    assert sealed in (1, 2)
    assert "index.json" not in found
    report = run(source_of(), url)
    assert report.kept == (300, 700)[sealed - 1]
    run(source_of(), tmp_path / "clean")
    clean = dataset(tmp_path / "clean")
    assert {name: data for name, data in objects(s3_bucket).items() if name in clean} == clean
    assert not any(path.is_file() for path in home.rglob("*"))


def test_what_needs_a_shared_folder_is_refused(s3_bucket: Bucket) -> None:
    with pytest.raises(OptionError, match="machines share rows of arrays and tables through a folder: leave --engine out"):
        run({"x": np.zeros((3, 2))}, s3_bucket.url + "/out", engine="dask", address="tcp://127.0.0.1:1")
    with pytest.raises(OptionError, match="parts are sealed in a folder that all machines share"):
        run({"x": np.zeros((3, 2))}, s3_bucket.url + "/out", part="1/2")
    assert not s3_bucket.files("out")


def twice(n: int = 1000) -> Any:
    source = source_of(n)
    for array in source.arrays.values():
        array[[10, 20, 800]] = array[5]
    return source


def test_rows_that_repeat_are_found_on_a_store_or_said_not_to_be_looked_for(
    tmp_path: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3_bucket.url + "/out"
    report, local = run(twice(), url), run(twice(), tmp_path / "out")
    assert local.repeats is not None
    assert (local.repeats.duplicates, local.repeats.leaked) == (3, {"test": 1})
    assert report.repeats == local.repeats
    said = "not looked for: what lies at a URL would have to be fetched"
    assert not any(said in line for line in build_lines(report))
    again = run(twice(), url)
    assert again.repeats is None
    assert sum(said in line for line in build_lines(again)) == sum(said in line for line in info_lines(describe(url))) == 1
    assert not any(said in line for line in info_lines(describe(tmp_path / "out")))
    monkeypatch.setattr(rowbuild, "_WHOLE_BYTES", 0)
    assert run(twice(), s3_bucket.url + "/other").repeats is None


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_the_first_gap_is_named_on_a_store_as_on_a_disk(tmp_path: Path, s3_bucket: Bucket, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowbuild, "_WHOLE_BYTES", limit)
    source = source_of()
    source.arrays["x"][600, 1] = np.nan
    with pytest.raises(BuildError) as near:
        build(source, tmp_path / "out", preprocess=RowPreprocess(normalize="auto"))
    with pytest.raises(BuildError) as far:
        build(source, s3_bucket.url + "/out", preprocess=RowPreprocess(normalize="auto"))
    assert "x[b] is nan, and a mean needs numbers" in str(near.value)
    assert str(far.value) == str(near.value).replace(str(tmp_path / "out"), s3_bucket.url + "/out")


@pytest.mark.parametrize("kind", ["generations", "table", "groups"])
def test_the_same_build_mends_what_a_store_lost_of_a_generation(s3_bucket: Bucket, kind: str) -> None:
    url, source = s3_bucket.url + "/out", source_of()
    run(source, url)
    before = objects(s3_bucket)
    name = next(name for name in before if f"/{kind}-" in name or name.startswith(f"{kind}/"))
    for damaged in (None, before[name][:-5], before[name][:-5] + b"?????"):
        if damaged is None:
            s3_bucket.delete(f"out/{name}")
        else:
            s3_bucket.fill({name: damaged}, "out")
        assert run(source, url).decoded == 0
        assert objects(s3_bucket) == before
    assert verify(url).ok
