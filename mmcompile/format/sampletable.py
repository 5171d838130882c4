"""Hides how the provenance of every row is told as a table: which columns there are, how they are read piece by piece, and written as CSV or Parquet.

Memory stays flat.  Raises FormatError for what lies on disk, also while rows are asked for.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, MMCompileError, OptionError
from mmcompile.format.canonical import as_bytes, as_text
from mmcompile.format.catalog import Generation, load_table
from mmcompile.format.damage import key_stops, records
from mmcompile.format.index import Field, Index, load_classes, load_groups, load_index, load_names
from mmcompile.format.mirror import Mirror
from mmcompile.format.npy import file_name, open_array, read_into
from mmcompile.format.origins import Groups
from mmcompile.format.samples import FLAGS, pair_hash
from mmcompile.format.store import is_url, on_disk

__all__ = ["ROWS_AT_ONCE", "SAMPLE_COLUMNS", "label_field", "read_scalars", "samples_table", "write_samples"]

#: The columns of `samples_table` that are always there, in order.
SAMPLE_COLUMNS: tuple[str, ...] = ("row", "split", "key", "label", "class", "source_size", "source_hash", "width", "height", "mode", "format")
SAMPLE_COLUMNS += ("orientation", "flags", "row_hash", "shard", "sha256")
#: Those of them that hold numbers; what the others hold is text.
_NUMBERS = frozenset({"row", "label", "source_size", "width", "height", "orientation", "shard"})
#: Endings of what this does not write: a file that says it is something else is no CSV.
_OTHERS = (".xlsx", ".xls", ".ods", ".json", ".jsonl", ".arrow", ".feather", ".npy", ".gz", ".zip")
#: Labels read at a time.
ROWS_AT_ONCE = 1 << 20
#: Rows of a group of a Parquet file.
_GROUP = 1 << 14


def samples_table(root: str | Path, generation: str | None = None) -> Iterator[dict[str, Any]]:
    """The provenance of every row, in order: a dict with the keys SAMPLE_COLUMNS, then one for each value of no axis (`value_NAME` where its name is
    taken already), a category by its name.

    A key or class name that is not UTF-8 comes as by `os.fsdecode`: written with `encoding="utf-8", errors="surrogateescape"` the file holds the
    name's own bytes, and read the same way it gives the name back.  `label` and `class` are None where there are none, `sha256` where the dataset was
    made without; hashes are hex digits, `flags` words joined by spaces, `shard` is the row's in the shard table.  Rows without keys have NAME[NUMBER]
    there, their group and number in it, and None in all columns that tell of a source.
    """
    root = on_disk(root)
    return _remote_rows(str(root), generation) if is_url(root) else _rows(Path(os.path.abspath(root)), generation)


def write_samples(path: str | Path, root: str | Path, generation: str | None = None) -> None:
    """Write `samples_table` to a new file, Parquet where its name ends with .parquet or .pq, else CSV.

    What is there already is never replaced, and nothing half stays.  In CSV names that are no UTF-8 keep their bytes; in Parquet such bytes stand as
    \\xff.  Of a dataset behind a URL values are left out, which would have to be fetched.  Raises OptionError where the file is there or is called
    as something else, or pyarrow is not installed.
    """
    root, parquet = on_disk(root), str(path).lower().endswith((".parquet", ".pq"))
    if str(path).lower().endswith(_OTHERS):
        raise OptionError(f"--samples {path}: what is written is CSV, or Parquet: name a .csv or a .parquet", options=["samples"])
    if parquet:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise OptionError(
                f"--samples {path}: Parquet is written by pyarrow, which is not installed: pip install 'mmcompile[parquet]', or name a .csv",
                options=["samples"],
            ) from error
    values = {} if is_url(root) else _values(load_index(Path(root), generation)[0])
    names = [*SAMPLE_COLUMNS, *values]
    rows = samples_table(root, generation)
    try:
        file = open(path, "xb") if parquet else open(path, "x", encoding="utf-8", errors="surrogateescape", newline="")  # noqa: SIM115
    except FileExistsError:
        raise OptionError(f"--samples {path}: is there already; give another name, or remove it", options=["samples"]) from None
    try:
        with file:
            if not parquet:
                writer = csv.DictWriter(cast(TextIO, file), names)
                writer.writeheader()
                writer.writerows(rows)
                return
            pa = pyarrow
            kinds = {name: pa.int64() if name in _NUMBERS else pa.string() for name in SAMPLE_COLUMNS}
            kinds |= {name: pa.string() if f.categories else pa.from_numpy_dtype(f.stored) for name, f in values.items()}
            with pa.parquet.ParquetWriter(file, pa.schema(list(kinds.items()))) as target:
                while group := list(itertools.islice(rows, _GROUP)):
                    columns = {name: [_utf8(row[name]) for row in group] for name in names}
                    target.write_table(pa.table(columns, target.schema))
    except BaseException:
        os.unlink(path)
        raise


def _utf8(value: Any) -> Any:
    """A value that Parquet can hold."""
    return as_bytes(value).decode("utf-8", "backslashreplace") if isinstance(value, str) else value


def _values(index: Index) -> dict[str, Field]:
    """The fields that become columns, by the name of these."""
    fields = [f for f in index.fields if f.meaning == "value" and not f.shape and f.dtype != "bfloat16"] if index.keyed else []
    return {f"value_{f.name}" if f.name in SAMPLE_COLUMNS else f.name: f for f in fields}


def _remote_rows(url: str, generation: str | None) -> Iterator[dict[str, Any]]:
    with Mirror(url) as mirror:
        try:
            mirror.pull()
            yield from _rows(mirror.folder, generation, values=False)
        except MMCompileError as error:
            raise mirror.told(error) from error


def _rows(root: Path, generation: str | None, *, values: bool = True) -> Iterator[dict[str, Any]]:
    index, name = load_index(root, generation)
    loaded = load_table(root, index, name)
    classes = load_classes(root, index) or ()
    field = label_field(loaded)
    if not index.keyed:
        return _keyless_rows(root, loaded, field, classes)
    more = _values(index) if values else {}
    names = {column: () if f.categories is None else load_names(root, f.categories) for column, f in more.items()}
    return (row for shard in range(index.shards) for row in _shard_rows(root, loaded, shard, field, classes, more, names))


def _shard_rows(
    root: Path,
    generation: Generation,
    shard: int,
    field: Field | None,
    classes: tuple[str, ...],
    values: dict[str, Field],
    categories: dict[str, tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
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
            labels = None if field is None else read_scalars(root, generation, shard, field, first, len(piece)).tolist()
            more = [read_scalars(root, generation, shard, f, first, len(piece)).tolist() for f in values.values()]
            told = [
                [_named(categories[name], value) for value in column] if f.categories else column
                for (name, f), column in zip(values.items(), more, strict=True)
            ]
            begin = at
            for i, record in enumerate(piece):
                row = start + first + i
                while row >= split.stop:
                    split = next(splits)
                label = None if labels is None else labels[i]
                key, begin = keys[begin - at : stops[i] - at], stops[i]
                known = (row, split.name, as_text(key), label, _named(classes, label), *_provenance(record), shard, _sha256(record))
                yield dict(zip(SAMPLE_COLUMNS, known, strict=True)) | {name: column[i] for name, column in zip(values, told, strict=True)}
            at = stops[-1]
    finally:
        os.close(fd)


def _named(names: tuple[str, ...], number: int | None) -> str | None:
    """The name of a number that has one."""
    return names[number] if number is not None and 0 <= number < len(names) else None


def _keyless_rows(root: Path, generation: Generation, field: Field | None, classes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    groups = Groups(generation.index, *load_groups(root, generation.index))
    splits = iter(generation.index.splits)
    split = next(splits)
    for shard in range(generation.index.shards):
        first, stop = (int(n) for n in generation.starts[shard : shard + 2])
        for begin in range(first, stop, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, stop - begin)
            labels = None if field is None else read_scalars(root, generation, shard, field, begin - first, count).tolist()
            sources = groups.told(np.arange(begin, begin + count))
            for row in range(begin, begin + count):
                while row >= split.stop:
                    split = next(splits)
                label = None if labels is None else labels[row - begin]
                told = {"row": row, "split": split.name, "key": sources[row - begin], "label": label}
                yield dict.fromkeys(SAMPLE_COLUMNS) | told | {"class": _named(classes, label), "shard": shard}


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


def _sha256(record: Any) -> str | None:
    return record["sha256"].tobytes().hex() if "sha256" in record.dtype.names else None


def label_field(generation: Generation) -> Field | None:
    """The field of classes."""
    return next((f for f in generation.index.fields if f.meaning == "class"), None)


def read_scalars(root: Path, generation: Generation, shard: int, field: Field, first: int, count: int) -> npt.NDArray[Any]:
    """Some rows (count,) of a field of no axis."""
    path = _path(root, generation, field.name, shard)
    fd, offset = _open(path, field.stored, (int(generation.table["rows"][shard]),))
    try:
        out = np.empty(count, field.stored)
        read_into(fd, out, offset + first * field.stored.itemsize, path)
    finally:
        os.close(fd)
    return out


def _open(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int]:
    try:
        return open_array(path, dtype, shape)
    except FileNotFoundError:
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify`, which says how to mend it", path=str(path)) from None


def _path(root: Path, generation: Generation, kind: str, shard: int) -> Path:
    return root / "shards" / file_name(kind, pair_hash(generation.table[kind][shard]))
