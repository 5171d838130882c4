"""Hides where the numbers of an array lie in a file: `.npy`, members of `.npz`, IDX and headerless files, plain or compressed, in any byte order.

Headers are read and held against the size of the file before anything is taken for true; rows are read with plain reads (a file that is cut meanwhile
is an exception, never a signal), as many as are asked for.  No pickle is ever loaded.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from stat import S_ISREG
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.names import show
from mmcompile.errors import SourceError

__all__ = ["Lies", "is_idx", "lies_in_idx", "lies_in_npy", "lies_in_npz", "lies_in_raw", "stat_of"]

#: What an IDX file says that its numbers are.
_IDX = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
#: Reads in one call for rows of an array in Fortran order, one for each number of a row.
_MOST_RUNS = 4096
#: A header of .npy longer than this (numpy's own limit) is no plain array's.
_HEADER_LIMIT = 10_000
_SKIP = 1 << 20
#: A disk reads a page at least, and a call costs as much.
_NEAR_BYTES = 4096
#: Bytes that are read at once for rows that lie close to each other.
_RUN_BYTES = 1 << 20
#: Deflate makes no more bytes of one than this.
_MOST_PACKED = 1040
#: What a damaged compressed file raises.
_DAMAGED = (EOFError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile, NotImplementedError)


@dataclass(frozen=True)
class Lies:
    """An array (shape[0] rows) in a file: from byte `offset` of the file, or of what `member` of a zip or (`member` "") a gzip file unpacks to.

    `stat` is that of the file when it was looked at: size, mtime_ns, ctime_ns, inode.
    """

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stat: tuple[int, int, int, int]
    fortran: bool = False
    member: str | None = None
    #: The member that these bytes of the file are, where it is stored as it is.
    within: str | None = None

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def named(self) -> str:
        """The file, and what of it, for people."""
        member = self.member or self.within
        return show(self.path) + (f" ({show(member)})" if member else "")

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The rows [start, stop), in this dtype and byte order.  Raises OSError, or SourceError where the file is not what it was."""
        if self.member is not None:
            out = np.empty((stop - start, *self.shape[1:]), self.dtype)
            _stream(self).into(out, self.offset + start * self.row_bytes, last=stop == self.shape[0])
            return out
        with self._opened() as fd:
            return self._rows(fd, start, stop)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stat_of(os.fstat(fd)) != self.stat:
                raise SourceError(f"{self.named}: changed after it was listed; run the same command again", path=self.path)
            yield fd
        finally:
            os.close(fd)

    def _rows(self, fd: int, start: int, stop: int) -> npt.NDArray[Any]:
        n = stop - start
        if not self.fortran:
            out = np.empty((n, *self.shape[1:]), self.dtype)
            _fill(fd, out, self.offset + start * self.row_bytes, self)
            return out
        out = np.empty((*self.shape[:0:-1], n), self.dtype)
        for i, run in enumerate(out.reshape(-1, n)):
            _fill(fd, run, self.offset + (i * self.shape[0] + start) * self.dtype.itemsize, self)
        return out.T

    @property
    def by_index(self) -> bool:
        """Does each row lie in one piece of the file?"""
        return self.member is None and not self.fortran

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows (M,) of an array that is `by_index`, in this order; those that lie close to each other are read at once."""
        order = np.argsort(rows, kind="stable")
        rising = rows[order]
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        cuts = (np.diff(rising) > _NEAR_BYTES // self.row_bytes) | (np.diff(rising // max(1, _RUN_BYTES // self.row_bytes)) > 0)
        with self._opened() as fd:
            for part in np.split(order, np.flatnonzero(cuts) + 1):
                first = int(rows[part[0]])
                out[part] = self._rows(fd, first, int(rows[part[-1]]) + 1)[rows[part] - first]
        return out


def _fill(fd: int, out: npt.NDArray[Any], offset: int, lies: Lies) -> None:
    view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise SourceError(f"{lies.named}: ends at byte {offset + done:,}, expected {offset + len(view):,} or more", path=lies.path)
        done += count


def stat_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """What tells an unchanged file."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


# ---------------------------------------------------------------- compressed files


class _Stream:
    """What a compressed file unpacks to, read forwards; going back begins anew."""

    def __init__(self, lies: Lies) -> None:
        self._lies, self._at = lies, 0
        self._file: IO[bytes] | None = None
        self._zip: zipfile.ZipFile | None = None

    def into(self, out: npt.NDArray[Any], offset: int, last: bool) -> None:
        """Fill an array from this byte on; with `last` nothing may follow."""
        try:
            if self._file is None or offset < self._at:
                self.close()
                self._open()
            file: Any = self._file
            while self._at < offset:
                self._at += len(self._some(file, min(_SKIP, offset - self._at)))
            view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            while view:
                part = self._some(file, min(_SKIP, len(view)))
                view[: len(part)] = part
                view, self._at = view[len(part) :], self._at + len(part)
            if last and file.read(1):
                raise SourceError(f"{self._lies.named}: holds more than the {self._lies.shape[0]:,} rows that it says", path=self._lies.path)
        except _DAMAGED as error:
            self.close()
            raise SourceError(f"{self._lies.named}: damaged (it cannot be unpacked: {_reason(error)})", path=self._lies.path) from error

    def _open(self) -> None:
        if stat_of(os.stat(self._lies.path)) != self._lies.stat:
            raise SourceError(f"{self._lies.named}: changed after it was listed; run the same command again", path=self._lies.path)
        self._at = 0
        if self._lies.member:
            self._zip = zipfile.ZipFile(self._lies.path)
            self._file = self._zip.open(self._lies.member)
        else:
            self._file = cast(IO[bytes], gzip.open(self._lies.path))  # noqa: SIM115 (kept between calls)

    def _some(self, file: IO[bytes], length: int) -> bytes:
        part = file.read(length)
        if not part:
            raise SourceError(f"{self._lies.named}: ends before its {self._lies.shape[0]:,} rows do", path=self._lies.path)
        return part

    def close(self) -> None:
        for file in (self._file, self._zip):
            if file is not None:
                file.close()
        self._file = self._zip = None


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


_streams: dict[tuple[str, str | None], _Stream] = {}
#: Arrays of one dataset that are unpacked side by side.
_MOST_STREAMS = 64


def _stream(lies: Lies) -> _Stream:
    key = lies.path, lies.member
    found = _streams.get(key)
    if found is None or found._lies != lies:
        if len(_streams) >= _MOST_STREAMS:
            _streams.pop(next(iter(_streams))).close()
        found = _streams[key] = _Stream(lies)
    return found


# ---------------------------------------------------------------- headers

#: (where the data begins, dtype, shape, Fortran order).
_Header = tuple[int, np.dtype[Any], tuple[int, ...], bool]


def _open_file(path: str) -> IO[bytes]:
    try:
        if not S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for a writer
            raise SourceError(f"{show(path)}: no regular file", path=path)
        file = open(path, "rb")  # noqa: SIM115 (closed by the caller)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{show(path)}: cannot be read ({error.strerror})", path=path) from error
    return file


def lies_in_npy(path: str, *, sample: bool = False) -> Lies:
    """The array of a .npy file; with `sample` all of it is one.  Raises SourceError for a file that is no whole array of plain numbers."""
    with _open_file(path) as file:
        stat = stat_of(os.fstat(file.fileno()))
        offset, dtype, shape, fortran = _npy_header(file, path, show(path))
        if not sample:
            return _checked((offset, dtype, shape, fortran), path, stat, stat[0], None)
        found = _checked((offset, dtype, (1, *shape), False), path, stat, stat[0], None)
        return replace(found, shape=shape, fortran=fortran)


def lies_in_npz(path: str) -> dict[str, Lies]:
    """The arrays of a .npz file by name.  Raises SourceError."""
    out: dict[str, Lies] = {}
    with _open_file(path) as file:
        stat = stat_of(os.fstat(file.fileno()))
        try:
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    name = info.filename.removesuffix(".npy")
                    named = f"{show(path)} ({show(info.filename)})"
                    if not info.filename.endswith(".npy"):
                        raise SourceError(f"{named}: no array, and a .npz holds arrays (.npy) alone: save it again with numpy.savez", path=path)
                    if info.flag_bits & 1:
                        raise SourceError(f"{named}: encrypted, which is not read: save it again with numpy.savez", path=path)
                    if name in out:
                        raise SourceError(
                            f"{named}: stands in the file twice, so it is not clear which is meant: save it again with numpy.savez", path=path
                        )
                    stored = info.compress_type == zipfile.ZIP_STORED
                    header = _member_header(archive, info, path, named, whole=stored)
                    found = _checked(header, path, stat, info.file_size, None if stored else info.filename, named)
                    if stored:
                        found = replace(found, offset=found.offset + _data_offset(file, info), within=info.filename)
                    elif info.compress_type == zipfile.ZIP_DEFLATED and info.file_size > _MOST_PACKED * (info.compress_size + 1):
                        raise SourceError(f"{named}: {info.compress_size:,} bytes cannot hold the {info.file_size:,} that it says", path=path)
                    out[name] = found
        except (*_DAMAGED, ValueError, struct.error, RuntimeError) as error:
            raise SourceError(f"{show(path)}: no .npz file, or a damaged one ({_reason(error)})", path=path) from error
    return out


def _member_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str, named: str, *, whole: bool) -> _Header:
    """The header of a member; with `whole` all of it is held against its CRC-32, once: rows are read past the archive, which checks none."""
    try:
        with archive.open(info) as member:
            header = _npy_header(member, path, named)
            while whole and member.read(_SKIP):
                pass
    except _DAMAGED as error:
        raise SourceError(f"{named}: damaged (it cannot be unpacked: {_reason(error)})", path=path) from error
    return header


def _data_offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where a member's data begins: behind its own header, whose length the directory does not tell."""
    file.seek(info.header_offset)
    head = struct.unpack("<4s22xHH", file.read(30))
    if head[0] != b"PK\x03\x04":
        raise zipfile.BadZipFile("a member has no header")
    return int(info.header_offset + 30 + head[1] + head[2])


def _npy_header(file: IO[bytes], path: str, named: str) -> _Header:
    """(where the data begins, dtype, shape, Fortran order)."""
    data = io.BytesIO(file.read(12 + _HEADER_LIMIT))
    try:
        version = np.lib.format.read_magic(data)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(data, max_header_size=_HEADER_LIMIT)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(data, max_header_size=_HEADER_LIMIT)
        else:
            raise ValueError(f"version {version[0]}.{version[1]} of the format")
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise SourceError(f"{named}: no .npy file, or a damaged one ({_reason(error)})", path=path) from error
    if dtype.hasobject:
        raise SourceError(f"{named}: an array of Python objects, which is a pickle and is never loaded: save it with a dtype of numbers", path=path)
    return data.tell(), dtype, shape, bool(fortran)


def _checked(header: _Header, path: str, stat: tuple[int, int, int, int], size: int, member: str | None, named: str = "") -> Lies:
    """The array that a header tells of, held against the bytes (`size`) that there are."""
    offset, dtype, shape, fortran = header
    named = named or show(path)
    if not shape:
        raise SourceError(f"{named}: a single number, expected an array whose first axis is samples", path=path)
    if any(type(n) is not int or n < 0 for n in shape) or len(shape) > 16:
        raise SourceError(f"{named}: damaged, as its header says a shape of {shape!s:.100}; expected up to 16 lengths from 0 on", path=path)
    found = Lies(path, offset, dtype, shape, stat, fortran and len(shape) > 1, member)
    need = offset + shape[0] * found.row_bytes
    if size < need:
        raise SourceError(f"{named}: {size:,} bytes, a {dtype} array of {shape} takes {need:,}: it is cut off", path=path, expected=need, found=size)
    if size > need:
        raise SourceError(
            f"{named}: {size:,} bytes, a {dtype} array of {shape} takes {need:,}: it holds more than the {shape[0]:,} rows that it says",
            path=path,
            expected=need,
            found=size,
        )
    if found.fortran and (member is not None or math.prod(shape[1:]) > _MOST_RUNS):
        raise SourceError(f"{named}: in Fortran order, so no row lies in one piece: save numpy.ascontiguousarray(a)", path=path)
    return found


def lies_in_raw(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int | None) -> Lies:
    """The rows of this dtype and `shape` that a file without a header consists of, `rows` in number where that is told."""
    with _open_file(path) as file:
        stat = stat_of(os.fstat(file.fileno()))
    row_bytes = dtype.itemsize * math.prod(shape)
    if stat[0] % row_bytes or (rows is not None and stat[0] != rows * row_bytes):
        wanted = f"{rows:,} rows of {row_bytes:,} bytes" if rows is not None else f"a multiple of {row_bytes:,} bytes"
        raise SourceError(f"{show(path)}: {stat[0]:,} bytes, expected {wanted} ({dtype} {shape})", path=path, expected=row_bytes, found=stat[0])
    return Lies(path, 0, dtype, (stat[0] // row_bytes, *shape), stat)


def is_idx(path: str) -> bool:
    """Does this file, gzip or plain, begin as an IDX file does?"""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        if start[:2] == b"\x1f\x8b":
            with gzip.open(path) as unpacked:
                start = unpacked.read(4)
    except (OSError, *_DAMAGED):
        return False
    return len(start) == 4 and start[:2] == b"\0\0" and start[2] in _IDX and 1 <= start[3] <= 8


def lies_in_idx(path: str) -> Lies:
    """The array of an IDX file (what MNIST is in), gzip or plain.  Raises SourceError."""
    with _open_file(path) as file:
        stat, packed = stat_of(os.fstat(file.fileno())), file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            unpacked: Any = gzip.GzipFile(fileobj=file) if packed else file
            head = unpacked.read(4)
            axes = head[3] if len(head) == 4 else 0
            sizes = unpacked.read(4 * axes)
        except _DAMAGED as error:
            raise SourceError(f"{show(path)}: damaged (it cannot be unpacked: {_reason(error)})", path=path) from error
    if head[:2] != b"\0\0" or head[2:3] not in [bytes([code]) for code in _IDX] or not 1 <= axes <= 8 or len(sizes) < 4 * axes:
        raise SourceError(
            f"{show(path)}: no IDX file, or a damaged one: it begins with {head.hex(' ') or 'nothing'}, expected 00 00, a type (08 to 0e), "
            "1 to 8 axes, and 4 bytes for each of them",
            path=path,
        )
    shape = struct.unpack(f">{axes}I", sizes)
    dtype = np.dtype(_IDX[head[2]])
    need = 4 + 4 * axes + dtype.itemsize * math.prod(shape)
    if packed:
        if need > _MOST_PACKED * stat[0]:
            raise SourceError(f"{show(path)}: {stat[0]:,} bytes cannot hold the {need:,} that a {dtype} array of {shape} takes", path=path)
        return _checked((4 + 4 * axes, dtype, shape, False), path, stat, need, "")
    return _checked((4 + 4 * axes, dtype, shape, False), path, stat, stat[0], None)
