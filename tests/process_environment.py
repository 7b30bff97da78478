"""The one place that pins what a machine gives to a process and its children: language, colours,
width, time zone, text encoding and the permissions of new files.

The package follows them; the tests compare texts, and a test of another setting says which.
"""

from __future__ import annotations

import os
import time

COLOURS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "PYTHON_COLORS")
TERMINALS = ("COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERMINAL_WIDTH", "GITHUB_ACTIONS")
SIZES = ("COLUMNS", "LINES")  # xdist sets the first in its workers; without it no output is wrapped
ENCODINGS = ("PYTHONIOENCODING", "PYTHONLEGACYWINDOWSSTDIO")


def pin() -> None:
    """Pin the environment of this process, which its children inherit."""
    languages = ("LANGUAGE", *(name for name in os.environ if name.startswith("LC_")))
    for name in (*languages, *COLOURS, *TERMINALS, *SIZES, *ENCODINGS):
        os.environ.pop(name, None)
    os.environ |= {"LANG": "C.UTF-8", "TERM": "xterm-256color", "TZ": "UTC", "PYTHONUTF8": "1"}
    time.tzset()
    os.umask(0o022)
