"""Stored values times a slope plus an intercept, as medical formats say them: whole numbers stay whole where both are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["scaled", "scaled_dtype"]

_Pixels = npt.NDArray[Any]


def scaled_dtype(dtype: np.dtype[Any], slope: float, intercept: float) -> np.dtype[Any]:
    """What `scaled` gives: as it is, int32 or int64, or float64."""
    if slope == 1 and intercept == 0:
        return dtype.newbyteorder("=")
    if dtype.kind == "f" or dtype.itemsize > 4 or slope != int(slope) or intercept != int(intercept):
        return np.dtype(np.float64)
    limits = np.iinfo(dtype)
    largest = max(abs(int(slope)) * max(-int(limits.min), int(limits.max)) + abs(int(intercept)), 0)
    return np.dtype(np.int32) if largest < 1 << 31 else np.dtype(np.int64) if largest < 1 << 63 else np.dtype(np.float64)


def scaled(values: _Pixels, slope: float, intercept: float) -> _Pixels:
    """`values * slope + intercept`."""
    target = scaled_dtype(values.dtype, slope, intercept)
    if slope == 1 and intercept == 0:
        return values
    made: _Pixels = values.astype(target)
    made *= target.type(slope)
    made += target.type(intercept)
    return made
