"""Hides how a dataset is summed up: what `info` shows on one screen."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.canonical import name_to_json
from mmcompile.format.catalog import Generation, kept_files, load_table, named_files, single_files
from mmcompile.format.damage import records
from mmcompile.format.index import VERSION, Field, Index, Names, load_classes, load_groups, load_index, load_names
from mmcompile.format.leakage import Repeats, find_repeats
from mmcompile.format.mirror import mirrored
from mmcompile.format.npy import file_name
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.rowrepeats import QUICK_BYTES, repeated_rows
from mmcompile.format.sampletable import ROWS_AT_ONCE, label_field, read_scalars
from mmcompile.format.store import is_url, on_disk

__all__ = ["describe"]


def describe(root: str | Path, generation: str | None = None) -> dict[str, Any]:
    """What a generation (by default the current one) holds, as plain JSON values; names that are not UTF-8 are {"bytes": percent-encoded}.

    Reads (of a URL: fetches) the index, the table, names, groups, labels and rejects, no other rows.  `bytes.folder` is the size of everything in the
    folder, older generations and unfinished builds included; `missing` counts the files of shards that are not there.  `generations` are newest
    first, `modified` in seconds since 1970.  `repeats` says which samples have the same source, from their provenance, or where they have no keys,
    which rows hold the same, up to 1 GiB of rows, which are read for that; None behind a URL, from where that would have to be fetched, and where
    files are missing.  Raises FormatError.
    """
    root = on_disk(root)
    if is_url(root):
        url = str(root)
        return mirrored(url, lambda mirror: _describe(mirror.folder, generation), ("samples", "keys", "hashes")) | {"root": url}
    return _describe(Path(os.path.abspath(root)), generation, repeats=True)


def _describe(root: Path, generation: str | None, *, repeats: bool = False) -> dict[str, Any]:
    index, name = load_index(root, generation)
    current = name if generation is None else load_index(root)[1]
    loaded = load_table(root, index, name)
    classes = load_classes(root, index)
    rejects = load_rejects(root, index)
    field = label_field(loaded)
    counts = _count_labels(root, loaded, field, len(classes or ())) if field is not None else None
    dataset, total, missing = _sizes(root, loaded)
    ages = kept_files(root)[0]
    found = None
    if repeats and not missing:
        found = _repeats(root, loaded, field) if index.keyed else repeated_rows(root, loaded, QUICK_BYTES)
    newest = sorted(ages, key=lambda n: (n != current, -ages[n], n))
    return {
        "command": "info",
        "root": name_to_json(str(root)),
        "generation": name,
        "format_version": VERSION,
        "samples": index.samples,
        "shards": index.shards,
        "fields": [_whole(root, f).to_json() | {"row_bytes": f.row_bytes, "bytes": f.row_bytes * index.samples} for f in index.fields],
        "keys": index.keyed,
        "groups": _groups(root, index),
        "splits": [
            {"name": s.name, "start": s.start, "stop": s.stop, "classes": None if counts is None else counts[i][:-1].tolist()}
            for i, s in enumerate(index.splits)
        ],
        "classes": None
        if classes is None
        else [{"name": name_to_json(c), "count": None if counts is None else int(sum(n[i] for n in counts))} for i, c in enumerate(classes)],
        "unknown_labels": 0 if counts is None else int(sum(n[-1] for n in counts)),
        "bytes": {"dataset": dataset, "folder": total},
        "missing": missing,
        "settings": index.settings,
        "versions": index.versions,
        "pixel_revision": index.pixel_revision,
        "statistics": index.statistics,
        "rejects": {
            "count": index.rejects,
            "file": None if index.rejects_file is None else f"shards/{file_name('rejects', index.rejects_file, '.jsonl')}",
            "reasons": dict(sorted(Counter(r.code for r in rejects).items())),
        },
        "repeats": None if found is None else found.to_json(),
        "generations": [{"name": n, "modified": ages[n], "current": n == current} for n in newest],
    }


def _whole(root: Path, field: Field) -> Field:
    """A field with its lists of names, wherever they lie."""
    columns = field.columns and Names(load_names(root, field.columns, field.shape[0]))
    return replace(field, columns=columns, categories=field.categories and Names(load_names(root, field.categories)))


def _groups(root: Path, index: Index) -> dict[str, int] | None:
    """How many groups there are, and the rows of the shortest and the longest."""
    if index.groups_file is None:
        return None
    rows = np.diff(load_groups(root, index)[1])
    return {"count": len(rows), "shortest": int(rows.min()), "longest": int(rows.max())}


def _repeats(root: Path, generation: Generation, field: Field | None) -> Repeats:
    """Samples with the same source, by the hashes in their provenance."""
    index = generation.index
    hashes = np.empty((index.samples, 2), np.uint64)
    labels = None if field is None else np.empty(index.samples, np.int64)
    for shard in range(index.shards):
        start, stop = (int(n) for n in generation.starts[shard : shard + 2])
        for first, piece in records(root, generation, shard):
            hashes[start + first : start + first + len(piece)] = piece["source_hash"]
        if field is not None and labels is not None:
            labels[start:stop] = read_scalars(root, generation, shard, field, 0, stop - start)
    reader = Reader(root, generation=generation.name)
    try:
        return find_repeats(hashes, index.splits, labels, reader.key)
    finally:
        reader.close()


def _count_labels(root: Path, generation: Generation, field: Field, classes: int) -> list[npt.NDArray[np.int64]]:
    """For each split the samples of each class, then the samples whose label is no class: (classes + 1,)."""
    counts = [np.zeros(classes + 1, np.int64) for _ in generation.index.splits]
    for shard in range(generation.index.shards):
        start, stop = (int(n) for n in generation.starts[shard : shard + 2])
        for first in range(0, stop - start, ROWS_AT_ONCE):
            labels = read_scalars(root, generation, shard, field, first, min(ROWS_AT_ONCE, stop - start - first))
            labels = np.where((labels >= 0) & (labels < classes), labels, classes)
            for count, split in zip(counts, generation.index.splits, strict=True):
                low, high = max(0, split.start - start - first), max(0, split.stop - start - first)
                count += np.bincount(labels[low:high], minlength=classes + 1)
    return counts


def _sizes(root: Path, generation: Generation) -> tuple[int, int, int]:
    """(bytes of the files of a generation, each once; of everything in the folder; files of its shards that are missing), by one walk."""
    left = {file for _, file in single_files(generation.index)} | {file for _, _, file in named_files(generation)}
    shards, generations = str(root / "shards"), str(root / "generations")
    ours = {(str(root), "index.json"), (generations, f"{generation.name}.json")}
    dataset = total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                size = os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # gone meanwhile: a build or prune is at work
                continue
            total += size
            if (folder == shards and name in left) or (folder, name) in ours:
                dataset += size
                left.discard(name)
    return dataset, total, len(left)
