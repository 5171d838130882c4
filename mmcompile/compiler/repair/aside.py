"""Hides how rows are made a second time, beside the dataset: sources found by hash wherever they lie in RAW, then copied or decoded by workers.

Nothing here writes outside its scratch folder.  Whether what was made is right is for the caller to see, by its hash.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.engines import LocalExecutor
from mmcompile.compiler.marks import Fingerprints, marks_of_index, versions_of
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.plan import ShardTask
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.compiler.reuse import OldShard, write_table
from mmcompile.compiler.run import Counts, Runner, ShardWork
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import STAT_DTYPE, labelled
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.splits import Layout
from mmcompile.compiler.task import Job, hash_items
from mmcompile.compiler.trace import Trace, made_trace
from mmcompile.errors import OptionError
from mmcompile.format.canonical import name_from_json
from mmcompile.format.cpus import usable_cpus
from mmcompile.format.index import Index
from mmcompile.format.samples import hash_pair, pair_hash

__all__ = ["Located", "Made", "Recipe", "Wanted", "Workshop", "located", "recipe_of", "shard_work"]

#: Items hashed by one call of a worker.
_HASH_CHUNK = 128


@dataclass(frozen=True)
class Located(FolderSource):
    """A folder whose items may be asked for as `located(path, key)`: read at `path`, called `key`."""

    def _path(self, key: bytes) -> bytes:
        return super()._path(key.partition(b"\0")[0])


def located(path: bytes, key: bytes) -> bytes:
    """The key of an item that lies at `path` and was called `key`: a decoder looks at the name's extension."""
    return path + b"\0" + key


@dataclass(frozen=True)
class Recipe:
    """How the rows of a generation were made: its settings, understood."""

    index: Index
    preprocess: Preprocess
    source: Located
    shard_bytes: int
    marks: Fingerprints
    trace: Trace

    @property
    def seed(self) -> int | None:
        """Of the order of the rows; None where it is that of the source."""
        return BuildOptions(order=self.index.settings.get("order", "source")).seed

    def versions(self) -> tuple[tuple[str, str, str], ...]:
        """(library, wanted, found) of everything that pixels depend on and that differs here."""
        found = {**versions_of(self.preprocess), "pixel revision": str(PIXEL_REVISION)}
        wanted = {**self.index.versions, "pixel revision": str(self.index.pixel_revision)}
        return tuple((name, wanted[name], found.get(name, "none")) for name in sorted(wanted) if wanted[name] != found.get(name, "none"))


def recipe_of(index: Index, raw: Path, classes: tuple[str, ...] | None) -> Recipe:
    """The recipe of a generation that was built from one folder; `classes` are its class names, None where they are lost or it has none.

    Raises OptionError where its settings are not of that kind.
    """
    kinds = tuple((f.name, f.meaning) for f in index.fields)
    try:
        source, shard_bytes = index.settings["source"], index.settings["shard_bytes"]
        if source["kind"] != "folder" or kinds not in ((("image", "image"),), (("image", "image"), ("label", "class"))) or shard_bytes < 1:
            raise OptionError("it was not built from a folder of images")
        if "roots" in source:
            raise OptionError(f"it was built from {source['roots']} folders, and sources are looked for in one")
        if "classes" in source and classes is None:
            raise OptionError("its classes were fixed with --classes-from, and the file that has their names is lost")
        splits = tuple((str(name), name_from_json(folder)) for name, folder in source.get("splits", ()))
        include, exclude = (tuple(name_from_json(glob) for glob in source[name]) for name in ("include", "exclude"))
        extensions = None if source["extensions"] is None else frozenset(source["extensions"])
        layout = Layout(splits, classes if "classes" in source else None)
        folder = Located(os.fspath(raw), include, exclude, bool(source["hidden"]), extensions, layout)
        return Recipe(
            index,
            Preprocess.from_settings(index.settings["preprocess"]).resolved(),
            folder,
            int(shard_bytes),
            marks_of_index(index),
            made_trace(index),
        )
    except OptionError as error:
        raise OptionError(f"how it was built cannot be repeated ({error})") from None
    except (LookupError, TypeError, ValueError) as error:
        raise OptionError(f"how it was built cannot be repeated (its settings: {type(error).__name__} {error!s:.80})") from None


@dataclass(frozen=True)
class Wanted:
    """A source that is looked for: its hash and size, and the key that it had, or None where that is lost."""

    digest: str
    size: int
    key: bytes | None


@dataclass(frozen=True)
class Made:
    """What came of a run: rows that were decoded, and key -> reason of the items that could be neither stored nor rejected."""

    decoded: int
    failures: dict[bytes, str]


def shard_work(number: int, name: str, keys: list[bytes], labels: npt.NDArray[np.int64] | None, digests: list[str] | None = None) -> ShardWork:
    """Work for `Workshop.make`; `name` is unique in a run.  With `digests` rows of these sources are copied where there are any."""
    n = len(keys)
    fields, values = labelled(labels, n)
    hashes = np.zeros((n, 2), np.uint64)
    if digests is not None:
        hashes[:] = [hash_pair(digest) for digest in digests]
    stat = np.full(n, -1, STAT_DTYPE)
    seal = Seal(name, "", "", {}, fields, values, stat, hashes[:0], {}, {})
    dealt = stat.copy()
    dealt["size"] = 1 << 16  # only decides how items are dealt to workers
    return ShardWork(ShardTask(number, 0, n, name), keys, values, dealt, hashes, np.full(n, digests is not None), seal)


class Workshop:
    """Worker processes and a scratch folder.  `close` ends them at once."""

    def __init__(self, raw: Path, scratch: Path, workers: int | None) -> None:
        self._raw, self._scratch = raw, scratch
        self._workers = usable_cpus() if workers is None else workers
        self._executor = LocalExecutor(self._workers)
        self._source = Located(os.fspath(raw))
        self._hashed: set[bytes] = set()
        self._places: dict[str, list[bytes]] = {}
        self._sizes: dict[int, list[bytes]] | None = None

    def close(self) -> None:
        self._executor.kill()

    def make(
        self,
        recipe: Recipe,
        old: list[OldShard],
        works: Iterable[ShardWork],
        on_made: Callable[[ShardWork, Seal, Path], None],
        on_progress: Callable[[int], None],
    ) -> Made:
        """Settle each item as a build does, and seal its shard aside; `on_made(work, seal, folder of its files)` takes them.

        Rejects are in `work.rejects`; a shard without any settled item is never handed on.
        """
        folder = self._scratch / secrets.token_hex(4)
        shards = folder / "shards"
        shards.mkdir(parents=True)
        (folder / ".build").mkdir()
        table = write_table(old, folder)
        fields = recipe.index.fields
        job = Job(recipe.source, recipe.preprocess, fields, folder, shards, reuse=table, trace=recipe.trace)

        def progress(counts: Counts) -> None:
            on_progress(counts.done)

        runner = Runner(self._executor, job, lambda work, seal: on_made(work, seal, shards), progress, self._workers)
        runner.run(works)
        return Made(runner.counts.decoded, dict(runner.failures))

    def locate(self, wanted: Iterable[Wanted]) -> dict[str, bytes]:
        """Hash -> path relative to RAW, of those that lie in RAW: first where they were, then any file of the same size."""
        todo = {w.digest: w for w in wanted}
        self._hash([w.key for w in todo.values() if w.digest not in self._places and w.key is not None and self._size(w.key) == w.size])
        missing = {w.size for w in todo.values() if w.digest not in self._places}
        if missing:
            by_size = self.files()
            self._hash([path for size in sorted(missing) for path in by_size.get(size, ())])
        return {digest: self._places[digest][0] for digest in todo if digest in self._places}

    def digests(self, sizes: set[int]) -> dict[str, list[bytes]]:
        """Hash -> paths of every file of RAW that has one of these sizes."""
        by_size = self.files()
        self._hash([path for size in sorted(sizes) for path in by_size.get(size, ())])
        return self._places

    def files(self) -> dict[int, list[bytes]]:
        """Size -> paths of all regular files in RAW, whatever they are called; links are followed, each folder is entered once."""
        if self._sizes is None:
            self._sizes = {}
            seen: set[tuple[int, int]] = set()
            todo = [b""]
            while todo:
                folder = todo.pop()
                for name, is_folder, size in _listed(os.path.join(os.fsencode(self._raw), folder), seen):
                    path = folder + b"/" + name if folder else name
                    if is_folder:
                        todo.append(path)
                    else:
                        self._sizes.setdefault(size, []).append(path)
        return self._sizes

    def present(self, key: bytes) -> bool:
        """Does RAW hold a file of this key?"""
        return self._size(key) is not None

    def _size(self, key: bytes) -> int | None:
        try:
            return self._source.stat(key)[0]
        except (OSError, ValueError):
            return None

    def _hash(self, keys: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self._hashed]
        self._hashed.update(new)
        job = Job(self._source, Preprocess(), (), self._scratch, self._scratch)
        chunks = [new[i : i + _HASH_CHUNK] for i in range(0, len(new), _HASH_CHUNK)]
        futures = [self._executor.submit(hash_items, job, chunk) for chunk in chunks]
        for chunk, future in zip(chunks, futures, strict=True):
            found: npt.NDArray[Any] = future.result()
            for key, pair in zip(chunk, found.tolist(), strict=True):
                if any(pair):
                    self._places.setdefault(pair_hash(pair), []).append(key)


def _listed(path: bytes, seen: set[tuple[int, int]]) -> list[tuple[bytes, bool, int]]:
    """(name, is a folder, size) of the files and folders in a folder, sorted; none where it was seen before or cannot be listed."""
    out = []
    try:
        here = os.stat(path)
        if (here.st_dev, here.st_ino) in seen:
            return []
        seen.add((here.st_dev, here.st_ino))
        entries = list(os.scandir(path))
    except OSError:
        return []
    for entry in entries:
        with contextlib.suppress(OSError):  # links that lead nowhere, files that vanish
            if entry.is_dir():
                out.append((entry.name, True, 0))
            elif entry.is_file():
                out.append((entry.name, False, entry.stat().st_size))
    return sorted(out)
