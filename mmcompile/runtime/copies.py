"""Hides how copies of far files lie in a folder that all processes of a host share: brought once, complete or not there, the oldest let go.

A file being brought has another name, which is also its lock (`flock`): whoever holds it brings the file, others wait and then find it; the kernel
drops the lock of a dead process, and what it left is brought anew or removed.  A copy that somebody holds open is locked too, and stays.  Nothing is
ever removed but regular files with names of our form, in the folders that lie beside our mark.

What was not hashed here is never given.  Beside each copy lies a note of what its file was when its hash was right: a file that was written, put in
its place or brought from elsewhere since does not fit its note, and is hashed again, and kept or brought anew.  Only what a disk loses by itself, or
what is written while a reader has the copy open already, stays unseen.  The time of the note, and not of the copy, says when it was last used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mmcompile.errors import CorruptShardError, FormatError, RemoteError
from mmcompile.format.commit import install, write_atomic
from mmcompile.format.npy import hash_file
from mmcompile.runtime.locked import close, is_same, lock, open_file, share, wait_for

__all__ = ["Copies", "Origin"]

#: What a copy is called: what it holds and its hash, or for an index the hash alone; `.part` while it is being brought.
_FORM = re.compile(r"(?:[a-z][a-z0-9_]{0,63}-)?([0-9a-f]{32})\.(?:npy|json|jsonl)((?:\.\d{1,6})?\.part)?\Z")
_PART = ".part"
#: The folders of copies, as in a dataset.
_FOLDERS = ("shards", "generations")
#: The folder of notes, each named as its copy.
_NOTES = "hashed"
#: Marks a folder as a cache for tools that make backups (https://bford.info/cachedir/), and as ours.
_MARK = "CACHEDIR.TAG"
_MARK_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# Copies of files of datasets, made by mmcompile.  May be deleted when nobody reads them.\n"
)
#: Bytes asked for at a time: little enough that one try is cheap, enough that a store's latency is lost in it.
_CHUNK = 8 << 20
#: A file written within this time may be written again without its time changing: file systems count in seconds at the coarsest.
_JUST_NS = 10**9
#: No room, or none for this user.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Nothing can be written, but what is there can be read.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class Origin(Protocol):
    """Where the files come from."""

    def where(self, name: str) -> str:
        """The full name of a file, for messages."""

    def size(self, name: str) -> int | None:
        """Its bytes; None where there is none."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file, fewer at its end.  FileNotFoundError, or RemoteError after some tries."""

    def list(self, folder: str) -> Iterator[Any]:
        """What lies in a folder."""


class _Missing(FileNotFoundError):
    """The original is not there: other than a part of the cache folder."""


class _Stamp(NamedTuple):
    """What no longer is the same once a file was written, put in place of another, or moved to another disk."""

    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    def text(self) -> bytes:
        return b"%d %d %d %d\n" % self


class _Copy(NamedTuple):
    age: int
    nbytes: int
    path: str
    part: bool


class Copies:
    """The copies in `folder`/mmcompile-cache, at most `max_bytes` of them (None: no limit) unless more are in use at once.

    Raises FormatError for a folder of that name that is not ours, OSError naming the folder where it cannot be used.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self.folder, self._max_bytes = Path(folder) / "mmcompile-cache", max_bytes
        try:
            self._prepare()
        except OSError as error:
            raise OSError(error.errno, f"the cache folder cannot be used ({error.strerror}{_remedy(error.errno)})", folder) from error

    def here(self, name: str) -> bool:
        return os.path.exists(self.folder / name)

    def touch(self, name: str) -> bool:
        """Is it here?  Then it is the youngest now."""
        with contextlib.suppress(OSError):  # not hashed yet, or another user's
            os.utime(self._note(name), follow_symlinks=False)
        return self.here(name)

    def size(self, name: str) -> int | None:
        """The bytes of a copy that is here and whole; None where there is none."""
        try:
            fd = open_file(self.folder / name, os.O_RDONLY)
        except OSError:
            return None
        try:
            return os.fstat(fd).st_size if self._is_noted(fd, name) else None
        finally:
            close(fd)

    @contextlib.contextmanager
    def held(self, name: str, nbytes: int, origin: Origin) -> Iterator[Path]:
        """A file of so many bytes, brought here if it is not yet; not removed as long as this lasts.

        Raises FileNotFoundError, RemoteError or CorruptShardError of the origin; FormatError for what lies in the way of a copy, and an OSError that
        is no FileNotFoundError, naming the cache folder, where that cannot be used or has no room.
        """
        fd = self._take(name, nbytes, origin, wait=True)
        try:
            yield self.folder / name
        finally:
            if fd is not None:
                close(fd)

    def bring(self, name: str, nbytes: int, origin: Origin) -> None:
        """Bring a file here, unless it is, or somebody is at it.  Raises as `held`."""
        if not self.here(name):
            fd = self._take(name, nbytes, origin, wait=False)
            if fd is not None:
                close(fd)

    def drop(self, name: str, *, used: bool = False) -> bool:
        """Remove a copy that nobody uses (or `used`: whoever has it open keeps what is in it).  False where it was not removed."""
        path = self.folder / name
        try:
            fd = open_file(path, os.O_RDONLY)
        except (OSError, FormatError):
            return False
        try:
            if used:
                self._check()
            else:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_same(fd, path):
                return False
            os.unlink(path)
            if not name.endswith(_PART) and stat.S_ISREG(os.lstat(self._note(name)).st_mode):
                os.unlink(self._note(name))
        except OSError:
            return not os.path.lexists(path)
        finally:
            close(fd)
        return True

    # ------------------------------------------------------------------

    def _take(self, name: str, nbytes: int, origin: Origin, *, wait: bool) -> int | None:
        """A descriptor of a copy, locked as in use; None where somebody else is at it, which does not happen with `wait`."""
        try:
            try:
                return self._find(name, nbytes, origin, wait=wait)
            except FileNotFoundError as error:
                if isinstance(error, _Missing):
                    raise
                self._prepare()  # the folder was removed
                return self._find(name, nbytes, origin, wait=wait)
        except (RemoteError, _Missing):
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise OSError(error.errno, f"no room for {nbytes:,} bytes of {origin.where(name)}; free some", str(self.folder)) from error
            code = errno.ESTALE if error.errno == errno.ENOENT else error.errno  # the original is there
            raise OSError(code, f"the cache folder cannot be used ({error.strerror}{_remedy(code)})", str(self.folder.parent)) from error

    def _find(self, name: str, nbytes: int, origin: Origin, *, wait: bool) -> int | None:
        """As `_take`.  Names that end in .part, .1.part, ... are tried: the next one where whoever has the one before no longer gets on."""
        final, stuck = self.folder / name, 0
        while True:
            fd = self._open(name, nbytes)
            if fd is not None:
                return fd
            part = final.with_name(f"{final.name}.{stuck}{_PART}" if stuck else final.name + _PART)
            try:
                fd = open_file(part, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno in (*_READ_ONLY, *_FULL) and (fd := self._hashed(name, nbytes)) is not None:
                    return fd
                raise
            try:
                if not lock(fd, part):
                    if not wait:
                        return None
                    stuck += not wait_for(fd, part)
                elif is_same(fd, part):
                    taken = self._bring(fd, part, name, nbytes, origin)
                    if taken is not None:
                        fd = -1 if taken == fd else fd
                        return taken
            finally:
                if fd >= 0:
                    close(fd)

    def _open(self, name: str, nbytes: int) -> int | None:
        """A descriptor of a copy, locked as in use; None where it is not here, not as large as it must be, or not what was hashed."""
        path = self.folder / name
        try:
            fd = open_file(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if share(fd):
                status = os.fstat(fd)
                if status.st_nlink and status.st_size == nbytes and self._is_noted(fd, name):
                    self.touch(name)
                    taken, fd = fd, -1
                    return taken
        finally:
            if fd >= 0:
                close(fd)
        return None

    def _hashed(self, name: str, nbytes: int) -> int | None:
        """As `_open`, of a copy that nothing is known of: hashed now, and noted."""
        try:
            fd = open_file(self.folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if share(fd) and os.fstat(fd).st_size == nbytes:
                _set_back(fd)
                stamp = _stamp(fd)
                with contextlib.suppress(OSError):  # the disk lost it
                    if hash_file(fd) == _digest(name) and _stamp(fd) == stamp and is_same(fd, self.folder / name):
                        self._make_note(stamp, name)
                        taken, fd = fd, -1
                        return taken
        finally:
            if fd >= 0:
                close(fd)
        return None

    def _note(self, name: str) -> Path:
        return self.folder / _NOTES / os.path.basename(name)

    def _is_noted(self, fd: int, name: str) -> bool:
        try:
            note = open_file(self._note(name), os.O_RDONLY)
        except (OSError, FormatError):
            return False
        try:
            return os.read(note, 256) == _stamp(fd).text()
        except OSError:
            return False
        finally:
            close(note)

    def _make_note(self, stamp: _Stamp, name: str) -> None:
        """Note what a copy was before and after it was hashed.

        A note that is cut or mixed up fits no copy; one that cannot be written, or whose name something else has, is only missed.
        """
        with contextlib.suppress(OSError, FormatError):
            note = open_file(self._note(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.write(note, stamp.text())
            finally:
                close(note)

    def _bring(self, fd: int, part: Path, name: str, nbytes: int, origin: Origin) -> int | None:
        """A descriptor of a copy, locked as in use: of one that lies there and turns out to be right, else `fd`, of the part that was brought.

        None where somebody else has it by now or wrote to it, FileNotFoundError where the folder was removed meanwhile.
        """
        final = self.folder / name
        try:
            self._check()
            found = self._hashed(name, nbytes)
            if found is not None:
                os.unlink(part)
                return found
            try:
                os.unlink(final)
            except FileNotFoundError:
                pass
            except OSError as error:
                said = f"{final}: not the file of that name, and cannot be removed ({error.strerror}); remove it"
                raise FormatError(said, path=str(final)) from error
            self._make_room(fd, nbytes)
            hashed = self._fill(fd, name, nbytes, origin)
            if not share(fd):
                return None
            self._must_be(fd, part)
            install(part, final)
            self._must_be(fd, final)
            stamp = _stamp(fd)
            if stamp != hashed._replace(ctime_ns=stamp.ctime_ns):  # which a rename changes
                return None
            self._make_note(stamp, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        return fd

    def _must_be(self, fd: int, path: Path) -> None:
        if not is_same(fd, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _fill(self, fd: int, name: str, nbytes: int, origin: Origin) -> _Stamp:
        """Write the file and hold it against the hash in its name, once more where it does not match; what it was when it was hashed."""
        wanted_hash, found, at = _digest(name), "", 0
        for _ in range(2):
            at = 0
            while True:
                wanted = min(_CHUNK, nbytes - at)
                view = memoryview(_read(origin, name, at, at + max(1, wanted), nbytes))[:wanted]  # is an empty one there?
                short = len(view) < wanted
                while view:
                    written = os.pwrite(fd, view, at)
                    view, at = view[written:], at + written
                if short or at == nbytes:
                    break
            os.ftruncate(fd, at)
            _set_back(fd)
            stamp = _stamp(fd)
            found = hash_file(fd)
            if found == wanted_hash and _stamp(fd) == stamp:
                return stamp
        if found == wanted_hash:
            path = str(self.folder / name)
            raise FormatError(f"{path}: something else wrote to it while it was brought, twice; find out what, or give another folder", path=path)
        where = origin.where(name)
        raise CorruptShardError(
            f"{where}: damaged, twice: expected {nbytes:,} bytes of hash {wanted_hash}, found {at:,} of hash {found}; "
            f"run `mmcompile verify {where.removesuffix('/' + name)}`",
            path=where,
            expected=wanted_hash,
            found=found,
        )

    def _make_room(self, fd: int, nbytes: int) -> None:
        """Let the oldest copies go until these bytes fit below the limit and on the disk, and take their room for `fd`."""
        path = self.folder / "lock"
        counting = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            while not lock(counting, path) and is_same(counting, path) and wait_for(counting, path):
                pass  # without it, where its holder no longer gets on, room is counted less well
            copies = self._clean()
            if self._max_bytes is not None:
                self._let_go(copies, sum(copy.nbytes for copy in copies) + nbytes - self._max_bytes)
            if nbytes and not _reserve(fd, nbytes):
                self._let_go(copies, nbytes)
                if not _reserve(fd, nbytes):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            close(counting)

    def _let_go(self, copies: list[_Copy], nbytes: int) -> None:
        """Remove the oldest copies, so many bytes of those that nobody uses."""
        for copy in sorted(copies):
            if nbytes <= 0:
                return
            if not copy.part and self.drop(copy.path):
                copies.remove(copy)
                nbytes -= copy.nbytes

    def _clean(self) -> list[_Copy]:
        """All copies; parts that nobody is at are removed, and notes of no copy."""
        notes, now = {}, time.time_ns()
        for name, status in self._files(_NOTES):
            notes[name] = min(status.st_mtime_ns, now)
            if status.st_mtime_ns > now:  # a clock went back: it ages from now on
                self.touch(f"{_FOLDERS[0]}/{name}")
        found = []
        for folder in _FOLDERS:
            for name, status in self._files(folder):
                path, part = f"{folder}/{name}", name.endswith(_PART)
                made = part and abs(now - status.st_mtime_ns) < _JUST_NS  # and perhaps not locked yet
                if not part or made or not self.drop(path):
                    found.append(_Copy(notes.pop(name, 0), status.st_size, path, part))
        for name in notes:
            if not any(self.here(f"{folder}/{name}") for folder in _FOLDERS):
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / _NOTES / name)
        return found

    def _files(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """The regular files there with names of our form."""
        with os.scandir(self.folder / folder) as entries:
            for entry in entries:
                if _FORM.match(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _prepare(self) -> None:
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        if not self._is_marked() and any(not name.startswith(f".{_MARK}.") for name in os.listdir(self.folder)) and not self._is_marked():
            raise FormatError(
                f"{self.folder}: not empty, and not made by Cache (no {_MARK}); remove it, or give another folder", path=str(self.folder)
            )
        if not self._is_marked():
            write_atomic(self.folder / _MARK, _MARK_TEXT)
        for name in (*_FOLDERS, _NOTES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder / name)
        self._check()

    def _check(self) -> None:
        """Raises FormatError where the folders are not ours: nothing is removed behind a link."""
        for folder in (self.folder, *(self.folder / name for name in (*_FOLDERS, _NOTES))):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise FormatError(f"{folder}: not a folder, or a link to one; remove it, or give another folder", path=str(folder))
        if not self._is_marked():
            raise FormatError(f"{self.folder}: lacks its {_MARK}, so it may be another's; remove it, or give another folder", path=str(self.folder))

    def _is_marked(self) -> bool:
        return os.path.isfile(self.folder / _MARK)


def _digest(name: str) -> str:
    """The hash that a file's name says."""
    match = _FORM.match(os.path.basename(name))
    assert match is not None
    return match[1]


def _remedy(code: int | None) -> str:
    """What helps where a cache folder cannot be used."""
    remedies = {
        errno.ENOENT: ": make the folder that it is to lie in",
        errno.ENOTDIR: ": a part of its path is a file",
        **dict.fromkeys(_FULL, ": free some space there, or give another folder"),
    }
    return remedies.get(code or 0, "")


def _set_back(fd: int) -> None:
    """Make a file that was just written older: whoever writes to it from now on changes its time, even within one tick of the clock.

    Of two who hash the same file at once the second finds it old, and leaves its times alone.
    """
    now = time.time_ns()
    if abs(now - os.fstat(fd).st_mtime_ns) < _JUST_NS:
        with contextlib.suppress(OSError):  # another user's
            os.utime(fd, ns=(now, now - 2 * _JUST_NS))


def _stamp(fd: int) -> _Stamp:
    status = os.fstat(fd)
    return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read(origin: Origin, name: str, start: int, stop: int, nbytes: int) -> bytes:
    try:
        return origin.read(name, start, stop)
    except FileNotFoundError as error:
        raise _Missing(errno.ENOENT, os.strerror(errno.ENOENT), origin.where(name)) from error
    except RemoteError:
        size = origin.size(name) if start else None
        if size is None or size >= nbytes:
            raise
        return b""  # it ends here: many stores refuse to read from the end on


def _reserve(fd: int, nbytes: int) -> bool:
    """Take the room of so many bytes; False where there is not enough."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in _FULL:
            return False
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return True
