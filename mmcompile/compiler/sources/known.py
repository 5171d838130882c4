"""Hides what a dataset in Python knows of itself beside its samples: names of classes, dtypes of columns, and what changes when it does.

torchvision's datasets, Hugging Face's, and what is a Subset of one or joined of several say so, each in a way of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import DTYPES, Field, field_name
from mmcompile.format.npy import hash_bytes

__all__ = ["check_classes", "class_names", "known_dtypes", "known_names", "stamp_of"]

Array = npt.NDArray[Any]

#: Datasets that stand behind each other: a Subset of a Subset of one.
_DEEP = 16


def _asked(dataset: Any, name: str) -> Any:
    """An attribute, None where there is none; a property of a stranger's class may raise anything."""
    try:
        return getattr(dataset, name, None)
    except Exception:
        return None


def _behind(dataset: Any) -> Iterator[Any]:
    """A dataset, what it is a part of, what that is a part of, and so on."""
    for _ in range(_DEEP):
        if dataset is None:
            return
        yield dataset
        dataset = _asked(dataset, "dataset")


def _features(dataset: Any) -> Mapping[Any, Any]:
    """What Hugging Face's datasets know of their columns, also of one that this is a Subset of."""
    for at in _behind(dataset):
        features = _asked(at, "features")
        if isinstance(features, Mapping):
            return features
        if type(at).__name__ != "Subset":
            break
    return {}


def _inner(features: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(name, feature) of each column, and behind them those of what is in lists and dicts of columns."""
    nested: dict[Any, Any] = {}
    for name, feature in features.items():
        while isinstance(feature, list) or (not isinstance(feature, Mapping) and _asked(feature, "feature") is not None):
            feature = feature[0] if isinstance(feature, list) else feature.feature
        if isinstance(feature, Mapping):
            nested |= feature
        else:
            yield str(name), feature
    if nested:
        yield from _inner(nested)


def known_names(dataset: Any) -> dict[str, tuple[str, ...]]:
    """The names of classes that a dataset knows, by field; "" for the one that is a class by its name.  Looks behind a Subset.

    Datasets that are joined know those that all of them do.
    """
    joined = _asked(dataset, "datasets")
    if isinstance(joined, list | tuple) and joined:
        found = [known_names(part) for part in joined]
        return found[0] if all(names == found[0] for names in found) else {}
    out: dict[str, tuple[str, ...]] = {}
    for name, feature in _inner(_features(dataset)):
        names = getattr(feature, "names", None)
        if isinstance(names, list) and type(feature).__name__ == "ClassLabel":
            out.setdefault(name, tuple(map(str, names)))
    for at in _behind(dataset) if not out else ():
        classes = _asked(at, "classes")
        if isinstance(classes, list | tuple) and classes and all(isinstance(c, str) for c in classes):
            return {"": tuple(classes)}
    return out


def known_dtypes(dataset: Any) -> dict[str, str]:
    """The dtypes of what Hugging Face's datasets give as Python numbers and lists of them, by field."""
    out: dict[str, str] = {}
    for name, feature in _features(dataset).items():
        while not isinstance(getattr(feature, "dtype", None), str) and hasattr(feature, "feature"):
            feature = feature.feature
        dtype = getattr(feature, "dtype", None)
        if dtype in DTYPES:
            out[str(name)] = dtype
    return out


def class_names(fields: Sequence[Field], names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The names of the numbers in the field that means a class; None where nobody knows them."""
    labels = [f.name for f in fields if f.meaning == "class"]
    known = {field_name(name): classes for name, classes in names.items() if name}
    return next((known[name] for name in labels if name in known), names.get("") if labels else None)


def check_classes(rows: Mapping[str, Array], fields: Iterable[Field], names: tuple[str, ...] | None, numbers_of: range | list[int] | Array) -> None:
    """Is each number of a class from 0 on, one of those that have names where these are known, or -1 for none?

    Raises SourceError; `numbers_of` are the numbers of the rows.
    """
    for spec in fields:
        if spec.meaning == "class":
            numbers = rows[spec.name]
            bad = np.flatnonzero((numbers < -1) | (numbers >= (1 << 63 if names is None else len(names))))
            if len(bad):
                row = int(numbers_of[int(bad[0])])
                if names is None:
                    raise SourceError(
                        f"row {row:,}: {spec.name} is {int(numbers[bad[0]])}: expected the number of a class from 0 on, or -1 for none; where it is "
                        "a value of another kind, give it another name",
                        row=row,
                    )
                raise SourceError(
                    f"row {row:,}: {spec.name} is {int(numbers[bad[0]])}, and the dataset names {len(names):,} classes ({names[0]} is 0): expected a "
                    "number below that, or -1 for none",
                    row=row,
                )


def stamp_of(dataset: Any) -> str:
    """What changes when a dataset does, where it knows: the fingerprint of Hugging Face's; a text `mmcompile_version` that its author gives."""
    found = _asked(dataset, "_fingerprint")
    if not isinstance(found, str) or not found:
        found = _asked(dataset, "mmcompile_version")
        if found is None:
            return ""
        if not isinstance(found, str) or not found:
            raise OptionError(f"mmcompile_version of a dataset must be a text that changes when the dataset does, not {found!r:.60}")
    return hash_bytes(f"{type(dataset).__name__} {found} {len(dataset)}".encode("utf-8", "surrogatepass"))
