"""The help page of a command, in the reader's language and within the width of the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperArgument

from regard.language import translate
from regard.text_table import display_width, line_width, wrap

MAX_WIDTH = 100
"""The maximum number of columns of a help page: longer lines are hard to read."""
NAME_WIDTH = 28
"""The maximum number of columns of an option's name beside its sentence."""


def help_page(command: Any, context: Any, commands: Mapping[str, str] | None = None) -> str:
    """Return the help page of a command or of the group."""
    width = min(line_width(), MAX_WIDTH)
    blocks = [wrap(command.get_usage(context), width, hang="  ")]
    blocks += [wrap(text, width) for text in (command.help or "").split("\n\n") if text]
    panels: dict[str, list[tuple[str, str]]] = {}
    general = translate("Options")
    for option in command.get_params(context):
        is_argument = isinstance(option, TyperArgument)
        panel = option.rich_help_panel or (translate("Arguments") if is_argument else general)
        panels.setdefault(panel, []).append((option_name(option), option_help(option)))
    # what belongs to no group comes last, with --lang and --help
    ordered = sorted(panels, key=lambda panel: panel == general)
    for title in ordered:
        blocks.append(
            "\n".join([_bold(translate("{title}:", title=title)), *_rows(panels[title], width)])
        )
    if commands:
        title = translate("Commands")
        rows = _rows(list(commands.items()), width, narrow=True)
        blocks.append("\n".join([_bold(translate("{title}:", title=title)), *rows]))
    if command.epilog:
        blocks.append(wrap(command.epilog, width, hang="  "))
    return "\n\n".join(blocks) + "\n"


def option_name(option: Any) -> str:
    """Return how an option or argument is written: `--context TEXT`, `--gated/--plain`, `MODEL`."""
    if isinstance(option, TyperArgument):
        return argument_name(option)
    names = "/".join([", ".join(option.opts), *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar or _value_name(option)}"


def argument_name(argument: Any) -> str:
    """Return the name of an argument as the usage line writes it: in brackets if it is optional."""
    name = argument.metavar or (argument.name or "").upper()
    dots = "..." if argument.nargs != 1 else ""
    return f"{name}{dots}" if argument.required else f"[{name}]{dots}"


def option_help(option: Any) -> str:
    """Return the sentence of an option, with its range and its default in brackets."""
    low, high = (
        getattr(option, end, None) if hasattr(option, end) else getattr(option.type, end, None)
        for end in ("min", "max")
    )
    notes = []
    if low is not None and high is not None:
        notes.append(translate("{low} to {high}", low=f"{low:,}", high=f"{high:,}"))
    elif low is not None:
        notes.append(translate("at least {low}", low=f"{low:,}"))
    default = _default(option)
    if default:
        notes.append(translate("default: {default}", default=default))
    sentence = option.help or ""
    return f"{sentence} [{translate('; ').join(notes)}]" if notes else sentence


def _default(option: Any) -> str:
    shown, value = option.show_default, option.default
    if isinstance(shown, str):
        return shown
    if not shown or value is None or callable(value):
        return ""
    if getattr(option, "is_flag", False):
        names = option.opts if value else option.secondary_opts
        return names[0].lstrip("-") if option.secondary_opts else ""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _value_name(option: Any) -> str:
    """Return the word for an option's value: its type."""
    kind = getattr(getattr(option, "type", None), "name", "") or option.display_type_rich(None)
    words = {"int": "INTEGER", "float": "NUMBER", "path": "PATH"}
    return next((word for part, word in words.items() if part in str(kind)), "TEXT")


def _rows(rows: Sequence[tuple[str, str]], width: int, *, narrow: bool = False) -> Iterator[str]:
    """Yield the lines of a list of names and sentences, the sentences below one another."""
    widest = max(display_width(name) for name, _ in rows)
    column = min(widest, NAME_WIDTH if narrow or width >= 80 else width // 3) + 4
    for name, text in rows:
        gap = " " * (column - 2 - display_width(name))
        body = wrap(text, width, indent=" " * column, hang=" " * column)
        if len(gap) > 1:
            yield f"  {_bold(name)}{gap}{body[column:]}"
        else:
            yield f"  {_bold(name)}"
            yield body


def _bold(text: str) -> str:
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return typer.style(text, bold=True) if is_coloured else text
