"""COCO's annotations as a source: one sample an image, and which classes it shows.

Of each image there is `labels`, a 1 for each class that at least one annotation of it has (crowds too), and `objects`, how many annotations it has.
Boxes, masks and keypoints are in pixels of the source, which a resize moves: they are not taken.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.jsonparts import is_unicode, list_members
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.listed import Faults, find_files, folder_of, found_in, image_folder, refuse_twice, relative_keys
from mmcompile.compiler.sources.names import Patterns, show
from mmcompile.compiler.sources.walk import expect_file
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.index import Field, Names, row_dtype
from mmcompile.text import counted

__all__ = ["CocoSource", "is_coco"]

_LISTS = ("images", "annotations", "categories")
_HEAD_BYTES, _LOOKED_AT = 1 << 16, 20


def is_coco(raw: str) -> bool:
    """Is this a file of annotations?  Reads its beginning: an object with one of the lists in it."""
    if not raw.lower().endswith(".json") or not os.path.isfile(raw):
        return False
    with open(raw, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"{") and any(f'"{name}"'.encode() in head for name in _LISTS)


@dataclass(frozen=True)
class CocoSource:
    """The images that the annotations `raw` list, in that order.

    They lie beside it, in a folder beside it or beside its own folder in which the first of them are found, or in `images`.  `include` and `exclude`
    are patterns on keys, as for a FolderSource.
    """

    raw: str
    images: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    _files: FolderSource = field(init=False, repr=False, compare=False)
    parallel: ClassVar[int] = FolderSource.parallel
    #: What OUT must not lie in: nothing, as no folder is looked into but those in which the images lie.
    roots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", os.path.abspath(self.raw))
        object.__setattr__(self, "_files", FolderSource(self._find_images()) if self.images is None else image_folder(self.images))

    @property
    def root(self) -> str:
        """The folder that keys are relative to."""
        return self._files.root

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {
            "kind": "coco",
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
        }

    def location(self) -> str:
        """As a FolderSource."""
        return self._files.location()

    def read(self, key: bytes) -> bytes:
        """As a FolderSource."""
        return self._files.read(key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """As a FolderSource."""
        return self._files.stat(key)

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in the order of `images`; `progress` gets the number of images found so far.

        Raises SourceError: the file is no such JSON; images without a file, listed twice or outside the folder; annotations of an image or a
        category that is not there (all of them counted, the first named).
        """
        self.location()
        found = _Annotations(self.raw)
        faults = Faults(lambda at: f"images[{at}]", show(self.raw), "images")
        keys = relative_keys(found.files(), os.fsencode(self.root), faults, lambda _: b"")
        include, exclude = Patterns(self.include), Patterns(self.exclude)
        kept = np.fromiter((not exclude.match(text) and (not include or include.match(text)) for text in map(as_text, keys)), bool, len(keys))
        rows = faults.rows = np.flatnonzero(kept)
        keys = keys.take(rows)
        warnings = [line for line in (refuse_twice(keys, faults),) if line]
        if "annotations" not in found.seen:
            warnings.append(f"{show(os.path.basename(self.raw))} has no annotations, which say what images show: no image is of any class")
        stat, beside = find_files(self.root, keys, faults, progress)
        faults.raise_any()
        fields, values = found.values()
        left_out = {reason: count for reason, count in (("in no annotation file", beside), ("excluded", int((~kept).sum()))) if count}
        for option, patterns in (("--include", include), ("--exclude", exclude)):
            warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
        counts = {f"images of {show(os.path.basename(self.raw))}": len(found.ids), "annotations, without boxes and masks": found.annotations}
        if alone := int((values["objects"][rows] == 0).sum()):
            counts["images without an annotation"] = alone
        return Scan(keys, fields, values[rows], stat, None, left_out, tuple(warnings), counts)

    def _find_images(self) -> str:
        """The folder in which the images lie: the file's own, where the first of them are not found anywhere."""
        here = os.path.dirname(self.raw)
        names: list[str] = []
        for _, _, image in _members(self.raw, ("images",)):
            if isinstance(image, dict) and isinstance(image.get("file_name"), str):
                names.append(image["file_name"])
            if len(names) == _LOOKED_AT:
                break
        if found_in(names, here):
            return here
        for folder in (here, os.path.dirname(here)):
            if name := folder_of(names, folder)[0]:
                return os.path.join(folder, name)
        return here


def _members(path: str, wanted: tuple[str, ...], seen: set[str] | None = None) -> Any:
    """`list_members`; raises SourceError in place of what that and the file raise."""
    expect_file(path, "a file of COCO annotations")
    try:
        with open(path, "rb") as file:
            yield from list_members(file, wanted, seen)
    except ValueError as error:
        why = "it is no UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise SourceError(f"{show(path)}: it is no file of COCO annotations: {why}", path=path) from error
    except OSError as error:
        raise SourceError(f"cannot read {show(path)}: {error.strerror}", path=path) from error


class _Annotations:
    """What a file of annotations says, as columns: `ids` (N,) of its images; which image and category each annotation has."""

    def __init__(self, path: str) -> None:
        """Raises SourceError."""
        self._path = path
        #: What the file has, by name.
        self.seen: set[str] = set()
        ids, images, kinds = array("q"), array("q"), array("q")
        files, lengths = bytearray(), array("q")
        self._categories: dict[int, str] = {}
        for name, number, member in _members(path, _LISTS, self.seen):
            what = f"{name}[{number}]"
            if name == "images":
                file = _take(path, what, member, "file_name", str).encode("utf-8", "surrogateescape")
                ids.append(_take(path, what, member, "id", int))
                files += file
                lengths.append(len(file))
            elif name == "annotations":
                images.append(_take(path, what, member, "image_id", int))
                kinds.append(_take(path, what, member, "category_id", int) if isinstance(member, dict) and "category_id" in member else _NONE)
            else:
                kind = _take(path, what, member, "id", int)
                if kind in self._categories:
                    raise SourceError(f"{show(path)}: {what} has the id {kind}, as one before it has", path=path)
                self._categories[kind] = _take(path, what, member, "name", str)
        self.ids, self._images, self._kinds = (np.frombuffer(column, np.int64) for column in (ids, images, kinds))
        self._files = Keys(np.frombuffer(files, np.uint8), np.cumsum(np.frombuffer(lengths, np.int64)))
        if not len(self.ids):
            raise SourceError(f"{show(path)}: no images in it: expected a list of images, annotations and categories", path=path)

    @property
    def annotations(self) -> int:
        return len(self._images)

    def files(self) -> Keys:
        """The paths of all images (N,)."""
        return self._files

    def values(self) -> tuple[tuple[Field, ...], npt.NDArray[np.void]]:
        """(fields, their records (N,)).  Raises SourceError: ids that stand twice, or that are not there."""
        order = np.argsort(self.ids, kind="stable")
        ids = self.ids[order]
        if len(again := np.flatnonzero(ids[1:] == ids[:-1])):
            a, b = (int(order[again[0] + i]) for i in range(2))
            raise SourceError(f"{show(self._path)}: images[{a}] and images[{b}] have the same id {self.ids[a]}", path=self._path)
        image = self._places(ids, self._images, "image")
        numbers = np.array(sorted(self._categories), np.int64)
        names = tuple(self._categories[number] for number in numbers.tolist())
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            both = [str(number) for number in numbers.tolist() if self._categories[number] == twice]
            raise SourceError(f"{show(self._path)}: categories {' and '.join(both[:2])} are both called {show(twice)}", path=self._path)
        objects = Field("objects", "int64", (), "value")
        has = self._kinds != _NONE
        fields = (Field("labels", "uint8", (len(names),), "value", columns=Names(names)), objects) if names else (objects,)
        values: npt.NDArray[np.void] = np.zeros(len(ids), row_dtype(fields))
        values["objects"] = np.bincount(order[image], minlength=len(ids))
        kind = self._places(numbers, self._kinds[has], "category", np.flatnonzero(has))
        if names:
            values["labels"][order[image[has]], kind] = 1
        return fields, values

    def _places(
        self, known: npt.NDArray[np.int64], asked: npt.NDArray[np.int64], what: str, numbers: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Where in `known` (sorted) each of these is; `numbers` are those of the annotations (None: from 0 on)."""
        at = np.searchsorted(known, asked)
        wrong = np.flatnonzero(known[np.minimum(at, len(known) - 1)] != asked) if len(known) else np.arange(len(asked))
        if len(wrong):
            first = int(wrong[0])
            number = first if numbers is None else int(numbers[first])
            raise SourceError(
                f"{show(self._path)}: {counted(len(wrong), 'annotations')} of no {what} in it, the first annotations[{number}] of {what} "
                f"{asked[first]}",
                path=self._path,
            )
        return at


#: An annotation without a category: a caption.
_NONE = -(2**63)


def _take(path: str, what: str, member: Any, name: str, kind: type) -> Any:
    value = member.get(name) if isinstance(member, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and not -(2**63) < value < 2**63):
        expected = "a text" if kind is str else "a whole number"
        raise SourceError(f"{show(path)}: {what} has no {name} that is {expected}", path=path)
    if isinstance(value, str) and not is_unicode(value):
        raise SourceError(f"{show(path)}: {what} has a {name} with half a surrogate pair", path=path)
    return value
