"""Hides what OUT may be, and how finished shards become the published dataset."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sealing import stands
from mmcompile.compiler.sources.splits import train_of
from mmcompile.compiler.trace import PLAIN, Trace
from mmcompile.errors import BuildError, FormatError, MMCompileError, OutputExistsError, ResumeError
from mmcompile.format.canonical import canonical, name_to_json, parse
from mmcompile.format.catalog import digest_of, kept_files, list_folder, load_table, named_files, single_files
from mmcompile.format.commit import sync_folder
from mmcompile.format.index import LIST_LIMIT, Field, Index, Split, load_index, publish
from mmcompile.format.npy import file_bytes, file_name, save_array, save_blob
from mmcompile.format.samples import combine_statistics, hash_pair
from mmcompile.format.store import Store, is_url

__all__ = [
    "Contents",
    "Part",
    "Published",
    "check_output",
    "check_room",
    "clean_up",
    "describe_changes",
    "describe_published",
    "disk_bytes",
    "draft_index",
    "free_bytes",
    "is_inside",
    "lists_of",
    "make_scratch",
    "noted_bytes",
    "open_output",
    "publish_shards",
    "refuse_removed",
    "singles_stand",
    "table_of",
    "told_changes",
    "unless_removed",
]

#: Bytes of provenance, key and label of one row, more or less.
_NOTED = 256
#: Characters of a setting that are shown where it differs.
_LINE = 60
#: Settings that a line names of those that differ.
_CHANGES = 6
#: A file that a commit had not yet given its name when it was killed.
_TEMPORARY = r"\..{1,100}\.[0-9a-f]{16}\.tmp"
#: What OUT and its folders hold, with such leftovers.
_CONTENT = {
    ".": re.compile(r"index\.json|generations|shards|\.build|\.index\.json\.[0-9a-f]{16}\.tmp"),
    "shards": re.compile(rf"[a-z][a-z0-9_]*-[0-9a-f]{{32}}\.(npy|json|jsonl)|{_TEMPORARY}"),
    "generations": re.compile(rf"[0-9a-f]{{32}}\.json|{_TEMPORARY}"),
    ".build": re.compile(rf"lock|seals|tmp|rows|settings\.json|exclude\.json|stat-cache|rejects\.jsonl|plan|parts|{_TEMPORARY}"),
    ".build/seals": re.compile(rf"[0-9a-f]{{32}}\.json|{_TEMPORARY}"),
}


class Sealed(Protocol):
    """The record of a finished shard."""

    def names(self) -> list[str]:
        """The files in shards/ that it stands for."""


@dataclass(frozen=True)
class Part:
    """One finished shard: its files by kind, rows, sums by field, and how many rows carry each flag."""

    files: dict[str, str]
    rows: int
    sums: dict[str, list[dict[str, Any]]]
    flags: dict[str, int]


@dataclass(frozen=True)
class Contents:
    """All that a generation is made of: finished shards in order, rejects in order, and what the index says.

    `counts` are the fields whose pixels count as they are, not from 0 to 1.  `auto` are the fields whose normalisation is that of their own
    statistics.  `groups` are names and where the rows of each end; they stand in the index where they say something.
    """

    parts: list[Part]
    rejects: list[dict[str, Any]]
    fields: tuple[Field, ...]
    splits: tuple[Split, ...]
    lists: dict[str, bytes]
    classes: tuple[str, ...] | None
    settings: dict[str, Any]
    versions: dict[str, str]
    counts: frozenset[str] = frozenset()
    auto: tuple[str, ...] = ()
    keyed: bool = True
    groups: tuple[tuple[str, int], ...] = ()
    revision: int = 1
    trace: Trace = PLAIN
    order: str = ""


@dataclass(frozen=True)
class Published:
    """What was published."""

    generation: str
    shards: int
    bytes: int
    flags: dict[str, int]
    rejects_file: str | None
    splits: tuple[Split, ...]


def is_inside(out: str | Path, raw: str | Path) -> bool:
    """Is OUT the folder RAW, or in it, whatever links lead there?  Either may be a URL."""
    stores = [Store(str(place)) if is_url(place) else None for place in (out, raw)]
    if stores[0] is not None and stores[1] is not None and stores[1].holds(stores[0]):
        return True
    disks = [place if store is None else store.folder_on_disk() for place, store in zip((out, raw), stores, strict=True)]
    if disks[0] is None or disks[1] is None:
        return False
    out, raw = disks[0], disks[1]
    real, real_raw = os.path.realpath(out), os.path.realpath(raw)
    return real == real_raw or real.startswith(real_raw.rstrip("/") + "/")


def make_scratch(out: Path) -> Path:
    """A new folder for unfinished files, on the disk of OUT; what dead runs left there goes first, as the caller holds the lock."""
    folder = out / ".build" / "tmp"
    if folder.is_symlink():
        raise BuildError(f"{folder}: a link, expected a folder of a build; remove the link, and run the same command again")
    shutil.rmtree(folder, ignore_errors=True)
    scratch = folder / secrets.token_hex(8)
    scratch.mkdir(parents=True)
    return scratch


def open_output(out: Path) -> Path:
    """Make OUT ready for shards, as durable as they will be, and return a new folder for unfinished ones.  The caller holds the lock."""
    seals = out / ".build" / "seals"
    if seals.is_symlink():
        raise BuildError(f"{seals}: a link, expected a folder of a build; remove the link, and run the same command again")
    scratch = make_scratch(out)
    _remove_temporaries(out)
    (out / "shards").mkdir(exist_ok=True)
    for path in (out, out.parent):  # the files in it are made durable one by one, so the folders must be, too
        with contextlib.suppress(OSError):
            sync_folder(path)
    return scratch


def check_output(out: Path, roots: Iterable[str], url: str | None = None) -> None:
    """OUT is a new folder, an empty one, or one of ours, and none of the roots of RAW or inside one.  Raises OutputExistsError; touches nothing.

    `url`: where OUT is, when `out` is a folder that stands for it.
    """
    for raw in roots:
        if is_inside(url or out, raw):
            raise OutputExistsError(f"{out}: inside RAW ({raw}), which is never written; choose an OUT outside it", path=str(out))
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputExistsError(f"{out}: exists and is not a folder; choose another OUT", path=str(out))
    names = {entry.name for entry in os.scandir(out)}
    foreign = sorted(name for name in names if not _CONTENT["."].fullmatch(name))
    for name in ("shards", "generations", ".build"):
        if name not in names:
            continue
        if os.path.islink(out / name) or not os.path.isdir(out / name):
            raise OutputExistsError(
                f"{out / name}: expected a folder of a dataset, found a file or a link; choose a new or empty folder for OUT", path=str(out)
            )
    if "index.json" in names:
        try:
            data = (out / "index.json").read_bytes()[: 1 << 21]
            ours = isinstance(document := parse(data, out / "index.json"), dict) and document.get("format") == "mmcompile"
        except FormatError:
            ours = not foreign and bool(names & {"generations"})
        if not ours:
            raise OutputExistsError(f"{out}: holds an index.json that mmcompile did not write; choose a new or empty folder for OUT", path=str(out))
        load_index(out, alone=True)
        return
    for folder in ("shards", "generations", ".build"):
        if folder not in names:
            continue
        foreign += [f"{folder}/{entry.name}" for entry in os.scandir(out / folder) if not _CONTENT[folder].fullmatch(entry.name)]
    if foreign:
        shown = ", ".join(repr(n) for n in foreign[:3])
        raise OutputExistsError(
            f"{out}: holds what mmcompile did not write ({shown}, {len(foreign):,} in all); choose a new or empty folder for OUT", path=str(out)
        )


def _remove_temporaries(out: Path) -> None:
    """Delete what killed runs left half written."""
    for folder, allowed in _CONTENT.items():
        path = out / folder
        if not path.is_dir() or (folder != "." and path.is_symlink()):
            continue
        for entry in list(os.scandir(path)):
            if entry.name.endswith(".tmp") and allowed.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def free_bytes(out: Path) -> int | None:
    """Bytes free for us on the disk that OUT is, or will be, on."""
    found = _disk(out)
    return None if found is None else found.f_bavail * found.f_frsize


def disk_bytes(out: Path) -> int | None:
    """Bytes of the whole disk that OUT is, or will be, on; None where that cannot be told."""
    found = _disk(out)
    return None if found is None else found.f_blocks * found.f_frsize or None


def _disk(out: Path) -> os.statvfs_result | None:
    folder = out
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return os.statvfs(folder)
    except OSError:
        return None


def noted_bytes(items: int, row_bytes: int) -> int:
    """Bytes of so many rows that have sources, and of what is noted of each."""
    return items * (row_bytes + _NOTED)


def check_room(out: Path, need: int, items: str, room: int | None, *, whole: bool = False) -> None:
    """Raises BuildError where the `need` bytes of `items` are more than the `room` that is free; `whole`: that the disk has in all, full or not."""
    if room is not None and need > room:
        found, remedy = ("its disk has {:,} in all", "check that there are so many") if whole else ("{:,} are free", "free some space")
        raise BuildError(
            f"{out}: {need:,} bytes are needed for {items}, {found.format(room)}; nothing was written: {remedy}, or choose a smaller size or a "
            "narrower --dtype",
            needed=need,
            **{"disk" if whole else "free": room},
        )


def refuse_removed(out: Path, still_held: Callable[[], bool], error: OSError | None = None) -> None:
    """Raises BuildError where somebody deleted `.build` from under the run that holds its lock; `error`: what told that something is amiss."""
    if not still_held():
        raise BuildError(f"{out}: .build was removed while the build ran; nothing is published: run the same command again") from error


@contextlib.contextmanager
def unless_removed(out: Path, still_held: Callable[[], bool]) -> Iterator[None]:
    """Work below `.build`: a system call that fails because somebody deleted that is said to have failed for that."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, MMCompileError):
            refuse_removed(out, still_held, error)
        raise


def describe_changes(before: dict[str, Any] | None, now: dict[str, Any]) -> Iterator[str]:
    """Each setting that differs, as "name: before -> now"; between sources of two kinds those that both have."""
    if before is not None:
        kinds = [found.get("kind") if isinstance(found := settings.get("source"), dict) else None for settings in (before, now)]
        yield from _changes(before, now, "", None not in kinds and kinds[0] != kinds[1])


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str, common: bool) -> Iterator[str]:
    for name in sorted(set(before) & set(now) if common else set(before) | set(now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{name}." if name != "preprocess" else prefix, common)
        elif canonical(old) != canonical(new):
            yield f"{prefix}{name}: {_shown(old)} -> {_shown(new)}"


def told_changes(out: Path, changes: Sequence[str]) -> str:
    """These changes in a line, a few of them and how many more there are."""
    more = f" and {len(changes) - _CHANGES:,} more" if len(changes) > _CHANGES else ""
    return f"differs from what is in {out}: {'; '.join(changes[:_CHANGES])}{more}"


def _shown(value: Any) -> str:
    """A setting in a line for people: a long list by its length."""
    text = str(value)
    if len(text) <= _LINE:
        return text
    return f"{len(value):,} entries" if isinstance(value, list) else text[:_LINE] + "…"


def publish_shards(out: Path, scratch: Path, contents: Contents) -> Published:
    """Write the shard table, lists and index of what is sealed and kept, and make it the current generation."""
    shards, parts = out / "shards", [part for part in contents.parts if part.rows]
    samples = sum(part.rows for part in parts)
    statistics = _statistics(contents, parts)
    for spec in contents.fields:
        chosen = _normalizing(contents, statistics, spec)
        if spec.name in contents.auto and (chosen is None or min(chosen["std"]) <= 0):
            raise BuildError(
                f"{out}: --normalize auto needs channels that vary; a standard deviation of {spec.name} is 0 or unknown{_which(chosen)}: "
                "give --mean and --std"
            )
    files = {name: save_blob(shards, kind, [data], scratch, suffix) for name, (kind, suffix, data) in lists_of(contents).items()}
    index = draft_index(contents, samples, len(parts), statistics, files)
    index = replace(index, table=save_array(shards, "table", table_of(index, [(part.rows, part.files) for part in parts]), scratch))
    _check_files(out, index.fields, parts)
    return describe_published(out, index, publish(out, index), parts)


def lists_of(contents: Contents) -> dict[str, tuple[str, str, bytes]]:
    """What of a generation is a file of its own because it may be long, by a name: its kind, how its own name ends, and its bytes."""
    found: dict[str, tuple[str, str, bytes]] = {digest: ("classes", ".json", data) for digest, data in contents.lists.items()}
    if contents.classes is not None and len(contents.classes) > LIST_LIMIT:
        found["classes"] = ("classes", ".json", canonical([name_to_json(c) for c in contents.classes]))
    if contents.rejects:
        found["rejects"] = ("rejects", ".jsonl", b"".join(canonical(line) for line in contents.rejects))
    if len(contents.groups) > 1 or any(name for name, _ in contents.groups):
        found["groups"] = ("groups", ".json", canonical([[name_to_json(name), stop] for name, stop in contents.groups]))
    return found


def draft_index(contents: Contents, samples: int, shards: int, statistics: Mapping[str, Mapping[str, Any]], files: dict[str, str]) -> Index:
    """The index of so many samples in so many shards, all but the name of its table; `files` are the hashes of `lists_of`.

    `statistics` are those of each split, and of "all", by field.
    """
    return Index(
        fields=tuple(_normalized(spec, _normalizing(contents, statistics, spec)) for spec in contents.fields),
        splits=contents.splits,
        samples=samples,
        shards=shards,
        table="0" * 32,
        classes=None if "classes" in files else contents.classes,
        classes_file=files.get("classes"),
        settings=contents.settings,
        versions=contents.versions,
        pixel_revision=contents.revision,
        statistics={s.name: entry for s in contents.splits if (entry := {f: v for f, v in statistics[s.name].items() if v is not None})},
        rejects=len(contents.rejects),
        rejects_file=files.get("rejects"),
        keyed=contents.keyed,
        key_hash=contents.trace.key_hash,
        sha256=contents.trace.sha256,
        groups=len(contents.groups) if "groups" in files else 0,
        groups_file=files.get("groups"),
        order=contents.order,
    )


def table_of(index: Index, shards: Sequence[tuple[int, dict[str, str]]]) -> npt.NDArray[Any]:
    """The shard table (shards,) of these shards, rows and files by kind each."""
    table = np.zeros(len(shards), index.table_dtype())
    for i, (rows, files) in enumerate(shards):
        table[i]["rows"] = rows
        for name, digest in files.items():
            table[i][name] = hash_pair(digest)
    return table


def _normalizing(contents: Contents, statistics: Mapping[str, Mapping[str, Any]], spec: Field) -> dict[str, Any] | None:
    """The statistics of a field that `--normalize auto` takes; None without it, or where undefined.  OptionError: no split is trained on."""
    found: dict[str, Any] | None = statistics[train_of(contents.splits).name].get(spec.name) if spec.name in contents.auto else None
    return found


def _normalized(spec: Field, statistics: dict[str, Any] | None) -> Field:
    """The field, with these statistics as its normalisation."""
    return spec if statistics is None else replace(spec, normalize=(tuple(statistics["mean"]), tuple(statistics["std"])))


def _which(statistics: dict[str, Any] | None) -> str:
    """Which channel of several does not vary: the first such."""
    if statistics is None or len(statistics["std"]) < 2:
        return ""
    return f" (channel {next(i for i, std in enumerate(statistics['std']) if std <= 0)})"


def _statistics(contents: Contents, parts: list[Part]) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation and sums by field, of each split and of "all"; None where they are not defined."""
    stops = np.cumsum([part.rows for part in parts])
    names = {name for part in parts for name in part.sums}
    out: dict[str, dict[str, Any]] = {}
    for split in (Split("all", 0, sum(part.rows for part in parts)), *contents.splits):
        first, last = np.searchsorted(stops, [split.start, split.stop], side="right").tolist()
        within = parts[first:last]
        found = {f.name: [p.sums[f.name] for p in within] for f in contents.fields if f.name in names}
        out[split.name] = {name: combine_statistics(sums, name not in contents.counts) for name, sums in found.items()}
    return out


def _check_files(out: Path, fields: tuple[Field, ...], parts: list[Part]) -> None:
    """Raises ResumeError where a file of a finished shard is gone, or not as long as it was."""
    for part in parts:
        for name, digest in part.files.items():
            path = out / "shards" / file_name(name, digest)
            wanted = next((file_bytes(f.stored, (part.rows, *f.shape)) for f in fields if f.name == name), None)
            try:
                found = os.path.getsize(path)
            except FileNotFoundError:
                found = -1
            if found < 0 or wanted not in (None, found):
                how = "gone" if found < 0 else f"{found:,} bytes instead of {wanted:,}"
                raise ResumeError(
                    f"{path}: {how}, after its shard was finished; nothing is published: the same command makes it again", path=str(path)
                )


def describe_published(out: Path, index: Index, generation: str, parts: list[Part]) -> Published:
    """What a generation holds, from its index and its finished shards."""
    parts = [part for part in parts if part.rows]
    flags: Counter[str] = Counter()
    for part in parts:
        flags.update(part.flags)
    shards = out / "shards"
    files = {file for _, file in single_files(index)} | {file_name(name, digest) for part in parts for name, digest in part.files.items()}
    named = [out / "index.json", out / "generations" / f"{generation}.json", *(shards / file for file in files)]
    total = sum(os.path.getsize(path) for path in named)
    rejects_path = None if index.rejects_file is None else str(shards / file_name("rejects", index.rejects_file, ".jsonl"))
    return Published(generation, len(parts), total, dict(flags), rejects_path, index.splits)


def singles_stand(out: Path, index: Index) -> bool:
    """Are the files there, whole, that a generation has once?"""
    return all(stands(out / "shards" / file, str(digest_of(file))) for _, file in single_files(index))


def clean_up(out: Path, before: Iterable[Sealed], now: Iterable[Sealed]) -> set[str] | None:
    """After publishing: remove the files that seals named and no generation names, then the seals (last, so that a kill leaves none unnamed).

    Returns the names of those files; None where what a generation names is unknown, so that nothing was deleted.
    """
    candidates = {name for seal in [*before, *now] for name in seal.names()}
    named: set[str] = set()
    for generation in kept_files(out)[0]:
        try:
            index, _ = load_index(out, generation)
            named.update(file for _, _, file in named_files(load_table(out, index, generation)))
        except FormatError:
            return None
    gone = candidates - named
    for name in gone:
        (out / "shards" / name).unlink(missing_ok=True)
    for entry in list_folder(out / ".build" / "seals"):
        if _CONTENT[".build/seals"].fullmatch(entry.name):
            os.unlink(entry.path)
    return gone
