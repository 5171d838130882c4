"""Hides what the formats look like that are read in Python only, so that whoever gives one to the command hears of the way."""

from __future__ import annotations

import os
from pathlib import Path

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.compiler.sources.names import show

__all__ = ["told_of_foreign"]

#: How a file begins -> what it is, and whose recipe reads it.
_BEGINS = {b"\x89HDF\r\n\x1a\n": ("an HDF5 file", "hdf5")}
#: How a file is called -> the same.
_SUFFIXES = {
    ".h5": ("an HDF5 file", "hdf5"),
    ".hdf5": ("an HDF5 file", "hdf5"),
    ".zarr": ("a Zarr array", "zarr"),
    ".beton": ("a file of FFCV", "ffcv"),
}
_SUFFIXES |= {".mdb": ("an LMDB", "lmdb"), ".lmdb": ("an LMDB", "lmdb"), ".mds": ("a shard of MDS", "mds")}
#: What lies in a folder -> the same.
_INSIDE = {"zarr.json": ("a Zarr array", "zarr"), ".zarray": ("a Zarr array", "zarr"), ".zgroup": ("a Zarr group", "zarr")}
_INSIDE |= {"data.mdb": ("an LMDB", "lmdb"), "dataset_dict.json": ("saved by Hugging Face's datasets", "huggingface")}


def told_of_foreign(place: str) -> str | None:
    """What to say of a path that no source of the command reads; None where there is nothing to say.  Looks at few bytes."""
    found = None
    try:
        if os.path.isdir(place):
            with os.scandir(place) as entries:
                names = {entry.name for entry in entries}
            found = next((_INSIDE[name] for name in _INSIDE if name in names), None)
            if "state.json" in names and any(name.endswith(".arrow") for name in names):
                found = _INSIDE["dataset_dict.json"]
            if "index.json" in names and any(name.endswith((".mds", ".mds.zstd")) for name in names):
                found = "a folder of MDS", "mds"
        elif os.path.isfile(place):
            with Path(place).open("rb") as file:
                head = file.read(8)
            suffix = os.path.splitext(place)[1].lower()
            found = next((told for begin, told in _BEGINS.items() if head.startswith(begin)), _SUFFIXES.get(suffix))
            if found is None:
                if suffix in EXTENSIONS:
                    return f"{show(place)} is one image: give the folder that it lies in, or a list of images"
                return f"{show(place)} is no folder, list, table, array or archive; in Python mmcompile.build(dataset, out) takes what you load it as"
        else:
            return None
    except OSError:  # whoever reads it says what is wrong
        return None
    if found is None:
        return None
    what, recipe = found
    return (
        f"{show(place)} is {what}: open it in Python and call mmcompile.build(dataset, out), as scripts/examples/build_from_{recipe}.py of the "
        "repository does"
    )
