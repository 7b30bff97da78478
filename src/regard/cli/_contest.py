"""The options of `regard compare`, as types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_SIZES, _TIME, _QUALITY, _OUT = "Sizes", "What is measured", "Quality", "Output"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MECHANISM",
        help="Of --list; or of the catalogue with its options: gqa:groups=1, retention.",
        show_default="the default set",
    ),
]
Dim = Annotated[int, _option(_SIZES, "Model width M.", min=2)]
Layers = Annotated[int, _option(_SIZES, "Blocks.", min=1)]
Heads = Annotated[int, _option(_SIZES, "Query heads H.", min=1)]
Hidden = Annotated[
    int | None, _option(_SIZES, "Feed-forward width.", min=1, show_default="8/3 of dim")
]
Window = Annotated[int, _option(_SIZES, "Tokens of a window, of a segment, of a stream.", min=1)]
Same = Annotated[
    str, _option(_SIZES, "sizes; or parameters: the feed-forward width makes up for the rest.")
]
Context = Annotated[
    list[int] | None,
    _option(
        _TIME, "Tokens of prompts and in front of decoding; repeatable.", min=1,
        show_default="512, 2048, 8192",
    ),
]  # fmt: skip
Length = Annotated[int, _option(_TIME, "Tokens of a row in training.", min=2)]
Batch = Annotated[int, _option(_TIME, "Rows of a training step.", min=1)]
Rounds = Annotated[int, _option(_TIME, "Rounds; each times every mechanism once.", min=1)]
Seconds = Annotated[float, _option(_TIME, "Of rounds, for each measurement.", min=0.01)]
Memory = Annotated[
    bool,
    _option(_TIME, "Peak memory, in a process for each mechanism.", "--memory/--no-memory"),
]
Threads = Annotated[int | None, _option(_TIME, "Threads.", min=1, show_default="torch's")]
Quality = Annotated[
    bool, _option(_QUALITY, "Train each too: the same tokens, text and recall.", "--quality")
]
Lessons = Annotated[
    list[str] | None,
    _option(
        _QUALITY, "text, mqar or passkey; repeatable.", "--lesson",
        show_default="all three",
    ),
]  # fmt: skip
Text = Annotated[str, _option(_QUALITY, "A UTF-8 file, a folder, or python-docs: read as bytes.")]
Minutes = Annotated[
    float, _option(_QUALITY, "For everything: training is shortened to fit.", min=0.1)
]
Steps = Annotated[
    int | None,
    _option(_QUALITY, "Optimiser steps, whatever time they take.", min=1, show_default="as fit"),
]
Rates = Annotated[
    list[float] | None,
    _option(
        _QUALITY, "Learning rate for all; repeatable: the best counts.", "--lr",
        show_default="0.003; with a state 0.001, 0.003, 0.01",
    ),
]  # fmt: skip
Seeds = Annotated[int, _option(_QUALITY, "Seeds 0, 1, ...; each trains anew.", min=1)]
Out = Annotated[
    Path | None,
    _option(_OUT, "A folder that keeps each measurement; a run goes on with what is there."),
]
Json = Annotated[bool, _option(_OUT, "Print everything as JSON.", "--json")]
Csv = Annotated[Path | None, _option(_OUT, "Write a line for each mechanism.", metavar="FILE")]
Html = Annotated[Path | None, _option(_OUT, "Write a page with the plots.", metavar="FILE")]
List = Annotated[
    bool, _option(_OUT, "List the default set and what is measured, and stop.", "--list")
]
