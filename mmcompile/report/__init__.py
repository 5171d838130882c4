"""One self-contained HTML page about a dataset: `write_report`.  Loaded on first use: importing this package pulls in nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmcompile.report.replay import Replay
    from mmcompile.report.write import Report, write_report

__all__ = ["Replay", "Report", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "Replay":
        from mmcompile.report.replay import Replay as found
    elif name in __all__:
        from mmcompile.report import write

        return getattr(write, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
