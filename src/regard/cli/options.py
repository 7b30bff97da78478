"""Options and helpers that several commands share: how a model is loaded, and checks of the files
to write.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import typer
from typer.models import ParameterInfo

from regard.errors import FileError
from regard.files.atomic_write import check_is_file_name, check_writable
from regard.files.reading import open_regular, read_json
from regard.language import Phrase, counted, translate, translate_count
from regard.text_table import line_width, wrap
from regard.units import size
from regard.untrusted_text import short_repr

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from regard.models import Model, Seq2Seq, TextEncoder
    from regard.models.generation import SamplingParams

LoadedModel = TypeVar("LoadedModel")


def option(
    text: str,
    *flags: str,
    default: object = None,
    panel: str | None = None,
    shown: str | bool = True,
    **limits: Any,
) -> Any:
    """Return an option of a command: its help, its flags if they differ from the parameter's name,
    its default, the group on the help page, and what the page shows as the default.
    """
    names: tuple[Any, ...] = (default, *flags)
    return typer.Option(*names, help=text, show_default=shown, rich_help_panel=panel, **limits)


def argument(
    text: str, default: object = None, metavar: str | None = None, shown: str | bool = True
) -> Any:
    """Return an argument of a command, as `option` returns an option; ... is required."""
    return typer.Argument(default, help=text, metavar=metavar, show_default=shown)


model_option = partial(option, panel="The model")
"""Return an option with which a model is loaded."""
reading_option = partial(option, panel="How the text is read")
"""Return an option with which a text becomes ids."""
sampling_option = partial(option, panel="Sampling")
"""Return an option with which each next token is chosen."""

WEIGHTS = model_option(
    "Store the weights of linear maps in fewer bits: int8 or int4, or float16 or bfloat16 "
    "under float32.",
    shown="as the checkpoint",
)

SOURCE = model_option(
    'The model: "tiny", which comes with the package, "minilm" or "smollm2" from packages, a '
    "Hugging Face folder, a GGUF file, or org/name on the hub.",
    default="tiny",
)
DTYPE = model_option(
    "Number format to compute in: float32, float16, bfloat16 or float64.",
    shown="the checkpoint's dtype",
)
DEVICE = model_option("Device: cpu, cuda, ...", shown="the CPU")
REVISION = model_option(
    "The branch, tag or commit of a repository on the hub.", shown="main branch"
)
ADAPTER = model_option(
    "Merge this LoRA or DoRA adapter of PEFT into the weights.", metavar="FOLDER"
)
ALLOW_MISSING = model_option(
    "Names of weights that the folder may lack (* and ? match); they are then random, not "
    "trained. Repeatable."
)
IGNORE = model_option(
    "Unknown keys of config.json and names of stored tensors (* and ? match) to ignore, because "
    "they change nothing. Repeatable."
)
FINITE = model_option("Refuse weights that are NaN or infinite.", "--finite", default=False)
TEXT_FILE = option(
    "Read the text from this file (UTF-8) instead; - is standard input.", "--file", metavar="PATH"
)
SET = option("Option of the mechanism, as name=value. Repeatable.", "--set")
THREADS = option("Number of CPU threads.", min=1, shown="torch's number")
HTML_PAGE = option("Write an HTML page with plots to this file.", metavar="FILE")
JSON = option("Print the results as JSON.", "--json", default=False)
COLOR = option("Print in colour.", "--color/--no-color", shown="on a terminal")
LANG = option("Language of the output: en or zh.", shown="that of the locale")

MAX_TEXT_BYTES = 1 << 28
"""The largest text that a command reads from a file: 256 MiB."""
CONSOLE_WIDTH = 80
"""The number of columns of output that is laid out, in a file, a pipe or a wide terminal."""
LONG_TEXT = 20_000
"""Characters from which a command says that it works, even without a terminal."""


def usage_error(option: str | None, text: str, /, **values: object) -> typer.BadParameter:
    """Return the error that an option of a command is wrong, in the reader's language."""
    return typer.BadParameter(translate(text, **values), param_hint=option)


def refuse_given(flags: Mapping[str, object], reason: str) -> None:
    """Raise an error about the first flag that has a value; the reason says why it does not apply.

    >>> refuse_given({"--seed": 0}, "applies to a model; leave it out")
    """
    for flag in (flag for flag, value in flags.items() if value):
        raise usage_error(flag, reason)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: typer sees one option for each field of a parameter
    whose type is a dataclass, and the command gets the dataclass.

    The option of a field is its default, or what its type is annotated with.
    """
    hints = get_type_hints(command)
    kinds: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    groups = {name: (kind, _options_of(kind)) for name, kind in kinds.items()}
    parameters: dict[str, tuple[Any, object]] = {}
    for name, own in inspect.signature(command).parameters.items():
        own_option = {name: (hints[name], own.default)}
        parameters |= groups[name][1] if name in groups else own_option

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (group, options) in groups.items():
            values[name] = group(**{x: values.pop(x) for x in options})
        command(**values)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in parameters.items()
        ]
    )
    call.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    del call.__wrapped__  # its signature is another one
    return call


def options_on_command_line(context: typer.Context, options: Iterable[str]) -> set[str]:
    """Return the names of the options that were given on the command line, not by default."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name for name, where in sources.items() if where and where.name == "COMMANDLINE"}


def command_line() -> str:
    """Return the command that is running, as a shell takes it."""
    return shlex.join(["regard", *sys.argv[1:]])


def _options_of(group: Any) -> dict[str, tuple[Any, object]]:
    """Return the type and the option of each field that is one: its default, or what its type is
    annotated with.
    """
    types = get_type_hints(group, include_extras=True)
    options = {
        x.name: get_args(types[x.name])
        if get_origin(types[x.name]) is Annotated
        else (types[x.name], x.default)
        for x in fields(group)
    }
    return {name: x for name, x in options.items() if isinstance(x[1], ParameterInfo)}


def given_text(text: str | None, file: str | None) -> str:
    """Return the text of a command: the argument, the contents of `--file`, or standard input.

    Prints a hint on standard error if the argument is the path of a file.
    """
    if (text is None) == (file is None):
        state = Phrase("both were given" if text is not None else "neither was given")
        raise usage_error("TEXT", "give a TEXT or --file PATH; {state}", state=state)
    if file is None:
        assert text is not None
        if _is_file(text):
            note(
                "the text is the name of a file: to read the file, write --file {text}",
                text=short_repr(text),
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


def note(message: str, start: str = "", /, **values: object) -> None:
    """Print a remark on standard error, in the reader's language and within the terminal."""
    typer.echo(wrap(start + translate(message, **values), line_width()), err=True)


@contextmanager
def working(what: str, characters: int) -> Iterator[Callable[[str], None]]:
    """Show on standard error that work goes on, and for how long: a moving bar on a terminal, and
    otherwise one line if the text is long.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    what = translate(what)
    console = Console(stderr=True)
    if not console.file.isatty():  # rich's own word follows FORCE_COLOR, even in a pipe
        if characters >= LONG_TEXT:
            note("{what}: {size}", what=what, size=translate_count(characters, "character"))
        yield lambda _: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=translate(text))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error, if that is a terminal, what is done now, and how much of all."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, n, total: bar.update(
            task, description=translate(name), completed=n / total
        )


@dataclass(frozen=True)
class LoadOptions:
    """The options with which a command loads a model, as `regard.load` takes them."""

    dtype: Annotated[str | None, DTYPE] = None
    device: Annotated[str | None, DEVICE] = None
    revision: Annotated[str | None, REVISION] = None
    adapter: Annotated[str | None, ADAPTER] = None
    allow_missing: Annotated[list[str] | None, ALLOW_MISSING] = None
    ignore: Annotated[list[str] | None, IGNORE] = None
    finite: Annotated[bool, FINITE] = False
    weights: str | None = None

    def flags_given(self) -> list[str]:
        """Return the flags of the options that were given, for errors of commands that load no
        model.

        >>> LoadOptions(finite=True, ignore=["a"]).flags_given()
        ['--ignore', '--finite']
        """
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name)]


@dataclass(frozen=True)
class PromptOptions:
    """The options with which a command reads its texts: as they are, as ids, or as messages."""

    chat: bool = reading_option(
        "Each text is a message of a user, written in the model's chat template.",
        "--chat",
        default=False,
    )
    messages: Path | None = reading_option(
        'JSON file with the messages of a conversation, instead of a text: [{"role": "user", '
        '"content": "..."}].'
    )
    ids: bool = reading_option("Each text is token ids, such as '12 7 9'.", "--ids", default=False)
    special: bool | None = reading_option(
        "Read names of special tokens in texts as these tokens, or as ordinary text.",
        "--special/--no-special",
        shown="as text, with a warning",
    )

    def flags_given(self) -> list[str]:
        """Return the flags of the options that were given, for what takes plain texts only.

        >>> PromptOptions(False, None, True, False).flags_given()
        ['--ids', '--no-special']
        """
        flags = [f"--{f.name}" for f in fields(self) if getattr(self, f.name)]
        return flags + ["--no-special"] * (self.special is False)

    def prompts(self, texts: Callable[[], Sequence[str]], *, has_texts: bool) -> list[Any]:
        """Return the prompts: texts, ids, or messages; `texts` returns those of the command line,
        if it has some.

        >>> PromptOptions(False, None, True, None).prompts(lambda: ["12 7"], has_texts=True)
        [[12, 7]]
        """
        if self.chat and self.ids:
            raise usage_error("--ids", "are no messages; leave out --chat or --ids")
        if self.messages is not None:
            if self.chat or self.ids or has_texts:
                raise usage_error(
                    "--messages", "is the whole prompt; leave out the text, --chat and --ids"
                )
            return [read_json(self.messages, limit=MAX_TEXT_BYTES, kind=list)]
        if self.chat:
            return [[{"role": "user", "content": text}] for text in texts()]
        if not self.ids:
            return list(texts())
        return [_ids_of(text) for text in texts()]

    def prompt(self, text: str | None, file: str | None) -> Any:
        """Return the prompt of a command that takes one TEXT or --file."""
        has_texts = text is not None or file is not None
        return self.prompts(lambda: [given_text(text, file)], has_texts=has_texts)[0]

    def read(self, model: Model | TextEncoder | Seq2Seq, prompts: Sequence[Any]) -> list[Any]:
        """Return prompts as the package takes them: texts that need nothing else, or ids [1, T].

        Says on standard error that a text contains the name of a special token, if no option tells
        how it is read.
        """
        import torch

        from regard.models import Model, TextEncoder
        from regard.models.prompts import encode_prompt

        if not isinstance(model, Model):
            flags = self.flags_given()
            if isinstance(model, TextEncoder):
                flags = [x for x in flags if x in ("--chat", "--messages")]
            if flags:
                raise usage_error(flags[0], "applies to a decoder, and this model is none")
        if self.special is None and model.has_tokenizer:
            note_names(model, prompts)
        if isinstance(model, TextEncoder):
            if self.ids:
                return [torch.tensor([x], device=model.device) for x in prompts]
            special = bool(self.special)
            return [model.encode(x, special=special).ids if special else x for x in prompts]
        if not isinstance(model, Model) or not self.flags_given():
            return list(prompts)
        return [
            torch.tensor([encode_prompt(model, x, special=bool(self.special))], device=model.device)
            for x in prompts
        ]


def note_names(model: Model | TextEncoder | Seq2Seq, prompts: Sequence[Any]) -> None:
    """Say that a prompt contains the name of a special token, which is read as ordinary text."""
    tokenizer = model.tokenizer
    for name in tokenizer.special_names(json.dumps(prompts, ensure_ascii=False))[:1]:
        note(
            "the prompt contains {name}, the name of a special token, which is read as ordinary "
            "text; --special reads such names as the tokens, and --no-special says that this is "
            "meant",
            name=name,
        )
    tokenizer.has_warned = True  # said here; the package says it to those who call it


def _ids_of(text: str) -> list[int]:
    """Return the ids that a text lists."""
    try:
        return [int(index) for index in text.replace(",", " ").split()]
    except ValueError as error:
        raise usage_error(
            "--ids", "{text} is no list of ids such as '12 7 9'", text=short_repr(text)
        ) from error


@dataclass(frozen=True)
class SamplingOptions:
    """The options with which a command chooses each next token."""

    temperature: float = sampling_option(
        "0 takes the most likely token; larger values are more random.", default=0.0, min=0
    )
    top_k: int | None = sampling_option(
        "Sample only from the k most likely tokens.", shown="all tokens", min=1
    )
    top_p: float | None = sampling_option(
        "Sample only from the most likely tokens whose probabilities sum to p.",
        shown="all tokens",
        min=0,
        max=1,
    )
    min_p: float | None = sampling_option(
        "Sample only from tokens with at least p times the probability of the most likely one.",
        shown="all tokens",
        min=0,
        max=1,
    )
    repetition_penalty: float = sampling_option(
        "Values above 1 make tokens that are already in the text less likely.", default=1.0, min=0
    )
    seed: int = sampling_option(
        "Random seed; of several prompts, each has the next one.", default=0
    )

    def params(self) -> SamplingParams:
        """Return them as generation takes them; raise for one that would have no effect."""
        from regard.models.generation import SamplingParams

        params = SamplingParams(**asdict(self))
        filters = {"--top-k": self.top_k, "--top-p": self.top_p, "--min-p": self.min_p}
        for flag in (flag for flag, value in filters.items() if value is not None):
            if params.greedy:
                raise usage_error(
                    flag,
                    "has no effect at temperature 0, at which the most likely token is taken; "
                    "leave it out, or give a temperature, such as --temperature 0.8",
                )
        return params


@dataclass(frozen=True)
class ProposalOptions:
    """The options with which a command lets a model read several proposed tokens at once."""

    speculate: Literal["lookup"] | None = sampling_option(
        "Propose tokens that followed the last ones before in the text, and read several at once; "
        "the result is the same.",
        shown="off",
    )
    draft: str | None = sampling_option(
        "A smaller model with the same tokens, which proposes them instead.",
        metavar="MODEL",
        shown="none",
    )

    def chosen(self, options: LoadOptions) -> dict[str, Any]:
        """Return them as generation takes them; the draft is loaded as the model is."""
        from regard.models import Model

        draft = None if self.draft is None else load(self.draft, options, Model)
        return {"speculate": self.speculate, "draft": draft}


@overload
def load(source: str, options: LoadOptions, kind: type[LoadedModel]) -> LoadedModel: ...
@overload
def load(source: str, options: LoadOptions) -> Model | TextEncoder | Seq2Seq: ...
def load(source: str, options: LoadOptions, kind: type[object] | None = None) -> object:
    """Load a model with `regard.load`.

    Prints on standard error which weights are randomly initialized, because the folder lacks them,
    and which keys and tensors were ignored.
    """
    import regard

    check_device_option(options.device)  # before the weights are read
    kind_option: dict[str, Any] = {} if kind is None else {"kind": kind}
    model = regard.load(
        source,
        dtype=None if options.dtype is None else dtype_of(options.dtype),
        weights=options.weights,
        revision=options.revision,
        adapter=options.adapter,
        allow_missing=options.allow_missing or (),
        ignore=options.ignore or (),
        finite=options.finite,
        **kind_option,
    )
    if model.newly_initialized:
        note(
            "not trained, initialized at random: {weights} ({examples})",
            weights=counted(len(model.newly_initialized), "weight"),
            examples=_examples(model.newly_initialized, 3),
        )
    report_ignored(model.ignored)
    if model.converted is not None:
        known = model.converted
        note(
            "{converted} of {matrices} matrices of {method} became plain numbers, because no "
            "stored form has the same ones: {before} became {after}",
            converted=known.converted,
            matrices=known.matrices,
            method=known.method,
            before=size(known.bytes_before),
            after=size(known.bytes_after),
        )
    return model if options.device is None else model.to(options.device)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that --dtype names.

    >>> dtype_of("float16")
    torch.float16
    """
    import torch

    names = ("float32", "float16", "bfloat16", "float64")
    if name not in names:
        names_text = ", ".join(names)
        raise usage_error(
            "--dtype", "{dtype!r} is not one of {names}", dtype=name, names=names_text
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_device_option(device: str | None) -> None:
    """Raise unless the device of --device can be used; None is the CPU.

    >>> check_device_option("cpu")
    """
    if device is None:
        return
    from regard.argument_checks import check_usable_device

    check_usable_device(device)


def report_ignored(names: Sequence[str]) -> None:
    """Print on standard error which keys and tensors of a model's folder were ignored."""
    if names:
        examples = _examples([short_repr(name) for name in names], 10)
        note("ignored in the model's folder: {examples}", examples=examples)


def _examples(names: Sequence[str], most: int) -> str:
    """Return the first names of a list."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def check_files(
    files: Mapping[str, Path | None], *, pictures: Mapping[str, Path | None] | None = None
) -> None:
    """Raise an error for files that cannot be written, before anything is computed."""
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
