"""Hides how a dataset is summed up in numbers: its sources from the provenance of every row, its values from some rows.

Provenance is read piece by piece, in numpy; memory stays flat but for one number for each size that occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.catalog import Generation
from mmcompile.format.damage import records
from mmcompile.format.index import Field
from mmcompile.format.samples import flag_counts
from mmcompile.report.opened import Opened
from mmcompile.report.show import as_floats

__all__ = ["Histogram", "Sources", "channel_names", "histograms", "of_split", "read_sources", "with_labels"]

Array = npt.NDArray[Any]

#: Bars of a histogram, at most: what is still a shape at the width of a phone, and four levels of a byte each.
BINS = 64
#: Sizes of sources that are remembered before equal ones are put together.
_PENDING = 1 << 20
#: Integers that span so few are counted number by number.
_COUNTED = 1 << 20
#: A histogram ends at these percents of the values where all of them span so many times as much.
_PERCENT, _FAR = 0.2, 8
#: Labels without names that are told one by one: more are hardly classes.
_MOST_LABELS = 5000
#: Channels, or numbers of a row, that have a histogram of their own, and values of each that are counted.
MOST_CHANNELS, _MOST_VALUES = 24, 1 << 20


@dataclass
class Sources:
    """What the files behind the samples were: counts by format, mode and what was done (`flags`), how many were `turned` by EXIF.

    `sizes` (S, 2) are the (width, height) that occur, as stored, `counts` (S,) how often; both most frequent first.
    """

    samples: int = 0
    bytes: int = 0
    smallest: int = 0
    largest: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    turned: int = 0
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class Histogram:
    """Of one channel, or one number of a row: `counts` of up to BINS equal parts between `low` and `high`, of `values` finite ones.

    `strange` are NaN or infinite.  `least` and `most` may lie far beyond `low` and `high`, where a few values would leave all others in one bar: the
    outermost bars hold them.
    """

    name: str
    low: float
    high: float
    least: float
    most: float
    counts: tuple[int, ...]
    values: int
    strange: int
    mean: float
    std: float


def read_sources(data: Opened) -> Sources | None:
    """The provenance of the rows of a split in numbers; None for rows without sources of their own, and for none."""
    if not data.index.keyed or not len(data):
        return None
    generation = Generation(data.reader.generation, data.index, data.reader.table, data.reader.starts)
    out, pending, waiting = Sources(), [], 0
    smallest = []
    for shard in range(data.index.shards):
        begin = int(data.reader.starts[shard])
        if begin >= data.split.stop or int(data.reader.starts[shard + 1]) <= data.split.start:
            continue
        for first, piece in records(Path(data.root), generation, shard):
            part = piece[max(0, data.split.start - begin - first) : max(0, data.split.stop - begin - first)]
            if not len(part):
                continue
            out.samples += len(part)
            out.bytes += int(part["source_size"].sum())
            out.largest = max(out.largest, int(part["source_size"].max()))
            smallest.append(int(part["source_size"].min()))
            out.turned += int(np.count_nonzero(part["orientation"] > 1))
            out.flags.update(flag_counts(part["flags"]))
            for name, into in (("format", out.formats), ("mode", out.modes)):
                words, counts = np.unique(part[name], return_counts=True)
                into.update({w.decode("ascii", "backslashreplace"): n for w, n in zip(words.tolist(), counts.tolist(), strict=True)})
            pending.append(np.unique(part["width"].astype(np.uint64) << np.uint64(32) | part["height"], return_counts=True))
            waiting += len(pending[-1][0])
            if waiting > _PENDING:
                pending = [_together(pending)]
                waiting = len(pending[0][0]) // 2
    out.smallest = min(smallest, default=0)
    sizes, counts = _together(pending)
    order = np.argsort(-counts, kind="stable")
    pairs = np.stack([sizes >> np.uint64(32), sizes & np.uint64(0xFFFFFFFF)], 1).astype(np.int64)
    out.sizes, out.counts = pairs[order], counts[order]
    return out


def _together(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Equal numbers of several lists put together: (numbers, how often)."""
    if not parts:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    numbers, where = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    counts = np.zeros(len(numbers), np.int64)
    np.add.at(counts, where.reshape(-1), np.concatenate([part[1] for part in parts]))
    return numbers, counts


def with_labels(info: dict[str, Any], data: Opened) -> dict[str, Any]:
    """The JSON values of `info`; where labels are numbers without names, these and how often each occurs stand there as classes do."""
    if data.label is None or info["classes"] is not None:
        return info
    counted: list[Counter[int]] = []
    for split in data.index.splits:
        counted.append(Counter())
        for _, labels in data.labels(split):
            numbers, counts = np.unique(labels, return_counts=True)
            counted[-1].update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    numbered = sorted(set().union(*counted))
    if not 0 < len(numbered) <= _MOST_LABELS:
        return info
    classes = [{"name": data.class_name(n), "count": sum(c[n] for c in counted)} for n in numbered]
    splits = [told | {"classes": [c[n] for n in numbered]} for told, c in zip(info["splits"], counted, strict=True)]
    return info | {"classes": classes, "splits": splits, "unknown_labels": 0}


def of_split(info: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The JSON values of `info` with samples, classes and statistics of that split alone; all as it is where no split has that name.

    What is known of the dataset as a whole alone stays so: rejects, repeats, files.
    """
    split = next((s for s in info["splits"] if s["name"] == name), None)
    if split is None or len(info["splits"]) == 1:
        return info
    samples, classes = split["stop"] - split["start"], info["classes"]
    if classes is not None and split["classes"] is not None:
        classes = [told | {"count": count} for told, count in zip(classes, split["classes"], strict=True)]
    return info | {
        "samples": samples,
        "splits": [split],
        "classes": classes,
        "unknown_labels": 0 if split["classes"] is None else samples - sum(split["classes"]),
        "statistics": {name: info["statistics"].get(name, {})},
    }


def channel_names(meaning: str, count: int, columns: Sequence[str] | None = None) -> list[str]:
    """What the channels of a picture, or the numbers of a row, are called: by their names, colours, or numbers; a single one by nothing."""
    if columns is not None:
        return list(columns)
    if count == 1:
        return [""]
    return ["red", "green", "blue", "alpha"][:count] if meaning == "image" and count in (3, 4) else [str(i) for i in range(count)]


def histograms(spec: Field, rows: Array) -> list[Histogram]:
    """A histogram for each channel of an image or volume, for each number of a value of one axis, else one; of rows (N, *shape) as stored."""
    shape = rows.shape[1:]
    if spec.meaning == "image":
        axis = len(shape) - (1 if spec.layout == "hwc" else 3)
    elif spec.meaning == "volume" and len(shape) - (spec.views is not None) == 4:
        axis = len(shape) - 4
    elif spec.meaning == "value" and len(shape) == 1 and spec.count is None and spec.views is None:
        axis = 0
    else:
        return [_histogram("", as_floats(_thinned(rows), spec))]
    parts = np.moveaxis(rows, axis + 1, 0)
    names = channel_names(spec.meaning, len(parts), None if spec.columns is None else spec.columns.listed)
    return [_histogram(name, as_floats(_thinned(part), spec)) for name, part in list(zip(names, parts, strict=True))[:MOST_CHANNELS]]


def _thinned(values: Array) -> Array:
    """Every k-th of the values, (N,), so that they are at most about _MOST_VALUES; an odd k, so that no column of a picture is left out."""
    return values.reshape(-1)[:: -(-values.size // _MOST_VALUES) | 1]


def _histogram(name: str, values: Array) -> Histogram:
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    strange = len(numbers) - len(finite)
    if not len(finite):
        return Histogram(name, 0.0, 0.0, 0.0, 0.0, (0,) * BINS, 0, strange, 0.0, 0.0)
    least, most = low, high = float(finite.min()), float(finite.max())
    with np.errstate(all="ignore"):  # the span of a stranger's numbers may overflow
        inner = np.percentile(finite, (_PERCENT, 100 - _PERCENT)).tolist()
        if inner[1] > inner[0] and high - low > _FAR * (inner[1] - inner[0]):
            low, high = inner
        bins, place = 1, np.zeros(len(finite))
        if high > low:
            bins, place = BINS, (finite - low) / (high - low) * BINS
        if values.dtype.kind in "biu" and high - low < _COUNTED:  # as many numbers in each part
            step = -(-int(high - low + 1) // BINS)
            bins, place = int(high - low) // step + 1, (finite - low) // step
        mean, std = float(finite.mean()), float(finite.std())
    counts = np.bincount(np.nan_to_num(place).astype(np.int64).clip(0, bins - 1), minlength=bins)
    return Histogram(name, low, high, least, most, tuple(counts.tolist()), len(finite), strange, mean, std)
