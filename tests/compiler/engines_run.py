"""A build over an engine in a process of its own, to be killed: `python -m tests.compiler.engines_run ENGINE ADDRESS RAW OUT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mmcompile.compiler.outcome import Progress
from tests.compiler.builds import dataset, inline, make_raw, run, write
from tests.compiler.planted import Planted, plant

ROOT = Path(__file__).resolve().parents[2]


def raw_of(root: Path, slow: bool = False) -> Any:
    """Some twenty shards (of `rows=1`); with `slow` each takes a moment."""
    raw = make_raw(root / "raw", per_class=8)
    if not slow:
        return raw
    write(raw, {f"slow/{i}.png": plant(i, "slow") for i in range(14)})
    return Planted(str(raw), parent=0, notes=str(root / "notes"))


def local(raw: Any, out: Path) -> dict[str, bytes]:
    """The dataset of a local build."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        run(raw.root if isinstance(raw, Planted) else raw, out, rows=1)
    return dataset(out)


def over(engine: str, address: str | None, raw: Any, out: Path, **more: Any) -> Any:
    return run(raw, out, rows=1, workers=None, options={"engine": engine, "address": address}, **more)


def environment() -> dict[str, str]:
    """Of processes that have to find this package and its tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def main(engine: str, address: str, raw: str, out: str) -> None:
    def say(progress: Progress) -> None:
        if progress.stage == "build":
            print(progress.done, flush=True)

    source = Planted(raw, parent=0, notes=str(Path(raw).parent / "notes"))
    over(engine, address, source, Path(out), progress=say)


if __name__ == "__main__":
    main(*sys.argv[1:])
