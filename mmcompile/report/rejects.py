"""Hides how a rejected source is shown: found again in RAW by its name and bytes, and drawn as far as it still decodes.

Each is decoded in a process of its own kind, so that a file that crashes or hangs a decoder costs its picture and no report.  One that has changed
since is not what was rejected.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import DecodeError, MMCompileError
from mmcompile.format.index import Field
from mmcompile.format.npy import hash_bytes
from mmcompile.format.rejects import Reject
from mmcompile.report.show import look_of, pictures

__all__ = ["listed", "thumbnail", "thumbnails"]

Pixels = npt.NDArray[np.uint8]
Read = Callable[[], bytes]

#: Rejects that are tried, and the greatest file: enough to see what is wrong, and little time.
_MOST, _MOST_BYTES = 60, 64 << 20
#: Seconds for one of them, and for all, of which listing RAW is a part.
_LIMIT_S, _ALL_S = 10.0, 60.0
#: The code of what ended the process that decoded it: it would again.
_CRASHED = "decoder-crash"
#: Kinds of RAW whose items are no files, and options that decide what these are called; none that names a place, as settings may be a stranger's.
_LISTED, _OPTIONS = frozenset({"zip", "tar", "manifest", "coco"}), frozenset({"hidden", "image_column", "label_column", "columns"})
#: The longer side of a thumbnail, in pixels.
_SIDE = 160


def thumbnails(rejects: Sequence[Reject], raw: str | Path, settings: Mapping[str, Any]) -> dict[str, Pixels | str]:
    """key -> pixels (H, W, 3) of each reject, or why nothing of it is to be seen.

    raw: the folder or archive that they come from, or a list of them.  settings: those of the source, as the index has them (a stranger's, maybe).
    """
    from mmcompile.compiler.engines import make_executor, result_within

    found: dict[str, Pixels | str] = {r.key: f"only the first {_MOST} are tried" for r in rejects[_MOST:]}
    places: dict[str, Read] = {r.key: functools.partial(_bytes_of, path) for r in rejects[:_MOST] if (path := _file(r, Path(raw))) is not None}
    until = time.monotonic() + _ALL_S
    executor = make_executor(1)

    def run(limit: float, work: Callable[..., Any], *args: Any) -> Any:
        return result_within(executor, executor.submit(work, *args), min(until - time.monotonic(), limit))

    try:
        wanted = [r.key for r in rejects[:_MOST] if r.key not in places and r.size]
        if wanted and str(settings.get("kind")) in _LISTED:
            with suppress(MMCompileError, MemoryError, OSError, ValueError):  # RAW is no source of that kind, or listing it takes too long
                places |= run(_ALL_S, listed, str(raw), dict(settings), wanted)
        for reject in rejects[:_MOST]:
            why = _hidden(reject, places)
            if why is not None or time.monotonic() >= until:
                found[reject.key] = why or "no time was left for it"
                continue
            try:
                found[reject.key] = run(_LIMIT_S, thumbnail, reject, places[reject.key])
            except (MMCompileError, MemoryError):  # its worker died, or was ended
                found[reject.key] = "its decoder crashed, or took too long"
    finally:
        executor.shutdown()
    return found


def _hidden(reject: Reject, places: Mapping[str, Read]) -> str | None:
    """Why a reject is not tried; None for one that is."""
    if reject.code == _CRASHED:
        return "it crashes its decoder"
    if (reject.size or 0) > _MOST_BYTES:
        return "larger than 64 MiB"
    if reject.size == 0:
        return "it is empty"
    return None if reject.key in places else "not found in RAW"


def _file(reject: Reject, raw: Path) -> Path | None:
    """Where a reject lies as a file; None where it does not, and for a name that leads out of RAW, as a stranger's dataset may have."""
    if os.path.isabs(reject.key) or ".." in Path(reject.key).parts:
        return None
    try:
        return raw / reject.key if os.path.isfile(raw / reject.key) else None
    except (OSError, ValueError):
        return None


def _bytes_of(path: Path) -> bytes:
    """The content of a file; of one that is larger than any that is shown its beginning, which is told by its size."""
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def listed(raw: str, settings: dict[str, Any], keys: Iterable[str]) -> dict[str, Read]:
    """How to read those of `keys` that lie in an archive, or in a list: RAW is listed for them as a build does."""
    from mmcompile.compiler.sources.choose import SourceOptions, open_source

    source: Any = open_source([raw], SourceOptions(source=settings["kind"], **{k: v for k, v in settings.items() if k in _OPTIONS and v}))
    wanted = {os.fsencode(key): key for key in keys}
    return {wanted[bytes(key)]: functools.partial(source.read, key) for key in source.scan().keys if bytes(key) in wanted}


def thumbnail(reject: Reject, read: Read) -> Pixels | str:
    """What can be seen of a reject, or why nothing.  MemoryError passes."""
    from mmcompile.compiler.decode import decode
    from mmcompile.compiler.preprocess import Preprocess

    try:
        data = read()
    except OSError:
        return "it cannot be read"
    if (reject.size is not None and len(data) != reject.size) or (reject.source_hash is not None and hash_bytes(data) != reject.source_hash):
        return "it has changed since"
    options = Preprocess(resize=_SIDE, crop=_SIDE, truncated="accept", dtype="float32", resampler="pillow")
    try:
        made = decode(data, reject.key, options)
    except DecodeError:
        return "nothing of it decodes"
    if made.depth == 8:
        return np.asarray(made.pixels, np.uint8)
    values = np.moveaxis(made.pixels, -1, 0)
    field = Field("image", values.dtype.name, values.shape, "image", "chw")
    return pictures(values, field, look_of(field, None, [values]))[0][1]
