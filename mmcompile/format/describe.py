"""Hides how a dataset is summed up: what `info` shows on one screen, and the provenance of every row as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, MMCompileError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.catalog import Generation, kept_files, load_table, named_files, single_files
from mmcompile.format.damage import key_stops, records
from mmcompile.format.index import VERSION, Field, Index, Names, load_classes, load_groups, load_index, load_names
from mmcompile.format.leakage import Repeats, find_repeats
from mmcompile.format.mirror import Mirror, mirrored
from mmcompile.format.npy import file_name, open_array, read_into
from mmcompile.format.origins import Groups
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.rowrepeats import QUICK_BYTES, repeated_rows
from mmcompile.format.samples import FLAGS, pair_hash
from mmcompile.format.store import is_url, on_disk

__all__ = ["SAMPLE_COLUMNS", "describe", "samples_table"]

#: The columns of `samples_table`, in order.
SAMPLE_COLUMNS: tuple[str, ...] = ("row", "split", "key", "label", "class", "source_size", "source_hash", "width", "height", "mode", "format")
SAMPLE_COLUMNS += ("orientation", "flags", "row_hash")
#: Labels read at a time.
_LABELS = 1 << 20


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
    field = _label_field(loaded)
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


def samples_table(root: str | Path, generation: str | None = None) -> Iterator[dict[str, Any]]:
    """The provenance of every row, in order: a dict with the keys SAMPLE_COLUMNS.

    A key or class name that is not UTF-8 comes as by `os.fsdecode`: written with `encoding="utf-8", errors="surrogateescape"` the file holds the
    name's own bytes, and read the same way it gives the name back.  `label` and `class` are None where there are none, hashes are hex digits, `flags`
    words joined by spaces.  Rows without keys have NAME[NUMBER] there, their group and number in it, and None in all columns that tell of a source.
    Memory stays flat.  Raises FormatError, also while rows are asked for.
    """
    root = on_disk(root)
    if is_url(root):
        return _remote_samples(str(root), generation)
    root = Path(os.path.abspath(root))
    index, name = load_index(root, generation)
    loaded = load_table(root, index, name)
    classes = load_classes(root, index) or ()
    field = _label_field(loaded)
    if not index.keyed:
        return _keyless_rows(root, loaded, field, classes)
    return (row for shard in range(index.shards) for row in _shard_rows(root, loaded, shard, field, classes))


def _remote_samples(url: str, generation: str | None) -> Iterator[dict[str, Any]]:
    with Mirror(url) as mirror:
        try:
            mirror.pull()
            yield from samples_table(mirror.folder, generation)
        except MMCompileError as error:
            raise mirror.told(error) from error


def _shard_rows(root: Path, generation: Generation, shard: int, field: Field | None, classes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    length = key_stops(root, generation, shard)
    path = _path(root, generation, "keys", shard)
    start = int(generation.starts[shard])
    splits = iter(generation.index.splits)
    split = next(splits)
    fd, offset = _open(path, np.dtype("u1"), (length,))
    try:
        at = 0
        for first, piece in records(root, generation, shard):
            stops = piece["key_stop"].tolist()
            try:
                blob = np.empty(stops[-1] - at, np.uint8)
            except MemoryError:
                raise CorruptShardError(f"{path}: keys of {stops[-1] - at:,} bytes do not fit into memory", path=str(path)) from None
            read_into(fd, blob, offset + at, path)
            keys = blob.tobytes()
            labels = None if field is None else _read_labels(root, generation, shard, field, first, len(piece)).tolist()
            begin = at
            for i, record in enumerate(piece):
                row = start + first + i
                while row >= split.stop:
                    split = next(splits)
                label = None if labels is None else labels[i]
                key, begin = keys[begin - at : stops[i] - at], stops[i]
                known = label is not None and 0 <= label < len(classes)
                yield dict(
                    zip(
                        SAMPLE_COLUMNS,
                        (row, split.name, as_text(key), label, classes[label] if known and label is not None else None, *_provenance(record)),
                        strict=True,
                    )
                )
            at = stops[-1]
    finally:
        os.close(fd)


def _keyless_rows(root: Path, generation: Generation, field: Field | None, classes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    groups = Groups(generation.index, *load_groups(root, generation.index))
    splits = iter(generation.index.splits)
    split = next(splits)
    for shard in range(generation.index.shards):
        first, stop = (int(n) for n in generation.starts[shard : shard + 2])
        for begin in range(first, stop, _LABELS):
            count = min(_LABELS, stop - begin)
            labels = None if field is None else _read_labels(root, generation, shard, field, begin - first, count).tolist()
            sources = groups.told(np.arange(begin, begin + count))
            for row in range(begin, begin + count):
                while row >= split.stop:
                    split = next(splits)
                label = None if labels is None else labels[row - begin]
                name = classes[label] if label is not None and 0 <= label < len(classes) else None
                told = (row, split.name, sources[row - begin], label, name)
                yield dict(zip(SAMPLE_COLUMNS, (*told, *[None] * (len(SAMPLE_COLUMNS) - len(told))), strict=True))


def _provenance(record: Any) -> tuple[Any, ...]:
    flags = int(record["flags"])
    words = [word for bit, word in FLAGS.items() if flags & bit] + [f"bit-{b}" for b in range(32) if flags >> b & 1 and 1 << b not in FLAGS]
    return (
        int(record["source_size"]),
        pair_hash(record["source_hash"]),
        int(record["width"]),
        int(record["height"]),
        bytes(record["mode"]).decode("ascii", "backslashreplace"),
        bytes(record["format"]).decode("ascii", "backslashreplace"),
        int(record["orientation"]),
        " ".join(words),
        f"{int(record['row_hash']):016x}",
    )


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
            labels[start:stop] = _read_labels(root, generation, shard, field, 0, stop - start)
    reader = Reader(root, generation=generation.name)
    try:
        return find_repeats(hashes, index.splits, labels, reader.key)
    finally:
        reader.close()


def _label_field(generation: Generation) -> Field | None:
    return next((f for f in generation.index.fields if f.meaning == "class"), None)


def _count_labels(root: Path, generation: Generation, field: Field, classes: int) -> list[npt.NDArray[np.int64]]:
    """For each split the samples of each class, then the samples whose label is no class: (classes + 1,)."""
    counts = [np.zeros(classes + 1, np.int64) for _ in generation.index.splits]
    for shard in range(generation.index.shards):
        start, stop = (int(n) for n in generation.starts[shard : shard + 2])
        for first in range(0, stop - start, _LABELS):
            labels = _read_labels(root, generation, shard, field, first, min(_LABELS, stop - start - first))
            labels = np.where((labels >= 0) & (labels < classes), labels, classes)
            for count, split in zip(counts, generation.index.splits, strict=True):
                low, high = max(0, split.start - start - first), max(0, split.stop - start - first)
                count += np.bincount(labels[low:high], minlength=classes + 1)
    return counts


def _read_labels(root: Path, generation: Generation, shard: int, field: Field, first: int, count: int) -> npt.NDArray[np.int64]:
    path = _path(root, generation, field.name, shard)
    fd, offset = _open(path, field.stored, (int(generation.table["rows"][shard]),))
    try:
        out = np.empty(count, np.int64)
        read_into(fd, out, offset + first * 8, path)
    finally:
        os.close(fd)
    return out


def _open(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int]:
    try:
        return open_array(path, dtype, shape)
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {path.parent.parent}`, which says how to mend it", path=str(path)) from None


def _path(root: Path, generation: Generation, kind: str, shard: int) -> Path:
    return root / "shards" / file_name(kind, pair_hash(generation.table[kind][shard]))


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
