"""Names of items as text: which of them count, patterns that choose among them, and how they stand in a message.

A name is bytes on disk and a str here (UTF-8 with surrogateescape), so it may hold newlines and bytes that are no UTF-8.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Sequence

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["NO_EXTENSION", "Choice", "Patterns", "not_named", "show", "unreadable"]

#: The reason to leave out a file whose name says nothing; where its first bytes can be had, they decide.
NO_EXTENSION = "no extension"
#: Names in one line.
_TOLD = 8


def show(text: str) -> str:
    """A name or pattern on one printable line; escaped like a Python string where it would not be."""
    return text if text.isprintable() else ascii(text)


def not_named(columns: Sequence[str]) -> str:
    """A line about pixels and boxes that are there, and that `--columns` leaves out."""
    return f"left out, as --columns does not name them: {', '.join(columns[:_TOLD])}{', …' if len(columns) > _TOLD else ''}"


def unreadable(path: str, error: OSError) -> SourceError:
    """What to say of RAW that cannot be read; where it is not there, with the name beside it that was probably meant."""
    meant = ""
    if error.errno == errno.ENOENT:
        folder, name = os.path.split(path.rstrip("/"))
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(name, sorted(os.listdir(folder or ".")), 1)
            meant = f"; did you mean {show(os.path.join(folder, near[0]))}?" if near else ""
    return SourceError(f"cannot read RAW {show(path)}: {error.strerror}{meant}", path=path)


class Patterns:
    """A set of exact keys and fnmatch globs (`*` matches `/` too; case counts).  Remembers which of them never matched; threads may share one."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = dict.fromkeys(patterns)  # a dict keeps the order
        self._matched: set[str] = set()
        self._exact = {pattern.rstrip("/") or pattern: pattern for pattern in self._patterns}
        self._globs = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in self._patterns if re.search(r"[*?\[]", pattern)}
        self._any = re.compile("|".join(glob.pattern for glob in self._globs.values())) if self._globs else None

    def __bool__(self) -> bool:
        return bool(self._exact)

    @property
    def unmatched(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self._patterns if pattern not in self._matched)

    def match(self, key: str) -> bool:
        """Whether one of the patterns is this key (a `/` at its end does not count) or matches all of it."""
        pattern = self._exact.get(key)
        if pattern is not None:
            self._matched.add(pattern)
            return True
        if self._any is None or not self._any.match(key):
            return False
        if len(self._matched) < len(self._patterns):
            self._matched.update(pattern for pattern, glob in self._globs.items() if pattern not in self._matched and glob.match(key))
        return True


class Choice:
    """Which names of a source count.  Threads may share one.

    `include` and `exclude` are patterns on whole keys, `hidden` takes names that begin with a dot and `__MACOSX`, `extensions` (lower case, with
    the dot) replaces the list of known formats, `also` adds to it.
    """

    def __init__(
        self, include: Iterable[str], exclude: Iterable[str], hidden: bool, extensions: frozenset[str] | None, also: Iterable[str] = ()
    ) -> None:
        self._include, self._exclude, self._hidden = Patterns(include), Patterns(exclude), hidden
        self._any = bool(self._include or self._exclude)
        self._extensions = (EXTENSIONS if extensions is None else extensions) | frozenset(also)
        #: Do the first bytes decide about a file without an extension?
        self.sniffs = extensions is None
        self._known: dict[bytes, str] = {}  # suffix as it stands in a name -> "" for an image, else the reason to leave it out

    def is_hidden(self, name: bytes) -> bool:
        """Is this the name of a file or folder that is left out as "hidden"?"""
        return not self._hidden and (name[:1] == b"." or name == b"__MACOSX")

    def excludes_folder(self, key: bytes) -> bool:
        """Is the folder with this key left out, with all that is in it?"""
        return bool(self._exclude) and self._exclude.match(as_text(key))

    def why_not(self, name: bytes, folder: str) -> str:
        """The reason to leave out a file that is not hidden, or "".  `folder` is the text of the key that it lies in.

        NO_EXTENSION where the patterns would take it, and its content decides if `sniffs`.
        """
        dot = name.rfind(b".")
        suffix = name[dot:] if dot >= 0 else b""
        if suffix.lower() == b".gz" and name[-7:].lower() == b".nii.gz":
            suffix = name[-7:]
        reason = self._known.get(suffix)
        if reason is None:
            reason = self._known[suffix] = self._judge(suffix)
        if (reason and not (reason == NO_EXTENSION and self.sniffs)) or not self._any:
            return reason
        return self.leaves_out(name, folder) or reason

    def leaves_out(self, name: bytes, folder: str) -> str:
        """Why patterns leave a file out, or "", whatever its extension."""
        if not self._any:
            return ""
        text = as_text(name)
        key = f"{folder}/{text}" if folder else text
        if self._exclude.match(key):
            return "excluded"
        return "not included" if self._include and not self._include.match(key) else ""

    def warnings(self) -> list[str]:
        """A line for each pattern that matched nothing so far."""
        given = (("--include", self._include), ("--exclude", self._exclude))
        return [f"{option} {show(pattern)} matches nothing" for option, patterns in given for pattern in patterns.unmatched]

    def _judge(self, suffix: bytes) -> str:
        text = as_text(suffix).lower()
        if len(text) <= 1:
            return NO_EXTENSION
        return "" if text in self._extensions else f"extension {show(text)}"
