"""Hides the record that a shard is complete: one JSON file, committed after all files of the shard are durable.

A seal holds all that publishing needs, so neither sources nor pixels are looked at again: files, rows, sums, rejects, and for each item the stat and
hash by which a later run sees that nothing changed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.errors import FormatError
from mmcompile.format.canonical import HASH, canonical, parse
from mmcompile.format.commit import write_atomic
from mmcompile.format.fields import Field, row_dtype, value_fields
from mmcompile.format.npy import file_name, hash_bytes
from mmcompile.format.samples import flag_counts

__all__ = ["UNREADABLE", "Seal", "files_by_kind", "read_seal", "read_sealed", "read_seals", "write_seal", "write_sealed"]

#: What reading a record raises that was damaged, or is none of ours.
UNREADABLE = (FormatError, KeyError, TypeError, ValueError, AttributeError)

#: What the name of a file in shards/ begins with; a seal's files may be deleted, so it never leads elsewhere.
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")

#: How a seal begins: canonical JSON, so that the bytes that are hashed can be told without writing them anew.
_HEAD, _TAIL = b'{"hash":"', b'","seal":'
_BODY = len(_HEAD) + 32 + len(_TAIL)


@dataclass(frozen=True)
class Seal:
    """What is known of a sealed shard.

    `pixel` and `store` are the fingerprints in its task's id; `made` says how its rows were made: "preprocess" (settings), "versions",
    "revision", and what the settings say of "sha256" and "keys".
    `fields` are those of the shard, of which name, dtype, shape and meaning are kept; `values` (N,) are records of those without pixels, as the scan
    had them; `stat` (STAT_DTYPE) and `hashes` (N, 2) stand for the task's
    items in order; `rejects` are lines by position.
    """

    task: str
    pixel: str
    store: str
    made: dict[str, Any]
    fields: tuple[Field, ...]
    values: npt.NDArray[np.void]
    stat: npt.NDArray[Any]
    hashes: npt.NDArray[np.uint64]
    rejects: dict[int, dict[str, Any]]
    files: dict[str, str]
    rows: int = 0
    sums: dict[str, list[dict[str, Any]]] | None = None
    flags: dict[str, int] | None = None

    def complete(self, files: dict[str, str], rows: int, sums: dict[str, list[dict[str, Any]]], flags: npt.NDArray[np.uint32]) -> Seal:
        """The seal with what became of the rows; `flags` (rows,) are counted by word."""
        return replace(self, files=files, rows=rows, sums=sums, flags=flag_counts(flags))

    def outline(self) -> Seal:
        """What publishing needs of it: most of the memory is in what stands for each item."""
        return replace(self, values=self.values[:0].copy(), stat=self.stat[:0].copy(), hashes=self.hashes[:0].copy())

    def names(self) -> list[str]:
        """The files in shards/ that this seal stands for."""
        return [file_name(kind, digest) for kind, digest in self.files.items()]


def write_seal(folder: Path, seal: Seal) -> None:
    """Commit a seal: the last step of a shard.  Raises OSError where `.build/` is gone: a build whose lock was removed seals nothing."""
    folder.mkdir(exist_ok=True)
    document = {
        "task": seal.task,
        "pixel": seal.pixel,
        "store": seal.store,
        "made": seal.made,
        "fields": [[f.name, f.dtype, list(f.shape), f.meaning] for f in seal.fields],
        "values": _pack(seal.values),
        "stat": _pack(seal.stat),
        "hashes": _pack(seal.hashes),
        "rejects": {str(i): line for i, line in seal.rejects.items()},
        "files": seal.names(),
        "rows": seal.rows,
        "sums": seal.sums or {},
        "flags": seal.flags or {},
    }
    write_sealed(folder / f"{seal.task}.json", document)


def write_sealed(path: Path, document: dict[str, Any]) -> None:
    """Commit a JSON object with its own hash beside it."""
    write_atomic(path, canonical({"seal": document, "hash": hash_bytes(canonical(document))}))


def read_seals(folder: Path) -> Iterator[Seal]:
    """All seals, one at a time, sorted by task id.  One that is damaged counts as absent: its shard is made again."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        seal = read_seal(folder, path.stem)
        if seal is not None:
            yield seal


def read_seal(folder: Path, task: str) -> Seal | None:
    """The seal of a task; None where there is none, or it is damaged."""
    try:
        seal = _parse(folder / f"{task}.json")
    except (OSError, *UNREADABLE):
        return None
    return seal if seal.task == task else None


def read_sealed(path: Path) -> Any:
    """What `write_sealed` wrote.  Raises OSError, or one of UNREADABLE where it is damaged."""
    data = path.read_bytes()
    whole = parse(data, path)
    written = data[: len(_HEAD)] + data[len(_HEAD) + 32 : _BODY] + data[-2:] == _HEAD + _TAIL + b"}\n"
    if not written or hash_bytes(data[_BODY:-2] + b"\n") != whole["hash"]:
        raise ValueError("damaged")
    return whole["seal"]


def files_by_kind(names: list[str]) -> dict[str, str]:
    """Kind -> hash of the names of files in shards/.  Raises ValueError for any other name."""
    files = {}
    for name in names:
        kind, _, rest = name.partition("-")
        digest, _, suffix = rest.partition(".")
        if suffix != "npy" or not HASH.match(digest) or not _KIND.match(kind):
            raise ValueError(name)
        files[kind] = digest
    return files


def _parse(path: Path) -> Seal:
    found = read_sealed(path)
    files = files_by_kind(found["files"])
    stat = np.frombuffer(_unpack(found["stat"]), STAT_DTYPE)
    hashes = np.frombuffer(_unpack(found["hashes"]), "<u8").reshape(-1, 2)
    fields = tuple(Field(str(name), str(dtype), tuple(shape), str(meaning)) for name, dtype, shape, meaning in found["fields"])
    values: npt.NDArray[np.void] = np.zeros(len(stat), row_dtype(value_fields(fields)))
    if len(stat) != len(hashes) or len(packed := _unpack(found["values"])) != values.nbytes:
        raise ValueError("lengths differ")
    if packed:
        values = np.frombuffer(packed, values.dtype)
    rejects = {int(i): dict(line) for i, line in found["rejects"].items()}
    return Seal(
        str(found["task"]),
        str(found["pixel"]),
        str(found["store"]),
        dict(found["made"]),
        fields,
        values,
        stat,
        hashes.astype(np.uint64),
        rejects,
        files,
        int(found["rows"]),
        {str(name): list(sums) for name, sums in found["sums"].items()},
        dict(found["flags"]),
    )


def _pack(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _unpack(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
