"""Try every architecture of transformers: `python -m tests.integrations.matrix`, and then once more
with `--page`.

Each architecture runs in a process of its own, under a limit of time and of memory. Each row is
kept as soon as it is made (docs/transformers.jsonl), so that a run that was stopped goes on where
it was; `--page` writes the table of the kept rows into docs/transformers.md. `--only llama gemma2`
tries some anew, `--again WRONG CRASH unbuilt` those with such cells.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from tests.integrations.families import transformers
from tests.integrations.matrix import table
from tests.integrations.matrix.cells import COLUMNS, architectures, run


def child(model_type: str, columns: tuple[str, ...], memory: int, pipe: Any) -> None:
    """One architecture, in a process that may die."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory << 30, memory << 30))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    pipe.send(run(model_type, columns))


def isolated(
    model_type: str, columns: tuple[str, ...], seconds: float, memory: int
) -> dict[str, Any]:
    """The row, or why there is none."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(model_type, columns, memory, theirs)
    )
    process.start()
    theirs.close()
    row: dict[str, Any] = {"model_type": model_type, "kind": "", "class": "", "built": ""}
    try:
        if not ours.poll(seconds):
            row["built"] = f"stopped after {seconds:g} seconds"
            return row
        row = ours.recv()
    except EOFError:
        process.join()
        row["built"] = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.matrix", description=__doc__
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=table.KEPT,
        metavar="FILE",
        help="the kept results; a run goes on from them",
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="TYPE", help="these, anew")
    parser.add_argument(
        "--again",
        nargs="*",
        default=[],
        metavar="WORD",
        help="anew those with a cell of these words, or 'unbuilt'",
    )
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--seconds", type=float, default=300, help="for one architecture")
    parser.add_argument("--memory", type=int, default=6, help="GiB that one may allocate")
    parser.add_argument(
        "--page", action="store_true", help="only write the table into docs/transformers.md"
    )
    given = parser.parse_args()
    if given.page:
        table.update()
        return
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    _, done = table.read(given.out)
    for name in architectures():
        old = done.get(name, {"built": "new"})
        said = {*table.words(old), *(["unbuilt"] if old["built"] else [])}
        missing = not old["built"] and any(column not in old for column in given.columns)
        wanted = name in given.only if given.only else name not in done or missing
        if not (wanted or (said & set(given.again) and not given.only)):
            continue
        begun = time.monotonic()
        # a column that is added later leaves the others as they are
        columns = (
            [x for x in given.columns if x not in old]
            if missing and not given.only
            else given.columns
        )
        row = isolated(name, tuple(columns), given.seconds, given.memory)
        done[name] = row if row["built"] else {**old, **row}
        table.write(done, given.out)
        told = row["built"] or " ".join(f"{c}={row[c][0]}" for c in COLUMNS if c in row)
        print(f"{name}: {told} ({time.monotonic() - begun:.0f} s)", flush=True)
        for column in COLUMNS:
            if row.get(column, [""])[0] in ("WRONG", "CRASH", "refused"):
                print(f"    {column}: {row[column][1]}", flush=True)


if __name__ == "__main__":
    main()
