"""Hides what to say of a folder whose index.json is missing or damaged: what is left of the dataset, and how it is put back."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from pathlib import Path

from mmcompile.errors import FormatError
from mmcompile.format.canonical import HASH, read_limited
from mmcompile.format.fields import INDEX_LIMIT
from mmcompile.format.npy import hash_bytes

__all__ = ["is_left_of_one", "newest_whole", "not_a_dataset", "put_back"]


def newest_whole(root: Path) -> str | None:
    """The newest generation whose file is whole, so that a lost index.json can be made from it; None where there is none."""
    ages: dict[str, float] = {}
    with contextlib.suppress(OSError), os.scandir(root / "generations") as entries:
        for entry in entries:
            name, ending = os.path.splitext(entry.name)
            if HASH.match(name) and ending == ".json" and entry.is_file(follow_symlinks=False):
                ages[name] = entry.stat(follow_symlinks=False).st_mtime
    for name in sorted(ages, key=lambda name: (ages[name], name), reverse=True):
        with contextlib.suppress(FormatError, OSError):
            if hash_bytes(read_limited(root / "generations" / f"{name}.json", INDEX_LIMIT)) == name:
                return name
    return None


def put_back(root: Path) -> str:
    """What to do where index.json is lost: copy the newest generation that is whole to its place, or what else is left."""
    name = newest_whole(root)
    if name is None:
        return f"no generation is left whole that it could be made from: build again with `mmcompile build RAW {root}`"
    copied = shlex.join(["cp", str(root / "generations" / f"{name}.json"), str(root / "index.json")])
    return f"put it back with `{copied}`, then run `mmcompile verify {root}`"


def not_a_dataset(root: Path) -> str:
    """What to say of a folder without index.json."""
    if not os.path.exists(root):
        near = ""
        with contextlib.suppress(OSError):
            there = [name for name in os.listdir(root.parent) if (root.parent / name / "index.json").is_file()]
            near = next((f"did you mean {root.parent / name}, or " for name in difflib.get_close_matches(root.name, sorted(there), 1)), "")
        return f"{root}: no such folder; {near}build one with `mmcompile build RAW {root}`"
    if not os.path.isdir(root):
        return f"{root}: not a folder; expected the OUT of `mmcompile build RAW OUT`"
    if is_left_of_one(root):
        return f"{root}: its index.json is missing; {put_back(root)}"
    if os.path.isdir(root / ".build"):
        said = f"{root}: its build is not finished (no index.json); run `mmcompile build RAW {root}` again, it goes on where it stopped"
        rejects = root / ".build" / "rejects.jsonl"
        return said + (
            f"; images were rejected (each with its reason in {rejects}), and --max-rejects allows them"
            if rejects.is_file() and rejects.stat().st_size
            else ""
        )
    return f"{root}: not a dataset (no index.json); build one with `mmcompile build RAW OUT`"


def is_left_of_one(root: Path) -> bool:
    """Has something been published here, by what lies in the folder beside index.json: generations, or a shard table?"""
    for folder, form in (("generations", r"[0-9a-f]{32}\.json"), ("shards", r"table-[0-9a-f]{32}\.npy")):
        with contextlib.suppress(OSError), os.scandir(root / folder) as entries:
            if any(re.fullmatch(form, entry.name) for entry in entries):
                return True
    return False
