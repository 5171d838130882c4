"""Hides what a folder that holds files of several kinds is taken for: what is most of it by far; where nothing is, nobody guesses."""

from __future__ import annotations

import os
import re
from collections import Counter

from mmcompile.compiler.formats import EXTENSIONS
from mmcompile.compiler.sources.names import show
from mmcompile.text import counted

__all__ = ["IDX_NAME", "PACKED", "PARQUETS", "SUFFIXES", "is_table", "leads", "why_unclear"]

#: What tables are called, and those that are packed, which are none to be read.
TEXTS, PARQUETS = (".csv", ".tsv"), (".parquet", ".pq")
SUFFIXES = (*TEXTS, *PARQUETS)
PACKED = tuple(f"{suffix}{packed}" for suffix in TEXTS for packed in (".gz", ".bz2", ".xz", ".zst", ".zip"))
#: What the files of MNIST, and of others in its form, are called.
IDX_NAME = re.compile(r"(?P<split>[A-Za-z0-9]+)[-_.](?P<what>images|labels)[-_.]idx[13][-_.]ubyte(\.gz)?\Z")
#: Entries of a folder after which no other folder in it is looked into.
_LOOKED_AT = 4096
#: So many times as many files of one kind as of any other make a folder one of these.
_CLEAR = 2
#: The kinds of sources that a folder may be by its files, as people call these.
_WORDS = {
    "folder": "images",
    "table": "tables",
    "npy-folder": "arrays (.npy)",
    "idx": "files of IDX",
    "tar": "archives (.tar)",
    "zip": "archives (.zip)",
}


def is_table(name: str) -> bool:
    """Is a file of this name a table?"""
    return name.lower().endswith(SUFFIXES) and not name.startswith((".", "_"))


def leads(folder: str, kind: str) -> bool:
    """Is this folder one of that kind ("folder" of images, "table", "npy-folder", "idx", …): has it at most half as many files of any other?"""
    return _leader(_counts(folder)) == kind


def why_unclear(folder: str, kind: str) -> str:
    """What to say of a folder that holds files of several kinds, and is not by far most of it of the one that it would be taken for; else ""."""
    found = _counts(folder)
    if len(found) < 2 or _leader(found) == kind:
        return ""
    ordered = sorted(found, key=lambda kind: (-found[kind], kind))
    words = [counted(found[kind], _WORDS[kind]) for kind in ordered]
    holds = f"{', '.join(words[:-1])} and {words[-1]}"
    says = " or ".join(f"--source {kind}" for kind in ordered)
    return f"{show(folder)}: holds {holds}: say which of them are meant with {says}, or keep them in folders of their own"


def _leader(found: Counter[str]) -> str:
    kind, most = max(found.items(), key=lambda item: item[1], default=("", 0))
    return kind if all(most >= _CLEAR * n for other, n in found.items() if other != kind) else ""


def _counts(folder: str) -> Counter[str]:
    """How many files of each kind there are, by their names; packed tables count where there is nothing else, files of compiled datasets never."""
    found, seen = Counter[str](), 0
    for _, below, names in os.walk(folder):
        if "index.json" in names and "shards" in below:
            below.clear()
            continue
        below[:] = sorted(name for name in below if not name.startswith((".", "_")))
        found.update(filter(None, map(_kind_of, names)))
        seen += len(names) + len(below)
        if seen > _LOOKED_AT:
            break
    packed = found.pop("packed", 0)
    return found or Counter({"table": packed} if packed else {})


def _kind_of(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower()
    if name.startswith("."):
        return ""
    if suffix in EXTENSIONS:
        return "folder"
    if suffix == ".npy":
        return "npy-folder"
    if IDX_NAME.match(name):
        return "idx"
    if name.lower().endswith(PACKED):
        return "packed"
    if is_table(name):
        return "table"
    return "tar" if suffix in (".tar", ".tgz") or name.lower().endswith(".tar.gz") else "zip" if suffix == ".zip" else ""
