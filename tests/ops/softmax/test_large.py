"""Numbers so large that their products are infinite: behind a mask they change nothing, on every
kernel, in either direction.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.ops.softmax.call import make_call
from regard.ops.softmax.dispatch import KERNELS
from tests.kernels import require_backend

B, H, T, S, D = 1, 2, 17, 40, 16
HIDDEN = slice(30, S)
MASK = masks.Padding.right([30])
BACKENDS = ("auto", "cpu", "sdpa", "tiled", "flex", "gemm", "reference")


HUGE = [2e17, -2e17, 1e24, -1e24, 3e29, -3e29, 3e38, -3e38, math.inf, math.nan]


def inputs(size: float, *, gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Large queries over small keys: scores are as ever, but those of hidden keys of this size
    overflow.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, generator=draw) for n in (T, S, S))
    q, k = q * 1e16, k * 1e-16
    k[:, :, HIDDEN], v[:, :, HIDDEN] = size, -size
    return tuple(x.requires_grad_(gradient) for x in (q, k, v))  # type: ignore[return-value]


@pytest.mark.full(keep=15)
@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_behind_a_mask(backend: str, size: float) -> None:
    rows = slice(0, 4) if backend == "cpu" else slice(None)
    found = []
    for hidden in (0.0, size):
        q, k, v = inputs(hidden)
        try:
            found.append(regard.attend_partial(q[:, :, rows], k, v, mask=MASK, backend=backend))
        except regard.KernelRefusal as refused:
            pytest.skip(str(refused))
    (out, lse), (other, other_lse) = found
    assert other.isfinite().all()
    assert torch.allclose(other, out, rtol=1e-4, atol=1e-5)
    assert torch.allclose(other_lse, lse, rtol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_who_never_refuses(backend: str) -> None:
    """The others multiply what is masked by 0, and refuse."""
    require_backend(backend)
    kernel = next(x for x in KERNELS if x.name == backend)
    for size in HUGE:
        q, k, v = inputs(size)
        rows = slice(0, 4) if backend == "cpu" else slice(None)
        assert kernel.why_not(make_call(q[:, :, rows], k, v, mask=MASK, wants_lse=True)) == []


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("size", [2e17, -1e24, 3e29, -3e38, math.nan])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "gemm", "reference"])
def test_gradients_behind_a_mask(backend: str, size: float) -> None:
    found: list[tuple[Any, ...]] = []
    for hidden in (0.0, size):
        given = inputs(hidden, gradient=True)
        try:
            out = regard.attend(*given, mask=MASK, backend=backend)
        except regard.KernelRefusal as refused:
            pytest.skip(str(refused))
        found.append(torch.autograd.grad(out.square().sum(), given))
    for right, got in zip(*found, strict=True):
        assert got.isfinite().all()
        assert torch.allclose(got, right, rtol=1e-3, atol=float(right.abs().max()) * 1e-4)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("where", [0, 5, -1])
def test_what_counts_as_finite(name: str, where: int) -> None:
    """Up to 1e17 in either direction: D products of two such numbers are still below the largest of
    fp32.
    """
    for size, fits in (
        (9e16, True),
        (-9e16, True),
        (2e17, False),
        (-2e17, False),
        (math.inf, False),
        (-math.inf, False),
        (math.nan, False),
    ):
        given = dict(zip("qkv", torch.randn(3, 1, 1, 20, 8), strict=True))
        given[name].view(-1)[where] = size
        call = make_call(**given)
        assert call.finite is fits, size
        assert call.all_finite(name) is fits
        assert call.all_finite(*set("qkv") - {name})
    assert torch.finfo(torch.float32).max > 9e16 * 9e16 * 512
