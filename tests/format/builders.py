"""What the tests of the format share: small datasets, ways to change one behind its hashes, and a reader of everything in it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.format.canonical import canonical
from mmcompile.format.describe import describe
from mmcompile.format.index import Index, load_index, publish
from mmcompile.format.npy import file_name, hash_bytes, save_array
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.samples import hash_pair, pair_hash
from mmcompile.format.sampletable import samples_table
from tests.support import make_dataset

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "golden" / "v1"


def golden_script() -> Any:
    spec = importlib.util.spec_from_file_location("make_golden", REPOSITORY / "scripts" / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pixels(n: int, seed: int = 0, shape: tuple[int, ...] = (3, 4, 5)) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def small(root: Path, seed: int = 0) -> str:
    """Twelve labelled images in shards of 5, 4 and 3 rows; shards 0 and 2 differ in all files."""
    return make_dataset(root, pixels(12, seed), np.arange(12) % 3, shards=(5, 4, 3))


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def file_of(root: Path, kind: str, shard: int = 0) -> Path:
    """A file of the current generation."""
    index, _ = load_index(root)
    if kind == "table":
        return root / "shards" / file_name("table", index.table)
    table = np.load(root / "shards" / file_name("table", index.table))
    return root / "shards" / file_name(kind, pair_hash(table[kind][shard]))


def put_index(root: Path, data: bytes) -> None:
    """Make these bytes the one generation, whatever they are, with every hash right."""
    for old in (root / "generations").glob("*"):
        old.unlink()
    (root / "index.json").write_bytes(data)
    (root / "generations" / f"{hash_bytes(data)}.json").write_bytes(data)


def change_index(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((root / "index.json").read_bytes())
    changed = change(value)
    put_index(root, canonical(value if changed is None else changed))


def put_table(root: Path, records: Any, **changes: Any) -> None:
    """Publish another shard table with every hash right; `changes` are of the Index."""
    index, _ = load_index(root)
    shards = root / "shards"
    index = dataclasses.replace(index, shards=len(records), table=save_array(shards, "table", records, shards), **changes)
    put_index(root, canonical(index_json(index)))


def index_json(index: Index) -> Any:
    return json.loads(index.to_bytes())


def put_file(root: Path, kind: str, shard: int, data: bytes) -> Path:
    """Put other bytes in place of a shard's file, with every hash of them right; returns the new file."""
    index, _ = load_index(root)
    table = np.load(root / "shards" / file_name("table", index.table))
    digest = hash_bytes(data)
    table[kind][shard] = hash_pair(digest)
    path = root / "shards" / file_name(kind, digest)
    path.write_bytes(data)
    put_table(root, table)
    return path


def put_array(root: Path, kind: str, shard: int, array: Any) -> Path:
    """As `put_file`, an array."""
    digest = save_array(root / "shards", kind, array, root / "shards")
    return put_file(root, kind, shard, (root / "shards" / file_name(kind, digest)).read_bytes())


def read_everything(root: Path, engine: str = "mmap") -> dict[str, Any]:
    """All that a dataset holds.  Raises what the reader raises."""
    reader = Reader(root, engine=engine)
    n = len(reader)
    every = np.arange(n)[::-1].copy()
    out: dict[str, Any] = {"classes": reader.classes, "rejects": load_rejects(reader.root, reader.index)}
    for field in reader.index.fields:
        out[field.name] = reader.column(field.name)
        gathered = reader.gather(field.name, every)
        assert gathered.tobytes() == out[field.name][::-1].tobytes()
        for row in range(n):
            assert reader.row(field.name, row).tobytes() == out[field.name][row].tobytes()
    if reader.index.keyed:
        out["samples"] = [reader.samples(i) for i in range(len(reader.table))]
        out["keys"] = [key for i in range(len(reader.table)) for key in reader.keys(i)]
    out["groups"] = reader.origins.groups
    out["names"] = [reader.origins.field(field.name) for field in reader.index.fields]
    out["info"] = describe(root)
    out["rows"] = list(samples_table(root))
    return out


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(Path(root).rglob("*")) if p.is_file()}


def republish(root: Path, **changes: Any) -> str:
    index, _ = load_index(root)
    return publish(root, dataclasses.replace(index, **changes))


def age(root: Path, generation: str, seconds: float) -> None:
    """Make a generation that much older."""
    path = root / "generations" / f"{generation}.json"
    before = path.stat().st_mtime
    os.utime(path, (before - seconds, before - seconds))
