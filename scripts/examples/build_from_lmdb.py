"""Builds a dataset from an LMDB of image files whose keys are class/name, with a dataset class of one's own.

    build_from_lmdb.py FOLDER OUT [--resize 256 --crop 224] [--workers N]

An open environment cannot be sent to other processes: the class keeps its path, and each process opens it for itself.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import lmdb
from PIL import Image

import mmcompile


class LmdbImages:
    """(image, label) of each entry, in the order of the keys."""

    def __init__(self, path: str) -> None:
        self.path, self._environment = path, None
        with self.environment.begin() as transaction:
            self.keys = [bytes(key) for key in transaction.cursor().iternext(keys=True, values=False)]
        self.classes = sorted({key.split(b"/")[0].decode() for key in self.keys})

    @property
    def environment(self) -> Any:
        if self._environment is None:
            self._environment = lmdb.open(self.path, readonly=True, lock=False)
        return self._environment

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None}

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        key = self.keys[i]
        with self.environment.begin() as transaction:
            data = transaction.get(key)
        return Image.open(io.BytesIO(data)), self.classes.index(key.split(b"/")[0].decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    preprocess = mmcompile.Preprocess(resize=args.resize, crop=args.crop)
    report = mmcompile.build(LmdbImages(args.source), args.out, preprocess=preprocess, workers=args.workers)
    print(f"{report.samples} samples in classes {report.classes}, read by {report.workers} processes")


if __name__ == "__main__":
    from build_from_lmdb import main as run  # so that workers can import the class, which they cannot from a script

    run()
