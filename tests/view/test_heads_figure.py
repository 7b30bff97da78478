"""The figures of heads with their caches, and of masks."""

from __future__ import annotations

import numpy as np

from regard.view.charts import svg
from regard.view.heatmaps import CachedHeads, HeadsFigure, MaskFigure

FOUR = (
    CachedHeads("MHA", 32, 32, 8192),
    CachedHeads("GQA", 32, 8, 2048),
    CachedHeads("MQA", 32, 1, 256),
    CachedHeads("MLA", 32, 0, 576, "latent 512, key 64"),
)


def test_panels_have_every_head_and_the_bytes() -> None:
    figure = HeadsFigure(FOUR)
    sizes = ("16.0 KiB", "4.00 KiB", "512 B", "1.12 KiB")
    assert figure.captions == [f"{size} a token" for size in sizes]
    panels = figure.draw().figure.axes
    # every query head, and two boxes for each key/value head; one box for the latent
    assert [len(axes.patches) for axes in panels] == [32 + 64, 32 + 16, 32 + 2, 32 + 1]
    assert [len(axes.lines) for axes in panels] == [32] * 4
    ends = [tuple(line.get_xdata())[1] for line in panels[1].lines]
    assert len(set(ends)) == 8, "query heads of one group end at the same key/value head"
    assert ends == sorted(ends)


def test_a_mask_is_drawn_pair_by_pair() -> None:
    visible = np.tril(np.ones((6, 6), bool))
    chart = MaskFigure(visible, "causal <b>", q_start=2)
    (axes,) = chart.draw().figure.axes
    cells = axes.collections[0].get_array()
    assert cells is not None
    assert np.array_equal(np.asarray(cells).reshape(6, 6) > 0, visible)
    bottom, top = axes.get_ylim()
    assert (top, bottom) == (1.5, 7.5), "the first query is at the top"
    assert "causal &lt;b&gt;" in svg(chart)
