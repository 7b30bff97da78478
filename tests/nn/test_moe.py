"""Mixture of experts against loops in fp64: who is chosen, with what weight, what is computed and
what is not.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.feed_forward import ClippedSwiGLU, SwiGLU
from regard.nn.blocks.routers import ExpertGroups, Router, SigmoidRouter, SoftmaxRouter
from tests.nn.catalogue import random
from tests.oracles import moe as oracle
from tests.rules import GRADIENT, assert_close_rule

M, N, HIDDEN = 6, 8, 5
ROUTERS: dict[str, tuple[type[Router], dict[str, Any]]] = {
    "softmax over all": (SoftmaxRouter, {"k": 3}),
    "softmax over the chosen, bias": (SoftmaxRouter, {"k": 3, "normalize": True, "bias": True}),
    "one expert": (SoftmaxRouter, {"k": 1, "scale": 1.5}),
    "all experts": (SoftmaxRouter, {"k": N}),
    "groups by their best": (SoftmaxRouter, {"k": 3, "groups": ExpertGroups(4, 2), "scale": 16.0}),
    "groups filled": (SoftmaxRouter, {"k": 4, "groups": ExpertGroups(4, 2), "normalize": True}),
    "sigmoid": (SigmoidRouter, {"k": 3}),
    "sigmoid, groups by their best two": (
        SigmoidRouter,
        {"k": 3, "groups": ExpertGroups(2, 1, best=2), "normalize": True, "scale": 2.5},
    ),
}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(name: str = "softmax over all", *, shared: bool = False, seed: int = 0) -> MoE:
    kind, options = ROUTERS[name]
    experts = [SwiGLU(M, HIDDEN) for _ in range(N)]
    made = MoE(kind(M, N, **options), experts, SwiGLU(M, HIDDEN) if shared else None)
    return random(made, seed)


def rows_of(p: Tensor) -> Any:
    return p.detach().double().tolist()


def routing(router: Any, x: list[float]) -> dict[int, float]:
    """What the oracle says of one token, from the router's weights alone."""
    bias = None if router.linear.bias is None else rows_of(router.linear.bias)
    logits = oracle.linear(rows_of(router.linear.weight), x, bias)
    g = router.groups
    options = {
        "normalize": router.normalize,
        "scale": router.scale,
        "groups": None if g is None else (g.count, g.topk, g.best),
    }
    if isinstance(router, SigmoidRouter):
        return oracle.sigmoid_routing(logits, rows_of(router.correction), router.k, **options)
    return oracle.softmax_routing(logits, router.k, **options)


def expert(layer: Any) -> Any:
    weights = [rows_of(m.weight) for m in (layer.gate, layer.up, layer.down)]
    return lambda x: oracle.swiglu(x, *weights)


def written_out(moe: Any, x: Tensor) -> Tensor:
    """Token by token in fp64."""
    experts = [expert(e) for e in moe.experts]
    shared = None if moe.shared is None else expert(moe.shared)
    rows = [
        oracle.mixture(row, routing(moe.router, row), experts, shared)
        for row in rows_of(x.reshape(-1, x.shape[-1]))
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def plainly(moe: Any, x: Tensor, *, backwards: bool = False) -> Tensor:
    """Plain math in the dtype of x, routing in fp32 or better: of the oracle only who is chosen."""
    r, flat = moe.router, x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = flat.to(wide) @ r.linear.weight.to(wide).T
    logits = logits if r.linear.bias is None else logits + r.linear.bias.to(wide)
    chosen = torch.zeros_like(logits)
    for i, row in enumerate(rows_of(flat)):
        chosen[i, list(routing(r, row))] = 1
    sigmoid = isinstance(r, SigmoidRouter)
    shares = 1 / (1 + torch.exp(-logits)) if sigmoid else torch.exp(logits - logits.amax(-1, True))
    among = chosen if r.normalize else torch.ones_like(chosen)
    total = (shares * among).sum(-1, keepdim=True) if r.normalize or not sigmoid else 1.0
    weights = (r.scale * shares / total * chosen).to(x.dtype)
    y = torch.zeros_like(flat)
    for e in reversed(range(N)) if backwards else range(N):
        y = y + weights[:, e, None] * moe.experts[e](flat)
    return (y if moe.shared is None else y + moe.shared(flat)).reshape(x.shape)


def plain_ones(moe: Any, x: Tensor) -> list[Tensor]:
    """Sums in two orders, and every token in a matrix of its own."""
    alone = [plainly(moe, row[None]) for row in x.reshape(-1, x.shape[-1])]
    return [plainly(moe, x), plainly(moe, x, backwards=True), torch.cat(alone).reshape(x.shape)]


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUTERS)
def test_it_is_the_weighted_sum(name: str, dtype: torch.dtype) -> None:
    for seed, scale, shared in ((0, 0.1, False), (1, 1.0, True), (2, 4.0, False)):
        moe = build(name, shared=shared, seed=seed).to(dtype)
        x = (scale * randn(2, 12, M, seed=seed)).to(dtype)
        with torch.no_grad():
            want = written_out(moe, x)
            assert_close_rule(moe(x), plain_ones(moe, x), want, what=f"{name} {scale}")


@pytest.mark.parametrize("shape", [(M,), (1, M), (7, M), (1, 1, M), (2, 3, 2, M)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    moe, x = build(shared=True).double(), randn(*shape).double()
    torch.testing.assert_close(moe(x), written_out(moe, x), rtol=1e-12, atol=1e-12)


def test_no_tokens() -> None:
    assert build()(torch.zeros(2, 0, M)).shape == (2, 0, M)


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_and_experts_in_the_order_of_their_scores(name: str) -> None:
    moe, x = build(name).double(), randn(9, M).double()
    weights, experts = moe.router(x)
    assert weights.shape == experts.shape == (9, moe.router.k)
    for row, w, e in zip(x.tolist(), weights.tolist(), experts.tolist(), strict=True):
        wanted = routing(moe.router, row)
        assert e == list(wanted)  # best first
        assert w == pytest.approx(list(wanted.values()), rel=1e-12)


class Counting(nn.Module):
    """An expert that keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        return x


def test_an_expert_computes_its_own_tokens_and_one_nobody_chose_nothing() -> None:
    router = SoftmaxRouter(2, 4, 2)
    router.linear.weight.data.copy_(torch.tensor([[9.0, 0], [0, 9.0], [5.0, 5.0], [-9.0, -9.0]]))
    experts = [Counting() for _ in range(4)]
    x = torch.tensor([[1.0, 0], [0, 1.0], [2.0, 0]])
    MoE(router, experts)(x[None])
    assert [[call.tolist() for call in e.calls] for e in experts] == [
        [[[1.0, 0], [2.0, 0]]],
        [[[0, 1.0]]],
        [[[1.0, 0], [0, 1.0], [2.0, 0]]],
        [],
    ]


@pytest.mark.parametrize("kind", [SoftmaxRouter, SigmoidRouter])
def test_of_equal_scores_the_first_are_chosen(kind: type[Router]) -> None:
    for n in (3, 8, 64, 300):  # kernels choose in other ways when there are many
        router = kind(2, n, 3)
        router.linear.weight.data.zero_()
        assert router(randn(40, 2)).experts.tolist() == [[0, 1, 2]] * 40
    router.linear.weight.data[[7, 200, 250, 299]] = 1.0
    assert router(torch.ones(5, 2)).experts.tolist() == [[7, 200, 250]] * 5


@pytest.mark.parametrize("kind", [SoftmaxRouter, SigmoidRouter])
def test_of_equal_groups_the_first_are_kept(kind: type[Router]) -> None:
    router = kind(2, 12, 4, groups=ExpertGroups(4, 2, best=1))
    router.linear.weight.data.zero_()
    assert router(torch.ones(2, 2)).experts.tolist() == [[0, 1, 2, 3]] * 2
    router.linear.weight.data[[4, 11]] = 1.0
    assert router(torch.ones(1, 2)).experts.tolist() == [[4, 11, 3, 5]]


def test_a_correction_chooses_and_does_not_weigh() -> None:
    router = random(SigmoidRouter(M, N, 2, normalize=True)).double()
    x = randn(6, M).double()
    router.correction.data.zero_()
    router.correction.data[5] = 10.0
    weights, experts = router(x)
    assert (experts == 5).any(-1).all()
    scores = (x @ router.linear.weight.T).sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_a_group_below_zero_is_still_a_group() -> None:
    """Corrected scores may be negative: those of groups that are not kept must not win as zeros."""
    router = SigmoidRouter(2, 4, 2, groups=ExpertGroups(2, 1, best=2))
    router.linear.weight.data.zero_()
    router.correction.data.copy_(torch.tensor([-3.0, -4.0, -9.0, -9.0]))
    assert router(torch.ones(1, 2)).experts.tolist() == [[0, 1]]


def dense(moe: Any, x: Tensor) -> Tensor:
    """Every expert on every token, differentiable; the choice is the router's own."""
    weights, experts = moe.router(x)
    every = torch.zeros(len(x), N, dtype=x.dtype).scatter(1, experts, weights)
    return sum(every[:, e, None] * moe.experts[e](x) for e in range(N)) + moe.shared(x)


def gradients(run: Any, moe: Any, x: Tensor, towards: Tensor) -> dict[str, Tensor]:
    """Of the tokens, the router and the experts, for each draw of tokens; 0 where there is none."""
    found: dict[str, list[Tensor]] = {}
    for draw, loss in zip(x, towards, strict=True):
        module, tokens = copy.deepcopy(moe), draw.clone().requires_grad_()
        (run(module, tokens) * loss).sum().backward()
        for key, p in (("x", tokens), *module.named_parameters()):
            found.setdefault(key, []).append(torch.zeros_like(p) if p.grad is None else p.grad)
    return {key: torch.stack(grads) for key, grads in found.items()}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", ROUTERS)
def test_gradients(name: str) -> None:
    """Against autograd through every expert on every token, in fp64."""
    moe, x, towards = build(name, shared=True), randn(6, 12, M), randn(6, 12, M, seed=7)
    orders = (dense, lambda m, x: torch.cat([dense(m, row[None]) for row in x]))
    mine = gradients(lambda m, x: m(x), moe, x, towards)
    plain = [gradients(run, moe, x, towards) for run in orders]
    ref = gradients(dense, moe.double(), x.double(), towards.double())
    assert all(mine[key].any() for key in ("x", "router.linear.weight", "shared.up.weight"))
    for key, got in mine.items():
        assert_close_rule(got, [p[key] for p in plain], ref[key], GRADIENT, key)


def test_an_expert_that_nobody_chose_has_no_gradient() -> None:
    router = SoftmaxRouter(2, 3, 1)
    router.linear.weight.data.copy_(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    moe = MoE(router, [SwiGLU(2, 3) for _ in range(3)])
    moe(torch.ones(1, 4, 2)).sum().backward()
    assert [e.up.weight.grad is None for e in moe.experts] == [True, True, False]


def test_the_correction_has_no_gradient_and_is_loaded() -> None:
    router = SigmoidRouter(M, N, 2)
    assert not router.correction.requires_grad
    assert set(router.state_dict()) == {"linear.weight", "correction"}
    router.requires_grad_(True)
    router(randn(3, M)).weights.sum().backward()
    assert router.correction.grad is None


def test_a_slot_of_garbage_stays_alone() -> None:
    """A slot that holds nothing may hold anything, and routes to somebody."""
    for name in ROUTERS:
        moe, x = build(name), randn(1, 5, M)
        want = moe(x)
        for bad in (float("nan"), float("inf"), 1e30):
            x[0, 2] = bad
            got = moe(x)
            keep = [0, 1, 3, 4]
            torch.testing.assert_close(got[0, keep], want[0, keep])
        x[0, 2] = float("nan")
        assert moe(x)[0, 2].isnan().all()


@pytest.mark.parametrize("kind", [SoftmaxRouter, SigmoidRouter])
def test_routing_is_in_fp32_whatever_the_dtype(kind: type[Router]) -> None:
    """Two logits that bfloat16 cannot tell apart: the second expert is the better one."""
    router = kind(2, 2, 1).to(torch.bfloat16)
    router.linear.weight.data.copy_(torch.tensor([[1.0, 0.0], [1.0, 2**-9]]))
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    assert len(set((x @ router.linear.weight.T)[0].tolist())) == 1
    weights, experts = router(x)
    assert experts.tolist() == [[1]]
    assert weights.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert router.float()(x.float()).experts.tolist() == [[1]]


def test_autocast_keeps_the_dtype_of_the_residual_path() -> None:
    moe, x = build(shared=True), randn(1, 3, M)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.float32
    assert float((y - moe(x)).detach().abs().max()) < 0.1 * float(moe(x).detach().abs().max())


def clipped(x: Tensor, layer: ClippedSwiGLU) -> Tensor:
    parts = {"gate": layer.gate, "up": layer.up, "down": layer.down}
    weights = {k: rows_of(m.weight) for k, m in parts.items()}
    biases = {k: rows_of(m.bias) for k, m in parts.items()}
    rows = [oracle.clipped_swiglu(r, weights, biases, layer.limit, layer.alpha) for r in rows_of(x)]
    return torch.tensor(rows, dtype=torch.float64)


def plainly_clipped(x: Tensor, layer: ClippedSwiGLU) -> Tensor:
    g, u = x @ layer.gate.weight.T + layer.gate.bias, x @ layer.up.weight.T + layer.up.bias
    g, u = torch.where(g > layer.limit, layer.limit, g), u.clip(-layer.limit, layer.limit)
    return (
        g * (1 / (1 + torch.exp(-layer.alpha * g))) * (u + 1) @ layer.down.weight.T
        + layer.down.bias
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 12.0])
def test_clipped(dtype: torch.dtype, scale: float) -> None:
    layer = random(ClippedSwiGLU(M, HIDDEN, limit=3.0, alpha=1.5)).to(dtype)
    x = (scale * randn(20, M)).to(dtype)
    with torch.no_grad():
        assert_close_rule(layer(x), plainly_clipped(x, layer), clipped(x, layer))
        g, u = layer.gate(x), layer.up(x)
    if scale > 10:  # every edge is met: both of up, and gate above and far below
        assert (g > 3).any()
        assert (g < -3).any()
        assert (u > 3).any()
        assert (u < -3).any()


WRONG: dict[str, tuple[str, Any]] = {
    "no renormalization": (
        "softmax over the chosen, bias",
        lambda r: setattr(r, "normalize", False),
    ),
    "softmax over the chosen instead of all": (
        "softmax over all",
        lambda r: setattr(r, "normalize", True),
    ),
    "no bias": ("softmax over the chosen, bias", lambda r: r.linear.bias.data.zero_()),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_routers_fail(mistake: str) -> None:
    name, spoil = WRONG[mistake]
    moe, x = build(name), randn(4, 6, M)
    with torch.no_grad():
        plain, want = plain_ones(moe, x), written_out(moe, x)
        assert_close_rule(moe(x), plain, want)
        spoil(moe.router)
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(moe(x), plain, want)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: SoftmaxRouter(0, 4, 1), ArgumentError, r"SoftmaxRouter\(dim=0, experts=4, k=1\)"),
        (lambda: SigmoidRouter(2, 4, 0), ArgumentError, "k=0.*at least 1"),
        (lambda: SoftmaxRouter(2, 4, 5), ArgumentError, "k is 5; it must be at most the number of"),
        (lambda: SoftmaxRouter(2, 4, 1, scale=0.0), ArgumentError, "scale is 0.0; it must be a"),
        (lambda: SoftmaxRouter(2, 4, 1, scale="2"), ArgumentTypeError, "scale is str"),
        (
            lambda: SoftmaxRouter(2, 6, 1, groups=ExpertGroups(4, 2)),
            ArgumentError,
            "6 experts cannot be in ExpertGroups",
        ),
        (
            lambda: SigmoidRouter(2, 6, 1, groups=ExpertGroups(6, 2, best=2)),
            ArgumentError,
            "at least best",
        ),
        (
            lambda: SigmoidRouter(2, 8, 5, groups=ExpertGroups(4, 2)),
            ArgumentError,
            "k is 5; ExpertGroups.*allows a token at most 4 of 8",
        ),
        (lambda: ExpertGroups(0, 1), ArgumentError, "each must be at least 1"),
        (lambda: ExpertGroups(2, 3), ArgumentError, "topk at most count, 2"),
        (lambda: ExpertGroups(2, 1, best=0), ArgumentError, "best=0"),
        (
            lambda: MoE(SoftmaxRouter(2, 4, 1), [SwiGLU(2, 3)] * 3),
            ArgumentError,
            "for 4 experts, but experts has 3",
        ),
        (lambda: ClippedSwiGLU(2, 3, limit=-1.0), ArgumentError, "limit is -1.0"),
        (lambda: ClippedSwiGLU(2, 3, alpha=float("nan")), ArgumentError, "alpha is nan"),
    ],
)
def test_it_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
