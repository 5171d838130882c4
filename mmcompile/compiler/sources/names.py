"""Names of items as text: patterns that choose among them, and how they stand in a message.

A name is bytes on disk and a str here (UTF-8 with surrogateescape), so it may hold newlines and bytes that are no UTF-8.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

__all__ = ["Patterns", "show"]


def show(text: str) -> str:
    """A name or pattern on one printable line; escaped like a Python string where it would not be."""
    return text if text.isprintable() else ascii(text)


class Patterns:
    """A set of exact keys and fnmatch globs (`*` matches `/` too; case counts).  Remembers which of them never matched."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._unmatched = dict.fromkeys(patterns)  # a dict keeps the order
        self._exact = {pattern.rstrip("/") or pattern: pattern for pattern in self._unmatched}
        self._globs = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in self._unmatched if re.search(r"[*?\[]", pattern)}
        self._any = re.compile("|".join(glob.pattern for glob in self._globs.values())) if self._globs else None

    def __bool__(self) -> bool:
        return bool(self._exact)

    @property
    def unmatched(self) -> tuple[str, ...]:
        return tuple(self._unmatched)

    def match(self, key: str) -> bool:
        """Whether one of the patterns is this key (a `/` at its end does not count) or matches all of it."""
        pattern = self._exact.get(key)
        if pattern is not None:
            self._unmatched.pop(pattern, None)
            return True
        if self._any is None or not self._any.match(key):
            return False
        for glob in [glob for glob in self._unmatched if glob in self._globs and self._globs[glob].match(key)]:
            del self._unmatched[glob]
        return True
