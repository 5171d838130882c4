"""Hides that rows of arrays and tables are those of datasets already: several become one, some are selected, groups stay.

One generation of each dataset is opened, the current one, and held.  Rows are read by the block, each held against its hash before it is handed out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.recast import Opened
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.provenance import Renumbered, joined_fields, joined_splits, kept_identity, plain_columns, split_of
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.compiler.sources.selected import Selection
from mmcompile.compiler.sources.splits import Layout
from mmcompile.compiler.sources.where import Column
from mmcompile.errors import FormatError, OptionError, SourceError
from mmcompile.format.canonical import canonical
from mmcompile.format.catalog import Generation, load_table
from mmcompile.format.index import Field, Split, load_groups
from mmcompile.format.npy import file_name, hash_bytes, open_array, read_hashed, read_into
from mmcompile.format.opened import keep
from mmcompile.format.permutation import MIXED, source_rows
from mmcompile.format.samples import block_hashes, block_rows, pair_hash

__all__ = ["CompiledRows"]

Array = npt.NDArray[Any]

#: Blocks, of 1 MiB each, that are read at a time, however few of their rows are asked for.
_BLOCKS = 8
#: Shards whose block hashes are kept, 8 bytes a MiB each.
_KEPT = 64


@dataclass(frozen=True)
class _Run:
    """Rows of one group of one dataset, which stand from `start` on: all from `first` on, or those in `picked` (M,)."""

    start: int
    stop: int
    dataset: int
    first: int
    picked: npt.NDArray[np.int64] | None

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where the rows [start, stop) of all stand in the dataset."""
        start, stop = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        return np.arange(self.first + start, self.first + stop) if self.picked is None else self.picked[start:stop]


class CompiledRows:
    """Rows of datasets without keys, split by split, dataset by dataset, as they stand there; groups keep their names, where rows stand by group.

    Splits of one name are one; names of classes and categories are as of CompiledSource.  `columns`: the fields that are kept, None: all.
    """

    def __init__(self, datasets: list[Opened], layout: Layout, selection: Selection, columns: tuple[str, ...] | None = None) -> None:
        if selection.has_patterns:
            raise OptionError(
                f"--include and --exclude: rows of {datasets[0].name} have no keys; use --where or --rows", options=["include", "exclude"]
            )
        self._datasets, self._layout, self._selection, self._kept = datasets, layout, selection, columns
        self._fields, self._classes = joined_fields(datasets, layout.classes, 0, columns)
        self._splits = joined_splits(datasets, layout)
        self._runs: list[_Run] = []
        self._opened: dict[int, tuple[Generation, Renumbered]] = {}
        self._hashes: dict[tuple[int, int], Array] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_selection": None, "_opened": {}, "_hashes": {}}

    @property
    def roots(self) -> tuple[str, ...]:
        """All that OUT must not lie in."""
        return tuple(dataset.root for dataset in self._datasets)

    @property
    def root(self) -> str:
        """What a message calls them."""
        return ", ".join(self.roots)

    def identity(self) -> dict[str, object]:
        """The generations, and what is taken of them."""
        generations = [dataset.generation for dataset in self._datasets]
        return {"kind": "dataset", "generations": generations, **self._selection.identity(), **self._layout.identity(), **kept_identity(self._kept)}

    def settle_rows(self, asked: RowPreprocess) -> bool:
        """Are rows stored as they are?  Raises OptionError where something else is asked for of rows that are no longer as their source had them."""
        if asked == RowPreprocess():
            return True
        for dataset in self._datasets:
            done = dataset.index.settings.get("preprocess")
            if done != asked.settings() and done != RowPreprocess().settings():
                shown = ", ".join(f"--{name} {value}" for name, value in (done or {}).items() if value != RowPreprocess().settings().get(name))
                raise OptionError(
                    f"{dataset.name}: its rows were made with {shown:.100}, and are no longer what they were made of: leave --dtype, --normalize and "
                    "--scale out, or build from what it was built from",
                    options=["dtype"],
                )
        return False

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """List the groups.  Raises FormatError where a dataset is damaged, SourceError where no row is taken."""
        self._runs, names, stamps, splits = [], [], [], []
        at = 0
        for split in self._splits:
            first = at
            for run, name, stamp in self._groups(split):
                self._runs.append(_Run(at, at + run.stop - run.start, run.dataset, run.first, run.picked))
                names.append(name)
                stamps.append(stamp)
                at = self._runs[-1].stop
                if progress is not None:
                    progress(at)
            if at > first:
                splits.append(Split(split, first, at))
        total = sum(dataset.index.samples for dataset in self._datasets)
        if not at:
            raise SourceError(f"{self.root}: none of the {total:,} rows is taken; mend --where or --rows", path=self.root)
        return RowScan(
            at,
            self._fields,
            tuple(names),
            np.array([run.stop for run in self._runs], np.int64),
            tuple(stamps),
            () if self._splits == ["all"] else tuple(splits),
            self._classes,
            counts={"not selected": total - at} if at < total else {},
            order=MIXED if any(dataset.index.order for dataset in self._datasets) else "",
        )

    def _groups(self, split: str) -> Iterator[tuple[_Run, str, str]]:
        """(rows, name, stamp) of each group that has rows in a split, dataset by dataset."""
        made = hash_bytes(canonical([[f.to_json() for f in self._fields], self._layout.identity()]))
        for number, dataset in enumerate(self._datasets):
            names, starts = load_groups(Path(dataset.root), dataset.index)
            mixed = bool(dataset.index.order)
            for own in dataset.index.splits:
                if split_of(self._layout, len(self._datasets), number, own.name) != split:
                    continue
                taken = self._taken(number, own, split, names, starts)
                if mixed and own.start < own.stop:  # its groups are no ranges of its rows
                    yield from self._run(number, "", (own.start, own.stop), taken, made)
                    continue
                for group in _within(starts, own):
                    bounds = max(own.start, int(starts[group])), min(own.stop, int(starts[group + 1]))
                    yield from self._run(number, names[group], bounds, taken, made)

    def _run(
        self, number: int, name: str, bounds: tuple[int, int], taken: npt.NDArray[np.int64] | None, made: str
    ) -> Iterator[tuple[_Run, str, str]]:
        start, stop = bounds
        picked = None if taken is None else taken[slice(*np.searchsorted(taken, [start, stop]).tolist())]
        rows = stop - start if picked is None else len(picked)
        if rows:
            which = [start, stop, None if picked is None else hash_bytes(picked.tobytes())]
            stamp = hash_bytes(canonical([self._datasets[number].generation, which, made]))
            yield _Run(0, rows, number, start, picked), name, stamp

    def _taken(self, number: int, own: Split, split: str, names: tuple[str, ...], starts: Array) -> npt.NDArray[np.int64] | None:
        """The rows of a split of a dataset that are selected; None for all."""
        if not self._selection:
            return None
        before = sum(d.index.samples for d in self._datasets[:number])
        found, _ = self._open(number)
        parts = [np.empty(0, np.int64)]
        for shard in _within(found.starts, own):
            start, stop = int(found.starts[shard]), int(found.starts[shard + 1])
            columns = self._columns(number, shard, start, before, split, names, starts)
            parts.append(start + self._selection.take(before + start, before + stop, columns))
        rows = np.concatenate(parts)
        return rows[(rows >= own.start) & (rows < own.stop)]

    def _columns(
        self, number: int, shard: int, start: int, before: int, split: str, names: tuple[str, ...], starts: Array
    ) -> dict[str, Callable[[], Column]]:
        """What conditions may ask of the rows of a shard."""
        generation, renumbered = self._open(number)
        rows = np.arange(start, start + int(generation.table["rows"][shard]))

        def group() -> Array:
            listed: Array = np.array(names, object)
            index = self._datasets[number].index
            places = source_rows(index.order, index.splits, rows)
            return np.asarray(listed[np.searchsorted(starts, places, side="right") - 1])

        out: dict[str, Callable[[], Column]] = {
            "split": lambda: np.full(len(rows), split, object),
            "group": group,
            "row": lambda: before + rows,
            "dataset": lambda: np.full(len(rows), number),
        }
        read = functools.partial(self._column, number, shard)
        plain_columns(out, self._fields, read, self._classes)
        return plain_columns(out, renumbered.dropped, read, renumbered.classes)

    def _column(self, number: int, shard: int, spec: Field) -> Array:
        """A field of numbers of a shard, its file held against its hash."""
        generation, renumbered = self._open(number)
        digest = pair_hash(generation.table[spec.name][shard])
        path = Path(self._datasets[number].root) / "shards" / file_name(spec.name, digest)
        return renumbered.of(spec, read_hashed(path, spec.stored, (int(generation.table["rows"][shard]), *spec.shape), digest), path)

    # ------------------------------------------------------------------ in a worker

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop).  Raises SourceError where a block of them is damaged, or a file is gone."""
        out: dict[str, Array] = {spec.name: np.empty((stop - start, *spec.shape), spec.stored) for spec in self._fields}
        run = int(np.searchsorted(np.array([r.stop for r in self._runs]), start, side="right"))
        at = 0
        while at < stop - start:
            rows = self._runs[run].rows(start, stop)
            self._fill(self._runs[run].dataset, rows, {name: column[at : at + len(rows)] for name, column in out.items()})
            at += len(rows)
            run += 1
        return out

    def _fill(self, number: int, rows: npt.NDArray[np.int64], out: dict[str, Array]) -> None:
        """Read these rows of a dataset, which rise."""
        dataset = self._datasets[number]
        generation, renumbered = self._open(number)
        shards = np.searchsorted(generation.starts, rows, side="right") - 1
        block = block_rows(dataset.index.fields)
        blocks = (rows - generation.starts[shards]) // block
        cut = np.flatnonzero((np.diff(shards) != 0) | (np.diff(blocks) > 1) | (np.diff(blocks // _BLOCKS) != 0)) + 1
        for part in np.split(np.arange(len(rows)), cut):
            shard, first = int(shards[part[0]]), int(blocks[part[0]]) * block
            last = min(int(generation.table["rows"][shard]), (int(blocks[part[-1]]) + 1) * block)
            try:
                found = self._blocks(number, shard, first, last)
            except FileNotFoundError as error:
                raise SourceError(
                    f"{error.filename or error}: missing; if it was pruned run the same command again, else run "
                    f"`mmcompile verify {dataset.name}`, which says how to mend it"
                ) from None
            except FormatError as error:
                raise SourceError(str(error)) from error
            local = rows[part] - int(generation.starts[shard]) - first
            for spec in self._fields:
                own = found[spec.name][local]
                out[spec.name][part] = new = renumbered.of(spec, own, Path(dataset.root))
                if spec.meaning == "class":
                    renumbered.refuse_lost(own, new)

    def _blocks(self, number: int, shard: int, first: int, last: int) -> dict[str, Array]:
        """Rows [first, last) of a shard, whole blocks, held against their hashes."""
        dataset, (generation, _) = self._datasets[number], self._open(number)
        folder, count = Path(dataset.root) / "shards", int(generation.table["rows"][shard])
        block = block_rows(dataset.index.fields)
        hashes = self._hashes.get((number, shard))
        if hashes is None:
            digest = pair_hash(generation.table["hashes"][shard])
            made = read_hashed(folder / file_name("hashes", digest), np.dtype("<u8"), (-(-count // block),), digest)
            hashes = keep(self._hashes, (number, shard), made, _KEPT)
        out: dict[str, Array] = {}
        for spec in dataset.index.fields:
            path = folder / file_name(spec.name, pair_hash(generation.table[spec.name][shard]))
            out[spec.name] = np.empty((last - first, *spec.shape), spec.stored)
            _read(path, spec, count, first, out[spec.name])
        wrong = np.flatnonzero(block_hashes(list(out.values()), block) != hashes[first // block : -(-last // block)])
        if len(wrong):
            start = int(generation.starts[shard]) + first + int(wrong[0]) * block
            stop = min(start + block, int(generation.starts[shard + 1]))
            raise SourceError(
                f"rows {start:,} to {stop - 1:,} of {dataset.name} hold damage: run `mmcompile verify {dataset.name}`, which says how to mend it",
                path=dataset.root,
                row=start,
            )
        return out

    def _open(self, number: int) -> tuple[Generation, Renumbered]:
        """The table of a dataset, and its numbers of classes."""
        if number not in self._opened:
            dataset = self._datasets[number]
            table = load_table(Path(dataset.root), dataset.index, dataset.generation)
            self._opened[number] = table, Renumbered(dataset, self._fields, self._classes)
        return self._opened[number]


def _within(starts: Array, split: Split) -> range:
    """The shards or groups, which start there, that have rows of a split."""
    if split.start == split.stop:
        return range(0)
    return range(int(np.searchsorted(starts, split.start, side="right")) - 1, int(np.searchsorted(starts, split.stop, side="left")))


def _read(path: Path, spec: Field, count: int, first: int, out: Array) -> None:
    """Rows from `first` on of the file of a field, which has `count`."""
    fd, offset = open_array(path, spec.stored, (count, *spec.shape))
    try:
        read_into(fd, out, offset + first * spec.row_bytes, path)
    finally:
        os.close(fd)
