"""Hides what a worker does: settle the items of one piece of a shard, and seal a shard whose pieces are all done.

Everything here is a plain function of picklable values, with no state between calls but caches.  Rows are written at their offsets with `pwrite` into
a file under `.build/tmp/`, so several workers fill one shard and a full disk is ENOSPC, never a signal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler import decode
from mmcompile.compiler.formats import belongs, may_be_tga
from mmcompile.compiler.preprocess import Preprocess, channel_sums, store
from mmcompile.compiler.reuse import RowTable
from mmcompile.compiler.seals import Seal, write_seal
from mmcompile.compiler.sources import Source
from mmcompile.errors import DecodeError, MMCompileError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.commit import install
from mmcompile.format.index import Field
from mmcompile.format.npy import ALIGN, file_name, hash_bytes, hash_file, header, save_array
from mmcompile.format.rejects import Reject
from mmcompile.format.samples import FLAGS, hash_pair, sample_dtype, shard_sums

__all__ = ["HAND", "Job", "Piece", "PieceResult", "Rows", "hash_items", "measure", "probe", "read_hand", "run_piece", "seal_shard"]

#: What a worker has in hand: position in the piece, seconds that it may take, process id.
HAND = struct.Struct("<qdq")

#: How an item ended.
STORED, COPIED, REJECTED, FAILED = 1, 2, 3, 4

_BITS = {word: bit for bit, word in FLAGS.items()}
_COPY = 8 << 20
#: Pictures above this are decoded one at a time: two honest ones of 169 megapixels take 0.7 GB each, and more while they are converted.
_LARGE_PIXELS = 48_000_000


@dataclass(frozen=True)
class Job:
    """What all pieces of a run share."""

    source: Source
    preprocess: Preprocess
    fields: tuple[Field, ...]
    scratch: Path
    shards: Path
    reuse: Path | None = None
    remembered: Path | None = None
    timeout_s: float = 60.0

    @property
    def image(self) -> Field:
        return self.fields[0]


@dataclass(frozen=True)
class Piece:
    """Some items of one shard: their positions in it, keys, class numbers, and hashes where the stat cache knows them."""

    task: str
    serial: int
    positions: tuple[int, ...]
    keys: tuple[bytes, ...]
    labels: tuple[int, ...] | None
    known: tuple[str | None, ...]
    stats: tuple[tuple[int, int, int, int], ...]


@dataclass
class PieceResult:
    """Outcomes (N,), records (N,) with everything but `key_stop`, hashes (N, 2) with `hashed` (N,), rejects by position, failures by position.

    `changed` (N,): the file that was read was not the one that was scanned, so its hash says nothing of the stat of the scan.
    """

    outcome: npt.NDArray[np.uint8]
    records: npt.NDArray[Any]
    hashes: npt.NDArray[np.uint64]
    hashed: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]
    rejects: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass
class Rows:
    """The rows of a shard in the unfinished file of `task`: where each stands in it, its record, key and class number."""

    task: str
    positions: npt.NDArray[np.int64]
    records: npt.NDArray[Any]
    keys: list[bytes]
    labels: npt.NDArray[np.int64] | None


def rows_path(scratch: Path, task: str) -> Path:
    """The unfinished file of a shard's images."""
    return scratch / f"{task}.rows"


def hand_path(scratch: Path, serial: int) -> Path:
    """Where the worker of a piece records what it has in hand."""
    return scratch / f"hand-{serial}"


def read_hand(path: Path) -> tuple[int, float, int] | None:
    """(position in the piece, seconds allowed, process id) or None before the worker has begun."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return HAND.unpack(data) if len(data) == HAND.size else None


class _OwnFault(Exception):
    """Its cause, an OSError, is about our own files."""


class _Hand:
    """Says which item is in hand and how long it may take, in a file that outlives the process; lets large pictures take turns."""

    def __init__(self, path: Path, base_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._base, self._at = base_s, 0
        self._turn_path, self._turn = path.with_name("large"), -1

    def take(self, at: int) -> None:
        """Begin an item."""
        self._end_turn()
        self._at = at
        self._write(self._base)

    def opened(self, width: int, height: int) -> None:
        """The size is known: a second more for each megapixel; a large picture waits until no other worker holds one.

        Called from within a decode, so what goes wrong here is told apart from what is wrong with the picture.
        """
        try:
            self._opened(width, height)
        except OSError as error:
            raise _OwnFault from error

    def _opened(self, width: int, height: int) -> None:
        if width * height > _LARGE_PIXELS and self._turn < 0:
            self._write(math.inf)
            self._turn = os.open(self._turn_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks: no turns
                fcntl.flock(self._turn, fcntl.LOCK_EX)
        self._write(self._base + width * height / 1e6)

    def close(self) -> None:
        self._end_turn()
        os.close(self._fd)

    def _write(self, limit_s: float) -> None:
        os.pwrite(self._fd, HAND.pack(self._at, limit_s, os.getpid()), 0)

    def _end_turn(self) -> None:
        if self._turn >= 0:
            os.close(self._turn)
            self._turn = -1


_tables: dict[str, RowTable] = {}


def _table_of(job: Job) -> RowTable | None:
    if job.reuse is None:
        return None
    key = str(job.reuse)
    if key not in _tables:
        _tables.clear()
        _tables[key] = RowTable(job.reuse)
    return _tables[key]


def _remembered(job: Job) -> dict[str, dict[str, Any]]:
    if job.remembered is None:
        return {}
    key = str(job.remembered)
    if key not in _rejects:
        _rejects.clear()
        _rejects[key] = json.loads(job.remembered.read_bytes())
    return _rejects[key]


_rejects: dict[str, dict[str, dict[str, Any]]] = {}


def run_piece(job: Job, piece: Piece) -> PieceResult:
    """Settle each item: copy its row where one is known to be right, else decode it; a bad image becomes a reject, an unreadable file a failure.

    Rejects of earlier runs are remembered by source hash, and not decoded again.  Raises OSError when rows cannot be written.
    """
    decode.initialise()
    n, image = len(piece.keys), job.image
    result = PieceResult(
        np.zeros(n, np.uint8), np.zeros(n, sample_dtype(job.fields)), np.zeros((n, 2), np.uint64), np.zeros(n, bool), np.zeros(n, bool)
    )
    table, remembered = _table_of(job), _remembered(job)
    target = os.open(rows_path(job.scratch, piece.task), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    hand = _Hand(hand_path(job.scratch, piece.serial), job.timeout_s)
    row: npt.NDArray[Any] = np.empty((1, *image.shape), image.stored)
    try:
        for i, key in enumerate(piece.keys):
            hand.take(i)
            try:
                digest, data = _read(job.source, key, piece.known[i])
                record = None if table is None else _take(table, digest, key, image, row)
                outcome = COPIED
                line = None if record is not None else remembered.get(remembered_as(digest, key))
                if record is None and line is None:
                    if data is None:
                        digest, data = _read(job.source, key, None)
                    outcome = STORED
                    record = _decode(job, cast(bytes, data), key, digest, row, hand)
            except DecodeError as error:
                result.outcome[i] = REJECTED
                result.rejects[i] = _reject(key, data, digest, error)
            except MemoryError:
                result.outcome[i], result.failures[i] = FAILED, "memory"
                continue
            except _Unreadable as error:
                result.outcome[i], result.failures[i] = FAILED, str(error)
                continue
            else:
                if record is None:
                    result.outcome[i] = REJECTED
                    result.rejects[i] = {**cast(dict[str, Any], line), "key": name_to_json(key)}
                else:
                    result.outcome[i] = outcome
                    result.records[i] = record
                    label = None if piece.labels is None else piece.labels[i]
                    result.records[i]["row_hash"] = _row_hash(row, label)
                    _write(target, row, ALIGN + piece.positions[i] * image.row_bytes)
            result.hashes[i], result.hashed[i] = hash_pair(digest), True
            result.changed[i] = data is not None and _stat(job.source, key) != piece.stats[i]
    finally:
        hand.close()
        os.close(target)
    hand_path(job.scratch, piece.serial).unlink(missing_ok=True)
    return result


def _stat(source: Source, key: bytes) -> tuple[int, int, int, int] | None:
    try:
        return source.stat(key)
    except OSError:
        return None


class _Unreadable(Exception):
    """A source that could not be read now; not the fault of its content."""


def _read(source: Source, key: bytes, known: str | None) -> tuple[str, bytes | None]:
    if known is not None:
        return known, None
    try:
        data = source.read(key)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise _Unreadable(error.strerror or str(error)) from error
    return hash_bytes(data), data


def remembered_as(digest: str, key: bytes) -> str:
    """What a reject is remembered by.  The content decides, and for TGA, which has no signature, the name."""
    return f"{digest} tga" if may_be_tga(as_text(key)) else digest


def _take(table: RowTable, digest: str, key: bytes, image: Field, row: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """A row that is already there, with a record that says what it would say had this very file been decoded."""
    found = table.take(digest, image, row)
    if found is None:
        return None
    name, format = as_text(key), found["format"].item().decode("ascii")
    if format == "TGA" and not may_be_tga(name):
        return None
    record = found.copy()
    wrong = _BITS["wrong-extension"]
    record["flags"] = (int(record["flags"]) & ~wrong) | (0 if belongs(name, format) else wrong)
    return record


def _decode(job: Job, data: bytes, key: bytes, digest: str, row: npt.NDArray[Any], hand: _Hand) -> npt.NDArray[Any]:
    try:
        decoded = decode.decode(data, as_text(key), job.preprocess, on_open=hand.opened)
        row[0] = store(decoded.pixels, job.preprocess, decoded.depth)
    except (MMCompileError, MemoryError):
        raise
    except _OwnFault as fault:
        raise cast(OSError, fault.__cause__) from None
    except Exception as error:  # whatever it is, one file must not end the run
        raise DecodeError("decoding failed in a way that is not foreseen", stage="load", code="unexpected", error=type(error).__name__) from error
    record: npt.NDArray[Any] = np.zeros((), sample_dtype(job.fields))
    record["source_size"], record["source_hash"] = len(data), hash_pair(digest)
    record["width"], record["height"] = decoded.width, decoded.height
    record["mode"], record["format"] = decoded.mode.encode(), decoded.format.encode()
    record["orientation"], record["depth"] = decoded.orientation, decoded.depth
    record["flags"] = sum(_BITS[word] for word in set(decoded.warnings))
    record["sum"], record["sum_squares"] = channel_sums(decoded.pixels)
    return record


def _row_hash(row: npt.NDArray[Any], label: int | None) -> int:
    state = xxhash.xxh3_64(cast(Any, row.reshape(-1).view(np.uint8)))
    if label is not None:
        state.update(np.array(label, "<i8").tobytes())
    return int(state.intdigest())


def _write(fd: int, row: npt.NDArray[Any], offset: int) -> None:
    _write_all(fd, memoryview(row.reshape(-1).view(np.uint8)), offset)  # type: ignore[arg-type]


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _reject(key: bytes, data: bytes | None, digest: str, error: DecodeError) -> dict[str, Any]:
    details = error.details
    return reject_line(key, None if data is None else len(data), digest, str(error), details)


def reject_line(key: bytes, size: int | None, digest: str | None, message: str, details: dict[str, Any]) -> dict[str, Any]:
    """One line of the rejects file: our words only, never a decoder's text or an address."""
    stage, code = str(details.get("stage", "load")), str(details.get("code", "corrupt"))
    return Reject(as_text(key), size, digest, stage, code, details.get("error"), message).to_json()


def seal_shard(job: Job, seal: Seal, rows: Rows, folder: Path) -> Seal:
    """Make the files of a shard durable under their names, then its seal record; returns the completed seal.

    The gaps of rejects are closed first.  When this returns, the shard survives anything; until then nothing is lost by doing it again: a note
    of the hash is left before the rows move out of the unfinished file.
    """
    image, count = job.image, len(rows.positions)
    files: dict[str, str] = {}
    sums: list[dict[str, Any]] = []
    written = rows_path(job.scratch, rows.task)
    if count:
        files[image.name] = _install_rows(job, written, rows.positions)
        if rows.labels is not None:
            files["label"] = save_array(job.shards, "label", rows.labels.astype("<i8"), job.scratch)
        samples = rows.records
        samples["key_stop"] = np.cumsum([len(k) for k in rows.keys])
        files["samples"] = save_array(job.shards, "samples", samples, job.scratch)
        files["keys"] = save_array(job.shards, "keys", np.frombuffer(b"".join(rows.keys), np.uint8), job.scratch)
        sums = shard_sums(samples, image.sample_shape[1] * image.sample_shape[2])
    done = seal.complete(files, count, sums, rows.records["flags"])
    write_seal(folder, done)
    written.unlink(missing_ok=True)
    return done


def _install_rows(job: Job, written: Path, positions: npt.NDArray[np.int64]) -> str:
    """Give the rows of an unfinished file their header and final name; returns the hash."""
    image, count, note = job.image, len(positions), written.with_suffix(".hash")
    if not written.exists() and note.exists():  # a worker died between here and the seal
        return note.read_text("ascii")
    path = written if count == positions[-1] + 1 else _packed(written, positions, image.row_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, ALIGN + count * image.row_bytes)
        _write_all(fd, memoryview(header(image.stored, (count, *image.shape))), 0)
        digest = hash_file(fd)
    finally:
        os.close(fd)
    note.write_text(digest, "ascii")
    install(path, job.shards / file_name(image.name, digest))
    return digest


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
                _write_all(target, memoryview(part), at)
                at, start, left = at + len(part), start + len(part), left - len(part)
    finally:
        os.close(source)
        os.close(target)
    return packed


def hash_items(job: Job, keys: list[bytes]) -> npt.NDArray[np.uint64]:
    """xxh3-128 (N, 2) of each source; zeros where it cannot be read."""
    out = np.zeros((len(keys), 2), np.uint64)
    for i, key in enumerate(keys):
        try:
            out[i] = hash_pair(_read(job.source, key, None)[0])
        except (_Unreadable, MemoryError):
            continue
    return out


def probe(job: Job, keys: list[bytes]) -> list[tuple[int, int, str] | None]:
    """(width, height, mode) of each source as it would be stored, from its header; None where it has none."""
    decode.initialise()
    out: list[tuple[int, int, str] | None] = []
    for key in keys:
        try:
            out.append(decode.probe(job.source.read(key), as_text(key), job.preprocess))
        except Exception:  # no size to be had; the build itself says what is wrong with it
            out.append(None)
    return out


def measure(job: Job, keys: list[bytes], limit_s: float) -> tuple[int, float]:
    """Decode and preprocess some items for at most about `limit_s`; (items, seconds), not counting the first, which pays for start-up."""
    decode.initialise()
    done, began = -1, time.perf_counter()
    for key in keys:
        try:
            decoded = decode.decode(job.source.read(key), as_text(key), job.preprocess)
            channel_sums(decoded.pixels)
            store(decoded.pixels, job.preprocess, decoded.depth)
        except Exception:  # a bad image takes its time, too
            pass
        done += 1
        if done == 0:
            began = time.perf_counter()
        if time.perf_counter() - began > limit_s:
            break
    return max(done, 0), time.perf_counter() - began
