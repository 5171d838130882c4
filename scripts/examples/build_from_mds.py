"""Builds a dataset from MosaicML's MDS: what each sample holds under its name; text has no number, so keep other columns.

build_from_mds.py FOLDER OUT [--keep image,label] [--resize 256 --crop 224]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from streaming import StreamingDataset

import mmcompile


def samples(folder: str, keep: list[str]) -> Iterator[dict[str, Any]]:
    dataset = StreamingDataset(local=folder, shuffle=False, batch_size=1)
    for i in range(dataset.num_samples):
        found = dataset[i]
        yield {name: found[name] for name in (keep or found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    args = parser.parse_args()
    preprocess = mmcompile.Preprocess(resize=args.resize, crop=args.crop)
    report = mmcompile.build(samples(args.source, args.keep), args.out, preprocess=preprocess)
    print(f"{report.samples} samples of {', '.join(report.fields)}")


if __name__ == "__main__":
    main()
