"""Hides how a build writes to a store: on a local folder that stands for OUT, from which finished shards go up, and at the end the index.

An object is there whole or not at all; a shard's seal follows its files, the index follows everything that it names, and only then is deleted what
nothing names any more.  So a kill at any moment leaves the published dataset as it was, and a build that can go on.  Locally there are never more
image shards than are being made or copied from (of rows without keys up to 256 MiB).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from mmcompile.compiler.outcome import BuildReport, Progress
from mmcompile.errors import BuildError, CorruptShardError, RemoteError
from mmcompile.format.catalog import digest_file, digest_of, single_files
from mmcompile.format.index import load_index
from mmcompile.format.mirror import Mirror, in_threads, make_stub
from mmcompile.format.store import Store
from mmcompile.format.storelock import StoreLock

__all__ = ["Fetched", "Staging", "send_shard"]

#: Files of `.build/` that stay between builds, or while one is not finished.
_BUILD = ("settings.json", "stat-cache", "rows", "rejects.jsonl", "exclude.json")
#: Bytes of old shards that are held to copy rows from: a rebuild in order needs two or three at a time, a renamed folder some more.
_FETCHED_BYTES = 8 << 30


class Staging(Mirror):
    """A Mirror that a build works on, and whose changes it sends up."""

    def __init__(self, url: str, progress: Callable[[Progress], None]) -> None:
        super().__init__(url)
        self._progress = progress
        self._sent: dict[str, bytes] = {}

    def __enter__(self) -> Staging:
        return self

    def progress(self, progress: Progress) -> None:
        """Passes progress on, with the URL in place of the folder."""
        self._progress(replace(progress, message=self.text(progress.message)) if progress.message else progress)

    def report(self, report: BuildReport) -> BuildReport:
        """A report, with the URL in place of the folder."""
        return replace(report, out=self.store.url, rejects_file=None if report.rejects_file is None else self.text(report.rejects_file))

    def lock(self, required: bool) -> StoreLock:
        """The lock of OUT."""
        return StoreLock(self.store, lambda line: self._progress(Progress("lock", message=line)), required=required)

    def keep(self) -> None:
        """Make the small files of `.build/` on the store what they are here."""
        gone = []
        for name in (f".build/{file}" for file in _BUILD):
            try:
                data = (self.folder / name).read_bytes()
            except FileNotFoundError:
                gone += [name] if name in self.there or name in self._sent else []
                continue
            if self._sent.get(name) != data:
                self.store.write(name, data)
                self._sent[name] = data
        self.store.delete(gone)

    def refresh(self) -> None:
        """See what the shards are that were sent up meanwhile."""
        (self.folder / "shards").mkdir(exist_ok=True)
        self._list(["shards"])

    def publish(self, still_held: Callable[[], bool], gone: Iterable[str] | None) -> None:
        """Make the store what the folder has become since `refresh`: files, generation, index, in this order; then delete what nothing needs.

        That is the files `gone`, names in shards/, and the seals; None where it is unknown, and nothing is deleted.  Nor is it where the folder lost
        a generation that the store has, as may happen when something tidies up TMPDIR: what that names is not known here then.
        """
        shards = [f"shards/{name}" for name in sorted(os.listdir(self.folder / "shards"))]
        in_threads(lambda name: send(self.store, self.folder, name), [name for name in shards if name not in self.there])
        generations = [f"generations/{name}" for name in sorted(os.listdir(self.folder / "generations"))]
        index, current = load_index(self.folder, alone=True)
        once = {f"shards/{file}" for _, file in single_files(index)} & set(self.there)  # perhaps damaged there: they are small
        for name in [*sorted(once), *(name for name in generations if name not in self.there or name == f"generations/{current}.json")]:
            self.store.put(self.folder / name, name)
        if not still_held():
            raise BuildError(
                f"{self.store.url}: another run took the lock while this one was at work; nothing is published: run the same command again"
            )
        self.store.put(self.folder / "index.json", "index.json")
        if gone is None or not {name for name in self.there if name.startswith("generations/")} <= set(generations):
            return
        seals = [name for name, facts in self.store.list(".build/seals") if facts["type"] != "directory"]
        in_threads(lambda name: self.store.delete([name]), [name for name in map("shards/{}".format, gone) if name in self.there])
        in_threads(lambda name: self.store.delete([name]), [name for name in seals if not (self.folder / name).exists()])


def send(store: Store, folder: Path, name: str) -> None:
    """Send a file of shards/ up, unless it is there; one that does not hash to its name (a stub, or a bad disk) is not sent.  Raises RemoteError."""
    path = folder / name
    size = path.stat().st_size
    if store.size(name) == size:
        return
    if digest_file(path) != digest_of(path.name):
        raise CorruptShardError(f"{path}: its content does not match its name; run the same command again", path=str(path))
    store.put(path, name)
    if (found := store.size(name)) != size:
        raise RemoteError(
            f"{store.where(name)}: {size:,} bytes were sent, {found or 0:,} are there; run the same command again", path=store.where(name)
        )


def send_shard(store: Store, folder: Path, names: list[str], seal: Path, *, large: int = 1) -> None:
    """Send the files of a finished shard up, then its seal; then its `large` files, the first of its names, are stubs here."""
    for name in names:
        send(store, folder, f"shards/{name}")
    store.put(seal, str(seal.relative_to(folder)))
    for path in (folder / "shards" / name for name in names[:large]):
        make_stub(path, path.stat().st_size)


class Fetched:
    """Brings old shards from a store to copy rows from, once for all processes that share `folder`; the least used go.  Pickles."""

    def __init__(self, store: Store, folder: Path, limit: int = _FETCHED_BYTES) -> None:
        self._store, self._folder, self._limit = store, folder, limit

    def __call__(self, path: Path) -> Path:
        """Where the content of a file of shards/ is, checked against its hash.  Raises RemoteError, FileNotFoundError, FormatError."""
        here = self._folder / path.name
        if not here.exists():
            self._folder.mkdir(exist_ok=True)
            fd = os.open(self._folder / f"{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not here.exists():
                    self._bring(here)
            finally:
                os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.utime(here)
        return here

    def _bring(self, here: Path) -> None:
        part = here.with_suffix(".part")
        self._store.get(f"shards/{here.name}", part)
        if digest_file(part) != digest_of(here.name):
            part.unlink()
            raise CorruptShardError(f"{self._store.where(f'shards/{here.name}')}: its content does not match its name")
        part.rename(here)
        kept = [(entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder) if entry.name.endswith(".npy")]
        total = sum(size for _, size, _ in kept)
        for _, size, old in sorted(kept)[:-1]:
            if total > self._limit:  # whoever has it open reads on
                Path(old).unlink(missing_ok=True)
                total -= size
