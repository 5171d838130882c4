"""Hides what the arguments of a dataset mean: where its files come from, which rows a split is, which columns its fields are.

Raises ValueError or TypeError for what makes no sense, naming what there is.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmcompile.format.files import Files, LocalFiles
from mmcompile.format.index import Field, Index
from mmcompile.format.reader import Reader
from mmcompile.format.store import is_url, on_disk
from mmcompile.format.variants import Variants
from mmcompile.runtime.column import ClassColumn, Column, TextColumn
from mmcompile.runtime.pixels import ImageColumn, MaskColumn, PixelColumn

if TYPE_CHECKING:
    from mmcompile.runtime.joint import Joint
    from mmcompile.runtime.spatial import Spatial

__all__ = ["column_of", "columns_of", "field_names", "files_of", "joint_of", "spatial_of", "split_range", "takes"]


def files_of(root: str | os.PathLike[str], cache: Any) -> Files:
    """Where the files come from."""
    place = on_disk(os.fspath(root))
    if cache is None:
        if is_url(place):
            raise ValueError(f"{place}: shards behind a URL are read from a local disk; say where: cache=mmcompile.Cache(dir, max_bytes=...)")
        return LocalFiles(place)
    from mmcompile.runtime.cache import Cache, Staged  # reading alone does not load it

    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a mmcompile.Cache, not {cache!r}")
    return Staged(place, cache)


def field_names(fields: Sequence[str]) -> tuple[str, ...]:
    """The names of the fields that are wanted, in order."""
    if isinstance(fields, str):
        raise TypeError(f"fields is a sequence of names: ({fields!r},), not {fields!r}")
    names = tuple(fields)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"fields must be at least one name, each once, not {names}")
    return names


def split_range(reader: Reader, split: str | None) -> tuple[int, int]:
    """The rows [start, stop) of a split, or of all of them."""
    ranges = {s.name: (s.start, s.stop) for s in reader.index.splits}
    if split is None and len(ranges) > 1:
        raise ValueError(f"{reader.root}: has the splits {', '.join(ranges)}: choose one by split= (--split), or 'all' for all")
    wanted = next(iter(ranges)) if split is None else split
    if wanted not in ranges and wanted != "all":
        has = "it has no splits: leave split out" if [*ranges] == ["all"] else f"it has {[*ranges]}" + ", and 'all' joins them" * (len(ranges) > 1)
        raise ValueError(f"{reader.root}: no split {wanted!r}; {has}")
    whole = (0, reader.index.samples)
    return whole if wanted == "all" and len(ranges) > 1 else ranges.get(wanted, whole)


def columns_of(reader: Reader, fields: tuple[str, ...] | None, dtype: torch.dtype | str | None, crop: int | tuple[int, ...] | None) -> list[Column]:
    """A column for each of these fields (None: for all)."""
    known = {f.name: f for f in reader.index.fields}
    names = tuple(known) if fields is None else fields
    for name in names:
        if name not in known:
            raise ValueError(f"{reader.root}: no field {name!r}; it has {list(known)}")
    views = next((f.views for f in known.values() if f.views is not None), None)
    variants = reader if views is None else Variants(reader, views)
    columns = [column_of(variants if known[name].views is not None else reader, known[name], dtype, crop) for name in names]
    if crop is not None and not any(isinstance(column, PixelColumn) for column in columns):
        raise ValueError(f"{reader.root}: crop needs an image, the fields are {list(names)}")
    values = any(known[name].meaning != "class" for name in names)
    if dtype is not None and values and not any(column.takes for column in columns):
        said = ", ".join(f"{name} {known[name].dtype}" for name in names)
        raise ValueError(f"{reader.root}: dtype {dtype} is for images, and for values that are floats or normalised; the fields are {said}")
    return columns


def spatial_of(index: Index, columns: list[Column], crop: int | tuple[int, ...] | None, where: str) -> Spatial | None:
    """What moves the values that belong to a picture; None where the dataset has none."""
    if not any(field.meaning in ("mask", "boxes", "keypoints") for field in index.fields):
        return None
    from mmcompile.runtime.spatial import Spatial  # for other datasets not loaded

    return Spatial(columns, index, crop, where)


def joint_of(index: Index, columns: list[Column], spatial: Spatial | None) -> Joint | None:
    """What makes the values of a sample those that a transform of all of them expects; None where they are."""
    known = {field.name: field for field in index.fields}
    fields = [known[column.field] for column in columns]
    if not any(field.count is not None or field.meaning in ("mask", "boxes", "keypoints") for field in fields):
        return None
    from mmcompile.runtime.joint import Joint  # for other datasets not loaded

    return Joint(fields, None if spatial is None else spatial.size)


def column_of(reader: Reader, field: Field, dtype: torch.dtype | str | None, crop: int | tuple[int, ...] | None) -> Column:
    """The column of a field: what it means decides."""
    if field.meaning == "volume":
        from mmcompile.runtime.volume import VolumeColumn  # reading images alone does not load it

        return VolumeColumn(reader, field, dtype, crop)
    if field.meaning == "image":
        return ImageColumn(reader, field, dtype, crop)
    if field.meaning == "mask":
        return MaskColumn(reader, field, crop)
    if field.meaning == "class":
        return ClassColumn(reader, field)
    if field.meaning == "text":
        return TextColumn(reader, field, None)
    # a place in a picture has the precision that it is stored in, whatever its pixels are read as
    return Column(reader, field, None if field.meaning in ("boxes", "keypoints") else dtype)


def takes(function: object, count: int) -> bool:
    """Can this be called with so many arguments, as far as its signature tells?"""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of some functions in C
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
