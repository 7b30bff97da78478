"""Scores of any size: output and gradients of every kernel under the error rule, for inputs from
1e-4 to 1e4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import KernelRefusal
from regard.ops.cpu.library import has_kernels
from regard.ops.softmax import dispatch, gemm, tiled
from regard.ops.softmax.call import SMALL_SCORE_BOUND, make_call
from tests.kernels import require_backend
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule

SHAPES = [(2, 4, 2, 19, 33, 8), (1, 2, 2, 17, 17, 80), (1, 2, 1, 40, 70, 16)]  # B H G T S D
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("auto", *(kernel.name for kernel in dispatch.KERNELS))


def draw(seed: int, shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> list[Tensor]:
    B, H, G, T, S, D = shape
    make = torch.Generator().manual_seed(seed)
    sizes = ((B, H, T, D), (B, G, S, D), (B, G, S, D))
    return [(torch.randn(x, generator=make, dtype=torch.float64) * scale).to(dtype) for x in sizes]


def weights_of(out: Tensor) -> Tensor:
    """Numbers that every output is multiplied with, the same in all dtypes."""
    make = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=make, dtype=torch.float64).bfloat16().to(out.dtype)


def leaves_of(inputs: list[Tensor], dtype: torch.dtype, *, gradient: bool) -> list[Tensor]:
    return [x.to(dtype).clone().requires_grad_(gradient) for x in inputs]


def results(out: Tensor, leaves: list[Tensor], *, gradient: bool) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    if not gradient:
        return [out]
    loss = (out * weights_of(out)).sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves, retain_graph=True)]


def plains(inputs: list[Tensor], visible: Tensor | None, *, gradient: bool) -> list[list[Tensor]]:
    """Plain math in eight orders; where it overflows in half precision, in fp32, rounded once."""
    own = inputs[0].dtype
    for dtype in (own, torch.float32):
        leaves = leaves_of(inputs, dtype, gradient=gradient)
        outs = several_plains(*leaves, visible=visible, n=8)
        found = [results(out, leaves, gradient=gradient) for out, _ in outs]
        if all(bool(x.isfinite().all()) for one in found for x in one):
            break
    return [[x.to(own) for x in one] for one in found]


def assert_rule_if_served(
    backend: str, inputs: list[Tensor], *, causal: bool, gradient: bool
) -> bool:
    """By the rule, if the kernel does not refuse the call; whether it ran."""
    T, S = inputs[0].shape[2], inputs[1].shape[2]
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    leaves = leaves_of(inputs, inputs[0].dtype, gradient=gradient)
    try:
        out = regard.attend(*leaves, mask=masks.Causal() if causal else None, backend=backend)
    except KernelRefusal:
        return False
    found = results(out, leaves, gradient=gradient)
    leaves = leaves_of(inputs, torch.float64, gradient=gradient)
    exact, _ = plain_attention(*leaves, visible=visible)
    right = results(exact, leaves, gradient=gradient)
    usual = plains(inputs, visible, gradient=gradient)
    for i, name in enumerate(("out", "d q", "d k", "d v")[: len(found)]):
        factor = GRADIENT if i else 2.0
        assert_close_rule(found[i], [x[i] for x in usual], right[i], factor, f"{backend} {name}")
    return True


CELLS = [
    (backend, dtype)
    for backend in NAMES
    for dtype in DTYPES
    if dtype != torch.float64 or backend not in ("cpu", "gemm")  # these have no fp64
    if backend != "triton"  # for GPUs; tests/ops/softmax/triton runs it in an interpreter
]


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("backend, dtype", CELLS, ids=str)
@settings(max_examples=12)
@given(st.floats(-4, 4), st.integers(0, 10**6), st.sampled_from(SHAPES), st.booleans())
def test_every_scale(
    backend: str, dtype: torch.dtype, power: float, seed: int, shape: tuple[int, ...], causal: bool
) -> None:
    require_backend(backend)
    inputs = draw(seed, shape, 10.0**power, dtype)
    if backend == "cpu":  # made for few queries
        inputs[0] = inputs[0][:, :, :6]
    ran = [assert_rule_if_served(backend, inputs, causal=causal, gradient=x) for x in (False, True)]
    assert ran[0]
    assert ran[1] or backend not in ("auto", "tiled", "reference")


@pytest.mark.parametrize("scale", [8.0, 100.0, 1e4])
def test_large_scores_have_their_gradients(scale: float) -> None:
    """The gradient of a row with one weight of 1 is 0; torch's CPU backward pass gives up to 1e29,
    or NaN.
    """
    for seed in range(3):
        assert assert_rule_if_served(
            "auto", draw(seed, SHAPES[1], scale, torch.float32), causal=False, gradient=True
        )
    q, k, v = draw(0, SHAPES[1], 1e4, torch.float32)
    leaves = leaves_of([q, k, v], torch.float32, gradient=True)
    regard.attend(*leaves).sum().backward()
    for x in leaves[:2]:
        assert x.grad is not None
        assert x.grad.eq(0).all()


def test_torchs_own_gradient_of_large_scores_fails_the_rule() -> None:
    """Negative control: without the refusal this suite fails."""
    inputs = draw(0, SHAPES[1], 100.0, torch.float32)
    leaves = leaves_of(inputs, torch.float32, gradient=True)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = results(op(*leaves, 0.0, False, scale=80**-0.5)[0], leaves, gradient=True)
    exact_leaves = leaves_of(inputs, torch.float64, gradient=True)
    right = results(plain_attention(*exact_leaves)[0], exact_leaves, gradient=True)
    usual = plains(inputs, None, gradient=True)
    for i, name in ((1, "d q"), (2, "d k")):
        with pytest.raises(AssertionError, match=f"{name} error"):
            assert_close_rule(found[i], [x[i] for x in usual], right[i], GRADIENT, name)


def test_where_the_borders_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small scores stay with torch's kernel; larger ones go to compiled products, the largest to
    tiles.
    """
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)

    def chosen(largest: float, T: int = 256) -> str:
        q = torch.zeros(2, 8, T, 64)
        q[1, 3, 5, 7] = largest
        k = torch.zeros(2, 8, T, 64)
        k[1, 3, 2, 7] = 8.0  # times 1/sqrt(64) is 1
        k[0, 2, 2, 7] = 1e6  # of another head
        return dispatch.choose_kernel(make_call(q.requires_grad_(), k, k, mask=masks.Causal()))[
            0
        ].name

    assert chosen(SMALL_SCORE_BOUND * 0.999) == "sdpa"
    compiled = {"gemm", "tiled"} if not has_kernels() else {"gemm"}
    assert chosen(SMALL_SCORE_BOUND * 1.001) in compiled
    assert chosen(gemm.MAX_TRAINING_SCORE * 0.999) in compiled
    assert chosen(gemm.MAX_TRAINING_SCORE * 1.001) == "tiled"
    assert chosen(SMALL_SCORE_BOUND * 1.001, T=32) == "reference"
    with torch.no_grad():
        assert chosen(1e6) == "sdpa"


def test_the_bound_is_a_bound_and_is_tight_for_vectors_in_one_direction() -> None:
    q, k, v = draw(0, (2, 6, 2, 9, 13, 5), 3.0, torch.float64)
    scores = (q @ k.repeat_interleave(3, 1).mT).abs().amax().item() * 0.3
    assert scores <= make_call(q, k, v, scale=-0.3).score_bound <= 9 * scores
    line = torch.linspace(-1, 1, 5, dtype=torch.float64).expand_as(k)
    found = make_call(line[:, :1], line[:, :1] * 7, v[:, :1]).score_bound
    assert found == pytest.approx(7 * 5**-0.5 * float(line[0, 0, 0].square().sum()), rel=1e-12)
    assert make_call(q[:, :, :0], k, v).score_bound == 0
    half = torch.full((1, 1, 1, 4), 6e4, dtype=torch.float16)  # its squares overflow in fp16
    assert make_call(half, half, half, scale=1.0).score_bound == pytest.approx(4 * 6e4**2, rel=1e-2)


def test_a_large_bias_counts_where_a_row_sees_nothing_better() -> None:
    q, k, v = (x * 0.1 for x in draw(0, (1, 2, 2, 20, 20, 8), 1.0, torch.float32))
    q.requires_grad_()
    reason = "its gradient is accurate for scores up to 6; here they may reach 1e+04"
    table = torch.zeros(1, 1, 20, 20)
    table[..., 10:] = -1e9  # beside keys without a bias it is no row's largest
    sdpa = next(x for x in dispatch.KERNELS if x.name == "sdpa")
    assert sdpa.why_not(make_call(q, k, v, bias=table)) == []
    table[:, :, 3] = -1e4
    assert sdpa.why_not(make_call(q, k, v, bias=table)) == [reason]
    seen = torch.ones(20, 20, dtype=torch.bool)
    seen[3] = False
    assert sdpa.why_not(make_call(q, k, v, bias=table, mask=masks.Dense(seen))) == []
    assert sdpa.why_not(make_call(q, k, v, bias=biases.ALiBi(2), mask=masks.Causal())) == []


@pytest.mark.full
def test_a_compiled_graph_cannot_look_and_takes_the_definition_for_gradients() -> None:
    torch._dynamo.reset()
    inputs = draw(0, SHAPES[1], 1e4, torch.float32)
    leaves = leaves_of(inputs, torch.float32, gradient=True)
    attend = torch.compile(regard.attend, backend="aot_eager", fullgraph=True)
    for x in results(attend(*leaves), leaves, gradient=True)[1:3]:
        assert x.eq(0).all()
    with pytest.raises(Exception, match="small scores only, and they cannot be read here"):
        attend(*leaves, backend="sdpa")


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sink": True}, {"window": 1}], ids=str)
def test_tiles_give_exact_zeros_where_a_row_is_certain(
    options: dict[str, Any], pieces: int
) -> None:
    """One weight of 1: the terms of p (dp - sum p dp) are the same numbers, and cancel; one piece
    of keys or several.
    """
    kernel = tiled.TiledKernel(
        tiled.TileSizes(keys=4, tile=64) if pieces > 1 else tiled.DEFAULT_TILE_SIZES
    )
    q, k, v = draw(0, SHAPES[0], 1e3, torch.float32)
    given: dict[str, Any] = {"mask": masks.Causal()}
    if "window" in options:
        given["mask"] = masks.Causal() & masks.Window(1)
    elif "sink" in options:
        given["sink"] = torch.randn(4)
    else:
        given.update(options)
    leaves = leaves_of([q, k, v], torch.float32, gradient=True)
    exact = leaves_of([q, k, v], torch.float64, gradient=True)
    if "sink" in given:
        right_given = {**given, "sink": given["sink"].double()}
    else:
        right_given = given
    found = results(kernel.run(make_call(*leaves, **given)).out, leaves, gradient=True)
    right = results(regard.attend(*exact, **right_given, backend="reference"), exact, gradient=True)
    for x, y in zip(found[1:3], right[1:3], strict=True):
        if "softcap" not in options:
            assert x.eq(0).all()
        assert float((x - y).abs().max()) <= 1e-4 * float(y.abs().max()) + 1e-30
