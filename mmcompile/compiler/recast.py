"""Hides under which settings the rows of datasets become those of another without a picture being decoded, and which settings nobody can change.

What decides pixels has to be the same in all of them, and stays.  How rows are stored may change as far as stored rows tell it: see `stored_as`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.marks import made_as, marks_of, marks_of_made, of_kinds, stored_as, versions_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.names import show
from mmcompile.errors import FormatError, OptionError
from mmcompile.format.index import Index

__all__ = ["Opened", "Usable", "common_versions", "settled"]

#: How rows are stored: may be asked for anew.
_STORE = ("dtype", "layout", "normalize", "scale")
#: What depends on the dtype, where it is not asked for, and touches sources of more than 8 bits alone: rows of these are looked at one by one.
_DEEP = ("depth16", "range")
_REST = tuple(f.name for f in fields(Preprocess) if f.name not in _STORE)


@dataclass(frozen=True)
class Opened:
    """A generation of a dataset."""

    root: str
    generation: str
    index: Index

    @property
    def made(self) -> Preprocess:
        """The settings that its rows were made with.  Raises FormatError where this release does not know them."""
        preprocess = marks_of_made(made_as(self.index))[1]
        if preprocess is None:
            raise FormatError(
                f"{self.root}: this release does not know all of its settings; install the release of mmcompile that made it",
                path=self.root,
            )
        return preprocess

    @property
    def name(self) -> str:
        """What messages call it."""
        return show(self.root)


def settled(datasets: list[Opened], asked: Preprocess | None, given: Collection[str] | None) -> Preprocess:
    """The settings of a dataset that holds the rows of these.

    `asked`: what was asked for, None: nothing.  `given`: the names of the options that were given; None: how rows are stored was, and all that is not
    as by default.  Raises OptionError where the datasets differ, or something is asked for that their rows do not tell.
    """
    default = Preprocess()
    if given is None:
        given = () if asked is None else [*_STORE, *(n for n in _REST if getattr(asked, n) != getattr(default, n))]
    store: dict[str, Any] = {}
    for name in _STORE:
        if asked is not None and name in given:
            store[name] = getattr(asked.resolved(), name)
            continue
        values = [getattr(d.made, name) for d in datasets]
        other = next((at for at, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise _differ(name, datasets[0], values[0], datasets[other], values[other], f"say which with {_flag(name)}")
        store[name] = values[0]
    kept = [_stored(dataset, store) for dataset in datasets]
    wanted = kept[0].settings()
    for dataset, preprocess in zip(datasets[1:], kept[1:], strict=True):
        found = preprocess.settings()
        for name in sorted(set(wanted) | set(found)):
            if found.get(name) != wanted.get(name):
                raise _differ(name, datasets[0], wanted.get(name), dataset, found.get(name), "rows are copied, not decoded: build one of them anew")
    for name in (n for n in _REST if asked is not None and n in given):
        value = getattr(asked, name)
        if value is not None and value != getattr(kept[0], name):
            if name == "fields":
                names = ", ".join(field for field, _ in value)
                raise OptionError(
                    f"--field {names}: the fields of {datasets[0].name} are made, and its rows are copied, not decoded: leave it out, or build "
                    "from the images",
                    options=["field"],
                )
            raise OptionError(
                f"{_flag(name)} {_shown(value)}: the rows of {datasets[0].name} were made with {_shown(getattr(kept[0], name))}, and they are "
                "copied, not decoded: leave it out, or build from the images",
                options=[name],
            )
    return kept[0]


def _stored(dataset: Opened, store: dict[str, Any]) -> Preprocess:
    """The settings of a dataset with its rows stored anew."""
    made = dataset.made
    deep: dict[str, Any] = dict.fromkeys(_DEEP) if store["dtype"] != made.dtype else {}
    new = replace(made, **store, **deep).resolved()
    if stored_as(made, new) is None:
        old = f"--dtype {made.dtype}" + ("" if made.dtype != new.dtype else f" --scale {made.scale} --normalize {_shown(made.normalize)}")
        raise OptionError(
            f"{dataset.name}: its rows are stored with {old}, and only rows of uint8 can be stored anew: leave --dtype, --scale and "
            "--normalize out, or build from the images",
            options=["dtype"],
        )
    return new


@dataclass(frozen=True)
class Usable:
    """Which rows of a dataset can be copied to one of these settings."""

    dataset: Opened
    kinds: frozenset[str]

    @classmethod
    def of(cls, dataset: Opened, preprocess: Preprocess) -> Usable:
        made, index = made_as(dataset.index), dataset.index
        wanted = marks_of(preprocess, index.versions, index.pixel_revision)
        return cls(dataset, wanted.usable(marks_of_made(made)[0].formats))

    def refused(self, samples: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The rows that cannot, by their provenance."""
        return np.flatnonzero(~of_kinds(samples, self.kinds))


def common_versions(datasets: list[Opened], formats: list[frozenset[str]], preprocess: Preprocess) -> tuple[dict[str, str], int]:
    """(library versions, pixel revision) that all rows were made with; `formats`: those of the sources of each dataset.

    Where datasets differ in a version, that of one counts whose rows depend on it.  Raises OptionError where two such differ: equal sources could
    have other pixels then.
    """
    out: dict[str, str] = {}
    whose: dict[str, Opened] = {}
    for dataset, seen in zip(datasets, formats, strict=True):
        if dataset.index.pixel_revision != datasets[0].index.pixel_revision:
            raise _differ("pixel revision", datasets[0], datasets[0].index.pixel_revision, dataset, dataset.index.pixel_revision, _ANEW)
        needed = {name for format in seen for name in versions_of(preprocess, format)}
        for name, version in dataset.index.versions.items():
            if name not in needed:
                continue
            if out.setdefault(name, version) != version:
                raise _differ(name, whose[name], out[name], dataset, version, _ANEW)
            whose.setdefault(name, dataset)
    for dataset in datasets:
        out = {**dataset.index.versions, **out}
    return out, datasets[0].index.pixel_revision


#: What to do about versions.
_ANEW = "equal images could have other pixels: build one of them anew with --redecode under the versions of the other"


def _differ(name: str, one: Opened, value: Any, other: Opened, found: Any, remedy: str) -> OptionError:
    called = _flag(name) if name in _STORE or name in _REST else name
    return OptionError(
        f"{one.name} and {other.name} differ in {called} ({_shown(value)}, {_shown(found)}); {remedy}",
        options=[name],
        datasets=[one.root, other.root],
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return "x".join(map(str, value)) if isinstance(value, tuple | list) and len(value) in (2, 3) else f"{value}"[:60]
