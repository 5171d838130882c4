"""Hides how a page looks: one sheet, system fonts, one accent colour, light and dark by what the reader's system prefers."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fbfbfc; --card: #ffffff; --ink: #1b1f26; --quiet: #626b78; --line: #e4e7ec; --soft: #f1f3f6;
  --accent: #2f62d0; --bad: #b3361c; --warm: #fdf3ee;
  --p0: #2f62d0; --p1: #d08a2f; --p2: #2f9e7a; --p3: #a3468f; --p4: #6b7f14; --p5: #7a6ad8;
  --red: #d1495b; --green: #2f9e6a; --blue: #3b7bd8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14161a; --card: #1b1e24; --ink: #e6e9ee; --quiet: #98a2b1; --line: #2c313a; --soft: #22262e;
    --accent: #84aaff; --bad: #ff9a80; --warm: #2b201c;
    --p0: #84aaff; --p1: #e8b267; --p2: #5fcfa8; --p3: #d98ac8; --p4: #b3c65a; --p5: #aa9ff5;
    --red: #f0808e; --green: #63cf9a; --blue: #7fb0f5;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 4rem; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", "DejaVu Sans", sans-serif;
}
nav {
  position: sticky; top: 0; z-index: 1; display: flex; gap: 1.25rem; overflow-x: auto; padding: .6rem max(1.25rem, calc(50vw - 36rem));
  background: color-mix(in srgb, var(--bg) 92%, transparent); backdrop-filter: blur(8px); border-bottom: 1px solid var(--line);
  font-size: .87rem; scrollbar-width: none;
}
nav a { color: var(--quiet); text-decoration: none; white-space: nowrap; }
nav a:first-child { color: var(--ink); font-weight: 600; }
nav a:hover, nav a:focus-visible { color: var(--accent); }
main, header { max-width: 74.5rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.4rem; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 0 0 .3rem; font-size: 1.2rem; letter-spacing: -.01em; }
h3 { margin: 1.8rem 0 .5rem; font-size: .95rem; } h4 { margin: 1rem 0 .3rem; font-size: .9rem; font-weight: 600; }
h4 .quiet { font-weight: 400; }
section { padding: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 52rem; overflow-wrap: anywhere; }
.quiet, .sub { color: var(--quiet); }
.sub { margin: .35rem 0 0; }
.bad { color: var(--bad); }
code, pre { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { margin: .6rem 0; padding: .8rem 1rem; overflow-x: auto; background: var(--soft); border-radius: 8px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; padding: 0; list-style: none; }
.facts li { padding: .75rem .95rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.facts b { display: block; font-size: 1.16rem; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.facts span { color: var(--quiet); font-size: .84rem; overflow-wrap: anywhere; }
.facts .bad { background: var(--warm); border-color: color-mix(in srgb, var(--bad) 35%, transparent); }
.facts .bad b { color: var(--bad); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(9.4rem, 42vw), 1fr)); gap: 1.15rem .9rem; margin-top: 1.1rem; }
.grid.wide { grid-template-columns: repeat(auto-fill, minmax(min(19.5rem, 100%), 1fr)); }
.grid.full { grid-template-columns: minmax(0, 1fr); }
.quiet + .grid { margin-bottom: 1.1rem; }
figure { margin: 0; min-width: 0; }
.panels { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); gap: 4px; }
.panels.two { grid-auto-flow: row; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.panels + .panels { margin-top: 4px; }
.panels img, .thumb { display: block; width: 100%; height: auto; border-radius: 6px; background: var(--soft); }
.pixel { image-rendering: pixelated; }
.panels span { display: block; color: var(--quiet); font-size: .74rem; line-height: 1.3; margin-top: .15rem; overflow-wrap: anywhere; }
figcaption { margin-top: .35rem; font-size: .85rem; line-height: 1.4; overflow-wrap: anywhere; }
figcaption b { font-weight: 600; }
figcaption .row { color: var(--quiet); font-size: .78rem; font-variant-numeric: tabular-nums; }
figcaption .where { display: block; color: var(--quiet); font-size: .78rem; }
.values { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem .7rem; margin: .3rem 0 0; font-size: .8rem; }
.values dt { color: var(--quiet); }
.values dd { margin: 0; overflow-wrap: anywhere; }
.values .across { grid-column: 1 / -1; }
.chips { display: flex; flex-wrap: wrap; gap: .3rem .9rem; margin: .8rem 0 0; padding: 0; list-style: none; font-size: .84rem; }
.chips i, i.part { display: inline-block; width: .72rem; height: .72rem; margin-right: .35rem; border-radius: 3px; vertical-align: -.06rem; }
.chips .hatch { background: repeating-linear-gradient(135deg, #888 0 2px, #ccc 2px 4px); }
.chips .none { border: 1px solid var(--quiet); }
.box { overflow-x: auto; background:
  linear-gradient(to left, var(--bg) 40%, transparent) right / 2rem 100% local no-repeat,
  linear-gradient(to left, color-mix(in srgb, var(--quiet) 35%, transparent), transparent) right / .6rem 100% scroll no-repeat; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { font-weight: 500; text-align: left; }
th, td { padding: .26rem .8rem .26rem 0; vertical-align: top; }
thead th { color: var(--quiet); font-size: .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
.num { text-align: right; white-space: nowrap; }
table.rows td, table.rows tbody th { border-bottom: 1px solid var(--line); white-space: nowrap; }
table.rows td.long { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
table.bars { width: 100%; max-width: 48rem; table-layout: fixed; }
table.bars.many { min-width: 34rem; }
table.bars th { width: 34%; overflow-wrap: anywhere; }
table.bars td.num, table.bars th.num { width: 4.4rem; white-space: normal; }
td.bar { white-space: nowrap; font-size: 0; vertical-align: middle; }
td.bar span { display: inline-block; height: .62rem; min-width: 2px; background: var(--accent); border-radius: 2px; vertical-align: middle; }
.part0, i.part0 { background: var(--p0) !important; } .part1 { background: var(--p1) !important; } .part2 { background: var(--p2) !important; }
.part3 { background: var(--p3) !important; } .part4 { background: var(--p4) !important; } .part5 { background: var(--p5) !important; }
.cols { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem 2.5rem; align-items: start; }
.cols > * { min-width: 0; }
.hists { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(13rem, 100%), 1fr)); gap: 1.1rem 1.4rem; margin-top: .7rem; }
.hists p { margin: 0 0 .2rem; font-size: .84rem; }
svg { display: block; }
svg.hist { width: 100%; height: 3.4rem; border-bottom: 1px solid var(--line); }
svg.hist path { fill: var(--accent); }
svg.hist.red path { fill: var(--red); } svg.hist.green path { fill: var(--green); } svg.hist.blue path { fill: var(--blue); }
.ends { display: flex; justify-content: space-between; color: var(--quiet); font-size: .74rem; font-variant-numeric: tabular-nums; }
svg.line { width: 100%; height: 3rem; background: var(--soft); border-radius: 6px; }
svg.line polyline { fill: none; stroke: var(--accent); stroke-width: 1.2; }
svg.cloud { width: 100%; max-width: 24rem; height: auto; }
svg.cloud circle { fill: var(--accent); }
svg.cloud .grid { stroke: var(--line); stroke-width: .7; }
svg.cloud .same { stroke: var(--quiet); stroke-width: .6; stroke-dasharray: 3 3; opacity: .6; }
svg.cloud text { fill: var(--quiet); font-size: 10px; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--accent); font-size: .88rem; }
dl.pairs { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(0, 1fr); gap: .25rem 1.2rem; margin: .6rem 0; font-size: .88rem; }
dl.pairs dt { color: var(--quiet); } dl.pairs dd { margin: 0; overflow-wrap: anywhere; }
footer { max-width: 74.5rem; margin: 2.5rem auto 0; padding: 1rem 1.25rem 2.5rem; color: var(--quiet); font-size: .82rem;
  border-top: 1px solid var(--line); }
@media (max-width: 480px) {
  body { font-size: 14.5px; } h1 { font-size: 1.5rem; } header { padding-top: 1.5rem; }
  .facts { grid-template-columns: 1fr 1fr; } .facts b { font-size: 1.1rem; } th, td { padding-right: .6rem; }
  table.told { width: 100%; } table.told thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table.told tr { display: block; padding: .45rem 0; border-bottom: 1px solid var(--line); }
  table.told td, table.told td.long { display: block; border: 0; padding: .05rem 0; text-align: left; white-space: normal; min-width: 0;
    overflow-wrap: anywhere; }
  table.told td:empty { display: none; }
  table.told td::before { content: attr(data-of); display: inline-block; min-width: 5.6rem; margin-right: .6rem;
    color: var(--quiet); font-size: .8rem; }
}
@media print { nav { position: static; } }
"""
