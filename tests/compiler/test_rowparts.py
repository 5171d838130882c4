"""Rows without keys on more than one machine: parts of a plan, and engines, make the bytes of one build, or say in a line why they cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.errors import BuildError, OptionError
from mmcompile.summary import build_lines
from tests.compiler.builds import age, dataset
from tests.compiler.test_rowbuild import files


def run(source: Any, out: Path, preprocess: Any = None, *, workers: int = 1, dry_run: bool = False, **more: Any) -> BuildReport:
    return build(source, out, preprocess=preprocess, options=BuildOptions(workers=workers, shard_bytes=1 << 13, **more), dry_run=dry_run)


def array(root: Path, n: int = 3000) -> Path:
    root.mkdir(exist_ok=True)
    np.save(root / "x.npy", np.random.default_rng(0).normal(size=(n, 5)).astype("f4"))
    age(root)
    return root / "x.npy"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests wrote just now counts as written long ago."""
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 0)


class Squares:
    """A dataset whose author says when it changes."""

    mmcompile_version = "1"

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.full(3, i * i, np.float32), i % 7


def table(root: Path) -> Path:
    root.mkdir()
    for name, n in (("b", 900), ("a", 700)):
        (root / f"{name}.csv").write_text("\n".join(["u,v", *(f"{i},{i / 3}" for i in range(n))]))
    return root


@pytest.mark.parametrize("order", ["source", "shuffled:3"])
@pytest.mark.parametrize("kind", ["npy", "table", "items", "compiled"])
def test_parts_and_a_plain_build_make_the_bytes_of_one_build(tmp_path: Path, kind: str, order: str) -> None:
    out = tmp_path / "out"
    source: Any = Squares() if kind == "items" else table(tmp_path / "raw") if kind == "table" else array(tmp_path / "raw")
    if kind == "compiled":
        run(source, tmp_path / "plain")
        source = tmp_path / "plain"
    planned = run(source, out, plan_only=True, order=order)
    assert (planned.plan_only, planned.generation, planned.kept) == (True, None, 0)
    assert not (out / "index.json").exists()
    found = [run(source, out, part=f"{i}/3", order=order) for i in (1, 3)]
    assert [r.part for r in found] == ["1/3", "3/3"]
    assert run(source, out, part="3/3", order=order, dry_run=True).decoded == 0
    left = run(source, out, part="2/3", order=order, dry_run=True)
    assert left.decoded == planned.samples - sum(r.decoded for r in found) > 0
    assert sum(r.sealed for r in found) + left.shards == planned.shards >= 3
    report = run(source, out, order=order)
    assert (report.decoded, report.kept) == (left.decoded, planned.samples - left.decoded)
    run(source, tmp_path / "fresh", order=order)
    assert dataset(out) == dataset(tmp_path / "fresh")
    assert sorted(p.name for p in (out / ".build").iterdir() if p.name in ("plan", "parts")) == []
    assert not list((out / ".build" / "tmp").iterdir())


def test_what_a_plan_and_a_part_say_is_of_rows(tmp_path: Path) -> None:
    source, out = array(tmp_path / "raw"), tmp_path / "out"
    lines = build_lines(run(source, out, plan_only=True))
    assert lines[0].endswith("3,000 samples planned in 7 shards; nothing was built")
    assert not any(line.strip().startswith("geometry") for line in lines)
    lines = build_lines(run(source, out, part="1/2"))
    assert any(line.split() == ["sealed", "3", "shards:", "1,227", "rows", "read"] for line in lines)


def test_a_part_again_reads_nothing_and_publishes_nothing(tmp_path: Path) -> None:
    source, out = array(tmp_path / "raw"), tmp_path / "out"
    run(source, out, plan_only=True)
    run(source, out, part="1/2")
    before = {name: stat for name, stat in files(out).items() if name.startswith("shards/")}
    again = run(source, out, part="1/2")
    assert (again.sealed, again.decoded, again.kept) == (0, 0, again.samples)
    assert {name: stat for name, stat in files(out).items() if name.startswith("shards/")} == before
    assert not (out / "index.json").exists()


def test_a_part_needs_the_plan_its_settings_and_the_rows_that_were_planned(tmp_path: Path) -> None:
    source, out = array(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(BuildError, match="there is no plan here"):
        run(source, out, part="1/2")
    run(source, out, plan_only=True)
    with pytest.raises(OptionError, match=r"planned with other settings \(dtype: None -> float16\)"):
        run(source, out, RowPreprocess(dtype="float16"), part="1/2")
    with pytest.raises(OptionError, match=r"planned with other settings \(order: None -> shuffled:0\)"):
        run(source, out, order="shuffled")
    os.utime(source, ns=(1, 1))
    with pytest.raises(BuildError, match="is not what it was when parts were planned"):
        run(source, out, part="1/2")
    run(source, out)
    run(source, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_plan_over_a_published_dataset_is_forgotten_by_a_build_that_finds_all_done(tmp_path: Path) -> None:
    source, out = array(tmp_path / "raw"), tmp_path / "out"
    first = run(source, out)
    assert run(source, out, plan_only=True).kept == 3000
    assert run(source, out).generation == first.generation
    assert not (out / ".build" / "plan").exists()


def test_rows_of_which_nobody_knows_whether_they_change_have_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"x": np.zeros((100, 3))}
    for options in ({"plan_only": True}, {"part": "1/2"}):
        with pytest.raises(OptionError, match="cannot be told whether its rows change"):
            run(values, tmp_path / "out", **options)
    monkeypatch.setattr("mmcompile.compiler.sources.rows._SETTLED_NS", 1 << 62)
    with pytest.raises(OptionError, match="let files rest"):
        run(array(tmp_path / "raw"), tmp_path / "out", plan_only=True)
    assert not (tmp_path / "out").exists()
