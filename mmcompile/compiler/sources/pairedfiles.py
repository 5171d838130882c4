"""Hides how files of folders side by side find each other: by their path in their folder, without the extension.

A file without a partner, and two of one name in a folder, are faults: counted, and the first of them named, with both places.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.formats import extension
from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources import pairedlabels as labels
from mmcompile.compiler.sources.arrange import Folder
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Patterns, show
from mmcompile.compiler.sources.pairedlayout import ANNOTATIONS, IMAGES, Beside, PairSet, kind_of, last_word, word_of
from mmcompile.compiler.sources.parts import joined_stat
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.fields import PIXELS
from mmcompile.text import counted

__all__ = ["TEXT", "Pairing", "Pairs", "Tree", "endings", "stem_of"]

#: Boxes as text.
TEXT = ".txt"
#: Faults that an error names; all are counted.
_NAMED = 5
#: Names by which it is found out whether those of a folder end in something that others lack.
_LOOKED_AT = 1000


class Tree:
    """Every folder that counts, by its path; `above`: also those that only hold others."""

    def __init__(self, folders: Iterable[Folder], exclude: Patterns) -> None:
        self.folders: dict[str, Folder] = {}
        self.above: set[str] = set()
        self.left_out: Counter[str] = Counter()
        for folder in folders:
            paths = list(itertools.accumulate(folder.text.split("/"), lambda a, b: f"{a}/{b}")) if folder.text else []
            if exclude and any(exclude.match(path) for path in paths):
                self.left_out["in an excluded folder"] += len(folder.keys)
                continue
            self.left_out.update(folder.left_out)
            if exclude and not any(word_of(part) in IMAGES for part in folder.text.split("/")) and all(map(exclude.match, map(as_text, folder.keys))):
                self.left_out["excluded"] += len(folder.keys)
                continue
            if len(folder.keys):
                self.folders[folder.text] = folder
                self.above.update(paths)

    def leave_others(self, places: Sequence[str]) -> None:
        """Count the files in none of these folders as left out."""
        for text, folder in self.folders.items():
            if not any(text == place or text.startswith(f"{place}/") for place in places):
                names = [as_text(key.rpartition(b"/")[2]) for key in folder.keys]
                self.left_out["in no folder of a field"] += sum(name not in labels.CLASS_FILES for name in names)

    def column(self, place: str) -> Column:
        """All files below a folder, in the order of their paths."""
        start = len(place) + 1
        mine = [self.folders[text] for text in sorted(self.folders) if text == place or text.startswith(f"{place}/")]
        keys = Keys.join([folder.keys for folder in mine]) if mine else Keys.of([])
        stat = np.concatenate([np.zeros(0, STAT_DTYPE), *(folder.stat for folder in mine)])
        return Column(place, keys, stat, len(os.fsencode(place)) + 1 if start else 0)


@dataclass
class Column:
    """The files of one folder: keys (N,), STAT_DTYPE (N,)."""

    place: str
    keys: Keys
    stat: npt.NDArray[np.void]
    skip: int

    def stems(self) -> Iterator[bytes]:
        """What each is found by: its path in the folder without its extension."""
        for key in self.keys:
            yield stem_of(key[self.skip :])

    def texts(self) -> npt.NDArray[np.bool_]:
        """Which of them are text (N,)."""
        return np.fromiter((key[-4:].lower() == TEXT.encode() for key in self.keys), bool, len(self.keys))

    def kept(self, mask: npt.NDArray[np.bool_]) -> Column:
        rows = np.flatnonzero(mask)
        return Column(self.place, self.keys.take(rows), self.stat[rows], self.skip)


def stem_of(key: bytes) -> bytes:
    if key.endswith(b"/"):  # a series
        return key[:-1]
    end = len(extension(as_text(key.rpartition(b"/")[2])))
    return key[:-end] if end else key


def endings(stems: Sequence[bytes]) -> list[bytes]:
    """What all of these end in, and may have behind the name that they share with others (`_mask`), the shortest first; never part of a number."""
    names = [stem.rpartition(b"/")[2] for stem in stems]
    shared = names[0] if names else b""
    for name in names:
        while not name.endswith(shared):
            shared = shared[1:]
    found = (shared[at:] for at in range(len(shared) - 1, -1, -1))
    return [end for end in found if not end[:1].isdigit() and all(len(name) > len(end) for name in names)]


def _ending(longer: Collection[bytes], others: Collection[bytes]) -> bytes:
    """What is to be taken off all of `longer`, so that most of them are in `others`; empty for nothing."""
    stems = list(itertools.islice(longer, _LOOKED_AT))
    hits = {end: sum(stem[: -len(end)] in others for stem in stems) for end in endings(stems) if all(stem.endswith(end) for stem in longer)}
    best = max(hits, key=lambda end: hits[end], default=b"")
    return best if hits.get(best) else b""


@dataclass
class Pairs:
    """The samples of one set: rows (N,) of its pictures, their keys and stat, and the name of the text beside each."""

    rows: npt.NDArray[np.int64]
    keys: Keys
    stat: npt.NDArray[np.void]
    texts: list[str | None]


class Pairing:
    """Pairs the files of sets, and collects what is wrong with them; `text` is the field whose folder holds boxes, "" for none."""

    def __init__(self, tree: Tree, sets: Sequence[PairSet], asked: Mapping[str, FieldOptions], include: Patterns, exclude: Patterns) -> None:
        self._tree, self._asked, self._include, self._exclude = tree, asked, include, exclude
        self.left_out: Counter[str] = Counter()
        self.said: list[str] = []
        self._lines: list[str] = []
        self._faults = 0
        self._drops: set[str] = set()
        self.text = next((b.field for one in sets for b in one.beside if self._is_text(b)), "")
        main, beside = sets[0].field, [b for b in sets[0].beside if b.field != self.text]
        named = [
            (main, self._kind(main, self._found_in(sets[0].main))),
            *((b.field, self._kind(b.field, kind_of(last_word(b.folder)))) for b in beside),
        ]
        self.parts = tuple(named)

    def _kind(self, name: str, default: str) -> str:
        kind = self._asked.get(name, FieldOptions()).kind or default
        if kind not in PIXELS:
            raise OptionError(f"--field {name}:kind={kind}: the files of a folder are of kind {', '.join(sorted(PIXELS))}", options=["field"])
        return kind

    def _found_in(self, place: str) -> str:
        """What the files of a folder hold, as far as their names tell: "volume" or "image"."""
        keys = self._tree.column(place).keys
        name = as_text(keys[0]) if len(keys) else ""
        return "volume" if name.endswith("/") or extension(name) in (".nii", ".nii.gz") else "image"

    def _is_text(self, beside: Beside) -> bool:
        """Does this folder hold boxes as text, and no pictures?"""
        texts = self._tree.column(beside.folder).texts() if word_of(last_word(beside.folder)) in ANNOTATIONS else np.zeros(0, bool)
        return bool(len(texts)) and bool(texts.all())

    def pair(self, one: PairSet) -> Pairs:
        found = self._column(one.main, text=False)
        wanted = self._chosen(found, include=True)
        main, gone = found.kept(wanted), set(found.kept(~wanted).stems())
        stems = self._by_stem(main)
        stay = np.ones(len(main.keys), bool)
        beside, partners, names = [], [], [None] * len(main.keys)
        for b in one.beside:
            column = self._column(b.folder, text=b.field == self.text)
            column = column.kept(self._chosen(column, include=False))
            partner = self._partners(b, column, stems, gone, main, stay)
            if b.field == self.text:
                paths = [as_text(key) for key in column.keys]
                names = [paths[at] if at >= 0 else None for at in partner.tolist()]
            else:
                beside.append(column)
                partners.append(partner)
        rows = np.flatnonzero(stay)
        if self._faults:
            return Pairs(rows, main.keys.take(rows), main.stat[rows], [])
        keys = main.keys.take(rows).with_beside([column.keys.take(partner[rows]) for column, partner in zip(beside, partners, strict=True)])
        stat = joined_stat([main.stat[rows], *(column.stat[partner[rows]] for column, partner in zip(beside, partners, strict=True))])
        return Pairs(rows, keys, stat, [names[at] for at in rows.tolist()] if self.text else [])

    def _column(self, place: str, *, text: bool) -> Column:
        column = self._tree.column(place)
        keep: npt.NDArray[np.bool_] = column.texts() == text
        if text:
            keep &= np.fromiter((as_text(key.rpartition(b"/")[2]) not in labels.CLASS_FILES for key in column.keys), bool, len(keep))
        else:
            self.left_out[f"extension {TEXT}"] += int((~keep).sum())
        return column.kept(keep)

    def _by_stem(self, column: Column) -> dict[bytes, int]:
        """Where each stem is; one that stands twice is a fault."""
        out: dict[bytes, int] = {}
        for at, stem in enumerate(column.stems()):
            if stem in out:
                first, second = (show(as_text(column.keys[i])) for i in (out[stem], at))
                self._fault(f"{first} and {second} have one name, and nobody knows which is meant")
            else:
                out[stem] = at
        return out

    def _chosen(self, column: Column, *, include: bool) -> npt.NDArray[np.bool_]:
        """Which files (N,) patterns leave in."""
        texts = [as_text(key).rstrip("/") for key in column.keys]
        kept = np.fromiter((not self._exclude.match(text) for text in texts), bool, len(texts))
        self.left_out["excluded"] += int((~kept).sum())
        if include and self._include:
            included = np.fromiter(map(self._include.match, texts), bool, len(texts))
            self.left_out["not included"] += int((kept & ~included).sum())
            kept &= included
        return kept

    def _partners(
        self, beside: Beside, column: Column, stems: Mapping[bytes, int], gone: set[bytes], main: Column, stay: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Which file of a folder belongs to each picture (N,), -1 for none; pictures that are dropped for it are taken out of `stay`."""
        partner = np.full(len(main.keys), -1, np.int64)
        is_text = beside.field == self.text
        drops_file = self._missing(self.parts[0][0]) == "drop"
        alone = Counter[str]()
        own = self._by_stem(column)
        if own and not own.keys() & (stems.keys() | gone):
            if end := _ending(own, stems):
                own = {stem[: -len(end)]: at for stem, at in own.items()}
                self.said.append(f"names in {show(beside.folder)} are those in {show(main.place)} with {show(as_text(end))} at their end")
            elif end := _ending(stems, own):
                stems, gone = {stem[: -len(end)]: row for stem, row in stems.items()}, {stem.removesuffix(end) for stem in gone}
                self.said.append(f"names in {show(main.place)} are those in {show(beside.folder)} with {show(as_text(end))} at their end")
        for stem, at in own.items():
            row = stems.get(stem)
            if row is not None:
                partner[row] = at
            elif stem in gone:
                continue
            elif drops_file:
                alone[f"without a picture in {main.place}"] += 1
            else:
                self._fault(f"{show(as_text(column.keys[at]))}: no picture {show(as_text(stem))} in {show(main.place)}")
                self._drops.add(self.parts[0][0])
        named = np.zeros(len(partner), bool)
        named[list(stems.values())] = True  # the others are of a name that stands twice
        lacking = np.flatnonzero(named & (partner < 0))
        name = labels.FIELD if is_text else beside.field
        missing = self._missing(name) or ("" if is_text else "refuse")
        if missing == "drop":
            stay[lacking] = False
            alone[f"without a file in {beside.folder}"] += len(lacking)
        elif missing == "refuse":
            for key in main.keys.take(lacking):
                self._fault(f"{show(as_text(key))}: no file {show(as_text(stem_of(key[main.skip :])))} in {show(beside.folder)}")
                self._drops.add(name)
        self.left_out.update(alone)
        return partner

    def _missing(self, name: str) -> str:
        return self._asked.get(name, FieldOptions()).missing or ""

    def _fault(self, said: str) -> None:
        self._faults += 1
        if self._faults <= _NAMED:
            self._lines.append(said)

    def raise_any(self) -> None:
        """Raises SourceError where there is a fault."""
        if self._faults:
            more = f"; and {self._faults - _NAMED:,} more" if self._faults > _NAMED else ""
            words = " and ".join(f"--field {name}:missing=drop" for name in sorted(self._drops))
            drop = f", or leave out all that lack a partner with {words}" if words else ""
            raise SourceError(
                f"{counted(self._faults, 'files')} cannot be paired: {'; '.join(self._lines)}{more}: add what is missing, take single ones out with "
                f"--exclude{drop}",
                count=self._faults,
            )
