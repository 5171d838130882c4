"""Hides what a normalisation is, and which numbers make none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmcompile.compiler.sizes import clash
from mmcompile.errors import OptionError, spelled
from mmcompile.text import counted

__all__ = ["IMAGENET", "IMAGENET_UNIT", "Normalize", "check_channels", "described", "is_number"]

#: (65535 - mean) / std stays finite in float32, of which 3.4e38 is the largest.
LEAST_STD = 1e-30


def is_number(value: object) -> bool:
    """Is this a finite number, and no truth value?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@spelled
@dataclass(frozen=True)
class Normalize:
    """`(value - mean) / std` for each channel, in float32 (float64 for float64 rows); `value` is what `scale` says.  `std` is positive."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values or not all(is_number(v) for v in values):
                raise OptionError(f"--{name} must be finite numbers, one for each channel, found {values!r}", options=[name])
            object.__setattr__(self, name, tuple(float(v) for v in values))
        if len(self.mean) != len(self.std):
            raise OptionError(
                f"--mean has {len(self.mean)} values and --std has {len(self.std)}: give one of each for every channel", options=["mean", "std"]
            )
        if min(self.std) < LEAST_STD:
            raise OptionError(f"--std must be at least {LEAST_STD} for every channel, or values become infinite; found {self.std}", options=["std"])


#: Mean and standard deviation that torchvision's ImageNet models were trained with.
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
#: Why these do not go with counts.
IMAGENET_UNIT = "imagenet's numbers are of values from 0 to 1: leave --scale out, or give --mean and --std of the counts"


def check_channels(normalize: Normalize, wanted: int, whose: str) -> None:
    """Raises OptionError where there is not one mean for each of so many channels; `whose`: what has these."""
    found = len(normalize.mean)
    if found == wanted:
        return
    grey = ": of grey pictures, and of volumes without channels, add --mode gray" if (found, wanted) == (1, 3) else ""
    clash("normalize", "mode", f"mean and std have {counted(found, 'values')}, {whose} {counted(wanted, 'channels')}{grey}")


def described(normalize: Mapping[str, Any]) -> Normalize:
    """What settings say of a normalisation.  Raises OptionError."""
    if set(normalize) != {"mean", "std"} or not all(isinstance(v, list | tuple) for v in normalize.values()):
        raise OptionError("settings of normalize must be lists named mean and std", options=["normalize"])
    return Normalize(tuple(normalize["mean"]), tuple(normalize["std"]))
