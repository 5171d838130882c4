"""What lies on disk when a step of a commit fails: the old file or the new one, whole, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.errors import FormatError
from mmcompile.format import npy
from mmcompile.format.commit import install, sync_folder, write_atomic
from mmcompile.format.index import load_index, publish
from mmcompile.format.npy import save_array
from tests.format.builders import index_json, read_everything, republish, tree


class Failing:
    """Stands in for a function of os: the call number `at` fails, all others go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int = 1) -> None:
        self.real, self.at, self.calls = getattr(os, name), at, 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(28, "No space left on device")
        return self.real(*args, **keywords)


@pytest.mark.parametrize("name", ["fsync", "replace", "open"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "a").write_bytes(b"old")
    Failing(monkeypatch, name)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert tree(tmp_path) == {"a": b"old"}


def test_an_interrupt_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", b"new")
    assert tree(tmp_path) == {}


def test_the_order_is_file_then_name_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def log_fsync(fd: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def log_replace(a: Any, b: Any) -> None:
        steps.append("name")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    write_atomic(tmp_path / "a", b"1")
    assert steps == ["file", "name", "folder"]
    steps.clear()
    (tmp_path / "b").write_bytes(b"2")
    install(tmp_path / "b", tmp_path / "c")
    assert steps == ["file", "name", "folder"]
    steps.clear()
    write_atomic(tmp_path / "a", b"3", durable=False)
    assert steps == ["name"]
    assert tree(tmp_path) == {"a": b"3", "c": b"2"}


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_install_leaves_both_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    Failing(monkeypatch, name)
    with pytest.raises(OSError, match="No space"):
        install(tmp_path / "new", tmp_path / "old")
    assert tree(tmp_path) == {"old": b"old", "new": b"new"}


def test_install_replaces_under_an_open_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with open(tmp_path / "a", "rb") as file:
        (tmp_path / "t").write_bytes(b"new")
        install(tmp_path / "t", tmp_path / "a")
        assert file.read() == b"old"
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("size", [10, 1 << 22])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_shard_that_cannot_be_saved_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    Failing(monkeypatch, name)
    with pytest.raises(OSError, match="No space"):
        save_array(tmp_path, "image", np.zeros(size, np.uint8), tmp_path)
    assert tree(tmp_path) == {}


def test_a_large_shard_is_written_as_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1000, dtype="<i4")
    small = save_array(tmp_path, "a", array, tmp_path)
    monkeypatch.setattr(npy, "_CHUNK", 16)
    assert save_array(tmp_path, "b", array, tmp_path) == small
    assert (tmp_path / f"a-{small}.npy").read_bytes() == (tmp_path / f"b-{small}.npy").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_publish_fails_at_any_step_and_the_old_generation_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, generation = load_index(root)
    before = (root / "index.json").read_bytes()
    rows = str(read_everything(root)["rows"])
    for name, at in (("fsync", 1), ("replace", 1), ("fsync", 2), ("fsync", 3), ("replace", 2)):
        Failing(monkeypatch, name, at)
        with pytest.raises(OSError, match="No space"):
            republish(root, settings={"step": at})
        monkeypatch.undo()
        assert (root / "index.json").read_bytes() == before
        assert load_index(root)[1] == generation
        assert str(read_everything(root)["rows"]) == rows
    after = republish(root, settings={"step": 9})
    assert load_index(root)[1] == after
    assert load_index(root, generation)[1] == generation
    assert index_json(load_index(root, generation)[0]) == index_json(index)


def test_an_index_that_readers_would_refuse_is_not_published(root: Path) -> None:
    before = tree(root)
    index, _ = load_index(root)
    with pytest.raises(FormatError):
        republish(root, samples=13)
    with pytest.raises(FormatError, match="the limit is"):
        republish(root, settings={"x": "y" * (1 << 20)})
    assert tree(root) == before
    assert publish(root, index) == load_index(root)[1]


def test_sync_folder_refuses_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "a")


def test_a_killed_writer_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    loop = "while True:\n  write_atomic(sys.argv[1], b'%07d' % i * 5000)\n  i += 1\n  print(flush=True)"
    code = f"import sys; from mmcompile.format.commit import write_atomic\ni = 0\n{loop}"
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, tmp_path / "a"], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
        writer.communicate()
        data = (tmp_path / "a").read_bytes()
        assert data == data[:7] * 5000


def test_a_file_may_be_written_in_parts(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", iter([b"ab", memoryview(b"c"), b""]))
    assert (tmp_path / "file").read_bytes() == b"abc"

    def fails() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomic(tmp_path / "file", fails())
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"abc"
