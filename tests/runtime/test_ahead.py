from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from mmcompile.runtime.ahead import Ahead, Stage


def double(job: int, stage: Stage) -> int:
    return 2 * job


def threads() -> int:
    return sum(thread.name.startswith("mmcompile") for thread in threading.enumerate())


def drain(ahead: Ahead[Any, Any]) -> list[Any]:
    out = []
    while True:
        try:
            out.append(ahead.take())
        except StopIteration:
            return out


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ahead", [1, 2, 7])
@pytest.mark.parametrize("jobs", [0, 1, 2, 50])
def test_results_come_in_the_order_of_the_jobs(workers: int, ahead: int, jobs: int) -> None:
    run = Ahead(double, iter(range(jobs)), threads=workers, ahead=ahead)
    assert drain(run) == [2 * j for j in range(jobs)]
    with pytest.raises(StopIteration):
        run.take()
    assert threads() == 0


def test_order_holds_where_later_jobs_are_done_first() -> None:
    second = threading.Event()

    def make(job: int, stage: Stage) -> int:
        if job == 0:
            assert second.wait(30)
        second.set()
        return job

    assert drain(Ahead(make, iter([0, 1]), threads=2, ahead=2)) == [0, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_jobs_are_asked_for_than_may_be_ahead(workers: int) -> None:
    asked = []

    def jobs() -> Any:
        for job in range(20):
            asked.append(job)
            yield job

    made = []
    run = Ahead(lambda job, stage: made.append(job), jobs(), threads=workers, ahead=4)
    for done in range(1, 10):
        run.take()
        assert len(asked) <= done + 6  # two are known that may not be made yet
        assert len(made) <= done + 4
    run.close()


def test_jobs_are_looked_at_before_they_may_be_made() -> None:
    seen: list[int] = []
    made: list[int] = []
    go = threading.Event()

    def make(job: int, stage: Stage) -> int:
        made.append(job)
        return job

    def look(jobs: Any) -> None:
        seen.extend(jobs)
        if max(jobs) >= 3:
            go.set()

    run = Ahead(make, iter(range(20)), threads=1, ahead=2, look=look)
    assert run.take() == 0
    assert run.take() == 1
    assert go.wait(30)  # two jobs are done or waiting, and one beyond them was looked at
    assert max(made) <= 3
    assert seen == sorted(seen)
    run.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_job_raises_comes_as_it_is_in_its_turn_and_ends_the_threads(workers: int) -> None:
    class Own(Exception):
        pass

    def make(job: int, stage: Stage) -> int:
        if job == 2:
            raise Own("here")
        return job

    run = Ahead(make, iter(range(9)), threads=workers, ahead=4)
    assert [run.take(), run.take()] == [0, 1]
    with pytest.raises(Own, match="here") as caught:
        run.take()
    assert "make" in [entry.name for entry in caught.traceback]
    assert threads() == 0
    with pytest.raises((StopIteration, RuntimeError)):
        run.take()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_jobs_raise_comes_after_what_was_asked_for_before(workers: int) -> None:
    def jobs() -> Any:
        yield 1
        yield 2
        raise KeyError("sampler")

    run = Ahead(double, jobs(), threads=workers, ahead=8)
    assert [run.take(), run.take()] == [2, 4]
    with pytest.raises(KeyError, match="sampler"):
        run.take()
    assert threads() == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_in_a_job_does_not_end_the_loop_in_silence(workers: int) -> None:
    def make(job: int, stage: Stage) -> int:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        Ahead(make, iter([1]), threads=workers, ahead=1).take()


def test_a_wait_that_takes_too_long_says_for_what_and_can_go_on() -> None:
    go = threading.Event()

    def make(job: int, stage: Stage) -> int:
        stage.text = "reading the moon for"
        assert go.wait(30)
        return job

    run = Ahead(make, iter([5, 6]), threads=1, ahead=2)
    with pytest.raises(TimeoutError, match=r"no batch within 0\.05 s; a thread is reading the moon for batch 0"):
        run.take(0.05)
    go.set()
    assert [run.take(30), run.take(30)] == [5, 6]


@pytest.mark.parametrize("workers", [1, 3])
def test_dropping_it_ends_the_threads_and_drops_the_results(workers: int) -> None:
    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def make(job: int, stage: Stage) -> Result:
        result = Result()
        made.append(weakref.ref(result))
        return result

    for _ in range(50):
        run = Ahead(make, iter(range(100)), threads=workers, ahead=6)
        run.take()
        del run
    gc.collect()
    assert threads() == 0
    assert made
    assert not any(ref() for ref in made)


def test_one_that_is_garbage_in_a_cycle_ends_too() -> None:
    run: Any = Ahead(double, iter(range(100)), threads=2, ahead=4)
    holder: list[Any] = [run]
    holder.append(holder)
    del run, holder
    gc.collect()
    assert threads() == 0


def test_looking_ahead_sees_each_job_once_and_its_faults_are_nobodys() -> None:
    seen: list[int] = []

    def look(jobs: Any) -> None:
        seen.extend(jobs)
        raise OSError("no advice today")

    assert drain(Ahead(double, iter(range(30)), threads=2, ahead=5, look=look)) == [2 * j for j in range(30)]
    assert sorted(seen) == list(range(30))


def test_a_forked_child_is_told_to_begin_anew_and_can() -> None:
    run = Ahead(double, iter(range(100)), threads=2, ahead=4)
    run.take()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                run.take()
            except RuntimeError as error:
                told = "another process" in str(error)
            del run
            fine = told and drain(Ahead(double, iter(range(10)), threads=2, ahead=4)) == [2 * j for j in range(10)]
            os.write(write, b"fine" if fine else b"bad")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"fine"
    os.waitpid(pid, 0)
    assert run.take() == 2
    run.close()


@pytest.mark.parametrize("how", ["", "raise KeyError", "sys.exit(3)", "os.kill(os.getpid(), 2)"])
def test_the_interpreter_exits_with_threads_in_the_middle_of_a_job(how: str) -> None:
    code = f"""
import os, sys, numpy as np
from mmcompile.runtime.ahead import Ahead
big = np.zeros(1 << 24, np.uint8)
def make(job, stage):
    return big.copy()
held = Ahead(make, iter(range(10**6)), threads=3, ahead=6)
held.take()
{how}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"": 0, "raise KeyError": 1, "sys.exit(3)": 3}.get(how, -2), done.stderr
    assert "Fatal" not in done.stderr
    assert "mmcompile-" not in done.stderr


def test_an_interrupt_while_threads_are_waited_for_is_not_lost() -> None:
    held: list[Ahead[int, int]] = []
    begun, release = threading.Event(), threading.Event()

    def make(job: int, stage: Stage) -> int:
        if job == 1:
            assert begun.wait(30)
            with shared.changed:
                assert shared.changed.wait_for(lambda: shared.stopped, 30)
            os.kill(os.getpid(), signal.SIGINT)
            assert release.wait(30)
        return job

    held.append(Ahead(make, iter([0, 1]), threads=1, ahead=2))
    shared = held[0]._shared
    held[0].take()

    def drop() -> None:
        begun.set()
        held.clear()
        threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        drop()
    release.set()
    limit = time.monotonic() + 30
    while threads() and time.monotonic() < limit:  # Python takes a thread for ended once a join was interrupted
        time.sleep(0.001)
    assert threads() == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_the_jobs_whose_turn_never_comes_keeps_no_thread(workers: int) -> None:
    def jobs() -> Any:
        yield from range(3)
        raise KeyError("sampler")

    for _ in range(5):
        run = Ahead(double, jobs(), threads=workers, ahead=4)
        run.take()
        del run
    assert threads() == 0
