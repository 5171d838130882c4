"""Hides where a row lies: (shard, row) behind one range [0, n), mapped or read, opened on demand.

A Reader writes nothing and shares nothing.  It pickles as path + generation, so that a worker opens exactly what its parent had open; after a fork
it goes on with the maps that it has.  Thread-safe.  Opening costs O(shards), in numpy; a shard is opened, and its size and header are checked, when a
row of it is first asked for.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.files import Files, LocalFiles, is_remote
from mmcompile.format.index import Index
from mmcompile.format.npy import ALIGN, file_name, read_into
from mmcompile.format.opened import File, Opened, Views
from mmcompile.format.origins import Origins
from mmcompile.format.region import Region, is_resident, lock, page_runs, will_need
from mmcompile.format.runs import Slices, runs_of

__all__ = ["Reader", "shard_starts"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: Bytes read at a time to warm the page cache: far above what a disk wants at once, and little enough to answer `stop` at once.
_PIECE = 4 << 20
#: Spans of rows are copied so many bytes at a time, by way of the cache; larger ones one by one.
_SPAN = 1 << 16


def shard_starts(table: Array, index: Index, path: Path) -> npt.NDArray[np.int64]:
    """First row of each shard, then the number of samples: (shards + 1,).  CorruptShardError where the table and the index disagree."""
    rows = table["rows"]
    total = (int((rows >> np.uint64(32)).sum()) << 32) + int((rows & np.uint64(0xFFFFFFFF)).sum())  # exact, where a plain sum could wrap around
    if total != index.samples or (rows.size and rows.min() < 1):
        raise CorruptShardError(
            f"{path}: its rows sum up to {total:,}, the index says {index.samples:,} in {index.shards:,} shards of at least 1", path=str(path)
        )
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, out=starts[1:])
    return starts


class Reader:
    """The rows of one generation of a dataset.

    `engine`: "mmap", "pread", or "auto": mmap where the file system is local.  Raises NotADatasetError, GenerationError, VersionError, FormatError.
    """

    def __init__(self, root: str | Path | Files, *, generation: str | None = None, engine: str = "auto") -> None:
        if engine not in ("auto", "mmap", "pread"):
            raise ValueError(f"engine must be 'auto', 'mmap' or 'pread', not {engine!r}")
        self._files: Files = LocalFiles(root) if isinstance(root, str | Path) else root
        self.root = self._files.root
        self.index, self.generation = self._files.load(generation)
        self._asked = engine
        self.engine = engine if engine != "auto" else ("pread" if is_remote(self._files.shards.parent) else "mmap")
        self._opened = Opened(self._files, self.index, self.generation)
        self.table = self._opened.table
        #: First row of each shard, then the number of samples: int64 (shards + 1,).
        self.starts = shard_starts(self.table, self.index, self._files.shards / file_name("table", self.index.table))
        self._bounds = memoryview(cast(Any, self.starts))  # bisect takes it as it takes a list, and no int is made for a shard nobody asks for
        self._fields = {f.name: f for f in self.index.fields}
        self._regions: dict[str, Region | None] = {}
        #: Where rows come from, and what is called what.
        self.origins = Origins(self._files, self._opened, self.index, self.starts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._files, self.generation, self._asked)

    def __len__(self) -> int:
        return self.index.samples

    def locate(self, row: int) -> tuple[int, int]:
        """(shard, row in it) of a row in [0, n)."""
        shard = bisect_right(self._bounds, row) - 1
        return shard, row - self._bounds[shard]

    def holds(self, shard: int, local: int) -> bool:
        """Has a shard so many rows that this is one of them?"""
        return bool(self._bounds[shard] + local < self._bounds[shard + 1])

    def path(self, name: str, shard: int) -> Path:
        """The file of a field (or of "samples", "keys", "hashes") of a shard."""
        return self._opened.path(name, shard)

    def view(self, field: str, shard: int) -> Array:
        """A shard's rows of a field, (rows, *shape) as they lie on disk: a copy-on-write map (with engine "pread" a copy in memory).

        A write to it stays in this process and is seen by its later views.  Raises OSError where the kernel grants no map.
        """
        if self.engine == "pread":
            spec = self._fields[field]
            return self._read(self._opened.name(field, shard), spec.stored, (int(self.table["rows"][shard]), *spec.shape))
        return self._mapped(field, shard)

    def row(self, field: str, row: int) -> Array:
        """One row: a view of the copy-on-write map, or with engine "pread" a copy of one's own."""
        shard, local = self.locate(row)
        if self.engine == "mmap":
            return np.asarray(self._mapped(field, shard)[local])
        spec = self._fields[field]
        self.ready(field, row)
        out = np.empty(spec.shape, spec.stored)
        self._pread(field, shard, local, out.reshape((1, *spec.shape)))
        return out

    def ready(self, field: str, row: int) -> None:
        """Open the shard of a row: its size is checked before anybody allocates what the index claims."""
        if self.flat(field, np.array([row], np.int64)) is None:
            shard, _ = self.locate(row)
            if self._map(field, shard) is None:
                self._opened.file(field, shard)

    def flat(self, field: str, rows: Rows) -> tuple[Array, Rows] | None:
        """One read-only array over all shards of a field, and the row of it that each of these rows is: (rows and gaps, *shape), int64 (N,).

        No other row of the array may be touched: where no shard is mapped, that is a signal and not an exception.  None with engine "pread", and
        where the kernel grants no map or the shards are too many.
        """
        rows, region = self._checked(rows), self._region(field)
        if region is None:
            return None
        at, missing = region.find(rows)
        for shard in missing:
            file = self._opened.open(field, shard)
            if not region.place(shard, file.fd, file.offset):
                return None
        return region.flat, at

    def gather(self, field: str, rows: Rows, out: Array | None = None, region: Slices = ()) -> Array:
        """Copy rows, in the order asked, into `out` (N, *shape), C-contiguous (a new array when None).  Never from a copy-on-write map.

        `region` holds one slice of step 1 for each axis of a row as it lies on disk: only that part is read, and `out` has its shape.  Releases the
        interpreter while it copies.  Raises IndexError for a row outside [0, n), and what opening a shard raises.
        """
        spec = self._fields[field]
        rows = np.asarray(rows, np.int64)
        found = self.flat(field, rows)
        if out is None:
            if found is None and len(rows):
                self.ready(field, int(rows[0]))
            part = tuple(len(range(n)[cut]) for n, cut in zip(spec.shape, region, strict=True)) if region else spec.shape
            out = np.empty((len(rows), *part), spec.stored)
        if found is None:
            self._gather_apart(field, rows, out, region)
        elif region:
            cut = found[0][(slice(None), *region)]
            for i, at in enumerate(found[1].tolist()):
                out[i] = cut[at]
        else:
            np.take(found[0], found[1], axis=0, out=out, mode="clip")
        return out

    def spans(self, field: str, rows: Rows, length: int, out: Array) -> None:
        """Copy the `length` rows that begin at each of these into `out` (N, length, *shape), C-contiguous.  Raises as `gather`."""
        ends = self._checked(rows + (length - 1))
        found = self.flat(field, rows)
        nbytes = length * self._fields[field].row_bytes
        if found is None or nbytes > _SPAN:
            self._spans_apart(field, rows, np.arange(len(rows)), out)
            return
        # each span as one element of an array whose elements overlap
        flat, at = found
        kind = np.dtype(f"V{nbytes}")
        spans = np.ndarray((max(0, len(flat) - length + 1),), kind, cast(Any, flat), 0, (nbytes // length,))
        target = out.reshape(-1).view(np.uint8).view(kind)
        apart = ends >= self.starts[self.shards_of(rows) + 1]
        if apart.any():
            at = np.where(apart, at[np.argmin(apart)], at)  # any other one that can be touched
        if not apart.all():
            step = max(1, _SPAN // nbytes)  # what comes between stays in the cache, and in memory that was used before
            for i in range(0, len(at), step):
                target[i : i + step] = spans[at[i : i + step]]
        self._spans_apart(field, rows, np.flatnonzero(apart), out)

    def _spans_apart(self, field: str, rows: Rows, which: Rows, out: Array) -> None:
        """Those of the spans one by one, of as many shards as each lies in; in rising order, where not all shards can be held."""
        which = which[np.argsort(rows[which], kind="stable")]
        for i, first in zip(which.tolist(), rows[which].tolist(), strict=True):
            done = 0
            while done < out.shape[1]:
                shard, local = self.locate(first + done)
                count = min(out.shape[1] - done, int(self.starts[shard + 1]) - first - done)
                part, source = out[i, done : done + count], self._map(field, shard)
                if source is None:
                    self._pread(field, shard, local, part)
                else:
                    part[...] = source[local : local + count]
                done += count

    def _gather_apart(self, field: str, rows: Rows, out: Array, region: Slices) -> None:
        """Gather from a map for each shard, and read the rows of shards that are not mapped."""
        spec = self._fields[field]
        shards = self.shards_of(rows)
        local = rows - self.starts[shards]
        if not region and spec.row_bytes <= ALIGN and self.engine == "mmap":  # small rows: one call of numpy for all rows of a shard
            for shard in dict.fromkeys(shards.tolist()):
                where, source = np.flatnonzero(shards == shard), self._map(field, shard)
                if source is None:
                    for i in where.tolist():
                        self._pread(field, shard, int(local[i]), out[i : i + 1])
                else:
                    out[where] = source[local[where]]
            return
        order = np.argsort(shards, kind="stable")  # each shard once, where not all can be held
        for i, shard, at in zip(order.tolist(), shards[order].tolist(), local[order].tolist(), strict=True):
            source = self._map(field, shard)
            if source is not None:
                out[i] = source[at][region]
            elif region:
                self._pread_part(field, shard, at, region, out[i : i + 1][0])
            else:
                self._pread(field, shard, at, out[i : i + 1])

    def part(self, field: str, row: int, region: Slices, out: Array) -> None:
        """Copy that part of one row into `out`, of its shape, in whatever order that lies in memory.  Reads no other; raises as `gather`."""
        found = self.flat(field, np.array([row], np.int64))
        if found is not None:
            out[...] = found[0][int(found[1][0])][region]
            return
        shard, local = self.locate(row)
        source = self._map(field, shard)
        if source is not None:
            out[...] = source[local][region]
        else:
            self._pread_part(field, shard, local, region, out)

    def advise(self, field: str, rows: Rows, region: Slices = ()) -> None:
        """Tell the kernel that these rows will be read soon, or that part of each: it reads many at once while nobody waits.

        For cold data: warm rows cost a little.  Says nothing of a file that cannot be opened: `gather` will.
        """
        spec, rows = self._fields[field], self._here(field, self._checked(rows))
        runs = runs_of(spec.shape, spec.stored.itemsize, region)
        with suppress(FormatError, OSError):
            if self.engine == "mmap":
                addresses, _held = self._addresses(field, rows)
                will_need((addresses[:, None] + runs.offsets).reshape(-1), runs.nbytes)
                return
            shards = self.shards_of(rows)
            for shard in dict.fromkeys(shards.tolist()):
                file = self._opened.file(field, shard)
                begins = file.offset + (rows[shards == shard] - self.starts[shard]) * spec.row_bytes
                for begin, end in page_runs((begins[:, None] + runs.offsets).reshape(-1), runs.nbytes):
                    os.posix_fadvise(file.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def cold(self, field: str, rows: Rows, sample: int = 8, region: Slices = ()) -> bool:
        """Would reading these rows, or that part of each, wait for a disk?  Looks at `sample` of them, spread evenly.

        False also where the kernel does not tell: the file is another user's and may not be written (mmap), the file system cannot say (pread), or
        it cannot be opened, or has to be brought here first.
        """
        spec, rows = self._fields[field], self._checked(rows)
        if len(rows) > sample:
            rows = rows[np.arange(sample) * len(rows) // sample]
        rows, runs = self._here(field, rows), runs_of(spec.shape, spec.stored.itemsize, region)
        offsets = runs.offsets[:: max(1, (len(runs.offsets) - 1) // 2)]  # the first, one between, the last
        with suppress(FormatError, OSError):
            if self.engine == "mmap":
                addresses, _held = self._addresses(field, rows)
                return not all(is_resident(address, runs.nbytes) for address in (addresses[:, None] + offsets).reshape(-1).tolist())
            byte = bytearray(1)
            for row in rows.tolist():
                shard, local = self.locate(row)
                file = self._opened.file(field, shard)
                begins = file.offset + local * spec.row_bytes + offsets
                ends = np.array([0, runs.nbytes // 2, runs.nbytes - 1], np.int64)
                for at in (begins[:, None] + ends).reshape(-1).tolist():
                    try:
                        os.preadv(file.fd, [byte], at, os.RWF_NOWAIT)
                    except BlockingIOError:
                        return True
        return False

    def warm(self, fields: Sequence[str], rows: range, stop: Callable[[], bool], seen: Callable[[int], None]) -> None:
        """Read rows (a range of step 1) of these fields into the page cache, one descriptor and a few MiB at a time.

        `seen` is told the bytes of each piece: in all, those of the rows.  Ends early once `stop()` is true.  Raises as `gather`.
        """
        scratch = np.empty(_PIECE, np.uint8)
        for field in fields:
            width = self._fields[field].row_bytes
            row = rows.start
            while row < rows.stop:
                shard, local = self.locate(row)
                count = min(rows.stop, int(self.starts[shard + 1])) - row
                file = self._opened.open(field, shard)
                at, end = file.offset + local * width, file.offset + (local + count) * width
                while at < end:
                    if stop():
                        return
                    with suppress(OSError):  # advice
                        os.posix_fadvise(file.fd, at, min(2 * _PIECE, end - at), os.POSIX_FADV_WILLNEED)
                    piece = scratch[: min(_PIECE, end - at)]
                    read_into(file.fd, piece, at, self.path(field, shard))
                    at += len(piece)
                    seen(len(piece))
                row += count

    def lock(self, field: str, rows: range) -> bool:
        """Keep these rows (a range of step 1) in memory as long as this reader lives; False where the kernel does not let this user.

        What is locked is the page cache itself, of which all processes share one copy.  False too for files that may go again.
        """
        if self._files.far:
            return False
        shards = range(self.locate(rows.start)[0], self.locate(rows.stop - 1)[0] + 1) if len(rows) else ()
        width = self._fields[field].row_bytes
        for shard in shards:
            start, stop = max(rows.start, int(self.starts[shard])), min(rows.stop, int(self.starts[shard + 1]))
            try:
                addresses, _held = self._addresses(field, np.array([start], np.int64))
            except OSError:
                return False
            if not lock(int(addresses[0]), (stop - start) * width):
                return False
        return True

    def reopened(self) -> Reader:
        """Another reader of the same generation, with maps of its own."""
        return _reopen(self._files, self.generation, self._asked)

    def coming(self, fields: Sequence[str], shards: Sequence[int]) -> None:
        """These shards will be read in this order: have as many of them as fit brought here in the background, and no others any more."""
        if self._files.far:
            self._files.ahead([(self._opened.name(field, shard), self._opened.nbytes(field, shard)) for shard in shards for field in fields])

    def shard_bytes(self, fields: Sequence[str], shard: int) -> int:
        """The size of a shard's files of these fields."""
        return sum(self._opened.nbytes(field, shard) for field in fields)

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many of the first files of these sizes can be here at once."""
        return self._files.fitting(sizes)

    @property
    def far(self) -> bool:
        """Do its files have to be brought here first?"""
        return self._files.far

    def views(self) -> Views:
        """A place for views of shards, by shard, which is emptied where they are in the way."""
        return self._opened.views()

    @property
    def most_shards(self) -> int:
        """Shards of which views may be kept."""
        return self._opened.most_shards

    @property
    def most_bytes(self) -> int | None:
        """What all files that are brought here can take; None: no limit."""
        return self._files.most_bytes

    def row_bytes(self, field: str) -> int:
        return self._fields[field].row_bytes

    def shards_of(self, rows: Rows) -> Rows:
        """The shard of each row: int64 (N,)."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def _here(self, field: str, rows: Rows) -> Rows:
        """Those of the rows whose files are here."""
        if not self._files.far or not len(rows):
            return rows
        shards = self.shards_of(rows)
        here = [shard for shard in np.unique(shards).tolist() if self._files.here(self._opened.name(field, shard))]
        return rows[np.isin(shards, here)]

    def _checked(self, rows: Rows) -> Rows:
        """These rows as int64.  Raises IndexError for one outside [0, n)."""
        rows = np.asarray(rows, np.int64)
        if len(rows) and int(rows.view(np.uint64).max()) >= len(self):  # a negative number is a large one there
            raise IndexError(f"rows from {rows.min():,} to {rows.max():,} of a dataset of {len(self):,}")
        return rows

    def _addresses(self, field: str, rows: Rows) -> tuple[Rows, object]:
        """Where in memory each row begins, and what keeps it mapped.  Raises OSError where a shard cannot be mapped."""
        width = self._fields[field].row_bytes
        found = self.flat(field, rows)
        if found is not None:
            return found[0].ctypes.data + found[1] * width, found[0]
        shards = self.shards_of(rows)
        maps = {shard: self._map(field, shard) for shard in dict.fromkeys(shards.tolist())}
        if any(m is None for m in maps.values()):
            raise OSError(f"{self.root}: not mapped")
        bases = np.array([cast(Any, maps[shard]).ctypes.data for shard in shards.tolist()], np.int64)
        return bases + (rows - self.starts[shards]) * width, maps

    def _region(self, field: str) -> Region | None:
        try:
            return self._regions[field]
        except KeyError:
            pass
        spec, made = self._fields[field], None
        if self.engine == "mmap" and len(self) and not self._files.far:
            with suppress(OSError):
                made = Region(self.starts, spec.stored, spec.shape)
        return self._regions.setdefault(field, made)

    def column(self, field: str) -> Array:
        """All rows of a field as one array in memory: for labels and other small fields."""
        spec = self._fields[field]
        self.coming([field], range(len(self.table)))
        parts = [self._read(self._opened.name(field, k), spec.stored, (int(n), *spec.shape)) for k, n in enumerate(self.table["rows"])]
        return np.concatenate(parts) if parts else np.empty((0, *spec.shape), spec.stored)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names, or None for a dataset without labels."""
        return self.origins.classes

    def samples(self, shard: int) -> Array:
        """The provenance of a shard's rows: a structured array, see `samples.sample_dtype`."""
        return self.origins.samples(shard)

    def keys(self, shard: int) -> list[bytes]:
        """The source keys of a shard's rows, as raw bytes."""
        return self.origins.keys(shard)

    def key(self, row: int) -> bytes:
        """The source key of one row."""
        return self.origins.key(row)

    def find(self, key: bytes, secret: bytes | None = None) -> int:
        """The row of a source key.  Raises as `Origins.find`."""
        return self.origins.find(key, secret)

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return self._opened.read(name, dtype, shape)

    def _map(self, field: str, shard: int) -> Array | None:
        """A shard's rows in a map of its own; None with engine "pread", or where the kernel grants no map."""
        return self._opened.map(field, shard) if self.engine == "mmap" else None

    def _mapped(self, field: str, shard: int) -> Array:
        """A shard's rows in the copy-on-write map."""
        found = self._opened.map(field, shard, writable=True)
        if found is None:
            said = "the kernel grants no map of it (`ulimit -v`, vm.max_map_count); open the dataset with engine='pread'"
            raise OSError(errno.ENOMEM, said, str(self.path(field, shard)))
        return found

    def _pread(self, field: str, shard: int, local: int, out: Array) -> None:
        """Read rows of a shard, from this one on, into a C-contiguous array."""
        at = local * self._fields[field].row_bytes
        self._with_file(field, shard, lambda file, path: read_into(file.fd, out, file.offset + at, path))

    def _pread_part(self, field: str, shard: int, local: int, region: Slices, out: Array) -> None:
        """Read that part of a row of a shard, run by run."""
        spec = self._fields[field]
        runs = runs_of(spec.shape, spec.stored.itemsize, region)
        read = np.empty(runs.nbytes, np.uint8)
        values = np.ndarray(runs.shape, spec.stored, cast(Any, read), 0, runs.strides)

        def read_all(file: File, path: Path) -> None:
            at = file.offset + local * spec.row_bytes
            for place, offset in zip(np.ndindex(out.shape[: out.ndim - len(runs.shape)]), runs.offsets.tolist(), strict=False):
                read_into(file.fd, read, at + offset, path)
                out[place] = values

        self._with_file(field, shard, read_all)

    def _with_file(self, field: str, shard: int, read: Callable[[File, Path], None]) -> None:
        """Read from the open file of a shard; of a copy that was cut since once more, brought anew."""
        path, file = self.path(field, shard), self._opened.file(field, shard)
        try:
            return read(file, path)
        except CorruptShardError:
            if not self._files.far:
                raise
        self._opened.files.pop((field, shard), None)
        read(self._opened.file(field, shard), path)

    def close(self) -> None:
        """Drop all maps and descriptors; views that are still held stay valid, and the Reader can be used on."""
        self._regions.clear()
        self._opened.clear()


def _reopen(files: Files, generation: str, engine: str) -> Reader:
    return Reader(files, generation=generation, engine=engine)
