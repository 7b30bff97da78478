"""Every kernel, on every call that it does not refuse, is the definition: output, lse, and all
gradients of both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops.softmax import dispatch, lowering, sdpa, tiled
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import Kernel
from tests.kernels import require_backend
from tests.ops.softmax.cases import CONTRACT, Case, Made, make
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule

HALVES = (torch.bfloat16, torch.float16)
ALL = (torch.float64, torch.float32, *HALVES)
DTYPES = {"cpu": ALL[1:], "gemm": ALL[1:]}  # the compiled kernels have no fp64; the others have all
NO_GRADIENT = {"cpu", "flex"}
# the same kernels with tiles so small that every case has many
KERNELS = [
    # the kernel "triton" needs a GPU, or an interpreter in a process of its own: tests/.../triton
    *((kernel, False) for kernel in dispatch.KERNELS if kernel.name != "triton"),
    (tiled.TiledKernel(tiled.TileSizes(8, 4, 512)), True),
    (sdpa.SdpaKernel(lowering.BlockSizes(8, 4, 2, 2)), True),
]
IDS = [kernel.name + "-small-tiles" * small for kernel, small in KERNELS]
SLOW = {"flex": 8}  # torch traces each call anew on CPU: every eighth case there
LEAST = {
    "cpu": 100,
    "sdpa": 95,
    "sdpa-small-tiles": 95,
    "tiled": 105,
    "tiled-small-tiles": 105,
    "flex": 15,
    "gemm": 85,
    "reference": 105,
}
LEAST_GRADIENTS = {
    "sdpa": 80,
    "sdpa-small-tiles": 80,
    "tiled": 105,
    "tiled-small-tiles": 105,
    "gemm": 85,
    "reference": 105,
}
"""How many cells each kernel must run: one that starts to refuse its calls fails here, where its
cells would be skipped.
"""


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Kernel:
    chosen, _ = request.param
    return chosen


def fitting(name: str, case: Case, i: int, *, gradient: bool) -> Case:
    """The case in the form that a kernel is made for, where it would refuse the case for its size
    or for what learns.
    """
    B, H, G, T, S, D, E = case.shape
    if name == "cpu":  # decoding: one query, or a few
        case = replace(case, shape=(B, H, G, min(T, 5 if i % 2 else 1), S, D, E))
    if gradient and name in ("sdpa", "gemm"):
        case = replace(case, fixed_bias=bool(case.bias))
    if gradient and name == "sdpa":  # its gradient is right for small scores
        case = replace(case, size=case.size * 0.75)
    return case


def grid(*, gradient: bool = False) -> list[Any]:
    cells = []
    for (chosen, small), name in zip(KERNELS, IDS, strict=True):
        if gradient and chosen.name in NO_GRADIENT:
            continue
        dtypes = DTYPES.get(chosen.name, ALL)
        n = len(dtypes)
        for i, case in enumerate(CONTRACT):
            if i % SLOW.get(chosen.name, 1):
                continue
            fit = fitting(chosen.name, case, i, gradient=gradient)
            # two dtypes a case, in turn, so that every kernel sees every option in every dtype
            for dtype in {dtypes[i % n], dtypes[(i + 1 + i // n) % n]}:
                cells.append(pytest.param((chosen, small), fit, dtype, id=f"{name}-{fit}-{dtype}"))
    return sorted(cells, key=lambda cell: str(cell.id))


def reasons(kernel: Kernel, case: Case, dtype: torch.dtype, *, gradient: bool = False) -> list[str]:
    return kernel.why_not(make(case, dtype, gradient=gradient).call(wants_lse=True))


def skip_refused(kernel: Kernel, call: Call) -> None:
    """What a kernel refuses is skipped with its reasons, so that a cell that ran nothing does not
    pass.
    """
    if refused := kernel.why_not(call):
        pytest.skip(f"{kernel.name}: {'; '.join(refused)}")


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", IDS)
def test_each_kernel_runs_its_cells(name: str, gradient: bool) -> None:
    cells = [
        cell.values
        for cell in grid(gradient=gradient)
        if IDS[KERNELS.index(cell.values[0])] == name
    ]
    least = (LEAST_GRADIENTS if gradient else LEAST).get(name, 0)
    if not least:
        assert not cells
        pytest.skip(f"{name} has no gradient")
    require_backend(name)
    refused = [
        why for (kernel, _), *cell in cells if (why := reasons(kernel, *cell, gradient=gradient))
    ]
    ran = len(cells) - len(refused)
    assert ran >= least, f"{name} refuses {len(refused)} of {len(cells)} cells: {refused}"


def test_the_count_would_find_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control."""
    monkeypatch.setattr(type(KERNELS[IDS.index("tiled")][0]), "why_not", lambda self, call: ["no"])
    with pytest.raises(AssertionError, match="tiled refuses 114 of 114 cells"):
        test_each_kernel_runs_its_cells("tiled", gradient=False)


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("kernel, case, dtype", grid(), indirect=["kernel"])
def test_forward(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype)
    call = made.call(wants_lse=True)
    skip_refused(kernel, call)
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


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("kernel, case, dtype", grid(gradient=True), indirect=["kernel"])
def test_gradients(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype, gradient=True)
    call = made.call(wants_lse=True)
    skip_refused(kernel, call)
    out, lse, *_ = kernel.run(call)
    assert lse is not None
    assert_gradients(made, case, dtype, out, lse)


def assert_gradients(made: Made, case: Case, dtype: torch.dtype, out: Tensor, lse: Tensor) -> None:
    found = gradients(made, out, lse)
    several, right = gradient_answers(case, dtype)
    learned = made.table is not None and not case.fixed_bias
    names = ["q", "k", "v", *["sink"] * (made.sink is not None), *["bias"] * learned]
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


each_kernel = pytest.mark.parametrize(
    "kernel",
    [(kernel, False) for kernel in dispatch.KERNELS if kernel.name != "triton"],
    ids=lambda x: x[0].name,
    indirect=True,
)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@each_kernel
def test_a_visible_nan_is_never_laundered(kernel: Kernel, where: str) -> None:
    """Tiles and flex refuse every NaN, because they do not look where it stands."""
    require_backend(kernel.name)
    made = make(fitting(kernel.name, Case("none"), 1, gradient=False), torch.float32)
    getattr(made, where)[0, 0, 3, 1] = math.nan
    call = made.call()
    if kernel.name not in ("tiled", "flex"):
        assert kernel.why_not(call) == []
    skip_refused(kernel, call)
    assert kernel.run(call).out[0, 0].isnan().any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38], ids=str)
@each_kernel
def test_masked_garbage_never_arrives(kernel: Kernel, garbage: float) -> None:
    require_backend(kernel.name)
    T = 4 if kernel.name == "cpu" else 20
    made = make(Case("causal", (1, 2, 2, T, 24, 8, 8)), torch.float32)
    made.options["q_positions"] = torch.arange(20 - T, 20)[None]
    right = kernel.run(made.call()).out
    made.k[:, :, 20:], made.v[:, :, 20:] = garbage, garbage
    call = made.call()
    if kernel.selects:
        assert kernel.why_not(call) == []
    skip_refused(kernel, call)
    torch.testing.assert_close(kernel.run(call).out, right, rtol=1e-5, atol=1e-6)


def test_every_case_is_run_by_several_kernels() -> None:
    for case in CONTRACT:
        call = make(case, torch.float32).call()
        able = [kernel.name for kernel in dispatch.KERNELS if not kernel.why_not(call)]
        assert {"tiled", "reference"} <= set(able), f"{case}: {able}"
