"""Every kernel, on every call that it does not refuse, is the definition: output, lse, and all gradients of both."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops.softmax import dispatch, pieces, tiled
from regard.ops.softmax.call import Kernel
from tests.ops.softmax.cases import CONTRACT, Case, Made, make
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# the same kernels with tiles so small that every case has many
KERNELS = [*((kernel, False) for kernel in dispatch.KERNELS)] + [
    (kernel, True) for kernel in dispatch.KERNELS if kernel.name in ("tiled", "sdpa")
]
IDS = [kernel.name + "-small-tiles" * small for kernel, small in KERNELS]
SLOW = {"flex": 8}  # torch traces each call anew on CPU: every eighth case there


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    chosen, small = request.param
    if small:
        monkeypatch.setattr(tiled, "ROWS", 8)
        monkeypatch.setattr(tiled, "KEYS", 4)
        monkeypatch.setattr(tiled, "TILE", 512)
        monkeypatch.setattr(pieces, "ROWS", 8)
        monkeypatch.setattr(pieces, "KEYS", 4)
        monkeypatch.setattr(pieces, "LONG", 2)
        monkeypatch.setattr(pieces, "SMALL", 2)
    return chosen


def grid() -> list[Any]:
    cells = []
    for (chosen, small), name in zip(KERNELS, IDS, strict=True):
        for i, case in enumerate(CONTRACT):
            if i % SLOW.get(chosen.name, 1):
                continue
            # two dtypes a case, in turn, so that every kernel sees every option in every dtype
            for dtype in {DTYPES[i % 4], DTYPES[(i + 1 + i // 4) % 4]}:
                cells.append(
                    pytest.param((chosen, small), case, dtype, id=f"{name}-{case}-{dtype}")
                )
    return sorted(cells, key=lambda cell: str(cell.id))


@pytest.mark.parametrize("kernel, case, dtype", grid(), indirect=["kernel"])
def test_forward(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype)
    call = made.call(wants_lse=True)
    if kernel.why_not(call):
        return  # what it refuses is said by the tests of that kernel
    out, lse, *_ = kernel.run(call)
    assert lse is not None
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    outs, lses, right = answers(case, dtype)
    assert_close_rule(out, outs, right[0], what="out")
    assert_close_rule(lse, [x.to(lse.dtype) for x in lses], right[1], what="lse")
    blind = ~made.visible.any(-1)
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    alone = kernel.run(made.call()).out
    assert_close_rule(alone, outs, right[0], what="out without lse")


@pytest.mark.parametrize(
    "kernel, case, dtype",
    [cell for cell in grid() if cell.values[0][0].name != "flex"],
    indirect=["kernel"],
)
def test_gradients(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype, gradient=True)
    call = made.call(wants_lse=True)
    if kernel.why_not(call):
        return
    out, lse, *_ = kernel.run(call)
    assert lse is not None
    found = gradients(made, out, lse)
    several, right = gradient_answers(case, dtype)
    names = [
        "q",
        "k",
        "v",
        *["sink"] * (made.sink is not None),
        *["bias"] * (made.table is not None),
    ]
    for i, name in enumerate(names):
        assert found[i].dtype == made.leaves[i].dtype
        plain = [g[i] for g in several]
        assert_close_rule(found[i], plain, right[i], GRADIENT, what=f"gradient of {name}")
    blind = ~made.visible.any(-1)
    assert torch.equal(found[0][blind], torch.zeros_like(found[0][blind]))


@cache
def answers(
    case: Case, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]:
    """out and lse of plain math, and of the definition in float64."""
    low, high = make(case, dtype), make(case, torch.float64, like=dtype)
    outs, lses = zip(*several_plains(low.q, low.k, low.v, **low.plain()), strict=True)
    return list(outs), list(lses), plain_attention(high.q, high.k, high.v, **high.plain())


@cache
def gradient_answers(
    case: Case, dtype: torch.dtype
) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """The gradients of the same."""
    low, high = (
        make(case, dtype, gradient=True),
        make(case, torch.float64, like=dtype, gradient=True),
    )
    several = several_plains(low.q, low.k, low.v, **low.plain())
    right = plain_attention(high.q, high.k, high.v, **high.plain())
    return [gradients(low, *pair) for pair in several], gradients(high, *right)


def gradients(made: Made, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Of a number that every output and every lse moves differently."""
    draw = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=draw, dtype=torch.float64).bfloat16().to(out.dtype)
    d_lse = torch.randn(lse.shape, generator=draw, dtype=torch.float64).bfloat16().to(lse.dtype)
    see = ~lse.isneginf()
    loss = (out * d_out).sum().to(lse.dtype) + (lse[see] * d_lse[see]).sum()
    found = torch.autograd.grad(loss, made.leaves, allow_unused=True, retain_graph=True)
    return tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(found, made.leaves, strict=True)
    )


@pytest.mark.parametrize(
    "kernel",
    [*zip(dispatch.KERNELS, [False] * 9, strict=False)],
    ids=lambda x: x[0].name,
    indirect=True,
)
def test_a_visible_nan_is_never_laundered(kernel: Kernel) -> None:
    for where in ("q", "k", "v"):
        made = make(Case("none"), torch.float32)
        getattr(made, where)[0, 0, 3, 1] = math.nan
        call = made.call()
        if not kernel.why_not(call):
            assert kernel.run(call).out[0, 0].isnan().any()


@pytest.mark.parametrize(
    "kernel",
    [*zip(dispatch.KERNELS, [False] * 9, strict=False)],
    ids=lambda x: x[0].name,
    indirect=True,
)
def test_masked_garbage_never_arrives(kernel: Kernel) -> None:
    made = make(Case("causal", (1, 2, 2, 20, 24, 8, 8)), torch.float32)
    made.options["q_positions"] = torch.arange(20)[None]
    right = kernel.run(made.call()).out
    for garbage in (math.nan, math.inf, 1e38):
        made.k[:, :, 20:], made.v[:, :, 20:] = garbage, garbage
        call = made.call()
        if not kernel.why_not(call):
            torch.testing.assert_close(kernel.run(call).out, right, rtol=1e-5, atol=1e-6)


def test_every_case_is_run_by_several_kernels() -> None:
    for case in CONTRACT:
        call = make(case, torch.float32).call()
        able = [kernel.name for kernel in dispatch.KERNELS if not kernel.why_not(call)]
        assert {"tiled", "reference"} <= set(able), f"{case}: {able}"
