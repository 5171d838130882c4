"""Hides how the provenance of rows is stored: one structured array a shard, numpy columns and no objects, its keys in a blob beside it.

Each row tells the source it came from (key, size, xxh3-128, size in pixels, mode, format, orientation), what was done (flags), the hash of its
stored bytes, and exact sums of its pixels from which the statistics of any split are combined.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.errors import CorruptShardError
from mmcompile.format.index import Field, Index

__all__ = [
    "BLOCK_BYTES",
    "FLAGS",
    "KEY_LIMIT",
    "block_hashes",
    "block_rows",
    "check_stops",
    "combine_statistics",
    "exact_total",
    "flag_counts",
    "hash_pair",
    "key_hash",
    "keys_of",
    "pair_hash",
    "pooled_statistics",
    "row_hashes",
    "sample_dtype",
    "shard_sums",
    "summed",
    "sums_of",
]

#: What was done to a source, beyond the settings: bit -> word.  A bit never changes its meaning.
FLAGS = {
    1: "broken-exif",
    2: "icc-ignored",
    4: "more-frames",
    8: "wrong-extension",
    16: "truncated-accepted",
    32: "pillow-warning",
    64: "mask-turned",
    128: "lossy-mask",
}

#: The longest key, in bytes: sixteen times what a path may have in one system call.
KEY_LIMIT = 1 << 16
#: Rows without keys are hashed so many bytes at a time: damage is traced to a block of them, for 8 bytes a MiB.
BLOCK_BYTES = 1 << 20

Array = npt.NDArray[Any]


def sample_dtype(fields: tuple[Field, ...], sha256: bool = False) -> np.dtype[Any]:
    """The record of one row; with `sha256` (see Index) it ends with the 32 bytes of that hash of the source.

    `sum` and `sum_squares` (C,) are of the pixels after geometry, before cast and normalise, in units of the source's `depth` (8: 0-255, 16:
    0-65535, 0: as they are): uint64 where the stored dtype is unsigned (sums of integers are exact), else float64 (exact too for integer sources
    of up to 2^53).  All columns are of the first image or volume; of each further one there are `depth_NAME`, `sum_NAME` and `sum_squares_NAME`.
    """
    columns: list[Any] = [
        ("key_stop", "<u8"),
        ("source_size", "<u8"),
        ("source_hash", "<u8", (2,)),
        ("row_hash", "<u8"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("flags", "<u4"),
        ("mode", "S8"),
        ("format", "S8"),
        ("orientation", "u1"),
        ("depth", "u1"),
    ]
    for field, suffix in summed(fields):
        kind = "<u8" if field.dtype in ("uint8", "uint16") else "<f8"
        columns += [(f"depth{suffix}", "u1")] * bool(suffix)
        columns += [(f"sum{suffix}", kind, (field.channels,)), (f"sum_squares{suffix}", kind, (field.channels,))]
    columns += [("sha256", "u1", (32,))] * sha256  # bytes, as numpy strips NULs from the end of a text
    return np.dtype(columns)


def summed(fields: tuple[Field, ...]) -> list[tuple[Field, str]]:
    """The images and volumes, whose pixels are summed, each with what the names of its columns end with: nothing for the first."""
    found = [field for field in fields if field.meaning in ("image", "volume")]
    return [(field, f"_{field.name}" if i else "") for i, field in enumerate(found)]


def hash_pair(digest: str) -> tuple[int, int]:
    """A 128-bit hash as two uint64, high half first (never S16, which strips trailing NULs)."""
    return int(digest[:16], 16), int(digest[16:], 16)


def pair_hash(pair: Any) -> str:
    """The 32 hex digits of a stored pair."""
    return f"{int(pair[0]):016x}{int(pair[1]):016x}"


def keys_of(samples: Array, blob: bytes | memoryview) -> list[bytes]:
    """The keys of a shard's rows; row r's key is blob[key_stop[r - 1] : key_stop[r]]."""
    stops = samples["key_stop"].tolist()
    data = bytes(blob)
    return [data[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def check_stops(stops: npt.NDArray[np.uint64], before: np.uint64, path: Path) -> None:
    """Do the ends of keys grow from `before` on, each by at most KEY_LIMIT?  Raises CorruptShardError."""
    if len(stops) and (stops[0] < before or np.any(stops[1:] < stops[:-1]) or max(stops[0] - before, np.diff(stops).max(initial=0)) > KEY_LIMIT):
        raise CorruptShardError(
            f"{path}: damaged, as the ends of its keys do not rise by 0 to {KEY_LIMIT:,} bytes; `mmcompile verify` says how to mend it",
            path=str(path),
        )


def flag_counts(flags: npt.NDArray[Any]) -> dict[str, int]:
    """How many of these rows carry each flag, by word; words that none carries are left out."""
    counts = {word: int(np.count_nonzero(flags & np.uint32(bit))) for bit, word in FLAGS.items()}
    return {word: n for word, n in counts.items() if n}


def key_hash(key: bytes) -> int:
    """xxh3-64 of a source key, what cuts and look-ups by key go by."""
    return xxhash.xxh3_64_intdigest(key)


def row_hashes(rows: list[Array]) -> npt.NDArray[np.uint64]:
    """xxh3-64 of each row's stored bytes over all fields in field order; `rows` holds one C-contiguous (N, *shape) array a field."""
    views = [np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in rows]
    out = np.empty(len(rows[0]), np.uint64)
    for i in range(len(out)):
        state = xxhash.xxh3_64()
        for view in views:
            state.update(view[i])
        out[i] = state.intdigest()
    return out


def block_rows(fields: tuple[Field, ...]) -> int:
    """Rows of a block, of those that are hashed a block at a time: as many as BLOCK_BYTES hold over all fields, at least 1."""
    return max(1, BLOCK_BYTES // sum(field.row_bytes for field in fields))


def block_hashes(rows: list[Array], count: int) -> npt.NDArray[np.uint64]:
    """xxh3-64 of each block of `count` rows, the last may be shorter: over its stored bytes of one field, then of the next, in field order.

    `rows` holds one C-contiguous (N, *shape) array a field; its first row begins a block.  uint64 (blocks,).
    """
    views = [np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in rows]
    out = np.empty(-(-len(rows[0]) // count), np.uint64)
    for i in range(len(out)):
        state = xxhash.xxh3_64()
        for view in views:
            state.update(cast(Any, view[i * count : (i + 1) * count]))
        out[i] = state.intdigest()
    return out


def sums_of(samples: Array, fields: tuple[Field, ...]) -> dict[str, list[dict[str, Any]]]:
    """The sums of one shard by field, see `shard_sums`."""
    return {field.name: shard_sums(samples, math.prod(field.shape) // field.channels, suffix) for field, suffix in summed(fields)}


def shard_sums(samples: Array, pixels: int, suffix: str = "") -> list[dict[str, Any]]:
    """Sums of one shard, one entry for each depth in it; `pixels` are those of a row and channel, `suffix` is of the field (see `summed`).

    Exact: Python integers where the columns are integers, `math.fsum` (correctly rounded, so independent of order) where they are floats.
    """
    if f"sum{suffix}" not in (samples.dtype.names or ()):
        return []
    out, depths = [], samples[f"depth{suffix}"]
    for depth in sorted(set(depths.tolist())):
        rows = samples[depths == depth]
        entry: dict[str, Any] = {"depth": depth, "pixels": len(rows) * pixels}
        for name in ("sum", "sum_squares"):
            entry[name] = [exact_total(rows[name + suffix][:, c]) for c in range(rows[name + suffix].shape[1])]
        out.append(entry)
    return out


def combine_statistics(shards: list[list[dict[str, Any]]], scale: bool) -> dict[str, Any] | None:
    """Mean and standard deviation of a split from the sums of its shards, in row order.

    With `scale` an 8-bit pixel counts as x / 255 and a 16-bit one as x / 65535, as ToTensor's.  Rationals until the last step, so the result is the
    float nearest to the exact value.  None where there are no pixels, or where a source held NaN or infinity.
    """
    groups: dict[int, dict[str, Any]] = {}
    for entry in (e for shard in shards for e in shard):
        have = groups.setdefault(entry["depth"], {"depth": entry["depth"], "pixels": 0, "sum": [], "sum_squares": []})
        have["pixels"] += entry["pixels"]
        for name in ("sum", "sum_squares"):
            have[name].append(entry[name])
    sums = []
    for depth in sorted(groups):
        group = groups[depth]
        for name in ("sum", "sum_squares"):
            group[name] = [exact_total(channel) for channel in zip(*group[name], strict=True)]
        sums.append(group)
    total = sum(g["pixels"] for g in sums)
    if not total or any(v is None for g in sums for v in g["sum"] + g["sum_squares"]):
        return None
    mean, std = [], []
    for c in range(len(sums[0]["sum"])):
        first = sum((Fraction(g["sum"][c]) / _unit(g["depth"], scale) for g in sums), Fraction(0)) / total
        second = sum((Fraction(g["sum_squares"][c]) / _unit(g["depth"], scale) ** 2 for g in sums), Fraction(0)) / total
        mean.append(float(first))
        std.append(math.sqrt(max(0.0, float(second - first * first))))
    return {"pixels": total, "mean": mean, "std": std, "sums": sums}


def pooled_statistics(index: Index, field: str, start: int, stop: int) -> dict[str, tuple[float, ...]] | None:
    """{"mean": …, "std": …} of all pixels of the splits within rows [start, stop), of a single one exactly its own; None where one has none."""
    parts = []  # the index was checked when it was read
    for split in index.splits:
        if start <= split.start < split.stop <= stop:
            entry = index.statistics.get(split.name, {}).get(field)
            if entry is None:
                return None
            parts.append((entry["pixels"], entry["mean"], entry["std"]))
    if len(parts) <= 1:
        return {"mean": tuple(parts[0][1]), "std": tuple(parts[0][2])} if parts else None
    pixels, means, stds = (np.array(column, np.float64) for column in zip(*parts, strict=True))
    with np.errstate(all="ignore"):  # numbers of a stranger may overflow
        share = (pixels / pixels.sum())[:, None]
        mean = (share * means).sum(0)
        std = np.sqrt((share * (stds**2 + (means - mean) ** 2)).sum(0))
    return {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}


def _unit(depth: int, scale: bool) -> int:
    return {8: 255, 16: 65535}.get(depth, 1) if scale else 1


def exact_total(values: Any) -> int | float | None:
    """The exact (or correctly rounded) sum; None where a value is not finite or missing."""
    items: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if any(v is None or not math.isfinite(v) for v in items):
        return None
    if all(isinstance(v, int) for v in items):
        return int(sum(items))
    try:
        return math.fsum(items)
    except OverflowError:
        return None
