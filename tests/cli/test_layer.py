"""`regard layer`: the notes' run in one command, side by side, as a page, a figure and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from regard.cli.app import run
from tests.cli.command import Said


def test_the_notes_whole_run_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layer", "--full"]) == 0
    out = capsys.readouterr().out
    order = [
        "Input x: (2, 4, 512); q (2, 8, 4, 64), k (2, 8, 4, 64), v (2, 8, 4, 64)",
        "Output: (2, 4, 512)",
        "Mask (causal; 1 = may attend",
        "[[1 0 0 0]\n [1 1 0 0]\n [1 1 1 0]\n [1 1 1 1]]",
        "Scores of every head, scaled, before the mask, (2, 8, 4, 4)",
        "Scores after the mask, (2, 8, 4, 4)",
        "Weights after softmax, in evaluation mode: every row sums to 1, (2, 8, 4, 4)",
        "Output of attention: heads joined and projected, no residual added, (2, 4, 512)",
        "Output of the block: LayerNorm(x + out), (2, 4, 512)",
        "stage",
        "The layer is in evaluation mode",
    ]
    at = [out.index(part) for part in order]
    assert at == sorted(at)
    assert out.count("-inf") == 2 * 48, "both sequences are masked"
    again = run(["layer", "--full"]), capsys.readouterr().out
    assert again[1].partition("     stage")[0] == out.partition("     stage")[0], "a seed"


@pytest.mark.parametrize(
    ("lang", "heading", "goes_on"),
    [
        ("en", "Scores of head 3 in the first sequence, scaled", "regard describe lists all of"),
        ("zh", "第一个序列中头 3 的分数，已缩放", "regard describe 列出所有机制"),
    ],
)
def test_one_screen_has_one_head(said: Said, lang: str, heading: str, goes_on: str) -> None:
    out = said("layer", "--head", "3", "--lang", lang)
    assert len(out.splitlines()) <= 40
    assert heading in out
    assert goes_on in " ".join(out.split())
    assert "--full" in out
    weights = json.loads(said("layer", "--json"))[0]["stages"][5]
    assert weights["name"] == "weights"
    shown = [line.strip(" []").split() for line in out.splitlines()]
    for row in weights["values"][0][3]:
        assert [f"{x:.4f}" for x in row] in [
            [f"{float(x):.4f}" for x in line] for line in shown if is_numbers(line)
        ]


def is_numbers(words: list[str]) -> bool:
    """Whether a line has the four numbers of a row."""
    return len(words) == 4 and all(set(word) <= set("-.0123456789") for word in words)


def test_a_head_that_is_not_there_is_not_printed(refused: Said) -> None:
    small = ("layer", "--heads", "4", "--dim", "16")
    assert "head is 4; mha has 4 heads, counted from 0" in refused(*small, "--head", "4")


def test_page_and_figure_in_chinese(said: Said, tmp_path: Path) -> None:
    page, figure = tmp_path / "layer.html", tmp_path / "head.svg"
    small = ("layer", "--heads", "4", "--dim", "16", "--lang", "zh")
    said(*small, "--html", page, "--figure", figure)
    texts = re.findall(r"(?:<h1|<h2|<th|<b|<p|<li)>([^<]*[a-z]{3}[^<]*)<", page.read_text("utf-8"))
    assert [x for x in texts if not re.search("[\u4e00-\u9fff]", x)] == ["mha"]
    assert ">mha，头 0 的权重，causal<" in figure.read_text("utf-8")


def test_json_page_and_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, figure = tmp_path / "layer.html", tmp_path / "head.svg"
    drawn = ["--figure", str(figure), "--head", "3"]
    assert run(["layer", "--dim", "16", "--heads", "4", "--json", "--html", str(page), *drawn]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    weights = {stage["name"]: stage["values"] for stage in told["stages"]}["weights"]
    assert np.array(weights).sum(-1) == pytest.approx(1, abs=1e-6)
    assert told["allowed"][0] == [1, 0, 0, 0]
    html = page.read_text("utf-8")
    assert "<script" not in html
    parts = "<h2>Stages", "<th>mean</th><th>std</th><th>ms</th>", "<h2>Mask: causal"
    for part in (*parts, "<td>-inf</td>", "every row sums to 1: mha"):
        assert part in html, part
    assert "mha, weights of head 3" in figure.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("retention",), "retention is a Recurrent"),
        (("mha", "gpt", "--set", "bias=True"), "applies to one mechanism, but 2 are named"),
        (("mha", "--html", "nowhere/page.html"), "there is no folder"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, refused: Said) -> None:
    assert message in refused("layer", *arguments)


def test_a_head_that_is_not_there_is_not_drawn(refused: Said, tmp_path: Path) -> None:
    small = ("layer", "--heads", "4", "--dim", "16")
    error = refused(*small, "--head", "4", "--figure", tmp_path / "h.png")
    assert "head is 4; mha has 4 heads, counted from 0" in error
