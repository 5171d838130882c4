"""Hides how the unfinished rows of a shard become its files, durable under their names, and its seal."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.seals import Seal, write_seal
from mmcompile.compiler.staging import send_shard
from mmcompile.errors import FormatError
from mmcompile.format.catalog import digest_file
from mmcompile.format.commit import install
from mmcompile.format.fields import Field, pixel_fields, value_fields
from mmcompile.format.npy import ALIGN, file_name, hash_file, header, libc, save_array
from mmcompile.format.samples import sums_of

if TYPE_CHECKING:
    from mmcompile.compiler.task import Job

__all__ = ["Rows", "begin_writing", "install_rows", "rows_path", "seal_shard", "stands", "write_all"]

_COPY = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


@dataclass
class Rows:
    """The rows of a shard in the unfinished files of `task`: where each stands in them, its record, the name of its source, its values."""

    task: str
    positions: npt.NDArray[np.int64]
    records: npt.NDArray[Any]
    keys: list[bytes]
    values: npt.NDArray[np.void]


def rows_path(scratch: Path, task: str, field: str) -> Path:
    """The unfinished file of a pixel field of a shard."""
    return scratch / f"{task}.{field}.rows"


def write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def begin_writing(fd: int) -> None:
    """Let the kernel begin to bring to the disk what was written so far, so that little is left for the sync that seals the shard.  Advice only."""
    start = getattr(libc(), "sync_file_range", None)
    if start is not None:
        start(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def seal_shard(job: Job, seal: Seal, rows: Rows, folder: Path) -> Seal:
    """Make the files of a shard durable under their names, then its seal record; returns the completed seal.

    The gaps of rejects are closed first.  Where OUT is a URL, all of it is sent there.  When this returns, the shard survives anything; until then
    nothing is lost by doing it again: a note of the hash is left before the rows move out of the unfinished file.
    """
    count = len(rows.positions)
    files: dict[str, str] = {}
    sums: dict[str, list[dict[str, Any]]] = {}
    written = {spec: rows_path(job.scratch, rows.task, spec.name) for spec in pixel_fields(job.fields)}
    if count:
        for spec, path in written.items():
            files[spec.name] = _install_rows(job, spec, path, rows.positions)
        for spec in value_fields(job.fields):
            files[spec.name] = save_array(job.shards, spec.name, np.ascontiguousarray(rows.values[spec.name]), job.scratch)
        samples, keys = rows.records, [job.trace.key(name) for name in rows.keys]
        samples["key_stop"] = np.cumsum([len(k) for k in keys])
        files["samples"] = save_array(job.shards, "samples", samples, job.scratch)
        files["keys"] = save_array(job.shards, "keys", np.frombuffer(b"".join(keys), np.uint8), job.scratch)
        sums = sums_of(samples, job.fields)
    done = seal.complete(files, count, sums, rows.records["flags"])
    write_seal(folder, done)
    if job.store is not None:
        send_shard(job.store, job.shards.parent, done.names(), folder / f"{done.task}.json")
    for path in written.values():
        path.unlink(missing_ok=True)
    return done


def _install_rows(job: Job, spec: Field, written: Path, positions: npt.NDArray[np.int64]) -> str:
    """Give the rows of an unfinished file their header and final name; returns the hash."""
    if not written.exists() and _note(written).exists():  # a worker died between here and the seal
        return _note(written).read_text("ascii")
    count = len(positions)
    path = written if count == positions[-1] + 1 else _packed(written, positions, spec.row_bytes)
    return install_rows(path, job.shards, spec, count, _note(written))


def _note(written: Path) -> Path:
    """Where the hash of an unfinished file stands once that has moved to its place."""
    return written.with_suffix(".hash")


def install_rows(path: Path, shards: Path, spec: Field, count: int, note: Path) -> str:
    """Give an unfinished file, whose rows stand from ALIGN on, its header and final name, durably; returns the hash, which is left in `note`.

    A file of that name that is whole already is not touched.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, ALIGN + count * spec.row_bytes)
        write_all(fd, memoryview(header(spec.stored, (count, *spec.shape))), 0)
        digest = hash_file(fd)
    finally:
        os.close(fd)
    note.write_text(digest, "ascii")
    final = shards / file_name(spec.name, digest)
    if stands(final, digest):  # a published shard of the same rows, whose other fields or keys are others now
        path.unlink()
    else:
        install(path, final)
    return digest


def stands(path: Path, digest: str) -> bool:
    """Is this file there already, whole?"""
    try:
        return digest_file(path) == digest
    except (FormatError, FileNotFoundError):
        return False


def _packed(path: Path, positions: npt.NDArray[np.int64], row_bytes: int) -> Path:
    """A copy of the rows without the gaps of rejects, run by run; the original stays until the shard is sealed, so this can be done again."""
    packed = path.with_suffix(".packed")
    source, target = os.open(path, os.O_RDONLY | os.O_CLOEXEC), os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        at = ALIGN
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            start, left = ALIGN + int(run[0]) * row_bytes, len(run) * row_bytes
            while left:
                part = os.pread(source, min(_COPY, left), start)
                if not part:
                    raise OSError(errno.EIO, "an unfinished shard file is shorter than its rows")
                write_all(target, memoryview(part), at)
                at, start, left = at + len(part), start + len(part), left - len(part)
    finally:
        os.close(source)
        os.close(target)
    return packed
