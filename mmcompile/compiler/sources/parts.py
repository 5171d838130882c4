"""Hides that an item may lie in several files: its bytes are those of all of them in order, each with its length before it.

So whatever reads, hashes, ships or compares an item needs to know nothing of its parts; only who decodes it takes them apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.keys import Placed
from mmcompile.format.canonical import as_text

__all__ = ["beside_of", "files_of", "joined_stat", "name_of", "pack", "read_item", "stat_item", "stat_joined", "unpack"]

_LENGTH = struct.Struct("<Q")
#: An odd number with its bits well mixed (2^64 / golden ratio), so that files that change places do not look the same.
_MIX = 0x9E3779B97F4A7C15
_STAT = tuple[int, int, int, int]


def pack(parts: Sequence[bytes]) -> bytes:
    """The bytes of an item of these parts."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(data: bytes) -> list[bytes]:
    """The parts of an item.  Raises ValueError for what `pack` did not make."""
    parts, at = [], 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise ValueError("an item ends within a length")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError("an item ends within a part")
        parts.append(data[at : at + length])
        at += length
    return parts


def files_of(data: bytes, key: bytes) -> list[bytes]:
    """The files of what is read under a key: those of a folder, which ends with /, or the one that it is."""
    return unpack(data) if key.endswith(b"/") else [data]


def beside_of(key: bytes) -> tuple[bytes, ...]:
    """The keys of the further parts of an item; none for an item of one file."""
    return key.beside if isinstance(key, Placed) else ()


def name_of(part: bytes) -> str:
    """What a further part of an item is called: of one that is made of what stands in its key, behind a NUL, the name before that."""
    return as_text(part.partition(b"\0")[0])


def read_item(read: Callable[[bytes], bytes], key: bytes) -> bytes:
    """The bytes of an item by a function that reads one file."""
    beside = beside_of(key)
    return pack([read(part) for part in (key, *beside)]) if beside else read(key)


def stat_item(stat: Callable[[bytes], _STAT], key: bytes) -> _STAT:
    """(size, mtime_ns, ctime_ns, inode) of an item, by a function that looks at one file.

    Of several files: the size that `pack` gives, the latest times, and a number made of all inodes.
    """
    beside = beside_of(key)
    if not beside:
        return stat(key)
    return stat_joined([stat(part) for part in (key, *beside)])


def stat_joined(found: Sequence[_STAT]) -> _STAT:
    """(size, mtime_ns, ctime_ns, inode) of an item of several files, by those of each; see `stat_item`."""
    size = sum(f[0] for f in found) + _LENGTH.size * len(found)
    inode = 0
    for f in found:
        inode = (inode * _MIX + f[3]) & 0x7FFF_FFFF_FFFF_FFFF
    return size, max(f[1] for f in found), max(f[2] for f in found), inode


def joined_stat(stats: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """STAT_DTYPE (N,) of items from those (N,) of each of their parts; -1 where one of these could not be looked at."""
    out = stats[0].copy()
    if len(stats) == 1:
        return out
    out["size"] = sum(s["size"] for s in stats) + _LENGTH.size * len(stats)
    for name in ("mtime_ns", "ctime_ns"):
        out[name] = np.max([s[name] for s in stats], axis=0)
    inode = np.zeros(len(out), np.uint64)
    with np.errstate(over="ignore"):
        for s in stats:
            inode = (inode * np.uint64(_MIX) + s["inode"].astype(np.uint64)) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
    out["inode"] = inode.astype(np.int64)
    out[np.any([s["size"] < 0 for s in stats], axis=0)] = (-1, -1, -1, -1)
    return out
