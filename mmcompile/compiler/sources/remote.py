"""Hides that a folder of images lies on an object store: how it is listed without a request for each object, and how objects are read.

What a listing says of an object (size, time, ETag) is its stat, so an unchanged one is recognised without being read.  Which objects are items, their
order and their classes are those of the same tree on a disk, and so are the settings: the datasets are the same to the byte.
"""

from __future__ import annotations

import errno
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import xxhash

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.folder import MAX_SOURCE_BYTES, FolderSource
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice, show
from mmcompile.compiler.sources.splits import Layout
from mmcompile.compiler.sources.walk import HEAD_BYTES
from mmcompile.errors import RemoteError, SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.npy import hash_bytes
from mmcompile.format.store import Store, entry_of, is_url, on_disk, time_of

__all__ = ["RemoteSource", "folder_source"]

#: Requests on their way at once while listing: a store answers one in some 10 to 100 ms, whatever else it is asked.
_THREADS = 16
#: Objects whose facts are remembered between their reading and the question whether they are still the ones that were listed.
_REMEMBERED = 1024


@dataclass(frozen=True)
class RemoteSource:
    """The images below the URL `root`; all else as for a FolderSource.

    An object may change while a build runs: what is read is held against what the store then says of it.  Thread-safe.
    """

    root: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    layout: Layout = field(default_factory=Layout)
    #: A store answers late, but many at a time.
    parallel: ClassVar[int] = 16
    _reads: _Reads = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root.rstrip("/"))
        object.__setattr__(self, "include", tuple(self.include))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        object.__setattr__(self, "_reads", _Reads(Store(self.root)))

    def identity(self) -> dict[str, object]:
        """Those of the same tree on a disk: where it lies changes no sample."""
        return FolderSource("/", self.include, self.exclude, self.hidden, self.extensions, self.layout).identity()

    def location(self) -> str:
        """Tells one RAW from another; the URL itself, in which there may be a password, stays out of every file."""
        return f"url {hash_bytes(self.root.encode())}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in ImageFolder's order, folders at a time; `progress` gets the number of images found so far.  Raises SourceError."""
        choice = Choice(self.include, self.exclude, self.hidden, self.extensions)
        return arrange({"": self.root}, self.tree(choice, progress), choice, self.layout)

    def tree(self, choice: Choice, progress: Callable[[int], None] | None = None, prefix: bytes = b"") -> Iterator[Folder]:
        """Every folder of the tree with its items, in no particular order; all keys begin with `prefix`, a name.  Raises SourceError."""
        try:
            return iter(_Listing(self._reads.store, choice, progress or (lambda _: None), as_text(prefix)).list_tree())
        except RemoteError as error:
            raise SourceError(f"cannot list RAW: {error}", path=self.root) from error

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: it cannot be read, is over 2 GiB, or changed meanwhile."""
        return self._reads.read(as_text(key))

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, a hash of its ETag) of one item as it is, or was just after this process read it.  Raises OSError."""
        return self._reads.stat(as_text(key))


def folder_source(
    root: str,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    *,
    hidden: bool = False,
    extensions: frozenset[str] | None = None,
    layout: Layout | None = None,
) -> FolderSource | RemoteSource:
    """The images below a path or a URL; a `file://` URL is the path that it is."""
    root = on_disk(root)
    kind = RemoteSource if is_url(root) else FolderSource
    return kind(root, tuple(include), tuple(exclude), hidden, extensions, layout or Layout())


class _Reads:
    """Reads objects, and remembers for a while what they were when they were read, so that this is not asked for twice."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, tuple[int, int, int, int]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    def read(self, name: str) -> bytes:
        data = self.store.read(name)
        if len(data) > MAX_SOURCE_BYTES:
            raise OSError(errno.EFBIG, f"{len(data)} bytes, more than the {MAX_SOURCE_BYTES} that are read", self.store.where(name))
        found = self._ask(name)
        if found[0] != len(data):
            raise OSError(errno.EAGAIN, "changed while read", self.store.where(name))
        with self._lock:
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[name] = found
        return data

    def stat(self, name: str) -> tuple[int, int, int, int]:
        with self._lock:
            known = self._known.pop(name, None)
        return self._ask(name) if known is None else known

    def _ask(self, name: str) -> tuple[int, int, int, int]:
        found = self.store.facts(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "vanished from the store", self.store.where(name))
        return _columns(found)


class _Listing:
    """One pass over RAW; what it lists is called `prefix/…` in keys, where there is a prefix."""

    def __init__(self, store: Store, choice: Choice, progress: Callable[[int], None], prefix: str) -> None:
        self._store, self._choice, self._progress, self._prefix = store, choice, progress, prefix

    def list_tree(self) -> list[Folder]:
        """Every folder, in no particular order.  Raises SourceError or RemoteError."""
        done: list[Folder] = []
        found = 0
        with ThreadPoolExecutor(_THREADS, "list") as pool, ThreadPoolExecutor(_THREADS, "sniff") as self._sniffing:
            waiting: set[Future[tuple[Folder, list[str]]]] = {pool.submit(self._list, "")}
            try:
                while waiting:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ready:
                        folder, inner = future.result()
                        done.append(folder)
                        found += len(folder.keys)
                        waiting |= {pool.submit(self._list, key) for key in inner}
                    self._progress(found)
            finally:
                for future in waiting:
                    future.cancel()
        return done

    def _list(self, key: str) -> tuple[Folder, list[str]]:
        """One folder by its path below RAW, and the paths of the folders in it that count."""
        choice, names, columns, inner = self._choice, [], array("q"), []
        doubtful: list[tuple[str, dict[str, Any]]] = []
        called = self._called(key)
        folder = Folder.of(called.encode(), [], np.empty(0, STAT_DTYPE))
        entries = 0
        for path, facts in self._store.list(key):
            entries += 1
            name = path.removeprefix(f"{key}/" if key else "").encode("utf-8", "surrogateescape")
            if path.endswith("/"):
                folder.left_out["empty part in the name"] += 1
            elif choice.is_hidden(name):
                folder.left_out["hidden"] += 1
            elif facts["type"] == "directory":
                if choice.excludes_folder(self._called(path).encode()):
                    folder.left_out["excluded folder"] += 1
                else:
                    inner.append(path)
            elif (reason := choice.why_not(name, called)) and not (reason == NO_EXTENSION and choice.sniffs):
                folder.left_out[reason] += 1
            elif facts["type"] != "file":  # reading a pipe would wait for ever
                folder.left_out["not a regular file"] += 1
            elif reason and not facts["size"]:
                folder.left_out["no extension, no image"] += 1
            elif reason:
                doubtful.append((path, facts))
            else:
                names.append(name)
                columns.extend(_columns(facts))
        if not entries and not key:
            raise SourceError(f"cannot read RAW {show(self._store.url)}: there is no such bucket or folder, or nothing in it", path=self._store.url)
        for (path, facts), why in zip(doubtful, self._sniffing.map(self._why_no_image, [path for path, _ in doubtful]), strict=True):
            folder.counts["read for want of an extension"] += 1
            if why:
                folder.left_out[why] += 1
            else:
                names.append(path.removeprefix(f"{key}/" if key else "").encode())
                columns.extend(_columns(facts))
        stat = np.frombuffer(columns, np.int64).reshape(-1, 4).view(STAT_DTYPE)[:, 0] if names else np.empty(0, STAT_DTYPE)
        filled = Folder.of(called.encode(), names, stat)
        filled.left_out, filled.counts = folder.left_out, folder.counts
        return filled, inner

    def _called(self, path: str) -> str:
        """A path below RAW as it stands in keys."""
        return f"{self._prefix}/{path}" if self._prefix and path else self._prefix or path

    def _why_no_image(self, path: str) -> str:
        """Why an object without an extension is none, or "" where it begins as a known format does."""
        try:
            head = self._store.read(path, 0, HEAD_BYTES)
        except FileNotFoundError:
            return "unreadable, no extension"
        return "no extension, no image" if sniff(head) is None else ""


def _columns(facts: dict[str, Any]) -> tuple[int, int, int, int]:
    """A row of STAT_DTYPE from what a store says of an object."""
    entry, at = entry_of("", facts), time_of(facts)
    mark = xxhash.xxh3_64_intdigest(entry.stamp.encode())
    return entry.size, at, at, mark if mark < 2**63 else mark - 2**64
