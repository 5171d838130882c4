"""Hides which files of a dataset are open or mapped: on demand, checked when opened, the oldest let go beyond a limit, what is in use stays valid.

Thread-safe without a lock, which a fork could leave locked: each step is atomic, and what two threads open at once is opened twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, GenerationError
from mmcompile.format.files import Files
from mmcompile.format.index import Index
from mmcompile.format.npy import file_bytes, file_name, map_file, open_array, read_array, read_hashed
from mmcompile.format.samples import pair_hash

__all__ = ["File", "Opened", "Views", "keep"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")

#: Maps of single shards held at once.  With those of regions (24,000) well below the kernel's limit for a process, 65,530: others want some too.
_MAPS = 16_000
#: The part of a limit on the room of copies that one process holds open: as long as it does, nobody can let go of them, and it is not alone.
_PART = 4
#: Times that a copy may be removed by others between its being brought and its being opened.
_REMOVED = 3
#: Descriptors, and room on the disk of copies: what is let go here gives some back.
_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_ROOM = (errno.ENOSPC, errno.EDQUOT)


class File:
    """An open file that closes when its last user lets go of it, and where its data begin."""

    def __init__(self, fd: int, offset: int) -> None:
        self.fd, self.offset = fd, offset

    def __del__(self) -> None:
        os.close(self.fd)


class Views(dict[int, Any]):
    """What somebody made of the maps of shards, by shard: let go of with them."""


class Opened:
    """The shard table of one generation, and the files that it names.  Raises GenerationError or CorruptShardError, as all its methods do."""

    def __init__(self, files: Files, index: Index, generation: str) -> None:
        self._files, self._generation = files, generation
        self._fields = {f.name: f for f in index.fields}
        self.maps: dict[tuple[str, int, bool], Array] = {}
        self.files: dict[tuple[str, int], File] = {}
        self._views: weakref.WeakValueDictionary[int, Views] = weakref.WeakValueDictionary()
        self.most_maps = _MAPS
        self.most_files = max(16, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        # every other file is found through it, so it alone is hashed when opened
        dtype, shape = index.table_dtype(), (index.shards,)
        table = file_name("table", index.table)
        self.table = self.use(table, file_bytes(dtype, shape), lambda path: read_hashed(path, dtype, shape, index.table))
        #: Shards that are held open at once.
        self.most_shards = self.most_maps
        if files.most_bytes is not None:
            rows = int(self.table["rows"].max(initial=1))
            largest = sum(file_bytes(f.stored, (rows, *f.shape)) for f in index.fields)
            if largest > files.most_bytes:
                said = f"has a shard whose files take {largest:,} bytes, more than the {files.most_bytes:,} that the cache may hold"
                raise ValueError(f"{files.root}: {said}; give Cache a max_bytes= with room for several")
            self.most_shards = max(1, files.most_bytes // _PART // largest)
            self.most_maps = min(self.most_maps, self.most_shards * len(self._fields))
            self.most_files = min(self.most_files, self.most_maps)

    def name(self, name: str, shard: int) -> str:
        """The name in shards/ of the file of a field (or of "samples", "keys", "hashes") of a shard."""
        return file_name(name, pair_hash(self.table[name][shard]))

    def path(self, name: str, shard: int) -> Path:
        """Where that file lies while it is open."""
        return self._files.shards / self.name(name, shard)

    def nbytes(self, field: str, shard: int) -> int:
        """The size of a shard's file of a field."""
        spec = self._fields[field]
        return file_bytes(spec.stored, (int(self.table["rows"][shard]), *spec.shape))

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
        return self.open_name(self.name(field, shard), spec.stored, (int(self.table["rows"][shard]), *spec.shape))

    def open_name(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> File:
        """As `open`, of any file that holds such an array."""

        def action(path: Path) -> File:
            file = File(*open_array(path, dtype, shape))
            if self._files.far:  # as long as it, or a map of it, is open, it is seen to be in use
                fcntl.flock(file.fd, fcntl.LOCK_SH)
            return file

        return self.use(name, file_bytes(dtype, shape), action)

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A whole small array in memory of its own."""
        return self.use(name, file_bytes(dtype, shape), lambda path: read_array(path, dtype, shape))

    def use(self, name: str, nbytes: int | None, action: Callable[[Path], _T]) -> _T:
        """What `action` makes of a file of shards/.  GenerationError or CorruptShardError where it is missing.

        Where descriptors run out those held here are let go, and it is tried once more: then an OSError with the remedy.  So are maps that nobody
        else has a view of where copies have no room left.
        """
        try:
            return self._not_missing(name, nbytes, action)
        except OSError as error:
            if error.errno in _DESCRIPTORS:
                self.files.clear()
            elif error.errno in _ROOM and self._files.far:
                self.clear()
            else:
                raise
        try:
            return self._not_missing(name, nbytes, action)
        except OSError as error:
            if error.errno not in _DESCRIPTORS:
                raise
            said = f"{error.strerror}: no more files can be opened; raise the limit (`ulimit -n`), or close some"
            raise OSError(error.errno, said, str(self._files.shards / name)) from None

    def views(self) -> Views:
        """A place for views of maps."""
        made = Views()
        self._views[id(made)] = made
        return made

    def clear(self) -> None:
        """Let go of all; what others still hold stays valid."""
        for views in list(self._views.values()):
            views.clear()
        self.maps.clear()
        self.files.clear()

    def _not_missing(self, name: str, nbytes: int | None, action: Callable[[Path], _T]) -> _T:
        where, damaged, removed = f"{self._files.root}/shards/{name}", False, 0
        while True:
            found = False
            try:
                with self._files.held(name, nbytes) as path:
                    found = self._files.far
                    return action(path)
            except CorruptShardError as error:
                if not found:
                    raise
                if damaged:
                    said = str(error).replace(str(self._files.shards.parent), str(self._files.root))  # no copy is at fault, twice
                    raise CorruptShardError(said, **{**error.details, "path": where}) from error
                self._files.replace(name)
                damaged = True
            except FileNotFoundError:
                if not found:
                    break
                removed += 1
                if removed == _REMOVED:
                    said = f"the copy of {where} was removed {removed} times while it was being opened"
                    raise OSError(errno.ESTALE, said, str(self._files.shards.parent)) from None
        root = self._files.root
        if not self._files.kept(self._generation):
            raise GenerationError(
                f"{where}: gone, as generation {self._generation} was pruned or removed; open the dataset anew", path=where, expected=self._generation
            )
        raise CorruptShardError(f"{where}: missing; run `mmcompile verify {root}`, which says how to mend it", path=where)


def keep(held: dict[Any, _T], key: Any, value: _T, limit: int) -> _T:
    """Remember what was opened and drop the oldest beyond the limit.  Needs no lock (which a fork could leave locked): each step is atomic."""
    value = held.setdefault(key, value)
    while len(held) > limit:
        try:
            held.pop(next(iter(held)), None)
        except (StopIteration, RuntimeError):  # another thread was faster
            break
    return value
