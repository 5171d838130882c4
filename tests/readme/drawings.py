"""Blocks of the README that are neither code nor a file: what each of them claims, held against what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmcompile import MMapShardDataset
from tests.support import make_dataset

__all__ = ["DRAWINGS"]


def horizon(text: str, place: Path) -> None:
    """A window and its target: the rows that have a mark below them are those that come."""
    make_dataset(place / "drawn", values={"x": np.arange(50.0)[:, None], "close": np.arange(50.0)}, keyed=False)
    bars = MMapShardDataset(place / "drawn")
    call = re.search(r"bars\.windows\(([^)]*)\)", text)
    assert call is not None
    windows = eval(call[0], {"bars": bars})
    x, _, *rest = windows[7]
    first, *others = text.splitlines()
    columns = {at: int(match[2] or 0) for match in re.finditer(r"\s(t(?:\+(\d+))?)(?=\s|$)", first) for at in range(*match.span(1))}
    marks = {name: [columns[m.start()] for m in re.finditer(rf"(?<=\s){mark}(?=\s|$)", line)] for name, mark, line in _marked(others)}
    assert marks["x"] == [int(row) - 7 for row in x[:, 0]]
    assert marks["close"] == [int(rest[-1] if rest else _) - 7]
    said = re.search(r"row t ([\d+ -]+)$", text, re.MULTILINE)
    assert said is not None
    assert [eval(said[1])] == marks["close"]


def _marked(lines: list[str]) -> list[tuple[str, str, str]]:
    """(field, its mark, the line with only the marks) of each row of the drawing."""
    found = []
    for line in lines:
        name, mark = line.split()[:2]
        at = line.index(name)
        found.append((name, mark, line[:at] + " " * len(name) + line[at + len(name) :]))
    return found


DRAWINGS: dict[str, Callable[[str, Path], None]] = {r"^bars\.windows\(.*horizon=": horizon}
