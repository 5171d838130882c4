"""Hides which of the members of tar archives are samples, and what they hold beside their image.

Archive by archive: the image of each sample is chosen, and what was said of the samples becomes columns; at the end the columns become fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions, refuse_strange
from mmcompile.compiler.sources import LABEL, Scan
from mmcompile.compiler.sources.arrange import lacking
from mmcompile.compiler.sources.cells import Cells, Column, told, typed
from mmcompile.compiler.sources.columns import LABEL_NAMES, NO_LABEL, as_fields, as_label, field_names, find_column, named_alike
from mmcompile.compiler.sources.further import Further
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.listmembers import member_fields
from mmcompile.compiler.sources.members import TreeMembers
from mmcompile.compiler.sources.names import not_named, show
from mmcompile.compiler.sources.scanning import Wishes
from mmcompile.compiler.sources.splits import rank
from mmcompile.compiler.sources.webdataset import TarMembers, Values
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.index import LIST_LIMIT, Field, Split, row_dtype
from mmcompile.text import counted

__all__ = ["Pairing"]

#: Samples that are named where there are more.
_SHOWN = 3
#: Cells that are objects at one time.
_CHUNK = 1 << 14


class _Noted:
    """Samples of which something is to be told: how many, and the names of the first."""

    def __init__(self) -> None:
        self.count = 0
        self._names: list[str] = []

    def add(self, names: Keys, at: npt.NDArray[np.int64]) -> None:
        for i in range(min(len(names), _SHOWN - len(self._names))):
            self._names.append(f"{show(as_text(names[i]))} (byte {int(at[i]):,})")
        self.count += len(names)

    def __str__(self) -> str:
        return ", ".join(self._names) + (", …" if self.count > len(self._names) else "")


class Pairing:
    """The samples of archives, which are added in order; `options` are settings of fields by name, `read` gives the bytes of a member."""

    def __init__(self, wishes: Wishes, options: Mapping[str, FieldOptions], read: Callable[[bytes], bytes]) -> None:
        self._wishes, self._options, self._read = wishes, options, read
        self._further = Further(wishes, options)
        self._given: tuple[str, ...] | None = None
        #: All images of each archive; the samples themselves are let go.
        self.trees: list[TreeMembers] = []
        self._sizes: list[int] = []
        self._shown: list[str] = []
        #: Has a sample with an image a class, a record, or a member that is a field?
        self.paired = False
        self._rows = 0
        self._classes = Cells(".cls", keeps_text=True)
        self._records: dict[str, Cells] = {}
        self._lists: dict[str, Cells] = {}
        self._nested: set[str] = set()
        self._several = self._plain = 0
        self._no_image, self._no_class = _Noted(), _Noted()
        self._left_out: Counter[str] = Counter()
        self._warnings: list[str] = []

    def add(self, members: TarMembers) -> None:
        """The samples of one more archive."""
        row_of = self._further.add(members)
        sample = np.flatnonzero(row_of >= 0)
        self._plain += int((members.sample < 0).sum())
        lonely = row_of < 0
        lonely[members.refused] = False
        lacks = np.flatnonzero(lonely)
        self._no_image.add(members.samples.take(lacks), members.firsts[lacks])
        rows, cells = _placed(members.classes, row_of)
        _extend(self._classes, rows, cells, len(sample))
        without = np.ones(len(sample), bool)
        without[rows] = False
        self._no_class.add(members.samples.take(sample[without]), members.firsts[sample[without]])
        for name, values in members.records.items():
            if name not in self._records:
                self._records[name] = Cells(name, keeps_text=self._may_be_text(name))
            into = self._records[name]
            _extend(into, np.empty(0, np.int64), [], self._rows - len(into))
            _extend(into, *_placed(values, row_of), len(sample), quoted=values.quoted, mixed=values.plain)
            if values.nested:
                self._nested.add(name)
        for name, values in members.lists.items():
            into = self._lists.setdefault(name, Cells(name, keeps_text=True))
            _extend(into, np.empty(0, np.int64), [], self._rows - len(into))
            _extend(into, *_placed(values, row_of), len(sample), quoted=True)
        self.trees.append(members.tree())
        self._sizes.append(len(sample))
        self._shown.append(members.shown)
        self.paired |= members.paired or self._further.found
        self._rows += len(sample)
        self._left_out.update(members.left_out)
        self._warnings += members.warnings

    def scan(self, splits: Sequence[str], classes: tuple[str, ...] | None = None) -> Scan:
        """All samples, once; `splits`: which each archive is ("": none), `classes`: the whole class map, where it was given.  Raises SourceError."""
        self._given = classes
        if not self._rows:
            if self._wishes.image is not None and self._further.names:
                has = ", ".join(map(show, sorted(self._further.names)[:20]))
                raise OptionError(
                    f"--image-column {show(self._wishes.image)}: samples have no such image (they have {has})", options=["image-column"]
                )
            named = _some(self._shown)
            raise SourceError(f"no images in {named}: {_listed(self._left_out) or 'there is no file in it'}", path=named)
        numbers = np.repeat(np.arange(len(splits)), self._sizes)
        self.trees.clear()
        settled = self._further.settle(".cls" if self._wishes.label != NO_LABEL else None)
        self._several = settled.several
        if self._wishes.columns and settled.unnamed:
            self._warnings.append(not_named(settled.unnamed))
        keys, stat = settled.keys, settled.stat
        for cells in (*self._records.values(), *self._lists.values()):
            _extend(cells, np.empty(0, np.int64), [], self._rows - len(cells))

        def where(row: int) -> str:
            return show(as_text(keys[row]))

        fields: list[Field] = []
        arrays: list[npt.NDArray[np.generic]] = []
        names, labels, label = self._label(where)
        if labels is not None:
            fields.append(LABEL)
            arrays.append(labels)
        lists = {name: cells.keys() for name, cells in self._lists.items() if self._wishes.columns is None or name in self._wishes.columns}
        asked = [name for name in self._records if name in self._options and name not in self._nested and name != label]
        lists |= {name: self._records.pop(name).keys() for name in asked}
        refuse_strange(self._options, ["image", LABEL.name, *(name for name, _ in settled.parts), *settled.arrays, *settled.texts, *lists])
        several, none, warnings = member_fields(settled, lists, self._options, self._wishes.columns or (), self._read, where)
        self._warnings += warnings
        self._nested = (self._nested - lists.keys()) | {name for name in none if name in self._nested}
        for name in lists.keys() - set(none):
            self._records.pop(name, None)
        fields += [spec for spec, _ in several.fields]
        arrays += [values for _, values in several.fields]
        settled_names = {*settled.columns, *lists.keys() - set(none)}
        wished = None if self._wishes.columns is None else [name for name in self._wishes.columns if name not in settled_names]
        counts = self._values([name for name in self._records if name != label], wished, label, where, fields, arrays)
        if len(fields) >= LIST_LIMIT:  # the image is one, too
            raise OptionError(
                f"{len(fields):,} fields beside the image, at most {LIST_LIMIT - 1} are possible: choose with --columns", options=["columns"]
            )
        values = np.zeros(len(keys), row_dtype(tuple(fields)))
        for f, column in zip(fields, arrays, strict=True):
            values[f.name] = column
        order, ranges = self._in_splits(splits, numbers)
        faults = several.faults
        if ranges:
            faults = {at: faults[row] for at, row in enumerate(order.tolist()) if row in faults}
            keys, values, stat = keys.take(order), values[order], stat[order]
            if labels is not None:
                self._warnings += lacking(names or (), values[LABEL.name], ranges)
        self._tell()
        left_out = dict(sorted(self._left_out.items()))
        return Scan(
            keys,
            tuple(fields),
            values,
            stat,
            names,
            left_out,
            tuple(self._warnings),
            counts | several.counts,
            ranges,
            None,
            settled.parts,
            tuple(several.forms),
            faults,
        )

    def _in_splits(self, splits: Sequence[str], numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[Split, ...]]:
        """(rows in the order of their splits, the splits) by the number of each row's archive; no splits where all are one called "all"."""
        if set(splits) == {"all"}:
            return numbers, ()
        names = sorted({split for split in splits if split}, key=rank)
        of_archive = np.array([names.index(split) if split else len(names) for split in splits], np.int64)
        of_row = of_archive[numbers]
        stops = np.cumsum(np.bincount(of_row, minlength=len(names) + 1)).tolist()
        ranges = tuple(Split(name, start, stop) for name, start, stop in zip(names, [0, *stops], stops, strict=False))
        if empty := next((split for split in ranges if split.start == split.stop), None):
            raise SourceError(f"no images in split {show(empty.name)}")
        if outside := len(numbers) - stops[-2]:
            self._left_out["in no split"] += outside
            self._warnings.append(f"left out, as in archives that are in no split: {counted(outside, 'images')}")
        return np.argsort(of_row, kind="stable")[: stops[-2]], ranges

    def _may_be_text(self, name: str) -> bool:
        """Is this value wanted also where it is text: as a label, or as categories?"""
        if name in self._options or name in (self._wishes.columns or ()):
            return True
        return name == self._wishes.label or (self._wishes.label is None and named_alike([name], LABEL_NAMES) is not None)

    def _label(self, where: Callable[[int], str]) -> tuple[tuple[str, ...] | None, npt.NDArray[np.int64] | None, str | None]:
        """(class names, numbers (N,), the record's value that they are): from `.cls`, or else a value in `.json` that is called so."""
        wish, flat = self._wishes.label, [name for name in self._records if name not in self._nested]
        has_cls = self._no_class.count < self._rows
        name = None
        if wish == NO_LABEL:
            return None, None, None
        if wish is not None and not (wish == "cls" and has_cls):
            name = find_column(wish, flat, "label-column", "the .json of these samples")
        elif not has_cls and (name := named_alike(flat, LABEL_NAMES)) is None:
            return None, None, None
        cells = self._classes if name is None else self._records[name]
        column = typed(cells, where, names=True)
        source = ".cls" if name is None else f".json value {show(name)}"
        if cells.stray is not None:
            self._warnings.append(f"{source}: {told(cells.stray, where)}, so that all of them are names of classes, in their order as text")
        made = None if isinstance(column, str) else self._numbered(column, source, where)
        if made is None:
            why = column if isinstance(column, str) else "numbers that are no whole ones, or times"
            if name is None:
                raise SourceError(f".cls members hold {why}: expected the number or name of a class")
            if wish is not None:
                raise OptionError(f"--label-column {show(name)}: it holds {why}", options=["label-column"])
            self._warnings.append(f"{source} is no label: it holds {why}")
            return None, None, name
        classes, labels = made
        if gaps := int((labels < 0).sum()):
            which = ("" if name is not None else str(self._no_class)) or where(int((labels < 0).argmax()))
            self._warnings.append(f"{gaps:,} sample{'s have' if gaps > 1 else ' has'} no {source}: label -1 ({which})")
        return classes, labels, name

    def _numbered(self, column: Column, source: str, where: Callable[[int], str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]] | None:
        if self._given is None or column.names is None:
            found = as_label(column, self._given)
            if found is None and self._given is not None:
                raise SourceError(f"{source}: expected numbers below {len(self._given):,}, as --classes-from names so many classes")
            return None if found is None else (found[1], found[0])
        number = {name: i for i, name in enumerate(self._given)}
        if unknown := [name for name in column.names if name not in number]:
            row = int((column.values == column.names.index(unknown[0])).argmax())
            raise SourceError(f"{source} {show(unknown[0])} ({where(row)}) is not among the {len(number):,} names of --classes-from")
        place = np.array([*(number[name] for name in column.names), -1], np.int64)
        return self._given, place[column.values.astype(np.int64)]

    def _values(
        self,
        names: Sequence[str],
        wished: Sequence[str] | None,
        label: str | None,
        where: Callable[[int], str],
        fields: list[Field],
        arrays: list[npt.NDArray[np.generic]],
    ) -> dict[str, int]:
        """Add the fields that values in records become: those that are `wished`, None: all that can be."""
        if wished is not None:
            names = [find_column(name, names, "columns", "the .json of these samples") for name in wished]
        texts = [name for name in names if self._records[name].is_text and name not in self._nested] if wished is None else []
        names = [name for name in names if name not in texts and (name not in self._nested or wished is not None)]
        taken = label if label is not None else ".cls" if fields else None
        columns = (
            (name, called, "values of several parts" if name in self._nested else typed(self._records[name], where))
            for name, called in field_names(names, taken).items()
        )
        more, values, warnings = as_fields(columns, where, ".json value", None if wished is None else "the .json of these samples")
        fields += more
        arrays += values
        self._warnings += warnings
        counts = {}
        for name in texts:
            if stray := self._records[name].stray:
                self._warnings.append(f".json value {show(name)} is left out: {told(stray, where)}: mend it")
        if texts:
            counts[f"values of text in .json left out ({_some(texts)}); --columns takes them as categories"] = len(texts)
        if self._nested and wished is None:
            counts[f"values of several parts in .json left out ({_some(sorted(self._nested))})"] = len(self._nested)
        return counts

    def _tell(self) -> None:
        if self._no_image.count:
            self._left_out["sample without an image"] += self._no_image.count
            self._warnings.append(f"samples without an image are left out: {self._no_image.count:,}, as {self._no_image}")
        if self._several:
            self._left_out["further image of a sample"] += self._several
            self._warnings.append(
                f"{counted(self._several, 'images')} beside another of the same sample and name left out: of each the one is taken whose "
                "name is the first as text; --image-column says which it is (as jpg, or what else follows the first dot)"
            )
        if self._plain:
            self._left_out["no extension"] += self._plain


def _placed(values: Values, row_of: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """(rows, cells) of values whose samples have an image."""
    rows = row_of[np.frombuffer(values.samples, np.int64)]
    has = rows >= 0
    return rows[has], values.cells if has.all() else [values.cells[i] for i in np.flatnonzero(has).tolist()]


def _extend(cells: Cells, rows: npt.NDArray[np.int64], texts: list[str], count: int, *, quoted: bool = False, mixed: bool = False) -> None:
    """`count` more cells, those at `rows` (M,) with these texts, the others empty."""
    order = np.argsort(rows, kind="stable")
    ranks = rows[order]
    for at in range(0, count, _CHUNK):
        part = [""] * min(_CHUNK, count - at)
        first, stop = np.searchsorted(ranks, (at, at + len(part))).tolist()
        for i, row in zip(order[first:stop].tolist(), ranks[first:stop].tolist(), strict=True):
            part[row - at] = texts[i]
        cells.extend(part, quoted=quoted, mixed=mixed)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(show, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")


def _listed(left_out: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items(), key=lambda item: (-item[1], item[0]))[:5])
