"""Hides how a report comes about: what is read, in which order, and how it becomes one HTML file, or a PNG file for each picture of some rows.

Nothing is written into the dataset, and no file that is not a report of ours is replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mmcompile import text
from mmcompile.errors import OptionError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.describe import describe
from mmcompile.format.rejects import load_rejects
from mmcompile.report import cards, facts, sections
from mmcompile.report.charts import escape
from mmcompile.report.gallery import Gallery
from mmcompile.report.opened import Opened, Sample
from mmcompile.report.page import MARK, Section, render
from mmcompile.report.page import facts as first_facts
from mmcompile.report.pick import Picker, spread
from mmcompile.report.place import check_outside, check_replaceable, save
from mmcompile.report.replay import Replay, replayed
from mmcompile.report.rowfiles import save_rows

__all__ = ["Report", "write_report"]

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

#: Of each class up to so many samples, of so many rows at most in all, and of so many pixels, so that a page stays a few megabytes.
_EACH, _MOST, _MOST_PIXELS = 3, 72, 7_500_000
#: Bytes of the rows that are shown, which are in memory together.
_MOST_BYTES = 256 << 20
#: Rows whose values make the histograms, fewer where each holds the pixels of a picture, and the bytes of them that are read.
_HISTOGRAM_ROWS, _HISTOGRAM_PICTURES, _HISTOGRAM_BYTES = 4096, 512, 48 << 20
#: Rows of a table of samples.
_TABLE_ROWS = 30


@dataclass(frozen=True)
class Report:
    """What was written: the page, or the PNG `files`; of which `rows`; in how many seconds."""

    root: str
    generation: str
    file: str | None
    files: tuple[str, ...]
    bytes: int
    rows: tuple[int, ...]
    samples: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The document of `report --json`."""
        return {
            "command": "report",
            "root": name_to_json(self.root),
            "generation": self.generation,
            "file": None if self.file is None else name_to_json(self.file),
            "files": [name_to_json(name) for name in self.files],
            "bytes": self.bytes,
            "rows": list(self.rows),
            "samples": self.samples,
            "seconds": self.seconds,
        }


def write_report(
    out: str | os.PathLike[str],
    file: str | os.PathLike[str] | IO[bytes] | None = None,
    *,
    split: str | None = None,
    rows: Sequence[int] | None = None,
    replay: Replay | None = None,
    raw: str | os.PathLike[str] | None = None,
    images: bool = True,
    seed: int = 0,
) -> Report:
    """Write a page about the dataset in `out`: one HTML file that needs no network, with samples, classes, sources, values, rejects and settings.

    file: where to; by default NAME-report.html in the current folder, for a dataset in a folder called NAME.  With `rows` a name that does not end in
        .html or .htm is a folder: a PNG file for each picture of each of these rows is written there, and no page.  Folders that are missing are
        made.  What has `write` gets the bytes of the page, and stays open.
    split: report on samples of this split alone; numbers of rows are those in it then, as with `MMapShardDataset(out, split)`.
    rows: show these samples.  By default a few of each class, picked by `seed`.
    replay: beside each sample, what that augmentation makes of it in that epoch of that seed.
    raw: where the sources are, a folder, an archive or a list, to show what can be seen of those that were rejected.
    images: without them no picture is in the page; an OptionError where only pictures would be written.

    A report of ours is replaced, any other file that is there is an OptionError, and so is a file within `out`, and a row that there is not.
    Raises FormatError for what lies on disk.
    """
    began = time.monotonic()
    data = Opened(os.fspath(out), split)
    try:
        chosen = None if rows is None else _checked(data, rows)
        if raw is not None and not os.path.exists(raw):
            raise OptionError(f"--raw {os.fspath(raw)}: there is no such folder or file; name what the dataset was built from", options=["raw"])
        target, stream, place = None, None, file or f"{Path(data.root).name or 'dataset'}-report.html"
        if isinstance(place, str | os.PathLike):
            target = Path(os.path.abspath(place))
            check_outside(target, Path(data.root))
        else:
            stream = place
        told: dict[str, Any] = {"root": str(out), "generation": data.reader.generation, "samples": len(data)}
        if chosen is not None and target is not None and target.suffix.lower() not in (".html", ".htm"):
            if not images:
                raise OptionError(f"--no-images with -o {target}: a folder of pictures; name a page, as in -o report.html", options=["no-images"])
            saved, total = save_rows(data, target, chosen, replay)
            return Report(file=None, files=tuple(map(str, saved)), bytes=total, rows=tuple(chosen.tolist()), seconds=time.monotonic() - began, **told)
        if target is not None:
            check_replaceable(target, MARK.encode())
        info = facts.with_labels(describe(data.root, data.reader.generation), data)
        picked, each = (chosen, 0) if chosen is not None else _picked(data, seed)
        page = _page(data, info, picked, _Wish(str(out), split, replay, raw, images, seed, rows is not None, each))
        content = page.encode("utf-8", "backslashreplace")
        if target is not None:
            save(target, content)
        if stream is not None:
            stream.write(content)
        rows_shown = tuple(picked.tolist())
        return Report(
            file=None if target is None else str(place), files=(), bytes=len(content), rows=rows_shown, seconds=time.monotonic() - began, **told
        )
    finally:
        data.close()


@dataclass(frozen=True)
class _Wish:
    """What was asked for, and how many of each label are shown: 0 where labels do not decide."""

    out: str
    split: str | None
    replay: Replay | None
    raw: str | os.PathLike[str] | None
    images: bool
    seed: int
    told: bool
    each: int


# ---------------------------------------------------------------- which rows


def _checked(data: Opened, rows: Sequence[int]) -> Rows:
    found = np.array(list(dict.fromkeys(int(r) for r in rows)), np.int64)
    if len(bad := found[(found < 0) | (found >= len(data))]):
        where = f"split {data.split.name}" if data.split.name in {s.name for s in data.index.splits} - {"all"} else "dataset"
        raise OptionError(f"--rows {bad[0]}: the {where} has {text.number(len(data), 'sample')}, counted from 0", options=["rows"])
    return found


def _picked(data: Opened, seed: int) -> tuple[Rows, int]:
    """Rows to show: up to so many of each label, fewer where they are large; 0 where they are from everywhere, whatever their labels."""
    if cards.plain(data):
        return spread(0, len(data), _TABLE_ROWS, seed), 0
    pixels = sum(np.prod(f.sample_shape) for f in data.fields if f.meaning in ("image", "volume"))
    most = int(np.clip(_MOST_PIXELS // max(1, min(pixels, 4 * cards.MOST_SIDE**2)), 12, _MOST))
    most = max(1, min(most, _MOST_BYTES // max(1, data.index.row_bytes)))
    if data.label is None:
        return spread(0, len(data), min(most, 24), seed), 0
    picker = Picker(seed, _EACH)
    for rows, labels in data.labels():
        picker.add(rows, labels)
    return picker.found(most)


# ---------------------------------------------------------------- the page


def _page(data: Opened, info: dict[str, Any], rows: Rows, wish: _Wish) -> str:
    samples = list(data.samples(rows))
    gallery = Gallery(data, samples)
    drawn, looked = _histograms(data, gallery, wish.seed)
    found = facts.read_sources(data)
    rejects = load_rejects(Path(data.root), data.index)
    shown = None
    if wish.raw is not None and wish.images and rejects:
        from mmcompile.report.rejects import thumbnails

        settings = info["settings"].get("source")
        shown = thumbnails(rejects, os.fspath(wish.raw), settings if isinstance(settings, dict) else {})
    whole, info = info, facts.of_split(info, data.split.name)
    name = Path(data.root).name or str(data.root)
    parts = [
        Section("samples", "Samples", _samples(data, gallery, samples, wish, len(info["classes"] or ()))),
        Section("classes", "Classes", sections.class_bars(info)),
        Section("sources", "Sources", sections.sources(found) if found is not None else ""),
        Section("values", "Values", sections.values(info, drawn, looked) if len(data) else ""),
        Section("problems", "Rejects and repeats", sections.problems(info, rejects, shown, wish.raw is None and wish.images)),
        Section("settings", "Settings", sections.settings(whole, _commands(wish.out))),
        Section("storage", "Storage", sections.storage(whole, _shards(data))),
    ]
    of_split = [] if whole is info else [f"split {escape(data.split.name)}; rejects, repeats and storage are of the whole dataset"]
    published = [f"published {text.moment(g['modified'])}" for g in info["generations"] if g["name"] == data.reader.generation]
    sub = " &middot; ".join([*of_split, f"generation <code>{data.reader.generation[:8]}</code>", *published])
    if wish.out.rstrip("/") != name:
        sub = f"<code>{escape(wish.out)}</code> &middot; {sub}"
    foot = f"Made by mmcompile report from generation <code>{data.reader.generation}</code>. Nothing in this page comes from a network."
    return render(name, sub, first_facts(info, None if whole is info else whole), parts, foot)


def _samples(data: Opened, gallery: Gallery, samples: list[Sample], wish: _Wish, classes: int) -> str:
    if not samples:
        return f"<p>{'No samples were asked for' if len(data) else 'This dataset holds no samples'}.</p>"
    if wish.told:
        said = f"{text.number(len(samples), 'sample')}, as asked for."
    elif len(samples) == len(data):
        said = f"{'All' if len(data) > 1 else 'The'} {text.number(len(samples), 'sample')}."
    elif not wish.each:
        said = f"{len(samples):,} of {text.number(len(data), 'sample')}, from everywhere in the dataset."
    else:
        labels = len({s.label for s in samples})
        of = f"{labels:,} of {classes:,} classes" if classes > labels else f"each of {text.number(labels, 'class')}"
        said = f"{f'Up to {wish.each}' if wish.each > 1 else 'One'} of {of}, picked by seed {wish.seed}."
    if wish.split is not None and len(data.index.splits) > 1:
        said += " Their numbers count within the split, as with --rows and --split."
    again = {} if wish.replay is None else replayed(data, [s.row for s in samples], wish.replay)
    if wish.replay is not None:
        said += f" Beside each, what training gets in epoch {wish.replay.epoch} of seed {wish.replay.seed}"
        said += "." if wish.replay.augment is None else f" with <code>{escape(repr(wish.replay.augment))}</code>."
    body = cards.as_table(data, samples) if cards.plain(data) else cards.cards(gallery, samples, again, wish.images)
    notes = f'<p class="quiet">{"<br>".join(escape(line) for line in gallery.notes())}</p>' if wish.images and gallery.notes() else ""
    return f"<p>{said}</p>{notes}{cards.legend(gallery.legend)}{body}"


def _histograms(data: Opened, gallery: Gallery, seed: int) -> tuple[list[tuple[str, str, Sequence[facts.Histogram]]], int]:
    """(field, what its numbers are, histograms) of what is neither a label nor text nor a list of places; and of how many rows."""
    each = sum(f.row_bytes for f in data.fields) or 1
    most = _HISTOGRAM_PICTURES if any(f.meaning in ("image", "volume") for f in data.fields) else _HISTOGRAM_ROWS
    rows = spread(0, len(data), int(np.clip(_HISTOGRAM_BYTES // each, 1, most)), seed)
    found: list[tuple[str, str, Sequence[facts.Histogram]]] = []
    for f in data.fields:
        if f.meaning not in ("image", "volume", "value") or f.categories is not None or f.unit is not None or not len(rows):
            continue
        if any(other.count == f.name for other in data.fields):
            continue
        said = f"as stored, {f.dtype}"
        if f.name in gallery.looks and gallery.looks[f.name].mean is not None:
            said += ", normalised: (number above - mean) / std"
        elif f.scale != 1:
            said += f", where {f.scale:,.0f} is 1 above"
        values = data.column(f, rows)
        if (counting := next((other for other in data.fields if other.name == f.count), None)) is not None:
            filled = np.arange(values.shape[1]) < np.reshape(data.column(counting, rows), (-1, 1))
            values = values[filled][:, None] if f.views is None else values
        found.append((f.name, said, facts.histograms(f, values)))
    return found, len(rows)


def _commands(out: str) -> list[str]:
    root = text.quote([out])
    return [f"mmcompile info {root} --config > build.json", "mmcompile build RAW OUT --config build.json"]


def _shards(data: Opened) -> list[tuple[int, int]]:
    each = data.index.row_bytes
    return [(count, count * each) for count in data.reader.table["rows"].tolist()]
