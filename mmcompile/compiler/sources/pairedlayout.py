"""Hides which folders lie side by side for one dataset: the names that say so, and what splits they make.

Pure: names of folders in, sets of folders out.  A set is a folder of pictures and the folders beside it, whose files belong to these by stem; it lies
directly in RAW, in each folder that is a split (`train/images`, `train/masks`), or is a split of folders that lie there (`images/train`,
`masks/train`, and `imagesTr`, `labelsTr`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.splits import SPLITS, Layout, rank
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.fields import field_name

__all__ = [
    "ANNOTATIONS",
    "CERTAIN",
    "IMAGES",
    "KNOWN",
    "MASKS",
    "Beside",
    "PairSet",
    "children",
    "chosen",
    "find_sets",
    "kind_of",
    "last_word",
    "word_of",
]

#: Folders of the pictures that all else belongs to, whatever their case; the first that is there is taken.
IMAGES = ("images", "image", "imgs", "img", "jpegimages", "rgb", "left")
#: Folders whose files hold a class id for each pixel.
MASKS = frozenset(
    {
        *("masks", "mask", "annotations", "annotation", "segmentations", "segmentation", "segmentationclass", "segmentationobject", "seg"),
        *("gt", "groundtruth", "ground_truth", "labels", "label", "labelmaps"),
    }
)
#: ... of which these may hold boxes as text.
ANNOTATIONS = frozenset({"labels", "label", "annotations", "annotation"})
#: Folders of further pictures of the same.
FURTHER = frozenset(["right", "depth", "depths", "disparity", "disparities", "normals"])
KNOWN = MASKS | FURTHER | set(IMAGES)
#: Names of pictures that say nothing of classes: a folder of these beside masks is no class.
CERTAIN = frozenset(IMAGES) - {"left"}

#: The split at the end of a name, as in imagesTr.
_TAIL = re.compile(r"(.+[a-z])(Tr|Va|Val|Ts)")
_TAILS = {"Tr": "train", "Va": "val", "Val": "val", "Ts": "test"}


@dataclass(frozen=True)
class Beside:
    """A folder whose files belong to the pictures: as it stands in keys, and the field that it is."""

    folder: str
    field: str


@dataclass(frozen=True)
class PairSet:
    """The folder of pictures `main` and those beside it, as they stand in keys, of one split ("all" where there are none)."""

    split: str
    main: str
    field: str
    beside: tuple[Beside, ...]


def word_of(name: str) -> str:
    """The name of a folder as it is looked up: without its case, a split at its end, and with _ for -."""
    found = _TAIL.fullmatch(name)
    return (found[1] if found is not None and found[1].lower() in KNOWN else name).lower().replace("-", "_")


def _split_in(name: str) -> str:
    """The split that stands at the end of a name; "" for none."""
    found = _TAIL.fullmatch(name)
    return _TAILS[found[2]] if found is not None and found[1].lower() in KNOWN else ""


def field_of(name: str) -> str:
    """The field that a folder is: its name made singular; the pictures are called image."""
    word = word_of(name)
    if word in CERTAIN:
        return "image"
    plural = word.endswith("s") and not word.endswith("ss")
    return field_name(f"{word[:-3]}y" if word.endswith("ies") else word[:-1] if plural else word)


def kind_of(name: str) -> str:
    """What a folder is taken for by its name: "mask" or "image"."""
    return "mask" if word_of(name) in MASKS else "image"


def last_word(folder: str) -> str:
    """The name of a folder that says what it is: the last that is no split."""
    return next((name for name in reversed(folder.split("/")) if name.lower() not in SPLITS), folder)


def children(folders: Collection[str], above: str) -> list[str]:
    """The names of the folders directly in one (""), in order; `folders` are whole paths."""
    start = f"{above}/" if above else ""
    return sorted({text[len(start) :].partition("/")[0] for text in folders if text.startswith(start) and len(text) > len(start)})


def chosen(folders: Collection[str], columns: Collection[str] | None) -> set[str]:
    """These folders without those beside pictures that `columns` does not name, as they are called or as their field is; None takes all.

    Raises OptionError for a name of none.
    """
    if columns is None:
        return set(folders)
    names = {part: {part, field_of(part), *(["boxes"] if word_of(part) in ANNOTATIONS else [])} for text in folders for part in text.split("/")}
    if strange := sorted(set(columns) - {called for all_called in names.values() for called in all_called}):
        there = ", ".join(sorted({field_of(part) for part in names if word_of(part) in KNOWN} - {"image"}))
        raise OptionError(f"--columns {show(strange[0])}: no folder of this name: there are {there or 'none'}", options=["columns"])
    left = {part for part, called in names.items() if word_of(part) in KNOWN - set(IMAGES) and not called & set(columns)}
    return {text for text in folders if left.isdisjoint(text.split("/"))}


def find_sets(
    folders: Collection[str], holds: Callable[[str], bool], layout: Layout, asked: Mapping[str, FieldOptions], where: str
) -> tuple[list[PairSet], list[str]]:
    """(the sets in the order of their splits, what a person should know of folders that are not used); no set where no names say so.

    `folders`: the paths of all folders below RAW that hold files, at any depth; `holds`: does one hold files directly?  A folder with a name that
    says nothing is used where it is a field of `asked`.  Raises SourceError where splits differ in their folders, or two folders would be one field.
    """
    if layout.splits:
        sets = [found for name, folder in layout.splits if (found := _named(folders, name, folder, asked)) is not None]
        if len(sets) < len(layout.splits):
            raise SourceError(f"{show(where)}: a split that --split names has no folder {', '.join(IMAGES)} with one beside it", path=where)
    elif names := _sets_at(folders, "", asked):
        sets = [split for found in names for split in _split_inside(folders, found, holds)]
    else:
        tops = sorted((name for name in children(folders, "") if name.lower() in SPLITS), key=rank)
        sets = [replace(found, split=name) for name in tops for found in _sets_at(folders, name, asked)[:1]]
    warnings = [f"{show(found.main)} is left out: no folder lies beside it, as in other splits" for found in sets if not found.beside]
    sets = sorted((found for found in sets if found.beside), key=lambda found: rank(found.split))
    for found in sets[1:]:
        mine, first = ({beside.field for beside in pairs.beside} for pairs in (found, sets[0]))
        if differ := sorted(mine ^ first):
            has, lacks = (found, sets[0]) if differ[0] in mine else (sets[0], found)
            raise SourceError(
                f"{show(where)}: split {has.split} has a folder of {differ[0]}, and {lacks.split} none beside {show(lacks.main)}: add it, or "
                f"leave the other out with --exclude {show(next(b.folder for b in has.beside if b.field == differ[0]))}",
                path=where,
            )
    if sets and (others := _not_used(folders, sets)):
        shown = ", ".join(map(show, others[:5])) + (", …" if len(others) > 5 else "")
        warnings.append(f"not used, as their names say nothing: {shown}; --field NAME:kind=image (or mask) takes a folder of this name")
    return sets, warnings


def _sets_at(folders: Collection[str], above: str, asked: Mapping[str, FieldOptions]) -> list[PairSet]:
    """The sets directly in a folder: one, or one for each split that stands at the end of names."""
    names = children(folders, above)
    start = f"{above}/" if above else ""
    out = []
    for tail in sorted({_split_in(name) for name in names}):
        mine = [name for name in names if _split_in(name) == tail]
        words = {word_of(name): name for name in reversed(mine)}
        main = next((words[word] for word in IMAGES if word in words), None)
        if main is None:
            continue
        beside: dict[str, Beside] = {}
        for name in mine:
            field = field_of(name)
            if name == main or (word_of(name) not in KNOWN and field not in asked):
                continue
            if field in (field_of(main), *beside):
                other = main if field == field_of(main) else beside[field].folder
                raise SourceError(f"{show(start + name)} and {show(other)} would both be the field {field}: leave one out with --exclude", path=start)
            beside[field] = Beside(start + name, field)
        out.append(PairSet(tail or "all", start + main, field_of(main), tuple(beside.values())))
    return out if any(found.beside for found in out) or above else []


def _split_inside(folders: Collection[str], found: PairSet, holds: Callable[[str], bool]) -> list[PairSet]:
    """A set as the splits that its folders hold; itself where they hold none."""
    inner = children(folders, found.main)
    if not inner or holds(found.main) or not all(name.lower() in SPLITS for name in inner):
        return [found]
    return [_inside(folders, found, name, name) for name in inner]


def _inside(folders: Collection[str], found: PairSet, inner: str, split: str) -> PairSet:
    beside = tuple(replace(b, folder=f"{b.folder}/{inner}") for b in found.beside if any(_lies_in(text, f"{b.folder}/{inner}") for text in folders))
    return PairSet(split, f"{found.main}/{inner}", found.field, beside)


def _named(folders: Collection[str], name: str, folder: str, asked: Mapping[str, FieldOptions]) -> PairSet | None:
    """The set that somebody calls a split: all that lies in a folder, or a folder of pictures (`images/train`) with what lies beside it."""
    parts = folder.split("/") if folder else []
    at = next((i for i, part in enumerate(parts) if word_of(part) in IMAGES), len(parts))
    above, inner = "/".join(parts[:at]), "/".join(parts[at + 1 :])
    found = next((found for found in _sets_at(folders, above, asked) if at == len(parts) or found.main == "/".join(parts[: at + 1])), None)
    if found is None:
        return None
    return _inside(folders, found, inner, name) if inner else replace(found, split=name)


def _not_used(folders: Collection[str], sets: list[PairSet]) -> list[str]:
    """Folders that lie where those of a set do, or in RAW, and that belong to none."""
    used = [place for found in sets for place in (found.main, *(b.folder for b in found.beside))]
    tops = {place.rpartition("/")[0] for place in used} | {""}
    places = [f"{top}/{name}" if top else name for top in sorted(tops) for name in children(folders, top)]
    return [
        place
        for place in places
        if not any(_lies_in(place, one) or _lies_in(one, place) for one in used) and word_of(place.rpartition("/")[2]) not in KNOWN
    ]


def _lies_in(folder: str, above: str) -> bool:
    return folder == above or folder.startswith(f"{above}/")
