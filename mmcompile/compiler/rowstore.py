"""Hides how the rows of arrays and tables become stored ones: which dtype each field gets, its normalisation, and what a cast loses.

Nothing is lost without a word: digits that a cast drops, numbers that become infinite and missing ones are counted for each field or column; what an
integer dtype cannot hold at all is an error that names field, row and value.  Images are cast as those of files are (`cast`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.cast import bfloat16, channel_sums, store
from mmcompile.compiler.normalize import IMAGENET_UNIT
from mmcompile.compiler.preprocess import IMAGENET, Normalize, Preprocess
from mmcompile.compiler.sizes import clash
from mmcompile.errors import DecodeError, OptionError, SourceError, spelled
from mmcompile.format.index import DTYPES, Field
from mmcompile.format.samples import exact_total

__all__ = ["RowPreprocess", "StoredField", "all_finite", "merge_sums", "stored_fields", "wide"]

Array = npt.NDArray[Any]

_DEPTHS = {"uint8": 8, "uint16": 16}
#: Binary digits that a float holds, and which floats are the same in it.
_DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_WITHIN = {"float16": ("float16",), "bfloat16": ("bfloat16",), "float32": ("float16", "bfloat16", "float32"), "float64": tuple(_DIGITS)}
#: What an image may be stored as: those that a Preprocess knows.
_FLOATS = tuple(_DIGITS)
_IMAGE_DTYPES = ("uint8", "uint16", "int16", "int32", *_FLOATS)
#: Numbers summed at a time, as float64: 2 MiB, which a core's cache holds.
_CHUNK = 1 << 18
#: Numbers of an index end at 1e300: a sum of a shard beyond this is none.
_MOST_SUM = 1e280
#: Rows are folded to at least so many numbers before they are added: one call of numpy is dear.
_FOLD = 512


@spelled
@dataclass(frozen=True, kw_only=True)
class RowPreprocess:
    """What is done to the images among rows, or where there are none to all values that are no times, categories or classes; None keeps them.

    `normalize`: "auto", a Normalize, or "imagenet" for images.  `scale` "unit": an image's floats go from 0 to 1.  `fields`: what is done to
    single fields instead, by name.
    """

    dtype: str | None = None
    normalize: str | Normalize | None = None
    scale: str = "unit"
    fields: tuple[tuple[str, RowPreprocess], ...] = ()

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}", options=["dtype"])
        if isinstance(self.normalize, str) and self.normalize not in ("imagenet", "auto"):
            raise OptionError(f"--normalize must be imagenet or auto, or give --mean and --std; found {self.normalize!r}", options=["normalize"])
        if self.scale not in ("unit", "none"):
            raise OptionError(f"--scale must be unit or none, found {self.scale!r}", options=["scale"])
        if self.normalize == "imagenet" and self.scale == "none":
            clash("normalize", "scale", IMAGENET_UNIT)

    @classmethod
    def of(cls, asked: Preprocess | RowPreprocess | None) -> RowPreprocess:
        """What a Preprocess says of rows (its dtype where that is not its default); OptionError where it asks for what only pictures have."""
        if asked is None or isinstance(asked, RowPreprocess):
            return asked or cls()
        default = Preprocess()
        names = [name for name in default.__dataclass_fields__ if getattr(asked, name) != getattr(default, name)]
        if strange := [name for name in names if name not in ("dtype", "normalize", "scale")]:
            shown = ", ".join("--" + name.replace("_", "-") for name in strange)
            raise OptionError(f"{shown}: for pictures, and this source has arrays, which are taken as they are: leave it out", options=strange)
        return cls(dtype=asked.dtype if "dtype" in names else None, normalize=asked.normalize, scale=asked.scale)

    @classmethod
    def of_pictures(cls, asked: Preprocess) -> RowPreprocess:
        """What is done to the pictures of samples, once these have their size; `asked` knows the fields."""
        own = tuple((name, cls.of_pictures(asked.of(name))) for name in asked.parts)
        dtype = None if asked.dtype == Preprocess().dtype else asked.dtype
        return cls(dtype=dtype, normalize=asked.normalize, scale=asked.scale, fields=own)

    def settings(self) -> dict[str, Any]:
        """Every option as values of canonical JSON."""
        normalize: Any = self.normalize
        if isinstance(normalize, Normalize):
            normalize = {"mean": list(normalize.mean), "std": list(normalize.std)}
        own = {"fields": {name: fields.settings() for name, fields in self.fields}} if self.fields else {}
        return {"dtype": self.dtype, "normalize": normalize, "scale": self.scale, **own}


@dataclass(frozen=True)
class StoredField:
    """A field of a source, as it is `stored`; `baked` is the normalisation of its stored values, `image` how an image's are made.

    `auto`: its own statistics become its normalisation.
    """

    source: Field
    stored: Field
    baked: Normalize | None = None
    image: Preprocess | None = None
    auto: bool = False

    def make(self, values: Array, number: Callable[[int], int], counts: Counter[str], *, finite: bool = False) -> Array:
        """The stored rows (N, *shape) of the source's rows (N, *shape); `number` tells that of the i-th; losses are added to `counts`.

        `finite`: all values are known to be finite numbers.  Raises SourceError, with its `row`, for a value that the dtype cannot hold at all.
        """
        if self.image is not None:
            return self._pictures(values, number)
        if self.source.dtype in _FLOATS and not finite:
            self._count(np.isnan(wide(values, self.source.dtype)), "values not a number", counts)
        if self.stored.dtype == self.source.dtype and self.baked is None:
            return values
        if self.stored.dtype in _FLOATS:
            return self._floats(wide(values, self.source.dtype), counts)
        return self._integers(wide(values, self.source.dtype), number, counts)

    def _pictures(self, values: Array, number: Callable[[int], int]) -> Array:
        assert self.image is not None
        if self.stored.dtype == self.source.dtype and self.baked is None:
            return values
        out: Array = np.empty(values.shape, self.stored.stored)
        depth = _DEPTHS.get(self.source.dtype, 0)
        for i, row in enumerate(values):
            try:
                store(row.transpose(1, 2, 0) if self.source.layout == "chw" else row, self.image, depth, out[i])
            except DecodeError as error:
                raise SourceError(f"{self.source.name}: {error}", row=number(i), field=self.source.name) from error
        return out

    def _floats(self, values: Array, counts: Counter[str]) -> Array:
        kind = np.dtype("float64" if self.stored.dtype == "float64" else "float32").type
        with np.errstate(over="ignore"):
            made = values.astype(kind)
            if self.baked is not None:
                made = (made - np.asarray(self.baked.mean, kind)) / np.asarray(self.baked.std, kind)
            finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
            if self.stored.dtype == "bfloat16":
                out: Array = bfloat16(np.ascontiguousarray(made))
                out[np.isnan(made)] = 0x7FC0  # rounding would carry some of them over
                made = wide(out, "bfloat16")
            else:
                out = made = made.astype(self.stored.stored)
        infinite = finite & ~np.isfinite(made)
        self._count(infinite, f"values infinite as {self.stored.dtype}", counts)
        if self.baked is None and not _holds(self.source.dtype, self.stored.dtype):
            with np.errstate(invalid="ignore", over="ignore"):
                self._count((made.astype(values.dtype) != values) & finite & ~infinite, f"values lost digits as {self.stored.dtype}", counts)
        return out

    def _integers(self, values: Array, number: Callable[[int], int], counts: Counter[str]) -> Array:
        target = self.stored.stored
        low, high = (0, 1) if target.kind == "b" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
        if values.dtype.kind == "f":
            whole = np.rint(values)
            bad = ~((whole >= float(low)) & (whole < float(high + 1)))
            self._refuse(bad, values, number)
            self._count(whole != values, f"values lost digits as {self.stored.dtype}", counts)
            return whole.astype(target)
        if values.dtype.kind != "b":
            held = np.iinfo(values.dtype)
            bad = np.zeros(values.shape, bool)
            if held.min < low:
                bad |= values < low
            if held.max > high:
                bad |= values > high
            self._refuse(bad, values, number)
        return values.astype(target)

    def _refuse(self, bad: npt.NDArray[np.bool_], values: Array, number: Callable[[int], int]) -> None:
        if not bad.any():
            return
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise SourceError(
            f"{self.named(at[1:])}: {values[at]} cannot be held by {self.stored.dtype}; choose another --dtype, or leave that row out",
            row=number(at[0]),
            field=self.source.name,
        )

    def _count(self, found: npt.NDArray[np.bool_], what: str, counts: Counter[str]) -> None:
        if not found.any():
            return
        if self.source.columns is None:
            counts[f"{what} ({self.source.name})"] += int(found.sum())
            return
        for column, n in enumerate(found.sum(axis=0).tolist()):
            if n:
                counts[f"{what} ({self.named((column,))})"] += n

    def named(self, at: tuple[int, ...]) -> str:
        """The field, and where in its row."""
        if self.source.columns is not None and at:
            return f"{self.source.name}[{self.source.columns.listed[at[0]]}]"
        return self.source.name + (f"[{', '.join(map(str, at))}]" if at else "")

    def sums(self, values: Array) -> dict[str, Any] | None:
        """Sums of the source's rows (N, *shape) for each channel or column, as statistics are made of; None where a mean means nothing.

        What they are depends on these rows alone, not on the machine: numbers are added in a fixed order.  Exact for integers whose squares add up to
        less than 2^63.
        """
        if not self.stored.channels:
            return None
        if self.source.meaning == "image":
            columns = _planes(values, self.source.layout)
            if self.source.dtype in _DEPTHS:
                total, squares = channel_sums(columns.T[:, None, :])
                return _entry(_DEPTHS[self.source.dtype], columns.shape[1], total.tolist(), squares.tolist())
            columns = columns.T
        else:
            columns = values.reshape(len(values), -1)
        return _entry(0, len(columns), *_column_sums(wide(columns, self.source.dtype)))


def _planes(values: Array, layout: str | None) -> Array:
    """(C, N * H * W) of images."""
    moved = np.moveaxis(values, 1 if layout == "chw" else 3, 0)
    return np.ascontiguousarray(moved).reshape(moved.shape[0], -1)


def _entry(depth: int, pixels: int, total: list[Any], squares: list[Any]) -> dict[str, Any]:
    return {"depth": depth, "pixels": pixels, "sum": total, "sum_squares": squares}


def _column_sums(values: Array) -> tuple[list[Any], list[Any]]:
    """(sums, sums of squares) of each column of (N, C)."""
    n, columns = values.shape
    kind: Any = np.float64
    if values.dtype.kind in "iu" and n and max(abs(int(values.max())), abs(int(values.min()))) ** 2 * n < 1 << 63:
        kind = np.int64
    total, squares = np.zeros(columns, kind), np.zeros(columns, kind)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, n, max(1, _CHUNK // columns)):
            part = values[start : start + max(1, _CHUNK // columns)].astype(kind)
            total += _folded(part)
            np.multiply(part, part, out=part)
            squares += _folded(part)
    return total.tolist(), squares.tolist()


def _folded(values: Array) -> Array:
    """The sum over the rows of (N, C), in an order that N and C decide."""
    n, columns = values.shape
    times = max(1, _FOLD // columns)
    whole = n // times * times
    out: Array = np.add.reduce(np.add.reduce(values[:whole].reshape(-1, times * columns), axis=0).reshape(times, columns), axis=0)
    out += np.add.reduce(values[whole:], axis=0)
    return out


def all_finite(sums: dict[str, Any] | None) -> bool:
    """Do these sums say that what was summed up were finite numbers?"""
    return sums is not None and all(math.isfinite(total) for total in sums["sum"])


def merge_sums(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for all; a sum that is no finite number, or that an index could not hold with those of other shards, is None."""
    out = _entry(parts[0]["depth"], sum(p["pixels"] for p in parts), [], [])
    for name in ("sum", "sum_squares"):
        totals = [exact_total(list(column)) for column in zip(*(p[name] for p in parts), strict=True)]
        out[name] = [None if total is None or abs(total) > _MOST_SUM else total for total in totals]
    return [out]


def wide(values: Array, dtype: str) -> Array:
    """Numbers that numpy can count with: bfloat16 as float32."""
    if dtype != "bfloat16":
        return values
    bits = values.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _holds(source: str, target: str) -> bool:
    """Is every value of one dtype the same in this float dtype?"""
    if source in _DIGITS:
        return source in _WITHIN[target]
    return source == "bool" or DTYPES[source].itemsize * 8 <= _DIGITS[target]


def stored_fields(fields: tuple[Field, ...], asked: RowPreprocess) -> tuple[StoredField, ...]:
    """How the fields of a source are stored.  Raises OptionError where an option fits none of them."""
    single = dict(asked.fields)
    own = {f.name: stored_fields((f,), single[f.name])[0] for f in fields if f.name in single and f.meaning == "image"}
    images = [f for f in fields if f.meaning == "image" and f.name not in own]
    counts = {f.count for f in fields}
    plain = [f for f in fields if _is_plain(f) and f.name not in counts]
    counted = images or [f for f in plain if f.dtype != "bool" and f.channels]
    normalize = IMAGENET if asked.normalize == "imagenet" else asked.normalize
    if asked.normalize == "imagenet" and not images:
        raise OptionError("--normalize imagenet is for pictures, and this source has none: use auto, or --mean and --std", options=["normalize"])
    if normalize is not None and not counted:
        shown = ", ".join(f"{f.name} {f.dtype} ({' x '.join(map(str, f.shape))})" if f.shape else f"{f.name} {f.dtype}" for f in fields)
        hint = next((f": if {f.name} holds pictures, --as {f.name}=image says so" for f in fields if _is_plain(f) and len(f.shape) in (2, 3)), "")
        raise OptionError(
            f"--normalize takes a mean of each channel of pictures, or of each number of rows that have at most one axis, and there are none of "
            f"these ({shown}){hint}; else leave it out",
            options=["normalize"],
        )
    if normalize == "auto" and (spec := next((f for f in images if (asked.dtype or f.dtype) in _FLOATS), None)) is not None:
        raise OptionError(
            f"--normalize auto: {spec.name} holds pictures that are stored as {asked.dtype or spec.dtype}, into which a normalisation is baked, and "
            "auto is known only after the build: give --mean and --std (`mmcompile info` shows them of a build without)"
            + ("" if spec.dtype in _FLOATS else f", or leave --dtype out, and they are stored as {spec.dtype}"),
            options=["normalize", "dtype"],
        )
    if isinstance(normalize, Normalize):
        for spec in counted:
            if spec.channels != len(normalize.mean):
                raise OptionError(
                    f"mean and std have {len(normalize.mean)} values, field {spec.name} has {spec.channels}: give one of each for every number",
                    options=["normalize"],
                )
    cast = images or plain
    return tuple(own.get(f.name) or _stored(f, asked.dtype if f in cast else None, asked.scale, normalize if f in counted else None) for f in fields)


def _is_plain(spec: Field) -> bool:
    """Just numbers: no class, category or time."""
    return spec.meaning == "value" and spec.unit is None and spec.categories is None


def _stored(spec: Field, dtype: str | None, scale: str, normalize: str | Normalize | None) -> StoredField:
    dtype = dtype or spec.dtype
    if spec.meaning == "image":
        if dtype not in _IMAGE_DTYPES:
            raise OptionError(f"--dtype {dtype}: pictures are stored as one of {', '.join(_IMAGE_DTYPES)}", options=["dtype"])
        made = Preprocess(mode="keep", dtype=dtype, layout=str(spec.layout), normalize=normalize, scale=scale)
        read = made.read_normalize()
        stored = replace(spec, dtype=dtype, scale=made.read_scale(), normalize=None if read is None else (read.mean, read.std))
        return StoredField(spec, stored, made.baked_normalize(), made, normalize == "auto")
    stored = replace(spec, dtype=dtype)
    if not isinstance(normalize, Normalize):
        return StoredField(spec, stored, auto=normalize == "auto")
    if stored.dtype in _FLOATS:
        return StoredField(spec, stored, normalize)
    return StoredField(spec, replace(stored, normalize=(normalize.mean, normalize.std)))
