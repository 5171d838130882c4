"""Hides where sliding windows lie, and how they and their targets are read: rows in a row, never across the end of a group or of a split.

Nothing exists per window: which rows it has follows from how many windows the groups before have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mmcompile.format.index import Field
from mmcompile.format.reader import Reader
from mmcompile.runtime.arguments import column_of
from mmcompile.runtime.column import ClassColumn, Column, Memory
from mmcompile.runtime.numbers import signed
from mmcompile.runtime.seeding import stream_key
from mmcompile.runtime.selection import Selection, whole

__all__ = ["Windows"]

Rows = npt.NDArray[np.int64]

#: What a target is called in a dict, behind its field's name, where the field comes as a window too.
_TARGET = "_target"


@dataclass(frozen=True)
class Windows:
    """What was asked of `MMapShardDataset.windows`: checked, and as it travels to workers.  Raises ValueError."""

    length: int
    stride: int
    horizon: int | None
    target: str | tuple[str, ...] | None

    @classmethod
    def of(cls, length: Any, stride: Any, horizon: Any, target: Any) -> Windows:
        if (horizon is None) != (target is None):
            raise ValueError("horizon= and target= go together: how far after a window, and which fields or columns")
        names = target if target is None or isinstance(target, str) else tuple(target) if isinstance(target, Iterable) else ()
        if names is not None and (not names or not all(isinstance(name, str) for name in (names if isinstance(names, tuple) else ()))):
            raise ValueError(f"target is the name of a field or column, or a list of such names, not {target!r}")
        ahead = None if horizon is None else whole("horizon", horizon, 0)
        return cls(whole("length", length, 1), whole("stride", stride, 1), ahead, names)

    @property
    def reach(self) -> int:
        """The last row that a window and its target need, from its first."""
        return self.length - 1 + (self.horizon or 0)

    def selection(self, starts: Rows, bounds: Rows, first: int, stop: int, where: str) -> WindowSelection:
        """The windows in rows [first, stop): `starts` of groups and `bounds` of splits cut them."""
        edges = np.union1d(np.concatenate([starts, bounds]).clip(first, stop), [first, stop])
        found = WindowSelection(edges, self.length, self.stride, self.reach)
        if not len(found):
            longest = int(np.diff(edges).max(initial=0))
            ahead = "" if self.horizon is None else f" and a target {self.horizon:,} rows after it"
            raise ValueError(f"{where}: a window of {self.length:,} rows{ahead} fits into none of its groups, the longest has {longest:,} rows")
        return found

    def columns(self, columns: list[Column], reader: Reader, dtype: Any, crop: Any) -> list[Column]:
        """These columns as windows, then the targets in the order in which they were asked for; a target's field need not be one of these.

        `dtype` and `crop` as the columns were made with.
        """
        where = str(reader.root)
        _check_single(columns, where)
        if self.target is None or self.horizon is None:
            return [WindowColumn(column, self.length) for column in columns]
        of = {column.name: column for column in columns}
        known = {name: reader.origins.field(name) for name in of}
        names = (self.target,) if isinstance(self.target, str) else self.target
        if len(set(names)) != len(names):
            raise ValueError(f"{where}: target names one twice: {list(names)}")
        if strange := [name for name in names if name not in known and not _owners(name, known)]:
            others = {f.name: reader.origins.field(f.name) for f in reader.index.fields if f.name not in known}
            found = {name if name in others else owner: None for name in strange for owner in ([name] if name in others else _owners(name, others))}
            known |= {name: others[name] for name in found}
            of |= {name: column_of(reader, others[name], dtype, crop) for name in found}
            _check_single(of.values(), where)
        wanted: dict[tuple[str, bool], list[int]] = {}  # a field, are columns of it the target, and which
        owner: str | None = None
        for name in names:
            owners = _owners(name, known)
            if name in of:
                wanted[name, False] = []
            elif len(owners) == 1 and owner in (None, owners[0]):
                owner = owners[0]
                columns_of_it = known[owner].columns
                wanted.setdefault((owner, True), []).extend([] if columns_of_it is None else [columns_of_it.listed.index(name)])
            else:
                said = (
                    f"columns of the fields {[*owners, *([owner] if owner else [])]}, a target's are of one" if owners else "no field, and no column"
                )
                raise ValueError(f"{where}: target {name!r} names {said}; the fields are {list(of)}{_some_columns(known)}")
        within = {column.name for column in columns}
        if owner in within and not self.horizon:
            raise ValueError(f"{where}: with horizon=0 the target's columns {names} would be in the window: pass horizon= at least 1")
        alone = [n for n, some in wanted if not some and (n not in within or isinstance(of[n], ClassColumn) or not self.horizon)]
        out: list[Column] = [WindowColumn(column, self.length) for column in columns if column.name not in alone]
        if not out:
            raise ValueError(f"{where}: all fields in use, {list(within)}, are targets; a window needs at least one other")
        for (name, some), picked in wanted.items():
            pick = None if not some else picked[0] if isinstance(self.target, str) else picked
            out.append(TargetColumn(of[name], self.reach, name if name in alone and not some else name + _TARGET, pick))
        called = [column.name for column in out]
        if twice := next((name for name in called if called.count(name) > 1), None):
            raise ValueError(f"{where}: two values of a sample would have one name, {twice!r}, of {called}: leave one out of fields= or of target=")
        return out

    def offset(self, columns: Sequence[Column], field: str) -> int | None:
        """The row of a field, from a window's first, that is the window's target; None where there is none."""
        found = any(isinstance(column, TargetColumn) and column.field == field for column in columns)
        return self.reach if found else None

    def needed(self, rows: Rows) -> Selection:
        """All rows of the windows that begin at these rising rows, and of their targets."""
        if not len(rows):
            return Selection(0, 0)
        width = self.reach + 1
        begins = rows[np.append(True, np.diff(rows) > width)]
        ends = np.append(rows[np.searchsorted(rows, begins[1:]) - 1], rows[-1]) + width
        sizes = ends - begins
        shift = np.repeat(begins - np.append(0, np.cumsum(sizes)[:-1]), sizes)
        return Selection(0, 0, np.arange(int(sizes.sum())) + shift)

    def part(self, rows: str | None, n: int) -> str:
        """Which windows these are, of which rows, for a state to be told apart from one of others."""
        known = stream_key(int(rows or "0", 16), self.length, n)
        return f"{stream_key(known, self.stride, self.reach):016x}"


class WindowSelection(Selection):
    """The first rows of all windows of `length` rows whose `reach` stays within two of `edges`, each `stride` rows after the one before.

    O(1) memory for each range between edges; windows are numbered in the order of their rows.
    """

    def __init__(self, edges: Rows, length: int, stride: int, reach: int) -> None:
        longest = int(np.diff(edges).max(initial=0))
        reach, stride = min(reach, longest), min(stride, max(1, longest))  # numbers beyond do the same, and int64 may not hold them
        counts = np.maximum(0, np.diff(edges) - reach - 1 + stride) // stride
        some = counts > 0
        self._begins, self._counts, self._stride, self._edges = edges[:-1][some], counts[some], stride, (int(edges[0]), int(edges[-1]))
        #: The first window of each range, then their number.
        self._firsts = np.append(0, np.cumsum(self._counts))
        self._lists = memoryview(cast(Any, self._firsts)), memoryview(cast(Any, np.ascontiguousarray(self._begins)))
        super().__init__(0, int(self._firsts[-1]))

    def row(self, sample: int) -> int:
        at = sample + self._n if sample < 0 else sample
        if not 0 <= at < self._n:
            raise IndexError(f"sample {int(sample)} is out of range: there are {self._n:,} windows")
        firsts, begins = self._lists  # `bisect` takes them as it takes lists, and for one window costs a fraction of what numpy does
        group = bisect_right(firsts, at) - 1
        found: int = begins[group] + (at - firsts[group]) * self._stride
        return found

    def rows(self, samples: Rows) -> Rows:
        group = np.searchsorted(self._firsts, samples, side="right") - 1
        found: Rows = self._begins[group] + (samples - self._firsts[group]) * self._stride
        return found

    def find(self, row: int) -> int:
        group = int(np.searchsorted(self._begins, row, side="right")) - 1
        number, off = divmod(row - int(self._begins[group]), self._stride) if group >= 0 else (0, 1)
        return int(self._firsts[group]) + number if not off and number < self._counts[group] else -1

    def blocks(self, starts: Rows) -> Rows:
        group = np.searchsorted(self._begins, starts, side="right") - 1
        within = -(-(starts - self._begins[group.clip(0)]) // self._stride)
        cuts = np.where(group < 0, 0, self._firsts[group.clip(0)] + np.minimum(within, self._counts[group.clip(0)]))
        return np.unique(np.concatenate([[0], cuts, [self._n]])).astype(np.int64)

    def part(self, total: int) -> str | None:
        return f"{stream_key(*self._edges, total):016x}"

    def ascending(self) -> Selection:
        """All rows between the edges, which windows are of."""
        return Selection(self._edges[0], self._edges[1] - self._edges[0])


class WindowColumn(Column):
    """A field read as windows: samples (T, *shape), views of the map within a shard, and batches (N, T, *shape) by their first rows."""

    def __init__(self, base: Column, length: int) -> None:
        self.__dict__.update(base.__dict__)
        self._base, self._length = base, length
        self.shape = (length, *base.shape)

    @property
    def base(self) -> Column:
        return self._base

    def sample(self, row: int, shard: int, local: int) -> Any:
        if not self._reader.holds(shard, local + self._length - 1):
            return self.own(row)
        if not self._mapped or not self._numbers.given:
            return super().sample(row, shard, local)
        rows = self._held.get(shard)
        if rows is None:
            rows = self._hold(shard)
        return rows[local : local + self._length]

    def needed(self, rows: Rows) -> Rows:
        return (rows[:, None] + np.arange(self._length)).reshape(-1)

    def shaped(self, needed: Tensor) -> Tensor:
        return needed.reshape(len(needed) // self._length, self._length, *needed.shape[1:])

    def _stored(self, shard: int, local: int) -> Any:
        return self._reader.view(self.field, shard)[None, local : local + self._length]

    def _fill(self, raw: Any, out: Any) -> None:
        self._numbers.fill(raw.reshape(-1, *raw.shape[2:]), out.reshape(-1, *out.shape[2:]))

    def _gather(self, rows: Rows, cut: Any, out: Any) -> None:
        if self._region:
            self._reader.gather(self.field, self.needed(rows), out=out.reshape(-1, *out.shape[2:]), region=self._region)
        else:
            self._reader.spans(self.field, rows, self._length, out)


class TargetColumn(Column):
    """A field at a fixed distance after a window's first row, or some columns of it: `pick`, one number for a value of no axis."""

    def __init__(self, base: Column, offset: int, name: str, pick: Any) -> None:
        self.__dict__.update(base.__dict__)
        self._base, self._offset, self.name, self._pick = base, offset, name, pick
        self.text = base.text
        if pick is not None:
            self.shape = (len(pick),) if isinstance(pick, list) else ()

    @property
    def base(self) -> Column:
        return self._base

    def sample(self, row: int, shard: int, local: int) -> Any:
        at = row + self._offset
        return self._picked(self._base.sample(at, *self._reader.locate(at)))

    def own(self, row: int) -> Any:
        return self._picked(self._base.own(row + self._offset))

    def samples(self, batch: Tensor) -> Sequence[Any]:
        return self._base.samples(batch)

    def needed(self, rows: Rows) -> Rows:
        return rows + self._offset

    def empty(self, n: int, memory: Memory | None = None, *, size: tuple[int, ...] | None = None, raw: bool = False) -> Tensor:
        return self._base.empty(n, memory, raw=True) if raw else super().empty(n, memory)

    def batch(self, rows: Rows, out: Tensor | None = None, *, cut: Any = None, raw: bool = False, times: Any = None) -> Tensor:
        if raw or self._pick is None:
            return self._base.batch(rows + self._offset, out, raw=raw, times=times)
        found = self._picked(self._base.batch(rows + self._offset, times=times))
        return found if out is None else out.copy_(found)

    def numbers(self, raw: Tensor) -> Tensor:
        picked: Tensor = self._picked(self._base.numbers(raw))
        return picked

    def _picked(self, values: Any) -> Any:
        if not isinstance(self._pick, list):
            return values if self._pick is None else values[..., self._pick]
        return signed(values)[..., self._pick].view(values.dtype)


def _owners(name: str, known: dict[str, Field]) -> list[str]:
    """The fields that have a column of this name."""
    return [field for field, spec in known.items() if spec.columns is not None and name in spec.columns.listed]


def _check_single(columns: Iterable[Column], where: str) -> None:
    """ValueError for what is of single rows: what moves with a picture, and what has variants to choose from."""
    if viewed := [f"{column.name} ({column.views} variants)" for column in columns if column.views is not None]:
        raise ValueError(f"{where}: windows are of rows in a row that are one each, not of {', '.join(viewed)}: leave them out with fields=")
    if moved := [f"{column.name} ({column.meaning})" for column in columns if column.meaning in ("mask", "boxes", "keypoints")]:
        raise ValueError(f"{where}: windows are of pictures and values, not of {', '.join(moved)}: leave them out with fields=")


def _some_columns(known: dict[str, Field]) -> str:
    """The columns that there are, for a message."""
    names = [name for spec in known.values() if spec.columns is not None for name in spec.columns.listed]
    return "" if not names else f", their columns {names[:20]}" + (" …" if len(names) > 20 else "")
