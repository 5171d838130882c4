"""Hides what the options of a run may be: how to run it, how many bad images it may leave out, and how its geometry would be typed."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from mmcompile.compiler.plan import SHARD_BYTES
from mmcompile.compiler.preprocess import TORCH_FILTERS, Normalize, Preprocess
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.errors import OptionError, spelled
from mmcompile.format.canonical import name_from_json

__all__ = ["ENGINES", "BuildOptions", "allowed_rejects", "as_config", "notes", "tells_of_keywords", "typed"]

P = ParamSpec("P")
R = TypeVar("R")

#: Engines by name; any other is given as an Executor.
ENGINES = ("local", "dask", "ray")
#: What each option is, and in words.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "workers": ((Integral, type(None)), "a number, at least 1"),
    "address": ((str, type(None)), "a text"),
    "part": ((str, type(None)), "a text as in '3/16'"),
    "shard_bytes": ((Integral,), "a whole number of bytes"),
    "decode_timeout_s": ((Real,), "a number of seconds"),
    "order": ((str,), "source, shuffled or shuffled:SEED"),
    **dict.fromkeys(("plan_only", "lock", "checksum", "redecode"), ((bool,), "True or False")),
}
_ORDER = re.compile(r"source|shuffled(:[0-9]{1,18})?")
_KEYS = re.compile(r"plain|hash(:.+)?")


@spelled
@dataclass(frozen=True)
class BuildOptions:
    """How to run a build.  Nothing here changes a byte of the dataset but `shard_bytes`, which moves the cuts, `order`, `sha256` and `keys`.

    `workers`: processes, None: as many as this process may use, or as the engine has.  `engine`: "local", "dask", "ray", or an Executor of yours,
    which is not shut down; `address`: of its scheduler.  `plan_only`: save the listing and the plan, build nothing; `part`: build the shards of part
    "I/N" of that plan (0 <= I <= N, 0 and N are the same), and publish nothing.  `decode_timeout_s`: seconds that one image may take, and one more
    for each megapixel.  `lock=False` is for file systems without file locks: the caller makes sure that no other run is at work.  `checksum`: read
    all files, also those whose size, times and inode say that they are unchanged.  `redecode`: decode again what other library versions made.
    `order`: "source", or "shuffled" or "shuffled:SEED": the rows of each split stand in a random order; of rows with keys, one that a row that is
    added or taken away does not change for the others.  `sha256`: rows hold the SHA-256 of their source, too, which nobody can forge as xxh3 can be.
    `keys`: "plain", the names of sources; "hash", a hash of each; "hash:FILE", one with the secret in that file, at least 16 random bytes.
    """

    workers: int | None = None
    engine: str | Executor = "local"
    address: str | None = None
    part: str | None = None
    plan_only: bool = False
    shard_bytes: int = SHARD_BYTES
    decode_timeout_s: float = 60.0
    lock: bool = True
    checksum: bool = False
    redecode: bool = False
    order: str = "source"
    sha256: bool = False
    keys: str = "plain"

    def __post_init__(self) -> None:
        for name, (kinds, words) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise OptionError(f"{name} must be {words}, found {value!r:.80}", options=[name])
            if isinstance(value, Integral) and bool not in kinds:
                object.__setattr__(self, name, int(value))
        if self.workers is not None and self.workers < 1:
            raise OptionError(f"--workers must be a number, at least 1, found {self.workers!r}")
        if not isinstance(self.engine, Executor) and self.engine not in ENGINES:
            raise OptionError(f"engine must be {', '.join(map(repr, ENGINES))} or an Executor, found {self.engine!r}")
        if self.address is not None and self.engine not in ("dask", "ray"):
            raise OptionError(f"--address {self.address} is that of a dask or ray cluster: give the engine, too (--engine dask or --engine ray)")
        if self.part is not None and (self.plan_only or self.engine != "local"):
            raise OptionError(f"--part {self.part} is built by processes of this machine: leave --engine and --plan-only out", options=["part"])
        if not _ORDER.fullmatch(self.order):
            raise OptionError(f"--order must be source, shuffled or shuffled:SEED, found {self.order!r}", options=["order"])
        if not isinstance(self.keys, str) or not _KEYS.fullmatch(self.keys):
            raise OptionError(f"--keys must be plain, hash or hash:FILE, found {self.keys!r:.80}", options=["keys"])
        if self.shard_bytes < 1:
            raise OptionError(f"--shard-bytes must be at least 1, found {self.shard_bytes}")
        if not self.decode_timeout_s > 0:
            raise OptionError(f"--decode-timeout must be above 0 (seconds), found {self.decode_timeout_s}")

    @property
    def seed(self) -> int | None:
        """The seed of a shuffled order; None for the order of the source."""
        return None if self.order == "source" else int(self.order.partition(":")[2] or 0)


def tells_of_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which says of an option that it does not take as a keyword where that is given instead.  Raises TypeError."""
    taken = set(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*arguments: P.args, **given: P.kwargs) -> R:
        for name, value in given.items():
            if name in taken:
                continue
            shown = f"{name}={value!r:.60}"
            homes = [kind.__name__ for kind in (Preprocess, RowPreprocess) if name in kind.__dataclass_fields__]
            if homes:
                whole = " or ".join(f"preprocess=mmcompile.{home}({shown})" for home in homes)
                said = f"give it as {whole}{' (of arrays and tables)' if len(homes) > 1 else ''}"
            elif name in BuildOptions.__dataclass_fields__:
                said = f"give it as options=mmcompile.BuildOptions({shown})"
            else:
                said = f"there are {', '.join(sorted(taken))}; what is made of samples stands in preprocess=, how it runs in options="
            raise TypeError(f"{function.__name__}() takes no {name}=: {said}")
        return function(*arguments, **given)

    return called


def allowed_rejects(max_rejects: int | str, items: int) -> int:
    """The number of rejects that may be left out; "2%" is of the items planned, rounded down."""
    text = str(max_rejects).strip()
    try:
        if text.endswith("%"):
            share = Fraction(text[:-1])  # exact: 29% of 100 is 29
            value = math.floor(share * items / 100)
            if not 0 <= share <= 100:
                raise ValueError(text)
        else:
            value = int(text)
            if value < 0:
                raise ValueError(text)
    except (ValueError, ZeroDivisionError):
        raise OptionError(f"--max-rejects must be a number of images, or a share of them such as 2%, found {max_rejects!r}") from None
    return value


def typed(preprocess: Preprocess) -> str:
    """The geometry as options of the command."""

    def size(value: Any) -> str:
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    names = (("resize", "--resize"), ("crop", "--crop"), ("pad", "--pad"), ("keep_size", "--keep-size"))
    return " ".join(f"{flag} {size(value)}" for name, flag in names if (value := getattr(preprocess, name)) is not None)


def notes(preprocess: Preprocess) -> tuple[str, ...]:
    """Lines for a person about choices that were made for them."""
    normalize, said = preprocess.normalize, []
    if isinstance(normalize, Normalize) and preprocess.scale == "unit" and max(map(abs, normalize.mean)) > 2:
        shown = ",".join(f"{v:g}" for v in normalize.mean)
        said.append(f"--mean {shown} looks like statistics of 0 to 255; values go from 0 to 1 here: divide --mean and --std by 255")
    if preprocess.resampler is None and preprocess.compat is None and (preprocess.resize or preprocess.pad):
        if preprocess.filter not in TORCH_FILTERS:
            said.append(f"--filter {preprocess.filter} uses Pillow's kernel")
        elif preprocess.keeps_alpha:
            said.append(f"--mode {preprocess.mode} uses Pillow's premultiplied resize")
    return tuple(said)


def as_config(settings: Mapping[str, Any], out: str) -> dict[str, Any]:
    """The settings of the dataset `out`, as its index has them, as what a --config file holds; building with that gives the same bytes.

    Raises OptionError for what settings hold only a hash of, and for a dataset that was made of one in Python.
    """
    preprocess = settings["preprocess"]
    made = None if "mode" not in preprocess else Preprocess.from_settings(preprocess)
    config = _row_config(preprocess) if made is None else _image_config(made)
    source = dict(settings["source"])
    kind, several = source.pop("kind"), source.pop("roots", None) is not None
    if kind == "dataset":
        if "generations" not in source:
            raise OptionError(f"{out}: was made by mmcompile.build of a dataset in Python, which no config can name: call that again")
        several = len(source.pop("generations")) > 1
        if "rows" in source:
            raise OptionError("this dataset was made with --rows FILE; its settings hold the hash of the numbers, not the numbers", options=["rows"])
    if kind != "folder":
        config["source"] = kind
    if made is not None and made.compat is not None:
        source.pop("hidden", None)
        source.pop("extensions", None)
    if source.pop("classes", None) is not None:
        config["classes-from"] = out
    if (splits := source.pop("splits", None)) and several:
        raise OptionError("this dataset was made of several RAW with --split, which is to be given with them again", options=["split"])
    if splits:
        config["split"] = [f"{name}={name_from_json(folder) or '.'}" for name, folder in splits]
    for name, value in source.items():
        if value not in (None, False, [], ""):
            config[name.replace("_", "-")] = value
    if settings["shard_bytes"] != SHARD_BYTES:
        config["shard-bytes"] = settings["shard_bytes"]
    if settings.get("keys", "hash") != "hash":
        raise OptionError("this dataset was made with --keys hash:FILE; its settings hold a hash of the secret, not where it lies", options=["keys"])
    config |= {name: settings[name] for name in ("order", "sha256", "keys") if name in settings}
    return dict(sorted(config.items()))


def _image_config(made: Preprocess) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for spec in fields(Preprocess):
        value = getattr(made, spec.name)
        if spec.name not in ("kept_mode", "fields", "kind", "fill", "kept_channels", "views") and value != spec.default:
            config[spec.name.replace("_", "-")] = list(value) if isinstance(value, tuple) else value
    if made.drawn is not None:
        config["views"] = made.drawn.typed
    own = made.settings().get("fields", {})
    if made.kind != "image":
        own = {**own, "image": {"kind": made.kind, **({"fill": made.fill} if made.fill else {})}}
    if own:
        config["field"] = own
    if isinstance(made.normalize, Normalize):
        del config["normalize"]
        config |= {"mean": list(made.normalize.mean), "std": list(made.normalize.std)}
    if made.range is not None:
        config["range"] = f"{made.range[0]!r}:{made.range[1]!r}"
    if made.compat is not None:  # the preset decides these, and refuses some of them
        for name in ("resampler", "orientation", "alpha", "depth16"):
            config.pop(name, None)
    return config


def _row_config(preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """Of rows of numbers: see RowPreprocess."""
    normalize, scale = preprocess["normalize"], preprocess["scale"]
    return {
        **({} if preprocess["dtype"] is None else {"dtype": preprocess["dtype"]}),
        **(normalize if isinstance(normalize, dict) else {} if normalize is None else {"normalize": normalize}),
        **({} if scale == "unit" else {"scale": scale}),
    }
