"""Try every architecture of transformers: `python -m tests.integrations.matrix --out docs/transformers.jsonl`.

Each architecture runs in a process of its own, under a limit of time and of memory; what is done is kept, so that a run that
was stopped goes on where it was. `--only llama gemma2` tries some, `--again WRONG CRASH` those with such cells anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from tests.integrations.families import transformers
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
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.matrix", description=__doc__
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="one line of JSON an architecture; read first, so that a run goes on",
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TYPE", help="these architectures only, anew"
    )
    parser.add_argument(
        "--again",
        nargs="*",
        default=[],
        metavar="WORD",
        help="anew those with a cell of these words",
    )
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--memory", type=int, default=6, help="GiB a process may allocate")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    done: dict[str, Any] = {}
    if given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text("utf-8").splitlines()]
        done = {row["model_type"]: row for row in rows}
    for name in architectures():
        old = done.get(name)
        words = [old[c][0] for c in COLUMNS if c in old] if old else []
        wanted = (
            name in given.only if given.only else old is None or bool(set(words) & set(given.again))
        )
        if not wanted:
            continue
        begun = time.monotonic()
        row = isolated(name, tuple(given.columns), given.seconds, given.memory)
        done[name] = (old or {}) | row if not row["built"] else row
        words = [f"{c}={row[c][0]}" for c in COLUMNS if c in row]
        print(
            f"{name}: {row['built'] or ' '.join(words)} ({time.monotonic() - begun:.0f} s)",
            flush=True,
        )
        for c in COLUMNS:
            if c in row and row[c][0] in ("WRONG", "CRASH", "refused"):
                print(f"    {c}: {row[c][1][:200]}", flush=True)
        text = "".join(json.dumps(done[x]) + "\n" for x in sorted(done))
        given.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
