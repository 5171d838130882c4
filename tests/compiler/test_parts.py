"""Parts: each builds its shards by itself from one saved plan, and a plain build publishes what all of them sealed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmcompile.compiler import apart
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.parts import PartNumber
from mmcompile.compiler.plan import ShardTask
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.seals import read_seals
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import BuildError, EngineError, OptionError, SourceError
from mmcompile.format.lock import Lock
from tests.compiler.builds import BROKEN, ROW_BYTES, SMALL, age, dataset, inline, make_raw, picture, run, snapshot, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def plan(raw: Any, out: Path, **more: Any) -> Any:
    return run(raw, out, options={"plan_only": True, **more.pop("options", {})}, **more)


def part(raw: Any, out: Path, which: str, **more: Any) -> Any:
    return run(raw, out, options={"part": which, **more.pop("options", {})}, **more)


def test_parts_and_a_plain_build_make_the_bytes_of_one_build(tmp_path: Path) -> None:
    raw, out = write(make_raw(tmp_path / "raw", per_class=12), {"cat/bad.png": BROKEN}), tmp_path / "out"
    age(raw)
    planned = plan(raw, out)
    assert (planned.plan_only, planned.part, planned.generation, planned.samples) == (True, None, None, 25)
    found = [part(raw, out, f"{i}/3") for i in range(3)]
    assert [r.part for r in found] == ["0/3", "1/3", "2/3"]
    assert sum(r.shards for r in found) == sum(r.sealed for r in found) == planned.shards > 3
    assert (sum(r.decoded for r in found), sum(r.rejects for r in found)) == (24, 1)
    assert not (out / "index.json").exists()
    report = run(raw, out, max_rejects=1)
    assert (report.decoded, report.kept, report.part, report.sealed) == (0, 24, None, 0)
    run(raw, tmp_path / "fresh", max_rejects=1)
    assert dataset(out) == dataset(tmp_path / "fresh")
    assert sorted(p.name for p in (out / ".build").iterdir() if p.name in ("plan", "parts")) == []


def test_a_plain_build_finishes_what_no_part_has_built(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=12), tmp_path / "out"
    age(raw)
    plan(raw, out)
    sealed = part(raw, out, "1/2")
    report = run(raw, out)
    assert (report.kept, report.decoded) == (sealed.decoded, 24 - sealed.decoded)
    run(raw, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_part_that_is_run_again_seals_nothing_twice(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    plan(raw, out)
    first = part(raw, out, "2/2")
    before = snapshot(out / "shards")
    again = part(raw, out, "0/2")
    assert (again.sealed, again.kept, again.decoded) == (0, first.decoded, 0)
    assert snapshot(out / "shards") == before


def test_a_part_needs_no_settings_and_takes_those_of_the_plan(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    source = FolderSource(str(raw), exclude=("dog/*",))
    plan(source, out)
    assert build(raw, out, options=BuildOptions(part="0/1")).decoded == 6
    assert run(source, out).decoded == 0
    run(source, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preprocess": Preprocess(crop=9)}, "but crop: 8 -> 9"),
        ({"rows": 5}, "but shard_bytes: "),
        ({"exclude": ("cat/0.png",)}, "but source.exclude: "),
    ],
)
def test_other_settings_than_the_plan_has_are_refused_and_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    plan(raw, out)
    source = FolderSource(str(raw), exclude=given.pop("exclude")) if "exclude" in given else raw
    with pytest.raises(OptionError, match=said + r".* was given; leave the settings out, or run --plan-only again"):
        part(source, out, "0/2", **given)
    assert not list(read_seals(out / ".build" / "seals"))


def test_settings_that_are_given_again_are_those_of_the_plan_where_a_sample_is_of_several_files(tmp_path: Path) -> None:
    out, given = tmp_path / "out", Preprocess(crop=6)
    write(tmp_path / "raw", {f"{folder}/{i}.png": picture(i) for folder in ("left", "right") for i in range(3)})
    plan(tmp_path / "raw", out, preprocess=given)
    for which in ("0/2", "1/2"):
        part(tmp_path / "raw", out, which, preprocess=given)
    assert run(tmp_path / "raw", out, preprocess=given).fields == ("left", "right")
    plan(tmp_path / "raw", out, preprocess=Preprocess(crop=5))
    with pytest.raises(OptionError, match="a part is built as it was planned, but crop: "):
        part(tmp_path / "raw", out, "0/2", preprocess=given)


def test_without_a_plan_a_part_says_what_to_run_and_makes_nothing(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(BuildError, match=r"there is no plan here .*; run the same command with --plan-only in place of --part first"):
        part(raw, out, "0/2")
    assert not out.exists()
    plan(raw, out)
    damaged = (out / ".build" / "plan").read_bytes()[:-1]
    (out / ".build" / "plan").write_bytes(damaged)
    with pytest.raises(BuildError, match="there is no plan here"):
        part(raw, out, "0/2")


def test_a_part_keeps_what_other_parts_have_in_hand(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    plan(raw, out)
    others = write(out / ".build", {"tmp/part-1-of-2/x/unfinished": b"1", "tmp/part-0-of-2/x/mine": b"2", "stat-cache": b"3"})
    part(raw, out, "0/2")
    assert (others / "tmp" / "part-1-of-2" / "x" / "unfinished").read_bytes() == b"1"
    assert not (others / "tmp" / "part-0-of-2").exists()
    assert (others / "stat-cache").read_bytes() == b"3"


def test_parts_run_beside_each_other_but_not_beside_themselves_or_a_build(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    plan(raw, out)
    seen: list[str] = []

    def during(progress: Any) -> None:
        if progress.stage != "build" or seen:
            return
        seen.append("once")
        assert part(raw, out, "1/2").sealed
        with pytest.raises(BuildError, match=rf"another run of part 0-of-2 is at work here \(process {os.getpid()} on "):
            part(raw, out, "2/2")
        for other in (plan, run):
            with pytest.raises(BuildError, match=r"another run is at work here \(parts of a build\)"):
                other(raw, out)

    part(raw, out, "0/2", progress=during)
    assert seen
    with Lock(out / ".build" / "lock"), pytest.raises(BuildError, match=rf"another run is at work here \(process {os.getpid()} on "):
        part(raw, out, "0/2")
    run(raw, out)
    run(raw, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_files_that_cannot_be_read_are_named_and_the_rest_of_the_part_is_sealed(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    plan(raw, out)
    (raw / "cat" / "0.png").unlink()
    with pytest.raises(SourceError, match=r"1 file could not be read or settled \('cat/0.png': .*all else of part 0/1 is sealed") as caught:
        part(raw, out, "0/1")
    assert caught.value.details["failed"] == ["cat/0.png"]
    report = run(raw, out)
    assert (report.samples, report.decoded + report.copied + report.kept) == (11, 11)
    assert report.decoded == 0
    run(raw, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_what_changed_after_the_plan_is_seen_by_the_build_that_publishes(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    plan(raw, out)
    write(raw, {"cat/0.png": picture(99), "dog/new.png": picture(98)})
    part(raw, out, "0/1")
    run(raw, out)
    run(raw, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_part_copies_rows_of_what_is_published(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    run(raw, out)
    (raw / "dog").rename(raw / "wolf")
    plan(raw, out)
    found = [part(raw, out, f"{i}/2") for i in range(2)]
    assert (sum(r.decoded for r in found), sum(r.copied for r in found) > 0) == (0, True)
    assert run(raw, out).decoded == 0
    run(raw, tmp_path / "fresh")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_plan_for_what_is_published_is_removed_by_the_next_build(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    run(raw, out)
    plan(raw, out)
    assert part(raw, out, "0/1").sealed == 0
    run(raw, out)
    assert not (out / ".build" / "plan").exists()
    assert not (out / ".build" / "parts").exists()


def test_a_machine_with_other_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(apart, "versions_here", lambda _: {"pillow": "1.0"})
        plan(raw, out)
    with pytest.raises(EngineError, match=r"has pillow \S+, this build needs 1\.0; on that machine: pip install pillow==1\.0"):
        part(raw, out, "0/2")


@pytest.mark.parametrize("published", [False, True])
def test_a_dry_run_of_a_part_foresees_its_shards_with_the_settings_of_the_plan(tmp_path: Path, published: bool) -> None:
    raw, out = write(make_raw(tmp_path / "raw", per_class=12), {"cat/bad.png": BROKEN}), tmp_path / "out"
    age(raw)
    if published:
        run(raw, out, max_rejects=1)
        (raw / "dog").rename(raw / "wolf")
        age(raw)
    plan(raw, out)
    for which in ("1/3", "2/3", "0/3"):
        before, files = snapshot(tmp_path), set((out / "shards").iterdir())
        foreseen = build(raw, out, options=BuildOptions(part=which), dry_run=True)
        assert snapshot(tmp_path) == before
        found = part(raw, out, which)
        assert (foreseen.part, foreseen.dry_run, foreseen.shards, foreseen.shape) == (which, True, found.shards, found.shape)
        unknown = found.rejects - foreseen.rejects  # a bad image is known by then only if it was met before
        assert (foreseen.decoded - unknown, foreseen.copied, foreseen.kept) == (found.decoded, found.copied, found.kept)
        if not unknown:
            assert foreseen.samples == found.samples
            assert foreseen.write_bytes == sum(path.stat().st_size for path in set((out / "shards").iterdir()) - files)
        again = build(raw, out, options=BuildOptions(part=which), dry_run=True)
        assert (again.kept, again.decoded, again.copied, again.write_bytes) == (found.samples, 0, 0, 0)
        assert again.bytes >= found.samples * ROW_BYTES


def test_a_dry_run_of_a_part_is_refused_as_the_part_is(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(BuildError, match=r"there is no plan here .*; run the same command with --plan-only in place of --part first"):
        part(raw, out, "0/2", dry_run=True)
    assert not out.exists()
    plan(raw, out)
    with pytest.raises(OptionError, match="but crop: 8 -> 9 was given; leave the settings out"):
        part(raw, out, "0/2", preprocess=Preprocess(crop=9), dry_run=True)
    with pytest.raises(OptionError, match="part must be I/N"):
        part(raw, out, "3/2", dry_run=True)


def test_a_part_whose_build_folder_was_deleted_says_so(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    age(raw)

    def delete(progress: Any) -> None:
        if progress.stage == "build" and (out / ".build").exists():
            shutil.rmtree(out / ".build")

    def delete_early(progress: Any) -> None:
        if progress.stage == "choose":
            shutil.rmtree(out / ".build")

    out = tmp_path / "part"
    plan(raw, out)
    with pytest.raises(BuildError, match=r"\.build was removed while the build ran"):
        part(raw, out, "0/1", progress=delete)
    out = tmp_path / "plan"
    with pytest.raises(BuildError, match=r"\.build was removed while the build ran"):
        plan(raw, out, preprocess=None, progress=delete_early)


@pytest.mark.parametrize("text", ["", "3", "/", "1/", "/4", "-1/4", "5/4", "0/0", "1/2/3", "a/b", "1/4 ", "1.0/4", "\u0661/4", "1/9999999999999"])
def test_what_is_no_part_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(OptionError, match="part must be I/N with 0 <= I <= N, as in 3/16, found "):
        part(make_raw(tmp_path / "raw"), tmp_path / "out", text)


def test_numbers_from_0_and_from_1_cover_each_shard_once() -> None:
    tasks = [ShardTask(i, i, i + 1, str(i)) for i in range(10)]
    for numbers in (range(3), range(1, 4)):
        assert sorted(t.number for i in numbers for t in PartNumber.parse(f"{i}/3").of(tasks)) == list(range(10))


def test_options_that_go_with_no_part_are_refused() -> None:
    from mmcompile.compiler.driver import BuildOptions

    for more in ({"plan_only": True}, {"engine": "dask"}, {"engine": ThreadPoolExecutor(1)}):
        with pytest.raises(OptionError, match="leave --engine and --plan-only out"):
            BuildOptions(part="1/2", **more)  # type: ignore[arg-type]


def test_parts_are_for_a_shared_folder() -> None:
    for more in ({"plan_only": True}, {"part": "1/2"}):
        with pytest.raises(OptionError, match="with a URL for OUT let an engine spread the work"):
            run("raw", "memory://out", SMALL, options=more)  # type: ignore[arg-type]


def command(*words: Any) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "mmcompile", "build", *map(str, words)]
    return subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_commands_that_are_printed_do_it_also_after_a_kill(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=30), tmp_path / "out"
    age(raw)
    settings = ["--crop", "8", "--shard-bytes", "2000", "--workers", "1"]
    planned = command(raw, out, *settings, "--plan-only")
    said = planned.communicate()[0].splitlines()
    assert planned.returncode == 0
    assert "nothing was built" in said[0]
    one = next(line for line in said if "--part" in line)
    count = int(one.split("$SLURM_ARRAY_TASK_ID/")[1].rstrip('"'))
    killed = command(raw, out, *settings, "--part", f"0/{count}")
    assert killed.stdout is not None
    while not list(read_seals(out / ".build" / "seals")) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    words = one.split(" build ")[1].replace(f'"$SLURM_ARRAY_TASK_ID/{count}"', f"{count}/{count}").split()
    done = command(*words)
    last = done.communicate()[0].splitlines()
    assert done.returncode == 0
    assert "nothing was published" in last[0]
    published = command(*said[-1].split(" build ")[1].split())
    published.communicate()
    assert published.returncode == 0
    plain = command(raw, tmp_path / "fresh2", *settings)
    plain.communicate()
    assert dataset(out) == dataset(tmp_path / "fresh2")


def test_a_plain_build_with_other_settings_than_the_plan_is_refused(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=6), tmp_path / "out"
    plan(raw, out)
    part(raw, out, "0/1")
    before = snapshot(out)
    with pytest.raises(OptionError, match=r"planned with other settings \(crop: 8 -> 6\): give those of --plan-only"):
        run(raw, out, replace(SMALL, crop=6))
    assert [v for k, v in snapshot(out).items() if "/seals/" in k] == [v for k, v in before.items() if "/seals/" in k]
    assert len(list(read_seals(out / ".build" / "seals"))) > 0
    plan(raw, out, preprocess=replace(SMALL, crop=6))
    assert run(raw, out, replace(SMALL, crop=6)).decoded == 12


def test_parts_of_a_shuffled_build_have_its_order_without_being_told(tmp_path: Path) -> None:
    raw, out, mixed = make_raw(tmp_path / "raw", per_class=12), tmp_path / "out", {"order": "shuffled:7"}
    age(raw)
    plan(raw, out, options=mixed)
    part(raw, out, "0/2")
    part(raw, out, "1/2", options=mixed)
    with pytest.raises(OptionError, match="order: shuffled:7 -> shuffled:8"):
        part(raw, out, "1/2", options={"order": "shuffled:8"})
    with pytest.raises(OptionError, match="order: shuffled:7 -> None"):
        run(raw, out)
    report = run(raw, out, options=mixed)
    assert (report.decoded, report.kept) == (0, 24)
    run(raw, tmp_path / "fresh", options=mixed)
    assert dataset(out) == dataset(tmp_path / "fresh")
