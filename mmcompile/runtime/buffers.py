"""Hides where the memory of batches comes from: it is lent, and comes back by itself when the last view of it is gone.

A fresh page costs more than filling it, so a batch of memory that was used before is worth several times a new one.  What is watched is the
ndarray behind `torch.from_numpy`, not a tensor: the storage of every view, `.numpy()`, `.detach()`, DLPack capsule or graph of autograd holds that
ndarray, while the tensor that was handed out may be long gone.  When it goes, a `deque.append` is all that runs, as that may be anywhere, in the
garbage collector too.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Pool", "can_pin", "pinned"]

#: Buffers of one size class are exchanged freely: sizes are rounded up to a multiple of this, so that a last batch fits where others did.
_ROUND = 4096


class _Loan(weakref.ref["npt.NDArray[np.uint8]"]):
    """Watches an ndarray that was lent, and knows whose memory it views."""

    __slots__ = ("owner",)
    owner: npt.NDArray[np.uint8]


class Pool:
    """Recycled memory.  At most `spare` buffers that nobody uses are kept from one loan to the next; what is lent is bounded by its users alone.

    Thread-safe.  A copy of it, or a pickle, is an empty pool.
    """

    def __init__(self, spare: int) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=max(0, spare))
        self._back: deque[_Loan] = deque()
        self._lent: dict[int, _Loan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Pool, (self._free.maxlen or 0,)

    def lend(self, nbytes: int) -> Tensor:
        """`nbytes` bytes whose content is undefined: uint8 (nbytes,), yours until the last tensor or array that views them is gone."""
        owner = self._find(nbytes)
        lent = owner[:nbytes].view()  # an ndarray of its own for each loan
        # The callback is a function of C: in one of Python's, weakref.finalize's too, a Ctrl-C would be printed and lost.
        loan = _Loan(lent, cast(Any, self._back.append))
        loan.owner = owner
        self._lent[id(loan)] = loan
        return torch.from_numpy(lent)

    def clear(self) -> None:
        """Let go of all memory that is not lent."""
        self._take_back()
        self._free.clear()

    def _take_back(self) -> None:
        while self._back:
            try:
                loan = self._back.popleft()
            except IndexError:  # another thread was faster
                return
            self._lent.pop(id(loan), None)
            self._free.append(loan.owner)

    def _find(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self._take_back()
        wanted = max(1, -(-nbytes // _ROUND)) * _ROUND
        for _ in range(len(self._free)):
            try:
                owner = self._free.pop()  # the latest, of which a cache may hold most
            except IndexError:
                break
            if nbytes <= owner.nbytes <= 2 * wanted:
                return owner
            self._free.appendleft(owner)
        return np.empty(wanted, np.uint8)


def can_pin() -> bool:
    """Is there a device to pin memory for?"""
    return torch.cuda.is_available()


def pinned(nbytes: int) -> Tensor:
    """Page-locked memory, which a device can copy from while the CPU goes on: uint8 (nbytes,).  torch's own allocator recycles it."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
