"""Volumes in folders as a source: a file is one, or (DICOM) a folder with all slices of a series.

A series is read as all its files packed, in the order of their names, under the name of the folder with / behind it: which slice lies where is the
decoder's to find out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmcompile.compiler.formats import EXTENSIONS, VOLUME_EXTENSIONS, extension
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.folder import MAX_SOURCE_BYTES, FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.compiler.sources.parts import pack, stat_joined
from mmcompile.compiler.sources.remote import RemoteSource
from mmcompile.compiler.sources.splits import Layout
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["Series", "VolumeSource", "are_volumes", "is_slice"]

#: A slice of a series; the folder that holds some is one item.
_SLICES = (".dcm", ".dicom")
#: What holds nothing but volumes.
_CERTAIN = frozenset({".nii", ".nii.gz", *_SLICES})
#: Files that are looked at before it is said what RAW is.
_LOOKED_AT = 1000


def is_slice(name: bytes) -> bool:
    """Is a file of this name a slice of a series?"""
    return name[-6:].lower().endswith(tuple(s.encode() for s in _SLICES))


def are_volumes(raw: Sequence[str]) -> bool:
    """Do these folders hold NIfTI or DICOM, and no pictures, as far as their first files tell?"""
    return all(_certain(place) for place in raw)


def _certain(raw: str) -> bool:
    found, seen = False, 0
    for _, inner, names in os.walk(raw):
        inner.sort()
        for name in sorted(name for name in names if not name.startswith(".")):
            kind = extension(name)
            if kind in EXTENSIONS:
                return False
            found |= kind in _CERTAIN
            seen += 1
            if seen == _LOOKED_AT:
                return found
    return found


@dataclass(frozen=True)
class Series:
    """Files of a folder on a disk or a store, in which a folder of slices is one item; else as those of `files`."""

    files: FolderSource | RemoteSource

    def tree(self, choice: Choice, progress: Callable[[int], None] | None = None) -> Iterator[Folder]:
        """As of a FolderSource.  Raises SourceError."""
        return iter(_with_series(self.files, self.files.tree(choice, progress)))

    def read(self, key: bytes) -> bytes:
        """The bytes of an item; of a series all its files, packed.  Raises OSError."""
        if not key.endswith(b"/"):
            return self.files.read(key)
        slices = self._slices(key)
        total = sum(self.files.stat(name)[0] for name in slices)
        if total > MAX_SOURCE_BYTES:
            raise OSError(errno.EFBIG, f"{total} bytes in a series, more than the {MAX_SOURCE_BYTES} that are read", as_text(key))
        return pack([self.files.read(name) for name in slices])

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of an item now, of a series of all its files.  Raises OSError."""
        return stat_joined([self.files.stat(name) for name in self._slices(key)]) if key.endswith(b"/") else self.files.stat(key)

    def _slices(self, key: bytes) -> list[bytes]:
        names = os.listdir(os.path.join(os.fsencode(self.files.root), key))
        found = sorted((name for name in names if is_slice(name) and not name.startswith(b".")), key=as_text)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no slice left in it", as_text(key))
        return [key + name for name in found]


def _with_series(files: FolderSource | RemoteSource, folders: Iterable[Folder]) -> list[Folder]:
    """The same folders, with those that hold slices as items of the ones that they lie in.  Raises SourceError for slices in RAW itself."""
    out: dict[str, Folder] = {}
    items: dict[str, list[tuple[bytes, tuple[int, int, int, int]]]] = {}
    for folder in folders:
        out[folder.text] = folder
        mask = np.fromiter(map(is_slice, folder.keys), bool, len(folder.keys))
        if not mask.any():
            continue
        if isinstance(files, RemoteSource):
            raise SourceError(f"{files.root}: DICOM series are read from a disk: bring them to one, or mount the store", path=files.root)
        if not folder.text:
            raise SourceError(
                f"{show(files.root)} holds slices of a series itself: expected a folder for each series; give the folder above as RAW",
                path=files.root,
            )
        above, _, name = folder.text.rpartition("/")
        items.setdefault(above, []).append((os.fsencode(name) + b"/", stat_joined([tuple(s) for s in folder.stat[mask].tolist()])))
        rest = np.flatnonzero(~mask)
        folder.keys, folder.stat, folder.devices = folder.keys.take(rest), folder.stat[rest], None
        folder.counts["series"] += 1
    for above, found in items.items():
        into = out.setdefault(above, Folder(above, Keys.of([]), np.zeros(0, STAT_DTYPE)))
        start = len(os.fsencode(above)) + bool(above)
        names = [*(key[start:] for key in into.keys), *(name for name, _ in found)]
        stat = np.concatenate([into.stat, np.array([s for _, s in found], STAT_DTYPE)])
        made = Folder.of(os.fsencode(above), names, stat)
        into.keys, into.stat, into.devices = made.keys, made.stat, None
    return list(out.values())


@dataclass(frozen=True)
class VolumeSource:
    """The volumes in the folder of `files`: .nii, .nii.gz, .npy, TIFF, and folders of DICOM slices; classes and splits as of a FolderSource."""

    files: FolderSource | RemoteSource
    layout: Layout = field(default_factory=Layout)

    @property
    def root(self) -> str:
        """The folder that keys are relative to."""
        return self.files.root

    @property
    def parallel(self) -> int:
        """As its files."""
        return self.files.parallel

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {**self.files.identity(), "kind": "volumes", **self.layout.identity()}

    def location(self) -> str:
        """As a FolderSource."""
        return self.files.location()

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items; `progress` gets the number of files found so far.  Raises SourceError as a FolderSource does."""
        files = self.files
        choice = Choice(files.include, files.exclude, files.hidden, VOLUME_EXTENSIONS)
        found = arrange({"": self.root}, Series(files).tree(choice, progress), choice, self.layout)
        return replace(found, parts=(("image", "volume"),))

    def read(self, key: bytes) -> bytes:
        """As `Series.read`."""
        return Series(self.files).read(key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """As `Series.stat`."""
        return Series(self.files).stat(key)
