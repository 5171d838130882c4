"""Hides how the files that name all others are made again: index.json, the generations, the shard tables."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from mmcompile.compiler.output import noted_bytes
from mmcompile.compiler.repair.aside import Recipe, shard_work
from mmcompile.compiler.repair.files import mend_classes
from mmcompile.compiler.repair.relic import Placing, Relic, array_bytes, find_relics, guess_tables, table_of
from mmcompile.compiler.repair.state import Damaged, RecipeError, told
from mmcompile.compiler.reuse import OldShard
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.errors import FormatError
from mmcompile.format.canonical import read_limited
from mmcompile.format.catalog import digest_file, digest_of, kept_files, list_folder
from mmcompile.format.commit import install, write_atomic
from mmcompile.format.index import INDEX_LIMIT, Index, load_classes
from mmcompile.format.npy import file_name, hash_bytes
from mmcompile.format.samples import pair_hash

__all__ = ["mend_indexes", "mend_tables"]


def mend_indexes(d: Damaged) -> bool:
    """index.json from the newest generation that is whole, a generation from index.json; True when something was mended."""
    problems = [p for p in d.report.problems if p.what in ("index", "generation")]
    if not problems:
        return False
    before = len(d.repaired)
    kept, _ = kept_files(d.root)
    whole = {name: data for name in kept if (data := _whole(d.root / "generations" / f"{name}.json", name)) is not None}
    data = _whole(d.root / "index.json", None)
    current = hash_bytes(data) if data is not None else None
    if data is not None and current is not None and (current in kept or (len(whole) == len(kept) and _stands_alone(d, data, whole))):
        if current not in whole:
            _put_generation(d, current, data)
    elif whole:
        newest = max(whole, key=lambda name: (kept[name], name))
        try:
            _put(d, "index.json", whole[newest], None)
        except IsADirectoryError as error:
            d.give_up("index.json", f"something is in its place ({error.strerror}): move it away")
    else:
        d.give_up("index.json", "no generation is left whole that it could be made from")
    for problem in problems:
        if problem.path not in d.repaired and problem.path not in d.missing and (problem.path != "index.json" or len(d.repaired) == before):
            d.give_up(problem.path, "no copy of it is left")
    return len(d.repaired) > before


def _whole(path: Path, name: str | None) -> bytes | None:
    """The bytes of an index that is sound, and is the generation `name`; else None."""
    try:
        data = read_limited(path, INDEX_LIMIT)
        index = Index.from_bytes(data, path)
        return data if (hash_bytes(data) == name if name is not None else index.to_bytes() == data) else None
    except (FormatError, OSError):
        return None


def _stands_alone(d: Damaged, data: bytes, whole: dict[str, bytes]) -> bool:
    """Is index.json a generation of its own that lost its file, rather than a damaged copy of one that is kept?  It has a table of its own then."""
    table = Index.from_bytes(data, d.root).table
    if any(Index.from_bytes(other, d.root).table == table for other in whole.values()):
        return False
    try:
        return digest_file(d.shards / file_name("table", table)) == table
    except (FormatError, OSError):
        return False


def _put_generation(d: Damaged, name: str, data: bytes) -> None:
    """Write a generation's file anew with its time, which tells the age of a generation."""
    path = d.root / "generations" / f"{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        old = path if path.is_file() else d.root / "index.json"
        _put(d, f"generations/{name}.json", data, os.stat(old).st_mtime_ns)
    except (IsADirectoryError, FileExistsError) as error:
        d.give_up(f"generations/{name}.json", f"something is in its place ({error.strerror}): move it away")


def _put(d: Damaged, path: str, data: bytes, mtime_ns: int | None) -> None:
    made = d.scratch / "made.json"
    write_atomic(made, data, durable=False)
    if mtime_ns is not None:
        os.utime(made, ns=(mtime_ns, mtime_ns))
    install(made, d.root / path)
    d.done(path)


def mend_tables(d: Damaged) -> bool:
    """Shard tables, from the files that they named or from RAW; True when one was mended."""
    lost = {file_name("table", index.table): index for index in d.indexes.values() if file_name("table", index.table) in d.bad}
    if not lost:
        return False
    before = len(d.repaired)
    mend_classes(d)
    for name, index in lost.items():
        sound: dict[str, list[str]] = {}
        for entry in list_folder(d.shards):
            if (digest := digest_of(entry.name)) is not None and entry.name not in d.bad and entry.name.endswith(".npy"):
                sound.setdefault(entry.name.partition("-")[0], []).append(digest)
        try:
            recipe = d.recipe(index)
            placing = Placing(index, load_classes(d.root, index))
            relics = find_relics(d.shards, index, placing, sound, functools.partial(_lies, recipe))
            if not _from_files(d, name, index, placing, relics):
                _from_raw(d, name, told(recipe), relics)
        except (RecipeError, FormatError) as error:
            d.give_up(f"shards/{name}", str(error))
    return len(d.repaired) > before


def _lies(recipe: Recipe, key: bytes, digest: str) -> bool:
    try:
        return hash_bytes(recipe.source.read(key)) == digest
    except (OSError, ValueError):
        return False


def _from_files(d: Damaged, name: str, index: Index, placing: Placing, relics: list[Relic]) -> bool:
    named = {pair_hash(pair) for g in d.generations for kind in ("samples", "keys") for pair in g.table[kind].tolist()}
    return any(d.put_bytes(name, array_bytes(table_of(index, shards))) for shards in guess_tables(index, placing, relics, named))


def _from_raw(d: Damaged, name: str, recipe: Recipe, relics: list[Relic]) -> None:
    """The table by the plan of RAW: shards that are there are taken, the others made aside."""
    index = recipe.index
    scan, tasks = d.plan(recipe)
    rejected = d.rejected(index) or set()
    by_keys: dict[tuple[bytes, ...], list[Relic]] = {}
    for relic in relics:
        by_keys.setdefault(relic.keys, []).append(relic)
    shards: dict[int, Relic] = {}
    works = []
    for task in tasks:
        keys = [key for key in scan.keys[task.start : task.stop] if key not in rejected]
        found = by_keys.get(tuple(keys), [])
        if len(found) == 1:
            shards[task.number] = found[0]
        elif keys:
            part = slice(task.start, task.stop)
            labels = None
            if scan.labels is not None:
                labels = np.array([n for n, key in zip(scan.labels[part], scan.keys[part], strict=True) if key not in rejected], "<i8")
            works.append(shard_work(task.number, f"task-{task.number}", keys, labels))
    items = sum(len(work.keys) for work in works)
    d.need_room(noted_bytes(items, index.row_bytes))
    made: list[tuple[str, Path]] = []

    def on_made(work: ShardWork, seal: Seal, folder: Path) -> None:
        if seal.rows:
            shards[work.task.number] = Relic(seal.files, seal.rows, ())
        for kind, digest in seal.files.items():
            file = file_name(kind, digest)
            if file not in d.bad and (d.shards / file).exists():
                (folder / file).unlink(missing_ok=True)
            else:
                made.append((file, folder / file))

    known = {pair_hash(pair) for g in d.generations for pair in g.table["samples"].tolist()}  # old_shards takes these, or knows better
    free = [relic for relic in relics if relic.files["samples"] not in known]
    kinds = frozenset(recipe.marks.formats)
    old = [OldShard(str(d.shards), index.fields, relic.files, relic.rows, kinds, sha256=index.sha256) for relic in free]
    outcome = d.make(recipe, d.old_shards(recipe) + old, works, on_made)
    table = table_of(index, [shards[number] for number in sorted(shards)])
    failures = [(key, None) for key in sorted(outcome.failures)]
    if not failures and d.put_bytes(name, array_bytes(table)):
        for file, path in made:
            if path.exists():
                d.put_file(file, path)
    elif f"shards/{name}" not in d.missing:
        rows = sum(shard.rows for shard in shards.values())
        reason = f"RAW as it is now makes another table: {rows:,} rows in {len(shards):,} shards, it had {index.samples:,} in {index.shards:,}"
        d.give_up(f"shards/{name}", "sources cannot be read" if failures else reason, failures, recipe.versions())
