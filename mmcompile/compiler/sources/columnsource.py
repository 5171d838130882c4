"""Hides how arrays that stand beside each other become rows: each a field, read in slices, whichever library they are of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.arrays import Rows, as_stored, count_classes
from mmcompile.compiler.sources.declaring import field_of
from mmcompile.compiler.sources.known import check_classes, class_names
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.compiler.sources.samplevalues import as_array
from mmcompile.errors import SourceError
from mmcompile.format.fields import Field, Split

__all__ = ["ColumnSource"]

Array = npt.NDArray[Any]


class ColumnSource:
    """Arrays of one length, each a field, by split ("": there are none): numpy's, tensors, those of HDF5 or Zarr.  Read in slices."""

    root = ""

    def __init__(self, splits: Mapping[str, Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> None:
        self._splits = {split: dict(columns) for split, columns in splits.items()}
        self._fields: dict[str, Field] = {}
        rows, first = [], next(iter(self._splits))
        for split, columns in self._splits.items():
            where = f"split {split}: " if split else ""
            lengths = {name: int(column.shape[0]) for name, column in columns.items()}
            if len(set(lengths.values())) > 1:
                shown = ", ".join(f"{name} {n:,}" for name, n in lengths.items())
                raise SourceError(f"{where}arrays of different lengths: {shown}; expected one row of each")
            rows.append(next(iter(lengths.values())))
            fields = _column_fields(columns, names)
            self._fields = self._fields or fields
            if fields != self._fields:
                shown = " and ".join(
                    f"{', '.join(f'{name} {spec.dtype} {spec.shape}' for name, spec in found.items())} in split {which}"
                    for which, found in ((first, self._fields), (split, fields))
                )
                raise SourceError(f"{shown}: expected the same in all splits")
        self._stops = np.cumsum(rows).astype(np.int64)
        self._classes = class_names(list(self._fields.values()), names)

    def identity(self) -> dict[str, object]:
        return {"kind": "dataset"}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """What the arrays say of themselves; class numbers without names are looked at."""
        classes = self._classes
        starts = [0, *self._stops.tolist()]
        for name, spec in self._fields.items():
            if spec.meaning == "class" and classes is None and starts[-1]:
                parts = zip(self._splits.items(), itertools.pairwise(starts), strict=True)
                most = [
                    count_classes(_reader(columns[name], name), stop - start, f"{name} of split {split}" if split else name, "give them another name")
                    for (split, columns), (start, stop) in parts
                    if stop > start
                ]
                classes = tuple(str(i) for i in range(max(most)))
        splits = tuple(Split(split, *edge) for split, edge in zip(self._splits, itertools.pairwise(starts), strict=True))
        named = splits if set(self._splits) != {""} else ()
        empty = ("",) * len(splits)
        return RowScan(starts[-1], tuple(self._fields.values()), empty, self._stops, empty, named, classes=classes)

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop), a slice of each array."""
        found = []
        for columns, first, last in zip(self._splits.values(), [0, *self._stops.tolist()], self._stops.tolist(), strict=False):
            a, b = max(start, first), min(stop, last)
            if a < b:
                found.append(self._stored(columns, slice(a - first, b - first), range(a, b)))
        return found[0] if len(found) == 1 else {spec.name: np.concatenate([part[spec.name] for part in found]) for spec in self._fields.values()}

    @property
    def by_index(self) -> bool:
        """Do they lie in memory, or in a map of it?"""
        arrays = [column for columns in self._splits.values() for column in columns.values()]
        return all(type(column).__module__.partition(".")[0] in ("numpy", "torch") for column in arrays)

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, Array]:
        """These rows (M,)."""
        if len(self._splits) == 1:
            return self._stored(next(iter(self._splits.values())), rows, rows)
        out = {spec.name: np.empty((len(rows), *spec.shape), spec.stored) for spec in self._fields.values()}
        which = np.searchsorted(self._stops, rows, side="right")
        for number, (columns, first) in enumerate(zip(self._splits.values(), [0, *self._stops.tolist()], strict=False)):
            here = np.flatnonzero(which == number)
            if len(here):
                for name, values in self._stored(columns, rows[here] - first, rows[here]).items():
                    out[name][here] = values
        return out

    def _stored(self, columns: Mapping[str, Any], which: Any, rows: Rows) -> dict[str, Array]:
        found = {spec.name: as_stored(as_array(columns[name][which], name), spec, rows=rows) for name, spec in self._fields.items()}
        check_classes(found, self._fields.values(), self._classes, rows)
        return found


def _reader(column: Any, name: str) -> Callable[[int, int], Array]:
    return lambda start, stop: as_array(column[start:stop], name)


def _column_fields(columns: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Field]:
    """The field that each array becomes, by its name.  Raises SourceError."""
    out: dict[str, Field] = {}
    for name, column in columns.items():
        empty = as_array(column[:0], name)
        spec = field_of(name, np.empty(empty.shape[1:], empty.dtype), str(column.dtype) == "torch.bfloat16", names)
        if other := next((known for known, f in out.items() if f.name == spec.name), None):
            raise SourceError(f"{other} and {name}: both are the field {spec.name}; rename one")
        out[name] = spec
    return out
