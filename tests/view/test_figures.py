"""The figures of the documentation: the stored files show what the library computes now."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from regard.biases import alibi_slopes
from regard.figures import FIGURES, alibi_penalty, cache_growth, figure_texts, main
from regard.figures import causal_pattern as causal_figure
from regard.view.charts import Picture
from regard.view.heatmaps import HeadWeights

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def structure(text: str) -> tuple[list[str], dict[str, int]]:
    """The words of a figure and the number of its shapes, whatever fonts are installed."""
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    shapes = re.findall(r"<(path|use|rect|line|g)\b", text)
    return sorted(words), {name: shapes.count(name) for name in set(shapes)}


@pytest.mark.full
def test_the_stored_figures_are_those_of_the_library() -> None:
    for name, text in figure_texts().items():
        stored = (IMAGES / name).read_text(encoding="utf-8")
        assert structure(stored) == structure(text), f"{name}: run python -m regard.figures again"


def test_a_causal_head_sees_no_later_word_and_sums_to_one() -> None:
    figure = causal_figure()
    assert isinstance(figure, HeadWeights)
    weights = np.array(figure.weights)
    assert np.array_equal(weights == 0, np.triu(np.ones((6, 6), bool), 1))
    assert np.allclose(weights.sum(1), 1, atol=1e-6)


def test_lines_have_the_numbers_of_the_library() -> None:
    growth, penalty = cache_growth(), alibi_penalty()
    assert isinstance(growth, Picture)
    assert isinstance(penalty, Picture)
    cache = {line.name: dict(line.points) for line in growth.lines}
    assert cache["mha"][32768.0] == 16 * 2**30 == 4 * cache["gqa:8"][32768.0]
    assert cache["window:4096"][131072.0] == cache["window:4096"][4096.0]
    last = [line.points[64][1] for line in penalty.lines]
    assert last == [-64 * slope for slope in alibi_slopes(8)]


def test_the_command_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m regard.figures FOLDER")
    assert "heads" in FIGURES
