"""Builds a dataset from the arrays of an HDF5 file: each becomes a field, read in slices.

    build_from_hdf5.py FILE.h5 OUT [--group NAME] [--keep image,label]

An open HDF5 file cannot be sent to other processes, so this one reads it all.
"""

from __future__ import annotations

import argparse

import h5py

import mmcompile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--group", default="/")
    parser.add_argument("--keep", type=lambda text: text.split(","), default=[])
    args = parser.parse_args()
    with h5py.File(args.source, "r") as file:
        group = file[args.group]
        arrays = {name: group[name] for name in (args.keep or group)}
        report = mmcompile.build(arrays, args.out)
    print(f"{report.samples} samples of {', '.join(report.fields)}")


if __name__ == "__main__":
    main()
