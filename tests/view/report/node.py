"""math.js under node: what a page's numbers are, asked for from Python."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regard
from regard.view.page import pack, to_page_value

NODE = shutil.which("node")
WHY_NOT = "no node on the PATH: math.js runs in a browser only"
MATH = Path(regard.__file__).parent / "view" / "page" / "math.js"
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def ask(data: dict[str, Any], questions: Sequence[Sequence[Any]]) -> list[Any]:
    """The answers of math.js over a page's data: each question is a function's name and its
    arguments.
    """
    packed = pack(data["arrays"])
    said = {
        "meta": to_page_value(data["meta"]),
        "table": packed.table,
        "arrays": packed.text,
        "ask": questions,
    }
    assert NODE is not None
    run = subprocess.run(
        [NODE, str(Path(__file__).with_name("run.js")), str(MATH)],
        input=json.dumps(said),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: list[Any] = json.loads(run.stdout, object_hook=_numbers)
    return [_read(x) for x in found]


def _numbers(x: dict[str, Any]) -> dict[str, Any]:
    return {name: _read(value) for name, value in x.items()}


def _read(x: Any) -> Any:
    if isinstance(x, str):
        return WORDS.get(x, x)
    return [_read(y) for y in x] if isinstance(x, list) else x
