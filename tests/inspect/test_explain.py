"""Each number of an explanation is the model's: recomputed here in fp64 loops from weights and from
the JSON.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import explain
from regard.inspect.explain.attention_row import finish_online, online_softmax, softmax, why_masked
from regard.inspect.explain.captured_run import SiteRecorder
from regard.inspect.explain.explanation_parts import pool_largest
from regard.inspect.explain.prepared_run import prepare_run
from regard.nn import Attention, HeadProjection, RMSNorm, SeparateQKV
from regard.positions import Rotary
from regard.span import Span
from tests.inspect.small_model import TEXT, model

DIGITS = 5e-9  # half a unit of the ninth digit, relative


def close(x: Any, ref: Any, plain: Any) -> bool:
    """The error rule: at most twice the error of plain fp32 math against fp64, plus two
    roundings.
    """
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
    """How far fp32 may take z from fp64, by standard analysis: D + 2 roundings in a score, 2 more
    in s - lse, T + 2 in the sum.
    """
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
        x / math.sqrt((x * x).mean() + 1e-6) * layer.attention_residual.norm.weight.double().numpy()
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
    visible = np.tri(T, dtype=bool)
    assert np.array_equal(~np.isnan(found.pattern), visible)
    unit = np.finfo(np.float32).eps / 2
    largest = max(abs(s) for s in found.scores[1].values) + abs(found.lse)
    assert np.abs(np.nansum(found.pattern, 1) - 1).max() < (8 * largest + T) * unit, (
        "roundings of s - lse"
    )
    assert found.group == 0
    assert np.allclose(found.pattern[4, :5], found.weights[:5], atol=1e-6)
    assert found.pool == 1
    assert np.array_equal(found.patterns[1], found.pattern, equal_nan=True)
    assert np.isnan(found.patterns[:, ~visible]).all()
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
        "q",
        "k",
        "v",
        "angles",
        "weights against exp(s - lse) of the kernel",
        "row sum of exp(s - lse) of the kernel against 1",
        "lse of the kernel",
        "output of the kernel",
        "online softmax",
        "out",
        "residual",
        "the network without an observer",
    }
    assert found.check == max(found.checks.values()) < 1e-4
    assert found.checks["q"] == found.checks["k"] == found.checks["v"] == 0
    assert found.checks["the network without an observer"] == 0


LIES: dict[str, tuple[Any, set[str]]] = {
    "lse in log2": (
        lambda call, result: (call, result._replace(lse=result.lse / math.log(2))),
        {"lse", "weights", "row sum"},
    ),
    "lse + ln 2": (
        lambda call, result: (call, result._replace(lse=result.lse + math.log(2))),
        {"lse", "weights", "row sum"},
    ),
    "lse 0": (
        lambda call, result: (call, result._replace(lse=0 * result.lse)),
        {"lse", "weights", "row sum"},
    ),
    "output of another scale": (
        lambda call, result: (call, result._replace(out=1.01 * result.out)),
        {"output"},
    ),
    "a mask that the kernel did not use": (
        lambda call, result: (replace(call, mask=masks.Causal() & masks.Window(2)), result),
        {"lse", "weights", "row sum", "output"},
    ),
    "a scale that the kernel did not use": (
        lambda call, result: (replace(call, scale=0.9 * call.scale), result),
        {"lse", "weights", "row sum", "output"},
    ),
    "keys of another time": (
        lambda call, result: (replace(call, k=1.01 * call.k), result),
        {"k", "lse"},
    ),
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
    found = explain(model(), TEXT, layer=1, head=2, query=5)
    told = {
        name.split(" of")[0].split(" against")[0]
        for name, off in found.checks.items()
        if off > 1e-3
    }
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
        for heads in (site.attention.project.q, site.attention.project.k, site.attention.project.v):
            heads.linear.weight.mul_(1.01)
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
    project = SeparateQKV(
        HeadProjection(32, 4, 8, RMSNorm(8), rotary),
        HeadProjection(32, 2, 8, RMSNorm(8), rotary),
        HeadProjection(32, 2, 8),
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
    assert set(found.masked) == {"", "outside window 4"}
    assert found.shares.sum() != pytest.approx(1, abs=1e-6), (
        "the bias of the output has a share too"
    )


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


def test_a_row_that_sees_nothing_has_weights_of_zero() -> None:
    found = softmax(np.array([-np.inf, -np.inf]))
    assert found.weights.tolist() == [0.0, 0.0]
    assert found.lse == -math.inf
    assert found.total == 0.0


def test_small_patterns_keep_the_largest_weight() -> None:
    pattern = np.where(np.tri(70, dtype=bool), 0.0, np.nan)[None]
    pattern[0, 69, 3] = 0.9
    small = pool_largest(pattern, 3)
    assert small.shape == (1, 24, 24)
    assert small[0, 23, 1] == 0.9
    assert np.isnan(small[0, 0, 1])
    assert small[0, 0, 0] == 0.0
    assert pool_largest(pattern[:, :, :5], 3).shape == (1, 24, 2)


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
        (
            {"layer": 3},
            "layer is 3; there are 3 layers: it must be 0 to 2, or -3 to -1 from the end",
        ),
        (
            {"layer": -4},
            "layer is -4; there are 3 layers: it must be 0 to 2, or -3 to -1 from the end",
        ),
        ({"head": 4}, "head is 4; there are 4 heads: it must be 0 to 3, or -4 to -1 from the end"),
        (
            {"query": 2},
            "query is 2; there are 2 tokens: it must be 0 to 1, or -2 to -1 from the end",
        ),
        (
            {"query": "owl"},
            (
                "query is 'owl', which does not occur in the text; give a token index, or one of "
                "its words: xy"
            ),
        ),
        ({"text": ""}, "the text '' has no tokens; give at least one character"),
        ({"key": 2}, "key is 2; there are 2 tokens: it must be 0 to 1, or -2 to -1 from the end"),
        (
            {"key": "owl"},
            (
                "key is 'owl', which does not occur in the text; give a token index, or one of its "
                "words: xy"
            ),
        ),
        (
            {"place": "layers.9"},
            (
                "place is 'layers.9', which is not the name of an attention; the names are "
                "layers.0, layers.1, layers.2"
            ),
        ),
        ({"call": 1}, "call is 1; there is 1 call: it must be 0 to 0, or -1 to -1 from the end"),
        ({"call": "window"}, "call is 'window'; the calls for this query are call 0"),
        ({"target": "z"}, "target is given, but a Model takes no target; leave it out"),
    ],
)
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


def test_a_block_without_attention_is_no_layer() -> None:
    m = model()
    m.decoder.layers[1] = torch.nn.Linear(2, 2)
    assert [site.place for site in prepare_run(m, TEXT).sites] == ["layers.0", "layers.2"]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.Window(2, ahead=1), {"outside window 2, 1 ahead"}),
        (masks.Chunk(3), {"other chunk of 3"}),
        (masks.Dilated(2, 2), {"outside the steps of dilated(2, 2)"}),
        (~masks.Window(2), {"inside window 2"}),
        (~masks.Sinks(3), {"inside sinks(3)"}),
        (masks.Document.from_lengths([3, 3]), {"other document"}),
        (masks.Padding.right([4]), {"padding"}),
        (masks.Global((1,)), {"not global"}),
        (masks.Dense(torch.eye(6, dtype=torch.bool)), {"not allowed by the given matrix"}),
        (masks.Strided(2), {f"outside {masks.Strided(2)}"}),
    ],
)
def test_every_mask_has_its_words(mask: masks.Mask, words: set[str]) -> None:
    positions = Span(0, 6)
    visible = mask.block(positions, positions)[0, 0, 4].numpy()
    said = why_masked(mask, positions, 4, visible)
    assert set(said) - {""} == words
    assert [not why for why in said] == visible.tolist()


def test_an_empty_slot_is_padding_whatever_the_mask_says() -> None:
    keys = torch.tensor([[-1, 0, 1, 2]])
    visible = masks.Causal().block(Span(1, 1), keys)[0, 0, 0].numpy()
    said = why_masked(masks.Causal(), Span(1, 1), 0, visible, k_positions=keys)
    assert said == ("padding", "", "", "future")


@pytest.mark.parametrize("sink", [None, 2.5, 5000.0])
@pytest.mark.parametrize("size", [1, 3, 8, 64])
@pytest.mark.parametrize("scale", [1.0, 300.0])
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
    top = max(x for x in s if x > -np.inf)
    total = sum(math.exp(x - top) for x in s if x > -np.inf)
    assert lse == pytest.approx(top + math.log(total), rel=1e-12)
    largest = top if sink is None else max(top, sink)
    below = sum(
        math.exp(x - largest) for x in [*s, *([] if sink is None else [sink])] if x > -np.inf
    )
    expected = sum(math.exp(s[j] - largest) / below * v[j] for j in range(20) if s[j] > -np.inf)
    assert z == pytest.approx(expected, rel=1e-9, abs=1e-12)
    nothing = online_softmax(np.full(4, -np.inf), np.ones((4, 2)), size)
    assert finish_online(nothing, sink)[0] == -math.inf
    assert finish_online(nothing, sink)[1].tolist() == [0.0, 0.0]


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
        assert other.effective_keys == pytest.approx(
            math.exp(-sum(x * math.log(x) for x in p if x))
        )
        assert other.total_variation == pytest.approx(
            sum(abs(a - b) for a, b in zip(p, f.weights, strict=False)) / 2
        )
        z = sum(x * f.v[j] for j, x in enumerate(p))
        assert other.relative_change == pytest.approx(
            np.linalg.norm(z - f.mixed) / np.linalg.norm(f.mixed)
        )


def test_the_cost_is_that_of_the_formulas() -> None:
    f = explain(model(), TEXT, layer=1, head=1, query=5)
    cost, T = f.cost, f.sizes["T"]
    assert cost is not None
    assert cost.flops == 6 * (2 * 8 + 2 * 8)
    assert cost.bytes == 4 * (1 + 6) * (8 + 8)
    kept = {each.name: each.bytes for each in cost.caches}
    assert kept == {
        "MHA": 4 * T * 4 * 16,
        "GQA, G = 2": 4 * T * 2 * 16,
        "MQA": 4 * T * 16,
        "MLA": 4 * T * (4 * 8 + 4),
        "window 4": 4 * 4 * 2 * 16,
        "this layer": 4 * T * 2 * 16,
    }
    assert [each.is_this_layer for each in cost.caches] == [False] * 5 + [True]
    cache = model().decoder.layers[1].new_cache()
    x = torch.zeros(1, T, 32)
    model().decoder.layers[1](x, cache=cache)
    assert cache.bytes == kept["this layer"]
