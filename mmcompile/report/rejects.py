"""Hides how a rejected source is shown: found again under RAW by its name and bytes, and drawn as far as it still decodes.

A file that crashed a decoder is not touched again, and one that has changed since is not what was rejected.  The only module here that decodes,
which needs Pillow; nothing of it is loaded where there is nothing to decode.
"""

from __future__ import annotations

import os
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
#: The code of what ended the process that decoded it.
_CRASHED = "decoder-crash"
#: The longer side of a thumbnail, in pixels.
_SIDE = 160


def thumbnails(rejects: Sequence[Reject], raw: str | Path) -> dict[str, Pixels]:
    """key -> pixels (H, W, 3) of those of the first rejects that are found under `raw`, unchanged, and can be seen at all."""
    found = {}
    for reject in rejects[:_MOST]:
        pixels = None if reject.code == _CRASHED else thumbnail(reject, Path(raw))
        if pixels is not None:
            found[reject.key] = pixels
    return found


def thumbnail(reject: Reject, raw: Path) -> Pixels | None:
    """What can be seen of a reject; None where it is not there, is not what was rejected, or shows nothing."""
    path = raw / reject.key
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_BYTES:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    if reject.source_hash is not None and hash_bytes(data) != reject.source_hash:
        return None
    from mmcompile.compiler.decode import decode
    from mmcompile.compiler.preprocess import Preprocess

    options: Any = Preprocess(resize=_SIDE, crop=_SIDE, truncated="accept", resampler="pillow")
    try:
        return np.asarray(decode(data, reject.key, options).pixels, np.uint8)
    except (MMCompileError, MemoryError):
        return None
