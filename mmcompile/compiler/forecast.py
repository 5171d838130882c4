"""Hides how a dry run foresees what a build takes: seconds, from a few images decoded now, and the files that would lie in OUT."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.engines import result_within
from mmcompile.compiler.output import Contents, draft_index, lists_of, table_of
from mmcompile.compiler.plan import ShardTask
from mmcompile.compiler.planning import Listed, Planned, Prediction, Wanted
from mmcompile.compiler.previous import array_hash, joined
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.task import Job, measure, renamed
from mmcompile.errors import EngineError, FormatError
from mmcompile.format.fields import pixel_fields, value_fields
from mmcompile.format.npy import file_bytes, file_name, hash_bytes
from mmcompile.format.samples import sample_dtype, summed

__all__ = ["INDEX_ERROR", "seconds", "sizes"]

#: Images decoded to see how long one takes, and seconds after which no further one is begun.
_LOOKED_AT, _LIMIT_S = 24, 2.0
#: Copying rows, hashed and durable: 137 to 161 MB/s were measured on a shared cloud disk (scripts/bench_rebuild.py).
_COPY_BYTES_PER_S = 150e6
#: Bytes by which each of the two files of an index may differ from what was foreseen: the digits of statistics are known when it is done.
INDEX_ERROR = 1024
#: Digits of a mean or of a standard deviation, as most have them.
_SOME = 0.12345678901234567


def seconds(executor: Executor, job: Job, planned: Planned, foreseen: Prediction, keys: Sequence[bytes], workers: int) -> float | None:
    """About how long a build would take beyond listing and planning, its start-up included; None where no image could be measured."""
    todo = planned.todo
    if not todo:
        return 0.0
    items = [i for t in todo for i in (t.start, (t.start + t.stop) // 2, t.stop - 1)]
    sample = [keys[i] for i in [items[0], *items[:: max(1, len(items) // _LOOKED_AT)]]] if foreseen.decoded else []
    began = time.monotonic()
    try:
        done, spent = result_within(executor, executor.submit(measure, job, sample, _LIMIT_S), job.timeout_s)
    except EngineError:
        return None
    if foreseen.decoded and not done:
        return None
    start = max(0.0, time.monotonic() - began - float(spent))
    decoding = float(spent / done * foreseen.decoded / workers) if done else 0.0
    return start + decoding + foreseen.copied * job.row_bytes / _COPY_BYTES_PER_S


def sizes(out: Path, planned: Planned, foreseen: Prediction, wanted: Wanted, listed: Listed, contents: Contents | None) -> tuple[int, int]:
    """(bytes of all files that the dataset would name, each once; bytes of those of them that are not there yet).

    `contents`: of the generation, but for its parts; None for shards alone.  Exact where every image that has to be decoded can be, none gives a file
    that another shard has, too, and index.json is written: its statistics are known when it is done, so twice INDEX_ERROR may be added or missing.
    """
    old, files, shards = _Old(planned), dict[str, int](), list[tuple[int, dict[str, str]]]()
    stored = np.ones(len(listed.keys), bool)
    stored[list(foreseen.rejects)] = False
    for task in planned.tasks:
        whole = planned.whole.get(task.number)
        if whole is not None:
            names = [file_name(kind, digest) for kind, digest in whole.files.items()]
            files |= {name: os.path.getsize(out / "shards" / name) for name in names if name not in files}
            shards.append((whole.rows, whole.files))
            continue
        picked = stored[task.start : task.stop]
        if picked.any():
            copied = bool(foreseen.copies[task.start : task.stop][picked].all())
            known, made = _shard(task, picked, wanted, listed, old if copied else None)
            files |= made
            shards.append((int(picked.sum()), known))
    if contents is not None:
        files |= _beside(contents, [(rows, known) for rows, known in shards if rows])
    return sum(files.values()), sum(size for name, size in files.items() if not os.path.exists(out / "shards" / name))


def _shard(task: ShardTask, picked: npt.NDArray[np.bool_], wanted: Wanted, listed: Listed, old: _Old | None) -> tuple[dict[str, str], dict[str, int]]:
    """(hashes of the files of one shard as far as they can be told without an image, by kind; bytes of all its files, by name).

    `picked` (n,): which of its items are stored; `old`: where all of them are copied from.
    """
    part, fields = slice(task.start, task.stop), wanted.fields
    rows, keys, values = int(picked.sum()), listed.keys[part], listed.scan.values[part][picked]
    blob, stops = joined(keys, picked, wanted.trace)
    arrays = {f.name: (f.stored, (rows, *f.shape)) for f in fields} | {
        "samples": (sample_dtype(fields, wanted.trace.sha256), (rows,)),
        "keys": (blob.dtype, blob.shape),
    }
    known = {"keys": array_hash(blob)}
    others = {} if wanted.mover is not None else {f.name: array_hash(np.ascontiguousarray(values[f.name])) for f in value_fields(fields)}
    known |= others
    if old is not None:
        known |= old.alike(listed.hashes[part][picked], [keys[i] for i in np.flatnonzero(picked).tolist()], stops, others)
    return known, {file_name(kind, known.get(kind, f"of task {task.id}")): file_bytes(*what) for kind, what in arrays.items()}


class _Old:
    """The shards whose rows can be copied as they are."""

    def __init__(self, planned: Planned) -> None:
        self._shards: dict[int, list[OldShard]] = {}
        for shard in planned.previous.old:
            if shard.made is None:
                self._shards.setdefault(shard.rows, []).append(shard)
        self._known: dict[int, dict[str, OldShard]] = {}
        self._trace = planned.previous.trace

    def alike(self, hashes: npt.NDArray[np.uint64], keys: list[bytes], stops: npt.NDArray[np.int64], others: dict[str, str]) -> dict[str, str]:
        """The hashes of the pixels' files and, where it can be told, of the provenance of a shard of these sources (N, 2): where one has the same."""
        if len(keys) not in self._known:
            self._known[len(keys)] = {hash_bytes(s["source_hash"].tobytes()): shard for shard, s in self._read(len(keys))}
        shard = self._known[len(keys)].get(hash_bytes(hashes.tobytes()))
        if shard is None:
            return {}
        found = {f.name: shard.files[f.name] for f in pixel_fields(shard.fields)}
        same = {f.name: shard.files[f.name] for f in value_fields(shard.fields)} == others
        if same and shard.sha256 == self._trace.sha256:  # else the records are others, or the hash of each row is another one
            samples = shard.samples()
            samples["key_stop"] = stops
            renamed(samples, keys, self._trace.nameless)
            found["samples"] = array_hash(samples)
        return found

    def _read(self, rows: int) -> Iterator[tuple[OldShard, npt.NDArray[Any]]]:
        """The shards of so many rows, each with its provenance; those that cannot be read are passed over."""
        for shard in self._shards.get(rows, ()):
            with contextlib.suppress(FormatError, FileNotFoundError):
                yield shard, shard.samples()


def _beside(contents: Contents, shards: list[tuple[int, dict[str, str]]]) -> dict[str, int]:
    """The files of a generation beside those of its shards (rows, and the hashes that are known, of each), name -> bytes."""
    samples = sum(rows for rows, _ in shards)
    statistics: dict[str, Any] = {}
    for f, _ in summed(contents.fields):
        pixels = samples * math.prod(f.shape) // f.channels
        sums = {"depth": 8, "pixels": pixels, "sum": [pixels * 128] * f.channels, "sum_squares": [pixels * 128**2] * f.channels}
        statistics[f.name] = {"pixels": pixels, "mean": [_SOME] * f.channels, "std": [_SOME] * f.channels, "sums": [sums]}
    lists = {name: (kind, hash_bytes(data), suffix, len(data)) for name, (kind, suffix, data) in lists_of(contents).items()}
    of_all = dict.fromkeys(("all", *(split.name for split in contents.splits)), statistics)
    index = draft_index(contents, samples, len(shards), of_all, {name: digest for name, (_, digest, _, _) in lists.items()})
    files = {file_name(kind, digest, suffix): length for kind, digest, suffix, length in lists.values()}
    kinds = set(index.table_dtype().names or ()) - {"rows"}
    table = array_hash(table_of(index, shards)) if all(kinds == set(known) for _, known in shards) else "of this build"
    files[file_name("table", table)] = file_bytes(index.table_dtype(), (len(shards),))
    return files | dict.fromkeys(("index.json", "its copy in generations"), len(index.to_bytes()))
