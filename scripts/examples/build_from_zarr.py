"""Builds a dataset from a Zarr array, or from a group of arrays of one length: each becomes a field, read in slices by all workers.

build_from_zarr.py STORE.zarr OUT [--keep image,label] [--workers N]
"""

from __future__ import annotations

import argparse

import zarr

import mmcompile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    store = zarr.open(args.source, mode="r")
    arrays = {name: store[name] for name in args.keep} if args.keep else store
    report = mmcompile.build(arrays, args.out, workers=args.workers)
    print(f"{report.samples} samples of {', '.join(report.fields)}")


if __name__ == "__main__":
    main()
