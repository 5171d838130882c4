"""A list of images as a source: a table with a row for each image, which names its file or holds its bytes, and says what is known of it.

Rows stand as the list has them, split by split.  Paths are relative to the list (or to `images`), and never lead out of that folder.  All that is
wrong with rows is found before anything is decoded, and named by file and row; row 1 is the first below the names of the columns, and in Parquet
files row #0 is the first.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.delimited import JSON_SUFFIXES, TEXT_SUFFIXES, TextTable
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Placed
from mmcompile.compiler.sources.listed import image_folder
from mmcompile.compiler.sources.lists import Part, finds_images, names_images
from mmcompile.compiler.sources.names import show
from mmcompile.compiler.sources.packed import IN_A_FILE, Packed
from mmcompile.compiler.sources.parquet import ParquetTable
from mmcompile.compiler.sources.parts import read_item, stat_item
from mmcompile.compiler.sources.scanning import Scanning, Wishes
from mmcompile.compiler.sources.splits import SPLITS, Layout
from mmcompile.compiler.sources.tablefiles import is_tables
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.store import is_url

__all__ = ["ManifestSource", "Wishes", "is_manifest", "typed_columns", "unused_lists"]

#: A list of this name says something of the images beside it (Hugging Face's ImageFolder).
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_PARQUET = ".parquet"
#: Where Parquet files of one dataset lie, below its folder; and entries of a folder that are looked at before it is held to have none.
_FOLDERS, _ENTRIES = ("data", "default"), 4096
#: Tables in a folder of images whose first rows are looked at; folders below it that are looked into for a list, and how far below.
_TABLES, _LOOKED_INTO, _DEEPEST = 16, 256, 3
#: A file of several, as Hugging Face numbers them.
_NUMBERED = re.compile(r"^(.+?)-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?$")


@dataclass(frozen=True)
class ManifestSource:
    """The images that the list `raw` names or holds: a file, a folder with metadata files, or one of Parquet files.

    Several lists are the splits of one dataset, each by a name in `splits` (the list -> the name) or by its own.  Paths are relative to the list's
    folder, or to a folder in it where the first of them are found, or to `images`.
    """

    raw: str | tuple[str, ...]
    wishes: Wishes = field(default_factory=Wishes)
    images: str | None = None
    splits: tuple[tuple[str, str], ...] = ()
    #: What OUT must not lie in: of lists nothing, as no folder is looked into but those that rows name.
    roots: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _files: FolderSource = field(init=False, repr=False, compare=False)
    _parts: tuple[Part, ...] = field(init=False, repr=False, compare=False)
    _packed: Packed = field(init=False, repr=False, compare=False)
    parallel: ClassVar[int] = FolderSource.parallel

    def __post_init__(self) -> None:
        places = tuple(map(os.path.abspath, (self.raw,) if isinstance(self.raw, str) else self.raw))
        folders = [place if os.path.isdir(place) else os.path.dirname(place) for place in places]
        root = os.path.commonpath(folders)
        named = {_one_of(places, file, root): name for file, name in self.splits}
        parts = _parts(places[0]) if len(places) == 1 else _lists(places, root, named, within=self.images is None)
        object.__setattr__(self, "raw", places[0] if len(places) == 1 else root)
        object.__setattr__(self, "splits", tuple(named.items()))
        object.__setattr__(self, "roots", tuple(place for place in places if os.path.isdir(place)))
        object.__setattr__(self, "_files", FolderSource(root) if self.images is None else image_folder(self.images))
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_packed", Packed(self._files.root, [part.file for part in parts], self.wishes.image))

    @property
    def root(self) -> str:
        """The folder that keys are relative to."""
        return self._files.root

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        wishes = self.wishes
        return {
            "kind": "manifest",
            "image_column": None if wishes.image is None else name_to_json(wishes.image),
            "label_column": None if wishes.label is None else name_to_json(wishes.label),
            "columns": None if wishes.columns is None else name_to_json(typed_columns(wishes.columns)),
            "include": [name_to_json(glob) for glob in sorted(wishes.include)],
            "exclude": [name_to_json(glob) for glob in sorted(wishes.exclude)],
            **Layout(tuple((name, os.path.relpath(file, str(self.raw))) for file, name in self.splits), wishes.classes).identity(),
        }

    def location(self) -> str:
        """Device and inode of the root.  Raises SourceError where it is missing or no folder."""
        return self._files.location()

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: it cannot be read, or changed meanwhile; of a file also where it is over 2 GiB."""
        return read_item(self._read, key)

    def _read(self, key: bytes) -> bytes:
        place = _packed_place(key)
        return self._files.read(key) if place is None else self._packed.read(place)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of one item now: of its file, or of the one that holds it.  Raises OSError."""
        return stat_item(self._stat, key)

    def _stat(self, key: bytes) -> tuple[int, int, int, int]:
        place = _packed_place(key)
        return self._files.stat(key) if place is None else self._packed.stat(place)

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the items in the order of their rows; `progress` gets the number of images found so far.

        Raises SourceError: the list is no table, or rows of it name no image, an image twice, or one outside the folder (all of them counted, the
        first named); OptionError: a column that is not there, or two that would be one field.
        """
        self.location()
        found = Scanning(str(self.raw), self.root, self._parts, self.wishes, fixed=self.images is not None).scan(progress)
        used = {part.file for part in self._parts}
        beside = [os.path.join(root, name) for root in self.roots for name in sorted(os.listdir(root)) if _may_be_list(name)]
        return replace(
            found, warnings=(*found.warnings, *(f"{show(path)} is not used beside the other lists" for path in beside if path not in used))
        )


def _packed_place(key: bytes) -> tuple[int, int, int] | None:
    """Where in a list the item lies; None for one in a file of its own."""
    return key.place if isinstance(key, Placed) and key.place != IN_A_FILE else None


def _may_be_list(name: str) -> bool:
    return name.lower().endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES, _PARQUET)) and not name.startswith(".")


def typed_columns(columns: Sequence[str]) -> str:
    """Names of columns as one would type them; a comma alone for none."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(columns)
    return text.getvalue() or ","


def is_manifest(raw: str) -> bool:
    """Is this a list of images, or a folder that holds one?  Reads the first rows of a table; of a URL its name alone."""
    if is_url(raw):
        return raw.lower().endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES))
    if os.path.isdir(raw):
        for folder in (raw, *_split_folders(raw)):
            if found := _metadata(folder):  # of images it is the list, whatever is wrong with it
                return not is_tables([raw]) or any(_lists_images(os.path.join(folder, name)) for name in found)
        files = _parquet_files(raw) or _loose_lists(raw)
        return bool(files) and _lists_images(files[0])
    return os.path.exists(raw) and raw.lower().endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES, _PARQUET)) and _lists_images(raw)


def unused_lists(folder: str, left_out: Mapping[str, int]) -> tuple[str, ...]:
    """Warnings of tables in a folder of images that name images in it, of metadata files further down, and of COCO's annotations in it, its splits or
    its folder `annotations`, which are not used where it is built.

    `left_out`: what its listing left out, by reason; without a table in it the folder is not looked at again.
    """
    found: list[str] = []
    names: list[str] = []
    tables = bool(left_out.keys() & {"other extensions", *(f"extension {suffix}" for suffix in (*TEXT_SUFFIXES, *JSON_SUFFIXES))})
    if tables:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.lower().endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES)) and entry.is_file())
    for name in [name for name in names if not name.startswith(".")][:_TABLES]:
        path = os.path.join(folder, name)
        with contextlib.suppress(SourceError):  # what is no table is no list
            if finds_images(TextTable(path), folder):
                found.append(f"{show(name)} names these images, and is not used: to use it, mmcompile build {show(path)} OUT")
    for inner in _folders_below(folder) if tables else ():
        if not found and (here := _metadata(inner)):
            raw = os.path.dirname(inner) if os.path.basename(inner).lower() in SPLITS else inner
            name = os.path.relpath(os.path.join(inner, here[0]), folder)
            found.append(f"{show(name)} tells of the images beside it, and is not used: to use it, mmcompile build {show(raw)} OUT")
    for name in _annotations_in(folder) if left_out.keys() & {"extension .json", "other extensions"} else ():
        path = os.path.join(folder, name)
        found.append(f"{show(name)} says what is on images, and is not used: to use it, mmcompile build {show(path)} OUT")
    return tuple(found)


def _annotations_in(folder: str) -> list[str]:
    """The first files of COCO's annotations where they lie beside images as a rule, relative to the folder."""
    from mmcompile.compiler.sources.coco import is_coco  # which finds its images as a list does

    found = []
    for place in ("", "annotations", *sorted(SPLITS)):
        with contextlib.suppress(OSError), os.scandir(os.path.join(folder, place)) as entries:
            names = sorted(os.path.join(place, entry.name) for entry in entries if entry.name.lower().endswith(".json"))
            found += [name for name in names[:_TABLES] if is_coco(os.path.join(folder, name))]
    return found[:_TABLES]


def _folders_below(folder: str) -> list[str]:
    """Some folders below this one, those of each depth as text."""
    found, tops = list[str](), [folder]
    for _ in range(_DEEPEST):
        below: list[str] = []
        for top in tops:
            if len(found) + len(below) >= _LOOKED_INTO:
                break
            with contextlib.suppress(OSError), os.scandir(top) as entries:
                below += sorted(entry.path for entry in itertools.islice(entries, _ENTRIES) if not entry.name.startswith(".") and entry.is_dir())
        found, tops = found + below, below
    return found[:_LOOKED_INTO]


def _one_of(places: Sequence[str], file: str, root: str) -> str:
    """The list that is meant: by its path as typed, or relative to where all of them lie.  Raises OptionError."""
    wanted = (os.path.abspath(file), os.path.normpath(os.path.join(root, file)))
    found = next((place for place in wanted if place in places), None)
    if found is None:
        raise OptionError(f"--split …={show(file)}: expected one of the lists that are given", options=["split"])
    return found


def _lists(places: Sequence[str], root: str, named: Mapping[str, str], *, within: bool) -> tuple[Part, ...]:
    """Lists that are splits.  Raises SourceError where one is no file."""
    if other := next((place for place in places if not os.path.isfile(place)), None):
        raise SourceError(f"{show(other)}: expected a list of images, as the other RAW are", path=other)
    bases = [os.path.relpath(os.path.dirname(place), root) if within else "." for place in places]
    parts = [Part(place, "" if base == "." else base, named.get(place) or _word_of(place)) for place, base in zip(places, bases, strict=True)]
    packed = [os.path.splitext(place)[1].lower() == _PARQUET for place in places]
    if len(set(packed)) > 1:
        text, other = (places[packed.index(kind)] for kind in (False, True))
        raise SourceError(f"{show(text)} is text and {show(other)} a Parquet file: give lists of one form, or build them apart and merge", path=text)
    return tuple(parts)


def _word_of(file: str) -> str:
    """The split that a list is by its name: the word in it that says so, or all of it."""
    stem = os.path.splitext(os.path.basename(file))[0]
    return _split_of(file) or next((word for word in re.split(r"[\W_]+", stem) if word.lower() in SPLITS), stem)


def _lists_images(path: str) -> bool:
    folder = os.path.dirname(os.path.abspath(path))
    if not path.lower().endswith(_PARQUET):
        return names_images(TextTable(path), folder)
    try:
        table = ParquetTable(path)
    except OptionError:  # no pyarrow, which whoever reads this has to say
        return True
    return table.holds is not None or names_images(table, folder)


def _parts(raw: str) -> tuple[Part, ...]:
    """The lists of RAW.  Raises SourceError where there is none, or where two say something of one folder."""
    if not os.path.isdir(raw):
        return (Part(raw),)
    if here := _metadata(raw):
        return (Part(_only(raw, here)),)
    if below := [(folder, found) for folder in _split_folders(raw) if (found := _metadata(folder))]:
        return tuple(Part(_only(folder, found), os.path.basename(folder), os.path.basename(folder)) for folder, found in below)
    files = _parquet_files(raw)
    if not files and (loose := _loose_lists(raw)):
        return (Part(_only(raw, [os.path.basename(file) for file in loose])),)
    if not files:
        raise SourceError(f"{show(raw)}: expected metadata.csv or metadata.jsonl in it or in its folders train, test, …; or Parquet files", path=raw)
    splits = [_split_of(file) for file in files]
    if any(splits) and not all(splits):
        raise SourceError(
            f"{show(raw)}: {show(files[splits.index('')])} is of no split, others are: name it as in train-00000-of-00002.parquet", path=raw
        )
    return tuple(Part(file, split=split) for file, split in zip(files, splits, strict=True))


def _split_folders(raw: str) -> list[str]:
    """Folders in RAW that are called like splits."""
    names = itertools.chain.from_iterable((name, name.capitalize()) for name in sorted(SPLITS))
    return [os.path.join(raw, name) for name in names if os.path.isdir(os.path.join(raw, name))]


def _metadata(folder: str) -> list[str]:
    return [name for name in _METADATA if os.path.lexists(path := os.path.join(folder, name)) and not os.path.isdir(path)]


def _loose_lists(raw: str) -> list[str]:
    """The text tables directly in RAW, where there are no images below it: by their names alone, lists of images elsewhere or tables of numbers."""
    if not is_tables([raw]):
        return []
    return sorted(os.path.join(raw, name) for name in os.listdir(raw) if name.lower().endswith(TEXT_SUFFIXES) and not name.startswith((".", "_")))


def _only(folder: str, found: list[str]) -> str:
    if len(found) > 1:
        others = f" and {len(found) - 2:,} more" if len(found) > 2 else ""
        raise SourceError(f"{show(folder)} holds {' and '.join(map(show, found[:2]))}{others}: give one of them as RAW", path=folder)
    return os.path.join(folder, found[0])


def _parquet_files(raw: str) -> list[str]:
    """Those in RAW, in folders of it that are called like splits, and in its folders data and default, in the order of their paths."""
    tops = [raw, *(folder for name in _FOLDERS if os.path.isdir(folder := os.path.join(raw, name)))]
    found: list[str] = []
    for folder in (inner for top in tops for inner in (top, *_split_folders(top))):
        with os.scandir(folder) as entries:
            here: list[str] = []
            for count, entry in enumerate(entries):
                if entry.name.endswith(_PARQUET) and not entry.name.startswith(".") and entry.is_file():
                    here.append(entry.path)
                elif count == _ENTRIES and not here:
                    break
        found += here
    return sorted(found)


def _split_of(file: str) -> str:
    """The split that a file of several is of, by its name or its folder's; "" where these do not say."""
    stem, folder = os.path.basename(file).removesuffix(_PARQUET), os.path.basename(os.path.dirname(file))
    if numbered := _NUMBERED.match(stem):
        return numbered[1]
    return next((name for name in (stem, folder) if name.lower() in SPLITS), "")
