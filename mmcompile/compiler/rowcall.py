"""Hides what a worker of an engine does with one shard of rows without keys: look whether this machine can, then make and seal it.

As with images it is done by a process of ours, by the `RowRunner` that a local build uses, and leaves nothing but the sealed shard.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from mmcompile.compiler.rowplan import RowTask
from mmcompile.compiler.rowrun import RowRunner, can_load
from mmcompile.compiler.rowtask import RowJob, RowSeal, load_source
from mmcompile.compiler.run import Counts
from mmcompile.compiler.shardcall import attempt, check_versions, process, unreached, versions_here
from mmcompile.compiler.sources import roots_of
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.errors import EngineError, SourceError

__all__ = ["RowDone", "RowWork", "build_rows", "row_versions"]


@dataclass(frozen=True)
class RowWork:
    """A shard that has to be made, of rows of `row_bytes`."""

    task: RowTask
    row_bytes: int

    @property
    def number(self) -> int:
        return self.task.number

    @property
    def items(self) -> int:
        return self.task.stop - self.task.start

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return self.items * self.row_bytes

    @property
    def first(self) -> str:
        """What it begins with, for people."""
        return f"row {self.task.start:,}"

    @property
    def seal(self) -> RowSeal:
        """Its seal as far as it is known."""
        return RowSeal(self.task.id, self.task.known, self.items, {}, {}, {})


@dataclass
class RowDone:
    """What came of a shard: its seal, or in `failures` why there is none."""

    seal: RowSeal | None
    counts: Counts
    failures: list[tuple[bytes, str]]

    def is_of(self, work: RowWork) -> bool:
        """Is this what came of that shard, and not of another one?"""
        return self.seal is None or (self.seal.task == work.task.id and self.seal.rows == work.items)

    def tell(self, work: RowWork) -> None:
        """Of rows nothing is remembered."""


def row_versions(source: RowSource) -> dict[str, str]:
    """What must be the same on all machines of a build: this package, and what pictures in samples depend on."""
    return {**versions_here(None), **getattr(source, "versions", {})}


def build_rows(job: RowJob, work: RowWork, look: bool = True) -> RowDone:
    """Make and seal one shard on this machine.

    Raises EngineError, naming this host, where versions differ, OUT cannot be written, or the source cannot be loaded or seen; SourceError for what
    it cannot give at all.  OSError as from a local build: no space, or the run is over (its folder is gone).
    """
    assert isinstance(job.source, Path)
    with attempt(job, work.number) as (here, check), process() as executor:
        executor.submit(_ready, job.source, job.versions).result()
        try:
            runner = RowRunner(executor, here, 1, job.timeout_s, lambda _: check())
            [(_, seal)] = list(runner.run([(work.task, work.seal)]))
        except SourceError as error:
            if "failures" not in error.details:
                raise
            return RowDone(None, Counts(failures=work.items), [(b"", line) for line in error.details["failures"]])
    return RowDone(seal, Counts(decoded=work.items), [])


def _ready(path: Path, versions: dict[str, str]) -> None:
    """Raises EngineError where this machine cannot read the source."""
    try:
        can_load(path)
    except EngineError as error:
        raise EngineError(
            f"a worker on {socket.gethostname()} cannot load the dataset ({error}); what it is made of must be importable there"
        ) from None
    source = load_source(path)
    check_versions(versions, lambda: row_versions(source))
    for root in roots_of(source):
        if root and not os.path.exists(root):
            raise unreached(root, "no such file", [])
