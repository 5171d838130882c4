"""Rows without keys on more than one machine: parts of a plan, and engines, make the bytes of one build, or say in a line why they cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.rowcall import build_rows
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.errors import BuildError, EngineError, OptionError, SourceError
from mmcompile.summary import build_lines
from tests.compiler.builds import age, dataset
from tests.compiler.test_rowbuild import files, rows


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
    for name, n in (("b", 2900), ("a", 700)):
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


# ---------------------------------------------------------------- engines


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """An engine: calls on threads of this process, each of which has a process of ours for its work."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("order", ["source", "shuffled:3"])
@pytest.mark.parametrize("kind", ["npy", "table", "items", "columns", "compiled"])
def test_an_engine_makes_the_bytes_of_a_local_build(tmp_path: Path, threads: ThreadPoolExecutor, kind: str, order: str) -> None:
    source: Any = {"columns": {"x": np.arange(3000.0).reshape(1000, 3)}, "items": Squares()}.get(kind)
    if source is None:
        source = table(tmp_path / "raw") if kind == "table" else array(tmp_path / "raw")
    if kind == "compiled":
        run(source, tmp_path / "plain")
        source = tmp_path / "plain"
    report = run(source, tmp_path / "out", workers=2, engine=threads, order=order)
    local = run(source, tmp_path / "local", order=order)
    assert (report.decoded, report.workers) == (local.decoded, 2)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "local")
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())


def test_what_an_engine_left_is_finished_here(tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = array(tmp_path / "raw"), tmp_path / "out"
    monkeypatch.setattr("mmcompile.compiler.rowbuild.build_rows", _Some())
    with pytest.raises(EngineError, match="tired"):
        run(source, out, workers=1, engine=threads)
    report = run(source, out)
    assert 0 < report.kept < 3000
    run(source, tmp_path / "local")
    assert dataset(out) == dataset(tmp_path / "local")


class _Some:
    """Builds shards 0 to 2 alone."""

    def __call__(self, job: Any, work: Any, look: bool) -> Any:
        if work.number > 2:
            raise EngineError("this machine is tired")
        return build_rows(job, work, look)


def test_rows_that_other_machines_cannot_read_are_refused_in_a_line(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    (tmp_path / "t.csv").write_text("symbol,ts,v\n" + "\n".join(f"{'ab'[i % 3 % 2]},{(i * 7) % 100},{i}" for i in range(100)))
    wishes = SourceOptions(group_by="symbol", order_by="ts")

    class Local(Squares):
        pass

    for source, why in (
        ((Squares()[i] for i in range(10)), "an iterable is read once"),
        (open_source([str(tmp_path / "t.csv")], wishes), "its rows are sorted into files of this machine"),
        (Local(), "Can't pickle"),
        ({"x": np.zeros((9 << 20, 2), np.int32)}, "it holds more than 64 MiB of data"),
    ):
        with pytest.raises(OptionError, match=rf"--engine: the rows cannot be read by other machines \(.*{why}.*\): leave --engine out"):
            run(source, tmp_path / "out", engine=threads)


def test_a_worker_that_does_not_see_raw_or_cannot_load_it_says_which_machine_it_is(tmp_path: Path) -> None:
    source = array(tmp_path / "raw")

    class Gone(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **more: Any) -> Future[Any]:
            source.unlink(missing_ok=True)
            return super().submit(fn, *args, **more)

    with (
        Gone(1) as executor,
        pytest.raises(EngineError, match=r"a worker on \S+ cannot reach the files of .*x.npy \(no such file\); RAW must be there"),
    ):
        run(source, tmp_path / "out", engine=executor)

    class Lost(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **more: Any) -> Future[Any]:
            for path in (tmp_path / "items" / ".build" / "tmp").glob("*/source.pickle"):
                path.write_bytes(b"cnowhere_at_all\nItems\n.")
            return super().submit(fn, *args, **more)

    with Lost(1) as executor, pytest.raises(EngineError, match=r"a worker on \S+ cannot load the dataset \(No module named 'nowhere_at_all'\)"):
        run(Squares(), tmp_path / "items", engine=executor)


def test_other_versions_on_a_worker_are_refused(tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.compiler.rowbuild.row_versions", lambda source: {"mmcompile": "0.0.none"})
    with pytest.raises(EngineError, match=r"a worker on \S+ has mmcompile \S+, this build needs 0.0.none"):
        run(array(tmp_path / "raw"), tmp_path / "out", engine=threads)


def test_bad_rows_and_rows_that_cannot_be_read_are_told_as_in_a_local_build(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    x = np.zeros((500, 2))
    x[123, 1] = 300.0
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(SourceError, match=r"row 123.*x\[1\]: 300.0 cannot be held by uint8"):
        run(tmp_path / "x.npy", tmp_path / "out", RowPreprocess(dtype="uint8"), engine=threads, order="shuffled")
    source = rows(1000, die_at=500)
    with pytest.raises(SourceError, match=r"rows 256 to 512 cannot be read: a worker ended with exit code 3; all else is finished and kept"):
        run(source, tmp_path / "dies", engine=threads)
    report = run(rows(1000), tmp_path / "dies")
    assert (report.decoded, report.kept) == (256, 744)
