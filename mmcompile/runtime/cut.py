"""Hides how a box is cut from an image, mirrored and scaled: row by row in the memory of the CPU, or a whole batch at once on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.runtime.numbers import as_array, scratch, signed

__all__ = ["Cut", "apply", "cut_rows"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: Pixels of so many bytes are moved as one number.
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
#: Cuts of at most so many bytes are made many at a time: what Python does for one costs as much as copying this.
_SMALL = 1 << 14
#: Bytes of them at a time.
_PIECE = 1 << 18


@dataclass(frozen=True, eq=False)
class Cut:
    """What is cut from each of N images: the box [top, top + height) x [left, left + width), scaled to `size` (h, w), then mirrored where `flip`.

    int64 (N,), and bool (N,) for `flip`.  A box as large as `size` is not scaled, and what of it lies beyond the image is 0; a box that is scaled
    lies within the image.  `cut[a:b]` is that of a part of the images.
    """

    top: Rows
    left: Rows
    height: Rows
    width: Rows
    flip: npt.NDArray[np.bool_]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, part: slice) -> Cut:
        return Cut(self.top[part], self.left[part], self.height[part], self.width[part], self.flip[part], self.size)

    @property
    def scales(self) -> bool:
        """Is any box of another size than what is made of it?"""
        return bool(((self.height != self.size[0]) | (self.width != self.size[1])).any())

    def leaves(self, height: int, width: int) -> bool:
        """Does any box lie partly beyond images of this size?"""
        below, behind = self.top + self.height > height, self.left + self.width > width
        return bool(((self.top < 0) | (self.left < 0) | below | behind).any())


def cut_rows(images: Array, at: Rows, cut: Cut, out: Array, stored: torch.dtype, hwc: bool, ids: int | None = None) -> None:
    """The cuts of images[at] into `out`, C-contiguous, both as rows lie on disk: (N, H, W, C) or (N, C, H, W), bfloat16 as uint16.

    `ids` says that these are class ids, chw: scaled ones are those of the nearest pixels, and beyond the image lies this one.  Scaled 8-bit
    values are those of torchvision's antialiased resize; others are computed in float32 (in float64 where they have more than 24 bits) and rounded
    once, half to even.  All is done by the calling thread, but for scaled images that are not of 8 bits in 1 to 4 channels: torch scales those
    with its own threads.
    """
    if out[:1].nbytes <= _SMALL and not cut.scales:
        step = max(1, _PIECE // max(1, images[:1].nbytes))
        for i in range(0, len(at), step):
            _cut_small(images[at[i : i + step]], cut[i : i + step], out[i : i + step], 1 if hwc else 2, ids or 0)
        return
    height, width = images.shape[1:3] if hwc else images.shape[2:]
    if len(out) and not hwc and out.itemsize == 1 and out[:1].nbytes % 8 == 0 and not cut.scales and not cut.leaves(height, width):
        _cut_bytes(images, at, cut, out)
        return
    boxes = zip(*(v.tolist() for v in (at, cut.top, cut.left, cut.height, cut.width, cut.flip)), strict=True)
    for target, (row, top, left, tall, wide, flip) in zip(out, boxes, strict=True):
        y, x = _inside(top, tall, height), _inside(left, wide, width)
        box = images[row, y, x] if hwc else images[row, :, y, x]
        if (tall, wide) != cut.size:
            box = _scaled(box, cut.size, stored, hwc) if ids is None else _nearest(box, cut.size)
        elif (y.stop - y.start, x.stop - x.start) != cut.size:
            framed = _blank(target.shape, target.dtype, ids or 0)
            part = slice(y.start - top, y.stop - top), slice(x.start - left, x.stop - left)
            framed[part if hwc else (slice(None), *part)] = box
            box = framed
        if flip:
            _mirror(box, target, hwc)
        else:
            target[...] = box


def _cut_bytes(images: Array, at: Rows, cut: Cut, out: Array) -> None:
    """The usual case, boxes of bytes (N, C, H, W): one call of numpy's a row, or two, so that threads wait little for each other's interpreter.

    A mirrored box comes with its channels and lines in reversed order, and is then turned round as `_turn` does.
    """
    h, w = cut.size
    words = out.view(np.uint8).reshape(len(out), -1).view("<u8")
    memory = scratch("turned", out[:1].nbytes)
    turned, backwards = memory.view(out.dtype).reshape(out.shape[1:]), memory.view(">u8")[::-1]
    for i, (row, y, x, flip) in enumerate(zip(at.tolist(), cut.top.tolist(), cut.left.tolist(), cut.flip.tolist(), strict=True)):
        box = images[row, :, y : y + h, x : x + w]
        if flip:
            turned[...] = box[::-1, ::-1]
            words[i] = backwards
        else:
            out[i] = box


def apply(raw: Tensor, cut: Cut, ids: int | None = None) -> Tensor:
    """The cuts of stored images (N, C, H, W) on one device, there: (N, C, h, w), channels_last where the images are.

    The values of the CPU's row by row path; where a box is scaled, integers are within one of them, floats within their rounding.  `ids`: as of
    `cut_rows`, and the same class ids.
    """
    (h, w), device, (height, width) = cut.size, raw.device, raw.shape[2:]
    top, left, tall, wide, flip = (torch.from_numpy(v).to(device)[:, None] for v in (cut.top, cut.left, cut.height, cut.width, cut.flip))
    if cut.scales and ids is None:
        down = _weights(top, tall, torch.zeros_like(flip), h, height, _precise(raw.dtype))
        return _scaled_batch(raw, down, _weights(left, wide, flip, w, width, _precise(raw.dtype)))
    y, x = torch.arange(h, device=device), torch.arange(w, device=device)
    x = torch.where(flip, w - 1 - x, x)
    if cut.scales:
        y, x = (2 * y + 1) * tall // (2 * h), (2 * x + 1) * wide // (2 * w)
    y, x = top + y, left + x
    down, across = y.clamp(0, height - 1), x.clamp(0, width - 1)
    bits = signed(raw)
    n = torch.arange(len(raw), device=device)
    if _is_hwc(raw):
        out = bits.permute(0, 2, 3, 1)[n[:, None, None], down[:, :, None], across[:, None]].permute(0, 3, 1, 2)
    else:
        c = torch.arange(raw.shape[1], device=device)[:, None, None]
        out = bits[n[:, None, None, None], c, down[:, None, :, None], across[:, None, None]]
    if cut.leaves(height, width):
        beyond = int(signed(torch.tensor(ids or 0, dtype=raw.dtype, device="cpu")))
        out = out.masked_fill(((y != down)[:, :, None] | (x != across)[:, None])[:, None], beyond)
    return out.view(raw.dtype)


def _cut_small(images: Array, cut: Cut, out: Array, axis: int, fill: int) -> None:
    """The unscaled cuts of small images, one call of numpy's for all of them; `axis` is that of their height, `fill` what lies beyond them."""
    (h, w), (height, width) = cut.size, images.shape[axis : axis + 2]
    above, before = max(0, -int(cut.top.min())), max(0, -int(cut.left.min()))
    below, behind = max(0, int(cut.top.max()) + h - height), max(0, int(cut.left.max()) + w - width)
    if above or before or below or behind:
        shape = [*images.shape]
        shape[axis], shape[axis + 1] = above + height + below, before + width + behind
        framed = _blank(shape, images.dtype, fill)
        framed[(*(slice(None),) * axis, slice(above, above + height), slice(before, before + width))] = images
        images = framed
    windows = np.lib.stride_tricks.sliding_window_view(images, (h, w), (axis, axis + 1))
    n, top, left = np.arange(len(images)), cut.top + above, cut.left + before
    out[...] = windows[n, :, top, left] if axis == 2 else windows.transpose(0, 1, 2, 4, 5, 3)[n, top, left]
    flipped = np.flatnonzero(cut.flip)
    out[flipped] = np.flip(out[flipped], axis + 1)


def _blank(shape: Sequence[int], dtype: np.dtype[Any], fill: int) -> Array:
    return np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)


def _nearest(box: Array, size: tuple[int, int]) -> Array:
    """`box` (1, tall, wide) scaled to `size`: each pixel is the one that its middle falls into, computed in integers."""
    down, across = ((2 * np.arange(made) + 1) * pixels // (2 * made) for made, pixels in zip(size, box.shape[1:], strict=True))
    scaled: Array = box.take(down, 1).take(across, 2)
    return scaled


def _inside(start: int, size: int, end: int) -> slice:
    first = min(max(start, 0), end)
    return slice(first, max(first, min(start + size, end)))


def _mirror(box: Array, out: Array, hwc: bool) -> None:
    """`box`, mirrored, into `out`, which is contiguous."""
    pixel = out.itemsize * (out.shape[2] if hwc else 1)
    if pixel in (1, 3):
        _turn(box[::-1] if hwc else box[::-1, ::-1], out.view(np.uint8), pixel)
    elif hwc and (word := _WORDS.get(pixel)) is not None:
        out.view(word)[...] = box.view(word)[:, ::-1]
    elif hwc:
        for c in range(out.shape[2]):
            out[:, :, c] = box[:, ::-1, c]
    else:
        out[...] = box[:, :, ::-1]


def _turn(box: Array, out: Array, pixel: int) -> None:
    """The pixels (of 1 or 3 bytes) of `box` in reversed order into `out`: an image whose lines come in reversed order is mirrored line by line.

    numpy walks backwards one element at a time.  Bytes are turned round three times as fast, 8 at a time, by copying them from big-endian numbers.
    """
    size, flat = out.size, out.reshape(-1)
    words = -(-size // 8)
    memory = scratch("turned", 16 * words).reshape(2, 8 * words)
    memory[0, :size].reshape(box.shape)[...] = box.view(np.uint8)
    backwards = memory[0].view(">u8")[::-1]
    if pixel == 1 and size == 8 * words:
        flat.view("<u8")[...] = backwards
        return
    memory[1].view("<u8")[...] = backwards
    turned = memory[1, 8 * words - size :]
    if pixel == 3:
        # The first and the third byte of each pixel change places: `a ^ b`, kept where the first ones are, turns each of them into the other.
        other = memory[0, : size - 2]
        np.bitwise_xor(turned[:-2], turned[2:], out=other)
        np.bitwise_and(other, _first_bytes(size)[:-2], out=other)
        np.bitwise_xor(turned[:-2], other, out=turned[:-2])
        np.bitwise_xor(turned[2:], other, out=turned[2:])
    flat[...] = turned


@lru_cache(8)
def _first_bytes(size: int) -> Array:
    """All bits of the first byte of each pixel of 3 bytes."""
    out = np.zeros(size, np.uint8)
    out[::3] = 255
    return out


def _scaled(box: Array, size: tuple[int, int], stored: torch.dtype, hwc: bool) -> Array:
    """`box` scaled to `size`, both as they lie on disk."""
    lent = scratch("box", box.nbytes).view(box.dtype).reshape(1, *box.shape)
    lent[0] = box  # torch wants memory that it may write to, and is faster where it is contiguous (whole: its strides tell torch the layout)
    image = torch.from_numpy(lent).view(stored)
    image = image.permute(0, 3, 1, 2) if hwc else image
    values = image if stored == torch.uint8 else image.to(_precise(stored))
    values = torch.nn.functional.interpolate(values, size=size, mode="bilinear", antialias=True)
    made = _narrowed(values, stored)[0]
    return as_array(made.permute(1, 2, 0) if hwc else made)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The float dtype that holds more than the values of a dtype."""
    return torch.float64 if dtype.itemsize > 4 or (dtype.itemsize == 4 and not dtype.is_floating_point) else torch.float32


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else (values if dtype.is_floating_point else values.round()).to(dtype)


def _scaled_batch(raw: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """raw (N, C, H, W) by the weights (N, h, H) and (N, w, W): two matrix products, the first rounded too where torch's 8-bit kernel rounds."""
    values = raw.to(down.dtype)
    rounded = raw.dtype == torch.uint8
    if _is_hwc(raw):
        lines = across[:, None] @ values.permute(0, 2, 3, 1)  # (N, H, w, C)
        made = down @ (lines.round_() if rounded else lines).flatten(2)
        return _narrowed(made, raw.dtype).view(len(raw), down.shape[1], -1, raw.shape[1]).permute(0, 3, 1, 2)
    lines = values @ across[:, None].mT  # (N, C, H, w)
    return _narrowed(down[:, None] @ (lines.round_() if rounded else lines), raw.dtype)


def _weights(start: Tensor, size: Tensor, flip: Tensor, made: int, pixels: int, dtype: torch.dtype) -> Tensor:
    """How much of each pixel along an axis goes into each that is made of the boxes [start, start + size): (N, made, pixels).

    The triangle of an antialiased bilinear resize: it reaches as far as a pixel of the coarser image, and its weights sum to 1.
    """
    scale = size.to(dtype) / made
    place = torch.arange(made, device=start.device)
    centre = start + scale * (torch.where(flip, made - 1 - place, place) + 0.5)
    pixel = torch.arange(pixels, device=start.device)
    far = (pixel + 0.5 - centre[:, :, None]).abs_().div_(scale.clamp(min=1)[:, :, None])
    weights = (1 - far).clamp_(min=0).mul_(((pixel >= start) & (pixel < start + size))[:, None])
    return weights.div_(weights.sum(2, keepdim=True))


def _is_hwc(raw: Tensor) -> bool:
    return raw.is_contiguous(memory_format=torch.channels_last) and not raw.is_contiguous()
