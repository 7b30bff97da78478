"""Every mechanism of the catalogue is explained; what is shown follows from q, k and v by loops
from the definitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import regard
from regard.errors import ArgumentError
from regard.inspect import Explanation, explain
from regard.inspect.explain.captured_run import capture_site
from regard.inspect.explain.random_model import random_model
from regard.nn.explainable import effective_row, explainable
from regard.nn.variants import VARIANTS
from regard.view import explanation_text

TEXT = "a fluffy blue creature roamed the verdant forest and slept"
LINEAR = {name for name, entry in VARIANTS.items() if entry.family == "linear"}
NO_ROW = [name for name, x in VARIANTS.items() if explainable(x.example()).explain_refusal]
"""Mechanisms without a row of weights for each head."""
ROUNDING = 2e-5
"""Of sums of some 30 products of fp32 numbers of size 1 to 10: 30 x 10 x 2^-24 is 1.8e-5."""


def found(name: str, **where: Any) -> Explanation:
    return explain(random_model(name, TEXT), **where)


SCORED = [name for name, x in VARIANTS.items() if getattr(x.example(), "score", None) is not None]
"""Mechanisms with a score rule."""

SOFTMAX_OF_A_RULE = {"scalable_softmax", "top_k", "cope"}
"""Those whose weights are a softmax of the scores that their rule gives."""


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", SCORED)
def test_a_score_rule_is_explained_step_by_step(name: str) -> None:
    """The rule's steps and weights are those of the recorded run, and give the output of the
    mechanism; the row without the rule is another one.
    """
    f = found(name, head=1, query=9)
    assert f.check < ROUNDING, f.checks
    assert "weights of the recorded run" in f.checks
    assert f.kind == ("softmax" if name in SOFTMAX_OF_A_RULE else "linear")
    module, x = parts(name)
    rules = [one for one in module.score.steps() if one.stages[0] in ("scores", "selection")]
    assert [step.name for step in f.scores][2 : 2 + len(rules)] == [one.kind for one in rules]
    named = {step.name: step.values for step in f.scores}
    weights = regard.attention_weights(
        *(torch.from_numpy(x[part])[None] for part in "qk"),
        mask=module.mask,
        score=module._score(),
        scale=module.project.shape.D**-0.5,
    )[0, 1, 9]
    assert_near(f, weights.detach().numpy())
    seen = np.arange(len(f.weights)) <= 9
    without = np.exp(named["scaled"] - named["scaled"][seen].max()) * seen
    if name != "talking_heads" or not _is_identity(module):
        assert np.abs(f.weights - without / without.sum()).max() > 1e-3, "negative control"
    assert f.counterfactuals == ()
    assert ("a_ij" in printed(f)) == (f.kind == "linear")


def printed(f: Explanation) -> str:
    """The page of an explanation, which travels as JSON and has 80 columns."""
    out = StringIO()
    data = json.loads(json.dumps(f.as_dict(), allow_nan=False))
    explanation_text.show(data, Console(file=out, width=80, color_system=None))
    assert max(map(cell_len, out.getvalue().splitlines())) <= 80
    return out.getvalue()


def _is_identity(module: Any) -> bool:
    return all(torch.equal(x, torch.eye(len(x))) for x in module.score_tensors)


@pytest.mark.parametrize("name", NO_ROW)
def test_a_mechanism_without_a_row_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"which has no .*; .*, or explain a layer of"):
        found(name)


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in {*SCORED, *NO_ROW}])
def test_every_mechanism_is_explained(name: str) -> None:
    """Its row, mixed over its values, is what the mechanism gave; it travels as JSON; its page has
    80 columns.
    """
    f = found(name)
    assert f.check < ROUNDING, {k: v for k, v in f.checks.items() if v > 1e-6}
    other = "additive" if name == "bahdanau" else "softmax"
    assert f.kind == ("linear" if name in LINEAR else other)
    seen = [j for j, why in enumerate(f.masked) if not why]
    z = [sum(f.weights[j] * f.v[j, e] for j in seen) for e in range(f.v.shape[1])]
    assert np.abs(f.mixed - z).max() < 1e-12 * (1 + np.abs(f.v).max()) * len(seen)
    if f.kind == "softmax":
        assert f.weights.sum() + _sink(f) == pytest.approx(1, abs=1e-12)
        end = f.online[-1]
        mixed = end.running_output / (end.running_sum + _sink_term(f))
        assert mixed == pytest.approx(f.mixed, abs=1e-10)
        others = {other.name for other in f.counterfactuals}
        assert others >= {"ALiBi", "no scaling", "linear", "top 4"}
    if f.kind != "linear":
        assert f.products.sum() == pytest.approx(f.scores[0].values[f.key], abs=1e-9)
    text = printed(f)
    assert ("a_ij" in text) == (f.kind == "linear")
    assert ("in the denominator only" in text) == (name == "learned_sink")
    assert "from seed 0: the computation is exact" in " ".join(text.split())


SHORTEST = ("nsa", "retention", "streaming", "infini", "mla", "moba", "longformer")


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("text", ["x", "ab"])
@pytest.mark.parametrize("name", [*SHORTEST, "cross_attention"])
def test_the_shortest_texts_are_explained(name: str, text: str) -> None:
    f = explain(random_model(name, text))
    assert f.check < ROUNDING
    printed(f)


def _sink(f: Explanation) -> float:
    return 0.0 if f.sink is None else math.exp(f.sink - np.logaddexp(f.lse, f.sink))


def _sink_term(f: Explanation) -> float:
    return 0.0 if f.sink is None else math.exp(f.sink - f.online[-1].running_max)


def parts(name: str, layer: int = 0) -> tuple[Any, dict[str, Any]]:
    """The module of a layer, and its taps in fp64."""
    read = random_model(name, TEXT)
    site = read.site(layer)
    kept = capture_site(read, site)
    return site.attention, {k: x.double().numpy() for k, x in (kept.taps | kept.hidden).items()}


def assert_near(f: Explanation, row: Any) -> None:
    """The effective row equals an oracle's, relative to its largest weight."""
    row = np.asarray(row)
    assert np.abs(f.weights - row).max() < ROUNDING * max(np.abs(row).max(), 1)
    assert np.abs(row).max() > 0


@pytest.mark.parametrize("head", [0, 3])
def test_retention_leaves_a_power_of_its_decay(head: int) -> None:
    """a_ij = gamma^(i-j) q_i . k_j / sqrt(D), gamma = 1 - 2^(-5-h)."""
    _, x = parts("retention")
    f = found("retention", head=head, query=20)
    q, k, D = x["q"][head, 20], x["k"][head], x["q"].shape[2]
    dots = [float(q @ k[j]) / math.sqrt(D) if j <= 20 else 0.0 for j in range(len(k))]
    assert_near(f, [(1 - 2 ** (-5 - head)) ** (20 - j) * dots[j] for j in range(len(k))])
    named = {step.name: step.values for step in f.scores}
    assert named["scaled"][:21] == pytest.approx(dots[:21], abs=1e-9)
    assert f.scale == D**-0.5
    assert np.abs(f.weights - dots).max() > 0.01, "negative control: no decay is another row"


def test_linear_attention_divides_by_its_sum() -> None:
    """a_ij = phi(q_i) . phi(k_j) / sum, phi = elu + 1."""
    _, x = parts("linear_attention")
    f = found("linear_attention", head=2, query=11)
    phi = [
        [np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in rows]
        for rows in (x["q"][2], x["k"][2])
    ]
    raw = [float(phi[0][11] @ phi[1][j]) if j <= 11 else 0.0 for j in range(len(phi[1]))]
    assert_near(f, np.array(raw) / sum(raw))
    named = {step.name: step.values for step in f.scores}
    assert np.abs(named["unnormalized"] - raw).max() < ROUNDING * max(raw)
    assert f.weights.sum() == pytest.approx(1, abs=1e-5)
    assert f.total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_the_delta_rule_takes_off_what_its_keys_said_already(name: str) -> None:
    """S_t = a_t S_{t-1} (I - b_t k k^T) + b_t v k^T, by a loop over unit values."""
    mixer, x = parts(name)
    head, i = 1, 9
    f = found(name, head=head, query=i)
    q, k = x["q"][head], x["k"][head]
    inner = torch.from_numpy(x["x"]).float()[None]
    beta = mixer.rule.beta_proj(inner).sigmoid()[0, :, head].double().detach().numpy()
    beta = beta * mixer.rule.max_beta
    decay = np.ones(len(k))
    if mixer.rule.decay is not None:
        decay = mixer.rule.decay(inner)[0, head].double().detach().exp().numpy()
    row = []
    for j in range(len(k)):
        S = np.zeros(k.shape[1])
        for t in range(i + 1):
            S = decay[t] * S
            S = S - beta[t] * float(S @ k[t]) * k[t] + (beta[t] * k[t] if t == j else 0)
        row.append(float(S @ q[i]) / math.sqrt(k.shape[1]))
    assert_near(f, row)
    assert f.state is not None
    assert f.state.shape == (k.shape[1], f.v.shape[1])
    assert f.state.num_values == math.prod(f.state.shape)


def test_the_state_is_what_the_recurrence_has_behind_the_query() -> None:
    """S_i = sum_j k_j v_j^T of retention with its decay; its norm is told in front of and behind
    the token.
    """
    _, x = parts("retention")
    f = found("retention", head=1, query=6)
    gamma, state, norms = 1 - 2.0**-6, np.zeros((x["k"].shape[2], x["v"].shape[2])), []
    for t in range(7):
        state = gamma * state + np.outer(x["k"][1, t], x["v"][1, t])
        norms.append(float(np.linalg.norm(state)))
    assert f.state is not None
    assert np.abs(f.state.matrix - state).max() < ROUNDING * np.abs(state).max()
    assert [f.state.norm_before, f.state.norm] == pytest.approx(norms[-2:], rel=1e-5)
    sizes = np.linalg.svd(state, compute_uv=False)
    share = sizes / sizes.sum()
    assert f.state.rank == pytest.approx(math.exp(-sum(p * math.log(p) for p in share)), rel=1e-4)


def test_a_row_in_blocks_is_the_row() -> None:
    pattern = torch.randn(1, 2, 9, 9, dtype=torch.float64).tril()
    v = torch.zeros(1, 2, 9, 3, dtype=torch.float64)
    for columns in (1, 2, 4, 64):
        row = effective_row(lambda u: pattern @ u, v, 1, 6, columns)
        assert row.tolist() == pattern[0, 1, 6].tolist()


def test_differential_attention_is_told_as_a_difference() -> None:
    attention, x = parts("differential")
    f = found("differential", head=1, query=8)
    H, share = 4, float(attention.project.lambda_full)
    rows = []
    for h in (1, 1 + H):
        s = [float(x["q"][h, 8] @ x["k"][h, j]) * f.scale for j in range(9)]
        e = [math.exp(y - max(s)) for y in s]
        rows.append([y / sum(e) for y in e])
    mix = f.mixture
    assert mix is not None
    assert mix.row is not None
    row = [a - share * b for a, b in zip(*rows, strict=True)]
    assert mix.row[:9] == pytest.approx(row, abs=1e-5)
    assert [term.factor for term in mix.terms] == pytest.approx([1, -share])
    assert [term.is_explained for term in mix.terms] == [True, False]
    assert mix.row.sum() == pytest.approx(1 - share, abs=1e-5)
    other = found("differential", head=5, query=8).mixture
    assert [term.is_explained for term in other.terms] == [False, True]  # type: ignore[union-attr]


def test_calls_that_are_joined_make_one_softmax() -> None:
    """StreamingLLM: recent keys and sinks, each with a query of its own; the row of both is one
    softmax.
    """
    attention, x = parts("streaming")
    f = found("streaming", query=-1, call=1)
    assert f.q[-1].name == "rotated back"
    assert f.calls == ("call 0", "call 1")
    mix, i = f.mixture, f.query
    assert mix is not None
    assert mix.row is not None
    assert "merged exactly by their lse" in mix.text
    assert mix.row.sum() == pytest.approx(1, abs=1e-5)
    v = x["v"][f.group]
    assert np.abs(mix.row @ v - x["z"][f.head, i]).max() < ROUNDING
    kept = set(range(attention.sinks)) | set(range(i - attention.recent + 1, i + 1))
    assert {j for j, p in enumerate(mix.row) if p > 0} == kept
    assert mix.terms[1].is_explained
    assert mix.terms[0].factor + mix.terms[1].factor == pytest.approx(1, abs=1e-6)


def test_a_global_query_of_longformer_replaces_the_local_one() -> None:
    f = found("longformer", query=6)
    assert f.calls == ("call 0", "call 1")
    assert f.mixture is not None
    assert "which replaces the others" in f.mixture.text
    assert [term.factor for term in f.mixture.terms] == [0, 1]
    assert f.call == 1, "the call whose answer goes on"
    assert found("longformer", query=7).mixture is None


def test_branches_of_nsa_have_their_gates_and_their_own_keys() -> None:
    attention, x = parts("nsa")
    compressed = found("nsa", query=20, head=1, call="compressed")
    assert compressed.pieces[0].startswith("block 0 …")
    assert compressed.call == 0
    opened = attention.gate(torch.from_numpy(x["x"][20]).float()).sigmoid()
    gates = opened.view(3, -1)[:, 1].tolist()
    assert compressed.mixture is not None
    assert [t.factor for t in compressed.mixture.terms] == pytest.approx(gates, rel=1e-5)
    whole = np.zeros(x["z"].shape[2])
    for name, gate in zip(("compressed", "selected", "window"), gates, strict=True):
        whole += gate * found("nsa", query=20, head=1, call=name).mixed
    assert np.abs(whole - x["z"][1, 20]).max() < ROUNDING
    selected = found("nsa", query=20, head=1, call="selected")
    assert {*selected.masked} <= {"", "future", "not selected", "future and not selected"}
    assert len(compressed.weights) < len(selected.weights)


def test_infini_attention_mixes_a_memory_with_its_segment() -> None:
    """A_mem = sigma(q) M / sigma(q) z over the segments before, A_dot inside: rows by loops."""
    attention, x = parts("infini")
    i, head, N = 20, 1, attention.segment
    f = found("infini", query=i, head=head)
    group, start = f.group, 20 // N * N
    sigma = [
        np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (x["q"][head, i], x["k"][group])
    ]
    memory = [float(sigma[0] @ sigma[1][j]) if j < start else 0.0 for j in range(len(sigma[1]))]
    assert len(f.weights) == len(memory)
    share = 1 / (1 + math.exp(-float(attention.gate[head])))
    row = share * np.array(memory) / sum(memory) + (1 - share) * f.weights
    assert f.mixture is not None
    assert f.mixture.row is not None
    assert np.abs(f.mixture.row - row).max() < ROUNDING
    assert np.abs(row @ x["v"][group] - x["z"][head, i]).max() < ROUNDING


def test_latent_attention_shows_the_latent_the_rotary_key_and_both_forms() -> None:
    attention, _ = parts("mla")
    latent = attention.project
    f = found("mla", query=12, key=4)
    names = [step.name for step in f.k]
    assert names == ["latent", "remembered", "expanded"]
    assert f.k[1].values.shape[1] == latent.kv_rank + latent.rotary.dim
    remembered, expanded = f.k[1].values[:, latent.kv_rank :], f.k[2].values[:, latent.nope_dim :]
    assert np.array_equal(expanded, remembered), "one rotary key"
    assert set(f.pairs[: latent.nope_dim]) == {-1}
    assert set(f.pairs[latent.nope_dim :]) == set(range(latent.rotary.dim // 2))
    read = random_model("mla", TEXT, options={"form": "absorb"})
    absorbed = explain(read, query=12, key=4, head=f.head)
    assert [step.name for step in absorbed.q] == ["projected", "rotated", "absorbed"]
    assert absorbed.sizes["G"] == 1
    assert absorbed.weights == pytest.approx(f.weights, abs=ROUNDING)
    assert absorbed.z == pytest.approx(f.z, abs=ROUNDING)
    assert absorbed.mixed.shape != f.mixed.shape, "what it mixes are latents"


def test_additive_attention_has_its_own_score() -> None:
    attention, x = parts("bahdanau")
    f = found("bahdanau", query=3, key=5)
    w = attention.weight[0].double().numpy()
    products = w * np.tanh(x["q"][0, 3] + x["k"][0])
    s = products.sum(1)
    assert f.scores[0].values == pytest.approx(s, abs=1e-9)
    e = [math.exp(y - max(s)) for y in s]
    assert f.weights == pytest.approx([y / sum(e) for y in e], abs=1e-9)
    assert f.products == pytest.approx(products[5])


def test_a_specimen_is_drawn_from_its_seed_and_leaves_the_random_state() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a, b = (explain(random_model("gqa", TEXT, seed=1)).weights for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert a.tolist() == b.tolist()
    assert a.tolist() != explain(random_model("gqa", TEXT, seed=2)).weights.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_model("gqq", TEXT), "no mechanism is named 'gqq'; did you mean 'gqa'"),
        (lambda: random_model("gqa", TEXT, options={"none": 1}), "gqa has no option 'none'"),
        (lambda: found("retention", head=7), "head is 7; there are 4 heads"),
        (lambda: found("streaming", query=-1, key=20, call=1), "key is token 20, which this call"),
    ],
)
def test_what_a_specimen_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
