"""Hides which rows of datasets are taken: those of a list of numbers, those that meet a condition, those whose keys match patterns."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.names import Patterns, show
from mmcompile.compiler.sources.provenance import ShardRows
from mmcompile.compiler.sources.where import Column, Where
from mmcompile.errors import OptionError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.npy import hash_bytes

__all__ = ["Selection"]

_NUMBER = re.compile(rb"\s*[0-9]{1,18}\s*")
#: Bytes of a line that are read of one that is none.
_LINE = 1 << 10


class Selection:
    """Which of `count` rows are taken: those in `rows` (numbers, or a file of some) that meet `where`, with keys that `include`, `exclude` let pass.

    Raises OptionError, naming the line or the place where something is wrong.
    """

    def __init__(
        self, count: int, rows: str | tuple[int, ...] | None, where: str | None, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
    ) -> None:
        self.where = None if where is None else Where(where)
        self._include, self._exclude = Patterns(include), Patterns(exclude)
        self._rows = None if rows is None else _numbers_of(rows, count)
        self._patterns = {"include": include, "exclude": exclude}

    def __bool__(self) -> bool:
        return self.where is not None or self._rows is not None or self.has_patterns

    @property
    def has_patterns(self) -> bool:
        """Are keys asked for?"""
        return bool(self._include or self._exclude)

    def identity(self) -> dict[str, object]:
        """What was asked for, as canonical JSON values; of numbers of rows the hash."""
        out: dict[str, object] = {name: [name_to_json(glob) for glob in sorted(patterns)] for name, patterns in self._patterns.items() if patterns}
        if self.where is not None:
            out["where"] = name_to_json(self.where.text)
        if self._rows is not None:
            out["rows"] = hash_bytes(self._rows.astype("<i8").tobytes())
        return out

    def take(self, start: int, stop: int, columns: Mapping[str, Callable[[], Column]], rows: ShardRows | None = None) -> npt.NDArray[np.int64]:
        """Which of the rows [start, stop) are taken, in rising order and counted from `start`: int64 (M,).

        `columns`, and for patterns `rows`, tell of them.
        """
        taken = np.ones(stop - start, bool)
        if self._rows is not None:
            taken[:] = False
            taken[self._rows[slice(*np.searchsorted(self._rows, [start, stop]).tolist())] - start] = True
        if self.where is not None:
            taken &= self.where.rows(columns, stop - start)
        if rows is not None and self.has_patterns:
            taken &= np.fromiter(map(self._passes, rows.keys), bool, stop - start)
        return np.flatnonzero(taken)

    def warnings(self) -> tuple[str, ...]:
        """A line for each pattern that matched no key."""
        found = {"include": self._include, "exclude": self._exclude}
        return tuple(f"--{name} {show(pattern)} matches no key" for name, patterns in found.items() for pattern in patterns.unmatched)

    def _passes(self, key: bytes) -> bool:
        text = as_text(key)
        return (not self._include or self._include.match(text)) and not self._exclude.match(text)


def _numbers_of(given: str | tuple[int, ...], count: int) -> npt.NDArray[np.int64]:
    """Numbers of rows in [0, count), in rising order: of a text file one a line, of a .npy file those in its array (N,)."""
    path = None if isinstance(given, tuple) else Path(given)
    found, entry = (_of_numbers(given), "entry") if isinstance(given, tuple) else _read(Path(given))
    order = np.argsort(found, kind="stable")
    rows = found[order]
    if len(rows) and (rows[0] < 0 or rows[-1] >= count):
        at = int(np.flatnonzero((found < 0) | (found >= count))[0])
        raise _wrong(
            path, f"{entry} {at + 1:,}: there is no row {int(found[at]):,}; expected 0 to {count - 1:,}, the first row of the first dataset is 0"
        )
    twice = np.flatnonzero(np.diff(rows) == 0)
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise _wrong(path, f"{entry} {first + 1:,} and {entry} {second + 1:,} are both row {int(rows[twice[0]]):,}; a row can be taken once")
    return rows


def _of_numbers(given: tuple[int, ...]) -> npt.NDArray[np.int64]:
    try:
        return np.array(given, np.int64)
    except OverflowError:
        raise _wrong(None, f"expected numbers of rows, found {max(given, key=abs):,}") from None


def _read(path: Path) -> tuple[npt.NDArray[np.int64], str]:
    """(the numbers in a file, what holds one there)."""
    try:
        if not S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
            raise _wrong(path, "no regular file")
        return (_of_array(path), "entry") if path.suffix == ".npy" else (_of_lines(path), "line")
    except OSError as error:
        raise _wrong(path, f"cannot be read ({error.strerror or error})") from None


def _of_lines(path: Path) -> npt.NDArray[np.int64]:
    out, empty = array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 1):
            if not line.strip():
                empty = empty or number
                continue
            if empty or not _NUMBER.fullmatch(line):
                shown = "an empty line" if empty else repr(as_text(line.strip()))[:80]
                raise _wrong(path, f"line {empty or number:,}: expected the number of a row, found {shown}")
            out.append(int(line))
    return np.frombuffer(out, np.int64) if out else np.empty(0, np.int64)


def _of_array(path: Path) -> npt.NDArray[np.int64]:
    try:
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise _wrong(path, "no .npy file") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise _wrong(path, f"expected an array (N,) of whole numbers, found {getattr(found, 'dtype', '?')} {getattr(found, 'shape', '?')}")
    if found.dtype.kind == "u" and len(found) and int(found.max()) >= 1 << 63:
        raise _wrong(path, f"expected numbers of rows, found {int(found.max()):,}")
    return found.astype(np.int64)


def _wrong(path: Path | None, why: str) -> OptionError:
    return OptionError(f"--rows{'' if path is None else ' ' + show(str(path))}: {why}", options=["rows"])
