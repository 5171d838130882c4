"""Hides how many processors a process may use: fewer than the machine has, where its affinity or a control group says so."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

__all__ = ["usable_cpus"]


def usable_cpus() -> int:
    """Processors that this process may use: its affinity, cut by the CPU quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(q) for q in _quotas())]))


def _quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """CPU quotas on the way from this process's control group to the root, in processors (cgroup v2 and v1)."""
    out: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root if not controllers else root / "cpu"
            if controllers and "cpu" not in controllers.split(","):
                continue
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts) + 1):
                folder = base.joinpath(*parts[:depth])
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                    if controllers:
                        quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if quota.strip() != "max" and int(quota) > 0:
                        out.append(int(quota) / int(period))
    return out
