"""Hides how every outcome of a command becomes a line and an exit code; the group that the commands stand in, and what they share.

Results go to standard output, all else to standard error.  With --json standard output is exactly one JSON document, for errors too, valid against
schemas/report.schema.json.  An expected error is one line and an exit code: 0 fine, 1 a problem, 2 wrong usage, 130 stopped by Ctrl-C, 143 by
SIGTERM; where a command goes on from there, that command is the last line.  Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from typing import Any, NoReturn

import click

from mmcompile import text
from mmcompile.errors import EngineError, MMCompileError, OptionError, RemoteError, did_you_mean
from mmcompile.options import PLACE
from mmcompile.params import Typed, option
from mmcompile.terminal import Terminable, fill_standard_streams, say, say_json

__all__ = ["JSON", "NO_LOCK", "OF_PLACE", "called", "look_here", "main", "program"]

#: Bad files named under an error; all of them stand in the file that the error names.
_EXAMPLES = 5
#: Exit codes as a shell has them for a process that a signal ended.
_STOPPED, _TERMINATED = 130, 143

# ---------------------------------------------------------------- every outcome -> exit code


class _Program(click.Group):
    """The group of commands; the one place where errors become a line and an exit code."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in self.commands:
            expected = ", ".join(sorted(self.commands))
            raise click.UsageError(f"no such command {args[0]}: expected one of {expected}{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, prog_name: str | None = None, *_: Any, **extra: Any) -> NoReturn:
        fill_standard_streams()
        arguments = list(sys.argv[1:] if args is None else args)
        extra.pop("standalone_mode", None)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name that this terminal's encoding lacks is no error
        with Terminable() as term:
            try:
                code = super().main(arguments, prog_name or "mmcompile", standalone_mode=False, obj=arguments, **extra)
            except SystemExit:  # how click ends when the reader of its help left
                code = 0
            except Exception as error:
                code = _report(error, arguments)
                if code is None:
                    raise
                if code == _STOPPED and term.came:
                    code = _TERMINATED
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception, arguments: list[str]) -> int | None:
    """Say what went wrong and return the exit code; None for what nobody expected, which deserves its traceback."""
    command = next((word for word in arguments if word in program.commands), None)
    code, kind, message = 1, type(error).__name__, str(error)
    details: dict[str, Any] = {}
    again = ""  # why the same command, run again, goes on
    following: list[tuple[str, list[str]]] = []
    if isinstance(error, MMCompileError):
        code, details = 2 if isinstance(error, OptionError) else 1, error.details
        following = text.go_on(arguments, details)
        if isinstance(error, EngineError) and details.get("begun", True):
            again = "everything finished is kept; to go on:"
        elif isinstance(error, RemoteError):
            again = "everything finished is kept; to go on when that is mended:"
    elif isinstance(error, click.Abort):
        code, kind, message, again = _STOPPED, "KeyboardInterrupt", "stopped", "everything finished is kept; to go on:"
    elif isinstance(error, click.UsageError):
        code, message = 2, _usage(error) + f" (see `mmcompile {command + ' ' if command else ''}--help`)"
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    elif isinstance(error, OSError):
        details, again = {"errno": error.errno, "path": error.filename}, "everything finished is kept; to go on when that is mended:"
        message = text.system_line(error)
    else:
        message = f"internal error: {message}"
    if command != "build" or "--dry-run" in arguments:
        following = []
    elif again:
        following = [(again, arguments)]
    commands = [(intro, text.quote([*called(), *words])) for intro, words in following]
    if "--json" in arguments:
        about = {"type": kind, "message": text.escape(message), "details": details}
        with suppress(OSError):  # standard output takes nothing, which may be the very error: standard error says it
            say_json({"command": command, "error": about, "next": [line for _, line in commands]})
    if not isinstance(error, MMCompileError | OSError | click.ClickException | click.Abort):
        return None
    lines = [f"error: {text.escape(message)}", *text.examples(details, _EXAMPLES)]
    say([*lines, *(line for pair in commands for line in pair)], err=True)
    return code


def _usage(error: click.UsageError) -> str:
    """Wrong usage in the words of our other errors."""
    if isinstance(error, click.NoSuchOption):
        return f"no such option {error.option_name}" + (f"; did you mean {error.possibilities[0]}?" if error.possibilities else "")
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and error.param is not None and error.ctx is not None:
        return f"{error.param.get_error_hint(error.ctx)}: ".replace("'", "") + error.message.rstrip(".")
    said = error.format_message().rstrip(".").replace("'", "")
    return said[:1].lower() + said[1:]


def called() -> list[str]:
    """The words that this program was called by, for commands that a user may paste."""
    return text.program_words(sys.argv[0], sys.executable, shutil.which)


# ---------------------------------------------------------------- commands


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from mmcompile import __version__

        say(f"mmcompile {__version__}")
        ctx.exit()


@click.group(cls=_Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version.")
@click.pass_context
def program(ctx: click.Context) -> int:
    """Compile images and other fixed-shape data into memory-mapped .npy shards, and look after them.

    \b
    mmcompile build raw/ out/ --resize 256 --crop 224
    mmcompile info out/

    Every command takes --json: one document on standard output, for errors too.  Exit codes: 0 fine, 1 a problem, 2 wrong usage.
    """
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        return 2
    return 0


#: What several commands take.
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
NO_LOCK = option("--no-lock", None, "For file systems without locks: you make sure that no other run works on OUT.", is_flag=True)
#: The type of arguments that are a folder, a file or a URL.
OF_PLACE = Typed(PLACE)


def look_here() -> None:
    """Find modules in the current folder, as `python -m` does: a step of one's own lies where one works."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def main(arguments: list[str] | None = None) -> NoReturn:
    """The command `mmcompile`; `arguments` are those behind its name (None: of this process).  Ends the process with its exit code."""
    program.main(arguments)
    raise AssertionError("program.main ends the process")
