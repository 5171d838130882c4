"""Hides the arithmetic from stored values to the numbers of a sample, and how the CPU does it at the speed of its caches.

The numbers are those of ToTensor and Normalize bit for bit, whatever is stored: value = (x / scale - mean) / std, each step in float32, then rounded
once to float16 or bfloat16 where that is asked for.  Where float64 is asked for, each step is in float64.  The CPU's numbers are computed by numpy in
the calling thread alone: torch starts its own threads for an operation on more than 32,768 elements, and beside a busy machine their barrier costs
more than the work.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.format.index import Field

__all__ = ["FLOATS", "Numbers", "as_array", "scratch", "signed"]

Array = npt.NDArray[Any]

#: What `dtype=` may ask for, beside the dtype on disk.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Elements computed at a time: passes over 1 MiB of float32 stay in a core's second-level cache (2 MiB on machines of today).  Smaller blocks are no
#: faster for one thread, and worse for two, which then wait for each other's interpreter between calls.
_BLOCK = 1 << 18
#: torch computes up to 32,768 elements in the calling thread.
_SERIAL = 1 << 15
#: Planes and lines shorter than this are computed several at a time, with the constants of each channel repeated: a loop of numpy's costs some 20 ns.
_SHORT = 1 << 13
#: Planes of many channels are repeated for less: the constants must not fill the cache.
_TINY = 1 << 9
#: Scratch memory larger than this is not kept.
_KEPT = 16 << 20
#: Unsigned integers that torch only copies (on some devices), and what moves their bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_local = threading.local()


class Numbers:
    """The numbers that `dtype` asks of a field: `dtype` of the results, `given` when they are the stored values as they are.

    dtype None: the numbers in float32 (in the stored float dtype where floats are stored) if the field is to be scaled or normalised when read, else
    what is stored.
    """

    def __init__(self, field: Field, dtype: torch.dtype | None) -> None:
        self.stored: torch.dtype = getattr(torch, field.dtype)
        pending = field.normalize is not None or (self.stored.is_floating_point and field.scale != 1)
        if dtype is None:
            dtype = self.stored if self.stored.is_floating_point or not pending else torch.float32
        self.dtype: torch.dtype = dtype
        self.given = dtype == self.stored and not (pending and self.stored.is_floating_point)
        self._hwc = field.layout == "hwc"
        self._value = field.meaning == "value"
        #: Axes of a sample behind that of its channels.
        self._behind = 0 if self._value else max(2, len(field.sample_shape) - 1)
        self._work = torch.float64 if dtype == torch.float64 else torch.float32
        self._wide = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self._scale = None if field.scale == 1 else self._wide.type(field.scale)
        self._normalize = None if field.normalize is None else tuple(np.asarray(v, self._wide) for v in field.normalize)
        self._constants: dict[torch.device, tuple[Tensor, ...]] = {}
        self._tiled: dict[tuple[int, int], tuple[Array, ...]] = {}

    def of(self, raw: Tensor) -> Tensor:
        """The numbers of stored values, of images (…, C, H, W) or volumes, on any device, with the same bits on each.

        That is `raw` itself where they are given as stored.
        """
        if self.given:
            return raw
        work = torch.empty_like(raw, dtype=self._work).copy_(raw)
        scale, mean, std = self._on(raw.device)
        if self._scale is not None:
            work.div_(scale)
        if self._normalize is not None:
            work.sub_(mean).div_(std)
        return work.to(self.dtype)

    def fill(self, raw: Array, out: Array) -> None:
        """The numbers of stored rows into `out`, both C-contiguous (N, *row as it lies on disk); bfloat16 is uint16 in both."""
        with np.errstate(all="ignore"):  # a stored infinity or a value beyond float16 is what it is, as in torch
            for source, target, mean, std in self._blocks(raw, out):
                self._block(source, target, mean, std)

    def fill_rows(self, images: Array, at: npt.NDArray[np.int64], out: Array) -> None:
        """The numbers of images[at] into `out`, as `fill`, one by one: for rows so large that two of them are too much for the cache."""
        channels = 0 if self._normalize is None else self._normalize[0].size
        scale, usual = self._scale, channels and not self._hwc and not self._value and self.dtype == self._work and self.stored != torch.bfloat16
        if not usual or out[:1].size > _BLOCK or self._normalize is None or scale is None:
            for i, row in enumerate(at.tolist()):
                self.fill(images[row : row + 1], out[i : i + 1])
            return
        # The usual case, photographs: three calls of numpy's and as little as can be between them, as threads wait there for the interpreter.
        planes, target = (v.reshape(len(v), channels, -1) for v in (images, out))
        mean, std = (v[:, None] for v in self._normalize)
        work = scratch("numbers", out[:1].size * self._wide.itemsize).view(self._wide).reshape(target.shape[1:])
        with np.errstate(all="ignore"):
            for i, row in enumerate(at.tolist()):
                np.divide(planes[row], scale, out=work, dtype=self._wide, casting="unsafe")
                np.subtract(work, mean, out=work)
                np.divide(work, std, out=target[i])

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Scale, mean and std as tensors there: CUDA divides by a number of Python's by multiplying with its reciprocal, which rounds otherwise."""
        found = self._constants.get(device)
        if found is None:
            normalize = self._normalize or (np.zeros(1), np.ones(1))
            values = (np.asarray(1 if self._scale is None else self._scale).reshape(1), *normalize)
            with torch.inference_mode(False):  # they are kept
                found = tuple(torch.from_numpy(np.array(v)).to(device, self._work).view(-1, *(1,) * self._behind) for v in values)
            self._constants[device] = found
        return found

    def _blocks(self, raw: Array, out: Array) -> Any:
        """(source, target, mean, std) of parts that stay in the cache, where mean and std broadcast against the parts."""
        limit = _BLOCK
        if raw.size == 0:
            return
        if self._normalize is None or self._normalize[0].size == 1:
            mean, std = (None, None) if self._normalize is None else (v[0] for v in self._normalize)
            yield from ((s, t, mean, std) for s, t in _cut(raw.reshape(-1), out.reshape(-1), limit))
            return
        channels = self._normalize[0].size
        if self._value:
            yield from self._lines(raw.reshape(-1), out.reshape(-1), *self._normalize)
            return
        plane = raw[0].size // channels
        if not self._hwc and (plane >= _SHORT or (plane >= _TINY and channels * plane > _BLOCK)):
            planes, target = raw.reshape(-1, channels, plane), out.reshape(-1, channels, plane)
            if channels * plane <= limit:
                mean, std = (v[:, None] for v in self._normalize)
                yield from ((planes[rows], target[rows], mean, std) for rows in _ranges(len(planes), limit // (channels * plane)))
                return
            for image, into in zip(planes, target, strict=True):
                for c, (mean, std) in enumerate(zip(*self._normalize, strict=True)):
                    yield from ((s, t, mean, std) for s, t in _cut(image[c], into[c], limit))
            return
        length, (mean, std) = self._tile(raw.shape)
        runs, into = raw.reshape(-1, length), out.reshape(-1, length)
        for rows in _ranges(len(runs), limit // length):
            for part in _ranges(length, limit):
                yield runs[rows, part], into[rows, part], mean[part], std[part]

    def _lines(self, raw: Array, out: Array, means: Array, stds: Array) -> Any:
        """`_blocks` of rows of numbers each of which has its own mean and std, many rows at a time."""
        repeats = max(1, _SHORT // means.size)
        length = repeats * means.size
        if (repeats, length) not in self._tiled:
            self._tiled[repeats, length] = np.tile(means, repeats), np.tile(stds, repeats)
        mean, std = self._tiled[repeats, length]
        whole = len(raw) // length * length
        runs, into = raw[:whole].reshape(-1, length), out[:whole].reshape(-1, length)
        yield from ((runs[rows], into[rows], mean, std) for rows in _ranges(len(runs), _BLOCK // length))
        if whole < len(raw):
            yield raw[whole:], out[whole:], mean[: len(raw) - whole], std[: len(raw) - whole]

    def _tile(self, shape: tuple[int, ...]) -> tuple[int, tuple[Array, ...]]:
        """The length of a run of elements, as it lies on disk, and its means and stds."""
        assert self._normalize is not None
        repeats = 1
        if self._hwc:
            line = shape[2] * shape[3]
            lines = next((d for d in range(1, shape[1] + 1) if shape[1] % d == 0 and d * line >= _SHORT), shape[1])
            repeats, length = lines * shape[2], lines * line
        else:
            repeats, length = math.prod(shape[2:]), math.prod(shape[1:])
        found = self._tiled.get((repeats, length))
        if found is None:
            found = tuple(np.tile(v, repeats) if self._hwc else np.repeat(v, repeats) for v in self._normalize)
            self._tiled[repeats, length] = found
        return length, found

    def _block(self, source: Array, target: Array, mean: Any, std: Any) -> None:
        direct = self.dtype == self._work
        # Computed in memory that stays in the cache: only the last step touches that of the batch, which does not.
        work = scratch("numbers", source.size * self._wide.itemsize).view(self._wide).reshape(source.shape)
        last = target if direct else work
        if self.stored == torch.bfloat16:
            source = (source.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self._scale is None:
            np.copyto(work if mean is not None else last, source, casting="unsafe")
        else:  # the cast is part of the division
            np.divide(source, self._scale, out=work if mean is not None else last, dtype=self._wide, casting="unsafe")
        if mean is not None:
            np.subtract(work, mean, out=work)
            np.divide(work, std, out=last)
        if not direct:
            for values, into in _cut(work.reshape(-1), target.reshape(-1), _SERIAL):
                torch.from_numpy(into).view(self.dtype).copy_(torch.from_numpy(values))


def as_array(values: Tensor) -> Array:
    """The memory of a CPU tensor as an array of the same shape; bfloat16, which numpy lacks, as uint16."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


def signed(values: Tensor) -> Tensor:
    """A view of the same bits in a dtype that torch can index."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def scratch(name: str, nbytes: int) -> Array:
    """Memory of the calling thread, uint8 (nbytes,): each name is one piece, whose content lasts until the thread asks for it again."""
    if nbytes > _KEPT:
        return np.empty(nbytes, np.uint8)
    found: Array | None = getattr(_local, name, None)
    if found is None or found.nbytes < nbytes:
        found = np.empty(nbytes, np.uint8)
        setattr(_local, name, found)
    return found[:nbytes]


def _ranges(n: int, most: int) -> list[slice]:
    """[0, n) in equal parts of at most `most` (at least 1) each."""
    parts = -(-n // max(1, most))
    return [slice(n * k // parts, n * (k + 1) // parts) for k in range(parts)]


def _cut(raw: Array, out: Array, most: int) -> Any:
    return ((raw[part], out[part]) for part in _ranges(len(raw), most))
