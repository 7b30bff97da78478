"""What a long run shows: a bar on a terminal, plain lines anywhere else, and a CSV file."""

from __future__ import annotations

import csv
import io
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from rich.console import Console

from regard.errors import FileError
from regard.files.atomic_write import write_atomically
from regard.files.regular_files import read_text
from regard.untrusted_text import error_text, parse_integer


@dataclass(frozen=True)
class Row:
    """One line of the log: the mean training loss since the last one, in nats, and the state.

    >>> Row(1, 2.0, None, lr=0.1, grad_norm=1.0, tokens=64, tokens_per_second=9.0).loss
    2.0
    """

    step: int
    loss: float
    validation: float | None
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float


LONGEST = 1 << 28
"""Bytes of a log, at most: of a run of a million rows, twice over."""
COLUMNS = [f.name for f in fields(Row)]


class CsvLog:
    """train.csv, opened at a step: rows after it, of a run that died later, are cut off.

    The columns are those of `Row`, so that a run in several parts has every row once. Any table
    reader shows it; TensorBoard event files are not written.

    Raises:
        FileError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, after_step: int = 0) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._kept(after_step)
            with (
                write_atomically(self._path) as fresh,
                fresh.open("w", newline="", encoding="utf-8") as file,
            ):
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *kept])
            self._file = self._path.open("a", newline="", encoding="utf-8")
        except FileError:
            raise
        except (OSError, csv.Error) as error:
            raise FileError(f"{path}: cannot write the log: {error_text(error)}") from error
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, row: Row) -> None:
        """Append one row and hand it to the system at once."""
        try:
            self._writer.writerow([_short(value) for value in asdict(row).values()])
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk was told of when the row was written
            self._file.close()

    def _refused(self, error: OSError) -> FileError:
        return FileError(f"{self._path}: cannot write the log: {error.strerror or error}")

    def _kept(self, after_step: int) -> list[list[str]]:
        if not (after_step and self._path.exists()):
            return []
        rows = list(csv.reader(io.StringIO(read_text(self._path, LONGEST), newline="")))[1:]
        return [
            r
            for r in rows
            if len(r) == len(COLUMNS)
            and (step := parse_integer(r[0])) is not None
            and 0 <= step <= after_step
        ]


class Progress(Protocol):
    """Something that shows where a run stands."""

    def step(self, row: Row) -> None:
        """After every step."""

    def row(self, row: Row) -> None:
        """After every row of the log."""

    def close(self) -> None:
        """At the end, however it came."""


class Bar:
    """A bar that moves at every step, for a terminal."""

    def __init__(self, steps: int, start: int, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._validation = ""
        self._bar = RichProgress(
            TextColumn("train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start, note="")
        self._bar.start()

    def step(self, row: Row) -> None:
        """Show the newest step."""
        text = f"loss {row.loss:.3f}{self._validation} {row.tokens_per_second:,.0f} tok/s"
        self._bar.update(self._task, completed=row.step, note=text)

    def row(self, row: Row) -> None:
        """Show the newest row of the log."""
        if row.validation is not None:
            self._validation = f" val {row.validation:.3f}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()


class Lines:
    """One plain line per row of the log, for files and pipes."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console

    def step(self, row: Row) -> None:
        """Show the newest step."""

    def row(self, row: Row) -> None:
        """Show the newest row of the log."""
        validation = "" if row.validation is None else f"  validation {row.validation:.4f}"
        left = ""
        if row.tokens_per_second > 0 and row.step:
            seconds = (self._steps - row.step) * (row.tokens / row.step) / row.tokens_per_second
            left = f"  {_clock(seconds)} left"
        self._console.print(
            f"step {row.step}/{self._steps}  loss {row.loss:.4f}{validation}  "
            f"{row.tokens_per_second:,.0f} tok/s{left}",
            soft_wrap=True,
            highlight=False,
        )

    def close(self) -> None:
        """Leave the terminal as it was."""


def show(steps: int, start: int = 0, console: Console | None = None) -> Progress:
    """A bar on a terminal, plain lines elsewhere; on standard error, so that output stays clean."""
    console = console or Console(stderr=True)
    return Bar(steps, start, console) if console.is_terminal else Lines(steps, console)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if math.isfinite(value) else str(value)
