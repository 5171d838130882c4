"""Builds over a real ray cluster on this machine, whose workers, and at last whose head, are killed in mid-build."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmcompile.compiler import broker
from mmcompile.errors import EngineError
from tests.compiler.builds import age, dataset
from tests.compiler.engines_run import ROOT, environment, local, over, raw_of


class Ray:
    """A cluster in a process of its own, as this one would end with it."""

    def __init__(self) -> None:
        env = {**environment(), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        call = [sys.executable, "-m", "tests.compiler.ray_cluster"]
        self.process = subprocess.Popen(call, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def server(self, name: str) -> list[int]:
        """The process of the cluster that has this in its command line."""
        return [pid for pid, parent, line in table() if parent == self.process.pid and name in line]

    def stop(self) -> None:
        ours = [pid for pid, parent, _ in table() if parent == self.process.pid]
        self.process.communicate()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def table() -> list[tuple[int, int, str]]:
    """(process id, that of its parent, command line) of all processes."""
    out = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            out.append((int(path.name), parent, (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")))
    return out


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = Ray()
        yield made
        made.stop()


def test_a_worker_that_is_killed_in_mid_build_changes_no_byte(tmp_path: Path, ray: Ray) -> None:
    raw = raw_of(tmp_path, slow=True)
    killed: list[int] = []

    def during(progress: Any) -> None:
        if progress.stage == "build" and progress.done >= 5 and not killed:
            killed.extend([pid for pid, _, line in table() if line.startswith("ray::run_pickled")][:1])
            for process in killed:
                os.kill(process, signal.SIGKILL)

    report = over("ray", ray.address, raw, tmp_path / "out", progress=during)
    assert killed
    assert (report.decoded, report.workers) == (30, 2)
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())


def test_what_was_stopped_over_ray_is_finished_here(tmp_path: Path, ray: Ray) -> None:
    raw, out = raw_of(tmp_path), tmp_path / "out"
    age(tmp_path / "raw")

    def stop(progress: Any) -> None:
        if progress.stage == "build" and progress.done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over("ray", ray.address, raw, out, progress=stop)
    report = over("local", None, raw, out)
    assert report.kept >= 5
    assert dataset(out) == local(raw, tmp_path / "local")


def test_a_cluster_that_is_not_there_is_said_within_its_time(tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ANSWER_S", 2.0)
    with pytest.raises(EngineError, match=r"no ray cluster answers at 127\.0\.0\.1:1 \("):
        over("ray", "127.0.0.1:1", raw_of(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_lost_ends_the_run_and_not_this_process(tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ANSWER_S", 2.0)
    raw, out = raw_of(tmp_path, slow=True), tmp_path / "out"
    age(tmp_path / "raw")

    def during(progress: Any) -> None:
        if progress.stage == "build" and progress.done >= 5:
            for process in ray.server("gcs_server"):
                os.kill(process, signal.SIGKILL)

    with pytest.raises(EngineError, match=r"the engine is gone \(.*also with another engine"):
        over("ray", ray.address, raw, out, progress=during)
    report = over("local", None, raw.root, out)
    assert report.kept >= 5
    assert dataset(out) == local(raw, tmp_path / "local")
