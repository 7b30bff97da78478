"""The command `regard audit`, which tests other people's attention code against the definition of
attention.
"""

from __future__ import annotations

import ast
import json as json_format
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Ignore, LoadOptions, Revision, load
from regard.errors import ArgumentError, RegardError
from regard.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Audit


def show(result: Audit, console: Console) -> None:
    """Print the faults as tables, then the checks that were not made."""
    from rich.table import Table

    console.print(f"{result.target}, called {result.called}", highlight=False, markup=False)
    for fault in result.findings:
        table = Table(show_header=False, box=None, padding=(0, 1))
        example = ", ".join(f"{name} {value}" for name, value in fault.example.items())
        rows = {
            "smallest input": example,
            "expected": _say(fault.expected),
            "got": _say(fault.got),
            "look at": fault.look,
        }
        for name, value in rows.items():
            table.add_row(f"  {name}", _plain(value))
        style = "bold red" if fault.severity == "error" else "bold yellow"
        console.print()
        console.print(f"{fault.severity} {fault.name}", style=style, highlight=False, markup=False)
        console.print(f"  {fault.sentence}", highlight=False, markup=False)
        console.print(table, highlight=False)
    console.print()
    for known in result.accepted:
        console.print(f"accepted: {known.name}", highlight=False, markup=False)
    kinds = (
        ("checks that could not be made", True, "yellow"),
        ("checks that do not apply", False, "dim"),
    )
    for title, applies, style in kinds:
        skipped = [check for check in result.not_tried if check.applies == applies]
        if skipped:
            table = Table(title, "why", box=None, padding=(0, 1), header_style=style)
            for check in skipped:
                table.add_row(check.name, _plain(check.why), style=style)
            console.print(table, highlight=False)
    fault_count, open_ = len(result.findings), len(result.untried)
    console.print(
        f"{plural(fault_count, 'fault')}, {plural(len(result.held), 'check')} held, {open_} "
        "could not be made, "
        f"{len(result.not_tried) - open_} do not apply"
    )
    if not fault_count and open_:
        console.print(
            "Checks could not be made, so this is not a pass: exit code 3, or 0 with "
            "--allow-untried.",
            highlight=False,
        )


def table(console: Console) -> None:
    """Print a table of every fault that can be found."""
    from rich.table import Table

    from regard.audit import FAULTS

    faults = Table("fault", "what it is", "look at", box=None, padding=(0, 1))
    for name, fault in FAULTS.items():
        faults.add_row(name, _plain(fault.what), _plain(fault.look))
    console.print(faults, highlight=False)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _say(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"


EPILOG = "For example: regard audit torch.nn:MultiheadAttention --dim 64 --heads 4"
UNTRIED = 3
"""Exit code if nothing was found, but a check that applies could not be made."""
SIZES, CLAIMS, CALL = "Sizes", "Expected behaviour", "How the code is called"

Target = Annotated[
    str | None,
    typer.Argument(
        help=(
            "The code to test, as package.module:name: a class, a function that "
            "builds a module, a module, or a function attend(q, k, v, ...)."
        ),
        show_default="none, with --model",
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        help=('Test a model instead: "tiny", a Hugging Face folder, or org/name on the hub.'),
        show_default="none",
    ),
]
Dim = Annotated[int | None, typer.Option(help="Model width M.", rich_help_panel=SIZES)]
Heads = Annotated[int | None, typer.Option(help="Number of query heads.", rich_help_panel=SIZES)]
KvHeads = Annotated[
    int | None, typer.Option(help="Number of key/value heads.", rich_help_panel=SIZES)
]
HeadDim = Annotated[int | None, typer.Option(help="Width of a head.", rich_help_panel=SIZES)]
Causal = Annotated[
    bool | None,
    typer.Option(
        "--causal/--bidirectional",
        help="Whether later tokens are masked.",
        show_default="detected",
        rich_help_panel=CLAIMS,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Number of keys that a query attends to, its own included.", rich_help_panel=CLAIMS
    ),
]
Scale = Annotated[
    float | None,
    typer.Option(
        help="Factor of the scores.", show_default="1/sqrt(head dim)", rich_help_panel=CLAIMS
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        help=(
            "Meaning of a mask argument: keep (True may attend), block (True is "
            "masked), or additive."
        ),
        show_default="detected",
        rich_help_panel=CLAIMS,
    ),
]
Layout = Annotated[
    str,
    typer.Option(help="Axis order of a function's arguments: BHTD or BTHD.", rich_help_panel=CALL),
]
Rotary = Annotated[
    bool,
    typer.Option(
        "--rotary",
        help="The code is a rotary embedding: rotate(x) or rotate(x, positions).",
        rich_help_panel=CALL,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        help=(
            "Your own function that calls the code, as package.module:function: "
            "adapter(target, x, ...) -> output."
        ),
        rich_help_panel=CALL,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Argument of the constructor, as name=value. Repeatable.",
        rich_help_panel=CALL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number format: float32, float16, bfloat16 or float64.", rich_help_panel=CALL
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help=(
            "Also require that NaN in a masked position changes nothing, and that a "
            "row without visible keys gives 0."
        ),
    ),
]
Accept = Annotated[
    list[str] | None, typer.Option(help="Name of a known fault that does not count. Repeatable.")
]
Untried = Annotated[
    bool,
    typer.Option(
        "--allow-untried", help="Exit with 0 even if a check that applies could not be made."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed for weights and inputs.")]
List = Annotated[bool, typer.Option("--list", help="List the faults that can be found, and exit.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Color = Annotated[
    bool | None,
    typer.Option("--color/--no-color", help="Print in colour.", show_default="on a terminal"),
]


def audit(
    target: Target = None,
    model: Folder = None,
    dim: Dim = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    causal: Causal = None,
    window: Window = None,
    scale: Scale = None,
    mask: Mask = None,
    layout: Layout = "BHTD",
    rotary: Rotary = False,
    adapter: Adapter = None,
    settings: Set = None,
    dtype: Dtype = "float32",
    revision: Revision = None,
    ignore: Ignore = None,
    strict: Strict = False,
    accept: Accept = None,
    allow_untried: Untried = False,
    seed: Seed = 0,
    list_faults: List = False,
    json: Json = False,
    color: Color = None,
) -> None:
    """Test attention code for faults in masks, causality, scale, heads, rotary positions, windows,
    caches and padding.

    Each fault is shown with the smallest input that reproduces it. Exit codes: 0 if every check
    that applies was made and nothing was found; 1 if there are faults; 2 for wrong usage, or if the
    code cannot be called; 3 if nothing was found but a check could not be made, which
    --allow-untried turns into 0.
    """
    if list_faults:
        _list(color, json)
        return
    if (target is None) == (model is None):
        raise typer.BadParameter(
            "give either package.module:name, or --model with a model", param_hint="target"
        )
    load_options = LoadOptions(dtype, ignore=ignore, revision=revision)
    if model is None and (ignore or revision):
        hint = "--ignore" if ignore else "--revision"
        raise typer.BadParameter(
            "applies only to a model that is loaded with --model; leave it out", param_hint=hint
        )
    claims = {
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "causal": causal,
        "window": window,
        "scale": scale,
        "mask": mask,
        "layout": layout,
    }
    try:
        if rotary and adapter:
            raise ArgumentError(
                "--rotary and --adapter both say how the code is called; give only one of them"
            )
        result = _audited(
            target,
            model,
            load_options,
            adapter="rotary" if rotary else adapter,
            options=_options(settings),
            strict=strict,
            accept=accept or (),
            seed=seed,
            **claims,
        )
    except RegardError as error:  # 1 means faults
        raise typer.BadParameter(str(error)) from error
    if json:
        typer.echo(json_format.dumps(result.as_dict(), default=str))
    else:
        show(result, _console(color))
    exit_code = result.exit_code
    if exit_code and not (exit_code == UNTRIED and allow_untried):
        raise typer.Exit(exit_code)


def _audited(
    target: str | None, model: str | None, load_options: LoadOptions, **options: Any
) -> Audit:
    import torch

    from regard.inspect import audit as run

    names = ("float32", "float16", "bfloat16", "float64")
    if load_options.dtype not in names:
        raise ArgumentError(f"--dtype is {load_options.dtype!r}; it must be {', '.join(names)}")
    torch_dtype = getattr(torch, load_options.dtype)
    subject = target if model is None else load(model, load_options)
    with _progress() as report:
        result = run(subject, dtype=torch_dtype, tell=report, **options)
    if model is not None:
        from dataclasses import replace

        result = replace(result, target=model)
    return result


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a progress bar on standard error, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=1.0)

        def tell(name: str, n: int, total: int) -> None:
            bar.update(task, description=name, completed=n / total)

        yield tell


def _options(settings: list[str] | None) -> dict[str, Any]:
    """Return the name=value settings as a dictionary; values are Python literals, or otherwise
    text.
    """
    values: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"--set {setting!r} must be name=value")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


def _list(color: bool | None, json: bool) -> None:
    """Print the table of faults, or the same as JSON."""
    from dataclasses import asdict

    from regard.audit import FAULTS

    if json:
        typer.echo(json_format.dumps({name: asdict(fault) for name, fault in FAULTS.items()}))
        return
    table(_console(color))


def _console(color: bool | None) -> Console:
    """Return a console of 100 columns, with colours as requested or as the terminal supports."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a glyph shows "?"
    if color is None:
        return Console(width=100)
    return Console(
        width=100,
        force_terminal=color,
        no_color=not color,
        color_system="truecolor" if color else None,
    )
