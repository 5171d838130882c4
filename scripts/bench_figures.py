"""Hides how the kit's results are shown: as tables in Markdown and as a plot in SVG, both made from the JSON document alone."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

from bench_results import shown

Document = dict[str, Any]
#: Of the plot: width, height of a line, where bars begin, and how long the longest is.
_WIDTH, _LINE, _LEFT, _LONG = 760, 22, 210, 430
#: Colours on light and dark ground, with enough contrast on both of GitHub's.
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600}.n{fill:#59636e}
.g{fill:#fff}.o{fill:#0969da}.p{fill:#8c959f}.l{fill:none;stroke:#8c959f;stroke-dasharray:4 3}.m{stroke:#cf222e;stroke-width:2}
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.n{fill:#9198a1}
.g{fill:#0d1117}.o{fill:#4493f8}.p{fill:#656c76}.l{stroke:#656c76}.m{stroke:#ff7b72}}
"""


def markdown(document: Document) -> str:
    """Tables of all figures, ratios, what was not there, and what is not shown."""
    machine, versions = document["machine"], document["versions"]
    lines = [
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". Medians of interleaved rounds."
    ]
    if document["quick"]:
        lines.append("\nA quick run: it shows that all parts run, and no speed.")
    for part in document["parts"]:
        for title in dict.fromkeys(figure["table"] for figure in part["figures"]):
            rows = [figure for figure in part["figures"] if figure["table"] == title]
            lines += [f"\n| {title} | {rows[0]['unit']} | rounds | |", "|---|---:|---:|---|"]
            lines += [f"| {row['name']} | {shown(row['median'])} | {len(row['rounds'])} | {row['note']} |" for row in rows]
        judged = [target for target in part["targets"] if target["least"] is not None]
        if judged:
            lines += [f"\n| {part['part']}: ratios | times | at least | | article |", "|---|---:|---:|---|---|"]
            lines += [f"| {t['what']} | {t['reached']:.1f} | {t['least']:.1f} | {verdict(t['ok'])} | {t['article']} |" for t in judged]
        lines += [f"\nNot there: {name} ({why})." for name, why in part["missing"].items()]
        if "failed" in part:
            lines.append(f"\n{part['part']} failed: {part['failed']}.")
    hidden = dict.fromkeys(text for part in document["parts"] for text in part["hidden"])
    return "\n".join([*lines, "\nNot shown: " + "; ".join(hidden) + "."]) + "\n"


def verdict(ok: bool | None) -> str:
    return {None: "not judged", True: "reached", False: "not reached"}[ok]


def svg(document: Document) -> str:
    """Bars: shuffled and sequential epochs of all ways, and the articles' ratios with a mark where the article is."""
    pieces: list[str] = []
    y = 0
    figures = [figure for part in document["parts"] for figure in part["figures"]]
    for word in ("random epoch", "sequential epoch"):
        rows = sorted((f for f in figures if f["table"].startswith(f"peers: {word}")), key=lambda f: -f["median"])
        if rows:
            bars = [(_name(f), f["median"], None, f["name"]) for f in rows]
            y = _bars(pieces, y, f"{rows[0]['table'].removeprefix('peers: ')} of 224x224 images, {rows[0]['unit']} (warm)", bars, shown)
    targets = [t for part in document["parts"] if part["part"] == "articles" for t in part["targets"] if t["least"] is not None]
    if targets:
        bars = [(t["what"], t["reached"], t["least"], "mmcompile") for t in targets]
        title = "times as fast (memory: times less) as the plain way, logarithmic; the mark is what articles print"
        y = _bars(pieces, y, title, bars, lambda value: f"{value:.1f}", left=350, log=True)
    body = "\n".join(pieces)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" width="{_WIDTH}" role="img">'
    return f'{head}\n<title>Speed of reading</title>\n<style>{_STYLE}</style>\n<rect class="g" width="100%" height="100%"/>\n{body}\n</svg>\n'


def _name(figure: dict[str, Any]) -> str:
    return "limit: array in memory" if figure["name"] == "limit" else str(figure["name"])


def _bars(
    out: list[str],
    y: int,
    title: str,
    bars: list[tuple[str, float, float | None, str]],
    text: Callable[[float], str],
    left: int = _LEFT,
    log: bool = False,
) -> int:
    """Bars from `y` on, the longest as long as fits, each (name, value, mark, who); returns where they end.  A logarithmic one begins at 1."""
    out.append(f'<text class="t" x="12" y="{y + 26}">{html.escape(title)}</text>')
    y += 36
    drawn = (lambda value: math.log(max(value, 1.0))) if log else float
    scale = (_LONG + _LEFT - left) / max([drawn(value) for _, value, mark, _ in bars for value in (value, mark or 0)] + [1e-9])
    for name, value, mark, who in bars:
        kind = {"mmcompile": "o", "limit": "l"}.get(who, "p")
        length = max(1.0, scale * drawn(value))
        out.append(f'<text class="n" x="{left - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        out.append(f'<rect class="{kind}" x="{left}" y="{y + 3.5}" width="{length:.1f}" height="{_LINE - 7}"/>')
        at = 0.0 if mark is None else scale * drawn(mark)
        if mark is not None:
            out.append(f'<path class="m" d="M{left + at:.1f} {y + 1}v{_LINE - 2}"/>')
        out.append(f'<text x="{left + max(length, at) + 6:.1f}" y="{y + 15}">{text(value)}</text>')
        y += _LINE
    return y
