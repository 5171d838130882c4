"""Builds a dataset from MosaicML's MDS: what each sample holds under its name; text has no number, so keep other columns.

    build_from_mds.py FOLDER OUT [--keep image,label] [--resize 256 --crop 224] [--workers N]
    build_from_mds.py s3://bucket/mds OUT --split train --cache DIR

A FOLDER without index.json whose folders have one holds splits.  Columns of bytes are taken for image files.  Shards that are remote or compressed
need --cache: the library puts them there, unpacked, and they are read from there.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

from PIL import Image
from streaming import LocalDataset, StreamingDataset

import mmcompile


class MdsSamples:
    """The samples of a split ("": of the folder itself), in the order in which they were written.  The library keeps no file open: it can be sent."""

    def __init__(self, folder: str, split: str, keep: list[str]) -> None:
        self.dataset, self.keep = LocalDataset(folder, split), keep
        for shard in self.dataset.shards:
            if not (path := Path(folder, split, shard.raw_data.basename)).exists():
                raise SystemExit(f"build_from_mds.py: {path} is missing; shards that are compressed need --cache DIR")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        found = self.dataset[i]
        kept = {name: found[name] for name in (self.keep or found)}
        return {name: Image.open(io.BytesIO(value)) if isinstance(value, bytes) else value for name, value in kept.items()}


def unpack(source: str, split: str, cache: str) -> None:
    """Put all shards of a split into `cache`, unpacked."""
    dataset = StreamingDataset(remote=source, local=cache, split=split or None, batch_size=1)
    for shard in range(dataset.num_shards):
        dataset.prepare_shard(shard)


def splits_of(folder: str) -> list[str]:
    inside = sorted(path.parent.name for path in Path(folder).glob("*/index.json"))
    return [""] if (Path(folder) / "index.json").exists() or not inside else inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--split", action="append", help="one of the splits; may be repeated")
    parser.add_argument("--cache")
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    parser.add_argument("--resize", type=int)
    parser.add_argument("--crop", type=int)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    splits = args.split or splits_of(args.source)
    for split in splits if args.cache else ():
        unpack(args.source, split, args.cache)
    parts = {split: MdsSamples(args.cache or args.source, split, args.keep) for split in splits}
    preprocess = mmcompile.Preprocess(resize=args.resize, crop=args.crop)
    report = mmcompile.build(parts.get("", parts), args.out, preprocess=preprocess, workers=args.workers)
    print(f"{report.samples} samples of {', '.join(report.fields)}, read by {report.workers} processes")


if __name__ == "__main__":
    from build_from_mds import main as run  # so that workers can import the class, which they cannot from a script

    run()
