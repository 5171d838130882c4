"""Writes the golden datasets of format version 1 into a folder: `python scripts/make_golden.py tests/golden/v1`.

They are made from arithmetic, never from image files, so the same bytes come out wherever this runs; a test compares them.  Every later version of
the package reads the copies in tests/golden/v1, and this script stays able to write them.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.format.index import Field, Index, Split, publish
from mmcompile.format.npy import hash_bytes, save_array, save_blob
from mmcompile.format.rejects import Reject
from mmcompile.format.samples import combine_statistics, hash_pair, row_hashes, sample_dtype, shard_sums

PIXELS = 4 * 5
LABELLED = (
    Field("image", "uint8", (3, 4, 5), "image", "chw", 255.0, ((0.5, 0.25, 0.125), (0.5, 0.5, 2.0))),
    Field("label", "int64", (), "class"),
)
BFLOAT16 = (Field("image", "bfloat16", (4, 5, 2), "image", "hwc", 1.0, None),)
#: The second class and two keys are Latin-1, not UTF-8.
CLASSES = ("cat", "d\udcf6g")
KEYS = [b"cat/a.png", b"cat/b.jpg", b"d\xf6g/1.png", b"d\xf6g/2.png", b"d\xf6g/\xff.png"]
LABELS = [0, 0, 1, 1, 1]
REJECTS = (
    Reject("cat/broken.png", 12, hash_bytes(b"broken image"), "decode", "truncated", "OSError", "the file ends before its last row"),
    Reject("d\udcf6g/big.png", 7, hash_bytes(b"too big"), "geometry", "too-large", None, "10 x 200,000,000 pixels, the limit is 178,956,970"),
)


def images(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows [start, stop) of the labelled golden dataset: (N, 3, 4, 5) uint8."""
    at = np.arange(start * 3 * PIXELS, stop * 3 * PIXELS, dtype=np.int64)
    return (at * 7 % 251).astype(np.uint8).reshape(-1, 3, 4, 5)


def floats() -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows of the bfloat16 golden dataset: (N, 4, 5, 2) float32, each of them a bfloat16 number."""
    return (np.arange(3 * PIXELS * 2, dtype=np.float32).reshape(3, 4, 5, 2) - 60) / 4


def provenance(fields: tuple[Field, ...], rows: dict[str, Any], first: int, keys: list[bytes]) -> Any:
    """The samples records of one shard."""
    out = np.zeros(len(keys), sample_dtype(fields))
    out["key_stop"] = np.cumsum([len(key) for key in keys])
    out["row_hash"] = row_hashes(list(rows.values()))
    for i in range(len(keys)):
        source = b"source %d" % (first + i)
        out[i]["source_size"], out[i]["source_hash"] = len(source), hash_pair(hash_bytes(source))
        out[i]["width"], out[i]["height"] = 50 + first + i, 40
    out["flags"] = [1 << i for i in range(len(keys))]
    out["mode"], out["format"], out["orientation"] = b"RGB", b"PNG", 1
    if fields[0].dtype == "bfloat16":
        values = (rows["image"].astype("<u4") << 16).view("<f4").astype("<f8")
        out["sum"], out["sum_squares"], out["depth"] = values.sum((1, 2)), (values**2).sum((1, 2)), 0
    else:
        values = rows["image"].astype("<u8")
        out["sum"], out["sum_squares"], out["depth"] = values.sum((2, 3)), (values**2).sum((2, 3)), 8
    return out


def shard(folder: Path, fields: tuple[Field, ...], rows: dict[str, Any], first: int, keys: list[bytes]) -> tuple[Any, list[dict[str, Any]]]:
    """Write the files of one shard; returns its record of the table and its sums."""
    samples = provenance(fields, rows, first, keys)
    files = {**rows, "samples": samples, "keys": np.frombuffer(b"".join(keys), np.uint8)}
    pairs = [hash_pair(save_array(folder, kind, array, folder)) for kind, array in files.items()]
    return (len(keys), *pairs), shard_sums(samples, PIXELS)


def save(root: Path, index: Index, records: list[Any]) -> str:
    """Write the shard table and publish."""
    shards = root / "shards"
    table = np.array(records, index.table_dtype())
    return publish(root, dataclasses.replace(index, table=save_array(shards, "table", table, shards)))


def make_labelled(root: Path) -> tuple[str, str]:
    """chw uint8 images that are normalised when read, labels, rejects, two splits; two generations, whose names are returned."""
    shards = root / "shards"
    shards.mkdir(parents=True)
    parts = []
    for start, stop in ((0, 3), (3, 5)):
        rows = {"image": images(start, stop), "label": np.array(LABELS[start:stop], "<i8")}
        parts.append(shard(shards, LABELLED, rows, start, KEYS[start:stop]))
    (first, first_sums), (second, second_sums) = parts
    old = Index(
        LABELLED,
        (Split("all", 0, 3),),
        3,
        1,
        "0" * 32,
        classes=CLASSES,
        settings={"golden": 1},
        versions={"numpy": "2"},
        statistics={"all": {"image": combine_statistics([first_sums], True)}},
    )
    older = save(root, old, [first])
    lines = b"".join(reject.to_line() for reject in REJECTS)
    new = dataclasses.replace(
        old,
        splits=(Split("train", 0, 3), Split("val", 3, 5)),
        samples=5,
        shards=2,
        statistics={"train": {"image": combine_statistics([first_sums], True)}, "val": {"image": combine_statistics([second_sums], True)}},
        rejects=len(REJECTS),
        rejects_file=save_blob(shards, "rejects", [lines], shards, ".jsonl"),
    )
    return older, save(root, new, [first, second])


def make_bfloat16(root: Path) -> str:
    """hwc bfloat16 images without labels, one shard; returns the generation."""
    shards = root / "shards"
    shards.mkdir(parents=True)
    rows = {"image": (floats().view("<u4") >> 16).astype("<u2")}
    record, sums = shard(shards, BFLOAT16, rows, 0, [b"1.png", b"sub/2.png", b"sub/3.png"])
    index = Index(BFLOAT16, (Split("all", 0, 3),), 3, 1, "0" * 32, settings={}, statistics={"all": {"image": combine_statistics([sums], True)}})
    return save(root, index, [record])


def main(folder: Path) -> None:
    make_labelled(folder / "labelled")
    make_bfloat16(folder / "bfloat16")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
