"""The kept results of all cells (docs/pytorch.jsonl), and the tables of them in docs/pytorch.md."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.integrations.pytorch.matrix.things import THINGS
from tests.integrations.pytorch.matrix.transforms import TRANSFORMS, cells

ROOT = Path(__file__).parents[4]
KEPT, PAGE = ROOT / "docs/pytorch.jsonl", ROOT / "docs/pytorch.md"
BEGIN, END = "<!-- made by python -m tests.integrations.pytorch.matrix -->", "<!-- end -->"

Results = dict[tuple[str, str], str]
"""What came of a transform (its name) on a thing (its name): "works", or "refused: ..."."""


def read(path: Path = KEPT) -> Results:
    """The kept results."""
    lines = path.read_text("utf-8").splitlines()[1:] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {
        (row["transform"], name): said
        for row in rows
        for name, said in row.items()
        if name != "transform"
    }


def write(results: Results, path: Path = KEPT) -> None:
    """Keep the results of the present cells, one line for each transform."""
    rows: dict[str, dict[str, str]] = {}
    for name, thing in cells():
        if (name, thing.name) in results:
            row = rows.setdefault(name, {"transform": name})
            row[thing.name] = results[name, thing.name]
    lines = [{"torch": torch.__version__.partition("+")[0]}, *rows.values()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def markdown(results: Results) -> str:
    """The two tables, and the reasons of the refusals."""
    refusals = list(dict.fromkeys(x for x in results.values() if x != "works"))
    calls = [x.name for x in THINGS if not x.layer]
    layers = [x.name for x in THINGS if x.layer]
    notes = [f"{i}. {text}" for i, text in enumerate(refusals, 1)]
    return "\n".join(
        [
            "Calls of `regard.attend`:",
            "",
            *rows(results, calls, refusals),
            "",
            "Modules:",
            "",
            *rows(results, layers, refusals),
            *(["", "Refusals:", "", *notes] if notes else []),
        ]
    )


def rows(results: Results, names: list[str], refusals: list[str]) -> list[str]:
    """One table; a refusal is shown by its number."""
    lines = [f"| transform | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for name in TRANSFORMS:
        said = [results[name, x] for x in names if (name, x) in results]
        shown = ["works" if x == "works" else f"refused ({refusals.index(x) + 1})" for x in said]
        if shown:
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def update() -> None:
    """Write the tables into the page."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{markdown(read())}\n{END}{tail}", "utf-8")
