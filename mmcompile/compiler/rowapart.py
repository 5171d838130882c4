"""Hides the two runs on rows without keys that publish nothing: the one that plans for parts, and that of a part.

Every part lists the source by itself, and begins only where it finds the shards that were planned.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.outcome import BuildReport, Progress
from mmcompile.compiler.output import open_output, unless_removed
from mmcompile.compiler.parts import PartNumber, locked, planned_tasks, save_plan, scratch_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowbuild import RowBuild
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.staging import Staging
from mmcompile.errors import BuildError, OptionError
from mmcompile.format.canonical import canonical
from mmcompile.format.npy import hash_bytes

__all__ = ["RowPartBuild", "row_build"]


class RowPartBuild(RowBuild):
    """A build that ends where `publish` would begin."""

    def build(self) -> BuildReport:
        """Plan for parts, or build and seal the shards of one."""
        part = None if self.options.part is None else PartNumber.parse(self.options.part)
        self._check_output()
        self._plan()
        self._refuse_unknown()
        return self._plan_parts() if part is None else self._part(part)

    def dry(self) -> BuildReport:
        """Say what would be built; write nothing."""
        if self.options.part is None:
            return super().dry()
        part = PartNumber.parse(self.options.part)
        self._check_output()
        self._plan()
        self._refuse_unknown()
        self._take(part)
        return replace(self._foreseen(), part=self.options.part, splits={})

    def _refuse_unknown(self) -> None:
        """A shard that may be another one tomorrow cannot be found again by the build that publishes."""
        if not all(task.known for task in self.tasks):
            raise OptionError(
                f"{self.source.root or 'the dataset'}: it cannot be told whether its rows change, so no build could take over what parts make: let "
                "files rest for 2 s, give a dataset in Python a text `mmcompile_version`, or leave --plan-only and --part out",
                options=["part"],
            )

    def _plan_parts(self) -> BuildReport:
        (self.out / ".build").mkdir(parents=True, exist_ok=True)
        with self._lock() as lock:
            scratch = open_output(self.out)
            try:
                with unless_removed(self.out, lock.still_held):
                    save_plan(self.out, None, 0, self.settings, {"tasks": self._tasks_mark()})
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return self._unpublished(plan_only=True)

    def _tasks_mark(self) -> str:
        return hash_bytes(canonical([task.id for task in self.tasks]))

    def _part(self, part: PartNumber) -> BuildReport:
        required = self.options.lock
        with locked(self.out, part, required=required) as lock, scratch_of(self.out, part) as scratch, unless_removed(self.out, lock.still_held):
            self._take(part)
            self._run(scratch)
        return self._unpublished(part=self.options.part, splits={}, sealed=len(self.made), decoded=sum(seal.rows for seal in self.made.values()))

    def _take(self, part: PartNumber) -> None:
        """Have the shards of a part as they were planned, and see which of them are there already."""
        if planned_tasks(self.out, self.settings) != self._tasks_mark():
            raise BuildError(f"{self.out}: {self.source.root or 'the dataset'} is not what it was when parts were planned; run --plan-only again")
        self.tasks = part.of(self.tasks)
        self._look()

    def _unpublished(self, **more: Any) -> BuildReport:
        """The report of a plan, or of one part."""
        return replace(
            self._described(),
            samples=sum(task.stop - task.start for task in self.tasks),
            shards=len(self.tasks),
            kept=sum(seal.rows for seal in self.whole.values()),
            seconds=time.monotonic() - self.began,
            **more,
        )


def row_build(
    source: RowSource,
    preprocess: Preprocess | RowPreprocess | None,
    options: BuildOptions,
    out: Path,
    progress: Callable[[Progress], None],
    staging: Staging | None = None,
) -> RowBuild:
    """The build of these rows that the options ask for; `staging` where the folder `out` stands for a URL.  Raises OptionError."""
    if options.sha256 or options.keys != "plain":
        raise OptionError(
            "--sha256 and --keys are of the file that a sample comes from, and rows of arrays and tables have none: leave them out",
            options=["sha256", "keys"],
        )
    made = RowBuild if options.part is None and not options.plan_only else RowPartBuild
    return made(source, preprocess, options, out, progress, staging)
