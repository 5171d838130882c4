"""What a kind of picture is called: Pillow's modes where it has one, else one like Fx5, which is 5 channels of floats.

L is bytes, I;16 is 16 bits, I whole numbers and F floats.  A record of a sample holds 8 letters.
"""

from __future__ import annotations

import re

__all__ = ["CHANNELS", "MAX_CHANNELS", "channels_of", "named"]

#: Channels of each of Pillow's modes that `mode="keep"` can keep.
CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 1, "I": 1, "F": 1}
#: What fits in those letters.
MAX_CHANNELS = 999
_MANY = re.compile(r"(?:L|I;16|I|F)x([1-9][0-9]{0,2})")


def channels_of(mode: str) -> int | None:
    """Channels of a mode that can be kept; None for what is none."""
    many = _MANY.fullmatch(mode)
    return int(many[1]) if many else CHANNELS.get(mode)


def named(kind: str, channels: int, *, alpha: bool = False) -> str:
    """The mode of so many channels of a kind (L, I;16, I or F); `alpha`: the last is transparency."""
    if kind == "L" and (known := {(3, False): "RGB", (4, True): "RGBA", (2, True): "LA"}.get((channels, alpha))):
        return known
    return kind if channels == 1 else f"{kind}x{channels}"
