"""Builds a dataset from images with YOLO labels: boxes become an array of fixed shape, filled up with class -1.

    build_from_yolo.py FOLDER OUT --size 640 [--most 100] [--workers N]

FOLDER holds images/… and labels/… with a .txt for each image: a line "class x y width height" for each box, in shares of the image.  Images are
resized to SIZE x SIZE, which leaves such shares as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import mmcompile


class YoloImages:
    """{"image", "boxes" (most, 5) float32: class, x, y, width, height} of each image, sorted by path."""

    def __init__(self, root: Path, most: int) -> None:
        self.root, self.most = root, most
        self.images = sorted(p for p in (root / "images").rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Any]:
        path = self.images[i]
        labels = (self.root / "labels" / path.relative_to(self.root / "images")).with_suffix(".txt")
        lines = labels.read_text().split("\n") if labels.exists() else []
        found = [[float(number) for number in line.split()] for line in lines if line.strip()]
        if len(found) > self.most:
            raise ValueError(f"{labels}: {len(found)} boxes, --most {self.most} have room")
        boxes = np.full((self.most, 5), -1, np.float32)
        boxes[: len(found)] = np.asarray(found, np.float32).reshape(-1, 5)
        return {"image": Image.open(path), "boxes": boxes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--most", type=int, default=100)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    preprocess = mmcompile.Preprocess(resize=(args.size, args.size))
    report = mmcompile.build(YoloImages(args.source, args.most), args.out, preprocess=preprocess, workers=args.workers)
    print(f"{report.samples} samples of {', '.join(report.fields)}, read by {report.workers} processes")


if __name__ == "__main__":
    from build_from_yolo import main as run  # so that workers can import the class, which they cannot from a script

    run()
