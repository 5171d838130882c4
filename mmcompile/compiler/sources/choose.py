"""Hides which source reads a RAW: what it is decides, unless `source` says so.

Each kind of source has one entry in KINDS: its name, how it is recognised, how it is made, and which options it takes.  The first that recognises
all of RAW is taken; an option that it does not take is refused, never ignored.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mmcompile.compiler.fieldoptions import FieldOptions, fields_of
from mmcompile.compiler.formats import TORCHVISION_EXTENSIONS
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sources import Source
from mmcompile.compiler.sources.contents import why_unclear
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.remote import folder_source
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.splits import Layout, parse_splits, why_no_splits
from mmcompile.errors import OptionError, SourceError, did_you_mean
from mmcompile.format.store import is_url, on_disk

__all__ = ["KINDS", "Kind", "Raw", "SourceOptions", "given_source", "open_source"]

#: Options that hold several texts, and those that hold a path, in Python also a Path.
_SEVERAL = ("include", "exclude", "split", "as_", "columns")
_PLACES = ("classes_from", "images", "rows")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What is taken from RAW, and as what; called as on the command line.  Each kind of source takes some of these, and the others are refused.

    The fields are explained at `Raw`.  `compat`: "torchvision" for exactly the files that its ImageFolder takes.  `fields`: those of the Preprocess.
    """

    source: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    compat: str | None = None
    split: tuple[str, ...] = ()
    classes_from: str | None = None
    as_: tuple[str, ...] = ()
    shape: str | None = None
    array_dtype: str | None = None
    group_by: str | None = None
    order_by: str | None = None
    split_by: str | None = None
    images: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    rows: str | tuple[int, ...] | None = None
    fields: tuple[tuple[str, FieldOptions], ...] = ()

    def __post_init__(self) -> None:
        for spec in fields(SourceOptions):
            value = getattr(self, spec.name)
            object.__setattr__(self, spec.name, spec.default if value is None else _checked(spec.name, value))

    @property
    def extensions(self) -> frozenset[str] | None:
        """The extensions that count (lower case, with the dot); None: those of all known formats, and files without one by their first bytes."""
        return TORCHVISION_EXTENSIONS if self.compat == "torchvision" else None

    @property
    def takes_hidden(self) -> bool:
        """Do names that begin with a dot count, and `__MACOSX`?"""
        return self.hidden or self.compat == "torchvision"

    def given(self) -> tuple[str, ...]:
        """The options that are not as they are without a word, apart from `source`, in order."""
        return tuple(f.name for f in fields(SourceOptions) if f.name != "source" and getattr(self, f.name) != f.default)


@dataclass(frozen=True)
class Raw(SourceOptions):
    """RAW for `build`, where more is to be said of it than where it is: `build(Raw("out1/", where="width >= 256"), "out2/")`.

    `places`: a path or URL, or several of them.  The other fields are options of `mmcompile build`, and do what these do; the kind of RAW decides
    which it takes, and the others are an OptionError.  A field of several texts takes a list, or one text; `columns` one text
    with commas between the names, as on the command line.

    What it is, and which files count: `source`, the name of a kind ("folder", "pairs", "volumes", "manifest", "coco", "tar", "zip", "npy", "npz",
    "npy-folder", "idx", "raw", "table", "dataset"), None: that is told from RAW.  `include` and `exclude`: patterns of keys, as "cats/*.png".
    `hidden`: also names that begin with a dot.  `compat`: is that of the Preprocess, and need not be given.

    Splits and classes: `split`, each "NAME=FOLDER" (of several `places` one of them).  `classes_from`: a dataset, or a file of names, that says which
    number each class has.

    Arrays: `as_`, each "NAME=image", "NAME=class" or "NAME=value".  `shape` (as "28x28", or (28, 28)) and `array_dtype`: of a file without a header.

    Lists of images, and samples in archives: `images`, the folder of the images.  `image_column`, `label_column`: names.  `columns`: those that
    become fields, () for none.

    Folders side by side: `columns`: those beside the pictures that are taken.

    Tables: `columns`, `label_column`; `group_by`, `order_by`: names; `split_by`, as "ts=2023-01-01,2024-01-01", or a list of these
    parts.

    Datasets: `where`, a condition on rows.  `rows`: numbers of rows, or a file of them.  `columns`: the fields beside the images that are kept.
    """

    places: str | Path | Sequence[str | Path]

    def listed(self) -> list[str]:
        """The paths and URLs.  Raises OptionError where they are none."""
        places = [self.places] if isinstance(self.places, str | Path) else self.places
        if not isinstance(places, list | tuple) or not places or not all(isinstance(place, str | Path) and str(place) for place in places):
            raise OptionError(
                f"Raw: expected a path or URL, or a list of some, not {self.places!r:.80}; a dataset in Python is given to build itself"
            )
        return [os.fspath(place) for place in places]


def _checked(name: str, value: Any) -> Any:
    """The value of an option, in the one form that sources know.  Raises OptionError where it is none."""
    if name == "fields":
        return fields_of(value)
    if name == "hidden" and isinstance(value, bool):
        return value
    if name in _PLACES and isinstance(value, str | Path):
        if os.fspath(value):
            return os.fspath(value)
    elif name == "columns" and isinstance(value, str):
        return tuple(column.strip() for column in next(csv.reader([value]), []) if column.strip())
    elif name == "split_by" and isinstance(value, tuple | list) and value and all(isinstance(part, str) for part in value):
        return ",".join(value)
    elif name == "shape" and isinstance(value, tuple | list) and value and all(isinstance(n, int) for n in value):
        return "x".join(map(str, value))
    elif name in _SEVERAL:
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (None,)
        if all(isinstance(text, str) for text in texts):
            return texts
    elif name == "rows" and isinstance(value, Iterable) and not isinstance(value, bytes):
        numbers = list(value)
        if all(hasattr(number, "__index__") and not isinstance(number, bool) for number in numbers):
            return tuple(number.__index__() for number in numbers)
    elif name not in ("hidden", *_PLACES) and isinstance(value, str):
        return value
    expected = dict.fromkeys(_PLACES, "a path") | {"hidden": "True or False", "rows": "a file, or numbers of rows"}
    expected |= dict.fromkeys(_SEVERAL, "a list of texts")
    raise OptionError(f"{name} must be {expected.get(name, 'a text')}, found {value!r:.80}", options=[name.strip("_").replace("_", "-")])


@dataclass(frozen=True)
class Kind:
    """A kind of source: `recognises` looks at RAW (all that were given) without reading much; `make` raises OptionError or SourceError.

    `takes` are the fields of SourceOptions that it takes beside `source`; `make` is called with no other one set.
    """

    name: str
    recognises: Callable[[Sequence[str]], bool]
    make: Callable[[Sequence[str], SourceOptions], Source | RowSource]
    takes: frozenset[str]


def _classes(options: SourceOptions) -> tuple[str, ...] | None:
    """The class map that was given, if one was."""
    if options.classes_from is None:
        return None
    from mmcompile.compiler.sources.classmap import read_classes

    return read_classes(options.classes_from)


def _folder(raw: Sequence[str], options: SourceOptions) -> Source:
    layout = Layout(parse_splits(raw, options.split), _classes(options))
    made = [
        folder_source(
            place,
            options.include,
            options.exclude,
            hidden=options.takes_hidden,
            extensions=options.extensions,
            layout=layout if len(raw) == 1 else None,
        )
        for place in raw
    ]
    if len(made) == 1:
        return made[0]
    from mmcompile.compiler.sources.joined import JoinedSource

    return JoinedSource(tuple(made), layout)


def _is_archive(form: str, raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.archive import is_archive

    return all(is_archive(on_disk(place), form) for place in raw)


def _archive(form: str, raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.archive import ArchiveSource, names_below
    from mmcompile.compiler.sources.scanning import Wishes

    raw = [on_disk(place) for place in raw]
    if url := next((place for place in raw if is_url(place)), None):
        raise OptionError(f"{url}: archives are read in place, from a disk: bring them to one, or mount the store")
    splits = parse_splits(raw, options.split)
    if len(raw) > 1:  # as a folder of these archives would have it
        names = names_below(raw)[1]
        splits = tuple((split, names[int(number)] + slash + rest) for split, (number, slash, rest) in ((s, f.partition("/")) for s, f in splits))
    layout = Layout(splits, _classes(options))
    wishes = Wishes(options.image_column, options.label_column, options.columns)
    return ArchiveSource(tuple(raw), form, options.include, options.exclude, options.takes_hidden, options.extensions, layout, wishes, options.fields)


def _is_tables(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.tablefiles import is_tables

    return is_tables([on_disk(place) for place in raw])


def _tables(raw: Sequence[str], options: SourceOptions) -> RowSource:
    from mmcompile.compiler.sources.table import TableSource, TableWishes

    if url := next((place for place in raw if is_url(on_disk(place))), None):
        raise OptionError(f"{url}: tables are read from a disk: bring them to one")
    wishes = TableWishes(options.columns, options.group_by, options.order_by, options.split_by, options.label_column)
    return TableSource([on_disk(place) for place in raw], wishes)


def _is_dataset(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.compiled import holds_dataset

    return any(map(holds_dataset, raw))


def _dataset(raw: Sequence[str], options: SourceOptions) -> Source | RowSource:
    from mmcompile.compiler.sources.compiled import dataset_source

    return dataset_source(raw, options)


def _is_arrays(form: str) -> Callable[[Sequence[str]], bool]:
    """Does RAW hold arrays of this form?"""

    def recognises(raw: Sequence[str]) -> bool:
        from mmcompile.compiler.sources.arrays import recognised

        return recognised(raw) == form

    return recognises


def _arrays(form: str) -> Callable[[Sequence[str], SourceOptions], RowSource]:
    def make(raw: Sequence[str], options: SourceOptions) -> RowSource:
        from mmcompile.compiler.sources.arrays import array_source

        return array_source(form, raw, options.as_, options.shape, options.array_dtype, parse_splits(raw, options.split))

    return make


def _is_manifest(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.manifest import is_manifest

    return all(is_manifest(str(on_disk(place))) for place in raw)


def _manifest(raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.manifest import ManifestSource, Wishes

    lists = tuple(_on_this_disk(place) for place in raw)
    wishes = Wishes(options.image_column, options.label_column, options.columns, options.include, options.exclude, _classes(options), options.fields)
    splits = []
    for text in options.split:
        name, sign, file = text.partition("=")
        if not (name and sign and file) or len(lists) < 2:
            raise OptionError(f"--split {show(text)}: expected NAME=LIST for one of several lists, as in train=a.csv", options=["split"])
        if why := why_no_splits([name]):
            raise OptionError(f"--split {show(text)}: {why}", options=["split"])
        splits.append((file, name))
    return ManifestSource(lists[0] if len(lists) == 1 else lists, wishes, options.images, tuple(splits))


def _is_coco(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.coco import is_coco

    return all(is_coco(str(on_disk(place))) for place in raw)


def _coco(raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.coco import CocoSource

    if len(raw) > 1:
        raise OptionError(f"expected one file of annotations, not {len(raw)}")
    return CocoSource(_on_this_disk(raw[0]), options.images, options.include, options.exclude, options.fields)


def _on_this_disk(place: str) -> str:
    """The path of a list of images.  Raises OptionError for a URL."""
    found = on_disk(place)
    if is_url(found):
        raise OptionError(f"{found}: a list of images is read from a disk: bring it, and the images, to one")
    return found


def _is_paired(raw: Sequence[str], asked: tuple[tuple[str, FieldOptions], ...] = ()) -> bool:
    from mmcompile.compiler.sources.paired import is_paired

    return len(raw) == 1 and is_paired(str(on_disk(raw[0])), dict(asked))


def _paired(raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.paired import PairedSource

    if len(raw) > 1:
        raise OptionError(f"expected one folder that holds those that lie side by side, not {len(raw)}")
    layout = Layout(parse_splits(raw, options.split))
    return PairedSource(raw[0], options.include, options.exclude, options.takes_hidden, options.extensions, layout, options.fields, options.columns)


def _are_volumes(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.volumes import are_volumes

    return len(raw) == 1 and not is_url(on_disk(raw[0])) and are_volumes([str(on_disk(place)) for place in raw])


def _volumes(raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.volumes import VolumeSource

    if len(raw) > 1:
        raise OptionError(f"expected one folder of volumes, not {len(raw)}")
    layout = Layout(parse_splits(raw, options.split), _classes(options))
    return VolumeSource(folder_source(raw[0], options.include, options.exclude, hidden=options.hidden), layout)


_FILES = frozenset({"include", "exclude", "hidden", "compat", "split", "classes_from", "fields"})
_COLUMNS = frozenset({"images", "image_column", "label_column", "columns"})

#: In the order in which they are asked; the last takes what is left, and its scan says what is wrong with it.
KINDS: tuple[Kind, ...] = (
    Kind("dataset", _is_dataset, _dataset, (_FILES - {"hidden"}) | {"where", "rows", "columns"}),
    Kind("manifest", _is_manifest, _manifest, _FILES - {"hidden"} | _COLUMNS),
    Kind("coco", _is_coco, _coco, frozenset({"include", "exclude", "compat", "images", "fields"})),
    Kind("pairs", _is_paired, _paired, _FILES - {"classes_from"} | {"columns"}),
    Kind("volumes", _are_volumes, _volumes, _FILES - {"compat"}),
    *(Kind(form, _is_arrays(form), _arrays(form), frozenset({"as_"})) for form in ("npy", "npz", "idx")),
    Kind("npy-folder", _is_arrays("npy-folder"), _arrays("npy-folder"), frozenset({"as_", "split"})),
    Kind("table", _is_tables, _tables, frozenset({"columns", "group_by", "order_by", "split_by", "label_column"})),
    Kind("raw", lambda raw: False, _arrays("raw"), frozenset({"as_", "shape", "array_dtype"})),
    Kind("tar", functools.partial(_is_archive, "tar"), functools.partial(_archive, "tar"), _FILES | _COLUMNS - {"images"}),
    Kind("zip", functools.partial(_is_archive, "zip"), functools.partial(_archive, "zip"), _FILES),
    Kind("folder", lambda raw: True, _folder, _FILES),
)


def open_source(raw: Sequence[str], options: SourceOptions) -> Source | RowSource:
    """The source that reads these paths or URLs.  Raises OptionError or SourceError."""
    if options.source is not None:
        kind = next((k for k in KINDS if k.name == options.source), None)
        if kind is None:
            meant = did_you_mean(str(options.source), (k.name for k in KINDS))
            raise OptionError(f"--source must be one of {', '.join(k.name for k in KINDS)}, found {options.source!r:.80}{meant}", options=["source"])
    else:
        kind = next(k for k in KINDS if k.recognises(raw))
        if kind.name == "table" and options.image_column is not None:  # which no table has
            kind = next(k for k in KINDS if k.name == "manifest")
        if kind.name in ("folder", "npy-folder") and dict(options.fields).get("image", FieldOptions()).kind == "volume":
            kind = next(k for k in KINDS if k.name == "volumes")
        if kind.name == "folder" and options.fields and _is_paired(raw, options.fields):
            kind = next(k for k in KINDS if k.name == "pairs")
        if kind.name == "folder":
            _refuse_foreign(raw)
        if kind.name in ("folder", "tar", "zip"):
            _refuse_unclear(raw, kind.name)
    if refused := [name for name in options.given() if name not in kind.takes]:
        raise _refusal(kind, refused, options.source is not None)
    return kind.make(raw, options)


def _refuse_foreign(raw: Sequence[str]) -> None:
    """Raises SourceError for what is read in Python only, and for RAW of several kinds."""
    from mmcompile.compiler.sources.foreign import told_of_foreign

    kinds = [next(kind.name for kind in KINDS if kind.recognises([place])) for place in raw]
    for place, kind in zip(raw, kinds, strict=True):
        if kind == "folder" and not is_url(found := on_disk(place)) and (told := told_of_foreign(str(found))) is not None:
            raise SourceError(told, path=str(found))
    if other := next((at for at, kind in enumerate(kinds) if kind != kinds[0]), 0):
        raise SourceError(
            f"{show(raw[0])} is read as {kinds[0]}, and {show(raw[other])} as {kinds[other]}: several RAW have to be of one kind: build each by "
            "itself, and the datasets into one where they fit",
            path=str(on_disk(raw[other])),
        )


def _refuse_unclear(raw: Sequence[str], kind: str) -> None:
    """Raises SourceError for a folder of files of several kinds, where it cannot be told which of them are meant."""
    for place in raw:
        if is_url(found := on_disk(place)) or not os.path.isdir(found):
            continue
        why = why_unclear(str(found), kind)
        if kind == "folder" and not why:
            from mmcompile.compiler.sources.paired import why_not_paired

            why = why_not_paired(str(found))
        if why:
            raise SourceError(why, path=str(found))


def given_source(source: Any, preprocess: Preprocess | RowPreprocess | None) -> tuple[Any, Preprocess | RowPreprocess | None]:
    """(the source, how its samples are made) of what `build` was given: paths, a Raw, a dataset in Python, or a source.  Raises as `open_source`."""
    if isinstance(source, str | Path) or (isinstance(source, list | tuple) and source and all(isinstance(place, str | Path) for place in source)):
        source = Raw(source)
    if isinstance(source, Raw):
        for place in source.listed():
            on_disk(place)
        compat = None if isinstance(preprocess, RowPreprocess | None) else preprocess.compat
        if source.compat not in (None, compat):
            raise OptionError(f"Raw: compat {source.compat!r} is that of the Preprocess: give it there", options=["compat"])
        own = () if isinstance(preprocess, RowPreprocess | None) else preprocess.options
        if source.fields not in ((), own):
            raise OptionError("Raw: fields are those of the Preprocess: give them there", options=["field"])
        return open_source(source.listed(), replace(source, compat=compat, fields=own)), preprocess
    if hasattr(source, "scan"):
        return source, preprocess
    if isinstance(source, bytes):
        raise OptionError(f"expected a path as str or Path, not bytes ({source!r:.80})")
    from mmcompile.compiler.sources.dataset import wrap

    return wrap(source, preprocess)


def _refusal(kind: Kind, refused: list[str], asked: bool) -> OptionError:
    """What to say of options that a kind of source does not take; `asked`: --source names that kind."""
    words = ["field" if name == "fields" else name.strip("_").replace("_", "-") for name in refused]
    listed = ", ".join(f"--{word}" for word in words)
    read = f"--source {kind.name}" if asked else f"this RAW, which is read as {kind.name}"
    others = [other.name for other in KINDS if other.takes.issuperset(refused)]
    remedy = f" or give another --source ({', '.join(others)})" if others else ""
    pronoun, verb = ("it", "does") if len(words) == 1 else ("them", "do")
    return OptionError(f"{listed} {verb} not go with {read}: leave {pronoun} out{',' if remedy else ''}{remedy}", options=words)
