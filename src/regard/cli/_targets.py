"""The files that a command is to write: what cannot be written is refused before anything is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from regard.errors import FileError
from regard.files.write import check_place, check_target


def check(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written.

    Args:
        files: flag -> the file that it names; None: the flag was not given.

    Raises:
        typer.BadParameter: the name is no file's, or its folder is missing: wrong usage, exit code
            2.
        FileError: the disk or the permissions refuse: a failure, exit code 1.

    >>> check({"--html": Path("no such folder/page.html")})
    Traceback (most recent call last):
    typer.BadParameter: no such folder/page.html: there is no folder 'no such folder'; make it first
    """
    for flag, path in files.items():
        if path is None:
            continue
        try:
            check_place(path)
        except FileError as error:
            raise typer.BadParameter(str(error), param_hint=flag) from error
        check_target(path)
