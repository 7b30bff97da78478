"""The command `regard`, with one module per subcommand that is imported only when the subcommand
runs.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. A closed pipe (`regard ... |
head`) is not a failure.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process, and exit with its code."""
    from regard.standard_output import run_program

    def program() -> int:
        from regard.cli.app import run

        warnings.formatwarning = _as_note
        return run(sys.argv[1:] if arguments is None else list(arguments))

    sys.exit(run_program(program))


def _as_note(message: Warning | str, *_place: object, **_line: object) -> str:
    """Return a warning as the commands print their notes, without the line of code."""
    from regard.language import translate

    # the text of a warning may be a phrase, which is translated
    text = message.args[0] if isinstance(message, Warning) and message.args else message
    return translate("note: {note}", note=text) + "\n"
