"""Hides what a worker of an engine does with one shard: look whether this machine can, then build and seal it in a process of ours.

The work is done by the `Runner` that a local build uses, over one process that is kept for the next call.  So a picture that crashes its decoder,
hangs or eats memory never touches the engine's own process, and ends as it does in a local build.  A call leaves nothing but the sealed shard.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.away import at_home
from mmcompile.compiler.engines import LocalExecutor
from mmcompile.compiler.hand import TURNS
from mmcompile.compiler.marks import versions_of
from mmcompile.compiler.plan import task_id
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.rowtask import RowJob
from mmcompile.compiler.run import Counts, Runner, ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.task import Job
from mmcompile.errors import EngineError
from mmcompile.format.mirror import host_folder

__all__ = ["ShardDone", "attempt", "build_shard", "check_versions", "process", "shard_folder", "unreached", "versions_here"]

#: Files of a shard that are looked at to see whether RAW can be reached here.
_LOOKED_AT = 16
#: What can be installed by its own name; all else comes inside Pillow.
_PACKAGES = frozenset({"mmcompile", "pillow", "simplejpeg", "torch"})
#: Seconds for which a process without work is kept for the next call.
_IDLE_S = 60.0


@dataclass
class ShardDone:
    """What came of a shard: its seal (None where all its items failed), what is known of its sources now, counts, and what could not be settled."""

    seal: Seal | None
    hashes: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]
    counts: Counts
    failures: list[tuple[bytes, str]]

    def is_of(self, work: ShardWork) -> bool:
        """Is this what came of that shard, and not of another one?"""
        n, failed = len(work.keys), {key for key, _ in self.failures}
        keep = [i for i, key in enumerate(work.keys) if key not in failed]
        if self.hashes.shape != (n, 2) or self.known.shape != (n,) or len(keep) + len(failed) != n:
            return False
        if self.seal is None or not keep:
            return self.seal is None and not keep
        if not failed:
            return self.seal.task == work.task.id
        faults = {at: work.faults[i] for at, i in enumerate(keep) if i in work.faults}
        return self.seal.task == task_id([work.keys[i] for i in keep], work.values[keep], work.seal.pixel, work.seal.store, faults)

    def tell(self, work: ShardWork) -> None:
        """Note what is known of the shard's sources now."""
        work.hashes, work.known = self.hashes, self.known


def build_shard(job: Job, work: ShardWork, look: bool = True) -> ShardDone:
    """Build and seal one shard on this machine.

    Raises EngineError, naming this host, where versions differ, OUT cannot be written, or (with `look`) none of the shard's files can be reached;
    `details["unreached"]` are then the keys that were tried.  OSError as from a local build: no space, or the run is over (its folder is gone).
    """
    check_versions(job.versions, lambda: versions_here(job.preprocess))
    with attempt(job, work.task.number) if job.store is None else at_home(job) as (here, check):
        if look:
            _check_raw(job, work)
        with contextlib.suppress(OSError):  # no turns, then
            (here.scratch / TURNS).symlink_to(host_folder() / TURNS)  # of all calls on this machine, not of this one alone
        sealed: list[Seal] = []
        with process() as executor:
            runner = Runner(executor, here, lambda _, seal: sealed.append(seal), lambda _: check(), 1)
            runner.run([work])
        if look and runner.failures:
            _check_raw(job, work)
    return ShardDone(sealed[0] if sealed else None, work.hashes, work.known, runner.counts, runner.failures)


# ---------------------------------------------------------------- may this machine take part?


def versions_here(preprocess: Preprocess | None) -> dict[str, str]:
    """What must be the same on all machines of a build: this package, its pixels, and the libraries that pixels depend on (None: there are none)."""
    libraries = {} if preprocess is None else versions_of(preprocess)
    return {"mmcompile": _package_version(), "pixel revision": str(PIXEL_REVISION), **libraries}


def _package_version() -> str:
    try:
        return metadata.version("mmcompile")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+unknown"


def check_versions(versions: dict[str, str], find: Callable[[], dict[str, str]]) -> None:
    """Raises EngineError where this process has others than the `versions` of a build, as `find` says."""
    here = find() if versions else {}
    for name, wanted in versions.items():
        found = here.get(name, "nothing")
        if found == wanted:
            continue
        pin = f"pip install {name}=={wanted}" if name in _PACKAGES else "install the wheels that the coordinator has"
        raise EngineError(
            f"a worker on {socket.gethostname()} has {name} {found}, this build needs {wanted}; on that machine: {pin}",
            host=socket.gethostname(),
            package=name,
            found=found,
            expected=wanted,
        )


def _check_raw(job: Job, work: ShardWork) -> None:
    """Is RAW there?  One file that can be looked at is enough; where all are gone the caller looks, too, and knows which of the two it is."""
    there = np.flatnonzero(work.stat["size"] >= 0)
    keys = [work.keys[i] for i in there[:: max(1, -(-len(there) // _LOOKED_AT))].tolist()]
    said = ""
    for key in keys:
        try:
            job.source.stat(key)
            return
        except OSError as error:
            said = error.strerror or str(error)
    if keys:
        raise unreached(job.source.root, said, keys)


def unreached(root: str, said: str, keys: list[bytes]) -> EngineError:
    """The error where RAW cannot be seen from here; `keys` are those that were tried."""
    host = socket.gethostname()
    return EngineError(
        f"a worker on {host} cannot reach the files of {root} ({said}); RAW must be there, under the same path, on every machine that builds",
        host=host,
        path=root,
        unreached=keys,
    )


# ---------------------------------------------------------------- where unfinished files lie


class _Scratch(Protocol):
    @property
    def scratch(self) -> Path: ...


_J = TypeVar("_J", Job, RowJob)


def shard_folder(job: _Scratch, number: int) -> Path:
    """Where the calls for a shard keep unfinished files; made by the coordinator, which removes it when the shard is done."""
    return job.scratch / f"shard-{number}"


@contextlib.contextmanager
def attempt(job: _J, number: int) -> Iterator[tuple[_J, Callable[[], None]]]:
    """The job in a folder of this call alone, and what raises OSError when that is gone: the run is over, or another worker was faster.

    It cannot be made when the run is over, so a worker that comes back from the dead seals nothing.
    """
    parent, host = shard_folder(job, number), socket.gethostname()
    try:
        scratch = Path(tempfile.mkdtemp(prefix="call-", dir=parent))
    except OSError as error:
        raise EngineError(
            f"a worker on {host} cannot write to {parent} ({error.strerror}); OUT must be there, under the same path and writable, on every machine "
            "that builds (or the build that asked for this is over)",
            host=host,
            path=str(parent),
        ) from error

    def check() -> None:
        os.stat(scratch)

    try:
        yield replace(job, scratch=scratch), check
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---------------------------------------------------------------- processes that are kept between calls

_idle: dict[LocalExecutor, threading.Timer] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """A child has none of the threads that feed its parent's processes."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def process() -> Iterator[LocalExecutor]:
    """A process of ours: one that an earlier call has left, or a new one.  There are as many as calls at once, and none without work for long."""
    with _lock:
        executor, timer = _idle.popitem() if _idle else (LocalExecutor(1), None)
    if timer is not None:
        timer.cancel()
    try:
        yield executor
    except BaseException:
        executor.kill()
        raise
    timer = threading.Timer(_IDLE_S, _end, [executor])
    timer.daemon = True
    with _lock:
        _idle[executor] = timer
    timer.start()


def _end(executor: LocalExecutor) -> None:
    with _lock:
        waiting = _idle.pop(executor, None)
    if waiting is not None:
        executor.kill()
