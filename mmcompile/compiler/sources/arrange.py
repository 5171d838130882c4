"""Hides how folders become classes and their items an order: that of torchvision's ImageFolder, whatever the folders lie on.

Pure: folders with their items in, a Scan out.  Class folders are numbered as text; within a class folders stand in the order of their whole path and
files in that of their names, both as text.  A tree whose sub-folders hold no image is a flat folder without labels.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import STAT_DTYPE, Scan, labelled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["Folder", "arrange"]

#: Folders of these names that hold class folders are the splits of one dataset, not classes.
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})

_MAX_EXTENSION_REASONS = 20
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
        keys = Keys(np.frombuffer(blob, np.uint8), np.cumsum(np.diff(columns.stops, prepend=0)[order] + len(prefix)))
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


def arrange(root: str, folders: Iterable[Folder], choice: Choice) -> Scan:
    """The scan of all folders below `root`, given in any order; an iterator's are let go while they are taken over.

    A folder that is given, or holds one, directly below the root is a class, with images or without.  Raises SourceError: there is no image, or the
    folders hold splits.
    """
    left_out: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    direct: list[Folder] = []
    classes: dict[str, list[Folder]] = {}
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
        counts["folders"] += bool(folder.text)
        (classes.setdefault(folder.text.split("/", 1)[0], []) if folder.text else direct).append(folder)
    names = tuple(sorted(classes))
    filled = [any(len(folder.keys) for folder in classes[name]) for name in names]
    beside = sum(len(folder.keys) for folder in direct)
    warnings: list[str] = []
    if any(filled):
        with_images = [(name, classes[name]) for name, has in zip(names, filled, strict=True) if has]
        _refuse_splits(root, with_images)
        warnings = _class_warnings(names, filled) + _layout_warnings(with_images)
        if beside:
            left_out["directly in RAW beside class folders"] += beside
            warnings.append(f"{beside:,} images lie directly in RAW, beside class folders, and are left out: move them into a class folder")
        del with_images, direct
        groups = [sorted(classes.pop(name), key=lambda folder: folder.text) for name in names]
    elif beside:
        groups = [direct]
    else:
        raise SourceError(f"no images in {show(root)}: {_describe(_reasons(left_out), counts['folders'])}", path=root, left_out=_reasons(left_out))
    labels = None
    if any(filled):
        labels = np.repeat(np.arange(len(groups)), [sum(len(folder.keys) for folder in group) for group in groups])
    keys, stat, again = _join(groups)
    if again:
        counts["files reached again"] = again
    warnings += choice.warnings()
    facts = {name: counts[name] for name in sorted(counts) if counts[name]}
    known = None if labels is None else names
    return Scan(keys, *labelled(labels, len(keys)), stat, known, _reasons(left_out), tuple(warnings), facts)


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
            devices.put(rows, folder.devices)
            at, end = rows.stop, end + len(part)
    return Keys(blob, stops), stat, devices.reached_again(stat["inode"])


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


def _refuse_splits(root: str, filled: list[tuple[str, list[Folder]]]) -> None:
    """Raise SourceError if top folders are splits: named so, one of them with class folders, and beside them no other or one more of them."""
    splits = [(name, folders) for name, folders in filled if name.lower() in _SPLIT_NAMES]
    if not splits or (len(splits) < 2 and len(splits) < len(filled)) or not any(_inner(name, folders) for name, folders in splits):
        return
    names = [name for name, _ in splits]
    first = "train" if "train" in names else names[0]
    raise SourceError(
        f"{show(root)} holds splits ({', '.join(names)}), each with class folders: build one of them, "
        f"mmcompile build {show(os.path.join(root, first))} OUT",
        path=root,
        splits=names,
    )


def _class_warnings(names: tuple[str, ...], filled: list[bool]) -> list[str]:
    warnings = []
    empty = [name for name, has in zip(names, filled, strict=True) if not has]
    if empty:
        shown = ", ".join(show(name) for name in empty[:5]) + (", …" if len(empty) > 5 else "")
        warnings.append(f"{len(empty)} of {len(names)} class folders hold no image (they keep their numbers): {shown}")
    if all(name.isascii() and name.isdigit() for name in names) and sorted(names, key=int) != list(names):
        pair = next((a, b) for a, b in itertools.pairwise(names) if int(a) > int(b))
        warnings.append(f"class folders are numbers and are sorted as text, as torchvision does: {pair[0]} stands before {pair[1]}")
    return warnings


def _inner(name: str, folders: list[Folder]) -> set[str]:
    """The folders directly in a top folder that hold images, at any depth."""
    return {folder.text.removeprefix(name + "/").split("/")[0] for folder in folders if len(folder.keys) and folder.text != name}


def _layout_warnings(filled: list[tuple[str, list[Folder]]]) -> list[str]:
    """Layouts that torchvision takes for classes, and a person perhaps not."""
    named = [name for name, _ in filled if name.lower() in _SPLIT_NAMES]
    if len(named) >= 2 or any(_inner(name, folders) for name, folders in filled if name in named):
        return [f"folders named like splits count as classes here: {', '.join(map(show, named))}; if they are splits, build one of them"]
    if len(filled) == 1 and len(inner := _inner(*filled[0])) >= 2:
        only = show(filled[0][0])
        return [f"there is one class, {only}, with {len(inner):,} folders in it; if those are the classes, build the folder {only}"]
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
        return f"{folders:,} folder{'s'[: folders - 1]} in it, and no file" if folders else "the folder is empty"
    largest = sorted(left_out, key=lambda reason: (-left_out[reason], reason))
    text = ", ".join(f"{left_out[reason]:,} {reason}" for reason in largest[:5])
    return f"left out were {text}" + (", …" if len(largest) > 5 else "")
