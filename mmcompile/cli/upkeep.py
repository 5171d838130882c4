"""The commands that look after a dataset: verify, info, prune."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmcompile import summary
from mmcompile.cli.program import JSON, NO_LOCK, OF_PLACE, look_here, program
from mmcompile.compiler.outcome import Progress
from mmcompile.options import COUNT
from mmcompile.params import Typed
from mmcompile.terminal import Show, say, say_json

__all__ = ["info", "prune", "verify"]


@program.command(short_help="Check every byte of a dataset, or mend it.")
@click.argument("out", type=OF_PLACE)
@click.option(
    "--repair", "raw", type=OF_PLACE, metavar="RAW", help="Build again just what is bad, from the sources in RAW, and end with the original bytes."
)
@NO_LOCK
@JSON
def verify(out: str, raw: str | None, no_lock: bool, as_json: bool) -> int:
    """Check every byte of every file of OUT against its hash.  Exit code 1 if anything is wrong.

    \b
    mmcompile verify out/
    mmcompile verify out/ --repair raw/
    """
    show = Show(sys.stderr)
    report: Any
    try:
        if raw is None:
            from mmcompile.format.verify import verify as check

            report = check(out, progress=lambda done, total: show(Progress("verify", done, total)))
        else:
            from mmcompile.compiler.repair import repair

            look_here()
            report = repair(out, raw, progress=show, lock=not no_lock)
    finally:
        show.close()
    document = report.to_json()
    if as_json:
        say_json(document)
    else:
        say(summary.verify_lines(document) if raw is None else summary.repair_lines(document))
    return 0 if report.ok else 1


@program.command(short_help="Show what is in a dataset.")
@click.argument("out", type=OF_PLACE)
@click.option(
    "--samples",
    "table",
    type=OF_PLACE,
    metavar="FILE",
    help="Write a new CSV or .parquet file with a row for each sample: its source, what was done.",
)
@click.option(
    "--config", "as_config", is_flag=True, help="Print its settings as what `build --config` takes: the same RAW gives the same bytes then."
)
@click.option("--generation", metavar="G", help="An earlier one, by its 32 hex digits.  Default: the current one.")
@JSON
def info(out: str, table: str | None, as_config: bool, generation: str | None, as_json: bool) -> int:
    """Show what is in OUT: fields, samples, classes, sizes, settings, statistics, rejects, generations.  Exit code 1 if shard files are missing.

    \b
    mmcompile info out/
    mmcompile info out/ --samples samples.csv
    mmcompile info out/ --config > build.json
    """
    from mmcompile.format.describe import describe
    from mmcompile.format.sampletable import write_samples

    document = describe(out, generation)
    if table is not None:
        document["samples_file"] = table
        write_samples(table, out, generation)
    if as_config:
        from mmcompile.compiler import options

        rejects = {"max-rejects": document["rejects"]["count"]} if document["rejects"]["count"] else {}
        say_json({**options.as_config(document["settings"], out), **rejects})
    elif as_json:
        say_json(document)
    else:
        say(summary.info_lines(document))
    return 1 if document["missing"] else 0


@program.command(short_help="Delete what only old generations need.")
@click.argument("out", type=OF_PLACE)
@click.option("--keep", type=Typed(COUNT), default="1", help="Generations to keep, the newest.  Default: 1.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@JSON
def prune(out: str, keep: int, yes: bool, as_json: bool) -> int:
    """List what only old generations of OUT need, then delete it: after asking on a terminal, or with --yes.

    \b
    mmcompile prune out/ --keep 2
    mmcompile prune out/ --yes

    Jobs that still read a deleted generation will stop.
    """
    from mmcompile.format.prune import prune as run

    report = run(out, keep, delete=yes)
    document = report.to_json()
    if as_json:
        say_json(document)
        return 0
    say(summary.prune_lines(document))
    asks = not yes and (document["generations"] or document["files"]) and _can_ask()
    if asks and click.confirm("delete these files?", err=True):
        say(summary.prune_lines(run(out, keep, delete=True).to_json()))
    return 0


def _can_ask() -> bool:
    """Is there a person at a terminal?"""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
