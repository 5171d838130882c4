"""Hides that a dataset lies on a store: a local folder stands for it, which everything that reads a folder can read.

In the folder, index, generations, tables, provenance, keys, labels, rejects and the small files of `.build/` are copies, whole.  Image shards, and
what is not ours, are stubs: files of the same name and size without content, until one is brought.  The folder is private, goes when it is closed,
and what a killed process left of one goes when the next is opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mmcompile.errors import FormatError, MMCompileError, OutputExistsError, RemoteError
from mmcompile.format.catalog import digest_of
from mmcompile.format.index import load_index
from mmcompile.format.store import Store, time_of

__all__ = ["Home", "Mirror", "host_folder", "in_threads", "make_stub", "mirrored"]

_E = TypeVar("_E", bound=MMCompileError)
_T = TypeVar("_T")

#: Downloads at a time: small files, whose time is the way to the store and back.
_THREADS = 16
#: Where a dataset has files, in the order in which they are listed.
_FOLDERS = ("", "generations", "shards", ".build", ".build/seals")
#: What says nothing about a name: no room, or no more files.
_SHORT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
#: Of `.build/`, what another run goes on from.
_KEPT = frozenset({"settings.json", "stat-cache", "rows"})


class Mirror:
    """The folder `folder` that stands for the dataset at a URL.  A context manager."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self._home = Home()
        self.folder = self._home.path / "out"
        self.folder.mkdir()
        #: Bytes of every object that was listed, by name.
        self.there: dict[str, int] = {}
        self._whole: set[str] = set()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._home.remove()

    def look(self) -> None:
        """Just what tells whether this is a dataset, a build, or something else: names, and the index where there is one."""
        self._list([""])
        if "index.json" in self.there:
            self._list(["generations"])
            self._get(["index.json"])
        else:
            self._list(_FOLDERS[1:])

    def pull(self, without: Iterable[str] = ()) -> None:
        """Everything that is not large; of shards/ not the kinds `without` either (which stay stubs).  Raises RemoteError, OutputExistsError."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.there.clear()
        self._whole.clear()
        self._list(_FOLDERS)
        first = [name for name in self.there if name == "index.json" or name.startswith("generations/")]
        self._get(first)
        stubs = self._images() | set(without)
        rest = [name for name in self.there if _is_ours(name) and name.rpartition("/")[2].partition("-")[0] not in stubs]
        self._get([name for name in rest if not name.startswith("generations/")])

    @contextlib.contextmanager
    def brought(self, path: Path) -> Iterator[None]:
        """While this lasts, a file of the folder is whole.  Raises RemoteError."""
        name = str(path.relative_to(self.folder))
        if name in self._whole or name not in self.there:
            yield
            return
        try:
            self._get([name])
            yield
        finally:
            self._whole.discard(name)
            make_stub(path, self.there[name])

    def told(self, error: _E) -> _E:
        """An error, with the URL in place of the folder."""
        details = {name: self.text(value) if isinstance(value, str) else value for name, value in error.details.items()}
        return type(error)(self.text(str(error)), **details)

    def text(self, text: str) -> str:
        """A message, with the URL in place of the folder."""
        return text.replace(str(self.folder), self.store.url)

    def _list(self, folders: Iterable[str]) -> None:
        for folder in folders:
            if folder and not (self.folder / folder).is_dir():
                continue
            for name, facts in self.store.list(folder):
                if name.endswith("/"):  # below an empty part of a name, which no file of ours has
                    continue
                path = self.folder / name
                try:
                    if facts["type"] == "directory":
                        path.mkdir(exist_ok=True)
                        continue
                    self.there[name] = int(facts["size"] or 0)
                    if not path.exists():
                        make_stub(path, self.there[name])
                    if made := time_of(facts):
                        os.utime(path, ns=(made, made))
                except (OSError, ValueError) as error:
                    if isinstance(error, MMCompileError) or (isinstance(error, OSError) and error.errno in _SHORT):
                        raise
                    raise OutputExistsError(
                        f"{self.store.where(name)}: a name that mmcompile did not write ({error}); choose a new or empty folder for OUT",
                        path=self.store.url,
                    ) from error

    def _images(self) -> set[str]:
        """The fields whose shards are large."""
        found = {"image"}
        kept = [name.removeprefix("generations/").removesuffix(".json") for name in self.there if name.startswith("generations/")]
        for generation in [None, *kept]:
            with contextlib.suppress(FormatError, OSError):
                found |= {f.name for f in load_index(self.folder, generation)[0].fields if f.meaning != "class"}
        return found

    def _get(self, names: list[str]) -> None:
        def get(name: str) -> None:
            path = self.folder / name
            made = path.stat().st_mtime_ns
            try:
                size = self.store.get(name, path)
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                raise OSError(error.errno, error.strerror, str(self._home.path)) from error  # a failed write names no file
            if size != self.there[name]:
                raise RemoteError(f"{self.store.where(name)}: {size:,} bytes, listed with {self.there[name]:,}; run the same command again")
            os.utime(path, ns=(made, made))
            self._whole.add(name)

        in_threads(get, names)


def mirrored(url: str, use: Callable[[Mirror], _T], without: Iterable[str] = ()) -> _T:
    """What `use` makes of a Mirror with everything that is not large; its errors name the URL."""
    with Mirror(url) as mirror:
        try:
            mirror.pull(without)
            return use(mirror)
        except MMCompileError as error:
            raise mirror.told(error) from error


def in_threads(action: Callable[[str], Any], names: Iterable[str]) -> None:
    """Do something with many objects, some at a time; the first error is raised, once those at work have ended."""
    with ThreadPoolExecutor(_THREADS, "store") as pool:
        futures = [pool.submit(action, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def make_stub(path: Path, size: int) -> None:
    """Put a file of this size without content in place of whatever has this name."""
    aside = path.with_name(f".{secrets.token_hex(8)}.stub")
    with open(aside, "wb") as file:
        file.truncate(size)
    aside.rename(path)


def _is_ours(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    if folder == "shards":
        return digest_of(last) is not None
    return folder in (".build/seals", "generations") or (folder == ".build" and last in _KEPT)


def host_folder() -> Path:
    """The folder of this user on this machine's own disk.  Raises RemoteError where somebody else has it."""
    base = Path(tempfile.gettempdir()) / f"mmcompile-{os.getuid()}"
    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        status = base.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise RemoteError(
                f"{base}: belongs to someone else, or is no folder; remove it, or set TMPDIR to another folder", path=str(base)
            ) from None
    return base


class Home:
    """A new private folder `path` for temporary files (below TMPDIR), which goes with its process.

    Its lock says that the process lives; folders whose process is gone are removed when the next one is made.
    """

    def __init__(self) -> None:
        base = host_folder()
        for old in base.iterdir():
            with contextlib.suppress(OSError):
                fd = os.open(old / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
                finally:
                    os.close(fd)
        self.path = Path(tempfile.mkdtemp(dir=base))
        self._lock = os.open(self.path / "starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "starting", self.path / "lock")  # it is locked by the time that it can be found
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Delete the folder now, rather than when the process ends."""
        self._remove()


def _remove(path: Path, lock: int, owner: int) -> None:
    if owner == os.getpid():  # a forked child has copies of both
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
