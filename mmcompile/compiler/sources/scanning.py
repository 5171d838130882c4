"""Hides how a list of images becomes items: which of its columns is what, where its images lie, and what is wrong with its rows."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources import LABEL, Scan
from mmcompile.compiler.sources.cells import Column, told
from mmcompile.compiler.sources.columns import (
    IMAGE_NAMES,
    LABEL_NAMES,
    NO_LABEL,
    SPLIT_NAMES,
    as_fields,
    as_label,
    as_numbered,
    as_splits,
    field_names,
    find_column,
    named_alike,
)
from mmcompile.compiler.sources.keys import Keys, place_of
from mmcompile.compiler.sources.listed import Faults, find_files, refuse_twice, relative_keys
from mmcompile.compiler.sources.lists import Lists, Part, first_cells, has_extensions
from mmcompile.compiler.sources.names import Patterns, not_named, show
from mmcompile.compiler.sources.packed import IN_A_FILE, list_packed
from mmcompile.compiler.sources.parquet import ArrowColumns, ParquetTable
from mmcompile.compiler.sources.parts import joined_stat
from mmcompile.compiler.sources.roles import Role, roles_of
from mmcompile.compiler.sources.splits import why_no_splits
from mmcompile.compiler.sources.textcolumns import TextColumns
from mmcompile.compiler.sources.valuecolumns import read_columns
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_text
from mmcompile.format.index import Field, Split, row_dtype

__all__ = ["Scanning", "Wishes"]

#: Rows that are held against the disk to find which column names images.
_LOOKED_AT = 20
#: Files of a list that the summary names.
_TOLD = 8


@dataclass(frozen=True)
class Wishes:
    """Which columns of a list are what, where that cannot be told from it; None: by their names, and by what is in them.

    `label`: NO_LABEL for no column.  `columns`: the other ones that become fields, None: all of numbers, of yes and no, and of times, and those that
    are pixels or boxes by their names.  `include` and `exclude` are patterns on keys.  `classes`: the whole class map.  `fields`: what was said of
    single fields, by name.
    """

    image: str | None = None
    label: str | None = None
    columns: tuple[str, ...] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    fields: tuple[tuple[str, FieldOptions], ...] = ()


def _with_names(column: Column, names: tuple[str, ...] | None) -> Column:
    """A column of numbers that a file has names for, as one of these; -1 and what has no name is missing."""
    if names is None or column.values.dtype.kind not in "iu":
        return column
    numbers = column.values.astype(np.int64)
    known = ~column.missing & (numbers >= 0) & (numbers < len(names))
    return Column(column.name, np.where(known, numbers, -1), ~known, names)


class Scanning:
    """One pass over the lists of a source; `fixed`: their paths are relative to the root, and to nothing else."""

    def __init__(self, raw: str, root: str, parts: Sequence[Part], wishes: Wishes, *, fixed: bool) -> None:
        self._root, self._wishes = root, wishes
        self._path, self._what = raw, show(raw)
        self._lists = Lists(raw, root, parts, wishes.image, fixed=fixed)
        self._counts: Counter[str] = Counter()
        self._warnings: list[str] = []
        self._left_out: Counter[str] = Counter()

    def scan(self, progress: Callable[[int], None] | None) -> Scan:
        """See ManifestSource.scan."""
        wishes = self._wishes
        image, bases = (self._lists.holds, []) if self._lists.holds is not None else self._image_column()
        chosen = None if wishes.columns is None else [find_column(name, self._lists.names, "columns", self._what) for name in wishes.columns]
        roles = self._roles(image, chosen)
        pixels = [role for role in roles if role.pixels]
        apart = {image, *(role.column for role in roles)}
        label = self._label_column(apart)
        split = None if any(part.split for part in self._lists.parts) else named_alike(self._lists.names, SPLIT_NAMES)
        split = None if split in (label, *(chosen or ())) else split
        texts = {*(name for name in (label, split) if name), *(chosen or ()), *apart}
        held = [name for name in (image, *(role.column for role in pixels)) if self._lists.is_held(name)]
        lists = [role for role in roles if not role.pixels]
        columns = self._lists.columns(texts, numbers=chosen is None, held=held, lists=[role.column for role in lists])
        n = columns.stops[-1]
        if not n:
            raise SourceError(f"{self._what}: no row in it, expected one for each image", path=self._path)
        faults = Faults(self._lists.where, self._what)
        keys, stat, rows = self._images(columns, image, bases, pixels, faults, progress)
        faults.raise_any()
        numbers, splits = self._splits(columns, split, n)
        classes, labels = self._label(columns, label)
        rest = columns.names if chosen is None else chosen
        fields, arrays = self._values(columns, [name for name in rest if name not in {label, split, *apart}], label, strict=chosen is not None)
        if labels is not None:
            fields, arrays = [LABEL, *fields], [labels, *arrays]
        several = read_columns(columns, lists, rows, self._lists.known, self._lists.where)
        self._counts |= several.counts
        fields, arrays = [*fields, *(spec for spec, _ in several.fields)], [array[rows] for array in arrays]
        self._refuse_alike([*(role.field for role in pixels), *(spec.name for spec in fields)])
        self._tell(columns, image)
        made, order = tuple[Split, ...](), np.arange(len(rows))
        if splits is not None:
            order, made = as_splits(splits, numbers[rows])
            keys, stat, rows = keys.take(order), stat[order], rows[order]
        values: npt.NDArray[np.void] = np.zeros(len(rows), row_dtype(tuple(fields)))
        for spec, array in zip(fields, [*arrays, *(array for _, array in several.fields)], strict=True):
            values[spec.name] = array[order]
        faults_at = {at: why for at, row in enumerate(rows.tolist()) if (why := several.faults.get(row))} if several.faults else {}
        parts = (("image", "image"), *((role.field, role.kind) for role in pixels))
        told = dict(self._left_out), tuple(self._warnings), dict(self._counts)
        return Scan(keys, tuple(fields), values, stat, classes, *told, made, parts=parts, forms=tuple(several.forms), faults=faults_at)

    def _images(
        self,
        columns: TextColumns | ArrowColumns,
        image: str,
        bases: list[str],
        pixels: list[Role],
        faults: Faults,
        progress: Callable[[int], None] | None,
    ) -> tuple[Keys, npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """(keys (M,), STAT_DTYPE (M,), rows (M,)) of the rows that `include` and `exclude` leave; `pixels` are the columns beside the main one."""
        held: npt.NDArray[np.void] | None = None
        if self._lists.holds is not None:
            keys, held, empty = list_packed(self._root, cast(Sequence[ParquetTable], self._lists.tables), progress)
            if empty:
                self._warnings.append(f"rows that hold no image, and are rejects: {empty:,}{self._elsewhere(keys, held)}")
        elif image in columns.nested:
            raise SourceError(f"{self._what}: column {show(image)} holds no paths, but values of several parts", path=self._path)
        else:
            keys = self._keys(columns.paths(image), bases, faults)
        rows = faults.rows = self._chosen(keys)
        keys = keys.take(rows)
        if warning := refuse_twice(keys, faults):
            self._warnings.append(warning)
        parts, stats = [keys], [None if held is None else held[rows]]
        faults.columns = [role.column for role in pixels]
        for number, role in enumerate(pixels, 1):
            if self._lists.is_held(role.column):
                part, stat = self._packed(role.column)
                parts.append(part.take(rows))
                stats.append(stat[rows])
            else:
                parts.append(self._part(columns, role.column, faults, number * len(rows)))
                stats.append(None)
        if any(stat is None for stat in stats):
            nothing = Keys.of([b""] * len(rows))
            named = [part.bare if stat is None else nothing for part, stat in zip(parts, stats, strict=True)]
            found, beside = find_files(self._root, Keys.join(named), faults, progress)
            stats = [found[i * len(rows) :][: len(rows)] if stat is None else stat for i, stat in enumerate(stats)]
            if beside:
                self._left_out["in no row"] += beside
        return keys.with_beside(parts[1:]), joined_stat([stat for stat in stats if stat is not None]), rows

    def _packed(self, column: str) -> tuple[Keys, npt.NDArray[np.void]]:
        """(keys with places (N,), STAT_DTYPE (N,)) of the images in a column beside the main one."""
        tables = [ParquetTable(part.file, column) for part in self._lists.parts]
        if other := next((table for table in tables if table.holds is None), None):
            raise SourceError(f"{show(other.path)}: column {show(column)} holds images in some files, but not in all", path=other.path)
        keys, stat, empty = list_packed(self._root, tables, column=column)
        if empty:
            self._warnings.append(f"rows without an image in column {show(column)}, which are rejects: {empty:,}")
        return keys, stat

    def _part(self, columns: TextColumns | ArrowColumns, column: str, faults: Faults, first: int) -> Keys:
        """The keys (M,) of the files that a column beside the main one names in the rows of `faults`, where its places begin at `first`."""
        if column in columns.nested:
            raise SourceError(f"{self._what}: column {show(column)} holds no paths, but values of several parts", path=self._path)
        rows = np.arange(self._lists.stops[-1]) if faults.rows is None else faults.rows
        bases = [os.fsencode(self._lists.base(part, cells)[0]) for part, cells in zip(self._lists.parts, self._lists.cells(column), strict=True)]
        parts = np.searchsorted(self._lists.stops, rows, side="right").tolist()
        return relative_keys(columns.paths(column).take(rows), os.fsencode(self._root), faults, lambda at: bases[parts[at - first]], first)

    def _elsewhere(self, keys: Keys, stat: npt.NDArray[np.void]) -> str:
        """What to say of the first row without bytes that has a path; "" where none of the first of them has."""
        for row in np.flatnonzero(stat["size"] == 0)[:_LOOKED_AT].tolist():
            part, at = self._lists.at(row)
            if place_of(keys[row]) != IN_A_FILE and not keys[row].endswith(f"#{at}".encode()):
                named = f"{self._lists.where(row)} has a path, {show(as_text(keys[row]))}"
                return f" ({named}, which is no file beside {show(self._lists.shown[part])})"
        return ""

    # ------------------------------------------------------------------ which column is what

    def _roles(self, image: str, chosen: list[str] | None) -> list[Role]:
        """What further columns are more than numbers, or texts."""
        left = [name for name in self._lists.names if name != image]
        likely = [name for name in left if name != self._wishes.label]
        guessed = [name for name in likely if chosen is None or name in chosen]
        looks = {name: functools.partial(self._lists.seen, name) for name in left}
        roles = roles_of(looks, dict(self._wishes.fields), guessed, ("image", LABEL.name), self._what)
        taken = {role.column for role in roles}
        if chosen and (gone := [f"{show(r.column)} ({r.kind})" for r in roles_of(looks, {}, likely, (), self._what) if r.column not in taken]):
            self._warnings.append(not_named(gone))
        return roles

    def _image_column(self) -> tuple[str, list[str]]:
        """(the column that names images, the folder that the paths of each list are relative to, below the root)."""
        wish, names = self._wishes.image, self._lists.names
        cells = [first_cells(table) for table in self._lists.tables]
        if wish is not None:
            candidates = [find_column(wish, names, "image-column", self._what)]
        else:
            likely = [name for word in IMAGE_NAMES if (name := named_alike(names, (word,)))]
            candidates = [*likely, *(name for name in names if name not in likely and any(has_extensions(c.get(name, [])) for c in cells))]
        if not candidates:
            raise OptionError(
                f"{self._what}: none of its columns ({', '.join(map(show, names[:20]))}) names images: say which does with --image-column",
                options=["image-column"],
            )
        found = [(name, [self._lists.base(part, c.get(name, [])) for part, c in zip(self._lists.parts, cells, strict=True)]) for name in candidates]
        there = next((f for f in found if any(hits for _, hits in f[1])), None)
        there = there or next((f for f in found if any(has_extensions(c.get(f[0], [])) for c in cells)), None)
        name, bases = there or found[0]
        if there is None and wish is None and (cell := next((c[name][0] for c in cells if c.get(name)), None)):
            raise SourceError(
                f"{self._what}: column {show(name)}: expected paths of images, found {cell!r:.80}, which is no file beside it: say with --images"
                " where they are, or with --image-column which column names them; if this is a table of numbers: --source table",
                path=self._path,
            )
        return name, [base for base, _ in bases]

    def _label_column(self, taken: set[str]) -> str | None:
        wish, others = self._wishes.label, [name for name in self._lists.names if name not in taken]
        if wish == NO_LABEL:
            return None
        if wish is not None:
            return find_column(wish, others, "label-column", self._what)
        if not any(table.header for table in self._lists.tables) and others:
            return others[0]
        known = [name for name in others if name in self._lists.known]
        return named_alike(others, LABEL_NAMES) or (known[0] if len(known) == 1 else None)

    # ------------------------------------------------------------------ what is in them

    def _keys(self, paths: Keys, bases: list[str], faults: Faults) -> Keys:
        prefixes = [os.fsencode(base) for base in bases]
        if len(prefixes) == 1:
            return relative_keys(paths, os.fsencode(self._root), faults, lambda _: prefixes[0])
        return relative_keys(paths, os.fsencode(self._root), faults, lambda row: prefixes[int(np.searchsorted(self._lists.stops, row, side="right"))])

    def _splits(self, columns: TextColumns | ArrowColumns, split: str | None, n: int) -> tuple[npt.NDArray[np.int64], tuple[str, ...] | None]:
        """The number of each row's split (N,), and their names; None where there are no splits."""
        if split is None:
            if not any(part.split for part in self._lists.parts):
                return np.zeros(n, np.int64), None
            names = tuple(dict.fromkeys(part.split for part in self._lists.parts))
            if why := why_no_splits(names):
                raise SourceError(f"{self._what}: {why}; --split NAME=LIST gives a list another", path=self._path)
            numbers = np.array([names.index(part.split) for part in self._lists.parts])
            return numbers[np.searchsorted(self._lists.stops, np.arange(n), side="right")], names
        column = columns.column(split, self._lists.where, text=True)
        if isinstance(column, str):
            raise SourceError(f"{self._what}: column {show(split)}: {column}", path=self._path)
        plain = [name.strip() for name in column.names or ()]
        names = tuple(sorted(set(plain) - {""}))
        numbers = np.array([*(names.index(name) if name else -1 for name in plain), -1], np.int64)[column.values.astype(np.int64)]
        if len(gaps := np.flatnonzero(numbers < 0)):
            raise SourceError(f"{self._what}: {self._lists.where(int(gaps[0]))} is of no split: column {show(split)} is empty there")
        if why := why_no_splits(names):
            row = next((f"{self._lists.where(int(np.argmax(numbers == i)))}, " for i, name in enumerate(names) if why_no_splits([name])), "")
            raise SourceError(f"{self._what}: {row}column {show(split)}: {why}", path=self._path)
        self._counts[f"splits by column {show(split)}"] = len(names)
        folded = [name.casefold() for name in names]
        if alike := [i for i, name in enumerate(folded) if folded.index(name) < i]:
            first = names[folded.index(folded[alike[0]])]
            self._warnings.append(f"splits {show(first)} and {show(names[alike[0]])} differ in case only, and are two")
        return numbers, names

    def _label(self, columns: TextColumns | ArrowColumns, label: str | None) -> tuple[tuple[str, ...] | None, npt.NDArray[np.int64] | None]:
        if label is None:
            return None, None
        stray = None if label in columns.nested else columns.stray(label)
        column = "values of several parts" if label in columns.nested else columns.column(label, self._lists.where, names=True)
        known, fixed = self._lists.known.get(label), self._wishes.classes
        found = None if isinstance(column, str) else as_label(column, known or fixed)
        if found is None or isinstance(column, str):
            why = column if isinstance(column, str) else "numbers that stand for no class, or times"
            if self._wishes.label is not None:
                raise OptionError(f"--label-column {show(label)}: it holds {why}", options=["label-column"])
            self._warnings.append(f"column {show(label)} is no label: it holds {why}; --columns {show(label)} takes it as a value")
            return None, None
        labels, classes, how = found
        if fixed is not None and classes != fixed:
            labels, classes = as_numbered(labels, classes, fixed, self._lists.where), fixed
        self._counts[f"labels by column {show(label)}, {how}"] = int((labels >= 0).sum())
        if stray is not None:
            self._warnings.append(
                f"column {show(label)}: {told(stray, self._lists.where)}, so that all of them are names of classes, in their order as text"
            )
        plain = [" ".join(name.casefold().split()) for name in classes]
        if alike := next((i for i, name in enumerate(plain) if plain.index(name) < i), None) if len(set(plain)) < len(plain) else None:
            self._warnings.append(f"classes {classes[plain.index(plain[alike])]!r} and {classes[alike]!r} differ in case or spaces only")
        if gaps := int((labels < 0).sum()):
            self._warnings.append(f"rows without a label, which is -1 there: {gaps:,} (the first: {self._lists.where(int((labels < 0).argmax()))})")
        return classes, labels

    def _values(
        self, columns: TextColumns | ArrowColumns, names: list[str], label: str | None, *, strict: bool
    ) -> tuple[list[Field], list[npt.NDArray[np.generic]]]:
        """The fields of other columns.  With `strict` one that cannot be a field is an error."""
        called = field_names(names, label)
        fields, arrays, warnings = as_fields(
            ((name, called[name], self._column(columns, name)) for name in names), self._lists.where, "column", self._what if strict else None
        )
        self._warnings += warnings
        return fields, arrays

    def _refuse_alike(self, names: list[str]) -> None:
        """Raises OptionError where two columns became fields of one name."""
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise OptionError(f"{self._what}: two columns would be the field {twice}: rename one, or choose with --columns", options=["columns"])

    def _column(self, columns: TextColumns | ArrowColumns, name: str) -> Column | str:
        """A column with the names that its numbers stand for, or why it cannot be held."""
        found = "values of several parts" if name in columns.nested else columns.column(name, self._lists.where)
        return found if isinstance(found, str) else _with_names(found, self._lists.known.get(name))

    def _tell(self, columns: TextColumns | ArrowColumns, image: str) -> None:
        stops = columns.stops
        forms = [table.form for table in [*self._lists.tables]]
        for form, shown, rows in list(zip(forms, self._lists.shown, np.diff(stops, prepend=0).tolist(), strict=True))[:_TOLD]:
            self._counts[f"rows of {show(shown)}{f' ({form})' * bool(form)}, images by column {show(image)}"] = rows
        if len(forms) > _TOLD:
            self._counts[f"rows of {len(forms) - _TOLD:,} other files"] = stops[-1] - stops[_TOLD - 1]
        for name in columns.texts:
            if stray := columns.stray(name):
                self._warnings.append(f"column {show(name)} is left out: {told(stray, self._lists.where)}: mend it")
        paths = [name for name in columns.texts if self._lists.seen(name).images]
        texts = [name for name in columns.texts if name not in paths]
        for what, names, remedy in (
            ("text", texts, "--columns takes such as categories, --field NAME:kind=text as they are"),
            ("paths of images", paths, "--field NAME:kind=image (or mask) takes such"),
        ):
            if names:
                self._counts[f"columns of {what} left out ({', '.join(map(show, names[:5]))}); {remedy}"] = len(names)
        if columns.nested:
            named = ", ".join(sorted(map(show, columns.nested))[:5])
            self._counts[f"columns of several parts left out ({named}); --field takes such as boxes, lists, …"] = len(columns.nested)

    def _chosen(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The rows that `include` and `exclude` leave."""
        include, exclude = Patterns(self._wishes.include), Patterns(self._wishes.exclude)
        if not include and not exclude:
            return np.arange(len(keys))
        texts = map(as_text, keys)
        kept = np.fromiter((not exclude.match(text) and (not include or include.match(text)) for text in texts), bool, len(keys))
        if out := int((~kept).sum()):
            self._left_out["excluded"] += out
        for option, patterns in (("--include", include), ("--exclude", exclude)):
            self._warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
        return np.flatnonzero(kept)
