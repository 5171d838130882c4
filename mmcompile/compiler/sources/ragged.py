"""Hides how lists that differ in length from item to item become arrays of one shape: padded behind, with a field that says how many rows are filled.

Pure numpy.  Lists that go together (boxes and their labels) share that count, and are cut together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.fieldoptions import FieldOptions
from mmcompile.errors import SourceError
from mmcompile.format.fields import Field

__all__ = ["Ragged", "laid_out", "padded"]

Array = npt.NDArray[Any]
#: Items that are padded at one time.
_CHUNK = 1 << 12


@dataclass(frozen=True)
class Ragged:
    """The lists of N items: `values` (M, *shape) of all of them, one behind the other, `lengths` (N,); `spec` is the field of one row of a list."""

    spec: Field
    values: Array
    lengths: npt.NDArray[np.int64]
    options: FieldOptions = field(default_factory=FieldOptions)

    def at(self, items: npt.NDArray[np.bool_]) -> Ragged:
        """The lists of these items (N,) alone."""
        return replace(self, values=self.values[np.repeat(items, self.lengths)], lengths=self.lengths[items])

    def without(self, items: Sequence[int]) -> Ragged:
        """The same with empty lists there."""
        if not items:
            return self
        stay = np.ones(len(self.lengths), bool)
        stay[items] = False
        return replace(self, values=self.values[np.repeat(stay, self.lengths)], lengths=np.where(stay, self.lengths, 0))


def padded(values: Array, lengths: npt.NDArray[np.int64], most: int, fill: int = 0) -> Array:
    """The lists (M, *shape) of N items, with `fill` behind: (N, most, *shape); those that are longer are cut."""
    out = np.full((len(lengths), most, *values.shape[1:]), fill, values.dtype)
    starts = np.cumsum(lengths) - lengths
    for at in range(0, len(lengths), _CHUNK):
        some = lengths[at : at + _CHUNK]
        part = values[starts[at] :][: int(some.sum())]
        place = np.arange(len(part)) - np.repeat(np.cumsum(some) - some, some)
        kept = place < most
        out[np.repeat(np.arange(at, at + len(some)), some)[kept], place[kept]] = part[kept]
    return out


def laid_out(group: Sequence[Ragged], where: Callable[[int], str], counts: dict[str, int]) -> list[tuple[Field, Array]]:
    """The fields of lists that go together, and the one of their count, each with its values (N, …); what is cut off is told in `counts`.

    Raises SourceError for a list that is longer than was said, unless that is to be cut.
    """
    lengths = group[0].lengths
    name, count = group[0].spec.name, f"{group[0].spec.name}_count"
    most, overflow = (next((v for v in (getattr(each.options, key) for each in group) if v is not None), None) for key in ("max", "overflow"))
    longest = int(lengths.max(initial=0))
    most = most or max(longest, 1)
    if longest > most:
        row = int(lengths.argmax())
        if overflow != "drop":
            raise SourceError(
                f"{where(row)}: {name}: a list of {longest}, and max={most}: --field {name}:max={longest} keeps all, and overflow=drop cuts it",
                row=row,
            )
        counts[f"rows of {name} behind the first {most} of a list, dropped"] = int((lengths - most).clip(0).sum())
    made: list[tuple[Field, Array]] = []
    for each in group:
        spec = replace(each.spec, shape=(most, *each.spec.shape), count=count)
        made.append((spec, padded(each.values, lengths, most, spec.empty)))
    return [*made, (Field(count, "int64", (), "value"), lengths.clip(max=most))]
