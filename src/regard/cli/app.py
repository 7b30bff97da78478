"""The typer application: a group that lists the subcommands from a table, and imports only the one
that is invoked. It speaks the language of `--lang` or of the locale.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from regard import __version__
from regard.cli._help_page import argument_name, help_page
from regard.did_you_mean import did_you_mean, suggest
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, is_out_of_memory
from regard.language import (
    LANGUAGES,
    check_language,
    language_of_locale,
    translate,
    translate_count,
    use_language,
)
from regard.text_table import line_width, wrap
from regard.untrusted_text import MULTILINE, error_text, escape_controls

COMMANDS = {
    "audit": "Test other people's attention code for faults.",
    "chat": "Talk with a model in the terminal, in its own chat template.",
    "compare": "Compare attention mechanisms: cost, memory, speed, quality.",
    "convert": "Convert a checkpoint: heads, latents, positions, dtype.",
    "cost": "Compute parameters, FLOPs, cache bytes and least time of a model.",
    "describe": "List the attention mechanisms, or describe one of them.",
    "explain": "Explain one attention weight of a text, number by number.",
    "extend": "Test context extensions beyond the trained length.",
    "generate": "Continue a prompt with a model, and report speed and memory.",
    "inspect": "Ablate, patch and attribute heads, and measure them.",
    "layer": "Run one attention layer on random tokens, and print its tensors.",
    "show": "Draw any attention mask, with its counts.",
    "train": "Train a small model and its tokenizer on any text.",
    "view": "Look at the attention of a model or a recording, at any length.",
}
"""Name -> one line of help. The module `regard.cli.<name>` has the function `<name>`, annotated for
typer.
"""
ABOUT = "Build, run, inspect and compare attention mechanisms."
EXAMPLE = 'For example: regard explain "a fluffy blue creature roamed the forest"'
HELP = "Print this help, and exit."
LANG = "Language of the output: en or zh."
LOCALE = "that of the locale"
MAX_MESSAGE = 3000
"""The maximum number of characters of an error message; the middle of a longer one is left out."""
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Localized:
    """What a command and the group of commands share: usage and help in the reader's language."""

    def get_usage(self: Any, ctx: Any) -> str:
        """Return the usage line with its title in the reader's language."""
        pieces = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        return translate("Usage: ") + pieces

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        """Return the words of the usage line: `[OPTIONS] TEXT`; what may be left out is in
        brackets.
        """
        arguments = [option for option in self.params if isinstance(option, TyperArgument)]
        words = getattr(self, "usage", None) or " ".join(map(argument_name, arguments))
        return [translate("[OPTIONS]"), words]

    def get_help_option(self: Any, ctx: Any) -> Any:
        """Return the option --help, with its sentence."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.help = translate(HELP)
        return option

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the help page, without typer's boxes, which cut Chinese text off."""
        names = self.list_commands(ctx) if isinstance(self, TyperGroup) else ()
        lines = {name: translate(COMMANDS[name]) for name in names}
        formatter.write(help_page(self, ctx, lines))


class Command(_Localized, TyperCommand):
    """A subcommand; an error about an argument becomes one about the option of this name."""

    usage: str | None = None

    def invoke(self, ctx: Any) -> object:
        """Run the subcommand; an error about an argument is wrong usage."""
        try:
            return super().invoke(ctx)
        except (ArgumentError, ArgumentTypeError) as error:
            raise typer.BadParameter(str(error), ctx, wrong_option(ctx, error)) from error


OTHER_NAMES = {
    "groups": "kv_heads",
    "heads": "head",
    "length": "context",
    "option": "settings",
    "places": "layer",
}
"""Arguments of the package, to the name that options of the same meaning have in some commands."""


def wrong_option(context: Any, error: RegardError) -> Any:
    """Return the option or argument of a command that an error of the package is about, or None.

    It has the name of the error's argument, and holds the value if this is a text; or else holds
    the value, or `name=value` for that name; or has another name for the argument.
    """
    values = {x: context.params.get(x.name) for x in context.command.params}
    texts = {
        option: [str(x) for x in (value if isinstance(value, (list, tuple)) else [value])]
        for option, value in values.items()
        if value is not None
    }
    named = {str(option.name).rstrip("_"): option for option in texts}
    argument = error.argument or ""
    own, other = named.get(argument), named.get(OTHER_NAMES.get(argument, ""))
    if isinstance(error.value, str) and error.value not in texts.get(own, ()):
        own = next((option for option in texts if error.value in texts[option]), own)
    settings = (x for x in texts if any(text.startswith(f"{argument}=") for text in texts[x]))
    return own or next(settings, None) or other


class Commands(_Localized, TyperGroup):
    """The group of subcommands, which are listed from a table and imported when they are
    invoked.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return [translate("[OPTIONS]"), translate("COMMAND [ARGUMENTS]...")]

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of the subcommands whose module exists, in alphabetical order."""
        return [name for name in sorted(COMMANDS) if importlib.util.find_spec(_module_name(name))]

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
        """Return a placeholder with the name and one line of help, with which the commands are
        listed without importing them.
        """
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=translate(COMMANDS[cmd_name]), callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the imported command; the error about an unknown name suggests a similar one."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = suggest(args[0], known)
            ctx.fail(translate("No such command {name!r}{hint}", name=args[0], hint=hint))
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and load(placeholder.name or ""), rest


def load(name: str) -> Any:
    """Import `regard.cli.<name>` and return its function as a command."""
    module = importlib.import_module(_module_name(name))
    options = {key.lower(): getattr(module, key, None) for key in ("EPILOG", "USAGE")}
    return command_of(getattr(module, name), **options)


def command_of(
    function: Callable[..., object], epilog: str | None = None, usage: str | None = None
) -> Any:
    """Return a function that is annotated for typer as a command, with its texts in the reader's
    language. Programs outside of the package make their commands with it, too.

    Args:
        function: the function; its docstring is the help text.
        epilog: the last line of the help page, an example.
        usage: the words of the usage line; None is the names of the arguments.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    text = "\n\n".join(map(translate, paragraphs(function.__doc__)))
    options: dict[str, Any] = {"help": text, "epilog": epilog and translate(epilog)}
    app.command(function.__name__, cls=Command, context_settings=_SETTINGS, **options)(function)
    command = typer.main.get_command(app)
    command.usage = usage  # type: ignore[attr-defined]
    if not any(option.name == "lang" for option in command.params):
        command.params.append(_language_option())
    _localize(command)
    return command


def paragraphs(docstring: str | None) -> list[str]:
    """Return the paragraphs of a docstring, each as one line, which typer fills to the width of the
    terminal.
    """
    blocks = inspect.cleandoc(docstring or "").split("\n\n")
    return [" ".join(block.split()) for block in blocks]


def language_of_arguments(arguments: Sequence[str]) -> str:
    """Return the language that `--lang` names, or that of the locale.

    It is read before the rest of the command line, because help and errors are in this language,
    too.
    """
    chosen = language_of_locale()
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for i, argument in enumerate(before):
        name, equals, rest = argument.partition("=")
        value = "".join(before[i + 1 : i + 2])
        text = rest if equals else value
        if name == "--lang" and text in LANGUAGES:
            chosen = text
    return chosen


def run(
    arguments: Sequence[str], make: Callable[[], Any] | None = None, program: str = "regard"
) -> int:
    """Run a command and return its exit code; an error is printed as one message on standard
    error.

    Args:
        arguments: the arguments of the command.
        make: returns the command in the reader's language; None is that of `regard`.
        program: the name of the program in usage lines.
    """
    with use_language(language_of_arguments(arguments)):
        return _run(arguments, make or _command, program)


def _run(arguments: Sequence[str], make: Callable[[], Any], program: str) -> int:
    try:
        code = make().main(args=list(arguments), prog_name=program, standalone_mode=False)
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
    except typer.Abort:
        return 1
    except RegardError as error:
        _print_error(str(error))
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # most likely the disk of the output is full
        _print_error(error_text(f"{error.filename or 'the output'}: {error.strerror or error}"))
        return 1
    except Exception as error:
        # typer's usage errors, whichever copy of click it brings
        if hasattr(error, "format_message"):
            return _print_usage_error(error)
        if not is_out_of_memory(error):
            raise
        _print_error(translate("not enough memory: {reason}", reason=error_text(error)))
        return 1
    return code if isinstance(code, int) else 0


def _print_usage_error(error: Any) -> int:
    """Print how the command is used, and what is wrong; return the exit code."""
    context = getattr(error, "ctx", None)
    if context is not None:
        typer.echo(context.get_usage(), err=True)
        help_line = translate("Try '{command} --help' for help.", command=context.command_path)
        typer.echo(f"{help_line}\n", err=True)
    _print_error(_usage_message(error))
    return int(getattr(error, "exit_code", 2))


def _usage_message(error: Any) -> str:
    """Return the message of a usage error in the reader's language, made of what it carries."""
    name = getattr(error, "param_hint", None) or getattr(error, "option_name", None)
    option = getattr(error, "param", None)
    is_argument = isinstance(option, TyperArgument)
    if name is None and option is not None:
        name = argument_name(option).strip("[].") if is_argument else max(option.opts, key=len)
    if hasattr(error, "possibilities"):
        hint = did_you_mean(error.possibilities or ())
        return translate("No such option: {name}{hint}", name=name, hint=hint)
    if hasattr(error, "param_type"):
        missing = "Missing argument {name}." if is_argument else "Missing option {name}."
        return translate(missing, name=name)
    if name is None:
        return translate(error.message)
    return translate("Invalid value for '{name}': {reason}", name=name, reason=error.message)


def _escape_and_shorten(message: str) -> str:
    """Return a message of several lines for a terminal, without its middle if it is too long."""
    return _shorten(escape_controls(_shorten(message), keep=MULTILINE))


def _shorten(message: str) -> str:
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE * 2 // 3]} ... {message[-(MAX_MESSAGE // 3) :]}"


def _print_error(message: str) -> None:
    """Print an error, wrapped at the width of the terminal."""
    title = translate("error: ")
    text = wrap(title + _escape_and_shorten(message), line_width())
    typer.secho(title, fg="red", bold=True, nl=False, err=True)
    typer.echo(text[len(title) :], err=True)


def _command() -> Any:
    app = typer.Typer(
        cls=Commands,
        help=translate(ABOUT),
        epilog=translate(EXAMPLE),
        context_settings=_SETTINGS,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    command = typer.main.get_command(app)
    _localize(command)
    return command


def _check_lang(_context: object, option: Any, lang: str | None) -> str | None:
    """Refuse a language that has no catalogue."""
    try:
        return lang if lang is None else check_language(lang)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param=option) from error


def _language_option() -> Any:
    """Return the option --lang for a command whose function does not take it."""
    app = typer.Typer(add_completion=False)
    app.command()(_with_lang)
    option = typer.main.get_command(app).params[0]
    option.expose_value = False
    return option


def _with_lang(
    lang: Annotated[str | None, typer.Option(help=LANG, show_default=LOCALE)] = None,
) -> None: ...


def _localize(command: Any) -> None:
    """Put the texts of a command's options and arguments into the reader's language."""
    for option in command.params:
        if option.name == "lang":
            option.callback = _check_lang
        if isinstance(option, TyperArgument) and option.metavar is None:
            option.metavar = (option.name or "").upper()
        for name in ("help", "show_default", "rich_help_panel"):
            text = getattr(option, name, None)
            if isinstance(text, str):
                setattr(option, name, translate(text))


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions, the CPU kernels and the threads.")
    ] = False,
    lang: Annotated[str | None, typer.Option(help=LANG, show_default=LOCALE)] = None,  # noqa: ARG001  (`run` has read it)
) -> None:
    if version:
        import torch

        from regard.ops.cpu.instruction_sets import describe_kernels

        typer.echo(f"regard {__version__}")
        typer.echo(describe_kernels())
        threads = translate_count(torch.get_num_threads(), "thread")
        typer.echo(f"torch {torch.__version__}, {threads}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def _module_name(name: str) -> str:
    return f"regard.cli.{name}"
