"""Hides the two runs that publish nothing: the one that plans for parts, and that of a part."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmcompile.compiler.driver import Build
from mmcompile.compiler.outcome import BuildReport
from mmcompile.compiler.output import open_output, unless_removed
from mmcompile.compiler.parts import PartNumber, load_plan, locked, more_of, save_plan, scratch_of
from mmcompile.compiler.planning import Listed, Planned
from mmcompile.compiler.shardcall import check_versions, versions_here
from mmcompile.compiler.statcache import StatCache
from mmcompile.compiler.verdict import unsettled_part

__all__ = ["PartBuild"]


class PartBuild(Build):
    """A build that ends where `publish` would begin."""

    def build(self) -> BuildReport:
        """Plan for parts, or build and seal the shards of one."""
        try:
            self._check_output()
            return self._plan_parts() if self.options.part is None else self._part(PartNumber.parse(self.options.part))
        finally:
            self._stop()

    def _plan_parts(self) -> BuildReport:
        self._scan()
        (self.out / ".build").mkdir(parents=True, exist_ok=True)
        with self._lock() as lock:
            scratch = open_output(self.out)
            try:
                with unless_removed(self.out, lock.still_held):
                    self._choose(scratch)
                    self._plan()
                    self.planned.check_versions(self.progress)
                    more = more_of(self.wanted, versions_here(self.wanted.preprocess))
                    save_plan(self.out, self.scan, self.listed.at_ns, self.wanted.settings, more)
            finally:
                self._stop()
                self._save_stats()
                shutil.rmtree(scratch, ignore_errors=True)
        return self._unpublished(plan_only=True)

    def _part(self, part: PartNumber) -> BuildReport:
        with locked(self.out, part, required=self.options.lock) as lock, scratch_of(self.out, part) as scratch:
            try:
                with unless_removed(self.out, lock.still_held):
                    self._take_plan(part, scratch)
                    self._run(scratch)
            finally:
                self._stop()
        if self.runner.failures:
            raise unsettled_part(self.out, str(self.options.part), self.runner.failures)
        counts = self.runner.counts
        return self._unpublished(part=self.options.part, splits={}, sealed=len(self.sealed), decoded=counts.decoded, copied=counts.copied)

    def _foresee(self) -> BuildReport:
        if self.options.part is None:
            return super()._foresee()
        self._take_plan(PartNumber.parse(self.options.part), Path(os.devnull))
        return replace(self._foreseen(whole=False), part=self.options.part)

    def _take_plan(self, part: PartNumber, scratch: Path) -> None:
        """Have the shards of a part as they were planned, and see which of them are there already."""
        plan = load_plan(self.out)
        plan.check(self.source, self.asked, self.options)
        self.asked, self.options = plan.asked, plan.options(self.options)
        self.scan = plan.scan
        self.listed = Listed(self.scan, plan.at_ns, StatCache(self.out / ".build" / "stat-cache", self.source.location()))
        self.listed.cache = None  # it is not this part's to write
        self.job = replace(self._job(plan.chosen, scratch), versions=plan.versions)
        check_versions(plan.versions, lambda: versions_here(plan.chosen))
        self.wanted = plan.wanted(self.source, self.options)
        self.planned = Planned(self.out, self.job, self.wanted, self.listed, self.options, self.executor)
        self.planned.tasks = part.of(self.planned.tasks)
        self.planned.find_whole(self.progress)

    def _unpublished(self, **more: Any) -> BuildReport:
        """The report of a plan, or of one part."""
        lines = self._rejects().values()
        return replace(
            self._described(),
            samples=sum(len(task) for task in self.planned.tasks) - len(lines),
            rejects=len(lines),
            reject_reasons=dict(Counter(line["code"] for line in lines)),
            shards=len(self.planned.tasks),
            kept=self.planned.kept,
            seconds=time.monotonic() - self.began,
            **more,
        )
