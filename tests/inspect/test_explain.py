"""Each number of an explanation is the model's: recomputed here in fp64 loops from weights and from
the JSON.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import explain
from regard.inspect.explain.attention_row import finish_online, online_softmax, why_masked
from regard.inspect.explain.captured_run import SiteRecorder
from regard.inspect.explain.explanation_parts import pool_largest
from regard.inspect.model_run import prepare_run
from regard.nn import Attention, HeadProjection, RMSNorm, SeparateQKV
from regard.positions import Rotary
from regard.span import Span
from tests.inspect.small_model import TEXT, model

DIGITS = 5e-9  # half a unit of the ninth digit, relative


def close(x: Any, ref: Any, *plains: Any) -> bool:
    """The error rule: at most twice the error of plain fp32 math against fp64, in any of several
    orders, plus two roundings.
    """
    x, ref, *others = (np.asarray(a, np.float64) for a in (x, ref, *plains))
    shifted = (ref.astype(np.float32) + np.float32(0.3)) - np.float32(0.3)
    worst = max(np.abs(plain - ref).max() for plain in others)
    return np.abs(x - ref).max() <= 2 * worst + 2 * np.abs(shifted - ref).max()


def products(W: Any, y: Any) -> list[Any]:
    """W y in fp32, with three orders of its sums."""
    W, y = W.astype(np.float32), y.astype(np.float32)
    halves = W[:, ::2] @ y[::2] + W[:, 1::2] @ y[1::2]
    return [W @ y, W[:, ::-1] @ y[::-1], halves]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """An explanation as it travels: through JSON."""
    text = json.dumps(explain(model(), TEXT, layer=1, head=3, query="verdant").as_dict())
    return json.loads(text)


def test_scores_and_weights_follow_from_q_and_k(found: dict[str, Any]) -> None:
    q, k = np.array(found["q"][-1]["values"]), np.array(found["k"][-1]["values"])
    T, D, i = found["sizes"]["T"], found["sizes"]["D"], found["query"]
    dot = [sum(q[d] * k[j, d] for d in range(D)) for j in range(T)]
    rounding = 3 * DIGITS * np.abs(k) @ np.abs(q)  # of q, of k, and of the printed dot
    steps = {step["name"]: step["values"] for step in found["scores"]}
    assert list(steps) == ["dot", "scaled", "masked"]
    assert np.all(np.abs(np.array(steps["dot"]) - dot) <= rounding)
    assert found["scale"] == pytest.approx(1 / math.sqrt(D), rel=2 * DIGITS)
    scaled = [x / math.sqrt(D) for x in dot]
    assert np.all(np.abs(np.array(steps["scaled"]) - scaled) <= rounding + DIGITS * np.abs(scaled))
    assert [s is None for s in steps["masked"]] == [j > i for j in range(T)]
    assert found["masked"] == ["future" if j > i else "" for j in range(T)]
    exps = [math.exp(scaled[j]) if j <= i else 0.0 for j in range(T)]
    off = math.expm1(2 * rounding.max()) + 2 * DIGITS
    weights = [e / sum(exps) for e in exps]
    assert found["weights"] == pytest.approx(weights, rel=off)
    assert found["lse"] == pytest.approx(math.log(sum(exps)), rel=off)
    assert found["row_max"] == pytest.approx(max(scaled[: i + 1]), rel=off)
    assert found["total"] == pytest.approx(math.exp(found["lse"] - found["row_max"]), rel=off)
    assert sum(found["weights"]) == pytest.approx(1, rel=T * DIGITS)


def bound_of_z(found: dict[str, Any]) -> Any:
    """How far fp32 may take z from fp64, by standard analysis: D + 2 roundings in a score, 2 more
    in s - lse, T + 2 in the sum.
    """
    q, k = np.array(found["q"][-1]["values"]), np.array(found["k"][-1]["values"])
    unit, D, T = np.finfo(np.float32).eps / 2, found["sizes"]["D"], found["sizes"]["T"]
    largest = found["scale"] * (np.abs(k) @ np.abs(q)).max()
    score = (D + 2) * unit * largest + 2 * unit * abs(found["lse"])
    mixed = np.array(found["weights"]) @ np.abs(found["v"])
    return (math.expm1(2 * score) + (T + 2) * unit) * mixed


def test_a_wrong_scale_and_a_forgotten_mask_would_be_seen(found: dict[str, Any]) -> None:
    """Negative controls: the bound of the test above tells these from the truth."""
    scaled = np.array(next(s["values"] for s in found["scores"] if s["name"] == "scaled"))
    i = found["query"]
    q, k = np.array(found["q"][-1]["values"]), np.array(found["k"][-1]["values"])
    off = math.expm1(6 * DIGITS * (np.abs(k) @ np.abs(q)).max()) + 2 * DIGITS
    wrong = np.exp(scaled * 1.001)[: i + 1] / np.exp(scaled * 1.001)[: i + 1].sum()
    unmasked = np.exp(scaled) / np.exp(scaled).sum()
    for weights in (wrong, unmasked[: i + 1]):
        assert found["weights"][: i + 1] != pytest.approx(weights.tolist(), rel=off)


def test_values_heads_and_output_follow_from_the_json(found: dict[str, Any]) -> None:
    p, v = np.array(found["weights"]), np.array(found["v"])
    contributions = np.array(found["contributions"])
    assert np.all(np.abs(contributions - p[:, None] * v) <= 4 * DIGITS * np.abs(p[:, None] * v))
    z = contributions.sum(0)
    assert np.all(np.abs(np.array(found["z"]) - z) <= bound_of_z(found))
    assert np.all(bound_of_z(found) < 1e-4 * np.abs(v).max()), "a bound that says something"
    E, h = found["sizes"]["E"], found["head"]
    assert found["joined"][h * E : (h + 1) * E] == found["z"]
    W = model().decoder.layers[1].attention.output.weight.double().numpy()
    joined, out = np.array(found["joined"]), np.array(found["out"])
    assert close(out, W @ joined, *products(W, joined))
    alone = [W[:, n * E : (n + 1) * E] @ joined[n * E : (n + 1) * E] for n in range(4)]
    assert close(found["head_out"], alone[h], *products(W[:, h * E : (h + 1) * E], z))
    assert found["shares"] == pytest.approx([a @ out / (out @ out) for a in alone], abs=1e-6)
    assert sum(found["shares"]) == pytest.approx(1, abs=1e-6)
    residual = np.array(found["entering"]) + out
    assert close(found["residual"], residual, residual.astype(np.float32))


def turn(a: Any, b: Any, angle: Any) -> Any:
    """The pairs (a, b), turned, in halves."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def test_the_query_follows_from_the_weights(found: dict[str, Any]) -> None:
    """Embedding, norm, projection and rotation, from the definitions."""
    m, i, h, D = model(), found["query"], found["head"], found["sizes"]["D"]
    embedding = m.decoder.embed.embedding.weight[found["ids"][i]].tolist()
    assert found["embedding"] == pytest.approx(embedding, rel=DIGITS)
    layer = m.decoder.layers[1]
    x, weight = np.array(found["entering"]), layer.attention_residual.norm.weight
    normed = x / math.sqrt((x * x).mean() + 1e-6) * weight.double().numpy()
    assert close(found["normed"], normed, normed.astype(np.float32))
    W = layer.attention.project.q.linear.weight.double().numpy()[h * D : (h + 1) * D]
    q = W @ np.array(found["normed"])
    plain = W.astype(np.float32) @ np.array(found["normed"], np.float32)
    projected, rotated = found["q"]
    assert (projected["name"], rotated["name"]) == ("projected", "rotated")
    assert close(projected["values"], q, plain)
    a, b = np.array(projected["values"][: D // 2]), np.array(projected["values"][D // 2 :])
    angle = np.array([found["positions"][i] * 10000.0 ** (-2 * n / D) for n in range(D // 2)])
    assert found["layout"] == "half"
    assert found["angles"][i] == pytest.approx(angle.tolist(), rel=2 * DIGITS)
    turned = turn(a, b, angle)
    plain = turn(*(x.astype(np.float32) for x in (a, b, angle)))
    assert close(rotated["values"], turned, plain)
    # negative control: the other layout is another vector
    interleaved = np.stack([a, b], -1).reshape(-1)
    assert not close(rotated["values"], interleaved, interleaved.astype(np.float32))


def test_the_whole_pattern_and_predictions_are_the_models() -> None:
    m = model()
    found = explain(m, TEXT, layer=2, head=1, query=4)
    T = found.sizes["T"]
    assert found.pattern.shape == (T, T)
    visible = np.tri(T, dtype=bool)
    assert np.array_equal(~np.isnan(found.pattern), visible)
    unit = np.finfo(np.float32).eps / 2
    largest = max(abs(s) for s in found.scores[1].values) + abs(found.lse)
    roundings = (8 * largest + T) * unit  # of s - lse
    assert np.abs(np.nansum(found.pattern, 1) - 1).max() < roundings
    assert (found.group, found.pool) == (0, 1)
    assert np.allclose(found.pattern[4, :5], found.weights[:5], atol=1e-6)
    assert np.array_equal(found.patterns[1], found.pattern, equal_nan=True)
    assert np.isnan(found.patterns[:, ~visible]).all()
    logits = m.forward(m.encode(TEXT))[0, 4].double().softmax(-1)
    best = logits.topk(5)
    assert [i for _, i, _ in found.predictions] == best.indices.tolist()
    assert [p for *_, p in found.predictions] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [s for s, *_ in found.predictions] == m.tokenizer.pieces(best.indices.tolist())


def test_checks_are_small_and_the_largest_is_shown() -> None:
    found = explain(model(), TEXT, layer=-1, head=-1)
    assert (found.layer, found.head, found.query) == (2, 3, found.sizes["T"] - 1)
    kernel = {"weights against", "row sum", "lse", "output"}
    rest = {"q", "k", "v", "angles", "online softmax", "out", "residual", "the network without"}
    assert {re.split(" an| of|(?<=against) ", x)[0] for x in found.checks} == kernel | rest
    assert found.check == max(found.checks.values()) < 1e-4
    assert found.checks["q"] == found.checks["k"] == found.checks["v"] == 0
    assert found.checks["the network without an observer"] == 0


KERNEL, BOTH = {"lse", "weights", "row sum"}, {"lse", "weights", "row sum", "output"}
LIES: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], set[str]]] = {
    "lse in log2": (lambda call, x: (call, x._replace(lse=x.lse / math.log(2))), KERNEL),
    "lse + ln 2": (lambda call, x: (call, x._replace(lse=x.lse + math.log(2))), KERNEL),
    "lse 0": (lambda call, x: (call, x._replace(lse=0 * x.lse)), KERNEL),
    "output of another scale": (lambda call, x: (call, x._replace(out=1.01 * x.out)), {"output"}),
    "mask": (lambda call, x: (replace(call, mask=masks.Causal() & masks.Window(2)), x), BOTH),
    "scale": (lambda call, x: (replace(call, scale=0.9 * call.scale), x), BOTH),
    "keys of another time": (lambda call, x: (replace(call, k=1.01 * call.k), x), {"k", "lse"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_checks_fire_on_each_injected_fault(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a kernel that says another thing than it did is told apart, and by which
    number.
    """
    change, wrong = LIES[lie]
    honest = SiteRecorder.on_attention_call
    monkeypatch.setattr(
        SiteRecorder,
        "on_attention_call",
        lambda self, call, result, name: honest(self, *change(call, result), name),
    )
    off = explain(model(), TEXT, layer=1, head=2, query=5).checks
    told = {re.split(" of| against", name)[0] for name, x in off.items() if x > 1e-3}
    assert wrong <= told
    assert not {"q", "v", "out", "residual"} & told


def test_a_projection_that_is_not_the_models_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for q, k, v and the output projection: the weights change behind the run's
    back.
    """
    # the package has a function of this name
    explained = sys.modules["regard.inspect.explain.explain"]
    honest = explained.capture_site

    def then_changed(read: Any, site: Any) -> Any:
        found = honest(read, site)
        for tap in "qkv":
            getattr(site.attention.project, tap).linear.weight.mul_(1.01)
        site.attention.output.weight.mul_(1.01)
        return found

    monkeypatch.setattr(explained, "capture_site", then_changed)
    found = explain(model(), TEXT, layer=1, head=2, query=5)
    assert min(found.checks[name] for name in ("q", "k", "v", "out")) > 1e-4
    assert found.checks["output of the kernel"] < 1e-5


def test_other_parts_of_attention_are_steps_of_the_chain() -> None:
    """QK-norm, softcap and a sink, in one layer: each shows, and the checks stay small."""
    m = model()
    old = m.decoder.layers[0].attention
    rotary = Rotary(8, layout="interleaved")
    q, k = (HeadProjection(32, heads, 8, RMSNorm(8), rotary) for heads in (4, 2))
    project = SeparateQKV(q, k, HeadProjection(32, 2, 8))
    sink = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
    options = {"mask": old.mask & masks.Window(4), "softcap": 2.0, "scale": 0.7, "sink": sink}
    m.decoder.layers[0].attention = Attention(project, torch.nn.Linear(32, 32), **options).eval()
    found = explain(m, TEXT, layer=0, head=2)
    assert [s.name for s in found.q] == ["projected", "rmsnorm", "rotated"]
    assert [s.name for s in found.scores] == ["dot", "scaled", "capped", "masked"]
    assert found.check < 1e-4
    assert (found.scale, found.sink, found.layout) == (0.7, 2.0, "interleaved")
    capped = 2.0 * np.tanh(0.7 * found.scores[0].values / 2.0)
    seen = np.array([not reason for reason in found.masked])
    exps = np.exp(capped[seen])
    assert np.allclose(found.weights[seen], exps / (exps.sum() + math.exp(2.0)), atol=1e-12)
    assert sum(seen) == 4
    assert set(found.masked) == {"", "outside window 4"}
    assert abs(found.shares.sum() - 1) > 1e-6, "the bias of the output has a share too"


def test_reasons_name_the_term_that_says_no() -> None:
    mask = masks.Causal() & (masks.Window(2) | masks.Sinks(1))
    positions, i = Span(0, 6), 4
    visible = mask.block(positions, positions)[0, 0, i].numpy()
    said = why_masked(mask, positions, i, visible)
    both = "after the first 1 and outside window 2"
    assert said == ("", both, both, "", "", "future")
    assert why_masked(None, positions, 0, np.array([True, False] + [True] * 4))[1] == "the kernel"
    nothing = why_masked(masks.Window(2), positions, 5, np.array([False] * 4 + [True] * 2))
    assert nothing == ("outside window 2",) * 4 + ("", "")
    padded, none = torch.tensor([[-1, 0, 1]]), np.array([False] * 3)
    for rule in (None, masks.Full(), ~masks.Causal()):
        assert why_masked(rule, padded, 0, none) == ("padding",) * 3
    assert why_masked(masks.Full(), padded, 1, ~none)[1:] == ("", "")


def test_small_patterns_keep_the_largest_weight() -> None:
    pattern = np.where(np.tri(70, dtype=bool), 0.0, np.nan)[None]
    pattern[0, 69, 3] = 0.9
    small = pool_largest(pattern, 3)
    assert small.shape == (1, 24, 24)
    assert (small[0, 23, 1], small[0, 0, 0]) == (0.9, 0.0)
    assert np.isnan(small[0, 0, 1])
    assert pool_largest(pattern[:, :, :5], 3).shape == (1, 24, 2)


@pytest.mark.parametrize("text", ["x", "ab", "né 你好 🎉"])
def test_any_text_is_explained(text: str) -> None:
    found = explain(model(), text, head=1)
    assert found.check < 1e-4
    assert len(found.pieces) == found.sizes["T"]
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_text_longer_than_the_training_is_noted() -> None:
    found = explain(model(max_position_embeddings=4), TEXT)
    assert "the model was trained on at most 4" in found.notes[0]
    assert explain(model(), TEXT).notes == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": 3}, ArgumentError, "there are 3 layers: it must be 0 to 2, or -3 to -1"),
        ({"layer": -4}, ArgumentError, "layer is -4; there are 3 layers"),
        ({"head": 4}, ArgumentError, "head is 4; there are 4 heads: it must be 0 to 3"),
        ({"query": 2}, ArgumentError, "query is 2; there are 2 tokens: it must be 0 to 1"),
        ({"query": "owl"}, ArgumentError, "query is 'owl', which does not occur .*words: xy"),
        ({"text": ""}, ArgumentError, "the text '' has no tokens"),
        ({"key": 2}, ArgumentError, "key is 2; there are 2 tokens"),
        ({"key": "owl"}, ArgumentError, "key is 'owl', which does not occur .*words: xy"),
        ({"place": "layers.9"}, ArgumentError, "'layers.9'.*names are layers.0, layers.1"),
        ({"call": 1}, ArgumentError, "call is 1; there is 1 call: it must be 0 to 0"),
        (
            {"call": "window"},
            ArgumentError,
            "call is 'window'; the calls for this query are call 0",
        ),
        ({"target": "z"}, ArgumentError, "a Model takes no target; leave it out"),
        ({"layer": "first"}, ArgumentTypeError, "layer is str; it must be an integer"),
        ({"head": True}, ArgumentTypeError, "head is bool; it must be an integer"),
        ({"query": 1.5}, ArgumentTypeError, "query is float; .*a token, or a word of the text"),
        ({"text": 7}, ArgumentTypeError, "text is int; it must be str"),
    ],
)
def test_what_does_not_exist_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    # the annotations are checked as well under pytest: call what they guard
    call = getattr(explain, "__wrapped__", explain)
    with pytest.raises(error, match=message):
        call(model(), **{"text": "xy", **arguments})


def test_a_block_without_attention_is_no_layer() -> None:
    m = model()
    m.decoder.layers[1] = torch.nn.Linear(2, 2)
    assert [site.place for site in prepare_run(m, TEXT).sites] == ["layers.0", "layers.2"]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (~masks.Window(2), "inside window 2"),
        (masks.Padding.right([4]), "padding"),
        (masks.Dense(torch.eye(6, dtype=torch.bool)), "not allowed by the given matrix"),
    ],
)
def test_every_mask_has_its_words(mask: masks.Mask, words: str) -> None:
    positions = Span(0, 6)
    visible = mask.block(positions, positions)[0, 0, 4].numpy()
    said = why_masked(mask, positions, 4, visible)
    assert set(said) - {""} == {words}
    assert [not why for why in said] == visible.tolist()


def test_an_empty_slot_is_padding_whatever_the_mask_says() -> None:
    keys = torch.tensor([[-1, 0, 1, 2]])
    visible = masks.Causal().block(Span(1, 1), keys)[0, 0, 0].numpy()
    said = why_masked(masks.Causal(), Span(1, 1), 0, visible, k_positions=keys)
    assert said == ("padding", "", "", "future")


@pytest.mark.parametrize(
    ("size", "sink", "scale"),
    [(1, None, 1.0), (3, 2.5, 300.0), (8, 5000.0, 1.0), (64, 2.5, 1.0), (8, None, 300.0),
     (1, 5000.0, 300.0)],
)  # fmt: skip
def test_block_by_block_is_the_same_softmax(size: int, sink: float | None, scale: float) -> None:
    """Any block size, blocks that see nothing, and scores that would overflow alone."""
    rng = np.random.default_rng(size)
    s, v = scale * rng.standard_normal(20), rng.standard_normal((20, 3))
    s[:5] = s[11] = -np.inf
    v[2] = np.nan  # behind the mask
    seen = np.where(np.isneginf(s)[:, None], 0.0, v)
    blocks = online_softmax(s, seen, size)
    assert [(block.start, block.stop) for block in blocks][-1][1] == 20
    lse, z = finish_online(blocks, sink)
    top = max(s)
    assert lse == pytest.approx(top + math.log(sum(math.exp(x - top) for x in s)), rel=1e-12)
    every = [*s] if sink is None else [*s, sink]
    e = [math.exp(x - max(every)) for x in every]
    assert z == pytest.approx((np.array(e[:20]) / sum(e)) @ seen, rel=1e-9, abs=1e-12)
    lse, z = finish_online(online_softmax(np.full(4, -np.inf), np.ones((4, 2)), size), sink)
    assert (lse, z.tolist()) == (-math.inf, [0.0, 0.0])


def test_the_same_row_elsewhere_is_what_the_definitions_say() -> None:
    """Each other mechanism by a loop over the keys, from q, k and v of the explanation."""
    f = explain(model(), TEXT, layer=1, head=1, query=6, key=2)
    q, k, i = f.q[-1].values, f.k[-1].values, f.query
    s = [float(q @ k[j]) for j in range(i + 1)]
    D, wide = len(q), 3  # half of the 7 keys
    slope = 2.0 ** (-8 * 2 / 4)

    def weights(scores: list[float]) -> list[float]:
        top = max(scores)
        e = [math.exp(x - top) for x in scores]
        return [x / sum(e) for x in e]

    scaled = [x / math.sqrt(D) for x in s]
    best = sorted(range(i + 1), key=lambda j: -scaled[j])[:4]
    phi = [[x + 1 if x > 0 else math.exp(x) for x in row] for row in (q, *k)]
    linear = [sum(a * b for a, b in zip(phi[0], phi[1 + j], strict=True)) for j in range(i + 1)]
    expected = {
        f"window {wide}": weights([x if i - j < wide else -math.inf for j, x in enumerate(scaled)]),
        "top 4": weights([x if j in best else -math.inf for j, x in enumerate(scaled)]),
        "ALiBi": weights([x - slope * (i - j) for j, x in enumerate(scaled)]),
        "softcap 5": weights([5 * math.tanh(x / 5) for x in scaled]),
        "temperature 2": weights([x / 2 for x in scaled]),
        "no scaling": weights(s),
        "linear": [x / sum(linear) for x in linear],
    }
    assert {other.name for other in f.counterfactuals} == set(expected)
    for other in f.counterfactuals:
        p = expected[other.name]
        assert other.weights[: i + 1] == pytest.approx(p, rel=1e-9, abs=1e-15), other.name
        assert other.weight == pytest.approx(p[2])
        assert other.top_weight == pytest.approx(max(p))
        entropy = -sum(x * math.log(x) for x in p if x)
        assert other.effective_keys == pytest.approx(math.exp(entropy))
        apart = sum(abs(a - b) for a, b in zip(p, f.weights, strict=False)) / 2
        assert other.total_variation == pytest.approx(apart)
        moved = sum(x * f.v[j] for j, x in enumerate(p)) - f.mixed
        change = np.linalg.norm(moved) / np.linalg.norm(f.mixed)
        assert other.relative_change == pytest.approx(change)


def test_the_cost_is_that_of_the_formulas() -> None:
    f = explain(model(), TEXT, layer=1, head=1, query=5)
    cost, T = f.cost, f.sizes["T"]
    assert cost is not None
    assert cost.flops == 6 * (2 * 8 + 2 * 8)
    assert cost.bytes == 4 * (1 + 6) * (8 + 8)
    kept, one = {each.name: each.bytes for each in cost.caches}, 4 * T * 16
    expected = {"MHA": 4 * one, "GQA, G = 2": 2 * one, "MQA": one, "MLA": 4 * T * (4 * 8 + 4)}
    assert kept == expected | {"window 4": 4 * 4 * 2 * 16, "this layer": 2 * one}
    assert [each.is_this_layer for each in cost.caches] == [False] * 5 + [True]
    cache = model().decoder.layers[1].new_cache()
    x = torch.zeros(1, T, 32)
    model().decoder.layers[1](x, cache=cache)
    assert cache.bytes == kept["this layer"]
