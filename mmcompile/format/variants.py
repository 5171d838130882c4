"""Hides that fields with views hold several variants of a sample in a row: here each variant is a row of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.format.reader import Reader
from mmcompile.format.region import Region

__all__ = ["Variants"]

Array = npt.NDArray[Any]


class Variants(Reader):
    """The fields with views of an open reader: row r * views + k is variant k of row r, of which alone the bytes are read."""

    def __init__(self, reader: Reader, views: int) -> None:
        self.__dict__.update(reader.__dict__)
        self._views = views
        self.starts = reader.starts * views
        self._bounds = memoryview(cast(Any, self.starts))
        self._fields = {f.name: replace(f, shape=f.shape[1:], views=None) for f in self.index.fields if f.views is not None}
        self._regions: dict[str, Region | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("variants are opened anew, with their reader")

    def __len__(self) -> int:
        return self.index.samples * self._views

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return self._apart(super()._read(name, dtype, (shape[0], self._views, *shape[1:])))

    def _map(self, field: str, shard: int) -> Array | None:
        found = super()._map(field, shard)
        return None if found is None else self._apart(found)

    def _mapped(self, field: str, shard: int) -> Array:
        return self._apart(super()._mapped(field, shard))

    def _apart(self, rows: Array) -> Array:
        return rows.reshape(-1, *rows.shape[2:])
