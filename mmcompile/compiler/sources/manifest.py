"""A list of images as a source: a table with a row for each image, which says where the image lies, and what is known of it.

Rows stand as the list has them, split by split.  Paths are relative to the list (or to `images`), and never lead out of that folder.  All that is
wrong with rows is found before anything is decoded, and named by file and row; row 1 is the first below the names of the columns.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.compiler.sources import LABEL, Scan
from mmcompile.compiler.sources.columns import (
    IMAGE_NAMES,
    LABEL_NAMES,
    SPLIT_NAMES,
    as_label,
    as_splits,
    as_value,
    field_names,
    find_column,
    named_alike,
)
from mmcompile.compiler.sources.delimited import JSON_SUFFIXES, TEXT_SUFFIXES, TextTable
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.listed import Faults, find_files, refuse_twice, relative_keys
from mmcompile.compiler.sources.names import Patterns, show
from mmcompile.compiler.sources.textcolumns import TextColumns
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.index import Field, Split, row_dtype

__all__ = ["ManifestSource", "Wishes", "is_manifest"]

#: A list of this name says something of the images beside it (Hugging Face's ImageFolder).
_METADATA = ("metadata.csv", "metadata.jsonl")
#: Rows that are held against the disk to find which column names images, and folders in which they may lie.
_LOOKED_AT, _FOLDERS = 20, 64
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})


@dataclass(frozen=True)
class Wishes:
    """Which columns of a list are what, where that cannot be told from it; None: by their names, and by what is in them.

    `columns`: the other ones that become fields, None: all of numbers, of yes and no, and of times.
    """

    image: str | None = None
    label: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Part:
    """One list: the file, the folder that its paths are relative to (below the root, or ""), and the split that it is, or ""."""

    file: str
    base: str = ""
    split: str = ""


@dataclass(frozen=True)
class ManifestSource:
    """The images that the list `raw` names: a file, or a folder with a metadata file in it or in the folders in it.

    Paths are relative to the list's folder, or to a folder in it where the first of them are found, or to `images`.  `include` and `exclude` are
    patterns on keys, as for a FolderSource.
    """

    raw: str
    wishes: Wishes = Wishes()
    images: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    parallel: ClassVar[int] = FolderSource.parallel
    _files: FolderSource = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", os.path.abspath(self.raw))
        beside = self.raw if os.path.isdir(self.raw) else os.path.dirname(self.raw)
        object.__setattr__(self, "_files", FolderSource(beside if self.images is None else self.images))

    @property
    def root(self) -> str:
        """The folder that keys are relative to."""
        return self._files.root

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        wishes = self.wishes
        return {
            "kind": "manifest",
            "image_column": None if wishes.image is None else name_to_json(wishes.image),
            "label_column": None if wishes.label is None else name_to_json(wishes.label),
            "columns": None if wishes.columns is None else name_to_json(_typed(wishes.columns)),
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
        }

    def location(self) -> str:
        """Device and inode of the root.  Raises SourceError where it is missing or no folder."""
        return self._files.location()

    def read(self, key: bytes) -> bytes:
        """As a FolderSource."""
        return self._files.read(key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """As a FolderSource."""
        return self._files.stat(key)

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in the order of their rows; `progress` gets the number of images found so far.

        Raises SourceError: the list is no table, or rows of it name no image, an image twice, or one outside the folder (all of them counted, the
        first named); OptionError: a column that is not there, or two that would be one field.
        """
        self.location()
        parts = _parts(self.raw)
        tables = [TextTable(part.file) for part in parts]
        return _Scanning(self, parts, tables).scan(progress)


def _parts(raw: str) -> list[_Part]:
    """The lists of RAW.  Raises SourceError where there is none, or where two say something of one folder."""
    if not os.path.isdir(raw):
        return [_Part(raw)]
    if here := _metadata(raw):
        return [_Part(here)]
    below = [(name, file) for name in sorted({*_SPLITS, *map(str.capitalize, _SPLITS)}) if (file := _metadata(os.path.join(raw, name)))]
    if not below:
        raise SourceError(f"{show(raw)}: expected metadata.csv or metadata.jsonl in it, or in its folders train, test, …", path=raw)
    return [_Part(file, name, name) for name, file in below]


def _metadata(folder: str) -> str:
    found = [name for name in _METADATA if os.path.isfile(os.path.join(folder, name))]
    if len(found) > 1:
        raise SourceError(f"{show(folder)} holds {' and '.join(found)}: give one of them as RAW", path=folder)
    return os.path.join(folder, found[0]) if found else ""


def _typed(columns: tuple[str, ...]) -> str:
    """Names of columns as one would type them; a comma alone for none."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(columns)
    return text.getvalue() or ","


def is_manifest(raw: str) -> bool:
    """Is this a list of images, or a folder that holds one?  Reads the first rows of a table."""
    if os.path.isdir(raw):
        try:
            return bool(_parts(raw))
        except SourceError as error:
            return "give one of them" in str(error)
    if not raw.lower().endswith(TEXT_SUFFIXES + JSON_SUFFIXES) or not os.path.isfile(raw):
        return False
    table = TextTable(raw)
    folder = os.path.dirname(os.path.abspath(raw))
    return any(_found(cells, folder) or _has_extensions(cells) for cells in _columns(table).values())


def _columns(table: TextTable) -> dict[str, list[str]]:
    """Cells of the first rows, by column."""
    rows = table.first()[:_LOOKED_AT]
    return {name: [row[name] for row in rows if row.get(name)] for name in table.names}


def _found(cells: list[str], folder: str) -> int:
    return sum(len(cell) < 4096 and "\0" not in cell and os.path.isfile(os.path.join(folder, cell)) for cell in cells)


def _has_extensions(cells: list[str]) -> bool:
    return 2 * sum(os.path.splitext(cell)[1].lower() in EXTENSIONS for cell in cells) > len(cells)


class _Scanning:
    """One pass over the lists of a source."""

    def __init__(self, source: ManifestSource, parts: list[_Part], tables: Sequence[TextTable]) -> None:
        self._source, self._parts, self._tables = source, parts, tables
        self._shown = [os.path.relpath(part.file, os.path.commonpath([source.raw, os.path.dirname(part.file)])) for part in parts]
        self._names = tuple(dict.fromkeys(name for table in tables for name in table.names))
        self._what = show(source.raw)
        self._stops: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts: Counter[str] = Counter()
        self._warnings: list[str] = []
        self._left_out: Counter[str] = Counter()

    def where(self, row: int) -> str:
        """A row, as a person finds it."""
        part = int(np.searchsorted(self._stops, row, side="right"))
        start = int(self._stops[part - 1]) if part else 0
        return f"{show(self._shown[part])} row {row - start + 1}" if len(self._parts) > 1 else f"row {row + 1}"

    def scan(self, progress: Callable[[int], None] | None) -> Scan:
        wishes = self._source.wishes
        image, bases = self._image_column()
        label = self._label_column(image)
        split = None if any(part.split for part in self._parts) else named_alike(self._names, SPLIT_NAMES)
        chosen = None if wishes.columns is None else [find_column(name, self._names, "columns", self._what) for name in wishes.columns]
        split = None if split in (label, *(chosen or ())) else split
        texts = {image, *(name for name in (label, split) if name), *(chosen or ())}
        columns = TextColumns(self._tables, texts, numbers=chosen is None)
        self._stops = np.array(columns.stops)
        n = columns.stops[-1]
        if not n:
            raise SourceError(f"{self._what}: no row in it, expected one for each image", path=self._source.raw)
        faults = Faults(self.where, self._what)
        if image in columns.nested:
            raise SourceError(f"{self._what}: column {show(image)} holds no paths, but values of several parts", path=self._source.raw)
        keys = self._keys(columns.paths(image), bases, faults)
        rows = faults.rows = self._chosen(keys)
        keys = keys.take(rows)
        if warning := refuse_twice(keys, faults):
            self._warnings.append(warning)
        stat, beside = find_files(self._source.root, keys, faults, progress)
        faults.raise_any()
        if beside:
            self._left_out["in no row"] += beside
        numbers, splits = self._splits(columns, split, n)
        classes, labels = self._label(columns, label)
        rest = [name for name in columns.names if chosen is None] if chosen is None else chosen
        fields, arrays = self._values(columns, [name for name in rest if name not in (image, label, split)], label, strict=chosen is not None)
        if labels is not None:
            fields, arrays = [LABEL, *fields], [labels, *arrays]
        self._tell(columns, image)
        made = tuple[Split, ...]()
        if splits is not None:
            order, made = as_splits(splits, numbers[rows])
            keys, stat, rows = keys.take(order), stat[order], rows[order]
        values: npt.NDArray[np.void] = np.zeros(len(rows), row_dtype(tuple(fields)))
        for spec, array in zip(fields, arrays, strict=True):
            values[spec.name] = array[rows]
        return Scan(keys, tuple(fields), values, stat, classes, dict(self._left_out), tuple(self._warnings), dict(self._counts), made)

    # ------------------------------------------------------------------ which column is what

    def _image_column(self) -> tuple[str, list[str]]:
        """(the column that names images, the folder that the paths of each list are relative to, below the root)."""
        wish, names = self._source.wishes.image, self._names
        cells = [_columns(table) for table in self._tables]
        if wish is not None:
            candidates = [find_column(wish, names, "image-column", self._what)]
        else:
            likely = [name for word in IMAGE_NAMES if (name := named_alike(names, (word,)))]
            candidates = [*likely, *(name for name in names if name not in likely and any(_has_extensions(c.get(name, [])) for c in cells))]
        if not candidates:
            raise OptionError(
                f"{self._what}: none of its columns ({', '.join(map(show, names[:20]))}) names images: say which does with --image-column",
                options=["image-column"],
            )
        found = [(name, [self._base(part, c.get(name, [])) for part, c in zip(self._parts, cells, strict=True)]) for name in candidates]
        name, bases = next((f for f in found if any(hits for _, hits in f[1])), found[0])
        return name, [base for base, _ in bases]

    def _base(self, part: _Part, cells: list[str]) -> tuple[str, int]:
        """(the folder below the root in which most of these paths are found, how many are)."""
        root = self._source.root
        here = os.path.join(root, part.base)
        hits = _found(cells, here)
        if hits or self._source.images is not None:
            return part.base, hits
        below = sorted(entry.name for entry in os.scandir(here) if entry.is_dir() and not entry.name.startswith("."))[:_FOLDERS]
        best = max(((_found(cells, os.path.join(here, name)), name) for name in reversed(below)), key=lambda f: f[0], default=(0, ""))
        return (os.path.join(part.base, best[1]), best[0]) if best[0] else (part.base, 0)

    def _label_column(self, image: str) -> str | None:
        wish, others = self._source.wishes.label, [name for name in self._names if name != image]
        if wish is not None:
            return find_column(wish, others, "label-column", self._what)
        if not any(table.header for table in self._tables) and others:
            return others[0]
        return named_alike(others, LABEL_NAMES)

    # ------------------------------------------------------------------ what is in them

    def _keys(self, paths: Keys, bases: list[str], faults: Faults) -> Keys:
        prefixes = [os.fsencode(base) for base in bases]
        if len(prefixes) == 1:
            return relative_keys(paths, os.fsencode(self._source.root), faults, lambda _: prefixes[0])
        return relative_keys(
            paths, os.fsencode(self._source.root), faults, lambda row: prefixes[int(np.searchsorted(self._stops, row, side="right"))]
        )

    def _splits(self, columns: TextColumns, split: str | None, n: int) -> tuple[npt.NDArray[np.int64], tuple[str, ...] | None]:
        """The number of each row's split (N,), and their names; None where there are no splits."""
        if split is None:
            if not any(part.split for part in self._parts):
                return np.zeros(n, np.int64), None
            return np.searchsorted(self._stops, np.arange(n), side="right"), tuple(part.split for part in self._parts)
        column = columns.column(split, self.where, text=True)
        if isinstance(column, str):
            raise SourceError(f"{self._what}: column {show(split)}: {column}", path=self._source.raw)
        if column.missing.any():
            raise SourceError(f"{self._what}: {self.where(int(column.missing.argmax()))} is of no split: column {show(split)} is empty there")
        self._counts[f"splits by column {show(split)}"] = len(column.names or ())
        return column.values.astype(np.int64), column.names

    def _label(self, columns: TextColumns, label: str | None) -> tuple[tuple[str, ...] | None, npt.NDArray[np.int64] | None]:
        if label is None:
            return None, None
        column = "values of several parts" if label in columns.nested else columns.column(label, self.where)
        found = None if isinstance(column, str) else as_label(column)
        if found is None or isinstance(column, str):
            why = column if isinstance(column, str) else "numbers that are no whole ones, or times"
            if self._source.wishes.label is not None:
                raise OptionError(f"--label-column {show(label)}: it holds {why}", options=["label-column"])
            self._warnings.append(f"column {show(label)} is no label: it holds {why}; --columns {show(label)} takes it as a value")
            return None, None
        labels, classes, how = found
        self._counts[f"labels by column {show(label)}, {how}"] = int((labels >= 0).sum())
        if gaps := int((labels < 0).sum()):
            self._warnings.append(f"{gaps:,} rows have no label (the first: {self.where(int((labels < 0).argmax()))}): it is -1")
        return classes, labels

    def _values(
        self, columns: TextColumns, names: list[str], label: str | None, *, strict: bool
    ) -> tuple[list[Field], list[npt.NDArray[np.generic]]]:
        """The fields of other columns.  With `strict` one that cannot be a field is an error."""
        fields, arrays = [], []
        called = field_names(names, label)
        for name in names:
            column = "values of several parts" if name in columns.nested else columns.column(name, self.where)
            made = column if isinstance(column, str) else as_value(column, called[name], self.where)
            if isinstance(made, str):
                if strict:
                    raise OptionError(f"--columns {show(name)}: {made}", options=["columns"])
                self._warnings.append(f"column {show(name)} is left out: {made}")
                continue
            fields.append(made[0])
            arrays.append(made[1])
            if made[2]:
                self._warnings.append(made[2])
        return fields, arrays

    def _tell(self, columns: TextColumns, image: str) -> None:
        for table, shown, start, stop in zip(self._tables, self._shown, [0, *columns.stops], columns.stops, strict=False):
            form = f" ({table.form})" if table.form else ""
            self._counts[f"rows of {show(shown)}{form}, images by column {show(image)}"] = stop - start
        if columns.texts:
            named = ", ".join(show(name) for name in columns.texts[:5])
            self._counts[f"columns of text left out ({named}); --columns takes them as categories"] = len(columns.texts)
        if columns.nested:
            self._counts[f"columns of several parts left out ({', '.join(sorted(map(show, columns.nested))[:5])})"] = len(columns.nested)

    def _chosen(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The rows that `include` and `exclude` leave."""
        include, exclude = Patterns(self._source.include), Patterns(self._source.exclude)
        if not include and not exclude:
            return np.arange(len(keys))
        texts = map(as_text, keys)
        kept = np.fromiter((not exclude.match(text) and (not include or include.match(text)) for text in texts), bool, len(keys))
        if out := int((~kept).sum()):
            self._left_out["excluded"] += out
        for option, patterns in (("--include", include), ("--exclude", exclude)):
            self._warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
        return np.flatnonzero(kept)
