"""Hides how a bad image file is made again: good rows from itself, others from other shards, or from their sources, wherever these lie in RAW."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.copying import Copier
from mmcompile.compiler.repair.aside import Recipe, Wanted, located, shard_work
from mmcompile.compiler.repair.state import Damaged, Place, RecipeError, tell_unsettled
from mmcompile.compiler.reuse import RowTable, write_table
from mmcompile.compiler.run import ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.trace import made_trace
from mmcompile.errors import FormatError
from mmcompile.format.catalog import Generation, open_regular
from mmcompile.format.damage import damaged_rows
from mmcompile.format.index import row_dtype
from mmcompile.format.npy import file_name, header, read_array
from mmcompile.format.samples import hash_pair, keys_of, pair_hash, sample_dtype

__all__ = ["mend_images"]

_COPY = 8 << 20


def mend_images(d: Damaged, recipe: Recipe, group: list[Place]) -> None:
    """Good rows are copied from the bad file; the others are copied from other shards, or decoded from their sources."""
    works: list[ShardWork] = []
    wrecks: dict[int, _Wreck] = {}
    wanted = []
    for place in group:
        try:
            wreck = _Wreck(d, *place)
        except (RecipeError, FormatError) as error:
            d.give_up(f"shards/{place[0]}", str(error))
            continue
        wrecks[len(wrecks)] = wreck
        wanted += [Wanted(*source) for source in wreck.sources()]
    if not wrecks:
        return
    places = d.workshop.locate(wanted)
    folder = d.scratch / "rows"
    folder.mkdir(exist_ok=True)
    old = d.old_shards(recipe)
    path = write_table(old, folder)
    copier = None if path is None else Copier(RowTable(path), recipe.preprocess, recipe.index.fields)
    image = recipe.index.fields[0]
    none: npt.NDArray[np.void] = np.zeros(1, row_dtype(recipe.index.fields[1:]))
    for number, wreck in wrecks.items():
        lost: list[tuple[bytes | None, str | None]] = []
        keys: list[bytes] = []
        for digest, _, key in wreck.sources():
            if digest in places:
                keys.append(located(places[digest], places[digest] if key is None or recipe.trace.hashing else key))
            else:
                keys.append(key or b"lost")
                if copier is None or not any(copier.copy(*place, none, [key or b""])[3][0] for place in copier.places(hash_pair(digest))):
                    lost.append((key, digest))
        if lost:
            d.give_up(f"shards/{wreck.name}", f"{len(lost):,} sources are not in RAW, or have changed", lost)
        elif keys:
            works.append(shard_work(number, wreck.name.partition(".")[0], keys, wreck.labels, wreck.digests))
        else:
            d.need_room(wreck.file_bytes)
            wreck.put(None)

    def on_made(work: ShardWork, seal: Seal, folder: Path) -> None:
        wreck = wrecks[work.task.number]
        if seal.rows == len(wreck.rows):
            wreck.settle(seal, folder, recipe)
        for kind, digest in seal.files.items():
            (folder / file_name(kind, digest)).unlink(missing_ok=True)

    total = sum(len(work.keys) for work in works)
    d.need_room(total * (image.row_bytes + 256) + max((wreck.file_bytes for wreck in wrecks.values()), default=0))
    if not works:
        return
    made = d.make(recipe, old, works, on_made)
    for work in works:
        wreck = wrecks[work.task.number]
        tell_unsettled(d, wreck.name, work, recipe, made, wreck.digests)


class _Wreck:
    """A bad image file: which of its rows are bad, and what they were made from."""

    def __init__(self, d: Damaged, name: str, generation: Generation, shard: int) -> None:
        self.d, self.name, self.generation, self.shard = d, name, generation, shard
        samples = d.samples(generation, shard)
        if samples is None:
            raise RecipeError(f"shards/{d.file(generation, 'samples', shard)} is lost too, which tells the sources of its rows")
        self.field = generation.index.fields[0]
        self.count = len(samples)
        labels = None
        if len(generation.index.fields) > 1:
            label = d.file(generation, "label", shard)
            if label in d.bad:
                raise RecipeError(f"shards/{label} is lost too, so good rows cannot be told from bad ones")
            labels = read_array(d.shards / label, np.dtype("<i8"), (self.count,))
        try:
            self.rows = damaged_rows(d.root, generation, shard)
        except FormatError:  # nothing there that can be read
            self.rows = np.arange(self.count)
        self.labels = None if labels is None else labels[self.rows]
        self.samples = samples[self.rows]
        self.digests = [pair_hash(pair) for pair in self.samples["source_hash"].tolist()]
        self.keys: list[bytes | None] = [None] * len(self.rows)
        if d.file(generation, "keys", shard) not in d.bad:
            keys = d.keys(generation, shard) if made_trace(generation.index).told else keys_of(samples, d.blob(generation, shard))
            self.keys = [keys[row] for row in self.rows.tolist()]
        self.file_bytes = len(header(self.field.stored, (self.count, *self.field.shape))) + self.count * self.field.row_bytes

    def sources(self) -> Iterator[tuple[str, int, bytes | None]]:
        """(hash, size, key) of each bad row's source."""
        return zip(self.digests, self.samples["source_size"].tolist(), self.keys, strict=True)

    def settle(self, seal: Seal, folder: Path, recipe: Recipe) -> None:
        """Take the rows that were made aside, if they are the right ones."""
        made = read_array(
            folder / file_name("samples", seal.files["samples"]),
            sample_dtype(self.generation.index.fields, self.generation.index.sha256),
            (seal.rows,),
        )
        wrong = np.flatnonzero(made["row_hash"] != self.samples["row_hash"]).tolist()
        if wrong:
            sources = [(self.keys[i], self.digests[i]) for i in wrong]
            self.d.give_up(f"shards/{self.name}", f"{len(wrong):,} sources give other rows than at the build", sources, recipe.versions())
        else:
            self.put(folder / file_name("image", seal.files["image"]))

    def put(self, made: Path | None) -> None:
        """Write the whole file aside, good rows from the bad file and bad ones from `made`, and put it in place."""
        head = header(self.field.stored, (self.count, *self.field.shape))
        target = self.d.scratch / self.name
        path = self.d.shards / self.name
        good = open_regular(path) if len(self.rows) < self.count else -1
        new = open_regular(made) if made is not None else -1
        offset = len(header(self.field.stored, (len(self.rows), *self.field.shape)))
        size = self.field.row_bytes
        try:
            with open(target, "wb") as file:
                file.write(head)
                done = at = 0
                for run in np.split(self.rows, np.flatnonzero(np.diff(self.rows) != 1) + 1) if len(self.rows) else ():
                    first = int(run[0])
                    _copy(good, len(head) + done * size, (first - done) * size, file)
                    _copy(new, offset + at * size, len(run) * size, file)
                    done, at = first + len(run), at + len(run)
                _copy(good, len(head) + done * size, (self.count - done) * size, file)
        finally:
            for fd in (good, new):
                if fd >= 0:
                    os.close(fd)
        if not self.d.put_file(self.name, target):
            target.unlink(missing_ok=True)
            if f"shards/{self.name}" not in self.d.missing:
                self.d.give_up(f"shards/{self.name}", "its rows are all as they were, and still it is not the file of this name: the index is wrong")


def _copy(source: int, offset: int, count: int, target: Any) -> None:
    """Append `count` bytes of an open file to another."""
    while count:
        part = os.pread(source, min(_COPY, count), offset)
        if not part:
            raise FormatError("a file became shorter while it was repaired")
        target.write(part)
        offset, count = offset + len(part), count - len(part)
