"""Promise 2: kill it anywhere.  The processes are real, and so are the signals; then the commit points one by one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mmcompile.errors import BuildError
from tests.compiler import killed
from tests.compiler.builds import dataset, inline, make_raw, picture, run, write
from tests.compiler.planted import Planted, plant
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
KILLS = 24


def start(*args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.compiler.killed", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def fork(raw: Path, out: Path) -> tuple[ForkServerProcess, Connection]:
    """A build that has begun, in a session of its own, and what it says."""
    process, said = forked(killed.in_session, raw, out)
    said.recv()
    return process, said


def session(leader: int) -> list[int]:
    """Running processes of a session."""
    out = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(sid) == leader and state not in "ZX":
            out.append(int(path.parent.name))
    return out


def wait_for_session_to_end(leader: int, limit_s: float = 30.0) -> list[int]:
    end = time.monotonic() + limit_s
    while (left := session(leader)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def drain(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate()


def fresh(raw: Path) -> dict[str, bytes]:
    """The dataset of an unbroken build into a new folder."""
    clean = raw.parent / "fresh"
    shutil.rmtree(clean, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        run(raw, clean, rows=1)
    return dataset(clean)


def alter(raw: Path, round: int) -> None:
    """New files, a changed one, one removed and a class renamed."""
    write(raw, {f"cat/new {round}-{i}.png": picture(10_000 * round + i) for i in range(4)})
    write(raw, {"dog/0.png": picture(20_000 + round)})
    folders = sorted(p for p in raw.iterdir() if p.name.startswith("dog ") or p.name == "moved")
    (folders[0] if folders else raw / "dog").rename(raw / f"dog {round}")
    write(raw, {"dog/0.png": picture(30_000 + round)})


def test_killed_at_random_moments_it_ends_with_the_bytes_of_an_unbroken_build(tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=8), tmp_path / "out"
    chance = random.Random(0)
    first, said = fork(raw, tmp_path / "timed")
    took = min(said.recv(), 1.5)  # on a busy machine the first run tells little: most kills must come before the end
    first.join()
    wanted, published = fresh(raw), {}
    kills = half_done = rounds = 0
    while kills < KILLS:
        process, said = fork(raw, out)
        assert process.pid is not None
        process.join(chance.uniform(0, took))
        if process.exitcode is None:
            kills += 1
            if kills % 3:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()  # its workers are left to notice
            process.join()
            assert not wait_for_session_to_end(process.pid)
            half_done += (out / ".build" / "tmp").is_dir() and any((out / ".build" / "tmp").iterdir())
            if not (out / "index.json").exists():
                assert not published
                continue
        else:
            assert process.exitcode == 0
        found = dataset(out)
        assert found in (wanted, published)
        if found == wanted:  # the next generation
            published, rounds = found, rounds + 1
            alter(raw, rounds)
            wanted = fresh(raw)
    last, said = fork(raw, out)
    last.join()
    assert last.exitcode == 0
    assert dataset(out) == wanted
    assert half_done >= KILLS // 3  # the moments were not all before or after the work
    assert not list((out / ".build" / "tmp").iterdir())
    assert not [p for p in out.rglob("*") if p.name.endswith(".tmp")]
    assert not list((out / ".build" / "seals").iterdir())
    assert last.pid is not None
    assert not wait_for_session_to_end(last.pid)


def test_ctrl_c_ends_promptly_leaves_no_process_and_the_next_run_goes_on(tmp_path: Path) -> None:
    raw, out, notes = tmp_path / "raw", tmp_path / "out", tmp_path / "notes"
    notes.mkdir()
    write(raw, {f"a/{i:03d}.png": plant(i, "slow") for i in range(40)})
    write(raw, {f"b/{i:03d}.png": plant(100 + i, "hang") for i in range(3)})
    process = start(raw, out, notes)
    assert say(process) == "begin"
    seals = out / ".build" / "seals"
    while process.poll() is None and not (seals.is_dir() and len(list(seals.glob("*.json"))) > 3):
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = drain(process)
    assert time.monotonic() - began < 20  # a file may take 60
    assert output.split() == ["interrupted"]
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
    assert not wait_for_session_to_end(process.pid)
    assert not list((out / ".build" / "tmp").iterdir())
    sealed = len(list(seals.glob("*.json")))
    assert sealed > 3
    source = Planted(str(raw), parent=os.getpid(), notes=str(notes))
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        report = run(source, out, rows=1)
    assert report.kept >= sealed
    assert report.decoded == 43 - report.kept
    assert dataset(out) == fresh(raw)


class Cut(BaseException):
    """The power goes."""


class Faulty:
    """A system call whose call number `at` fails: with an error, or as the power goes, before or after it had its effect."""

    def __init__(self, real: Callable[..., Any], at: int, how: str) -> None:
        self.real, self.at, self.how, self.calls = real, at, how, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > self.at and self.how != "error":
            raise Cut  # what tries to clean up after a power cut does not
        if self.calls != self.at:
            return self.real(*args, **kwargs)
        if self.how == "error":
            raise OSError(5, "Input/output error")
        if self.how == "after":
            self.real(*args, **kwargs)
        raise Cut


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(raw, out, bytes of the first generation, bytes wanted): one generation is published, another is due."""
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw", per_class=1), tmp_path / "out"
    write(raw, {"dog/bad.png": b"bad"})
    options: dict[str, Any] = {"rows": 2, "max_rejects": 1}
    run(raw, out, **options)
    published = dataset(out)
    write(raw, {"cat/new.png": picture(99), "dog/0.png": picture(98)})
    run(raw, tmp_path / "fresh", **options)
    return raw, out, options, published, dataset(tmp_path / "fresh")


CALLS = [(name, how) for name in ("replace", "fsync", "pwrite", "unlink", "mkdir") for how in ("before", "error")]


@pytest.mark.parametrize(("name", "how"), [*CALLS, ("replace", "after"), ("unlink", "after")])
def test_stopped_at_any_commit_point_the_old_dataset_or_the_new_one_is_there_and_the_next_run_ends_right(
    tmp_path: Path, tree: Any, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    raw, out, options, published, wanted = tree
    real = getattr(os, name)
    stopped = at = 0
    while True:
        at += 1
        trial = tmp_path / f"trial-{at}"
        shutil.copytree(out, trial)
        faulty = Faulty(real, at, how)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, faulty)
            try:
                run(raw, trial, **options)
            except (BuildError, Cut):
                stopped += 1
        assert dataset(trial) in (published, wanted)
        run(raw, trial, **options)
        assert dataset(trial) == wanted
        assert not [p for p in trial.rglob("*") if p.name.endswith(".tmp")]
        shutil.rmtree(trial)
        if faulty.calls < at:  # there is no such call any more
            break
    assert stopped >= 1
