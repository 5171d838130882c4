"""What the benchmarks share: datasets made from arrays, rounds that are interleaved, and a table of what was reached against what must be."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from mmcompile.format.index import Field, Index, Split, publish
from mmcompile.format.npy import libc, save_array
from mmcompile.format.samples import hash_pair

#: Share of the pages that may be in memory when a cold run begins: a header, and what is read around it.
COLD = 0.01
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def machine() -> str:
    """One line about what this ran on."""
    name = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, Linux {platform.release()}"
    return f"{len(os.sched_getaffinity(0))} cores ({name or platform.machine()}), load {os.getloadavg()[0]:.1f}; {versions}"


def save_dataset(
    root: Path, shards: Iterable[np.ndarray], classes: int = 0, normalize: bool = False, repeat: int = 1, dtype: str | None = None
) -> int:
    """A dataset of uint8 images, chw: a shard for each array (rows, C, H, W), or of values of another dtype (rows, *shape); returns its bytes.

    dtype: what the values are where numpy has no name for it (bfloat16, as uint16).
    Holds what reading needs and no sources.  Labels are row % classes (none: no labels).  Each shard comes `repeat` times, as one file.
    """
    folder = root / "shards"
    folder.mkdir(parents=True)
    fields: list[Field] = []
    table, first = [], 0
    for images in shards:
        if not fields:
            fields.append(
                Field("image", "uint8", images.shape[1:], "image", "chw", 255.0, IMAGENET if normalize else None)
                if images.dtype == np.uint8
                else Field("x", dtype or images.dtype.name, images.shape[1:], "value")
            )
            fields += [Field("label", "int64", (), "class")] if classes else []
        hashes = [hash_pair(save_array(folder, fields[0].name, images, folder))]
        if classes:
            hashes.append(hash_pair(save_array(folder, "label", np.arange(first, first + len(images)) % classes, folder)))
        table.append((len(images), *hashes, (0, 0), (0, 0)))
        first += len(images)
    names = tuple(f"class {c}" for c in range(classes)) if classes else None
    n = first * repeat
    index = Index(tuple(fields), (Split("all", 0, n),), n, len(table) * repeat, "0" * 32, classes=names)
    entries = np.tile(np.array(table, index.table_dtype()), repeat)
    publish(root, Index(index.fields, index.splits, n, len(entries), save_array(folder, "table", entries, folder), classes=names))
    return n * index.row_bytes


def noise(rows: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes: uint8 (rows, *shape)."""
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


def resident(paths: Iterable[Path]) -> float:
    """The share of the pages of some files that are in memory.  Raises OSError where the kernel does not say."""
    found = total = 0
    for path in paths:
        whole = np.memmap(path, np.uint8, "r")
        pages = np.empty(-(-len(whole) // mmap.PAGESIZE), np.uint8)
        if libc().mincore(whole.ctypes.data, len(whole), pages.ctypes.data):
            raise OSError("the kernel does not say what is in memory")
        found, total = found + int((pages & 1).sum()), total + len(pages)
    return found / total


def evicted(paths: Iterable[Path]) -> str | None:
    """Let files leave the page cache; returns why they did not, or None.  What is still mapped stays."""
    gc.collect()
    paths = list(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    try:
        share = resident(paths)
    except OSError as error:
        return str(error)
    return f"{share:.0%} of the pages are still in memory; this file system keeps them, choose another folder" if share > COLD else None


def interleaved(
    runs: dict[str, Callable[[], int]],
    rounds: int,
    before: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Units a second of each run in each round: all one after the other, in another random order each time; a first round is not counted.

    A run returns how many units it did.  `before` is called before each, untimed.
    """
    names = list(runs)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    rng = random.Random(0)
    for turn in range(rounds + 1):
        rng.shuffle(names)  # nobody always follows the same one, whose caches it would find
        for name in names:
            if before is not None:
                before()
            begun = clock()
            units = runs[name]()
            if turn:
                rates[name].append(units / (clock() - begun))
    return rates


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


class Table:
    """Lines of what was measured, printed as they come; remembers whether all targets were reached."""

    def __init__(self) -> None:
        self.short: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'':<58}{'measured':>20}{'reached':>10}{'target':>10}", flush=True)

    def speed(self, what: str, per_s: float, unit: str = "images/s", nbytes: int = 0) -> None:
        rate = f"{per_s * nbytes / 1e9:.1f} GB/s" if nbytes else ""
        print(f"{what:<46}{rate:>12}{per_s:>11,.0f} {unit}", flush=True)

    def line(self, what: str, reached: float, least: float | None = None, most: float | None = None, unit: str = "times", note: str = "") -> None:
        """`reached` against what it must at least or at most be; without either it is for information."""
        good = (least is None or reached >= least) and (most is None or reached <= most)
        target = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else "-"
        verdict = "" if target == "-" else "  ok" if good else "  SHORT"
        if not good:
            self.short.append(what)
        print(f"{what:<58}{note:>20}{reached:>10.3g}{target:>10} {unit}{verdict}", flush=True)

    def close(self) -> None:
        print(f"\n{'all targets reached' if not self.short else 'short: ' + '; '.join(self.short)}")
        sys.stdout.flush()
