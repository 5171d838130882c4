"""Hides how a rejected source is shown: found again under RAW by its name and bytes, and drawn as far as it still decodes.

Each is decoded in a process of its own kind, so that a file that crashes or hangs a decoder costs its picture and no report.  One that has changed
since is not what was rejected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import MMCompileError
from mmcompile.format.npy import hash_bytes
from mmcompile.format.rejects import Reject

__all__ = ["thumbnail", "thumbnails"]

Pixels = npt.NDArray[np.uint8]

#: Rejects that are tried, and the greatest file: enough to see what is wrong, and little time.
_MOST, _MOST_BYTES = 60, 64 << 20
#: Seconds for one of them, and for all.
_LIMIT_S, _ALL_S = 10.0, 60.0
#: The code of what ended the process that decoded it: it would again.
_CRASHED = "decoder-crash"
#: The longer side of a thumbnail, in pixels.
_SIDE = 160


def thumbnails(rejects: Sequence[Reject], raw: str | Path) -> dict[str, Pixels]:
    """key -> pixels (H, W, 3) of those of the first rejects that are found under `raw`, unchanged, and can be seen at all."""
    tried = [r for r in rejects[:_MOST] if r.code != _CRASHED and _found(r, Path(raw)) is not None]
    if not tried:
        return {}
    from mmcompile.compiler.engines import make_executor, result_within

    found: dict[str, Pixels] = {}
    until = time.monotonic() + _ALL_S
    executor = make_executor(1)
    try:
        for reject in tried:
            if (left := until - time.monotonic()) <= 0:
                break
            try:
                pixels = result_within(executor, executor.submit(thumbnail, reject, Path(raw)), min(left, _LIMIT_S))
            except (MMCompileError, MemoryError):  # its worker died, or was ended
                continue
            if pixels is not None:
                found[reject.key] = pixels
    finally:
        executor.shutdown()
    return found


def _found(reject: Reject, raw: Path) -> Path | None:
    """Where a reject lies, if its size is still the same; None for a name that leads out of RAW, as a stranger's dataset may have."""
    path = raw / reject.key
    if os.path.isabs(reject.key) or ".." in Path(reject.key).parts:
        return None
    try:
        size = os.path.getsize(path) if os.path.isfile(path) else -1
    except (OSError, ValueError):
        return None
    return path if 0 <= size <= _MOST_BYTES and reject.size in (None, size) else None


def thumbnail(reject: Reject, raw: Path) -> Pixels | None:
    """What can be seen of a reject; None where it is not there, is not what was rejected, or shows nothing.  MemoryError passes."""
    from mmcompile.compiler.decode import decode
    from mmcompile.compiler.preprocess import Preprocess

    path = _found(reject, raw)
    try:
        data = b"" if path is None else path.read_bytes()
    except OSError:
        return None
    if path is None or (reject.source_hash is not None and hash_bytes(data) != reject.source_hash):
        return None
    options: Any = Preprocess(resize=_SIDE, crop=_SIDE, truncated="accept", depth16="scale", resampler="pillow")
    try:
        return np.asarray(decode(data, reject.key, options).pixels, np.uint8)
    except MMCompileError:
        return None
