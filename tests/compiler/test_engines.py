from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mmcompile.compiler.engines import LocalExecutor, how_ended, result_within
from mmcompile.compiler.options import BuildOptions
from mmcompile.errors import DecodeError, EngineError, OptionError
from tests.compiler.builds import picture, write


def add(a: int, b: int) -> int:
    return a + b


def pid() -> int:
    return os.getpid()


def fail(kind: str) -> None:
    if kind == "ours":
        raise DecodeError("a message", code="corrupt", stage="load")
    if kind == "builtin":
        raise KeyError("x")

    class Local(Exception):
        pass

    raise Local("cannot be pickled")


def nothing_to_pickle() -> Any:
    return lambda: None


def die(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def alive(process: int) -> bool:
    """Is this a running process (a zombie is none)?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(processes: list[int], limit_s: float = 30.0) -> list[int]:
    end = time.monotonic() + limit_s
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


@pytest.fixture
def executor() -> Any:
    made = LocalExecutor(1)
    yield made
    made.kill()


def test_calls_run_in_other_processes_and_results_come_back(executor: LocalExecutor) -> None:
    assert [f.result() for f in [executor.submit(add, i, b=1) for i in range(5)]] == [1, 2, 3, 4, 5]
    assert executor.submit(pid).result() != os.getpid()


def test_exceptions_come_back_as_themselves_and_the_worker_goes_on(executor: LocalExecutor) -> None:
    first = executor.submit(pid).result()
    with pytest.raises(DecodeError, match="a message") as caught:
        executor.submit(fail, "ours").result()
    assert caught.value.details == {"code": "corrupt", "stage": "load"}
    with pytest.raises(KeyError, match="x"):
        executor.submit(fail, "builtin").result()
    with pytest.raises(EngineError, match="Local in a worker: cannot be pickled"):
        executor.submit(fail, "local").result()
    with pytest.raises(Exception, match="pickle"):
        executor.submit(nothing_to_pickle).result()
    assert executor.submit(pid).result() == first


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "ended with exit code 3"),
        (0, "ended with exit code 0"),
        (-signal.SIGSEGV, "ended by SIGSEGV"),
        (-signal.SIGKILL, "was killed (out of memory?)"),
        (-(signal.SIGRTMIN + 3), f"ended by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_a_worker_that_dies_fails_one_call_with_its_exit_code_and_the_next_works(executor: LocalExecutor, code: int, said: str) -> None:
    doomed, after = executor.submit(die, code), executor.submit(add, 1, 2)
    with pytest.raises(EngineError) as caught:
        doomed.result()
    assert (str(caught.value), caught.value.details["exitcode"]) == (f"a worker process {said}", code)
    assert after.result() == 3


def test_what_a_worker_cannot_load_is_an_error_that_says_what_to_do(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere() -> None: ...

    elsewhere.__qualname__ = "no_such_name"
    monkeypatch.setattr(sys.modules[__name__], "no_such_name", elsewhere, raising=False)
    with pytest.raises(EngineError, match="importable module"):
        executor.submit(elsewhere).result()
    assert executor.submit(add, 1, 1).result() == 2


def test_kill_ends_what_runs_cancels_what_waits_and_leaves_no_process() -> None:
    made = LocalExecutor(2)
    processes = [made.submit(pid).result() for _ in range(2)]
    running = [made.submit(time.sleep, 3600) for _ in range(2)]
    waiting = [made.submit(time.sleep, 3600) for _ in range(3)]
    while not all(f.running() for f in running):
        time.sleep(0.01)
    made.kill()
    assert all(isinstance(f.exception(), EngineError) for f in running)
    assert all(f.cancelled() for f in waiting)
    assert not wait_until_gone(processes)
    with pytest.raises(RuntimeError):
        made.submit(add, 1, 2)
    made.kill()


def test_shutdown_lets_queued_calls_finish_even_when_no_worker_had_started() -> None:
    made = LocalExecutor(1)
    queued = [made.submit(add, i, i) for i in range(3)]
    made.shutdown()
    assert [f.result() for f in queued] == [0, 2, 4]


def test_a_call_that_takes_too_long_is_ended_and_its_neighbour_is_not() -> None:
    made = LocalExecutor(2)
    try:
        stuck, other = made.submit(time.sleep, 3600), made.submit(time.sleep, 1.5)
        with pytest.raises(EngineError) as caught:
            result_within(made, stuck, 0.5)
        assert caught.value.details["exitcode"] == -signal.SIGKILL
        assert result_within(made, other, 60) is None
        assert result_within(made, made.submit(add, 2, 2), 60) == 4
    finally:
        made.kill()


def test_workers_end_when_their_parent_is_killed() -> None:
    script = """
        import sys, time
        from mmcompile.compiler.engines import LocalExecutor
        from tests.compiler.test_engines import pid
        made = LocalExecutor(2)
        print(*{made.submit(pid).result() for _ in range(20)}, flush=True)
        made.submit(time.sleep, 3600)
        time.sleep(3600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        workers = [int(word) for word in parent.stdout.readline().split()]
    assert workers
    assert all(alive(w) for w in workers)
    parent.kill()
    parent.wait()
    assert not wait_until_gone(workers)


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    write(tmp_path / "raw", {f"a/{i}.png": picture(i) for i in range(3)})
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from mmcompile.compiler.driver import BuildOptions, build\n"
        "from mmcompile.compiler.preprocess import Preprocess\n"
        "print(build('raw', 'out', preprocess=Preprocess(crop=8), options=BuildOptions(workers=2)).samples)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["once", "3"], done.stderr


def test_another_engine_is_refused_with_the_name_that_works() -> None:
    with pytest.raises(OptionError, match="'local', 'dask', 'ray' or an Executor, found 'spark'"):
        BuildOptions(engine="spark")
    with pytest.raises(OptionError, match="give the engine, too"):
        BuildOptions(address="tcp://there:8786")
    with pytest.raises(OptionError, match="from 1 to 4,096"):
        LocalExecutor(0)


def test_a_worker_that_cannot_be_started_is_an_engine_error(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match="cannot start a worker process"):
        executor.submit(add, 1, 2).result()


def test_how_a_process_ended_is_said_in_one_way() -> None:
    assert how_ended(-signal.SIGABRT) == "ended by SIGABRT"
    assert how_ended(-(signal.SIGRTMIN + 3)) == f"ended by signal {signal.SIGRTMIN + 3}"


def test_more_workers_than_can_be_started_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, count = threading.Thread.start, itertools.count()

    def short(self: threading.Thread) -> None:
        if self.name.startswith("mmcompile-worker") and next(count) >= 3:
            raise RuntimeError("can't start new thread")
        start(self)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", short)
    with pytest.raises(EngineError, match=r"cannot start 9 workers \(can't start new thread\): give fewer"):
        LocalExecutor(9)
    assert threading.active_count() == before
    with pytest.raises(OptionError, match="workers must be from 1 to 4,096, found 5,000"):
        LocalExecutor(5000)
