"""What several commands share: the options of the model that they load, its loading, and the files
that they are to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import typer

from regard.errors import FileError
from regard.files.write import check_place, check_target
from regard.foreign import shown

if TYPE_CHECKING:
    from regard.models import Model, Seq2Seq, TextEncoder

LoadedModel = TypeVar("LoadedModel")
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
class LoadOptions:
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

        >>> LoadOptions(finite=True, ignore=["a"]).given()
        ['--ignore', '--finite']
        """
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name)]


@overload
def load(source: str, how: LoadOptions, kind: type[LoadedModel]) -> LoadedModel: ...
@overload
def load(source: str, how: LoadOptions) -> Model | TextEncoder | Seq2Seq: ...
def load(source: str, how: LoadOptions, kind: type[Any] | None = None) -> Any:
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
    report_ignored(model.ignored)
    return model


def report_ignored(names: Sequence[str]) -> None:
    """Say on standard error what of a model's folder was passed over."""
    if names:
        some = ", ".join(shown(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
        typer.echo(f"passed over in the model's folder: {some}", err=True)


def check_files(
    files: Mapping[str, Path | None], *, pictures: Mapping[str, Path | None] | None = None
) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Args:
        files: flag -> the file that it names; None: the flag was not given.
        pictures: the same of charts, whose ending must be one of a picture.

    Raises:
        typer.BadParameter: the name is no file's or no picture's, or its folder is missing: wrong
            usage, exit code 2.
        FileError: the disk or the permissions refuse: a failure, exit code 1.

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
            check_place(path)
        except FileError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from error
        check_target(path)
