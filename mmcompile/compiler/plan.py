"""Hides how items become shards: order, cuts, fingerprints.  Pure functions over keys and settings; nothing here looks at a clock or a disk.

A cut depends on keys alone, never on outcomes, so one file added near the front rewrites one or two shards and a reject moves no cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.keys import Keys
from mmcompile.format.canonical import canonical
from mmcompile.format.npy import hash_bytes

__all__ = [
    "SHARD_BYTES",
    "ShardTask",
    "cuts",
    "faults_within",
    "fingerprint",
    "key_hashes",
    "lone_rows",
    "make_tasks",
    "row_cuts",
    "rows_per_shard",
    "shuffled",
    "task_id",
]

#: A shard's usual size: large enough that 10^7 images make some thousand files, small enough to be hashed from the page cache in 10 ms.
SHARD_BYTES = 1 << 28


@dataclass(frozen=True)
class ShardTask:
    """The items [start, stop) of the scan, which become one shard (or none, when all are rejected)."""

    number: int
    start: int
    stop: int
    id: str

    def __len__(self) -> int:
        return self.stop - self.start


def key_hashes(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """xxh3-64 of each key: uint64 (N,)."""
    return Keys.of(keys).hashes()


def rows_per_shard(row_bytes: int, shard_bytes: int = SHARD_BYTES) -> int:
    """R: the number of rows that cuts aim at."""
    return max(1, shard_bytes // max(1, row_bytes))


def lone_rows(row_bytes: int, shard_bytes: int, rows: int) -> tuple[str, ...]:
    """A line where somebody asked for shards that are smaller than one of `rows` samples, so that each of these lies in files of its own."""
    if shard_bytes == SHARD_BYTES or row_bytes <= shard_bytes or rows < 2:
        return ()
    return (f"--shard-bytes {shard_bytes:,} is less than a sample takes ({row_bytes:,} bytes), so a shard holds one or two; 256M is usual",)


def cuts(hashes: npt.NDArray[np.uint64], rows: int) -> list[int]:
    """Where shards start, and the end: 0 = cuts[0] < cuts[1] < ... = N.

    A shard ends before key k if it has at least max(1, R // 2) keys and hash(k) % R == 0, or has 2 R keys.
    """
    n = len(hashes)
    marks = np.flatnonzero(hashes % np.uint64(rows) == 0)
    out = [0]
    while out[-1] < n:
        least, most = out[-1] + max(1, rows // 2), out[-1] + 2 * rows
        at = int(np.searchsorted(marks, least))
        found = int(marks[at]) if at < len(marks) else n
        out.append(min(found, most, n))
    return out if n else [0, 0]


def row_cuts(start: int, stop: int, ends: npt.NDArray[np.int64], rows: int) -> list[int]:
    """Where the shards of rows [start, stop) without keys start, and the end; `ends` are where groups end, in rising order.

    A shard ends at the first end of a group after at least max(1, R // 2) rows, unless that is more than 2 R rows away: then after R rows.
    """
    out = [start]
    while out[-1] < stop:
        least, most = out[-1] + max(1, rows // 2), out[-1] + 2 * rows
        at = int(np.searchsorted(ends, least))
        found = int(ends[at]) if at < len(ends) else stop
        out.append(min(found, stop) if min(found, stop) <= most else out[-1] + rows)
    return out


def shuffled(scan: Scan, seed: int) -> Scan:
    """The same items, those of each split in a random order: that of the xxh3-64 of their keys with this seed.  An item more moves no other."""
    keys = Keys.of(scan.keys)
    marks = keys.hashes(seed)
    order = np.concatenate([np.empty(0, np.int64), *(s.start + np.argsort(marks[s.start : s.stop], kind="stable") for s in scan.ranges)])
    lent = None if scan.lent is None else replace(scan.lent, hashes=scan.lent.hashes[order])
    faults = scan.faults and {at: scan.faults[i] for at, i in enumerate(order.tolist()) if i in scan.faults}
    return replace(scan, keys=keys.take(order), values=scan.values[order], stat=scan.stat[order], lent=lent, faults=faults)


def fingerprint(settings: dict[str, Any], versions: dict[str, str], revision: int) -> str:
    """xxh3-128 of what decides the values of a row: resolved settings, library versions, our own pixel revision."""
    return hash_bytes(canonical({"settings": settings, "versions": versions, "revision": revision}))


def task_id(keys: Sequence[bytes], values: npt.NDArray[np.void], pixel: str, store: str, faults: Mapping[int, str] | None = None) -> str:
    """What a shard is made of, as 32 hex digits: its ordered keys and values (and what is wrong with some) and both fingerprints.

    Not the content of the sources.
    """
    state = xxhash.xxh3_128(f"{pixel} {store} {len(keys)} {values.dtype.descr}".encode())
    columns = Keys.of(keys)
    state.update(np.diff(columns.stops, prepend=0).astype("<u4").tobytes())
    state.update(columns.blob.tobytes())
    state.update(values.tobytes())
    if faults:
        state.update(canonical([[at, said] for at, said in sorted(faults.items())]))
    return state.hexdigest()


def faults_within(faults: Mapping[int, str], start: int, stop: int) -> dict[int, str]:
    """Those of the items [start, stop), by their place among these."""
    return {at - start: said for at, said in faults.items() if start <= at < stop} if faults else {}


def make_tasks(scan: Scan, hashes: npt.NDArray[np.uint64], rows: int, fingerprints: tuple[str, str]) -> list[ShardTask]:
    """The shards of all items, in order, each within one split; `hashes` (N,) are those of the keys, `fingerprints` (pixel, store)."""
    keys = Keys.of(scan.keys)
    out: list[ShardTask] = []
    for split in scan.ranges:
        for start, stop in itertools.pairwise(split.start + at for at in cuts(hashes[split.start : split.stop], rows)):
            if stop > start:
                faults = faults_within(scan.faults, start, stop)
                out.append(ShardTask(len(out), start, stop, task_id(keys[start:stop], scan.values[start:stop], *fingerprints, faults)))
    return out
