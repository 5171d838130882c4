"""Hides how bytes come to be on a device: copied beside the computing, batch by batch, or resident there from the start.

The only home of torch.cuda.  Everything else works on tensors wherever they are, so the same code runs, and is tested, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.runtime.buffers import pinned

if TYPE_CHECKING:
    from mmcompile.runtime.dataset import MMapShardDataset

__all__ = ["Mover", "Resident", "Sent", "free_bytes", "to_device"]

Rows = npt.NDArray[np.int64]
Memory = Callable[[int], Tensor]
Finish = Callable[[list[Tensor]], list[Tensor]]

#: Share of the free memory of a device that a dataset may take without being told so: the model, its gradients and activations want the rest.
_SHARE = 0.6
#: Bytes copied to a device at a time while a dataset is loaded.
_PIECE = 64 << 20


@dataclass
class Sent:
    """Tensors on their way: whole on the device once `ready` (an event of its stream) has passed; None where they are there already."""

    parts: list[Tensor]
    ready: Any = None
    begun: Any = None


@dataclass
class Mover:
    """Brings batches to a device.  `send` is called by any thread, `receive` by the one that computes; the copies of CUDA overlap its kernels."""

    device: torch.device
    _stream: Any = field(default=None, repr=False)
    _timed: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    _moved_s: float = 0.0

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)

    @property
    def memory(self) -> Memory | None:
        """Where batches that will be sent should be gathered; None: anywhere."""
        return pinned if self.device.type == "cuda" else None

    def send(self, parts: list[Tensor], finish: Finish) -> Sent:
        """Start the copies, and what `finish` does with them there."""
        if self._stream is None:
            return Sent(finish([part.to(self.device, non_blocking=True) for part in parts]))
        with torch.cuda.stream(self._stream):
            begun, ready = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(self._stream)
            moved = finish([part.to(self.device, non_blocking=True) for part in parts])  # torch keeps pinned memory until the copy has been made
            ready.record(self._stream)
        return Sent(moved, ready, begun)

    def receive(self, sent: Sent) -> list[Tensor]:
        """The tensors, for use on the current stream, which waits for them; this thread does not."""
        if sent.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.ready)
            for part in sent.parts:
                part.record_stream(current)  # or their memory could be used again while kernels of this stream still read it
            self._timed.append((sent.begun, sent.ready))
            while self._timed and self._timed[0][1].query():
                begun, ready = self._timed.pop(0)
                self._moved_s += begun.elapsed_time(ready) / 1000
        return sent.parts

    def moved_s(self) -> float:
        """Seconds that finished copies took on the device's stream."""
        return self._moved_s


class Resident:
    """The stored rows of whole shards of a dataset, on a device: `store[k]` is (rows, C, H, W), or (rows,), of column k."""

    def __init__(self, device: torch.device, store: list[Tensor], first: int, rows: Rows | None) -> None:
        self.device, self.store = device, store
        self._first, self._rows = first, rows
        self.samples = len(store[0]) if store else 0

    def split(self, rows: Rows) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """(place in the store, is it there?) of rows of the dataset: int64 (N,), bool (N,)."""
        if self._rows is None:
            places = rows - self._first
            return places, (places >= 0) & (places < self.samples)
        places = np.searchsorted(self._rows, rows).clip(0, max(0, len(self._rows) - 1))
        return places, (self._rows[places] == rows) if len(self._rows) else np.zeros(len(rows), np.bool_)

    def join(self, k: int, places: Rows, here: npt.NDArray[np.bool_], rest: Tensor) -> Tensor:
        """Column k of a batch on the device: the resident rows, and the others from `rest`, which holds them in order."""
        if not len(places):
            return self.store[k][:0]
        if here.all():
            return self.store[k].index_select(0, self._at(places))
        out = torch.empty((len(places), *rest.shape[1:]), dtype=rest.dtype, device=self.device, memory_format=_format(rest))
        out[self._at(np.flatnonzero(~here))] = rest
        if here.any():
            out[self._at(np.flatnonzero(here))] = self.store[k].index_select(0, self._at(places[here]))
        return out

    def _at(self, numbers: Rows) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(numbers))
        return found.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else found.to(self.device)


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free on a device.  Raises ValueError for a kind of device that does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        raise ValueError(f"{device}: its free memory cannot be asked for; pass budget= in bytes")
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:  # the limit of the control group, where this process has one of its own
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        free = min(free, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)


def fit(dataset: MMapShardDataset, device: torch.device, budget: int | None) -> int:
    """How many of the dataset's samples, in its order and by whole shards, are to be resident.  Raises MemoryError with the numbers."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise ValueError(f"budget is a number of bytes, at least 0, not {budget!r}")
    row = sum(column.row_bytes for column in dataset._columns)
    need = row * len(dataset)
    if budget is None:
        free = free_bytes(device)
        if need > _SHARE * free:
            raise MemoryError(
                f"{dataset.root}: {len(dataset):,} samples take {need:,} bytes, more than {_SHARE:.0%} of the {free:,} that are free on {device}; "
                f"pass budget={int(_SHARE * free)} to keep what fits there and stream the rest"
            )
        return len(dataset)
    if device.type in ("cpu", "cuda") and min(budget, need) > (free := free_bytes(device)):
        raise MemoryError(f"{dataset.root}: a budget of {budget:,} bytes is more than the {free:,} that are free on {device}")
    if need <= budget:
        return len(dataset)
    bounds = dataset.blocks()
    return int(bounds[np.searchsorted(bounds, budget // max(1, row), side="right") - 1])


def to_device(dataset: MMapShardDataset, device: torch.device, budget: int | None) -> Resident:
    """Load as many shards of a dataset as fit, in its order.  Raises MemoryError with the numbers."""
    count = fit(dataset, device, budget)
    ascending, first = dataset._span(count)
    store = [column.empty(0, raw=True).new_empty(0) for column in dataset._columns]
    for k, column in enumerate(dataset._columns):
        store[k] = _on(device, column.empty(0, raw=True), count)
        step = max(1, _PIECE // column.row_bytes)
        for at in range(0, count, step):
            rows = np.arange(first + at, first + min(at + step, count)) if ascending is None else ascending[at : at + step]
            store[k][at : at + step] = column.batch(rows, raw=True)
    return Resident(device, store, first, ascending)


def _on(device: torch.device, like: Tensor, rows: int) -> Tensor:
    """Memory on a device for rows such as those of `like` (N, …)."""
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=device, memory_format=_format(like))


def _format(batch: Tensor) -> torch.memory_format:
    """How a batch's rows lie in memory."""
    hwc = batch.ndim == 4 and math.prod(batch.shape[1:]) > 0 and batch.stride(1) == 1 and batch.shape[1] > 1
    return torch.channels_last if hwc else torch.contiguous_format
