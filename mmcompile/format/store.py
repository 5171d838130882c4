"""Hides how files that may lie far away are read and written: fsspec (the extra `mmcompile[remote]`) behind one small class, with retries.

A store is a folder, under a URL such as `s3://bucket/out` or `gs://…`; names in it have `/` between their parts.  A request that fails is made again
after growing waits, and one that is not answered for as long as `SILENCE_S` allows; then a RemoteError names the object.  What is missing is
FileNotFoundError, at once.  Keys, endpoints and regions come from where the store's own tools look for them: the environment and fsspec's
configuration.  Safe after a fork, and pickled as its URL; not where it lies in the memory of a process.
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

from mmcompile.errors import OptionError, RemoteError

__all__ = ["Entry", "Store", "entry_of", "is_url", "on_disk", "time_of"]

_T = TypeVar("_T")
_P = TypeVar("_P")
_log = logging.getLogger(__name__)

#: A scheme of two letters at least: one letter is a drive of another system.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: The same with a slash too few, which would be a folder below the current one.
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
#: Seconds before each further try: half a minute in all, as long as a store that shifts its load or restarts a node may take.
WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: A wait of so many seconds is told to the log, which prints warnings unless it was told otherwise.
_SAID_FROM_S = 2.0
#: Seconds of silence after which a request, with all its tries, is given up: as long as a store may take to come back, and a person to wait.
SILENCE_S = 90.0
#: Seconds that S3's client waits for a connection, and for the next bytes of an answer: S3 itself begins to answer within one or two.
CONNECT_S, ANSWER_S = 5.0, 15.0
#: Bytes a second of an upload; one that takes longer, and SILENCE_S, is stuck: less than any line does over which a dataset is sent.
SLOWEST = 128 << 10
#: What another try does not change.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, AttributeError)
#: The same among what the stores' own packages raise, by name: they are not imported here.
_FINAL_NAMES = frozenset(
    (
        "DefaultCredentialsError",
        "FileExpired",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "TokenRetrievalError",
    )
)
#: What S3 answers for a bucket of another region.
_ELSEWHERE = frozenset(("301", "PermanentRedirect"))
#: What it answers where nothing lies behind the asked first byte.
_PAST_END = frozenset(("416", "InvalidRange"))
#: Where exceptions come from that tell of a network or a store: its package, and what that is made of.  Others, such as one that a signal handler
#: raises, are not ours to hold up.
_NETWORK = frozenset(
    ("adlfs", "aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "http", "json", "requests", "s3fs", "urllib3")
)
#: What says that there is no room here, or no more files may be open.
_OWN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
#: Bytes moved at a time between a file and an object.
_CHUNK = 8 << 20
#: How stores say it that tell no more than that something is not there.
_NO_BUCKET = re.compile(r"(bucket|container) does not exist", re.IGNORECASE)
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


def on_disk(place: _P) -> _P | str:
    """A `file://` URL as the path that it is; any other place as it came.

    Raises OptionError for what was meant to be a URL and is none (`s3:/bucket`, `s3://`, `file://folder`), and for what no path can be.
    """
    if isinstance(place, str | Path):
        _refuse_no_path(str(place))
    if not isinstance(place, str):
        return place
    scheme, _, rest = place.partition("://")
    if _ONE_SLASH.match(place):
        raise OptionError(f"{place}: a URL has two slashes, as in {place.replace(':/', '://', 1)}; a folder of that name is ./{place}", path=place)
    if is_url(place) and scheme in ("file", "local"):
        path = rest.removeprefix("localhost")
        if not path.startswith("/"):
            raise OptionError(f"{place}: a {scheme} URL has three slashes and a whole path, as in {scheme}:///data/out", path=place)
        return path
    if is_url(place) and scheme != "memory" and not rest.strip("/"):
        raise OptionError(f"{place}: names no bucket", path=place)
    return place


def _refuse_no_path(text: str) -> None:
    try:
        if text and b"\0" not in os.fsencode(text):
            return
    except UnicodeEncodeError:
        pass
    raise OptionError(f"{text!a:.80}: no path: {'it is empty' if not text else 'no name on a disk holds a NUL, or half a surrogate pair'}", path=text)


class Store:
    """The objects below one URL.  Thread-safe.

    Raises RemoteError where fsspec, or what it needs for this kind of URL, is not installed; OptionError for a path with parts that listings do not
    show, and when a `memory://` URL, which other processes cannot see, is pickled for them.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = self.url.partition("://")[2].removeprefix("/").split("/")
        if odd := {"", ".", ".."} & set(parts[1:]):
            what = "an empty part (//)" if "" in odd else f"the part {max(odd)!r}"
            raise OptionError(f"{url}: its path has {what}, which is part of a name on a store and not found in listings; leave it out", path=url)
        self._opened: tuple[int, Any, str] | None = None
        self._files()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.url.startswith("memory://"):
            raise OptionError(f"{self.url}: lies in the memory of one process, and other processes are to use it; give a folder, or another URL")
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
        """The bytes [start, stop) of an object, as far as there are any; to its end when stop is None."""

        def fetch(fs: Any, remote: str) -> bytes:
            if not start and stop is None:
                return bytes(fs.cat_file(remote, **_in_one(fs)))
            try:
                return bytes(fs.cat_file(remote, start=start, end=stop))
            except OSError as error:
                if _answers(error) & _PAST_END:
                    return b""
                raise

        return self._try(name, fetch)

    def get(self, name: str, path: Path) -> int:
        """Write an object into a local file (which is not durable, and half written after an error); returns its bytes."""

        source = self._try(name, lambda fs, remote: fs.open(remote, "rb", cache_type="none", block_size=_CHUNK))

        def part(at: int) -> bytes:  # each may fail, and be waited for, for itself
            return self._try(name, lambda _, __: _read_at(source, at))

        done = 0
        with source, open(path, "wb") as target:
            while data := part(done):
                target.write(data)
                done += len(data)
        return done

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

        What lies below an empty part of a name (`a//b`) is one entry of type directory, whose name ends with `/`.
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
            elif entry["type"] == "directory" and name.endswith("/"):
                yield f"{folder.strip('/')}/", entry

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
            fs.put_file(str(path), remote, **_within(fs, path.stat().st_size))

    def _pipe(self, fs: Any, remote: str, data: bytes) -> None:
        if _is_disk(fs):
            temporary = _beside(fs, remote)
            fs.pipe_file(temporary, data)
            os.replace(temporary, remote)
        else:
            fs.pipe_file(remote, data, **_within(fs, len(data)))

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
                # One layer repeats what fails, here: of the three below, which lie in each other, each would wait for every try of the next.
                bounds = {"retries": {"mode": "standard", "total_max_attempts": 1}, "connect_timeout": CONNECT_S, "read_timeout": ANSWER_S}
                fs.config_kwargs = {**bounds, **fs.config_kwargs}
                fs.retries = 1
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
        silent_s = 0.0
        for tries, wait_s in enumerate((*WAITS_S, None), 1):
            began = time.monotonic()
            try:
                return action(fs, path)
            except MemoryError:
                raise
            except Exception as error:
                final = self._final(name, error)
                if final is error:
                    raise
                if final is not None:
                    raise final from error
                # A try that failed late moved bytes until then, or the client below would have ended it: what it waited in vain is no more than this.
                silent_s += min(time.monotonic() - began, CONNECT_S + ANSWER_S) + (wait_s or 0)
                stuck = type(error).__name__ == "FSTimeoutError"
                if wait_s is None or stuck or silent_s > SILENCE_S:
                    how = f"no answer, asked {_times(tries)}" if stuck or _is_silence(error) else f"failed {_times(tries)}"
                    raise RemoteError(f"{self.where(name)}: {how} ({_said(error)})", path=self.where(name)) from error
                if wait_s >= _SAID_FROM_S:
                    _log.warning("%s: %s; tried again in %g s", self.where(name), _said(error), wait_s)
                time.sleep(wait_s)
        raise AssertionError("the last wait is None")

    def _final(self, name: str, error: Exception) -> Exception | None:
        """What to raise where another try would change nothing; None where it might help."""
        where, answers = self.where(name), _answers(error)
        if isinstance(error, FileNotFoundError):
            if "NoSuchBucket" in answers or _NO_BUCKET.search(str(error)):
                return RemoteError(f"{where}: there is no such bucket", path=where)
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        if answers & _ELSEWHERE or isinstance(error, RecursionError):  # S3's client follows redirections that lead to themselves
            return RemoteError(f"{where}: {_said(error)}; the bucket is in another region: set AWS_DEFAULT_REGION to that", path=where)
        if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES or answers & _PAST_END:
            return RemoteError(f"{where}: {_said(error)}", path=where)
        if isinstance(error, OSError):
            return error if error.errno in _OWN else None  # of the disk here
        known = isinstance(error, EOFError) or any(kind.__module__.partition(".")[0] in _NETWORK for kind in type(error).__mro__)
        if not known and isinstance(error, ValueError):  # how file systems refuse a name or an option
            return RemoteError(f"{where}: {_said(error)}", path=where)
        return None if known else error


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


def _within(fs: Any, size: int) -> dict[str, float]:
    """Seconds after which the sending of so many bytes is given up; file systems without an event loop of their own cannot be told."""
    return {"timeout": SILENCE_S + size / SLOWEST} if getattr(fs, "async_impl", False) else {}


def _read_at(source: Any, at: int) -> bytes:
    """The next bytes of an open object, from where the last ones ended."""
    if source.tell() != at:
        source.seek(at)
    return bytes(source.read(_CHUNK))


def _answers(error: BaseException) -> set[str]:
    """S3's error code and HTTP status, where an exception holds them."""
    for found in (error, error.__cause__):
        answer = getattr(found, "response", None)
        if isinstance(answer, dict):
            return {str(answer.get("Error", {}).get("Code")), str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))}
    return set()


def _is_silence(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or any("Timeout" in kind.__name__ for kind in type(error).__mro__)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
