"""Every exception that this package raises on purpose.

    MMCompileError
    ├── FormatError                       what lies on disk is wrong, or is not what was asked for
    │   ├── NotADatasetError              (FileNotFoundError) no published dataset in this folder
    │   ├── VersionError                  (ValueError) written by a newer format version
    │   ├── CorruptShardError             (ValueError) a file is missing, short, changed or not what the index says
    │   └── GenerationError               (ValueError) the generation asked for is no longer there
    ├── RemoteError                       (OSError) an object store cannot be reached, or refuses
    └── BuildError                        a build cannot start, go on or publish
        ├── OptionError                   (ValueError) options that clash, or a value out of its range
        ├── SourceError                   (OSError) RAW, or files in it, cannot be read
        ├── DecodeError                   (ValueError) a bad image, or more of them than allowed
        ├── ResumeError                   a finished shard was damaged before it could be published
        ├── OutputExistsError             (FileExistsError) OUT holds something that is not ours
        └── EngineError                   (RuntimeError) workers could not be started or were lost

Each is also a child of the builtin that a caller would catch.  An error is one message (file, expected, found, remedy) plus keyword-only
attributes, so it survives pickling between processes.  Messages name options as the command does; a note says what they are called in Python.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "BuildError",
    "CorruptShardError",
    "DecodeError",
    "EngineError",
    "FormatError",
    "GenerationError",
    "MMCompileError",
    "NotADatasetError",
    "OptionError",
    "OutputExistsError",
    "RemoteError",
    "ResumeError",
    "SourceError",
    "VersionError",
]


#: An option of the command in a message.
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
#: What these are called in Python.
_SPELLED: dict[str, list[str]] = {}
_Kind = TypeVar("_Kind", bound=type)


def spelled(kind: _Kind) -> _Kind:
    """A decorator of a dataclass whose fields are options of the command: errors that name one of these say so."""
    for field in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        _SPELLED.setdefault(field.removesuffix("_s").replace("_", "-"), []).append(f"{kind.__name__}({field}=)")
    return kind


class MMCompileError(Exception):
    """Anything this package reports: `str(error)` is one line for a person, `error.details` the same facts for a program."""

    details: dict[str, Any]

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        if flags := [flag for flag in dict.fromkeys(_FLAG.findall(message)) if flag in _SPELLED]:
            self.add_note(
                "; ".join(f"--{flag} in Python: {' or '.join(_SPELLED[flag])}" for flag in flags)
            )  # in a traceback; the command prints none

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.details)


def _rebuild(kind: type[MMCompileError], message: str, details: dict[str, Any]) -> MMCompileError:
    return kind(message, **details)


class FormatError(MMCompileError):
    """What lies on disk breaks a rule of the format."""


class NotADatasetError(FormatError, FileNotFoundError):
    """The folder holds no published dataset."""


class VersionError(FormatError, ValueError):
    """The dataset was written by a newer version of the format."""


class CorruptShardError(FormatError, ValueError):
    """A file of the dataset is missing, short, changed or not what the index says."""


class GenerationError(FormatError, ValueError):
    """The generation asked for is no longer there, or is not the one that was found."""


class RemoteError(MMCompileError, OSError):
    """An object store, or an object in it, cannot be reached, or refuses what was asked."""


class BuildError(MMCompileError):
    """A build cannot start, go on or publish; whatever was finished is kept."""


class OptionError(BuildError, ValueError):
    """Options clash, or a value is out of its range; nothing was written."""


class SourceError(BuildError, OSError):
    """RAW, or files in it, cannot be read."""


class DecodeError(BuildError, ValueError):
    """A bad image; as the outcome of a build: more of them than allowed."""


class ResumeError(BuildError):
    """A file of a finished shard was gone or cut before it could be published; the same call makes it again.

    Damage that is seen earlier is no error: sealed shards of an unfinished build that are no longer what they were are made again, with a warning.
    """


class OutputExistsError(BuildError, FileExistsError):
    """OUT holds something that this package did not write."""


class EngineError(BuildError, RuntimeError):
    """Workers could not be started or were lost."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What ends a message about a name that there is not: the known one that it probably was meant to be; nothing where it is like none."""
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
