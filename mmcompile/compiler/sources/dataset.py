"""Python datasets as a source: any that has a length and items, arrays that are read in slices, and iterables, which are spooled to a disk once.

An exception in a sample, IndexError and StopIteration among them, is an error that names its row, never an end of data.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.geometry import LOOKED_AT, decide
from mmcompile.compiler.marks import versions_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.compiler.sealing import write_all
from mmcompile.compiler.sources.columnsource import ColumnSource
from mmcompile.compiler.sources.declaring import Hints, declare, is_vague, said_pictures, with_pictures
from mmcompile.compiler.sources.known import check_classes, class_names, known_dtypes, known_names, stamp_of
from mmcompile.compiler.sources.rows import RowScan
from mmcompile.compiler.sources.samplenames import named_parts
from mmcompile.compiler.sources.samples import Declared, told
from mmcompile.compiler.sources.samplevalues import ARRAYS, PICTURES, as_array, is_array, is_picture, texts_of
from mmcompile.compiler.sources.splits import why_no_splits
from mmcompile.compiler.tally import gone
from mmcompile.errors import BuildError, MMCompileError, OptionError, SourceError
from mmcompile.format.fields import Split

__all__ = ["DatasetSource", "SpooledSource", "wrap"]

Array = npt.NDArray[Any]

#: Samples looked at for a size of pictures that nobody typed: each is decoded whole for that, where a file's header would do.
_LOOKED_AT = min(LOOKED_AT, 100)
#: Samples between two reports of a look at all.
_TOLD = 64
#: Samples of an iterable that are kept in memory before they are written.
_SPOOL_BYTES = 8 << 20


def wrap(dataset: Any, asked: Preprocess | RowPreprocess | None) -> tuple[Any, RowPreprocess]:
    """(the source that reads a dataset, what is done to its numbers).  Raises OptionError for what is none, SourceError for a bad first sample."""
    pictures = asked if isinstance(asked, Preprocess) else Preprocess()
    if pictures.views is not None:
        raise OptionError("--views: drawn from the key of a file, and samples in Python have none: augment when they are read", options=["views"])
    if type(dataset).__name__ == "DataLoader" and getattr(dataset, "batch_size", None) is not None:
        raise OptionError("DataLoader: gives batches, which would be samples: give its dataset (loader.dataset), or make it with batch_size=None")
    if isinstance(dataset, Mapping) and all(isinstance(part, list | tuple) and not part for part in dataset.values()):
        raise SourceError("the dataset: there are no rows")
    try:
        columns = _columns(dataset)
        if columns is not None:
            return ColumnSource({"": columns}, known_names(dataset)), RowPreprocess.of(asked)
        parts = _column_splits(dataset)
        if parts is not None:
            if why := why_no_splits([*parts]):
                raise OptionError(f"the splits of a dict of arrays: {why}")
            return ColumnSource(parts, {}), RowPreprocess.of(asked)
    except MMCompileError:
        raise
    except Exception as error:  # sparse tensors have no slices; an array of a closed file of HDF5 has not even a shape
        said = (str(error).splitlines() or [""])[0][:100]
        raise OptionError(
            f"{type(dataset).__name__}: cannot be read in slices ({type(error).__name__}: {said}); expected dense arrays or tensors, of files that "
            "are open"
        ) from error
    splits = _splits(dataset)
    made: DatasetSource | SpooledSource
    if splits is not None:
        if why := why_no_splits([*splits]):
            raise OptionError(f"the splits of a dict of datasets: {why}")
        made = DatasetSource(splits, pictures)
    elif _is_map(dataset):
        made = DatasetSource({"": dataset}, pictures)
    elif hasattr(dataset, "__iter__") and not isinstance(dataset, str | bytes | Mapping):
        made = SpooledSource(dataset, pictures)
    else:
        if _has_keys(dataset) and (strange := next((name for name in dataset.keys() if not is_array(dataset[name])), None)) is not None:  # noqa: SIM118
            raise OptionError(
                f"{type(dataset).__name__}: {strange} in it is {type(dataset[strange]).__name__}, no array: give a dict of those that are to be "
                "fields, as {'x': file['x']}; or datasets by split"
            )
        raise OptionError(
            f"{type(dataset).__name__}: expected a path, a dataset with a length and items, arrays, or an iterable of samples"
            + ("; it has items but no length: give it __len__, or __iter__" if hasattr(dataset, "__getitem__") and not _has_keys(dataset) else "")
        )
    if made.declared is None:
        raise SourceError("the dataset: there are no rows")
    if made.declared.pictures is None:
        try:
            return made, RowPreprocess.of(replace(asked, fields=()) if isinstance(asked, Preprocess) else asked)
        except OptionError as error:
            raise OptionError(f"{error}, or give {PICTURES}; or {ARRAYS}", **error.details) from None
    return made, asked if isinstance(asked, RowPreprocess) else RowPreprocess.of_pictures(made.declared.pictures)


def _is_map(dataset: Any) -> bool:
    """Has it a length and items?  An IterableDataset of torch's says so, and has none."""
    names = {kind.__name__ for kind in type(dataset).__mro__}
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not _has_keys(dataset) and "IterableDataset" not in names


def _has_keys(dataset: Any) -> bool:
    """Is it asked by name: a dict, or a group of HDF5 or Zarr?"""
    return callable(getattr(dataset, "keys", None))


def _columns(dataset: Any) -> dict[str, Any] | None:
    """Arrays by name, where that is what a dataset is: one, a dict or group of them, or a TensorDataset."""
    if is_array(dataset):
        return {"x": dataset}
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and tensors and all(map(is_array, tensors)) and type(dataset).__name__ == "TensorDataset":
        return named_parts(tensors, None)
    if _has_keys(dataset) and hasattr(dataset, "__getitem__"):
        found = texts_of({name: dataset[name] for name in dataset.keys()})  # noqa: SIM118 (a group of HDF5 or Zarr is no dict)
        if any(map(is_array, found.values())) or all(isinstance(column, list) and not _of_samples(column) for column in found.values()):
            found = {name: as_array(column, name) if isinstance(column, list) else column for name, column in found.items()}
        if found and all(map(is_array, found.values())):
            return found
    return None


def _column_splits(dataset: Any) -> dict[str, dict[str, Any]] | None:
    """Arrays by split and name, where that is what a dict, or a group of HDF5 or Zarr, holds: dicts or groups of them, or TensorDatasets."""
    if not _has_keys(dataset) or not hasattr(dataset, "__getitem__"):
        return None
    found = texts_of({name: dataset[name] for name in dataset.keys()})  # noqa: SIM118 (as above)
    columns = {split: None if is_array(part) or isinstance(part, list) else _columns(part) for split, part in found.items()}
    return {split: part for split, part in columns.items() if part} if columns and all(columns.values()) else None


def _splits(dataset: Any) -> dict[str, Any] | None:
    """Datasets by split, where that is what a dict is."""
    if not isinstance(dataset, Mapping) or not dataset:
        return None
    lists = [d for d in dataset.values() if isinstance(d, list | tuple)]
    if lists and not any(map(_of_samples, lists)):  # columns
        return None
    alike = all(not d or _of_samples(d) if isinstance(d, list | tuple) else _is_map(d) and not isinstance(d, str | bytes) for d in dataset.values())
    return texts_of(dataset) if alike else None


def _of_samples(values: Any) -> bool:
    """Does a list hold samples of several parts, or pictures, not the numbers of a column?"""
    return isinstance(values, list | tuple) and len(values) > 0 and (isinstance(values[0], tuple | Mapping) or is_picture(values[0]))


class DatasetSource:
    """Datasets that have a length and items, by split ("": there are none); pictures in their samples are made as `preprocess` says."""

    root = ""
    item_by_item = by_index = True

    def __init__(self, datasets: Mapping[str, Any], preprocess: Preprocess, names: Sequence[str] | None = None) -> None:
        self._datasets = dict(datasets)
        lengths = [_length(d) for d in self._datasets.values()]
        if sum(lengths) >= 1 << 63:
            raise SourceError(f"{sum(lengths):,} rows, as the lengths of the datasets say; expected fewer than 2^63")
        self._stops = np.cumsum(lengths).astype(np.int64)
        self._asked = preprocess.settings()
        self._why, self._lost = "", dict[str, int]()
        self.declared: Declared | None = None
        self._classes: tuple[str, ...] | None = None
        first = next((i for i, d in enumerate(self._datasets.values()) if len(d)), None)
        if first is not None:
            known = known_names(list(self._datasets.values())[first])
            row, sample = self._telling(names)
            pictures = said_pictures(preprocess)
            with told(row):
                preprocess, main = with_pictures(sample, names, preprocess)
                if main is not None:
                    preprocess = self._sized(sample, preprocess, main, names, pictures)
                self.declared = declare(sample, names, preprocess, Hints(known, known_dtypes(list(self._datasets.values())[first])), pictures)
            self._classes = class_names(self.declared.fields, known)

    def identity(self) -> dict[str, object]:
        """The settings that decide which rows there are and what they hold."""
        return _identity(self.declared)

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that rows depend on."""
        return _versions(self.declared)

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """What the first sample declares, for as many rows as the lengths say.

        Where lists or texts differ in length, and nobody said how many rows or bytes are kept, all samples are looked at; so they are where lists are
        cut, to count that.
        """
        counts = self._measure(progress or (lambda _: None))
        fields = () if self.declared is None else self.declared.fields
        n, splits, start = int(self._stops[-1]), [], 0
        for name, stop in zip(self._datasets, self._stops.tolist(), strict=True):
            splits.append(Split(name, start, stop))
            start = stop
        stamps = tuple(stamp_of(d) for d in self._datasets.values())
        named = tuple(splits) if set(self._datasets) != {""} else ()
        said = (self._why,) if self._why else ()
        return RowScan(n, fields, tuple("" for _ in splits), self._stops, stamps, named, self._classes, (*said, *_left_out(self.declared)), counts)

    def _telling(self, names: Sequence[str] | None) -> tuple[int, Any]:
        """The first sample (its number, itself) without an empty list, of the first some: what others hold is told by it."""
        first = self._sample(0)
        for row in range(min(int(self._stops[-1]), _LOOKED_AT)):
            sample = self._sample(row) if row else first
            if not is_vague(sample, names):
                return row, sample
        return 0, first

    def _measure(self, progress: Callable[[int], None]) -> dict[str, int]:
        """Look at all samples, where a size of fields is not known; what is cut, for the summary."""
        declared, found, lost = self.declared, dict[str, int](), dict[str, int]()
        if declared is None or not (declared.unsized or declared.cuts):
            return {}
        for row in range(int(self._stops[-1])):
            declared.measure(self._sample(row), row, found, lost)
            if row % _TOLD == 0:
                progress(row)
        self.declared = declared.sized(found)
        return _cut(lost)

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop), sample by sample.  Raises SourceError, naming the row."""
        return self.take(np.arange(start, stop))

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, Array]:
        """These rows (M,), as `read`."""
        assert self.declared is not None
        out = {f.name: np.empty((len(rows), *f.shape), f.stored) for f in self.declared.fields}
        for at, row in enumerate(rows.tolist()):
            self.declared.store(self._sample(row), row, out, at, self._lost)
        check_classes(out, self.declared.fields, self._classes, rows)
        return out

    def lost(self) -> dict[str, int]:
        """Boxes that the rows which were read since it was last asked have lost, by words for the summary."""
        lost, self._lost = self._lost, {}
        return gone(lost)

    def _sample(self, row: int) -> Any:
        at = int(np.searchsorted(self._stops, row, side="right"))
        first = int(self._stops[at - 1]) if at else 0
        try:
            return list(self._datasets.values())[at][row - first]
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever a stranger's dataset raises, sys.exit() too, says something of this row
            raise _raised(row, error) from error

    def _sized(self, sample: Any, preprocess: Preprocess, main: str, names: Sequence[str] | None, said: frozenset[str]) -> Preprocess:
        """The settings of pictures with their size chosen, where nobody typed one."""
        if not _is_open(preprocess):
            return preprocess
        rows = np.unique(np.linspace(0, int(self._stops[-1]) - 1, _LOOKED_AT).astype(np.int64)).tolist()
        pictures: list[Any] = [named_parts(self._sample(row) if row else sample, names, said).get(main) for row in rows]
        chosen, self._why = decide(preprocess, [decode.picture_size(picture, preprocess) for picture in pictures if is_picture(picture)])
        return chosen


def _is_open(preprocess: Preprocess) -> bool:
    """Do the samples decide on a size, or on a mode?"""
    return preprocess.needs_size() or (preprocess.mode == "keep" and preprocess.kept_mode is None)


def _left_out(declared: Declared | None) -> tuple[str, ...]:
    """A line where a part of samples is no field."""
    if declared is None or not declared.left_out:
        return ()
    return (f"{', '.join(declared.left_out)}: outlines, which have no shape, are left out; the dataset may draw masks of them",)


def _cut(lost: Mapping[str, int]) -> dict[str, int]:
    return {f"rows of {name} beyond its max cut": count for name, count in lost.items() if count}


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:  # negative, or whatever a stranger's class raises
        raise SourceError(f"{type(dataset).__name__}: its length cannot be told ({error})") from error


def _raised(row: int, error: BaseException) -> SourceError:
    said = (str(error).splitlines() or [""])[0][:200]
    return SourceError(f"row {row:,}: the dataset raised {type(error).__name__}" + (f": {said}" if said else ""), row=row)


def _identity(declared: Declared | None) -> dict[str, object]:
    pictures = None if declared is None else declared.pictures
    if pictures is None:
        return {"kind": "dataset"}
    settings = pictures.settings().get("fields")
    own = {} if not settings else {"fields": settings}
    return {"kind": "dataset", "pictures": pictures.pixel_settings(), "versions": _versions(declared), **own}


def _versions(declared: Declared | None) -> dict[str, str]:
    """Of the libraries that pictures depend on."""
    return {} if declared is None or declared.pictures is None else versions_of(declared.pictures)


class SpooledSource:
    """An iterable of samples, read once, in this process, into files in a temporary folder (TMPDIR), which then are read as rows."""

    root = ""
    by_index = True
    here_only = "an iterable is read once, into files of this machine"

    def __init__(self, samples: Iterable[Any], preprocess: Preprocess, names: Sequence[str] | None = None) -> None:
        self.declared: Declared | None = None
        self._left: Iterator[Any] | None = _guarded(samples)
        self._n, self._why, self._lost, self._gone_boxes = 0, "", dict[str, int](), dict[str, int]()
        self._folder = Path(tempfile.mkdtemp(prefix="mmcompile-spool-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._first: list[Any] = []
        known = known_names(samples)
        pictures = said_pictures(preprocess)
        for sample in self._left:
            self._first = [sample]
            with told(0):
                preprocess, main = with_pictures(sample, names, preprocess)
                if main is not None and _is_open(preprocess):
                    preprocess, why = decide(preprocess, [decode.picture_size(named_parts(sample, names, pictures)[main], preprocess)])
                    self._why = f"{why}; an iterable is read once, so its first sample decided"
                self.declared = declare(sample, names, preprocess, Hints(known, known_dtypes(samples)), pictures)
            if self.declared.unsized:
                part = self.declared.unsized[0]
                raise OptionError(
                    f"{part}: lists and texts of an iterable, which is read once, need a size: give fields={{{part!r}: {{'max': N}}}} (of text: "
                    "'shape': (N,))",
                    options=["max"],
                )
            break
        self._classes = None if self.declared is None else class_names(self.declared.fields, known)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_left": None, "_first": [], "_gone": None}

    def identity(self) -> dict[str, object]:
        return _identity(self.declared)

    def scan(self, progress: Callable[[int], None] | None = None) -> RowScan:
        """Read all samples and write them down; `progress` gets the number of samples so far."""
        if self.declared is None:
            return RowScan(0, (), ("",), np.zeros(1, np.int64), ("",))
        if self._left is not None:
            self._spool(self.declared, progress or (lambda _: None))
        said = (*((self._why,) if self._why else ()), *_left_out(self.declared))
        stops = np.array([self._n], np.int64)
        return RowScan(self._n, self.declared.fields, ("",), stops, ("",), (), self._classes, said, _cut(self._lost) | gone(self._gone_boxes))

    def _spool(self, declared: Declared, progress: Callable[[int], None]) -> None:
        row_bytes = sum(f.row_bytes for f in declared.fields)
        size = max(1, _SPOOL_BYTES // row_bytes)
        out = {f.name: np.empty((size, *f.shape), f.stored) for f in declared.fields}
        files = {name: (self._folder / name).open("wb", buffering=0) for name in out}
        at = 0

        def flush() -> None:
            for spec in declared.fields:
                view: Any = memoryview(out[spec.name][:at].reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                try:
                    write_all(files[spec.name].fileno(), view, (self._n - at) * spec.row_bytes)
                except OSError as error:
                    raise BuildError(
                        f"{tempfile.gettempdir()} (TMPDIR), where the samples of an iterable are written first: {error.strerror} after {self._n:,} "
                        "samples; free some space, or set TMPDIR to a folder with more",
                        errno=error.errno,
                    ) from error
            progress(self._n)

        assert self._left is not None
        try:
            for sample in itertools.chain(self._first, self._left):
                declared.measure(sample, self._n, {}, self._lost)
                declared.store(sample, self._n, out, at, self._gone_boxes)
                self._n, at = self._n + 1, at + 1
                if at == size:
                    flush()
                    at = 0
            flush()
        finally:
            for file in files.values():
                file.close()
            self._first, self._left = [], None

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """The rows [start, stop)."""
        return self.take(np.arange(start, stop))

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, Array]:
        """These rows (M,)."""
        found = {name: values[rows] for name, values in self._maps().items()}
        assert self.declared is not None
        check_classes(found, self.declared.fields, self._classes, rows)
        return found

    def _maps(self) -> dict[str, Array]:
        assert self.declared is not None
        return {f.name: np.memmap(self._folder / f.name, f.stored, "r", shape=(self._n, *f.shape)) for f in self.declared.fields}


def _guarded(samples: Iterable[Any]) -> Iterator[Any]:
    """The samples; what the iterable raises is an error with its row."""
    row = 0
    try:
        for sample in samples:
            yield sample
            row += 1
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise _raised(row, error) from error
