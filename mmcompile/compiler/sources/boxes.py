"""Hides what is wrong with boxes as a source writes them: whichever it is, a box that is none is refused in the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.sources.numbers import shown

__all__ = ["box_faults"]


def box_faults(boxes: npt.NDArray[Any], format: str) -> dict[int, str]:
    """What is wrong, by their place, with boxes (n, 4): corners not in order, a size below zero, a number that float32 cannot hold."""
    values = boxes.astype(np.float64)
    with np.errstate(over="ignore"):
        strange = set(np.flatnonzero((~np.isfinite(values.astype(np.float32))).any(1)).tolist())
    low, high = (values[:, :2], values[:, 2:]) if format == "xyxy" else (np.zeros_like(values[:, 2:]), values[:, 2:])
    swapped = f"its second corner before its first (format={format})" if format == "xyxy" else f"a negative size (format={format})"
    out: dict[int, str] = {}
    for at in sorted(strange.union(np.flatnonzero((high < low).any(1)).tolist())):
        out[at] = f"{shown(values[at].tolist())}: {'a number that is none, or beyond float32' if at in strange else swapped}"
    return out
