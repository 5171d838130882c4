"""The command `tune`: a dataset opened as training will read it, measured, and told."""

from __future__ import annotations

from typing import Any

import click

from mmcompile.cli.program import JSON, OF_PLACE, program
from mmcompile.errors import MMCompileError, OptionError
from mmcompile.options import COUNT, SECONDS, SIDES, STEP
from mmcompile.params import Typed, option
from mmcompile.terminal import say, say_json

__all__ = ["tune"]


@program.command(short_help="Measure this machine, and choose a loader and its settings.")
@click.argument("out", type=OF_PLACE)
@option("--split", str, "Of this split; all: of all of them.  Needed where there are several.", metavar="NAME|all")
@option("--batch-size", Typed(COUNT), "Samples of a batch.", default="256", show_default=True)
@option("--step-time", Typed(STEP), "What training takes for a batch, as in 40ms: says whether it will wait.  Default: not known.")
@option("--device", str, "Where batches are to be.  Default: cuda where there is one, else cpu.", metavar="cpu|cuda|cuda:N")
@option("--crop", Typed(SIDES), "As training will read it: crop= of MMapShardDataset.")
@option("--dtype", str, "As training will read it: dtype= of MMapShardDataset.", metavar="DTYPE")
@option("--seconds", Typed(SECONDS), "About how long it may take, at least 1.", default="40", show_default=True)
@JSON
def tune(out: str, seconds: float, batch_size: int, step_time: float | None, device: str | None, as_json: bool, **given: Any) -> int:
    """Measure this machine with OUT, warm and cold, and loaders with more and more workers; choose the smallest setting that is as good as the best.

    \b
    mmcompile tune out/
    mmcompile tune out/ --split train --batch-size 512 --step-time 40ms
    mmcompile tune out/ --crop 224 --dtype bfloat16 --device cpu --json

    OUT is only read.  At most 256 MiB of its files leave the page cache, and are read again, to see what the disk gives.
    From Python, also with transforms, augmentation, subsets, windows and caches: mmcompile.tune(dataset).
    """
    from mmcompile.runtime.dataset import MMapShardDataset
    from mmcompile.runtime.device import device_of
    from mmcompile.runtime.tune import tune as run

    show = None if as_json else lambda line: say(line, err=True)
    try:
        dataset = MMapShardDataset(out, **given)
        place = None if device is None else device_of(device)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, MMCompileError):
            raise
        raise OptionError(str(error)) from error
    try:
        tuning = run(dataset, batch_size=batch_size, step_time_s=step_time, device=place, seconds=seconds, progress=show)
    except ValueError as error:
        raise error if isinstance(error, MMCompileError) else OptionError(str(error)) from error
    if as_json:
        say_json(tuning.to_json())
    else:
        say(str(tuning).splitlines())
    return 0
