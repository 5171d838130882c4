"""Hides how a build that publishes nothing says why, and what to do: files that could not be settled, too many rejects, a disk that failed."""

from __future__ import annotations

import errno
import glob
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from mmcompile.errors import BuildError, DecodeError, SourceError
from mmcompile.format.canonical import as_text, name_from_json
from mmcompile.format.commit import write_atomic
from mmcompile.format.index import INDEX_LIMIT

__all__ = ["failed_call", "listed_rejects", "too_many", "unsettled", "unsettled_part"]

#: Most keys and reject lines that an error carries.
_SHOWN = 1000
#: Bytes of a list of keys that can still be excluded one by one: they become settings, and the index has to hold those.
_MOST_EXCLUDED = INDEX_LIMIT // 4


def listed_rejects(out: Path) -> Path:
    """Where the rejects of an unfinished build are listed."""
    return out / ".build" / "rejects.jsonl"


def failed_call(out: str, error: OSError, *, staged: bool) -> BuildError:
    """The error where a system call failed; `staged`: OUT is a URL, and shards are made in a temporary folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"in {tempfile.gettempdir()}, where shards are made (TMPDIR)" if staged else "on the device"
        what = f"no space left {where}; what is finished is kept: free some space and run the same command again"
    else:
        where = "" if error.filename is None or str(error.filename) == os.path.abspath(out) else f"{error.filename}: "
        what = f"{where}{error.strerror or error}; whatever was finished is kept, and the same command goes on when this is mended"
    return BuildError(f"{out}: {what}", errno=error.errno)


def unsettled(out: Path, failures: list[tuple[bytes, str]], rejects: int, allowed: int) -> SourceError:
    """The error where files, (key, reason) each, could be neither stored nor rejected.  Writes the list of them as options of the next build."""
    failures = sorted(failures)
    keys = [as_text(key) for key, _ in failures]
    listing, exclude = out / ".build" / "exclude.json", json.dumps({"exclude": [glob.escape(key) for key in keys]}).encode()
    if written := len(exclude) < _MOST_EXCLUDED:
        write_atomic(listing, exclude)
    listed = listed_rejects(out)
    return SourceError(
        f"{_what(failures)}; all else is finished and kept, nothing is published: mend them, or leave them out"
        + (f"; {rejects:,} bad images stand in {listed}" if rejects else ""),
        keys=keys[:_SHOWN],
        exclude_file=str(listing) if written else None,
        max_rejects=rejects if rejects > allowed else None,
        rejects=rejects,
        report=str(listed),
        reasons=[reason for _, reason in failures[:_SHOWN]],
        count=len(failures),
    )


def unsettled_part(out: Path, part: str, failures: list[tuple[bytes, str]]) -> SourceError:
    """The same for one part of a build, whose plan holds these files."""
    failures = sorted(failures)
    return SourceError(
        f"{out}: {_what(failures)}; all else of part {part} is sealed: mend them and run the part again, or let the build that publishes see to them",
        part=part,
        failed=[as_text(key) for key, _ in failures[:_SHOWN]],
        reasons=[reason for _, reason in failures[:_SHOWN]],
        count=len(failures),
    )


def _what(failures: list[tuple[bytes, str]]) -> str:
    first = "; ".join(f"{as_text(key)!r}: {reason}" for key, reason in failures[:3])
    return f"{len(failures):,} file{'s' if len(failures) > 1 else ''} could not be read or settled ({first}{', …' if len(failures) > 3 else ''})"


def too_many(out: Path, rejects: list[dict[str, Any]], items: int, allowed: int) -> DecodeError:
    """The error where more of the `items` were rejected than allowed, or all of them."""
    listed = listed_rejects(out)
    if len(rejects) == items:
        message, _ = Counter(line["message"] for line in rejects).most_common(1)[0]
        which = "the one image was" if items == 1 else f"all {items:,} images were"
        return DecodeError(
            f"{out}: {which} rejected ({message}), so there is nothing to publish; see {listed}",
            rejects=len(rejects),
            report=str(listed),
        )
    reasons = Counter(line["code"] for line in rejects)
    were = "was" if len(rejects) == 1 else "were"
    return DecodeError(
        f"{len(rejects):,} of {items:,} images {were} rejected ({', '.join(f'{n:,} {code}' for code, n in reasons.most_common())}), "
        f"{allowed:,} allowed; all others are finished and kept, nothing is published: see {listed}",
        rejects=len(rejects),
        allowed=allowed,
        report=str(listed),
        examples=[(name_from_json(line["key"]), line["message"]) for line in rejects[:10]],
    )
