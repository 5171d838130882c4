"""Runs the benchmark kit: articles, peers, scaling; one JSON document, tables and a plot.

usage: python scripts/bench.py DIR [--only articles,peers,scaling] [--quick] [--rows N] [--rounds N] [--figures FOLDER]

Writes DIR/results.json, bench.md and bench.svg; with --figures also FOLDER/bench.json, bench.md and bench.svg.  What is read is made in DIR for the
time of the run, some 5 GB.  Each part is a script of its own (bench_articles.py, bench_peers.py, bench_scaling.py) and says what it does not show.  A
part that fails is told, and the others run.  The exit status is 1 if one failed or a ratio was not reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_figures import markdown, svg
from bench_results import about

PARTS = ("articles", "peers", "scaling")


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a part found; one that failed has `failed`, and nothing else."""
    found = args.dir / f"{name}.json"
    found.unlink(missing_ok=True)
    more = [word for word, value in (("--quick", args.quick),) if value]
    more += [str(word) for key in ("rows", "rounds") if (value := getattr(args, key)) for word in (f"--{key}", value)]
    print(f"\n== {name}", flush=True)
    begun = time.perf_counter()
    script = Path(__file__).with_name(f"bench_{name}.py")
    done = subprocess.run([sys.executable, str(script), "--dir", str(args.dir), "--json", str(found), *more], check=False)
    if not found.exists():
        return {"part": name, "failed": f"exit code {done.returncode}", "figures": [], "targets": [], "checks": [], "missing": {}, "hidden": []}
    document: dict[str, Any] = json.loads(found.read_text("utf-8"))
    found.unlink()
    print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
    return {**document, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a few rows and one round: shows that it runs, and no speed")
    parser.add_argument("--rows", type=int, help="how many images each part has")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--figures", type=Path, help="a folder that gets the document, the tables and the plot, too")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    args.dir.mkdir(parents=True, exist_ok=True)
    facts = about()
    parts = [run(name, args) for name in names]
    document = {"format": 1, **facts, "quick": args.quick, "parts": parts}
    texts = {"json": json.dumps(document, indent=1) + "\n", "md": markdown(document), "svg": svg(document)}
    for folder, stem in [(args.dir, "results"), *([(args.figures, "bench")] if args.figures else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, text in texts.items():
            (folder / f"{stem if kind == 'json' else 'bench'}.{kind}").write_text(text, encoding="utf-8")
    failed = [part["part"] for part in parts if "failed" in part]
    short = [target["what"] for part in parts for target in part["targets"] if target["ok"] is False]
    print(f"\nwritten: {args.dir}/results.json, bench.md, bench.svg")
    print(f"parts that failed: {', '.join(failed) or 'none'}; ratios not reached: {'; '.join(short) or 'none' if not args.quick else 'not judged'}")
    sys.exit(1 if failed or short else 0)


if __name__ == "__main__":
    main()
