"""The command `build`: its options, in groups, and the one call that they become."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmcompile import summary, text
from mmcompile.cli.program import JSON, NO_LOCK, OF_PLACE, called, look_here, program
from mmcompile.errors import EngineError
from mmcompile.options import (
    BYTES,
    COLUMNS,
    COUNT,
    CUBE,
    KEPT,
    NUMBERS,
    PLACE,
    RANGE,
    RATIO,
    REJECTS,
    SECONDS,
    SIDES,
    SIZE,
    TRIPLE,
    VIEWS,
    preprocess_of,
    row_preprocess,
)
from mmcompile.params import Grouped, Typed, from_config, one_of, option
from mmcompile.terminal import Show, say, say_json

__all__ = ["HELP_GROUPS", "build"]


_DTYPES = one_of("uint8|uint16|int16|int32|float16|bfloat16|float32|float64|bool|int8|int64|uint32|uint64")

#: How the options of `build` stand in its help: the eight that most people need, then by what they are about.
HELP_GROUPS = {
    "Options that most people need": "resize crop normalize dtype workers max-rejects config dry-run",
    "What RAW is, and what of it": "source include exclude hidden split classes-from images image-column label-column columns "
    "group-by order-by split-by where rows as shape array-dtype",
    "Size": "pad keep-size filter resampler jpeg-scaling views",
    "Pixels": "mode mean std scale orientation alpha depth16 range axes icc frames truncated max-pixels max-aspect compat transform "
    "transform-version transform-shape field",
    "Rows and shards": "layout order shard-bytes",
    "What rows tell of their sources": "sha256 keys",
    "How it runs": "decode-timeout checksum redecode no-lock json help",
    "On many machines": "engine address plan-only part",
}


def _two_places(ctx: click.Context, _: click.Parameter, raw: tuple[str, ...]) -> tuple[str, ...]:
    """RAW, which is empty where one place is given, as the last one is OUT; which of the two is missing nobody knows."""
    if not raw and not ctx.resilient_parsing:
        raise click.UsageError("expected RAW and OUT, where the samples come from and the folder of the dataset: `mmcompile build raw/ out/`")
    return raw


@program.command(cls=Grouped, groups=HELP_GROUPS, short_help="Compile images, arrays, tables or datasets into a dataset.")
@click.argument("raw", type=OF_PLACE, nargs=-1, metavar="RAW...", callback=_two_places)
@click.argument("out", type=OF_PLACE)
@option("--resize", Typed(SIZE), "Short side (then add --crop), or HxW.  Without geometry: the size that all have, else 256 and --crop 256.")
@option("--crop", Typed(SIDES), "Cut this much out of the centre, filled with 0 where a picture is smaller; of volumes DxHxW.")
@option("--pad", Typed(CUBE), "Long side N, centred in N x N, filled with 0; volumes are filled up to DxHxW.")
@option("--keep-size", Typed(KEPT), "Take only pictures of this size, as they are.")
@option("--dtype", _DTYPES, "What lies on disk.  Default: uint8.")
@option("--sha256", None, "Store the SHA-256 of each source, too: xxh3, which is always stored, finds accidents and not tampering.", is_flag=True)
@option(
    "--keys",
    str,
    "Names of sources as they are, or hashes of them; hash:FILE: with a secret.  Default: plain.",
    metavar="plain|hash[:FILE]",
)
@option("--layout", one_of("chw|hwc"), "How a row lies on disk; samples are (C, H, W) either way.  Default: chw.")
@option("--normalize", one_of("imagenet|auto"), "(value - mean) / std for training; auto: this dataset's own.  Default: none.")
@option("--mean", Typed(NUMBERS), "Mean of each channel, as in 0.5,0.5,0.5.  Goes with --std.")
@option("--std", Typed(NUMBERS), "Standard deviation of each channel.  Goes with --mean.")
@option("--mode", one_of("rgb|gray|rgba|keep"), "Channels of a sample; keep: those that all sources have.  Default: rgb.")
@option("--scale", one_of("unit|none"), "Float values: 0 to 1, or counts as they are.  Default: unit.")
@option("--resampler", one_of("torch|pillow"), "Whose resize, to the bit.  Default: torch where it can.")
@option("--filter", one_of("bilinear|bicubic|lanczos|box|nearest"), "Default: bilinear, antialiased.")
@option("--compat", one_of("torchvision"), "Exactly the files and numbers of torchvision's ImageFolder with PIL transforms.")
@option("--orientation", one_of("apply|ignore"), "EXIF orientation.  Default: apply.")
@option("--alpha", str, "What transparent pixels are laid over.  Default: white.", metavar="white|black|#rrggbb|drop")
@option("--depth16", one_of("reject|scale|clip|keep"), "16-bit sources in 8 bit: scale for photographs, clip for labels.  Default: reject.")
@option("--range", Typed(RANGE), "Values of deep sources that become 0 and 255, or with a float dtype 0 and 1.  Default: reject what does not fit.")
@option("--axes", one_of("chw|hwc"), "Where .npy pictures have their channels.  Default: as the shape tells.")
@option("--icc", one_of("ignore|srgb"), "Colour profiles.  Default: ignore.")
@option("--frames", one_of("first|error|all"), "Files with several frames; all: those of a TIFF are a volume.  Default: first.")
@option("--truncated", one_of("reject|accept"), "Files that end early.  Default: reject.")
@option("--max-pixels", Typed(COUNT), "Reject larger pictures.  Default: 178956970, Pillow's limit.")
@option("--max-aspect", Typed(RATIO), "Reject longer pictures.  Default: no limit.")
@option("--jpeg-scaling", Typed(RATIO), "Decode large JPEGs at 1/2, 1/4 or 1/8 while this many times the size remains, as in 2.  Default: whole.")
@option(
    "--views",
    Typed(VIEWS),
    "Store K variants of each sample, random resized crops; reading hands out another one in each epoch.  Also scale=0.08:1, ratio, hflip, seed.",
)
@option("--transform", str, "A step of your own on each array, between geometry and cast.", metavar="MODULE:FUNCTION")
@option("--transform-version", str, "Of that step: change it when the step changes.", metavar="TEXT")
@option(
    "--transform-shape",
    Typed(TRIPLE),
    "What that step makes: height x width x channels, of volumes depth x height x width.  Default: the shape that it gets.",
)
@option(
    "--field",
    str,
    "Of one field: what it is, and what differs from the others, as in mask:kind=mask.  May repeat.",
    multiple=True,
    metavar="NAME:KEY=VALUE,...",
)
@option("--order", str, "Rows as the source has them, or mixed: reading in sequence is then random.", metavar="source|shuffled[:SEED]")
@option("--source", str, "What RAW is, where that cannot be told: folder, manifest (a list of images), table, tar, raw, … (README).", metavar="KIND")
@option("--include", str, "Take only these, as in 'cats/*.png' (* matches / too).  May repeat.", multiple=True, metavar="GLOB")
@option("--exclude", str, "Leave these out: pattern or exact path in RAW.  May repeat; adds to --config.", multiple=True, metavar="GLOB|KEY")
@option("--hidden", None, "Take names that begin with a dot, and __MACOSX.", is_flag=True)
@option("--split", str, "This folder below RAW (or this one of several RAW) is a split.  May repeat.", multiple=True, metavar="NAME=FOLDER")
@option("--classes-from", OF_PLACE, "The classes and their numbers: those of a dataset, or of a file with a name a line.", metavar="OUT|FILE")
@option("--as", str, "What an array is, where its name does not say it.  May repeat.", multiple=True, metavar="NAME=image|class|value")
@option("--shape", str, "Of a sample in a file without a header, as 28x28; of all of them, as 60000,28,28.  Goes with --source raw.", metavar="SHAPE")
@option("--array-dtype", str, "Of the numbers in such a file, as float32 or >i2.", metavar="DTYPE")
@option("--images", Typed(PLACE), "Folder that the paths in a list are relative to.  Default: that of the list, or one in it.", metavar="DIR")
@option("--image-column", str, "Column of a list that names (or holds) the images.  Default: by its name and what is in it.", metavar="NAME")
@option(
    "--label-column",
    str,
    "Column that is the label; none: no column is.  Default: the one called label, class, target, category or alike.",
    metavar="NAME|none",
)
@option(
    "--columns",
    Typed(COLUMNS),
    "Columns that become fields, of a table also NAME=A+B; of datasets and of folders side by side those kept.  Default: numbers, and times; all.",
)
@option("--group-by", str, "Of a table: the column (or KEY of folders KEY=VALUE) that says which series a row is of.", metavar="COLUMN")
@option("--order-by", str, "Of a table: the column that the rows of a group rise in; none: they stand as they are.", metavar="COLUMN|none")
@option(
    "--split-by", str, "Of a table: where train ends and test (or val, then test) begins, as in ts=2023-01-01,2024-01-01.", metavar="COLUMN=CUT,..."
)
@option("--where", str, "Take only such rows of datasets, as in \"class == 'cat' and width >= 256\", \"key like 'train/*'\".", metavar="CONDITION")
@option("--rows", OF_PLACE, "Take only these rows of datasets: numbers from 0 on, one a line, or in a .npy file.", metavar="FILE")
@option("--workers", Typed(COUNT), "Processes.  Default: the CPUs that this process may use.")
@option("--engine", one_of("local|dask|ray"), "Who builds the shards: processes here, or a cluster.  Default: local.")
@option("--address", str, "Of that cluster's scheduler: tcp://HOST:PORT (dask), HOST:PORT (ray; default: one on this machine).", metavar="ADDRESS")
@option("--plan-only", None, "List and plan, and save that for parts.", is_flag=True)
@option("--part", str, "Build the shards of part I of N of the plan, as in 3/16; publish nothing.", metavar="I/N")
@option("--shard-bytes", Typed(BYTES), "About the size of a shard, at most twice that, as in 64M.  Default: 256M.")
@option("--max-rejects", Typed(REJECTS), "Publish with up to so many bad images left out, as in 10 or 1%.  Default: 0.")
@option("--decode-timeout", Typed(SECONDS), "For one picture, plus 1 s a megapixel.  Default: 60.")
@NO_LOCK
@option("--checksum", None, "Read every file, also those that look unchanged by size, times and inode.", is_flag=True)
@option("--redecode", None, "Decode again what only another library version made.", is_flag=True)
@option(
    "--config",
    OF_PLACE,
    'JSON or TOML with these options; the command line wins.  Example: {"crop": 224}',
    metavar="FILE",
    is_eager=True,
    callback=from_config,
)
@option("--dry-run", None, "Say what would be decoded, copied, kept and written, and write nothing.", is_flag=True)
@JSON
@click.pass_context
def build(ctx: click.Context, /, raw: tuple[str, ...], out: str, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Compile what RAW holds into the dataset OUT: class folders of images, a flat folder, train/ val/ test/ with either; a list of images (CSV, TSV,
    JSON lines, Parquet, COCO); archives (tar, zip); arrays and tables of numbers; datasets.  What RAW is decides how it is read; several are joined.

    \b
    mmcompile build raw/ out/                                  one size for all, chosen by looking at them
    mmcompile build raw/ out/ --resize 256 --crop 224 --normalize imagenet
    mmcompile build raw/ out/ --pad 512 --max-rejects 1% --dry-run

    RAW is never written.  After an interruption the same command goes on where it was; after changes in RAW it does only what changed.
    """
    from mmcompile.compiler.driver import BuildOptions
    from mmcompile.compiler.driver import build as run
    from mmcompile.compiler.fieldoptions import fields_of, parse_fields
    from mmcompile.compiler.sources.choose import SourceOptions, open_source
    from mmcompile.compiler.sources.rows import is_row_source

    given["fields"] = parse_fields(given.pop("field")) or None
    wishes = ["source", "include", "hidden", "split", "classes_from", "shape", "array_dtype", "images", "image_column", "label_column", "columns"]
    wishes += ["group_by", "order_by", "split_by", "where", "rows"]
    chosen = SourceOptions(
        exclude=(*ctx.meta.get("mmcompile.exclude", ()), *given.pop("exclude")),
        compat=given["compat"],
        as_=given.pop("as"),
        fields=fields_of(given["fields"] or {}),
        **{name: given.pop(name) for name in wishes},
    )
    source = open_source(raw, chosen)
    run_names = {name: name for name in ("workers", "engine", "address", "part", "shard_bytes", "order", "keys")}
    run_names["decode_timeout"] = "decode_timeout_s"
    again = {name: given.pop(name) for name in ("checksum", "redecode", "plan_only", "sha256")}
    options = BuildOptions(
        lock=not given.pop("no_lock"), **again, **{name: v for key, name in run_names.items() if (v := given.pop(key)) is not None}
    )
    max_rejects = given.pop("max_rejects")
    if given["transform"] is not None:
        look_here()
    preprocess = row_preprocess(given) if is_row_source(source) else preprocess_of(given, source)
    show = Show(sys.stderr)
    try:
        report = run(
            source, out, preprocess=preprocess, options=options, max_rejects=0 if max_rejects is None else max_rejects, progress=show, dry_run=dry_run
        )
    except BrokenPipeError as error:  # not standard output, see `say`
        raise EngineError("the connection to a worker process broke; everything finished is kept: run the same command again") from error
    finally:
        show.close()
    if as_json:
        say_json(report.to_json())
    else:
        following = [] if dry_run else text.next_parts(called(), ctx.obj, report.shards, report.plan_only, report.part)
        say([*summary.build_lines(report), *following])
    return 0
