"""Hides how the files of a dataset that lies far away, behind a URL or in a slow folder, become local ones: shard by shard, when they are wanted.

Only the cache folder is written.  A generation once opened is opened again without a request: its index and table are files like all others, named by
their hash.
"""

from __future__ import annotations

import errno
import operator
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcompile.errors import FormatError, GenerationError, NotADatasetError, RemoteError
from mmcompile.format.canonical import HASH, read_limited
from mmcompile.format.index import INDEX_LIMIT, Index
from mmcompile.format.npy import hash_bytes
from mmcompile.format.remains import not_a_dataset
from mmcompile.format.store import Store, is_url
from mmcompile.runtime.copies import Copies, Origin

__all__ = ["Cache", "Staged"]

#: Files brought at a time, in the background of one process: a connection to a store carries a tenth of what a network card does.
_THREADS = 8


@dataclass(frozen=True)
class Cache:
    """A place on a local disk for the shards of a dataset that lies far away.

    What was not hashed on this disk is never read, and a copy that was written to since is hashed again when it is next opened.  What a disk loses
    by itself is not seen: `mmcompile verify` reads whole datasets, and an empty cache is filled anew.  Copies are mapped, as a dataset on this disk
    would be: one that something else cuts short while it is open ends the process (SIGBUS), but with engine="pread", which brings it anew.

    dir: a folder, made if only the last part of its path is missing.  Everything lies in its sub-folder `mmcompile-cache`, and nothing else there is
        touched.  May be shared by processes, ranks, datasets and generations, and by jobs one after the other.
    max_bytes: what all copies there may take; over it the ones not used for longest go, but those that somebody has open: a process holds at most a
        quarter of it open.  None: what the disk has.  Best is room for all shards that a node reads, else for twice `block_shards` of them.
    """

    dir: str | os.PathLike[str]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dir, str | os.PathLike) or not os.fspath(self.dir) or is_url(os.fspath(self.dir)):
            raise TypeError(f"Cache takes the path of a folder on a local disk, not {self.dir!r}")
        object.__setattr__(self, "dir", os.path.abspath(os.fspath(self.dir)))
        if self.max_bytes is None:
            return
        try:
            most = -1 if isinstance(self.max_bytes, bool) else operator.index(self.max_bytes)
        except TypeError:
            most = -1
        if most < 1:
            raise ValueError(f"max_bytes is a number of bytes, at least 1, or None for no limit, not {self.max_bytes!r}")
        object.__setattr__(self, "max_bytes", most)


class Staged:
    """The files of a dataset at a URL or in a folder, as local copies in a cache.

    Raises RemoteError where there is nothing to reach the URL with, FormatError or OSError for a cache folder that cannot be used.
    """

    far = True

    def __init__(self, root: str, cache: Cache) -> None:
        self.root: Path | str = root if is_url(root) else Path(os.path.abspath(root))
        self._origin: Origin = Store(root) if is_url(root) else _Folder(Path(self.root))
        self._cache = cache
        self._copies = Copies(os.fspath(cache.dir), cache.max_bytes)
        self.shards = self._copies.folder / "shards"
        self.most_bytes = cache.max_bytes
        self._fetching: tuple[int, _Fetching] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.root), self._cache)

    def load(self, generation: str | None) -> tuple[Index, str]:
        if generation is not None and not HASH.match(generation):
            raise GenerationError(f"{self.root}: generation {generation!r:.50} is not 32 hex digits", path=str(self.root))
        if generation is None:
            return self._current()
        name = f"generations/{generation}.json"
        for _ in range(2):
            try:
                with self._held(name, None) as path:
                    data = read_limited(path, INDEX_LIMIT)
            except FileNotFoundError:
                break
            if hash_bytes(data) == generation:
                return Index.from_bytes(data, self._origin.where(name)), generation
            self._copies.drop(name, used=True)
        index, found = self._current()
        if found == generation:
            return index, found
        raise GenerationError(
            f"{self.root}: generation {generation} is gone (pruned?), the current one is {found}; open the dataset anew",
            path=str(self.root),
            expected=generation,
            found=found,
        )

    def kept(self, generation: str) -> bool:
        return self._origin.size(f"generations/{generation}.json") is not None

    @contextmanager
    def held(self, name: str, nbytes: int | None) -> Iterator[Path]:
        with self._held(f"shards/{name}", nbytes) as path:
            yield path

    def replace(self, name: str) -> None:
        self._copies.drop(f"shards/{name}", used=True)

    def here(self, name: str) -> bool:
        return self._copies.here(f"shards/{name}")

    def ahead(self, wanted: Sequence[tuple[str, int | None]]) -> None:
        count = self.fitting([nbytes or 0 for _, nbytes in wanted])
        missing = [(f"shards/{name}", nbytes) for name, nbytes in wanted[:count] if not self._copies.touch(f"shards/{name}")]
        if self._fetching is None or self._fetching[0] != os.getpid():  # threads are not forked
            self._fetching = os.getpid(), _Fetching(self._bring)
        self._fetching[1].want(missing)

    def fitting(self, sizes: Sequence[int]) -> int:
        if self.most_bytes is None:
            return len(sizes)
        left = self.most_bytes
        for count, nbytes in enumerate(sizes):
            left -= nbytes
            if left < 0:
                return count
        return len(sizes)

    def _current(self) -> tuple[Index, str]:
        """The index that is published now, and its name."""
        where, data = self._origin.where("index.json"), self._published()
        while True:
            found = hash_bytes(data)
            try:
                with self._held(f"generations/{found}.json", len(data)):
                    break
            except FileNotFoundError:
                if not any(True for _ in self._origin.list("generations")):
                    break
            data, before = self._published(), data  # perhaps another was published, and this one pruned, since it was read
            if data == before:
                said = f"{where}: changed after it was published (no generations/{found}.json there); {self._remedy()}"
                raise FormatError(said, path=where)
        return Index.from_bytes(data, where), found

    def _published(self) -> bytes:
        """What is in index.json."""
        try:
            data = self._origin.read("index.json", 0, INDEX_LIMIT + 1)
        except FileNotFoundError:
            said = f"{self.root}: no dataset there (no index.json); give the OUT of `mmcompile build RAW OUT`"
            raise NotADatasetError(said if isinstance(self.root, str) else not_a_dataset(self.root), path=str(self.root)) from None
        if len(data) > INDEX_LIMIT:
            where = self._origin.where("index.json")
            raise FormatError(f"{where}: more than {INDEX_LIMIT:,} bytes, which is the limit; {self._remedy()}", path=where)
        return data

    def _remedy(self) -> str:
        return f"run `mmcompile verify {self.root}`, which says how to mend it"

    @contextmanager
    def _held(self, name: str, nbytes: int | None) -> Iterator[Path]:
        with self._copies.held(name, self._size(name) if nbytes is None else nbytes, self._origin) as path:
            yield path

    def _size(self, name: str) -> int:
        """The size of a file that nothing says: of the copy, else of the original."""
        size = self._copies.size(name)
        if size is None:
            size = self._origin.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._origin.where(name))
        return size

    def _bring(self, name: str, nbytes: int | None) -> None:
        self._copies.bring(name, self._size(name) if nbytes is None else nbytes, self._origin)


class _Folder:
    """A folder, slow or on a network, as an origin."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def where(self, name: str) -> str:
        return str(self._root / name)

    def size(self, name: str) -> int | None:
        try:
            status = os.lstat(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, error) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(name)) from None
        except OSError as error:
            raise self._failed(name, error) from error
        try:
            size = os.fstat(fd).st_size
            end = size if stop is None else min(stop, size)
            data = bytearray()
            while start + len(data) < end and (part := os.pread(fd, end - start - len(data), start + len(data))):
                data += part
            return bytes(data)
        except OSError as error:
            raise self._failed(name, error) from error
        finally:
            os.close(fd)

    def list(self, folder: str) -> Iterator[str]:
        try:
            yield from os.listdir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failed(folder, error) from error

    def _failed(self, name: str, error: OSError) -> RemoteError:
        return RemoteError(f"{self.where(name)}: cannot be read ({error.strerror})", path=self.where(name))


class _Fetching:
    """Threads that bring files here, while there are any to bring.  What goes wrong shows when a file is really wanted."""

    def __init__(self, bring: Callable[[str, int | None], None]) -> None:
        self._bring = weakref.WeakMethod(bring)  # whoever drops the dataset ends this
        self._changed = threading.Lock()
        self._todo: deque[tuple[str, int | None]] = deque()
        self._running = 0

    def want(self, files: Sequence[tuple[str, int | None]]) -> None:
        """These and no others, in this order."""
        with self._changed:
            self._todo = deque(files)
            starting = min(_THREADS, len(files)) - self._running
            for _ in range(starting):
                self._running += 1
                try:
                    threading.Thread(target=self._work, name="mmcompile-fetch", daemon=True).start()
                except RuntimeError:  # no more threads may be started: what is wanted is brought when it is read
                    self._running -= 1
                    return

    def _work(self) -> None:
        while True:
            with self._changed:
                bring = self._bring()
                if not self._todo or bring is None:
                    self._running -= 1
                    return
                name, nbytes = self._todo.popleft()
            with suppress(Exception):
                bring(name, nbytes)
            del bring
