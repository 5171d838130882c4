"""Builds a dataset from FFCV's .beton file with RGB images and whole-number labels, in the order of the file.

    build_from_ffcv.py FILE.beton OUT --size 224

FFCV decodes and crops; what it gives is stored as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption

import mmcompile


def samples(path: str, size: int) -> Iterator[dict[str, Any]]:
    pipelines = {"image": [CenterCropRGBImageDecoder((size, size), ratio=224 / 256)], "label": [IntDecoder()]}
    for images, labels in Loader(path, batch_size=64, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False, pipelines=pipelines):
        for image, label in zip(images, labels, strict=True):
            yield {"image": image.copy(), "label": int(label[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    report = mmcompile.build(samples(args.source, args.size), args.out)
    print(f"{report.samples} samples of {', '.join(report.fields)}")


if __name__ == "__main__":
    main()
