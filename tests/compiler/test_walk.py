"""A tree listed by threads: the same items and the same first fault for any number of them, on a disk that is quick and on one that is not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.sources import Scan, walk
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import SourceError
from tests.compiler.test_folder import PNG, make


class Slow:
    """os.scandir with entries that wait a while whenever they are looked at; counts how many wait at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = self.most = self.calls = 0
        self._lock = threading.Lock()
        self._scandir = os.scandir

    def __call__(self, path: bytes) -> Any:
        outer, scan = self, self._scandir(path)

        class Entry:
            def __init__(self, entry: os.DirEntry[bytes]) -> None:
                self.name, self.path, self.is_dir, self.is_symlink, self._stat = entry.name, entry.path, entry.is_dir, entry.is_symlink, entry.stat

            def stat(self) -> os.stat_result:
                outer.wait()
                return self._stat()

        class Scan:
            def __enter__(self) -> Iterator[Entry]:
                outer.wait()
                return map(Entry, scan)

            def __exit__(self, *_: object) -> None:
                scan.close()

        return Scan()

    def wait(self) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self._lock:
            self.now -= 1


def big(root: Path) -> Path:
    """A tree with a large folder, many small ones, links, and files that are left out."""
    make(root, *(f"wide/{i:04}.jpg" for i in range(3000)), "wide/deep/1.jpg", "wide/deep/.hidden.jpg", "wide/notes.txt", "empty/")
    make(root, *(f"many/{i:03}/{name}" for i in range(200) for name in ("b.png", "a.png", "c.txt", "\xe9.png", "noext")))
    for i in range(0, 200, 2):
        (root / f"many/{i:03}/noext").write_bytes(PNG)
    (root / "many/link.png").symlink_to("000/a.png")
    (root / "many/gone.png").symlink_to("nowhere")
    (root / "other").symlink_to("wide/deep")
    return root


def same(one: Scan, two: Scan) -> None:
    assert one.keys == two.keys
    assert np.array_equal(one.stat, two.stat)
    assert one.labels is not None
    assert two.labels is not None
    assert np.array_equal(one.labels, two.labels)
    assert (one.classes, one.left_out, one.warnings, one.counts) == (two.classes, two.left_out, two.warnings, two.counts)


def test_any_number_of_threads_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FolderSource(str(big(tmp_path)), exclude=("many/003", "many/004/a.png", "nothing"))
    scan = source.scan()
    assert len(scan.keys) == 3002 + 199 * 3 - 1 + 100 + 2
    assert scan.left_out == {"excluded": 1, "excluded folder": 1, "extension .txt": 200, "hidden": 2, "no extension, no image": 99}
    slow = Slow(0.0003)
    monkeypatch.setattr(os, "scandir", slow)
    for threads in (1, 2, 3, 32):
        monkeypatch.setattr(walk, "_MOST_THREADS", threads)
        monkeypatch.setattr(walk, "_BATCH", 100)
        slow.most = 0
        same(source.scan(), scan)
        assert (slow.most == 1) == (threads == 1)
        assert slow.most <= threads
    monkeypatch.setattr(walk, "_FOLDERS", 1)
    same(source.scan(), scan)


def test_the_entries_of_one_large_folder_are_looked_at_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FolderSource(str(make(tmp_path, *(f"{i:04}.jpg" for i in range(3000)))))
    scan = source.scan()
    slow = Slow(0.0003)
    monkeypatch.setattr(os, "scandir", slow)
    monkeypatch.setattr(walk, "_BATCH", 64)
    again = source.scan()
    assert (again.keys, again.stat.tolist()) == (scan.keys, scan.stat.tolist())
    assert slow.calls == 3001
    assert slow.most > 2


def test_a_disk_that_answers_at_once_is_listed_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_SLOW_S", 10.0)
    monkeypatch.setattr(walk, "_BATCH", 10)
    slow = Slow(0.0)
    monkeypatch.setattr(os, "scandir", slow)
    FolderSource(str(big(tmp_path))).scan()
    assert slow.most == 1


@pytest.mark.parametrize("threads", [1, 4, 32])
def test_the_first_fault_in_the_order_of_paths_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    make(tmp_path, *(f"{a}/{b}/{c}.jpg" for a in "ab" for b in range(20) for c in range(20)))
    for folder in ("b/07", "b/3", "a/12", "a/7"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "loop").symlink_to("..")
    real = os.scandir
    locked = {os.path.join(os.fsencode(tmp_path), name) for name in (b"a/13", b"a/2", b"b/1")}

    def refuse(path: bytes) -> Any:
        if path in locked:
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    slow = Slow(0.0003)
    monkeypatch.setattr(os, "scandir", slow)
    monkeypatch.setattr(walk, "_MOST_THREADS", threads)
    monkeypatch.setattr(walk, "_BATCH", 20)
    source = FolderSource(str(tmp_path))
    with pytest.raises(SourceError, match="a/12/loop contains itself"):
        source.scan()
    (tmp_path / "a/12/loop").unlink()
    with pytest.raises(SourceError, match=r"cannot list folder .*a/13: Permission denied"):
        source.scan()


def test_a_progress_that_raises_ends_the_listing_and_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", Slow(0.0003))
    monkeypatch.setattr(walk, "_BATCH", 50)
    seen: list[int] = []

    def stop(found: int) -> None:
        seen.append(found)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FolderSource(str(big(tmp_path))).scan(stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("list")]
