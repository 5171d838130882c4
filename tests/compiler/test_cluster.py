"""A build over any Executor: the bytes of a local build, whatever is lost on the way.  Dask and Ray have tests of their own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import cluster, shardcall
from mmcompile.compiler.plan import ShardTask, task_id
from mmcompile.compiler.run import Counts, ShardWork
from mmcompile.compiler.seals import Seal, read_seals
from mmcompile.compiler.shardcall import ShardDone
from mmcompile.compiler.sources import STAT_DTYPE, labelled
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.task import Job
from mmcompile.errors import BuildError, DecodeError, EngineError, SourceError
from tests.compiler.builds import BROKEN, age, dataset, inline, keys, make_raw, run, write
from tests.compiler.planted import Planted, plant
from tests.compiler.test_staging import published
from tests.s3 import Bucket


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_idle_processes() -> Any:
    yield
    for executor in list(shardcall._idle):
        shardcall._end(executor)


def over(executor: Executor, raw: Any, out: Path, **more: Any) -> Any:
    return run(raw, out, options={"engine": executor, **more.pop("options", {})}, workers=more.pop("workers", 2), **more)


def local(raw: Any, out: Path, **more: Any) -> dict[str, bytes]:
    """The dataset of a local build in one process."""
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        run(raw, out, **more)
    return dataset(out)


class Losing(Executor):
    """Two threads; `lose(number)` says what becomes of a call instead: an exception as an engine has them, or None."""

    def __init__(self, lose: Callable[[int], Exception | None]) -> None:
        self.workers = 2
        self.calls = 0
        self._lose, self._threads = lose, ThreadPoolExecutor(2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        error = self._lose(self.calls)
        if error is None:
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def processes(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, processes])
def test_the_bytes_and_the_report_are_those_of_a_local_build(tmp_path: Path, kind: Callable[[int], Executor]) -> None:
    raw = write(make_raw(tmp_path / "raw"), {"cat/bad.png": BROKEN, "dog/bad.jpg": BROKEN})
    with kind(2) as executor:
        report = over(executor, raw, tmp_path / "out", max_rejects=2)
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        wanted = run(raw, tmp_path / "local", max_rejects=2, workers=2)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "local")
    same = ("samples", "rejects", "shards", "decoded", "copied", "kept", "reject_reasons", "generation", "counts", "workers")
    assert {name: getattr(report, name) for name in same} == {name: getattr(wanted, name) for name in same}
    assert not list((tmp_path / "out" / ".build" / "tmp").iterdir())


def test_a_rebuild_over_an_executor_copies_and_keeps_what_a_local_one_does(tmp_path: Path, threads: Executor) -> None:
    raw = make_raw(tmp_path / "raw", per_class=9)
    age(raw)
    over(threads, raw, tmp_path / "out")
    local(raw, tmp_path / "local")
    (raw / "dog").rename(raw / "wolf")
    make_raw(raw, per_class=1, classes=("bird",), seed=77)
    again = over(threads, raw, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        wanted = run(raw, tmp_path / "local")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "local")
    assert (again.decoded, again.copied, again.kept) == (wanted.decoded, wanted.copied, wanted.kept)
    assert again.copied > 0


def test_a_picture_that_crashes_its_decoder_is_a_reject_and_touches_no_worker_of_the_engine(tmp_path: Path, threads: Executor) -> None:
    raw, notes = write(make_raw(tmp_path / "raw"), {"cat/3x.png": plant(1, "segv")}), tmp_path / "notes"
    report = over(threads, Planted(str(raw), parent=os.getpid(), notes=str(notes)), tmp_path / "out", max_rejects=1)
    assert report.reject_reasons == {"decoder-crash": 1}
    assert report.samples == 12


def test_a_file_that_cannot_be_read_ends_as_in_a_local_build(tmp_path: Path, threads: Executor) -> None:
    raw, notes = write(make_raw(tmp_path / "raw"), {"cat/3x.png": plant(1, "kill")}), tmp_path / "notes"
    with pytest.raises(SourceError, match=r"1 file could not be read or settled \('cat/3x.png': its worker was killed") as caught:
        over(threads, Planted(str(raw), parent=os.getpid(), notes=str(notes)), tmp_path / "out")
    assert caught.value.details["keys"] == ["cat/3x.png"]
    (raw / "cat" / "3x.png").unlink()
    assert over(threads, raw, tmp_path / "out").decoded == 0
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_too_many_rejects_end_as_in_a_local_build(tmp_path: Path, threads: Executor) -> None:
    raw = write(make_raw(tmp_path / "raw"), {"cat/bad.png": BROKEN})
    with pytest.raises(DecodeError, match="1 of 13 images was rejected"):
        over(threads, raw, tmp_path / "out")
    assert over(threads, raw, tmp_path / "out", max_rejects=1).decoded == 0


# ---------------------------------------------------------------- lost calls


def test_lost_calls_are_made_again(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    executor = Losing(lambda call: RuntimeError("the worker is gone") if call % 2 else None)
    assert over(executor, raw, tmp_path / "out").decoded == 12
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_a_shard_that_is_lost_every_time_is_named_and_all_else_is_kept(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")

    class Doomed(Losing):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.doomed = b"cat/0.png" in args[0]
            return super().submit(fn, *args, **kwargs)

    executor = Doomed(lambda _: MemoryError("worker 7 died\nof hunger") if executor.doomed else None)
    with pytest.raises(EngineError, match=r"begins with 'cat/0\.png' 4 times \(MemoryError: worker 7 died\); all that is finished is kept") as caught:
        over(executor, raw, tmp_path / "out")
    assert caught.value.details["key"] == "cat/0.png"
    with ThreadPoolExecutor(1) as threads:
        report = over(threads, raw, tmp_path / "out")
    assert 0 < report.decoded <= 6 <= report.kept
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_an_engine_whose_workers_can_do_nothing_is_found_out_at_once(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", per_class=40)
    executor = Losing(lambda _: ModuleNotFoundError("No module named 'mmcompile'"))
    with pytest.raises(EngineError, match="ModuleNotFoundError: No module named 'mmcompile'"):
        over(executor, raw, tmp_path / "out")
    assert executor.calls <= 2 * 4


def test_an_engine_that_takes_no_more_calls_ends_the_run_and_another_one_goes_on(tmp_path: Path, threads: Executor) -> None:
    raw = make_raw(tmp_path / "raw")

    def gone(call: int) -> None:
        if call > 2:
            raise RuntimeError("cannot schedule new futures")

    with pytest.raises(EngineError, match=r"the engine is gone \(RuntimeError: cannot schedule new futures\); the same command goes on"):
        over(Losing(gone), raw, tmp_path / "out")
    report = over(threads, raw, tmp_path / "out")
    assert report.kept > 0
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


@dataclass(frozen=True)
class Deadly(FolderSource):
    """Ends the worker of the engine that looks at it, once."""

    note: str = ""

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        if multiprocessing.parent_process() is not None and not os.path.exists(self.note):
            Path(self.note).touch()
            os._exit(9)
        return super().stat(key)


def test_a_process_pool_that_broke_ends_the_run_and_a_new_one_goes_on(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    with processes(1) as executor, pytest.raises(EngineError, match=r"the engine is gone \(BrokenProcessPool: "):
        over(executor, Deadly(str(raw), note=str(tmp_path / "note")), tmp_path / "out")
    with processes(1) as executor:
        over(executor, raw, tmp_path / "out")
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


class Hanging(Losing):
    """Some calls never end."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._lose(self.calls + 1) is not None:
            self.calls += 1
            return Future()
        return super().submit(fn, *args, **kwargs)


def test_a_call_without_an_end_is_made_again_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_BEGIN_S", 0.0)
    raw = make_raw(tmp_path / "raw")
    executor = Hanging(lambda call: TimeoutError() if call == 2 else None)
    over(executor, raw, tmp_path / "out", options={"decode_timeout_s": 0.5})
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_a_shard_of_which_nothing_is_ever_heard_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BEGIN_S", "_ITEM_S"):
        monkeypatch.setattr(cluster, name, 0.0)
    monkeypatch.setattr(cluster, "_GROWTH", 1)
    raw = make_raw(tmp_path / "raw")
    with pytest.raises(EngineError, match="no word from its workers"):
        over(Hanging(lambda _: TimeoutError()), raw, tmp_path / "out", options={"decode_timeout_s": 0.1})


def test_workers_without_work_do_again_what_is_slow_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_SLOW_S", 0.0)
    raw = make_raw(tmp_path / "raw")
    executor = Hanging(lambda call: TimeoutError() if call == 2 else None)
    over(executor, raw, tmp_path / "out")
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


# ---------------------------------------------------------------- executors that do not keep their word


class Odd(Losing):
    """Two threads; `change(number, submit)` says what a call gives instead, None for nothing special."""

    def __init__(self, change: Callable[[int, Callable[..., Future[Any]]], Future[Any] | None]) -> None:
        super().__init__(lambda _: None)
        self._change = change

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        found = self._change(self.calls + 1, self._threads.submit)
        if found is not None:
            self.calls += 1
            return found
        self.last = super().submit(fn, *args, **kwargs)
        return self.last


def test_the_result_of_another_call_is_no_result(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    executor = Odd(lambda call, submit: submit(executor.last.result) if call in (2, 4) else None)
    report = over(executor, raw, tmp_path / "out")
    assert (report.samples, executor.calls) == (12, report.shards + 2)
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_the_result_of_another_call_each_time_ends_the_run(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    executor = Odd(lambda call, submit: submit(executor.last.result) if call > 1 else None)
    with pytest.raises(EngineError, match=r"4 times \(it gave the result of another call\); all that is finished is kept"):
        over(executor, raw, tmp_path / "out")


@pytest.mark.parametrize("labels", [None, np.arange(3)])
def test_a_result_is_held_against_its_shard(labels: Any) -> None:
    keys = [b"a", b"b", b"c"]
    fields, values = labelled(labels, 3)

    def task(keep: list[int]) -> str:
        return task_id([keys[i] for i in keep], values[keep], "p", "s")

    def done(seal: str | None, n: int = 3, failures: Any = ()) -> bool:
        made = None if seal is None else replace(blank, task=seal)
        return ShardDone(made, np.zeros((n, 2), np.uint64), np.zeros(n, bool), Counts(), [(key, "gone") for key in failures]).is_of(work)

    stat = np.zeros(3, STAT_DTYPE)
    blank = Seal(task([0, 1, 2]), "p", "s", {}, fields, values, stat, np.zeros((3, 2), np.uint64), {}, {})
    work = ShardWork(ShardTask(0, 0, 3, blank.task), keys, values, stat, np.zeros((3, 2), np.uint64), np.zeros(3, bool), blank)
    assert done(blank.task)
    assert done(task([0, 2]), failures=[b"b"])
    assert done(None, failures=keys)
    assert not done(None)
    assert not done(None, failures=[b"b"])
    assert not done(blank.task, n=2)
    assert not done(task([0, 2]))
    assert not done(blank.task, failures=[b"b"])
    assert not done(blank.task, failures=keys)
    assert not done(blank.task, failures=[b"x"])


def test_one_future_for_two_calls_is_an_engine_error(tmp_path: Path) -> None:
    executor = Odd(lambda call, _: executor.last if call == 2 else None)
    with pytest.raises(EngineError, match=r"the engine \(Odd\) gave one Future for two calls; each submit must return a new one"):
        over(executor, make_raw(tmp_path / "raw"), tmp_path / "out")


@pytest.mark.parametrize("error", [ValueError("no\nmore"), OSError(12, "no more")])
def test_whatever_an_engine_raises_instead_of_taking_a_call_is_an_engine_error(tmp_path: Path, error: Exception) -> None:
    def refuse(call: int) -> None:
        if call == 3:
            raise error

    with pytest.raises(EngineError, match=rf"the engine is gone \({type(error).__name__}: .*no.*\); the same command goes on"):
        over(Losing(refuse), make_raw(tmp_path / "raw"), tmp_path / "out")


def test_a_future_that_was_cancelled_without_a_word_is_a_lost_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BEGIN_S", "_ITEM_S"):
        monkeypatch.setattr(cluster, name, 0.0)
    monkeypatch.setattr(cluster, "_GROWTH", 1)

    def cancelled(*_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        return future

    with pytest.raises(EngineError, match=r"the engine lost all of its first \d+ calls \(CancelledError\)"):
        over(Odd(cancelled), make_raw(tmp_path / "raw"), tmp_path / "out", options={"decode_timeout_s": 1.0})


def test_calls_follow_the_number_of_workers(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", per_class=20)
    seen = []

    class Growing(Losing):
        out = 0

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.workers = 1 if self.calls < 6 else 3
            future = super().submit(fn, *args, **kwargs)
            self.out += 1
            seen.append(self.out)
            future.add_done_callback(self.less)
            return future

        def less(self, _: Future[Any]) -> None:
            self.out -= 1

    executor = Growing(lambda _: None)
    executor.workers = 1
    over(executor, raw, tmp_path / "out", workers=None)
    assert max(seen[:6]) == 1
    assert max(seen) == 3


def test_waiting_for_workers_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_NO_WORKERS_S", 0.2)
    raw = make_raw(tmp_path / "raw")
    executor = Hanging(lambda _: TimeoutError())
    executor.workers = 0
    with pytest.raises(EngineError, match="has had no worker for 0 s; start some"):
        over(executor, raw, tmp_path / "out", workers=None)


# ---------------------------------------------------------------- machines that are not fit


def test_workers_of_other_versions_are_refused(tmp_path: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw(tmp_path / "raw")
    here = shardcall.versions_here
    calls: list[int] = []

    def elsewhere(preprocess: Any) -> dict[str, str]:
        calls.append(1)
        return {**here(preprocess), **({"pillow": "9.0"} if len(calls) > 1 else {})}

    monkeypatch.setattr("mmcompile.compiler.driver.versions_here", elsewhere)
    monkeypatch.setattr(shardcall, "versions_here", elsewhere)
    with pytest.raises(
        EngineError, match=rf"a worker on {socket.gethostname()} has pillow 9\.0, this build needs (\S+); .*pip install pillow==\1"
    ) as caught:
        over(threads, raw, tmp_path / "out")
    assert caught.value.details["package"] == "pillow"
    assert not list(read_seals(tmp_path / "out" / ".build" / "seals"))


@dataclass(frozen=True)
class Elsewhere(FolderSource):
    """A folder that one process alone has mounted (or, with 0, none)."""

    only: int = 0

    def _look(self) -> None:
        if os.getpid() != self.only:
            raise FileNotFoundError(2, "No such file or directory")

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        self._look()
        return super().stat(key)

    def read(self, key: bytes) -> bytes:
        self._look()
        return super().read(key)


def test_a_machine_without_raw_is_named_and_its_files_are_not_called_unreadable(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    source = Elsewhere(str(raw), only=os.getpid())
    wanted = rf"a worker on {socket.gethostname()} cannot reach the files of {re.escape(str(raw))} \(No such file or directory\); RAW must be there"
    with processes(1) as executor, pytest.raises(EngineError, match=wanted):
        over(executor, source, tmp_path / "out")


def test_files_that_are_gone_everywhere_end_as_in_a_local_build(tmp_path: Path, threads: Executor) -> None:
    raw = make_raw(tmp_path / "raw")
    with pytest.raises(SourceError, match="12 files could not be read or settled"):
        over(threads, Elsewhere(str(raw)), tmp_path / "out")


class Altering(Executor):
    """One thread at a time, which builds what `alter(job, work)` makes of the job."""

    workers = 1

    def __init__(self, alter: Callable[[Job, ShardWork], Job]) -> None:
        self._alter = alter

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        build, (job, work, look), _ = pickle.loads(args[0])
        future: Future[Any] = Future()
        future.set_result(fn(pickle.dumps((build, (self._alter(job, work), work, look), {}))))
        return future


def test_a_machine_without_out_is_named(tmp_path: Path) -> None:
    executor = Altering(lambda job, _: replace(job, scratch=Path("/not/there")))
    with pytest.raises(EngineError, match=r"a worker on \S+ cannot write to /not/there/shard-0 \(No such file or directory\); OUT must be there"):
        over(executor, make_raw(tmp_path / "raw"), tmp_path / "out")


def test_a_worker_whose_run_is_over_stops_and_seals_nothing(tmp_path: Path, threads: Executor) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    write(raw, {f"a/{i:03}.png": plant(i, "slow") for i in range(60)})
    source = Planted(str(raw), parent=os.getpid(), notes=str(tmp_path / "notes"))
    asked: list[Any] = []

    def ask(job: Job, work: ShardWork) -> Job:
        asked.append((job, work))
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        over(Altering(ask), source, out, rows=60)
    job, work = asked[0]
    shardcall.shard_folder(job, work.task.number).mkdir(parents=True)
    began = time.monotonic()
    zombie = threads.submit(shardcall.build_shard, job, work)
    while not list(job.scratch.glob("shard-0/call-*/hand-*")):
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    shutil.rmtree(job.scratch)
    with pytest.raises(OSError, match="No such file"):
        zombie.result()
    assert not list(read_seals(out / ".build" / "seals"))
    with pytest.raises(EngineError, match="or the build that asked for this is over"):
        shardcall.build_shard(job, work)


def test_large_pictures_of_all_calls_on_a_machine_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raw, held = make_raw(tmp_path / "raw"), []

    def hold(executor: Any, job: Job, *more: Any) -> Any:
        held.append(os.readlink(job.scratch / "large"))
        return runner(executor, job, *more)

    runner = shardcall.Runner
    monkeypatch.setattr(shardcall, "Runner", hold)
    with ThreadPoolExecutor(2) as executor:
        over(executor, raw, tmp_path / "out")
    assert len(held) > 1
    assert set(held) == {str(tmp_path / f"mmcompile-{os.getuid()}" / "large")}


# ---------------------------------------------------------------- processes that are kept


def test_processes_are_kept_for_the_next_call_and_end_when_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardcall, "_IDLE_S", 0.5)
    made: list[Any] = []
    real = shardcall.LocalExecutor

    def counted(workers: int) -> Any:
        made.append(real(workers))
        return made[-1]

    monkeypatch.setattr(shardcall, "LocalExecutor", counted)
    with ThreadPoolExecutor(1) as executor:
        over(executor, make_raw(tmp_path / "raw"), tmp_path / "out", workers=1)
    assert len(made) == 1
    end = time.monotonic() + 30
    while shardcall._idle and time.monotonic() < end:
        time.sleep(0.01)
    assert not shardcall._idle
    made[0]._threads[0].join(30)
    assert not made[0]._threads[0].is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("mmcompile-worker")]


def test_counts_add_up() -> None:
    assert Counts(1, 2, 3, 4).plus(Counts(10, 20, 30, 40)) == Counts(11, 22, 33, 44)


def test_what_was_interrupted_is_found_again(tmp_path: Path, threads: Executor) -> None:
    raw = make_raw(tmp_path / "raw")

    def stop(progress: Any) -> None:
        if progress.stage == "build" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over(threads, raw, tmp_path / "out", progress=stop)
    report = over(threads, raw, tmp_path / "out")
    assert report.kept > 0
    assert keys(tmp_path / "out")
    assert dataset(tmp_path / "out") == local(raw, tmp_path / "local")


def test_a_disk_that_is_full_over_there_is_said_as_it_is_here(tmp_path: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shardcall.tempfile, "mkdtemp", full)
    with pytest.raises(BuildError, match="No space left on device"):
        over(threads, make_raw(tmp_path / "raw"), tmp_path / "out")


# ---------------------------------------------------------------- OUT on a store


def test_workers_that_see_no_disk_of_the_coordinator_build_into_a_store(tmp_path: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    raw, url = make_raw(tmp_path / "raw", per_class=3), s3_bucket.url + "/out"
    age(raw)
    write(raw, {"cat/bad.png": BROKEN})
    with processes(1) as executor:
        assert over(executor, raw, url, max_rejects=1, rows=4).decoded == 6  # type: ignore[arg-type]
        local(raw, tmp_path / "local", max_rejects=1, rows=4)
        assert published(s3_bucket) == dataset(tmp_path / "local")
        (raw / "dog").rename(raw / "wolf")
        again = over(executor, raw, url, max_rejects=1, rows=4)  # type: ignore[arg-type]
    assert (again.decoded, again.copied > 0) == (0, True)
    local(raw, tmp_path / "local", max_rejects=1, rows=4)
    assert {name: data for name, data in published(s3_bucket).items() if name in dataset(tmp_path / "local")} == dataset(tmp_path / "local")
    assert not [name for name in s3_bucket.files("out") if name.startswith(".build/tmp")]


def test_a_run_on_a_store_that_is_over_is_noticed(tmp_path: Path, s3_bucket: Bucket) -> None:
    raw = make_raw(tmp_path / "raw")
    asked: list[Any] = []

    def ask(job: Job, work: ShardWork) -> Job:
        asked.append((job, work))
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        over(Altering(ask), raw, s3_bucket.url + "/out")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="the build that asked for this shard is over"):
        shardcall.build_shard(*asked[0])
    assert not [name for name in s3_bucket.files("out") if name.startswith((".build/seals", "shards"))]
