"""Hides how samples stand in a page: cards with pictures, or where a sample holds nothing but a few numbers the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.format.index import Field
from mmcompile.report import charts, png, show
from mmcompile.report.charts import escape
from mmcompile.report.gallery import Gallery, Legend, Panel
from mmcompile.report.opened import Opened, Sample

__all__ = ["as_table", "cards", "legend", "plain", "told"]

Array = npt.NDArray[Any]

#: The longer side of a picture in a page; smaller ones than _SMALL are shown with square pixels.
MOST_SIDE, _SMALL = 384, 100
#: Numbers of a value that are written out; more are drawn.
_WRITTEN = 8
#: Characters of a text, and values of a sample, that are shown.
_MOST_TEXT, _MOST_VALUES = 400, 24
#: Columns of a table of samples.
_MOST_COLUMNS = 24
#: Rows of a strip, an array of two axes as a picture: what is longer is thinned out.
_STRIP = 256
_LEGEND = 60


def plain(data: Opened) -> bool:
    """Are samples nothing but single numbers, short rows of them, and texts?"""
    return all(f.meaning in ("class", "text") or (f.meaning == "value" and len(f.shape) <= 1 and len(_columns(f)) <= 40) for f in data.fields)


def cards(gallery: Gallery, samples: Sequence[Sample], replayed: dict[int, dict[str, Array]], pictures: bool) -> str:
    """A grid of samples; beside each what augmentation makes of it where it was `replayed` (row -> its values)."""
    items, widest = [], 0
    for sample in samples:
        lines: list[list[Panel]] = []
        for k, values in enumerate(sample.variants if pictures else ()):
            panels = gallery.panels(values)
            if len(sample.variants) > 1:
                panels = [Panel(f"{p.name}, variant {k}", p.pixels) for p in panels]
            lines.append(panels)
        if lines and sample.row in replayed:
            lines.append([Panel(f"{p.name}, replayed", p.pixels) for p in gallery.panels(replayed[sample.row])])
            if len(lines) == 2:
                lines = [lines[0] + lines[1]]
        if all(len(line) == 1 for line in lines):
            lines = [[panel for line in lines for panel in line]]
        widest = max([widest, *map(len, lines)])
        others = _values(gallery, sample.variants[0], pictures)
        drawn = "".join(_panels(line, sample) for line in lines if line)
        items.append(f"<figure>{drawn}{_caption(gallery, sample)}{others}</figure>")
        widest = max(widest, 2 if others else 0)
    kind = "" if widest <= 1 else " wide" if widest <= 4 else " full"
    return f'<div class="grid{kind}">{"".join(items)}</div>'


def _panels(panels: Sequence[Panel], sample: Sample) -> str:
    parts = []
    for panel in panels:
        pixels = show.shrunk(panel.pixels, MOST_SIDE)
        height, width = pixels.shape[:2]
        small = ' class="pixel"' if max(height, width) < _SMALL else ""
        alt = escape(f"{panel.name} of sample {sample.row}, from {sample.source}")
        name = f"<span>{escape(panel.name)}</span>" if len(panels) > 1 else ""
        parts.append(f'<div><img{small} src="{png.as_uri(pixels)}" width="{width}" height="{height}" alt="{alt}">{name}</div>')
    return f'<div class="panels{" two" if len(panels) == 4 else ""}">{"".join(parts)}</div>'


def _caption(gallery: Gallery, sample: Sample) -> str:
    what = "" if sample.label is None else f"<b>{escape(gallery.data.class_name(sample.label))}</b> "
    row = f'<span class="row">row {sample.row:,}</span>'
    where = "" if sample.source == f"[{sample.row}]" else f'<span class="where">{escape(sample.source)}</span>'
    return f"<figcaption>{what}{row}{where}</figcaption>"


def _values(gallery: Gallery, values: dict[str, Array], pictures: bool) -> str:
    """What a sample holds beside pictures and its label, a name and a value each."""
    counts = {f.count for f in gallery.data.fields if f.count}
    parts = []
    for f, found in gallery.others(values)[:_MOST_VALUES]:
        if f.name not in counts:
            drawn = _drawn(f, found) if pictures else escape(told(f, found))
            across = ' class="across"' if drawn.startswith("<") else ""
            parts.append(f"<dt{across}>{escape(f.name)}</dt><dd{across}>{drawn}</dd>")
    return f'<dl class="values">{"".join(parts)}</dl>' if parts else ""


def _drawn(f: Field, values: Array) -> str:
    """A value as words, as a line, or as a strip."""
    if f.meaning == "text" or values.size <= _WRITTEN or values.dtype.kind == "M":
        return escape(told(f, values))
    if values.ndim == 1:
        return charts.line(values, f.name) if len(values) > 3 * _WRITTEN or not f.categories else escape(told(f, values))
    shape, at = values.shape, [n // 2 for n in values.shape[:-2]]
    if min(shape) > 0:  # of more than two axes the plane in the middle
        where = f", of {' x '.join(map(str, shape))} plane {', '.join(map(str, at))}" if at else ""
        return _strip(f.name, values[tuple(at)], where)
    return "none"


def _strip(name: str, values: Array, where: str) -> str:
    """An array of two axes as grey levels, the longer axis across."""
    table = values if values.shape[1] >= values.shape[0] else values.T
    table = table[:: -(-table.shape[0] // _STRIP), :: -(-table.shape[1] // _STRIP)].astype(np.float64)
    finite = table[np.isfinite(table)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    with np.errstate(all="ignore"):
        levels = np.nan_to_num((table - low) * (255 / ((high - low) or 1.0))).clip(0, 255).astype(np.uint8)
    said = f"{name}: {values.shape[0]} x {values.shape[1]}{where}, {charts.number(low)} is black, {charts.number(high)} is white"
    height, width = levels.shape
    image = f'<img class="thumb pixel" src="{png.as_uri(levels)}" width="{width}" height="{height}" alt="{escape(said)}" title="{escape(said)}">'
    return image + _note(where)


def _note(where: str) -> str:
    return f'<span class="quiet">{escape(where.removeprefix(", "))}</span>' if where else ""


def told(f: Field, values: Array) -> str:
    """A value in words: a text as it reads, categories by their names, times as dates, numbers with four digits."""
    if f.meaning == "text":
        found = bytes(np.asarray(values, np.uint8)).rstrip(b"\0").decode("utf-8", "backslashreplace")
        return found[:_MOST_TEXT] + ("…" if len(found) > _MOST_TEXT else "")
    flat = np.asarray(values).reshape(-1)[: 4 * _WRITTEN]
    words = [_word(f, n) for n in flat.tolist()]
    return ", ".join(words) + (", …" if values.size > len(flat) else "") or "none"


def _word(f: Field, value: Any) -> str:
    if f.categories is not None:
        names = f.categories.listed
        return names[value] if 0 <= value < len(names) else "none"
    if f.unit is not None:
        return str(np.uint64(value % 2**64).view(f"<M8[{f.unit}]"))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return charts.number(value) if value - value == 0 else str(value)


def _columns(f: Field) -> list[str]:
    """What the numbers of a value are called, one column each."""
    if f.meaning != "value" or not f.shape:
        return [f.name]
    count = f.shape[0]
    return [f"{f.name}.{name}" for name in f.columns.listed] if f.columns is not None else [f"{f.name}[{i}]" for i in range(count)]


def _kind(f: Field) -> str:
    """How a field's cells stand in a table."""
    return "long" if f.meaning == "text" else "" if f.categories or f.unit else "num"


def as_table(data: Opened, samples: Sequence[Sample]) -> str:
    """Samples as the rows of a table, a column for each of their numbers."""
    told_by_row = all(sample.source == f"[{sample.row}]" for sample in samples)
    heads = ["row"] + ["from"] * (not told_by_row) + ["class"] * (data.label is not None)
    fields = [f for f in data.fields if f.meaning != "class"]
    names = [(name, _kind(f)) for f in fields for name in _columns(f)]
    lines = []
    for sample in samples:
        cells = [f'<th scope="row" class="num">{sample.row:,}</th>']
        if not told_by_row:
            cells.append(f"<td>{escape(sample.source)}</td>")
        if sample.label is not None:
            cells.append(f"<td>{escape(data.class_name(sample.label))}</td>")
        count = 0
        for f in fields:
            values = show.as_floats(sample.variants[0][f.name], f)
            single = [values] if f.meaning != "value" or not f.shape else list(values)
            for value in single[: _MOST_COLUMNS - count]:
                cells.append(f'<td class="{_kind(f)}">{escape(told(f, np.asarray(value)))}</td>')
            count += len(single)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    named = [*((name, "num" if name == "row" else "") for name in heads), *names[:_MOST_COLUMNS]]
    head = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in named)
    more = f'<p class="quiet">{len(names) - _MOST_COLUMNS:,} more columns</p>' if len(names) > _MOST_COLUMNS else ""
    return f'<div class="box"><table class="rows"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{more}'


def _numbered(number: int, name: str) -> str:
    return f"{number} {name}" if name != str(number) else name


def legend(found: Legend) -> str:
    """What the colours of the samples mean."""
    kinds = sorted({kind for kind, _ in found.entries})
    parts = []
    for (kind, number), (tint, name) in sorted(found.entries.items())[:_LEGEND]:
        mark = '<i class="hatch"></i>' if tint is None else '<i class="none"></i>' if not any(tint) else f'<i style="background:rgb{tint}"></i>'
        parts.append(f"<li>{mark}{escape(f'{kind} ' if len(kinds) > 1 else '')}{escape(_numbered(number, name))}</li>")
    more = f"<li>and {len(found.entries) - _LEGEND:,} more</li>" if len(found.entries) > _LEGEND else ""
    return f'<ul class="chips">{"".join(parts)}{more}</ul>' if parts else ""
