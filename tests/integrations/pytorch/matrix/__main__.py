"""Run all cells and write docs/pytorch.jsonl and the tables in docs/pytorch.md:
`python -m tests.integrations.pytorch.matrix`. With words, only the rows whose names have one of
them are run anew: `python -m tests.integrations.pytorch.matrix onnx vmap`.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.integrations.pytorch.matrix import table
from tests.integrations.pytorch.matrix.transforms import cells, run


def main(words: list[str]) -> None:
    """The command."""
    torch.set_num_threads(1)
    results = table.read()
    for name, thing in cells():
        if words and not any(word in name for word in words):
            continue
        begun = time.monotonic()
        results[name, thing.name] = run(name, thing)
        took = time.monotonic() - begun
        print(f"{name}: {thing.name}: {results[name, thing.name]} ({took:.1f} s)", flush=True)
        table.write(results)
    table.update()


if __name__ == "__main__":
    main(sys.argv[1:])
