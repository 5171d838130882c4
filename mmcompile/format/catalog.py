"""Hides which files belong to which generation: names of our form, the generations that are kept, and every file that each of them names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError
from mmcompile.format.canonical import not_a_file, raise_shortage
from mmcompile.format.index import Index
from mmcompile.format.npy import file_name, hash_file, read_hashed
from mmcompile.format.reader import shard_starts
from mmcompile.format.samples import pair_hash

__all__ = ["Generation", "digest_file", "digest_of", "kept_files", "list_folder", "load_table", "named_files", "open_regular", "single_files"]

Array = npt.NDArray[Any]

#: What a file of shards/ is called: what it holds, its hash, and how it ends.
_NAME = re.compile(r"(?:(?:[a-z][a-z0-9_]{0,63})-([0-9a-f]{32})\.npy|(?:classes|groups)-([0-9a-f]{32})\.json|rejects-([0-9a-f]{32})\.jsonl)\Z")
_GENERATION = re.compile(r"([0-9a-f]{32})\.json\Z")


@dataclass(frozen=True)
class Generation:
    """A generation that can be read: its index, shard table, and the first row of each shard, then the number of samples: (shards + 1,)."""

    name: str
    index: Index
    table: Array
    starts: npt.NDArray[np.int64]


def digest_of(name: str) -> str | None:
    """The hash in the name of a file of shards/, or None where the name has not our form."""
    match = _NAME.match(name)
    return next(filter(None, match.groups())) if match else None


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder sorted by name; none where it is not there or is a link."""
    try:
        if os.path.islink(folder):
            return []
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def kept_files(root: Path) -> tuple[dict[str, float], list[str]]:
    """(generation -> mtime in seconds, other names) of the files in generations/."""
    kept: dict[str, float] = {}
    other = []
    for entry in list_folder(root / "generations"):
        match = _GENERATION.match(entry.name)
        if match is None:
            other.append(entry.name)
        else:
            kept[match[1]] = entry.stat(follow_symlinks=False).st_mtime
    return kept, other


def load_table(root: Path, index: Index, name: str) -> Generation:
    """The shard table of a generation, its bytes checked against its hash.  Raises FormatError."""
    path = root / "shards" / file_name("table", index.table)
    try:
        table = read_hashed(path, index.table_dtype(), (index.shards,), index.table)
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {root}`, which says how to mend it", path=str(path)) from None
    return Generation(name, index, table, shard_starts(table, index, path))


def single_files(index: Index) -> list[tuple[str, str]]:
    """(kind, file name) of the files that a generation has once: its table, and where it has them class names, rejects, groups and other names.

    A name may repeat: equal lists share a file.
    """
    found = [("table", file_name("table", index.table))]
    if index.classes_file is not None:
        found.append(("classes", file_name("classes", index.classes_file, ".json")))
    if index.rejects_file is not None:
        found.append(("rejects", file_name("rejects", index.rejects_file, ".jsonl")))
    if index.groups_file is not None:
        found.append(("groups", file_name("groups", index.groups_file, ".json")))
    lists = [names for spec in index.fields for names in (spec.columns, spec.categories) if names is not None]
    return found + [("classes", file_name("classes", names.file, ".json")) for names in lists if names.file is not None]


def named_files(generation: Generation) -> Iterator[tuple[str, int, str]]:
    """(kind, shard, file name) of every file that a generation's shard table names.  Shards with equal rows share files: names repeat."""
    for kind in generation.table.dtype.names or ():
        if kind != "rows":
            for shard, pair in enumerate(generation.table[kind].tolist()):
                yield kind, shard, file_name(kind, pair_hash(pair))


def open_regular(path: Path) -> int:
    """A descriptor of a regular file that is no link.  FileNotFoundError, CorruptShardError, or OSError when descriptors run out."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise_shortage(error, path)
        reason = "a link; files of a dataset are regular files inside its folder" if os.path.islink(path) else f"cannot be opened ({error.strerror})"
        raise CorruptShardError(f"{path}: {reason}", path=str(path)) from None
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptShardError(f"{path}: {not_a_file(mode)}", path=str(path))
    return fd


def digest_file(path: Path, seen: Callable[[int], None] | None = None) -> str:
    """xxh3-128 of a regular file, read once from start to end.  Raises as `open_regular`."""
    fd = open_regular(path)
    try:
        return hash_file(fd, seen)
    except OSError as error:
        raise_shortage(error, path)
        raise CorruptShardError(f"{path}: cannot be read ({error.strerror})", path=str(path)) from error
    finally:
        os.close(fd)
