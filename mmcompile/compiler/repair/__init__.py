"""Hides how damage is undone: each bad file is made again aside, from its good rows and from RAW, and takes its place only if it hashes to its name.

A file that cannot be made again stays as it is, and the report says which source or which library version is missing.  RAW is only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.output import is_inside, make_scratch
from mmcompile.compiler.repair.aside import Workshop
from mmcompile.compiler.repair.files import mend_files
from mmcompile.compiler.repair.indexes import mend_indexes, mend_tables
from mmcompile.compiler.repair.state import Damaged, Missing
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import BuildError, FormatError, NotADatasetError, OptionError, OutputExistsError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.findings import Problem, VerifyReport, from_a_folder
from mmcompile.format.index import Index, load_index, read_generation
from mmcompile.format.lock import Lock
from mmcompile.format.remains import newest_whole, not_a_dataset
from mmcompile.format.store import is_url
from mmcompile.format.verify import verify

__all__ = ["Missing", "RepairReport", "repair"]


@dataclass(frozen=True)
class RepairReport:
    """What a repair did.  `ok`: every problem that `verify` found is mended.

    `problems` were found before, `repaired` are the files (relative to the root) that were put in place, `missing` tells what is needed for the
    others, which were not touched.  `decoded` rows were decoded again.
    """

    root: str
    seconds: float
    problems: tuple[Problem, ...] = ()
    repaired: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    decoded: int = 0

    @property
    def ok(self) -> bool:
        return not self.missing

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"command": "repair", "root": name_to_json(self.root), "seconds": self.seconds, "ok": self.ok, "decoded": self.decoded}
        out |= {"repaired": [name_to_json(name) for name in self.repaired]}
        return out | {name: [item.to_json() for item in getattr(self, name)] for name in ("problems", "missing")}


def repair(
    root: str | Path,
    raw: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    lock: bool = True,
) -> RepairReport:
    """Make every bad file of every kept generation again from `raw`, the folder that the dataset was built from.

    Safe to kill at any moment: each file is replaced in one step by its right bytes, or not at all.  Sources are found by their hash wherever they
    lie in `raw`.  `lock=False` is for file systems without file locks.

    Raises NotADatasetError, VersionError; OptionError where rows are of arrays, tables or datasets; SourceError when `raw` is no folder;
    OutputExistsError when the dataset lies inside it; BuildError when another run is at work, or the disk is full; EngineError.
    """
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be at least 1, not {workers}")
    for place in (root, raw):
        if is_url(place):
            raise OptionError(
                f"{place}: repair works on disks; copy it to a folder, repair the dataset there, and copy back the files that were repaired"
            )
    folder, source = Path(os.path.abspath(root)), Path(os.path.abspath(os.fspath(raw)))
    tell = progress or (lambda _: None)
    began = time.monotonic()
    if not (folder / "index.json").exists() and not (folder / "generations").is_dir():
        raise NotADatasetError(not_a_dataset(folder), path=str(folder))
    index = _newest(folder)
    if index is not None and not from_a_folder(index):
        made = index.settings.get("source")
        copied = isinstance(made, dict) and made.get("kind") == "dataset"
        said = "its rows are copied from datasets" if copied else "its rows are of arrays or tables" if not index.keyed else ""
        raise OptionError(
            f"{folder}: {said or 'it was not built from one folder of images'}, so it is not repaired file by file: delete the files that "
            "`mmcompile verify` names (all of the dataset where its table is one of them; of an index it says what to do), and run the same build "
            "again: it makes them anew"
        )
    FolderSource(os.fspath(source)).location()
    if is_inside(folder, source):
        raise OutputExistsError(f"{folder}: inside RAW ({source}), which is never written", path=str(folder))
    (folder / ".build").mkdir(exist_ok=True)
    try:
        with Lock(folder / ".build" / "lock", required=lock), _scratch(folder) as scratch:
            workshop = Workshop(source, scratch, workers)
            try:
                found, dataset = _mend(folder, source, workshop, scratch, tell)
            finally:
                workshop.close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, BuildError):
            raise BuildError(
                f"{folder}: no space left on the device; what is repaired stays: free some space and run the same command again"
            ) from error
        raise
    missing = tuple(dataset.missing[path] for path in sorted(dataset.missing))
    return RepairReport(str(root), time.monotonic() - began, found, tuple(dataset.repaired), missing, dataset.decoded)


def _newest(root: Path) -> Index | None:
    """The current index or, where that is damaged, which is mended first, the newest of the others; None where there is none."""
    with contextlib.suppress(FormatError):
        return load_index(root)[0]
    with contextlib.suppress(FormatError):
        return None if (name := newest_whole(root)) is None else read_generation(root, name)
    return None


def _mend(root: Path, raw: Path, workshop: Workshop, scratch: Path, tell: Callable[[Progress], None]) -> tuple[tuple[Problem, ...], Damaged]:
    """Index and tables first, until no more of them can be mended: they tell what else there is.  Then everything else."""
    problems: dict[tuple[str, int | None], Problem] = {}
    repaired: list[str] = []
    decoded = 0
    while True:
        report = _verify(root, tell)
        for problem in report.problems:
            problems.setdefault((problem.path, problem.shard), problem)
        dataset = Damaged(root, raw, workshop, scratch, report, tell)
        dataset.repaired, dataset.decoded = repaired, decoded
        if any(os.path.islink(root / name) for name in ("shards", "generations")):
            for problem in report.problems:
                dataset.give_up(problem.path, "shards/ or generations/ is a link: nothing is written through it")
            break
        if mend_indexes(dataset) or mend_tables(dataset):
            repaired, decoded = dataset.repaired, dataset.decoded
            continue
        mend_files(dataset)
        break
    return tuple(problems.values()), dataset


def _verify(root: Path, tell: Callable[[Progress], None]) -> VerifyReport:
    return verify(root, progress=lambda done, total: tell(Progress("verify", done, total)))


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """As `make_scratch`, and gone again afterwards."""
    scratch = make_scratch(root)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
