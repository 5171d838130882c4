"""Hides what a worker does with one piece of a shard: settle its items, each to a stored row, a copied one, a reject or a failure.

Everything here is a plain function of picklable values, with no state between calls but caches.  Rows are written at their offsets with `pwrite` into
a file under `.build/tmp/`, so several workers fill one shard and a full disk is ENOSPC, never a signal.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode, fieldoptions, resample, volumetask
from mmcompile.compiler.ahead import ReadAhead
from mmcompile.compiler.copying import Copier
from mmcompile.compiler.formats import belongs, extension, may_be_tga
from mmcompile.compiler.hand import Hand, OwnFault, hand_path
from mmcompile.compiler.pixelrows import PixelRows, Unfinished
from mmcompile.compiler.preprocess import Preprocess, channel_sums, store
from mmcompile.compiler.reuse import RowTable
from mmcompile.compiler.sources import Source
from mmcompile.compiler.sources.parts import beside_of, files_of, name_of, unpack
from mmcompile.compiler.spatial import Mover
from mmcompile.compiler.staging import Fetched
from mmcompile.compiler.trace import PLAIN, Trace, source_sha256
from mmcompile.compiler.transform import transformed
from mmcompile.compiler.views import Shown
from mmcompile.errors import DecodeError, MMCompileError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.fields import Field, pixel_fields
from mmcompile.format.npy import hash_bytes
from mmcompile.format.rejects import Reject
from mmcompile.format.samples import FLAGS, hash_pair, pair_hash, sample_dtype
from mmcompile.format.store import Store

__all__ = [
    "COPIED",
    "FAILED",
    "REJECTED",
    "STORED",
    "Job",
    "Piece",
    "PieceResult",
    "hash_items",
    "measure",
    "probe",
    "reject_line",
    "renamed",
    "run_piece",
    "warm_up",
]

#: How an item ended.
STORED, COPIED, REJECTED, FAILED = 1, 2, 3, 4

_What = TypeVar("_What")
_BITS = {word: bit for bit, word in FLAGS.items()}


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
    #: Where finished shards are sent, and old ones are brought from, when OUT is a URL.
    store: Store | None = None
    versions: dict[str, str] = field(default_factory=dict)
    #: Moves what belongs to a picture; None where nothing does.
    mover: Mover | None = None
    trace: Trace = PLAIN

    @property
    def pixels(self) -> tuple[Field, ...]:
        """The fields that items are decoded to, as many as an item has files."""
        return pixel_fields(self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of these."""
        return sum(f.row_bytes for f in self.pixels)


@dataclass(frozen=True)
class Piece:
    """Some items of one shard: their positions, keys, values of the scan, and hashes (N, 2) where they are `known` (N,) without reading.

    `faults`: what is wrong with the values of some, by their place here.
    """

    task: str
    serial: int
    positions: tuple[int, ...]
    keys: tuple[bytes, ...]
    values: npt.NDArray[np.void]
    hashes: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]
    stats: tuple[tuple[int, int, int, int], ...]
    faults: dict[int, str] = field(default_factory=dict)


@dataclass
class PieceResult:
    """Outcomes (N,), records (N,) with everything but `key_stop`, hashes (N, 2) with `hashed` (N,), rejects by position, failures by position.

    `changed` (N,): the file that was read was not the one that was scanned, so its hash says nothing of the stat of the scan.
    `moved` (N,): the values as they are stored; None where they are those of the piece.
    `told`: what a step of the user's own first raised.
    `decode_s`: seconds that decoding took; `saving_s`: how many of them `jpeg_scaling` would have saved, about.
    """

    outcome: npt.NDArray[np.uint8]
    records: npt.NDArray[Any]
    hashes: npt.NDArray[np.uint64]
    hashed: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]
    moved: npt.NDArray[np.void] | None = None
    rejects: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    told: str = ""
    decode_s: float = 0.0
    saving_s: float = 0.0


_copiers: dict[str, Copier] = {}


def _copier_of(job: Job) -> Copier | None:
    if job.reuse is None:
        return None
    key = str(job.reuse)
    if key not in _copiers:
        _copiers.clear()
        bring = None if job.store is None else Fetched(job.store, job.reuse.parent / "fetched")
        _copiers[key] = Copier(RowTable(job.reuse, bring), job.preprocess, job.fields, job.mover, job.trace)
    return _copiers[key]


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
    if piece.known.all():  # nothing may have to be decoded
        decode.initialise()
    else:  # before an item is in hand, whose time it would be
        warm_up(job.preprocess)
    n = len(piece.keys)
    result = PieceResult(
        np.zeros(n, np.uint8),
        np.zeros(n, sample_dtype(job.fields, job.trace.sha256)),
        np.zeros((n, 2), np.uint64),
        np.zeros(n, bool),
        np.zeros(n, bool),
    )
    result.moved = None if job.mover is None else np.zeros(n, job.mover.dtype)
    copier, remembered = _copier_of(job), _remembered(job)
    row = PixelRows.empty(job.pixels, 1)
    with contextlib.ExitStack() as stack:
        target = Unfinished(job.scratch, piece.task, job.pixels)
        stack.callback(target.close)
        hand = Hand(hand_path(job.scratch, piece.serial), job.timeout_s)
        stack.callback(hand.close)
        if copier is not None:
            _copy_known(piece, copier, target, hand, result)
        todo = np.flatnonzero(result.outcome == 0).tolist()
        ahead = ReadAhead(job.source, [piece.keys[i] for i in todo], [piece.stats[i][0] for i in todo])
        stack.callback(ahead.close)
        for at, i in enumerate(todo):
            key = piece.keys[i]
            hand.take(i)
            values = piece.values[i : i + 1]
            data = None
            try:
                if piece.known[i] and not job.trace.sha256 and i not in piece.faults:  # these need a SHA-256, or a reject that says a size
                    digest = pair_hash(piece.hashes[i])
                else:
                    data = _read(ahead.read, at)
                    digest = hash_bytes(data)
                outcome = COPIED
                if i in piece.faults:
                    raise DecodeError(piece.faults[i], stage="value", code="value")
                record, values = (None, values) if copier is None else _copy_one(copier, digest, key, values, row)
                line = None if record is not None else remembered.get(remembered_as(digest, key))
                if record is None and line is None:
                    if data is None:
                        data = _read(ahead.read, at)
                        digest = hash_bytes(data)
                    outcome = STORED
                    record = _decode(job, data, key, digest, row, hand, result)
                    if job.mover is not None:
                        if why := job.mover.misfits(values, record.reshape(1)):
                            raise DecodeError(why[0], stage="value", code="value")
                        values = job.mover.moved(values, record.reshape(1), [key])
                    state = next(row.states())
                    state.update(values.tobytes())
                    record["row_hash"] = state.intdigest()
                if record is not None and data is not None and job.trace.sha256:
                    record["sha256"] = source_sha256(data)
            except DecodeError as error:
                result.outcome[i] = REJECTED
                result.rejects[i] = _reject(job.trace.key(key), data, digest, error)
                result.told = result.told or str(error.details.get("told", ""))
            except MemoryError:
                result.outcome[i], result.failures[i] = FAILED, "memory"
                continue
            except _Unreadable as error:
                result.outcome[i], result.failures[i] = FAILED, str(error)
                continue
            else:
                if record is None:
                    result.outcome[i] = REJECTED
                    result.rejects[i] = {**cast(dict[str, Any], line), "key": name_to_json(job.trace.key(key))}
                else:
                    result.outcome[i] = outcome
                    result.records[i] = record
                    if result.moved is not None:
                        result.moved[i] = values[0]
                    target.write(row, piece.positions[i])
            result.hashes[i], result.hashed[i] = hash_pair(digest), True
            result.changed[i] = data is not None and _stat(job.source, key) != piece.stats[i]
    hand_path(job.scratch, piece.serial).unlink(missing_ok=True)
    return result


def _stat(source: Source, key: bytes) -> tuple[int, int, int, int] | None:
    try:
        return source.stat(key)
    except OSError:
        return None


class _Unreadable(Exception):
    """A source that could not be read now; not the fault of its content."""


def _read(read: Callable[[_What], bytes], what: _What) -> bytes:
    try:
        return read(what)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise _Unreadable(error.strerror or str(error)) from error


def remembered_as(digest: str, key: bytes) -> str:
    """What a reject is remembered by.  The content decides, and for TGA, which has no signature, the name."""
    return f"{digest} tga" if may_be_tga(as_text(key)) else digest


def _copy_known(piece: Piece, copier: Copier, target: Unfinished, hand: Hand, result: PieceResult) -> None:
    """Copy, in runs, the rows of items whose hashes are known; those that have none that is right are left as they are."""
    wanted = piece.known.copy()
    wanted[list(piece.faults)] = False
    for items, shard, first in copier.runs(piece.hashes, np.flatnonzero(wanted)):
        hand.take(int(items[0]))
        rows, values, records, right = copier.copy(shard, first, piece.values[items], [piece.keys[i] for i in items.tolist()])
        right &= renamed(records, [piece.keys[i] for i in items.tolist()], copier.nameless)
        positions = np.array(piece.positions)[items]
        good = np.flatnonzero(right)
        for run in np.split(good, np.flatnonzero((np.diff(good) != 1) | (np.diff(positions[good]) != 1)) + 1):
            if len(run):
                target.write(rows[run[0] : run[-1] + 1], int(positions[run[0]]))
        done = items[good]
        if result.moved is not None:
            result.moved[done] = values[good]
        result.outcome[done], result.records[done] = COPIED, records[good]
        result.hashes[done], result.hashed[done] = piece.hashes[done], True


def _copy_one(
    copier: Copier, digest: str, key: bytes, values: npt.NDArray[np.void], row: PixelRows
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.void]]:
    """(record, values as stored) of a row of this source that is right, wherever there is one; (None, values) where there is none."""
    for shard, at in copier.places(hash_pair(digest)):
        rows, moved, records, right = copier.copy(shard, at, values, [key])
        if right[0] and renamed(records, [key], copier.nameless)[0]:
            row.take(rows)
            return records[0], moved
    return None, values


def renamed(records: npt.NDArray[Any], keys: list[bytes], nameless: bool) -> npt.NDArray[np.bool_]:
    """Make records (N,) say what they would say had these very files been decoded; False (N,) for those that would not have been.

    Of `nameless` rows a key without an extension may be a hash: these stay as they are.
    """
    files = [(as_text(key), format.decode("ascii")) for key, format in zip(keys, records["format"].tolist(), strict=True)]
    hidden = np.array([nameless and not extension(name) for name, _ in files])
    bit = np.uint32(_BITS["wrong-extension"])
    made = (records["flags"] & ~bit) | np.where([belongs(*file) for file in files], np.uint32(0), bit)
    records["flags"] = np.where(hidden, records["flags"], made)
    right: npt.NDArray[np.bool_] = hidden | np.array([format != "TGA" or may_be_tga(name) for name, format in files])
    return right


def _decode(job: Job, data: bytes, key: bytes, digest: str, row: PixelRows, hand: Hand, result: PieceResult) -> npt.NDArray[Any]:
    began = time.perf_counter()
    files = [data] if len(row.arrays) == 1 else unpack(data)
    try:
        decoded = volumetask.decoded(files[0], key, job.preprocess, hand.opened)
        pixels, depth = _stepped(decoded.pixels, decoded.depth, job.preprocess)
        sums = _stored(pixels, job.preprocess, depth, row.arrays[0][0])
    except (MMCompileError, MemoryError):
        raise
    except OwnFault as fault:
        raise cast(OSError, fault.__cause__) from None
    except Exception as error:  # whatever it is, one file must not end the run
        raise _unforeseen(error) from error
    took = time.perf_counter() - began
    result.decode_s, result.saving_s = result.decode_s + took, result.saving_s + took * decoded.saving
    record: npt.NDArray[Any] = np.zeros((), result.records.dtype)
    record["source_size"], record["source_hash"] = len(data), hash_pair(digest)
    record["width"], record["height"] = decoded.width, decoded.height
    record["mode"], record["format"] = decoded.mode.encode(), decoded.format.encode()
    record["orientation"], record["depth"] = decoded.orientation, depth
    record["flags"] = sum(_BITS[word] for word in set(decoded.warnings))
    record["sum"], record["sum_squares"] = sums
    shown = _shown(job.preprocess, key, record)
    for spec, file, name, array in zip(job.pixels[1:], files[1:], beside_of(key), row.arrays[1:], strict=True):
        _decode_part(job, spec, file, name, array[0], record, shown)
    return record


def _stepped(pixels: npt.NDArray[Any], depth: int, preprocess: Preprocess) -> tuple[npt.NDArray[Any], int]:
    """(pixels, depth) after the user's own step, if there is one, which gets each view alone."""
    if preprocess.transform is None:
        return pixels, depth
    if preprocess.views is None:
        return transformed(pixels, depth, preprocess)
    made = [transformed(view, depth, preprocess) for view in pixels]
    return np.stack([view for view, _ in made]), made[0][1]


def _shown(preprocess: Preprocess, key: bytes, record: npt.NDArray[Any]) -> tuple[Shown, ...] | None:
    """What views show of an item, and of all that belongs to its picture; None without them."""
    if preprocess.drawn is None:
        return None
    turned = record["orientation"] >= 5 and preprocess.resolved().orientation == "apply"
    height, width = (record["width"], record["height"]) if turned else (record["height"], record["width"])
    return preprocess.drawn.shown(key, int(height), int(width))


def _decode_part(
    job: Job, spec: Field, data: bytes, name: bytes, row: npt.NDArray[Any], record: npt.NDArray[Any], shown: tuple[Shown, ...] | None
) -> None:
    """Store a further file of an item in its row; `record` holds what is known of the first.  Raises DecodeError, naming field and file."""
    options = _options_of(job.preprocess, spec.name)
    size = int(record["width"]), int(record["height"])
    try:
        if spec.meaning == "mask":
            record["flags"] |= _BITS["lossy-mask"] * decode.is_lossy(data)
            row[...] = decode.mask(data, name_of(name), options, size, int(record["orientation"]), shown)
            if b"\0" not in name and decode.turns_unseen(options, size, int(record["orientation"])):
                record["flags"] |= _BITS["mask-turned"]
            return
        decoded = volumetask.decoded(data, name, options, shown=shown)
        if shown is not None and (decoded.width, decoded.height) != size:
            words = [f"{w}x{h}" for w, h in ((decoded.width, decoded.height), size)]
            raise DecodeError(
                f"{words[0]} (width x height) beside a picture of {words[1]}, and views show the same part of both: they must be of one size",
                stage="geometry",
                code="size",
            )
        sums = _stored(decoded.pixels, options, decoded.depth, row)
    except DecodeError as error:
        raise DecodeError(f"{spec.name}{job.trace.called(name)}: {fieldoptions.for_field(spec.name, str(error))}", **error.details) from error
    except (MMCompileError, MemoryError):
        raise
    except Exception as error:
        raise _unforeseen(error, f"{spec.name}{job.trace.called(name)}: ") from error
    suffix = f"_{spec.name}"
    record[f"depth{suffix}"] = decoded.depth
    record[f"sum{suffix}"], record[f"sum_squares{suffix}"] = sums


def _stored(pixels: npt.NDArray[Any], options: Preprocess, depth: int, row: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Store pixels in a row; (sums, sums of squares) of each channel."""
    if options.kind == "volume":
        volumetask.store_volume(pixels, options, depth, row)
        return volumetask.sums_of_volume(pixels)
    for view, out in zip(pixels, row, strict=True) if options.views is not None else ((pixels, row),):
        store(view, options, depth, out)
    return channel_sums(_pixels_of(row, pixels, options))


def _unforeseen(error: Exception, where: str = "") -> DecodeError:
    return DecodeError(f"{where}decoding failed in a way that is not foreseen", stage="load", code="unexpected", error=type(error).__name__)


@functools.lru_cache(maxsize=64)
def _options_of(preprocess: Preprocess, name: str) -> Preprocess:
    return preprocess.of(name)


def _pixels_of(row: npt.NDArray[Any], pixels: npt.NDArray[Any], preprocess: Preprocess) -> npt.NDArray[Any]:
    """`pixels` (H, W, C), taken from the row where that holds the same values: there they lie together.  Of views all, one below the other."""
    if preprocess.views is not None:
        return pixels.reshape(-1, *pixels.shape[2:])
    if row.dtype.kind not in "ui" or row.dtype != pixels.dtype or preprocess.dtype == "bfloat16":
        return pixels
    return row.transpose(1, 2, 0) if preprocess.layout == "chw" else row


def _reject(key: bytes, data: bytes | None, digest: str, error: DecodeError) -> dict[str, Any]:
    details = error.details
    return reject_line(key, None if data is None else len(data), digest, str(error), details)


def reject_line(key: bytes, size: int | None, digest: str | None, message: str, details: dict[str, Any]) -> dict[str, Any]:
    """One line of the rejects file: our words only, never a decoder's text or an address."""
    stage, code = str(details.get("stage", "load")), str(details.get("code", "corrupt"))
    return Reject(as_text(key), size, digest, stage, code, details.get("error"), message).to_json()


def hash_items(job: Job, keys: list[bytes]) -> npt.NDArray[np.uint64]:
    """xxh3-128 (N, 2) of each source; zeros where it cannot be read."""
    out = np.zeros((len(keys), 2), np.uint64)
    ahead = ReadAhead(job.source, keys, [-1] * len(keys))
    for i in range(len(keys)):
        try:
            out[i] = hash_pair(hash_bytes(_read(ahead.read, i)))
        except (_Unreadable, MemoryError):
            continue
    return out


def first_file(data: bytes, key: bytes) -> bytes:
    """The file of an item that its other files belong to."""
    return unpack(data)[0] if beside_of(key) else data


def probe(job: Job, keys: list[bytes]) -> list[tuple[Any, ...] | None]:
    """(width, height, mode) of each source as it would be stored, of a volume (sides, channels), from its header; None where it has none."""
    decode.initialise()
    out: list[tuple[Any, ...] | None] = []
    for key in keys:
        try:
            data = first_file(job.source.read(key), key)
            if job.preprocess.kind == "volume":
                out.append(decode.probe_volume(files_of(data, key), job.preprocess))
            else:
                out.append(decode.probe(data, as_text(key), job.preprocess))
        except Exception:  # no size to be had; the build itself says what is wrong with it
            out.append(None)
    return out


def warm_up(preprocess: Preprocess) -> None:
    """Load what decoding with these options needs; starts no thread."""
    decode.initialise()
    if preprocess.uses_torch():
        resample.initialise()


def measure(job: Job, keys: list[bytes], limit_s: float) -> tuple[int, float]:
    """Decode and preprocess some items for at most about `limit_s`; (items, seconds), not counting the first, which pays for start-up."""
    decode.initialise()
    done, began = -1, time.perf_counter()
    row = np.empty(job.preprocess.field("image").shape, job.preprocess.stored_dtype())
    for key in keys:
        try:
            decoded = volumetask.decoded(first_file(job.source.read(key), key), key, job.preprocess)
            _stored(decoded.pixels, job.preprocess, decoded.depth, row)
        except Exception:  # a bad image takes its time, too
            pass
        done += 1
        if done == 0:
            began = time.perf_counter()
        if time.perf_counter() - began > limit_s:
            break
    return max(done, 0), time.perf_counter() - began
