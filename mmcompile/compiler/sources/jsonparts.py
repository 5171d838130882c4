"""Hides how JSON is read: records of values, each as a text; and of a file that is too large to be held the members of its lists one by one."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import IO, Any

__all__ = ["as_cell", "form_of", "is_unicode", "list_members", "record_of", "text_of", "whole_of"]

#: Characters that are read at a time; a member may be longer, up to the limit.
_CHUNK, _LIMIT = 1 << 20, 1 << 28
_HALVES = re.compile(r"[\ud800-\udfff]")
_IN_NUMBERS = frozenset("0123456789.eE+-")
_SPACE = re.compile(r"[ \t\r\n]*")


def is_unicode(text: str) -> bool:
    """Can this be written as UTF-8?  JSON may hold half of a surrogate pair, which cannot."""
    return text.isascii() or not _HALVES.search(text)


def record_of(text: str) -> dict[str, Any] | None:
    """The object that a text is, None where it is none; a number that float64 would make infinite stays a Decimal.

    Raises ValueError where a name stands in an object twice.
    """
    try:
        record = json.loads(text, parse_float=_number, object_pairs_hook=_once)
    except _TwiceError as error:
        raise ValueError(f"{str(error)!r:.60} stands in it twice") from None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def as_cell(value: Any) -> str:
    """A value of a record as a CSV file would hold it."""
    if value is None:
        return ""
    return str(value) if isinstance(value, str | Decimal) else repr(value)


def text_of(value: Any) -> Any:
    """A list or an object as the text of it; any other value as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str) if isinstance(value, dict | list) else value


def whole_of(text: str) -> Any:
    """The list or object that a text is; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    return None


def form_of(value: Any) -> str:
    """What a value is: "object" of lists, or a list of objects; "list"; or ""."""
    if isinstance(value, dict):
        return "object" if any(isinstance(inner, list) for inner in value.values()) else ""
    return ("object" if value and isinstance(value[0], dict) else "list") if isinstance(value, list) else ""


def _number(text: str) -> float | Decimal:
    value = float(text)
    return Decimal(text) if math.isinf(value) else value


class _TwiceError(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return record


def list_members(file: IO[bytes], wanted: Collection[str], seen: set[str] | None = None) -> Iterator[tuple[str, int, Any]]:
    """(name, number, member) of each member of the lists of these names, in the object that the file is; `seen` gets the names that it has.

    Raises ValueError, saying what was expected and about where, when the file is no such object; its other members are read, and dropped.
    """
    text = _Text(file)
    text.take("{", "an object")
    if text.peek() == "}":
        text.take("}", "the end")
        text.end()
        return
    while True:
        name = text.value()
        if not isinstance(name, str):
            raise text.wrong("a name")
        text.take(":", "a colon")
        if seen is not None:
            seen.add(name)
        if name in wanted and text.peek() != "[":
            raise text.wrong(f"a list of {name}")
        if name in wanted:
            for number, member in enumerate(text.members()):
                yield name, number, member
        else:
            text.skip()
        if text.peek() == "}":
            text.take("}", "the end")
            text.end()
            return
        text.take(",", "a comma")


class _Text:
    """The text of a file, from where it was read up to."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode
        self._buffer, self._at, self._before = "", 0, 0
        self._ended = False

    def wrong(self, expected: str) -> ValueError:
        return ValueError(f"expected {expected} at about character {self._before + self._at:,}")

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more(_CHUNK):
                raise self.wrong("more of it: it ends")

    def take(self, mark: str, expected: str) -> None:
        if self.peek() != mark:
            raise self.wrong(expected)
        self._at += 1

    def end(self) -> None:
        """Nothing but space comes next."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                raise self.wrong("nothing behind the object")
            if not self._more(_CHUNK):
                return

    def value(self) -> Any:
        """The next value."""
        self.peek()
        size = _CHUNK
        while True:
            try:
                value, end = self._scan(self._buffer, self._at)
            except RecursionError:
                raise self.wrong("a value that is nested less deeply") from None
            except ValueError:
                end = len(self._buffer)
            if end < len(self._buffer) and self._buffer[end] not in _IN_NUMBERS:  # else it is cut, or a number that may go on
                self._at = end
                return value
            if len(self._buffer) - self._at > _LIMIT or not self._more(size):
                raise self.wrong("a value that is whole")
            size *= 2

    def members(self) -> Iterator[Any]:
        """The members of the list that comes next."""
        self.take("[", "a list")
        if self.peek() == "]":
            self._at += 1
            return
        while True:
            yield self.value()
            if self.peek() == "]":
                self._at += 1
                return
            self.take(",", "a comma")

    def skip(self) -> None:
        """Pass the next value by; of a list member by member."""
        if self.peek() == "[":
            for _ in self.members():
                pass
        else:
            self.value()

    def _more(self, size: int) -> bool:
        """Read on; False at the end."""
        if self._ended:
            return False
        data = self._file.read(size)
        self._ended = not data
        self._before += self._at
        self._buffer, self._at = self._buffer[self._at :] + self._decoder.decode(data, self._ended), 0
        return True
