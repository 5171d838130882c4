"""Hides how a build is done in parts that know nothing of each other: the plan that all of them read, whose shards are whose, and their locks.

A part builds and seals its shards, and nothing else: it publishes nothing and deletes nothing that is not its own.  A plain build finds the seals.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from mmcompile.compiler.listing import load_head, load_listing, save_listing
from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.output import describe_changes
from mmcompile.compiler.plan import SHARD_BYTES
from mmcompile.compiler.planning import Wanted
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import STAT_DTYPE, Scan, Source, labelled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.trace import Trace
from mmcompile.errors import BuildError, OptionError
from mmcompile.format.lock import Lock

__all__ = [
    "PartNumber",
    "Plan",
    "load_plan",
    "locked",
    "more_of",
    "plan_exists",
    "planned_tasks",
    "refuse_other",
    "remove_plan",
    "save_plan",
    "scratch_of",
]

_T = TypeVar("_T", bound="_Numbered")
#: Settings that an error names.
_NAMED = 4
#: What the identity of a source says that nobody gave as an option.
_NO_SETTINGS = ("kind", "roots")


class _Numbered(Protocol):
    """A shard that has to be made."""

    @property
    def number(self) -> int: ...


@dataclass(frozen=True)
class PartNumber:
    """Part I of N: the shards whose number modulo N is I modulo N, so that numbers from 0 and from 1 serve alike."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> PartNumber:
        """Of "I/N".  Raises OptionError."""
        index, slash, count = text.partition("/")
        if slash and all(n.isascii() and n.isdigit() and len(n) < 10 for n in (index, count)) and 0 <= int(index) <= int(count) != 0:
            return cls(int(index), int(count))
        raise OptionError(f"--part must be I/N with 0 <= I <= N, as in 3/16, found {text!r:.80}", options=["part"])

    @property
    def name(self) -> str:
        """The same for I = 0 and I = N."""
        return f"{self.index % self.count}-of-{self.count}"

    def of(self, tasks: list[_T]) -> list[_T]:
        """The shards of this part."""
        return [t for t in tasks if t.number % self.count == self.index % self.count]


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """What was planned: the listing, made at `at_ns`, and the settings, with what was chosen and why."""

    scan: Scan
    at_ns: int
    asked: Preprocess
    chosen: Preprocess
    why: str
    source: dict[str, Any]
    shard_bytes: int
    order: str
    versions: dict[str, str]
    #: What it says of sha256 and keys.
    trace: dict[str, Any]

    def check(self, source: Source, asked: Preprocess, options: BuildOptions) -> None:
        """Settings that are given must be those of the plan; those left at their defaults, altogether, are taken from it.  Raises OptionError."""
        planned, given = dict[str, Any](), dict[str, Any]()
        if asked != Preprocess():
            planned["preprocess"], given["preprocess"] = self.asked.settings(), asked.with_parts(self.scan.parts, self.scan.beside).settings()
        if _says_something(identity := source.identity()) or any(identity.get(name) != self.source.get(name) for name in _NO_SETTINGS):
            planned["source"], given["source"] = self.source, identity
        if options.shard_bytes != SHARD_BYTES:
            planned["shard_bytes"], given["shard_bytes"] = self.shard_bytes, options.shard_bytes
        if options.seed is not None:
            planned["order"], given["order"] = self.order, f"shuffled:{options.seed}"
        if differs := list(describe_changes(planned, given)):
            raise OptionError(
                f"a part is built as it was planned, but {_some(differs)} was given; leave the settings out, or run --plan-only again with these",
                differs=differs,
            )

    def options(self, given: BuildOptions) -> BuildOptions:
        """The options of a part: those of the plan where none were given.  Raises OptionError where others were, or no secret."""
        sha256, keys = given.sha256 or "sha256" in self.trace, given.keys
        if keys == "plain" and self.trace.get("keys") == "hash":
            keys = "hash"
        made = replace(given, shard_bytes=self.shard_bytes, order=self.order, sha256=sha256, keys=keys)
        if differs := list(describe_changes(self.trace, Trace.of(made, self.scan.lent).settings)):
            secret = "; the secret of --keys hash:FILE is in no plan: give it with each part" if keys == "plain" else ""
            raise OptionError(f"a part is built as it was planned, and this differs: {_some(differs)}{secret}", differs=differs)
        return made

    def wanted(self, source: Source, options: BuildOptions) -> Wanted:
        """What the plan is to make."""
        made = Wanted.of(self.asked, self.chosen, self.why, source, self.scan, options)
        return replace(made, settings={**made.settings, "source": self.source})


def _says_something(identity: Mapping[str, object]) -> bool:
    """Was any setting of a source given?"""
    return any(value not in (None, False, []) for name, value in identity.items() if name not in _NO_SETTINGS)


def _some(differs: list[str]) -> str:
    """The first few settings that differ, and how many more there are."""
    return "; ".join(differs[:_NAMED]) + (f"; and {len(differs) - _NAMED:,} more" if len(differs) > _NAMED else "")


def _path(out: Path) -> Path:
    return out / ".build" / "plan"


def plan_exists(out: Path) -> bool:
    """Is there something left of a plan?"""
    return _path(out).exists() or (out / ".build" / "parts").exists()


def save_plan(out: Path, scan: Scan | None, at_ns: int, settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Save what parts have to know, in place of an earlier plan: the `settings` that an index will have, and `more`; `scan` where they share one.

    The caller holds the lock.
    """
    remove_plan(out)
    save_listing(_path(out), scan or Scan(Keys.of([]), *labelled(None, 0), np.zeros(0, STAT_DTYPE)), at_ns, {**_planned(settings), **more})


def more_of(wanted: Wanted, versions: dict[str, str]) -> dict[str, Any]:
    """What parts of a build of images have to know beside its settings."""
    return {"asked": wanted.asked.settings(), "why": wanted.why, "versions": versions}


def _planned(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "preprocess": settings["preprocess"],
        "source": settings["source"],
        "shard_bytes": settings["shard_bytes"],
        **{name: settings.get(name) for name in ("order", "sha256", "keys")},
    }


def refuse_other(out: Path, settings: dict[str, Any]) -> None:
    """Raises OptionError where parts were planned with other settings than a plain build now has: it would throw away what they made."""
    head = load_head(_path(out))
    if head is None:
        return
    now = _planned(settings)
    if differs := list(describe_changes({name: head.get(name) for name in now}, now)):
        raise OptionError(
            f"{out}: parts were planned with other settings ({_some(differs)}): give those of --plan-only to finish what the parts "
            "began, or run --plan-only again with these",
            differs=differs,
        )


def load_plan(out: Path) -> Plan:
    """Raises BuildError where there is none that can be used."""
    found = load_listing(_path(out))
    try:
        if found is None:
            raise KeyError
        scan, at_ns, head = found
        asked, chosen = (Preprocess.from_settings(head[name]) for name in ("asked", "preprocess"))
        made = head["source"], head["shard_bytes"], head["order"] or "source", head["versions"]
        trace = {name: head[name] for name in ("sha256", "keys") if head[name] is not None}
        return Plan(scan, at_ns, asked, chosen, head["why"], *made, trace)
    except (KeyError, TypeError, ValueError):
        raise _no_plan(out) from None


def planned_tasks(out: Path, settings: dict[str, Any]) -> str:
    """What a plan of rows says of its shards.  Raises BuildError where there is none, OptionError where it was made with other settings."""
    head = load_head(_path(out))
    if head is None or "tasks" not in head:
        raise _no_plan(out)
    refuse_other(out, settings)
    return str(head["tasks"])


def _no_plan(out: Path) -> BuildError:
    return BuildError(
        f"{out}: there is no plan here (a build that publishes removes it); run the same command with --plan-only in place of --part first"
    )


def remove_plan(out: Path) -> None:
    """Forget plan and parts; sealed shards stay.  The caller holds the lock."""
    _path(out).unlink(missing_ok=True)
    shutil.rmtree(out / ".build" / "parts", ignore_errors=True)


# ---------------------------------------------------------------- one part


@contextlib.contextmanager
def locked(out: Path, part: PartNumber, *, required: bool) -> Iterator[Lock]:
    """Hold the lock of OUT together with other parts, and that of this part alone.  Raises BuildError, naming who has it."""
    if not (out / ".build").is_dir():
        load_plan(out)  # says what to do
    with Lock(out / ".build" / "lock", required=required, shared=True) as lock:
        (out / ".build" / "parts").mkdir(exist_ok=True)
        with Lock(out / ".build" / "parts" / f"{part.name}.lock", required=required):
            yield lock


@contextlib.contextmanager
def scratch_of(out: Path, part: PartNumber) -> Iterator[Path]:
    """A new folder for unfinished files of this part; what an earlier run of it left goes first."""
    folder = out / ".build" / "tmp" / f"part-{part.name}"
    if folder.parent.is_symlink():
        raise BuildError(f"{folder.parent}: a link, expected a folder of a build; remove the link, and run the same command again")
    shutil.rmtree(folder, ignore_errors=True)
    scratch = folder / secrets.token_hex(8)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(folder, ignore_errors=True)
