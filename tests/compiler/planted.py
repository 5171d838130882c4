"""A folder whose workers have a decoder with planted faults: a file says in its last bytes what happens to the process that decodes it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcompile.compiler import sealing, task
from mmcompile.compiler.sources.folder import FolderSource
from tests.compiler.builds import picture

_MARK = b"PLANT:"


def plant(seed: int, what: str) -> bytes:
    """A sound picture (what follows the end of a PNG is no part of it) with a fault for the planted decoder."""
    return picture(seed) + _MARK + what.encode()


def _raise_memory_error() -> None:
    raise MemoryError


FAULTS: dict[str, Callable[[], Any]] = {
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "bus": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "fpe": lambda: os.kill(os.getpid(), signal.SIGFPE),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(3600),
    "hang-in-c": lambda: ctypes.PyDLL(None).sleep(3600),  # holds the interpreter's lock, as a decoder may
    "memory": _raise_memory_error,
    "slow": lambda: time.sleep(0.1),
}


@dataclass(frozen=True)
class Planted(FolderSource):
    """The faults happen in other processes than `parent` only; `notes` is a folder where workers leave word of what happened once."""

    parent: int = 0
    notes: str = ""

    def read(self, key: bytes) -> bytes:
        if os.getpid() != self.parent:
            _install(Path(self.notes))
            if b"dies-when-read" in key:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().read(key)


def _install(notes: Path) -> None:
    if getattr(task, "planted", False):
        return
    task.planted = True  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decode, probe, write_seal = task.decode.decode, task.decode.probe, sealing.write_seal

    def fault(data: bytes) -> None:
        if _MARK not in data:
            return
        what = data.rsplit(_MARK, 1)[1].decode()
        if what.endswith("-once"):
            what = what.removesuffix("-once")
            note = notes / what
            if note.exists():
                return
            note.touch()
        FAULTS[what]()

    def bad_decode(data: bytes, *args: Any, **kwargs: Any) -> Any:
        fault(data)
        return decode(data, *args, **kwargs)

    def bad_probe(data: bytes, *args: Any) -> Any:
        fault(data)
        return probe(data, *args)

    def bad_seal(*args: Any) -> None:
        note = notes / "die-in-seal"
        if note.exists():
            note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        write_seal(*args)

    task.decode.decode = bad_decode
    task.decode.probe = bad_probe
    sealing.write_seal = bad_seal


class Deadly:
    """Ends the process that unpickles it."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
