"""COCO's annotations as a source: one sample an image, with the objects that it shows.

Of each image there are `boxes`, their `labels`, `area` and `iscrowd`, `keypoints` where annotations have them, `boxes_count`, and `orig_size`, the
height and width that the file says.  An annotation without a box is left out; an image without annotations stays.  A mask, or a 1 for each class
that an image shows, is made where `--field` asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.annotations import LISTS, Annotations, asked
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.jsonparts import list_members
from mmcompile.compiler.sources.listed import Faults, find_files, folder_of, found_in, image_folder, refuse_twice, relative_keys
from mmcompile.compiler.sources.names import Patterns, show, unreadable
from mmcompile.compiler.sources.outlines import is_drawn, mask_bytes, mask_stat
from mmcompile.compiler.sources.parts import joined_stat, read_item, stat_item
from mmcompile.compiler.sources.walk import expect_file
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text, name_to_json
from mmcompile.format.index import row_dtype

__all__ = ["CocoSource", "is_coco"]

_HEAD_BYTES, _LOOKED_AT = 1 << 16, 20


def is_coco(raw: str) -> bool:
    """Is this a file of annotations?  Reads its beginning: an object with one of the lists in it."""
    if not raw.lower().endswith(".json") or not os.path.isfile(raw):
        return False
    with open(raw, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"{") and any(f'"{name}"'.encode() in head for name in LISTS)


@dataclass(frozen=True)
class CocoSource:
    """The images that the annotations `raw` list, in that order.

    They lie beside it, in a folder beside it or beside its own folder in which the first of them are found, or in `images`.  `include` and `exclude`
    are patterns on keys, as for a FolderSource; `fields` is what was said of single fields, by name.
    """

    raw: str
    images: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fields: tuple[tuple[str, FieldOptions], ...] = ()
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
        """As a FolderSource; with a mask, of both."""
        return read_item(lambda part: mask_bytes(part) if is_drawn(part) else self._files.read(part), key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """As a FolderSource; with a mask, of both."""
        return stat_item(lambda part: mask_stat(part) if is_drawn(part) else self._files.stat(part), key)

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in the order of `images`; `progress` gets the number of images found so far.

        Raises SourceError: the file is no such JSON; images without a file, listed twice or outside the folder; annotations of an image or a
        category that is not there (all of them counted, the first named).
        """
        self.location()
        name, wishes = os.path.basename(self.raw), asked(dict(self.fields))
        seen: set[str] = set()
        found = Annotations(self.raw, _members(self.raw, LISTS, seen), outlines=wishes.mask is not None)
        faults = Faults(lambda at: f"images[{at}]", show(self.raw), "images")
        keys = relative_keys(found.files, os.fsencode(self.root), faults, lambda _: b"")
        include, exclude = Patterns(self.include), Patterns(self.exclude)
        kept = np.fromiter((not exclude.match(text) and (not include or include.match(text)) for text in map(as_text, keys)), bool, len(keys))
        rows = faults.rows = np.flatnonzero(kept)
        keys = keys.take(rows)
        warnings = [line for line in (refuse_twice(keys, faults),) if line]
        if "annotations" not in seen:
            warnings.append(f"{show(name)} has no annotations, which say what images show: no image is of any class")
        stat, beside = find_files(self.root, keys, faults, progress)
        faults.raise_any()
        counts = {f"images of {show(name)}": len(found.ids), "annotations": found.annotations}
        made = found.read(wishes, kept, counts)
        values: npt.NDArray[np.void] = np.zeros(len(rows), row_dtype(tuple(spec for spec, _ in made.fields)))
        for spec, array in made.fields:
            values[spec.name] = array
        left_out = {reason: count for reason, count in (("in no annotation file", beside), ("excluded", int((~kept).sum()))) if count}
        for option, patterns in (("--include", include), ("--exclude", exclude)):
            warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
        parts: tuple[tuple[str, str], ...] = (("image", "image"),)
        if wishes.mask is not None:
            masks = found.masks(os.fsencode(name), rows, made.faults)
            stat = joined_stat([stat, np.array([mask_stat(key) for key in masks], STAT_DTYPE)])
            keys, parts = keys.with_beside([masks]), (*parts, (wishes.mask, "mask"))
        told = None, left_out, tuple(warnings), counts
        fields = tuple(spec for spec, _ in made.fields)
        return Scan(keys, fields, values, stat, *told, parts=parts, forms=made.forms, faults=made.faults)

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


def _members(path: str, wanted: tuple[str, ...], seen: set[str] | None = None) -> Iterator[tuple[str, int, Any]]:
    """`list_members`; raises SourceError in place of what that and the file raise."""
    expect_file(path, "a file of COCO annotations")
    try:
        with open(path, "rb") as file:
            yield from list_members(file, wanted, seen)
    except ValueError as error:
        why = "it is no UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise SourceError(f"{show(path)}: it is no file of COCO annotations: {why}", path=path) from error
    except OSError as error:
        raise unreadable(path, error) from error
