"""Test published claims about attention: `python -m experiments ID [ID ...]` measures them, prints
their verdicts, and writes the files that its options name; `--list` lists the claims.
"""

from __future__ import annotations

import json as json_format
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from experiments import CLAIMS, Outcome, find_claim, run_claims
from experiments.render import as_csv, list_claims, outcome_section, outcome_text, summary
from regard.cli.app import command_of, run
from regard.cli.options import check_files, note, usage_error
from regard.compare.experiment import ExperimentStore, Session
from regard.language import Phrase, translate, translate_count
from regard.standard_output import run_program
from regard.text_table import line_width, wrap
from regard.timing import MachineFacts, describe_machine, torch_threads
from regard.view import html_page

PROGRAM = "python -m experiments"
ALL = "all"
EPILOG = "For example: python -m experiments scale order --seed 1"

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Claims that --list shows, or all.", show_default=False),
]
List = Annotated[bool, typer.Option("--list", help="List the claims, and exit.")]
Budget = Annotated[
    float,
    typer.Option(
        help="Time for each claim, relative to the default: 1 is about two minutes, 2 is twice as "
        "long."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed for weights and data.", min=0)]
Threads = Annotated[
    int | None, typer.Option(help="Number of CPU threads.", min=1, show_default="torch's number")
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Save measurements in this folder; a later run with it does not measure them again.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Csv = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a line of CSV for each check to this file."),
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots to this file.")
]


class OutputOptions(NamedTuple):
    """The options that decide what is measured and where it is written."""

    budget: float
    seed: int
    json: bool
    csv: Path | None
    html: Path | None
    command: str


def experiments(
    ids: Ids = None,
    list_: List = False,
    budget: Budget = 1.0,
    seed: Seed = 0,
    threads: Threads = None,
    out: Out = None,
    json: Json = False,
    csv: Csv = None,
    html: Html = None,
) -> None:
    """Test published claims about attention, each with a verdict."""
    if list_:
        typer.echo(list_claims(list(CLAIMS.values())))
        return
    if not ids:
        raise usage_error("ID", "give the id of a claim; --list shows all claims")
    claims = [find_claim(name) for name in (CLAIMS if ALL in ids else dict.fromkeys(ids))]
    check_files({"--csv": csv, "--html": html})
    machine_facts = describe_machine(torch.device("cpu"))
    command = shlex.join([*PROGRAM.split(), *sys.argv[1:]])
    settings = OutputOptions(budget, seed, json, csv, html, command)
    session = Session(ExperimentStore(out, {"machine": machine_facts}))
    outcomes: list[Outcome] = []
    exit_code = 0
    try:
        with torch_threads(threads):
            for i, claim in enumerate(claims):
                number = f"{i + 1}/{len(claims)}"
                note(Phrase("claim {name} ({number})", name=claim.id, number=number), "... ")
                outcomes += run_claims(session, [claim], budget, seed)
                if not json:
                    typer.echo(outcome_text(outcomes[-1]) + "\n")
    except KeyboardInterrupt:
        exit_code = 130
    _write(outcomes, machine_facts, settings, interrupted=bool(exit_code))
    raise typer.Exit(exit_code)


def _write(
    outcomes: list[Outcome],
    machine_facts: MachineFacts,
    settings: OutputOptions,
    *,
    interrupted: bool,
) -> None:
    """Print a summary or the JSON of the outcomes, and write the files."""
    measured = {"budget": settings.budget, "seed": settings.seed}
    if settings.json:
        result = {
            "command": settings.command,
            "machine": machine_facts,
            **measured,
            "interrupted": interrupted,
            "claims": [one.as_dict() for one in outcomes],
        }
        typer.echo(json_format.dumps(result, indent=1, allow_nan=False))
    else:
        text = translate(
            "{counts}; {machine}, budget {budget}, seed {seed}",
            counts=summary(outcomes),
            machine=_machine_text(machine_facts),
            budget=f"{settings.budget:g}",
            seed=settings.seed,
        )
        typer.echo(wrap(text, line_width()))
    if settings.csv is not None:
        html_page.write(settings.csv, as_csv(outcomes))
    if settings.html is not None:
        facts = {
            "machine": _machine_text(machine_facts),
            **{k: f"{v:g}" for k, v in measured.items()},
        }
        page = html_page.page(
            translate("Claims about attention"),
            summary(outcomes),
            facts,
            settings.command,
            [outcome_section(one) for one in outcomes],
        )
        html_page.write(settings.html, page)


def _machine_text(machine_facts: MachineFacts) -> str:
    threads = translate_count(machine_facts["threads"], "thread")
    versions = f"torch {machine_facts['torch']}, regard {machine_facts['regard']}"
    return f"{machine_facts['processor']}, {threads}, {versions}"


def main(arguments: Sequence[str]) -> int:
    """Run the program with these arguments, and return its exit code."""
    return run(arguments, partial(command_of, experiments, EPILOG), PROGRAM)


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
