"""Hides what one pass over tables finds: their columns, the groups and splits that rows belong to, and where each row lies."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import LABEL
from mmcompile.compiler.sources.cells import long_name, long_text
from mmcompile.compiler.sources.columns import NO_LABEL, find_column
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.rows import RowScan, fresh_stamp
from mmcompile.compiler.sources.splits import rank
from mmcompile.compiler.sources.tablecells import cut_of
from mmcompile.compiler.sources.tablefields import MOST_TEXTS, ColumnKind, Layout, Reading, lay_out, merged, reading_of
from mmcompile.compiler.sources.tablefiles import TableFile
from mmcompile.compiler.sources.tablelabel import Label, find_label, take_label
from mmcompile.compiler.sources.tableorder import OrderCheck, Ranges, Rows, as_ranges, cut_counts, first_row, in_parts, sorted_rows, split_names
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.fields import Field, Names, Split
from mmcompile.format.npy import hash_bytes

__all__ = ["AS_THEY_STAND", "TablePart", "TableScan", "TableWishes"]

#: For --order-by: rows stand as they are.
AS_THEY_STAND = "none"
#: What tools call a column of numbers of rows that they add: of Parquet files and of CSV files.
_ADDED = ("__index_level_0__", "Unnamed: 0", "column 1")

Array = npt.NDArray[Any]
#: size, mtime_ns, ctime_ns, inode.
Stat = tuple[int, int, int, int]


@dataclass(frozen=True)
class TableWishes:
    """What is taken of tables, and in which order; None: what the tables themselves say.

    `columns`: those that become fields, each by itself, or as NAME=A+B+C side by side.  `group_by`: the column, or KEY of folders KEY=VALUE, whose
    values are the groups.  `order_by`: the column that rows of a group rise in; AS_THEY_STAND: none.  `split_by`: COLUMN=CUT,CUT,….
    `label`: the column that is the label; NO_LABEL: none.
    """

    columns: tuple[str, ...] | None = None
    group_by: str | None = None
    order_by: str | None = None
    split_by: str | None = None
    label: str | None = None

    def wanted(self) -> frozenset[str] | None:
        """The columns that are asked for, and what may be the name of one; None: all."""
        if self.columns is None:
            return None
        told = [*self.columns, *(part for entry in self.columns for part in entry.partition("=")[2].split("+"))]
        told += [self.group_by or "", self.order_by or "", self.label or "", (self.split_by or "").rpartition("=")[0]]
        return frozenset(name.strip() for name in told)


class TablePart(Protocol):
    """The table in one file: names of its columns, and the number of its rows once it was scanned."""

    path: str
    names: tuple[str, ...]
    rows: int

    def scan(self, progress: Callable[[int], None], wanted: frozenset[str] | None) -> dict[str, ColumnKind]: ...

    def texts(self, name: str, most: int) -> set[str] | None: ...

    def stream(self, readings: Sequence[Reading]) -> Iterator[list[Array]]: ...

    def read(self, readings: Sequence[Reading], start: int, stop: int) -> list[Array]: ...

    def close(self) -> None: ...


class TableScan:
    """One pass over the tables `parts`, which are in the order of their groups.

    Afterwards `layout` says what fields are made of, `ranges` which rows of all files stand one behind the other; or `order` (N,) is that into
    which rows have to be sorted first, and `ranges` are of the sorted ones.
    """

    def __init__(self, files: Sequence[TableFile], parts: Sequence[TablePart], wishes: TableWishes, where: str) -> None:
        self._files, self._parts, self._wishes, self._where = files, parts, wishes, where
        self.layout = Layout((), ())
        self.ranges = Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self.order: Rows | None = None
        self._label: Label | None = None
        self._said: list[str] = []
        self._counts: Counter[str] = Counter()

    def run(self, stats: Sequence[Stat], progress: Callable[[int], None]) -> RowScan:
        """Raises SourceError, OptionError; `stats` are what `stat` said of each file before it was opened."""
        self._look(progress)
        if not self.rows:
            return RowScan(0, (), ("",), np.zeros(1, np.int64), ("",))
        wishes = self._wishes
        split = self._cuts()
        group = None if wishes.group_by is None or self._is_key(wishes.group_by) else self._find(wishes.group_by, "group-by")
        order = None if wishes.order_by in (None, AS_THEY_STAND) else self._find(str(wishes.order_by), "order-by")
        if split is not None:
            if wishes.order_by is not None and order != split[0]:
                raise OptionError(f"--split-by {split[0]} cuts rows that rise in that column: leave --order-by out, or give the same column")
            if len(self._file_splits()) > 1:
                shown = ", ".join(map(show, self._file_splits()))
                raise OptionError(
                    f"--split-by {wishes.split_by}: {self._where} holds splits already ({shown}): leave it out, or build one of them",
                    options=["split-by"],
                )
            order = split[0]
        self._lay_out(group, order)
        names, stops, values = self._grouped(group, order) if group is not None else self._by_file(order)
        splits, ranges = self._split(names, stops, values, split, order)
        return self._result(splits, ranges, stats)

    # ------------------------------------------------------------------ columns

    def _look(self, progress: Callable[[int], None]) -> None:
        found, done = [], 0
        for part in self._parts:
            found.append(part.scan(lambda n, before=done: progress(before + n), self._wishes.wanted()))  # type: ignore[misc]
            part.close()
            done += part.rows
        first = self._parts[0]
        for part in self._parts[1:]:
            if lacking := sorted(set(first.names) ^ set(part.names)):
                has, not_ = (first, part) if lacking[0] in first.names else (part, first)
                raise SourceError(
                    f"column {show(lacking[0])} is in {show(has.path)}, not in {show(not_.path)}: expected the same columns in all tables",
                    path=not_.path,
                    column=lacking[0],
                )
        paths = [part.path for part in self._parts]
        self.kinds = {name: merged(name, list(zip(paths, [f[name] for f in found], strict=True))) for name in first.names}
        self.starts = np.concatenate([[0], np.cumsum([part.rows for part in self._parts])]).astype(np.int64)
        self.rows = int(self.starts[-1])
        #: Columns of times, which rows may be in the order of.
        self._times = [name for name, kind in self.kinds.items() if kind.unit is not None and not kind.missing]
        added = next((name for name in first.names if name in _ADDED[:1] or (name in _ADDED and name == first.names[0])), None)
        #: What a column without a name is called, and one that only numbers the rows.
        self._called: dict[str, str] = {}
        self._added: list[str] = []
        if added is not None and added in self._times and "time" not in first.names:
            self._called[added] = "time"
        elif added is not None and self.kinds[added].dtype in ("int64", "uint64") and len(first.names) > 1:
            self._added.append(added)

    def _alias(self, name: str) -> str:
        """The column that is called so."""
        return {called: column for column, called in self._called.items()}.get(name, name)

    def _find(self, name: str, option: str) -> str:
        alias = self._alias(name)
        return alias if alias != name else find_column(name, list(self.kinds), option, self._where)

    def _is_key(self, name: str) -> bool:
        """Is this the KEY of folders that tables lie in?"""
        return name not in self.kinds and any(name == key for key, _ in self._files[0].keyed)

    def _lay_out(self, group: str | None, order: str | None) -> None:
        wishes = self._wishes
        alone = [name for name in (order,) if name is not None]
        without = [*self._added, *([group] if group is not None else [])]
        if wishes.columns is None and self._added:
            self._said.append(f"column {show(self._added[0])} numbers the rows: left out (--columns takes it)")
        wanted, label = wishes.columns, self._take_label(alone, without)
        if label is not None:
            without.append(label)
            wanted = wanted if wanted is None else tuple(name for name in wanted if self._alias(name.strip()) != label)
        layout = lay_out(self.kinds, wanted, alone, without, self._where, self._called, label)
        self._said += layout.said
        used = {reading.column for readings in layout.columns for reading in readings}
        if aware := [name for name in self._parts[0].names if name in used and self.kinds[name].aware]:
            self._said.append(f"times are those of UTC, whatever their zone was: {', '.join(map(show, aware))}")
        fields: list[Field] = []
        columns: list[tuple[Reading, ...]] = []
        for spec, readings in zip(layout.fields, layout.columns, strict=True):
            reading = readings[0]
            if reading.dtype == "int32" and self.kinds[reading.column].is_text:
                texts = self._texts(reading.column)
                if gaps := self.kinds[reading.column].missing:
                    self._counts[f"missing ({spec.name})"] = gaps
                fields.append(replace(spec, categories=Names(texts)))
                columns.append((Reading(reading.column, "int32", categories=texts),))
            else:
                fields.append(spec)
                columns.append(readings)
        words = [readings[0] for readings in columns if readings[0].categories is not None]
        if label is None and wishes.label is None and not self._times and len(words) == 1 < len(fields):
            column, different = words[0].column, len(words[0].categories or ())
            if 2 * different <= self.rows:
                self._said.append(f"column {show(column)} is a category, not the label (--label-column {column} makes classes of it)")
        if self._label is not None:
            fields.append(LABEL)
            columns.append((self._label.reading,))
        self.layout = Layout(tuple(fields), tuple(columns))

    def _take_label(self, alone: Sequence[str], without: Sequence[str]) -> str | None:
        """The column that is the label, None where there is none."""
        asked, listed = self._wishes.label, self._wishes.columns
        if asked == NO_LABEL:
            return None
        if asked is not None:
            column: str | None = self._find(asked, "label-column")
        else:
            given = list(self.kinds if listed is None else dict.fromkeys(self._alias(name.strip()) for name in listed))
            single = [name for name in given if name in self.kinds]
            column = find_label(self.kinds, [name for name in single if name not in (*alone, *without)], len(given) - len(single))
        if column is None:
            return None
        kind = self.kinds[column]
        found = take_label(column, kind, lambda: self._texts(column), self._stream, asked=asked is not None)
        if isinstance(found, str):
            self._said.append(f"column {show(column)} is a value, not the label, as {found} (--label-column {column} makes classes of them)")
            return None
        self._label = found
        self._counts[f"classes in column {show(column)} ({found.said})"] = len(found.classes)
        if kind.missing:
            self._counts["without a label (-1)"] = kind.missing
        return column

    def _texts(self, name: str) -> tuple[str, ...]:
        """The different texts of a column, sorted as text."""
        found: set[str] = set()
        for part in self._parts:
            texts = part.texts(name, MOST_TEXTS)
            part.close()
            if texts is None or len(found := found | texts) > MOST_TEXTS:
                raise SourceError(
                    f"{self._where}: column {show(name)} holds more than {MOST_TEXTS:,} different texts, too many for categories: leave it out with "
                    "--columns (times are read as 2023-01-31 09:30:00, numbers as 1234.5)",
                    column=name,
                )
        if long := long_name(found):
            codes = [Reading(name, "int32", categories=(long, *sorted(found - {long})))]
            row = first_row((block for part in self._parts for (block,) in part.stream(codes)), 0)
            raise SourceError(f"{self.where(row)}: {long_text(f'column {show(name)}', long)}", row=row, column=name)
        return tuple(sorted(found))

    # ------------------------------------------------------------------ groups and order

    def where(self, row: int) -> str:
        """A row of all files, as a person finds it."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"row {row - int(self.starts[part]) + 1:,} of {show(self._parts[part].path)}"

    def _column(self, name: str) -> Iterator[Array]:
        """The values of a column that rows are ordered by, over all files, as they come."""
        kind = self.kinds[name]
        if not kind.is_number and kind.unit is None:
            raise OptionError(f"column {show(name)} holds {kind}: expected times or numbers to order rows by", options=["order-by"])
        if kind.missing:
            raise SourceError(
                f"column {show(name)}: {kind.missing:,} values are missing{kind.first_gap}, and rows cannot be ordered without", column=name
            )
        reading = reading_of(name, kind)
        row = 0
        for arrays in self._stream(reading):
            if arrays.dtype.kind == "f" and (none := np.isnan(arrays)).any():
                first = self.where(row + int(none.argmax()))
                raise SourceError(f"column {show(name)}: no number (NaN) in {first}, and rows cannot be ordered without", column=name)
            row += len(arrays)
            yield arrays

    def _stream(self, reading: Reading) -> Iterator[Array]:
        """All values of a column, over all files."""
        for part in self._parts:
            for arrays in part.stream([reading]):
                yield arrays[0]
            part.close()

    def _by_file(self, order: str | None) -> tuple[list[str], Rows, Array | None]:
        """(names, ends of groups, values to split by where they had to be sorted), groups as the files say them."""
        names: list[str] = []
        stops: list[int] = []
        last = None
        for file, stop in zip(self._files, self.starts[1:].tolist(), strict=True):
            if last == (file.split, file.group):
                stops[-1] = stop
            else:
                names.append(file.group)
                stops.append(stop)
            last = file.split, file.group
        ends = np.array(stops, np.int64)
        self.ranges = Ranges(np.zeros(1, np.int64), np.array([self.rows], np.int64))
        column = order or next(iter(self._times), None)
        if column is None or self._wishes.order_by == AS_THEY_STAND:
            return names, ends, None
        check = OrderCheck(np.concatenate([[0], ends[:-1]]))
        for values in self._column(column):
            check.extend(values)
        if order is None:
            self._refuse_unclear(column, check, len(names))
        elif check.drop is not None:
            self._said.append(f"rows were sorted by {show(order)}: {self.where(check.drop.row)} goes back")
            codes = np.repeat(np.arange(len(names)), np.diff(np.concatenate([[0], ends])))
            made = self._sort(codes, np.concatenate(list(self._column(order))))
            self._say_twice(order, ends, made)
            return names, ends, made
        elif check.alike:
            self._said.append(_twice(order, check.alike, self.where(check.twice)))
        return names, ends, None

    def _say_twice(self, column: str, ends: Rows, values: Array | None) -> None:
        """Say how many of sorted rows have the value of the one before them."""
        if values is None:
            return
        check = OrderCheck(np.concatenate([[0], ends[:-1]]))
        check.extend(values)
        if check.alike:
            row = check.twice if self.order is None else int(self.order[check.twice])
            first = next(self.ranges.within(row, row + 1))[0] if self.order is None else row
            self._said.append(_twice(column, check.alike, self.where(first)))

    def _refuse_unclear(self, column: str, check: OrderCheck, groups: int) -> None:
        """Rows whose time goes back, or stands still where a text may say of whom it is, are no one series."""
        texts = [name for name, kind in self.kinds.items() if kind.is_text]
        row = check.drop.row if check.drop is not None else check.twice if groups == 1 and texts else -1
        if row < 0:
            return
        shown = self._called.get(column, column)
        what = "goes back" if check.drop is not None else "stands still"
        hint = f"--group-by {texts[0] if texts else 'COLUMN'} --order-by {shown}"
        raise SourceError(
            f"{self.where(row)}: {show(shown)} {what}, so it is not clear which rows follow each other: say {hint}"
            f"{'' if check.drop is None else f', --order-by {shown} alone to sort them'}, or --order-by {AS_THEY_STAND} if they follow as they stand",
            row=row,
        )

    def _grouped(self, group: str, order: str | None) -> tuple[list[str], Rows, Array | None]:
        """(names, ends of groups, values to split by), groups as a column says them."""
        names, codes = self._codes(group)
        splits = self._file_splits()
        if len(splits) > 1:  # the groups of one split behind those of another
            numbers = [splits.index(file.split) for file in self._files]
            codes = codes + np.repeat(np.array(numbers, np.int64), np.diff(self.starts)) * len(names)
            names = names * len(splits)
        column = order or next(iter(self._times), None)
        values = None
        if column is not None and self._wishes.order_by != AS_THEY_STAND:
            values = np.concatenate(list(self._column(column)))
        counts = np.bincount(codes, minlength=len(names))
        ends = np.cumsum(counts).astype(np.int64)
        if order is not None:
            values = self._sort(codes, values)
            self._say_twice(order, ends, values)
            return names, ends, values
        made = self._sort(codes, None)
        if values is not None:
            rows = (
                self.order
                if self.order is not None
                else np.concatenate([np.arange(a, b) for a, b in zip(self.ranges.starts, self.ranges.stops, strict=True)])
            )
            check = OrderCheck(np.concatenate([[0], ends[:-1]]))
            check.extend(values[rows])
            if check.drop is not None:
                raise SourceError(
                    f"{self.where(int(rows[check.drop.row]))}: {show(str(column))} goes back within its group: add --order-by {column}, or "
                    f"--order-by {AS_THEY_STAND} if rows follow as they stand"
                )
        return names, ends, made

    def _sort(self, codes: npt.NDArray[np.integer[Any]], values: Array | None) -> Array | None:
        """Bring rows into the order of their groups and of values in each; returns the values in that order."""
        rows = sorted_rows(codes, values)
        ranges = as_ranges(rows)
        if ranges is not None:
            self.ranges = ranges
        else:
            self.order = rows
            self.ranges = Ranges(np.zeros(1, np.int64), np.array([self.rows], np.int64))
        return None if values is None else values[rows]

    def _codes(self, group: str) -> tuple[list[str], npt.NDArray[np.integer[Any]]]:
        kind = self.kinds[group]
        if kind.missing:
            raise SourceError(
                f"{self._where}: column {show(group)}: {kind.missing:,} values are missing{kind.first_gap}: expected the group of each row",
                column=group,
            )
        if kind.is_text:
            texts = self._texts(group)
            reading = Reading(group, "int32", categories=texts)
            codes = np.concatenate(list(self._stream(reading)))
            return list(texts), codes
        values, codes = np.unique(np.concatenate(list(self._column(group))), return_inverse=True)
        shown = values if kind.unit is None else values.view(f"datetime64[{kind.unit}]")
        return list(map(str, shown.tolist() if kind.unit is None else shown)), codes

    # ------------------------------------------------------------------ splits

    def _file_splits(self) -> list[str]:
        """The splits that tables lie in, in order; [""] where there are none."""
        return list(dict.fromkeys(file.split for file in self._files))

    def _split_stops(self, groups: int) -> list[int]:
        """Where the groups of each of these end."""
        if self._wishes.group_by is not None and not self._is_key(self._wishes.group_by):
            count = len(self._file_splits())
            return [groups // count * (i + 1) for i in range(count)]
        found = list(dict.fromkeys((file.split, file.group) for file in self._files))
        return [sum(rank(split) <= rank(name) for split, _ in found) for name in self._file_splits()]

    def _cuts(self) -> tuple[str, list[Any]] | None:
        """(column, values at which a split ends and the next begins)."""
        if self._wishes.split_by is None:
            return None
        name, equals, text = self._wishes.split_by.rpartition("=")
        if not equals or not text:
            raise OptionError(
                f"--split-by must be COLUMN=CUT,CUT,… as in ts=2023-01-01,2024-01-01, found {self._wishes.split_by!r}", options=["split-by"]
            )
        column = self._find(name, "split-by")
        kind = self.kinds[column]
        cuts = [cut_of(part.strip(), kind) for part in text.split(",")]
        if any(a >= b for a, b in itertools.pairwise(cuts)):
            raise OptionError(f"--split-by {self._wishes.split_by}: expected cuts that rise", options=["split-by"])
        return column, cuts

    def _split(
        self, names: list[str], stops: Rows, values: Array | None, split: tuple[str, list[Any]] | None, order: str | None
    ) -> tuple[list[tuple[str, list[str], list[int]]], Ranges]:
        """(splits with their groups and the rows of each, their rows)."""
        begins = np.concatenate([[0], stops[:-1]])
        if split is None:
            rows = (stops - begins).tolist()
            ends = self._split_stops(len(names))
            made = [(name, names[a:b], rows[a:b]) for name, a, b in zip(self._file_splits(), [0, *ends], ends, strict=False)]
            if empty := next((name for name, _, found in made if name and not sum(found)), None):
                raise SourceError(f"{self._where}: no row is in split {show(empty)}")
            return made, self.ranges
        counts = cut_counts([values] if values is not None else self._column(split[0]), stops, split[1])
        bounds = np.concatenate([begins[:, None], begins[:, None] + counts, stops[:, None]], axis=1)
        pieces, out = [], []
        for i, name in enumerate(split_names(len(split[1]))):
            found = bounds[:, i : i + 2].tolist()
            if not any(b > a for a, b in found):
                raise OptionError(f"--split-by {self._wishes.split_by}: no row is in split {name}", options=["split-by"])
            pieces += [(a, b) for a, b in found]
            out.append((name, names, [b - a for a, b in found]))
        return out, self.ranges.take(pieces)

    def _result(self, splits: list[tuple[str, list[str], list[int]]], ranges: Ranges, stats: Sequence[Stat]) -> RowScan:
        self.ranges = ranges
        counts = [n for _, _, found in splits for n in found]
        ends = np.cumsum(counts).astype(np.int64)
        made, at = [], 0
        for name, _, found in splits:
            if name:
                made.append(Split(name, at, at + sum(found)))
            at += sum(found)
        groups = tuple(itertools.chain.from_iterable(names for _, names, _ in splits))
        return RowScan(
            self.rows,
            self.layout.fields,
            groups,
            ends,
            tuple(self._labelled(self._stamp(int(end) - n, int(end), stats)) for end, n in zip(ends, counts, strict=True)),
            tuple(made),
            None if self._label is None else self._label.classes,
            tuple(self._said),
            dict(self._counts),
        )

    def _labelled(self, stamp: str) -> str:
        """A stamp that changes with what class numbers stand for, too."""
        reading = None if self._label is None else self._label.reading
        if not stamp or reading is None or (reading.categories is None and reading.numbers is None):
            return stamp
        return hash_bytes(canonical([stamp, [name_to_json(name) for name in reading.categories or ()], list(reading.numbers or ())]))

    def _stamp(self, start: int, stop: int, stats: Sequence[Stat]) -> str:
        """The stamp of the rows [start, stop): of what files they are read from, and which rows of these."""
        if self.order is not None:
            made = fresh_stamp({part.path: stat for part, stat in zip(self._parts, stats, strict=True)})
            return made and hash_bytes(canonical([made, start, stop]))
        parts = []
        for a, b in self.ranges.within(start, stop):
            for i, first, last in in_parts(self.starts, a, b):
                stamp = fresh_stamp({self._parts[i].path: stats[i]})
                if not stamp:
                    return ""
                parts.append([stamp, first, last])
        return hash_bytes(canonical(parts))


def _twice(column: str, count: int, first: str) -> str:
    return f"{show(column)} stands still in {count:,} rows: each has the value of the row before it in its group (the first: {first})"
