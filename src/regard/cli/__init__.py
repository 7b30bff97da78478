"""The command `regard`: one module per subcommand, imported only when it is asked for.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A closed pipe (`regard ... | head`) is
not a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "audit": "Find what is wrong with attention code that is not ours.",
    "bench": "Time attention against what else is installed, outputs checked.",
    "compare": "Measure mechanisms side by side: cost, and what each loses.",
    "convert": "Write a checkpoint with other heads, latents, positions, dtype.",
    "cost": "What a model costs: parameters, FLOPs, cache bytes, least time.",
    "describe": "List the mechanisms, or tell what one of them keeps and computes.",
    "explain": "Follow one token of a text through attention, number by number.",
    "extend": "Read beyond the trained length, under each context extension.",
    "generate": "Continue a prompt, streaming, and say what it cost.",
    "layer": "Run one layer on random tokens, and print every tensor of it.",
    "show": "Draw any mask: what each query may see, with the counts.",
    "train": "Train a small model and its tokenizer on any text.",
}
"""Name -> one line of help. `regard.cli.<name>` has the function `<name>`, annotated for typer."""


def _drop_output() -> None:
    """What is still to be written goes nowhere: Python would write it at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments (default: the process's), and exit with its code.

    Raises:
        SystemExit: always, with the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    code = 0
    try:
        from regard.cli.app import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        _drop_output()
    except OSError as error:  # a full disk
        _drop_output()
        print(f"error: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
