"""Hides how what the kit's parts find is kept: as one JSON document each, with every figure's rounds, printed as it comes.

Holds what more than one part needs to be honest: bytes are touched, rows are compared, memory is counted, all in one way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

Batches = Iterable[tuple[Any, Any]]
#: What a part may be asked for, and the full size of it.
QUICK_ROUNDS, ROUNDS = 1, 7
#: Photos are noise of so many points a side, made larger, and noise of so many levels on top: 500 x 375 at quality 90 is some 70 KB, as photos are.
_COARSE, _GRAIN = 24, 9
#: What a figure of memory is.
COUNTED = "private and shared memory, without mapped files"
_VERSIONS = (
    *("mmcompile", "torch", "numpy", "pillow", "simplejpeg", "torchvision", "tensordict", "mmap_ninja", "mosaicml-streaming", "litdata", "datasets"),
    *("webdataset", "ffcv"),
)


class Part:
    """What one part of the kit found; `document` is its JSON.

    quick: a run that shows no speed, so that no target is judged.  hidden: what the part does not show.
    """

    def __init__(self, name: str, quick: bool, settings: dict[str, Any], hidden: Iterable[str]) -> None:
        self.name, self.quick, self.settings, self.hidden = name, quick, settings, list(hidden)
        self.figures: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}

    def table(self, title: str, unit: str, rounds: dict[str, list[float]], notes: dict[str, str] | None = None) -> None:
        """Figures that stand beside each other, with their rounds; the median is what is shown."""
        print(f"\n{title} ({unit})", flush=True)
        for name, values in rounds.items():
            median, note = statistics.median(values), (notes or {}).get(name, "")
            self.figures.append({"table": title, "name": name, "unit": unit, "median": median, "rounds": values, "note": note})
            print(f"  {name:<58}{shown(median):>12}  {note}", flush=True)

    def target(self, what: str, reached: float, least: float | None = None, article: str = "") -> None:
        """A ratio, and what it must at least be (None: for information)."""
        ok = None if least is None or self.quick else reached >= least
        self.targets.append({"what": what, "reached": reached, "least": least, "ok": ok, "article": article})
        verdict = "" if ok is None else f"  at least {least:g}: {'reached' if ok else 'NOT REACHED'}"
        print(f"  {what:<58}{reached:>11.2f}x{verdict}", flush=True)

    def checked(self, what: str, rows: int, same: bool) -> None:
        """A fact about the rows that were read.  Raises SystemExit where it does not hold: speeds of other rows say nothing."""
        if not same:
            raise SystemExit(f"{self.name}: {what}: not the same rows")
        self.checks.append({"what": what, "rows": rows, "same": True})

    def absent(self, who: str, why: str) -> None:
        self.missing[who] = why
        print(f"  {who}: not there: {why}", flush=True)

    def document(self) -> dict[str, Any]:
        kept = ("quick", "settings", "figures", "targets", "checks", "missing", "hidden")
        return {"part": self.name, **{name: getattr(self, name) for name in kept}}


def run_part(doc: str, rows: int, quick_rows: int, measure: Callable[[argparse.Namespace, Path], Part]) -> None:
    """The command line of a part: its options, a temporary folder, its JSON."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on a disk: what is made lies in it for the time of the run")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--rows", type=int, help=f"how many images (default {rows:,})")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="a few rows and one round: shows that it runs, and no speed")
    args = parser.parse_args()
    args.rows = args.rows or (quick_rows if args.quick else rows)
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if args.rows < 16 or args.rounds < 1:
        parser.error("--rows must be at least 16, --rounds at least 1")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as folder:
        part = measure(args, Path(folder))
    print("\nnot shown: " + "; ".join(part.hidden), flush=True)
    if args.json:
        args.json.write_text(json.dumps(part.document(), indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- rows


def touched(images: Any) -> int:
    """Reads every byte of a batch, and gives back how many rows it has: the sum of its bytes, eight at a time, in one thread, for all alike."""
    array = images if isinstance(images, np.ndarray) else images.numpy()
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) & -8
    if int(flat[:whole].view(np.uint64).sum()) + int(flat[whole:].sum()) < 0:
        raise ValueError("a sum of bytes is never negative")
    return len(array)


class Rows:
    """Which rows were read: the label and the xxh3-64 of the values of each, in the order in which they came."""

    def __init__(self, batches: Batches) -> None:
        self.found: list[tuple[int, int]] = []
        for images, labels in batches:
            for image, label in zip(np.asarray(images), np.asarray(labels).reshape(-1).tolist(), strict=True):
                self.found.append((int(label), xxhash.xxh3_64_intdigest(np.ascontiguousarray(image))))

    def digest(self, ordered: bool) -> str:
        """The same for the same rows; if not `ordered`, in whatever order."""
        found = self.found if ordered else sorted(self.found)
        return xxhash.xxh3_128_hexdigest(np.array(found, np.uint64))


# ---------------------------------------------------------------- files


def photo(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """A picture that costs a decoder about what a photo costs it."""
    coarse = Image.fromarray(rng.integers(0, 256, (_COARSE, _COARSE, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse) + rng.normal(0, _GRAIN, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def make_photos(raw: Path, count: int, size: tuple[int, int], classes: int = 16) -> int:
    """JPEG files of one size (height, width) in class folders; returns their bytes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = raw / f"class{i * classes // count:02}"
        folder.mkdir(parents=True, exist_ok=True)
        photo(rng, *size).save(folder / f"{i:06}.jpg", quality=90)
    return sum(path.stat().st_size for path in raw.rglob("*.jpg"))


def photo_paths(raw: Path) -> list[tuple[Path, int]]:
    """All files with their labels, in the order of torchvision's ImageFolder."""
    classes = sorted(path for path in raw.iterdir() if path.is_dir())
    return [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]


# ---------------------------------------------------------------- machine


def in_memory(folder: Path) -> bool:
    """Whether files in a folder are memory of processes that map them (tmpfs), so that the two cannot be told apart."""
    done = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return done.stdout.strip() in ("tmpfs", "ramfs")


def held_mib(session: int) -> float:
    """MiB of memory of the processes of a session: private anonymous and shared memory, pages that several share counted once.

    Not counted (COUNTED): pages of mapped files, which the kernel takes back when it needs them.
    """
    held = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == session:
                text = Path(f"/proc/{name}/smaps_rollup").read_text()
                held += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        except (OSError, ProcessLookupError):  # it has ended
            continue
    return held / 1024


def about() -> dict[str, Any]:
    """What this ran on, and with which versions."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = int(Path("/proc/meminfo").read_text().split()[1])
    kernel = ".".join(re.findall(r"\d+", os.uname().release)[:2])
    versions = {"python": platform.python_version(), "linux": kernel}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**20, 1), "load_1m": os.getloadavg()[0]}
    return {"machine": machine, "versions": versions}


def plain_reason(text: str) -> str:
    """The last line of an error, without the folders of this machine, short enough for a table."""
    last = (text.strip().splitlines() or ["no reason given"])[-1]
    return re.sub(r"(?:/[^\s/:'\"]+)+/", "", last)[:160]


def shown(value: float) -> str:
    """A figure with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
