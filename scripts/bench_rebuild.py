"""Measures builds into a folder that holds an earlier one: nothing changed, one file added, 1 % of the files changed.

    bench_rebuild.py [FOLDER] [--rounds 7] [--workers 2] [--files 100000] [--rows 20000]

All RAW folders are made up and deleted again (FOLDER, default a temporary one, needs some 10 GB).  What is copied is held against a plain copy of the
same shards in as many threads: read, write, sync, rename, sync the folder, hash.  Rounds are interleaved in one run, warm; medians of ratios within a
round are printed.  What it does not show: a cold disk, or a network file system, whose `stat` calls cost more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench_common import Table, machine, ratio

from mmcompile import BuildOptions, BuildReport, Preprocess, build
from mmcompile.compiler.plan import cuts
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.format.commit import install
from mmcompile.format.npy import hash_file
from mmcompile.format.prune import prune

#: Rows of a shard of 256 MiB of 224 x 224 x 3 bytes.
ROWS = 1783
_COPY = 8 << 20


def tiny(rng: random.Random) -> bytes:
    """A picture of 8 x 8, of noise."""
    return b"P6 8 8 255\n" + rng.randbytes(192)


def make_raw(root: Path, files: int, rng: random.Random) -> Path:
    """Files in 100 class folders."""
    for i in range(files):
        folder = root / f"{i % 100:02d}"
        if i < 100:
            folder.mkdir(parents=True)
        (folder / f"{i // 100:06d}.ppm").write_bytes(tiny(rng))
    return root


def state(out: Path) -> dict[str, tuple[int, int, int]]:
    """What would tell that something was written below a folder."""
    found = {}
    for folder, _, names in os.walk(out):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            stat = os.lstat(path)
            found[path] = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    return found


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def nothing_changed(table: Table, raw: Path, out: Path, rebuild: Callable[[], BuildReport], rounds: int) -> None:
    n, rates, before = 0, {"rebuild": [], "list": []}, {}
    while not before or state(out) != before:  # what was young when it was listed is read once more
        before = state(out)
        time.sleep(2.1)
        rebuild()
    for _ in range(rounds):
        n = len(FolderSource(str(raw)).scan().keys)
        rates["list"].append(n / timed(FolderSource(str(raw)).scan))
        rates["rebuild"].append(n / timed(rebuild))
    report = rebuild()
    table.title(f"Nothing changed: {n:,} files in {report.shards} shards")
    table.speed("listing alone", statistics.median(rates["list"]), "files/s")
    table.line("files checked, end to end", statistics.median(rates["rebuild"]), least=100_000, unit="files/s")
    table.line("of listing alone", ratio(rates, "rebuild", "list"))
    table.line(
        "files and folders of OUT that were touched", sum(a != b for a, b in zip(state(out).items(), before.items(), strict=True)), most=0, unit=""
    )


def written_shards(hashes: np.ndarray, at: int, new: int) -> int:
    """How many shards another key makes others than they were."""
    old = set(itertools.pairwise(cuts(hashes, ROWS)))
    now = itertools.pairwise(cuts(np.insert(hashes, at, np.uint64(new)), ROWS))
    return sum((a, b) not in old if b <= at else (a - 1, b - 1) not in old if a > at else True for a, b in now)


def one_added(table: Table, raw: Path, out: Path, rebuild: Callable[[], BuildReport], rng: random.Random, rounds: int) -> None:
    n, times, written = 0, [], []
    for i in range(rounds):
        before = {path.name for path in (out / "shards").glob("image-*")}
        (raw / f"{rng.randrange(100):02d}" / f"added-{rng.randrange(10**6):06d}-{i}.ppm").write_bytes(tiny(rng))
        times.append(timed(rebuild))
        written.append(len({path.name for path in (out / "shards").glob("image-*")} - before))
        prune(out, delete=True)
    hashes = FolderSource(str(raw)).scan().keys.hashes()
    n = len(hashes)
    counts = Counter(written_shards(hashes, rng.randrange(n + 1), rng.getrandbits(64)) for _ in range(1000))
    table.title(f"One file added to {n:,}")
    table.line("seconds", statistics.median(times), unit="s", note=f"{max(written)} shards at most")
    table.line("shards written in 1,000 random insertions, at most", max(counts), most=5, unit="")
    table.line("one or two of them", (counts[1] + counts[2]) / 1000, least=0.5, unit="of all", note=str(dict(sorted(counts.items()))))


def copied(shards: list[Path], folder: Path, workers: int) -> int:
    """Copy files as a build makes them durable, and hash each as it lies there; returns their bytes."""

    def copy(path: Path) -> int:
        with open(path, "rb") as source, open(folder / f"{path.name}.new", "wb") as target:
            while part := source.read(_COPY):
                target.write(part)
        fd = os.open(folder / f"{path.name}.new", os.O_RDONLY)
        try:
            hash_file(fd)
        finally:
            os.close(fd)
        install(folder / f"{path.name}.new", folder / path.name)
        return path.stat().st_size

    folder.mkdir()
    with ThreadPoolExecutor(workers) as pool:
        total = sum(pool.map(copy, shards))
    return total


def one_percent(table: Table, raw: Path, out: Path, rebuild: Callable[[], BuildReport], rng: random.Random, options: argparse.Namespace) -> None:
    files = [raw / os.fsdecode(key) for key in FolderSource(str(raw)).scan().keys]
    rates: dict[str, list[float]] = {"rebuild": [], "copy": []}
    decoded, kept, size = 0, 0, 0
    for _ in range(options.rounds):
        for path in rng.sample(files, len(files) // 100):
            path.write_bytes(tiny(rng))
        os.sync()
        began = time.perf_counter()
        report = rebuild()
        seconds = time.perf_counter() - began
        decoded, kept = max(decoded, report.decoded), max(kept, report.kept)
        prune(out, delete=True)
        os.sync()
        shards = sorted((out / "shards").glob("image-*"))
        began = time.perf_counter()
        size = copied(shards, out.parent / "copies", options.workers)
        rates["copy"].append(size / (time.perf_counter() - began))
        rates["rebuild"].append(size / seconds)
        shutil.rmtree(out.parent / "copies")
    table.title(
        f"1 % of {len(files):,} files changed, rows of 150,528 bytes, {options.workers} workers, {len(shards)} shards of which {kept} rows stayed"
    )
    table.speed("copying and hashing the shards", statistics.median(rates["copy"]) / 1e6, "MB/s")
    table.speed("rebuild, end to end", statistics.median(rates["rebuild"]) / 1e6, "MB/s")
    table.line("of copying and hashing", ratio(rates, "rebuild", "copy"), least=0.7)
    table.line("decoded beside what changed", decoded - len(files) // 100, most=0, unit="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    for name, default in (("rounds", 7), ("workers", 2), ("files", 100_000), ("rows", 20_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        print(machine())
        table = Table()

        def rebuild_of(name: str, crop: int, shard_bytes: int) -> Callable[[], BuildReport]:
            settings = BuildOptions(workers=options.workers, shard_bytes=shard_bytes)
            return lambda: build(root / name, root / f"{name}-out", preprocess=Preprocess(crop=crop), options=settings)

        many = rebuild_of("many", 8, ROWS * 200)
        make_raw(root / "many", options.files, rng)
        many()
        nothing_changed(table, root / "many", root / "many-out", many, options.rounds)
        one_added(table, root / "many", root / "many-out", many, rng, options.rounds)
        large = rebuild_of("large", 224, 1 << 28)
        make_raw(root / "large", options.rows, rng)
        large()
        time.sleep(2.1)
        large()
        one_percent(table, root / "large", root / "large-out", large, rng, options)
        table.close()


if __name__ == "__main__":
    main()
