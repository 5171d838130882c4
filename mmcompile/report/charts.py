"""Hides how numbers become drawings in a page: bars in HTML, histograms and clouds of points in SVG, all coloured by the style of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as html
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile import text
from mmcompile.report.facts import Histogram

__all__ = ["bars", "cloud", "escape", "histogram", "line", "number", "parts", "stacked"]

Array = npt.NDArray[Any]

#: Points of a line: as many as pixels of a small drawing.
_MOST_POINTS = 240
#: Octaves of a cloud's axes are cut into so many cells: small enough to look like points.
_CELLS = 6
#: Marks along an axis of a cloud, at most.
_MARKS = 6
#: A cloud's side in units of its drawing, and the fewest cells that it stands for.
_SIDE, _LEAST = 220, 24


def number(value: float) -> str:
    """A number for a person: four digits, no exponent where it can be helped."""
    if 1e4 <= abs(value) < 1e15 or (abs(value) < 1e15 and value == int(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bars(rows: Sequence[tuple[str, int]], total: int | None = None) -> str:
    """A table of (what, how many) with a bar behind each count, as long as its share of the greatest."""
    most = max((count for _, count in rows), default=0) or 1
    lines = []
    for name, count in rows:
        bar = f'<span style="width:{100 * count / most:.2f}%"></span>'
        share = f'<td class="num quiet">{_percent(count, total)}</td>' if total else ""
        lines.append(f'<tr><th scope="row">{escape(name)}</th><td class="bar">{bar if count else ""}</td><td class="num">{count:,}</td>{share}</tr>')
    return f'<table class="bars"><tbody>{"".join(lines)}</tbody></table>'


def escape(name: str) -> str:
    """A name as HTML, without a character that is not to be seen."""
    return html(text.escape(name))


def _percent(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 9.5 else f"{share:.1f} %" if share >= 0.05 or not count else "&lt; 0.1 %"


def parts(names: Sequence[str]) -> str:
    """Which colour stands for which of `names` in `stacked`."""
    items = "".join(f'<li><i class="part{i % 6}"></i>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="chips">{items}</ul>'


def stacked(names: Sequence[str], rows: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The same of several counts in a row, one for each of `names`, as parts of one bar."""
    most = max((sum(counts) for _, counts in rows), default=0) or 1
    heads = "".join(f'<th scope="col" class="num">{escape(name)}</th>' for name in names)
    lines = []
    for name, counts in rows:
        pieces = "".join(f'<span class="part{i % 6}" style="width:{100 * n / most:.2f}%"></span>' for i, n in enumerate(counts) if n)
        cells = "".join(f'<td class="num">{n:,}</td>' for n in counts)
        lines.append(f'<tr><th scope="row">{escape(name)}</th><td class="bar">{pieces}</td>{cells}</tr>')
    kind = "bars many" if len(names) > 2 else "bars"
    return f'<table class="{kind}"><thead><tr><th></th><th></th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def histogram(found: Histogram, tint: str = "") -> str:
    """A histogram with its ends; heights are the square roots of counts, so that a spike hides nothing."""
    most = max(found.counts, default=0) or 1
    width = 100 / len(found.counts)
    columns = "".join(
        f"M{i * width:.2f} 40v-{max(0.6, 38 * (count / most) ** 0.5):.1f}h{width * 0.86:.2f}V40z" for i, count in enumerate(found.counts) if count
    )
    what = f"histogram{f' of {found.name}' if found.name else ''} from {number(found.low)} to {number(found.high)}"
    low = f"{'&le; ' if found.least < found.low else ''}{number(found.low)}"
    high = f"{'&ge; ' if found.most > found.high else ''}{number(found.high)}"
    return (
        f'<svg class="hist {tint}" viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label="{escape(what)}"><path d="{columns}"/></svg>'
        f'<div class="ends"><span>{low}</span><span>{high}</span></div>'
    )


def line(values: Array, what: str) -> str:
    """Numbers (L,) as a line, of which no peak is left out: of what is longer than a drawing is wide the least and the greatest of each part."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if len(numbers) > _MOST_POINTS:
        parts = np.array_split(numbers, _MOST_POINTS // 2)
        numbers = np.array([part[at] for part in parts for at in sorted((int(part.argmin()), int(part.argmax())))])
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 0.0)
    span = high - low or 1.0
    step = 100 / max(1, len(numbers) - 1)
    points = " ".join(f"{i * step:.2f},{36 - 32 * (v - low) / span:.2f}" for i, v in enumerate(numbers.tolist()))
    said = f"{what}: {len(values):,} numbers from {number(low)} to {number(high)}"
    return (
        f'<svg class="line" viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label="{escape(said)}"><title>{escape(said)}</title>'
        f'<polyline points="{points}" vector-effect="non-scaling-stroke"/></svg>'
    )


def cloud(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> str:
    """Sizes (S, 2), width and height in pixels, as points of a drawing whose axes are logarithmic; a point is the darker the more have that size."""
    logs = np.floor(np.log2(np.maximum(sizes, 1)) * _CELLS).astype(np.int64)
    low, high = int(logs.min()) - 2, int(logs.max()) + 3
    numbers, where = np.unique(logs[:, 0] * high + logs[:, 1], return_inverse=True)
    totals = np.bincount(where.reshape(-1), counts).astype(np.int64)
    cells = {divmod(at, high): count for at, count in zip(numbers.tolist(), totals.tolist(), strict=True)}
    spare = max(0, _LEAST - (high - low))
    low, high = low - spare // 2, high + spare - spare // 2
    unit, most = _SIDE / (high - low), max(cells.values())
    dots = "".join(
        f'<circle cx="{(x - low + 0.5) * unit:.1f}" cy="{_SIDE - (y - low + 0.5) * unit:.1f}" r="{max(2.2, unit * 0.46):.1f}" '
        f'opacity="{0.25 + 0.75 * (count / most) ** 0.5:.2f}"><title>about {_about(x)} x {_about(y)}: {count:,}</title></circle>'
        for (x, y), count in sorted(cells.items())
    )
    marks = []
    every = -(-(high - low) // (_CELLS * _MARKS))
    for octave in range(-(-low // _CELLS), high // _CELLS + 1):
        at = (octave * _CELLS - low) * unit
        marks.append(f'<path class="grid" d="M{at:.1f} 0V{_SIDE}M0 {_SIDE - at:.1f}H{_SIDE}"/>')
        if octave >= 0 and octave % every == 0 and 14 < at < _SIDE - 10:
            marks.append(f'<text x="{at:.1f}" y="{_SIDE + 14}" text-anchor="middle">{2.0**octave:.0f}</text>')
            marks.append(f'<text x="-6" y="{_SIDE - at + 4:.1f}" text-anchor="end">{2.0**octave:.0f}</text>')
    said = f"widths and heights of {int(counts.sum()):,} sources, in pixels"
    return (
        f'<svg class="cloud" viewBox="-46 -6 {_SIDE + 56} {_SIDE + 40}" role="img" aria-label="{said}">{"".join(marks)}'
        f'<path class="same" d="M0 {_SIDE}L{_SIDE} 0"/>{dots}'
        f'<text x="{_SIDE / 2}" y="{_SIDE + 30}" text-anchor="middle">width</text>'
        f'<text x="-38" y="{_SIDE / 2}" text-anchor="middle" transform="rotate(-90 -38 {_SIDE / 2})">height</text></svg>'
    )


def _about(cell: int) -> int:
    return round(2 ** ((cell + 0.5) / _CELLS))
