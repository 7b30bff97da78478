"""`regard train --config`: the options of a TOML file, with the checks of the flags that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from regard.errors import ArgumentError


def given(context: typer.Context, options: Iterable[str]) -> set[str]:
    """The options that stand in the command, and are not their defaults."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name for name, where in sources.items() if where and where.name == "COMMANDLINE"}


def merged(
    context: typer.Context, options: dict[str, Any], mine: set[str], path: Path
) -> dict[str, Any]:
    """The command's options, with the file's in place of defaults; `mine` stand in the command and win.

    --set and [model.options] are joined name by name.
    """
    from regard.train.config import read

    try:
        found = read(path)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error
    if "attention" in mine and found.get("attention") != options["attention"]:
        found["option"] = []  # they are options of another mechanism
    settings, flags = found.pop("option", []), options["set"] or []
    named = {setting.partition("=")[0] for setting in flags}
    joined = [*(s for s in settings if s.partition("=")[0] not in named), *flags]
    parameters: dict[str | None, Any] = {
        parameter.name: parameter for parameter in context.command.params
    }
    values = {}
    for name, text in found.items():
        try:
            values[name] = parameters[name].process_value(context, text)
        except typer.BadParameter as error:
            raise typer.BadParameter(
                f"{path}: {name} is {text!r}: {error.message}", param_hint="--config"
            ) from error
    kept = {name: options[name] for name in mine if name != "set"}
    return {**options, **values, **kept, "set": joined or None}
