"""`regard compare --claim`: the options of claims, and how they are run, told and written."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.claims import Outcome

PANEL = "Claims"
ALL = "all"

Names = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="ID|all",
        rich_help_panel=PANEL,
        help="Run a claim of --list in place of a comparison; repeatable.",
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        help="How long each claim is trained and timed: 1 is about two minutes, 2 twice as long.",
        rich_help_panel=PANEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Random seed for the weights and the data of claims.", min=0, rich_help_panel=PANEL
    ),
]

OWN = ("names", "quality", "lesson", "context", "steps", "lr")
"""Options of a comparison that a claim has no use for."""


def listing() -> str:
    """The claims, for --list."""
    from regard.claims import CLAIMS
    from regard.claims.render import list_claims as told

    return "claims\n" + told(list(CLAIMS.values()))


def check(options: dict[str, Any]) -> None:
    """Refuse options of the other kind of run.

    Raises:
        ArgumentError: with the option and what to do.
    """
    if options["claim"]:
        for name in OWN:
            if options[name]:
                spelled = "MECHANISM" if name == "names" else f"--{name}"
                raise ArgumentError(
                    f"{spelled} is for a comparison, and --claim runs claims: leave one of the "
                    "two out"
                )
    elif options["budget"] != 1.0 or options["seed"]:
        raise ArgumentError(
            "--budget and --seed are for claims: give --claim too, or leave them out"
        )


def run(options: dict[str, Any], command: str) -> None:
    """Run the claims that are named, tell what came of them, and write what was asked for."""
    import torch

    from regard.bench.machine import describe_machine
    from regard.claims import CLAIMS, find_claim, run_claims
    from regard.compare.experiment import Session, Store

    names = CLAIMS if ALL in options["claim"] else dict.fromkeys(options["claim"])
    claims = [find_claim(name) for name in names]
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    about = describe_machine(torch.device("cpu"))
    session = Session(Store(options["out"], {"machine": about}))
    found: list[Outcome] = []
    code = 0
    try:
        for i, claim in enumerate(claims):
            _say(f"claim {claim.id} ({i + 1}/{len(claims)})")
            found += run_claims(session, [claim], options["budget"], options["seed"])
            if not options["json"]:
                _echo(found[-1])
    except KeyboardInterrupt:
        code = 130
    _write(found, about, command, options, interrupted=bool(code))
    raise typer.Exit(code)


def _echo(outcome: Outcome) -> None:
    from regard.claims.render import outcome_text

    typer.echo(outcome_text(outcome) + "\n")


def _write(
    found: list[Outcome],
    about: dict[str, Any],
    command: str,
    options: dict[str, Any],
    *,
    interrupted: bool,
) -> None:
    from regard.claims.render import as_csv, outcome_section, summary
    from regard.view.html import page as page_of
    from regard.view.html import write

    setting = {"budget": options["budget"], "seed": options["seed"]}
    if options["json"]:
        told = {
            "command": command,
            "machine": about,
            **setting,
            "interrupted": interrupted,
            "claims": [one.as_dict() for one in found],
        }
        typer.echo(json_format.dumps(told, indent=1, allow_nan=False))
    else:
        typer.echo(
            f"{summary(found)}; {_where(about)}, budget {options['budget']:g}, seed "
            f"{options['seed']}"
        )
    if options["csv"] is not None:
        write(options["csv"], as_csv(found))
    if options["html"] is not None:
        facts = {"machine": _where(about), **{k: f"{v:g}" for k, v in setting.items()}}
        page = page_of(
            "Claims about attention",
            summary(found),
            facts,
            command,
            [outcome_section(one) for one in found],
        )
        write(options["html"], page)


def _where(about: dict[str, Any]) -> str:
    return (
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, regard "
        f"{about['regard']}"
    )


def _say(line: str) -> None:
    typer.echo(f"... {line}", err=True)
