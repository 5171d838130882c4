"""Hides what a shard file is: a `.npy` file of format version 1.0 whose header is known before it is read, and whose name is its hash.

A reader knows from the index what each header must say, so it compares bytes and parses nothing: no header of a stranger is ever interpreted.
`np.load` reads every file (it parses the same header by its own rules).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.canonical import not_a_file, raise_shortage
from mmcompile.format.commit import install, write_atomic

__all__ = [
    "ALIGN",
    "HUGE",
    "Space",
    "file_bytes",
    "file_name",
    "give_back_memory",
    "hash_bytes",
    "hash_file",
    "header",
    "libc",
    "map_file",
    "open_array",
    "read_array",
    "read_hashed",
    "save_array",
    "save_blob",
]

#: Data starts at a multiple of this: a page, so that a mapped row 0 and direct I/O are aligned.
ALIGN = 4096
#: A huge page of x86-64, and the usual one of AArch64: where addresses and offsets in a file agree modulo this, the kernel can map 2 MiB of the page
#: cache as one entry, and copying from the map is up to 1.4 times as fast.
HUGE = 2 << 20
#: Bytes read at a time when hashing: large enough for the disk, small enough for the cache.
_CHUNK = 1 << 21
_NORESERVE = 0x4000 if sys.platform == "linux" else 0

Array = npt.NDArray[Any]


def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The exact bytes that stand before the data, a multiple of ALIGN long."""
    descr = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin-1")
    total = -(-(10 + len(text) + 1) // ALIGN) * ALIGN
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", total - 10) + text.ljust(total - 11) + b"\n"


def file_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The exact size of the file of an array."""
    return len(header(dtype, shape)) + dtype.itemsize * _product(shape)


def file_name(kind: str, digest: str, suffix: str = ".npy") -> str:
    """The name of a file in shards/: what it holds, then its hash."""
    return f"{kind}-{digest}{suffix}"


def hash_bytes(data: bytes) -> str:
    """xxh3-128 as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(fd: int, seen: Callable[[int], None] | None = None) -> str:
    """xxh3-128 of an open file from its start to its end, as 32 hex digits; `seen` is told the bytes of each piece.

    Reading and hashing release the interpreter: threads do run beside each other.
    """
    state, offset = xxhash.xxh3_128(), 0
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    while count := os.preadv(fd, [buffer], offset):
        state.update(view[:count])
        offset += count
        if seen is not None:
            seen(count)
    return state.hexdigest()


def save_array(folder: Path, kind: str, array: Array, scratch: Path) -> str:
    """Write an array as `<kind>-<hash>.npy` into `folder`, durably; returns the hash.  `scratch` is on the same file system."""
    array = np.ascontiguousarray(array)
    return save_blob(folder, kind, [header(array.dtype, array.shape), memoryview(cast(Any, array.reshape(-1).view(np.uint8)))], scratch)


def save_blob(folder: Path, kind: str, parts: list[Any], scratch: Path, suffix: str = ".npy") -> str:
    """Write bytes as `<kind>-<hash><suffix>` into `folder`, durably; returns the hash."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    digest = state.hexdigest()
    final = folder / file_name(kind, digest, suffix)
    if sum(memoryview(part).nbytes for part in parts) < _CHUNK:
        write_atomic(final, b"".join(bytes(part) for part in parts))
        return digest
    temporary = scratch / f"{final.name}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        install(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return digest


def open_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int]:
    """Open a file that must hold exactly this array; returns (descriptor, offset of the data).

    Its kind, size and header are checked before anything is mapped or allocated.  Raises FileNotFoundError when it is not there, else
    CorruptShardError (or FormatError for a link) naming the file, what was expected and what was found; OSError where descriptors or memory ran out,
    which says nothing about the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        if os.path.islink(path):
            raise FormatError(f"{path}: a link; files of a dataset are regular files inside its folder", path=str(path)) from None
        raise_shortage(error, path)
        raise CorruptShardError(f"{path}: cannot be opened ({error.strerror})", path=str(path)) from error
    try:
        expected = header(dtype, shape)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShardError(f"{path}: {not_a_file(status.st_mode)}", path=str(path))
        size = len(expected) + dtype.itemsize * _product(shape)
        if status.st_size != size:
            raise CorruptShardError(
                f"{path}: {status.st_size:,} bytes, expected {size:,} for {dtype.str if dtype.names is None else 'records'} {shape}; {_mend(path)}",
                path=str(path),
                expected=size,
                found=status.st_size,
            )
        found = os.pread(fd, len(expected), 0)
        if found != expected:
            start = 10 if found[:10] == expected[:10] else 0
            shown, wanted = found[start:150].rstrip(b" \n\0"), expected[start:].rstrip()
            raise CorruptShardError(
                f"{path}: its header is {shown!r}, expected {wanted!r}; {_mend(path)}",
                path=str(path),
            )
    except OSError as error:
        os.close(fd)
        raise_shortage(error, path)
        raise CorruptShardError(f"{path}: cannot be read ({error.strerror})", path=str(path)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, len(expected)


def read_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, dense: bool = False) -> Array:
    """A whole small array in memory of its own, checked as by `open_array`.

    `dense`: refused, before anything is allocated, where a part of the file is a hole, and takes no room on the disk.
    """
    fd, offset = open_array(path, dtype, shape)
    try:
        if dense:
            _refuse_hole(fd, path)
        try:
            out = np.empty(shape, dtype)
        except MemoryError:  # the file is as long as it claims, with a hole in it as like as not
            raise CorruptShardError(f"{path}: its {os.fstat(fd).st_size:,} bytes do not fit into memory", path=str(path)) from None
        read_into(fd, out, offset, path)
    finally:
        os.close(fd)
    return out


def _mend(path: Path) -> str:
    return f"run `mmcompile verify {path.parent.parent}`, which says how to mend it"


def _refuse_hole(fd: int, path: Path) -> None:
    size = os.fstat(fd).st_size
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:  # a file system that knows no holes
        return
    if hole < size:
        raise CorruptShardError(f"{path}: a hole at byte {hole:,} of {size:,}, where data must lie; {_mend(path)}", path=str(path))


def read_hashed(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], digest: str) -> Array:
    """As `read_array`, of a file that must also have this hash: read once, and hashed as it lies in memory.  Raises CorruptShardError.

    For arrays in which 4 KiB of zeros cannot be, such as shard tables: a hole is refused, so no more is allocated than really lies on the disk.
    """
    out = read_array(path, dtype, shape, dense=True)
    state = xxhash.xxh3_128(header(dtype, shape))
    state.update(memoryview(cast(Any, out.reshape(-1).view(np.uint8))))
    if state.hexdigest() != digest:
        raise CorruptShardError(f"{path}: its content does not match its name; {_mend(path)}", path=str(path))
    return out


def read_into(fd: int, out: Array, offset: int, path: Path) -> None:
    """Fill a C-contiguous array from an offset of a file; a short or failed read is a CorruptShardError, never other bytes."""
    view = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise_shortage(error, path)
            raise CorruptShardError(f"{path}: cannot be read at byte {offset + done:,} ({error.strerror}); {_mend(path)}", path=str(path)) from error
        if count == 0:
            raise CorruptShardError(f"{path}: ends at byte {offset + done:,}, expected {offset + len(view):,} or more; {_mend(path)}", path=str(path))
        done += count


def map_file(fd: int, length: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    """Map the first `length` bytes of a file: private, never reserved, unmapped when the last view of the array is gone.

    `writable` maps are copy-on-write: a write stays in this process.  The descriptor can be closed at once and none is held, which Python's own
    `mmap` cannot do before 3.13; MAP_NORESERVE keeps maps larger than memory from being refused as committed memory.
    """
    if length == 0:
        return np.empty(0, np.uint8)
    if sys.platform != "linux":
        access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, length, access=access), np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _map(None, length, protection, mmap.MAP_PRIVATE | _NORESERVE, fd, 0)
    owner = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(owner, libc().munmap, address, length).atexit = False
    array: npt.NDArray[np.uint8] = np.frombuffer(cast(Any, owner), np.uint8)
    array.flags.writeable = writable
    return array


class Space:
    """A range of addresses that files are mapped into: one array over all of them, unmapped when the last view of it is gone.

    Its bytes cost address space alone, and must not be touched before a file is placed there: that is a signal, not an exception.  `released` is
    called when the range is given back.  Raises OSError where the kernel grants no such range.  Linux only.
    """

    def __init__(self, length: int, released: Callable[[], object]) -> None:
        whole = length + HUGE + ALIGN
        found = _map(None, whole, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        #: Where the array begins: ALIGN behind a multiple of HUGE, as the data of a shard in its file.
        self.address = -(-found // HUGE) * HUGE + ALIGN
        owner = (ctypes.c_ubyte * length).from_address(self.address)
        self._lost: list[tuple[int, int]] = []
        weakref.finalize(owner, _give_back, found, whole, self._lost, released).atexit = False
        #: All bytes of the range, read-only: uint8 (length,).
        self.array: npt.NDArray[np.uint8] = np.frombuffer(cast(Any, owner), np.uint8)
        self.array.flags.writeable = False

    def place(self, at: int, fd: int, offset: int, length: int) -> None:
        """Map a part of a file, private and read-only, to byte `at` of the array; both `at` and `offset` begin a page.

        Safe in several threads at once, also for the same part: one map takes the place of the other at once.  Raises OSError.
        """
        try:
            _map(self.address + at, length, mmap.PROT_READ, mmap.MAP_PRIVATE | _NORESERVE | _FIXED, fd, offset)
        except OSError:  # the kernel may have dropped the reservation of this part, and anybody may be there by now
            self._lost.append((self.address + at, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE))
            raise


def _give_back(address: int, length: int, lost: list[tuple[int, int]], released: Callable[[], object]) -> None:
    """Unmap a range, except for the parts that may no longer be ours."""
    end = address + length
    for start, size in sorted(lost):
        if start > address:
            libc().munmap(address, start - address)
        address = max(address, start + size)
    if end > address:
        libc().munmap(address, end - address)
    released()


#: PROT_NONE and MAP_FIXED, which Python's own `mmap` does not name.
_NO_ACCESS, _FIXED = 0, 0x10
_FAILED = ctypes.c_void_p(-1).value
_loaded: list[ctypes.CDLL] = []


def _map(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found = libc().mmap(address, length, protection, flags, fd, offset)
    if found in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length:,} bytes: {os.strerror(code)}")
    return int(found)


def libc() -> ctypes.CDLL:
    """The C library, with the calls on maps declared; each releases the interpreter."""
    if not _loaded:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        _loaded.append(library)
    return _loaded[0]


def give_back_memory() -> None:
    """Return freed memory of this process to the system, where the C library can."""
    trim = getattr(libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
