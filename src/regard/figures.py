"""The figures of the documentation, computed by the library: `python -m regard.figures FOLDER`.

A figure is a function without arguments in `FIGURES`; its name is the name of the file. The figures
show the heads and caches of MHA, GQA, MQA and MLA, a causal pattern, self-attention and
cross-attention, the growth of caches, rotary angles, ALiBi's penalty and the segments of
Infini-attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from regard import attend, masks
from regard.biases import alibi_slopes
from regard.configs.suggested_sizes import BaseModel, mechanism_costs
from regard.cost import CostReport, Setting, model_of
from regard.errors import RegardError
from regard.positions import rope_frequencies
from regard.span import Span
from regard.standard_output import run_program
from regard.units import plural
from regard.view import attention_diagram, charts
from regard.view.charts import Chart, Line, Picture
from regard.view.heads_figure import CachedHeads, HeadsFigure, MaskFigure
from regard.view.heatmaps import AlignmentMap, HeadWeights

WORDS = ("your", "journey", "starts", "with", "one", "step")
TRANSLATED = ("你的", "旅程", "始于", "一步")


def heads() -> Chart:
    """Return the heads and the cache of MHA, GQA, MQA and MLA, at the sizes of an 8B model."""
    return HeadsFigure(
        (
            CachedHeads("MHA", 32, 32, 2 * 32 * 128),
            CachedHeads("GQA", 32, 8, 2 * 8 * 128),
            CachedHeads("MQA", 32, 1, 2 * 128),
            CachedHeads("MLA", 32, 0, 512 + 64, "latent 512, key 64"),
        )
    )


def _weights(queries: int, keys: int, *, causal: bool, seed: int = 3) -> list[list[float]]:
    """Return the weights of a head with random queries and keys: attention to one-hot values."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, queries, 16, generator=generator)
    k = torch.randn(1, 1, keys, 16, generator=generator)
    mask = masks.Causal() if causal else None
    weights = attend(q, k, torch.eye(keys)[None, None], mask=mask, backend="reference")
    rows: list[list[float]] = weights[0, 0].tolist()
    return rows


def causal_pattern() -> Chart:
    """Return the weights of a causal head: the part above the diagonal is zero, rows sum to one."""
    return HeadWeights(_weights(6, 6, causal=True), "a causal head: every row sums to 1")


def self_attention() -> Chart:
    """Return self-attention: the words of a sentence attend to the words of the same sentence."""
    weights = torch.tensor(_weights(6, 6, causal=False)).numpy()
    title = "self-attention: rows and columns are the same sentence"
    return AlignmentMap(weights, WORDS, WORDS, title)


def cross_attention() -> Chart:
    """Return cross-attention: the words of an answer attend to the words of another sentence."""
    weights = torch.tensor(_weights(4, 6, causal=False)).numpy()
    title = "cross-attention: rows are the answer, columns are the source"
    return AlignmentMap(weights, TRANSLATED, WORDS, title)


def cache_growth() -> Chart:
    """Return the caches of an 8B model with several mechanisms over the context."""
    base = BaseModel.of(model_of("llama-3.1-8b"))
    names = ("mha", "gqa:8", "mqa", "mla", "window:4096")
    lines = tuple(
        Line(
            row.label,
            tuple(
                (float(n), float(CostReport(row.report.model, Setting(n)).kv_bytes))
                for n in (2**i for i in range(10, 18))
            ),
        )
        for row in mechanism_costs(names, base, Setting())
    )
    title = "the cache of one sequence, 32 layers of width 4,096, bf16"
    return Picture(title, "context, tokens", "cache, bytes", lines, "xy")


def rotary_angles() -> Chart:
    """Return the cosine of the angle of some rotary pairs at each position."""
    frequencies = rope_frequencies(64).inv_freq.tolist()
    lines = tuple(
        Line(
            f"pair {pair}",
            tuple(
                (float(t), float(torch.cos(torch.tensor(t * frequencies[pair]))))
                for t in range(129)
            ),
        )
        for pair in (0, 4, 8, 16, 31)
    )
    return Picture("rotary positions: cos(t x frequency), D = 64", "position t", "cosine", lines)


def alibi_penalty() -> Chart:
    """Return the penalty of ALiBi for each head over the distance."""
    slopes = alibi_slopes(8)
    lines = tuple(
        Line(f"head {h}", tuple((float(d), -slope * d) for d in range(65)))
        for h, slope in enumerate(slopes)
    )
    return Picture("ALiBi: what is added to a score, 8 heads", "distance", "penalty", lines)


def infini_segments() -> Chart:
    """Return the keys that softmax sees in Infini-attention; the memory has the rest."""
    positions = Span(0, 24)
    visible = (masks.Causal() & masks.Chunk(8)).block(positions, positions)[0, 0].numpy()
    return MaskFigure(visible, "Infini-attention, segments of 8: earlier ones are in the memory")


FIGURES: dict[str, Callable[[], Chart]] = {
    "heads": heads,
    "causal-pattern": causal_pattern,
    "self-attention": self_attention,
    "cross-attention": cross_attention,
    "cache-growth": cache_growth,
    "rotary-angles": rotary_angles,
    "alibi-penalty": alibi_penalty,
    "infini-segments": infini_segments,
}
"""The name of each figure, which is the name of its file, and the function that draws it."""


def figure_texts() -> dict[str, str]:
    """Return every figure as SVG text, by the name of its file.

    >>> sorted(figure_texts())[:3]
    ['alibi-penalty.svg', 'blocks.svg', 'cache-growth.svg']
    """
    drawn = {f"{name}.svg": charts.svg(make()) for name, make in FIGURES.items()}
    return {"blocks.svg": attention_diagram.svg(), **drawn}


def main(arguments: list[str]) -> int:
    """Write all figures to a folder.

    Args:
        arguments: the folder.

    Returns:
        The exit code: 0, or 2 for wrong usage.
    """
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m regard.figures FOLDER, with a folder that exists", file=sys.stderr)
        return 2
    texts = figure_texts()
    try:
        for name, text in texts.items():
            (Path(arguments[0]) / name).write_text(text, encoding="utf-8")
    except (OSError, RegardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{plural(len(texts), 'figure')} in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
