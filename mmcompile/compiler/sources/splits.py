"""Hides which folders of a tree are the splits of one dataset: those that are named so, or those that somebody names.

Pure: names of folders in, the folders that hold classes (or images) out.  Splits stand with what is trained on first, whatever order they came in.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmcompile.compiler.sources.names import show
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.fields import Split
from mmcompile.format.npy import hash_bytes
from mmcompile.format.store import is_url, on_disk

__all__ = ["SPLITS", "Base", "Layout", "check_splits", "find_bases", "parse_splits", "rank", "train_of", "why_no_splits", "within"]

_T = TypeVar("_T")

#: Names of folders that are splits, whatever their case, in the order in which splits stand; others stand behind them, as text.
_NAMES = (("train", "training"), ("val", "valid", "validation", "dev"), ("test", "testing"))
_RANKS = {name: rank for rank, names in enumerate(_NAMES) for name in names}
#: All of them.
SPLITS = frozenset(_RANKS)
#: What an index can name, and how long a name may be: as that of a file.
_MOST_SPLITS, _LONGEST = 256, 255


def rank(name: str) -> tuple[int, str]:
    """Sorts the names of splits."""
    return _RANKS.get(name.lower(), len(_NAMES)), name


def why_no_splits(names: Sequence[str]) -> str:
    """Why these cannot be the splits of one dataset; "" where they can."""
    if len(names) > _MOST_SPLITS:
        return f"{len(names):,} splits, at most {_MOST_SPLITS} are possible"
    for name in names:
        if not name.isprintable() or name != name.strip() or not name.strip(".") or "/" in name or len(name) > _LONGEST:
            return f"{name!r:.60} is no name of a split: expected a printable word, without /"
    if "all" in names and len(names) > 1:
        return 'a split is called all, and reading split="all" joins all splits: give it another name'
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        return f"two splits are called {twice}: give one another name"
    return ""


def check_splits(splits: Sequence[Split], where: str) -> None:
    """Raises SourceError where splits of a source cannot be called what they are."""
    if why := why_no_splits([split.name for split in splits]):
        raise SourceError(f"{where}: {why}" if where else why)


def train_of(splits: Sequence[Split]) -> Split:
    """The split that is trained on: the only one, or else the first whose name says so.  Raises OptionError where no name does."""
    found = splits[0] if len(splits) == 1 else next((split for split in splits if rank(split.name)[0] == 0), None)
    if found is None:
        names = ", ".join(show(split.name) for split in splits[:8])
        raise OptionError(
            f"--normalize auto takes the statistics of split train, and the splits are {names}: call one of them train, or give --mean and --std",
            options=["normalize"],
        )
    return found


@dataclass(frozen=True)
class Layout:
    """What was said of splits and classes, in place of what the folders say.

    `splits`: (name, folder) of each, the folder as it stands in keys ("" for all of RAW); a name may repeat.  `classes`: the whole class map.
    """

    splits: tuple[tuple[str, str], ...] = ()
    classes: tuple[str, ...] | None = None

    def identity(self) -> dict[str, object]:
        """JSON values of what was said; of a class map, which stands in the index, the hash."""
        out: dict[str, object] = {}
        if self.splits:
            out["splits"] = [[name, name_to_json(folder)] for name, folder in sorted(self.splits)]
        if self.classes is not None:
            out["classes"] = hash_bytes(canonical([name_to_json(name) for name in self.classes]))
        return out


@dataclass(frozen=True)
class Base:
    """A folder that holds class folders, or images: as it stands in keys, and the split that it is ("all" where there are none)."""

    folder: str
    split: str = "all"


def find_bases(roots: Mapping[str, str], tops: Mapping[str, Mapping[str, bool]], layout: Layout, what: str = "images") -> list[Base]:
    """The folders that hold classes, or images, of all roots in order.

    `roots`: what each root is called in keys ("" where there is one) -> its path or URL.  `tops`: for each root the folders directly in it that hold
    images, at any depth, and whether they do so in folders of their own; `what` they hold.  Raises SourceError where it cannot be told
    which are splits.
    """
    if layout.splits:
        numbers = {root: number for number, root in enumerate(roots)}
        bases = [Base(folder, name) for name, folder in layout.splits]
        return sorted(bases, key=lambda base: (numbers.get(base.folder.partition("/")[0], 0), base.folder))
    found = {root: _splits_in(where, tops[root], what) for root, where in roots.items()}
    if any(found.values()) and not all(found.values()):
        has, lacks = next(root for root in roots if found[root]), next(root for root in roots if not found[root])
        raise SourceError(
            f"{show(roots[has])} holds splits ({', '.join(map(show, found[has]))}) and {show(roots[lacks])} none: say with --split which split each "
            f"is, as in --split {show(found[has][0])}={show(roots[lacks])}",
            path=roots[lacks],
        )
    return [Base(f"{root}/{name}" if root else name, name) for root, names in found.items() for name in names] or [Base(root) for root in roots]


def within(folder: str, bases: Mapping[str, _T]) -> tuple[str, _T] | None:
    """(base, what it maps to) of the base that a folder is or lies in; none of them lies in another."""
    if "" in bases:
        return "", bases[""]
    at = folder.find("/")
    while at >= 0 and folder[:at] not in bases:
        at = folder.find("/", at + 1)
    base = folder if at < 0 else folder[:at]
    return (base, bases[base]) if base in bases else None


def _splits_in(where: str, tops: Mapping[str, bool], what: str) -> list[str]:
    """The folders directly in a root that are its splits; none where one is class folders, or flat.

    They are where all are named so.  Where two or more are, and one of these has class folders, beside folders that are not, nobody knows.
    """
    named = sorted((name for name in tops if name.lower() in _RANKS), key=rank)
    if len(named) == len(tops):
        return named
    if len(named) < 2 or not any(tops[name] for name in named):
        return []
    others = sorted(set(tops) - set(named))
    shown = ", ".join(map(show, others[:3])) + (", …" if len(others) > 3 else "")
    splits = " ".join(f"--split {show(name)}={show(name)}" for name in named[:3])
    exclude = f"leave the others out, as in --exclude {show(others[0])}, " if what == "images" else ""
    raise SourceError(
        f"{show(where)} holds splits ({', '.join(map(show, named))}) beside other folders with {what} ({shown}): say which are "
        f"splits, as in {splits}, {exclude}or say --split all=. where all of them are classes",
        path=where,
        splits=named,
    )


def parse_splits(raw: Sequence[str], given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """NAME=FOLDER texts as (name, folder as it stands in keys).  Raises OptionError.

    With one RAW a folder is a path below it ("." is all of it); with several it is one of them, or a path below one, as typed.
    """
    out: list[tuple[str, str]] = []
    for text in given:
        name, sign, folder = text.partition("=")
        if not (name and sign and folder):
            raise OptionError(f"--split {show(text)}: expected NAME=FOLDER, as in train=images/train", options=["split"])
        if why := why_no_splits([name]):
            raise OptionError(f"--split {show(text)}: {why}", options=["split"])
        key = _key_of(raw, folder)
        if key is None:
            expected = "a folder below RAW, as in train=images/train" if len(raw) == 1 else "one of the RAW given, or a folder below one"
            raise OptionError(f"--split {show(text)}: expected {expected}", options=["split"])
        for other, taken in out:
            if taken == key or not taken or not key or f"{taken}/".startswith(f"{key}/") or f"{key}/".startswith(f"{taken}/"):
                raise OptionError(
                    f"--split {show(text)}: this folder and that of split {show(other)} hold the same images; each may be in one split",
                    options=["split"],
                )
        out.append((name, key))
    if why := why_no_splits(list(dict.fromkeys(name for name, _ in out))):
        raise OptionError(f"--split: {why}", options=["split"])
    return tuple(out)


def _key_of(raw: Sequence[str], folder: str) -> str | None:
    """A folder as it stands in keys; None where it is not below RAW."""
    if len(raw) == 1:
        key = posixpath.normpath(folder)
        return None if key.startswith(("/", "..")) else "" if key == "." else key
    wanted = _absolute(folder)
    inside = [
        (len(place), f"{number}{wanted[len(place) :]}") for number, place in enumerate(map(_absolute, raw)) if f"{wanted}/".startswith(f"{place}/")
    ]
    return max(inside)[1] if inside else None


def _absolute(place: str) -> str:
    found = str(on_disk(place))
    return found.rstrip("/") if is_url(found) else os.path.abspath(found)
