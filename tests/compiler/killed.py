"""A build to be killed: `python -m tests.compiler.killed RAW OUT [NOTES]` says when it begins, and when it was interrupted."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from mmcompile.format.store import is_url
from tests.compiler.builds import run
from tests.compiler.planted import Planted


def main(raw: str, out: str, notes: str = "") -> None:
    source = Planted(raw, parent=0, notes=notes) if notes else Path(raw)
    print("begin", flush=True)
    try:
        run(source, out if is_url(out) else Path(out), rows=1, workers=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


def in_session(raw: Path, out: Path, said: Connection) -> None:
    """The same in a process that a fork server has made, which begins a session; it says when it begins, and how long it took."""
    os.setsid()
    said.send(None)
    began = time.monotonic()
    run(raw, out, rows=1, workers=2)
    said.send(time.monotonic() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
