"""What a decoder does to its process, for tests: in a module of its own, so that a worker can import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from mmcompile.format.rejects import Reject


def thumbnail(reject: Reject, read: Callable[[], bytes]) -> Any:
    """Stands in for that of a report: one file crashes its decoder, one hangs, all others are black."""
    if reject.key == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if reject.key == "hang":
        signal.pause()
    return np.zeros((4, 4, 3), np.uint8)
