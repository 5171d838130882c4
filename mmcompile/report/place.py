"""Hides where a report may be written: never within a dataset, never over a file that is not a report of ours."""

from __future__ import annotations

import os
from pathlib import Path

from mmcompile.errors import OptionError
from mmcompile.format.commit import write_atomic

__all__ = ["check_outside", "check_replaceable", "save"]

#: What of a file is looked at for who wrote it.
_HEAD = 1024


def check_outside(target: Path, root: Path) -> None:
    """Raises OptionError for a place within the dataset at `root`, by whatever links it is reached."""
    real, within = os.path.realpath(target), os.path.realpath(root)
    if real == within or real.startswith(within + os.sep):
        raise OptionError(f"-o {target}: lies in the dataset, into which nothing is written; name a place outside {root}", options=["output"])


def check_replaceable(target: Path, mark: bytes) -> None:
    """Raises OptionError where a file is there that does not have this mark of ours near its start, a folder, or a pipe.

    A pipe is not opened, which may never end.
    """
    if target.is_dir():
        raise OptionError(f"-o {target}: a folder; name a file, as in -o report.html", options=["output"])
    if target.exists() and not target.is_file():
        raise OptionError(f"-o {target}: a pipe or a device, and a report is a file; give another name", options=["output"])
    try:
        with open(target, "rb") as file:
            ours = mark in file.read(_HEAD)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not ours:
        raise OptionError(f"-o {target}: is there already and is no report of mmcompile's; give another name, or remove it", options=["output"])


def save(target: Path, content: bytes) -> None:
    """Write a file, whole or not at all, in folders that are made where they are missing, as a build makes those of OUT.

    An OSError names the file that was to be.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(target, content, durable=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
