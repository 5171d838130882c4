"""Hides how `index.json` is written, checked and published: canonical JSON, one commit point, an immutable copy for each generation.

`Index.from_bytes` accepts exactly what FORMAT.md allows and raises FormatError for everything else, whatever the bytes are: it is the gate for
files of strangers.  Everything behind it may rely on the types and bounds here.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import CorruptShardError, FormatError, GenerationError, NotADatasetError, VersionError
from mmcompile.format.canonical import HASH, Check, canonical, name_to_json, parse, read_limited
from mmcompile.format.commit import write_atomic
from mmcompile.format.fields import (
    CHANNEL_LIMIT,
    DTYPES,
    INDEX_LIMIT,
    LIST_LIMIT,
    MEANINGS,
    MOST_AXES,
    RESERVED,
    SPATIAL,
    UNITS,
    Field,
    Names,
    Split,
    row_dtype,
)
from mmcompile.format.keyhash import KEY_HASHES
from mmcompile.format.npy import file_name, hash_bytes
from mmcompile.format.permutation import is_order
from mmcompile.format.remains import not_a_dataset, put_back

__all__ = [
    "BLOB_LIMIT",
    "DTYPES",
    "INDEX_LIMIT",
    "LIST_LIMIT",
    "UNITS",
    "VERSION",
    "Field",
    "Index",
    "Names",
    "Split",
    "load_classes",
    "load_groups",
    "load_index",
    "load_names",
    "mending",
    "publish",
    "read_blob",
    "read_generation",
    "row_dtype",
]

VERSION = 1
#: Read limit of the files that hold what would not fit the index: class names, rejects.
BLOB_LIMIT = 256 << 20
_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
#: Axes, and dtypes (None: any), of fields whose meaning says so.
_AXES: dict[str, tuple[int, ...]] = {"image": (3,), "class": (0,), "mask": (2,), "boxes": (2,), "keypoints": (2, 3), "text": (1,), "volume": (3, 4)}
_KINDS = {
    "class": ("int64",),
    "mask": ("uint8", "uint16", "int16", "int32", "int64"),
    "boxes": ("float32",),
    "keypoints": ("float32",),
    "text": ("uint8",),
}
#: Numbers at the last axis.
_LAST = {"boxes": 4, "keypoints": 3}
_TOP = ["classes", "fields", "format", "pixel_revision", "rejects", "samples", "settings", "shards", "splits", "statistics", "table", "version"]
_TOP += ["versions"]
#: Keys that stand in an index, or a field of it, only where they say something.
_TOP_OPTIONAL, _FIELD_OPTIONAL = ("groups", "keys", "order", "sha256"), ("categories", "columns", "count", "unit", "views")


@dataclass(frozen=True)
class Index:
    """What `index.json` says.  `table`, `classes_file`, `rejects_file`, `groups_file` are hashes of files in shards/.

    `keyed`: each row has a source of its own, with a key, and its shard a file of samples and one of keys.  Else (rows of arrays and tables) each
    shard has a file of hashes, and `groups`, a number of ranges of rows with names, tell where rows come from and what belongs together.
    `order`: that of rows without keys, see `permutation`.  `key_hash`: how keys were made of the names of sources, one of KEY_HASHES; None where they
    are these names.  `sha256`: samples hold that of each source, too.
    """

    fields: tuple[Field, ...]
    splits: tuple[Split, ...]
    samples: int
    shards: int
    table: str
    classes: tuple[str, ...] | None = None
    classes_file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    pixel_revision: int = 1
    statistics: dict[str, Any] = field(default_factory=dict)
    rejects: int = 0
    rejects_file: str | None = None
    keyed: bool = True
    groups: int = 0
    groups_file: str | None = None
    key_hash: str | None = None
    sha256: bool = False
    order: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""
        return sum(f.row_bytes for f in self.fields)

    def table_dtype(self) -> np.dtype[Any]:
        """The shard table's record: rows, then the hash of each file of the shard as two uint64 (high half first)."""
        beside = ("samples", "keys") if self.keyed else ("hashes",)
        return np.dtype([("rows", "<u8"), *((name, "<u8", (2,)) for name in (*(f.name for f in self.fields), *beside))])

    def to_bytes(self) -> bytes:
        """Canonical JSON; the generation's name is its xxh3-128."""
        classes: Any = None if self.classes is None else [name_to_json(c) for c in self.classes]
        if self.classes_file is not None:
            classes = {"file": self.classes_file}
        data = canonical(
            {
                **({"keys": self.key_hash} if self.key_hash else {} if self.keyed else {"keys": False}),
                **({"sha256": True} if self.sha256 else {}),
                **({} if self.groups_file is None else {"groups": {"count": self.groups, "file": self.groups_file}}),
                **({"order": self.order} if self.order else {}),
                "format": "mmcompile",
                "version": VERSION,
                "fields": [f.to_json() for f in self.fields],
                "splits": [{"name": s.name, "start": s.start, "stop": s.stop} for s in self.splits],
                "samples": self.samples,
                "shards": self.shards,
                "table": self.table,
                "classes": classes,
                "settings": self.settings,
                "versions": self.versions,
                "pixel_revision": self.pixel_revision,
                "statistics": self.statistics,
                "rejects": {"count": self.rejects, "file": self.rejects_file},
            }
        )
        if len(data) > INDEX_LIMIT:
            raise FormatError(f"the index would be {len(data):,} bytes, the limit is {INDEX_LIMIT:,}")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, path: Path | str) -> Index:
        """Check everything and build the Index.  Raises VersionError for a newer format, FormatError for any fault."""
        check = _IndexCheck(path)
        top = check.mapping(parse(data, path), "the document", None)
        if top.get("format") != "mmcompile":
            check.fail("format", "'mmcompile'", top.get("format"))
        version = check.count(top.get("version"), "version", least=1)
        if version > VERSION:
            raise VersionError(
                f"{path}: format version {version}, this package reads up to {VERSION}; install a newer mmcompile",
                path=str(path),
                found=version,
                expected=VERSION,
            )
        check.mapping(top, "the document", _TOP, _TOP_OPTIONAL)
        fields = tuple(check.field(f, i) for i, f in enumerate(check.sequence(top["fields"], "fields", most=LIST_LIMIT, least=1)))
        if len({f.name for f in fields}) != len(fields):
            check.fail("fields", "names that differ", [f.name for f in fields])
        check.related(fields)
        samples = check.count(top["samples"], "samples")
        shards = check.count(top["shards"], "shards", most=samples)
        if samples and not shards:
            check.fail("shards", "at least 1", shards)
        if samples * max(1, sum(f.row_bytes for f in fields)) >= 1 << 62:
            check.fail("samples", "fewer than 2^62 bytes of rows", samples)
        classes, classes_file = check.classes(top["classes"])
        rejects = check.mapping(top["rejects"], "rejects", ["count", "file"])
        if (rejects["file"] is None) != (check.count(rejects["count"], "rejects.count") == 0):
            check.fail("rejects", "a file exactly where the count is above 0", rejects)
        splits = check.splits(top["splits"], samples)
        keys = top.get("keys")
        if "keys" in top and keys is not False and not (isinstance(keys, str) and keys in KEY_HASHES):
            check.fail("keys", f"false, one of {KEY_HASHES}, or no such key", keys)
        if "sha256" in top and (top["sha256"] is not True or keys is False):
            check.fail("sha256", "true where rows have keys, or no such key", top["sha256"])
        order = top.get("order", "")
        if "order" in top and (keys is not False or not is_order(order)):
            check.fail("order", "'mixed' or 'shuffled:SEED', and only of rows without keys", order)
        groups = check.mapping(top.get("groups", {"count": 0, "file": None}), "groups", ["count", "file"])
        return cls(
            fields=fields,
            splits=splits,
            samples=samples,
            shards=shards,
            table=check.digest(top["table"], "table"),
            classes=classes,
            classes_file=classes_file,
            settings=check.mapping(top["settings"], "settings", None),
            versions={k: check.text(v, f"versions.{k}") for k, v in check.mapping(top["versions"], "versions", None).items()},
            pixel_revision=check.count(top["pixel_revision"], "pixel_revision", least=1),
            statistics=check.statistics(top["statistics"], splits, fields),
            rejects=int(rejects["count"]),
            rejects_file=None if rejects["file"] is None else check.digest(rejects["file"], "rejects.file"),
            keyed=keys is not False,
            key_hash=keys or None,
            sha256="sha256" in top,
            groups=check.count(groups["count"], "groups.count", least=int("groups" in top), most=max(samples, 1)),
            groups_file=check.digest(groups["file"], "groups.file") if "groups" in top else None,
            order=order,
        )


class _IndexCheck(Check):
    """The checks of what only an index holds."""

    def field(self, value: Any, i: int) -> Field:
        where = f"fields[{i}]"
        entry = self.mapping(value, where, ["name", "dtype", "shape", "meaning", "layout", "scale", "normalize"], _FIELD_OPTIONAL)
        name = entry["name"]
        if not isinstance(name, str) or not _FIELD_NAME.match(name) or name in RESERVED:
            self.fail(f"{where}.name", "lower-case letters, digits and _ (at most 64), and no reserved word", name)
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            self.fail(f"{where}.dtype", f"one of {sorted(DTYPES)}", entry["dtype"])
        shape = tuple(self.count(n, f"{where}.shape", least=1, most=1 << 40) for n in self.sequence(entry["shape"], f"{where}.shape", most=MOST_AXES))
        if math.prod(shape) >= 1 << 46:
            self.fail(f"{where}.shape", "fewer than 2^46 values", list(shape))
        meaning, layout = entry["meaning"], entry["layout"]
        if meaning not in MEANINGS:
            self.fail(f"{where}.meaning", f"one of {MEANINGS}", meaning)
        views = self.views(entry, where, shape) if "views" in entry else None
        inner = shape if views is None else shape[1:]
        if len(inner) not in _AXES.get(meaning, (len(inner),)) or entry["dtype"] not in _KINDS.get(meaning, DTYPES):
            axes, kinds = (" or ".join(map(str, words)) for words in (_AXES.get(meaning, ("any",)), _KINDS.get(meaning, ("any dtype",))))
            self.fail(where, f"of {axes} axes, {kinds}, for meaning {meaning}", value)
        if layout not in (("chw", "hwc") if meaning == "image" else (None,)):
            self.fail(f"{where}.layout", "'chw' or 'hwc' for an image, null for all else", layout)
        if meaning == "image" and inner[0 if layout == "chw" else 2] > CHANNEL_LIMIT:
            self.fail(f"{where}.shape", f"of at most {CHANNEL_LIMIT} channels", list(shape))
        if meaning in _LAST and inner[-1] != _LAST[meaning]:
            self.fail(f"{where}.shape", f"{_LAST[meaning]} numbers at the last axis of {meaning}", list(shape))
        if meaning == "volume" and len(inner) == 4 and inner[0] > CHANNEL_LIMIT:
            self.fail(f"{where}.shape", f"of at most {CHANNEL_LIMIT} channels", list(shape))
        count = entry.get("count")
        if "count" in entry and (not isinstance(count, str) or meaning not in ("boxes", "keypoints", "value", "mask") or not inner):
            self.fail(f"{where}.count", "the name of a field, of boxes, keypoints, a mask or values along an axis", count)
        scale = self.number(entry["scale"], f"{where}.scale")
        if not scale > 0:
            self.fail(f"{where}.scale", "above 0", scale)
        built = Field(name, entry["dtype"], shape, meaning, layout, scale, count=count, views=views, **self.names_of(entry, where, inner))
        if entry["normalize"] is None:
            return built
        both = self.mapping(entry["normalize"], f"{where}.normalize", ["mean", "std"])
        n = built.channels
        mean, std = (
            tuple(self.number(v, f"{where}.normalize") for v in self.sequence(both[k], f"{where}.normalize.{k}", least=n, most=n))
            for k in ("mean", "std")
        )
        if not n or not all(v > 0 for v in std):
            self.fail(f"{where}.normalize", "of an image or of numbers, its std above 0", entry["normalize"])
        return replace(built, normalize=(mean, std))

    def views(self, entry: dict[str, Any], where: str, shape: tuple[int, ...]) -> int:
        """How many variants of a sample a field holds."""
        views = self.count(entry["views"], f"{where}.views", least=2)
        if entry["meaning"] == "class" or not shape or shape[0] != views:
            self.fail(f"{where}.views", "as many as the first axis of the shape is long", entry)
        return views

    def related(self, fields: tuple[Field, ...]) -> None:
        """What fields say of each other: counts are there, and all views are as many."""
        known = {f.name: f for f in fields}
        for f in fields:
            if f.count is not None:
                counting = known.get(f.count)
                if counting is None or (counting.dtype, counting.sample_shape, counting.meaning, counting.views) != ("int64", (), "value", f.views):
                    self.fail(f"the count of {f.name}", "an int64 value of no axis, with as many views", f.count)
        if len({f.views for f in fields if f.views is not None}) > 1:
            self.fail("fields", "the same views of all that have some", [f.views for f in fields])
        if any(f.views is None for f in fields if f.meaning in SPATIAL) and any(f.views is not None for f in fields):
            self.fail("fields", "views of all that a crop moves, or of none", [f.name for f in fields])

    def names_of(self, entry: dict[str, Any], where: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """The optional parts of a field, most of which only a value has; `shape` is that of one view."""
        found: dict[str, Any] = {}
        for key in ("columns", "categories"):
            if key in entry:
                value = entry[key]
                if isinstance(value, dict):
                    found[key] = Names(file=self.digest(self.mapping(value, f"{where}.{key}", ["file"])["file"], f"{where}.{key}.file"))
                else:
                    found[key] = Names(self.class_names(value, LIST_LIMIT, f"{where}.{key}"))
        meaning = entry["meaning"]
        if "columns" in found:
            axes, at = (3, 1) if meaning == "keypoints" else (1, 0)
            if len(shape) != axes or len(found["columns"].listed) != (0 if found["columns"].file else shape[at]):
                self.fail(f"{where}.columns", f"a name for each number of one axis, the shape is {list(shape)}", entry["columns"])
        if "unit" in entry:
            found["unit"] = entry["unit"]
            if entry["unit"] not in UNITS:
                self.fail(f"{where}.unit", f"one of {UNITS}", entry["unit"])
        allowed = {"value": {"columns", "categories", "unit"}, "mask": {"categories"}, "keypoints": {"columns"}}.get(meaning, set())
        if not found.keys() <= allowed or (found.keys() & {"categories", "unit"} and not entry["dtype"].startswith(("int", "uint"))):
            self.fail(where, "a value (or keypoints) for columns, a mask or an integer one for categories and unit", entry)
        return found

    def splits(self, value: Any, samples: int) -> tuple[Split, ...]:
        out: list[Split] = []
        at = 0
        for i, item in enumerate(self.sequence(value, "splits", most=LIST_LIMIT, least=1)):
            where = f"splits[{i}]"
            entry = self.mapping(item, where, ["name", "start", "stop"])
            name = self.text(entry["name"], f"{where}.name")
            start, stop = self.count(entry["start"], f"{where}.start"), self.count(entry["stop"], f"{where}.stop")
            if start != at or stop < start or not name or name in {s.name for s in out}:
                self.fail(where, f"a new name and a range that begins at {at}", entry)
            out.append(Split(name, start, stop))
            at = stop
        if at != samples:
            self.fail("splits", f"ranges that end at {samples}", at)
        return tuple(out)

    def statistics(self, value: Any, splits: tuple[Split, ...], fields: tuple[Field, ...]) -> dict[str, Any]:
        whole = self.mapping(value, "statistics", None)
        channels = {f.name: f.channels for f in fields if f.channels}
        for split, entries in whole.items():
            if split not in {s.name for s in splits}:
                self.fail("statistics", "of splits of this dataset", split)
            for name, entry in self.mapping(entries, f"statistics.{split}", None).items():
                where = f"statistics.{split}.{name}"[:120]
                if name not in channels:
                    self.fail(where, "of an image, or of numbers of at most one axis, of this dataset", name)
                if entry is None:
                    continue
                self.count(self.mapping(entry, where, ["pixels", "mean", "std", "sums"])["pixels"], f"{where}.pixels", least=1, most=1 << 100)
                for key in ("mean", "std"):
                    for number in self.sequence(entry[key], f"{where}.{key}", least=channels[name], most=channels[name]):
                        if self.number(number, f"{where}.{key}") < 0 and key == "std":
                            self.fail(f"{where}.std", "at least 0", number)
                for item in self.sequence(entry["sums"], f"{where}.sums", most=LIST_LIMIT):
                    self._sums(item, f"{where}.sums", channels[name])
        return whole

    def _sums(self, value: Any, where: str, channels: int) -> None:
        entry = self.mapping(value, where, ["depth", "pixels", "sum", "sum_squares"])
        self.count(entry["depth"], f"{where}.depth", most=255)
        self.count(entry["pixels"], f"{where}.pixels", most=1 << 100)
        for key in ("sum", "sum_squares"):
            for number in self.sequence(entry[key], f"{where}.{key}", least=channels, most=channels):
                self.number(number, f"{where}.{key}")

    def classes(self, value: Any) -> tuple[tuple[str, ...] | None, str | None]:
        if value is None:
            return None, None
        if isinstance(value, dict):
            return None, self.digest(self.mapping(value, "classes", ["file"])["file"], "classes.file")
        return self.class_names(value, LIST_LIMIT), None

    def class_names(self, value: Any, most: int, where: str = "classes") -> tuple[str, ...]:
        names = tuple(self.name(v, f"{where}[{i}]") for i, v in enumerate(self.sequence(value, where, most=most)))
        if len(set(names)) != len(names):
            self.fail(where, "names that differ", list(names))
        return names

    def groups(self, value: Any, count: int, samples: int) -> tuple[tuple[str, ...], list[int]]:
        """(names, where each ends) of the groups, which cover all samples."""
        names, stops = [], [0]
        for i, item in enumerate(self.sequence(value, "groups", most=count, least=count)):
            pair = self.sequence(item, f"groups[{i}]", most=2, least=2)
            names.append(self.name(pair[0], f"groups[{i}]"))
            stops.append(self.count(pair[1], f"groups[{i}]", least=stops[-1] + 1, most=samples))
        if stops[-1] != samples:
            self.fail("groups", f"ranges that end at {samples}", stops[-1])
        return tuple(names), stops[1:]


def load_index(root: Path, generation: str | None = None, *, alone: bool = False) -> tuple[Index, str]:
    """The index of a dataset and its generation's name; of the current generation, or of the one asked for.

    `alone`: that index.json is whole, and has merely lost its copy in generations/, is no error: a build writes that anew.

    Raises NotADatasetError, GenerationError, VersionError or FormatError.
    """
    path = root / "index.json"
    try:
        data = read_limited(path, INDEX_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise NotADatasetError(not_a_dataset(root), path=str(root)) from None
    for folder in ("shards", "generations"):
        if os.path.islink(root / folder):
            raise FormatError(f"{root / folder}: a link; the folders of a dataset lie inside it", path=str(root / folder))
    found = hash_bytes(data)
    if generation is None or generation == found:
        lost = os.path.isdir(root / "generations") and not os.path.exists(root / "generations" / f"{found}.json")
        if lost and not (alone and _stands_alone(root, data)):
            raise FormatError(f"{path}: changed after it was published (no generations/{found}.json); {mending(root, data)}", path=str(path))
        return Index.from_bytes(data, path), found
    if not HASH.match(generation):
        raise GenerationError(f"{root}: generation {generation!r:.50} is not 32 hex digits; see `mmcompile info {root}`", path=str(root))
    try:
        return read_generation(root, generation), generation
    except (FileNotFoundError, NotADirectoryError):
        raise GenerationError(
            f"{root}: generation {generation} is gone (pruned?), the current one is {found}; open the dataset anew",
            path=str(root),
            expected=generation,
            found=found,
        ) from None


def mending(root: Path, data: bytes) -> str:
    """What to do about an index.json with these bytes that no generation has."""
    if not _stands_alone(root, data):
        return put_back(root)
    copied = shlex.join(["cp", str(root / "index.json"), str(root / "generations" / f"{hash_bytes(data)}.json")])
    return f"put its copy back with `{copied}`, or run the same build again, which does that"


def _stands_alone(root: Path, data: bytes) -> bool:
    """Is this a generation that lost its file, rather than a changed copy of one that is kept?  It has a shard table of its own then."""
    try:
        index = Index.from_bytes(data, root / "index.json")
        kept = [name.removesuffix(".json") for name in os.listdir(root / "generations") if HASH.match(name.removesuffix(".json"))]
        return index.to_bytes() == data and all(read_generation(root, name).table != index.table for name in kept)
    except (FormatError, OSError):
        return False


def read_generation(root: Path, name: str) -> Index:
    """The index of a generation by its own file, held against its name.  Raises FileNotFoundError, VersionError or FormatError."""
    path = root / "generations" / f"{name}.json"
    data = read_limited(path, INDEX_LIMIT)
    if hash_bytes(data) != name:
        raise FormatError(f"{path}: its content does not match its name; run `mmcompile verify {root}`, which says how to mend it", path=str(path))
    return Index.from_bytes(data, path)


def read_blob(root: Path, kind: str, digest: str, suffix: str) -> tuple[Path, bytes]:
    """The path and bytes of a file of shards/ that is no array, held against its hash.  Raises CorruptShardError, or FormatError."""
    path = root / "shards" / file_name(kind, digest, suffix)
    try:
        data = read_limited(path, BLOB_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptShardError(f"{path}: missing; run `mmcompile verify {root}`, which says how to mend it", path=str(path)) from None
    if hash_bytes(data) != digest:
        raise CorruptShardError(
            f"{path}: its content does not match its name; run `mmcompile verify {root}`, which says how to mend it", path=str(path)
        )
    return path, data


def load_classes(root: Path, index: Index) -> tuple[str, ...] | None:
    """The class names, from the index or from the file that it names."""
    return index.classes if index.classes_file is None else load_names(root, Names(file=index.classes_file))


def load_names(root: Path, names: Names, expected: int | None = None) -> tuple[str, ...]:
    """The names of a list, `expected` in number.  Raises CorruptShardError or FormatError."""
    if names.file is None:
        return names.listed
    path, data = read_blob(root, "classes", names.file, ".json")
    found = _IndexCheck(path).class_names(parse(data, path), 1 << 31)
    if expected is not None and len(found) != expected:
        raise CorruptShardError(f"{path}: {len(found):,} names, the index says {expected:,}", path=str(path))
    return found


def load_groups(root: Path, index: Index) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """(names, the first row of each group and the number of samples: int64 (G + 1,)); one group without a name where the index has none.

    Raises CorruptShardError or FormatError.
    """
    if index.groups_file is None:
        return ("",), np.array([0, index.samples])
    path, data = read_blob(root, "groups", index.groups_file, ".json")
    names, stops = _IndexCheck(path).groups(parse(data, path), index.groups, index.samples)
    return names, np.array([0, *stops], np.int64)


def publish(root: Path, index: Index) -> str:
    """Make a generation the current one; returns its name.  Everything that it names must be durable already."""
    data = index.to_bytes()
    Index.from_bytes(data, root / "index.json")
    name = hash_bytes(data)
    (root / "generations").mkdir(exist_ok=True)
    write_atomic(root / "generations" / f"{name}.json", data)
    write_atomic(root / "index.json", data)
    return name
