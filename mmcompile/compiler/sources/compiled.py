"""Hides that items are rows of datasets already: several become one, some are selected, and all are copied where they lie, none is decoded.

One generation of each dataset is opened, the current one, and held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.recast import Opened, Usable, common_versions, settled
from mmcompile.compiler.reuse import Shelf
from mmcompile.compiler.sources import STAT_DTYPE, Lent, Scan
from mmcompile.compiler.sources.classmap import read_classes
from mmcompile.compiler.sources.compiledrows import CompiledRows
from mmcompile.compiler.sources.keys import Keys, place_of
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.provenance import (
    Renumbered,
    ShardRows,
    columns_of,
    joined_fields,
    joined_splits,
    kept_identity,
    plain_columns,
    shards_of,
    split_of,
)
from mmcompile.compiler.sources.selected import Selection
from mmcompile.compiler.sources.splits import Layout, parse_splits
from mmcompile.compiler.trace import kept_keys
from mmcompile.errors import FormatError, OptionError, SourceError
from mmcompile.format.canonical import as_text, read_limited
from mmcompile.format.catalog import load_table
from mmcompile.format.fields import pixel_fields, value_fields
from mmcompile.format.index import INDEX_LIMIT, Split, load_index
from mmcompile.format.remains import is_left_of_one
from mmcompile.format.samples import row_hashes
from mmcompile.format.store import is_url

if TYPE_CHECKING:
    from mmcompile.compiler.sources.choose import SourceOptions

__all__ = ["CompiledSource", "dataset_source", "holds_dataset"]

Array = npt.NDArray[Any]


def holds_dataset(place: str) -> bool:
    """Is this a folder with a published dataset in it, sound or not?"""
    if is_url(place):
        return False
    try:
        if b'"format":"mmcompile"' in read_limited(Path(place) / "index.json", INDEX_LIMIT):
            return True
    except (OSError, FormatError):
        pass
    return is_left_of_one(Path(place))


def _open(raw: Sequence[str]) -> list[Opened]:
    """The current generation of each.  Raises OptionError where one is none, or stands there twice; FormatError where one cannot be read."""
    out: list[Opened] = []
    real: dict[str, str] = {}
    for place in raw:
        if is_url(place):
            raise OptionError(f"{place}: a dataset on a store is no source; copy it to a folder first", options=["raw"])
        if not holds_dataset(place):
            raise OptionError(
                f"{show(place)} is no dataset, and {show(next((p for p in raw if holds_dataset(p)), raw[0]))} is to be read as one: build it first, "
                "then give datasets alone",
                options=["raw"],
            )
        if (twice := real.setdefault(os.path.realpath(place), place)) != place or raw.count(place) > 1:
            raise OptionError(f"{show(twice)} and {show(place)} are the same dataset; give it once", options=["raw"])
        root = os.path.abspath(place)
        index, generation = load_index(Path(root))
        out.append(Opened(root, generation, index))
    return out


def dataset_source(raw: Sequence[str], options: SourceOptions) -> CompiledSource | CompiledRows:
    """The source that reads these datasets.  Raises OptionError or FormatError."""
    datasets = _open(raw)
    other = next((d for d in datasets if d.index.keyed != datasets[0].index.keyed), None)
    if other is not None:
        images, bare = (datasets[0], other) if datasets[0].index.keyed else (other, datasets[0])
        raise OptionError(f"{images.name} holds images, each with a key, and {bare.name} rows without keys: merge those of one kind", options=["raw"])
    splits = parse_splits(raw, options.split)
    for name, folder in splits:
        if "/" in folder or (folder and len(raw) == 1):
            raise OptionError(f"--split {show(name)}=…: expected one of the datasets given, whose rows are all in that split", options=["split"])
    classes = None if options.classes_from is None else read_classes(options.classes_from)
    total = sum(dataset.index.samples for dataset in datasets)
    selection = Selection(total, options.rows, options.where, options.include, options.exclude)
    kind = CompiledSource if datasets[0].index.keyed else CompiledRows
    return kind(datasets, Layout(splits, classes), selection, options.columns)


class CompiledSource:
    """Rows of keyed datasets.  Keys are those that the rows have; where there are several datasets each begins with the number of its own, and "/".

    Splits of one name are one, and stand as splits of folders do.  Classes are one map: that of all, or where they differ all names sorted as text.
    Within a split rows stand class by class where they do so in all datasets, dataset by dataset, and as in these.  `layout` says of which split
    whole datasets are, and the class map; `selection` which rows are taken; `columns` which fields beside the images are kept, None: all.
    """

    def __init__(self, datasets: list[Opened], layout: Layout, selection: Selection, columns: tuple[str, ...] | None = None) -> None:
        self._datasets, self._layout, self._selection, self._columns = datasets, layout, selection, columns
        self._places = tuple((d.root, d.generation) for d in datasets)
        self._settings: Preprocess | None = None
        for dataset in datasets:
            pixels = pixel_fields(dataset.index.fields)
            if not pixels or pixels != dataset.index.fields[: len(pixels)]:
                raise OptionError(f"{dataset.name}: it has no images, and cannot be copied from", options=["raw"])
        self._fields, self._classes = joined_fields(datasets, layout.classes, len(pixel_fields(datasets[0].index.fields)), columns)
        self._splits = joined_splits(datasets, layout)

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: to say what is wrong with a row that could not be copied."""
        return {"_places": self._places, "_settings": self._settings}

    @property
    def roots(self) -> tuple[str, ...]:
        """All that OUT must not lie in."""
        return tuple(root for root, _ in self._places)

    @property
    def root(self) -> str:
        """What a message calls them."""
        return ", ".join(self.roots)

    @property
    def parallel(self) -> int:
        """Nothing is read item by item."""
        return 1

    def location(self) -> str:
        """The generations: what is in them never changes."""
        return f"generations {' '.join(generation for _, generation in self._places)}"

    def identity(self) -> dict[str, object]:
        """The generations, and what is taken of them."""
        generations = [generation for _, generation in self._places]
        return {
            "kind": "dataset",
            "generations": generations,
            **self._selection.identity(),
            **self._layout.identity(),
            **kept_identity(self._columns),
        }

    def settle(self, asked: Preprocess | None, given: Collection[str] | None = None) -> Preprocess:
        """Decide the settings of the new dataset, see `settled`.  Raises OptionError."""
        self._settings = settled(self._datasets, asked, given)
        return self._settings

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the rows.  Raises FormatError where provenance is damaged; OptionError where a row cannot be stored as the settings want it, or has a
        class that a fixed map does not have; SourceError where no row is taken.
        """
        settings = self._settings or self.settle(None)
        taken = _Taken()
        in_order = True
        for number, dataset in enumerate(self._datasets):
            in_order &= self._take(number, Usable.of(dataset, settings), taken, progress)
        total = sum(dataset.index.samples for dataset in self._datasets)
        if not taken.count:
            raise SourceError(f"{self.root}: none of the {total:,} rows is taken; mend --where, --rows, --include or --exclude", path=self.root)
        versions, revision = common_versions(self._datasets, taken.formats, settings)
        keys, columns = taken.joined()
        if len(self._datasets) > 1:
            label = next((f.name for f in self._fields if f.meaning == "class"), None)
            classes = columns["values"][label].astype(np.uint64) if label is not None and in_order else columns["splits"]  # no class stands last
            order = np.lexsort((classes, columns["splits"]))
            keys, columns = keys.take(order), {name: column[order] for name, column in columns.items()}
        stat: npt.NDArray[np.void] = np.zeros(taken.count, STAT_DTYPE)
        stat["size"] = columns["sizes"]
        ends = np.searchsorted(columns["splits"], np.arange(len(self._splits)), side="right").tolist()
        splits = tuple(Split(name, start, stop) for name, start, stop in zip(self._splits, [0, *ends], ends, strict=False) if stop > start)
        indexes = [d.index for d in self._datasets]
        told = all(i.sha256 for i in indexes), kept_keys(indexes[0]) if len(indexes) == 1 else None, any(i.key_hash for i in indexes)
        return Scan(
            keys,
            self._fields,
            columns["values"],
            stat,
            self._classes,
            left_out={"not selected": total - taken.count} if total > taken.count else {},
            warnings=self._selection.warnings(),
            splits=() if self._splits == ["all"] else splits,
            lent=Lent(columns["hashes"], self._places, versions, revision, *told),
            parts=tuple((f.name, f.meaning) for f in pixel_fields(self._datasets[0].index.fields)),
        )

    def _take(self, number: int, usable: Usable, taken: _Taken, progress: Callable[[int], None] | None) -> bool:
        """Take the rows of a dataset that are selected, in its own order; does this go class by class?"""
        dataset, prefix = usable.dataset, f"{number}/".encode() if len(self._datasets) > 1 else b""
        generation = load_table(Path(dataset.root), dataset.index, dataset.generation)
        renumbered = Renumbered(dataset, self._fields, self._classes)
        stops = np.array([split.stop for split in dataset.index.splits])
        numbers = np.array([self._splits.index(split_of(self._layout, len(self._datasets), number, s.name)) for s in dataset.index.splits])
        before = sum(d.index.samples for d in self._datasets[:number])
        in_order, last = True, (np.array([-1]), np.array([0], np.uint64))
        taken.formats.append(frozenset())
        for shard, start in zip(shards_of(dataset, generation.table), generation.starts.tolist(), strict=False):
            rows = ShardRows(number, shard, start, renumbered, prefix)
            parts = np.searchsorted(stops, np.arange(start, start + len(rows)), side="right")
            if rows.own_classes is not None:
                walk = [np.concatenate(pair) for pair in zip(last, (parts, rows.own_classes.astype(np.uint64)), strict=True)]
                in_order &= bool(((walk[0][1:] > walk[0][:-1]) | (walk[1][1:] >= walk[1][:-1])).all())
                last = walk[0][-1:], walk[1][-1:]
            known = columns_of(rows, before, np.array(self._splits, object)[numbers[parts]], self._fields)
            plain_columns(known, renumbered.dropped, rows.own, renumbered.classes)
            local = self._selection.take(before + start, before + start + len(rows), known, rows)
            if len(refused := usable.refused(rows.samples[local])):
                self._refuse(dataset, rows, int(local[refused[0]]))
            for spec in self._fields:
                if spec.meaning == "class" and rows.own_classes is not None:
                    renumbered.refuse_lost(rows.own_classes[local], rows.values[spec.name][local])
            taken.add(rows, local, numbers[parts[local]])
            if progress is not None:
                progress(taken.count)
        return in_order

    def _refuse(self, dataset: Opened, rows: ShardRows, row: int) -> None:
        settings, mode = self._settings or dataset.made, rows.samples["mode"][row].decode("ascii", "replace")
        raise OptionError(
            f"{dataset.name}: {show(as_text(rows.keys[row]))} was made of more than 8 bits ({mode}), and --dtype {settings.dtype} wants them: leave "
            '--dtype out, or this row, as in --where "depth == 8"',
            options=["dtype"],
        )

    # ------------------------------------------------------------------ in a worker

    def read(self, key: bytes) -> bytes:
        """Never a byte: a row that is asked for was not right, and OSError says why."""
        number, row, _ = place_of(key)
        raise OSError(errno.EIO, self._why(*self._places[number], row))

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """Nothing is known of the file: OSError."""
        raise OSError(errno.ENOENT, "a row of a dataset is no file")

    def _why(self, root: str, generation: str, row: int) -> str:
        """Why a row of a dataset could not be copied."""
        try:
            index, _ = load_index(Path(root), generation)
            found = load_table(Path(root), index, generation)
            number = int(np.searchsorted(found.starts, row, side="right")) - 1
            shard = shards_of(Opened(root, generation, index), found.table[number : number + 1])[0]
            local = row - int(found.starts[number])
            shelf = Shelf(shard, lambda path: path)
            pixels: list[Array] = [np.empty((1, *spec.shape), spec.stored) for spec in pixel_fields(index.fields)]
            shelf.read(local, pixels)
            others = [shelf.values[spec.name][local : local + 1] for spec in value_fields(index.fields)]
            right = row_hashes([*pixels, *others])[0] == shelf.samples["row_hash"][local]
        except FileNotFoundError as error:
            return f"row {row:,} of {show(root)}: {error.filename or error} is missing; if it was pruned run the same command again"
        except FormatError as error:
            return f"row {row:,} of {show(root)}: {error}"
        if right:
            return f"row {row:,} of {show(root)} holds what --dtype {self._settings.dtype if self._settings else 'wanted'} cannot"
        return f"row {row:,} of {show(root)} is damaged: run `mmcompile verify {show(root)}`, which says how to mend it"


class _Taken:
    """The rows that were taken so far, as columns; `formats` of the sources of each dataset."""

    def __init__(self) -> None:
        self.count = 0
        self.formats: list[frozenset[str]] = []
        self._keys: list[Keys] = []
        self._columns: dict[str, list[Array]] = {"values": [], "hashes": [], "sizes": [], "splits": []}

    def add(self, rows: ShardRows, local: npt.NDArray[np.int64], splits: Array) -> None:
        """Take some rows of a shard, in splits of these numbers."""
        if not len(local):
            return
        picked = rows.samples[local]
        found = {"values": rows.values[local], "hashes": picked["source_hash"], "sizes": picked["source_size"], "splits": splits}
        for name, column in found.items():
            self._columns[name].append(column)
        self._keys.append(rows.taken(local))
        self.formats[-1] |= {text.decode("ascii", "replace") for text in np.unique(picked["format"]).tolist()}
        self.count += len(local)

    def joined(self) -> tuple[Keys, dict[str, Array]]:
        """All of them, in the order in which they were taken."""
        return Keys.join(self._keys), {name: np.concatenate(parts) for name, parts in self._columns.items()}
