"""Hides what OUT may be, and how finished shards become the published dataset."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcompile.compiler.seals import Seal
from mmcompile.errors import BuildError, FormatError, OutputExistsError
from mmcompile.format.canonical import HASH, canonical, name_to_json, parse
from mmcompile.format.index import LIST_LIMIT, Index, Split, load_index, publish
from mmcompile.format.npy import file_name, read_array, save_array, save_blob
from mmcompile.format.samples import combine_statistics, hash_pair, pair_hash

if TYPE_CHECKING:
    from mmcompile.compiler.driver import _Build

__all__ = ["Published", "check_output", "clean_up", "describe_changes", "free_bytes", "publish_shards"]

_OURS = frozenset({"index.json", "generations", "shards", ".build"})


@dataclass(frozen=True)
class Published:
    """What was published."""

    generation: str
    shards: int
    bytes: int
    flags: dict[str, int]
    rejects_file: str | None


def check_output(out: Path, raw: str) -> None:
    """OUT is a new folder, an empty one, or one of ours, and not RAW or inside it.  Raises OutputExistsError; touches nothing."""
    real, real_raw = os.path.realpath(out), os.path.realpath(raw)
    if real == real_raw or real.startswith(real_raw.rstrip("/") + "/"):
        raise OutputExistsError(f"{out}: inside RAW ({raw}), which is never written; choose an OUT outside it", path=str(out))
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputExistsError(f"{out}: exists and is not a folder; choose another OUT", path=str(out))
    names = {entry.name for entry in os.scandir(out)}
    foreign = sorted(names - _OURS)
    if "index.json" in names:
        try:
            data = (out / "index.json").read_bytes()[: 1 << 21]
            ours = isinstance(document := parse(data, out / "index.json"), dict) and document.get("format") == "mmcompile"
        except FormatError:
            ours = not foreign and bool(names & {"generations"})
        if not ours:
            raise OutputExistsError(f"{out}: holds an index.json that is not ours; choose another OUT", path=str(out))
        load_index(out)
    elif foreign:
        shown = ", ".join(repr(n) for n in foreign[:3])
        raise OutputExistsError(f"{out}: holds {len(foreign)} other things ({shown}); choose a new or empty folder for OUT", path=str(out))


def free_bytes(out: Path) -> int | None:
    """Bytes free for us on the disk that OUT is, or will be, on."""
    folder = out
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def describe_changes(before: dict[str, Any] | None, now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Each setting that differs, as "name: before -> now"."""
    if before is None:
        return
    for name in sorted(set(before) | set(now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from describe_changes(old, new, f"{name}." if name != "preprocess" else "")
        elif canonical(old) != canonical(new):
            yield f"{prefix}{name}: {old} -> {new}"


def publish_shards(build: _Build, rejects: list[dict[str, Any]]) -> Published:
    """Write the shard table, lists and index of what is sealed and kept, and make it the current generation."""
    shards, scratch, scan = build.out / "shards", build.job.scratch, build.scan
    parts: list[tuple[dict[str, str], int, list[dict[str, Any]]]] = []
    flags: Counter[str] = Counter()
    for task in build.tasks:
        whole, seal = build.whole.get(task.number), build.sealed.get(task.number)
        if whole is not None:
            flags.update(whole.flags)
            parts.append((whole.files, whole.rows, whole.sums() if whole.rows else []))
        elif seal is not None:
            flags.update(seal.flags or {})
            parts.append((seal.files, seal.rows, seal.sums or []))
    parts = [part for part in parts if part[1]]
    samples = sum(rows for _, rows, _ in parts)
    statistics = combine_statistics([sums for _, _, sums in parts], build.preprocess.scale == "unit")
    fields = build.fields
    if build.preprocess.normalize == "auto":
        if statistics is None or min(statistics["std"]) <= 0:
            raise BuildError(f"{build.out}: --normalize auto needs channels that vary; a standard deviation is 0 or unknown: give --mean and --std")
        fields = (replace(fields[0], normalize=(tuple(statistics["mean"]), tuple(statistics["std"]))), *fields[1:])
    classes: tuple[str, ...] | None = scan.classes
    classes_file = None
    if classes is not None and len(classes) > LIST_LIMIT:
        classes_file = save_blob(shards, "classes", [canonical([name_to_json(c) for c in classes])], scratch, ".json")
        classes = None
    rejects_file = save_blob(shards, "rejects", [canonical(line) for line in rejects], scratch, ".jsonl") if rejects else None
    index = Index(
        fields=fields,
        splits=(Split("all", 0, samples),),
        samples=samples,
        shards=len(parts),
        table="0" * 32,
        classes=classes,
        classes_file=classes_file,
        settings=build.settings,
        versions=build.versions,
        statistics={} if statistics is None else {"all": {"image": statistics}},
        rejects=len(rejects),
        rejects_file=rejects_file,
    )
    table = np.zeros(len(parts), index.table_dtype())
    for i, (files, rows, _) in enumerate(parts):
        table[i]["rows"] = rows
        for name, digest in files.items():
            table[i][name] = hash_pair(digest)
    index = replace(index, table=save_array(shards, "table", table, scratch))
    generation = publish(build.out, index)
    named = [shards / file_name("table", index.table), build.out / "index.json", build.out / "generations" / f"{generation}.json"]
    named += [shards / file_name(name, digest) for files, _, _ in parts for name, digest in files.items()]
    if classes_file is not None:
        named.append(shards / file_name("classes", classes_file, ".json"))
    rejects_path = None
    if rejects_file is not None:
        named.append(shards / file_name("rejects", rejects_file, ".jsonl"))
        rejects_path = str(named[-1])
    total = sum(os.path.getsize(path) for path in set(named))
    return Published(generation, len(parts), total, dict(flags), rejects_path)


def clean_up(out: Path, before: dict[str, Seal], now: dict[int, Seal]) -> None:
    """After publishing: remove the seals, and the files that they named and no generation names."""
    candidates = {name for seal in [*before.values(), *now.values()] for name in seal.names()}
    named: set[str] = set()
    for path in (out / "generations").glob("*.json"):
        if not HASH.match(path.stem):
            continue
        try:
            index, _ = load_index(out, path.stem)
            table = read_array(out / "shards" / file_name("table", index.table), index.table_dtype(), (index.shards,))
        except (FormatError, FileNotFoundError):
            return  # what this generation names is unknown: delete nothing
        for name in table.dtype.names or ():
            if name != "rows":
                named.update(file_name(name, pair_hash(pair)) for pair in table[name])
    for path in (out / ".build" / "seals").glob("*.json"):
        path.unlink(missing_ok=True)
    for name in candidates - named:
        path = out / "shards" / name
        path.unlink(missing_ok=True)
