"""The log file and what a waiting person sees."""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from regard.train.progress import COLUMNS, CsvLog, LogRow, PlainProgress, ProgressBar, make_progress


def row(step: int, **change: float | None) -> LogRow:
    plain = {"loss": 2.5, "validation": None, "lr": 0.001, "grad_norm": 1.0}
    return LogRow(step, **plain | change, tokens=64 * step, tokens_per_second=640.0)  # type: ignore[arg-type]


def test_rows_reach_the_file_at_once(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "train.csv")
    log.write(row(1, validation=1 / 3))
    log.write(row(2, loss=math.nan, grad_norm=math.inf))
    assert (tmp_path / "train.csv").read_text("utf-8").splitlines() == [
        "step,loss,validation,lr,grad_norm,tokens,tokens_per_second",
        "1,2.5,0.333333,0.001,1,64,640",
        "2,nan,,0.001,inf,128,640",
    ]
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_resume_cuts_what_came_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    whole = [",".join(COLUMNS), *(f"{i},1,,1,1,1,1" for i in (5, 10, 15))]
    path.write_text("\n".join(whole) + "\n20,1,,1,", "utf-8")  # died in the middle of a row
    log = CsvLog(path, after_step=10)
    log.write(row(12))
    log.close()
    assert [line.split(",")[0] for line in path.read_text("utf-8").splitlines()] == [
        "step",
        "5",
        "10",
        "12",
    ]
    CsvLog(path).close()
    assert path.read_text("utf-8").splitlines() == [",".join(COLUMNS)]


def test_plain_lines_when_nobody_looks() -> None:
    out = io.StringIO()
    assert isinstance(make_progress(9, console=Console(file=out)), PlainProgress)
    # FORCE_COLOR asks for colours, and for no bar in a file
    progress = make_progress(100, console=Console(file=out, force_terminal=True, width=60))
    assert isinstance(progress, PlainProgress)
    progress.step(row(1))
    progress.row(row(25))
    progress.row(row(50, validation=1.25))
    progress.close()
    assert out.getvalue().splitlines() == [
        "step 25/100  loss 2.5000  640 tokens/s  0:00:07 left",
        "step 50/100  loss 2.5000  validation 1.2500  640 tokens/s  0:00:05 left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    out = Terminal()
    progress = make_progress(100, 10, console=Console(file=out, width=100))
    assert isinstance(progress, ProgressBar)
    progress.row(row(20, validation=1.25))
    progress.step(row(21))
    progress.close()
    assert "21/100" in out.getvalue()
    assert "loss 2.500, validation 1.250 640 tokens/s" in out.getvalue()
