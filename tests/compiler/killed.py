"""A build to be killed: `python -m tests.compiler.killed RAW OUT [NOTES]` says when it begins, how long it took, and when it was interrupted."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mmcompile.format.store import is_url
from tests.compiler.builds import run
from tests.compiler.planted import Planted


def main(raw: str, out: str, notes: str = "") -> None:
    source = Planted(raw, parent=0, notes=notes) if notes else Path(raw)
    print("begin", flush=True)
    began = time.monotonic()
    try:
        run(source, out if is_url(out) else Path(out), rows=1, workers=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
    print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
