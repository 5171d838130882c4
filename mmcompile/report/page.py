"""Hides how a report is one HTML file: the frame around its sections, which asks for nothing from anywhere.

Text is escaped where it becomes HTML, by whoever makes a section; a policy in the page forbids scripts and requests all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmcompile import text
from mmcompile.report.charts import escape
from mmcompile.report.style import STYLE

__all__ = ["MARK", "Section", "facts", "render"]

#: What a page of ours has in its first lines, so that a later report may take its place.
MARK = '<meta name="generator" content="mmcompile report">'
#: Nothing is fetched, nothing runs; pictures and the sheet are in the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Section:
    """A part of a page: `anchor` is its place, `title` and `inside` (HTML) what it holds."""

    anchor: str
    title: str
    inside: str


def facts(info: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> str:
    """What one wants to know first, as a row of numbers; what should be looked at stands out.

    whole: the facts of the dataset that `info` is a split of.  Then what is of all splits says so.
    """
    fields, splits = info["fields"], info["splits"]
    items = [(f"{info['samples']:,}", "sample" if info["samples"] == 1 else "samples", False)]
    everywhere = "" if whole is None else ", all splits"
    if whole is not None:
        items = [(items[0][0], f"{items[0][1]} in {splits[0]['name']}, of {whole['samples']:,}", False)]
    if len(splits) > 1:
        each = ", ".join(f"{split['name']} {split['stop'] - split['start']:,}" for split in splits[:4])
        items = [(items[0][0], f"samples: {each}{' …' if len(splits) > 4 else ''}", False)]
    if info["classes"] is not None:
        said = "class" if len(info["classes"]) == 1 else "classes"
        there = sum(bool(c["count"]) for c in info["classes"]) if whole is not None and splits[0]["classes"] is not None else len(info["classes"])
        items.append((f"{there:,}", said if there == len(info["classes"]) else f"of {len(info['classes']):,} {said}", False))
    first = next((f for f in fields if f["meaning"] in ("image", "volume")), fields[0])
    more = len([f for f in fields if f["meaning"] != "class"]) - 1
    said = f"{first['dtype']} {first['name']}" + (f", {first['views']} variants" if first.get("views") else "")
    items.append((_shape(first), said + (f", and {text.counted(more, 'fields')} more" if more > 0 else ""), False))
    items.append((text.size(info["bytes"]["dataset"]), f"in {text.number(info['shards'], 'shard')}{everywhere}", False))
    rejects, repeats = info["rejects"]["count"], info["repeats"]
    items.append((f"{rejects:,}", f"{'reject' if rejects == 1 else 'rejects'}{everywhere}", bool(rejects)))
    if repeats is not None:
        leaked = sum(repeats["leaked"].values())
        twice, again = repeats["contradictory"], repeats["duplicates"]
        what = "leaked between splits" if leaked else "with two labels" if twice else "duplicate" if again == 1 else "duplicates"
        items.append((f"{leaked or twice or again:,}", what + ("" if leaked else everywhere), bool(leaked or twice)))
    if info["missing"]:
        items.append((f"{info['missing']:,}", "files missing", True))
    cells = "".join(f"<li{' class=bad' if bad else ''}><b>{escape(number)}</b><span>{escape(what)}</span></li>" for number, what, bad in items)
    return f'<ul class="facts">{cells}</ul>'


def _shape(field: Mapping[str, Any]) -> str:
    """What a sample's shape is, whatever lies on disk."""
    shape = field["shape"][1:] if field.get("views") else field["shape"]
    if field["layout"] == "hwc":
        shape = [shape[2], *shape[:2]]
    return " x ".join(f"{n:,}" for n in shape) + (" numbers" if len(shape) == 1 else "") if shape else "one number"


def render(title: str, sub: str, top: str, sections: Sequence[Section], foot: str) -> str:
    """The page: `title` is text, `sub`, `top` and `foot` are HTML.  Sections without an inside are left out."""
    there = [s for s in sections if s.inside]
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in there)
    parts = "".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-title"><h2 id="{s.anchor}-title">{escape(s.title)}</h2>{s.inside}</section>'
        for s in there
    )
    name = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{name} &middot; dataset report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f'<nav aria-label="Sections"><a href="#top">{name}</a>{links}</nav>\n'
        f'<header id="top"><h1>{name}</h1><p class="sub">{sub}</p>{top}</header>\n<main>{parts}</main>\n<footer>{foot}</footer>\n</body>\n</html>\n'
    )
