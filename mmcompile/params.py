"""Hides how options are declared: typed values, a --config file as their defaults, and help in groups.  With cli the only home of click."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from mmcompile.errors import OptionError
from mmcompile.options import PLACE, Form, as_typed, read_config

__all__ = ["Grouped", "Typed", "from_config", "one_of", "option"]

#: Options that say what is done now, not what a dataset is.
_NOT_IN_CONFIG = frozenset({"config", "dry_run", "plan_only", "part", "as_json", "help"})

#: Words that are so much alike (difflib's ratio) are all named, as float16, float32 and float64 are for float; else the nearest one.
_ALIKE = 0.8


class Typed(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A `Form` as a type of click."""

    def __init__(self, form: Form) -> None:
        self.form, self.name = form, form.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # converted before
            return value
        try:
            return self.form.parse(value)
        except (ValueError, OverflowError):
            self.fail(f"expected {self.form.expected}, found {value!r:.80}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Where a place is meant, the shell completes names of files."""
        return [CompletionItem(incomplete, type="file")] if self.form is PLACE else []

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self.form.name if isinstance(param, click.Option) else None


def option(name: str, kind: Any, text: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(name, type=kind, help=text, expose_value=name != "--config", **more)


class _Words(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """One of a few words; an error names them, and those that were probably meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        near = difflib.get_close_matches(str(value), self.choices, 3, _ALIKE) or difflib.get_close_matches(str(value), self.choices, 1)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        self.fail(f"expected one of {', '.join(self.choices)}, found {value!r:.80}{meant}", param, ctx)


def one_of(words: str) -> _Words:
    return _Words(words.split("|"))


def from_config(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    """Make what a --config file says the defaults of this call; its excludes are kept apart, as the command line adds to them."""
    if path is None:
        return
    options = {p.opts[-1].removeprefix("--"): p for p in ctx.command.params if isinstance(p, click.Option) and p.name not in _NOT_IN_CONFIG}
    values: dict[str, Any] = {}
    for key, value in read_config(path, set(options)).items():
        declared = options[key]
        if key == "field" and isinstance(value, dict) and all(isinstance(own, dict) for own in value.values()):
            from mmcompile.compiler.fieldoptions import field_text

            value = [field_text(name, own) for name, own in value.items()]
        types, expected = _config_types(declared)
        typed = as_typed(value, types, joint=declared.type.form.joint if isinstance(declared.type, Typed) else "", many=declared.multiple)
        if typed is None:
            raise OptionError(f"--config {path}: {key} must be {expected}, found {json.dumps(value):.80}", options=[key])
        try:
            declared.type_cast_value(ctx, typed)
        except click.BadParameter as error:
            raise OptionError(f"--config {path}: {key}: {error.message}", options=[key]) from None
        values[str(declared.name)] = typed
    ctx.meta["mmcompile.exclude"] = tuple(values.pop("exclude", ()))
    ctx.default_map = values


def _config_types(declared: click.Option) -> tuple[tuple[type, ...], str]:
    """What an option's value may be in JSON: types, and words."""
    if declared.is_flag:
        return (bool,), "true or false"
    if isinstance(declared.type, Typed):
        return declared.type.form.types, declared.type.form.expected
    return (str,), "a list of texts" if declared.multiple else "a text"


class Grouped(click.Command):
    """A command with many options, which its help shows in groups: title -> long names, with spaces between."""

    def __init__(self, *arguments: Any, groups: dict[str, str], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = {p.opts[-1].removeprefix("--"): line for p in self.get_params(ctx) if (line := p.get_help_record(ctx)) is not None}
        for title, names in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([lines.pop(name) for name in names.split()])
        if lines:
            with formatter.section("More"):
                formatter.write_dl(list(lines.values()))
