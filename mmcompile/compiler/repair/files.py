"""Hides how each kind of file in shards/ is made again, given sound tables: in the order in which one kind needs another."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.repair.aside import Recipe, shard_work
from mmcompile.compiler.repair.images import mend_images
from mmcompile.compiler.repair.relic import Placing, Position, array_bytes, wrong_rows
from mmcompile.compiler.repair.state import Damaged, Place, RecipeError, tell_unsettled, told
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.errors import FormatError
from mmcompile.format.canonical import canonical, name_to_json
from mmcompile.format.catalog import Generation, digest_of, named_files, open_regular
from mmcompile.format.index import Index, load_classes
from mmcompile.format.npy import file_name, hash_file, read_array
from mmcompile.format.samples import pair_hash, sample_dtype

__all__ = ["mend_classes", "mend_files"]


def mend_files(d: Damaged) -> None:
    """Everything in shards/ but tables."""
    _put_back(d)
    mend_classes(d)
    places: dict[str, dict[str, Place]] = {}
    for generation in d.generations:
        for kind, shard, name in named_files(generation):
            if name in d.bad:
                places.setdefault(kind, {}).setdefault(name, (name, generation, shard))

    def bad(kind: str) -> Iterator[Place]:
        return (place for place in list(places.get(kind, {}).values()) if place[0] in d.bad)

    for place in bad("keys"):
        _say_why(d, place[0], functools.partial(_mend_keys, d, *place))
    for place in bad("label"):
        _say_why(d, place[0], functools.partial(_mend_labels, d, *place))
    for recipe, group in _by_recipe(d, bad("samples")):
        _mend_samples(d, recipe, group)
    for index in d.indexes.values():
        if index.rejects_file is not None and (name := file_name("rejects", index.rejects_file, ".jsonl")) in d.bad:
            _say_why(d, name, functools.partial(_mend_rejects, d, name, index))
    for recipe, group in _by_recipe(d, bad("image")):
        mend_images(d, recipe, group)
    for name in sorted(d.bad):
        if f"shards/{name}" not in d.missing:
            d.give_up(f"shards/{name}", "no generation that can be read names it, so nothing tells what it held")


def _say_why(d: Damaged, name: str, mend: Callable[[], None]) -> None:
    try:
        mend()
    except (RecipeError, FormatError) as error:
        d.give_up(f"shards/{name}", str(error))


def _by_recipe(d: Damaged, places: Iterator[Place]) -> list[tuple[Recipe, list[Place]]]:
    """Files whose rows were made in the same way, so that one run makes them."""
    groups: dict[bytes, tuple[Recipe, list[Place]]] = {}
    for name, generation, shard in places:
        try:
            recipe, index = d.recipe(generation.index), generation.index
        except RecipeError as error:
            d.give_up(f"shards/{name}", str(error))
            continue
        mark = canonical([recipe.preprocess.settings(), [f.to_json() for f in index.fields], index.versions, index.pixel_revision])
        groups.setdefault(mark, (recipe, []))[1].append((name, generation, shard))
    return list(groups.values())


def _put_back(d: Damaged) -> None:
    """Files that hold each other's bytes: each goes under its own name."""
    swapped = sorted({p.path.removeprefix("shards/") for p in d.report.problems if p.kind == "swapped" and p.path.startswith("shards/")} & d.bad)
    by_digest = {digest_of(name): name for name in d.bad}
    moves: dict[str, Path] = {}
    for name in swapped:
        try:
            fd = open_regular(d.shards / name)
        except (FormatError, FileNotFoundError):
            continue
        try:
            right = by_digest.get(hash_file(fd))
        except OSError:
            continue
        finally:
            os.close(fd)
        if right is not None and right not in moves:
            moves[right] = d.scratch / f"back-{right}"
            try:
                os.link(d.shards / name, moves[right])
            except OSError:  # a file system without hard links
                d.need_room(os.path.getsize(d.shards / name))
                shutil.copyfile(d.shards / name, moves[right])
    for right, made in moves.items():
        d.put_file(right, made)


def mend_classes(d: Damaged) -> None:
    """Class names, which are the class folders of RAW."""
    for index in d.indexes.values():
        if index.classes_file is not None and (name := file_name("classes", index.classes_file, ".json")) in d.bad:
            try:
                scan, _ = d.plan(d.recipe(index))
            except RecipeError as error:
                d.give_up(f"shards/{name}", str(error))
                continue
            if not d.put_bytes(name, canonical([name_to_json(c) for c in scan.classes or ()])):
                d.give_up(f"shards/{name}", f"the {len(scan.classes or ()):,} class folders of RAW are not those of the build")


def _mend_keys(d: Damaged, name: str, generation: Generation, shard: int) -> None:
    """By the plan of RAW as it is; else each key by the hash of its source and its length."""
    index = generation.index
    recipe = told(d.recipe(index))
    scan, tasks = d.plan(recipe)
    rejected = d.rejected(index) or set()
    rows = int(generation.table["rows"][shard])
    for task in tasks:
        keys = [key for key in scan.keys[task.start : task.stop] if key not in rejected]
        if len(keys) == rows and d.put_bytes(name, _blob(recipe, keys)):
            return
    samples = d.samples(generation, shard)
    sound = samples is not None
    samples = samples if sound else d.guess(generation, shard)
    if samples is None:
        samples = np.zeros(0, sample_dtype(index.fields, index.sha256))
    placing = Placing(index, load_classes(d.root, index))
    lengths = np.diff(samples["key_stop"].astype(np.int64), prepend=0).tolist()
    places = d.workshop.digests(set(samples["source_size"].tolist()))
    keys, lost = [], []
    last: Position | None = None
    for pair, length in zip(samples["source_hash"].tolist(), lengths, strict=True):
        placed = [(placing.position(key), key) for key in places.get(pair_hash(pair), ()) if len(recipe.trace.key(key)) == length]
        fitting = sorted((position, key) for position, key in placed if position is not None)
        found = next(((position, key) for position, key in fitting if last is None or position > last), None)
        if found is None:
            lost.append((None, pair_hash(pair)))
        else:
            last = found[0]
            keys.append(found[1])
    if not sound and (lost or not d.put_bytes(name, _blob(recipe, keys))):
        d.give_up(f"shards/{name}", f"RAW as it is now has no shard with these keys, and shards/{d.file(generation, 'samples', shard)} is bad too")
    elif lost:
        d.give_up(f"shards/{name}", f"{len(lost):,} sources are not in RAW under their old names", lost)
    elif sound and not d.put_bytes(name, _blob(recipe, keys)):
        d.give_up(f"shards/{name}", "RAW has the sources of its rows under other names now")


def _blob(recipe: Recipe, names: list[bytes]) -> bytes:
    return array_bytes(np.frombuffer(b"".join(map(recipe.trace.key, names)), np.uint8))


def _labels(d: Damaged, index: Index, keys: list[bytes]) -> npt.NDArray[np.int64] | None:
    """Class numbers; None for a dataset without labels.  Raises RecipeError or FormatError."""
    classes = load_classes(d.root, index)
    if len(index.fields) < 2 or classes is None:
        return None
    labels = Placing(index, classes).labels(keys)
    if labels is None:
        raise RecipeError("its keys do not tell their classes")
    return labels


def _mend_labels(d: Damaged, name: str, generation: Generation, shard: int) -> None:
    """From the keys, which say the class."""
    labels = _labels(d, generation.index, d.keys(generation, shard))
    if labels is None or not d.put_bytes(name, array_bytes(labels)):
        d.give_up(f"shards/{name}", "its keys give other labels")


def _mend_samples(d: Damaged, recipe: Recipe, group: list[Place]) -> None:
    """All rows of the shards are made again: nothing else tells what a picture was before it was resized."""
    works: list[ShardWork] = []
    places: dict[int, Place] = {}
    for name, generation, shard in group:
        try:
            keys = d.keys(generation, shard)
            labels = _labels(d, generation.index, keys)
        except (RecipeError, FormatError) as error:
            d.give_up(f"shards/{name}", str(error))
            continue
        lost: list[tuple[bytes | None, str | None]] = [(key, None) for key in keys if not d.workshop.present(key)]
        if lost:
            d.give_up(f"shards/{name}", f"{len(lost):,} sources are not in RAW", lost, recipe.versions())
            continue
        number = len(works)
        places[number] = (name, generation, shard)
        works.append(shard_work(number, f"shard-{number}", keys, labels))

    def on_made(work: ShardWork, seal: Seal, folder: Path) -> None:
        name, generation, shard = places[work.task.number]
        labels = work.values["label"] if work.seal.fields else None
        for kind, digest in seal.files.items():
            if (file := file_name(kind, digest)) in d.bad:
                d.put_file(file, folder / file)
        if name in d.bad and seal.rows == len(work.keys):
            made = read_array(
                folder / file_name("samples", seal.files["samples"]), sample_dtype(generation.index.fields, generation.index.sha256), (seal.rows,)
            )
            d.give_up(f"shards/{name}", *_blame(d, generation, shard, work.keys, made, labels), recipe.versions())
        for kind, digest in seal.files.items():
            (folder / file_name(kind, digest)).unlink(missing_ok=True)

    total = sum(len(work.keys) for work in works)
    d.need_room(min(total, 4 * max((len(work.keys) for work in works), default=0)) * (recipe.index.row_bytes + 256))
    if not works:
        return
    made = d.make(recipe, d.old_shards(recipe), works, on_made)
    for work in works:
        tell_unsettled(d, places[work.task.number][0], work, recipe, made)


def _blame(
    d: Damaged, generation: Generation, shard: int, keys: Sequence[bytes], made: Any, labels: Any
) -> tuple[str, list[tuple[bytes | None, str | None]]]:
    """Which sources give other rows than those that are stored, as far as the shard's images tell."""
    name = d.file(generation, "image", shard)
    try:
        wrong = list(wrong_rows(d.shards / name, generation.index, made, labels)) if name not in d.bad else []
    except (FormatError, FileNotFoundError):
        wrong = []
    if not wrong:
        return "sources in RAW have changed, or are read in another way now", []
    return f"{len(wrong):,} sources in RAW give other rows than those that are stored", [(keys[row], None) for row in wrong]


def _mend_rejects(d: Damaged, name: str, index: Index) -> None:
    """What RAW holds and no shard does is decoded again, and says the same again."""
    recipe = told(d.recipe(index))
    scan, _ = d.plan(recipe)
    generation = next((g for g in d.generations if g.index is index), None)
    if generation is None:
        raise RecipeError("its shard table is lost, which tells which sources were no rejects")
    stored = {key for shard in range(len(generation.table)) for key in d.keys(generation, shard)}
    left = [key for key in scan.keys if key not in stored]
    work = shard_work(0, "rejects", left, None)
    failures = d.make(recipe, [], [work], lambda work, seal, folder: None).failures if left else {}
    lines = [work.rejects[i] for i in sorted(work.rejects)]
    if not d.put_bytes(name, b"".join(canonical(line) for line in lines)):
        failed: list[tuple[bytes | None, str | None]] = [(key, None) for key in sorted(failures)]
        reason = f"RAW as it is now has {len(lines):,} rejects, or gives other reasons; there were {index.rejects:,}"
        d.give_up(f"shards/{name}", f"{reason}; not readable" if failed else reason, failed, recipe.versions())
