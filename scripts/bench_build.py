"""Measures a build: against a pipeline in Pillow, against decoding and resizing alone, with 1 and 2 workers, and what it does with memory and time.

    bench_build.py RAW [--rounds 7] [--images 300] [--only pixels,large,workers,shapes,verify]

RAW: photos of about 500x375.  Those of 12 megapixels are made from them (upscaled, a little noise, quality 92).  All rounds are interleaved in one
run, each from nothing; a ratio is the median of those within a round.  Warm: RAW is read before.  Per core means CPU time with one thread: of this
process for what is written here by hand, of a worker of the local engine for ours.  Rows with workers are wall time, from the first decoded image to
the last, so that loading torch is not in them.  What this does not show: a cold or slow disk, photos that differ much from these (the more bytes
a pixel, the less jpeg_scaling saves), more cores than this machine has.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_common import Table, interleaved, machine, ratio
from PIL import Image

import mmcompile
from mmcompile import BuildOptions
from mmcompile.compiler import decode, engines
from mmcompile.compiler.decode import jpeg
from mmcompile.compiler.engines import LocalExecutor
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.task import Job, Piece, run_piece, warm_up
from mmcompile.format.index import Field
from mmcompile.format.npy import hash_file
from mmcompile.format.verify import verify

RESIZE, CROP = 256, 224
SIZE = Preprocess(resize=RESIZE, crop=CROP)
#: Of the photos made: width, height; how far the noise goes in levels; how many.
LARGE = (4000, 3000, 1, 16)


# ---------------------------------------------------------------- the ways


def target(width: int, height: int) -> tuple[int, int]:
    short = min(width, height)
    return int(RESIZE * width / short), int(RESIZE * height / short)


def plain(paths: list[Path], out: int) -> int:
    """What people write by hand: torchvision's Resize and CenterCrop on PIL images, each row written to a new file."""
    os.ftruncate(out, 0)
    for i, path in enumerate(paths):
        image = Image.open(path).convert("RGB")
        image = image.resize(target(*image.size), Image.Resampling.BILINEAR)
        left, top = round((image.width - CROP) / 2), round((image.height - CROP) / 2)
        row = np.ascontiguousarray(np.asarray(image.crop((left, top, left + CROP, top + CROP))).transpose(2, 0, 1))
        os.pwrite(out, row.data, i * row.nbytes)
    return len(paths)


def bare(paths: list[Path]) -> int:
    """Reading, decoding and resizing alone."""
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).unsqueeze(0)
            width, height = target(*image.size)
        torch.nn.functional.interpolate(pixels, size=[height, width], mode="bilinear", antialias=True)
    return len(paths)


class Ours:
    """What a worker of the local engine does with some files: read, hash, decode, resize, sums, row hash, write."""

    def __init__(self, raw: Path, paths: list[Path], preprocess: Preprocess, extra: bool = True) -> None:
        options = preprocess.resolved()
        fields = (Field("image", "uint8", options.row_shape(), "image", "chw", 255.0, None), Field("label", "int64", (), "class"))
        self.scratch = Path(tempfile.mkdtemp(prefix="bench-"))
        source = FolderSource(str(raw))
        self.job = Job(source, options, fields, self.scratch, self.scratch)
        keys = tuple(os.fsencode(path.relative_to(raw)) for path in paths)
        n = len(keys)
        stats = tuple(source.stat(key) for key in keys)
        self.piece = Piece("t", 1, tuple(range(n)), keys, np.zeros(n, np.int64), np.zeros((n, 2), np.uint64), np.zeros(n, bool), stats)
        self.executor = LocalExecutor(1)
        self.executor.prepare(partial(warm_up, SIZE))
        if not extra:
            self.executor.submit(exec, "from mmcompile.compiler.decode import jpeg; jpeg._turbo = lambda: None").result()
        self.pid = self.executor.submit(os.getpid).result()

    def __call__(self) -> int:
        result = self.executor.submit(run_piece, self.job, self.piece).result()
        assert not result.failures
        shutil.rmtree(self.scratch)
        self.scratch.mkdir()
        return len(self.piece.keys)

    def cpu_s(self) -> float:
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024

    def close(self) -> None:
        self.executor.kill()
        shutil.rmtree(self.scratch)


def cpu_times(runs: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """As `interleaved`, in units a second of CPU time of this process and of the workers of those runs that are Ours."""
    workers = [run for run in runs.values() if isinstance(run, Ours)]
    try:
        return interleaved(runs, rounds, clock=lambda: time.process_time() + sum(worker.cpu_s() for worker in workers))
    finally:
        for worker in workers:
            worker.close()


def built(raw: Path, workers: int, shard_bytes: int = 1 << 28, preprocess: Preprocess = SIZE) -> float:
    """Images a second of a build from nothing, from the first one decoded to the last."""
    seen: list[tuple[float, int]] = []

    def progress(now: Progress) -> None:
        if now.stage == "build" and now.done:
            seen.append((time.perf_counter(), now.done))

    out = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        options = BuildOptions(workers=workers, shard_bytes=shard_bytes)
        mmcompile.build(raw, out / "out", preprocess=preprocess, options=options, max_rejects="100%", progress=progress)
    finally:
        shutil.rmtree(out)
    last = next(i for i, (_, done) in enumerate(seen) if done == seen[-1][1])
    return (seen[last][1] - seen[0][1]) / (seen[last][0] - seen[0][0])


# ---------------------------------------------------------------- the tables


def pixels(table: Table, raw: Path, options: argparse.Namespace) -> None:
    paths = sample(raw, options.images)
    out = tempfile.TemporaryFile()  # noqa: SIM115
    ours = Ours(raw, paths, SIZE)
    runs: dict[str, Callable[[], int]] = {"plain": lambda: plain(paths, out.fileno()), "bare": lambda: bare(paths)}
    runs |= {"ours": Ours(raw, paths, SIZE, extra=False), "ours, extra": ours}
    ours()
    most = ours.peak_mib()
    rates = cpu_times(runs, options.rounds)
    out.close()
    table.title(f"photos, per core ({len(paths)} files, {sum(p.stat().st_size for p in paths) / len(paths) / 1024:.0f} KiB each)")
    speeds(table, rates)
    table.line("worker against the plain Pillow pipeline", ratio(rates, "ours", "plain"), 1.25)
    table.line("... against bare decode + resize", ratio(rates, "ours", "bare"), 0.9)
    if jpeg._turbo() is not None:
        table.line("... with the extra, against the plain pipeline", ratio(rates, "ours, extra", "plain"), 1.5)
        table.line("... with the extra, against itself without", ratio(rates, "ours, extra", "ours"))
    table.line("most memory of a worker on these photos", most, most=400, unit="MiB")


def large(table: Table, raw: Path, options: argparse.Namespace) -> None:
    paths = sample(raw, LARGE[3])
    out = tempfile.TemporaryFile()  # noqa: SIM115
    runs: dict[str, Callable[[], int]] = {"plain": lambda: plain(paths, out.fileno()), "bare": lambda: bare(paths)}
    for with_extra in (False, True):
        for n in (None, 1, 2):
            name = "ours" + (f", jpeg_scaling {n}" if n else "") + (", extra" if with_extra else "")
            runs[name] = Ours(raw, paths, replace(SIZE, jpeg_scaling=n), with_extra)
    rates = cpu_times(runs, options.rounds)
    out.close()
    table.title(f"12 megapixels, per core ({len(paths)} files, {sum(p.stat().st_size for p in paths) / len(paths) / 1e6:.2f} MB each)")
    speeds(table, rates)
    table.line("worker against the plain Pillow pipeline", ratio(rates, "ours", "plain"), 1.25)
    table.line("... against bare decode + resize", ratio(rates, "ours", "bare"), 0.9)
    for extra in ("", ", extra"):
        for n in (1, 2):
            name = f"ours, jpeg_scaling {n}{extra}"
            table.line(f"jpeg_scaling={n}{extra}, against the plain pipeline", ratio(rates, name, "plain"), 5)
            table.line(f"jpeg_scaling={n}{extra}, against itself without", ratio(rates, name, f"ours{extra}"))


def workers(table: Table, raw: Path, options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {"1 worker": [], "2 workers": [], "1 worker, one shard": [], "2 workers, one shard": []}
    for _ in range(options.rounds):
        for name, values in rates.items():
            values.append(built(raw, int(name[0]), 1 << 40 if "one" in name else 1 << 27))
    table.title("photos, whole builds")
    speeds(table, rates)
    table.line("2 workers against 1", ratio(rates, "2 workers", "1 worker"), 1.85)
    table.line("... within one shard", ratio(rates, "2 workers, one shard", "1 worker, one shard"), 1.85)


def shapes(table: Table, raw: Path, large_raw: Path, options: argparse.Namespace) -> None:
    """How much of the time two workers have work, from the first call to the end of the last."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    photos, huge = sample(raw, 400), sample(large_raw, 6)
    tiny = Image.new("L", (28, 28), 9)
    makes: dict[str, Callable[[Path], object]] = {
        "5,000 tiny files": lambda to: [tiny.save(to / f"{i:05}.png") for i in range(5000)],
        "6 files of 12 megapixels": lambda to: [shutil.copy(p, to / f"{i}.jpg") for i, p in enumerate(huge)],
        "400 photos, then 6 of 12 megapixels": lambda to: [shutil.copy(p, to / f"{i:04}.jpg") for i, p in enumerate([*photos, *huge])],
    }
    table.title("what two workers do of the time")
    try:
        for name, make in makes.items():
            to = folder / name / "a"
            to.mkdir(parents=True)
            make(to)
            shares = [busy(to.parent) for _ in range(options.rounds)]
            table.line(name, float(np.median(shares)), note="busy share")
    finally:
        shutil.rmtree(folder)


def busy(raw: Path) -> float:
    calls: list[tuple[float, float]] = []
    real = engines._call

    def timed(worker: Any, data: bytes) -> Any:
        began = time.perf_counter()
        try:
            return real(worker, data)
        finally:
            calls.append((began, time.perf_counter()))

    out = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        with mock.patch.object(engines, "_call", timed):
            mmcompile.build(raw, out / "out", preprocess=SIZE, workers=2)
    finally:
        shutil.rmtree(out)
    return sum(b - a for a, b in calls) / (2 * (max(b for _, b in calls) - min(a for a, _ in calls)))


def verified(table: Table, raw: Path, options: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        out = folder / "out"
        mmcompile.build(raw, out, preprocess=SIZE, max_rejects="100%", options=BuildOptions(shard_bytes=1 << 26))
        files = sorted((out / "shards").iterdir())
        total = sum(f.stat().st_size for f in files)
        threads = max(2, min(16, len(os.sched_getaffinity(0))))

        def hashed() -> int:
            def one(path: Path) -> None:
                with open(path, "rb") as file:
                    hash_file(file.fileno())

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(one, files))
            return total

        def whole() -> int:
            assert verify(out, workers=threads).ok
            return total

        rates = interleaved({"hash": hashed, "verify": whole}, options.rounds)
    finally:
        shutil.rmtree(folder)
    table.title(f"verify ({total / 1e6:.0f} MB, {threads} threads, warm)")
    table.line("verify against reading and hashing alone", ratio(rates, "verify", "hash"), 0.8)


def speeds(table: Table, rates: dict[str, list[float]]) -> None:
    for name, values in rates.items():
        table.speed(name, float(np.median(values)))


def sample(raw: Path, count: int) -> list[Path]:
    """Some files, evenly over the folder."""
    paths = sorted(p for p in raw.rglob("*") if p.is_file())
    return paths[:: max(1, len(paths) // count)][:count]


def make_large(raw: Path, folder: Path) -> None:
    rng = np.random.default_rng(0)
    width, height, noise, count = LARGE
    (folder / "a").mkdir()
    for i, path in enumerate(sample(raw, count)):
        with Image.open(path) as image:
            grown = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
        grown += rng.integers(-noise, noise + 1, grown.shape, dtype=np.int16)
        Image.fromarray(grown.clip(0, 255).astype(np.uint8)).save(folder / "a" / f"{i}.jpg", quality=92)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--only", default="pixels,large,workers,shapes,verify")
    options = parser.parse_args()
    torch.set_num_threads(1)
    decode.initialise()
    warm_up(SIZE)
    for path in options.raw.rglob("*"):
        if path.is_file():
            path.read_bytes()
    print(machine())
    print(f"Pillow {Image.__version__}, extra jpeg {'used' if jpeg._turbo() is not None else 'not installed, or not used'}; {options.rounds} rounds")
    table = Table()
    only = options.only.split(",")
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        if {"large", "shapes"} & set(only):
            make_large(options.raw, folder)
        if "pixels" in only:
            pixels(table, options.raw, options)
        if "large" in only:
            large(table, folder, options)
        if "workers" in only:
            workers(table, options.raw, options)
        if "shapes" in only:
            shapes(table, options.raw, folder, options)
        if "verify" in only:
            verified(table, options.raw, options)
    finally:
        shutil.rmtree(folder)
    table.close()
    sys.exit(1 if table.short else 0)


if __name__ == "__main__":
    main()
