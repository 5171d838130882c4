"""How many processors a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmcompile.format import cpus as home
from mmcompile.format.cpus import usable_cpus
from tests.compiler.builds import write

CGROUPS = {
    "v2 quota of one and a half": ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000\n"}, [1.5]),
    "v2 quota of the parent": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, [2.0]),
    "v2 in a container: the path is not there": ("0::/../x\n", {"cpu.max": "100000 100000\n"}, [1.0]),
    "v1": ("4:cpu,cpuacct:/d\n3:memory:/d\n", {"cpu/d/cpu.cfs_quota_us": "300000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, [3.0]),
    "v1 without a limit": ("4:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, []),
    "what is no number": ("0::/a\n", {"a/cpu.max": "much 100000\n"}, []),
    "a period of zero": ("0::/a\n", {"a/cpu.max": "100000 0\n"}, []),
    "no control group": ("", {}, []),
    "not lines of a control group": ("nonsense\n", {}, []),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_quotas_of_control_groups_are_found(tmp_path: Path, name: str) -> None:
    own, files, quotas = CGROUPS[name]
    write(tmp_path, {"own": own.encode(), **{f"fs/{path}": text.encode() for path, text in files.items()}})
    assert home._quotas(tmp_path / "fs", tmp_path / "own") == quotas


@pytest.mark.parametrize(("affinity", "quotas", "cpus"), [(8, [], 8), (8, [1.5], 2), (2, [16.0], 2), (8, [0.2], 1), (8, [4.0, 3.0], 3)])
def test_usable_cpus_are_the_affinity_cut_by_the_quota(monkeypatch: pytest.MonkeyPatch, affinity: int, quotas: list[float], cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(home, "_quotas", lambda: quotas)
    assert usable_cpus() == cpus
