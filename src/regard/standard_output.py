"""How a program ends: a closed pipe is not an error, and a full disk is one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run_program(program: Callable[[], int | None]) -> int:
    """Run a program that prints, write out what it printed, and return its exit code."""
    code = 0
    try:
        code = _run(program)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:  # a full disk
        _drop_output()
        if code == 0:  # else the program has reported it
            reason = error.strerror or error
            print(f"error: the output cannot be written: {reason}", file=sys.stderr)
        return code or 1
    except KeyboardInterrupt:
        return 130
    return code


def _run(program: Callable[[], int | None]) -> int:
    """Return the exit code of a program, which may end by `sys.exit(code)` as argparse does."""
    try:
        return program() or 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise
        return stop.code or 0


def _drop_output() -> None:
    """Discard output that is not written, which Python would report as an error at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
