"""Hides how names, numbers, commands and errors are written out: text that is safe for a terminal, a shell or JSON.  Pure: nothing is printed here.

Whatever a file is called, no line made here holds a control character: names go through `escape`, commands through `quote`.
"""

from __future__ import annotations

import errno
import glob
import os
import shlex
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmcompile.format.canonical import as_bytes, as_text, name_from_json, name_to_json

__all__ = [
    "add_options",
    "counted",
    "duration",
    "escape",
    "examples",
    "go_on",
    "json_ready",
    "moment",
    "name",
    "next_parts",
    "number",
    "program_words",
    "quote",
    "size",
]
__all__ += ["next_parts", "system_line", "typed"]

#: Keys written out in a command to go on; more would be hard to read, and the next run names the rest.
MOST_KEYS = 20


def escape(text: object) -> str:
    """`text` on one line that is safe for a terminal: control, format and invalid characters as \\n, \\x1b, \\u202e, \\xff.

    Backslashes stay as they are, so escaping twice changes nothing.
    """
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escaped(c) for c in str(text))


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as os.fsdecode keeps it
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def quote(arguments: Iterable[str]) -> str:
    """A command line that a shell reads back as exactly these arguments, without a control character in it.

    Plain words stay; others are quoted; those with unprintable characters become $'…' with octal bytes (bash, zsh, ksh, POSIX 2024).
    """
    return " ".join(shlex.quote(a) if escape(a) == a else _dollar(a) for a in arguments)


def _dollar(argument: str) -> str:
    out = []
    for char in argument:
        if char in "\\'":
            out.append("\\" + char)
        elif escape(char) == char:
            out.append(char)
        else:
            out += [f"\\{byte:03o}" for byte in as_bytes(char)]
    return "$'" + "".join(out) + "'"


def program_words(called: str, python: str, which: Callable[[str], str | None]) -> list[str]:
    """How this program can be called again, as short as it can be typed: `called` is sys.argv[0], `python` sys.executable."""
    folder, program = os.path.split(called)
    if program == "__main__.py" and os.path.basename(folder) == "mmcompile":
        short = os.path.basename(python)
        return [short if which(short) == python else python, "-m", "mmcompile"]
    return [called if program == "mmcompile" and which("mmcompile") != called else "mmcompile"]


def add_options(arguments: Sequence[str], added: Sequence[str], dropped: str = "") -> list[str]:
    """A command's arguments with more options, before a `--` if there is one, and without the option `dropped` and its value."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept: list[str] = []
    skip = False
    for argument in arguments[:end]:
        if not skip and not (dropped and argument.startswith(dropped + "=")) and argument != dropped:
            kept.append(argument)
        skip = not skip and bool(dropped) and argument == dropped
    return [*kept, *added, *arguments[end:]]


def go_on(arguments: Sequence[str], details: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """What can be done next, from the details of a build's error: (a line that introduces it, arguments) of each command."""
    rejects, keys = details.get("rejects"), details.get("keys")
    kept = "everything finished is kept; to go on"
    if isinstance(rejects, int) and "allowed" in details:
        return [(f"{kept} without them:", add_options(arguments, ["--max-rejects", str(rejects)], "--max-rejects"))]
    if isinstance(keys, list | tuple) and keys and all(isinstance(k, str | bytes) for k in keys):
        named = [glob.escape(as_text(k) if isinstance(k, bytes) else k) for k in keys]  # --exclude takes patterns
        total = max(len(named), int(details.get("count", 0)))
        if isinstance(more := details.get("max_rejects"), int):
            arguments = add_options(arguments, ["--max-rejects", str(more)], "--max-rejects")
        listing = details.get("exclude_file")
        if total > MOST_KEYS and isinstance(listing, str) and not any(a == "--config" or a.startswith("--config=") for a in arguments):
            return [(f"{kept} without them, as listed in that file:", add_options(arguments, ["--config", listing]))]
        added = [word for key in named[:MOST_KEYS] for word in ("--exclude", key)]
        whom = "it" if total == 1 else "them" if total <= MOST_KEYS else f"the first {MOST_KEYS} of {total:,} files (the next run names the rest)"
        return [(f"{kept} without {whom}:", add_options(arguments, added))]
    if details.get("redecode") is True:
        return [("to decode them again:", add_options(arguments, ["--redecode"]))]
    before, now = details.get("before"), details.get("now")
    if isinstance(before, str) and isinstance(now, str):
        return [("to change:", add_options(arguments, now.split())), ("to go on as before:", add_options(arguments, before.split()))]
    return []


def next_parts(called: Sequence[str], arguments: Sequence[str], shards: int, planned: bool, part: str | None) -> list[str]:
    """What can be done after a plan for parts, or after one part: lines to read and commands."""
    plain = add_options([a for a in arguments if a != "--plan-only"], [], "--part")
    publish = quote([*called, *plain])
    if planned:
        count = max(1, min(shards, 16))
        one = quote([*called, *add_options(plain, ["--part", "I/N"])]).replace("--part I/N", f'--part "$SLURM_ARRAY_TASK_ID/{count}"')
        return [
            f"next: parts, here {count} for a Slurm array (--array=0-{count - 1}); any number does, on any machines, each as often as it takes:",
            one,
            "then, to finish what is missing and publish:",
            publish,
        ]
    return [] if part is None else ["next, when all parts are done: the command of --plan-only without it finishes what is missing and publishes"]


def json_ready(value: Any) -> Any:
    """`value` as JSON values: a text that is no UTF-8 becomes {"bytes": "<percent-encoded>"}, as in the index; in a dict's keys it is escaped."""
    if isinstance(value, Mapping):
        return {_json_key(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(v) for v in value]
    if isinstance(value, str | bytes):
        try:
            return name_to_json(value)
        except UnicodeEncodeError:  # a lone surrogate that is no byte of a file name
            return escape(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None  # JSON has no NaN and no infinity
    if callable(getattr(value, "item", None)):  # a numpy number
        return json_ready(value.item())
    return escape(value)


def _json_key(key: object) -> str:
    text = as_text(key) if isinstance(key, bytes) else str(key)
    return text if text.isascii() or isinstance(json_ready(text), str) else escape(text)


def size(count: int) -> str:
    """Bytes for a person: "512 bytes", "1.5 GiB"."""
    if count < 1024:
        return f"{count} byte{'s' if count != 1 else ''}"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 999.95 or unit == "TiB":
            return f"{value:,.1f} {unit}"
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Seconds for a person: "0.4 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def number(count: int, noun: str) -> str:
    """ "1 sample", "2,000 samples", "2 classes" """
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def counted(count: int, what: str) -> str:
    """A count of what is called by a plural, or by no noun: "2 rows of a.csv", "1 row of a.csv", "1 hidden"."""
    first, blank, rest = what.partition(" ")
    if count == 1 and first.isalpha() and first.endswith("s") and not first.endswith("ss"):
        first = first.removesuffix("es" if first.endswith(("sses", "xes")) else "s")
    return f"{count:,} {first}{blank}{rest}"


def name(value: Any) -> str:
    """A name in JSON values (a text, or {"bytes": …}) as it can be shown."""
    return escape(typed(value))


def typed(value: Any) -> str:
    """A name in JSON values as os.fsdecode has it."""
    return name_from_json(value)


def moment(seconds: float) -> str:
    """A time in seconds since 1970 as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def system_line(error: OSError) -> str:
    """A failed system call as one line: which file, what went wrong."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += "; free some space, then run the same command again"
    if error.errno == errno.ENOENT and error.filename is None:  # the one call that names no file
        reason = "the current folder is no longer there; go to one that is"
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason


def examples(details: Mapping[str, Any], most: int) -> list[str]:
    """A line for each of the first bad files that an error names, with the reason, and a last one where there are more."""
    found = details.get("examples") or ()
    lines = []
    for entry in list(found)[:most]:
        key, reason = entry if isinstance(entry, list | tuple) and len(entry) == 2 else (entry, "")
        key = as_text(key) if isinstance(key, bytes) else str(key)
        lines.append(escape(f"  {key}: {reason}" if reason else f"  {key}"))
    return [*lines, "  and more"] if len(found) > most else lines
