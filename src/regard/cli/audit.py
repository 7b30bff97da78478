"""The command `regard audit`, which tests attention code against the definition of attention."""

from __future__ import annotations

import ast
import json as json_format
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.options import (
    COLOR,
    IGNORE,
    JSON,
    REVISION,
    LoadOptions,
    argument,
    check_device_option,
    console_of,
    dtype_of,
    grouped,
    load,
    option,
    progress_bar,
    usage_error,
)
from regard.errors import ArgumentError, RegardError
from regard.language import translate

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Audit


def print_audit(report: Audit, console: Console) -> None:
    """Print the result of an audit: the faults, and then the checks that were not made."""
    from rich.table import Table

    masked = ", causal mask given"
    how = translate(report.called)
    if report.called.endswith(masked):
        how = report.called.removesuffix(masked) + translate(", causal mask given")
    say = partial(console.print, highlight=False, markup=False)
    say(translate("{target}, called {how}", target=report.target, how=how))
    for f in report.findings:
        table = Table(show_header=False, box=None, padding=(0, 1))
        example = ", ".join(f"{name} {value}" for name, value in f.example.items())
        rows = {
            translate("smallest input"): example,
            translate("expected"): _number_text(f.expected),
            translate("got"): _number_text(f.got),
            translate("look at"): translate(f.look_at),
        }
        for name, value in rows.items():
            table.add_row(f"  {name}", _unstyled(value))
        style, title = "bold red", translate("error {name}", name=f.name)
        if f.severity == "warning":
            style, title = "bold yellow", translate("warning {name}", name=f.name)
        console.print()
        say(title, style=style)
        say(f"  {translate(f.sentence)}")
        console.print(table, highlight=False)
    console.print()
    for known in report.accepted:
        say(translate("accepted: {name}", name=known.name))
    kinds = (
        (translate("could not be made"), True, "yellow"),
        (translate("does not apply"), False, "dim"),
    )
    for title, applies, style in kinds:
        skipped = [check for check in report.not_tried if check.applies == applies]
        if skipped:
            table = Table(title, translate("why"), box=None, padding=(0, 1), header_style=style)
            for check in skipped:
                table.add_row(translate(check.name), _unstyled(translate(check.why)), style=style)
            console.print(table, highlight=False)
    console.print(translate(report.counts()))
    if not report.findings and report.untried:
        console.print(
            translate(
                "The audit did not pass, because of the checks that could not be made: exit code "
                "3, or 0 with --allow-untried."
            ),
            highlight=False,
        )


def print_fault_table(console: Console) -> None:
    """Print the table of all faults."""
    from rich.table import Table

    from regard.audit import FAULTS

    titles = translate("fault"), translate("description"), translate("look at")
    faults = Table(*titles, box=None, padding=(0, 1))
    for name, fault in FAULTS.items():
        texts = map(translate, (fault.summary, fault.look_at))
        faults.add_row(name, *map(_unstyled, texts))
    console.print(faults, highlight=False)


def _unstyled(text: str) -> Any:
    from rich.text import Text

    return Text(text, overflow="fold")  # an ellipsis would cut Chinese text off


def _number_text(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"


EPILOG = "For example: regard audit torch.nn:MultiheadAttention --dim 64 --heads 4"
WIDTH = 100
"""The maximum number of columns of the report."""
UNTRIED = 3
"""The exit code if no fault was found and a check that applies could not be made."""
FROM_CODE = "from the code, or a small size"
size_option = partial(option, panel="Sizes")
claim_option = partial(option, panel="What the code is claimed to be")
call_option = partial(option, panel="How the code is called")


@dataclass(frozen=True)
class CallOptions:
    """What the code is claimed to be, and how it is called: see `regard.audit.AuditClaims`."""

    dim: int | None = size_option("Model width.", shown=FROM_CODE)
    heads: int | None = size_option("Number of query heads.", shown=FROM_CODE)
    kv_heads: int | None = size_option("Number of key/value heads.", shown=FROM_CODE)
    head_dim: int | None = size_option("Width of one head.", shown=FROM_CODE)
    causal: bool | None = claim_option(
        "Whether the code must hide later tokens.",
        "--causal/--bidirectional",
        shown="what the code does",
    )
    window: int | None = claim_option("Number of keys that a query attends to, its own included.")
    scale: float | None = claim_option("Factor on the scores.", shown="1/sqrt(head dim)")
    mask: str | None = claim_option(
        "Mask convention: keep (True = may attend), block (True = hidden) or additive.",
        shown="the convention under which the checks pass",
    )
    layout: str = call_option(
        "Dimension order of the tensors that a function takes: BHTD (batch, heads, tokens, "
        "head dim) or BTHD.",
        default="BHTD",
    )


@grouped
def audit(
    target: str | None = argument(
        "The code to audit, as package.module:name: a module class, a function that builds a "
        "module, a module, or a function attend(q, k, v, ...). Or the .safetensors file of a "
        "recording, whose rows and outputs are checked.",
        shown="the model of --model",
    ),
    model: str | None = option(
        'Audit a model instead: "tiny", a Hugging Face folder, or org/name on the hub.'
    ),
    rotary: bool = call_option(
        "The target is a function rotate(x) or rotate(x, positions).", "--rotary", default=False
    ),
    adapter: str | None = call_option(
        "Your own function that calls the target, as package.module:name. Its signature is "
        "adapter(target, x, ...) -> output."
    ),
    settings: list[str] | None = call_option(
        "Argument of the constructor, as name=value. Repeatable.", "--set"
    ),
    dtype: str = call_option(
        "Number format in which the code runs: float32, float16, bfloat16 or float64.",
        default="float32",
    ),
    device: str | None = call_option(
        "Device on which the code runs: cpu, cuda, ... The checks compute on the CPU.",
        shown="the CPU",
    ),
    revision: str | None = REVISION,
    ignore: list[str] | None = IGNORE,
    strict: bool = option(
        "Also require that NaN at a masked key reaches no output, and that the output of a "
        "query whose keys are all masked is 0.",
        "--strict",
        default=False,
    ),
    accept: list[str] | None = option(
        "Name of a known fault, which is listed but does not change the exit code. Repeatable."
    ),
    allow_untried: bool = option(
        "Exit with 0 even if a check that applies could not be made.",
        "--allow-untried",
        default=False,
    ),
    seed: int = option("Random seed for weights and inputs.", default=0),
    list_faults: bool = option(
        "List all faults that the audit can name, and exit.", "--list", default=False
    ),
    json: bool = JSON,
    color: bool | None = COLOR,
    *,
    claims: CallOptions,
) -> None:
    """Find faults in attention code: masks, leaks, scale, heads, rotary, windows, caches, padding.

    Each fault is shown with the smallest input that reproduces it. The exit code is 0 if all checks
    that apply were made and found no fault, 1 if there are faults, 2 if the usage is wrong or the
    audit does not find out how to call the code, and 3 if no fault was found but a check that
    applies could not be made (0 with --allow-untried).
    """
    if list_faults:
        _list(color, json)
        return
    if (target is None) == (model is None):
        raise usage_error("TARGET", "give either package.module:name or --model with a folder")
    check_device_option(device)
    load_options = LoadOptions(dtype, ignore=ignore, revision=revision)
    if model is None and (ignore or revision):
        hint = "--ignore" if ignore else "--revision"
        raise usage_error(hint, "only applies to a model that --model loads; leave it out")
    try:
        if rotary and adapter:
            raise usage_error(
                None, "--rotary and --adapter are two ways to call the target; give one of them"
            )
        report = _run_audit(
            target,
            model,
            load_options,
            adapter="rotary" if rotary else adapter,
            options=_options(settings),
            strict=strict,
            accept=accept or (),
            seed=seed,
            device=device,
            **vars(claims),
        )
    except RegardError as error:  # 1 means faults
        raise ArgumentError(str(error), argument=error.argument, value=error.value) from error
    if json:
        typer.echo(json_format.dumps(report.as_dict(), default=str))
    else:
        print_audit(report, console_of(color, WIDTH))
    code = report.exit_code
    if code and not (code == UNTRIED and allow_untried):
        raise typer.Exit(code)


def _run_audit(
    target: str | None, model: str | None, load_options: LoadOptions, **audit_options: Any
) -> Audit:
    from regard.inspect import audit as run

    dtype = dtype_of(str(load_options.dtype))
    audited_code: object = target if model is None else load(model, load_options)
    name = model
    if target is not None and target.endswith(".safetensors"):
        from regard.inspect import load as load_recording

        audited_code, name = load_recording(target), target
    with progress_bar() as progress:
        report = run(audited_code, dtype=dtype, progress=progress, **audit_options)
    if name is not None:
        from dataclasses import replace

        report = replace(report, target=name)
    return report


def _options(settings: list[str] | None) -> dict[str, object]:
    """Parse name=value settings: the value is a Python literal, or else a string."""
    options: dict[str, object] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise usage_error(
                "--set",
                "{setting!r} must be name=value, such as --set dropout=0.0",
                setting=setting,
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _list(color: bool | None, json: bool) -> None:
    """Print all faults, as a table or as JSON."""
    from dataclasses import asdict

    from regard.audit import FAULTS

    if json:
        typer.echo(json_format.dumps({name: asdict(fault) for name, fault in FAULTS.items()}))
        return
    print_fault_table(console_of(color, WIDTH))
