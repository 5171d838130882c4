"""Hides which source reads a RAW: what it is decides, unless `source` says so.

Each kind of source has one entry in KINDS: its name, how it is recognised, and how it is made.  The first that recognises all of RAW is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcompile.compiler.sources import Source
from mmcompile.compiler.sources.remote import folder_source
from mmcompile.compiler.sources.rows import RowSource
from mmcompile.errors import OptionError

__all__ = ["KINDS", "Kind", "SourceOptions", "open_source"]


@dataclass(frozen=True)
class SourceOptions:
    """What is taken from RAW, and as what.  Each kind of source takes some of these, and refuses the others in one line.

    `source`: the name of a kind, None: what RAW is decides.  `include`, `exclude`, `hidden`, `extensions`: which files (see FolderSource).
    """

    source: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of source: `recognises` looks at RAW (all that were given) without reading much; `make` raises OptionError or SourceError."""

    name: str
    recognises: Callable[[Sequence[str]], bool]
    make: Callable[[Sequence[str], SourceOptions], Source | RowSource]


def _folder(raw: Sequence[str], options: SourceOptions) -> Source:
    if len(raw) > 1:
        raise OptionError("expected one folder of images")
    return folder_source(raw[0], options.include, options.exclude, hidden=options.hidden, extensions=options.extensions)


#: In the order in which they are asked; the last takes what is left, and its scan says what is wrong with it.
KINDS: tuple[Kind, ...] = (Kind("folder", lambda raw: True, _folder),)


def open_source(raw: Sequence[str], options: SourceOptions) -> Source | RowSource:
    """The source that reads these paths or URLs.  Raises OptionError or SourceError."""
    if options.source is not None:
        kind = next((k for k in KINDS if k.name == options.source), None)
        if kind is None:
            raise OptionError(f"source must be one of {', '.join(k.name for k in KINDS)}, not {options.source!r}", options=["source"])
    else:
        kind = next(k for k in KINDS if k.recognises(raw))
    return kind.make(raw, options)
