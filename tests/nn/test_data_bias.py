"""Mechanisms whose scores get a bias from tokens or a learned one from distances: against loops,
the fixed example, and under the error rule with gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.biases import FIRE, ForgetBias, deberta_bucket
from regard.errors import ArgumentError
from regard.masks import Causal, Window
from regard.nn import HeadProjection
from regard.nn.attention.evicting import EvictingAttention
from regard.nn.attention.windowed import StreamingAttention
from regard.nn.projections.data_bias import (
    DisentangledProjection,
    ForgettingProjection,
    PathProjection,
    RelativeKeyProjection,
    RelativeLogitProjection,
    SinusoidKeyProjection,
    sums_up_to,
)
from regard.nn.projections.steps import FinishedProjection, GatedProjection, HeadGate
from regard.nn.variants import VARIANTS
from regard.positions import Rotary
from regard.span import Span
from tests.nn.catalogue import randomize, tokens
from tests.oracles import data_bias as oracle
from tests.oracles.oracle import softmax_attention
from tests.oracles.plain import plain_attention
from tests.rules import GRADIENT, assert_close_rule

H, D, G = 4, 8, 2
NAMES = [
    "forgetting",
    "cable",
    "kerple",
    "fire",
    "shaw",
    "transformer_xl",
    "deberta",
    "relative_logits",
    "dynamic_mask",
]
DENSE = ["path", "selective"]
BiasAt = Callable[[int, int, int, int], float]


def bias_by_loops(name: str, m: Any, x: Tensor) -> BiasAt:
    """The bias of (row, head, query, key) from the parameters of a module and its input."""
    p = m.project
    q, k = (f.linear(x).unflatten(-1, (f.heads, -1)).transpose(1, 2).tolist() for f in (p.q, p.k))
    group = H // p.k.heads
    if name in ("forgetting", "cable"):
        f = p.f(x).mT.tolist()
        sign = 1 if name == "forgetting" else -1
        g = [[[oracle.log_sigmoid(sign * y) for y in head] for head in row] for row in f]
        return lambda b, h, i, j: oracle.forget(g[b][h], i, j)
    if name == "kerple":
        r1, r2 = (y.tolist() for y in m.bias_tensors)
        return lambda b, h, i, j: oracle.kerple(r1[h], r2[h], i, j)
    if name == "fire":
        c, L, w1, b1, w2, b2 = (y.tolist() for y in m.bias_tensors)
        return lambda b, h, i, j: oracle.fire(c[0], L[0], w1, b1, w2[h], b2[h], i, j)
    if name == "shaw":
        vectors = p.table.tolist()
        return lambda b, h, i, j: oracle.shaw(q[b][h][i], vectors, p.left, p.right, i, j)
    if name == "transformer_xl":
        u, w, W = p.u.tolist(), p.w.tolist(), p.relative.tolist()
        return lambda b, h, i, j: (
            m.scale
            * oracle.sinusoid(q[b][h][i], u[h], w[h], k[b][h // group][j], W[h], p.base, i, j)
        )
    if name == "deberta":
        K, Q = (
            f.linear(p.embedding).unflatten(-1, (H, -1)).transpose(0, 1).tolist()
            for f in (p.relative_k, p.relative_q)
        )
        return lambda b, h, i, j: (
            m.scale
            * oracle.disentangled(
                q[b][h][i], k[b][h][j], K[h], Q[h], p.buckets, p.max_distance, i, j
            )
        )
    if name == "relative_logits":
        r = p.r.linear(x).unflatten(-1, (H, -1)).transpose(1, 2)
        profiles = (r @ p.profiles).tolist()
        return lambda b, h, i, j: oracle.relative(profiles[b][h][i], i, j)
    v, W, a = p.v.linear(x).tolist(), p.delta.weight.tolist(), p.a.tolist()

    def kept(b: int, h: int, i: int, j: int) -> float:
        row = [oracle.importance(y, W[h // group], a[h // group]) for y in v[b][: i + 1]]
        return row[j] if j <= i and row[j] in sorted(row)[-p.keep :] else -math.inf

    return kept


def inputs(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with their steps, but without appended sinusoids."""
    at = Span(0, x.shape[1])
    return m.project.q(x, at), m.project.k(x, at), m.project.v(x, at)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", NAMES)
def test_a_mechanism_equals_its_loops(name: str) -> None:
    m: Any = randomize(VARIANTS[name].example().double(), 5).requires_grad_(False).eval()
    x = tokens(9, B=1, seed=3)
    with regard.Trace("z") as trace:
        m(x)
    z, bias = trace["z"], bias_by_loops(name, m, x)
    answer = softmax_attention(
        *inputs(m, x),
        visible=lambda b, h, i, j: name == "deberta" or j <= i,
        bias=bias,
        scale=m.scale,
    )
    assert (z - answer.out).abs().max() < 1e-12
    without = softmax_attention(
        *inputs(m, x), visible=lambda b, h, i, j: name == "deberta" or j <= i, scale=m.scale
    )
    assert (without.out - z).abs().max() > 1e-3, "negative control: the bias matters"

    # the same in fp32, under the error rule
    rows, places = range(9), range(9)
    table = torch.tensor([[[bias(0, h, i, j) for j in places] for i in rows] for h in range(H)])
    visible = torch.ones(9, 9).bool() if name == "deberta" else torch.ones(9, 9).tril().bool()
    small = copy.deepcopy(m).float()
    with regard.Trace("z") as trace:
        small(x.float())
    plain, _ = plain_attention(
        *inputs(small, x.float()), visible=visible, bias=table[None].float(), scale=m.scale
    )
    assert_close_rule(trace["z"], plain, answer.out, what=name)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES + DENSE)
def test_the_gradients_of_tiles_are_those_of_the_definition(name: str) -> None:
    """Through several tiles in fp32, beside the reference in fp32 and in fp64."""
    m64 = randomize(VARIANTS[name].example().double(), 5)
    x64, weights = tokens(70, B=2, seed=4), tokens(70, B=2, seed=6)

    def gradients(dtype: torch.dtype, run: Callable[[Any, Tensor], Tensor]) -> list[Tensor | None]:
        m, x = copy.deepcopy(m64).to(dtype), x64.to(dtype, copy=True).requires_grad_()
        (run(m, x) * weights.to(dtype)).sum().backward()
        return [x.grad, *(p.grad for p in m.parameters())]

    named = ["x", *(n for n, _ in m64.named_parameters())]
    exact = gradients(torch.float64, lambda m, x: m(x, backend="reference"))
    mine = gradients(torch.float32, lambda m, x: m(x, backend="tiled"))
    plains = [
        gradients(torch.float32, lambda m, x: plainly(m, x, by_lse=False)),
        gradients(torch.float32, lambda m, x: plainly(m, x, by_lse=True)),
        gradients(torch.float32, lambda m, x: plainly(m, x, by_lse=False, order=1)),
    ]
    for n, what in enumerate(named):
        several = [p[n] for p in plains]
        assert_close_rule(mine[n], several, exact[n], GRADIENT, f"{name} {what}")  # type: ignore[arg-type]


def plainly(m: Any, x: Tensor, *, by_lse: bool, order: int = 0) -> Tensor:
    """The module with the whole table of its bias in the dtype of x; another order of the keys
    sums in another one.
    """
    at, p = Span(0, x.shape[1]), m.project
    q, memory = p.query(x, at), p.remember(x, at)
    k, v = p.recall(memory, at)
    own, seen = p.data_bias(x, q, memory, at, at), m.mask.block(at, at)
    if isinstance(own, ForgetBias):  # somebody would sum in the same dtype
        c = memory[2][..., 0].to(x.dtype).cumsum(-1)
        own = ForgetBias(c, c)
    terms = [y for y in (m._bias(), own) if y is not None]
    bias = sum(y.block(at, at, dtype=x.dtype) for y in terms) if terms else torch.zeros(1, 1, 1, 1)
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    turn = torch.randperm(70, generator=torch.Generator().manual_seed(order))
    turn = turn if order else torch.arange(70)
    bias = bias.expand(*bias.shape[:2], 70, 70)[..., turn]
    z, _ = plain_attention(
        q,
        k[:, :, turn],
        v[:, :, turn],
        visible=seen[..., turn],
        bias=bias,
        scale=scale,
        by_lse=by_lse,
    )
    return m.output(z.transpose(1, 2).flatten(2))


def test_the_number_of_fire() -> None:
    one = torch.ones(1, dtype=torch.float64)
    bias = FIRE(0.1 * one, 8 * one, one, 0 * one, one[None], 0 * one)
    found = bias.block(Span(3, 1), Span(0, 1), dtype=torch.float64).item()
    assert found == pytest.approx(0.4463596746, abs=1e-10)
    assert oracle.fire_argument(0.1, 8, 3, 0) == pytest.approx(0.4463596746, abs=1e-10)
    first = FIRE(one, 0 * one, one, 0 * one, one[None], 0 * one)  # ln 1 / ln 1
    assert first.block(Span(0, 1), Span(0, 1)).item() == 0


def test_the_buckets_of_deberta() -> None:
    at = [129, 200, 300, 511]
    expected = [129, 169, 207, 255]
    found = deberta_bucket(torch.tensor(at), buckets=256, max_distance=512)
    assert found.tolist() == expected
    assert [oracle.deberta_bucket(d, 256, 512) for d in at] == expected
    near = torch.arange(-128, 129)
    assert torch.equal(deberta_bucket(near, buckets=256, max_distance=512), near)
    with pytest.raises(ArgumentError, match=r"buckets is 3 and max_distance is 9; there must be"):
        deberta_bucket(near, buckets=3, max_distance=9)


def test_equal_vectors_of_distances_change_nothing() -> None:
    """Shaw with equal vectors, and relative logits whose profiles are 0, are plain attention."""
    for name in ("shaw", "relative_logits"):
        m: Any = randomize(VARIANTS[name].example().double(), 1)
        x = tokens(7, seed=2)
        p = m.project
        with torch.no_grad():
            p.table.copy_(p.table[:1].expand_as(p.table)) if name == "shaw" else p.profiles.zero_()
        plain = regard.attend(*inputs(m, x), mask=Causal())
        with regard.Trace("z") as trace:
            m(x)
        assert (trace["z"] - plain).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_sums_follow_positions_and_not_slots(seed: int) -> None:
    """Shuffled slots with empty ones, as in a ring: every query and key has the sum up to its
    position.
    """
    make = torch.Generator().manual_seed(seed)
    g = torch.randn(2, 3, 7, generator=make, dtype=torch.float64)
    k_at = torch.stack([torch.randperm(9, generator=make)[:7] for _ in range(2)])
    k_at[0, 3] = -1
    g[0, :, 3] = math.nan
    q_at = torch.tensor([[5, -1, 8], [0, 3, 4]])
    queries, keys = sums_up_to(g, q_at, k_at)
    for b in range(2):
        for h in range(3):
            known = [(int(p), float(y)) for p, y in zip(k_at[b], g[b, h], strict=True) if p >= 0]
            for at, found in ((q_at[b], queries[b, h]), (k_at[b], keys[b, h])):
                for position, value in zip(at.tolist(), found.tolist(), strict=True):
                    exact = math.fsum(y for p, y in known if p <= position)
                    assert value == pytest.approx(exact, abs=1e-12)
    shifted, _ = sums_up_to(g[1:], Span(2, 2), Span(0, 7))
    assert torch.allclose(shifted, g[1:].cumsum(-1)[..., 2:4])


def test_strong_gates_over_a_long_text_stay_exact() -> None:
    """The sums reach 40000, where fp32 has steps of 1/256; the nearest keys are exact all the
    same.
    """
    T, make = 4000, torch.Generator().manual_seed(0)
    c = (-20 * torch.rand(1, 1, T, generator=make)).double().cumsum(-1)
    q, k = (torch.randn(1, 1, T, 8, generator=make) for _ in range(2))
    v = torch.randn(1, 1, T, 4, generator=make)
    rows = slice(T - 50, T)
    last, at = q[:, :, rows], {"q_positions": Span(T - 50, 50), "mask": Causal()}
    exact = regard.attend(
        last.double(), k.double(), v.double(), bias=ForgetBias(c[..., rows], c), **at
    )
    mine = regard.attend(last, k, v, bias=ForgetBias(c[..., rows], c), **at)
    rounded = regard.attend(last, k, v, bias=-c.float()[:, :, None], **at)
    errors = [(x.double() - exact).abs().max().item() for x in (mine, rounded)]
    assert errors[0] < 1e-5
    assert errors[1] > 100 * errors[0], "negative control: one rounded number per key"


def heads() -> tuple[HeadProjection, HeadProjection, HeadProjection]:
    q, k, v = (HeadProjection(32, n, D) for n in (H, G, G))
    return q, k, v


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"gate is 'tanh'; it must be one of sigmoid"):
        ForgettingProjection(*heads(), 32, gate="tanh")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"left is -1 and right is 0; each must be at least 0"):
        RelativeKeyProjection(*heads(), left=-1, right=0)
    with pytest.raises(ArgumentError, match=r"r must have 4 heads, as q, and extent must be at"):
        RelativeLogitProjection(*heads(), HeadProjection(32, G, D), extent=3)
    with pytest.raises(ArgumentError, match=r"size is 5; it must be even, and at least 2"):
        SinusoidKeyProjection(*heads(), size=5)
    with pytest.raises(ArgumentError, match="disentangled attention has one key head per query"):
        DisentangledProjection(*heads(), 32, buckets=4, max_distance=16)


def test_streaming_refuses_a_bias_that_would_not_move() -> None:
    q, k, v = heads()
    rotary = Rotary(D)
    for one in (q, k):
        one.steps.append(rotary)
    m = StreamingAttention(
        ForgettingProjection(q, k, v, 32), torch.nn.Linear(H * D, 32), sinks=1, recent=4
    )
    with pytest.raises(ArgumentError, match="StreamingAttention got the bias forget"):
        m(torch.randn(1, 3, 32))


@pytest.mark.parametrize("name", ["path", "selective"])
def test_scores_that_other_tokens_change_equal_their_loops(name: str) -> None:
    m: Any = randomize(VARIANTS[name].example().double(), 5).requires_grad_(False).eval()
    x, at, p = tokens(9, B=1, seed=3), Span(0, 9), m.project
    q, k, v = inputs(m, x)
    if name == "path":
        _, _, w, beta = p.remember(x, at)
        plain, changed = q[0] @ k[0].repeat_interleave(2, 0).mT / math.sqrt(D), []
        for h in range(H):
            own = (q[0, h], k[0, h // 2], w[0, h // 2], beta[0, h // 2, :, 0])
            rows = oracle.path_scores(*(y.tolist() for y in own))
            changed.append([[s / math.sqrt(D) for s in row] for row in rows])

        def bias(b: int, h: int, i: int, j: int) -> float:
            return changed[h][i][j] - float(plain[h, i, j])

    else:
        taken = oracle.selective(q[0, 0].tolist(), k[0, 0].tolist())

        def bias(b: int, h: int, i: int, j: int) -> float:
            return taken[i][j]

    answer = softmax_attention(q, k, v, visible=lambda b, h, i, j: j <= i, bias=bias)
    with regard.Trace("z") as trace:
        m(x)
    assert (trace["z"] - answer.out).abs().max() < 1e-11
    without = softmax_attention(q, k, v, visible=lambda b, h, i, j: j <= i)
    assert (trace["z"] - without.out).abs().max() > 1e-3, "negative control"
    with pytest.raises(ArgumentError, match=r"both must have the same heads"):
        PathProjection(*heads(), HeadProjection(32, H, D), 32)


@pytest.mark.parametrize("name", ["infini", "gated_linear", "moba", "h2o"])
def test_a_mechanism_that_adds_no_bias_refuses_one_from_tokens(name: str) -> None:
    """Also behind a gate; the gate alone is taken."""
    layer = VARIANTS[name].example()
    plain = VARIANTS["gqa"].example(groups=4).project
    biased = RelativeLogitProjection(
        *(HeadProjection(32, 4, 8) for _ in "qkv"), HeadProjection(32, 4, 5), extent=6
    )
    for project in (biased, GatedProjection(biased, HeadProjection(32, 4, 8, bias=False))):
        with pytest.raises(ArgumentError, match="RelativeLogitProjection, which computes a bias"):
            rebuilt(layer, project)
    gated = GatedProjection(plain, HeadProjection(32, 4, 8, bias=False))
    if name == "h2o":
        assert rebuilt(layer, gated).project is gated


def rebuilt(layer: Any, project: Any) -> Any:
    """A mechanism of the same class with another projection."""
    if isinstance(layer, EvictingAttention):
        return EvictingAttention(project, layer.output, rule=layer.rule, budget=8)
    if hasattr(layer, "rule"):
        return type(layer)(project, layer.rule, layer.output)
    if hasattr(layer, "selector"):
        return type(layer)(project, layer.selector, layer.output)
    return type(layer)(project, layer.output, segment=8)


def test_a_finish_keeps_the_bias_of_its_projection() -> None:
    torch.manual_seed(0)
    m = VARIANTS["forgetting"].example()
    x = torch.randn(1, 9, 32)
    gate = HeadGate(32, 4)
    z = m.project
    m.project = FinishedProjection(z, gate)
    heads = m.project.query(x, Span(0, 9))
    memory = m.project.remember(x, Span(0, 9))
    bias = m.project.data_bias(x, heads, memory, Span(0, 9), Span(0, 9))
    assert isinstance(bias, ForgetBias)
    without = copy.deepcopy(m)
    without.project.__class__ = type(
        "NoBias", (FinishedProjection,), {"data_bias": lambda *_: None}
    )
    assert (m(x) - without(x)).abs().max() > 1e-3


def test_the_memory_of_transformer_xl_has_no_gradient() -> None:
    """A window's ring is the memory of a segment; its contents, detached, end the gradient."""
    layer: Any = randomize(VARIANTS["transformer_xl"].example().double(), 3)
    layer.mask = Causal() & Window(5)
    x = tokens(8).double().requires_grad_(True)
    whole, cache = layer(x), layer.new_cache()
    for detached in (True, False):
        cache = layer.new_cache()
        parts = [layer(x[:, :4], cache=cache)]
        if detached:
            contents = cache.contents().items()
            cache.fill({k: v.detach() if isinstance(v, Tensor) else v for k, v in contents})
        parts.append(layer(x[:, 4:], cache=cache))
        assert float((torch.cat(parts, 1) - whole).detach().abs().max()) < 1e-12
        (grad,) = torch.autograd.grad(parts[1].sum(), x)
        assert bool(grad[:, :4].eq(0).all()) == detached
        assert grad[:, 4:].ne(0).any()
