"""The part of `regard compare` that tests published claims: its options, and how claims are run,
printed and written.
"""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import note, usage_error
from regard.language import translate, translate_count
from regard.text_table import line_width, wrap

if TYPE_CHECKING:
    from regard.bench.machine import MachineFacts
    from regard.claims import Outcome

PANEL = "Claims"
ALL = "all"

Names = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="ID|all",
        rich_help_panel=PANEL,
        help=(
            "Test a published claim, by an id that --list shows, instead of a comparison. "
            "Repeatable."
        ),
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        help=(
            "Time for each claim, relative to the default: 1 is about two minutes, 2 is twice "
            "as long."
        ),
        rich_help_panel=PANEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Random seed for the weights and the data of claims.", min=0, rich_help_panel=PANEL
    ),
]

COMPARISON_OPTIONS = ("names", "quality", "task", "context", "steps", "lr", "device")
"""Options of a comparison that do not apply to claims."""


def list_claims() -> str:
    """Return the list of claims for --list."""
    from regard.claims import CLAIMS
    from regard.claims.render import list_claims as claim_listing

    return translate("claims") + "\n" + claim_listing(list(CLAIMS.values()))


def check(options: dict[str, object]) -> None:
    """Raise an error if options of a comparison and of claims are mixed.

    Raises:
        ArgumentError: with the option, and how to correct the command.
    """
    if options["claim"]:
        for name in COMPARISON_OPTIONS:
            if options[name]:
                spelled = "MECHANISM" if name == "names" else f"--{name}"
                raise usage_error(
                    spelled,
                    "applies to a comparison, but --claim runs claims; leave one of them out",
                )
    elif options["budget"] != 1.0 or options["seed"]:
        raise usage_error(
            None, "--budget and --seed apply only to claims; give --claim too, or leave them out"
        )


def run(options: dict[str, Any], command: str) -> None:
    """Run the named claims, print their outcomes, and write the files that the options name."""
    import torch

    from regard.bench.machine import describe_machine
    from regard.claims import CLAIMS, find_claim, run_claims
    from regard.compare.experiment import ExperimentStore, Session

    names = CLAIMS if ALL in options["claim"] else dict.fromkeys(options["claim"])
    claims = [find_claim(name) for name in names]
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    machine_facts = describe_machine(torch.device("cpu"))
    session = Session(ExperimentStore(options["out"], {"machine": machine_facts}))
    outcomes: list[Outcome] = []
    exit_code = 0
    try:
        for i, claim in enumerate(claims):
            number = f"{i + 1}/{len(claims)}"
            _report(translate("claim {name} ({number})", name=claim.id, number=number))
            outcomes += run_claims(session, [claim], options["budget"], options["seed"])
            if not options["json"]:
                _print_outcome(outcomes[-1])
    except KeyboardInterrupt:
        exit_code = 130
    _write(outcomes, machine_facts, command, options, interrupted=bool(exit_code))
    raise typer.Exit(exit_code)


def _print_outcome(outcome: Outcome) -> None:
    from regard.claims.render import outcome_text

    typer.echo(outcome_text(outcome) + "\n")


def _write(
    outcomes: list[Outcome],
    machine_facts: MachineFacts,
    command: str,
    options: dict[str, Any],
    *,
    interrupted: bool,
) -> None:
    from regard.claims.render import as_csv, outcome_section, summary
    from regard.view.html_page import page as page_of
    from regard.view.html_page import write

    setting = {"budget": options["budget"], "seed": options["seed"]}
    if options["json"]:
        result = {
            "command": command,
            "machine": machine_facts,
            **setting,
            "interrupted": interrupted,
            "claims": [one.as_dict() for one in outcomes],
        }
        typer.echo(json_format.dumps(result, indent=1, allow_nan=False))
    else:
        text = translate(
            "{counts}; {machine}, budget {budget}, seed {seed}",
            counts=summary(outcomes),
            machine=_machine_text(machine_facts),
            budget=f"{options['budget']:g}",
            seed=options["seed"],
        )
        typer.echo(wrap(text, line_width()))
    if options["csv"] is not None:
        write(options["csv"], as_csv(outcomes))
    if options["html"] is not None:
        facts = {
            "machine": _machine_text(machine_facts),
            **{k: f"{v:g}" for k, v in setting.items()},
        }
        page = page_of(
            translate("Claims about attention"),
            summary(outcomes),
            facts,
            command,
            [outcome_section(one) for one in outcomes],
        )
        write(options["html"], page)


def _machine_text(machine_facts: MachineFacts) -> str:
    threads = translate_count(machine_facts["threads"], "thread")
    versions = f"torch {machine_facts['torch']}, regard {machine_facts['regard']}"
    return f"{machine_facts['processor']}, {threads}, {versions}"


def _report(line: str) -> None:
    note(line, "... ")
