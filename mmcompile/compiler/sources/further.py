"""Hides which members of tar archives are the pictures, masks, arrays and texts of a sample: what stands in a name between its first and last dot.

Of `a.jpg`, `a.seg.png` and `a.depth.png` the first is the image, the others are the mask `seg` and the picture `depth`.  Members are noted archive by
archive; at the end they all together say which fields there are, and a sample that lacks what another has is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.columns import IMAGE_NAMES, field_names, named_alike
from mmcompile.compiler.sources.keys import Keys, place_of
from mmcompile.compiler.sources.members import Place
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.parts import joined_stat
from mmcompile.compiler.sources.roles import is_called_mask
from mmcompile.compiler.sources.scanning import Wishes
from mmcompile.compiler.sources.webdataset import TarMembers, part_of
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.fields import PIXELS

__all__ = ["Further", "Settled", "wanted_texts"]

#: Names of texts that are fields unasked.
_CAPTIONS = ("caption",)
#: What masks in archives are called as well.
_LABELS = frozenset({"label", "labels", "gt"})
#: The field that the main image is.
_IMAGE = "image"

_Rows = npt.NDArray[np.int64]


def wanted_texts(options: Mapping[str, FieldOptions]) -> frozenset[str]:
    """Which `.txt` members are fields: `a.txt` where a field `txt` is text, `a.name.txt` where `name` is, and captions."""
    asked = [name for name, own in options.items() if own.kind == "text"]
    return frozenset("txt" if name == "txt" else f"{name}.txt" for name in (*asked, *_CAPTIONS))


@dataclass(frozen=True)
class Settled:
    """What the members of N samples are: `keys` (N,) and `stat` of their items, `parts`, the pixel fields of these, and by the name of their field
    the keys (N,) of `arrays` and `texts`.  `columns`: what all but the image are called in the archives; `several`: images left out beside another;
    `unnamed`: the images and masks that nobody asked for, where some columns were.
    """

    keys: Keys
    stat: npt.NDArray[np.void]
    parts: tuple[tuple[str, str], ...]
    arrays: dict[str, Keys] = field(default_factory=dict)
    texts: dict[str, Keys] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    several: int = 0
    unnamed: tuple[str, ...] = ()


class Further:
    """The images, arrays and texts of samples, which are added in order; `options` are settings of fields by name."""

    def __init__(self, wishes: Wishes, options: Mapping[str, FieldOptions]) -> None:
        self._wishes, self._options = wishes, options
        self._added: list[_Found] = []
        self._count = 0
        self._any_others = False
        #: Is there a mask beside an image, or a member that was asked for?
        self.found = False
        #: What the images of samples are called, where one of them is asked for.
        self.names: set[str] = set()

    def add(self, members: TarMembers) -> _Rows:
        """Note the members of one more archive; (S,) which row each of its samples is among those of this archive, -1 for one without its image."""
        keys, others = Keys.join([members.keys, members.others.keys]), members.others
        sample = np.concatenate([members.sample, others.sample])
        is_main = np.arange(len(sample)) < len(members.sample)
        if self._wishes.image is not None:
            parts = [part_of(key) for key in keys.bare]
            self.names.update(part for part, at in zip(parts, sample.tolist(), strict=True) if at >= 0)
            is_main = np.fromiter((part == self._wishes.image for part in parts), bool, len(parts))
        has = np.zeros(len(members.samples) + 1, bool)
        has[sample[is_main]] = True
        has[-1] = False  # what has no extension is of no sample
        row_of = np.where(has, np.cumsum(has) - 1, -1)
        rows = row_of[sample]
        self.found |= self._finds(keys, rows, members)
        at = np.flatnonzero(rows >= 0)
        at = at[np.argsort(rows[at], kind="stable")]
        stat = np.concatenate([members.stat, others.stat])[at]
        self._added.append(_Found(keys.take(at), stat, rows[at] + self._count, at < len(members.keys)))
        self._any_others |= len(others.keys) > 0
        self._count += int(has.sum())
        return row_of[:-1]

    def _finds(self, keys: Keys, rows: _Rows, members: TarMembers) -> bool:
        """Is here a mask beside an image, beside each image another, or a member that was asked for?"""
        if self._wishes.image is not None:
            return bool((rows >= 0).any())
        if not (rows >= 0).any() or int(np.bincount(rows[rows >= 0]).max()) == 1:  # then names need not be looked at
            return False
        images = len(members.keys)
        found = [(row, _name(part_of(key), at < images)) for at, (key, row) in enumerate(zip(keys.bare, rows.tolist(), strict=True))]
        names = {name for row, name in found if row >= 0 and name}
        if any(name in self._options or name in (self._wishes.columns or ()) for name in names):
            return True
        count = Counter(name for row, name in set(found[:images]) if row >= 0)
        every = [name for name, of in count.items() if of == int(rows.max()) + 1]
        return any(map(_is_mask, count)) or ("" in every and len(every) > 1)

    def settle(self, label: str | None) -> Settled:
        """What they are; `label` is where a field of that name comes from, if there is one.

        Raises SourceError, naming both places, where one sample has what another has not; OptionError.
        """
        found = _Found.joined(self._added)
        self._added.clear()
        groups = self._groups(found)
        main, several = found.each(groups.pop(""), _IMAGE, self._count)
        columns = self._chosen(groups)
        names = field_names(columns, label)
        parts, at = [(_IMAGE, self._kind(_IMAGE, "", True))], [main]
        values: dict[str, dict[str, Keys]] = {"value": {}, "text": {}}
        for column in columns:
            chosen, left = found.each(groups[column], column, self._count)
            several += left
            name = names[column]
            kind = self._kind(name, column, bool(found.is_image[chosen[0]]))
            if kind in PIXELS:
                parts.append((name, kind))
                at.append(chosen)
            else:
                values["text" if kind == "text" else "value"][name] = found.keys.take(chosen)
        made = found.keys.take(main)
        if len(at) > 1:
            made = made.with_beside([found.keys.take(chosen) for chosen in at[1:]])
        stats = joined_stat([found.stat[chosen] for chosen in at])
        unnamed = tuple(f"{name} ({self._kind(name, name, True)})" for name in sorted({*groups} - {*columns}) if found.is_image[groups[name][0]])
        return Settled(made, stats, tuple(parts), values["value"], values["text"], tuple(groups), several, unnamed)

    def _groups(self, found: _Found) -> dict[str, _Rows]:
        """The members of each name, those of the main image as ""."""
        if self._wishes.image is None and not self._any_others and not found.differ():
            return {"": np.arange(len(found.rows))}
        names = [_name(part_of(key), found.is_image[at]) for at, key in enumerate(found.keys.bare)]
        wish = self._wishes.image
        if wish is not None:
            main = {at for at, key in enumerate(found.keys.bare) if part_of(key) == wish}
        else:
            images = {name for at, name in enumerate(names) if found.is_image[at]}
            called = "" if "" in images else named_alike(images, IMAGE_NAMES) or min(sorted(images), key=_is_mask)
            main = {at for at, name in enumerate(names) if name == called and found.is_image[at]}
        groups: dict[str, list[int]] = {"": sorted(main)}
        for at, name in enumerate(names):
            if at not in main:
                groups.setdefault(name or part_of(found.keys[at]), []).append(at)
        return {name: np.array(group, np.int64) for name, group in groups.items()}

    def _chosen(self, groups: Mapping[str, _Rows]) -> list[str]:
        """Which names beside the image become fields: all, or those that are asked for."""
        wished = self._wishes.columns
        if wished is None and self._wishes.image is None:
            return sorted(groups)
        return sorted(name for name in groups if name in (wished or ()) or name in self._options)

    def _kind(self, name: str, column: str, image: bool) -> str:
        own = self._options.get(name)
        if own is not None and own.kind is not None:
            return own.kind
        if not image:
            return "text" if column == "txt" or column in _CAPTIONS else "value"
        return "mask" if _is_mask(column) else "image"


@dataclass(frozen=True)
class _Found:
    """Members in the order of their samples: keys with places, their stat, the number of each one's sample, and which are called like images."""

    keys: Keys
    stat: npt.NDArray[np.void]
    rows: _Rows
    is_image: npt.NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[_Found]) -> _Found:
        columns = zip(*((part.stat, part.rows, part.is_image) for part in parts), strict=True)
        stat, rows, is_image = map(np.concatenate, columns)
        return cls(Keys.join([part.keys for part in parts]), stat, rows, is_image)

    def differ(self) -> bool:
        """Has a sample members of different names?"""
        begins = np.flatnonzero(np.diff(self.rows, prepend=-1))
        stops = np.append(begins[1:], len(self.rows))
        several = np.flatnonzero(stops - begins > 1)
        runs = zip(begins[several].tolist(), stops[several].tolist(), strict=True)
        return any(len({_name(part_of(key), True) for key in self.keys[first:stop].bare}) > 1 for first, stop in runs)

    def each(self, at: _Rows, what: str, count: int) -> tuple[_Rows, int]:
        """(one of the members at `at` for each of `count` samples: of several the first as text; how many others there are).

        Raises SourceError for a sample that has none.
        """
        rows = self.rows[at]
        begins = np.flatnonzero(np.diff(rows, prepend=-1))
        chosen, counts = at[begins], np.diff(np.append(begins, len(at)))
        if len(chosen) < count:
            lacks = int(np.flatnonzero(np.append(rows[begins], -1) != np.arange(len(begins) + 1))[0])
            beside = self._told(int(np.searchsorted(self.rows, lacks)))
            raise SourceError(
                f"{beside} has no {show(what)} beside it, and {self._told(int(chosen[0]))} is that of another sample: give each sample one, or leave "
                "out with --exclude what not all have",
                field=what,
            )
        for i in np.flatnonzero(counts > 1).tolist():
            chosen[i] = min(at[begins[i] : begins[i] + counts[i]].tolist(), key=lambda one: as_text(self.keys[one]))
        return chosen, len(at) - len(chosen)

    def _told(self, at: int) -> str:
        key = self.keys[at]
        return f"{show(as_text(key))} (byte {Place.of(place_of(key)).at:,})"


def _name(part: str, image: bool) -> str:
    """What a member is called by what follows the first dot of its name: the part before its extension, and for one of no such part that is no image
    its extension."""
    stem, _, extension = part.rpartition(".")
    return stem if stem or image else extension.lower()


def _is_mask(name: str) -> bool:
    return is_called_mask(name) or name.lower() in _LABELS
