"""The folder of a cache: what is brought, what goes, and what is left alone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.commit import install
from mmcompile.format.npy import hash_bytes, hash_file
from mmcompile.runtime.copies import Copies
from mmcompile.runtime.locked import lock


class Memory:
    """An origin that counts what is asked of it."""

    def __init__(self, count: int = 6, size: int = 1000) -> None:
        self.files: dict[str, bytes] = {}
        for k in range(count):
            data = bytes([k]) * size
            self.files[f"shards/image-{hash_bytes(data)}.npy"] = data
        self.names = list(self.files)
        self.asked: list[str] = []

    def where(self, name: str) -> str:
        return f"far/{name}"

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self.asked.append(name)
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "gone", name)
        return self.files[name][start:stop]

    def list(self, folder: str) -> Iterator[Any]:
        return iter(())


@pytest.fixture
def far() -> Memory:
    return Memory()


def bring(copies: Copies, far: Memory, k: int) -> None:
    with copies.held(far.names[k], 1000, far) as path:
        assert path.read_bytes() == far.files[far.names[k]]
    os.utime(copies.folder / "hashed" / os.path.basename(far.names[k]), ns=(len(far.asked), len(far.asked) * 10**9 + k))


def there(copies: Copies, far: Memory) -> list[int]:
    return [k for k, name in enumerate(far.names) if copies.here(name)]


def test_over_the_limit_the_oldest_go(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), 3500)
    for k in (0, 1, 2):
        bring(copies, far, k)
    assert copies.touch(far.names[0])
    bring(copies, far, 3)
    assert there(copies, far) == [0, 2, 3]
    bring(copies, far, 2)
    assert len(far.asked) == 4  # it was here


def test_what_was_not_hashed_here_is_never_given(tmp_path: Path, far: Memory) -> None:
    copies, name = Copies(str(tmp_path), None), far.names[0]
    path, good = copies.folder / name, far.files[name]

    def asked() -> int:
        before = len(far.asked)
        with copies.held(name, 1000, far) as held:
            assert held.read_bytes() == good
        return len(far.asked) - before

    path.write_bytes(b"x" * 1000)  # planted
    assert [asked(), asked()] == [1, 0]
    with path.open("r+b") as file:  # within the tick of the clock in which it was brought
        file.write(b"x")
    assert [asked(), asked()] == [1, 0]
    status = path.stat()
    path.write_bytes(b"y" * 1000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert copies.size(name) is None
    assert [asked(), asked()] == [1, 0]
    other = tmp_path / "other"
    other.write_bytes(good)
    os.replace(other, path)
    assert [asked(), asked()] == [0, 0]  # hashed, and right
    assert copies.size(name) == 1000
    note = copies.folder / "hashed" / path.name
    note.write_bytes(note.read_bytes()[:-3])
    assert [asked(), asked()] == [0, 0]
    path.write_bytes(b"z" * 2000)
    assert [asked(), asked()] == [1, 0]
    assert copies.drop(name)
    assert not note.exists()


def write(fd: int, *, restored: bool) -> None:
    """Change a byte of an open file; `restored`: and leave its time of writing as it was."""
    before = os.fstat(fd)
    with open(f"/proc/self/fd/{fd}", "r+b") as file:
        file.write(b"x")
    while restored:
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        if os.fstat(fd).st_ctime_ns != before.st_ctime_ns:  # the clock ticked
            break


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("lies_there", [False, True])
def test_what_is_written_while_it_is_hashed_is_not_taken(
    tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch, lies_there: bool, restored: bool
) -> None:
    copies, name, writes = Copies(str(tmp_path), None), far.names[0], [1]

    def hashed(fd: int) -> str:
        digest = hash_file(fd)  # of what was there before
        if writes[0]:
            writes[0] -= 1
            write(fd, restored=restored)
        return digest

    monkeypatch.setattr("mmcompile.runtime.copies.hash_file", hashed)
    if lies_there:
        (copies.folder / name).write_bytes(far.files[name])
    bring(copies, far, 0)
    assert (len(far.asked), writes) == (1 if lies_there else 2, [0])
    bring(copies, far, 0)
    assert len(far.asked) == (1 if lies_there else 2)
    writes[0] = 2
    with pytest.raises(FormatError, match=rf"{copies.folder}/{far.names[1]}: something else wrote to it while it was brought, twice; find out what"):
        bring(copies, far, 1)
    assert not copies.here(far.names[1])
    assert not list(copies.folder.rglob("*.part"))


def test_what_is_written_between_its_hash_and_its_note_is_hashed_again(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, installs = Copies(str(tmp_path), None), []

    def written(temporary: Path, final: Path) -> None:
        if not installs:
            temporary.write_bytes(b"x" * 1000)
        installs.append(final)
        install(temporary, final)

    monkeypatch.setattr("mmcompile.runtime.copies.install", written)
    bring(copies, far, 0)
    assert len(far.asked) == len(installs) == 2


def test_who_waited_for_a_part_does_not_touch_the_copy_that_it_became(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, other, met, hashes = Copies(str(tmp_path), None), Copies(str(tmp_path), None), [], []

    def late(fd: int, path: Path) -> bool:
        if not met:  # `copies` has opened the part, and `other` is faster
            met.append(path)
            bring(other, far, 0)
        return lock(fd, path)

    def hashed(fd: int) -> str:
        hashes.append(hash_file(fd))
        return hashes[-1]

    monkeypatch.setattr("mmcompile.runtime.copies.lock", late)
    monkeypatch.setattr("mmcompile.runtime.copies.hash_file", hashed)
    bring(copies, far, 0)
    assert met == [copies.folder / (far.names[0] + ".part")]
    assert (len(far.asked), len(hashes)) == (1, 1)


def test_two_who_hash_the_same_copy_at_once_both_get_it(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, other, hashes = Copies(str(tmp_path), None), Copies(str(tmp_path), None), []
    opened, name = os.open, far.names[0]
    (copies.folder / name).write_bytes(far.files[name])

    def read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, mode)

    def hashed(fd: int) -> str:
        hashes.append(name)
        if len(hashes) == 1:
            with other.held(name, 1000, far):
                pass
        return hash_file(fd)

    monkeypatch.setattr(os, "open", read_only)  # else one waits for the other
    monkeypatch.setattr("mmcompile.runtime.copies.hash_file", hashed)
    with copies.held(name, 1000, far) as path:
        assert path.read_bytes() == far.files[name]
    assert (len(hashes), far.asked) == (2, [])


def _link(target: str) -> Any:
    return lambda path: os.symlink(target, path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, _link("../victim"), _link("nowhere"), _link(".")])
def test_what_has_the_name_of_a_note_and_is_none_is_left_alone(tmp_path: Path, far: Memory, make: Any) -> None:
    copies = Copies(str(tmp_path), 3000)
    victim = copies.folder / "victim"
    victim.write_bytes(b"mine")
    notes = [copies.folder / name.replace("shards", "hashed") for name in far.names]
    bring(copies, far, 0)
    notes[0].unlink()
    make(notes[0])  # of a copy that is here
    make(notes[1])  # and of one that is not
    kinds = [os.lstat(note) for note in notes[:2]]
    for k in (0, 1, 0, 1):
        with copies.held(far.names[k], 1000, far) as path:
            assert path.read_bytes() == far.files[far.names[k]]
        assert copies.size(far.names[k]) is None  # nothing says that it is whole
        assert copies.touch(far.names[k])
    assert len(far.asked) == 2
    (copies.folder / far.names[1]).write_bytes(b"x" * 1000)
    with copies.held(far.names[1], 1000, far) as path:
        assert path.read_bytes() == far.files[far.names[1]]
    assert copies.drop(far.names[0])
    for k in (2, 3, 4):
        bring(copies, far, k)
    assert there(copies, far) == [2, 3, 4]
    assert [(s.st_ino, s.st_mode) for s in kinds] == [(s.st_ino, s.st_mode) for s in map(os.lstat, notes[:2])]
    assert victim.read_bytes() == b"mine"
    assert not (copies.folder / "hashed" / "nowhere").exists()


def test_nothing_is_removed_behind_a_link_that_came_later(tmp_path: Path, far: Memory) -> None:
    copies, name = Copies(str(tmp_path), None), far.names[0]
    bring(copies, far, 0)
    mine = tmp_path / "mine"
    (mine / "shards").mkdir(parents=True)
    (mine / name).write_bytes(b"x" * 1000)
    shutil.rmtree(copies.folder)
    copies.folder.symlink_to(mine)
    with pytest.raises(FormatError, match="a link to one"):
        bring(copies, far, 0)
    with pytest.raises(FormatError, match="a link to one"):
        copies.drop(name, used=True)
    assert [path.name for path in (mine / "shards").iterdir()] == [os.path.basename(name)]
    assert (mine / name).read_bytes() == b"x" * 1000


def test_notes_of_no_copy_go(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), None)
    bring(copies, far, 0)
    (copies.folder / far.names[0]).unlink()
    bring(copies, far, 1)
    assert [path.name for path in (copies.folder / "hashed").iterdir()] == [os.path.basename(far.names[1])]


def test_what_is_in_use_stays(tmp_path: Path, far: Memory) -> None:
    copies, other = Copies(str(tmp_path), 2000), Copies(str(tmp_path), 2000)
    with copies.held(far.names[0], 1000, far) as path:
        for k in (1, 2, 3):
            bring(other, far, k)
            assert path.exists()
        assert there(copies, far) == [0, 3]


def test_nothing_that_is_not_ours_is_removed(tmp_path: Path, far: Memory) -> None:
    beside = tmp_path / "mine.npy"
    beside.write_bytes(b"x" * 5000)
    copies = Copies(str(tmp_path), 1000)
    foreign = copies.folder / "shards" / "notes.txt"
    foreign.write_bytes(b"x" * 5000)
    target = tmp_path / "target"
    target.write_bytes(b"y" * 1000)
    link = copies.folder / far.names[5]
    link.symlink_to(target)
    (copies.folder / "shards" / f"image-{'0' * 32}.npy").mkdir()
    for k in (0, 1, 2):
        bring(copies, far, k)
    assert there(copies, far) == [2, 5]
    with pytest.raises(FormatError, match="a link"):
        bring(copies, far, 5)
    assert beside.exists()
    assert foreign.exists()
    assert target.read_bytes() == b"y" * 1000
    assert link.is_symlink()


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, far: Memory) -> None:
    (tmp_path / "a" / "mmcompile-cache").mkdir(parents=True)
    (tmp_path / "a" / "mmcompile-cache" / "file").touch()
    with pytest.raises(FormatError, match="not made by Cache"):
        Copies(str(tmp_path / "a"), None)
    Copies(str(tmp_path / "b"), None)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mmcompile-cache").symlink_to(tmp_path / "b" / "mmcompile-cache")
    with pytest.raises(FormatError, match="a link to one"):
        Copies(str(tmp_path / "c"), None)
    with pytest.raises(OSError, match=r"the cache folder cannot be used .*'.*/none/deep'") as error:
        Copies(str(tmp_path / "none" / "deep"), None)
    assert error.value.errno == errno.ENOENT
    copies = Copies(str(tmp_path / "b"), 1500)
    bring(copies, far, 0)
    (copies.folder / "CACHEDIR.TAG").unlink()
    with pytest.raises(FormatError, match=r"lacks its CACHEDIR.TAG"):
        bring(copies, far, 1)
    assert there(copies, far) == [0]


def test_a_removed_folder_is_made_anew(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), None)
    bring(copies, far, 0)
    subprocess.run(["rm", "-r", copies.folder], check=True)
    bring(copies, far, 1)
    assert there(copies, far) == [1]


def test_a_full_disk_lets_the_oldest_go_then_names_the_folder(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(str(tmp_path), None)
    for k in (0, 1, 2):
        bring(copies, far, k)

    def full(fd: int, offset: int, length: int) -> None:
        if sum(path.stat().st_size for path in (copies.folder / "shards").iterdir()) + length > 3000:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    bring(copies, far, 3)
    assert there(copies, far) == [1, 2, 3]
    with copies.held(far.names[1], 1000, far), copies.held(far.names[2], 1000, far), copies.held(far.names[3], 1000, far):
        with pytest.raises(OSError, match=rf"no room for 1,000 bytes of far/{far.names[4]}; free some: '{copies.folder}'") as error:
            bring(copies, far, 4)
        assert error.value.errno == errno.ENOSPC
    assert there(copies, far) == [1, 2, 3]
    assert not list(copies.folder.rglob("*.part"))


def test_what_is_damaged_is_asked_for_twice_and_does_not_stay(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), None)
    name = far.names[0]
    for bad in (b"\1" * 1000, b"", b"\0" * 999):
        far.files[name], far.asked = bad, []
        with pytest.raises(CorruptShardError, match=rf"far/{name}: damaged, twice: expected 1,000 bytes"), copies.held(name, 1000, far):
            pass
        assert len(far.asked) == 2
    assert [path.name for path in (copies.folder / "shards").iterdir()] == []
    del far.files[name]
    for missing, nbytes in ((name, 1000), (f"shards/image-{hash_bytes(b'')}.npy", 0)):
        with pytest.raises(FileNotFoundError), copies.held(missing, nbytes, far):
            pass
    far.files[missing] = b""
    with copies.held(missing, 0, far) as path:
        assert path.read_bytes() == b""


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_holds_is_not(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), None)
    part = copies.folder / (far.names[1] + ".part")
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); f.write('half'); f.flush(); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    bring(copies, far, 0)
    copies.bring(far.names[1], 1000, far)  # somebody is at it
    assert part.read_text() == "half"
    assert there(copies, far) == [0]
    holder.kill()
    holder.communicate()
    os.utime(part, (4e9, 4e9))  # as a clock that went back leaves it
    bring(copies, far, 2)
    assert not part.exists()
    bring(copies, far, 1)
    assert there(copies, far) == [0, 1, 2]


def test_what_is_no_file_or_cannot_be_removed_is_an_error_that_names_it(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(str(tmp_path), None)
    for k, (suffix, make) in enumerate([("", os.mkdir), ("", os.mkfifo), (".part", os.mkdir), (".part", os.mkfifo)]):
        make(copies.folder / (far.names[k] + suffix))
        with pytest.raises(FormatError, match=rf"{far.names[k]}{suffix}: expected a file, found a folder or pipe: move it away"):
            bring(copies, far, k)
    (copies.folder / far.names[4]).write_bytes(b"short")
    unlink = os.unlink

    def refuse(path: Any) -> None:
        if str(path).endswith(far.names[4]):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(FormatError, match=rf"{far.names[4]}: not the file of that name, .* \(Operation not permitted\); remove it"):
        bring(copies, far, 4)
    assert not far.asked
    bring(copies, far, 5)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process that has the lock of this file, and does nothing."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        holder.kill()


def test_a_part_that_was_just_made_is_not_removed_before_it_is_locked(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, other, met = Copies(str(tmp_path), None), Copies(str(tmp_path), None), []

    def late(fd: int, path: Path) -> bool:
        if not met:  # `copies` has made its part, and `other` finds nobody at it
            met.append(path)
            bring(other, far, 1)
            assert path.exists()
        return lock(fd, path)

    monkeypatch.setattr("mmcompile.runtime.copies.lock", late)
    copies.bring(far.names[0], 1000, far)
    assert met == [copies.folder / (far.names[0] + ".part")]
    assert there(copies, far) == [0, 1]


def test_who_is_stopped_while_he_brings_a_file_is_not_waited_for(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.runtime.locked._STUCK", 0.2)
    copies = Copies(str(tmp_path), None)
    part = copies.folder / (far.names[0] + ".part")
    with locked(part), locked(part.with_name(part.name.replace(".part", ".1.part"))), locked(copies.folder / "lock"):
        copies.bring(far.names[0], 1000, far)
        assert not far.asked  # somebody is at it, and nobody waits
        bring(copies, far, 0)
        bring(copies, far, 1)
        assert part.exists()
        for left in copies.folder.rglob("*.part"):
            os.utime(left, (0, 0))
    bring(copies, far, 2)
    assert sorted(path.name for path in (copies.folder / "shards").iterdir()) == sorted(os.path.basename(name) for name in far.names[:3])
    assert len(far.asked) == 3


def test_who_brings_a_file_is_waited_for_as_long_as_he_writes(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.runtime.locked._STUCK", 0.3)
    copies = Copies(str(tmp_path), None)
    part = copies.folder / (far.names[0] + ".part")
    with locked(part):
        looks = []

        def write(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) <= 12:
                os.utime(part)
            sleep(seconds)

        sleep = time.sleep
        monkeypatch.setattr(time, "sleep", write)
        bring(copies, far, 0)
    assert len(looks) > 12
    assert max(looks) == 0.1
    assert len(far.asked) == 1


def test_only_the_origin_says_that_a_file_is_missing(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(str(tmp_path), None)
    read, removed = far.read, []

    def remove(name: str, start: int = 0, stop: int | None = None) -> bytes:
        if len(removed) < removals:
            removed.append(name)
            shutil.rmtree(copies.folder)
        return read(name, start, stop)

    monkeypatch.setattr(far, "read", remove)
    removals = 1
    bring(copies, far, 0)
    removals = 3
    with pytest.raises(OSError, match=rf"the cache folder cannot be used \(No such file.*'{tmp_path}'") as error:
        bring(copies, far, 1)
    assert not isinstance(error.value, FileNotFoundError)
    bring(copies, far, 1)
    del far.files[far.names[2]]
    with pytest.raises(FileNotFoundError, match=f"far/{far.names[2]}"):
        bring(copies, far, 2)
    shutil.rmtree(copies.folder)
    copies.folder.touch()
    with pytest.raises(OSError, match=rf"the cache folder cannot be used \(Not a directory.*'{tmp_path}'"):
        bring(copies, far, 3)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_gives_what_is_there(tmp_path: Path, far: Memory, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    copies = Copies(str(tmp_path), None)
    bring(copies, far, 0)
    (copies.folder / far.names[1]).write_bytes(far.files[far.names[1]])
    (copies.folder / far.names[2]).write_bytes(b"x" * 1000)
    opened = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(code, os.strerror(code), path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    for k in (0, 1):
        with copies.held(far.names[k], 1000, far) as path:
            assert path.read_bytes() == far.files[far.names[k]]
    said = "the cache folder cannot be used (Read-only file system)" if code == errno.EROFS else "no room for 1,000 bytes of far/.*; free some"
    for k in (2, 3):
        with pytest.raises(OSError, match=rf"{said}: '{tmp_path}".replace("(", r"\(").replace(")", r"\)")):
            bring(copies, far, k)


def test_a_time_in_the_future_does_not_keep_a_copy(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), 3000)
    for k in (0, 1, 2):
        bring(copies, far, k)
    os.utime(copies.folder / far.names[0].replace("shards", "hashed"), (4e9, 4e9))
    for k in (3, 4, 5):
        with copies.held(far.names[k], 1000, far):
            pass
    assert there(copies, far) == [3, 4, 5]


def test_a_forked_child_holds_no_lock(tmp_path: Path, far: Memory) -> None:
    copies = Copies(str(tmp_path), None)
    read, write = os.pipe()
    with copies.held(far.names[0], 1000, far):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    assert copies.drop(far.names[0])
    os.close(read)
    os.close(write)
    os.waitpid(pid, 0)
