"""The Triton kernels on a GPU: `pytest -m gpu tests/ops/softmax/triton`, in a few minutes."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import biases, masks
from regard.ops.softmax.triton.kernel import TritonKernel
from tests.ops.triton_compiler import run_contract

CAUSAL = masks.Causal()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_contract_holds_on_the_gpu() -> None:
    assert "skipped" not in run_contract("softmax", REGARD_TRITON_DEVICE="cuda")


MASKS = {
    "causal": CAUSAL,
    "window": CAUSAL & masks.Window(300),
    "sinks": CAUSAL & (masks.Window(300) | masks.Sinks(4)),
    "prefix": CAUSAL | masks.Prefix(100),
    "dilated": CAUSAL & masks.Dilated(64, 3),
    "full": masks.Full(),
}


@pytest.mark.parametrize("D, E", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_large_calls_are_the_reference(name: str, dtype: torch.dtype, D: int, E: int) -> None:
    """Real block sizes, which the small contract does not fill."""
    torch.manual_seed(0)
    B, H, G, T, S = 2, 4, 2, 777, 1029
    sizes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    leaves = [torch.randn(x, device="cuda").to(dtype).requires_grad_() for x in sizes]
    sink = torch.randn(H, device="cuda", dtype=dtype, requires_grad=True)
    slopes = torch.rand(H, device="cuda").requires_grad_()
    found = []
    for backend, wide in (("triton", False), ("reference", False), ("reference", True)):
        of_dtype = torch.float64 if wide else dtype
        q, k, v, s = (x.detach().to(of_dtype).requires_grad_() for x in (*leaves, sink))
        bias = biases.ALiBi(slopes=slopes, symmetric=True)
        out = regard.attend(
            q, k, v, mask=MASKS[name], softcap=20.0, sink=s, bias=bias, backend=backend
        )
        draw = torch.Generator("cuda").manual_seed(1)
        d_out = torch.randn(out.shape, device="cuda", generator=draw).to(dtype).to(of_dtype)
        found.append((out, *torch.autograd.grad(out, (q, k, v, s, slopes), d_out)))
    for i, (ours, plain, right) in enumerate(zip(*found, strict=True)):
        x, low, high = (y.detach().double() for y in (ours, plain, right))
        rounding = torch.finfo(ours.dtype).eps * high.abs().max()
        allowed = (3 if i else 2) * (low - high).abs().max() + 2 * rounding
        assert (x - high).abs().max() <= allowed, ("out", "q", "k", "v", "sink", "slopes")[i]


def test_nothing_synchronizes_after_the_first_call() -> None:
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = CAUSAL & masks.Window(100)
    regard.attend(q, k, v, mask=mask, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = regard.attend(q, k, v, mask=mask, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


def test_auto_takes_flash_for_a_triangle_and_triton_for_the_rest() -> None:
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert regard.plan(q, k, v, mask=CAUSAL).kernel == "sdpa"
    assert regard.plan(q, k, v, mask=CAUSAL & masks.Window(9)).kernel == "triton"
    assert TritonKernel().why_not(regard.ops.softmax.call.make_call(q, k, v)) == []
