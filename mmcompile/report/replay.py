"""Hides how what training got of a sample in one epoch is made again: by the loader itself, over just these rows.

The only module here that needs torch; nothing of it is loaded where nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.errors import MMCompileError, OptionError
from mmcompile.format.index import Field
from mmcompile.report.opened import Opened

if TYPE_CHECKING:
    from mmcompile.runtime.augment import Augment

__all__ = ["Replay", "replayed"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Replay:
    """An epoch of a seed, and the augmentation there; without one the variant that a dataset built with several shows then."""

    seed: int
    epoch: int
    augment: Augment | None = None


def replayed(data: Opened, rows: Sequence[int], replay: Replay) -> dict[int, dict[str, Array]]:
    """row -> field -> values, as `Sample` has them, of these rows as that epoch has them.

    Raises OptionError for what this dataset cannot be augmented by, FormatError for what lies on disk.
    """
    from mmcompile.runtime.dataset import MMapShardDataset
    from mmcompile.runtime.loader import ShardLoader

    if replay.augment is None and not any(f.views for f in data.fields):
        raise OptionError(
            "--replay: nothing happens to these samples in an epoch; say what does, as in --augment crop=200,hflip=0.5", options=["replay", "augment"]
        )
    found: dict[int, dict[str, Array]] = {}
    try:
        dataset = MMapShardDataset(data.root, data.split.name, output="dict", generation=data.reader.generation)
        loader = ShardLoader(dataset.subset(list(rows)), batch_size=1, num_workers=0, seed=replay.seed, augment=replay.augment)
        loader.set_epoch(replay.epoch)
        for row, batch in zip(rows, loader, strict=True):
            found[row] = {f.name: _stored(batch[f.name], data.whole(f)) for f in data.fields}
    except MemoryError as error:  # a frame far wider than the pictures
        raise OptionError(f"--augment: takes more memory than there is ({error}); ask for less", options=["augment"]) from error
    except (ValueError, TypeError) as error:
        if isinstance(error, MMCompileError):
            raise
        raise OptionError(f"--augment: {error}", options=["augment"]) from error
    return found


def _stored(batch: Any, field: Field) -> Array:
    """The one sample of a batch, in units of what is stored."""
    if field.meaning == "text":
        return np.frombuffer(batch[0].encode(), np.uint8)
    values = batch[0]
    if values.is_floating_point() and values.dtype.itemsize == 2:
        values = values.float()
    found: Array = values.numpy()
    if field.normalize is None:
        return found
    axes = (-1,) + (1,) * (found.ndim - 1) if field.channels > 1 or field.meaning == "image" else (1,) * found.ndim
    mean, std = (np.reshape(v, axes) for v in field.normalize)
    return np.asarray((found * std + mean) * field.scale)
