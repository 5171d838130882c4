"""Hides nothing: what `verify` reports, for people, for programs and for the repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmcompile.format.canonical import name_to_json
from mmcompile.format.index import Index

__all__ = ["ROWS_LISTED", "Problem", "VerifyReport", "from_a_folder"]

#: Bad rows (and their sources) that one problem lists; `bad_rows` counts all of them.
ROWS_LISTED = 1000


@dataclass(frozen=True)
class Problem:
    """One bad file, for one shard that it belongs to.

    `what` is a field's name, or "samples", "keys", "hashes", "table", "classes", "groups", "rejects", "generation", "index".  `kind` is "missing",
    "short", "long", "changed", "swapped" (it holds another known file's bytes) or "unreadable" (no regular file, an I/O error, or sound bytes that
    are not what the index says).  `generations` name the file, the current one first; `shard`, `rows` and `sources` are those of the first.  `rows`
    (of the whole dataset, [0, n)) and `sources` (their keys) list the first 1,000 bad rows where single rows are bad; both are empty where all
    `bad_rows` rows, [start, stop), are: those of the shard, or, where rows have no keys, of blocks of it that hold the damage.
    """

    path: str
    kind: str
    message: str
    what: str
    generations: tuple[str, ...] = ()
    shard: int | None = None
    start: int = 0
    stop: int = 0
    bad_rows: int = 0
    rows: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in ("kind", "message", "what", "shard", "start", "stop", "bad_rows")}
        out |= {"path": name_to_json(self.path), "generations": list(self.generations), "rows": list(self.rows)}
        return out | {"sources": [name_to_json(s) for s in self.sources]}


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.  `ok` when every byte is as it was written.

    `repair`: was the current generation built from one folder of images, so that `--repair` can mend it?  `files` and `bytes` were read.  `extra` are
    files of our form that no kept generation names (older builds left them: `prune` removes them), `misnamed` are names of another form; both are
    relative to the root, and no problem.
    """

    root: str
    generation: str | None
    generations: tuple[str, ...]
    samples: int
    repair: bool
    files: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...] = ()
    extra: tuple[str, ...] = ()
    misnamed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in ("generation", "samples", "repair", "files", "bytes", "seconds", "ok")}
        out |= {"command": "verify", "root": name_to_json(self.root), "generations": list(self.generations)}
        out |= {"problems": [p.to_json() for p in self.problems]}
        return out | {name: [name_to_json(n) for n in getattr(self, name)] for name in ("extra", "misnamed")}


def from_a_folder(index: Index) -> bool:
    """Was a dataset built from one folder of images, as far as its settings say?  Else its files are not mended one by one, but made anew."""
    found = index.settings.get("source")
    source: dict[str, Any] = found if isinstance(found, dict) else {}
    return index.keyed and source.get("kind", "folder") == "folder" and "roots" not in source
