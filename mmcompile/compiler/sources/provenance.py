"""Hides how the rows of a dataset are read as items of another: provenance and values shard by shard, with the numbers of the new class map.

Each file is held against its hash before it is believed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.recast import Opened
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.where import Column, Flags
from mmcompile.errors import CorruptShardError, OptionError
from mmcompile.format.canonical import as_text
from mmcompile.format.index import Field, Names, load_classes, load_names, row_dtype
from mmcompile.format.samples import check_stops, pair_hash

__all__ = ["Renumbered", "ShardRows", "columns_of", "joined_fields", "shards_of"]

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
    return [OldShard(folder, dataset.index.fields, {kind: pair_hash(row[kind]) for kind in kinds}, int(row["rows"]), frozenset()) for row in table]


def joined_fields(datasets: list[Opened], classes: tuple[str, ...] | None) -> tuple[tuple[Field, ...], tuple[str, ...] | None]:
    """(fields beside the image, class names) of all these datasets together; the names in fields are listed.

    Names of classes, and of categories, that differ are joined and sorted as text; `classes`: the class map, where it is fixed.  Raises OptionError
    where fields differ, FormatError.
    """
    first, found = datasets[0], [tuple(_listed(dataset, spec) for spec in dataset.index.fields[1:]) for dataset in datasets]
    for other, specs in zip(datasets, found, strict=True):
        if [_bare(spec) for spec in specs] != [_bare(spec) for spec in found[0]]:
            raise OptionError(
                f"{first.name} and {other.name} differ in what stands beside the images ({_shown(found[0])}; {_shown(specs)}): only datasets of "
                "the same fields become one",
                options=["raw"],
            )
    fields = list(found[0])
    for at, spec in enumerate(fields):
        if spec.categories is not None:
            names = _union([specs[at].categories.listed for specs in found])  # type: ignore[union-attr]
            if len(names) - 1 > np.iinfo(spec.stored).max:
                raise OptionError(f"{first.name}: field {spec.name} has {len(names):,} categories in all, more than {spec.dtype} can number")
            fields[at] = replace(spec, categories=Names(names))
    of_each = [load_classes(Path(dataset.root), dataset.index) for dataset in datasets]
    bare = next((at for at, names in enumerate(of_each) if (names is None) != (of_each[0] is None)), None)
    if bare is not None:
        raise OptionError(
            f"{first.name} and {datasets[bare].name}: one has names of classes, and the other none; give --classes-from", options=["raw"]
        )
    if classes is not None:
        if of_each[0] is None:
            raise OptionError(f"--classes-from: {first.name} has no classes; leave it out", options=["classes-from"])
        return tuple(fields), classes
    return tuple(fields), None if of_each[0] is None else _union([names or () for names in of_each])


def _union(lists: list[tuple[str, ...]]) -> tuple[str, ...]:
    return lists[0] if all(names == lists[0] for names in lists) else tuple(sorted(set().union(*lists)))


def _listed(dataset: Opened, spec: Field) -> Field:
    """A field with its names listed."""

    def listed(names: Names | None) -> Names | None:
        return None if names is None else Names(load_names(Path(dataset.root), names))

    return replace(spec, columns=listed(spec.columns), categories=listed(spec.categories))


def _bare(spec: Field) -> Field:
    return replace(spec, categories=None if spec.categories is None else Names())


def _shown(fields: tuple[Field, ...]) -> str:
    return ", ".join(f"{f.name}: {f.meaning} {f.dtype} {list(f.shape) or ''}".rstrip() for f in fields[:8]) or "nothing"


class Renumbered:
    """The values beside the images of a dataset, with the numbers that their classes and categories have in `fields` and `classes`."""

    def __init__(self, dataset: Opened, fields: tuple[Field, ...], classes: tuple[str, ...] | None) -> None:
        self._dataset, self._fields = dataset, fields
        self._maps: dict[str, tuple[tuple[str, ...], Array]] = {}
        own = self.classes = load_classes(Path(dataset.root), dataset.index)
        for spec, old in zip(fields, dataset.index.fields[1:], strict=True):
            if spec.meaning == "class" and own is not None and classes is not None:
                self._maps[spec.name] = own, _numbers(own, classes)
            elif spec.categories is not None and old.categories is not None:
                names = load_names(Path(dataset.root), old.categories)
                self._maps[spec.name] = names, _numbers(names, spec.categories.listed)

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
            if spec.name in self._maps:
                found = self._renumbered(shard, spec, found.astype(np.int64))
            out[spec.name] = found
        return out, own

    def _renumbered(self, shard: OldShard, spec: Field, found: npt.NDArray[np.int64]) -> Array:
        names, numbers = self._maps[spec.name]
        if not -1 <= int(found.min(initial=0)) <= int(found.max(initial=0)) <= len(names) - 1 + (not names):
            raise CorruptShardError(f"{shard.path(spec.name)}: a number that is none of the {len(names):,} names", path=str(shard.path(spec.name)))
        new: Array = numbers[found + 1]
        return new


def _numbers(old: tuple[str, ...], new: tuple[str, ...]) -> Array:
    """The new number of each old one, from -1 on: (len(old) + 1,)."""
    numbers = {name: number for number, name in enumerate(new)}
    return np.array([-1, *(numbers.get(name, _MISSING) for name in old)], np.int64)


class ShardRows:
    """What is known of the rows of a shard.  Raises FormatError where it is damaged.

    `number`: of its dataset; `first`: of its first row in this; `prefix`: what keys begin with in the new dataset.
    """

    def __init__(self, number: int, shard: OldShard, first: int, renumbered: Renumbered, prefix: bytes) -> None:
        self.number, self.first, self._prefix = number, first, prefix
        try:
            self.samples = shard.samples()
            stops = self.samples["key_stop"]
            check_stops(stops, np.uint64(0), shard.path("samples"))
            self._keys = Keys(shard.read("keys", np.dtype("u1"), (int(stops[-1]),)), stops.astype(np.int64))
            self.values, self.own_classes = renumbered.read(shard)
            self.class_names = renumbered.classes
        except FileNotFoundError as error:
            root = Path(shard.folder).parent
            raise CorruptShardError(
                f"{error.filename or error}: missing; run `mmcompile verify {root} --repair RAW`, or where it was pruned build again",
                path=shard.folder,
            ) from None

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
    for spec in fields:
        if spec.meaning == "class" and rows.own_classes is not None and rows.class_names is not None:
            out["class"] = functools.partial(_named, rows.own_classes, rows.class_names)
        if spec.shape == () and spec.dtype != "bfloat16":
            names = None if spec.categories is None else spec.categories.listed
            column = functools.partial(_plain, values[spec.name]) if names is None else functools.partial(_named, values[spec.name], names)
            out.setdefault(spec.name, column)
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
