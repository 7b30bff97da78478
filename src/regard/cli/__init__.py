"""The command `regard`, with one module per subcommand that is imported only when the subcommand
runs.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. A closed pipe (`regard ... |
head`) is not a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = {
    "audit": "Test other people's attention code for faults.",
    "compare": "Compare attention mechanisms: cost, memory, speed, quality.",
    "convert": "Convert a checkpoint: heads, latents, positions, dtype.",
    "cost": "Compute parameters, FLOPs, cache bytes and least time of a model.",
    "describe": "List the attention mechanisms, or describe one of them.",
    "explain": "Explain one attention weight of a text, number by number.",
    "extend": "Test context extensions beyond the trained length.",
    "generate": "Continue a prompt with a model, and report speed and memory.",
    "inspect": "Ablate, patch and attribute heads, and measure them.",
    "layer": "Run one attention layer on random tokens, and print its tensors.",
    "show": "Draw any attention mask, with its counts.",
    "train": "Train a small model and its tokenizer on any text.",
    "view": "Look at the attention of a model or a recording, at any length.",
}
"""Name -> one line of help. The module `regard.cli.<name>` has the function `<name>`, annotated for
typer.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments (default: those of the process), and exit with its code.

    Args:
        arguments: the arguments of the command, without the program name.

    Raises:
        SystemExit: always, with the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    from regard.standard_output import run_program

    def program() -> int:
        from regard.cli.app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))

    sys.exit(run_program(program))
