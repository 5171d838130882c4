"""Hides how a dry run foresees what a build takes: seconds, from a few images decoded now, and the size of what would lie there."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from mmcompile.compiler.engines import result_within
from mmcompile.compiler.planning import Planned, Prediction
from mmcompile.compiler.task import Job, measure
from mmcompile.errors import EngineError
from mmcompile.format.npy import file_name

__all__ = ["seconds", "stored_bytes"]

#: Images decoded to see how long one takes, and seconds after which no further one is begun.
_LOOKED_AT, _LIMIT_S = 24, 2.0
#: Copying rows, hashed and durable: 137 to 161 MB/s were measured on a shared cloud disk (scripts/bench_rebuild.py).
_COPY_BYTES_PER_S = 150e6


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
    copied = foreseen.write_bytes * foreseen.copied / max(1, foreseen.copied + foreseen.decoded)
    return start + decoding + copied / _COPY_BYTES_PER_S


def stored_bytes(shards: Path, planned: Planned, foreseen: Prediction) -> int:
    """The size of all shard files that there would be: of those that stand, as they are."""
    stand = {file_name(kind, digest) for whole in planned.whole.values() for kind, digest in whole.files.items()}
    return foreseen.write_bytes + sum(os.path.getsize(shards / name) for name in stand)
