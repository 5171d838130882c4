"""Builds a dataset from one of Hugging Face's: names of classes are kept, splits are splits, and a rebuild reads only what changed.

    build_from_huggingface.py NAME_OR_FOLDER OUT [--resize 256 --crop 224] [--keep image,label] [--workers N]

NAME_OR_FOLDER is what `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote.  Columns of text have no number: keep the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets

import mmcompile


def load(place: str, keep: list[str]) -> datasets.Dataset | datasets.DatasetDict:
    saved = Path(place)
    on_disk = (saved / "state.json").exists() or (saved / "dataset_dict.json").exists()
    found = datasets.load_from_disk(place) if on_disk else datasets.load_dataset(place)
    return found.select_columns(keep) if keep else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    preprocess = mmcompile.Preprocess(resize=args.resize, crop=args.crop)
    report = mmcompile.build(load(args.source, args.keep), args.out, preprocess=preprocess, workers=args.workers)
    print(f"{report.samples} samples of {', '.join(report.fields)}; classes {report.classes}")


if __name__ == "__main__":
    main()
