"""Builds over a real dask cluster: a scheduler and workers in processes of their own, which are killed in mid-build."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import broker, clients
from mmcompile.compiler.broker import BrokerExecutor
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.seals import read_seals
from mmcompile.errors import EngineError
from tests.compiler.builds import BROKEN, age, dataset, run, write
from tests.compiler.engines_run import ROOT, environment, local, over, raw_of
from tests.compiler.test_paired import pairs, source

SECONDS = 60.0


class Dask:
    """A scheduler and its workers."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self.log = (folder / "log").open("wb")
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", self.file)
        end = time.monotonic() + SECONDS
        while not (self.file.exists() and self.file.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text())["address"]
        self.workers: list[subprocess.Popen[bytes]] = []

    def add(self) -> None:
        """One more worker, with one thread."""
        options = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        self.workers.append(self._start("worker", self.address, *options))

    def _start(self, *words: Any) -> subprocess.Popen[bytes]:
        call = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *map(str, words[1:])]
        return subprocess.Popen(call, env=environment(), stdout=self.log, stderr=self.log, cwd=self.file.parent)

    def stop(self) -> None:
        for process in [*self.workers, self.scheduler]:
            process.kill()
            process.wait()
        self.log.close()


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[Dask]:
    (tmp_path / "dask").mkdir()
    made = Dask(tmp_path / "dask")
    made.add()
    yield made
    made.stop()


def test_workers_that_are_killed_and_added_in_mid_build_change_no_byte(tmp_path: Path, dask: Dask) -> None:
    raw = raw_of(tmp_path, slow=True)
    dask.add()
    killed: list[int] = []

    def during(progress: Any) -> None:
        if progress.stage == "build" and progress.done >= 5 and not killed:
            killed.append(progress.done)
            dask.workers[0].kill()
            dask.add()

    report = over("dask", dask.address, raw, tmp_path / "out", progress=during)
    assert killed
    assert report.decoded == 30
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())


def test_samples_of_several_files_have_their_sha256_and_hashed_keys(tmp_path: Path, dask: Dask) -> None:
    raw = pairs(tmp_path / "raw", ["a", "b", "c", "d", "e"])
    write(raw, {"masks/c.png": BROKEN})
    (tmp_path / "secret.key").write_bytes(b"0123456789abcdef of a test")
    how: dict[str, Any] = {"sha256": True, "keys": f"hash:{tmp_path / 'secret.key'}"}
    for out, engine in (("away", {"engine": "dask", "address": dask.address}), ("here", {"engine": "local"})):
        workers = None if out == "away" else 1
        run(source(raw), tmp_path / out, rows=1, workers=workers, max_rejects=1, options={**engine, **how})
    assert dataset(tmp_path / "away") == dataset(tmp_path / "here")


def test_a_killed_coordinator_and_a_lost_scheduler_lose_nothing(tmp_path: Path, dask: Dask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ANSWER_S", 3.0)
    raw, out = raw_of(tmp_path, slow=True), tmp_path / "out"
    age(tmp_path / "raw")
    words = ["-m", "tests.compiler.engines_run", "dask", dask.address, str(raw.root), str(out)]
    coordinator = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert coordinator.stdout is not None
    with coordinator.stdout:
        while (line := coordinator.stdout.readline()) and int(line) < 5:
            pass
        coordinator.kill()
        coordinator.wait()
    sealed = len(list(read_seals(out / ".build" / "seals")))
    assert 0 < sealed < len(list((tmp_path / "raw").rglob("*.*")))

    def during(progress: Any) -> None:
        if progress.stage == "build" and progress.done >= 5 and dask.scheduler.poll() is None:
            dask.scheduler.kill()

    with pytest.raises(EngineError, match=rf"the engine is gone \(.*the dask scheduler at {dask.address} .*also with another engine"):
        over("dask", dask.address, raw, out, progress=during)
    assert len(list(read_seals(out / ".build" / "seals"))) > sealed
    report = over("local", None, raw.root, out)
    assert report.kept >= sealed
    assert dataset(out) == local(raw, tmp_path / "local")


def test_rows_of_arrays_are_built_by_workers_of_which_one_is_killed(tmp_path: Path, dask: Dask) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(20_000, 5)).astype("f4"))
    dask.add()
    killed: list[int] = []

    def during(progress: Any) -> None:
        if progress.stage == "rows" and progress.done and not killed:
            killed.append(progress.done)
            dask.workers[0].kill()

    mixed: dict[str, Any] = {"shard_bytes": 1 << 14, "order": "shuffled"}
    options = BuildOptions(engine="dask", address=dask.address, **mixed)
    report = build(tmp_path / "x.npy", tmp_path / "out", options=options, progress=during)
    assert killed
    assert report.decoded == 20_000
    build(tmp_path / "x.npy", tmp_path / "local", options=BuildOptions(workers=1, **mixed))
    assert dataset(tmp_path / "out") == dataset(tmp_path / "local")


def test_a_scheduler_that_is_not_there_is_said_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ANSWER_S", 1.0)
    raw = raw_of(tmp_path)
    with pytest.raises(EngineError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:1 .*start one with `dask scheduler`"):
        over("dask", "tcp://127.0.0.1:1", raw, tmp_path / "out")
    with pytest.raises(EngineError, match=r"no dask scheduler answers at nonsense://x"):
        over("dask", "nonsense://x", raw, tmp_path / "out")
    with pytest.raises(EngineError, match=r"engine dask needs the address of a scheduler: --address tcp://HOST:8786"):
        over("dask", None, raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def hang(*_: Any) -> None:
    time.sleep(3600)


def test_a_client_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ANSWER_S", 0.2)
    monkeypatch.setattr(broker, "_HANG_S", 0.2)
    monkeypatch.setattr(broker, "clients", SimpleNamespace(open_client=hang))
    with pytest.raises(EngineError, match=r"no dask cluster answers at tcp://there:1 \(its client ended\)"):
        BrokerExecutor("dask", "tcp://there:1")


@pytest.mark.parametrize(("engine", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_missing_package_is_an_error_that_names_the_extra(engine: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EngineError, match=rf"pip install 'mmcompile\[{engine}\]'") as caught:
        clients.open_client(engine, "tcp://there:1", 1.0)
    assert caught.value.details["extra"] == engine
