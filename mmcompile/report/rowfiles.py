"""Hides how rows become PNG files: a file for each picture of a row, one row in memory at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmcompile.errors import OptionError
from mmcompile.report import png
from mmcompile.report.gallery import Gallery
from mmcompile.report.opened import Opened
from mmcompile.report.place import check_replaceable, save
from mmcompile.report.replay import Replay, replayed

__all__ = ["save_rows"]

#: Rows that decide how all of them are shown.
_LOOKED_AT = 24


def save_rows(data: Opened, folder: Path, rows: npt.NDArray[np.int64], replay: Replay | None) -> tuple[list[Path], int]:
    """Write row-3.png, or row-3-NAME.png where a sample has several pictures, of each of these rows; returns the files and their bytes in all.

    A file of ours is replaced; OptionError for any other that is there, and for samples without a picture.
    """
    gallery = Gallery(data, data.samples(rows[:_LOOKED_AT]), exact=True)
    again = {} if replay is None else replayed(data, rows.tolist(), replay)
    files: list[Path] = []
    total = 0
    for sample in data.samples(rows):
        named = []
        for k, values in enumerate(sample.variants):
            variant = f"-variant-{k}" if len(sample.variants) > 1 else ""
            named += [(f"{panel.name}{variant}", panel.pixels) for panel in gallery.panels(values)]
        if sample.row in again and replay is not None:
            named += [(f"{panel.name}-seed-{replay.seed}-epoch-{replay.epoch}", panel.pixels) for panel in gallery.panels(again[sample.row])]
        if not named:
            raise OptionError(f"-o {folder}: these rows hold no picture; name a file, as in -o report.html, for a page", options=["output"])
        for name, pixels in named:
            what = f"row-{sample.row}" if len(named) == 1 else f"row-{sample.row}-{name.replace(' ', '-')}"
            content = png.encode(pixels)
            check_replaceable(folder / f"{what}.png", png.SOFTWARE)
            save(folder / f"{what}.png", content)
            files.append(folder / f"{what}.png")
            total += len(content)
    return files, total
