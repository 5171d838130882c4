"""Hides nothing: what a build tells its caller while it runs (Progress) and when it is done (BuildReport)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmcompile.format.fields import Split
    from mmcompile.format.leakage import Repeats

__all__ = ["BuildReport", "Progress", "sizes_of"]


@dataclass(frozen=True)
class Progress:
    """One moment of a build.  `done` of `total` items are settled (stored, copied or rejected); `message` is a line worth showing, or ""."""

    stage: str
    done: int = 0
    total: int = 0
    rejects: int = 0
    message: str = ""


@dataclass(frozen=True)
class BuildReport:
    """What a build did; `to_json()` is valid against schemas/report.schema.json.

    With `plan_only` nothing was built, and with `part` only the shards of one part, of which this run `sealed` some: nothing is published by either.
    `decoded`, `copied` (rows taken over after their hash was checked) and `kept` (rows of shards that were left alone) sum up to `samples`.
    `fields` are what a sample holds, in order, where that is known, `columns` the names of the numbers in those that have such names; `unit`, "image"
    or "row", what was counted.
    `bytes` are those of all files that the dataset names, index and table included, each once; 0 where nothing is published.
    `splits` are the samples of each; `repeats` says which samples have the same source, None where nothing was published.

    With `dry_run` nothing was written: the counts are what a build (or that part) would do (`rejects` those that are known already; every image that
    would be decoded counts as one that can be), `bytes` those of the dataset (of a part: of its shards), `write_bytes` those of them in files that
    are not there yet; both within 2 KiB if all images can be decoded and no two shards turn out to be the same.  `free_bytes` and `estimate_s` say
    whether there is room and how long it may take (None where it cannot be known).
    """

    out: str
    samples: int
    rejects: int
    shards: int
    bytes: int
    seconds: float
    decoded: int = 0
    copied: int = 0
    kept: int = 0
    generation: str | None = None
    classes: tuple[str, ...] | None = None
    splits: dict[str, int] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: str = ""
    fields: tuple[str, ...] = ()
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unit: str = "image"
    geometry: str = ""
    dry_run: bool = False
    plan_only: bool = False
    part: str | None = None
    sealed: int = 0
    free_bytes: int | None = None
    write_bytes: int | None = None
    estimate_s: float | None = None
    workers: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    reject_reasons: dict[str, int] = field(default_factory=dict)
    rejects_file: str | None = None
    warnings: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    repeats: Repeats | None = None

    @property
    def images_per_s(self) -> float:
        """Items settled by this run, a second."""
        return (self.decoded + self.copied + self.rejects) / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"command": "build", **asdict(self), "images_per_s": self.images_per_s}


def sizes_of(splits: Iterable[Split]) -> dict[str, int]:
    """Split -> its samples."""
    return {split.name: split.stop - split.start for split in splits}
