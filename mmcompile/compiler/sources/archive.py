"""Hides that images lie in archives: which archives a RAW is, and how a member is read where it lies.  Nothing is ever unpacked to a disk."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.arrange import arrange
from mmcompile.compiler.sources.further import wanted_texts
from mmcompile.compiler.sources.keys import Keys, place_of
from mmcompile.compiler.sources.manifest import typed_columns
from mmcompile.compiler.sources.members import TOO_LARGE, ArchiveFile, Descriptors, FolderRules, Place, TreeMembers, first_twice, member_stat
from mmcompile.compiler.sources.names import Choice, show, unreadable
from mmcompile.compiler.sources.pairedlayout import CERTAIN, find_sets, kind_of, last_word, word_of
from mmcompile.compiler.sources.pairing import Pairing
from mmcompile.compiler.sources.parts import read_item, stat_item
from mmcompile.compiler.sources.scanning import Wishes
from mmcompile.compiler.sources.splits import SPLITS, Layout, rank
from mmcompile.compiler.sources.tar import BLOCK
from mmcompile.compiler.sources.webdataset import TarMembers, list_tar
from mmcompile.compiler.sources.zips import list_zip, read_member
from mmcompile.errors import OptionError, SourceError
from mmcompile.format.canonical import as_bytes, as_text, name_to_json
from mmcompile.format.npy import hash_bytes

__all__ = ["ArchiveSource", "is_archive", "names_below"]

#: Archives that are listed at a time: a disk or a network serves several requests as fast as one.
_THREADS = 4
#: Endings of names: of a tar archive, and of one that was compressed.
_ENDINGS = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst", ".tar.lz4"),
    "zip": (".zip",),
}
#: What a split may be called in the name of an archive.
_SPLIT_IN_NAME = re.compile(rf"(?:^|[^a-z])({'|'.join(sorted(SPLITS))})(?=[^a-z]|$)", re.IGNORECASE)


def is_archive(path: str, form: str, *, inner: bool = False) -> bool:
    """Is this called like an archive of this form (a tar may be compressed), or a folder of such archives, or of folders of them?

    Beside them such a folder holds no image, and no other folder.
    """
    if not os.path.isdir(path):
        return path.lower().endswith(_ENDINGS[form])
    try:
        with os.scandir(path) as entries:
            return _holds_archives(entries, form, inner=inner)
    except OSError:  # who lists the folder says what is wrong with it
        return False


def _holds_archives(entries: Iterable[os.DirEntry[str]], form: str, *, inner: bool) -> bool:
    found = False
    choice = Choice((), (), False, None)
    for entry in entries:
        if choice.is_hidden(os.fsencode(entry.name)):
            continue
        if entry.is_dir():
            if inner or not is_archive(entry.path, form, inner=True):
                return False
            found = True
        elif not choice.why_not(os.fsencode(entry.name), ""):
            return False
        found |= entry.name.lower().endswith(_ENDINGS[form])
    return found


def names_below(raw: Sequence[str]) -> tuple[str, list[str]]:
    """(the folder that several archives lie in, their paths below it)."""
    paths = [os.path.abspath(path) for path in raw]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return folder, [os.path.relpath(path, folder) for path in paths]


def _archives_in(raw: Sequence[str], form: str) -> tuple[str, tuple[str, ...]]:
    """(the folder that all archives lie in, their paths below it in order as text) of archives, or of a folder of them.  Raises SourceError."""
    if len(raw) == 1 and os.path.isdir(raw[0]):
        try:
            names = sorted(name for name in _files(raw[0]) if name.lower().endswith(_ENDINGS[form]))
        except OSError as error:
            raise SourceError(f"cannot list folder {show(raw[0])}: {error.strerror}", path=raw[0]) from error
        if not names:
            raise SourceError(f"no archives in {show(raw[0])}: expected files called .{form}", path=raw[0])
        return raw[0], tuple(names)
    for path in raw:
        if os.path.isdir(path):
            raise SourceError(f"{show(path)} is a folder: give archives, or one folder of archives", path=path)
    folder, found = names_below(raw)
    names = sorted(found)
    if twice := [a for a, b in itertools.pairwise(names) if a == b]:
        raise SourceError(f"{show(os.path.join(folder, twice[0]))} was given twice", path=os.path.join(folder, twice[0]))
    return folder, tuple(names)


def _files(folder: str) -> Iterator[str]:
    """The files in a folder, and in the folders in it, hidden ones excepted, by their paths in it.  Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from (f"{entry.name}/{name}" for name in os.listdir(entry.path) if name[:1] != ".")
            else:
                yield entry.name


@dataclass(frozen=True)
class ArchiveSource:
    """The images in archives: `raw` are their absolute paths, or that of one folder of them; `form` is "tar" or "zip".

    A key is the member's name, behind the archive's path below the folder that all lie in and "/" where there may be several.  `include`,
    `exclude`, `hidden`, `extensions` and `layout` mean what they mean for folders.  `wishes`: the field of a sample that is its image (what follows
    the key, as `jpg`), the value in its `.json` that is its label ("cls": the member), and those that become fields.  `fields`: settings of fields.
    """

    raw: tuple[str, ...]
    form: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    layout: Layout = field(default_factory=Layout)
    wishes: Wishes = field(default_factory=Wishes)
    fields: tuple[tuple[str, FieldOptions], ...] = ()
    #: The folder of the archives, and their names in it: as they were when this was made, so that numbers in places mean the same everywhere.
    folder: str = field(init=False)
    names: tuple[str, ...] = field(init=False)
    _descriptors: Descriptors = field(default_factory=Descriptors, init=False, compare=False, repr=False)
    #: One more read on its way than is being decoded hides a disk; more only move its head.
    parallel: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", tuple(os.path.abspath(path) for path in self.raw))
        folder, names = _archives_in(self.raw, self.form)
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "names", names)

    @property
    def roots(self) -> tuple[str, ...]:
        """All that OUT must not lie in: the folder of archives that was given, or each archive."""
        return self.raw

    @property
    def root(self) -> str:
        """What a message calls them."""
        return ", ".join(self.raw[:3]) + (", …" if len(self.raw) > 3 else "")

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {
            "kind": self.form,
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
            "hidden": self.hidden,
            "extensions": None if self.extensions is None else sorted(self.extensions),
            **self.layout.identity(),
            **{
                name: name_to_json(wish)
                for name, wish in (("image_column", self.wishes.image), ("label_column", self.wishes.label))
                if wish is not None
            },
            **({} if self.wishes.columns is None else {"columns": name_to_json(typed_columns(self.wishes.columns))}),
        }

    def location(self) -> str:
        """Tells where the archives lie, by their folder and names.  Raises SourceError."""
        try:
            found = os.stat(self.folder)
        except OSError as error:
            raise unreadable(self.folder, error) from error
        names = "" if self.raw == (self.folder,) else hash_bytes("/".join(self.names).encode("utf-8", "surrogateescape"))
        return f"archives {found.st_dev}:{found.st_ino} {names}"

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the images; `progress` gets the number found so far.

        Those in tar archives are WebDataset's samples where one of them has a class or a record beside it, and stand in the order of the archives;
        else, and in zip archives, they are a tree of folders, in the order of one.  Raises SourceError, naming archive and byte or member.
        """
        choice = Choice(self.include, self.exclude, self.hidden, self.extensions)
        pairing = Pairing(self.wishes, dict(self.fields), self._member)
        trees: list[TreeMembers] = []
        warnings: list[str] = []
        found = 0
        for members in self._listed(choice):
            if isinstance(members, TreeMembers):
                trees.append(members)
            else:
                pairing.add(members)
                warnings += members.warnings
            found += len(members.keys)
            if progress is not None:
                progress(found)
        if pairing.paired:
            scan = pairing.scan(self._splits(), self.layout.classes)
            warnings += choice.warnings()
        elif self.wishes != Wishes():
            given = {"image-column": self.wishes.image, "label-column": self.wishes.label, "columns": self.wishes.columns}
            options = [name for name, wish in given.items() if wish is not None]
            raise OptionError(f"--{options[0]}: in {show(self.root)} no image has a class or a record beside it (.cls, .json)", options=options)
        else:
            scan = self._arranged(trees or pairing.trees, choice)
        if beside := self._beside():
            scan = replace(scan, left_out=dict(sorted({**scan.left_out, "beside archives": beside}.items())))
        return replace(scan, warnings=(*warnings, *scan.warnings, *_alike(scan.keys), *([] if scan.splits else self._split_hint())))

    def _arranged(self, trees: list[TreeMembers], choice: Choice) -> Scan:
        """The scan of trees of folders, with one class map over all archives."""
        tops = [self._prefix(number)[:-1] for number in range(len(trees))]
        roots = {as_text(top): self._path(number) for number, top in enumerate(tops)}
        if inner := next((root for root in roots if "/" in root), None):
            raise SourceError(f"{show(self._path(0))} and {show(inner)} lie in different folders: give trees in archives that lie in one", path=inner)
        outer = b"" if self.layout.splits else _outer_folder(trees, tops)
        if outer and as_text(outer) not in (self.layout.classes or ()):
            tops = [top + b"/" * bool(top) + outer for top in tops]
            roots = {as_text(top): os.path.join(self._path(number), os.fsdecode(outer)) for number, top in enumerate(tops)}
        else:
            outer = b""
        if not self.layout.splits:
            for number, (top, tree) in enumerate(zip(tops, trees, strict=True)):
                _refuse_pairs(tree, top, self._path(number))
        rules = FolderRules(choice)
        scan = arrange(roots, (folder for top, tree in zip(tops, trees, strict=True) for folder in tree.as_folders(top, rules)), choice, self.layout)
        said = [f"all images lie in one folder, {show(as_text(outer))}, which is no class: the folders in it are; --split all=. makes it the class"]
        return replace(scan, warnings=(*said * bool(outer), *scan.warnings))

    def _splits(self) -> list[str]:
        """Which split each archive is, "" for none: by the folder that it lies in, or as it was said of archives."""
        tops = [name.partition("/")[0] if "/" in name else "" for name in self.names]
        if not self.layout.splits:
            return tops if all(rank(top)[0] < rank("")[0] for top in tops) else ["all"] * len(tops)
        out = [""] * len(self.names)
        for split, folder in self.layout.splits:
            mine = [i for i, name in enumerate(self.names) if f"{name}/".startswith(f"{folder}/" * bool(folder)) or fnmatch.fnmatchcase(name, folder)]
            if not mine:
                raise SourceError(
                    f"--split {show(split)}={show(folder)}: no archive is called so (there is {show(self.names[0])}); a split is whole archives",
                    path=folder,
                )
            for i in mine:
                if out[i] not in ("", split):
                    raise SourceError(f"--split: {show(self.names[i])} would be in the splits {show(out[i])} and {show(split)}", path=self.names[i])
                out[i] = split
        return out

    def _beside(self) -> int:
        """How many files in a folder of archives are none.  Raises SourceError."""
        try:
            return sum(not name.lower().endswith(_ENDINGS[self.form]) for name in _files(self.folder)) if self.raw == (self.folder,) else 0
        except OSError as error:
            raise SourceError(f"cannot list folder {show(self.folder)}: {error.strerror}", path=self.folder) from error

    def _split_hint(self) -> list[str]:
        """A line where archives are called like splits and are taken together."""
        named = {found[1].lower() for name in self.names if (found := _SPLIT_IN_NAME.search(os.path.basename(name)))}
        if len(named) < 2 or self.layout.splits:
            return []
        says = " ".join(f"--split {name}='*{name}*'" for name in sorted(named, key=rank))
        return [f"archives are called like splits ({', '.join(sorted(named, key=rank))}) and are taken together; to keep them apart: {says}"]

    def _listed(self, choice: Choice) -> Iterator[TarMembers | TreeMembers]:
        """What is in each archive, in order; a few are listed ahead."""
        waiting: deque[Future[TarMembers | TreeMembers]] = deque()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="list") as pool:
            try:
                for number in range(len(self.names)):
                    waiting.append(pool.submit(self._list, number, choice))
                    if len(waiting) > _THREADS:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _list(self, number: int, choice: Choice) -> TarMembers | TreeMembers:
        file = ArchiveFile(self._path(number))
        try:
            if self.form == "zip":
                return list_zip(file, number, self._prefix(number), choice)
            return list_tar(file, number, self._prefix(number), choice, wanted_texts(dict(self.fields)))
        finally:
            file.close()

    def read(self, key: bytes) -> bytes:
        """The bytes of one item.  Raises OSError: the archive cannot be opened or was changed, or a member has 2 GiB or more."""
        return read_item(self._member, key)

    def _member(self, key: bytes) -> bytes:
        place = Place.of(place_of(key))
        path = self._path(place.archive)
        if place.size >= TOO_LARGE:
            raise OSError(errno.EFBIG, f"{place.size} bytes or more, which are not read", path)
        with self._descriptors.reading(path) as fd:
            if self.form == "zip":
                return read_member(fd, place)
            header = os.pread(fd, BLOCK, place.at - BLOCK)
            data = os.pread(fd, place.size, place.at)
            while len(data) < place.size and (more := os.pread(fd, place.size - len(data), place.at + len(data))):
                data += more  # network file systems may return less
        if zlib.crc32(header) != place.check or len(data) != place.size:
            raise OSError(errno.EAGAIN, "its archive changed since it was listed", path)
        return data

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(bytes, the archive's mtime_ns and ctime_ns, its inode mixed with the place) of one item now.  Raises OSError."""
        return stat_item(self._stat, key)

    def _stat(self, key: bytes) -> tuple[int, int, int, int]:
        place = place_of(key)
        return member_stat(place, os.stat(self._path(Place.of(place).archive)))

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, self.names[number])

    def _prefix(self, number: int) -> bytes:
        """What keys of an archive begin with."""
        alone = len(self.raw) == 1 and self.raw[0] != self.folder
        return b"" if alone else os.fsencode(self.names[number]) + b"/"


def _outer_folder(trees: Sequence[TreeMembers], tops: Sequence[bytes]) -> bytes:
    """The one folder in each of these trees, at `tops`, that all images lie in, none of them directly; b"" where there is none such.

    In it there are two folders with images or more, or splits; itself it is called like none.
    """
    outer, inner = b"", set[bytes]()
    for tree, top in zip(trees, tops, strict=True):
        skip = len(top) + bool(top)
        for key in tree.keys.bare:
            parts = key[skip:].split(b"/", 2)
            if len(parts) < 3 or (outer and parts[0] != outer):
                return b""
            outer = parts[0]
            inner.add(parts[1])
    splits = [rank(as_text(name))[0] < rank("")[0] for name in (outer, *inner)]
    return outer if not splits[0] and (len(inner) > 1 or all(splits[1:])) else b""


def _refuse_pairs(tree: TreeMembers, top: bytes, path: str) -> None:
    """Raises SourceError where folders below `top` lie side by side, as images and masks do: they are no classes."""
    stems: dict[str, set[str]] = {}
    for key in tree.keys.bare:
        folder, _, name = as_text(key[len(top) + bool(top) :]).rpartition("/")
        stems.setdefault(folder, set()).add(name.partition(".")[0])
    folders = {above for folder in stems for above in itertools.accumulate(folder.split("/"), lambda a, b: f"{a}/{b}")}
    try:
        sets, _ = find_sets(folders, lambda text: text in stems, Layout(), {}, path)
    except SourceError:  # of folders that may be classes all the same
        return
    for one in sets:
        main = stems.get(one.main, set())
        masks = [b.folder for b in one.beside if word_of(last_word(one.main)) in CERTAIN and kind_of(last_word(b.folder)) == "mask"]
        if found := next((folder for folder in masks if main and 2 * len(main & stems.get(folder, set())) >= len(main)), None):
            raise SourceError(
                f"{show(path)}: {show(found)} holds what belongs to the pictures in {show(one.main)}, which is read of a folder: unpack it and build "
                "that; --split all=. takes both as classes",
                path=path,
            )


def _alike(keys: Keys) -> list[str]:
    """A line where names differ only in case: unpacked on some systems one would take the other's place."""
    pair = first_twice(Keys.of(as_bytes(as_text(key).casefold()) for key in keys.bare).hashes())
    if pair is None:
        return []
    a, b = (show(as_text(keys[i])) for i in pair)
    return [f"names differ only in case, as {a} and {b}: they are different images here, and one file where case does not count"]
