"""Folders side by side as a source: each picture with the files of its name in the folders beside it.

The folder of pictures says which samples there are, and their order: that of their paths.  What belongs to a picture has its path and name but for
the extension; folders below one are no classes.  A file without a partner, and two of one name, are found before anything is decoded.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from mmcompile.compiler.fieldoptions import FieldOptions, refuse_strange
from mmcompile.compiler.formats import EXTENSIONS, VOLUME_EXTENSIONS, extension
from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources import pairedlabels as labels
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.names import Choice, Patterns, show
from mmcompile.compiler.sources.pairedfiles import TEXT, Pairing, Tree, endings, stem_of
from mmcompile.compiler.sources.pairedlayout import CERTAIN, IMAGES, PairSet, children, chosen, find_sets, kind_of, last_word, word_of
from mmcompile.compiler.sources.parts import read_item, stat_item
from mmcompile.compiler.sources.remote import RemoteSource, folder_source
from mmcompile.compiler.sources.splits import SPLITS, Layout
from mmcompile.compiler.sources.volumes import Series, is_slice
from mmcompile.compiler.spatial import Form
from mmcompile.errors import SourceError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.fields import Split, row_dtype
from mmcompile.text import counted

__all__ = ["PairedSource", "is_paired", "why_not_paired"]

#: Extensions of what may belong to a picture.
_HOLD = EXTENSIONS | VOLUME_EXTENSIONS | {TEXT}
#: Pictures whose partners are looked for before it is said what RAW is.
_LOOKED_AT = 64


@dataclass(frozen=True)
class PairedSource:
    """The pictures in RAW's folder `images` (or one of IMAGES) with what lies beside them in `masks`, `labels`, `depth` and so on.

    `include` are patterns on keys of pictures, `exclude` also on those of what lies beside them, and on folders.  `fields`: what was said of fields.
    `columns`: the folders beside the pictures that are taken, by their names or those of their fields; None for all.
    """

    raw: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    extensions: frozenset[str] | None = None
    layout: Layout = field(default_factory=Layout)
    fields: tuple[tuple[str, FieldOptions], ...] = ()
    columns: tuple[str, ...] | None = None
    _files: FolderSource | RemoteSource = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_files", folder_source(self.raw, hidden=self.hidden))

    @property
    def root(self) -> str:
        """The folder that keys are relative to."""
        return self._files.root

    @property
    def parallel(self) -> int:
        """As its files."""
        return self._files.parallel

    def identity(self) -> dict[str, object]:
        """The settings that decide which samples there are, as JSON values."""
        return {
            "kind": "pairs",
            "include": [name_to_json(glob) for glob in sorted(self.include)],
            "exclude": [name_to_json(glob) for glob in sorted(self.exclude)],
            "hidden": self.hidden,
            "extensions": None if self.extensions is None else sorted(self.extensions),
            **({} if self.columns is None else {"columns": sorted(self.columns)}),
            **self.layout.identity(),
        }

    def location(self) -> str:
        """As a FolderSource."""
        return self._files.location()

    def read(self, key: bytes) -> bytes:
        """The bytes of a picture, with those of what belongs to it.  Raises OSError."""
        return read_item(Series(self._files).read, key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        """(size, mtime_ns, ctime_ns, inode) of them now.  Raises OSError."""
        return stat_item(Series(self._files).stat, key)

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        """List the samples; `progress` gets the number of files found so far.

        Raises SourceError: no folders lie side by side; files without a partner, or two of one name (all of them counted, the first named); folders
        that cannot be listed.  OptionError: a field that is not there.
        """
        choice = Choice((), (), self.hidden, self.extensions, also=(TEXT, *VOLUME_EXTENSIONS))
        exclude, include = Patterns(self.exclude), Patterns(self.include)
        asked = dict(self.fields)
        tree = Tree(Series(self._files).tree(choice, progress), exclude)
        sets, warnings = find_sets(chosen(tree.above, self.columns), lambda text: text in tree.folders, self.layout, asked, self.root)
        if not tree.above and (gone := tree.left_out["in an excluded folder"]):
            raise SourceError(f"{show(self.root)}: nothing is left: --exclude leaves out all {counted(gone, 'files')}", path=self.root)
        if not sets:
            raise SourceError(f"{show(self.root)}: no folders side by side: {_what_lacks(tree.above)}", path=self.root)
        pairing = Pairing(tree, sets, asked, include, exclude)
        found = [pairing.pair(one) for one in sets]
        tree.leave_others([one.main for one in sets] + [beside.folder for one in sets for beside in one.beside])
        refuse_strange(asked, [*(name for name, _ in pairing.parts), *([labels.FIELD, "labels"] if pairing.text else [])])
        pairing.raise_any()
        if not any(len(one.rows) for one in found):
            lost = tree.left_out + pairing.left_out
            named = ", ".join(f"{count:,} {reason}" for reason, count in lost.most_common(5)) or "there is no file in it"
            raise SourceError(f"no images in {', '.join(show(one.main) for one in sets)}: {named}", path=self.root)
        parts = pairing.parts
        warnings += pairing.said
        splits = _splits([(one.split, len(pairs.rows)) for one, pairs in zip(sets, found, strict=True)])
        keys = Keys.join([pairs.keys for pairs in found])
        stat = np.concatenate([pairs.stat for pairs in found])
        made = Scan(keys, (), np.zeros(len(keys), row_dtype(())), stat, splits=splits, parts=parts)
        if pairing.text:
            folders = [one.main.rpartition("/")[0] for one in sets] + [b.folder for one in sets for b in one.beside if b.field == pairing.text]
            made = self._with_boxes(made, [name for pairs in found for name in pairs.texts], folders, tree.left_out)
        for option, patterns in (("--include", include), ("--exclude", exclude)):
            warnings += [f"{option} {show(pattern)} matches nothing" for pattern in patterns.unmatched]
        left_out = {reason: count for reason, count in sorted((tree.left_out + pairing.left_out).items()) if count}
        return replace(made, left_out=left_out, warnings=tuple(warnings))

    def _with_boxes(self, scan: Scan, names: Sequence[str | None], folders: Sequence[str], left_out: Counter[str]) -> Scan:
        """The scan with the boxes of these files, one for each sample; names of classes stand in one of `folders`, or in RAW.

        The file of these names is taken out of those that are left out.
        """
        options = dict(self.fields).get(labels.FIELD, FieldOptions())
        options.check("boxes")
        form = labels.form_of(options)
        read: list[str] = []
        classes = labels.class_names(functools.partial(self._read_if_there, read), list(dict.fromkeys(["", *folders])))
        if classes is not None and left_out[reason := f"extension {os.path.splitext(read[-1])[1]}"]:
            left_out[reason] -= 1
        files = self._read_labels(names, form, classes)
        fields, values, counts = labels.values_of(files, [name or "" for name in names], options, classes)
        faults = {at: file.fault for at, file in enumerate(files) if file is not None and file.fault}
        return replace(scan, fields=fields, values=values, counts=counts, forms=((labels.FIELD, form),), faults=faults)

    def _read_if_there(self, read: list[str], name: str) -> bytes | None:
        """The bytes of a file, whose name is added to those that were `read`; None where it is not there."""
        try:
            data = self._files.read(os.fsencode(name))
        except OSError:
            return None
        read.append(name)
        return data

    def _read_labels(self, names: Sequence[str | None], form: Form, classes: tuple[str, ...] | None) -> list[labels.LabelFile | None]:
        """The boxes of each of these files.  Raises SourceError where one cannot be read."""

        def parse(name: str | None) -> labels.LabelFile | None:
            if name is None:
                return None
            try:
                return labels.parse_boxes(self._files.read(os.fsencode(name)), name, form, classes)
            except OSError as error:
                raise SourceError(f"cannot read {show(name)}: {error.strerror or error}", path=name) from error

        with ThreadPoolExecutor(self.parallel, thread_name_prefix="boxes") as pool:
            return list(pool.map(parse, names))


def _splits(sizes: Sequence[tuple[str, int]]) -> tuple[Split, ...]:
    """The splits of so many samples each, in order; sets of one split follow each other, and those without a sample are none."""
    out: list[Split] = []
    at = 0
    for name, group in itertools.groupby(sizes, lambda size: size[0]):
        stop = at + sum(size for _, size in group)
        if stop > at:
            out.append(Split(name, at, stop))
        at = stop
    return () if [split.name for split in out] == ["all"] else tuple(out)


def _what_lacks(folders: Collection[str]) -> str:
    """What to add to folders of these names, that they lie side by side."""
    tops = children(folders, "")
    main = next((name for name in tops if word_of(name) in CERTAIN), None)
    if main is None or len(tops) == 1:
        return f"expected one called {', '.join(IMAGES[:-1])} or {IMAGES[-1]}, and one beside it, as images and masks"
    others = ", ".join(show(name) for name in tops if name != main)
    return f"beside {show(main)} lie {others}, and no name says what such a folder holds: --field NAME:kind=image (or mask) takes one of them"


def is_paired(raw: str, asked: Mapping[str, FieldOptions] = MappingProxyType({})) -> bool:
    """Do the names of folders, or what was `asked` of fields, say that they lie side by side, and is it so for the first of their pictures?

    Looks into those folders alone.

    At least half of the pictures must have a partner.  Where the names may as well be those of classes (left and right), all of them, in folders of
    as many files, and with no other folder beside them.
    """
    if not os.path.isdir(raw):
        return False
    try:
        sets, names = _sets_in(raw, asked)
    except SourceError:  # which says what is wrong with folders that lie side by side
        return True
    return any(_agree(raw, one, children(names, ""), asked) for one in sets)


def _sets_in(raw: str, asked: Mapping[str, FieldOptions]) -> tuple[list[PairSet], set[str]]:
    """The sets that the names of folders make, and these names.  Raises SourceError."""
    tops = _folders_in(raw)
    names = set(tops)
    for top in tops:
        if top.lower() in SPLITS or word_of(top) in IMAGES:
            names |= {f"{top}/{inner}" for inner in _folders_in(os.path.join(raw, top))}
    return find_sets(names | _mirrored(names), lambda text: _holds_files(os.path.join(raw, text)), Layout(), asked, raw)[0], names


def _folders_in(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _holds_files(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.is_file() and not entry.name.startswith(".") for entry in entries)


def _mirrored(names: set[str]) -> set[str]:
    """The splits in folders that lie beside pictures, by those of the pictures."""
    inner = {name.partition("/")[2] for name in names if word_of(name.partition("/")[0]) in IMAGES and name.partition("/")[2].lower() in SPLITS}
    return {f"{top}/{split}" for top in names if "/" not in top for split in inner}


def _agree(raw: str, one: PairSet, tops: Sequence[str], asked: Collection[str]) -> bool:
    certain = word_of(last_word(one.main)) in CERTAIN and any(kind_of(last_word(b.folder)) == "mask" or b.field in asked for b in one.beside)
    pictures = list(itertools.islice(_files(os.path.join(raw, one.main)), _LOOKED_AT))
    hits = sum(map(any, zip(*(_paired(os.path.join(raw, b.folder), pictures) for b in one.beside), strict=True)))
    if certain:
        return bool(pictures) and 2 * hits >= len(pictures)
    places = [one.main, *(b.folder for b in one.beside)]
    alone = all(any(place == top or place.startswith(f"{top}/") for place in places) for top in tops)
    sizes = {sum(1 for _ in _files(os.path.join(raw, place))) for place in places}
    return bool(pictures) and hits == len(pictures) and alone and len(sizes) == 1


def _files(folder: str) -> Iterator[str]:
    """The paths below a folder of what is not hidden, without extensions; a folder of slices is one."""
    for here, inner, names in os.walk(folder, followlinks=False):
        inner.sort()
        place = os.path.relpath(here, folder)
        if any(is_slice(os.fsencode(name)) for name in names) and place != ".":
            yield place
            continue
        for name in sorted(name for name in names if not name.startswith(".")):
            yield os.fsdecode(stem_of(os.fsencode(os.path.relpath(os.path.join(here, name), folder))))


def _paired(folder: str, pictures: Sequence[str]) -> list[bool]:
    """Which of these pictures have a file in a folder, whose names, or those of the pictures, may end in something more."""
    known: dict[str, set[str]] = {}
    names = [os.fsencode(stem) for stem in itertools.islice(_files(folder), _LOOKED_AT)]
    tries = [list(pictures)]
    tries += [[stem + os.fsdecode(end) for stem in pictures] for end in endings(names)]
    tries += [[stem.removesuffix(os.fsdecode(end)) for stem in pictures] for end in endings([os.fsencode(stem) for stem in pictures])]
    found = ([_has(folder, stem, known) for stem in stems] for stems in tries)
    return max(found, key=sum)


def why_not_paired(raw: str) -> str:
    """What to say of folders that are called like pictures and their masks, hold files that may be these, and do not pair; else ""."""
    for one in _sets_in(raw, {})[0]:
        for b in one.beside if word_of(last_word(one.main)) in CERTAIN else ():
            if kind_of(last_word(b.folder)) == "mask" and all(_holds_images(os.path.join(raw, place)) for place in (one.main, b.folder)):
                return (
                    f"{show(one.main)} and {show(b.folder)} are called like images and what belongs to them, but less than half of the images have a "
                    "file of their name there: --source folder if both are classes, --source pairs to hear which files lack a partner"
                )
    return ""


def _holds_images(folder: str) -> bool:
    return any(extension(name) in _HOLD for _, _, names in os.walk(folder) for name in names if not name.startswith("."))


def _has(folder: str, stem: str, known: dict[str, set[str]]) -> bool:
    above, name = os.path.split(os.path.join(folder, stem))
    if above not in known:
        try:
            names = [other for other in os.listdir(above) if extension(other) in _HOLD or os.path.isdir(os.path.join(above, other))]
            known[above] = {other[: len(other) - len(extension(other))] for other in names}
        except OSError:
            known[above] = set()
    return name in known[above]
