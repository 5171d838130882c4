"""The command that shows a dataset: report."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import click

from mmcompile import text
from mmcompile.cli.program import JSON, OF_PLACE, program
from mmcompile.errors import OptionError
from mmcompile.options import Form, whole
from mmcompile.params import Typed, option
from mmcompile.terminal import say, say_bytes, say_json

if TYPE_CHECKING:
    from mmcompile.report import Replay

__all__ = ["report"]

#: Rows asked for: of so many a page is still a file that a browser opens.
_MOST_ROWS = 1_000


def _rows(given: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in given.split(","):
        start, colon, stop = part.partition(":")
        if colon:
            rows = range(whole(start), whole(stop))
            if not 0 < len(rows) <= _MOST_ROWS:
                raise ValueError(part)
            found += rows
        else:
            found.append(whole(part))
    if len(found) > _MOST_ROWS:
        raise ValueError(given)
    return tuple(found)


def _replay(given: str) -> tuple[int, int]:
    seed, colon, epoch = given.partition(":")
    if not colon:
        raise ValueError(given)
    return whole(seed), whole(epoch)


def _augment(given: str) -> dict[str, Any]:
    """What Augment takes, as typed: sizes as N or HxW, ranges and probabilities of several axes with colons between."""
    found: dict[str, Any] = {}
    for part in given.split(","):
        name, _, value = part.partition("=")
        if name in found or not value:
            raise ValueError(part)
        if name in ("crop", "resized_crop"):
            sides = tuple(map(whole, value.split("x")))
            found[name] = sides[0] if len(sides) == 1 else sides
        elif name == "padding":
            found[name] = whole(value)
        elif name == "hflip":
            found[name] = float(value)
        elif name in ("scale", "ratio", "flip"):
            found[name] = tuple(map(float, value.split(":")))
        else:
            raise ValueError(name)
    return found


ROWS = Form("A,B,C:D", f"row numbers with commas between them, or half-open ranges as in 3:10, at most {_MOST_ROWS:,} rows", _rows)
REPLAY = Form("SEED:EPOCH", "two whole numbers as in 0:5", _replay)
AUGMENT = Form(
    "KEY=VALUE,...", "crop=N|HxW, padding=N, resized_crop=N|HxW, scale=LO:HI, ratio=LO:HI, hflip=P, flip=P:P:P, as in crop=224,hflip=0.5", _augment
)
SEED = Form("N", "a whole number", whole)


@program.command(short_help="Show a dataset as a page that a browser opens.")
@click.argument("out", type=OF_PLACE)
@click.option(
    "-o",
    "--output",
    "file",
    type=OF_PLACE,
    metavar="FILE",
    help="Where to; folders that are missing are made.  Default: NAME-report.html in the current folder, for a dataset in a folder called NAME.  "
    "-: the page goes to standard output.  With --rows a folder, for PNG files.",
)
@option("--rows", Typed(ROWS), "Show these samples: numbers and half-open ranges, as in 3,77 or 3:10.")
@option("--replay", Typed(REPLAY), "Beside each sample show what training gets of it in that epoch: its variant, and what --augment does to it.")
@option("--augment", Typed(AUGMENT), "What the loader's Augment is given, as in crop=224,hflip=0.5 or resized_crop=224,scale=0.25:1.  For --replay.")
@option("--raw", OF_PLACE, "The folder, archive or list that OUT was built from: rejects are shown as far as they can be seen.", metavar="RAW")
@click.option("--no-images", is_flag=True, help="Leave pictures out: a smaller page, which shows nobody's photos.")
@click.option("--split", metavar="NAME", help="Samples of this split alone, counted in it.")
@option("--seed", Typed(SEED), "Picks the samples.  Default: 0.", default="0")
@JSON
def report(out: str, file: str | None, as_json: bool, **given: Any) -> int:
    """Write one HTML file that shows what is in OUT: samples as a network sees them, classes, sources, values, rejects, repeats, settings, sizes.

    \b
    mmcompile report out/
    mmcompile report out/ -o page.html --raw raw/
    mmcompile report out/ --split val -o - > page.html
    mmcompile report out/ --rows 3,77 -o pictures/
    mmcompile report out/ --rows 0:8 --replay 0:5 --augment resized_crop=224,hflip=0.5 -o page.html

    The page needs no network.  A report is replaced by a later one, any other file is left alone, and nothing is written into OUT.
    """
    from mmcompile.report import write_report

    page = io.BytesIO() if file == "-" else None
    if page is not None and given["rows"] is not None:
        raise OptionError(
            "--rows with -o -: pictures are several files; name a folder, as in -o pictures/, or a page, as in -o rows.html", options=["output"]
        )
    if page is not None and as_json:
        raise OptionError("--json with -o -: both go to standard output; name a file, as in -o report.html", options=["output", "json"])
    made = write_report(
        out,
        page or file,
        split=given["split"],
        rows=given["rows"],
        replay=_replay_of(given["replay"], given["augment"]),
        raw=given["raw"],
        images=not given["no_images"],
        seed=given["seed"],
    )
    if page is not None:
        say_bytes(page.getvalue())
    elif as_json:
        say_json(made.to_json())
    elif made.file is not None:
        say(f"{text.escape(made.file)}: {text.size(made.bytes)}, {text.number(len(made.rows), 'sample')} shown, in {text.duration(made.seconds)}")
    else:
        say([text.escape(name) for name in made.files])
    return 0


def _replay_of(replay: tuple[int, int] | None, augment: dict[str, Any] | None) -> Replay | None:
    if replay is None:
        if augment is not None:
            raise OptionError("--augment says what --replay shows: add --replay SEED:EPOCH, as in --replay 0:0", options=["augment", "replay"])
        return None
    from mmcompile.report import Replay

    if augment is None:
        return Replay(*replay)
    from mmcompile.runtime.augment import Augment

    try:
        return Replay(*replay, Augment(**augment))
    except (TypeError, ValueError) as error:
        raise OptionError(f"--augment: {error}", options=["augment"]) from None
