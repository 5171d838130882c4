"""Hides how folders become classes and their items an order: that of torchvision's ImageFolder, whatever the folders lie on.

Pure: folders with their items in, a Scan out.  Class folders are numbered as text, in one map over all splits and roots; within a class folders stand
in the order of their whole path and files in that of their names, both as text.  A tree whose sub-folders hold no image is flat: it has no labels.
"""

from __future__ import annotations

import difflib
import itertools
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import STAT_DTYPE, Scan, labelled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.compiler.sources.splits import Base, Layout, find_bases, rank, within
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.fields import Split
from mmcompile.text import counted

__all__ = ["Folder", "arrange", "lacking"]

_MAX_EXTENSION_REASONS = 20
#: Class folders named where a class map lacks them: looking for names like them takes a second for each, among 10^5.
_MOST_UNKNOWN = 3
#: Names in a warning.
_SHOWN = 5
#: Items that lie together while folders are collected: 17 MB and their keys.
_PACKED = 1 << 18
#: Names that are bytes objects at one time while a large folder is sorted.
_CHUNK = 1 << 14


@dataclass
class Folder:
    """The items directly in one folder, in order: whole keys, STAT_DTYPE (N,), and the device of all or of each (-1: not known; None: there is none).

    `text` is the folder's path below the root ("" for the root itself).  `left_out` counts what is no item by reason, `counts` facts for the summary.
    """

    text: str
    keys: Keys
    stat: npt.NDArray[np.void]
    devices: npt.NDArray[np.int64] | int | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, key: bytes, names: Iterable[bytes], stat: npt.NDArray[np.void], devices: npt.NDArray[np.int64] | int | None = None) -> Folder:
        """A folder by its path, and its items by name in any order."""
        columns = Keys.of(names)
        order, ordered = _in_text_order(columns)
        prefix = key + b"/" if key else b""
        blob = b"".join(prefix + prefix.join(part) for part in ordered)
        places = None if columns.places is None else columns.places[order]
        keys = Keys(np.frombuffer(blob, np.uint8), np.cumsum(np.diff(columns.stops, prepend=0)[order] + len(prefix)), places=places)
        return cls(as_text(key), keys, stat[order], devices[order] if isinstance(devices, np.ndarray) else devices)


def _in_text_order(names: Keys) -> tuple[npt.NDArray[np.int64], Iterator[list[bytes]]]:
    """What sorts names as text, (N,), and the sorted names, part by part."""
    blob, width = names.blob, int(np.diff(names.stops, prepend=0).max(initial=1))
    starts = range(0, len(names), _CHUNK)
    if len(blob) and blob.min() > 0 and blob.max() < 128:  # then bytes sort as text does
        table = np.empty(len(names), f"S{width}")
        for at in starts:
            table[at : at + _CHUNK] = list(names[at : at + _CHUNK])
        order = np.argsort(table)
        return order, (table[order[at : at + _CHUNK]].tolist() for at in starts)
    plain = list(names)
    texts = [as_text(name) for name in plain]
    numbers = sorted(range(len(texts)), key=texts.__getitem__)
    return np.array(numbers, np.int64), ([plain[i] for i in numbers[at : at + _CHUNK]] for at in starts)


def arrange(roots: Mapping[str, str], folders: Iterable[Folder], choice: Choice, layout: Layout | None = None) -> Scan:
    """The scan of all folders, given in any order; an iterator's are let go while they are taken over.

    `roots`: what each root is called in keys ("" where there is one) -> its path or URL.  A folder that is given, or holds one, directly below a
    root, or where there are splits below one of these, is a class, with images or without.  Raises SourceError: there is no image, or it cannot be
    told what is a split or a class.
    """
    layout = layout or Layout()
    left_out: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    gathered: list[Folder] = []
    tops: dict[str, dict[str, bool]] = {root: {} for root in roots}
    fresh: list[Folder] = []
    waiting = 0
    for folder in folders:
        fresh.append(folder)
        waiting += len(folder.keys)
        if waiting >= _PACKED:
            _pack(fresh)
            fresh, waiting = [], 0
        left_out.update(folder.left_out)
        counts.update(folder.counts)
        counts["folders"] += folder.text not in roots
        gathered.append(folder)
        if len(folder.keys):
            root, inside = _below(folder.text, roots)
            top, _, deeper = inside.partition("/")
            if top:
                tops[root][top] = tops[root].get(top, False) or bool(deeper)
    del fresh
    if not any(len(folder.keys) for folder in gathered):
        where = ", ".join(map(show, roots.values()))
        raise SourceError(f"no images in {where}: {_describe(_reasons(left_out), counts['folders'])}", path=where, left_out=_reasons(left_out))
    parts = {base.folder: _Part(base, roots) for base in find_bases(roots, tops, layout)}
    outside, empty = 0, []
    while gathered:
        folder = gathered.pop()
        found = within(folder.text, parts)
        if found is None:
            outside += len(folder.keys)
            above, _, name = folder.text.rpartition("/")
            if above in roots and not layout.splits and name not in tops[above] and rank(name) < rank(""):
                empty.append(show(folder.text))
        else:
            found[1].add(folder)
    for part in parts.values():
        if not part.beside and not part.labelled:
            lost = "" if os.path.isdir(part.where) or "://" in part.where else ": no such folder"
            raise SourceError(f"no images in {part.where}{lost}", path=part.where)
    warnings = _part_warnings(list(parts.values()), tops, layout)
    left_out["directly in RAW beside class folders"] += sum(part.beside for part in parts.values() if part.labelled)
    if outside:
        left_out["in no split"] += outside
        warnings.append(f"left out, as in no split: {counted(outside, 'images')}; --split NAME=FOLDER names the folders that are splits")
    if empty:
        warnings.append(f"no image in {', '.join(sorted(empty))}, so there is no such split")
    names, told = _class_map([part for part in parts.values() if part.labelled], layout)
    warnings += told
    splits, numbers, sizes, groups = _grouped(list(parts.values()), names or ())
    del parts, part, folder, found
    keys, stat, again = _join(groups)
    if again:
        counts["files reached again"] = again
    labels = None if names is None else np.repeat(np.array(numbers, np.int64), sizes)
    if [split.name for split in splits] == ["all"]:
        splits = ()
    if labels is not None and splits:
        warnings += lacking(names or (), labels, splits)
    warnings += choice.warnings()
    facts = {name: counts[name] for name in sorted(counts) if counts[name]}
    return Scan(keys, *labelled(labels, len(keys)), stat, names, _reasons(left_out), tuple(warnings), facts, splits)


def _below(folder: str, roots: Mapping[str, str]) -> tuple[str, str]:
    """(the root that a folder is or lies in, its path below it)."""
    found = within(folder, roots)
    root = found[0] if found is not None else folder.partition("/")[0]
    return root, folder[len(root) + bool(root) :]


class _Part:
    """What lies in one base: the images directly in it, and its class folders by name."""

    def __init__(self, base: Base, roots: Mapping[str, str]) -> None:
        self.base = base
        root, inside = _below(base.folder, roots)
        self.where = show(os.path.join(roots.get(root, root), inside) if inside else roots.get(root, root))
        self.direct: list[Folder] = []
        self.classes: dict[str, list[Folder]] = {}
        #: Has it classes?  Folders without any image in them are none beside images that lie in no folder.
        self.labelled = False
        #: Images that lie in no class folder.
        self.beside = 0
        self._skip = len(base.folder) + 1 if base.folder else 0

    def add(self, folder: Folder) -> None:
        if folder.text == self.base.folder:
            self.direct.append(folder)
            self.beside += len(folder.keys)
        else:
            self.classes.setdefault(folder.text[self._skip :].partition("/")[0], []).append(folder)
            self.labelled |= bool(len(folder.keys))

    @property
    def filled(self) -> list[str]:
        """The class folders with images, in order."""
        return sorted(name for name, folders in self.classes.items() if any(len(folder.keys) for folder in folders))

    def inner(self, name: str) -> set[str]:
        """The folders directly in a class folder that hold images, at any depth."""
        start = self._skip + len(name) + 1
        return {folder.text[start:].partition("/")[0] for folder in self.classes[name] if len(folder.keys) and len(folder.text) >= start}


def _class_map(parts: list[_Part], layout: Layout) -> tuple[tuple[str, ...] | None, list[str]]:
    """The names of the classes of all parts, and what a person should know of them; None where there are no classes."""
    if layout.classes is None:
        names = tuple(sorted({name for part in parts for name in part.classes}))
        filled = {name for part in parts for name in part.filled}
        return (names, _class_warnings(names, filled) + _alike(parts)) if parts else (None, [])
    if not parts:
        raise SourceError("--classes-from: RAW has no class folders; leave it out, or give RAW that has", options=["classes-from"])
    known = frozenset(layout.classes)
    unknown = {name: part for part in reversed(parts) for name in part.filled if name not in known}
    if unknown:
        raise _unknown_classes(unknown, layout.classes)
    empty = len(known - {name for part in parts for name in part.filled})
    return layout.classes, [f"{empty:,} of {len(known):,} classes have no image here (they keep their numbers)"] if empty else []


def _unknown_classes(unknown: dict[str, _Part], known: tuple[str, ...]) -> SourceError:
    """Class folders that a fixed class map lacks, and where the first of each lies; some with the names most like it."""
    shown = []
    for name in sorted(unknown)[:_MOST_UNKNOWN]:
        near = difflib.get_close_matches(name, known, 3)
        shown.append(show(name) + (f" (nearest: {', '.join(map(show, near))})" if near else ""))
    more = len(unknown) - len(shown)
    name, part = min(unknown.items(), key=lambda item: item[0])
    key = f"{part.base.folder}/{name}" if part.base.folder else name
    return SourceError(
        f"{len(unknown):,} class folder{'s are' if len(unknown) > 1 else ' is'} not among the {len(known):,} names of --classes-from: "
        f"{', '.join(shown)}{f' and {more:,} more' if more else ''}; in {part.where}: rename, or leave out with --exclude {show(key)}",
        path=part.where,
        unknown=sorted(unknown),
    )


def _grouped(parts: list[_Part], classes: tuple[str, ...]) -> tuple[tuple[Split, ...], list[int], list[int], list[list[Folder]]]:
    """(splits, class number of each group, its items, its folders in order), in the order of rows; the parts are emptied.

    Within a split class by class, then what has no class (number -1); within a class root by root, then folder by folder.
    """
    splits: list[Split] = []
    numbers: list[int] = []
    sizes: list[int] = []
    groups: list[list[Folder]] = []
    at = 0
    for split in sorted({part.base.split for part in parts}, key=rank):
        mine = [part for part in parts if part.base.split == split]
        found = [(number, [part.classes.pop(name, []) for part in mine if part.labelled]) for number, name in enumerate(classes)]
        found.append((-1, [part.direct for part in mine if not part.labelled]))
        for number, folders in found:
            group = [folder for some in folders for folder in sorted(some, key=lambda folder: folder.text)]
            if size := sum(len(folder.keys) for folder in group):
                numbers.append(number)
                sizes.append(size)
                groups.append(group)
        stop = sum(sizes)
        splits.append(Split(split, at, stop))
        at = stop
    return tuple(splits), numbers, sizes, groups


def _pack(folders: list[Folder]) -> None:
    """Lay the items of these folders into common arrays.

    Millions of small arrays would leave their memory to this process alone when they are let go; a few large ones give it back.
    """
    keys, stat = Keys.join([folder.keys for folder in folders]), np.concatenate([folder.stat for folder in folders])
    at = 0
    for folder in folders:
        rows = slice(at, at + len(folder.keys))
        folder.keys, folder.stat, at = keys[rows], stat[rows], rows.stop


def _join(groups: list[list[Folder]]) -> tuple[Keys, npt.NDArray[np.void], int]:
    """The items of all folders in one; the folders are let go one by one, so that never all of them are there twice."""
    n = sum(len(folder.keys) for group in groups for folder in group)
    blob = np.empty(sum(len(folder.keys.blob) for group in groups for folder in group), np.uint8)
    stops, stat = np.empty(n, np.int64), np.empty(n, STAT_DTYPE)
    places = np.empty((n, 3), np.int64) if any(folder.keys.places is not None for group in groups for folder in group) else None
    devices = _Devices(n)
    at = end = 0
    for group in groups:
        group.reverse()
        while group:
            folder = group.pop()
            part, rows = folder.keys.blob, slice(at, at + len(folder.keys))
            blob[end : end + len(part)] = part
            stops[rows] = folder.keys.stops + end
            stat[rows] = folder.stat
            if places is not None and folder.keys.places is not None:
                places[rows] = folder.keys.places
            devices.put(rows, folder.devices)
            at, end = rows.stop, end + len(part)
    return Keys(blob, stops, places=places), stat, devices.reached_again(stat["inode"])


class _Devices:
    """The device of each of N items: one number as long as all have the same."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._values: npt.NDArray[np.int64] | int = -1

    def put(self, rows: slice, found: npt.NDArray[np.int64] | int | None) -> None:
        found = -1 if found is None else found
        if isinstance(found, int) and (rows.start == 0 or (isinstance(self._values, int) and self._values == found)):
            self._values = found
        elif rows.stop > rows.start:
            if isinstance(self._values, int):
                self._values = np.full(self._n, self._values)
            self._values[rows] = found

    def reached_again(self, inodes: npt.NDArray[np.int64]) -> int:
        """How many items are a file that another item is already (through links to it or to a folder above it, or as hard links)."""
        again = 0
        for device in np.unique(self._values).tolist():
            if device != -1:
                mine = np.sort(inodes[self._values == device] if isinstance(self._values, np.ndarray) else inodes)
                again += int(np.count_nonzero(mine[1:] == mine[:-1]))
        return again


def _part_warnings(parts: list[_Part], tops: Mapping[str, Mapping[str, bool]], layout: Layout) -> list[str]:
    """What a person should know of how splits and classes were told apart."""
    out = []
    some = any(part.labelled for part in parts)
    for part in parts:
        if part.labelled and part.beside:
            where = part.where if part.base.folder else "RAW"
            out.append(
                f"left out, as directly in {where}, beside class folders: {counted(part.beside, 'images')}; move what counts into a class folder"
            )
        if some and not part.labelled:
            out.append(f"in no class folder, and so of label -1: {counted(part.beside, 'images')} of {part.where}")
    split = {part.base.split for part in parts} != {"all"}
    if split and not layout.splits and not some:
        out.append("folders named like splits are taken for splits without labels; if they are classes, say --split all=.")
    if not split and not layout.splits:
        for part in parts:
            out += _layout_warnings(part, tops)
    return out


def _class_warnings(names: tuple[str, ...], filled: set[str]) -> list[str]:
    warnings = []
    empty = [name for name in names if name not in filled]
    if empty:
        warnings.append(f"{len(empty)} of {len(names)} class folders hold no image (they keep their numbers): {_some(empty)}")
    if all(name.isascii() and name.isdigit() for name in names) and sorted(names, key=int) != list(names):
        pair = next((a, b) for a, b in itertools.pairwise(names) if int(a) > int(b))
        warnings.append(f"class folders are numbers and are sorted as text, as torchvision does: {pair[0]} stands before {pair[1]}")
    return warnings


def _alike(parts: list[_Part]) -> list[str]:
    """A line for each two classes whose names look the same but for case, or how accents are written, with a place of each."""
    places: dict[str, dict[str, str]] = {}
    for part in parts:
        for name in part.filled:
            places.setdefault(unicodedata.normalize("NFC", name).casefold(), {}).setdefault(name, part.where)
    alike = [sorted(found.items()) for _, found in sorted(places.items()) if len(found) > 1]
    out = []
    for (one, here), (other, there), *_ in alike[:_SHOWN]:
        differ = "only in case" if one.casefold() == other.casefold() else "only in how their letters are written"
        out.append(f"two classes differ {differ}: {show(one)} in {here} and {show(other)} in {there}; if they are one, give their folders one name")
    return out + [f"{len(alike) - _SHOWN:,} more pairs of classes differ only so"] * (len(alike) > _SHOWN)


def lacking(names: tuple[str, ...], labels: npt.NDArray[np.int64], splits: tuple[Split, ...]) -> list[str]:
    """A line for each split without images of classes that others have."""
    has = [np.bincount(labels[split.start : split.stop] + 1, minlength=len(names) + 1)[1:] > 0 for split in splits]
    known = np.logical_or.reduce(has)
    out = []
    for split, mine in zip(splits, has, strict=True):
        lacks = np.flatnonzero(known & ~mine).tolist()
        if lacks and mine.any():
            shown = _some([names[i] for i in lacks[: _SHOWN + 1]])
            out.append(f"split {show(split.name)} has no image of {len(lacks):,} of {len(names):,} classes (all keep their numbers): {shown}")
    return out


def _some(names: list[str]) -> str:
    return ", ".join(show(name) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _layout_warnings(part: _Part, tops: Mapping[str, Mapping[str, bool]]) -> list[str]:
    """Layouts that torchvision takes for classes, and a person perhaps not."""
    filled = part.filled
    named = [name for name in filled if rank(name)[0] < rank("")[0]]
    if len(named) >= 2 or any(tops[part.base.folder][name] for name in named):
        return [f"folders named like splits count as classes here: {', '.join(map(show, named))}; if they are splits, say so with --split"]
    if len(filled) == 1 and len(inner := part.inner(filled[0])) >= 2:
        only = show(filled[0])
        return [f"there is one class, {only}, with {len(inner):,} folders in it; if those are the classes, build the folder {only}"]
    within = [[name for name in sorted(part.inner(top)) if rank(name)[0] < rank("")[0]] for top in filled]
    if within and min(map(len, within)) >= 2:
        called = ", ".join(map(show, within[0]))
        return [
            f"each class, as {show(filled[0])}, holds folders named like splits ({called}), which count for nothing here; if they are splits, or if "
            "one folder holds what belongs to the pictures of another, say so in a list of the images (CSV), or name the folders images and masks"
        ]
    return []


def _reasons(left_out: Counter[str]) -> dict[str, int]:
    """The counts by reason, with at most 20 extensions by name: a million of `scan.000001` must not make a million reasons."""
    extensions = sorted((reason for reason in left_out if reason.startswith("extension ")), key=lambda reason: (-left_out[reason], reason))
    shown = Counter({reason: count for reason, count in left_out.items() if count})
    for reason in extensions[_MAX_EXTENSION_REASONS:]:
        shown["other extensions"] += shown.pop(reason)
    return dict(sorted(shown.items()))


def _describe(left_out: dict[str, int], folders: int) -> str:
    if not left_out:
        return f"{counted(folders, 'folders')} in it, and no file" if folders else "the folder is empty"
    largest = sorted(left_out, key=lambda reason: (-left_out[reason], reason))
    text = ", ".join(f"{left_out[reason]:,} {reason}" for reason in largest[:5])
    hint = next((f"; --source {kind} reads archives that lie beside other things" for kind in ("tar", "zip") if f"extension .{kind}" in left_out), "")
    if "extension .npy" in left_out:
        hint = hint or "; as pictures .npy files come in a list (--source manifest) or in a folder beside others, alone they are arrays"
    return f"left out were {text}" + (", …" if len(largest) > 5 else "") + hint
