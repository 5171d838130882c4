"""Hides how the cells of a table's columns are held, and what kind of thing they turn out to be.

Cells come as text, some thousand rows at a time, and lie in one array a column: there is no object for a row.  What a column is (whole numbers,
numbers, yes and no, times, text) all its cells decide together, and nothing but them.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.celltext import GAPS, KINDS, Times, as_times, how_written, is_kind, kinds_of, mostly_values
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import show
from mmcompile.errors import SourceError
from mmcompile.format.fields import INDEX_LIMIT, LIST_LIMIT

__all__ = ["Cells", "Column", "fitting", "long_name", "long_text", "told", "typed"]

#: Bytes of the names of one column in an index, which has to hold all else, too; longer lists of names lie in a file of their own.
_MOST_NAMES = INDEX_LIMIT // 4
#: Cells that are objects at one time.
_CHUNK = 1 << 14
_GAPS = frozenset(word.encode() for word in GAPS)
#: What a gap among times is.
_EPOCH = "1970-01-01"


@dataclass(frozen=True)
class Column:
    """A column of N cells: `values` (N,) int64 or uint64, float64, bool, or int64 numbers of the texts in `names` (sorted) or since 1970 in `unit`.

    `missing` (N,) is where there was no value: there a float is NaN, the number of a text -1, and else 0.
    """

    name: str
    values: npt.NDArray[np.generic]
    missing: npt.NDArray[np.bool_]
    names: tuple[str, ...] | None = None
    unit: str | None = None


class Cells:
    """The cells of one column, as they come.  `keeps_text`: also text is wanted of it; else it lets go of all cells as soon as one is text."""

    def __init__(self, name: str, *, keeps_text: bool) -> None:
        self.name, self.keeps_text = name, keeps_text
        self.kinds = set(KINDS)
        #: Of text: the first cell that is none of what at least half of those up to it, and some thousand behind it, are, in whatever way they are
        #: written; its row and itself.  Where the source says what is text, the first that is, behind others that are none.
        self.stray: tuple[int, str] | None = None
        self._blob, self._lengths = bytearray(), array("q")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_text(self) -> bool:
        return not self.kinds

    def extend(self, cells: Sequence[str], *, quoted: bool = False, mixed: bool = False) -> None:
        """More cells, without NUL; `quoted`: the source says that they are text, which times are, too; `mixed`: that some of them are none."""
        before, self._count = self.kinds, self._count + len(cells)
        if quoted:
            self.kinds = self.kinds & {"time"} if not mixed and all(is_kind(cell, "time") for cell in cells if cell) else set()
        elif self.kinds:
            self.kinds = kinds_of(cells, self.kinds)
        if before and not self.kinds and not (quoted and not mixed and before == {"time"}):  # else they were texts that look like times
            self.stray = (
                _first_text(cells, before, self._count - len(cells)) if quoted and not mixed else _stray(cells, before, self._count - len(cells))
            )
        if not self.kinds and not self.keeps_text:
            self._blob, self._lengths = bytearray(), array("q")
            return
        text = "".join(cells)
        if text.isascii():
            self._blob += text.encode()
            self._lengths.extend(map(len, cells))
        else:
            try:
                parts = [cell.encode("utf-8", "surrogateescape") for cell in cells]
            except UnicodeEncodeError:  # half a character, as JSON can write it: no UTF-8 either, which is told when the column is read
                parts = [cell.encode("utf-8", "surrogatepass") for cell in cells]
            self._blob += b"".join(parts)
            self._lengths.extend(map(len, parts))

    def keys(self) -> Keys:
        """The cells as bytes; these Cells are empty from then on."""
        keys = Keys(np.frombuffer(self._blob, np.uint8), np.cumsum(np.frombuffer(self._lengths, np.int64)))
        self._blob, self._lengths = bytearray(), array("q")
        return keys


def told(stray: tuple[int, str], where: Callable[[int], str]) -> str:
    """What is to be said of a cell that is none of what others in its column are."""
    hint = how_written(stray[1])
    return f"{where(stray[0])}: {stray[1]!r:.60} is no value like others in it{f': {hint}' if hint else ''}"


def _stray(cells: Sequence[str], kinds: set[str], before: int) -> tuple[int, str] | None:
    """See Cells.stray; `before`: how many cells there are before these, all of `kinds`."""
    rows = [row for row, cell in enumerate(cells) if cell not in GAPS]
    fits = {kind: [row for row in rows if is_kind(cells[row], kind)] for kind in kinds}
    kind = max(sorted(fits), key=lambda kind: len(fits[kind]))
    known = before if kinds != KINDS else 0  # else they are gaps all
    fit = set(fits[kind])
    if 2 * (known + len(fit)) < known + len(rows):
        if known or not mostly_values([cells[row] for row in rows]):
            return None
        fit.update(*fits.values())
    row = next((row for row in rows if row not in fit), None)
    return None if row is None else (before + row, cells[row])


def _first_text(cells: Sequence[str], kinds: set[str], before: int) -> tuple[int, str] | None:
    """The first of cells that are text, behind `before` others, which may be of `kinds`."""
    return next(((before + row, cell) for row, cell in enumerate(cells) if cell), None) if kinds != KINDS else None


def typed(cells: Cells, where: Callable[[int], str], *, names: bool = False) -> Column | str:
    """The column that these cells are (they are empty from then on), or why it cannot be held.  `where(row)` names a row.

    `names`: they may be names, some of which look like numbers; else such a column is not held.  Raises SourceError: text that is no UTF-8, or
    too long for the name of a category.
    """
    found = _typed(cells, where, names=names)
    return found if isinstance(found, str) else fitting(found, where)


def fitting(column: Column, where: Callable[[int], str]) -> Column:
    """The column.  Raises SourceError, naming the row, where the texts that it has numbers of are too long for an index."""
    if column.names is not None and (text := long_name(column.names)):
        row = int((column.values == column.names.index(text)).argmax())
        raise SourceError(f"{where(row)}: {long_text(f'column {show(column.name)}', text)}", row=row, column=column.name)
    return column


def long_name(names: Collection[str]) -> str:
    """The longest of these names of classes or categories, where an index cannot hold them; "" where it can."""
    if len(names) > LIST_LIMIT or sum(len(name.encode("utf-8", "surrogatepass")) for name in names) <= _MOST_NAMES:
        return ""
    return max(names, key=len)


def long_text(what: str, text: str) -> str:
    """What is said of such a name in a column or field."""
    return (
        f"{what} holds a text of {len(text):,} characters ({text[:40]!r}…), and the names of classes and categories have to fit the "
        "index of a dataset: shorten it, or leave that out"
    )


def _typed(cells: Cells, where: Callable[[int], str], *, names: bool) -> Column | str:
    kinds, name = cells.kinds, cells.name
    if not kinds and cells.stray is not None and not names:
        return f"{told(cells.stray, where)}: mend it, or give a list that tells texts from numbers (JSON lines, Parquet)"
    keys = cells.keys()
    if not kinds:
        return _numbered(name, keys, where)
    missing = np.fromiter((cell in _GAPS for cell in keys), bool, len(keys))
    if missing.all():
        return "no value in it"
    if "int" in kinds:
        return _whole(name, keys, missing)
    if "float" in kinds:
        nan = float("nan")
        numbers = np.fromiter((nan if cell in _GAPS else float(cell) for cell in keys), np.float64, len(keys))
        # "inf" has an n, and no number has one
        beyond = next((int(row) for row in np.flatnonzero(np.isinf(numbers)) if b"n" not in keys[int(row)].lower()), None)
        if beyond is not None:
            return f"a number is beyond float64: {keys[beyond].decode():.40} ({where(beyond)})"
        return Column(name, numbers, np.isnan(numbers))
    if "bool" in kinds:
        return Column(name, np.fromiter((cell[:1] in (b"t", b"T") for cell in keys), bool, len(keys)), missing)
    return _times(name, keys, missing, where)


def _whole(name: str, keys: Keys, missing: npt.NDArray[np.bool_]) -> Column | str:
    """Whole numbers, in int64 if that holds all of them."""
    for dtype in (np.int64, np.uint64):
        if dtype is np.uint64 and any(b"-" in cell and cell not in _GAPS for cell in keys):
            break
        with contextlib.suppress(OverflowError):
            return Column(name, np.fromiter((0 if cell in _GAPS else int(cell) for cell in keys), dtype, len(keys)), missing)
    return "whole numbers over 64 bits"


def _chunks(keys: Keys) -> Iterator[tuple[slice, list[str]]]:
    for at in range(0, len(keys), _CHUNK):
        yield slice(at, at + _CHUNK), [cell.decode() for cell in keys[at : at + _CHUNK]]


def _numbered(name: str, keys: Keys, where: Callable[[int], str]) -> Column:
    """Texts as numbers, from 0 on in their order as text."""
    seen: dict[bytes, int] = {}
    numbers = np.fromiter((seen.setdefault(cell, len(seen)) for cell in keys), np.int64, len(keys))
    first = seen.pop(b"", -1)
    texts: dict[str, int] = {}
    for cell, number in seen.items():
        try:
            texts[cell.decode()] = number
        except UnicodeDecodeError as error:
            row = int(np.flatnonzero(numbers == number)[0])
            raise SourceError(
                f"{where(row)}: column {show(name)} holds the byte 0x{cell[error.start]:02x}, which is no UTF-8: save the table as UTF-8", row=row
            ) from None
    names = tuple(sorted(texts))
    place = np.full(len(names) + (first >= 0), -1, np.int64)
    place[[texts[text] for text in names]] = np.arange(len(names))
    values = place[numbers] if len(numbers) else numbers
    return Column(name, values, values < 0, names)


def _times(name: str, keys: Keys, missing: npt.NDArray[np.bool_], where: Callable[[int], str]) -> Column | str:
    """Times in the coarsest unit that holds all of them."""
    times = Times()
    for _, cells in _chunks(keys):
        times.extend([cell for cell in cells if cell not in GAPS])
    if times.fault:
        return times.fault
    out = np.zeros(len(keys), np.int64)
    for part, cells in _chunks(keys):
        cells = [_EPOCH if cell in GAPS else cell for cell in cells]
        try:
            out[part] = as_times(cells, times.unit)
        except ValueError:
            row, why = next(_wrong_times(cells, times.unit))
            return f"{why}: {cells[row]} ({where(part.start + row)})"
    return Column(name, out, missing, unit=times.unit)


def _wrong_times(cells: Sequence[str], unit: str) -> Iterator[tuple[int, str]]:
    """(row, what is wrong with it) of cells that are no times in that unit."""
    for row, cell in enumerate(cells):
        for tried, why in (("s", "a time that no calendar has"), (unit, f"a time is beyond what 64 bits hold in {unit}")):
            try:
                as_times([cell], tried)
            except ValueError:
                yield row, why
