"""The progress of a long run: a bar on a terminal, plain lines in files and pipes, a CSV log."""

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
from regard.files.reading import read_text
from regard.language import translate
from regard.untrusted_text import error_text, parse_integer


@dataclass(frozen=True)
class LogRow:
    """One row of the log: the mean training loss in nats since the previous row, and the state."""

    step: int
    loss: float
    validation: float | None
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float


MAX_BYTES = 1 << 28
"""The largest log in bytes: twice the log of a run with a million rows."""
COLUMNS = [f.name for f in fields(LogRow)]


class CsvLog:
    """The log train.csv of a run, whose columns are the attributes of `LogRow`.

    A run that resumes removes the rows after its checkpoint.
    """

    def __init__(self, path: str | Path, *, after_step: int = 0) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rows = self._rows_up_to(after_step)
            with (
                write_atomically(self._path) as temporary,
                temporary.open("w", newline="", encoding="utf-8") as file,
            ):
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
            self._file = self._path.open("a", newline="", encoding="utf-8")
        except FileError:
            raise
        except (OSError, csv.Error) as error:
            raise FileError(f"{path}: cannot write the log: {error_text(error)}") from error
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, row: LogRow) -> None:
        """Append one row and write it to the file at once."""
        try:
            self._writer.writerow([_format_cell(value) for value in asdict(row).values()])
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Close the file of the log."""
        with suppress(OSError):  # `write` has reported a full disk already
            self._file.close()

    def _write_error(self, error: OSError) -> FileError:
        """Return the error for a row that could not be written."""
        return FileError(f"{self._path}: cannot write the log: {error.strerror or error}")

    def _rows_up_to(self, step_limit: int) -> list[list[str]]:
        """Return the valid rows of the existing file up to a step."""
        if not (step_limit and self._path.exists()):
            return []
        rows = list(csv.reader(io.StringIO(read_text(self._path, MAX_BYTES), newline="")))[1:]
        return [
            r
            for r in rows
            if len(r) == len(COLUMNS)
            and (step := parse_integer(r[0])) is not None
            and 0 <= step <= step_limit
        ]


class Progress(Protocol):
    """An object that displays how far a run has come."""

    def step(self, row: LogRow) -> None:
        """Show the state after a step."""

    def row(self, row: LogRow) -> None:
        """Show a new row of the log."""

    def close(self) -> None:
        """End the display, also after an error."""


class ProgressBar:
    """A progress bar for a terminal, which is updated at every step."""

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

    def step(self, row: LogRow) -> None:
        """Show the loss and the speed of a step."""
        text = translate(
            "loss {loss}{validation} {speed} tokens/s",
            loss=f"{row.loss:.3f}",
            validation=self._validation,
            speed=f"{row.tokens_per_second:,.0f}",
        )
        self._bar.update(self._task, completed=row.step, note=text)

    def row(self, row: LogRow) -> None:
        """Show the validation loss of a new row of the log."""
        if row.validation is not None:
            self._validation = translate(", validation {loss}", loss=f"{row.validation:.3f}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()


class PlainProgress:
    """One plain line per row of the log, for files and pipes."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console

    def step(self, row: LogRow) -> None:
        """Do nothing: only the rows of the log are shown."""

    def row(self, row: LogRow) -> None:
        """Print a new row of the log with the time that is left."""
        validation = ""
        if row.validation is not None:
            validation = translate("  validation {loss}", loss=f"{row.validation:.4f}")
        left = ""
        if row.tokens_per_second > 0 and row.step:
            seconds = (self._steps - row.step) * (row.tokens / row.step) / row.tokens_per_second
            left = translate("  {time} left", time=_format_duration(seconds))
        self._console.print(
            translate(
                "step {step}/{steps}  loss {loss}{validation}  {speed} tokens/s{left}",
                step=row.step,
                steps=self._steps,
                loss=f"{row.loss:.4f}",
                validation=validation,
                speed=f"{row.tokens_per_second:,.0f}",
                left=left,
            ),
            soft_wrap=True,
            highlight=False,
        )

    def close(self) -> None:
        """Do nothing: there is no bar to remove."""


def make_progress(steps: int, start: int = 0, console: Console | None = None) -> Progress:
    """Return a progress display: a bar on a terminal, plain lines in files and pipes.

    Args:
        start: the step from which the run resumes.
        console: the output; None is standard error, so that standard output has results only.

    Returns:
        The display.
    """
    console = console or Console(stderr=True)
    is_terminal = console.file.isatty()  # rich's own word follows FORCE_COLOR, even in a pipe
    return ProgressBar(steps, start, console) if is_terminal else PlainProgress(steps, console)


def _format_duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _format_cell(value: float | None) -> str:
    """Return a number for a cell of the CSV file; "" for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if math.isfinite(value) else str(value)
