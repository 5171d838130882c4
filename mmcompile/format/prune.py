"""Hides what may be deleted: old generations, and files that provably are ours and that nothing kept needs.

The order makes a crash harmless: generation files go first, so that a reader asking for one is told so; what is left of its files then belongs to no
generation, and the next prune takes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmcompile.errors import BuildError, CorruptShardError, FormatError, OptionError
from mmcompile.format.canonical import canonical, name_to_json, parse, read_limited
from mmcompile.format.catalog import digest_file, digest_of, kept_files, list_folder, load_table, named_files, single_files
from mmcompile.format.commit import sync_folder
from mmcompile.format.index import BLOB_LIMIT, INDEX_LIMIT, Index, load_index
from mmcompile.format.lock import Lock
from mmcompile.format.mirror import Mirror, mirrored
from mmcompile.format.npy import hash_bytes
from mmcompile.format.store import is_url, on_disk
from mmcompile.format.storelock import StoreLock

__all__ = ["PruneReport", "prune"]


@dataclass(frozen=True)
class PruneReport:
    """What `prune` deleted (`deleted`), or would delete.

    `generations` are (name, bytes of its file, mtime in seconds), oldest first; `files` are (name in shards/, bytes).  `others` are names in
    shards/ and generations/ that are not ours to delete: another form, no regular file, or content that does not hash to the name.
    """

    root: str
    current: str
    kept: tuple[str, ...]
    generations: tuple[tuple[str, int, float], ...]
    files: tuple[tuple[str, int], ...]
    others: tuple[str, ...]
    deleted: bool

    @property
    def bytes(self) -> int:
        return sum(size for _, size, _ in self.generations) + sum(size for _, size in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "prune",
            "root": name_to_json(self.root),
            "current": self.current,
            "kept": list(self.kept),
            "generations": [{"name": name, "bytes": size, "modified": modified} for name, size, modified in self.generations],
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "bytes": self.bytes,
            "others": [name_to_json(name) for name in self.others],
            "deleted": self.deleted,
        }


def prune(root: str | Path, keep: int = 1, *, delete: bool) -> PruneReport:
    """Delete (or with `delete=False` only list) all but the `keep` newest generations, and the files that none of those names.

    The current generation is always kept.  Age is the mtime of the generation's file.  Deletes under the lock of the folder.  Raises FormatError,
    with nothing deleted, where a kept generation, its table or a seal of an unfinished build cannot be read, as what they name is then unknown;
    BuildError where another run is at work.  Of a URL, images that are to go are fetched first, to see that they are ours.
    """
    if keep < 1:
        raise OptionError(f"keep must be at least 1, not {keep}: the current generation is never deleted")
    root = on_disk(root)
    if is_url(root):
        return _prune_store(str(root), keep, delete)
    root = Path(os.path.abspath(root))
    load_index(root)
    if not delete:
        return _plan(root, keep)
    (root / ".build").mkdir(exist_ok=True)
    with Lock(root / ".build" / "lock") as lock:
        report = _plan(root, keep, deleted=True)
        if not lock.still_held():
            raise BuildError(f"{root}: .build was removed while prune was at work; nothing was deleted, run it again")
        for folder, names in (("generations", [f"{g[0]}.json" for g in report.generations]), ("shards", [f[0] for f in report.files])):
            for name in names:
                (root / folder / name).unlink(missing_ok=True)
            if names:
                sync_folder(root / folder)
        return report


def _prune_store(url: str, keep: int, delete: bool) -> PruneReport:
    def run(mirror: Mirror) -> PruneReport:
        load_index(mirror.folder)
        if not delete:
            return _plan(mirror.folder, keep, at_hand=mirror.brought)
        with StoreLock(mirror.store, logging.getLogger(__name__).warning) as lock:
            mirror.pull()
            report = _plan(mirror.folder, keep, deleted=True, at_hand=mirror.brought)
            if not lock.still_held():
                raise BuildError(f"{url}: another run took the lock while prune was at work; nothing was deleted, run it again")
            mirror.store.delete(f"generations/{name}.json" for name, _, _ in report.generations)
            mirror.store.delete(f"shards/{name}" for name, _ in report.files)
        return report

    return replace(mirrored(url, run), root=url)


def _plan(
    root: Path, keep: int, deleted: bool = False, at_hand: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()
) -> PruneReport:
    index, current = load_index(root)
    ages, misnamed = kept_files(root)
    others = [f"generations/{name}" for name in misnamed]
    newest = sorted((name for name in ages if name != current), key=lambda n: (-ages[n], n))
    sizes: dict[str, int] = {}
    for name in newest:
        sizes[name] = len(_generation(root, name))
    kept, old = [current, *newest[: keep - 1]], newest[keep - 1 :]
    needed = _seals(root)
    for name in kept:
        needed |= _named(root, name, index if name == current else Index.from_bytes(_generation(root, name), root / "generations" / f"{name}.json"))
    files = []
    for entry in list_folder(root / "shards"):
        if entry.name in needed:
            continue
        with at_hand(root / "shards" / entry.name):
            ours = _is_ours(root / "shards" / entry.name)
        if ours:
            files.append((entry.name, entry.stat(follow_symlinks=False).st_size))
        else:
            others.append(f"shards/{entry.name}")
    generations = tuple((name, sizes[name], ages[name]) for name in reversed(old))
    return PruneReport(str(root), current, tuple(kept), generations, tuple(files), tuple(others), deleted)


def _generation(root: Path, name: str) -> bytes:
    path = root / "generations" / f"{name}.json"
    try:
        data = read_limited(path, INDEX_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptShardError(f"{path}: vanished while prune was at work; run it again", path=str(path)) from None
    if hash_bytes(data) != name:
        raise CorruptShardError(
            f"{path}: its content does not match its name, so what it names is unknown and nothing was deleted; "
            f"run `mmcompile verify {root}`, which says how to mend it, or remove this file",
            path=str(path),
        )
    return data


def _named(root: Path, name: str, index: Index) -> set[str]:
    return {file for _, file in single_files(index)} | {file for _, _, file in named_files(load_table(root, index, name))}


def _seals(root: Path) -> set[str]:
    """The files that sealed shards of an unfinished build name: each seal is {"seal": {"files": names, …}, "hash": of the seal's canonical JSON}."""
    names: set[str] = set()
    for entry in list_folder(root / ".build" / "seals"):
        if not entry.name.endswith(".json"):
            continue
        path = Path(entry.path)
        try:
            value = parse(read_limited(path, BLOB_LIMIT), path)
        except FileNotFoundError:
            continue
        seal = value.get("seal") if isinstance(value, dict) else None
        found = seal.get("files") if isinstance(seal, dict) and value.get("hash") == hash_bytes(canonical(seal)) else None
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise FormatError(
                f"{path}: damaged, so what an unfinished build needs is unknown and nothing was deleted; remove this file, its shard is made again",
                path=str(path),
            )
        names.update(found)
    return names


def _is_ours(path: Path) -> bool:
    digest = digest_of(path.name)
    try:
        return digest is not None and digest_file(path) == digest
    except (FileNotFoundError, FormatError):
        return False
