"""The terminal page: what it says, how wide it is, that hostile text stays text; colours; and
writing pages.
"""

from __future__ import annotations

import math
import re
import stat
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from regard.inspect import explain
from regard.units import plural
from regard.view import explanation_text, html_page, palette
from regard.view.terminal import columns, fold, number, weight
from tests.inspect.small_model import TEXT, model

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'&amp;",
    "\u202eRTL\u2066",
    "zero\u200bwidth",
    "nul\x00\x1b[31mred\x1b[0m",
    "line\u2028sep\u2029\U000e0041tag\ufe0f",
    "${data}$style",
    "]]><!--",
)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return explain(model(), TEXT, layer=1, head=3, query="verdant").as_dict()


@pytest.fixture(scope="module")
def hostile(data: dict[str, Any]) -> dict[str, Any]:
    """The same numbers under the worst names."""
    pieces = [*HOSTILE, *data["pieces"]][: len(data["pieces"])]
    guesses = [{**p, "piece": HOSTILE[i]} for i, p in enumerate(data["predictions"])]
    names = {"text": HOSTILE[0], "model": HOSTILE[1]}
    return data | names | {"pieces": pieces, "predictions": guesses}


def printed(data: dict[str, Any], color: str | None = None) -> str:
    out = StringIO()
    kind = {"force_terminal": color is not None, "color_system": color, "no_color": color is None}
    explanation_text.show(data, Console(file=out, width=80, **kind))
    return out.getvalue()


def test_the_terminal_page_says_each_step_in_80_columns(data: dict[str, Any]) -> None:
    text = printed(data)
    titles = re.findall("━━ (.*?) ━", text)
    assert [title[0] for title in titles[:9]] == [*"123456789"]
    for title in ("2 hidden state", "6 weighted values", "8 the whole pattern", "check"):
        assert title in titles
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "rows are queries, columns are keys" in text
    assert "reason: future" in text
    assert number(data["lse"]) in text
    assert number(data["row_max"]) in text
    best = max(range(len(data["weights"])), key=lambda j: data["weights"][j])
    line = next(row for row in text.splitlines() if re.match(rf"\s+{best} .*█", row))
    for column in (data["scores"][0]["values"], data["scores"][1]["values"], data["exps"]):
        assert number(column[best]) in line
    assert weight(data["weights"][best]) in line
    assert f"{data['check']:.1e}" in text


def test_colour_adds_nothing_but_colour(data: dict[str, Any]) -> None:
    plain, coloured = printed(data), printed(data, "truecolor")
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_no_color_is_honoured(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = StringIO()
    explanation_text.show(data, Console(file=out, width=80, force_terminal=True))
    assert not re.search(r"\x1b\[[0-9;]*38;", out.getvalue())


def test_many_keys_are_counted_not_cut() -> None:
    long = explain(model(), (TEXT + ". ") * 4, layer=2, head=0).as_dict()
    text = printed(long)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    visible = sum(not reason for reason in long["masked"])
    order = sorted(long["weights"], reverse=True)
    rest = weight(sum(order[8:]))
    assert f"... {plural(visible - 8, 'other key')} with total weight {rest}" in text
    assert f"cells: largest weight of {long['pool']} x {long['pool']}" in text
    assert long["pool"] == math.ceil(long["sizes"]["T"] / 32)


def test_hostile_names_do_not_reach_the_terminal(hostile: dict[str, Any]) -> None:
    text = printed(hostile)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    controls = "\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u2029\u202e\u2066\U000e0041"
    assert not re.search(f"[{controls}]", text)


@pytest.mark.parametrize("text", ["你好 世界 🎉🎉🎉", "é" * 40, "x"])
def test_wide_letters_keep_the_columns(text: str) -> None:
    page = printed(explain(model(), text).as_dict())
    assert max(cell_len(line) for line in page.splitlines()) <= 80


def test_the_list_of_heads_marks_the_chosen_one() -> None:
    rows = [
        {"layer": 0, "head": h, "key": 2, "piece": HOSTILE[h], "weight": h / 4} for h in range(4)
    ]
    out = StringIO()
    explanation_text.show_heads("5 x", rows, (0, 2), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert [line[0] for line in lines[2:]] == [" ", " ", "▶", " "]
    assert "0.5000 ████████████             " in lines[4]
    assert max(cell_len(line) for line in lines) <= 80


@pytest.mark.parametrize("role", ["q", "k", "v", "s", "z", "soft", "ink", "good", "bad"])
@pytest.mark.parametrize("names", [palette.LIGHT, palette.DARK])
def test_text_colours_are_readable_on_their_grounds(role: str, names: dict[str, str]) -> None:
    """A contrast of 4.5 to 1 at least, as WCAG 2.2 asks of text."""

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for ground in ("page", "card", "hint"):
        high, low = sorted((light(names[role]), light(names[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, ground


@pytest.mark.parametrize("stops", [*palette.WEIGHTS.values()])
def test_the_ramp_of_weights_changes_its_lightness_one_way(stops: tuple[palette.Rgb, ...]) -> None:
    lights = [sum(palette.ramp(stops, t / 50)) for t in range(51)]
    assert lights == sorted(lights) or lights == sorted(lights, reverse=True)
    assert palette.ramp(stops, -1) == stops[0]
    assert palette.ramp(stops, 2) == stops[-1]


def test_signed_strips_show_the_sign_without_colour() -> None:
    up, down = columns([1.0, -1.0, 0.0], top=1.0)
    assert (up, down) == ("█  ", " █ ")
    assert columns([0.0], top=0.0) == (" ", " ")
    values = [float(i) for i in range(256)]
    assert fold(values, 64) == (4, values[3::4])


def test_numbers_are_short() -> None:
    shown = [number(x) for x in (0.0, -12.3456, 5e-7, 2e7, -math.inf)]
    assert shown == ["0.000", "-12.35", "5.00e-07", "2.00e+07", "-∞"]


def test_a_page_that_is_written_again_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert html_page.write(file, "é") == 2
    assert file.read_text("utf-8") == "é"
    file.chmod(0o640)
    html_page.write(file, "second")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
