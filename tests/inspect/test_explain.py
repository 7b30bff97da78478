"""Each number of an explanation is the model's: recomputed here in fp64 loops from weights and from the JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import explain
from regard.inspect.capture import capture
from regard.inspect.explain import check_length
from regard.inspect.reasons import why_masked
from regard.inspect.steps import Place, mixed, pool_largest, projected, scored, softmax
from regard.nn import Attention, Heads, RMSNorm, Separate
from regard.positions import Rotary
from regard.span import Span
from tests.inspect.stand_in import TEXT, model

DIGITS = 5e-9  # half a unit of the ninth digit, relative


def close(x: Any, ref: Any, plain: Any) -> bool:
    """The error rule: at most twice the error of plain fp32 math against fp64, plus two roundings."""
    x, ref, plain = (np.asarray(a, np.float64) for a in (x, ref, plain))
    shifted = (ref.astype(np.float32) + np.float32(0.3)) - np.float32(0.3)
    return np.abs(x - ref).max() <= 2 * np.abs(plain - ref).max() + 2 * np.abs(shifted - ref).max()


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
    """How far fp32 may take z from fp64, by standard analysis: D + 2 roundings in a score, 2 more in s - lse, T + 2 in the sum."""
    q, k, v = (
        np.array(x) for x in (found["q"][-1]["values"], found["k"][-1]["values"], found["v"])
    )
    unit, D, T = np.finfo(np.float32).eps / 2, found["sizes"]["D"], found["sizes"]["T"]
    score = (D + 2) * unit * found["scale"] * (np.abs(k) @ np.abs(q)).max() + 2 * unit * abs(
        found["lse"]
    )
    return (math.expm1(2 * score) + (T + 2) * unit) * (
        np.array(found["weights"])[:, None] * np.abs(v)
    ).sum(0)


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
    plain = W.astype(np.float32) @ joined.astype(np.float32)
    assert close(out, W @ joined, plain)
    alone = [W[:, n * E : (n + 1) * E] @ joined[n * E : (n + 1) * E] for n in range(4)]
    assert close(
        found["head_out"],
        alone[h],
        W[:, h * E : (h + 1) * E].astype(np.float32) @ z.astype(np.float32),
    )
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
    assert found["embedding"] == pytest.approx(
        m.decoder.embed.embedding.weight[found["ids"][i]].tolist(), rel=DIGITS
    )
    layer = m.decoder.layers[1]
    x = np.array(found["entering"])
    normed = (
        x / math.sqrt((x * x).mean() + 1e-6) * layer.around_attention.norm.weight.double().numpy()
    )
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
    interleaved = np.stack([a, b], -1).reshape(
        -1
    )  # negative control: the other layout is another vector
    assert not close(rotated["values"], interleaved, interleaved.astype(np.float32))


def test_the_whole_pattern_and_predictions_are_the_models() -> None:
    m = model()
    found = explain(m, TEXT, layer=2, head=1, query=4)
    T = found.sizes["T"]
    assert found.pattern.shape == (T, T)
    assert np.array_equal(found.visible, np.tri(T, dtype=bool))
    assert np.all(found.pattern[~found.visible] == 0)
    unit = np.finfo(np.float32).eps / 2
    largest = max(abs(s) for s in found.scores[1].values) + abs(found.lse)
    assert np.abs(found.pattern.sum(1) - 1).max() < (8 * largest + T) * unit, "roundings of s - lse"
    assert found.group == 0
    assert np.allclose(found.pattern[4], found.weights, atol=1e-6)
    assert found.pool == 1
    assert np.array_equal(found.patterns[1][found.visible], found.pattern[found.visible])
    assert np.isnan(found.patterns[:, ~found.visible]).all()
    logits = m.forward(m.encode(TEXT))[0, 4].double().softmax(-1)
    best = logits.topk(5)
    assert [i for _, i, _ in found.predictions] == best.indices.tolist()
    assert [p for *_, p in found.predictions] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [s for s, *_ in found.predictions] == m.tokenizer.pieces(best.indices.tolist())


def test_checks_are_small_and_the_largest_is_shown() -> None:
    found = explain(model(), TEXT, layer=-1, head=-1)
    assert found.layer == 2
    assert found.head == 3
    assert found.query == found.sizes["T"] - 1
    assert set(found.checks) == {
        "q", "k", "v", "angles", "scores", "weights", "row sum", "z", "out", "residual", "logits of the usual kernel",
    }  # fmt: skip
    assert found.check == max(found.checks.values()) < 1e-4
    assert found.checks["q"] == found.checks["k"] == found.checks["v"] == 0


def test_checks_fire_on_each_injected_fault() -> None:
    """Negative controls: what is recomputed from a model that changed since is told apart from what it computed."""
    m = model()
    at = Place(capture(m, m.encode(TEXT), 1), 2, 5)
    attention = at.attention
    sound = projected(at)[1] | scored(at)[1]
    attention.scale = 0.3
    wrong_scale = scored(at)[1]["scores"]
    attention.scale = None
    attention.project.q.linear.weight.mul_(1.01)
    wrong_q = projected(at)[1]["q"]
    attention.output.weight.mul_(1.01)
    wrong_out = mixed(at, scored(at)[0]["weights"])[1]["out"]
    assert max(sound.values()) < 1e-5
    assert min(wrong_scale, wrong_q, wrong_out) > 1e-4


def test_other_parts_of_attention_are_steps_of_the_chain() -> None:
    """QK-norm, softcap and a sink, in one layer: each shows, and the checks stay small."""
    m = model()
    old = m.decoder.layers[0].attention
    rotary = Rotary(8, layout="interleaved")
    project = Separate(
        Heads(32, 4, 8, RMSNorm(8), rotary), Heads(32, 2, 8, RMSNorm(8), rotary), Heads(32, 2, 8)
    )
    sink = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
    m.decoder.layers[0].attention = Attention(
        project,
        torch.nn.Linear(32, 32),
        mask=old.mask & masks.Window(4),
        softcap=2.0,
        scale=0.7,
        sink=sink,
    ).eval()
    found = explain(m, TEXT, layer=0, head=2)
    assert [s.name for s in found.q] == ["projected", "rmsnorm", "rotated"]
    assert [s.name for s in found.scores] == ["dot", "scaled", "capped", "masked"]
    assert found.check < 1e-4
    assert found.scale == 0.7
    assert found.sink == 2.0
    assert found.layout == "interleaved"
    capped = 2.0 * np.tanh(0.7 * found.scores[0].values / 2.0)
    seen = np.array([not reason for reason in found.masked])
    exps = np.exp(capped[seen])
    assert np.allclose(found.weights[seen], exps / (exps.sum() + math.exp(2.0)), atol=1e-12)
    assert sum(seen) == 4
    assert set(found.masked) == {"", "outside window(4)"}
    assert found.shares.sum() != pytest.approx(1, abs=1e-6), (
        "the bias of the output has a share too"
    )


def test_reasons_name_the_term_that_says_no() -> None:
    mask = masks.Causal() & (masks.Window(2) | masks.Sinks(1))
    positions, i = Span(0, 6), 4
    visible = mask.block(positions, positions)[0, 0, i].numpy()
    said = why_masked(mask, positions, i, visible)
    both = "outside sinks(1) and outside window(2)"
    assert said == ("", both, both, "", "", "future")
    assert why_masked(None, positions, 0, np.array([True, False] + [True] * 4))[1] == "the kernel"
    nothing = why_masked(masks.Window(2), positions, 5, np.array([False] * 4 + [True] * 2))
    assert nothing == ("outside window(2)",) * 4 + ("", "")


def test_a_row_that_sees_nothing_has_weights_of_zero() -> None:
    found = softmax(np.array([-np.inf, -np.inf]))
    assert found["weights"].tolist() == [0.0, 0.0]
    assert found["lse"] == -math.inf
    assert found["total"] == 0.0


def test_small_patterns_keep_the_largest_weight() -> None:
    pattern = np.where(np.tri(70, dtype=bool), 0.0, np.nan)[None]
    pattern[0, 69, 3] = 0.9
    n, small = pool_largest(pattern)
    assert n == 3
    assert small.shape == (1, 24, 24)
    assert small[0, 23, 1] == 0.9
    assert np.isnan(small[0, 0, 1])
    assert small[0, 0, 0] == 0.0


@pytest.mark.parametrize("text", ["x", "ab", "né 你好 🎉"])
def test_any_text_is_explained(text: str) -> None:
    found = explain(model(), text, head=1)
    assert found.check < 1e-4
    assert len(found.pieces) == found.sizes["T"]
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_text_longer_than_the_training_is_noted() -> None:
    found = explain(model(max_position_embeddings=4), TEXT)
    assert found.notes == (
        f"the text has {found.sizes['T']} tokens; the model was trained on at most 4",
    )
    assert explain(model(), TEXT).notes == ()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layer": 3}, "layer is 3; there are 3 layers: it must be 0 to 2, or -3 to -1 from the end"),
        ({"layer": -4}, "layer is -4; there are 3 layers: it must be 0 to 2, or -3 to -1 from the end"),
        ({"head": 4}, "head is 4; there are 4 heads: it must be 0 to 3, or -4 to -1 from the end"),
        ({"query": 2}, "query is 2; there are 2 tokens: it must be 0 to 1, or -2 to -1 from the end"),
        ({"query": "owl"}, "query is 'owl', which does not occur in the text; give a token index, or one of its words: xy"),
        ({"text": ""}, "the text '' has no tokens; give at least one character"),
        ({"text": "x" * 513}, "the text has 513 tokens; at most 512 are explained in one piece: shorten it"),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        explain(model(), **{"text": "xy", **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layer": "first"}, "layer is str; it must be an integer"),
        ({"head": True}, "head is bool; it must be an integer"),
        ({"query": 1.5}, "query is float; it must be the index of a token, or a word of the text"),
        ({"text": 7}, "text is int; it must be str"),
    ],
)
def test_wrong_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    # the annotations are checked as well under pytest: call what they guard
    call = getattr(explain, "__wrapped__", explain)
    with pytest.raises(ArgumentTypeError) as caught:
        call(model(), **{"text": "xy", **arguments})
    assert str(caught.value) == message


def test_a_layer_without_separate_projections_is_refused() -> None:
    m = model()
    m.decoder.layers[1] = torch.nn.Linear(2, 2)
    with pytest.raises(
        ArgumentError, match="layer 1 projects with Linear; explain shows layers with separate"
    ):
        explain(m, TEXT, layer=1)


def test_the_longest_text_passes() -> None:
    assert check_length(torch.zeros(1, 512, dtype=torch.long)).shape == (1, 512)
