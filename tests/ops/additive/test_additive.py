"""Additive attention against its definition in Python loops; padding; gradients; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import Trace, masks
from regard.ops import additive_attention as module
from regard.ops.additive_attention import additive_attention
from regard.span import Span
from tests.oracles.additive import additive as definition
from tests.rules import GRADIENT, assert_close_rule, assert_refused

B, H, G, T, S, A, E = 2, 4, 2, 3, 5, 6, 3
PADDED = torch.tensor([[-1, 0, 1, 2, -1], [0, 1, 2, 3, 4]])


def make(
    scale: float = 1.0, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Tensor, ...]:
    n = {"B": B, "H": H, "G": G, "T": T, "S": S, "A": A, "E": E, **sizes}
    shapes = ("BHTA", "BGSA", "BGSE", "HA")
    return tuple((torch.randn([n[x] for x in shape]) * scale).to(dtype) for shape in shapes)


def plain(q: Tensor, k: Tensor, v: Tensor, w: Tensor, seen: Tensor, order: Tensor) -> Any:
    """The formula as one would type it, over keys and hidden units in some order."""
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    units, keys = order[order < q.shape[-1]], order[order < k.shape[2]]
    hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])[..., units]
    e = (hidden * w[:, None, None, units]).sum(-1).masked_fill(~seen, -math.inf)[..., keys]
    p = torch.exp(e - e.amax(-1, keepdim=True).clamp(min=torch.finfo(e.dtype).min))
    p = p / p.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1)
    return p @ v[:, :, keys], p[..., keys.argsort()]


def plains(*given: Tensor, seen: Tensor) -> list[Any]:
    orders = (torch.randperm(99, generator=torch.Generator().manual_seed(i)) for i in range(4))
    return [plain(*given, seen.expand(B, H, T, S), order) for order in orders]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_is_the_definition(dtype: torch.dtype, scale: float, groups: int) -> None:
    given = make(scale, dtype, G=groups)
    found = additive_attention(*given, k_positions=PADDED)
    exact = definition(*given, visible=lambda b, h, i, j: bool(PADDED[b, j] >= 0))
    usual = plains(*given, seen=(PADDED >= 0)[:, None, None])
    for i, name in enumerate(("context", "weights")):
        assert found[i].dtype == dtype
        assert_close_rule(found[i], [x[i] for x in usual], exact[i], what=name)


def test_one_head_is_bahdanaus_step() -> None:
    """The numbers of equation 6 by hand: two states, a hidden layer of one unit."""
    q, k = torch.tensor([[[[0.5]]]]), torch.tensor([[[[0.0], [1.0]]]])
    v, w = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]), torch.tensor([[2.0]])
    e = [2 * math.tanh(0.5), 2 * math.tanh(1.5)]
    share = 1 / (1 + math.exp(e[1] - e[0]))
    context, weights = additive_attention(q, k, v, w)
    assert weights.flatten().tolist() == pytest.approx([share, 1 - share], abs=1e-6)
    assert torch.equal(context.flatten(), weights.flatten())


def test_wrong_masks_and_wrong_scores_are_caught() -> None:
    """Negative controls: padding that takes part, keys without the tanh, groups tiled instead of
    repeated.
    """
    q, k, v, w = given = make()
    exact = definition(*given, visible=lambda b, h, i, j: bool(PADDED[b, j] >= 0))[0]
    usual = [x[0] for x in plains(*given, seen=(PADDED >= 0)[:, None, None])]
    assert_close_rule(additive_attention(*given, k_positions=PADDED).context, usual, exact)
    tiled = additive_attention(q[:, [0, 2, 1, 3]], k, v, w, k_positions=PADDED).context
    linear = regard.attend(
        q * w[:, None], k, v, scale=1.0, k_positions=PADDED, q_positions=Span(0, T)
    )
    for wrong in (additive_attention(*given).context, tiled, linear):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, usual, exact)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
def test_what_stands_in_padding_changes_nothing(garbage: float) -> None:
    """Neither the result, bit by bit, nor any gradient: 0 times the slope at a NaN would be a
    NaN.
    """
    given = make()
    results = []
    for fill in (0.0, garbage):
        q, k, v, w = (x.clone() for x in given)
        for x in (k, v):
            x.masked_fill_((PADDED < 0)[:, None, :, None], fill)
        leaves = [x.requires_grad_() for x in (q, k, v, w)]
        found = additive_attention(*leaves, k_positions=PADDED)
        (found.context.sin().sum() + found.weights.square().sum()).backward()
        results.append([found.context, found.weights, *(x.grad for x in leaves)])
        assert found.weights[0, :, :, [0, 4]].eq(0).all()
        for x in (k, v):
            assert x.grad is not None
            assert x.grad[0, :, [0, 4]].eq(0).all()
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_nan_that_is_seen_is_shown() -> None:
    q, k, v, w = make()
    v[0, 0, 2, 1] = math.nan
    context = additive_attention(q, k, v, w, k_positions=PADDED).context
    assert context[0, :2, :, 1].isnan().all(), "the heads of its group"
    context[0, :2, :, 1] = 0
    assert context.isfinite().all()
    k[1, 1, 0, 0] = math.nan
    assert additive_attention(q, k, v, w).context[1, 2:].isnan().all()


def test_a_row_that_sees_nothing_gives_zero() -> None:
    leaves = [x.requires_grad_() for x in make()]
    nothing = torch.full((2, S), -1)
    nothing[1] = torch.arange(S)
    found = additive_attention(*leaves, k_positions=nothing)
    assert found.context[0].eq(0).all()
    assert found.weights[0].eq(0).all()
    found.context.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    assert leaves[0].grad is not None
    assert leaves[0].grad[0].eq(0).all()
    empty = additive_attention(*make(S=0))
    assert empty.context.eq(0).all()
    assert empty.weights.shape == (B, H, T, 0)
    assert additive_attention(*make(T=0)).context.shape == (B, H, 0, E)


def test_masks_speak_of_positions() -> None:
    given = make()
    rule = masks.Fn(lambda q, k: (q - k).abs() <= 1, "near")
    found = additive_attention(*given, mask=rule, q_positions=Span(2, T))
    exact = definition(*given, visible=lambda b, h, i, j: abs(i + 2 - j) <= 1)
    near = torch.tensor([[abs(i + 2 - j) <= 1 for j in range(S)] for i in range(T)])
    assert_close_rule(found.context, [x[0] for x in plains(*given, seen=near)], exact[0])
    assert torch.equal(additive_attention(*given, mask=near).context, found.context)


def test_a_block_of_queries_at_a_time_is_all_at_once() -> None:
    T, S, A = 40, 512, 512  # as many bytes as make a block of 32 queries, and one of 8
    assert T * S * A * 8 > module.BLOCK_BYTES > T // 2 * S * A * 8
    query, keys, values = (torch.randn(1, 1, n, A, dtype=torch.float64) for n in (T, S, S))
    given = (keys, values, torch.randn(1, A, dtype=torch.float64))
    whole = additive_attention(query, *given)
    halves = [additive_attention(query[:, :, i : i + T // 2], *given) for i in (0, T // 2)]
    assert torch.equal(whole.context, torch.cat([x.context for x in halves], 2))


def test_gradients() -> None:
    given = [x.requires_grad_() for x in make(dtype=torch.float64, B=2, H=2, G=1, T=2, A=3, E=2)]
    assert torch.autograd.gradcheck(
        lambda *x: tuple(additive_attention(*x, k_positions=PADDED)), given
    )
    drawn, seen = make(), (PADDED >= 0)[:, None, None].expand(B, H, T, S)

    def gradients(dtype: torch.dtype, run: Any) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in drawn]
        return torch.autograd.grad(run(*leaves).sin().sum(), leaves)

    def usual(*x: Tensor) -> Tensor:
        return plain(*x, seen, torch.randperm(99))[0]  # type: ignore[no-any-return]

    exact = gradients(torch.float64, usual)
    others = [gradients(torch.float32, usual) for _ in range(4)]
    ours = gradients(torch.float32, lambda *x: additive_attention(*x, k_positions=PADDED).context)
    for i, ref in enumerate(exact):
        assert_close_rule(ours[i], [x[i] for x in others], ref, GRADIENT)
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(ours[3] * 1.0001, [x[3] for x in others], exact[3], GRADIENT)


def test_taps() -> None:
    given = make()
    with Trace("scores", "pattern") as trace:
        found = additive_attention(*given, k_positions=PADDED)
    assert torch.equal(trace["pattern"], found.weights)
    assert trace["scores"][0, :, :, 0].isneginf().all()
    with Trace(edit={"pattern": lambda p: torch.zeros_like(p)}):
        assert additive_attention(*given).context.eq(0).all()


@pytest.mark.full
def test_compiles_without_a_break_and_keeps_padding_out() -> None:
    torch._dynamo.reset()
    q, k, v, w = make()
    run = torch.compile(additive_attention, fullgraph=True, backend="aot_eager")
    usual = additive_attention(q, k, v, w, k_positions=PADDED)
    for x in (k, v):
        x.masked_fill_((PADDED < 0)[:, None, :, None], math.nan)
    found = run(q, k, v, w, k_positions=PADDED)
    for i in range(2):
        assert float((found[i] - usual[i]).abs().max()) < 1e-6


def test_refusals() -> None:
    q, k, v, w = make()
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: additive_attention(q, k, v, w[0][None]),
            regard.ArgumentError,
            "weight is (1, 6); it must be (4, 6), one vector",
        ),
        (
            lambda: additive_attention(q, k, v, w.double()),
            regard.ArgumentError,
            "weight is torch.float64 on cpu and query torch.float32 on cpu",
        ),
        (lambda: additive_attention(q[0], k, v, w), regard.ArgumentError, "query has 3"),
        (lambda: additive_attention(q, k[:, :, :4], v, w), regard.ArgumentError, "key length 4"),
        (lambda: additive_attention(q, k[..., :4], v, w), regard.ArgumentError, "query dim 6"),
        (
            lambda: additive_attention(q[:, :3], k, v, w[:3]),
            regard.ArgumentError,
            "3 query heads are not divisible by 2",
        ),
        (
            lambda: additive_attention(q, k, v, w, k_positions=PADDED[:, :4]),
            regard.ArgumentError,
            "k_positions is (2, 4); it must be (2, 5) or (1, 5)",
        ),
        (
            lambda: additive_attention(q, k, v, w, q_positions=Span(0, 9)),
            regard.ArgumentError,
            "q_positions is Span(start=0, length=9)",
        ),
        (
            lambda: additive_attention(q, k, v, w, mask=torch.ones(T, 4, dtype=torch.bool)),
            regard.ArgumentError,
            "mask",
        ),
        (
            lambda: additive_attention(q, k, v, w, mask=torch.zeros(T, S)),
            regard.ArgumentTypeError,
            "a mask must be bool",
        ),
    ]
    assert_refused(cases)
