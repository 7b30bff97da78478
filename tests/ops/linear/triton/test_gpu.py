"""The recurrences in Triton on a GPU: `pytest -m gpu tests/ops/linear/triton`, in a few minutes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.linear import gated_delta_rule, gated_linear
from tests.ops.triton_compiler import run_contract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_contract_holds_on_the_gpu() -> None:
    assert "passed" in run_contract("linear", REGARD_TRITON_DEVICE="cuda")


@pytest.mark.parametrize("D, E", [(64, 64), (128, 128), (128, 256), (256, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["head", "channel", "delta by head", "delta by channel"])
def test_long_texts_are_the_form_in_float64(kind: str, dtype: torch.dtype, D: int, E: int) -> None:
    """Real sizes of chunks, which the small contract does not fill."""
    torch.manual_seed(0)
    B, H, N, T = 2, 4, 4, 777
    q, v = torch.randn(B, H, T, D, device="cuda"), torch.randn(B, N, T, E, device="cuda")
    k = F.normalize(torch.randn(B, 2, T, D, device="cuda"), dim=-1)
    g = -torch.randn(B, N, T, D, device="cuda").exp() / 10
    beta = torch.rand(B, N, T, device="cuda")
    g = g if "channel" in kind else g[..., :1]
    drawn = [x.to(dtype) for x in (q, k, v, g, beta)]
    found = []
    for form, of_dtype in (("triton", dtype), ("chunk", dtype), ("chunk", torch.float64)):
        q, k, v, g, beta = leaves = [x.to(of_dtype).requires_grad_() for x in drawn]
        if "delta" in kind:
            decay = g if "channel" in kind else g[..., 0]
            out, (S,) = gated_delta_rule(q, k, v, beta, decay, form=form)
        else:
            out, (S,) = gated_linear(q, k, v, g, form=form)
            leaves.pop()
        weight = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda"))
        grads = torch.autograd.grad((out * weight.to(dtype).to(out.dtype)).sum() + S.sum(), leaves)
        found.append((out, S, *grads))
    for i, (ours, plain, right) in enumerate(zip(*found, strict=True)):
        x, low, high = (y.detach().double() for y in (ours, plain, right))
        # products of half precision read 10 bits of fraction, as fp16 has
        rounding = max(torch.finfo(dtype).eps, 2.0**-10 if dtype.itemsize == 2 else 0.0)
        allowed = (3 if i > 1 else 2) * (low - high).abs().max() + 2 * rounding * high.abs().max()
        assert (x - high).abs().max() <= allowed, (i, ("out", "S", "q", "k", "v", "g", "beta")[i])


def test_nothing_synchronizes() -> None:
    q = torch.randn(1, 2, 500, 64, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(1, 2, 500, 1, device="cuda")
    gated_linear(q, q, q, g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = gated_linear(q, q, q, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
