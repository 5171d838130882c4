"""Hides how samples that were left out are written down: one line of canonical JSON each, in row order, in a file named by its hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcompile.errors import CorruptShardError
from mmcompile.format.canonical import Check, canonical, name_to_json, parse
from mmcompile.format.index import BLOB_LIMIT, Index, read_blob

__all__ = ["Reject", "load_rejects", "read_rejects"]

_KEYS = ["key", "size", "source_hash", "stage", "code", "error", "message"]


@dataclass(frozen=True)
class Reject:
    """A source that became no sample.

    `key` is its name as by `os.fsdecode`; `size` in bytes and `source_hash` (xxh3-128, 32 hex digits) are None where it could not be read whole;
    `stage` and `code` are our words for where and why, `error` the class of the exception (None where there was none), `message` our sentence.
    """

    key: str
    size: int | None
    source_hash: str | None
    stage: str
    code: str
    error: str | None
    message: str

    def to_json(self) -> dict[str, Any]:
        return {
            "key": name_to_json(self.key),
            "size": self.size,
            "source_hash": self.source_hash,
            "stage": self.stage,
            "code": self.code,
            "error": self.error,
            "message": self.message,
        }

    def to_line(self) -> bytes:
        """Canonical JSON and a newline."""
        return canonical(self.to_json())


def read_rejects(data: bytes, path: Path) -> tuple[Reject, ...]:
    """The lines of a rejects file.  Raises FormatError for anything else."""
    if data and not data.endswith(b"\n"):
        raise CorruptShardError(f"{path}: damaged, as its last line has no end; `mmcompile verify` says how to mend it", path=str(path))
    return tuple(_reject(parse(line, path), Check(path), f"line {i + 1}") for i, line in enumerate(data.split(b"\n")[:-1]))


def _reject(value: Any, check: Check, where: str) -> Reject:
    entry = check.mapping(value, where, _KEYS)
    return Reject(
        key=check.name(entry["key"], f"{where}, key"),
        size=None if entry["size"] is None else check.count(entry["size"], f"{where}, size"),
        source_hash=None if entry["source_hash"] is None else check.digest(entry["source_hash"], f"{where}, source_hash"),
        stage=check.text(entry["stage"], f"{where}, stage"),
        code=check.text(entry["code"], f"{where}, code"),
        error=None if entry["error"] is None else check.text(entry["error"], f"{where}, error"),
        message=check.text(entry["message"], f"{where}, message", most=BLOB_LIMIT),  # it may hold a path
    )


def load_rejects(root: Path, index: Index) -> tuple[Reject, ...]:
    """The rejects of a generation, in row order.  Raises FormatError."""
    if index.rejects_file is None:
        return ()
    path, data = read_blob(root, "rejects", index.rejects_file, ".jsonl")
    found = read_rejects(data, path)
    if len(found) != index.rejects:
        raise CorruptShardError(
            f"{path}: {len(found):,} lines, the index says {index.rejects:,}; `mmcompile verify` says how to mend it", path=str(path)
        )
    return found
