"""Hides how results read on a screen: reports in, lines of text out.  Pure: nothing is printed or opened here."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mmcompile.compiler.outcome import BuildReport, Progress
from mmcompile.format.store import is_url
from mmcompile.text import counted, duration, escape, moment, name, number, quote, size, typed

__all__ = ["build_lines", "info_lines", "progress_line", "prune_lines", "repair_lines", "verify_lines"]

#: Lines of one table on the screen; the rest is in a file that the last line names.
MOST_LINES = 12
#: Classes named on the screen.
MOST_CLASSES = 40

#: What is counted, and called by one word in reports, as a person reads it.
_PLAIN = {"more-frames": "images of several frames, of which the first was taken (--frames all takes all of a TIFF as a volume)"}
#: ... of which one should be sure.
_DOUBTFUL = {
    "mask-turned": "masks turned as their images are by EXIF, which leaves their size: --field NAME:orientation=own if they stand already",
}

Pair = tuple[str, str]


def table(rows: Iterable[Pair]) -> list[str]:
    """Lines of two columns; a row without a label goes on under the row above."""
    return [f"  {label:<10} {text}".rstrip() for label, text in rows]


def progress_line(progress: Progress, rate: float | None, *, count: Callable[[int], str] = "{:,}".format, unit: str = " images") -> str:
    """One plain line about a running command; `rate` in units a second, None while unknown; `count` says how a number of units reads."""
    if not progress.total:
        return f"{progress.stage}: {count(progress.done)}" if progress.done else progress.stage
    parts = [f"{progress.stage}: {count(progress.done)} of {count(progress.total)}"]
    if rate:
        parts += [f"{count(round(rate))}{unit}/s"] if round(rate) else []
        parts.append(f"{duration((progress.total - progress.done) / rate)} left")
    if progress.rejects:
        parts.append(number(progress.rejects, "reject"))
    return ", ".join(parts)


# ---------------------------------------------------------------- build


def build_lines(report: BuildReport) -> list[str]:
    """What a person reads when a build (or a dry run) is done."""
    what = number(report.samples, "sample")
    if report.classes is not None:
        what += f" in {number(len(report.classes), 'class')}"
    out = escape(report.out)
    if report.plan_only or report.part is not None:
        return _unpublished_lines(report, f"{out}: {what}")
    head = (
        f"{out}: would hold up to {what}{' (no image was decoded)' if report.unit == 'image' else ''}; nothing was written"
        if report.dry_run
        else f"{out}: {what}"
    )
    rows = _stored(report)
    if list(report.splits) != ["all"]:
        rows.append(("splits", _splits(report.splits.items())))
    rows += _counted("rejects", report.reject_reasons, report.rejects)
    if report.rejects and report.rejects_file:
        rows.append(("", f"each with its reason in {escape(report.rejects_file)}"))
    rows += _counted("left out", report.left_out, sum(report.left_out.values()))
    counts = {_PLAIN.get(word, word): count for word, count in report.counts.items() if word not in _DOUBTFUL}
    rows += _counted("counted", counts, len(counts))
    rows += [] if report.dry_run else _repeats(None if report.repeats is None else report.repeats.to_json(), report.out)
    rows += [("warning", escape(line)) for line in report.warnings]
    rows += [("warning", counted(count, _DOUBTFUL[word])) for word, count in report.counts.items() if word in _DOUBTFUL]
    rows += _dry(report) if report.dry_run else [("took", _took(report))]
    return [head, *table(rows), *([] if report.dry_run else _next(report))]


def _unpublished_lines(report: BuildReport, head: str) -> list[str]:
    """What a person reads after a plan for parts, after one part, or after a dry run of one."""
    rows: list[Pair]
    took = [("took", _took(report))]
    standing = f", {report.kept:,} samples of them sealed or published before" if report.kept else ""
    if report.dry_run:
        head += f" in the {number(report.shards, 'shard')} of part {report.part}; nothing was written"
        rows = [*_stored(report), *_dry(report)]
        took = []
    elif report.part is None:
        head += f" planned in {number(report.shards, 'shard')}{standing}; nothing was built"
        rows = [("geometry", escape(report.geometry))] if report.geometry else []
    else:
        head += f" in the {number(report.shards, 'shard')} of part {report.part}{standing}; nothing was published"
        done = "rows read" if report.unit == "row" else f"decoded, {report.copied:,} copied"
        rows = [("sealed", f"{number(report.sealed, 'shard')}: {report.decoded:,} {done}")]
    rows += _counted("rejects", report.reject_reasons, report.rejects)
    rows += [("warning", escape(line)) for line in report.warnings]
    return [head, *table([*rows, *took])]


def _stored(report: BuildReport) -> list[Pair]:
    shape = " x ".join(str(n) for n in report.shape)
    rows = [
        ("stored", f"{size(report.bytes)} in {number(report.shards, 'shard')}" + (f"; a sample is {report.dtype} ({shape})" if report.dtype else ""))
    ]
    if report.unit == "row" or set(report.fields) - ({"image"} if report.classes is None else {"image", "label"}):
        rows.append(("fields", ", ".join(_with_columns(field, report.columns.get(field, ())) for field in report.fields)))
    if report.geometry:
        rows.append(("geometry", escape(report.geometry)))
    words = ("to decode", "to copy", "kept as they are") if report.dry_run else ("decoded", "copied", "kept as they were")
    if report.unit == "row":
        words = ("to read", *words[1:]) if report.dry_run else ("read", *words[1:])
    parts = [f"{n:,} {word}" for n, word in zip((report.decoded, report.copied, report.kept), words, strict=True) if n]
    if report.copied or report.kept:
        rows.append(("rows", ", ".join(parts)))
    return rows


def _with_columns(field: str, columns: Sequence[str]) -> str:
    """A field, and what its numbers are called."""
    shown = [escape(column) for column in columns[:MOST_LINES]] + ["…"] * (len(columns) > MOST_LINES)
    return field + (f" ({', '.join(shown)})" if shown else "")


def _took(report: BuildReport) -> str:
    with_workers = f" with {number(report.workers, 'worker')}" if report.workers else ""
    per_s = report.images_per_s
    rate = f", {per_s:,.0f} {report.unit}s/s" if (report.decoded or report.copied) and per_s >= 1 else ""  # of a few it says nothing
    return f"{duration(report.seconds)}{rate}{with_workers}"


def _dry(report: BuildReport) -> list[Pair]:
    rows = []
    need = report.bytes if report.write_bytes is None else report.write_bytes
    if report.write_bytes is not None:
        rows.append(("writes", size(need)))
    if report.free_bytes is not None:
        enough = "enough" if report.free_bytes >= need else f"NOT enough: {size(need - report.free_bytes)} are missing"
        rows.append(("free", f"{size(report.free_bytes)} on that disk, {enough}"))
    if report.estimate_s is not None:
        about = f"about {duration(report.estimate_s)}" if report.estimate_s >= 1 else "less than 1 s"
        rows.append(("time", about + (f" with {number(report.workers, 'worker')}" if report.workers else "")))
    return rows


def _splits(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{escape(split)} {count:,}" for split, count in sizes)


def _repeats(found: Mapping[str, Any] | None, root: Any) -> list[Pair]:
    """Samples made from the same bytes, worst first, each kind with an example; that they were not looked for, as the dataset lies at a URL."""
    if found is None and is_url(root):
        return [("duplicates", "not looked for: what lies at a URL would have to be fetched")]
    if found is None or not found["duplicates"]:
        return []
    rows = []
    if found["leaked"]:
        rows.append(("leaked", f"samples that stand in an earlier split, too: {_splits(found['leaked'].items())}{_example(found, 'leaked')}"))
    if found["contradictory"]:
        rows.append(("two labels", f"{number(found['contradictory'], 'sample')} under another label, too{_example(found, 'contradictory')}"))
    count = number(found["duplicates"], "sample")
    rows.append(("duplicates", f"{count} with the same bytes as one before{'' if rows else _example(found, 'samples')}"))
    return rows


def _example(found: Mapping[str, Any], kind: str) -> str:
    """The first example that is of this kind."""
    example = next((e for e in found["examples"] if e[kind]), None)
    return "" if example is None else f" ({_listed([name(key) for key in example['keys']], example['samples'])})"


def _counted(label: str, reasons: Mapping[str, int], total: int) -> list[Pair]:
    """A total, then what it is made of, most first."""
    if not total:
        return []
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    shown = [counted(count, escape(reason)) for reason, count in ordered[:MOST_LINES]]
    if len(ordered) > MOST_LINES:
        shown.append(f"{sum(count for _, count in ordered[MOST_LINES:]):,} for other reasons")
    if label == "rejects" and len(ordered) != 1:
        return [(label, f"{total:,}" + (": " + ", ".join(shown) if shown else ""))]
    return [(label, ", ".join(shown))]


def _next(report: BuildReport) -> list[str]:
    got = ", ".join(report.fields) or ("image" if report.classes is None else "image, label")
    far = is_url(report.out)
    split = f", split={next(iter(report.splits))!r}" if len(report.splits) > 1 else ""
    return [
        "next, in Python:",
        f"  from mmcompile import {'Cache, ' if far else ''}MMapShardDataset",
        f"  ds = MMapShardDataset({report.out!r}{split}{', cache=Cache(FOLDER_ON_A_LOCAL_DISK)' if far else ''})",
        f"  {got} = ds[0]",
    ]


# ---------------------------------------------------------------- verify, prune


def verify_lines(report: Mapping[str, Any]) -> list[str]:
    """What a person reads after `verify`, from its JSON values."""
    root, problems = name(report["root"]), report["problems"]
    read = f"{number(report['files'], 'file')}, {size(report['bytes'])}, in {duration(report['seconds'])}"
    if not problems:
        lines = [f"{root}: every byte is as it was written ({read}; {number(report['samples'], 'sample')})"]
    else:
        lines = [f"{root}: {number(len(problems), 'problem')} ({read})"]
        for problem in problems[:MOST_LINES]:
            lines.append(f"  {name(problem['message'])}")
            if problem["sources"]:
                lines.append("    made from " + _listed([name(s) for s in problem["sources"]], problem["bad_rows"]))
        if len(problems) > MOST_LINES:
            lines.append(f"  and {len(problems) - MOST_LINES:,} more: --json has all of them")
        if not report["repair"]:
            if any(problem["what"] != "index" for problem in problems):  # of an index its line says what to do
                lines.append("to mend it: delete these files (all of the dataset where its table is one of them) and run the same build again")
        elif is_url(report["root"]):
            lines.append("to mend it from the sources, copy the dataset to a disk and run `mmcompile verify FOLDER --repair RAW` there")
        else:
            lines += ["to mend it from the sources:", f"mmcompile verify {quote([typed(report['root'])])} --repair RAW"]
    if report["extra"]:
        lines.append(f"no generation names {_listed([name(n) for n in report['extra']])}; `mmcompile prune` removes what older builds left")
    if report["misnamed"]:
        lines.append(f"not made by mmcompile, and left alone: {_listed([name(n) for n in report['misnamed']])}")
    return lines


def _listed(names: Sequence[str], total: int | None = None, most: int = 3) -> str:
    """Some names, and how many more there are."""
    total = len(names) if total is None else total
    shown = names[:most]
    return ", ".join(shown) + (f" and {total - len(shown):,} more" if total > len(shown) else "")


def repair_lines(report: Mapping[str, Any]) -> list[str]:
    """What a person reads after `verify --repair`, from its JSON values."""
    root, repaired, left = name(report["root"]), report["repaired"], report["missing"]
    lines = [f"{root}: {number(len(repaired), 'file')} built again with the original bytes, {len(left):,} left bad ({duration(report['seconds'])})"]
    if not repaired and not left:
        lines = [f"{root}: every byte is as it was written, there was nothing to repair ({duration(report['seconds'])})"]
    lines += [f"  repaired {name(path)}" for path in repaired[:MOST_LINES]]
    for entry in left[:MOST_LINES]:
        lines.append(f"  {name(entry['path'])}: {name(entry['reason'])}")
        if keys := [name(source["key"]) for source in entry["sources"] if source["key"] is not None]:
            lines.append(f"    needs {_listed(keys)} as it was")
        lines += [f"    {name(v['name'])}: {name(v['wanted'])} is wanted, {name(v['found'])} is found" for v in entry["versions"]]
    more = max(0, len(repaired) - MOST_LINES) + max(0, len(left) - MOST_LINES)
    return [*lines, f"  and {more:,} more: --json has all of them"] if more else lines


def prune_lines(report: Mapping[str, Any]) -> list[str]:
    """What a person reads after `prune`, from its JSON values."""
    generations, files, done = report["generations"], report["files"], report["deleted"]
    kept = f"keeps {number(len(report['kept']), 'generation')}, the current one is {report['current']}"
    lines = [f"{name(report['root'])}: {kept}"]
    if generations or files:
        what = f"{number(len(generations), 'old generation')}, {number(len(files), 'file')}, {size(report['bytes'])}"
        lines.append(f"deleted: {what}" if done else f"can be deleted: {what}")
        lines += [f"  generation {g['name']}, of {moment(g['modified'])}" for g in generations]
        lines += [f"  shards/{escape(f['name'])}, {size(f['bytes'])}" for f in files[:MOST_LINES]]
        if len(files) > MOST_LINES:
            lines.append(f"  and {len(files) - MOST_LINES:,} more: --json has all of them")
        if not done:
            lines.append("nothing is deleted yet (--yes does it); jobs that still read one of these generations will then stop")
    else:
        lines.append("nothing to delete")
    if report["others"]:
        lines.append(f"not made by mmcompile, and left alone: {_listed([name(n) for n in report['others']])}")
    return lines


# ---------------------------------------------------------------- info


def info_lines(report: Mapping[str, Any]) -> list[str]:
    """What is in a dataset, on one screen, from the JSON values of `info`.  Settings and statistics may be a stranger's: any JSON will do."""
    stored = report["bytes"]
    rows = [("samples", f"{report['samples']:,} in {number(report['shards'], 'shard')}, {size(stored['dataset'])}")]
    if stored["folder"] > stored["dataset"]:
        rows[0] = ("samples", f"{rows[0][1]} ({size(stored['folder'])} with all else in the folder)")
    rows += _labelled("fields", [_field(f) for f in report["fields"]])
    if len(report["splits"]) > 1:
        rows.append(("splits", _splits((s["name"], s["stop"] - s["start"]) for s in report["splits"])))
    if report["groups"] is not None:
        groups = report["groups"]
        rows.append(("groups", f"{groups['count']:,}, of {groups['shortest']:,} to {number(groups['longest'], 'row')}"))
    rows += _classes(report["classes"], report["unknown_labels"], labels=any(entry["meaning"] == "class" for entry in report["fields"]))
    rows += _labelled("settings", _settings(report["settings"]))
    source = report["settings"].get("source")
    own = source.get("versions") if isinstance(source, Mapping) else None  # of a dataset in Python that holds pictures
    made = {**(own if isinstance(own, Mapping) else {}), **report["versions"]}
    versions = [f"{escape(k)} {escape(v)}" for k, v in sorted(made.items())]
    rows += _labelled("made with", wrapped([f"pixel revision {report['pixel_revision']}", *versions]))
    rows += _labelled("statistics", _statistics(report["statistics"], {f["name"] for f in report["fields"] if f.get("unit") or f.get("categories")}))
    rejects = report["rejects"]
    rows += _counted("rejects", rejects["reasons"], rejects["count"])
    if rejects["file"] is not None:
        rows.append(("", f"each with its reason in {escape(rejects['file'])}"))
    rows += _repeats(report["repeats"], report["root"])
    generations = [f"{g['name']}, {moment(g['modified'])}{', current' if g['current'] else ''}" for g in report["generations"]]
    if len(generations) > MOST_LINES:
        generations = [*generations[:MOST_LINES], f"and {len(generations) - MOST_LINES:,} more: --json has all of them"]
    rows += _labelled("generations", generations)
    lines = [f"{name(report['root'])}: generation {report['generation']}, format {report['format_version']}", *table(rows)]
    if "samples_file" in report:
        lines.append(f"provenance of every sample: {escape(report['samples_file'])}")
    if missing := report["missing"]:
        what = f"{number(missing, 'shard file')} {'is' if missing == 1 else 'are'} missing"
        lines.append(f"{what}; `mmcompile verify {quote([typed(report['root'])])}` names what is wrong, and how to mend it")
    return lines


def _labelled(label: str, texts: Sequence[str]) -> list[Pair]:
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _field(entry: Mapping[str, Any]) -> str:
    views = entry.get("views")
    shape = " x ".join(str(n) for n in entry["shape"][bool(views) :])
    meaning = entry["meaning"] if entry["meaning"] in ("mask", "boxes", "keypoints", "text") and entry["meaning"] != entry["name"] else ""
    parts = [f"{entry['name']}: {meaning + ', ' if meaning else ''}{entry['dtype']}" + (f" ({shape})" if shape else "")]
    if views:
        parts.append(f"{views:,} views")
    if entry["layout"]:
        parts.append(f"{entry['layout']} on disk")
    for kind in ("columns", "categories"):
        if names := entry.get(kind):
            shown = [name(n) for n in names[:8]]
            parts.append(f"{len(names):,} {kind}: {' '.join(shown)}" + (" …" if len(names) > 8 else ""))
    if entry.get("unit"):
        parts.append(f"times in {entry['unit']}")
    if entry["normalize"]:
        parts.append(f"normalised when read, mean {_numbers(entry['normalize']['mean'])}, std {_numbers(entry['normalize']['std'])}")
    return ", ".join(parts)


def _classes(classes: Sequence[Mapping[str, Any]] | None, unknown: int, *, labels: bool) -> list[Pair]:
    if classes is None:
        return [("classes", "numbers without names" if labels else "none: samples without labels")]
    shown = [name(c["name"]) + ("" if c["count"] is None else f" {c['count']:,}") for c in classes[:MOST_CLASSES]]
    if len(classes) > MOST_CLASSES:
        shown.append(f"and {len(classes) - MOST_CLASSES:,} more")
    if unknown:
        shown.append(f"{number(unknown, 'sample')} of no class")
    return _labelled("classes", wrapped([f"{len(classes):,}: {shown[0]}", *shown[1:]] if shown else ["0"]))


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """Lines of "group: name value, name value"; versions are told by themselves."""
    lines = wrapped(flat({key: value for key, value in settings.items() if not isinstance(value, Mapping)}))
    for key, value in settings.items():
        if isinstance(value, Mapping) and (texts := flat({name: inner for name, inner in value.items() if name != "versions"})):
            lines += wrapped([f"{escape(key)}: {texts[0]}", *texts[1:]])
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "…, --json has all of them"]


def _statistics(splits: Mapping[str, Any], without: Collection[str]) -> list[str]:
    """A line for each split and field that has a mean and a std that say something: `without` those of times and categories."""
    lines = []
    for split, fields in splits.items():
        for field, found in fields.items() if isinstance(fields, Mapping) else ():
            mean, std = (found.get("mean"), found.get("std")) if isinstance(found, Mapping) else (None, None)
            if isinstance(mean, list) and isinstance(std, list) and field not in without:
                lines.append(f"{escape(split)} {escape(field)}: mean {_numbers(mean)}, std {_numbers(std)}")
    return lines[:MOST_LINES]


def _numbers(values: Sequence[Any]) -> str:
    shown = [f"{v:.4g}" if isinstance(v, int | float) and abs(v) < 1e300 else escape(v)[:20] for v in values[:8]]
    return " ".join(shown) + (" …" if len(values) > 8 else "")


def flat(value: Any, path: str = "") -> list[str]:
    """Nested settings as "path value" texts, nulls left out."""
    if isinstance(value, Mapping) and value and "bytes" not in value:
        return [text for key, inner in value.items() for text in flat(inner, f"{path}.{key}" if path else str(key))]
    if value is None or value == [] or value == {}:
        return []
    return [escape(f"{path} {value if isinstance(value, str) else json.dumps(value)}")]


def wrapped(texts: Sequence[str], width: int = 100) -> list[str]:
    """Texts joined by commas, on lines of about `width` characters, at most MOST_LINES of them."""
    lines = [""]
    for text in texts:
        if lines[-1] and len(lines[-1]) + len(text) > width:
            lines[-1] += ","
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + (text if len(text) <= 4 * width else text[: 4 * width] + "…")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = ["…, --json has all of it"]
    return lines if lines[0] else []
