"""Builds a dataset from FFCV's .beton file, in the order of the file: its images, numbers and arrays under their names there.

    build_from_ffcv.py FILE.beton OUT [--keep image,label] [--size 224 [--ratio 0.875] | --resize 256 --crop 224]

Images of one size come as they lie in the file, and --resize and --crop are mmcompile's.  Images of several sizes need --size, with which FFCV cuts
out the middle (of --ratio times the shorter side) and makes that this size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from ffcv.fields import FloatField, IntField, RGBImageField
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from PIL import Image

import mmcompile


def pipelines(handlers: dict[str, Any], keep: list[str], size: int | None, ratio: float) -> dict[str, Any]:
    """Each field's own decoder; None for one that is not kept."""
    made: dict[str, Any] = {}
    for name, handler in handlers.items():
        cut = isinstance(handler, RGBImageField) and size is not None
        decoder = CenterCropRGBImageDecoder((size, size), ratio) if cut else handler.get_decoder_class()()
        made[name] = [decoder] if not keep or name in keep else None
    return made


def samples(loader: Loader, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pillow's pictures, numbers, and copies of arrays: the loader uses its buffers again."""
    make = {RGBImageField: Image.fromarray, IntField: lambda value: int(value[0]), FloatField: lambda value: float(value[0])}
    for batch in loader:
        for row in zip(*batch, strict=True):
            yield {name: make.get(type(field), np.array)(value) for (name, field), value in zip(fields.items(), row, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    parser.add_argument("--size", type=int)
    parser.add_argument("--ratio", type=float, default=224 / 256)
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    args = parser.parse_args()
    reader = Reader(args.source)
    if unknown := set(args.keep) - set(reader.handlers):
        parser.error(f"--keep {sorted(unknown)[0]}: the file has {', '.join(reader.handlers)}")
    images = [name for name, field in reader.handlers.items() if isinstance(field, RGBImageField) and (not args.keep or name in args.keep)]
    made = pipelines(reader.handlers, args.keep, args.size, args.ratio)
    try:
        loader = Loader(args.source, 64, 1, order=OrderOption.SEQUENTIAL, drop_last=False, pipelines=made)
    except TypeError as error:  # its decoder of images as they lie wants one size
        if args.size is None and images:
            parser.error(f"{', '.join(images)}: images of several sizes need --size")
        raise error
    fields = {name: field for name, field in reader.handlers.items() if made[name] is not None}
    preprocess = mmcompile.Preprocess(resize=args.resize, crop=args.crop)
    report = mmcompile.build(samples(loader, fields), args.out, preprocess=preprocess)
    print(f"{report.samples} samples of {', '.join(report.fields)}")


if __name__ == "__main__":
    main()
