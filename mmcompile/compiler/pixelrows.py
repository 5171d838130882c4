"""Hides that the pixels of a sample may be of several fields: each lies in a file of its own, and what is done to a row is done to all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sealing import begin_writing, rows_path, write_all
from mmcompile.format.index import Field
from mmcompile.format.npy import ALIGN

__all__ = ["PixelRows", "Unfinished"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PixelRows:
    """Rows of the pixel fields of n samples: an array (n, *shape) for each field, in their order."""

    arrays: tuple[Array, ...]

    @classmethod
    def empty(cls, fields: tuple[Field, ...], n: int) -> PixelRows:
        return cls(tuple(np.empty((n, *f.shape), f.stored) for f in fields))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, part: slice) -> PixelRows:
        return PixelRows(tuple(array[part] for array in self.arrays))

    def take(self, other: PixelRows) -> None:
        """Be what `other`, as many rows, is."""
        for mine, its in zip(self.arrays, other.arrays, strict=True):
            mine[...] = its

    def states(self) -> Iterator[Any]:
        """The xxh3-64 of the bytes of each row, to which those of its other fields can be added."""
        flat = [array.reshape(len(array), -1).view(np.uint8) for array in self.arrays]
        for i in range(len(self)):
            state = xxhash.xxh3_64(flat[0][i])
            for view in flat[1:]:
                state.update(view[i])
            yield state


class Unfinished:
    """The files of a shard that are being filled, one for each pixel field, whose rows stand from ALIGN on."""

    def __init__(self, scratch: Path, task: str, fields: tuple[Field, ...]) -> None:
        self._row_bytes = [f.row_bytes for f in fields]
        self._files: list[int] = []
        for f in fields:
            self._files.append(os.open(rows_path(scratch, task, f.name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def write(self, rows: PixelRows, position: int) -> None:
        """Put rows where those from `position` on stand.  Raises OSError."""
        for fd, size, array in zip(self._files, self._row_bytes, rows.arrays, strict=True):
            write_all(fd, memoryview(array.reshape(-1).view(np.uint8)), ALIGN + position * size)  # type: ignore[arg-type]

    def close(self) -> None:
        """Let the kernel begin to bring what was written to the disk, and close the files."""
        for fd in self._files:
            begin_writing(fd)
            os.close(fd)
        self._files = []
