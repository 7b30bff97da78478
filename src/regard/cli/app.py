"""The typer application: a group that lists the subcommands from a table, and imports only the one
that is invoked.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard import __version__
from regard.cli import COMMANDS
from regard.errors import RegardError
from regard.untrusted_text import MULTILINE, error_text, escape_controls

_ABOUT = "Build, run, inspect and compare attention mechanisms."
_EXAMPLE = 'For example: regard explain "a fluffy blue creature roamed the forest"'
MAX_MESSAGE = 3000
"""The maximum number of characters of an error message; the middle of a longer one is left out."""
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """The group of subcommands, which are listed from a table and imported when they are
    invoked.
    """

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Return the context of a command line; control characters in its usage errors are
        escaped.
        """
        with _safe_usage_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> object:
        """Run the subcommand; control characters in its usage errors are escaped."""
        with _safe_usage_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of the subcommands whose module exists, in alphabetical order."""
        return [name for name in sorted(COMMANDS) if importlib.util.find_spec(_module_name(name))]

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
        """Return a placeholder with the name and one line of help, with which the commands are
        listed without importing them.
        """
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name], callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the imported command; the error about an unknown name suggests a similar one."""
        for known in self.list_commands(ctx):
            self.commands.setdefault(known, TyperCommand(known))
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and load(placeholder.name or ""), rest


def load(name: str) -> object:
    """Import `regard.cli.<name>` and return its function as a command."""
    module = importlib.import_module(_module_name(name))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function, epilog = getattr(module, name), getattr(module, "EPILOG", None)
    # join the lines of each paragraph, so that typer fills the lines of the terminal
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=text, context_settings=_SETTINGS, epilog=epilog)(function)
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; a `RegardError` is printed as one message on
    standard error.
    """
    try:
        _command().main(args=list(arguments), prog_name="regard")
    except SystemExit as exit_signal:
        if isinstance(
            exit_signal.__context__, BrokenPipeError
        ):  # typer exits with 1 if the reader closed the pipe
            return 0
        return (
            exit_signal.code
            if isinstance(exit_signal.code, int)
            else int(exit_signal.code is not None)
        )
    except RegardError as error:
        _print_error(_escape_and_shorten(str(error)))
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # most likely the disk of the output is full
        _print_error(error_text(f"{error.filename or 'the output'}: {error.strerror or error}"))
        return 1
    return 0


@contextmanager
def _safe_usage_errors() -> Iterator[None]:
    """Shorten the text of usage errors, which repeat the user's input, and escape its control
    characters.
    """
    try:
        yield
    except Exception as error:
        # typer's usage errors, whichever copy of click it brings
        if hasattr(error, "format_message") and isinstance(getattr(error, "message", None), str):
            error.message = _escape_and_shorten(error.message)  # type: ignore[attr-defined]
        raise


def _escape_and_shorten(message: str) -> str:
    """Return a message of several lines for a terminal, without its middle if it is too long."""
    return _shorten(escape_controls(_shorten(message), keep=MULTILINE))


def _shorten(message: str) -> str:
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE * 2 // 3]} ... {message[-(MAX_MESSAGE // 3) :]}"


def _print_error(error: str) -> None:
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
        bool, typer.Option("--version", help="Print the version, and exit.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"regard {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def _module_name(name: str) -> str:
    return f"regard.cli.{name}"
