"""Hides how files that may lie far away are read and written: fsspec (the extra `mmcompile[remote]`) behind one small class, with retries.

A store is a folder, under a URL such as `s3://bucket/out` or `gs://…`; names in it have `/` between their parts.  A request that fails is made again
after growing waits; then a RemoteError names the object.  What is missing is FileNotFoundError, at once.  Keys, endpoints and regions come from
where the store's own tools look for them: the environment and fsspec's configuration.  Safe after a fork, and pickled as its URL.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmcompile.errors import RemoteError

__all__ = ["Entry", "Store", "is_url"]

_T = TypeVar("_T")

#: A scheme of two letters at least: one letter is a drive of another system.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: Seconds before each further try: half a minute in all, as long as a store that shifts its load or restarts a node may take.
WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: What another try does not change.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, AttributeError)
#: Bytes moved at a time between a file and an object.
_CHUNK = 8 << 20


class Entry(NamedTuple):
    """One object: its name in the store, size in bytes, and a text that changes when its content does ("" where the store tells none)."""

    name: str
    size: int
    stamp: str


def is_url(place: object) -> bool:
    """Is this text the URL of a store, rather than a path?"""
    return isinstance(place, str) and _URL.match(place) is not None


class Store:
    """The objects below one URL.  Thread-safe.  Raises RemoteError where fsspec, or what it needs for this kind of URL, is not installed."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[int, Any, str] | None = None
        self._files()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def where(self, name: str) -> str:
        """The URL of one object."""
        return f"{self.url}/{name}"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of an object; to its end when None."""
        whole = not start and stop is None
        data = self._try(name, lambda fs, path: fs.cat_file(path) if whole else fs.cat_file(path, start=start, end=stop))
        return bytes(data)

    def get(self, name: str, path: Path) -> int:
        """Write an object into a local file (which is not durable, and half written after an error); returns its bytes."""

        def fetch(fs: Any, remote: str) -> int:
            done = 0
            with fs.open(remote, "rb", cache_type="none", block_size=_CHUNK) as source, open(path, "wb") as target:
                while part := source.read(_CHUNK):
                    target.write(part)
                    done += len(part)
            return done

        return self._try(name, fetch)

    def put(self, path: Path, name: str) -> None:
        """Copy a local file into an object: it is there whole, or not at all."""
        self._try(name, lambda fs, remote: self._put(fs, path, remote))

    def write(self, name: str, data: bytes) -> None:
        """Make an object of these bytes, in place of one that is there: whole, or not at all."""
        self._try(name, lambda fs, remote: self._pipe(fs, remote, data))

    def create(self, name: str, data: bytes) -> bool:
        """As `write`, but only where there is no such object: False if there is one.

        Where the store cannot promise that, two writers at once may both see True.
        """

        def make(fs: Any, remote: str) -> bool:
            try:
                fs.pipe_file(remote, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, ValueError, NotImplementedError):  # a file system that does not know the mode
                if fs.exists(remote):
                    return False
                fs.pipe_file(remote, data)
            return True

        return self._try(name, make)

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        found = self.stat(name)
        return None if found is None else found.size

    def stat(self, name: str) -> Entry | None:
        """Size and stamp of an object; None where there is none."""
        try:
            found = self._try(name, lambda fs, remote: fs.info(remote, **_fresh(fs)))
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else Entry(name, int(found["size"]), stamp_of(found))

    def list(self, folder: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, fsspec's facts: type, size, …) of what lies directly in a folder, sorted by name; nothing where it is not there."""
        try:
            entries = self._try(folder, lambda fs, remote: fs.ls(remote, detail=True, **_fresh(fs)))
        except FileNotFoundError:
            return
        root = self._files()[1].rstrip("/") + "/"
        here = root + folder.strip("/")
        for entry in sorted(entries, key=lambda e: str(e["name"])):
            name = str(entry["name"])
            if name.rstrip("/") != here.rstrip("/"):  # some stores have an object for the folder itself
                yield name.removeprefix(root).rstrip("/"), entry

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are passed over."""
        for name in names:
            try:
                self._try(name, lambda fs, remote: fs.rm_file(remote))
            except FileNotFoundError:
                continue

    # ------------------------------------------------------------------

    def _put(self, fs: Any, path: Path, remote: str) -> None:
        if _is_disk(fs):
            temporary = _beside(fs, remote)
            fs.put_file(str(path), temporary)
            os.replace(temporary, remote)
        else:
            fs.put_file(str(path), remote)

    def _pipe(self, fs: Any, remote: str, data: bytes) -> None:
        if _is_disk(fs):
            temporary = _beside(fs, remote)
            fs.pipe_file(temporary, data)
            os.replace(temporary, remote)
        else:
            fs.pipe_file(remote, data)

    def _files(self) -> tuple[Any, str]:
        """fsspec's file system of this process, and the path of the store in it."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                import fsspec
            except ImportError:
                raise RemoteError(f"{self.url}: URLs need fsspec: pip install 'mmcompile[remote]'", path=self.url) from None
            try:
                fs, path = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False)
            except (ImportError, ValueError) as error:
                raise RemoteError(f"{self.url}: {str(error) or 'a kind of URL that fsspec does not know'}", path=self.url) from error
            except Exception as error:  # whatever the store's own package raises on a name or a setting it does not take
                raise RemoteError(f"{self.url}: cannot be opened ({_said(error)})", path=self.url) from error
            self._opened = (os.getpid(), fs, str(path))
        return self._opened[1], self._opened[2]

    def _try(self, name: str, action: Callable[[Any, str], _T]) -> _T:
        fs, root = self._files()
        path = f"{root.rstrip('/')}/{name}" if name else root
        for wait_s in (*WAITS_S, None):
            try:
                return action(fs, path)
            except FileNotFoundError:
                raise FileNotFoundError(2, os.strerror(2), self.where(name)) from None
            except _FINAL as error:
                raise RemoteError(f"{self.where(name)}: {_said(error)}", path=self.where(name)) from error
            except MemoryError:
                raise
            except Exception as error:
                if wait_s is None:
                    tries = len(WAITS_S) + 1
                    raise RemoteError(f"{self.where(name)}: failed {tries} times ({_said(error)})", path=self.where(name)) from error
                time.sleep(wait_s)
        raise AssertionError("the last wait is None")


def stamp_of(entry: dict[str, Any]) -> str:
    """What changes with the content of an object: its ETag or another of the store's own marks, else its time."""
    for name in ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "mtime", "created"):
        value = entry.get(name)
        if value:
            return value.isoformat() if hasattr(value, "isoformat") else str(value).strip('"')
    return ""


def _is_disk(fs: Any) -> bool:
    """A local folder reached by URL: only there does a writer leave half a file."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _beside(fs: Any, remote: str) -> str:
    folder, _, name = remote.rpartition("/")
    fs.makedirs(folder, exist_ok=True)
    return f"{folder}/.{name[:100]}.{secrets.token_hex(8)}.tmp"


def _fresh(fs: Any) -> dict[str, bool]:
    """Stores that keep listings take `refresh`; other file systems would choke on it."""
    return {"refresh": True} if type(fs).__name__ in ("S3FileSystem", "GCSFileSystem") else {}


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
