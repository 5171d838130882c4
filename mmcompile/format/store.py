"""Hides how files that may lie far away are read and written: fsspec (the extra `mmcompile[remote]`) behind one small class, with retries.

A store is a folder, under a URL such as `s3://bucket/out` or `gs://…`; names in it have `/` between their parts.  A request that fails is made again
after growing waits; then a RemoteError names the object.  What is missing is FileNotFoundError, at once.  Keys, endpoints and regions come from
where the store's own tools look for them: the environment and fsspec's configuration.  Safe after a fork, and pickled as its URL.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmcompile.errors import RemoteError

__all__ = ["Entry", "Store", "entry_of", "is_url", "time_of"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: A scheme of two letters at least: one letter is a drive of another system.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: Seconds before each further try: half a minute in all, as long as a store that shifts its load or restarts a node may take.
WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: A wait of so many seconds is told to the log, which prints warnings unless it was told otherwise.
_SAID_FROM_S = 2.0
#: What another try does not change.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, AttributeError)
#: The same among what the stores' own packages raise, by name: they are not imported here.
_FINAL_NAMES = frozenset(
    (
        "DefaultCredentialsError",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "TokenRetrievalError",
    )
)
#: What says that there is no room here, or no more files may be open.
_OWN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
#: Bytes moved at a time between a file and an object.
_CHUNK = 8 << 20
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Entry(NamedTuple):
    """One object: its name in the store, size in bytes, and a text that changes when its content does ("" where the store tells none)."""

    name: str
    size: int
    stamp: str


def entry_of(name: str, facts: dict[str, Any]) -> Entry:
    """An object as `Store.list` lists it."""
    return Entry(name, int(facts["size"] or 0), stamp_of(facts))


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
        data = self._try(name, lambda fs, path: fs.cat_file(path, **_in_one(fs)) if whole else fs.cat_file(path, start=start, end=stop))
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
        self._write(name, lambda fs, remote: self._put(fs, path, remote))

    def write(self, name: str, data: bytes) -> None:
        """Make an object of these bytes, in place of one that is there: whole, or not at all."""
        self._write(name, lambda fs, remote: self._pipe(fs, remote, data))

    def create(self, name: str, data: bytes) -> bool:
        """As `write`, but only where there is no such object: False if there is one.

        The bytes have to be unlike those of any other writer: an object that holds them already is ours, made by a try whose answer was lost.
        Where the store cannot promise more, two writers at once may both see True.
        """

        def make(fs: Any, remote: str) -> bool:
            try:
                if _is_disk(fs):
                    fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
                fs.pipe_file(remote, data, mode="create")
            except FileExistsError:
                return bool(fs.cat_file(remote) == data)
            except (TypeError, ValueError, NotImplementedError):  # a file system that does not know the mode
                if fs.exists(remote):
                    return False
                fs.pipe_file(remote, data)
            return True

        return self._write(name, make)

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        found = self.stat(name)
        return None if found is None else found.size

    def stat(self, name: str) -> Entry | None:
        """Size and stamp of an object; None where there is none."""
        found = self.facts(name)
        return None if found is None else entry_of(name, found)

    def facts(self, name: str) -> dict[str, Any] | None:
        """fsspec's facts of an object, as `list` gives them; None where there is none."""
        try:
            found: dict[str, Any] = self._try(name, lambda fs, remote: fs.info(remote, **_fresh(fs)))
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else found

    def list(self, folder: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, fsspec's facts: type, size, …) of what lies directly in a folder, sorted by name; nothing where it is not there.

        One request for each page of what is listed (S3: 1,000 names), all of which are held at once.
        """
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

    def holds(self, other: Store) -> bool:
        """Is the other store this one, or a folder in it, however its URL is written?"""
        (mine, here), (theirs, there) = self._files(), other._files()
        same = type(mine) is type(theirs) and (_is_disk(mine) or getattr(mine, "endpoint_url", None) == getattr(theirs, "endpoint_url", None))
        here, there = here.strip("/"), there.strip("/")
        return same and (there == here or there.startswith(here + "/") or not here)

    def folder_on_disk(self) -> str | None:
        """The path of a store that is a folder of this machine (`file://`)."""
        fs, path = self._files()
        return path if _is_disk(fs) else None

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
            if type(fs).__name__ == "S3FileSystem":
                # One layer repeats what fails, here; of the two below each would wait for every try of the other.  A part of a large upload gets
                # one more, so that not all of it is sent again.
                fs.config_kwargs = {"retries": {"mode": "standard", "total_max_attempts": 1}, **fs.config_kwargs}
                fs.retries = 2
            self._opened = (os.getpid(), fs, str(path))
        return self._opened[1], self._opened[2]

    def _write(self, name: str, action: Callable[[Any, str], _T]) -> _T:
        try:
            return self._try(name, action)
        except FileNotFoundError as error:
            raise RemoteError(f"{self.where(name)}: there is no such bucket, or no folder to write into", path=self.where(name)) from error

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
                if isinstance(error, OSError) and error.errno in _OWN:  # of the disk here
                    raise
                if type(error).__name__ in _FINAL_NAMES:
                    raise RemoteError(f"{self.where(name)}: {_said(error)}", path=self.where(name)) from error
                if wait_s is None:
                    tries = len(WAITS_S) + 1
                    raise RemoteError(f"{self.where(name)}: failed {tries} times ({_said(error)})", path=self.where(name)) from error
                if wait_s >= _SAID_FROM_S:
                    _log.warning("%s: %s; tried again in %g s", self.where(name), _said(error), wait_s)
                time.sleep(wait_s)
        raise AssertionError("the last wait is None")


def stamp_of(facts: dict[str, Any]) -> str:
    """What changes with the content of an object: its ETag or another of the store's own marks, else its time."""
    for name in ("ETag", "etag", "md5Hash", "content_md5", "generation"):
        value = facts.get(name)
        if value:
            return str(value).strip('"')
    return str(time_of(facts) or "")


def time_of(facts: dict[str, Any]) -> int:
    """When an object was made, in nanoseconds since 1970; 0 where the store does not say."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            whole = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            return (whole - _EPOCH) // timedelta(microseconds=1) * 1000
        if isinstance(value, int | float) and value:
            return round(value * 1e6) * 1000  # a float holds no nanoseconds
    return 0


def _in_one(fs: Any) -> dict[str, int]:
    """S3's would ask for the size first, to fetch large objects in several pieces."""
    return {"max_concurrency": 1} if type(fs).__name__ == "S3FileSystem" else {}


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
