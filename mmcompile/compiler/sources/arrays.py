"""Arrays in files as a source: `.npy`, `.npz`, IDX and headerless files, whose first axis is samples; which array becomes which field.

Names decide what an array means, as nothing in such a file does: an array called image, images, img or x (or the only one) of uint8 with 3 axes, or
with 4 of which the second or the last has 1, 3 or 4 channels, holds pictures; integers of one axis called label, labels, y, target or targets are
class numbers; all else is values.  `--as NAME=image|class|value` says otherwise.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.contents import IDX_NAME, leads
from mmcompile.compiler.sources.lies import Lies, is_idx, lies_in_idx, lies_in_npy, lies_in_npz, lies_in_raw
from mmcompile.compiler.sources.names import show, unreadable
from mmcompile.compiler.sources.rows import RowScan, RowSource, fresh_stamp
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import DTYPES, UNITS, Field, Split, field_name
from mmcompile.format.store import is_url, on_disk

__all__ = ["CLASSES", "ArraySource", "Meanings", "Rows", "array_source", "as_field", "as_stored", "as_words", "count_classes", "recognised"]

#: Names that say what an array is.
_IMAGES, CLASSES = ("image", "images", "img", "x"), ("label", "labels", "y", "target", "targets")
_CHANNELS = (1, 3, 4)
#: Class numbers beyond this are no classes.
_MOST_CLASSES = 65_536
#: Splits by what stands before or behind a field's name, or begins a file's: MNIST calls its test set t10k.
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test", "t10k": "test"}
_ORDER = ("train", "val", "test")
#: Bytes of a row from which on rows are read one by one as fast as in a row, or nearly.
_LARGE_ROW = 1 << 14
#: Class numbers looked at, at a time.
_LOOK_ROWS = 1 << 20

Array = npt.NDArray[Any]
#: Numbers of rows.
Rows = range | list[int] | npt.NDArray[np.int64]
#: Field -> image, class or value, as told by `--as`.
Meanings = dict[str, str]


@dataclass(frozen=True)
class _Column:
    """An array as a field: `name` (of a record's field, where it is one), and what it means."""

    field: Field
    lies: Lies
    part: str | None = None

    @property
    def named(self) -> str:
        """Where it lies, for people."""
        return self.lies.named if self.part is None else f"{self.lies.named}, {self.part}"

    def read(self, start: int, stop: int) -> Array:
        return self._stored(self.lies.read(start, stop), range(start, stop))

    def take(self, rows: npt.NDArray[np.int64]) -> Array:
        return self._stored(self.lies.take(rows), rows)

    def _stored(self, values: Array, rows: Rows) -> Array:
        return as_stored(values if self.part is None else values[self.part], self.field, self.lies.named, rows)


def as_words(meanings: Meanings) -> list[str]:
    return [f"{name}={meaning}" for name, meaning in sorted(meanings.items())]


def as_stored(values: Array, spec: Field, named: str = "", rows: Rows | None = None) -> Array:
    """Values of a source in the dtype and shape of their field: little-endian, times as int64, class numbers as int64, (N, H, W) as (N, 1, H, W).

    `named`: where they lie, for people; `rows`: their numbers, None where the caller tells them.  Raises SourceError for a time that is none.
    """
    if values.dtype.kind == "M":
        missing = np.isnat(values)
        if missing.any():
            at = int(np.argwhere(missing)[0, 0])
            which, place = ("", {}) if rows is None else (f"row {rows[at]:,}: ", {"row": int(rows[at])})
            raise SourceError(
                f"{named + ': ' if named else ''}{which}a time that is missing (NaT) in {spec.name}: nothing marks one among stored times; leave out "
                "such rows, or fill them",
                **place,
            )
        values = values.view(values.dtype.str[0] + "i8")
    return values.astype(spec.stored, copy=False).reshape(len(values), *spec.shape)


class ArraySource:
    """The arrays of `paths`, which `form` ("npy", "npz", "idx" or "raw") says how to read; of "raw" `dtype` and `shape` (of a row) are told.

    `beside`: what else lay in their folder, by extension, for the summary.
    """

    def __init__(
        self,
        paths: Sequence[str],
        form: str,
        meanings: Meanings | None = None,
        *,
        dtype: str | None = None,
        shape: tuple[tuple[int, ...], int | None] | None = None,
        beside: Mapping[str, int] | None = None,
    ) -> None:
        self._paths, self._form, self._meanings = tuple(os.path.abspath(p) for p in paths), form, dict(meanings or {})
        self._dtype, self._shape, self._beside = dtype, shape, dict(beside or {})
        self._splits: list[tuple[str, int, dict[str, _Column]]] | None = None

    @property
    def root(self) -> str:
        """The file, or the folder that the files lie in."""
        return self._paths[0] if len(self._paths) == 1 else os.path.commonpath(self._paths)

    def identity(self) -> dict[str, object]:
        """The settings that decide which rows there are and what they hold."""
        rows, n = self._shape or ((), None)
        shape = "x".join(map(str, rows)) if n is None else ",".join(map(str, (n, *rows)))
        return {"kind": self._form, "as": as_words(self._meanings), **({"array_dtype": self._dtype, "shape": shape} if self._shape else {})}

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """Read the headers; only class numbers are looked at.  Raises SourceError, naming file, what was expected and what was found."""
        splits = self._splits = self._open()
        stops = np.cumsum([n for _, n, _ in splits]).astype(np.int64)
        fields = tuple(column.field for column in splits[0][2].values())
        if unknown := sorted(set(self._meanings) - {f.name for f in fields}):
            raise OptionError(f"--as {unknown[0]}: no such field; there are {', '.join(f.name for f in fields)}", options=["as"])
        classes = None
        for spec in fields:
            if spec.meaning == "class":
                found = [(n, columns[spec.name]) for _, n, columns in splits]
                most = max(count_classes(c.read, n, c.lies.named, f"add --as {spec.name}=value") for n, c in found)
                classes = tuple(str(i) for i in range(most))
        stamps = tuple(fresh_stamp({column.lies.path: column.lies.stat for column in columns.values()}) for _, _, columns in splits)
        named = len(splits) > 1 or bool(splits[0][0])
        starts = [0, *stops.tolist()]
        return RowScan(
            int(stops[-1]),
            fields,
            tuple("" for _ in splits),
            stops,
            stamps,
            tuple(Split(name, a, b) for (name, _, _), (a, b) in zip(splits, itertools.pairwise(starts), strict=True)) if named else (),
            classes,
            _may_be_pictures([spec for spec in fields if spec.name not in self._meanings]),
            counts={f"left out ({extension})": n for extension, n in sorted(self._beside.items())},
        )

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop) of each field by name."""
        splits = self._splits = self._splits or self._open()
        found: list[dict[str, Array]] = []
        at = 0
        for _, n, columns in splits:
            first, last = max(start - at, 0), min(stop - at, n)
            if first < last:
                found.append({name: column.read(first, last) for name, column in columns.items()})
            at += n
        return found[0] if len(found) == 1 else {name: np.concatenate([part[name] for part in found]) for name in found[0]}

    @property
    def by_index(self) -> bool:
        """Does each row lie in one piece of a file, and is it so large that a call for it costs little?"""
        splits = self._splits = self._splits or self._open()
        found = [column.lies for _, _, columns in splits for column in columns.values()]
        return all(lies.by_index for lies in found) and sum(lies.row_bytes for lies in found) >= _LARGE_ROW * len(splits)

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, Array]:
        """These rows (M,) of each field by name."""
        splits = self._splits = self._splits or self._open()
        out = {name: np.empty((len(rows), *column.field.shape), column.field.stored) for name, column in splits[0][2].items()}
        at = 0
        for _, n, columns in splits:
            here = np.flatnonzero((rows >= at) & (rows < at + n))
            for name, column in columns.items():
                if len(here):
                    out[name][here] = column.take(rows[here] - at)
            at += n
        return out

    def where(self, row: int) -> str:
        """A row as a person finds it."""
        splits = self._splits = self._splits or self._open()
        stops = list(itertools.accumulate(n for _, n, _ in splits))
        which = bisect.bisect_right(stops, row)
        names = dict.fromkeys(column.lies.named for column in splits[which][2].values())
        return f"row {row - stops[which] + splits[which][1]:,} of {' and '.join(names)}"

    # ---------------------------------------------------------------- what lies there

    def _open(self) -> list[tuple[str, int, dict[str, _Column]]]:
        """(split, rows, columns by field name) in order."""
        if self._form == "npz":
            arrays = self._in_npz()
        elif self._form == "idx":
            arrays = self._in_idx()
        else:
            arrays = {"": {"x": self._single()}}
        out = []
        for split, by_name in arrays.items():
            columns: dict[str, _Column] = {}
            for name, lies in by_name.items():
                for column in self._columns(name, lies, alone=len(by_name) == 1):
                    if column.field.name in columns:
                        other = columns[column.field.name].named
                        raise SourceError(f"{column.named} and {other}: both are the field {column.field.name}; rename one", path=lies.path)
                    columns[column.field.name] = column
            rows = {name: column.lies.shape[0] for name, column in columns.items()}
            if len(set(rows.values())) > 1:
                (a, n), (b, m) = next(p for p in itertools.pairwise(rows.items()) if p[0][1] != p[1][1])
                raise SourceError(
                    f"{columns[a].lies.named}: {n:,} rows of {a}, and {m:,} of {b} ({columns[b].lies.named}): expected one of each for every sample",
                    path=columns[a].lies.path,
                )
            out.append((split, next(iter(rows.values())), columns))
        first = [c.field for c in out[0][2].values()]
        for split, _, columns in out[1:]:
            if [c.field for c in columns.values()] != first:
                shown = [", ".join(f"{f.name} {f.dtype} {f.shape}" for f in fields) for fields in (first, [c.field for c in columns.values()])]
                raise SourceError(f"{self.root}: split {out[0][0]} has {shown[0]}, split {split} has {shown[1]}: expected the same", path=self.root)
        return out

    def _single(self) -> Lies:
        if self._form == "npy":
            return lies_in_npy(self._paths[0])
        assert self._shape is not None
        return lies_in_raw(self._paths[0], np.dtype(str(self._dtype)), *self._shape)

    def _in_npz(self) -> dict[str, dict[str, Lies]]:
        found = lies_in_npz(self._paths[0])
        if not found:
            raise SourceError(f"{show(self._paths[0])}: holds no array", path=self._paths[0])
        return _by_split(found) or {"": found}

    def _in_idx(self) -> dict[str, dict[str, Lies]]:
        out: dict[str, dict[str, Lies]] = {}
        for path in self._paths:
            match = IDX_NAME.match(os.path.basename(path))
            what = {"images": "image", "labels": "label"}[match["what"]] if match else "x"
            name = match["split"] if match else ""
            split = _SPLITS.get(name.lower(), name)
            by_name = out.setdefault(split, {})
            if what in by_name:
                raise SourceError(f"{show(path)} and {by_name[what].named}: both are the {what} of {split or 'all'}; leave one out", path=path)
            by_name[what] = lies_in_idx(path)
        ordered = {name: dict(sorted(out[name].items())) for name in sorted(out, key=_split_order)}
        for name, by_name in ordered.items():
            if "label" in by_name and "image" not in by_name:
                raise SourceError(f"{by_name['label'].named}: labels without images: expected {name}-images-idx3-ubyte beside it", path=self.root)
        return ordered if len(ordered) > 1 else {"": next(iter(ordered.values()))}

    def _columns(self, name: str, lies: Lies, alone: bool) -> list[_Column]:
        if lies.dtype.names is None:
            return [_Column(as_field(name, lies.dtype, lies.shape[1:], lies.named, self._meanings, alone), lies)]
        out = []
        for part in lies.dtype.names:
            kind = lies.dtype[part]
            dtype, shape = (kind, ()) if kind.subdtype is None else kind.subdtype
            out.append(_Column(as_field(part, dtype, (*lies.shape[1:], *shape), f"{lies.named}, {part}", self._meanings, False), lies, part))
        return out


def count_classes(read: Callable[[int, int], Array], n: int, named: str, remedy: str) -> int:
    """How many classes there are among n numbers that `read` gives ranges of.  Raises SourceError for a number that is none."""
    most = -1
    for start in range(0, n, _LOOK_ROWS):
        values = read(start, min(n, start + _LOOK_ROWS))
        bad = np.flatnonzero((values < 0) | (values >= _MOST_CLASSES))
        if len(bad):
            raise SourceError(
                f"{named}: row {start + int(bad[0]):,} is {int(values[bad[0]])}, expected class numbers from 0 to {_MOST_CLASSES - 1:,}; if they are "
                f"values, {remedy}",
                row=start + int(bad[0]),
            )
        most = max(most, int(values.max()))
    return most + 1


def _split_order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _by_split(found: dict[str, Lies]) -> dict[str, dict[str, Lies]] | None:
    """Arrays called x_train, y_train, x_test, … or train_images, … by split and field; None where not all are called so."""
    out: dict[str, dict[str, Lies]] = {}
    for name, lies in found.items():
        parts = name.split("_")
        if len(parts) < 2:
            return None
        if parts[-1].lower() in _SPLITS:
            split, rest = parts[-1], "_".join(parts[:-1])
        elif parts[0].lower() in _SPLITS:
            split, rest = parts[0], "_".join(parts[1:])
        else:
            return None
        by_name = out.setdefault(_SPLITS[split.lower()], {})
        if rest in by_name:
            raise SourceError(
                f"{lies.named} and {by_name[rest].named}: both are {rest} of split {_SPLITS[split.lower()]}; rename one", path=lies.path
            )
        by_name[rest] = lies
    return {name: out[name] for name in sorted(out, key=_split_order)}


def as_field(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], named: str, meanings: Meanings, alone: bool = False) -> Field:
    """The field that an array of this name, dtype and row shape becomes; `named` is where it lies, for people.  Raises SourceError, OptionError."""
    field = field_name(name)
    unit = None
    if dtype.kind == "M":
        unit, count = np.datetime_data(dtype)
        if unit not in UNITS or count != 1:
            raise SourceError(f"{named}: times in {dtype}: expected units of {', '.join(UNITS)}")
        dtype = np.dtype("<i8")
    stored = dtype.newbyteorder("<").str
    word = next((word for word, known in DTYPES.items() if known.str == stored and word != "bfloat16"), None)
    if word is None:
        remedy = "strings have no number: save category codes" if dtype.kind in "US" else f"expected one of {', '.join(DTYPES)}"
        raise SourceError(f"{named}: dtype {dtype}; {remedy}")
    if 0 in shape:
        raise SourceError(f"{named}: rows of shape {shape} hold nothing")
    asked = meanings.get(field)
    picture = _picture(shape)
    if asked == "image" and (picture is None or word not in ("uint8", "uint16", "int16", "int32", "float16", "float32", "float64")):
        also = "; files that are volumes each: --field image:kind=volume" if len(shape) > 2 else ""
        raise OptionError(
            f"--as {field}=image: rows of {word} {shape} are no pictures ((H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels){also}"
        )
    if asked == "class" and (shape or dtype.kind not in "iu"):
        raise OptionError(f"--as {field}=class: rows of {word} {shape} are no class numbers (one integer each)")
    if asked == "image" or (asked is None and word == "uint8" and picture is not None and (alone or field in _IMAGES)):
        assert picture is not None
        return Field(field, word, picture[0], "image", picture[1])
    if asked == "class" or (asked is None and not shape and dtype.kind in "iu" and unit is None and field in CLASSES):
        return Field(field, "int64", (), "class")
    return Field(field, word, shape, "value", unit=unit)


def _picture(shape: tuple[int, ...]) -> tuple[tuple[int, ...], str] | None:
    """(shape of a row, layout) of pictures (H, W), (H, W, C) or (C, H, W); None where it is none, or could be both of the last."""
    if len(shape) == 2:
        return (1, *shape), "chw"
    if len(shape) != 3 or (shape[0] in _CHANNELS) == (shape[2] in _CHANNELS):
        return None
    return shape, "chw" if shape[0] in _CHANNELS else "hwc"


def _may_be_pictures(fields: Sequence[Field]) -> tuple[str, ...]:
    """Warnings of values that are shaped as pictures are."""
    found = [spec for spec in fields if spec.meaning == "value" and spec.dtype == "uint8" and len(spec.shape) == 3 and _picture(spec.shape)]
    return tuple(
        f"{spec.name}: uint8 ({' x '.join(map(str, spec.shape))}) is stored as values; if it holds pictures, --as {spec.name}=image says so"
        for spec in found
    )


def recognised(raw: Sequence[str]) -> str | None:
    """What RAW is, if it is arrays: "npy", "npz", "idx" or "npy-folder"."""
    raw = [on_disk(path) for path in raw]
    if len(raw) == 1 and os.path.isdir(raw[0]):
        return next((form for form in ("idx", "npy-folder") if leads(raw[0], form)), None)
    forms = {os.path.splitext(path)[1].lower() if os.path.isfile(path) else "" for path in raw}
    if forms in ({".npy"}, {".npz"}):
        return forms.pop()[1:]
    return "idx" if all(os.path.isfile(path) and is_idx(path) for path in raw) else None


def _idx_files(folder: str, beside: Counter[str]) -> list[str]:
    """The files of a folder that are called as those of MNIST; `beside` counts its others by extension.  Raises SourceError."""
    try:
        with os.scandir(folder) as entries:
            files = {entry.name: entry.path for entry in entries if entry.is_file() and not entry.name.startswith(".")}
    except OSError as error:
        raise unreadable(folder, error) from error
    found = sorted(path for name, path in files.items() if IDX_NAME.match(name))
    if not found:
        raise SourceError(f"{show(folder)}: no file in it is called as those of MNIST are, as train-images-idx3-ubyte", path=folder)
    beside.update(os.path.splitext(name)[1].lower() or "no extension" for name in files if not IDX_NAME.match(name))
    return found


def array_source(
    form: str,
    raw: Sequence[str],
    meanings: Sequence[str] = (),
    shape: str | None = None,
    dtype: str | None = None,
    splits: tuple[tuple[str, str], ...] = (),
) -> RowSource:
    """The source of arrays of this form; `splits` are those of a folder of samples, as `parse_splits` makes them.

    `meanings` are NAME=image, NAME=class or NAME=value.  Files without a header ("raw") need `shape` and `dtype`: "28x28", the shape of a row, or
    "60000,28,28", that of all; a dtype as numpy calls it ("float32", ">i2").  Raises OptionError.
    """
    raw = [on_disk(path) for path in raw]
    for path in raw:
        if is_url(path):
            raise OptionError(f"{path}: arrays are read from a disk: bring the file to one")
    told = _meanings(meanings)
    if form == "npy-folder":
        from mmcompile.compiler.sources.npyfolder import NpyFolder

        return NpyFolder(_one(form, raw), told, splits)
    if form == "idx":
        beside: Counter[str] = Counter()
        return ArraySource(_idx_files(raw[0], beside) if len(raw) == 1 and os.path.isdir(raw[0]) else raw, form, told, beside=beside)
    if form != "raw":
        return ArraySource([_one(form, raw)], form, told)
    if shape is None or dtype is None:
        raise OptionError(
            "a file without a header needs --shape and --array-dtype, as in --shape 28x28 --array-dtype uint8", options=["shape", "array_dtype"]
        )
    try:
        found = np.dtype(dtype)
        as_field("x", found, (), "--array-dtype", {})
    except (TypeError, SourceError):
        raise OptionError(
            f"--array-dtype must be one of {', '.join(DTYPES)}, or with a byte order as in >i2; found {dtype!r}", options=["array_dtype"]
        ) from None
    return ArraySource([_one(form, raw)], form, told, dtype=found.str, shape=_parse_shape(shape))


def _one(form: str, raw: Sequence[str]) -> str:
    if len(raw) > 1:
        raise OptionError(
            f"--source {form} is one file or folder, {len(raw)} were given: rows of one field are built one by one, then merged; fields of the same "
            "rows go into one .npz"
        )
    return raw[0]


def _meanings(words: Sequence[str]) -> Meanings:
    out: Meanings = {}
    for word in words:
        name, _, meaning = word.partition("=")
        if meaning not in ("image", "class", "value") or not name:
            raise OptionError(f"--as must be NAME=image, NAME=class or NAME=value, found {word!r:.80}", options=["as"])
        out[field_name(name)] = meaning
    return out


def _parse_shape(text: str) -> tuple[tuple[int, ...], int | None]:
    """(shape of a row, number of rows or None) of "28x28" (a row) or "60000,28,28" (all rows).  Raises OptionError."""
    whole = "," in text
    try:
        sizes = tuple(int(part) for part in text.split("," if whole else "x"))
        if min(sizes) < 1 or not re.fullmatch(r"[0-9x,]+", text):
            raise ValueError(text)
    except ValueError:
        raise OptionError(f"--shape must be that of a sample, as 28x28, or of all, as 60000,28,28; found {text!r:.60}", options=["shape"]) from None
    return (sizes[1:], sizes[0]) if whole else (sizes, None)
