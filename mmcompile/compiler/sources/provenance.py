"""Hides how the rows of a dataset are read as items of another: provenance and values shard by shard, with the numbers of the new class map.

Each file is held against its hash before it is believed.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.recast import Opened
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.sources.columns import find_column
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.manifest import typed_columns
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.splits import Layout, rank
from mmcompile.compiler.sources.where import Column, Flags
from mmcompile.errors import CorruptShardError, OptionError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.index import Field, Names, load_classes, load_names, row_dtype
from mmcompile.format.samples import check_stops, pair_hash

__all__ = [
    "Renumbered",
    "ShardRows",
    "columns_of",
    "joined_fields",
    "joined_splits",
    "kept_identity",
    "plain_columns",
    "shards_of",
    "split_of",
]

Array = npt.NDArray[Any]

#: Numbers and texts of the provenance that conditions may ask for.
_NUMBERS = ("width", "height", "source_size", "orientation", "depth")
_TEXTS = ("format", "mode")
#: What stands for a name that a fixed class map does not have; -1 is the number of a row without a class.
_MISSING = -2


def shards_of(dataset: Opened, table: Array) -> list[OldShard]:
    """The shards that (part of) a shard table names."""
    kinds = [name for name in table.dtype.names or () if name != "rows"]
    folder = str(Path(dataset.root) / "shards")
    fields, sha256 = dataset.index.fields, dataset.index.sha256
    return [OldShard(folder, fields, {kind: pair_hash(row[kind]) for kind in kinds}, int(row["rows"]), frozenset(), sha256=sha256) for row in table]


def joined_fields(
    datasets: list[Opened], classes: tuple[str, ...] | None, start: int, columns: tuple[str, ...] | None
) -> tuple[tuple[Field, ...], tuple[str, ...] | None]:
    """(fields from number `start` on, class names) of all these datasets together; the names in fields are listed.

    `columns`: those that are kept, and their order, None: all.  Names of classes, and of categories, that differ are joined and sorted as text;
    `classes`: the class map, where it is fixed.  Raises OptionError where fields differ, FormatError.
    """
    first, found = datasets[0], [tuple(_listed(dataset, spec) for spec in _kept(dataset, start, columns)) for dataset in datasets]
    for other, specs in zip(datasets, found, strict=True):
        if (how := _difference(found[0], specs)) is not None:
            raise OptionError(
                f"{first.name} and {other.name} differ in what stands {'beside the images' if start else 'in their rows'}: {how}; only the same "
                f"fields become one{_remedy(found, start)}",
                options=["columns"],
            )
    fields = list(found[0])
    for at, spec in enumerate(fields):
        if spec.categories is not None:
            names = _union([specs[at].categories.listed for specs in found])  # type: ignore[union-attr]
            if len(names) - 1 > np.iinfo(spec.stored).max:
                raise OptionError(f"{first.name}: field {spec.name} has {len(names):,} categories in all, more than {spec.dtype} can number")
            fields[at] = replace(spec, categories=Names(names))
    labelled = columns is None or any(spec.meaning == "class" for spec in fields)
    of_each = [load_classes(Path(dataset.root), dataset.index) if labelled else None for dataset in datasets]
    if classes is not None:
        if not any(spec.meaning == "class" for spec in fields):
            raise OptionError(f"--classes-from: {first.name} has no classes; leave it out", options=["classes-from"])
        return tuple(fields), classes
    bare = next((at for at, names in enumerate(of_each) if (names is None) != (of_each[0] is None)), None)
    if bare is not None:
        raise OptionError(
            f"{first.name} and {datasets[bare].name}: one has names of classes, and the other numbers alone; name these with --classes-from",
            options=["classes-from"],
        )
    return tuple(fields), None if of_each[0] is None else _union([names or () for names in of_each])


def _union(lists: list[tuple[str, ...]]) -> tuple[str, ...]:
    return lists[0] if all(names == lists[0] for names in lists) else tuple(sorted(set().union(*lists)))


def _listed(dataset: Opened, spec: Field) -> Field:
    """A field with its names listed."""

    def listed(names: Names | None) -> Names | None:
        return None if names is None else Names(load_names(Path(dataset.root), names))

    return replace(spec, columns=listed(spec.columns), categories=listed(spec.categories))


def kept_identity(columns: tuple[str, ...] | None) -> dict[str, object]:
    """Which fields were asked for, as canonical JSON values."""
    return {} if columns is None else {"columns": name_to_json(typed_columns(columns))}


def _kept(dataset: Opened, start: int, columns: tuple[str, ...] | None) -> list[Field]:
    """The fields of a dataset from number `start` on, or those of them that are named, and behind these what counts them.  Raises OptionError."""
    fields = {spec.name: spec for spec in dataset.index.fields[start:]}
    if columns is None:
        return list(fields.values())
    images = [spec.name for spec in dataset.index.fields[:start]]
    names = [find_column(name, [*fields], "columns", dataset.name) for name in columns if name not in images]  # images stay in any case
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"--columns: {show(twice)} stands in it twice", options=["columns"])
    if not names and not start:
        raise OptionError("--columns: no field is left", options=["columns"])
    counts = dict.fromkeys(spec.count for spec in (*dataset.index.fields[:start], *(fields[name] for name in names)))
    return [fields[name] for name in (*names, *(count for count in counts if count is not None and count not in names))]


def _bare(spec: Field) -> dict[str, Any]:
    """What has to be the same in fields that become one; categories are joined."""
    return {**replace(spec, categories=None).to_json(), "has categories": spec.categories is not None}


def _difference(one: tuple[Field, ...], other: tuple[Field, ...]) -> str | None:
    """How the fields of two datasets differ, in words; None where they do not."""
    mine, theirs = ({spec.name: _bare(spec) for spec in specs} for specs in (one, other))
    alone = {"first": [n for n in mine if n not in theirs], "second": [n for n in theirs if n not in mine]}
    if any(alone.values()):
        return ", ".join(f"{', '.join(names):.200} in the {which} alone" for which, names in alone.items() if names)
    for name, facts in mine.items():
        for fact in sorted({*facts, *theirs[name]}):
            values = facts.get(fact), theirs[name].get(fact)
            if values[0] != values[1]:
                return f"{fact} of {name} is {values[0]!s:.80} and {values[1]!s:.80}"
    return None if [*mine] == [*theirs] else "they stand in another order"


def _remedy(found: list[tuple[Field, ...]], start: int) -> str:
    """What keeps the fields that all have."""
    common = [spec.name for spec in found[0] if all(any(_bare(spec) == _bare(other) for other in specs) for specs in found)]
    if common:
        return f": keep what all have with --columns {shlex.quote(','.join(common))}, or build one of them anew"
    return ": keep the images alone with --columns ,, or build one of them anew" if start else ": build one of them anew"


class Renumbered:
    """The values beside the images of a dataset, with the numbers that their classes and categories have in `fields` and `classes`."""

    def __init__(self, dataset: Opened, fields: tuple[Field, ...], classes: tuple[str, ...] | None) -> None:
        self._dataset, self._fields = dataset, fields
        self._maps: dict[str, tuple[tuple[str, ...], Array]] = {}
        own = self.classes = load_classes(Path(dataset.root), dataset.index)
        olds = {spec.name: spec for spec in dataset.index.fields}
        for spec, old in ((spec, olds[spec.name]) for spec in fields):
            if spec.meaning == "class" and classes is not None:
                names = classes if own is None else own  # numbers without names are those of the map that was given
                self._maps[spec.name] = names, _numbers(names, classes)
            elif spec.categories is not None and old.categories is not None:
                names = load_names(Path(dataset.root), old.categories)
                self._maps[spec.name] = names, _numbers(names, spec.categories.listed)

    @functools.cached_property
    def dropped(self) -> tuple[Field, ...]:
        """The fields of the dataset, apart from pictures, that are not among those kept: conditions may ask for them; their names are listed."""
        kept = {spec.name for spec in self._fields}
        return tuple(_listed(self._dataset, spec) for spec in self._dataset.index.fields if spec.name not in kept and spec.meaning != "image")

    def read(self, shard: OldShard) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64] | None]:
        """(values (N,), the class numbers that the dataset itself has (N,), or None) of a shard.

        The number of a class that a fixed map does not have is below -1.  Raises FormatError, FileNotFoundError.
        """
        out: npt.NDArray[np.void] = np.zeros(shard.rows, row_dtype(self._fields))
        own: npt.NDArray[np.int64] | None = None
        for spec in self._fields:
            found = shard.read(spec.name, spec.stored, (shard.rows, *spec.shape))
            if spec.meaning == "class":
                own = found.astype(np.int64)
            out[spec.name] = self.of(spec, found, shard.path(spec.name))
        return out, own

    def of(self, spec: Field, found: Array, path: Path) -> Array:
        """The values of a field, from those that the dataset has; FormatError, naming `path`, for a number that has no name."""
        if spec.name not in self._maps:
            return found
        (names, numbers), own = self._maps[spec.name], found.astype(np.int64)
        if len(own) and not -1 <= int(own.min()) <= int(own.max()) < len(names):
            if spec.meaning == "class" and self.classes is None:
                number = int(own.max()) if int(own.max()) >= len(names) else int(own.min())
                raise OptionError(
                    f"--classes-from: {self._dataset.name} has the class number {number:,}, which none of the {len(names):,} names has",
                    options=["classes-from"],
                )
            raise CorruptShardError(f"{path}: field {spec.name} has a number that is none of its {len(names):,} names", path=str(path))
        new: Array = numbers[own + 1].astype(spec.stored)
        return new

    def refuse_lost(self, own: Array, new: Array) -> None:
        """Raises OptionError where one of these class numbers became none, as the map that was given lacks its name."""
        if self.classes is not None and len(gone := own[new < -1]):
            raise OptionError(
                f"--classes-from: {self._dataset.name} has rows of class {show(self.classes[int(gone[0])])}, which is not in it: add it there, or "
                "leave them out with --where",
                options=["classes-from"],
            )


def _numbers(old: tuple[str, ...], new: tuple[str, ...]) -> Array:
    """The new number of each old one, from -1 on: (len(old) + 1,)."""
    numbers = {name: number for number, name in enumerate(new)}
    return np.array([-1, *(numbers.get(name, _MISSING) for name in old)], np.int64)


class ShardRows:
    """What is known of the rows of a shard.  Raises FormatError where it is damaged.

    `number`: of its dataset; `first`: of its first row in this; `prefix`: what keys begin with in the new dataset.
    """

    def __init__(self, number: int, shard: OldShard, first: int, renumbered: Renumbered, prefix: bytes) -> None:
        self.number, self.first, self._prefix, self._shard = number, first, prefix, shard
        with self._there():
            self.samples = shard.samples()
            stops = self.samples["key_stop"]
            check_stops(stops, np.uint64(0), shard.path("samples"))
            self._keys = Keys(shard.read("keys", np.dtype("u1"), (int(stops[-1]),)), stops.astype(np.int64))
            self.values, self.own_classes = renumbered.read(shard)
            self.class_names = renumbered.classes

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """A file that is missing is damage."""
        try:
            yield
        except FileNotFoundError as error:
            root = Path(self._shard.folder).parent
            raise CorruptShardError(
                f"{error.filename or error}: missing; run `mmcompile verify {root}`, which says how to mend it, or where it was pruned build again",
                path=self._shard.folder,
            ) from None

    def own(self, spec: Field) -> Array:
        """A field as the dataset has it."""
        with self._there():
            return self._shard.read(spec.name, spec.stored, (self._shard.rows, *spec.shape))

    def __len__(self) -> int:
        return len(self.samples)

    @functools.cached_property
    def keys(self) -> list[bytes]:
        """The new keys of all rows."""
        return [self._prefix + key for key in self._keys]

    def taken(self, rows: npt.NDArray[np.int64]) -> Keys:
        """The new keys of some rows, each with its place: number of the dataset, row in this."""
        picked, n, width = self._keys.take(rows), len(rows), len(self._prefix)
        places = np.zeros((n, 3), np.int64)
        places[:, 0], places[:, 1] = self.number, self.first + rows
        starts = np.repeat(picked.stops - np.diff(picked.stops, prepend=0), width)
        blob = np.insert(picked.blob, starts, np.tile(np.frombuffer(self._prefix, np.uint8), n)) if width else picked.blob
        return Keys(blob, picked.stops + width * np.arange(1, n + 1), places=places)


def columns_of(rows: ShardRows, before: int, splits: Array, fields: tuple[Field, ...]) -> dict[str, Callable[[], Column]]:
    """What conditions may ask of these rows: each column is made when it is asked for; classes and categories are their names.

    `before`: rows of all datasets before this one; `splits`: the name of the split of each row, (N,).
    """
    samples, values = rows.samples, rows.values
    out: dict[str, Callable[[], Column]] = {
        "key": lambda: _texts([as_text(key) for key in rows.keys]),
        "split": lambda: splits,
        "row": lambda: before + rows.first + np.arange(len(rows)),
        "dataset": lambda: np.full(len(rows), rows.number),
        "flags": lambda: Flags(samples["flags"]),
        "source_hash": lambda: _texts([pair_hash(pair) for pair in samples["source_hash"].tolist()]),
    }
    for name in _NUMBERS:
        out[name] = functools.partial(_plain, samples[name])
    for name in _TEXTS:
        out[name] = functools.partial(_decoded, samples[name])
    plain_columns(out, fields, lambda spec: values[spec.name])
    if rows.own_classes is not None and rows.class_names is not None:
        out["class"] = functools.partial(_named, rows.own_classes, rows.class_names)
    return out


def plain_columns(
    out: dict[str, Callable[[], Column]], fields: tuple[Field, ...], read: Callable[[Field], Array], classes: tuple[str, ...] | None = None
) -> dict[str, Callable[[], Column]]:
    """`out` and the fields that are one number, which `read` gives; classes and categories are their names."""

    def column(spec: Field, names: tuple[str, ...] | None) -> Column:
        return _plain(read(spec)) if names is None else _named(read(spec), names)

    for spec in fields:
        if spec.shape == () and spec.dtype != "bfloat16":
            out.setdefault(spec.name, functools.partial(column, spec, None if spec.categories is None else spec.categories.listed))
            if spec.meaning == "class" and classes is not None:
                out["class"] = functools.partial(column, spec, classes)
    return out


def _texts(values: list[str]) -> Array:
    out: Array = np.empty(len(values), object)
    out[:] = values
    return out


def _decoded(column: Array) -> Array:
    return _texts([text.decode("ascii", "replace") for text in column.tolist()])


def _plain(column: Array) -> Array:
    """Numbers as int64 or float64, in which nothing overflows that is compared; truths as they are."""
    return column if column.dtype.kind == "b" else column.astype(np.float64 if column.dtype.kind == "f" else np.int64)


def _named(numbers: Array, names: tuple[str, ...]) -> Array:
    """The names of these numbers; "" for a row that has none."""
    return _texts([*names, ""])[numbers.astype(np.int64)]


def split_of(layout: Layout, datasets: int, number: int, name: str) -> str:
    """The split that rows of a split of a dataset are in."""
    own = str(number) if datasets > 1 else ""
    return next((split for split, folder in layout.splits if folder == own), name)


def joined_splits(datasets: list[Opened], layout: Layout) -> list[str]:
    """The splits that there may be, in order: of one dataset its own, of several as folders that are splits stand.  Raises OptionError."""
    found = [[split_of(layout, len(datasets), number, split.name) for split in dataset.index.splits] for number, dataset in enumerate(datasets)]
    names = list(dict.fromkeys(name for part in found for name in part))
    if "all" in names and len(names) > 1:
        lacks, has = (next(at for at, part in enumerate(found) if (part == ["all"]) is bare) for bare in (True, False))
        raise OptionError(
            f"{datasets[has].name} has splits ({', '.join(map(show, found[has][:8]))}) and {datasets[lacks].name} none: say which split it is, as in "
            f"--split {show(found[has][0])}={datasets[lacks].name}",
            options=["split"],
        )
    return names if len(found) == 1 else sorted(names, key=rank)
