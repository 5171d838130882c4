"""Hides how a scan is kept for a later run or another machine: one file, a head in JSON and then the columns as they are in memory.

A damaged file, or one that is no listing, counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.sources import STAT_DTYPE, Lent, Scan
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.spatial import Form
from mmcompile.errors import FormatError
from mmcompile.format.canonical import canonical, name_from_json, name_to_json, parse
from mmcompile.format.commit import write_atomic
from mmcompile.format.index import Field, Names, Split, row_dtype

__all__ = ["load_head", "load_listing", "save_listing"]

_MAGIC = b"mmcompile listing 1\n"
#: Bytes of the head at most: names of classes and warnings, mostly.
_HEAD_LIMIT = 1 << 30
#: Bytes that are written or checked at a time, so that no column is there twice.
_PART = 1 << 24


def save_listing(path: Path, scan: Scan, at_ns: int, head: dict[str, Any]) -> None:
    """Save a scan made at `at_ns` (wall clock), with what the caller wants to know of it again: `head`, JSON values.  All or nothing."""
    document = {
        "at_ns": at_ns,
        "head": head,
        "items": len(scan.keys),
        "key_bytes": len(scan.keys.blob),
        "placed": scan.keys.places is not None,
        "beside": [[len(keys.blob), keys.places is not None] for keys in scan.keys.beside],
        "fields": [
            [f.name, f.dtype, f.shape, f.meaning, f.unit, f.count, *(_listed(names) for names in (f.columns, f.categories))] for f in scan.fields
        ],
        "parts": scan.parts,
        "forms": [[name, form.format, form.relative, form.min_visibility, form.size] for name, form in scan.forms],
        "faults": [[at, said] for at, said in scan.faults.items()],
        "splits": [[split.name, split.start, split.stop] for split in scan.splits],
        "classes": None if scan.classes is None else [name_to_json(name) for name in scan.classes],
        "left_out": scan.left_out,
        "warnings": scan.warnings,
        "counts": scan.counts,
        "lent": None if scan.lent is None else _lent(scan.lent),
    }
    write_atomic(path, _parts(canonical(document), scan))


def load_listing(path: Path) -> tuple[Scan, int, dict[str, Any]] | None:
    """(scan, at_ns, head) as they were saved; None where there is no such file, or it is not whole."""
    try:
        with open(path, "rb") as file:
            return _load(file, path)
    except (FormatError, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError):
        return None


def load_head(path: Path) -> dict[str, Any] | None:
    """The head alone, which is not held against the checksum; None where there is no such file, or it is no listing."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC) + 8)
            if start[: len(_MAGIC)] != _MAGIC or (length := int.from_bytes(start[len(_MAGIC) :], "little")) > _HEAD_LIMIT:
                return None
            return dict(parse(file.read(length), path)["head"])
    except (FormatError, OSError, ValueError, KeyError, TypeError):
        return None


def _parts(head: bytes, scan: Scan) -> Iterator[bytes | memoryview]:
    state = xxhash.xxh3_128()
    columns: list[npt.NDArray[Any]] = [scan.stat, *[scan.values] * bool(scan.values.nbytes)]
    for keys in (scan.keys, *scan.keys.beside):
        columns += [np.diff(keys.stops, prepend=0).astype("<u4"), keys.blob]
        if keys.places is not None:
            columns.append(keys.places.reshape(-1))
    if scan.lent is not None:
        columns.append(scan.lent.hashes.reshape(-1))
    for data in (_MAGIC, len(head).to_bytes(8, "little"), head):
        state.update(data)
        yield data
    for column in columns:
        view = memoryview(np.ascontiguousarray(column).view(np.uint8))  # type: ignore[arg-type]
        for at in range(0, len(view), _PART):
            state.update(view[at : at + _PART])
            yield view[at : at + _PART]
    yield state.digest()


def _lent(lent: Lent) -> list[Any]:
    return [[[name_to_json(folder), name] for folder, name in lent.datasets], lent.versions, lent.revision, lent.sha256, lent.keys, lent.nameless]


def _listed(names: Names | None) -> Any:
    return None if names is None else [name_to_json(name) for name in names.listed]


def _names(value: Any) -> Names | None:
    return None if value is None else Names(tuple(name_from_json(name) for name in value))


def _field(name: str, dtype: str, shape: list[int], meaning: str, unit: str | None, count: str | None, columns: Any, categories: Any) -> Field:
    return Field(name, dtype, tuple(shape), meaning, unit=unit, count=count, columns=_names(columns), categories=_names(categories))


def _load(file: IO[bytes], path: Path) -> tuple[Scan, int, dict[str, Any]]:
    """Raises ValueError and its like where the file is not what `_parts` makes."""
    state = xxhash.xxh3_128()

    def take(count: int) -> bytes:
        data = file.read(count)
        state.update(data)
        return data

    def column(dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        out = np.empty(count, dtype)
        view = memoryview(out.view(np.uint8))  # type: ignore[arg-type]
        for at in range(0, len(view), _PART):
            part = view[at : at + _PART]
            if file.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise ValueError("ends early")
            state.update(part)
        return out

    if take(len(_MAGIC)) != _MAGIC or (length := int.from_bytes(take(8), "little")) > _HEAD_LIMIT:
        raise ValueError("no listing")
    document = parse(take(length), path)
    n = int(document["items"])
    listed = [(int(size), bool(placed)) for size, placed in ((document["key_bytes"], document["placed"]), *document["beside"])]
    fields = tuple(_field(*entry) for entry in document["fields"])
    rest = n * (STAT_DTYPE.itemsize + row_dtype(fields).itemsize + 16 * (document["lent"] is not None)) + 16
    rest += sum(n * (4 + 24 * placed) + size for size, placed in listed)
    at = file.tell()
    if min(n, *(size for size, _ in listed)) < 0 or file.seek(0, 2) - at != rest:
        raise ValueError("another length")
    file.seek(at)
    stat = column(STAT_DTYPE, n)
    values = column(row_dtype(fields), n) if fields and n else np.zeros(n, row_dtype(fields))

    def keys_of(size: int, placed: bool) -> Keys:
        lengths, blob = column("<u4", n), column(np.uint8, size)
        stops = np.cumsum(lengths, dtype=np.int64)
        if (stops[-1] if n else 0) != size:
            raise ValueError("lengths of keys do not add up")
        return Keys(blob, stops, places=column(np.int64, 3 * n).reshape(-1, 3) if placed else None)

    keys, *beside = [keys_of(*entry) for entry in listed]
    lent = None
    if document["lent"] is not None:
        datasets, versions, revision, *told = document["lent"]
        hashes = column(np.uint64, 2 * n).reshape(-1, 2)
        lent = Lent(hashes, tuple((name_from_json(folder), str(name)) for folder, name in datasets), dict(versions), int(revision), *told)
    if state.digest() != file.read():
        raise ValueError("damaged")
    classes = document["classes"]
    scan = Scan(
        keys.with_beside(beside),
        fields,
        values,
        stat,
        None if classes is None else tuple(name_from_json(name) for name in classes),
        dict(document["left_out"]),
        tuple(document["warnings"]),
        dict(document["counts"]),
        tuple(Split(*split) for split in document["splits"]),
        lent,
        tuple((str(name), str(kind)) for name, kind in document["parts"]),
        tuple((str(name), Form(*form)) for name, *form in document["forms"]),
        {int(at): str(said) for at, said in document["faults"]},
    )
    return scan, int(document["at_ns"]), dict(document["head"])
