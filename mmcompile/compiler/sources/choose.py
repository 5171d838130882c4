"""Hides which source reads a RAW: what it is decides, unless `source` says so.

Each kind of source has one entry in KINDS: its name, how it is recognised, how it is made, and which options it takes.  The first that recognises
all of RAW is taken; an option that it does not take is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from mmcompile.compiler.formats import TORCHVISION_EXTENSIONS
from mmcompile.compiler.sources import Source
from mmcompile.compiler.sources.remote import folder_source
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.compiler.sources.splits import Layout, parse_splits
from mmcompile.errors import OptionError

__all__ = ["KINDS", "Kind", "SourceOptions", "open_source"]


@dataclass(frozen=True)
class SourceOptions:
    """What is taken from RAW, and as what; called as on the command line.  Each kind of source takes some of these, and the others are refused.

    `source`: the name of a kind, None: what RAW is decides.  `include`, `exclude`, `hidden`: which files (see FolderSource).  `compat`:
    "torchvision" for exactly the files that its ImageFolder takes.  `split`: NAME=FOLDER for each folder that is a split.  `classes_from`: a dataset
    or file that says the names and numbers of the classes.  `where`, `rows`: which rows of datasets, by a condition and by a file of their numbers.
    """

    source: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    compat: str | None = None
    split: tuple[str, ...] = ()
    classes_from: str | None = None
    where: str | None = None
    rows: str | None = None

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
        return tuple(f.name for f in fields(self) if f.name != "source" and getattr(self, f.name) != f.default)


@dataclass(frozen=True)
class Kind:
    """A kind of source: `recognises` looks at RAW (all that were given) without reading much; `make` raises OptionError or SourceError.

    `takes` are the fields of SourceOptions that it takes beside `source`; `make` is called with no other one set.
    """

    name: str
    recognises: Callable[[Sequence[str]], bool]
    make: Callable[[Sequence[str], SourceOptions], Source | RowSource]
    takes: frozenset[str]


def _folder(raw: Sequence[str], options: SourceOptions) -> Source:
    classes = None
    if options.classes_from is not None:
        from mmcompile.compiler.sources.classmap import read_classes

        classes = read_classes(options.classes_from)
    layout = Layout(parse_splits(raw, options.split), classes)
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


def _dataset(raw: Sequence[str], options: SourceOptions) -> Source:
    from mmcompile.compiler.sources.datasets import dataset_source

    return dataset_source(raw, options)


def _is_dataset(raw: Sequence[str]) -> bool:
    from mmcompile.compiler.sources.datasets import holds_dataset

    return any(map(holds_dataset, raw))


#: In the order in which they are asked; the last takes what is left, and its scan says what is wrong with it.
KINDS: tuple[Kind, ...] = (
    Kind("dataset", _is_dataset, _dataset, frozenset({"include", "exclude", "compat", "split", "classes_from", "where", "rows"})),
    Kind("folder", lambda raw: True, _folder, frozenset({"include", "exclude", "hidden", "compat", "split", "classes_from"})),
)


def open_source(raw: Sequence[str], options: SourceOptions) -> Source | RowSource:
    """The source that reads these paths or URLs.  Raises OptionError or SourceError."""
    if options.source is not None:
        kind = next((k for k in KINDS if k.name == options.source), None)
        if kind is None:
            raise OptionError(f"source must be one of {', '.join(k.name for k in KINDS)}, not {options.source!r}", options=["source"])
    else:
        kind = next(k for k in KINDS if k.recognises(raw))
    if refused := [name for name in options.given() if name not in kind.takes]:
        raise _refusal(kind, refused, options.source is not None)
    return kind.make(raw, options)


def _refusal(kind: Kind, refused: list[str], asked: bool) -> OptionError:
    """What to say of options that a kind of source does not take; `asked`: --source names that kind."""
    words = [name.replace("_", "-") for name in refused]
    listed = ", ".join(f"--{word}" for word in words)
    read = f"--source {kind.name}" if asked else f"this RAW, which is read as {kind.name}"
    others = [other.name for other in KINDS if other.takes.issuperset(refused)]
    remedy = f" or give another --source ({', '.join(others)})" if others else ""
    pronoun, verb = ("it", "does") if len(words) == 1 else ("them", "do")
    return OptionError(f"{listed} {verb} not go with {read}: leave {pronoun} out{',' if remedy else ''}{remedy}", options=words)
