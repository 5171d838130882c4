"""Hides how the cells of a table's columns are held, and what kind of thing they turn out to be.

Cells come as text, some thousand rows at a time, and lie in one array a column: there is no object for a row.  What a column is (whole numbers,
numbers, yes and no, times, text) all its cells decide together, and nothing but them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import show
from mmcompile.errors import SourceError

__all__ = ["Cells", "Column", "typed"]

#: Cells that are objects at one time.
_CHUNK = 1 << 14
#: What stands for no value among numbers, yes and no, and times; in a column of text these are texts, and only an empty cell is none.
_MISSING = frozenset({b"", b"NA", b"N/A", b"n/a", b"NaN", b"nan", b"NULL", b"null", b"None", b"<NA>", b"#N/A", b"NaT"})
_NO_VALUE = "|".join(re.escape(word.decode()) for word in sorted(_MISSING, reverse=True))
_FORMS = {
    "int": r" *[+-]?[0-9]{1,30} *",
    "float": r" *[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)? *|[+-]?[Ii]nf(?:inity)?",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "time": r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?Z?)?",
}
#: All cells of a chunk, each ended by a NUL, which no cell holds.
_ALL = {kind: re.compile(rf"(?:(?>{form}|{_NO_VALUE})\0)*+") for kind, form in _FORMS.items()}
_ONE = {kind: re.compile(rf"(?:{form})\Z") for kind, form in _FORMS.items()}
_PRECISION = re.compile(rb"(?:\.([0-9]+))?Z?$")


@dataclass(frozen=True)
class Column:
    """A column of N cells: `values` (N,) int64, float64, bool, or int64 numbers of the texts in `names` (sorted) or since 1970 in `unit`.

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
        self.kinds = set(_FORMS)
        #: Of text: the first cell that is none of what at least half of those up to it, and some thousand behind it, are; its row and itself.
        self.stray: tuple[int, str] | None = None
        self._blob, self._lengths = bytearray(), array("q")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_text(self) -> bool:
        return not self.kinds

    def extend(self, cells: Sequence[str], *, quoted: bool = False) -> None:
        """More cells, without NUL; `quoted`: the source says that they are text."""
        before, self._count = self.kinds, self._count + len(cells)
        if quoted:
            self.kinds = set()
        elif self.kinds:
            joined = "\0".join(cells) + "\0"
            self.kinds = {kind for kind in self.kinds if _ALL[kind].fullmatch(joined)}
        if before and not self.kinds:
            self.stray = _stray(cells, before, self._count - len(cells))
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


def _stray(cells: Sequence[str], kinds: set[str], before: int) -> tuple[int, str] | None:
    """See Cells.stray; `before`: how many cells there are before these, all of `kinds`."""
    rows = [row for row, cell in enumerate(cells) if cell.encode("utf-8", "surrogatepass") not in _MISSING]
    fits = {kind: [row for row in rows if _ONE[kind].match(cells[row])] for kind in kinds}
    kind = max(sorted(fits), key=lambda kind: len(fits[kind]))
    known = before if kinds != _FORMS.keys() else 0  # else they are gaps all
    if 2 * (known + len(fits[kind])) < known + len(rows):
        return None
    fit = set(fits[kind])
    row = next((row for row in rows if row not in fit), None)
    return None if row is None else (before + row, cells[row])


def typed(cells: Cells, where: Callable[[int], str]) -> Column | str:
    """The column that these cells are (they are empty from then on), or why it cannot be held.  `where(row)` names a row.

    Raises SourceError: text that is no UTF-8.
    """
    kinds, name = cells.kinds, cells.name
    keys = cells.keys()
    if not kinds:
        return _numbered(name, keys, where)
    missing = np.fromiter((cell in _MISSING for cell in keys), bool, len(keys))
    if missing.all():
        return "no value in it"
    if "int" in kinds:
        try:
            whole = np.fromiter((0 if cell in _MISSING else int(cell) for cell in keys), np.int64, len(keys))
        except OverflowError:
            return "whole numbers over 64 bits"
        return Column(name, whole, missing)
    if "float" in kinds:
        nan = float("nan")
        numbers = np.fromiter((nan if cell in _MISSING else float(cell) for cell in keys), np.float64, len(keys))
        # "inf" has an n, and no number has one
        beyond = next((int(row) for row in np.flatnonzero(np.isinf(numbers)) if b"n" not in keys[int(row)].lower()), None)
        if beyond is not None:
            return f"a number is beyond float64: {keys[beyond].decode():.40} ({where(beyond)})"
        return Column(name, numbers, missing)
    if "bool" in kinds:
        return Column(name, np.fromiter((cell[:1] in (b"t", b"T") for cell in keys), bool, len(keys)), missing)
    return _times(name, keys, missing, where)


def _chunks(keys: Keys) -> Iterator[tuple[slice, Keys]]:
    for at in range(0, len(keys), _CHUNK):
        yield slice(at, at + _CHUNK), keys[at : at + _CHUNK]


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
    longest = max((len(cell) for cell in keys), default=0)
    fraction = max((len(found[1]) for cell in keys if (found := _PRECISION.search(cell)) and found[1]), default=0)
    unit = "D" if longest == 10 else "s" if not fraction else ("ms", "us", "ns")[(fraction - 1) // 3]
    out = np.empty(len(keys), f"datetime64[{unit}]")
    try:
        for part, some in _chunks(keys):
            cells = ["1970-01-01" if cell in _MISSING else cell.rstrip(b"Z").decode() for cell in some]
            out[part] = cells
            # numpy wraps what int64 cannot hold, so that no second is the one that was read
            wrapped = np.flatnonzero(out[part].astype("datetime64[D]") != np.array([cell[:10] for cell in cells], "datetime64[D]"))
            if len(wrapped):
                row = part.start + int(wrapped[0])
                return f"a time is beyond what 64 bits hold in {unit}: {cells[wrapped[0]]} ({where(row)})"
    except ValueError:
        return "times that no calendar has"
    return Column(name, out.astype(np.int64), missing, unit=unit)
