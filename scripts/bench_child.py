"""Hides how something is measured in a process of its own: commands and answers as lines of JSON, and its memory watched from outside.

The child's own output goes to its standard error.  It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from bench_results import held_mib, plain_reason

#: Seconds between two looks at a child's memory; without an answer for so long it is given up.
_LOOK_S, _GIVE_UP_S = 0.01, 600


class ChildError(Exception):
    """A child that ended, or said that it could not do what was asked."""


def serve(commands: dict[str, Callable[..., Any]]) -> None:
    """Answer commands until there are no more: {"command": NAME, ...keywords} -> {"answer": ...} or {"error": TEXT}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": commands[asked.pop("command")](**asked)}
        except Exception as error:  # whatever a library raises: the parent says it, and goes on with the others
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # threads and finalizers of libraries may not end by themselves


class Child:
    """A process that answers; a context manager, which ends it and all processes of its session."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True, env=env
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)  # it leads its session and group; workers that left the group see their pipes close
        self._process.communicate()
        self._log.close()

    def ask(self, command: str, **keywords: Any) -> Any:
        """What a command gives.  Raises ChildError."""
        return self._ask(command, keywords, None)

    def watched(self, command: str, **keywords: Any) -> tuple[Any, float, float]:
        """What a command gives, the MiB held when it began, and the most that was held meanwhile."""
        seen: list[float] = [held_mib(self._process.pid)]
        answer = self._ask(command, keywords, seen)
        return answer, seen[0], max(seen)

    def _ask(self, command: str, keywords: dict[str, Any], seen: list[float] | None) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({"command": command, **keywords}), file=process.stdin, flush=True)
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            left = _GIVE_UP_S
            while not selector.select(_GIVE_UP_S if seen is None else _LOOK_S):
                left -= _GIVE_UP_S if seen is None else _LOOK_S
                if left <= 0:
                    raise ChildError(f"no answer to {command} in {_GIVE_UP_S} s")
                if seen is not None:
                    seen.append(held_mib(process.pid))
        if seen is not None:
            seen.append(held_mib(process.pid))
        line = process.stdout.readline()
        if not line:
            raise ChildError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(plain_reason(answer["error"]))
        return answer["answer"]

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return plain_reason(f"{self._log.read()}") + f" (exit code {self._process.returncode})"
