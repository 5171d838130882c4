"""Hides how a size is chosen when nobody typed one: look at the headers of up to 1,000 images, keep their size if it is one, else 256."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.engines import result_within
from mmcompile.compiler.options import typed
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.run import CRASHES
from mmcompile.compiler.task import Job, probe
from mmcompile.errors import EngineError, OptionError

__all__ = ["LOOKED_AT", "choose", "decide", "looked_at", "refuse_other"]

#: Headers looked at: those with the smallest key hash, so that the choice is even over the folder and depends on the keys alone.
LOOKED_AT = 1000
_CHUNK = 25
_SIDE = 256
_TRIES = 3


def looked_at(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The items whose headers a choice is made by, from the hashes (N,) of all keys."""
    return np.argsort(hashes, kind="stable")[:LOOKED_AT]


def choose(job: Job, executor: Executor, keys: Sequence[bytes], hashes: npt.NDArray[np.uint64]) -> tuple[Preprocess, str]:
    """The preprocess with its size (and with mode "keep" its mode) fixed as if typed, and a sentence that says what was chosen and why.

    Raises EngineError where no header could be looked at in time: what is chosen must not depend on how busy a machine is.
    """
    looked, late = _probe_all(job, executor, [keys[i] for i in looked_at(hashes).tolist()])
    found = [f for f in looked if f is not None]
    if late and not found:
        raise EngineError(
            f"{job.source.root}: of {late:,} images not even the headers could be read within {job.timeout_s:g} s each: run the same command again "
            "on a machine that is less busy, or say the size: --resize 256 --crop 256"
        )
    return decide(job.preprocess, found)


def decide(preprocess: Preprocess, found: Sequence[tuple[Any, ...]]) -> tuple[Preprocess, str]:
    """As `choose`, by the (width, height, mode) of the images that were looked at; of volumes (sides, channels) each."""
    if preprocess.kind == "volume":
        return _decide_volume(preprocess, found)
    said = []
    if preprocess.mode == "keep" and preprocess.kept_mode is None:
        modes = Counter(mode for _, _, mode in found)
        mode = min(modes, key=lambda m: (-modes[m], m)) if modes else "RGB"
        preprocess = replace(preprocess, kept_mode=mode)
        said.append(f"mode {mode} kept" + (f" ({modes[mode]} of {len(found)} looked at; others will be rejected)" if len(modes) > 1 else ""))
    if preprocess.needs_size():
        sizes = {(height, width) for width, height, _ in found}
        if len(sizes) == 1:
            height, width = sizes.pop()
            preprocess = preprocess.with_size(height, width)
            which = "the one image" if len(found) == 1 else f"all {len(found):,} images"
            said.append(f"{height}x{width} kept: the size (height x width) of {which} looked at")
        else:
            preprocess = replace(preprocess, resize=_SIDE, crop=_SIDE)
            if sizes:
                low, high = min(sizes, key=lambda s: s[0] * s[1]), max(sizes, key=lambda s: s[0] * s[1])
                why = f"{len(sizes):,} sizes from {low[0]}x{low[1]} to {high[0]}x{high[1]} among {len(found):,} images looked at"
            else:
                why = "no image could be looked at"
            said.append(f"short side to {_SIDE}, centre crop {_SIDE}: {why}; MMapShardDataset(out, crop=224) gives the usual evaluation crop")
    return preprocess, "; ".join(said)


def _decide_volume(preprocess: Preprocess, found: Sequence[Any]) -> tuple[Preprocess, str]:
    """Volumes keep their size and their channels where all are alike.  Raises OptionError where a size is needed and they differ."""
    said = []
    if preprocess.kept_channels is None:
        channels = Counter(count for _, count in found)
        most = min(channels, key=lambda n: (-channels[n], n)) if channels else 0
        preprocess = replace(preprocess, kept_channels=most)
        if len(channels) > 1:
            said.append(f"{most} channels kept ({channels[most]} of {len(found)} looked at; others will be rejected)")
    if preprocess.needs_size():
        sizes = sorted({shape for shape, _ in found}, key=lambda shape: (math.prod(shape), shape))
        if len(sizes) != 1:
            shown = [" x ".join(map(str, shape)) for shape in sizes]
            why = f"{len(sizes):,} sizes (depth x height x width) from {shown[0]} to {shown[-1]}" if sizes else "no volume could be looked at"
            raise OptionError(
                f"{why}: say with --crop DxHxW how much of the centre is taken, or with --pad DxHxW what all are filled up to",
                options=["crop", "pad"],
            )
        preprocess = preprocess.with_size(*sizes[0])
        which = "the one volume" if len(found) == 1 else f"all {len(found):,} volumes"
        said.append(f"{'x'.join(map(str, sizes[0]))} kept: the size (depth x height x width) of {which} looked at")
    return preprocess, "; ".join(said)


def refuse_other(out: Path, before: Mapping[str, Any] | None, asked: Preprocess, now: Preprocess, why: str) -> None:
    """A rebuild that nobody told a size must not silently choose another than the published one (settings `before`).  Raises OptionError."""
    try:
        old = Preprocess.from_settings(before or {})
    except (OptionError, KeyError, TypeError, ValueError):
        return
    if old.mode == now.mode == "keep" and asked.kept_mode is None and old.kept_mode != now.kept_mode:
        raise OptionError(
            f"{out}: published with pictures of mode {old.kept_mode}; for the images that are there now the choice would be "
            f"{now.kept_mode} ({why}). Take the strays out, or build into a new folder",
            before=old.kept_mode,
            now=now.kept_mode,
        )
    if before and asked.needs_size() and (old.resize, old.crop, old.pad, old.keep_size) != (now.resize, now.crop, now.pad, now.keep_size):
        raise OptionError(
            f"{out}: published with {typed(old)}; for the images that are there now the choice would be {typed(now)} ({why}). "
            f"Say which: add {typed(old)} to go on as before, or {typed(now)} to change",
            before=typed(old),
            now=typed(now),
        )


def _probe_all(job: Job, executor: Executor, keys: list[bytes]) -> tuple[list[tuple[Any, ...] | None], int]:
    """(what each header says, how many were not read in time)."""
    chunks = [keys[i : i + _CHUNK] for i in range(0, len(keys), _CHUNK)]
    futures = [executor.submit(probe, job, chunk) for chunk in chunks]
    out: list[tuple[Any, ...] | None] = []
    late = 0
    for chunk, future in zip(chunks, futures, strict=True):
        try:
            out += result_within(executor, future, job.timeout_s)
        except (EngineError, MemoryError):  # a header that kills its worker, or takes for ever: look at the others one by one
            for key in chunk:
                try:
                    out.append(_probe_alone(job, executor, key))
                except TimeoutError:
                    out.append(None)
                    late += 1
    return out, late


def _probe_alone(job: Job, executor: Executor, key: bytes) -> tuple[Any, ...] | None:
    """None for a header that crashes its worker.  Raises TimeoutError where it does not let it live in several tries: one death may be the machine's
    doing.
    """
    for _ in range(_TRIES):
        try:
            (found,) = result_within(executor, executor.submit(probe, job, [key]), job.timeout_s)
            return cast("tuple[Any, ...] | None", found)
        except EngineError as error:
            if error.details.get("exitcode") in CRASHES:
                return None
        except MemoryError:
            continue
    raise TimeoutError
