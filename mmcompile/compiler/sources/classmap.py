"""Hides where a class map that was fixed comes from: another dataset, or a file of names."""

from __future__ import annotations

import os
from pathlib import Path

from mmcompile.errors import FormatError, OptionError
from mmcompile.format.canonical import as_text, name_from_json, parse, read_limited
from mmcompile.format.index import load_classes, load_index
from mmcompile.format.mirror import mirrored
from mmcompile.format.store import is_url, on_disk

__all__ = ["read_classes"]

#: A longer file of names is none: as much as a list of names may be in a dataset.
_LIMIT = 256 << 20


def read_classes(place: str) -> tuple[str, ...]:
    """The names of classes by their number: those of a dataset (a folder or URL), or of a file, one name a line or a list in JSON.

    Raises OptionError, naming the place, the line where there is one, and what is expected; FormatError for a dataset that is damaged.
    """
    place = str(on_disk(place))
    if is_url(place) or os.path.isdir(place):
        found = (
            mirrored(place, lambda mirror: _of_dataset(mirror.folder), ("samples", "keys", "label")) if is_url(place) else _of_dataset(Path(place))
        )
        if found is None:
            raise _wrong(place, "this dataset has no classes; give one that has, or a file with one name a line")
        return found
    try:
        data = read_limited(Path(os.path.realpath(place)), _LIMIT)
    except FileNotFoundError:
        raise _wrong(place, "no such file or folder; expected a dataset, or a file with one name a line") from None
    except (FormatError, OSError) as error:
        raise _wrong(place, f"cannot be read ({error})") from error
    lines = _json_list(place, data) if data.lstrip()[:1] in (b"[", b"{") else _lines(data)
    seen: dict[str, int] = {}
    for number, name in enumerate(lines, 1):
        if not name or "/" in name:
            raise _wrong(place, f"entry {number:,}: expected the name of a class, which is that of a folder, found {name!r:.80}")
        if name in seen:
            raise _wrong(place, f"entries {seen[name]:,} and {number:,} are both {name!r:.80}; each class has one number")
        seen[name] = number
    if not lines:
        raise _wrong(place, "no name in it; expected one a line, or a list in JSON")
    return tuple(lines)


def _of_dataset(root: Path) -> tuple[str, ...] | None:
    return load_classes(root, load_index(root)[0])


def _json_list(place: str, data: bytes) -> list[str]:
    try:
        document = parse(data, Path(place))
    except FormatError as error:
        raise _wrong(place, f"no JSON ({error})") from None
    if not isinstance(document, list):
        raise _wrong(place, "expected a list of names in JSON, or one name a line")
    try:
        return [name_from_json(name) for name in document]
    except (TypeError, ValueError, LookupError, AttributeError):
        raise _wrong(place, "expected a list of names in JSON: each a text") from None


def _lines(data: bytes) -> list[str]:
    """The lines, without a mark of UTF-8 before the first, or empty lines behind the last; carriage returns before their ends do not count."""
    lines = [as_text(line.removesuffix(b"\r")) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    while lines and not lines[-1]:
        del lines[-1]
    return lines


def _wrong(place: str, why: str) -> OptionError:
    return OptionError(f"--classes-from {place}: {why}", options=["classes-from"])
