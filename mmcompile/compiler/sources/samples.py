"""Hides what a sample of a Python dataset may be, and which fields it becomes: pictures, masks, boxes, arrays, texts and numbers.

The first sample declares what all hold: names, kinds, dtypes, shapes.  A later one that differs is an error that names its row, what was expected and
what was found.  There is one geometry: that of the main picture moves masks, boxes and keypoints with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.samplenames import places, spread
from mmcompile.compiler.sources.sampleparts import (
    Facts,
    ListPart,
    MaskPart,
    Part,
    PointsPart,
)
from mmcompile.compiler.sources.samplevalues import is_picture
from mmcompile.compiler.spatial import Mover
from mmcompile.errors import DecodeError, SourceError
from mmcompile.format.fields import Field, row_dtype
from mmcompile.text import counted

__all__ = ["Declared", "told"]

Array = npt.NDArray[Any]

#: The row number of an instance, while it is moved with its box.
_INSTANCE = "instances_"


@dataclass(frozen=True)
class Declared:
    """What all samples hold; `names` are those of the parts of a tuple, `options` the settings of the pictures, where there are some, `main` the
    part whose geometry moves `forms` and masks, `left_out` what has no shape, and
    `arrays` the fields whose arrays are pictures."""

    parts: tuple[Part, ...]
    names: tuple[str, ...] | None
    pictures: Preprocess | None = None
    main: str | None = None
    counts: tuple[Field, ...] = ()
    left_out: tuple[str, ...] = ()
    arrays: frozenset[str] = frozenset()

    @property
    def fields(self) -> tuple[Field, ...]:
        return (*(part.field for part in self.parts), *self.counts)

    @property
    def unsized(self) -> tuple[str, ...]:
        """The parts of which a size has to be measured before a field is known."""
        return tuple(part.name for part in self.parts if part.unsized)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The parts of which longer lists are cut, which is to be counted."""
        return tuple(part.name for part in self.parts if isinstance(part, ListPart) and part.options.overflow == "drop")

    def measure(self, sample: Any, row: int, found: dict[str, int], lost: dict[str, int]) -> None:
        """Take the sizes of a sample into `found`, the largest of each part, and of lists that are cut the rows into `lost`."""
        with told(row):
            values = self._values(sample)
            for part in self.parts:
                if part.unsized or part.name in self.cuts:
                    size = part.measure(values[part.name])
                    found[part.name] = max(found.get(part.name, 0), size)
                    if part.name in self.cuts and not part.unsized:
                        lost[part.name] = lost.get(part.name, 0) + max(0, size - part.field.shape[0])

    def sized(self, found: Mapping[str, int]) -> Declared:
        """The same with the sizes that were measured; lists of one count have one."""
        most: dict[str, int] = {}
        for part in self.parts:
            if part.unsized:
                shared = part.field.count or part.name
                most[shared] = max(most.get(shared, 0), found.get(part.name, 0))
        return replace(self, parts=tuple(part.sized(most[part.field.count or part.name]) if part.unsized else part for part in self.parts))

    def _values(self, sample: Any) -> dict[str, Any]:
        named = spread(places(sample, self.names), self.arrays)
        expected = {part.name for part in self.parts}
        if named.empty:  # of no objects
            for part in self.parts:
                if isinstance(part, ListPart):
                    named.parts.setdefault(part.name, ())
        if set(named.parts) != expected:
            if lost := next((name for name in expected if name in named.empty), None):
                raise SourceError(
                    f"{lost}: an empty list, where others have values; of lists that differ in length say how many rows are kept: "
                    f"fields={{{lost!r}: {{'max': N}}}}"
                )
            raise SourceError(f"has {', '.join(named.parts) or 'nothing'}; expected {', '.join(part.name for part in self.parts)}")
        return named.parts

    def store(self, sample: Any, row: int, out: dict[str, Array], at: int, lost: dict[str, int]) -> None:
        """Put a sample, row `row` of all, at row `at` of an array for each field; boxes of which nothing is left go to `lost`, by their field.

        Raises SourceError for one that is not as declared.
        """
        with told(row):
            values = self._values(sample)
            facts = Facts((0, 0))
            if self.main is not None and self.pictures is not None and is_picture(values[self.main]):
                width, height, orientation = decode.picture_facts(values[self.main], self.pictures)
                facts = Facts((width, height), orientation)
            lengths: dict[str, tuple[ListPart, int]] = {}
            for part in self.parts:
                out[part.field.name][at] = part.make(values[part.name], facts)
                if isinstance(part, ListPart) and part.field.count is not None:
                    n = len(part.rows(values[part.name], facts))
                    first, before = lengths.setdefault(part.field.count, (part, n))
                    if before != n:
                        raise SourceError(f"{part.name}: {n} beside {before} {first.name}")
            for count, (first, n) in lengths.items():
                out[count][at] = min(n, first.field.shape[0])
            self._check_stacks(values, facts)
            self._move(out, at, facts)
            for f in self.fields:
                if f.meaning == "boxes" and f.count is not None and f.count in lengths:
                    first, n = lengths[f.count]
                    lost[f.name] = lost.get(f.name, 0) + min(n, first.field.shape[0]) - int(out[f.count][at])

    def _check_stacks(self, values: Mapping[str, Any], facts: Facts) -> None:
        """SourceError where a stack has not a mask for each box."""
        boxes = {p.field.count: p for p in self.parts if isinstance(p, ListPart) and p.field.meaning == "boxes"}
        for part in self.parts:
            if isinstance(part, MaskPart) and part.field.count is not None and (n := part.instances(values[part.name])) is not None:
                own = boxes[part.field.count]
                if n != (there := len(own.rows(values[own.name], facts))):
                    raise SourceError(f"{part.name}: {counted(n, 'masks')}, and {there:,} {own.name}: give each its own")

    def _move(self, out: dict[str, Array], at: int, facts: Facts) -> None:
        """Bring boxes and keypoints of a row to where the main picture is brought, and leave out instances that are gone."""
        forms = tuple((p.field.name, p.form) for p in self.parts if isinstance(p, ListPart | PointsPart) and p.form is not None)
        if not forms or self.pictures is None:
            return
        fields = tuple(
            f for f in self.fields if (f.count is not None and f.meaning != "mask") or f.name in {name for name, _ in forms} or f in self.counts
        )
        instances = tuple(Field(f"{_INSTANCE}{f.name}", "int64", (self._most(f.name),), "value", count=f.name) for f in self.counts)
        record = np.zeros(1, row_dtype((*fields, *instances)))
        for f in fields:
            record[f.name] = out[f.name][at]
        for f in instances:
            record[f.name] = np.arange(1, f.shape[0] + 1)
        sources = np.array([(*facts.size, facts.orientation)], [("width", "i8"), ("height", "i8"), ("orientation", "i8")])
        moved = Mover(self.pictures.resolved(), (*fields, *instances), forms).moved(record, sources, (b"",))
        for f in fields:
            out[f.name][at] = moved[f.name][0]
        for part in self.parts:
            if isinstance(part, MaskPart) and part.field.count is not None:
                numbers = moved[f"{_INSTANCE}{part.field.count}"][0][: int(moved[part.field.count][0])]
                ids, fill = out[part.field.name][at], max(part.options.fill, 0)
                table = np.zeros(max(int(ids.max()), fill, *numbers.tolist()) + 1, ids.dtype)
                table[fill] = fill
                table[numbers] = np.arange(1, len(numbers) + 1)
                out[part.field.name][at] = table[ids]

    def _most(self, count: str) -> int:
        return next(part.field.shape[0] for part in self.parts if isinstance(part, ListPart) and part.field.count == count)


@contextmanager
def told(row: int) -> Iterator[None]:
    """What is wrong with a row is an error with its number, or with that of another row that was looked at."""
    try:
        yield
    except (SourceError, DecodeError) as error:
        if "row" in error.details:
            raise
        raise SourceError(f"row {row:,}: {error}", row=row) from error.__cause__
