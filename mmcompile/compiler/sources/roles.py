"""Hides which further columns of a list are more than a number: pixels beside the main image, boxes, lists, by their names or by what was asked for.

Pure.  A name decides only together with what stands in the column: paths of images that are there, bytes of images, lists.  What was asked for by
`--field` is taken as asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.columns import IMAGE_NAMES, named_alike
from mmcompile.compiler.sources.names import show
from mmcompile.errors import OptionError
from mmcompile.format.fields import PIXELS, RESERVED

__all__ = ["Role", "Seen", "is_called_boxes", "is_called_mask", "roles_of"]

#: What a column of masks is called, of these words or with them at an end.
_MASKS = frozenset({"mask", "masks", "segmentation", "seg", "annotation", "annotations", "semantic"})
#: What a column of masks is called as well, where it holds images.
_LABELS = frozenset({"label", "labels", "target", "ground_truth", "gt"})
#: Words in the names of columns of further images.
_IMAGES = frozenset({"image", "img", "left", "right", "depth", "frame", "rgb", "nir", "ir", "thermal", "before", "after", "view", "photo", "picture"})
_BOXES = frozenset({"box", "boxes", "bbox", "bboxes", "bounding_boxes", "objects_bbox"})
#: Of lists beside boxes: the classes of these.
_IDS = frozenset({"labels", "label", "category", "categories", "classes", "class_ids", "category_ids", "class_labels", "box_labels", "bbox_labels"})
#: What stands behind the name of what a path leads to.
_SUFFIX = re.compile(r"_(?:file_?names?|file_?paths?|files?|paths?)\Z")


@dataclass(frozen=True)
class Seen:
    """What the first cells of a column are: `images`, paths of such that are there, or where they are `held` their bytes; `lists`; or `objects`,
    lists by name."""

    images: bool = False
    held: bool = False
    lists: bool = False
    objects: bool = False


@dataclass(frozen=True)
class Role:
    """The field that a column becomes, of which kind, and what was asked for of it; kind "objects" is several lists by name, as boxes and
    labels; `lists`: there is one in each cell."""

    column: str
    field: str
    kind: str
    options: FieldOptions
    lists: bool = False

    @property
    def pixels(self) -> bool:
        return self.kind in PIXELS


def _names_of(column: str) -> tuple[str, str, str]:
    """What `--field` may call a column: itself, its field, and what its path leads to."""
    plain = re.sub(r"[^a-z0-9]+", "_", column.strip().lower()).strip("_")
    return column, plain, _SUFFIX.sub("", plain)


def is_called_boxes(column: str) -> bool:
    """Is this the name of a column of boxes?"""
    return _names_of(column)[2] in _BOXES


def is_called_mask(column: str) -> bool:
    """Is this the name of a column of masks?"""
    return bool(_words(_names_of(column)[2]) & _MASKS)


def roles_of(
    columns: Mapping[str, Callable[[], Seen]],
    asked: Mapping[str, FieldOptions],
    guessed: Collection[str],
    others: Sequence[str],
    where: str,
) -> list[Role]:
    """What these columns become, of those that are more than any column of numbers, in their order; `columns` tell what is in them when asked.

    `asked`: what was said of fields, by name; those called like `others` may be said of, too.  Of the others those that are `guessed` are told by
    their names.  Raises OptionError: a name that no column has, or that several have.
    """
    said = _said(tuple(columns), asked, others, where)
    out: list[Role] = []
    for column, look in columns.items():
        name, options = said.get(column, (None, FieldOptions()))
        kind = options.kind or (_guessed(column, look()) if column in guessed or name is not None else None)
        if kind == "boxes" and look().objects:
            kind = "objects"
        if kind is None and name is not None:
            kind = "value"
        if kind is not None:
            options.check("boxes" if kind == "objects" else kind)
            taken = {*RESERVED, "image", *(role.field for role in out)}
            out.append(Role(column, _field_of(column, kind, name, taken), kind, options, kind == "class" and look().lists))
    if any(role.kind == "boxes" for role in out):
        known = {role.column for role in out}
        named = [column for column in guessed if column not in known and _names_of(column)[1] in _IDS and columns[column]().lists]
        out += [Role(column, _field_of(column, "class", None, set(RESERVED)), "class", FieldOptions(), lists=True) for column in named]
    return out


def _said(columns: Sequence[str], asked: Mapping[str, FieldOptions], others: Sequence[str], where: str) -> dict[str, tuple[str, FieldOptions]]:
    """(its name as said, settings) by column."""
    out: dict[str, tuple[str, FieldOptions]] = {}
    for name, options in asked.items():
        found = [column for column in columns if name == column] or [column for column in columns if name in _names_of(column)]
        if not found and name == "boxes":  # as their field is called
            found = [column for column in columns if _names_of(column)[1] == "objects"]
        if not found and name in others:
            continue
        if not found:
            shown = ", ".join(map(show, columns[:20])) + (", …" if len(columns) > 20 else "")
            raise OptionError(f"--field {show(name)}: {where} has no such column (it has {shown})", options=["field"])
        if len(found) > 1:
            raise OptionError(f"--field {show(name)}: {show(found[0])} or {show(found[1])}? Write the column", options=["field"])
        if found[0] in out:
            raise OptionError(f"--field {show(name)}: column {show(found[0])} is spoken of as {show(out[found[0]][0])} already", options=["field"])
        out[found[0]] = name, options
    return out


def _field_of(column: str, kind: str, said: str | None, taken: set[str]) -> str:
    """What the field of a column is called: as `--field` calls it, if it does; of pixels else what the path leads to."""
    _, plain, name = _names_of(column)
    likely = (said or "", name if kind in PIXELS else "", plain)
    return next((word for word in likely if word not in taken and re.fullmatch("[a-z][a-z0-9_]{0,63}", word)), f"column_{plain}"[:64].rstrip("_"))


def _words(name: str) -> set[str]:
    return set(re.sub("[0-9]+", "_", name).split("_"))


def _guessed(column: str, seen: Seen) -> str | None:
    """The kind of a column of which nothing was said; None for one that is as any other is."""
    _, plain, name = _names_of(column)
    if seen.images:
        if is_called_mask(column) or name in _LABELS:
            return "mask"
        if seen.held:
            return "image"
        # Other names of the main image are no further one.
        return "image" if (_words(name) & _IMAGES or name != plain) and named_alike([plain], IMAGE_NAMES) is None else None
    if seen.objects:
        return "objects" if name == "objects" else None
    return "boxes" if seen.lists and name in _BOXES else None
