"""Other ways to keep decoded images on disk and read them, beside this package's: build, open, epochs in sequence and at random, memory.

usage: python scripts/bench_peers.py [--dir DIR] [--rows 2048] [--rounds 7] [--json FILE] [--quick]

Measures what can be imported of torchvision (ImageFolder), tensordict, mmap_ninja, mosaicml-streaming, litdata, datasets, webdataset and ffcv, and
says what is not there: `pip install '.[bench]'` has all but ffcv, which must be compiled.  All get the same JPEG files of 224 x 224 and, but for
ImageFolder, keep their pixels raw.  Each way runs in a process of its own; bench_ways.py has its settings, and why: all that are worth a try are
tried, and the fastest on this machine is taken.  Rounds are interleaved over the processes, warm; each byte of each batch is summed in the process
that reads, for all alike (`limit` is an array in memory: in sequence just this sum, at random numpy.take into one buffer).  The rows of one whole
epoch of each kind are held against each other by label and hash.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_child import Child, ChildError
from bench_common import ratio
from bench_results import COUNTED, Part, Rows, in_memory, make_photos, plain_reason, run_part
from bench_ways import WAYS, Ours, batches_of

OURS, LIMIT = "mmcompile", "limit"
SIDE, BATCH = 224, 256
#: Times as fast as a peer that shuffled epochs must be.
LEAST, LEAST_FFCV = 2.0, 1.3
#: Rounds of builds, each from nothing.
_BUILDS = 3
HIDDEN = (
    "a GPU, and copies to one",
    "object stores and network disks, which Streaming, LitData and WebDataset are made for",
    "compression, which keeps files small",
    "data larger than memory",
    "augmentation, and pipelines that FFCV compiles",
    "builds of many images: here what happens once, as starting workers, weighs much; mmcompile also syncs and hashes what it writes, others do not",
)


class Peers:
    """The processes, what they found, and which of them are still there."""

    def __init__(self, part: Part, folder: Path, stack: ExitStack) -> None:
        self.part, self.folder, self.stack = part, folder, stack
        self.workers: int = part.settings["workers"]
        self.children: dict[str, Child] = {}
        self.mixing: dict[str, str] = {}
        self.chosen: dict[tuple[str, bool], str] = {}

    def start(self) -> None:
        for name, way in WAYS.items():
            if importlib.util.find_spec(way.library) is None:
                self.part.absent(name, f"{way.library} is not installed")
                continue
            self.children[name] = self.stack.enter_context(self._child(name))
        for name in list(self.children):
            self.told(name, lambda child: self.mixing.update({child: self.children[child].ask("ready")}))

    def _child(self, name: str) -> Child:
        script = Path(__file__).with_name("bench_ways.py")
        return Child([sys.executable, str(script), name, str(BATCH), str(self.workers)], {**os.environ, "TOKENIZERS_PARALLELISM": "false"})

    def told(self, name: str, action: Callable[[str], object]) -> None:
        """Do something with a child; one that cannot is absent from there on."""
        try:
            action(name)
        except ChildError as error:
            self.part.absent(name, plain_reason(str(error)))
            self.children.pop(name, None)
            if name in (OURS, LIMIT):
                raise SystemExit(f"bench_peers.py: {name}: {error}") from error

    def rounds(self, count: int, command: Callable[[str], float]) -> dict[str, list[float]]:
        """So many rounds over all children, in random orders."""
        found: dict[str, list[float]] = {name: [] for name in self.children}
        rng = random.Random(0)
        for _ in range(count):
            names = list(self.children)
            rng.shuffle(names)
            for name in names:
                self.told(name, lambda name: found[name].append(command(name)))
        return {name: values for name, values in found.items() if name in self.children}

    def out(self, name: str) -> str:
        return str(self.folder / name.replace(" ", "-"))

    # -- what is measured

    def build(self, raw: Path, count: int) -> None:
        def built(name: str) -> float:
            out = Path(self.out(name))
            if out.is_symlink():
                out.unlink()
            shutil.rmtree(out, ignore_errors=True)
            return float(self.children[name].ask("build", raw=str(raw), out=str(out)))

        found = self.rounds(count, built)
        sizes = {name: sum(path.stat().st_size for path in Path(self.out(name)).rglob("*") if path.is_file()) / 1e6 for name in found}
        notes = {name: "reads the JPEG files" if name == "ImageFolder" else f"{size:,.0f} MB" for name, size in sizes.items()}
        self.part.table("peers: build from JPEG files", "s", {name: v for name, v in found.items() if name not in (LIMIT, "ImageFolder")}, notes)

    def open(self, count: int) -> None:
        found = self.rounds(count + 1, lambda name: 1e3 * float(self.children[name].ask("open", out=self.out(name))))
        self.part.table("peers: open, and read the first row", "ms", {name: v[1:] for name, v in found.items() if name != LIMIT})

    def epochs(self, shuffled: bool, count: int, quick: bool, expected: Rows) -> None:
        order = "random" if shuffled else "sequential"
        for name in list(self.children):
            self.told(name, lambda name: self.choose(name, shuffled, quick))
        for name in list(self.children):
            self.told(name, lambda name: self.check(name, shuffled, expected))
        rows = self.part.settings["rows"]
        rates = self.rounds(count, lambda name: rows / float(self.children[name].ask("epoch", shuffled=shuffled)))
        notes = {name: self.chosen[name, shuffled] + (f"; {self.mixing[name]}" if shuffled else "") for name in rates}
        self.part.table(f"peers: {order} epoch, batches of {BATCH}", "images/s", rates, notes)
        for name in rates:
            if name not in (OURS, LIMIT):
                least = (LEAST_FFCV if name == "FFCV" else LEAST) if shuffled else None
                self.part.target(f"peers, {order}: mmcompile / {name}", ratio(rates, OURS, name), least)
        self.part.target(f"peers, {order}: mmcompile / the limit", ratio(rates, OURS, LIMIT))

    def choose(self, name: str, shuffled: bool, quick: bool) -> None:
        found: dict[str, Any] = self.children[name].ask("choose", out=self.out(name), shuffled=shuffled, tries=0 if quick else 1)
        self.chosen[name, shuffled] = found["setting"]
        self.part.settings.setdefault("tried", {})[f"{name}, {'random' if shuffled else 'sequential'}"] = found["tried"]

    def check(self, name: str, shuffled: bool, expected: Rows) -> None:
        found = self.children[name].ask("check", shuffled=shuffled)
        same = found["set"] == expected.digest(False)
        if shuffled or WAYS[name].ordered:
            same &= (found["ordered"] == expected.digest(True)) is not shuffled
        order = "another order" if shuffled else "order" if WAYS[name].ordered else "whatever order its workers have"
        self.part.checked(f"{name}: each row once, in {order}", found["rows"], same)

    def memory(self, names: list[str]) -> None:
        held: dict[str, list[float]] = {}
        notes: dict[str, str] = {}

        def watch(name: str, setting: str) -> None:
            with self._child(name) as child:
                child.ask("ready")
                _, before, most = child.watched("once", out=self.out(name), shuffled=True, setting=setting)
                held[f"{name}, {setting}"] = [most - before]
                notes[f"{name}, {setting}"] = f"{COUNTED}; {most:,.0f} MiB with its imports"

        for name in names:
            for setting in dict.fromkeys([self.chosen[name, True], *([Ours.FRUGAL] if name == OURS and not self.part.quick else [])]):
                self.told(name, lambda name, setting=setting: watch(name, setting))
        self.part.table("peers: memory that a random epoch adds, at most", "MiB", held, notes)


def measure(args: argparse.Namespace, folder: Path) -> Part:
    workers = max(2, min(8, len(os.sched_getaffinity(0))))
    settings = {"rows": args.rows, "shape": [3, SIDE, SIDE], "batch": BATCH, "rounds": args.rounds, "workers": workers, "build_rounds": _BUILDS}
    part = Part("peers", args.quick, settings, HIDDEN)
    raw = folder / "raw"
    make_photos(raw, args.rows, (SIDE, SIDE))
    expected = Rows(batches_of(raw, workers))
    with ExitStack() as stack:
        peers = Peers(part, folder, stack)
        peers.start()
        peers.build(raw, 1 if args.quick else _BUILDS)
        peers.open(args.rounds)
        for shuffled in (False, True):
            peers.epochs(shuffled, args.rounds, args.quick, expected)
        if in_memory(folder):
            part.absent("memory", "the folder is in memory itself (tmpfs), so that mapped files would be counted as memory")
        else:
            peers.memory([OURS] if args.quick else list(peers.children))
    return part


if __name__ == "__main__":
    run_part(__doc__ or "", 2048, 300, measure)
