"""Hides how JSON is written and believed: canonical on the way out, and on the way in checked as a stranger's, with bounds before any allocation."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from mmcompile.errors import CorruptShardError, FormatError

__all__ = [
    "HASH",
    "Check",
    "as_bytes",
    "as_text",
    "canonical",
    "name_from_json",
    "name_to_json",
    "not_a_file",
    "parse",
    "raise_shortage",
    "read_limited",
]

#: A file's name: 32 hex digits, the canonical (big-endian) form of its xxh3-128.
HASH = re.compile(r"[0-9a-f]{32}\Z")
#: Counts stay below this, so that every offset is an exact int64 and JSON number.
_COUNT_LIMIT = 1 << 53
#: Errors that say nothing about a file: no descriptor is left for the process or the machine, no memory, a signal came.
_SHORTAGE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR))
#: Lists and objects inside each other: what is written here needs 7.  Far below what Python's own recursion would bear.
_DEPTH_LIMIT = 32
#: Integers of a document stay below this, so that each has a float: exact sums of a dataset need 2^100.
_INTEGER_LIMIT = 10**300


def canonical(value: Any) -> bytes:
    """Canonical JSON: UTF-8, sorted keys, no spaces, one newline at the end, no NaN.  Equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def as_text(name: str | bytes) -> str:
    """The str of a key or class name, the same under every locale: UTF-8 with surrogateescape (os.fsdecode where that is the encoding of names)."""
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def as_bytes(name: str | bytes) -> bytes:
    """The inverse of `as_text`."""
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def name_to_json(name: str | bytes) -> Any:
    """A file or class name as JSON: a string, or {"bytes": percent-encoded} where it is not valid UTF-8."""
    raw = as_bytes(name)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": quote_from_bytes(raw, safe="/")}


def name_from_json(value: Any) -> str:
    """The inverse of `name_to_json`, as text by `os.fsdecode`.  Raises ValueError."""
    if isinstance(value, str):
        value.encode("utf-8")
        return value
    if isinstance(value, dict) and list(value) == ["bytes"] and isinstance(value["bytes"], str) and value["bytes"].isascii():
        name = as_text(unquote_to_bytes(value["bytes"]))
        if name_to_json(name) == value:  # one name has one form
            return name
    raise ValueError(f"not a name: {value!r:.100}")


def parse(data: bytes, path: Path | str) -> Any:
    """JSON of a stranger -> Python values.  Anything but one sound document is a FormatError naming the file and the fault."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise ValueError(f"duplicated key {key!r:.80}")
                seen.add(key)
        return out

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is not allowed")

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"number out of range: {text:.40}")
        return value

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
        _check_values(value)
        return value
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply", path=str(path)) from None
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON ({error!s:.200})", path=str(path)) from None


def _check_values(value: Any) -> None:
    """What JSON allows and this format does not, anywhere in a document: deep nesting, half a surrogate pair, integers without a float."""
    level, depth = [value], 0
    while level:
        if depth > _DEPTH_LIMIT:
            raise ValueError(f"nested more than {_DEPTH_LIMIT} deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii():
                    item.encode("utf-8")
            elif isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and abs(item) >= _INTEGER_LIMIT:
                raise ValueError("integer out of range")
        level, depth = below, depth + 1


def not_a_file(mode: int) -> str:
    """What to say of what stands where a regular file is expected, by its st_mode."""
    return f"expected a file, found {'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}: move it away"


def raise_shortage(error: OSError, path: Path) -> None:
    """Raise an error that says nothing about this file as an OSError, so that no file is called damaged for it."""
    if error.errno in _SHORTAGE:
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def read_limited(path: Path, limit: int) -> bytes:
    """A whole regular file of at most `limit` bytes.

    FileNotFoundError (NotADirectoryError) when it is not there, OSError when descriptors or memory run out; else FormatError, before anything is
    allocated.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise_shortage(error, path)
        reason = "a link; files of a dataset are regular files inside its folder" if os.path.islink(path) else f"cannot be opened ({error.strerror})"
        raise FormatError(f"{path}: {reason}", path=str(path)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: {not_a_file(status.st_mode)}", path=str(path))
        if status.st_size > limit:
            raise FormatError(f"{path}: {status.st_size:,} bytes, the limit is {limit:,}", path=str(path))
        data = bytearray()
        while len(data) <= limit and (part := os.read(fd, 1 << 20)):
            data += part
    except OSError as error:
        raise_shortage(error, path)
        raise CorruptShardError(f"{path}: cannot be read ({error.strerror})", path=str(path)) from error
    finally:
        os.close(fd)
    return bytes(data[:limit])


class Check:
    """The checks of one file: each takes a value and where it stands, and returns it with its type made sure."""

    def __init__(self, path: Path | str) -> None:
        self.path = path

    def fail(self, where: str, expected: str, found: Any) -> Any:
        raise FormatError(f"{self.path}: {where} must be {expected}, found {found!r:.120}", path=str(self.path), where=where)

    def mapping(self, value: Any, where: str, keys: list[str] | None, optional: Sequence[str] = ()) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(where, "an object", value)
        if keys is not None and set(value) - set(optional) != set(keys):
            missing, extra = sorted(set(keys) - set(value)), sorted(set(value) - {*keys, *optional})
            self.fail(where, f"an object with the keys {sorted(keys)}", f"missing {missing}, unknown {extra}"[:110])
        return dict(value)

    def sequence(self, value: Any, where: str, *, most: int, least: int = 0) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            self.fail(where, f"a list of {least} to {most} items", value)
        return list(value)

    def count(self, value: Any, where: str, *, least: int = 0, most: int = _COUNT_LIMIT) -> int:
        if type(value) is not int or not least <= value <= most:
            self.fail(where, f"an integer from {least} to {most}", value)
        return int(value)

    def number(self, value: Any, where: str) -> float:
        if type(value) not in (int, float) or abs(value) > 1e300:
            self.fail(where, "a number", value)
        return float(value)

    def text(self, value: Any, where: str, *, most: int = 1000) -> str:
        if not isinstance(value, str) or len(value) > most:
            self.fail(where, "a string", value)
        return str(value)

    def digest(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not HASH.match(value):
            self.fail(where, "32 hex digits", value)
        return str(value)

    def name(self, value: Any, where: str) -> str:
        try:
            return name_from_json(value)
        except ValueError:
            self.fail(where, "a name", value)
            raise
