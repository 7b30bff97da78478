"""The typer application: a group that knows its commands by name and line, and loads the one that
is invoked.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard import __version__
from regard.cli import COMMANDS
from regard.errors import RegardError
from regard.foreign import LINES, inert, told

_ABOUT = "Attention, exact, fast and visible: build with it, run it, see every number."
_EXAMPLE = 'For example: regard explain "a fluffy blue creature roamed the forest"'
MAX_MESSAGE = 3000
"""Letters of an error message, at most; the middle of a longer one is left out."""
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """The subcommands: listed from the table, imported on invocation."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """The context of a command line, whose usage errors are shown safely."""
        with _shown():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; its usage errors are shown safely."""
        with _shown():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names whose module is there, in alphabetical order."""
        return [name for name in sorted(COMMANDS) if importlib.util.find_spec(_module(name))]

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """A stand-in with the name and the line of help: enough for the list of commands."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name], callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, loaded; a mistyped name meets a suggestion."""
        for known in self.list_commands(ctx):
            self.commands.setdefault(known, TyperCommand(known))
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and load(stand_in.name or ""), rest


def load(name: str) -> Any:
    """Import `regard.cli.<name>` and make its function a command."""
    module = importlib.import_module(_module(name))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, context_settings=_SETTINGS, epilog=getattr(module, "EPILOG", None))(
        getattr(module, name)
    )
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code. An error of regard's is one message on stderr."""
    try:
        _command().main(args=list(arguments), prog_name="regard")
    except SystemExit as end:
        if isinstance(
            end.__context__, BrokenPipeError
        ):  # typer exits with 1 when the reader leaves
            return 0
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except RegardError as error:
        _say(_fit(str(error)))
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full, most likely the one that the output goes to
        _say(told(f"{error.filename or 'the output'}: {error.strerror or error}"))
        return 1
    return 0


@contextmanager
def _shown() -> Iterator[None]:
    """Usage errors repeat what was given: it is cut, and nothing in it moves the cursor."""
    try:
        yield
    except Exception as error:
        # typer's usage errors, whichever copy of click it brings
        if hasattr(error, "format_message") and isinstance(getattr(error, "message", None), str):
            error.message = _fit(error.message)  # type: ignore[attr-defined]
        raise


def _fit(message: str) -> str:
    """A message of several lines for a terminal, its middle left out if it is endless."""
    return _cut(inert(_cut(message), keep=LINES))


def _cut(message: str) -> str:
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE * 2 // 3]} ... {message[-(MAX_MESSAGE // 3) :]}"


def _say(error: str) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(error, err=True)


def _command() -> Any:
    app = typer.Typer(
        cls=Commands,
        help=_ABOUT,
        epilog=_EXAMPLE,
        add_completion=False,
        context_settings=_SETTINGS,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    return typer.main.get_command(app)


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and stop.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"regard {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def _module(name: str) -> str:
    return f"regard.cli.{name}"
