"""Options and helpers that several commands share: how a model is loaded, and checks of the files
to write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import typer

from regard.errors import FileError
from regard.files.atomic_write import check_is_file_name, check_writable
from regard.files.regular_files import open_regular
from regard.language import Phrase, counted, translate, translate_count
from regard.text_table import line_width, wrap
from regard.untrusted_text import short_repr

if TYPE_CHECKING:
    from rich.console import Console

    from regard.models import Model, Seq2Seq, TextEncoder

LoadedModel = TypeVar("LoadedModel")
PANEL = "The model"

Source = Annotated[
    str,
    typer.Option(
        help=(
            'The model: "tiny", which comes with the package, a Hugging Face folder, '
            "or org/name on the hub."
        ),
        rich_help_panel=PANEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Number format to compute in: float32, float16, bfloat16 or float64.",
        show_default="the checkpoint's dtype",
        rich_help_panel=PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device: cpu, cuda, ...",
        show_default="the CPU",
        rich_help_panel=PANEL,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help=(
            "Store the weights of linear maps in fewer bits: int8 or int4, or float16 or bfloat16 "
            "under float32."
        ),
        show_default="as the checkpoint",
        rich_help_panel=PANEL,
    ),
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        help=(
            "Names of weights that the folder may lack (* and ? match); they are then "
            "random, not trained. Repeatable."
        ),
        rich_help_panel=PANEL,
    ),
]
Finite = Annotated[
    bool,
    typer.Option(
        "--finite", help="Refuse weights that are NaN or infinite.", rich_help_panel=PANEL
    ),
]


Ignore = Annotated[
    list[str] | None,
    typer.Option(
        help=(
            "Unknown keys of config.json and names of stored tensors (* and ? match) "
            "to ignore, because they change nothing. Repeatable."
        ),
        rich_help_panel=PANEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="The branch, tag or commit of a repository on the hub.",
        show_default="main branch",
        rich_help_panel=PANEL,
    ),
]


TextFile = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="Read the text from this file (UTF-8) instead; - is standard input.",
        show_default="none",
    ),
]
MAX_TEXT_BYTES = 1 << 28
"""The largest text that a command reads from a file: 256 MiB."""
CONSOLE_WIDTH = 80
"""The number of columns of output that is laid out, in a file, a pipe or a wide terminal."""
LONG_TEXT = 20_000
"""Characters from which a command says that it works, even without a terminal."""


def usage_error(option: str | None, text: str, /, **values: object) -> typer.BadParameter:
    """Return the error that an option of a command is wrong, in the reader's language.

    Args:
        option: the flag, or the name of the argument; None if the text names several.
        text: what is wrong and what is allowed, in English; it must be in the catalogue.
        values: the value of each placeholder of the text.

    >>> usage_error("--memory", "peak memory can only be measured on a CPU").param_hint
    '--memory'
    """
    return typer.BadParameter(translate(text, **values), param_hint=option)


def given_text(text: str | None, file: str | None) -> str:
    """Return the text of a command: the argument, the contents of `--file`, or standard input.

    Prints a hint on standard error if the argument is the path of a file.

    Args:
        text: the argument, or None.
        file: the value of `--file`, or None.

    Raises:
        typer.BadParameter: neither or both were given, or the file is not UTF-8 or is empty.
        FileError: the file is missing, not regular, too large, or cannot be read.

    >>> given_text("a text", None)
    'a text'
    """
    if (text is None) == (file is None):
        state = Phrase("both were given" if text is not None else "neither was given")
        raise usage_error("TEXT", "give a TEXT or --file PATH; {state}", state=state)
    if file is None:
        assert text is not None
        if _is_file(text):
            note(
                Phrase(
                    "the text is the name of a file: to read the file, write --file {text}",
                    text=short_repr(text),
                )
            )
        return text
    if file == "-":
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    else:
        with open_regular(Path(file)) as (opened, _):
            data = opened.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise FileError(f"{file} is longer than {MAX_TEXT_BYTES} bytes; give a part of it")
    try:
        text_of_file = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise usage_error(
            "--file",
            "{file} is not UTF-8 text (byte {byte})",
            file=short_repr(file),
            byte=error.start,
        ) from error
    if not text_of_file.strip():
        raise usage_error("--file", "{file} contains no text", file=short_repr(file))
    return text_of_file


def _is_file(text: str) -> bool:
    """Return whether a text is the path of an existing file."""
    try:
        return len(text) < 4096 and "\n" not in text and Path(text).is_file()
    except (OSError, ValueError):
        return False


def console_of(color: bool | None, widest: int = CONSOLE_WIDTH) -> Console:
    """Return a console as wide as the terminal, or as the variable COLUMNS says.

    Args:
        color: whether the output is coloured; None is as the terminal supports.
        widest: the number of columns in a file, a pipe or a wider terminal.

    >>> console_of(False).no_color
    True
    """
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a glyph shows "?"
    width = min(line_width(), widest)
    if color is None:
        return Console(width=width)
    return Console(
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="truecolor" if color else None,
    )


def note(message: str, start: str = "") -> None:
    """Print a remark on standard error, in the reader's language and within the terminal.

    Args:
        message: the remark in English, as the catalogue has it.
        start: what stands before the remark, such as "... " before what is being done.
    """
    typer.echo(wrap(start + translate(message), line_width()), err=True)


@contextmanager
def working(what: str, characters: int) -> Iterator[Callable[[str], None]]:
    """Show on standard error that work goes on, and for how long: a moving bar on a terminal, and
    otherwise one line if the text is long.

    Args:
        what: what is being done.
        characters: length of the text.

    Yields:
        A function that replaces the description, for example by a count.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    what = translate(what)
    console = Console(stderr=True)
    if not console.file.isatty():  # rich's own word follows FORCE_COLOR, even in a pipe
        if characters >= LONG_TEXT:
            size = translate_count(characters, "character")
            note(translate("{what}: {size}", what=what, size=size))
        yield lambda _: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=translate(text))


@dataclass(frozen=True)
class LoadOptions:
    """The options with which a command loads a model, as `regard.load` takes them.

    Attributes:
        dtype: the name of a floating-point dtype, or None.
        allow_missing, ignore: patterns of names, or None.
        finite: whether NaN and infinity are refused.
        revision: the branch, tag or commit of a repository on the hub, or None.
        weights: the form in which weights are stored, such as int8, or None.
        device: where the model computes, or None for the CPU.
    """

    dtype: str | None = None
    allow_missing: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    finite: bool = False
    revision: str | None = None
    weights: str | None = None
    device: str | None = None

    def flags_given(self) -> list[str]:
        """Return the flags of the options that were given, for errors of commands that load no
        model.

        >>> LoadOptions(finite=True, ignore=["a"]).flags_given()
        ['--ignore', '--finite']
        """
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name)]


@overload
def load(source: str, options: LoadOptions, kind: type[LoadedModel]) -> LoadedModel: ...
@overload
def load(source: str, options: LoadOptions) -> Model | TextEncoder | Seq2Seq: ...
def load(source: str, options: LoadOptions, kind: type[object] | None = None) -> object:
    """Load a model with `regard.load`.

    Prints on standard error which weights are randomly initialised, because the folder lacks them,
    and which keys and tensors were ignored.

    Args:
        source: "tiny", a Hugging Face folder, or org/name on the hub.
        options: the options of the command.
        kind: the class that the model must have; None allows any of the three classes.

    Returns:
        The loaded model.

    Raises:
        typer.BadParameter: the dtype is unknown, or the device cannot be used.
    """
    import torch

    import regard

    check_device_option(options.device)  # before the weights are read
    dtype_names = ("float32", "float16", "bfloat16", "float64")
    if options.dtype is not None and options.dtype not in dtype_names:
        raise usage_error(
            "--dtype",
            "{dtype!r} is not one of {names}",
            dtype=options.dtype,
            names=", ".join(dtype_names),
        )
    torch_dtype = None if options.dtype is None else getattr(torch, options.dtype)
    kind_option: dict[str, Any] = {} if kind is None else {"kind": kind}
    model = regard.load(
        source,
        dtype=torch_dtype,
        weights=options.weights,
        revision=options.revision,
        allow_missing=options.allow_missing or (),
        ignore=options.ignore or (),
        finite=options.finite,
        **kind_option,
    )
    if model.newly_initialized:
        examples = ", ".join(model.newly_initialized[:3]) + (
            ", ..." if len(model.newly_initialized) > 3 else ""
        )
        note(
            Phrase(
                "not trained, initialised at random: {weights} ({examples})",
                weights=counted(len(model.newly_initialized), "weight"),
                examples=examples,
            )
        )
    report_ignored(model.ignored)
    return model if options.device is None else model.to(options.device)


def check_device_option(device: str | None) -> None:
    """Raise unless the device of --device can be used; None is the CPU.

    Raises:
        ArgumentError: it cannot be used; the message has torch's reason.

    >>> check_device_option("cpu")
    """
    if device is None:
        return
    from regard.argument_checks import check_usable_device

    check_usable_device(device)


def report_ignored(names: Sequence[str]) -> None:
    """Print on standard error which keys and tensors of a model's folder were ignored."""
    if names:
        examples = ", ".join(short_repr(name) for name in names[:10]) + (
            ", ..." if len(names) > 10 else ""
        )
        note(Phrase("ignored in the model's folder: {examples}", examples=examples))


def check_files(
    files: Mapping[str, Path | None], *, pictures: Mapping[str, Path | None] | None = None
) -> None:
    """Raise an error for files that cannot be written, before anything is computed.

    Args:
        files: flag -> the file that it names; None if the flag was not given.
        pictures: the same for charts, whose names must end in .svg, .png or .pdf.

    Raises:
        typer.BadParameter: the name is not that of a file or picture, or its folder is missing:
            wrong usage, exit code 2.
        FileError: the disk or the permissions do not allow it: a failure, exit code 1.

    >>> check_files({"--html": Path("no such folder/page.html")})
    Traceback (most recent call last):
    typer.BadParameter: no such folder/page.html: there is no folder 'no such folder'; make it first
    """
    pictures = pictures or {}
    for flag, path in {**files, **pictures}.items():
        if path is None:
            continue
        try:
            if flag in pictures:
                from regard.view.plotting import check_format

                check_format(path)
            check_is_file_name(path)
        except FileError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from error
        check_writable(path)
