"""Hides how the facts of a dataset are told in a page: classes, sources, values, what is wrong, settings, what lies on the disk.

Each function returns the inside of one section, from the JSON values that `info` has and from counts; nothing is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile import text
from mmcompile.format.rejects import Reject
from mmcompile.report import charts, png
from mmcompile.report.charts import escape
from mmcompile.report.facts import MOST_CHANNELS, Histogram, Sources, channel_names

__all__ = ["class_bars", "pairs", "problems", "settings", "sources", "storage", "values"]

Info = Mapping[str, Any]
Pixels = npt.NDArray[np.uint8]

#: Classes that all stand in one chart; of more the first and the last, the rest folded.
_ALL_CLASSES, _ENDS, _MOST_CLASSES = 40, 15, 5000
#: Rows of a folded table, and of one that is not.
_MOST_ROWS, _FEW = 2000, 12
#: Columns of numbers that a phone shows side by side.
_NARROW = 5
#: Examples of repeats, and sizes of sources, that stand in a page unfolded.
_EXAMPLES, _SIZES = 10, 8
_TINTS = {"red": "red", "green": "green", "blue": "blue"}
#: What is said of a flag of provenance, beside its word.
_FLAGS = {
    "broken-exif": "EXIF data that could not be read",
    "icc-ignored": "a colour profile other than sRGB, not applied",
    "more-frames": "several frames, of which the first was taken",
    "wrong-extension": "another format than the extension says",
    "truncated-accepted": "cut off, and accepted so",
    "pillow-warning": "the decoder warned",
    "mask-turned": "masks turned as their images are",
    "lossy-mask": "masks in a lossy format",
}


def named(value: Any) -> str:
    """A name in JSON values, as it may stand in a page."""
    return escape(text.name(value))


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what is said of them; both are HTML."""
    return f'<dl class="pairs">{"".join(f"<dt>{name}</dt><dd>{said}</dd>" for name, said in rows)}</dl>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), long: Sequence[int] = ()) -> str:
    """A table of HTML cells, those in the columns `numbers` on the right, those in `long` broken where they must; in a box of its own, which scrolls.

    Where the page is narrow each cell of a wide one is a line of its own, with what stands over its column.
    """
    head = "".join(f'<th scope="col"{_kind(i, numbers)}>{h}</th>' for i, h in enumerate(heads))
    starts = [f'<td{_kind(i, numbers, long)} data-of="{h}">' for i, h in enumerate(heads)]
    body = "".join(f"<tr>{''.join(f'{start}{cell}</td>' for start, cell in zip(starts, row, strict=True))}</tr>" for row in rows)
    kind = "rows told" if long or len(heads) > _NARROW else "rows"
    return f'<div class="box"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(column: int, numbers: Sequence[int], long: Sequence[int] = ()) -> str:
    return ' class="num"' if column in numbers else ' class="long"' if column in long else ""


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


# ---------------------------------------------------------------- classes


def class_bars(info: Info) -> str:
    """How many samples each class has, in each split: all of few classes, the largest and the smallest of many, the rest folded."""
    splits = info["splits"]
    names = [text.name(c["name"]) for c in info["classes"] or ()]
    counts = [[s["classes"][i] for s in splits] for i in range(len(names))] if all(s["classes"] is not None for s in splits) else []
    if not counts:
        return ""
    totals = [sum(c) for c in counts]
    order = sorted(range(len(names)), key=lambda i: (-totals[i], i))
    empty, few = sum(not n for n in totals), min(totals)
    spread = (
        f"of {text.number(few, 'sample')} each"
        if few == max(totals)
        else f"from {few:,} to {max(totals):,} samples, {median(totals):,.0f} in the middle"
    )
    said = f"{text.number(len(names), 'class')}, {spread}"
    lines = [f"<p>{said}.</p>"] if len(names) > 1 else []
    if empty:
        lines.append(f'<p class="bad">{text.number(empty, "class")} without a sample.</p>')
    if info["unknown_labels"]:
        lines.append(f"<p>{text.number(info['unknown_labels'], 'sample')} of no class.</p>")
    for s, split in enumerate(splits):
        if len(splits) > 1 and (missing := [names[i] for i in range(len(names)) if totals[i] and not counts[i][s]]):
            some = ", ".join(escape(n) for n in missing[:8]) + (" …" if len(missing) > 8 else ".")
            lines.append(f'<p class="bad">{escape(split["name"])} has no sample of {text.number(len(missing), "class")}: {some}</p>')

    def chart(which: Sequence[int]) -> str:
        if len(splits) > 1:
            return f'<div class="box">{charts.stacked([s["name"] for s in splits], [(names[i], counts[i]) for i in which])}</div>'
        return f'<div class="box">{charts.bars([(names[i], totals[i]) for i in which], sum(totals))}</div>'

    if len(splits) > 1:
        lines.append(charts.parts([s["name"] for s in splits]))
    if len(names) <= _ALL_CLASSES:
        return "".join([*lines, chart(order)])
    lines.append(charts.line(np.array([totals[i] for i in order]), "samples of each class, the largest first"))
    lines.append(f'<div class="cols"><div><h3>The largest</h3>{chart(order[:_ENDS])}</div>')
    lines.append(f"<div><h3>The smallest</h3>{chart(order[-_ENDS:])}</div></div>")
    lines.append(
        _folded(f"all {len(names):,} classes" if len(names) <= _MOST_CLASSES else f"the first {_MOST_CLASSES:,}", chart(order[:_MOST_CLASSES]))
    )
    return "".join(lines)


# ---------------------------------------------------------------- sources


def sources(found: Sources) -> str:
    """Sizes and formats of the files behind the samples, and what was noticed about them."""
    lines = [
        f"<p>{text.counted(found.samples, 'sources')}, {text.size(found.bytes)}: {text.size(found.bytes // found.samples)} each, "
        f"from {text.size(found.smallest)} to {text.size(found.largest)}.</p>",
        '<div class="cols"><div>',
    ]
    known = found.sizes.any(axis=1)
    sizes, counts = found.sizes[known], found.counts[known]
    if len(sizes) == 1:
        lines.append(f"<h3>Size</h3><p>all {sizes[0][0]:,} x {sizes[0][1]:,} pixels (width x height)</p>")
    elif len(sizes):
        low, high = sizes.min(0).tolist(), sizes.max(0).tolist()
        lines.append(f"<h3>Size</h3><p>{len(sizes):,} sizes, width {low[0]:,} to {high[0]:,}, height {low[1]:,} to {high[1]:,} pixels</p>")
        lines.append(charts.cloud(sizes, counts))
    if len(sizes) > 1 and counts[0] * 100 >= found.samples:
        rows = [(f"{w:,} x {h:,}", n) for (w, h), n in zip(sizes[:_SIZES].tolist(), counts[:_SIZES].tolist(), strict=True)]
        lines.append(f"<h3>Most frequent sizes</h3>{charts.bars(rows, found.samples)}")
    lines.append("</div><div>")
    for title, counter in (("Format", found.formats), ("Mode", found.modes)):
        rows = [(word or "none", n) for word, n in counter.most_common(_FEW)]
        lines.append(f"<h3>{title}</h3>{charts.bars(rows, found.samples)}")
    noticed = [("turned by EXIF", found.turned)] if found.turned else []
    noticed += [(_FLAGS.get(word, word), n) for word, n in found.flags.most_common()]
    if noticed:
        lines.append(f"<h3>Noticed</h3>{charts.bars(noticed, found.samples)}")
    lines.append("</div></div>")
    return "".join(lines)


# ---------------------------------------------------------------- values


def values(info: Info, found: Sequence[tuple[str, str, Sequence[Histogram]]], rows: int) -> str:
    """Means and standard deviations of all rows, and histograms of some: `found` holds (field, what its numbers are, histograms)."""
    lines = [_statistics(info)]
    for field, said, drawn in found:
        if not drawn:
            continue
        lines.append(f'<h3>{escape(field)} <span class="quiet">{escape(said)}</span></h3><div class="hists">')
        for one in drawn:
            strange = f", {one.strange:,} not finite" if one.strange else ""
            title = f"<p>{escape(one.name)}</p>" if one.name else ""
            beyond = f", from {charts.number(one.least)} to {charts.number(one.most)}" if (one.least, one.most) != (one.low, one.high) else ""
            spread = f"mean {charts.number(one.mean)}, std {charts.number(one.std)}{beyond}{strange}"
            lines.append(f'<div>{title}{charts.histogram(one, _TINTS.get(one.name, ""))}<div class="ends"><span>{spread}</span></div></div>')
        lines.append("</div>")
        most = next((f["shape"][0] for f in info["fields"] if f["name"] == field and f["meaning"] == "value" and len(f["shape"]) == 1), 0)
        if len(drawn) == MOST_CHANNELS < most:
            lines.append(f'<p class="quiet">The first {MOST_CHANNELS} of {most:,} numbers.</p>')
    if any(drawn for _, _, drawn in found):
        lines.append(f'<p class="quiet">Histograms are of {text.number(rows, "row")} picked by the seed; heights are square roots of counts.</p>')
    return "".join(lines)


def _statistics(info: Info) -> str:
    """A table for each field that has some, with its unit."""
    hidden = {f["name"] for f in info["fields"] if f.get("unit") or f.get("categories")}
    order = [s["name"] for s in info["splits"]]
    lines, left = [], _MOST_ROWS
    for f in info["fields"]:
        field, rows, unit = f["name"], [], ""
        for split in order:
            found = None if field in hidden else info["statistics"].get(split, {}).get(field)
            if found is None:
                continue
            names = [text.name(n) for n in f["columns"]] if f.get("columns") else None
            names = channel_names(f["meaning"], len(found["mean"]), names)
            unit = _unit(f, found, info["settings"])
            rows += [
                [escape(split), escape(name), f"{mean:.6g}", f"{std:.6g}", f"{found['pixels']:,}"]
                for name, mean, std in zip(names, found["mean"], found["std"], strict=True)
            ]
        if rows:
            table = _table(["split", "column" if f["meaning"] == "value" else "channel", "mean", "std", "values"], rows[:left], (2, 3, 4))
            lines.append(f'<h4>{escape(field)} <span class="quiet">{unit}</span></h4>')
            lines.append(table if len(rows) <= _FEW else _folded(f"{len(rows):,} means and standard deviations", table))
            if len(rows) > left:
                lines.append('<p class="quiet">Not all of them; `mmcompile info --json` has all.</p>')
            left = max(1, left - len(rows))
    return f"<h3>Means and standard deviations, exact, of all rows</h3>{''.join(lines)}" if lines else ""


def _unit(field: Mapping[str, Any], found: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What the statistics of a field count in: pixels in what --mean and --std take, whatever lies on disk.  Settings may be a stranger's."""
    if field["meaning"] not in ("image", "volume"):
        return "as in the sources"
    preprocess = settings.get("preprocess")
    most = {8: 255, 16: 65535}
    depths = sorted({entry.get("depth") for entry in found.get("sums", ())} & set(most))
    if not depths or (isinstance(preprocess, Mapping) and preprocess.get("scale") == "none"):
        return "as pixels of the sources count; what --mean and --std take"
    return f"from 0 to 1: pixels / {' or '.join(str(most[d]) for d in depths)}; what --mean and --std take"


# ---------------------------------------------------------------- what is wrong


def problems(info: Info, rejects: Sequence[Reject], shown: Mapping[str, Pixels | str] | None, hint: bool) -> str:
    """Rejects with their reasons, samples that repeat, and files that are missing.

    shown: what was seen of rejects, or why nothing; None where they were not looked for.  hint: is it to be said how they can be?
    """
    lines = []
    if info["missing"]:
        lines.append(f'<p class="bad">{text.counted(info["missing"], "shard files")} missing: `mmcompile verify` names them.</p>')
    lines.append(f"<h3>Rejects</h3>{_rejects(info, rejects, shown, hint)}")
    lines.append(f"<h3>Repeats</h3>{_repeats(info)}")
    return "".join(lines)


def _rejects(info: Info, rejects: Sequence[Reject], shown: Mapping[str, Pixels | str] | None, hint: bool) -> str:
    if not rejects:
        return "<p>None: every source became a sample.</p>"
    reasons = info["rejects"]["reasons"]
    lines = [charts.bars(sorted(reasons.items(), key=lambda item: (-item[1], item[0])), len(rejects))]
    cells = []
    for reject in rejects if shown else ():
        if not isinstance(pixels := shown[reject.key] if shown else "", str):
            key = escape(reject.key)
            image = f'<img class="thumb" src="{png.as_uri(pixels)}" width="{pixels.shape[1]}" height="{pixels.shape[0]}" alt="what decodes of {key}">'
            cells.append(f'<figure>{image}<figcaption><b>{escape(reject.code)}</b><span class="where">{key}</span></figcaption></figure>')
    if cells:
        lines.append(f'<p class="quiet">What can be seen of them:</p><div class="grid">{"".join(cells)}</div>')
    elif shown is not None:
        lines.append('<p class="quiet">Nothing can be seen of them; the table says why.</p>')
    elif hint:
        lines.append('<p class="quiet">With `--raw RAW` what still decodes of them is shown here.</p>')
    heads = ["source", "reason", "what was found", "size", *(["picture"] if shown is not None else [])]
    rows = []
    for r in rejects[:_MOST_ROWS]:
        seen = "" if shown is None else shown[r.key]
        why = escape(seen) if isinstance(seen, str) else "above"
        rows.append([escape(r.key), escape(r.code), escape(r.message), "" if r.size is None else text.size(r.size), why][: len(heads)])
    table = _table(heads, rows, (3,), (0, 2, 4))
    title = f"all {len(rejects):,}" if len(rejects) <= _MOST_ROWS else f"the first {_MOST_ROWS:,} of {len(rejects):,}"
    lines.append(table if len(rejects) <= _FEW else _folded(title, table))
    return "".join(lines)


def _repeats(info: Info) -> str:
    found = info["repeats"]
    if found is None:
        return "<p>Not looked for: files are missing.</p>"
    if not found["duplicates"]:
        return "<p>None: no two samples have the same bytes.</p>"
    lines = []
    for split, count in found["leaked"].items():
        stand = "stands" if count == 1 else "stand"
        lines.append(f'<p class="bad">Leakage: {text.number(count, "sample")} of {escape(split)} {stand} in a split before it, too.</p>')
    if found["contradictory"]:
        lines.append(f'<p class="bad">{text.number(found["contradictory"], "sample")} with the same bytes as others under another label.</p>')
    lines.append(f"<p>{text.number(found['duplicates'], 'sample')} with the same bytes as one before.</p>")
    rows = []
    for example in found["examples"]:
        kind = ", ".join(word for word, is_so in (("two splits", example["leaked"]), ("two labels", example["contradictory"])) if is_so)
        more = f" and {example['samples'] - len(example['keys']):,} more" if example["samples"] > len(example["keys"]) else ""
        rows.append(["<br>".join(named(key) for key in example["keys"]) + more, kind])
    table = _table(["the same bytes", ""], rows)
    lines.append(table if len(rows) <= _EXAMPLES else _folded(f"{len(rows):,} examples", table))
    return "".join(lines)


# ---------------------------------------------------------------- settings, storage


def settings(info: Info, commands: Sequence[str]) -> str:
    """The settings in full, the versions that pixels depend on, and the commands that make the dataset again."""
    lines = []
    flat = []
    for name, value in info["settings"].items():
        if isinstance(value, Mapping):
            inner = [f"{escape(k)} <b>{_value(v)}</b>" for k, v in value.items() if v not in (None, [], {})]
            flat.append((escape(name), ", ".join(inner) or "as by default"))
        elif value not in (None, [], {}):
            flat.append((escape(name), f"<b>{_value(value)}</b>"))
    lines.append(pairs(flat))
    lines.append("<p>To make the same bytes again from the same sources:</p>")
    lines.append(f"<pre>{chr(10).join(map(escape, commands))}</pre>")
    made = [f"pixel revision {info['pixel_revision']}", *(f"{k} {v}" for k, v in sorted(info["versions"].items()))]
    lines.append(_folded("versions that pixels depend on", f"<p>{escape(', '.join(made))}</p>"))
    return "".join(lines)


def _value(value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(said[:300] + ("…" if len(said) > 300 else ""))


def storage(info: Info, shards: Sequence[tuple[int, int]]) -> str:
    """Fields, shards (their rows and bytes), sizes and generations."""
    rows = []
    for f in info["fields"]:
        shape = " x ".join(f"{n:,}" for n in f["shape"]) or "one number"
        notes = [f["layout"] or "", f"{f['views']} variants" if f.get("views") else "", f"as many as {f['count']}" if f.get("count") else ""]
        notes += ["normalised when read" if f["normalize"] else "", f"times in {f['unit']}" if f.get("unit") else ""]
        said = ", ".join(filter(None, notes))
        rows.append([escape(f["name"]), f["meaning"], f["dtype"], shape, escape(said), text.size(f["row_bytes"]), text.size(f["bytes"])])
    lines = [_table(["field", "holds", "dtype", "shape", "", "a row", "all rows"], rows, (5, 6))]
    stored = info["bytes"]
    splits = ", ".join(f"{escape(s['name'])} {s['stop'] - s['start']:,}" for s in info["splits"])
    lines.append(
        pairs(
            [
                ("on disk", f"{text.size(stored['dataset'])} in {text.number(info['shards'], 'shard')}"),
                ("the whole folder", text.size(stored["folder"])),
                ("splits", splits),
                ("generation", f"<code>{escape(info['generation'])}</code>"),
            ]
        )
    )
    table = [[f"{i:,}", f"{count:,}", text.size(size)] for i, (count, size) in enumerate(shards[:_MOST_ROWS])]
    title = f"{text.number(len(shards), 'shard')}" + (f", the first {_MOST_ROWS:,}" if len(shards) > _MOST_ROWS else "")
    if shards:
        lines.append(_folded(title, _table(["shard", "rows", "bytes of rows"], table, (0, 1, 2))))
    kept = [
        [f"<code>{escape(g['name'])}</code>", text.moment(g["modified"]), "current" if g["current"] else ""] for g in info["generations"][:_MOST_ROWS]
    ]
    lines.append(_folded(text.number(len(info["generations"]), "generation"), _table(["generation", "published", ""], kept)))
    return "".join(lines)
