"""Measures listing and planning of very many images: a real tree of small files, and made-up items that need no disk.

usage: python scripts/bench_listing.py [--dir DIR] [--files 1000000] [--items 10000000] [--seals 6000]

`--files`: a tree of that many one-byte files, a thousand in each folder, is made in DIR, listed warm, and removed.  Part of it is listed on a disk
that makes each call wait 1 ms, which is imitated.  `--items`: that many made-up keys and stats go through every step of a build between the listing
and the first pixel.  `--seals`: as many sealed shards are read, as a build that goes on does.  For each step: seconds, items a second, bytes of
memory an item that it holds when it is done and held at its peak (both beyond what the process had before the first step).

What it does not show: a cold disk, a real network, names much longer than "class_00042/photo_0000042.jpg", a machine with less memory than is asked
for (then it swaps), and reading or decoding the images.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import machine

from mmcompile import BuildOptions, Preprocess
from mmcompile.compiler.listing import load_listing, save_listing
from mmcompile.compiler.planning import Listed, Planned, Wanted
from mmcompile.compiler.seals import Seal, read_seals, write_seal
from mmcompile.compiler.sources import STAT_DTYPE, Scan, walk
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.names import Choice
from mmcompile.compiler.statcache import StatCache
from mmcompile.compiler.task import Job

#: Items of a folder, in the tree and among what is made up.
PER_FOLDER = 1000


class MadeUp:
    """A source of `count` items that are nowhere."""

    root = "/nowhere"
    parallel = 1

    def __init__(self, count: int) -> None:
        self.count = count

    def identity(self) -> dict[str, object]:
        return {"kind": "made up"}

    def location(self) -> str:
        return "nowhere"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        return arrange(self.root, self._folders(), Choice((), (), False, None))

    def _folders(self) -> Iterator[Folder]:
        for first in range(0, self.count, PER_FOLDER):
            rows = np.arange(first, min(first + PER_FOLDER, self.count))
            stat = np.zeros(len(rows), STAT_DTYPE)
            stat["size"], stat["inode"], stat["mtime_ns"] = 110_000 + rows % 999, rows, 10**18 + rows
            yield Folder.of(b"class_%05d" % (first // PER_FOLDER), [b"photo_%07d.jpg" % (i % 10**7) for i in rows.tolist()], stat, 1)

    def read(self, key: bytes) -> bytes:
        raise OSError("made up")

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        raise OSError("made up")


class Memory:
    """Bytes of this process that are in memory: now, and at most since the last `forget`."""

    def __init__(self) -> None:
        self.base = self.now()

    @staticmethod
    def _line(name: str) -> int:
        return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

    def now(self) -> int:
        return self._line("VmRSS:")

    def peak(self) -> int:
        return self._line("VmHWM:")

    @staticmethod
    def forget() -> None:
        Path("/proc/self/clear_refs").write_text("5")


class Steps:
    """Runs steps and prints a line for each."""

    def __init__(self, items: int, what: str = "items") -> None:
        self.items, self.memory, self.what = items, Memory(), what
        print(f"\n{'':<58}{'seconds':>9}{what + ' a second':>18}{'B held':>9}{'B at peak':>11}")

    def __call__(self, name: str, step: Callable[[], Any], size: Callable[[], int] | None = None) -> Any:
        self.memory.forget()
        begun = time.perf_counter()
        out = step()
        seconds = time.perf_counter() - begun
        held, peak = ((m - self.memory.base) / self.items for m in (self.memory.now(), self.memory.peak()))
        file = "" if size is None else f"   {size() / self.items:.1f} bytes an item on disk"
        print(f"{name:<58}{seconds:>9.2f}{self.items / seconds:>18,.0f}{held:>9.0f}{peak:>11.0f}{file}", flush=True)
        return out


def make_tree(root: Path, files: int) -> None:
    for first in range(0, files, PER_FOLDER):
        folder = root / f"class_{first // PER_FOLDER:05}"
        folder.mkdir(parents=True)
        at = os.open(folder, os.O_RDONLY)
        for i in range(first, min(first + PER_FOLDER, files)):
            fd = os.open(f"photo_{i:07}.jpg", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=at)
            os.write(fd, b"x")
            os.close(fd)
        os.close(at)


def bare(root: Path) -> int:
    """The least that a listing does: every entry, and its stat."""
    return sum(entry.stat().st_size for folder in os.scandir(root) for entry in os.scandir(folder.path))


class Waits:
    """os.scandir on a disk that makes each call wait 1 ms."""

    def __init__(self, path: bytes) -> None:
        time.sleep(0.001)
        self.scan = Waits.scandir(path)

    scandir = staticmethod(os.scandir)

    def __enter__(self) -> Iterator[Any]:
        return map(WaitingEntry, self.scan)

    def __exit__(self, *_: object) -> None:
        self.scan.close()


class WaitingEntry:
    def __init__(self, entry: os.DirEntry[bytes]) -> None:
        self.name, self.path, self.is_dir, self.is_symlink, self._entry = entry.name, entry.path, entry.is_dir, entry.is_symlink, entry

    def stat(self) -> os.stat_result:
        time.sleep(0.001)
        return self._entry.stat()


def measure_tree(folder: Path, files: int) -> None:
    root = folder / "tree"
    make_tree(root, files)
    source = FolderSource(str(root))
    bare(root)
    steps = Steps(files, "files")
    steps("a tree of one-byte files, listed warm", source.scan)
    steps("the same again", source.scan)
    steps("scandir and stat of each, nothing else", lambda: bare(root))
    few = folder / "few"
    few.mkdir()
    for sub in sorted(root.iterdir())[:20]:
        sub.rename(few / sub.name)
    steps = Steps(sum(len(os.listdir(sub)) for sub in few.iterdir()), "files")
    most, os.scandir = walk._MOST_THREADS, Waits  # type: ignore[assignment, misc]
    try:
        for threads in (1, 4, most):
            walk._MOST_THREADS = threads
            steps(f"on a disk with 1 ms for each call, at most {threads} threads", FolderSource(str(few)).scan)
    finally:
        walk._MOST_THREADS, os.scandir = most, Waits.scandir  # type: ignore[misc]


def measure_items(folder: Path, items: int) -> None:
    steps = Steps(items)
    path = folder / "listing"
    plan_items(steps, folder, path, MadeUp(items))
    loaded = steps("listing loaded, all else forgotten", lambda: load_listing(path))
    if loaded is None or len(loaded[0].keys) != items:
        raise SystemExit("bench_listing.py: the listing was not loaded")


def plan_items(steps: Steps, folder: Path, path: Path, source: MadeUp) -> None:
    out = folder / "out"
    cache = out / ".build" / "stat-cache"
    cache.parent.mkdir(parents=True)
    asked, options = Preprocess(resize=256, crop=224).resolved(), BuildOptions()
    scan = steps("made-up items, put in order", source.scan)
    print(f"{'':<58}of these {len(scan.keys.blob) / steps.items + 8:.0f} B an item are the keys themselves")
    listed = steps("hashes of keys, and an empty stat cache", lambda: Listed(scan, 2 * 10**18, StatCache(cache, source.location())))
    wanted = Wanted.of(asked, asked, "", source, True, options)
    job = Job(source, asked, wanted.fields, folder, out / "shards")
    with ThreadPoolExecutor(1) as pool:
        planned = steps("cuts and task ids", lambda: Planned(out, job, wanted, listed, options, pool))
        print(f"{'':<58}{len(planned.tasks):,} shards")
        steps("what stands already (nothing)", lambda: planned.find_whole(lambda _: None))
        steps("work for each shard", lambda: sum(len(work.keys) for work in planned.works()))
    listed.hashes[:, 0], listed.known[:] = listed.hashes64, True
    steps("stat cache saved", listed.save, lambda: os.path.getsize(cache))
    found = steps("stat cache asked for every item", lambda: StatCache(cache, source.location()).known(listed.hashes64, scan.stat))
    if not found[1].all() or not np.array_equal(found[0], listed.hashes):
        raise SystemExit("bench_listing.py: the stat cache does not know what was saved")
    steps("listing saved", lambda: save_listing(path, scan, 1, {}), lambda: os.path.getsize(path))


def measure_seals(folder: Path, seals: int, rows: int = 1783) -> None:
    rng = np.random.default_rng(0)
    digest = "0123456789abcdef" * 2
    stat = rng.integers(0, 2**60, (rows, 4)).view(STAT_DTYPE)[:, 0]
    hashes = rng.integers(0, 2**63, (rows, 2), np.int64).astype(np.uint64)
    files = {"image": digest, "label": digest, "samples": digest, "keys": digest}
    sums = [{"depth": 8, "pixels": rows * 224 * 224, "sum": [10**10] * 3, "sum_squares": [10**12] * 3}]
    seal = Seal(digest, digest, digest, {"preprocess": {}, "versions": {}, "revision": 1}, [7] * rows, stat, hashes, {}, files, rows, sums, {})
    print(f"\n{seals:,} sealed shards of {rows:,} items")
    steps = Steps(seals, "seals")
    for number in range(seals):
        write_seal(folder / "seals", replace(seal, task=f"{number:032x}"))
    read = steps(
        "read one by one", lambda: sum(1 for _ in read_seals(folder / "seals")), lambda: sum(p.stat().st_size for p in (folder / "seals").iterdir())
    )
    if read != seals:
        raise SystemExit("bench_listing.py: a seal that was written was not read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the tree is made; by default where temporary files go")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--seals", type=int, default=6_000)
    options = parser.parse_args()
    print(machine())
    for count, measure in ((options.files, measure_tree), (options.items, measure_items), (options.seals, measure_seals)):
        if count:
            folder = Path(tempfile.mkdtemp(dir=options.dir))
            try:
                measure(folder, count)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
