"""The options of every command that loads a model, and the loading itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import typer

if TYPE_CHECKING:
    from regard.models import Model, Seq2Seq, TextEncoder

Held = TypeVar("Held")
PANEL = "The model"

Source = Annotated[
    str,
    typer.Option(
        help='"tiny", which comes with the package, or a Hugging Face folder.', rich_help_panel=PANEL
    ),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Compute in float32, float16, bfloat16 or float64.", show_default="the checkpoint's",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        help="Names (*, ?) of weights that the folder may lack: they are then random, not trained. Repeatable.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
Finite = Annotated[
    bool,
    typer.Option("--finite", help="Refuse weights that are NaN or infinite.", rich_help_panel=PANEL),
]  # fmt: skip


@overload
def load(
    source: str, dtype: str | None, allow_missing: list[str] | None, finite: bool, kind: type[Held]
) -> Held: ...
@overload
def load(
    source: str, dtype: str | None, allow_missing: list[str] | None, finite: bool
) -> Model | TextEncoder | Seq2Seq: ...
def load(
    source: str,
    dtype: str | None,
    allow_missing: list[str] | None,
    finite: bool,
    kind: type[Any] | None = None,
) -> Any:
    """The model that the options name; weights that are not trained are told of on standard error."""
    import torch

    import regard

    names = ("float32", "float16", "bfloat16", "float64")
    if dtype is not None and dtype not in names:
        raise typer.BadParameter(f"{dtype!r} is not {', '.join(names)}", param_hint="--dtype")
    chosen = None if dtype is None else getattr(torch, dtype)
    given: dict[str, Any] = {} if kind is None else {"kind": kind}
    model = regard.load(
        source, dtype=chosen, allow_missing=allow_missing or (), finite=finite, **given
    )
    if model.fresh:
        some = ", ".join(model.fresh[:3]) + (", ..." if len(model.fresh) > 3 else "")
        typer.echo(f"{len(model.fresh)} weights are random, not trained: {some}", err=True)
    return model
