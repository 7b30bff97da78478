"""The figures of the documentation: the stored files show what the library computes now."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from docs.figures import (
    ANIMALS,
    FIGURE_FILES,
    FIGURES,
    alibi_penalty,
    cache_growth,
    context_scaling,
    dropout_weights,
    figure_texts,
    linear_work,
    main,
    scale_effect,
    self_attention,
    sparse_patterns,
    trained_relations,
)
from docs.figures import causal_pattern as causal_figure
from regard.biases import alibi_slopes
from regard.language import LANGUAGES, use_language
from regard.view.charts import Picture
from regard.view.heatmaps import HeadWeights, MaskPanels
from tests.golden import ENTRIES

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def structure(text: str) -> tuple[list[str], dict[str, int]]:
    """The words of a figure and the number of its shapes, whatever fonts are installed."""
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    shapes = re.findall(r"<(path|use|rect|line|g)\b", text)
    return sorted(words), {name: shapes.count(name) for name in set(shapes)}


@pytest.mark.full
@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_stored_figures_are_those_of_the_library(lang: str) -> None:
    folder = IMAGES / lang if lang != "en" else IMAGES
    with use_language(lang):
        texts = figure_texts()
    assert set(texts) == set(FIGURE_FILES)
    for name, text in texts.items():
        stored = (folder / name).read_text(encoding="utf-8")
        assert structure(stored) == structure(text), f"{name}: run python -m docs.figures again"


@pytest.mark.full
def test_labels_follow_the_language() -> None:
    """In Chinese no label has two English words, except the names of mechanisms and formulas."""
    with use_language("zh"):
        words = {name: structure(text)[0] for name, text in figure_texts().items()}
    english = re.compile("[a-z]{3,} [a-z]{2,}")
    assert [x for found in words.values() for x in found if english.search(x)] == []
    chinese = re.compile("[\u4e00-\u9fff]")
    assert [name for name, found in words.items() if not any(map(chinese.search, found))] == []


def test_dropout_doubles_what_it_keeps_and_can_empty_a_row() -> None:
    figure = dropout_weights()
    assert isinstance(figure, HeadWeights)
    before, after = np.array(figure.weights).reshape(2, 6, 6)
    assert np.allclose(before.sum(1), 1, atol=1e-6)
    kept = after > 0
    assert np.allclose(after[kept], 2 * before[kept])
    assert 0 < kept.sum() < (before > 0).sum()
    assert (after.sum(1) == 0).sum() == 1


def test_the_six_words_have_the_printed_weights() -> None:
    for figure, name in ((self_attention(), "simple.weights"), (causal_figure(), "causal.weights")):
        assert isinstance(figure, HeadWeights)
        printed = np.array(ENTRIES[name]["printed"])
        assert np.abs(np.array(figure.weights) - printed).max() < 6e-5, name
        hints = figure.draw().hints["cells"]
        assert hints[7].startswith("journey, journey: ")


def test_training_finds_who_eats_what() -> None:
    figure = trained_relations()
    assert isinstance(figure, HeadWeights)
    before, after = np.array(figure.weights).reshape(2, len(ANIMALS), -1)
    assert before.max() < 0.2
    assert after.argmax(1).tolist() == [3, 4, 5]
    assert after.max(1).min() > 0.9


def test_masks_stand_side_by_side_with_their_pairs() -> None:
    figure = sparse_patterns()
    assert isinstance(figure, MaskPanels)
    n = 24
    window = sum(min(i + 1, 6) for i in range(n))
    assert figure.captions[:2] == [f"{n * (n + 1) // 2} of 576 pairs", f"{window} of 576 pairs"]
    assert len(figure.draw().figure.axes) == 6


def test_lines_of_the_course() -> None:
    lines = {
        make.__name__: {line.name: [y for _, y in line.points] for line in figure.lines}
        for make in (scale_effect, linear_work, context_scaling)
        if isinstance(figure := make(), Picture)
    }
    scale = lines["scale_effect"]
    assert scale["without the scale"][-1] > 0.8
    assert max(scale["divided by sqrt(d)"]) < 0.06
    work = lines["linear_work"]
    assert work["linear_attention"][0] == work["linear_attention"][-1]
    assert work["gqa:8"][-1] > 4 * work["gqa:8"][0]
    ways = lines["context_scaling"]
    assert set(ways["interpolation"]) == {1 / 16}
    assert ways["YaRN"][0] == ways["NTK-aware"][0] == 1
    assert min(ways["YaRN"]) == pytest.approx(1 / 16)


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
    assert capsys.readouterr().err.startswith("usage: python -m docs.figures FOLDER")
    assert main([str(tmp_path), "--lang", "fr"]) == 2
    assert "heads" in FIGURES
