"""Hides where the files of a dataset come from: its own folder, or copies on a local disk of what lies far away.

Whoever reads a file holds it meanwhile, by its name in shards/, and finds it complete on a local path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from mmcompile.format.index import Index, load_index

__all__ = ["Files", "LocalFiles", "is_remote"]

#: Where a mapped page can fail after it was opened (server gone, file cut): a failed read is an exception there, a failed page a signal.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "gluster", "virtiofs", "orangefs", "vboxsf")


class Files(Protocol):
    """The files of one dataset.  Thread-safe, safe after a fork, and pickled as what it takes to find them again."""

    @property
    def root(self) -> Path | str:
        """Where the dataset lies: a path, or a URL."""

    @property
    def shards(self) -> Path:
        """The local folder in which the files of shards/ lie while they are held."""

    @property
    def most_bytes(self) -> int | None:
        """Files held open should not be more than this, as they take room on the disk that others want; None: no limit."""

    @property
    def far(self) -> bool:
        """Do files have to be brought here first, and can they go again?"""

    def load(self, generation: str | None) -> tuple[Index, str]:
        """The index of a generation (None: the current one) and its name.  Raises NotADatasetError, GenerationError, VersionError, FormatError."""

    def kept(self, generation: str) -> bool:
        """Is this generation still there?"""

    def held(self, name: str, nbytes: int | None) -> AbstractContextManager[Path]:
        """A file of shards/ on a local path, where it stays while this lasts.  FileNotFoundError where it is missing (as it enters or later).

        `nbytes` is the size that it must have, where that is known: no more of it is brought here.
        """

    def replace(self, name: str) -> None:
        """A copy that was held turned out to be damaged: a better one is to come in its place."""

    def here(self, name: str) -> bool:
        """Would `held` return at once?"""

    def ahead(self, wanted: Sequence[tuple[str, int | None]]) -> None:
        """These files (name, bytes where known) will be wanted, in this order; what was said before no longer counts.  At once, and never fails."""

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many of the first files of these sizes can be here at once."""


class LocalFiles:
    """A dataset in a folder of its own: everything is where it lies."""

    most_bytes, far = None, False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.shards = self.root / "shards"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.root),)

    def load(self, generation: str | None) -> tuple[Index, str]:
        return load_index(self.root, generation)

    def kept(self, generation: str) -> bool:
        return os.path.exists(self.root / "generations" / f"{generation}.json")

    @contextmanager
    def held(self, name: str, nbytes: int | None) -> Iterator[Path]:
        yield self.shards / name

    def replace(self, name: str) -> None:
        pass

    def here(self, name: str) -> bool:
        return True

    def ahead(self, wanted: Sequence[tuple[str, int | None]]) -> None:
        pass

    def fitting(self, sizes: Sequence[int]) -> int:
        return len(sizes)


def is_remote(folder: Path) -> bool:
    """Does this folder lie on a file system that can fail after a file was opened?"""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        path = os.fsencode(os.path.realpath(folder))
    except OSError:
        return False
    best, kind = b"", ""
    for line in lines:
        left, _, right = line.partition(b" - ")
        point = left.split()[4].decode("unicode_escape").encode("latin-1")
        inside = path == point or path.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0].decode()
    return kind.startswith(_REMOTE)
