from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmcompile.errors import BuildError
from mmcompile.format.lock import Lock

HOLD = "import sys; from mmcompile.format.lock import Lock\nwith Lock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out" / ".build").mkdir(parents=True)
    return tmp_path / "out" / ".build" / "lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_is_refused_and_told_of_the_first(path: Path, holder: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        with pytest.raises(BuildError, match=f"process {holder.pid} on ") as caught, Lock(path):
            pass
        assert str(path.parent.parent) in str(caught.value)


def test_the_lock_of_a_killed_process_is_not_in_the_way(path: Path, holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    assert json.loads(path.read_bytes())["pid"] == holder.pid
    with Lock(path) as lock:
        assert lock.still_held()
        assert json.loads(path.read_bytes())["pid"] == os.getpid()


def test_it_is_released_at_the_end_and_can_be_taken_again(path: Path) -> None:
    lock = Lock(path)
    for _ in range(2):
        with lock, pytest.raises(BuildError), Lock(path):
            pass
    with Lock(path):
        pass


def test_it_is_released_by_an_error(path: Path) -> None:
    with pytest.raises(KeyError), Lock(path):
        raise KeyError
    with Lock(path):
        pass


def test_a_child_does_not_inherit_it(path: Path) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with Lock(path):
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"  # it runs, so its close-on-exec is over
    try:
        with Lock(path):
            pass
    finally:
        child.communicate()


def test_a_lock_whose_folder_was_removed_is_no_longer_held(path: Path) -> None:
    with Lock(path) as lock:
        assert lock.still_held()
        shutil.rmtree(path.parent)
        assert not lock.still_held()
        path.parent.write_bytes(b"a file in its place")
        assert not lock.still_held()
        path.parent.unlink()
        path.parent.mkdir()
        path.write_bytes(b"")
        assert not lock.still_held()
        with Lock(path) as second:
            assert second.still_held()


def test_a_file_replaced_between_open_and_lock_is_not_taken_for_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    calls = []

    def flock(fd: int, how: int) -> None:
        if not calls:
            path.unlink()
        calls.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock(path) as lock:
        assert len(calls) == 2
        assert lock.still_held()


@pytest.mark.parametrize(
    "data", [b"", b"x", b"[]", b"{}", b"[" * 4000, b'{"started":1e300,"pid":1,"host":""}', b'{"started":0,"pid":Infinity,"host":1}', b"1" * 4096]
)
def test_whatever_a_holder_wrote_is_no_other_error(path: Path, holder: subprocess.Popen[bytes], data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(BuildError, match="another run is at work"), Lock(path):
        pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: p.mkdir(), "Is a directory"),
        (lambda p: os.mkfifo(p), "expected a file, found a pipe, socket or device: move it away"),
        (lambda p: p.symlink_to("elsewhere"), "a link: move it away"),
        (lambda p: shutil.rmtree(p.parent), "No such file or directory"),
    ],
)
def test_what_is_no_file_is_refused(path: Path, make: Any, why: str) -> None:
    make(path)
    with pytest.raises(BuildError, match=rf"/lock: cannot be used as the lock of this folder \({why}\)$"), Lock(path):
        pass
    assert not (path.parent / "elsewhere").exists()


def test_a_file_system_without_locks_is_refused_unless_told_otherwise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BuildError, match="--no-lock"), Lock(path):
        pass
    with Lock(path, required=False) as lock:
        assert lock.still_held()


def test_a_linked_build_folder_is_refused_and_what_lies_behind_it_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / ".build").symlink_to("mine")
    with pytest.raises(BuildError, match="a link"), Lock(tmp_path / ".build" / "lock"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []
