"""Hides how a compiled folder looks to training code: a map-style torch Dataset whose samples are views and whose batches are one gather.

It writes nothing and holds nothing per sample, but for a subset's row numbers.  It pickles as path, generation and arguments (a subset with its row
numbers), so workers that start later, or on another machine, open the generation that this one had open, or fail saying so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mmcompile.format.reader import Reader
from mmcompile.runtime.arguments import columns_of, field_names, files_of, joint_of, spatial_of, split_range
from mmcompile.runtime.buffers import Pool
from mmcompile.runtime.column import ClassColumn, check_classes
from mmcompile.runtime.facts import Facts
from mmcompile.runtime.gathered import gathered, in_worker, shared_memory
from mmcompile.runtime.hooks import Hooks, stacked, warn_of_normalizing_twice, warn_of_one_epoch, with_valid
from mmcompile.runtime.pixels import ImageColumn
from mmcompile.runtime.seeding import SampleIndex, stream_keys
from mmcompile.runtime.selection import Selection, divide, integer, integers, said_valid, stream_keys_of, whole
from mmcompile.runtime.views import Views, warn_of_one_variant

if TYPE_CHECKING:
    from mmcompile.runtime.cache import Cache
    from mmcompile.runtime.device import Resident
    from mmcompile.runtime.upcoming import Upcoming
    from mmcompile.runtime.warming import Warming
    from mmcompile.runtime.windows import Windows

__all__ = ["MMapShardDataset"]

Rows = npt.NDArray[np.int64]

#: What is opened again after unpickling instead of travelling.
_OPENED = (
    "_columns",
    "_views",
    "_pools",
    "_made",
    "_sized",
    "_image",
    "_label",
    "_range",
    "_rows",
    "_targets",
    "_resident",
    "_texts",
    "_spatial",
    "_joint",
)
#: Batches of memory that wait for the next use: one is being filled while the one before is let go of.
_SPARE = 2
#: Samples looked at for whether hooks draw random numbers: looking costs more than seeding.
_WATCHED = 16


class _Epoch:
    """The epoch of a dataset and all its subsets; `told` once somebody has said it."""

    number, told = 0, False


class MMapShardDataset(Facts):
    """The samples of a folder that `mmcompile build` made.

    `ds[i]` is `(image, label)`, or the image alone where there are no labels: image (C, H, W), label a Python int.  Values, the rows of arrays and
    tables, are tensors of the field's shape and dtype, of no axis where they are single numbers.  `ds[2:5]`, `ds[[7, 1, 7]]`, or an array or tensor
    of ints is a batch: (N, C, H, W), int64 (N,) and (N, *shape), one copy into memory of its own.  A mask is (H, W), text a str (of a batch a
    list of them), and boxes, keypoints and other lists have as many rows in every sample, of which their count says how many are filled.

    A sample of stored values is a view of a copy-on-write map: writing to it never changes the file, but is seen by later `ds[i]` of the same row
    in this process; `.clone()` it, or pass `copy=True`.  Batches, computed samples and what a transform gets are copies of what the file holds.

    `DataLoader(ds, batch_size=256)` copies each batch once, like `ds[list]`: hwc rows come as channels_last.  A custom `collate_fn` gets samples that
    view one batch; what `default_collate` makes of them all is that batch.  A batch is yours until its last view is gone; then its memory is reused.

    An index may be a `SampleIndex`: it carries a seed and an epoch, and perhaps `valid`, which becomes the sample's last element (in a dict:
    "valid").  Other indices mean seed 0 and the epoch of `set_epoch`.

    split: the name of a split, or "all" for all of them; needed where there are several.
    fields: names of the fields to read, in the order wanted (others are never touched); a single one comes bare, not in a tuple.
    transform: called with the image (a tensor of its own; one made of timm's transforms gets a PIL image of 8 bits).  target_transform: called with
        the label.  transforms: called with all fields, in place of the two: lists come cut to their count (or to their boxes, where `fields` leaves
        it out), and where a sample has masks, boxes or keypoints and torchvision can be imported, they and images as its tv_tensors: Image, Mask,
        BoundingBoxes (XYXY), of keypoints (KeyPoints, visibility).
        One with a parameter named `generator` gets a torch.Generator there; it and the global generators of torch, numpy and random are seeded by
        (seed, epoch, row) once for all hooks of a sample, in whatever process; the global ones are left as the user had them.
    dtype: the dtype on disk for raw values, or a float dtype for the numbers: x / 255 (16 bit: x / 65535), normalised if built so.  By default the
        numbers in float32 where the dataset was built with normalisation, else what lies on disk.  Values too, stored floats in the dtype that they
        have (normalised ones are computed in float64 where that is float64), but a float dtype says nothing of integers that are not normalised:
        counts, times, categories, the ids in a second volume; and boxes, keypoints and masks have the dtype on disk.
    crop: an int or (height, width), of volumes (depth, height, width): the centre of each image, equal to torchvision's CenterCrop, and of what
        belongs to it.  Boxes are moved and clipped, those of which nothing is left (or less than the `min_visibility` of the build) go out of all
        lists of their count; keypoints outside are not to be seen.  ValueError where a field in use cannot follow.
    copy: every sample in memory of its own.
    output: "tuple" or "dict" (field name -> value).
    engine: "mmap", "pread" (bad media and files cut by others are exceptions, not signals), or "auto": mmap on local file systems.
    generation: open this one, not the current one.
    classes: the names that the classes must have, in the order of their numbers, as in `classes=train.classes`; others are an error.
    cache: a Cache, for a dataset behind a URL (`root` may be one then) or in a slow folder: shards come to a local disk when they are wanted, and a
        little before, each checked against its hash.  `shuffle=True` of ShardLoader and ShardSampler means "block" then.
    view: of a dataset built with several variants of each sample, always this one.  By default (seed, epoch, row) picks one, the same of all fields:
        where a sample begins is random, each epoch goes on by one, and K epochs in a row show all K.

    Raises NotADatasetError, GenerationError, VersionError or another FormatError for what lies on disk, TypeError or ValueError for arguments.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str | None = None,
        *,
        fields: Sequence[str] | None = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        transforms: Callable[..., Any] | None = None,
        dtype: torch.dtype | str | None = None,
        crop: int | tuple[int, ...] | None = None,
        copy: bool = False,
        output: str = "tuple",
        engine: str = "auto",
        generation: str | None = None,
        classes: Sequence[str] | None = None,
        cache: Cache | None = None,
        view: int | None = None,
    ) -> None:
        if output not in ("tuple", "dict"):
            raise ValueError(f"output must be 'tuple' or 'dict', not {output!r}")
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"root is the path of a folder that `mmcompile build` made, not {root!r}")
        hooks = Hooks(transform, target_transform, transforms)
        self._reader = Reader(files_of(root, cache), generation=generation, engine=engine)
        if classes is not None:
            check_classes(self.root, self._reader.classes, classes)
        self._split = split
        self._fields = fields if fields is None else field_names(fields)
        self._dtype, self._crop, self._view = dtype, crop, view
        self._copy = bool(copy)
        self._output = output
        self._epoch = _Epoch()
        self._chosen: Rows | None = None  # the rows of a subset
        self._windows: Windows | None = None
        self._hooks = Hooks(None, None, None)
        self._open()
        self._hang(hooks)

    def _open(self) -> None:
        """Set what follows from the reader and the arguments."""
        index = self._reader.index
        self._range = start, stop = split_range(self._reader, self._split)
        self._rows = Selection(start, stop - start, self._chosen)
        self._columns = columns_of(self._reader, self._fields, self._dtype, self._crop)
        self._views = Views.of_columns(self._columns, self._view, str(self.root))
        if self._windows is not None:
            bounds = np.array([0, *(s.stop for s in index.splits)], np.int64)
            self._columns = self._windows.columns(self._columns, self._reader, self._dtype, self._crop)
            if self._chosen is None:
                self._rows = self._windows.selection(self._reader.origins.series, bounds, *self._range, str(self.root))
        self._pools = [Pool(_SPARE) for _ in self._columns]
        self._made = Pool(_SPARE * len(self._columns))  # for what hooks have made
        self._sized: set[str] = set()
        self._image = next((i for i, c in enumerate(self._columns) if isinstance(c.base, ImageColumn)), None)
        self._label = next((i for i, c in enumerate(self._columns) if isinstance(c.base, ClassColumn)), None)
        self._texts = [i for i, c in enumerate(self._columns) if c.text]
        self._spatial = spatial_of(index, self._columns, self._crop, str(self.root)) if self._windows is None else None
        self._targets: Rows | None = None
        self._resident: Resident | None = None
        self._see(self._hooks)

    def _hang(self, hooks: Hooks) -> None:
        """Call other hooks from now on."""
        self._see(hooks)
        self._watch = _WATCHED if self._hooked else 0
        if self._image is not None and self._columns[self._image].normalized:
            warn_of_normalizing_twice(hooks, self.root)

    def _see(self, hooks: Hooks) -> None:
        """Set what follows from hooks, and from the columns that they are for; ValueError, and nothing is changed, where these are missing."""
        image, label = (None if at is None else self._columns[at] for at in (self._image, self._label))
        hooks.check(self.root, [column.name for column in self._columns], image, label)
        together = hooks.transforms is not None and self._windows is None
        self._joint = joint_of(self._reader.index, self._columns, self._spatial) if together else None
        self._hooks, self._hooked = hooks, bool(hooks)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    # -- samples and batches

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self._rows)):  # not the sequence protocol, which would take an IndexError in a transform for the end
            yield self[i]

    def __getitem__(self, key: Any) -> Any:
        """A sample for an integer, a batch for a slice or a list, array or tensor of integers.  Raises IndexError beyond the end, TypeError."""
        if type(key) is int or type(key) is SampleIndex:
            return self._sample(key)
        if isinstance(key, slice):
            wanted = range(*key.indices(len(self._rows)))
            for end in {*wanted[:1], *wanted[-1:]}:  # before numbers are made for as many rows as the index claims
                self._columns[0].ready(self._rows.row(end))
            return self._batch(self._where(np.arange(wanted.start, wanted.stop, wanted.step, dtype=np.int64)), ())
        if isinstance(key, list | range) or (isinstance(key, np.ndarray | torch.Tensor) and key.ndim):
            return self._batch(self._where(integers(key, len(self._rows))), key)
        return self._sample(integer(key))

    def __getitems__(self, keys: Sequence[int]) -> Sequence[Any]:
        """The samples of a batch, as DataLoader asks for them: gathered in one go, so that they are what the file holds."""
        rows = self._where(integers(keys, len(self._rows)))
        shown = self._shown(rows, keys, warn=True)
        if self._hooked:
            return self._called(self._unbind(self._gather(rows, shown)), rows, keys)
        valid = said_valid(keys)
        bare = self._output == "tuple" and valid is None and len(self._columns) == 1 and self._label is None
        return gathered(lambda: self._gather(rows, shown, valid), len(rows), self._unbind, self._packed if self._texts else self._named, bare)

    def _sample(self, key: int) -> Any:
        row = self._rows.row(key)
        if self._resident is not None or (self._spatial is not None and self._spatial.crops):
            rows = np.array([row], np.int64)
            values = self._unbind(self._gather(rows, self._shown(rows, (key,))))[0]
        elif self._views is not None:
            shown, _ = self._views.asked((key,), np.array([row], np.int64), self._epoch.number)
            values = self._views.sample(self._columns, (row, *self._reader.locate(row)), int(shown[0]), self._copy or self._hooks.take_images)
        elif self._copy or self._hooks.take_images:
            values = [column.own(row) for column in self._columns]
        else:
            shard, local = self._reader.locate(row)
            values = [column.sample(row, shard, local) for column in self._columns]
        if self._hooked:
            return self._called([values], np.array([row], np.int64), (key,))[0]
        if type(key) is SampleIndex and key.valid is not None:
            values.append(key.valid)
        return self._named(values)

    def _batch(self, rows: Rows, keys: Any) -> Any:
        if not self._hooked:
            return self._packed(self._gather(rows, self._shown(rows, keys), said_valid(keys)))
        if not len(rows):
            raise ValueError("no samples are asked for, and what shape a transform would give them cannot be told: ask for at least one")
        samples = self._called(self._unbind(self._gather(rows, self._shown(rows, keys))), rows, keys)
        out = stacked(samples, shared_memory if in_worker() else self._made.lend)
        return tuple(out) if isinstance(out, list) else out

    def _shown(self, rows: Rows, keys: Any, warn: bool = False) -> Rows | None:
        """The variants to hand out; None where there are none."""
        if self._views is None:
            return None
        shown, told = self._views.asked(keys, rows, self._epoch.number)
        if warn and not told and not self._epoch.told:
            warn_of_one_variant()
        return shown

    def _gather(self, rows: Rows, shown: Rows | None = None, valid: list[bool] | None = None) -> list[torch.Tensor]:
        """A tensor for each column, one copy into recycled memory, or in a worker process into shared memory."""
        shared = in_worker() and not self._hooked
        parts = [] if self._resident is None else self._resident.parts(self._columns, rows, shown)
        for column, pool in zip(self._columns, self._pools, strict=True) if self._resident is None else ():
            if len(rows) and column.field not in self._sized:  # before memory is asked for: does a file bear out the size of its rows?
                column.ready(int(rows[0]))
                self._sized.add(column.field)
            parts.append(column.batch(column.places(rows, shown), column.empty(len(rows), shared_memory if shared else pool.lend)))
        if self._spatial is not None:
            self._spatial.follow(parts, len(rows))
        return parts if valid is None else [*parts, torch.tensor(valid, device="cpu")]

    def _unbind(self, parts: list[torch.Tensor]) -> list[list[Any]]:
        """The values of each sample of a batch, or of a part of it: views of the parts.  The part of `valid` comes last."""
        values = [column.samples(part) for column, part in zip(self._columns, parts, strict=False)]
        return [list(sample) for sample in zip(*values, *(part.tolist() for part in parts[len(values) :]), strict=True)]

    def _called(self, samples: list[list[Any]], rows: Rows, keys: Any) -> list[Any]:
        """The samples after the hooks, each keyed by what its index carries, else by the epoch of the dataset."""
        streams, told = stream_keys_of(keys, rows, self._epoch.number)
        told = told or self._epoch.told
        joined = samples if self._joint is None else map(self._joint, samples)
        made, drawn = self._hooks.run(streams, joined, self._image, self._label, 0 if told else self._watch)
        if not told:
            self._watch = 0 if drawn else max(0, self._watch - len(made))
        if drawn:
            warn_of_one_epoch()
        valid: Sequence[bool | None] = said_valid(keys) or [None] * len(made)
        return [with_valid(self._finished(sample), said) for sample, said in zip(made, valid, strict=True)]

    def _samples(self, rows: Rows, seed: int, epoch: int, parts: list[torch.Tensor]) -> list[Any]:
        """The samples of rows after the hooks; `parts` holds their values, a tensor for each column, and is the hooks' to write to."""
        samples = self._unbind(parts)
        joined = samples if self._joint is None else map(self._joint, samples)
        made, _ = self._hooks.run(stream_keys(seed, epoch, rows).tolist(), joined, self._image, self._label)
        return [self._finished(sample) for sample in made]

    def _finished(self, out: Any) -> Any:
        """A sample of what the hooks returned: what `transforms` makes of a tuple is up to it."""
        if self._hooks.transforms is None:
            return self._named(out)
        if self._output == "tuple" or isinstance(out, dict):
            return out
        return self._named(list(out) if len(self._columns) > 1 else [out])

    def _packed(self, values: list[Any]) -> Any:
        """A sample or batch of one value for each column, and perhaps of `valid`; of a batch, text is made strings here."""
        for i in self._texts:
            if isinstance(values[i], torch.Tensor):
                values[i] = self._columns[i].samples(values[i])
        return self._named(values)

    def _named(self, values: list[Any]) -> Any:
        if self._output == "dict":
            return dict(zip((*(column.name for column in self._columns), "valid"), values, strict=False))
        return tuple(values) if len(values) > 1 else values[0]

    def _where(self, samples: Rows) -> Rows:
        """The rows of the folder that these samples are."""
        return self._rows.rows(samples)

    @property
    def transform(self) -> Callable[..., Any] | None:
        """What images go through.  It may be set between epochs, as may `target_transform` and `transforms`: for this dataset, not its subsets."""
        return self._hooks.transform

    @transform.setter
    def transform(self, function: Callable[..., Any] | None) -> None:
        self._hang(Hooks(function, self.target_transform, self.transforms))

    @property
    def target_transform(self) -> Callable[..., Any] | None:
        return self._hooks.target_transform

    @target_transform.setter
    def target_transform(self, function: Callable[..., Any] | None) -> None:
        self._hang(Hooks(self.transform, function, self.transforms))

    @property
    def transforms(self) -> Callable[..., Any] | None:
        return self._hooks.transforms

    @transforms.setter
    def transforms(self, function: Callable[..., Any] | None) -> None:
        self._hang(Hooks(self.transform, self.target_transform, function))

    @property
    def epoch(self) -> int:
        """What keys random transforms, besides the row, where an index carries no epoch of its own: 0 until `set_epoch`."""
        return self._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Give random transforms other numbers, of this dataset and all its subsets, those made before too.

        Before iteration begins: workers that are running (persistent ones) have a dataset of their own and are not reached; a ShardSampler's
        indices carry the epoch to them.
        """
        number = whole("epoch", epoch, 0, 1 << 64)
        self._epoch.number, self._epoch.told = number, True

    # -- parts

    def subset(self, samples: Any) -> MMapShardDataset:
        """A dataset of these samples, in this order, also more than once; no pixel is copied, and each keeps its randomness.

        `samples`: a list, range, array or tensor of numbers.  Raises IndexError beyond the end, TypeError for masks and what is no number.
        """
        rows = self._where(integers(samples, len(self._rows)))
        rows.flags.writeable = False
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__, _chosen=rows, _rows=Selection(0, 0, rows), _targets=None)
        return out

    def random_split(self, lengths: Sequence[float], seed: int = 0, stratify: bool = False) -> list[MMapShardDataset]:
        """Subsets of `lengths` samples, or fractions of all, that share none and together are all; each in the order of this dataset.

        stratify: divide each class for itself, each share of it rounded up or down.  Which sample goes where is a hash of (seed, row), the same
        everywhere.  Of fractions, which sum up to 1, each part gets the whole number below its share, and the rest goes round from the first.
        Raises ValueError for lengths that do not fit, or when there are no labels to stratify by.
        """
        if (
            isinstance(lengths, str)
            or not isinstance(lengths, Sequence | np.ndarray)
            or isinstance(seed, bool)
            or not isinstance(seed, int | np.integer)
        ):
            raise TypeError(f"random_split takes a list of lengths or fractions, and seed= (an int), not {lengths!r}, {seed!r}")
        labels = self.targets if stratify else None
        if stratify and labels is None:
            raise ValueError(f"{self.root}: stratify=True needs labels, and there are none; split without it")
        rows = self._where(np.arange(len(self._rows), dtype=np.int64))
        return [self.subset(part) for part in divide(rows, lengths, seed, labels)]

    def windows(self, length: int, stride: int = 1, horizon: int | None = None, target: str | Sequence[str] | None = None) -> MMapShardDataset:
        """A dataset of the windows of `length` rows in a row, each `stride` rows after the one before; nothing is copied, or exists per window.

        No window crosses the end of a group or of a split.  Each field comes as (T, *shape), a view within a shard; batches are (N, T, *shape).
        With `horizon` and `target` a sample has, behind the windows, the target: the row `horizon` rows after the window's last one, in the same
        group.  For the window that begins at row t:

            windows(4, horizon=2, target="y")   row   t  t+1  t+2  t+3  t+4  t+5  t+6
                                                x     x   x    x    x                      (T, *shape)
                                                y                             y            row t + 4 - 1 + 2

        target: names of fields, which come as (N, *shape), or of columns of one field, (N, K), for one name as text (N,), in this order, whether
            `fields=` names them or not.  A class, one that `fields=` leaves out, and with horizon=0 (the window's last row) any field, comes as a
            target only; others come as windows too, and in a dict their target is called NAME_target.  Columns in the window need a horizon above 0.

        `source(i)` is that of the first row.  Raises ValueError where no window fits, and for a subset: take a subset of the windows instead.
        """
        from mmcompile.runtime.windows import Windows  # reading alone does not load it

        if self._windows is not None or self._chosen is not None or self._resident is not None:
            raise ValueError(
                f"{self.root}: windows are of a whole dataset or split: call windows() first, then subset(), random_split() or to_device()"
            )
        out = type(self).__new__(type(self))
        out.__setstate__({**self.__getstate__(), "_windows": Windows.of(length, stride, horizon, target)})
        return out

    @property
    def _reach(self) -> int:
        """Rows after the row of a sample that it is made of."""
        return 0 if self._windows is None else self._windows.reach

    def _needed(self) -> Selection:
        """The rows that samples are made of, rising, each once."""
        if self._windows is None or self._chosen is None:
            return self._rows.ascending()
        return self._windows.needed(np.unique(self._chosen))

    def blocks(self) -> Rows:
        """The first sample of each shard, then the number of samples: int64 (shards + 1,); of a subset only shards that it has samples of.

        Raises ValueError for a subset whose rows do not ascend.
        """
        return self._rows.blocks(self._reader.starts)

    def to_device(self, device: str | torch.device, budget: int | None = None) -> MMapShardDataset:
        """This dataset with its rows on a device, or as many whole shards of them as `budget` bytes hold, the rest coming from the files as before.

        Batches by index are on the device then; order, seeds and batches are those without.  Without a budget at most 60 % of the free memory is
        taken.  "cpu" means in RAM: the page cache, of which all processes of a host share one copy, locked there as far as the user's limit
        (`ulimit -l`) allows.  Raises MemoryError with the numbers and the budget that fits.  A pickle of it is not resident.
        """
        from mmcompile.runtime.device import device_of, to_device  # reading alone does not load it

        found = device_of(device)

        out = type(self).__new__(type(self))
        out.__setstate__({**self.__getstate__(), "_reader": self._reader.reopened()})
        out._resident = to_device(out, found, budget)
        return out

    def upcoming(self) -> Upcoming | None:
        """What asks for shards before they are read, where they have to be brought here first: with a cache."""
        resident = self._resident is not None and len(self._resident) == len(self._needed())
        if resident or not self._reader.far:
            return None
        from mmcompile.runtime.upcoming import Upcoming

        return Upcoming(self)

    def warm(self, progress: Callable[[int, int], None] | None = None) -> Warming:
        """Read the files of the fields in use into the page cache, in the background; see Warming.  progress: called with (bytes done, of all).

        With a cache: bring as many shards as it may hold.
        """
        from mmcompile.runtime.warming import Warming

        return Warming(self, progress)
