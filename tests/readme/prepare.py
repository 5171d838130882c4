"""What a reader of the README would have: `python -m tests.readme.prepare NAME` makes it in the working folder, as the library does that wrote it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def raw(seed: int = 0, folder: str = "raw") -> None:
    """Two classes of pictures that differ in size."""
    rng = np.random.default_rng(seed)
    for name in ("cat", "dog"):
        (Path(folder) / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (260 + 10 * i, 300, 3), np.uint8)
            Image.fromarray(pixels).save(Path(folder) / name / f"{i}.png")


def compiled(seed: int, out: str) -> None:
    import mmcompile

    raw(seed, f"{out}-raw")
    mmcompile.build(f"{out}-raw", out, preprocess=mmcompile.Preprocess(resize=256, crop=224), workers=1)


def rows() -> None:
    Path("rows.txt").write_text("0\n3\n7\n")


def bars() -> None:
    """Two symbols, a bar for each day from June 2022 to May 2024."""
    days = np.arange("2022-06-01", "2024-06-01", dtype="datetime64[D]")
    Path("bars").mkdir()
    for symbol in ("A", "B"):
        lines = [f"{day},{i},{i + 2},{i - 1},{i + 1},{10 * i}\n" for i, day in enumerate(days)]
        Path(f"bars/{symbol}.csv").write_text("".join(["ts,open,high,low,close,volume\n", *lines]))


def cifar(name: str, rows: int) -> None:
    """A file of CIFAR-10's binary version: a byte for the class, 3 x 32 x 32 for the pixels."""
    np.random.default_rng(rows).integers(0, 10, (rows, 3073), np.uint8).tofile(name)


def secret() -> None:
    """For a machine without openssl; where there is one the README's own line writes another."""
    Path("secret.key").write_bytes(b"of a test, and of no one else")


MAKERS: dict[str, Callable[[], None]] = {
    "raw": raw,
    "out1": lambda: compiled(1, "out1"),
    "out2": lambda: compiled(2, "out2"),
    "rows.txt": rows,
    "bars": bars,
    "data_batch_1.bin": lambda: cifar("data_batch_1.bin", 5),
    "data_batch_2.bin": lambda: cifar("data_batch_2.bin", 4),
    "test_batch.bin": lambda: cifar("test_batch.bin", 3),
    "secret.key": secret,
}


if __name__ == "__main__":
    try:
        MAKERS[sys.argv[1]]()
    except BaseException:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        raise
