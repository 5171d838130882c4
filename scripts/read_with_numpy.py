"""Reads the first batch of a dataset with numpy and the standard library alone, as FORMAT.md describes it: nothing of this package is needed.

What lies beside the fields is not needed for that: samples and keys, or, where rows have none of their own (arrays, tables), hashes and groups.

usage: python read_with_numpy.py OUT [ROWS]
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np


def file_of(out, kind, pair):
    """A shard's file: its name is its hash, which the table holds as two 64-bit halves."""
    return out / "shards" / f"{kind}-{int(pair[0]):016x}{int(pair[1]):016x}.npy"


def first_rows(out, table, field, count):
    """The first rows of a field over as many shards as it takes."""
    parts, have = [], 0
    for shard in table:
        if have >= count:
            break
        rows = np.load(file_of(out, field["name"], shard[field["name"]]), mmap_mode="r")
        assert len(rows) == shard["rows"]
        parts.append(np.array(rows[: count - have]))
        have += len(parts[-1])
    if not parts:
        stored = "<u2" if field["dtype"] == "bfloat16" else field["dtype"]
        return np.zeros((0, *field["shape"]), stored)
    return np.concatenate(parts)


def numbers(rows, field):
    """Stored rows as training sees them: images (N, C, H, W), values (N, *shape), normalised where the index says so."""
    if field["dtype"] == "bfloat16":  # numpy has no such type: the upper half of a float32
        rows = (rows.astype("<u4") << 16).view("<f4")
    if field["layout"] == "hwc":
        rows = rows.transpose(0, 3, 1, 2)
    if field["normalize"] is not None:
        work = np.float64 if field["dtype"] == "float64" else np.float32
        axes = (-1, 1, 1) if field["meaning"] == "image" else (-1,)
        mean, std = (np.array(field["normalize"][key], work).reshape(axes) for key in ("mean", "std"))
        rows = (rows.astype(work) / work(field["scale"]) - mean) / std
    return rows


def main():
    out = Path(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    index = json.loads((out / "index.json").read_bytes())
    assert index["format"] == "mmcompile"
    assert index["version"] == 1
    table = np.load(out / "shards" / f"table-{index['table']}.npy")
    for field in index["fields"]:
        batch = numbers(first_rows(out, table, field, count), field)
        if field["meaning"] == "class":
            print(f"{field['name']} {batch.dtype} {batch.shape} {batch.tolist()}")
        else:
            print(f"{field['name']} {batch.dtype} {batch.shape} crc32 {zlib.crc32(np.ascontiguousarray(batch).tobytes()):08x}")


if __name__ == "__main__":
    main()
