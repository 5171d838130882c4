"""Hides how a static step of the user's own is found and called: an array in, an array out, and what comes out held against what was declared.

The step runs where decoding runs, after geometry and before the cast.  It is a setting by its name and the version that the user gives: its code is
not looked at, so a changed step needs another version.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError, OptionError

__all__ = ["find", "transformed"]

Array = npt.NDArray[Any]


@functools.cache
def find(name: str) -> Callable[[Array], Array]:
    """The function `package.module:function`.  Raises OptionError where there is none."""
    module, _, function = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing runs code of the user's, which may raise anything
        raise OptionError(
            f"--transform {name}: cannot be imported ({type(error).__name__}: {error}); give package.module:function of an installed package, or of "
            "a module in the folder where you call mmcompile",
            options=["transform"],
        ) from None
    if not callable(found):
        raise OptionError(f"--transform {name}: {function} is {type(found).__name__}, no function", options=["transform"])
    return found  # type: ignore[no-any-return]


def _told(name: str, error: BaseException) -> str:
    """What a step raised and where, on a line: rejects hold no text of others, and nobody mends a step without it."""
    said = (str(error).splitlines() or [""])[0][:200].encode("unicode_escape").decode("ascii")
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"--transform {name}: {type(error).__name__}{said and f': {said}'} ({os.path.basename(at.filename)} line {at.lineno})"


def transformed(pixels: Array, depth: int, preprocess: Preprocess) -> tuple[Array, int]:
    """(pixels, depth) after the user's step; `pixels` (H, W, C), of a volume (D, H, W) or (C, D, H, W), is a copy that the step may write to.

    The step gives pixels of the same dtype, in the same units, or float32, which are taken as they are (depth 0).  Raises DecodeError where it
    raises, OptionError where its result is not what was declared: every other picture would end like that.
    """
    name = str(preprocess.transform)
    try:
        made = find(name)(np.array(pixels))
    except (MemoryError, OptionError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit() in a step ends no worker
        raise DecodeError(
            f"--transform {name} raised {type(error).__name__} on this picture",
            stage="transform",
            code="transform-raised",
            error=type(error).__name__,
            told=_told(name, error),
        ) from error
    if is_volume := preprocess.kind == "volume":
        wanted = preprocess.sample_shape()
    else:
        channels, height, width = preprocess.sample_shape()
        wanted = (height, width, channels)
    dtypes = list(dict.fromkeys((pixels.dtype.name, "float32")))
    if not isinstance(made, np.ndarray) or made.shape != wanted or made.dtype.name not in dtypes:
        found = f"{made.dtype} {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
        raise OptionError(
            f"--transform {name} gave {found}; expected an array of {' or '.join(dtypes)}, {wanted} "
            f"({'depth, height, width' if is_volume else 'height, width, channels'}): mend it, or declare the shape with --transform-shape "
            f"{'DxHxW' if is_volume else 'HxWxC'}",
            options=["transform", "transform_shape"],
        )
    if made.dtype != pixels.dtype and np.dtype(preprocess.stored_dtype()).kind in "iu" and preprocess.dtype != "bfloat16":
        raise OptionError(
            f"--transform {name} gave {made.dtype}, and --dtype {preprocess.dtype} holds whole numbers: add --dtype float32, or give {pixels.dtype}",
            options=["transform", "dtype"],
        )
    return made, depth if made.dtype == pixels.dtype else 0
