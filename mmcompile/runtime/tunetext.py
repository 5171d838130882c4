"""Hides how a tuning is told: the table and sentences for a person, and the lines of code that make the chosen loader."""

from __future__ import annotations

import keyword
import multiprocessing
from typing import TYPE_CHECKING

from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.tunechoice import Candidate
from mmcompile.runtime.tunetrial import Wish
from mmcompile.text import duration, escape, number, size

if TYPE_CHECKING:
    from mmcompile.runtime.tune import Tuning

__all__ = ["code", "told"]

#: Names that the lines of code have for themselves.
_OURS = frozenset({"batch_transform", "dataset", "epoch", "loader", "mmcompile", "DataLoader"})


def code(dataset: MMapShardDataset, wish: Wish, choice: Candidate) -> tuple[str, ...]:
    """Lines of Python that run as they stand, or where `dataset` is more than a folder and arguments, with it at hand."""
    workers = f"num_workers={choice.num_workers}"
    if choice.prefetch_factor is not None:
        workers += f", prefetch_factor={choice.prefetch_factor}"
    head = ["import mmcompile"]
    if choice.loader == "ShardLoader":
        more = "" if wish.device.type == "cpu" else f", device={str(wish.device)!r}"
        more += "" if wish.augment is None else f", augment=mmcompile.{wish.augment!r}"
        more += "" if wish.batch_transform is None else ", batch_transform=batch_transform"
        made = f"loader = mmcompile.ShardLoader(dataset, batch_size={wish.batch_size}, shuffle=True, {workers}{more})"
    else:
        head.append("from torch.utils.data import DataLoader")
        workers += ", persistent_workers=True" if choice.num_workers else ""
        workers += ", pin_memory=True" if choice.pin_memory else ""
        made = f"loader = DataLoader(dataset, batch_size={wish.batch_size}, sampler=sampler, {workers})"
    body = [_opened(dataset)]
    if wish.batch_transform is not None:
        body.append("# batch_transform: the function that was tuned with")
    if choice.loader == "DataLoader":
        body.append(f"sampler = mmcompile.ShardSampler(dataset, batch_size={wish.batch_size}, shuffle=True)")
    body += [made, "for epoch in range(1):", f"    for {_names(dataset)} in loader:"]
    there = "" if choice.loader == "ShardLoader" or not wish.cuda else f"  # .to({str(wish.device)!r}, non_blocking=True)"
    body.append(f"        pass  # the training step goes here{there}")
    if choice.loader == "DataLoader" and choice.num_workers and multiprocessing.get_start_method() != "fork":
        body = ['if __name__ == "__main__":  # worker processes import this file', *("    " + line for line in body)]
    return (*head, "", *body)


def _opened(dataset: MMapShardDataset) -> str:
    """The line that opens the dataset, or says that it is the one that was given."""
    whole = dataset._chosen is None and dataset._windows is None and dataset._resident is None and dataset.upcoming() is None
    if not whole or dataset._hooked:
        return "# dataset: the one that was tuned"
    given = {"split": dataset._split, "fields": dataset._fields, "crop": dataset._crop, "view": dataset._view}
    given["dtype"] = None if dataset._dtype is None else str(dataset._dtype).removeprefix("torch.")
    given["copy"] = dataset._copy or None
    given["output"] = None if dataset._output == "tuple" else dataset._output
    given["engine"] = None if dataset._reader._asked == "auto" else dataset._reader._asked
    said = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
    return f"dataset = mmcompile.MMapShardDataset({str(dataset.root)!r}{said})"


def _names(dataset: MMapShardDataset) -> str:
    """What a loop calls the parts of a batch."""
    names = [column.name for column in dataset._columns]
    fine = all(name.isidentifier() and not keyword.iskeyword(name) for name in names) and not _OURS & set(names)
    return ", ".join(names) if fine and dataset._output == "tuple" and dataset.transforms is None else "batch"


def told(tuning: Tuning) -> list[str]:
    """All of a tuning, for a terminal."""
    t = tuning
    lines = [
        f"{escape(t.root)}: {number(t.samples, 'sample')}, batches of {t.batch_size:,} ({size(t.batch_bytes)})",
        f"measured in {duration(t.seconds)} on {number(t.cpus, 'CPU')} (load {t.load:.1f}) for device {t.device}, over {t.measured_over}",
    ]
    if t.load > t.cpus:
        lines.append("this machine was busy with other work: what is measured is what that left")
    if t.samples < t.batch_size:
        lines.append(f"a batch of {t.batch_size:,} is more than there is: an epoch is one batch of {t.samples:,}")
    if t.measured_batch < t.batch_size:
        lines.append(f"with batches of {t.measured_batch:,}, as one of {t.batch_size:,} takes too long for this")
    lines += ["", *_machine(t), "", *_table(t), "", f"choice      {t.choice.name}" + _with(t.choice), f"            {t.reason}"]
    if t.step_time_s is not None:
        lines.append(f"            {_step(t)}")
    lines.append(f"bottleneck  {t.bottleneck}: {_WORDS[t.bottleneck]}")
    lines += [f"            {text}" for text in t.advice]
    return [*lines, "", "to paste:", "", *map(escape, t.lines)]


#: What a bottleneck is, in words.
_WORDS = {
    "consumer": "the loader is faster than training",
    "disk": "rows come from the disk as fast as it gives them",
    "gather": "copying rows from memory to memory",
    "convert": "reading the stored bytes and computing the numbers",
    "transform": "the transform of samples or batches",
    "transfer": "copying batches to the device",
    "loop": "what Python does once a batch",
    "processes": "bringing batches from one process to another",
}


def _machine(t: Tuning) -> list[str]:
    """What each part gives alone, and how far the choice is from that."""
    used = {limit.part: limit for limit in t.limits}
    rows = [("memory", ", ".join(f"{rate / 1e9:.1f} GB/s with {number(k, 'thread')}" for k, rate in t.memcpy.items()))]
    disk = t.disk
    if disk.sequence_bytes_per_s is None or disk.random_bytes_per_s is None:
        rows.append(("disk", disk.note))
    else:
        speeds = f"{disk.sequence_bytes_per_s / 1e9:.2f} GB/s in sequence, {disk.random_bytes_per_s / 1e9:.2f} GB/s at random"
        rows.append(("disk", f"{speeds} ({disk.random_samples_per_s or 0:,.0f} samples/s); {disk.note}"))
    for part in ("gather", "convert", "transform", "transfer", "loop"):
        seconds = getattr(t.parts, f"{part}_s")
        if seconds:
            rows.append((part, f"{1 / seconds:,.0f} samples/s in one thread"))
    if t.transfer_bytes_per_s is not None:
        rows.append(("to device", f"{t.transfer_bytes_per_s / 1e9:.1f} GB/s from pinned memory"))
    lines = []
    for part, text in rows:
        if (limit := used.get(part)) is not None:
            alone = getattr(t.parts, f"{part}_s", 0.0)
            more = alone and limit.samples_per_s * alone > 1.01  # its workers share the work
            text += f"; the choice uses {min(1.0, limit.used):.0%} of {f'the {limit.samples_per_s:,.0f} of its workers' if more else 'that'}"
        lines.append(f"{part:<10}  {text}")
    return lines


def _table(t: Tuning) -> list[str]:
    """The candidates, as many lines as there are and one above."""
    fastest = max((c.samples_per_s or 0.0 for c in t.candidates), default=0.0)
    lines = [f"  {'loader':<12}{'workers':>8}{'prefetch':>9}{'pinned':>7}{'samples/s':>12}{'of best':>8}{'rounds':>7}{'memory':>11}"]
    for c in t.candidates:
        mark = "*" if c == t.choice else " "
        head = (
            f"{mark} {c.loader:<12}{c.num_workers:>8}{'-' if c.prefetch_factor is None else c.prefetch_factor:>9}{'yes' if c.pin_memory else '-':>7}"
        )
        if c.samples_per_s is None:
            lines.append(f"{head}  {escape(c.failed or 'not tried')}")
            continue
        memory = "-" if c.peak_bytes is None else size(max(0, c.peak_bytes))
        share = c.samples_per_s / fastest if fastest else 1.0
        lines.append(f"{head}{c.samples_per_s:>12,.0f}{share:>8.2f}{len(c.rates):>7}{memory:>11}")
    return lines


def _with(choice: Candidate) -> str:
    said = [] if choice.prefetch_factor is None else [f"prefetch_factor={choice.prefetch_factor}"]
    said += ["pin_memory=True"] if choice.pin_memory else []
    return f", {', '.join(said)}" if said else ""


def _step(t: Tuning) -> str:
    """How a step compares with a batch."""
    who = "training" if t.device == "cpu" else "the GPU"
    step = t.step_time_s or 0.0
    batch = min(t.batch_size, t.samples) / (t.choice.samples_per_s or 1.0)
    times = f"a step takes {_short(step)}, a batch {_short(batch)}"
    if t.keeps_up:
        seen = "" if t.waited is None else f" (beside steps of that length handing over took {t.waited:.1%} of the time)"
        return f"{who} will not wait: {times}{seen}"
    if t.waited is not None:
        busy = f", as other work took CPUs (load {t.load:.1f})" if t.load > t.cpus else ""
        return f"{who} waited {t.waited:.1%} of the time beside steps of that length{busy}: {times}"
    if batch > step:
        return f"{who} will wait {(batch - step) / batch:.0%} of the time: {times}"
    return f"{who} may wait now and then: {times}, which leaves no margin"


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration(seconds)
