"""Hides how one batch is made: its rows gathered and cut into recycled memory, made numbers, and sent to the device."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function

from mmcompile.runtime.ahead import Stage
from mmcompile.runtime.augment import Augment, Cut
from mmcompile.runtime.buffers import Pool, can_pin, pinned
from mmcompile.runtime.column import Column
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import Mover, Sent
from mmcompile.runtime.patch import Patch
from mmcompile.runtime.pixels import PixelColumn
from mmcompile.runtime.seeding import drawn_rows
from mmcompile.runtime.volume import VolumeColumn, check_together

__all__ = ["Job", "Made", "Maker", "Times", "labelled"]

Rows = npt.NDArray[np.int64]

#: Rows of a batch that are looked at for whether the disk must be told: some 50 us each, and cold data is cold nearly everywhere.
_LOOKED_AT = 3
#: After so many warm batches one in as many is looked at.
_ALIKE = 8
#: A batch of which no more than this part came from a disk did not wait for it: code that is loaded late does.
_SOME = 8
#: Memory that waits, beside that of the batches ahead: of the one handed out, of the one that the loop lets go of only then, of a short last one.
_SPARE = 3


@dataclass
class Times:
    """Seconds that a thread spent on one batch."""

    gathered_s: float = 0.0
    converted_s: float = 0.0
    cold: bool = False
    bytes: int = 0


@dataclass
class Job:
    """A batch to be made: its samples (and the numbers of their draws), and the seed and epoch of all chance in it.

    `after` is where the epoch stands once it was received.
    """

    samples: Callable[[], tuple[Rows, Rows | None]]
    valid: npt.NDArray[np.bool_] | None
    seed: int
    epoch: int
    after: int
    cold: bool = False
    _found: tuple[Rows, Rows] | None = None

    def rows(self, dataset: MMapShardDataset) -> tuple[Rows, Rows]:
        """Rows of the dataset, and what stands for them where chance is keyed: int64 (N,)."""
        if self._found is None:
            samples, draws = self.samples()
            rows = dataset._where(samples)
            self._found = rows, rows if draws is None else drawn_rows(rows, draws)
        return self._found


@dataclass
class Made:
    """A batch that a thread has gathered."""

    job: Job
    keyed: Rows
    sent: Sent
    times: Times


class Maker:
    """What threads do: gather, cut, convert, and start the copy to the device.  Holds no iteration, so that threads keep none alive."""

    def __init__(self, dataset: MMapShardDataset, augment: Augment | None, device: torch.device | None, ahead: int, pin: bool) -> None:
        self.dataset, self.augment, self.device = dataset, augment, device
        self.columns = dataset._columns
        #: What is cut, and to which size.
        self.sizes = {} if augment is None else _sizes(dataset, augment)
        resident = dataset._resident
        if resident is not None and device is None:
            self.device = device = resident.device
        self._settings = dataset, augment, device, ahead, pin
        self._largest = max(self.columns, key=lambda column: column.row_bytes)
        self._looks = self._warm = 0
        self.mover = Mover(device) if device is not None and (device.type != "cpu" or resident is not None) else None
        pools = [Pool(ahead + _SPARE) for _ in self.columns]
        self.memory: list[Callable[[int], Tensor]] = [pinned if pin and can_pin() else pool.lend for pool in pools]
        self.stacking = pinned if pin and can_pin() else Pool(_SPARE * len(self.columns)).lend  # for what hooks have made
        if self.there and self.mover is not None and self.mover.memory is not None:
            self.memory = [self.mover.memory for _ in self.columns]

    def __reduce__(self) -> tuple[Any, ...]:
        return Maker, self._settings

    @property
    def there(self) -> bool:
        """Do batches go to the device as they are gathered?  Transforms of samples, which may be set at any time, come before that."""
        return self.mover is not None and (self.dataset._resident is not None or not self.dataset._hooked)

    def make(self, job: Job, stage: Stage) -> Made:
        rows, keyed = job.rows(self.dataset)
        times = Times()
        before = _disk_reads()
        with labelled("gather"):
            if self.there:
                sent = self._send(job, rows, keyed, stage, times)
            else:
                parts: list[Tensor] = []
                cuts, shown = self._cuts(job, keyed), self._shown(job, keyed)
                for column, memory, cut in zip(self.columns, self.memory, cuts, strict=True):
                    stage.text = f"gathering {len(rows):,} rows of {column.name!r} for"
                    out = column.empty(len(rows), memory, size=self.sizes.get(column.name))
                    parts.append(column.batch(column.places(rows, shown), out, cut=cut, times=times))
                self._follow(parts, len(rows), cuts)
                sent = Sent(parts)
        times.bytes = sum(part.nbytes for part in sent.parts)
        times.cold = job.cold or _disk_reads() > before + times.bytes // _SOME
        return Made(job, keyed, sent, times)

    def look(self, jobs: Sequence[Job]) -> None:
        """Have the disk read what these batches need, where it is not in memory yet."""
        for job in jobs:
            self._looks += 1
            if self._warm >= _ALIKE and self._looks % _ALIKE:
                continue
            rows, keyed = job.rows(self.dataset)
            shown, largest = self._shown(job, keyed), self._largest
            if largest.cold(largest.places(rows, shown), self._patch(largest, job, keyed), _LOOKED_AT):
                job.cold, self._warm = True, 0
                for column in self.columns:
                    column.advise(column.places(rows, shown), self._patch(column, job, keyed))
            else:
                self._warm += 1

    def _send(self, job: Job, rows: Rows, keyed: Rows, stage: Stage, times: Times) -> Sent:
        """Stored rows go to the device, where they are cut, if that takes more than a view, and become numbers."""
        resident = self.dataset._resident
        late = resident is not None or (self.augment is not None and self.augment.resized_crop is not None)
        cuts, shown = self._cuts(job, keyed), self._shown(job, keyed)
        raws: list[Tensor] = []
        split: dict[int, tuple[Rows, npt.NDArray[np.bool_]]] = {}
        for k, (column, memory, cut) in enumerate(zip(self.columns, self.memory, cuts, strict=True)):
            source, rest, now = column, column.places(rows, shown), cut if isinstance(cut, Patch) or not late else None
            if resident is not None and not column.text:
                source, rest = column.base, column.needed(rows)
                places, here = resident.split(rest)
                split[k] = column.places(places, shown), here
                rest = column.places(rest, shown)[~here]
                now = now[~here] if isinstance(now, Patch) else now
            stage.text = f"gathering {len(rest):,} rows of {column.field!r} for"
            out = source.empty(len(rest), memory, size=None if now is None else now.size, raw=True)
            raws.append(source.batch(rest, out, cut=now, raw=True, times=times))

        def finish(moved: list[Tensor]) -> list[Tensor]:
            done = []
            for k, (column, cut) in enumerate(zip(self.columns, cuts, strict=True)):
                raw = moved[k]
                if resident is not None and k in split:
                    patch = (cut, column.around) if isinstance(cut, Patch) and isinstance(column, VolumeColumn) else None
                    raw = column.shaped(resident.join(column.field, *split[k], raw, patch))
                if late and isinstance(cut, Cut) and isinstance(column, PixelColumn):
                    raw = column.cut(raw, cut)
                done.append(column.numbers(raw))
            self._follow(done, len(rows), cuts)
            return done

        assert self.mover is not None
        stage.text = f"copying to {self.device} "
        return self.mover.send(raws, finish, {k for k, column in enumerate(self.columns) if column.text})

    def _shown(self, job: Job, keyed: Rows) -> Rows | None:
        """The variants that a batch shows; None where there are none."""
        views = self.dataset._views
        return None if views is None else views.shown(job.seed, job.epoch, keyed)

    def _patch(self, column: Column, job: Job, keyed: Rows) -> Patch | None:
        """What alone is read of volumes; None for all else."""
        if self.augment is None or not isinstance(column, VolumeColumn):
            return None
        return self.augment.patch(job.seed, job.epoch, keyed, *column.spatial)

    def _cuts(self, job: Job, keyed: Rows) -> list[Cut | Patch | None]:
        """What is cut from each field: the same from all of one size."""
        drawn: dict[tuple[int, ...], Cut | Patch | None] = {}
        if self.augment is None:
            return [None] * len(self.columns)
        for column in self.columns:
            if column.name in self.sizes and column.spatial not in drawn:
                whole = isinstance(column, VolumeColumn)
                drawn[column.spatial] = self._patch(column, job, keyed) if whole else self.augment.draw(job.seed, job.epoch, keyed, *column.spatial)
        return [drawn[column.spatial] if column.name in self.sizes else None for column in self.columns]

    def _follow(self, parts: list[Tensor], n: int, cuts: list[Cut | Patch | None]) -> None:
        """Move what belongs to the pictures that were cut."""
        if self.dataset._spatial is not None:
            self.dataset._spatial.follow(parts, n, next((cut for cut in cuts if isinstance(cut, Cut)), None))


def _sizes(dataset: MMapShardDataset, augment: Augment) -> dict[str, tuple[int, ...]]:
    """The fields that are cut, and their size then.  Raises ValueError where what belongs to a picture could not all follow."""
    columns, spatial = dataset._columns, dataset._spatial
    pictures = {column.name: column.spatial for column in columns if isinstance(column, PixelColumn)}
    if not pictures:
        of_windows = any(isinstance(column.base, PixelColumn) for column in columns)
        said = "is for single images, not for windows of them" if of_windows else f"needs an image, the fields are {[c.name for c in columns]}"
        raise ValueError(f"{dataset.root}: augment {said}")
    check_together(str(dataset.root), augment, columns)
    flat = {name: (shape[0], shape[1]) for name, shape in pictures.items() if len(shape) == 2}
    main, size = next(((f"field {name!r}", shape) for name, shape in flat.items()), ("", (0, 0)))
    if spatial is not None:
        spatial.check("augment")
        if spatial.moves and spatial.size is not None:
            main, size = "the picture that boxes and keypoints belong to", spatial.size
    for name, shape in flat.items():
        if shape != size:
            raise ValueError(
                f"{dataset.root}: augment moves all pictures of a sample together, and field {name!r} is {shape[0]} x {shape[1]} (height x width) "
                f"where {main} is {size[0]} x {size[1]}; build them with one geometry, or leave one out with fields="
            )
    return {name: augment.size(*shape) for name, shape in pictures.items()}


def labelled(name: str) -> AbstractContextManager[Any]:
    """A range of torch.profiler's, "mmcompile.<name>"; nothing where none runs, as a range costs more than a small batch.

    Asked of the process: what a thread is told is False in all of them under `profile_all_threads`.
    """
    return record_function(f"mmcompile.{name}") if getattr(torch.autograd.profiler, "_is_profiler_enabled", True) else nullcontext()


def _disk_reads() -> int:
    """Bytes that this thread has had read from disks, pages that it had to wait for among them."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock * 512 + usage.ru_majflt * resource.getpagesize()
