"""Hides how bytes come to be on a device: copied beside the computing, batch by batch, or resident there from the start.

The only home of torch.cuda, but for whether memory can be pinned.  Everything else works on tensors wherever they are, so the same code runs, and is
tested, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.runtime.buffers import pinned
from mmcompile.runtime.numbers import signed
from mmcompile.runtime.patch import Patch, apply
from mmcompile.runtime.selection import Selection

if TYPE_CHECKING:
    from mmcompile.runtime.dataset import MMapShardDataset

__all__ = ["Mover", "Resident", "Sent", "device_of", "free_bytes", "settle", "to_device"]

Rows = npt.NDArray[np.int64]
Memory = Callable[[int], Tensor]
Finish = Callable[[list[Tensor]], list[Tensor]]

#: Share of the free memory of a device that a dataset may take without being told so: the model, its gradients and activations want the rest.
_SHARE = 0.6
#: Bytes copied to a device at a time while a dataset is loaded.
_PIECE = 64 << 20


@dataclass
class Sent:
    """Tensors on their way: whole on the device once `ready` (an event of its stream) has passed; None where they are there already.

    Those numbered in `here` are not for the device.
    """

    parts: list[Tensor]
    ready: Any = None
    begun: Any = None
    here: Collection[int] = ()


@dataclass
class Mover:
    """Brings batches to a device.  `send` is called by any thread, `receive` by the one that computes; the copies of CUDA overlap its kernels."""

    device: torch.device
    _stream: Any = field(default=None, repr=False)
    _timed: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    _moved_s: float = 0.0

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> Memory | None:
        """Where batches that will be sent should be gathered; None: anywhere."""
        return pinned if self.device.type == "cuda" else None

    def send(self, parts: list[Tensor], finish: Finish, here: Collection[int] = ()) -> Sent:
        """Start the copies, and what `finish` does with them there; parts with numbers in `here` stay where they are."""
        if self._stream is None:
            return Sent(finish(self._copied(parts, here)))
        with torch.cuda.stream(self._stream):
            begun, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begun.record(self._stream)
            moved = finish(self._copied(parts, here))
            ready.record(self._stream)
        return Sent(moved, ready, begun, here)

    def _copied(self, parts: list[Tensor], here: Collection[int]) -> list[Tensor]:
        # torch keeps pinned memory until the copy has been made
        return [part if k in here else part.to(self.device, non_blocking=True) for k, part in enumerate(parts)]

    def receive(self, sent: Sent) -> list[Tensor]:
        """The tensors, for use on the current stream, which waits for them; this thread does not."""
        if sent.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.ready)
            for part in (part for k, part in enumerate(sent.parts) if k not in sent.here):
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
    """The stored rows of whole shards of a dataset, on a device: `store` has (rows, *shape) of each field, and `held` says which they are.

    Of a field with variants each is a row of its store.  `len()` is how many rows of the dataset there are, `count`.
    """

    def __init__(self, device: torch.device, store: dict[str, Tensor], held: Selection, count: int) -> None:
        self.device, self._store, self._held, self._count = device, store, held, count

    def __len__(self) -> int:
        return self._count

    def split(self, rows: Rows) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """(place in the store, is it there?) of rows of the dataset: int64 (N,), bool (N,)."""
        places = self._held.places(rows)
        return places, (places >= 0) & (places < len(self))

    def join(self, field: str, places: Rows, here: npt.NDArray[np.bool_], rest: Tensor, cut: tuple[Patch, Tensor] | None = None) -> Tensor:
        """Rows of a field on the device, the resident ones, and the others from `rest`, which holds them in order; of each the patch that is `cut`,
        with what lies beyond the rows."""
        store = signed(self._store[field])
        if cut is not None:
            patch, around = cut
            out = torch.empty((len(places), *rest.shape[1:]), dtype=store.dtype, device=self.device)
            out[self._at(np.flatnonzero(~here))] = signed(rest)
            apply(store, places, patch, out, np.flatnonzero(here), signed(around).to(self.device))
            return out.view(rest.dtype)
        if not len(places):
            return self._store[field][:0]
        if here.all():
            return _rows(store, self._at(places)).view(rest.dtype)
        out = torch.empty((len(places), *rest.shape[1:]), dtype=store.dtype, device=self.device, memory_format=_format(rest))
        out[self._at(np.flatnonzero(~here))] = signed(rest)
        if here.any():
            out[self._at(np.flatnonzero(here))] = _rows(store, self._at(places[here]))
        return out.view(rest.dtype)

    def parts(self, columns: list[Any], rows: Rows, shown: Rows | None) -> list[Tensor]:
        """A batch of the numbers of all columns, on the device; `shown` are the rows' variants."""
        out = []
        for column in columns:
            if column.text:
                out.append(column.batch(column.places(rows, shown)))
                continue
            needed = column.needed(rows)
            places, here = self.split(needed)
            rest = column.base.batch(column.places(needed, shown)[~here], raw=True)
            out.append(column.numbers(column.shaped(self.join(column.field, column.places(places, shown), here, rest.to(self.device)))))
        return out

    def _at(self, numbers: Rows) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(numbers))
        return found.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else found.to(self.device)


def device_of(device: str | torch.device) -> torch.device:
    """A device that is there.  Raises ValueError for what is none, RuntimeError for one that there is not."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be such as 'cpu', 'cuda' or 'cuda:0', not {device!r}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise RuntimeError(f"device {device!s}: this process sees {count} CUDA devices; pass another, or device='cpu'")
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
    elif found.type != "cpu":
        try:
            torch.empty(0, device=found)
        except Exception as error:  # each kind of device has its own
            said = str(error).partition("\n")[0].rstrip(".")
            raise RuntimeError(f"device {device!s}: this process cannot use it ({said}); pass another, or device='cpu'") from None
    return found


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def to_device(dataset: MMapShardDataset, device: torch.device, budget: int | None) -> Resident | None:
    """Bring as many shards of a dataset as fit to a device, in its order.

    On the CPU that is the page cache, which all processes of a host share (then None), where they stay, locked, as far as this user may lock memory.
    Raises MemoryError with the numbers where they don't fit, ValueError for a budget that is none.
    """
    held, columns = dataset._needed(), list({column.field: column.base for column in dataset._columns if not column.text}.values())
    if not columns:
        raise ValueError(f"{dataset.root}: text stays in the memory of the CPU, and no other field is in use: {[c.name for c in dataset._columns]}")
    width = sum(column.row_bytes * (column.views or 1) for column in columns)
    count = _fit(dataset.root, width, device, budget, held.blocks(dataset._reader.starts))
    if device.type == "cpu":
        for rows in held.ranges(count, width):
            for column in columns:
                dataset._reader.warm([column.field], rows, lambda: False, lambda nbytes: None)
                dataset._reader.lock(column.field, rows)
        return None
    store = {}
    for column in columns:
        like = column.empty(0, raw=True)
        views = column.views or 1
        memory = torch.empty((count * views, *like.shape[1:]), dtype=like.dtype, device=device, memory_format=_format(like))
        step = max(1, _PIECE // (column.row_bytes * views))
        for at in range(0, count, step):
            some = held.rows(np.arange(at, min(at + step, count)))[:, None] * views + np.arange(views)
            memory[at * views : (at + step) * views] = column.batch(some.reshape(-1), raw=True)
        store[column.field] = memory
    return Resident(device, store, held, count)


def _fit(root: Path | str, width: int, device: torch.device, budget: int | None, bounds: Rows) -> int:
    """How many rows of `width` bytes are to be resident, whole shards of them; `bounds` are the first rows of the shards, then their number."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise ValueError(f"budget is a number of bytes, at least 0, not {budget!r}")
    total = int(bounds[-1])
    need = width * total
    if budget is None:
        free = free_bytes(device)
        if need > _SHARE * free:
            raise MemoryError(
                f"{root}: {total:,} samples take {need:,} bytes, more than {_SHARE:.0%} of the {free:,} that are free on {device}; "
                f"pass budget={int(_SHARE * free)} to keep what fits there and stream the rest"
            )
        return total
    if device.type in ("cpu", "cuda") and min(budget, need) > (free := free_bytes(device)):
        raise MemoryError(f"{root}: a budget of {budget:,} bytes is more than the {free:,} that are free on {device}")
    return int(bounds[np.searchsorted(bounds, budget // width, side="right") - 1])


def _rows(store: Tensor, places: Tensor) -> Tensor:
    """Some rows of a store, which lie in memory as they do there."""
    if _format(store) == torch.channels_last:  # torch's index_select would lay them out anew
        return store.permute(0, 2, 3, 1).index_select(0, places).permute(0, 3, 1, 2)
    return store.index_select(0, places)


def _format(batch: Tensor) -> torch.memory_format:
    """How a batch's rows lie in memory."""
    hwc = batch.ndim == 4 and math.prod(batch.shape[1:]) > 0 and batch.stride(1) == 1 and batch.shape[1] > 1
    return torch.channels_last if hwc else torch.contiguous_format
