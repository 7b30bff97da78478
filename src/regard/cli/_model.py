"""The options of every command that loads a model, and the loading itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import typer

if TYPE_CHECKING:
    from regard.models import Model, Seq2Seq, TextEncoder

Held = TypeVar("Held")
PANEL = "The model"

Source = Annotated[
    str,
    typer.Option(
        help='"tiny", which comes with the package, a Hugging Face folder, or org/name on the hub.',
        rich_help_panel=PANEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Compute in float32, float16, bfloat16 or float64.",
        show_default="the checkpoint's",
        rich_help_panel=PANEL,
    ),
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        help="Names (*, ?) of weights that the folder may lack: they are then random, not "
        "trained. Repeatable.",
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
        help="Unknown keys of config.json, and stored tensors (*, ?), that change nothing and are "
        "passed over. Repeatable.",
        rich_help_panel=PANEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Of a repository of the hub: a branch, a tag or a commit.",
        show_default="its main branch",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True)
class How:
    """How a command loads a model: its options, as `regard.load` takes them.

    Attributes:
        dtype: the name of a floating-point dtype, or None.
        allow_missing, ignore: patterns, or None.
        finite: whether NaN and infinity are refused.
        revision: of a repository of the hub.
    """

    dtype: str | None = None
    allow_missing: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    finite: bool = False
    revision: str | None = None

    def given(self) -> list[str]:
        """The options that were given, which say nothing where no model is loaded.

        >>> How(finite=True, ignore=["a"]).given()
        ['--ignore', '--finite']
        """
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name)]


@overload
def load(source: str, how: How, kind: type[Held]) -> Held: ...
@overload
def load(source: str, how: How) -> Model | TextEncoder | Seq2Seq: ...
def load(source: str, how: How, kind: type[Any] | None = None) -> Any:
    """The model that the options name; weights that are not trained, and what was passed over, are
    told on standard error.
    """
    import torch

    import regard

    names = ("float32", "float16", "bfloat16", "float64")
    if how.dtype is not None and how.dtype not in names:
        raise typer.BadParameter(f"{how.dtype!r} is not {', '.join(names)}", param_hint="--dtype")
    chosen = None if how.dtype is None else getattr(torch, how.dtype)
    given: dict[str, Any] = {} if kind is None else {"kind": kind}
    model = regard.load(
        source,
        dtype=chosen,
        revision=how.revision,
        allow_missing=how.allow_missing or (),
        ignore=how.ignore or (),
        finite=how.finite,
        **given,
    )
    if model.fresh:
        some = ", ".join(model.fresh[:3]) + (", ..." if len(model.fresh) > 3 else "")
        typer.echo(f"{len(model.fresh)} weights are random, not trained: {some}", err=True)
    tell_ignored(model.ignored)
    return model


def tell_ignored(names: Sequence[str]) -> None:
    """Say on standard error what of a model's folder was passed over."""
    from regard.foreign import shown

    if names:
        some = ", ".join(shown(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
        typer.echo(f"passed over in the model's folder: {some}", err=True)
