"""Datasets from arrays, made with `mmcompile.format` alone: what tests of the reader, of `verify` and of the golden files stand on."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.index import DTYPES, LIST_LIMIT, Field, Index, Names, Split, publish
from mmcompile.format.npy import save_array, save_blob
from mmcompile.format.samples import block_hashes, block_rows, combine_statistics, hash_pair, row_hashes, sample_dtype, shard_sums

Array = npt.NDArray[Any]


def make_dataset(
    root: Path,
    images: Array | None = None,
    labels: Any = None,
    *,
    shards: tuple[int, ...] | None = None,
    keys: list[bytes] | None = None,
    layout: str = "chw",
    dtype: str | None = None,
    scale: float | None = None,
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    classes: tuple[str, ...] | None = None,
    splits: dict[str, int] | None = None,
    settings: dict[str, Any] | None = None,
    values: dict[str, Array] | None = None,
    facts: dict[str, dict[str, Any]] | None = None,
    keyed: bool = True,
    groups: list[tuple[str, int]] | None = None,
) -> str:
    """Publish a dataset of these rows in `root` (made when missing) and return its generation.

    `images` is (N, C, H, W) whatever the layout on disk; `dtype` is the index's name of the dtype, "bfloat16" for images that are uint16 bits.
    `labels` are N integers.  `shards` are the rows of each shard (by default one), `keys` the sources (by default numbered ones), `splits` maps
    names to numbers of rows.  `values` are (N, *shape) arrays by field, `facts` what else their Field says (lists of names as tuples, which lie in
    a file where they are long).  Without `keyed` rows have no sources, and `groups` are (name, stop).
    """
    folder = Path(root) / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Array] = {}
    fields: list[Field] = []
    if images is not None:
        stored = np.ascontiguousarray(images if layout == "chw" else images.transpose(0, 2, 3, 1))
        name = dtype or images.dtype.name
        arrays["image"] = stored = stored.astype(DTYPES[name], copy=False)
        unit = scale if scale is not None else {"uint8": 255.0, "uint16": 65535.0}.get(name, 1.0)
        fields.append(Field("image", name, stored.shape[1:], "image", layout, unit, normalize))
    if labels is not None:
        arrays["label"] = np.ascontiguousarray(labels, "<i8").reshape(-1)
        fields.append(Field("label", "int64", (), "class"))
        if classes is None:
            classes = tuple(f"class {c}" for c in range(int(arrays["label"].max(initial=-1)) + 1))
    for name, array in (values or {}).items():
        said = dict((facts or {}).get(name, {}))
        said |= {key: _named(folder, said[key]) for key in ("columns", "categories") if key in said}
        fields.append(Field(**{"name": name, "dtype": array.dtype.name, "shape": array.shape[1:], "meaning": "value"} | said))
        arrays[name] = np.ascontiguousarray(array, fields[-1].stored)
    n = len(next(iter(arrays.values())))
    rows = shards if shards is not None else ((n,) if n else ())
    assert sum(rows) == n
    assert min(rows, default=1) > 0
    names = keys if keys is not None or not keyed else [b"%s/%06d.png" % (_folder(arrays, classes, i), i) for i in range(n)]
    schema = tuple(fields)
    table, sums, start = [], [], 0
    for count in rows:
        part = {k: v[start : start + count] for k, v in arrays.items()}
        if keyed:
            records = _records(schema, part, names[start : start + count])
            beside = [("samples", records), ("keys", np.array(list(b"".join(names[start : start + count])), np.uint8))]
        else:
            beside = [("hashes", block_hashes(list(part.values()), block_rows(schema)))]
        files = [*part.items(), *beside]
        table.append((count, *(hash_pair(save_array(folder, kind, array, folder)) for kind, array in files)))
        if images is not None and keyed:
            sums.append(shard_sums(records, int(np.prod(schema[0].sample_shape[1:]))))
        start += count
    ranges, at = [], 0
    for split, size in (splits or {"all": n}).items():
        ranges.append(Split(split, at, at + size))
        at += size
    statistics = {} if images is None or not keyed else {s.name: {"image": combine_statistics(_within(rows, sums, s), True)} for s in ranges}
    index = Index(schema, tuple(ranges), n, len(rows), "0" * 32, classes=classes, settings=settings or {}, statistics=statistics, keyed=keyed)
    if groups is not None:
        blob = canonical([[name_to_json(name), stop] for name, stop in groups])
        index = dataclasses.replace(index, groups=len(groups), groups_file=save_blob(folder, "groups", [blob], folder, ".json"))
    stored_table = np.array(table, index.table_dtype())
    return publish(Path(root), dataclasses.replace(index, table=save_array(folder, "table", stored_table, folder)))


def _named(folder: Path, names: tuple[str, ...]) -> Names:
    if len(names) <= LIST_LIMIT:
        return Names(names)
    return Names(file=save_blob(folder, "classes", [canonical([name_to_json(name) for name in names])], folder, ".json"))


def forked(target: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
    """A process of the fork server, in which torch is loaded already, that runs `target(*args, connection)`; and the other end of its connection."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    return process, ours


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run `work(k)` in so many threads at once; returns when all have ended."""
    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _folder(arrays: dict[str, Array], classes: tuple[str, ...] | None, i: int) -> bytes:
    return classes[int(arrays["label"][i])].encode() if classes and "label" in arrays else b"raw"


def _records(fields: tuple[Field, ...], part: dict[str, Array], keys: list[bytes]) -> Array:
    out = np.zeros(len(keys), sample_dtype(fields))
    out["key_stop"] = np.cumsum([len(k) for k in keys])
    out["source_size"] = 1
    out["row_hash"] = row_hashes(list(part.values()))
    out["mode"], out["format"], out["orientation"] = b"RGB", b"PNG", 1
    field = fields[0]
    if field.meaning == "image":
        stored = part["image"] if field.layout == "chw" else part["image"].transpose(0, 3, 1, 2)
        if field.dtype == "bfloat16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        kind = out["sum"].dtype
        out["height"], out["width"] = field.sample_shape[1:]
        out["depth"] = {"uint8": 8, "uint16": 16}.get(field.dtype, 0)
        with np.errstate(all="ignore"):
            out["sum"] = stored.astype(kind).sum((2, 3))
            out["sum_squares"] = (stored.astype(kind) ** 2).sum((2, 3))
    return out


def _within(rows: tuple[int, ...], sums: list[Any], split: Split) -> list[Any]:
    """The sums of the shards that begin in a split (right where splits end with shards, which is what a build makes)."""
    starts = np.cumsum([0, *rows[:-1]]) if rows else []
    return [s for at, s in zip(starts, sums, strict=True) if split.start <= at < split.stop]


def draw_scenes(n: int, height: int = 48, width: int = 64, most: int = 6, seed: int = 0) -> dict[str, Array]:
    """Pictures of rectangles that do not touch, and what belongs to them, n samples with up to `most` objects.

    image (n, 3, H, W): 10 times an object's number in each channel; mask (n, H, W): its number; boxes (n, most, 4); labels (n, most): its number,
    else 0; keypoints (n, most, 2, 3): the middles of its first and last pixel; boxes_count (n,); caption (n, 24), UTF-8.
    """
    rng = np.random.default_rng(seed)
    cells = [(y, x) for y in range(3) for x in range(4)]
    out: dict[str, Array] = {
        "image": np.zeros((n, 3, height, width), np.uint8),
        "mask": np.zeros((n, height, width), np.uint8),
        "boxes": np.zeros((n, most, 4), np.float32),
        "labels": np.full((n, most), -1),
        "keypoints": np.zeros((n, most, 2, 3), np.float32),
        "boxes_count": np.zeros(n, np.int64),
        "caption": np.zeros((n, 24), np.uint8),
    }
    for i in range(n):
        count = out["boxes_count"][i] = rng.integers(0, most + 1)
        for k, cell in enumerate(rng.permutation(len(cells))[:count]):
            (y, x), (tall, wide) = cells[cell], (height // 3, width // 4)
            top, left = y * tall + rng.integers(0, tall // 2), x * wide + rng.integers(0, wide // 2)
            bottom, right = top + rng.integers(2, tall // 2), left + rng.integers(2, wide // 2)
            out["mask"][i, top:bottom, left:right] = out["labels"][i, k] = k + 1
            out["image"][i, :, top:bottom, left:right] = 10 * (k + 1)
            out["boxes"][i, k] = left, top, right, bottom
            out["keypoints"][i, k] = (left + 0.5, top + 0.5, 2), (right - 0.5, bottom - 0.5, 1)
        text = f"{count} Körper".encode()
        out["caption"][i, : len(text)] = list(text)
    return out


#: What the fields of `draw_scenes` are.
SCENE_FACTS: dict[str, dict[str, Any]] = {
    "mask": {"meaning": "mask"},
    "boxes": {"meaning": "boxes", "count": "boxes_count"},
    "labels": {"count": "boxes_count"},
    "keypoints": {"meaning": "keypoints", "count": "boxes_count"},
    "caption": {"meaning": "text"},
}


def make_scenes(root: Path, scenes: dict[str, Array], facts: dict[str, dict[str, Any]] | None = None, **options: Any) -> str:
    """A dataset of scenes, or of some of their fields; `facts` adds to what is said of a field."""
    values = {name: array for name, array in scenes.items() if name != "image"}
    said = {name: {**SCENE_FACTS.get(name, {}), **(facts or {}).get(name, {})} for name in values}
    return make_dataset(root, scenes.get("image"), values=values, facts=said, **options)
