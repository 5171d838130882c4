"""Hides how a machine that does not see the coordinator's disk takes part, where OUT is a URL: it works in a folder of its own.

What it has to know of earlier builds (rows that may be copied, rejects) travels by the store, in `.build/tmp/` of OUT.  That folder also tells
whether the run is still there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.staging import Fetched
from mmcompile.compiler.task import Job
from mmcompile.format.fields import pixel_fields
from mmcompile.format.mirror import Home
from mmcompile.format.store import Store

__all__ = ["at_home", "share", "unshare"]

_MARK = "run"
#: Seconds between two looks at whether the run is still there.
_LOOK_S = 10.0


@dataclass(frozen=True)
class StoredShard(OldShard):
    """An old shard on a store; what is small of it is brought when it is first read, its images by whoever copies them."""

    bring: Fetched | None = None

    def path(self, name: str) -> Path:
        path = super().path(name)
        return path if self.bring is None or name in {f.name for f in pixel_fields(self.fields)} else self.bring(path)


def _folder(job: Job) -> str:
    return f".build/tmp/{job.scratch.name}"


def share(job: Job) -> None:
    """Send up what workers need, in place of what dead runs left.  The caller holds the lock.  Raises RemoteError."""
    assert job.store is not None
    unshare(job.store)
    for path in [] if job.reuse is None else job.scratch.glob("rows-*"):
        job.store.put(path, f"{_folder(job)}/{path.name}")
    if job.remembered is not None:
        job.store.put(job.remembered, f"{_folder(job)}/{job.remembered.name}")
    job.store.write(f"{_folder(job)}/{_MARK}", b"")


def unshare(store: Store) -> None:
    """Remove what runs have shared."""
    for run, _ in list(store.list(".build/tmp")):
        store.delete([name for name, facts in store.list(run) if facts["type"] != "directory"])


# ---------------------------------------------------------------- a worker

#: The run whose list of rows is here, and where.
_here: tuple[str, Home] | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def at_home(job: Job) -> Iterator[tuple[Job, Callable[[], None]]]:
    """(the job as it is done here, and what raises FileNotFoundError once its run is over).  Raises RemoteError."""
    assert job.store is not None
    home = Home()
    looked = 0.0

    def check() -> None:
        nonlocal looked
        if time.monotonic() - looked > _LOOK_S or not looked:
            looked = time.monotonic()
            if job.store is not None and job.store.size(f"{_folder(job)}/{_MARK}") is None:
                raise FileNotFoundError(2, "the build that asked for this shard is over", job.store.where(_folder(job)))

    try:
        check()
        scratch = home.path / ".build" / "tmp"
        for folder in (scratch, home.path / ".build" / "seals", home.path / "shards"):
            folder.mkdir(parents=True)
        yield _with_earlier(replace(job, scratch=scratch, shards=home.path / "shards"), job), check
    finally:
        home.remove()


def _with_earlier(here: Job, job: Job) -> Job:
    """With paths of this machine for what was shared."""
    if job.reuse is None and job.remembered is None:
        return here
    kept = _brought(job)
    if job.remembered is not None:
        here = replace(here, remembered=kept / job.remembered.name)
    if job.reuse is None or job.store is None:
        return here
    names, count, shards = pickle.loads((kept / job.reuse.name).read_bytes())
    bring = Fetched(job.store, kept / "fetched")
    stored = [s if s.borrowed else StoredShard(str(kept), s.fields, s.files, s.rows, s.formats, s.made, bring=bring) for s in shards]
    for path in kept.glob("rows-*.npy"):
        os.link(path, here.scratch / path.name)
    reuse = here.scratch / job.reuse.name
    reuse.write_bytes(pickle.dumps((names, count, stored)))
    return replace(here, reuse=reuse)


def _brought(job: Job) -> Path:
    """The folder with what the run has shared; this process keeps that of one run."""
    global _here
    assert job.store is not None
    with _lock:
        if _here is None or _here[0] != job.scratch.name or not _here[1].path.is_dir():
            if _here is not None:
                _here[1].remove()
                _here = None
            home = Home()
            for name, _ in list(job.store.list(_folder(job))):
                if not name.endswith(f"/{_MARK}"):
                    job.store.get(name, home.path / name.rpartition("/")[2])
            _here = (job.scratch.name, home)
        return _here[1].path
