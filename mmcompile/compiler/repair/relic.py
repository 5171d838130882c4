"""Hides how a lost shard table is found again from the files that it named: which files belong together, and in which order they stood.

Files of a shard are matched by what they hold (lengths of keys, hashes of rows), so neither the table nor RAW is asked.  What comes out is a guess:
the hash of the table proves it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.splits import within
from mmcompile.errors import FormatError
from mmcompile.format.canonical import as_text, name_from_json
from mmcompile.format.index import Index
from mmcompile.format.npy import ALIGN, file_bytes, hash_bytes, header, open_array, read_array, read_into
from mmcompile.format.samples import hash_pair, keys_of, pair_hash, row_hashes, sample_dtype

__all__ = ["Placing", "Position", "Relic", "array_bytes", "find_relics", "guess_tables", "table_of", "wrong_rows"]

Array = npt.NDArray[Any]

#: What keys are sorted by.
Position = tuple[int, int, int, str, str]

#: Tables that are tried before giving up; each costs the hash of a few KB.
_TRIES = 20_000
#: Roots whose keys are known again; the number stands in settings that may be a stranger's.
_MOST_ROOTS = 1024
#: Bytes of rows held at a time.
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Relic:
    """Files that make up a shard: hashes by kind, rows, and the keys of the rows."""

    files: dict[str, str]
    rows: int
    keys: tuple[bytes, ...]


def array_bytes(array: Array) -> bytes:
    """The bytes of the file of an array."""
    return header(array.dtype, array.shape) + array.tobytes()


class Placing:
    """Where the keys of a generation stand, and in which class, by its settings and splits; for what is no folder of images it knows no key."""

    def __init__(self, index: Index, classes: tuple[str, ...] | None) -> None:
        self._numbers = {name: number for number, name in enumerate(classes or ())}
        self._splits = {split.name: number for number, split in enumerate(index.splits)}
        self._bases = _bases_of(index)

    def label(self, key: bytes) -> int | None:
        """The number of the key's class, -1 where it lies in no class folder; None where it cannot be a key of this generation."""
        found = self._place(key)
        return None if found is None else found[1]

    def labels(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64] | None:
        """The class numbers (N,); None where one of these is no key of this generation."""
        found = [self.label(key) for key in keys]
        return None if None in found else np.array(found, "<i8")

    def position(self, key: bytes) -> Position | None:
        """Sorts keys as their rows stand: by split, class, root, folder and name, both as text; None where it is no key of it."""
        found = self._place(key)
        if found is None:
            return None
        (split, root), label = found
        folder, _, name = as_text(key).rpartition("/")
        return self._splits[split], label if label >= 0 else len(self._numbers), root, folder, name

    def _place(self, key: bytes) -> tuple[tuple[str, int], int] | None:
        folder = as_text(key).rpartition("/")[0]
        found = within(folder, self._bases)
        if found is None:
            return None
        base, where = found
        inside = folder[len(base) + 1 if base else 0 :].partition("/")[0]
        if not inside:
            return where, -1
        return (where, self._numbers[inside]) if inside in self._numbers else None


def _bases_of(index: Index) -> dict[str, tuple[str, int]]:
    """The folders that hold classes or images -> (split, number of the root)."""
    source = index.settings.get("source")
    if not isinstance(source, dict) or source.get("kind") != "folder":
        return {}
    names = [split.name for split in index.splits]
    try:
        roots = [str(number) for number in range(min(int(source["roots"]), _MOST_ROOTS))] if "roots" in source else [""]
        if "splits" in source:
            folders = [(name, str(name_from_json(folder))) for name, folder in source["splits"]]
            return {folder: (name, 0 if roots == [""] else int(folder.partition("/")[0])) for name, folder in folders if name in names}
    except (LookupError, TypeError, ValueError):
        return {}
    if names == ["all"]:
        return {root: ("all", number) for number, root in enumerate(roots)}
    return {f"{root}/{name}" if root else name: (name, number) for number, root in enumerate(roots) for name in names}


def table_of(index: Index, shards: list[Relic]) -> Array:
    """The shard table of these shards."""
    table = np.zeros(len(shards), index.table_dtype())
    for record, shard in zip(table, shards, strict=True):
        record["rows"] = shard.rows
        for kind, digest in shard.files.items():
            record[kind] = hash_pair(digest)
    return table


def guess_tables(index: Index, placing: Placing, relics: list[Relic], named: set[str]) -> Iterator[list[Relic]]:
    """Lists of shards that the table may have named: all that no other table names (by its samples and keys file), and some of the others."""
    span: dict[int, tuple[Position, Position]] = {}
    for relic in relics:
        first, last = placing.position(relic.keys[0]), placing.position(relic.keys[-1])
        if first is not None and last is not None:
            span[id(relic)] = first, last
    relics = [relic for relic in relics if id(relic) in span]

    def in_order(shards: list[Relic]) -> list[Relic] | None:
        """The shards sorted; None where two of them overlap."""
        out = sorted(shards, key=lambda r: span[id(r)])
        return None if any(span[id(a)][1] >= span[id(b)][0] for a, b in itertools.pairwise(out)) else out

    own = [r for r in relics if not {r.files["samples"], r.files["keys"]} <= named]
    shared = [r for r in relics if {r.files["samples"], r.files["keys"]} <= named]
    if in_order(own) is None:
        return
    taken = [span[id(r)] for r in in_order(own) or []]
    shared = [r for r in shared if not _overlaps(span[id(r)], taken)]
    excess = len(own) + len(shared) - index.shards
    if excess < 0 or math.comb(len(shared), excess) > _TRIES:
        return
    rows = sum(r.rows for r in [*own, *shared])
    for left_out in itertools.combinations(shared, excess):
        if rows - sum(r.rows for r in left_out) == index.samples:
            gone = {id(r) for r in left_out}
            found = in_order([*own, *(r for r in shared if id(r) not in gone)])
            if found is not None:
                yield found


def _overlaps(one: tuple[Any, Any], sorted_spans: list[tuple[Any, Any]]) -> bool:
    """Does a span (first, last) overlap one of these, which are sorted and lie apart?"""
    at = bisect.bisect_left(sorted_spans, one)
    return any(one[1] >= low and high >= one[0] for low, high in sorted_spans[max(0, at - 1) : at + 1])


def find_relics(folder: Path, index: Index, placing: Placing, sound: dict[str, list[str]], is_source: Callable[[bytes, str], bool]) -> list[Relic]:
    """The shards of this kind of row among the sound files of shards/ (kind -> hashes).

    `is_source(key, hash)` is asked where the keys of a samples file cannot be told otherwise: does RAW hold this?
    """
    image, dtype = index.fields[0], sample_dtype(index.fields, index.sha256)
    images: dict[int, list[str]] = {}
    for digest in sound.get(image.name, ()):
        images.setdefault(_size(folder / f"{image.name}-{digest}.npy"), []).append(digest)
    blobs: dict[int, list[str]] = {}
    for digest in sound.get("keys", ()):
        blobs.setdefault(_size(folder / f"keys-{digest}.npy"), []).append(digest)
    out = []
    for digest in sound.get("samples", ()):
        rows, rest = divmod(_size(folder / f"samples-{digest}.npy") - ALIGN, dtype.itemsize)
        if rest or rows < 1:
            continue
        try:
            samples = read_array(folder / f"samples-{digest}.npy", dtype, (rows,))
        except (FormatError, FileNotFoundError):
            continue
        stop = int(samples["key_stop"][-1])
        fitting = images.get(file_bytes(image.stored, (rows, *image.shape)), [])
        variants = []
        for blob in blobs.get(file_bytes(np.dtype("u1"), (stop,)) if 0 < stop < 1 << 40 else -1, []):
            keys = keys_of(samples, read_array(folder / f"keys-{blob}.npy", np.dtype("u1"), (stop,)).tobytes())
            labels = placing.labels(keys)
            if labels is None:
                continue
            labels = labels if len(index.fields) > 1 else None
            found = next((i for i in fitting if _fits(folder / f"{image.name}-{i}.npy", index, samples, labels)), None)
            if found is not None:
                files = {image.name: found, "samples": digest, "keys": blob}
                if labels is not None:
                    files["label"] = hash_bytes(array_bytes(labels))
                variants.append(Relic(files, rows, tuple(keys)))
        if len(variants) > 1:
            variants = [v for v in variants if is_source(v.keys[0], pair_hash(samples["source_hash"][0]))] or variants
        out += variants
    return out


def _fits(path: Path, index: Index, samples: Array, labels: Array | None) -> bool:
    try:
        return next(wrong_rows(path, index, samples, labels), None) is None
    except (FormatError, FileNotFoundError):
        return False


def wrong_rows(path: Path, index: Index, samples: Array, labels: Array | None) -> Iterator[int]:
    """The rows of an image file that have not the hashes of these samples.  Raises FormatError or FileNotFoundError."""
    image = index.fields[0]
    fd, offset = open_array(path, image.stored, (len(samples), *image.shape))
    try:
        step, start = 1, 0  # the first row alone settles most
        while start < len(samples):
            part = slice(start, min(start + step, len(samples)))
            rows = np.empty((part.stop - start, *image.shape), image.stored)
            read_into(fd, rows, offset + start * image.row_bytes, path)
            wrong = row_hashes([rows] if labels is None else [rows, labels[part]]) != samples["row_hash"][part]
            yield from (np.flatnonzero(wrong) + start).tolist()
            step, start = max(1, _CHUNK // image.row_bytes), part.stop
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1
