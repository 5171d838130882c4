"""Hides how sizes are written: one number for all sides, (height, width), or (depth, height, width) of a volume; and what is said of bad ones."""

from __future__ import annotations

from mmcompile.errors import OptionError

__all__ = ["MAX_SIDE", "check_side", "clash", "flag", "pair", "typed"]

#: Widest row or column that an option may ask for; a row of a shard must stay far below a shard.
MAX_SIDE = 65_535


def clash(first: str, second: str, remedy: str) -> None:
    """Raise the OptionError of two options that do not go together."""
    raise OptionError(f"{flag(first)} and {flag(second)} clash: {remedy}", options=[first, second])


def flag(name: str) -> str:
    """An option as one types it."""
    return "--" + name.replace("_", "-")


def pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """(height, width) of a size of one or two sides.  Raises OptionError for three, which volumes have."""
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise OptionError(f"{typed(size)}: three sides are for volumes, and these are pictures", options=["crop", "pad", "keep_size"])
    rows, columns = size
    return rows, columns


def typed(size: int | tuple[int, ...]) -> str:
    """A size as one types it."""
    return str(size) if isinstance(size, int) else "x".join(map(str, size))


def check_side(name: str, value: object, allowed: tuple[int, ...]) -> None:
    """Raises OptionError for what is no size of an allowed number of sides."""
    if value is None:
        return
    found = value if isinstance(value, tuple) else (value,)
    bare = not isinstance(value, tuple)
    counted = bare == (len(found) == 1) and len(found) in allowed
    if not counted or not all(isinstance(s, int) and not isinstance(s, bool) and 1 <= s <= MAX_SIDE for s in found):
        words = {1: "a whole number", 2: "(height, width)", 3: "(depth, height, width)"}
        form = " or ".join(words[n] for n in allowed)
        raise OptionError(f"{flag(name)} must be {form} from 1 to {MAX_SIDE}, found {value!r}", options=[name])
