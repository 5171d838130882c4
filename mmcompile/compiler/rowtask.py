"""Hides how a worker makes a piece of a shard without keys: reads rows, casts them, writes each field at its place, and what it knows of them then.

A piece is a fixed number of blocks, so sums and hashes do not depend on who makes it.  The seal of such a shard is a small record: files, rows, sums.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.previous import array_hash
from mmcompile.compiler.rowstore import StoredField, all_finite, merge_sums
from mmcompile.compiler.sealing import begin_writing, install_rows, stands, write_all
from mmcompile.compiler.seals import UNREADABLE, files_by_kind, read_sealed, write_sealed
from mmcompile.compiler.sources.rows import RowSource, place_of
from mmcompile.compiler.sources.shuffled import row_number
from mmcompile.compiler.staging import send_shard
from mmcompile.errors import SourceError
from mmcompile.format.npy import ALIGN, file_name, save_array
from mmcompile.format.samples import block_rows
from mmcompile.format.store import Store

__all__ = [
    "RowJob",
    "RowPiece",
    "RowResult",
    "RowSeal",
    "blocks_of",
    "load_source",
    "read_row_seal",
    "run_rows",
    "seal_rows",
]

#: Blocks in a piece of a source that reads ranges: enough that a call costs nothing beside them, and little memory.
_BLOCKS = 8


@dataclass(frozen=True)
class RowJob:
    """What all pieces of a run share.  `source`: itself, or the file that its pickle lies in."""

    source: RowSource | Path
    fields: tuple[StoredField, ...]
    scratch: Path
    shards: Path
    seals: Path

    #: Blocks in a piece: how sums of floats are grouped, so the same for all runs.
    blocks: int = 1
    #: Seconds that a row, or a block of some, may take.
    timeout_s: float = 60.0
    #: What workers elsewhere must have, as here.
    versions: dict[str, str] = field(default_factory=dict)
    #: Where finished shards are sent, with a URL for OUT.
    store: Store | None = None
    #: Those that were sent stay whole here, too.
    whole: bool = False

    @property
    def row_bytes(self) -> int:
        return sum(f.stored.row_bytes for f in self.fields)

    @property
    def block(self) -> int:
        """Rows that one hash stands for."""
        return block_rows(tuple(f.stored for f in self.fields))


@dataclass(frozen=True)
class RowPiece:
    """The rows [start, stop) of a source, which begin at row `offset` of their shard, whose unfinished files are called `name`."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass
class RowResult:
    """The hashes (blocks,) of a piece, the sums of each field that has some, and how many values were lost, by words."""

    hashes: npt.NDArray[np.uint64]
    sums: dict[str, dict[str, Any]]
    counts: Counter[str]


@dataclass(frozen=True)
class RowSeal:
    """What is known of a finished shard; with `known` it may stand for its task in a later run."""

    task: str
    known: bool
    rows: int
    files: dict[str, str]
    sums: dict[str, list[dict[str, Any]]]
    counts: dict[str, int]

    def names(self) -> list[str]:
        """The files in shards/ that it stands for."""
        return [file_name(kind, digest) for kind, digest in self.files.items()]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "files": self.names()}

    @classmethod
    def from_json(cls, found: Any) -> RowSeal:
        """Raises one of UNREADABLE for what is no record of ours."""
        seal = cls(**{**found, "files": files_by_kind(found["files"])})
        if not isinstance(seal.task, str) or not isinstance(seal.rows, int):
            raise ValueError("no record of rows")
        return seal


def read_row_seal(path: Path) -> RowSeal | None:
    """None where there is none, or it is damaged."""
    try:
        seal = RowSeal.from_json(read_sealed(path))
    except (OSError, *UNREADABLE):
        return None
    return seal if seal.task == path.stem else None


def blocks_of(source: RowSource) -> int:
    """Blocks in a piece: one of a source that makes a range item by item, which takes its time."""
    return 1 if getattr(source, "item_by_item", False) else _BLOCKS


_sources: dict[Path, RowSource] = {}


def load_source(path: Path) -> RowSource:
    """The source whose pickle lies there; one is kept in memory."""
    if path not in _sources:
        _sources.clear()
        with path.open("rb") as file:
            _sources[path] = pickle.load(file)
    return _sources[path]


def run_rows(job: RowJob, piece: RowPiece) -> RowResult:
    """Write these rows into the unfinished files of their shard.

    Raises SourceError for what a source cannot give or a dtype cannot hold, OSError for what cannot be read or written now.
    """
    source = load_source(job.source) if isinstance(job.source, Path) else job.source
    n, block = piece.stop - piece.start, job.block
    lost = getattr(source, "lost", dict)
    lost()  # of a piece that failed
    found, number = source.read(piece.start, piece.stop), functools.partial(row_number, source, piece.start)
    hashes = [xxhash.xxh3_64() for _ in range(0, n, block)]
    result = RowResult(np.empty(len(hashes), np.uint64), {}, Counter(lost()))
    for spec in job.fields:
        values = _checked(found.pop(spec.source.name, None), spec, piece)
        sums = spec.sums(values)
        try:
            made = np.ascontiguousarray(spec.make(values, number, result.counts, finite=all_finite(sums)))
        except SourceError as error:
            raise SourceError(f"{place_of(source, error.details['row'])}: {error}", **error.details) from error.__cause__
        if sums is not None:
            result.sums[spec.stored.name] = merge_sums([sums])[0]
        view: Any = memoryview(made.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        length = block * spec.stored.row_bytes
        for i, state in enumerate(hashes):
            state.update(view[i * length : (i + 1) * length])
        fd = os.open(_unfinished(job, piece.name, spec.stored.name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, view, ALIGN + piece.offset * spec.stored.row_bytes)
            begin_writing(fd)
        finally:
            os.close(fd)
    result.hashes[:] = [state.intdigest() for state in hashes]
    return result


def _checked(values: Any, spec: StoredField, piece: RowPiece) -> npt.NDArray[Any]:
    """Rows as the source declared them; SourceError where they are others."""
    wanted = (piece.stop - piece.start, *spec.source.shape)
    if isinstance(values, np.ndarray) and values.dtype == spec.source.stored and values.shape == wanted:
        return values
    was = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
    raise SourceError(
        f"rows {piece.start:,} to {piece.stop:,} of {spec.source.name}: expected {spec.source.dtype} {wanted}, the source gave {was}",
        row=piece.start,
        field=spec.source.name,
    )


def _unfinished(job: RowJob, name: str, field: str) -> Path:
    return job.scratch / f"{name}-{field}.rows"


def seal_rows(job: RowJob, name: str, seal: RowSeal, hashes: npt.NDArray[np.uint64]) -> RowSeal:
    """Make the files of a shard durable under their names, then its seal; returns the completed seal.

    When this returns, the shard survives anything; until then nothing is lost by doing it again.
    """
    files = {}
    for spec in job.fields:
        path = _unfinished(job, name, spec.stored.name)
        note = path.with_suffix(".hash")
        gone = note.exists() and not path.exists()  # a worker died between here and the seal
        files[spec.stored.name] = note.read_text("ascii") if gone else install_rows(path, job.shards, spec.stored, seal.rows, note)
    files["hashes"] = array_hash(hashes)
    if not stands(job.shards / file_name("hashes", files["hashes"]), files["hashes"]):
        save_array(job.shards, "hashes", hashes, job.scratch)
    done = replace(seal, files=files)
    job.seals.mkdir(exist_ok=True)
    path = job.seals / f"{seal.task}.json"
    write_sealed(path, done.to_json())
    if job.store is not None:
        send_shard(job.store, job.shards.parent, done.names(), path, large=0 if job.whole else len(done.files))
    return done
