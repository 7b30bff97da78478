"""Test published claims about attention: `python -m experiments ID [ID ...]` measures them, prints
their verdicts, and writes the files that its options name; `--list` lists the claims.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments import CLAIMS, Outcome, find_claim, run_claims
from experiments.render import as_csv, list_claims, outcome_section, outcome_text, summary
from regard.compare.experiment import ExperimentStore, Session
from regard.errors import RegardError
from regard.files.atomic_write import check_writable
from regard.language import (
    LANGUAGES,
    language_of_locale,
    translate,
    translate_count,
    use_language,
)
from regard.standard_output import run_program
from regard.text_table import line_width, wrap
from regard.timing.machine import MachineFacts, describe_machine
from regard.view import html_page

PROGRAM = "python -m experiments"
ALL = "all"


def parser() -> ArgumentParser:
    """Return the parser of the command line.

    >>> parser().parse_args(["scale", "--seed", "1"]).ids
    ['scale']
    """
    command_line = ArgumentParser(
        PROGRAM, description="Test published claims about attention, each with a verdict."
    )
    command_line.add_argument(
        "ids", nargs="*", metavar="ID", help=f"a claim that --list shows, or {ALL}"
    )
    command_line.add_argument("--list", action="store_true", help="list the claims, and exit")
    command_line.add_argument(
        "--budget",
        type=float,
        default=1.0,
        help=(
            "time for each claim, relative to the default: 1 is about two minutes, 2 is twice as "
            "long"
        ),
    )
    command_line.add_argument(
        "--seed", type=int, default=0, help="random seed for weights and data (default: 0)"
    )
    command_line.add_argument(
        "--threads", type=int, help="number of CPU threads (default: torch's number)"
    )
    command_line.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="save measurements in this folder; a later run with it does not measure them again",
    )
    command_line.add_argument("--json", action="store_true", help="print the results as JSON")
    command_line.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a line of CSV for each check to this file"
    )
    command_line.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML page with plots to this file"
    )
    command_line.add_argument(
        "--lang", choices=LANGUAGES, default=language_of_locale(), help="language of the output"
    )
    return command_line


def main(arguments: Sequence[str]) -> int:
    """Run the program.

    Args:
        arguments: the arguments of the command line.

    Returns:
        The exit code: 0, 1 for an error, or 130 if the user interrupted the measurements.

    Raises:
        SystemExit: wrong usage, with the code 2; or --help, with the code 0.
    """
    command_line = parser()
    options = command_line.parse_args(arguments)
    if not options.ids and not options.list:
        command_line.error("give the id of a claim; --list shows all claims")
    if options.seed < 0:
        command_line.error(f"argument --seed: {options.seed} is negative; it must be at least 0")
    if options.threads is not None and options.threads < 1:
        command_line.error(
            f"argument --threads: {options.threads} is too small; it must be at least 1"
        )
    with use_language(options.lang):
        try:
            if options.list:
                print(list_claims(list(CLAIMS.values())))
                return 0
            return _run(options, shlex.join([*PROGRAM.split(), *arguments]))
        except RegardError as error:
            text = translate("error: ") + str(error)
            print(wrap(text, line_width()), file=sys.stderr)
            return 1


def _run(options: Namespace, command: str) -> int:
    """Run the named claims, print their outcomes, write the files, and return the exit code."""
    names = CLAIMS if ALL in options.ids else dict.fromkeys(options.ids)
    claims = [find_claim(name) for name in names]
    for file in filter(None, (options.csv, options.html)):
        check_writable(file)
    if options.threads:
        torch.set_num_threads(options.threads)
    machine_facts = describe_machine(torch.device("cpu"))
    session = Session(ExperimentStore(options.out, {"machine": machine_facts}))
    outcomes: list[Outcome] = []
    exit_code = 0
    try:
        for i, claim in enumerate(claims):
            number = f"{i + 1}/{len(claims)}"
            line = translate("claim {name} ({number})", name=claim.id, number=number)
            print(wrap(f"... {line}", line_width()), file=sys.stderr)
            outcomes += run_claims(session, [claim], options.budget, options.seed)
            if not options.json:
                print(outcome_text(outcomes[-1]) + "\n", flush=True)
    except KeyboardInterrupt:
        exit_code = 130
    _write(outcomes, machine_facts, command, options, interrupted=bool(exit_code))
    return exit_code


def _write(
    outcomes: list[Outcome],
    machine_facts: MachineFacts,
    command: str,
    options: Namespace,
    *,
    interrupted: bool,
) -> None:
    setting = {"budget": options.budget, "seed": options.seed}
    if options.json:
        result = {
            "command": command,
            "machine": machine_facts,
            **setting,
            "interrupted": interrupted,
            "claims": [one.as_dict() for one in outcomes],
        }
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        text = translate(
            "{counts}; {machine}, budget {budget}, seed {seed}",
            counts=summary(outcomes),
            machine=_machine_text(machine_facts),
            budget=f"{options.budget:g}",
            seed=options.seed,
        )
        print(wrap(text, line_width()))
    if options.csv is not None:
        html_page.write(options.csv, as_csv(outcomes))
    if options.html is not None:
        facts = {
            "machine": _machine_text(machine_facts),
            **{k: f"{v:g}" for k, v in setting.items()},
        }
        page = html_page.page(
            translate("Claims about attention"),
            summary(outcomes),
            facts,
            command,
            [outcome_section(one) for one in outcomes],
        )
        html_page.write(options.html, page)


def _machine_text(machine_facts: MachineFacts) -> str:
    threads = translate_count(machine_facts["threads"], "thread")
    versions = f"torch {machine_facts['torch']}, regard {machine_facts['regard']}"
    return f"{machine_facts['processor']}, {threads}, {versions}"


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
