"""Hides which files of a dataset are open or mapped: on demand, checked when opened, the oldest let go beyond a limit, what is in use stays valid.

Thread-safe without a lock, which a fork could leave locked: each step is atomic, and what two threads open at once is opened twice.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, GenerationError
from mmcompile.format.index import Index
from mmcompile.format.npy import file_name, map_file, open_array, read_array, read_hashed
from mmcompile.format.samples import pair_hash

__all__ = ["File", "Opened", "keep"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")

#: Maps of single shards held at once.  With those of regions (24,000) well below the kernel's limit for a process, 65,530: others want some too.
_MAPS = 16_000


class File:
    """An open file that closes when its last user lets go of it, and where its data begin."""

    def __init__(self, fd: int, offset: int) -> None:
        self.fd, self.offset = fd, offset

    def __del__(self) -> None:
        os.close(self.fd)


class Opened:
    """The shard table of one generation, and the files that it names.  Raises GenerationError or CorruptShardError, as all its methods do."""

    def __init__(self, root: Path, index: Index, generation: str) -> None:
        self._root, self._generation, self._shards = root, generation, root / "shards"
        self._fields = {f.name: f for f in index.fields}
        self.maps: dict[tuple[str, int, bool], Array] = {}
        self.files: dict[tuple[str, int], File] = {}
        self.most_maps = _MAPS
        self.most_files = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        # every other file is found through it, so it alone is hashed when opened
        path = self._shards / file_name("table", index.table)
        self.table = self.use(path, lambda path: read_hashed(path, index.table_dtype(), (index.shards,), index.table))

    def path(self, name: str, shard: int) -> Path:
        """The file of a field (or of "samples", "keys") of a shard."""
        return self._shards / file_name(name, pair_hash(self.table[name][shard]))

    def map(self, field: str, shard: int, *, writable: bool = False) -> Array | None:
        """A shard's rows in a map of its own; None where the kernel grants none."""
        key = (field, shard, writable)
        found = self.maps.get(key)
        if found is not None:
            return found
        file, spec = self.open(field, shard), self._fields[field]
        shape = (int(self.table["rows"][shard]), *spec.shape)
        length = file.offset + shape[0] * spec.row_bytes
        try:
            mapped = map_file(file.fd, length, writable=writable)
        except OSError:  # no addresses, or no maps, are left: perhaps with fewer of ours
            self.maps.clear()
            try:
                mapped = map_file(file.fd, length, writable=writable)
            except OSError:
                return None
        return keep(self.maps, key, mapped[file.offset :].view(spec.stored).reshape(shape), self.most_maps)

    def file(self, field: str, shard: int) -> File:
        """A shard's open file, kept open."""
        found = self.files.get((field, shard))
        return found if found is not None else keep(self.files, (field, shard), self.open(field, shard), self.most_files)

    def open(self, field: str, shard: int) -> File:
        """A shard's open file, closed when it is let go of."""
        spec = self._fields[field]
        return self.open_path(self.path(field, shard), spec.stored, (int(self.table["rows"][shard]), *spec.shape))

    def open_path(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> File:
        """As `open`, of any file that holds such an array."""
        return self.use(path, lambda path: File(*open_array(path, dtype, shape)))

    def read(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A whole small array in memory of its own."""
        return self.use(path, lambda path: read_array(path, dtype, shape))

    def use(self, path: Path, action: Callable[[Path], _T]) -> _T:
        """What `action` makes of a file.  GenerationError or CorruptShardError where it is missing.

        Where descriptors run out those held here are let go, and it is tried once more: then an OSError with the remedy.
        """
        try:
            return self._not_missing(path, action)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self.files.clear()
        try:
            return self._not_missing(path, action)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            said = f"{error.strerror}: no more files can be opened; raise the limit (`ulimit -n`), or close some"
            raise OSError(error.errno, said, str(path)) from None

    def clear(self) -> None:
        """Let go of all; what others still hold stays valid."""
        self.maps.clear()
        self.files.clear()

    def _not_missing(self, path: Path, action: Callable[[Path], _T]) -> _T:
        try:
            return action(path)
        except FileNotFoundError:
            pass
        if not os.path.exists(self._root / "generations" / f"{self._generation}.json"):
            raise GenerationError(
                f"{path}: gone, as generation {self._generation} was pruned or removed; open the dataset anew",
                path=str(path),
                expected=self._generation,
            )
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {self._root} --repair RAW`", path=str(path))


def keep(held: dict[Any, _T], key: Any, value: _T, limit: int) -> _T:
    """Remember what was opened and drop the oldest beyond the limit.  Needs no lock (which a fork could leave locked): each step is atomic."""
    value = held.setdefault(key, value)
    while len(held) > limit:
        try:
            held.pop(next(iter(held)), None)
        except (StopIteration, RuntimeError):  # another thread was faster
            break
    return value
