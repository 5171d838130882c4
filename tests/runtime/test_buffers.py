from __future__ import annotations

import copy
import gc
import pickle
import signal
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.runtime.buffers import Pool
from tests.support import in_threads


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def test_memory_comes_back_and_is_lent_again() -> None:
    pool = Pool(2)
    first = pool.lend(10_000)
    where = address(first)
    assert (first.dtype, first.shape) == (torch.uint8, (10_000,))
    assert address(pool.lend(10_000)) != where
    del first
    assert address(pool.lend(9_000)) == where
    assert pool.lend(0).shape == (0,)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[3],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.numpy()[::2].T,
        lambda t: memoryview(t.numpy()),
        lambda t: torch.from_dlpack(t),
        lambda t: np.from_dlpack(t),
        lambda t: t.untyped_storage(),
        lambda t: t.view(torch.float32).requires_grad_() * 2,
        lambda t: torch.nn.Parameter(t.view(torch.float32)),
        lambda t: t.unbind(0)[7],
    ],
)
def test_whatever_views_it_keeps_it(view: Callable[[torch.Tensor], Any]) -> None:
    pool = Pool(4)
    lent = pool.lend(4096).view(64, 64)
    where, held = address(lent), view(lent)
    if getattr(held, "grad_fn", None) is not None:
        held = held.grad_fn
        kept = lent.view(torch.float32).detach()
        del lent
        assert address(kept) == where
        del kept
    else:
        del lent
        gc.collect()
        assert all(address(pool.lend(4096)) != where for _ in range(8))
    del held
    gc.collect()
    assert address(pool.lend(4096)) == where


def test_no_more_is_kept_than_may_be() -> None:
    pool = Pool(2)
    for lent in [pool.lend(1000) for _ in range(10)]:
        del lent
    held = [pool.lend(1000) for _ in range(6)]
    assert len(pool._free) == 0
    held.clear()
    pool.lend(1000)
    assert len(pool._free) <= 2
    assert len(pool._lent) <= 1
    pool.clear()
    assert not pool._free


def test_a_pool_that_is_gone_leaves_what_was_lent_alone() -> None:
    pool = Pool(2)
    lent = pool.lend(5000).fill_(7)
    del pool
    gc.collect()
    assert (lent == 7).all()


def test_copies_and_pickles_are_empty_pools() -> None:
    pool = Pool(3)
    lent = pool.lend(10)
    for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert not other._lent
        assert other._free.maxlen == 3
    assert len(lent) == 10


def test_threads_never_get_the_same_memory() -> None:
    pool, wrong = Pool(8), []

    def work(k: int) -> None:
        for _ in range(2000):
            lent = pool.lend(64).fill_(k)
            if not (lent == k).all():
                wrong.append(k)

    in_threads(work)
    assert not wrong


def test_an_interrupt_is_never_lost_in_what_runs_when_memory_comes_back() -> None:
    """A callback of Python's is where an interrupt that comes meanwhile would be printed and forgotten: none runs."""
    pool, before = Pool(2), len(weakref.finalize._registry)  # type: ignore[attr-defined]
    lent = [pool.lend(100) for _ in range(50)]
    assert len(weakref.finalize._registry) == before  # type: ignore[attr-defined]
    lent.clear()
    arrived = 0
    old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError()))
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    pool.lend(100)
            except InterruptedError:
                arrived += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert arrived == 200
