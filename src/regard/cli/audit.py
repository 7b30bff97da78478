"""`regard audit`: attention code that is not ours, held against what attention is."""

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

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Audit


def show(found: Audit, console: Console) -> None:
    """The findings as a table, then what was not tried."""
    from rich.table import Table

    console.print(f"{found.target}, called {found.called}", highlight=False, markup=False)
    for f in found.findings:
        table = Table(show_header=False, box=None, padding=(0, 1))
        example = ", ".join(f"{name} {value}" for name, value in f.example.items())
        rows = {
            "smallest": example,
            "expected": _say(f.expected),
            "got": _say(f.got),
            "look at": f.look,
        }
        for name, value in rows.items():
            table.add_row(f"  {name}", _plain(value))
        style = "bold red" if f.severity == "error" else "bold yellow"
        console.print()
        console.print(f"{f.severity} {f.name}", style=style, highlight=False, markup=False)
        console.print(f"  {f.sentence}", highlight=False, markup=False)
        console.print(table, highlight=False)
    console.print()
    for known in found.accepted:
        console.print(f"accepted: {known.name}", highlight=False, markup=False)
    kinds = (("could not be made", True, "yellow"), ("does not apply", False, "dim"))
    for title, applies, style in kinds:
        skipped = [check for check in found.not_tried if check.applies == applies]
        if skipped:
            table = Table(title, "why", box=None, padding=(0, 1), header_style=style)
            for check in skipped:
                table.add_row(check.name, _plain(check.why), style=style)
            console.print(table, highlight=False)
    n, open_ = len(found.findings), len(found.untried)
    console.print(
        f"{n} fault{'s' * (n != 1)}, {len(found.held)} checks held, {open_} could not be made, "
        f"{len(found.not_tried) - open_} do not apply"
    )
    if not n and open_:
        console.print("Not a pass: exit code 3, or 0 with --allow-untried.", highlight=False)


def table(console: Console) -> None:
    """Every fault that can be named."""
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
"""Nothing was found, and a check that applies could not be made."""
SIZES, CLAIMS, CALL = "Sizes", "What it says it is", "How it is called"

Target = Annotated[
    str | None,
    typer.Argument(
        help="package.module:name of a class, a function that builds a module, a module, or "
        "attend(q, k, v, ...).",
        show_default="--model",
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        help='Audit a model instead: "tiny", a Hugging Face folder, or org/name on the hub.',
        show_default="none",
    ),
]
Dim = Annotated[int | None, typer.Option(help="The model dim.", rich_help_panel=SIZES)]
Heads = Annotated[int | None, typer.Option(help="Query heads.", rich_help_panel=SIZES)]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads.", rich_help_panel=SIZES)]
HeadDim = Annotated[int | None, typer.Option(help="The size of a head.", rich_help_panel=SIZES)]
Causal = Annotated[
    bool | None,
    typer.Option(
        "--causal/--bidirectional",
        help="Whether later tokens are hidden.",
        show_default="what it does",
        rich_help_panel=CLAIMS,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(help="Keys that a query sees, its own included.", rich_help_panel=CLAIMS),
]
Scale = Annotated[
    float | None,
    typer.Option(help="Of scores.", show_default="1/sqrt(head dim)", rich_help_panel=CLAIMS),
]
Mask = Annotated[
    str | None,
    typer.Option(
        help="What True in a mask means: keep or block; or additive.",
        show_default="what works",
        rich_help_panel=CLAIMS,
    ),
]
Layout = Annotated[
    str, typer.Option(help="Of a function's arguments: BHTD or BTHD.", rich_help_panel=CALL)
]
Rotary = Annotated[
    bool,
    typer.Option("--rotary", help="It is rotate(x) or rotate(x, positions).", rich_help_panel=CALL),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        help="package.module:function of your own: adapter(target, x, ...) -> output.",
        rich_help_panel=CALL,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value for the constructor. Repeatable.", rich_help_panel=CALL),
]
Dtype = Annotated[
    str, typer.Option(help="float32, float16, bfloat16 or float64.", rich_help_panel=CALL)
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="NaN behind a mask may reach nobody, and an empty row must give 0."
    ),
]
Accept = Annotated[
    list[str] | None, typer.Option(help="A fault that is known, and does not count. Repeatable.")
]
Untried = Annotated[
    bool,
    typer.Option(
        "--allow-untried", help="Exit with 0 although a check that applies could not be made."
    ),
]
Seed = Annotated[int, typer.Option(help="Of every random number.")]
List = Annotated[bool, typer.Option("--list", help="List the faults that can be named, and stop.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Color = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colours.", show_default="on a terminal")
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
    """Find what is wrong with attention code: masks, leaks, scale, heads, rotary, windows, caches,
    padding.

    Each fault comes with the smallest input that shows it. Exit code 0: every check that applies
    was made, and nothing was found. 1: faults. 2: wrong usage, or no way to call the code. 3:
    nothing was found, and a check could not be made; --allow-untried makes that 0.
    """
    if list_faults:
        _list(color, json)
        return
    if (target is None) == (model is None):
        raise typer.BadParameter(
            "give package.module:name, or --model and a folder", param_hint="target"
        )
    how = LoadOptions(dtype, ignore=ignore, revision=revision)
    if model is None and (ignore or revision):
        hint = "--ignore" if ignore else "--revision"
        raise typer.BadParameter(
            "is for a model that is loaded with --model; leave it out", param_hint=hint
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
            raise ArgumentError("--rotary and --adapter are two ways to call it; give one")
        found = _audited(
            target,
            model,
            how,
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
        typer.echo(json_format.dumps(found.as_dict(), default=str))
    else:
        show(found, _console(color))
    code = found.exit_code
    if code and not (code == UNTRIED and allow_untried):
        raise typer.Exit(code)


def _audited(target: str | None, model: str | None, how: LoadOptions, **given: Any) -> Audit:
    import torch

    from regard.inspect import audit as run

    names = ("float32", "float16", "bfloat16", "float64")
    if how.dtype not in names:
        raise ArgumentError(f"--dtype is {how.dtype!r}; it must be {', '.join(names)}")
    chosen = getattr(torch, how.dtype)
    what = target if model is None else load(model, how)
    with _progress() as tell:
        found = run(what, dtype=chosen, tell=tell, **given)
    if model is not None:
        from dataclasses import replace

        found = replace(found, target=model)
    return found


@contextmanager
def _progress() -> Iterator[Any]:
    """A line on standard error, on a terminal only."""
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
    """name=value, the value as Python writes it, or else a text."""
    found: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"--set {setting!r} must be name=value")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _list(color: bool | None, json: bool) -> None:
    """The table of faults."""
    from dataclasses import asdict

    from regard.audit import FAULTS

    if json:
        typer.echo(json_format.dumps({name: asdict(fault) for name, fault in FAULTS.items()}))
        return
    table(_console(color))


def _console(color: bool | None) -> Console:
    """A console of 100 columns; colours as asked, else on a terminal that wants them."""
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
