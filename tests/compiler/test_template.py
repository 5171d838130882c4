from __future__ import annotations

import contextlib
import functools
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

from mmcompile.compiler import template as templates
from mmcompile.compiler.engines import LocalExecutor, result_within
from mmcompile.errors import EngineError
from tests.compiler.builds import make_raw
from tests.compiler.test_engines import add, alive, pid, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
loaded: list[int] = []


def load() -> None:
    loaded.append(os.getpid())


def where_loaded() -> list[int]:
    return loaded


def parent() -> int:
    return os.getppid()


def fail() -> None:
    raise ValueError("not to be heard of")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def start_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def threads() -> list[str]:
    return os.listdir("/proc/self/task")


def descriptors() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))


@pytest.fixture
def executor() -> Any:
    made = LocalExecutor(2)
    yield made
    made.kill()


def both(executor: LocalExecutor, fn: Any) -> list[Any]:
    """What `fn` says in each of two workers: calls that wait for each other run in different ones."""
    first, second = executor.submit(time.sleep, 0.3), executor.submit(time.sleep, 0.3)
    calls = [executor.submit(fn) for _ in range(2)]
    return [first.result(), second.result(), *[c.result() for c in calls]][2:]


def test_what_is_prepared_is_loaded_once_and_there_in_every_worker(executor: LocalExecutor) -> None:
    executor.prepare(load)
    found = executor.submit(where_loaded).result()
    assert found == [executor.submit(parent).result()]
    assert found != [executor.submit(pid).result()]


@pytest.mark.parametrize("fn", [fail, crash, start_a_thread, functools.partial(os._exit, 3)])
def test_what_goes_wrong_while_it_is_prepared_costs_nothing_but_that(executor: LocalExecutor, fn: Any) -> None:
    executor.prepare(fn)
    assert executor.submit(add, 1, 2).result() == 3
    assert len(executor.submit(threads).result()) == 1
    assert len(os.listdir(f"/proc/{executor.submit(parent).result()}/task")) == 1


def test_a_worker_has_no_descriptor_of_its_template_nor_of_its_neighbour(executor: LocalExecutor) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        ours = os.readlink(f"/proc/self/fd/{write}")
        for found in both(executor, descriptors):
            assert ours not in found
            assert len([name for name in found if name.startswith("socket:")]) == 1
            assert len([name for name in found if name == "/dev/null"]) == 1
    finally:
        os.close(read)
        os.close(write)


def test_a_killed_template_takes_its_workers_along_and_the_next_call_has_another(executor: LocalExecutor) -> None:
    template, worker = executor.submit(parent).result(), executor.submit(pid).result()
    running = executor.submit(time.sleep, 3600)
    while not running.running():
        time.sleep(0.01)
    os.kill(template, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        running.result()
    assert caught.value.details["exitcode"] == -signal.SIGKILL
    assert not wait_until_gone([template, worker])
    for _ in range(2):  # the other worker was lost without a call, which then is the one that notices
        try:
            again = executor.submit(parent).result()
            break
        except EngineError:
            continue
    assert again != template


def test_a_template_ends_when_its_parent_is_killed_and_when_all_is_done() -> None:
    script = """
        import sys, time
        from mmcompile.compiler.engines import LocalExecutor, result_within
        from tests.compiler.test_engines import pid
        from tests.compiler.test_template import parent
        made = LocalExecutor(1)
        print(made.submit(parent).result(), made.submit(pid).result(), flush=True)
        time.sleep(3600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        both = [int(word) for word in process.stdout.readline().split()]
    assert len(both) == 2
    assert all(alive(p) for p in both)
    process.kill()
    process.wait()
    assert not wait_until_gone(both)
    done = LocalExecutor(1)
    template = done.submit(parent).result()
    done.shutdown()
    assert not wait_until_gone([template])


def test_kill_while_the_template_still_loads_does_not_wait_for_it() -> None:
    made = LocalExecutor(1)
    made.prepare(functools.partial(time.sleep, 3600))
    waiting = made.submit(add, 1, 2)
    while not waiting.running():
        time.sleep(0.01)
    made.kill()
    assert isinstance(waiting.exception(), EngineError)


def test_a_call_that_waits_for_a_template_which_hangs_ends_within_its_limit(executor: LocalExecutor) -> None:
    executor.prepare(functools.partial(time.sleep, 3600))
    with contextlib.suppress(EngineError):  # the template that follows loads nothing, and may be fast enough
        result_within(executor, executor.submit(add, 1, 2), 0.5)
    assert result_within(executor, executor.submit(add, 2, 2), 60) == 4


def test_workers_outlive_the_thread_that_first_asked_for_one(executor: LocalExecutor) -> None:
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(executor.submit(pid).result()))
    asking.start()
    asking.join()
    time.sleep(0.2)
    assert alive(found[0])
    assert executor.submit(add, 2, 2).result() == 4


def test_the_last_words_of_a_worker_are_in_the_error(executor: LocalExecutor) -> None:
    with pytest.raises(EngineError, match=r"ended with exit code 7: oh no$") as caught:
        executor.submit(last_words).result()
    assert caught.value.details == {"exitcode": 7, "said": "oh no"}


def last_words() -> None:
    print("first\noh no", file=sys.stderr, flush=True)
    os._exit(7)


def test_an_executor_that_nobody_asks_starts_nothing(tmp_path: Path) -> None:
    made = LocalExecutor(3)
    made.shutdown()
    assert made._template._process is None


# ---------------------------------------------------------------- templates that are stopped, or killed again and again


@pytest.fixture
def alone() -> Any:
    made = LocalExecutor(1)
    yield made
    made.kill()


def template_of(executor: LocalExecutor) -> int:
    process = executor._template._process
    assert process is not None
    return process.pid


def stopped_with_a_question(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> Any:
    """A call whose worker was killed while its template, which has `limit_s` seconds for a reply, is stopped; nobody looks whether it is."""
    monkeypatch.setattr(templates, "_LOOK_S", 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_REPLY_S", limit_s)
        worker = executor.submit(pid).result()
    running = executor.submit(time.sleep, 3600)
    while not running.running():
        time.sleep(0.01)
    os.kill(template_of(executor), signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    return running


def test_a_template_that_is_stopped_before_the_first_fork_is_replaced_by_one_that_loads_nothing(
    alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_LOAD_S", 0.2)
        alone.prepare(load)
    first = template_of(alone)
    os.kill(first, signal.SIGSTOP)
    assert alone.submit(where_loaded).result(60) == []
    assert not wait_until_gone([first])


def test_a_template_that_is_seen_to_be_stopped_is_replaced_whatever_time_it_may_take(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_LOAD_S", 3600.0)
    monkeypatch.setattr(templates, "_REPLY_S", 3600.0)
    alone.prepare(load)
    first = template_of(alone)
    os.kill(first, signal.SIGSTOP)
    assert alone.submit(where_loaded).result(60) == []
    worker, second = alone.submit(pid).result(60), template_of(alone)
    os.kill(second, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(EngineError):
        alone.submit(pid).result(60)
    assert alone.submit(parent).result(60) not in (first, second)
    assert not wait_until_gone([first, second])


def test_a_template_that_is_slow_or_goes_on_is_waited_for(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_LOOK_S", 0.01)
    looks = iter([True, False, True, *[False] * 10_000])
    monkeypatch.setattr(templates, "_is_stopped", lambda _: next(looks))
    alone.prepare(load)
    first = template_of(alone)
    assert alone.submit(parent).result(60) == first
    assert next(looks) is False  # it was looked at more than three times


def test_a_stopped_template_is_ended_when_a_worker_dies_and_the_next_call_has_another(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    running = stopped_with_a_question(alone, monkeypatch, 1.0)
    first = template_of(alone)
    with pytest.raises(EngineError) as caught:
        running.result(60)
    assert caught.value.details["exitcode"] == -signal.SIGKILL
    assert not wait_until_gone([first])
    assert alone.submit(parent).result(60) != first


@pytest.mark.parametrize("end", [lambda executor, _: executor.kill(), LocalExecutor.kill_call])
def test_to_end_a_call_does_not_wait_for_a_stopped_template(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    running = stopped_with_a_question(alone, monkeypatch, 3600.0)
    first = template_of(alone)
    while not alone._template._mutex.locked():
        time.sleep(0.01)
    end(alone, running)
    assert running.exception(60).details["exitcode"] == -signal.SIGKILL
    assert not wait_until_gone([first])


def test_kill_does_not_wait_for_a_template_that_cannot_even_be_killed(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_END_S", 0.1)
    running = stopped_with_a_question(alone, monkeypatch, 3600.0)
    process: Any = alone._template._process
    while not alone._template._mutex.locked():
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)  # as where it reads from a disk that hangs
        alone.kill()
    assert isinstance(running.exception(0), EngineError)
    process.kill()
    assert not wait_until_gone([process.pid])


def test_shutdown_ends_a_stopped_template() -> None:
    done = LocalExecutor(1)
    done.prepare(load)
    os.kill(template_of(done), signal.SIGSTOP)
    done.shutdown()
    assert not wait_until_gone([template_of(done)])


def python_that(folder: Path, first: str, times: int) -> tuple[str, Path]:
    """A python that does something else (in sh) the first `times` times that it is started, and the file that has a line for each start."""
    path, starts = folder / "python", folder / "starts"
    path.write_text(f'#!/bin/sh\necho >> "{starts}"\n[ "$(wc -l < "{starts}")" -gt {times} ] && exec "{sys.executable}" "$@"\n{first}\n')
    path.chmod(0o755)
    return str(path), starts


def test_templates_that_are_all_stopped_end_in_an_engine_error(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, starts = python_that(tmp_path, "kill -STOP $$", 9)
    monkeypatch.setattr(sys, "executable", path)
    monkeypatch.setattr(templates, "_LOAD_S", 0.5)
    with pytest.raises(EngineError, match="its template did not answer, 2 times"):
        alone.submit(add, 1, 2).result(60)
    assert starts.read_text() == "\n\n"


@pytest.mark.parametrize("times", [4, 9])
def test_a_template_may_be_killed_a_few_times(alone: LocalExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int) -> None:
    path, _ = python_that(tmp_path, "kill -KILL $$", times)
    monkeypatch.setattr(sys, "executable", path)
    future = alone.submit(add, 1, 2)
    if times == 4:
        assert future.result(60) == 3
    else:
        with pytest.raises(EngineError, match="its template ended 5 times"):
            future.result(60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_leaves_no_template_even_one_that_is_stopped_before_it_began(tmp_path: Path, number: int, code: int) -> None:
    path, starts = python_that(tmp_path, f'echo $$ > "{tmp_path}/pid"; kill -STOP $$', 9)
    raw = make_raw(tmp_path / "raw")
    script = f"import sys; sys.executable = {path!r}; from mmcompile.cli import main; main(['build', {str(raw)!r}, {str(tmp_path / 'out')!r}])"
    build = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not ((tmp_path / "pid").is_file() and (said := (tmp_path / "pid").read_text())) or not templates._is_stopped(int(said)):
        assert build.poll() is None
        time.sleep(0.01)
    build.send_signal(number)
    build.send_signal(number if number == signal.SIGTERM else 0)  # as `timeout` does: to the process, and to its group
    errors = build.communicate(timeout=60)[1]
    assert build.returncode == code, errors
    assert not wait_until_gone([int(said)])
    assert [line for line in errors.splitlines() if line.startswith("error")] == ["error: stopped"]
    assert starts.read_text() == "\n"


def test_a_build_whose_template_is_stopped_starts_another_and_ends_well(tmp_path: Path) -> None:
    path, starts = python_that(tmp_path, "kill -STOP $$", 1)
    raw = make_raw(tmp_path / "raw")
    script = f"""
        import sys; sys.executable = {path!r}
        from mmcompile.compiler import template
        template._LOAD_S = 3600.0
        from mmcompile.cli import main
        main(["build", {str(raw)!r}, {str(tmp_path / "out")!r}, "--decode-timeout", "3600"])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert starts.read_text() == "\n\n"


def test_an_executor_that_nobody_ended_leaves_no_stopped_template_when_its_process_ends(tmp_path: Path) -> None:
    path, _ = python_that(tmp_path, f'echo $$ > "{tmp_path}/pid"; kill -STOP $$', 9)
    script = f"""
        import os, sys, time
        from mmcompile.compiler import template
        from mmcompile.compiler.engines import LocalExecutor
        sys.executable = {path!r}
        executor = LocalExecutor(1)
        executor.prepare(os.getpid)
        while not template._is_stopped(executor._template._process.pid):
            time.sleep(0.01)
        raise SystemExit("an error before anybody could end it")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stderr == b"an error before anybody could end it\n"
    assert not wait_until_gone([int((tmp_path / "pid").read_text())])
