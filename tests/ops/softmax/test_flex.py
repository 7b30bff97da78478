"""FlexAttention: its lowering, its refusals, and that nobody gets it on CPU without asking."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.ops.softmax import flex
from regard.ops.softmax.call import make_call
from regard.ops.softmax.flex import FlexKernel, block_mask
from regard.ops.softmax.reference import ReferenceKernel
from tests.ops.softmax.plain import refusal_of

KERNEL = FlexKernel()
refusal = partial(refusal_of, "flex")


def qkv(T: int = 20, S: int = 20, H: int = 2, D: int = 16, **kind: Any) -> list[Tensor]:
    return [torch.randn(1, H, n, D, **kind) for n in (T, S, S)]


def test_on_cpu_it_infers_when_it_is_asked_for() -> None:
    q, k, v = qkv()
    sink, mask = torch.randn(2), masks.Causal() & masks.Window(5)
    bias = (
        biases.ALiBi(2)
        + biases.T5Relative(torch.randn(32, 2))
        + biases.DenseBias(torch.randn(20, 20))
    )
    options = {"mask": mask, "bias": bias, "sink": sink, "softcap": 2.0}
    out = regard.attend(q, k, v, backend="flex", **options)
    torch.testing.assert_close(
        out, ReferenceKernel().run(make_call(q, k, v, **options)).out, rtol=1e-5, atol=1e-6
    )


def test_on_cpu_auto_never_takes_it() -> None:
    q, k, v = qkv(T=40, S=40)
    assert KERNEL.why_not(make_call(q, k, v, softcap=3.0)) == []
    plan = regard.plan(q, k, v, softcap=3.0)
    assert plan.kernel == "tiled"
    assert plan["flex"].reasons == ()


def test_a_tensor_that_wants_a_gradient_may_be_used_without_one() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    assert "no gradients on CPU" in refusal(q, k, v)
    with torch.no_grad():
        out = regard.attend(q, k, v, backend="flex")
    torch.testing.assert_close(out, regard.attend(q, k, v, backend="reference"))


def test_refusals() -> None:
    q, k, v = qkv()
    assert "flex (no dropout)" in refusal(q, k, v, dropout=0.1)
    bad = v.clone()
    bad[0, 0, 0, 0] = torch.nan
    assert "a NaN or infinity behind a mask would leak through 0 x NaN" in refusal(q, k, bad)
    assert "nothing to compute (B 1, T 20, S 0, E 16)" in refusal(q, k[:, :, :0], v[:, :, :0])
    with regard.Trace("scores", missing="ignore"):
        assert "does not expose ['scores']" in refusal(q, k, v)
    long = qkv(2**15, 2**15, D=1)
    assert "would hold 16.0 GiB of scores on CPU; limit 4.00 GiB" in refusal(*long)
    x = torch.empty(1, 1, 16, 16, device="meta")
    meta = regard.ops.softmax.call.Call(
        x, x, x, masks.Full(), None, 1.0, None, None, 0.0, regard.Span(0, 16), regard.Span(0, 16)
    )
    assert KERNEL.why_not(meta) == ["runs on cuda and cpu, not on meta"]


def test_what_the_generated_kernel_does_not_take() -> None:
    def why(
        T: int = 256, D: int = 64, dtype: torch.dtype = torch.float32, **options: Any
    ) -> list[str]:
        return flex._cuda_reasons(make_call(*qkv(T, T, D=D, dtype=dtype), **options))

    assert why() == []
    assert why(dtype=torch.float64) == ["no float64 on CUDA"]
    assert why(T=100) == ["T 100 or S 100 is below 128"]
    assert why(D=24) == ["head dimensions are not multiples of 16 from 16 to 256 (D 24, E 24)"]
    assert why(D=512) == ["head dimensions are not multiples of 16 from 16 to 256 (D 512, E 512)"]
    assert why(bias=biases.ALiBi(2)) == []
    assert why(bias=torch.zeros(256, 256)) == []
    assert why(bias=torch.zeros(256, 256, requires_grad=True)) == ["no gradient for a bias"]
    t5 = biases.T5Relative(torch.zeros(32, 2))
    assert why(bias=biases.ALiBi(2) + t5) == [
        "no generated kernel for the bias t5_relative(32 buckets, bidirectional)"
    ]


@pytest.mark.parametrize("T, S", [(256, 384), (300, 333), (20, 20)])
@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(),
        masks.Causal() & masks.Window(70),
        masks.Heads((masks.Full(), masks.Chunk(128))),
    ],
    ids=str,
)
def test_the_blocks_are_the_tiles(mask: masks.Mask, T: int, S: int) -> None:
    call = make_call(*qkv(T, S), mask=mask)
    found = block_mask(call)
    tiles = mask.tiles(call.q_positions, call.k_positions, (128, 128))
    assert torch.equal(
        found.to_dense().bool(), (tiles != masks.EMPTY).expand(found.to_dense().shape)
    )
    if T % 128 == 0 and S % 128 == 0:
        assert int(found.full_kv_num_blocks.sum()) == int((tiles == masks.FULL).sum())
    else:  # a block that sticks out is masked
        whole = (tiles == masks.FULL)[:, :, : T // 128, : S // 128]
        assert int(found.full_kv_num_blocks.sum()) == int(whole.sum())
    assert block_mask(make_call(*qkv(T, S), mask=mask)) is found
    assert block_mask(make_call(*qkv(T, S))) is None


def test_work() -> None:
    q, k, v = qkv()
    assert KERNEL.work(make_call(q, k, v, mask=masks.Causal())) == (2 * 400, 2 * 2 * 400 * 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.Causal() & masks.Window(100), masks.Full()], ids=str
)
def test_on_cuda_it_trains(mask: masks.Mask) -> None:
    q, k, v = (x.cuda().requires_grad_() for x in qkv(256, 300, H=4, D=64))
    sink = torch.randn(4, device="cuda", requires_grad=True)
    found = []
    for backend in ("flex", "reference"):
        out = regard.attend(
            q, k, v, mask=mask, sink=sink, softcap=5.0, bias=biases.ALiBi(4), backend=backend
        )
        found.append((out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v, sink))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_table_that_changed_is_read_again() -> None:
    """The block masks of rules are kept; those of tensors are not, for nobody notices what is
    written into a tensor.
    """
    q = torch.randn(1, 1, 8, 8)
    table = torch.eye(2, dtype=torch.bool)
    mask = masks.Blocks(table, 4)
    first = regard.attend(q, q, q, mask=mask, backend="flex")
    table.fill_(True)
    second = regard.attend(q, q, q, mask=mask, backend="flex")
    torch.testing.assert_close(second, regard.attend(q, q, q, mask=mask, backend="reference"))
    assert not torch.equal(first, second)
