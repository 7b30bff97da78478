"""The figures of the documentation, computed by the library: `python -m docs.figures FOLDER`, with
labels in English, or with `--lang zh` in Chinese.

A figure is a function without arguments in `FIGURES`; its name is the name of the file. They are
the pictures of the course in docs/learn, in the order of its chapters. The first ones show six
words with three numbers each, from chapter 3 of Sebastian Raschka's "Build a Large Language Model
(From Scratch)".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from docs import block_diagrams
from regard import attend, attention_weights, load, masks
from regard.biases import alibi_slopes
from regard.configs.suggested_sizes import BaseModel, mechanism_costs
from regard.cost import CostReport, Setting, model_of
from regard.errors import RegardError
from regard.files.named_packages import is_installed
from regard.inspect import explain
from regard.inspect.explain.head_choice import name_mover
from regard.inspect.model_run import prepare_run
from regard.language import (
    LANGUAGES,
    add_texts,
    language_of_locale,
    translate,
    translate_count,
    use_language,
)
from regard.ops import infini_attention as memory
from regard.positions import NTK, LinearScaling, YaRN, rope_frequencies, sinusoidal
from regard.span import Span
from regard.standard_output import run_program
from regard.view import charts, palette
from regard.view.charts import Chart, Line, Picture
from regard.view.heatmaps import (
    CachedHeads,
    EffectMap,
    HeadsFigure,
    HeadWeights,
    MaskFigure,
    MaskPanels,
)

add_texts(Path(__file__).with_name("strings"))

WORDS = ("Your", "journey", "starts", "with", "one", "step")
EMBEDDINGS = (
    (0.43, 0.15, 0.89),
    (0.55, 0.87, 0.66),
    (0.57, 0.85, 0.64),
    (0.22, 0.58, 0.33),
    (0.77, 0.25, 0.10),
    (0.05, 0.80, 0.55),
)
DROPPED = 0.5
"""The share of weights that `dropout_weights` drops."""
ANIMALS, FOODS = ("cat", "rabbit", "dog"), ("fish", "carrot", "bone")


def heads() -> Chart:
    """Return the heads and the cache of MHA, GQA, MQA and MLA, at the sizes of an 8B model."""
    return HeadsFigure(
        (
            CachedHeads("MHA", 32, 32, 2 * 32 * 128),
            CachedHeads("GQA", 32, 8, 2 * 8 * 128),
            CachedHeads("MQA", 32, 1, 2 * 128),
            CachedHeads("MLA", 32, 0, 512 + 64, translate("latent 512, key 64")),
        )
    )


def _rows(weights: Tensor) -> list[list[float]]:
    rows: list[list[float]] = weights.tolist()
    return rows


def self_attention() -> Chart:
    """Return the weights of six words for one another, without learned matrices."""
    x = torch.tensor(EMBEDDINGS)[None, None]
    weights = attention_weights(x, x, scale=1.0)[0, 0]
    title = translate("self-attention: rows and columns are one sentence")
    return HeadWeights(_rows(weights), title, WORDS, WORDS)


def _causal_weights() -> Tensor:
    """Return the weights [6, 6] of the causal head that chapter 3 begins with."""
    x = torch.tensor(EMBEDDINGS)
    generator = torch.Generator().manual_seed(789)
    bound = 3**-0.5  # that of nn.Linear with three inputs
    w_q, w_k = (torch.empty(2, 3).uniform_(-bound, bound, generator=generator) for _ in range(2))
    q, k = (x @ w.T for w in (w_q, w_k))
    return attention_weights(q[None, None], k[None, None], mask=masks.Causal())[0, 0]


def causal_pattern() -> Chart:
    """Return the weights of the six words in a causal head with linear maps from a fixed seed."""
    title = translate("a causal head: nothing above the diagonal, rows sum to 1")
    return HeadWeights(_rows(_causal_weights()), title, WORDS, WORDS)


def scale_effect() -> Chart:
    """Return the largest of 512 weights over the size of a head, with and without the scale."""
    sizes, lines = (4, 16, 64, 256, 1024), []
    for name, scale in (
        (translate("without the scale"), 1.0),
        (translate("divided by sqrt(d)"), None),
    ):
        points = []
        for size in sizes:
            generator = torch.Generator().manual_seed(0)
            q, k = torch.randn(2, 1, 1, 512, size, generator=generator)
            largest = attention_weights(q, k, scale=scale).amax(-1).mean()
            points.append((float(size), float(largest)))
        lines.append(Line(name, tuple(points)))
    title = translate("the largest of 512 weights, mean over queries")
    return Picture(
        title, translate("size of the head, d"), translate("largest weight"), tuple(lines), "x"
    )


def trained_relations() -> Chart:
    """Return the weights of animals for words before and after a training that asks each animal
    for the colour of its food.
    """
    generator = torch.Generator().manual_seed(0)
    size = len(ANIMALS) + len(FOODS)
    w_q, w_k = (
        (0.1 * torch.randn(size, 4, generator=generator)).requires_grad_() for _ in range(2)
    )
    optimizer = torch.optim.Adam([w_q, w_k], lr=0.1)

    def weights() -> Tensor:
        return attention_weights(w_q[None, None], w_k[None, None])[0, 0, : len(ANIMALS)].detach()

    before = weights()
    for _ in range(150):
        colours = torch.randn(32, 1, size, 3, generator=generator)
        q, k = (w.expand(32, 1, size, 4) for w in (w_q, w_k))
        answers = attend(q, k, colours, backend="reference")[:, 0, : len(ANIMALS)]
        error = (answers - colours[:, 0, len(ANIMALS) :]).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    names = tuple(map(translate, ANIMALS))
    rows = [translate("{name} before", name=name) for name in names]
    rows += [translate("{name} after", name=name) for name in names]
    title = translate("before and after training: who reads whom")
    return HeadWeights(
        _rows(torch.cat([before, weights()])),
        title,
        rows,
        tuple(map(translate, (*ANIMALS, *FOODS))),
    )


def dropout_weights() -> Chart:
    """Return the weights of the causal head before and after a dropout of half of them: what is
    left is doubled, so that the rows sum to 1 on average only.
    """
    weights = _causal_weights()
    generator = torch.Generator().manual_seed(26)  # empties a row
    visible = torch.rand(weights.shape, generator=generator) >= DROPPED
    after = weights * visible / (1 - DROPPED)
    rows = [
        translate("{word}, sum {total}", word=word, total=f"{float(row.sum()):.2f}")
        for part in (weights, after)
        for word, row in zip(WORDS, part, strict=True)
    ]
    title = translate("above: weights; below: after dropout, p = 0.5, the others x 2")
    return HeadWeights(_rows(torch.cat([weights, after])), title, rows, WORDS)


def sinusoids() -> Chart:
    """Return the sinusoidal positions of 24 tokens with 32 numbers each."""
    values = sinusoidal(24, 32)
    title = translate("sinusoidal positions: fast dims left, slow dims right")
    rows = [translate("position {t}", t=t) if t % 4 == 0 else "" for t in range(24)]
    columns = [str(d) if d % 4 == 0 else "" for d in range(32)]
    return EffectMap(
        values.double().numpy(), rows, columns, title, translate("dim"), translate("value")
    )


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
    title = translate("the cache of one sequence, 32 layers of width 4,096, bf16")
    return Picture(title, translate("context, tokens"), translate("cache, bytes"), lines, "xy")


def compressed_cache() -> Chart:
    """Return the cache of each token over the context, from MLA to compressed attention."""
    names = ("deepseek-v3", "deepseek-v3.2", "deepseek-v4-pro", "deepseek-v4-flash")
    contexts = [2**i for i in range(8, 21)]
    lines = tuple(
        Line(
            name,
            tuple((float(n), CostReport(model, Setting(n)).kv_bytes / n) for n in contexts),
        )
        for name, model in ((name, model_of(name)) for name in names)
    )
    title = translate("the cache of one token, bf16")
    return Picture(title, translate("context, tokens"), translate("cache, bytes"), lines, "xy")


def healing() -> Chart:
    """Return the perplexity of SmolLM2 with one key/value head over the tokens of finetuning."""
    file = Path(__file__).with_name("healing.jsonl")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    names = {"svd": "svd", "mean": "mean", "none": translate("not converted")}
    lines = [
        Line(
            f"{names[row['pooling']]}, lr {row['settings']['lr']:g}",
            tuple((t, p) for t, p in row["curve"]),
        )
        for row in rows
    ]
    last = float(max(t for row in rows for t, _ in row["curve"]))
    before = ((0.0, rows[0]["before"]), (last, rows[0]["before"]))
    lines.append(Line(translate("before the conversion"), before))
    title = translate("SmolLM2-135M from 3 key/value heads to 1, then finetuned")
    return Picture(
        title, translate("tokens of finetuning"), translate("perplexity"), tuple(lines), "y"
    )


def rotary_angles() -> Chart:
    """Return the cosine of the angle of some rotary pairs at each position."""
    frequencies = rope_frequencies(64).inv_freq
    lines = tuple(
        Line(
            translate("pair {n}", n=pair),
            tuple((float(t), float(torch.cos(t * frequencies[pair]))) for t in range(41)),
        )
        for pair in (0, 6, 10, 16, 31)
    )
    return Picture(
        translate("rotary positions: cos(t x frequency), D = 64"),
        translate("position t"),
        translate("cosine"),
        lines,
    )


def alibi_penalty() -> Chart:
    """Return the penalty of ALiBi for each head over the distance."""
    slopes = alibi_slopes(8)
    lines = tuple(
        Line(translate("head {n}", n=h), tuple((float(d), -slope * d) for d in range(65)))
        for h, slope in enumerate(slopes)
    )
    return Picture(
        translate("ALiBi: what is added to a score, 8 heads"),
        translate("distance"),
        translate("penalty"),
        lines,
    )


def sparse_patterns() -> Chart:
    """Return six masks of 24 tokens, with the number of pairs that each leaves."""
    span = Span(0, 24)
    causal = masks.Causal()
    shown = {
        translate("causal"): causal,
        translate("window of 6"): causal & masks.Window(6),
        translate("window and 2 sinks"): causal & (masks.Window(6) | masks.Sinks(2)),
        translate("every 5th, and the last 5"): causal & masks.Strided(5),
        translate("window and a global token"): masks.Window(3, ahead=2) | masks.Global((0,)),
        translate("BigBird: and random blocks"): masks.BigBird(2, 12, window=3, random=1),
    }
    panels = [MaskFigure(m.block(span, span)[0, 0].numpy(), name) for name, m in shown.items()]
    return MaskPanels(panels, translate("sparse patterns: rows are queries, columns are keys"))


def linear_work() -> Chart:
    """Return the work of one more token over the context for an 8B model with five mechanisms."""
    base = BaseModel.of(model_of("llama-3.1-8b"))
    names = ("gqa:8", "mla", "window:4096", "linear_attention", "nsa")
    lines = tuple(
        Line(
            row.label,
            tuple(
                (float(n), CostReport(row.report.model, Setting(n)).decode_flops / 1e9)
                for n in (2**i for i in range(10, 18))
            ),
        )
        for row in mechanism_costs(names, base, Setting())
    )
    title = translate("the work of one more token, 8B model")
    return Picture(title, translate("context, tokens"), "GFLOP", lines, "xy")


def context_scaling() -> Chart:
    """Return the factor by which each method multiplies the frequency of each rotary pair, to read
    16 times the trained 4,096 tokens.
    """
    plain = rope_frequencies(128).inv_freq
    ways = {
        translate("interpolation"): LinearScaling(16.0),
        translate("NTK-aware"): NTK(16.0),
        "YaRN": YaRN(16.0, 4096),
    }
    lines = []
    for name, scaling in ways.items():
        ratio = rope_frequencies(128, scaling=scaling).inv_freq / plain
        lines.append(Line(name, tuple((float(i), float(ratio[i])) for i in range(0, 64, 3))))
    title = translate("16 times the trained length: factor on each frequency")
    return Picture(title, translate("rotary pair, fast to slow"), translate("factor"), tuple(lines))


def infini_segments() -> Chart:
    """Return the keys that softmax sees in Infini-attention, and those that its memory has read."""
    positions = Span(0, 24)
    own, seen = (
        mask.block(positions, positions)[0, 0].numpy()
        for mask in (masks.Causal() & masks.Chunk(8), masks.Causal())
    )
    panels = [
        MaskFigure(own, translate("softmax: the own segment")),
        MaskFigure(seen & ~own, translate("memory: all closed segments")),
    ]
    return MaskPanels(panels, translate("Infini-attention, 24 tokens in segments of 8"))


def infini_recall() -> Chart:
    """Return how far what is read lies from the value that was stored with the key, over the
    number of stored tokens: the memory of Infini-attention, and softmax over all keys.
    """
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(1, 1, 512, size, generator=generator, dtype=torch.float64) for size in (64, 32)
    )
    points: dict[str, list[tuple[float, float]]] = {}
    for n in (2**i for i in range(10)):
        keys, values = k[:, :, :n], v[:, :, :n]
        state = memory.write(keys, values, memory.empty_state(keys, values))
        found = {
            translate("memory of Infini-attention"): memory.retrieve(keys, state).values,
            translate("softmax over all keys"): attend(keys, keys, values),
        }
        for name, read in found.items():
            error = (read - values).norm(dim=-1).mean() / values.norm(dim=-1).mean()
            points.setdefault(name, []).append((float(n), float(error)))
    lines = tuple(Line(name, tuple(of)) for name, of in points.items())
    title = translate("what is recalled: distance to the stored value")
    return Picture(
        title, translate("stored tokens"), translate("distance / length of a value"), lines, "x"
    )


def long_perplexity() -> Chart:
    """Return the perplexity of `tiny` over the length of the text, with the scalings of chapter 11,
    as `regard extend tiny` measured it (docs/tiny.json).
    """
    measured = json.loads(Path(__file__).with_name("tiny.json").read_text("utf-8"))["methods"]
    names = {
        "unscaled": translate("not scaled"),
        "linear": translate("interpolation"),
        "ntk": translate("NTK-aware"),
        "dynamic": translate("dynamic NTK"),
        "yarn": "YaRN",
    }
    lines = tuple(
        Line(name, tuple((float(n), x) for n, x in measured[key]["perplexity"].items()))
        for key, name in names.items()
    )
    title = translate("tiny, trained on 256 tokens: perplexity on longer texts")
    beyond = translate("longer than in training")
    return Picture(
        title, translate("length of the text, tokens"), translate("perplexity"), lines, "xy", 256,
        beyond,
    )  # fmt: skip


def decoding_steps() -> Chart:
    """Return the tokens whose keys and values each step computes, without and with a cache."""
    steps = Span(0, 12)
    whole, new = (
        mask.block(steps, steps)[0, 0].numpy()
        for mask in (masks.Causal(), masks.Causal() & masks.Window(1))
    )
    kept = whole & ~new
    computed = [
        translate("{n} keys and values computed", n=int(each.sum())) for each in (whole, new)
    ]
    read = translate("{n} keys and values read again", n=int(kept.sum()))
    panels = [
        MaskFigure(whole, translate("without a cache"), note=computed[0]),
        MaskFigure(new, translate("with a cache"), note=computed[1]),
        MaskFigure(kept, translate("kept in the cache"), note=read),
    ]
    return MaskPanels(panels, translate("12 steps of writing: rows are steps, columns are tokens"))


def head_steps() -> str:
    """Return the diagram of one head on six words, with the matrices of chapter 3."""
    x = torch.tensor(EMBEDDINGS)
    generator = torch.Generator().manual_seed(123)
    w_q, w_k, w_v = (torch.rand(3, 2, generator=generator) for _ in range(3))
    q, k, v = x[1] @ w_q, x @ w_k, x @ w_v
    scores = k @ q
    weights = torch.softmax(scores / 2**0.5, dim=0)
    columns = [
        (translate("keys"), "k", k),
        ("q · k", "s", scores[:, None]),
        ("/ sqrt(2)", "s", scores[:, None] / 2**0.5),
        (translate("weights"), "s", weights[:, None]),
        (translate("values"), "v", v),
    ]
    tables = [(name, role, _rows(values)) for name, role, values in columns]
    return block_diagrams.steps_svg(WORDS, "journey", q.tolist(), tables, (weights @ v).tolist())


FIGURES: dict[str, Callable[[], Chart]] = {
    "self-attention": self_attention,
    "scale": scale_effect,
    "trained-relations": trained_relations,
    "causal-pattern": causal_pattern,
    "dropout": dropout_weights,
    "sinusoids": sinusoids,
    "rotary-angles": rotary_angles,
    "alibi-penalty": alibi_penalty,
    "cache-growth": cache_growth,
    "compressed-cache": compressed_cache,
    "healing": healing,
    "heads": heads,
    "sparse-patterns": sparse_patterns,
    "linear-work": linear_work,
    "context-scaling": context_scaling,
    "infini-segments": infini_segments,
    "infini-recall": infini_recall,
    "long-perplexity": long_perplexity,
    "decoding-steps": decoding_steps,
}
"""The name of each figure, which is the name of its file, and the function that draws it."""


DIAGRAMS: dict[str, Callable[[], str]] = {
    "blocks": block_diagrams.svg,
    "transformer-block": block_diagrams.block_svg,
    "two-forms": block_diagrams.two_forms_svg,
    "compressed-blocks": block_diagrams.compressed_svg,
    "head-steps": head_steps,
}
"""The name of each block diagram, and the function that returns it as SVG text."""
READINGS = {
    "en": ("smollm2", "When Mary and John went to the store, John gave a drink to"),
    "zh": ("gemma3", "妈妈和爸爸去了商店，爸爸把一瓶水递给了"),
}
"""For each language, the model and the sentence of the first command in the README."""
READING_FILES = {"reading.svg": palette.LIGHT, "reading-dark.svg": palette.DARK}
"""The pictures of that sentence, which are drawn if the package with the model is installed."""


def reading_texts(lang: str) -> dict[str, str]:
    """Return the pictures of the first command: what the chosen head reads, light and dark."""
    name, text = READINGS[lang]
    if not is_installed(name):
        return {}
    run = replace(prepare_run(load(name), text, last=1), name=name)
    choice = name_mover(run, len(run.sequences["text"].ids) - 1)
    assert choice is not None, "the next word stands in the sentence"
    found = explain(run, layer=choice.layer, head=choice.head, key=choice.key).as_dict()
    return {file: block_diagrams.reading_svg(found, theme) for file, theme in READING_FILES.items()}


FIGURE_FILES = tuple(f"{name}.svg" for name in (*DIAGRAMS, *FIGURES))
"""The files that the command writes."""


def figure_texts() -> dict[str, str]:
    """Return every figure as SVG text, by the name of its file, in the current language.

    >>> sorted(FIGURES)[:3]
    ['alibi-penalty', 'cache-growth', 'causal-pattern']
    """
    diagrams = {f"{name}.svg": draw() for name, draw in DIAGRAMS.items()}
    return diagrams | {f"{name}.svg": charts.svg(make()) for name, make in FIGURES.items()}


USAGE = f"usage: python -m docs.figures FOLDER [--lang {'|'.join(LANGUAGES)}]; FOLDER must exist"


def _arguments(arguments: list[str]) -> tuple[Path | None, str]:
    """Return the folder, if there is exactly one, and the language."""
    rest, lang = list(arguments), language_of_locale()
    if "--lang" in rest[:-1]:
        place = rest.index("--lang")
        lang = rest[place + 1]
        del rest[place : place + 2]
    return Path(rest[0]) if len(rest) == 1 else None, lang


def main(arguments: list[str]) -> int:
    """Write all figures to a folder.

    Args:
        arguments: the folder, and `--lang` with a language; without it the locale decides.

    Returns:
        The exit code: 0, or 2 for wrong usage.
    """
    folder, lang = _arguments(arguments)
    if folder is None or not folder.is_dir() or lang not in LANGUAGES:
        print(USAGE, file=sys.stderr)
        return 2
    with use_language(lang):
        try:
            texts = figure_texts() | reading_texts(lang)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except (OSError, RegardError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        written = translate_count(len(texts), "figure")
        print(translate("{figures} in {folder}", figures=written, folder=folder))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
