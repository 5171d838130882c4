"""Hides that items come from several roots: each root's keys begin with its number, and splits and classes are told from all of them together.

Only folders of images are joined, on disks or object stores; the order of the roots is part of what the dataset is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.folder import FolderSource, beside
from mmcompile.compiler.sources.names import Choice, show
from mmcompile.compiler.sources.remote import RemoteSource
from mmcompile.compiler.sources.splits import Layout, rank
from mmcompile.errors import SourceError
from mmcompile.format.npy import hash_bytes
from mmcompile.format.store import is_url

__all__ = ["JoinedSource"]


@dataclass(frozen=True)
class JoinedSource:
    """The images of several `sources`, all with the same choice of files; the key of an item is the number of its source, "/", and its key there.

    Patterns are on whole keys.  `layout` is for all of them; that of a source alone does not count.
    """

    sources: tuple[FolderSource | RemoteSource, ...]
    layout: Layout = field(default_factory=Layout)

    @property
    def roots(self) -> tuple[str, ...]:
        """All that OUT must not lie in."""
        return tuple(source.root for source in self.sources)

    @property
    def root(self) -> str:
        """What a message calls them."""
        return ", ".join(self.roots)

    @property
    def parallel(self) -> int:
        """As many reads as pay for any of them."""
        return max(source.parallel for source in self.sources)

    def identity(self) -> dict[str, object]:
        """The settings of one of them, and how many there are."""
        return {**self.sources[0].identity(), **self.layout.identity(), "roots": len(self.sources)}

    def location(self) -> str:
        """Where they lie, in their order.  Raises SourceError where one is missing or no folder."""
        return f"roots {hash_bytes(' '.join(source.location() for source in self.sources).encode())}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items: split by split, class by class, root by root.  Raises SourceError, also where one root lies in another."""
        self._check_apart()
        first = self.sources[0]
        choice = Choice(first.include, first.exclude, first.hidden, first.extensions)
        roots = {str(number): source.root for number, source in enumerate(self.sources)}
        scan = arrange(roots, self._trees(choice, progress), choice, self.layout)
        scan = replace(scan, warnings=(*scan.warnings, *beside(scan, self._is_there)))
        named = [root for root in self.roots if rank(os.path.basename(root))[0] < rank("")[0]]
        if len(named) > 1 and not scan.splits:
            as_splits = " ".join(f"--split {show(os.path.basename(root))}={show(root)}" for root in named)
            scan = replace(scan, warnings=(*scan.warnings, f"what is in {', '.join(map(show, named))} is joined; to keep them apart: {as_splits}"))
        above = {os.path.dirname(root) for root in self.roots}
        if scan.classes is None and not scan.splits and len(above) == 1 and not any(map(is_url, self.roots)):
            whole = f"{show(above.pop())} as RAW makes a class of each"
            scan = replace(scan, warnings=(*scan.warnings, f"samples have no labels, as each RAW holds images and no folders of classes: {whole}"))
        return scan

    def _is_there(self, key: bytes) -> bool:
        """Is there a file of this key on a disk?  A store is not asked."""
        source, inside = self._of(key)
        return isinstance(source, FolderSource) and source.is_there(inside)

    def _trees(self, choice: Choice, progress: Callable[[int], None] | None) -> Iterator[Folder]:
        found = 0
        for number, source in enumerate(self.sources):
            for folder in source.tree(choice, _behind(progress, found), str(number).encode()):
                found += len(folder.keys)
                yield folder

    def _check_apart(self) -> None:
        places = [source.root if is_url(source.root) else os.path.realpath(source.root) for source in self.sources]
        for number, place in enumerate(places):
            for other, outer in enumerate(places):
                if other != number and f"{place}/".startswith(f"{outer}/"):
                    raise SourceError(
                        f"RAW {show(self.roots[number])} lies in RAW {show(self.roots[other])}: its images would be taken twice; give one of them",
                        path=self.roots[number],
                    )

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError."""
        source, inside = self._of(key)
        return source.read(inside)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of one item.  Raises OSError."""
        source, inside = self._of(key)
        return source.stat(inside)

    def _of(self, key: bytes) -> tuple[FolderSource | RemoteSource, bytes]:
        number, _, inside = key.partition(b"/")
        return self.sources[int(number)], inside


def _behind(progress: Callable[[int], None] | None, found: int) -> Callable[[int], None] | None:
    """Progress of one source behind `found` items of others."""
    return None if progress is None else lambda n: progress(found + n)
