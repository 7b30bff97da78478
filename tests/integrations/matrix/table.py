"""The kept results of the matrix, and the table of them in docs/transformers.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.integrations.families import transformers
from tests.integrations.matrix.cells import COLUMNS

ROOT = Path(__file__).parents[3]
KEPT, PAGE = ROOT / "docs/transformers.jsonl", ROOT / "docs/transformers.md"
BEGIN, END = "<!-- made by python -m tests.integrations.matrix -->", "<!-- end -->"
SIGNS = {
    "exact": "yes",
    "own": "own",
    "refused": "no",
    "skip": "-",
    "WRONG": "WRONG",
    "CRASH": "CRASH",
}
HEADS = {"causal": "language model", "seq2seq": "encoder and decoder", "base": "base model"}


def read(path: Path = KEPT) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """What the results were made with, and the row of each model_type."""
    if not path.exists():
        return {}, {}
    first, *rows = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return first, {row["model_type"]: row for row in rows}


def write(rows: dict[str, dict[str, Any]], path: Path = KEPT) -> None:
    """Keep the rows, one line each, behind a line with the versions."""
    first = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    lines = [first, *(rows[name] for name in sorted(rows))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def markdown() -> str:
    """The table and the lists, from the kept file."""
    about, rows = read()
    built = [row for row in rows.values() if not row["built"]]
    served = [row for row in built if "exact" in words(row)]
    own = [row for row in built if row not in served and "own" in words(row)]
    refused = [row for row in built if row not in served and row not in own]
    left = [row for row in rows.values() if row["built"]]
    summary = (
        f"transformers {about['transformers']} and torch {about['torch']}: {len(rows)} "
        f"architectures, of which {len(built)} could be built small and run by transformers "
        f"itself. {len(served)} of these run through regard, {len(own)} never call an attention "
        f"function, and {len(refused)} are refused. Cells: {counts(built)}."
    )
    return "\n".join(
        [
            summary,
            "",
            f"| architecture | {' | '.join(COLUMNS)} | what is refused |",
            f"|---|{'---|' * (len(COLUMNS) + 1)}",
            *map(line, served),
            "",
            "### Refused",
            "",
            "| architecture | why |",
            "|---|---|",
            *(f"| {row['model_type']} | {reason(row)} |" for row in refused),
            "",
            "### Never calls an attention function",
            "",
            ", ".join(row["model_type"] for row in own) + ".",
            "",
            "### Not tried",
            "",
            "| architecture | why |",
            "|---|---|",
            *(f"| {row['model_type']} | {shown(row['built'])} |" for row in left),
        ]
    )


def words(row: dict[str, Any]) -> list[str]:
    """The words of a row's cells."""
    return [row[column][0] for column in COLUMNS if column in row]


def counts(rows: Iterable[dict[str, Any]]) -> str:
    """How many cells say what."""
    found = [word for row in rows for word in words(row)]
    return ", ".join(f"{found.count(word)} {word}" for word in SIGNS)


def line(row: dict[str, Any]) -> str:
    """The row of one architecture in the table."""
    cells = [SIGNS[row[column][0]] if column in row else "" for column in COLUMNS]
    return f"| {row['model_type']} | {' | '.join(cells)} | {reason(row)} |"


def reason(row: dict[str, Any]) -> str:
    """Why the first cell that is no result is refused."""
    whys = [row[x][1] for x in COLUMNS if x in row and row[x][0] in ("refused", "WRONG", "CRASH")]
    return shown(whys[0]) if whys else ""


def shown(text: str) -> str:
    """One sentence in a table."""
    return text.split(", so attn_")[0].split("; ")[0].replace("|", "/").replace("<", "&lt;")


def update() -> None:
    """Write the table into the page."""
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{markdown()}\n{END}{tail}", "utf-8")
