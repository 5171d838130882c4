"""Hides how rows that do not stand in the order in which they are wanted are had in it: once, through files in a folder for temporary ones.

What is in memory are at most the places of the rows, not the rows.  The files go with the object that made them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sealing import write_all
from mmcompile.errors import SourceError
from mmcompile.format.fields import Field

__all__ = ["Spool"]

#: Left free beside the rows, for others.
_SPARE_BYTES = 64 << 20


class Spool:
    """Rows of these fields, in the order `rows` (N,) of those that `batches` gives, or, where `rows` is their number, as they come.

    Whoever unpickles it reads the same files, which lie in `folder` (TMPDIR).
    """

    def __init__(
        self, fields: tuple[Field, ...], rows: npt.NDArray[np.int64] | int, batches: Iterable[dict[str, npt.NDArray[Any]]], folder: str | None = None
    ) -> None:
        """Raises SourceError where there is no room."""
        place = None
        if isinstance(rows, int):
            n = rows
        else:
            n, place = len(rows), np.empty(len(rows), np.int64)
            place[rows] = np.arange(n)
        need = sum(f.row_bytes for f in fields) * n
        self._fields, self._rows = fields, n
        base = folder or tempfile.gettempdir()
        free = shutil.disk_usage(base).free
        if need + _SPARE_BYTES > free:
            remedy = "set TMPDIR to a folder with more room, or give tables that are sorted already, or one for each group"
            raise SourceError(
                f"{base}: {need:,} bytes are needed to put {n:,} rows in order, {free:,} are free: {remedy if folder is None else 'free some space'}",
                path=base,
            )
        self._folder = tempfile.mkdtemp(prefix="mmcompile-", dir=base)
        self.remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
        if place is None:
            self._append(batches)
            return
        files = {f.name: self._map(f, "w+") for f in fields}
        at = 0
        for batch in batches:
            count = len(next(iter(batch.values())))
            for name, values in batch.items():
                files[name][place[at : at + count]] = values
            at += count

    def _append(self, batches: Iterable[dict[str, npt.NDArray[Any]]]) -> None:
        """Write rows down as they come."""
        with contextlib.ExitStack() as stack:
            files = {f.name: stack.enter_context(open(os.path.join(self._folder, f.name), "wb", buffering=0)) for f in self._fields}
            at = dict.fromkeys(files, 0)
            for batch in batches:
                for name, values in batch.items():
                    view: Any = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                    write_all(files[name].fileno(), view, at[name])
                    at[name] += len(view)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "remove"}

    def _map(self, spec: Field, mode: Any) -> npt.NDArray[Any]:
        return np.memmap(os.path.join(self._folder, spec.name), spec.stored, mode, shape=(self._rows, *spec.shape))

    def read(self, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """The rows [start, stop), copies."""
        return {f.name: np.array(self._map(f, "r")[start:stop]) for f in self._fields}

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """These rows (M,), copies."""
        return {f.name: np.array(self._map(f, "r")[rows]) for f in self._fields}
