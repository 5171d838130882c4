"""Hides how a tree on a disk is listed: one `scandir` of each folder and one `stat` of each item, by as many threads as pay.

One thread looks at some 200,000 files a second where names and inodes are in memory, and more threads then only stand in each other's way; on a
disk or a network that makes every call wait, threads are added.  What is found does not depend on their number: of several faults the first in
the order of paths is told.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat as stat_bits
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources.arrange import Folder
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice, show
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["HEAD_BYTES", "OPEN_FLAGS", "expect_file", "list_folders", "list_tree", "stat_columns"]

#: O_NONBLOCK: opening a FIFO that took a file's place returns at once; it has no effect on regular files.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

#: Threads at most: with 1 ms for each call that is 30,000 files a second, about what servers of files answer to one client.
_MOST_THREADS = 32
#: Entries that are looked at in one go, by one thread; after as many it is known how long a call waits.
_BATCH = 256
#: Folders that a thread is given at a time, where calls do not wait.
_FOLDERS = 32
#: A call that waits longer than this, and for each thread a turn more, waits for a disk or a network and not for other threads.
_SLOW_S, _TURN_S = 100e-6, 10e-6

_PROGRESS_S = 1.0
#: What decides about a file without an extension.
HEAD_BYTES = 32
_NO_STAT = (-1, -1, -1, -1)
_FIVE = struct.Struct("<5q")


def stat_columns(found: os.stat_result) -> tuple[int, int, int, int]:
    """(size, mtime_ns, ctime_ns, inode), as STAT_DTYPE has them."""
    inode = found.st_ino if found.st_ino < 2**63 else found.st_ino - 2**64  # some file systems use all 64 bits
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode


def expect_file(path: str, what: str) -> None:
    """Raises SourceError where `path` is there and is no regular file, but a folder, or a pipe, which would be waited for; `what` it should be."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise SourceError(f"{show(path)}: no regular file: expected {what}", path=path)


def list_tree(root: str, choice: Choice, progress: Callable[[int], None] | None = None, prefix: bytes = b"") -> Iterator[Folder]:
    """The folder `root` and every folder below it that counts, in no particular order; `progress` gets the number of items found so far.

    With a `prefix` (a name) keys are those of a tree in which `root` has this name, for patterns, too.

    A file that cannot be looked at (a dangling link) is an item if it has the extension of an image; its stat is -1.  Raises SourceError where a
    folder cannot be listed or contains itself.
    """
    return _Walk(os.fsencode(root), choice, progress, prefix=prefix).run([_Sub(prefix, _ancestors(root))])


def list_folders(root: str, keys: Iterable[bytes], choice: Choice, progress: Callable[[int], None] | None = None) -> Iterator[Folder]:
    """As `list_tree`, but these folders alone, and none that lies in them."""
    return _Walk(os.fsencode(root), choice, progress, deep=False).run([_Sub(key, ()) for key in keys])


class _Sub(NamedTuple):
    """A folder still to be listed; `key` is what it is called in keys, `chain` the (device, inode) of all that it lies in, itself the last."""

    key: bytes
    chain: tuple[tuple[int, int], ...]

    @property
    def position(self) -> tuple[bytes, ...]:
        """Sorts folders by path, each before all that lies in it."""
        return tuple(self.key.split(b"/")) if self.key else ()


class _Walk:
    """One pass over a tree."""

    def __init__(self, root: bytes, choice: Choice, progress: Callable[[int], None] | None, *, prefix: bytes = b"", deep: bool = True) -> None:
        self._root, self._choice, self._progress, self._deep = root, choice, progress, deep
        self._skip = len(prefix) + 1 if prefix else 0
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="list")
        self._lock = threading.Lock()
        self._threads = 1
        self._helping = self._calls = 0
        self._waited = 0.0
        self._found = 0
        self._stopped = self._quick = False

    def run(self, todo: list[_Sub]) -> Iterator[Folder]:
        """Deals folders to threads.  Raises the first fault in the order of paths."""
        fault: _Fault | None = None
        running: set[Future[tuple[list[Folder], list[_Sub], list[_Fault]]]] = set()
        try:
            while todo or running:
                while todo and len(running) < self._threads:
                    count = min(_FOLDERS, len(todo)) if self._quick else 1
                    running.add(self._pool.submit(self._list, todo[-count:]))
                    del todo[-count:]
                finished, running = wait(running, _PROGRESS_S, FIRST_COMPLETED)
                for future in finished:
                    folders, subs, faults = future.result()
                    yield from folders
                    todo += subs if self._deep else []
                    fault = min([*faults, *([fault] if fault else [])], key=lambda found: found.position, default=None)
                if fault is not None:
                    todo = [sub for sub in todo if sub.position < fault.position]  # what stands behind it is told by nobody
                if self._progress is not None:
                    self._progress(self._found)
        finally:
            self._stopped = True
            self._pool.shutdown(cancel_futures=True)
        if fault is not None:
            raise fault.error

    def _list(self, subs: list[_Sub]) -> tuple[list[Folder], list[_Sub], list[_Fault]]:
        """(folders listed, folders found in them, faults), in a thread."""
        listings = [_Listing(os.path.join(self._root, sub.key[self._skip :]), sub, self._choice) for sub in subs]
        folders = []
        for listing in listings:
            try:
                folders.append(self._list_one(listing))
            except OSError as error:
                listing.faults.append(_Fault(listing.sub.position, _cannot_list(listing, error)))
        return folders, [sub for listing in listings for sub in listing.folders], [fault for listing in listings for fault in listing.faults]

    def _list_one(self, listing: _Listing) -> Folder:
        """Entries are read here, and looked at here or, of a large folder, by threads that have nothing else to do.  Raises OSError."""
        parts: list[_Part] = []
        helped: deque[tuple[Future[_Part], list[os.DirEntry[bytes]]]] = deque()
        clock = _Clock()
        with os.scandir(listing.path) as scan:
            while not self._stopped and (batch := list(itertools.islice(scan, _BATCH))):
                entries = [entry for entry in batch if listing.is_file(entry)]
                if len(batch) == _BATCH and self._take_helper():
                    helped.append((self._pool.submit(self._help, listing, entries), entries))
                else:
                    parts.append(listing.look(entries))
                while helped and helped[0][0].done():
                    parts.append(helped.popleft()[0].result())
                self._note(clock, len(batch))
        self._note(clock, 1)
        for future, entries in helped:
            if future.cancel():  # no thread has begun with them
                self._give_helper()
                parts.append(listing.look(entries))
            else:
                parts.append(future.result())
        folder = listing.folder(parts)
        with self._lock:
            self._found += len(folder.keys)
        return folder

    def _help(self, listing: _Listing, entries: list[os.DirEntry[bytes]]) -> _Part:
        clock = _Clock()
        try:
            return listing.look(entries)
        finally:
            self._note(clock, len(entries))
            self._give_helper()

    def _take_helper(self) -> bool:
        with self._lock:
            free = self._helping < self._threads - 1
            self._helping += free
            return free

    def _give_helper(self) -> None:
        with self._lock:
            self._helping -= 1

    def _note(self, clock: _Clock, calls: int) -> None:
        """More threads where calls wait, and fewer where they only wait for each other."""
        with self._lock:
            self._waited += clock.waited()
            self._calls += calls
            if self._calls >= _BATCH:
                self._quick = self._waited / self._calls <= _SLOW_S + self._threads * _TURN_S
                self._threads = max(1, self._threads // 2) if self._quick else min(2 * self._threads, _MOST_THREADS)
                self._waited, self._calls = 0.0, 0


class _Clock:
    """How long a thread did nothing since it was last asked."""

    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.thread_time()

    def waited(self) -> float:
        wall, busy = self._wall, self._busy
        self._wall, self._busy = time.perf_counter(), time.thread_time()
        return self._wall - wall - (self._busy - busy)


@dataclass(frozen=True)
class _Part:
    """Items among some entries of a folder: their names, (*STAT_DTYPE, device) of each: int64 (N, 5), and what else was met."""

    names: Keys
    columns: npt.NDArray[np.int64]
    left_out: Counter[str]
    links: int


@dataclass(frozen=True)
class _Fault:
    """Why a folder cannot be listed, and where it stands in the order of paths."""

    position: tuple[bytes, ...]
    error: SourceError


class _Listing:
    """One folder while it is being listed: which entries count, and why others do not."""

    def __init__(self, path: bytes, sub: _Sub, choice: Choice) -> None:
        self.path, self.sub, self.choice = path, sub, choice
        self.text = as_text(sub.key)
        self.folders: list[_Sub] = []
        self.faults: list[_Fault] = []
        self.left_out: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def folder(self, parts: list[_Part]) -> Folder:
        """What all parts come to."""
        columns = np.concatenate([part.columns for part in parts]) if parts else np.empty((0, 5), np.int64)
        stat, devices = np.ascontiguousarray(columns[:, :4]).view(STAT_DTYPE)[:, 0], columns[:, 4]
        alike = len(devices) and bool((devices == devices[0]).all())
        folder = Folder.of(self.sub.key, Keys.join([part.names for part in parts]), stat, int(devices[0]) if alike else devices)
        folder.left_out, folder.counts = self.left_out, self.counts
        for part in parts:
            folder.left_out.update(part.left_out)
            if part.links:
                folder.counts["links to files"] += part.links
        return folder

    def is_file(self, entry: os.DirEntry[bytes]) -> bool:
        """Is this perhaps an item?  A folder is noted as one."""
        if self.choice.is_hidden(entry.name):
            self.left_out["hidden"] += 1
            return False
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link that leads round in circles, or where it may not be followed
            is_folder = False
        if is_folder:
            self._enter(entry)
        return not is_folder

    def _enter(self, entry: os.DirEntry[bytes]) -> None:
        key = self.sub.key + b"/" + entry.name if self.sub.key else entry.name
        if self.choice.excludes_folder(key):
            self.left_out["excluded folder"] += 1
            return
        found = entry.stat()
        sub = _Sub(key, (*self.sub.chain, (found.st_dev, found.st_ino)))
        if sub.chain[-1] in self.sub.chain:
            error = SourceError(
                f"folder {show(os.fsdecode(entry.path))} contains itself: it leads back to a folder that it lies in; "
                f"remove the link, or leave it out with --exclude {show(as_text(key))}",
                path=os.fsdecode(entry.path),
            )
            self.faults.append(_Fault(sub.position, error))
            return
        if entry.is_symlink():
            self.counts["links to folders"] += 1
        self.folders.append(sub)

    def look(self, entries: list[os.DirEntry[bytes]]) -> _Part:
        """Which of these are items, and their stat.  Several threads may look at entries of one folder."""
        found = _Looked()
        for entry in entries:
            reason = self.choice.why_not(entry.name, self.text)
            if not reason or (reason == NO_EXTENSION and self.choice.sniffs):
                reason = found.take(entry, has_extension=not reason)
            if reason:
                found.left_out[reason] += 1
        return _Part(Keys.of(found.names), np.frombuffer(found.columns, "<i8").reshape(-1, 5), found.left_out, found.links)


class _Looked:
    """Items as they are found; their stats are (*STAT_DTYPE, device), one after the other."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.columns = bytearray()
        self.left_out: Counter[str] = Counter()
        self.links = 0

    def take(self, entry: os.DirEntry[bytes], *, has_extension: bool) -> str:
        """Take an entry as an item, or tell the reason to leave it out."""
        try:
            found = entry.stat()
        except OSError:
            if not has_extension:  # nothing says that it is an image
                return "dangling link" if entry.is_symlink() else "unreadable, no extension"
            columns = (*_NO_STAT, -1)
        else:
            if not stat_bits.S_ISREG(found.st_mode):
                return "not a regular file"
            if not has_extension and (reason := _why_no_image(entry.path)):
                return reason
            columns = (*stat_columns(found), found.st_dev)
        self.links += entry.is_symlink()
        self.names.append(entry.name)
        self.columns += _FIVE.pack(*columns)
        return ""


def _why_no_image(path: bytes) -> str:
    """ "" where a file without an extension begins as a known format does."""
    try:
        fd = os.open(path, OPEN_FLAGS)
        try:
            head = os.read(fd, HEAD_BYTES) if stat_bits.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)
    except OSError:
        return "unreadable, no extension"
    return "no extension, no image" if sniff(head) is None else ""


def _cannot_list(listing: _Listing, error: OSError) -> SourceError:
    where = show(os.fsdecode(listing.path))
    remedy = "make it readable, or leave it out with --exclude " + show(listing.text) if listing.text else "make it readable"
    return SourceError(f"cannot list folder {where}: {error.strerror}; {remedy}", path=os.fsdecode(listing.path))


def _ancestors(root: str) -> tuple[tuple[int, int], ...]:
    """(device, inode) of RAW and of every folder above it: a link to one of these would list RAW within RAW."""
    chain = []
    path = os.path.realpath(root)
    while True:
        with contextlib.suppress(OSError):  # a folder that may not be looked at; a loop is then found one round later
            found = os.stat(path)
            chain.append((found.st_dev, found.st_ino))
        if path == os.path.dirname(path):
            return tuple(chain)
        path = os.path.dirname(path)
