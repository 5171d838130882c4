"""Hides how the members of tar archives become samples: WebDataset's convention, or the folders that they lie in.

The key of a sample ends at the first dot of a file's name, what follows is a field: `dir/a.b.jpg` is field `b.jpg` of the sample `dir/a`.  The images
are the members with an image's extension, its class stands in `.cls`, its numbers in `.json`, arrays in `.npy` and texts in `.txt`.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from mmcompile.compiler.formats import sniff
from mmcompile.compiler.sources.jsonparts import as_cell, record_of
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.members import ArchiveFile, Blob, FolderRules, Place, TreeMembers, first_twice, member_stats, refuse_twice
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice, show
from mmcompile.compiler.sources.tar import TarListing
from mmcompile.compiler.sources.walk import HEAD_BYTES
from mmcompile.errors import SourceError
from mmcompile.format.canonical import as_text

__all__ = ["Others", "TarMembers", "Values", "list_tar", "part_of"]

#: The class in a `.cls` member, and the records in a `.json` one, are shorter than this.
_MOST_CLASS, _MOST_RECORD = 1 << 12, 1 << 20
#: Columns that are made of the values in `.json` members.
_MOST_COLUMNS = 1_000
#: Samples that are named where there are more.
_SHOWN = 3
#: Cells that are objects at one time.
_CHUNK = 1 << 14


@dataclass
class Values:
    """Values of one name as text, and the samples that have them (their numbers, in the order of the archive); `at`: where each was read."""

    samples: array[int] = field(default_factory=lambda: array("q"))
    at: array[int] = field(default_factory=lambda: array("q"))
    cells: list[str] = field(default_factory=list)
    quoted: bool = False
    plain: bool = False
    nested: bool = False

    def add(self, sample: int, at: int, cell: str) -> None:
        self.samples.append(sample)
        self.at.append(at)
        self.cells.append(cell)


@dataclass
class Others:
    """The M arrays and texts of samples: `keys` with places, STAT_DTYPE (M,), and (M,) the number of each one's sample."""

    keys: Keys
    stat: npt.NDArray[np.void]
    sample: npt.NDArray[np.int64]


@dataclass
class TarMembers:
    """What is of use in one archive: its N images, and S samples in the order of their first members.

    `keys` (N,) have places; `sample` (N,) is the number of an image's sample, -1 for one whose name has no extension.  `others` are arrays and texts.
    `samples` are the keys of the samples, `firsts` (S,) where in the archive they begin, `refused` those that have an image which patterns leave out.
    `left_out` counts what is no image.
    """

    shown: str
    keys: Keys
    stat: npt.NDArray[np.void]
    sample: npt.NDArray[np.int64]
    others: Others
    samples: Keys
    firsts: npt.NDArray[np.int64]
    refused: npt.NDArray[np.int64]
    classes: Values
    records: dict[str, Values]
    #: Lists among the values of records, as JSON; and what is called `objects`.
    lists: dict[str, Values]
    #: Members that were read for these.
    read_records: int
    left_out: Counter[str]
    folders: set[bytes]
    warnings: list[str]

    @property
    def paired(self) -> bool:
        """Has a sample with an image a class, or a record?"""
        with_image = np.zeros(len(self.samples) + 1, bool)
        with_image[self.sample] = True
        with_image[-1] = False
        held = (self.classes, *self.records.values(), *self.lists.values())
        return any(with_image[np.frombuffer(values.samples, np.int64)].any() for values in held if values.samples)

    def tree(self) -> TreeMembers:
        """All images, by the folders that they lie in."""
        others = Counter({f"extension .{what}": count for what, count in (("cls", len(self.classes.cells)), ("json", self.read_records)) if count})
        others.update(f"extension .{as_text(key.rpartition(b'.')[2]).lower()}" for key in self.others.keys.bare)
        return TreeMembers(self.keys, self.stat, self.folders, self.left_out + others)


def part_of(key: bytes) -> str:
    """What follows the first dot of a member's name: its field."""
    return as_text(key[key.rfind(b"/") + 1 :].partition(b".")[2])


def list_tar(file: ArchiveFile, number: int, prefix: bytes, choice: Choice, texts: frozenset[str] = frozenset()) -> TarMembers:
    """List archive `number`, whose keys begin with `prefix` ("" or a path that ends in "/"); `texts`: the fields of text that are wanted.

    Raises SourceError: it is no whole tar, two members have one name, or a `.cls` or `.json` member is not what it should be.
    """
    return _Gathering(file, number, prefix, choice, texts).run()


class _Gathered:
    """Members that are found again: their names, and of each its run, where it begins, its size and check."""

    def __init__(self) -> None:
        self._names = Blob()
        self._columns = tuple(array("q") for _ in range(4))

    def add(self, name: bytes, run: int, at: int, size: int, check: int) -> None:
        self._names.add(name)
        for column, number in zip(self._columns, (run, at, size, check), strict=True):
            column.append(number)

    def made(self, archive: int, file: ArchiveFile) -> tuple[Keys, npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """(keys with places, STAT_DTYPE (N,), runs (N,)).  Raises SourceError where two have one name."""
        runs, at, sizes, checks = (np.frombuffer(column, np.int64) for column in self._columns)
        places = Place.packed(archive, checks, at, sizes, sizes)
        keys = self._names.keys(places)
        refuse_twice(file, keys, at)
        return keys, member_stats(places, file.found), runs


class _Gathering:
    """One pass over the members of an archive; a run is members of one sample that stand together."""

    def __init__(self, file: ArchiveFile, number: int, prefix: bytes, choice: Choice, texts: frozenset[str]) -> None:
        self._file, self._number, self._prefix, self._choice, self._texts = file, number, prefix, choice, texts
        self._listing = TarListing(file)
        self._rules = FolderRules(choice)
        self._images, self._others, self._runs = _Gathered(), _Gathered(), Blob()
        self._hashes, self._firsts = array("Q"), array("q")
        self._refused = array("q")
        self._classes = Values()
        self._records: dict[str, Values] = {}
        self._lists: dict[str, Values] = {}
        self._read_records = 0
        self._left_out: Counter[str] = Counter()

    def run(self) -> TarMembers:
        prefix, rules, choice, last, run = self._prefix, self._rules, self._choice, None, -1
        for name, at, size, check in self._listing:
            slash = name.rfind(b"/") + 1
            text, why = rules.of(prefix + name[: slash - 1] if slash else prefix[:-1])
            base = name[slash:]
            if why or choice.is_hidden(base):
                self._left_out[why or "hidden"] += 1
                continue
            why = choice.why_not(base, text)
            dot = base.find(b".")
            if dot < 0:
                if why == NO_EXTENSION and choice.sniffs:
                    why = "" if sniff(self._listing.peek(at, min(size, HEAD_BYTES))) else "no extension, no image"
                if why:
                    self._left_out[why] += 1
                    continue
                self._images.add(prefix + name, -1, at, size, check)
            else:
                key = name[: slash + dot]
                if key != last:
                    last, run = key, run + 1
                    self._runs.add(prefix + key)
                    self._hashes.append(xxhash.xxh3_64_intdigest(key))
                    self._firsts.append(at)
                if not why:
                    self._images.add(prefix + name, run, at, size, check)
                elif self._is_taken(base, text):
                    self._others.add(prefix + name, run, at, size, check)
                else:
                    self._take_other(base[base.rfind(b".") :].lower(), run, at, size, why)
        return self._made()

    def _is_taken(self, base: bytes, folder: str) -> bool:
        """Is this member, which is no image, an array, or a text that is wanted?"""
        suffix = base[base.rfind(b".") :].lower()
        if suffix != b".npy" and (suffix != b".txt" or part_of(base) not in self._texts):
            return False
        return not self._choice.leaves_out(base, folder)

    def _take_other(self, suffix: bytes, run: int, at: int, size: int, why: str) -> None:
        """A member that is no image: the class or the record of a sample, or left out."""
        if suffix == b".cls":
            if size > _MOST_CLASS:
                raise self._wrong(at, f"a .cls member of {size:,} bytes: expected the number or name of a class")
            text = self._text(at, size).strip()
            if "\n" in text:
                raise self._wrong(at, "a .cls member of several lines: expected the number or name of one class")
            self._classes.add(run, at, text)
        elif suffix == b".json":
            self._take_record(run, at, size)
        elif why in ("excluded", "not included"):
            self._refused.append(run)
            self._left_out[why] += 1
        else:
            self._left_out[why] += 1

    def _take_record(self, run: int, at: int, size: int) -> None:
        if size > _MOST_RECORD:
            self._left_out[f".json of more than {_MOST_RECORD:,} bytes"] += 1
            return
        text = self._text(at, size)
        try:
            record = record_of(text)
        except ValueError as error:
            raise self._wrong(at, f"a .json member: {error}: give it one value") from None
        if record is None:
            if not _is_json(text):
                raise self._wrong(at, "a .json member that is no JSON")
            self._left_out[".json that is no object"] += 1
            return
        self._read_records += 1
        for name, value in record.items():
            values = self._records.get(name)
            if values is None:
                if len(self._records) >= _MOST_COLUMNS:
                    self._left_out[f"values in .json beyond {_MOST_COLUMNS:,} names"] += 1
                    continue
                values = self._records[name] = Values()
            if isinstance(value, dict | list):
                values.nested = True
                if isinstance(value, list) or name == "objects":
                    self._lists.setdefault(name, Values()).add(run, at, json.dumps(value, default=float))
            elif value is not None:
                values.quoted |= isinstance(value, str)
                values.plain |= not isinstance(value, str)
                values.add(run, at, as_cell(value))

    def _text(self, at: int, size: int) -> str:
        try:
            text = self._listing.peek(at, size).decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise self._wrong(at, "expected text in UTF-8")
        return text

    def _wrong(self, at: int, what: str) -> SourceError:
        return SourceError(f"{self._file.shown}, byte {at:,}: {what}", path=self._file.path, offset=at)

    def _made(self) -> TarMembers:
        """Runs of one sample become one."""
        runs = len(self._firsts)
        _, first, number = np.unique(np.frombuffer(self._hashes, np.uint64), return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        sample_of = np.append(rank[number.reshape(runs)], -1)  # run -1 is no sample
        begins = first[order]
        keys, stat, of_run = self._images.made(self._number, self._file)
        other_keys, other_stat, of_others = self._others.made(self._number, self._file)
        for values in (self._classes, *self._records.values(), *self._lists.values()):
            values.samples = array("q", sample_of[np.frombuffer(values.samples, np.int64)].tobytes())
        self._refuse_two_values(begins)
        self._file.check_unchanged()
        return TarMembers(
            self._file.shown,
            keys,
            stat,
            sample_of[of_run],
            Others(other_keys, other_stat, sample_of[of_others]),
            self._runs.keys().take(begins),
            np.frombuffer(self._firsts, np.int64)[begins],
            sample_of[np.frombuffer(self._refused, np.int64)],
            self._classes,
            self._records,
            self._lists,
            self._read_records,
            self._left_out + self._listing.left_out,
            {self._prefix + folder for folder in self._listing.folders},
            self._listing.warnings,
        )

    def _refuse_two_values(self, begins: npt.NDArray[np.int64]) -> None:
        """Two classes of one sample, or two records that hold one name."""
        named = (*self._records.items(), *self._lists.items())
        kinds = [(".cls members", self._classes), *((f".json members with {show(name)}", values) for name, values in named)]
        for what, values in kinds:
            if pair := first_twice(np.frombuffer(values.samples, np.uint64)):
                a, b = (f"byte {values.at[i]:,}" for i in pair)
                key = self._runs.keys()[int(begins[values.samples[pair[0]]])]
                raise SourceError(f"{self._file.shown}: sample {show(as_text(key))} has two {what} (at {a} and {b})", path=self._file.path)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
