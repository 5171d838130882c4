"""Hides which files a RAW of tables is, in which order, and which group and split each belongs to."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from mmcompile.compiler.sources.contents import PACKED, PARQUETS, SUFFIXES, is_table, leads
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.splits import SPLITS, rank
from mmcompile.compiler.sources.walk import expect_file
from mmcompile.errors import SourceError

__all__ = ["TableFile", "by_key", "extension_of", "holds_itself", "is_tables", "list_tables"]

_KEYED = re.compile(r"([^=]+)=(.*)\Z")


@dataclass(frozen=True)
class TableFile:
    """A table: its path, the group that its rows are by where it lies, and the values of folders called KEY=VALUE that it lies in.

    `split`: what the folder or file is called that says so; "" where none does.
    """

    path: str
    group: str
    keyed: tuple[tuple[str, str], ...] = ()
    split: str = ""

    @property
    def place(self) -> tuple[tuple[int, str], str, str]:
        """Sorts tables: split by split, group by group."""
        return rank(self.split), self.group, self.path


def extension_of(name: str) -> str:
    """What a file that is left out is counted as."""
    return os.path.splitext(name)[1].lower() or "no extension"


def holds_itself(here: str, top: str) -> bool:
    """Is a folder below `top` one of those that it lies in, by a link?"""
    above, real = here, os.path.realpath(here)
    while above != top:
        above = os.path.dirname(above)
        if os.path.realpath(above) == real:
            return True
    return False


def _walk(folder: str, left_out: Counter[str]) -> Iterator[str]:
    """The tables below a folder, as paths relative to it, folder by folder, names sorted as text."""

    def fail(error: OSError) -> None:
        raise unreadable(str(error.filename or folder), error) from error

    for here, below, names in os.walk(folder, followlinks=True, onerror=fail):
        below[:] = sorted(name for name in below if not name.startswith((".", "_")))
        if holds_itself(here, folder):
            raise SourceError(f"{show(here)}: a folder that contains itself", path=here)
        for name in sorted(names):
            path = os.path.join(here, name)
            if name.lower().endswith(PACKED):
                raise SourceError(f"{show(path)}: packed, and rows have to be found in it: unpack it first", path=path)
            if is_table(name):
                yield os.path.relpath(path, folder)
            elif not name.startswith((".", "_")):
                left_out[extension_of(name)] += 1


def is_tables(raw: Sequence[str]) -> bool:
    """Is each of these a table, or a folder of tables?  Looks at the names of some files."""
    return all(leads(place, "table") if os.path.isdir(place) else place.lower().endswith((*SUFFIXES, *PACKED)) for place in raw)


def list_tables(raw: Sequence[str]) -> tuple[list[TableFile], Counter[str]]:
    """(the tables of RAW in order, how many other files there are by extension).  Raises SourceError.

    A table in folders KEY=VALUE is of the group of these values; any other of the group that its path is called, without the extension.
    """
    left_out: Counter[str] = Counter()
    found: list[tuple[str, str]] = []
    for place in raw:
        first = len(found)
        if os.path.isdir(place):
            found += [(os.path.join(place, name), name) for name in _walk(place, left_out)]
        elif os.path.exists(place):
            if place.lower().endswith(PACKED):
                raise SourceError(f"{show(place)}: packed, and rows have to be found in it: unpack it first", path=place)
            found.append((place, os.path.basename(place)))
        else:
            raise unreadable(place, OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
        if len(raw) > 1 and os.path.isdir(place) and _split_of(os.path.basename(place)):
            found[first:] = [(path, f"{os.path.basename(place)}/{name}") for path, name in found[first:]]
    for path, _ in found:
        expect_file(path, "a table, whose rows are read more than once")
    if not found:
        raise SourceError(f"{', '.join(map(show, raw))}: no table in it: expected files called {', '.join(SUFFIXES)}", path=raw[0])
    if len({name.lower().endswith(PARQUETS) for _, name in found}) > 1:
        text, other = (next(path for path, name in found if name.lower().endswith(PARQUETS) is packed) for packed in (False, True))
        raise SourceError(f"{show(text)} is text and {show(other)} a Parquet file: give tables of one form, or build them apart and merge", path=text)
    alone = len(found) == 1 and not os.path.isdir(raw[0])
    splits = [""] if alone else _splits(found)
    return _in_order([_placed(path, name, split, alone=alone) for (path, name), split in zip(found, splits, strict=True)]), left_out


def _split_of(part: str) -> str:
    """The split that a folder or file is by its name (train, or split=train); "" where it is none."""
    key, equals, value = os.path.splitext(part)[0].rpartition("=")
    return value if value.lower() in SPLITS and (not equals or key.lower() == "split") else ""


def _splits(found: Sequence[tuple[str, str]]) -> list[str]:
    """The split of each table, where what lies on top is called so throughout; else "" for all.  Raises SourceError where only some of it is."""
    splits = [_split_of(name.split("/", 1)[0]) for _, name in found]
    if all(splits) or len(set(splits) - {""}) < 2:
        return splits if all(splits) else [""] * len(splits)
    stray = found[splits.index("")][0]
    raise SourceError(
        f"{show(stray)}: lies in none of the splits beside it ({', '.join(map(show, sorted(set(splits) - {''}, key=rank)))}): expected all tables in "
        "splits, or no folder or file called so; else build them apart",
        path=stray,
    )


def _placed(path: str, name: str, split: str, *, alone: bool) -> TableFile:
    parts = name.split("/")
    if split and len(parts) > 1:
        del parts[0]
    keyed = tuple((match[1], unquote(match[2])) for part in parts[:-1] if (match := _KEYED.match(part)))
    if keyed:
        return TableFile(path, "/".join(value for _, value in keyed), keyed, split)
    return TableFile(path, "" if alone else os.path.splitext("/".join(parts))[0], (), split)


def _in_order(files: Sequence[TableFile]) -> list[TableFile]:
    """The files group by group, groups as text.  Raises SourceError where two files that no folder KEY=VALUE joins are of one group."""
    first: dict[tuple[str, str], TableFile] = {}
    for file in files:
        other = first.setdefault((file.split, file.group), file)
        if other is not file and not file.keyed:
            raise SourceError(f"{show(other.path)} and {show(file.path)}: both would be the group {file.group}: rename one", path=file.path)
    if any(file.keyed for file in files) and not all(file.keyed for file in files):
        stray = next(file for file in files if not file.keyed)
        raise SourceError(f"{show(stray.path)}: lies in no folder KEY=VALUE, others do: expected all tables in such folders", path=stray.path)
    return sorted(files, key=lambda file: file.place)


def by_key(files: Sequence[TableFile], key: str) -> list[TableFile]:
    """The files grouped by one of the KEYs of their folders; as they are where it is none of them."""
    if not any(name == key for name, _ in files[0].keyed):
        return list(files)
    made = []
    for file in files:
        value = dict(file.keyed).get(key)
        if value is None:
            raise SourceError(f"{show(file.path)}: lies in no folder {show(key)}=VALUE, others do", path=file.path)
        made.append(replace(file, group=value))
    return sorted(made, key=lambda file: file.place)
