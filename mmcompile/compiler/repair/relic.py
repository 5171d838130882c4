"""Hides how a lost shard table is found again from the files that it named: which files belong together, and in which order they stood.

Files of a shard are matched by what they hold (lengths of keys, hashes of rows), so neither the table nor RAW is asked.  What comes out is a guess:
the hash of the table proves it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import FormatError
from mmcompile.format.canonical import as_bytes, as_text
from mmcompile.format.index import Index
from mmcompile.format.npy import ALIGN, file_bytes, hash_bytes, header, open_array, read_array, read_into
from mmcompile.format.samples import hash_pair, keys_of, pair_hash, row_hashes, sample_dtype

__all__ = ["Relic", "array_bytes", "find_relics", "guess_tables", "labels_of", "position_of", "table_of", "wrong_rows"]

Array = npt.NDArray[Any]

#: Tables that are tried before giving up; each costs the hash of a few KB.
_TRIES = 20_000
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


def labels_of(keys: list[bytes], classes: tuple[str, ...]) -> npt.NDArray[np.int64] | None:
    """The class numbers (N,) of keys by their first folder; None where one lies in no class folder."""
    numbers = {as_bytes(name): number for number, name in enumerate(classes)}
    found = [numbers.get(key.partition(b"/")[0], -1) if b"/" in key else -1 for key in keys]
    return None if -1 in found else np.array(found, "<i8")


def position_of(key: bytes, labelled: bool) -> tuple[str, str, str]:
    """Sorts keys as their rows stand: by class, by folder, by name, each as text."""
    folder, _, name = key.rpartition(b"/")
    return (as_text(key.partition(b"/")[0]), as_text(folder), as_text(name)) if labelled else ("", "", as_text(key))


def table_of(index: Index, shards: list[Relic]) -> Array:
    """The shard table of these shards."""
    table = np.zeros(len(shards), index.table_dtype())
    for record, shard in zip(table, shards, strict=True):
        record["rows"] = shard.rows
        for kind, digest in shard.files.items():
            record[kind] = hash_pair(digest)
    return table


def guess_tables(index: Index, relics: list[Relic], named: set[str]) -> Iterator[list[Relic]]:
    """Lists of shards that the table may have named: all that no other table names (by its samples and keys file), and some of the others."""
    labelled = len(index.fields) > 1
    span = {id(r): (position_of(r.keys[0], labelled), position_of(r.keys[-1], labelled)) for r in relics}

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


def find_relics(
    folder: Path, index: Index, classes: tuple[str, ...] | None, sound: dict[str, list[str]], is_source: Callable[[bytes, str], bool]
) -> list[Relic]:
    """The shards of this kind of row among the sound files of shards/ (kind -> hashes).

    `is_source(key, hash)` is asked where the keys of a samples file cannot be told otherwise: does RAW hold this?
    """
    image, dtype = index.fields[0], sample_dtype(index.fields)
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
            labels = None if classes is None else labels_of(keys, classes)
            if classes is not None and labels is None:
                continue
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
